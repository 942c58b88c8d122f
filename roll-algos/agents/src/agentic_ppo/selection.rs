//! The selection of the episodes that are trained on, among those that were played.

use std::collections::BTreeMap;

use super::config::{AgenticPpoConfig, GroupFilter};
use super::episode::Episode;

/// The episodes that are trained on.
pub(super) struct Selection {
    pub episodes: Vec<Episode>,
    /// Numbers of the groups that the filter leaves out.
    pub left_out: Vec<usize>,
}

/// Chooses the first `group_size` usable episodes of each group, without the groups that the filter leaves out.
pub(super) fn chosen(played: &[Episode], config: &AgenticPpoConfig) -> Selection {
    let mut groups: BTreeMap<usize, Vec<&Episode>> = BTreeMap::new();
    for episode in played.iter().filter(|episode| episode.is_usable()) {
        let group = groups.entry(episode.group).or_default();
        if group.len() < config.group_size {
            group.push(episode);
        }
    }
    let (mut episodes, mut left_out) = (Vec::new(), Vec::new());
    for (number, group) in groups {
        let first_score = group.first().map(|episode| episode.score());
        let has_equal_scores = group.iter().all(|episode| Some(episode.score()) == first_score);
        if config.group_filter == GroupFilter::Varied && has_equal_scores {
            left_out.push(number);
        } else {
            episodes.extend(group.into_iter().cloned());
        }
    }
    Selection { episodes, left_out }
}

#[cfg(test)]
mod tests {
    use super::super::test_support::episode;
    use super::*;

    #[test]
    fn spare_episodes_replace_failed_ones_and_equal_groups_are_filtered() {
        let played =
            || [(0, 1.0), (0, 0.0), (0, 5.0), (1, 2.0), (1, 2.0), (2, 3.0)].map(|(g, r)| episode(g, r)).to_vec();
        let config = |group_filter| AgenticPpoConfig { group_size: 2, group_filter, ..Default::default() };
        let scores = |filter| {
            let Selection { episodes, left_out } = chosen(&played(), &config(filter));
            (episodes.iter().map(Episode::score).collect::<Vec<_>>(), left_out)
        };
        assert_eq!(scores(GroupFilter::All), (vec![1.0, 0.0, 2.0, 2.0, 3.0], vec![]));
        // A single episode has nothing to differ from.
        assert_eq!(scores(GroupFilter::Varied), (vec![1.0, 0.0], vec![1, 2]));
    }
}
