//! The reward `vote`: people compare the videos of a prompt on the page of `roll watch --vote`.
//!
//! [`files`] keeps clips, questions and answers in the run directory. Ids are hashes of the contents, so that a run
//! that is killed and resumed finds the votes that it had.

pub mod files;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use roll_core::keys::check_ranges;
use roll_core::{BuildContext, Error, Grad, Progress, Pullback, Result, RewardScorer, Score, Target, Tensor, Video};
use roll_external::files::shell_quoted;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use files::{Answer, Question, Votes};

/// Name of the tensor with the reference picture in a target.
const PICTURE: &str = "picture";
/// Time between two looks at the answers.
const POLL: Duration = Duration::from_millis(100);
/// Time after which the log repeats that the run waits.
const REMINDER: Duration = Duration::from_secs(600);

/// Options of the reward `vote`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct VoteConfig {
    /// The question about the clips.
    pub question: String,
    /// Number of clips that a question shows side by side. If a prompt has more videos, there is one question per
    /// video, which shows this video and the next ones (after the last comes the first). Otherwise one question shows
    /// all videos.
    #[schemars(range(min = 2, max = 9))]
    pub clips: usize,
    /// Whether the reference picture is shown next to the clips. It is the first frame of the row's clip, or the row's
    /// picture with `algo.reference: image`.
    pub reference: bool,
}

impl Default for VoteConfig {
    fn default() -> Self {
        Self { question: "Which clip is better?".into(), clips: 2, reference: true }
    }
}

/// The reward `vote`. The score of a video is the fraction of its questions that it won. A vote for "equal" is shared
/// by the clips of the question.
pub struct Vote {
    config: VoteConfig,
    run_dir: Arc<OnceLock<PathBuf>>,
    /// The time at which it was last logged that the run waits.
    logged_at: Option<Instant>,
    /// Questions whose invalid answer was logged.
    logged_invalid: BTreeSet<String>,
}

impl Vote {
    /// Fails if a value is outside its range. Fails in a job of several ranks, because a rank that waits cannot be
    /// stopped.
    pub fn new(config: VoteConfig, context: &BuildContext) -> Result<Self> {
        check_ranges("reward", &config)?;
        let ranks = context.ranks.world_size();
        if ranks > 1 {
            let problem = format!("the reward `vote` waits for people on one rank, found {ranks}; set `ranks: 1`");
            return Err(Error::config("ranks", problem));
        }
        Ok(Self { config, run_dir: context.run_dir.clone(), logged_at: None, logged_invalid: BTreeSet::new() })
    }

    /// Waits for the answers to the questions with these `ids`. Returns for each the position of the chosen clip, or
    /// `None` for "equal".
    fn wait_for_answers(
        &mut self,
        votes: &Votes,
        ids: &[String],
        progress: &dyn Progress,
    ) -> Result<Vec<Option<usize>>> {
        loop {
            let answers = ids.iter().map(|id| votes.answer(id)).collect::<Result<Vec<_>>>()?;
            for (id, answer) in ids.iter().zip(&answers) {
                if let Answer::Invalid(problem) = answer
                    && self.logged_invalid.insert(id.clone())
                {
                    tracing::warn!("{problem}: this is no vote, and the question stays open");
                }
            }
            let open = answers.iter().filter(|answer| !answer.is_given()).count();
            if open == 0 {
                let chosen = |answer| if let Answer::Clip(position) = answer { Some(position) } else { None };
                return Ok(answers.into_iter().map(chosen).collect());
            }
            if progress.interrupted() {
                return Err(Error::Interrupted);
            }
            let waiting = format!("waiting for {open} vote{}", if open == 1 { "" } else { "s" });
            if self.logged_at.is_none_or(|time| time.elapsed() > REMINDER) {
                tracing::info!("{waiting}: answer with `roll watch --vote {}`", shell_quoted(&votes.0));
                self.logged_at = Some(Instant::now());
            }
            progress.phase(&waiting);
            std::thread::sleep(POLL);
        }
    }
}

impl RewardScorer for Vote {
    fn name(&self) -> &str {
        "vote"
    }

    fn differentiable(&self) -> bool {
        false
    }

    /// Returns false, because the clips of a row without a reference are compared without a picture.
    fn reads_reference(&self) -> bool {
        false
    }

    fn prepare(&mut self, reference: &Video) -> Result<Target> {
        if !self.config.reference {
            return Ok(Target::default());
        }
        let [_, height, width] = reference.dims();
        let picture = Tensor::new(reference.frame(0).to_vec(), [1, 3, height, width])?;
        Ok(Target::of([(PICTURE.to_string(), picture)].into()))
    }

    fn compares(&self) -> bool {
        true
    }

    fn computes_on_device(&self) -> bool {
        false
    }

    fn score(&mut self, _: &Video, _: &str, _: &Target, _: Grad) -> Result<(Score, Option<Pullback>)> {
        Ok((Score::Missing { reason: "people compare several videos of a prompt".into() }, None))
    }

    fn score_group(
        &mut self,
        videos: &[Video],
        prompt: &str,
        target: &Target,
        progress: &dyn Progress,
    ) -> Result<Vec<Score>> {
        let run = self.run_dir.get().ok_or_else(|| Error::Misuse("the reward `vote` is used outside a run".into()))?;
        let votes = Votes(run.clone());
        let clips = videos.iter().map(|video| votes.keep_clip(video)).collect::<Result<Vec<_>>>()?;
        let keep_picture =
            |(picture, video): (&Tensor, &Video)| votes.keep_clip(&Video::new(picture.clone(), video.fps())?);
        let reference = target.tensors.get(PICTURE).zip(videos.first()).map(keep_picture).transpose()?;
        let shown = comparisons(videos.len(), self.config.clips);
        let ask = |shown_videos: &Vec<usize>| {
            let clips = shown_videos.iter().map(|i| clips[*i].clone()).collect();
            let (prompt, question) = (prompt.into(), self.config.question.clone());
            votes.ask(&Question { prompt, question, clips, reference: reference.clone() })
        };
        let ids = shown.iter().map(ask).collect::<Result<Vec<_>>>()?;
        let chosen = self.wait_for_answers(&votes, &ids, progress)?;
        Ok(scores(videos.len(), &shown, &chosen))
    }
}

/// The videos that each question shows: all of them if there is room, otherwise neighbours in a ring.
fn comparisons(videos: usize, clips: usize) -> Vec<Vec<usize>> {
    match videos {
        0 | 1 => Vec::new(),
        _ if videos <= clips => vec![(0..videos).collect()],
        _ => (0..videos).map(|i| (i..i + clips).map(|j| j % videos).collect()).collect(),
    }
}

/// The scores of `videos` videos. `shown` are the videos of each question, `chosen` the position of the chosen video
/// among these, or `None` for "equal".
fn scores(videos: usize, shown: &[Vec<usize>], chosen: &[Option<usize>]) -> Vec<Score> {
    let (mut won, mut asked) = (vec![0.0; videos], vec![0.0; videos]);
    for (shown_videos, choice) in shown.iter().zip(chosen) {
        for (position, video) in shown_videos.iter().enumerate() {
            asked[*video] += 1.0;
            won[*video] += match choice {
                Some(chosen_position) => f64::from(u8::from(*chosen_position == position)),
                None => 1.0 / shown_videos.len() as f64,
            };
        }
    }
    let score = |(won, asked): (f64, f64)| match asked {
        0.0 => Score::Missing { reason: "there is no other video to compare with".into() },
        _ => Score::Value { value: won / asked, details: BTreeMap::from([("votes".into(), asked)]) },
    };
    won.into_iter().zip(asked).map(score).collect()
}

roll_core::register! {
    Reward, "vote", VoteConfig,
    "Votes of people, who compare the videos of a prompt on the page of `roll watch --vote`",
    |config, context| Vote::new(config, context),
}
