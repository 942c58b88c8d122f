//! Peak memory of a rollout beyond the weights, measured and as `Rollout::bytes` counts it: a random network of the
//! shape of SmolLM2-135M (30 layers of width 576, 9 heads, 3 of keys and values, vocabulary 49,152), f32.
//!
//! ```sh
//! cargo run --release -p roll-models --example rollout_memory -- [ROWS [PROMPT_TOKENS [NEW_TOKENS [GROUP_SIZE
//! [LAYERS]]]]]
//! ```
//!
//! 64 rows with 1984 tokens of prompts and 64 new ones in groups of 8, unless given. Memory is in proportion to the
//! layers, time too: fewer of them are a quick check.

use burn::tensor::DType;
use roll_core::{Error, LanguageModel, Noise, Purpose, Result, Sampling, StateDict, Tensor};
use roll_models::causal_lm::{CausalLm, LmConfig, Network, Rollout};

const MIB: f64 = (1 << 20) as f64;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default: usize| arguments.next().and_then(|text| text.parse().ok()).unwrap_or(default).max(1);
    let (rows, prompt_tokens, new_tokens, group, layers) =
        (number(64), number(1984), number(64), number(8), number(30));
    let json = serde_json::json!({
        "model_type": "llama", "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": layers, "num_attention_heads": 9, "num_key_value_heads": 3, "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0, "tie_word_embeddings": true, "max_position_embeddings": 8192,
    });
    let config = LmConfig::parse(json.to_string().as_bytes()).map_err(Error::Misuse)?;
    let mut model = CausalLm::new(network(config.clone())?, None, None)?;
    let prompts: Vec<Vec<u32>> = (0..rows)
        .map(|row| (0..prompt_tokens).map(|i| ((i * 31 + row / group * 1009 + 17) % 49_000) as u32).collect())
        .collect();
    // Writing 5 there resets the peak, so that what follows is the rollout alone.
    std::fs::write("/proc/self/clear_refs", "5").map_err(Error::file("write", "/proc/self/clear_refs"))?;
    let (before, begun) = (status("VmRSS")?, std::time::Instant::now());
    let sampling = Sampling { temperature: 1.0, seed: 1, ..Sampling::greedy(new_tokens) };
    let made = model.generate(&prompts, &sampling)?;
    let (peak, seconds) = (status("VmHWM")? - before, begun.elapsed().as_secs_f64());
    let tokens: usize = made.iter().map(|generation| generation.tokens.len()).sum();
    let rollout = Rollout { rows, prompts: rows.div_ceil(group), prompt_tokens, new_tokens };
    let counted = rollout.bytes(&config, 4);
    println!(
        "{rows} rows of {prompt_tokens} + {new_tokens} tokens, {} prompts, {layers} layers: {tokens} tokens in {seconds:.1} s\n\
         weights and process {before:.0} MiB, rollout {peak:.0} MiB more; counted {:.0} MiB (keys and values {:.0}, a \
         layer that moves {:.0}, a pass over prompts {:.0}, logits {:.0}): measured / counted {:.2}",
        rollout.prompts,
        counted.peak() as f64 / MIB,
        counted.keys_values as f64 / MIB,
        counted.moving as f64 / MIB,
        counted.pass as f64 / MIB,
        counted.logits as f64 / MIB,
        peak * MIB / counted.peak() as f64,
    );
    Ok(())
}

fn network(config: LmConfig) -> Result<Network> {
    let noise = Noise::new(0);
    let mut weights = StateDict::new();
    for (i, (name, shape)) in config.weights().into_iter().enumerate() {
        let values = noise.normal(Purpose::Synthetic, 0, i as u64, &shape)?.to_f32_vec();
        weights.insert(name, Tensor::new(values.into_iter().map(|v| v * 0.03).collect(), shape)?);
    }
    Network::new(config, &weights, DType::F32, &roll_backends::device("flex")?)
}

/// A line of /proc/self/status, in MiB.
fn status(key: &str) -> Result<f64> {
    let path = "/proc/self/status";
    let text = std::fs::read_to_string(path).map_err(Error::file("read", path))?;
    let line = text.lines().find(|l| l.starts_with(key));
    let kib = line.and_then(|l| l.split_whitespace().nth(1)).and_then(|v| v.parse::<f64>().ok());
    kib.map(|k| k / 1024.0).ok_or_else(|| Error::bad_file(path, format!("no line {key}")))
}
