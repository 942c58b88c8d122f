//! Reward hacking during a run. The first suspicion (the trained reward rises while a check falls) is logged, and
//! `evaluation.stop_when` may end the run.

use roll_train::results::SetLabels;
use roll_train::results::record::{Evaluation, Record, Suspicion};
use roll_train::results::scores::FALLING;
use roll_train::task::TaskContext;

use super::config::EvaluationConfig;
use super::hacking::Verdict;

/// Judges the newest evaluation, and logs and records the first suspicion of a run. Returns the metric [`FALLING`], the
/// number of checks (rewards of `evaluation.check`) that have fallen since the evaluation before training; `None` for
/// that evaluation, and without checks.
pub(super) fn record(labels: &SetLabels, context: &mut TaskContext<'_>) -> Option<(String, f64)> {
    let (step, record) = (context.step, &mut *context.record);
    let verdict = verdict_on(labels, record, record.evaluations.last()?)?;
    if let (Some(text), None) = (verdict.warning_if_suspect(step), &record.suspicion) {
        if context.ranks.rank().0 == 0 {
            tracing::warn!("{text}");
        }
        record.suspicion = Some(Suspicion { step, text });
    }
    Some((FALLING.into(), verdict.falling.len() as f64))
}

/// The reason to end the run by `evaluation.stop_when`, if there is one: in each of the last evaluations, the reward
/// has risen since before training while a check has fallen.
pub(super) fn stop_reason(config: &EvaluationConfig, labels: &SetLabels, record: &Record, step: u64) -> Option<String> {
    let evaluations_in_a_row = config.stop_when?.checks_fall as usize;
    // A step without an evaluation has nothing new to judge.
    if record.evaluations.last()?.step != step {
        return None;
    }
    let newest_first = record.evaluations.iter().rev().take(evaluations_in_a_row);
    let verdicts: Option<Vec<Verdict>> =
        newest_first.map(|evaluation| verdict_on(labels, record, evaluation)).collect();
    let verdicts = verdicts.filter(|all| all.len() == evaluations_in_a_row && all.iter().all(Verdict::is_suspect))?;
    verdicts.first()?.warning_if_suspect(step)
}

/// The verdict on an evaluation, compared with the evaluation before training. `None` for the evaluation before
/// training itself, and without checks.
fn verdict_on(labels: &SetLabels, record: &Record, evaluation: &Evaluation) -> Option<Verdict> {
    let checks = labels.checks();
    let before = record.evaluations.first().filter(|first| first.step < evaluation.step)?;
    (!checks.is_empty()).then(|| Verdict::of(&before.results, &evaluation.results, checks))
}
