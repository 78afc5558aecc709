//! Reads and writes that are too large to hold all of their memory at once are made in parts.
//!
//! A program may read a whole file into memory for which it has no RAM, or write that memory out. A transfer
//! from or to a file is made here, one part after the other. As in the kernel, only a signal that ends the
//! program interrupts the transfer.
//!
//! Pipes and sockets may keep a thread waiting, and a signal must reach the thread then. Writes wait for free
//! space with the program's own mask of signals, and write what is sure not to wait. Reads ask for less, and
//! their callers must be content with less anyway. Reads that don't wait ask for all there is. A caller that
//! gets less than it asked for knows that there is no more, and waits for news (epoll's edges). Lists of
//! buffers are gone through.
// UNSAFETY: the program's own calls are made, in parts.

use super::buffers::{Buffer, END, MSGHDR, Memory, SOCKET_ADDRESS_BYTES};
use super::calls::How;
use super::resident::Guarding;
use super::rooms::{Level, Room};
use super::signals::{self, open};
use crate::engine::Engine;
use core::cell::Cell;
use farpage_os::clock::now_ns;
use farpage_os::dispatch::Call;
use farpage_os::errno::returned::{EAGAIN, EINTR, ENOSYS, EOPNOTSUPP, EPERM};
use farpage_os::signal::{Context, Register};
use farpage_os::sys;
use linux_raw_sys::general as raw;
use rustix::fd::BorrowedFd;
use rustix::fs::FileType;

/// Bytes of a call's memory that are held at once, at most. A small budget means fewer.
const PART_BYTES_MAX: usize = 1 << 20;
/// Bytes of a part, at least. Smaller parts would tear writes of `PIPE_BUF` bytes.
const PART_BYTES_MIN: usize = 64 << 10;
/// Divisor of the budget: one call may hold 1/64 of it.
const BUDGET_SHARE: u64 = 64;
/// Divisor of the budget: a write to a file is made whole if it is up to 1/4 of the budget.
const WHOLE_WRITE_SHARE: u64 = 4;
/// Bytes that the kernel moves in one call, at most (MAX_RW_COUNT).
const BYTES_MAX: usize = 0x7fff_f000;
/// Bytes that a ready pipe or socket takes without waiting (`PIPE_BUF`).
const READY_BYTES: usize = 4096;

/// Nanoseconds after which a writer tries again that was told of free space and then found none. Each further
/// refusal doubles the pause.
const FIRST_PAUSE_NS: u64 = 100_000;
/// Nanoseconds after which a writer to a socket tries again, whatever poll(2) shows.
const TRY_AGAIN_NS: u64 = 100_000_000;

/// Nanoseconds of a second.
const SECOND_NS: u64 = 1_000_000_000;

const SOL_SOCKET: usize = 1;
const SO_PROTOCOL: usize = 38;
const SO_DOMAIN: usize = 39;
const AF_UNIX: u32 = 1;
const AF_INET: u32 = 2;
const AF_INET6: u32 = 10;
const IPPROTO_TCP: u32 = 6;

const READ: usize = raw::__NR_read as usize;
const WRITE: usize = raw::__NR_write as usize;
const PREAD: usize = raw::__NR_pread64 as usize;
const PWRITE: usize = raw::__NR_pwrite64 as usize;
const SENDTO: usize = raw::__NR_sendto as usize;

/// A call that can be made in parts.
struct Divisible {
    /// Number of the call that makes one part: the call itself, or one that does the same with one buffer.
    one: usize,
    /// Index of the buffer among the arguments. The buffer's length comes next.
    buffer: usize,
    is_write: bool,
    /// The call is given a list of buffers.
    is_list: bool,
}

impl Divisible {
    const fn new(one: usize, buffer: usize, is_write: bool, is_list: bool) -> Divisible {
        Divisible { one, buffer, is_write, is_list }
    }

    /// Returns how a plain call is divided, or `None` if it must stay whole.
    const fn of(call: &Call) -> Option<Divisible> {
        /// MSG_DONTWAIT, MSG_NOSIGNAL, MSG_MORE, MSG_CMSG_CLOEXEC. With any other flag the parts would do
        /// something different: look without taking, transfer all or nothing, or send from where the bytes
        /// lie.
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

/// Kind of what a descriptor leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A file, which never waits for anybody.
    File,
    /// Bytes in order, which may have to be waited for.
    Stream,
    /// Nothing is open there, or not for this direction.
    Nothing,
    /// Each call is a message of its own, or means something different. The call is left whole.
    Other,
}

/// Makes a call in parts and returns its result. Returns `None` if the call is to be made as `call` says now,
/// perhaps with fewer bytes than before.
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
    // Most calls are small. For these Farpage needn't look up whether the buffers are managed.
    if sum(&|_, bytes| bytes)? <= part {
        return None;
    }
    let managed = sum(&|address, bytes| engine.managed_bytes(address, bytes))?;
    if managed <= part {
        return None;
    }
    let fd = call.arguments[0] as i32;
    let kind = if how.buffer == 0 { Kind::File } else { kind(fd, &how) };
    // A whole write is one step for other writers to the same file. The write is torn only where it must be.
    let is_small = managed as u64 <= engine.budget.limit_bytes() / WHOLE_WRITE_SHARE;
    if kind == Kind::File && how.is_write && (is_small || is_appending(fd)) {
        return None;
    }
    let mut parts = Parts { engine, room, level, call: &plain, context, how: &how, done: 0 };
    match kind {
        Kind::File => parts.each(&mut buffers, |parts, address, bytes| parts.all(address, bytes, part)),
        Kind::Stream if how.is_write => {
            let wait = Wait::of(fd, &plain);
            let write = |parts: &mut Parts<'_>, address, bytes| match wait.is_socket {
                true => parts.send_all(&wait, address, bytes),
                false => parts.write_all(&wait, address, bytes),
            };
            parts.each(&mut buffers, write)
        }
        Kind::Stream if Wait::of(fd, &plain).is_not_to && !asks_from_where(&plain) => parts
            .each(&mut buffers, |parts, address, bytes| parts.while_there_is_some(fd, address, bytes, part)),
        Kind::Stream => {
            // Asks for as much as is sure to be had at once, into the first buffer.
            let (address, bytes) = buffers.next(&mut guarding)??;
            let least = bytes_to_wait_for(fd);
            if how.is_list && bytes < least {
                return None;
            }
            *call = Call { number: how.one, ..plain };
            (call.arguments[1], call.arguments[2]) = (address, bytes.min(least.max(PART_BYTES_MIN)));
            None
        }
        // The kernel refuses the call before it looks at any memory.
        // SAFETY: this is the program's own call.
        Kind::Nothing => Some(unsafe { sys::call(call.number, call.arguments) }),
        Kind::Other => None,
    }
}

/// Returns the call reduced to a plain transfer, or `None` if the call is asked to do more. A `sendmsg`
/// becomes its list of buffers, with its flags where `sendto` has them.
fn plain(call: &Call, memory: &mut Guarding<'_>) -> Option<Call> {
    let [fd, place, third, at, _, last] = call.arguments;
    let with = |number: u32| Call { number: number as usize, ..*call };
    /// Offset that stands for the file's own position.
    const HERE: usize = usize::MAX;
    match call.number as u32 {
        raw::__NR_preadv2 | raw::__NR_pwritev2 if last != 0 => None,
        raw::__NR_preadv2 if at == HERE => Some(with(raw::__NR_readv)),
        raw::__NR_preadv2 => Some(with(raw::__NR_preadv)),
        raw::__NR_pwritev2 if at == HERE => Some(with(raw::__NR_writev)),
        raw::__NR_pwritev2 => Some(with(raw::__NR_pwritev)),
        raw::__NR_sendmsg => {
            memory.buffer(Buffer { address: place, bytes: MSGHDR, how: How::In });
            // The receiver, the list, the list's length, and the length of what comes with the bytes.
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
    /// Whether `at` is a list of buffers, and not the only buffer.
    is_list: bool,
    at: usize,
    left: usize,
}

impl Buffers {
    /// Returns `None` if the kernel refuses the call before it does anything.
    fn new(how: &Divisible, start: usize, count: usize) -> Option<Buffers> {
        const VECTORS_MAX: usize = 1024;
        let bytes = if how.is_list { count.checked_mul(16)? } else { count };
        let is_sound = start.checked_add(bytes)? <= END && !(how.is_list && count > VECTORS_MAX);
        is_sound.then_some(Buffers { is_list: how.is_list, at: start, left: count })
    }

    /// Returns the next buffer that isn't empty. The inner `None` means that there is no more, the outer
    /// `None` that the kernel refuses the call.
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
    // SAFETY: the descriptor is only asked about, and one that isn't open is an error.
    rustix::fs::fcntl_getfl(unsafe { BorrowedFd::borrow_raw(fd) }).ok()
}

fn is_appending(fd: i32) -> bool {
    flags(fd).is_some_and(|flags| flags.contains(rustix::fs::OFlags::APPEND))
}

fn kind(fd: i32, how: &Divisible) -> Kind {
    /// Major numbers of consoles, /dev/tty and the like, and pseudo-terminals.
    const TERMINALS: [u32; 10] = [4, 5, 136, 137, 138, 139, 140, 141, 142, 143];
    let Some(flags) = Some(fd).filter(|fd| *fd >= 0).and_then(flags) else { return Kind::Nothing };
    let mode = flags & rustix::fs::OFlags::RWMODE;
    if mode == if how.is_write { rustix::fs::OFlags::RDONLY } else { rustix::fs::OFlags::WRONLY } {
        return Kind::Nothing;
    }
    let is_positioned = matches!(how.one, PREAD | PWRITE);
    // SAFETY: the descriptor is only asked about, and one that isn't open is an error.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let Ok(stat) = rustix::fs::fstat(fd) else { return Kind::Nothing };
    let needs_socket = matches!(how.one as u32, raw::__NR_sendto | raw::__NR_recvfrom);
    match FileType::from_raw_mode(stat.st_mode) {
        other if needs_socket && other != FileType::Socket => Kind::Nothing,
        FileType::RegularFile | FileType::BlockDevice => Kind::File,
        // /dev/zero and the like. A read of the kernel's log waits for messages.
        FileType::CharacterDevice if is_memory_device(stat.st_rdev) => Kind::File,
        FileType::Fifo | FileType::Socket if is_positioned => Kind::Nothing,
        // Each call on this pipe transfers a packet. A terminal that is ready may wait nevertheless.
        FileType::Fifo if flags.contains(rustix::fs::OFlags::DIRECT) => Kind::Other,
        FileType::CharacterDevice if how.is_write => Kind::Other,
        FileType::CharacterDevice if TERMINALS.contains(&rustix::fs::major(stat.st_rdev)) => Kind::Stream,
        FileType::Fifo => Kind::Stream,
        // Parts would report many times.
        FileType::Socket if how.is_write && reports_times(fd) => Kind::Other,
        FileType::Socket if is_stream(fd) => Kind::Stream,
        _ => Kind::Other,
    }
}

fn is_memory_device(device: u64) -> bool {
    const MEMORY_DEVICES: u32 = 1;
    const KERNEL_LOG: u32 = 11;
    rustix::fs::major(device) == MEMORY_DEVICES && rustix::fs::minor(device) != KERNEL_LOG
}

/// Returns whether the socket has a stream of bytes, of which a call may transfer any part. A socket of SCTP
/// calls itself a stream, and keeps the borders of messages.
fn is_stream(fd: BorrowedFd<'_>) -> bool {
    const SO_TYPE: usize = 3;
    const SOCK_STREAM: u32 = 1;
    const AF_VSOCK: u32 = 40;
    const IPPROTO_MPTCP: u32 = 262;
    let option = |name| socket_option(fd, SOL_SOCKET, name);
    option(SO_TYPE) == Some(SOCK_STREAM)
        && match option(SO_DOMAIN) {
            Some(AF_UNIX | AF_VSOCK) => true,
            Some(AF_INET | AF_INET6) => matches!(option(SO_PROTOCOL), Some(IPPROTO_TCP | IPPROTO_MPTCP)),
            _ => false,
        }
}

fn socket_option(fd: BorrowedFd<'_>, level: usize, name: usize) -> Option<u32> {
    use rustix::fd::AsRawFd;
    let (mut value, mut bytes) = (0_u32, 4_u32);
    let arguments =
        [fd.as_raw_fd() as usize, level, name, &raw mut value as usize, &raw mut bytes as usize, 0];
    // SAFETY: the kernel writes 4 bytes and their number, both on this function's stack.
    let asked = unsafe { sys::call(raw::__NR_getsockopt as usize, arguments) };
    (asked == 0).then_some(value)
}

/// Returns whether the call asks for the sender's address, which would have to be told once. A read of this
/// kind asks for less.
fn asks_from_where(call: &Call) -> bool {
    call.number == raw::__NR_recvfrom as usize && call.arguments[4] != 0
}

/// Returns how many bytes a reader of a socket waits for (SO_RCVLOWAT). Returns 0 for anything else.
fn bytes_to_wait_for(fd: i32) -> usize {
    const SO_RCVLOWAT: usize = 18;
    // SAFETY: the descriptor is only asked about, and one that isn't open is an error.
    socket_option(unsafe { BorrowedFd::borrow_raw(fd) }, SOL_SOCKET, SO_RCVLOWAT).unwrap_or(0) as usize
}

/// Returns whether each call that sends is to leave its time in the queue of errors.
fn reports_times(fd: BorrowedFd<'_>) -> bool {
    const SO_TIMESTAMPING: usize = 37;
    socket_option(fd, SOL_SOCKET, SO_TIMESTAMPING).is_some_and(|flags| flags != 0)
}

/// Returns whether poll(2) shows POLLHUP for each connection that has failed. Then POLLERR alone means the
/// queue of errors.
fn hangs_up_when_it_fails(fd: BorrowedFd<'_>) -> bool {
    const RECEIVES_ERRORS: [(usize, usize); 2] = [(0, 11), (41, 25)];
    match socket_option(fd, SOL_SOCKET, SO_DOMAIN) {
        Some(AF_UNIX) => true,
        // With IP_RECVERR a connection that goes on may have an error to report.
        Some(AF_INET | AF_INET6) => {
            socket_option(fd, SOL_SOCKET, SO_PROTOCOL) == Some(IPPROTO_TCP)
                && RECEIVES_ERRORS
                    .iter()
                    .all(|(level, name)| socket_option(fd, *level, *name).unwrap_or(0) == 0)
        }
        _ => false,
    }
}

/// Returns what poll(2) shows without being asked for.
fn signs(fd: i32) -> u64 {
    let mut asked = u64::from(fd as u32);
    let at_once = [0_u64; 2];
    let arguments = [&raw mut asked as usize, 1, at_once.as_ptr() as usize, 0, 0, 0];
    // SAFETY: the kernel gets one `pollfd` and a `timespec`, both on this function's stack.
    unsafe { sys::call(raw::__NR_ppoll as usize, arguments) };
    asked >> 48
}

/// Returns whether an error is to be reported. POLLERR means that, or something in the queue of errors.
fn has_error(fd: i32, signs: u64) -> bool {
    // SAFETY: the descriptor is only asked about, and one that isn't open is an error.
    let hangs_up = || hangs_up_when_it_fails(unsafe { BorrowedFd::borrow_raw(fd) });
    signs & POLLERR != 0 && (signs & POLLHUP != 0 || !hangs_up())
}

/// Returns whether a socket takes no more bytes.
fn is_broken(fd: i32) -> bool {
    let signs = signs(fd);
    signs & POLLHUP != 0 || has_error(fd, signs)
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
    /// Bytes of all parts so far.
    done: usize,
}

/// Answer for a call that is to be made again: the kernel's own `ERESTARTSYS`.
pub const RESTART: isize = -512;

/// The kernel's last answer to a call that is over before all of its parts were made.
struct Over(isize);

impl Parts<'_> {
    fn guarding(&self) -> Guarding<'_> {
        Guarding::new(self.engine, self.level, self.context.register(Register::Rsp))
    }

    /// Transfers one buffer after the other. Returns the call's result.
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
                // An error is the result only if nothing was transferred before.
                return Some(if self.done > 0 { self.done as isize } else { last });
            }
        }
    }

    /// Makes one part, by the call itself. Returns the kernel's answer.
    fn part(&mut self, address: usize, bytes: usize) -> isize {
        let number = self.how.one;
        // SAFETY: this is a part of the program's own call.
        self.part_by(address, bytes, |arguments| unsafe { sys::call(number, arguments) })
    }

    /// Makes one part, and holds the part's memory meanwhile. Returns the kernel's answer.
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
            // A signal that ends the program must not wait for the rest of a long transfer.
            if last < wanted as isize || signals::is_ending(self.context.blocked) {
                return Err(Over(last));
            }
        }
        Ok(())
    }

    /// Reads what is there, from a stream that isn't waited for.
    fn while_there_is_some(
        &mut self,
        fd: i32,
        address: usize,
        bytes: usize,
        part: usize,
    ) -> Result<(), Over> {
        for start in (0..bytes).step_by(part) {
            // An error that comes now is the next call's to report. The call of this part would take the
            // error away.
            if self.done > 0 && has_error(fd, signs(fd)) {
                return Err(Over(0));
            }
            self.all(address + start, part.min(bytes - start), part)?;
        }
        Ok(())
    }

    /// Writes to a pipe, as space comes.
    fn write_all(&mut self, wait: &Wait, address: usize, bytes: usize) -> Result<(), Over> {
        let (mut done, mut refusals) = (0, 0);
        while done < bytes {
            self.wait(wait, refusals, Wait::FOR_EVER_NS)?;
            let now = READY_BYTES.min(bytes - done);
            let mut last = self.part_by(address + done, now, write_now);
            // ENOSYS and EPERM come from a filter of the program's that doesn't know this call.
            if matches!(last, EOPNOTSUPP | ENOSYS | EPERM) {
                last = self.part(address + done, now);
            } else if last == EAGAIN && !wait.is_not_to {
                // Another writer was quicker.
                refusals += 1;
                continue;
            }
            if last <= 0 {
                return Err(Over(last));
            }
            (done, refusals) = (done + last as usize, 0);
        }
        Ok(())
    }

    /// Writes to a socket. Sends first and waits when nothing is taken, because poll(2) doesn't show each
    /// cause for which a send is over.
    fn send_all(&mut self, wait: &Wait, address: usize, bytes: usize) -> Result<(), Over> {
        let (mut done, mut refusals) = (0, 0);
        while done < bytes {
            // An error is the next call's to report, as above.
            if self.done > 0 && is_broken(wait.fd) {
                return Err(Over(0));
            }
            let (one, has_begun) = (self.how.one, self.done > 0);
            let send = |arguments| send_now(one, arguments, has_begun);
            let last = self.part_by(address + done, PART_BYTES_MIN.min(bytes - done), send);
            // A filter of the program's doesn't know this call.
            if matches!(last, ENOSYS | EPERM) && one != SENDTO {
                return self.write_all(wait, address + done, bytes - done);
            }
            if last == EAGAIN && !wait.is_not_to {
                // A sender may wait for long, so it holds no memory meanwhile.
                self.level.holder.release();
                refusals += u32::from(self.wait(wait, refusals, TRY_AGAIN_NS)?);
                continue;
            }
            if last <= 0 || signals::is_ending(self.context.blocked) {
                return Err(Over(last));
            }
            (done, refusals) = (done + last as usize, 0);
            wait.begin_anew();
        }
        Ok(())
    }

    /// Waits for free space, for `longest_ns` at most. Returns whether poll(2) shows anything. An error says
    /// that the call is over.
    fn wait(&self, wait: &Wait, refusals: u32, longest_ns: u64) -> Result<bool, Over> {
        loop {
            let blocked = self.context.blocked & !open();
            let (waited, came) = self.room.at_work.waiting(|| wait.for_space(blocked, refusals, longest_ns));
            if let Some(signal) = came {
                // The signal's handler runs now. If nothing is written yet, the call is made again after the
                // handler, if both allow that.
                let restarts = wait.is_patient() && signals::disposition(signal).restarts();
                return Err(Over(if restarts { RESTART } else { EINTR }));
            }
            match waited.unwrap_or(EINTR) {
                shown @ 0.. => return Ok(shown > 0),
                // The thread was stopped, for example.
                EINTR => {}
                error => return Err(Over(error)),
            }
        }
    }
}

/// Writes what there is free space for. Must not wait: no signal reaches the thread here, and another writer
/// to the same pipe may have been quicker. Returns EOPNOTSUPP where the kernel can't do so: with pipes before
/// 6.5, with named pipes, and with pipes that splice was used on.
fn write_now(arguments: [usize; 6]) -> isize {
    let [fd, address, bytes, ..] = arguments;
    let list = [address, bytes];
    let here = usize::MAX;
    let write = [fd, list.as_ptr() as usize, 1, here, 0, raw::RWF_NOWAIT as usize];
    // SAFETY: this is a part of the program's own call, and the list is on this function's stack.
    unsafe { sys::call(raw::__NR_pwritev2 as usize, write) }
}

/// Does the same with a socket. A call that has sent something gets no SIGPIPE for the rest.
fn send_now(number: usize, arguments: [usize; 6], has_begun: bool) -> isize {
    const MSG_NOSIGNAL: usize = 0x4000;
    let [fd, address, bytes, flags, to, to_bytes] = arguments;
    let (flags, to, to_bytes) = if number == SENDTO { (flags, to, to_bytes) } else { (0, 0, 0) };
    let flags = flags | MSG_DONTWAIT | if has_begun { MSG_NOSIGNAL } else { 0 };
    // SAFETY: this is a part of the program's own call.
    unsafe { sys::call(SENDTO, [fd, address, bytes, flags, to, to_bytes]) }
}

const MSG_DONTWAIT: usize = 0x40;

/// How a writer waits for free space.
struct Wait {
    fd: i32,
    /// The writer doesn't wait. The kernel answers EAGAIN instead.
    is_not_to: bool,
    is_socket: bool,
    /// Nanoseconds that a wait takes at most (SO_SNDTIMEO).
    limit_ns: u64,
    /// Nanoseconds that the waits of this call may still take together.
    left_ns: Cell<u64>,
    /// Each wait has the whole limit. In other sockets than those of AF_UNIX, all waits of a call share it.
    is_limit_of_each: bool,
}

impl Wait {
    /// Limit of a writer that waits for ever.
    const FOR_EVER_NS: u64 = u64::MAX;

    fn of(fd: i32, call: &Call) -> Wait {
        const SO_SNDTIMEO: usize = 21;
        let has_flags =
            matches!(call.number as u32, raw::__NR_sendto | raw::__NR_recvfrom | raw::__NR_sendmsg);
        let is_told = has_flags && call.arguments[3] & MSG_DONTWAIT != 0;
        let is_set = flags(fd).is_some_and(|flags| flags.contains(rustix::fs::OFlags::NONBLOCK));
        let (mut limit, mut bytes) = ([0_u64; 2], 16_u32);
        let place =
            [fd as usize, SOL_SOCKET, SO_SNDTIMEO, &raw mut limit as usize, &raw mut bytes as usize, 0];
        // SAFETY: the kernel writes a `timeval` and its length, on this function's stack. A descriptor that
        // is no socket leaves the `timeval` zero.
        let is_socket = unsafe { sys::call(raw::__NR_getsockopt as usize, place) } == 0;
        let [seconds, micros] = limit;
        let limit_ns = match seconds.saturating_mul(SECOND_NS).saturating_add(micros.saturating_mul(1000)) {
            0 => Self::FOR_EVER_NS,
            limit => limit,
        };
        // SAFETY: the descriptor is only asked about, and one that isn't open is an error.
        let domain = socket_option(unsafe { BorrowedFd::borrow_raw(fd) }, SOL_SOCKET, SO_DOMAIN);
        let is_limit_of_each = domain == Some(AF_UNIX);
        Wait {
            fd,
            is_not_to: is_told || is_set,
            is_socket,
            limit_ns,
            left_ns: Cell::new(limit_ns),
            is_limit_of_each,
        }
    }

    /// Returns whether the writer would wait for ever. With a time limit a call isn't made again after a
    /// handler.
    fn is_patient(&self) -> bool {
        self.limit_ns == Self::FOR_EVER_NS
    }

    /// Called when bytes were written.
    fn begin_anew(&self) {
        if self.is_limit_of_each {
            self.left_ns.set(self.limit_ns);
        }
    }

    /// Waits until a write is worth a try, or a signal of the program's has come. `refusals` says how often
    /// in a row poll(2) has shown something, and the kernel has then refused to write. Returns 1 if poll(2)
    /// shows anything, 0 after `longest_ns`, EINTR for a signal, or EAGAIN when the time limit has passed.
    fn for_space(&self, mask: u64, refusals: u32, longest_ns: u64) -> isize {
        const POLLOUT: u64 = 4;
        const DOUBLINGS_MAX: u32 = 6;
        if self.is_not_to {
            return 1;
        }
        if refusals > 0 {
            let pause_ns = FIRST_PAUSE_NS << (refusals - 1).min(DOUBLINGS_MAX);
            match self.poll(0, 0, pause_ns, mask) {
                0 => {}
                over => return over,
            }
        }
        let mut asked = u64::from(self.fd as u32) | POLLOUT << 32;
        self.poll(&raw mut asked as usize, 1, longest_ns, mask)
    }

    /// Does ppoll with `count` descriptors at `place`, and takes the time from what is left. Returns what
    /// `for_space` does.
    fn poll(&self, place: usize, count: usize, longest_ns: u64, mask: u64) -> isize {
        let limit_ns = self.left_ns.get().min(longest_ns);
        let mut time = [limit_ns / SECOND_NS, limit_ns % SECOND_NS];
        let limit = if limit_ns == Self::FOR_EVER_NS { 0 } else { &raw mut time as usize };
        let arguments = [place, count, limit, &raw const mask as usize, size_of::<u64>(), 0];
        let began_ns = now_ns();
        // SAFETY: the kernel gets the `pollfd`s of this file, a `timespec` and a mask of 8 bytes, all on a
        // stack. It may write to the `timespec`.
        let result = unsafe { sys::call(raw::__NR_ppoll as usize, arguments) };
        if !self.is_patient() {
            let spent_ns = if result == 0 { limit_ns } else { now_ns() - began_ns };
            self.left_ns.set(self.left_ns.get().saturating_sub(spent_ns));
        }
        match result {
            EINTR => EINTR,
            0 if self.left_ns.get() == 0 => EAGAIN,
            found => isize::from(found > 0),
        }
    }
}
