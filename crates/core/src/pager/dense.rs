//! What has been in the pool for long is compressed once more, by a codec that takes longer and makes less of it. The driver has
//! it done in the background, for a part of the time, and more of it where that is the only way to make room. The page's entry is
//! locked meanwhile, so its handle can change; a fault on it that comes just then waits for some 15 µs.

use super::Pager;
use crate::stats::Counter;
use crate::table::entry::State;
use crate::zswap::codec::{Scratch, densify_undone, undo_to_densify};

/// What [`Pager::densify`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Densified {
    /// Nothing is old enough.
    Nothing,
    /// An object became shorter.
    Shorter,
    /// One didn't, and won't be looked at again.
    AsItWas,
    /// Its page is just being moved; it is the youngest of its kind now.
    Busy,
    /// There is no room for the shorter one beside the longer one, which is the youngest of its kind now.
    NoRoom,
}

impl Pager<'_> {
    /// Makes the oldest object of the pool shorter of those that weren't looked at yet; with `is_old`, only if it has been
    /// there for two [turns](crate::zswap::pool::Pool::turn). Under the shared map lock.
    pub fn densify(&self, is_old: bool, scratch: &mut Scratch) -> Densified {
        if !self.config.codec.densifies() {
            return Densified::Nothing;
        }
        let Some((handle, page)) = self.pool.first_to_densify(is_old) else { return Densified::Nothing };
        pause!();
        let place = self.table.get(page).expect("a pool object's page has a leaf");
        let word = place.entry().load();
        pause!();
        // Identity: as in `shrink`.
        let same = word.state() == State::Pooled(handle);
        #[cfg(feature = "planted")]
        let same = same || crate::planted::strikes(crate::planted::Bug::DensifyWhatIsThere);
        if word.is_locked() || !same || place.entry().try_lock(word).is_err() {
            self.pool.rotate(handle, page);
            return Densified::Busy;
        }
        pause!();
        // Only the short half while the object is pinned.
        let undone = self.pool.read(handle, |stored| undo_to_densify(stored, scratch));
        let denser = undone.and_then(|bytes_max| densify_undone(bytes_max, scratch));
        let (after, done) = match denser.map(|bytes| self.pool.replace(handle, bytes)) {
            Some(Ok(denser)) => (denser, Densified::Shorter),
            Some(Err(_)) => {
                self.pool.rotate(handle, page);
                (handle, Densified::NoRoom)
            }
            None => {
                self.pool.leave_as_it_is(handle);
                (handle, Densified::AsItWas)
            }
        };
        if done == Densified::Shorter {
            self.stats.count(Counter::PoolDensified);
        }
        pause!();
        self.settle(page, place, word.state(), State::Pooled(after));
        done
    }
}
