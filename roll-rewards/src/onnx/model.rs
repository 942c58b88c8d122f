//! An ONNX model: opening, running, differentiating.

use std::path::{Path, PathBuf};

use burn::tensor::{Device, Tensor};
use roll_backends::{NdTensor, Tape, vjp};
use roll_core::Result;

use super::batch::carries_items;
use super::error::{OnnxError, Problem, no_panic};
use super::execute::execute;
use super::read::{Graph, read};

/// Largest file that is read; protobuf itself ends at 2 GiB.
const MAX_FILE: u64 = 1 << 31;

/// An input or output of a graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Port {
    /// Its name in the file.
    pub name: String,
    /// Its declared shape; `None` is a free axis. Empty also when the file declares none.
    pub shape: Vec<Option<usize>>,
}

/// A graph with one float input, its weights on a device.
///
/// The input may hold any number of items along axis 0. A graph exported for a batch of one is run on all of them at
/// once when every node is proven to treat them alike (a constant 1 that leads a Reshape or Resize shape becomes the
/// number of items), and item by item, its outputs concatenated along axis 0, when not. A graph with a free batch axis
/// is run as it is unless such a constant shows that the axis is not free in truth.
#[derive(Debug)]
pub struct Model {
    graph: Graph,
    batching: Batching,
}

/// How several items run.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Batching {
    /// At once, constant batch axes rewritten.
    Stacked,
    /// At once, the graph as it is.
    AsDeclared,
    /// One after the other.
    ItemByItem,
}

impl Model {
    /// Reads the file and puts its weights on `device`. Fails when the file is damaged or needs anything that the
    /// executor lacks; the message names the operator, the node and the file.
    pub fn open(path: &Path, device: &Device) -> Result<Self, OnnxError> {
        let file = |source| OnnxError::File { path: path.to_owned(), source };
        let metadata = std::fs::metadata(path).map_err(file)?;
        if !metadata.is_file() || metadata.len() > MAX_FILE {
            let problem = "it should be a file of at most 2 GiB".to_owned();
            return Err(OnnxError::BadFile { path: path.to_owned(), problem });
        }
        Self::parse(path, &std::fs::read(path).map_err(file)?, device)
    }

    /// As [`Model::open`], from the file's bytes; `path` is what messages call it.
    pub fn parse(path: &Path, bytes: &[u8], device: &Device) -> Result<Self, OnnxError> {
        let graph = read(path, bytes, device)?;
        let declared = &graph.inputs[0].shape;
        let batching = match declared.first() {
            Some(Some(1)) | None if !declared.is_empty() && carries_items(&graph, declared.len()) => Batching::Stacked,
            Some(Some(1)) | None => Batching::ItemByItem,
            Some(None) if !graph.nodes.iter().any(|n| fixes_batch(n, &graph)) => Batching::AsDeclared,
            Some(None) if carries_items(&graph, declared.len()) => Batching::Stacked,
            Some(None) => Batching::ItemByItem,
            Some(Some(_)) => Batching::AsDeclared,
        };
        tracing::debug!(path = %path.display(), nodes = graph.nodes.len(), ?batching, "read an ONNX model");
        Ok(Self { graph, batching })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.graph.path
    }

    /// The input, one.
    pub fn inputs(&self) -> &[Port] {
        &self.graph.inputs
    }

    /// The outputs, in the file's order.
    pub fn outputs(&self) -> &[Port] {
        &self.graph.output_ports
    }

    /// Every output for `input`, without gradient. Values inside are dropped after their last use.
    ///
    /// Fails when `input` has another shape than declared (axis 0 aside), or a node's inputs do not fit together.
    pub fn run(&self, input: &NdTensor) -> Result<Vec<NdTensor>> {
        self.check(input)?;
        let input = input.clone().untracked();
        let outputs = 0..self.graph.outputs.len();
        let (parts, items) = self.parts(&input);
        let mut columns: Vec<Vec<NdTensor>> = vec![vec![]; outputs.len()];
        for part in &parts {
            let row = execute(&self.graph, part, outputs.clone(), items)?;
            columns.iter_mut().zip(row).for_each(|(column, value)| column.push(value));
        }
        columns.into_iter().map(|parts| Ok(self.stack(parts)?)).collect()
    }

    /// The first output for `input`, and its pullback. Fails as [`Model::run`] does.
    pub fn vjp(&self, input: &NdTensor) -> Result<(NdTensor, Recorded)> {
        self.check(input)?;
        let (parts, items) = self.parts(&input.clone().untracked());
        let (mut values, mut records) = (vec![], vec![]);
        for part in parts {
            let (value, record) =
                vjp(&[part], Tape::off(), |inputs, _| Ok(execute(&self.graph, &inputs[0], 0..1, items)?))?;
            records.push(record);
            values.extend(value);
        }
        let leading = values.iter().map(|v| v.shape().first().copied().unwrap_or(1)).collect();
        let value = self.stack(values)?;
        let recorded = Recorded {
            path: self.graph.path.clone(),
            port: self.graph.output_ports[0].name.clone(),
            input_shape: input.shape().to_vec(),
            output_shape: value.shape().to_vec(),
            leading,
            records,
        };
        Ok((value, recorded))
    }

    fn check(&self, input: &NdTensor) -> Result<(), OnnxError> {
        let port = &self.graph.inputs[0];
        let found = input.shape();
        let free_batch = self.batching != Batching::AsDeclared;
        let fits = port.shape.is_empty()
            || port.shape.len() == found.len()
                && port.shape.iter().zip(found).enumerate().all(|(axis, (declared, &found))| {
                    axis == 0 && free_batch || declared.is_none_or(|declared| declared == found)
                });
        if fits && !found.is_empty() && !found.contains(&0) {
            return Ok(());
        }
        let expected = port.shape.iter().enumerate().map(|(axis, d)| match d {
            _ if axis == 0 && free_batch => "N".to_owned(),
            Some(d) => d.to_string(),
            None => "?".to_owned(),
        });
        let expected = format!("[{}]", expected.collect::<Vec<_>>().join(", "));
        Err(OnnxError::Port { path: self.graph.path.clone(), port: port.name.clone(), expected, found: found.to_vec() })
    }

    /// What is run at once, and the number of items when constants of the file must be rewritten to it.
    fn parts(&self, input: &NdTensor) -> (Vec<NdTensor>, Option<usize>) {
        let items = input.shape()[0];
        match self.batching {
            _ if items == 1 => (vec![input.clone()], None),
            Batching::AsDeclared => (vec![input.clone()], None),
            Batching::Stacked => (vec![input.clone()], Some(items)),
            Batching::ItemByItem => (split(input, &vec![1; items]), None),
        }
    }

    fn stack(&self, parts: Vec<NdTensor>) -> Result<NdTensor, OnnxError> {
        let error = |problem: Problem| OnnxError::BadFile {
            path: self.graph.path.clone(),
            problem: format!("its outputs for several items cannot be put together: {}", problem.0),
        };
        concatenate(parts).map_err(error)
    }
}

/// Whether `node` gives axis 0 the constant length 1, though the file declares the axis free.
fn fixes_batch(node: &super::read::Node, graph: &Graph) -> bool {
    let shape = node.inputs.get(1).copied().flatten().and_then(|slot| graph.constants[slot].as_ref());
    node.kind == "Reshape" && shape.is_some_and(|s| s.value.ints().is_ok_and(|ints| ints.first() == Some(&1)))
}

/// `input` cut along axis 0 into pieces of the given lengths.
fn split(input: &NdTensor, lengths: &[usize]) -> Vec<NdTensor> {
    let inner: usize = input.shape()[1..].iter().product();
    let mut start = 0;
    let piece = |&length: &usize| {
        let shape: Vec<usize> = [length].iter().chain(&input.shape()[1..]).copied().collect();
        let flat = input.flat().clone().narrow(0, start * inner, length * inner);
        start += length;
        NdTensor::from_flat(flat, shape)
    };
    lengths.iter().map(piece).collect()
}

fn concatenate(mut parts: Vec<NdTensor>) -> Result<NdTensor, Problem> {
    if let [_] = parts.as_slice() {
        return parts.pop().ok_or_else(|| "nothing was computed".into());
    }
    let first = parts.first().map(|p| p.shape().to_vec()).unwrap_or_default();
    let alike = |p: &NdTensor| p.shape().len() == first.len() && p.shape().get(1..) == first.get(1..);
    if first.is_empty() || !parts.iter().all(alike) {
        return Err("their shapes differ from item to item, or are scalars".into());
    }
    let rows = parts.iter().map(|p| p.shape()[0]).sum();
    let flat = Tensor::cat(parts.into_iter().map(|p| p.flat().clone()).collect(), 0);
    Ok(NdTensor::from_flat(flat, [rows].iter().chain(&first[1..]).copied().collect::<Vec<_>>()))
}

/// The recorded first output of a [`Model`], waiting for its cotangent.
pub struct Recorded {
    path: PathBuf,
    port: String,
    input_shape: Vec<usize>,
    output_shape: Vec<usize>,
    leading: Vec<usize>,
    records: Vec<roll_backends::vjp::Recorded>,
}

impl Recorded {
    /// The cotangent of the input, given that of the first output. Zero where the output does not depend on the input.
    pub fn pull(self, cotangent: NdTensor) -> Result<NdTensor> {
        if cotangent.shape() != self.output_shape {
            let found = cotangent.shape().to_vec();
            let expected = format!("of shape {:?} here", self.output_shape);
            return Err(OnnxError::Port { path: self.path, port: self.port, expected, found }.into());
        }
        let cotangents = match self.records.len() {
            1 => vec![cotangent.untracked()],
            _ => split(&cotangent.untracked(), &self.leading),
        };
        let device = cotangents[0].device();
        let items = self.records.len();
        let shape: Vec<usize> = [self.input_shape[0] / items].iter().chain(&self.input_shape[1..]).copied().collect();
        let pulled = no_panic(|| {
            let parts = self.records.into_iter().zip(cotangents).map(|(record, cotangent)| {
                let gradient = record.pull(vec![Some(cotangent)], None).pop().flatten();
                gradient.unwrap_or_else(|| {
                    let zeros = Tensor::zeros([shape.iter().product::<usize>()], &device);
                    NdTensor::from_flat(zeros, shape.clone())
                })
            });
            concatenate(parts.collect())
        });
        Ok(pulled.map_err(|p| OnnxError::BadFile {
            path: self.path,
            problem: format!("the gradient cannot be computed: {}", p.0),
        })?)
    }
}

impl std::fmt::Debug for Recorded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recorded").field("path", &self.path).field("input", &self.input_shape).finish_non_exhaustive()
    }
}
