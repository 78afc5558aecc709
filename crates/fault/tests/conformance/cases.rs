//! The cases that every way of moving pages must pass. `main.rs` lists the ways for each case.

use super::*;
use std::os::fd::AsRawFd as _;

pub fn taken_pages_are_in_their_frames_and_come_back_whole(bench: &'static Bench) {
    bench.fill(16);
    let runs: Vec<_> = (0..16).map(|at| (at, 20 + at)).collect();
    assert!(bench.take(&runs).iter().all(|page| page.taken == Taken::Yes));
    for at in 0..16 {
        assert_eq!(bench.frame_bytes(20 + at), vec![at as u8 + 1; PAGE_BYTES]);
    }
    for at in (0..16).rev() {
        // SAFETY: the frame was filled by `take`, and no other code has it.
        unsafe { bench.pages.install(bench.page(at), bench.frame(20 + at)) }.unwrap();
        assert_eq!(bench.read(at), vec![at as u8 + 1; PAGE_BYTES]);
    }
}

pub fn run_with_holes_takes_what_is_there(bench: &'static Bench) {
    bench.fill(2);
    assert_eq!(bench.pages.zero(bench.range(3, 1), Access::Read), Ok(1));
    bench.write(3, 9);
    let taken = bench.take(&[(0, 0), (1, 1), (2, 2), (3, 3)]);
    let outcome: Vec<_> = taken.iter().map(|page| page.taken).collect();
    assert_eq!(outcome, [Taken::Yes, Taken::Yes, Taken::Gone, Taken::Yes]);
    assert_eq!(bench.frame_bytes(3), vec![9; PAGE_BYTES]);
}

/// A bug: a set of 64 bits was kept for runs that had become twice as long. A page and the page 64 before it
/// shared a bit.
pub fn long_run_with_holes_takes_what_is_there(bench: &'static Bench) {
    let is_hole = |at: usize| [0, 5, 80, 128, 150].contains(&at);
    for at in (0..PAGES).filter(|at| !is_hole(*at)) {
        assert_eq!(bench.pages.zero(bench.range(at, 1), Access::Write), Ok(1));
        bench.write(at, at as u8 + 1);
    }
    let taken = bench.take(&(0..PAGES).map(|at| (at, at)).collect::<Vec<_>>());
    for (at, page) in taken.iter().enumerate() {
        assert_eq!(page.taken, if is_hole(at) { Taken::Gone } else { Taken::Yes }, "page {at}");
        assert!(is_hole(at) || bench.frame_bytes(at) == vec![at as u8 + 1; PAGE_BYTES], "page {at}");
    }
}

/// A device or another process has pinned a page before the page is taken. Its later writes pass every
/// protection, so the page has to stay. Copying the page out lost a peer's process_vm_writev and a disk's
/// direct read. A pipe stands for the device or process.
pub fn page_that_somebody_refers_to_stays(bench: &'static Bench) {
    const PINNED: usize = 20;
    bench.fill(40);
    let [reader, writer] = pin(bench, PINNED);
    let taken = bench.take(&(0..40).map(|at| (at, at)).collect::<Vec<_>>());
    for (at, page) in taken.iter().enumerate() {
        let expected = if at == PINNED { Taken::Busy } else { Taken::Yes };
        assert_eq!(page.taken, expected, "page {at}");
    }
    assert_eq!(bench.read(PINNED), vec![PINNED as u8 + 1; PAGE_BYTES]);
    // The program's next write goes to the pinned page, not to a copy. Before Linux 5.19 the write goes to a
    // copy where a protection was lifted.
    bench.write(PINNED, 99);
    let mut seen = [0; PAGE_BYTES];
    assert_eq!(rustix::io::read(&reader, &mut seen), Ok(PAGE_BYTES));
    assert_eq!(seen, [99; PAGE_BYTES]);
    // Nothing refers to the page any more, so it is taken like the other pages.
    drop((reader, writer));
    assert_eq!(bench.take(&[(PINNED, PINNED)])[0].taken, Taken::Yes);
    assert_eq!(bench.frame_bytes(PINNED), vec![99; PAGE_BYTES]);
}

/// A page that the program may not write is copied where the program doesn't see it. If pinned, the page
/// stays and gets its protection back. Nor may the kernel drop the page afterwards, although the page was
/// treated as clean while it was copied.
pub fn what_the_program_may_not_write_stays_while_it_is_pinned(bench: &'static Bench) {
    const PINNED: [usize; 4] = [3, 20, 21, 39];
    let protections = bench.protections.unwrap();
    for (allowed, shown) in
        [(libc::PROT_READ | libc::PROT_WRITE, "rw-p"), (libc::PROT_READ, "r--p"), (0, "---p")]
    {
        bench.fill(40);
        let pins = PINNED.map(|at| pin(bench, at));
        protections.allow(bench.range(0, 40), allowed as usize).unwrap();
        let taken = bench.take(&(0..40).map(|at| (at, at)).collect::<Vec<_>>());
        for (at, page) in taken.iter().enumerate() {
            let expected = if PINNED.contains(&at) { Taken::Busy } else { Taken::Yes };
            assert_eq!(page.taken, expected, "page {at} {shown}");
            assert!(
                PINNED.contains(&at) || bench.frame_bytes(at) == vec![at as u8 + 1; PAGE_BYTES],
                "page {at} {shown}"
            );
        }
        drop(pins);
        for at in PINNED {
            assert!(protections.is_open(bench.page(at)));
            assert_eq!(protection_of(bench, at), shown, "page {at}");
            // SAFETY: the advice drops clean pages only, and none of these is clean.
            unsafe { farpage_os::memory::advise(bench.range(at, 1), libc::MADV_PAGEOUT as u32) }.unwrap();
        }
        protections.allow(bench.range(0, 40), (libc::PROT_READ | libc::PROT_WRITE) as usize).unwrap();
        for at in PINNED {
            assert_eq!(bench.read(at), vec![at as u8 + 1; PAGE_BYTES], "page {at} {shown}");
        }
        // Nothing refers to the pages any more, so they are taken like the other pages.
        let again = bench.take(&PINNED.map(|at| (at, at)));
        assert!(again.iter().all(|page| page.taken == Taken::Yes), "{again:?} {shown}");
    }
}

/// Makes a pipe refer to a page, as a device does that has pinned it.
fn pin(bench: &Bench, at: usize) -> [std::os::fd::OwnedFd; 2] {
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let page = libc::iovec { iov_base: bench.page(at).address() as *mut _, iov_len: PAGE_BYTES };
    // SAFETY: the page is there, and belongs to the test.
    let held = unsafe { libc::vmsplice(writer.as_raw_fd(), &raw const page, 1, 0) };
    assert_eq!(held, PAGE_BYTES as isize);
    [reader, writer]
}

/// The program locks memory by an mlock that Farpage doesn't see. A page that can't be taken is still there,
/// and every other page is in its frame.
pub fn what_is_locked_behind_our_back_stays_as_it_is(bench: &'static Bench) {
    const FROM: usize = 100;
    bench.fill(PAGES);
    let start = bench.page(FROM).address() as *const libc::c_void;
    // SAFETY: the call locks memory of the test.
    assert_eq!(unsafe { libc::mlock(start, (PAGES - FROM) * PAGE_BYTES) }, 0);
    let taken = bench.take(&(0..PAGES).map(|at| (at, at)).collect::<Vec<_>>());
    for (at, page) in taken.iter().enumerate() {
        let bytes = match page.taken {
            Taken::Yes => bench.frame_bytes(at),
            Taken::Busy => bench.read(at),
            Taken::Gone => panic!("page {at} was there"),
        };
        assert!(bytes == vec![at as u8 + 1; PAGE_BYTES], "page {at}: {:?}", page.taken);
    }
    // Moved pages are moved as a whole run, which isn't possible across two mappings.
    assert!(bench.moves || taken[..FROM].iter().all(|page| page.taken == Taken::Yes));
}

pub fn frames_that_have_memory_are_emptied_first(bench: &'static Bench) {
    bench.fill(8);
    let has_memory = |frame: usize| !bench.moves || [0, 1, 3, 6].contains(&frame);
    for frame in (0..8).filter(|frame| has_memory(*frame)) {
        // SAFETY: the frames belong to the test. They have memory once `give_memory` has run.
        unsafe {
            bench.pages.give_memory(bench.frame(frame)).unwrap();
            bench.frame(frame).cast::<u8>().write_bytes(0xee, PAGE_BYTES);
        }
    }
    // The stretches of frames and the stretches of pages end at different places.
    let list: Vec<_> = (0..8).map(|at| (at ^ 4, at)).collect();
    for (outgoing, (page, frame)) in bench.take_where(&list, has_memory).iter().zip(list) {
        assert_eq!(outgoing.taken, Taken::Yes, "page {page} to frame {frame}");
        assert_eq!(outgoing.backing == Backing::Hole, bench.moves);
        assert!(bench.frame_bytes(frame).iter().all(|byte| *byte == page as u8 + 1));
    }
}

pub fn touch_of_a_taken_page_waits_for_its_install(bench: &'static Bench) {
    bench.fill(1);
    bench.take(&[(0, 5)]);
    let toucher = std::thread::spawn(|| bench.read(0));
    assert_eq!(bench.next_faults(), [Fault { page: bench.page(0), access: Access::Read }]);
    assert!(!toucher.is_finished());
    // SAFETY: the frame was filled by `take`.
    unsafe { bench.pages.install(bench.page(0), bench.frame(5)) }.unwrap();
    assert_eq!(toucher.join().unwrap(), vec![1; PAGE_BYTES]);
}

pub fn kernel_access_to_a_taken_page_waits_too(bench: &'static Bench) {
    bench.fill(2);
    bench.take(&[(0, 5), (1, 6)]);
    let reader = std::thread::spawn(|| {
        use std::io::Read;
        // SAFETY: the two pages are the test's memory, and no other thread touches them.
        let buffer = unsafe { core::slice::from_raw_parts_mut(bench.memory, 2 * PAGE_BYTES) };
        std::fs::File::open("/dev/zero").unwrap().read(&mut buffer[100..PAGE_BYTES + 100]).unwrap()
    });
    for _ in 0..2 {
        // Only one thread faults, so there is one fault at a time.
        let fault = bench.next_faults()[0];
        let at = (fault.page.0 - bench.page(0).0) as usize;
        // SAFETY: the frames were filled by `take`.
        unsafe { bench.pages.install(fault.page, bench.frame(5 + at)) }.unwrap();
    }
    assert_eq!(reader.join().unwrap(), PAGE_BYTES, "a short count that would not have been there");
    assert_eq!((bench.read(0)[99], bench.read(0)[100], bench.read(1)[99], bench.read(1)[100]), (1, 0, 0, 2));
}

/// The kernel's refusal is the reason why `signal` mode needs a guard around system calls.
pub fn kernel_access_to_a_taken_page_is_refused_and_nothing_is_lost(bench: &'static Bench) {
    bench.fill(2);
    bench.take(&[(1, 6)]);
    let zero = std::fs::File::open("/dev/zero").unwrap();
    let read = |from: usize, bytes: usize| {
        // SAFETY: the bytes are inside the two pages, and no other thread touches them.
        let buffer = unsafe { core::slice::from_raw_parts_mut(bench.memory.add(from), bytes) };
        rustix::io::read(&zero, buffer)
    };
    assert_eq!(read(PAGE_BYTES, 10), Err(rustix::io::Errno::FAULT));
    assert!(read(PAGE_BYTES - 10, 20).unwrap() <= 10, "what is missing was read into");
    // SAFETY: the frame was filled by `take`.
    unsafe { bench.pages.install(bench.page(1), bench.frame(6)) }.unwrap();
    assert_eq!(read(PAGE_BYTES - 10, 20), Ok(20));
    assert_eq!(bench.read(1)[..12], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 2]);
}

pub fn write_to_a_protected_page_is_reported_and_goes_on_when_unprotected(bench: &'static Bench) {
    bench.fill(1);
    assert_eq!(bench.pages.protect(bench.range(0, 1)), bench.variant != Variant::Unprotected);
    if bench.variant == Variant::Unprotected {
        return;
    }
    assert_eq!(bench.read(0), vec![1; PAGE_BYTES], "reading needs nobody");
    let writer = std::thread::spawn(|| bench.write(0, 7));
    assert_eq!(bench.next_faults(), [Fault { page: bench.page(0), access: Access::WriteProtected }]);
    bench.pages.unprotect(PageRange::of(bench.page(0), 1));
    writer.join().unwrap();
    assert_eq!(bench.read(0), vec![7; PAGE_BYTES]);
}

pub fn zeros_that_are_about_to_be_written_have_memory_at_once(bench: &'static Bench) {
    assert_eq!(bench.pages.zero(bench.range(0, 4), Access::Read), Ok(4));
    assert_eq!(bench.anonymous_kib(), 0, "the kernel's own zeros");
    let there = bench.pages.zero(bench.range(4, 40), Access::Write).unwrap();
    assert!((1..=40).contains(&there));
    assert_eq!(bench.anonymous_kib(), 4 * there);
    for at in 0..4 + there as usize {
        assert_eq!(bench.read(at), vec![0; PAGE_BYTES]);
        bench.write(at, 7);
        assert_eq!(bench.read(at), vec![7; PAGE_BYTES]);
    }
    assert_eq!(bench.anonymous_kib(), 4 * (4 + there));
    assert_eq!(bench.pages.zero(bench.range(4, 1), Access::Write), Err(InstallError::Present));
    // Zeros are mapped up to a page that is there already. That page keeps its content.
    assert_eq!(bench.pages.zero(bench.range(52, 1), Access::Write), Ok(1));
    bench.write(52, 9);
    assert_eq!(bench.pages.zero(bench.range(50, 6), Access::Write), Ok(2));
    assert_eq!(bench.read(52), vec![9; PAGE_BYTES]);
    assert_eq!(bench.anonymous_kib(), 4 * (4 + there + 3));
}

pub fn first_write_to_zeros_is_reported_when_asked_for(bench: &'static Bench) {
    assert_eq!(bench.pages.zero(bench.range(0, 2), Access::Read), Ok(2));
    if !bench.pages.protect(bench.range(0, 2)) {
        assert!(bench.variant == Variant::Unprotected);
        return;
    }
    assert_eq!(bench.read(1), vec![0; PAGE_BYTES], "reading needs nobody");
    let writer = std::thread::spawn(|| bench.write(1, 7));
    assert_eq!(bench.next_faults(), [Fault { page: bench.page(1), access: Access::WriteProtected }]);
    bench.pages.unprotect(PageRange::of(bench.page(1), 1));
    writer.join().unwrap();
    assert_eq!(bench.read(1), vec![7; PAGE_BYTES]);
    // The other page is taken as any page is, protected or not.
    assert_eq!(bench.take(&[(0, 5)])[0].taken, Taken::Yes);
    assert_eq!(bench.frame_bytes(5), vec![0; PAGE_BYTES]);
}

pub fn run_is_installed_up_to_the_first_page_that_is_there(bench: &'static Bench) {
    bench.fill(8);
    bench.take(&(0..8).map(|at| (at, 20 + at)).collect::<Vec<_>>());
    // SAFETY: the frames were filled by `take`, and no other code has them.
    let install = |from: usize, count: usize| unsafe {
        bench.pages.install_run(bench.range(from, count), bench.frame(20 + from))
    };
    assert_eq!(install(3, 2), Ok(2));
    assert_eq!(install(0, 8), Ok(3), "the fourth page was there");
    assert_eq!(install(3, 5), Err(InstallError::Present));
    let waits = std::thread::spawn(|| bench.read(7));
    assert_eq!(bench.next_faults(), [Fault { page: bench.page(7), access: Access::Read }]);
    assert_eq!(install(5, 3), Ok(3));
    assert_eq!(waits.join().unwrap(), vec![8; PAGE_BYTES]);
    for at in 0..8 {
        assert_eq!(bench.read(at), vec![at as u8 + 1; PAGE_BYTES]);
        assert_eq!(bench.frame_bytes(20 + at), vec![at as u8 + 1; PAGE_BYTES], "the source stays");
    }
}

/// A bug: the kernel may keep one of Farpage's ranges in several mappings. The kernel refused the whole run,
/// and then each page up to the border by itself. Of the pages that had been read ahead one came in, and the
/// rest was thrown away.
pub fn run_goes_over_borders_of_the_kernels_mappings(bench: &'static Bench) {
    const COUNT: usize = 32;
    bench.fill(COUNT);
    for border in [1, 5, 6, 23] {
        let apart = bench.range(border, 1).start.address() as *mut libc::c_void;
        // SAFETY: the memory is the test's own, and the advice changes no byte.
        assert_eq!(unsafe { libc::madvise(apart, PAGE_BYTES, libc::MADV_DONTDUMP) }, 0);
    }
    let taken = bench.take(&(0..COUNT).map(|at| (at, 20 + at)).collect::<Vec<_>>());
    assert!(taken.iter().all(|page| page.taken == Taken::Yes));
    for at in 0..COUNT {
        assert_eq!(bench.frame_bytes(20 + at), vec![at as u8 + 1; PAGE_BYTES]);
    }
    let mut from = 0;
    while from < COUNT {
        let rest = bench.range(from, COUNT - from);
        // SAFETY: the frames were filled by `take`, and no other code has them.
        from += unsafe { bench.pages.install_run(rest, bench.frame(20 + from)) }.unwrap() as usize;
    }
    for at in 0..COUNT {
        assert_eq!(bench.read(at), vec![at as u8 + 1; PAGE_BYTES]);
    }
}

pub fn install_over_a_page_is_refused_and_changes_nothing(bench: &'static Bench) {
    bench.fill(2);
    bench.take(&[(1, 5)]);
    // SAFETY: the frame was filled by `take`.
    let result = unsafe { bench.pages.install(bench.page(0), bench.frame(5)) };
    assert_eq!(result.map(|_| ()), Err(InstallError::Present));
    assert_eq!(bench.read(0), vec![1; PAGE_BYTES]);
    assert_eq!(bench.frame_bytes(5), vec![2; PAGE_BYTES], "the frame still has the bytes");
}

pub fn install_into_read_only_memory_works(bench: &'static Bench) {
    bench.fill(1);
    bench.take(&[(0, 5)]);
    let protection = rustix::mm::MprotectFlags::READ;
    // SAFETY: the page belongs to the test, and is only read from here on.
    unsafe { rustix::mm::mprotect(bench.memory.cast(), PAGE_BYTES, protection) }.unwrap();
    // SAFETY: the frame was filled by `take`.
    unsafe { bench.pages.install(bench.page(0), bench.frame(5)) }.unwrap();
    assert_eq!(bench.read(0), vec![1; PAGE_BYTES]);
}

pub fn poisoned_page_is_refused_to_the_kernel(bench: &'static Bench) {
    bench.fill(1);
    bench.take(&[(0, 5)]);
    bench.pages.poison(bench.page(0)).unwrap();
    let null = std::fs::File::create("/dev/shm").or_else(|_| tempfile()).unwrap();
    // SAFETY: only the kernel reads the page, and reports that it can't.
    let page = unsafe { core::slice::from_raw_parts(bench.memory, PAGE_BYTES) };
    let error = rustix::io::write(std::os::fd::AsFd::as_fd(&null), page).unwrap_err();
    assert_eq!(error, rustix::io::Errno::FAULT);
}

/// The program must be told of a poisoned page. A handler thread that treated the page as missing would wait
/// for ever.
pub fn touch_of_a_poisoned_page_is_signalled_until_it_is_replaced(bench: &'static Bench) {
    bench.fill(2);
    bench.take(&[(0, 5), (1, 6)]);
    bench.poisoned.store(bench.page(1).0, Ordering::Release);
    bench.pages.poison(bench.page(1)).unwrap();
    assert_eq!(bench.read(1), vec![0; PAGE_BYTES]);
    assert_eq!(bench.refused.load(Ordering::Acquire), 1);
    // SAFETY: the frame was filled by `take`.
    unsafe { bench.pages.install(bench.page(0), bench.frame(5)) }.unwrap();
    assert_eq!(bench.read(0), vec![1; PAGE_BYTES]);
}

/// 300 threads touch all pages at once, before any thread takes a fault up.
pub fn more_threads_than_the_queue_has_room_are_all_served(bench: &'static Bench) {
    bench.fill(PAGES);
    bench.take(&(0..PAGES).map(|at| (at, at)).collect::<Vec<_>>());
    let read = |thread: usize| std::thread::spawn(move || (thread % PAGES, bench.read(thread % PAGES)));
    let readers: Vec<_> = (0..300).map(read).collect();
    std::thread::sleep(std::time::Duration::from_millis(50));
    std::thread::spawn(|| {
        let mut is_out = [true; PAGES];
        loop {
            for fault in bench.next_faults() {
                let at = (fault.page.0 - bench.page(0).0) as usize;
                if core::mem::take(&mut is_out[at]) {
                    // SAFETY: the frame was filled by `take`.
                    unsafe { bench.pages.install(fault.page, bench.frame(at)) }.unwrap();
                }
                bench.pages.wake(fault.page);
            }
        }
    });
    for reader in readers {
        let (at, bytes) = reader.join().unwrap();
        assert_eq!(bytes, vec![at as u8 + 1; PAGE_BYTES]);
    }
}

/// Returns the kernel's protection of a page, as /proc/self/maps shows it.
fn protection_of(bench: &Bench, at: usize) -> String {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let address = bench.page(at).address();
    let number = |text: &str| usize::from_str_radix(text, 16).unwrap();
    let line = maps.lines().find(|line| {
        let (start, end) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
        (number(start)..number(end)).contains(&address)
    });
    line.unwrap().split(' ').nth(1).unwrap().to_owned()
}

pub fn what_the_program_allows_itself_comes_back_with_the_page(bench: &'static Bench) {
    const READ: usize = 1;
    let pages = bench.protections.unwrap();
    bench.fill(4);
    bench.take(&[(1, 1), (2, 2)]);
    pages.allow(bench.range(0, 2), READ).unwrap();
    let all = |bench: &Bench| (0..4).map(|at| protection_of(bench, at)).collect::<Vec<_>>();
    assert_eq!(all(bench), ["r--p", "---p", "---p", "rw-p"]);
    assert!(pages.allows(bench.page(1), false) && !pages.allows(bench.page(1), true));
    for at in 1..3 {
        // SAFETY: the frame was filled by `take`.
        unsafe { bench.pages.install(bench.page(at), bench.frame(at)) }.unwrap();
    }
    assert_eq!(all(bench), ["r--p", "r--p", "rw-p", "rw-p"]);
    assert_eq!((bench.read(0)[0], bench.read(1)[0], bench.read(2)[0]), (1, 2, 3));
    pages.allow(bench.range(0, 2), 3).unwrap();
    bench.write(1, 9);
}

pub fn discarded_pages_are_heard_of_again(bench: &'static Bench) {
    let pages = bench.protections.unwrap();
    bench.fill(3);
    // SAFETY: the test no longer needs the page.
    unsafe { farpage_os::memory::advise(bench.range(1, 1), libc::MADV_DONTNEED as u32) }.unwrap();
    pages.withdraw(bench.range(1, 1)).unwrap();
    let waits = std::thread::spawn(|| bench.read(1));
    assert_eq!(bench.next_faults(), [Fault { page: bench.page(1), access: Access::Read }]);
    assert_eq!(bench.pages.zero(bench.range(1, 1), Access::Read), Ok(1));
    assert_eq!(waits.join().unwrap(), vec![0; PAGE_BYTES]);
    assert_eq!((bench.read(0)[0], bench.read(2)[0]), (1, 3));
}

/// A bug: stress-ng reads all of its memory first (MADV_POPULATE_READ). When the engine was activated after
/// that, the page of zeros was opened everywhere. The program was far over its budget before any thread
/// looked.
pub fn what_was_only_read_before_is_heard_of_when_it_is_written(bench: &'static Bench) {
    let pages = bench.protections.unwrap();
    let range = bench.range(0, 8);
    let scanned = Pagemap::open().unwrap().for_each_zero_run(range, |_| {});
    if scanned.is_err() {
        return println!("skipped: this kernel's pagemap can't be scanned (Linux 6.7)");
    }
    pages.forget(range);
    // SAFETY: the memory is the test's, and gets the protection that it had before it was registered.
    unsafe { farpage_os::memory::allow(range, 3) }.unwrap();
    assert_eq!((0..8).map(|at| bench.read(at)[0]).sum::<u8>(), 0);
    bench.write(3, 7);
    // SAFETY: missing pages read as zeros.
    unsafe { bench.pages.register(range) }.unwrap();
    assert!((0..8).all(|at| pages.is_open(bench.page(at)) == (at == 3)), "only what was written");
    std::thread::spawn(|| bench.write(5, 1));
    assert_eq!(bench.next_faults(), [Fault { page: bench.page(5), access: Access::Write }]);
    assert_eq!(bench.pages.zero(bench.range(5, 1), Access::Read), Ok(1));
    assert_eq!((bench.read(3)[0], pages.is_open(bench.page(5))), (7, true));
}

/// A bug: realloc moves its memory as one mapping. Pages that were first opened before the mapping around
/// them was written stayed mappings of their own for ever.
pub fn pieces_become_one_mapping_that_can_be_moved(bench: &'static Bench) {
    let pages = bench.protections.unwrap();
    for at in (0..PAGES).step_by(2) {
        assert_eq!(bench.pages.zero(bench.range(at, 1), Access::Read), Ok(1));
        bench.write(at, at as u8 + 1);
    }
    let all = bench.range(0, PAGES);
    pages.join(all);
    let bytes = PAGES * PAGE_BYTES;
    let (old, flags) = (bench.memory.cast(), rustix::mm::MremapFlags::MAYMOVE);
    let new = reserve(2 * bytes).unwrap();
    // SAFETY: the memory is the test's, and is at its new place from here on. The old place isn't used any
    // more.
    let new = unsafe { rustix::mm::mremap_fixed(old, bytes, 2 * bytes, flags, new.cast()) }.unwrap();
    let there = PageRange::covering(new as usize, 2 * bytes);
    pages.moved(all.start, PAGES as u64, there).unwrap();
    pages.forget(all);
    for at in 0..PAGES {
        assert_eq!(pages.is_open(there.start.plus(at as u64)), at % 2 == 0);
    }
    for at in (0..PAGES).step_by(2) {
        // SAFETY: the page is open, and belongs to the test.
        assert_eq!(unsafe { *new.cast::<u8>().add(at * PAGE_BYTES + 7) }, at as u8 + 1);
    }
    assert!(
        !pages.is_open(there.start.plus(PAGES as u64)) && pages.allows(there.start.plus(PAGES as u64), true)
    );
}

pub fn pages_that_a_call_uses_stay_open(bench: &'static Bench) {
    let pages = bench.protections.unwrap();
    pages.forget(bench.range(0, 4));
    // SAFETY: the memory is the test's, and gets the protection that it had before it was registered.
    unsafe { farpage_os::memory::allow(bench.range(0, 4), 3) }.unwrap();
    bench.write(1, 5);
    pages.register_open(bench.range(1, 2)).unwrap();
    assert_eq!((bench.read(1)[0], bench.read(2)[0]), (5, 0), "nobody need serve it");
    assert_eq!(bench.take(&[(1, 1), (2, 2)])[0].taken, Taken::Yes);
    assert_eq!(protection_of(bench, 1), "---p");
    assert_eq!(bench.frame_bytes(1), vec![5; PAGE_BYTES]);
}

/// A bug: a thread touches a page, and another thread unmaps the page before the fault is served. The program
/// was stopped for that.
pub fn page_that_was_unmapped_meanwhile_is_refused(bench: &'static Bench) {
    bench.fill(2);
    bench.take(&[(0, 0), (1, 1)]);
    // SAFETY: the test doesn't use this page of its memory any more.
    unsafe { rustix::mm::munmap(bench.memory.add(PAGE_BYTES).cast(), PAGE_BYTES) }.unwrap();
    bench.protections.unwrap().forget(bench.range(1, 1));
    assert_eq!(bench.pages.zero(bench.range(1, 1), Access::Read), Err(InstallError::Unmapped));
    // SAFETY: the frames were filled by `take`.
    let install =
        |at: usize, count| unsafe { bench.pages.install_run(bench.range(at, count), bench.frame(at)) };
    assert_eq!(install(1, 1), Err(InstallError::Unmapped));
    assert_eq!(install(0, 2), Ok(1));
    assert_eq!(bench.read(0), vec![1; PAGE_BYTES]);
    assert!(!bench.pages.unprotect(PageRange::of(bench.page(1), 1)));
}

fn tempfile() -> std::io::Result<std::fs::File> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("farpage-conformance-{}-{number}", std::process::id()));
    let file = std::fs::File::create(&path)?;
    std::fs::remove_file(path)?;
    Ok(file)
}

/// Threads count in their own pages, and each page is taken and put back all the time. A lost or stale page
/// would make a counter go back.
pub fn threads_hammering_see_every_byte_while_pages_go_in_and_out(bench: &'static Bench) {
    const COUNTERS: usize = 4;
    const ROUNDS: u64 = 20_000;
    bench.pages.zero(bench.range(0, COUNTERS), Access::Read).unwrap();
    let out: &'static Mutex<HashMap<u64, usize>> = Box::leak(Box::default());
    let counters: Vec<_> = (0..COUNTERS)
        .map(|at| {
            std::thread::spawn(move || {
                let counter = bench.memory.wrapping_add(at * PAGE_BYTES).cast::<u64>();
                for round in 0..ROUNDS {
                    // SAFETY: only this thread touches the page, and its faults are served below.
                    unsafe {
                        assert_eq!(counter.read_volatile(), round);
                        counter.write_volatile(round + 1);
                    }
                }
            })
        })
        .collect();
    std::thread::spawn(move || {
        loop {
            for fault in bench.next_faults() {
                let mut out = out.lock().unwrap();
                if fault.access != Access::WriteProtected
                    && let Some(frame) = out.remove(&fault.page.0)
                {
                    // SAFETY: the frame was filled by `take`, and the map says that no other code has it.
                    unsafe { bench.pages.install(fault.page, bench.frame(frame)) }.unwrap();
                    if bench.moves {
                        // SAFETY: the bytes are in the program now.
                        unsafe {
                            bench.pages.drop_memory(&[Stretch {
                                base: bench.frame(frame).cast(),
                                bytes: PAGE_BYTES,
                            }])
                        }
                        .unwrap();
                    }
                } else if bench.protections.is_some() {
                    // Either the page was taken before it was ever touched, and counted as gone, or it is
                    // open again by now.
                    let _ = bench.pages.zero(PageRange::of(fault.page, 1), Access::Read);
                }
                bench.pages.wake(fault.page);
            }
        }
    });
    while counters.iter().any(|thread| !thread.is_finished()) {
        let mut out = out.lock().unwrap();
        let there: Vec<_> = (0..COUNTERS).filter(|at| !out.contains_key(&bench.page(*at).0)).collect();
        let list: Vec<_> = there.iter().map(|&at| (at, at)).collect();
        for (at, outgoing) in there.iter().zip(bench.take(&list)) {
            if outgoing.taken == Taken::Yes {
                out.insert(bench.page(*at).0, *at);
            }
            bench.pages.wake(bench.page(*at));
        }
    }
    counters.into_iter().for_each(|thread| thread.join().unwrap());
}

/// A bug: a write replaces the kernel's page of zeros while that page is copied out. The new page counted as
/// the copied one.
pub fn zeros_written_while_they_are_taken_keep_the_write(bench: &'static Bench) {
    const COUNT: usize = 16;
    const ROUNDS: usize = 400;
    let (begun, ended) = (&*Box::leak(Box::new(AtomicU32::new(0))), &*Box::leak(Box::new(AtomicU32::new(0))));
    let writer = std::thread::spawn(move || {
        for round in 1..=ROUNDS {
            while begun.load(Ordering::Acquire) != round as u32 {
                std::thread::yield_now();
            }
            // SAFETY: the memory is the test's. A thread that waits for a page is woken by the page's
            // install.
            (0..COUNT).for_each(|at| unsafe {
                bench.memory.add(at * PAGE_BYTES).cast::<usize>().write_volatile(round)
            });
            ended.store(round as u32, Ordering::Release);
        }
    });
    let all: Vec<_> = (0..COUNT).map(|at| (at, at)).collect();
    for round in 1..=ROUNDS {
        assert_eq!(bench.pages.zero(bench.range(0, COUNT), Access::Read), Ok(COUNT as u64));
        begun.store(round as u32, Ordering::Release);
        let mut is_over = false;
        while !is_over {
            is_over = ended.load(Ordering::Acquire) == round as u32;
            for (at, outgoing) in bench.take_without_waiting(&all).iter().enumerate() {
                if outgoing.taken == Taken::Yes {
                    // SAFETY: the frame was filled by `take`.
                    unsafe { bench.pages.install(bench.page(at), bench.frame(at)) }.unwrap();
                }
            }
        }
        for at in 0..COUNT {
            assert_eq!(bench.read(at)[..8], round.to_le_bytes(), "page {at} of round {round}");
        }
        // SAFETY: no thread uses the pages any more. Each is given zeros before it is touched again.
        unsafe { farpage_os::memory::drop_pages(bench.memory, COUNT * PAGE_BYTES) }.unwrap();
    }
    writer.join().unwrap();
}

/// A bug: a device that only reads a shared page is given a copy of it. The copy is clean in each process
/// that maps it from then on. MADV_FREE in one process made the kernel drop the page of the other processes,
/// which found zeros.
pub fn page_that_a_child_maps_too_is_not_lost_to_the_child(bench: &'static Bench) {
    bench.fill(2);
    // SAFETY: the advice gives copies to the children of this test, as intended.
    unsafe { farpage_os::memory::advise(bench.range(0, PAGES), libc::MADV_DOFORK as u32) }.unwrap();
    let (told, mut tell) = std::io::pipe().unwrap();
    let child = |looks: bool| {
        // SAFETY: the child makes system calls, looks at its own copies and exits. It runs nothing of the
        // test harness.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let mut byte = 0_u8;
            // SAFETY: the call reads one byte of the child's own. Then the child reads its own copies of two
            // pages. `_exit` ends it without destructors.
            unsafe {
                libc::read(told.as_raw_fd(), (&raw mut byte).cast(), 1);
                if looks {
                    libc::madvise(bench.memory.cast(), 2 * PAGE_BYTES, libc::MADV_PAGEOUT);
                }
                libc::_exit(i32::from(*bench.memory) * 16 + i32::from(*bench.memory.add(PAGE_BYTES)));
            }
        }
        child
    };
    let first = child(false);
    // The pages are shared with the first child. A reader that pins them is given a copy.
    let mut copy = [0_u8; 2 * PAGE_BYTES];
    let own = libc::iovec { iov_base: copy.as_mut_ptr().cast(), iov_len: copy.len() };
    let pages = libc::iovec { iov_base: bench.memory.cast(), iov_len: copy.len() };
    // SAFETY: the call reads two pages of the test into as many bytes of its own.
    let read = unsafe { libc::process_vm_readv(libc::getpid(), &raw const own, 1, &raw const pages, 1, 0) };
    assert_eq!(read, copy.len() as isize);
    let second = child(true);
    for (at, page) in bench.take(&[(0, 5), (1, 6)]).iter().enumerate() {
        let bytes = if page.taken == Taken::Yes { bench.frame_bytes(5 + at) } else { bench.read(at) };
        assert_eq!(bytes, vec![at as u8 + 1; PAGE_BYTES], "page {at}: {:?}", page.taken);
    }
    // Each child gets a byte, because a child of another test may keep the pipe open.
    std::io::Write::write_all(&mut tell, &[1; 2]).unwrap();
    for child in [first, second] {
        let mut status = 0;
        // SAFETY: the child is our own.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(libc::WEXITSTATUS(status), 0x12, "the child saw something else than its pages");
    }
}

/// The kernel refuses to move a page that a fork has shared, even when the child is gone. Unsharing makes the
/// page movable. The child keeps its own copy all the while.
pub fn page_shared_with_a_child_is_never_taken_wrongly(bench: &'static Bench) {
    bench.fill(1);
    // SAFETY: the advice gives a copy to the child of this test, as intended.
    unsafe { farpage_os::memory::advise(bench.range(0, PAGES), libc::MADV_DOFORK as u32) }.unwrap();
    // SAFETY: the child only reads one byte and exits. It runs nothing of the test harness.
    let child = unsafe { libc::fork() };
    if child == 0 {
        std::thread::sleep(std::time::Duration::from_millis(200));
        // SAFETY: the page is the child's own copy. `_exit` ends the child without destructors.
        unsafe { libc::_exit(i32::from(*bench.memory) + 1) };
    }
    // The tests beside this one fork, too, and each of their children shares the page anew.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    loop {
        let outgoing = bench.take(&[(0, 5)])[0];
        if outgoing.taken == Taken::Yes {
            break;
        }
        assert!(outgoing.is_shared && std::time::Instant::now() < deadline, "{outgoing:?}");
        bench.pages.unshare(bench.range(0, 1));
    }
    assert_eq!(bench.frame_bytes(5), vec![1; PAGE_BYTES]);
    let mut status = 0;
    // SAFETY: the child is our own.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(libc::WEXITSTATUS(status), 2, "the child saw something else than its page");
}
/// The story: a handler thread read the event, which let the call go on. Only then did the handler thread
/// look whether the call was a known one. The call was over by then, and a program was stopped for nothing.
pub fn moves_that_we_make_are_told_from_those_that_we_do_not_see(bench: &'static Bench) {
    use rustix::mm::{MapFlags, MremapFlags, ProtFlags, mmap_anonymous, mremap_fixed};
    let (bytes, uffd) = (16 * PAGE_BYTES, bench.uffd.unwrap());
    bench.fill(16);
    // SAFETY: the call makes a new mapping, which no code uses and which only keeps a place.
    let aside =
        unsafe { mmap_anonymous(core::ptr::null_mut(), bytes, ProtFlags::empty(), MapFlags::PRIVATE) };
    let aside = PageIndex::of_address(aside.unwrap() as usize);
    for _ in 0..3 {
        std::thread::spawn(|| {
            let mut list = [Fault { page: PageIndex(0), access: Access::Read }; FAULTS_MAX];
            loop {
                Faults::of(bench.uffd.unwrap()).wait(&mut list, None);
            }
        });
    }
    // The place stays taken, so that no other test's memory lands there.
    let flags = MremapFlags::MAYMOVE | MremapFlags::DONTUNMAP;
    let shift = |from: PageIndex, to: PageIndex| {
        let (from, to) = (from.address() as *mut _, to.address() as *mut _);
        // SAFETY: both places belong to the test, and no thread touches them meanwhile.
        unsafe { mremap_fixed(from, bytes, bytes, flags, to) }.unwrap();
    };
    for _ in 0..2_000 {
        for (from, to) in [(bench.page(0), aside), (aside, bench.page(0))] {
            uffd.move_begins(PageRange::of(from, 16));
            shift(from, to);
            uffd.move_ended();
        }
    }
    assert_eq!(uffd.unseen_moves(), 0);
    // A reader that has looked before the last known call ended may still take one of these for that call.
    for _ in 0..1_000 {
        shift(bench.page(0), aside);
        shift(aside, bench.page(0));
        if uffd.unseen_moves() > 0 {
            break;
        }
    }
    assert!(uffd.unseen_moves() > 0);
    assert_eq!(bench.read(15), vec![16; PAGE_BYTES]);
}
