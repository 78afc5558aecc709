//! How Farpage reads and writes for people: sizes and numbers, messages, failures, guesses at wrong words.

pub mod failure;
pub mod numbers;
pub mod say;
pub mod size;
pub mod tips;
