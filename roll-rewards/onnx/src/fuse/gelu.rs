//! Fuses GELU as exporters write it: the product of `x`, 0.5 and `sum = 1 + erf(x / sqrt(2))`, in any order.

use super::super::graph::Node;
use super::super::ops::{Arithmetic, Role, exact_gelu};
use super::index::GraphIndex;
use super::{Fusion, only_output};

/// Returns the chain around the Erf node at `index` and the Gelu node that replaces it. `None` if the chain does not
/// compute a GELU.
pub fn gelu_at(uses: &GraphIndex, index: usize) -> Option<Fusion> {
    let erf = &uses.graph.nodes[index];
    let Role::Erf = erf.operator.role() else { return None };
    let argument = erf.inputs.first().copied().flatten()?;
    let scaling = uses.producers[argument]?;
    let (x, factor) = uses.times_constant(scaling)?;
    if uses.consumers[argument] != [index] || (factor - std::f32::consts::FRAC_1_SQRT_2).abs() > 1e-6 {
        return None;
    }
    let (plus_one, sum) = uses.only_consumer(only_output(erf)?)?;
    if !uses.adds_one(plus_one) {
        return None;
    }
    // The multiplication of the sum by one of the other two factors, and the slot of the product.
    let (multiplication, product) = uses.only_consumer(sum)?;
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
    if uses.times_constant(multiplication) == Some((sum, 0.5)) {
        let (last, y) = uses.only_consumer(product)?;
        return if uses.other_operand(last, Arithmetic::Mul, product)? == x { fused(last, y) } else { None };
    }
    let second_factor = uses.other_operand(multiplication, Arithmetic::Mul, sum)?;
    // (sum * x) * 0.5
    if second_factor == x {
        let (last, y) = uses.only_consumer(product)?;
        return if uses.times_constant(last)? == (product, 0.5) { fused(last, y) } else { None };
    }
    // sum * (x * 0.5)
    let halving = uses.producers[second_factor]?;
    let is_half_x = uses.times_constant(halving)? == (x, 0.5) && uses.consumers[second_factor] == [multiplication];
    if is_half_x { fused(halving, product) } else { None }
}
