//! The files and devices that the kernel itself swaps to, from /proc/swaps. None of them is an area for us:
//! an area has one owner.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::PathBuf;

/// Whether the kernel swaps to this file or device.
pub fn is_on(metadata: &fs::Metadata) -> bool {
    let table = fs::read("/proc/swaps").unwrap_or_default();
    let same = |other: &PathBuf| {
        fs::metadata(other).is_ok_and(|other| {
            let device = metadata.file_type().is_block_device() && other.file_type().is_block_device();
            if device {
                other.rdev() == metadata.rdev()
            } else {
                (other.dev(), other.ino()) == (metadata.dev(), metadata.ino())
            }
        })
    };
    swaps(&table).iter().any(same)
}

/// Returns the paths in /proc/swaps.
fn swaps(table: &[u8]) -> Vec<PathBuf> {
    let lines = table.split(|byte| *byte == b'\n').skip(1);
    lines
        .filter_map(|line| {
            line.split(|byte| matches!(byte, b' ' | b'\t')).next().filter(|path| !path.is_empty())
        })
        .map(unescape)
        .collect()
}

/// Decodes a path: the kernel writes blanks and backslashes as three octal digits.
fn unescape(text: &[u8]) -> PathBuf {
    let mut plain = Vec::with_capacity(text.len());
    let mut rest = text;
    while let [first, after @ ..] = rest {
        let code = after
            .get(..3)
            .filter(|digits| *first == b'\\' && digits.iter().all(|d| (b'0'..=b'7').contains(d)));
        if let Some(digits) = code {
            plain.push(
                digits.iter().fold(0_u8, |value, digit| value.wrapping_mul(8).wrapping_add(digit - b'0')),
            );
            rest = &after[3..];
        } else {
            plain.push(*first);
            rest = after;
        }
    }
    OsString::from_vec(plain).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_table_is_read_with_its_escapes() {
        let table = b"Filename\t\tType\n/a\\040b                file\t1\n/dev/sda2 partition 1\n";
        assert_eq!(swaps(table), [PathBuf::from("/a b"), PathBuf::from("/dev/sda2")]);
        assert_eq!(unescape(b"a\\04\\134"), PathBuf::from("a\\04\\"));
    }
}
