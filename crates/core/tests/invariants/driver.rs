//! A small driver for the tests beside it: a pager, its frames, and moves from the first call to the last.
//! Nothing waits, no memory is a program's, and a write is over when a test says so.
// UNSAFETY: the driver hands the pager its memory and writes the frames.

use farpage_core::areas::{AreaMemory, Areas, Leases, Placement, SlotMemory, heirs, pages};
use farpage_core::cache::{Backing, Cache, CacheMemory};
use farpage_core::check::{self, InFlight};
use farpage_core::config::{AreaOrder, Config, Install, SlotPolicy};
use farpage_core::memory::{Region, Zeroed};
use farpage_core::pager::{
    Access, Batch, Densified, Fate, Opening, Pager, Parts, Placed, Step, Taken, Ticket, Wake, WriteBatch,
    WriteProgress,
};
use farpage_core::readahead::Plan;
use farpage_core::readahead::by_slot::SlotWords;
use farpage_core::reclaim::rivals::WAYS;
use farpage_core::stats::Stats;
use farpage_core::table::entry::State;
use farpage_core::table::ranges::{Flags, Ranges};
use farpage_core::table::{Leaf, Table};
use farpage_core::units::{
    FrameIndex, NodeId, PAGE_BYTES, PageBytes, PageIndex, PageRange, SlotIndex, SlotPart,
};
use farpage_core::zswap::codec::Scratch;
use farpage_core::zswap::pool::{Pool, PoolLayout, PoolMemory};
use std::sync::atomic::AtomicU32;

pub const FRAMES: usize = 16;
pub const SLOTS: u32 = 64;
pub const PAGE: PageIndex = PageIndex(3);
pub const OTHER: PageIndex = PageIndex(4);
pub const LEFT: Backing = Backing::Memory;

/// A wake that does nothing. No thread waits in these tests unless a test says so.
pub struct Nobody;

impl Wake for Nobody {
    fn wake(&self, _: PageIndex) {}
}

/// A pager and its frames. The frames also stand for the program's memory and the device.
pub struct Driver {
    pub pager: Pager<'static>,
    pub frames: *mut PageBytes,
    pub scratch: Box<Scratch>,
}

/// Returns zeroed memory that is never given back.
pub fn region(bytes: usize) -> Region<'static> {
    let memory = vec![0_u64; bytes.div_ceil(8)].leak();
    // SAFETY: the memory is readable, writable, zeroed and of that size. It is leaked, so no other owner ever
    // uses it.
    unsafe { Region::new(memory.as_mut_ptr().cast(), size_of_val(memory)) }
}

pub fn table<T: Zeroed>(count: usize) -> &'static mut [T] {
    region(Region::bytes_for::<T>(count)).carve(count)
}

/// Returns the area as the process `me` sees it.
pub fn area(holders: &'static [AtomicU32], me: u32) -> AreaMemory<'static> {
    let bytes = SlotMemory::bytes(SlotPolicy::Clusters, SLOTS, 1);
    AreaMemory {
        slots: SLOTS,
        place: Placement::default(),
        leases: Leases::new(holders, me),
        memory: SlotMemory::carve(&mut region(bytes), SlotPolicy::Clusters, SLOTS, 1),
        discards: false,
        owners: table(pages::words(SLOTS)),
        checksums: table(pages::words(SLOTS)),
        bad: &[],
        heirs: table(heirs::words(SLOTS)),
    }
}

/// Returns a driver whose pool may have `pool_bytes` bytes, with an area or without.
pub fn driver(pool_bytes: usize, with_area: bool) -> Driver {
    driver_of(pool_bytes, with_area.then(|| area(table(1), 1)), None)
}

pub fn driver_of(
    pool_bytes: usize,
    area: Option<AreaMemory<'static>>,
    elder: Option<&'static Pager<'static>>,
) -> Driver {
    // Any object at all makes the pool too full.
    driver_that_accepts(0, pool_bytes, area, elder)
}

pub fn driver_that_accepts(
    accept_percent: u32,
    pool_bytes: usize,
    area: Option<AreaMemory<'static>>,
    elder: Option<&'static Pager<'static>>,
) -> Driver {
    let config = Config {
        frames: FRAMES as u32,
        accept_percent,
        ..Config::for_budget(1 << 20, pool_bytes as u64, Install::Copy)
    };
    let leaves: &'static [Leaf] = table(1);
    let pages = Table::new(table(1), PageIndex(0));
    pages.attach(PageIndex(0), &leaves[0]);
    let frames = table::<PageBytes>(FRAMES).as_mut_ptr();
    let memory = CacheMemory::carve(&mut region(CacheMemory::table_bytes(FRAMES)), frames, FRAMES);
    // SAFETY: the frames are page-aligned, as many as there are tables for, and used by this driver and the
    // pager only.
    let cache = unsafe { Cache::new(memory, Backing::Memory) };
    let layout = PoolLayout::for_limit(pool_bytes);
    let data: &'static mut [PageBytes] = table(layout.data_bytes.div_ceil(PAGE_BYTES));
    let memory = PoolMemory {
        // SAFETY: the bytes are those pages' in one piece, initialized, and handed over for good.
        data: unsafe { core::slice::from_raw_parts_mut(data.as_mut_ptr().cast(), layout.data_bytes) },
        objects: table(layout.objects),
        blocks: table(layout.blocks),
    };
    let mut areas = Areas::new(AreaOrder::Weighted, 1);
    if let Some(area) = area {
        areas.add(area);
    }
    let stats = table::<PageBytes>(size_of::<Stats>().div_ceil(PAGE_BYTES));
    let pager = Pager::new(Parts {
        config,
        table: pages,
        ranges: Ranges::new(table(8)),
        cache,
        pool: Pool::new(&layout, memory, config.accept_percent),
        areas,
        // SAFETY: the memory is zeroed, at least of that size, and aligned to a page. Zeros are fresh
        // counters.
        stats: unsafe { &*stats.as_ptr().cast() },
        wake: &Nobody,
        slot_words: Box::leak(Box::new(SlotWords::new())),
        watched: table(WAYS),
        elder,
    });
    pager.ranges.lock().insert(PageRange::of(PageIndex(0), 100), Flags::REGISTERED).unwrap();
    Driver { pager, frames, scratch: Box::new(Scratch::new()) }
}

/// Returns the bytes of a page: zeros, or bytes that compress well and aren't one repeated word.
pub fn bytes_of(kind: u8) -> [u8; PAGE_BYTES] {
    std::array::from_fn(|at| if kind == 0 || at % 16 == 0 { kind } else { (at % 16) as u8 })
}

/// Returns a page with a column of numbers.
pub fn numbers() -> [u8; PAGE_BYTES] {
    let mut page = [0; PAGE_BYTES];
    page.as_chunks_mut()
        .0
        .iter_mut()
        .zip(1000_u64..)
        .for_each(|(to, number)| *to = (3 * number).to_le_bytes());
    page
}

/// Returns a page that doesn't compress.
pub fn noise() -> [u8; PAGE_BYTES] {
    let mut random = 7_u64;
    std::array::from_fn(|_| {
        random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (random >> 56) as u8
    })
}

/// Returns a page of words in an order that only a better codec compresses much.
pub fn words_of(kind: u64) -> [u8; PAGE_BYTES] {
    let words: [&[u8]; 4] =
        [b"page of a frame ", b"slot in a cluster ", b"evicted by whom ", b"that came back "];
    let mut page = [0; PAGE_BYTES];
    let (mut to, mut random) = (0, kind);
    while to < PAGE_BYTES {
        random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        let word = words[(random >> 62) as usize];
        let count = word.len().min(PAGE_BYTES - to);
        page[to..to + count].copy_from_slice(&word[..count]);
        to += count;
    }
    page
}

impl Driver {
    pub fn frame(&mut self, frame: FrameIndex) -> &mut [u8; PAGE_BYTES] {
        assert!(frame.at() < FRAMES);
        // SAFETY: the frame is in bounds. The pager makes references to frames only inside its calls, and
        // none runs now.
        unsafe { &mut (*self.frames.add(frame.at())).0 }
    }

    pub fn first_touch(&self, page: PageIndex) {
        let Step::Zero(ticket) = self.pager.fault(page, Access::Write) else { panic!("it reads as zeros") };
        self.pager.settle_fault(ticket, LEFT);
    }

    /// Takes the only resident page out with the bytes of `kind`, and parks it.
    pub fn evict(&mut self, page: PageIndex, kind: u8) {
        self.evict_bytes(page, &bytes_of(kind));
    }

    pub fn evict_bytes(&mut self, page: PageIndex, bytes: &[u8; PAGE_BYTES]) {
        let mut batch = Batch::new();
        // The hand spares the page some laps if it came back lately.
        (0..8).for_each(|_| {
            if batch.is_empty() {
                self.pager.begin_evict(&mut batch, 1);
            }
        });
        assert_eq!(batch.victims()[0].page, page);
        *self.frame(batch.victims()[0].frame) = *bytes;
        batch.victims()[0].taken = Taken::Yes;
        self.pager.park(&mut batch);
    }

    /// Takes up to four pages of zeros out. Returns how many.
    pub fn evict_zeros(&mut self) -> usize {
        let mut batch = Batch::new();
        self.pager.begin_evict(&mut batch, 4);
        let count = batch.len();
        for at in 0..count {
            *self.frame(batch.victims()[at].frame) = bytes_of(0);
            batch.victims()[at].taken = Taken::Yes;
        }
        self.pager.park(&mut batch);
        // Pages kept for a stream stay.
        let mut busy = 0;
        while busy < self.pager.cache().usage().parked {
            busy = if self.place(&mut WriteBatch::new()) == Placed::Done { 0 } else { busy + 1 };
        }
        count
    }

    pub fn place(&mut self, writes: &mut WriteBatch) -> Placed {
        self.pager.place_oldest(&mut self.scratch, writes)
    }

    /// Evicts a page and finds a place that needs no write. Returns the state that the page ends in.
    pub fn evict_and_place(&mut self, page: PageIndex, kind: u8) -> State {
        self.evict(page, kind);
        self.place_evicted(page)
    }

    pub fn evict_and_place_words(&mut self, page: PageIndex, kind: u64) -> State {
        self.evict_bytes(page, &words_of(kind));
        self.place_evicted(page)
    }

    pub fn place_evicted(&mut self, page: PageIndex) -> State {
        let placed = self.place(&mut WriteBatch::new());
        assert!(matches!(placed, Placed::Done | Placed::NowhereToGo), "{placed:?}");
        self.pager.state(page)
    }

    pub fn densify(&mut self, is_old: bool) -> Densified {
        self.pager.densify(is_old, &mut self.scratch)
    }

    /// Evicts a page and writes it to the area. Returns the slot.
    pub fn evict_to_area(&mut self, page: PageIndex, kind: u8) -> SlotIndex {
        self.evict(page, kind);
        let mut writes = WriteBatch::new();
        assert_eq!(self.place(&mut writes), Placed::Queued);
        let mut request = self.pager.assign(0, NodeId(0), &mut writes).expect("a slot");
        assert_eq!(self.pager.write_done(&mut request, Ok(())), WriteProgress::Finished);
        let State::OnArea(SlotPart { slot, .. }) = self.pager.state(page) else { panic!("it was written") };
        slot
    }

    pub fn begin_load(&self, page: PageIndex) -> Ticket {
        let Step::Load(ticket) = self.pager.fault(page, Access::Write) else { panic!("it is in the pool") };
        ticket
    }

    /// Ends a fault on a page in the pool. Returns the page's bytes.
    pub fn finish_load(&mut self, ticket: Ticket) -> [u8; PAGE_BYTES] {
        self.pager.load(&ticket, &mut self.scratch.decoder).unwrap();
        let bytes = *self.frame(ticket.frame().unwrap());
        self.pager.settle_fault(ticket, LEFT);
        bytes
    }

    /// Touches a page of zeros. Returns the plan that readahead makes of the touch.
    pub fn touch_alone(&mut self, page: PageIndex, access: Access) -> Option<Plan> {
        let mut ticket = match self.pager.fault(page, access) {
            Step::Zero(ticket) | Step::Install(ticket) => ticket,
            Step::Present => return None,
            step => panic!("{step:?}"),
        };
        let plan = self.pager.plan_ahead(&mut ticket).plan;
        self.pager.settle_fault(ticket, LEFT);
        plan
    }

    /// Touches a page of zeros and carries the plan out.
    pub fn touch(&mut self, page: PageIndex, access: Access) {
        if let Some(plan) = self.touch_alone(page, access) {
            self.bring(plan);
        }
    }

    /// Brings pages of zeros in.
    pub fn bring(&mut self, plan: Plan) {
        let mut opening = Opening::new(plan);
        while let Some(ticket) = self.pager.lock_ahead(&mut opening) {
            match ticket.fate() {
                Fate::Map => self.pager.settle_ahead(&mut opening, ticket, LEFT),
                Fate::Park => {
                    *self.frame(ticket.frame().expect("a page to park has a frame")) = bytes_of(0);
                    self.pager.settle_parked(&mut opening, ticket);
                }
            }
        }
        self.pager.close_ahead(opening);
    }

    pub fn check(&self) {
        check::all(&self.pager, &InFlight::default());
    }
}
