//! Frequencies of rotary positions: read from a `config.json`, and computed for each pair of channels.

/// Rotary frequencies `theta^(-2i/d)`, and their scaling for longer contexts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// Scaling for longer contexts.
    pub scaling: RopeScaling,
}

/// Scaling of rotary frequencies for contexts longer than those of pretraining.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum RopeScaling {
    /// None.
    #[default]
    None,
    /// All frequencies are divided by one factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Each frequency is divided by a factor of its own, one per pair of channels. GGUF files have such factors.
    Factors(Vec<f64>),
    /// Llama 3.1: low frequencies are divided, high ones are unchanged, with a ramp in between.
    Llama3 {
        /// Divisor of low frequencies.
        factor: f64,
        /// Wavelengths above `original / low` are low frequencies.
        low: f64,
        /// Wavelengths below `original / high` are high frequencies.
        high: f64,
        /// Context of pretraining.
        original: f64,
    },
    /// YaRN (<https://arxiv.org/abs/2309.00071>, as transformers computes it): low frequencies are divided, high ones
    /// are unchanged, with a ramp over the pairs in between; cosines and sines are scaled.
    Yarn {
        /// Divisor of low frequencies.
        factor: f64,
        /// Pairs with at least this number of rotations over the context of pretraining are unchanged.
        fast: f64,
        /// Pairs with at most this number of rotations are divided.
        slow: f64,
        /// Context of pretraining.
        original: f64,
        /// Scale of cosines and sines.
        magnitude: f64,
        /// Whether the ramp begins and ends at whole pairs.
        truncate: bool,
    },
}

/// Keys of rotary parameters that are read. `finetuned` has no effect.
const KEYS: [&str; 15] = [
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "finetuned",
];

impl Rope {
    /// Parses `parameters`, the value of the key `section` (`rope_scaling`, `rope_parameters`) in a `config.json`.
    /// `theta` and `context` are the file's `rope_theta` and `max_position_embeddings`. A `rope_theta` among the
    /// parameters takes precedence over `theta`.
    pub(super) fn parse(
        section: &str,
        parameters: &serde_json::Value,
        theta: Option<f64>,
        default_theta: f64,
        context: usize,
    ) -> Result<Self, String> {
        let number = |key: &str| parameters.get(key).and_then(serde_json::Value::as_f64);
        let needed = |key: &str| match number(key) {
            Some(value) if value > 0.0 && value.is_finite() => Ok(value),
            _ => Err(format!("`{section}` needs a positive number `{key}`")),
        };
        for (key, value) in parameters.as_object().into_iter().flatten() {
            // `short_factor` and `long_factor` (LongRoPE) pass here, because the error about `rope_type` says more.
            if !KEYS.contains(&key.as_str()) && !key.ends_with("_factor") {
                return Err(format!("`{section}`: the key `{key}` is not supported; known: {}", KEYS.join(", ")));
            }
            let is_number = !["rope_type", "type", "truncate", "finetuned"].contains(&key.as_str());
            if is_number && KEYS.contains(&key.as_str()) && !value.is_number() {
                return Err(format!("`{section}`: `{key}`: expected a number, found {value}"));
            }
        }
        if number("partial_rotary_factor").is_some_and(|factor| factor != 1.0) {
            return Err(format!(
                "`{section}`: rotary positions on part of a head (`partial_rotary_factor`) are not supported"
            ));
        }
        let theta = number("rope_theta").or(theta).unwrap_or(default_theta);
        let kind = ["rope_type", "type"].iter().find_map(|key| parameters.get(key)?.as_str()).unwrap_or("default");
        let scaling = match kind {
            "default" => RopeScaling::None,
            "linear" => RopeScaling::Linear { factor: needed("factor")? },
            "llama3" => RopeScaling::Llama3 {
                factor: needed("factor")?,
                low: needed("low_freq_factor")?,
                high: needed("high_freq_factor")?,
                original: number("original_max_position_embeddings").unwrap_or(context as f64),
            },
            "yarn" => {
                let factor = needed("factor")?;
                // `get_mscale` of transformers.
                let magnitude = |mscale: f64| if factor > 1.0 { 0.1 * mscale * factor.ln() + 1.0 } else { 1.0 };
                let mscales = number("mscale").zip(number("mscale_all_dim")).filter(|(a, b)| *a != 0.0 && *b != 0.0);
                RopeScaling::Yarn {
                    factor,
                    fast: number("beta_fast").unwrap_or(32.0),
                    slow: number("beta_slow").unwrap_or(1.0),
                    original: number("original_max_position_embeddings").unwrap_or(context as f64),
                    magnitude: match (number("attention_factor"), mscales) {
                        (Some(attention_factor), _) => attention_factor,
                        (None, Some((mscale, mscale_all_dim))) => magnitude(mscale) / magnitude(mscale_all_dim),
                        (None, None) => magnitude(1.0),
                    },
                    truncate: match parameters.get("truncate") {
                        None => true,
                        Some(serde_json::Value::Bool(truncate)) => *truncate,
                        Some(other) => {
                            return Err(format!("`{section}`: `truncate`: expected a boolean, found {other}"));
                        }
                    },
                }
            }
            other => {
                return Err(format!(
                    "`{section}`: the rotary scaling `{other}` is not supported; known: default, linear, llama3, yarn"
                ));
            }
        };
        Ok(Self { theta, scaling })
    }

    /// Returns the value of `rope_scaling` in a `config.json`. Factors of single frequencies, as in the GGUF files of
    /// Llama 3.1 and 3.2, are written as Llama's rule. Fails if this rule does not yield the same frequencies.
    pub(super) fn scaling_json(&self, head_dim: usize) -> Result<serde_json::Value, String> {
        match &self.scaling {
            RopeScaling::None => Ok(serde_json::Value::Null),
            RopeScaling::Linear { factor } => Ok(serde_json::json!({ "rope_type": "linear", "factor": factor })),
            RopeScaling::Factors(factors) => {
                let factor = factors.iter().copied().fold(1.0, f64::max);
                // The values of Llama 3.1 and 3.2.
                let [low, high, original] = [1.0, 4.0, 8192.0];
                let rule = Self { scaling: RopeScaling::Llama3 { factor, low, high, original }, ..self.clone() };
                let mut pairs = rule.frequencies(head_dim).into_iter().zip(self.frequencies(head_dim));
                if !pairs.all(|(by_rule, by_factor)| (by_rule / by_factor - 1.0).abs() < 1e-4) {
                    return Err("its rotary factors are not those of Llama 3.1, which a config.json can express".into());
                }
                Ok(serde_json::json!({
                    "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
                    "original_max_position_embeddings": original as usize,
                }))
            }
            other => Err(format!("a config.json is not written for the rotary scaling {other:?}")),
        }
    }

    /// Returns the factor of cosines and sines.
    pub fn magnitude(&self) -> f64 {
        match self.scaling {
            RopeScaling::Yarn { magnitude, .. } => magnitude,
            _ => 1.0,
        }
    }

    /// Returns the angle per position of each pair of channels of a head of width `head_dim`.
    pub fn frequencies(&self, head_dim: usize) -> Vec<f64> {
        let unscaled = (0..head_dim / 2).map(|i| self.theta.powf(-2.0 * i as f64 / head_dim as f64));
        match &self.scaling {
            RopeScaling::None => unscaled.collect(),
            RopeScaling::Linear { factor } => unscaled.map(|f| f / factor).collect(),
            RopeScaling::Factors(factors) => unscaled.zip(factors).map(|(f, factor)| f / factor).collect(),
            &RopeScaling::Llama3 { factor, low, high, original } => unscaled
                .map(|f| {
                    let rotations = original * f / std::f64::consts::TAU;
                    // The part of the frequency that is unchanged: 0 for low frequencies, 1 for high ones.
                    let unchanged = ((rotations - low) / (high - low)).clamp(0.0, 1.0);
                    f * unchanged + f / factor * (1.0 - unchanged)
                })
                .collect(),
            &RopeScaling::Yarn { factor, fast, slow, original, truncate, .. } => {
                // The (fractional) number of the pair that rotates so often over the context of pretraining.
                let pair_with = |rotations: f64| {
                    head_dim as f64 * (original / (rotations * std::f64::consts::TAU)).ln() / (2.0 * self.theta.ln())
                };
                let (mut ramp_start, mut ramp_end) = (pair_with(fast), pair_with(slow));
                if truncate {
                    (ramp_start, ramp_end) = (ramp_start.floor(), ramp_end.ceil());
                }
                let (ramp_start, ramp_end) = (ramp_start.max(0.0), ramp_end.min(head_dim as f64 - 1.0));
                // A ramp of no width becomes a step, as in transformers.
                let width = if ramp_end == ramp_start { 0.001 } else { ramp_end - ramp_start };
                let unchanged = |pair: usize| 1.0 - ((pair as f64 - ramp_start) / width).clamp(0.0, 1.0);
                unscaled.enumerate().map(|(i, f)| f * unchanged(i) + f / factor * (1.0 - unchanged(i))).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::LmConfig;
    use super::super::json::tests::json;
    use super::*;

    const YARN: [(usize, f64); 6] = [
        (0, 1.0),
        (20, 0.01333521432163324),
        (30, 0.0010643609812470017),
        (35, 0.0002462584069089387),
        (40, 4.445698525097307e-05),
        (63, 3.102344401879299e-07),
    ];

    #[test]
    fn yarn_matches_transformers() {
        let scaling = serde_json::json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768});
        let config = LmConfig::parse(&json(&[
            ("rope_scaling", scaling),
            ("rope_theta", 1_000_000.0.into()),
            ("max_position_embeddings", 32768.into()),
        ]))
        .unwrap();
        assert_eq!(config.context, 131_072);
        assert!((config.rope.magnitude() - 1.138_629_436_111_989).abs() < 1e-12);
        let frequencies = config.rope.frequencies(128);
        // Expected values were computed in Python by the formulas of `_compute_yarn_parameters`.
        for (i, expected) in YARN {
            assert!((frequencies[i] / expected - 1.0).abs() < 1e-12, "{i}: {}, {expected}", frequencies[i]);
        }
    }

    #[test]
    fn rejects_factors_that_do_not_match_the_head_width() {
        let config = LmConfig::parse(&json(&[])).unwrap();
        for (factors, is_valid) in [(vec![2.0], true), (vec![], false), (vec![1.0, 1.0], false), (vec![0.0], false)] {
            let rope = Rope { scaling: RopeScaling::Factors(factors), ..config.rope.clone() };
            assert_eq!(LmConfig { rope, ..config.clone() }.check().is_ok(), is_valid);
        }
    }

    #[test]
    fn factors_of_llama3_are_recognised() {
        let rope = |scaling| Rope { theta: 500_000.0, scaling };
        let llama3 = rope(RopeScaling::Llama3 { factor: 32.0, low: 1.0, high: 4.0, original: 8192.0 });
        let plain = rope(RopeScaling::None).frequencies(64);
        let factors =
            plain.iter().zip(llama3.frequencies(64)).map(|(plain, scaled)| f64::from((plain / scaled) as f32));
        let factors: Vec<f64> = factors.collect();
        let json = rope(RopeScaling::Factors(factors.clone())).scaling_json(64).unwrap();
        assert_eq!(Rope::parse("rope_scaling", &json, Some(500_000.0), 1.0, 131_072).unwrap(), llama3);
        let other = factors.iter().map(|factor| factor.sqrt()).collect();
        assert!(rope(RopeScaling::Factors(other)).scaling_json(64).is_err());
    }

    #[test]
    fn llama3_scaling_divides_low_frequencies_only() {
        let scaling = serde_json::json!({
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        });
        let json = json(&[("rope_scaling", scaling), ("rope_theta", 500_000.0.into()), ("head_dim", 64.into())]);
        let rope = LmConfig::parse(&json).unwrap().rope;
        let plain = Rope { theta: 500_000.0, scaling: RopeScaling::None }.frequencies(64);
        let scaled = rope.frequencies(64);
        assert_eq!(scaled[0], plain[0]);
        assert!((scaled[31] - plain[31] / 8.0).abs() < 1e-15);
        assert!(scaled.windows(2).all(|w| w[0] > w[1]));
    }
}
