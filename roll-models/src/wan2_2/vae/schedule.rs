//! Reverses a chain of steps when only a few of its states can be kept.
//!
//! Step `k` maps state `k` to state `k + 1`; its pullback needs state `k`. States are kept where they save most
//! recomputation: the optimal (binomial) checkpointing of Griewank and Walther, found by dynamic programming instead of
//! closed formulas.

use roll_core::Result;

/// A computation that can be advanced from a state and pulled back at a state.
pub trait Reversible {
    /// The input of a step. A clone must be cheap.
    type State: Clone;
    /// A checkpointed state.
    type Kept;
    /// Announces the checkpoint that is needed next, before the steps after it are pulled back. An implementation may
    /// prefetch it.
    fn expect(&mut self, kept: &mut Self::Kept) -> Result<()>;
    /// Restores a checkpointed state.
    fn bring(&mut self, kept: Self::Kept) -> Result<Self::State>;
    /// Computes state `step + 1`.
    fn advance(&mut self, step: usize, state: &Self::State) -> Result<Self::State>;
    /// Pulls back one step. It is called once per step, last step first.
    fn pull(&mut self, step: usize, state: &Self::State) -> Result<()>;
}

/// The positions at which states are kept.
#[derive(Debug)]
pub struct Schedule {
    steps: usize,
    slots: usize,
    /// `[slots][steps]`: minimal number of advances to reverse `steps` steps from a known first state, and the best
    /// split.
    known: Vec<Vec<Choice>>,
    /// The same, if the whole chain is being advanced in any case.
    passing: Vec<Vec<Choice>>,
}

#[derive(Clone, Copy, Debug)]
struct Choice {
    cost: u64,
    split: usize,
}

impl Schedule {
    /// Plans `steps` steps with at most `slots` checkpoints besides the first state.
    pub fn new(steps: usize, slots: usize) -> Self {
        let slots = slots.min(steps.saturating_sub(1));
        let without: Vec<_> =
            (0..=steps as u64).map(|n| Choice { cost: n * n.saturating_sub(1) / 2, split: 0 }).collect();
        let (mut known, mut passing) = (vec![without.clone()], vec![without]);
        for s in 1..=slots {
            let mut row: Vec<Choice> = vec![Choice { cost: 0, split: 0 }; 2.min(steps + 1)];
            for n in 2..=steps {
                let cost = |m: usize| m as u64 + known[s - 1][n - m].cost + row[m].cost;
                let best = (1..n).map(|m| Choice { cost: cost(m), split: m }).min_by_key(|c| c.cost);
                row.extend(best);
            }
            let free = (0..=steps).map(|n| {
                let cost = |m: usize| passing[s - 1][n - m].cost + row[m].cost;
                let best = (1..n).map(|m| Choice { cost: cost(m), split: m }).min_by_key(|c| c.cost);
                best.unwrap_or(Choice { cost: 0, split: 0 })
            });
            let free = free.collect();
            passing.push(free);
            known.push(row);
        }
        Self { steps, slots, known, passing }
    }

    /// Positions of the states to keep during the forward pass, ascending and including the first state (0).
    pub fn kept_on_the_way(&self) -> Vec<usize> {
        let (mut at, mut slots) = (0, self.slots);
        let mut kept = vec![0];
        while slots > 0 && self.steps - at > 1 {
            at += self.passing[slots][self.steps - at].split;
            kept.push(at);
            slots -= 1;
        }
        kept
    }

    /// Pulls back all steps. `kept` are checkpoints with ascending positions, the first of which is 0.
    pub fn reverse<R: Reversible>(&self, work: &mut R, mut kept: Vec<(usize, R::Kept)>) -> Result<()> {
        let mut end = self.steps;
        while let Some((begin, state)) = kept.pop() {
            let state = work.bring(state)?;
            if let Some((_, next)) = kept.last_mut() {
                work.expect(next)?;
            }
            self.reverse_range(work, begin, end, state, self.slots - kept.len().min(self.slots))?;
            end = begin;
        }
        Ok(())
    }

    fn reverse_range<R: Reversible>(
        &self,
        work: &mut R,
        begin: usize,
        end: usize,
        state: R::State,
        slots: usize,
    ) -> Result<()> {
        let advance_to =
            |work: &mut R, to: usize| (begin..to).try_fold(state.clone(), |state, step| work.advance(step, &state));
        if end - begin > 1 && slots > 0 {
            let middle = begin + self.known[slots][end - begin].split;
            let there = advance_to(work, middle)?;
            self.reverse_range(work, middle, end, there, slots - 1)?;
            return self.reverse_range(work, begin, middle, state, slots);
        }
        for step in (begin..end).rev() {
            let there = advance_to(work, step)?;
            work.pull(step, &there)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Count {
        advances: usize,
        pulled: Vec<usize>,
    }
    impl Reversible for Count {
        type State = usize;
        type Kept = usize;
        fn expect(&mut self, kept: &mut usize) -> Result<()> {
            assert!(self.pulled.last().is_none_or(|last| *kept < *last));
            Ok(())
        }
        fn bring(&mut self, kept: usize) -> Result<usize> {
            Ok(kept)
        }
        fn advance(&mut self, step: usize, state: &usize) -> Result<usize> {
            assert_eq!(step, *state);
            self.advances += 1;
            Ok(step + 1)
        }
        fn pull(&mut self, step: usize, state: &usize) -> Result<()> {
            assert_eq!(step, *state);
            self.pulled.push(step);
            Ok(())
        }
    }

    fn reverse(steps: usize, slots: usize, on_the_way: bool) -> Count {
        let schedule = Schedule::new(steps, slots);
        let kept = if on_the_way { schedule.kept_on_the_way() } else { vec![0] };
        assert!(kept.len() <= slots + 1);
        let mut count = Count::default();
        schedule.reverse(&mut count, kept.into_iter().map(|k| (k, k)).collect()).unwrap();
        count
    }

    #[test]
    fn every_step_is_pulled_once_from_its_own_state_last_first() {
        for steps in 1..40 {
            for slots in 0..6 {
                for on_the_way in [false, true] {
                    let pulled = reverse(steps, slots, on_the_way).pulled;
                    assert_eq!(pulled, (0..steps).rev().collect::<Vec<_>>());
                }
            }
        }
    }

    #[test]
    fn enough_slots_need_no_recomputation_and_none_need_all_of_it() {
        assert_eq!(reverse(5, 4, true).advances, 0);
        assert_eq!(reverse(5, 4, false).advances, 4);
        assert_eq!(reverse(6, 0, true).advances, 15);
    }

    #[test]
    fn recomputation_is_the_binomial_optimum() {
        // 21 steps with 4 checkpoints besides the first (s = 5): t = 2 suffices, since C(5 + 2, 5) = 21. The optimum is
        // t * n - C(s + t, t - 1) = 42 - 7 = 35 advances, of which the forward pass provides the first 20.
        assert_eq!(reverse(21, 4, false).advances, 35);
        assert!(reverse(21, 4, true).advances <= 35 - 15);
    }
}
