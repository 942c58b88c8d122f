//! Writes networks of well-known shapes with random weights, to time executors (`onnx_speed`): MobileNetV2, ResNet-50
//! and a vision transformer (ViT-B/16 without its class token), for one picture of 224 x 224.
//!
//! ```text
//! cargo run --release --bin onnx_shapes -- FOLDER
//! ```

use std::path::Path;

use onnx_rs::ast::{
    Attribute, AttributeType, DataType, Dimension, Graph, Node, OpType, OperatorSetId, TensorProto, TensorShape,
    TensorShapeDimension, TensorTypeProto, TypeProto, TypeValue, ValueInfo,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::env::args_os().nth(1).ok_or("the folder to write to is missing")?;
    for (name, bytes) in [("mobilenet_v2", mobilenet()), ("resnet50", resnet()), ("vit_b_16", transformer())] {
        let path = Path::new(&folder).join(name).with_extension("onnx");
        std::fs::write(&path, bytes)?;
        println!("{}", path.display());
    }
    Ok(())
}

/// A network under construction. Names are leaked, which is harmless in a short-lived program.
#[derive(Default)]
struct Network {
    nodes: Vec<Node<'static>>,
    weights: Vec<TensorProto<'static>>,
    state: u32,
}

type Name = &'static str;

impl Network {
    fn name(&self, prefix: &str) -> Name {
        format!("{prefix}{}", self.nodes.len() + self.weights.len()).leak()
    }

    fn node(&mut self, op: &'static str, inputs: &[Name], attributes: Vec<Attribute<'static>>) -> Name {
        let name = self.name("v");
        self.nodes.push(Node {
            op_type: OpType::from(op),
            name,
            input: inputs.to_vec(),
            output: vec![name],
            attribute: attributes,
            ..Default::default()
        });
        name
    }

    /// A weight of random values around `middle`.
    fn weight(&mut self, shape: &[i64], middle: f32, scale: f32) -> Name {
        let mut next = || {
            self.state = self.state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            middle + scale * ((self.state >> 8) as f32 / (1 << 23) as f32 - 1.0)
        };
        let values = (0..shape.iter().product()).map(|_| next()).collect();
        self.constant(shape, values)
    }

    fn constant(&mut self, shape: &[i64], values: Vec<f32>) -> Name {
        let name = self.name("w");
        self.weights.push(TensorProto::from_f32(name, shape.to_vec(), values));
        name
    }

    fn list(&mut self, values: &[i64]) -> Name {
        let name = self.name("s");
        self.weights.push(TensorProto::from_i64(name, vec![values.len() as i64], values.to_vec()));
        name
    }

    /// A convolution without bias, followed by its normalisation.
    fn conv(&mut self, x: Name, [inputs, outputs, groups]: [i64; 3], kernel: i64, stride: i64) -> Name {
        let scale = (6.0 / (inputs / groups * kernel * kernel) as f32).sqrt();
        let weight = self.weight(&[outputs, inputs / groups, kernel, kernel], 0.0, scale);
        let (padding, attributes) = (kernel / 2, vec![int("group", groups), ints("strides", &[stride; 2])]);
        let attributes = attributes.into_iter().chain([ints("pads", &[padding; 4])]).collect();
        let y = self.node("Conv", &[x, weight], attributes);
        let [gain, shift] = [(1.0, 0.2), (0.0, 0.1)].map(|(middle, scale)| self.weight(&[outputs], middle, scale));
        let [mean, variance] = [(0.0, 0.1), (1.0, 0.2)].map(|(middle, scale)| self.weight(&[outputs], middle, scale));
        self.node("BatchNormalization", &[y, gain, shift, mean, variance], vec![])
    }

    fn relu(&mut self, x: Name) -> Name {
        self.node("Relu", &[x], vec![])
    }

    fn relu_6(&mut self, x: Name) -> Name {
        let (low, high) = (self.constant(&[], vec![0.0]), self.constant(&[], vec![6.0]));
        self.node("Clip", &[x, low, high], vec![])
    }

    /// The linear layer `x W + b` over the last axis.
    fn linear(&mut self, x: Name, inputs: i64, outputs: i64) -> Name {
        let weight = self.weight(&[inputs, outputs], 0.0, (3.0 / inputs as f32).sqrt());
        let bias = self.weight(&[outputs], 0.0, 0.1);
        let product = self.node("MatMul", &[x, weight], vec![]);
        self.node("Add", &[product, bias], vec![])
    }

    /// The bytes of the ONNX file, whose output is `y`.
    fn finish(mut self, y: Name) -> Vec<u8> {
        self.nodes.push(Node {
            op_type: OpType::from("Identity"),
            name: "last",
            input: vec![y],
            output: vec!["y"],
            ..Default::default()
        });
        let port = |name, dims: Option<&[i64]>| {
            let dimension = |&d: &i64| TensorShapeDimension { value: Dimension::Value(d), denotation: "" };
            let shape = dims.map(|dims| TensorShape { dim: dims.iter().map(dimension).collect() });
            let value = Some(TypeValue::Tensor(TensorTypeProto { elem_type: DataType::Float, shape }));
            ValueInfo { name, r#type: Some(TypeProto { value, denotation: "" }), ..Default::default() }
        };
        onnx_rs::encode(&onnx_rs::Model {
            ir_version: 8,
            opset_import: vec![OperatorSetId { domain: "", version: 17 }],
            graph: Some(Graph {
                name: "g",
                input: vec![port("x", Some(&[1, 3, 224, 224]))],
                output: vec![port("y", None)],
                node: self.nodes,
                initializer: self.weights,
                ..Default::default()
            }),
            ..Default::default()
        })
    }
}

fn int(name: Name, i: i64) -> Attribute<'static> {
    Attribute { name, r#type: AttributeType::Int, i, ..Default::default() }
}

fn ints(name: Name, ints: &[i64]) -> Attribute<'static> {
    Attribute { name, r#type: AttributeType::Ints, ints: ints.to_vec(), ..Default::default() }
}

/// The mean over the plane, followed by the classification layer.
fn classes(net: &mut Network, x: Name, channels: i64) -> Name {
    let pooled = net.node("GlobalAveragePool", &[x], vec![]);
    let flat = net.node("Flatten", &[pooled], vec![]);
    let weight = net.weight(&[1000, channels], 0.0, 0.05);
    let bias = net.weight(&[1000], 0.0, 0.1);
    net.node("Gemm", &[flat, weight, bias], vec![int("transB", 1)])
}

fn mobilenet() -> Vec<u8> {
    let mut net = Network::default();
    let x = net.conv("x", [3, 32, 1], 3, 2);
    let (mut x, mut channels) = (net.relu_6(x), 32);
    // Expansion, channels, repeats and first stride, from the table in the paper.
    for (expansion, outputs, repeats, stride) in
        [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]
    {
        for repeat in 0..repeats {
            let (before, wide, stride) = (x, channels * expansion, if repeat == 0 { stride } else { 1 });
            if expansion > 1 {
                x = net.conv(x, [channels, wide, 1], 1, 1);
                x = net.relu_6(x);
            }
            x = net.conv(x, [wide, wide, wide], 3, stride);
            x = net.relu_6(x);
            x = net.conv(x, [wide, outputs, 1], 1, 1);
            if repeat > 0 {
                x = net.node("Add", &[x, before], vec![]);
            }
            channels = outputs;
        }
    }
    x = net.conv(x, [channels, 1280, 1], 1, 1);
    x = net.relu_6(x);
    let y = classes(&mut net, x, 1280);
    net.finish(y)
}

fn resnet() -> Vec<u8> {
    let mut net = Network::default();
    let x = net.conv("x", [3, 64, 1], 7, 2);
    let x = net.relu(x);
    let window = vec![ints("kernel_shape", &[3, 3]), ints("strides", &[2, 2]), ints("pads", &[1, 1, 1, 1])];
    let (mut x, mut channels) = (net.node("MaxPool", &[x], window), 64);
    for (inner, repeats, stride) in [(64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)] {
        for repeat in 0..repeats {
            let stride = if repeat == 0 { stride } else { 1 };
            let beside = if repeat == 0 { net.conv(x, [channels, 4 * inner, 1], 1, stride) } else { x };
            let y = net.conv(x, [channels, inner, 1], 1, 1);
            let y = net.relu(y);
            let y = net.conv(y, [inner, inner, 1], 3, stride);
            let y = net.relu(y);
            let y = net.conv(y, [inner, 4 * inner, 1], 1, 1);
            let y = net.node("Add", &[y, beside], vec![]);
            (x, channels) = (net.relu(y), 4 * inner);
        }
    }
    let y = classes(&mut net, x, 2048);
    net.finish(y)
}

fn transformer() -> Vec<u8> {
    const WIDTH: i64 = 768;
    const TOKENS: i64 = 196;
    const HEADS: i64 = 12;
    let mut net = Network::default();
    let patches = net.weight(&[WIDTH, 3, 16, 16], 0.0, 0.06);
    let bias = net.weight(&[WIDTH], 0.0, 0.1);
    let x = net.node("Conv", &["x", patches, bias], vec![ints("strides", &[16, 16])]);
    let flat = net.list(&[1, WIDTH, TOKENS]);
    let x = net.node("Reshape", &[x, flat], vec![]);
    let x = net.node("Transpose", &[x], vec![ints("perm", &[0, 2, 1])]);
    let places = net.weight(&[1, TOKENS, WIDTH], 0.0, 0.5);
    let mut x = net.node("Add", &[x, places], vec![]);
    let norm = |net: &mut Network, x: Name| {
        let (gain, shift) = (net.weight(&[WIDTH], 1.0, 0.2), net.weight(&[WIDTH], 0.0, 0.1));
        net.node("LayerNormalization", &[x, gain, shift], vec![int("axis", -1)])
    };
    for _ in 0..12 {
        let y = norm(&mut net, x);
        let [q, k, v] = [[0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]].map(|order| {
            let part = net.linear(y, WIDTH, WIDTH);
            let heads = net.list(&[1, TOKENS, HEADS, WIDTH / HEADS]);
            let part = net.node("Reshape", &[part, heads], vec![]);
            net.node("Transpose", &[part], vec![ints("perm", &order)])
        });
        let scores = net.node("MatMul", &[q, k], vec![]);
        let scale = net.constant(&[], vec![(HEADS as f32 / WIDTH as f32).sqrt()]);
        let scores = net.node("Mul", &[scores, scale], vec![]);
        let weights = net.node("Softmax", &[scores], vec![int("axis", -1)]);
        let y = net.node("MatMul", &[weights, v], vec![]);
        let y = net.node("Transpose", &[y], vec![ints("perm", &[0, 2, 1, 3])]);
        let whole = net.list(&[1, TOKENS, WIDTH]);
        let y = net.node("Reshape", &[y, whole], vec![]);
        let y = net.linear(y, WIDTH, WIDTH);
        x = net.node("Add", &[x, y], vec![]);
        let y = norm(&mut net, x);
        let y = net.linear(y, WIDTH, 4 * WIDTH);
        let root = net.constant(&[], vec![std::f32::consts::SQRT_2]);
        let (one, half) = (net.constant(&[], vec![1.0]), net.constant(&[], vec![0.5]));
        let u = net.node("Div", &[y, root], vec![]);
        let u = net.node("Erf", &[u], vec![]);
        let u = net.node("Add", &[u, one], vec![]);
        let u = net.node("Mul", &[y, u], vec![]);
        let y = net.node("Mul", &[u, half], vec![]);
        let y = net.linear(y, 4 * WIDTH, WIDTH);
        x = net.node("Add", &[x, y], vec![]);
    }
    let y = norm(&mut net, x);
    net.finish(y)
}
