//! A Rust program that trains with a reward of its own: the example of roll-train.

#[allow(dead_code)]
#[path = "../roll-train/examples/own_reward.rs"]
mod example;

use crate::program;

#[test]
fn a_rust_program_trains_with_a_reward_of_its_own() {
    roll_train::signature::keep_key_in(Some(program::STATE.into()));
    let directory = tempfile::tempdir().unwrap();
    let run = directory.path().join("run");
    let summary = example::train(4, &run).unwrap_or_else(|error| panic!("{}", error.chain()));
    assert_eq!(summary.steps, 4);
    assert!(summary.last["actor/score"] > summary.first["actor/score"], "{summary:?}");
    assert!(run.join("checkpoints/step-000004").is_dir());
}
