//! LoRAs in the frozen weights (`model.base_lora`).

use std::collections::BTreeMap;

use roll_core::{Adapter, StateDict};
use roll_network::lora::{LoraFile, MergeOptions, merge_lora};
use roll_network::weights::{Checkpoint, save_safetensors};
use roll_wan::init_tiny::WanKind;
use serde_json::{Value, json};

use super::{Tiny, distillation, parameters, picture, velocity};
use crate::world::{SHORT, World, stderr_text};

#[test]
fn a_base_lora_makes_the_weights_of_merge_lora_wherever_they_are() {
    let tiny = Tiny::new(WanKind::I2v);
    save_safetensors(tiny.path("four_steps_low_noise.safetensors"), &distillation(), &BTreeMap::new()).unwrap();
    let key = json!({"base_lora": "four_steps_low_noise.safetensors"});
    let low = tiny.path("tiny/low_noise_model/diffusion_pytorch_model.safetensors");
    let lora = LoraFile::open(tiny.path("four_steps_low_noise.safetensors")).unwrap().one(None).unwrap();
    let merge = |strength, out: &str| {
        let options = MergeOptions { strength, allow_missing: true, ..MergeOptions::default() };
        merge_lora(&Checkpoint::open(&low).unwrap(), &lora, &tiny.path(out), &options, &mut |_| ()).unwrap();
        let paths = std::fs::read_to_string(tiny.path("tiny/wan22_paths.json")).unwrap();
        let paths = paths.replace("low_noise_model/diffusion_pytorch_model.safetensors", &format!("../{out}"));
        assert!(paths.contains(out), "{paths}");
        std::fs::write(tiny.path(&format!("tiny/{out}.json")), paths).unwrap();
        tiny.path(&format!("tiny/{out}.json"))
    };
    let merged = merge(1.0, "merged.safetensors");
    let before = velocity(&mut tiny.open(json!({})).unwrap(), Adapter::Off);
    for (dtype, store) in [
        ("f32", "resident"),
        ("bf16", "resident"),
        ("int8", "resident"),
        ("auto", "host"),
        ("auto", "streamed"),
        ("auto", "sharded"),
    ] {
        let with = |own: &Value| {
            let mut options = json!({"weights_dtype": dtype, "weight_store": store, "lora_rank": 2});
            options.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
            velocity(&mut tiny.open(options).unwrap(), Adapter::Off)
        };
        let found = with(&key);
        assert!(found == with(&json!({"model_paths": merged})) && found != before, "{dtype}, {store}");
    }
    // Every weight is trained from the merged ones, and strengths count.
    let whole = |own: Value| {
        let mut options = json!({"lora_rank": 0, "trainable_models": "dit2"});
        options.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
        parameters(&tiny.open(options).unwrap())
    };
    assert!(whole(key.clone()) == whole(json!({"model_paths": merged})));
    let half = merge(0.5, "half.safetensors");
    assert!(
        whole(json!({"base_lora": ["four_steps_low_noise.safetensors=0.5"]})) == whole(json!({"model_paths": half}))
    );
    for idle in ["host", "drop"] {
        let key = json!({"base_lora": {"dit2": "four_steps_low_noise.safetensors"}, "idle_expert": idle});
        assert!(velocity(&mut tiny.open(key).unwrap(), Adapter::Off) != before, "{idle}");
    }
}

#[test]
fn a_base_lora_is_applied_whole_or_refused_by_name() {
    let tiny = Tiny::new(WanKind::I2v);
    let message = |name: &str, change: &dyn Fn(&mut StateDict)| {
        let mut state = distillation();
        change(&mut state);
        save_safetensors(tiny.path(name), &state, &BTreeMap::new()).unwrap();
        tiny.refused(json!({"base_lora": name}))
    };
    let add = |name: &'static str, shape: &'static [usize]| {
        move |state: &mut StateDict| {
            drop(state.insert(format!("diffusion_model.{name}"), roll_core::Tensor::zeros(shape)))
        }
    };
    for (name, change, words) in [
        (
            "low_noise.safetensors",
            &add("blocks.7.norm3.diff", &[64]) as &dyn Fn(&mut StateDict),
            ["blocks.7.norm3.weight", "merge-lora"],
        ),
        ("low_noise.safetensors", &add("blocks.0.self_attn.k.diff", &[64, 16]), ["blocks.0.self_attn.k", "[64, 16]"]),
        ("low_noise.safetensors", &add("blocks.0.self_attn.q.hada_w1_a", &[64]), ["LoHa", "hada_w1_a"]),
        (
            "low_noise.safetensors",
            &add("blocks.0.self_attn.q.weight", &[64]),
            ["blocks.0.self_attn.q.weight", "not a tensor"],
        ),
        ("neither.safetensors", &|_| (), ["names no expert", "HIGH,LOW"]),
    ] {
        let text = message(name, change);
        words.iter().for_each(|word| assert!(text.contains(word) && text.contains("base_lora"), "no {word}: {text}"));
    }
    let vae = tiny.refused(json!({"base_lora": "tiny/Wan2.1_VAE.safetensors"}));
    assert!(vae.contains("model.base_lora") && vae.contains("no LoRA"), "{vae}");
    // A distillation of T2V has another patch embedding, which is left out.
    let key = json!({"base_lora": {"dit2": "t2v.safetensors"}});
    let with = |change: &dyn Fn(&mut StateDict)| {
        let mut state = distillation();
        change(&mut state);
        save_safetensors(tiny.path("t2v.safetensors"), &state, &BTreeMap::new()).unwrap();
        velocity(&mut tiny.open(key.clone()).unwrap(), Adapter::Off)
    };
    assert!(with(&add("patch_embedding.diff", &[64, 16, 1, 2, 2])) == with(&|_| ()));
    // One file for both experts is named twice.
    assert!(tiny.open(json!({"base_lora": "neither.safetensors,neither.safetensors"})).is_ok());
}

#[test]
fn training_on_a_base_lora_begins_without_kl_and_saves_a_lora_that_works_with_it() {
    let world = World::new(2);
    picture(&world, "0.png", 0.1);
    save_safetensors(world.path("four_steps_low_noise.safetensors"), &distillation(), &BTreeMap::new()).unwrap();
    let base = "model.base_lora=four_steps_low_noise.safetensors";
    let prompts = "evaluation.prompts=[{prompt: a face, image: 0.png, seed: 3}]";
    let settings = [&SHORT[..], &["reward.name=brightness", "training.learning_rate=1e-2", prompts]].concat();
    world.train("run", 3, &[&settings[..], &[base]].concat());
    world.train("plain", 3, &settings);
    let kl = |run: &str, row: usize| world.metrics(run)[row]["actor/kl_loss"].as_f64().unwrap();
    assert_eq!(kl("run", 0), 0.0);
    assert!(kl("run", 2) > 0.0);
    let evaluated = |run: &str| std::fs::read(world.path(run).join("samples/after/prompt-000.mp4")).unwrap();
    assert!(evaluated("run") != evaluated("plain"));

    let generated = |name: &str, settings: &[&str]| {
        let mut arguments = vec!["generate", "--config", "run/config.yaml", "--adapter", "run", "--output", name];
        arguments.extend(["--prompt", "a face", "--image", "0.png", "--seed", "3"]);
        settings.iter().for_each(|setting| arguments.extend(["--set", setting]));
        let output = world.roll(&arguments);
        assert!(output.status.success(), "{}", stderr_text(&output));
        (std::fs::read(world.path(name)).unwrap(), stderr_text(&output))
    };
    let (video, messages) = generated("with.mp4", &[]);
    assert!(video == evaluated("run") && !messages.contains("was trained with the base LoRA"), "{messages}");
    // The same on a base that the LoRA was merged into.
    let low = "tiny/low_noise_model/diffusion_pytorch_model.safetensors";
    let merge = ["merge-lora", low, "four_steps_low_noise.safetensors", "merged.safetensors", "--allow-missing"];
    world.done(&merge);
    let paths = std::fs::read_to_string(world.path("tiny/wan22_paths.json")).unwrap();
    let paths = paths.replace("low_noise_model/diffusion_pytorch_model.safetensors", "../merged.safetensors");
    std::fs::write(world.path("tiny/merged.json"), paths).unwrap();
    let (video, messages) = generated("merged.mp4", &["model.base_lora=null", "model.model_paths=tiny/merged.json"]);
    assert!(video == evaluated("run") && messages.contains("four_steps_low_noise.safetensors"), "{messages}");
    // Alone, the LoRA of the run is one like any other.
    let (video, _) = generated("alone.mp4", &["model.base_lora=null"]);
    assert!(video != evaluated("run"));
    let file = world.path("run/checkpoints/step-000003/adapter.safetensors");
    let file = LoraFile::open(file).unwrap();
    assert_eq!(file.metadata["roll.base_lora"], "four_steps_low_noise.safetensors");
    assert!(file.adapters[0].differences.is_empty() && file.adapters[0].ranks() == [2]);
}
