//! Area files: makes sure that a cluster has real blocks before its first slot is written.
//!
//! Without blocks a write to a hole can fail with ENOSPC half-way. With them a full disk is known before any
//! slot of the cluster is written, and the pages go back to where they waited. Nor is the disk filled to the
//! brim: `disk_reserve_bytes` stay free for the rest of the system.

use crate::IoError;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use farpage_core::units::{CLUSTER_SLOTS, PAGE_BYTES};
use rustix::fd::BorrowedFd;
use rustix::fs::{FallocateFlags, FileType, Stat, fallocate, fstat, fstatvfs, ftruncate};
use rustix::io::Errno;

/// Bytes in a cluster: 512 slots of 4 KiB are 2 MiB.
pub const CLUSTER_BYTES: u64 = CLUSTER_SLOTS as u64 * PAGE_BYTES as u64;
const _: () = assert!(CLUSTER_BYTES == 2 << 20);

/// Clusters by which the file may grow after one look at the file system, at most: 16 MiB. A look costs 1 to
/// 2 µs on local file systems and a round trip on network file systems.
const CLUSTERS_PER_LOOK: u32 = 8;

/// Bits in one word of the bitmap.
const BITS: u32 = u64::BITS;

/// A file or block device that holds an area.
pub struct AreaFile<'a> {
    fd: BorrowedFd<'a>,
    area_bytes: u64,
    disk_reserve_bytes: u64,
    /// A bit per cluster, set if the cluster is known to have blocks. A bit publishes nothing but itself,
    /// since the kernel looks after the blocks.
    ensured: &'a [AtomicU64],
    /// Clusters by which the file may still grow before the next look at the file system. A plain counter.
    allowance: AtomicU32,
}

impl<'a> AreaFile<'a> {
    /// Returns the number of words that the bitmap of an area needs.
    pub const fn bitmap_words(area_bytes: u64) -> usize {
        area_bytes.div_ceil(CLUSTER_BYTES).div_ceil(BITS as u64) as usize
    }

    /// Makes an area of `area_bytes` on `fd`. Clears `ensured`, which has at least [`AreaFile::bitmap_words`]
    /// words.
    ///
    /// All clusters of a block device are ensured from the start, and need no free space on the disk. The
    /// same holds for a file that already has all its blocks, as swap files made with `fallocate` or `dd` do.
    pub fn new(
        fd: BorrowedFd<'a>,
        area_bytes: u64,
        disk_reserve_bytes: u64,
        ensured: &'a [AtomicU64],
    ) -> Result<Self, IoError> {
        let file = AreaFile::punched(fd, area_bytes, disk_reserve_bytes, ensured);
        let stat = fstat(fd).map_err(IoError::from_errno)?;
        for cluster in 0..file.clusters() {
            if file.end_of(cluster) > backed_bytes(&stat) {
                break;
            }
            file.set_ensured(cluster);
        }
        Ok(file)
    }

    /// Makes an area whose empty clusters are punched, perhaps by several processes. Blocks that a cluster
    /// has now may be gone when this process takes the cluster. Therefore no cluster counts as ensured until
    /// this process has ensured it.
    pub fn punched(
        fd: BorrowedFd<'a>,
        area_bytes: u64,
        disk_reserve_bytes: u64,
        ensured: &'a [AtomicU64],
    ) -> Self {
        assert!(ensured.len() >= Self::bitmap_words(area_bytes));
        ensured.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        AreaFile { fd, area_bytes, disk_reserve_bytes, ensured, allowance: AtomicU32::new(0) }
    }

    /// Returns the number of clusters of the area. The last one may be shorter.
    pub fn clusters(&self) -> u32 {
        self.area_bytes.div_ceil(CLUSTER_BYTES) as u32
    }

    /// Ensures every cluster that has a byte before `end_bytes`.
    ///
    /// After an error the clusters that were ensured before it remain so.
    pub fn prepare(&self, end_bytes: u64) -> Result<(), IoError> {
        (0..end_bytes.div_ceil(CLUSTER_BYTES) as u32).try_for_each(|cluster| self.ensure_cluster(cluster))
    }

    /// Makes sure that this cluster has blocks. The call is cheap if the cluster was ensured before, and
    /// makes up to three system calls otherwise.
    ///
    /// Returns `NoSpace` if the blocks would use up the reserve, the file system has no more, or the cluster
    /// lies outside the area. Threads may call this at the same time, even for the same cluster. Racing
    /// threads may use up to 16 MiB of the reserve.
    pub fn ensure_cluster(&self, cluster: u32) -> Result<(), IoError> {
        if cluster >= self.clusters() {
            return Err(IoError::NoSpace);
        }
        if self.is_ensured(cluster) {
            return Ok(());
        }
        self.take_allowance().or_else(|error| if self.is_backed(cluster) { Ok(()) } else { Err(error) })?;
        let start = cluster as u64 * CLUSTER_BYTES;
        allocate(self.fd, start, self.end_of(cluster) - start).or_else(|errno| match errno {
            // Not every file system can promise blocks. Without promised blocks the file can only be made
            // long enough to be read. A write may still find no space, and then reports that.
            Errno::OPNOTSUPP | Errno::NOSYS => self.lengthen(),
            errno => Err(IoError::from_errno(errno)),
        })?;
        self.set_ensured(cluster);
        Ok(())
    }

    /// Gives the blocks of an empty cluster back to the disk, from `start_bytes` on, where the file system
    /// can. The cluster must be ensured again before it is written. The file keeps its length.
    ///
    /// No thread may read, write or ensure the cluster meanwhile. Each process knows only the clusters that
    /// it ensured itself. A process that punches clusters must therefore punch every one that it gives away.
    pub fn punch(&self, start_bytes: u64) -> Result<(), IoError> {
        let cluster = (start_bytes / CLUSTER_BYTES) as u32;
        let bit = 1 << (cluster % BITS);
        let was_ensured =
            self.ensured[(cluster / BITS) as usize].fetch_and(!bit, Ordering::Relaxed) & bit != 0;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let bytes = self.end_of(cluster) - start_bytes;
        let punched = retry_on_intr(|| fallocate(self.fd, flags, start_bytes, bytes));
        let is_refused = |errno| errno == Errno::OPNOTSUPP || errno == Errno::NOSYS;
        if was_ensured && punched.is_err_and(is_refused) {
            // The file system refused before it did anything.
            self.set_ensured(cluster);
        }
        punched.map_err(IoError::from_errno)
    }

    /// Returns whether this cluster is known to have blocks.
    pub fn is_ensured(&self, cluster: u32) -> bool {
        self.ensured[(cluster / BITS) as usize].load(Ordering::Relaxed) & (1 << (cluster % BITS)) != 0
    }

    /// Returns whether the file has blocks up to the cluster's end. Another process may have allocated them.
    fn is_backed(&self, cluster: u32) -> bool {
        fstat(self.fd).is_ok_and(|stat| backed_bytes(&stat) >= self.end_of(cluster))
    }

    fn set_ensured(&self, cluster: u32) {
        self.ensured[(cluster / BITS) as usize].fetch_or(1 << (cluster % BITS), Ordering::Relaxed);
    }

    fn end_of(&self, cluster: u32) -> u64 {
        ((cluster as u64 + 1) * CLUSTER_BYTES).min(self.area_bytes)
    }

    /// Takes the permission to grow by one cluster, and looks at the file system when none is left.
    fn take_allowance(&self) -> Result<(), IoError> {
        let one_less = |allowance: u32| allowance.checked_sub(1);
        if self.allowance.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok() {
            return Ok(());
        }
        let space = fstatvfs(self.fd).map_err(IoError::from_errno)?;
        let free_bytes = space.f_bavail.saturating_mul(space.f_frsize);
        let allowance = clusters_allowed(free_bytes, self.disk_reserve_bytes);
        // One of the clusters is for the caller. If another thread has looked as well, its answer is as good
        // as this one.
        self.allowance.store(one_less(allowance).ok_or(IoError::NoSpace)?, Ordering::Relaxed);
        Ok(())
    }

    /// Makes the file as long as the area, without blocks.
    ///
    /// The length is always the full one. In a race with a process that has come further, a shorter length
    /// could cut off data that is already there.
    fn lengthen(&self) -> Result<(), IoError> {
        let stat = fstat(self.fd).map_err(IoError::from_errno)?;
        if (stat.st_size as u64) < self.area_bytes {
            retry_on_intr(|| ftruncate(self.fd, self.area_bytes)).map_err(IoError::from_errno)?;
        }
        Ok(())
    }
}

/// Returns how far from its start the file has blocks, in bytes.
fn backed_bytes(stat: &Stat) -> u64 {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::BlockDevice => u64::MAX,
        // `st_blocks` counts in units of 512 bytes. Fewer blocks than bytes means that there are holes, at
        // unknown places. Enough blocks don't quite rule out holes, because the file system's own blocks for
        // the file count, too. A write to a hole may still return `NoSpace`, which is handled like any other.
        FileType::RegularFile if stat.st_blocks as u64 * 512 >= stat.st_size as u64 => stat.st_size as u64,
        _ => 0,
    }
}

/// Returns the clusters by which the file may grow before the next look, so that `reserve_bytes` stay free.
fn clusters_allowed(free_bytes: u64, reserve_bytes: u64) -> u32 {
    let clusters = free_bytes.saturating_sub(reserve_bytes) / CLUSTER_BYTES;
    clusters.min(CLUSTERS_PER_LOOK as u64) as u32
}

/// Allocates blocks for a range of the file, which grows to hold it. Data that is already there stays.
fn allocate(fd: BorrowedFd<'_>, start: u64, bytes: u64) -> Result<(), Errno> {
    retry_on_intr(|| fallocate(fd, FallocateFlags::empty(), start, bytes))
}

/// Tries again when a signal came first, because file systems let a signal end a long allocation. The tries
/// are bounded, because a storm of signals must not hold up an eviction for ever.
fn retry_on_intr(mut call: impl FnMut() -> Result<(), Errno>) -> Result<(), Errno> {
    let mut result = call();
    for _ in 0..1000 {
        if result != Err(Errno::INTR) {
            break;
        }
        result = call();
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fd::AsFd;
    use std::fs::File;

    fn bitmap(area_bytes: u64) -> Vec<AtomicU64> {
        (0..AreaFile::bitmap_words(area_bytes)).map(|_| AtomicU64::new(!0)).collect()
    }

    fn allocated_bytes(file: &File) -> u64 {
        fstat(file).unwrap().st_blocks as u64 * 512
    }

    #[test]
    fn ensured_cluster_has_blocks_and_the_others_dont() {
        let file = tempfile::tempfile().unwrap();
        let area_bytes = 8 * CLUSTER_BYTES;
        let ensured = bitmap(area_bytes);
        let area = AreaFile::new(file.as_fd(), area_bytes, 0, &ensured).unwrap();
        assert!(!area.is_ensured(2));
        area.ensure_cluster(2).unwrap();
        assert!(area.is_ensured(2) && !area.is_ensured(1));
        let allocated = allocated_bytes(&file);
        assert!((CLUSTER_BYTES..2 * CLUSTER_BYTES).contains(&allocated), "{allocated}");
        area.prepare(CLUSTER_BYTES + 1).unwrap();
        assert!(area.is_ensured(0) && area.is_ensured(1) && !area.is_ensured(3));
    }

    #[test]
    fn punched_cluster_gives_its_blocks_back_and_is_ensured_again() {
        let file = tempfile::tempfile().unwrap();
        let area_bytes = 4 * CLUSTER_BYTES;
        let ensured = bitmap(area_bytes);
        let area = AreaFile::new(file.as_fd(), area_bytes, 0, &ensured).unwrap();
        area.prepare(area_bytes).unwrap();
        let before = allocated_bytes(&file);
        // The first page of the first cluster belongs to the header.
        for start in [PAGE_BYTES as u64, 2 * CLUSTER_BYTES] {
            area.punch(start).unwrap();
        }
        assert!(!area.is_ensured(0) && area.is_ensured(1) && !area.is_ensured(2) && area.is_ensured(3));
        assert_eq!(before - allocated_bytes(&file), 2 * CLUSTER_BYTES - PAGE_BYTES as u64);
        assert_eq!(file.metadata().unwrap().len(), area_bytes);
        area.ensure_cluster(2).unwrap();
        assert!(allocated_bytes(&file) >= before - CLUSTER_BYTES);
    }

    /// A bug: two processes share a file that grows and is punched. The second process started when the whole
    /// file had blocks. Later it wrote to a hole, past the disk's reserve.
    #[test]
    fn cluster_that_another_process_punches_is_ensured_by_whoever_takes_it() {
        let file = tempfile::tempfile().unwrap();
        let area_bytes = 2 * CLUSTER_BYTES;
        let bitmaps = [bitmap(area_bytes), bitmap(area_bytes)];
        let first = AreaFile::punched(file.as_fd(), area_bytes, 0, &bitmaps[0]);
        first.prepare(area_bytes).unwrap();
        let second = AreaFile::punched(file.as_fd(), area_bytes, u64::MAX, &bitmaps[1]);
        first.punch(CLUSTER_BYTES).unwrap();
        assert_eq!(second.ensure_cluster(1), Err(IoError::NoSpace), "the reserve forbids it");
    }

    /// A bug: a program's children fill the area and end, and the disk has nothing left but its reserve.
    /// Their parent, which had started with an empty file, was told that the disk was full.
    #[test]
    fn cluster_that_another_process_has_filled_needs_no_space() {
        let file = tempfile::tempfile().unwrap();
        let area_bytes = 2 * CLUSTER_BYTES;
        let bitmaps = [bitmap(area_bytes), bitmap(area_bytes)];
        let parent = AreaFile::new(file.as_fd(), area_bytes, u64::MAX, &bitmaps[0]).unwrap();
        assert_eq!(parent.ensure_cluster(1), Err(IoError::NoSpace));
        let child = AreaFile::new(file.as_fd(), area_bytes, 0, &bitmaps[1]).unwrap();
        child.prepare(area_bytes).unwrap();
        assert_eq!(parent.ensure_cluster(1), Ok(()));
        assert!(parent.is_ensured(1) && !parent.is_ensured(0));
    }

    #[test]
    fn last_cluster_ends_with_the_area_and_what_lies_behind_is_no_space() {
        let file = tempfile::tempfile().unwrap();
        let area_bytes = CLUSTER_BYTES + 3 * PAGE_BYTES as u64;
        let ensured = bitmap(area_bytes);
        let area = AreaFile::new(file.as_fd(), area_bytes, 0, &ensured).unwrap();
        area.prepare(area_bytes).unwrap();
        assert_eq!(file.metadata().unwrap().len(), area_bytes);
        assert_eq!(area.ensure_cluster(2), Err(IoError::NoSpace));
    }

    #[test]
    fn reserve_that_the_disk_doesnt_have_is_no_space_but_needs_none_for_allocated_files() {
        let file = tempfile::tempfile().unwrap();
        let area_bytes = 2 * CLUSTER_BYTES;
        let ensured = bitmap(area_bytes);
        let area = AreaFile::new(file.as_fd(), area_bytes, u64::MAX, &ensured).unwrap();
        assert_eq!(area.ensure_cluster(0), Err(IoError::NoSpace));
        assert!(!area.is_ensured(0));

        allocate(file.as_fd(), 0, area_bytes).unwrap();
        let area = AreaFile::new(file.as_fd(), area_bytes, u64::MAX, &ensured).unwrap();
        assert_eq!(area.prepare(area_bytes), Ok(()));
    }

    #[test]
    fn sparse_file_counts_as_having_no_blocks() {
        let file = tempfile::tempfile().unwrap();
        let area_bytes = 2 * CLUSTER_BYTES;
        file.set_len(area_bytes).unwrap();
        let ensured = bitmap(area_bytes);
        let area = AreaFile::new(file.as_fd(), area_bytes, 0, &ensured).unwrap();
        assert!(!area.is_ensured(0) && !area.is_ensured(1));
    }

    #[test]
    fn allowance_keeps_the_reserve_and_is_at_most_16_mib() {
        assert_eq!(clusters_allowed(CLUSTER_BYTES - 1, 0), 0);
        assert_eq!(clusters_allowed(CLUSTER_BYTES, 0), 1);
        assert_eq!(clusters_allowed(10 * CLUSTER_BYTES, 9 * CLUSTER_BYTES + 1), 0);
        assert_eq!(clusters_allowed(10 * CLUSTER_BYTES, u64::MAX), 0);
        assert_eq!(clusters_allowed(u64::MAX, 0), 8);
    }

    #[test]
    fn lengthening_never_cuts_off_what_is_there() {
        let file = tempfile::tempfile().unwrap();
        let ensured = bitmap(CLUSTER_BYTES);
        let area = AreaFile::new(file.as_fd(), CLUSTER_BYTES, 0, &ensured).unwrap();
        area.lengthen().unwrap();
        assert_eq!(file.metadata().unwrap().len(), CLUSTER_BYTES);
        file.set_len(5 * CLUSTER_BYTES).unwrap();
        area.lengthen().unwrap();
        assert_eq!(file.metadata().unwrap().len(), 5 * CLUSTER_BYTES);
    }

    #[test]
    fn file_that_isnt_writable_is_a_device_error() {
        let path = tempfile::NamedTempFile::new().unwrap();
        let file = File::open(path.path()).unwrap();
        let ensured = bitmap(CLUSTER_BYTES);
        let area = AreaFile::new(file.as_fd(), CLUSTER_BYTES, 0, &ensured).unwrap();
        assert!(area.ensure_cluster(0).unwrap_err().is_device_lost());
    }
}
