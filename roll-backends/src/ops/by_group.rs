//! Row-wise operators for groups of tokens, e.g. tokens that share a timestep. Some operands have one row per group
//! (the gate of the timestep); all other operands have one row per token.

use super::Kernels;
use super::expression::Expression;
use super::operator::{Operator, Pullback};
use crate::backend::{TensorMetadata, tensor::FloatTensor as Floats};

/// Applies an operator to each group of rows. The operands that `grouped` marks are `[G, D]` for G groups, and each
/// group reads its row of them. Nothing is expanded to one row per token.
pub struct ByGroup<O, const N: usize> {
    /// The operator. It must accept a single row for each `grouped` operand.
    pub operator: O,
    /// Number of rows of each group; a group may be empty.
    pub groups: Vec<usize>,
    /// Marks the operands with one row per group. The other operands and the result have the rows of all groups.
    pub grouped: [bool; N],
}

impl<O: Operator<N> + Clone, const N: usize> Operator<N> for ByGroup<O, N> {
    fn record<B: Kernels>(self, operands: [Floats<B>; N], wanted: [bool; N]) -> (Floats<B>, impl Pullback<B, N>) {
        let Self { operator, groups, grouped } = self;
        let operands = operands.map(Expression::<B>);
        let (mut start, mut results, mut pullbacks) = (0, Vec::new(), Vec::new());
        for (group, count) in groups.into_iter().enumerate() {
            let rows = start..start + count;
            start = rows.end;
            if rows.is_empty() {
                pullbacks.push(None);
                continue;
            }
            let of_group = std::array::from_fn(|i| {
                let rows_of_operand = if grouped[i] { group..group + 1 } else { rows.clone() };
                operands[i].clone().narrow(0, rows_of_operand).0
            });
            let (result, pullback) = operator.clone().record::<B>(of_group, wanted);
            results.push(Expression::<B>(result));
            pullbacks.push(Some((rows, pullback)));
        }
        let width = operands[0].0.shape()[1];
        let y = Expression::<B>::cat(results, 0);
        (y.0, move |d_y: Floats<B>| {
            let d_y = Expression::<B>(d_y);
            // The gradient of each operand, in one part per group.
            let mut gradients: [Vec<Expression<B>>; N] = std::array::from_fn(|_| Vec::new());
            for recorded in pullbacks {
                let cotangents = match recorded {
                    Some((rows, pullback)) => pullback(d_y.clone().narrow(0, rows).0).map(|d| d.map(Expression)),
                    // An empty group: its row of a grouped operand was not read, so that the row's gradient is zero.
                    None => std::array::from_fn(|i| (wanted[i] && grouped[i]).then(|| d_y.zeros([1, width]))),
                };
                gradients.iter_mut().zip(cotangents).for_each(|(parts, part)| parts.extend(part));
            }
            gradients.map(|parts| (!parts.is_empty()).then(|| Expression::cat(parts, 0).0))
        })
    }
}
