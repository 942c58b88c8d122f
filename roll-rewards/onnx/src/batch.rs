//! Decides whether a graph that was exported for a batch of one can run a whole batch at once.
//!
//! A node *is batchable* if its output for N items stacked along axis 0 equals its N outputs for single items, stacked
//! along axis 0. Each operator decides this from the ranks of its inputs ([`Operator::batched_rank`]). If all nodes are
//! batchable, the graph is, by induction: axis 0 of every value has length 1 for one item and N for N items. For N
//! items, Reshape and Resize replace a constant 1 in the file by N. Graphs without this proof run item by item.
//!
//! [`Operator::batched_rank`]: super::ops::Operator::batched_rank

use super::graph::Graph;
use super::ops::BatchInput;

/// Whether every node of `graph` is batchable. `input_rank` is the rank of the graph's inputs.
pub(super) fn is_batchable(graph: &Graph, input_rank: usize) -> bool {
    // The rank of the value in each slot, if it is proven to have the batch along axis 0.
    let mut ranks: Vec<Option<usize>> = vec![None; graph.slot_count];
    for &slot in &graph.input_slots {
        ranks[slot] = Some(input_rank);
    }
    for node in &graph.nodes {
        let inputs: Option<Vec<BatchInput>> = node
            .inputs
            .iter()
            .map(|slot| match slot {
                None => Some(BatchInput::Absent),
                Some(slot) => match &graph.constants[*slot] {
                    Some(constant) => Some(BatchInput::Constant(&constant.value)),
                    None => ranks[*slot].map(BatchInput::Batched),
                },
            })
            .collect();
        let Some(rank) = inputs.and_then(|inputs| node.operator.batched_rank(&inputs)) else { return false };
        for slot in node.outputs.iter().flatten() {
            ranks[*slot] = Some(rank);
        }
    }
    graph.outputs.iter().all(|slot| ranks[*slot].is_some())
}
