//! What Farpage's structures are measured against: well-kept libraries where they exist, else the published
//! structure, written as well as we can.

pub mod extent_list;
pub mod extent_rbtree;
pub mod index_buckets;
pub mod index_radix;
pub mod index_trees;
