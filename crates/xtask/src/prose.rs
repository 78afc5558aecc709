//! Sentences: where they begin and end in comments and documents, how long they are, and words that hide
//! their subject.

/// Phrases that stand where a noun should. Each is looked for at word borders, in lower case.
const BANNED: [&str; 5] = ["so many", "so long", "as ever", "whoever", "such a one"];

/// Some lines of prose that belong together: a paragraph, or an item of a list.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Paragraph {
    /// Line number of the first line, from 1.
    pub line: usize,
    /// The text, on one line.
    pub text: String,
}

/// Paragraphs of a Markdown document. Headings, tables, fenced blocks and HTML are left out.
pub fn of_document(text: &str) -> Vec<Paragraph> {
    let mut collected = Collected::default();
    let mut is_fenced = false;
    for (at, line) in text.lines().enumerate() {
        let trimmed = line.trim();
        if trimmed.starts_with("```") {
            is_fenced = !is_fenced;
            collected.end();
        } else if is_fenced || trimmed.is_empty() || trimmed.starts_with(['#', '|', '<']) {
            collected.end();
        } else if collected.last.text.is_empty() && line.starts_with("    ") && !begins_item(trimmed) {
            // Indented code.
        } else {
            if begins_item(trimmed) {
                collected.end();
            }
            collected.add(at + 1, trimmed);
        }
    }
    collected.all()
}

/// Paragraphs of the comments of a Rust file.
pub fn of_comments(text: &str) -> Vec<Paragraph> {
    let mut collected = Collected::default();
    let (mut marker_before, mut is_fenced) = ("", false);
    for (at, line) in text.lines().enumerate() {
        let Some((marker, comment)) = comment(line) else {
            collected.end();
            is_fenced = false;
            continue;
        };
        if marker != marker_before {
            collected.end();
        }
        marker_before = marker;
        if comment.starts_with("```") {
            is_fenced = !is_fenced;
            collected.end();
        } else if is_fenced || comment.is_empty() || comment.starts_with(['#', '|']) {
            collected.end();
        } else {
            if begins_item(comment) {
                collected.end();
            }
            collected.add(at + 1, comment);
        }
    }
    collected.all()
}

/// The marker and the text of a line that is all comment.
pub fn comment(line: &str) -> Option<(&str, &str)> {
    let line = line.trim();
    ["///", "//!", "//"].iter().find_map(|marker| Some((*marker, line.strip_prefix(marker)?.trim())))
}

/// Whether a line begins an item of a list.
fn begins_item(line: &str) -> bool {
    let digits = line.trim_start_matches(|c: char| c.is_ascii_digit());
    line.starts_with("- ") || line.starts_with("* ") || digits.len() < line.len() && digits.starts_with(". ")
}

/// Paragraphs so far, the last of them unfinished.
#[derive(Default)]
struct Collected {
    done: Vec<Paragraph>,
    last: Paragraph,
}

impl Collected {
    fn add(&mut self, number: usize, line: &str) {
        if self.last.text.is_empty() {
            self.last.line = number;
        } else {
            self.last.text.push(' ');
        }
        self.last.text.push_str(line);
    }

    fn end(&mut self) {
        if !self.last.text.is_empty() {
            self.done.push(std::mem::take(&mut self.last));
        }
    }

    fn all(mut self) -> Vec<Paragraph> {
        self.end();
        self.done
    }
}

/// The sentences of a paragraph. A code span counts as one word.
pub fn sentences(text: &str) -> Vec<String> {
    let text = without_spans(text);
    let mut sentences = vec![String::new()];
    let mut words = text.split_whitespace().peekable();
    while let Some(word) = words.next() {
        let sentence = sentences.last_mut().expect("there is one always");
        if !sentence.is_empty() {
            sentence.push(' ');
        }
        sentence.push_str(word);
        let is_last = word.trim_end_matches(['"', ')', '*', '_']).ends_with(['.', '!', '?']);
        let is_abbreviated = ["e.g.", "i.e.", "vs.", "cf."].contains(&word);
        let begins = |next: &&str| next.starts_with(|c: char| !c.is_lowercase());
        if is_last && !is_abbreviated && words.peek().is_some_and(begins) {
            sentences.push(String::new());
        }
    }
    sentences.retain(|sentence| !sentence.is_empty());
    sentences
}

/// Replaces each code span by one word.
fn without_spans(text: &str) -> String {
    let mut parts = text.split('`');
    let mut replaced = parts.next().unwrap_or_default().to_owned();
    while let (Some(_span), Some(after)) = (parts.next(), parts.next()) {
        replaced.push_str("Code");
        replaced.push_str(after);
    }
    replaced
}

/// How many words a sentence has.
pub fn word_count(sentence: &str) -> usize {
    sentence.split_whitespace().filter(|word| word.contains(char::is_alphanumeric)).count()
}

/// The banned phrases of a text.
pub fn banned(text: &str) -> Vec<&'static str> {
    let words: Vec<String> =
        without_spans(text).split_whitespace().map(|word| bare(word).to_lowercase()).collect();
    let text = format!(" {} ", words.join(" "));
    BANNED.into_iter().filter(|phrase| text.contains(&format!(" {phrase} "))).collect()
}

/// A word without punctuation around it.
fn bare(word: &str) -> &str {
    word.trim_matches(|c: char| !c.is_alphanumeric())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_end_where_the_next_one_begins() {
        let found = sentences(
            "The keeper evicts, e.g. 64 pages. `Pager::fault` locks. (It waits.) See lib.rs for more.",
        );
        assert_eq!(found.len(), 4, "{found:?}");
        assert_eq!(word_count(&found[1]), 2, "a code span is one word");
    }

    #[test]
    fn tables_headings_and_fences_are_no_prose() {
        let text =
            "    code. X\n# Head. Line\n\nOne.\nTwo.\n\n| a. B | c |\n\n```\nx. Y\n```\n- item\n- item two\n";
        let lines: Vec<usize> = of_document(text).iter().map(|paragraph| paragraph.line).collect();
        assert_eq!(lines, [4, 12, 13]);
    }

    #[test]
    fn comments_of_different_kinds_are_different_paragraphs() {
        let text = "//! Head\n//! goes on.\n\n/// Doc.\n// Note.\nlet x = 1; // beside code\n/// ```\n/// code\n/// ```\n";
        let found = of_comments(text);
        assert_eq!(
            found.iter().map(|p| p.text.as_str()).collect::<Vec<_>>(),
            ["Head goes on.", "Doc.", "Note."]
        );
    }

    #[test]
    fn banned_phrases_are_found_at_word_borders() {
        assert_eq!(banned("So long, it is looked for."), ["so long"]);
        assert_eq!(banned("also longer, `so long`"), [""; 0]);
    }
}
