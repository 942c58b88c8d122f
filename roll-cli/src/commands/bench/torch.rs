//! The same shapes in PyTorch.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use burn::tensor::DType;
use roll_backends::Backend;
use roll_core::{Error, Result};
use roll_models::wan2_2::vae::VaeVersion;
use serde::Deserialize;
use serde_json::{Value, json};

use super::preset::{Preset, RANK};
use super::scorer::{SIDE, WIDTHS};
use crate::args::{Bench, TorchAttention};

/// The script; part of the binary, so that it needs no checkout.
const SCRIPT: &str = include_str!("../../../../bench/torch_reference.py");

/// PyTorch's time and memory, and its settings.
#[derive(Clone, Debug, Deserialize)]
pub struct Theirs {
    /// Results by name of the phase.
    pub phases: BTreeMap<String, TheirPhase>,
    /// Median seconds of the steps that were made whole.
    pub step_seconds: Option<f64>,
    /// Memory over all phases.
    pub memory: TheirMemory,
    /// Why phases are missing: it ran out of memory.
    pub error: Option<String>,
    version: String,
    device: String,
    dtype: String,
    activations: String,
    attention: String,
    offload: bool,
    threads: usize,
    /// The measured shapes, as in the request.
    of: String,
}

/// One phase there.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct TheirPhase {
    /// Of one pass, the median.
    pub seconds: f64,
    /// Memory at the highest.
    #[serde(flatten)]
    pub memory: TheirMemory,
}

/// Bytes at the highest.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct TheirMemory {
    /// That PyTorch's allocator took from the GPU; of the process, on a CPU.
    pub reserved_bytes: Option<u64>,
    /// Of them, those in tensors.
    pub allocated_bytes: Option<u64>,
    /// As the driver counts them, CUDA's own included; like [`super::memory::Meter`] for us.
    pub driver_bytes: Option<u64>,
}

impl TheirMemory {
    /// The memory to compare with ours: both by the driver, if it says something.
    pub fn peak(&self) -> Option<u64> {
        self.driver_bytes.or(self.reserved_bytes)
    }
}

impl Theirs {
    /// Reads the last line of the script's answer to `request`.
    fn parse(request: &Request, output: &str) -> std::result::Result<Self, String> {
        let line = output.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
        let theirs: Self = serde_json::from_str(line).map_err(|e| format!("it answered `{line}`: {e}"))?;
        match theirs.of == request.of() {
            true => Ok(theirs),
            false => Err(format!("it measured {}, expected {}", theirs.of, request.of())),
        }
    }

    /// The setting of the comparison, in words.
    pub fn about(&self) -> String {
        let Self { version, device, dtype, activations, attention, threads, .. } = self;
        let offload = if self.offload { ", recorded tensors in pinned host memory" } else { "" };
        let error = self.error.as_ref().map(|e| format!("; it stopped: {e}")).unwrap_or_default();
        format!(
            "PyTorch {version} on {device}: products {dtype}, between them {activations}, attention {attention}, \
             {threads} threads, block checkpoints{offload}{error}"
        )
    }
}

/// A request to the script.
#[derive(Clone, Debug)]
pub struct Request(Value);

impl Request {
    /// The shapes of `preset`, on PyTorch's device for the backend: its `cuda`, or the CPU.
    pub fn new(args: &Bench, preset: &Preset) -> Result<Self> {
        let (dit, vae) = (&preset.networks.dit, &preset.networks.vae);
        let shapes = |weights: Vec<(String, Vec<usize>)>| weights.into_iter().collect::<BTreeMap<_, _>>();
        let number = args.backend.split_once(':').map_or("0", |(_, number)| number);
        let is_nvidia = matches!(Backend::of(&args.backend)?, Backend::LibTorchCuda | Backend::Cuda);
        if args.torch_attention != TorchAttention::Auto && !is_nvidia {
            let problem = format!("PyTorch has a choice on NVIDIA's GPUs only, found --backend {}", args.backend);
            return Err(Error::config("--torch-attention", problem));
        }
        // On the CPU products in bf16 are slower than in f32 there, and not what runs here either.
        let is_narrow = is_nvidia && preset.dtype == DType::BF16;
        let activations = args.torch_activations.map_or(is_narrow, |dtype| dtype.0 == DType::BF16);
        let name = |is_narrow| if is_narrow { "bfloat16" } else { "float32" };
        let vae_dtype = name(is_nvidia && preset.vae_dtype == DType::BF16);
        let passes = &preset.passes;
        let whole = json!({
            "forward": passes.forward - passes.pulled,
            "recorded": passes.pulled,
            "references": passes.references(),
        });
        let [height, width] = preset.size;
        let of = format!(
            "{}, {} blocks, {} frames of {height}x{width}, {}, {}{}",
            preset.name,
            dit.layers,
            preset.frames,
            name(is_narrow),
            if preset.with_vae { format!("VAE {vae_dtype}") } else { "no VAE".into() },
            if preset.whole_step { ", whole steps" } else { "" },
        );
        Ok(Self(json!({
            "of": of,
            "device": if is_nvidia { format!("cuda:{number}") } else { "cpu".into() },
            "dtype": name(is_narrow),
            "activations": name(activations),
            "attention": args.torch_attention.name(),
            "offload": preset.offload,
            "rounds": args.rounds,
            "whole_step": preset.whole_step.then_some(whole),
            "rank": RANK,
            "heads": dit.heads,
            "weights": shapes(dit.weights()),
            "latents": preset.latent_shape(),
            "extra_channels": dit.in_channels - dit.out_channels,
            "text": [preset.text_len, dit.text_dim],
            // The script has the decoder of one of the two VAEs.
            "vae_dtype": vae_dtype,
            "vae": (preset.with_vae && vae.version == VaeVersion::V2_1).then(|| shapes(vae.weights())),
            "frames": [preset.frames, preset.size[0], preset.size[1]],
            "scorer": { "side": SIDE, "widths": WIDTHS },
        })))
    }

    fn of(&self) -> &str {
        self.0["of"].as_str().unwrap_or_default()
    }
}

impl fmt::Display for Request {
    /// The line that the script reads.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {}", self.0)
    }
}

/// Runs PyTorch with as many threads as there are here; it has ended when this returns.
pub fn measure(request: &Request) -> Result<Theirs> {
    let python = std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into());
    let failed = |problem: String| {
        Error::Unsupported(format!(
            "comparing with PyTorch: {problem}; PYTHON names a Python with torch (now `{}`)",
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
    // Closed by being dropped, so that the other side ends. If it does not read, how it ended says more.
    let written = child.stdin.take().map(|mut stdin| writeln!(stdin, "{request}"));
    let output = child.wait_with_output().map_err(|e| failed(e.to_string()))?;
    if !output.status.success() {
        return Err(failed(format!("it ended with {}", output.status)));
    }
    written.transpose().map_err(|e| failed(e.to_string()))?;
    Theirs::parse(request, &String::from_utf8_lossy(&output.stdout)).map_err(failed)
}

/// Reads an earlier answer of PyTorch.
pub fn read(request: &Request, file: &Path) -> Result<Theirs> {
    let text = std::fs::read_to_string(file).map_err(Error::file("read", file))?;
    Theirs::parse(request, &text).map_err(|problem| Error::config("--theirs", format!("{}: {problem}", file.display())))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        bench: Bench,
    }

    fn request(line: &str) -> Result<Request> {
        let args = Line::parse_from(line.split_whitespace()).bench;
        Request::new(&args, &Preset::of(&args)?)
    }

    #[test]
    fn the_request_of_a14b_is_for_18900_tokens_in_the_dtype_of_a_gpu() {
        let Request(asked) = request("bench --preset a14b --backend libtorch-cuda:1 --whole-step --offload").unwrap();
        assert_eq!(asked["latents"], json!([16, 21, 60, 60]));
        assert_eq!(asked["device"], "cuda:1");
        assert_eq!([&asked["dtype"], &asked["activations"]], ["bfloat16", "bfloat16"]);
        assert_eq!(asked["whole_step"], json!({"forward": 4, "recorded": 4, "references": 4}));
        assert_eq!((&asked["offload"], &asked["vae_dtype"]), (&json!(true), &json!("float32")));
    }

    #[test]
    fn on_a_cpu_pytorch_computes_in_f32_and_has_no_choice_of_attention() {
        let Request(asked) = request("bench --preset 1.3b").unwrap();
        assert_eq!([&asked["device"], &asked["dtype"], &asked["activations"]], ["cpu", "float32", "float32"]);
        assert_eq!(asked["whole_step"], Value::Null);
        let refused = request("bench --torch-attention flash").unwrap_err().to_string();
        assert!(refused.contains("--torch-attention"), "{refused}");
    }

    #[test]
    fn an_answer_to_another_request_is_refused() {
        let answer = json!({
            "phases": {"forward": {"seconds": 1.5, "reserved_bytes": 5, "allocated_bytes": 4, "driver_bytes": null}},
            "step_seconds": null,
            "memory": {"reserved_bytes": 5, "allocated_bytes": 4, "driver_bytes": 7},
            "error": null,
            "version": "2", "device": "the CPU", "dtype": "float32", "activations": "float32", "attention": "auto",
            "offload": false, "threads": 2,
            "of": "tiny, 4 blocks, 9 frames of 64x64, float32, VAE float32",
        })
        .to_string();
        let theirs = Theirs::parse(&request("bench").unwrap(), &format!("warming up\n{answer}\n\n")).unwrap();
        assert_eq!((theirs.phases["forward"].seconds, theirs.memory.peak()), (1.5, Some(7)));
        assert_eq!(theirs.phases["forward"].memory.peak(), Some(5));
        let refused = Theirs::parse(&request("bench --layers 2").unwrap(), &answer).unwrap_err();
        assert!(refused.contains("it measured tiny, 4 blocks"), "{refused}");
    }

    #[test]
    fn whole_steps_are_those_that_back_propagate_a_score() {
        let refused = request("bench --algo diffusion_nft --whole-step").unwrap_err().to_string();
        assert!(refused.contains("reward_fl"), "{refused}");
    }
}
