//! The rivals of Farpage's structures. Where a well-kept library exists, it is the rival. Where none exists,
//! the rival is the published structure, written as well as we can.

pub mod extent_list;
pub mod extent_rbtree;
pub mod index_buckets;
pub mod index_radix;
pub mod index_trees;
