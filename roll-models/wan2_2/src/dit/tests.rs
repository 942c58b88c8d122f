#![allow(clippy::unwrap_used)]

use std::time::Duration;

use burn_tensor::DType;
use roll_backends::Memory;
use roll_core::{Purpose, ThreadRanks};

use super::*;

fn config() -> DitConfig {
    DitConfig {
        dim: 48,
        in_channels: 4,
        out_channels: 4,
        patch: [1, 2, 2],
        text_dim: 16,
        freq_dim: 256,
        ffn_dim: 64,
        layers: 2,
        heads: 2,
        image_dim: None,
    }
}

/// Random weights that are exact in bf16.
fn weights() -> StateDict {
    let noise = Noise::new(1);
    let weight = |(i, (key, shape)): (usize, (String, Vec<usize>))| {
        let values = noise.normal(Purpose::Synthetic, 0, i as u64, &shape).unwrap();
        let scaled: Vec<f32> = values.f32s().unwrap().iter().map(|v| v * 0.1).collect();
        let narrow = Tensor::new(scaled, shape).unwrap().to_float(roll_core::DType::Bf16).unwrap();
        (key, narrow.to_float(roll_core::DType::F32).unwrap())
    };
    config().weights().into_iter().enumerate().map(weight).collect()
}

fn device() -> Device {
    roll_backends::device("flex").unwrap()
}

fn dit() -> Dit {
    Dit::new(&weights(), Some(2), DType::BF16, &device()).unwrap()
}

fn conditioning() -> Conditioning {
    let context = Noise::new(2).normal(Purpose::Synthetic, 0, 0, &[5, 16]).unwrap();
    Conditioning { context, channels: None, image_tokens: None, first_frame: None, latent_shape: [4, 2, 4, 6] }
}

fn latents(shape: [usize; 4]) -> Tensor {
    Noise::new(3).normal(Purpose::Synthetic, 0, 0, &shape).unwrap()
}

/// The L2 distance of two tensors, relative to the norm of the second.
fn difference(a: &Tensor, b: &Tensor) -> f64 {
    let squares = |f: &dyn Fn(f32, f32) -> f32| -> f64 {
        a.f32s().unwrap().iter().zip(b.f32s().unwrap()).map(|(a, b)| f64::from(f(*a, *b)).powi(2)).sum()
    };
    (squares(&|a, b| a - b) / squares(&|_, b| b)).sqrt()
}

#[test]
fn embeddings_do_not_depend_on_the_product_dtype() {
    let (dit, conditioning, latents) = (dit(), conditioning(), latents([4, 2, 4, 6]));
    let input = VelocityInput { latents: &latents, timestep: Timestep(937.5), conditioning: &conditioning };
    let batch = Batch::new(&[input], dit.config()).unwrap();
    let embedded = |products: DType| {
        let [cos, sin] = dit.rotary.tables(batch.shape, dit.config().head_dim(), &device()).unwrap();
        let pass = Pass {
            config: dit.config().clone(),
            store: dit.store.clone(),
            trainable: None,
            trains_all_weights: false,
            lora_scale: 1.0,
            products,
            fp8: false,
            activations: DType::F32,
            rope: (cos, sin),
            samples: 1,
            groups: batch.groups.clone(),
            trains_modulation: false,
            image_rows: 0,
            token_ranks: None,
            probe: None,
        };
        let shared = embed_all(&pass, &Tape::off(), &batch, &device()).unwrap();
        shared.into_iter().map(|x| to_host(x.rank::<2>().unwrap()).unwrap()).collect::<Vec<_>>()
    };
    for (narrow, exact) in embedded(DType::BF16).iter().zip(&embedded(DType::F32)) {
        let difference = difference(narrow, exact);
        assert!(difference < 1e-5, "{difference:e}");
    }
}

#[test]
fn a_row_of_modulation_for_each_timestep_has_the_bits_of_one_for_each_token() {
    let (dit, latents) = (dit(), latents([4, 2, 4, 6]));
    let conditioning = Conditioning { first_frame: Some(latents.clone()), ..conditioning() };
    let input = VelocityInput { latents: &latents, timestep: Timestep(700.0), conditioning: &conditioning };
    let batch = Batch::new(&[input], dit.config()).unwrap();
    assert_eq!(batch.groups, [6, 6]);
    let output = |trains_modulation: bool| {
        let [cos, sin] = dit.rotary.tables(batch.shape, dit.config().head_dim(), &device()).unwrap();
        let pass = Arc::new(Pass {
            config: dit.config().clone(),
            store: dit.store.clone(),
            trainable: None,
            trains_all_weights: false,
            lora_scale: 1.0,
            products: DType::F32,
            fp8: false,
            activations: DType::F32,
            rope: (cos, sin),
            samples: 1,
            groups: batch.groups.clone(),
            trains_modulation,
            image_rows: 0,
            token_ranks: None,
            probe: None,
        });
        let shared = embed_all(&pass, &Tape::off(), &batch, &device()).unwrap();
        let tokens = to_device::<2>(&batch.tokens, &device()).unwrap();
        let (out, _) = chain_of_segments(&pass, false)
            .forward(tokens.into(), shared, Grad::Skip, Memory::Hold, false, None)
            .unwrap();
        to_host(out.rank::<2>().unwrap()).unwrap()
    };
    assert_eq!(output(false).as_bytes(), output(true).as_bytes());
}

#[test]
fn rotary_tables_are_cached_by_shape() {
    let (dit, conditioning) = (dit(), conditioning());
    let velocity = |dit: &Dit, shape: [usize; 4]| {
        let at = Timestep(500.0);
        dit.velocity(&latents(shape), at, &conditioning, Adapter::Off, Grad::Skip).unwrap().0.as_bytes().to_vec()
    };
    let (small, large) = ([4, 2, 4, 6], [4, 3, 6, 4]);
    let first = [velocity(&dit, small), velocity(&dit, small), velocity(&dit, large), velocity(&dit, small)];
    assert!(first[0] == first[1] && first[0] == first[3]);
    assert_eq!(first[2], velocity(&super::tests::dit(), large));
    let cached = dit.rotary.0.lock().unwrap().as_ref().map(|(shape, _)| *shape);
    let input = latents(small);
    let input = VelocityInput { latents: &input, timestep: Timestep(1.0), conditioning: &conditioning };
    assert!(cached == Some(Batch::new(&[input], dit.config()).unwrap().shape));
}

#[test]
fn kept_inputs_and_results_of_attention_change_gradients_by_their_rounding() {
    let (conditioning, latents) = (conditioning(), latents([4, 2, 4, 6]));
    let lora = Trainable::Lora { rank: 4, alpha: 4.0, targets: ["q", "v", "ffn.0"].map(String::from).to_vec() };
    let gradient = |products: DType, memory: Memory, keeps_attention: bool| {
        let mut dit = dit().with_settings(PassSettings {
            products,
            kept: PassMemory { memory, keeps_attention },
            ..PassSettings::default()
        });
        dit.add_trainable(&lora, &Noise::new(4), &StateDict::new()).unwrap();
        let parameters = dit.parameters().unwrap().clone();
        let count: usize = parameters.specs().iter().map(|s| s.len()).sum();
        parameters.write(&(0..count).map(|i| (i as f32 * 0.7).sin() * 0.1).collect::<Vec<_>>()).unwrap();
        let (velocity, pullback) =
            dit.velocity(&latents, Timestep(700.0), &conditioning, Adapter::On, Grad::Record).unwrap();
        pullback.unwrap().pull(&velocity).unwrap();
        let mut values = vec![0.0; count];
        parameters.take_gradients(&mut values).unwrap();
        Tensor::new(values, [count]).unwrap()
    };
    let ways = [Memory::Recompute, Memory::Offload].map(|memory| [(memory, false), (memory, true)]).concat();
    // Nothing is rounded in f32, so all results have the same bits.
    let exact = gradient(DType::F32, Memory::Hold, false);
    for &(memory, keeps) in &ways {
        assert_eq!(gradient(DType::F32, memory, keeps).as_bytes(), exact.as_bytes(), "{memory:?}, {keeps}");
    }
    let held = gradient(DType::BF16, Memory::Hold, false);
    for (memory, keeps) in ways {
        let rounded = gradient(DType::BF16, memory, keeps);
        let (own, all) = (difference(&rounded, &held), difference(&held, &exact));
        assert!(own > 0.0 && own < 0.02 && own < 2.0 * all, "{memory:?}, {keeps}: {own:e}, and {all:e} of bf16 itself");
    }
}

/// Settings with dtypes of products and activations.
fn narrow(products: DType, activations: Option<DType>) -> PassSettings {
    PassSettings { products, activations, ..PassSettings::default() }
}

/// A transformer of four heads with a LoRA of random values.
fn adapted(ranks: Option<Arc<dyn Communicator>>) -> Dit {
    let dit = Dit::new(&weights(), Some(4), DType::F32, &device()).unwrap();
    with_adapter(match ranks {
        Some(ranks) => dit.sharding_tokens(ranks),
        None => dit,
    })
}

/// Adds a LoRA of random values.
fn with_adapter(mut dit: Dit) -> Dit {
    let targets = ["q", "k", "v", "o", "ffn.0", "ffn.2"].map(String::from).to_vec();
    dit.add_trainable(&Trainable::Lora { rank: 4, alpha: 4.0, targets }, &Noise::new(4), &StateDict::new()).unwrap();
    let parameters = dit.parameters().unwrap();
    let count: usize = parameters.specs().iter().map(|s| s.len()).sum();
    parameters.write(&(0..count).map(|i| (i as f32 * 0.7).sin() * 0.1).collect::<Vec<_>>()).unwrap();
    dit
}

/// Velocity, cotangent of the latents, and gradient of the adapters, with or without a known first frame.
fn recorded(dit: &Dit, first_frame: bool, shape: [usize; 4]) -> Result<[Tensor; 3]> {
    let first_frame = first_frame.then(|| latents([shape[0], 1, shape[2], shape[3]]));
    let (conditioning, latents) = (Conditioning { first_frame, ..conditioning() }, latents(shape));
    let (velocity, pullback) = dit.velocity(&latents, Timestep(700.0), &conditioning, Adapter::On, Grad::Record)?;
    let d_latents = pullback.unwrap().pull(&latents)?;
    let parameters = dit.parameters().unwrap();
    let mut gradient = vec![0.0; parameters.specs().iter().map(|s| s.len()).sum()];
    parameters.take_gradients(&mut gradient)?;
    let count = gradient.len();
    Ok([velocity, d_latents, Tensor::new(gradient, [count])?])
}

#[test]
fn sharded_tokens_have_the_velocity_and_gradients_of_one_rank() {
    // Twelve tokens, six of which belong to the first frame if it is known: a rank then has tokens of one kind only.
    let shape = [4, 2, 4, 6];
    for first_frame in [false, true] {
        let alone = recorded(&adapted(None), first_frame, shape).unwrap();
        for count in [2, 4] {
            let results = ThreadRanks::run(count, Duration::from_secs(60), |ranks| {
                let [velocity, d_latents, gradient] = recorded(&adapted(Some(ranks.clone())), first_frame, shape)?;
                let mut sum = gradient.f32s()?.to_vec();
                ranks.all_reduce(&mut sum)?;
                Ok([velocity, d_latents, Tensor::new(sum, gradient.shape())?])
            });
            let results: Vec<_> = results.into_iter().map(Result::unwrap).collect();
            for found in &results {
                for (found, (first, expected)) in found.iter().zip(results[0].iter().zip(&alone)) {
                    assert_eq!(found.as_bytes(), first.as_bytes(), "the ranks have the same bits");
                    let difference = difference(found, expected);
                    assert!(difference < 1e-5, "{count} ranks: {difference:e}");
                }
            }
        }
    }
}

#[test]
fn bf16_activations_lose_little_more_than_bf16_products() {
    for device in ["flex", "libtorch"].iter().filter_map(|name| roll_backends::device(name).ok()) {
        let run = |products: DType, activations: DType| {
            let dit = Dit::new(&weights(), Some(2), DType::BF16, &device).unwrap();
            let dit = dit.with_settings(narrow(products, Some(activations)));
            recorded(&with_adapter(dit), false, [4, 2, 4, 6]).unwrap()
        };
        let exact = run(DType::F32, DType::F32);
        let (before, found) = (run(DType::BF16, DType::F32), run(DType::BF16, DType::BF16));
        for (i, exact) in exact.iter().enumerate() {
            let (before, found) = (difference(&before[i], exact), difference(&found[i], exact));
            assert!(found > 0.0 && found < 2.0 * before, "{device:?}, {i}: {found:e}, {before:e} of products alone");
        }
    }
}

#[test]
fn activations_are_f32_by_default_on_the_cpu() {
    let of = |dit: Dit| recorded(&with_adapter(dit), false, [4, 2, 4, 6]).unwrap().map(|x| x.as_bytes().to_vec());
    let with = |activations| of(dit().with_settings(narrow(DType::BF16, activations)));
    assert!(with(None) == with(Some(DType::F32)));
}

#[test]
fn sharded_tokens_work_with_bf16_activations() {
    let run = |ranks: Option<Arc<dyn Communicator>>| {
        let dit = Dit::new(&weights(), Some(4), DType::BF16, &device()).unwrap();
        let dit = dit.with_settings(narrow(DType::BF16, Some(DType::BF16)));
        recorded(&with_adapter(ranks.into_iter().fold(dit, Dit::sharding_tokens)), false, [4, 2, 4, 6])
    };
    let alone = run(None).unwrap();
    for found in ThreadRanks::run(2, Duration::from_secs(60), |ranks| run(Some(ranks))) {
        let difference = difference(&found.unwrap()[0], &alone[0]);
        assert!(difference < 0.01, "{difference:e}");
    }
}

#[test]
fn rejects_ranks_that_do_not_divide_tokens_and_heads() {
    let messages = |count: usize, shape: [usize; 4]| {
        let run = |ranks| recorded(&adapted(Some(ranks)), false, shape).map(drop);
        let results = ThreadRanks::run(count, Duration::from_secs(60), run);
        results.into_iter().map(|result| result.unwrap_err().to_string()).collect::<Vec<_>>()
    };
    for (count, shape) in [(3, [4, 2, 4, 6]), (4, [4, 1, 4, 6])] {
        assert!(messages(count, shape).iter().all(|message| message.contains("ranks cannot divide")), "{count}");
    }
}
