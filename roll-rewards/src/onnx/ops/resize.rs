//! Resize and its predecessor Upsample, nearest and linear, axis by axis.
//!
//! Source positions and weights of each output are computed on the host from the formulas of the ONNX operator. So
//! every coordinate mode is exact and independent of the tensor library's interpolation.

use roll_backends::NdTensor;

use super::super::attributes::{OperatorSpec, sizes};
use super::super::error::Problem;
use super::super::value::{Value, elements, merge_axes, plain_device, split_around_axis, upload};
use super::index::select;
use super::{BatchInput, Built, Operator, Run, input};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Coordinates {
    HalfPixel,
    PytorchHalfPixel,
    AlignCorners,
    Asymmetric,
}

#[derive(Clone, Copy, Debug)]
enum Nearest {
    RoundPreferFloor,
    RoundPreferCeil,
    Floor,
    Ceil,
}

#[derive(Debug)]
struct Resize {
    /// `None` means linear.
    nearest: Option<Nearest>,
    coordinates: Coordinates,
    /// Constant scales, one per axis; `None` if the sizes are input 3.
    scales: Option<Vec<f32>>,
}

pub(super) fn resize(spec: &mut OperatorSpec) -> Built {
    let old = spec.operator == "Upsample" || spec.opset < 11;
    let mode = spec.attributes.text("mode", "nearest")?;
    let (scales_at, coordinates, nearest) = if old {
        spec.arity(1..=2, 1)?;
        (1, "asymmetric".to_owned(), "floor".to_owned())
    } else {
        spec.arity(1..=4, 1)?;
        let attributes = &mut spec.attributes;
        // These have no effect on the supported modes.
        attributes.float("cubic_coeff_a")?;
        attributes.float("extrapolation_value")?;
        for (flag, default) in [("exclude_outside", 0), ("antialias", 0)] {
            if attributes.int(flag)?.unwrap_or(default) != default {
                return Err(format!("`{flag}` is not run here").into());
            }
        }
        if attributes.ints("axes")?.is_some() || attributes.text("keep_aspect_ratio_policy", "stretch")? != "stretch" {
            return Err("`axes` and `keep_aspect_ratio_policy` are not run here".into());
        }
        let coordinates = attributes.text("coordinate_transformation_mode", "half_pixel")?;
        (2, coordinates, attributes.text("nearest_mode", "round_prefer_floor")?)
    };
    let coordinates = match coordinates.as_str() {
        "half_pixel" => Coordinates::HalfPixel,
        "pytorch_half_pixel" => Coordinates::PytorchHalfPixel,
        "align_corners" => Coordinates::AlignCorners,
        "asymmetric" => Coordinates::Asymmetric,
        other => return Err(format!("`coordinate_transformation_mode` {other} is not run here").into()),
    };
    let nearest = match (mode.as_str(), nearest.as_str()) {
        ("linear" | "bilinear", _) => None,
        ("nearest", "round_prefer_floor") => Some(Nearest::RoundPreferFloor),
        ("nearest", "round_prefer_ceil") => Some(Nearest::RoundPreferCeil),
        ("nearest", "floor") => Some(Nearest::Floor),
        ("nearest", "ceil") => Some(Nearest::Ceil),
        ("nearest", other) => return Err(format!("`nearest_mode` {other} is not known").into()),
        (other, _) => return Err(format!("`mode` {other} is not run here: nearest and linear are").into()),
    };
    let has_sizes = !old && spec.has(3);
    let scales = match spec.attributes.floats("scales")? {
        Some(scales) => Some(scales),
        None if has_sizes => None,
        None => spec.constant_floats(scales_at, "scales")?.map(<[f32]>::to_vec),
    };
    match &scales {
        Some(scales) if scales.iter().all(|s| s.is_finite() && *s > 0.0) => {}
        None if has_sizes => {}
        _ => return Err(format!("expected `sizes`, or `scales` above 0, found scales {scales:?}").into()),
    }
    Ok(Box::new(Resize { nearest, coordinates, scales }))
}

impl Operator for Resize {
    fn run(&self, inputs: &[Option<&Value>], run: Run) -> Result<Vec<Value>, Problem> {
        let mut x = input(inputs, 0)?.float()?.clone();
        let rank = x.shape().len();
        let (output, scales): (Vec<usize>, Vec<f64>) = match &self.scales {
            Some(scales) if scales.len() == rank => {
                let lengths = x.shape().iter().zip(scales).map(|(&d, &s)| (d as f64 * f64::from(s)).floor() as i64);
                (sizes("output shape", &lengths.collect::<Vec<_>>(), 1)?, scales.iter().map(|&s| s.into()).collect())
            }
            Some(scales) => return Err(format!("the scales {scales:?} do not fit {:?}", x.shape()).into()),
            None => {
                let mut output = sizes("sizes", input(inputs, 3)?.ints()?, 1)?;
                if output.len() != rank {
                    return Err(format!("the sizes {output:?} do not fit {:?}", x.shape()).into());
                }
                if let (Some(items), Some(first)) = (run.items, output.first_mut()) {
                    *first = items;
                }
                let scales = output.iter().zip(x.shape()).map(|(&o, &i)| o as f64 / i as f64).collect();
                (output, scales)
            }
        };
        // An axis may exceed its final length on the way, so the largest intermediate shape is checked.
        elements(&output.iter().zip(x.shape()).map(|(&o, &i)| o.max(i)).collect::<Vec<_>>())?;
        for a in 0..rank {
            if output[a] != x.shape()[a] || scales[a] != 1.0 {
                x = self.along(&x, a, output[a], scales[a])?;
            }
        }
        Ok(vec![Value::Float(x)])
    }

    fn batched_rank(&self, inputs: &[BatchInput]) -> Option<usize> {
        let (first, rest) = inputs.split_first()?;
        let rank = first.batched()?;
        let keeps_items = match (&self.scales, inputs.get(3)) {
            (Some(scales), _) => scales.first() == Some(&1.0),
            (None, Some(BatchInput::Constant(sizes))) => sizes.ints().is_ok_and(|s| s.first() == Some(&1)),
            _ => false,
        };
        (keeps_items && rest.iter().all(|i| i.is_constant())).then_some(rank)
    }
}

impl Resize {
    fn along(&self, x: &NdTensor, a: usize, output: usize, scale: f64) -> Result<NdTensor, Problem> {
        let length = x.shape()[a];
        let last = (length - 1) as f64;
        let source = |o: usize| {
            let o = o as f64;
            match self.coordinates {
                Coordinates::HalfPixel => (o + 0.5) / scale - 0.5,
                Coordinates::PytorchHalfPixel if output > 1 => (o + 0.5) / scale - 0.5,
                Coordinates::PytorchHalfPixel => 0.0,
                Coordinates::AlignCorners if output > 1 => o * last / (output - 1) as f64,
                Coordinates::AlignCorners => 0.0,
                Coordinates::Asymmetric => o / scale,
            }
        };
        let Some(nearest) = self.nearest else {
            let sources: Vec<f64> = (0..output).map(|o| source(o).clamp(0.0, last)).collect();
            let below: Vec<usize> = sources.iter().map(|s| *s as usize).collect();
            let above = below.iter().map(|i| (i + 1).min(length - 1)).collect::<Vec<_>>();
            let weights: Vec<f32> = sources.iter().zip(&below).map(|(s, i)| (s - *i as f64) as f32).collect();
            let rest = weights.iter().map(|w| 1.0 - w).collect();
            let device = plain_device(x);
            let column = |w: Vec<f32>| upload(w, vec![1, output, 1], &device).rank::<3>();
            let whole = split_around_axis(x, a);
            let y = select(whole.clone(), &below) * column(rest)? + select(whole, &above) * column(weights)?;
            return Ok(merge_axes(y, x, a));
        };
        let round = |s: f64| match nearest {
            Nearest::RoundPreferFloor => (s - 0.5).ceil(),
            Nearest::RoundPreferCeil => (s + 0.5).floor(),
            Nearest::Floor => s.floor(),
            Nearest::Ceil => s.ceil(),
        };
        let picks: Vec<usize> = (0..output).map(|o| round(source(o)).clamp(0.0, last) as usize).collect();
        let whole = split_around_axis(x, a);
        let times = output / length;
        if output % length == 0 && picks.iter().enumerate().all(|(o, i)| *i == o / times) {
            let [outer, _, inner] = whole.dims();
            let repeated = whole.reshape([outer, length, 1, inner]).expand([outer, length, times, inner]);
            return Ok(merge_axes(repeated.reshape([outer, output, inner]), x, a));
        }
        Ok(merge_axes(select(whole, &picks), x, a))
    }
}
