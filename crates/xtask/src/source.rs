//! Rules of Rust files: width of comments, a head, functions that fit a screen, and comments that name their
//! subject.

use crate::{File, Finding, WIDTH, prose};
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

/// Lines of a function at most, its signature included.
const FUNCTION_LINES_MAX: usize = 70;

/// Functions that are longer, and are to be split: file and name. A name whose function isn't too long is a
/// finding.
const LONG_FUNCTIONS: [(&str, &str); 8] = [
    ("crates/bench/src/readahead/cases.rs", "cases"),
    ("crates/core/src/check.rs", "all"),
    ("crates/core/src/zswap/codec/text.rs", "simply_decoded"),
    ("crates/core/src/zswap/pool/tests/model.rs", "apply"),
    ("crates/runtime/src/session/last.rs", "farpage_last"),
    ("crates/runtime/src/engine/start.rs", "build_in"),
    ("crates/runtime/tests/guard/main.rs", "times_limits_and_what_the_machine_is"),
    ("crates/sim/src/space.rs", "new"),
];

/// All findings in one Rust file.
pub fn check(file: &File) -> Vec<Finding> {
    let at = |line, what| Finding { file: file.path.clone(), line, what };
    let mut findings = Vec::new();
    findings.extend(wide_lines(&file.text).map(|line| at(line, format!("wider than {WIDTH} columns"))));
    if !has_head(&file.text) {
        findings.push(at(1, "no head: a file begins with `//!` and says its job".to_owned()));
    }
    for paragraph in prose::of_comments(&file.text) {
        for phrase in prose::banned(&paragraph.text) {
            findings.push(at(paragraph.line, format!("\"{phrase}\" hides its subject")));
        }
    }
    match syn::parse_file(&file.text) {
        Ok(parsed) => {
            let mut functions = Functions::default();
            functions.visit_file(&parsed);
            let mut excepted: Vec<&str> = LONG_FUNCTIONS
                .into_iter()
                .filter_map(|(path, name)| (path == file.path).then_some(name))
                .collect();
            for Long { name, line, lines } in functions.long {
                match excepted.iter().position(|excepted| *excepted == name) {
                    Some(at) => drop(excepted.swap_remove(at)),
                    None => findings.push(at(line, format!("a function of {lines} lines"))),
                }
            }
            findings
                .extend(excepted.iter().map(|name| at(1, format!("`{name}` is no long function any more"))));
        }
        Err(error) => findings.push(at(error.span().start().line, format!("can't be parsed: {error}"))),
    }
    findings
}

/// Numbers of lines of comments that are too wide. Tables and fenced blocks can't be filled. The width of
/// code is rustfmt's affair.
fn wide_lines(text: &str) -> impl Iterator<Item = usize> {
    let mut is_fenced = false;
    text.lines().enumerate().filter_map(move |(at, line)| {
        let comment = prose::comment(line).map(|(_, comment)| comment);
        is_fenced = comment.is_some_and(|comment| is_fenced != comment.starts_with("```"));
        let can_fill = comment.is_some_and(|comment| !is_fenced && !comment.starts_with('|'));
        (can_fill && line.chars().count() > WIDTH).then_some(at + 1)
    })
}

/// Whether the file's first line that isn't an attribute is its head.
fn has_head(text: &str) -> bool {
    let first = text.lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with("#!["));
    first.is_some_and(|line| line.starts_with("//!"))
}

/// A function that is too long.
struct Long {
    name: String,
    line: usize,
    lines: usize,
}

/// Collects the functions of a file that are too long.
#[derive(Default)]
struct Functions {
    long: Vec<Long>,
}

impl Functions {
    fn look(&mut self, signature: &syn::Signature, block: &syn::Block) {
        let (first, last) = (signature.span().start().line, block.span().end().line);
        let lines = last + 1 - first;
        if lines > FUNCTION_LINES_MAX {
            self.long.push(Long { name: signature.ident.to_string(), line: first, lines });
        }
    }
}

impl<'ast> Visit<'ast> for Functions {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.look(&item.sig, &item.block);
        visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.look(&item.sig, &item.block);
        visit::visit_impl_item_fn(self, item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(text: &str) -> Vec<String> {
        let file = File { path: "a.rs".to_owned(), text: text.to_owned() };
        check(&file).into_iter().map(|finding| format!("{}: {}", finding.line, finding.what)).collect()
    }

    #[test]
    fn file_in_order_has_no_finding() {
        let literal = format!("const TEXT: &str = \"{}\";", "long ".repeat(30));
        assert_eq!(findings(&format!("#![no_std]\n//! A head.\n\n/// A text.\n{literal}\n")), [""; 0]);
    }

    #[test]
    fn planted_violations_are_found() {
        assert_eq!(findings("fn main() {}\n"), ["1: no head: a file begins with `//!` and says its job"]);
        let wide = format!("//! A head.\n// {}\n", "word ".repeat(30));
        assert_eq!(findings(&wide), ["2: wider than 110 columns"]);
        let table =
            format!("//! A head.\n// | {} |\n// ```\n// {}\n// ```\n", "a ".repeat(60), "b ".repeat(60));
        assert_eq!(findings(&table), [""; 0]);
        let banned = "//! A head.\n\n/// So many pages in a batch.\nconst PAGES: usize = 64;\n";
        assert_eq!(findings(banned), ["3: \"so many\" hides its subject"]);
        let long =
            format!("//! A head.\nimpl A {{\n    fn f() {{\n{}    }}\n}}\n", "        g();\n".repeat(70));
        assert_eq!(findings(&long), ["3: a function of 72 lines"]);
        let (path, name) = LONG_FUNCTIONS[0];
        let file = File { path: path.to_owned(), text: format!("//! A head.\nfn {name}() {{}}\n") };
        assert_eq!(check(&file)[0].what, format!("`{name}` is no long function any more"));
    }
}
