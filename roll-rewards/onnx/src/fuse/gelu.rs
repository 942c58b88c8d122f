//! Fuses GELU as exporters write it, `x * (1 + erf(x / sqrt(2))) / 2`, with its factors in any order.

use super::super::graph::Node;
use super::super::ops::{Arithmetic, Role, exact_gelu};
use super::index::GraphIndex;
use super::{Fusion, only_output};

/// The chain around the Erf node at `index`, if it computes a GELU, and the node that replaces it.
pub fn gelu_at(uses: &GraphIndex, index: usize) -> Option<Fusion> {
    let erf = &uses.graph.nodes[index];
    let Role::Erf = erf.operator.role() else { return None };
    let argument = erf.inputs.first().copied().flatten()?;
    let divided = uses.producers[argument]?;
    let (x, factor) = uses.scaled(divided)?;
    if uses.consumers[argument] != [index] || (factor - std::f32::consts::FRAC_1_SQRT_2).abs() > 1e-6 {
        return None;
    }
    let (plus, sum) = uses.only_consumer(only_output(erf)?)?;
    if !uses.adds_one(plus) {
        return None;
    }
    let (product, first) = uses.only_consumer(sum)?;
    let nodes = [divided, index, plus, product];
    let fused = |last: usize, y: usize| {
        let node = Node {
            name: erf.name.clone(),
            kind: "Gelu".to_owned(),
            operator: exact_gelu(),
            inputs: vec![Some(x)],
            outputs: vec![Some(y)],
        };
        Some((nodes.iter().copied().chain([last]).collect(), node))
    };
    if uses.scaled(product) == Some((sum, 0.5)) {
        let (last, y) = uses.only_consumer(first)?;
        return if uses.other_operand(last, Arithmetic::Mul, first)? == x { fused(last, y) } else { None };
    }
    let mate = uses.other_operand(product, Arithmetic::Mul, sum)?;
    if mate == x {
        let (last, y) = uses.only_consumer(first)?;
        return if uses.scaled(last)? == (first, 0.5) { fused(last, y) } else { None };
    }
    let half = uses.producers[mate]?;
    let is_half = uses.scaled(half)? == (x, 0.5) && uses.consumers[mate] == [product];
    if is_half { fused(half, first) } else { None }
}
