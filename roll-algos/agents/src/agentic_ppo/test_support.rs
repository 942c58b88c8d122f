//! What several tests of the algorithm start from: a short configuration, a world, a step and an episode.

#![allow(clippy::unwrap_used)]
use roll_core::{
    Algorithm, Environment, Error, Model, Noise, Observation, OwnDataAlgorithm, Progress, Result, Silent, StepContext,
    StepReport, Transition,
};
use roll_testing::Descent;

use super::episode::{Ending, Episode, Step};
use super::{AgenticPpo, AgenticPpoConfig};

/// Rewards an answer that begins with `x`; or its episodes cannot begin.
pub(super) struct Likes {
    pub works: bool,
}

impl Environment for Likes {
    fn reset(&mut self, _seed: u64) -> Result<Observation> {
        match self.works {
            true => Ok(Observation::text("o")),
            false => Err(Error::Unsupported("gone".into())),
        }
    }

    fn step(&mut self, action: &str) -> Result<Transition> {
        let x = action.starts_with('x');
        let observation = Observation::text("o");
        Ok(Transition { observation, reward: f64::from(u8::from(x)), terminated: true, truncated: false, valid: x })
    }
}

/// Four groups of eight episodes of one turn with three tokens.
pub(super) fn short_config() -> AgenticPpoConfig {
    AgenticPpoConfig {
        num_env_groups: 4,
        group_size: 8,
        max_actions_per_traj: 1,
        max_tokens_per_step: 3,
        agent_system_template: String::new(),
        agent_template: "{observation}".into(),
        val_batch_size: 5,
        ..AgenticPpoConfig::default()
    }
}

/// The algorithm in the world [`Likes`].
pub(super) fn algorithm_that_likes_x(config: AgenticPpoConfig, works: bool) -> AgenticPpo {
    let mut algorithm = AgenticPpo::new(config).unwrap();
    algorithm.open_environments(&mut || Ok(Box::new(Likes { works }))).unwrap();
    algorithm
}

/// One step of a single rank.
pub(super) fn step(
    algorithm: &mut AgenticPpo,
    model: &mut dyn Model,
    step: u64,
    learning_rate: f64,
) -> Result<StepReport> {
    step_watched(algorithm, model, step, learning_rate, &Silent)
}

/// As [`step`], with its progress.
pub(super) fn step_watched(
    algorithm: &mut AgenticPpo,
    model: &mut dyn Model,
    step: u64,
    learning_rate: f64,
    progress: &dyn Progress,
) -> Result<StepReport> {
    algorithm.step(&mut StepContext {
        step,
        samples: &[],
        model,
        reward: None,
        strategy: &mut Descent::default(),
        learning_rate,
        noise: &Noise::new(1),
        progress,
        want_videos: false,
    })
}

/// An episode of one token, whose only turn has this reward.
pub(super) fn episode(group: usize, reward: f64) -> Episode {
    Episode {
        group,
        tag: String::new(),
        seed: 0,
        tokens: vec![1],
        pictures: Vec::new(),
        response: vec![true],
        log_probs: vec![0.0],
        raw_log_probs: vec![0.0],
        steps: vec![Step { reward, valid: true, tokens: 0..1, ..Step::default() }],
        solved: reward > 0.0,
        ending: Ending::Terminated,
    }
}
