//! Sampling of tokens from logits.

use rand::RngCore;
use roll_core::{Error, Result, Sampling};

/// A drawn token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Drawn {
    /// The token.
    pub id: u32,
    /// Log-probability under the sampling distribution: after temperature, top-k and top-p.
    pub log_prob: f32,
    /// Log-probability at temperature 1 over all tokens.
    pub raw_log_prob: f32,
}

/// Number of likelihoods per partial sum. The chunk of the drawn token is found by these sums, the token within it.
const CHUNK: usize = 1 << 10;
/// Number of most likely tokens that are first searched for the nucleus of top-p.
const FIRST_CANDIDATES: usize = 1 << 8;

/// Draws one token from a row of logits. With temperature 0 it is the most likely token (the lowest id of several
/// equally likely ones), and both log-probabilities are those at temperature 1. Fails if the logits are not finite.
pub fn draw(logits: &[f32], sampling: &Sampling, rng: &mut impl RngCore) -> Result<Drawn> {
    let nonfinite = || Error::NonFinite { what: "the logits of the next token".into(), value: f64::NAN };
    let max = largest(logits).filter(|max| max.is_finite()).ok_or_else(nonfinite)?;
    let row = Row { logits, max };
    let raw_log_prob_of = |id: usize| row.log_prob(id, 1.0, row.likelihoods(1.0).total());
    if sampling.temperature == 0.0 {
        let best = logits.iter().position(|l| *l == max).ok_or_else(nonfinite)?;
        let log_prob = raw_log_prob_of(best);
        return Ok(Drawn { id: best as u32, log_prob, raw_log_prob: log_prob });
    }
    let likelihoods = row.likelihoods(sampling.temperature);
    // 53 bits of a uniform number in [0, 1).
    let uniform = (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
    // Without top-k and top-p, all tokens are candidates and need no sorting.
    if sampling.top_k == 0 && sampling.top_p >= 1.0 {
        let total = likelihoods.total();
        let id = likelihoods.token_at(uniform * total);
        let log_prob = row.log_prob(id, sampling.temperature, total);
        let raw_log_prob = if sampling.temperature == 1.0 { log_prob } else { raw_log_prob_of(id) };
        return Ok(Drawn { id: id as u32, log_prob, raw_log_prob });
    }
    let candidates = likelihoods.candidates(sampling);
    let total: f64 = candidates.iter().map(|(_, likelihood)| f64::from(*likelihood)).sum();
    let mut remaining = uniform * total;
    let chosen = candidates.iter().find(|(_, likelihood)| {
        remaining -= f64::from(*likelihood);
        remaining < 0.0
    });
    // Because of rounding, the search can pass the last candidate; then the first candidate is taken.
    let id = chosen.or(candidates.first()).ok_or_else(nonfinite)?.0 as usize;
    let log_prob = row.log_prob(id, sampling.temperature, total);
    Ok(Drawn { id: id as u32, log_prob, raw_log_prob: raw_log_prob_of(id) })
}

/// As [`draw`], without the tokens `never`, as if top-k had removed them. The log-probability at temperature 1 is over
/// all tokens, those too.
pub fn draw_without(never: &[u32], logits: &[f32], sampling: &Sampling, rng: &mut impl RngCore) -> Result<Drawn> {
    if never.is_empty() {
        return draw(logits, sampling, rng);
    }
    let mut allowed = logits.to_vec();
    never.iter().for_each(|id| allowed[*id as usize] = f32::NEG_INFINITY);
    let Drawn { id, log_prob, .. } = draw(&allowed, sampling, rng)?;
    let nonfinite = || Error::NonFinite { what: "the logits of the next token".into(), value: f64::NAN };
    let row = Row { logits, max: largest(logits).filter(|max| max.is_finite()).ok_or_else(nonfinite)? };
    let raw_log_prob = row.log_prob(id as usize, 1.0, row.likelihoods(1.0).total());
    // Greedy tokens have no distribution of their own.
    let log_prob = if sampling.temperature == 0.0 { raw_log_prob } else { log_prob };
    Ok(Drawn { id, log_prob, raw_log_prob })
}

/// Returns the largest logit, or `None` if `logits` is empty or contains a NaN. Sixteen maxima at a time use the vector
/// unit.
fn largest(logits: &[f32]) -> Option<f32> {
    let mut lanes = [f32::NEG_INFINITY; 16];
    let (chunks, rest) = logits.as_chunks::<16>();
    for chunk in chunks {
        for (lane, l) in lanes.iter_mut().zip(chunk) {
            *lane = if *l > *lane { *l } else { *lane };
        }
    }
    let has_nan = logits.iter().fold(false, |has_nan, l| has_nan | l.is_nan());
    let max = rest.iter().chain(&lanes).fold(f32::NEG_INFINITY, |a, b| a.max(*b));
    if has_nan || logits.is_empty() { None } else { Some(max) }
}

/// A row of logits and the largest of them.
struct Row<'a> {
    logits: &'a [f32],
    max: f32,
}

impl Row<'_> {
    /// Returns the likelihood of each token relative to the most likely token.
    fn likelihoods(&self, temperature: f64) -> Likelihoods {
        let inverse = (1.0 / temperature) as f32;
        let mut values: Vec<f32> = self.logits.iter().map(|l| (l - self.max) * inverse).collect();
        let sums = values.chunks_mut(CHUNK).map(|chunk| f64::from(roll_backends::host::exponentials(chunk)));
        Likelihoods { sums: sums.collect(), values }
    }

    /// Returns the log-probability of a token at a temperature. `total` is the sum of the likelihoods at this
    /// temperature.
    fn log_prob(&self, id: usize, temperature: f64, total: f64) -> f32 {
        ((f64::from(self.logits[id]) - f64::from(self.max)) / temperature - total.ln()) as f32
    }
}

/// Likelihoods of all tokens, relative to the most likely token.
struct Likelihoods {
    values: Vec<f32>,
    /// Sum of each chunk.
    sums: Vec<f64>,
}

impl Likelihoods {
    fn total(&self) -> f64 {
        self.sums.iter().sum()
    }

    /// Returns the token at which the cumulative sum exceeds `mass`.
    fn token_at(&self, mass: f64) -> usize {
        let mut remaining = mass;
        let chunk = self.sums.iter().position(|sum| {
            remaining -= sum;
            remaining < 0.0
        });
        // Because of rounding, the search can pass the last token; then the last token with a positive likelihood is
        // taken.
        let chunk = chunk.unwrap_or(self.sums.len() - 1);
        remaining += self.sums[chunk];
        let first = chunk * CHUNK;
        let values = &self.values[first..(first + CHUNK).min(self.values.len())];
        let found = values.iter().position(|likelihood| {
            remaining -= f64::from(*likelihood);
            remaining < 0.0
        });
        first + found.or_else(|| values.iter().rposition(|likelihood| *likelihood > 0.0)).unwrap_or(0)
    }

    /// Returns ids and likelihoods of the tokens that remain after top-k and top-p.
    fn candidates(&self, sampling: &Sampling) -> Vec<(u32, f32)> {
        let descending = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        let mut candidates: Vec<(u32, f32)> = (0..).zip(self.values.iter().copied()).collect();
        if sampling.top_k > 0 && sampling.top_k < candidates.len() {
            candidates.select_nth_unstable_by(sampling.top_k - 1, descending);
            candidates.truncate(sampling.top_k);
        }
        if sampling.top_p >= 1.0 {
            return candidates;
        }
        // The least mass of the nucleus.
        let nucleus_mass =
            sampling.top_p * candidates.iter().map(|(_, likelihood)| f64::from(*likelihood)).sum::<f64>();
        // Only the most likely tokens are sorted, and more of them until they have the mass.
        let mut count = FIRST_CANDIDATES;
        loop {
            let is_all = count >= candidates.len();
            if !is_all {
                candidates.select_nth_unstable_by(count, descending);
            }
            let most_likely = if is_all { &mut candidates[..] } else { &mut candidates[..count] };
            most_likely.sort_unstable_by(descending);
            let cumulative_masses = most_likely.iter().scan(0.0, |mass, (_, likelihood)| {
                *mass += f64::from(*likelihood);
                Some(*mass)
            });
            // The token that reaches the mass also belongs to the nucleus.
            let below_mass = cumulative_masses.take_while(|mass| *mass < nucleus_mass).count();
            if is_all || below_mass < count {
                candidates.truncate(below_mass + 1);
                return candidates;
            }
            count *= 8;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use roll_core::{Noise, Purpose};

    use super::*;

    fn sampling() -> Sampling {
        Sampling { temperature: 1.0, ..Sampling::greedy(1) }
    }

    fn frequencies(logits: &[f32], sampling: &Sampling) -> Vec<f64> {
        let mut rng = Noise::new(1).generator(Purpose::Tokens, 0, 0);
        let mut counts = vec![0.0; logits.len()];
        let draws = 20_000;
        for _ in 0..draws {
            counts[draw(logits, sampling, &mut rng).unwrap().id as usize] += 1.0 / f64::from(draws);
        }
        counts
    }

    #[test]
    fn frequencies_match_log_probabilities() {
        let logits = [0.0, 1.0, 2.0, -1.0];
        for sampling in [
            sampling(),
            Sampling { temperature: 0.5, ..sampling() },
            Sampling { top_k: 2, ..sampling() },
            Sampling { top_p: 0.8, ..sampling() },
        ] {
            let found = frequencies(&logits, &sampling);
            let mut rng = Noise::new(2).generator(Purpose::Tokens, 0, 0);
            for _ in 0..50 {
                let drawn = draw(&logits, &sampling, &mut rng).unwrap();
                let expected = f64::from(drawn.log_prob).exp();
                assert!((found[drawn.id as usize] - expected).abs() < 0.015, "{sampling:?}: {found:?}");
            }
        }
    }

    #[test]
    fn raw_log_probability_has_temperature_one_over_all_tokens() {
        let logits = [0.0, 1.0, 2.0, -1.0];
        let sum = logits.iter().map(|l: &f32| f64::from(*l).exp()).sum::<f64>().ln();
        for sampling in [
            sampling(),
            Sampling { temperature: 0.0, ..sampling() },
            Sampling { temperature: 0.3, ..sampling() },
            Sampling { temperature: 2.0, top_k: 2, ..sampling() },
            Sampling { top_p: 0.8, ..sampling() },
        ] {
            let mut rng = Noise::new(2).generator(Purpose::Tokens, 0, 0);
            let drawn = draw(&logits, &sampling, &mut rng).unwrap();
            let expected = f64::from(logits[drawn.id as usize]) - sum;
            assert!((f64::from(drawn.raw_log_prob) - expected).abs() < 1e-6, "{sampling:?}");
        }
    }

    #[test]
    fn nucleus_includes_the_token_that_reaches_its_mass() {
        // Probabilities 0.09, 0.24, 0.67.
        let at = |top_p| frequencies(&[0.0, 1.0, 2.0], &Sampling { top_p, ..sampling() });
        assert_eq!(at(0.5)[..2], [0.0, 0.0]);
        assert!(at(0.7)[0] == 0.0 && at(0.7)[1] > 0.2);
    }

    #[test]
    fn wide_nucleus_matches_a_full_sort() {
        let logits: Vec<f32> = (0..5000).map(|i| ((i * 7919) % 5000) as f32 / 2500.0).collect();
        let nucleus = Sampling { top_p: 0.7, ..sampling() };
        let found = Row { logits: &logits, max: largest(&logits).unwrap() }.likelihoods(1.0).candidates(&nucleus);
        let mut sorted: Vec<(usize, f64)> = logits.iter().map(|l| f64::from(*l).exp()).enumerate().collect();
        sorted.sort_by(|a, b| b.1.total_cmp(&a.1));
        let total: f64 = sorted.iter().map(|(_, weight)| weight).sum();
        let mut mass = 0.0;
        let short = sorted.iter().take_while(|(_, weight)| {
            mass += weight / total;
            mass < 0.7
        });
        let expected: Vec<usize> = sorted[..=short.count()].iter().map(|(id, _)| *id).collect();
        assert!(expected.len() > FIRST_CANDIDATES && expected.len() < 4000);
        assert_eq!(found.iter().map(|(id, _)| *id as usize).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn frequencies_match_in_a_large_vocabulary() {
        // Two of four chunks have likely tokens.
        let mut logits = vec![-30.0; 3 * CHUNK + 10];
        for (id, logit) in [(5, 0.0), (2 * CHUNK + 1, 1.0), (3 * CHUNK - 1, 2.0)] {
            logits[id] = logit;
        }
        let (found, sum) = (frequencies(&logits, &sampling()), 1.0 + 1f64.exp() + 2f64.exp());
        for (id, logit) in [(5, 0.0f64), (2 * CHUNK + 1, 1.0), (3 * CHUNK - 1, 2.0)] {
            assert!((found[id] - logit.exp() / sum).abs() < 0.015, "{id}");
        }
    }

    #[test]
    fn greedy_takes_the_lowest_id_among_equals() {
        let mut rng = Noise::new(1).generator(Purpose::Tokens, 0, 0);
        let drawn = draw(&[1.0, 3.0, 3.0], &Sampling { temperature: 0.0, ..sampling() }, &mut rng).unwrap();
        assert_eq!(drawn.id, 1);
        assert!((f64::from(drawn.log_prob) - -(2.0 + (-2.0f64).exp()).ln()).abs() < 1e-6);
    }

    #[test]
    fn rejects_logits_that_are_not_finite_and_invalid_options() {
        let mut rng = Noise::new(1).generator(Purpose::Tokens, 0, 0);
        for logits in [vec![f32::NAN, 0.0], vec![f32::INFINITY, 0.0], vec![]] {
            assert!(draw(&logits, &sampling(), &mut rng).is_err());
        }
        assert!(Sampling { top_p: 0.0, ..sampling() }.check().is_err());
        assert!(Sampling { temperature: -1.0, ..sampling() }.check().is_err());
        assert!(Sampling { stop: vec![String::new()], ..sampling() }.check().is_err());
    }
}
