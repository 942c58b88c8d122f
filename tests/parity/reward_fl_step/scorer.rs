//! The case's scorer: a small convolutional embedder of frames and the pooled cosine to reference embeddings.

use burn_tensor::{Device, Tensor as Burn, activation::silu, module::conv2d, ops::ConvOptions};
use roll_backends::{NdTensor, Tape, host, vjp};
use roll_core::{Error, Grad, Pullback, Result, RewardScorer, Score, StateDict, Target, Tensor, Video};

use crate::case::Outcome;

pub struct ConvScorer {
    conv1: (Burn<4>, Burn<1>),
    conv2: (Burn<4>, Burn<1>),
    proj: (Burn<2>, Burn<1>),
    device: Device,
    /// The result of `prepare`.
    pub prepared: Option<Target>,
}

impl ConvScorer {
    pub fn new(weights: &StateDict, device: &Device) -> Outcome<Self> {
        fn load<const D: usize>(weights: &StateDict, name: &str, device: &Device) -> Outcome<(Burn<D>, Burn<1>)> {
            let get = |part: &str| weights.get(&format!("{name}.{part}")).ok_or(format!("no `{name}.{part}`"));
            Ok((host::to_device(get("weight")?, device)?, host::to_device(get("bias")?, device)?))
        }
        Ok(Self {
            conv1: load(weights, "conv1", device)?,
            conv2: load(weights, "conv2", device)?,
            proj: load(weights, "proj", device)?,
            device: device.clone(),
            prepared: None,
        })
    }

    /// One embedding per frame, `[T, E]`; those of frames without a face are zero.
    pub fn embeddings(&self, video: &Video, target: &Target) -> Outcome<Tensor> {
        let frames = host::to_device::<4>(video.frames(), &self.device)?;
        let detected = host::to_device::<2>(&target.tensors["detected"], &self.device)?;
        Ok(host::to_host(self.embed(frames) * detected)?)
    }

    fn embed(&self, frames: Burn<4>) -> Burn<2> {
        let halved = || ConvOptions::new([2, 2], [1, 1], [1, 1], 1);
        let conv = |x, (w, b): &(Burn<4>, Burn<1>)| silu(conv2d(x, w.clone(), Some(b.clone()), halved()));
        let x = conv(conv(frames, &self.conv1), &self.conv2);
        let [t, c, h, w] = x.dims();
        let means = x.reshape([t, c, h * w]).mean_dim(2).reshape([t, c]);
        means.matmul(self.proj.0.clone().transpose()) + self.proj.1.clone().unsqueeze()
    }
}

impl RewardScorer for ConvScorer {
    fn name(&self) -> &str {
        "the case's scorer"
    }

    fn differentiable(&self) -> bool {
        true
    }

    fn prepare(&mut self, _reference: &Video) -> Result<Target> {
        self.prepared.clone().ok_or_else(|| Error::Misuse("the case's target comes from its inputs".into()))
    }

    fn score(
        &mut self,
        video: &Video,
        _prompt: &str,
        target: &Target,
        grad: Grad,
    ) -> Result<(Score, Option<Pullback>)> {
        let references = host::to_device::<2>(&target.tensors["references"], &self.device)?;
        let weights = host::to_device::<2>(&target.tensors["weights"], &self.device)?;
        let frames = host::to_device_nd(video.frames(), &self.device)?;
        let (values, record) = vjp(&[frames], Tape::off(), |inputs, _| {
            let embeddings = self.embed(inputs[0].rank()?);
            let cosines = unit(embeddings).matmul(unit(references.clone()).transpose());
            Ok(vec![(cosines * weights.clone()).sum().into()])
        })?;
        let score = Score::of(f64::from(host::to_host_nd(&values[0])?.item()?));
        let device = self.device.clone();
        let pull = move |cotangent: &Tensor| {
            let cotangent: NdTensor = host::to_device::<1>(&cotangent.reshape([1])?, &device)?.into();
            let frames = record.pull(vec![Some(cotangent)], None).pop().flatten();
            host::to_host_nd(&frames.ok_or_else(|| Error::Misuse("the score depends on no frame".into()))?)
        };
        Ok((score, grad.is_on().then(|| Pullback::new(pull))))
    }
}

/// Rows of length one.
fn unit(x: Burn<2>) -> Burn<2> {
    let norm = x.clone().square().sum_dim(1).sqrt().clamp_min(1e-12);
    x / norm
}

/// References, and the weight of each pair of frame and reference in the score: the mean over detected frames of the
/// mean over references, without the first and without those that are zero.
pub fn target(inputs: &StateDict) -> Outcome<Target> {
    let references = crate::dit::unbatched(&inputs["ref_embeddings"])?;
    let detected = inputs["id_mask"].to_f32_vec();
    let column = Tensor::new(detected.clone(), [detected.len(), 1])?;
    let width = references.shape()[1];
    let used: Vec<bool> =
        references.f32s()?.chunks_exact(width).enumerate().map(|(j, r)| j > 0 && r.iter().any(|v| *v != 0.0)).collect();
    let pairs = detected.iter().sum::<f32>() * used.iter().filter(|u| **u).count() as f32;
    let weight = |frame: &f32, used: &bool| frame * f32::from(u8::from(*used)) / pairs;
    let weights: Vec<f32> = detected.iter().flat_map(|f| used.iter().map(move |u| weight(f, u))).collect();
    let weights = Tensor::new(weights, [detected.len(), used.len()])?;
    let tensors = [("references", references), ("weights", weights), ("detected", column)];
    Ok(Target::of(tensors.map(|(name, tensor)| (name.to_string(), tensor)).into()))
}
