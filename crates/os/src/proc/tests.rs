//! Tests of what /proc says.

use super::mappings::parse_mapping;
use super::*;
use std::io::{Read, Write};

#[test]
fn lines_of_maps_are_read_for_what_they_are() {
    let line = b"7f0c1a000000-7f0c1a200000 rw-p 00000000 00:00 0 ";
    let mapping = parse_mapping(line).unwrap();
    assert!(mapping.is_private_data && mapping.is_anonymous && mapping.name == MappingName::None);
    assert_eq!(mapping.pages.bytes(), 0x20_0000);
    let heap = parse_mapping(b"55d0c000-55d0d000 rw-p 00000000 00:00 0     [heap]").unwrap();
    assert_eq!(heap.name, MappingName::Heap);
    let file = parse_mapping(b"55d0c000-55d0d000 r-xp 00001000 fe:00 123   /usr/bin/x y").unwrap();
    assert!(!file.is_private_data && !file.is_anonymous);
    assert!(file.is_private && file.is_executable && !file.begins_file);
    let first = parse_mapping(b"55d0b000-55d0c000 r--p 00000000 fe:00 123   /usr/bin/x y").unwrap();
    assert!(first.begins_file && !mapping.begins_file);
    let named = parse_mapping(b"7f0c1a000000-7f0c1a200000 ---p 00000000 00:00 0   [anon:my heap]").unwrap();
    assert!(named.is_private && named.is_anonymous && !named.is_private_data && !named.is_executable);
    assert_eq!(named.name, MappingName::Given);
    assert_eq!(parse_mapping(b"nonsense"), None);
}

/// A bug: a fork's child found bytes that its parent had asked the kernel to wipe. An engine that started
/// late didn't know of the request.
#[test]
fn mappings_that_are_special_to_the_program_are_left_out() {
    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
    const BYTES: usize = 3 * PAGE_BYTES;
    // SAFETY: the kernel chooses the address, so the mapping replaces none.
    let base = unsafe {
        mmap_anonymous(core::ptr::null_mut(), BYTES, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
    };
    let base = base.unwrap();
    let page = PageIndex::of_address(base as usize + PAGE_BYTES);
    let is_plain = || {
        let mut found = false;
        for_each_plain_mapping(|mapping| found |= mapping.pages.contains(page)).unwrap();
        found
    };
    assert!(is_plain());
    for (sets, clears) in
        [(Advice::LinuxWipeOnFork, Advice::LinuxKeepOnFork), (Advice::LinuxDontFork, Advice::LinuxDoFork)]
    {
        // SAFETY: the page is in the middle of the mapping just made.
        let advise = |advice| unsafe { madvise(base.byte_add(PAGE_BYTES), PAGE_BYTES, advice) }.unwrap();
        advise(sets);
        assert!(!is_plain(), "{sets:?}");
        advise(clears);
    }
    assert!(is_plain());
    // SAFETY: the range is the mapping just made.
    unsafe { munmap(base, BYTES) }.unwrap();
    let locked = Requests { is_locked: true, ..Requests::default() };
    assert_eq!(Requests::of_flags(b" rd wr mr mw me lo ac sd"), locked);
    assert_eq!(Requests::of_flags(b" rd wr mr mw me ac sd"), Requests::default());
    assert!(Requests::of_flags(b" rd wr gd").is_other);
}

/// A bug: a system call failed, because the kernel had taken a page that Farpage believed resident. The
/// program had allowed that past libc.
#[test]
fn pages_that_the_kernel_may_take_are_seen_and_can_be_kept() {
    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
    const BYTES: usize = 3 * PAGE_BYTES;
    // SAFETY: the kernel chooses the address, so the mapping replaces none.
    let base = unsafe {
        mmap_anonymous(core::ptr::null_mut(), BYTES, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
    };
    let base = base.unwrap().cast::<u8>();
    let page = PageIndex::of_address(base as usize + PAGE_BYTES);
    let has_clean_pages = || {
        let mut found = false;
        let look = |mapping: Mapping, requests: Requests| {
            found |= mapping.pages.contains(page) && requests.has_clean_pages;
        };
        for_each_mapping_and_requests(look).unwrap();
        found
    };
    // SAFETY: the mapping was just made, and has these bytes.
    unsafe { base.write_bytes(7, BYTES) };
    assert!(!has_clean_pages());
    // SAFETY: the page is in the middle of the mapping just made.
    unsafe { madvise(base.byte_add(PAGE_BYTES).cast(), PAGE_BYTES, Advice::LinuxFree) }.unwrap();
    assert!(has_clean_pages());
    // SAFETY: the page is the mapping's, and may be written.
    assert!(unsafe { crate::futex::rewrite(page.address()) });
    assert!(!has_clean_pages());
    // SAFETY: the range is the mapping just made.
    unsafe { munmap(base.cast(), BYTES) }.unwrap();
}

#[test]
fn this_process_has_a_stack_and_anonymous_memory() {
    let mut stacks = 0;
    for_each_mapping(|mapping| stacks += u32::from(mapping.name == MappingName::Stack)).unwrap();
    assert_eq!(stacks, 1);
    assert!(Statm::open().unwrap().anonymous_bytes().unwrap() > 0);
}

/// Writable memory counts before it is written: a process is left alone only if the memory that it could
/// write is small.
#[test]
fn memory_that_may_be_written_counts_though_it_is_not_there() {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
    const BYTES: usize = 1 << 30;
    let sizes = || Statm::open().unwrap().sizes().unwrap();
    let before = sizes();
    let map = |protection| {
        // SAFETY: the kernel chooses the address, so the mapping replaces none.
        unsafe {
            mmap_anonymous(core::ptr::null_mut(), BYTES, protection, MapFlags::PRIVATE | MapFlags::NORESERVE)
        }
    };
    let reserved = map(ProtFlags::empty()).unwrap();
    let between = sizes();
    let writable = map(ProtFlags::READ | ProtFlags::WRITE).unwrap();
    let after = sizes();
    // Other tests map and unmap a little meanwhile.
    let grown = |from: Sizes, to: Sizes| to.writable_bytes.saturating_sub(from.writable_bytes) as usize;
    assert!(grown(before, between) < BYTES / 2, "nobody can write it yet");
    assert!(grown(between, after) > BYTES / 2);
    assert!(after.anonymous_bytes < before.anonymous_bytes + BYTES as u64 / 2);
    // SAFETY: the ranges are the mappings just made.
    unsafe {
        munmap(reserved, BYTES).unwrap();
        munmap(writable, BYTES).unwrap();
    }
}

/// Other tests of this process may have faults meanwhile, too.
#[test]
fn first_touches_are_faults() {
    const PAGES: usize = 4096;
    let before = minor_faults();
    let memory = crate::memory::reserve(PAGES * PAGE_BYTES).unwrap();
    for page in 0..PAGES {
        // SAFETY: the address is inside the reserved memory.
        unsafe { memory.add(page * PAGE_BYTES).write_volatile(1) };
    }
    // At least one fault for each huge page.
    assert!(minor_faults() >= before + (PAGES / 512) as u64);
}

/// The child writes one of four pages. The child ends when its end of a pipe says that the parent has looked.
#[test]
fn pages_that_a_child_has_too_are_shared_until_one_of_both_writes_them() {
    const PAGES: u64 = 4;
    let memory = crate::memory::reserve(PAGES as usize * PAGE_BYTES).unwrap();
    // SAFETY: the address is inside the reserved memory.
    let write = |page: usize| unsafe { memory.add(page * PAGE_BYTES).write_volatile(1) };
    (0..PAGES as usize).for_each(write);
    let range = PageRange::of(PageIndex::of_address(memory as usize), PAGES);
    let pagemap = Pagemap::open().unwrap();
    let shared = || {
        let mut list = Vec::new();
        pagemap.for_each_shared(range, |page| list.push(page.0 - range.start.0));
        list
    };
    // A test beside this one may fork, too, and for a moment its child then has these pages.
    let is_seen = |expected: &[u64]| {
        (0..5_000).any(|_| {
            shared() == expected || {
                std::thread::sleep(std::time::Duration::from_millis(1));
                false
            }
        })
    };
    assert!(is_seen(&[]));
    let (mut ready, mut is_ready) = std::io::pipe().unwrap();
    let (mut is_over, over) = std::io::pipe().unwrap();
    // SAFETY: the call forks and takes no pointer. The child makes only system calls.
    let child =
        unsafe { sys::call(number::CLONE, [linux_raw_sys::general::SIGCHLD as usize, 0, 0, 0, 0, 0]) };
    if child == 0 {
        write(2);
        let _ = is_ready.write(&[1]);
        drop(over);
        let _ = is_over.read(&mut [0_u8]);
        sys::exit_group(0);
    }
    ready.read_exact(&mut [0_u8]).unwrap();
    assert!(is_seen(&[0, 1, 3]), "{:?}", shared());
    drop(over);
    let pid = rustix::process::Pid::from_raw(child as i32);
    rustix::process::waitpid(pid, rustix::process::WaitOptions::empty()).unwrap();
    assert!(is_seen(&[]), "{:?}", shared());
}

#[test]
fn thread_that_waits_is_found_with_its_call_and_one_that_has_ended_is_not() {
    let (tell, told) = std::sync::mpsc::channel();
    let (release, wait) = std::sync::mpsc::channel::<()>();
    let waiting = std::thread::spawn(move || {
        // SAFETY: the call takes no argument.
        tell.send(unsafe { sys::call(sys::number::GETTID, [0; 6]) } as u32).unwrap();
        wait.recv().unwrap_err();
    });
    let thread = told.recv().unwrap();
    let is_listed = || {
        let mut found = false;
        for_each_thread(|other| found |= other == thread).unwrap();
        found
    };
    const FUTEX: usize = 202;
    let mut tries = 0;
    let call = loop {
        // The thread may not wait yet, or may wait for another reason.
        match call_under_way(thread) {
            Some(call) if call.number == FUTEX => break call,
            _ if tries == 10_000 => panic!("the thread waits for ever"),
            _ => tries += 1,
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    };
    assert!(call.stack_pointer > 0 && call.instruction > 0 && call.arguments[0] > 0);
    assert!(is_listed() && !runs_no_program(thread));
    let waits = waiting_thread(thread).unwrap();
    assert!(waits.blocked & 1 << 8 == 0 && waits.ran_ns > 0);
    drop(release);
    waiting.join().unwrap();
    assert_eq!(waiting_thread(u32::MAX), None);
    assert_eq!(
        parse_status(b"Name:\tx S\nState:\tS (sleeping)\nSigBlk:\t0000000000010000\n"),
        Some((1 << 16, true))
    );
    assert_eq!(parse_status(b"State:\tD (disk sleep)\nSigBlk:\tffffffffffffffff\n"), Some((u64::MAX, false)));
    assert_eq!(parse_status(b"Name:\tx\n"), None);
    assert_eq!(parse_call(b"running\n"), None);
    assert_eq!(parse_stack_pointer(b"running\n"), None);
    assert_eq!(parse_stack_pointer(b"-1 0x7ffd12 0x7f0034\n"), Some(0x7ffd12));
    assert_eq!(parse_stack_pointer(b"0 0x3 0x7f0012 0x400 0x0 0x0 0x0 0x7ffd12 0x7f0034\n"), Some(0x7ffd12));
    while is_listed() {
        std::thread::yield_now();
    }
    assert!(runs_no_program(thread));
}

#[test]
fn pagemap_sees_a_touched_page_and_not_an_untouched_one() {
    let base = crate::memory::reserve(4 * PAGE_BYTES).unwrap();
    // SAFETY: the address is the second page of the mapping just made.
    unsafe { base.add(PAGE_BYTES).write(1) };
    let first = PageIndex::of_address(base as usize);
    let mut present = Vec::new();
    let pagemap = Pagemap::open().unwrap();
    pagemap.for_each_present(PageRange::of(first, 4), |page| present.push(page)).unwrap();
    assert_eq!(present, [first.plus(1)]);
    assert!(pagemap.is_present(first.plus(1)).unwrap() && !pagemap.is_present(first).unwrap());
}

/// Scanning and reading find the same pages. The range has written pages, pages that were only read, holes of
/// all lengths, and the ends.
#[test]
fn many_pages_are_scanned_and_few_are_read_with_the_same_result() {
    const PAGES: usize = 40_000;
    let base = crate::memory::reserve(PAGES * PAGE_BYTES).unwrap();
    let mut touched = vec![false; PAGES];
    let mut at = 0;
    for step in (0..3_000).map(|n| if n % 300 == 0 { 1_500 } else { 1 + n * n % 7 }) {
        if at >= PAGES {
            break;
        }
        let page = base.wrapping_add(at * PAGE_BYTES);
        if at % 3 == 0 {
            // SAFETY: the address is within the mapping just made.
            unsafe { page.read_volatile() };
        } else {
            // SAFETY: the address is within the mapping just made.
            unsafe { page.write(1) };
        }
        touched[at] = true;
        at += step;
    }
    let first = PageIndex::of_address(base as usize);
    let pagemap = Pagemap::open().unwrap();
    for range in [0..PAGES, 1..PAGES - 1, 7..600, 3_000..3_000 + READ_PAGES, 20_000..31_111] {
        let wanted: Vec<_> =
            range.clone().filter(|at| touched[*at]).map(|at| first.plus(at as u64)).collect();
        let range = PageRange::of(first.plus(range.start as u64), range.len() as u64);
        let (mut found, mut read) = (Vec::new(), Vec::new());
        pagemap.for_each_present(range, |page| found.push(page)).unwrap();
        pagemap.read_present(range, |page| read.push(page)).unwrap();
        assert_eq!((&found, &read), (&wanted, &wanted));
    }
}

#[test]
fn pages_that_were_only_read_are_the_page_of_zeros() {
    let base = crate::memory::reserve(300 * PAGE_BYTES).unwrap();
    // Every second page is read, so that there are more runs than one scan reports.
    for page in (0..300).step_by(2) {
        // SAFETY: the address is within the mapping just made.
        unsafe { base.add(page * PAGE_BYTES).read_volatile() };
    }
    // SAFETY: the address is within the mapping just made.
    unsafe { base.add(4 * PAGE_BYTES).write(1) };
    let first = PageIndex::of_address(base as usize);
    let mut runs = Vec::new();
    let looked = Pagemap::open()
        .unwrap()
        .for_each_zero_run(PageRange::of(first, 300), |run| runs.push((run.start.0 - first.0, run.count())));
    if looked == Err(Errno::ENOTTY) {
        return eprintln!("SKIPPED: this kernel's pagemap can't be scanned (Linux 6.7)");
    }
    looked.unwrap();
    let wanted: Vec<_> = (0..300).step_by(2).filter(|page| *page != 4).map(|page| (page, 1)).collect();
    assert_eq!(runs, wanted);
}

/// A child of vfork asked for ever, because its maker had ended and nobody waited for the maker.
#[test]
fn process_that_nobody_has_waited_for_is_a_zombie() {
    let mut child = std::process::Command::new("true").spawn().unwrap();
    let process = child.id();
    while !is_zombie(process) {
        std::thread::yield_now();
    }
    child.wait().unwrap();
    assert!(!is_zombie(process) && !is_zombie(std::process::id()));
    let stat =
        |state, threads| format!("7 (a) b) {state} 1 7 7 0 -1 4194304 9 0 0 0 0 0 0 0 20 0 {threads} 0");
    assert!(is_ended_process(stat('Z', 1).as_bytes()));
    assert!(!is_ended_process(stat('Z', 2).as_bytes()), "the first thread has ended, another hasn't");
    assert!(!is_ended_process(stat('S', 1).as_bytes()));
}
