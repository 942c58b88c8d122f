//! Models of roll: Wan2.2 video diffusion, causal language models, and the weight file formats.
//!
//! - *Purpose*: [`wan2_2`] and [`causal_lm`] register themselves as models. [`weights`], [`lora`] and [`inspect`] read
//!   and write the files of any network.
//! - *Dependencies*: `roll-core`, `roll-external` and `roll-backends`. A model knows no reward and no algorithm;
//!   inference servers and training algorithms (`roll-video`, `roll-agents`) live elsewhere.
//! - *Where to start*: `wan2_2/dit/mod.rs` is the transformer and `wan2_2/vae/mod.rs` the VAE; each is meant to be read
//!   next to its paper. `wan2_2/model.rs` composes them into a `DiffusionModel`.
//!
//! The example writes a LoRA of one layer in kohya's convention and reads it back:
//!
//! ```
//! use std::collections::BTreeMap;
//!
//! use roll_core::Tensor;
//! use roll_models::lora::{Convention, Layer, Lora, LoraFile, Names, WriteOptions, write_lora};
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

pub mod causal_lm;
mod comma_list;
mod headers;
pub mod hub;
pub mod inspect;
pub mod lora;
pub mod precision;
mod tokenizer;
pub mod trainable;
pub mod wan2_2;
pub mod weights;
