//! The diffusion transformer.
