//! `roll run --ranks N`: ranks that are threads of one process.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::program::with_default_signals;
use crate::world::{SHORT, World, checkpoint_file, fails, stderr_text};

const SETTINGS: [&str; 8] = [
    "reward.name=brightness",
    SHORT[0],
    SHORT[1],
    SHORT[2],
    SHORT[3],
    "training.learning_rate=1e-3",
    "training.average=0.5",
    "strategy.name=zero",
];

/// A run of `steps` on `ranks`, four samples a step.
fn training(world: &World, out: &str, steps: u64, ranks: usize, settings: &[&str]) -> Command {
    let samples = format!("training.per_device_train_batch_size={}", 4 / ranks);
    let mut command = world.training(out, steps, &[&SETTINGS[..], &[&samples], settings].concat());
    command.args(["--ranks", &ranks.to_string()]);
    command
}

fn done(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", stderr_text(&output));
}

/// The adapter in training, and the average.
fn adapters(world: &World, out: &str, step: u64) -> [Vec<u8>; 2] {
    ["adapter.safetensors", "averaged/adapter.safetensors"].map(|name| checkpoint_file(&world.path(out), step, name))
}

/// The adapter's values, after its header.
fn values(bytes: &[u8]) -> Vec<f32> {
    let header = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    bytes[8 + header..].as_chunks::<4>().0.iter().map(|v| f32::from_le_bytes(*v)).collect()
}

/// The largest difference between two lists of metrics, relative to the larger value.
fn difference(a: &[Value], b: &[Value]) -> f64 {
    assert_eq!(a.len(), b.len());
    let pairs = a.iter().zip(b).flat_map(|(a, b)| {
        let (a, b) = (a.as_object().unwrap(), b.as_object().unwrap());
        assert!(a.keys().eq(b.keys()), "{a:?} {b:?}");
        a.values().zip(b.values()).filter_map(|(a, b)| a.as_f64().zip(b.as_f64()))
    });
    pairs.map(|(a, b)| (a - b).abs() / a.abs().max(b.abs()).max(1e-6)).fold(0.0, f64::max)
}

#[test]
fn ranks_train_alike_and_threads_change_no_bit() {
    let world = World::new(6);
    let measured = ["evaluation.metadata=metadata.csv", "evaluation.every=2"];
    for ranks in [1, 2, 4] {
        done(&mut training(&world, &format!("on-{ranks}"), 4, ranks, &measured));
    }
    for ranks in [2, 4] {
        let out = format!("on-{ranks}");
        for (one, several) in adapters(&world, "on-1", 4).iter().zip(adapters(&world, &out, 4)) {
            let (one, several) = (values(one), values(&several));
            let norm = one.iter().map(|v| v * v).sum::<f32>().sqrt();
            let apart = one.iter().zip(&several).map(|(a, b)| (a - b).powi(2)).sum::<f32>().sqrt();
            assert!(norm > 0.0 && apart <= 1e-5 * norm, "{ranks} ranks: {apart} of {norm}");
        }
        let apart = difference(&world.metrics("on-1"), &world.metrics(&out));
        assert!(apart < 1e-3, "{ranks} ranks: {apart}");
    }
    done(training(&world, "one-thread", 4, 2, &measured).env("RAYON_NUM_THREADS", "1"));
    done(training(&world, "eight-threads", 4, 2, &measured).env("RAYON_NUM_THREADS", "8"));
    assert!(adapters(&world, "one-thread", 4) == adapters(&world, "eight-threads", 4));
    assert_eq!(world.metrics("one-thread"), world.metrics("eight-threads"));
}

#[test]
fn resume_on_two_ranks_is_bit_exact_and_other_numbers_work() {
    let world = World::new(4);
    done(&mut training(&world, "whole", 12, 2, &[]));
    let mut run = training(&world, "stopped", 12, 2, &[]);
    let mut run = with_default_signals(&mut run).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(run.stderr.take().unwrap()).lines();
    let first_step = lines.by_ref().find(|line| line.as_ref().is_ok_and(|line| line.contains("step 1/"))).unwrap();
    kill_process(Pid::from_child(&run), Signal::TERM).unwrap_or_else(|error| panic!("{error}: {first_step:?}"));
    let rest: Vec<String> = lines.map(Result::unwrap).collect();
    assert_eq!(run.wait().unwrap().code(), Some(130), "{rest:?}");
    assert!(rest.iter().any(|line| line.contains("roll run --resume stopped")), "{rest:?}");
    world.done(&["run", "--resume", "stopped"]);
    assert!(adapters(&world, "stopped", 12) == adapters(&world, "whole", 12));
    for (ranks, steps) in [("1", "13"), ("3", "14")] {
        world.done(&["run", "--resume", "stopped", "--ranks", ranks, "--steps", steps]);
    }
}

#[test]
fn rank_0_logs_and_every_rank_warns() {
    let world = World::new(4);
    std::fs::write(world.path("3.mp4"), "no video").unwrap();
    let skips = ["data.on_bad_sample=skip"];
    let output = training(&world, "run", 2, 2, &skips).output().unwrap();
    let text = stderr_text(&output);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("2 ranks") && text.matches("step 1/2").count() == 1, "{text}");
    let output = training(&world, "strict", 2, 2, &["data.on_bad_sample=error"]).output().unwrap();
    fails(&output, 2, &["3.mp4"]);
    assert_eq!(stderr_text(&output).matches("error: ").count(), 1, "{}", stderr_text(&output));
}

#[test]
fn an_error_on_any_rank_leaves_no_run_directory() {
    let world = World::new(4);
    // Both ranks have two of these at the first step.
    for clip in 0..4 {
        let path = world.path(&format!("{clip}.mp4"));
        let good = std::fs::read(&path).unwrap();
        std::fs::write(&path, "no video").unwrap();
        let output = training(&world, "run", 2, 2, &["data.on_bad_sample=error"]).output().unwrap();
        fails(&output, 2, &[&format!("{clip}.mp4")]);
        assert!(!world.path("run").exists(), "clip {clip} left a run directory");
        std::fs::write(&path, good).unwrap();
    }
}

#[test]
fn rejects_configurations_that_cannot_be_split_over_ranks() {
    let world = World::new(4);
    fails(
        &training(&world, "alone", 1, 2, &["strategy.name=single"]).output().unwrap(),
        2,
        &["strategy.name", "`zero`"],
    );
    let none = world.training("none", 1, &SETTINGS).args(["--ranks", "0"]).output().unwrap();
    fails(&none, 2, &["--ranks", "at least 1"]);
    assert!(!world.path("alone").exists() && !world.path("none").exists());
}

#[test]
fn many_ranks_on_a_core_are_warned_of() {
    let world = World::new(1);
    let dry = |ranks: usize| {
        let mut command = training(&world, "run", 1, ranks, &["training.per_device_train_batch_size=1"]);
        command.arg("--dry-run").env("RAYON_NUM_THREADS", "1");
        stderr_text(&command.output().unwrap())
    };
    let (many, few) = (dry(5), dry(4));
    assert!(many.contains("5 ranks share 1 threads") && !few.contains("ranks share"), "{many}{few}");
}
