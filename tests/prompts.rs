//! Runs on rows without a clip: prompts, and prompts with a picture.

use std::process::Stdio;
use std::time::Duration;

use roll_core::{Tensor, Video};
use roll_wan::init_tiny::{WanKind, init_tiny};
use serde_json::Value;

use crate::world::{SHORT, World, checkpoint_file, fails, stderr_text};

const T2V: &str = "model.model_paths=t2v/wan22_paths.json";
const PROMPTS: [&str; 4] = [T2V, "data.metadata=prompts.txt", "reward.name=brightness", "training.learning_rate=1e-3"];
/// At the default shift, the last steps of few lie above the noise levels of the trained expert.
const SHIFT: &str = "algo.shift=1";

/// Three clips, a model that takes no pictures, prompts and a picture.
fn world() -> World {
    let world = World::new(1);
    init_tiny(world.path("t2v"), WanKind::T2v, 3).unwrap();
    let write = |name: &str, text: &str| std::fs::write(world.path(name), text).unwrap();
    write("prompts.txt", "a grey square\n\na man, talking\na dog\n");
    write("mixed.csv", "video,prompt\n0.mp4,a grey square\n,a man\n");
    write("portraits.csv", "prompt,image\na grey square,picture.png\n");
    write("stills.csv", "video,prompt\n0.mp4,a grey square\npicture.png,a man\n");
    let picture = Video::new(Tensor::full([1, 3, 64, 96], 0.5), 8.0).unwrap();
    let pictures = roll_media::write_pngs(world.path("pictures"), &picture).unwrap();
    std::fs::rename(&pictures[0], world.path("picture.png")).unwrap();
    world
}

fn settings<'a>(own: &[&'a str]) -> Vec<&'a str> {
    [&SHORT[..], &[SHIFT], &PROMPTS, own].concat()
}

#[test]
fn a_text_file_of_prompts_trains_every_algorithm_that_generates_its_videos() {
    let world = world();
    let algorithms: [(&str, &[&str]); 3] = [
        ("reward_fl", &SHORT),
        ("diffusion_nft", &["sample_steps=1", "algo.num_inference_steps=3", "algo.group_size=2"]),
        ("flow_grpo", &["sample_steps=0", "algo.num_inference_steps=4", "algo.group_size=2"]),
    ];
    for (name, own) in algorithms {
        let algorithm = format!("algo.name={name}");
        let evaluated = ["evaluation.metadata=prompts.txt", "evaluation.samples=2", "evaluation.train_samples=1"];
        let own = [&PROMPTS[..], &[SHIFT, &algorithm], &evaluated, own].concat();
        let output = world.training(name, 2, &own).output().unwrap();
        let messages = stderr_text(&output);
        assert!(output.status.success(), "{messages}");
        assert!(messages.contains("3 prompts of 64x64, up to 5 frames"), "{messages}");
        for row in world.metrics(name).iter().filter(|row| row["step"] != 0) {
            assert!(row["actor/grad_norm"].as_f64().is_some_and(|norm| norm > 0.0), "{name}: {row}");
        }
        let samples = |moment: &str| world.path(name).join("samples").join(moment);
        assert!(samples("after").join("unseen-001.mp4").is_file() && !samples("reference").exists());
        let comparison = roll_media::read_video(world.path(name).join("comparison.mp4"), &Default::default()).unwrap();
        assert_eq!(comparison.dims()[0], 5, "the videos have the length of `data.num_frames`");
    }
}

#[test]
fn a_killed_run_on_prompts_is_resumed_bit_for_bit() {
    let world = world();
    let settings = settings(&["save_steps=2", "evaluation.metadata=prompts.txt"]);
    let whole = world.training("whole", 6, &settings).output().unwrap();
    assert!(whole.status.success(), "{}", stderr_text(&whole));
    let mut child = world.training("killed", 6, &settings).stderr(Stdio::null()).spawn().unwrap();
    while !world.path("killed/checkpoints/step-000002/manifest.json").exists() {
        assert!(child.try_wait().unwrap().is_none(), "the run ended before it was killed");
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!world.path("killed/summary.json").exists());
    world.done(&["run", "--resume", "killed"]);
    assert_eq!(world.metrics("killed"), world.metrics("whole"));
    for file in ["adapter.safetensors", "trainer/optimizer.safetensors"] {
        let [killed, whole] = ["killed", "whole"].map(|out| checkpoint_file(&world.path(out), 6, file));
        assert!(killed == whole, "{file}");
    }
}

#[test]
fn a_row_without_a_clip_is_refused_by_name_of_row_and_component() {
    let world = world();
    let nowhere = "model.model_paths=nowhere.json"; // refused before the model is opened
    // Flow matching has none of the keys of `SHORT`.
    let matching = [&PROMPTS[..], &["algo.name=flow_matching", nowhere]].concat();
    let parts = ["data.metadata", "prompts.txt line 1", "`flow_matching`", "trains on"];
    fails(&world.training("refused", 1, &matching).output().unwrap(), 2, &parts);
    let refused: [(&[&str], &[&str]); 8] = [
        (
            &["data.metadata=mixed.csv", "algo.data_weight=0.5", nowhere],
            &["mixed.csv line 3", "`algo.data_weight: 0.5`"],
        ),
        (
            &["reward=[{name: brightness}, {name: first_frame}]", nowhere],
            &["prompts.txt line 1", "the reward `first_frame` compares with it (`algo.reference: clip`)", "`video`"],
        ),
        (
            &["data.metadata=portraits.csv", "reward.name=first_frame", nowhere],
            &["portraits.csv line 2", "`first_frame`", "`image` compares with the picture of the row"],
        ),
        (
            &["reward.name=first_frame", "algo.reference=image", nowhere],
            &["prompts.txt line 1", "a clip in the column `video`, or a picture in the column `image`"],
        ),
        (
            &["evaluation.metadata=mixed.csv", "evaluation.check=[{name: first_frame}]", nowhere],
            &["evaluation.metadata", "mixed.csv line 3", "`first_frame`"],
        ),
        (
            &["evaluation.train_samples=1", "evaluation.check=[{name: first_frame}]", nowhere],
            &["evaluation.train_samples", "prompts.txt line 1", "`first_frame`"],
        ),
        (
            &["data.metadata=stills.csv"], // the model says how many frames it makes
            &["stills.csv line 3 (picture.png)", "is a picture", "`image`", "5 frames", "`data.num_frames`"],
        ),
        (
            &["model.model_paths=tiny/wan22_paths.json"],
            &["prompts.txt line 1", "image-to-video", "`video` and `image`"],
        ),
    ];
    for (own, parts) in refused {
        fails(&world.training("refused", 1, &settings(own)).output().unwrap(), 2, parts);
    }
}

#[test]
fn pictures_and_rates_without_effect_are_noted() {
    let world = world();
    let messages = |out: &str, own: &[&str]| {
        let output = world.training(out, 1, &settings(own)).output().unwrap();
        assert!(output.status.success(), "{}", stderr_text(&output));
        stderr_text(&output)
    };
    let portraits = "data.metadata=portraits.csv";
    let note = "`image` of 1 row of `data.metadata` has no effect";
    assert!(messages("idle", &[portraits]).contains(note));
    assert!(!messages("i2v", &[portraits, "model.model_paths=tiny/wan22_paths.json"]).contains(note));
    let compared = [portraits, "reward.name=first_frame", "algo.reference=image"];
    assert!(!messages("compared", &compared).contains(note));
    let sized = [portraits, "data.height=null", "data.width=null"];
    let sized = messages("sized", &sized);
    assert!(!sized.contains(note) && sized.contains("1 prompt of"), "{sized}");
    assert!(messages("rate", &["data.fps=8"]).contains("`data.fps: 8` has no effect"));
}

#[test]
fn data_commands_count_prompts_apart_from_clips() {
    let world = world();
    let set = |key: &str, value: &str| ["--set".to_string(), format!("{key}={value}")];
    let sizes = [set("data.height", "64"), set("data.width", "64"), set("data.num_frames", "5")].concat();
    let sizes: Vec<&str> = sizes.iter().map(String::as_str).collect();
    let inspect = [&["data", "inspect", "mixed.csv", "--json"], &sizes[..]].concat();
    let summary: Value = serde_json::from_str(&world.done(&inspect)).unwrap();
    assert_eq!([&summary["clips"], &summary["prompts"], &summary["usable"]], [1, 1, 2]);
    assert_eq!(summary["taken"]["5 frames of 64x64"], 2);
    let printed_text = world.done(&[&["data", "inspect", "mixed.csv"], &sizes[..]].concat());
    assert!(printed_text.contains("1 clip and 1 prompt, 2 can be used"), "{printed_text}");
    let prepare = [&["data", "prepare", "portraits.csv", "prepared"], &sizes[..]].concat();
    assert!(world.done(&prepare).contains("1 prompt, 0 left out"));
    let line: Value = serde_json::from_slice(&std::fs::read(world.path("prepared/metadata.jsonl")).unwrap()).unwrap();
    assert_eq!(line, serde_json::json!({"prompt": "a grey square", "image": "00001-picture-image.png"}));
}

#[test]
fn default_checks_are_the_rewards_that_rows_and_model_allow() {
    let world = world();
    let base = [&SHORT[..], &[SHIFT, "reward.name=brightness", "training.learning_rate=1e-3"]].concat();
    let checked_by = |out: &str, own: &[&str]| {
        let output = world.training(out, 1, &[&base[..], own].concat()).output().unwrap();
        let messages = stderr_text(&output);
        assert!(output.status.success(), "{messages}");
        let summary = world.summary(out);
        let names = summary.as_object().unwrap().keys();
        let checks: Vec<_> =
            names.filter_map(|name| name.strip_prefix("unseen_check_")?.strip_suffix("_gain")).collect();
        let named = checks.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        assert_eq!(
            messages.contains(&format!("checked by {named} (not with `evaluation.check=[]`)")),
            !named.is_empty(),
            "{messages}"
        );
        checks.join(" ")
    };
    let (clips, prompts) = ("evaluation.metadata=metadata.csv", "evaluation.metadata=prompts.txt");
    assert_eq!(checked_by("clips", &[clips]), "first_frame motion sharpness");
    assert_eq!(checked_by("trained", &[clips, "reward.name=motion"]), "first_frame sharpness");
    assert_eq!(checked_by("prompts", &[T2V, prompts]), "motion sharpness");
    assert_eq!(checked_by("text_to_video", &[T2V, clips]), "motion sharpness");
    let pictures = "evaluation.metadata=portraits.csv";
    assert_eq!(checked_by("pictures", &[pictures]), "motion sharpness");
    assert_eq!(checked_by("compared", &[pictures, "algo.reference=image"]), "first_frame motion sharpness");
    assert_eq!(checked_by("off", &[clips, "evaluation.check=null"]), "");

    // Checks change nothing of the training.
    let [checked, off] = ["clips", "off"].map(|out| checkpoint_file(&world.path(out), 1, "adapter.safetensors"));
    assert!(checked == off);
    let every = ["reward=[{name: motion}, {name: sharpness}, {name: first_frame}]", clips, "evaluation.every=1"];
    let stop = "evaluation.stop_when={checks_fall: 1}";
    let refused = world.training("refused", 1, &[&SHORT[..], &[SHIFT], &every, &[stop]].concat()).output().unwrap();
    fails(&refused, 2, &["`evaluation.stop_when`", "no check could fall", "`evaluation.check: auto`"]);
}
