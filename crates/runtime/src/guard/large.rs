//! Reads and writes that are too large to hold all of their memory at once: they are made in parts.
//!
//! A program reads a whole file into memory that it has no RAM for, or writes it out. From files that happens here, one part
//! after the other, as the kernel does it: nothing interrupts it. Pipes and sockets may keep a thread waiting, and a signal
//! must reach it then: writes wait for room with the program's own mask of signals and write what is sure not to wait;
//! reads just ask for less, which is what such reads must be content with anyway.
// UNSAFETY: the program's own calls are made, in parts.

use super::buffers::{Buffer, Memory};
use super::calls::How;
use super::resident::Guarding;
use super::rooms::Level;
use super::signals::OPEN;
use crate::engine::Engine;
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
/// The kernel moves no more in one call (MAX_RW_COUNT).
const BYTES_MAX: usize = 0x7fff_f000;
/// What a pipe that is ready takes without waiting (`PIPE_BUF`), and a socket, too.
const READY_BYTES: usize = 4096;

const READ: usize = raw::__NR_read as usize;
const WRITE: usize = raw::__NR_write as usize;
const PREAD: usize = raw::__NR_pread64 as usize;
const PWRITE: usize = raw::__NR_pwrite64 as usize;

/// What a descriptor leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Never waits for anybody.
    File,
    /// Bytes in order, perhaps not yet there.
    Stream,
    /// Each call is a message of its own, or means something else: it is left whole.
    Other,
}

/// Makes a call in parts and gives its result, or has it ask for less. None if it is to be made, as `call` says now.
pub fn transfer(engine: &'static Engine, level: &Level, call: &mut Call, context: &Context) -> Option<isize> {
    let is_write = match call.number {
        READ | PREAD => false,
        WRITE | PWRITE => true,
        _ => return None,
    };
    let part = part_bytes(engine);
    let [fd, address, bytes, ..] = call.arguments;
    let bytes = bytes.min(BYTES_MAX);
    if bytes <= part || engine.managed_bytes(address, bytes) <= part {
        return None;
    }
    let mut parts = Parts { engine, level, call, context, bytes, done: 0 };
    match kind(fd as i32) {
        Kind::File => Some(parts.all(part)),
        Kind::Stream if is_write => Some(parts.as_there_is_room(fd as i32)),
        Kind::Stream => {
            call.arguments[2] = part;
            None
        }
        Kind::Other => None,
    }
}

fn part_bytes(engine: &'static Engine) -> usize {
    let share = (engine.budget.limit_bytes() / BUDGET_SHARE) as usize;
    share.next_power_of_two().clamp(PART_BYTES_MIN, PART_BYTES_MAX)
}

fn kind(fd: i32) -> Kind {
    const MEMORY_DEVICES: u32 = 1;
    if fd < 0 {
        return Kind::Other;
    }
    // SAFETY: only asked about; what isn't open is an error.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let Ok(stat) = rustix::fs::fstat(fd) else { return Kind::Other };
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile | FileType::BlockDevice => Kind::File,
        // /dev/zero and the like.
        FileType::CharacterDevice if rustix::fs::major(stat.st_rdev) == MEMORY_DEVICES => Kind::File,
        FileType::CharacterDevice | FileType::Fifo => Kind::Stream,
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

struct Parts<'a> {
    engine: &'static Engine,
    level: &'a Level,
    call: &'a Call,
    context: &'a Context,
    bytes: usize,
    done: usize,
}

impl Parts<'_> {
    /// The next `bytes`, with their memory held meanwhile. The kernel's word.
    fn next(&mut self, bytes: usize) -> isize {
        let bytes = bytes.min(self.bytes - self.done);
        let mut arguments = self.call.arguments;
        arguments[1] += self.done;
        arguments[2] = bytes;
        if matches!(self.call.number, PREAD | PWRITE) {
            arguments[3] = arguments[3].wrapping_add(self.done);
        }
        self.level.holder.release();
        let how = if matches!(self.call.number, READ | PREAD) { How::Out } else { How::In };
        let mut guarding = Guarding::new(self.engine, self.level, self.context.register(Register::Rsp));
        guarding.buffer(Buffer { address: arguments[1], bytes, how });
        // SAFETY: a part of the program's own call.
        let result = unsafe { sys::call(self.call.number, arguments) };
        if result > 0 {
            self.done += result as usize;
        }
        result
    }

    /// What the program is told after the kernel's last word: an error only if it is all that there is.
    fn result(&self, last: isize) -> isize {
        if self.done > 0 { self.done as isize } else { last }
    }

    fn all(&mut self, part: usize) -> isize {
        loop {
            let wanted = part.min(self.bytes - self.done) as isize;
            let last = self.next(part);
            if last < wanted || self.done == self.bytes {
                return self.result(last);
            }
        }
    }

    fn as_there_is_room(&mut self, fd: i32) -> isize {
        const EINTR: isize = -(linux_raw_sys::errno::EINTR as isize);
        // SAFETY: as in `kind`.
        let flags = rustix::fs::fcntl_getfl(unsafe { BorrowedFd::borrow_raw(fd) });
        let waits = !flags.is_ok_and(|flags| flags.contains(rustix::fs::OFlags::NONBLOCK));
        loop {
            if waits && self.wait_for_room(fd) == EINTR && self.done > 0 {
                return self.result(EINTR);
            }
            let last = self.next(READY_BYTES);
            if last <= 0 || self.done == self.bytes {
                return self.result(last);
            }
        }
    }

    /// Until something can be written, or a handler of the program's has run: on top of this one.
    fn wait_for_room(&self, fd: i32) -> isize {
        const POLLOUT: u64 = 4;
        let mut asked = u64::from(fd as u32) | POLLOUT << 32;
        let mask = self.context.blocked & !OPEN;
        let arguments = [&raw mut asked as usize, 1, 0, &raw const mask as usize, size_of::<u64>(), 0];
        // SAFETY: one `pollfd` and a mask of 8 bytes, both on our own stack.
        unsafe { sys::call(raw::__NR_ppoll as usize, arguments) }
    }
}
