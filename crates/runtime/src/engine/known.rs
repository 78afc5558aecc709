//! The mappings that a process has when its engine starts: the first list of ranges that can be managed.
//!
//! A fork's child has its parent's list. Other processes read /proc once. What is mapped later comes by
//! hooks, or by stopped calls. So nothing may be in the list that goes away by a call which neither of them
//! sees.

use crate::engine::Engine;
use crate::engine::stacks::Stacks;
use crate::engine::start::Start;
use crate::mappings::changes;
use farpage_core::memory::Region;
use farpage_core::table::ranges::{Flags, Range, Ranges};
use farpage_core::units::{PageIndex, PageRange};
use farpage_os::proc::{Mapping, MappingName};
use farpage_os::sys::Errno;
use farpage_os::{image, memory, peek, proc};

/// Ranges that one process can have, for each mapping that the kernel allows. A range may be a part of a
/// mapping.
const RANGES_A_MAPPING: u64 = 2;
/// Ranges that one process can have, at most. Their list takes 8 MiB of address space. The kernel may allow a
/// million mappings, and a limit of memory may count what is never written.
const RANGES_MAX: u64 = 1 << 18;

/// Makes memory for a list of ranges. Children get it too, because they start from the parent's list. Memory
/// that the list doesn't use is never written.
fn range_list() -> Result<&'static mut [Range], Errno> {
    let ranges = RANGES_A_MAPPING.saturating_mul(proc::mappings_max()).min(RANGES_MAX) as usize;
    let bytes = Region::bytes_for::<Range>(ranges);
    let base = memory::reserve(bytes)?;
    memory::keep_from_core_files(base, bytes);
    // SAFETY: the mapping was just made. It is readable, writable, all zero, and this region's alone for
    // good.
    Ok(unsafe { Region::new(base, bytes) }.carve::<Range>(ranges))
}

/// Returns the mappings that the program has already: those of its parent at the fork, otherwise those in
/// /proc.
pub fn ranges(request: &Start) -> Result<Ranges<'static>, Errno> {
    let mut ranges = Ranges::new(range_list()?);
    match request.parent {
        Some(parent) => add_those_of(parent, &mut ranges),
        None => add_those_there_are(request, &mut ranges)?,
    }
    Ok(ranges)
}

/// Adds the ranges of a fork's parent.
fn add_those_of(parent: &Engine, ranges: &mut Ranges<'_>) {
    let mut from = PageIndex(0);
    while let Some(range) = { parent.pager.ranges.lock().at_or_after(from) } {
        from = range.pages.end;
        if !range.flags.has(Flags::DONT_FORK) {
            // A child inherits neither locks nor registrations.
            let flags =
                range.flags.without(Flags::REGISTERED).without(Flags::LOCKED).without(Flags::ON_TOUCH);
            let _ = ranges.insert(range.pages, flags);
        }
    }
}

/// Adds the mappings in /proc.
fn add_those_there_are(request: &Start, ranges: &mut Ranges<'_>) -> Result<(), Errno> {
    const NONE: PageRange = PageRange::of(PageIndex(0), 0);
    let stacks = Stacks::find();
    // Otherwise a library's variables can't be told from memory that the program has asked for.
    let all_known = stacks.all_known && peek::read::<8>(&raw const *request as usize).is_some();
    let (mut library, mut guard) = (NONE, NONE);
    let mut add = |mapping: Mapping| {
        // libc keeps the stack of a thread that has ended, for a thread that comes.
        let is_kept_stack = !request.is_late && mapping.pages.start == guard.end && !guard.is_empty();
        guard = if mapping.is_closed && mapping.is_anonymous { mapping.pages } else { NONE };
        if mapping.begins_file {
            let executable = PageIndex::of_address(request.executable);
            let span = image::span_of_file(mapping.pages.start.address());
            library = span.filter(|span| !span.contains(executable)).unwrap_or(NONE);
        }
        let named = match mapping.name {
            MappingName::Heap => true,
            MappingName::None => all_known,
            MappingName::Given => all_known && request.is_late,
            MappingName::Stack | MappingName::Other => false,
        };
        let block = PageIndex::of_address(request.thread_block);
        // The kernel may have joined the control block's mapping with memory of the program since the library
        // was loaded.
        let is_known = request.left_alone.block.is_some_and(|pages| pages.contains(block));
        let holds_thread = mapping.pages.contains(block) && !is_known
            || stacks.known().any(|pointer| mapping.pages.contains(PageIndex::of_address(pointer)));
        let has_place = mapping.pages.end <= changes::EVERYTHING.end;
        // A library's reservation from before the preload library was loaded is left alone. The program will
        // use what it has reserved itself.
        let flags = match mapping {
            Mapping { is_private_data: true, .. } => Some(Flags::NONE),
            Mapping { is_private: true, .. } if request.is_late => Some(changes::flags_of(&mapping)),
            _ => None,
        };
        let is_managed = mapping.is_anonymous && named && has_place && !holds_thread && !is_kept_stack;
        if let Some(flags) = flags.filter(|_| is_managed) {
            let _ = ranges.insert(mapping.pages, flags);
            // The loader unmaps a library by calls of its own, which no hook sees. Other memory may be there
            // afterwards.
            let _ = ranges.remove(library.intersection(mapping.pages));
        }
    };
    // Calls past libc, which no hook saw, may have asked for special treatment of a mapping (such as mlock).
    let read = if request.is_late {
        proc::for_each_plain_mapping(&mut add)
    } else {
        proc::for_each_mapping(&mut add)
    };
    read?;
    memory::for_each_early_reservation(|range| {
        let _ = ranges.remove(range);
    });
    for range in [request.left_alone.block, request.left_alone.stack].into_iter().flatten() {
        let _ = ranges.remove(range);
    }
    // The variables of the engine and of libc stay out. The kernel may have joined them with what follows to
    // one mapping.
    image::for_each_segment(|range| {
        let _ = ranges.remove(range);
    });
    Ok(())
}
