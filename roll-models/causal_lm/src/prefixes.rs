//! Keeps the keys and values of conversations between their turns, so that the next turn reads only the new tokens.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::cache::{Cache, Prefix};

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
    /// The keys and values of both; `None` before the first turn.
    cache: Option<Arc<Cache>>,
}

#[derive(Default)]
struct PrefixTable {
    by_tokens: HashMap<Vec<u32>, Prefix>,
    /// The lengths of the prefixes, for finding the longest.
    lengths: BTreeSet<usize>,
}

impl PrefixTable {
    /// The length of the longest proper prefix of `prompt` that is known.
    fn longest(&self, prompt: &[u32]) -> Option<usize> {
        let mut lengths = self.lengths.range(..prompt.len()).rev();
        lengths.find(|length| self.by_tokens.contains_key(&prompt[..**length])).copied()
    }
}

impl Prefixes {
    fn turns(&self) -> MutexGuard<'_, Turns> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a turn, unless the present one has this seed, and returns the cache, which `empty` makes at the first
    /// turn. The memory of dropped conversations is reused: of those that are two turns old, and of those of the
    /// previous turn if none of `prompts` continues one of them, since other conversations have then begun.
    pub fn begin_turn(&self, seed: u64, prompts: &[&[u32]], empty: impl FnOnce() -> Cache) -> Arc<Cache> {
        let mut turns = self.turns();
        let Turns { seed: present_seed, previous, present, cache } = &mut *turns;
        let cache = cache.get_or_insert_with(|| Arc::new(empty()));
        if present_seed.replace(seed) != Some(seed) {
            *previous = std::mem::take(present);
            if prompts.iter().all(|prompt| previous.longest(prompt).is_none()) {
                *previous = PrefixTable::default();
            }
            cache.retain(&mut previous.by_tokens.values_mut().collect::<Vec<_>>());
        }
        cache.clone()
    }

    /// Ends a last turn: frees the memory of all conversations but those that a call of this turn or of the next may
    /// continue.
    pub fn end_turn(&self) {
        let Turns { previous, present, cache, .. } = &mut *self.turns();
        if let Some(cache) = cache {
            cache
                .retain(&mut previous.by_tokens.values_mut().chain(present.by_tokens.values_mut()).collect::<Vec<_>>());
        }
    }

    /// Number of `prompts` that continue a conversation of the previous turn.
    pub fn count_known(&self, prompts: &[&[u32]]) -> usize {
        let previous = &self.turns().previous;
        prompts.iter().filter(|prompt| previous.longest(prompt).is_some()).count()
    }

    /// Removes the longest proper prefix of `prompt` that is known from the previous turn, and returns it.
    pub fn take(&self, prompt: &[u32]) -> Option<Prefix> {
        let table = &mut self.turns().previous;
        let length = table.longest(prompt)?;
        table.by_tokens.remove(&prompt[..length])
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
    use burn_tensor::DType;

    use super::*;

    /// A cached sequence of `length` tokens in a slot.
    fn prefix(cache: &Cache, length: usize) -> Prefix {
        Prefix { prompt: 0..0, slot: Some(cache.take_slot()), tail: length }
    }

    #[test]
    fn longest_prefix_of_the_previous_turn_is_taken_once() {
        let prefixes = Prefixes::default();
        let begin = |seed| prefixes.begin_turn(seed, &[&[1, 2, 3]], || Cache::new(1, DType::F32));
        let length = |prompt: &[u32]| prefixes.take(prompt).map(|prefix| prefix.len());
        let cache = begin(1);
        for tokens in [vec![1, 2], vec![1, 2, 3], vec![4]] {
            let length = tokens.len();
            prefixes.keep(tokens, prefix(&cache, length));
        }
        assert_eq!(length(&[1, 2, 3, 4]), None, "the turn still goes on");
        begin(2);
        begin(2);
        assert_eq!(length(&[1, 2, 3]), Some(2), "a token is left to read");
        assert_eq!(length(&[1, 2, 3, 4]), Some(3));
        assert_eq!(length(&[1, 2, 3, 4]), None);
        begin(3);
        assert_eq!(length(&[4, 4]), None, "two turns ago");
    }

    #[test]
    fn slots_of_dropped_conversations_are_taken_again() {
        let prefixes = Prefixes::default();
        let begin = |seed, prompt: &[u32]| prefixes.begin_turn(seed, &[prompt], || Cache::new(1, DType::F32));
        let cache = begin(1, &[1]);
        for tokens in [[1, 2], [3, 4]] {
            prefixes.keep(tokens.to_vec(), prefix(&cache, 2));
        }
        begin(2, &[1, 2, 5]);
        assert_eq!(prefixes.take(&[1, 2, 5]).unwrap().slot, Some(0));
        assert_eq!(cache.take_slot(), 2, "the other conversation may still continue");
        prefixes.keep(vec![1, 2, 5, 6], Prefix { prompt: 0..0, slot: Some(0), tail: 4 });
        begin(3, &[1, 2, 5, 6, 7]);
        assert_eq!([cache.take_slot(), cache.take_slot()], [1, 2], "that of two turns ago is dropped");
        begin(4, &[9]);
        assert_eq!(cache.take_slot(), 0, "no conversation continues");
    }
}
