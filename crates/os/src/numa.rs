//! The NUMA node on which a thread runs.
// UNSAFETY: the kernel writes the number through a pointer.

use crate::sys::{self, number};
use farpage_core::units::NodeId;

/// Returns the node of the CPU that runs this thread. Unless the thread is bound to a CPU, it may be on
/// another node a moment later.
///
// Signal-safe: one system call of about 100 ns. The vDSO's faster way would need libc.
pub fn current_node() -> NodeId {
    let mut node = 0_u32;
    let arguments = [0 /* the CPU isn't asked for */, &raw mut node as usize, 0, 0, 0, 0];
    // SAFETY: the kernel writes one u32 to `node`, which is on our stack. The two other pointers may be null.
    let result = unsafe { sys::call(number::GETCPU, arguments) };
    // Some sandboxes refuse the call. Then all CPUs count as being on one node.
    if result == 0 { NodeId(node.min(u32::from(u8::MAX)) as u8) } else { NodeId(0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_of_this_thread_is_one_that_the_kernel_knows() {
        let path = format!("/sys/devices/system/node/node{}", current_node().0);
        assert!(
            !std::path::Path::new("/sys/devices/system/node").exists()
                || std::path::Path::new(&path).exists()
        );
    }
}
