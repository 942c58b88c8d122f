//! The LoRA file that a run saves loads back to the same model.

use std::collections::BTreeMap;

use roll_core::{Adapter, BuildContext, ConditionInput, Grad, Model, Noise, Purpose, Tensor, Timestep};
use roll_network::weights::{Checkpoint, save_safetensors};
use roll_wan::{WanOptions, init_tiny, loading};

fn velocity(model: &mut dyn Model, adapter: Adapter) -> Vec<f32> {
    let diffusion = model.as_diffusion().unwrap();
    let image = Some(Tensor::full([3, 64, 64], 0.2));
    let input = ConditionInput { prompt: "a face".into(), image, end_image: None, frames: 5, size: [64, 64] };
    let conditioning = diffusion.encode(&input).unwrap();
    let latents = Noise::new(1).normal(Purpose::Synthetic, 0, 0, &conditioning.latent_shape).unwrap();
    let (velocity, _) = diffusion.velocity(&latents, Timestep(500.0), &conditioning, adapter, Grad::Skip).unwrap();
    velocity.to_f32_vec()
}

#[test]
fn a_saved_adapter_reproduces_the_velocities() {
    for alpha in [None, Some(2.0)] {
        let dir = tempfile::tempdir().unwrap();
        let files = init_tiny::init_tiny(dir.path(), init_tiny::WanKind::I2v, 3).unwrap();
        let open = |seed| {
            let options = WanOptions {
                model_paths: Some(files.model_paths.clone().into()),
                tokenizer_path: Some(files.tokenizer.clone()),
                lora_rank: Some(4),
                lora_alpha: alpha,
                ..WanOptions::default()
            };
            loading::open(&options, &BuildContext { seed, ..BuildContext::new("flex") }).unwrap()
        };
        let mut trained = open(1);
        let values = Noise::new(5).normal(Purpose::Synthetic, 0, 0, &[trained.parameter_count()]).unwrap();
        trained.write_parameters(&values.f32s().unwrap().iter().map(|v| 0.1 * v).collect::<Vec<_>>()).unwrap();

        let mut files = BTreeMap::new();
        for (name, state) in trained.export_adapter().unwrap() {
            let path = dir.path().join(format!("{name}.safetensors"));
            save_safetensors(&path, &state, &BTreeMap::new()).unwrap();
            files.insert(name, Checkpoint::open(&path).unwrap().all().unwrap());
        }
        let mut loaded = open(2);
        assert_ne!(velocity(&mut loaded, Adapter::On), velocity(&mut trained, Adapter::On));
        loaded.import_adapter(&files).unwrap();
        assert_eq!(velocity(&mut loaded, Adapter::On), velocity(&mut trained, Adapter::On), "bit for bit");
        assert_ne!(velocity(&mut loaded, Adapter::On), velocity(&mut loaded, Adapter::Off));

        // A file that does not fit changes nothing.
        let mut broken = files.clone();
        broken.values_mut().for_each(|state| drop(state.pop_first()));
        let before = velocity(&mut loaded, Adapter::On);
        assert!(loaded.import_adapter(&broken).is_err());
        assert_eq!(velocity(&mut loaded, Adapter::On), before);
    }
}
