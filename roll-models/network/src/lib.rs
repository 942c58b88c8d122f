//! Files that every network has: LoRA adapters, GGUF, tokenizers, models of the Hugging Face hub.
//!
//! - *Purpose*: [`weights`] and [`lora`] read and write the files of any network, [`trainable`] chooses the parameters
//!   that are trained, [`trained`] holds them, [`pass`], [`options`] and [`machine`] have the settings of models,
//!   [`patch`], [`shapes`] and [`timestep`] are parts of transformers.
//! - *Dependencies*: `roll-core`, `roll-external`, `roll-backends` and `roll-weights`.
//! - *Where to start*: `lora/mod.rs`, with the conventions of other trainers.
//!
//! The example writes a LoRA of one layer in kohya's convention and reads it back:
//!
//! ```
//! use std::collections::BTreeMap;
//!
//! use roll_core::Tensor;
//! use roll_network::lora::{Convention, Layer, Lora, LoraFile, Names, WriteOptions, write_lora};
//!
//! # fn main() -> roll_core::Result<()> {
//! let (down, up) = (Tensor::full([2, 8], 0.5), Tensor::full([8, 2], 1.0)); // rank 2 on a layer of 8 x 8
//! let layer = Layer { down, up, alpha: Some(4.0), bias: None };
//! let lora = Lora { layers: BTreeMap::from([("blocks.0.self_attn.q".to_string(), layer)]), ..Lora::default() };
//!
//! let path = std::env::temp_dir().join(format!("roll-doc-{}.safetensors", std::process::id()));
//! let options = WriteOptions { convention: Convention::Kohya, names: Names::Official };
//! write_lora(&lora, options, &BTreeMap::new(), &path)?;
//!
//! let read = LoraFile::open(&path)?;
//! let layer = &read.adapters[0].layers["blocks.0.self_attn.q"];
//! assert_eq!((read.convention, layer.rank(), layer.scale()), (Convention::Kohya, 2, 2.0));
//! # std::fs::remove_file(&path).expect("the file can be deleted");
//! # Ok(())
//! # }
//! ```

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod bench;
pub mod byte_level;
pub mod comma_list;
pub mod headers;
pub mod hub;
pub mod known;
pub mod lora;
pub mod machine;
pub mod names;
pub mod new_checkpoint;
pub mod options;
pub mod pass;
pub mod patch;
pub mod precision;
pub mod prompts;
pub mod shapes;
pub mod timestep;
pub mod tokenizer;
pub mod trainable;
pub mod trained;
pub mod weights;
