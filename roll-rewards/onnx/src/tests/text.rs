//! Graphs with several inputs and with integers, forward: single operators, and a text tower as PyTorch exports CLIP's.

use roll_core::Tensor;

use super::operators::close;
use super::*;

fn floats(values: &[f32], shape: &[usize]) -> Tensor {
    Tensor::new(values.to_vec(), shape).unwrap()
}

fn integers(values: &[i64], shape: &[usize]) -> Tensor {
    Tensor::new(values.to_vec(), shape).unwrap()
}

/// Checks the outputs of a graph against numbers computed by hand and against ONNX Runtime.
#[track_caller]
fn check(file: File, inputs: &[Tensor], outputs: &[Tensor]) {
    parity::compare(&file.clone().bytes(), inputs);
    let found = file.open().unwrap().run_all(inputs).unwrap();
    assert_eq!(found.len(), outputs.len());
    for (found, expected) in found.iter().zip(outputs) {
        assert_eq!((found.shape(), found.dtype()), (expected.shape(), expected.dtype()));
        close(&found.to_f32_vec(), &expected.to_f32_vec(), 1e-6);
    }
}

const INT: DataType = DataType::Int64;
const FLOAT: DataType = DataType::Float;
const BOOL: DataType = DataType::Bool;

#[test]
fn comparisons_and_logic_return_zeros_and_ones() {
    let (a, b) = (integers(&[1, 2, 3, 4], &[2, 2]), integers(&[2, 3], &[2]));
    let cases: [(&str, [i64; 4]); 5] = [
        ("Equal", [0, 0, 0, 0]),
        ("Less", [1, 1, 0, 0]),
        ("LessOrEqual", [1, 1, 0, 0]),
        ("Greater", [0, 0, 1, 1]),
        ("GreaterOrEqual", [0, 0, 1, 1]),
    ];
    for (op, y) in cases {
        let file = File::of(17, &[("a", INT, &[-1, -1]), ("b", INT, &[-1])], &[("y", BOOL)]);
        check(file.node(op, &["a", "b"], "y", vec![]), &[a.clone(), b.clone()], &[integers(&y, &[2, 2])]);
    }
    let (p, q) = (integers(&[0, 0, 1, 1], &[4]), integers(&[0, 1, 0, 1], &[4]));
    for (op, y) in [("And", [0, 0, 0, 1]), ("Or", [0, 1, 1, 1]), ("Xor", [0, 1, 1, 0])] {
        let file = File::of(17, &[("p", INT, &[4]), ("q", INT, &[4])], &[("y", BOOL)]);
        let file = file.node("Cast", &["p"], "a", vec![int("to", 9)]).node("Cast", &["q"], "b", vec![int("to", 9)]);
        check(file.node(op, &["a", "b"], "y", vec![]), &[p.clone(), q.clone()], &[integers(&y, &[4])]);
    }
    let x = floats(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.5], &[4]);
    let file =
        File::of(17, &[("x", FLOAT, &[4])], &[("nan", BOOL), ("infinite", BOOL), ("positive", BOOL), ("less", BOOL)]);
    let file = file.node("IsNaN", &["x"], "nan", vec![]).node("IsInf", &["x"], "infinite", vec![]);
    let file = file.node("IsInf", &["x"], "positive", vec![int("detect_negative", 0)]);
    let file =
        file.floats("one", &[], &[1.]).node("Less", &["x", "one"], "l", vec![]).node("Not", &["l"], "less", vec![]);
    let y = [[1, 0, 0, 0], [0, 1, 1, 0], [0, 1, 0, 0], [1, 1, 0, 0]].map(|y| integers(&y, &[4]));
    check(file, &[x], &y);
}

#[test]
fn integer_operators_match_float_operators() {
    let x = integers(&[5, 1, 4, 2, 3, 6], &[2, 3]);
    let unary = |op, attributes, y: &[i64], shape: &[usize]| {
        let file = File::of(17, &[("x", INT, &[2, 3])], &[("y", INT)]).node(op, &["x"], "y", attributes);
        check(file, std::slice::from_ref(&x), &[integers(y, shape)]);
    };
    unary("Transpose", vec![ints("perm", &[1, 0])], &[5, 2, 1, 3, 4, 6], &[3, 2]);
    unary("ArgMax", vec![int("axis", 1), int("keepdims", 0)], &[0, 2], &[2]);
    unary("ArgMin", vec![int("axis", 0)], &[1, 0, 0], &[1, 3]);
    unary("ReduceMax", vec![ints("axes", &[1])], &[5, 6], &[2, 1]);
    unary("ReduceMin", vec![int("keepdims", 0)], &[1], &[]);
    unary("ReduceProd", vec![ints("axes", &[0]), int("keepdims", 0)], &[10, 3, 24], &[3]);
    unary("Size", vec![], &[6], &[]);
    unary("Neg", vec![], &[-5, -1, -4, -2, -3, -6], &[2, 3]);
    let binary = |op, name, shape: &[i64], values: &[i64], attributes, y: &[i64], y_shape: &[usize]| {
        let file = File::of(17, &[("x", INT, &[2, 3])], &[("y", INT)]).shaped(name, shape, values);
        check(file.node(op, &["x", name], "y", attributes), std::slice::from_ref(&x), &[integers(y, y_shape)]);
    };
    binary("ReduceSum", "axes", &[1], &[1], vec![], &[10, 11], &[2, 1]);
    binary("CumSum", "axis", &[], &[1], vec![], &[5, 6, 10, 2, 5, 11], &[2, 3]);
    binary("Mod", "m", &[], &[4], vec![], &[1, 1, 0, 2, 3, 2], &[2, 3]);
    binary("Mod", "m", &[], &[-4], vec![], &[-3, -3, 0, -2, -1, -2], &[2, 3]);
    binary("Div", "d", &[], &[2], vec![], &[2, 0, 2, 1, 1, 3], &[2, 3]);
    binary("Expand", "s", &[3], &[2, 1, 1], vec![], &[5, 1, 4, 2, 3, 6, 5, 1, 4, 2, 3, 6], &[2, 2, 3]);
    binary("Tile", "r", &[2], &[1, 2], vec![], &[5, 1, 4, 5, 1, 4, 2, 3, 6, 2, 3, 6], &[2, 6]);
    binary("Trilu", "k", &[], &[0], vec![], &[5, 1, 4, 0, 3, 6], &[2, 3]);
    binary("Gather", "i", &[2], &[2, 0], vec![int("axis", 1)], &[4, 5, 6, 2], &[2, 2]);
    binary("GatherElements", "i", &[2, 1], &[1, 2], vec![int("axis", 1)], &[1, 6], &[2, 1]);
    binary("GatherND", "i", &[2, 2], &[0, 2, 1, 0], vec![], &[4, 2], &[2]);
    binary("Concat", "c", &[2, 1], &[7, 8], vec![int("axis", 1)], &[5, 1, 4, 7, 2, 3, 6, 8], &[2, 4]);
    let scattered = File::of(17, &[("x", INT, &[2, 3])], &[("y", INT)]).shaped("i", &[2, 2], &[1, 0, 0, -1]);
    let scattered = scattered.ints("u", &[7, 8]).node("ScatterND", &["x", "i", "u"], "y", vec![]);
    check(scattered, std::slice::from_ref(&x), &[integers(&[5, 1, 8, 7, 3, 6], &[2, 3])]);
    let cut = File::of(17, &[("x", INT, &[2, 3])], &[("y", INT)]).ints("s", &[1]).ints("e", &[3]).ints("a", &[1]);
    check(
        cut.node("Slice", &["x", "s", "e", "a"], "y", vec![]),
        std::slice::from_ref(&x),
        &[integers(&[1, 4, 3, 6], &[2, 2])],
    );
    let parts = File::of(17, &[("x", INT, &[2, 3])], &[("a", INT), ("b", INT)]).ints("n", &[1, 2]);
    let parts = parts.nodes("Split", &["x", "n"], &["a", "b"], vec![int("axis", 1)]);
    check(parts, std::slice::from_ref(&x), &[integers(&[5, 2], &[2, 1]), integers(&[1, 4, 3, 6], &[2, 2])]);
    let range = File::of(17, &[("x", INT, &[2, 3])], &[("y", INT)]).shaped("zero", &[], &[0]).shaped("two", &[], &[2]);
    let range = range.node("Size", &["x"], "n", vec![]).node("Range", &["zero", "n", "two"], "y", vec![]);
    check(range, &[x], &[integers(&[0, 2, 4], &[3])]);
}

#[test]
fn accepts_boolean_masks_and_32_or_64_bit_tokens() {
    let file = File::of(17, &[("m", BOOL, &[3]), ("t", DataType::Int32, &[3])], &[("y", FLOAT)]);
    let file = file.floats("e", &[4, 1], &[10., 11., 12., 13.]).floats("zero", &[], &[0.]);
    let file = file.node("Gather", &["e", "t"], "g", vec![]).ints("a", &[1]).node("Squeeze", &["g", "a"], "s", vec![]);
    let file = file.node("Where", &["m", "s", "zero"], "y", vec![]);
    let mask = Tensor::from_bytes(roll_core::DType::Bool, [3], std::sync::Arc::new(vec![1, 0, 1])).unwrap();
    check(file, &[mask, Tensor::new(vec![3i32, 2, 1], [3]).unwrap()], &[floats(&[13., 0., 11.], &[3])]);
}

fn name(parts: std::fmt::Arguments) -> &'static str {
    parts.to_string().leak()
}

const VOCABULARY: usize = 11;
const LONGEST: usize = 7;
const WIDTH: usize = 8;
const HEADS: i64 = 2;
/// The token at the end of a text.
const END: i64 = 9;

/// A text tower of two layers as `torch.onnx.export` writes CLIP's: token and position embeddings, a causal and a
/// padding mask, attention, one layer with QuickGELU and one with GELU, pooling at the end token, projection.
///
/// Outputs: the normalised embedding, the last hidden state, and the positions of the end tokens.
struct Tower {
    file: File<'static>,
    seed: u32,
}

impl Tower {
    fn of(inputs: &[(&'static str, DataType, &[i64])]) -> File<'static> {
        let outputs = [("embedding", FLOAT), ("hidden", FLOAT), ("end", INT)];
        let mut tower = Self { file: File::of(17, inputs, &outputs), seed: 1 };
        tower.constants();
        tower.embed();
        tower.mask();
        let mut x = "embedded";
        for layer in 0..2 {
            x = tower.attention(layer, x);
            x = tower.mlp(layer, x);
        }
        tower.pool(x);
        tower.file
    }

    fn node(
        &mut self,
        op: &'static str,
        inputs: &[&'static str],
        output: &'static str,
        attributes: Vec<Attribute<'static>>,
    ) {
        self.file = self.file.clone().node(op, inputs, output, attributes);
    }

    /// Random weights of about 1 / sqrt(inputs).
    fn weight(&mut self, name: &'static str, shape: &[i64], scale: f32) -> &'static str {
        self.seed += 1;
        let count = shape.iter().product::<i64>() as usize;
        let values: Vec<f32> = noise(count, self.seed).into_iter().map(|v| v * scale).collect();
        self.file = self.file.clone().floats(name, shape, &values);
        name
    }

    fn constants(&mut self) {
        let places: Vec<i64> = (0..LONGEST as i64).collect();
        let file =
            self.file.clone().shaped("zero", &[], &[0]).shaped("one", &[], &[1]).shaped("end_token", &[], &[END]);
        let file = file.ints("list_0", &[0]).ints("list_1", &[1]).ints("list_m1", &[-1]).ints("list_12", &[1, 2]);
        let file = file.shaped("places", &[1, LONGEST as i64], &places);
        let file = file.ints("heads", &[HEADS]).ints("width", &[WIDTH as i64]).ints("head", &[WIDTH as i64 / HEADS]);
        let file = file.floats("least", &[], &[f32::MIN]).floats("none", &[], &[0.]).floats("unit", &[], &[1.]);
        self.file = file.floats("half", &[], &[0.5]).floats("root", &[], &[2f32.sqrt()]).floats("quick", &[], &[1.702]);
    }

    fn embed(&mut self) {
        self.node("Shape", &["input_ids"], "shape", vec![]);
        self.node("Gather", &["shape", "zero"], "batch", vec![int("axis", 0)]);
        self.node("Gather", &["shape", "one"], "length", vec![int("axis", 0)]);
        self.node("Unsqueeze", &["batch", "list_0"], "batch_1", vec![]);
        self.node("Unsqueeze", &["length", "list_0"], "length_1", vec![]);
        self.node("Slice", &["places", "list_0", "length_1", "list_1"], "position_ids", vec![]);
        let tokens = self.weight("token_embedding", &[VOCABULARY as i64, WIDTH as i64], 1.0);
        let positions = self.weight("position_embedding", &[LONGEST as i64, WIDTH as i64], 0.3);
        self.node("Gather", &[tokens, "input_ids"], "t", vec![]);
        self.node("Gather", &[positions, "position_ids"], "p", vec![]);
        self.node("Add", &["t", "p"], "embedded", vec![]);
    }

    /// The attention mask `[batch, 1, length, length]`: 0 where attention is allowed, the least float elsewhere.
    fn mask(&mut self) {
        self.node("Range", &["zero", "length", "one"], "range", vec![]);
        self.node("Unsqueeze", &["range", "list_m1"], "row", vec![]);
        self.node("Greater", &["range", "row"], "later", vec![]);
        self.node("Where", &["later", "least", "none"], "causal", vec![]);
        self.node("Unsqueeze", &["attention_mask", "list_12"], "mask_4", vec![]);
        self.node("Concat", &["batch_1", "list_1", "length_1", "length_1"], "mask_shape", vec![int("axis", 0)]);
        self.node("Expand", &["mask_4", "mask_shape"], "mask_wide", vec![]);
        self.node("Cast", &["mask_wide"], "mask_float", vec![int("to", 1)]);
        self.node("Sub", &["unit", "mask_float"], "hidden_float", vec![]);
        self.node("Cast", &["hidden_float"], "is_hidden", vec![int("to", 9)]);
        self.node("Where", &["is_hidden", "least", "hidden_float"], "padding", vec![]);
        self.node("Add", &["padding", "causal"], "both", vec![]);
        self.node("Max", &["both", "least"], "mask", vec![]);
    }

    fn linear(&mut self, x: &'static str, out: &'static str, from: i64, to: i64) -> &'static str {
        let weight = self.weight(name(format_args!("{out}.weight")), &[from, to], (3.0 / from as f32).sqrt());
        let bias = self.weight(name(format_args!("{out}.bias")), &[to], 0.1);
        let product = name(format_args!("{out}.product"));
        self.node("MatMul", &[x, weight], product, vec![]);
        self.node("Add", &[bias, product], out, vec![]);
        out
    }

    fn attention(&mut self, layer: usize, x: &'static str) -> &'static str {
        let at = |what: &str| name(format_args!("attention.{layer}.{what}"));
        let width = WIDTH as i64;
        let (gain, bias) = (self.weight(at("gain"), &[width], 1.0), self.weight(at("bias"), &[width], 0.1));
        self.node("LayerNormalization", &[x, gain, bias], at("norm"), vec![int("axis", -1), float("epsilon", 1e-5)]);
        self.node("Concat", &["batch_1", "length_1", "heads", "head"], at("split"), vec![int("axis", 0)]);
        for (what, order) in [("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])] {
            let [flat, split, turned] = ["flat", "heads", ""].map(|part| at(&format!("{what}{part}")));
            self.linear(at("norm"), flat, width, width);
            self.node("Reshape", &[flat, at("split")], split, vec![int("allowzero", 0)]);
            self.node("Transpose", &[split], turned, vec![ints("perm", &order)]);
        }
        self.node("MatMul", &[at("q"), at("k")], at("scores"), vec![]);
        self.node("Mul", &[at("scores"), "half"], at("scaled"), vec![]);
        self.node("Add", &[at("scaled"), "mask"], at("masked"), vec![]);
        self.node("Softmax", &[at("masked")], at("weights"), vec![int("axis", -1)]);
        self.node("MatMul", &[at("weights"), at("v")], at("seen"), vec![]);
        self.node("Transpose", &[at("seen")], at("seen_t"), vec![ints("perm", &[0, 2, 1, 3])]);
        self.node("Concat", &["batch_1", "length_1", "width"], at("join"), vec![int("axis", 0)]);
        self.node("Reshape", &[at("seen_t"), at("join")], at("joined"), vec![]);
        self.linear(at("joined"), at("projected"), width, width);
        self.node("Add", &[x, at("projected")], at("out"), vec![]);
        at("out")
    }

    /// Layer norm as exporters write it for operator sets before 17.
    fn mlp(&mut self, layer: usize, x: &'static str) -> &'static str {
        let at = |what: &str| name(format_args!("mlp.{layer}.{what}"));
        let width = WIDTH as i64;
        let square = name(format_args!("mlp.{layer}.two"));
        self.file = self.file.clone().floats(square, &[], &[2.]).floats(at("epsilon"), &[], &[1e-5]);
        let (gain, bias) = (self.weight(at("gain"), &[width], 1.0), self.weight(at("bias"), &[width], 0.1));
        self.node("ReduceMean", &[x], at("mean"), vec![ints("axes", &[-1])]);
        self.node("Sub", &[x, at("mean")], at("centred"), vec![]);
        self.node("Pow", &[at("centred"), square], at("squares"), vec![]);
        self.node("ReduceMean", &[at("squares")], at("variance"), vec![ints("axes", &[-1])]);
        self.node("Add", &[at("variance"), at("epsilon")], at("above_0"), vec![]);
        self.node("Sqrt", &[at("above_0")], at("deviation"), vec![]);
        self.node("Div", &[at("centred"), at("deviation")], at("normal"), vec![]);
        self.node("Mul", &[at("normal"), gain], at("gained"), vec![]);
        self.node("Add", &[at("gained"), bias], at("norm"), vec![]);
        self.linear(at("norm"), at("wide"), width, 4 * width);
        if layer == 0 {
            self.node("Mul", &[at("wide"), "quick"], at("steep"), vec![]);
            self.node("Sigmoid", &[at("steep")], at("gate"), vec![]);
            self.node("Mul", &[at("wide"), at("gate")], at("act"), vec![]);
        } else {
            self.node("Div", &[at("wide"), "root"], at("over_root"), vec![]);
            self.node("Erf", &[at("over_root")], at("erf"), vec![]);
            self.node("Add", &[at("erf"), "unit"], at("erf_1"), vec![]);
            self.node("Mul", &[at("wide"), at("erf_1")], at("twice"), vec![]);
            self.node("Mul", &[at("twice"), "half"], at("act"), vec![]);
        }
        self.linear(at("act"), at("narrow"), 4 * width, width);
        self.node("Add", &[x, at("narrow")], at("out"), vec![]);
        at("out")
    }

    /// Pools the end token: `hidden[arange(batch), (input_ids == END).int().argmax(-1)]`.
    fn pool(&mut self, x: &'static str) {
        let width = WIDTH as i64;
        let (gain, bias) = (self.weight("gain", &[width], 1.0), self.weight("bias", &[width], 0.1));
        self.node("LayerNormalization", &[x, gain, bias], "hidden", vec![]);
        self.node("Equal", &["input_ids", "end_token"], "is_end", vec![]);
        self.node("Cast", &["is_end"], "is_end_int", vec![int("to", 6)]);
        self.node("ArgMax", &["is_end_int"], "end", vec![int("axis", -1), int("keepdims", 0)]);
        self.node("Range", &["zero", "batch", "one"], "rows", vec![]);
        self.node("Unsqueeze", &["rows", "list_m1"], "rows_1", vec![]);
        self.node("Unsqueeze", &["end", "list_m1"], "end_1", vec![]);
        self.node("Concat", &["rows_1", "end_1"], "places_2", vec![int("axis", -1)]);
        self.node("GatherND", &["hidden", "places_2"], "pooled", vec![]);
        let projection = self.weight("projection", &[width, 5], 1.0);
        self.node("MatMul", &["pooled", projection], "projected", vec![]);
        self.node("ReduceL2", &["projected"], "norm", vec![ints("axes", &[-1])]);
        self.node("Div", &["projected", "norm"], "embedding", vec![]);
    }
}

fn tower(batch: i64, length: i64) -> Model {
    let ids = ("input_ids", INT, &[batch, length][..]);
    Tower::of(&[ids, ("attention_mask", INT, &[batch, length])]).open().unwrap()
}

const TEXTS: [i64; 12] = [8, 3, 1, 9, 0, 0, 8, 2, 7, 4, 5, 9];
const MASK: [i64; 12] = [1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1];

#[test]
fn text_tower_matches_onnx_runtime() {
    let inputs = [integers(&TEXTS, &[2, 6]), integers(&MASK, &[2, 6])];
    let mask = ("attention_mask", INT, &[-1i64, -1][..]);
    parity::compare(&Tower::of(&[("input_ids", INT, &[-1, -1]), mask]).bytes(), &inputs);
    let outputs = tower(-1, -1).run_all(&inputs).unwrap();
    assert_eq!(outputs[1].shape(), [2, 6, WIDTH]);
    assert_eq!(outputs[2].as_slice::<i64>().unwrap(), [3, 5]);
    // Results of ONNX Runtime 1.31.1, with a tolerance of 1e-5.
    let embeddings = [
        -0.6094903, 0.0106878, 0.7003689, -0.3078067, -0.2077155, -0.6812355, -0.0495159, 0.690464, 0.0076784,
        -0.2380482,
    ];
    close(outputs[0].f32s().unwrap(), &embeddings, 1e-5);
}

#[test]
fn text_embedding_ignores_other_items_and_padding() {
    let tower = tower(-1, -1);
    let embed = |texts: &[i64], mask: &[i64], rows: usize| {
        let shape = [rows, texts.len() / rows];
        tower.run_all(&[integers(texts, &shape), integers(mask, &shape)]).unwrap()[0].to_f32_vec()
    };
    let both = embed(&TEXTS, &MASK, 2);
    close(&embed(&TEXTS[..6], &MASK[..6], 1), &both[..5], 1e-5);
    close(&embed(&TEXTS[..4], &MASK[..4], 1), &both[..5], 1e-5);
    close(&embed(&[8, 3, 1, 9, 6, 6], &[1; 6], 1), &both[..5], 1e-5);
    let other = embed(&[8, 3, 2, 9], &[1; 4], 1);
    assert!(other.iter().zip(&both).any(|(a, b)| (a - b).abs() > 1e-3));
}

#[test]
fn text_tower_exported_for_one_text_accepts_a_batch() {
    let inputs = [integers(&TEXTS, &[2, 6]), integers(&MASK, &[2, 6])];
    let (free, single) = (tower(-1, -1).run_all(&inputs).unwrap(), tower(1, 6).run_all(&inputs).unwrap());
    for (free, single) in free.iter().zip(&single) {
        assert_eq!(free.shape(), single.shape());
        close(&single.to_f32_vec(), &free.to_f32_vec(), 1e-5);
    }
    let unequal = [integers(&TEXTS, &[2, 6]), integers(&MASK[..6], &[1, 6])];
    let error = tower(1, 6).run_all(&unequal).unwrap_err().to_string();
    assert!(error.contains("`attention_mask`"), "{error}");
    messages::check("onnx/run/shape", error);
}

#[test]
fn rejects_wrong_inputs_and_out_of_vocabulary_tokens() {
    let tower = tower(-1, -1);
    let (ids, mask) = (integers(&TEXTS, &[2, 6]), integers(&MASK, &[2, 6]));
    let told = |inputs: &[Tensor]| tower.run_all(inputs).unwrap_err().to_string();
    messages::check("onnx/run/missing_input", told(std::slice::from_ref(&ids)));
    let wrong = told(&[floats(&[1.; 12], &[2, 6]), mask.clone()]);
    assert!(wrong.contains("`input_ids`"), "{wrong}");
    messages::check("onnx/run/input_type", wrong);
    let beyond = told(&[integers(&[VOCABULARY as i64; 12], &[2, 6]), mask.clone()]);
    messages::check("onnx/run/token_beyond_the_vocabulary", beyond);
    let long = told(&[integers(&[0; 16], &[2, 8]), integers(&[1; 16], &[2, 8])]);
    messages::check("onnx/run/text_longer_than_positions", long);
    let single = tower.run(&tensor(&[1.; 12], &[2, 6])).unwrap_err().to_string();
    messages::check("onnx/run/one_input_of_two", single);
}
