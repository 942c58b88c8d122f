//! The reference data have no case of this encoder. It is compared with a second, independent implementation on slices
//! in f64, and with PyTorch layers composed by our own script (`tests/data/make_clip.py`).
#![allow(clippy::unwrap_used)]

use roll_core::{Noise, Purpose, StateDict};

use super::*;

fn config() -> ClipConfig {
    ClipConfig { dim: 12, patch: 2, grid: 3, ffn_dim: 20, layers: 3, heads: 2 }
}

fn random(config: &ClipConfig) -> StateDict {
    let noise = Noise::new(11);
    let weights = config.weights().into_iter().enumerate();
    weights.map(|(i, (key, shape))| (key, noise.normal(Purpose::Synthetic, 0, i as u64, &shape).unwrap())).collect()
}

fn open(state: &StateDict, heads: Option<usize>) -> Result<Clip> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("clip.safetensors");
    roll_network::weights::save_safetensors(&path, state, &BTreeMap::new()).unwrap();
    Clip::streamed(&Checkpoint::open(&path).unwrap(), heads, &roll_backends::device("flex").unwrap())
}

/// Product with the transpose of a weight, plus its bias.
fn linear(state: &StateDict, name: &str, x: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let weight = &state[&format!("{name}.weight")];
    let (w, b) = (weight.to_f32_vec(), state[&format!("{name}.bias")].to_f32_vec());
    let width = weight.shape()[1];
    let dot = |row: &[f64], o: usize| (0..width).map(|i| row[i] * f64::from(w[o * width + i])).sum::<f64>();
    x.iter().map(|row| (0..b.len()).map(|o| dot(row, o) + f64::from(b[o])).collect()).collect()
}

fn layer_norm(state: &StateDict, name: &str, x: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let (w, b) = (state[&format!("{name}.weight")].to_f32_vec(), state[&format!("{name}.bias")].to_f32_vec());
    x.iter()
        .map(|row| {
            let n = row.len() as f64;
            let mean = row.iter().sum::<f64>() / n;
            let deviation = (row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n + 1e-5).sqrt();
            row.iter().enumerate().map(|(i, v)| (v - mean) / deviation * f64::from(w[i]) + f64::from(b[i])).collect()
        })
        .collect()
}

/// The error function by its Taylor series, which is exact enough for the arguments in these tests.
fn erf(x: f64) -> f64 {
    if x.abs() > 5.0 {
        return x.signum();
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..120 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    sum * 2.0 / std::f64::consts::PI.sqrt()
}

fn attention(qkv: &[Vec<f64>], dim: usize, heads: usize) -> Vec<Vec<f64>> {
    let width = dim / heads;
    let mut out = vec![vec![0.0; dim]; qkv.len()];
    for head in 0..heads {
        for (i, query) in qkv.iter().enumerate() {
            let score = |key: &Vec<f64>| {
                (0..width).map(|c| query[head * width + c] * key[dim + head * width + c]).sum::<f64>()
                    / (width as f64).sqrt()
            };
            let weights: Vec<f64> = qkv.iter().map(|key| score(key).exp()).collect();
            let total: f64 = weights.iter().sum();
            for (weight, value) in weights.iter().zip(qkv) {
                for c in head * width..(head + 1) * width {
                    out[i][c] += weight / total * value[2 * dim + c];
                }
            }
        }
    }
    out
}

fn add(x: &mut [Vec<f64>], y: Vec<Vec<f64>>) {
    x.iter_mut().zip(y).for_each(|(a, b)| a.iter_mut().zip(b).for_each(|(a, b)| *a += b));
}

/// The encoder on slices. `pixels` are `[3, side, side]` and need no resizing.
fn reference(config: &ClipConfig, state: &StateDict, pixels: &[f32]) -> Vec<Vec<f64>> {
    let &ClipConfig { dim, patch, grid, layers, heads, .. } = config;
    let side = patch * grid;
    let kernel = state["visual.patch_embedding.weight"].to_f32_vec();
    let mut x = vec![state["visual.cls_embedding"].to_f32_vec().into_iter().map(f64::from).collect::<Vec<_>>()];
    for (gy, gx) in (0..grid).flat_map(|y| (0..grid).map(move |x| (y, x))) {
        let mut token = vec![0.0; dim];
        for (o, value) in token.iter_mut().enumerate() {
            for c in 0..3 {
                for (dy, dx) in (0..patch).flat_map(|y| (0..patch).map(move |x| (y, x))) {
                    let pixel = pixels[c * side * side + (gy * patch + dy) * side + gx * patch + dx];
                    let pixel = (f64::from(pixel) * 0.5 + 0.5 - f64::from(MEAN[c])) / f64::from(STD[c]);
                    *value += pixel * f64::from(kernel[((o * 3 + c) * patch + dy) * patch + dx]);
                }
            }
        }
        x.push(token);
    }
    let position = state["visual.pos_embedding"].to_f32_vec();
    for (i, row) in x.iter_mut().enumerate() {
        row.iter_mut().enumerate().for_each(|(c, v)| *v += f64::from(position[i * dim + c]));
    }
    let mut x = layer_norm(state, "visual.pre_norm", &x);
    for i in 0..layers - 1 {
        let name = |part: &str| format!("visual.transformer.{i}.{part}");
        let qkv = linear(state, &name("attn.to_qkv"), &layer_norm(state, &name("norm1"), &x));
        add(&mut x, linear(state, &name("attn.proj"), &attention(&qkv, dim, heads)));
        let mut wide = linear(state, &name("mlp.0"), &layer_norm(state, &name("norm2"), &x));
        wide.iter_mut().flatten().for_each(|v| *v *= 0.5 * (1.0 + erf(*v / 2f64.sqrt())));
        add(&mut x, linear(state, &name("mlp.2"), &wide));
    }
    x
}

#[test]
fn the_encoder_agrees_with_an_independent_f64_implementation() {
    let (config, state) = (config(), random(&config()));
    let side = config.patch * config.grid;
    let picture = Noise::new(3).normal(Purpose::Synthetic, 1, 0, &[3, side, side]).unwrap();
    let actual = open(&state, Some(2)).unwrap().encode(&picture).unwrap();
    let expected: Vec<f64> = reference(&config, &state, picture.f32s().unwrap()).concat();
    assert_eq!(actual.shape(), [10, 12]);
    let scale = expected.iter().fold(0f64, |m, v| m.max(v.abs()));
    for (a, b) in actual.f32s().unwrap().iter().zip(&expected) {
        assert!((f64::from(*a) - b).abs() < 1e-5 * scale, "{a} {b}");
    }
}

#[test]
fn the_encoder_agrees_with_layers_of_torch() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/clip_tiny.safetensors");
    let file = Checkpoint::open(path).unwrap();
    let clip = Clip::streamed(&file, Some(2), &roll_backends::device("flex").unwrap()).unwrap();
    let actual = clip.encode(&file.tensor("picture").unwrap()).unwrap();
    let expected = file.tensor("expected").unwrap();
    assert_eq!(actual.shape(), expected.shape());
    let scale = expected.to_f32_vec().iter().fold(0f32, |m, v| m.max(v.abs()));
    for (a, b) in actual.to_f32_vec().iter().zip(expected.to_f32_vec()) {
        assert!((a - b).abs() < 1e-5 * scale, "{a} {b}");
    }
}

#[test]
fn number_of_tokens_does_not_depend_on_the_picture_size() {
    let clip = open(&random(&config()), Some(2)).unwrap();
    for size in [[3, 1, 1], [3, 17, 5]] {
        let tokens = clip.encode(&Tensor::full(size, 0.25)).unwrap();
        assert_eq!(tokens.shape(), [10, 12]);
    }
    // Resizing leaves a constant picture constant.
    let (a, b) =
        (clip.encode(&Tensor::full([3, 1, 1], 0.25)).unwrap(), clip.encode(&Tensor::full([3, 17, 5], 0.25)).unwrap());
    assert!(a.f32s().unwrap().iter().zip(b.f32s().unwrap()).all(|(a, b)| (a - b).abs() < 1e-4));
}

#[test]
fn the_last_block_is_not_run() {
    let mut state = random(&config());
    let picture = Tensor::full([3, 6, 6], 0.1);
    let before = open(&state, Some(2)).unwrap().encode(&picture).unwrap();
    state.insert("visual.transformer.2.mlp.2.bias".into(), Tensor::full([12], 9.0));
    let after = open(&state, Some(2)).unwrap().encode(&picture).unwrap();
    assert_eq!(before.f32s().unwrap(), after.f32s().unwrap());
}

#[test]
fn rejects_wrong_shapes_and_unknown_heads() {
    let mut state = random(&config());
    assert!(open(&state, None).err().unwrap().to_string().contains("heads"));
    assert!(open(&state, Some(5)).is_err());
    let clip = open(&state, Some(2)).unwrap();
    assert!(clip.encode(&Tensor::zeros([4, 6, 6])).is_err());
    state.insert("visual.pos_embedding".into(), Tensor::zeros([1, 11, 12]));
    assert!(open(&state, Some(2)).err().unwrap().to_string().contains("pos_embedding"));
}
