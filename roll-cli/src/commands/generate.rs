//! `roll generate`: a video from a prompt and an image, or one for each prompt of a file.

use std::path::{Path, PathBuf};

use roll_core::{Adapter, ConditionInput, Conditioning, DiffusionModel, Error, Options, Result, Video, VideoUnit};
use roll_external::files;
use roll_media::{Picture, Sizing, clip_extension, encode_png, read_image, write_gif, write_mp4, write_pngs};
use roll_train::config::LoadedConfig;
use roll_video::rows::DataConfig;
use roll_video::sampling::{Request, SamplingOptions};

use super::adapters::open_model;
use super::plan::host_memory;
use crate::args::{Generate, SamplingArgs};
use crate::configuration::{Configuration, build_context};
use crate::output::refuse_existing;
use crate::progress::Spinner;

/// `[height, width]` of a video if neither the arguments nor the configuration name a size.
const DEFAULT_SIZE: [usize; 2] = [480, 832];

/// Frames a second if neither the arguments nor the model name a rate.
const DEFAULT_FPS: f64 = 16.0;
/// Largest file of prompts in bytes. At a few hundred bytes a line it holds some hundred thousand prompts.
const MAX_PROMPTS_BYTES: u64 = 64 << 20;

/// Generates and writes the videos.
pub fn generate(args: Generate) -> Result<()> {
    let prompts = prompts(&args)?;
    let outputs = |frames| outputs(&args.output, args.prompts.is_some(), prompts.len(), frames);
    // Without `--frames`, the number of frames is not known before the model is read: these may be other files.
    check(&args, &outputs(args.frames))?;
    let configuration = Configuration::read(&args.config, &[])?;
    let registry = configuration.registry()?;
    let mut loaded = configuration.or_demo()?.load(&registry)?;
    let context = build_context(&loaded);
    let data: DataConfig = loaded.section()?;
    let size = size(&args, &data);
    let read = |path: &Option<PathBuf>| path.as_ref().map(|path| read_image(path, Sizing::Exact(size))).transpose();
    let (image, end_image) = (read(&args.image)?, read(&args.end_image)?);
    if end_image.is_some() {
        enable_end_image(&mut loaded);
    }
    let mut model = open_model(&loaded, &registry, &context, &args.adapter)?;
    let diffusion = model
        .as_diffusion()
        .ok_or_else(|| Error::config("model.name", format!("`{}` makes no videos", loaded.config.model.name)))?;
    let unit = diffusion.video_unit();
    let frames = args.frames.unwrap_or_else(|| unit.frames_within(data.num_frames));
    check_frames_and_size(unit, frames, size)?;
    check_memory(frames, size)?;
    let outputs = outputs(Some(frames));
    if let Some(output) = outputs.first() {
        writer(output, frames)?;
    }
    outputs.iter().try_for_each(|path| refuse_existing(path, args.force))?;
    tracing::info!("{frames} frames of {}x{}", size[1], size[0]);
    let options = sampling_options(&loaded.config.algo.options, &args.sampling)?;
    let sampling = options.sampling(diffusion.schedule())?;
    let fps = args.fps.or(diffusion.frame_rate()).unwrap_or(DEFAULT_FPS);
    let adapter = if args.adapter.is_empty() { Adapter::Off } else { Adapter::On };
    for (prompt, output) in prompts.iter().zip(&outputs) {
        let progress = Spinner::new("encoding");
        let input =
            ConditionInput { prompt: prompt.clone(), image: image.clone(), end_image: end_image.clone(), frames, size };
        let conditioning = encode(diffusion, &input)?;
        let request = Request {
            conditioning: &conditioning,
            input,
            negative_prompt: &options.negative_prompt,
            noise: &loaded.config.noise().latents(0, args.seed, &conditioning.latent_shape)?,
            adapter,
        };
        let video = Video::new(sampling.frames(diffusion, request, &progress)?, fps)?;
        drop(progress);
        let write = writer(output, frames)?;
        write(output, &video)?;
        println!("{}", output.display());
    }
    Ok(())
}

/// The prompts: the lines of `--prompts`, or the one of `--prompt`.
fn prompts(args: &Generate) -> Result<Vec<String>> {
    let Some(path) = &args.prompts else { return Ok(args.prompt.iter().cloned().collect()) };
    let text = files::read_text(path, MAX_PROMPTS_BYTES).map_err(Error::file("read", path))?;
    let lines = text.trim_start_matches('\u{feff}').lines().map(str::trim).filter(|line| !line.is_empty());
    let prompts: Vec<String> = lines.map(Into::into).collect();
    match prompts.is_empty() {
        true => Err(Error::bad_file(path, "expected a prompt on each line, found none")),
        false => Ok(prompts),
    }
}

/// The files of `count` videos. If they `are_numbered`, `out.mp4` becomes `out-001.mp4`, `out-002.mp4`, ..., and `out/`
/// becomes `out/001.mp4`, `out/002.mp4`, ..., or `.png` if `frames` is one.
fn outputs(output: &Path, are_numbered: bool, count: usize, frames: Option<usize>) -> Vec<PathBuf> {
    if !are_numbered {
        return vec![output.into()];
    }
    if output.to_string_lossy().ends_with(std::path::is_separator) {
        let extension = clip_extension(frames.unwrap_or_default());
        return (1..=count).map(|n| output.join(format!("{n:03}.{extension}"))).collect();
    }
    let stem = output.file_stem().unwrap_or_default().to_string_lossy();
    let extension = output.extension().map(|e| format!(".{}", e.to_string_lossy())).unwrap_or_default();
    (1..=count).map(|n| output.with_file_name(format!("{stem}-{n:03}{extension}"))).collect()
}

/// Fails on mistakes that would otherwise show only after the videos were generated.
fn check(args: &Generate, outputs: &[PathBuf]) -> Result<()> {
    if args.sampling.steps == Some(0) {
        return Err(Error::Unsupported("--steps: must be at least 1, found 0".into()));
    }
    if let Some(fps) = args.fps.filter(|fps| !(fps.is_finite() && *fps > 0.0)) {
        return Err(Error::Unsupported(format!("--fps: expected a number above 0, found {fps}")));
    }
    let Some(first) = outputs.first() else { return Ok(()) };
    writer(first, args.frames.unwrap_or(1))?;
    outputs.iter().try_for_each(|path| refuse_existing(path, args.force))?;
    let parent = first.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !parent.is_dir() {
        return Err(Error::Unsupported(format!("--output: {} is not a directory; make it first", parent.display())));
    }
    if let Some(directory) = outputs.iter().find(|path| path.extension().is_some() && path.is_dir()) {
        return Err(Error::Unsupported(format!("--output: {} is a directory", directory.display())));
    }
    // Only a trial shows whether this process may write there.
    let trial = roll_external::files::temporary_beside(first);
    std::fs::File::create(&trial).map_err(Error::file("write into the directory of", first))?;
    std::fs::remove_file(&trial).map_err(Error::file("remove", &trial))
}

/// Height and width: those of the arguments, or else those of the section `data`, with which the model was trained.
fn size(args: &Generate, data: &DataConfig) -> [usize; 2] {
    let height = args.height.or(data.height).unwrap_or(DEFAULT_SIZE[0]);
    let width = args.width.or(data.width).unwrap_or(DEFAULT_SIZE[1]);
    [height, width]
}

/// Fails on a length or a size that the model does not take, and names the nearest one that it takes.
fn check_frames_and_size(unit: VideoUnit, frames: usize, [height, width]: [usize; 2]) -> Result<()> {
    let refused = |argument: &str, problem: String| Err(Error::Unsupported(format!("{argument}: {problem}")));
    let near = unit.frames_within(frames).max(1);
    if near != frames {
        let problem = format!("the model takes {}, such as {near}; found {frames}", unit.possible_frames());
        return refused("--frames", problem);
    }
    for (argument, side, unit) in [("--height", height, unit.height), ("--width", width, unit.width)] {
        if side == 0 || side % unit != 0 {
            let near = (side / unit * unit).max(unit);
            return refused(argument, format!("the model takes multiples of {unit}, such as {near}; found {side}"));
        }
    }
    Ok(())
}

/// Fails on a video whose pixels alone take more than the memory of this machine.
fn check_memory(frames: usize, [height, width]: [usize; 2]) -> Result<()> {
    /// Three channels in f32.
    const BYTES_PER_PIXEL: f64 = 12.0;
    let needed = BYTES_PER_PIXEL * frames as f64 * height as f64 * width as f64;
    let available = host_memory();
    // 0 means that the memory of this machine is not known.
    if available > 0.0 && needed > available {
        let problem = format!(
            "{frames} frames of {width}x{height} alone take {:.0} GB, and this machine has {:.0} GB",
            needed / 1e9,
            available / 1e9
        );
        return Err(Error::Unsupported(format!("--frames, --height, --width: {problem}")));
    }
    Ok(())
}

/// Sets the option of the model by which it takes the last frame, if it has the option.
fn enable_end_image(loaded: &mut LoadedConfig) {
    if let Some(inputs) = loaded.config.model.options.get_mut("extra_inputs") {
        *inputs = "input_image,end_image".into();
    }
}

/// Encodes prompt and pictures. Fails if the model ignores a picture.
fn encode(model: &mut dyn DiffusionModel, input: &ConditionInput) -> Result<Conditioning> {
    let conditioning = model.encode(input)?;
    let Conditioning { channels, image_tokens, first_frame, .. } = &conditioning;
    let unused = |argument: &str, problem: &str| Err(Error::Unsupported(format!("{argument}: {problem}")));
    match (&input.image, &input.end_image) {
        (Some(_), _) if channels.is_none() && image_tokens.is_none() && first_frame.is_none() => {
            unused("--image", "this model makes videos from text alone; leave the picture out")
        }
        (_, Some(_)) if channels.is_none() => {
            unused("--end-image", "this model takes no last frame; leave the picture out")
        }
        _ => Ok(conditioning),
    }
}

/// The sampling of the algorithm's evaluations, changed by the arguments.
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

/// The function that writes videos of `frames` frames of the type of `path`. A picture is a video of one frame.
fn writer(path: &Path, frames: usize) -> Result<fn(&Path, &Video) -> Result<()>> {
    match path.extension().and_then(|e| e.to_str()) {
        Some("mp4") => Ok(|path, video| write_mp4(path, video)),
        Some("gif") => Ok(|path, video| write_gif(path, video)),
        Some("png") if frames == 1 => {
            Ok(|path, video| files::write_atomically(path, &encode_png(&Picture::from_frame(video, 0))?))
        }
        Some("png") => Err(Error::Unsupported(format!(
            "--output: a .png file takes one frame, and the videos have {frames}; use --frames 1, .mp4, .gif, or a \
             directory"
        ))),
        Some(other) => Err(Error::Unsupported(format!(
            "--output: videos of type .{other} are not written; use .mp4, .gif, .png (one frame), or a directory"
        ))),
        None => Ok(|path, video| write_pngs(path, video).map(drop)),
    }
}
