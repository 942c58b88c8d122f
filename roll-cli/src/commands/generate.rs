//! `roll generate`: a video from a prompt and an image.

use std::collections::BTreeMap;
use std::path::Path;

use roll_algos::sampling;
use roll_core::{Adapter, ConditionInput, Error, FlowSchedule, Grad, Result, ResultExt, Video};
use roll_data::{Sizing, read_image, write_gif, write_mp4, write_pngs};
use roll_train::progress::Bar;

use crate::args::Generate;
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
    let conditioning = diffusion.encode(&input)?;
    if args.steps == 0 {
        return Err(Error::Unsupported("--steps: must be at least 1, found 0".into()));
    }
    let schedule = FlowSchedule::new(args.steps, diffusion.schedule().shift).in_section("model")?;
    let noise = loaded.config.noise().latents(0, args.noise, &conditioning.latent_shape)?;
    let adapter = if args.adapter.is_some() { Adapter::On } else { Adapter::Off };
    let bar = TerminalBar::new(args.steps as u64, "steps");
    let latents = sampling::euler(diffusion, &conditioning, &noise, &schedule, adapter, &bar)?;
    bar.finish();
    let (frames, _) = diffusion.decode(&latents, Grad::Skip)?;
    write(&args.output, &Video::new(frames, args.fps)?)?;
    println!("{}", args.output.display());
    Ok(())
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
