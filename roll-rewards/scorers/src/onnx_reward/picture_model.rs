//! An ONNX model as a [`RowNetwork`], which maps pictures to rows of numbers.

use std::path::Path;

use roll_backends::host::{to_device_nd, to_host_nd};
use roll_core::{DType, Error, Result, Tensor};
use roll_onnx::{Model, OnnxError};

use crate::picture::{Input, Layout, RowNetwork, RowsPull, Size, check_rows};

/// Sides and numbers of frames with which a model is tried, where file and options leave them free.
const TRIALS: [([usize; 2], usize); 2] = [([64, 64], 8), ([256, 320], 16)];

/// A model with one input, for pictures or a video.
#[derive(Debug)]
pub struct PictureModel {
    model: Model,
}

impl PictureModel {
    /// Fails if the model's input is not what `input` describes. If the file fixes height and width and `input` has no
    /// size, `input` gets the size of the file.
    pub fn new(model: Model, input: &mut Input) -> Result<Self> {
        let unfit = |problem: String| OnnxError::BadFile { path: model.path().into(), problem };
        let [port] = model.inputs() else {
            let names: Vec<&str> = model.inputs().iter().map(|p| p.name.as_str()).collect();
            return Err(unfit(format!("expected one input, of pictures, found `{}`", names.join("`, `"))).into());
        };
        let (layout, declared) = (input.layout, &port.shape);
        // Any shape in the layout shows the number of axes and, as the only 3, the axis of the channels.
        let example = layout.shape(2, [2, 2]);
        let channel_axis = example.iter().position(|d| *d == 3).unwrap_or(1);
        let fits =
            declared.is_empty() || declared.len() == example.len() && declared[channel_axis].is_none_or(|c| c == 3);
        if port.dtype != DType::F32 || !fits {
            let key = "`reward.input.layout`";
            return Err(unfit(format!(
                "expected a float input with axes {layout:?} ({key}) and 3 channels, found `{}` of {:?} {}",
                port.name,
                port.dtype,
                shape_text(declared)
            ))
            .into());
        }
        let [height, width] = layout.sides().map(|axis| declared.get(axis).copied().flatten());
        match (input.size, height, width) {
            (None, Some(height), Some(width)) => input.size = Some(Size::Sides([height, width])),
            (Some(size), height, width) => {
                let [h, w] = size.sides();
                if height.is_some_and(|d| d != h) || width.is_some_and(|d| d != w) {
                    return Err(unfit(format!(
                        "`reward.input.size` is [{h}, {w}], but `{}` is {}",
                        port.name,
                        shape_text(declared)
                    ))
                    .into());
                }
            }
            _ => {}
        }
        Ok(Self { model })
    }

    /// Runs the model once, so that a model that does not run is an error before the first video. Returns the number of
    /// outputs for a picture if it is the same for every video.
    ///
    /// If the file and `input` leave a side or the number of frames free, the model is tried with two inputs. One of
    /// them must run, because the first may be too small for the model.
    pub fn try_out(&self, input: &Input) -> Result<Option<usize>> {
        let layout = input.layout;
        let declared = &self.model.inputs()[0].shape;
        let frames = match layout {
            Layout::Ncthw => declared.get(2).copied().flatten(),
            Layout::Ntchw => declared.get(1).copied().flatten(),
            // The batch size of the file; 1 if it is free.
            Layout::Nchw | Layout::Nhwc => Some(declared.first().copied().flatten().unwrap_or(1)),
        };
        // The sides and the number of frames of every input, if nothing is free.
        let fixed = input.size.map(Size::sides).zip(frames);
        let attempts = match fixed {
            Some(fixed) => vec![fixed],
            None => {
                TRIALS.map(|(sides, count)| (input.size.map_or(sides, Size::sides), frames.unwrap_or(count))).to_vec()
            }
        };
        let run = |(sides, frames): ([usize; 2], usize)| {
            let shape = layout.shape(frames, sides);
            let count = shape.iter().product::<usize>();
            // Test pixels: neighbours differ, and none is 0.
            let pixels = (0..count).map(|i| 0.25 + (i % 97) as f32 / 194.0).collect();
            let rows = self.rows(Tensor::new(pixels, shape)?)?;
            let items = if layout.is_video() { 1 } else { frames };
            check_rows(&rows, items)?;
            Ok::<_, Error>(rows.len() / items)
        };
        let mut result = run(attempts[0]);
        if let (Err(_), Some(second)) = (&result, attempts.get(1)) {
            result = run(*second);
        }
        result.map(|width| fixed.map(|_| width))
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        self.model.path()
    }
}

/// A declared shape as text; `?` is a free axis.
fn shape_text(shape: &[Option<usize>]) -> String {
    let axis = |axis: &Option<usize>| axis.map_or("?".to_string(), |length| length.to_string());
    format!("[{}]", shape.iter().map(axis).collect::<Vec<_>>().join(", "))
}

impl RowNetwork for PictureModel {
    fn rows(&self, input: Tensor) -> Result<Tensor> {
        to_host_nd(&self.model.value(&to_device_nd(&input, self.model.device())?)?)
    }

    fn rows_vjp(&self, input: Tensor) -> Result<(Tensor, RowsPull)> {
        let device = self.model.device().clone();
        let (rows, recorded) = self.model.vjp(&to_device_nd(&input, &device)?)?;
        let pull = move |cotangent: Tensor| to_host_nd(&recorded.pull(to_device_nd(&cotangent, &device)?)?);
        Ok((to_host_nd(&rows)?, Box::new(pull)))
    }
}
