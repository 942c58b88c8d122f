//! A diffusion model that is small enough to differentiate by hand, a reward, and a strategy that exposes the gradient
//! of its last update.

// Wrong use of a test double fails the test by a panic.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use roll_core::*;

/// Shape of the latents.
pub const SHAPE: [usize; 4] = [2, 2, 1, 2];
/// Number of values of the latents.
const N: usize = 8;
/// Shape of the frames: two of them, with three channels of 1 x 2 pixels.
const FRAMES: [usize; 4] = [2, 3, 1, 2];
/// Number of values of the frames.
const FRAME_VALUES: usize = 12;

/// The timestep of pure noise.
const PURE_NOISE: f64 = 1000.0;

/// `n` deterministic numbers in [-1, 1) for each `key`.
pub fn values(key: u64, n: usize) -> Vec<f32> {
    let noise = Noise::new(key);
    let mut draw = noise.uniform(Purpose::Synthetic, 0, 0);
    (0..n).map(|_| draw()).collect()
}

/// matrix * x, with `x.len()` columns.
fn product(matrix: &[f32], x: &[f32]) -> Vec<f32> {
    matrix.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(a, b)| a * b).sum()).collect()
}

/// Transposed matrix * y, with `n` columns of the matrix.
fn transposed_product(matrix: &[f32], y: &[f32], n: usize) -> Vec<f32> {
    (0..n).map(|j| y.iter().enumerate().map(|(i, y)| matrix[i * n + j] * y).sum()).collect()
}

/// A mock diffusion model: velocity = tanh((W + adapter) x + b (t / 1000 + p L)), where L is the length of the prompt
/// and p is `prompt_weight`; frames = D x. The trainable parameters are the adapter.
///
/// The model records velocities that algorithms treat as constants (`references`, `unprompted`, `constants`), and
/// returns them again in the same order if the field `replay_...` is set. A test of finite differences sets it, so that
/// these velocities stay the same when the adapter changes.
pub struct MockDiffusion {
    specs: Vec<ParameterSpec>,
    /// The parameters, an 8 x 8 matrix.
    pub adapter: Vec<f32>,
    /// The accumulated gradient of the adapter.
    pub gradients: Arc<Mutex<Vec<f32>>>,
    base: Vec<f32>,
    bias: Vec<f32>,
    decoder: Vec<f32>,
    /// The latents of the first frame that `encode` returns.
    pub first_frame: Option<Tensor>,
    /// A timestep, and the adapter that takes the place of `adapter` at timesteps above it.
    pub early: Option<(f64, Vec<f32>)>,
    /// Velocities without the adapter, in the order of the calls.
    pub references: Vec<Tensor>,
    /// Index of the recorded `references` that the next call returns instead of a new velocity.
    pub replay_references: Option<usize>,
    /// Weight p of the prompt.
    pub prompt_weight: f32,
    /// Velocities with the adapter under the empty prompt, in the order of the calls; recorded if `prompt_weight` is
    /// not 0.
    pub unprompted: Vec<Tensor>,
    /// Index of the recorded `unprompted` that the next call returns instead of a new velocity.
    pub replay_unprompted: Option<usize>,
    /// Velocities with the adapter and without a pullback, in the order of the calls.
    pub constants: Vec<Tensor>,
    /// Index of the recorded `constants` that the next call returns instead of a new velocity.
    pub replay_constants: Option<usize>,
    /// Number of velocities with a pullback.
    pub recorded_passes: usize,
    /// The frame rate that the model reports.
    pub frame_rate: Option<f64>,
    /// Number of calls of `encode`.
    pub encode_calls: usize,
    /// Whether the model reports that it is a diffusion model.
    pub is_diffusion: bool,
    /// The boundary between the schedule's experts.
    pub boundary: Option<f64>,
    /// The noise levels at which the adapter is active. At other levels the model is the frozen base.
    pub trained: SigmaRange,
    /// Timestep and prompt length of each call of `velocity`.
    pub velocity_calls: Vec<(f64, f32)>,
    /// The adapter that training starts from; without one it starts from the base.
    pub start: Option<Vec<f32>>,
    /// If set, the velocity is that of a perfect model of these latents: denoising any noise leads to them.
    pub data: Option<Tensor>,
}

impl Default for MockDiffusion {
    fn default() -> Self {
        // Each matrix has a key of its own, and an arbitrary scale.
        Self {
            specs: vec![ParameterSpec { name: "adapter".into(), shape: vec![N, N] }],
            adapter: values(1, N * N).into_iter().map(|v| 0.3 * v).collect(),
            gradients: Arc::new(Mutex::new(vec![0.0; N * N])),
            base: values(2, N * N).into_iter().map(|v| 0.5 * v).collect(),
            bias: values(3, N),
            decoder: values(4, FRAME_VALUES * N).into_iter().map(|v| 0.2 * v).collect(),
            first_frame: None,
            early: None,
            references: Vec::new(),
            replay_references: None,
            prompt_weight: 0.0,
            unprompted: Vec::new(),
            replay_unprompted: None,
            constants: Vec::new(),
            replay_constants: None,
            recorded_passes: 0,
            frame_rate: None,
            encode_calls: 0,
            is_diffusion: true,
            boundary: None,
            trained: SigmaRange::ALL,
            velocity_calls: Vec::new(),
            start: None,
            data: None,
        }
    }
}

impl MockDiffusion {
    /// Creates a model with deterministic weights.
    pub fn new() -> Self {
        Self::default()
    }
}

impl Model for MockDiffusion {
    fn parameters(&self) -> &[ParameterSpec] {
        &self.specs
    }
    fn read_parameters(&self, out: &mut [f32]) -> Result<()> {
        out.copy_from_slice(&self.adapter);
        Ok(())
    }
    fn write_parameters(&mut self, values: &[f32]) -> Result<()> {
        self.adapter.copy_from_slice(values);
        Ok(())
    }
    fn take_gradients(&mut self, add_into: &mut [f32]) -> Result<()> {
        let mut gradients = self.gradients.lock().unwrap();
        add_into.iter_mut().zip(gradients.iter_mut()).for_each(|(a, g)| *a += std::mem::take(g));
        Ok(())
    }
    fn as_diffusion(&mut self) -> Option<&mut dyn DiffusionModel> {
        self.is_diffusion.then_some(self)
    }
    fn export_adapter(&self) -> Result<BTreeMap<String, StateDict>> {
        Ok(BTreeMap::new())
    }
    fn import_adapter(&mut self, _files: &BTreeMap<String, StateDict>) -> Result<()> {
        Ok(())
    }
}

impl DiffusionModel for MockDiffusion {
    fn schedule(&self) -> ScheduleFacts {
        ScheduleFacts { shift: 5.0, boundary: self.boundary, trained: self.trained }
    }
    fn frame_rate(&self) -> Option<f64> {
        self.frame_rate
    }
    fn encode(&mut self, input: &ConditionInput) -> Result<Conditioning> {
        self.encode_calls += 1;
        Ok(Conditioning {
            context: Tensor::full([1, 1], input.prompt.len() as f32),
            channels: None,
            image_tokens: None,
            first_frame: self.first_frame.clone(),
            latent_shape: SHAPE,
        })
    }
    fn velocity(
        &mut self,
        latents: &Tensor,
        timestep: Timestep,
        conditioning: &Conditioning,
        adapter: Adapter,
        grad: Grad,
    ) -> Result<(Tensor, Option<Pullback>)> {
        let length = conditioning.context.f32s()?[0];
        self.velocity_calls.push((timestep.0, length));
        self.recorded_passes += usize::from(grad.is_on());
        if let Some(data) = &self.data {
            return perfect_velocity(latents, timestep, data, grad);
        }
        if let (Adapter::Off | Adapter::Start, Some(next)) = (adapter, &mut self.replay_references) {
            return Ok((replayed(&self.references, next), None));
        }
        let is_unprompted = adapter == Adapter::On && length == 0.0 && self.prompt_weight != 0.0;
        if let (true, Some(next)) = (is_unprompted, &mut self.replay_unprompted) {
            return Ok((replayed(&self.unprompted, next), None));
        }
        let is_constant = adapter == Adapter::On && !grad.is_on();
        if let (true, Some(next)) = (is_constant, &mut self.replay_constants) {
            return Ok((replayed(&self.constants, next), None));
        }
        let (value, pullback) = self.computed_velocity(latents, timestep, length, adapter, grad)?;
        if adapter != Adapter::On {
            self.references.push(value.clone());
        }
        if is_constant {
            self.constants.push(value.clone());
        }
        if is_unprompted {
            self.unprompted.push(value.clone());
        }
        Ok((value, pullback))
    }
    fn decode(&mut self, latents: &Tensor, grad: Grad) -> Result<(Tensor, Option<Pullback>)> {
        let frames = Tensor::new(product(&self.decoder, latents.f32s()?), FRAMES)?;
        let decoder = self.decoder.clone();
        let pull = move |d: &Tensor| Tensor::new(transposed_product(&decoder, d.f32s()?, N), SHAPE);
        Ok((frames, grad.is_on().then(|| Pullback::new(pull))))
    }
    fn encode_video(&mut self, frames: &Tensor) -> Result<Tensor> {
        Tensor::new(frames.f32s()?[..N].to_vec(), SHAPE)
    }
}

/// The velocity of a perfect model of the latents `data`.
fn perfect_velocity(
    latents: &Tensor,
    timestep: Timestep,
    data: &Tensor,
    grad: Grad,
) -> Result<(Tensor, Option<Pullback>)> {
    let sigma = timestep.0 as f32 / PURE_NOISE as f32;
    let v = latents.f32s()?.iter().zip(data.f32s()?).map(|(x, data)| (x - data) / sigma).collect::<Vec<_>>();
    let pull = |d: &Tensor| Ok(d.clone());
    Ok((Tensor::new(v, SHAPE)?, grad.is_on().then(|| Pullback::new(pull))))
}

/// The recorded velocity at the index `next`, which advances by one.
fn replayed(recorded: &[Tensor], next: &mut usize) -> Tensor {
    *next += 1;
    recorded[*next - 1].clone()
}

impl MockDiffusion {
    /// The velocity by the formula, for a prompt of this `length`.
    fn computed_velocity(
        &self,
        latents: &Tensor,
        timestep: Timestep,
        length: f32,
        adapter: Adapter,
        grad: Grad,
    ) -> Result<(Tensor, Option<Pullback>)> {
        let x = latents.f32s()?.to_vec();
        let is_within = self.trained.contains(Sigma(timestep.0 / PURE_NOISE));
        let is_trained = adapter == Adapter::On && is_within;
        let added = match (adapter, &self.early) {
            (Adapter::Off, _) => None,
            (Adapter::Start, _) => self.start.as_ref(),
            (Adapter::On, Some((above, early_adapter))) if timestep.0 > *above => Some(early_adapter),
            (Adapter::On, _) => Some(&self.adapter),
        };
        let matrix: Vec<f32> = match added {
            Some(added) if is_within => self.base.iter().zip(added).map(|(a, b)| a + b).collect(),
            _ => self.base.clone(),
        };
        let t = timestep.0 as f32 / PURE_NOISE as f32 + self.prompt_weight * length;
        let v: Vec<f32> = product(&matrix, &x).iter().zip(&self.bias).map(|(a, b)| (a + b * t).tanh()).collect();
        let value = Tensor::new(v.clone(), SHAPE)?;
        let gradients = self.gradients.clone();
        let pullback = grad.is_on().then(|| {
            Pullback::new(move |d: &Tensor| {
                // tanh' = 1 - tanh^2.
                let inner: Vec<f32> = d.f32s()?.iter().zip(&v).map(|(d, v)| d * (1.0 - v * v)).collect();
                if is_trained {
                    let mut gradients = gradients.lock().unwrap();
                    for (i, d) in inner.iter().enumerate() {
                        gradients[i * N..(i + 1) * N].iter_mut().zip(&x).for_each(|(g, x)| *g += d * x);
                    }
                }
                Tensor::new(transposed_product(&matrix, &inner, N), SHAPE)
            })
        });
        Ok((value, pullback))
    }
}

/// A reward: score = mean of sin(3 frame + reference), or of sin(3 frame + reference + 1) for prompts with `Oil`. The
/// prompt `missing` has no score, `nan` has a NaN score, `huge` the largest one, whose loss is not finite, and `broken
/// gradient` has a NaN gradient.
pub struct Sines {
    /// The reaction to a missing score.
    pub on_missing: OnMissing,
    /// Whether the reward reports that it is differentiable.
    pub differentiable: bool,
    /// Number of frames of each reference passed to `prepare`.
    pub prepared: Vec<usize>,
    /// Rows (`index` of [`sample`]) for whose clips `prepare` fails with "nothing to score".
    pub faceless: Vec<u64>,
    /// Number of calls of `score`.
    pub scored: usize,
    /// A period and positions in it: of every `period` calls of `score`, the calls at these positions return no score.
    pub unscored: Option<(usize, Vec<usize>)>,
}

impl Sines {
    /// A differentiable reward; samples without a score are skipped.
    pub fn new() -> Self {
        Self::default()
    }
}

impl Default for Sines {
    fn default() -> Self {
        Self {
            on_missing: OnMissing::Skip,
            differentiable: true,
            prepared: Vec::new(),
            faceless: Vec::new(),
            scored: 0,
            unscored: None,
        }
    }
}

impl RewardScorer for Sines {
    fn name(&self) -> &str {
        "sines"
    }
    fn differentiable(&self) -> bool {
        self.differentiable
    }
    fn prepare(&mut self, reference: &Video) -> Result<Target> {
        self.prepared.push(reference.dims()[0]);
        let level = reference.frames().f32s()?[0];
        if self.faceless.iter().any(|row| values(FIRST_CLIP_KEY + row, 1)[0] == level) {
            return Err(Error::nothing_to_score("no face in the reference"));
        }
        Ok(Target::of([("level".to_string(), Tensor::scalar(level))].into()))
    }
    fn score(&mut self, video: &Video, prompt: &str, target: &Target, grad: Grad) -> Result<(Score, Option<Pullback>)> {
        self.scored += 1;
        let is_unscored = |(period, calls): &(usize, Vec<usize>)| calls.contains(&((self.scored - 1) % period));
        if prompt == "missing" || self.unscored.as_ref().is_some_and(is_unscored) {
            return Ok((Score::Missing { reason: "no face in any frame".into() }, None));
        }
        let level = target.tensors["level"].item()? + if prompt.contains("Oil") { 1.0 } else { 0.0 };
        let angles: Vec<f32> = video.frames().f32s()?.iter().map(|v| 3.0 * v + level).collect();
        let n = angles.len() as f32;
        let mut value = angles.iter().map(|a| f64::from(a.sin())).sum::<f64>() / f64::from(n);
        match prompt {
            "nan" => value = f64::NAN,
            "huge" => value = f64::MAX,
            _ => {}
        }
        let has_broken_gradient = prompt == "broken gradient";
        let shape = video.frames().shape().to_vec();
        let pull = move |d: &Tensor| {
            let d = if has_broken_gradient { f32::NAN } else { d.item()? };
            Tensor::new(angles.iter().map(|a| d * 3.0 * a.cos() / n).collect::<Vec<f32>>(), shape)
        };
        let score = Score::Value { value, details: [("sine".to_string(), value)].into() };
        Ok((score, grad.is_on().then(|| Pullback::new(pull))))
    }
    fn on_missing(&self) -> OnMissing {
        self.on_missing
    }
}

/// Key of the frames of [`sample`] 0, beyond the keys of the model's matrices.
const FIRST_CLIP_KEY: u64 = 100;

/// A strategy: gradient descent in one process, without momentum or clipping.
#[derive(Default)]
pub struct Descent {
    ranks: StrategyRanks,
    /// The accumulated gradient.
    pub sum: Vec<f32>,
    /// The gradient of the last update.
    pub gradient: Vec<f32>,
}

impl Strategy for Descent {
    fn attach(&mut self, _model: &mut dyn Model, _optimizer: &OptimizerConfig) -> Result<()> {
        Ok(())
    }
    fn accumulate(&mut self, model: &mut dyn Model) -> Result<()> {
        self.sum.resize(model.parameter_count(), 0.0);
        model.take_gradients(&mut self.sum)
    }
    fn discard(&mut self) {
        self.sum.fill(0.0);
    }
    fn step(&mut self, model: &mut dyn Model, learning_rate: f64, scale: f64) -> Result<StrategyReport> {
        self.gradient = self.sum.iter().map(|g| g * scale as f32).collect();
        self.discard();
        let grad_norm = self.gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
        let applied = grad_norm.is_finite();
        if applied {
            let mut values = vec![0.0; model.parameter_count()];
            model.read_parameters(&mut values)?;
            values.iter_mut().zip(&self.gradient).for_each(|(v, g)| *v -= learning_rate as f32 * g);
            model.write_parameters(&values)?;
        }
        Ok(StrategyReport { grad_norm, clipped: false, applied })
    }
    fn ranks(&self) -> &StrategyRanks {
        &self.ranks
    }
    fn state(&self) -> Result<StateDict> {
        Ok(StateDict::new())
    }
    fn load_state(&mut self, _state: &StateDict) -> Result<()> {
        Ok(())
    }
}

/// A sample with a clip of two frames, as row `index` of a data set.
pub fn sample(index: u64, prompt: &str) -> Sample {
    let frames = Tensor::new(values(FIRST_CLIP_KEY + index, FRAME_VALUES), FRAMES).unwrap();
    let clip = Arc::new(Video::new(frames, 8.0).unwrap());
    Sample::new(index, format!("row {index}"), prompt, SampleVideo::Clip(clip))
}
