//! The gain of overlapping communication and computation: with and without it in turns, in one run.
//!
//!     RAYON_NUM_THREADS=1 cargo run --release -p roll-models --example overlap -- [GB/s between ranks]
//!     cargo run --release -p roll-models --example overlap -- streamed
//!
//! Two ranks, threads of this process, train adapters or all weights of a transformer whose weights are divided between
//! them (ZeRO stage 3). Threads hand values over at the speed of memory, which no network has: their collectives take
//! as long as the named link would, during which nothing is computed for them. `streamed`: one process reads the
//! weights from a file, a block ahead or not.

use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::tensor::DType;
use roll_backends::strategy::{Zero, ZeroOptions};
use roll_backends::{Memory, Sharded};
use roll_core::{
    Adapter, Communicator, Conditioning, Error, Grad, GradientSink, Model, Noise, OptimizerConfig, ParameterParts,
    ParameterSpec, Purpose, Rank, Result, StateDict, Strategy, Tensor, ThreadRanks, Timestep,
};
use roll_models::wan2_2::dit::{Dit, DitConfig, Trainable};
use roll_models::weights::{Checkpoint, Streamed, save_safetensors};

const RANKS: usize = 2;
/// Of each kind, in turns; the first of each warms up.
const ROUNDS: usize = 5;

fn config() -> DitConfig {
    DitConfig {
        dim: 768,
        in_channels: 16,
        out_channels: 16,
        patch: [1, 2, 2],
        text_dim: 256,
        freq_dim: 256,
        ffn_dim: 3072,
        layers: 12,
        heads: 6,
        image_dim: None,
    }
}

/// Random weights.
fn weights() -> Result<StateDict> {
    let mut state = StateDict::new();
    for (i, (name, shape)) in config().weights().into_iter().enumerate() {
        let scale = if shape.len() == 2 { 1.0 / (shape[1] as f32).sqrt() } else { 0.1 };
        let mut draw = Noise::new(7).uniform(Purpose::Parameters, 0, i as u64);
        let values = (0..shape.iter().product()).map(|_| scale * draw()).collect::<Vec<f32>>();
        state.insert(name, Tensor::new(values, shape)?);
    }
    Ok(state)
}

/// Ranks whose collectives take as long as over a link.
struct Link {
    ranks: Arc<dyn Communicator>,
    /// Bytes a second that a rank receives.
    speed: f64,
}

impl Link {
    fn wait(&self, received: usize) {
        std::thread::sleep(Duration::from_secs_f64(4.0 * received as f64 / self.speed));
    }
}

impl Communicator for Link {
    fn rank(&self) -> Rank {
        self.ranks.rank()
    }
    fn world_size(&self) -> usize {
        self.ranks.world_size()
    }
    fn all_reduce(&self, values: &mut [f32]) -> Result<()> {
        self.ranks.all_reduce(values)?;
        self.wait(2 * values.len() * (RANKS - 1) / RANKS);
        Ok(())
    }
    fn reduce_scatter(&self, values: &[f32], out: &mut [f32]) -> Result<()> {
        self.ranks.reduce_scatter(values, out)?;
        self.wait(out.len() * (RANKS - 1));
        Ok(())
    }
    fn all_gather(&self, part: &[f32], out: &mut [f32]) -> Result<()> {
        self.ranks.all_gather(part, out)?;
        self.wait(part.len() * (RANKS - 1));
        Ok(())
    }
    fn broadcast(&self, values: &mut [f32], root: Rank) -> Result<()> {
        self.ranks.broadcast(values, root)
    }
    fn barrier(&self) -> Result<()> {
        self.ranks.barrier()
    }
}

/// The transformer as a strategy sees it.
struct Network(Dit);

impl Network {
    fn parameters(&self) -> Result<&roll_backends::Parameters> {
        self.0.parameters().ok_or_else(|| Error::Misuse("nothing is trained".into()))
    }
}

impl Model for Network {
    fn parameters(&self) -> &[ParameterSpec] {
        self.0.parameters().map_or(&[], |p| p.specs())
    }
    fn read_parameters(&self, out: &mut [f32]) -> Result<()> {
        self.parameters()?.read(out)
    }
    fn write_parameters(&mut self, values: &[f32]) -> Result<()> {
        self.parameters()?.write(values)
    }
    fn take_gradients(&mut self, add_into: &mut [f32]) -> Result<()> {
        self.parameters()?.take_gradients(add_into)
    }
    fn parts(&mut self) -> Option<&mut dyn ParameterParts> {
        Some(self)
    }
    fn deliver_gradients(&mut self, sink: Option<Arc<dyn GradientSink>>) -> bool {
        self.0.parameters().map(|p| p.deliver_gradients(sink, 0)).is_some()
    }
    fn export_adapter(&self) -> Result<std::collections::BTreeMap<String, StateDict>> {
        Ok(Default::default())
    }
    fn import_adapter(&mut self, _files: &std::collections::BTreeMap<String, StateDict>) -> Result<()> {
        Ok(())
    }
}

impl ParameterParts for Network {
    fn read_part(&self, which: std::ops::Range<usize>, out: &mut [f32]) -> Result<()> {
        self.parameters()?.read_part(which, out)
    }
    fn write_part(&mut self, which: std::ops::Range<usize>, values: &[f32]) -> Result<()> {
        self.parameters()?.write_part(which, values)
    }
    fn take_gradients_part(&mut self, which: std::ops::Range<usize>, add_into: &mut [f32]) -> Result<()> {
        self.parameters()?.take_gradients_part(which, add_into)
    }
}

fn main() -> Result<()> {
    match std::env::args().nth(1).as_deref() {
        Some("streamed") => streamed(),
        speed => {
            let speed = speed.and_then(|s| s.parse().ok()).unwrap_or(0.25);
            println!("{RANKS} ranks, {speed} GB/s between them; seconds of a step, medians of {}", ROUNDS - 1);
            let targets = ["q", "k", "v", "o", "ffn.0", "ffn.2"].map(String::from).to_vec();
            sharded("adapters of rank 16", &Trainable::Lora { rank: 16, alpha: 16.0, targets }, speed * 1e9)?;
            sharded("all weights", &Trainable::Full, speed * 1e9)
        }
    }
}

fn sharded(what: &str, trainable: &Trainable, speed: f64) -> Result<()> {
    let state = weights()?;
    let device = roll_backends::device("flex")?;
    let results = ThreadRanks::run(RANKS, Duration::from_secs(600), |ranks| {
        let mut kinds = Vec::new();
        for overlap_comm in [false, true] {
            // Each kind has ranks of its own, so that one does not switch the other.
            let ranks: Arc<dyn Communicator> = Arc::new(Link { ranks: ranks.clone(), speed });
            let options = ZeroOptions {
                stage: 3,
                overlap_comm,
                reduce_bucket_size: 1 << 22,
                check_every: 0,
                ..ZeroOptions::default()
            };
            let mut strategy = Zero::new(options, ranks.clone())?;
            let store = Arc::new(Sharded::new(&state, DType::BF16, &device, ranks.clone())?);
            let mut dit = Dit::with_store(config(), store).with_memory(Memory::Recompute).dividing_weights(ranks);
            dit.train(trainable, &Noise::new(0), &state)?;
            let mut model = Network(dit);
            strategy.attach(&mut model, &OptimizerConfig::default())?;
            kinds.push((strategy, model, Vec::new()));
        }
        for round in 0..ROUNDS as u64 {
            for (strategy, model, seconds) in &mut kinds {
                strategy.communicator().barrier()?;
                let start = Instant::now();
                strategy.before_last_pull(model)?;
                pass(&model.0, round * RANKS as u64 + ranks.rank().0 as u64)?;
                strategy.accumulate(model)?;
                strategy.step(model, 1e-3, 0.5)?;
                strategy.communicator().barrier()?;
                seconds.push(start.elapsed().as_secs_f64());
            }
        }
        let mut found = Vec::new();
        for (_, model, seconds) in &mut kinds {
            let mut values = vec![0.0; model.parameter_count()];
            model.read_parameters(&mut values)?;
            found.push((median(&mut seconds[1..]), values));
        }
        for (strategy, ..) in &kinds {
            strategy.communicator().barrier()?;
        }
        Ok(found)
    });
    let results = results.into_iter().collect::<Result<Vec<_>>>()?;
    let [(without, a), (with, b)] = &results[0][..] else { return Err(Error::Misuse("two kinds".into())) };
    let same = a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
    println!(
        "{what:<20} without overlap {without:.3}  with {with:.3}  ratio {:.2}  parameters {}",
        with / without,
        if same { "equal bit for bit" } else { "DIFFER" }
    );
    Ok(())
}

fn streamed() -> Result<()> {
    let path = std::env::temp_dir().join(format!("roll-overlap-{}.safetensors", std::process::id()));
    let state = weights()?;
    let state: StateDict =
        state.into_iter().map(|(k, t)| Ok((k, t.to_float(roll_core::DType::Bf16)?))).collect::<Result<_>>()?;
    save_safetensors(&path, &state, &Default::default())?;
    let work = || -> Result<()> {
        let device = roll_backends::device("flex")?;
        let file = Checkpoint::open(&path)?;
        let plain = Streamed::new(file.clone(), &device);
        let ahead = Streamed::new(file, &device).reading_ahead();
        let targets = vec!["q".to_string()];
        let mut kinds = Vec::new();
        for store in [plain, ahead] {
            let mut dit = Dit::with_store(config(), Arc::new(store)).with_memory(Memory::Recompute);
            let trainable = Trainable::Lora { rank: 4, alpha: 4.0, targets: targets.clone() };
            dit.train(&trainable, &Noise::new(0), &StateDict::new())?;
            kinds.push((dit, Vec::new(), Tensor::zeros([1])));
        }
        for _ in 0..ROUNDS {
            for (dit, seconds, last) in &mut kinds {
                let start = Instant::now();
                *last = pass(dit, 0)?;
                seconds.push(start.elapsed().as_secs_f64());
            }
        }
        let [(_, without, a), (_, with, b)] = &mut kinds[..] else { return Err(Error::Misuse("two kinds".into())) };
        let same = a.as_bytes() == b.as_bytes();
        let (without, with) = (median(&mut without[1..]), median(&mut with[1..]));
        println!(
            "streamed: block by block {without:.3} s  a block ahead {with:.3} s  ratio {:.2}  cotangents {}",
            with / without,
            if same { "equal bit for bit" } else { "DIFFER" }
        );
        Ok(())
    };
    let result = work();
    std::fs::remove_file(&path).map_err(Error::file("remove", &path))?;
    result
}

/// One sample forth and back; gives the cotangent of the latents.
fn pass(dit: &Dit, sample: u64) -> Result<Tensor> {
    let (noise, shape) = (Noise::new(1), [16, 2, 16, 16]);
    let conditioning = Conditioning {
        context: noise.normal(Purpose::Synthetic, 1, 1, &[32, config().text_dim])?,
        channels: None,
        image_tokens: None,
        first_frame: None,
        latent_shape: shape,
    };
    let latents = noise.normal(Purpose::Synthetic, 2, sample, &shape)?;
    let (velocity, pullback) = dit.velocity(&latents, Timestep(500.0), &conditioning, Adapter::On, Grad::Record)?;
    pullback.ok_or_else(|| Error::Misuse("no pullback".into()))?.pull(&velocity)
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
