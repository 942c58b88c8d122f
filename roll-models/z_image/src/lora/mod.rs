//! LoRA files of other programs for Z-Image.
//!
//! `roll_network::lora` reads and writes the conventions. Layers have the names of the checkpoint in every convention
//! but that of ComfyUI's single files, in which q, k and v are one layer: [`split_fused`] divides its adapter,
//! [`fuse`] makes it.

mod fused;

use std::collections::BTreeMap;
use std::path::Path;

use roll_core::{Error, Result};
use roll_network::lora::{AdapterWeights, FusedNames, InitialAdapter, Layer, Lora, LoraRequest, OpenedAdapter};
use roll_network::weights::Checkpoint;

use crate::describe::is_transformer;
use crate::dit::DitConfig;
use crate::keys::{self, Module, PROJECTIONS};
use crate::transformer_file::TransformerFile;

pub use fused::fuse;

use fused::divided;

/// Adds up one or several adapter files, of any convention, for a transformer of these sizes.
///
/// # Errors
/// Fails if a layer is not one of the transformer (the error lists all such layers), if a fused layer cannot be
/// divided, and if `request` differs from the files.
pub fn initial_adapter(
    mut adapters: Vec<OpenedAdapter>,
    request: &LoraRequest,
    config: &DitConfig,
) -> Result<InitialAdapter> {
    for adapter in &mut adapters {
        if let AdapterWeights::Lora(lora) = &mut adapter.weights {
            split_fused(lora, &adapter.path, config)?;
        }
    }
    InitialAdapter::new(adapters, request, &linear_layers(config))
}

/// Names of the linear layers of the transformer.
pub fn linear_layers(config: &DitConfig) -> Vec<String> {
    let matrices = config.weights().into_iter().filter(|(_, shape)| shape.len() == 2);
    matrices.filter_map(|(name, _)| Some(name.strip_suffix(".weight")?.to_string())).collect()
}

roll_core::inventory::submit! {
    FusedNames {
        to_names_of,
        fuse: |lora| match has_projections(lora) {
            true => fuse(lora).map(|()| true),
            false => Ok(false),
        },
    }
}

/// Whether a LoRA by the names of the checkpoint has a layer that is a part of a fused one.
fn has_projections(lora: &Lora) -> bool {
    let is_projection = |name: &String| PROJECTIONS.iter().any(|p| name.ends_with(&format!(".attention.{p}")));
    lora.layers.keys().chain(lora.differences.keys()).any(is_projection)
}

/// Renames the layers of a LoRA to those of the checkpoint if `base` is a transformer of Z-Image, by diffusers' names or
/// by those of a single file. Returns whether it is. `path` is for error messages.
///
/// # Errors
/// Fails as [`split_fused`] does, and if the weights of `base` are damaged.
pub fn to_names_of(lora: &mut Lora, path: &Path, base: &Checkpoint) -> Result<bool> {
    if !is_transformer(base) {
        return Ok(false);
    }
    split_fused(lora, path, &TransformerFile::new(base.clone())?.config()?)?;
    Ok(true)
}

/// Renames the layers of ComfyUI's single files (`attention.qkv`, `attention.out`, `final_layer`) to those of the
/// checkpoint. A fused layer becomes three: if its matrix B is block-diagonal, each has a third of the rank; otherwise
/// all three share the matrix A. The scale `alpha / rank` stays. `path` is for error messages.
///
/// # Errors
/// Fails if a layer has not the sizes of the transformer's, or stands in the file under two names.
pub fn split_fused(lora: &mut Lora, path: &Path, config: &DitConfig) -> Result<()> {
    // The names of both schemes, because kohya's names have lost their dots.
    let layers = linear_layers(config);
    let native = layers.iter().map(|layer| format!("{}.weight", keys::single_file_module(layer)));
    let names: Vec<String> = native.chain(layers.iter().map(|layer| format!("{layer}.weight"))).collect();
    lora.resolve(names.iter().map(String::as_str));
    let shapes: BTreeMap<String, Vec<usize>> = config.weights().into_iter().collect();
    for (name, layer) in std::mem::take(&mut lora.layers) {
        let mut add = |renamed: String, layer: Layer| {
            // A layer that the transformer lacks is refused with all others like it.
            if let Some([rows, width]) = shapes.get(&format!("{renamed}.weight")).map(Vec::as_slice)
                && (layer.up.shape().first(), layer.down.shape().get(1)) != (Some(rows), Some(width))
            {
                let (up, down) = (layer.up.shape(), layer.down.shape());
                let problem = format!(
                    "the layer `{renamed}` has a matrix of [{rows}, {width}], found B of {up:?} and A of {down:?}; is \
                     the LoRA for another model?"
                );
                return Err(Error::bad_file(path, problem));
            }
            match lora.layers.insert(renamed, layer) {
                None => Ok(()),
                Some(_) => Err(Error::bad_file(path, format!("the layer `{name}` stands in it under two names"))),
            }
        };
        match keys::checkpoint_module(&name) {
            Module::One(renamed) => add(renamed, layer)?,
            Module::Fused(renamed) => {
                let parts = divided(&layer).ok_or_else(|| {
                    let (up, down) = (layer.up.shape(), layer.down.shape());
                    let problem = format!(
                        "the layer `{name}` is q, k and v in one: expected a matrix B of [{}, {}], found {up:?} with A \
                         of {down:?}; is the LoRA for another model?",
                        PROJECTIONS.len() * config.dim,
                        layer.rank()
                    );
                    Error::bad_file(path, problem)
                })??;
                for (renamed, part) in renamed.into_iter().zip(parts) {
                    add(renamed, part)?;
                }
            }
        }
    }
    Ok(())
}
