//! Adapter files: conversion between this crate's parameter names and the names that other programs read.

use std::path::Path;

use roll_core::{Error, Result, StateDict, Tensor, header};

use crate::lora::{Expert, LoraFile};

/// Prefix that ComfyUI and diffusers expect in LoRA files of Wan.
const PREFIX: &str = "diffusion_model.";

/// Renames parameters (`blocks.0.self_attn.q.lora_A.weight`) for a file. Writes an `alpha` for each layer unless it
/// equals the rank, which readers assume without it.
pub fn to_file(parameters: StateDict, scale: f64) -> Result<StateDict> {
    let mut file = StateDict::new();
    for (name, tensor) in parameters {
        if let (Some(layer), true) = (name.strip_suffix(".lora_A.weight"), scale != 1.0) {
            let rank = tensor.shape()[0] as f64;
            file.insert(format!("{PREFIX}{layer}.alpha"), Tensor::scalar((scale * rank) as f32));
        }
        file.insert(format!("{PREFIX}{name}"), tensor);
    }
    Ok(file)
}

/// Reads the parameters of an adapter file in any convention; the inverse of [`to_file`]. A file with adapters for both
/// transformers yields `expert`'s. `name` is the file's name, for error messages. Fails if the file's scale is not
/// `scale`, or if the file contains more than low-rank layers.
pub fn from_file(name: &str, file: &StateDict, expert: Expert, scale: f64) -> Result<StateDict> {
    let mut tensors = file.clone();
    let words = header::take(&mut tensors)?;
    let file = LoraFile::read(Path::new(name), &tensors, words, None)?;
    let lora = file.one(Some(expert))?;
    if let Some(layer) = lora.differences.keys().next() {
        return Err(Error::Unsupported(format!(
            "the LoRA file changes whole parameters beside its low-rank layers (`{layer}.diff`): they cannot be trained \
             on; put it into the base with `roll merge-lora`"
        )));
    }
    let mut parameters = StateDict::new();
    for (name, layer) in lora.layers {
        let found = layer.scale();
        if (found - scale).abs() > 1e-6 * scale.abs() {
            return Err(Error::Unsupported(format!(
                "the layer `{name}` of the LoRA file has alpha / rank = {found}, this configuration has {scale}: set \
                 `lora_alpha` to match"
            )));
        }
        if let Some(bias) = layer.bias {
            parameters.insert(format!("{name}.lora_B.bias"), bias);
        }
        parameters.insert(format!("{name}.lora_A.weight"), layer.down);
        parameters.insert(format!("{name}.lora_B.weight"), layer.up);
    }
    Ok(parameters)
}
