//! Fuses GELU as exporters write it: the product of `x`, 0.5 and `sum = 1 + erf(x / sqrt(2))`, in any order.

use super::super::graph::Node;
use super::super::ops::{Arithmetic, Role, exact_gelu};
use super::index::GraphIndex;
use super::{Fusion, only_output};

/// Greatest difference of a factor from 1 / sqrt(2): exporters write it with six digits or more.
const FACTOR_TOLERANCE: f32 = 1e-6;

/// Returns the chain around the Erf node at `index` and the Gelu node that replaces it. `None` if the chain does not
/// compute a GELU.
pub fn gelu_at(graph_index: &GraphIndex, index: usize) -> Option<Fusion> {
    let erf = &graph_index.graph.nodes[index];
    let Role::Erf = erf.operator.role() else { return None };
    let argument = erf.inputs.first().copied().flatten()?;
    let scaling = graph_index.producers[argument]?;
    let (x, factor) = graph_index.times_constant(scaling)?;
    if graph_index.consumers[argument] != [index] || (factor - std::f32::consts::FRAC_1_SQRT_2).abs() > FACTOR_TOLERANCE
    {
        return None;
    }
    let (plus_one, sum) = graph_index.only_consumer(only_output(erf)?)?;
    if !graph_index.adds_one(plus_one) {
        return None;
    }
    // The multiplication of the sum by one of the other two factors, and the slot of the product.
    let (multiplication, product) = graph_index.only_consumer(sum)?;
    let nodes = [scaling, index, plus_one, multiplication];
    // The fusion of these nodes and the other multiplication; `y` is the slot of the GELU.
    let fused = |other_multiplication: usize, y: usize| {
        let node = Node {
            name: erf.name.clone(),
            kind: "Gelu".to_owned(),
            operator: exact_gelu(),
            inputs: vec![Some(x)],
            outputs: vec![Some(y)],
        };
        Some((nodes.iter().copied().chain([other_multiplication]).collect(), node))
    };
    // (sum * 0.5) * x
    if graph_index.times_constant(multiplication) == Some((sum, 0.5)) {
        let (last, y) = graph_index.only_consumer(product)?;
        return if graph_index.other_operand(last, Arithmetic::Mul, product)? == x { fused(last, y) } else { None };
    }
    let second_factor = graph_index.other_operand(multiplication, Arithmetic::Mul, sum)?;
    // (sum * x) * 0.5
    if second_factor == x {
        let (last, y) = graph_index.only_consumer(product)?;
        return if graph_index.times_constant(last)? == (product, 0.5) { fused(last, y) } else { None };
    }
    // sum * (x * 0.5)
    let halving = graph_index.producers[second_factor]?;
    let is_half_x =
        graph_index.times_constant(halving)? == (x, 0.5) && graph_index.consumers[second_factor] == [multiplication];
    if is_half_x { fused(halving, product) } else { None }
}
