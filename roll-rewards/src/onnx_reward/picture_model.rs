//! An ONNX model as a network that maps pictures to rows.

use std::path::Path;

use roll_backends::host::{to_device_nd, to_host_nd};
use roll_core::{DType, Result, Tensor};

use crate::onnx::{Model, OnnxError};
use crate::picture::{Input, RowNetwork, RowsPull, Size};

/// A model with one input, for pictures or a video.
#[derive(Debug)]
pub struct PictureModel {
    model: Model,
}

impl PictureModel {
    /// Fails if the model's input is not what `input` describes. If the file fixes height and width and `input` has no
    /// size, the size is set to the file's.
    pub fn new(model: Model, input: &mut Input) -> Result<Self> {
        let wrong = |problem: String| OnnxError::BadFile { path: model.path().into(), problem };
        let [port] = model.inputs() else {
            let names: Vec<&str> = model.inputs().iter().map(|p| p.name.as_str()).collect();
            return Err(wrong(format!("expected one input, of pictures, found `{}`", names.join("`, `"))).into());
        };
        let (layout, declared) = (input.layout, &port.shape);
        let ours = layout.shape(2, [2, 2]);
        let channels = ours.iter().position(|d| *d == 3).unwrap_or(1);
        let fits = declared.is_empty() || declared.len() == ours.len() && declared[channels].is_none_or(|c| c == 3);
        if port.dtype != DType::F32 || !fits {
            let key = "`reward.input.layout`";
            return Err(wrong(format!(
                "expected a float input with axes {layout:?} ({key}) and 3 channels, found `{}` of {:?} {declared:?}",
                port.name, port.dtype
            ))
            .into());
        }
        let [height, width] = layout.sides().map(|axis| declared.get(axis).copied().flatten());
        match (input.size, height, width) {
            (None, Some(height), Some(width)) => input.size = Some(Size::Sides([height, width])),
            (Some(size), height, width) => {
                let [h, w] = size.sides();
                if height.is_some_and(|d| d != h) || width.is_some_and(|d| d != w) {
                    return Err(wrong(format!(
                        "`reward.input.size` is [{h}, {w}], but `{}` is {declared:?}",
                        port.name
                    ))
                    .into());
                }
            }
            _ => {}
        }
        Ok(Self { model })
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        self.model.path()
    }
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
