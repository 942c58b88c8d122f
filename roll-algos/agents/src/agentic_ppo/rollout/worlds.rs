//! The assignment of groups of episodes to the worlds of an environment that has several ([`Environment::kinds`]).

use roll_core::{Environment, Error, Result};

/// The worlds of an environment, and the share of the groups that each gets. The assignment is the same in every step.
#[derive(Clone, Debug, Default)]
pub struct Worlds {
    /// All worlds of the environment; empty if it is one world.
    names: Vec<String>,
    /// The worlds that are played.
    played: Vec<PlayedWorld>,
}

#[derive(Clone, Copy, Debug)]
struct PlayedWorld {
    /// Index in [`Worlds::names`].
    index: usize,
    /// Share of the groups, relative to the other shares.
    share: usize,
}

impl Worlds {
    /// Selects the worlds `tags` (all worlds if empty) with `shares` (equal shares if empty). The `environments` are
    /// copies of one another. `key` is the option that names the tags.
    pub fn new(environments: &[Box<dyn Environment>], key: &str, tags: &[String], shares: &[usize]) -> Result<Self> {
        let names = environments.first().map(|environment| environment.kinds()).unwrap_or_default();
        if names.is_empty() {
            return match tags {
                [] => Ok(Self::default()),
                _ => Err(Error::config(key, "the environment is one world; one with several is called `mixed`")),
            };
        }
        let index_of = |tag: &String| {
            let known = || format!("the environment has no world `{tag}`; it has: {}", names.join(", "));
            names.iter().position(|name| name == tag).ok_or_else(|| Error::config(key, known()))
        };
        let indices: Vec<usize> = match tags {
            [] => (0..names.len()).collect(),
            tags => tags.iter().map(index_of).collect::<Result<_>>()?,
        };
        let share = |i: usize| shares.get(i).copied().unwrap_or(1);
        let played = indices.into_iter().enumerate().map(|(i, index)| PlayedWorld { index, share: share(i) }).collect();
        Ok(Self { names, played })
    }

    /// Index of the world of group `group` of `groups`. The groups of one world follow one another, as in the
    /// reference.
    pub fn world_of(&self, group: usize, groups: usize) -> usize {
        let total: usize = self.played.iter().map(|world| world.share).sum();
        // The first world whose cumulative share exceeds the position of the group, in units of shares.
        let position = group * total / groups.max(1);
        let mut cumulative_share = 0;
        let found = self.played.iter().find(|world| {
            cumulative_share += world.share;
            position < cumulative_share
        });
        found.or(self.played.last()).map_or(0, |world| world.index)
    }

    /// A warning about the worlds that get none of `groups` groups; `None` if every world gets one. `key` is the option
    /// with the number of groups, and `unit` the word for groups.
    pub fn unplayed(&self, groups: usize, key: &str, unit: &str) -> Option<String> {
        let count = |index: usize| (0..groups).filter(|group| self.world_of(*group, groups) == index).count();
        let named = |world: &PlayedWorld| &self.names[world.index];
        let unplayed: Vec<String> = self
            .played
            .iter()
            .filter(|world| count(world.index) == 0)
            .map(|world| format!("`{}` (share {})", named(world), world.share))
            .collect();
        if unplayed.is_empty() {
            return None;
        }
        let counts: Vec<String> =
            self.played.iter().map(|world| format!("{} {}", count(world.index), named(world))).collect();
        Some(format!(
            "`{key}: {groups}`: too few {unit} for the shares of {} worlds, and {} never played: {}. Raise `{key}`, or \
             change the worlds or their shares",
            self.played.len(),
            if unplayed.len() == 1 { format!("{} is", unplayed[0]) } else { format!("{} are", unplayed.join(", ")) },
            counts.join(", ")
        ))
    }

    /// The number of group `group` of `groups` in step `step`, among the groups of the same world over all steps.
    pub fn number(&self, step: u64, group: usize, groups: usize) -> u64 {
        let index = self.world_of(group, groups);
        let is_same_world = |other: &usize| self.world_of(*other, groups) == index;
        let groups_of_world_below = |end: usize| (0..end).filter(is_same_world).count() as u64;
        step * groups_of_world_below(groups) + groups_of_world_below(group)
    }

    /// Number of groups of a world in the steps before `step`, each of `groups` groups.
    pub fn played_before(&self, step: u64, world: usize, groups: usize) -> u64 {
        step * (0..groups).filter(|group| self.world_of(*group, groups) == world).count() as u64
    }

    /// The name of the world of group `group` of `groups`, and the seed that opens it. The seed is made from `drawn` so
    /// that its remainder by the number of worlds is the index of the world ([`Environment::kinds`]). If the
    /// environment is one world, the name is empty and the seed is `drawn`.
    pub fn seed(&self, drawn: u64, group: usize, groups: usize) -> (String, u64) {
        let count = self.names.len() as u64;
        if count == 0 {
            return (String::new(), drawn);
        }
        let index = self.world_of(group, groups);
        // A multiple of `count`. Halving the draw leaves room to add the index.
        let base = (drawn / 2) / count * count;
        (self.names[index].clone(), base + index as u64)
    }
}

/// Fails unless there is a positive share for each tag, or none at all.
pub fn check_shares(name: &str, tags: &[String], shares: &[usize]) -> Result<()> {
    if shares.is_empty() || (shares.len() == tags.len() && shares.iter().all(|share| *share > 0)) {
        return Ok(());
    }
    let problem = format!("expected a number above 0 for each of the {} tags, found {shares:?}", tags.len());
    Err(Error::config(format!("algo.{name}"), problem))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use roll_core::{Observation, Transition};

    use super::*;

    struct Three;

    impl Environment for Three {
        fn reset(&mut self, _seed: u64) -> Result<Observation> {
            Ok(Observation::default())
        }
        fn step(&mut self, _action: &str) -> Result<Transition> {
            Err(Error::Unsupported("nothing to do".into()))
        }
        fn kinds(&self) -> Vec<String> {
            ["a", "b", "c"].map(String::from).to_vec()
        }
    }

    fn worlds(tags: &[&str], shares: &[usize]) -> Result<Worlds> {
        let tags: Vec<String> = tags.iter().map(|t| t.to_string()).collect();
        Worlds::new(&[Box::new(Three)], "algo.tags", &tags, shares)
    }

    #[test]
    fn groups_are_shared_out_as_told_and_seeds_open_their_world() {
        let names = |worlds: Worlds, groups: usize| -> String {
            let seed = |group| {
                let (name, seed) = worlds.seed(u64::MAX - group as u64, group, groups);
                assert_eq!(["a", "b", "c"][(seed % 3) as usize], name);
                name
            };
            (0..groups).map(seed).collect()
        };
        assert_eq!(names(worlds(&["c", "a"], &[1, 3]).unwrap(), 4), "caaa");
        assert_eq!(names(worlds(&["c", "a"], &[128, 384]).unwrap(), 8), "ccaaaaaa");
        assert_eq!(names(worlds(&[], &[]).unwrap(), 6), "aabbcc");
    }

    #[test]
    fn worlds_without_a_group_are_named_with_the_numbers() {
        let unplayed = |tags: &[&str], shares: &[usize], groups| {
            worlds(tags, shares).unwrap().unplayed(groups, "algo.n", "groups")
        };
        let all = unplayed(&[], &[], 2).unwrap();
        assert!(all.contains("`algo.n: 2`") && all.contains("`c` (share 1) is never"), "{all}");
        assert!(all.contains("1 a, 1 b, 0 c"), "{all}");
        let uneven = unplayed(&["a", "b"], &[3, 1], 2).unwrap();
        assert!(uneven.contains("`b` (share 1) is never played: 2 a, 0 b"), "{uneven}");
        let two = unplayed(&[], &[], 1).unwrap();
        assert!(two.contains("`b` (share 1), `c` (share 1) are never"), "{two}");
        for (tags, shares, groups) in [(&[][..], &[][..], 3), (&["a", "b"], &[3, 1], 4), (&["b"], &[], 1)] {
            assert_eq!(unplayed(tags, shares, groups), None);
        }
        assert_eq!(Worlds::default().unplayed(1, "algo.n", "groups"), None);
    }

    #[test]
    fn groups_are_counted_within_their_world() {
        let numbers = |worlds: Worlds| -> Vec<Vec<u64>> {
            (0..2).map(|step| (0..4).map(|group| worlds.number(step, group, 4)).collect()).collect()
        };
        assert_eq!(numbers(worlds(&["c", "a"], &[1, 3]).unwrap()), [[0, 0, 1, 2], [1, 3, 4, 5]]);
        assert_eq!(numbers(worlds(&["a", "b"], &[]).unwrap()), [[0, 1, 0, 1], [2, 3, 2, 3]]);
        assert_eq!(numbers(Worlds::default()), [[0, 1, 2, 3], [4, 5, 6, 7]]);
    }

    #[test]
    fn unknown_tags_are_named() {
        let message = worlds(&["d"], &[]).unwrap_err().to_string();
        assert!(message.contains("`d`") && message.contains("a, b, c"), "{message}");
        let tags = ["d".to_string()];
        assert!(check_shares("num_groups_partition", &tags, &[0]).is_err());
        assert!(check_shares("num_groups_partition", &tags, &[1, 2]).is_err());
        assert_eq!(Worlds::new(&[], "algo.tags", &[], &[]).unwrap().seed(7, 0, 1), (String::new(), 7));
    }
}
