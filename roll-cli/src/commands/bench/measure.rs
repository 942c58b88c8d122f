//! Timing the phases of a step.

use std::collections::BTreeMap;
use std::time::Instant;

use burn::tensor::{Device, Tensor as Burn};
use roll_backends::product_dtype;
use roll_core::{Adapter, DiffusionModel, Error, Grad, Result, Strategy, Tensor};
use roll_models::wan2_2::plan::Speed;

use super::fixture::Fixture;
use super::memory::Meter;
use super::preset::{Preset, STEPS, TRAINED_STEPS};

/// One phase of a step.
#[derive(Clone, Debug)]
pub struct Phase {
    /// What it is.
    pub name: &'static str,
    /// Median.
    pub seconds: f64,
    /// How often a step does it.
    pub passes: usize,
    /// Floating-point operations of one pass, where they are counted.
    pub flops: Option<f64>,
    /// Tokens that go through the transformer in one pass.
    pub tokens: Option<usize>,
    /// Bytes at the highest.
    pub peak: Option<u64>,
    /// Which memory that is.
    pub memory: &'static str,
}

/// What this machine does.
#[derive(Clone, Debug)]
pub struct Measured {
    /// Operations a second of the fastest product of matrices.
    pub ceiling: f64,
    /// In the order of a step.
    pub phases: Vec<Phase>,
}

/// Names of the phases, in the order of a step, and how often a step does each. `forward` are the denoising steps that
/// are not trained.
pub const PHASES: [(&str, usize); 10] = [
    ("encode", 1),
    ("forward", STEPS - TRAINED_STEPS),
    ("forward, recorded", TRAINED_STEPS),
    ("reference forward", TRAINED_STEPS),
    ("decode", 1),
    ("score", 1),
    ("pull of score", 1),
    ("pull of decode", 1),
    ("pull of forward", TRAINED_STEPS),
    ("optimizer", 1),
];

/// How often a step does the phase `name`, which it does `passes` times without guidance.
fn passes(preset: &Preset, name: &str, passes: usize) -> usize {
    match (preset.guided, name) {
        (true, "forward") => passes + STEPS,
        _ => passes,
    }
}

/// Operations a second of products of the transformer's own shapes, the best of several runs.
pub fn ceiling(preset: &Preset, device: &Device) -> Result<f64> {
    const SECONDS: f64 = 1.0;
    let dit = &preset.networks.dit;
    let rows = preset.plan().tokens().clamp(256, 8192);
    let dtype = product_dtype(device, preset.dtype);
    let mut best = 0.0f64;
    for [inputs, outputs] in [[dit.dim, dit.ffn_dim], [dit.ffn_dim, dit.dim], [dit.dim, dit.dim]] {
        let (x, w): (Burn<2>, Burn<2>) =
            (Burn::ones([rows, inputs], (device, dtype)), Burn::ones([inputs, outputs], (device, dtype)));
        let wait = |y: Burn<2>| roll_backends::to_host(y.narrow(0, 0, 1).narrow(1, 0, 1)).map(drop);
        wait(x.clone().matmul(w.clone()))?;
        let begin = Instant::now();
        while begin.elapsed().as_secs_f64() < SECONDS {
            const AT_ONCE: usize = 4;
            let start = Instant::now();
            let last = (1..AT_ONCE).fold(x.clone().matmul(w.clone()), |_, _| x.clone().matmul(w.clone()));
            wait(last)?;
            let flops = 2.0 * (AT_ONCE * rows * inputs * outputs) as f64;
            best = best.max(flops / start.elapsed().as_secs_f64());
        }
    }
    Ok(best)
}

/// Times and memory of each phase: medians over `rounds` after one that warms up.
pub fn phases(fixture: &mut Fixture, preset: &Preset, rounds: usize, meter: &Meter) -> Result<Vec<Phase>> {
    let mut seen = Seen { meter, seconds: BTreeMap::new(), peak: BTreeMap::new() };
    for round in 0..=rounds {
        if round == 1 {
            seen.seconds.clear();
        }
        step(fixture, preset, &mut seen)?;
    }
    let plan = preset.plan();
    let counted = plan.time(Speed { flops: 1.0, link: 1.0, read: 1.0 });
    let total = |name: &str| counted.iter().find(|p| p.name == name).map(|p| p.flops);
    let of = |name: &str| match name {
        "forward" | "forward, recorded" | "reference forward" => total("time/rollout").map(|f| f / STEPS as f64),
        "pull of forward" => total("time/pull").map(|f| f / TRAINED_STEPS as f64),
        "decode" => total("time/decode"),
        "pull of decode" => total("time/pull (decoder)"),
        _ => None,
    };
    let tokens = plan.tokens();
    let phase = |(name, passes): (&'static str, usize)| {
        let seconds = median(seen.seconds.get(name)?.clone())?;
        let tokens = name.contains("forward").then_some(tokens);
        let peak = seen.peak.get(name).copied();
        let passes = self::passes(preset, name, passes);
        Some(Phase { name, seconds, passes, flops: of(name), tokens, peak, memory: meter.kind() })
    };
    Ok(PHASES.into_iter().filter_map(phase).collect())
}

/// What was measured so far.
struct Seen<'a> {
    meter: &'a Meter,
    seconds: BTreeMap<&'static str, Vec<f64>>,
    peak: BTreeMap<&'static str, u64>,
}

impl Seen<'_> {
    fn time<T>(&mut self, name: &'static str, f: impl FnOnce() -> Result<T>) -> Result<T> {
        self.meter.reset();
        let start = Instant::now();
        let value = f()?;
        self.seconds.entry(name).or_default().push(start.elapsed().as_secs_f64());
        if let Some(peak) = self.meter.peak() {
            let most = self.peak.entry(name).or_default();
            *most = peak.max(*most);
        }
        Ok(value)
    }
}

/// Each phase once. Whatever ends in host memory has been computed by then.
fn step(fixture: &mut Fixture, preset: &Preset, seen: &mut Seen<'_>) -> Result<()> {
    let Fixture { model, scorer, strategy, latents, conditioning, video, timestep } = fixture;
    let none = || Error::Misuse("a recorded pass has a pullback".into());
    let mut run =
        |name, adapter, grad| seen.time(name, || model.velocity(latents, *timestep, conditioning, adapter, grad));
    run("forward", Adapter::On, Grad::Skip)?;
    run("reference forward", Adapter::Off, Grad::Skip)?;
    let (velocity, pullback) = run("forward, recorded", Adapter::On, Grad::Record)?;
    let d_latents = match preset.with_vae {
        true => {
            seen.time("encode", || model.encode_video(video))?;
            let (frames, decoded) = seen.time("decode", || model.decode(latents, Grad::Record))?;
            let (_, scored) = seen.time("score", || scorer.score(&frames))?;
            let d_frames = seen.time("pull of score", || scored.pull(&Tensor::scalar(1.0)))?;
            seen.time("pull of decode", || decoded.ok_or_else(none)?.pull(&d_frames))?
        }
        false => velocity,
    };
    seen.time("pull of forward", || pullback.ok_or_else(none)?.pull(&d_latents))?;
    seen.time("optimizer", || {
        strategy.accumulate(model)?;
        let report = strategy.step(model, 1e-6, 1.0)?;
        match report.applied {
            true => Ok(()),
            false => Err(Error::Misuse("the gradient of the random networks is not finite".into())),
        }
    })
}

/// The middle one.
fn median(mut seconds: Vec<f64>) -> Option<f64> {
    seconds.sort_by(f64::total_cmp);
    seconds.get(seconds.len() / 2).copied()
}
