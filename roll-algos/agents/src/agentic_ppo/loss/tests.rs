#![allow(clippy::unwrap_used)]
use super::*;
use crate::agentic_ppo::correction::{CorrectionConfig, Filter, IsWeight};

const ROWS: usize = 3;
const COLUMNS: usize = 5;

struct Batch {
    log_probs: Grid,
    old: Grid,
    reference: Grid,
    entropy: Grid,
    advantages: Grid,
    mask: Mask,
    scores: [f64; ROWS],
}

/// A batch without pattern; its last row has no response.
fn batch() -> Batch {
    let mut state = 7u64;
    let mut draw = move |low: f64, high: f64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        low + (high - low) * (state >> 40) as f64 / f64::from(1 << 24)
    };
    let mut grid = |low, high| Grid::new(COLUMNS, (0..ROWS * COLUMNS).map(|_| draw(low, high)).collect()).unwrap();
    let kept = "011010111100000".bytes().map(|b| b == b'1').collect();
    Batch {
        log_probs: grid(-3.0, -0.1),
        old: grid(-3.0, -0.1),
        reference: grid(-3.0, -0.1),
        entropy: grid(0.0, 2.0),
        advantages: grid(-2.0, 2.0),
        mask: Mask::new(COLUMNS, kept).unwrap(),
        scores: [1.0, -0.5, 0.0],
    }
}

impl Batch {
    fn inputs(&self) -> LossInputs<'_> {
        LossInputs {
            log_probs: &self.log_probs,
            entropy: Some(&self.entropy),
            old_log_probs: Some(&self.old),
            infer_log_probs: None,
            ref_log_probs: Some(&self.reference),
            advantages: &self.advantages,
            response_mask: &self.mask,
            episode_scores: &self.scores,
        }
    }

    fn loss(&self, config: &LossConfig) -> PolicyLoss {
        policy_loss(config, &self.inputs(), Totals::of_responses(&self.mask)).unwrap()
    }
}

/// Everything at once, for a variant whose only path to the log-probabilities is the ratio.
fn full() -> LossConfig {
    LossConfig {
        use_kl_loss: true,
        kl_loss_coef: 0.3,
        entropy_loss_coef: 0.1,
        dual_clip_loss: true,
        ..Default::default()
    }
}

#[test]
fn gradient_matches_finite_differences() {
    // The other variants hold their ratio constant by definition, so their gradient is not that of their value.
    for (pg_variant, ratio_type) in [
        (PgVariant::Ppo, RatioType::Token),
        (PgVariant::Ppo, RatioType::Segment),
        (PgVariant::Vanilla, RatioType::Token),
        (PgVariant::Kimi15, RatioType::Token),
    ] {
        let config = LossConfig { pg_variant, ratio_type, ..full() };
        let batch = batch();
        let found = batch.loss(&config);
        let at = |i: usize, step: f64| {
            let mut values = batch.log_probs.values().to_vec();
            values[i] += step;
            let log_probs = Grid::new(COLUMNS, values).unwrap();
            let inputs = LossInputs { log_probs: &log_probs, ..batch.inputs() };
            policy_loss(&config, &inputs, Totals::of_responses(&batch.mask)).unwrap().value
        };
        for (i, slope) in found.d_log_probs.values().iter().enumerate() {
            let quotient = (at(i, 1e-6) - at(i, -1e-6)) / 2e-6;
            assert!((quotient - slope).abs() < 1e-6, "{pg_variant:?} {ratio_type:?} token {i}: {quotient} {slope}");
        }
    }
}

#[test]
fn tokens_outside_the_response_have_no_influence() {
    let config = full();
    let clean = batch();
    let mut spoiled = batch();
    for grid in [&mut spoiled.log_probs, &mut spoiled.old, &mut spoiled.entropy, &mut spoiled.advantages] {
        for b in 0..ROWS {
            for t in (0..COLUMNS).filter(|t| !clean.mask.row(b)[*t]) {
                grid.row_mut(b)[t] = f64::NAN;
            }
        }
    }
    let (a, b) = (clean.loss(&config), spoiled.loss(&config));
    assert_eq!(a.value, b.value);
    assert_eq!(a.d_log_probs, b.d_log_probs);
    assert_eq!(a.metrics, b.metrics);
}

#[test]
fn a_batch_without_any_response_is_zero_and_finite() {
    let mut batch = batch();
    batch.mask = Mask::new(COLUMNS, vec![false; ROWS * COLUMNS]).unwrap();
    for pg_variant in [PgVariant::Ppo, PgVariant::Tis, PgVariant::Topr, PgVariant::Cispo, PgVariant::Kimi15] {
        let found = batch.loss(&LossConfig { pg_variant, ..full() });
        assert_eq!(found.value, 0.0, "{pg_variant:?}");
        assert!(found.metrics.named().values().all(|v| v.is_finite()), "{pg_variant:?}: {:?}", found.metrics);
        assert!(found.metrics.get("ratio_min").is_none());
    }
}

#[test]
fn filtered_tokens_have_no_gradient_unless_the_mean_is_unmasked() {
    let batch = batch();
    let mut infer = batch.old.clone();
    infer.row_mut(1)[1] -= 5.0;
    let inputs = LossInputs { infer_log_probs: Some(&infer), ..batch.inputs() };
    let correction = CorrectionConfig { filters: vec![Filter::default()], is_weight: IsWeight::default() };
    let slope = |loss_agg_mode| {
        let config = LossConfig {
            loss_agg_mode,
            pg_variant: PgVariant::Vanilla,
            train_infer_correction: correction.clone(),
            ..LossConfig::default()
        };
        policy_loss(&config, &inputs, Totals::of_responses(&batch.mask)).unwrap().d_log_probs.row(1)[1]
    };
    assert_eq!(slope(Aggregation::TokenMean), 0.0);
    assert_ne!(slope(Aggregation::TokenMeanUnmasked), 0.0);
}

#[test]
fn before_the_update_the_ratio_is_one() {
    let batch = batch();
    let inputs = LossInputs { old_log_probs: None, ..batch.inputs() };
    let found = policy_loss(&LossConfig::default(), &inputs, Totals::of_responses(&batch.mask)).unwrap();
    assert_eq!((found.metrics.get("ratio_max"), found.metrics.get("clipfrac")), (Some(1.0), Some(0.0)));
    assert!(found.d_log_probs.values().iter().any(|d| *d != 0.0));
}

#[test]
fn shapes_and_missing_inputs_are_errors() {
    let batch = batch();
    let totals = Totals::of_responses(&batch.mask);
    let narrow = Grid::filled(ROWS, COLUMNS - 1, 0.0);
    let error = policy_loss(&full(), &LossInputs { advantages: &narrow, ..batch.inputs() }, totals).unwrap_err();
    assert!(error.to_string().contains("advantages"), "{error}");
    assert!(policy_loss(&full(), &LossInputs { ref_log_probs: None, ..batch.inputs() }, totals).is_err());
    assert!(policy_loss(&full(), &LossInputs { entropy: None, ..batch.inputs() }, totals).is_err());
    assert!(policy_loss(&full(), &LossInputs { episode_scores: &[0.0], ..batch.inputs() }, totals).is_err());
}

#[test]
fn rejects_invalid_loss_options() {
    for config in [
        LossConfig { pg_clip: -0.1, ..Default::default() },
        LossConfig { dual_clip: Some(0.5), ..Default::default() },
        LossConfig { tis_lower_bound: 2.0, ..Default::default() },
        LossConfig { kl_loss_coef: f64::NAN, ..Default::default() },
    ] {
        assert!(config.check().unwrap_err().to_string().contains("`algo."));
    }
}
