//! Keeps the keys and values of conversations between their turns, so that the next turn reads only the new tokens.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::cache::Prefix;

/// Keys and values of the conversations of the present turn and of the previous turn. All generations with one seed are
/// one turn. Keys and values of earlier turns are dropped, so that results never depend on generations long ago.
#[derive(Default)]
pub struct Prefixes(Mutex<Turns>);

#[derive(Default)]
struct Turns {
    /// The seed of the present turn.
    seed: Option<u64>,
    /// Prefixes that the present turn can take.
    previous: PrefixTable,
    /// Prefixes that the next turn will be able to take.
    present: PrefixTable,
}

#[derive(Default)]
struct PrefixTable {
    by_tokens: HashMap<Vec<u32>, Prefix>,
    /// The lengths of the prefixes, for finding the longest.
    lengths: BTreeSet<usize>,
}

impl Prefixes {
    fn turns(&self) -> MutexGuard<'_, Turns> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a turn, unless the present one has this seed.
    pub fn begin_turn(&self, seed: u64) {
        let mut turns = self.turns();
        if turns.seed.replace(seed) != Some(seed) {
            turns.previous = std::mem::take(&mut turns.present);
        }
    }

    /// Removes the longest proper prefix of `prompt` that is known from the previous turn. Returns its number of tokens
    /// and its keys and values.
    pub fn take(&self, prompt: &[u32]) -> Option<(usize, Prefix)> {
        let table = &mut self.turns().previous;
        let lengths = table.lengths.range(..prompt.len()).rev();
        lengths.copied().find_map(|length| Some((length, table.by_tokens.remove(&prompt[..length])?)))
    }

    /// Keeps the keys and values of `tokens` for the next turn.
    pub fn keep(&self, tokens: Vec<u32>, prefix: Prefix) {
        let table = &mut self.turns().present;
        table.lengths.insert(tokens.len());
        table.by_tokens.insert(tokens, prefix);
    }

    /// Drops all keys and values, because the model changed or the memory is needed.
    pub fn clear(&self) {
        *self.turns() = Turns::default();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn longest_prefix_of_the_previous_turn_is_taken_once() {
        let prefixes = Prefixes::default();
        let length = |prompt: &[u32]| prefixes.take(prompt).map(|(length, _)| length);
        prefixes.begin_turn(1);
        for tokens in [vec![1, 2], vec![1, 2, 3], vec![4]] {
            prefixes.keep(tokens, Vec::new());
        }
        assert_eq!(length(&[1, 2, 3, 4]), None, "the turn still goes on");
        prefixes.begin_turn(2);
        prefixes.begin_turn(2);
        assert_eq!(length(&[1, 2, 3]), Some(2), "a token is left to read");
        assert_eq!(length(&[1, 2, 3, 4]), Some(3));
        assert_eq!(length(&[1, 2, 3, 4]), None);
        prefixes.begin_turn(3);
        assert_eq!(length(&[4, 4]), None, "two turns ago");
    }
}
