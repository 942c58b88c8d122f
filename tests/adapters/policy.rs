//! The policies that a run compares with, evaluates and hands on.

use roll_core::{Adapter, Model};
use roll_network::weights::Checkpoint;
use roll_wan::init_tiny::WanKind;
use serde_json::json;

use super::{Tiny, picture, velocity};
use crate::world::{SHORT, World, fails, stderr_text};

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
