//! Rules of documents: width, sentences, paths and links that lead somewhere, and a book that has every page.

use crate::{File, Finding, WIDTH, prose};

/// Words of a sentence at most.
const SENTENCE_WORDS_MAX: usize = 35;
/// Words of a sentence on average at most, in one document.
const SENTENCE_WORDS_MEAN: usize = 18;

/// All findings in one document.
pub fn check(file: &File, files: &[File]) -> Vec<Finding> {
    let at = |line, what| Finding { file: file.path.clone(), line, what };
    let mut findings = Vec::new();
    findings.extend(wide_lines(&file.text).map(|line| at(line, format!("wider than {WIDTH} columns"))));
    // The history of changes names files that are gone.
    if file.path != "CHANGELOG.md" {
        let exists = |path: &str| exists(path, files);
        findings.extend(
            dead_paths(&file.text, exists).map(|(line, path)| at(line, format!("no such path: {path}"))),
        );
    }
    let folder = file.path.rsplit_once('/').map_or("", |(folder, _)| folder);
    for (line, target) in links(&file.text) {
        let path = joined(folder, target);
        if !exists(&path, files) {
            findings.push(at(line, format!("the link leads nowhere: {target}")));
        }
    }
    if file.path == "docs/SUMMARY.md" {
        let pages = files.iter().map(|file| file.path.as_str()).filter(|path| is_page(path));
        let missing =
            pages.filter(|page| !links(&file.text).iter().any(|(_, target)| joined("docs", target) == *page));
        findings.extend(missing.map(|page| at(1, format!("the book has no chapter {page}"))));
    }
    let (mut sentences, mut words) = (0, 0);
    for paragraph in prose::of_document(&file.text) {
        for sentence in prose::sentences(&paragraph.text) {
            let count = prose::word_count(&sentence);
            sentences += 1;
            words += count;
            if count > SENTENCE_WORDS_MAX {
                let begin: String = sentence.chars().take(60).collect();
                findings.push(at(paragraph.line, format!("a sentence of {count} words: {begin} ...")));
            }
        }
    }
    if words > sentences * SENTENCE_WORDS_MEAN {
        findings.push(at(1, format!("more than {SENTENCE_WORDS_MEAN} words a sentence on average")));
    }
    findings
}

/// Numbers of lines that are too wide. Tables and code can't be filled, nor can a single long word, nor a
/// chapter of the book, which is one link.
fn wide_lines(text: &str) -> impl Iterator<Item = usize> {
    let mut is_fenced = false;
    text.lines().enumerate().filter_map(move |(at, line)| {
        is_fenced ^= line.trim_start().starts_with("```");
        let is_code = is_fenced || line.starts_with("    ") && !line.trim_start().starts_with("- ");
        let is_chapter = line.trim_start().starts_with("- [") && line.ends_with(')');
        let is_single = line.split_whitespace().count() <= 2;
        let can_fill = !is_code && !is_chapter && !is_single && !line.starts_with(['|', '<']);
        (can_fill && line.chars().count() > WIDTH).then_some(at + 1)
    })
}

/// Code spans that look like a path of the checkout and are none.
fn dead_paths(text: &str, exists: impl Fn(&str) -> bool) -> impl Iterator<Item = (usize, &str)> {
    let spans = text.lines().enumerate().flat_map(|(at, line)| {
        line.split('`').skip(1).step_by(2).map(move |span| (at + 1, span.trim_end_matches('/')))
    });
    spans.filter(move |(_, span)| {
        let is_plain = span.chars().all(|c| c.is_ascii_alphanumeric() || "_-./".contains(c));
        let is_ours =
            ["crates/", "tests/", "docs/", "demo/", "fuzz/"].iter().any(|top| span.starts_with(top));
        is_plain && is_ours && !exists(span)
    })
}

/// Targets of links within the checkout.
fn links(text: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    for (at, line) in text.lines().enumerate() {
        for part in line.split("](").skip(1) {
            let target = part.split([')', '#']).next().unwrap_or_default();
            if !target.is_empty() && !target.contains("://") {
                found.push((at + 1, target.trim_end_matches('/')));
            }
        }
    }
    found
}

/// A path from the top, given one from a folder.
fn joined(folder: &str, target: &str) -> String {
    let mut parts: Vec<&str> = folder.split('/').filter(|part| !part.is_empty()).collect();
    for part in target.split('/') {
        match part {
            ".." => drop(parts.pop()),
            "." | "" => {}
            _ => parts.push(part),
        }
    }
    parts.join("/")
}

/// Whether the book must have this file.
fn is_page(path: &str) -> bool {
    path.starts_with("docs/") && path.ends_with(".md") && path != "docs/SUMMARY.md"
}

/// Whether a file or a folder is in the checkout.
fn exists(path: &str, files: &[File]) -> bool {
    let folder = format!("{path}/");
    files.iter().any(|file| file.path == path || file.path.starts_with(&folder))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(text: &str) -> Vec<String> {
        let file = |path: &str, text: &str| File { path: path.to_owned(), text: text.to_owned() };
        let files = [file("docs/a.md", text), file("crates/core/src/lib.rs", "")];
        check(&files[0], &files)
            .into_iter()
            .map(|finding| format!("{}: {}", finding.line, finding.what))
            .collect()
    }

    #[test]
    fn document_in_order_has_no_finding() {
        let wide_table = format!("| {} |", "x ".repeat(80));
        let text =
            format!("# A\n\nSee [the core](../crates/core) and `crates/core/src/lib.rs`.\n\n{wide_table}\n");
        assert_eq!(findings(&text), [""; 0]);
    }

    #[test]
    fn planted_violations_are_found() {
        assert_eq!(findings(&"word ".repeat(30)).len(), 2, "wide, and long on average");
        let long = format!("{}\n{}.", "word ".repeat(18), "word ".repeat(18));
        assert!(findings(&long)[0].starts_with("1: a sentence of 36 words"), "{:?}", findings(&long));
        assert_eq!(findings("See `crates/core/src/gone.rs`."), ["1: no such path: crates/core/src/gone.rs"]);
        assert_eq!(findings("\nSee [it](gone.md)."), ["2: the link leads nowhere: gone.md"]);
    }

    #[test]
    fn page_that_is_not_in_the_book_is_found() {
        let file = |path: &str, text: &str| File { path: path.to_owned(), text: text.to_owned() };
        let files =
            [file("docs/SUMMARY.md", "- [A](user/a.md)"), file("docs/user/a.md", ""), file("docs/b.md", "")];
        let found = check(&files[0], &files);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].what, "the book has no chapter docs/b.md");
    }
}
