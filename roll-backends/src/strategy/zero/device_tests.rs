//! Tests of the strategy `zero` with updates on the parameters' device.
#![allow(clippy::unwrap_used)]

use std::ops::Range;
use std::time::Duration;

use burn_tensor::{Device, Tensor, TensorData};
use roll_core::{SingleRank, ThreadRanks};

use super::*;
use crate::Backend;
use crate::flat_model::FlatModel;
use crate::strategy::OptimizerLocation;
use crate::tests::device_model::DeviceModel;
use crate::tests::{assert_near, devices};

const LONG: Duration = Duration::from_secs(60);
/// Tensors that are not aligned with the shards of the ranks.
const SHAPES: [(&str, &[usize]); 5] = [("a", &[3, 7]), ("b", &[5]), ("c", &[1]), ("d", &[16, 9]), ("e", &[31])];
/// Backward passes of a step, over all ranks.
const PULLS: usize = 4;

fn options(optimizer_on: OptimizerLocation, stage: u8, bucket: usize) -> ZeroOptions {
    ZeroOptions { stage, reduce_bucket_size: bucket, optimizer_on, check_every: 1, ..ZeroOptions::default() }
}

fn optimizer() -> OptimizerConfig {
    // Every step is clipped.
    OptimizerConfig { weight_decay: 0.1, max_grad_norm: 1.0, ..OptimizerConfig::default() }
}

/// Runs a rank's share of some steps; returns the gradient norms.
fn train(strategy: &mut Zero, model: &mut DeviceModel, steps: Range<usize>) -> Result<Vec<f64>> {
    let (rank, world) = (strategy.ranks().all.rank().0, strategy.ranks().all.world_size());
    let mut norms = Vec::new();
    for step in steps {
        for pull in rank * PULLS / world..(rank + 1) * PULLS / world {
            strategy.before_last_pull(model)?;
            model.pull(step * PULLS + pull);
            strategy.accumulate(model)?;
        }
        norms.push(strategy.step(model, 1e-2, 1.0 / PULLS as f64)?.grad_norm);
    }
    Ok(norms)
}

/// The results of a run: parameters, gradient norms, and the optimizer state of rank 0.
type After = (Vec<f32>, Vec<f64>, StateDict);

/// Trains with different options for each range of steps, on ranks that must agree.
fn run(ranks: usize, device: &Device, parts: &[(ZeroOptions, Range<usize>)]) -> After {
    let results = ThreadRanks::run(ranks, LONG, |ranks| {
        let mut model = DeviceModel::of(&SHAPES, device);
        let (mut norms, mut state) = (Vec::new(), None);
        for (options, steps) in parts {
            let mut strategy = Zero::new(options.clone(), ranks.clone())?;
            strategy.attach(&mut model, &optimizer())?;
            // Only rank 0 receives the state; a real run reads it from a file.
            if let Some(state) = &state {
                strategy.load_state(&broadcast_state(state, model.parameters(), ranks.as_ref())?)?;
            }
            norms.extend(train(&mut strategy, &mut model, steps.clone())?);
            state = Some(strategy.state()?);
        }
        Ok((model.values(), norms, state.unwrap_or_default()))
    });
    let mut results: Vec<After> = results.into_iter().map(Result::unwrap).collect();
    assert!(results.iter().all(|(values, norms, _)| (values, norms) == (&results[0].0, &results[0].1)));
    results.swap_remove(0)
}

/// Broadcasts the state of rank 0 to every rank.
fn broadcast_state(state: &StateDict, specs: &[ParameterSpec], ranks: &dyn Communicator) -> Result<StateDict> {
    let count: usize = specs.iter().map(ParameterSpec::len).sum();
    let mut flat = [vec![0.0; count], vec![0.0; count]];
    let mut step = [0.0];
    if let Ok(saved) = SavedOptimizerState::check(specs, state) {
        flat = saved.flat(specs)?;
        step[0] = saved.step as f32;
    }
    let root = roll_core::Rank(0);
    ranks.broadcast(&mut flat[0], root)?;
    ranks.broadcast(&mut flat[1], root)?;
    ranks.broadcast(&mut step, root)?;
    let mut all = StateDict::new();
    saved::save_part(&mut all, specs, flat.each_ref().map(Vec::as_slice))?;
    saved::save_step(&mut all, step[0] as u64)?;
    Ok(all)
}

/// Asserts that two runs are the same: bit for bit if several ranks sum in host memory and the kernels are those of
/// the host. A rank alone that updates on the device sums there, in another order.
fn assert_same(what: &str, exact: bool, found: &After, expected: &After) {
    assert_eq!(found.1.len(), expected.1.len(), "{what}");
    assert!(found.2.keys().eq(expected.2.keys()), "{what}");
    if exact {
        assert_eq!((&found.0, &found.1), (&expected.0, &expected.1), "{what}");
        assert!(found.2.iter().zip(&expected.2).all(|(a, b)| a.1.as_bytes() == b.1.as_bytes()), "{what}");
        return;
    }
    assert_near(what, &found.0, &expected.0);
    assert!(found.1.iter().zip(&expected.1).all(|(a, b)| (a - b).abs() < 1e-6 * b), "{what}");
    for (name, tensor) in expected.2.iter().filter(|(name, _)| *name != "step") {
        assert_near(&format!("{name}, {what}"), &found.2[name].to_f32_vec(), &tensor.to_f32_vec());
    }
}

#[test]
fn device_updates_match_host_updates_at_every_stage_and_number_of_ranks() {
    for (backend, device) in devices() {
        for ranks in [1, 2, 4] {
            let exact = backend == Backend::Flex && ranks > 1;
            for stage in 0..=3 {
                for bucket in [1, 40, 1 << 20] {
                    let at = |location| run(ranks, &device, &[(options(location, stage, bucket), 0..4)]);
                    let what = format!("{backend}, {ranks} ranks, stage {stage}, buckets of {bucket}");
                    assert_same(&what, exact, &at(OptimizerLocation::Device), &at(OptimizerLocation::Host));
                }
            }
        }
    }
}

#[test]
fn training_resumes_on_the_device_and_in_host_memory_at_any_stage() {
    let (device, host) = (OptimizerLocation::Device, OptimizerLocation::Host);
    for (backend, on) in devices() {
        for ranks in [1, 2, 4] {
            let exact = backend == Backend::Flex && ranks > 1;
            let expected = run(ranks, &on, &[(options(host, 1, 40), 0..6)]);
            for stages in [[0, 2], [1, 0], [2, 3], [3, 1]] {
                for [first, second] in [[device, host], [host, device], [device, device]] {
                    let [before, after] = [options(first, stages[0], 40), options(second, stages[1], 40)];
                    let what = format!("{backend}, {ranks} ranks, stages {stages:?}, {first:?} then {second:?}");
                    assert_same(&what, exact, &run(ranks, &on, &[(before, 0..3), (after, 3..6)]), &expected);
                }
            }
        }
    }
}

#[test]
fn a_non_finite_gradient_on_one_rank_changes_nothing_on_any_device() {
    for (_, device) in devices() {
        for stage in [0, 2] {
            let results = ThreadRanks::run(2, LONG, |ranks| {
                let rank = ranks.rank().0;
                let mut model = DeviceModel::of(&SHAPES, &device);
                let mut strategy = Zero::new(options(OptimizerLocation::Device, stage, 40), ranks)?;
                strategy.attach(&mut model, &optimizer())?;
                train(&mut strategy, &mut model, 0..1)?;
                let before = model.values();
                if rank == 1 {
                    let bad = TensorData::new(vec![f32::NAN; 5], [5]);
                    model.parameters.add_gradient(1, Tensor::from_data(bad, &device));
                }
                strategy.accumulate(&mut model)?;
                assert!(!strategy.step(&mut model, 1e-2, 1.0)?.applied);
                assert_eq!(model.values(), before);
                train(&mut strategy, &mut model, 1..2)?;
                assert_ne!(model.values(), before);
                Ok(model.values())
            });
            let results: Vec<_> = results.into_iter().map(Result::unwrap).collect();
            assert_eq!(results[0], results[1]);
        }
    }
}

#[test]
fn rejects_a_device_that_the_model_does_not_support() {
    let wanted = options(OptimizerLocation::Device, 2, 40);
    let cpu = Offload { device: OffloadDevice::Cpu, ..Offload::default() };
    let refused = |options: &ZeroOptions| -> String {
        let strategy = Zero::new(options.clone(), Arc::new(SingleRank));
        strategy.and_then(|mut s| s.attach(&mut FlatModel::two(), &optimizer())).unwrap_err().to_string()
    };
    for (options, part) in [
        (wanted.clone(), "in host memory alone"),
        (ZeroOptions { offload_optimizer: cpu, ..wanted }, "strategy.offload_optimizer.device: cpu"),
    ] {
        let message = refused(&options);
        assert!(message.contains("strategy.optimizer_on") && message.contains(part), "{message}");
    }
}

#[test]
fn plans_account_for_the_optimizer_location() {
    let cpu = Offload { device: OffloadDevice::Cpu, ..Offload::default() };
    let most = |options: ZeroOptions| options.division().state_on_gpu;
    assert!(most(ZeroOptions::default()) > 0);
    assert_eq!(most(ZeroOptions { offload_optimizer: cpu, ..ZeroOptions::default() }), 0);
    assert_eq!(most(options(OptimizerLocation::Host, 2, 40)), 0);
    assert_eq!(most(options(OptimizerLocation::Device, 2, 40)), usize::MAX);
}
