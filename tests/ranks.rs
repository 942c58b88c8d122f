//! Wan on several ranks, and weights that are not resident.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use roll_backends::strategy::{Zero, ZeroOptions};
use roll_core::{
    Adapter, BuildContext, Communicator, ConditionInput, Grad, Model, Noise, OptimizerConfig, Purpose, Registry,
    Strategy, Tensor, ThreadRanks, Timestep,
};
use roll_train::config::ConfigLayers;
use roll_train::{RunSession, Trainer};
use roll_wan::init_tiny::{TinyFiles, WanKind, init_tiny};
use roll_wan::{Placement, Wan, WanOptions, loading};
use {roll_agents as _, roll_video as _}; // for what they register

const LONG: Duration = Duration::from_secs(120);

fn open(directory: &Path, weight_store: Placement, lora_rank: usize, ranks: Arc<dyn Communicator>) -> Wan {
    let files =
        TinyFiles { model_paths: directory.join("wan22_paths.json"), tokenizer: directory.join("google/umt5-xxl") };
    let options = WanOptions {
        model_paths: Some(files.model_paths.into()),
        tokenizer_path: Some(files.tokenizer),
        lora_rank: Some(lora_rank),
        weight_store,
        ..WanOptions::default()
    };
    loading::open(&options, &BuildContext { seed: 1, ranks, ..BuildContext::new("flex") }).unwrap()
}

/// Adds the gradient of one sample to the model; returns velocity and cotangent of the latents.
fn pull(model: &mut Wan, step: u64, sample: u64) -> [Vec<f32>; 2] {
    let diffusion = model.as_diffusion().unwrap();
    let image = Some(Tensor::full([3, 64, 64], 0.2));
    let input = ConditionInput { prompt: "a face".into(), image, end_image: None, frames: 5, size: [64, 64] };
    let conditioning = diffusion.encode(&input).unwrap();
    let latents = Noise::new(1).normal(Purpose::Synthetic, step, sample, &conditioning.latent_shape).unwrap();
    let (velocity, pullback) =
        diffusion.velocity(&latents, Timestep(500.0), &conditioning, Adapter::On, Grad::Record).unwrap();
    let pulled = pullback.unwrap().pull(&velocity).unwrap();
    [velocity.to_f32_vec(), pulled.to_f32_vec()]
}

type Trained = (Vec<f32>, Vec<[Vec<f32>; 2]>);

/// Trains on the same four samples a step; returns parameters and every velocity and cotangent of rank 0.
fn train(directory: &Path, ranks: usize, stage: u8, store: Placement) -> Trained {
    let options = ZeroOptions { stage, reduce_bucket_size: 3000, ..ZeroOptions::default() };
    train_with(directory, ranks, options, store, 4)
}

/// As [`train`]; `lora_rank` 0 trains every weight.
fn train_with(directory: &Path, ranks: usize, options: ZeroOptions, store: Placement, lora_rank: usize) -> Trained {
    let results = ThreadRanks::run(ranks, LONG, |ranks| {
        let (rank, world) = (ranks.rank().0 as u64, ranks.world_size() as u64);
        let mut strategy = Zero::new(options.clone(), ranks.clone())?;
        let mut model = open(directory, store, lora_rank, ranks);
        strategy.attach(&mut model, &OptimizerConfig::default())?;
        let mut seen = Vec::new();
        for step in 0..2 {
            for sample in rank * 4 / world..(rank + 1) * 4 / world {
                // One sample has no gradient: its rank does not pull, and the others do not wait.
                if (step, sample) != (1, 3) {
                    strategy.before_last_pull(&mut model)?;
                    seen.push(pull(&mut model, step, sample));
                    strategy.accumulate(&mut model)?;
                }
            }
            strategy.step(&mut model, 1e-2, 0.25)?;
        }
        let mut values = vec![0.0; model.parameter_count()];
        model.read_parameters(&mut values)?;
        Ok((values, seen))
    });
    let mut results = results.into_iter().map(Result::unwrap);
    let first = results.next().unwrap();
    assert!(results.all(|(values, _)| values == first.0));
    first
}

#[test]
fn sharded_and_streamed_weights_reproduce_the_bits_of_resident_ones() {
    let dir = tempfile::tempdir().unwrap();
    init_tiny(dir.path(), WanKind::I2v, 3).unwrap();
    for ranks in [1, 2] {
        let resident = train(dir.path(), ranks, 2, Placement::Resident);
        assert!(resident == train(dir.path(), ranks, 3, Placement::Sharded), "sharded, {ranks} ranks");
        assert!(resident == train(dir.path(), ranks, 1, Placement::Streamed), "streamed, {ranks} ranks");
        assert!(resident == train(dir.path(), ranks, 1, Placement::Host), "in host memory, {ranks} ranks");
    }
}

#[test]
fn overlap_and_sharding_change_no_bit_of_full_training() {
    let dir = tempfile::tempdir().unwrap();
    init_tiny(dir.path(), WanKind::I2v, 3).unwrap();
    let with = |stage: u8, overlap_comm: bool, store: Placement, lora_rank: usize| {
        let options = ZeroOptions { stage, overlap_comm, reduce_bucket_size: 30_000, ..ZeroOptions::default() };
        train_with(dir.path(), 2, options, store, lora_rank)
    };
    for lora_rank in [0, 4] {
        let expected = with(2, false, Placement::Resident, lora_rank);
        for (overlap, store) in [(true, Placement::Resident), (false, Placement::Sharded), (true, Placement::Sharded)] {
            assert!(expected == with(3, overlap, store, lora_rank), "{overlap} {store:?} {lora_rank}");
        }
    }
}

#[test]
fn fully_trained_weights_are_sharded_with_frozen_ones() {
    let dir = tempfile::tempdir().unwrap();
    init_tiny(dir.path(), WanKind::I2v, 3).unwrap();
    let results = ThreadRanks::run(4, LONG, |ranks| {
        let mut bytes = Vec::new();
        for lora_rank in [0, 4] {
            let model = open(dir.path(), Placement::Sharded, lora_rank, ranks.clone());
            bytes.push([model.parameter_bytes(), 4 * model.parameter_count()]);
        }
        Ok(bytes)
    });
    for result in results {
        let [[full, all], [adapter, adapters]] = result.unwrap()[..] else { panic!("two models") };
        assert!(full * 4 >= all && (full as f64) < 0.26 * all as f64, "{full} of {all}");
        assert_eq!(adapter, adapters);
    }
}

#[test]
fn wan_trains_alike_on_one_and_four_ranks() {
    let dir = tempfile::tempdir().unwrap();
    init_tiny(dir.path(), WanKind::I2v, 3).unwrap();
    let (alone, _) = train(dir.path(), 1, 0, Placement::Resident);
    let (four, _) = train(dir.path(), 4, 3, Placement::Sharded);
    let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>().sqrt();
    let difference = norm(&mut alone.iter().zip(&four).map(|(a, b)| a - b));
    assert!(difference <= 1e-6 * norm(&mut alone.iter().copied()), "{difference}");
}

#[test]
fn an_agent_on_sharded_weights_validates_with_unequal_turns() {
    let settings = [
        "algo.name=agentic_ppo",
        "model.name=causal_lm",
        "model.lora_rank=4",
        "env={name: frozen_lake, env_instruction: ''}",
        "strategy={name: zero, stage: 3}",
        "steps=1",
        "sample_steps=0",
        "algo.num_env_groups=2",
        "algo.group_size=2",
        "algo.max_actions_per_traj=3",
        "algo.max_tokens_per_step=8",
        "algo.sequence_length=512",
        // One rank plays one episode, the other two.
        "algo.val_batch_size=3",
        "training.max_skipped_steps=0",
    ];
    let results = ThreadRanks::run(2, LONG, |ranks| {
        let registry = Registry::linked()?;
        let layers = settings.iter().try_fold(ConfigLayers::new(), |layers, one| layers.set(one))?;
        let context = BuildContext { seed: 1, ranks, ..BuildContext::new("flex") };
        Trainer::new(layers.load(Some(&registry))?, &registry, &context)?.run(None, &RunSession::default())
    });
    for result in results {
        assert_eq!(result.unwrap_or_else(|error| panic!("{}", error.chain())).steps, 1);
    }
}
