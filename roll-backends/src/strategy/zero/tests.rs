#![allow(clippy::unwrap_used)]

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use roll_core::{Error, Rank, SingleRank, Tensor, ThreadRanks};

use super::*;
use crate::flat_model::{BATCH, FlatModel};
use crate::strategy::{Single, SingleOptions};

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
fn every_stage_gives_the_same_bits_at_one_number_of_ranks() {
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
fn overlap_changes_no_bit_whoever_skips_what() {
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

/// A communicator that counts its reductions.
struct Counting {
    ranks: Arc<dyn Communicator>,
    reduced: Arc<AtomicUsize>,
}

impl Communicator for Counting {
    fn rank(&self) -> Rank {
        self.ranks.rank()
    }
    fn world_size(&self) -> usize {
        self.ranks.world_size()
    }
    fn all_reduce(&self, values: &mut [f32]) -> Result<()> {
        self.ranks.all_reduce(values)
    }
    fn reduce_scatter(&self, values: &[f32], out: &mut [f32]) -> Result<()> {
        self.ranks.reduce_scatter(values, out)?;
        self.reduced.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
    fn all_gather(&self, part: &[f32], out: &mut [f32]) -> Result<()> {
        self.ranks.all_gather(part, out)
    }
    fn broadcast(&self, values: &mut [f32], root: Rank) -> Result<()> {
        self.ranks.broadcast(values, root)
    }
    fn barrier(&self) -> Result<()> {
        self.ranks.barrier()
    }
}

/// Returns the number of reductions that finished before the gradient of the first tensor was ready: the backward pass
/// waits for `wanted` of them, for at most `patience`.
fn reduced_before_the_end(overlap_comm: bool, wanted: usize, patience: Duration) -> Vec<usize> {
    let results = ThreadRanks::run(2, LONG, |ranks| {
        let reduced = Arc::new(AtomicUsize::new(0));
        let ranks = Arc::new(Counting { ranks, reduced: reduced.clone() });
        let mut strategy = Zero::new(ZeroOptions { overlap_comm, ..options(2, 40) }, ranks)?;
        let mut model = FlatModel::springs();
        strategy.attach(&mut model, &optimizer())?;
        let (seen, done) = (Arc::new(AtomicUsize::new(0)), reduced.clone());
        let at_the_end = seen.clone();
        model.during_pull = Some(Box::new(move |position| {
            let since = Instant::now();
            while position == 1 && done.load(Ordering::SeqCst) < wanted && since.elapsed() < patience {
                std::thread::yield_now();
            }
            if position == 1 {
                at_the_end.store(done.load(Ordering::SeqCst), Ordering::SeqCst);
            }
        }));
        strategy.before_last_pull(&mut model)?;
        model.pull(0, 0);
        strategy.accumulate(&mut model)?;
        strategy.step(&mut model, 0.1, 0.5)?;
        // Buckets: tensors 0 to 2, 3, and 4 to 5.
        assert_eq!(reduced.load(Ordering::SeqCst), 3);
        Ok(seen.load(Ordering::SeqCst))
    });
    results.into_iter().map(Result::unwrap).collect()
}

#[test]
fn buckets_are_reduced_while_the_pull_goes_on() {
    assert_eq!(reduced_before_the_end(true, 2, LONG), [2, 2]);
    assert_eq!(reduced_before_the_end(false, 1, Duration::from_millis(50)), [0, 0]);
}

#[test]
fn a_parameter_that_is_used_twice_counts_twice() {
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
        let mut alone = Single::new(SingleOptions::default());
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
fn what_is_discarded_during_a_pull_is_gone() {
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
fn the_number_of_ranks_changes_no_more_than_rounding() {
    let (alone, _) = after(1, &options(2, 50), true, none);
    for ranks in [2, 4] {
        for stage in 0..=3 {
            assert_near(&after(ranks, &options(stage, 50), true, none).0, &alone);
        }
    }
}

#[test]
fn the_size_of_buckets_changes_no_more_than_rounding() {
    let (whole, _) = after(2, &options(2, 1 << 20), true, none);
    for size in [1, 7, 600] {
        assert_near(&after(2, &options(2, size), true, none).0, &whole);
    }
}

#[test]
fn one_rank_is_the_strategy_single_bit_for_bit() {
    let mut single = Single::new(SingleOptions::default());
    let mut model = FlatModel::springs();
    single.attach(&mut model, &optimizer()).unwrap();
    train(&mut single, &mut model, 0..STEPS, none).unwrap();
    for stage in 0..=3 {
        assert_eq!(after(1, &options(stage, 1 << 20), true, none).0, model.values);
    }
}

#[test]
fn samples_that_are_skipped_on_some_ranks_stall_nobody_and_count_nowhere() {
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
fn a_run_goes_on_with_another_number_of_ranks_stage_and_bucket_size() {
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
    let mut single = Single::new(SingleOptions::default());
    let mut model = FlatModel::springs().with_values(values);
    single.attach(&mut model, &optimizer()).unwrap();
    single.load_state(state).unwrap();
    train(&mut single, &mut model, 5..STEPS, none).unwrap();
    assert_near(&model.values, &expected);
}

#[test]
fn a_state_that_does_not_fit_is_refused_and_changes_nothing() {
    let mut strategy = Zero::new(options(2, 50), Arc::new(SingleRank)).unwrap();
    let mut model = FlatModel::springs();
    strategy.attach(&mut model, &optimizer()).unwrap();
    train(&mut strategy, &mut model, 0..2, none).unwrap();
    let good = strategy.state().unwrap();
    let mut bad = good.clone();
    bad.insert("exp_avg.layer3".into(), Tensor::zeros([9, 64]));
    let said = strategy.load_state(&bad).unwrap_err().to_string();
    assert!(said.contains("exp_avg.layer3") && said.contains("[64, 9]"), "{said}");
    assert!(good.iter().zip(strategy.state().unwrap()).all(|(a, b)| a.1.as_bytes() == b.1.as_bytes()));
}

#[test]
fn a_gradient_that_is_not_finite_on_one_rank_changes_nothing_on_any() {
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
fn ranks_that_drift_apart_stop_and_say_where() {
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
        let said = result.unwrap_err().to_string();
        assert!(said.contains("after 2 updates") && said.contains("`layer1` of rank 2"), "{said}");
    }
}

#[test]
fn ranks_with_other_models_or_initial_values_are_refused_at_once() {
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
    let said = attach(|model| model.specs[3].name = "other".into());
    assert!(said.contains("rank 1 trains 6 tensors that are not the 6 of rank 0"), "{said}");
    let said = attach(|model| model.values[0] += 1.0);
    assert!(said.contains("after 0 updates `layer0` of rank 1"), "{said}");
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
fn settings_that_can_only_be_mistakes_are_refused() {
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
