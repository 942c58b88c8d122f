#![allow(clippy::unwrap_used)]
//! Small graphs built here, hostile files, and real networks compared with ONNX Runtime.

mod fuse;
mod hostile;
mod networks;
mod operators;
mod parity;
mod text;

use std::path::Path;

use burn_tensor::Device;
use onnx_rs::ast::{
    Attribute, AttributeType, DataType, Dimension, Graph, Node, OpType, OperatorSetId, TensorProto, TensorShape,
    TensorShapeDimension, TensorTypeProto, TypeProto, TypeValue, ValueInfo,
};
use roll_backends::NdTensor;
use roll_backends::host::to_host_nd;
use roll_testing::messages;

use super::value::upload;
use super::{Model, OnnxError};

/// The device of the tests: the backend in `ROLL_TEST_BACKEND`, or flex.
fn device() -> Device {
    roll_backends::device(std::env::var("ROLL_TEST_BACKEND").as_deref().unwrap_or("flex")).unwrap()
}

/// A graph under construction. Input `x` and output `y` are floats unless others are given.
#[derive(Clone)]
struct File<'a> {
    opset: i64,
    inputs: Vec<(&'a str, DataType, Vec<i64>)>,
    nodes: Vec<Node<'a>>,
    initialisers: Vec<TensorProto<'a>>,
    outputs: Vec<(&'a str, DataType)>,
}

impl<'a> File<'a> {
    /// Starts a graph with the input `x`. A free axis is -1.
    fn new(opset: i64, input: &[i64]) -> Self {
        Self::of(opset, &[("x", DataType::Float, input)], &[("y", DataType::Float)])
    }

    /// Starts a graph with these inputs and outputs.
    fn of(opset: i64, inputs: &[(&'a str, DataType, &[i64])], outputs: &[(&'a str, DataType)]) -> Self {
        let inputs = inputs.iter().map(|(name, kind, dims)| (*name, *kind, dims.to_vec())).collect();
        Self { opset, inputs, nodes: vec![], initialisers: vec![], outputs: outputs.to_vec() }
    }

    fn node(self, op: &'a str, inputs: &[&'a str], output: &'a str, attributes: Vec<Attribute<'a>>) -> Self {
        self.nodes(op, inputs, &[output], attributes)
    }

    fn nodes(mut self, op: &'a str, inputs: &[&'a str], outputs: &[&'a str], attributes: Vec<Attribute<'a>>) -> Self {
        self.nodes.push(Node {
            op_type: OpType::from(op),
            // Unique names, which ONNX Runtime requires.
            name: if self.nodes.is_empty() { "the_node" } else { outputs[0] },
            input: inputs.to_vec(),
            output: outputs.to_vec(),
            attribute: attributes,
            ..Default::default()
        });
        self
    }

    fn floats(mut self, name: &'a str, shape: &[i64], values: &[f32]) -> Self {
        self.initialisers.push(TensorProto::from_f32(name, shape.to_vec(), values.to_vec()));
        self
    }

    fn ints(mut self, name: &'a str, values: &[i64]) -> Self {
        self.initialisers.push(TensorProto::from_i64(name, vec![values.len() as i64], values.to_vec()));
        self
    }

    /// An integer constant of any shape; an empty shape is a scalar.
    fn shaped(mut self, name: &'a str, shape: &[i64], values: &[i64]) -> Self {
        self.initialisers.push(TensorProto::from_i64(name, shape.to_vec(), values.to_vec()));
        self
    }

    fn bytes(self) -> Vec<u8> {
        let dimension = |&d: &i64| TensorShapeDimension {
            value: if d < 0 { Dimension::Param("free") } else { Dimension::Value(d) },
            denotation: "",
        };
        let port = |name, elem_type, dims: Option<&[i64]>| {
            let shape = dims.map(|dims| TensorShape { dim: dims.iter().map(dimension).collect() });
            let value = Some(TypeValue::Tensor(TensorTypeProto { elem_type, shape }));
            ValueInfo { name, r#type: Some(TypeProto { value, denotation: "" }), ..Default::default() }
        };
        onnx_rs::encode(&onnx_rs::Model {
            ir_version: 8,
            opset_import: vec![OperatorSetId { domain: "", version: self.opset }],
            graph: Some(Graph {
                name: "g",
                input: self.inputs.iter().map(|(name, kind, dims)| port(name, *kind, Some(dims))).collect(),
                output: self.outputs.iter().map(|(name, kind)| port(name, *kind, None)).collect(),
                node: self.nodes,
                initializer: self.initialisers,
                ..Default::default()
            }),
            ..Default::default()
        })
    }

    fn open(self) -> Result<Model, OnnxError> {
        Model::parse(Path::new("faces/x.onnx"), &self.bytes(), &device())
    }
}

fn int(name: &str, i: i64) -> Attribute<'_> {
    Attribute { name, r#type: AttributeType::Int, i, ..Default::default() }
}

fn ints<'a>(name: &'a str, ints: &[i64]) -> Attribute<'a> {
    Attribute { name, r#type: AttributeType::Ints, ints: ints.to_vec(), ..Default::default() }
}

fn float(name: &str, f: f32) -> Attribute<'_> {
    Attribute { name, r#type: AttributeType::Float, f, ..Default::default() }
}

fn text<'a>(name: &'a str, s: &'a str) -> Attribute<'a> {
    Attribute { name, r#type: AttributeType::String, s: s.as_bytes(), ..Default::default() }
}

fn tensor(values: &[f32], shape: &[usize]) -> NdTensor {
    upload(values.to_vec(), shape.to_vec(), &device())
}

/// The generator in golden.py: values in [-1, 1).
fn noise(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

fn host(t: &NdTensor) -> Vec<f32> {
    to_host_nd(t).unwrap().to_f32_vec()
}

/// Compiles only if models can be shared between threads and pullbacks can move between threads.
const _: fn() = || {
    fn shared<T: Send + Sync>() {}
    fn moved<T: Send>() {}
    shared::<Model>();
    moved::<super::Recorded>();
};
