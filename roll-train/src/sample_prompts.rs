//! Videos of prompts that people watch a training by: the same prompts, pictures and noise at each evaluation.

use std::path::PathBuf;

use roll_algos::sampling::{Request, SamplingOptions};
use roll_core::{
    Adapter, BuildContext, ConditionInput, DiffusionModel, Error, Model, Noise, Progress, Result, ResultExt, Video,
    VideoUnit,
};
use roll_data::{Sizing, read_image, target_size};

use crate::config::{LoadedConfig, SamplePrompt};

/// Their key in a configuration.
const KEY: &str = "evaluation.prompts";
/// `[height, width]` whose proportions a video has when nothing says them.
const SIZE: [usize; 2] = [480, 832];
/// Frames a second where the model does not say them.
const FPS: f64 = 16.0;

/// The prompts of a run, with their pictures.
pub(crate) struct SamplePrompts {
    inputs: Vec<ConditionInput>,
    seeds: Vec<u64>,
    options: SamplingOptions,
}

impl SamplePrompts {
    /// Reads the pictures of the prompts that the configuration names; `None` when it names none. Fails when the model
    /// makes no videos.
    pub fn open(
        loaded: &LoadedConfig,
        model: &mut dyn Model,
        unit: VideoUnit,
        context: &BuildContext,
    ) -> Result<Option<Self>> {
        let config = &loaded.config;
        if config.evaluation.prompts.is_empty() {
            return Ok(None);
        }
        diffusion(model, &config.model.name)?;
        let input = |(i, prompt): (usize, &SamplePrompt)| {
            input(loaded, prompt, unit, context).while_doing(|| format!("reading `{KEY}.{i}`"))
        };
        Ok(Some(Self {
            inputs: config.evaluation.prompts.iter().enumerate().map(input).collect::<Result<_>>()?,
            seeds: config.evaluation.prompts.iter().map(|prompt| prompt.seed).collect(),
            options: SamplingOptions::of(&config.algo.options)?,
        }))
    }

    /// How many.
    pub fn count(&self) -> usize {
        self.inputs.len()
    }

    /// Generates the video of one of them, with the adapter as it is. All ranks must call it: weights may be
    /// divided among them.
    pub fn video(&self, i: usize, model: &mut dyn Model, noise: &Noise, progress: &dyn Progress) -> Result<Video> {
        let (input, seed) = (self.inputs[i].clone(), self.seeds[i]);
        progress.phase("encoding");
        let model = diffusion(model, "")?;
        let conditioning = model.encode(&input).while_doing(|| format!("encoding `{KEY}.{i}`"))?;
        let request = Request {
            conditioning: &conditioning,
            input,
            negative_prompt: &self.options.negative_prompt,
            noise: &noise.latents(0, seed, &conditioning.latent_shape)?,
            adapter: Adapter::On,
        };
        let sampling = self.options.sampling(model.schedule()).in_section("algo")?;
        let frames = sampling.frames(model, request, progress).while_doing(|| format!("generating `{KEY}.{i}`"))?;
        Video::new(frames, model.frame_rate().unwrap_or(FPS))
    }
}

fn diffusion<'a>(model: &'a mut dyn Model, name: &str) -> Result<&'a mut dyn DiffusionModel> {
    model
        .as_diffusion()
        .ok_or_else(|| Error::config(KEY, format!("the model `{name}` makes no videos; leave them out")))
}

/// A prompt with its pictures. Size and length are those of `data`; where that says no size, the picture's, as a clip's
/// would be.
fn input(
    loaded: &LoadedConfig,
    prompt: &SamplePrompt,
    unit: VideoUnit,
    context: &BuildContext,
) -> Result<ConditionInput> {
    let data = &loaded.config.data;
    let unit_size = [unit.height, unit.width];
    let size = match (data.height.zip(data.width), &prompt.image) {
        (Some((height, width)), _) => [height, width],
        (None, Some(path)) => {
            let sizing = Sizing::MaxPixels { pixels: data.max_pixels, unit: unit_size };
            let picture = read_image(context.resolve(path), sizing)?;
            [picture.shape()[1], picture.shape()[2]]
        }
        (None, None) => target_size(SIZE, data.max_pixels, unit_size)
            .map_err(|problem| Error::config("data.max_pixels", problem))?,
    };
    let picture = |path: &Option<PathBuf>| {
        path.as_ref().map(|path| read_image(context.resolve(path), Sizing::Exact(size))).transpose()
    };
    Ok(ConditionInput {
        prompt: prompt.prompt.clone(),
        image: picture(&prompt.image)?,
        end_image: picture(&prompt.end_image)?,
        frames: unit.frames_within(data.num_frames),
        size,
    })
}
