//! Resize and its predecessor Upsample: nearest, linear and cubic interpolation, one axis after the other.
//!
//! The positions and weights of the input elements that make an output element are computed on the host, from the
//! formulas of the ONNX operator. So every coordinate mode is exact and independent of the tensor library's
//! interpolation.

use roll_backends::NdTensor;

use super::super::attributes::{OperatorSpec, sizes};
use super::super::error::Problem;
use super::super::value::{Value, elements, merge_axes, plain_device, split_around_axis, upload};
use super::index::select;
use super::{BatchInput, Built, Operator, Run, input};

/// How the position of an output element maps to a position on the input's axis (`coordinate_transformation_mode`).
#[derive(Clone, Copy, Debug, PartialEq)]
enum Coordinates {
    HalfPixel,
    PytorchHalfPixel,
    AlignCorners,
    Asymmetric,
}

/// Default of `cubic_coeff_a` in the ONNX specification.
const DEFAULT_CUBIC_A: f32 = -0.75;

/// How a position is rounded to the nearest element (`nearest_mode`).
#[derive(Clone, Copy, Debug)]
enum Nearest {
    RoundPreferFloor,
    RoundPreferCeil,
    Floor,
    Ceil,
}

/// How an output element is computed from input elements (`mode`).
#[derive(Clone, Copy, Debug)]
enum Interpolation {
    Nearest(Nearest),
    Linear,
    Cubic(CubicKernel),
}

/// Resizes every axis to a scale or a size.
#[derive(Debug)]
struct Resize {
    interpolation: Interpolation,
    coordinates: Coordinates,
    /// Constant scales, one per axis; `None` if the sizes are input 3.
    scales: Option<Vec<f32>>,
}

pub(super) fn resize(spec: &mut OperatorSpec) -> Built {
    let before_opset_11 = spec.operator == "Upsample" || spec.opset < 11;
    let mode = spec.attributes.text("mode", "nearest")?;
    let (scales_input, coordinates, nearest, cubic) = if before_opset_11 {
        spec.check_arity(1..=2, 1)?;
        (1, "asymmetric".to_owned(), "floor".to_owned(), None)
    } else {
        spec.check_arity(1..=4, 1)?;
        let attributes = &mut spec.attributes;
        // Modes other than cubic ignore `cubic_coeff_a`. No mode that is supported here uses `extrapolation_value`.
        let a = attributes.float("cubic_coeff_a")?.unwrap_or(DEFAULT_CUBIC_A);
        attributes.float("extrapolation_value")?;
        let exclude_outside = attributes.flag("exclude_outside")?;
        if exclude_outside && mode != "cubic" {
            return Err(format!("`exclude_outside` belongs to the mode cubic, found {mode}").into());
        }
        if attributes.flag("antialias")? {
            return Err("`antialias` is not run here".into());
        }
        if attributes.ints("axes")?.is_some() || attributes.text("keep_aspect_ratio_policy", "stretch")? != "stretch" {
            return Err("`axes` and `keep_aspect_ratio_policy` are not run here".into());
        }
        let coordinates = attributes.text("coordinate_transformation_mode", "half_pixel")?;
        let nearest = attributes.text("nearest_mode", "round_prefer_floor")?;
        (2, coordinates, nearest, Some(CubicKernel { a: a.into(), exclude_outside }))
    };
    let coordinates = match coordinates.as_str() {
        "half_pixel" => Coordinates::HalfPixel,
        "pytorch_half_pixel" => Coordinates::PytorchHalfPixel,
        "align_corners" => Coordinates::AlignCorners,
        "asymmetric" => Coordinates::Asymmetric,
        other => return Err(format!("`coordinate_transformation_mode` {other} is not run here").into()),
    };
    let interpolation = parse_interpolation(&mode, &nearest, cubic)?;
    let has_sizes = !before_opset_11 && spec.has_input(3);
    let scales = match spec.attributes.floats("scales")? {
        Some(scales) => Some(scales),
        None if has_sizes => None,
        None => spec.constant_floats(scales_input, "scales")?.map(<[f32]>::to_vec),
    };
    match &scales {
        Some(scales) if scales.iter().all(|s| s.is_finite() && *s > 0.0) => {}
        None if has_sizes => {}
        _ => return Err(format!("expected `sizes`, or `scales` above 0, found scales {scales:?}").into()),
    }
    Ok(Box::new(Resize { interpolation, coordinates, scales }))
}

/// Reads the attributes `mode` and `nearest_mode`. `cubic` is `None` in operator sets without the mode cubic.
fn parse_interpolation(mode: &str, nearest: &str, cubic: Option<CubicKernel>) -> Result<Interpolation, Problem> {
    Ok(match (mode, nearest, cubic) {
        ("linear" | "bilinear", ..) => Interpolation::Linear,
        ("nearest", "round_prefer_floor", _) => Interpolation::Nearest(Nearest::RoundPreferFloor),
        ("nearest", "round_prefer_ceil", _) => Interpolation::Nearest(Nearest::RoundPreferCeil),
        ("nearest", "floor", _) => Interpolation::Nearest(Nearest::Floor),
        ("nearest", "ceil", _) => Interpolation::Nearest(Nearest::Ceil),
        ("nearest", other, _) => return Err(format!("`nearest_mode` {other} is not known").into()),
        ("cubic", _, Some(kernel)) if kernel.a.is_finite() => Interpolation::Cubic(kernel),
        ("cubic", _, Some(kernel)) => {
            return Err(format!("`cubic_coeff_a` should be finite, found {}", kernel.a).into());
        }
        ("cubic", ..) => return Err("`mode` cubic exists since the operator set 11".into()),
        (other, ..) => return Err(format!("`mode` {other} is not run here: nearest, linear and cubic are").into()),
    })
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
                x = self.resize_axis(&x, a, output[a], scales[a])?;
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
        (keeps_items && rest.iter().all(|i| i.is_unbatched())).then_some(rank)
    }
}

impl Resize {
    /// Resizes the axis `a` to the length `output`.
    fn resize_axis(&self, x: &NdTensor, a: usize, output: usize, scale: f64) -> Result<NdTensor, Problem> {
        let length = x.shape()[a];
        let last = (length - 1) as f64;
        // The position on the input's axis of output element `o`.
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
        let sources = (0..output).map(source);
        let nearest = match self.interpolation {
            Interpolation::Linear => return weighted(x, a, sources.map(|s| linear_taps(s, length)).collect()),
            Interpolation::Cubic(kernel) => return weighted(x, a, sources.map(|s| kernel.taps(s, length)).collect()),
            Interpolation::Nearest(nearest) => nearest,
        };
        let round = |s: f64| match nearest {
            Nearest::RoundPreferFloor => (s - 0.5).ceil(),
            Nearest::RoundPreferCeil => (s + 0.5).floor(),
            Nearest::Floor => s.floor(),
            Nearest::Ceil => s.ceil(),
        };
        let picks: Vec<usize> = sources.map(|s| round(s).clamp(0.0, last) as usize).collect();
        let around_axis = split_around_axis(x, a);
        let repeats = output / length;
        // If each element is repeated equally often, an expansion is faster than a selection.
        if output % length == 0 && picks.iter().enumerate().all(|(o, i)| *i == o / repeats) {
            let [outer, _, inner] = around_axis.dims();
            let repeated = around_axis.reshape([outer, length, 1, inner]).expand([outer, length, repeats, inner]);
            return Ok(merge_axes(repeated.reshape([outer, output, inner]), x, a));
        }
        Ok(merge_axes(select(around_axis, &picks), x, a))
    }
}

/// The index of an input element, and its weight in one output element.
type Tap = (usize, f32);

/// The two elements around the position `source`.
fn linear_taps(source: f64, length: usize) -> [Tap; 2] {
    let source = source.clamp(0.0, (length - 1) as f64);
    let below = source as usize;
    let weight = (source - below as f64) as f32;
    [(below, 1.0 - weight), ((below + 1).min(length - 1), weight)]
}

/// Keys' cubic convolution kernel.
#[derive(Clone, Copy, Debug)]
struct CubicKernel {
    /// The kernel's parameter, `cubic_coeff_a`.
    a: f64,
    /// Whether elements outside the input have no weight. Otherwise they equal the element at the border.
    exclude_outside: bool,
}

impl CubicKernel {
    /// The four elements around the position `source`.
    fn taps(self, source: f64, length: usize) -> [Tap; 4] {
        let last = (length - 1) as f64;
        let positions = [-1.0, 0.0, 1.0, 2.0].map(|step| source.floor() + step);
        let weights = positions.map(|position| {
            let is_excluded = self.exclude_outside && !(0.0..=last).contains(&position);
            if is_excluded { 0.0 } else { self.weight((source - position).abs()) }
        });
        let sum = if self.exclude_outside { weights.iter().sum() } else { 1.0 };
        std::array::from_fn(|k| (positions[k].clamp(0.0, last) as usize, (weights[k] / sum) as f32))
    }

    /// The weight of an element at the distance `d`, which is at most 2.
    fn weight(self, d: f64) -> f64 {
        let a = self.a;
        if d <= 1.0 {
            return ((a + 2.0) * d - (a + 3.0)) * d * d + 1.0;
        }
        ((a * d - 5.0 * a) * d + 8.0 * a) * d - 4.0 * a
    }
}

/// Computes each output element along the axis `a` as the weighted sum of its taps.
fn weighted<const TAPS: usize>(x: &NdTensor, a: usize, taps: Vec<[Tap; TAPS]>) -> Result<NdTensor, Problem> {
    let (device, around_axis) = (plain_device(x), split_around_axis(x, a));
    // The summands of tap `k` for all output elements.
    let summands = |k: usize| {
        let (picks, weights): (Vec<usize>, Vec<f32>) = taps.iter().map(|taps| taps[k]).unzip();
        let weights = upload(weights, vec![1, taps.len(), 1], &device).rank::<3>()?;
        Ok::<_, Problem>(select(around_axis.clone(), &picks) * weights)
    };
    let mut sum = summands(0)?;
    for k in 1..TAPS {
        sum = sum + summands(k)?;
    }
    Ok(merge_axes(sum, x, a))
}
