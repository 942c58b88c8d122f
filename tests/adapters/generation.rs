//! Videos with the adapter of a run, and experts that are exported.

use std::path::Path;

use roll_network::lora::LoraFile;
use roll_network::weights::Checkpoint;
use roll_wan::init_tiny::WanKind;
use serde_json::json;

use super::{PROMPT, Tiny, generate, picture};
use crate::world::{World, fails, stderr_text};

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
        assert_eq!(file.adapters[0].target_expert().unwrap().to_string(), expert);
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
        LoraFile::open(next.join("adapter.safetensors")).unwrap().adapters[0].target_expert().unwrap().to_string(),
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
