//! Seconds and bytes of an update of a language model with a large vocabulary, of whose tokens some are trained on.
//!
//! ```sh
//! cargo run --release --bin head_speed -- [WANTED [TOKENS [LAYERS [VOCABULARY]]]]
//! ```
//!
//! The network has the widths of Qwen2.5-0.5B, random weights in f32, and a LoRA of rank 16; a row has 256 tokens. Of
//! every 20 tokens, the last 20 x WANTED (0.15 by default) are trained on, as are the answers of an agent among what it
//! reads. `1` is what an update cost before the output layer worked on wanted tokens alone. Prints a line of JSON: the
//! seconds of a forward pass with its pullback, by the clock and of all cores, the least of three, and the bytes by which
//! the process grows in it.
//! `head_speed.py` runs it beside transformers.

use std::time::Instant;

use burn_tensor::DType;
use roll_backends::Memory;
use roll_causal_lm::{LmConfig, Network};
use roll_core::{Adapter, Error, Grad, Noise, ParameterSpec, Result, StateDict, Tensor};
use roll_network::trainable::Trainable;

const ROW: usize = 256;
const ROUNDS: usize = 3;
/// Tokens of a turn.
const TURN: usize = 20;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let wanted: f64 = arguments.next().and_then(|text| text.parse().ok()).unwrap_or(0.15);
    let mut number = |default: usize| arguments.next().and_then(|text| text.parse().ok()).unwrap_or(default);
    let (tokens, layers, vocabulary) = (number(1024), number(2), number(151_936));
    let network = network(layers, vocabulary)?;
    let shape = [tokens / ROW, ROW];
    let count = shape[0] * ROW;
    let is_wanted: Vec<u8> =
        (0..count).map(|i| u8::from((i % TURN) as f64 >= TURN as f64 * (1.0 - wanted) - 1e-9)).collect();
    let answers = is_wanted.iter().filter(|wanted| **wanted == 1).count();
    let ids: Vec<i64> = (0..count).map(|i| (i * 7919 + 13) as i64 % vocabulary as i64).collect();
    let (ids, mask) = (Tensor::new(ids, shape)?, Tensor::new(vec![1u8; count], shape)?);
    let wanted = Tensor::new(is_wanted, shape)?;
    let cotangent = Tensor::full([2, shape[0], ROW - 1], 1e-3);
    let parameters = network.parameters().ok_or_else(|| Error::Misuse("nothing is trained".into()))?;
    let mut gradient = vec![0.0; parameters.specs().iter().map(ParameterSpec::len).sum()];
    // The peak of the process so far is forgotten.
    let _ = std::fs::write("/proc/self/clear_refs", "5");
    let before = status("VmRSS");
    let [mut seconds, mut of_all_cores] = [f64::INFINITY; 2];
    for _ in 0..ROUNDS {
        let (begun, cpu) = (Instant::now(), cpu_seconds());
        let (_, pullback) = network.evaluate(&ids, &mask, &wanted, Adapter::On, Grad::Record)?;
        pullback.ok_or_else(|| Error::Misuse("no pullback".into()))?.pull(&cotangent)?;
        parameters.take_gradients(&mut gradient)?;
        seconds = seconds.min(begun.elapsed().as_secs_f64());
        of_all_cores = of_all_cores.min(cpu_seconds() - cpu);
    }
    println!(
        "{}",
        serde_json::json!({
            "tokens": count, "wanted": answers, "layers": layers, "vocabulary": vocabulary, "seconds": seconds,
            "cpu_seconds": of_all_cores, "bytes": status("VmHWM") - before, "threads": rayon::current_num_threads(),
        })
    );
    Ok(())
}

fn network(layers: usize, vocabulary: usize) -> Result<Network> {
    let config = serde_json::json!({
        "model_type": "qwen2", "vocab_size": vocabulary, "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": layers, "num_attention_heads": 14, "num_key_value_heads": 2, "rope_theta": 1e6,
        "tie_word_embeddings": true,
    });
    let config = LmConfig::parse(config.to_string().as_bytes()).map_err(Error::Misuse)?;
    let mut state = StateDict::new();
    let mut random = 1u64;
    for (name, shape) in config.weights() {
        let deviation = (1.0 / *shape.last().unwrap_or(&1) as f64).sqrt();
        // A linear congruential generator (Knuth's MMIX): uniform, of variance `deviation` squared.
        let mut draw = || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (((random >> 40) as f64 / f64::from(1u32 << 23) - 1.0) * 3f64.sqrt() * deviation) as f32
        };
        let values = (0..shape.iter().product()).map(|_| draw()).collect::<Vec<f32>>();
        state.insert(name, Tensor::new(values, shape)?);
    }
    let targets = config.linear_layers().split(',').map(Into::into).collect();
    let device = roll_backends::device("flex")?;
    let mut network = Network::new(config, &state, DType::F32, &device)?.with_memory(Memory::Hold);
    network.add_trainable(&Trainable::Lora { rank: 16, alpha: 16.0, targets }, &Noise::new(1), &StateDict::new())?;
    Ok(network)
}

/// Time that all threads of this process had on a processor, as Linux counts it in hundredths of a second.
fn cpu_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = text.rsplit(')').next().unwrap_or_default().split_whitespace();
    fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
}

/// Bytes of a line of `/proc/self/status`.
fn status(name: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let kilobytes = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    1024 * kilobytes.unwrap_or(0)
}
