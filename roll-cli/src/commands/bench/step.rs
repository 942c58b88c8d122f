//! The timed work: either each phase of a step once, or whole steps as in training.

use roll_core::{Adapter, Error, Grad, Pullback, Result, Strategy, Tensor};

use super::fixture::{Fixture, as_diffusion};
use super::measure::PhaseTimer;
use super::preset::Preset;

/// Learning rate of the optimizer's phase. The value does not change its time.
const LEARNING_RATE: f64 = 1e-6;

/// Runs each phase once.
pub fn by_phases(fixture: &mut Fixture, preset: &Preset<'_>, timer: &mut PhaseTimer<'_>) -> Result<()> {
    let Fixture { model, latents, conditioning, timestep, .. } = &mut *fixture;
    let model = as_diffusion(&mut **model)?;
    let mut run =
        |name, adapter, grad| timer.time(name, || model.velocity(latents, *timestep, conditioning, adapter, grad));
    run("forward", Adapter::On, Grad::Skip)?;
    run("reference forward", Adapter::Off, Grad::Skip)?;
    let (velocity, pullback) = run("forward, recorded", Adapter::On, Grad::Record)?;
    if !preset.args.without_vae {
        let video = fixture.video.clone();
        timer.time("encode", || fixture.diffusion()?.encode_video(&video))?;
    }
    // Without a gradient of the score, the velocity takes its place: it has the same shape.
    let d_latents = match preset.args.without_vae {
        true => velocity,
        false => score_and_pull(fixture, preset, timer)?.unwrap_or(velocity),
    };
    timer.time("pull of forward", || pullback.ok_or_else(unrecorded)?.pull(&d_latents))?;
    optimize(fixture, timer)
}

/// Makes one step as Reward-FL does: every pass that is pulled back is recorded before the first pull. No video is
/// encoded, as in a run whose `data.cache_dir` holds the encodings.
pub fn whole(fixture: &mut Fixture, preset: &Preset<'_>, timer: &mut PhaseTimer<'_>) -> Result<()> {
    let passes = &preset.passes;
    let Fixture { model, latents, conditioning, timestep, .. } = &mut *fixture;
    let model = as_diffusion(&mut **model)?;
    let mut run =
        |name, adapter, grad| timer.time(name, || model.velocity(latents, *timestep, conditioning, adapter, grad));
    for _ in 0..passes.forward - passes.pulled {
        run("forward", Adapter::On, Grad::Skip)?;
    }
    let mut pullbacks: Vec<Pullback> = Vec::new();
    let mut d_latents = Tensor::zeros(latents.shape());
    // A pass of the reference follows each recorded pass, as long as reference passes are left. Further reference
    // passes follow the last recorded pass.
    let mut references = 0..passes.references();
    for _ in 0..passes.pulled {
        let (velocity, pullback) = run("forward, recorded", Adapter::On, Grad::Record)?;
        pullbacks.push(pullback.ok_or_else(unrecorded)?);
        d_latents = velocity;
        if references.next().is_some() {
            run("reference forward", Adapter::Off, Grad::Skip)?;
        }
    }
    for _ in references {
        run("reference forward", Adapter::Off, Grad::Skip)?;
    }
    if !preset.args.without_vae {
        d_latents = score_and_pull(fixture, preset, timer)?.unwrap_or(d_latents);
    }
    while let Some(pullback) = pullbacks.pop() {
        timer.time("pull of forward", || pullback.pull(&d_latents))?;
    }
    optimize(fixture, timer)
}

/// Decodes and scores the latents. Returns the gradient of the score for the latents; `None` if the algorithm does not
/// back-propagate the score.
fn score_and_pull(fixture: &mut Fixture, preset: &Preset<'_>, timer: &mut PhaseTimer<'_>) -> Result<Option<Tensor>> {
    let Fixture { model, scorer, latents, .. } = fixture;
    let model = as_diffusion(&mut **model)?;
    // A step may decode some videos with a gradient and others without. A decoding with a gradient is measured, because
    // it takes longer.
    let [_, videos_with_gradient] = preset.passes.decoded();
    let with_gradient = videos_with_gradient > 0;
    let grad = if with_gradient { Grad::Record } else { Grad::Skip };
    let (frames, decode_pullback) = timer.time("decode", || model.decode(latents, grad))?;
    let (_, score_pullback) = timer.time("score", || scorer.score(&frames))?;
    if !with_gradient {
        return Ok(None);
    }
    let d_frames = timer.time("pull of score", || score_pullback.pull(&Tensor::scalar(1.0)))?;
    timer.time("pull of decode", || decode_pullback.ok_or_else(unrecorded)?.pull(&d_frames)).map(Some)
}

/// Times an update of the optimizer.
fn optimize(fixture: &mut Fixture, timer: &mut PhaseTimer<'_>) -> Result<()> {
    let Fixture { model, strategy, .. } = fixture;
    timer.time("optimizer", || {
        strategy.accumulate(&mut **model)?;
        let (learning_rate, gradient_scale) = (LEARNING_RATE, 1.0);
        let report = strategy.step(&mut **model, learning_rate, gradient_scale)?;
        match report.applied {
            true => Ok(()),
            false => Err(Error::Misuse("the gradient of the random networks is not finite".into())),
        }
    })
}

/// The error of a pass without the pullback that was asked for.
fn unrecorded() -> Error {
    Error::Misuse("a recorded pass returned no pullback".into())
}
