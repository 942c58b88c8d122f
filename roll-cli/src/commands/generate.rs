//! `roll generate`: a video from a prompt and an image.

use std::collections::BTreeMap;
use std::path::Path;

use roll_algos::sampling::{Conditions, SamplingOptions, negative_context};
use roll_core::{Adapter, ConditionInput, Error, Grad, Options, Result, Video};
use roll_data::{Sizing, read_image, write_gif, write_mp4, write_pngs};
use roll_train::progress::Bar;

use crate::args::{Generate, SamplingArgs};
use crate::configuration::{Configuration, build_context};
use crate::progress::TerminalBar;

/// Generates and writes it.
pub fn generate(args: Generate) -> Result<()> {
    let configuration = Configuration::read(&args.config, &[])?;
    let registry = configuration.registry()?;
    let loaded = configuration.or_demo()?.load(&registry)?;
    let context = build_context(&loaded);
    let size = [args.height, args.width];
    let image = args.image.as_ref().map(|path| read_image(path, Sizing::Exact(size))).transpose()?;
    let mut model = registry.model(&loaded.config.model.name, &loaded.config.model.options, &context)?;
    if let Some(path) = &args.adapter {
        let file = roll_models::lora::open_adapter(path)?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        model.import_adapter(&BTreeMap::from([(name, file)]))?;
    }
    let diffusion = model
        .as_diffusion()
        .ok_or_else(|| Error::config("model.name", format!("`{}` makes no videos", loaded.config.model.name)))?;
    let input = ConditionInput { prompt: args.prompt, image, end_image: None, frames: args.frames, size };
    let options = sampling_options(&loaded.config.algo.options, &args.sampling)?;
    let sampling = options.sampling(diffusion.schedule())?;
    let conditioning = diffusion.encode(&input)?;
    let negative = match sampling.guidance.is_on() {
        true => Some(negative_context(diffusion, input, &options.negative_prompt)?),
        false => None,
    };
    let conditions = Conditions::new(&conditioning, negative);
    let noise = loaded.config.noise().latents(0, args.noise, &conditioning.latent_shape)?;
    let adapter = if args.adapter.is_some() { Adapter::On } else { Adapter::Off };
    let bar = TerminalBar::new(sampling.schedule.steps() as u64, "steps");
    let latents = sampling.generate(diffusion, &conditions, &noise, adapter, &bar)?;
    bar.finish();
    let (frames, _) = diffusion.decode(&latents, Grad::Skip)?;
    write(&args.output, &Video::new(frames, args.fps)?)?;
    println!("{}", args.output.display());
    Ok(())
}

/// As the evaluation of the configuration's algorithm samples, but for what the arguments say.
fn sampling_options(algorithm: &Options, args: &SamplingArgs) -> Result<SamplingOptions> {
    let mut options = SamplingOptions::of(algorithm)?;
    if args.steps.is_some() || args.timesteps.is_some() {
        options.timesteps = args.timesteps.clone();
        options.num_inference_steps = args.steps.unwrap_or(options.num_inference_steps);
    }
    options.shift = args.shift.or(options.shift);
    options.sampler = args.sampler.unwrap_or(options.sampler);
    options.guidance_scale = args.guidance_scale.unwrap_or(options.guidance_scale);
    if let Some(prompt) = &args.negative_prompt {
        options.negative_prompt = prompt.clone();
    }
    if !options.guidance_scale.is_on() && args.negative_prompt.is_some() {
        tracing::warn!("--negative-prompt has no effect without guidance: give --guidance-scale too");
    }
    Ok(options)
}

fn write(path: &Path, video: &Video) -> Result<()> {
    match path.extension().and_then(|e| e.to_str()) {
        Some("mp4") => write_mp4(path, video),
        Some("gif") => write_gif(path, video),
        Some(other) => Err(Error::Unsupported(format!(
            "--output: videos of type .{other} are not written; use .mp4, .gif, or a directory"
        ))),
        None => write_pngs(path, video).map(drop),
    }
}
