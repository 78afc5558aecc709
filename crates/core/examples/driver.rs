//! A small driver of `core`: a program of 64 pages that may have 16 of them in memory.
//!
//! `core` decides, and the driver does what a kernel does. Here a page in memory is an element of
//! [`Driver::memory`]. Evicted pages go to the compressed pool; there is no swap area. Change the numbers,
//! the bytes or the order of the touches, and run `cargo run -p farpage-core --example driver`.
// UNSAFETY: the driver hands its memory to `core`.

use farpage_core::areas::Areas;
use farpage_core::cache::{Backing, Cache, CacheMemory};
use farpage_core::config::{AreaOrder, Config, Install};
use farpage_core::memory::{Region, Zeroed};
use farpage_core::pager::{Access, Batch, Pager, Parts, Placed, Step, Taken, Ticket, Wake, WriteBatch};
use farpage_core::readahead::by_slot::SlotWords;
use farpage_core::reclaim::rivals::WAYS;
use farpage_core::stats::Stats;
use farpage_core::table::ranges::{Flags, Ranges};
use farpage_core::table::{Leaf, Table};
use farpage_core::units::{FrameIndex, PAGE_BYTES, PageBytes, PageIndex, PageRange};
use farpage_core::zswap::codec::Scratch;
use farpage_core::zswap::pool::{Pool, PoolLayout, PoolMemory};

const PAGES: usize = 64;
const IN_MEMORY_MAX: u64 = 16;
const FRAMES: usize = 8;
const POOL_BYTES: usize = 1 << 20;

struct Driver {
    pager: Pager<'static>,
    frames: *mut PageBytes,
    /// The program's pages. `None` for a page that is evicted, or was never touched.
    memory: [Option<Box<[u8; PAGE_BYTES]>>; PAGES],
    scratch: Box<Scratch>,
}

impl Driver {
    /// Touches a page as the program does, and returns its bytes.
    fn touch(&mut self, page: usize) -> &mut [u8; PAGE_BYTES] {
        while self.memory[page].is_none() {
            match self.pager.fault(PageIndex(page as u64), Access::Write) {
                Step::Zero(ticket) => self.install(ticket, [0; PAGE_BYTES]),
                // The page was evicted a moment ago and is still in its frame.
                Step::Install(ticket) => self.install_frame(ticket),
                Step::Load(ticket) => {
                    self.pager.load(&ticket, &mut self.scratch.decoder).expect("the pool loses nothing");
                    self.install_frame(ticket);
                }
                Step::NoFrame => self.place(),
                step => unreachable!("one thread without an area never meets {step:?}"),
            }
        }
        self.memory[page].as_mut().expect("the page was just installed")
    }

    fn install_frame(&mut self, ticket: Ticket) {
        let bytes = *self.frame(ticket.frame().expect("the bytes are in a frame"));
        self.install(ticket, bytes);
    }

    fn install(&mut self, ticket: Ticket, bytes: [u8; PAGE_BYTES]) {
        self.memory[ticket.page().0 as usize] = Some(Box::new(bytes));
        self.pager.settle_fault(ticket, Backing::Memory);
    }

    /// Evicts up to four pages: from the program into frames, and from there into the pool.
    fn evict(&mut self) {
        let mut batch = Batch::new();
        self.pager.begin_evict(&mut batch, 4);
        for at in 0..batch.len() {
            let (page, frame) = (batch.victims()[at].page, batch.victims()[at].frame);
            let bytes = self.memory[page.0 as usize].take().expect("a victim is in memory");
            *self.frame(frame) = *bytes;
            batch.victims()[at].taken = Taken::Yes;
        }
        self.pager.park(&mut batch);
        self.place();
    }

    fn place(&mut self) {
        let mut writes = WriteBatch::new();
        while self.pager.place_oldest(&mut self.scratch, &mut writes) == Placed::Done {}
    }

    fn frame(&mut self, frame: FrameIndex) -> &mut [u8; PAGE_BYTES] {
        // SAFETY: `core` names only frames that it was given. It has references to frames only inside its
        // calls, and none runs now.
        unsafe { &mut (*self.frames.add(frame.at())).0 }
    }
}

fn main() {
    let mut driver = driver();
    for round in 0..3_u8 {
        for page in 0..PAGES {
            let bytes = driver.touch(page);
            let expected = if round == 0 { [0; PAGE_BYTES] } else { bytes_of(page, round - 1) };
            assert!(*bytes == expected, "page {page} came back with wrong bytes");
            *bytes = bytes_of(page, round);
            while driver.pager.resident() > IN_MEMORY_MAX {
                driver.evict();
            }
        }
        let (resident, evicted) = (driver.pager.resident(), driver.pager.evicted());
        println!("round {round}: {resident} pages in memory, {evicted} evicted, all bytes right");
    }
}

/// Returns a page that compresses well.
fn bytes_of(page: usize, round: u8) -> [u8; PAGE_BYTES] {
    std::array::from_fn(|at| if at % 16 == 0 { page as u8 } else { round.wrapping_add(at as u8 % 16) })
}

/// Wakes threads that wait for a page. Here no thread waits.
struct Nobody;

impl Wake for Nobody {
    fn wake(&self, _: PageIndex) {}
}

/// Returns zeroed values that are never given back.
fn zeroed<T: Zeroed>(count: usize) -> &'static mut [T] {
    let words = vec![0_u64; Region::bytes_for::<T>(count).div_ceil(8)].leak();
    // SAFETY: the memory is zeroed and of that size, and leaked: nobody else uses it.
    unsafe { Region::new(words.as_mut_ptr().cast(), size_of_val(words)) }.carve(count)
}

fn driver() -> Driver {
    let config =
        Config { frames: FRAMES as u32, ..Config::for_budget(1 << 20, POOL_BYTES as u64, Install::Copy) };
    let leaves: &'static [Leaf] = zeroed(1);
    let table = Table::new(zeroed(1), PageIndex(0));
    table.attach(PageIndex(0), &leaves[0]);
    let frames = zeroed::<PageBytes>(FRAMES).as_mut_ptr();
    let bytes = zeroed::<u64>(CacheMemory::table_bytes(FRAMES).div_ceil(8));
    // SAFETY: zeroed memory of that size, which nobody else uses.
    let mut region = unsafe { Region::new(bytes.as_mut_ptr().cast(), size_of_val(bytes)) };
    // SAFETY: as many page-aligned frames as there are tables for, and only `core` and the driver use them.
    let cache = unsafe { Cache::new(CacheMemory::carve(&mut region, frames, FRAMES), Backing::Memory) };
    let layout = PoolLayout::for_limit(POOL_BYTES);
    let data = zeroed::<PageBytes>(layout.data_bytes.div_ceil(PAGE_BYTES));
    let memory = PoolMemory {
        // SAFETY: the bytes of those pages in one piece, which nobody else uses.
        data: unsafe { core::slice::from_raw_parts_mut(data.as_mut_ptr().cast(), layout.data_bytes) },
        objects: zeroed(layout.objects),
        blocks: zeroed(layout.blocks),
    };
    let stats = zeroed::<PageBytes>(size_of::<Stats>().div_ceil(PAGE_BYTES));
    let pager = Pager::new(Parts {
        ranges: Ranges::new(zeroed(8)),
        pool: Pool::new(&layout, memory, config.accept_percent),
        // SAFETY: zeros are fresh counters, and the memory is large enough and aligned to a page.
        stats: unsafe { &*stats.as_ptr().cast() },
        areas: Areas::new(AreaOrder::Weighted, 1),
        wake: &Nobody,
        slot_words: Box::leak(Box::new(SlotWords::new())),
        watched: zeroed(WAYS),
        elder: None,
        config,
        table,
        cache,
    });
    pager.ranges.lock().insert(PageRange::of(PageIndex(0), PAGES as u64), Flags::REGISTERED).expect("fits");
    Driver { pager, frames, memory: [const { None }; PAGES], scratch: Box::new(Scratch::new()) }
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_page_comes_back_with_its_bytes() {
        super::main();
    }
}
