//! Tests of the strategy `single` with updates on the parameters' device.
#![allow(clippy::unwrap_used)]

use burn_tensor::{Tensor, TensorData};
use roll_core::{Model, OptimizerConfig, Strategy, StrategyReport};

use super::*;
use crate::Backend;
use crate::flat_model::FlatModel;
use crate::tests::device_model::DeviceModel;
use crate::tests::{assert_near, devices};

fn attached(model: &mut DeviceModel, optimizer_on: OptimizerLocation, max_grad_norm: f64) -> Zero {
    let mut strategy = single(SingleOptions { optimizer_on });
    let config = OptimizerConfig { max_grad_norm, weight_decay: 0.1, ..OptimizerConfig::default() };
    strategy.attach(model, &config).unwrap();
    strategy
}

/// One step with two backward passes.
fn step(strategy: &mut Zero, model: &mut DeviceModel, number: usize) -> StrategyReport {
    for pull in 0..2 {
        model.pull(2 * number + pull);
        strategy.accumulate(model).unwrap();
    }
    strategy.step(model, 1e-2, 0.5).unwrap()
}

fn steps(strategy: &mut Zero, model: &mut DeviceModel, numbers: std::ops::Range<usize>) {
    for number in numbers {
        assert!(step(strategy, model, number).applied);
    }
}

#[test]
fn device_steps_match_host_steps() {
    for (backend, device) in devices() {
        for max_grad_norm in [0.0, 0.5] {
            let mut models = [DeviceModel::new(&device), DeviceModel::new(&device)];
            let [here, there] = &mut models;
            let mut host = attached(here, OptimizerLocation::Host, max_grad_norm);
            let mut on_device = attached(there, OptimizerLocation::Device, max_grad_norm);
            for number in 0..4 {
                let reports = [step(&mut host, here, number), step(&mut on_device, there, number)];
                assert!((reports[0].grad_norm - reports[1].grad_norm).abs() < 1e-6 * reports[0].grad_norm);
                assert_eq!((reports[0].clipped, reports[0].applied), (reports[1].clipped, reports[1].applied));
            }
            let what = format!("{backend}, clipped at {max_grad_norm}");
            match backend == Backend::Flex && max_grad_norm == 0.0 {
                true => assert_eq!(here.values(), there.values(), "{what}"),
                false => assert_near(&what, &there.values(), &here.values()),
            }
            let (ours, theirs) = (host.state().unwrap(), on_device.state().unwrap());
            assert!(ours.keys().eq(theirs.keys()) && ours["step"].as_bytes() == theirs["step"].as_bytes());
            for (name, tensor) in ours.iter().filter(|(name, _)| *name != "step") {
                assert_near(&format!("{name}, {what}"), &theirs[name].to_f32_vec(), &tensor.to_f32_vec());
            }
        }
    }
}

#[test]
fn training_resumes_on_the_device_and_in_host_memory() {
    for (backend, device) in devices() {
        for from in [OptimizerLocation::Device, OptimizerLocation::Host] {
            for to in [OptimizerLocation::Device, OptimizerLocation::Host] {
                let mut model = DeviceModel::new(&device);
                let mut strategy = attached(&mut model, from, 1.0);
                steps(&mut strategy, &mut model, 0..2);
                let mut resumed = DeviceModel::new(&device);
                resumed.write_parameters(&model.values()).unwrap();
                let mut continued = attached(&mut resumed, to, 1.0);
                continued.load_state(&strategy.state().unwrap()).unwrap();
                steps(&mut strategy, &mut model, 2..4);
                steps(&mut continued, &mut resumed, 2..4);
                match from == to {
                    true => assert_eq!(model.values(), resumed.values(), "{backend}, {from:?}"),
                    false => assert_near(&format!("{backend}, {from:?} to {to:?}"), &resumed.values(), &model.values()),
                }
            }
        }
    }
}

#[test]
fn gradients_of_a_model_without_device_updates_pass_through_host_memory() {
    for (_, device) in devices() {
        let run = |wrapped: bool| {
            let mut model = DeviceModel::new(&device);
            let mut strategy = attached(&mut model, OptimizerLocation::Device, 1.0);
            model.updates = !wrapped;
            steps(&mut strategy, &mut model, 0..3);
            model.values()
        };
        assert_near("through host memory", &run(true), &run(false));
    }
}

#[test]
fn non_finite_gradients_on_the_device_change_nothing() {
    for (_, device) in devices() {
        let mut model = DeviceModel::new(&device);
        let mut strategy = attached(&mut model, OptimizerLocation::Device, 1.0);
        step(&mut strategy, &mut model, 0);
        let (values, state) = (model.values(), strategy.state().unwrap());
        model.parameters.add_gradient(1, Tensor::from_data(TensorData::new(vec![f32::NAN; 3], [3]), &device));
        strategy.accumulate(&mut model).unwrap();
        let report = strategy.step(&mut model, 1e-2, 1.0).unwrap();
        assert!(!report.applied && !report.grad_norm.is_finite());
        assert_eq!(model.values(), values);
        assert!(state.iter().zip(strategy.state().unwrap()).all(|(a, b)| a.1.as_bytes() == b.1.as_bytes()));
        assert!(step(&mut strategy, &mut model, 1).applied);
    }
}

#[test]
fn rejects_a_device_that_the_model_does_not_support() {
    let options = SingleOptions { optimizer_on: OptimizerLocation::Device };
    let refused = single(options).attach(&mut FlatModel::two(), &OptimizerConfig::default());
    let message = refused.unwrap_err().to_string();
    assert!(message.contains("strategy.optimizer_on") && message.contains("in host memory alone"), "{message}");
}
