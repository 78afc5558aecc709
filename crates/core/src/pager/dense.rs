//! Objects that have been in the pool for long are compressed once more, by a slower codec that makes them
//! shorter. The driver does so in the background, for a part of the time. Where densifying is the only way to
//! free space in the pool, the driver does more of it. The page's entry is locked meanwhile, so the object's
//! handle can change. A fault that comes then waits for some 15 µs.

use super::Pager;
use crate::stats::Counter;
use crate::table::entry::State;
use crate::zswap::codec::{Scratch, densify_undone, undo_to_densify};

/// The outcome of [`Pager::densify`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Densified {
    /// No object is old enough.
    Nothing,
    /// An object became shorter.
    Shorter,
    /// An object didn't become shorter, and won't be looked at again.
    AsItWas,
    /// The object's page is being moved. The object is the youngest of its kind now.
    Busy,
    /// The pool has no free space for the shorter object beside the longer one. The longer one is the
    /// youngest of its kind now.
    NoSpace,
}

impl Pager<'_> {
    /// Makes one object of the pool shorter: the oldest of those that weren't looked at yet. With `is_old`,
    /// does so only if two [turns](crate::zswap::pool::Pool::turn) have begun since the object was stored.
    /// Under the shared map lock.
    pub fn densify(&self, is_old: bool, scratch: &mut Scratch) -> Densified {
        if !self.config.codec.densifies() {
            return Densified::Nothing;
        }
        let Some((handle, page)) = self.pool.first_to_densify(is_old) else { return Densified::Nothing };
        pause!();
        let place = self.table.get(page).expect("a pool object's page has a leaf");
        let word = place.entry().load();
        pause!();
        // Identity: as in `shrink`, the object may no longer be the page's.
        let same = word.state() == State::Pooled(handle);
        #[cfg(feature = "planted")]
        let same = same || crate::planted::strikes(crate::planted::Bug::DensifyWhatIsThere);
        if word.is_locked() || !same || place.entry().try_lock(word).is_err() {
            self.pool.rotate(handle, page);
            return Densified::Busy;
        }
        pause!();
        // The object has a pin only for the short half of the work.
        let undone = self.pool.read(handle, |stored| undo_to_densify(stored, scratch));
        let denser = undone.and_then(|bytes_max| densify_undone(bytes_max, scratch));
        let (after, done) = match denser.map(|bytes| self.pool.replace(handle, bytes)) {
            Some(Ok(denser)) => (denser, Densified::Shorter),
            Some(Err(_)) => {
                self.pool.rotate(handle, page);
                (handle, Densified::NoSpace)
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
