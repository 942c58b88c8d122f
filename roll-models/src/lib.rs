//! Models of roll: Wan2.2 video diffusion, causal language models, and the weight file formats.
//!
//! *What it is for*: [`wan2_2`] and [`causal_lm`] register themselves; [`weights`], [`lora`] and [`inspect`] read and
//! write files for anyone. *What it is not*: an inference server, or a training algorithm (`roll-algos`).

pub mod causal_lm;
mod comma_list;
mod headers;
pub mod hub;
pub mod inspect;
pub mod lora;
pub mod precision;
pub mod trainable;
pub mod wan2_2;
pub mod weights;
