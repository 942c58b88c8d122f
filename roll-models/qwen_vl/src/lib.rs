//! Vision-language networks: Qwen2-VL and Qwen2.5-VL, which read text with pictures and clips, frozen, with gradients
//! to the pixels, or as policies of agents.
//!
//! - *Purpose*: one network behind rewards and judges, which reach it through [`roll_core::VisionLanguageModel`], and
//!   the model `qwen_vl`, which sees pictures. Both have the name `qwen_vl`, and nobody imports this crate.
//! - *Dependencies*: `roll-core`, `roll-external`, `roll-backends`, `roll-media` (resizing), `roll-network`, and
//!   `roll-causal-lm` for the language model, which is Qwen2.
//! - *Where to start*: `network`: a text with media is read and pulled back. `patches` orders pixels, `tower` is the
//!   vision tower, `positions` the rotary positions in three axes, `source` finds files, `checkpoint` has the names and
//!   LoRAs of files, `plan` counts memory and time, `pictures` makes media tokens, `policy` is the model of agents.
//!
//! Sources of the formulas: Wang et al. 2024, "Qwen2-VL" (arXiv 2409.12191); Bai et al. 2025, "Qwen2.5-VL"
//! (arXiv 2502.13923).

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod checkpoint;
mod config;
mod init_tiny;
mod loading;
mod network;
mod output_layer;
mod patches;
mod pictures;
mod plan;
mod policy;
mod positions;
mod processor;
mod source;
mod tower;

#[cfg(test)]
mod tests;

use burn_tensor::{Device, Int, Tensor, TensorData};

pub use config::{Family, QwenVlConfig, VisionConfig, Windows};
pub use loading::{QwenVlOptions, WeightLocation, open};
pub use network::QwenVl;
pub use pictures::Pictures;
pub use policy::{PolicyOptions, open_policy};
pub use processor::PictureOptions;

/// Indices of rows, on a device.
fn indices(rows: Vec<i64>, device: &Device) -> Tensor<1, Int> {
    let count = rows.len();
    Tensor::from_data(TensorData::new(rows, [count]), device)
}

roll_core::inventory::submit! {
    roll_core::VisionLanguageRegistration {
        name: "qwen_vl",
        summary: "Qwen2-VL and Qwen2.5-VL",
        open: |section, options, context| {
            let options = roll_core::parse_options(section, options)?;
            Ok(Box::new(open(section, &options, context)?))
        },
        missing: |options, context| {
            let options: QwenVlOptions = roll_core::parse_options("model", options)?;
            let names = [&options.model_path, &options.config_path, &options.tokenizer_path];
            Ok(source::missing(names.into_iter().flatten(), context))
        },
        needs: |section, options, reads, input, context| {
            plan::needs(section, &roll_core::parse_options(section, options)?, reads, input, context)
        },
    }
}
