//! Reverses a chain of steps of which only a few states can be checkpointed.
//!
//! Step `k` maps state `k` to state `k + 1`; its pullback needs state `k`. A [`Schedule`] is planned from the number of
//! steps and of checkpoints. [`Schedule::reverse`] executes the plan on a [`Reversible`]. Checkpoints lie where they
//! save most recomputation: the optimal (binomial) checkpointing of Griewank and Walther, found by dynamic programming
//! instead of closed formulas.

use roll_core::Result;

/// A computation that can be advanced from a state and pulled back at a state.
pub trait Reversible {
    /// The input of a step. A clone must be cheap.
    type State: Clone;
    /// A checkpointed state.
    type Checkpoint;
    /// Starts to load the checkpoint that is restored next. Other steps are pulled back in the meantime.
    fn prefetch(&mut self, checkpoint: &mut Self::Checkpoint) -> Result<()>;
    /// Checkpoints a state that is needed again only after the pullbacks of later steps.
    fn hold(&mut self, state: Self::State) -> Result<Self::Checkpoint>;
    /// Restores a checkpointed state.
    fn restore(&mut self, checkpoint: Self::Checkpoint) -> Result<Self::State>;
    /// Computes state `step + 1`.
    fn advance(&mut self, step: usize, state: &Self::State) -> Result<Self::State>;
    /// Pulls back one step. It is called once per step, last step first.
    fn pull(&mut self, step: usize, state: &Self::State) -> Result<()>;
}

/// The positions of the checkpoints.
#[derive(Debug)]
pub struct Schedule {
    steps: usize,
    /// Maximum number of checkpoints at the same time. The first state is not counted.
    slots: usize,
    /// `backward[s][n]`: the best split to reverse `n` steps with `s` slots, from their first state.
    backward: Vec<Vec<Split>>,
    /// `forward[s][n]`: like `backward`, if a forward pass, whose advances are not counted, can make the checkpoints.
    forward: Vec<Vec<Split>>,
}

/// Where a range of steps is split.
#[derive(Clone, Copy, Debug)]
struct Split {
    /// Number of advances that the reversal of the range needs.
    cost: u64,
    /// Position of the first checkpoint, in steps from the start of the range. 0 means no checkpoint.
    at: usize,
}

impl Split {
    /// The split of a range of at most one step, in which nothing is recomputed.
    const NONE: Self = Self { cost: 0, at: 0 };
}

impl Schedule {
    /// Plans `steps` steps with at most `slots` checkpoints. The first state is not counted.
    pub fn new(steps: usize, slots: usize) -> Self {
        let slots = slots.min(steps.saturating_sub(1));
        // Each step advances from the first state again: 0 + 1 + ... + (n - 1) advances.
        let without_slots: Vec<_> =
            (0..=steps as u64).map(|n| Split { cost: n * n.saturating_sub(1) / 2, at: 0 }).collect();
        let (mut backward, mut forward) = (vec![without_slots.clone()], vec![without_slots]);
        for s in 1..=slots {
            // Split at m: advance by m, reverse the n - m last steps with one slot less, then the first m steps with
            // all slots.
            let mut backward_row: Vec<Split> = vec![Split::NONE; 2.min(steps + 1)];
            for n in 2..=steps {
                let cost = |m: usize| m as u64 + backward[s - 1][n - m].cost + backward_row[m].cost;
                let best = (1..n).map(|m| Split { cost: cost(m), at: m }).min_by_key(|split| split.cost);
                backward_row.extend(best);
            }
            // As above, but the forward pass advances by m, and stores the checkpoints of the n - m last steps.
            let forward_split = |n: usize| {
                let cost = |m: usize| forward[s - 1][n - m].cost + backward_row[m].cost;
                let best = (1..n).map(|m| Split { cost: cost(m), at: m }).min_by_key(|split| split.cost);
                best.unwrap_or(Split::NONE)
            };
            let forward_row = (0..=steps).map(forward_split).collect();
            forward.push(forward_row);
            backward.push(backward_row);
        }
        Self { steps, slots, backward, forward }
    }

    /// Positions of the states to keep during the forward pass, ascending and including the first state (0).
    pub fn checkpoint_positions(&self) -> Vec<usize> {
        let (mut position, mut free_slots) = (0, self.slots);
        let mut positions = vec![0];
        while free_slots > 0 && self.steps - position > 1 {
            position += self.forward[free_slots][self.steps - position].at;
            positions.push(position);
            free_slots -= 1;
        }
        positions
    }

    /// Pulls back all steps. `checkpoints` are states with their positions, ascending from position 0: those of
    /// [`Schedule::checkpoint_positions`], or fewer.
    pub fn reverse<R: Reversible>(&self, work: &mut R, mut checkpoints: Vec<(usize, R::Checkpoint)>) -> Result<()> {
        let mut end = self.steps;
        while let Some((begin, checkpoint)) = checkpoints.pop() {
            let state = work.restore(checkpoint)?;
            if let Some((_, next)) = checkpoints.last_mut() {
                work.prefetch(next)?;
            }
            // `state` and the remaining checkpoints occupy a slot each, except the first state, which occupies none. It
            // is one of them: `checkpoints.len() + 1` states occupy `checkpoints.len()` slots. More checkpoints than
            // planned leave no slot free.
            let free_slots = self.slots.saturating_sub(checkpoints.len());
            self.reverse_range(work, begin, end, state, free_slots)?;
            end = begin;
        }
        Ok(())
    }

    /// Pulls back the steps `begin..end`, last step first. `state` is state `begin`; `slots` are free.
    fn reverse_range<R: Reversible>(
        &self,
        work: &mut R,
        begin: usize,
        end: usize,
        state: R::State,
        slots: usize,
    ) -> Result<()> {
        // Computes state `to` from state `begin`.
        let advance_to =
            |work: &mut R, to: usize| (begin..to).try_fold(state.clone(), |state, step| work.advance(step, &state));
        // Checkpoints `state`, reverses the later part of the range from a state in its middle, then the earlier part.
        if end - begin > 1 && slots > 0 {
            let middle = begin + self.backward[slots][end - begin].at;
            let state_at_middle = advance_to(work, middle)?;
            let held = work.hold(state)?;
            self.reverse_range(work, middle, end, state_at_middle, slots - 1)?;
            let state = work.restore(held)?;
            return self.reverse_range(work, begin, middle, state, slots);
        }
        for step in (begin..end).rev() {
            let state = advance_to(work, step)?;
            work.pull(step, &state)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use super::*;

    #[derive(Default)]
    struct Count {
        advances: usize,
        pulled: Vec<usize>,
    }
    impl Reversible for Count {
        type State = usize;
        type Checkpoint = usize;
        fn prefetch(&mut self, checkpoint: &mut usize) -> Result<()> {
            assert!(self.pulled.last().is_none_or(|last| *checkpoint < *last));
            Ok(())
        }
        fn hold(&mut self, state: usize) -> Result<usize> {
            Ok(state)
        }
        fn restore(&mut self, checkpoint: usize) -> Result<usize> {
            Ok(checkpoint)
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

    /// A state on the device, which counts how many there are, and the most that there were.
    struct Live(usize, Rc<Cell<(usize, usize)>>);
    impl Live {
        fn new(step: usize, count: &Rc<Cell<(usize, usize)>>) -> Rc<Self> {
            let (now, most) = count.get();
            count.set((now + 1, most.max(now + 1)));
            Rc::new(Self(step, count.clone()))
        }
    }
    impl Drop for Live {
        fn drop(&mut self) {
            let (now, most) = self.1.get();
            self.1.set((now - 1, most));
        }
    }

    /// Keeps checkpoints elsewhere, as offloading does.
    struct Offloading(Rc<Cell<(usize, usize)>>);
    impl Reversible for Offloading {
        type State = Rc<Live>;
        type Checkpoint = usize;
        fn prefetch(&mut self, _checkpoint: &mut usize) -> Result<()> {
            Ok(())
        }
        fn hold(&mut self, state: Rc<Live>) -> Result<usize> {
            Ok(state.0)
        }
        fn restore(&mut self, checkpoint: usize) -> Result<Rc<Live>> {
            Ok(Live::new(checkpoint, &self.0))
        }
        fn advance(&mut self, step: usize, _state: &Rc<Live>) -> Result<Rc<Live>> {
            Ok(Live::new(step + 1, &self.0))
        }
        fn pull(&mut self, _step: usize, _state: &Rc<Live>) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn only_the_state_in_use_and_two_of_a_recomputation_are_live_if_checkpoints_are_offloaded() {
        for steps in [5, 13, 21, 41] {
            let count = Rc::new(Cell::new((0, 0)));
            let schedule = Schedule::new(steps, 4);
            let checkpoints = schedule.checkpoint_positions().into_iter().map(|k| (k, k)).collect();
            schedule.reverse(&mut Offloading(count.clone()), checkpoints).unwrap();
            let (left, most) = count.get();
            assert!(left == 0 && most <= 3, "{steps} steps: {most} states");
        }
    }

    fn reverse(steps: usize, slots: usize, from_forward: bool) -> Count {
        let schedule = Schedule::new(steps, slots);
        let positions = if from_forward { schedule.checkpoint_positions() } else { vec![0] };
        assert!(positions.len() <= slots + 1);
        let mut count = Count::default();
        schedule.reverse(&mut count, positions.into_iter().map(|k| (k, k)).collect()).unwrap();
        count
    }

    #[test]
    fn each_step_is_pulled_once_from_its_own_state_in_reverse_order() {
        for steps in 1..40 {
            for slots in 0..6 {
                for from_forward in [false, true] {
                    let pulled = reverse(steps, slots, from_forward).pulled;
                    assert_eq!(pulled, (0..steps).rev().collect::<Vec<_>>());
                }
            }
        }
    }

    #[test]
    fn recomputation_falls_to_zero_with_a_slot_per_step() {
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
