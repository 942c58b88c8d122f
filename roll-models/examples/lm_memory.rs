//! Peak memory of `evaluate` and its pull at the vocabulary of Qwen2.5 (151,936), beyond the weights, for a number of
//! tokens. All logits at once would take 593 MiB per 1024 tokens, and as much again for their gradient.
//!
//!     cargo run --release -p roll-models --example lm_memory -- 512
//!     cargo run --release -p roll-models --example lm_memory -- 4096

use burn::tensor::DType;
use roll_core::{Adapter, Error, Grad, Noise, Purpose, Result, StateDict, Tensor};
use roll_models::causal_lm::{LmConfig, Network};
use roll_models::trainable::Trainable;

const VOCABULARY: usize = 151_936;
/// Tokens of one sequence.
const LENGTH: usize = 256;

fn main() -> Result<()> {
    let tokens = std::env::args().nth(1).and_then(|a| a.parse::<usize>().ok()).unwrap_or(1024).max(LENGTH);
    let json = serde_json::json!({
        "model_type": "qwen2", "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": true,
    });
    let config = LmConfig::parse(json.to_string().as_bytes()).map_err(Error::Misuse)?;
    let noise = Noise::new(0);
    let device = roll_backends::device("flex")?;
    let mut weights = StateDict::new();
    for (i, (name, shape)) in config.weights().into_iter().enumerate() {
        let values = noise.normal(Purpose::Synthetic, 0, i as u64, &shape)?.to_f32_vec();
        weights.insert(name, Tensor::new(values.into_iter().map(|v| v * 0.05).collect(), shape)?);
    }
    let mut network = Network::new(config, &weights, DType::F32, &device)?;
    drop(weights);
    let targets = ["q_proj", "v_proj"].map(String::from).to_vec();
    network.train(&Trainable::Lora { rank: 8, alpha: 8.0, targets }, &noise, &StateDict::new())?;
    let rows = tokens / LENGTH;
    let mut draw = noise.uniform(Purpose::Synthetic, 1, 0);
    let ids = (0..rows * LENGTH).map(|_| ((draw() * 0.5 + 0.5) * (VOCABULARY - 1) as f32) as i64).collect::<Vec<_>>();
    let ids = Tensor::new(ids, [rows, LENGTH])?;
    let mask = Tensor::new(vec![1u8; rows * LENGTH], [rows, LENGTH])?;
    // Writing 5 there resets the peak, so that what follows is the evaluation alone.
    std::fs::write("/proc/self/clear_refs", "5").map_err(Error::file("write", "/proc/self/clear_refs"))?;
    let before = status("VmRSS")?;
    let start = std::time::Instant::now();
    let (stats, pullback) = network.evaluate(&ids, &mask, Adapter::On, Grad::Record)?;
    let forward = start.elapsed().as_secs_f64();
    if let Some(pullback) = pullback {
        let shape = [2, rows, LENGTH - 1];
        pullback.pull(&Tensor::full(shape, 1.0 / stats.log_probs.len() as f32))?;
    }
    let peak = status("VmHWM")?;
    println!(
        "{} tokens, vocabulary {VOCABULARY}: weights and process {before:.0} MiB, evaluate and pull {:.0} MiB more \
         (all logits: {:.0} MiB), {forward:.1} s and {:.1} s",
        rows * LENGTH,
        peak - before,
        (rows * LENGTH * VOCABULARY * 4) as f64 / f64::from(1 << 20),
        start.elapsed().as_secs_f64() - forward
    );
    Ok(())
}

/// A line of /proc/self/status, in MiB.
fn status(key: &str) -> Result<f64> {
    let path = "/proc/self/status";
    let text = std::fs::read_to_string(path).map_err(Error::file("read", path))?;
    let line = text.lines().find(|l| l.starts_with(key));
    let kib = line.and_then(|l| l.split_whitespace().nth(1)).and_then(|v| v.parse::<f64>().ok());
    kib.map(|k| k / 1024.0).ok_or_else(|| Error::bad_file(path, format!("no line {key}")))
}
