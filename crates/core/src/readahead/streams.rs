//! Readahead by streams: many walks through one region are found and kept apart, each with its stride.
//!
//! Faults that can't be served from a frame are remembered for a while. One that continues two steps of one page,
//! or three of another stride, begins a *stream*. From then on its pages are brought in a window at a time and
//! mapped at once, all but the window's first, the *marker*, which stays parked. A fault on the marker costs
//! little, says that the stream is alive, and starts the next window in the background.
//!
//! Nobody sees a mapped page being touched. So the pages of a window count as used only when the stream is seen
//! behind them: at the next window's marker, or at the range's last page, which stays parked for this. What a
//! stream never got past counts as read in vain.
//!
//! Random faults begin no stream but by accident: two others of the last [`REMEMBERED`] would have to be exactly
//! one and two pages away, in this order. They can't push a live stream out either: the two tables are apart.

use crate::units::{PageIndex, PageRange};

/// Streams that are kept. More than that and the one that has been quiet longest is forgotten.
pub const STREAMS: usize = 64;
/// Faults that are remembered.
pub const REMEMBERED: usize = 64;
/// Strides of more pages than this are not looked for.
const STRIDE_MAX: u64 = 64;
/// Pages of the first window, and the fewest later on.
const WINDOW_MIN: u32 = 8;
/// Pages of the largest window.
pub const WINDOW_MAX: u32 = 256;
/// Steps that a stream must have gone for each page of its windows. A stream that ends leaves about one and a half
/// windows unused: with this, less than a hundredth of what it has read.
const STEPS_FOR_ONE: u64 = 256;
/// A stream that outruns its windows gets larger ones sooner, up to this.
const LATE_WINDOW_MAX: u32 = 64;
/// Pages that a window may pass over because they are there already, for each that it brings.
const REACH: u32 = 4;

/// One stream, even after another one has taken its place in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamId {
    at: u32,
    serial: u32,
}

/// Pages to bring in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// For whom.
    pub stream: StreamId,
    /// The first page.
    pub first: PageIndex,
    /// Pages from one to the next; may be negative.
    pub stride: i64,
    /// Pages to bring.
    pub count: u32,
    /// Pages to look at for that, at most: those that are there already don't count.
    pub reach: u32,
    /// Behind it the range ends.
    pub closes: bool,
}

impl Window {
    /// The page `step` steps from the first.
    pub const fn page(&self, step: u32) -> PageIndex {
        PageIndex((self.first.0 as i64 + step as i64 * self.stride) as u64)
    }
}

/// What a fault led to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Pages that were mapped at once and that the stream is now seen behind.
    pub hits: u32,
    /// What to bring in next.
    pub window: Option<Window>,
}

/// What became of a window.
#[derive(Clone, Copy, Debug, Default)]
pub struct Landed {
    /// The page that was parked as the window's marker.
    pub marker: Option<PageIndex>,
    /// The last page of the range, parked.
    pub closing: Option<PageIndex>,
    /// Pages mapped at once.
    pub mapped: u32,
    /// Steps gone through, from the window's first page.
    pub steps: u32,
}

/// A walk. Positions are page numbers; `stride` is 0 while the place is free.
#[derive(Clone, Copy)]
struct Stream {
    serial: u32,
    stride: i64,
    /// Where the walk was last seen.
    at: i64,
    /// What lies before this has been brought in.
    landed: i64,
    /// What lies before this has been asked for.
    asked: i64,
    /// Steps gone since it was found.
    steps: u64,
    window: u32,
    window_floor: u32,
    was_late: bool,
    marker: i64,
    closing: i64,
    /// Pages mapped between the last marker that was touched and the next one.
    behind: u32,
    /// Pages mapped behind the next marker.
    beyond: u32,
    used: u32,
}

/// No page.
const NOWHERE: i64 = -1;

impl Stream {
    const FREE: Stream = Stream {
        serial: 0,
        stride: 0,
        at: 0,
        landed: 0,
        asked: 0,
        steps: 0,
        window: 0,
        window_floor: WINDOW_MIN,
        was_late: false,
        marker: NOWHERE,
        closing: NOWHERE,
        behind: 0,
        beyond: 0,
        used: 0,
    };

    /// Steps from where the walk was last seen to `page`; none if it doesn't lie on its way.
    const fn steps_to(&self, page: i64) -> Option<i64> {
        let way = page - self.at;
        if way % self.stride != 0 {
            return None;
        }
        let steps = way / self.stride;
        if steps > 0 { Some(steps) } else { None }
    }

    /// Whether `page` lies on the way before `limit`.
    const fn is_before(&self, page: i64, limit: i64) -> bool {
        if self.stride > 0 { page < limit } else { page > limit }
    }

    /// How far behind the windows a fault may be and still belong to the stream.
    const fn slack(&self) -> i64 {
        if self.stride.abs() > 1 {
            2
        } else if self.window > WINDOW_MIN {
            self.window as i64
        } else {
            WINDOW_MIN as i64
        }
    }

    fn is_at(&mut self, page: i64, now: u32) {
        self.used = now;
        if let Some(steps) = self.steps_to(page) {
            self.steps += steps as u64;
            self.at = page;
        }
    }

    /// Everything mapped so far lies behind the walk.
    fn all_passed(&mut self) -> u32 {
        let hits = self.behind + self.beyond;
        (self.behind, self.beyond) = (0, 0);
        hits
    }

    /// The next window, clipped to `range`.
    fn ask(&mut self, index: usize, range: PageRange, pages_max: u32) -> Option<Window> {
        let most = pages_max.clamp(1, WINDOW_MAX);
        let earned = (self.steps / STEPS_FOR_ONE).min(u64::from(most)) as u32;
        let earned = if earned == 0 { 0 } else { 1 << earned.ilog2() };
        self.window = earned.max(self.window_floor).min(most);
        let first = PageIndex(u64::try_from(self.asked).ok()?);
        if !range.contains(first) {
            return None;
        }
        let stride = self.stride.unsigned_abs();
        let room = if self.stride > 0 { range.end.0 - 1 - first.0 } else { first.0 - range.start.0 };
        let left = room / stride + 1;
        // A short rest comes along.
        let wanted = u64::from(self.window);
        let count =
            if left <= u64::from(most) && left <= wanted + wanted / 2 { left } else { wanted.min(left) };
        let reach = left.min(count * u64::from(REACH)) as u32;
        self.asked += count as i64 * self.stride;
        let stream = StreamId { at: index as u32, serial: self.serial };
        Some(Window { stream, first, stride: self.stride, count: count as u32, reach, closes: count == left })
    }
}

/// Every stream of one space, and the faults that may become some.
pub struct Streams {
    live: [Stream; STREAMS],
    faults: [u64; REMEMBERED],
    /// Faults so far; the newest is at this minus one, in the ring.
    count: u32,
    serial: u32,
}

impl Default for Streams {
    fn default() -> Self {
        Streams::new()
    }
}

impl Streams {
    /// None yet.
    pub const fn new() -> Streams {
        Streams { live: [Stream::FREE; STREAMS], faults: [u64::MAX; REMEMBERED], count: 0, serial: 0 }
    }

    /// A fault that no frame could serve, in `range`. Windows have `pages_max` pages at most.
    pub fn fault(&mut self, page: PageIndex, range: PageRange, pages_max: u32) -> Seen {
        self.count = self.count.wrapping_add(1);
        let seen = match self.on_the_way(page.0 as i64) {
            Some(at) => self.fault_of(at, page.0 as i64, range, pages_max),
            None => self.begin(page, range, pages_max).unwrap_or_default(),
        };
        self.faults[self.count as usize % REMEMBERED] = page.0;
        seen
    }

    /// The stream that `page` belongs to: of several, the one that was seen last.
    fn on_the_way(&self, page: i64) -> Option<usize> {
        let is_near = |stream: &Stream| {
            stream.stride != 0
                && stream.steps_to(page).is_some()
                && stream.is_before(page, stream.asked + (stream.slack() + 1) * stream.stride)
        };
        let of_it = self.live.iter().enumerate().filter(|(_, stream)| is_near(stream));
        let age = |stream: &Stream| self.count.wrapping_sub(stream.used);
        of_it.min_by_key(|(_, stream)| age(stream)).map(|(at, _)| at)
    }

    /// A stream faults where its windows should have been.
    fn fault_of(&mut self, at: usize, page: i64, range: PageRange, pages_max: u32) -> Seen {
        let now = self.count;
        let stream = &mut self.live[at];
        stream.is_at(page, now);
        if stream.is_before(page, stream.landed) {
            // The page was not brought in, or has been evicted since: don't count it as used.
            let part = if stream.behind > 0 { &mut stream.behind } else { &mut stream.beyond };
            *part = part.saturating_sub(1);
            return Seen::default();
        }
        let hits = stream.all_passed();
        if stream.is_before(page, stream.asked) {
            // The window is on its way: the stream outruns it.
            if !stream.was_late && stream.steps > u64::from(2 * WINDOW_MIN) {
                stream.was_late = true;
                stream.window_floor = (stream.window_floor * 2).min(LATE_WINDOW_MAX);
            }
            return Seen { hits, window: None };
        }
        stream.asked = page + stream.stride;
        Seen { hits, window: self.ask(at, range, pages_max) }
    }

    fn ask(&mut self, at: usize, range: PageRange, pages_max: u32) -> Option<Window> {
        self.live[at].was_late = false;
        self.live[at].ask(at, range, pages_max)
    }

    /// How many faults ago `page` was one.
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

    /// The stride of which this fault is the third step, or the fourth.
    fn stride_at(&self, page: u64) -> Option<i64> {
        if let Some(unit) = [1, -1].into_iter().find(|unit| self.continues(page, *unit, 2)) {
            return Some(unit);
        }
        let near = |fault: &u64| (2..=STRIDE_MAX).contains(&fault.abs_diff(page));
        let strides = self.faults.iter().filter(|fault| near(fault)).map(|fault| page as i64 - *fault as i64);
        strides.into_iter().find(|stride| self.continues(page, *stride, 3))
    }

    fn begin(&mut self, page: PageIndex, range: PageRange, pages_max: u32) -> Option<Seen> {
        let stride = self.stride_at(page.0)?;
        let age = |stream: &Stream| self.count.wrapping_sub(stream.used);
        let quiet = |stream: &Stream| if stream.stride == 0 { u32::MAX } else { age(stream) };
        let at = (0..STREAMS).max_by_key(|at| quiet(&self.live[*at]))?;
        self.serial = self.serial.wrapping_add(1);
        let next = page.0 as i64 + stride;
        self.live[at] = Stream {
            serial: self.serial,
            stride,
            at: page.0 as i64,
            landed: next,
            asked: next,
            used: self.count,
            ..Stream::FREE
        };
        Some(Seen { hits: 0, window: self.ask(at, range, pages_max) })
    }

    /// A parked page that was read ahead was touched. The page itself is counted by its mark.
    pub fn touched(&mut self, page: PageIndex, range: PageRange, pages_max: u32) -> Seen {
        let page = page.0 as i64;
        let now = self.count;
        let of_it = |stream: &Stream| stream.stride != 0 && (stream.marker == page || stream.closing == page);
        let Some(at) = self.live.iter().position(of_it) else { return Seen::default() };
        let stream = &mut self.live[at];
        stream.is_at(page, now);
        if stream.closing == page {
            let hits = stream.all_passed();
            *stream = Stream::FREE;
            return Seen { hits, window: None };
        }
        let hits = stream.behind;
        (stream.behind, stream.beyond, stream.marker) = (stream.beyond, 0, NOWHERE);
        Seen { hits, window: self.ask(at, range, pages_max) }
    }

    /// A window was brought in, as far as it could be.
    pub fn landed(&mut self, window: &Window, landed: Landed) {
        let stream = &mut self.live[window.stream.at as usize];
        if stream.serial != window.stream.serial || stream.stride == 0 {
            return;
        }
        let end = window.page(landed.steps).0 as i64;
        if stream.is_before(stream.landed, end) {
            stream.landed = end;
        }
        if stream.is_before(stream.asked, end) {
            stream.asked = end;
        }
        // A marker that was not reached is passed over: behind the new one all is new.
        stream.behind += stream.beyond;
        (stream.beyond, stream.marker) = (landed.mapped, NOWHERE);
        match landed.marker {
            Some(marker) => stream.marker = marker.0 as i64,
            None => (stream.behind, stream.beyond) = (stream.behind + stream.beyond, 0),
        }
        if let Some(closing) = landed.closing {
            stream.closing = closing.0 as i64;
        }
    }
}

#[cfg(test)]
mod tests;
