//! Row-wise operators whose rows are in groups, each with its own row of the other operands.

use super::Kernels;
use super::expression::Expression;
use super::operator::{Operator, Pullback};
use crate::backend::{TensorMetadata, tensor::FloatTensor as Floats};

/// Applies an operator to each group of rows, with one row of the operands that `grouped` marks: `[G, D]` for G groups.
/// No operand is expanded to a row for each row of the others.
pub struct ByGroup<O, const N: usize> {
    /// The operator, which takes operands of one row.
    pub operator: O,
    /// Number of rows of each group; some may be zero.
    pub groups: Vec<usize>,
    /// The operands with one row for each group. The others, and the result, have the rows of all groups.
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
            let part = std::array::from_fn(|i| match grouped[i] {
                true => operands[i].clone().narrow(0, group..group + 1).0,
                false => operands[i].clone().narrow(0, rows.clone()).0,
            });
            let (result, pullback) = operator.clone().record::<B>(part, wanted);
            results.push(Expression::<B>(result));
            pullbacks.push(Some((rows, pullback)));
        }
        let width = operands[0].0.shape()[1];
        let y = Expression::<B>::cat(results, 0);
        (y.0, move |d_y: Floats<B>| {
            let d_y = Expression::<B>(d_y);
            let mut parts: [Vec<Expression<B>>; N] = std::array::from_fn(|_| Vec::new());
            for recorded in pullbacks {
                let cotangents = match recorded {
                    Some((rows, pullback)) => pullback(d_y.clone().narrow(0, rows).0).map(|d| d.map(Expression)),
                    // A row that no other row has read.
                    None => std::array::from_fn(|i| (wanted[i] && grouped[i]).then(|| d_y.zeros([1, width]))),
                };
                parts.iter_mut().zip(cotangents).for_each(|(parts, part)| parts.extend(part));
            }
            parts.map(|parts| (!parts.is_empty()).then(|| Expression::cat(parts, 0).0))
        })
    }
}
