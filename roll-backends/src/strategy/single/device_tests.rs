//! Tests of the strategy `single` with updates on the parameters' device.
#![allow(clippy::unwrap_used)]

use burn::tensor::{Tensor, TensorData};

use super::*;
use crate::Backend;
use crate::flat_model::FlatModel;
use crate::strategy::device_model::{OnDevice, assert_near, devices};

fn attached(model: &mut OnDevice, optimizer_on: OptimizerPlace, max_grad_norm: f64) -> Single {
    let mut strategy = Single::new(SingleOptions { optimizer_on });
    let config = OptimizerConfig { max_grad_norm, weight_decay: 0.1, ..OptimizerConfig::default() };
    strategy.attach(model, &config).unwrap();
    strategy
}

/// One step with two backward passes.
fn step(strategy: &mut Single, model: &mut OnDevice, number: usize) -> StrategyReport {
    for pull in 0..2 {
        model.pull(2 * number + pull);
        strategy.accumulate(model).unwrap();
    }
    strategy.step(model, 1e-2, 0.5).unwrap()
}

fn steps(strategy: &mut Single, model: &mut OnDevice, numbers: std::ops::Range<usize>) {
    for number in numbers {
        assert!(step(strategy, model, number).applied);
    }
}

#[test]
fn steps_on_the_device_are_those_in_host_memory_and_without_clipping_on_flex_bit_for_bit() {
    for (backend, device) in devices() {
        for max_grad_norm in [0.0, 0.5] {
            let mut models = [OnDevice::new(&device), OnDevice::new(&device)];
            let [here, there] = &mut models;
            let mut host = attached(here, OptimizerPlace::Host, max_grad_norm);
            let mut on_device = attached(there, OptimizerPlace::Device, max_grad_norm);
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
fn a_state_of_the_device_is_continued_in_host_memory_and_the_other_way_round() {
    for (backend, device) in devices() {
        for from in [OptimizerPlace::Device, OptimizerPlace::Host] {
            for to in [OptimizerPlace::Device, OptimizerPlace::Host] {
                let mut model = OnDevice::new(&device);
                let mut strategy = attached(&mut model, from, 1.0);
                steps(&mut strategy, &mut model, 0..2);
                let mut resumed = OnDevice::new(&device);
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
fn gradients_that_a_wrapper_keeps_to_itself_reach_the_device_through_host_memory() {
    for (_, device) in devices() {
        let run = |wrapped: bool| {
            let mut model = OnDevice::new(&device);
            let mut strategy = attached(&mut model, OptimizerPlace::Device, 1.0);
            model.updates = !wrapped;
            steps(&mut strategy, &mut model, 0..3);
            model.values()
        };
        assert_near("through host memory", &run(true), &run(false));
    }
}

#[test]
fn a_gradient_on_the_device_that_is_not_finite_changes_neither_parameters_nor_state() {
    for (_, device) in devices() {
        let mut model = OnDevice::new(&device);
        let mut strategy = attached(&mut model, OptimizerPlace::Device, 1.0);
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
fn a_device_that_cannot_be_had_is_an_error_of_the_configuration() {
    let options = SingleOptions { optimizer_on: OptimizerPlace::Device };
    let refused = Single::new(options).attach(&mut FlatModel::two(), &OptimizerConfig::default());
    let message = refused.unwrap_err().to_string();
    assert!(message.contains("strategy.optimizer_on") && message.contains("in host memory alone"), "{message}");
}
