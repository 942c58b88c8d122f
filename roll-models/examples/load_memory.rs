//! Peak of host memory while an f32 checkpoint of the official layout is opened with its weights in bf16.
//!
//!     cargo run --release -p roll-models --example load_memory -- create /tmp/f32 [GB]
//!     cargo run --release -p roll-models --example load_memory -- open /tmp/f32 [bf16|f32|auto] [keep|host|drop]

use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::Instant;

use roll_core::{
    Adapter, BuildContext, ConditionInput, DiffusionModel, Error, Grad, Noise, Purpose, Result, Timestep, parse_options,
};
use roll_models::wan2_2::dit::DitConfig;
use roll_models::wan2_2::init_tiny::{TinyKind, init_tiny};
use roll_models::wan2_2::loading::open;
use serde_json::json;

const HEADS: usize = 12;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["create", path] => create(Path::new(path), 2.0),
        ["create", path, size] => create(Path::new(path), size.parse().unwrap_or(2.0)),
        ["open", path] => measure(Path::new(path), "bf16", "keep"),
        ["open", path, dtype] => measure(Path::new(path), dtype, "keep"),
        ["open", path, dtype, idle] => measure(Path::new(path), dtype, idle),
        _ => Err(Error::Unsupported("expected `create DIR [GB]` or `open DIR [DTYPE] [IDLE_EXPERT]`".into())),
    }
}

/// Two experts of random f32 weights, of `size` GB together, beside a small VAE and text encoder.
fn create(directory: &Path, size: f64) -> Result<()> {
    init_tiny(directory, TinyKind::T2v, 0)?;
    let config = |layers| DitConfig {
        dim: 1536,
        in_channels: 16,
        out_channels: 16,
        patch: [1, 2, 2],
        text_dim: 32,
        freq_dim: 256,
        ffn_dim: 8960,
        layers,
        heads: HEADS,
        image_dim: None,
    };
    let bytes = |layers| 4 * config(layers).weights().iter().map(|(_, s)| s.iter().product::<usize>()).sum::<usize>();
    let layers = (1..).find(|n| bytes(*n) as f64 >= size * 0.5e9).unwrap_or(1);
    for folder in ["high_noise_model", "low_noise_model"] {
        let place = directory.join(folder);
        write_weights(&place.join("diffusion_pytorch_model.safetensors"), &config(layers).weights())?;
        let text = json!({"num_heads": HEADS, "text_len": 512}).to_string();
        std::fs::write(place.join("config.json"), text).map_err(Error::file("write", &place))?;
    }
    println!("two experts of {layers} layers, {:.2} GB each", bytes(layers) as f64 / 1e9);
    Ok(())
}

/// Never holds more than a buffer.
fn write_weights(path: &Path, weights: &[(String, Vec<usize>)]) -> Result<()> {
    let (mut header, mut at) = (String::from("{"), 0);
    for (i, (name, shape)) in weights.iter().enumerate() {
        let (comma, end) = (if i > 0 { "," } else { "" }, at + 4 * shape.iter().product::<usize>());
        let _ = write!(header, r#"{comma}"{name}":{{"dtype":"F32","shape":{shape:?},"data_offsets":[{at},{end}]}}"#);
        at = end;
    }
    header.push('}');
    let write = || -> std::io::Result<()> {
        let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(header.as_bytes())?;
        let mut state = 0x2545_f491_4f6c_dd1d_u64;
        for (_, shape) in weights {
            let scale = if shape.len() == 2 { 1.0 / (shape[1] as f32).sqrt() } else { 0.1 };
            for _ in 0..shape.iter().product::<usize>() {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                file.write_all(&(((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * scale).to_le_bytes())?;
            }
        }
        file.flush()
    };
    write().map_err(Error::file("write", path))
}

fn measure(directory: &Path, dtype: &str, idle: &str) -> Result<()> {
    let options = json!({
        "model_paths": directory.join("wan22_paths.json"),
        "tokenizer_path": directory.join("google/umt5-xxl"),
        "weights_dtype": dtype,
        "idle_expert": idle,
        "lora_rank": 4,
    });
    let options = parse_options("model", options.as_object().unwrap_or(&Default::default()))?;
    let context = BuildContext { base_dir: directory.into(), ..BuildContext::new("flex") };
    println!("before: {}", memory()?);
    let start = Instant::now();
    let mut model = open(&options, &context)?;
    println!("opened in {:.1} s: {}", start.elapsed().as_secs_f64(), memory()?);
    let input = ConditionInput { prompt: "a face".into(), frames: 5, size: [64, 64], ..ConditionInput::default() };
    let conditioning = model.encode(&input)?;
    let mut x = Noise::new(1).normal(Purpose::Synthetic, 0, 0, &conditioning.latent_shape)?;
    for timestep in [950.0, 300.0] {
        let start = Instant::now();
        x = model.velocity(&x, Timestep(timestep), &conditioning, Adapter::On, Grad::Skip)?.0;
        println!("velocity at {timestep} in {:.1} s: {}", start.elapsed().as_secs_f64(), memory()?);
    }
    println!("checksum {:.6}", x.f32s()?.iter().map(|v| f64::from(v.abs())).sum::<f64>());
    Ok(())
}

/// Resident memory, now and at its highest, pages of mapped files included.
fn memory() -> Result<String> {
    let path = "/proc/self/status";
    let text = std::fs::read_to_string(path).map_err(Error::file("read", path))?;
    let megabytes = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let kib = line.and_then(|l| l.split_whitespace().next()).and_then(|v| v.parse::<f64>().ok());
        kib.map(|k| k * 1024.0 / 1e6).ok_or_else(|| Error::bad_file(path, format!("no line {name}")))
    };
    Ok(format!("{:.0} MB, at most {:.0} MB", megabytes("VmRSS:")?, megabytes("VmHWM:")?))
}
