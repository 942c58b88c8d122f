//! Runs the nodes of a graph in order, and drops every value after its last use.

use super::error::{OnnxError, Problem, no_panic};
use super::graph::{Graph, Node};
use super::ops::Run;
use super::value::{ElementLimit, Value, elements};

/// Greatest number of elements of a value, per element of the graph's inputs. The limit of [`element_limit`] adds the
/// elements of constants and [`FOR_ANY_INPUT`]. Real networks are far below: a typical first layer maps 3 channels to
/// 64.
const PER_INPUT_ELEMENT: usize = 256;
/// Number of elements that a value may have for any input: 64 MiB of f32.
const FOR_ANY_INPUT: usize = 1 << 24;
/// Greatest number of elements of all values in a run together, as a multiple of the limit for one value.
const TOTAL_FACTOR: usize = 16;

/// Computes the outputs `wanted_outputs` (indices into the graph's outputs) for `inputs`, one per input of the graph.
///
/// `items` is the number of stacked items if the graph was exported for one item; see `batch`.
pub(super) fn execute(
    graph: &Graph,
    inputs: &[Value],
    wanted_outputs: std::ops::Range<usize>,
    items: Option<usize>,
) -> Result<Vec<Value>, OnnxError> {
    let element_limit = element_limit(graph, inputs);
    let mut budget = element_limit.saturating_mul(TOTAL_FACTOR);
    // A guard: the limit applies until the end of this function.
    let _limit = ElementLimit::new(element_limit);
    let wanted_slots = &graph.outputs[wanted_outputs];
    let liveness = Liveness::new(graph, wanted_slots);
    let mut values: Vec<Option<Value>> = vec![None; graph.slot_count];
    for (&slot, input) in graph.input_slots.iter().zip(inputs) {
        values[slot] = Some(input.clone());
    }
    for (index, node) in graph.nodes.iter().enumerate() {
        if !liveness.needed[index] {
            continue;
        }
        let outputs = {
            let inputs: Vec<Option<&Value>> =
                node.inputs.iter().map(|slot| slot.and_then(|slot| value_in(slot, &values, graph))).collect();
            run_node(node, &inputs, Run { items }).map_err(|problem| graph.node_error(node, problem))?
        };
        let computed: usize = outputs.iter().map(element_count).sum();
        budget = budget.checked_sub(computed).ok_or_else(|| {
            let problem = format!("the values up to here have more than {TOTAL_FACTOR} times {element_limit} elements");
            graph.node_error(node, problem.into())
        })?;
        for (slot, value) in node.outputs.iter().zip(outputs) {
            if let Some(slot) = slot {
                values[*slot] = Some(value);
            }
        }
        for slot in node.inputs.iter().chain(&node.outputs).flatten() {
            if liveness.last_use[*slot] <= index {
                values[*slot] = None;
            }
        }
    }
    wanted_slots
        .iter()
        .map(|&slot| {
            value_in(slot, &values, graph).cloned().ok_or_else(|| OnnxError::BadFile {
                path: graph.path.clone(),
                problem: "an output was not computed".into(),
            })
        })
        .collect()
}

/// The greatest number of elements that one value may have in a run with these inputs.
fn element_limit(graph: &Graph, inputs: &[Value]) -> usize {
    let input_elements: usize = inputs.iter().map(element_count).sum();
    let weights = graph.constant_elements().saturating_add(graph.fused_elements);
    input_elements.saturating_mul(PER_INPUT_ELEMENT).saturating_add(weights).saturating_add(FOR_ANY_INPUT)
}

/// The value in `slot`: a computed one, or a constant.
fn value_in<'a>(slot: usize, computed: &'a [Option<Value>], graph: &'a Graph) -> Option<&'a Value> {
    computed[slot].as_ref().or(graph.constants[slot].as_ref().map(|constant| &constant.value))
}

fn element_count(value: &Value) -> usize {
    value.shape().iter().product()
}

/// Runs one node and checks the sizes of its outputs.
pub(super) fn run_node(node: &Node, inputs: &[Option<&Value>], run: Run) -> Result<Vec<Value>, Problem> {
    if inputs.iter().flatten().any(|v| v.shape().contains(&0) && matches!(v, Value::Float(_))) {
        return Err("an input is empty; empty tensors are not supported".into());
    }
    let outputs = no_panic(|| node.operator.run(inputs, run))?;
    for value in &outputs {
        elements(value.shape())?;
    }
    Ok(outputs)
}

/// The nodes that the wanted outputs depend on, and the last use of each value.
struct Liveness {
    /// Whether a wanted output depends on each node.
    needed: Vec<bool>,
    /// The last node that reads each slot, `usize::MAX` for a wanted output, 0 for a value that nothing reads.
    last_use: Vec<usize>,
}

impl Liveness {
    fn new(graph: &Graph, wanted_slots: &[usize]) -> Self {
        let mut used = vec![false; graph.slot_count];
        let mut last_use = vec![0; graph.slot_count];
        for &slot in wanted_slots {
            used[slot] = true;
            last_use[slot] = usize::MAX;
        }
        let mut needed = vec![false; graph.nodes.len()];
        for (index, node) in graph.nodes.iter().enumerate().rev() {
            if !node.outputs.iter().flatten().any(|slot| used[*slot]) {
                continue;
            }
            needed[index] = true;
            for &slot in node.inputs.iter().flatten() {
                used[slot] = true;
                last_use[slot] = last_use[slot].max(index);
            }
        }
        Self { needed, last_use }
    }
}
