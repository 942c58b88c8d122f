//! Runs the nodes of a graph in order and drops every value after its last use.

use super::error::{OnnxError, Problem, no_panic};
use super::graph::{Graph, Node};
use super::ops::Run;
use super::value::{Allowed, Value, elements};

/// A value may have this many elements for each of the inputs', as many as the file has numbers, and [`FREE`]. Networks
/// that people use stay far below: a first layer makes 64 channels of 3.
const FOR_EACH_INPUT: usize = 256;
/// Elements that a value may have whatever the inputs are: 64 MiB.
const FREE: usize = 1 << 24;
/// All values of a run together may have this many times the elements of one.
const TOGETHER: usize = 16;

/// Values of the outputs `wanted` (indices into the graph's outputs) for `inputs`, one for each of the graph's.
///
/// `items` is the number of stacked items when the graph was written for one (see `batch`).
pub(super) fn execute(
    graph: &Graph,
    inputs: &[Value],
    wanted: std::ops::Range<usize>,
    items: Option<usize>,
) -> Result<Vec<Value>, OnnxError> {
    let allowed = allowed(graph, inputs);
    let mut left = allowed.saturating_mul(TOGETHER);
    let _allowed = Allowed::new(allowed);
    let wanted = &graph.outputs[wanted];
    let plan = Plan::new(graph, wanted);
    let mut values: Vec<Option<Value>> = vec![None; graph.slots];
    for (&slot, input) in graph.input_slots.iter().zip(inputs) {
        values[slot] = Some(input.clone());
    }
    for (index, node) in graph.nodes.iter().enumerate() {
        if !plan.needed[index] {
            continue;
        }
        let outputs = {
            let inputs: Vec<Option<&Value>> = node
                .inputs
                .iter()
                .map(|slot| slot.and_then(|s| values[s].as_ref().or(graph.constants[s].as_ref().map(|c| &c.value))))
                .collect();
            run_node(node, &inputs, Run { items }).map_err(|problem| graph.node_error(node, problem))?
        };
        let made: usize = outputs.iter().map(count).sum();
        left = left.checked_sub(made).ok_or_else(|| {
            let problem = format!("the values up to here have more than {TOGETHER} times {allowed} elements");
            graph.node_error(node, problem.into())
        })?;
        for (slot, value) in node.outputs.iter().zip(outputs) {
            if let Some(slot) = slot {
                values[*slot] = Some(value);
            }
        }
        for slot in node.inputs.iter().chain(&node.outputs).flatten() {
            if plan.last_use[*slot] <= index {
                values[*slot] = None;
            }
        }
    }
    wanted
        .iter()
        .map(|&slot| {
            let value = values[slot].as_ref().or(graph.constants[slot].as_ref().map(|c| &c.value));
            value.cloned().ok_or_else(|| OnnxError::BadFile {
                path: graph.path.clone(),
                problem: "an output was not computed".into(),
            })
        })
        .collect()
}

/// Elements that one value may have.
fn allowed(graph: &Graph, inputs: &[Value]) -> usize {
    let given: usize = inputs.iter().map(count).sum();
    let weights: usize = graph.constants.iter().flatten().map(|constant| count(&constant.value)).sum();
    let weights = weights.saturating_add(graph.fused);
    given.saturating_mul(FOR_EACH_INPUT).saturating_add(weights).saturating_add(FREE)
}

fn count(value: &Value) -> usize {
    value.shape().iter().product()
}

/// Runs one node and checks what it gives.
pub(super) fn run_node(node: &Node, inputs: &[Option<&Value>], run: Run) -> Result<Vec<Value>, Problem> {
    if inputs.iter().flatten().any(|v| v.shape().contains(&0) && matches!(v, Value::Float(_))) {
        return Err("an input is empty; empty tensors are not computed with".into());
    }
    let outputs = no_panic(|| node.operator.run(inputs, run))?;
    for value in &outputs {
        elements(value.shape())?;
    }
    Ok(outputs)
}

/// Which nodes the wanted outputs need, and when each value is used last.
struct Plan {
    needed: Vec<bool>,
    last_use: Vec<usize>,
}

impl Plan {
    fn new(graph: &Graph, wanted: &[usize]) -> Self {
        let mut used = vec![false; graph.slots];
        let mut last_use = vec![0; graph.slots];
        for &slot in wanted {
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
