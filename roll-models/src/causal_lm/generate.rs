//! Generation of many continuations at once.

use std::sync::Arc;

use roll_core::{Adapter, Generation, Noise, Purpose, Result, Sampling};

use super::block::Cache;
use super::network::Network;
use super::packed::Packed;
use super::sampling::{check, draw};

/// Tells after which texts and ids a row ends.
pub struct Endings<'a> {
    /// Ids that end a row; they are part of it.
    pub ids: &'a [u32],
    /// Tokens to text, for stop texts.
    pub decode: &'a dyn Fn(&[u32]) -> Result<String>,
}

/// One row that is not finished.
struct Row {
    /// Its place among the prompts.
    index: usize,
    /// Tokens so far, prompt included.
    length: usize,
    rng: rand_chacha::ChaCha8Rng,
    /// Tokens that the next step reads.
    pending: Vec<u32>,
    generation: Generation,
}

/// Continues each prompt until an ending, `max_new_tokens`, or the end of the context. An empty prompt gets an empty
/// continuation, as does one that fills the context. What a row gets depends on its prompt, its place and the seed
/// alone.
pub fn generate(
    network: &Network,
    prompts: &[Vec<u32>],
    sampling: &Sampling,
    endings: &Endings<'_>,
) -> Result<Vec<Generation>> {
    check(sampling)?;
    let context = network.config().context;
    let noise = Noise::new(sampling.seed);
    let trainable = network.trainable(Adapter::On);
    let mut finished: Vec<Generation> =
        prompts.iter().map(|_| Generation { tokens: Vec::new(), log_probs: Vec::new() }).collect();
    let fits = |prompt: &Vec<u32>| !prompt.is_empty() && prompt.len() < context && sampling.max_new_tokens > 0;
    let mut rows: Vec<Row> = prompts
        .iter()
        .enumerate()
        .filter(|(_, prompt)| fits(prompt))
        .map(|(index, prompt)| Row {
            index,
            length: prompt.len(),
            rng: noise.generator(Purpose::Tokens, 0, sampling.number(index)),
            pending: prompt.clone(),
            generation: Generation { tokens: Vec::new(), log_probs: Vec::new() },
        })
        .collect();
    let cache = Arc::new(Cache::new(network.config().layers, rows.len()));
    while !rows.is_empty() {
        let mut packed = Packed::default();
        for row in &mut rows {
            let from = row.length - row.pending.len();
            packed.push(row.pending.drain(..).map(i64::from), from);
        }
        let logits = network.next_logits(&packed, &cache, trainable.as_ref())?;
        let vocab = network.config().vocab;
        let mut going = Vec::new();
        let mut kept = Vec::new();
        for (at, (mut row, logits)) in rows.into_iter().zip(logits.chunks_exact(vocab)).enumerate() {
            let drawn = draw(logits, sampling, &mut row.rng)?;
            row.generation.tokens.push(drawn.id);
            row.generation.log_probs.push(drawn.log_prob);
            row.pending.push(drawn.id);
            row.length += 1;
            let ended = endings.ids.contains(&drawn.id)
                || row.generation.tokens.len() >= sampling.max_new_tokens
                || row.length >= context
                || stops(&row.generation.tokens, sampling, endings)?;
            match ended {
                true => finished[row.index] = row.generation,
                false => {
                    kept.push(at);
                    going.push(row);
                }
            }
        }
        if kept.len() < packed.spans.len() {
            cache.retain(&kept);
        }
        rows = going;
    }
    Ok(finished)
}

/// Whether one of the stop texts stands at the end of what was written.
fn stops(tokens: &[u32], sampling: &Sampling, endings: &Endings<'_>) -> Result<bool> {
    // A token holds a byte at least, so this many tokens hold the longest stop text; a few more, since a text that
    // begins in the middle of a character decodes to replacement characters.
    let Some(longest) = sampling.stop.iter().map(String::len).max() else { return Ok(false) };
    let tail = &tokens[tokens.len().saturating_sub(longest + 4)..];
    let text = (endings.decode)(tail)?;
    Ok(sampling.stop.iter().any(|stop| text.contains(stop.as_str())))
}
