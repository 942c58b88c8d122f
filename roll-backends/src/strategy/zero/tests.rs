#![allow(clippy::unwrap_used)]

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use roll_core::{Error, SingleRank, Tensor, ThreadRanks};

use super::*;
use crate::flat_model::{BATCH, FlatModel};
use crate::strategy::{SingleOptions, single};
use crate::tests::CountingRanks;

const LONG: Duration = Duration::from_secs(60);
const STEPS: u64 = 10;

fn options(stage: u8, bucket: usize) -> ZeroOptions {
    ZeroOptions { stage, reduce_bucket_size: bucket, ..ZeroOptions::default() }
}

fn optimizer() -> OptimizerConfig {
    OptimizerConfig { weight_decay: 0.01, max_grad_norm: 2.0, ..OptimizerConfig::default() }
}

/// Runs a rank's share of some steps; `skips` says which samples have no gradient.
fn train(
    strategy: &mut dyn Strategy,
    model: &mut FlatModel,
    steps: Range<u64>,
    skips: impl Fn(u64, usize) -> bool,
) -> Result<Vec<StrategyReport>> {
    let (rank, world) = (strategy.ranks().all.rank().0, strategy.ranks().all.world_size());
    let mut reports = Vec::new();
    for step in steps {
        strategy.discard();
        let mut counted = [0.0];
        for sample in rank * BATCH / world..(rank + 1) * BATCH / world {
            if !skips(step, sample) {
                strategy.before_last_pull(model)?;
                model.pull(step, sample);
                strategy.accumulate(model)?;
                counted[0] += 1.0;
            }
        }
        strategy.ranks().all.all_reduce(&mut counted)?;
        reports.push(strategy.step(model, 0.02, 1.0 / f64::from(counted[0]))?);
    }
    Ok(reports)
}

/// Returns parameters and gradient norms after all steps; asserts that they are equal on every rank.
fn after(ranks: usize, options: &ZeroOptions, parts: bool, skips: fn(u64, usize) -> bool) -> (Vec<f32>, Vec<f64>) {
    let results = ThreadRanks::run(ranks, LONG, |ranks| {
        let mut strategy = Zero::new(options.clone(), ranks)?;
        let mut model = FlatModel::springs().with_parts(parts);
        strategy.attach(&mut model, &optimizer())?;
        let reports = train(&mut strategy, &mut model, 0..STEPS, skips)?;
        Ok((model.values, reports.iter().map(|r| r.grad_norm).collect::<Vec<_>>()))
    });
    let mut results = results.into_iter().map(Result::unwrap);
    let first = results.next().unwrap();
    assert!(results.all(|other| other == first));
    first
}

fn none(_: u64, _: usize) -> bool {
    false
}

fn assert_near(a: &[f32], b: &[f32]) {
    let scale = b.iter().fold(0f32, |m, v| m.max(v.abs()));
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        assert!((a - b).abs() <= 1e-6 * scale.max(1.0), "element {i}: {a} and {b} differ");
    }
}

#[test]
fn all_stages_compute_the_same_bits() {
    for ranks in [1, 2, 4] {
        let expected = after(ranks, &options(0, 50), true, none);
        for stage in 1..=3 {
            assert_eq!(after(ranks, &options(stage, 50), true, none), expected, "stage {stage}, {ranks} ranks");
        }
        let cpu = || Offload { device: OffloadDevice::Cpu, ..Offload::default() };
        let offloaded = ZeroOptions { offload_optimizer: cpu(), offload_param: cpu(), ..options(3, 50) };
        assert_eq!(after(ranks, &offloaded, true, none), expected);
        // The result is also independent of whether the model has parts.
        assert_eq!(after(ranks, &options(2, 50), false, none), expected);
    }
}

#[test]
fn overlap_changes_no_bit() {
    fn some(step: u64, sample: usize) -> bool {
        (step + sample as u64).is_multiple_of(3) || (step == 4 && sample != 1)
    }
    for (ranks, stage) in [(2, 0), (2, 2), (4, 1), (4, 3)] {
        for skips in [none as fn(u64, usize) -> bool, some] {
            for bucket in [1, 50, 1 << 20] {
                let without = ZeroOptions { overlap_comm: false, ..options(stage, bucket) };
                let expected = after(ranks, &without, true, skips);
                assert_eq!(after(ranks, &options(stage, bucket), true, skips), expected, "{ranks} ranks, {stage}");
            }
        }
    }
}

/// Returns the number of reductions that finished before the gradient of the first tensor was ready: the backward pass
/// waits for `wanted` of them, for at most `patience`.
fn reduced_before_the_end(overlap_comm: bool, wanted: usize, patience: Duration) -> Vec<usize> {
    let results = ThreadRanks::run(2, LONG, |ranks| {
        let ranks = CountingRanks::new(ranks);
        let mut strategy = Zero::new(ZeroOptions { overlap_comm, ..options(2, 40) }, ranks.clone())?;
        let mut model = FlatModel::springs();
        strategy.attach(&mut model, &optimizer())?;
        let (seen, done) = (Arc::new(AtomicUsize::new(0)), ranks.clone());
        let at_the_end = seen.clone();
        model.during_pull = Some(Box::new(move |position| {
            let since = Instant::now();
            while position == 1 && done.reduced.load(Ordering::SeqCst) < wanted && since.elapsed() < patience {
                std::thread::yield_now();
            }
            if position == 1 {
                at_the_end.store(done.reduced.load(Ordering::SeqCst), Ordering::SeqCst);
            }
        }));
        strategy.before_last_pull(&mut model)?;
        model.pull(0, 0);
        strategy.accumulate(&mut model)?;
        strategy.step(&mut model, 0.1, 0.5)?;
        // Buckets: tensors 0 to 2, 3, and 4 to 5.
        assert_eq!(ranks.reduced.load(Ordering::SeqCst), 3);
        Ok(seen.load(Ordering::SeqCst))
    });
    results.into_iter().map(Result::unwrap).collect()
}

#[test]
fn buckets_are_reduced_during_the_backward_pass() {
    assert_eq!(reduced_before_the_end(true, 2, LONG), [2, 2]);
    assert_eq!(reduced_before_the_end(false, 1, Duration::from_millis(50)), [0, 0]);
}

#[test]
fn gradients_of_a_parameter_used_twice_add_up() {
    for overlap_comm in [true, false] {
        let results = ThreadRanks::run(2, LONG, |ranks| {
            let mut strategy = Zero::new(ZeroOptions { overlap_comm, ..options(2, 40) }, ranks)?;
            let mut model = FlatModel::springs();
            strategy.attach(&mut model, &optimizer())?;
            strategy.before_last_pull(&mut model)?;
            // The second pass runs while the buckets of the first are in flight.
            model.pull(0, 0);
            model.pull(1, 2);
            strategy.accumulate(&mut model)?;
            Ok((strategy.step(&mut model, 0.1, 0.5)?.grad_norm, model.values))
        });
        let mut alone = single(SingleOptions::default());
        let mut model = FlatModel::springs();
        alone.attach(&mut model, &optimizer()).unwrap();
        model.pull(0, 0);
        model.pull(1, 2);
        alone.accumulate(&mut model).unwrap();
        let expected = alone.step(&mut model, 0.1, 1.0).unwrap().grad_norm;
        for result in results {
            let (norm, values) = result.unwrap();
            assert!((norm - expected).abs() < 1e-5 * expected, "{norm} {expected}");
            assert_near(&values, &model.values);
        }
    }
}

#[test]
fn discard_during_a_backward_pass_drops_its_gradients() {
    let results = ThreadRanks::run(2, LONG, |ranks| {
        let mut strategy = Zero::new(options(2, 1 << 20), ranks)?;
        let mut model = FlatModel::springs();
        strategy.attach(&mut model, &optimizer())?;
        strategy.before_last_pull(&mut model)?;
        // The sink is still attached but accepts nothing any more.
        strategy.discard();
        model.pull(0, 0);
        assert!(model.gradients.iter().any(|g| *g != 0.0));
        model.gradients.fill(0.0);
        strategy.accumulate(&mut model)?;
        Ok(strategy.step(&mut model, 0.1, 0.5)?.grad_norm)
    });
    results.into_iter().for_each(|result| assert_eq!(result.unwrap(), 0.0));
}

#[test]
fn the_number_of_ranks_changes_only_rounding() {
    let (alone, _) = after(1, &options(2, 50), true, none);
    for ranks in [2, 4] {
        for stage in 0..=3 {
            assert_near(&after(ranks, &options(stage, 50), true, none).0, &alone);
        }
    }
}

#[test]
fn the_bucket_size_changes_only_rounding() {
    let (whole, _) = after(2, &options(2, 1 << 20), true, none);
    for size in [1, 7, 600] {
        assert_near(&after(2, &options(2, size), true, none).0, &whole);
    }
}

#[test]
fn one_rank_matches_the_strategy_single_bit_for_bit() {
    let mut alone = single(SingleOptions::default());
    let mut model = FlatModel::springs();
    alone.attach(&mut model, &optimizer()).unwrap();
    train(&mut alone, &mut model, 0..STEPS, none).unwrap();
    for stage in 0..=3 {
        assert_eq!(after(1, &options(stage, 1 << 20), true, none).0, model.values);
    }
}

#[test]
fn ranks_may_skip_samples() {
    // Skips all samples of rank 1 of 2, some of rank 0, and in some steps all but one of four ranks' samples.
    let skips = |step: u64, sample: usize| sample >= 2 || (step % 3 == 1 && sample == 0);
    let expected = after(1, &options(2, 50), true, skips).0;
    for ranks in [2, 4] {
        for stage in 0..=3 {
            assert_near(&after(ranks, &options(stage, 50), true, skips).0, &expected);
        }
    }
}

#[test]
fn training_resumes_with_another_number_of_ranks_stage_and_bucket_size() {
    let expected = after(1, &options(1, 50), true, none).0;
    let half = ThreadRanks::run(4, LONG, |ranks| {
        let mut strategy = Zero::new(options(2, 50), ranks)?;
        let mut model = FlatModel::springs();
        strategy.attach(&mut model, &optimizer())?;
        train(&mut strategy, &mut model, 0..5, none)?;
        Ok((model.values, strategy.state()?))
    });
    let half: Vec<_> = half.into_iter().map(Result::unwrap).collect();
    let (values, state) = &half[0];
    assert!(half[1..].iter().all(|(_, state)| state.is_empty()));
    for (ranks, stage) in [(2, 3), (1, 0), (4, 2)] {
        let results = ThreadRanks::run(ranks, LONG, |ranks| {
            let mut strategy = Zero::new(options(stage, 9), ranks)?;
            let mut model = FlatModel::springs().with_parts(false).with_values(values);
            strategy.attach(&mut model, &optimizer())?;
            strategy.load_state(state)?;
            train(&mut strategy, &mut model, 5..STEPS, none)?;
            Ok(model.values)
        });
        results.into_iter().for_each(|result| assert_near(&result.unwrap(), &expected));
    }
    // Also in the strategy for one process.
    let mut alone = single(SingleOptions::default());
    let mut model = FlatModel::springs().with_values(values);
    alone.attach(&mut model, &optimizer()).unwrap();
    alone.load_state(state).unwrap();
    train(&mut alone, &mut model, 5..STEPS, none).unwrap();
    assert_near(&model.values, &expected);
}

#[test]
fn rejects_a_state_that_does_not_fit_and_changes_nothing() {
    let mut strategy = Zero::new(options(2, 50), Arc::new(SingleRank)).unwrap();
    let mut model = FlatModel::springs();
    strategy.attach(&mut model, &optimizer()).unwrap();
    train(&mut strategy, &mut model, 0..2, none).unwrap();
    let good = strategy.state().unwrap();
    let mut bad = good.clone();
    bad.insert("exp_avg.layer3".into(), Tensor::zeros([9, 64]));
    let message = strategy.load_state(&bad).unwrap_err().to_string();
    assert!(message.contains("exp_avg.layer3") && message.contains("[64, 9]"), "{message}");
    assert!(good.iter().zip(strategy.state().unwrap()).all(|(a, b)| a.1.as_bytes() == b.1.as_bytes()));
}

#[test]
fn a_non_finite_gradient_on_one_rank_changes_nothing_on_any() {
    for stage in 0..=3 {
        let results = ThreadRanks::run(2, LONG, |ranks| {
            let rank = ranks.rank().0;
            let mut strategy = Zero::new(options(stage, 50), ranks)?;
            let mut model = FlatModel::springs();
            strategy.attach(&mut model, &optimizer())?;
            train(&mut strategy, &mut model, 0..1, none)?;
            let before = model.values.clone();
            model.pull(1, rank);
            if rank == 1 {
                model.gradients[40] = f32::INFINITY;
            }
            strategy.accumulate(&mut model)?;
            let report = strategy.step(&mut model, 0.1, 0.5)?;
            assert!(!report.applied && model.values == before);
            // The accumulators are clean again.
            model.pull(2, rank);
            strategy.accumulate(&mut model)?;
            assert!(strategy.step(&mut model, 0.1, 0.5)?.applied);
            Ok(model.values)
        });
        let results: Vec<_> = results.into_iter().map(Result::unwrap).collect();
        assert_eq!(results[0], results[1]);
    }
}

#[test]
fn drift_between_ranks_is_an_error_that_names_the_tensor() {
    let results = ThreadRanks::run(3, LONG, |ranks| {
        let rank = ranks.rank().0;
        let mut strategy = Zero::new(ZeroOptions { check_every: 2, ..options(0, 50) }, ranks)?;
        let mut model = FlatModel::springs();
        strategy.attach(&mut model, &optimizer())?;
        train(&mut strategy, &mut model, 0..1, none)?;
        if rank == 2 {
            let bits = model.values[22].to_bits() ^ (1 << 14);
            model.values[22] = f32::from_bits(bits);
        }
        train(&mut strategy, &mut model, 1..2, none)
    });
    for result in results {
        let message = result.unwrap_err().to_string();
        assert!(message.contains("after 2 updates") && message.contains("`layer1` of rank 2"), "{message}");
    }
}

#[test]
fn rejects_ranks_with_different_models_or_initial_values() {
    let attach = |change: fn(&mut FlatModel)| -> String {
        let results = ThreadRanks::run(2, LONG, |ranks| {
            let mut model = FlatModel::springs();
            if ranks.rank().0 == 1 {
                change(&mut model);
            }
            Zero::new(options(1, 50), ranks)?.attach(&mut model, &optimizer())
        });
        results.into_iter().next().unwrap().unwrap_err().to_string()
    };
    let message = attach(|model| model.specs[3].name = "other".into());
    assert!(message.contains("rank 1 trains 6 tensors that are not the 6 of rank 0"), "{message}");
    let message = attach(|model| model.values[0] += 1.0);
    assert!(message.contains("after 0 updates `layer0` of rank 1"), "{message}");
}

#[test]
fn a_rank_that_fails_in_a_step_fails_the_others() {
    let results = ThreadRanks::run(4, LONG, |ranks| {
        let rank = ranks.rank().0;
        let mut strategy = Zero::new(options(2, 50), ranks)?;
        let mut model = FlatModel::springs();
        strategy.attach(&mut model, &optimizer())?;
        train(&mut strategy, &mut model, 0..2, none)?;
        if rank == 3 {
            return Err(Error::Misuse("no space left on device".into()));
        }
        train(&mut strategy, &mut model, 2..3, none)
    });
    for result in results {
        assert!(result.unwrap_err().to_string().contains("no space left on device"));
    }
}

#[test]
fn rejects_invalid_settings() {
    for options in [
        ZeroOptions { stage: 4, ..ZeroOptions::default() },
        ZeroOptions { reduce_bucket_size: 0, ..ZeroOptions::default() },
        ZeroOptions { timeout_seconds: 0, ..ZeroOptions::default() },
        ZeroOptions {
            offload_optimizer: Offload { device: OffloadDevice::Nvme, pin_memory: false },
            ..ZeroOptions::default()
        },
    ] {
        assert!(Zero::new(options, Arc::new(SingleRank)).is_err());
    }
    let parse = |json: &str| roll_core::serde_json::from_str::<ZeroOptions>(json);
    assert!(parse(r#"{"reduce_bucket_size": 0.5}"#).is_err());
    assert!(parse(r#"{"offload_param": {"device": "gpu"}}"#).is_err());
}
