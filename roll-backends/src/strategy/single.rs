//! The strategy for one process: optimizer state and gradient accumulator are on the model's device or in host memory.

use roll_core::{
    DeviceUpdates, Model, OptimizerConfig, ParameterSpec, Result, StateDict, Strategy, StrategyRanks, StrategyReport,
    parse_options, plan::Division,
};

use super::optimizer_location::OptimizerLocation;
use super::saved::{self, SavedOptimizerState};
use super::{check, check_step, not_attached};
use crate::optimizer::{AdamW, Moments, clear, clip_coefficient, norm, scale};

const NAME: &str = "single";

/// Options of the strategy `single`.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SingleOptions {
    /// Where AdamW keeps its moments and updates the parameters. `device`: where the parameters are, so that neither
    /// they nor their gradients go through host memory. `host`: in host memory, which leaves the GPU eight bytes more a
    /// parameter. `auto`: on GPUs up to 268,435,456 parameters, enough for adapters; in host memory otherwise.
    pub optimizer_on: OptimizerLocation,
}

/// The single-process strategy.
#[derive(Default)]
pub struct Single {
    options: SingleOptions,
    ranks: StrategyRanks,
    attached: Option<Attached>,
}

/// The state after a model is attached.
struct Attached {
    optimizer: AdamW,
    max_grad_norm: f64,
    specs: Vec<ParameterSpec>,
    state: OptimizerState,
}

/// Gradients and moments; every vector has the model's flat layout.
enum OptimizerState {
    Host {
        parameters: Vec<f32>,
        gradients: Vec<f32>,
        moments: Moments,
    },
    /// Device updates, and the number of updates so far.
    Device {
        updates: Box<dyn DeviceUpdates>,
        step: u64,
    },
}

impl Single {
    /// Creates a strategy without a model.
    pub fn new(options: SingleOptions) -> Self {
        Self { options, ..Self::default() }
    }

    fn attached(&mut self) -> Result<&mut Attached> {
        self.attached.as_mut().ok_or_else(|| not_attached(NAME))
    }
}

impl Strategy for Single {
    fn attach(&mut self, model: &mut dyn Model, optimizer: &OptimizerConfig) -> Result<()> {
        check(model, optimizer)?;
        let n = model.parameter_count();
        let state = match self.options.optimizer_on.updates(model, n)? {
            Some(updates) => {
                tracing::info!("AdamW updates the {n} parameters on the device they are on");
                OptimizerState::Device { updates, step: 0 }
            }
            None => {
                let mut parameters = vec![0.0; n];
                model.read_parameters(&mut parameters)?;
                OptimizerState::Host { parameters, gradients: vec![0.0; n], moments: Moments::zeros(n) }
            }
        };
        self.attached = Some(Attached {
            optimizer: AdamW::new(optimizer),
            max_grad_norm: optimizer.max_grad_norm,
            specs: model.parameters().to_vec(),
            state,
        });
        Ok(())
    }

    fn accumulate(&mut self, model: &mut dyn Model) -> Result<()> {
        match &mut self.attached()?.state {
            OptimizerState::Host { gradients, .. } => model.take_gradients(gradients),
            // A wrapper of the model may keep gradients in host memory.
            OptimizerState::Device { updates, .. }
                if model.parts().and_then(|parts| parts.device_updates()).is_none() =>
            {
                let mut gradients = vec![0.0; model.parameter_count()];
                model.take_gradients(&mut gradients)?;
                updates.add(&gradients)
            }
            OptimizerState::Device { updates, .. } => updates.accumulate(),
        }
    }

    fn discard(&mut self) {
        match self.attached.as_mut().map(|attached| &mut attached.state) {
            Some(OptimizerState::Host { gradients, .. }) => clear(gradients),
            Some(OptimizerState::Device { updates, .. }) => updates.discard(),
            None => {}
        }
    }

    fn step(&mut self, model: &mut dyn Model, learning_rate: f64, scale_by: f64) -> Result<StrategyReport> {
        let a = self.attached()?;
        check_step(learning_rate, scale_by)?;
        let grad_norm = match &mut a.state {
            OptimizerState::Host { gradients, .. } => {
                scale(gradients, scale_by);
                norm(gradients)
            }
            OptimizerState::Device { updates, .. } => updates.sum_of_squares()?.sqrt() * scale_by.abs(),
        };
        if !grad_norm.is_finite() {
            self.discard();
            return Ok(StrategyReport { grad_norm, clipped: false, applied: false });
        }
        let coefficient = clip_coefficient(grad_norm, a.max_grad_norm);
        match &mut a.state {
            OptimizerState::Host { parameters, gradients, moments } => {
                scale(gradients, coefficient);
                // Read again: a checkpoint or an import may have replaced the parameters since the last step.
                model.read_parameters(parameters)?;
                a.optimizer.update(parameters, gradients, moments, learning_rate);
                model.write_parameters(parameters)?;
            }
            OptimizerState::Device { updates, step } => {
                *step += 1;
                updates.update(&a.optimizer.coefficients(*step, learning_rate, [scale_by, coefficient]))?;
            }
        }
        self.discard();
        Ok(StrategyReport { grad_norm, clipped: coefficient < 1.0, applied: true })
    }

    fn ranks(&self) -> &StrategyRanks {
        &self.ranks
    }

    fn state(&self) -> Result<StateDict> {
        let a = self.attached.as_ref().ok_or_else(|| not_attached(NAME))?;
        let mut state = StateDict::new();
        let step = match &a.state {
            OptimizerState::Host { moments, .. } => {
                saved::save_part(&mut state, &a.specs, [&moments.exp_avg, &moments.exp_avg_sq])?;
                moments.step
            }
            OptimizerState::Device { updates, step } => {
                saved::save_part(&mut state, &a.specs, updates.read_moments()?.each_ref().map(Vec::as_slice))?;
                *step
            }
        };
        saved::save_step(&mut state, step)?;
        Ok(state)
    }

    /// Fails, without changing anything, if a tensor is missing, unexpected, misshapen, or holds values that are
    /// invalid for a moment.
    fn load_state(&mut self, state: &StateDict) -> Result<()> {
        let a = self.attached()?;
        let saved = SavedOptimizerState::check(&a.specs, state)?;
        let [exp_avg, exp_avg_sq] = saved.flat(&a.specs)?;
        match &mut a.state {
            OptimizerState::Host { moments, .. } => {
                *moments = Moments { exp_avg, exp_avg_sq, step: saved.step };
            }
            OptimizerState::Device { updates, step } => {
                updates.write_moments([&exp_avg, &exp_avg_sq])?;
                *step = saved.step;
            }
        }
        Ok(())
    }
}

roll_core::register! {
    Strategy, NAME, SingleOptions,
    "One process, AdamW on the GPU or in host memory",
    |options, _| Ok(Single::new(options)),
    plan: |options| {
        let options: SingleOptions = parse_options("strategy", options)?;
        let state_on_gpu = options.optimizer_on.most_on_gpu();
        Ok(Division { state_on_gpu, copies_parameters: true, ..Division::default() })
    },
}

#[cfg(test)]
mod device_tests;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use roll_core::{DType, Tensor};

    use super::*;
    use crate::flat_model::FlatModel;

    fn attached(model: &mut FlatModel) -> Single {
        let mut strategy = Single::default();
        strategy.attach(model, &OptimizerConfig::default()).unwrap();
        strategy
    }

    fn step(strategy: &mut Single, model: &mut FlatModel, gradients: &[f32]) -> StrategyReport {
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
            let message = Single::default().attach(&mut model, &config).unwrap_err().to_string();
            assert!(message.contains(key), "{message}");
        }
        assert!(Single::default().accumulate(&mut model).is_err());
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
