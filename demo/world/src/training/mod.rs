//! The training loop of the small networks: parameters, updates, prefetched batches, and the augmentation of pictures.

pub mod batches;
mod muon;
pub mod pictures;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use burn_tensor::{DType, Device, Tensor, TensorData};
use roll_backends::optimizer::{AdamW, LrSchedule, LrSchedulerType, Moments, clip_coefficient, norm, scale};
use roll_backends::{NdTensor, Parameters, Scope, Tape, Weights, vjp};
use roll_core::{Error, Noise, OptimizerConfig, ParameterSpec, Purpose, Result};

use muon::Muon;

/// Hyperparameters of a training.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Name in the progress lines.
    pub name: String,
    /// Number of updates.
    pub steps: u64,
    /// Number of parts of a batch. Each part runs on a thread of its own.
    pub parts: usize,
    /// Samples per part.
    pub batch: usize,
    /// Learning rate after warm-up. It decays to 0 along a cosine.
    pub learning_rate: f64,
    /// Updates of linear warm-up.
    pub warmup: u64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Factor of the learning rate for convolutions, which are then trained by Muon. `None` trains everything by AdamW.
    pub muon: Option<f64>,
    /// Updates between progress lines.
    pub report_every: u64,
}

/// The state of a training. Muon trains the convolutions if [`Plan::muon`] is given; AdamW trains everything else.
pub struct Trainer {
    plan: Plan,
    specs: Vec<ParameterSpec>,
    device: Device,
    values: Vec<f32>,
    gradients: Vec<f32>,
    moments: Moments,
    optimizer: AdamW,
    schedule: LrSchedule,
    step: u64,
    losses: f64,
    started: Instant,
    workers: Vec<Worker>,
    muon: Option<Muon>,
}

/// Computes the gradient of one part of a batch.
struct Worker {
    pool: rayon::ThreadPool,
    parameters: Parameters,
}

/// Gradients are clipped to this global norm.
const MAX_NORM: f64 = 5.0;

impl Trainer {
    /// Creates a trainer. `values` holds the initial tensors of `specs`, concatenated.
    pub fn new(plan: Plan, specs: Vec<ParameterSpec>, values: Vec<f32>, device: &Device) -> Result<Self> {
        let expected: usize = specs.iter().map(ParameterSpec::len).sum();
        if expected != values.len() {
            return Err(Error::shape("initial values", format!("[{expected}]"), &[values.len()]));
        }
        let muon = plan.muon.map(|_| Muon::new(values.len()));
        let config = OptimizerConfig { weight_decay: plan.weight_decay, ..Default::default() };
        Ok(Self {
            schedule: LrSchedule::new(LrSchedulerType::Cosine, plan.learning_rate, plan.warmup, plan.steps),
            optimizer: AdamW::new(&config),
            moments: Moments::zeros(values.len()),
            gradients: vec![0.0; values.len()],
            plan,
            specs,
            device: device.clone(),
            values,
            step: 0,
            losses: 0.0,
            started: Instant::now(),
            workers: Vec::new(),
            muon,
        })
    }

    /// Returns the number of updates so far.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Returns the current parameters, concatenated.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// Runs one update with the gradient of the mean loss over the parts of a batch, and returns the mean. Each part
    /// runs on a thread of its own without further parallelism: operators this small would wait for threads longer than
    /// they compute.
    ///
    /// `loss` reads parameters through the scope and returns a tensor of one element. Fails before the parameters
    /// change if the mean or the gradient is not finite.
    pub fn update<B: Send>(
        &mut self,
        parts: Vec<B>,
        loss: impl Fn(B, &Scope<'_>) -> Result<Tensor<1>> + Sync,
    ) -> Result<f32> {
        let count = parts.len() as f32;
        while self.workers.len() < parts.len() {
            self.workers.push(Worker::start(&self.specs, &self.device)?);
        }
        let (values, device, loss) = (&self.values, &self.device, &loss);
        let found: Vec<Result<f32>> = std::thread::scope(|scope| {
            let threads: Vec<_> = parts
                .into_iter()
                .zip(&self.workers)
                .map(|(part, worker)| scope.spawn(move || worker.gradient(values, device, |scope| loss(part, scope))))
                .collect();
            let panicked = |_| Err(Error::Misuse("a thread that computes gradients panicked".into()));
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(panicked)).collect()
        });
        let mut value = 0.0;
        self.gradients.fill(0.0);
        // Gradients are summed in the order of the parts, so the sum is bitwise reproducible. They are taken after a
        // failure as well, so that no worker keeps a gradient for the next update.
        for worker in &self.workers {
            worker.parameters.take_gradients(&mut self.gradients)?;
        }
        for part in found {
            value += part? / count;
        }
        scale(&mut self.gradients, f64::from(1.0 / count));
        let size = norm(&self.gradients);
        if !value.is_finite() || !size.is_finite() {
            let problem = format!("{}: loss {value}, gradient norm {size} at step {}", self.plan.name, self.step);
            return Err(Error::Misuse(problem));
        }
        scale(&mut self.gradients, clip_coefficient(size, MAX_NORM));
        let rate = self.schedule.at(self.step);
        if let Some((muon, scale)) = self.muon.as_mut().zip(self.plan.muon) {
            let rate = (rate * scale) as f32;
            muon.update(&self.specs, &mut self.values, &mut self.gradients, rate, &self.device)?;
        }
        self.optimizer.update(&mut self.values, &self.gradients, &mut self.moments, rate);
        self.step += 1;
        self.report(value);
        Ok(value)
    }

    /// Prints the mean loss since the last progress line.
    fn report(&mut self, loss: f32) {
        self.losses += f64::from(loss);
        let Plan { name, steps, report_every, .. } = &self.plan;
        if self.step.is_multiple_of(*report_every) || self.step == *steps {
            let since = (self.step - 1) % report_every + 1;
            let (mean, seconds) = (self.losses / since as f64, self.started.elapsed().as_secs_f64());
            println!("{name}: step {}/{steps}, loss {mean:.4}, {seconds:.0} s", self.step);
            self.losses = 0.0;
        }
    }
}

impl Worker {
    fn start(specs: &[ParameterSpec], device: &Device) -> Result<Self> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build();
        let zeros = specs.iter().map(|spec| vec![0.0; spec.len()]).collect();
        Ok(Self {
            pool: pool.map_err(|e| Error::Misuse(format!("starting a thread: {e}")))?,
            parameters: Parameters::new(specs.to_vec(), zeros, device),
        })
    }

    /// Returns the value of `loss` at the parameters `values`. The gradient remains in the worker's parameters.
    fn gradient(
        &self,
        values: &[f32],
        device: &Device,
        loss: impl FnOnce(&Scope<'_>) -> Result<Tensor<1>> + Send,
    ) -> Result<f32> {
        self.pool.install(|| {
            self.parameters.write(values)?;
            let segment = self.parameters.snapshot().segment("")?;
            let weights: Weights = Arc::new(HashMap::new());
            let (outputs, recorded) = vjp(&[], Tape::on(), |_, tape| {
                let scope = Scope {
                    weights: &weights,
                    trainable: Some(&segment),
                    lora_scale: 1.0,
                    tape,
                    products: DType::F32,
                    fp8: false,
                };
                Ok(vec![NdTensor::from(loss(&scope)?)])
            })?;
            let value = roll_backends::to_host(outputs[0].flat().clone())?.to_f32_vec();
            recorded.pull(vec![Some(upload(vec![1.0], [1], device).into())], Some(&self.parameters));
            Ok(value.iter().sum())
        })
    }
}

/// Returns initial values of `specs`: He's normal distribution for `*.weight`, 0.25 for `*.slope`, 0 for everything
/// else.
pub fn initial_values(specs: &[ParameterSpec], seed: u64) -> Vec<f32> {
    let noise = Noise::new(seed);
    let mut values = vec![];
    for (index, spec) in specs.iter().enumerate() {
        if spec.name.ends_with(".weight") {
            let fan_in: usize = spec.shape[1..].iter().product();
            let deviation = (2.0 / fan_in as f32).sqrt();
            let mut uniform = noise.uniform(Purpose::Parameters, 0, index as u64);
            values.extend((0..spec.len()).map(|_| deviation * gaussian(&mut uniform)));
        } else {
            let constant = if spec.name.ends_with(".slope") { 0.25 } else { 0.0 };
            values.extend(std::iter::repeat_n(constant, spec.len()));
        }
    }
    values
}

/// Returns a standard normal value, by Box-Muller. `uniform` returns values in [-1, 1).
pub fn gaussian(uniform: &mut impl FnMut() -> f32) -> f32 {
    let (radius, angle) = (0.5 - 0.5 * uniform(), std::f32::consts::PI * uniform());
    (-2.0 * radius.max(1e-12).ln()).sqrt() * angle.cos()
}

/// Copies a batch to the device.
pub fn upload<const D: usize>(values: Vec<f32>, shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values, shape), (device, DType::F32))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns parameters and loss after fitting `2 x - 1` to two parts of two points each.
    fn fitted() -> (Vec<f32>, f32) {
        let device = Device::flex();
        let plan = Plan {
            name: "line".into(),
            steps: 300,
            parts: 2,
            batch: 2,
            learning_rate: 0.1,
            warmup: 5,
            weight_decay: 0.0,
            muon: None,
            report_every: 300,
        };
        let spec = |name: &str| ParameterSpec { name: name.into(), shape: vec![1] };
        let mut trainer = Trainer::new(plan, vec![spec("slope"), spec("bias")], vec![0.0; 2], &device).unwrap();
        let mut last = f32::INFINITY;
        for _ in 0..300 {
            let parts = vec![[0.0, 1.0], [-1.0, 2.0]];
            let loss = |x: [f32; 2], scope: &Scope<'_>| -> Result<Tensor<1>> {
                let y = upload(x.map(|x| 2.0 * x - 1.0).to_vec(), [2], &Device::flex()).autodiff();
                let x = upload(x.to_vec(), [2], &Device::flex()).autodiff();
                let off = x * scope.weight::<1>("slope")? + scope.weight::<1>("bias")? - y;
                Ok((off.clone() * off).mean())
            };
            last = trainer.update(parts, loss).unwrap();
        }
        (trainer.values().to_vec(), last)
    }

    #[test]
    fn training_fits_what_can_be_fitted_and_gives_the_same_bits_again() {
        let (values, loss) = fitted();
        assert!((values[0] - 2.0).abs() < 1e-2 && (values[1] + 1.0).abs() < 1e-2 && loss < 1e-3, "{values:?} {loss}");
        assert_eq!(values, fitted().0);
    }

    #[test]
    fn a_loss_that_is_not_finite_stops_before_the_parameters_change() {
        let plan = Plan {
            name: "broken".into(),
            steps: 1,
            parts: 1,
            batch: 1,
            learning_rate: 1.0,
            warmup: 0,
            weight_decay: 0.0,
            muon: None,
            report_every: 1,
        };
        let specs = vec![ParameterSpec { name: "a".into(), shape: vec![1] }];
        let mut trainer = Trainer::new(plan, specs, vec![3.0], &Device::flex()).unwrap();
        let broken = |(), scope: &Scope<'_>| Ok(scope.weight::<1>("a")? * f32::NAN);
        assert!(trainer.update(vec![()], broken).is_err());
        assert_eq!(trainer.values(), [3.0]);
    }
}
