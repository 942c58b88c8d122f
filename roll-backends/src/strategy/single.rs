//! The strategy for one process: [`Zero`] with one rank.

use roll_core::{parse_options, plan::Division};

use super::{OptimizerLocation, Zero};

/// Options of the strategy `single`.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SingleOptions {
    /// Where AdamW keeps its moments and updates the parameters. `device`: on the device of the parameters, so that
    /// neither parameters nor gradients go through host memory. `host`: in host memory, which saves eight bytes of GPU
    /// memory per parameter. `auto`: on the GPU if there are at most 268,435,456 parameters, which is enough for
    /// adapters; in host memory otherwise.
    pub optimizer_on: OptimizerLocation,
}

/// Creates the strategy of one process, without a model.
pub fn single(options: SingleOptions) -> Zero {
    Zero::alone(options.optimizer_on)
}

roll_core::register! {
    Strategy, "single", SingleOptions,
    "One process, AdamW on the GPU or in host memory",
    |options, _| Ok(single(options)),
    plan: |options| {
        let options: SingleOptions = parse_options("strategy", options)?;
        let state_on_gpu = options.optimizer_on.max_on_gpu();
        Ok(Division { state_on_gpu, copies_parameters: true, ..Division::default() })
    },
}

#[cfg(test)]
mod device_tests;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use roll_core::{DType, OptimizerConfig, StateDict, Strategy, StrategyReport, Tensor};

    use super::*;
    use crate::flat_model::{BATCH, FlatModel};

    fn attached(model: &mut FlatModel) -> Zero {
        let mut strategy = single(SingleOptions::default());
        strategy.attach(model, &OptimizerConfig::default()).unwrap();
        strategy
    }

    fn step(strategy: &mut Zero, model: &mut FlatModel, gradients: &[f32]) -> StrategyReport {
        model.gradients = gradients.to_vec();
        strategy.accumulate(model).unwrap();
        strategy.step(model, 0.1, 1.0).unwrap()
    }

    #[test]
    fn gradients_accumulate_until_the_step() {
        let mut model = FlatModel::two();
        let mut strategy = attached(&mut model);
        for _ in 0..2 {
            model.gradients = vec![3.0, 0.0, 0.0, 4.0];
            strategy.accumulate(&mut model).unwrap();
        }
        let report = strategy.step(&mut model, 0.1, 0.5).unwrap();
        assert_eq!((report.grad_norm, report.clipped, report.applied), (5.0, true, true));
        assert_eq!(model.gradients, [0.0; 4]);
        assert!(model.values[0] < 1.0 && model.values[1] == 2.0);
        assert_eq!(strategy.step(&mut model, 0.0, 1.0).unwrap().grad_norm, 0.0);
    }

    #[test]
    fn delivered_gradients_leave_the_model_during_the_pull_and_have_the_same_sums() {
        let values_after = |delivers: bool| {
            let mut model = FlatModel::springs();
            let mut strategy = attached(&mut model);
            for step in 0..3 {
                for sample in 0..BATCH {
                    if delivers {
                        strategy.before_last_pull(&mut model).unwrap();
                    }
                    model.pull(step, sample);
                    assert_eq!(model.gradients.iter().all(|g| *g == 0.0), delivers);
                    strategy.accumulate(&mut model).unwrap();
                }
                strategy.step(&mut model, 0.1, 0.25).unwrap();
            }
            model.values
        };
        assert_eq!(values_after(true), values_after(false));
    }

    #[test]
    fn gradients_stay_in_the_model_after_a_discarded_delivery() {
        let mut model = FlatModel::springs();
        let mut strategy = attached(&mut model);
        strategy.before_last_pull(&mut model).unwrap();
        model.pull(0, 0);
        strategy.discard();
        assert_eq!(strategy.step(&mut model, 0.1, 1.0).unwrap().grad_norm, 0.0);
        model.pull(0, 1);
        assert!(model.gradients.iter().all(|g| *g != 0.0));
    }

    #[test]
    fn non_finite_gradients_change_nothing() {
        let mut model = FlatModel::two();
        let mut strategy = attached(&mut model);
        step(&mut strategy, &mut model, &[1.0; 4]);
        let (values, state) = (model.values.clone(), strategy.state().unwrap());
        let report = step(&mut strategy, &mut model, &[1.0, f32::NAN, 1.0, 1.0]);
        assert!(!report.applied && !report.grad_norm.is_finite());
        assert_eq!(model.values, values);
        assert!(state.iter().zip(strategy.state().unwrap()).all(|(a, b)| a.1.as_bytes() == b.1.as_bytes()));
        // The accumulator is clean again.
        assert!(step(&mut strategy, &mut model, &[1.0; 4]).applied);
    }

    #[test]
    fn resume_is_bit_exact() {
        let mut model = FlatModel::two();
        let mut strategy = attached(&mut model);
        step(&mut strategy, &mut model, &[1.0, -2.0, 0.5, 0.1]);
        let state = strategy.state().unwrap();
        let mut other = FlatModel::two().with_values(&model.values);
        let mut restored = attached(&mut other);
        restored.load_state(&state).unwrap();
        for i in 0..20 {
            let gradients = [0.3 / (1 + i) as f32; 4];
            step(&mut strategy, &mut model, &gradients);
            step(&mut restored, &mut other, &gradients);
        }
        assert_eq!(model.values, other.values);
        let (ours, theirs) = (strategy.state().unwrap(), restored.state().unwrap());
        assert!(ours.iter().zip(&theirs).all(|(a, b)| a.1.as_bytes() == b.1.as_bytes()));
    }

    #[test]
    fn rejects_a_state_that_does_not_fit_and_changes_nothing() {
        let mut model = FlatModel::two();
        let mut strategy = attached(&mut model);
        step(&mut strategy, &mut model, &[1.0; 4]);
        let good = strategy.state().unwrap();
        type Spoil = fn(&mut StateDict);
        let spoilt: [(&str, Spoil); 8] = [
            ("`step` is missing", |s| drop(s.remove("step"))),
            ("at least 0", |s| drop(s.insert("step".into(), Tensor::new(vec![-1i64], []).unwrap()))),
            ("`a` is missing", |s| drop(s.remove("exp_avg.a"))),
            ("expected shape [1, 2]", |s| drop(s.insert("exp_avg_sq.b".into(), Tensor::zeros([2])))),
            ("`exp_max.a`", |s| drop(s.insert("exp_max.a".into(), Tensor::zeros([2])))),
            ("must be f32", |s| drop(s.insert("exp_avg.a".into(), Tensor::zeros([2]).to_float(DType::Bf16).unwrap()))),
            ("NaN", |s| drop(s.insert("exp_avg.a".into(), Tensor::full([2], f32::NAN)))),
            ("negative", |s| drop(s.insert("exp_avg_sq.a".into(), Tensor::full([2], -1.0)))),
        ];
        for (expected, spoil) in spoilt {
            let mut state = good.clone();
            spoil(&mut state);
            let message = strategy.load_state(&state).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
        assert!(good.iter().zip(strategy.state().unwrap()).all(|(a, b)| a.1.as_bytes() == b.1.as_bytes()));
    }

    #[test]
    fn rejects_invalid_settings() {
        let mut model = FlatModel::two();
        for (key, config) in [
            ("training.betas", OptimizerConfig { betas: [1.0, 0.9], ..Default::default() }),
            ("training.eps", OptimizerConfig { eps: f64::NAN, ..Default::default() }),
            ("training.max_grad_norm", OptimizerConfig { max_grad_norm: -1.0, ..Default::default() }),
        ] {
            let message = single(SingleOptions::default()).attach(&mut model, &config).unwrap_err().to_string();
            assert!(message.contains(key), "{message}");
        }
        assert!(single(SingleOptions::default()).accumulate(&mut model).is_err());
    }

    #[test]
    fn rejects_a_non_finite_learning_rate() {
        let mut model = FlatModel::two();
        let mut strategy = attached(&mut model);
        let error = strategy.step(&mut model, f64::NAN, 1.0).unwrap_err();
        assert!(error.to_string().contains("training.learning_rate"), "{error}");
        assert_eq!(error.fault(), roll_core::Fault::User);
        assert!(matches!(strategy.step(&mut model, 1e-3, f64::INFINITY), Err(roll_core::Error::Misuse(_))));
    }
}
