//! Random checkpoints of a few thousand parameters.
