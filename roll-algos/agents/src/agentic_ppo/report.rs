//! The episodes of a step in its report: metrics, and reasons why episodes are not trained on.

use std::collections::BTreeMap;

use super::episode::{Ending, Episode};

/// The origin of an episode that is not trained on, and the reason.
pub(super) fn skipped(episode: &Episode) -> (String, String) {
    let reason = match &episode.ending {
        Ending::Failed(reason) => format!("the environment failed: {reason}"),
        Ending::NoAnswer(reason) => reason.clone(),
        _ => "the first prompt fills `sequence_length` or the model's context".into(),
    };
    (format!("episode of seed {}", episode.seed), reason)
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
/// the agent `has_tools`, also the numbers of their calls.
pub(super) fn episode_metrics(episodes: &[Episode], has_tools: bool) -> BTreeMap<String, f64> {
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
        if has_tools {
            let calls = || usable.iter().flat_map(|e| &e.steps).flat_map(|s| &s.calls);
            let (count, failures) = (calls().count() as f64, calls().filter(|call| call.failed).count() as f64);
            metrics.insert("env/tool_calls".into(), count / usable.len() as f64);
            metrics.insert("env/tool_failures".into(), failures / count.max(1.0));
        }
    }
    metrics
}
