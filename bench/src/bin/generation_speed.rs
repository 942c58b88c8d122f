//! Tokens a second of generation: 64 prompts in groups of 8, as a rollout has them.
//!
//! ```sh
//! cargo run --release --bin generation_speed -- SmolLM2-135M-Instruct.Q4_1.gguf \
//!     [PROMPT_TOKENS [NEW_TOKENS [BACKEND]]]
//! ```
//!
//! `bench/generation_batch.py` runs it beside transformers and llama.cpp. Prints a line of JSON: the seconds of a call
//! for one new token (prompts are read, one token is drawn), those of a call for all of them, and what follows from the
//! two. No answer ends early: ids that would end one are as long as the others.

use std::time::Instant;

use roll_core::{BuildContext, Model, Result, Sampling};
use roll_causal_lm::{CausalLmOptions, open};

const GROUPS: usize = 8;
const GROUP_SIZE: usize = 8;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next();
    let mut number = |default: usize| arguments.next().and_then(|text| text.parse().ok()).unwrap_or(default);
    let (prompt_tokens, new_tokens) = (number(256), number(64));
    let context = BuildContext::new(arguments.next().unwrap_or("flex".into()));
    let mut model = open(&CausalLmOptions { model_path: path.map(Into::into), ..Default::default() }, &context)?;
    let vocabulary = model.network().config().vocab as u32;
    let prompt = |group: usize| -> Vec<u32> {
        (0..prompt_tokens as u32).map(|i| (i * 31 + group as u32 * 1009 + 17) % (vocabulary - 64) + 32).collect()
    };
    let prompts: Vec<Vec<u32>> = (0..GROUPS * GROUP_SIZE).map(|i| prompt(i / GROUP_SIZE)).collect();
    let language = model.as_language().ok_or_else(|| roll_core::Error::Misuse("no language model".into()))?;
    let mut seconds = |seed: u64, tokens: usize| -> Result<(f64, f64, usize)> {
        let sampling = Sampling { temperature: 1.0, seed, ..Sampling::greedy(tokens) };
        let (begun, cpu) = (Instant::now(), cpu_seconds());
        let made = language.generate(&prompts, &sampling)?;
        let count = made.iter().map(|g| g.tokens.len()).sum();
        Ok((begun.elapsed().as_secs_f64(), cpu_seconds() - cpu, count))
    };
    seconds(1, 1)?;
    let (first, ..) = seconds(2, 1)?;
    let (all, cpu, count) = seconds(3, new_tokens)?;
    let drawn = count.saturating_sub(prompts.len()) as f64;
    println!(
        "{}",
        serde_json::json!({
            "prompts": prompts.len(), "prompt_tokens": prompt_tokens, "tokens": count,
            "seconds_first": first, "seconds": all, "cpu_seconds": cpu, "tokens_per_second": count as f64 / all,
            "decode_tokens_per_second": drawn / (all - first), "threads": rayon::current_num_threads(),
            "vocabulary": vocabulary,
        })
    );
    Ok(())
}

/// Time that all threads of this process had on a processor, as Linux counts it in hundredths of a second.
fn cpu_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = text.rsplit(')').next().unwrap_or_default().split_whitespace();
    fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
}
