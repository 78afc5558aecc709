//! What Farpage's structures are measured against: well-kept libraries where they exist, else the published
//! structure, written as well as we can.
