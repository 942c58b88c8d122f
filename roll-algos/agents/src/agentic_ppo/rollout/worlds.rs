//! Which world each group of episodes plays in, where an environment has several.

use roll_core::{Environment, Error, Result};

/// The worlds of an environment, and the share of the groups that each gets.
#[derive(Clone, Debug, Default)]
pub struct Worlds {
    names: Vec<String>,
    /// Place in `names` and share of those that are played.
    shares: Vec<(usize, usize)>,
}

impl Worlds {
    /// Of the environments, whose worlds are all the same: `tags` of them (all when empty), in `shares` (equal ones
    /// when empty). `key` is the option that names the tags.
    pub fn new(environments: &[Box<dyn Environment>], key: &str, tags: &[String], shares: &[usize]) -> Result<Self> {
        let names = environments.first().map(|environment| environment.kinds()).unwrap_or_default();
        if names.is_empty() {
            return match tags {
                [] => Ok(Self::default()),
                _ => Err(Error::config(key, "the environment is one world; one with several is called `mixed`")),
            };
        }
        let place = |tag: &String| {
            let known = || format!("the environment has no world `{tag}`; it has: {}", names.join(", "));
            names.iter().position(|name| name == tag).ok_or_else(|| Error::config(key, known()))
        };
        let played: Vec<usize> = match tags {
            [] => (0..names.len()).collect(),
            tags => tags.iter().map(place).collect::<Result<_>>()?,
        };
        let shares = played.into_iter().enumerate().map(|(i, place)| (place, *shares.get(i).unwrap_or(&1))).collect();
        Ok(Self { shares, names })
    }

    /// The world of group `group` of `groups`: those of one world follow one another, as in the reference.
    fn of(&self, group: usize, groups: usize) -> usize {
        let total: usize = self.shares.iter().map(|(_, share)| share).sum();
        let mut before = group * total / groups.max(1);
        let found = self.shares.iter().find(|(_, share)| {
            let here = before < *share;
            before = before.saturating_sub(*share);
            here
        });
        found.or(self.shares.last()).map_or(0, |(place, _)| *place)
    }

    /// Number of group `group` of `groups` in step `step` among the groups of its world, of all steps.
    pub fn number(&self, step: u64, group: usize, groups: usize) -> u64 {
        let place = self.of(group, groups);
        let before = |end: usize| (0..end).filter(|other| self.of(*other, groups) == place).count() as u64;
        step * before(groups) + before(group)
    }

    /// Name of the world of group `group` of `groups`, and the seed that opens it, made of `drawn`. With one world both
    /// are as if there were none.
    pub fn seed(&self, drawn: u64, group: usize, groups: usize) -> (String, u64) {
        let count = self.names.len() as u64;
        if count == 0 {
            return (String::new(), drawn);
        }
        let place = self.of(group, groups);
        // Half of the range of draws, so that the sum below fits.
        let base = (drawn / 2) / count * count;
        (self.names[place].clone(), base + place as u64)
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
            Ok(Observation { text: String::new() })
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
