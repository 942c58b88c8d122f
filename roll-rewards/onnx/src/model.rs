//! An ONNX model: opened, run and differentiated.

use std::io::Read;
use std::ops::Range;
use std::path::Path;

use burn_tensor::Device;
use roll_backends::{NdTensor, Tape, vjp};
use roll_core::{DType, Result, Tensor};
use roll_external::files;

use super::batch::is_batchable;
use super::error::{OnnxError, Problem};
use super::execute::execute;
use super::fuse::fuse;
use super::graph::{Graph, Node, Port};
use super::read::read;
use super::recorded::Recorded;
use super::thread_pool;
use super::value::Value;

/// Greatest size of a file; protobuf's own limit is 2 GiB.
const MAX_FILE: u64 = 1 << 31;

/// A graph with its weights on a device.
///
/// A graph with one float input accepts any number of items along axis 0. If it was exported for a batch of one, all
/// items run at once if every node is proven to treat them independently; a constant 1 at the start of a Reshape or
/// Resize shape then becomes the number of items. Without this proof, items run one by one and outputs are concatenated
/// along axis 0. A graph with a free batch axis runs as it is, unless such a constant shows that the axis is not really
/// free.
///
/// A graph with several inputs, or with an integer input, runs as it is, or item by item if every input was exported
/// for a batch of one.
#[derive(Debug)]
pub struct Model {
    graph: Graph,
    batching: Batching,
    device: Device,
    /// Index of the output that [`Model::value`] computes and [`Model::vjp`] differentiates.
    output: usize,
}

/// How several items run.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Batching {
    /// At once, with constant batch axes rewritten.
    Stacked,
    /// At once, on the original graph.
    AsDeclared,
    ItemByItem,
}

impl Batching {
    /// Chooses from the declared inputs; [`Model`] has the rules.
    fn of(graph: &Graph) -> Self {
        let [Port { dtype: DType::F32, shape: declared, .. }] = graph.inputs.as_slice() else {
            // Several inputs, or an integer input.
            let is_for_one_item = graph.inputs.iter().all(|input| input.shape.first() == Some(&Some(1)));
            return if is_for_one_item { Self::ItemByItem } else { Self::AsDeclared };
        };
        match declared.first() {
            // No declared shape, or a scalar.
            None => Self::ItemByItem,
            // Exported for a batch of one.
            Some(Some(1)) if is_batchable(graph, declared.len()) => Self::Stacked,
            Some(Some(1)) => Self::ItemByItem,
            // Exported for a fixed batch of several items.
            Some(Some(_)) => Self::AsDeclared,
            // A free batch axis.
            Some(None) if !graph.nodes.iter().any(|n| fixes_batch(n, graph)) => Self::AsDeclared,
            // An axis that is declared free and that a node fixes to 1.
            Some(None) if is_batchable(graph, declared.len()) => Self::Stacked,
            Some(None) => Self::ItemByItem,
        }
    }
}

impl Model {
    /// Reads the file and uploads its weights to `device`. Fails if the file is damaged or needs an unsupported
    /// feature; the error names operator, node and file.
    pub fn open(path: &Path, device: &Device) -> Result<Self, OnnxError> {
        let read_error = |source| OnnxError::File { path: path.to_owned(), source };
        let metadata = std::fs::metadata(path).map_err(read_error)?;
        if !metadata.is_file() || metadata.len() > MAX_FILE {
            let problem = "it should be a file of at most 2 GiB".to_owned();
            return Err(OnnxError::BadFile { path: path.to_owned(), problem });
        }
        let mut bytes = Vec::new();
        files::open_binary(path).and_then(|mut file| file.read_to_end(&mut bytes)).map_err(read_error)?;
        Self::parse(path, &bytes, device)
    }

    /// Opens a model like [`Model::open`], from the file's bytes. Error messages call the file `path`.
    pub fn parse(path: &Path, bytes: &[u8], device: &Device) -> Result<Self, OnnxError> {
        Ok(Self::of(fuse(read(path, bytes, device)?, device), device))
    }

    /// Like [`Model::parse`], without [`fuse`]; tests compare both.
    #[cfg(test)]
    pub(super) fn unfused(path: &Path, bytes: &[u8], device: &Device) -> Result<Self, OnnxError> {
        Ok(Self::of(read(path, bytes, device)?, device))
    }

    /// Number of nodes.
    #[cfg(test)]
    pub(super) fn nodes(&self) -> usize {
        self.graph.nodes.len()
    }

    /// Creates a model of `graph`, whose weights are on `device`.
    fn of(graph: Graph, device: &Device) -> Self {
        let batching = Batching::of(&graph);
        tracing::debug!(path = %graph.path.display(), nodes = graph.nodes.len(), ?batching, "read an ONNX model");
        Self { graph, batching, device: device.clone(), output: 0 }
    }

    /// Selects the output that [`Model::value`] computes and [`Model::vjp`] differentiates; the default is the first.
    /// Fails, and lists the outputs, if none is called `name`.
    pub fn with_output(mut self, name: &str) -> Result<Self, OnnxError> {
        let ports = &self.graph.output_ports;
        self.output = ports.iter().position(|port| port.name == name).ok_or_else(|| {
            let names: Vec<&str> = ports.iter().map(|p| p.name.as_str()).collect();
            let problem = format!("it has no output `{name}`; its outputs are `{}`", names.join("`, `"));
            OnnxError::BadFile { path: self.graph.path.clone(), problem }
        })?;
        Ok(self)
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.graph.path
    }

    /// The inputs in the file's order.
    pub fn inputs(&self) -> &[Port] {
        &self.graph.inputs
    }

    /// The outputs in the file's order.
    pub fn outputs(&self) -> &[Port] {
        &self.graph.output_ports
    }

    /// The device of the weights.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Computes every output of a graph with one float input, without gradient. Intermediate values are dropped after
    /// their last use.
    ///
    /// Fails if `input` has another shape than declared (except axis 0), if the graph has other inputs, if a node does
    /// not fit its inputs, or if an output is an integer tensor.
    pub fn run(&self, input: &NdTensor) -> Result<Vec<NdTensor>> {
        let outputs = self.forward(&[Value::Float(input.clone().untracked())], 0..self.graph.outputs.len())?;
        outputs.into_iter().map(|value| Ok(self.float(value)?)).collect()
    }

    /// Computes the output that [`Model::with_output`] selected, without gradient and without work for other outputs.
    /// Fails like [`Model::run`].
    pub fn value(&self, input: &NdTensor) -> Result<NdTensor> {
        let selected_output = self.output..self.output + 1;
        let mut outputs = self.forward(&[Value::Float(input.clone().untracked())], selected_output)?;
        Ok(self.float(outputs.remove(0))?)
    }

    /// Computes every output, without gradient, for one tensor per input in the file's order: f32 for a float input,
    /// otherwise integers or booleans. Outputs are f32 or i64.
    ///
    /// Fails like [`Model::run`], and if a tensor has another type than its input.
    pub fn run_all(&self, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        self.forward(&self.upload(inputs)?, 0..self.graph.outputs.len())?
            .into_iter()
            .map(|value| value.to_host())
            .collect()
    }

    /// Computes the selected output (default: the first) for `input`, and its pullback. Fails like [`Model::run`].
    pub fn vjp(&self, input: &NdTensor) -> Result<(NdTensor, Recorded)> {
        let input = [Value::Float(input.clone().untracked())];
        self.check(&input)?;
        thread_pool::run_in_pool(&self.device, || self.recorded(&input))
    }

    /// Whether an executor that runs the original graph must receive items one at a time.
    pub(super) fn is_for_one_item(&self) -> bool {
        self.batching != Batching::AsDeclared
    }

    /// Concatenates one float output of several runs along axis 0.
    pub(super) fn stack_floats(&self, runs: Vec<NdTensor>) -> Result<NdTensor> {
        Ok(self.float(self.stack(runs.into_iter().map(Value::Float).collect())?)?)
    }

    /// Fails unless there is one value per input, of the declared type and shape.
    pub(super) fn check(&self, values: &[Value]) -> Result<(), OnnxError> {
        let (ports, path) = (&self.graph.inputs, &self.graph.path);
        if values.len() != ports.len() {
            let names: Vec<&str> = ports.iter().map(|p| p.name.as_str()).collect();
            let (expected, found) = (names.join("`, `"), values.len());
            return Err(OnnxError::Inputs { path: path.clone(), expected, found });
        }
        let mut items_of_previous = None;
        for (port, value) in ports.iter().zip(values) {
            let is_float = matches!(value, Value::Float(_));
            if is_float != (port.dtype == DType::F32) {
                let found = if is_float { "floats" } else { "integers" };
                let (port, expected) = (port.name.clone(), port.dtype);
                return Err(OnnxError::Type { path: path.clone(), port, expected, found });
            }
            // If items run one by one, every input must have the same number of items.
            let has_same_items = self.batching != Batching::ItemByItem
                || items_of_previous.is_none_or(|items| value.shape().first() == Some(&items));
            if !self.fits(port, value.shape()) || !has_same_items {
                return Err(self.misfit(port, value.shape()));
            }
            items_of_previous = value.shape().first().copied();
        }
        Ok(())
    }

    /// Whether a tensor of the shape `found` can be the input `port`.
    fn fits(&self, port: &Port, found: &[usize]) -> bool {
        let has_free_batch = self.batching != Batching::AsDeclared;
        let mut sizes = port.shape.iter().zip(found).enumerate();
        let sizes_fit = sizes.all(|(axis, (declared, &found))| {
            axis == 0 && has_free_batch || declared.is_none_or(|declared| declared == found)
        });
        // If no shape is declared, every shape fits.
        let matches_declared = port.shape.is_empty() || port.shape.len() == found.len() && sizes_fit;
        // A scalar has no items; it is accepted only if the graph runs as declared.
        matches_declared && (!found.is_empty() || !has_free_batch) && !found.contains(&0)
    }

    /// The error for a tensor that is not the input `port`.
    fn misfit(&self, port: &Port, found: &[usize]) -> OnnxError {
        let has_free_batch = self.batching != Batching::AsDeclared;
        let expected = port.shape.iter().enumerate().map(|(axis, d)| match d {
            _ if axis == 0 && has_free_batch => "N".to_owned(),
            Some(d) => d.to_string(),
            None => "?".to_owned(),
        });
        let expected = format!("[{}]", expected.collect::<Vec<_>>().join(", "));
        OnnxError::Port { path: self.graph.path.clone(), port: port.name.clone(), expected, found: found.to_vec() }
    }

    /// Converts one tensor per input to values on the device.
    fn upload(&self, inputs: &[Tensor]) -> Result<Vec<Value>> {
        inputs.iter().map(|tensor| Value::from_host(tensor, &self.device)).collect()
    }

    /// Computes the outputs with the indices `outputs`, without gradient.
    fn forward(&self, inputs: &[Value], outputs: Range<usize>) -> Result<Vec<Value>> {
        self.check(inputs)?;
        thread_pool::run_in_pool(&self.device, || {
            let (runs, items) = self.runs(inputs);
            let mut values_by_output: Vec<Vec<Value>> = vec![vec![]; outputs.len()];
            for run_inputs in &runs {
                let values = execute(&self.graph, run_inputs, outputs.clone(), items)?;
                for (values_of_output, value) in values_by_output.iter_mut().zip(values) {
                    values_of_output.push(value);
                }
            }
            values_by_output.into_iter().map(|values| Ok(self.stack(values)?)).collect()
        })
    }

    /// Computes the selected output for the one input, which is a float tensor, and its pullback.
    fn recorded(&self, input: &[Value; 1]) -> Result<(NdTensor, Recorded)> {
        let (runs, items) = self.runs(input);
        let (mut values, mut records) = (vec![], vec![]);
        for inputs in runs {
            let floats: Vec<NdTensor> = inputs.into_iter().map(|value| self.float(value)).collect::<Result<_, _>>()?;
            let (value, record) = vjp(&floats, Tape::off(), |tracked, _| {
                let inputs: Vec<Value> = tracked.iter().cloned().map(Value::Float).collect();
                let outputs = execute(&self.graph, &inputs, self.output..self.output + 1, items)?;
                outputs.into_iter().map(|value| Ok(self.float(value)?)).collect()
            })?;
            records.push(record);
            values.extend(value.into_iter().map(Value::Float));
        }
        let output_lengths = values.iter().map(|v| v.shape().first().copied().unwrap_or(1)).collect();
        let value = self.float(self.stack(values)?)?;
        let recorded = Recorded {
            path: self.graph.path.clone(),
            port: self.graph.output_ports[self.output].name.clone(),
            input_shape: input[0].shape().to_vec(),
            output_shape: value.shape().to_vec(),
            device: self.device.clone(),
            output_lengths,
            records,
        };
        Ok((value, recorded))
    }

    /// The inputs of each run of the graph. The second part is the number of items that replaces the file's constant
    /// batch of one, if it must be replaced.
    fn runs(&self, inputs: &[Value]) -> (Vec<Vec<Value>>, Option<usize>) {
        let items = inputs[0].shape().first().copied().unwrap_or(1);
        match self.batching {
            _ if items == 1 => (vec![inputs.to_vec()], None),
            Batching::AsDeclared => (vec![inputs.to_vec()], None),
            Batching::Stacked => (vec![inputs.to_vec()], Some(items)),
            Batching::ItemByItem => {
                // One iterator per input, over its items.
                let mut items_by_input: Vec<_> = inputs.iter().map(|v| v.split(&vec![1; items]).into_iter()).collect();
                let next_items = |_| items_by_input.iter_mut().filter_map(Iterator::next).collect();
                ((0..items).map(next_items).collect(), None)
            }
        }
    }

    /// Returns the float tensor of an output. Fails for integers.
    fn float(&self, value: Value) -> Result<NdTensor, OnnxError> {
        match value {
            Value::Float(tensor) => Ok(tensor),
            Value::Int { shape, .. } => Err(OnnxError::BadFile {
                path: self.graph.path.clone(),
                problem: format!("an output holds integers of shape {shape:?}, where floats are wanted"),
            }),
        }
    }

    /// Concatenates one output of several runs along axis 0.
    fn stack(&self, runs: Vec<Value>) -> Result<Value, OnnxError> {
        let error = |problem: Problem| OnnxError::BadFile {
            path: self.graph.path.clone(),
            problem: format!("its outputs for several items cannot be put together: {}", problem.0),
        };
        Value::concatenate(runs).map_err(error)
    }
}

/// Whether `node` is a Reshape to a constant shape that begins with 1.
fn fixes_batch(node: &Node, graph: &Graph) -> bool {
    let shape = node.inputs.get(1).copied().flatten().and_then(|slot| graph.constants[slot].as_ref());
    node.kind == "Reshape" && shape.is_some_and(|s| s.value.ints().is_ok_and(|ints| ints.first() == Some(&1)))
}
