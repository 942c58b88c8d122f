//! Small ONNX networks with the interfaces of SCRFD and ArcFace, known answers and smooth gradients.

// Wrong use of a test double fails the test by a panic.
#![allow(clippy::unwrap_used)]

use std::path::Path;

use onnx_rs::ast::{
    Attribute, AttributeType, DataType, Dimension, Graph, Node, OpType, OperatorSetId, TensorProto, TensorShape,
    TensorShapeDimension, TensorTypeProto, TypeProto, TypeValue, ValueInfo,
};

use crate::diffusion::values;

/// Side of ArcFace's input in pixels.
const CROP: usize = 112;
/// ArcFace's template: positions of eyes, nose and corners of the mouth in a picture of [`CROP`] x [`CROP`] pixels.
const TEMPLATE: [[f64; 2]; 5] =
    [[38.2946, 51.6963], [73.5318, 51.5014], [56.0252, 71.7366], [41.5493, 92.3655], [70.7299, 92.2041]];

/// Side of the fake detector's images in pixels.
pub const SIDE: usize = 32;
/// Width of the fake embedder's output.
pub const WIDTH: usize = 8;

/// The landmarks that the fake detector finds in every image with a mean above 0.25, as fractions of the canvas's side:
/// the template, made smaller and moved towards the centre.
pub fn landmark_shares() -> [[f32; 2]; 5] {
    // 0.7 of the canvas, with a margin of 0.15.
    TEMPLATE.map(|p| p.map(|v| (v / 160.0 + 0.15) as f32))
}

/// Writes `det_fake.onnx` and `arcface_fake.onnx`.
///
/// # Panics
/// If the directory is not writable.
pub fn write(directory: &Path) {
    std::fs::write(directory.join("det_fake.onnx"), detector()).unwrap();
    std::fs::write(directory.join("arcface_fake.onnx"), embedder()).unwrap();
}

/// A network with SCRFD's nine outputs: score, box and landmarks at each of three strides. Every output is `gain * mean
/// of the image + bias`, a score its sigmoid. One anchor, at the canvas's centre and of the finest stride, detects a
/// face in bright images.
fn detector() -> Vec<u8> {
    let axes = Attribute { name: "axes", r#type: AttributeType::Ints, ints: vec![1, 2, 3], ..Default::default() };
    let mut nodes =
        vec![node("ReduceMean", &["x"], "mean", vec![axes]), node("Reshape", &["mean", "row"], "r", vec![])];
    let mut tensors = vec![TensorProto::from_i64("row", vec![3], vec![-1, 1, 1])];
    let mut outputs = vec![];
    for (kind, width) in [("score", 1), ("bbox", 4), ("kps", 10)] {
        for stride in [8, 16, 32] {
            let cells = SIDE / stride;
            // SCRFD has two anchors per cell.
            let anchors = cells * cells * 2;
            let (mut gain, mut bias) = (vec![0.0; anchors * width], vec![0.0; anchors * width]);
            let (cell, centre) = (SIDE / 2 / stride, (SIDE / 2) as f32);
            let detecting_anchor = if stride == 8 { Some((cell * cells + cell) * 2) } else { None };
            match (kind, detecting_anchor) {
                ("score", _) => {
                    // sigmoid(80 mean - 20) exceeds 1/2 at a mean above 0.25. The other anchors never detect anything.
                    bias.fill(-20.0);
                    if let Some(anchor) = detecting_anchor {
                        (gain[anchor], bias[anchor]) = (80.0, -20.0);
                    }
                }
                // Distances from the anchor to the four sides of the box, in strides.
                ("bbox", Some(anchor)) => bias[width * anchor..][..width].fill(1.5),
                // Offsets of the five landmarks from the anchor, in strides.
                ("kps", Some(anchor)) => {
                    let offsets = landmark_shares().map(|p| p.map(|v| (v * SIDE as f32 - centre) / stride as f32));
                    bias[width * anchor..][..width].copy_from_slice(offsets.as_flattened());
                }
                _ => {}
            }
            let name = |suffix: &str| -> &'static str { format!("{kind}_{stride}{suffix}").leak() };
            let shape = vec![1, anchors as i64, width as i64];
            tensors.push(TensorProto::from_f32(name(".gain"), shape.clone(), gain));
            tensors.push(TensorProto::from_f32(name(".bias"), shape, bias));
            nodes.push(node("Mul", &["r", name(".gain")], name(".scaled"), vec![]));
            let sum = if kind == "score" { name(".sum") } else { name("") };
            nodes.push(node("Add", &[name(".scaled"), name(".bias")], sum, vec![]));
            if kind == "score" {
                nodes.push(node("Sigmoid", &[sum], name(""), vec![]));
            }
            outputs.push(port(name(""), &[1, anchors, width]));
        }
    }
    model(nodes, tensors, port("x", &[1, 3, SIDE, SIDE]), outputs)
}

/// One random projection and a tanh, exported for a batch of one like real files.
fn embedder() -> Vec<u8> {
    // An arbitrary key and scale.
    let weights = values(77, WIDTH * 3 * CROP * CROP).into_iter().map(|v| 0.02 * v).collect();
    let tensors = vec![
        TensorProto::from_f32("w", vec![WIDTH as i64, 3, CROP as i64, CROP as i64], weights),
        TensorProto::from_i64("row", vec![2], vec![1, -1]),
    ];
    let nodes = vec![
        node("Conv", &["x", "w"], "c", vec![]),
        node("Tanh", &["c"], "t", vec![]),
        node("Reshape", &["t", "row"], "y", vec![]),
    ];
    model(nodes, tensors, port("x", &[1, 3, CROP, CROP]), vec![port("y", &[1, WIDTH])])
}

/// A node with one output, which also names the node.
fn node<'a>(op: &'a str, inputs: &[&'a str], output: &'a str, attribute: Vec<Attribute<'a>>) -> Node<'a> {
    Node {
        op_type: OpType::from(op),
        name: output,
        input: inputs.to_vec(),
        output: vec![output],
        attribute,
        ..Default::default()
    }
}

/// An input or output of the graph, of f32.
fn port<'a>(name: &'a str, shape: &[usize]) -> ValueInfo<'a> {
    let dimension = |&d: &usize| TensorShapeDimension { value: Dimension::Value(d as i64), denotation: "" };
    let shape = TensorShape { dim: shape.iter().map(dimension).collect() };
    let tensor = TensorTypeProto { elem_type: DataType::Float, shape: Some(shape) };
    ValueInfo {
        name,
        r#type: Some(TypeProto { value: Some(TypeValue::Tensor(tensor)), denotation: "" }),
        ..Default::default()
    }
}

fn model<'a>(
    node: Vec<Node<'a>>,
    initializer: Vec<TensorProto<'a>>,
    input: ValueInfo<'a>,
    output: Vec<ValueInfo<'a>>,
) -> Vec<u8> {
    let graph = Graph { name: "fake", node, initializer, input: vec![input], output, ..Default::default() };
    onnx_rs::encode(&onnx_rs::Model {
        ir_version: 8,
        opset_import: vec![OperatorSetId { domain: "", version: 11 }],
        graph: Some(graph),
        ..Default::default()
    })
}
