//! The episodes of a step in its report: metrics, and reasons why episodes are not trained on.

use std::collections::BTreeMap;

use super::config::AgenticPpoConfig;
use super::episode::{Ending, Episode};
use super::rewards::groups;
use super::statistics::pass_at;

/// The origin of an episode that is not trained on, and the reason.
pub(super) fn skipped(episode: &Episode) -> (String, String) {
    let reason = match &episode.ending {
        Ending::Failed(reason) => format!("the environment failed: {reason}"),
        Ending::NoAnswer(reason) => reason.clone(),
        _ => "the first prompt fills `sequence_length` or the model's context".into(),
    };
    (format!("episode of seed {}", episode.seed), reason)
}

/// A group that is not trained on, and the reason. All such groups of a step have the same words, and so one warning.
pub(super) fn left_out_group() -> (String, String) {
    ("a group of episodes".into(), "all have the same score".into())
}

/// Adds mean, maximum and minimum of `values` to the metrics, unless there are no values.
pub(super) fn insert_spread(metrics: &mut BTreeMap<String, f64>, name: &str, values: &[f64]) {
    if values.is_empty() {
        return;
    }
    let fold = |f: fn(f64, f64) -> f64, start| values.iter().copied().fold(start, f);
    metrics.insert(format!("{name}/mean"), values.iter().sum::<f64>() / values.len() as f64);
    metrics.insert(format!("{name}/max"), fold(f64::max, f64::NEG_INFINITY));
    metrics.insert(format!("{name}/min"), fold(f64::min, f64::INFINITY));
}

/// Scores, successes and lengths of episodes. If there are several worlds, also scores and successes of each world; if
/// the agent has tools, also the numbers of their calls.
pub(super) fn episode_metrics(episodes: &[Episode], config: &AgenticPpoConfig) -> BTreeMap<String, f64> {
    let mut metrics = BTreeMap::new();
    let mut worlds: BTreeMap<&str, Vec<&Episode>> = BTreeMap::new();
    for episode in episodes.iter().filter(|e| e.is_usable() && !e.tag.is_empty()) {
        worlds.entry(&episode.tag).or_default().push(episode);
    }
    for (tag, episodes) in worlds {
        insert_spread(&mut metrics, &format!("{tag}/score"), &episodes.iter().map(|e| e.score()).collect::<Vec<_>>());
        let solved = episodes.iter().filter(|e| e.solved).count() as f64 / episodes.len() as f64;
        metrics.insert(format!("{tag}/env/success"), solved);
    }
    let usable: Vec<&Episode> = episodes.iter().filter(|e| e.is_usable()).collect();
    let mean =
        |value: &dyn Fn(&Episode) -> f64| usable.iter().map(|e| value(e)).sum::<f64>() / usable.len().max(1) as f64;
    insert_spread(&mut metrics, "score", &usable.iter().map(|e| e.score()).collect::<Vec<_>>());
    metrics.insert("env/episodes".into(), usable.len() as f64);
    metrics.insert("env/failed".into(), (episodes.len() - usable.len()) as f64);
    if !usable.is_empty() {
        let valid_fraction = |e: &Episode| e.steps.iter().filter(|s| s.valid).count() as f64 / e.steps.len() as f64;
        metrics.insert("env/success".into(), mean(&|e| f64::from(u8::from(e.solved))));
        metrics.insert("env/action_is_valid".into(), mean(&valid_fraction));
        metrics.insert("env/num_actions".into(), mean(&|e| e.steps.len() as f64));
        metrics.insert("env/token_limit".into(), mean(&|e| f64::from(u8::from(e.ending == Ending::TokenLimit))));
        metrics.insert("tokens/total_length".into(), mean(&|e| e.tokens.len() as f64));
        let answers = usable.iter().flat_map(|e| &e.steps).count() as f64;
        let truncated = usable.iter().flat_map(|e| &e.steps).filter(|s| s.truncated).count() as f64;
        metrics.insert("env/answer_truncated".into(), truncated / answers);
        if config.length_penalty > 0.0 {
            metrics.insert("env/length_penalty".into(), mean(&|e| e.steps.iter().map(|s| s.penalty).sum()));
        }
        if !config.tools.is_empty() {
            let calls = || usable.iter().flat_map(|e| &e.steps).flat_map(|s| &s.calls);
            let (count, failures) = (calls().count() as f64, calls().filter(|call| call.failed).count() as f64);
            metrics.insert("env/tool_calls".into(), count / usable.len() as f64);
            metrics.insert("env/tool_failures".into(), failures / count.max(1.0));
        }
    }
    metrics
}

/// The chance that at least one of k episodes of a start solves it, by the unbiased estimate of Chen et al. 2021
/// (<https://arxiv.org/abs/2107.03374>), averaged over starts: `env/pass@k` for k of 1, 2, 4 and so on, and for all of
/// `samples`, the number of episodes of each start. Empty for one sample. A start whose environment failed in some
/// episodes counts for the k that are left.
pub(super) fn pass_metrics(episodes: &[Episode], samples: usize) -> BTreeMap<String, f64> {
    let usable: Vec<&Episode> = episodes.iter().filter(|e| e.is_usable()).collect();
    let starts: Vec<(usize, usize)> = groups(usable.iter().map(|e| e.group))
        .into_iter()
        .map(|group| (group.len(), group.iter().filter(|i| usable[**i].solved).count()))
        .collect();
    let mut ks: Vec<usize> = std::iter::successors(Some(1), |k| Some(k * 2)).take_while(|k| *k < samples).collect();
    if samples > 1 {
        ks.push(samples);
    }
    let mean = |k: usize| -> Option<f64> {
        let chances: Vec<f64> =
            starts.iter().filter(|(n, _)| *n >= k).map(|(n, right)| pass_at(k, *n, *right)).collect();
        (!chances.is_empty()).then(|| chances.iter().sum::<f64>() / chances.len() as f64)
    };
    ks.into_iter().filter_map(|k| Some((format!("env/pass@{k}"), mean(k)?))).collect()
}

#[cfg(test)]
mod tests {
    use super::super::test_support::episode;
    use super::*;

    #[test]
    fn starts_are_averaged_and_failed_episodes_left_out() {
        let mut episodes: Vec<Episode> = (0..4).map(|i| episode(0, if i == 2 { 1.0 } else { 0.0 })).collect();
        episodes.extend((0..4).map(|_| episode(1, 0.0)));
        let metrics = pass_metrics(&episodes, 4);
        let expected = [("env/pass@1", 0.125), ("env/pass@2", 0.25), ("env/pass@4", 0.5)];
        assert_eq!(metrics, expected.map(|(name, value)| (name.to_string(), value)).into());
        assert_eq!(pass_metrics(&episodes, 1), BTreeMap::new());
        assert_eq!(
            pass_metrics(&episodes, 3).into_keys().collect::<Vec<_>>(),
            ["env/pass@1", "env/pass@2", "env/pass@3"]
        );
        episodes[7].ending = Ending::Failed("gone".into());
        let metrics = pass_metrics(&episodes, 4);
        assert_eq!((metrics["env/pass@1"], metrics["env/pass@4"]), (0.125, 1.0));
    }
}
