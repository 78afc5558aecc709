//! What the program may do, and how engine threads follow when the program changes that.
//!
//! - [`credentials`]: users, groups, capabilities, root directory, namespaces
//! - [`filters`]: filters of seccomp
//! - [`limits`]: resource limits

pub mod credentials;
pub mod filters;
pub mod limits;
