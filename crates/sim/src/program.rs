//! A simulated program's memory as the kernel keeps it, and the oracle: for each page, the bytes that the
//! page must have.
//!
//! Calls that a kernel would refuse are refused here. An action that would lose the program's bytes ends the
//! run. A device or peer that has *pinned* a page can write to that page's memory at any time. The write
//! ignores every protection and reaches the memory wherever the memory is by then.

use crate::content;
use crate::locks;
use crate::random::Random;
use farpage_core::pager::Access;
use farpage_core::units::{PAGE_BYTES, PageIndex, PageRange};

/// The kernel's state of one page.
#[derive(Clone, Copy, Default)]
pub(crate) struct Page {
    pub mapped: bool,
    pub registered: bool,
    pub present: bool,
    /// A write faults although the page is present.
    pub protected: bool,
    /// The program must not touch the page now.
    pub forbidden: bool,
    /// The only copy of the page was lost with a device, and the pager has reported the loss.
    pub lost: bool,
    /// The page was freed lazily (MADV_FREE) and not written since. The kernel may drop the page.
    pub clean: bool,
}

/// A reference to a page's memory that a device or a peer holds.
struct Pin {
    /// The page that a write through the pin belongs to. `None` once the program itself has given the page
    /// up.
    page: Option<usize>,
    /// Whether the pinned memory is still the page's memory.
    is_there: bool,
}

/// The result of touching a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Touch {
    Done,
    /// The thread must wait until this fault is served.
    Fault(Access),
    /// The page isn't mapped or must not be touched. The program doesn't try.
    No,
}

/// The kernel's refusal for lack of a mapping (ENOENT).
#[derive(Debug)]
pub(crate) struct NotThere;

/// The pages of one program, numbered from `first`.
pub(crate) struct Program {
    first: PageIndex,
    pub pages: Vec<Page>,
    memory: Vec<[u8; PAGE_BYTES]>,
    truth: Vec<[u8; PAGE_BYTES]>,
    pins: Vec<Pin>,
}

impl Program {
    pub(crate) fn new(first: PageIndex, pages: usize) -> Program {
        Program {
            first,
            pages: vec![Page::default(); pages],
            memory: vec![[0; PAGE_BYTES]; pages],
            truth: vec![[0; PAGE_BYTES]; pages],
            pins: Vec::new(),
        }
    }

    pub(crate) fn at(&self, page: PageIndex) -> usize {
        (page.0 - self.first.0) as usize
    }

    pub(crate) fn page(&self, page: PageIndex) -> &Page {
        &self.pages[self.at(page)]
    }

    pub(crate) fn page_mut(&mut self, page: PageIndex) -> &mut Page {
        let at = self.at(page);
        &mut self.pages[at]
    }

    pub(crate) fn all(&self) -> PageRange {
        PageRange::of(self.first, self.pages.len() as u64)
    }

    /// Returns the bytes that the page must contain.
    pub(crate) fn truth(&self, page: PageIndex) -> &[u8; PAGE_BYTES] {
        &self.truth[self.at(page)]
    }

    /// Returns the bytes that the page contains. The page must be present.
    pub(crate) fn bytes(&self, page: PageIndex) -> &[u8; PAGE_BYTES] {
        assert!(self.page(page).present, "{page:?} isn't there");
        &self.memory[self.at(page)]
    }

    /// Reads or writes the page as a thread of the program. Compares the bytes with the oracle first.
    pub(crate) fn touch(
        &mut self,
        page: PageIndex,
        write: bool,
        random: &Random,
        contents: &[u32; content::KINDS],
    ) -> Touch {
        let at = self.at(page);
        let state = self.pages[at];
        if !state.mapped || state.forbidden {
            return Touch::No;
        }
        if !state.present {
            if state.registered {
                return Touch::Fault(if write { Access::Write } else { Access::Read });
            }
            self.put_zeros(at);
        }
        if write && state.protected {
            return Touch::Fault(Access::WriteProtected);
        }
        assert!(self.memory[at] == self.truth[at], "{page:?} has wrong bytes");
        if write {
            self.write(at, random, contents);
        }
        Touch::Done
    }

    fn write(&mut self, at: usize, random: &Random, contents: &[u32; content::KINDS]) {
        if random.percent(70) {
            content::fill(&mut self.memory[at], random, contents);
        } else {
            let byte = random.index(PAGE_BYTES);
            self.memory[at][byte] = self.memory[at][byte].wrapping_add(1);
        }
        self.truth[at] = self.memory[at];
        self.pages[at].clean = false;
    }

    /// Pins a page that a thread has just written. A device or a peer will write to the page later.
    pub(crate) fn pin(&mut self, page: PageIndex) {
        let at = self.at(page);
        assert!(self.pages[at].present && !self.pages[at].protected, "{page:?} can't be pinned");
        self.pins.push(Pin { page: Some(at), is_there: true });
    }

    /// Returns the number of pins.
    pub(crate) const fn pins(&self) -> usize {
        self.pins.len()
    }

    /// Whether a device or a peer refers to the page's memory.
    pub(crate) fn is_pinned(&self, page: PageIndex) -> bool {
        let at = self.at(page);
        self.pins.iter().any(|pin| pin.is_there && pin.page == Some(at))
    }

    /// Writes through a pin. Later reads of the program must see the byte, because the program asked for the
    /// write and has not given the page up. Returns `None` if it has given the page up.
    pub(crate) fn late_write(&mut self, pin: usize, random: &Random) -> Option<PageIndex> {
        let Pin { page: Some(at), is_there } = self.pins[pin] else { return None };
        let byte = random.index(PAGE_BYTES);
        let value = self.truth[at][byte].wrapping_add(1);
        self.truth[at][byte] = value;
        if is_there {
            self.memory[at][byte] = value;
        }
        Some(self.first.plus(at as u64))
    }

    /// Removes a pin. The kernel marks the page as written then.
    pub(crate) fn unpin(&mut self, pin: usize) {
        if let Pin { page: Some(at), is_there: true } = self.pins.swap_remove(pin) {
            self.pages[at].clean = false;
        }
    }

    /// Does MADV_FREE on a present page.
    pub(crate) fn free_lazily(&mut self, page: PageIndex) {
        locks::assert_none_held("a madvise");
        self.page_mut(page).clean = true;
    }

    /// Does MADV_PAGEOUT: drops the page if it is clean and not pinned. Returns whether the page is gone.
    pub(crate) fn drop_clean(&mut self, page: PageIndex) -> bool {
        locks::assert_none_held("a madvise");
        let goes = self.page(page).clean && !self.is_pinned(page);
        if goes {
            self.remove(page);
        }
        goes
    }

    fn put_zeros(&mut self, at: usize) {
        assert!(self.truth[at].iter().all(|&byte| byte == 0), "page {at} became zeros");
        self.memory[at].fill(0);
        (self.pages[at].present, self.pages[at].protected) = (true, false);
    }

    fn vacant(&self, page: PageIndex) -> Result<usize, NotThere> {
        let state = self.page(page);
        if !state.mapped || !state.registered {
            return Err(NotThere);
        }
        assert!(!state.present, "{page:?} was installed over a page that is there");
        Ok(self.at(page))
    }

    /// Does UFFDIO_ZEROPAGE.
    pub(crate) fn zero(&mut self, page: PageIndex) -> Result<(), NotThere> {
        locks::assert_none_held("a fault's service");
        let at = self.vacant(page)?;
        self.put_zeros(at);
        Ok(())
    }

    /// Does UFFDIO_MOVE or UFFDIO_COPY.
    pub(crate) fn install(&mut self, page: PageIndex, bytes: &[u8; PAGE_BYTES]) -> Result<(), NotThere> {
        locks::assert_none_held("a fault's service");
        let at = self.vacant(page)?;
        assert!(*bytes == self.truth[at], "wrong bytes were installed at {page:?}");
        self.memory[at] = *bytes;
        (self.pages[at].present, self.pages[at].protected) = (true, false);
        Ok(())
    }

    /// Makes the page absent. The caller has its contents elsewhere, or drops them.
    pub(crate) fn remove(&mut self, page: PageIndex) {
        locks::assert_none_held("a move");
        let at = self.at(page);
        let state = &mut self.pages[at];
        (state.present, state.protected, state.clean) = (false, false, false);
        self.pins.iter_mut().filter(|pin| pin.page == Some(at)).for_each(|pin| pin.is_there = false);
    }

    /// Drops the page and its contents. The page reads as zeros from now on.
    pub(crate) fn drop_page(&mut self, page: PageIndex) {
        locks::assert_none_held("a madvise");
        self.remove(page);
        let at = self.at(page);
        self.pages[at].lost = false;
        self.truth[at].fill(0);
        self.pins.iter_mut().filter(|pin| pin.page == Some(at)).for_each(|pin| pin.page = None);
    }

    /// Does munmap.
    pub(crate) fn unmap(&mut self, page: PageIndex) {
        locks::assert_none_held("a change of mappings");
        self.drop_page(page);
        *self.page_mut(page) = Page::default();
    }

    /// Does mmap, with MAP_FIXED if the page is mapped.
    pub(crate) fn map(&mut self, page: PageIndex) {
        self.unmap(page);
        self.page_mut(page).mapped = true;
    }

    /// Does mremap: moves the page with all its state except its write protection.
    pub(crate) fn remap(&mut self, from: PageIndex, to: PageIndex) {
        locks::assert_none_held("a change of mappings");
        self.unmap(to);
        let (source, target) = (self.at(from), self.at(to));
        self.pages[target] = Page { protected: false, ..self.pages[source] };
        self.memory[target] = self.memory[source];
        self.truth[target] = self.truth[source];
        self.pins.iter_mut().filter(|pin| pin.page == Some(source)).for_each(|pin| pin.page = Some(target));
        self.unmap(from);
    }
}
