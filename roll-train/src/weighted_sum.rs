//! The weighted sum of several rewards as one reward.

use std::collections::BTreeMap;
use std::time::Instant;

use roll_core::{
    Error, Grad, Kind, Measure, OnMissing, Progress, Pullback, Result, ResultExt, RewardScorer, Score, Target, Tensor,
    Video, threads,
};
use roll_external::Fingerprint;

/// A weight, and the scorer that it multiplies.
pub type WeightedScorer = (f64, Box<dyn RewardScorer>);

/// Labels for `names`: the second and later occurrences of a name are numbered, from 2.
pub fn numbered<'a>(names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    let label = |name| {
        let occurrence = seen.entry(name).or_default();
        *occurrence += 1;
        if *occurrence == 1 { name.to_string() } else { format!("{name}_{occurrence}") }
    };
    names.map(label).collect()
}

/// The reward `sum of weight * score` over several scorers.
///
/// A part of weight 0 is scored for the log only: it is never differentiated, and its missing scores have no effect.
///
/// A score is missing if the part has nothing to score, in the video or in the reference, or if it is not finite. The
/// part's own `on_missing` then decides:
/// - `skip` makes the whole sum missing, because a sum without one of its terms would be on another scale.
/// - `error` is an error.
/// - A number enters the sum without gradient.
pub struct WeightedSum {
    /// The labels of the parts, such as `brightness + brightness_2`.
    name: String,
    parts: Vec<Part>,
}

/// A scorer of the sum, with its weight.
struct Part {
    /// The scorer's name, numbered if it occurs more than once.
    label: String,
    weight: f64,
    scorer: Box<dyn RewardScorer>,
}

impl Part {
    /// Whether the part is a term of the sum. A part of weight 0 is scored for the log only.
    fn is_summed(&self) -> bool {
        self.weight != 0.0
    }

    /// The value of a part that has nothing to score: its substitute value, or `None` if its weight is 0. Fails if
    /// there can be no sum without the part: with [`Error::NothingToScore`] for `skip`, with another error for `error`.
    fn without_score(&self, reason: &str) -> Result<Option<f64>> {
        match self.scorer.on_missing() {
            _ if !self.is_summed() => Ok(None),
            OnMissing::Value(value) => Ok(Some(value)),
            OnMissing::Skip => Err(Error::nothing_to_score(format!("{}: {reason}", self.label))),
            OnMissing::Error => {
                let problem =
                    format!("`{}` has nothing to score ({reason}), and its `on_missing` is `error`", self.label);
                Err(Error::config(Kind::Reward.section(), problem))
            }
        }
    }
}

/// The name of the tensor, in the target of the sum, that replaces the tensors of part `i` if its scorer has nothing to
/// score in the reference. The tensor holds the reason as UTF-8. Tensors of the parts begin with a number (see
/// [`target_of_part`]), so they never have this name.
fn missing_reason_name(i: usize) -> String {
    format!("nothing/{i}")
}

impl WeightedSum {
    /// Creates the sum of `parts`. Fails if a weight is not finite or if all are 0.
    pub fn new(parts: Vec<WeightedScorer>) -> Result<Self> {
        if let Some((weight, scorer)) = parts.iter().find(|(weight, _)| !weight.is_finite()) {
            return Err(Error::NonFinite { what: format!("the weight of `{}`", scorer.name()), value: *weight });
        }
        if parts.iter().all(|(weight, _)| *weight == 0.0) {
            return Err(Error::config(Kind::Reward.section(), "expected at least one with a weight other than 0"));
        }
        let labels = numbered(parts.iter().map(|(_, scorer)| scorer.name()));
        let name = labels.join(" + ");
        let part = |(label, (weight, scorer))| Part { label, weight, scorer };
        Ok(Self { name, parts: labels.into_iter().zip(parts).map(part).collect() })
    }
}

/// The target of part `i`, from the target of the sum, in which the names of its tensors begin with `i/`.
fn target_of_part(i: usize, target: &Target) -> Target {
    let prefix = format!("{i}/");
    let own_tensor =
        |(name, tensor): (&String, &Tensor)| Some((name.strip_prefix(&prefix)?.to_string(), tensor.clone()));
    Target { tensors: target.tensors.iter().filter_map(own_tensor).collect(), columns: target.columns.clone() }
}

/// The outcome of scoring a video with one part.
enum PartScore {
    /// The part's scorer was not called, because it has nothing to score in the reference, for this reason.
    NotCalled(String),
    /// The part's scorer was called, and took `seconds`.
    Called { outcome: Result<(Score, Option<Pullback>)>, seconds: f64 },
}

impl Part {
    /// `grad` for a part that is differentiated, [`Grad::Skip`] for a part of weight 0.
    fn grad(&self, grad: Grad) -> Grad {
        if self.is_summed() { grad } else { Grad::Skip }
    }

    /// Scores a video with this part, which is part `i` of the sum. `target` is the target of the sum.
    fn score(&mut self, i: usize, video: &Video, prompt: &str, target: &Target, grad: Grad) -> PartScore {
        if let Some(reason) = target.tensors.get(&missing_reason_name(i)) {
            return PartScore::NotCalled(String::from_utf8_lossy(reason.as_bytes()).into_owned());
        }
        let own_target = target_of_part(i, target);
        let own_grad = self.grad(grad);
        let start = Instant::now();
        let outcome = self.scorer.score(video, prompt, &own_target, own_grad);
        PartScore::Called { outcome, seconds: start.elapsed().as_secs_f64() }
    }
}

/// A part on its way to a thread that scores a video with it.
struct PartTask<'a> {
    /// The position of the part in the sum.
    i: usize,
    part: &'a mut Part,
    /// `None` until the part is scored.
    score: Option<PartScore>,
}

impl WeightedSum {
    /// Scores the video with every part, in the order of the parts. Parts that compute elsewhere run concurrently with
    /// each other and with the remaining parts, which run one after the other on this thread.
    fn score_parts(&mut self, video: &Video, prompt: &str, target: &Target, grad: Grad) -> Vec<PartScore> {
        let tasks = self.parts.iter_mut().enumerate().map(|(i, part)| PartTask { i, part, score: None });
        let (mut elsewhere, mut here): (Vec<_>, Vec<_>) = tasks.partition(|task| task.part.scorer.is_elsewhere());
        let score = |task: &mut PartTask<'_>| {
            task.score = Some(task.part.score(task.i, video, prompt, target, grad));
        };
        let threads = elsewhere.len();
        threads::in_parallel_with(&mut elsewhere, threads, score, || here.iter_mut().for_each(score));
        let mut all = elsewhere;
        all.extend(here);
        all.sort_by_key(|task| task.i);
        all.into_iter().filter_map(|task| task.score).collect()
    }

    /// The sum of the parts' scores of a video whose frames have the shape `shape`, and its pullback.
    ///
    /// Details: `<part>` is the score before weighting, `<part>/<detail>` the part's own details, `time/<part>` its
    /// seconds.
    fn sum(&self, part_scores: Vec<PartScore>, shape: Vec<usize>, grad: Grad) -> Result<(Score, Option<Pullback>)> {
        let (mut sum, mut details, mut pullbacks) = (0.0, BTreeMap::new(), Vec::new());
        for (part, part_score) in self.parts.iter().zip(part_scores) {
            let (score, pullback) = match part_score {
                PartScore::NotCalled(reason) => (Score::Missing { reason }, None),
                PartScore::Called { outcome, seconds } => {
                    details.insert(format!("time/{}", part.label), seconds);
                    outcome.while_doing(|| format!("scoring with the reward `{}`", part.label))?
                }
            };
            let value = match score.finite_or_missing(&part.label) {
                Score::Value { value, details: part_details } => {
                    details.extend(part_details.into_iter().map(|(k, v)| (format!("{}/{k}", part.label), v)));
                    if part.grad(grad).is_on() {
                        let no_pullback =
                            || Error::Misuse(format!("the reward `{}` returned no pullback for its score", part.label));
                        pullbacks.push((part.weight, pullback.ok_or_else(no_pullback)?));
                    }
                    value
                }
                Score::Missing { reason } => match part.without_score(&reason) {
                    Ok(Some(value)) => value,
                    Ok(None) => continue,
                    Err(Error::NothingToScore { reason }) => return Ok((Score::Missing { reason }, None)),
                    Err(error) => return Err(error),
                },
            };
            details.insert(part.label.clone(), value);
            if part.is_summed() {
                sum += part.weight * value;
            }
        }
        let pull_back = move |cotangent: &Tensor| weighted_gradient(pullbacks, shape, cotangent);
        let pullback = grad.is_on().then(|| Pullback::new(pull_back));
        Ok((Score::Value { value: sum, details }, pullback))
    }
}

impl RewardScorer for WeightedSum {
    fn name(&self) -> &str {
        &self.name
    }

    /// The measure of the parts, if all parts with a weight have the same one.
    fn measures(&self) -> Measure {
        let mut measures = self.parts.iter().filter(|part| part.is_summed()).map(|part| part.scorer.measures());
        let first = measures.next().unwrap_or_default();
        match measures.all(|other| other.label == first.label) {
            true => first,
            false => Measure::default(),
        }
    }

    fn terms(&self) -> Vec<(String, f64)> {
        self.parts.iter().filter(|part| part.is_summed()).map(|part| (part.label.clone(), part.weight)).collect()
    }

    fn differentiable(&self) -> bool {
        self.parts.iter().all(|part| !part.is_summed() || part.scorer.differentiable())
    }

    fn reads_reference(&self) -> bool {
        self.parts.iter().any(|part| part.scorer.reads_reference())
    }

    fn check_prompt(&self, prompt: &str) -> Result<()> {
        self.parts.iter().try_for_each(|part| part.scorer.check_prompt(prompt))
    }

    fn unscorable(&self) -> Option<String> {
        self.parts.iter().find_map(|part| part.scorer.unscorable())
    }

    fn prepare(&mut self, reference: &Video) -> Result<Target> {
        let mut tensors = BTreeMap::new();
        for (i, part) in self.parts.iter_mut().enumerate() {
            match part.scorer.prepare(reference) {
                Ok(part_target) => {
                    let named_tensors =
                        part_target.tensors.into_iter().map(|(name, tensor)| (format!("{i}/{name}"), tensor));
                    tensors.extend(named_tensors);
                }
                Err(error) => {
                    let Some(reason) = error.missing_reason() else {
                        return Err(error).while_doing(|| format!("preparing the reward `{}`", part.label));
                    };
                    // Fails if there can be no sum without this part. Otherwise the tensor makes `Part::score` leave
                    // the scorer uncalled.
                    part.without_score(reason)?;
                    tensors.insert(missing_reason_name(i), Tensor::new(reason.as_bytes().to_vec(), [reason.len()])?);
                }
            }
        }
        Ok(Target::of(tensors))
    }

    fn is_elsewhere(&self) -> bool {
        self.parts.iter().all(|part| part.scorer.is_elsewhere())
    }

    fn compares(&self) -> bool {
        self.parts.iter().any(|part| part.scorer.compares())
    }

    /// First scores each video with every part. Then each part that compares scores the group; the result replaces its
    /// scores of single videos, which are missing. These parts come last because they may wait, such as for a person.
    fn score_group(
        &mut self,
        videos: &[Video],
        prompt: &str,
        target: &Target,
        progress: &dyn Progress,
    ) -> Result<Vec<Score>> {
        // The scores of the parts, for each video.
        let mut part_scores: Vec<Vec<PartScore>> =
            videos.iter().map(|video| self.score_parts(video, prompt, target, Grad::Skip)).collect();
        for (i, part) in self.parts.iter_mut().enumerate().filter(|(_, part)| part.scorer.compares()) {
            let start = Instant::now();
            let group_scores = part.scorer.score_group(videos, prompt, &target_of_part(i, target), progress);
            let group_scores = group_scores.while_doing(|| format!("scoring with the reward `{}`", part.label))?;
            let seconds = start.elapsed().as_secs_f64() / videos.len() as f64;
            for (scores_of_video, score) in part_scores.iter_mut().zip(group_scores) {
                scores_of_video[i] = PartScore::Called { outcome: Ok((score, None)), seconds };
            }
        }
        let mut sums = Vec::with_capacity(videos.len());
        for (scores_of_video, video) in part_scores.into_iter().zip(videos) {
            let (score, _) = self.sum(scores_of_video, video.frames().shape().to_vec(), Grad::Skip)?;
            sums.push(score);
        }
        Ok(sums)
    }

    fn target_key(&self) -> Result<Option<String>> {
        let mut key = Fingerprint::new("sum");
        for part in &self.parts {
            match part.scorer.target_key()? {
                Some(part_key) => key = key.text("part", part_key),
                None => return Ok(None),
            }
        }
        Ok(Some(key.finish()))
    }

    fn score(&mut self, video: &Video, prompt: &str, target: &Target, grad: Grad) -> Result<(Score, Option<Pullback>)> {
        if grad.is_on() {
            let undifferentiable = self.parts.iter().find(|part| part.is_summed() && !part.scorer.differentiable());
            if let Some(Part { label, weight, .. }) = undifferentiable {
                let problem = format!(
                    "`{label}` (weight {weight}) has no gradient; give it weight 0 to only log it, or leave it out"
                );
                return Err(Error::config(Kind::Reward.section(), problem));
            }
        }
        let part_scores = self.score_parts(video, prompt, target, grad);
        self.sum(part_scores, video.frames().shape().to_vec(), grad)
    }
}

/// The gradient of the sum of weighted scores with respect to the frames, which have the shape `shape`, multiplied by
/// `cotangent`. `pullbacks` has the weight and the pullback of each part that is differentiated.
fn weighted_gradient(pullbacks: Vec<(f64, Pullback)>, shape: Vec<usize>, cotangent: &Tensor) -> Result<Tensor> {
    let cotangent = f64::from(cotangent.item()?);
    let mut sum: Option<Vec<f32>> = None;
    for (weight, pullback) in pullbacks {
        let gradient = pullback.pull(&Tensor::scalar((cotangent * weight) as f32))?;
        if gradient.shape() != shape {
            return Err(Error::shape(
                "cotangent of the frames, of a part of the reward",
                format!("{shape:?}"),
                gradient.shape(),
            ));
        }
        match &mut sum {
            None => sum = Some(gradient.to_f32_vec()),
            Some(sum) => sum.iter_mut().zip(gradient.f32s()?).for_each(|(sum, value)| *sum += value),
        }
    }
    match sum {
        Some(sum) => Tensor::new(sum, shape),
        None => Ok(Tensor::zeros(shape)),
    }
}

#[cfg(test)]
mod tests {
    use roll_rewards::Brightness;
    use roll_rewards::brightness::BrightnessConfig;

    use super::*;

    /// Returns a missing score, or 3 without gradient.
    struct Fake {
        name: &'static str,
        on_missing: OnMissing,
        missing: bool,
        /// Whether the reference has nothing to compare with either.
        faceless: bool,
    }

    impl RewardScorer for Fake {
        fn name(&self) -> &str {
            self.name
        }
        fn differentiable(&self) -> bool {
            self.missing
        }
        fn prepare(&mut self, _: &Video) -> Result<Target> {
            if self.faceless {
                return Err(Error::nothing_to_score("nobody there")).while_doing(|| "looking".into());
            }
            Ok(Target::of([("own".to_string(), Tensor::scalar(1.0))].into()))
        }
        fn score(&mut self, _: &Video, _: &str, target: &Target, _: Grad) -> Result<(Score, Option<Pullback>)> {
            assert_eq!(target.tensors.keys().collect::<Vec<_>>(), ["own"]);
            match self.missing {
                true => Ok((Score::Missing { reason: "nothing there".into() }, None)),
                false => Ok((Score::of(3.0), None)),
            }
        }
        fn on_missing(&self) -> OnMissing {
            self.on_missing
        }
    }

    /// Scores the videos of a prompt 0, 1, 2, ...
    struct Ordinal;

    impl RewardScorer for Ordinal {
        fn name(&self) -> &str {
            "ordinal"
        }
        fn differentiable(&self) -> bool {
            false
        }
        fn compares(&self) -> bool {
            true
        }
        fn score(&mut self, _: &Video, _: &str, _: &Target, _: Grad) -> Result<(Score, Option<Pullback>)> {
            Ok((Score::Missing { reason: "nothing to compare with".into() }, None))
        }
        fn score_group(&mut self, videos: &[Video], _: &str, _: &Target, _: &dyn Progress) -> Result<Vec<Score>> {
            Ok((0..videos.len()).map(|i| Score::of(i as f64)).collect())
        }
    }

    #[test]
    fn a_part_that_compares_scores_the_group_and_the_others_score_each_video() {
        let mut sum = WeightedSum::new(vec![(2.0, Box::new(Ordinal)), (1.0, brightness(0.5))]).unwrap();
        assert!(sum.compares() && !sum.differentiable());
        let grey = Video::new(Tensor::full([2, 3, 4, 5], 0.25), 8.0).unwrap();
        let (videos, target) = ([video(), grey], sum.prepare(&video()).unwrap());
        let scores = sum.score_group(&videos, "", &target, &roll_core::Silent).unwrap();
        assert_eq!(scores.len(), 2);
        for (i, (video, score)) in videos.iter().zip(&scores).enumerate() {
            let alone = brightness(0.5).score(video, "", &Target::default(), Grad::Skip).unwrap().0.value().unwrap();
            let Score::Value { value, details } = score else { panic!("{score:?}") };
            assert_eq!((*value, details["ordinal"], details["brightness"]), (2.0 * i as f64 + alone, i as f64, alone));
            assert!(details.contains_key("time/ordinal"));
        }
        assert!(sum.score(&video(), "", &target, Grad::Skip).unwrap().0.value().is_none());
    }

    fn video() -> Video {
        let values = (0..2 * 3 * 4 * 5).map(|i| ((i * 37 % 41) as f32) / 41.0 - 0.4).collect();
        Video::new(Tensor::new(values, [2, 3, 4, 5]).unwrap(), 8.0).unwrap()
    }

    fn brightness(target: f64) -> Box<dyn RewardScorer> {
        Box::new(Brightness::new(BrightnessConfig { target }).unwrap())
    }

    fn missing(on_missing: OnMissing) -> Box<dyn RewardScorer> {
        Box::new(Fake { name: "fake", on_missing, missing: true, faceless: false })
    }

    fn faceless(on_missing: OnMissing) -> Box<dyn RewardScorer> {
        Box::new(Fake { name: "fake", on_missing, missing: true, faceless: true })
    }

    fn score(sum: &mut WeightedSum, grad: Grad) -> Result<(Score, Option<Pullback>)> {
        let target = sum.prepare(&video())?;
        sum.score(&video(), "", &target, grad)
    }

    fn value_of(score: &Score) -> f64 {
        match score {
            Score::Value { value, .. } => *value,
            Score::Missing { reason } => panic!("missing: {reason}"),
        }
    }

    #[test]
    fn values_and_gradients_are_weighted_sums() {
        let alone = |target: f64| {
            let (score, pullback) = brightness(target).score(&video(), "", &Target::default(), Grad::Record).unwrap();
            (value_of(&score), pullback.unwrap().pull(&Tensor::scalar(2.0)).unwrap().to_f32_vec())
        };
        let ((a, da), (b, db)) = (alone(0.9), alone(0.1));
        let mut sum = WeightedSum::new(vec![(0.7, brightness(0.9)), (-1.5, brightness(0.1))]).unwrap();
        assert_eq!(sum.name(), "brightness + brightness_2");
        assert!(sum.differentiable());
        let (score, pullback) = score(&mut sum, Grad::Record).unwrap();
        assert!((value_of(&score) - (0.7 * a - 1.5 * b)).abs() < 1e-9);
        let Score::Value { details, .. } = score else { unreachable!() };
        assert_eq!(details["brightness_2"], b);
        assert!(details["time/brightness"] >= 0.0 && details.contains_key("time/brightness_2"));
        assert!(details.contains_key("brightness/luma"));
        let pulled = pullback.unwrap().pull(&Tensor::scalar(2.0)).unwrap();
        for ((p, a), b) in pulled.f32s().unwrap().iter().zip(da).zip(db) {
            assert!((p - (0.7 * a - 1.5 * b)).abs() < 1e-7);
        }
    }

    #[test]
    fn a_missing_score_follows_on_missing() {
        let sum = |policy| WeightedSum::new(vec![(1.0, brightness(0.5)), (2.0, missing(policy))]).unwrap();
        let (skipped, pullback) = score(&mut sum(OnMissing::Skip), Grad::Record).unwrap();
        assert_eq!(skipped, Score::Missing { reason: "fake: nothing there".into() });
        assert!(pullback.is_none());
        let error = score(&mut sum(OnMissing::Error), Grad::Skip).unwrap_err();
        assert!(error.to_string().contains("`fake` has nothing to score (nothing there)"), "{error}");
        let (valued, pullback) = score(&mut sum(OnMissing::Value(-0.25)), Grad::Record).unwrap();
        let alone = value_of(&brightness(0.5).score(&video(), "", &Target::default(), Grad::Skip).unwrap().0);
        assert!((value_of(&valued) - (alone - 0.5)).abs() < 1e-12);
        assert!(pullback.unwrap().pull(&Tensor::scalar(1.0)).unwrap().f32s().unwrap().iter().any(|g| *g != 0.0));
    }

    #[test]
    fn a_nonfinite_score_of_a_part_follows_its_on_missing() {
        for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let sum = |weight, policy| {
                WeightedSum::new(vec![(1.0, brightness(0.5)), (weight, Box::new(Constant(value, policy)))]).unwrap()
            };
            let (skipped, _) = score(&mut sum(2.0, OnMissing::Skip), Grad::Skip).unwrap();
            assert_eq!(skipped, Score::Missing { reason: format!("constant: the score is {value}") });
            assert!(score(&mut sum(2.0, OnMissing::Error), Grad::Skip).is_err());
            let alone = value_of(&brightness(0.5).score(&video(), "", &Target::default(), Grad::Skip).unwrap().0);
            let (valued, _) = score(&mut sum(2.0, OnMissing::Value(-0.25)), Grad::Skip).unwrap();
            assert!((value_of(&valued) - (alone - 0.5)).abs() < 1e-12);
            let (logged, _) = score(&mut sum(0.0, OnMissing::Error), Grad::Record).unwrap();
            assert_eq!(value_of(&logged), alone, "a part of weight 0 has no effect");
        }
    }

    /// Scores every video as this value.
    struct Constant(f64, OnMissing);

    impl RewardScorer for Constant {
        fn name(&self) -> &str {
            "constant"
        }
        fn differentiable(&self) -> bool {
            false
        }
        fn score(&mut self, _: &Video, _: &str, _: &Target, _: Grad) -> Result<(Score, Option<Pullback>)> {
            Ok((Score::of(self.0), None))
        }
        fn on_missing(&self) -> OnMissing {
            self.1
        }
    }

    #[test]
    fn an_empty_reference_follows_on_missing() {
        let sum = |weight, policy| WeightedSum::new(vec![(1.0, brightness(0.5)), (weight, faceless(policy))]).unwrap();
        let prepared = |weight, policy| sum(weight, policy).prepare(&video());
        let skipped = prepared(2.0, OnMissing::Skip).unwrap_err();
        assert_eq!(skipped.missing_reason(), Some("fake: nobody there"));
        let error = prepared(2.0, OnMissing::Error).unwrap_err();
        assert!(error.missing_reason().is_none() && error.to_string().contains("nobody there"), "{error}");

        let alone = value_of(&brightness(0.5).score(&video(), "", &Target::default(), Grad::Skip).unwrap().0);
        let (valued, pullback) = score(&mut sum(2.0, OnMissing::Value(-0.25)), Grad::Record).unwrap();
        assert!((value_of(&valued) - (alone - 0.5)).abs() < 1e-12);
        assert!(pullback.unwrap().pull(&Tensor::scalar(1.0)).unwrap().f32s().unwrap().iter().any(|g| *g != 0.0));
        // Without a weight, the part has no effect under any policy, and no score in the log.
        for policy in [OnMissing::Skip, OnMissing::Error, OnMissing::Value(9.0)] {
            let (logged, _) = score(&mut sum(0.0, policy), Grad::Record).unwrap();
            assert_eq!(value_of(&logged), alone);
            let Score::Value { details, .. } = logged else { unreachable!() };
            assert!(!details.contains_key("fake"));
        }
    }

    #[test]
    fn the_gradient_is_zero_if_all_parts_are_missing() {
        let mut sum = WeightedSum::new(vec![(2.0, missing(OnMissing::Value(0.5)))]).unwrap();
        let (score, pullback) = score(&mut sum, Grad::Record).unwrap();
        assert_eq!(value_of(&score), 1.0);
        let pulled = pullback.unwrap().pull(&Tensor::scalar(1.0)).unwrap();
        assert_eq!((pulled.shape(), pulled.f32s().unwrap().iter().all(|g| *g == 0.0)), (&[2, 3, 4, 5][..], true));
    }

    /// Returns its score only after the other scorer is called, on another thread.
    struct Meeting(std::sync::Arc<std::sync::Barrier>);

    impl RewardScorer for Meeting {
        fn name(&self) -> &str {
            "meeting"
        }
        fn differentiable(&self) -> bool {
            false
        }
        fn is_elsewhere(&self) -> bool {
            true
        }
        fn score(&mut self, _: &Video, _: &str, _: &Target, _: Grad) -> Result<(Score, Option<Pullback>)> {
            self.0.wait();
            Ok((Score::of(1.0), None))
        }
    }

    #[test]
    fn remote_parts_are_scored_concurrently() {
        let barrier = std::sync::Arc::new(std::sync::Barrier::new(2));
        let meeting = || -> Box<dyn RewardScorer> { Box::new(Meeting(barrier.clone())) };
        let mut sum = WeightedSum::new(vec![(1.0, meeting()), (0.0, brightness(0.5)), (2.0, meeting())]).unwrap();
        assert_eq!(value_of(&score(&mut sum, Grad::Skip).unwrap().0), 3.0);
    }

    #[test]
    fn rejects_parts_without_gradient_unless_their_weight_is_0() {
        let rigid = || Box::new(Fake { name: "rigid", on_missing: OnMissing::Skip, missing: false, faceless: false });
        let mut sum = WeightedSum::new(vec![(1.0, brightness(0.5)), (0.5, rigid())]).unwrap();
        assert!(!sum.differentiable());
        let error = score(&mut sum, Grad::Record).unwrap_err().to_string();
        assert!(error.contains("`rigid`") && error.contains("0.5"), "{error}");
        assert!(score(&mut sum, Grad::Skip).is_ok());

        let mut logged = WeightedSum::new(vec![(1.0, brightness(0.5)), (0.0, rigid())]).unwrap();
        assert!(logged.differentiable());
        let (Score::Value { details, .. }, Some(_)) = score(&mut logged, Grad::Record).unwrap() else { panic!() };
        assert_eq!(details["rigid"], 3.0);
        let mut absent = WeightedSum::new(vec![(1.0, brightness(0.5)), (0.0, missing(OnMissing::Error))]).unwrap();
        assert!(matches!(score(&mut absent, Grad::Skip).unwrap().0, Score::Value { .. }));
    }

    #[test]
    fn rejects_empty_sums_and_invalid_weights() {
        assert!(WeightedSum::new(vec![]).is_err());
        assert!(WeightedSum::new(vec![(0.0, brightness(0.5))]).is_err());
        assert!(WeightedSum::new(vec![(f64::NAN, brightness(0.5))]).is_err());
    }
}
