//! Times the phases of a step: [`measure_step`] runs the rounds, [`PhaseTimer`] takes the time of each phase.

use std::collections::BTreeMap;
use std::time::Instant;

use burn_tensor::{DType, Device, Distribution, Tensor as Burn};
use roll_backends::device::is_gpu;
use roll_backends::product_dtype;
use roll_core::Result;
use roll_core::plan::Passes;

use super::memory::Meter;
use super::preset::Preset;

/// The measurement of one phase.
#[derive(Clone, Debug)]
pub struct Phase {
    pub name: &'static str,
    /// Median seconds of one pass.
    pub seconds: f64,
    /// Number of passes in a step.
    pub passes: usize,
    /// Floating-point operations of one pass; `None` if they are not counted.
    pub flops: Option<f64>,
    /// Tokens that go through the transformer in one pass; `None` in other phases.
    pub tokens: Option<usize>,
    /// Peak memory in bytes.
    pub peak: Option<u64>,
    /// Which memory `peak` measures.
    pub memory: &'static str,
}

impl Phase {
    /// Whether the phase is a pass of the transformer, or the pull of one.
    pub fn is_transformer(&self) -> bool {
        // The names of these phases, and of no other phases, contain "forward".
        self.name.contains("forward")
    }
}

/// Time and memory of a step, measured phase by phase, or as whole steps. During whole steps the phases are timed, too,
/// but have no peak memory.
#[derive(Clone, Debug)]
pub struct Measurement {
    /// Phases in the order of a step.
    pub phases: Vec<Phase>,
    /// Results of whole steps; `None` if phases were measured one by one.
    pub whole: Option<WholeSteps>,
    /// Number of complete rounds after the warm-up. It is 0 during the warm-up and the first round, when `phases` has
    /// the measurements so far.
    pub rounds: usize,
}

/// Steps that were timed as a whole.
#[derive(Clone, Copy, Debug)]
pub struct WholeSteps {
    /// Median seconds of a step.
    pub seconds: f64,
    /// Peak memory in bytes.
    pub peak: Option<u64>,
}

impl Measurement {
    /// Seconds of a step: the median of whole steps, or the sum of the phases if all of them were measured.
    pub fn step_seconds(&self, passes: &Passes) -> Option<f64> {
        let are_all_measured = self.phases.len() == phases_of(passes).count();
        let sum = || self.phases.iter().map(|p| p.seconds * p.passes as f64).sum();
        self.whole.map(|whole| whole.seconds).or_else(|| are_all_measured.then(sum))
    }

    /// Floating-point operations per second of the transformer, over all its passes of a step.
    pub fn transformer_rate(&self) -> Option<f64> {
        let (mut flops, mut seconds) = (0.0, 0.0);
        for phase in self.phases.iter().filter(|phase| phase.is_transformer()) {
            let passes = phase.passes as f64;
            flops += passes * phase.flops.unwrap_or(0.0);
            seconds += passes * phase.seconds;
        }
        (seconds > 0.0).then(|| flops / seconds)
    }

    /// Peak memory in bytes: of whole steps, or of all phases.
    pub fn peak(&self) -> Option<u64> {
        match &self.whole {
            Some(whole) => whole.peak,
            None => self.phases.iter().filter_map(|p| p.peak).max(),
        }
    }
}

/// Names of the phases, in the order of a step. A pull is the backward pass of a phase; a recorded forward pass keeps
/// what its pull needs.
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

/// The phases of a step, and how often a step runs each. Phases that it does not run are left out.
pub fn phases_of(passes: &Passes) -> impl Iterator<Item = (&'static str, usize)> {
    let [videos_without_gradient, videos_with_gradient] = passes.decoded();
    let (without_gradient, with_gradient) = (passes.forward - passes.pulled, passes.pulled);
    let references = passes.references();
    let passes_of_phase = move |name| match name {
        "forward" => without_gradient,
        "forward, recorded" | "pull of forward" => with_gradient,
        "reference forward" => references,
        "decode" | "score" => videos_without_gradient + videos_with_gradient,
        "pull of score" | "pull of decode" => videos_with_gradient,
        _ => 1,
    };
    PHASES.into_iter().map(move |name| (name, passes_of_phase(name))).filter(|(_, count)| *count > 0)
}

/// Operations a second of matrix products in the transformer's own shapes, the best of several runs. The matrices hold
/// random numbers, because products of ones switch fewer transistors of a GPU and run faster than those of any network.
pub fn peak_product_rate(preset: &Preset<'_>, device: &Device) -> Result<f64> {
    /// How long each shape is measured.
    const SECONDS: f64 = 1.0;
    /// Products in the queue of the device before one wait, so that the wait takes a small part of the time.
    const QUEUED: usize = 4;
    /// Fewest rows, even if a video of the preset has fewer tokens.
    const MIN_ROWS: usize = 256;
    /// More rows make products on a CPU no faster, but take seconds each.
    const MAX_CPU_ROWS: usize = 8192;
    let facts = preset.facts();
    let rows = facts.tokens.clamp(MIN_ROWS, if is_gpu(device) { usize::MAX } else { MAX_CPU_ROWS });
    let dtype = product_dtype(device, facts.dtype);
    let normal = |shape: [usize; 2], deviation: f64| -> Burn<2> {
        let values: Burn<2> = Burn::random(shape, Distribution::Normal(0.0, deviation), (device, DType::F32));
        values.cast(dtype)
    };
    let mut best = 0.0f64;
    for [inputs, outputs] in [[facts.dim, facts.ffn_dim], [facts.ffn_dim, facts.dim], [facts.dim, facts.dim]] {
        let (x, w) = (normal([rows, inputs], 1.0), normal([inputs, outputs], 1.0 / (inputs as f64).sqrt()));
        // A copy to the host waits for the device.
        let wait = |y: Burn<2>| roll_backends::to_host(y.narrow(0, 0, 1).narrow(1, 0, 1)).map(drop);
        wait(x.clone().matmul(w.clone()))?;
        let start_of_shape = Instant::now();
        while start_of_shape.elapsed().as_secs_f64() < SECONDS {
            let start = Instant::now();
            let product = || x.clone().matmul(w.clone());
            (1..QUEUED).for_each(|_| drop(product()));
            wait(product())?;
            let flops = 2.0 * (QUEUED * rows * inputs * outputs) as f64;
            best = best.max(flops / start.elapsed().as_secs_f64());
        }
    }
    Ok(best)
}

/// The work of one round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Round {
    /// Each phase once.
    Phases,
    /// A whole step, as training makes it.
    WholeStep,
}

/// Measures `rounds` rounds after one that warms up. Rounds are whole steps with `--whole-step`, else
/// [`Round::Phases`].
///
/// Times are medians without the warm-up. Peaks of phases include the warm-up, peaks of whole steps do not. `run_round`
/// does the work of a round. `progress` is called after each phase, and after each round but the warm-up.
pub fn measure_step(
    preset: &Preset<'_>,
    rounds: usize,
    meter: &Meter,
    progress: &dyn Fn(&Measurement) -> Result<()>,
    mut run_round: impl FnMut(&mut PhaseTimer<'_>, Round) -> Result<()>,
) -> Result<Measurement> {
    let mut timer = PhaseTimer::new(preset, meter, progress);
    for round in 0..=rounds {
        // The warm-up runs each phase once, which compiles kernels and fills allocators. With `--offload` the warm-up
        // of whole steps is a whole step: nothing less allocates the host memory for all activations.
        let is_warm_up = round == 0;
        let is_whole = preset.args.whole_step && (!is_warm_up || preset.args.offload);
        meter.reset();
        let start = Instant::now();
        run_round(&mut timer, if is_whole { Round::WholeStep } else { Round::Phases })?;
        let seconds = start.elapsed().as_secs_f64();
        tracing::debug!("round {round} of {rounds}: {seconds:.3} s");
        if is_warm_up {
            timer.seconds.clear();
            continue;
        }
        timer.rounds = round;
        if is_whole {
            timer.whole_seconds.push(seconds);
            timer.whole_peak = timer.whole_peak.max(meter.peak());
        }
        progress(&timer.measured())?;
    }
    Ok(timer.measured())
}

/// Floating-point operations of one pass of each phase for which they are counted.
pub fn flops(preset: &Preset<'_>) -> BTreeMap<&'static str, f64> {
    let planned = &preset.facts().time;
    let passes = &preset.passes;
    let [videos_without_gradient, videos_with_gradient] = passes.decoded();
    // The plan has a total for all passes of a kind. A forward pass of the reference takes as many operations as one of
    // `time/rollout`.
    let flops_of_pass = |name: &str| {
        let (plan_phase, count) = match name {
            "forward" | "forward, recorded" | "reference forward" => ("time/rollout", passes.forward),
            "pull of forward" => ("time/pull", passes.pulled),
            "decode" => ("time/decode", videos_without_gradient + videos_with_gradient),
            "pull of decode" => ("time/pull (decoder)", videos_with_gradient),
            _ => return None,
        };
        planned.iter().find(|phase| phase.name == plan_phase).map(|phase| phase.flops / count as f64)
    };
    phases_of(passes).filter_map(|(name, _)| Some((name, flops_of_pass(name)?))).collect()
}

/// Times the phases of a step, and holds the measurements so far.
pub struct PhaseTimer<'a> {
    preset: &'a Preset<'a>,
    meter: &'a Meter,
    progress: &'a dyn Fn(&Measurement) -> Result<()>,
    /// Floating-point operations of one pass of each phase.
    flops: BTreeMap<&'static str, f64>,
    /// Seconds of each pass, by phase.
    seconds: BTreeMap<&'static str, Vec<f64>>,
    /// Peak memory of each phase, in bytes.
    peak: BTreeMap<&'static str, u64>,
    /// Seconds of each whole step.
    whole_seconds: Vec<f64>,
    /// Peak memory of whole steps, in bytes.
    whole_peak: Option<u64>,
    /// Number of complete rounds after the warm-up.
    rounds: usize,
}

impl<'a> PhaseTimer<'a> {
    fn new(preset: &'a Preset<'a>, meter: &'a Meter, progress: &'a dyn Fn(&Measurement) -> Result<()>) -> Self {
        Self {
            preset,
            meter,
            progress,
            flops: flops(preset),
            seconds: BTreeMap::new(),
            peak: BTreeMap::new(),
            whole_seconds: Vec::new(),
            whole_peak: None,
            rounds: 0,
        }
    }

    /// Runs one pass of the phase `name`. `f` must copy its result to host memory at the end, because nothing else
    /// waits for the device.
    pub fn time<T>(&mut self, name: &'static str, f: impl FnOnce() -> Result<T>) -> Result<T> {
        // Reading the driver's count of memory takes longer than some phases, so it is left out while whole steps are
        // timed.
        let meter = (!self.preset.args.whole_step).then_some(self.meter);
        if let Some(meter) = meter {
            meter.reset();
        }
        let start = Instant::now();
        let value = f()?;
        let seconds = start.elapsed().as_secs_f64();
        mark(name);
        tracing::debug!("{name}: {seconds:.3} s");
        self.seconds.entry(name).or_default().push(seconds);
        if let Some(peak) = meter.and_then(Meter::peak) {
            let highest = self.peak.entry(name).or_default();
            *highest = peak.max(*highest);
        }
        (self.progress)(&self.measured())?;
        Ok(value)
    }

    /// The measurements so far.
    fn measured(&self) -> Measurement {
        let tokens = self.preset.facts().tokens;
        let phase = |(name, passes): (&'static str, usize)| {
            Some(Phase {
                name,
                seconds: median(self.seconds.get(name)?.clone())?,
                passes,
                flops: self.flops.get(name).copied(),
                tokens: name.contains("forward").then_some(tokens),
                peak: self.peak.get(name).copied(),
                memory: self.meter.kind(),
            })
        };
        Measurement {
            phases: phases_of(&self.preset.passes).filter_map(phase).collect(),
            whole: median(self.whole_seconds.clone()).map(|seconds| WholeSteps { seconds, peak: self.whole_peak }),
            rounds: self.rounds,
        }
    }
}

/// Marks the end of a phase for a preloaded profiler (`LD_PRELOAD`, `bench/operators.cpp`).
fn mark(phase: &str) {
    #[cfg(unix)]
    if let Ok(phase) = std::ffi::CString::new(phase) {
        type Mark = unsafe extern "C" fn(*const std::ffi::c_char);
        // SAFETY: looks a symbol up. The library that has it declares it with this signature, and copies the string.
        unsafe {
            let found = libc::dlsym(libc::RTLD_DEFAULT, c"roll_phase_ended".as_ptr());
            if !found.is_null() {
                std::mem::transmute::<*mut libc::c_void, Mark>(found)(phase.as_ptr());
            }
        }
    }
}

/// The median; for an even number of values, the smaller of the middle two.
fn median(mut seconds: Vec<f64>) -> Option<f64> {
    seconds.sort_by(f64::total_cmp);
    seconds.get(seconds.len().saturating_sub(1) / 2).copied()
}
