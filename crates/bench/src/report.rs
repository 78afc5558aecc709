//! The results of an experiment: published figures, tables, targets and charts. A report is printed as text
//! and written as JSON and SVG. An experiment fills a report in; this file decides how the report looks.

use crate::measure::Sample;
use plotters::coord::Shift;
use plotters::prelude::*;
use serde_json::{Map, Value, json};
use std::fmt::Write;

/// Version of the JSON's layout.
const SCHEMA: u32 = 1;

/// The result of one experiment.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// The experiment's name.
    pub experiment: &'static str,
    /// Published figures about the change that the experiment is about, with their sources.
    pub published: Vec<String>,
    /// The measurements.
    pub tables: Vec<Table>,
    /// The figures to reach, and whether they were.
    pub targets: Vec<Target>,
    /// The measurements as pictures.
    pub charts: Vec<Chart>,
    /// Facts that a reader needs to judge the report.
    pub notes: Vec<String>,
    /// Why the experiment ended early. The measurements before are in the report.
    pub failed: Option<String>,
}

/// Rows of cells under named columns. The first columns of a row name what was measured.
#[derive(Clone, Debug)]
pub struct Table {
    /// The table's title.
    pub title: String,
    /// Names of the columns, with units.
    pub columns: Vec<String>,
    /// One cell for each column.
    pub rows: Vec<Vec<Cell>>,
}

impl Table {
    /// Makes a table without rows.
    pub fn new(title: impl Into<String>, columns: &[&str]) -> Table {
        let columns = columns.iter().map(|name| (*name).to_owned()).collect();
        Table { title: title.into(), columns, rows: Vec::new() }
    }

    /// Adds a row.
    pub fn row(&mut self, cells: Vec<Cell>) {
        assert_eq!(cells.len(), self.columns.len(), "a row of `{}` has a cell for each column", self.title);
        self.rows.push(cells);
    }
}

/// One cell.
#[derive(Clone, Debug)]
pub enum Cell {
    /// A name or another text.
    Text(String),
    /// A number, printed with at least three significant digits.
    Number(f64),
    /// A median with its extremes.
    Sample(Sample),
    /// Not measured, or undefined.
    Nothing,
}

impl From<&str> for Cell {
    fn from(text: &str) -> Cell {
        Cell::Text(text.to_owned())
    }
}
impl From<String> for Cell {
    fn from(text: String) -> Cell {
        Cell::Text(text)
    }
}
impl From<f64> for Cell {
    fn from(number: f64) -> Cell {
        Cell::Number(number)
    }
}
impl From<usize> for Cell {
    fn from(number: usize) -> Cell {
        Cell::Number(number as f64)
    }
}
impl From<Sample> for Cell {
    fn from(sample: Sample) -> Cell {
        Cell::Sample(sample)
    }
}

impl Cell {
    fn text(&self) -> String {
        match self {
            Cell::Text(text) => text.clone(),
            Cell::Number(number) => digits(*number),
            Cell::Sample(sample) => {
                format!("{} [{}..{}]", digits(sample.median), digits(sample.low), digits(sample.high))
            }
            Cell::Nothing => "-".to_owned(),
        }
    }

    fn json(&self) -> Value {
        match self {
            Cell::Text(text) => json!(text),
            Cell::Number(number) => json!(number),
            Cell::Sample(sample) => {
                json!({ "median": sample.median, "low": sample.low, "high": sample.high })
            }
            Cell::Nothing => Value::Null,
        }
    }
}

/// Formats a number with at least three significant digits. Whole numbers are in groups of three digits.
fn digits(number: f64) -> String {
    if !number.is_finite() {
        return "-".to_owned();
    }
    match number.abs() {
        size if size >= 1_000.0 => grouped(number.round() as i64),
        size if size.fract() == 0.0 => format!("{number:.0}"),
        size if size >= 100.0 => format!("{number:.0}"),
        size if size >= 10.0 => format!("{number:.1}"),
        size if size >= 1.0 => format!("{number:.2}"),
        _ => format!("{number:.3}"),
    }
}

fn grouped(number: i64) -> String {
    let digits = number.unsigned_abs().to_string();
    let mut text = if number < 0 { "-".to_owned() } else { String::new() };
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A figure to reach, and the figure that was found.
#[derive(Clone, Debug)]
pub struct Target {
    /// The name of the figure, such as `random lookups, ratio to the red-black tree, 4 threads`.
    pub what: String,
    /// The number to reach.
    pub wanted: f64,
    /// Whether more is better.
    pub better: Better,
    /// The measured figure.
    pub found: f64,
}

/// The direction that is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    /// A target to reach at least.
    More,
    /// A target to reach at most.
    Less,
}

impl Target {
    /// Makes a target of at least `wanted`.
    pub fn at_least(what: impl Into<String>, wanted: f64, found: f64) -> Target {
        Target { what: what.into(), wanted, better: Better::More, found }
    }

    /// Makes a target of at most `wanted`.
    pub fn at_most(what: impl Into<String>, wanted: f64, found: f64) -> Target {
        Target { what: what.into(), wanted, better: Better::Less, found }
    }

    /// Whether the target was reached.
    pub fn is_met(&self) -> bool {
        match self.better {
            Better::More => self.found >= self.wanted,
            Better::Less => self.found <= self.wanted,
        }
    }

    fn line(&self) -> String {
        let (verdict, sign) = match (self.is_met(), self.better) {
            (true, Better::More) => ("met   ", "at least"),
            (true, Better::Less) => ("met   ", "at most"),
            (false, Better::More) => ("MISSED", "at least"),
            (false, Better::Less) => ("MISSED", "at most"),
        };
        format!("{verdict}  {}: {sign} {}, found {}", self.what, digits(self.wanted), digits(self.found))
    }
}

/// Groups of bars: one group for each place on the x axis, one bar in it for each series.
#[derive(Clone, Debug)]
pub struct Chart {
    /// The chart's title.
    pub title: String,
    /// Label of the y axis, with its unit.
    pub unit: String,
    /// Names of the groups.
    pub groups: Vec<String>,
    /// Name of each series, with one value for each group.
    pub series: Vec<(String, Vec<f64>)>,
}

impl Report {
    /// Makes an empty report of this experiment.
    pub fn new(experiment: &'static str) -> Report {
        Report { experiment, ..Report::default() }
    }

    /// Returns the report as text for a terminal.
    pub fn text(&self) -> String {
        let mut text = format!("{}\n", self.experiment);
        for line in &self.published {
            let _ = writeln!(text, "  published: {line}");
        }
        for table in &self.tables {
            text += "\n";
            text += &table_text(table);
        }
        if !self.targets.is_empty() {
            text += "\n";
        }
        for target in &self.targets {
            let _ = writeln!(text, "  {}", target.line());
        }
        if !self.notes.is_empty() {
            text += "\n";
        }
        for note in &self.notes {
            let _ = writeln!(text, "  note: {note}");
        }
        if let Some(why) = &self.failed {
            let _ = writeln!(text, "\n  UNFINISHED: {why}");
        }
        text
    }

    /// Returns the report as JSON for programs.
    pub fn json(&self) -> Value {
        let tables: Vec<Value> = self
            .tables
            .iter()
            .map(|table| {
                let rows: Vec<Value> = table
                    .rows
                    .iter()
                    .map(|row| {
                        let cells = table.columns.iter().zip(row);
                        cells.map(|(name, cell)| (name.clone(), cell.json())).collect::<Map<_, _>>().into()
                    })
                    .collect();
                json!({ "title": table.title, "columns": table.columns, "rows": rows })
            })
            .collect();
        let targets: Vec<Value> = self
            .targets
            .iter()
            .map(|target| {
                json!({
                    "what": target.what,
                    "wanted": target.wanted,
                    "better": match target.better { Better::More => "more", Better::Less => "less" },
                    "found": target.found,
                    "met": target.is_met(),
                })
            })
            .collect();
        json!({
            "schema": SCHEMA,
            "experiment": self.experiment,
            "published": self.published,
            "tables": tables,
            "targets": targets,
            "notes": self.notes,
            "failed": self.failed,
        })
    }

    /// Returns the charts as one SVG, one chart below another.
    pub fn svg(&self) -> Result<String, String> {
        let mut svg = String::new();
        let height = CHART_PIXELS.1 * self.charts.len().max(1) as u32;
        draw(&self.charts, &mut svg, (CHART_PIXELS.0, height))?;
        Ok(svg)
    }
}

fn table_text(table: &Table) -> String {
    let cells: Vec<Vec<String>> = table.rows.iter().map(|row| row.iter().map(Cell::text).collect()).collect();
    let width = |column: usize| {
        let cells = cells.iter().map(|row| row[column].chars().count());
        cells.chain([table.columns[column].chars().count()]).max().unwrap_or(0)
    };
    // Names are left-aligned, numbers right-aligned.
    let is_name = |column: usize| table.rows.iter().all(|row| matches!(row[column], Cell::Text(_)));
    let mut text = format!("  {}\n", table.title);
    for row in std::iter::once(&table.columns).chain(&cells) {
        let mut line = String::from("   ");
        for (column, cell) in row.iter().enumerate() {
            let width = width(column);
            let _ = if is_name(column) {
                write!(line, " {cell:<width$}")
            } else {
                write!(line, " {cell:>width$}")
            };
            line.push(' ');
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

const CHART_PIXELS: (u32, u32) = (900, 420);
/// Height of a chart relative to its highest bar. The legend stands above all bars.
const HEADROOM: f64 = 1.25;

fn draw(charts: &[Chart], svg: &mut String, size: (u32, u32)) -> Result<(), String> {
    let root = SVGBackend::with_string(svg, size).into_drawing_area();
    root.fill(&WHITE).map_err(|error| error.to_string())?;
    let parts = root.split_evenly((charts.len().max(1), 1));
    for (chart, area) in charts.iter().zip(&parts) {
        draw_chart(chart, area).map_err(|error| format!("{}: {error}", chart.title))?;
    }
    root.present().map_err(|error| error.to_string())
}

type DrawError = DrawingAreaErrorKind<std::io::Error>;

fn draw_chart(chart: &Chart, area: &DrawingArea<SVGBackend<'_>, Shift>) -> Result<(), DrawError> {
    // A value that is no number has no bar.
    let height = |value: f64| if value.is_finite() { value } else { 0.0 };
    let values = chart.series.iter().flat_map(|(_, values)| values);
    let top = values.fold(0.0_f64, |top, value| top.max(height(*value)));
    let groups = chart.groups.len().max(1);
    let mut context = ChartBuilder::on(area)
        .caption(&chart.title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(32)
        .y_label_area_size(72)
        .build_cartesian_2d(0.0..groups as f64, 0.0..(top * HEADROOM).max(f64::MIN_POSITIVE))?;
    // Labels stand in the middle of their group.
    let name_of = |x: &f64| {
        let is_middle = (x.fract() - 0.5).abs() < 0.01;
        chart.groups.get(x.floor() as usize).filter(|_| is_middle).cloned().unwrap_or_default()
    };
    context
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(groups * 2 + 1)
        .x_label_formatter(&name_of)
        .y_label_formatter(&|y| digits(*y))
        .y_desc(&chart.unit)
        .draw()?;
    let bar = 0.8 / chart.series.len().max(1) as f64;
    for (at, (name, values)) in chart.series.iter().enumerate() {
        let color = Palette99::pick(at).to_rgba();
        let left = |group: usize| group as f64 + 0.1 + at as f64 * bar;
        let bars = values.iter().enumerate().map(|(group, value)| {
            Rectangle::new([(left(group), 0.0), (left(group) + bar * 0.92, height(*value))], color.filled())
        });
        context
            .draw_series(bars)?
            .label(name)
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], color.filled()));
    }
    context
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let mut table = Table::new("lookups", &["structure", "ns", "ratio"]);
        table.row(vec!["tree".into(), 123.4.into(), Cell::Nothing]);
        table.row(vec![
            "ours".into(),
            Sample { median: 12_345.6, low: 1.0, high: 2.5 }.into(),
            0.1234.into(),
        ]);
        Report {
            published: vec!["+420 %".to_owned()],
            tables: vec![table],
            targets: vec![Target::at_least("speed", 3.0, 2.9), Target::at_most("bytes", 16.0, 16.0)],
            charts: vec![Chart {
                title: "lookups".to_owned(),
                unit: "ns".to_owned(),
                groups: vec!["2".to_owned(), "2,000".to_owned()],
                series: vec![("tree".to_owned(), vec![1.0, 2.0]), ("ours".to_owned(), vec![0.5, 0.6])],
            }],
            notes: vec!["a shared machine".to_owned()],
            ..Report::new("extents")
        }
    }

    #[test]
    fn text_has_aligned_columns_and_says_what_was_missed() {
        let text = report().text();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[4], "    structure                ns  ratio");
        assert_eq!(lines[5], "    tree                    123      -");
        assert_eq!(lines[6], "    ours       12,346 [1..2.50]  0.123");
        assert!(text.contains("MISSED  speed: at least 3, found 2.90"), "{text}");
        assert!(text.contains("met     bytes: at most 16, found 16"), "{text}");
    }

    #[test]
    fn json_has_rows_by_column_and_targets() {
        let json = report().json();
        assert_eq!(json["tables"][0]["rows"][1]["ratio"], 0.1234);
        assert_eq!(json["tables"][0]["rows"][0]["ratio"], Value::Null);
        assert_eq!(json["targets"][0]["met"], false);
        assert_eq!(json["schema"], SCHEMA);
        assert_eq!(json["failed"], Value::Null);
    }

    /// A load that failed late took the figures of all loads before with it.
    #[test]
    fn report_of_an_experiment_that_failed_has_its_figures_and_the_reason() {
        let report = Report { failed: Some("the disk is full".to_owned()), ..report() };
        let json = report.json();
        assert_eq!(json["failed"], "the disk is full");
        assert_eq!(json["tables"][0]["rows"][1]["ratio"], 0.1234);
        let text = report.text();
        assert!(text.contains("12,346") && text.contains("UNFINISHED: the disk is full"), "{text}");
    }

    #[test]
    fn svg_has_a_bar_for_each_value_and_names() {
        let svg = report().svg().unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{svg}");
        assert!(svg.contains("tree") && svg.contains("2,000") && svg.contains("lookups"), "{svg}");
        assert!(svg.matches("<rect").count() >= 4, "{svg}");
    }

    /// A ratio to a speed of zero made the plot's axis endless.
    #[test]
    fn svg_has_no_bar_for_what_is_no_number_and_may_have_no_groups() {
        let chart = |values: Vec<f64>| Chart {
            title: "speeds".to_owned(),
            unit: "ratio".to_owned(),
            groups: values.iter().map(|_| "load".to_owned()).collect(),
            series: vec![("ours".to_owned(), values)],
        };
        let charts = vec![chart(vec![f64::INFINITY, f64::NAN, 2.0]), chart(vec![])];
        let svg = Report { charts, ..Report::new("kernel") }.svg().unwrap();
        assert!(svg.contains("speeds") && !svg.contains("NaN"), "{svg}");
    }
}
