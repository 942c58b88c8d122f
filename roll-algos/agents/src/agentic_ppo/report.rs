//! The report of a step on its episodes.

use std::collections::BTreeMap;

use super::episode::{Ending, Episode};

/// The origin of an episode that is not trained on, and the reason.
pub(super) fn skipped(episode: &Episode) -> (String, String) {
    let reason = match &episode.ending {
        Ending::Failed(reason) => format!("the environment failed: {reason}"),
        _ => "the first prompt fills `sequence_length` or the model's context".into(),
    };
    (format!("episode of seed {}", episode.seed), reason)
}

/// Mean, largest and least of `values`, when there are any.
pub(super) fn spread(metrics: &mut BTreeMap<String, f64>, name: &str, values: &[f64]) {
    if values.is_empty() {
        return;
    }
    let fold = |f: fn(f64, f64) -> f64, start| values.iter().copied().fold(start, f);
    metrics.insert(format!("{name}/mean"), values.iter().sum::<f64>() / values.len() as f64);
    metrics.insert(format!("{name}/max"), fold(f64::max, f64::NEG_INFINITY));
    metrics.insert(format!("{name}/min"), fold(f64::min, f64::INFINITY));
}

/// Scores, successes and lengths of episodes; scores and successes also of each world, where there are several. With
/// `tools` also how they were called.
pub(super) fn episode_metrics(episodes: &[Episode], tools: bool) -> BTreeMap<String, f64> {
    let mut metrics = BTreeMap::new();
    let mut worlds: BTreeMap<&str, Vec<&Episode>> = BTreeMap::new();
    for episode in episodes.iter().filter(|e| e.is_usable() && !e.tag.is_empty()) {
        worlds.entry(&episode.tag).or_default().push(episode);
    }
    for (tag, episodes) in worlds {
        spread(&mut metrics, &format!("{tag}/score"), &episodes.iter().map(|e| e.score()).collect::<Vec<_>>());
        let solved = episodes.iter().filter(|e| e.solved).count() as f64 / episodes.len() as f64;
        metrics.insert(format!("{tag}/env/success"), solved);
    }
    let usable: Vec<&Episode> = episodes.iter().filter(|e| e.is_usable()).collect();
    let mean = |of: &dyn Fn(&Episode) -> f64| usable.iter().map(|e| of(e)).sum::<f64>() / usable.len().max(1) as f64;
    spread(&mut metrics, "score", &usable.iter().map(|e| e.score()).collect::<Vec<_>>());
    metrics.insert("env/episodes".into(), usable.len() as f64);
    metrics.insert("env/failed".into(), (episodes.len() - usable.len()) as f64);
    if !usable.is_empty() {
        let valid = |e: &Episode| e.steps.iter().filter(|s| s.valid).count() as f64 / e.steps.len() as f64;
        metrics.insert("env/success".into(), mean(&|e| f64::from(u8::from(e.solved))));
        metrics.insert("env/action_is_valid".into(), mean(&valid));
        metrics.insert("env/num_actions".into(), mean(&|e| e.steps.len() as f64));
        metrics.insert("env/token_limit".into(), mean(&|e| f64::from(u8::from(e.ending == Ending::TokenLimit))));
        metrics.insert("tokens/total_length".into(), mean(&|e| e.tokens.len() as f64));
        if tools {
            let calls = |failed: bool| {
                let calls = usable.iter().flat_map(|e| &e.steps).flat_map(|s| &s.calls);
                calls.filter(|call| call.failed || !failed).count() as f64
            };
            metrics.insert("env/tool_calls".into(), calls(false) / usable.len() as f64);
            metrics.insert("env/tool_failures".into(), calls(true) / calls(false).max(1.0));
        }
    }
    metrics
}
