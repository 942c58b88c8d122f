//! Information in the text encoder's embeddings about prompts that it was not trained on.

use std::path::Path;

use roll_core::Result;
use roll_wan::tokenizer::{PROMPT_TOKENS, Tokenizer};
use roll_wan::umt5::Umt5;
use roll_network::weights::Checkpoint;
use serde::Serialize;

use super::{record, rounded};
use crate::text::{ENCODER, Prompt, TOKENIZER, classes, prompts};

/// Accuracy of classifying prompts by the nearest class mean of the training prompts' embeddings.
#[derive(Debug, Serialize)]
struct Figures {
    /// Number of held-out prompts.
    prompts: usize,
    /// Fraction of prompts whose motion is classified correctly.
    motion: f64,
    /// Fraction of prompts whose expression is classified correctly.
    expression: f64,
    /// Fraction of prompts whose light is classified correctly.
    light: f64,
    /// Fraction of prompts whose background is classified correctly.
    background: f64,
    /// Fraction of prompts whose four attributes are all classified correctly.
    everything: f64,
}

/// Measures tokenizer and encoder below `out`, prints the figures and writes them to `quality.json`.
pub fn measure(out: &Path) -> Result<()> {
    let tokenizer = Tokenizer::load(out.join(TOKENIZER))?;
    let encoder = Umt5::new(&Checkpoint::open(out.join(ENCODER))?.all()?, &roll_backends::device("flex")?)?;
    let embed = |prompt: &Prompt| -> Result<Vec<f32>> {
        let ids = tokenizer.encode(&prompt.text, PROMPT_TOKENS)?;
        let hidden = encoder.encode(&ids, ids.len())?;
        let width = hidden.shape()[1];
        let mean = |i: usize| hidden.f32s().map(|h| h.iter().skip(i).step_by(width).sum::<f32>() / ids.len() as f32);
        (0..width).map(mean).collect()
    };
    let (training, held_out) = prompts();
    let known = training.iter().map(&embed).collect::<Result<Vec<_>>>()?;
    let asked = held_out.iter().map(&embed).collect::<Result<Vec<_>>>()?;
    let mut right = vec![[false; 4]; held_out.len()];
    for (i, count) in classes(&training).into_iter().enumerate() {
        let means = class_means(&known, training.iter().map(|p| p.attributes[i]), count);
        for ((embedding, prompt), right) in asked.iter().zip(&held_out).zip(&mut right) {
            right[i] = nearest(&means, embedding) == Some(prompt.attributes[i]);
        }
    }
    let share = |count: usize| rounded(count as f64 / held_out.len().max(1) as f64);
    let of = |i: usize| share(right.iter().filter(|r| r[i]).count());
    let figures = Figures {
        prompts: held_out.len(),
        motion: of(0),
        expression: of(1),
        light: of(2),
        background: of(3),
        everything: share(right.iter().filter(|r| r.iter().all(|&r| r)).count()),
    };
    record(out, "text", &figures)
}

fn class_means(embeddings: &[Vec<f32>], classes: impl Iterator<Item = usize>, count: usize) -> Vec<Vec<f32>> {
    let width = embeddings.first().map_or(0, Vec::len);
    let mut sums = vec![(vec![0f32; width], 0usize); count];
    for (embedding, class) in embeddings.iter().zip(classes) {
        sums[class].0.iter_mut().zip(embedding).for_each(|(sum, v)| *sum += v);
        sums[class].1 += 1;
    }
    sums.into_iter().map(|(sum, n)| sum.into_iter().map(|v| v / n.max(1) as f32).collect()).collect()
}

fn nearest(means: &[Vec<f32>], embedding: &[f32]) -> Option<usize> {
    let distance = |mean: &Vec<f32>| mean.iter().zip(embedding).map(|(a, b)| (a - b).powi(2)).sum::<f32>();
    means.iter().map(distance).enumerate().min_by(|a, b| a.1.total_cmp(&b.1)).map(|(class, _)| class)
}
