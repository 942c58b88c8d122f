//! The recorded output of a model and its pullback.

use std::path::PathBuf;

use burn::tensor::{Device, Tensor as Burn};
use roll_backends::NdTensor;
use roll_backends::host::{to_device_nd, to_host_nd};
use roll_core::{Result, Tensor};

use super::error::{OnnxError, no_panic};
use super::thread_pool;
use super::value::{Value, plain_device};

/// The recorded output of a [`Model`](super::Model), ready to be pulled back.
pub struct Recorded {
    pub(super) path: PathBuf,
    pub(super) port: String,
    /// Shape of each input of the graph; `None` for integers.
    pub(super) input_shapes: Vec<Option<Vec<usize>>>,
    pub(super) output_shape: Vec<usize>,
    /// The device of the weights.
    pub(super) device: Device,
    /// The length along axis 0 of each record's output.
    pub(super) leading: Vec<usize>,
    pub(super) records: Vec<roll_backends::vjp::Recorded>,
}

impl Recorded {
    /// Maps the cotangent of the output to that of the first float input. It is zero if the output does not depend on
    /// the input.
    pub fn pull(self, cotangent: NdTensor) -> Result<NdTensor> {
        let path = self.path.clone();
        let first = self.gradients(cotangent)?.into_iter().flatten().next();
        Ok(first.ok_or_else(|| OnnxError::NoGradient { path, inputs: "all of them".into() })?)
    }

    /// Maps the cotangent of the output to that of each input: `None` for an integer input, zero if the output does not
    /// depend on an input.
    pub fn pull_all(self, cotangent: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let cotangent = to_device_nd(cotangent, &self.device)?;
        let gradients = self.gradients(cotangent)?;
        gradients.into_iter().map(|g| g.map(|g| to_host_nd(&g)).transpose()).collect()
    }

    fn gradients(self, cotangent: NdTensor) -> Result<Vec<Option<NdTensor>>> {
        let device = self.device.clone();
        thread_pool::run_in_pool(&device, || self.gradients_here(cotangent))
    }

    fn gradients_here(self, cotangent: NdTensor) -> Result<Vec<Option<NdTensor>>> {
        if cotangent.shape() != self.output_shape {
            let found = cotangent.shape().to_vec();
            let expected = format!("of shape {:?} here", self.output_shape);
            return Err(OnnxError::Port { path: self.path, port: self.port, expected, found }.into());
        }
        let cotangent = Value::Float(cotangent.untracked());
        let cotangents = match self.records.len() {
            1 => vec![cotangent],
            _ => cotangent.split(&self.leading),
        };
        let parts = self.records.len();
        let shapes: Vec<Vec<usize>> =
            self.input_shapes.iter().flatten().map(|whole| part_shape(whole, parts)).collect();
        let pulled = no_panic(|| {
            let mut columns: Vec<Vec<Value>> = vec![vec![]; shapes.len()];
            for (record, cotangent) in self.records.into_iter().zip(cotangents) {
                let cotangent = cotangent.float()?.clone();
                let device = plain_device(&cotangent);
                let gradients = record.pull(vec![Some(cotangent)], None);
                for ((column, gradient), shape) in columns.iter_mut().zip(gradients).zip(&shapes) {
                    let zeros =
                        || NdTensor::from_flat(Burn::zeros([shape.iter().product::<usize>()], &device), shape.clone());
                    column.push(Value::Float(gradient.unwrap_or_else(zeros)));
                }
            }
            columns
                .into_iter()
                .map(|column| Value::concatenate(column)?.float().cloned())
                .collect::<Result<Vec<_>, _>>()
        });
        let pulled = pulled.map_err(|p| OnnxError::BadFile {
            path: self.path,
            problem: format!("the gradient cannot be computed: {}", p.0),
        })?;
        let mut pulled = pulled.into_iter();
        Ok(self.input_shapes.iter().map(|shape| shape.as_ref().and_then(|_| pulled.next())).collect())
    }
}

/// The shape of one of `parts` equal parts along axis 0.
fn part_shape(whole: &[usize], parts: usize) -> Vec<usize> {
    let mut shape = whole.to_vec();
    if let Some(items) = shape.first_mut() {
        *items /= parts;
    }
    shape
}

impl std::fmt::Debug for Recorded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recorded").field("path", &self.path).field("inputs", &self.input_shapes).finish_non_exhaustive()
    }
}
