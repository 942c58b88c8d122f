//! Z-Image as the program runs it: every algorithm that generates its pictures trains it, and a stopped run goes on with
//! the same bits.

use std::path::Path;

use crate::program::{done, root};

/// `roll run` of `algorithm` on the small checkpoint, with guidance, into `out`.
fn train(directory: &Path, algorithm: &str, out: &str, steps: &str, settings: &[&str]) {
    let fixed = [
        "model={name: z_image, model_path: tiny, lora_rank: 2}",
        "data={metadata: prompts.txt, num_frames: 1, height: 32, width: 48}",
        "reward={name: brightness}",
        "algo.guidance_scale=3.5",
        "save_steps=1",
    ];
    let mut arguments = vec!["run", "--algo", algorithm, "--out", out, "--steps", steps];
    fixed.iter().chain(settings).for_each(|setting| arguments.extend(["--set", setting]));
    done(directory, &arguments);
}

fn small_checkpoint() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("prompts.txt"), "a red house\na blue dog\n").unwrap();
    done(directory.path(), &["init-tiny", "tiny", "--kind", "z_image"]);
    directory
}

#[test]
fn a_stopped_run_of_z_image_goes_on_with_the_same_bits_and_its_lora_can_be_trained_on() {
    let directory = small_checkpoint();
    let path = directory.path();
    let adapter =
        |run: &str, step: usize| path.join(run).join(format!("checkpoints/step-{step:06}/adapter.safetensors"));
    let bytes = |run: &str, step: usize| std::fs::read(adapter(run, step)).unwrap();
    train(path, "reward_fl", "whole", "2", &[]);
    train(path, "reward_fl", "stopped", "1", &[]);
    assert_eq!(bytes("stopped", 1), bytes("whole", 1));
    done(path, &["run", "--resume", "stopped", "--steps", "2"]);
    assert_eq!(bytes("stopped", 2), bytes("whole", 2));
    assert_ne!(bytes("whole", 1), bytes("whole", 2));
    train(path, "reward_fl", "further", "1", &["model.lora_checkpoint=whole"]);
    assert!(path.join("further/samples/step-000001/sample-000000.png").is_file());
}

#[test]
fn policy_gradients_train_z_image() {
    let directory = small_checkpoint();
    for algorithm in ["diffusion_nft", "flow_grpo"] {
        train(directory.path(), algorithm, algorithm, "1", &[]);
    }
}

#[test]
fn the_picture_demo_trains_and_draws_held_out_prompts() {
    let directory = tempfile::tempdir().unwrap();
    let run = directory.path().join("run");
    let mut arguments =
        vec!["run", "--config", "demo/picture/follow.yaml", "--steps", "1", "--out", run.to_str().unwrap()];
    ["evaluation.samples=2", "evaluation.train_samples=2"]
        .iter()
        .for_each(|setting| arguments.extend(["--set", setting]));
    let printed = done(&root(), &arguments);
    assert!(printed.contains("unseen check"), "{printed}");
    for part in ["before", "after"] {
        assert!(run.join(format!("samples/{part}/unseen-001.png")).is_file(), "{part}");
    }
}
