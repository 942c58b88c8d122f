//! Where the weights of a network come from and where they are kept: GGUF files, and stores of weights that are
//! streamed from a file, resident on the device or in host memory. `roll-weights` reads safetensors and torch files.

pub mod gguf;
mod streamed;

pub use roll_weights::{
    Change, ChangeOnRead, Checkpoint, Outputs, SafetensorsWriter, TensorEntry, TensorInfo, WeightFile, WeightsError,
    expand_glob, is_auxiliary, parse_safetensors, rewrite, save_safetensors,
};
pub use streamed::{Streamed, from_host, in_host_memory, resident, stored_dtype};
