//! Generation of many continuations at once.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use rayon::prelude::*;
use roll_backends::Snapshot;
use roll_backends::ops::KeyPlace;
use roll_core::{Adapter, Generation, Noise, Purpose, Result, Sampling, Tensor};

use super::cache::{Cache, Reads};
use super::config::LmConfig;
use super::network::Network;
use super::packed::Packed;
use super::prefixes::Prefixes;
use super::sampling::{Drawn, draw};

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
    /// Which of the distinct prompts it goes on from.
    prompt: usize,
    /// The slot of its tokens in the cache.
    slot: usize,
    rng: rand_chacha::ChaCha8Rng,
    generation: Generation,
}

/// Prompts, each once.
struct Distinct<'a> {
    prompts: Vec<&'a [u32]>,
    /// Which of them each row has.
    of: Vec<usize>,
}

impl<'a> Distinct<'a> {
    fn new(prompts: impl Iterator<Item = &'a Vec<u32>>) -> Self {
        let (mut distinct, mut place) = (Self { prompts: Vec::new(), of: Vec::new() }, HashMap::new());
        for prompt in prompts {
            let next = place.len();
            let found = *place.entry(prompt).or_insert(next);
            if found == next {
                distinct.prompts.push(prompt);
            }
            distinct.of.push(found);
        }
        distinct
    }
}

/// Tokens of a row that ended, in a slot that no other has taken over yet.
struct Left {
    tokens: Vec<u32>,
    /// Number of its prompt in the cache.
    number: usize,
    /// Tokens of the slot.
    written: usize,
}

/// Tokens of prompts that one pass reads, unless a single prompt has more: a pass holds its results for all tokens at
/// once, gigabytes for a rollout of long prompts. The result of a token does not depend on it.
pub(super) const TOKENS_OF_A_PASS: usize = 1 << 14;

/// A prompt that was read.
#[derive(Clone)]
struct Read {
    /// Its number in the cache.
    number: usize,
    /// Logits of the token after it.
    logits: Arc<[f32]>,
}

/// Continues each prompt until an ending, its limit, or the end of the context. An empty prompt gets an empty
/// continuation, as does one that fills the context. The result of a row depends on its prompt, its place and the seed
/// alone. Equal prompts are read once, and the beginnings in `prefixes` not again. At most `at_once` rows are written
/// at a time: when one ends, the next takes its place.
pub fn generate(
    network: &Network,
    prompts: &[Vec<u32>],
    sampling: &Sampling,
    endings: &Endings<'_>,
    prefixes: &Prefixes,
    at_once: usize,
) -> Result<Vec<Generation>> {
    sampling.check()?;
    let LmConfig { context, vocab, layers, .. } = *network.config();
    let noise = Noise::new(sampling.seed);
    let trainable = network.trainable(Adapter::On);
    let empty = || Generation::default();
    let mut finished: Vec<Generation> = prompts.iter().map(|_| empty()).collect();
    let fits = |index: &usize| (1..context).contains(&prompts[*index].len()) && sampling.limit(*index) > 0;
    let indices: Vec<usize> = (0..prompts.len()).filter(fits).collect();
    let distinct = Distinct::new(indices.iter().map(|index| &prompts[*index]));
    let mut waiting: VecDeque<Row> = indices
        .into_iter()
        .zip(&distinct.of)
        .map(|(index, prompt)| {
            let rng = noise.generator(Purpose::Tokens, 0, sampling.number(index));
            Row { index, prompt: *prompt, slot: 0, rng, generation: empty() }
        })
        .collect();
    prefixes.turn(sampling.seed);

    let cache = Arc::new(Cache::new(layers, network.products()));
    let mut read: Vec<Option<Read>> = vec![None; distinct.prompts.len()];
    let mut free: Vec<usize> = (0..at_once.max(1).min(waiting.len())).rev().collect();
    // Rows that go on; the rows of `logits` are in their order.
    let (mut rows, mut logits): (Vec<Row>, Option<Tensor>) = (Vec::new(), None);
    let mut left: BTreeMap<usize, Left> = BTreeMap::new();
    while !rows.is_empty() || !waiting.is_empty() {
        let mut entering: Vec<Row> = Vec::new();
        while !free.is_empty()
            && let Some(mut row) = waiting.pop_front()
        {
            row.slot = free.pop().unwrap_or_default();
            if let Some(Left { tokens, number, written }) = left.remove(&row.slot) {
                prefixes.keep(tokens, cache.copied(number, row.slot, written));
            }
            entering.push(row);
        }
        let mut unread: Vec<usize> = entering.iter().map(|row| row.prompt).collect();
        unread.retain(|prompt| read[*prompt].is_none());
        unread.sort_unstable();
        unread.dedup();
        read_prompts(network, trainable.as_ref(), &cache, prefixes, &distinct, &unread, &mut read)?;

        let going_on = logits.as_ref().map_or(Ok(&[][..]), Tensor::f32s)?.chunks_exact(vocab);
        let first: Vec<Arc<[f32]>> =
            entering.iter().filter_map(|row| Some(read[row.prompt].as_ref()?.logits.clone())).collect();
        let sources: Vec<&[f32]> = going_on.chain(first.iter().map(|logits| &**logits)).collect();
        rows.append(&mut entering);
        let draws = rows.par_iter_mut().zip(sources);
        let drawn: Vec<Drawn> =
            draws.map(|(row, logits)| draw(logits, sampling, &mut row.rng)).collect::<Result<_>>()?;

        let (mut going, mut places, mut packed) = (Vec::new(), Vec::new(), Packed::default());
        for (mut row, drawn) in rows.into_iter().zip(drawn) {
            // The cache has the tokens that were read; the one that is drawn now will be read next.
            let written = row.generation.tokens.len();
            let held = prompts[row.index].len() + written;
            let number = read[row.prompt].as_ref().map_or(0, |read| read.number);
            row.generation.tokens.push(drawn.id);
            row.generation.log_probs.push(drawn.log_prob);
            row.generation.raw_log_probs.push(drawn.raw_log_prob);
            let ended = endings.ids.contains(&drawn.id)
                || row.generation.tokens.len() >= sampling.limit(row.index)
                || held + 1 >= context
                || stops(&row.generation.tokens, sampling, endings)?;
            match ended {
                true => {
                    let tokens = prompts[row.index].iter().chain(&row.generation.tokens).take(held).copied().collect();
                    left.insert(row.slot, Left { tokens, number, written });
                    free.push(row.slot);
                    finished[row.index] = row.generation;
                }
                false => {
                    packed.push(std::iter::once(i64::from(drawn.id)), held);
                    places.push(KeyPlace { prompt: cache.prompt(number), slot: row.slot, tail: written, skip: 0 });
                    going.push(row);
                }
            }
        }
        rows = going;
        logits = match rows.is_empty() {
            true => None,
            false => Some(network.next_logits(&packed, &cache, Reads::Tokens(places.into()), trainable.as_ref())?),
        };
    }
    for (slot, Left { tokens, number, written }) in left {
        prefixes.keep(tokens, cache.viewed(number, slot, written));
    }
    Ok(finished)
}

/// Reads those of the `distinct` prompts that are `unread`.
fn read_prompts(
    network: &Network,
    trainable: Option<&Snapshot>,
    cache: &Arc<Cache>,
    prefixes: &Prefixes,
    distinct: &Distinct<'_>,
    unread: &[usize],
    read: &mut [Option<Read>],
) -> Result<()> {
    let mut unread = unread;
    while !unread.is_empty() {
        let (mut packed, mut known) = (Packed::default(), Vec::new());
        for prompt in unread.iter().map(|prompt| distinct.prompts[*prompt]) {
            // At least as much as is unknown: known beginnings are only seen by taking them.
            if !packed.is_empty() && packed.len() + prompt.len() > TOKENS_OF_A_PASS {
                break;
            }
            let found = prefixes.take(prompt);
            let from = found.as_ref().map_or(0, |(length, _)| *length);
            packed.push(prompt[from..].iter().map(|id| i64::from(*id)), from);
            known.push((from, found.map(|(_, given)| given)));
        }
        let (now, later) = unread.split_at(known.len());
        let first = cache.expect(known, &packed.spans);
        let logits = network.next_logits(&packed, cache, Reads::Prompts { first }, trainable)?;
        let rows = logits.f32s()?.chunks_exact(network.config().vocab);
        for ((number, prompt), logits) in (first..).zip(now).zip(rows) {
            read[*prompt] = Some(Read { number, logits: logits.into() });
        }
        unread = later;
    }
    Ok(())
}

/// Whether the text so far ends with one of the stop texts.
fn stops(tokens: &[u32], sampling: &Sampling, endings: &Endings<'_>) -> Result<bool> {
    // A token holds a byte at least, so this many tokens hold the longest stop text; a few more, since a text that
    // begins in the middle of a character decodes to replacement characters.
    let Some(longest) = sampling.stop.iter().map(String::len).max() else { return Ok(false) };
    let tail = &tokens[tokens.len().saturating_sub(longest + 4)..];
    let text = (endings.decode)(tail)?;
    Ok(sampling.stop.iter().any(|stop| text.contains(stop.as_str())))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::BTreeSet;

    use burn::tensor::DType;
    use rand_distr::{Distribution, StandardNormal};
    use roll_core::StateDict;

    use super::*;

    /// Two key heads for four heads of queries, and every weight random.
    fn network() -> Network {
        let config = LmConfig::parse(
            br#"{"model_type": "llama", "vocab_size": 12, "hidden_size": 16, "intermediate_size": 24,
                 "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
                 "rope_theta": 10000.0, "tie_word_embeddings": true, "max_position_embeddings": 40, "eos_token_id": 0}"#,
        )
        .unwrap();
        let mut rng = Noise::new(3).generator(Purpose::Parameters, 0, 0);
        let mut state = StateDict::new();
        for (name, shape) in config.weights() {
            let mut draw = || 0.4 * Distribution::<f32>::sample(&StandardNormal, &mut rng);
            let values: Vec<f32> = (0..shape.iter().product()).map(|_| draw()).collect();
            state.insert(name, Tensor::new(values, shape).unwrap());
        }
        Network::new(config, &state, DType::F32, &roll_backends::device("flex").unwrap()).unwrap()
    }

    fn turn(network: &Network, prompts: &[Vec<u32>], seed: u64, prefixes: &Prefixes) -> Vec<Generation> {
        let sampling = Sampling { temperature: 1.0, seed, max_new_tokens: 5, ..Sampling::greedy(5) };
        let decode = |_: &[u32]| Ok(String::new());
        generate(network, prompts, &sampling, &Endings { ids: &[0], decode: &decode }, prefixes, 64).unwrap()
    }

    fn assert_close(found: &[Generation], expected: &[Generation]) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert_eq!(found.tokens, expected.tokens);
            for (a, b) in found.log_probs.iter().zip(&expected.log_probs) {
                assert!((a - b).abs() < 1e-5, "{a} against {b}");
            }
        }
    }

    #[test]
    fn a_conversation_goes_on_as_if_it_were_read_from_the_start() {
        let network = network();
        let kept = Prefixes::default();
        let mut prompts = vec![vec![3, 4, 5], vec![7], vec![3, 4, 5], vec![8, 9, 1, 2]];
        for seed in 1..4 {
            let found = turn(&network, &prompts, seed, &kept);
            assert_close(&found, &turn(&network, &prompts, seed, &Prefixes::default()));
            for (prompt, generation) in prompts.iter_mut().zip(&found) {
                prompt.extend(&generation.tokens);
                prompt.extend([6, 11]);
            }
        }
        // The kept tokens were used: all but the last drawn one and the two that the environment added.
        kept.turn(4);
        let (length, layers) = kept.take(&prompts[1]).unwrap();
        assert_eq!((length, layers.len()), (prompts[1].len() - 3, 2));
        let tokens: usize = layers[0].iter().map(|(k, _)| k.dims()[0]).sum();
        assert_eq!((tokens, layers[0][0].0.dims()[1]), (length, 8));
    }

    #[test]
    fn every_row_has_its_own_limit() {
        let (network, decode) = (network(), |_: &[u32]| Ok(String::new()));
        let made = |limits: Vec<usize>, max_new_tokens: usize| {
            let sampling = Sampling { temperature: 1.0, seed: 2, limits, ..Sampling::greedy(max_new_tokens) };
            let endings = Endings { ids: &[], decode: &decode };
            generate(
                &network,
                &[vec![3, 4], vec![5], vec![6], vec![3, 4]],
                &sampling,
                &endings,
                &Prefixes::default(),
                64,
            )
        };
        let (whole, cut) = (made(Vec::new(), 6).unwrap(), made(vec![2, 9, 0, 5], 6).unwrap());
        assert_eq!(cut.iter().map(|g| g.tokens.len()).collect::<Vec<_>>(), [2, 6, 0, 5]);
        for (whole, cut) in whole.iter().zip(&cut) {
            assert_eq!(whole.tokens[..cut.tokens.len()], cut.tokens);
        }
    }

    #[test]
    fn many_tokens_are_those_of_the_network_without_a_cache() {
        // More than the cache has room for at first.
        let network = network();
        let decode = |_: &[u32]| Ok(String::new());
        let sampling = Sampling { temperature: 1.0, seed: 5, ..Sampling::greedy(36) };
        let (prompts, endings) = ([vec![3, 4], vec![5, 6, 7], vec![3, 4]], Endings { ids: &[], decode: &decode });
        let made = generate(&network, &prompts, &sampling, &endings, &Prefixes::default(), 64).unwrap();
        for (prompt, made) in prompts.iter().zip(&made) {
            let whole: Vec<i64> = prompt.iter().chain(&made.tokens).map(|id| i64::from(*id)).collect();
            let (length, mask) = (whole.len(), vec![1u8; whole.len()]);
            let tokens = Tensor::new(whole, [1, length]).unwrap();
            let mask = Tensor::new(mask, [1, length]).unwrap();
            let (stats, _) = network.evaluate(&tokens, &mask, Adapter::Off, roll_core::Grad::Skip).unwrap();
            let evaluated = &stats.log_probs.f32s().unwrap()[prompt.len() - 1..];
            assert_eq!(evaluated.len(), made.log_probs.len());
            assert!(evaluated.len() >= 36, "{}", evaluated.len());
            for ((a, b), raw) in evaluated.iter().zip(&made.log_probs).zip(&made.raw_log_probs) {
                assert!((a - b).abs() < 1e-4 && (a - raw).abs() < 1e-4, "{a}, {b}, {raw}");
            }
        }
    }

    #[test]
    fn hidden_states_are_of_the_tokens_read_so_far_and_nothing_stands_at_padding() {
        let network = network();
        let states = |tokens: [i64; 4], mask: [u8; 4]| -> Vec<Vec<f32>> {
            let (tokens, mask) = (Tensor::new(tokens.to_vec(), [1, 4]), Tensor::new(mask.to_vec(), [1, 4]));
            let found = network.hidden_states(&tokens.unwrap(), &mask.unwrap(), Adapter::Off).unwrap();
            assert_eq!(found.shape(), [1, 4, 16]);
            found.f32s().unwrap().chunks(16).map(<[f32]>::to_vec).collect()
        };
        let (whole, cut) = (states([3, 4, 5, 6], [1; 4]), states([0, 3, 4, 7], [0, 1, 1, 1]));
        let near = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-5);
        assert!(near(&whole[0], &cut[1]) && near(&whole[1], &cut[2]) && !near(&whole[2], &cut[3]));
        assert!(cut[0].iter().all(|v| *v == 0.0) && whole.iter().flatten().all(|v| v.is_finite()));
    }

    #[test]
    fn rows_that_take_the_place_of_others_get_the_same_bits() {
        let (network, decode) = (network(), |_: &[u32]| Ok(String::new()));
        let mut prompts: Vec<Vec<u32>> = (0..12).map(|i| vec![3 + i % 5, 4, 1 + i % 3]).collect();
        prompts[3] = (0..9).map(|i| 1 + i % 11).collect();
        let kept = Prefixes::default();
        // Rows end at any time: by an id, by their limit.
        let made = |seed: u64, at_once: usize, order: &[usize], prefixes: &Prefixes| {
            let prompts: Vec<Vec<u32>> = order.iter().map(|i| prompts[*i].clone()).collect();
            let numbers = order.iter().map(|i| *i as u64).collect();
            let limits = order.iter().map(|i| 3 + 3 * i).collect();
            let sampling = Sampling { temperature: 1.0, seed, numbers, limits, ..Sampling::greedy(30) };
            let endings = Endings { ids: &[0], decode: &decode };
            let made = generate(&network, &prompts, &sampling, &endings, prefixes, at_once).unwrap();
            let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            made.into_iter().map(|g| (g.tokens, bits(g.log_probs), bits(g.raw_log_probs))).collect::<Vec<_>>()
        };
        let order: Vec<usize> = (0..12).collect();
        let together = made(6, 64, &order, &kept);
        let lengths: BTreeSet<usize> = together.iter().map(|(tokens, ..)| tokens.len()).collect();
        assert!(lengths.len() > 4, "{lengths:?}");
        for at_once in [1, 2, 5] {
            assert_eq!(made(6, at_once, &order, &Prefixes::default()), together, "{at_once} at once");
        }
        for (i, expected) in together.iter().enumerate() {
            assert_eq!(made(6, 64, &[i], &Prefixes::default())[0], *expected, "alone");
        }
        let backwards: Vec<usize> = order.into_iter().rev().collect();
        let found = made(6, 4, &backwards, &Prefixes::default());
        assert!(found.iter().rev().eq(&together), "in another order");
    }

    #[test]
    fn equal_prompts_get_what_each_would_get_alone() {
        let network = network();
        let together = turn(&network, &[vec![3, 4], vec![5], vec![3, 4]], 9, &Prefixes::default());
        let sampling = |number| Sampling {
            temperature: 1.0,
            seed: 9,
            max_new_tokens: 5,
            numbers: vec![number],
            ..Sampling::greedy(5)
        };
        let decode = |_: &[u32]| Ok(String::new());
        for (number, prompt) in [(0, vec![3, 4]), (1, vec![5]), (2, vec![3, 4])] {
            let endings = Endings { ids: &[0], decode: &decode };
            let alone = generate(&network, &[prompt], &sampling(number), &endings, &Prefixes::default(), 64).unwrap();
            assert_close(&together[number as usize..][..1], &alone);
        }
        assert_ne!(together[0].tokens, together[2].tokens, "each draws for itself");
    }
}
