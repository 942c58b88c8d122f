//! Generates continuations of many prompts at once.
//!
//! Rows enter in the order of the prompts as slots of the cache become free. Each round reads the prompts of the
//! entering rows, draws one token for every row, and computes the logits after these tokens.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use rayon::prelude::*;
use roll_backends::Snapshot;
use roll_backends::ops::CachedSequence;
use roll_core::{Adapter, Generation, Noise, Purpose, Result, Sampling, Tensor};

use super::cache::{Cache, CachedTokens, NextPlaces, Prefix, PromptPlaces};
use super::network::Network;
use super::packed::Packed;
use super::prefixes::Prefixes;
use super::sampling::{Drawn, draw_without};

/// Greatest number of prompt tokens that one pass reads, unless a single prompt has more. A pass holds its results for
/// all tokens at once, which would be gigabytes for a rollout of long prompts. The result of a token does not depend on
/// this number.
pub(super) const TOKENS_OF_A_PASS: usize = 1 << 14;

/// The conditions that end a row, in addition to limits and the end of the context.
pub struct Endings<'a> {
    /// Ids that end a row. Such an id is part of the row.
    pub ids: &'a [u32],
    /// Decodes tokens, to find stop texts.
    pub decode: &'a dyn Fn(&[u32]) -> Result<String>,
}

/// A continuation that has not ended.
struct Row {
    /// Index among the caller's prompts.
    index: usize,
    /// Index of the prompt among the distinct prompts ([`Generator::prompts`]).
    prompt: usize,
    /// Slot of the row's tokens in the cache.
    slot: usize,
    rng: rand_chacha::ChaCha8Rng,
    generation: Generation,
}

/// A prompt that is in the cache.
#[derive(Clone)]
struct CachedPrompt {
    prefix: Prefix,
    /// Whether a row has taken the slot of the prefix to write its tokens there.
    is_continued: bool,
    /// Logits of the token after the prompt.
    logits: Arc<[f32]>,
}

/// The state of one call of [`generate`].
struct Generator<'a> {
    network: &'a Network,
    trainable: Option<Snapshot>,
    sampling: &'a Sampling,
    endings: &'a Endings<'a>,
    prefixes: &'a Prefixes,
    cache: Arc<Cache>,
    /// The distinct prompts.
    prompts: Vec<&'a [u32]>,
    /// See [`Network::places`], for each distinct prompt.
    places: Vec<Option<Vec<[usize; 3]>>>,
    never_drawn: Vec<u32>,
    /// Most tokens that a row of each distinct prompt adds to the cache.
    to_come: Vec<usize>,
    /// Each distinct prompt, if it is in the cache.
    cached: Vec<Option<CachedPrompt>>,
    /// Rows that are not generated yet.
    waiting: VecDeque<Row>,
    /// Number of rows that may enter.
    vacant: usize,
    /// The results, by index of the caller's prompt.
    finished: Vec<Generation>,
    /// The results of [`Generator::may_stop`] for ids that were drawn.
    may_stop: Mutex<HashMap<u32, bool>>,
}

/// Continues each prompt until an ending, its limit, or the end of the context. A prompt that is empty or fills the
/// context has an empty continuation. The result of a row depends only on its prompt, its number and the seed.
///
/// Equal prompts are read once, and the tokens in `prefixes` are not read again. At most `at_once` rows are generated
/// at a time; when a row ends, the next takes its place.
pub fn generate(
    network: &Network,
    prompts: &[Vec<u32>],
    sampling: &Sampling,
    endings: &Endings<'_>,
    prefixes: &Prefixes,
    at_once: usize,
) -> Result<Vec<Generation>> {
    sampling.check()?;
    let config = network.config();
    let noise = Noise::new(sampling.seed);
    let (mut distinct, mut index_in_distinct) = (Vec::new(), HashMap::new());
    let mut waiting: VecDeque<Row> = VecDeque::new();
    for (index, prompt) in prompts.iter().enumerate() {
        if !(1..config.context).contains(&prompt.len()) || sampling.limit(index) == 0 {
            continue;
        }
        let distinct_index = *index_in_distinct.entry(prompt).or_insert_with(|| {
            distinct.push(prompt.as_slice());
            distinct.len() - 1
        });
        let rng = noise.generator(Purpose::Tokens, 0, sampling.number(index));
        waiting.push_back(Row { index, prompt: distinct_index, slot: 0, rng, generation: Generation::default() });
    }
    let cache = prefixes.begin_turn(sampling.seed, &distinct, || Cache::new(config.layers, network.products()));
    let mut to_come = vec![0; distinct.len()];
    for row in &waiting {
        // The last token of a row is never read, so it is not cached.
        to_come[row.prompt] = sampling.limit(row.index).saturating_sub(1).max(to_come[row.prompt]);
    }
    // Rows of known conversations have their slots. A last turn frees those of the others as they end.
    let new_rows = waiting.len().saturating_sub(prefixes.count_known(&distinct));
    let slots_at_once = if sampling.is_last_turn { at_once.max(1) } else { usize::MAX };
    cache.reserve(new_rows.min(slots_at_once));
    let mut generator = Generator {
        network,
        // Converted once, not for every token.
        trainable: network.trainable(Adapter::On)?.map(|all| all.with_matrices_in(network.products(), "model.layers.")),
        sampling,
        endings,
        prefixes,
        cache,
        cached: vec![None; distinct.len()],
        places: distinct.iter().map(|prompt| network.places(prompt)).collect::<Result<_>>()?,
        never_drawn: network.never_drawn(),
        prompts: distinct,
        to_come,
        vacant: at_once.max(1),
        waiting,
        finished: prompts.iter().map(|_| Generation::default()).collect(),
        may_stop: Mutex::default(),
    };
    // The rows in generation, and the logits of their next tokens in the same order.
    let (mut rows, mut logits): (Vec<Row>, Option<Tensor>) = (Vec::new(), None);
    while !rows.is_empty() || !generator.waiting.is_empty() {
        let mut entering = generator.enter();
        generator.read_prompts(&entering)?;
        generator.assign_slots(&mut entering);
        let drawn = generator.draw(&mut rows, entering, logits.as_ref())?;
        (rows, logits) = generator.append(rows, drawn)?;
    }
    let finished = generator.finished;
    if sampling.is_last_turn {
        prefixes.end_turn();
    }
    Ok(finished)
}

impl Generator<'_> {
    /// Returns the waiting rows for which there is room.
    fn enter(&mut self) -> Vec<Row> {
        let count = self.vacant.min(self.waiting.len());
        self.vacant -= count;
        self.waiting.drain(..count).collect()
    }

    /// Assigns slots to `entering`, whose prompts are in the cache. The first row of a prompt continues in the slot of
    /// its prefix; further rows get a copy.
    fn assign_slots(&mut self, entering: &mut [Row]) {
        for row in entering {
            let Some(CachedPrompt { prefix, is_continued, .. }) = &mut self.cached[row.prompt] else { continue };
            row.slot = match prefix.slot {
                Some(slot) if !std::mem::replace(is_continued, true) => slot,
                _ => {
                    let slot = self.cache.take_slot();
                    self.cache.copy_tail(prefix, slot);
                    slot
                }
            };
        }
    }

    /// Reads the prompts of `entering` that are not in the cache, in one or several passes.
    fn read_prompts(&mut self, entering: &[Row]) -> Result<()> {
        let mut unread: Vec<usize> = entering.iter().map(|row| row.prompt).collect();
        unread.retain(|prompt| self.cached[*prompt].is_none());
        unread.sort_unstable();
        unread.dedup();
        let mut unread = unread.as_slice();
        while !unread.is_empty() {
            let (mut packed, mut known) = (Packed::default(), Vec::new());
            for (prompt, places) in unread.iter().map(|prompt| (self.prompts[*prompt], &self.places[*prompt])) {
                // `prompt.len()` is an upper bound of the unknown tokens, because the length of a known prefix is found
                // only by taking it.
                if !packed.is_empty() && packed.len() + prompt.len() > TOKENS_OF_A_PASS {
                    break;
                }
                let prefix = self.prefixes.take(prompt);
                let known_length = prefix.as_ref().map_or(0, Prefix::len);
                packed.push(prompt[known_length..].iter().map(|id| i64::from(*id)), known_length);
                packed.places.extend(places.iter().flat_map(|places| &places[known_length..prompt.len()]));
                known.push(prefix);
            }
            let (now, later) = unread.split_at(known.len());
            let to_come: Vec<usize> = now.iter().map(|prompt| self.to_come[*prompt]).collect();
            let device = self.network.device();
            let places = Arc::new(PromptPlaces::new(&self.cache, known, &packed.spans, &to_come, device));
            let tokens = CachedTokens::Prompts(places.clone());
            let logits = self.network.next_logits(&packed, &self.cache, tokens, self.trainable.as_ref())?;
            let rows = logits.f32s()?.chunks_exact(self.network.config().vocab);
            for ((prefix, prompt), logits) in places.prefixes().iter().zip(now).zip(rows) {
                let prefix = prefix.clone();
                self.cached[*prompt] = Some(CachedPrompt { prefix, is_continued: false, logits: logits.into() });
            }
            unread = later;
        }
        Ok(())
    }

    /// Draws the next token of each row: of `rows`, whose logits are `logits`, then of `entering`, whose logits are
    /// those of their prompts. `entering` is appended to `rows`.
    fn draw(&self, rows: &mut Vec<Row>, entering: Vec<Row>, logits: Option<&Tensor>) -> Result<Vec<Drawn>> {
        let logits_of_rows = logits.map_or(Ok(&[][..]), Tensor::f32s)?.chunks_exact(self.network.config().vocab);
        let logits_of_entering = entering.iter().filter_map(|row| Some(&*self.cached[row.prompt].as_ref()?.logits));
        let all_logits: Vec<&[f32]> = logits_of_rows.chain(logits_of_entering).collect();
        rows.extend(entering);
        let sampling = self.sampling;
        let rows_and_logits = rows.par_iter_mut().zip(all_logits);
        let never_drawn = &self.never_drawn;
        let draw_word = |(row, logits): (&mut Row, &[f32])| draw_without(never_drawn, logits, sampling, &mut row.rng);
        rows_and_logits.map(draw_word).collect()
    }

    /// Appends the drawn tokens. Returns the rows that do not end with them, and the logits of their next tokens.
    fn append(&mut self, rows: Vec<Row>, drawn: Vec<Drawn>) -> Result<(Vec<Row>, Option<Tensor>)> {
        let (mut continuing, mut places, mut packed) = (Vec::new(), Vec::new(), Packed::default());
        for (mut row, drawn) in rows.into_iter().zip(drawn) {
            // The row's tokens in the cache; the drawn token is not there yet.
            let position = self.prompts[row.prompt].len() + row.generation.tokens.len();
            let prompt = self.cached[row.prompt].as_ref().map_or(0..0, |cached| cached.prefix.prompt.clone());
            let tail = position - prompt.len();
            row.generation.tokens.push(drawn.id);
            row.generation.log_probs.push(drawn.log_prob);
            row.generation.raw_log_probs.push(drawn.raw_log_prob);
            if self.ends(&row, drawn.id, position)? {
                self.keep(&row, Prefix { prompt, slot: Some(row.slot), tail });
                self.vacant += 1;
                self.finished[row.index] = row.generation;
            } else {
                packed.push(std::iter::once(i64::from(drawn.id)), position);
                if let Some(after_prompt) = self.places[row.prompt].as_ref().and_then(|places| places.last()) {
                    packed.places.push(after_prompt.map(|place| place + row.generation.tokens.len() - 1));
                }
                places.push(CachedSequence { prompt, slot: row.slot, tail, skip: 0 });
                continuing.push(row);
            }
        }
        if continuing.is_empty() {
            return Ok((continuing, None));
        }
        let tokens = CachedTokens::Next(Arc::new(NextPlaces::new(places)));
        let logits = self.network.next_logits(&packed, &self.cache, tokens, self.trainable.as_ref())?;
        Ok((continuing, Some(logits)))
    }

    /// Keeps the tokens of a row for the next turn. After a last turn, frees the slot of the row instead.
    fn keep(&self, row: &Row, prefix: Prefix) {
        if !self.sampling.is_last_turn {
            let tokens = self.prompts[row.prompt].iter().chain(&row.generation.tokens);
            self.prefixes.keep(tokens.take(prefix.len()).copied().collect(), prefix);
        // Other rows of the prompt may copy the tail of its prefix.
        } else if self.cached[row.prompt].as_ref().is_none_or(|cached| cached.prefix.slot != Some(row.slot)) {
            self.cache.free_slot(row.slot);
        }
    }

    /// Returns whether `row` ends with its last token, which has this id and position.
    fn ends(&self, row: &Row, id: u32, position: usize) -> Result<bool> {
        let tokens = &row.generation.tokens;
        Ok(self.endings.ids.contains(&id)
            || tokens.len() >= self.sampling.limit(row.index)
            || position + 1 >= self.network.config().context
            || (self.may_stop(id)? && stops(tokens, self.sampling, self.endings)?))
    }

    /// Whether a stop text may end with the token `id`. The text of a row is decoded only after such a token.
    ///
    /// A stop text may end with a token whose text contains the last letter of a stop text, or whose text alone does
    /// not say what it contributes: a part of a letter decodes to a replacement character, and a leading blank is
    /// dropped.
    fn may_stop(&self, id: u32) -> Result<bool> {
        if self.sampling.stop.is_empty() {
            return Ok(false);
        }
        let mut by_id = self.may_stop.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(may_stop) = by_id.get(&id) {
            return Ok(*may_stop);
        }
        let text = (self.endings.decode)(&[id])?;
        let mut last_letters = self.sampling.stop.iter().filter_map(|stop| stop.chars().next_back());
        let may_stop = text.is_empty()
            || text.contains(char::REPLACEMENT_CHARACTER)
            || last_letters.any(|c| c.is_whitespace() || text.contains(c));
        by_id.insert(id, may_stop);
        Ok(may_stop)
    }
}

/// Returns whether the last tokens contain a stop text.
fn stops(tokens: &[u32], sampling: &Sampling, endings: &Endings<'_>) -> Result<bool> {
    // A token has at least one byte, so as many tokens as the longest stop text has bytes cover it. Four more are
    // decoded, because a text that begins in the middle of a character (at most four bytes) decodes to replacement
    // characters.
    let Some(longest) = sampling.stop.iter().map(String::len).max() else { return Ok(false) };
    let last_tokens = &tokens[tokens.len().saturating_sub(longest + 4)..];
    let text = (endings.decode)(last_tokens)?;
    Ok(sampling.stop.iter().any(|stop| text.contains(stop.as_str())))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::BTreeSet;

    use burn_tensor::DType;
    use rand_distr::{Distribution, StandardNormal};
    use roll_core::StateDict;

    use super::super::config::LmConfig;
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
    fn continued_conversations_match_reading_them_anew() {
        let network = network();
        let prefixes = Prefixes::default();
        let mut prompts = vec![vec![3, 4, 5], vec![7], vec![3, 4, 5], vec![8, 9, 1, 2]];
        for seed in 1..4 {
            let found = turn(&network, &prompts, seed, &prefixes);
            assert_close(&found, &turn(&network, &prompts, seed, &Prefixes::default()));
            for (prompt, generation) in prompts.iter_mut().zip(&found) {
                prompt.extend(&generation.tokens);
                prompt.extend([6, 11]);
            }
        }
        // The prefix has all tokens but the last drawn one and the two that the environment added. It is still in the
        // slot of its first turn, after a prompt of one token.
        prefixes.begin_turn(4, &[&prompts[1]], || unreachable!("there is a cache"));
        let prefix = prefixes.take(&prompts[1]).unwrap();
        assert_eq!((prefix.len(), prefix.prompt.len()), (prompts[1].len() - 3, 1));
    }

    #[test]
    fn conversations_with_equal_tokens_continue_separately() {
        // Greedy rows of equal prompts write the same tokens. In the next turn they are one prompt, which was read into
        // the slot of one of them.
        let network = network();
        let (prefixes, decode) = (Prefixes::default(), |_: &[u32]| Ok(String::new()));
        let play = |prompts: &[Vec<u32>], temperature: f64, seed: u64, at_once: usize, prefixes: &Prefixes| {
            let sampling = Sampling { temperature, seed, ..Sampling::greedy(6) };
            generate(&network, prompts, &sampling, &Endings { ids: &[], decode: &decode }, prefixes, at_once).unwrap()
        };
        let first = vec![vec![3, 4, 5]; 3];
        let greedy = play(&first, 0.0, 1, 64, &prefixes);
        let next: Vec<Vec<u32>> = greedy.iter().map(|g| [&[3, 4, 5][..], &g.tokens, &[7, 7]].concat()).collect();
        assert_eq!(next[0], next[2]);
        for at_once in [64, 1] {
            let continued = Prefixes::default();
            play(&first, 0.0, 1, 64, &continued);
            let found = play(&next, 1.0, 2, at_once, &continued);
            assert_close(&found, &play(&next, 1.0, 2, 64, &Prefixes::default()));
            assert_ne!(found[0].tokens, found[1].tokens, "each draws for itself");
        }
    }

    #[test]
    fn last_turns_keep_nothing_and_draw_the_same() {
        let network = network();
        // Three parts of a validation whose episodes have one turn: they have the same seed, and numbers of their own.
        let rollout = |is_last_turn: bool| {
            let (prefixes, peak) = (Prefixes::default(), std::cell::Cell::new(0));
            let held = |prompt: &[u32]| prefixes.begin_turn(1, &[prompt], || unreachable!("there is a cache")).bytes();
            let decode = |_: &[u32]| {
                peak.set(held(&[1]).max(peak.get()));
                Ok(String::new())
            };
            let parts = (0..3u32).flat_map(|part| {
                let prompts: Vec<Vec<u32>> = (0..16).map(|i| vec![1 + part, 2 + i / 2, 3]).collect();
                let numbers = (0..16).map(|i| u64::from(16 * part + i)).collect();
                let stop = vec!["text".into()];
                let sampling =
                    Sampling { temperature: 1.0, seed: 1, numbers, stop, is_last_turn, ..Sampling::greedy(20) };
                let endings = Endings { ids: &[0], decode: &decode };
                generate(&network, &prompts, &sampling, &endings, &prefixes, 4).unwrap()
            });
            let bits = |g: Generation| (g.tokens, g.log_probs.into_iter().map(f32::to_bits).collect::<Vec<_>>());
            let found: Vec<_> = parts.map(bits).collect();
            (found, peak.get(), held(&[1]))
        };
        let ((kept, peak_of_kept, kept_bytes), (found, peak, bytes)) = (rollout(false), rollout(true));
        assert_eq!(found, kept);
        println!("{peak_of_kept} bytes at most, and {kept_bytes} at the end; in last turns {peak} and {bytes}");
        assert!(bytes == 0 && kept_bytes > 0 && 6 * peak <= peak_of_kept, "{peak} of {peak_of_kept}, {bytes}");
    }

    #[test]
    fn slots_of_a_call_are_allocated_together() {
        let network = network();
        let (prefixes, prompts) = (Prefixes::default(), (0..9).map(|i| vec![1 + i, 2]).collect::<Vec<_>>());
        let decode = |_: &[u32]| Ok(String::new());
        let sampling = Sampling { temperature: 1.0, seed: 1, ..Sampling::greedy(4) };
        generate(&network, &prompts, &sampling, &Endings { ids: &[], decode: &decode }, &prefixes, 2).unwrap();
        let cache = prefixes.begin_turn(1, &[], || unreachable!("there is a cache"));
        // Two layers of keys and values, whose rows have 8 numbers: 9 slots of 3 tokens, and 9 prompts of 2.
        assert_eq!(cache.bytes(), 2 * 2 * 8 * 4 * (9 * 3 + 9 * 2));
    }

    #[test]
    fn a_new_rollout_reuses_the_memory_of_the_last() {
        let network = network();
        let prefixes = Prefixes::default();
        let mut slots = Vec::new();
        for rollout in 0..4 {
            let mut prompts: Vec<Vec<u32>> = (0..5).map(|i| vec![1 + rollout as u32, 2 + i, 3]).collect();
            for turn_number in 0..3 {
                let found = turn(&network, &prompts, 10 * rollout + turn_number, &prefixes);
                for (prompt, generation) in prompts.iter_mut().zip(&found) {
                    prompt.extend(&generation.tokens);
                    prompt.push(6);
                }
            }
            let cache = prefixes.begin_turn(10 * rollout + 3, &[&prompts[0]], || unreachable!("there is a cache"));
            slots.push(cache.take_slot());
        }
        assert!(slots.iter().all(|slot| *slot == 5), "{slots:?}");
    }

    #[test]
    fn limits_apply_per_row() {
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
    fn generation_matches_evaluation_without_a_cache() {
        // More tokens than the initial capacity of the cache.
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
            let (stats, _) = network.evaluate(&tokens, &mask, &mask, Adapter::Off, roll_core::Grad::Skip).unwrap();
            let evaluated = &stats.log_probs.f32s().unwrap()[prompt.len() - 1..];
            assert_eq!(evaluated.len(), made.log_probs.len());
            assert!(evaluated.len() >= 36, "{}", evaluated.len());
            for ((a, b), raw) in evaluated.iter().zip(&made.log_probs).zip(&made.raw_log_probs) {
                assert!((a - b).abs() < 1e-4 && (a - raw).abs() < 1e-4, "{a}, {b}, {raw}");
            }
        }
    }

    #[test]
    fn hidden_states_are_causal_and_zero_at_padding() {
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
    fn results_do_not_depend_on_the_rows_at_once() {
        let (network, decode) = (network(), |_: &[u32]| Ok(String::new()));
        let mut prompts: Vec<Vec<u32>> = (0..12).map(|i| vec![3 + i % 5, 4, 1 + i % 3]).collect();
        prompts[3] = (0..9).map(|i| 1 + i % 11).collect();
        // Rows end at different times: by an id or by their limit.
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
        let together = made(6, 64, &order, &Prefixes::default());
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
    fn equal_prompts_match_separate_generations() {
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
