//! Convolutions over one to three spatial axes, and transposed convolutions over one or two.

use burn_tensor::ops::{ConvOptions, ConvTransposeOptions};
use burn_tensor::{Tensor, module};

use super::super::attributes::{OperatorSpec, sizes};
use super::super::error::Problem;
use super::super::value::{Value, elements};
use super::window::{Padding, Window, as_nchw, from_nchw, pad, pair};
use super::{BatchInput, Built, Operator, Role, Run, input, only_first_batched};

/// A convolution whose weights are constants of the file.
#[derive(Clone, Debug)]
pub(in super::super) struct Conv {
    pub(super) window: Window,
    pub(super) groups: usize,
}

/// Number of groups, and size of the kernel according to the constant weights.
fn groups_and_kernel<'n>(spec: &mut OperatorSpec<'n, '_>) -> Result<(usize, &'n [usize]), Problem> {
    spec.check_arity(2..=3, 1)?;
    let groups = sizes("group", &[spec.attributes.int("group")?.unwrap_or(1)], 1)?[0];
    match spec.constant_shape(1) {
        Some([_, _, kernel @ ..]) if !kernel.contains(&0) => Ok((groups, kernel)),
        Some(other) => Err(format!("weights of shape {other:?} are not those of a convolution").into()),
        None => Err("the weights must be constants of the file here".into()),
    }
}

pub(super) fn conv(spec: &mut OperatorSpec) -> Built {
    let (groups, kernel) = groups_and_kernel(spec)?;
    Ok(Box::new(Conv { window: Window::build(spec, Some(kernel))?, groups }))
}

/// The bias, input 2; `None` if it is left out. Fails unless it has `expected` elements.
fn bias_input(inputs: &[Option<&Value>], expected: usize) -> Result<Option<Tensor<1>>, Problem> {
    let Some(value) = inputs.get(2).copied().flatten() else { return Ok(None) };
    let bias = value.float()?.rank::<1>()?;
    if bias.dims() != [expected] {
        return Err(format!("expected a bias of {expected}, found {:?}", value.shape()).into());
    }
    Ok(Some(bias))
}

impl Operator for Conv {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let (x, weight) = (input(inputs, 0)?.float()?, input(inputs, 1)?.float()?);
        let ConvPlacement { pads, .. } = self.placement(x.shape(), weight.shape())?;
        let bias = bias_input(inputs, weight.shape()[0])?;
        let Window { stride, dilation, .. } = &self.window;
        let y = match (pads.as_slice(), stride.as_slice(), dilation.as_slice()) {
            // Three spatial axes.
            (&[t, h, w], &[st, sh, sw], &[dt, dh, dw]) => {
                let (x_ncthw, padding) = split_padding(x.rank::<5>()?, [t, h, w])?;
                let options = ConvOptions::new([st, sh, sw], padding, [dt, dh, dw], self.groups);
                module::conv3d(x_ncthw, weight.rank()?, bias, options).into()
            }
            // One or two spatial axes.
            _ => {
                let (x_nchw, padding) = split_padding(as_nchw(x)?, pair(&pads, (0, 0)))?;
                let options = ConvOptions::new(pair(stride, 1), padding, pair(dilation, 1), self.groups);
                from_nchw(module::conv2d(x_nchw, as_nchw(weight)?, bias, options), x)?
            }
        };
        Ok(vec![Value::Float(y)])
    }

    fn batched_rank(&self, inputs: &[BatchInput]) -> Option<usize> {
        only_first_batched(inputs)
    }

    fn role(&self) -> Role<'_> {
        Role::Conv(self)
    }
}

/// Padding and output shape of a convolution.
pub(super) struct ConvPlacement {
    /// Padding before and after each axis.
    pub pads: Vec<(usize, usize)>,
    /// Shape of the result.
    pub shape: Vec<usize>,
}

impl Conv {
    /// Computes padding and output shape for these shapes of input and weights. Fails if the shapes do not fit or the
    /// result is too large.
    pub(super) fn placement(&self, x: &[usize], weight: &[usize]) -> Result<ConvPlacement, Problem> {
        let ([n, c, spatial @ ..], [out, per_group, ..]) = (x, weight) else {
            return Err(format!("expected [N, C, ...], found {x:?}").into());
        };
        if Some(*c) != per_group.checked_mul(self.groups) || out % self.groups != 0 {
            let groups = self.groups;
            return Err(format!("weights of shape {weight:?} in {groups} groups do not fit {x:?}").into());
        }
        let placement = self.window.place(spatial)?;
        let shape = [&[*n, *out], placement.output.as_slice()].concat();
        elements(&shape)?;
        let pads = match &self.window.padding {
            // The whole padding, not only the part that windows reach, because the library counts windows itself.
            Padding::Explicit(pads) => pads.clone(),
            Padding::Same { .. } => placement.padding,
        };
        Ok(ConvPlacement { pads, shape })
    }
}

/// Pads `x`, unless the padding is symmetric. Returns the padding that is left to the tensor library, which supports
/// symmetric padding only.
fn split_padding<const D: usize, const S: usize>(
    x: Tensor<D>,
    pads: [(usize, usize); S],
) -> Result<(Tensor<D>, [usize; S]), Problem> {
    if pads.iter().all(|(before, after)| before == after) {
        Ok((x, pads.map(|(before, _)| before)))
    } else {
        Ok((pad(x, pads, 0.0)?, [0; S]))
    }
}

/// A transposed convolution with symmetric padding, whose weights `[inputs, outputs / groups, ...]` are constants of
/// the file.
#[derive(Debug)]
struct ConvTranspose {
    window: Window,
    groups: usize,
    output_padding: Vec<usize>,
}

pub(super) fn conv_transpose(spec: &mut OperatorSpec) -> Built {
    let (groups, kernel) = groups_and_kernel(spec)?;
    if spec.attributes.ints("output_shape")?.is_some() {
        return Err("`output_shape` is not run here".into());
    }
    let output_padding = spec.attributes.sizes("output_padding", 0, &vec![0; kernel.len()])?;
    let window = Window::build(spec, Some(kernel))?;
    if kernel.len() > 2 {
        return Err("a transposed convolution over three axes is not run here".into());
    }
    let is_symmetric = match &window.padding {
        Padding::Explicit(pads) => pads.iter().all(|(before, after)| before == after),
        Padding::Same { .. } => false,
    };
    if !is_symmetric {
        return Err("a transposed convolution with unequal or automatic padding is not run here".into());
    }
    let limit = |i: usize| window.stride[i].max(window.dilation[i]);
    if (0..kernel.len()).any(|i| output_padding[i] >= limit(i)) {
        return Err(format!("`output_padding` {output_padding:?} should be below the stride or dilation").into());
    }
    Ok(Box::new(ConvTranspose { window, groups, output_padding }))
}

impl Operator for ConvTranspose {
    fn run(&self, inputs: &[Option<&Value>], _: Run) -> Result<Vec<Value>, Problem> {
        let x = input(inputs, 0)?.float()?;
        let weight = as_nchw(input(inputs, 1)?.float()?)?;
        let bias = bias_input(inputs, weight.dims()[1].saturating_mul(self.groups))?;
        let x_nchw = as_nchw(x)?;
        let ([n, c, ..], [c_in, per_group, ..]) = (x_nchw.dims(), weight.dims());
        if c != c_in || c % self.groups != 0 || x.shape().len() != self.window.kernel.len() + 2 {
            let weight = input(inputs, 1)?.shape();
            return Err(format!("weights of shape {weight:?} do not fit an input of shape {:?}", x.shape()).into());
        }
        let Padding::Explicit(pads) = &self.window.padding else { return Err("automatic padding is not run".into()) };
        let mut shape = vec![n, per_group.saturating_mul(self.groups)];
        for (i, &length) in x.shape()[2..].iter().enumerate() {
            let unpadded = (length - 1).saturating_mul(self.window.stride[i]).saturating_add(self.window.extent(i));
            let (before, after) = pads[i];
            let padded = unpadded.saturating_add(self.output_padding[i]);
            let output = padded.checked_sub(before + after).filter(|length| *length > 0);
            shape.push(output.ok_or("the padding leaves nothing of the output")?);
        }
        elements(&shape)?;
        let options = ConvTransposeOptions::new(
            pair(&self.window.stride, 1),
            pair(pads, (0, 0)).map(|(before, _)| before),
            pair(&self.output_padding, 0),
            pair(&self.window.dilation, 1),
            self.groups,
        );
        Ok(vec![Value::Float(from_nchw(module::conv_transpose2d(x_nchw, weight, bias, options), x)?)])
    }

    fn batched_rank(&self, inputs: &[BatchInput]) -> Option<usize> {
        only_first_batched(inputs)
    }
}
