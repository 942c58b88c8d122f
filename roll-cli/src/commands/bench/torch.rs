//! The same shapes in PyTorch.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::{Command, Stdio};

use burn::tensor::DType;
use roll_core::{Error, Result};
use roll_models::wan2_2::vae::VaeVersion;
use serde_json::{Value, json};

use super::preset::{Preset, RANK};
use super::scorer::{SIDE, WIDTHS};

/// What runs there; part of the binary, so that it needs no checkout.
const SCRIPT: &str = include_str!("../../../../bench/torch_reference.py");

/// What PyTorch needs for each phase.
pub struct Theirs {
    /// Median seconds by the name of the phase.
    pub seconds: BTreeMap<String, f64>,
    /// What was compared.
    pub about: String,
}

/// Runs PyTorch with as many threads as there are here, after our own networks are gone.
pub fn measure(preset: &Preset, backend: &str, rounds: usize) -> Result<Theirs> {
    let python = std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into());
    let failed = |problem: String| {
        Error::Unsupported(format!(
            "comparing with PyTorch: {problem}; PYTHON names a Python with torch and safetensors (now `{}`)",
            python.to_string_lossy()
        ))
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).to_string();
    let mut child = Command::new(&python)
        .args(["-c", SCRIPT, &threads, "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|e| failed(e.to_string()))?;
    let request = format!("step {}\n", request(preset, backend, rounds));
    // Closed by being dropped, so that the other side ends.
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(request.as_bytes()).map_err(|e| failed(e.to_string()))?;
    }
    let output = child.wait_with_output().map_err(|e| failed(e.to_string()))?;
    let line = String::from_utf8_lossy(&output.stdout).lines().last().unwrap_or_default().to_string();
    let reply: Value = match output.status.success() {
        true => serde_json::from_str(&line).map_err(|e| failed(format!("it answered `{line}`: {e}")))?,
        false => return Err(failed(format!("it ended with {}", output.status))),
    };
    let seconds: BTreeMap<String, f64> =
        serde_json::from_value(reply["phases"].clone()).map_err(|e| failed(format!("it answered `{line}`: {e}")))?;
    let version = reply["version"].as_str().unwrap_or("?");
    let place = reply["device"].as_str().unwrap_or("?");
    let dtype = reply["dtype"].as_str().unwrap_or("?");
    Ok(Theirs {
        seconds,
        about: format!("PyTorch {version} on {place}, {dtype}, {threads} threads, block checkpoints"),
    })
}

fn request(preset: &Preset, backend: &str, rounds: usize) -> Value {
    let (dit, vae) = (&preset.networks.dit, &preset.networks.vae);
    let shapes = |weights: Vec<(String, Vec<usize>)>| weights.into_iter().collect::<BTreeMap<_, _>>();
    let gpu = backend.strip_prefix("libtorch-cuda").or_else(|| backend.strip_prefix("cuda"));
    let device = gpu.map_or("cpu".into(), |number| format!("cuda{}", if number.is_empty() { ":0" } else { number }));
    json!({
        "device": device,
        // On the CPU products in bf16 are slower than in f32 there, and not what runs here either.
        "dtype": if gpu.is_some() && preset.dtype == DType::BF16 { "bfloat16" } else { "float32" },
        "rounds": rounds,
        "rank": RANK,
        "heads": dit.heads,
        "weights": shapes(dit.weights()),
        "latents": preset.latent_shape(),
        "extra_channels": dit.in_channels - dit.out_channels,
        "text": [preset.text_len, dit.text_dim],
        // The script has the decoder of one of the two VAEs.
        "vae": (preset.with_vae && vae.version == VaeVersion::V2_1).then(|| shapes(vae.weights())),
        "frames": [preset.frames, preset.size[0], preset.size[1]],
        "scorer": { "side": SIDE, "widths": WIDTHS },
    })
}
