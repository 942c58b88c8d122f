//! `roll rewards try`: a reward's score of a video, and where in the video its gradient lies.

use std::path::Path;
use std::time::Instant;

use roll_core::{Error, Grad, Result, RewardScorer, Score, Target, Tensor, Video};
use roll_media::write_contact_sheet;
use roll_train::progress::counted;

use super::score::{ScoringInput, check_finite, prepare};
use crate::args::{Rewards, RewardsAction, TryReward};
use crate::output::refuse_existing;

/// Number of frames in the picture of the gradient.
const DRAWN_FRAMES: usize = 8;
/// Number of characters of the longest bar in the table of frames.
const BAR_LENGTH: f64 = 24.0;
/// Red, green and blue.
const CHANNELS: usize = 3;

/// Runs the action that the arguments name.
pub fn rewards(args: Rewards) -> Result<()> {
    match args.action {
        RewardsAction::Try(args) => try_reward(&args),
    }
}

/// Prints the score of a video and where its gradient lies, and draws the gradient if an output is named.
fn try_reward(args: &TryReward) -> Result<()> {
    args.output.iter().try_for_each(|output| check_output(output, args.force))?;
    let ScoringInput { mut scorer, video, target } =
        prepare(&args.config, Some(&args.name), &args.video, args.reference.as_deref(), args.every)?;
    let grad = if scorer.differentiable() { Grad::Record } else { Grad::Skip };
    let start = Instant::now();
    let (score, pullback) = scorer.score(&video, &args.prompt, &target, grad)?;
    let (value, details) = match score {
        Score::Value { value, details } => (check_finite(scorer.as_ref(), value)?, details),
        Score::Missing { reason } => {
            println!("{}: nothing to score: {reason}", scorer.name());
            return Ok(());
        }
    };
    let gradient = pullback.map(|pullback| pullback.pull(&Tensor::scalar(1.0))).transpose()?;
    let seconds = start.elapsed().as_secs_f64();
    let gradient_note = if gradient.is_some() { "with its gradient" } else { "no gradient" };
    println!(
        "{}: {value:.6}   ({} in {:.1} ms, {gradient_note})",
        scorer.name(),
        counted(video.dims()[0] as u64, "frame"),
        1e3 * seconds
    );
    for (name, value) in details {
        println!("  {name:<28} {value:.6}");
    }
    let norms = gradient.as_ref().map(frame_norms).transpose()?;
    if let Some(gradient) = &gradient {
        print_change_along_gradient(scorer.as_mut(), &video, &args.prompt, &target, gradient)?;
    }
    let frame_scores = match args.no_frames {
        true => None,
        false => Some(scores_of_frames(scorer.as_mut(), &video, &args.prompt, &target)?),
    };
    print_frames(frame_scores.as_deref(), norms.as_deref());
    match (&args.output, &gradient) {
        (Some(output), Some(gradient)) => {
            write_contact_sheet(output, &with_heat_map(&video, gradient)?, DRAWN_FRAMES)?;
            println!("wrote {}: each frame, and its gradient below it", output.display());
        }
        (Some(_), None) => return Err(Error::Unsupported(format!("`{}` has no gradient to draw", scorer.name()))),
        (None, _) => {}
    }
    Ok(())
}

/// Fails unless the picture of the gradient can be written to `output`.
fn check_output(output: &Path, force: bool) -> Result<()> {
    if output.extension().is_none_or(|extension| extension != "png") {
        let problem = format!("the picture is written as PNG; {} does not end in .png", output.display());
        return Err(Error::config("--output", problem));
    }
    refuse_existing(output, force)
}

/// The norm of the gradient in each frame.
fn frame_norms(gradient: &Tensor) -> Result<Vec<f64>> {
    let values_of_frame = gradient.len() / gradient.shape()[0].max(1);
    let norm = |g: &[f32]| g.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
    Ok(gradient.f32s()?.chunks_exact(values_of_frame.max(1)).map(norm).collect())
}

/// Prints the measured change of the score after a small step along the gradient, and the change that the gradient
/// predicts.
fn print_change_along_gradient(
    scorer: &mut dyn RewardScorer,
    video: &Video,
    prompt: &str,
    target: &Target,
    gradient: &Tensor,
) -> Result<()> {
    let largest_slope = gradient.f32s()?.iter().fold(0f32, |m, g| m.max(g.abs()));
    if !(largest_slope > 0.0 && largest_slope.is_finite()) {
        println!("  the gradient is {} everywhere", if largest_slope == 0.0 { "0" } else { "not finite" });
        return Ok(());
    }
    // The largest change of a pixel, 0.002 in [-1, 1], is below a step of 8 bits.
    let step = 2e-3 / largest_slope;
    let mut score_after = |step: f32| -> Result<Option<f64>> {
        let values = video.frames().f32s()?.iter().zip(gradient.f32s()?).map(|(v, g)| v + step * g);
        let moved = Video::new(Tensor::new(values.collect(), video.frames().shape())?, video.fps())?;
        Ok(scorer.score(&moved, prompt, target, Grad::Skip)?.0.value())
    };
    if let (Some(above), Some(below)) = (score_after(step)?, score_after(-step)?) {
        // From -step to step along g, the score changes by 2 * step * |g|^2.
        let predicted = gradient.f32s()?.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>() * 2.0 * f64::from(step);
        println!(
            "  score change after a small step along the gradient: {:.3e} measured, {predicted:.3e} predicted",
            above - below
        );
    }
    Ok(())
}

/// The score of each frame as a video of one frame; `None` for a frame with nothing to score.
fn scores_of_frames(
    scorer: &mut dyn RewardScorer,
    video: &Video,
    prompt: &str,
    target: &Target,
) -> Result<Vec<Option<f64>>> {
    let [frames, height, width] = video.dims();
    let score_of = |t: usize| {
        let frame = Video::new(Tensor::new(video.frame(t).to_vec(), [1, CHANNELS, height, width])?, video.fps())?;
        Ok(scorer.score(&frame, prompt, target, Grad::Skip)?.0.value())
    };
    (0..frames).map(score_of).collect()
}

/// Prints a row for each frame: its own score, and the norm of its gradient with a bar.
fn print_frames(scores: Option<&[Option<f64>]>, norms: Option<&[f64]>) {
    let count = scores.map(<[_]>::len).or(norms.map(<[_]>::len)).unwrap_or(0);
    if count == 0 {
        return;
    }
    println!("{:>6}  {:>14}  {:>12}", "frame", "own score", "gradient");
    let largest_norm = norms.into_iter().flatten().fold(0f64, |m, n| m.max(*n));
    for t in 0..count {
        let score = match scores.and_then(|scores| scores[t]) {
            Some(value) => format!("{value:.6}"),
            None => "-".into(),
        };
        let (norm, bar) = match norms.map(|n| n[t]) {
            Some(norm) if largest_norm > 0.0 => {
                (format!("{norm:.3e}"), "#".repeat((norm / largest_norm * BAR_LENGTH).round() as usize))
            }
            Some(norm) => (format!("{norm:.3e}"), String::new()),
            None => ("-".into(), String::new()),
        };
        println!("{t:>6}  {score:>14}  {norm:>12}  {bar}");
    }
}

/// Each frame with its gradient below it as a heat map. Black is a gradient of 0; larger ones go over red and yellow to
/// white.
fn with_heat_map(video: &Video, gradient: &Tensor) -> Result<Video> {
    let [frames, height, width] = video.dims();
    let plane = height * width;
    let slopes = gradient.f32s()?;
    // The gradient of pixel `i` of frame `t`: the norm over its channels.
    let norm =
        |t: usize, i: usize| (0..CHANNELS).map(|c| slopes[(t * CHANNELS + c) * plane + i].powi(2)).sum::<f32>().sqrt();
    let norms: Vec<f32> = (0..frames).flat_map(|t| (0..plane).map(move |i| norm(t, i))).collect();
    // White begins at the 99.5th percentile: a few pixels far above all others would leave the rest black.
    let mut sorted = norms.clone();
    sorted.sort_by(f32::total_cmp);
    let white = sorted.get(sorted.len() * 995 / 1000).copied().unwrap_or(0.0).max(f32::MIN_POSITIVE);
    let mut values = Vec::with_capacity(2 * slopes.len());
    for (t, planes) in video.planes().enumerate() {
        for (c, pixels) in planes.iter().enumerate() {
            values.extend_from_slice(pixels);
            // Red rises in the first third of the range, green in the second, blue in the last.
            let heat = |norm: &f32| (3.0 * norm / white - c as f32).clamp(0.0, 1.0) * 2.0 - 1.0;
            values.extend(norms[t * plane..][..plane].iter().map(heat));
        }
    }
    Video::new(Tensor::new(values, [frames, CHANNELS, 2 * height, width])?, video.fps())
}
