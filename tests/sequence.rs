//! Several ranks on one sample: training is that of one rank.

use std::time::Duration;

use roll_core::{BuildContext, Registry, Result, ThreadRanks};
use roll_train::config::ConfigLayers;
use roll_train::run_dir::RunDir;
use roll_train::{RunSession, Trainer, checkpoint};

use crate::world::{SETTINGS, SHORT, World, checkpoint_file};

const LONG: Duration = Duration::from_secs(120);
const REWARD_FL: [&str; 6] = [
    "reward.name=brightness",
    "training.learning_rate=1e-3",
    "strategy.name=zero",
    "data.cache_dir=none",
    // The tiny transformer says two.
    "model.num_heads=4",
    "save_steps=0",
];

/// Trains on this many ranks, in a new directory or, to go on, in one that is there.
fn train(world: &World, out: &str, ranks: usize, resume: bool, settings: &[&str]) -> Vec<Result<u64>> {
    ThreadRanks::run(ranks, LONG, |ranks| {
        let registry = Registry::linked()?;
        let mut all = SETTINGS.iter().chain(&SHORT).chain(&REWARD_FL).chain(settings);
        let layers = all.try_fold(ConfigLayers::new(), |layers, one| layers.set(one))?;
        let loaded = layers.load(Some(&registry))?;
        let base_dir = world.path(".");
        let rank = ranks.rank().0;
        let context = BuildContext { seed: loaded.config.seed, base_dir, ranks, ..BuildContext::new("flex") };
        let mut trainer = Trainer::new(loaded, &registry, &context)?;
        if resume {
            let checkpoints = world.path(out).join("checkpoints");
            trainer.resume(&checkpoint::newest_whole(&checkpoints)?.unwrap())?;
        }
        let dir = match (rank, resume) {
            (0, true) => Some(RunDir::open(world.path(out))?),
            (0, false) => Some(RunDir::create(world.path(out))?),
            _ => None,
        };
        Ok(trainer.run(dir.as_ref(), &RunSession::default())?.steps)
    })
}

fn trained(world: &World, out: &str, ranks: usize, resume: bool, settings: &[&str]) {
    for result in train(world, out, ranks, resume, settings) {
        result.unwrap_or_else(|error| panic!("{out}: {}", error.chain()));
    }
}

fn adapter(world: &World, run: &str, step: u64) -> Vec<f32> {
    let bytes = checkpoint_file(&world.path(run), step, "adapter.safetensors");
    let header = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    bytes[8 + header..].as_chunks::<4>().0.iter().map(|v| f32::from_le_bytes(*v)).collect()
}

/// Length of the difference, relative to that of the second.
fn difference(a: &[f32], b: &[f32]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>().sqrt();
    assert_eq!(a.len(), b.len());
    norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied())
}

#[test]
fn sequence_parallel_ranks_train_as_one_rank() {
    let world = World::new(4);
    let two = "training.gradient_accumulation_steps=2";
    trained(&world, "one", 1, false, &["steps=2", two]);
    let (expected, metrics) = (adapter(&world, "one", 2), world.metrics("one"));
    for (ranks, size, stage, samples) in [(2, 2, 2, 2), (4, 4, 1, 2), (2, 2, 3, 2), (4, 2, 2, 1)] {
        let run = format!("{ranks}-{size}-{stage}");
        let settings = [
            "steps=2".to_string(),
            format!("training.gradient_accumulation_steps={samples}"),
            format!("strategy.sequence_parallel_size={size}"),
            format!("strategy.stage={stage}"),
        ];
        trained(&world, &run, ranks, false, &settings.each_ref().map(String::as_str));
        let difference = difference(&adapter(&world, &run, 2), &expected);
        assert!(difference <= 1e-5, "{run}: {difference:e}");
        let found = world.metrics(&run);
        assert_eq!(found.len(), metrics.len(), "{run}");
        for (found, expected) in found.iter().zip(&metrics) {
            for name in ["actor/loss", "actor/score", "actor/kl_loss", "actor/grad_norm", "actor/samples"] {
                let [found, expected] = [found, expected].map(|row| row[name].as_f64());
                let near = found.zip(expected).map(|(a, b)| (a - b).abs() <= 1e-5 * b.abs().max(1e-3));
                assert!(near.unwrap_or(found == expected), "{run}, {name}: {found:?} {expected:?}");
            }
        }
    }
}

#[test]
fn resume_of_sequence_parallel_ranks_is_bit_exact() {
    let world = World::new(4);
    let shared = "strategy.sequence_parallel_size=2";
    trained(&world, "whole", 2, false, &["steps=4", shared]);
    trained(&world, "part", 2, false, &["steps=2", shared]);
    trained(&world, "part", 2, true, &["steps=4", shared]);
    for file in ["adapter.safetensors", "trainer/optimizer.safetensors"] {
        let read = |run: &str| checkpoint_file(&world.path(run), 4, file);
        assert!(read("part") == read("whole"), "{file}");
    }
    // One rank continues it too, to rounding.
    trained(&world, "alone", 2, false, &["steps=2", shared]);
    trained(&world, "alone", 1, true, &["steps=4"]);
    let difference = difference(&adapter(&world, "alone", 4), &adapter(&world, "whole", 4));
    assert!(difference <= 1e-5, "{difference:e}");
}

#[test]
fn rejects_what_cannot_be_sequence_parallel() {
    let world = World::new(2);
    let cases: [(usize, &[&str], &[&str]); 4] = [
        (2, &["strategy.sequence_parallel_size=3"], &["strategy.sequence_parallel_size", "divides the 2 ranks"]),
        (2, &["strategy.sequence_parallel_size=2", "model.num_heads=1"], &["2 ranks cannot divide the 1 heads"]),
        (
            2,
            &["strategy.sequence_parallel_size=2", "evaluation.train_samples=1"],
            &["not evaluated where several ranks", "roll generate"],
        ),
        (1, &["strategy.sequence_parallel_size=2"], &["divides the 1 ranks of the job, found 2"]),
    ];
    for (ranks, settings, parts) in cases {
        let settings = [settings, &["steps=1"]].concat();
        for result in train(&world, "refused", ranks, false, &settings) {
            let message = result.unwrap_err().chain();
            assert!(parts.iter().all(|part| message.contains(part)), "{message}");
        }
    }
}
