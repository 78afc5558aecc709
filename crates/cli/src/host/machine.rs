//! The machine's nodes, and the nodes of its block devices, from sysfs.

use farpage_core::areas::Placement;
use farpage_core::units::{NODES_MAX, NodeId};
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// A view of sysfs below some root.
pub struct Machine {
    root: PathBuf,
}

impl Machine {
    /// This machine.
    pub fn this() -> Machine {
        Machine::below("/sys")
    }

    /// A machine whose sysfs is at `root`.
    pub fn below(root: impl Into<PathBuf>) -> Machine {
        Machine { root: root.into() }
    }

    /// Returns the nodes that are online, in rising order; node 0 if nothing is known.
    pub fn nodes(&self) -> Vec<NodeId> {
        let online = fs::read_to_string(self.root.join("devices/system/node/online")).unwrap_or_default();
        let nodes: Vec<NodeId> = online.trim().split(',').filter_map(span).flatten().map(NodeId).collect();
        if nodes.is_empty() { vec![NodeId(0)] } else { nodes }
    }

    /// Returns the distance from `from` to `to`, where 10 is no distance.
    fn distance(&self, from: NodeId, to: NodeId) -> Option<u8> {
        let path = self.root.join(format!("devices/system/node/node{}/distance", from.0));
        // The file has one number for each node that is online.
        let at = self.nodes().iter().position(|node| *node == to)?;
        fs::read_to_string(path).ok()?.split_whitespace().nth(at)?.parse().ok()
    }

    /// Returns the node that a file's disk, or a block device, is attached to; none if no file says it.
    pub fn node_of(&self, metadata: &fs::Metadata) -> Option<NodeId> {
        let is_device = metadata.file_type().is_block_device();
        let device = if is_device { metadata.rdev() } else { metadata.dev() };
        let name = format!("{}:{}", libc::major(device), libc::minor(device));
        self.node_of_entry(&self.root.join("dev/block").join(name).canonicalize().ok()?)
    }

    /// Whether a block device can be told that its content isn't needed.
    pub fn can_discard(&self, device: &fs::Metadata) -> bool {
        let name = format!("dev/block/{}:{}", libc::major(device.rdev()), libc::minor(device.rdev()));
        let Ok(entry) = self.root.join(name).canonicalize() else { return false };
        // A partition uses the queue of the disk that it lies in.
        let places = [entry.as_path(), entry.parent().unwrap_or(&entry)];
        let mut found = places.into_iter().map(|path| path.join("queue/discard_max_bytes"));
        found.find_map(|path| fs::read_to_string(path).ok()).is_some_and(|most| most.trim() != "0")
    }

    /// Returns the node of a device in sysfs. A disk has the node below `device`, a partition has it from its
    /// disk. A virtual device has it from the devices it is made of, or from its paths, if they agree.
    fn node_of_entry(&self, entry: &Path) -> Option<NodeId> {
        let root = self.root.canonicalize().ok()?;
        let above = entry.ancestors().take_while(|path| *path != root);
        let found = above.flat_map(|path| [path.join("device/numa_node"), path.join("numa_node")]);
        if let Some(text) = found.filter_map(|path| fs::read_to_string(path).ok()).next() {
            // -1 means that the device is nowhere in particular.
            return text.trim().parse().ok().filter(|node| (*node as usize) < NODES_MAX).map(NodeId);
        }
        let disk = if entry.join("partition").exists() { entry.parent()? } else { entry };
        let parts = [slaves(disk), multipath(disk)].concat();
        let mut nodes = parts.iter().map(|part| self.node_of_entry(part));
        let first = nodes.next()??;
        nodes.all(|node| node == Some(first)).then_some(first)
    }

    /// Returns the place of an area on a device of this node. The priority is the user's, if there is one.
    pub fn place(&self, node: Option<NodeId>, priority: Option<i32>) -> Placement {
        let place =
            priority.map_or(Placement::default(), |priority| Placement::default().with_priority(priority));
        node.map_or(place, |node| place.at(node, |from| self.distance(from, node)))
    }
}

/// Returns the entries of a directory, links followed; nothing if there is no directory.
fn entries(directory: &Path) -> Vec<PathBuf> {
    let found = fs::read_dir(directory).into_iter().flatten().flatten();
    found.filter_map(|entry| entry.path().canonicalize().ok()).collect()
}

/// Returns the devices that a virtual device is made of.
fn slaves(disk: &Path) -> Vec<PathBuf> {
    entries(&disk.join("slaves"))
}

/// Returns the paths to an NVMe disk that has several paths. The disk `nvme0n1` lies in a subsystem, which is
/// on no node. The subsystem's controllers lie beside the disk, each with a path `nvme0c3n1`: the subsystem's
/// number, the controller's, and the disk's.
fn multipath(disk: &Path) -> Vec<PathBuf> {
    let name = |path: &Path| path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
    let disk_name = name(disk);
    let numbers = disk_name.strip_prefix("nvme").and_then(|numbers| numbers.split_once('n'));
    let (Some((subsystem, namespace)), Some(above)) = (numbers, disk.parent()) else { return Vec::new() };
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_path = |path: &PathBuf| {
        let path = name(path);
        let controller = path.strip_prefix(&format!("nvme{subsystem}c"));
        controller.and_then(|rest| rest.strip_suffix(&format!("n{namespace}"))).is_some_and(is_number)
    };
    let controllers =
        entries(above).into_iter().filter(|path| name(path).starts_with("nvme") && path != disk);
    controllers.flat_map(|controller| entries(&controller)).filter(is_path).collect()
}

/// Reads `3` or `0-3`.
fn span(text: &str) -> Option<std::ops::RangeInclusive<u8>> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let last: usize = last.parse().ok()?;
    Some(first.parse().ok()?..=last.min(NODES_MAX - 1) as u8)
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Two nodes, 21 apart; node 1 has the disk that the tests' own files are on, in its second partition.
    fn two_nodes(numa_node: &str) -> (tempfile::TempDir, fs::Metadata) {
        let root = tempfile::tempdir().unwrap();
        let put = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        put("devices/system/node/online", "0-1\n");
        put("devices/system/node/node0/distance", "10 21\n");
        put("devices/system/node/node1/distance", "21 10\n");
        put("devices/pci0/0000:00:02.0/block/sda/sda2/partition", "2\n");
        put("devices/pci0/0000:00:02.0/block/sda/device/numa_node", numa_node);
        let file = root.path().metadata().unwrap();
        let entry = format!("dev/block/{}:{}", libc::major(file.dev()), libc::minor(file.dev()));
        fs::create_dir_all(root.path().join("dev/block")).unwrap();
        let target = root.path().join("devices/pci0/0000:00:02.0/block/sda/sda2");
        std::os::unix::fs::symlink(target, root.path().join(entry)).unwrap();
        (root, file)
    }

    #[test]
    fn partition_is_on_the_node_of_its_disk() {
        let (root, file) = two_nodes("1\n");
        let machine = Machine::below(root.path());
        assert_eq!(machine.nodes(), [NodeId(0), NodeId(1)]);
        assert_eq!(machine.node_of(&file), Some(NodeId(1)));
        assert_eq!(machine.distance(NodeId(0), NodeId(1)), Some(21));
        let place = machine.place(Some(NodeId(1)), Some(7));
        assert_eq!((place.node(), place.priority), (Some(NodeId(1)), 7));
    }

    #[test]
    fn device_that_is_nowhere_in_particular_has_no_node() {
        let (root, file) = two_nodes("-1\n");
        assert_eq!(Machine::below(root.path()).node_of(&file), None);
        assert_eq!(Machine::below("/no/such").node_of(&file), None);
        assert_eq!(Machine::below("/no/such").nodes(), [NodeId(0)]);
    }

    #[test]
    fn device_made_of_others_is_where_they_are_if_they_agree() {
        let (root, _) = two_nodes("1\n");
        let machine = Machine::below(root.path());
        let whole = root.path().canonicalize().unwrap().join("devices/virtual/block/dm-0");
        fs::create_dir_all(whole.join("slaves")).unwrap();
        let disk = root.path().join("devices/pci0/0000:00:02.0/block/sda");
        std::os::unix::fs::symlink(&disk, whole.join("slaves/sda")).unwrap();
        assert_eq!(machine.node_of_entry(&whole), Some(NodeId(1)));
        fs::create_dir_all(root.path().join("elsewhere")).unwrap();
        std::os::unix::fs::symlink(root.path().join("elsewhere"), whole.join("slaves/sdb")).unwrap();
        assert_eq!(machine.node_of_entry(&whole), None);
    }

    /// A subsystem with two controllers, and two disks with a path by each controller. `nodes` are the
    /// controllers'. The files are as Linux 6.x has them: the subsystem links to its controllers, and a
    /// path's `device` is its controller.
    fn multipath_disks(nodes: [&str; 2]) -> (tempfile::TempDir, PathBuf) {
        let root = tempfile::tempdir().unwrap();
        let top = root.path().canonicalize().unwrap();
        let subsystem = top.join("devices/virtual/nvme-subsystem/nvme-subsys0");
        for disk in ["nvme0n1", "nvme0n12"] {
            fs::create_dir_all(subsystem.join(disk).join("slaves")).unwrap();
            std::os::unix::fs::symlink(&subsystem, subsystem.join(disk).join("device")).unwrap();
        }
        fs::create_dir_all(subsystem.join("nvme0n1/nvme0n1p2")).unwrap();
        fs::write(subsystem.join("nvme0n1/nvme0n1p2/partition"), "2\n").unwrap();
        for (at, node) in nodes.iter().enumerate() {
            let controller = top.join(format!("devices/pci0/0000:0{at}:00.0/nvme/nvme{at}"));
            for disk in ["1", "12"] {
                let path = controller.join(format!("nvme0c{at}n{disk}"));
                fs::create_dir_all(&path).unwrap();
                std::os::unix::fs::symlink(&controller, path.join("device")).unwrap();
            }
            // A disk with one path only, which no subsystem lists.
            fs::create_dir_all(controller.join("ng0n1")).unwrap();
            fs::write(controller.join("numa_node"), node).unwrap();
            std::os::unix::fs::symlink(&controller, subsystem.join(format!("nvme{at}"))).unwrap();
        }
        (root, subsystem)
    }

    /// `--order numa` and `weighted` must not take a disk with several paths for one that is equally
    /// far from all nodes.
    #[test]
    fn disk_with_several_paths_is_where_they_are_if_they_agree() {
        let (root, subsystem) = multipath_disks(["1\n", "1\n"]);
        let machine = Machine::below(root.path());
        for disk in ["nvme0n1", "nvme0n12", "nvme0n1/nvme0n1p2"] {
            assert_eq!(machine.node_of_entry(&subsystem.join(disk)), Some(NodeId(1)), "{disk}");
        }
        let paths = multipath(&subsystem.join("nvme0n1"));
        let names: Vec<_> = paths.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
        assert!(
            names.len() == 2 && names.contains(&"nvme0c0n1") && names.contains(&"nvme0c1n1"),
            "{names:?}"
        );
        let (root, subsystem) = multipath_disks(["1\n", "0\n"]);
        assert_eq!(Machine::below(root.path()).node_of_entry(&subsystem.join("nvme0n1")), None);
        let (root, subsystem) = multipath_disks(["-1\n", "-1\n"]);
        assert_eq!(Machine::below(root.path()).node_of_entry(&subsystem.join("nvme0n1")), None);
    }

    #[test]
    fn nodes_may_be_given_in_spans() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("devices/system/node")).unwrap();
        fs::write(root.path().join("devices/system/node/online"), "0,2-3\n").unwrap();
        assert_eq!(Machine::below(root.path()).nodes(), [NodeId(0), NodeId(2), NodeId(3)]);
    }
}
