//! Signals that ask a benchmark to end. While a [`Hearing`] lives, such a signal sets a flag instead of
//! ending this process, and [`go_on`] returns an error. So the benchmark puts everything back before it ends,
//! and keeps the figures that it has. A second signal interrupts nothing.
// UNSAFETY: sigaction is a C function, and a signal handler runs at any moment.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// The signals that are heard.
const SIGNALS: [i32; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT];

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// The number of hearings, and the signals' actions before the first one.
static HEARINGS: Mutex<(usize, Vec<(i32, libc::sigaction)>)> = Mutex::new((0, Vec::new()));

extern "C" fn on_interrupt(_: i32) {
    // Ordering: a flag by itself, which publishes nothing.
    INTERRUPTED.store(true, Ordering::Relaxed);
}

/// Returns an error if a signal has asked the benchmark to end.
pub fn go_on() -> Result<(), String> {
    // Ordering: as in `on_interrupt`.
    if INTERRUPTED.load(Ordering::Relaxed) { Err("interrupted".to_owned()) } else { Ok(()) }
}

/// Signals set the flag for as long as one value of this type lives.
#[must_use]
#[derive(Debug)]
pub struct Hearing(());

/// Makes the signals set the flag.
pub fn hear() -> Hearing {
    let mut hearings = HEARINGS.lock().unwrap_or_else(PoisonError::into_inner);
    if hearings.0 == 0 {
        hearings.1 = SIGNALS.into_iter().filter_map(heard).collect();
    }
    hearings.0 += 1;
    Hearing(())
}

/// Installs the handler. Returns the signal with its action before. SIGHUP stays ignored if it was, because
/// `nohup` promises so.
fn heard(signal: i32) -> Option<(i32, libc::sigaction)> {
    // SAFETY: zeros are a valid action.
    let (mut new, mut old): (libc::sigaction, libc::sigaction) = unsafe { std::mem::zeroed() };
    new.sa_sigaction = on_interrupt as *const () as libc::sighandler_t;
    new.sa_flags = libc::SA_RESTART;
    // SAFETY: both actions are variables of this function, and the handler only stores a flag.
    if unsafe { libc::sigaction(signal, &raw const new, &raw mut old) } != 0 {
        return None;
    }
    if signal == libc::SIGHUP && old.sa_sigaction == libc::SIG_IGN {
        set(signal, &old);
        return None;
    }
    Some((signal, old))
}

fn set(signal: i32, action: &libc::sigaction) {
    // SAFETY: the action is one that the kernel returned for this signal.
    unsafe { libc::sigaction(signal, action, std::ptr::null_mut()) };
}

impl Drop for Hearing {
    fn drop(&mut self) {
        let mut hearings = HEARINGS.lock().unwrap_or_else(PoisonError::into_inner);
        hearings.0 -= 1;
        if hearings.0 == 0 {
            hearings.1.drain(..).for_each(|(signal, action)| set(signal, &action));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn action_of(signal: i32) -> libc::sighandler_t {
        // SAFETY: zeros are a valid action.
        let mut found: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel writes the action to a variable of this function.
        assert_eq!(unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut found) }, 0);
        found.sa_sigaction
    }

    /// `nohup farpage bench kernel` ended with the session in which it was started. And after a benchmark had
    /// run, Ctrl-C did nothing any more.
    #[test]
    fn hangup_that_is_ignored_stays_ignored_and_the_last_hearing_puts_actions_back() {
        // SAFETY: SIGHUP is ignored, and no handler runs.
        let before = unsafe { libc::signal(libc::SIGHUP, libc::SIG_IGN) };
        let interrupt = action_of(libc::SIGINT);
        let outer = hear();
        let inner = hear();
        drop(outer);
        assert_eq!(action_of(libc::SIGHUP), libc::SIG_IGN);
        assert_eq!(action_of(libc::SIGINT), on_interrupt as *const () as libc::sighandler_t);
        drop(inner);
        // SAFETY: the action is the one before.
        unsafe { libc::signal(libc::SIGHUP, before) };
        // Another test's hearing may have begun before.
        if HEARINGS.lock().unwrap_or_else(PoisonError::into_inner).0 == 0 {
            assert_eq!(action_of(libc::SIGINT), interrupt);
        }
    }
}
