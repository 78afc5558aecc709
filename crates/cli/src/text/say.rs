//! Farpage's own messages, on standard error, each line with the prefix `farpage: `. clap's own
//! texts have the prefix only in their first line. The program's output is never touched. A reader
//! that is gone is no error.

use crate::host::sys;
use crate::text::failure::Failure;
use serde_json::Value;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::time::Duration;

/// Characters of a name that are printed; the rest is cut. A file's name has at most 255 bytes.
const NAME_CHARS_MAX: usize = 255;

/// Prints a message of one line.
pub fn line(text: &str) {
    lines(&[text]);
}

/// Prints a message of several lines. Each line has the prefix.
pub fn lines<T: AsRef<str>>(texts: &[T]) {
    let lines: String = texts.iter().map(|text| format!("farpage: {}\n", visible(text.as_ref()))).collect();
    write(&lines);
}

/// Prints a message that has its prefixes already.
pub fn plainly(text: &str) {
    let lines: String = text.split('\n').map(|line| visible(line) + "\n").collect();
    write(&lines);
}

/// Prints what the user asked for: help, a table. A disk without free space is an error; a reader that has
/// gone away (`| head`) is none.
pub fn to_stdout(text: &str) -> Result<(), Failure> {
    match write_all(&mut std::io::stdout().lock(), text) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::new(format!("standard output can't be written: {error}"))
                .fix("free some room where it goes, or send it elsewhere: farpage ... > FILE"))
        }
        _ => Ok(()),
    }
}

/// Returns a name for use in a line: one line, no control characters, no invisible characters, bounded
/// length. An escaped character begins with a backslash.
pub fn harmless(name: &str) -> String {
    let mut text = String::new();
    for (at, character) in name.chars().enumerate() {
        match character {
            _ if at == NAME_CHARS_MAX => {
                text.push_str("...");
                break;
            }
            '"' | '\'' => text.push(character),
            _ => text.extend(character.escape_debug()),
        }
    }
    text
}

/// Returns a text as one line in which a terminal shows every character: control characters and invisible
/// characters are escaped, and nothing else. Names and values from outside can hold any character.
pub fn visible(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for character in text.chars() {
        if is_visible(character) { line.push(character) } else { line.extend(character.escape_debug()) }
    }
    line
}

/// Whether a terminal shows the character, and obeys none.
pub fn is_visible(character: char) -> bool {
    matches!(character, '"' | '\'' | '\\') || character.escape_debug().len() == 1
}

/// Returns a JSON text that a terminal can show: JSON itself leaves DEL, C1 controls and invisible
/// characters as they are.
pub fn json(value: &Value) -> String {
    let mut text = String::new();
    for character in format!("{value:#}").chars() {
        let is_harmless = character == '\n' || character.is_ascii_graphic() || character == ' ';
        if is_harmless || !character.is_ascii() && character.escape_debug().len() == 1 {
            text.push(character);
        } else {
            let mut units = [0; 2];
            character.encode_utf16(&mut units).iter().for_each(|unit| text += &format!("\\u{unit:04x}"));
        }
    }
    text.push('\n');
    text
}

/// Writes in one write, so that lines of the program don't get in between.
fn write(text: &str) {
    let _ = write_all(&mut std::io::stderr(), text);
}

/// Longest wait for a reader to make room.
const PATIENCE: Duration = Duration::from_secs(1);

/// Writes all of the text. The program may have made the pipe non-blocking, for itself and for Farpage: then
/// a full pipe is waited for, for a bounded time.
pub fn write_all(output: &mut (impl Write + AsFd), text: &str) -> io::Result<()> {
    let mut rest = text.as_bytes();
    while !rest.is_empty() {
        match output.write(rest) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => rest = &rest[count..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if !sys::wait_for_room(output.as_fd(), PATIENCE) {
                    return Err(error);
                }
            }
            Err(error) => return Err(error),
        }
    }
    output.flush()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::fs::File;
    use std::io::Read;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::OpenOptionsExt;

    /// asyncio makes the pipe of standard error non-blocking, and `--stats -` was cut where the pipe was
    /// full.
    #[test]
    fn pipe_that_does_not_block_is_waited_for() {
        let (mut reader, blocking) = io::pipe().unwrap();
        let path = format!("/proc/self/fd/{}", blocking.as_raw_fd());
        // Another open file of the same pipe, with flags of its own.
        let mut writer = File::options().write(true).custom_flags(libc::O_NONBLOCK).open(path).unwrap();
        drop(blocking);
        let text = "x".repeat(1 << 20);
        let read = std::thread::spawn(move || {
            let mut found = String::new();
            reader.read_to_string(&mut found).map(|_| found.len())
        });
        write_all(&mut writer, &text).unwrap();
        drop(writer);
        assert_eq!(read.join().unwrap().unwrap(), 1 << 20);
    }

    /// A program's name may hold an escape sequence, which must not reach the terminal.
    #[test]
    fn name_is_one_printable_line_of_bounded_length() {
        for (name, text) in [
            ("/var/tmp/ä swap's \"file\"", "/var/tmp/ä swap's \"file\""),
            ("\x1b]0;title\x07", "\\u{1b}]0;title\\u{7}"),
            ("two\nlines\r", "two\\nlines\\r"),
            ("\u{202e}\u{9b}31m\x7f", "\\u{202e}\\u{9b}31m\\u{7f}"),
            ("back\\slash", "back\\\\slash"),
        ] {
            assert_eq!(harmless(name), text);
        }
        assert_eq!(harmless(&"é".repeat(300)), format!("{}...", "é".repeat(NAME_CHARS_MAX)));
    }

    /// A path printed an escape sequence, and a message went on in a line of the path's own.
    #[test]
    fn visible_text_is_one_line_and_keeps_what_a_terminal_shows() {
        for (text, line) in [
            ("\x1b[31mred\nfarpage: all is well", "\\u{1b}[31mred\\nfarpage: all is well"),
            ("\u{9b}31m\u{202e}\x7f\t", "\\u{9b}31m\\u{202e}\\u{7f}\\t"),
            (r#"sh -c 'echo "ä" \'"#, r#"sh -c 'echo "ä" \'"#),
        ] {
            assert_eq!(visible(text), line);
            assert_eq!(visible(line), line);
        }
    }

    #[test]
    fn json_says_the_same_without_what_a_terminal_would_obey() {
        let value = json!({ "name": "\x1b\x7f\u{9b}2J\u{202e}\u{e0001}ä\"\\", "number": 7 });
        let text = json(&value);
        assert!(text.ends_with("}\n") && text.contains("ä"), "{text}");
        assert!(!text.chars().any(|c| c != '\n' && c != 'ä' && !(' '..='~').contains(&c)), "{text:?}");
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), value);
    }
}
