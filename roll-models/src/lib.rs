//! Wan2.2 and weight files.
