#![allow(clippy::unwrap_used)]
//! Small graphs made here, hostile files, and real networks against ONNX Runtime.

mod hostile;
mod networks;
mod operators;

use std::path::Path;

use burn::tensor::Device;
use onnx_rs::ast::{
    Attribute, AttributeType, DataType, Dimension, Graph, Node, OpType, OperatorSetId, TensorProto, TensorShape,
    TensorShapeDimension, TensorTypeProto, TypeProto, TypeValue, ValueInfo,
};
use roll_backends::NdTensor;
use roll_backends::host::to_host_nd;

use super::value::upload;
use super::{Model, OnnxError};

/// Where the tests compute: on the backend in `ROLL_TEST_BACKEND`, or flex.
fn device() -> Device {
    roll_backends::device(std::env::var("ROLL_TEST_BACKEND").as_deref().unwrap_or("flex")).unwrap()
}

/// A graph under construction: input `x`, output `y`.
struct File<'a> {
    opset: i64,
    input: Vec<i64>,
    nodes: Vec<Node<'a>>,
    initialisers: Vec<TensorProto<'a>>,
    outputs: Vec<&'a str>,
}

impl<'a> File<'a> {
    /// One free axis is written as -1.
    fn new(opset: i64, input: &[i64]) -> Self {
        Self { opset, input: input.to_vec(), nodes: vec![], initialisers: vec![], outputs: vec!["y"] }
    }

    fn node(mut self, op: &'a str, inputs: &[&'a str], output: &'a str, attributes: Vec<Attribute<'a>>) -> Self {
        self.nodes.push(Node {
            op_type: OpType::from(op),
            name: "the_node",
            input: inputs.to_vec(),
            output: vec![output],
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

    fn bytes(self) -> Vec<u8> {
        let dimension = |&d: &i64| TensorShapeDimension {
            value: if d < 0 { Dimension::Param("free") } else { Dimension::Value(d) },
            denotation: "",
        };
        let port = |name, dims: &[i64]| ValueInfo {
            name,
            r#type: Some(TypeProto {
                value: Some(TypeValue::Tensor(TensorTypeProto {
                    elem_type: DataType::Float,
                    shape: Some(TensorShape { dim: dims.iter().map(dimension).collect() }),
                })),
                denotation: "",
            }),
            ..Default::default()
        };
        onnx_rs::encode(&onnx_rs::Model {
            ir_version: 8,
            opset_import: vec![OperatorSetId { domain: "", version: self.opset }],
            graph: Some(Graph {
                name: "g",
                input: vec![port("x", &self.input)],
                output: self.outputs.iter().map(|name| port(name, &[])).collect(),
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

/// The generator of golden.py: values in [-1, 1).
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

/// Models are shared between threads, and pullbacks move from one to another: this compiles.
const _: fn() = || {
    fn shared<T: Send + Sync>() {}
    fn moved<T: Send>() {}
    shared::<Model>();
    moved::<super::Recorded>();
};
