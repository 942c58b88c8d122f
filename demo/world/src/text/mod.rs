//! `demo-world text`: a tokenizer whose vocabulary is that of the demo world's prompts, and a small UMT5 encoder
//! trained to classify their attributes.

mod loss;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use roll_backends::Resident;
use roll_core::{DType, Error, Noise, ParameterSpec, Purpose, Result, StateDict, Tensor};
use roll_wan::tokenizer::{PROMPT_TOKENS, Tokenizer, tokenizer_json};
use roll_wan::umt5::{Umt5, Umt5Config};
use roll_network::weights::save_safetensors;

use crate::face;
use crate::files;
use crate::training::pictures::unit_uniform;
use crate::training::{Plan, Trainer, gaussian};

/// File of the encoder below the output directory, with the name of Wan's releases.
pub const ENCODER: &str = "models_t5_umt5-xxl-enc-bf16.safetensors";
/// Directory of the tokenizer below the output directory, as in Wan's releases.
pub const TOKENIZER: &str = "google/umt5-xxl";

/// The unknown token.
const UNKNOWN: u32 = 2;
/// Fraction of tokens that are replaced by [`UNKNOWN`] in training, so that the embedding of a word does not depend on
/// its own token alone.
const HIDDEN: f32 = 0.1;
/// One in this many prompts is held out.
const HELD_OUT: usize = 5;
const SEED: u64 = 17;

/// A prompt and its attributes.
#[derive(Clone, Debug)]
pub struct Prompt {
    /// The text.
    pub text: String,
    /// Indices of its motion, expression, light and background.
    pub attributes: [usize; 4],
}

/// Returns the prompts of the demo world: training prompts and held-out prompts.
pub fn prompts() -> (Vec<Prompt>, Vec<Prompt>) {
    let all: Vec<_> = face::prompts().into_iter().map(|(text, attributes)| Prompt { text, attributes }).collect();
    let order = Noise::new(SEED).permutation(0, all.len());
    let (held_out, training): (Vec<_>, Vec<_>) =
        order.into_iter().enumerate().partition(|(place, _)| place.is_multiple_of(HELD_OUT));
    let pick = |places: Vec<(usize, usize)>| places.into_iter().map(|(_, i)| all[i].clone()).collect();
    (pick(training), pick(held_out))
}

/// Returns the number of values of each attribute.
pub fn classes(prompts: &[Prompt]) -> [usize; 4] {
    std::array::from_fn(|i| prompts.iter().map(|p| p.attributes[i] + 1).max().unwrap_or(1))
}

/// Makes the tokenizer, trains the encoder and writes both below `out`. `steps` overrides the number of updates.
pub fn train(steps: Option<u64>, out: &Path) -> Result<()> {
    let (training, held_out) = prompts();
    let everything = [training.clone(), held_out].concat();
    let words: BTreeSet<&str> =
        everything.iter().flat_map(|p| p.text.split([' ', ','])).filter(|word| !word.is_empty()).collect();
    let directory = out.join(TOKENIZER);
    files::write(&directory.join("tokenizer.json"), tokenizer_json(&Vec::from_iter(words)).as_bytes())?;
    let tokenizer = Tokenizer::load(&directory)?;
    let ids = training.iter().map(|p| tokenizer.encode(&p.text, PROMPT_TOKENS)).collect::<Result<Vec<_>>>()?;

    let device = roll_backends::device("flex")?;
    let config = Umt5Config {
        vocab: tokenizer.vocabulary(),
        dim: 64,
        attention_dim: 64,
        ffn_dim: 128,
        heads: 4,
        buckets: 32,
        layers: 2,
    };
    let plan = Plan {
        name: "text".into(),
        steps: steps.unwrap_or(300),
        parts: 2,
        batch: 16,
        learning_rate: 2e-3,
        warmup: 20,
        weight_decay: 1e-2,
        muon: None,
        report_every: 50,
    };
    let Plan { steps, parts, batch, .. } = plan;
    let classes = classes(&training);
    let specs = specs(&config, classes);
    let mut trainer = Trainer::new(plan, specs.clone(), initial_values(&specs, &config), &device)?;
    for step in 0..steps {
        let part = |part: u64| {
            let mut uniform = Noise::new(SEED).uniform(Purpose::Synthetic, step, part);
            let chosen = (0..batch).map(|_| {
                let i = (unit_uniform(&mut uniform) * training.len() as f32) as usize % training.len();
                let mut hide = |&id: &u32| if unit_uniform(&mut uniform) < HIDDEN { UNKNOWN } else { id };
                (ids[i].iter().map(&mut hide).collect(), training[i].attributes)
            });
            chosen.collect()
        };
        trainer.update((0..parts as u64).map(part).collect(), |samples: Vec<(Vec<u32>, [usize; 4])>, scope| {
            let snapshot = scope.trainable.ok_or_else(|| Error::Misuse("an encoder without parameters".into()))?;
            let encoder = Umt5::with_store(config.clone(), Arc::new(Resident::tracked(snapshot, scope.tape)));
            loss::attributes(&encoder, &samples, classes, scope, &device)
        })?;
    }
    let path = out.join(ENCODER);
    save_safetensors(&path, &exported(specs, trainer.values())?, &Default::default())?;
    println!("wrote {}", path.display());
    Ok(())
}

/// Returns the encoder's weights, and one linear classifier per attribute.
fn specs(config: &Umt5Config, classes: [usize; 4]) -> Vec<ParameterSpec> {
    let weights = config.weights().into_iter();
    let heads = classes.into_iter().enumerate().map(|(i, n)| (loss::head(i), vec![n, config.dim]));
    weights.chain(heads).map(|(name, shape)| ParameterSpec { name, shape }).collect()
}

fn initial_values(specs: &[ParameterSpec], config: &Umt5Config) -> Vec<f32> {
    let noise = Noise::new(SEED);
    let mut values = Vec::new();
    for (i, spec) in specs.iter().enumerate() {
        let fan_in = spec.shape.iter().skip(1).product::<usize>() as f32;
        let (centre, deviation) = match spec.name.as_str() {
            name if name.contains("norm") => (1.0, 0.0),
            name if name.contains("pos_embedding") => (0.0, 0.1),
            name if name.contains("token_embedding") => (0.0, 1.0),
            // T5 does not scale attention scores. The initial queries therefore contain the factor `1 / sqrt(head
            // dim)`.
            name if name.ends_with("attn.q.weight") => {
                (0.0, (fan_in * (config.attention_dim / config.heads) as f32).powf(-0.5))
            }
            _ => (0.0, fan_in.powf(-0.5)),
        };
        let mut uniform = noise.uniform(Purpose::Parameters, 0, i as u64);
        values.extend((0..spec.len()).map(|_| centre + deviation * gaussian(&mut uniform)));
    }
    values
}

/// Returns the encoder's weights in bf16, without the classifiers.
fn exported(specs: Vec<ParameterSpec>, mut values: &[f32]) -> Result<StateDict> {
    let mut state = StateDict::new();
    for spec in specs {
        let (own, rest) = values.split_at(spec.len());
        values = rest;
        if !loss::is_head(&spec.name) {
            state.insert(spec.name, Tensor::new(own.to_vec(), spec.shape)?.to_float(DType::Bf16)?);
        }
    }
    Ok(state)
}
