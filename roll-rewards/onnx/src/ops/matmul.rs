//! Matrix products.

use burn_tensor::Tensor;
use roll_backends::NdTensor;
use roll_backends::ops::{linear, product};

use super::super::attributes::OperatorSpec;
use super::super::error::Problem;
use super::super::value::{Value, elements, reshaped};
use super::{BatchInput, Built, Operator, Role, Run, broadcast, input, only_first_batched};

/// The matrix product of the last two axes; the axes before them broadcast.
#[derive(Debug)]
struct MatMul;

pub(super) fn matmul(spec: &mut OperatorSpec) -> Built {
    spec.check_arity(2..=2, 1)?;
    Ok(Box::new(MatMul))
}

impl Operator for MatMul {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let (a, b) = (input(inputs, 0)?.float()?, input(inputs, 1)?.float()?);
        let misfit = || Problem(format!("{:?} and {:?} do not multiply", a.shape(), b.shape()));
        // A vector is a row on the left and a column on the right; the added axis is removed from the result.
        let (mut a_shape, mut b_shape) = (a.shape().to_vec(), b.shape().to_vec());
        let (a_is_vector, b_is_vector) = (a_shape.len() == 1, b_shape.len() == 1);
        if a_is_vector {
            a_shape.insert(0, 1);
        }
        if b_is_vector {
            b_shape.push(1);
        }
        let ([a_batch @ .., m, k], [b_batch @ .., k_b, n]) = (a_shape.as_slice(), b_shape.as_slice()) else {
            return Err(misfit());
        };
        if k != k_b {
            return Err(misfit());
        }
        let batch = broadcast::shape(a_batch, b_batch)?;
        let mut shape = batch.clone();
        if !a_is_vector {
            shape.push(*m);
        }
        if !b_is_vector {
            shape.push(*n);
        }
        let count = elements(&shape)?;
        let (a_count, b_count) = (elements(a_batch)?, elements(b_batch)?);
        let batch_count = elements(&batch)?;
        let flat = if b_count == 1 {
            // One matrix on the right: the rows of all matrices on the left are one matrix.
            let a_rows = a.flat().clone().reshape([a_count * m, *k]);
            product(a_rows, b.flat().clone().reshape([*k, *n])).reshape([count])
        } else {
            // Whether the tensor library's product broadcasts these batches by itself.
            let library_broadcasts = b_count == batch_count && (a_count == batch_count || a_count == 1);
            // The matrices of `x`; one for every item of the batch, unless the library broadcasts them.
            let matrices = |x: &NdTensor, x_batch: &[usize], x_count: usize, matrix_shape: [usize; 2]| {
                let [rows, columns] = matrix_shape;
                if library_broadcasts {
                    return Ok(x.flat().clone().reshape([x_count, rows, columns]));
                }
                let x = reshaped(x, [x_batch, &matrix_shape].concat())?;
                let repeated = broadcast::expand(&x, &[batch.as_slice(), &matrix_shape].concat())?;
                Ok::<Tensor<3>, Problem>(repeated.flat().clone().reshape([batch_count, rows, columns]))
            };
            let a_matrices = matrices(a, a_batch, a_count, [*m, *k])?;
            a_matrices.matmul(matrices(b, b_batch, b_count, [*k, *n])?).reshape([count])
        };
        Ok(vec![Value::Float(NdTensor::from_flat(flat, shape))])
    }

    fn role(&self) -> Role<'_> {
        Role::MatMul
    }

    fn batched_rank(&self, inputs: &[BatchInput]) -> Option<usize> {
        match inputs {
            [BatchInput::Batched(rank @ 2..), BatchInput::Constant(b)] if b.shape().len() == 2 => Some(*rank),
            [BatchInput::Batched(a @ 3..), BatchInput::Batched(b)] if a == b => Some(*a),
            _ => None,
        }
    }
}

/// Input 0 times a constant matrix, plus a constant row; created by [`super::super::fuse`].
#[derive(Debug)]
pub(in super::super) struct Linear {
    /// Weight, `[out, in]`.
    weight: Tensor<2>,
    bias: Tensor<1>,
}

impl Linear {
    /// Creates the operator from a weight `[in, out]` and a bias `[out]`; `None` if they have other shapes.
    pub fn new(weight: &NdTensor, bias: &NdTensor) -> Option<Self> {
        let [inputs, outputs] = *weight.shape() else { return None };
        if bias.shape() != [outputs] || inputs == 0 || outputs == 0 {
            return None;
        }
        let transposed = weight.flat().clone().reshape([inputs, outputs]).transpose();
        // The reshapes move the elements in memory, now instead of in every product.
        let weight = transposed.reshape([inputs * outputs]).reshape([outputs, inputs]);
        Some(Self { weight, bias: bias.flat().clone() })
    }
}

impl Operator for Linear {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let x = input(inputs, 0)?.float()?;
        let [outputs, width] = self.weight.dims();
        // All axes but the last count rows; a vector is one row.
        let Some((_, row_axes)) = x.shape().split_last().filter(|(last, _)| **last == width) else {
            return Err(format!("{:?} and [{width}, {outputs}] do not multiply", x.shape()).into());
        };
        let shape = [row_axes, &[outputs]].concat();
        elements(&shape)?;
        let rows = x.flat().clone().reshape([elements(row_axes)?, width]);
        let y = linear(rows, self.weight.clone(), Some(self.bias.clone()));
        Ok(vec![Value::Float(NdTensor::from_flat(y.reshape([elements(&shape)?]), shape))])
    }

    fn batched_rank(&self, inputs: &[BatchInput]) -> Option<usize> {
        only_first_batched(inputs).filter(|rank| *rank >= 2)
    }
}

/// `y = alpha * A * B + beta * C`, where A and B may be transposed. Inputs 0 to 2 are A, B and C.
#[derive(Debug)]
struct Gemm {
    alpha: f32,
    beta: f32,
    transpose_a: bool,
    transpose_b: bool,
}

pub(super) fn gemm(spec: &mut OperatorSpec) -> Built {
    spec.check_arity(2..=3, 1)?;
    let attributes = &mut spec.attributes;
    Ok(Box::new(Gemm {
        alpha: attributes.float("alpha")?.unwrap_or(1.0),
        beta: attributes.float("beta")?.unwrap_or(1.0),
        transpose_a: attributes.flag("transA")?,
        transpose_b: attributes.flag("transB")?,
    }))
}

impl Operator for Gemm {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let matrix = |index: usize, transpose: bool| -> Result<Tensor<2>, Problem> {
            let matrix = input(inputs, index)?.float()?.rank::<2>()?;
            Ok(if transpose { matrix.transpose() } else { matrix })
        };
        let (a, b) = (matrix(0, self.transpose_a)?, matrix(1, self.transpose_b)?);
        let ([m, k], [k_b, n]) = (a.dims(), b.dims());
        if k != k_b {
            return Err(format!("[{m}, {k}] and [{k_b}, {n}] do not multiply").into());
        }
        elements(&[m, n])?;
        let mut y = product(a, b);
        if self.alpha != 1.0 {
            y = y.mul_scalar(self.alpha);
        }
        let Some(c) = inputs.get(2).copied().flatten() else { return Ok(vec![Value::Float(y.into())]) };
        let c = c.float()?;
        if broadcast::shape(&[m, n], c.shape())? != [m, n] {
            return Err(format!("{:?} does not broadcast to [{m}, {n}]", c.shape()).into());
        }
        let beta = self.beta;
        let scaled = |c: Tensor<4>| if beta == 1.0 { c } else { c.mul_scalar(beta) };
        Ok(vec![Value::Float(broadcast::apply(&y.into(), c, |y, c| y + scaled(c))?)])
    }

    fn batched_rank(&self, inputs: &[BatchInput]) -> Option<usize> {
        let c_fits = match inputs.get(2) {
            Some(BatchInput::Constant(c)) => c.shape().len() < 2 || c.shape().len() == 2 && c.shape()[0] == 1,
            _ => true,
        };
        only_first_batched(inputs).filter(|rank| *rank == 2 && !self.transpose_a && c_fits)
    }
}
