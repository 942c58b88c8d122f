//! Agents that see, from the command line: the recipe `find-square` with a small network.

use crate::recipes::recipe;
use crate::resume::{assert_alike, remove_the_end};
use crate::world::World;

/// The recipe in small, with a policy that plays the next step during the update.
const SMALL: [&str; 10] = [
    "backend=flex",
    "model.model_path=eyes",
    "steps=3",
    "save_steps=2",
    "algo.num_env_groups=6",
    "algo.group_size=1",
    "algo.async_generation_ratio=1",
    "algo.val_batch_size=5",
    "algo.micro_batch_size=2",
    "env.pictures=2",
];
/// Two pictures in an episode, and both in the prompt of the second answer.
const TURNS: [&str; 2] = ["algo.max_actions_per_traj=2", "algo.sequence_length=128"];

/// Runs the recipe with further settings.
fn run(world: &World, out: &str, settings: &[&str]) {
    let recipe = recipe("find-square");
    let mut arguments = vec!["run", recipe.as_str(), "--out", out];
    for setting in SMALL.iter().chain(&TURNS).chain(settings) {
        arguments.extend(["--set", setting]);
    }
    world.done(&arguments);
}

fn episodes(world: &World, out: &str) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(world.path(out).join("trajectories.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn an_agent_that_sees_resumes_bit_for_bit_and_plays_alike_on_two_ranks() {
    let world = World::new(0);
    world.done(&["init-tiny", "eyes", "--kind", "qwen_vl"]);
    run(&world, "whole", &[]);
    run(&world, "cut", &[]);
    remove_the_end(&world.path("cut"), "step-000003");
    world.done(&["run", "--resume", "cut"]);
    assert_alike(&world, "cut", "whole", 3, &["model.safetensors", "trainer/optimizer.safetensors"]);
    let whole = episodes(&world, "whole");
    assert_eq!(episodes(&world, "cut"), whole);
    // Log-probabilities of generation are those of training: pictures are the same in both.
    let metrics = world.metrics("whole");
    let first = metrics.iter().find(|row| row.get("actor/train_infer_abs_diff").is_some()).unwrap();
    assert!(first["actor/train_infer_abs_diff"].as_f64().unwrap() < 1e-4, "{first}");

    run(&world, "two", &["ranks=2", "strategy.name=zero"]);
    let of_first_steps = |all: &[serde_json::Value]| -> Vec<serde_json::Value> {
        all.iter().filter(|episode| episode["step"].as_u64() < Some(2)).cloned().collect()
    };
    assert_eq!(of_first_steps(&episodes(&world, "two")), of_first_steps(&whole), "the first step plays alike");
    let loss = |out: &str| world.metrics(out).iter().find_map(|row| row.get("actor/loss")?.as_f64()).unwrap();
    assert!((loss("two") - loss("whole")).abs() < 1e-4, "{}, {}", loss("two"), loss("whole"));
    let turn = &whole[0]["turns"][1];
    assert!(turn["pictures"][0].as_str().unwrap().starts_with("data:image/png;base64,"), "{turn}");
    assert!(turn["observation"].as_str().unwrap().starts_with("[picture 56x56]"), "{turn}");
    let report = world.done(&["report", "whole", "--output", "report.html"]);
    let page = std::fs::read_to_string(world.path("report.html")).unwrap();
    assert!(page.contains("<img class=\"seen\""), "{report}");
}
