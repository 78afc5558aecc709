//! Finds the memory that the kernel will look at or change in a system call, from the call's arguments.
//!
//! Some of the memory is only named in other memory (an `iovec`, a `msghdr`, a list of texts), which may
//! itself be out. Therefore [`each`] reports every piece before it looks into the piece, and looks only
//! through [`Memory`].

use super::calls::{How, Pointer, What, pointers};
use farpage_core::units::PAGE_BYTES;
use linux_raw_sys::general as raw;

/// A piece of memory that a call is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Address of the first byte.
    pub address: usize,
    /// Length in bytes, at most.
    pub bytes: usize,
    /// Use that the kernel makes of the piece.
    pub how: How,
}

/// The program's memory, when a call is about to be made.
pub trait Memory {
    /// Reports a piece of memory that the kernel will look at or change.
    fn buffer(&mut self, buffer: Buffer);

    /// Returns the 8 bytes at `address`, or `None` if they can't be read. The kernel can't read them then,
    /// either. The bytes must lie in pages of buffers that were reported before.
    fn word(&mut self, address: usize) -> Option<u64>;

    /// Returns whether a call that names this process or thread means the memory at hand.
    fn is_own_process(&self, number: u32) -> bool;
}

/// Address where a program's memory ends.
pub const END: usize = 0x7fff_ffff_f000;
/// Address below which there is no memory.
const BEGINNING: usize = PAGE_BYTES;
/// `iovec`s and `mmsghdr`s that the kernel takes in one call, at most.
const VECTORS_MAX: usize = 1024;
/// `mmsghdr`s of one call that are looked at, at most. recvmmsg has no limit.
const MESSAGES_MAX: usize = 1 << 16;
/// Bytes of a `sockaddr_storage`. No address of a socket is longer.
pub const SOCKET_ADDRESS_BYTES: usize = 128;
/// Bytes of a `msghdr`.
pub const MSGHDR: usize = 56;
const MMSGHDR: usize = 64;
/// `futex_waitv`s that the kernel takes in one call, at most.
const WAIT_WORDS_MAX: usize = 128;
/// `iocb`s of one call that are looked at, at most.
const CONTROL_BLOCKS_MAX: usize = 1 << 16;
/// Texts in one list that are looked at, at most.
const TEXTS_MAX: usize = 1 << 20;
/// Bytes of the longest text that the kernel takes: an argument of execve.
const TEXT_BYTES_MAX: usize = 32 * PAGE_BYTES;
/// Bytes that the kernel moves in one call, at most (MAX_RW_COUNT).
const BYTES_MAX: usize = 0x7fff_f000;
/// Bytes assumed at an address of which only the address is known. Most structures are smaller.
const UNKNOWN_BYTES: usize = 2 * PAGE_BYTES;
/// NUMA nodes in a set, at most. The kernel refuses a larger set.
const NODES_MAX: usize = 8 * PAGE_BYTES + 1;
/// Bytes of one instruction of a filter.
const INSTRUCTION_BYTES: usize = 8;
const SOL_SOCKET: usize = 1;

/// Reports to `memory` what the kernel looks at or changes in this call.
///
/// The stack that the thread is on isn't reported, because no argument names it. Signals are delivered there,
/// and `rt_sigreturn` reads from it. Memory that is named in the argument of most ioctls or of bpf
/// isn't reported either. Nor is memory that is named in the queue of an io_uring. Only the maker of a device
/// or of a filter knows what lies there.
pub fn each(call: usize, arguments: &[usize; 6], memory: &mut impl Memory) {
    let mut walk = Walk { arguments, memory };
    match (pointers(call), call as u32) {
        (Some(list), _) => list.iter().for_each(|pointer| walk.pointer(pointer)),
        (None, raw::__NR_ioctl) => walk.ioctl(),
        (None, raw::__NR_fcntl) => walk.fcntl(),
        (None, raw::__NR_futex) => walk.futex(),
        (None, raw::__NR_clone) => walk.clone(),
        (None, raw::__NR_prctl) => walk.prctl(),
        (None, raw::__NR_seccomp) => walk.seccomp(),
        (None, raw::__NR_setsockopt) => walk.setsockopt(),
        (None, raw::__NR_getsockopt) => walk.getsockopt(),
        (None, raw::__NR_keyctl) => walk.keyctl(),
        (None, raw::__NR_mq_notify) => walk.mq_notify(),
        (None, raw::__NR_get_mempolicy) => walk.get_mempolicy(),
        (None, raw::__NR_ptrace) => walk.ptrace(),
        (None, raw::__NR_semctl) => walk.buffer(arguments[3], 1 << 16, How::Both),
        (None, raw::__NR_process_vm_readv) => walk.process_vm(How::Out, How::In),
        (None, raw::__NR_process_vm_writev) => walk.process_vm(How::In, How::Out),
        (None, _) => walk.unknown(),
    }
}

struct Walk<'a, M> {
    arguments: &'a [usize; 6],
    memory: &'a mut M,
}

impl<M: Memory> Walk<'_, M> {
    fn buffer(&mut self, address: usize, bytes: usize, how: How) {
        // The kernel refuses memory beyond the end: it refuses the whole call, or stops when it gets there.
        let goes_beyond = bytes > END.saturating_sub(address);
        let bytes =
            bytes.min(if goes_beyond { UNKNOWN_BYTES } else { BYTES_MAX }).min(END.saturating_sub(address));
        if bytes > 0 && address >= BEGINNING {
            self.memory.buffer(Buffer { address, bytes, how });
        }
    }

    /// Returns the word at `address`, or 0 if it can't be read.
    fn word(&mut self, address: usize) -> usize {
        if (BEGINNING..=END - 8).contains(&address) {
            self.memory.word(address).unwrap_or(0) as usize
        } else {
            0
        }
    }

    fn argument(&self, number: u8) -> usize {
        self.arguments[number as usize]
    }

    /// Returns the 4 bytes at `address`, or 0 if they can't be read.
    fn half(&mut self, address: usize) -> usize {
        let offset = address % 8;
        let (first, second) = (
            self.word(address - offset),
            if offset > 4 { self.word((address - offset).saturating_add(8)) } else { 0 },
        );
        let both = (second as u128) << 64 | first as u128;
        (both >> (offset * 8)) as u32 as usize
    }

    /// Reports a list of `count` elements of `each` bytes, which the kernel reads. Returns `count`, or 0 if
    /// no list of that size can be there.
    fn list(&mut self, address: usize, count: usize, each: usize) -> usize {
        self.buffer(address, count * each, How::In);
        if (BEGINNING..END).contains(&address) && count * each <= END - address { count } else { 0 }
    }

    /// Returns an argument that the kernel takes as an `int`, or 0 for a negative one, which the kernel
    /// refuses.
    fn count(&self, number: u8) -> usize {
        usize::try_from(self.argument(number) as i32).unwrap_or(0)
    }

    fn pointer(&mut self, pointer: &Pointer) {
        let (address, how) = (self.argument(pointer.argument), pointer.how);
        match pointer.what {
            What::Bytes(bytes) => self.buffer(address, bytes.into(), how),
            What::Sized(by) => self.buffer(address, self.argument(by), how),
            What::Sized32(by) => self.buffer(address, self.count(by), how),
            What::Behind8(by) => self.buffer(address, self.argument(by).saturating_add(8), how),
            What::Array(by, each) => self.buffer(address, self.count(by) * usize::from(each), how),
            What::Bits(by) => self.buffer(address, self.count(by).min(NODES_MAX).div_ceil(64) * 8, how),
            What::DescriptorBits(by) => self.buffer(address, self.count(by).div_ceil(64) * 8, how),
            What::PerPage(by) => self.buffer(address, self.argument(by).div_ceil(PAGE_BYTES), how),
            What::SizedBy(by) => {
                let bytes = self.half(self.argument(by));
                self.buffer(address, bytes, how);
            }
            What::SocketAddress(by) => {
                let bytes = self.half(self.argument(by)).min(SOCKET_ADDRESS_BYTES);
                self.buffer(address, bytes, how);
            }
            What::Text => self.text(address),
            What::Texts => self.texts(address),
            What::Vectors(by) => self.vectors(address, self.argument(by), how),
            What::Message => self.message(address, MSGHDR, how),
            What::Messages(by) => {
                for at in 0..self.count(by).min(MESSAGES_MAX) {
                    self.message(address.saturating_add(at * MMSGHDR), MMSGHDR, how);
                }
            }
            What::SizedAddress => {
                self.buffer(address, 16, How::In);
                let (start, bytes) = (self.word(address), self.word(address.saturating_add(8)));
                self.buffer(start, bytes, how);
            }
            What::Attribute => {
                self.buffer(address, 16, How::In);
                let (start, bytes) = (self.word(address), self.half(address.saturating_add(8)));
                self.buffer(start, bytes, how);
            }
            What::CloneArguments(by) => self.clone_arguments(address, self.argument(by)),
            What::WaitWords(by) => self.wait_words(address, self.count(by)),
            What::WaitWordPair => self.wait_words(address, 2),
            What::ControlBlocks(by) => self.control_blocks(address, self.argument(by)),
        }
    }

    /// Reports a text, a page at a time, until its end is found.
    fn text(&mut self, start: usize) {
        let mut at = start;
        while (BEGINNING..END).contains(&at) && at - start < TEXT_BYTES_MAX {
            let end = (at / PAGE_BYTES + 1) * PAGE_BYTES;
            self.buffer(at, end - at, How::In);
            if self.ends_within(at, end) {
                return;
            }
            at = end;
        }
    }

    /// Returns whether there is a byte of 0 in these bytes of one page, or the bytes can't be read.
    fn ends_within(&mut self, start: usize, end: usize) -> bool {
        let mut at = start & !7;
        while at < end {
            let Some(word) = self.memory.word(at) else { return true };
            // Bytes before the start don't count.
            let before = if at < start { (1_u64 << ((start - at) * 8)) - 1 } else { 0 };
            if (word | before).to_ne_bytes().contains(&0) {
                return true;
            }
            at += 8;
        }
        false
    }

    fn texts(&mut self, list: usize) {
        for at in 0..TEXTS_MAX {
            let place = list.saturating_add(at * 8);
            self.buffer(place, 8, How::In);
            match self.word(place) {
                0 => return,
                text => self.text(text),
            }
        }
    }

    fn vectors(&mut self, list: usize, count: usize, how: How) {
        // The kernel refuses a longer list before it looks at the list.
        let count = if count > VECTORS_MAX { 0 } else { count };
        for at in 0..self.list(list, count, 16) {
            let (start, bytes) = (self.word(list + at * 16), self.word(list + at * 16 + 8));
            self.buffer(start, bytes, how);
        }
    }

    /// Reports a `msghdr` and what it names. `bytes` may include a length behind the `msghdr`. The kernel
    /// writes lengths and flags back.
    fn message(&mut self, address: usize, bytes: usize, how: How) {
        self.buffer(address, bytes, How::Both);
        let word = |walk: &mut Self, offset| walk.word(address.saturating_add(offset));
        let (name, name_bytes) = (word(self, 0), self.half(address.saturating_add(8)));
        let (list, count) = (word(self, 16), word(self, 24));
        let (control, control_bytes) = (word(self, 32), word(self, 40));
        self.buffer(name, name_bytes.min(SOCKET_ADDRESS_BYTES), how);
        self.buffer(control, control_bytes, how);
        self.vectors(list, count, how);
    }

    fn clone_arguments(&mut self, address: usize, bytes: usize) {
        self.buffer(address, bytes, How::Both);
        let field = |walk: &mut Self, at: usize| {
            if (at + 1) * 8 <= bytes { walk.word(address.saturating_add(at * 8)) } else { 0 }
        };
        let flags = field(self, 0) as u32;
        let (pidfd, child_id, parent_id) = (field(self, 1), field(self, 2), field(self, 3));
        self.thread_ids(flags, pidfd, parent_id, child_id);
        let (ids, count) = (field(self, 8), field(self, 9));
        self.buffer(ids, count.min(VECTORS_MAX) * 4, How::In);
    }

    /// Reports the memory of `clone`, which puts the descriptor where the parent's id would go.
    fn clone(&mut self) {
        let [flags, _, parent_id, child_id, ..] = *self.arguments;
        let flags = flags as u32;
        self.thread_ids(flags, parent_id, parent_id, child_id);
    }

    /// Reports the memory of `process_vm_readv` and `process_vm_writev`. Memory that is named in another
    /// process is that process's to bring in.
    fn process_vm(&mut self, here: How, there: How) {
        let [process, list, count, their_list, their_count, _] = *self.arguments;
        self.vectors(list, count, here);
        if self.memory.is_own_process(process as u32) {
            self.vectors(their_list, their_count, there);
        } else {
            self.list(their_list, their_count.min(VECTORS_MAX), 16);
        }
    }

    /// Reports where the kernel writes the ids of a new thread. The thread's own word is also written when
    /// the thread ends, and threads that join it wait for that.
    fn thread_ids(&mut self, flags: u32, pidfd: usize, parent_id: usize, child_id: usize) {
        if flags & raw::CLONE_PIDFD != 0 {
            self.buffer(pidfd, 4, How::Out);
        }
        if flags & raw::CLONE_PARENT_SETTID != 0 {
            self.buffer(parent_id, 4, How::Out);
        }
        if flags & (raw::CLONE_CHILD_SETTID | raw::CLONE_CHILD_CLEARTID) != 0 {
            self.buffer(child_id, 4, How::Stays);
        }
    }

    fn wait_words(&mut self, list: usize, count: usize) {
        let count = if count > WAIT_WORDS_MAX { 0 } else { count };
        for at in 0..self.list(list, count, 24) {
            let place = self.word(list + at * 24 + 8);
            // The kernel refuses a word that the program couldn't write.
            self.buffer(place, 4, How::Both);
        }
    }

    /// Reports what `iocb`s name. The kernel uses that memory until the call's completion is collected, which
    /// may be never.
    fn control_blocks(&mut self, list: usize, count: usize) {
        for at in 0..self.list(list, count.min(CONTROL_BLOCKS_MAX), 8) {
            let block = self.word(list + at * 8);
            self.buffer(block, 64, How::Both);
            let word = |walk: &mut Self, offset| walk.word(block.saturating_add(offset));
            let (what, start, bytes) = (word(self, 16) as u16, word(self, 24), word(self, 32));
            match what {
                0 | 1 => self.buffer(start, bytes, How::Stays),
                7 | 8 => self.vectors(start, bytes, How::Stays),
                _ => {}
            }
        }
    }

    /// Reports the argument of an ioctl. A request says how long its argument is. The oldest requests say
    /// nothing, and some arguments have a list behind them.
    fn ioctl(&mut self) {
        const FIEMAP: u32 = 0xc020_660b;
        const FS_IOC_GETFSMAP: u32 = 0xc0c0_583b;
        const BLKREPORTZONE: u32 = 0xc010_1282;
        const BTRFS_IOC_TREE_SEARCH_V2: u32 = 0xc070_9411;
        const SIOCGIFCONF: u32 = 0x8912;
        const SIOCETHTOOL: u32 = 0x8946;
        const PAGEMAP_SCAN: u32 = 0xc060_6610;
        const PROCMAP_QUERY: u32 = 0xc068_6611;
        let [_, request, argument, ..] = *self.arguments;
        self.buffer(argument, (request >> 16 & 0x3fff).max(UNKNOWN_BYTES), How::Both);
        if request as u32 == SIOCGIFCONF {
            let (bytes, start) = (self.half(argument), self.word(argument.saturating_add(8)));
            self.buffer(start, bytes, How::Both);
        }
        if request as u32 == SIOCETHTOOL {
            let start = self.word(argument.saturating_add(16));
            self.buffer(start, UNKNOWN_BYTES, How::Both);
        }
        if request as u32 == PAGEMAP_SCAN {
            let [start, regions] = [40, 48].map(|at| self.word(argument.saturating_add(at)));
            self.buffer(start, regions.saturating_mul(24), How::Out);
        }
        if request as u32 == PROCMAP_QUERY {
            for (place, length) in [(88, 80), (96, 84)] {
                let bytes = self.half(argument.saturating_add(length));
                let start = self.word(argument.saturating_add(place));
                self.buffer(start, bytes, How::Out);
            }
        }
        // Structures with bytes or elements behind them, and a word in the structure says how many.
        let (count, bytes, each) = match request as u32 {
            FIEMAP => (self.half(argument.saturating_add(24)), 32, 56),
            FS_IOC_GETFSMAP => (self.half(argument.saturating_add(8)), 192, 64),
            BLKREPORTZONE => (self.half(argument.saturating_add(8)), 16, 64),
            BTRFS_IOC_TREE_SEARCH_V2 => (self.word(argument.saturating_add(104)).min(BYTES_MAX), 112, 1),
            _ => return,
        };
        self.buffer(argument, bytes + count * each, How::Both);
    }

    /// Reports the memory of ptrace. Registers come and go by way of a vector.
    fn ptrace(&mut self) {
        const PTRACE_GETREGSET: usize = 0x4204;
        const PTRACE_SETREGSET: usize = 0x4205;
        const PTRACE_SECCOMP_GET_FILTER: usize = 0x420c;
        const INSTRUCTIONS_MAX: usize = 4096;
        self.unknown();
        let [request, _, _, data, ..] = *self.arguments;
        if request == PTRACE_SECCOMP_GET_FILTER {
            self.buffer(data, INSTRUCTIONS_MAX * INSTRUCTION_BYTES, How::Out);
        }
        if matches!(request, PTRACE_GETREGSET | PTRACE_SETREGSET) {
            self.buffer(data, 16, How::Both);
            let (start, bytes) = (self.word(data), self.word(data.saturating_add(8)));
            self.buffer(start, bytes, How::Both);
        }
    }

    /// Reports a `sock_fprog`, and as many instructions as its first half-word says.
    fn filter(&mut self, address: usize) {
        self.buffer(address, 16, How::In);
        let (count, start) = (self.half(address) & 0xffff, self.word(address.saturating_add(8)));
        self.buffer(start, count * INSTRUCTION_BYTES, How::In);
    }

    fn seccomp(&mut self) {
        const SECCOMP_SET_MODE_FILTER: u32 = 1;
        const SECCOMP_GET_ACTION_AVAIL: u32 = 2;
        const SECCOMP_GET_NOTIF_SIZES: u32 = 3;
        let address = self.arguments[2];
        match self.arguments[0] as u32 {
            SECCOMP_SET_MODE_FILTER => self.filter(address),
            SECCOMP_GET_ACTION_AVAIL => self.buffer(address, 4, How::In),
            SECCOMP_GET_NOTIF_SIZES => self.buffer(address, 6, How::Out),
            // SECCOMP_SET_MODE_STRICT has no argument.
            _ => {}
        }
    }

    fn prctl(&mut self) {
        const PR_SET_SECCOMP: usize = 22;
        const PR_SET_VMA: usize = 0x5356_4d41;
        match self.arguments[0] {
            // PR_SET_VMA gives memory a name, and the kernel reads only that name.
            PR_SET_VMA => self.text(self.arguments[4]),
            PR_SET_SECCOMP => self.filter(self.arguments[2]),
            _ => self.unknown(),
        }
    }

    fn setsockopt(&mut self) {
        const SOL_PACKET: usize = 263;
        const PACKET_FANOUT_DATA: usize = 22;
        const SOL_XDP: usize = 283;
        const XDP_UMEM_REG: usize = 4;
        const SO_ATTACH_FILTER: usize = 26;
        const SO_ATTACH_REUSEPORT_CBPF: usize = 51;
        let [_, level, option, value, bytes, _] = *self.arguments;
        self.buffer(value, self.count(4), How::In);
        if level == SOL_SOCKET
            && matches!(option, SO_ATTACH_FILTER | SO_ATTACH_REUSEPORT_CBPF)
            && bytes as u32 >= 16
        {
            self.filter(value);
        }
        match (level, option) {
            (SOL_PACKET, PACKET_FANOUT_DATA) if bytes as u32 == 16 => self.filter(value),
            // The kernel pins this memory.
            (SOL_XDP, XDP_UMEM_REG) => {
                let (start, length) = (self.word(value), self.word(value.saturating_add(8)));
                self.buffer(start, length, How::Stays);
            }
            _ => {}
        }
    }

    fn getsockopt(&mut self) {
        const SO_GET_FILTER: usize = 26;
        const IPPROTO_TCP: usize = 6;
        const TCP_ZEROCOPY_RECEIVE: usize = 35;
        let [_, level, option, value, length, _] = *self.arguments;
        self.buffer(length, 4, How::Both);
        let count = usize::try_from(self.half(length) as i32).unwrap_or(0);
        // The length of a filter counts instructions.
        let is_filter = level == SOL_SOCKET && option == SO_GET_FILTER;
        self.buffer(value, if is_filter { count * INSTRUCTION_BYTES } else { count }, How::Both);
        if level == IPPROTO_TCP && option == TCP_ZEROCOPY_RECEIVE {
            let (start, bytes) = (self.word(value.saturating_add(24)), self.half(value.saturating_add(32)));
            self.buffer(start, bytes, How::Out);
        }
    }

    /// Reports the notice of a message queue. With SIGEV_THREAD the kernel keeps a copy of a cookie.
    fn mq_notify(&mut self) {
        const SIGEV_THREAD: usize = 2;
        const COOKIE_BYTES: usize = 32;
        let event = self.arguments[1];
        self.buffer(event, 64, How::In);
        if self.half(event.saturating_add(12)) == SIGEV_THREAD {
            let cookie = self.word(event);
            self.buffer(cookie, COOKIE_BYTES, How::In);
        }
    }

    fn keyctl(&mut self) {
        const KEYCTL_UPDATE: u32 = 2;
        const KEYCTL_READ: u32 = 11;
        const KEYCTL_INSTANTIATE: u32 = 12;
        const KEYCTL_INSTANTIATE_IOV: u32 = 20;
        const KEYCTL_DH_COMPUTE: u32 = 23;
        const KEYCTL_PKEY_ENCRYPT: u32 = 25;
        const KEYCTL_PKEY_VERIFY: u32 = 28;
        self.unknown();
        let [operation, parameters, second, third, fourth, _] = *self.arguments;
        match operation as u32 {
            KEYCTL_UPDATE | KEYCTL_INSTANTIATE => self.buffer(second, third, How::In),
            KEYCTL_READ | KEYCTL_DH_COMPUTE => self.buffer(second, third, How::Out),
            KEYCTL_INSTANTIATE_IOV => self.vectors(second, third, How::In),
            KEYCTL_PKEY_ENCRYPT..=KEYCTL_PKEY_VERIFY => {
                let length = |walk: &mut Self, offset| walk.half(parameters.saturating_add(offset));
                let (first_bytes, second_bytes) = (length(self, 4), length(self, 8));
                self.buffer(third, first_bytes, How::In);
                self.buffer(fourth, second_bytes, How::Both);
            }
            _ => {}
        }
    }

    fn get_mempolicy(&mut self) {
        // Flags that ask for the node of a page. The kernel touches the page for that.
        const NODE_OF_ADDRESS: usize = 3;
        let [mode, mask, nodes, address, flags, _] = *self.arguments;
        self.buffer(mode, 4, How::Out);
        self.buffer(mask, nodes.div_ceil(64).saturating_mul(8), How::Out);
        if flags & NODE_OF_ADDRESS == NODE_OF_ADDRESS {
            self.buffer(address, 1, How::In);
        }
    }

    /// Reports all arguments, for a call that is newer than this table or does too many different things.
    fn unknown(&mut self) {
        for argument in *self.arguments {
            self.buffer(argument, UNKNOWN_BYTES, How::Both);
        }
    }

    fn fcntl(&mut self) {
        let bytes = match self.arguments[1] as u32 {
            raw::F_GETLK | raw::F_SETLK | raw::F_SETLKW => 32,
            raw::F_OFD_GETLK | raw::F_OFD_SETLK | raw::F_OFD_SETLKW => 32,
            raw::F_SETOWN_EX | raw::F_GETOWN_EX => 8,
            raw::F_GETOWNER_UIDS => 8,
            raw::F_GET_RW_HINT | raw::F_SET_RW_HINT | raw::F_GET_FILE_RW_HINT | raw::F_SET_FILE_RW_HINT => 8,
            _ => 0,
        };
        self.buffer(self.arguments[2], bytes, How::Both);
    }

    fn futex(&mut self) {
        let command = self.arguments[1] as u32 & raw::FUTEX_CMD_MASK as u32;
        self.buffer(self.arguments[0], 4, How::Both);
        match command {
            raw::FUTEX_WAIT | raw::FUTEX_WAIT_BITSET | raw::FUTEX_LOCK_PI | raw::FUTEX_LOCK_PI2 => {
                self.buffer(self.arguments[3], 16, How::In);
            }
            raw::FUTEX_WAIT_REQUEUE_PI => {
                self.buffer(self.arguments[3], 16, How::In);
                self.buffer(self.arguments[4], 4, How::Both);
            }
            raw::FUTEX_REQUEUE | raw::FUTEX_CMP_REQUEUE | raw::FUTEX_CMP_REQUEUE_PI | raw::FUTEX_WAKE_OP => {
                self.buffer(self.arguments[4], 4, How::Both)
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// Memory of which only some words can be read.
    #[derive(Default)]
    struct Fake {
        words: BTreeMap<usize, u64>,
        told: Vec<(usize, usize, How)>,
    }

    impl Memory for Fake {
        fn buffer(&mut self, buffer: Buffer) {
            self.told.push((buffer.address, buffer.bytes, buffer.how));
        }
        fn word(&mut self, address: usize) -> Option<u64> {
            let is_there = |address: usize| {
                let pages =
                    |start: usize, bytes: usize| start / PAGE_BYTES..(start + bytes).div_ceil(PAGE_BYTES);
                self.told
                    .iter()
                    .any(|(start, bytes, _)| pages(*start, *bytes).contains(&(address / PAGE_BYTES)))
            };
            let all = is_there(address) && is_there(address + 7);
            assert!(all, "{address:#x} is looked at before anybody could bring it");
            self.words.get(&address).copied()
        }
        fn is_own_process(&self, number: u32) -> bool {
            number as usize == OWN
        }
    }

    fn told(call: u32, arguments: [usize; 6], words: &[(usize, u64)]) -> Vec<(usize, usize, How)> {
        let mut memory = Fake { words: words.iter().copied().collect(), told: Vec::new() };
        each(call as usize, &arguments, &mut memory);
        memory.told
    }

    const OWN: usize = 7;
    const A: usize = 0x10_0000;
    const B: usize = 0x20_0000;
    const C: usize = 0x30_0000;

    /// A bug: a set of nodes that the kernel refuses for its size was brought in, 256 MiB of it.
    #[test]
    fn sets_of_nodes_are_no_larger_than_the_kernel_takes() {
        let bytes = |count: usize| {
            let told = told(raw::__NR_set_mempolicy, [0, A, count, 0, 0, 0], &[]);
            told.first().map_or(0, |(_, bytes, _)| *bytes)
        };
        assert_eq!([0, 1, 64, 65, 32_769].map(bytes), [0, 8, 8, 16, 4104]);
        assert_eq!([32_770, i32::MAX as usize].map(bytes), [4104, 4104]);
    }

    #[test]
    fn what_is_named_in_other_memory_is_found_and_nothing_is_read_unannounced() {
        let vectors = [(A, B as u64), (A + 8, 10), (A + 16, C as u64), (A + 24, 0)];
        assert_eq!(
            told(raw::__NR_readv, [3, A, 2, 0, 0, 0], &vectors),
            [(A, 32, How::In), (B, 10, How::Out)]
        );
        let length = [(B, 0xdead_0000_0010)];
        assert_eq!(
            told(raw::__NR_accept, [3, A, B, 0, 0, 0], &length),
            [(B, 4, How::Both), (A, 16, How::Out)],
            "only the lower half of the word is the length"
        );
        let text = [(A + 8, u64::from_ne_bytes(*b"/tmp/x\0y"))];
        let page = A + PAGE_BYTES - (A + 9);
        assert_eq!(told(raw::__NR_chdir, [A + 9, 0, 0, 0, 0, 0], &text), [(A + 9, page, How::In)]);
    }

    #[test]
    fn what_the_kernel_uses_later_stays() {
        let flags = (raw::CLONE_CHILD_CLEARTID | raw::CLONE_PARENT_SETTID) as usize;
        let ids = [(B, 4, How::Out), (C, 4, How::Stays)];
        assert_eq!(told(raw::__NR_clone, [flags, A, B, C, 0, 0], &[]), ids);
        assert_eq!(told(raw::__NR_clone, [0, A, B, C, 0, 0], &[]), [], "nobody asked for ids");
        let fields = [(A, flags as u64), (A + 16, C as u64), (A + 24, B as u64)];
        assert_eq!(told(raw::__NR_clone3, [A, 88, 0, 0, 0, 0], &fields)[1..], ids);
    }

    #[test]
    fn memory_of_other_processes_is_not_ours() {
        let lists = [(A, C as u64), (A + 8, 10), (B, C as u64), (B + 8, 20)];
        let told = |process| told(raw::__NR_process_vm_readv, [process, A, 1, B, 1, 0], &lists);
        let (own, list) = ([(A, 16, How::In), (C, 10, How::Out)], (B, 16, How::In));
        assert_eq!(told(OWN), [own[0], own[1], list, (C, 20, How::In)]);
        assert_eq!(told(OWN + 1), [own[0], own[1], list]);
    }

    #[test]
    fn lengths_are_what_the_kernel_takes_them_for() {
        let half = |bytes: usize| told(raw::__NR_connect, [3, A, bytes, 0, 0, 0], &[]);
        assert_eq!(half(0xdead_0000_0010), [(A, 16, How::In)]);
        assert_eq!(half(0xffff_fff0), []);
        let all = |bytes| told(raw::__NR_read, [3, A, bytes, 0, 0, 0], &[]);
        assert_eq!(all(END - A), [(A, BYTES_MAX, How::Out)]);
        assert_eq!(all(usize::MAX), [(A, UNKNOWN_BYTES, How::Out)], "the kernel refuses it");
    }

    /// Each of these calls failed with EFAULT where the memory was out.
    #[test]
    fn lengths_that_only_some_requests_have_are_known() {
        let length = [(B, 100)];
        let option = |level, option| told(raw::__NR_getsockopt, [3, level, option, A, B, 0], &length);
        assert_eq!(option(SOL_SOCKET, 26), [(B, 4, How::Both), (A, 800, How::Both)], "instructions");
        assert_eq!(option(SOL_SOCKET, 4), [(B, 4, How::Both), (A, 100, How::Both)]);
        let event = [(A, C as u64), (A + 8, 2 << 32)];
        let notice = told(raw::__NR_mq_notify, [3, A, 0, 0, 0, 0], &event);
        assert_eq!(notice, [(A, 64, How::In), (C, 32, How::In)]);
        let key = |operation| told(raw::__NR_keyctl, [operation, 5, A, 20_000, 0, 0], &[]);
        assert!(key(11).contains(&(A, 20_000, How::Out)) && key(2).contains(&(A, 20_000, How::In)));
        let lengths = [(A, 70_000 << 32), (A + 8, 80_000)];
        let signature = told(raw::__NR_keyctl, [25, A, 0, B, C, 0], &lengths);
        assert!(signature.contains(&(B, 70_000, How::In)) && signature.contains(&(C, 80_000, How::Both)));
        let memory = [(A, B as u64), (A + 8, 1 << 20)];
        let umem = told(raw::__NR_setsockopt, [3, 283, 4, A, 32, 0], &memory);
        assert!(umem.contains(&(B, 1 << 20, How::Stays)));
        assert!(told(raw::__NR_ptrace, [0x420c, 7, 0, A, 0, 0], &[]).contains(&(A, 32_768, How::Out)));
        let device = |request, fields: &[_]| told(raw::__NR_ioctl, [3, request, A, 0, 0, 0], fields);
        let scan = device(0xc060_6610, &[(A + 40, B as u64), (A + 48, 1000)]);
        assert_eq!(scan[1..], [(B, 24_000, How::Out)]);
        let query = device(0xc068_6611, &[(A + 80, 20 << 32 | 4096), (A + 88, B as u64), (A + 96, C as u64)]);
        assert_eq!(query[1..], [(B, 4096, How::Out), (C, 20, How::Out)]);
    }

    #[test]
    fn text_goes_on_to_its_end_and_not_beyond_what_can_be_read() {
        let start = A + PAGE_BYTES - 16;
        let mut words = vec![(start, u64::MAX), (start + 8, u64::MAX), (start + 16, 0)];
        let pages = |words: &[(usize, u64)]| told(raw::__NR_chdir, [start, 0, 0, 0, 0, 0], words).len();
        assert_eq!(pages(&words), 2);
        words[1].1 = 0;
        assert_eq!(pages(&words), 1);
        words.truncate(1);
        assert_eq!(pages(&words), 1, "the kernel stops there too");
    }

    #[test]
    fn nonsense_is_told_within_the_address_space_and_ends() {
        let wild = [usize::MAX, usize::MAX - 7, END - 1, END, 1 << 46, 7];
        for call in 0..600 {
            for turn in 0..6 {
                let mut arguments = wild;
                arguments.rotate_left(turn);
                for (start, bytes, _) in told(call, arguments, &[]) {
                    assert!(start >= BEGINNING && start + bytes <= END && bytes > 0, "call {call}");
                }
            }
        }
    }

    #[test]
    fn unknown_calls_and_requests_have_every_address_looked_at() {
        let all = told(9999, [A, 5, B, 0, 0, C], &[]);
        assert_eq!(all.iter().map(|told| told.0).collect::<Vec<_>>(), [A, B, C]);
        for request in [0xc028_aa03, 0x5401] {
            assert_eq!(told(raw::__NR_ioctl, [3, request, A, 0, 0, 0], &[]), [(A, UNKNOWN_BYTES, How::Both)]);
        }
        let list = told(raw::__NR_ioctl, [3, 0xc020_660b, A, 0, 0, 0], &[(A + 24, 1000)]);
        assert_eq!(list[1], (A, 32 + 56_000, How::Both));
        assert_eq!(told(raw::__NR_close, [A, B, 0, 0, 0, 0], &[]), []);
    }
}
