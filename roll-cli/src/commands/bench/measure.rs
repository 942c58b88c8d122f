//! Timing the phases of a step.

use std::collections::BTreeMap;
use std::time::Instant;

use burn::tensor::{Device, Tensor as Burn};
use roll_backends::product_dtype;
use roll_core::plan::Passes;
use roll_core::{Adapter, DiffusionModel, Error, Grad, Result, Strategy, Tensor};
use roll_models::wan2_2::plan::Speed;

use super::fixture::Fixture;
use super::memory::Meter;
use super::preset::Preset;

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

/// Names of the phases, in the order of a step.
const PHASES: [&str; 10] = [
    "encode",
    "forward",
    "forward, recorded",
    "reference forward",
    "decode",
    "score",
    "pull of score",
    "pull of decode",
    "pull of forward",
    "optimizer",
];

/// The phases of a step, and how often it does each.
pub fn phases_of(passes: &Passes) -> impl Iterator<Item = (&'static str, usize)> {
    let [unrecorded, decoded] = passes.decoded();
    let (unpulled, pulled, references) = (passes.forward - passes.pulled, passes.pulled, passes.references());
    let times = move |name| match name {
        "forward" => unpulled,
        "forward, recorded" | "pull of forward" => pulled,
        "reference forward" => references,
        "decode" | "score" => unrecorded + decoded,
        "pull of score" | "pull of decode" => decoded,
        _ => 1,
    };
    PHASES.into_iter().map(move |name| (name, times(name))).filter(|(_, times)| *times > 0)
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
    let passes = preset.passes;
    let [unrecorded, decoded] = passes.decoded();
    let of = |name: &str| {
        let (all, times) = match name {
            "forward" | "forward, recorded" | "reference forward" => ("time/rollout", passes.forward),
            "pull of forward" => ("time/pull", passes.pulled),
            "decode" => ("time/decode", unrecorded + decoded),
            "pull of decode" => ("time/pull (decoder)", decoded),
            _ => return None,
        };
        total(all).map(|flops| flops / times as f64)
    };
    let tokens = plan.tokens();
    let phase = |(name, passes): (&'static str, usize)| {
        let seconds = median(seen.seconds.get(name)?.clone())?;
        let tokens = name.contains("forward").then_some(tokens);
        let peak = seen.peak.get(name).copied();
        Some(Phase { name, seconds, passes, flops: of(name), tokens, peak, memory: meter.kind() })
    };
    Ok(phases_of(&passes).filter_map(phase).collect())
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
    let mut d_latents = velocity;
    if preset.with_vae {
        seen.time("encode", || model.encode_video(video))?;
        // A step that decodes with a gradient and without is measured with it, which takes longer.
        let with_gradient = preset.passes.decoded()[1] > 0;
        let grad = if with_gradient { Grad::Record } else { Grad::Skip };
        let (frames, decoded) = seen.time("decode", || model.decode(latents, grad))?;
        let (_, scored) = seen.time("score", || scorer.score(&frames))?;
        if with_gradient {
            let d_frames = seen.time("pull of score", || scored.pull(&Tensor::scalar(1.0)))?;
            d_latents = seen.time("pull of decode", || decoded.ok_or_else(none)?.pull(&d_frames))?;
        }
    }
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
