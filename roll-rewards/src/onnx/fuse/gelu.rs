//! GELU as exporters write it: `x * (1 + erf(x / sqrt(2))) / 2`, its factors in any order.

use super::super::graph::{Graph, Node};
use super::super::ops::{Arithmetic, Role, exact_gelu};
use super::super::value::Value;
use super::{Changes, constant, only_output, readers};

/// `graph` with one node for each GELU.
pub fn fuse(graph: Graph) -> Graph {
    let readers = readers(&graph);
    let mut makers = vec![None; graph.slots];
    for (index, node) in graph.nodes.iter().enumerate() {
        node.outputs.iter().flatten().for_each(|slot| makers[*slot] = Some(index));
    }
    let search = Search { graph: &graph, readers, makers };
    let mut changes = Changes::none(&graph);
    for index in 0..graph.nodes.len() {
        let Some(found) = search.at(index) else { continue };
        if found.nodes.iter().any(|&i| changes.gone[i]) {
            continue;
        }
        let name = graph.nodes[index].name.clone();
        let (inputs, outputs) = (vec![Some(found.x)], vec![Some(found.y)]);
        changes.replace(&found.nodes, Node { name, kind: "Gelu".to_owned(), operator: exact_gelu(), inputs, outputs });
    }
    changes.apply(graph)
}

/// A chain that is a GELU of `x`.
struct Found {
    x: usize,
    y: usize,
    nodes: Vec<usize>,
}

struct Search<'a> {
    graph: &'a Graph,
    readers: Vec<Vec<usize>>,
    /// The node that gives each value.
    makers: Vec<Option<usize>>,
}

impl Search<'_> {
    /// The chain around the Erf at `index`, if it is one.
    fn at(&self, index: usize) -> Option<Found> {
        let erf = &self.graph.nodes[index];
        let Role::Erf = erf.operator.role() else { return None };
        let argument = erf.inputs.first().copied().flatten()?;
        let divided = self.makers[argument]?;
        let (x, factor) = self.scaled(divided)?;
        if self.readers[argument] != [index] || (factor - std::f32::consts::FRAC_1_SQRT_2).abs() > 1e-6 {
            return None;
        }
        let (plus, sum) = self.only_reader(only_output(erf)?)?;
        if !self.adds_one(plus) {
            return None;
        }
        let (product, first) = self.only_reader(sum)?;
        let nodes = vec![divided, index, plus, product];
        let done = |more: usize, y: usize| Some(Found { x, y, nodes: nodes.iter().copied().chain([more]).collect() });
        if self.scaled(product) == Some((sum, 0.5)) {
            let (last, y) = self.only_reader(first)?;
            return if self.other(last, Arithmetic::Mul, first)? == x { done(last, y) } else { None };
        }
        let mate = self.other(product, Arithmetic::Mul, sum)?;
        if mate == x {
            let (last, y) = self.only_reader(first)?;
            return if self.scaled(last)? == (first, 0.5) { done(last, y) } else { None };
        }
        let half = self.makers[mate]?;
        let is_half = self.scaled(half)? == (x, 0.5) && self.readers[mate] == [product];
        if is_half { done(half, first) } else { None }
    }

    /// The only node that reads a value, and what it gives.
    fn only_reader(&self, slot: usize) -> Option<(usize, usize)> {
        match *self.readers[slot].as_slice() {
            [reader] => Some((reader, only_output(self.graph.nodes.get(reader)?)?)),
            _ => None,
        }
    }

    /// The other operand of a node that is this function of `slot` and it.
    fn other(&self, node: usize, arithmetic: Arithmetic, slot: usize) -> Option<usize> {
        let node = &self.graph.nodes[node];
        match (node.operator.role(), node.inputs.as_slice()) {
            (Role::Two(found), [Some(a), Some(b)]) if found == arithmetic && a != b => match slot {
                slot if slot == *a => Some(*b),
                slot if slot == *b => Some(*a),
                _ => None,
            },
            _ => None,
        }
    }

    /// What a node multiplies with a number, and the number.
    fn scaled(&self, node: usize) -> Option<(usize, f32)> {
        let node = &self.graph.nodes[node];
        let (Role::Two(arithmetic), [Some(a), Some(b)]) = (node.operator.role(), node.inputs.as_slice()) else {
            return None;
        };
        match (arithmetic, self.number(*a), self.number(*b)) {
            (Arithmetic::Mul, None, Some(number)) => Some((*a, number)),
            (Arithmetic::Mul, Some(number), None) => Some((*b, number)),
            (Arithmetic::Div, None, Some(number)) => Some((*a, 1.0 / number)),
            _ => None,
        }
    }

    fn adds_one(&self, node: usize) -> bool {
        let node = &self.graph.nodes[node];
        let is_sum = matches!(node.operator.role(), Role::Two(Arithmetic::Add));
        is_sum && node.inputs.len() == 2 && node.inputs.iter().flatten().any(|&slot| self.number(slot) == Some(1.0))
    }

    /// A constant that is one number.
    fn number(&self, slot: usize) -> Option<f32> {
        let floats = self.graph.constants[slot].as_ref()?.floats.as_deref()?;
        match (floats, constant(self.graph, slot)?) {
            ([number], Value::Float(tensor)) if tensor.shape().len() <= 1 => Some(*number),
            _ => None,
        }
    }
}
