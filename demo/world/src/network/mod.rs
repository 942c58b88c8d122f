//! Small convolutional networks. A network is described once, evaluated on Burn for training ([`evaluate`]) and written
//! as ONNX for inference.

mod forward;
#[cfg(test)]
mod tests;

use roll_core::ParameterSpec;

pub use forward::evaluate;

/// A value in a network: the network's input, or the result of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Value(pub(crate) usize);

/// Operation of a node. Parameters are named after the node: node `stem` has `stem.weight` and `stem.bias`.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// Convolution of `[N, C, H, W]`; weight `[C', C / groups, kernel, kernel]`, bias `[C']`.
    Conv {
        /// Distance between windows in pixels.
        stride: usize,
        /// Zero padding on every side, in pixels.
        padding: usize,
        /// Number of channel groups.
        groups: usize,
    },
    /// `max(x, 0) + slope * min(x, 0)`; slope `[C, 1, 1]`.
    Prelu,
    /// The sum of two values with the same shape.
    Add,
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
    /// Reshapes a feature map `[N, A * width, H, W]` to rows `[N, H * W * A, width]`. The rows are ordered by row of
    /// the map, then column, then anchor.
    Rows {
        /// Numbers per anchor.
        width: usize,
    },
    /// `[N, C, H, W]` to `[N, C * H * W]`.
    Flatten,
    /// `x W^T + b` of `[N, in]`; weight `[out, in]`, bias `[out]`.
    Linear,
}

/// One operation of a network.
#[derive(Clone, Debug)]
pub struct Node {
    /// Unique within the network.
    pub name: String,
    /// The operation.
    pub op: Op,
    /// The operands.
    pub inputs: Vec<Value>,
}

/// A network from one batch of pictures `[N, 3, H, W]` to named outputs. Nodes are in execution order.
#[derive(Clone, Debug)]
pub struct Network {
    /// Height and width of the pictures.
    pub picture: [usize; 2],
    /// The nodes. Node `i` computes `Value(i + 1)`.
    pub nodes: Vec<Node>,
    /// Trainable tensors.
    pub parameters: Vec<ParameterSpec>,
    /// Outputs: name, value, and shape without the batch axis.
    pub outputs: Vec<(String, Value, Vec<usize>)>,
}

/// Kernel size, stride and padding of a convolution.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// Side of the kernel in pixels.
    pub kernel: usize,
    /// Distance between windows in pixels.
    pub stride: usize,
    /// Zero padding on every side, in pixels.
    pub padding: usize,
}

impl Window {
    /// A 3 x 3 kernel with padding 1.
    pub fn three(stride: usize) -> Self {
        Self { kernel: 3, stride, padding: 1 }
    }

    /// A 1 x 1 kernel.
    pub fn one() -> Self {
        Self { kernel: 1, stride: 1, padding: 0 }
    }
}

impl Network {
    /// The batch of pictures.
    pub const INPUT: Value = Value(0);

    /// Creates a network without nodes.
    pub fn new(picture: [usize; 2]) -> Self {
        Self { picture, nodes: vec![], parameters: vec![], outputs: vec![] }
    }

    /// Adds a convolution from `channels[0]` to `channels[1]` channels.
    pub fn conv(&mut self, name: &str, x: Value, channels: [usize; 2], window: Window) -> Value {
        self.grouped_conv(name, x, channels, window, 1)
    }

    /// Adds a depthwise convolution.
    pub fn depthwise(&mut self, name: &str, x: Value, channels: usize, window: Window) -> Value {
        self.grouped_conv(name, x, [channels; 2], window, channels)
    }

    fn grouped_conv(&mut self, name: &str, x: Value, channels: [usize; 2], window: Window, groups: usize) -> Value {
        let Window { kernel, stride, padding } = window;
        let [inputs, outputs] = channels;
        self.parameter(name, "weight", [outputs, inputs / groups, kernel, kernel]);
        self.parameter(name, "bias", [outputs]);
        self.node(name, Op::Conv { stride, padding, groups }, vec![x])
    }

    /// Adds a PReLU with one slope per channel.
    pub fn prelu(&mut self, name: &str, x: Value, channels: usize) -> Value {
        self.parameter(name, "slope", [channels, 1, 1]);
        self.node(name, Op::Prelu, vec![x])
    }

    /// Adds a convolution and a PReLU, `name.act`.
    pub fn conv_prelu(&mut self, name: &str, x: Value, channels: [usize; 2], window: Window) -> Value {
        let y = self.conv(name, x, channels, window);
        self.prelu(&format!("{name}.act"), y, channels[1])
    }

    /// Adds a residual block: `x` plus a 3 x 3 convolution of `x`, then a PReLU.
    pub fn residual(&mut self, name: &str, x: Value, channels: usize) -> Value {
        let y = self.conv(name, x, [channels; 2], Window::three(1));
        let sum = self.node(&format!("{name}.sum"), Op::Add, vec![x, y]);
        self.prelu(&format!("{name}.act"), sum, channels)
    }

    /// Adds a sigmoid.
    pub fn sigmoid(&mut self, name: &str, x: Value) -> Value {
        self.node(name, Op::Sigmoid, vec![x])
    }

    /// Adds an [`Op::Rows`] with `width` numbers per anchor.
    pub fn rows(&mut self, name: &str, x: Value, width: usize) -> Value {
        self.node(name, Op::Rows { width }, vec![x])
    }

    /// Adds a reshape of a feature map to one vector per picture.
    pub fn flatten(&mut self, name: &str, x: Value) -> Value {
        self.node(name, Op::Flatten, vec![x])
    }

    /// Adds a linear layer from `features[0]` to `features[1]` numbers.
    pub fn linear(&mut self, name: &str, x: Value, features: [usize; 2]) -> Value {
        self.parameter(name, "weight", [features[1], features[0]]);
        self.parameter(name, "bias", [features[1]]);
        self.node(name, Op::Linear, vec![x])
    }

    /// Declares `value` an output. `shape` excludes the batch axis.
    pub fn output(&mut self, name: &str, value: Value, shape: impl Into<Vec<usize>>) {
        self.outputs.push((name.into(), value, shape.into()));
    }

    fn node(&mut self, name: &str, op: Op, inputs: Vec<Value>) -> Value {
        self.nodes.push(Node { name: name.into(), op, inputs });
        Value(self.nodes.len())
    }

    fn parameter(&mut self, node: &str, part: &str, shape: impl Into<Vec<usize>>) {
        self.parameters.push(ParameterSpec { name: format!("{node}.{part}"), shape: shape.into() });
    }
}
