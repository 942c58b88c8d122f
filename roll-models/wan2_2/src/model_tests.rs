//! The recorded passes that keep their block inputs on the device although block inputs are offloaded.
#![allow(clippy::unwrap_used)]

use roll_core::{BuildContext, Noise, Purpose};

use roll_network::precision::DeviceTraits;

use super::super::init_tiny::{WanKind, init_tiny};
use super::super::layout::{Layout, Machine};
use super::super::loading::open;
use super::super::options::{KeepAttention, WanOptions};
use super::*;

/// A tiny model that offloads block inputs, with a device on which those of `passes` passes fit at a time.
fn offloading(passes: usize) -> (Wan, Conditioning) {
    let dir = tempfile::tempdir().unwrap();
    let files = init_tiny(dir.path(), WanKind::T2v, 0).unwrap();
    let options = WanOptions {
        model_paths: Some(files.model_paths.into()),
        tokenizer_path: Some(files.tokenizer),
        trainable_models: Some("dit,dit2".into()),
        lora_rank: Some(2),
        use_gradient_checkpointing_offload: true,
        keep_attention: KeepAttention::Of(false),
        ..WanOptions::default()
    };
    let mut model = open(&options, &BuildContext::new("flex")).unwrap();
    let input = ConditionInput { prompt: "a face".into(), frames: 5, size: [32, 32], ..ConditionInput::default() };
    let conditioning = model.encode(&input).unwrap();
    let [_, t, h, w] = conditioning.latent_shape;
    let (trained, opened) = (model.parameter_count(), model.layout.take().unwrap());
    let on = |memory| {
        let device = DeviceTraits { is_gpu: true, ..opened.machine.device };
        Layout { machine: Machine { device, memory: Some(memory), ..opened.machine }, ..opened.clone() }
    };
    let fits = |memory| on(memory).video(trained, [t, h, w]).passes_on_device >= passes;
    // The smallest such device, by bisection.
    let (mut too_small, mut memory) = (0, 1 << 40);
    while memory - too_small > 1 {
        let middle = too_small + (memory - too_small) / 2;
        if fits(middle) { memory = middle } else { too_small = middle }
    }
    model.layout = Some(on(memory));
    (model, conditioning)
}

fn latents(conditioning: &Conditioning, sample: u64) -> Tensor {
    Noise::new(1).normal(Purpose::Synthetic, 0, sample, &conditioning.latent_shape).unwrap()
}

fn recorded(model: &mut Wan, conditioning: &Conditioning, batch: usize) -> Pullback {
    let x: Vec<Tensor> = (0..batch as u64).map(|sample| latents(conditioning, sample)).collect();
    let timestep = Timestep(950.0);
    let inputs: Vec<_> = x.iter().map(|latents| VelocityInput { latents, timestep, conditioning }).collect();
    model.velocities(&inputs, Adapter::On, Grad::Record).unwrap().1.unwrap()
}

fn on_device(model: &Wan) -> usize {
    model.on_device.load(Ordering::Relaxed)
}

#[test]
fn passes_stay_on_the_device_until_it_is_full_and_leave_when_pulled_back_or_dropped() {
    let (mut model, conditioning) = offloading(2);
    let next = |model: &Wan| model.pass_memory(&model.experts[0].dit, 1, &conditioning.latent_shape).0.memory;
    let d = Tensor::stack(&[latents(&conditioning, 9)]).unwrap();

    assert_eq!((on_device(&model), next(&model)), (0, Memory::Recompute));
    let first = recorded(&mut model, &conditioning, 1);
    assert_eq!((on_device(&model), next(&model)), (1, Memory::Recompute));
    let second = recorded(&mut model, &conditioning, 1);
    assert_eq!((on_device(&model), next(&model)), (2, Memory::Offload));
    let third = recorded(&mut model, &conditioning, 1);
    assert_eq!(on_device(&model), 2);

    // Block inputs come back from host memory with the same bits.
    let [third, second] = [third, second].map(|pullback| pullback.pull(&d).unwrap());
    assert_eq!(third.f32s().unwrap(), second.f32s().unwrap());
    assert_eq!((on_device(&model), next(&model)), (1, Memory::Recompute));
    drop(first);
    assert_eq!(on_device(&model), 0);
}

#[test]
fn a_batch_stays_on_the_device_as_a_whole_or_not_at_all() {
    let (mut model, conditioning) = offloading(2);
    let one = recorded(&mut model, &conditioning, 1);
    let two = recorded(&mut model, &conditioning, 2);
    assert_eq!(on_device(&model), 1);
    drop((one, two));
    let two = recorded(&mut model, &conditioning, 2);
    assert_eq!(on_device(&model), 2);
    drop(two);
    assert_eq!(on_device(&model), 0);
}

#[test]
fn passes_without_gradient_are_not_counted() {
    let (mut model, conditioning) = offloading(1);
    let x = latents(&conditioning, 0);
    model.velocity(&x, Timestep(950.0), &conditioning, Adapter::On, Grad::Skip).unwrap();
    assert_eq!(on_device(&model), 0);
}
