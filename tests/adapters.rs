//! Adapters from one run to the next and to `roll generate`: rank, layers, alpha and expert come from their files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use roll_core::{
    Adapter, BuildContext, ConditionInput, DiffusionModel, Grad, Model, Noise, Purpose, Result, StateDict, Timestep,
};
use roll_models::lora::{Convention, LoraFile, MergeOptions, Names, WriteOptions, merge_lora, write_lora};
use roll_models::wan2_2::init_tiny::{WanKind, init_tiny};
use roll_models::wan2_2::{Wan, WanOptions, loading};
use roll_models::weights::{Checkpoint, save_safetensors};
use serde_json::{Value, json};

use crate::world::{SHORT, World, fails, stderr_text};

/// A tiny checkpoint, and the options that open it.
struct Tiny {
    dir: tempfile::TempDir,
    options: WanOptions,
}

impl Tiny {
    fn new(kind: WanKind) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let files = init_tiny(dir.path().join("tiny"), kind, 3).unwrap();
        let options = WanOptions {
            model_paths: Some(files.model_paths),
            tokenizer_path: Some(files.tokenizer),
            ..WanOptions::default()
        };
        Self { dir, options }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The model with these options changed.
    fn open(&self, changes: Value) -> Result<Wan> {
        let mut options = serde_json::to_value(&self.options).unwrap();
        for (key, value) in changes.as_object().unwrap() {
            options[key] = value.clone();
        }
        let options: WanOptions = serde_json::from_value(options).unwrap();
        let base_dir = self.dir.path().into();
        loading::open(&options, &BuildContext { seed: 1, base_dir, ..BuildContext::new("flex") })
    }

    fn refused(&self, changes: Value) -> String {
        self.open(changes).err().unwrap().chain()
    }

    /// A model that was trained, and its files in `directory`.
    fn trained(&self, directory: &str, options: Value) -> Wan {
        let mut model = self.open(options).unwrap();
        let values = Noise::new(5).normal(Purpose::Synthetic, 0, 0, &[model.parameter_count()]).unwrap();
        model.write_parameters(&values.f32s().unwrap().iter().map(|v| 0.1 * v).collect::<Vec<_>>()).unwrap();
        std::fs::create_dir_all(self.path(directory)).unwrap();
        for (name, state) in model.export_adapter().unwrap() {
            let file = self.path(directory).join(format!("{name}.safetensors"));
            save_safetensors(file, &state, &BTreeMap::new()).unwrap();
        }
        model
    }
}

fn parameters(model: &Wan) -> BTreeMap<String, Vec<f32>> {
    let mut values = vec![0.0; model.parameter_count()];
    model.read_parameters(&mut values).unwrap();
    let state = roll_core::flat::to_state(model.parameters(), &values).unwrap();
    state.into_iter().map(|(name, tensor)| (name, tensor.to_f32_vec())).collect()
}

#[test]
fn rank_layers_and_scale_come_from_the_file() {
    let tiny = Tiny::new(WanKind::I2v);
    let options =
        json!({"lora_rank": 3, "lora_alpha": 6.0, "lora_target_modules": "q,ffn.0", "trainable_models": "dit2"});
    let trained = tiny.trained("a", options.clone());
    for place in ["a/adapter.safetensors", "a"] {
        let started = tiny.open(json!({"lora_checkpoint": place})).unwrap();
        assert_eq!(parameters(&started), parameters(&trained), "{place}");
        let bytes = |model: &Wan| {
            let files = model.export_adapter().unwrap().into_values().flatten();
            files.map(|(name, tensor)| (name, tensor.as_bytes().to_vec())).collect::<Vec<_>>()
        };
        assert_eq!(bytes(&started), bytes(&trained), "also alpha and header");
    }
    let mut same = options;
    same["lora_checkpoint"] = "a".into();
    assert_eq!(
        parameters(&tiny.open(same).unwrap()),
        parameters(&trained),
        "options that agree with the file are valid"
    );
    for (changes, words) in [
        (json!({"lora_rank": 4}), ["model.lora_rank", "rank 4", "rank 3"]),
        (json!({"lora_alpha": 3.0}), ["model.lora_alpha", "alpha 3", "alpha 6"]),
        (json!({"lora_target_modules": "q,k"}), ["model.lora_target_modules", "q,k", "ffn.0"]),
        (json!({"trainable_models": "dit"}), ["adapter.safetensors", "low_noise", "`dit`"]),
        (json!({"lora_rank": 0}), ["model.lora_rank", "merge-lora", "a/adapter"]),
    ] {
        let mut options = changes;
        options["lora_checkpoint"] = "a".into();
        let printed_text = tiny.refused(options);
        words.iter().for_each(|word| assert!(printed_text.contains(word), "no {word}: {printed_text}"));
    }
}

#[test]
fn reads_adapters_of_both_experts_from_a_directory_pair_map_or_file() {
    let tiny = Tiny::new(WanKind::I2v);
    let trained = tiny.trained("both", json!({"lora_rank": 2, "trainable_models": "dit,dit2"}));
    let (high, low) = ("both/adapter_high_noise.safetensors", "both/adapter_low_noise.safetensors");
    let mut combined = StateDict::new();
    for (file, prefix) in [(high, "transformer."), (low, "transformer_2.")] {
        for (key, tensor) in Checkpoint::open(tiny.path(file)).unwrap().all().unwrap() {
            combined.insert(key.replace("diffusion_model.", prefix), tensor);
        }
    }
    save_safetensors(tiny.path("combined.safetensors"), &combined, &BTreeMap::new()).unwrap();
    for source in [
        json!("both"),
        json!(format!("{high},{low}")),
        json!({"dit": high, "dit2": low}),
        json!([low, high]),
        json!("combined.safetensors"),
    ] {
        let started = tiny.open(json!({"lora_checkpoint": source})).unwrap();
        assert_eq!(parameters(&started), parameters(&trained), "{source}");
    }
    // Either alone: its expert is trained, and the other one is not.
    for (file, expert) in [(high, "dit."), (low, "dit2.")] {
        let started = parameters(&tiny.open(json!({"lora_checkpoint": file})).unwrap());
        assert!(started.keys().all(|name| name.starts_with(expert)), "{file}");
        assert!(started.iter().all(|(name, values)| values == &parameters(&trained)[name]), "{file}");
        // Where both are trained, the other one starts anew.
        let both = tiny.open(json!({"lora_checkpoint": file, "trainable_models": "dit,dit2", "lora_rank": 2})).unwrap();
        let both = parameters(&both);
        assert_eq!(both.len(), parameters(&trained).len());
        assert!(both.iter().all(|(name, values)| name.starts_with(expert) == (values == &parameters(&trained)[name])));
    }
    let swapped = tiny.refused(json!({"lora_checkpoint": format!("{low},{high}")}));
    assert!(swapped.contains("low_noise") && swapped.contains("`dit`, high_noise"), "{swapped}");
    let one = tiny.refused(json!({"lora_checkpoint": "both", "trainable_models": "dit2"}));
    assert!(one.contains("`dit`, high_noise") && one.contains("model.trainable_models"), "{one}");
}

#[test]
fn a_file_without_expert_is_for_the_trained_one() {
    let tiny = Tiny::new(WanKind::I2v);
    let trained = tiny.trained("a", json!({"lora_rank": 2, "trainable_models": "dit2"}));
    // As another program would have written it.
    let tensors = Checkpoint::open(tiny.path("a/adapter.safetensors")).unwrap().all().unwrap();
    save_safetensors(tiny.path("foreign.safetensors"), &tensors, &BTreeMap::new()).unwrap();
    let foreign = || json!({"lora_checkpoint": "foreign.safetensors"});
    assert_eq!(parameters(&tiny.open(foreign()).unwrap()), parameters(&trained));
    let mut for_high = foreign();
    for_high["trainable_models"] = "dit".into();
    assert!(parameters(&tiny.open(for_high).unwrap()).keys().all(|name| name.starts_with("dit.")));
    let mut for_both = foreign();
    for_both["trainable_models"] = "dit,dit2".into();
    assert!(tiny.refused(for_both).contains("HIGH,LOW"));
}

#[test]
fn reads_per_layer_ranks_and_scales_of_every_convention() {
    let tiny = Tiny::new(WanKind::Ti2v);
    let noise = |which: u64, shape: [usize; 2]| Noise::new(2).normal(Purpose::Synthetic, which, 0, &shape).unwrap();
    let mut lora = roll_models::lora::Lora::default();
    for (i, (name, rank, alpha)) in
        [("blocks.0.self_attn.q", 2, Some(4.0)), ("blocks.1.cross_attn.o", 5, None)].into_iter().enumerate()
    {
        let (down, up) = (noise(2 * i as u64, [rank, 64]), noise(2 * i as u64 + 1, [64, rank]));
        lora.layers.insert(name.into(), roll_models::lora::Layer { down, up, alpha, bias: None });
    }
    let mut all = Vec::new();
    for convention in Convention::ALL {
        let directory = tiny.path(&convention.to_string());
        std::fs::create_dir(&directory).unwrap();
        let options = WriteOptions { convention, names: Names::Official };
        write_lora(&lora, options, &BTreeMap::new(), &directory.join("adapter_model.safetensors")).unwrap();
        let started = tiny.open(json!({"lora_checkpoint": convention.to_string()})).unwrap();
        assert_eq!(started.parameters().len(), 4, "only the layers of the file are trained");
        all.push(parameters(&started));
    }
    assert!(all.windows(2).all(|pair| pair[0] == pair[1]), "one adapter under five conventions");
    let up = &all[0]["dit.blocks.0.self_attn.q.lora_B.weight"];
    let doubled: Vec<f32> = lora.layers["blocks.0.self_attn.q"].up.to_f32_vec().iter().map(|v| 2.0 * v).collect();
    assert_eq!(up, &doubled, "a scale that is not everyone's stands in B");
}

#[test]
fn rejects_unusable_adapters_by_their_file() {
    let tiny = Tiny::new(WanKind::I2v);
    tiny.trained("a", json!({"lora_rank": 2}));
    let tensors = || Checkpoint::open(tiny.path("a/adapter.safetensors")).unwrap().all().unwrap();
    let message = |change: &dyn Fn(&mut StateDict)| {
        let mut state = tensors();
        change(&mut state);
        save_safetensors(tiny.path("bad.safetensors"), &state, &BTreeMap::new()).unwrap();
        tiny.refused(json!({"lora_checkpoint": "bad.safetensors"}))
    };
    let q = "diffusion_model.blocks.0.self_attn.q";
    let nan = message(&|state| {
        let mut values = state[&format!("{q}.lora_B.weight")].to_f32_vec();
        values[3] = f32::NAN;
        state.insert(format!("{q}.lora_B.weight"), roll_core::Tensor::new(values, [64, 2]).unwrap());
    });
    assert!(nan.contains("bad.safetensors") && nan.contains("not finite") && nan.contains("self_attn.q"), "{nan}");
    let other = message(&|state| {
        for part in ["lora_A", "lora_B"] {
            let tensor = state.remove(&format!("{q}.{part}.weight")).unwrap();
            state.insert(format!("diffusion_model.blocks.9.self_attn.q.{part}.weight"), tensor);
        }
    });
    assert!(other.contains("blocks.9.self_attn.q") && other.contains("lora_checkpoint"), "{other}");
    let whole = message(&|state| {
        state.insert("diffusion_model.blocks.0.diff_m".into(), roll_core::Tensor::zeros([1, 6, 64]));
    });
    assert!(whole.contains("merge-lora") && whole.contains("bad.safetensors"), "{whole}");
    std::fs::create_dir(tiny.path("empty")).unwrap();
    assert!(tiny.refused(json!({"lora_checkpoint": "empty"})).contains("expected an adapter"));
    assert!(tiny.refused(json!({"lora_checkpoint": "a,a,a"})).contains("HIGH,LOW"));
}

/// Arguments of `roll generate` for a small video.
fn generate<'a>(output: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let mut arguments = vec!["generate", "--output", output, "--steps", "1", "--frames", "5"];
    arguments.extend(["--height", "64", "--width", "64", "--set", "model.model_paths=tiny/wan22_paths.json"]);
    arguments.extend(["--set", "model.tokenizer_path=tiny/google/umt5-xxl"]);
    arguments.extend(more);
    arguments
}

const PROMPT: [&str; 4] = ["--prompt", "a face", "--image", "0.png"];

fn picture(world: &World, name: &str, value: f32) {
    let frame = roll_core::Video::new(roll_core::Tensor::full([1, 3, 64, 64], value), 8.0).unwrap();
    let frames = roll_data::write_pngs(world.path("picture"), &frame).unwrap();
    std::fs::rename(&frames[0], world.path(name)).unwrap();
}

#[test]
fn the_adapter_of_a_run_generates_videos_and_starts_another_run() {
    let world = World::new(2);
    picture(&world, "0.png", 0.1);
    let run =
        ["algo.name=flow_matching", "model.trainable_models=dit,dit2", "sample_steps=0", "algo.draws_per_sample=8"];
    let run = [&run[..], &["training.learning_rate=0.1"]].concat();
    world.train("run", 2, &run);
    let step = "run/checkpoints/step-000002";
    let (high, low) =
        (format!("{step}/adapter_high_noise.safetensors"), format!("{step}/adapter_low_noise.safetensors"));
    let video = |name: &str, more: &[&str]| {
        world.done(&generate(name, &[&PROMPT[..], more].concat()));
        let frames = std::fs::read_dir(world.path(name)).unwrap();
        let mut frames: Vec<_> = frames.map(|frame| std::fs::read(frame.unwrap().path()).unwrap()).collect();
        frames.sort();
        frames
    };
    let base = video("base", &[]);
    let both = video("both", &["--adapter", "run"]);
    assert!(both != base);
    assert!(video("step", &["--adapter", step]) == both);
    assert!(video("pair", &["--adapter", &format!("{high},{low}")]) == both);
    assert!(video("list", &["--adapter", &low, "--adapter", &high]) == both);
    assert!(video("none", &["--adapter", "run=0"]) == base, "no strength, no change");
    // One step is at noise level 1, where the first expert works.
    assert!(video("high", &["--adapter", &high]) == both);
    assert!(video("low", &["--adapter", &low]) == base);
    // The same but for the order of sums, which pictures may show.
    assert!(video("halves", &["--adapter", &format!("{high}=0.5"), "--adapter", &format!("{high}=0.5")]) != base);
    fails(
        &world.roll(&generate("x", &[&PROMPT[..], &["--adapter", &format!("{low},{high}")]].concat())),
        2,
        &["low_noise"],
    );

    let header = Checkpoint::open(world.path(&high)).unwrap().metadata();
    let word = |name: &str| header[name].as_str();
    assert_eq!((word("roll.expert"), word("roll.rank"), word("roll.steps")), ("high_noise", "2", "2"));
    assert_eq!((word("roll.run"), word("roll.alpha")), ("flow_matching", "2"));
    assert!(word("roll.base").contains("image to video") && word("roll.base").contains("high_noise_model"));
    let inspected = world.done(&["inspect", &high]);
    assert!(inspected.contains("high_noise") && inspected.contains("roll.steps: 2"), "{inspected}");
    let inspected = world.done(&["inspect", step]);
    assert!(inspected.contains("adapter_high_noise") && inspected.contains("adapter_low_noise"), "{inspected}");
    assert_eq!(world.done(&["inspect", "run"]), inspected, "a run is its newest checkpoint");
    world.done(&["convert-lora", "run", "elsewhere.safetensors", "--to", "comfyui"]);
    for expert in ["high_noise", "low_noise"] {
        let file = LoraFile::open(world.path(&format!("elsewhere_{expert}.safetensors"))).unwrap();
        assert_eq!(file.adapters[0].is_for().unwrap().to_string(), expert);
    }
    world.done(&["convert-lora", "run", "low.safetensors", "--to", "kohya", "--expert", "low"]);
    let whole = world.done(&["inspect", "tiny"]);
    assert!(whole.contains("UMT5") && whole.matches("transformer").count() >= 2 && whole.contains("VAE"), "{whole}");

    let started = |out: &str, settings: &[&str]| {
        let settings = [&["sample_steps=0", "algo.name=flow_matching"][..], settings].concat();
        let run = world.training(out, 1, &settings).output().unwrap();
        assert!(run.status.success(), "{}", stderr_text(&run));
        world.path(out).join("checkpoints/step-000001")
    };
    let next = started("next", &["model.lora_checkpoint=run"]);
    assert!(
        next.join("adapter_high_noise.safetensors").exists() && next.join("adapter_low_noise.safetensors").exists()
    );
    let next = started("low", &[&format!("model.lora_checkpoint={low}")]);
    assert_eq!(
        LoraFile::open(next.join("adapter.safetensors")).unwrap().adapters[0].is_for().unwrap().to_string(),
        "low_noise"
    );
}

#[test]
fn generates_a_video_per_prompt_and_checks_arguments_first() {
    let world = World::new(0);
    picture(&world, "0.png", 0.1);
    std::fs::write(world.path("prompts.txt"), "one\n\n  two \n").unwrap();
    let made = world.done(&generate("out.gif", &["--prompts", "prompts.txt", "--image", "0.png", "--seed", "3"]));
    assert_eq!(made.lines().collect::<Vec<_>>(), ["out-001.gif", "out-002.gif"]);
    std::fs::create_dir(world.path("out")).unwrap();
    let made = world.done(&generate("out/", &["--prompts", "prompts.txt", "--image", "0.png", "--seed", "3"]));
    assert_eq!(made.lines().collect::<Vec<_>>(), ["out/001.mp4", "out/002.mp4"]);
    let alone = |seed: &str| {
        world.done(&generate("two.gif", &["--prompt", "two", "--image", "0.png", seed, "3", "--force"]));
        std::fs::read(world.path("two.gif")).unwrap()
    };
    let second = std::fs::read(world.path("out-002.gif")).unwrap();
    assert!(second == alone("--seed") && second == alone("--noise"), "as if it were made alone");
    let end = |more: &[&str]| world.roll(&generate("end.gif", &[&PROMPT[..], more, &["--force"]].concat()));
    picture(&world, "1.png", -0.7);
    assert!(end(&["--end-image", "1.png"]).status.success());
    assert_ne!(std::fs::read(world.path("end.gif")).unwrap(), {
        assert!(end(&[]).status.success());
        std::fs::read(world.path("end.gif")).unwrap()
    });
    fails(&world.roll(&generate("end.gif", &PROMPT)), 2, &["end.gif", "--force"]);
    for (output, more, word) in [
        ("x.avi", &[][..], ".avi"),
        ("none/x.mp4", &[], "none is not a directory"),
        ("x.mp4", &["--fps", "0"], "--fps"),
        ("tiny.mp4", &["--adapter", "0.png=loud"], "loud"),
    ] {
        let mut arguments = generate(output, &[&PROMPT[..], more].concat());
        if word != "loud" {
            // Nothing of the model is looked at.
            arguments.extend(["--set", "model.model_paths=nosuch.json"]);
        }
        fails(&world.roll(&arguments), 2, &[word]);
    }
    let t2v = Tiny::new(WanKind::T2v);
    let paths = format!("model.model_paths={}", t2v.path("tiny/wan22_paths.json").display());
    let arguments = generate("t2v.gif", &[&PROMPT[..], &["--set", &paths]].concat());
    fails(&world.roll(&arguments), 2, &["--image", "text alone"]);
}

#[test]
fn refuses_directories_that_are_not_empty() {
    let world = World::new(0);
    let before = std::fs::read(world.path("tiny/Wan2.1_VAE.safetensors")).unwrap();
    for command in [&["init-tiny", "tiny"][..], &["init-experts", "tiny"]] {
        fails(&world.roll(&[command, &["--seed", "9"]].concat()), 2, &["tiny", "--force"]);
    }
    assert!(std::fs::read(world.path("tiny/Wan2.1_VAE.safetensors")).unwrap() == before);
    world.done(&["init-tiny", "tiny", "--seed", "9", "--force"]);
    assert!(std::fs::read(world.path("tiny/Wan2.1_VAE.safetensors")).unwrap() != before);
    world.done(&["init-tiny", "a/b/new", "--kind", "ti2v"]);
    assert!(world.path("a/b/new/wan22_paths.json").exists());
}

#[test]
fn an_exported_expert_replaces_the_shards_of_its_base() {
    let tiny = Tiny::new(WanKind::I2v);
    let trained = tiny.trained("whole", json!({"lora_rank": 0}));
    drop(trained);
    let file = "whole/diffusion_pytorch_model.safetensors";
    let world = World::new(0);
    let (source, base) = (tiny.path(file), tiny.path("tiny/low_noise_model"));
    let export = |base: &Path, out: &str, more: &[&str]| {
        let arguments = ["export-expert", source.to_str().unwrap(), "--base", base.to_str().unwrap(), "--out", out];
        world.roll(&[&arguments[..], more].concat())
    };
    world.done(&["split-shards", source.to_str().unwrap(), "shards", "--max-size", "200KB"]);
    fails(&export(&base, "shards", &[]), 2, &["--force"]);
    assert!(export(&base, "shards", &["--force"]).status.success());
    let left = std::fs::read_dir(world.path("shards")).unwrap().map(|e| e.unwrap().file_name()).collect::<Vec<_>>();
    assert!(!left.iter().any(|name| name.to_string_lossy().contains("-of-")), "{left:?}");
    let config = std::fs::read_to_string(base.join("config.json")).unwrap();
    std::fs::create_dir(world.path("other")).unwrap();
    std::fs::write(world.path("other/config.json"), config.replace("\"dim\": 64", "\"dim\": 128")).unwrap();
    fails(&export(&world.path("other"), "new", &[]), 2, &["`dim` 128", "64"]);
}

/// A LoRA as LightX2V publishes them for Wan2.2 I2V: `lora_down`, `lora_up` and `alpha`, whole differences, and layers of
/// an image encoder that the model does not have.
fn distillation() -> StateDict {
    let noise = |which: u64, shape: &[usize]| {
        let values = Noise::new(4).normal(Purpose::Synthetic, which, 0, shape).unwrap();
        roll_core::Tensor::new(values.f32s().unwrap().iter().map(|v| 0.1 * v).collect::<Vec<_>>(), shape).unwrap()
    };
    let mut state = StateDict::new();
    for (i, layer) in ["blocks.0.self_attn.q", "blocks.1.ffn.0", "blocks.0.cross_attn.k_img"].into_iter().enumerate() {
        let (name, out) = (format!("diffusion_model.{layer}"), if layer.contains("ffn") { 128 } else { 64 });
        state.insert(format!("{name}.lora_down.weight"), noise(2 * i as u64, &[4, 64]));
        state.insert(format!("{name}.lora_up.weight"), noise(2 * i as u64 + 1, &[out, 4]));
        state.insert(format!("{name}.alpha"), roll_core::Tensor::scalar(8.0));
        state.insert(format!("{name}.diff_b"), noise(20 + i as u64, &[out]));
    }
    state.insert("diffusion_model.blocks.1.cross_attn.norm_k.diff".into(), noise(30, &[64]));
    state.insert("diffusion_model.blocks.1.diff_m".into(), noise(31, &[1, 6, 64]));
    state
}

/// The low-noise velocity of some latents, bit by bit.
fn velocity(model: &mut Wan, adapter: Adapter) -> Vec<u8> {
    let image = Some(roll_core::Tensor::zeros([3, 32, 32]));
    let input = ConditionInput { prompt: "a face".into(), image, frames: 5, size: [32, 32], ..Default::default() };
    let conditioning = model.encode(&input).unwrap();
    let x = Noise::new(1).normal(Purpose::Synthetic, 0, 0, &conditioning.latent_shape).unwrap();
    let (v, _) = model.velocity(&x, Timestep(300.0), &conditioning, adapter, Grad::Skip).unwrap();
    v.as_bytes().to_vec()
}

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
fn the_start_of_training_is_the_adapter_of_the_file_or_else_the_base() {
    let tiny = Tiny::new(WanKind::I2v);
    tiny.trained("a", json!({"lora_rank": 2}));
    let mut model = tiny.open(json!({"lora_checkpoint": "a"})).unwrap();
    let start = velocity(&mut model, Adapter::On);
    let base = velocity(&mut model, Adapter::Off);
    model.write_parameters(&vec![0.25; model.parameter_count()]).unwrap();
    assert!(start != base && velocity(&mut model, Adapter::On) != start);
    assert!(velocity(&mut model, Adapter::Start) == start, "whatever was trained since");
    let mut fresh = tiny.open(json!({"lora_rank": 2})).unwrap();
    fresh.write_parameters(&vec![0.25; fresh.parameter_count()]).unwrap();
    assert!(velocity(&mut fresh, Adapter::Start) == base);
    tiny.trained("whole", json!({"lora_rank": 0}));
    let mut whole = tiny.open(json!({"lora_checkpoint": "whole", "lora_rank": 0})).unwrap();
    let start = velocity(&mut whole, Adapter::On);
    whole.write_parameters(&vec![0.25; whole.parameter_count()]).unwrap();
    assert!(velocity(&mut whole, Adapter::Start) == start && velocity(&mut whole, Adapter::Off) == base);
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
    assert!(video == evaluated("run") && !messages.contains("base LoRA"), "{messages}");
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

#[test]
fn the_kl_compares_with_the_start_or_the_base() {
    let world = World::new(2);
    let short = [&SHORT[..], &["reward.name=brightness"]].concat();
    world.train("first", 2, &[&short[..], &["training.learning_rate=1e-1"]].concat());
    let grpo = ["algo.num_inference_steps=4", "algo.group_size=3", "algo.kl_weight=0.1", "reward.name=brightness"];
    let of = |algorithm| [&[algorithm, "sample_steps=0"], &grpo[..]].concat();
    for settings in [short, of("algo.name=flow_grpo"), of("algo.name=diffusion_nft")] {
        for (reference, is_zero) in [("start", true), ("base", false)] {
            let out = format!("{}-{reference}", settings[0]);
            let own = format!("algo.kl_reference={reference}");
            world.train(&out, 1, &[&settings[..], &["model.lora_checkpoint=first", &own]].concat());
            let kl = world.metrics(&out)[0]["actor/kl_loss"].as_f64().unwrap();
            assert_eq!(kl == 0.0, is_zero, "{out}: {kl}");
        }
    }
}

#[test]
fn the_averaged_policy_that_was_evaluated_is_the_adapter_of_the_run() {
    let world = World::new(3);
    picture(&world, "0.png", 0.1);
    let own = ["algo.name=diffusion_nft", "algo.num_inference_steps=3", "algo.group_size=3", "sample_steps=0"];
    let evaluated = ["reward.name=brightness", "evaluation.train_samples=2"];
    let prompts = "evaluation.prompts=[{prompt: a face, image: 0.png, seed: 3}]";
    let average = ["training.average=0.9", "training.learning_rate=1e-1", prompts];
    let summary = world.train("run", 3, &[&own[..], &evaluated, &average].concat());
    let checkpoint = "run/checkpoints/step-000003";
    let [averaged, last] = ["averaged/adapter", "adapter"].map(|name| format!("{checkpoint}/{name}.safetensors"));
    assert_eq!(summary.adapter, [world.path(&averaged)]);
    let tensors = |file: &str| {
        let all = Checkpoint::open(world.path(file)).unwrap().all().unwrap();
        all.into_iter().map(|(name, tensor)| (name, tensor.as_bytes().to_vec())).collect::<Vec<_>>()
    };
    assert!(tensors(&averaged) != tensors(&last));

    let generated = |name: &str, adapter: &str| {
        let mut arguments = vec!["generate", "--config", "run/config.yaml", "--adapter", adapter, "--output", name];
        arguments.extend(["--prompt", "a face", "--image", "0.png", "--seed", "3"]);
        let output = world.roll(&arguments);
        assert!(output.status.success(), "{}", stderr_text(&output));
        (std::fs::read(world.path(name)).unwrap(), stderr_text(&output))
    };
    let shown = std::fs::read(world.path("run/samples/after/prompt-000.mp4")).unwrap();
    let (video, messages) = generated("run.mp4", "run");
    assert!(video == shown && messages.contains("averaged"), "{messages}");
    assert!(generated("checkpoint.mp4", checkpoint).0 == shown);
    assert!(generated("averaged.mp4", &averaged).0 == shown);
    assert!(generated("last.mp4", &last).0 != shown, "the file of the weights in training");
    world.done(&["convert-lora", "run", "converted.safetensors", "--to", "comfyui"]);
    assert!(tensors("converted.safetensors") == tensors(&averaged));

    for (from, to, expected) in [("0.9", "0", "go on with the value"), ("0", "0.9", "go on with `training.average: 0`")]
    {
        let out = format!("resumed-{to}");
        world.train(&out, 1, &[&own[..], &evaluated, &[&format!("training.average={from}")]].concat());
        let output =
            world.roll(&["run", "--resume", &out, "--set", &format!("training.average={to}"), "--set", "steps=2"]);
        fails(&output, 2, &[expected, "step-000001"]);
    }

    // A run that starts from it begins with the scores that the evaluation of the first one ended with.
    world.train("next", 1, &[&own[..], &evaluated, &["model.lora_checkpoint=run"]].concat());
    let of_last = format!("model.lora_checkpoint={last}");
    world.train("other", 1, &[&own[..], &evaluated, &[&of_last]].concat());
    let scores = |run: &str, first: bool| {
        let rows = world.metrics(run);
        let row = if first { rows.iter().find(|row| row.get("eval/train").is_some()) } else { rows.last() };
        let row = row.unwrap().as_object().unwrap();
        let is_score =
            |name: &str| name.starts_with("eval/") && !name.ends_with("_kl") && name != "eval/checks_falling";
        let scores = row.iter().filter(|(name, _)| is_score(name));
        scores.map(|(name, value)| (name.clone(), value.clone())).collect::<Vec<_>>()
    };
    let ended = scores("run", false);
    assert!(!ended.is_empty());
    assert_eq!(scores("next", true), ended);
    assert_ne!(scores("other", true), ended);
}

#[test]
fn recipes_pass_the_check_with_small_files() {
    let world = World::new(2);
    picture(&world, "0.png", 0.1);
    world.done(&["init-tiny", "t2v", "--kind", "t2v"]);
    for expert in ["high", "low"] {
        save_safetensors(world.path(&format!("{expert}_noise.safetensors")), &distillation(), &BTreeMap::new())
            .unwrap();
    }
    std::fs::write(world.path("images.csv"), "image,prompt\n0.png,a face\n").unwrap();
    std::fs::write(world.path("prompts.txt"), "a dog runs\n").unwrap();
    let recipes = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/recipes");
    for (recipe, tiny, data, own) in [
        ("identity-i2v", "tiny", "images.csv", "reward={name: first_frame}"),
        ("judge-t2v", "t2v", "prompts.txt", "algo.group_size=2"),
        ("clips-i2v", "tiny", "metadata.csv", "model.weights_dtype=auto"),
    ] {
        let path = recipes.join(format!("{recipe}.yaml"));
        let settings = [
            "backend=flex".to_string(),
            format!("model.model_paths={tiny}/wan22_paths.json"),
            format!("model.tokenizer_path={tiny}/google/umt5-xxl"),
            "model.base_lora={dit: high_noise.safetensors, dit2: low_noise.safetensors}".into(),
            format!("data.metadata={data}"),
            format!("evaluation.metadata={data}"),
            "data.height=32".into(),
            "data.width=32".into(),
            "data.num_frames=5".into(),
            own.into(),
        ];
        let mut arguments = vec!["check", "--config", path.to_str().unwrap()];
        settings.iter().for_each(|setting| arguments.extend(["--set", setting]));
        let output = world.roll(&arguments);
        let printed_text = format!("{}{}", String::from_utf8_lossy(&output.stdout), stderr_text(&output));
        assert!(output.status.success(), "{recipe}: {printed_text}");
        assert!(!printed_text.contains("no effect"), "{recipe}: {printed_text}");
    }
}
