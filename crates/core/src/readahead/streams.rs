//! Readahead by streams. Many walks through one region are found and kept apart, each with its stride.
//!
//! Faults on pages that aren't in a frame are remembered for a while. A fault that continues two steps of one
//! page, or three of another stride, begins a *stream*. From then on the stream's pages are brought in one
//! window at a time. All pages of a window are mapped at once but the first, the *marker*, which stays
//! parked. A fault on the marker costs little, says that the stream is alive, and starts the next window in
//! the background.
//!
//! A touch of a mapped page can't be seen. So the pages of a window count as used only when the stream is
//! seen behind them. The stream is seen at the next window's marker, or at the range's last page, which stays
//! parked for this. Pages that a stream never got past count as read in vain.
//!
//! Random faults begin a stream only by accident. Two other faults of the last [`REMEMBERED`] would have to
//! be exactly one and two pages away, in this order. Random faults can't push a live stream out either,
//! because faults and streams are in separate tables.
//!
//! Programs that touch a few neighbours in many places begin many streams that end at once. Each leaves a
//! window or two that is never read. So a stream begins on *credit*, until it has gone through a window.
//! Where most streams don't, the credit is used up, and a longer walk is needed to begin a stream.

use crate::units::{PageIndex, PageRange};

/// Streams that are kept. When one more begins, the stream that has been quiet longest is forgotten.
pub const STREAMS: usize = 64;
/// Faults that are remembered.
pub const REMEMBERED: usize = 64;
/// Largest stride that is looked for, in pages.
const STRIDE_MAX: u64 = 64;
/// Pages of a stream's first window, and the fewest of a later one.
const WINDOW_MIN: u32 = 8;
/// Pages of the largest window.
pub const WINDOW_MAX: u32 = 256;
/// Steps that a stream must have gone for each page of its windows. A stream that ends leaves about one and a
/// half windows unused. With this value the unused pages are less than 0.5 % of what the stream has read.
const STEPS_FOR_ONE: u64 = 512;
/// Pages mapped along with the faulting page when a walk has outrun its window. More would be a pause.
pub const CATCH_UP_MAX: u32 = 7;
/// Pages up to which a stream's windows grow sooner when the stream outruns them.
const LATE_WINDOW_MAX: u32 = 32;
/// Steps that a stream must have gone for each page of its windows where it has to wait for a device.
const STEPS_FOR_ONE_READ: u64 = 16;
/// Pages that a window may pass over because they are in memory already.
const GAP_MAX: u64 = 1 << 14;

/// Streams that may begin before one of them has gone through a window.
const CREDIT_MAX: u32 = 32;
/// Credit that a stream earns when it has gone through a window. With 2, half of all streams may end early.
const CREDIT_EARNED: u32 = 2;
/// Faults after which one more stream may begin on credit. Many interleaved walks need this. Too few of the
/// remembered faults belong to each walk for it to begin without credit.
const FAULTS_FOR_CREDIT: u32 = 256;
/// Steps that begin a stream on credit: with a stride of one page, and with a larger stride.
const STEPS_ON_CREDIT: (u64, u64) = (2, 3);
/// Steps that begin a stream without credit: with a stride of one page, and with a larger stride.
const STEPS_WITHOUT: (u64, u64) = (5, 7);

/// Windows that a stream which waits for a device may have asked for at once. The device goes on with the
/// next windows while the walk goes through one.
const WINDOWS_ASKED_MAX: i64 = 3;
/// Steps that a stream must have gone for each page of its windows before it may ask for one more window. A
/// stream that ends leaves those windows unused.
const STEPS_FOR_ONE_MORE: u64 = 32;

/// Looks at a stream's parked pages after which they are no longer kept for the stream, counted since the
/// stream last asked for a window. Each eviction looks at each parked page once.
const HELD_MAX: u8 = 128;

/// Names a stream, even after another stream has taken its place in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamId {
    at: u32,
    serial: u32,
}

/// Pages to bring in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// The stream that the window is for.
    pub stream: StreamId,
    /// The first page.
    pub first: PageIndex,
    /// Distance from one page to the next, in pages. May be negative.
    pub stride: i64,
    /// Pages to bring in.
    pub count: u32,
    /// Pages to look at, at most, to find `count` pages that are out. Pages in memory already don't count.
    pub reach: u32,
    /// Whether the range ends behind the last of these pages, or another stream has begun there.
    pub closes: bool,
}

impl Window {
    /// The page `step` steps from the first.
    pub const fn page(&self, step: u32) -> PageIndex {
        PageIndex((self.first.0 as i64 + step as i64 * self.stride) as u64)
    }
}

/// The outcome of a fault.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Pages that were mapped at once and that the stream is now seen behind.
    pub hits: u32,
    /// The next pages to bring in.
    pub window: Option<Window>,
    /// The window that should have brought the page still waits, or is being brought in. The pages given here
    /// come next in that window.
    pub late: Option<Window>,
    /// A window should have brought the page and hadn't. The rest of that window's missing pages lies here.
    pub rest: Option<Window>,
    /// Whether a stream was expected to come to the page, or begins there.
    pub is_walk: bool,
}

/// The outcome of a window.
#[derive(Clone, Copy, Debug, Default)]
pub struct Landed {
    /// The page that was parked as the window's marker.
    pub marker: Option<PageIndex>,
    /// Pages that were mapped at once.
    pub mapped: u32,
    /// Steps gone through, counted from the window's first page.
    pub steps: u32,
    /// Whether a thread was waiting for a page of the window that had to be read from an area.
    pub was_late: bool,
}

/// A window's first page, where the walk is to be seen, and the number of pages mapped between it and the
/// next marker.
#[derive(Clone, Copy)]
struct Marker {
    page: i64,
    mapped: u32,
}

impl Marker {
    const NONE: Marker = Marker { page: NOWHERE, mapped: 0 };
}

/// A walk. Positions are page numbers. `stride` is 0 while the place in the table is free.
#[derive(Clone, Copy)]
struct Stream {
    serial: u32,
    stride: i64,
    /// Where the walk began, as far as is known. Another walk that comes there has perhaps come to its own
    /// end.
    origin: i64,
    /// Where the walk was last seen.
    at: i64,
    /// Pages before this one may have been evicted already, because the walk has gone through them.
    shown: i64,
    /// Pages before this one have been brought in.
    landed: i64,
    /// Pages before this one have been asked for.
    asked: i64,
    /// Steps gone since the walk was found.
    steps: u64,
    window: u32,
    window_floor: u32,
    was_late: bool,
    /// Markers that the stream hasn't come to, in the order of the stream. Unused places at the end are
    /// [`Marker::NONE`].
    markers: [Marker; WINDOWS_ASKED_MAX as usize],
    closing: i64,
    /// Pages mapped between the last marker that was touched and the next one.
    behind: u32,
    /// Whether the stream has come to the last page of its known way.
    has_closed: bool,
    /// Whether the clock hand has passed over the pages that this stream hasn't read yet.
    was_spared: bool,
    /// How often a parked page of this stream was kept from being placed.
    held: u8,
    /// Whether the stream has gone through a window.
    has_paid: bool,
    /// Whether the stream went past a marker without touching it.
    has_jumped: bool,
    used: u32,
}

/// Steps behind each stream whose pages aren't given to evictions, at least.
const KEPT_MIN: u64 = 8;
/// Fewest pages that are worth a batch of victims.
const PASSED_MIN: u32 = 16;

/// No page.
const NOWHERE: i64 = -1;

impl Stream {
    const FREE: Stream = Stream {
        serial: 0,
        stride: 0,
        origin: NOWHERE,
        at: 0,
        shown: 0,
        landed: 0,
        asked: 0,
        steps: 0,
        window: 0,
        window_floor: WINDOW_MIN,
        was_late: false,
        markers: [Marker::NONE; WINDOWS_ASKED_MAX as usize],
        closing: NOWHERE,
        behind: 0,
        has_closed: false,
        was_spared: false,
        held: 0,
        has_paid: false,
        has_jumped: false,
        used: 0,
    };

    /// Returns the steps from where the walk was last seen to `page`. `None` if `page` doesn't lie ahead on
    /// the walk's way.
    const fn steps_to(&self, page: i64) -> Option<i64> {
        let way = page - self.at;
        if way % self.stride != 0 {
            return None;
        }
        let steps = way / self.stride;
        if steps > 0 { Some(steps) } else { None }
    }

    /// Returns the steps that the walk has gone and that [`Streams::take_passed`] hasn't returned.
    const fn passed(&self) -> u64 {
        ((self.at - self.shown) / self.stride) as u64
    }

    /// Whether `page` comes before `limit` on the walk's way.
    const fn is_before(&self, page: i64, limit: i64) -> bool {
        if self.stride > 0 { page < limit } else { page > limit }
    }

    /// Returns how many steps beyond the windows a fault may lie and still belong to the stream.
    const fn slack(&self) -> i64 {
        if self.stride.abs() > 1 {
            2
        } else if self.window > WINDOW_MIN {
            self.window as i64
        } else {
            WINDOW_MIN as i64
        }
    }

    /// Whether the next step from `page` would leave `range`.
    const fn is_last_in(&self, page: i64, range: PageRange) -> bool {
        let next = page + self.stride;
        next < range.start.0 as i64 || next >= range.end.0 as i64
    }

    /// Records that the walk has come to a page before its window had brought the page. Doubles the stream's
    /// smallest window, up to `window_max`.
    fn was_outrun(&mut self, window_max: u32) {
        if !self.was_late && self.steps > u64::from(2 * WINDOW_MIN) {
            self.was_late = true;
            self.window_floor = (self.window_floor * 2).min(window_max).max(self.window_floor);
        }
    }

    fn is_at(&mut self, page: i64, now: u32) {
        self.used = now;
        if let Some(steps) = self.steps_to(page) {
            self.steps += steps as u64;
            self.at = page;
        }
    }

    /// Records that all pages mapped so far lie behind the walk, and returns their number. Pages between an
    /// untouched marker that the walk went past and the next marker don't count: the walk jumps.
    fn all_passed(&mut self) -> u32 {
        while self.markers[0].page != NOWHERE && self.is_before(self.markers[0].page, self.at) {
            self.take_marker(0);
            self.has_jumped = true;
        }
        self.take_mapped()
    }

    /// Returns the number of mapped pages that the stream hasn't been seen behind.
    fn mapped(&self) -> u32 {
        self.behind + self.markers.iter().map(|marker| marker.mapped).sum::<u32>()
    }

    /// Records that the stream is seen behind all mapped pages, and returns their number.
    fn take_mapped(&mut self) -> u32 {
        let hits = self.mapped();
        self.behind = 0;
        self.markers.iter_mut().for_each(|marker| marker.mapped = 0);
        hits
    }

    fn marker_at(&self, page: i64) -> Option<usize> {
        self.markers.iter().position(|marker| marker.page == page)
    }

    /// Takes a marker out. Returns the number of pages mapped behind the marker.
    fn take_marker(&mut self, at: usize) -> u32 {
        let mapped = self.markers[at].mapped;
        self.markers[at..].rotate_left(1);
        self.markers[self.markers.len() - 1] = Marker::NONE;
        mapped
    }

    /// Returns the count of mapped pages in the part that ends with the marker `at`.
    fn before_marker(&mut self, at: usize) -> &mut u32 {
        match at {
            0 => &mut self.behind,
            _ => &mut self.markers[at - 1].mapped,
        }
    }

    /// Forgets one mapped page that isn't in memory any more, in the first part that has any.
    fn forget_one(&mut self) {
        let parts = core::iter::once(&mut self.behind)
            .chain(self.markers.iter_mut().map(|marker| &mut marker.mapped));
        if let Some(part) = parts.into_iter().find(|part| **part > 0) {
            *part -= 1;
        }
    }

    /// Asks for the next window, clipped to `range` and to pages before `limit`.
    fn ask(&mut self, index: usize, range: PageRange, limit: i64, pages_max: u32) -> Option<Window> {
        let most = pages_max.clamp(1, WINDOW_MAX);
        let earned = (self.steps / STEPS_FOR_ONE).min(u64::from(most)) as u32;
        let earned = if earned == 0 { 0 } else { 1 << earned.ilog2() };
        self.window = earned.max(self.window_floor).min(most);
        let first = PageIndex(u64::try_from(self.asked).ok()?);
        if !range.contains(first) || !self.is_before(self.asked, limit) {
            return None;
        }
        let stride = self.stride.unsigned_abs();
        let to_end = if self.stride > 0 { range.end.0 - 1 - first.0 } else { first.0 - range.start.0 };
        let distance = to_end.min((limit - self.asked).unsigned_abs() - 1);
        let left = distance / stride + 1;
        // A short rest of the way comes along with the window.
        let wanted = u64::from(self.window);
        let count =
            if left <= u64::from(most) && left <= wanted + wanted / 2 { left } else { wanted.min(left) };
        let reach = left.min(count + GAP_MAX) as u32;
        self.asked += count as i64 * self.stride;
        let stream = StreamId { at: index as u32, serial: self.serial };
        Some(Window {
            stream,
            first,
            stride: self.stride,
            count: count as u32,
            reach,
            closes: u64::from(reach) == left,
        })
    }

    /// Whether the walk hasn't come to the end of the pages that were brought in for it.
    fn has_unread(&self) -> bool {
        self.mapped() > 0 && self.is_before(self.at, self.landed)
    }

    /// Returns the pages that the walk comes to next behind `page`: at most `most` pages, all before `limit`.
    fn next_before(&self, limit: i64, most: u32, index: usize, page: i64) -> Window {
        let steps = (limit - page) / self.stride - 1;
        let count = steps.clamp(0, i64::from(most)) as u32;
        let stream = StreamId { at: index as u32, serial: self.serial };
        let first = PageIndex((page + self.stride) as u64);
        Window { stream, first, stride: self.stride, count, reach: count, closes: false }
    }
}

/// Every stream of one space, and the faults from which streams may begin.
pub struct Streams {
    live: [Stream; STREAMS],
    faults: [u64; REMEMBERED],
    /// Places of `live` that were ever used, counted from the first.
    used: usize,
    /// Faults so far. During a fault, the fault before it is in the ring at this minus one.
    count: u32,
    serial: u32,
    credit: u32,
}

impl Default for Streams {
    fn default() -> Self {
        Streams::new()
    }
}

impl Streams {
    /// Returns a table without streams.
    pub const fn new() -> Streams {
        Streams {
            live: [Stream::FREE; STREAMS],
            faults: [u64::MAX; REMEMBERED],
            used: 0,
            count: 0,
            serial: 0,
            credit: CREDIT_MAX,
        }
    }

    /// Handles a fault on a page of `range` that isn't in a frame. Windows have `pages_max` pages at most.
    pub fn fault(&mut self, page: PageIndex, range: PageRange, pages_max: u32) -> Seen {
        self.count = self.count.wrapping_add(1);
        if self.count.is_multiple_of(FAULTS_FOR_CREDIT) {
            self.credit = (self.credit + 1).min(CREDIT_MAX);
        }
        // A marker that was placed because the stream was slow says the same as a parked one.
        if let Some(seen) = self.reached(page.0 as i64, range, pages_max) {
            return seen;
        }
        let seen = match self.on_the_way(page.0 as i64) {
            Some(at) => Seen { is_walk: true, ..self.fault_of(at, page.0 as i64, range, pages_max) },
            None => self.begin(page, range, pages_max).unwrap_or_default(),
        };
        self.faults[self.count as usize % REMEMBERED] = page.0;
        seen
    }

    /// Returns the stream that `page` belongs to. Of several streams, the one that was seen last.
    fn on_the_way(&self, page: i64) -> Option<usize> {
        let is_near = |stream: &Stream| {
            stream.stride != 0
                && stream.steps_to(page).is_some()
                && stream.is_before(page, stream.asked + (stream.slack() + 1) * stream.stride)
        };
        let of_it = self.live[..self.used].iter().enumerate().filter(|(_, stream)| is_near(stream));
        let age = |stream: &Stream| self.count.wrapping_sub(stream.used);
        of_it.min_by_key(|(_, stream)| age(stream)).map(|(at, _)| at)
    }

    /// Handles a fault of a stream at a place where its windows should have been.
    fn fault_of(&mut self, at: usize, page: i64, range: PageRange, pages_max: u32) -> Seen {
        let now = self.count;
        let stream = &mut self.live[at];
        stream.is_at(page, now);
        stream.has_closed |= stream.is_last_in(page, range);
        if stream.is_before(page, stream.landed) {
            // The page was not brought in, or has been evicted since: don't count it as used.
            stream.forget_one();
            let rest = stream.next_before(stream.landed, stream.window, at, page);
            return Seen { rest: Some(rest).filter(|rest| rest.count > 0), ..Seen::default() };
        }
        let hits = stream.all_passed();
        if stream.has_jumped {
            // The walk goes the same way, but doesn't touch every page. If it does so after all, a new stream
            // begins.
            *stream = Stream::FREE;
            return Seen { hits, ..Seen::default() };
        }
        if stream.is_before(page, stream.asked) {
            // The window is on its way.
            stream.was_outrun(LATE_WINDOW_MAX);
            let late = Some(stream.next_before(stream.asked, CATCH_UP_MAX, at, page));
            return Seen { hits, late, ..Seen::default() };
        }
        stream.asked = page + stream.stride;
        if stream.has_closed {
            // Either the walk went on, or another walk has begun where this one ended. The two can't be told
            // apart.
            (stream.has_closed, stream.origin) = (false, page);
        }
        Seen { hits, window: self.ask(at, range, pages_max), ..Seen::default() }
    }

    /// Gives credit back when a stream is first seen behind pages that were mapped for it.
    fn pay(&mut self, at: usize, hits: u32) {
        let stream = &mut self.live[at];
        if hits > 0 && !stream.has_paid {
            stream.has_paid = true;
            self.credit = (self.credit + CREDIT_EARNED).min(CREDIT_MAX);
        }
    }

    fn ask(&mut self, at: usize, range: PageRange, pages_max: u32) -> Option<Window> {
        let limit = self.next_origin(at);
        let stream = &mut self.live[at];
        (stream.was_late, stream.was_spared, stream.held) = (false, false, 0);
        stream.ask(at, range, limit, pages_max)
    }

    /// Returns where the next stream of the same stride has begun on this stream's way. Walks that share a
    /// region begin where other walks end. Only streams with a stride of one page have this limit.
    fn next_origin(&self, at: usize) -> i64 {
        let stream = &self.live[at];
        let others = self.live.iter().enumerate().filter(|(other, _)| *other != at);
        let origins = others
            .filter(|(_, other)| other.stride == stream.stride && other.origin != NOWHERE)
            .map(|(_, other)| other.origin)
            .filter(|origin| !stream.is_before(*origin, stream.asked));
        match stream.stride {
            1 => origins.min().unwrap_or(i64::MAX),
            -1 => origins.max().unwrap_or(i64::MIN / 2),
            up if up > 0 => i64::MAX,
            _ => i64::MIN / 2,
        }
    }

    /// Returns how many faults ago `page` faulted.
    fn age(&self, page: u64) -> Option<u32> {
        let newest = self.count.wrapping_sub(1);
        (0..REMEMBERED as u32)
            .find(|age| self.faults[newest.wrapping_sub(*age) as usize % REMEMBERED] == page)
    }

    /// Whether the faults before this one were `steps` steps of `stride`, in this order.
    fn continues(&self, page: u64, stride: i64, steps: u64) -> bool {
        let mut younger = None;
        (1..=steps).all(|step| {
            let Some(before) = page.checked_add_signed(-stride * step as i64) else { return false };
            let age = self.age(before);
            let is_older = age.is_some_and(|age| younger.is_none_or(|younger| age > younger));
            younger = age;
            is_older
        })
    }

    /// Whether a remembered fault lies within the largest stride. Most random faults end here, after one look
    /// at each remembered fault.
    fn has_neighbour(&self, page: u64) -> bool {
        self.faults.iter().fold(false, |any, fault| any | (fault.abs_diff(page) <= STRIDE_MAX))
    }

    /// Returns the stride that this fault and the faults before it make, and the number of steps.
    fn stride_at(&self, page: u64) -> Option<(i64, u64)> {
        if !self.has_neighbour(page) {
            return None;
        }
        let (steps, steps_afar) = if self.credit > 0 { STEPS_ON_CREDIT } else { STEPS_WITHOUT };
        if let Some(unit) = [1, -1].into_iter().find(|unit| self.continues(page, *unit, steps)) {
            return Some((unit, steps));
        }
        let near = |fault: &u64| (2..=STRIDE_MAX).contains(&fault.abs_diff(page));
        let strides = self.faults.iter().filter(|fault| near(fault)).map(|fault| page as i64 - *fault as i64);
        let stride = strides.into_iter().find(|stride| self.continues(page, *stride, steps_afar));
        stride.map(|stride| (stride, steps_afar))
    }

    fn begin(&mut self, page: PageIndex, range: PageRange, pages_max: u32) -> Option<Seen> {
        let (stride, steps) = self.stride_at(page.0)?;
        let age = |stream: &Stream| self.count.wrapping_sub(stream.used);
        let quiet = |stream: &Stream| if stream.stride == 0 { u32::MAX } else { age(stream) };
        // Takes the first of the free places, because a fault looks at all places up to the last one used.
        let at = (0..STREAMS).rev().max_by_key(|at| quiet(&self.live[*at]))?;
        self.used = self.used.max(at + 1);
        self.serial = self.serial.wrapping_add(1);
        let next = page.0 as i64 + stride;
        let origin = page.0 as i64 - steps as i64 * stride;
        self.live[at] = Stream {
            serial: self.serial,
            stride,
            origin,
            at: page.0 as i64,
            shown: origin,
            landed: next,
            asked: next,
            used: self.count,
            ..Stream::FREE
        };
        let window = self.ask(at, range, pages_max);
        self.credit = self.credit.saturating_sub(u32::from(window.is_some()));
        Some(Seen { window, is_walk: true, ..Seen::default() })
    }

    /// Handles a touch of a parked page that was read ahead. The page's mark counts the page itself.
    pub fn touched(&mut self, page: PageIndex, range: PageRange, pages_max: u32) -> Seen {
        self.reached(page.0 as i64, range, pages_max).unwrap_or_default()
    }

    /// Handles a thread that waits for a page that is being read from an area. A stream that waits has too
    /// little under way. So the stream asks for the next window before it comes to a marker.
    pub fn joined(&mut self, page: PageIndex, range: PageRange, pages_max: u32) -> Seen {
        let page = page.0 as i64;
        if let Some(seen) = self.reached(page, range, pages_max) {
            return seen;
        }
        let Some(at) = self.on_the_way(page) else { return Seen::default() };
        let now = self.count;
        let stream = &mut self.live[at];
        stream.is_at(page, now);
        let window = i64::from(stream.window);
        let asked = (stream.asked - stream.at) / stream.stride;
        let may_ask = !stream.has_closed
            && asked + window <= WINDOWS_ASKED_MAX * window
            && stream.steps >= STEPS_FOR_ONE_MORE * u64::from(stream.window);
        let window = if may_ask { self.ask(at, range, pages_max) } else { None };
        Seen { window, is_walk: true, ..Seen::default() }
    }

    fn awaiting(&self, page: i64) -> Option<usize> {
        let of_it = |stream: &Stream| {
            stream.stride != 0 && (stream.marker_at(page).is_some() || stream.closing == page)
        };
        self.live[..self.used].iter().position(of_it)
    }

    /// Whether a parked page stays because a stream will come to it. Called when the page would be placed. A
    /// page isn't held for ever, because the stream may have ended.
    pub(crate) fn holds(&mut self, page: PageIndex) -> bool {
        let Some(at) = self.awaiting(page.0 as i64) else { return false };
        let stream = &mut self.live[at];
        stream.held = stream.held.saturating_add(1);
        stream.held <= HELD_MAX
    }

    /// Handles a stream that has come to its marker, or to the end of its way.
    fn reached(&mut self, page: i64, range: PageRange, pages_max: u32) -> Option<Seen> {
        let at = self.awaiting(page)?;
        let now = self.count;
        let stream = &mut self.live[at];
        stream.is_at(page, now);
        if stream.closing == page {
            // If the walk goes on all the same, its next fault finds the stream here.
            (stream.closing, stream.has_closed) = (NOWHERE, true);
            let hits = stream.take_mapped();
            stream.markers = [Marker::NONE; WINDOWS_ASKED_MAX as usize];
            self.pay(at, hits);
            return Some(Seen { hits, is_walk: true, ..Seen::default() });
        }
        // Untouched markers before this one are passed over.
        let mut hits = 0;
        while stream.marker_at(page).is_some() {
            hits += stream.behind;
            stream.behind = stream.take_marker(0);
        }
        self.pay(at, hits);
        Some(Seen { hits, window: self.ask(at, range, pages_max), is_walk: true, ..Seen::default() })
    }

    fn of(&mut self, window: &Window) -> Option<&mut Stream> {
        let stream = &mut self.live[window.stream.at as usize];
        (stream.serial == window.stream.serial && stream.stride != 0).then_some(stream)
    }

    /// Returns how many of a window's pages the walk has gone through already.
    pub fn passed_in(&mut self, window: &Window) -> u32 {
        let first = window.first.0 as i64;
        let Some(stream) = self.of(window) else { return 0 };
        let steps = (stream.at - first) / stream.stride + 1;
        steps.clamp(0, i64::from(window.count)) as u32
    }

    /// Records that the first page of a window is about to be parked as its marker. Call before the page can
    /// be touched: the stream may come to it long before the whole window is there.
    pub fn mark(&mut self, window: &Window, marker: PageIndex) {
        let Some(stream) = self.of(window) else { return };
        if stream.markers[stream.markers.len() - 1].page != NOWHERE {
            // All places are taken: the first marker is passed over.
            stream.behind += stream.take_marker(0);
        }
        let page = marker.0 as i64;
        // Windows are begun in order, or nearly so.
        let is_later = |marker: &Marker| marker.page == NOWHERE || stream.is_before(page, marker.page);
        let at = stream.markers.iter().position(is_later).unwrap_or(0);
        stream.markers[at..].rotate_right(1);
        stream.markers[at] = Marker { page, mapped: 0 };
    }

    /// Records that the last page of the stream's way is about to be parked.
    pub fn close(&mut self, window: &Window, closing: PageIndex) {
        if let Some(stream) = self.of(window) {
            stream.closing = closing.0 as i64;
        }
    }

    /// Forgets a page that was to be parked and could not be.
    pub fn unmark(&mut self, window: &Window, page: PageIndex) {
        let Some(stream) = self.of(window) else { return };
        let page = page.0 as i64;
        if let Some(at) = stream.marker_at(page) {
            let mapped = stream.take_marker(at);
            *stream.before_marker(at) += mapped;
        }
        if stream.closing == page {
            stream.closing = NOWHERE;
        }
    }

    /// Records that `mapped` pages were mapped for a walk that has outrun its window.
    pub fn caught_up(&mut self, window: &Window, mapped: u32) {
        if let Some(stream) = self.of(window) {
            stream.behind += mapped;
        }
    }

    /// Records that a window was brought in, as far as it could be. Returns the number of pages that the
    /// stream is seen behind already.
    pub fn landed(&mut self, window: &Window, landed: Landed) -> u32 {
        let Some(stream) = self.of(window) else { return 0 };
        let end = window.page(landed.steps).0 as i64;
        if landed.was_late {
            let most =
                (stream.steps / STEPS_FOR_ONE_READ).clamp(u64::from(WINDOW_MIN), u64::from(WINDOW_MAX));
            stream.was_outrun(1 << most.ilog2());
        }
        if landed.steps < window.count && stream.asked == window.page(window.count).0 as i64 {
            // The window was broken off. The next fault asks for the rest.
            stream.asked = end;
        }
        if stream.is_before(stream.landed, end) {
            stream.landed = end;
        }
        if stream.is_before(stream.asked, end) {
            stream.asked = end;
        }
        let marker = landed.marker.and_then(|page| stream.marker_at(page.0 as i64));
        *stream.before_marker(marker.map_or(0, |at| at + 1)) += landed.mapped;
        if !stream.has_closed {
            return 0;
        }
        let hits = stream.all_passed();
        // The window was late; the walk didn't jump.
        stream.has_jumped = false;
        hits
    }

    /// Returns up to `wanted` pages that one stream has gone through and that weren't returned before. Of the
    /// streams with enough of these pages, the one that was seen last is chosen. All streams share `kept`
    /// steps that stay behind them. Streams that have ended count until their places are needed.
    pub(crate) fn take_passed(&mut self, wanted: u32, kept: u64) -> Option<Passed> {
        let live = || self.live[..self.used].iter().filter(|stream| stream.stride != 0);
        let for_one = (kept / live().count().max(1) as u64).max(KEPT_MIN);
        let now = self.count;
        let enough = for_one + u64::from(wanted.min(PASSED_MIN));
        let streams = self.live[..self.used].iter_mut().filter(|stream| stream.stride != 0);
        let stream = streams
            .filter(|stream| stream.passed() >= enough)
            .min_by_key(|stream| now.wrapping_sub(stream.used))?;
        // Pages farther behind were gone through long ago.
        let skipped = stream.passed().saturating_sub(for_one + kept.max(u64::from(wanted)));
        stream.shown += skipped as i64 * stream.stride;
        let count = (stream.passed() - for_one).min(u64::from(wanted)) as u32;
        let (from, stride) = (stream.shown, stream.stride);
        stream.shown += i64::from(count) * stride;
        let first = if stride > 0 { from } else { stream.shown - stride };
        Some(Passed { first: PageIndex(first as u64), stride: stride.unsigned_abs(), count })
    }

    /// Whether a stream was seen lately, and [`Streams::take_passed`] has nothing to return.
    pub(crate) fn is_all_taken(&self, kept: u64) -> bool {
        let live = || self.live[..self.used].iter().filter(|stream| stream.stride != 0);
        let for_one = (kept / live().count().max(1) as u64).max(KEPT_MIN);
        live().any(|stream| self.count.wrapping_sub(stream.used) < REMEMBERED as u32)
            && live().all(|stream| stream.passed() < for_one + u64::from(PASSED_MIN))
    }

    /// Lists the pages that streams have had brought in and not read yet, so that the hand spares them. Each
    /// stream is spared once, because it may have ended.
    pub(crate) fn unread(&self, out: &mut Unread) {
        let is_open = |stream: &Stream| stream.stride != 0 && !stream.was_spared && stream.has_unread();
        out.count = 0;
        for (at, stream) in self.live[..self.used].iter().enumerate().filter(|(_, stream)| is_open(stream)) {
            let (low, high) = (stream.at.min(stream.landed), stream.at.max(stream.landed));
            out.list[out.count] = Part { low, high, stride: stream.stride.abs(), at, was_met: false };
            out.count += 1;
        }
    }

    /// Records that the hand has passed over these pages.
    pub(crate) fn were_spared(&mut self, unread: &Unread) {
        for part in unread.list[..unread.count].iter().filter(|part| part.was_met) {
            self.live[part.at].was_spared = true;
        }
    }
}

/// Pages that a stream has gone through, the lowest first.
pub(crate) struct Passed {
    pub(crate) first: PageIndex,
    stride: u64,
    pub(crate) count: u32,
}

impl Passed {
    pub(crate) fn pages(&self) -> impl Iterator<Item = PageIndex> + use<> {
        let (first, stride) = (self.first, self.stride);
        (0..u64::from(self.count)).map(move |step| first.plus(step * stride))
    }
}

/// Unread pages of one stream.
#[derive(Clone, Copy)]
struct Part {
    low: i64,
    high: i64,
    stride: i64,
    at: usize,
    was_met: bool,
}

/// Pages that were brought in for streams and that the streams haven't come to yet.
pub(crate) struct Unread {
    list: [Part; STREAMS],
    count: usize,
}

impl Unread {
    /// Returns an empty list.
    pub(crate) const fn new() -> Unread {
        Unread { list: [Part { low: 0, high: 0, stride: 1, at: 0, was_met: false }; STREAMS], count: 0 }
    }

    /// Whether `page` is one of the unread pages. If so, remembers that its stream's part was met.
    pub(crate) fn meets(&mut self, page: PageIndex) -> bool {
        let page = page.0 as i64;
        let has =
            |part: &&mut Part| (part.low..=part.high).contains(&page) && (page - part.low) % part.stride == 0;
        let found = self.list[..self.count].iter_mut().find(has);
        found.is_some_and(|part| {
            part.was_met = true;
            true
        })
    }
}

#[cfg(test)]
mod tests;
