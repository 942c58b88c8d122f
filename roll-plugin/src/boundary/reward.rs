//! [`RewardScorer`] across the boundary.

use serde::{Deserialize, Serialize};

use super::message::{Incoming, Outgoing};
use super::object::{Answered, Gift, Loan, Remote};
use super::pullback;
use super::remote::{Argument, Fact, Number, remote};
use crate::{Error, Grad, Measure, OnMissing, Progress, Pullback, Result, RewardScorer, Score, Target, Video};

remote! {
    trait RewardScorer for RemoteReward {
        fn prepare(&mut self, reference: &Video) -> Result<Target> { Ok(Target::default()) }
        fn score(&mut self, video: &Video, prompt: &str, target: &Target, grad: Grad)
            -> Result<(Score, Option<Pullback>)>, then checked(video, grad);
        fn score_group(&mut self, videos: &[Video], prompt: &str, target: &Target, progress: &dyn Progress)
            -> Result<Vec<Score>>, then one_each(videos) {
                videos.iter().map(|video| Ok(self.score(video, prompt, target, Grad::Skip)?.0)).collect()
            }
        fn target_key(&self) -> Result<Option<String>>, then key() { Ok(None) }
        fn check_prompt(&self, prompt: &str) -> Result<()> { Ok(()) }
    }
    by hand {
        fn name(&self) -> &str {
            &self.about.name
        }
        fn measures(&self) -> Measure {
            self.about.measures.clone()
        }
        fn differentiable(&self) -> bool {
            self.about.differentiable
        }
        fn reads_reference(&self) -> bool {
            self.about.reads_reference
        }
        fn compares(&self) -> bool {
            self.about.compares
        }
        fn terms(&self) -> Vec<(String, f64)> {
            self.about.terms.iter().map(|(name, weight)| (name.clone(), weight.0)).collect()
        }
        fn is_elsewhere(&self) -> bool {
            self.about.is_elsewhere
        }
        fn computes_on_device(&self) -> bool {
            self.about.computes_on_device
        }
        fn on_missing(&self) -> OnMissing {
            self.about.on_missing
        }
    }
}

/// Facts of a scorer that do not change, asked for once. A missing fact has the default of the trait.
#[derive(Serialize, Deserialize)]
struct About {
    name: String,
    #[serde(default)]
    measures: Measure,
    #[serde(default)]
    differentiable: bool,
    #[serde(default = "yes")]
    reads_reference: bool,
    #[serde(default)]
    compares: bool,
    #[serde(default)]
    terms: Vec<(String, Number)>,
    #[serde(default)]
    is_elsewhere: bool,
    #[serde(default = "yes")]
    computes_on_device: bool,
    #[serde(default)]
    on_missing: OnMissing,
}

fn yes() -> bool {
    true
}

impl Fact for About {}

impl About {
    fn of(scorer: &dyn RewardScorer) -> Self {
        Self {
            name: scorer.name().into(),
            measures: scorer.measures(),
            differentiable: scorer.differentiable(),
            reads_reference: scorer.reads_reference(),
            compares: scorer.compares(),
            terms: scorer.terms().into_iter().map(|(name, weight)| (name, Number(weight))).collect(),
            is_elsewhere: scorer.is_elsewhere(),
            computes_on_device: scorer.computes_on_device(),
            on_missing: scorer.on_missing(),
        }
    }
}

/// A scorer of the other side.
pub(super) struct RemoteReward {
    remote: Remote,
    about: About,
}

impl RemoteReward {
    pub(super) fn new(remote: Remote) -> Result<Self> {
        Ok(Self { about: remote.call_required("about", &[])?, remote })
    }

    /// Checks a score: with `grad`, the score of a differentiable scorer must have a pullback, whose gradient must have
    /// the shape of the frames. Drops the pullback without `grad`, and that of a score that is missing or not finite.
    fn checked(
        &self,
        (score, pullback): (Score, Option<Pullback>),
        video: &Video,
        grad: Grad,
    ) -> Result<(Score, Option<Pullback>)> {
        if !score.value().is_some_and(f64::is_finite) {
            return Ok((score, None));
        }
        if grad.is_on() && self.about.differentiable && pullback.is_none() {
            return Err(Error::Misuse("it calls itself differentiable but returned no pullback".into()));
        }
        let pullback = if grad.is_on() { pullback } else { None };
        Ok((score, pullback::shaped(pullback, video.frames(), &self.remote.source)))
    }

    /// Checks that there is one score per video.
    fn one_each(&self, scores: Vec<Score>, videos: &[Video]) -> Result<Vec<Score>> {
        if scores.len() != videos.len() {
            return Err(Error::Misuse(format!("{} scores of {} videos", scores.len(), videos.len())));
        }
        Ok(scores)
    }

    /// Makes the key of a plugin depend on its library; see [`super::source::Source::key`].
    fn key(&self, returned: Option<String>) -> Result<Option<String>> {
        self.remote.source.key(returned)
    }
}

/// Answers `about` and the declared methods.
fn answer_all(scorer: &mut (dyn RewardScorer + '_), method: &str, message: &Incoming) -> Answered {
    match method {
        "about" => Outgoing::of(&About::of(scorer)).map(Some),
        _ => answer(scorer, method, message),
    }
}

/// Hands over a scorer.
pub(super) fn give(mut scorer: Box<dyn RewardScorer>) -> Gift {
    Gift::exclusive(move |method, message| answer_all(scorer.as_mut(), method, message))
}

/// Lends a scorer for a call.
pub(super) fn lend<'a>(scorer: &'a mut (dyn RewardScorer + 'a)) -> Loan<'a> {
    Loan::exclusive(move |method, message| answer_all(scorer, method, message))
}

/// A scorer that is lent by `&self`. It answers `about` and the methods by `&self`, but not the methods that score,
/// which take `&mut self`.
impl<'a> Argument for Option<&'a (dyn RewardScorer + 'a)> {
    type Lent = Option<Loan<'a>>;
    type Received = Option<Remote>;
    type Opened = Option<RemoteReward>;
    type Borrowed<'k> = Option<&'k dyn RewardScorer>;
    fn lend(self) -> Option<Loan<'a>> {
        let scorer = self?;
        Some(Loan::exclusive(move |method, message| match method {
            "about" => Outgoing::of(&About::of(scorer)).map(Some),
            _ => answer_shared(scorer, method, message),
        }))
    }
    fn open(received: Option<Remote>) -> Result<Option<RemoteReward>> {
        received.map(RemoteReward::new).transpose()
    }
    fn borrow(opened: &mut Option<RemoteReward>) -> Option<&dyn RewardScorer> {
        opened.as_ref().map(|reward| reward as &dyn RewardScorer)
    }
}

#[cfg(test)]
mod tests {
    use super::super::object::tests::{across, without};
    use super::*;
    use crate::{Silent, Tensor};

    /// A sum of two terms, the second one's name before the first one's in the alphabet.
    struct Sum;

    impl RewardScorer for Sum {
        fn name(&self) -> &str {
            "sum"
        }
        fn differentiable(&self) -> bool {
            false
        }
        fn score(&mut self, _: &Video, prompt: &str, target: &Target, _: Grad) -> Result<(Score, Option<Pullback>)> {
            let column = target.columns.get("answer").and_then(|answer| answer.as_f64()).unwrap_or_default();
            Ok((Score::of(column + prompt.len() as f64), None))
        }
        fn score_group(&mut self, videos: &[Video], _: &str, _: &Target, _: &dyn Progress) -> Result<Vec<Score>> {
            Ok(videos.iter().map(|video| Score::of(video.fps())).collect())
        }
        fn compares(&self) -> bool {
            true
        }
        fn terms(&self) -> Vec<(String, f64)> {
            vec![("sharpness".into(), 0.5), ("motion".into(), -2.0)]
        }
        fn reads_reference(&self) -> bool {
            false
        }
    }

    fn videos() -> Vec<Video> {
        [8.0, 16.0].into_iter().map(|fps| Video::new(Tensor::zeros([1, 3, 2, 2]), fps).unwrap()).collect()
    }

    fn group(reward: &mut RemoteReward) -> Vec<f64> {
        let target =
            Target { columns: std::sync::Arc::new([("answer".to_string(), 40.into())].into()), ..Target::default() };
        let scores = reward.score_group(&videos(), "ab", &target, &Silent).unwrap();
        scores.iter().filter_map(Score::value).collect()
    }

    #[test]
    fn facts_keep_their_order_and_groups_are_compared() {
        let mut theirs = RemoteReward::new(across(give(Box::new(Sum)))).unwrap();
        assert_eq!(theirs.terms(), Sum.terms());
        assert!(!theirs.reads_reference() && theirs.compares() && theirs.name() == "sum");
        assert_eq!(group(&mut theirs), [8.0, 16.0]);
    }

    #[test]
    fn a_reward_without_a_method_has_the_default_of_the_trait() {
        let mut theirs = RemoteReward::new(without("score_group", give(Box::new(Sum)))).unwrap();
        assert_eq!(group(&mut theirs), [42.0, 42.0]);
        let mut theirs = RemoteReward::new(without("prepare", give(Box::new(Sum)))).unwrap();
        assert!(theirs.prepare(&videos()[0]).unwrap().tensors.is_empty());
        let mut theirs = RemoteReward::new(without("score", give(Box::new(Sum)))).unwrap();
        let error = theirs.score(&videos()[0], "", &Target::default(), Grad::Skip).unwrap_err();
        assert_eq!(error.to_string(), "it has no method `score`");
    }
}
