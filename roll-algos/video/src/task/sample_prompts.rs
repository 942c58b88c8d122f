//! Videos of prompts that people watch a training by: the same prompts, pictures and noise at each evaluation.

use std::path::PathBuf;

use roll_core::{
    Adapter, BuildContext, ConditionInput, DiffusionModel, Error, Model, Noise, Options, Progress, Result, ResultExt,
    Tensor, Video, VideoUnit,
};
use roll_media::{Sizing, read_image};
use roll_train::config::RunConfig;

use super::config::{ClipConfig, SamplePrompt};
use crate::rows::{Bucket, DataConfig};
use crate::sampling::{Request, SamplingOptions};

const KEY: &str = "evaluation.prompts";
/// Frames per second of the videos of a model without a rate.
const DEFAULT_FPS: f64 = 16.0;

/// The prompts of a run, with their pictures.
pub(crate) struct SamplePrompts {
    inputs: Vec<ConditionInput>,
    seeds: Vec<u64>,
    /// Options of the algorithm, among them the options of the sampler.
    options: Options,
}

impl SamplePrompts {
    /// Reads the pictures of the prompts that the configuration names; `None` if it names none. Fails if the model
    /// makes no videos, or cannot take a prompt with its pictures.
    pub fn open(
        config: &RunConfig,
        clips: &ClipConfig,
        model: &mut dyn Model,
        unit: VideoUnit,
        context: &BuildContext,
    ) -> Result<Option<Self>> {
        let prompts = &clips.evaluation.prompts;
        if prompts.is_empty() {
            return Ok(None);
        }
        let model = diffusion(model, &config.model.name)?;
        let mut inputs = Vec::new();
        for (i, prompt) in prompts.iter().enumerate() {
            let checked = input_of(&clips.data, prompt, unit, context).and_then(|input| {
                model.check_input(&input)?;
                Ok(input)
            });
            inputs.push(checked.while_doing(|| format!("reading `{KEY}.{i}`"))?);
        }
        Ok(Some(Self {
            inputs,
            seeds: prompts.iter().map(|prompt| prompt.seed).collect(),
            options: config.algo.options.clone(),
        }))
    }

    pub fn count(&self) -> usize {
        self.inputs.len()
    }

    /// Generates the video of prompt `i`, with the adapter as it is. All ranks must call this, because weights may be
    /// sharded over them.
    pub fn video(&self, i: usize, model: &mut dyn Model, noise: &Noise, progress: &dyn Progress) -> Result<Video> {
        // Does not fail, because `open` has checked the model.
        let model = diffusion(model, "")?;
        let frames = self.frames(i, model, noise, progress).while_doing(|| format!("generating `{KEY}.{i}`"))?;
        Video::new(frames, model.frame_rate().unwrap_or(DEFAULT_FPS))
    }

    /// The frames of the video of prompt `i`, sampled as in evaluations of the algorithm.
    fn frames(
        &self,
        i: usize,
        model: &mut dyn DiffusionModel,
        noise: &Noise,
        progress: &dyn Progress,
    ) -> Result<Tensor> {
        let (options, input) = (SamplingOptions::of(&self.options)?, &self.inputs[i]);
        progress.phase("encoding");
        let conditioning = model.encode(input).while_doing(|| "encoding the prompt".into())?;
        let request = Request {
            conditioning: &conditioning,
            input: input.clone(),
            negative_prompt: &options.negative_prompt,
            noise: &noise.latents(0, self.seeds[i], &conditioning.latent_shape)?,
            adapter: Adapter::On,
        };
        options.sampling(model.schedule()).in_section("algo")?.frames(model, request, progress)
    }
}

fn diffusion<'a>(model: &'a mut dyn Model, name: &str) -> Result<&'a mut dyn DiffusionModel> {
    model
        .as_diffusion()
        .ok_or_else(|| Error::config(KEY, format!("the model `{name}` makes no videos; leave them out")))
}

/// A prompt with its pictures. It has the frames and size of a row without a clip.
fn input_of(
    data: &DataConfig,
    prompt: &SamplePrompt,
    unit: VideoUnit,
    context: &BuildContext,
) -> Result<ConditionInput> {
    let image = prompt.image.as_ref().map(|path| context.resolve(path));
    let Bucket { frames, size } = Bucket::without_clip(data, image.as_deref(), unit)?;
    let picture = |path: &Option<PathBuf>| {
        path.as_ref().map(|path| read_image(context.resolve(path), Sizing::Exact(size))).transpose()
    };
    Ok(ConditionInput {
        prompt: prompt.prompt.clone(),
        image: picture(&prompt.image)?,
        end_image: picture(&prompt.end_image)?,
        frames,
        size,
    })
}
