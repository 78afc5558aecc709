//! `farpage bench codec`: how fast pages of real programs compress, and to which size. Each kind is measured
//! by itself, and all kinds as [`contents`] mixes them. The baseline is LZ4 for every page. The baseline is
//! compared with Farpage's choice of codecs, and with what the background makes denser.
//!
//! Pages are compressed and decompressed one after another. In each round every codec gets all pages. Every
//! decompressed page is compared.

use crate::Effort;
use crate::kernel::contents::{self, KINDS};
use crate::load::region::PAGE_BYTES;
use crate::measure::{Random, Sample, interleaved, ratio};
use crate::report::{Chart, Report, Table, Target};
use farpage_core::config::Codec;
use farpage_core::zswap::codec::{Decoder, Scratch, compress, decompress, densify};
use std::hint::black_box;
use std::time::Instant;

type Page = [u8; PAGE_BYTES];

/// A way in which pages are made smaller.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// By a codec, while a thread waits for the memory.
    Codec(Codec),
    /// From the output of `auto`, in the background.
    Densify,
}

const WAYS: [(&str, Way); 3] =
    [("lz4", Way::Codec(Codec::Lz4)), ("auto", Way::Codec(Codec::Auto)), ("dense", Way::Densify)];
const LZ4: usize = 0;
const AUTO: usize = 1;
/// The name of the mix, which follows the kinds.
const MIX: &str = "mix";
/// Pages that are measured only by themselves, because logs and digests are rarer than the kinds of the mix.
const DIGITS: &str = "digits";

/// One round of one codec over pages of one kind.
#[derive(Clone, Copy)]
struct Round {
    /// ns for each page.
    compress: f64,
    decompress: f64,
    /// Stored bytes divided by original bytes.
    size: f64,
}

impl Round {
    fn both(&self) -> f64 {
        self.compress + self.decompress
    }
}

/// Runs the experiment.
pub fn run(effort: Effort) -> Result<Report, String> {
    let (pages, rounds) = effort.pick((1280, 11), (160, 1));
    let mut kinds: Vec<(&str, Vec<u8>)> = Vec::new();
    for (kind, parts) in KINDS {
        kinds.push((kind, contents::collect(kind, pages * parts / 20)?));
    }
    let mix = kinds.iter().flat_map(|(_, bytes)| bytes.clone()).collect();
    kinds.push((MIX, mix));
    kinds.push((DIGITS, contents::collect(DIGITS, pages / 20)?));
    let mut report = Report::new("codec");
    report.published.push(
        "pages of real programs on a machine like this, us: LZ4 3.8 + 1.1 for 0.31 of an interpreter's objects, 7.6 + 2.1 for \
         0.59 of int64 columns, 5.6 + 1.3 for 0.36 of text; 1.1 to find that there is nothing to gain"
            .to_owned(),
    );
    let columns = ["pages", "codec", "size", "compress ns", "decompress ns", "both ns", "time to lz4's"];
    let mut table = Table::new("a page of 4 KiB", &columns);
    let mut times = WAYS.map(|(name, _)| (name.to_owned(), Vec::new()));
    for (kind, bytes) in &kinds {
        let mut pages: Vec<&Page> =
            bytes.chunks_exact(PAGE_BYTES).map(|page| page.try_into().expect("a page")).collect();
        // The mix has one kind after another, so the pages are shuffled.
        Random::new(1).shuffle(&mut pages);
        let mut scratch = Scratch::new();
        let one = |way: usize| round(WAYS[way].1, &pages, &mut scratch);
        let found: Result<Vec<Vec<Round>>, String> =
            interleaved(rounds, WAYS.len(), one).into_iter().map(|all| all.into_iter().collect()).collect();
        let found = found?;
        let of = |codec: usize, part: fn(&Round) -> f64| found[codec].iter().map(part).collect::<Vec<f64>>();
        for (codec, (name, _)) in WAYS.iter().enumerate() {
            times[codec].1.push(Sample::of(&of(codec, Round::both)).median);
            table.row(vec![
                (*kind).into(),
                (*name).into(),
                found[codec][0].size.into(),
                Sample::of(&of(codec, |round| round.compress)).into(),
                Sample::of(&of(codec, |round| round.decompress)).into(),
                Sample::of(&of(codec, Round::both)).into(),
                ratio(&of(codec, Round::both), &of(LZ4, Round::both)).into(),
            ]);
        }
        let both = Sample::of(&of(AUTO, Round::both)).median;
        let size = [LZ4, AUTO].map(|codec| found[codec][0].size);
        report.targets.extend(targets(
            kind,
            both,
            Sample::of(&of(AUTO, |round| round.compress)).median,
            size,
        ));
        if *kind == MIX {
            let speed = ratio(&of(LZ4, Round::both), &of(AUTO, Round::both)).median;
            report.targets.push(Target::at_least("mix: speed, ratio to LZ4's", 2.5, speed));
        }
    }
    report.tables.push(table);
    report.charts.push(Chart {
        title: "Compressing a page and bringing it back".to_owned(),
        unit: "ns".to_owned(),
        groups: kinds.iter().map(|(kind, _)| (*kind).to_owned()).collect(),
        series: times.into(),
    });
    report.notes.push("times are this machine's at that moment: what counts is the ratio".to_owned());
    Ok(report)
}

fn targets(kind: &str, both: f64, compress: f64, [lz4, auto]: [f64; 2]) -> Vec<Target> {
    let most =
        |what: &str, wanted: f64, found: f64| Target::at_most(format!("{kind}: {what}"), wanted, found);
    match kind {
        "heap" => vec![most("both, ns", 2_000.0, both), most("size, ratio to LZ4's", 1.2, auto / lz4)],
        "integers" => vec![most("both, ns", 800.0, both), most("size", 0.35, auto)],
        "packed" => vec![most("compress, ns", 200.0, compress)],
        MIX => vec![most("size, ratio to LZ4's", 1.0, auto / lz4)],
        _ => Vec::new(),
    }
}

/// Returns the stored form of a page: the page itself if it doesn't compress.
fn stored<'a>(codec: Codec, page: &'a Page, scratch: &'a mut Scratch) -> &'a [u8] {
    compress(codec, page, scratch, PAGE_BYTES - 1).unwrap_or(page)
}

fn round(way: Way, pages: &[&Page], scratch: &mut Scratch) -> Result<Round, String> {
    let codec = if let Way::Codec(codec) = way { codec } else { Codec::Auto };
    let each = |began: Instant| began.elapsed().as_nanos() as f64 / pages.len() as f64;
    let mut all: Vec<Vec<u8>> = pages.iter().map(|page| stored(codec, page, scratch).to_vec()).collect();
    let began = Instant::now();
    match way {
        Way::Codec(_) => {
            for page in pages {
                black_box(stored(codec, page, scratch).len());
            }
        }
        Way::Densify => {
            for bytes in &all {
                black_box(densify(bytes, scratch).map(<[u8]>::len));
            }
        }
    }
    let compress = each(began);
    if way == Way::Densify {
        for bytes in &mut all {
            if let Some(denser) = densify(bytes, scratch) {
                *bytes = denser.to_vec();
            }
        }
    }
    let (mut back, mut decoder) = ([0; PAGE_BYTES], Box::new(Decoder::new()));
    let began = Instant::now();
    for bytes in &all {
        decompress(codec, bytes, black_box(&mut back), &mut decoder)
            .map_err(|_| "a page can't be brought back".to_owned())?;
    }
    let decompress_time = each(began);
    for (bytes, page) in all.iter().zip(pages) {
        if decompress(codec, bytes, &mut back, &mut decoder).is_err() || back != **page {
            return Err("a page came back with other bytes".to_owned());
        }
    }
    let bytes: usize = all.iter().map(Vec::len).sum();
    let size = bytes as f64 / (pages.len() * PAGE_BYTES) as f64;
    Ok(Round { compress, decompress: decompress_time, size })
}
