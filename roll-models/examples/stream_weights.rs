//! Peak memory and time of training steps on a transformer of 4 GB whose weights stay in their file.
//!
//!     cargo run --release -p roll-models --example stream_weights -- create /tmp/4gb.safetensors [GB]
//!     cargo run --release -p roll-models --example stream_weights -- streamed /tmp/4gb.safetensors
//!     cargo run --release -p roll-models --example stream_weights -- resident /tmp/4gb.safetensors

use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::sync::Arc;
use std::time::Instant;

use burn::tensor::DType;
use roll_backends::optimizer::{AdamW, Moments};
use roll_backends::{Memory, Resident, WeightStore};
use roll_core::{Adapter, Conditioning, Error, Grad, Noise, OptimizerConfig, Purpose, Result, StateDict, Timestep};
use roll_models::wan2_2::dit::{Dit, DitConfig, Trainable};
use roll_models::weights::{Checkpoint, Streamed};

const HEADS: usize = 12;
const STEPS: u64 = 3;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["create", path] => create(path, 4.0),
        ["create", path, size] => create(path, size.parse().unwrap_or(4.0)),
        ["streamed", path] => train(path, true),
        ["resident", path] => train(path, false),
        _ => Err(Error::Unsupported("expected `create FILE [GB]`, `streamed FILE` or `resident FILE`".into())),
    }
}

fn config(layers: usize) -> DitConfig {
    DitConfig {
        dim: 1536,
        in_channels: 16,
        out_channels: 16,
        patch: [1, 2, 2],
        text_dim: 512,
        freq_dim: 256,
        ffn_dim: 8960,
        layers,
        heads: HEADS,
        image_dim: None,
    }
}

/// Writes random bf16 weights without ever holding more than one tensor.
fn create(path: &str, size: f64) -> Result<()> {
    let elements = |layers| config(layers).weights().iter().map(|(_, s)| s.iter().product::<usize>()).sum::<usize>();
    let layers = (1..).find(|n| elements(*n) as f64 * 2.0 >= size * 1e9).unwrap_or(1);
    let weights = config(layers).weights();
    let (mut header, mut at) = (String::from("{"), 0);
    for (i, (name, shape)) in weights.iter().enumerate() {
        let bytes = 2 * shape.iter().product::<usize>();
        let comma = if i > 0 { "," } else { "" };
        let _ = write!(
            header,
            r#"{comma}"{name}":{{"dtype":"BF16","shape":{shape:?},"data_offsets":[{at},{}]}}"#,
            at + bytes
        );
        at += bytes;
    }
    header.push('}');
    let write = || -> std::io::Result<()> {
        let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(header.as_bytes())?;
        let mut state = 0x2545_f491_4f6c_dd1d_u64;
        for (_, shape) in &weights {
            let scale = if shape.len() == 2 { 1.0 / (shape[1] as f32).sqrt() } else { 0.1 };
            for _ in 0..shape.iter().product::<usize>() {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let unit = (state >> 40) as f32 / (1 << 23) as f32 - 1.0;
                file.write_all(&((unit * scale).to_bits() >> 16).to_le_bytes()[..2])?;
            }
        }
        file.flush()
    };
    write().map_err(Error::file("write", path))?;
    println!("{layers} layers, {:.2} GB", at as f64 / 1e9);
    Ok(())
}

fn train(path: &str, streamed: bool) -> Result<()> {
    let file = Checkpoint::open(path)?;
    let device = roll_backends::device("flex")?;
    let config = DitConfig::from_shapes(&file.shapes(), Some(HEADS))?;
    let store: Arc<dyn WeightStore> = match streamed {
        true => Arc::new(Streamed::new(file, &device).reading_ahead()),
        false => Arc::new(Resident::new(&file.all()?, DType::BF16, &device)),
    };
    let mut dit = Dit::with_store(config.clone(), store).with_memory(Memory::Recompute);
    let noise = Noise::new(0);
    let targets = ["q", "k", "v", "o"].map(String::from).to_vec();
    dit.train(&Trainable::Lora { rank: 8, alpha: 8.0, targets }, &noise, &StateDict::new())?;
    let parameters = dit.parameters().cloned().ok_or_else(|| Error::Misuse("nothing is trained".into()))?;
    let n = parameters.specs().iter().map(|s| s.len()).sum();
    let (mut values, mut moments) = (vec![0.0; n], Moments::zeros(n));
    let optimizer = AdamW::new(&OptimizerConfig::default());

    let shape = [16, 2, 16, 16];
    let conditioning = Conditioning {
        context: noise.normal(Purpose::Synthetic, 1, 1, &[64, config.text_dim])?,
        channels: None,
        image_tokens: None,
        first_frame: None,
        latent_shape: shape,
    };
    let mut checksum = 0.0;
    for step in 0..STEPS {
        let start = Instant::now();
        let latents = noise.normal(Purpose::Synthetic, 2, step, &shape)?;
        let (velocity, pullback) = dit.velocity(&latents, Timestep(500.0), &conditioning, Adapter::On, Grad::Record)?;
        if let Some(pullback) = pullback {
            pullback.pull(&velocity)?;
        }
        let mut gradients = vec![0.0; n];
        parameters.take_gradients(&mut gradients)?;
        parameters.read(&mut values)?;
        optimizer.update(&mut values, &gradients, &mut moments, 1e-3);
        parameters.write(&values)?;
        checksum += values.iter().map(|v| f64::from(v.abs())).sum::<f64>();
        println!("step {}: {:.2} s, peak of the process {:.0} MB", step + 1, start.elapsed().as_secs_f64(), peak()?);
    }
    println!("{} trainable parameters, checksum {checksum:.6}", n);
    Ok(())
}

/// Largest resident set so far, mapped pages included, in MB.
fn peak() -> Result<f64> {
    let path = "/proc/self/status";
    let text = std::fs::read_to_string(path).map_err(Error::file("read", path))?;
    let line = text.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    let kib = line.and_then(|l| l.split_whitespace().next()).and_then(|v| v.parse::<f64>().ok());
    kib.map(|k| k * 1024.0 / 1e6).ok_or_else(|| Error::bad_file(path, "no line VmHWM"))
}
