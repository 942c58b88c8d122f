//! Adapters of a critic on the frozen weights of a policy.
#![allow(clippy::unwrap_used)]

use burn::tensor::DType;
use rand_distr::{Distribution, StandardNormal};
use roll_core::{Adapter, BranchAdapters, Model, Noise, Purpose, StateDict, Tensor};

use super::config::LmConfig;
use super::model::CausalLm;
use super::network::Network;
use crate::trainable::Trainable;

/// A small policy with adapters of its own that are not at their start.
pub(super) fn policy() -> CausalLm {
    let config = LmConfig::parse(
        br#"{"model_type": "qwen3", "vocab_size": 12, "hidden_size": 8, "intermediate_size": 12, "head_dim": 4,
             "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": true}"#,
    )
    .unwrap();
    let mut rng = Noise::new(3).generator(Purpose::Parameters, 0, 0);
    let mut draw = |shape: &[usize]| -> Vec<f32> {
        (0..shape.iter().product()).map(|_| 0.4 * Distribution::<f32>::sample(&StandardNormal, &mut rng)).collect()
    };
    let mut state = StateDict::new();
    for (name, shape) in config.weights() {
        state.insert(name, Tensor::new(draw(&shape), shape).unwrap());
    }
    let device = roll_backends::device("flex").unwrap();
    let mut network = Network::new(config, &state, DType::F32, &device).unwrap();
    let targets = vec!["q_proj".to_string()];
    network.train(&Trainable::Lora { rank: 2, alpha: 2.0, targets }, &Noise::new(1), &StateDict::new()).unwrap();
    let mut policy = CausalLm::new(network, None, None).unwrap();
    let values = draw(&[policy.parameter_count()]);
    policy.write_parameters(&values).unwrap();
    policy
}

fn branch(policy: &mut CausalLm, targets: &[&str]) -> Box<dyn Model> {
    let targets = targets.iter().map(|target| target.to_string()).collect();
    let adapters = BranchAdapters { rank: 2, alpha: 4.0, targets };
    policy.as_language().unwrap().branch(&adapters, &Noise::new(7)).unwrap()
}

fn parameters(model: &dyn Model) -> Vec<f32> {
    let mut values = vec![0.0; model.parameter_count()];
    model.read_parameters(&mut values).unwrap();
    values
}

/// A row with padding, and one without.
fn batch() -> [Tensor; 2] {
    let tokens = Tensor::new(vec![3i64, 4, 5, 0, 7, 1, 2, 9], [2, 4]).unwrap();
    [tokens, Tensor::new(vec![1u8, 1, 1, 0, 1, 1, 1, 1], [2, 4]).unwrap()]
}

#[test]
fn a_branch_begins_as_the_frozen_weights_and_learns_without_the_policy() {
    let mut policy = policy();
    let mut critic = branch(&mut policy, &[]);
    let [tokens, mask] = batch();
    let states = |model: &mut dyn Model, adapter| {
        model.as_language().unwrap().hidden_states(&tokens, &mask, adapter).unwrap().to_f32_vec()
    };
    let (own, frozen) = (states(&mut policy, Adapter::On), states(&mut policy, Adapter::Off));
    assert!(own != frozen && states(&mut *critic, Adapter::On) == frozen);
    let every_layer = critic.parameters().iter().filter(|spec| spec.name.ends_with("lora_A.weight")).count();
    assert_eq!(every_layer, 2 * 7);

    let before = parameters(&policy);
    let moved: Vec<f32> = parameters(&*critic).iter().map(|value| value + 0.1).collect();
    critic.write_parameters(&moved).unwrap();
    let (found, pullback) = critic.as_language().unwrap().record_hidden_states(&tokens, &mask).unwrap();
    assert!(found.to_f32_vec() == states(&mut *critic, Adapter::On) && found.to_f32_vec() != frozen);
    pullback.pull(&Tensor::full(found.shape(), 1.0)).unwrap();
    let mut gradients = vec![0.0; policy.parameter_count()];
    policy.take_gradients(&mut gradients).unwrap();
    assert!(gradients.iter().all(|g| *g == 0.0) && parameters(&policy) == before);
    assert!(states(&mut policy, Adapter::On) == own);
}

#[test]
fn the_gradient_of_hidden_states_is_that_of_differences() {
    let mut policy = policy();
    let mut critic = branch(&mut policy, &["v_proj", "down_proj"]);
    let mut rng = Noise::new(5).generator(Purpose::Parameters, 0, 0);
    let mut normal = |count: usize| -> Vec<f32> {
        (0..count).map(|_| Distribution::<f32>::sample(&StandardNormal, &mut rng)).collect()
    };
    let mut values: Vec<f32> = normal(critic.parameter_count()).iter().map(|value| 0.3 * value).collect();
    critic.write_parameters(&values).unwrap();
    let [tokens, mask] = batch();
    // A cotangent of padding, where no token is, reaches nobody.
    let weights = normal(2 * 4 * 8);
    let (states, pullback) = critic.as_language().unwrap().record_hidden_states(&tokens, &mask).unwrap();
    pullback.pull(&Tensor::new(weights.clone(), states.shape()).unwrap()).unwrap();
    let mut gradient = vec![0.0; values.len()];
    critic.take_gradients(&mut gradient).unwrap();
    let mut sum = |values: &[f32]| {
        critic.write_parameters(values).unwrap();
        let states = critic.as_language().unwrap().hidden_states(&tokens, &mask, Adapter::On).unwrap();
        states.f32s().unwrap().iter().zip(&weights).map(|(h, w)| f64::from(*h) * f64::from(*w)).sum::<f64>()
    };
    let step = 1e-2;
    for i in 0..values.len() {
        let at = values[i];
        values[i] = at + step;
        let above = sum(&values);
        values[i] = at - step;
        let quotient = (above - sum(&values)) / f64::from(2.0 * step);
        values[i] = at;
        let found = f64::from(gradient[i]);
        assert!((quotient - found).abs() < 5e-3 * (1.0 + found.abs()), "{i}: {found}, {quotient}");
    }
}
