//! The rows of a data set that each step takes.

use roll_core::StepContext;

/// The rows of this rank in this step, of a data set of `count` rows. The passes over the data form one endless
/// sequence, each pass in its own order if they are to be shuffled; a step takes the next `batch_size` rows of it, and
/// each rank a contiguous part of these.
pub(crate) fn rows_of_step(ctx: &StepContext<'_>, count: usize, batch_size: usize, shuffle: bool) -> Vec<usize> {
    let (rank, ranks) = (ctx.strategy.ranks().all.rank().0, ctx.strategy.ranks().all.world_size());
    let share = (batch_size / ranks) as u64;
    let first = ctx.step * batch_size as u64 + rank as u64 * share;
    // The pass of the latest position and its order. Most positions are of the same pass.
    let mut latest_order: Option<(u64, Vec<usize>)> = None;
    let row = |position: u64| {
        let (pass, within_pass) = (position / count as u64, (position % count as u64) as usize);
        if !shuffle {
            return within_pass;
        }
        match &mut latest_order {
            Some((its_pass, order)) if *its_pass == pass => order[within_pass],
            // The first position, or a position of another pass.
            other => other.insert((pass, ctx.noise.permutation(pass, count))).1[within_pass],
        }
    };
    (first..first + share).map(row).collect()
}
