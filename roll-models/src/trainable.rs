//! The trained part of a network, and the initial values of adapters.

use roll_backends::layers::{lora_a, lora_b};
use roll_core::{Error, Noise, ParameterSpec, Purpose, Result};

/// The trained part of a network.
#[derive(Clone, Debug, PartialEq)]
pub enum Trainable {
    /// Nothing.
    Frozen,
    /// Low-rank adapters on the linear layers whose name ends in one of `targets`.
    Lora {
        /// Rank of the adapters.
        rank: usize,
        /// Scale numerator: the product is multiplied by `alpha / rank`.
        alpha: f64,
        /// Endings of layer names: `q`, `ffn.0`.
        targets: Vec<String>,
    },
    /// Every weight.
    Full,
}

/// Names, shapes and initial values of adapters on those of `weights` whose layer's name ends in one of `targets`: A
/// uniform in +-1/sqrt(in) as in PEFT, B zero. `examples` names layers for the error about an unknown target.
pub fn lora_parameters(
    weights: Vec<(String, Vec<usize>)>,
    rank: usize,
    targets: &[String],
    noise: &Noise,
    examples: &str,
) -> Result<(Vec<ParameterSpec>, Vec<Vec<f32>>)> {
    if rank == 0 {
        return Err(Error::config("lora_rank", "must be at least 1"));
    }
    let layers: Vec<_> = weights
        .into_iter()
        .filter_map(|(name, shape)| Some((name.strip_suffix(".weight")?.to_string(), shape)))
        .filter(|(_, shape)| shape.len() == 2)
        .collect();
    let matches = |name: &str, target: &str| name == target || name.ends_with(&format!(".{target}"));
    if let Some(target) = targets.iter().find(|t| !layers.iter().any(|(name, _)| matches(name, t))) {
        let problem = format!("no linear layer is called `{target}`; {examples}");
        return Err(Error::config("lora_target_modules", problem));
    }
    let (mut specs, mut values) = (Vec::new(), Vec::new());
    for (name, shape) in layers.iter().filter(|(name, _)| targets.iter().any(|t| matches(name, t))) {
        let (out, input) = (shape[0], shape[1]);
        let bound = 1.0 / (input as f32).sqrt();
        let mut draws = noise.uniform(Purpose::Parameters, 0, specs.len() as u64);
        values.push((0..rank * input).map(|_| draws() * bound).collect());
        values.push(vec![0.0; out * rank]);
        specs.push(ParameterSpec { name: lora_a(name), shape: vec![rank, input] });
        specs.push(ParameterSpec { name: lora_b(name), shape: vec![out, rank] });
    }
    Ok((specs, values))
}
