//! Weights as models hold them: GGUF files, and weights that are streamed, on the device or in host memory. The files
//! are those of `roll-weights`.

pub mod gguf;
mod streamed;

pub use roll_weights::{
    Change, ChangeOnRead, Checkpoint, Outputs, SafetensorsWriter, TensorEntry, TensorInfo, WeightFile, WeightsError,
    expand_glob, is_auxiliary, parse_safetensors, rewrite, save_safetensors,
};
pub use streamed::{Streamed, from_host, in_host_memory, resident, stored_dtype};
