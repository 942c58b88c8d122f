//! Seconds of a vision-language network: the tower alone, a text with a clip, and its gradient at the pixels.
//!
//! ```sh
//! cargo run --release --bin vision_language -- MODEL [STEPS [HEIGHT [WIDTH [WORDS [BACKEND]]]]]
//! ```
//!
//! MODEL is the directory of a Qwen2-VL; weights and products are f32 on the CPU and bf16 on a GPU. A clip of STEPS time
//! steps (two frames each) of HEIGHT x WIDTH pixels stands before WORDS tokens of text. The state of the last token is
//! read. Nothing is recomputed in the backward pass. Prints a line of JSON: seconds by the clock and of all cores, the
//! least of three, and the state. `vision_language.py` writes a MODEL of random weights and runs PyTorch beside it.

use std::path::PathBuf;
use std::time::Instant;

use roll_core::{BuildContext, Error, Grad, Medium, Positions, Result, Tensor, VisionLanguageModel};
use roll_qwen_vl::{QwenVlOptions, open};
use serde_json::json;

const ROUNDS: usize = 3;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let model = arguments.next().ok_or_else(|| Error::Misuse("expected the directory of a model".into()))?;
    let mut number = |default: usize| arguments.next().and_then(|text| text.parse().ok()).unwrap_or(default);
    let (steps, height, width, words) = (number(1), number(336), number(588), number(128));
    let backend = arguments.next().unwrap_or_else(|| "flex".into());
    let options = QwenVlOptions {
        model_path: Some(PathBuf::from(model)),
        use_gradient_checkpointing: false,
        ..QwenVlOptions::default()
    };
    let mut network = open("model", &options, &BuildContext::new(backend))?;
    let facts = network.facts().clone();
    let shape = [steps * facts.patch_frames, 3, height, width];
    let squares = facts.tokens_of(&shape)?;
    let placeholders = std::iter::repeat_n(facts.video_token, squares);
    let mut tokens = vec![facts.vision_start];
    tokens.extend(placeholders);
    tokens.push(facts.vision_end);
    tokens.extend((0..words).map(|i| (i * 7919 % facts.vision_start as usize) as u32));
    let last = [tokens.len() - 1];
    let row = network.head_rows(&[1])?;

    let [mut tower, mut forward, mut both] = [[f64::INFINITY; 2]; 3];
    let mut state = Vec::new();
    for round in 0..ROUNDS {
        // Each round has pixels of its own, because the network keeps the features of those that it read last.
        let media = [Medium::new(pixels(shape, round)?)];
        time(&mut tower, || network.features(&media).map(|_| ()))?;
        time(&mut forward, || {
            let read = network.read(&tokens, &media, Positions::Multimodal, &last, Grad::Skip)?;
            state = read.0.f32s()?.to_vec();
            Ok(())
        })?;
        time(&mut both, || {
            let (_, pullback) = network.read(&tokens, &media, Positions::Multimodal, &last, Grad::Record)?;
            pullback.ok_or_else(|| Error::Misuse("no pullback".into()))?.pull(&row).map(|_| ())
        })?;
    }
    let found = json!({
        "patches": squares * facts.merge * facts.merge, "tokens": tokens.len(), "tower": tower, "forward": forward,
        "forward_and_backward": both, "state": state,
    });
    println!("{found}");
    Ok(())
}

/// Pixels that `vision_language.py` computes too.
fn pixels(shape: [usize; 4], round: usize) -> Result<Tensor> {
    let count: usize = shape.iter().product();
    let values = (0..count).map(|i| ((i + 31 * round) % 1009) as f32 / 504.5 - 1.0).collect();
    Tensor::new(values, shape)
}

/// Runs `work`; keeps its seconds by the clock and of all cores if they are the least.
fn time(least: &mut [f64; 2], work: impl FnOnce() -> Result<()>) -> Result<()> {
    let (begun, cpu) = (Instant::now(), cpu_seconds());
    work()?;
    *least = [least[0].min(begun.elapsed().as_secs_f64()), least[1].min(cpu_seconds() - cpu)];
    Ok(())
}

/// Time that all threads of this process had on a processor, as Linux counts it in hundredths of a second.
fn cpu_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = text.rsplit(')').next().unwrap_or_default().split_whitespace();
    fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
}
