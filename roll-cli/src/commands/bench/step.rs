//! The timed work: either each phase of a step once, or whole steps as in training.

use roll_core::{Adapter, DiffusionModel, Error, Grad, Pullback, Result, Strategy, Tensor};

use super::fixture::Fixture;
use super::measure::PhaseTimer;
use super::preset::Preset;

/// Each phase once. Whatever ends in host memory has been computed by then.
pub fn by_phases(fixture: &mut Fixture, preset: &Preset<'_>, timer: &mut PhaseTimer<'_>) -> Result<()> {
    let Fixture { model, latents, conditioning, timestep, .. } = &mut *fixture;
    let mut run =
        |name, adapter, grad| timer.time(name, || model.velocity(latents, *timestep, conditioning, adapter, grad));
    run("forward", Adapter::On, Grad::Skip)?;
    run("reference forward", Adapter::Off, Grad::Skip)?;
    let (velocity, pullback) = run("forward, recorded", Adapter::On, Grad::Record)?;
    if !preset.args.without_vae {
        timer.time("encode", || fixture.model.encode_video(&fixture.video))?;
    }
    let d_latents = match preset.args.without_vae {
        true => velocity,
        false => scored(fixture, preset, timer)?.unwrap_or(velocity),
    };
    timer.time("pull of forward", || pullback.ok_or_else(unrecorded)?.pull(&d_latents))?;
    optimize(fixture, timer)
}

/// One step as Reward-FL makes it: every pass that is pulled back is recorded before the first pull. Nothing is
/// encoded: `data.cache_dir` keeps encodings.
pub fn whole(fixture: &mut Fixture, preset: &Preset<'_>, timer: &mut PhaseTimer<'_>) -> Result<()> {
    let passes = &preset.passes;
    let Fixture { model, latents, conditioning, timestep, .. } = &mut *fixture;
    let mut run =
        |name, adapter, grad| timer.time(name, || model.velocity(latents, *timestep, conditioning, adapter, grad));
    for _ in 0..passes.forward - passes.pulled {
        run("forward", Adapter::On, Grad::Skip)?;
    }
    let mut pullbacks: Vec<Pullback> = Vec::new();
    let mut d_latents = Tensor::zeros(latents.shape());
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
        d_latents = scored(fixture, preset, timer)?.unwrap_or(d_latents);
    }
    while let Some(pullback) = pullbacks.pop() {
        timer.time("pull of forward", || pullback.pull(&d_latents))?;
    }
    optimize(fixture, timer)
}

/// Decodes, scores, and pulls the score back to the latents; `None` where the algorithm has no use for that.
fn scored(fixture: &mut Fixture, preset: &Preset<'_>, timer: &mut PhaseTimer<'_>) -> Result<Option<Tensor>> {
    let Fixture { model, scorer, latents, .. } = fixture;
    // A step that decodes with a gradient and without is measured with it, which takes longer.
    let with_gradient = preset.passes.decoded()[1] > 0;
    let grad = if with_gradient { Grad::Record } else { Grad::Skip };
    let (frames, decoded) = timer.time("decode", || model.decode(latents, grad))?;
    let (_, scored) = timer.time("score", || scorer.score(&frames))?;
    if !with_gradient {
        return Ok(None);
    }
    let d_frames = timer.time("pull of score", || scored.pull(&Tensor::scalar(1.0)))?;
    timer.time("pull of decode", || decoded.ok_or_else(unrecorded)?.pull(&d_frames)).map(Some)
}

fn optimize(fixture: &mut Fixture, timer: &mut PhaseTimer<'_>) -> Result<()> {
    let Fixture { model, strategy, .. } = fixture;
    timer.time("optimizer", || {
        strategy.accumulate(model)?;
        let report = strategy.step(model, 1e-6, 1.0)?;
        match report.applied {
            true => Ok(()),
            false => Err(Error::Misuse("the gradient of the random networks is not finite".into())),
        }
    })
}

fn unrecorded() -> Error {
    Error::Misuse("a recorded pass has a pullback".into())
}
