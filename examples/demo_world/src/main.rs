//! Makes the world of the embedded demo: procedural faces, and the networks trained on them.

fn main() {}
