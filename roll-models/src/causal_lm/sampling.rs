//! Drawing tokens from logits.

use rand::RngCore;
use roll_core::{Error, Result, Sampling};

/// A drawn token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Drawn {
    /// Its id.
    pub id: u32,
    /// Its log-probability under the distribution it was drawn from: after temperature, top-k and top-p.
    pub log_prob: f32,
    /// Its log-probability at temperature 1 over all tokens.
    pub raw_log_prob: f32,
}

/// Draws one token from a row of logits. Temperature 0 takes the likeliest, the lowest id among equals, with the
/// log-probability it has at temperature 1. Fails when the logits are not finite.
pub fn draw(logits: &[f32], sampling: &Sampling, rng: &mut impl RngCore) -> Result<Drawn> {
    let nonfinite = || Error::NonFinite { what: "the logits of the next token".into(), value: f64::NAN };
    if logits.iter().any(|l| l.is_nan()) {
        return Err(nonfinite());
    }
    let best = (0..logits.len()).reduce(|a, b| if logits[b] > logits[a] { b } else { a }).ok_or_else(nonfinite)?;
    if !logits[best].is_finite() {
        return Err(nonfinite());
    }
    let max = f64::from(logits[best]);
    let raw = |id: usize| -> f32 {
        let sum: f64 = logits.iter().map(|l| (f64::from(*l) - max).exp()).sum();
        (f64::from(logits[id]) - max - sum.ln()) as f32
    };
    if sampling.temperature == 0.0 {
        let log_prob = raw(best);
        return Ok(Drawn { id: best as u32, log_prob, raw_log_prob: log_prob });
    }
    // Likelihoods relative to the best token's.
    let weight = |i: usize| ((f64::from(logits[i]) - max) / sampling.temperature).exp();
    // 53 bits of a uniform number in [0, 1).
    let uniform = (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
    if sampling.top_k == 0 && sampling.top_p >= 1.0 {
        let total: f64 = (0..logits.len()).map(weight).sum();
        let mut left = uniform * total;
        let drawn = (0..logits.len()).find(|i| {
            left -= weight(*i);
            left < 0.0
        });
        // Rounding can leave a rest beyond the last token; the first is then as good as any.
        let id = drawn.unwrap_or(0);
        let log_prob = (weight(id) / total).ln() as f32;
        let raw_log_prob = if sampling.temperature == 1.0 { log_prob } else { raw(id) };
        return Ok(Drawn { id: id as u32, log_prob, raw_log_prob });
    }
    let mut candidates: Vec<(usize, f64)> = (0..logits.len()).map(|i| (i, weight(i))).collect();
    let descending = |a: &(usize, f64), b: &(usize, f64)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    if sampling.top_k > 0 && sampling.top_k < candidates.len() {
        candidates.select_nth_unstable_by(sampling.top_k - 1, descending);
        candidates.truncate(sampling.top_k);
    }
    if sampling.top_p < 1.0 {
        candidates.sort_unstable_by(descending);
        let wanted = sampling.top_p * candidates.iter().map(|(_, w)| w).sum::<f64>();
        // The token that reaches the mass belongs to it.
        let reached = candidates.iter().scan(0.0, |mass, (_, w)| {
            *mass += w;
            Some(*mass)
        });
        let short = reached.take_while(|mass| *mass < wanted).count();
        candidates.truncate(short + 1);
    }
    let total: f64 = candidates.iter().map(|(_, w)| w).sum();
    let mut left = uniform * total;
    let chosen = candidates.iter().find(|(_, w)| {
        left -= w;
        left < 0.0
    });
    // Rounding can leave a rest beyond the last candidate; the likeliest is then as good as any.
    let (id, weight) = chosen.or(candidates.first()).copied().ok_or_else(nonfinite)?;
    Ok(Drawn { id: id as u32, log_prob: (weight / total).ln() as f32, raw_log_prob: raw(id) })
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
    fn tokens_come_as_often_as_their_log_probability_says() {
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
    fn the_raw_log_probability_is_that_at_temperature_one_over_all_tokens() {
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
    fn the_nucleus_holds_the_token_that_reaches_its_mass() {
        // Probabilities 0.09, 0.24, 0.67.
        let at = |top_p| frequencies(&[0.0, 1.0, 2.0], &Sampling { top_p, ..sampling() });
        assert_eq!(at(0.5)[..2], [0.0, 0.0]);
        assert!(at(0.7)[0] == 0.0 && at(0.7)[1] > 0.2);
    }

    #[test]
    fn greedy_takes_the_first_of_the_best() {
        let mut rng = Noise::new(1).generator(Purpose::Tokens, 0, 0);
        let drawn = draw(&[1.0, 3.0, 3.0], &Sampling { temperature: 0.0, ..sampling() }, &mut rng).unwrap();
        assert_eq!(drawn.id, 1);
        assert!((f64::from(drawn.log_prob) - -(2.0 + (-2.0f64).exp()).ln()).abs() < 1e-6);
    }

    #[test]
    fn what_is_not_finite_is_an_error() {
        let mut rng = Noise::new(1).generator(Purpose::Tokens, 0, 0);
        for logits in [vec![f32::NAN, 0.0], vec![f32::INFINITY, 0.0], vec![]] {
            assert!(draw(&logits, &sampling(), &mut rng).is_err());
        }
        assert!(Sampling { top_p: 0.0, ..sampling() }.check().is_err());
        assert!(Sampling { temperature: -1.0, ..sampling() }.check().is_err());
        assert!(Sampling { stop: vec![String::new()], ..sampling() }.check().is_err());
    }
}
