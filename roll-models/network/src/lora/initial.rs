//! The adapter with which a network begins, made from adapter files (`lora_checkpoint`): ranks, layers and scale come
//! from the files and must not contradict the configuration.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use roll_core::{Error, Result, StateDict, Tensor};

use crate::trainable::{Trainable, is_target};

use super::error::not_in_base;
use super::merge::{lacks_image_branch, warn_of_image_branch};
use super::sources::{AdapterWeights, OpenedAdapter};
use super::write::scaled_to_f32;
use super::{Layer, Lora, is_same_alpha};

/// Greatest relative difference at which two scales count as equal: `alpha` is f32 in a file.
const SCALE_TOLERANCE: f64 = 1e-6;

/// The configuration's keys about adapters. `None` leaves the value to the file.
#[derive(Clone, Debug, Default)]
pub struct LoraRequest {
    /// `lora_rank`; 0 trains every weight.
    pub rank: Option<usize>,
    /// `lora_alpha`.
    pub alpha: Option<f64>,
    /// `lora_target_modules`.
    pub targets: Option<Vec<String>>,
}

/// The trained part of one network, and its initial values.
#[derive(Clone, Debug)]
pub struct InitialAdapter {
    /// [`Trainable::Layers`], or [`Trainable::Full`] if the file has all weights.
    pub trainable: Trainable,
    /// Values of the parameters by name.
    pub parameters: StateDict,
}

impl InitialAdapter {
    /// Adds up one or several adapters of one network, which has these `linear_layers`. Fails if the configuration
    /// requests another rank, alpha or set of layers than the files have.
    pub fn new(adapters: Vec<OpenedAdapter>, request: &LoraRequest, linear_layers: &[String]) -> Result<Self> {
        let files: Vec<String> = adapters.iter().map(|adapter| adapter.path.display().to_string()).collect();
        let files = files.join(", ");
        let has_several = adapters.len() > 1;
        let names: Vec<String> = linear_layers.iter().map(|layer| format!("{layer}.weight")).collect();
        let mut loras = Vec::new();
        for OpenedAdapter { path, strength, weights, .. } in adapters {
            match weights {
                AdapterWeights::Lora(mut lora) => {
                    lora.resolve(names.iter().map(String::as_str));
                    loras.push((checked(lora, &path, linear_layers)?, strength, path));
                }
                AdapterWeights::Full(_) if has_several || strength != 1.0 => {
                    let problem = "holds all weights of a network: it can be used alone, and whole";
                    return Err(Error::bad_file(path, problem));
                }
                AdapterWeights::Full(parameters) => {
                    if let Some(rank) = request.rank.filter(|rank| *rank > 0) {
                        let problem = format!(
                            "{rank} is requested, and {files} holds all weights of a network: leave the key out"
                        );
                        return Err(Error::config("lora_rank", problem));
                    }
                    if request.rank.is_none() {
                        tracing::warn!(
                            "{files} holds all weights of a network and no LoRA: they replace those of the base, and a \
                             run trains every weight; to train a LoRA on them, make them the base"
                        );
                    }
                    return Ok(Self { trainable: Trainable::Full, parameters });
                }
            }
        }
        let initial = match loras.as_slice() {
            // One adapter of strength 1.
            [(lora, 1.0, _)] => from_one(lora),
            _ => sum_of(&loras)?,
        };
        if let Trainable::Layers { ranks, scale } = &initial.trainable {
            check_request(ranks, *scale, request, linear_layers, &files)?;
        }
        Ok(initial)
    }

    /// If this is a whole network, fails unless it has every tensor of `weights` (pairs of name and shape).
    pub fn check_weights(&self, weights: &[(String, Vec<usize>)]) -> Result<()> {
        if self.trainable != Trainable::Full {
            return Ok(());
        }
        let misfit = |problem: String| Error::config("lora_checkpoint", format!("holds another network: {problem}"));
        for (name, shape) in weights {
            match self.parameters.get(name).map(Tensor::shape) {
                Some(found) if found == shape => {}
                Some(found) => return Err(misfit(format!("expected `{name}` of shape {shape:?}, found {found:?}"))),
                None => return Err(misfit(format!("the tensor `{name}` is missing"))),
            }
        }
        Ok(())
    }
}

/// Returns `lora` without the layers of an image encoder's branch, if the network does not have this branch. Fails on
/// other layers that are not in `linear_layers`, and on parts that cannot be trained or added up: whole differences,
/// biases, adapters of convolutions.
fn checked(mut lora: Lora, path: &Path, linear_layers: &[String]) -> Result<Lora> {
    let refuse = |what: &str, layer: &str| {
        Err(Error::bad_file(
            path,
            format!("has {what} (layer `{layer}`): put it into the base with `roll merge-lora`, and use that base"),
        ))
    };
    if let Some(layer) = lora.differences.keys().next() {
        return refuse("whole differences of parameters beside its low-rank layers", layer);
    }
    if let Some((layer, _)) = lora.layers.iter().find(|(_, layer)| layer.bias.is_some()) {
        return refuse("biases", layer);
    }
    if let Some((layer, _)) = lora.layers.iter().find(|(_, layer)| layer.down.shape().len() != 2) {
        return refuse("adapters of convolutions", layer);
    }
    let is_linear = |layer: &str| linear_layers.iter().any(|name| name == layer);
    let missing: Vec<String> = lora.layers.keys().filter(|layer| !is_linear(layer)).cloned().collect();
    let (image_layers, other_layers): (Vec<&str>, Vec<&str>) =
        missing.iter().map(String::as_str).partition(|layer| lacks_image_branch(layer, is_linear));
    if !other_layers.is_empty() {
        let problem = format!("{}: {}", path.display(), not_in_base(&other_layers, lora.layers.len()));
        return Err(Error::config("lora_checkpoint", problem));
    }
    if !image_layers.is_empty() {
        warn_of_image_branch(path, &image_layers);
        lora.layers.retain(|layer, _| is_linear(layer));
    }
    if lora.layers.is_empty() {
        return Err(Error::bad_file(path, "has no low-rank layer"));
    }
    Ok(lora)
}

/// Uses one adapter at its full strength. If the scales of its layers differ, they are multiplied into the matrices B
/// and the common scale is 1.
fn from_one(lora: &Lora) -> InitialAdapter {
    let mut scales = lora.layers.values().map(Layer::scale);
    let first = scales.next().unwrap_or(1.0);
    let common_scale = if scales.all(|scale| scale == first) { first } else { 1.0 };
    let mut ranks = BTreeMap::new();
    let mut parameters = StateDict::new();
    for (name, layer) in &lora.layers {
        let factor = layer.scale() / common_scale;
        let up = if factor == 1.0 { layer.up.clone() } else { scaled_to_f32(&layer.up, factor) };
        ranks.insert(name.clone(), layer.rank());
        parameters.insert(format!("{name}.lora_A.weight"), layer.down.clone());
        parameters.insert(format!("{name}.lora_B.weight"), up);
    }
    InitialAdapter { trainable: Trainable::Layers { ranks, scale: common_scale }, parameters }
}

/// Concatenates several adapters (with their strengths and paths) into one whose rank is the sum of their ranks and
/// whose scale is 1. Strengths and scales are multiplied into B.
fn sum_of(loras: &[(Lora, f64, PathBuf)]) -> Result<InitialAdapter> {
    // The layers of each name, with the factor of B and the path of the file.
    let mut layers_by_name: BTreeMap<&str, Vec<(&Layer, f64, &Path)>> = BTreeMap::new();
    for (lora, strength, path) in loras {
        for (name, layer) in &lora.layers {
            layers_by_name.entry(name).or_default().push((layer, strength * layer.scale(), path));
        }
    }
    let mut ranks = BTreeMap::new();
    let mut parameters = StateDict::new();
    for (name, layers) in layers_by_name {
        let [(first, ..), ..] = layers.as_slice() else { continue };
        let [out, input] = shape_of(first);
        if let Some((layer, _, path)) = layers.iter().find(|(layer, ..)| shape_of(layer) != [out, input]) {
            let found = shape_of(layer);
            return Err(Error::bad_file(
                *path,
                format!("layer `{name}`: expected one of [{out}, {input}], as in the other file; found {found:?}"),
            ));
        }
        // The rows of all A below each other, the columns of all B beside each other.
        let rank: usize = layers.iter().map(|(layer, ..)| layer.rank()).sum();
        let mut down = Vec::with_capacity(rank * input);
        let mut up = vec![0.0; out * rank];
        let mut column = 0;
        for (layer, factor, _) in layers {
            down.extend(layer.down.to_f32_vec());
            let layer_up = scaled_to_f32(&layer.up, factor).to_f32_vec();
            for (row, values) in up.chunks_exact_mut(rank).zip(layer_up.chunks_exact(layer.rank())) {
                row[column..column + layer.rank()].copy_from_slice(values);
            }
            column += layer.rank();
        }
        ranks.insert(name.to_string(), rank);
        parameters.insert(format!("{name}.lora_A.weight"), Tensor::new(down, [rank, input])?);
        parameters.insert(format!("{name}.lora_B.weight"), Tensor::new(up, [out, rank])?);
    }
    Ok(InitialAdapter { trainable: Trainable::Layers { ranks, scale: 1.0 }, parameters })
}

/// The shape `[out, in]` of the linear layer that `layer` is added to.
fn shape_of(layer: &Layer) -> [usize; 2] {
    [layer.up.shape()[0], layer.down.shape()[1]]
}

/// Fails if the configuration requests another rank, alpha or set of layers than the files have; the error names both
/// values.
fn check_request(
    ranks: &BTreeMap<String, usize>,
    scale: f64,
    request: &LoraRequest,
    linear_layers: &[String],
    files: &str,
) -> Result<()> {
    let differs = |key: &str, requested: String, found: String| {
        Err(Error::config(
            key,
            format!("{requested} is requested, and {files} has {found}: leave the key out to follow the file"),
        ))
    };
    let mut found_ranks: Vec<usize> = ranks.values().copied().collect();
    found_ranks.sort_unstable();
    found_ranks.dedup();
    match request.rank {
        Some(0) => {
            let problem = format!(
                "0 trains every weight, and {files} is a LoRA: put it into the base with `roll merge-lora`, or leave \
                 the key out to train the LoRA on"
            );
            return Err(Error::config("lora_rank", problem));
        }
        Some(rank) if found_ranks != [rank] => {
            let found: Vec<String> = found_ranks.iter().map(usize::to_string).collect();
            return differs("lora_rank", format!("rank {rank}"), format!("rank {}", found.join(", ")));
        }
        _ => {}
    }
    if let Some(alpha) = request.alpha {
        let found_alphas: Vec<f64> = found_ranks.iter().map(|rank| scale * *rank as f64).collect();
        if found_alphas.iter().any(|found| !is_same_alpha(*found, alpha)) {
            let found: Vec<String> = found_alphas.iter().map(f64::to_string).collect();
            return differs("lora_alpha", format!("alpha {alpha}"), format!("alpha {}", found.join(", ")));
        }
    }
    if let Some(targets) = &request.targets {
        let is_requested = |layer: &str| targets.iter().any(|target| is_target(layer, target));
        let not_requested = ranks.keys().find(|layer| !is_requested(layer));
        let missing = linear_layers.iter().find(|layer| is_requested(layer) && !ranks.contains_key(*layer));
        let example = match (not_requested, missing) {
            (Some(layer), _) => format!("`{layer}` too"),
            (_, Some(layer)) => format!("no `{layer}`"),
            _ => return Ok(()),
        };
        return differs("lora_target_modules", format!("`{}`", targets.join(",")), example);
    }
    Ok(())
}

/// Converts an adapter to the trained parameters `LAYER.lora_A.weight` and `LAYER.lora_B.weight` of a network whose
/// adapters have this `scale`.
///
/// # Errors
/// Fails if the scale of a layer is not `scale`, and if the adapter contains more than low-rank layers.
pub fn trained_parameters(lora: Lora, scale: f64) -> Result<StateDict> {
    if let Some(layer) = lora.differences.keys().next() {
        return Err(Error::Unsupported(format!(
            "the LoRA file changes whole parameters beside its low-rank layers (`{layer}.diff`): they cannot be trained \
             on; put it into the base with `roll merge-lora`"
        )));
    }
    let mut parameters = StateDict::new();
    for (layer_name, layer) in lora.layers {
        let found = layer.scale();
        if (found - scale).abs() > SCALE_TOLERANCE * scale.abs() {
            return Err(Error::Unsupported(format!(
                "the layer `{layer_name}` of the LoRA file has alpha / rank = {found}, this configuration has {scale}: \
                 set `lora_alpha` to match"
            )));
        }
        if let Some(bias) = layer.bias {
            parameters.insert(format!("{layer_name}.lora_B.bias"), bias);
        }
        parameters.insert(format!("{layer_name}.lora_A.weight"), layer.down);
        parameters.insert(format!("{layer_name}.lora_B.weight"), layer.up);
    }
    Ok(parameters)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn layer(rank: usize, value: f32, alpha: Option<f64>) -> Layer {
        Layer { down: Tensor::full([rank, 3], value), up: Tensor::full([2, rank], 1.0), alpha, bias: None }
    }

    fn opened(layers: &[(&str, Layer)], strength: f64) -> OpenedAdapter {
        let layers = layers.iter().map(|(name, layer)| (name.to_string(), layer.clone())).collect();
        OpenedAdapter {
            path: "a.safetensors".into(),
            expert: None,
            expert_from_file_name: false,
            strength,
            weights: AdapterWeights::Lora(Lora { layers, ..Lora::default() }),
            header: BTreeMap::new(),
        }
    }

    fn linear() -> [String; 2] {
        ["x.q".to_string(), "x.k".into()]
    }

    /// The product `scale * B A` of a layer.
    fn product(start: &InitialAdapter, layer: &str) -> Vec<f32> {
        let (scale, parameters) = (start.trainable.lora_scale(), &start.parameters);
        let (a, b) = (&parameters[&format!("{layer}.lora_A.weight")], &parameters[&format!("{layer}.lora_B.weight")]);
        let (rank, input) = (a.shape()[0], a.shape()[1]);
        let (a, b) = (a.to_f32_vec(), b.to_f32_vec());
        let sum = |i: usize, j: usize| (0..rank).map(|r| b[i * rank + r] * a[r * input + j]).sum::<f32>();
        (0..b.len() / rank)
            .flat_map(|i| (0..input).map(move |j| (i, j)))
            .map(|(i, j)| scale as f32 * sum(i, j))
            .collect()
    }

    #[test]
    fn adapters_are_added_up_with_their_strengths() {
        let first = opened(&[("x.q", layer(2, 0.5, Some(4.0))), ("x.k", layer(1, 3.0, None))], 0.5);
        let second = opened(&[("x.q", layer(3, 0.25, None))], -2.0);
        let start = InitialAdapter::new(vec![first, second], &LoraRequest::default(), &linear()).unwrap();
        // x.q: 0.5 * 2 * (2 * 0.5) - 2 * (3 * 0.25); x.k: 0.5 * 3.
        assert_eq!(product(&start, "x.q"), [-0.5; 6]);
        assert_eq!(product(&start, "x.k"), [1.5; 6]);
        let ranks = [("x.k".to_string(), 1), ("x.q".into(), 5)].into();
        assert_eq!(start.trainable, Trainable::Layers { ranks, scale: 1.0 });
    }

    #[test]
    fn one_adapter_keeps_its_scale_and_ranks() {
        let start = |layers: &[(&str, Layer)]| {
            InitialAdapter::new(vec![opened(layers, 1.0)], &LoraRequest::default(), &linear()).unwrap()
        };
        let same = start(&[("x.q", layer(2, 1.0, Some(4.0))), ("x.k", layer(4, 1.0, Some(8.0)))]);
        assert_eq!(same.trainable.lora_scale(), 2.0);
        // Different scales are multiplied into B.
        let mixed = start(&[("x.q", layer(2, 1.0, Some(4.0))), ("x.k", layer(4, 1.0, Some(2.0)))]);
        assert_eq!(mixed.trainable.lora_scale(), 1.0);
        assert_eq!((product(&mixed, "x.q"), product(&mixed, "x.k")), (vec![4.0; 6], vec![2.0; 6]));
    }

    #[test]
    fn contradictions_name_the_configuration_and_the_file() {
        let linear = linear();
        let targets = |list: &str| Some(list.split(',').map(String::from).collect::<Vec<_>>());
        let message = |request: LoraRequest| {
            let adapter = opened(&[("x.q", layer(2, 1.0, Some(4.0)))], 1.0);
            InitialAdapter::new(vec![adapter], &request, &linear).map_err(|e| e.to_string()).err().unwrap_or_default()
        };
        assert_eq!(message(LoraRequest { rank: Some(2), alpha: Some(4.0), targets: targets("q") }), "");
        let request = LoraRequest::default;
        let rank = message(LoraRequest { rank: Some(8), ..request() });
        assert!(rank.contains("`lora_rank`") && rank.contains("rank 8") && rank.contains("rank 2"), "{rank}");
        let alpha = message(LoraRequest { alpha: Some(2.0), ..request() });
        assert!(alpha.contains("alpha 2") && alpha.contains("alpha 4"), "{alpha}");
        assert!(message(LoraRequest { targets: targets("q,k"), ..request() }).contains("has no `x.k`"));
        assert!(message(LoraRequest { targets: targets("k"), ..request() }).contains("has `x.q` too"));
        assert!(message(LoraRequest { rank: Some(0), ..request() }).contains("merge-lora"));
    }

    #[test]
    fn only_layers_of_an_image_encoder_that_the_network_does_not_have_are_left_out() {
        let names = ["blocks.0.cross_attn.k", "blocks.0.self_attn.q"].map(String::from);
        let start = |layers: &[&str], linear: &[String]| {
            let layers: Vec<(&str, Layer)> = layers.iter().map(|name| (*name, layer(2, 1.0, None))).collect();
            let initial = InitialAdapter::new(vec![opened(&layers, 1.0)], &LoraRequest::default(), linear);
            initial.map(|initial| initial.parameters.len()).map_err(|e| e.to_string())
        };
        let (q, image) = ("blocks.0.self_attn.q", "blocks.0.cross_attn.k_img");
        assert_eq!(start(&[q, image, "img_emb.proj.1"], &names), Ok(2));
        for (name, words) in [
            ("blocks.7.cross_attn.k_img", "another kind or size"),
            ("blocks.0.cross_attn.q_img", "another model"),
            ("model.layers.0.self_attn.q_proj", "a language model"),
        ] {
            let refused = start(&[q, name], &names).unwrap_err();
            let expected = format!("1 of 2 layers of the LoRA are not in the base: `{name}`");
            assert!(refused.contains(&expected) && refused.contains(words), "{refused}");
        }
        let with_branch = [&names[..], &[image.to_string()]].concat();
        assert!(start(&[q, "img_emb.proj.1"], &with_branch).unwrap_err().contains("img_emb.proj.1"));
    }
}
