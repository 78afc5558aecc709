//! The index in every order in which its threads can meet: `make loom`. Leaves have two slots here.

use super::*;
use loom::sync::Arc;
use loom::thread;

fn handle(raw: u32) -> ObjectHandle {
    ObjectHandle::from_raw(raw).unwrap()
}

fn key(offset: u32) -> SlotIndex {
    SlotIndex::new(AreaId(0), offset)
}

/// Makes an index of two clusters, {0, 1} and {2, 3}. The index and its tables are leaked, because loom ends
/// each try by forgetting them.
fn index(leaves: usize) -> Arc<Index<'static>> {
    let layout = IndexLayout::new(&[4], leaves);
    let atomics = |count: usize| &*Vec::leak((0..count).map(|_| AtomicU64::new(0)).collect::<Vec<_>>());
    Arc::new(Index::new(
        &layout,
        IndexMemory {
            directory: atomics(layout.clusters()),
            tallies: atomics(layout.leaves),
            clusters: vec![0; layout.leaves].leak(),
            words: atomics(layout.leaf_words()),
        },
    ))
}

#[test]
fn loom_load_never_sees_another_key_while_the_only_leaf_changes_hands() {
    loom::model(|| {
        let index = index(1);
        index.store(key(0), handle(1)).unwrap();
        // Loom backtracks only from a load that comes after a store. So the thread that loads is the spawned
        // one, which begins later.
        let reader = {
            let index = Arc::clone(&index);
            thread::spawn(move || [0, 2].map(|at| index.load(key(at)).map(Entry::handle)))
        };
        assert_eq!(index.remove(key(0)), Some(handle(1)));
        assert_eq!(index.store(key(2), handle(2)), Ok(None));
        let [of_0, of_2] = reader.join().unwrap();
        assert!(of_0.is_none() || of_0 == Some(handle(1)), "{of_0:?}");
        assert!(of_2.is_none() || of_2 == Some(handle(2)), "{of_2:?}");
        assert_eq!((index.load(key(0)), index.load(key(2)).map(Entry::handle)), (None, Some(handle(2))));
        index.check();
    });
}

#[test]
fn loom_two_stores_of_one_key_replace_each_other_in_some_order() {
    loom::model(|| {
        let index = index(2);
        let other = {
            let index = Arc::clone(&index);
            thread::spawn(move || index.store(key(1), handle(1)).unwrap())
        };
        let mine = index.store(key(1), handle(2)).unwrap();
        let theirs = other.join().unwrap();
        let left = index.load(key(1)).map(Entry::handle);
        let in_order = |old, first, last| old == Some(first) && left == Some(last);
        let ok = mine.is_none() && in_order(theirs, handle(2), handle(1))
            || theirs.is_none() && in_order(mine, handle(1), handle(2));
        assert!(ok, "{mine:?} {theirs:?} {left:?}");
        index.check();
    });
}

#[test]
fn loom_erase_by_identity_and_replace_give_each_object_to_one_of_them() {
    loom::model(|| {
        let index = index(1);
        index.store(key(0), handle(1)).unwrap();
        let reader = {
            let index = Arc::clone(&index);
            thread::spawn(move || {
                let entry = index.load(key(0)).unwrap();
                index.erase(key(0), entry).then_some(entry.handle())
            })
        };
        let replaced = index.store(key(0), handle(2)).unwrap();
        let erased = reader.join().unwrap();
        let left = index.load(key(0)).map(Entry::handle);
        let (one, two) = (Some(handle(1)), Some(handle(2)));
        let ok = [(one, None, two), (None, one, two), (one, two, None)].contains(&(replaced, erased, left));
        assert!(ok, "{replaced:?} {erased:?} {left:?}");
        index.check();
    });
}

#[test]
fn loom_a_store_meets_the_loss_of_its_empty_leaf() {
    loom::model(|| {
        let index = index(1);
        index.store(key(0), handle(9)).unwrap();
        index.remove(key(0)).unwrap();
        let thief = {
            let index = Arc::clone(&index);
            thread::spawn(move || index.store(key(2), handle(2)))
        };
        let mine = index.store(key(0), handle(1));
        let theirs = thief.join().unwrap();
        let is_there = |at: u32, raw: u32, stored: Result<_, Full>| {
            assert!(stored != Ok(Some(handle(9))));
            let seen = index.load(key(at)).map(Entry::handle);
            assert_eq!(seen, stored.is_ok().then(|| handle(raw)));
        };
        is_there(0, 1, mine);
        is_there(2, 2, theirs);
        assert!(mine.is_ok() != theirs.is_ok(), "one leaf, two clusters");
        index.check();
    });
}
