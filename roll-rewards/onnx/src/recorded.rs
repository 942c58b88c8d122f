//! The recorded output of a model and its pullback.

use std::path::PathBuf;

use burn_tensor::{Device, Tensor as Burn};
use roll_backends::NdTensor;
use roll_core::Result;

use super::error::{OnnxError, no_panic};
use super::thread_pool;
use super::value::{Value, plain_device};

/// The recorded output of a [`Model`](super::Model), ready to be pulled back.
pub struct Recorded {
    pub(super) path: PathBuf,
    pub(super) port: String,
    pub(super) input_shape: Vec<usize>,
    pub(super) output_shape: Vec<usize>,
    /// The device of the weights.
    pub(super) device: Device,
    /// The length of each record's output along axis 0.
    pub(super) output_lengths: Vec<usize>,
    /// One record per run of the graph: one in all, or one per item.
    pub(super) records: Vec<roll_backends::vjp::Recorded>,
}

impl Recorded {
    /// Maps the cotangent of the output to the cotangent of the input, which is zero if the output does not depend on
    /// the input.
    pub fn pull(self, cotangent: NdTensor) -> Result<NdTensor> {
        let device = self.device.clone();
        thread_pool::run_in_pool(&device, || self.pull_here(cotangent))
    }

    /// Pulls back on the current thread; see [`Recorded::pull`].
    fn pull_here(self, cotangent: NdTensor) -> Result<NdTensor> {
        if cotangent.shape() != self.output_shape {
            let found = cotangent.shape().to_vec();
            let expected = format!("of shape {:?} here", self.output_shape);
            return Err(OnnxError::Port { path: self.path, port: self.port, expected, found }.into());
        }
        let cotangent = Value::Float(cotangent.untracked());
        let cotangents = match self.records.len() {
            1 => vec![cotangent],
            _ => cotangent.split(&self.output_lengths),
        };
        let part_input_shape = part_shape(&self.input_shape, self.records.len());
        let pulled = no_panic(|| {
            let mut gradients = vec![];
            for (record, cotangent) in self.records.into_iter().zip(cotangents) {
                let cotangent = cotangent.float()?.clone();
                let device = plain_device(&cotangent);
                let gradient = record.pull(vec![Some(cotangent)], None).into_iter().flatten().next();
                let zeros = || {
                    let flat = Burn::zeros([part_input_shape.iter().product::<usize>()], &device);
                    NdTensor::from_flat(flat, part_input_shape.clone())
                };
                gradients.push(Value::Float(gradient.unwrap_or_else(zeros)));
            }
            Value::concatenate(gradients)?.float().cloned()
        });
        pulled.map_err(|p| {
            let problem = format!("the gradient cannot be computed: {}", p.0);
            OnnxError::BadFile { path: self.path, problem }.into()
        })
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
        f.debug_struct("Recorded").field("path", &self.path).field("input", &self.input_shape).finish_non_exhaustive()
    }
}
