//! Invariances, gradients and bad input, on an encoder with random weights.

use roll_backends::{Parameters, vjp};
use roll_core::{DType, Noise, ParameterSpec, Purpose};

use super::*;

fn config() -> Umt5Config {
    Umt5Config { vocab: 30, dim: 16, attention_dim: 24, ffn_dim: 20, heads: 3, buckets: 32, layers: 2 }
}

fn random(config: &Umt5Config, dtype: DType) -> StateDict {
    let noise = Noise::new(5);
    let tensors = config.weights().into_iter().enumerate();
    tensors
        .map(|(i, (key, shape))| {
            let values = noise.normal(Purpose::Synthetic, 0, i as u64, &shape).unwrap();
            let scaled = values.f32s().unwrap().iter().map(|v| v * 0.3).collect();
            (key, Tensor::new::<f32>(scaled, shape).unwrap().to_float(dtype).unwrap())
        })
        .collect()
}

fn device() -> Device {
    roll_backends::device("flex").unwrap()
}

#[test]
fn a_prompt_embedding_does_not_depend_on_its_padding() {
    let model = Umt5::new(&random(&config(), DType::F32), &device()).unwrap();
    let ids = [3, 7, 29, 1];
    let short = model.encode(&ids, 4).unwrap();
    let long = model.encode(&ids, 9).unwrap();
    let padded = model.hidden(&[3, 7, 29, 1, 0, 0], &[0, 1, 2, 3]).unwrap();
    assert_eq!(long.shape(), [9, 16]);
    assert_eq!(short.f32s().unwrap(), &long.f32s().unwrap()[..64]);
    assert!(long.f32s().unwrap()[64..].iter().all(|&v| v == 0.0));
    for (a, b) in short.f32s().unwrap().iter().zip(padded.f32s().unwrap()) {
        assert!((a - b).abs() < 1e-5, "{a} {b}");
    }
}

#[test]
fn streamed_and_resident_bf16_weights_are_bit_exact() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t5.safetensors");
    let state = random(&config(), DType::Bf16);
    roll_network::weights::save_safetensors(&path, &state, &BTreeMap::new()).unwrap();
    let streamed = Umt5::streamed(&Checkpoint::open(&path).unwrap(), &device()).unwrap();
    let resident = Umt5::new(&state, &device()).unwrap();
    let ids = [5, 6, 1];
    let (a, b) = (streamed.encode(&ids, 5).unwrap(), resident.encode(&ids, 5).unwrap());
    assert_eq!(a.f32s().unwrap(), b.f32s().unwrap());
    assert!(a.f32s().unwrap()[..48].iter().any(|&v| v != 0.0));
}

#[test]
fn rejects_ids_beyond_the_vocabulary_and_wrong_lengths() {
    let model = Umt5::new(&random(&config(), DType::F32), &device()).unwrap();
    assert!(model.encode(&[30], 4).unwrap_err().to_string().contains("vocabulary of 30"));
    assert!(model.encode(&[], 4).is_err());
    assert!(model.encode(&[1; 5], 4).is_err());
}

#[test]
fn batched_prompts_are_bit_exact_and_read_each_weight_once() {
    /// Counts reads.
    struct Counting(Resident, std::sync::Mutex<Vec<String>>);
    impl WeightStore for Counting {
        fn segment(&self, prefix: &str) -> roll_core::Result<roll_backends::Weights> {
            self.1.lock().unwrap().push(prefix.into());
            self.0.segment(prefix)
        }
        fn device(&self) -> &burn_tensor::Device {
            self.0.device()
        }
        fn shape(&self, key: &str) -> Option<Vec<usize>> {
            self.0.shape(key)
        }
    }
    let store = Arc::new(Counting(
        Resident::new(&random(&config(), DType::F32), burn_tensor::DType::F32, &device()),
        Default::default(),
    ));
    let model = Umt5::with_store(config(), store.clone());
    let prompts: [&[u32]; 3] = [&[3, 7, 29, 1], &[5, 1], &[1]];
    let together = model.encode_all(&prompts).unwrap();
    let mut read = std::mem::take(&mut *store.1.lock().unwrap());
    read.retain(|prefix| prefix != "token_embedding.weight");
    assert_eq!(read, ["blocks.0.", "blocks.1.", "norm."]);
    for (ids, rows) in prompts.into_iter().zip(together) {
        assert_eq!(padded(&rows, 4).unwrap().as_bytes(), model.encode(ids, 4).unwrap().as_bytes());
    }
}

#[test]
fn errors_name_missing_and_misshapen_weights() {
    let mut state = random(&config(), DType::F32);
    let taken = state.remove("blocks.1.ffn.fc2.weight").unwrap();
    let message = Umt5::new(&state, &device()).err().unwrap().to_string();
    assert!(message.contains("blocks.1.ffn.fc2.weight"), "{message}");
    state.insert("blocks.1.ffn.fc2.weight".into(), taken.reshape([20, 16]).unwrap());
    let message = Umt5::new(&state, &device()).err().unwrap().to_string();
    assert!(message.contains("[16, 20]") && message.contains("[20, 16]"), "{message}");
}

#[test]
fn distances_fall_into_the_buckets_of_t5() {
    let all: Vec<usize> = [0, -1, -7, -8, -11, -12, -16, -127, -128, -5000].map(|d| relative_bucket(d, 32)).into();
    assert_eq!(all, [0, 1, 7, 8, 8, 9, 10, 15, 15, 15]);
    assert_eq!(relative_bucket(1, 32), 17);
    assert_eq!(relative_bucket(64, 32), 16 + 14);
}

#[test]
fn gradients_of_all_weights_match_central_differences() {
    let state = random(&config(), DType::F32);
    let specs = state.iter().map(|(k, t)| ParameterSpec { name: k.clone(), shape: t.shape().to_vec() }).collect();
    let parameters = Parameters::new(specs, state.values().map(Tensor::to_f32_vec).collect(), &device());
    let mut values = vec![0.0; state.values().map(Tensor::len).sum()];
    parameters.read(&mut values).unwrap();
    let encode = |tape: &Tape| {
        let store = Resident::tracked(&parameters.snapshot().segment("").unwrap(), tape);
        Umt5::with_store(config(), Arc::new(store)).hidden_recorded(&[3, 7, 29, 1], &[0, 1, 3]).unwrap()
    };
    let (outputs, recorded) = vjp(&[], Tape::on(), |_, tape| Ok(vec![encode(tape).into()])).unwrap();
    let cotangent = Noise::new(6).normal(Purpose::Synthetic, 0, 0, outputs[0].shape()).unwrap();
    let on_device = roll_backends::to_device::<2>(&cotangent, &device()).unwrap();
    recorded.pull(vec![Some(on_device.into())], Some(&parameters));
    let mut gradient = vec![0.0; values.len()];
    parameters.take_gradients(&mut gradient).unwrap();
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let mut start = 0;
    for (i, spec) in parameters.specs().iter().enumerate() {
        let range = start..start + spec.len();
        start = range.end;
        let direction = Noise::new(7).normal(Purpose::Synthetic, 0, i as u64, &[spec.len()]).unwrap();
        let along = |h: f32| {
            let mut moved = values.clone();
            moved[range.clone()].iter_mut().zip(direction.f32s().unwrap()).for_each(|(v, d)| *v += h * d);
            parameters.write(&moved).unwrap();
            dot(to_host(encode(&Tape::off())).unwrap().f32s().unwrap(), cotangent.f32s().unwrap())
        };
        let measured = (along(1e-3) - along(-1e-3)) / 2e-3;
        let own = &gradient[range.clone()];
        let (pulled, scale) = (dot(own, direction.f32s().unwrap()), dot(own, own).sqrt() * (spec.len() as f64).sqrt());
        assert!(scale > 0.0, "{} got no gradient", spec.name);
        assert!((measured - pulled).abs() < 5e-3 * scale, "{}: measured {measured}, pulled {pulled}", spec.name);
    }
}
