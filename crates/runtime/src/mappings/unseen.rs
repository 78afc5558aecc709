//! Corrects the list of ranges by /proc, before the engine evicts the first page.
//!
//! A program within its budget may have changed mappings by system calls of its own, past libc. No hook saw
//! these calls. After activation, `signal` and `segv` stop such calls, so the list stays right there.

use crate::engine::Engine;
use crate::mappings::changes::{EVERYTHING, flags_of};
use crate::mappings::map_lock::Exclusive;
use farpage_core::table::ranges::Flags;
use farpage_core::units::{PageIndex, PageRange};
use farpage_os::futex;
use farpage_os::proc::{self, Mapped, Mapping, Requests};

impl Engine {
    /// Forgets what is no longer anonymous memory of the program's own. Notes protections, and what the
    /// program has asked the kernel to do with its memory. Nothing is registered yet, and no page is out.
    pub fn note_unseen_changes(&self, _: &Exclusive<'_>) {
        let (mut from, mut all_is_executable) = (PageIndex(0), None);
        let read = proc::for_each_mapping(|mapping| {
            self.forget_unless_mapped(from, mapping.pages.start);
            from = mapping.pages.end;
            match mapping.is_anonymous && mapping.is_private {
                true => self.note_protection(&mapping, &mut all_is_executable),
                false => self.forget_unless_mapped(mapping.pages.start, mapping.pages.end),
            }
        });
        // If /proc can't be read the list stays as the hooks know it.
        if read.is_ok() {
            self.forget_unless_mapped(from, EVERYTHING.end);
        }
        let _ =
            proc::for_each_mapping_and_requests(|mapping, requests| self.note_requests(&mapping, requests));
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

    fn note_protection(&self, mapping: &Mapping, all_is_executable: &mut Option<bool>) {
        if !self.pager.ranges.lock().touches(mapping.pages) {
            return;
        }
        // The hooks know the protections that the program has asked for, without the personality's.
        if mapping.is_executable && *all_is_executable.get_or_insert_with(proc::reading_implies_executing) {
            return;
        }
        let protected = if mapping.is_private_data { Flags::NONE } else { flags_of(mapping) };
        let now = |flags: Flags| flags.without(Flags::PROTECTED).without(Flags::FOREIGN).with(protected);
        let _ = self.pager.ranges.lock().update(mapping.pages, now);
    }

    /// Keeps pages that the kernel may take away. A system call that meets such a page would fail, because
    /// Farpage believes the page resident.
    fn keep_clean_pages(&self, pages: PageRange) {
        let may_write = |page| {
            self.pager.ranges.lock().find(page).is_some_and(|range| !range.flags.has(Flags::PROTECTED))
        };
        // Pages that a fork shares aren't looked for, because the page of zeros looks the same.
        let keep = |page, mapped| {
            if mapped == Mapped::Alone && may_write(page) {
                // SAFETY: the address is aligned, and the program may write the page.
                let _ = unsafe { futex::rewrite(page.address()) };
            }
        };
        let mut run = PageRange::of(pages.start, 0);
        let _ = self.pagemap.for_each_present(pages, |page| {
            if page != run.end {
                let _ = self.pagemap.for_each_mapped(run, keep);
                run = PageRange::of(page, 0);
            }
            run.end = page.plus(1);
        });
        let _ = self.pagemap.for_each_mapped(run, keep);
    }

    fn note_requests(&self, mapping: &Mapping, requests: Requests) {
        if requests.is_other {
            return self.forget_unless_mapped(mapping.pages.start, mapping.pages.end);
        }
        let is_anonymous = mapping.is_anonymous && mapping.is_private;
        if requests.has_clean_pages && is_anonymous && self.pager.ranges.lock().touches(mapping.pages) {
            self.keep_clean_pages(mapping.pages);
        }
        let now = |flags| with_requests(flags, requests);
        let _ = self.pager.ranges.lock().update(mapping.pages, now);
    }
}

/// Returns `flags` with what the program has asked for, and without what it has taken back.
fn with_requests(flags: Flags, requests: Requests) -> Flags {
    let asked = [
        (requests.is_wiped, Flags::WIPE_ON_FORK),
        (requests.is_hidden, Flags::DONT_FORK),
        (requests.is_locked, Flags::LOCKED),
        (requests.is_keyed, Flags::KEYED),
    ];
    asked.iter().fold(flags, |flags, (is_asked, flag)| match is_asked {
        true => flags.with(*flag),
        false => flags.without(*flag),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_request_sets_its_flag_and_clears_the_others() {
        const NONE: Requests = Requests {
            is_wiped: false,
            is_hidden: false,
            is_locked: false,
            is_keyed: false,
            has_clean_pages: false,
            is_other: false,
        };
        let all = Flags::WIPE_ON_FORK.with(Flags::DONT_FORK).with(Flags::LOCKED).with(Flags::KEYED);
        let cases = [
            (NONE, Flags::NONE),
            (Requests { is_wiped: true, ..NONE }, Flags::WIPE_ON_FORK),
            (Requests { is_hidden: true, ..NONE }, Flags::DONT_FORK),
            (Requests { is_keyed: true, ..NONE }, Flags::KEYED),
            (Requests { is_locked: true, ..NONE }, Flags::LOCKED),
        ];
        for (requests, flags) in cases {
            assert_eq!(with_requests(Flags::NONE, requests), flags, "{requests:?}");
            let changed = with_requests(all.with(Flags::PROTECTED), requests);
            assert_eq!(changed, flags.with(Flags::PROTECTED), "{requests:?}");
        }
    }
}
