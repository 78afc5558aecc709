//! A run while it lasts: the memory that its processes share, its processes, and what the user is told.
//!
//! - [`session`]: fills the shared memory before the first program starts
//! - [`beside`], [`orphans`]: the supervisor beside the program; [`signals`]: above the program
//! - [`dormant`], [`descendants`], [`outside`]: processes without an engine, and those without a budget
//! - [`headroom`], [`over_budget`]: what happens when limits leave less, and when the budget isn't kept
//! - [`notices`], through a [`valve`]: what is told meanwhile
//! - [`totals`], [`summary`]: what is told at the end

pub mod beside;
pub mod descendants;
pub mod dormant;
pub mod headroom;
pub mod notices;
pub mod orphans;
pub mod outside;
pub mod over_budget;
pub mod session;
pub mod signals;
pub mod summary;
pub mod totals;
pub mod valve;
