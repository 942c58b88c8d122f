//! Writes networks as ONNX files.

use onnx_rs::ast::{
    Attribute, AttributeType, DataType, Dimension, Graph, Node as OnnxNode, OpType, OperatorSetId, TensorProto,
    TensorShape, TensorShapeDimension, TensorTypeProto, TypeProto, TypeValue, ValueInfo,
};
use roll_core::ParameterSpec;

use crate::network::{Network, Node, Op, Value};

/// Operator set of the files. Every operator used here has the same meaning from opset 7 to today.
const OPSET: i64 = 13;
const IR_VERSION: i64 = 7;
/// Name of the input.
const INPUT: &str = "picture";

/// Returns the ONNX file of `network`. Its batch size is dynamic. `values` holds the parameters concatenated in the
/// order of `network.parameters`; values after them are ignored.
pub fn encode(network: &Network, values: &[f32]) -> Vec<u8> {
    let names = Names::of(network);
    let mut rest = values;
    let mut initializer: Vec<TensorProto<'_>> = network
        .parameters
        .iter()
        .map(|spec| {
            let (head, tail) = rest.split_at(spec.len());
            rest = tail;
            TensorProto::from_f32(&spec.name, dimensions(spec), head.to_vec())
        })
        .collect();
    let mut node = vec![];
    for (index, described) in network.nodes.iter().enumerate() {
        let name = names.value(Value(index + 1));
        match described.op {
            Op::Rows { width } => {
                let [last, shape] = &names.rows[index];
                initializer.push(TensorProto::from_i64(shape, vec![3], vec![0, -1, width as i64]));
                let perm = ints("perm", &[0, 2, 3, 1]);
                node.push(onnx("Transpose", vec![names.value(described.inputs[0])], last, vec![perm]));
                node.push(onnx("Reshape", vec![last, shape], name, vec![]));
            }
            _ => node.push(plain(network, described, &names, index, name)),
        }
    }
    let [height, width] = network.picture;
    let outputs = network.outputs.iter().map(|(name, _, shape)| port(name, shape)).collect();
    let graph = Graph {
        name: "network",
        node,
        initializer,
        input: vec![port(INPUT, &[3, height, width])],
        output: outputs,
        ..Default::default()
    };
    onnx_rs::encode(&onnx_rs::Model {
        ir_version: IR_VERSION,
        producer_name: "demo-world",
        opset_import: vec![OperatorSetId { domain: "", version: OPSET }],
        graph: Some(graph),
        ..Default::default()
    })
}

/// The names of values and constants in the file.
struct Names {
    values: Vec<String>,
    /// Names of the transposed map and of the shape constant of [`Op::Rows`], per node.
    rows: Vec<[String; 2]>,
    /// Names of the parameters, per node.
    parameters: Vec<Vec<String>>,
}

impl Names {
    fn of(network: &Network) -> Self {
        let mut values = vec![INPUT.to_owned()];
        values.extend(network.nodes.iter().map(|n| n.name.clone()));
        for (name, value, _) in &network.outputs {
            values[value.0] = name.clone();
        }
        let parts = |node: &Node| -> &[&str] {
            match node.op {
                Op::Conv { .. } | Op::Linear => &["weight", "bias"],
                Op::Prelu => &["slope"],
                _ => &[],
            }
        };
        let rows = network.nodes.iter().map(|n| [format!("{}.last", n.name), format!("{}.shape", n.name)]);
        let parameters = network.nodes.iter().map(|n| parts(n).iter().map(|p| format!("{}.{p}", n.name)).collect());
        Self { values, rows: rows.collect(), parameters: parameters.collect() }
    }

    fn value(&self, value: Value) -> &str {
        &self.values[value.0]
    }
}

/// Returns a node that is one ONNX operator.
fn plain<'a>(network: &Network, node: &Node, names: &'a Names, index: usize, name: &'a str) -> OnnxNode<'a> {
    let mut inputs: Vec<&str> = node.inputs.iter().map(|value| names.value(*value)).collect();
    inputs.extend(names.parameters[index].iter().map(String::as_str));
    let (operator, attributes) = match node.op {
        Op::Conv { stride, padding, groups } => {
            let weight = format!("{}.weight", node.name);
            let kernel = network.parameters.iter().find(|p| p.name == weight).map_or(1, |p| p.shape[3]);
            (
                "Conv",
                vec![
                    ints("kernel_shape", &[kernel; 2]),
                    ints("strides", &[stride; 2]),
                    ints("pads", &[padding; 4]),
                    int("group", groups),
                ],
            )
        }
        Op::Prelu => ("PRelu", vec![]),
        Op::Add => ("Add", vec![]),
        Op::Sigmoid => ("Sigmoid", vec![]),
        Op::Flatten => ("Flatten", vec![int("axis", 1)]),
        Op::Linear => ("Gemm", vec![int("transB", 1)]),
        Op::Rows { .. } => ("Identity", vec![]),
    };
    onnx(operator, inputs, name, attributes)
}

fn onnx<'a>(op: &'a str, input: Vec<&'a str>, output: &'a str, attribute: Vec<Attribute<'a>>) -> OnnxNode<'a> {
    OnnxNode { op_type: OpType::from(op), name: output, input, output: vec![output], attribute, ..Default::default() }
}

fn ints<'a>(name: &'a str, values: &[usize]) -> Attribute<'a> {
    let ints = values.iter().map(|v| *v as i64).collect();
    Attribute { name, r#type: AttributeType::Ints, ints, ..Default::default() }
}

fn int(name: &str, value: usize) -> Attribute<'_> {
    Attribute { name, r#type: AttributeType::Int, i: value as i64, ..Default::default() }
}

fn dimensions(spec: &ParameterSpec) -> Vec<i64> {
    spec.shape.iter().map(|d| *d as i64).collect()
}

/// Returns a float tensor `[N, shape...]`.
fn port<'a>(name: &'a str, shape: &[usize]) -> ValueInfo<'a> {
    let dimension = |value| TensorShapeDimension { value, denotation: "" };
    let mut dim = vec![dimension(Dimension::Param("N"))];
    dim.extend(shape.iter().map(|d| dimension(Dimension::Value(*d as i64))));
    let tensor = TensorTypeProto { elem_type: DataType::Float, shape: Some(TensorShape { dim }) };
    ValueInfo {
        name,
        r#type: Some(TypeProto { value: Some(TypeValue::Tensor(tensor)), denotation: "" }),
        ..Default::default()
    }
}
