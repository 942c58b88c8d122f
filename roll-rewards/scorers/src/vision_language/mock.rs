//! A network for the tests of rewards: characters as tokens, and states that depend smoothly on the pixels.

use std::collections::BTreeMap;

use roll_core::{
    Error, Grad, Medium, Positions, Pullback, Result, RewardScorer, Score, Target, Tensor, Video, VisionLanguageFacts,
    VisionLanguageModel,
};

use crate::gradient_check::{dot, noise};

/// Special tokens; their ids follow the bytes.
const SPECIAL: [&str; 10] = [
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|VQ_reward|>",
    "<|MQ_reward|>",
    "<|TA_reward|>",
    "<|Reward|>",
];
/// Words of one token, after the special tokens.
const WORDS: [&str; 3] = ["yes", "Yes", "no"];
/// Width of the states.
pub const WIDTH: usize = 4;

/// The state of a token at place `p` is, in coordinate `c`, sin(c + id/7 + mean(pixels * weights)) where the weights
/// depend on the coordinate and the position of the pixel. Tokens after `p` have no influence.
pub struct Mock {
    facts: VisionLanguageFacts,
    others: BTreeMap<String, Tensor>,
}

impl Mock {
    pub fn new(others: BTreeMap<String, Tensor>) -> Self {
        let id = |token| 256 + SPECIAL.iter().position(|known| *known == token).unwrap() as u32;
        let facts = VisionLanguageFacts {
            patch: 4,
            patch_frames: 2,
            merge: 2,
            width: WIDTH,
            vocabulary: 256 + SPECIAL.len() + WORDS.len(),
            image_token: id("<|image_pad|>"),
            video_token: id("<|video_pad|>"),
            vision_start: id("<|vision_start|>"),
            vision_end: id("<|vision_end|>"),
        };
        Self { facts, others }
    }
}

impl VisionLanguageModel for Mock {
    fn facts(&self) -> &VisionLanguageFacts {
        &self.facts
    }

    fn tokenize(&self, text: &str) -> Result<Vec<u32>> {
        let (mut ids, mut rest) = (Vec::new(), text);
        while !rest.is_empty() {
            let special = SPECIAL.iter().position(|token| rest.starts_with(token));
            let word = WORDS.iter().position(|word| rest == *word);
            let (id, len) = match (special, word) {
                (Some(i), _) => (256 + i as u32, SPECIAL[i].len()),
                (_, Some(i)) => ((256 + SPECIAL.len() + i) as u32, rest.len()),
                _ => (u32::from(rest.as_bytes()[0]), 1),
            };
            ids.push(id);
            rest = &rest[len..];
        }
        Ok(ids)
    }

    fn detokenize(&self, ids: &[u32]) -> Result<String> {
        let token = |id: &u32| match id.checked_sub(256) {
            None => char::from(*id as u8).to_string(),
            Some(i) => SPECIAL.iter().chain(&WORDS).nth(i as usize).unwrap().to_string(),
        };
        Ok(ids.iter().map(token).collect())
    }

    fn token_id(&self, token: &str) -> Option<u32> {
        SPECIAL.iter().position(|known| *known == token).map(|i| 256 + i as u32)
    }

    fn other_tensors(&self) -> &BTreeMap<String, Tensor> {
        &self.others
    }

    fn read(
        &mut self,
        tokens: &[u32],
        media: &[Medium],
        _: Positions,
        wanted: &[usize],
        grad: Grad,
    ) -> Result<(Tensor, Option<Pullback>)> {
        let count: usize = media.iter().map(|medium| self.facts.tokens_of(medium.pixels.shape()).unwrap()).sum();
        let pads = tokens.iter().filter(|id| [self.facts.image_token, self.facts.video_token].contains(id)).count();
        if count != pads {
            return Err(Error::Misuse(format!("expected {count} placeholders, found {pads}")));
        }
        let pixels: Vec<f32> = media.iter().flat_map(|medium| medium.pixels.f32s().unwrap().to_vec()).collect();
        let weights: Vec<Vec<f32>> = (0..WIDTH).map(|c| noise(c as u64, pixels.len())).collect();
        let scale = 1.0 / (pixels.len() as f64).sqrt();
        let phase = |place: &usize, c: usize| {
            c as f64 + f64::from(tokens[*place]) / 7.0 + *place as f64 / 5.0 + scale * dot(&pixels, &weights[c])
        };
        let phases: Vec<f64> = wanted.iter().flat_map(|place| (0..WIDTH).map(move |c| phase(place, c))).collect();
        let states = Tensor::new(phases.iter().map(|p| p.sin() as f32).collect(), [wanted.len(), WIDTH])?;
        let len = pixels.len();
        let pullback = grad.is_on().then(|| {
            Pullback::new(move |d: &Tensor| {
                let mut gradient = vec![0.0; len];
                for (i, (d, phase)) in d.f32s()?.iter().zip(&phases).enumerate() {
                    let slope = f64::from(*d) * phase.cos() * scale;
                    gradient
                        .iter_mut()
                        .zip(&weights[i % WIDTH])
                        .for_each(|(g, w)| *g += (slope * f64::from(*w)) as f32);
                }
                Tensor::new(gradient, [len])
            })
        });
        Ok((states, pullback))
    }

    fn head_rows(&self, ids: &[u32]) -> Result<Tensor> {
        let rows = ids.iter().flat_map(|id| noise(u64::from(*id), WIDTH)).collect();
        Tensor::new(rows, [ids.len(), WIDTH])
    }
}

/// A clip of noise at 8 frames per second, with some values outside of [-1, 1].
pub fn clip(seed: u64, frames: usize, height: usize, width: usize) -> Video {
    let values = noise(seed, frames * 3 * height * width).into_iter().map(|v| 1.05 * v).collect();
    Video::new(Tensor::new(values, [frames, 3, height, width]).unwrap(), 8.0).unwrap()
}

/// Compares the gradient of a reward on a clip of `frames` frames with central differences along a direction.
pub fn check_gradient(reward: &mut dyn RewardScorer, frames: usize) {
    let video = clip(1, frames, 19, 23);
    let direction: Vec<f32> = noise(2, video.frames().len());
    // Values near the clamp do not move over it.
    let values: Vec<f32> = video.frames().f32s().unwrap().to_vec();
    let direction: Vec<f32> =
        values.iter().zip(direction).map(|(v, d)| if (v.abs() - 1.0).abs() < 0.03 { 0.0 } else { d }).collect();
    let mut value = |step: f32| {
        let moved = values.iter().zip(&direction).map(|(v, d)| v + step * d).collect();
        let video = Video::new(Tensor::new(moved, video.frames().shape()).unwrap(), 8.0).unwrap();
        match reward.score(&video, "a boat", &Target::default(), Grad::Skip).unwrap().0 {
            Score::Value { value, .. } => value,
            Score::Missing { reason } => panic!("{reason}"),
        }
    };
    let numeric = (value(0.02) - value(-0.02)) / 0.04;
    let (_, pullback) = reward.score(&video, "a boat", &Target::default(), Grad::Record).unwrap();
    let gradient = pullback.unwrap().pull(&Tensor::scalar(1.0)).unwrap();
    assert_eq!(gradient.shape(), video.frames().shape());
    let exact = dot(&direction, gradient.f32s().unwrap());
    assert!((numeric - exact).abs() < 5e-3 * exact.abs().max(1e-3), "{numeric} {exact}");
}
