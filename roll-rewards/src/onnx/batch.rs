//! Whether a graph that was exported for a batch of one may run many items at once.
//!
//! A node *carries items* when its result for N items stacked along axis 0 is the N results for single items stacked
//! along axis 0. Each operator says so by itself, from the ranks of its inputs ([`Operator::carries`]); a graph whose
//! nodes all do carries items by induction: for one item every value has axis 0 of length 1, for N items of length N.
//! Reshape and Resize then put N where the file has a constant 1. Anything not proven runs item by item.
//!
//! [`Operator::carries`]: super::ops::Operator::carries

use super::graph::Graph;
use super::ops::Carried;

/// Whether every node of `graph` carries items, given the rank of its inputs.
pub(super) fn carries_items(graph: &Graph, input_rank: usize) -> bool {
    let mut ranks: Vec<Option<usize>> = vec![None; graph.slots];
    for &slot in &graph.input_slots {
        ranks[slot] = Some(input_rank);
    }
    for node in &graph.nodes {
        let inputs: Option<Vec<Carried>> = node
            .inputs
            .iter()
            .map(|slot| match slot {
                None => Some(Carried::Absent),
                Some(slot) => match &graph.constants[*slot] {
                    Some(constant) => Some(Carried::Constant(&constant.value)),
                    None => ranks[*slot].map(Carried::Items),
                },
            })
            .collect();
        let Some(rank) = inputs.and_then(|inputs| node.operator.carries(&inputs)) else { return false };
        for slot in node.outputs.iter().flatten() {
            ranks[*slot] = Some(rank);
        }
    }
    graph.outputs.iter().all(|slot| ranks[*slot].is_some())
}
