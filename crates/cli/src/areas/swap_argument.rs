//! The argument of `--swap`: a path, how much of it is used, and what places the area among other areas. A
//! path that exists as it stands is a path, whatever is in it.

use crate::text::failure::Failure;
use crate::text::size::{self, Amount};
use farpage_core::units::{NODES_MAX, NodeId};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Priorities that `--swap PATH,prio=N` accepts, as swapon does.
const PRIORITY_MAX: i32 = 32_767;

/// The parts of a `--swap`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SwapArgument {
    /// The directory, file or device.
    pub path: PathBuf,
    /// Most bytes of it to use, if the user gave a size.
    pub bytes: Option<u64>,
    /// The area's priority, if the user gave one.
    pub priority: Option<i32>,
    /// The node of the area's device, if the user knows better.
    pub node: Option<NodeId>,
    /// When the device is told that content isn't needed any more, if ever.
    pub discard: Option<Discard>,
}

/// When an area's device is told that nothing there is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Discard {
    /// For the whole area before it is used, and for each cluster that becomes empty.
    Both,
    /// For the whole area before it is used.
    Once,
    /// For each cluster that becomes empty.
    Pages,
}

/// Reads `PATH[:SIZE][,prio=N][,node=N][,discard[=once|pages]]`. A path that exists as it stands is a path,
/// whatever is in it.
pub fn swap_argument(argument: &OsStr, exists: impl Fn(&Path) -> bool) -> Result<SwapArgument, Failure> {
    let whole = argument.to_string_lossy().into_owned();
    let mut rest = argument.as_bytes();
    let mut area = SwapArgument::default();
    let is_path = |text: &[u8]| exists(Path::new(OsStr::from_bytes(text)));
    let has_only_size = |text: &[u8]| {
        last_colon(text).is_some_and(|colon| is_path(&text[..colon]) && !text[colon..].contains(&b','))
    };
    while !is_path(rest) && !has_only_size(rest) {
        let Some(comma) = rest.iter().rposition(|byte| *byte == b',') else { break };
        let option = String::from_utf8_lossy(&rest[comma + 1..]).into_owned();
        if option.contains('/') {
            break;
        }
        rest = &rest[..comma];
        read_area_option(&option, &whole, &mut area)?;
    }
    let (path, bytes) = split_size(rest, &whole, is_path)?;
    if path.is_empty() {
        return Err(bad_swap(&whole, "there is no path in it"));
    }
    Ok(SwapArgument { path: OsStr::from_bytes(path).into(), bytes, ..area })
}

fn bad_swap(argument: &str, why: &str) -> Failure {
    Failure::new(format!("swap area `{argument}`: {why}"))
        .fix("write --swap PATH[:SIZE][,prio=N][,node=N][,discard[=once|pages]], for example --swap /var/tmp:8G,prio=5")
}

/// Reads one option behind the path.
fn read_area_option(option: &str, whole: &str, area: &mut SwapArgument) -> Result<(), Failure> {
    let (name, value) = option.split_once('=').unwrap_or((option, ""));
    let was_given = match name {
        "prio" | "pri" => area.priority.replace(number(value, PRIORITY_MAX, "a priority", whole)?).is_some(),
        "node" => {
            let node = number(value, NODES_MAX as i32 - 1, "a node", whole)?;
            area.node.replace(NodeId(node as u8)).is_some()
        }
        "discard" => {
            let discard = match option {
                "discard" => Discard::Both,
                "discard=once" => Discard::Once,
                "discard=pages" => Discard::Pages,
                _ => {
                    return Err(bad_swap(
                        whole,
                        &format!("`{option}` is neither discard, nor =once, nor =pages"),
                    ));
                }
            };
            area.discard.replace(discard).is_some()
        }
        _ => return Err(bad_swap(whole, &format!("`{option}` is not an option of a swap area"))),
    };
    if was_given { Err(bad_swap(whole, &format!("{name} is given twice"))) } else { Ok(()) }
}

fn number(value: &str, most: i32, what: &str, whole: &str) -> Result<i32, Failure> {
    let number = value.parse().ok().filter(|number| (0..=most).contains(number));
    number.ok_or_else(|| bad_swap(whole, &format!("`{value}` is not {what} from 0 to {most}")))
}

/// Returns where a size may begin: the last colon that no slash follows.
fn last_colon(text: &[u8]) -> Option<usize> {
    text.iter().rposition(|byte| *byte == b':').filter(|at| !text[*at..].contains(&b'/'))
}

fn split_size<'a>(
    text: &'a [u8],
    whole: &str,
    is_path: impl Fn(&[u8]) -> bool,
) -> Result<(&'a [u8], Option<u64>), Failure> {
    let Some(colon) = last_colon(text).filter(|_| !is_path(text)) else {
        return Ok((text, None));
    };
    let size =
        size::parse(&String::from_utf8_lossy(&text[colon + 1..])).map_err(|why| bad_swap(whole, &why))?;
    match size.amount {
        Amount::Bytes(0) => Err(bad_swap(whole, "a size of 0 leaves no room")),
        Amount::Bytes(bytes) => Ok((&text[..colon], Some(bytes))),
        Amount::Share(_) => Err(bad_swap(whole, "the size of an area can't be a percentage")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn swap(argument: &str) -> Result<SwapArgument, Failure> {
        swap_argument(OsStr::new(argument), |_| false)
    }

    #[test]
    fn swap_argument_has_path_size_and_priority() {
        let argument = |path: &str, bytes, priority| SwapArgument {
            path: path.into(),
            bytes,
            priority,
            ..SwapArgument::default()
        };
        for (text, expected) in [
            ("/a", argument("/a", None, None)),
            ("/a:8G", argument("/a", Some(8 << 30), None)),
            ("/a:1.5K,prio=7", argument("/a", Some(1536), Some(7))),
            ("/a,prio=0", argument("/a", None, Some(0))),
            ("/a,pri=32767", argument("/a", None, Some(32_767))),
            ("/a:b/c,d/e", argument("/a:b/c,d/e", None, None)),
        ] {
            assert_eq!(swap(text).unwrap(), expected, "{text}");
        }
    }

    #[test]
    fn swap_argument_has_node_and_discard_in_any_order() {
        let node =
            |node| SwapArgument { path: "/a".into(), node: Some(NodeId(node)), ..SwapArgument::default() };
        let discard = |discard| SwapArgument { discard: Some(discard), ..node(0) };
        for (text, expected) in [
            ("/a,node=0", node(0)),
            ("/a,node=63", node(63)),
            ("/a,discard,node=0", discard(Discard::Both)),
            ("/a,node=0,discard=once", discard(Discard::Once)),
            (
                "/a:8G,discard=pages,prio=3,node=0",
                SwapArgument { bytes: Some(8 << 30), priority: Some(3), ..discard(Discard::Pages) },
            ),
        ] {
            assert_eq!(swap(text).unwrap(), expected, "{text}");
        }
    }

    #[test]
    fn bad_swap_arguments_are_refused() {
        for text in [
            "",
            ":8G",
            "/a:",
            "/a:0",
            "/a:lots",
            "/a:50%",
            "/a,prio=",
            "/a,prio=-1",
            "/a,prio=32768",
            "/a,node=",
            "/a,node=64",
            "/a,node=-1",
            "/a,discard=now",
            "/a,discard=",
            "/a,discard,discard=once",
            "/a,prio=1,prio=2",
            "/a,node=1,node=1",
            "/a,what",
            "/a:8G,prio=x",
        ] {
            assert!(swap(text).is_err(), "{text}");
        }
    }

    #[test]
    fn path_that_exists_may_look_like_anything() {
        let exists = |path: &Path| path == Path::new("/odd:8G,prio=3");
        let argument = |text: &str| swap_argument(OsStr::new(text), exists).unwrap();
        assert_eq!(argument("/odd:8G,prio=3").path, Path::new("/odd:8G,prio=3"));
        let more = argument("/odd:8G,prio=3:1G,prio=4");
        assert_eq!(
            (more.path.as_path(), more.bytes, more.priority),
            (Path::new("/odd:8G,prio=3"), Some(1 << 30), Some(4))
        );
    }
}
