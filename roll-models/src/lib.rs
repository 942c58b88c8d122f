//! Models of roll: Wan2.2 video diffusion, and the weight file formats.

pub mod inspect;
pub mod lora;
pub mod wan2_2;
pub mod weights;
