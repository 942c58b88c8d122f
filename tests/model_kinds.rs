//! Every kind of Wan model, small and in official layout, as a user works with it: train with and without guidance,
//! stop and go on, generate.

use roll_wan::init_tiny::{WanKind, init_tiny};

use crate::world::{World, fails, stderr_text};

/// A run of Reward-FL on the checkpoint in `tiny`: four denoising steps, of which two are trained.
const REWARD_FL: [&str; 5] = [
    "reward={name: brightness}",
    "algo.num_inference_steps=4",
    "algo.mid_timestep=2",
    "algo.final_timestep=3",
    "save_steps=2",
];

fn world(kind: WanKind) -> World {
    let world = World::new(2);
    std::fs::remove_dir_all(world.path("tiny")).unwrap();
    init_tiny(world.path("tiny"), kind, 3).unwrap();
    world
}

fn train(world: &World, out: &str, steps: u64, settings: &[&str]) {
    let settings: Vec<&str> = REWARD_FL.iter().chain(settings).copied().collect();
    let output = world.training(out, steps, &settings).output().unwrap();
    assert!(output.status.success(), "{}", stderr_text(&output));
}

/// `roll generate` with these arguments; the bytes of the picture of the last frame.
fn generate(world: &World, kind: WanKind, out: &str, arguments: &[&str]) -> Vec<u8> {
    let configuration = [
        "--set",
        "model.model_paths=tiny/wan22_paths.json",
        "--set",
        "model.tokenizer_path=tiny/google/umt5-xxl",
        "--set",
        "model.lora_rank=2",
    ];
    let video =
        ["--prompt", "a grey square", "--frames", "5", "--height", "64", "--width", "64", "--output", out, "--force"];
    let image: &[&str] = if kind == WanKind::T2v { &[] } else { &["--image", "first.png"] };
    world.done(&[&["generate"], &configuration[..], &video, image, arguments].concat());
    std::fs::read(world.path(out).join("frame_00004.png")).unwrap()
}

#[test]
fn every_model_trains_resumes_and_generates() {
    for kind in [WanKind::T2v, WanKind::I2v, WanKind::Ti2v, WanKind::I2v21] {
        let world = world(kind);
        train(&world, "plain", 3, &[]);
        train(&world, "guided", 3, &["algo.guidance_scale=3.5", "algo.negative_prompt=dark"]);
        for run in ["plain", "guided"] {
            let rows = world.metrics(run);
            assert!(
                rows.len() == 3 && rows.iter().all(|row| row["actor/grad_norm"].as_f64().unwrap() > 0.0),
                "{kind:?}"
            );
        }
        assert_ne!(world.metrics("plain")[0], world.metrics("guided")[0], "{kind:?}");

        // Two steps and one more are three.
        train(&world, "stopped", 2, &["algo.guidance_scale=3.5", "algo.negative_prompt=dark", "save_steps=1"]);
        world.done(&["run", "--resume", "stopped", "--steps", "3"]);
        assert_eq!(world.metrics("stopped"), world.metrics("guided"), "{kind:?}");

        let picture = roll_core::Tensor::full([1, 3, 64, 64], 0.1);
        let first = roll_core::Video::new(picture, 8.0).unwrap();
        let written = roll_media::write_pngs(world.path("still"), &first).unwrap();
        std::fs::copy(&written[0], world.path("first.png")).unwrap();
        let euler = generate(&world, kind, "euler", &["--steps", "3"]);
        assert_eq!(generate(&world, kind, "again", &["--steps", "3", "--guidance-scale", "1"]), euler, "{kind:?}");
        let others = [
            generate(&world, kind, "unipc", &["--steps", "3", "--sampler", "unipc"]),
            generate(&world, kind, "strong", &["--steps", "3", "--guidance-scale", "3.5", "--negative-prompt", "dark"]),
            generate(&world, kind, "listed", &["--timesteps", "1000,500", "--shift", "3"]),
        ];
        assert!(others.iter().all(|other| *other != euler), "{kind:?}");
    }
}

#[test]
fn rejects_invalid_guidance_and_samplers() {
    let world = world(WanKind::Ti2v);
    let refused = |settings: &[&str], parts: &[&str]| {
        let settings: Vec<&str> = REWARD_FL.iter().chain(settings).copied().collect();
        fails(&world.training("refused", 1, &settings).output().unwrap(), 2, parts);
    };
    refused(&["algo.guidance_scale=[4,3]"], &["`algo.guidance_scale`", "one expert"]);
    refused(&["algo.guidance_scale=0.5"], &["`algo.guidance_scale`", "at least 1"]);
    refused(&["algo.sampler=unipc"], &["`algo.sampler`", "algo.evaluation_sampler"]);
    let evaluated = ["algo.evaluation_sampler=unipc", "algo.guidance_scale=5", "evaluation.train_samples=1"];
    train(&world, "evaluated", 1, &evaluated);
}
