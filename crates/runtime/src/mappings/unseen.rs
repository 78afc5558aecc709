//! Corrects the list of ranges by /proc, before the engine takes memory over.
//!
//! A program within its budget may have changed mappings by system calls of its own, past libc. No hook saw
//! these calls. From the takeover on, `signal` and `segv` stop such calls, so the list stays right there.

use crate::engine::Engine;
use crate::mappings::changes::{EVERYTHING, flags_of};
use crate::mappings::map_lock::Exclusive;
use farpage_core::table::ranges::Flags;
use farpage_core::units::{PageIndex, PageRange};
use farpage_os::proc::{self, Mapping};

impl Engine {
    /// Forgets what is no longer anonymous memory of the program's own, and notes protections. Nothing is
    /// registered yet, and no page is out.
    pub fn note_unseen_changes(&self, _: &Exclusive<'_>) {
        let mut from = PageIndex(0);
        let read = proc::for_each_mapping(|mapping| {
            self.forget_unless_mapped(from, mapping.pages.start);
            from = mapping.pages.end;
            match mapping.is_anonymous && mapping.is_private {
                true => self.note_protection(&mapping),
                false => self.forget_unless_mapped(mapping.pages.start, mapping.pages.end),
            }
        });
        // If /proc can't be read the list stays as the hooks know it.
        if read.is_ok() {
            self.forget_unless_mapped(from, EVERYTHING.end);
        }
    }

    /// Takes pages off the list that no anonymous mapping has.
    fn forget_unless_mapped(&self, start: PageIndex, end: PageIndex) {
        let pages = PageRange::new(start, end.max(start));
        let mut ranges = self.pager.ranges.lock();
        if ranges.touches(pages) {
            // Where the list has no room for one more range, it stays as the hooks know it.
            let _ = ranges.remove(pages);
        }
    }

    fn note_protection(&self, mapping: &Mapping) {
        // A personality may make all memory executable that can be read.
        if mapping.is_executable {
            return;
        }
        let protected = if mapping.is_private_data { Flags::NONE } else { flags_of(mapping) };
        let now = |flags: Flags| flags.without(Flags::PROTECTED).without(Flags::FOREIGN).with(protected);
        let _ = self.pager.ranges.lock().update(mapping.pages, now);
    }
}
