//! Tests that the manual pages and docs/user/options.md match the options.
//!
//! `make man` writes the manual pages anew.

use crate::options::CommandLine;
use clap::{Command, CommandFactory};
use std::path::{Path, PathBuf};

/// Subcommands that have a manual page of their own, and the page's name.
const PAGES: [(&str, &str); 4] = [
    ("run", "farpage-run"),
    ("show", "farpage-show"),
    ("doctor", "farpage-doctor"),
    ("bench", "farpage-bench"),
];

fn documents() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs")
}

/// Returns the subcommand under the name that its manual page has, as git's and cargo's have.
fn subcommand((name, page): (&str, &'static str)) -> Command {
    let mut all = CommandLine::command();
    all.build();
    let found = all.find_subcommand(name).expect("a subcommand of the command line").clone();
    found.name(page).bin_name(format!("farpage {name}")).version(env!("CARGO_PKG_VERSION"))
}

fn manual_page(command: Command) -> String {
    let mut page = Vec::new();
    clap_mangen::Man::new(command).render(&mut page).expect("a vector takes every byte");
    String::from_utf8(page).expect("the options are text")
}

#[test]
fn manual_pages_are_those_of_the_command_line() {
    let directory = documents().join("man");
    let main = ("farpage.1".to_owned(), manual_page(CommandLine::command()));
    let others = PAGES.map(|page| (format!("{}.1", page.1), manual_page(subcommand(page))));
    for (file, page) in [main].into_iter().chain(others) {
        let path = directory.join(&file);
        if std::env::var_os("WRITE_MANUAL").is_some() {
            std::fs::create_dir_all(&directory).unwrap();
            std::fs::write(&path, &page).unwrap();
        }
        let kept = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(kept == page, "docs/man/{file} isn't what the options say; `make man` writes it anew");
    }
}

#[test]
fn page_of_options_has_each_option_and_its_variable() {
    let text = std::fs::read_to_string(documents().join("user/options.md")).unwrap();
    let command = subcommand(PAGES[0]);
    let shown = command.get_arguments().filter(|option| !option.is_hide_set());
    for option in shown.filter_map(|option| Some((option.get_long()?, option.get_env()))) {
        let (long, variable) = option;
        if ["help", "version"].contains(&long) {
            continue;
        }
        let row = text.lines().find(|line| line.starts_with(&format!("| `--{long}")));
        let row = row.unwrap_or_else(|| panic!("docs/user/options.md has no row for --{long}"));
        let variable = variable.map(|name| format!("`{}`", name.to_str().expect("a name is text")));
        assert!(variable.is_none_or(|name| row.contains(&name)), "the row of --{long} lacks its variable");
    }
}
