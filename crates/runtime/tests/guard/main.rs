//! Checks the guard's table of system calls against the kernel.
//!
//! Each call is made twice with the same arguments, in memory of the test's own. The first time all memory is
//! in reach. The second time the kernel can reach only memory that the table names for the call, and can
//! write only where the table says so. Both calls must do the same: memory that the table leaves out gives
//! EFAULT. (The test can't show what the kernel does after the call, or would do if the call went on.)
//!
//! The calls are harmless. The test needs no privilege.
//!
//! `live_*` runs all of these tests once more under `farpage run --faults signal|segv`, as an ordinary user.
//! There the memory is really out, and the calls are made in every way that a program can make them.

use farpage_os::sys;
use farpage_runtime::guard::buffers::{Buffer, Memory, each};
use farpage_runtime::guard::calls::How;
use libc::{c_int, c_long};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::PathBuf;

const PAGE: usize = 4096;
const PAGES: usize = 128;
/// Bytes that are mapped for an arena: enough for Farpage to manage it.
const MAPPED_BYTES: usize = 2 << 20;
/// Set in the program that `live_*` starts.
const LIVE: &str = "FARPAGE_GUARD_LIVE";

/// Memory in which arguments lie.
struct Arena {
    base: *mut u8,
    /// Offset where the next thing may begin.
    next: usize,
}

impl Arena {
    /// Maps an arena that Farpage manages, if Farpage is there.
    fn new() -> Arena {
        Arena::mapped(libc::MAP_PRIVATE)
    }

    /// Maps an arena that Farpage doesn't manage.
    fn unmanaged() -> Arena {
        Arena::mapped(libc::MAP_SHARED)
    }

    fn mapped(kind: c_int) -> Arena {
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, kind | libc::MAP_ANONYMOUS);
        // SAFETY: this is a new mapping.
        let base = unsafe { libc::mmap(core::ptr::null_mut(), MAPPED_BYTES, protection, flags, -1, 0) };
        assert!(base != libc::MAP_FAILED);
        Arena { base: base.cast(), next: 0 }
    }

    /// Puts bytes on pages of their own. The last bytes, 8 at most, lie beyond a page border. If the table
    /// names too few bytes, the kernel can't reach them.
    fn put(&mut self, bytes: &[u8]) -> usize {
        let first = self.next.next_multiple_of(PAGE);
        let start = first + PAGE - (bytes.len().saturating_sub(1) / 8 * 8) % PAGE;
        self.next = start + bytes.len() + PAGE;
        assert!(self.next <= PAGES * PAGE, "the arena is too small");
        // SAFETY: the bytes are inside the arena, which only this test uses.
        unsafe { self.base.add(start).copy_from(bytes.as_ptr(), bytes.len()) };
        self.base as usize + start
    }

    fn fill(&mut self, bytes: usize) -> usize {
        self.put(&vec![0xa5; bytes])
    }

    fn words(&mut self, words: &[usize]) -> usize {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        self.put(&bytes)
    }

    fn text(&mut self, text: &str) -> usize {
        self.put(format!("{text}\0").as_bytes())
    }

    fn protect(&self, first: usize, pages: usize, protection: c_int) {
        // SAFETY: the pages are inside the arena.
        let result = unsafe { libc::mprotect(self.base.add(first * PAGE).cast(), pages * PAGE, protection) };
        assert_eq!(result, 0);
    }

    fn content(&self) -> Vec<u8> {
        // SAFETY: this is all of the arena, which is readable, and nobody writes it meanwhile.
        unsafe { core::slice::from_raw_parts(self.base, PAGES * PAGE) }.to_vec()
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: nobody refers to the mapping any more.
        unsafe { libc::munmap(self.base.cast(), MAPPED_BYTES) };
    }
}

/// Opens the memory that is reported to it to the kernel, and no other memory.
struct Opens<'a> {
    arena: &'a Arena,
    is_told: [Option<How>; PAGES],
}

impl Memory for Opens<'_> {
    fn buffer(&mut self, buffer: Buffer) {
        let base = self.arena.base as usize;
        let (start, end) =
            (buffer.address.max(base), (buffer.address + buffer.bytes).min(base + PAGES * PAGE));
        if start >= end {
            return;
        }
        for page in (start - base) / PAGE..(end - base).div_ceil(PAGE) {
            let is_new = self.is_told[page].is_none_or(|how| how == How::In);
            if is_new {
                self.is_told[page] = Some(buffer.how);
            }
        }
    }

    fn word(&mut self, address: usize) -> Option<u64> {
        let at = address.checked_sub(self.arena.base as usize)?;
        assert!(self.is_told[at / PAGE].is_some() && self.is_told[(at + 7) / PAGE].is_some());
        // SAFETY: the word is inside the arena.
        (at + 8 <= PAGES * PAGE).then(|| unsafe { self.arena.base.add(at).cast::<u64>().read_unaligned() })
    }

    fn is_own_process(&self, number: u32) -> bool {
        number == std::process::id()
    }
}

/// Makes the call with only that memory in reach that the table names.
fn make_guarded(arena: &Arena, call: c_long, arguments: [usize; 6]) -> isize {
    let mut opens = Opens { arena, is_told: [None; PAGES] };
    each(call as usize, &arguments, &mut opens);
    let is_told = opens.is_told;
    arena.protect(0, PAGES, libc::PROT_NONE);
    for (page, how) in is_told.iter().enumerate() {
        match how {
            None => {}
            Some(How::In) => arena.protect(page, 1, libc::PROT_READ),
            Some(_) => arena.protect(page, 1, libc::PROT_READ | libc::PROT_WRITE),
        }
    }
    let result = make(call, arguments);
    arena.protect(0, PAGES, libc::PROT_READ | libc::PROT_WRITE);
    result
}

fn make(call: c_long, arguments: [usize; 6]) -> isize {
    // SAFETY: the calls below are harmless, and write to the arena only.
    unsafe { sys::call(call as usize, arguments) }
}

/// Results that both runs must have in common.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Compare {
    /// The call's answer, and every byte.
    All,
    /// The answer. The bytes that are written contain the time, or a process's number.
    Answer,
}
use Compare::{All, Answer};

const EFAULT: isize = -(libc::EFAULT as isize);

/// Prepares the arguments anew for each run, makes the call, and compares. Then does the same without each of
/// the pointers. The value that `prepare` returns beside the arguments is kept open as long as the call
/// takes.
#[track_caller]
fn check<K>(name: &str, call: c_long, compare: Compare, prepare: impl Fn(&mut Arena) -> ([usize; 6], K)) {
    let arguments = check_one(name, call, compare, &prepare, None);
    for without in (0..6).filter(|at| arguments[*at].is_some() && !waits_for_ever_without(call, *at)) {
        check_one(&format!("{name} without argument {without}"), call, compare, &prepare, Some(without));
    }
}

/// Returns whether the call never ends if this argument, a pointer to a time, is 0.
fn waits_for_ever_without(call: c_long, argument: usize) -> bool {
    matches!(
        (call, argument),
        (libc::SYS_select | libc::SYS_pselect6, 4)
            | (libc::SYS_ppoll | libc::SYS_rt_sigtimedwait, 2)
            | (libc::SYS_futex | libc::SYS_futex_waitv, 3)
    )
}

/// Checks one set of arguments, with 0 for the argument `without`. Returns which arguments are pointers.
#[track_caller]
fn check_one<K>(
    name: &str,
    call: c_long,
    compare: Compare,
    prepare: impl Fn(&mut Arena) -> ([usize; 6], K),
    without: Option<usize>,
) -> [Option<usize>; 6] {
    let prepare = |arena: &mut Arena| {
        let (mut arguments, kept) = prepare(arena);
        let base = arena.base as usize;
        let pointers = arguments.map(|word| word.checked_sub(base).filter(|at| *at < PAGES * PAGE));
        without.inspect(|at| arguments[*at] = 0);
        (arguments, pointers, kept)
    };
    let mut free = Arena::unmanaged();
    let (arguments, pointers, kept) = prepare(&mut free);
    let expected = make(call, arguments);
    drop(kept);
    assert!(expected != EFAULT || without.is_some(), "{name}: the test itself is wrong");
    if std::env::var_os(LIVE).is_some() {
        let ways = if without.is_some() { &live::WAYS[..1] } else { &live::WAYS[..] };
        for (state, by) in ways {
            let mut managed = Arena::new();
            let (arguments, _, kept) = prepare(&mut managed);
            let found = live::make(&managed, *state, *by, call, arguments);
            drop(kept);
            let name = format!("{name}, memory {state:?}, made by {by:?}");
            same(&name, call, compare, (&free, expected), (&managed, found));
        }
    } else {
        let mut guarded = Arena::new();
        let (arguments, _, kept) = prepare(&mut guarded);
        let found = make_guarded(&guarded, call, arguments);
        drop(kept);
        same(name, call, compare, (&free, expected), (&guarded, found));
    }
    pointers
}

/// Asserts that the answer and the memory found are those expected.
#[track_caller]
fn same(
    name: &str,
    call: c_long,
    compare: Compare,
    (free, expected): (&Arena, isize),
    (guarded, found): (&Arena, isize),
) {
    // Descriptors are given out by number, and other tests open some, too.
    let is_descriptor = matches!(
        call,
        libc::SYS_accept4
            | libc::SYS_open
            | libc::SYS_openat
            | libc::SYS_openat2
            | libc::SYS_memfd_create
            | libc::SYS_signalfd4
    );
    if is_descriptor && expected >= 0 && found >= 0 {
        // SAFETY: the call has just made the descriptor, and nobody knows it. The expected descriptor stays
        // open for the next comparison.
        return drop(unsafe { OwnedFd::from_raw_fd(found as c_int) });
    }
    assert_eq!(found, expected, "{name}");
    if compare == All {
        let places = |arena: &Arena| {
            // Addresses in the two runs are those of different arenas.
            let base = arena.base as u64;
            let content = arena.content();
            let words = content.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap()));
            let relative = |word: u64| {
                if (base..base + (PAGES * PAGE) as u64).contains(&word) { word - base } else { word }
            };
            words.map(relative).collect::<Vec<_>>()
        };
        let (free, guarded) = (places(free), places(guarded));
        let differs = (0..free.len()).find(|at| free[*at] != guarded[*at]);
        assert!(differs.is_none(), "{name}: word {:?} differs", differs);
    }
}

/// A directory with a file of 10,000 bytes, for one test.
struct Place(PathBuf);

impl Place {
    fn new(name: &str) -> Place {
        let path = std::env::temp_dir().join(format!("farpage-guard-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        let bytes: Vec<u8> = (0..10_000).map(|at| (at * 7 % 251) as u8).collect();
        std::fs::write(path.join("file"), bytes).unwrap();
        Place(path)
    }
    fn name(&self, file: &str) -> String {
        self.0.join(file).to_str().unwrap().to_owned()
    }
    fn open(&self) -> std::fs::File {
        std::fs::File::options().read(true).write(true).open(self.0.join("file")).unwrap()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn fd(of: &impl AsRawFd) -> usize {
    of.as_raw_fd() as usize
}

fn pipe() -> (OwnedFd, OwnedFd) {
    let mut ends = [0; 2];
    // SAFETY: `ends` holds two descriptors, and both are new.
    unsafe {
        assert_eq!(libc::pipe2(ends.as_mut_ptr(), libc::O_NONBLOCK | libc::O_CLOEXEC), 0);
        (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1]))
    }
}

fn sockets() -> (std::os::unix::net::UnixDatagram, std::os::unix::net::UnixDatagram) {
    let pair = std::os::unix::net::UnixDatagram::pair().unwrap();
    pair.0.set_nonblocking(true).unwrap();
    pair
}

#[test]
fn reads_and_writes_of_files() {
    let place = Place::new("files");
    let file = || place.open();
    check("read", libc::SYS_read, All, |arena| {
        let file = file();
        ([fd(&file), arena.fill(5_000), 5_000, 0, 0, 0], file)
    });
    check("read beyond the end", libc::SYS_pread64, All, |arena| {
        let file = file();
        ([fd(&file), arena.fill(5_000), 5_000, 8_000, 0, 0], file)
    });
    check("write", libc::SYS_pwrite64, All, |arena| {
        let file = file();
        ([fd(&file), arena.put(&[7; 3_000]), 3_000, 100, 0, 0], file)
    });
    for (name, call) in
        [("preadv", libc::SYS_preadv), ("pwritev", libc::SYS_pwritev), ("preadv2", libc::SYS_preadv2)]
    {
        check(name, call, All, |arena| {
            let parts = [arena.fill(100), 100, arena.fill(3_000), 3_000, arena.fill(1), 1];
            let file = file();
            ([fd(&file), arena.words(&parts), 3, 50, 0, 0], file)
        });
    }
    check("too many vectors", libc::SYS_readv, All, |arena| {
        let file = file();
        ([fd(&file), arena.fill(16), 5_000, 0, 0, 0], file)
    });
    check("getdents64", libc::SYS_getdents64, Answer, |arena| {
        let directory = std::fs::File::open(&place.0).unwrap();
        ([fd(&directory), arena.fill(600), 600, 0, 0, 0], directory)
    });
    check("copy_file_range", libc::SYS_copy_file_range, All, |arena| {
        let file = file();
        ([fd(&file), arena.words(&[0]), fd(&file), arena.words(&[9_000]), 500, 0], file)
    });
    check("sendfile", libc::SYS_sendfile, All, |arena| {
        let (file, pipe) = (file(), pipe());
        ([fd(&pipe.1), fd(&file), arena.words(&[10]), 500, 0, 0], (file, pipe))
    });
    check("splice", libc::SYS_splice, All, |arena| {
        let (file, pipe) = (file(), pipe());
        ([fd(&file), arena.words(&[10]), fd(&pipe.1), 0, 500, 0], (file, pipe))
    });
    check("vmsplice", libc::SYS_vmsplice, All, |arena| {
        let pipe = pipe();
        let parts = [arena.put(&[9; 700]), 700];
        ([fd(&pipe.1), arena.words(&parts), 1, 0, 0, 0], pipe)
    });
    check("fcntl: lock", libc::SYS_fcntl, All, |arena| {
        let file = file();
        // F_RDLCK, SEEK_SET, from byte 10 on, 20 bytes.
        ([fd(&file), libc::F_GETLK as usize, arena.words(&[0, 10, 20, 0]), 0, 0, 0], file)
    });
    check("statx", libc::SYS_statx, Answer, |arena| {
        ([-100_isize as usize, arena.text(&place.name("file")), 0, 0xfff, arena.fill(256), 0], ())
    });
}

#[test]
fn names_of_files() {
    let place = Place::new("names");
    let here = -100_isize as usize;
    let long = format!("{}/{}file", place.name("."), "./".repeat(1_500));
    for (name, text) in [("short", place.name("file")), ("long", long), ("missing", place.name("nothing"))] {
        for call in [libc::SYS_stat, libc::SYS_lstat] {
            check(&format!("stat of a {name} name"), call, Answer, |arena| {
                ([arena.text(&text), arena.fill(144), 0, 0, 0, 0], ())
            });
        }
        check("access", libc::SYS_access, All, |arena| ([arena.text(&text), 4, 0, 0, 0, 0], ()));
        check("open", libc::SYS_open, All, |arena| ([arena.text(&text), 0, 0, 0, 0, 0], ()));
        check("openat2", libc::SYS_openat2, All, |arena| {
            ([here, arena.text(&text), arena.words(&[0, 0, 0]), 24, 0, 0], ())
        });
        check("statfs", libc::SYS_statfs, Answer, |arena| {
            ([arena.text(&text), arena.fill(120), 0, 0, 0, 0], ())
        });
        check("newfstatat", libc::SYS_newfstatat, Answer, |arena| {
            ([here, arena.text(&text), arena.fill(144), 0, 0, 0], ())
        });
        check("getxattr", libc::SYS_getxattr, All, |arena| {
            ([arena.text(&text), arena.text("user.none"), arena.fill(100), 100, 0, 0], ())
        });
        check("listxattr", libc::SYS_listxattr, All, |arena| {
            ([arena.text(&text), arena.fill(100), 100, 0, 0, 0], ())
        });
    }
    let turn = std::cell::Cell::new(0);
    check("renameat2", libc::SYS_renameat2, All, |arena| {
        std::fs::write(place.0.join("old"), "x").unwrap();
        ([here, arena.text(&place.name("old")), here, arena.text(&place.name("new")), 0, 0], ())
    });
    check("symlinkat", libc::SYS_symlinkat, Answer, |arena| {
        turn.set(turn.get() + 1);
        let to = place.name(&format!("link{}", turn.get()));
        ([arena.text("somewhere"), here, arena.text(&to), 0, 0, 0], ())
    });
    check("readlink", libc::SYS_readlink, All, |arena| {
        ([arena.text(&place.name("link1")), arena.fill(50), 50, 0, 0, 0], ())
    });
    check("getcwd", libc::SYS_getcwd, All, |arena| ([arena.fill(3_000), 3_000, 0, 0, 0, 0], ()));
    check("utimensat", libc::SYS_utimensat, All, |arena| {
        ([here, arena.text(&place.name("file")), arena.words(&[5, 6, 7, 8]), 0, 0, 0], ())
    });
    check("name_to_handle_at", libc::SYS_name_to_handle_at, Answer, |arena| {
        let mut handle = [0; 17];
        handle[0] = 128;
        ([here, arena.text(&place.name("file")), arena.words(&handle), arena.fill(8), 0, 0], ())
    });
    check("memfd_create", libc::SYS_memfd_create, All, |arena| ([arena.text("a name"), 1, 0, 0, 0, 0], ()));
}

#[test]
fn messages_through_sockets() {
    let message = |arena: &mut Arena, content: &[u8], control: usize| {
        let list = [arena.put(&content[..5]), 5, arena.put(&content[5..]), content.len() - 5];
        let list = arena.words(&list);
        let control_at = if control > 0 { arena.fill(control) } else { 0 };
        [0, 0, list, 2, control_at, control, 0]
    };
    let content: Vec<u8> = (0..200).collect();
    check("sendto", libc::SYS_sendto, All, |arena| {
        let pair = sockets();
        ([fd(&pair.0), arena.put(&content), 200, 0, 0, 0], pair)
    });
    check("recvfrom", libc::SYS_recvfrom, All, |arena| {
        let pair = sockets();
        pair.1.send(&content).unwrap();
        ([fd(&pair.0), arena.fill(150), 150, 0, arena.fill(110), arena.words(&[110])], pair)
    });
    check("sendmsg", libc::SYS_sendmsg, All, |arena| {
        let pair = sockets();
        let header = message(arena, &content, 0);
        ([fd(&pair.0), arena.words(&header), 0, 0, 0, 0], pair)
    });
    check("recvmsg", libc::SYS_recvmsg, All, |arena| {
        let pair = sockets();
        pair.1.send(&content).unwrap();
        let header = message(arena, &[0; 300], 64);
        ([fd(&pair.0), arena.words(&header), 0, 0, 0, 0], pair)
    });
    check("recvmmsg", libc::SYS_recvmmsg, Answer, |arena| {
        let pair = sockets();
        (0..2).for_each(|_| _ = pair.1.send(&content).unwrap());
        let (a, b) = (message(arena, &[0; 300], 64), message(arena, &[0; 100], 0));
        let headers: Vec<usize> = [&a[..], &[0], &b[..], &[0]].concat();
        ([fd(&pair.0), arena.words(&headers), 2, 0, arena.words(&[1, 0]), 0], pair)
    });
    check("sendmmsg", libc::SYS_sendmmsg, All, |arena| {
        let pair = sockets();
        let (a, b) = (message(arena, &content, 0), message(arena, &content[..50], 0));
        let headers: Vec<usize> = [&a[..], &[0], &b[..], &[0]].concat();
        ([fd(&pair.0), arena.words(&headers), 2, 0, 0, 0], pair)
    });
    check("getsockname", libc::SYS_getsockname, All, |arena| {
        let pair = sockets();
        ([fd(&pair.0), arena.fill(110), arena.words(&[110]), 0, 0, 0], pair)
    });
    check("getsockopt", libc::SYS_getsockopt, All, |arena| {
        let pair = sockets();
        let (level, option) = (libc::SOL_SOCKET as usize, libc::SO_TYPE as usize);
        ([fd(&pair.0), level, option, arena.fill(4), arena.words(&[4]), 0], pair)
    });
    check("setsockopt", libc::SYS_setsockopt, All, |arena| {
        let pair = sockets();
        let (level, option) = (libc::SOL_SOCKET as usize, libc::SO_RCVTIMEO as usize);
        ([fd(&pair.0), level, option, arena.words(&[1, 0]), 16, 0], pair)
    });
    check("connect", libc::SYS_connect, All, |arena| {
        let pair = sockets();
        let mut address = vec![0; 110];
        address[0] = libc::AF_UNIX as u8;
        address[2..10].copy_from_slice(b"/nowhere");
        ([fd(&pair.0), arena.put(&address), 110, 0, 0, 0], pair)
    });
    check("accept4", libc::SYS_accept4, Answer, |arena| {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        ([fd(&listener), arena.fill(16), arena.words(&[16]), 0, 0, 0], (listener, stream))
    });
}

#[test]
fn waiting_for_descriptors_and_signals() {
    check("poll", libc::SYS_poll, All, |arena| {
        let pipe = pipe();
        let one = |fd: usize| fd | (libc::POLLOUT as usize) << 32;
        // Numbers of descriptors differ between the runs, so the test uses only numbers that can't be open.
        ([arena.words(&[one(0x7fff_0000), one(0x7fff_0001)]), 2, 0, 0, 0, 0], pipe)
    });
    check("ppoll", libc::SYS_ppoll, All, |arena| {
        ([arena.words(&[0x7fff_0000]), 1, arena.words(&[0, 1]), arena.words(&[0]), 8, 0], ())
    });
    check("select", libc::SYS_select, All, |arena| {
        ([130, arena.put(&[0; 24]), arena.put(&[0; 24]), arena.put(&[0; 24]), arena.words(&[0, 0]), 0], ())
    });
    check("pselect6", libc::SYS_pselect6, All, |arena| {
        let set = arena.words(&[0]);
        ([64, arena.put(&[0; 8]), 0, 0, arena.words(&[0, 0]), arena.words(&[set, 8])], ())
    });
    check("epoll_pwait", libc::SYS_epoll_pwait, All, |arena| {
        // SAFETY: the descriptor is new.
        let epoll = unsafe { OwnedFd::from_raw_fd(libc::epoll_create1(libc::EPOLL_CLOEXEC)) };
        let pipe = pipe();
        let mut event = libc::epoll_event { events: libc::EPOLLOUT as u32, u64: 77 };
        // SAFETY: the kernel reads one event.
        unsafe { libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, pipe.1.as_raw_fd(), &mut event) };
        ([fd(&epoll), arena.fill(48), 4, 0, arena.words(&[0]), 8], (epoll, pipe))
    });
    check("epoll_ctl", libc::SYS_epoll_ctl, All, |arena| {
        // SAFETY: the descriptor is new.
        let epoll = unsafe { OwnedFd::from_raw_fd(libc::epoll_create1(libc::EPOLL_CLOEXEC)) };
        let pipe = pipe();
        ([fd(&epoll), 1, fd(&pipe.1), arena.put(&[4, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]), 0, 0], (epoll, pipe))
    });
    check("rt_sigprocmask", libc::SYS_rt_sigprocmask, All, |arena| {
        ([libc::SIG_BLOCK as usize, arena.words(&[0]), arena.fill(8), 8, 0, 0], ())
    });
    check("rt_sigaction", libc::SYS_rt_sigaction, Answer, |arena| {
        ([libc::SIGWINCH as usize, 0, arena.fill(32), 8, 0, 0], ())
    });
    check("rt_sigpending", libc::SYS_rt_sigpending, All, |arena| ([arena.fill(8), 8, 0, 0, 0, 0], ()));
    check("rt_sigtimedwait", libc::SYS_rt_sigtimedwait, All, |arena| {
        ([arena.words(&[1 << 30]), arena.fill(128), arena.words(&[0, 0]), 8, 0, 0], ())
    });
    check("sigaltstack", libc::SYS_sigaltstack, Answer, |arena| ([0, arena.fill(24), 0, 0, 0, 0], ()));
    check("signalfd4", libc::SYS_signalfd4, All, |arena| {
        ([usize::MAX, arena.words(&[1 << 30]), 8, libc::SFD_CLOEXEC as usize, 0, 0], ())
    });
    check("futex", libc::SYS_futex, All, |arena| {
        let wait = libc::FUTEX_WAIT as usize;
        ([arena.words(&[5]), wait, 5, arena.words(&[0, 1000]), 0, 0], ())
    });
    check("futex of another value", libc::SYS_futex, All, |arena| {
        let (compare, at) = (libc::FUTEX_CMP_REQUEUE as usize, arena.words(&[5]));
        ([at, compare, 1, 1, arena.words(&[6]), 4], ())
    });
    check("futex_waitv", libc::SYS_futex_waitv, All, |arena| {
        let word = arena.words(&[5]);
        // FUTEX2_SIZE_U32. The expected value differs from the word, so the call doesn't wait.
        let list = arena.words(&[4, word, 2, 4, word, 2]);
        ([list, 2, 0, arena.words(&[0, 0]), libc::CLOCK_MONOTONIC as usize, 0], ())
    });
}

#[test]
fn times_limits_and_what_the_machine_is() {
    let clock = libc::CLOCK_MONOTONIC as usize;
    check("clock_gettime", libc::SYS_clock_gettime, Answer, |arena| {
        ([clock, arena.fill(16), 0, 0, 0, 0], ())
    });
    check("clock_getres", libc::SYS_clock_getres, All, |arena| ([clock, arena.fill(16), 0, 0, 0, 0], ()));
    check("nanosleep", libc::SYS_nanosleep, All, |arena| {
        ([arena.words(&[0, 1_000]), arena.fill(16), 0, 0, 0, 0], ())
    });
    check("clock_nanosleep", libc::SYS_clock_nanosleep, All, |arena| {
        ([clock, 0, arena.words(&[0, 1_000]), arena.fill(16), 0, 0], ())
    });
    check("gettimeofday", libc::SYS_gettimeofday, Answer, |arena| {
        ([arena.fill(16), arena.fill(8), 0, 0, 0, 0], ())
    });
    check("getitimer", libc::SYS_getitimer, Answer, |arena| ([2, arena.fill(32), 0, 0, 0, 0], ()));
    check("prlimit64", libc::SYS_prlimit64, All, |arena| {
        ([0, libc::RLIMIT_NOFILE as usize, 0, arena.fill(16), 0, 0], ())
    });
    check("getrlimit", libc::SYS_getrlimit, All, |arena| {
        ([libc::RLIMIT_CORE as usize, arena.fill(16), 0, 0, 0, 0], ())
    });
    check("getrusage", libc::SYS_getrusage, Answer, |arena| ([0, arena.fill(144), 0, 0, 0, 0], ()));
    check("sysinfo", libc::SYS_sysinfo, Answer, |arena| ([arena.fill(112), 0, 0, 0, 0, 0], ()));
    check("uname", libc::SYS_uname, All, |arena| ([arena.fill(390), 0, 0, 0, 0, 0], ()));
    check("getresuid", libc::SYS_getresuid, All, |arena| {
        ([arena.fill(4), arena.fill(4), arena.fill(4), 0, 0, 0], ())
    });
    check("getgroups", libc::SYS_getgroups, All, |arena| ([64, arena.fill(256), 0, 0, 0, 0], ()));
    check("capget", libc::SYS_capget, All, |arena| {
        ([arena.words(&[0x2008_0522]), arena.fill(24), 0, 0, 0, 0], ())
    });
    check("sched_getaffinity", libc::SYS_sched_getaffinity, All, |arena| {
        ([0, 1024, arena.fill(1024), 0, 0, 0], ())
    });
    check("sched_getparam", libc::SYS_sched_getparam, All, |arena| ([0, arena.fill(4), 0, 0, 0, 0], ()));
    check("sched_getattr", libc::SYS_sched_getattr, All, |arena| ([0, arena.fill(56), 56, 0, 0, 0], ()));
    check("sched_rr_get_interval", libc::SYS_sched_rr_get_interval, Answer, |arena| {
        ([0, arena.fill(16), 0, 0, 0, 0], ())
    });
    check("getcpu", libc::SYS_getcpu, Answer, |arena| ([arena.fill(4), arena.fill(4), 0, 0, 0, 0], ()));
    check("getrandom", libc::SYS_getrandom, Answer, |arena| ([arena.fill(200), 200, 0, 0, 0, 0], ()));
    check("adjtimex", libc::SYS_adjtimex, Answer, |arena| ([arena.put(&[0; 208]), 0, 0, 0, 0, 0], ()));
    check("waitid", libc::SYS_waitid, All, |arena| {
        // No child has this number.
        ([1, 0x7fff_fff0, arena.fill(128), 4 | 1, arena.fill(144), 0], ())
    });
    // The thread's name, which is each thread's own.
    check("prctl", libc::SYS_prctl, Answer, |arena| ([16, arena.fill(16), 0, 0, 0, 0], ()));
    check("seccomp, an action", libc::SYS_seccomp, All, |arena| {
        let kill_process = 0x8000_0000_u32;
        ([2, 0, arena.put(&kill_process.to_ne_bytes()), 0, 0, 0], ())
    });
    check("seccomp, sizes", libc::SYS_seccomp, All, |arena| ([3, 0, arena.fill(6), 0, 0, 0], ()));
    check("ioctl by its size", libc::SYS_ioctl, All, |arena| {
        // FS_IOC_GETFLAGS on a pipe, which every file system refuses alike.
        let pipe = pipe();
        ([fd(&pipe.0), 0x8008_6601, arena.fill(8), 0, 0, 0], pipe)
    });
    check("ioctl without a size", libc::SYS_ioctl, All, |arena| {
        let pipe = pipe();
        ([fd(&pipe.0), libc::FIONREAD as usize, arena.fill(4), 0, 0, 0], pipe)
    });
    check("pipe2", libc::SYS_pipe2, Answer, |arena| {
        ([arena.fill(8), libc::O_CLOEXEC as usize, 0, 0, 0, 0], ())
    });
    check("socketpair", libc::SYS_socketpair, Answer, |arena| {
        let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
        ([libc::AF_UNIX as usize, kind as usize, 0, arena.fill(8), 0, 0], ())
    });
    check("timer_create", libc::SYS_timer_create, Answer, |arena| {
        // SIGEV_NONE
        ([clock, arena.words(&[0, 1 << 32, 0, 0, 0, 0, 0, 0]), arena.fill(4), 0, 0, 0], ())
    });
    check("process_vm_readv", libc::SYS_process_vm_readv, All, |arena| {
        static SOURCE: [u8; 100] = [3; 100];
        let local = [arena.fill(100), 100];
        let (local, remote) = (arena.words(&local), arena.words(&[SOURCE.as_ptr() as usize, 100]));
        ([std::process::id() as usize, local, 1, remote, 1, 0], ())
    });
    check("io_submit", libc::SYS_io_submit, Answer, |arena| {
        // No context has this number: the call is refused before anything is begun.
        ([0xdead_0000, 1, arena.words(&[0]), 0, 0, 0], ())
    });
}

#[test]
fn programs_and_their_arguments() {
    // The file is no program, but may be executed. The call is refused once everything was read.
    let place = Place::new("programs");
    let junk = place.name("file");
    std::fs::set_permissions(&junk, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    check("execve", libc::SYS_execve, All, |arena| {
        let texts = [arena.text("first"), arena.text(&"long".repeat(1_000)), 0];
        let (arguments, environment) = (arena.words(&texts), arena.words(&[0]));
        ([arena.text(&junk), arguments, environment, 0, 0, 0], ())
    });
}

mod live;
