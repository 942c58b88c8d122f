//! Videos are generated while a reward that computes elsewhere scores the one before.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::Duration;

use roll_core::*;
use roll_testing::diffusion::{Sines, sample};
use roll_testing::training::Bench;

use crate::diffusion_nft::{DiffusionNft, DiffusionNftConfig};
use crate::flow_grpo::{FlowGrpo, FlowGrpoConfig};

const SCORING: Duration = Duration::from_millis(60);
const DENOISING: Duration = Duration::from_millis(25);
const VIDEOS: usize = 4;

/// A reward whose scores take time, as those of a service do.
struct Slow {
    inner: Sines,
    is_elsewhere: bool,
    compares: bool,
    is_busy: Arc<AtomicBool>,
}

impl RewardScorer for Slow {
    fn name(&self) -> &str {
        "slow"
    }
    fn differentiable(&self) -> bool {
        false
    }
    fn prepare(&mut self, reference: &Video) -> Result<Target> {
        self.inner.prepare(reference)
    }
    fn score(&mut self, video: &Video, prompt: &str, target: &Target, grad: Grad) -> Result<(Score, Option<Pullback>)> {
        if prompt == "fails" {
            return Err(Error::Unsupported("the service is gone".into()));
        }
        self.is_busy.store(true, Ordering::SeqCst);
        sleep(SCORING);
        self.is_busy.store(false, Ordering::SeqCst);
        self.inner.score(video, prompt, target, grad)
    }
    fn is_elsewhere(&self) -> bool {
        self.is_elsewhere
    }
    fn compares(&self) -> bool {
        self.compares
    }
    fn score_group(
        &mut self,
        videos: &[Video],
        prompt: &str,
        target: &Target,
        progress: &dyn Progress,
    ) -> Result<Vec<Score>> {
        assert!(self.compares && videos.len() == VIDEOS && !progress.interrupted());
        videos.iter().map(|video| Ok(self.score(video, prompt, target, Grad::Skip)?.0)).collect()
    }
}

/// Makes denoising steps take time, and counts those that begin while a video is scored.
struct SlowSteps {
    is_busy: Arc<AtomicBool>,
    overlapping: AtomicUsize,
}

impl Progress for SlowSteps {
    fn phase(&self, phase: &str) {
        if phase.contains("denoising") {
            self.overlapping.fetch_add(usize::from(self.is_busy.load(Ordering::SeqCst)), Ordering::SeqCst);
            sleep(DENOISING);
        }
    }
}

/// A step on samples with these prompts.
struct Step {
    report: Result<StepReport>,
    adapter: Vec<f32>,
    /// Number of denoising steps that began while a video was scored.
    overlapping: usize,
}

impl Step {
    fn new<A: Algorithm>(algorithm: A, prompts: &[&'static str], is_elsewhere: bool) -> Self {
        Self::with(algorithm, prompts, is_elsewhere, false)
    }

    fn with<A: Algorithm>(algorithm: A, prompts: &[&'static str], is_elsewhere: bool, compares: bool) -> Self {
        let is_busy = Arc::new(AtomicBool::new(false));
        let mut bench = Bench::new(algorithm, Sines { differentiable: false, ..Sines::new() });
        let mut reward = Slow { inner: Sines::new(), is_elsewhere, compares, is_busy: is_busy.clone() };
        let progress = SlowSteps { is_busy, overlapping: AtomicUsize::new(0) };
        let samples: Vec<Sample> = (0..).zip(prompts).map(|(i, prompt)| sample(i, prompt)).collect();
        let report = bench.algorithm.step(&mut StepContext {
            step: 0,
            samples: &samples,
            model: &mut bench.model,
            reward: Some(&mut reward),
            strategy: &mut bench.strategy,
            learning_rate: 0.1,
            noise: &Noise::new(11),
            progress: &progress,
            want_videos: true,
        });
        Self { report, adapter: bench.model.adapter, overlapping: progress.overlapping.into_inner() }
    }

    /// The metrics without times.
    fn numbers(&self) -> BTreeMap<String, f64> {
        let mut metrics = self.report.as_ref().unwrap().metrics.clone();
        metrics.retain(|name, _| !name.starts_with("time/"));
        metrics
    }

    fn seconds_of_scoring(&self) -> f64 {
        self.report.as_ref().unwrap().metrics["time/score"]
    }
}

fn flow_grpo() -> FlowGrpo {
    FlowGrpo::new(FlowGrpoConfig { group_size: VIDEOS, num_inference_steps: 5, ..FlowGrpoConfig::default() })
}

fn diffusion_nft(at_once: usize) -> DiffusionNft {
    let config = DiffusionNftConfig { group_size: VIDEOS, num_inference_steps: 5, at_once, ..Default::default() };
    DiffusionNft::new(config)
}

/// Asserts that a reward here and one elsewhere make the same step, and that denoising overlaps with the latter's scores;
/// returns the seconds of waiting for each.
fn same_step<A: Algorithm>(algorithm: impl Fn() -> A) -> [f64; 2] {
    let prompts = ["a", "missing", "b"];
    let [here, elsewhere] = [false, true].map(|is_elsewhere| Step::new(algorithm(), &prompts, is_elsewhere));
    assert_eq!(here.numbers(), elsewhere.numbers());
    assert_eq!(here.adapter, elsewhere.adapter);
    assert_eq!(here.report.as_ref().unwrap().videos.len(), elsewhere.report.as_ref().unwrap().videos.len());
    assert!(here.overlapping == 0 && elsewhere.overlapping >= prompts.len(), "{}", elsewhere.overlapping);
    assert!(here.seconds_of_scoring() >= (prompts.len() * VIDEOS) as f64 * SCORING.as_secs_f64());
    [here, elsewhere].map(|step| step.seconds_of_scoring())
}

#[test]
fn the_next_video_is_generated_while_a_reward_elsewhere_scores() {
    // Only the last of the four videos of each prompt is waited for.
    for [here, elsewhere] in [same_step(flow_grpo), same_step(|| diffusion_nft(1))] {
        assert!(elsewhere < 0.7 * here, "{elsewhere} s, and {here} s one after the other");
    }
    same_step(|| diffusion_nft(2));
}

#[test]
fn the_videos_of_a_prompt_are_compared_when_all_are_there() {
    let prompts = ["a", "missing", "b"];
    let [alone, compared] = [false, true].map(|compares| Step::with(diffusion_nft(2), &prompts, false, compares));
    assert_eq!((alone.numbers(), alone.adapter), (compared.numbers(), compared.adapter.clone()));
    assert_eq!(compared.report.as_ref().unwrap().videos.len(), prompts.len());
    assert!(compared.seconds_of_scoring() >= (prompts.len() * VIDEOS) as f64 * SCORING.as_secs_f64());
    let problem = Step::with(flow_grpo(), &["a", "fails"], false, true).report.unwrap_err().chain();
    assert!(problem.contains("the service is gone") && problem.contains("training on"), "{problem}");
}

#[test]
fn a_failure_elsewhere_and_a_score_that_is_not_finite_count_as_here() {
    for is_elsewhere in [false, true] {
        let problem = Step::new(flow_grpo(), &["a", "fails"], is_elsewhere).report.unwrap_err().chain();
        assert!(problem.contains("the service is gone") && problem.contains("training on"), "{problem}");
        let step = Step::new(flow_grpo(), &["a", "nan"], is_elsewhere);
        let report = step.report.as_ref().unwrap();
        assert_eq!(report.skipped.len(), 1);
        assert!(report.skipped[0].1.contains("the score is NaN") && report.applied, "{:?}", report.skipped);
    }
}
