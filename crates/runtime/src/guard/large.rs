//! Reads and writes that are too large to hold all of their memory at once: they are made in parts.
//!
//! A program reads a whole file into memory that it has no RAM for, or writes it out. From files that happens here, one part
//! after the other, as the kernel does it: nothing interrupts it. Pipes and sockets may keep a thread waiting, and a signal
//! must reach it then: writes wait for room with the program's own mask of signals and write what is sure not to wait;
//! reads just ask for less, which is what such reads must be content with anyway. Reads that don't wait ask for all there is:
//! who has asked for more than came knows that there is no more, and waits for news (epoll's edges). Lists of buffers are gone
//! through.
// UNSAFETY: the program's own calls are made, in parts.

use super::buffers::{Buffer, END, MSGHDR, Memory, SOCKET_ADDRESS_BYTES};
use super::calls::How;
use super::resident::Guarding;
use super::rooms::{Level, Room};
use super::signals::{self, open};
use crate::engine::Engine;
use farpage_os::clock::sleep_ns;
use farpage_os::dispatch::Call;
use farpage_os::signal::{Context, Register};
use farpage_os::sys;
use linux_raw_sys::general as raw;
use rustix::fd::BorrowedFd;
use rustix::fs::FileType;

/// Most of a call's memory that is held at once; less with a small budget.
const PART_BYTES_MAX: usize = 1 << 20;
/// And not less than this, or `PIPE_BUF`s would be torn.
const PART_BYTES_MIN: usize = 64 << 10;
/// A part of the budget that one call may hold: 1/64.
const BUDGET_SHARE: u64 = 64;
/// Up to this part of the budget a write to a file is made whole: 1/4.
const WHOLE_WRITE_SHARE: u64 = 4;
/// The kernel moves no more in one call (MAX_RW_COUNT).
const BYTES_MAX: usize = 0x7fff_f000;
/// What a pipe that is ready takes without waiting (`PIPE_BUF`), and a socket, too.
const READY_BYTES: usize = 4096;

/// Between two tries of who found room and then none.
const PAUSE_NS: u64 = 100_000;

const READ: usize = raw::__NR_read as usize;
const WRITE: usize = raw::__NR_write as usize;
const PREAD: usize = raw::__NR_pread64 as usize;
const PWRITE: usize = raw::__NR_pwrite64 as usize;
const SENDTO: usize = raw::__NR_sendto as usize;

/// A call that can be made in parts.
struct Divisible {
    /// Makes one part: the call itself, or the one that does the same with one buffer.
    one: usize,
    /// Where the buffer is among its arguments, with its length behind it.
    buffer: usize,
    is_write: bool,
    /// It is given a list of buffers.
    is_list: bool,
}

impl Divisible {
    const fn new(one: usize, buffer: usize, is_write: bool, is_list: bool) -> Divisible {
        Divisible { one, buffer, is_write, is_list }
    }

    /// Of a plain one.
    const fn of(call: &Call) -> Option<Divisible> {
        /// MSG_DONTWAIT, MSG_NOSIGNAL, MSG_MORE, MSG_CMSG_CLOEXEC. With others it isn't the same in parts: looked at and not taken,
        /// all or nothing, sent from where it lies.
        const HARMLESS: usize = 0x40 | 0x4000 | 0x8000 | 0x4000_0000;
        match call.number as u32 {
            raw::__NR_read | raw::__NR_pread64 => Some(Divisible::new(call.number, 1, false, false)),
            raw::__NR_write | raw::__NR_pwrite64 => Some(Divisible::new(call.number, 1, true, false)),
            raw::__NR_readv => Some(Divisible::new(READ, 1, false, true)),
            raw::__NR_writev => Some(Divisible::new(WRITE, 1, true, true)),
            raw::__NR_preadv => Some(Divisible::new(PREAD, 1, false, true)),
            raw::__NR_pwritev => Some(Divisible::new(PWRITE, 1, true, true)),
            raw::__NR_sendto if call.arguments[3] & !HARMLESS == 0 => {
                Some(Divisible::new(SENDTO, 1, true, false))
            }
            raw::__NR_sendmsg if call.arguments[3] & !HARMLESS == 0 => {
                Some(Divisible::new(SENDTO, 1, true, true))
            }
            raw::__NR_recvfrom if call.arguments[3] & !HARMLESS == 0 => {
                Some(Divisible::new(call.number, 1, false, false))
            }
            raw::__NR_getrandom => Some(Divisible::new(call.number, 0, false, false)),
            _ => None,
        }
    }
}

/// What a descriptor leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Never waits for anybody.
    File,
    /// Bytes in order, perhaps not yet there.
    Stream,
    /// Nothing is open there, or not for this.
    Nothing,
    /// Each call is a message of its own, or means something else: it is left whole.
    Other,
}

/// Makes a call in parts and gives its result, or has it ask for less. None if it is to be made, as `call` says now.
pub fn transfer(
    engine: &'static Engine,
    room: &Room,
    level: &Level,
    call: &mut Call,
    context: &Context,
) -> Option<isize> {
    let mut guarding = Guarding::new(engine, level, context.register(Register::Rsp));
    let plain = plain(call, &mut guarding)?;
    let how = Divisible::of(&plain)?;
    let part = part_bytes(engine);
    let (list, count) = (plain.arguments[how.buffer], plain.arguments[how.buffer + 1]);
    if !how.is_list && count <= part {
        return None;
    }
    let mut buffers = Buffers::new(&how, list, count)?;
    let mut sum = |bytes_of: &dyn Fn(usize, usize) -> usize| {
        let (mut total, mut rest) = (0, buffers);
        while let Some((address, bytes)) = rest.next(&mut guarding)? {
            total += bytes_of(address, bytes);
        }
        Some(total)
    };
    // Most calls are small, and their buffers needn't be looked for.
    if sum(&|_, bytes| bytes)? <= part {
        return None;
    }
    let managed = sum(&|address, bytes| engine.managed_bytes(address, bytes))?;
    if managed <= part {
        return None;
    }
    let fd = call.arguments[0] as i32;
    let kind = if how.buffer == 0 { Kind::File } else { kind(fd, &how) };
    // One write is one step for others that write to the same file: it is only torn where it must be.
    let is_small = managed as u64 <= engine.budget.limit_bytes() / WHOLE_WRITE_SHARE;
    if kind == Kind::File && how.is_write && (is_small || is_appending(fd)) {
        return None;
    }
    let mut parts = Parts { engine, room, level, call: &plain, context, how: &how, done: 0 };
    match kind {
        Kind::File => parts.each(&mut buffers, |parts, address, bytes| parts.all(address, bytes, part)),
        Kind::Stream if how.is_write => {
            let wait = Wait::of(fd, &plain);
            let write = |parts: &mut Parts<'_>, address, bytes| parts.as_there_is_room(&wait, address, bytes);
            parts.each(&mut buffers, write)
        }
        Kind::Stream if Wait::of(fd, &plain).is_not_to && !asks_from_where(&plain) => parts
            .each(&mut buffers, |parts, address, bytes| parts.while_there_is_some(fd, address, bytes, part)),
        Kind::Stream => {
            // As much as is sure to be had at once, into the first buffer.
            let (address, bytes) = buffers.next(&mut guarding)??;
            *call = Call { number: how.one, ..plain };
            (call.arguments[1], call.arguments[2]) = (address, bytes.min(PART_BYTES_MIN));
            None
        }
        // The kernel says so before it looks at any memory.
        // SAFETY: the program's own call.
        Kind::Nothing => Some(unsafe { sys::call(call.number, call.arguments) }),
        Kind::Other => None,
    }
}

/// The call without what it could do besides; none if it is asked to. A message becomes its buffers, and the flags that come
/// with it are where sendto has them.
fn plain(call: &Call, memory: &mut Guarding<'_>) -> Option<Call> {
    let [fd, place, third, at, _, last] = call.arguments;
    let with = |number: u32| Call { number: number as usize, ..*call };
    /// Where the file's own offset is.
    const HERE: usize = usize::MAX;
    match call.number as u32 {
        raw::__NR_preadv2 | raw::__NR_pwritev2 if last != 0 => None,
        raw::__NR_preadv2 if at == HERE => Some(with(raw::__NR_readv)),
        raw::__NR_preadv2 => Some(with(raw::__NR_preadv)),
        raw::__NR_pwritev2 if at == HERE => Some(with(raw::__NR_writev)),
        raw::__NR_pwritev2 => Some(with(raw::__NR_pwritev)),
        raw::__NR_sendmsg => {
            memory.buffer(Buffer { address: place, bytes: MSGHDR, how: How::In });
            // To whom, the list, its length, and how much there is besides bytes.
            let words = [0, 16, 24, 40].map(|at| memory.word(place.wrapping_add(at)));
            let [Some(0), Some(list), Some(count), Some(0)] = words else { return None };
            Some(Call { arguments: [fd, list as usize, count as usize, third, 0, 0], ..*call })
        }
        _ => Some(*call),
    }
}

/// The buffers of a call, one after the other.
#[derive(Clone, Copy)]
struct Buffers {
    /// Of a list of them; else the only one.
    is_list: bool,
    at: usize,
    left: usize,
}

impl Buffers {
    /// None if the kernel refuses the call before it does anything.
    fn new(how: &Divisible, start: usize, count: usize) -> Option<Buffers> {
        const VECTORS_MAX: usize = 1024;
        let bytes = if how.is_list { count.checked_mul(16)? } else { count };
        let is_sound = start.checked_add(bytes)? <= END && !(how.is_list && count > VECTORS_MAX);
        is_sound.then_some(Buffers { is_list: how.is_list, at: start, left: count })
    }

    /// The next one that isn't empty; none inside if there is no more, none at all if the kernel refuses the call.
    #[expect(clippy::option_option, reason = "said above")]
    fn next(&mut self, memory: &mut Guarding<'_>) -> Option<Option<(usize, usize)>> {
        while self.left > 0 {
            if !self.is_list {
                return Some(Some((self.at, core::mem::take(&mut self.left).min(BYTES_MAX))));
            }
            memory.buffer(Buffer { address: self.at, bytes: 16, how: How::In });
            let (address, bytes) = (memory.word(self.at)? as usize, memory.word(self.at + 8)? as usize);
            if address.checked_add(bytes)? > END {
                return None;
            }
            self.at += 16;
            self.left -= 1;
            if bytes > 0 {
                return Some(Some((address, bytes.min(BYTES_MAX))));
            }
        }
        Some(None)
    }
}

fn part_bytes(engine: &'static Engine) -> usize {
    let share = (engine.budget.limit_bytes() / BUDGET_SHARE) as usize;
    share.next_power_of_two().clamp(PART_BYTES_MIN, PART_BYTES_MAX)
}

fn flags(fd: i32) -> Option<rustix::fs::OFlags> {
    // SAFETY: only asked about; what isn't open is an error.
    rustix::fs::fcntl_getfl(unsafe { BorrowedFd::borrow_raw(fd) }).ok()
}

fn is_appending(fd: i32) -> bool {
    flags(fd).is_some_and(|flags| flags.contains(rustix::fs::OFlags::APPEND))
}

fn kind(fd: i32, how: &Divisible) -> Kind {
    const MEMORY_DEVICES: u32 = 1;
    /// Consoles, /dev/tty and the like, and pseudo-terminals.
    const TERMINALS: [u32; 10] = [4, 5, 136, 137, 138, 139, 140, 141, 142, 143];
    let Some(flags) = Some(fd).filter(|fd| *fd >= 0).and_then(flags) else { return Kind::Nothing };
    let mode = flags & rustix::fs::OFlags::RWMODE;
    if mode == if how.is_write { rustix::fs::OFlags::RDONLY } else { rustix::fs::OFlags::WRONLY } {
        return Kind::Nothing;
    }
    let is_positioned = matches!(how.one, PREAD | PWRITE);
    // SAFETY: only asked about; what isn't open is an error.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let Ok(stat) = rustix::fs::fstat(fd) else { return Kind::Nothing };
    let needs_socket = matches!(how.one as u32, raw::__NR_sendto | raw::__NR_recvfrom);
    match FileType::from_raw_mode(stat.st_mode) {
        other if needs_socket && other != FileType::Socket => Kind::Nothing,
        FileType::RegularFile | FileType::BlockDevice => Kind::File,
        // /dev/zero and the like.
        FileType::CharacterDevice if rustix::fs::major(stat.st_rdev) == MEMORY_DEVICES => Kind::File,
        FileType::Fifo | FileType::Socket if is_positioned => Kind::Nothing,
        // Packets; and a terminal that is ready may wait nevertheless.
        FileType::Fifo if flags.contains(rustix::fs::OFlags::DIRECT) => Kind::Other,
        FileType::CharacterDevice if how.is_write => Kind::Other,
        FileType::CharacterDevice if TERMINALS.contains(&rustix::fs::major(stat.st_rdev)) => Kind::Stream,
        FileType::Fifo => Kind::Stream,
        FileType::Socket if is_stream(fd) => Kind::Stream,
        _ => Kind::Other,
    }
}

fn is_stream(fd: BorrowedFd<'_>) -> bool {
    use rustix::fd::AsRawFd;
    const SOCK_STREAM: u32 = 1;
    let (mut value, mut bytes) = (0_u32, 4_u32);
    const SOL_SOCKET: usize = 1;
    const SO_TYPE: usize = 3;
    let arguments =
        [fd.as_raw_fd() as usize, SOL_SOCKET, SO_TYPE, &raw mut value as usize, &raw mut bytes as usize, 0];
    // SAFETY: the kernel writes 4 bytes, and how many there were.
    let asked = unsafe { sys::call(raw::__NR_getsockopt as usize, arguments) };
    asked == 0 && value == SOCK_STREAM
}

/// Who it comes from would have to be told once: such a read asks for less.
fn asks_from_where(call: &Call) -> bool {
    call.number == raw::__NR_recvfrom as usize && call.arguments[4] != 0
}

/// Whether there is an error to be told, or something in the queue of errors (what was sent from where it lies, times): that can't
/// be told apart without taking the error.
fn is_broken(fd: i32, signs: u64) -> bool {
    let mut asked = u64::from(fd as u32);
    let at_once = [0_u64; 2];
    let arguments = [&raw mut asked as usize, 1, at_once.as_ptr() as usize, 0, 0, 0];
    // SAFETY: one `pollfd` and a `timespec`, both on our own stack.
    unsafe { sys::call(raw::__NR_ppoll as usize, arguments) };
    asked >> 48 & signs != 0
}

const POLLERR: u64 = 8;
const POLLHUP: u64 = 16;

struct Parts<'a> {
    engine: &'static Engine,
    room: &'a Room,
    level: &'a Level,
    call: &'a Call,
    context: &'a Context,
    how: &'a Divisible,
    /// Bytes, of all parts so far.
    done: usize,
}

/// The call is to be made again, as the kernel says it to itself (`ERESTARTSYS`).
pub const RESTART: isize = -512;

/// A call is over before all of its parts were made; the kernel's last word.
struct Over(isize);

impl Parts<'_> {
    fn guarding(&self) -> Guarding<'_> {
        Guarding::new(self.engine, self.level, self.context.register(Register::Rsp))
    }

    /// One buffer after the other.
    fn each(
        &mut self,
        buffers: &mut Buffers,
        transfer: impl Fn(&mut Self, usize, usize) -> Result<(), Over>,
    ) -> Option<isize> {
        loop {
            let next = buffers.next(&mut self.guarding());
            let Some((address, bytes)) = next.flatten().filter(|_| self.done < BYTES_MAX) else {
                return Some(self.done as isize);
            };
            let bytes = bytes.min(BYTES_MAX - self.done);
            if let Err(Over(last)) = transfer(self, address, bytes) {
                // An error only if it is all that there is to say.
                return Some(if self.done > 0 { self.done as isize } else { last });
            }
        }
    }

    /// One part, by the call itself.
    fn part(&mut self, address: usize, bytes: usize) -> isize {
        let number = self.how.one;
        // SAFETY: the caller's, a part of the program's own call.
        self.part_by(address, bytes, |arguments| unsafe { sys::call(number, arguments) })
    }

    /// One part, with its memory held meanwhile. The kernel's word.
    fn part_by(&mut self, address: usize, bytes: usize, make: impl FnOnce([usize; 6]) -> isize) -> isize {
        let mut arguments = self.call.arguments;
        arguments[self.how.buffer] = address;
        arguments[self.how.buffer + 1] = bytes;
        if matches!(self.how.one, PREAD | PWRITE) {
            arguments[3] = arguments[3].wrapping_add(self.done);
        }
        self.level.holder.release();
        let how = if self.how.is_write { How::In } else { How::Out };
        self.guarding().buffer(Buffer { address, bytes, how });
        if self.how.one == SENDTO && arguments[4] != 0 {
            self.guarding().buffer(Buffer {
                address: arguments[4],
                bytes: SOCKET_ADDRESS_BYTES,
                how: How::In,
            });
        }
        let result = make(arguments);
        if result > 0 {
            self.done += result as usize;
        }
        result
    }

    fn all(&mut self, address: usize, bytes: usize, part: usize) -> Result<(), Over> {
        for start in (0..bytes).step_by(part) {
            let wanted = part.min(bytes - start);
            let last = self.part(address + start, wanted);
            // Nobody may wait for the rest of a long transfer who wants to end the program.
            if last < wanted as isize || signals::is_ending(self.context.blocked) {
                return Err(Over(last));
            }
        }
        Ok(())
    }

    /// What is there, of a stream that isn't waited for.
    fn while_there_is_some(
        &mut self,
        fd: i32,
        address: usize,
        bytes: usize,
        part: usize,
    ) -> Result<(), Over> {
        for start in (0..bytes).step_by(part) {
            // An error that comes now is the next call's to tell: this one would take it along.
            if self.done > 0 && is_broken(fd, POLLERR) {
                return Err(Over(0));
            }
            self.all(address + start, part.min(bytes - start), part)?;
        }
        Ok(())
    }

    fn as_there_is_room(&mut self, wait: &Wait, address: usize, bytes: usize) -> Result<(), Over> {
        let mut done = 0;
        while done < bytes {
            let blocked = self.context.blocked & !open();
            let (waited, came) = self.room.at_work.waiting(|| wait.for_room(blocked));
            if let Some(signal) = came {
                // Its handler runs now. With nothing written yet the call is made again after it, if both say so.
                let restarts = wait.is_patient() && signals::disposition(signal).restarts();
                return Err(Over(if restarts { RESTART } else { EINTR }));
            }
            match waited.unwrap_or(EINTR) {
                0 => {}
                // The thread was stopped, or the like.
                EINTR => continue,
                error => return Err(Over(error)),
            }
            // As above.
            if self.done > 0 && wait.is_socket && is_broken(wait.fd, POLLERR | POLLHUP) {
                return Err(Over(0));
            }
            let now = READY_BYTES.min(bytes - done);
            let (one, has_begun) = (self.how.one, self.done > 0);
            let write = |arguments| match wait.is_socket {
                true => send_now(one, arguments, has_begun),
                false => write_now(arguments),
            };
            let mut last = self.part_by(address + done, now, write);
            // The latter two: by a filter of the program's that has never heard of this call.
            if matches!(last, EOPNOTSUPP | ENOSYS | EPERM) {
                last = self.part(address + done, now);
            } else if last == EAGAIN && !wait.is_not_to {
                // Another writer was quicker.
                sleep_ns(PAUSE_NS);
                continue;
            }
            if last <= 0 {
                return Err(Over(last));
            }
            done += last as usize;
        }
        Ok(())
    }
}

/// Writes what there is room for, and waits for none: here no signal reaches the thread, and whoever else writes to the same pipe may
/// have been quicker. EOPNOTSUPP where the kernel knows no such thing (pipes before 6.5; named ones, and those that splice was used on).
fn write_now(arguments: [usize; 6]) -> isize {
    let [fd, address, bytes, ..] = arguments;
    let list = [address, bytes];
    let here = usize::MAX;
    let write = [fd, list.as_ptr() as usize, 1, here, 0, raw::RWF_NOWAIT as usize];
    // SAFETY: a part of the program's own call; the list is on our own stack.
    unsafe { sys::call(raw::__NR_pwritev2 as usize, write) }
}

/// The same to a socket. Who has sent something gets no SIGPIPE for the rest.
fn send_now(number: usize, arguments: [usize; 6], has_begun: bool) -> isize {
    const MSG_NOSIGNAL: usize = 0x4000;
    let [fd, address, bytes, flags, to, to_bytes] = arguments;
    let (flags, to, to_bytes) = if number == SENDTO { (flags, to, to_bytes) } else { (0, 0, 0) };
    let flags = flags | MSG_DONTWAIT | if has_begun { MSG_NOSIGNAL } else { 0 };
    // SAFETY: a part of the program's own call.
    unsafe { sys::call(SENDTO, [fd, address, bytes, flags, to, to_bytes]) }
}

const MSG_DONTWAIT: usize = 0x40;
const ENOSYS: isize = -(linux_raw_sys::errno::ENOSYS as isize);
const EPERM: isize = -(linux_raw_sys::errno::EPERM as isize);
const EOPNOTSUPP: isize = -(linux_raw_sys::errno::EOPNOTSUPP as isize);
const EINTR: isize = -(linux_raw_sys::errno::EINTR as isize);
const EAGAIN: isize = -(linux_raw_sys::errno::EAGAIN as isize);

/// How a writer waits for room.
struct Wait {
    fd: i32,
    /// It doesn't: the kernel says EAGAIN instead.
    is_not_to: bool,
    /// Seconds and microseconds after which it gives up; zeros for never (SO_SNDTIMEO).
    limit: [u64; 2],
    is_socket: bool,
}

impl Wait {
    fn of(fd: i32, call: &Call) -> Wait {
        const SOL_SOCKET: usize = 1;
        const SO_SNDTIMEO: usize = 21;
        let has_flags =
            matches!(call.number as u32, raw::__NR_sendto | raw::__NR_recvfrom | raw::__NR_sendmsg);
        let is_told = has_flags && call.arguments[3] & MSG_DONTWAIT != 0;
        let is_set = flags(fd).is_some_and(|flags| flags.contains(rustix::fs::OFlags::NONBLOCK));
        let (mut limit, mut bytes) = ([0_u64; 2], 16_u32);
        let place =
            [fd as usize, SOL_SOCKET, SO_SNDTIMEO, &raw mut limit as usize, &raw mut bytes as usize, 0];
        // SAFETY: the kernel writes a `timeval`, and how long it is. What is no socket leaves it zero.
        let is_socket = unsafe { sys::call(raw::__NR_getsockopt as usize, place) } == 0;
        Wait { fd, is_not_to: is_told || is_set, limit, is_socket }
    }

    /// Whether it would wait for ever: with a limit of time a call isn't made again after a handler.
    fn is_patient(&self) -> bool {
        self.limit == [0, 0]
    }

    /// Until something can be written, or a signal of the program's has come. An error if there is nothing to be written to.
    fn for_room(&self, mask: u64) -> isize {
        const POLLOUT: u64 = 4;
        if self.is_not_to {
            return 0;
        }
        let mut asked = u64::from(self.fd as u32) | POLLOUT << 32;
        let mut limit = [self.limit[0], self.limit[1] * 1000];
        let limit = if self.is_patient() { 0 } else { &raw mut limit as usize };
        let arguments = [&raw mut asked as usize, 1, limit, &raw const mask as usize, size_of::<u64>(), 0];
        // SAFETY: one `pollfd`, a `timespec` and a mask of 8 bytes, all on our own stack.
        match unsafe { sys::call(raw::__NR_ppoll as usize, arguments) } {
            EINTR => EINTR,
            0 => EAGAIN,
            _ => 0,
        }
    }
}
