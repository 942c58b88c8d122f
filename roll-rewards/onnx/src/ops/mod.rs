//! The operators, one family per file.
//!
//! An operator is built when the file is opened, from its attributes and constant inputs. Unsupported attributes are an
//! error at that time. At run time, an operator checks shapes before it calls the tensor library.

mod broadcast;
mod constant;
mod conv;
mod elementwise;
mod fill;
mod fused_conv;
mod index;
mod integers;
mod layout;
mod logic;
mod matmul;
mod norm;
mod pool;
mod reduce;
mod resize;
mod shape;
mod window;

use roll_backends::ops::Epilogue;

use super::attributes::OperatorSpec;
use super::error::Problem;
use super::value::Value;

pub(super) use conv::Conv;
pub(super) use elementwise::exact_gelu;
pub(super) use fused_conv::FusedConv;
pub(super) use matmul::Linear;
pub(super) use norm::{ChannelAffine, layer_norm_of_rows};

/// Settings of one run of the graph.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    /// The number of items along axis 0, if it replaces a constant 1 of the file; see [`super::batch`].
    pub items: Option<usize>,
}

/// An operator with its attributes.
pub(super) trait Operator: std::fmt::Debug + Send + Sync {
    /// Computes the outputs for `inputs`. An input that is left out is `None`.
    fn run(&self, inputs: &[Option<&Value>], run: Run) -> Result<Vec<Value>, Problem>;

    /// The rank of the outputs if the operator is proven to treat axis 0 as a batch (see [`super::batch`]).
    fn batched_rank(&self, inputs: &[BatchInput]) -> Option<usize> {
        let _ = inputs;
        None
    }

    /// What the operator computes, as far as [`super::fuse`] needs to know.
    fn role(&self) -> Role<'_> {
        Role::Other
    }
}

/// The function of an operator, by which [`super::fuse`] finds chains of nodes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Role<'a> {
    /// A convolution over one or two axes.
    Conv(&'a Conv),
    /// A normalisation by constants with this epsilon.
    BatchNorm(f32),
    /// A sum, difference, product or quotient of two inputs.
    Arithmetic(Arithmetic),
    /// An elementwise function that can be an epilogue.
    Epilogue(Epilogue),
    /// A leaky ReLU with this slope.
    LeakyRelu(f32),
    /// A leaky ReLU whose slope is the second input.
    PRelu,
    Erf,
    Sqrt,
    /// The square of the first input; the second is the exponent.
    Square,
    /// The mean over the last axis, which is kept.
    RowMean,
    MatMul,
    Other,
}

/// An arithmetic operation on two operands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Arithmetic {
    Add,
    Sub,
    Mul,
    Div,
}

/// An input of a node, as far as it is known before the graph runs; see [`super::batch`].
#[derive(Clone, Copy, Debug)]
pub(super) enum BatchInput<'a> {
    /// A constant of the file.
    Constant(&'a Value),
    /// Computed from the graph's inputs, of this rank, with the batch along axis 0.
    Batched(usize),
    Absent,
}

impl BatchInput<'_> {
    /// The rank, if the input is batched.
    pub fn batched(self) -> Option<usize> {
        match self {
            Self::Batched(rank) => Some(rank),
            _ => None,
        }
    }

    /// Whether the input is a constant or absent, and so the same for all items.
    pub fn is_unbatched(self) -> bool {
        !matches!(self, Self::Batched(_))
    }
}

/// The operator of a node, or the reason why the operator is not supported.
pub(super) type Built = Result<Box<dyn Operator>, Problem>;
/// Builds the operator of a node.
pub(super) type Builder = fn(&mut OperatorSpec) -> Built;

/// The builder of the operator with this name; `None` if the executor does not support it.
pub(super) fn builder(operator: &str) -> Option<Builder> {
    Some(match operator {
        "Conv" => conv::conv,
        "ConvTranspose" => conv::conv_transpose,
        "MaxPool" => pool::max_pool,
        "AveragePool" => pool::average_pool,
        "GlobalAveragePool" | "GlobalMaxPool" => pool::global,
        "Add" | "Sub" | "Mul" | "Div" | "Mod" | "Pow" | "Max" | "Min" | "Sum" | "PRelu" => elementwise::binary,
        "Relu" | "Sigmoid" | "Tanh" | "Exp" | "Log" | "Sqrt" | "Neg" | "Abs" | "Sign" | "Sin" | "Cos" | "Erf"
        | "Floor" | "Ceil" | "Reciprocal" | "Softplus" | "LeakyRelu" | "HardSigmoid" | "HardSwish" | "Elu" | "Gelu"
        | "Clip" => elementwise::unary,
        "Identity" | "Dropout" => constant::identity,
        "Cast" => constant::cast,
        "Constant" => constant::constant,
        "ConstantOfShape" => constant::constant_of_shape,
        "Shape" => shape::shape,
        "Size" => shape::size,
        "Reshape" => shape::reshape,
        "Flatten" => shape::flatten,
        "Squeeze" | "Unsqueeze" => shape::squeeze,
        "Transpose" => layout::transpose,
        "Concat" => layout::concat,
        "Split" => layout::split,
        "Gather" => index::gather,
        "GatherElements" => index::gather_elements,
        "GatherND" => index::gather_nd,
        "ScatterND" => index::scatter_nd,
        "ArgMax" | "ArgMin" => index::arg_extremum,
        "Equal" | "Less" | "LessOrEqual" | "Greater" | "GreaterOrEqual" | "And" | "Or" | "Xor" => logic::binary,
        "Not" | "IsNaN" | "IsInf" => logic::unary,
        "Where" => logic::where_operator,
        "Expand" => fill::expand,
        "Tile" => fill::tile,
        "Range" => fill::range,
        "Trilu" => fill::trilu,
        "CumSum" => fill::cumulative_sum,
        "Slice" => layout::slice,
        "Pad" => layout::pad,
        "ReduceMean" | "ReduceSum" | "ReduceL2" | "ReduceMax" | "ReduceMin" | "ReduceProd" => reduce::reduce,
        "Softmax" | "LogSoftmax" => reduce::softmax,
        "LpNormalization" => reduce::lp_normalization,
        "Resize" | "Upsample" => resize::resize,
        "BatchNormalization" => norm::batch_norm,
        "InstanceNormalization" => norm::instance_norm,
        "LayerNormalization" => norm::layer_norm,
        "MatMul" => matmul::matmul,
        "Gemm" => matmul::gemm,
        _ => return None,
    })
}

/// The input `index`. Fails if it is missing.
fn input<'v>(inputs: &[Option<&'v Value>], index: usize) -> Result<&'v Value, Problem> {
    inputs.get(index).copied().flatten().ok_or_else(|| format!("input {index} is missing").into())
}

/// The rank of input 0, if it is batched and no other input is.
fn only_first_batched(inputs: &[BatchInput]) -> Option<usize> {
    let (first, rest) = inputs.split_first()?;
    let others_are_unbatched = rest.iter().all(|i| i.is_unbatched());
    if others_are_unbatched { first.batched() } else { None }
}
