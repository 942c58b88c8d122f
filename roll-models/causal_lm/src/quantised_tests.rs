//! Networks with quantised matrices, compared with the same networks with dequantised matrices.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use burn_tensor::DType;
use rand::RngCore;
use rand_distr::{Distribution, StandardNormal};
use roll_backends::blocks::{BlockMatrix, BlockType};
use roll_core::{Adapter, Generation, Grad, Noise, Purpose, Sampling, StateDict, Tensor};
use roll_network::trainable::Trainable;

use super::config::LmConfig;
use super::generate::{Endings, generate};
use super::loaded::decode;
use super::network::Network;
use super::prefixes::Prefixes;

fn config() -> LmConfig {
    LmConfig::parse(
        br#"{"model_type": "llama", "vocab_size": 40, "hidden_size": 256, "intermediate_size": 512,
             "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": true}"#,
    )
    .unwrap()
}

/// Random blocks whose values have the magnitude of weights.
fn blocks(kind: BlockType, shape: [usize; 2], rng: &mut impl RngCore) -> BlockMatrix {
    let mut bytes = vec![0; shape[0] * shape[1] / kind.values() * kind.bytes()];
    rng.fill_bytes(&mut bytes);
    for block in bytes.chunks_exact_mut(kind.bytes()) {
        let scales: &[f32] = if kind == BlockType::Q4K { &[0.0001, 0.000_75] } else { &[0.000_6] };
        for (at, scale) in scales.iter().enumerate() {
            block[2 * at..2 * at + 2].copy_from_slice(&half::f16::from_f32(*scale).to_le_bytes());
        }
    }
    BlockMatrix::new(kind, bytes, shape).unwrap()
}

/// The quantised network and the dequantised one, and the bytes of the matrices in blocks and in f32.
fn networks(kind: BlockType) -> ([Network; 2], [usize; 2]) {
    let mut rng = Noise::new(5).generator(Purpose::Parameters, 0, 0);
    let (mut state, mut matrices, mut bytes) = (StateDict::new(), BTreeMap::new(), [0; 2]);
    for (name, shape) in config().weights() {
        match <[usize; 2]>::try_from(shape.as_slice()) {
            Ok(shape) => {
                let matrix = blocks(kind, shape, &mut rng);
                bytes = [bytes[0] + matrix.size(), bytes[1] + 4 * shape[0] * shape[1]];
                matrices.insert(name, matrix);
            }
            Err(_) => {
                let values = vec![1.0f32; shape[0]];
                state.insert(name, Tensor::new(values, shape).unwrap());
            }
        }
    }
    let mut dequantised = state.clone();
    decode(&mut dequantised, &matrices).unwrap();
    let device = roll_backends::device("flex").unwrap();
    let quantised =
        |keeps| Network::with_quantised(config(), &state, matrices.clone(), keeps, DType::F32, &device).unwrap();
    let one_by_one = log_probs_and_gradient(&with_lora(quantised(false)));
    let networks = [quantised(true), Network::new(config(), &dequantised, DType::F32, &device).unwrap()];
    let networks = networks.map(with_lora);
    assert!(one_by_one == log_probs_and_gradient(&networks[1]), "{kind:?}: decoded one at a time and all at once");
    (networks, bytes)
}

/// Adds a LoRA with random values.
fn with_lora(mut network: Network) -> Network {
    let targets = config().linear_layers().split(',').map(String::from).collect();
    let lora = Trainable::Lora { rank: 4, alpha: 4.0, targets };
    network.add_trainable(&lora, &Noise::new(1), &StateDict::new()).unwrap();
    let parameters = network.parameters().unwrap();
    let count = parameters.specs().iter().map(roll_core::ParameterSpec::len).sum();
    let mut rng = Noise::new(6).generator(Purpose::Parameters, 0, 0);
    let values: Vec<f32> = (0..count).map(|_| 0.05 * Distribution::<f32>::sample(&StandardNormal, &mut rng)).collect();
    parameters.write(&values).unwrap();
    network
}

/// Log-probabilities of some tokens, and the gradient of their sum.
fn log_probs_and_gradient(network: &Network) -> (Vec<f32>, Vec<f32>) {
    let tokens = Tensor::new((0..36).map(|i| (i * 7 + 3) % 40).collect::<Vec<i64>>(), [2, 18]).unwrap();
    let mask = Tensor::new(vec![1u8; 36], [2, 18]).unwrap();
    let (stats, pullback) = network.evaluate(&tokens, &mask, &mask, Adapter::On, Grad::Record).unwrap();
    let cotangent = [vec![1.0f32; 34], vec![0.5; 34]].concat();
    pullback.unwrap().pull(&Tensor::new(cotangent, [2, 2, 17]).unwrap()).unwrap();
    let parameters = network.parameters().unwrap();
    let count = parameters.specs().iter().map(roll_core::ParameterSpec::len).sum();
    let mut gradient = vec![0.0; count];
    parameters.take_gradients(&mut gradient).unwrap();
    (stats.log_probs.f32s().unwrap().to_vec(), gradient)
}

fn generated(network: &Network) -> Vec<Generation> {
    let sampling = Sampling { temperature: 1.0, seed: 3, ..Sampling::greedy(12) };
    let endings = Endings { ids: &[], decode: &|_: &[u32]| Ok(String::new()) };
    generate(network, &[vec![1, 2, 3], vec![4], vec![1, 2, 3]], &sampling, &endings, &Prefixes::default(), 8).unwrap()
}

fn assert_near(what: &str, found: &[f32], expected: &[f32], tolerance: f32) {
    let largest = expected.iter().fold(0.0f32, |most, v| most.max(v.abs()));
    let worst = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(largest > 0.0 && found.len() == expected.len(), "{what}");
    assert!(worst <= tolerance * largest, "{what}: {worst:e} of {largest:e}");
}

#[test]
fn quantised_network_matches_its_dequantised_one_in_less_memory() {
    for (kind, most) in [(BlockType::Q8_0, 0.27), (BlockType::Q4K, 0.15)] {
        let ([quantised, dequantised], [in_blocks, in_f32]) = networks(kind);
        let ((log_probs, gradient), (expected, expected_gradient)) =
            (log_probs_and_gradient(&quantised), log_probs_and_gradient(&dequantised));
        assert_near("log-probabilities", &log_probs, &expected, 2e-6);
        assert_near("gradients of the adapters", &gradient, &expected_gradient, 1e-5);
        let (found, expected) = (generated(&quantised), generated(&dequantised));
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!(found.tokens, expected.tokens, "{kind:?}");
            assert_near("log-probabilities of generated tokens", &found.log_probs, &expected.log_probs, 2e-6);
        }
        assert!((in_blocks as f64) < most * in_f32 as f64, "{kind:?}: {in_blocks} of {in_f32}");
        // Use does not change the memory.
        assert!(quantised.frozen_bytes().unwrap() < in_blocks + 10_000, "{}", quantised.frozen_bytes().unwrap());
        assert!(dequantised.frozen_bytes().unwrap() > in_f32);
    }
}
