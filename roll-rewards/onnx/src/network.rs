//! A model, together with the executor of its passes without gradient.

use std::path::Path;

use burn_tensor::Device;
use roll_backends::NdTensor;
use roll_backends::device::is_host;
use roll_backends::host::{to_device_nd, to_host_nd};
use roll_core::Result;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::error::OnnxError;
use super::model::Model;
use super::recorded::Recorded;
use super::runtime::{LIBRARY_VARIABLE, Session, runtime_version};
use super::value::Value;

/// The executor of a network's passes without gradient ([`Network::run`]). Passes with gradient ([`Network::vjp`])
/// always run on this project's own executor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Executor {
    /// ONNX Runtime for passes whose outputs no gradient uses, if it is part of the build, its library is installed and
    /// the device is the CPU; this project's own executor otherwise. Training is bit-identical with and without the
    /// library.
    #[default]
    Auto,
    /// This project's own executor.
    Own,
    /// ONNX Runtime for every pass without gradient, on the CPU. Fails if it is not part of the build or its library is
    /// missing.
    OnnxRuntime,
}

/// A [`Model`] whose passes without gradient may run on ONNX Runtime.
#[derive(Debug)]
pub struct Network {
    model: Model,
    executor: Executor,
    session: Option<Session>,
}

impl Network {
    /// Opens a file for `executor`. Weights for this project's own executor are uploaded to `device`.
    ///
    /// Fails like [`Model::open`], because a file that our executor cannot run has no gradient. With
    /// [`Executor::OnnxRuntime`] it also fails like [`Session::open`].
    pub fn open(path: &Path, device: &Device, executor: Executor) -> Result<Self, OnnxError> {
        Self::new(Model::open(path, device)?, executor)
    }

    /// Creates a network like [`Network::open`], from an opened model. ONNX Runtime reads the model's file again.
    pub fn new(model: Model, executor: Executor) -> Result<Self, OnnxError> {
        let session = match executor {
            Executor::Own => None,
            Executor::OnnxRuntime => Some(Session::open(model.path())?),
            Executor::Auto if !is_host(model.device()) => None,
            Executor::Auto => match Session::open(model.path()) {
                Ok(session) => Some(session),
                // ONNX Runtime was not requested explicitly.
                Err(OnnxError::NoRuntime) => None,
                // The user named no library: not worth a warning.
                Err(error) if std::env::var_os(LIBRARY_VARIABLE).is_none() => {
                    tracing::debug!("{error}");
                    None
                }
                Err(error) => {
                    tracing::warn!("passes without gradient stay on this project's own executor: {error}");
                    None
                }
            },
        };
        Ok(Self { model, executor, session })
    }

    /// The model, which computes the gradients.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Computes every output for `input`; nothing is recorded. `is_used_by_gradient` says whether a gradient computed
    /// later uses these outputs as constants (the position of a face, the embedding of a reference). If so,
    /// [`Executor::Auto`] stays on this project's own executor.
    ///
    /// Fails like [`Model::run`], and if ONNX Runtime fails.
    pub fn run(&self, input: &NdTensor, is_used_by_gradient: bool) -> Result<Vec<NdTensor>> {
        match self.session_for(is_used_by_gradient) {
            Some(session) => self.run_on(session, input),
            None => self.model.run(input),
        }
    }

    /// Computes the selected output and its pullback; see [`Model::vjp`].
    pub fn vjp(&self, input: &NdTensor) -> Result<(NdTensor, Recorded)> {
        self.model.vjp(input)
    }

    /// Name and version of ONNX Runtime if it computes outputs on which gradients depend; `None` if this project's own
    /// executor does. The two executors differ in the last bits, so caches of outputs must include this in their key.
    pub fn external_runtime(&self) -> Option<String> {
        let is_used_by_gradient = true;
        self.session_for(is_used_by_gradient).map(|_| format!("onnxruntime: {}", runtime_version().unwrap_or_default()))
    }

    /// The session for a pass, if it runs on ONNX Runtime. [`Executor::Auto`] uses ONNX Runtime only if no gradient
    /// depends on the outputs.
    fn session_for(&self, is_used_by_gradient: bool) -> Option<&Session> {
        let may_use_runtime = self.executor == Executor::OnnxRuntime || !is_used_by_gradient;
        if may_use_runtime { self.session.as_ref() } else { None }
    }

    /// Computes every output with ONNX Runtime, which runs the original graph: item by item, if it was exported for a
    /// batch of one.
    fn run_on(&self, session: &Session, input: &NdTensor) -> Result<Vec<NdTensor>> {
        self.model.check(&[Value::Float(input.clone())])?;
        let host = to_host_nd(&input.clone().untracked())?;
        let run_inputs = if self.model.is_for_one_item() && host.shape()[0] != 1 {
            let items = host.unstack()?.into_iter();
            items.map(|item| item.reshape([&[1], item.shape()].concat())).collect::<Result<_>>()?
        } else {
            vec![host]
        };
        let mut runs_by_output: Vec<Vec<NdTensor>> = vec![];
        for run_input in run_inputs {
            let outputs = session.run(&[run_input])?;
            runs_by_output.resize_with(outputs.len(), Vec::new);
            for (runs, output) in runs_by_output.iter_mut().zip(&outputs) {
                runs.push(to_device_nd(output, self.model.device())?);
            }
        }
        runs_by_output.into_iter().map(|runs| self.model.stack_floats(runs)).collect()
    }
}
