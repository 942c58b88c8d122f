//! Reads the bytes of an ONNX file to a [`Graph`] that can run: typed operators in execution order. The crate onnx-rs
//! parses the file; nodes whose inputs are all constant are computed here, once (constant folding).

use std::collections::{HashMap, HashSet};
use std::path::Path;

use burn_tensor::Device;
use onnx_rs::ast;
use roll_core::DType;

use super::attributes::{Attributes, OperatorSpec, SpecInput};
use super::error::{OnnxError, Problem, no_panic};
use super::execute::run_node;
use super::graph::{Graph, Node, Port};
use super::ops::{self, Run};
use super::value::{Constant, ElementLimit, Value};
use super::{nesting, tensor_proto};

/// The versions of ONNX's default operator set that are supported.
const OPSETS: std::ops::RangeInclusive<i64> = 7..=23;

/// Greatest number of elements of all folded constants, in addition to one per byte of the file: a few hundred bytes
/// can request any number of large constants.
const MAX_FOLDED: usize = 1 << 24;

/// Reads the model in `bytes`. `path` is for error messages.
pub(super) fn read(path: &Path, bytes: &[u8], device: &Device) -> Result<Graph, OnnxError> {
    let bad = |problem: String| OnnxError::BadFile { path: path.to_owned(), problem };
    nesting::check(bytes).map_err(bad)?;
    let parsed = no_panic(|| onnx_rs::parse(bytes).map_err(|e| format!("it is no ONNX model: {e}").into()));
    let model = parsed.map_err(|p| bad(p.0))?;
    let graph =
        model.graph.as_ref().ok_or_else(|| bad("it holds no graph: it is no ONNX model, or is cut off".into()))?;
    let opset = model.opset_import.iter().find(|o| is_default_domain(o.domain)).map(|o| o.version);
    let opset = opset.ok_or_else(|| bad("it does not say which operator set it uses".into()))?;
    if !OPSETS.contains(&opset) {
        return Err(bad(format!("it uses the operator set {opset}; this build knows {OPSETS:?}")));
    }
    if !graph.sparse_initializer.is_empty() {
        return Err(bad("it has sparse initialisers, which are not read".into()));
    }
    let fold_budget = MAX_FOLDED + bytes.len();
    GraphReader {
        path,
        graph,
        opset,
        device,
        slots: HashMap::new(),
        constants: vec![],
        read_names: HashSet::new(),
        fold_budget,
        fold_budget_left: fold_budget,
    }
    .read()
}

fn is_default_domain(domain: &str) -> bool {
    domain.is_empty() || domain == "ai.onnx"
}

/// Converts the graph of a parsed file.
struct GraphReader<'a> {
    path: &'a Path,
    graph: &'a ast::Graph<'a>,
    opset: i64,
    device: &'a Device,
    /// The slot of each value, by its name in the file.
    slots: HashMap<&'a str, usize>,
    /// The value in each slot, if it is constant.
    constants: Vec<Option<Constant>>,
    /// Names of the values that are read by an output of the graph, or by a node on which an output depends.
    read_names: HashSet<&'a str>,
    /// Number of elements that may be folded.
    fold_budget: usize,
    /// Number of elements that may still be folded.
    fold_budget_left: usize,
}

impl<'a> GraphReader<'a> {
    /// Converts the graph.
    fn read(mut self) -> Result<Graph, OnnxError> {
        for tensor in &self.graph.initializer {
            let constant = tensor_proto::constant(tensor, self.device)
                .map_err(|p| self.bad(format!("the initialiser `{}` cannot be read: {}", tensor.name(), p.0)))?;
            let slot = self.define(tensor.name())?;
            self.constants[slot] = Some(constant);
        }
        // Before IR version 4, initialisers are listed among the inputs, too.
        let inputs: Vec<_> = self.graph.input.iter().filter(|i| !self.slots.contains_key(i.name)).collect();
        if inputs.is_empty() {
            return Err(self.bad("the graph has no input: everything in it is constant".into()));
        }
        let (mut ports, mut input_slots) = (vec![], vec![]);
        for input in inputs {
            let dtype = input_dtype(input).ok_or_else(|| {
                let found = input.tensor_elem_type();
                self.bad(format!(
                    "its input `{}` is {found:?}; float, int64, int32, uint8 and bool are taken",
                    input.name
                ))
            })?;
            ports.push(port(input, dtype));
            input_slots.push(self.define(input.name)?);
        }
        if self.graph.output.is_empty() {
            return Err(self.bad("the graph has no output".into()));
        }
        let order = self.execution_order()?;
        let read_by_nodes = order.iter().flat_map(|index| &self.graph.node[*index].input).copied();
        self.read_names = read_by_nodes.chain(self.graph.output.iter().map(|output| output.name)).collect();
        let mut nodes = vec![];
        for index in order {
            nodes.extend(self.convert(&self.graph.node[index])?);
        }
        let mut outputs = vec![];
        for output in &self.graph.output {
            let slot = self.slots.get(output.name).copied();
            outputs.push(slot.ok_or_else(|| self.bad(format!("nothing computes the output `{}`", output.name)))?);
        }
        let mut graph = Graph {
            path: self.path.to_owned(),
            inputs: ports,
            // All float types are computed as f32, all others as i64.
            output_ports: self.graph.output.iter().map(|o| port(o, output_dtype(o))).collect(),
            nodes,
            slot_count: self.constants.len(),
            constants: self.constants,
            fused_elements: 0,
            input_slots,
            outputs,
        };
        graph.drop_unused_constants(); // inputs of folded nodes
        Ok(graph)
    }

    /// The error for a problem of the file.
    fn bad(&self, problem: String) -> OnnxError {
        OnnxError::BadFile { path: self.path.to_owned(), problem }
    }

    /// Creates a slot for the value `name`.
    fn define(&mut self, name: &'a str) -> Result<usize, OnnxError> {
        let slot = self.constants.len();
        self.constants.push(None);
        match self.slots.insert(name, slot) {
            None => Ok(slot),
            Some(_) => Err(self.bad(format!("the value `{name}` is defined twice"))),
        }
    }

    /// The nodes that the outputs depend on, in topological order: a depth-first search. Its stack is a list instead of
    /// recursion, because chains may be long.
    fn execution_order(&self) -> Result<Vec<usize>, OnnxError> {
        let nodes = &self.graph.node;
        let mut producers = HashMap::new();
        for (index, node) in nodes.iter().enumerate() {
            for &output in node.output.iter().filter(|o| !o.is_empty()) {
                if producers.insert(output, index).is_some() || self.slots.contains_key(output) {
                    return Err(self.bad(format!("the value `{output}` is defined twice")));
                }
            }
        }
        let (mut started, mut done, mut order) = (vec![false; nodes.len()], vec![false; nodes.len()], vec![]);
        let mut stack: Vec<usize> =
            self.graph.output.iter().rev().filter_map(|o| producers.get(o.name).copied()).collect();
        while let Some(&index) = stack.last() {
            if done[index] {
                stack.pop();
                continue;
            }
            // Seen for the second time: the producers of its inputs, which were pushed above it, are done.
            if started[index] {
                done[index] = true;
                order.push(index);
                stack.pop();
                continue;
            }
            started[index] = true;
            let computed = nodes[index].input.iter().filter(|i| !i.is_empty() && !self.slots.contains_key(*i));
            for input in computed {
                let Some(&producer) = producers.get(input) else {
                    let node = node_name(&nodes[index]);
                    return Err(self.bad(format!("node `{node}` reads `{input}`, which nothing computes")));
                };
                if started[producer] && !done[producer] {
                    let node = node_name(&nodes[index]);
                    return Err(self.bad(format!("node `{node}` is part of a cycle through `{input}`")));
                }
                if !done[producer] {
                    stack.push(producer);
                }
            }
        }
        Ok(order)
    }

    /// Converts a node to an operator; `None` if it was folded into constants.
    fn convert(&mut self, node: &'a ast::Node<'a>) -> Result<Option<Node>, OnnxError> {
        let name = node_name(node).to_owned();
        let kind = node.op_type.as_str().to_owned();
        let error = |path: &Path, problem: Problem| OnnxError::Node {
            path: path.to_owned(),
            node: name.clone(),
            operator: kind.clone(),
            problem: problem.0,
        };
        let is_standard = is_default_domain(node.domain);
        let builder = if is_standard { ops::builder(&kind) } else { None };
        let Some(builder) = builder else {
            let operator = if is_standard { kind } else { format!("{}.{kind}", node.domain) };
            return Err(OnnxError::Operator { path: self.path.to_owned(), node: name, operator });
        };
        let inputs: Vec<Option<usize>> = node.input.iter().map(|i| self.slots.get(i).copied()).collect();
        let operator = self.build_operator(node, &inputs, builder).map_err(|p| error(self.path, p))?;
        let mut outputs = vec![];
        for &output in &node.output[..self.read_output_count(node)] {
            let is_read = !output.is_empty() && self.read_names.contains(output);
            outputs.push(if is_read { Some(self.define(output)?) } else { None });
        }
        let converted = Node { name: name.clone(), kind: kind.clone(), operator, inputs, outputs };
        // The constant inputs; `None` if an input is not constant.
        let constant_inputs: Option<Vec<Option<&Value>>> = converted
            .inputs
            .iter()
            .map(|slot| match slot {
                None => Some(None), // an optional input that is left out
                Some(slot) => self.constants[*slot].as_ref().map(|constant| Some(&constant.value)),
            })
            .collect();
        let Some(constant_inputs) = constant_inputs else { return Ok(Some(converted)) };
        let values = {
            // A guard: the limit applies until the end of this block.
            let _limit = ElementLimit::new(self.fold_budget);
            run_node(&converted, &constant_inputs, Run { items: None }).map_err(|p| error(self.path, p))?
        };
        self.store_folded(&converted, values).map_err(|p| error(self.path, p))?;
        Ok(None)
    }

    /// Stores the outputs of a folded node as constants. Fails if all folded constants exceed the budget.
    fn store_folded(&mut self, node: &Node, values: Vec<Value>) -> Result<(), Problem> {
        let budget = self.fold_budget;
        let too_many = || {
            Problem(format!(
                "constants computed from others have more than {budget} numbers in all: {MAX_FOLDED}, and one per byte \
                 of the file"
            ))
        };
        for (slot, value) in node.outputs.iter().zip(values) {
            let count = value.shape().iter().product::<usize>();
            self.fold_budget_left = self.fold_budget_left.checked_sub(count).ok_or_else(too_many)?;
            if let Some(slot) = slot {
                self.constants[*slot] = Some(Constant::new(value)?);
            }
        }
        Ok(())
    }

    /// The number of outputs of `node` up to the last one that a node or an output of the graph reads. Files name
    /// optional outputs (masks, indices, statistics) without reading them.
    fn read_output_count(&self, node: &ast::Node<'a>) -> usize {
        let is_read = |output: &&'a str| !output.is_empty() && self.read_names.contains(output);
        node.output.iter().rposition(is_read).map_or(0, |last| last + 1)
    }

    /// The input of a node in `slot`; `None` if it is left out.
    fn spec_input(&self, slot: Option<usize>) -> SpecInput<'_> {
        let Some(slot) = slot else { return SpecInput::Absent };
        self.constants[slot].as_ref().map_or(SpecInput::Computed, SpecInput::Constant)
    }

    /// Builds the operator of `node` from its attributes and constant inputs. Fails if it leaves an attribute unread.
    fn build_operator(&self, node: &ast::Node<'a>, inputs: &[Option<usize>], builder: ops::Builder) -> ops::Built {
        let mut spec = OperatorSpec {
            operator: node.op_type.as_str(),
            opset: self.opset,
            attributes: Attributes::of(node)?,
            inputs: inputs.iter().map(|slot| self.spec_input(*slot)).collect(),
            outputs: node.output.iter().filter(|o| !o.is_empty()).count(),
            read_outputs: self.read_output_count(node),
            device: self.device,
        };
        let operator = no_panic(|| builder(&mut spec))?;
        spec.attributes.finish()?;
        Ok(operator)
    }
}

/// The name of `node` in messages: the name of its first output if it has none.
fn node_name<'a>(node: &ast::Node<'a>) -> &'a str {
    if node.name.is_empty() { node.output.first().copied().unwrap_or("") } else { node.name }
}

/// The port of an input or output of the file.
fn port(value: &ast::ValueInfo, dtype: DType) -> Port {
    let dimensions = value.tensor_shape().map(|s| s.dim.as_slice()).unwrap_or_default();
    let shape = dimensions.iter().map(|d| match d.value {
        ast::Dimension::Value(n) => usize::try_from(n).ok().filter(|n| *n > 0),
        ast::Dimension::Param(_) => None,
    });
    Port { name: value.name.to_owned(), dtype, shape: shape.collect() }
}

/// The declared type of an input. It is f32 if the file declares no type, and `None` if the type is not supported.
fn input_dtype(input: &ast::ValueInfo) -> Option<DType> {
    Some(match input.tensor_elem_type() {
        None | Some(ast::DataType::Undefined | ast::DataType::Float) => DType::F32,
        Some(ast::DataType::Int64) => DType::I64,
        Some(ast::DataType::Int32) => DType::I32,
        Some(ast::DataType::Uint8) => DType::U8,
        Some(ast::DataType::Bool) => DType::Bool,
        Some(_) => return None,
    })
}

/// The type in which an output is computed.
fn output_dtype(output: &ast::ValueInfo) -> DType {
    use ast::DataType::{Bfloat16, Double, Float, Float16, Undefined};
    match output.tensor_elem_type() {
        None | Some(Undefined | Float | Float16 | Bfloat16 | Double) => DType::F32,
        Some(_) => DType::I64,
    }
}
