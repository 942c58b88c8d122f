//! Which parameters of a network are trained ([`Trainable`]), and the initial values of new adapters.

use std::collections::BTreeMap;

use roll_backends::Memory;
use roll_backends::layers::{lora_a, lora_b};
use roll_core::{Error, IdleKeys, Noise, ParameterSpec, Purpose, Result, When};

/// Options of models with adapters (`wan2_2`, `causal_lm`, `qwen_vl`) that have no effect if another option has a
/// certain value.
pub const IDLE_KEYS: &[IdleKeys] = &[
    IdleKeys {
        keys: &["model.lora_alpha", "model.lora_target_modules"],
        when: When::Is("model.lora_rank", &["0"]),
        because: "with `model.lora_rank: 0` every weight is trained",
    },
    IdleKeys {
        keys: &["model.use_gradient_checkpointing"],
        when: When::Is("model.use_gradient_checkpointing_offload", &["true"]),
        because: "`model.use_gradient_checkpointing_offload: true` recomputes as well",
    },
];

/// What a recorded pass keeps for its pullback, by the options `use_gradient_checkpointing` and
/// `use_gradient_checkpointing_offload`.
pub fn kept_for_pullback(use_gradient_checkpointing: bool, use_gradient_checkpointing_offload: bool) -> Memory {
    match (use_gradient_checkpointing, use_gradient_checkpointing_offload) {
        (_, true) => Memory::Offload,
        (true, false) => Memory::Recompute,
        (false, false) => Memory::Hold,
    }
}

/// The trained part of a network.
#[derive(Clone, Debug, PartialEq)]
pub enum Trainable {
    /// No weight.
    Frozen,
    /// Low-rank adapters on the linear layers whose name ends in one of `targets`.
    Lora {
        /// Rank of the adapters.
        rank: usize,
        /// Numerator of the scale: the product B A is multiplied by `alpha / rank`.
        alpha: f64,
        /// Endings of the names of the adapted layers: `q`, `ffn.0`.
        targets: Vec<String>,
    },
    /// Low-rank adapters on exactly these layers, as an adapter file has them.
    Layers {
        /// Rank of each layer's adapter, by the name of the layer.
        ranks: BTreeMap<String, usize>,
        /// Scale of the product B A: `alpha / rank`.
        scale: f64,
    },
    /// Every weight.
    Full,
}

impl Trainable {
    /// The scale `alpha / rank` of adapters; 1 without adapters.
    pub fn lora_scale(&self) -> f64 {
        match self {
            Self::Lora { rank, alpha, .. } => alpha / *rank as f64,
            Self::Layers { scale, .. } => *scale,
            Self::Frozen | Self::Full => 1.0,
        }
    }

    /// The rank of the adapter of the linear layer `layer`; `None` if the layer has no adapter.
    fn rank_of(&self, layer: &str) -> Option<usize> {
        match self {
            Self::Lora { rank, targets, .. } => targets.iter().any(|target| is_target(layer, target)).then_some(*rank),
            Self::Layers { ranks, .. } => ranks.get(layer).copied(),
            Self::Frozen | Self::Full => None,
        }
    }

    /// Fails if the rank is 0, or if an adapter is requested for a layer that is not in `layers` (pairs of name and
    /// shape). The error quotes `examples`, which names existing layers.
    fn check_layers(&self, layers: &[(String, Vec<usize>)], examples: &str) -> Result<()> {
        match self {
            Self::Lora { rank: 0, .. } => Err(Error::config("lora_rank", "must be at least 1")),
            Self::Lora { targets, .. } => {
                let has_no_layer = |target: &&String| !layers.iter().any(|(name, _)| is_target(name, target));
                let Some(target) = targets.iter().find(has_no_layer) else { return Ok(()) };
                let problem = format!("no linear layer is called `{target}`; {examples}");
                Err(Error::config("lora_target_modules", problem))
            }
            Self::Layers { ranks, .. } => {
                let is_missing = |layer: &&String| !layers.iter().any(|(name, _)| name == *layer);
                let Some(layer) = ranks.keys().find(is_missing) else { return Ok(()) };
                let problem =
                    format!("the adapter has the layer `{layer}`, but the model has no layer of that name; {examples}");
                Err(Error::config("lora_checkpoint", problem))
            }
            Self::Frozen | Self::Full => Ok(()),
        }
    }
}

/// Whether a layer's name is `target` or ends in `.target`.
pub fn is_target(layer: &str, target: &str) -> bool {
    layer.strip_suffix(target).is_some_and(|head| head.is_empty() || head.ends_with('.'))
}

/// Fails unless `alpha` is finite and above 0. With 0, every gradient of the adapters would stay 0.
pub fn check_alpha(alpha: Option<f64>) -> Result<()> {
    match alpha {
        Some(alpha) if !(alpha.is_finite() && alpha > 0.0) => {
            Err(Error::config("model.lora_alpha", format!("expected a number above 0, found {alpha}")))
        }
        _ => Ok(()),
    }
}

/// Fails if the rank exceeds both lengths of a layer's `shape`. Such a rank is a mistake that could exhaust the memory
/// before it is noticed.
fn check_rank(rank: usize, shape: &[usize]) -> Result<()> {
    match shape.iter().max() {
        Some(width) if rank > *width => {
            let problem = format!("expected at most {width}, the width of a layer of {shape:?}; found {rank}");
            Err(Error::config("lora_rank", problem))
        }
        _ => Ok(()),
    }
}

/// Returns names and shapes, then the initial values, of the adapters that `trainable` requests on the linear layers
/// among `weights` (pairs of name and shape). Matrix A `[rank, in]` is uniform in +-1/sqrt(in), as in PEFT. Matrix B
/// `[out, rank]` is zero.
///
/// Fails if a target matches no layer; the error quotes `examples`, which names existing layers.
pub fn lora_parameters(
    weights: Vec<(String, Vec<usize>)>,
    trainable: &Trainable,
    noise: &Noise,
    examples: &str,
) -> Result<(Vec<ParameterSpec>, Vec<Vec<f32>>)> {
    let layers: Vec<_> = weights
        .into_iter()
        .filter_map(|(name, shape)| Some((name.strip_suffix(".weight")?.to_string(), shape)))
        .filter(|(_, shape)| shape.len() == 2)
        .collect();
    trainable.check_layers(&layers, examples)?;
    let (mut specs, mut values) = (Vec::new(), Vec::new());
    for (name, shape) in &layers {
        let Some(rank) = trainable.rank_of(name) else { continue };
        // The ranks of an adapter file need no check, because its tensors have them.
        if let Trainable::Lora { .. } = trainable {
            check_rank(rank, shape)?;
        }
        let (out, input) = (shape[0], shape[1]);
        let bound = 1.0 / (input as f32).sqrt();
        // Each layer has a stream of random numbers of its own, numbered by the parameters before the layer.
        let mut draws = noise.uniform(Purpose::Parameters, 0, specs.len() as u64);
        values.push((0..rank * input).map(|_| draws() * bound).collect());
        values.push(vec![0.0; out * rank]);
        specs.push(ParameterSpec { name: lora_a(name), shape: vec![rank, input] });
        specs.push(ParameterSpec { name: lora_b(name), shape: vec![out, rank] });
    }
    Ok((specs, values))
}
