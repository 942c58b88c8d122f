//! The reward `insightface`: is the person in the video the person in the reference?

use std::collections::BTreeMap;

use rayon::prelude::*;
use roll_core::{
    BuildContext, Error, Grad, Measure, OnMissing, Pullback, Result, RewardScorer, Score, Target, Tensor, Video,
};
use roll_external::Fingerprint;
use roll_onnx::Executor;

use super::align::Crop;
use super::config::{IdentityConfig, Undetected};
use super::detection::Face;
use super::embedder::Embeddings;
use super::networks::{FaceNetworks, FrameFace};
use super::pooling::{Pooled, pooled_cosine};
use crate::RewardError;

const NAME: &str = "insightface";
/// Name of the target's tensor with the embeddings of the reference faces, f32 `[N, width]`.
const REFERENCES: &str = "references";
/// Name of the target's tensor with the positions of the reference faces, f32 `[N, POSITION_WIDTH]`: the frame, then x
/// and y of the five landmarks as fractions of width and height.
const POSITIONS: &str = "places";
/// Numbers per face in [`POSITIONS`].
const POSITION_WIDTH: usize = 11;

/// The identity score: for each frame with a face, the mean cosine similarity of the face's embedding to the embeddings
/// of the reference faces; then the mean over these frames. It is in [-1, 1]. The same person scores 0.5 to 0.8,
/// strangers about 0.
///
/// The first frame of a reference clip is left out, because an image-to-video model receives it as a condition and
/// could copy it. A reference of one frame is a picture and counts. The positions of faces are constants for the
/// gradient; their pixels are differentiated.
#[derive(Debug)]
pub struct IdentityReward {
    networks: FaceNetworks,
    config: IdentityConfig,
}

impl IdentityReward {
    /// Uses networks that [`FaceNetworks::load`] returned for the same configuration.
    pub fn new(networks: FaceNetworks, config: IdentityConfig) -> Self {
        Self { networks, config }
    }

    /// The networks.
    pub fn networks(&self) -> &FaceNetworks {
        &self.networks
    }

    /// The largest face of every searched frame that has one: every `sample_every`-th frame from frame `first` on.
    fn faces(&self, video: &Video, first: usize, grad: Grad) -> Result<Vec<FrameFace>> {
        let [count, height, width] = video.dims();
        let frames: Vec<_> = (first..count).step_by(self.config.sample_every).map(|t| (t, video.frame(t))).collect();
        self.networks.largest_faces(&frames, [height, width], grad)
    }

    /// Adds a face to every searched frame without one, at the landmarks of the reference at the nearest time.
    fn add_reference_faces(&self, faces: &mut Vec<FrameFace>, video: &Video, target: &Target) -> Result<()> {
        let bad_target = || RewardError::InvalidTarget { reward: NAME.into(), tensor: POSITIONS.into() };
        let positions = target.tensors.get(POSITIONS).ok_or_else(bad_target)?.f32s()?;
        let [count, height, width] = video.dims();
        for frame in (0..count).step_by(self.config.sample_every) {
            if faces.iter().any(|f| f.frame == frame) {
                continue;
            }
            let distance = |position: &&[f32]| (position[0] - frame as f32).abs();
            let nearest = positions
                .chunks_exact(POSITION_WIDTH)
                .min_by(|a, b| distance(a).total_cmp(&distance(b)))
                .ok_or_else(bad_target)?;
            let landmark = |i: usize| [nearest[1 + 2 * i] * width as f32, nearest[2 + 2 * i] * height as f32];
            let landmarks = std::array::from_fn(landmark);
            if let Some(crop) = Crop::new(&landmarks, [height, width], self.config.align) {
                faces.push(FrameFace { frame, face: Face { bounds: [0.0; 4], score: 0.0, landmarks }, crop });
            }
        }
        faces.sort_by_key(|f| f.frame);
        Ok(())
    }

    /// The mean similarity of `faces` to the references and, with [`Grad::Record`], the gradients of the crops for a
    /// cotangent of 1, batch by batch.
    fn score_faces(
        &self,
        video: &Video,
        faces: &[FrameFace],
        references: &Tensor,
        grad: Grad,
    ) -> Result<(f64, Vec<Vec<f32>>)> {
        let (mut value, mut crop_gradients) = (0.0, Vec::new());
        for batch in faces.chunks(self.config.frames_per_batch) {
            // Weight of the batch's mean in the mean over all faces.
            let share = batch.len() as f64 / faces.len() as f64;
            let crops = crop_pixels(video, batch);
            if grad.is_on() {
                let (embeddings, pull) = self.networks.embedder().vjp(crops)?;
                let mut batch_score = pooled(&embeddings, references)?;
                value += batch_score.value * share;
                batch_score.gradient.iter_mut().for_each(|g| *g *= share as f32);
                crop_gradients.push(pull.pull(batch_score.gradient)?);
            } else {
                let embeddings = self.networks.embedder().embed(crops, grad)?;
                value += pooled(&embeddings, references)?.value * share;
            }
        }
        Ok((value, crop_gradients))
    }
}

impl RewardScorer for IdentityReward {
    fn name(&self) -> &str {
        NAME
    }

    fn measures(&self) -> Measure {
        Measure { alias: Some("actor/face_score".into()), ..Measure::new("identity") }
    }

    fn differentiable(&self) -> bool {
        true
    }

    fn prepare(&mut self, reference: &Video) -> Result<Target> {
        let [count, ..] = reference.dims();
        // The first frame of a clip does not count; a picture is one frame.
        let first = usize::from(count > 1);
        // The gradient of the score depends on the reference's embeddings.
        let faces = self.faces(reference, first, Grad::Record)?;
        if faces.is_empty() {
            let frames = match (count, (count - first).div_ceil(self.config.sample_every)) {
                (1, _) => "the picture".to_string(),
                (_, 1) => "the one searched frame (the first does not count)".to_string(),
                (_, n) => format!("any of the {n} searched frames (the first does not count)"),
            };
            return Err(RewardError::NoFaceInReference { frames, threshold: self.config.det_threshold }.into());
        }
        let (mut values, mut width) = (vec![], 0);
        for batch in faces.chunks(self.config.frames_per_batch) {
            let embeddings = self.networks.embedder().embed(crop_pixels(reference, batch), Grad::Record)?;
            width = embeddings.width;
            values.extend(embeddings.values);
        }
        let references = Tensor::new(values, [faces.len(), width])?;
        let positions = positions_tensor(&faces, reference)?;
        Ok(Target::of(BTreeMap::from([(REFERENCES.to_string(), references), (POSITIONS.to_string(), positions)])))
    }

    /// Details: `frames` (searched), `frames_with_face`, `detector_score` (mean over frames with a face), `references`.
    ///
    /// If [`Grad::Record`] is given, each batch of crops is pulled back through the embedder immediately, with
    /// cotangent 1, so that only one batch of activations is in memory. The pullback scales this gradient and
    /// distributes it to the frames.
    fn score(&mut self, video: &Video, _: &str, target: &Target, grad: Grad) -> Result<(Score, Option<Pullback>)> {
        let references = target
            .tensors
            .get(REFERENCES)
            .ok_or_else(|| RewardError::InvalidTarget { reward: NAME.into(), tensor: REFERENCES.into() })?;
        let shape = video.frames().shape().to_vec();
        if let Some(value) = video.frames().f32s()?.iter().find(|v| !v.is_finite()) {
            // No face would be found in such frames, but a broken video must not count as a video without a face.
            let value = f64::from(*value);
            let pullback =
                Pullback::new(move |_| Err(Error::NonFinite { what: "a pixel of the scored video".into(), value }));
            return Ok((Score::of(f64::NAN), grad.is_on().then_some(pullback)));
        }
        let mut faces = self.faces(video, 0, grad)?;
        let detected_count = faces.len();
        let detector_score = faces.iter().map(|f| f64::from(f.face.score)).sum::<f64>() / detected_count.max(1) as f64;
        if self.config.undetected == Undetected::ReferenceLandmarks {
            self.add_reference_faces(&mut faces, video, target)?;
        }
        let searched_count = video.dims()[0].div_ceil(self.config.sample_every);
        if faces.is_empty() {
            let threshold = self.config.det_threshold;
            let reason = format!("no face in any of {searched_count} frames (detector threshold {threshold})");
            return Ok((Score::Missing { reason }, None));
        }
        let (value, crop_gradients) = self.score_faces(video, &faces, references, grad)?;
        let details = [
            ("frames", searched_count as f64),
            ("frames_with_face", detected_count as f64),
            ("detector_score", detector_score),
            ("references", references.shape()[0] as f64),
        ];
        let details = details.map(|(name, value)| (name.to_string(), value)).into();
        let pullback =
            grad.is_on().then(|| Pullback::new(move |cotangent| pull_crops(&faces, crop_gradients, shape, cotangent)));
        Ok((Score::Value { value, details }, pullback))
    }

    fn target_key(&self) -> Result<Option<String>> {
        // The key has the executor that computes the target instead of the requested one, because `auto` and `own`
        // produce the same bits.
        let options = IdentityConfig { reward_model_path: String::new(), onnx: Executor::Auto, ..self.config.clone() };
        let settings =
            serde_json::to_string(&options).map_err(|e| Error::Misuse(format!("options of a reward as JSON: {e}")))?;
        let key = Fingerprint::new(NAME).text("settings", settings);
        let key = key.file(self.networks.detector().path())?.file(self.networks.embedder().path())?;
        let key = match self.networks.embedder().network().external_runtime() {
            Some(executor) => key.text("executor", executor),
            None => key,
        };
        Ok(Some(key.finish()))
    }

    fn on_missing(&self) -> OnMissing {
        self.config.on_missing
    }
}

/// Computes the tensor [`POSITIONS`].
fn positions_tensor(faces: &[FrameFace], reference: &Video) -> Result<Tensor> {
    let [_, height, width] = reference.dims();
    let row = |face: &FrameFace| {
        let fractions = face.face.landmarks.into_iter().flat_map(|[x, y]| [x / width as f32, y / height as f32]);
        std::iter::once(face.frame as f32).chain(fractions).collect::<Vec<_>>()
    };
    Tensor::new(faces.iter().flat_map(row).collect(), [faces.len(), POSITION_WIDTH])
}

/// The pixels of the crops of `faces`, `[N, 3, 112, 112]`.
fn crop_pixels(video: &Video, faces: &[FrameFace]) -> Vec<f32> {
    let crops: Vec<Vec<f32>> = faces.par_iter().map(|face| face.crop.forward(video.frame(face.frame))).collect();
    crops.concat()
}

/// [`pooled_cosine`] of a batch. Fails if the references have another width.
fn pooled(embeddings: &Embeddings, references: &Tensor) -> Result<Pooled> {
    let Embeddings { values, width } = embeddings;
    match *references.shape() {
        [_, reference_width] if reference_width == *width => Ok(pooled_cosine(values, references.f32s()?, *width)),
        _ => Err(Error::shape("reference embeddings", format!("[N, {width}]"), references.shape())),
    }
}

/// The cotangent of the frames, of shape `shape`. `gradients` are the gradients of the crops for a cotangent of 1,
/// batch by batch.
fn pull_crops(faces: &[FrameFace], gradients: Vec<Vec<f32>>, shape: Vec<usize>, cotangent: &Tensor) -> Result<Tensor> {
    let cotangent = cotangent.item()?;
    let mut crop_gradients = gradients.concat();
    crop_gradients.iter_mut().for_each(|g| *g *= cotangent);
    let mut frames = vec![0.0; shape.iter().product()];
    let (frame_size, crop_size) = (shape[1..].iter().product::<usize>(), crop_gradients.len() / faces.len());
    for (face, gradient) in faces.iter().zip(crop_gradients.chunks_exact(crop_size)) {
        face.crop.pull(gradient, &mut frames[face.frame * frame_size..][..frame_size]);
    }
    Tensor::new(frames, shape)
}

/// Builds the reward from its options.
fn build(config: IdentityConfig, context: &BuildContext) -> Result<IdentityReward> {
    config.check()?;
    let device = roll_backends::device(&context.backend)?;
    let networks = FaceNetworks::load(&context.resolve(&config.reward_model_path), &config, &device)?;
    Ok(IdentityReward::new(networks, config))
}

roll_core::register! {
    Reward, NAME, IdentityConfig,
    "Identity of the person: cosine similarity of ArcFace embeddings to the reference's",
    build,
}
