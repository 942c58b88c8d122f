//! The four questions that the report answers: is it learning, is it hacking the reward, is it stable, where does the
//! time go? Each has an answer in words for every run, and panels of curves.
//!
//! The functions [`learning`], [`hacking`], [`stable`] and [`time`] make the answers. An answer is a [`Mark`], which
//! colours it, and a text.

use std::collections::BTreeSet;

use roll_core::{Headline, Subject};
use serde::Serialize;

use super::run_files::RunFiles;
use super::{timing, warnings};
use crate::progress::counted;
use crate::results::curves::{CurveStyle, PanelSpec, RunMetrics, is_evaluation, metric_names};
use crate::results::figures::{ValidationChange, validation_changes};
use crate::results::record::Comparison;
use crate::results::scores::{self, Change, Effect, FALLING, LEAST_SHARE, MIN_CLIPS, SetName};
use crate::statistics::{decimals, sign_test};

/// Number of steps at each end of a run whose means are compared if nothing was evaluated.
const STEPS_AT_ENDS: usize = 8;
/// An outcome counts as a result if the probability that chance alone produces it is at most this.
const MAX_CHANCE: f64 = 0.05;
/// Largest growth of the gradient norm, as a factor, that is not reported as a problem.
const MAX_GROWTH: f64 = 10.0;
/// Smallest change of a metric on held-out data that counts, as a share of the larger value.
const LEAST_VALIDATION_SHARE: f64 = 2.0 * LEAST_SHARE;
/// Number of phases of a step that the answer about the time names.
const NAMED_PHASES: usize = 3;
/// Smallest share of the run's time, outside of steps, that the answer about the time mentions.
const LEAST_SHARE_BETWEEN_STEPS: f64 = 0.05;

/// A question with its answers.
pub struct Question {
    pub title: &'static str,
    /// Anchor in the page.
    pub id: &'static str,
    /// One answer for each run.
    pub answers: Vec<Answer>,
    /// The panels below the answers.
    pub specs: Vec<PanelSpec>,
}

/// The answer for one run.
#[derive(Serialize)]
pub struct Answer {
    /// Name of the run.
    pub run: String,
    /// The judgement of the run.
    pub mark: Mark,
    /// A sentence or two.
    pub text: String,
}

/// How an answer is marked on the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mark {
    /// The run is as it should be.
    Good,
    /// A person should look at the run.
    Attention,
    /// The run is not judged, because too little was measured, or because there is nothing to judge, as with the times.
    Open,
}

/// The questions that the files of these runs answer.
pub fn questions(runs: &[RunFiles], curves: &[RunMetrics<'_>], headlines: &[Headline]) -> Vec<Question> {
    let names = metric_names(curves);
    let question = |title, id, answer_for: fn(&RunFiles) -> (Mark, String), specs| {
        let answers = runs.iter().map(|run| {
            let (mark, text) = answer_for(run);
            Answer { run: run.name.clone(), mark, text }
        });
        Question { title, id, answers: answers.collect(), specs }
    };
    let time_panels = vec![PanelSpec::steps("time/total", "Seconds of a step")];
    let mut questions = vec![
        question("Is it learning?", "learning", learning, learning_panels(headlines, &names)),
        question("Is it hacking the reward?", "hacking", hacking, hacking_panels(headlines, &names)),
        question("Is it stable?", "stable", stable, headline_panels(headlines, Subject::Stability)),
        question("Where does the time go?", "time", time, time_panels),
    ];
    // Training without a reward has no reward to hack.
    let has_metrics = |question: &Question| question.specs.iter().any(|spec| has_metric(spec, &names));
    questions.retain(|question| question.id != "hacking" || has_metrics(question));
    questions
}

/// A panel for each headline metric about a subject.
fn headline_panels(headlines: &[Headline], subject: Subject) -> Vec<PanelSpec> {
    headlines.iter().filter(|headline| headline.subject == subject).map(PanelSpec::headline).collect()
}

/// The panels of "is it learning?", the last of which has the scores of evaluated clips.
fn learning_panels(headlines: &[Headline], names: &BTreeSet<String>) -> Vec<PanelSpec> {
    // `is_evaluation` already excludes the KL and the single checks (`_check_NAME`).
    let score_metrics = names.iter().filter(|name| is_evaluation(name) && !name.ends_with("_check")).cloned();
    let evaluations = PanelSpec { title: "Score of evaluated clips".into(), curves: Vec::new() };
    let mut panels = headline_panels(headlines, Subject::Learning);
    panels.push(evaluations.with_evaluations(score_metrics));
    panels
}

/// The panels of "is it hacking the reward?": the panels of the checks, then the panels of the divergence from the base
/// model. The KL of the evaluations is drawn into the last panel.
fn hacking_panels(headlines: &[Headline], names: &BTreeSet<String>) -> Vec<PanelSpec> {
    let kl_metrics = names.iter().filter(|name| name.starts_with("eval/") && name.ends_with("_kl")).cloned();
    let mut divergence_panels = headline_panels(headlines, Subject::Divergence);
    if let Some(last) = divergence_panels.pop() {
        divergence_panels.push(last.with_evaluations(kl_metrics));
    }
    let mut panels = check_panels(names);
    panels.extend(divergence_panels);
    panels
}

/// Whether a metric of the panel is among `names`.
fn has_metric(spec: &PanelSpec, names: &BTreeSet<String>) -> bool {
    spec.curves.iter().any(|(metric, _)| names.contains(metric))
}

/// A panel for each check, with the changes of the check and of the reward. They are measured on the set `unseen`
/// (clips that are not trained on) if it has checks, otherwise on another set.
///
/// The metrics of a set are `eval/SET` (the reward), `eval/SET_check` (the sum of the checks) and `eval/SET_check_NAME`
/// (each of several checks).
fn check_panels(names: &BTreeSet<String>) -> Vec<PanelSpec> {
    let sets: Vec<&str> = names.iter().filter_map(|name| name.strip_prefix("eval/")?.strip_suffix("_check")).collect();
    let Some(set) = sets.iter().find(|set| **set == "unseen").or(sets.last()) else { return Vec::new() };
    let (reward, sum_of_checks) = (format!("eval/{set}"), format!("eval/{set}_check"));
    let panel = |metric: &str, label: String| PanelSpec {
        title: format!("Reward and {label} on {set} clips, change"),
        curves: vec![
            (reward.clone(), CurveStyle::Change("reward".into())),
            (metric.to_string(), CurveStyle::Change(format!("{label}, never trained on"))),
        ],
    };
    let single_check_prefix = format!("{sum_of_checks}_");
    let mut panels = Vec::new();
    for metric in names {
        if let Some(check) = metric.strip_prefix(&single_check_prefix) {
            panels.push(panel(metric, format!("check {check}")));
        }
    }
    if panels.is_empty() {
        panels.push(panel(&sum_of_checks, "check".into()));
    }
    panels
}

/// Position of the trained reward among the scores of an evaluation.
const REWARD: usize = 0;
/// Position of the weighted sum of the rewards of `evaluation.check`.
const CHECK: usize = 1;

/// The change of scores since before training, and the set of clips that was scored. `position` is [`REWARD`] or
/// [`CHECK`]. `None` with fewer than two evaluations, or without a clip that both scored.
fn change(run: &RunFiles, position: usize) -> Option<(SetName, Change)> {
    let (before, after) = run.record.first_and_last_evaluation()?;
    let set = scores::judged_set(before)?;
    Some((set, scores::change(scores::of(before, set), scores::of(after, set), position)?))
}

/// Whether votes of people are the only reward. The mean of their votes is the same at every step, since they compare
/// the videos of a prompt with one another.
fn has_votes_only(run: &RunFiles) -> bool {
    run.settings.get("reward.0.name").is_some_and(|name| name.trim_matches('"') == "vote")
        && !run.settings.contains_key("reward.1.name")
}

/// The answer to "is it learning?" by a comparison of videos after training with videos before, if there was one.
fn answer_by_comparison(run: &RunFiles) -> Option<(Mark, String)> {
    // The numbers of clips for which the video after training won, the video before won, and neither.
    let Comparison { after, before, equal } = run.record.comparison?;
    let chance = sign_test(after, before);
    let (mark, verdict) = if chance > MAX_CHANCE {
        (Mark::Open, "Undecided")
    } else if after > before {
        (Mark::Good, "Yes")
    } else {
        (Mark::Attention, "No")
    };
    let clips = counted(after + before + equal, "clip");
    let text = format!(
        "{verdict}: of {clips}, each shown before and after training without saying which is which, the one after \
         won {after} and lost {before}, and {equal} were equal (chance alone: {chance:.2})."
    );
    Some((mark, text))
}

/// Answers "is it learning?" by the best evidence that there is: a comparison of videos, then the scores of evaluated
/// clips, then a measurement on held-out data, then the metrics of training.
fn learning(run: &RunFiles) -> (Mark, String) {
    if let Some((mark, text)) = answer_by_comparison(run) {
        let check = change(run, CHECK).map(|(_, change)| {
            let [before, after] = change.ends();
            format!(" `evaluation.check` from {before} to {after}, {}.", change.gain.in_words())
        });
        return (mark, text + &check.unwrap_or_default());
    }
    if has_votes_only(run) {
        return answer_by_votes(run);
    }
    let answer = answer_by_evaluation(run).or_else(|| answer_by_validation(run));
    answer.unwrap_or_else(|| answer_by_training(run))
}

/// The answer to "is it learning?" for a run whose only reward is votes: the change of `evaluation.check`, if it was
/// measured.
fn answer_by_votes(run: &RunFiles) -> (Mark, String) {
    let votes = "Votes compare the videos of a prompt with one another, so that their mean is the same at every step";
    let Some((_, change)) = change(run, CHECK) else {
        let check = match run.has("evaluation.check") {
            true => next_evaluation(run),
            false => " `evaluation.check` can name one.".into(),
        };
        return (Mark::Open, format!("{votes}: a second reward says more.{check}"));
    };
    let [before, after] = change.ends();
    let clips = counted(change.clips as u64, "clip");
    let gain = change.gain.in_words();
    (Mark::Open, format!("{votes}. `evaluation.check` from {before} to {after}, {gain}, on {clips}."))
}

/// The answer to "is it learning?" by the scores of evaluated clips, if there are two evaluations.
fn answer_by_evaluation(run: &RunFiles) -> Option<(Mark, String)> {
    let (set, change) = change(run, REWARD)?;
    let clips = match set {
        SetName::Unseen if run.record.seen > 0 => {
            let clips = counted(change.clips as u64, "clip");
            format!("{clips}, of which {} are trained on, too", run.record.seen)
        }
        SetName::Unseen => format!("{} that were not trained on", counted(change.clips as u64, "clip")),
        SetName::Train => format!("{} of the training data", counted(change.clips as u64, "clip")),
    };
    let (mark, verdict) = match (warms_up(run), change.effect()) {
        (true, _) => (Mark::Open, "Too early, the learning rate is warming up".into()),
        (_, Effect::Rise) => (Mark::Good, "Yes".into()),
        (_, Effect::Fall) => (Mark::Attention, "No".into()),
        (_, Effect::Negligible) => (Mark::Attention, format!("Hardly{}", against_spread(&change))),
        (_, Effect::Undecided) => (Mark::Open, "Undecided yet".into()),
        (_, Effect::TooFewClips) => (Mark::Open, format!("Too few clips to tell (at least {MIN_CLIPS})")),
    };
    let [before, after] = change.ends();
    Some((mark, format!("{verdict}: from {before} to {after}, {}, on {clips}.", change.gain.in_words())))
}

/// The answer to "is it learning?" by a metric of training at both ends of the run.
fn answer_by_training(run: &RunFiles) -> (Mark, String) {
    let headlines = || run.headlines.iter();
    let Some(headline) = headlines().find(|headline| headline.is_score).or(headlines().next()) else {
        let text = if run.rows.is_empty() { "Too early to tell." } else { "The run names no headline metric." };
        return (Mark::Open, text.into());
    };
    let values = run.values(&headline.metric);
    let steps_at_ends = STEPS_AT_ENDS.min(values.len() / 2);
    if steps_at_ends == 0 {
        return (Mark::Open, "Too early to tell.".into());
    }
    let mean = |values: &[f64]| headline.format.write(values.iter().sum::<f64>() / values.len() as f64);
    let [first, last] = [&values[..steps_at_ends], &values[values.len() - steps_at_ends..]].map(mean);
    let compared = match steps_at_ends {
        1 => "first and last step".to_string(),
        n => format!("means of the first and last {n} steps"),
    };
    let better_evidence = match &headline.held_out {
        // No key has to be set for this evidence.
        Some(held_out) if held_out.key.is_empty() => next_evaluation(run),
        Some(held_out) if run.has(&held_out.key) => next_evaluation(run),
        // For example "`algo.val_data`, held-out conversations, would say more."
        Some(held_out) => format!(" `{}`, {}, would say more.", held_out.key, held_out.data),
        None if run.has("evaluation.metadata") => next_evaluation(run),
        None => " Clips of `evaluation.metadata`, which are never trained on, would say more.".into(),
    };
    (Mark::Open, format!("{} in training from {first} to {last} ({compared}).{better_evidence}", headline.title))
}

/// " The next evaluation is at step 50."; empty if no evaluation follows.
fn next_evaluation(run: &RunFiles) -> String {
    run.next_evaluation().map(|step| format!(" The next evaluation is at step {step}.")).unwrap_or_default()
}

/// The answer to "is it learning?" by the first headline metric that is measured on held-out data, if there is one. A
/// change is a result if it is at least [`LEAST_VALIDATION_SHARE`] of the larger value.
fn answer_by_validation(run: &RunFiles) -> Option<(Mark, String)> {
    let changes = validation_changes(&run.record, &run.headlines);
    let ValidationChange { held_out, before, after, gain, .. } = changes.into_iter().next()?;
    let is_loss = held_out.metric.rsplit('/').next().is_some_and(|name| name.contains("loss"));
    let improvement = if is_loss { before - after } else { after - before };
    let share = improvement / before.abs().max(after.abs());
    let (mark, verdict) = if warms_up(run) {
        (Mark::Open, "Too early, the learning rate is warming up")
    } else if share.abs() >= LEAST_VALIDATION_SHARE && gain.is_some_and(|gain| gain.includes_0()) {
        (Mark::Open, "Undecided yet")
    } else if share >= LEAST_VALIDATION_SHARE {
        (Mark::Good, "Yes")
    } else if share <= -LEAST_VALIDATION_SHARE {
        (Mark::Attention, "No")
    } else {
        (Mark::Attention, "Hardly")
    };
    let digits = decimals(after - before);
    let percent = if before == 0.0 { String::new() } else { format!(" ({:+.2} %)", 100.0 * (after / before - 1.0)) };
    let interval = gain.map(|gain| format!(", {}", gain.in_words())).unwrap_or_default();
    let (label, data) = (&held_out.label, &held_out.data);
    let text = format!("{verdict}: {label} from {before:.digits$} to {after:.digits$}{percent}{interval}, on {data}.");
    Some((mark, text))
}

/// Answers "is it hacking the reward?" by the rewards of `evaluation.check`.
fn hacking(run: &RunFiles) -> (Mark, String) {
    if let Some(suspicion) = &run.record.suspicion {
        let text = format!("Suspected at step {}: the reward rose while a check fell.", suspicion.step);
        return (Mark::Attention, text);
    }
    let Some((_, check)) = change(run, CHECK) else {
        let text = match run.path.join("trajectories.jsonl").is_file() {
            true => "Nothing measures this for an agent: read the episodes below, and more in trajectories.jsonl.",
            false if run.has("evaluation.check") => {
                let evaluated = counted(run.record.evaluations.len() as u64, "evaluation");
                let next = next_evaluation(run);
                return (Mark::Open, format!("Unknown yet: {evaluated} of `evaluation.check` so far.{next}"));
            }
            false => "Unknown: `evaluation.check` can name a second reward, which is measured and never trained on.",
        };
        return (Mark::Open, text.into());
    };
    let (mark, verdict) = match check.effect() {
        Effect::Rise => (Mark::Good, "No sign of it: the check rose"),
        Effect::Negligible => (Mark::Good, "No sign of it: the check hardly changed"),
        Effect::Fall => (Mark::Attention, "The check fell"),
        Effect::Undecided => (Mark::Open, "Undecided yet"),
        Effect::TooFewClips => (Mark::Open, "Too few clips to tell"),
    };
    let fallen_checks = run.values(FALLING).last().copied().unwrap_or_default();
    let (mark, note) = match fallen_checks > 0.0 {
        true => (Mark::Attention, format!("; {fallen_checks:.0} of the checks have fallen")),
        false => (mark, String::new()),
    };
    (mark, format!("{verdict}, {}, on {}{note}.", check.gain.in_words(), counted(check.clips as u64, "clip")))
}

/// Whether the learning rate has not reached its full size yet.
fn warms_up(run: &RunFiles) -> bool {
    let has_warmup =
        run.settings.get("training.lr_scheduler_type").is_some_and(|schedule| schedule.trim_matches('"') != "constant");
    let (steps_done, _) = run.steps();
    has_warmup && run.number("training.warmup_steps").is_some_and(|warmup_steps| steps_done as f64 <= warmup_steps)
}

/// A change compared with the spread of scores: ", 1/150 of the difference between clips". Empty if the change is 0, or
/// more than half of the spread, where such a fraction would not be small.
fn against_spread(change: &Change) -> String {
    let ratio = change.spread / change.gain.mean.abs();
    if ratio.is_finite() && ratio >= 2.0 {
        format!(", 1/{ratio:.0} of the difference between clips")
    } else {
        String::new()
    }
}

/// Answers "is it stable?": lists the [`instabilities`] if there are any.
fn stable(run: &RunFiles) -> (Mark, String) {
    let problems = instabilities(run);
    if !problems.is_empty() {
        return (Mark::Attention, format!("Look at it: {}.", problems.join("; ")));
    }
    let (steps, _) = run.steps();
    if steps == 0 {
        return (Mark::Open, "Too early to tell.".into());
    }
    let clipped = match warnings::clipped(run) {
        Some((0, ..)) => ", no gradient was clipped".to_string(),
        Some((clipped_steps, ..)) => format!(", gradients were clipped in {}", counted(clipped_steps as u64, "step")),
        None => String::new(),
    };
    (
        Mark::Good,
        format!("Yes: the updates of all {} were applied, all metrics are finite{clipped}.", counted(steps, "step")),
    )
}

/// What shows that training is not stable, each in words: left-out updates, values that are not finite, and gradients
/// that are clipped often, 0, or growing.
fn instabilities(run: &RunFiles) -> Vec<String> {
    let mut problems = Vec::new();
    if run.record.skipped_updates > 0 {
        problems.push(format!("{} left out", counted(run.record.skipped_updates, "update")));
    }
    let nonfinite = warnings::nonfinite(run);
    if !nonfinite.is_empty() {
        problems.push(format!("{} not finite at some step", counted(nonfinite.len() as u64, "metric")));
    }
    if let Some((clipped_steps, steps, _)) = warnings::clipped(run) {
        let is_often = 2 * clipped_steps > steps;
        if is_often {
            problems.push(format!("gradients clipped in {clipped_steps} of {steps} steps"));
        }
    }
    let norms = run.values("actor/grad_norm");
    if !norms.is_empty() && norms.iter().all(|norm| *norm == 0.0) {
        problems.push("the gradient norm is 0 at every step: nothing was learnt".into());
    }
    // The medians of the first and the last quarter of the steps, if a quarter is more than one step.
    let quarter = norms.len() / 4;
    if quarter >= 2 {
        let [first, last] = [&norms[..quarter], &norms[norms.len() - quarter..]].map(median);
        if last > MAX_GROWTH * first && first > 0.0 {
            problems.push(format!("the gradient norm grew from {first:.1e} to {last:.1e}"));
        }
    }
    problems
}

/// The median of the values, of which there must be at least one; the upper one of two middle values.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

/// Answers "where does the time go?" by the longest phases of a step.
fn time(run: &RunFiles) -> (Mark, String) {
    let (phases, seconds_per_step) = timing::phases(run);
    if phases.is_empty() {
        return (Mark::Open, "No times yet.".into());
    }
    let in_words =
        |(name, seconds): &(String, f64)| format!("{name} {:.0} %", 100.0 * seconds / timing::sum_of_phases(&phases));
    let longest: Vec<String> = phases.iter().take(NAMED_PHASES).map(in_words).collect();
    let mut text = format!("{seconds_per_step:.1} s a step: {}.", longest.join(", "));
    let (steps_done, steps_wanted) = run.steps();
    let logged = run.values("time/total");
    let between_steps = run.record.seconds - logged.iter().sum::<f64>();
    // Without a log of every step, the time between steps is not known.
    let is_every_step_logged = logged.len() as u64 == steps_done;
    if is_every_step_logged && between_steps > LEAST_SHARE_BETWEEN_STEPS * run.record.seconds {
        let share = 100.0 * between_steps / run.record.seconds;
        text += &format!(" Evaluations and checkpoints take {share:.0} % of the whole run.");
    }
    let left = steps_wanted.unwrap_or(steps_done).saturating_sub(steps_done);
    if left > 0 && run.summary.is_none() {
        let seconds_left = left as f64 * seconds_per_step;
        text += &format!(" {} left: {seconds_left:.0} s without evaluations.", counted(left, "step"));
    }
    (Mark::Open, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::record::ValidationMetrics;

    fn names(all: &[&str]) -> BTreeSet<String> {
        all.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_run_without_gradient_needs_attention() {
        let stable = |norms: [f64; 2]| {
            let rows = norms.map(|norm| serde_json::json!({"step": 1, "actor/grad_norm": norm}));
            stable(&RunFiles::of_rows(serde_json::json!(rows)))
        };
        let (mark, text) = stable([0.0, 0.0]);
        assert!(mark == Mark::Attention && text.contains("nothing was learnt"), "{text}");
        assert!(!stable([0.0, 1.0]).1.contains("nothing was learnt"));
    }

    /// A run in its middle: settings, and the metrics of two steps.
    fn running(settings: &[(&str, &str)]) -> RunFiles {
        let mut run =
            RunFiles::of_rows(serde_json::json!([{"step": 23, "a/score": 0.5}, {"step": 24, "a/score": 0.6}]));
        run.headlines = vec![Headline::new("a/score", "score", "Score").score()];
        let fixed = [("steps", "40"), ("evaluation.every", "10")];
        run.settings = fixed.iter().chain(settings).map(|(key, value)| (key.to_string(), value.to_string())).collect();
        run
    }

    #[test]
    fn a_key_that_is_set_is_not_advised() {
        let bare = running(&[("evaluation.metadata", "null"), ("evaluation.check", "[]")]);
        assert!(
            learning(&bare).1.contains("`evaluation.metadata`") && hacking(&bare).1.contains("`evaluation.check` can")
        );
        let set = running(&[("evaluation.metadata", "\"unseen.csv\""), ("evaluation.check.0.name", "\"sharpness\"")]);
        for text in [learning(&set).1, hacking(&set).1] {
            assert!(text.ends_with("The next evaluation is at step 30.") && !text.contains("would say more"), "{text}");
        }
        // Near the end, the last step is evaluated.
        let near = running(&[("evaluation.metadata", "\"unseen.csv\""), ("evaluation.every", "100")]);
        assert!(learning(&near).1.ends_with("at step 40."));
    }

    #[test]
    fn votes_are_not_taken_for_a_score_that_could_rise() {
        let run = running(&[("reward.0.name", "\"vote\""), ("evaluation.metadata", "\"unseen.csv\"")]);
        let (mark, text) = learning(&run);
        assert!(
            mark == Mark::Open && text.contains("same at every step") && !text.contains("evaluation.metadata"),
            "{text}"
        );
    }

    #[test]
    fn a_validation_loss_has_an_interval_over_its_clips() {
        let answer = |losses: [[f64; 4]; 2]| {
            let mut run = running(&[]);
            run.headlines =
                vec![Headline::new("a/loss", "loss", "Loss").validated_by("val/loss", "loss", "other clips")];
            run.record.validations =
                Vec::from([(0, losses[0]), (24, losses[1])].map(|(step, losses)| ValidationMetrics {
                    step,
                    metrics: [("val/loss".to_string(), Some(losses.iter().sum::<f64>() / 4.0))].into(),
                    losses: losses.to_vec(),
                }));
            learning(&run)
        };
        let before = [0.4, 0.3, 0.5, 0.4];
        let (mark, text) = answer([before, [0.38, 0.28, 0.475, 0.38]]);
        assert!(
            mark == Mark::Good && text.starts_with("Yes: loss from 0.400 to 0.379 (-5.31 %), -0.021 (95 % -0."),
            "{text}"
        );
        let (mark, text) = answer([before, [0.2, 0.4, 0.4, 0.5]]);
        assert!(mark == Mark::Open && text.starts_with("Undecided yet: loss"), "{text}");
    }

    #[test]
    fn clips_after_training_are_better_if_chance_alone_hardly_explains_the_votes() {
        let answer = |after, before, equal| {
            let mut run = running(&[("reward.0.name", "\"vote\"")]);
            run.record.comparison = Some(Comparison { after, before, equal });
            learning(&run)
        };
        for ((after, before, equal), mark, part) in [
            ((14, 4, 2), Mark::Good, "Yes: of 20 clips"),
            ((4, 14, 2), Mark::Attention, "No: of 20 clips"),
            ((6, 4, 0), Mark::Open, "Undecided"),
            ((5, 0, 15), Mark::Open, "Undecided"),
            ((0, 0, 3), Mark::Open, "3 were equal"),
        ] {
            let (found, text) = answer(after, before, equal);
            assert!(found == mark && text.contains(part), "{text}");
        }
    }

    #[test]
    fn each_check_shares_a_panel_with_the_reward_on_unseen_clips() {
        let one = check_panels(&names(&["eval/identity", "eval/identity_check", "eval/unseen", "eval/unseen_check"]));
        let metrics: Vec<&str> = one.iter().flat_map(|s| &s.curves).map(|(metric, _)| metric.as_str()).collect();
        assert_eq!(metrics, ["eval/unseen", "eval/unseen_check"]);
        let two = ["eval/train", "eval/train_check", "eval/train_check_clip", "eval/train_check_sharp"];
        let titles: Vec<String> = check_panels(&names(&two)).into_iter().map(|spec| spec.title).collect();
        assert_eq!(titles.len(), 2);
        assert!(titles[0].contains("check clip on train clips"), "{titles:?}");
        assert!(check_panels(&names(&["eval/unseen", "eval/unseen_kl"])).is_empty());
    }
}
