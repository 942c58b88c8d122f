//! Keys and values of conversations that may go on: the next turn reads only the new tokens.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, PoisonError};

use super::cache::Beginning;

/// Keys and values of the conversations of the turn before and of this one. All calls of one seed are a turn. Those of
/// earlier turns are gone, so that the results of a conversation never depend on calls long ago.
#[derive(Default)]
pub struct Prefixes(Mutex<Turns>);

#[derive(Default)]
struct Turns {
    seed: Option<u64>,
    before: Held,
    now: Held,
}

#[derive(Default)]
struct Held {
    by_tokens: HashMap<Vec<u32>, Beginning>,
    lengths: BTreeSet<usize>,
}

impl Prefixes {
    /// Begins a turn, or goes on with it.
    pub fn turn(&self, seed: u64) {
        let mut turns = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if turns.seed.replace(seed) != Some(seed) {
            turns.before = std::mem::take(&mut turns.now);
        }
    }

    /// How many tokens `prompt` begins with that the turn before has read, and their keys and values, layer by layer.
    /// At least one token is left to read. They are taken out: the next caller reads them anew.
    pub fn take(&self, prompt: &[u32]) -> Option<(usize, Beginning)> {
        let held = &mut self.0.lock().unwrap_or_else(PoisonError::into_inner).before;
        let lengths = held.lengths.range(..prompt.len()).rev();
        lengths.copied().find_map(|length| Some((length, held.by_tokens.remove(&prompt[..length])?)))
    }

    /// Keeps keys and values of `tokens` for the next turn.
    pub fn keep(&self, tokens: Vec<u32>, given: Beginning) {
        let held = &mut self.0.lock().unwrap_or_else(PoisonError::into_inner).now;
        held.lengths.insert(tokens.len());
        held.by_tokens.insert(tokens, given);
    }

    /// Lets go of everything: the model changed, or the memory is needed.
    pub fn forget(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Turns::default();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_longest_beginning_of_the_turn_before_is_found_once() {
        let prefixes = Prefixes::default();
        let length = |prompt: &[u32]| prefixes.take(prompt).map(|(length, _)| length);
        prefixes.turn(1);
        for tokens in [vec![1, 2], vec![1, 2, 3], vec![4]] {
            prefixes.keep(tokens, Vec::new());
        }
        assert_eq!(length(&[1, 2, 3, 4]), None, "the turn still goes on");
        prefixes.turn(2);
        prefixes.turn(2);
        assert_eq!(length(&[1, 2, 3]), Some(2), "a token is left to read");
        assert_eq!(length(&[1, 2, 3, 4]), Some(3));
        assert_eq!(length(&[1, 2, 3, 4]), None);
        prefixes.turn(3);
        assert_eq!(length(&[4, 4]), None, "two turns ago");
    }
}
