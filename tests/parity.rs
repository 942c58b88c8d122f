//! Parity with the reference: every case directory under `$ROLL_FIXTURES` (default `tests/fixtures`).
//!
//! A case's kind is its directory name up to a `__suffix`; sizes, seeds and settings come from its `config.json`. Cases
//! that compute on a device run on every backend of this build: in f32, and those of networks whose products may be
//! narrower in bf16 too (`case.rs` says what they may differ by). Backends that are not compiled in are not in the
//! list; one that is and does not work here is named at the end. A case that is skipped and a backend that is not
//! tested are failures where `ROLL_REQUIRE` names what they need (`roll_testing::CAPABILITIES`).
//!
//! Prints one line per case. An unknown kind fails. Arguments filter lines by their name: `dit`, `libtorch-bf16`.
//! `ROLL_TEST_BACKENDS=libtorch-cuda` opens no other backend.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::ExitCode;

#[path = "parity/agentic_functions.rs"]
mod agentic_functions;
#[path = "parity/agentic_loss.rs"]
mod agentic_loss;
#[path = "parity/agentic_value_loss.rs"]
mod agentic_value_loss;
#[path = "parity/averaged_policy.rs"]
mod averaged_policy;
#[path = "parity/awm_loss.rs"]
mod awm_loss;
#[path = "parity/case.rs"]
mod case;
#[path = "parity/causal_lm.rs"]
mod causal_lm;
#[path = "parity/diffusion_nft_loss.rs"]
mod diffusion_nft_loss;
#[path = "parity/dit.rs"]
mod dit;
#[path = "parity/dpo_loss.rs"]
mod dpo_loss;
#[path = "parity/exact.rs"]
mod exact;
#[path = "parity/face_tools.rs"]
mod face_tools;
#[path = "parity/flow_grpo_advantages.rs"]
mod flow_grpo_advantages;
#[path = "parity/flow_grpo_loss.rs"]
mod flow_grpo_loss;
#[path = "parity/flow_sde.rs"]
mod flow_sde;
#[path = "parity/gguf.rs"]
mod gguf;
#[path = "parity/i2v_condition.rs"]
mod i2v_condition;
#[path = "parity/leap_step.rs"]
mod leap_step;
#[path = "parity/logits.rs"]
mod logits;
#[path = "parity/merge_lora.rs"]
mod merge_lora;
#[path = "parity/optimizer.rs"]
mod optimizer;
#[path = "parity/qwen_vl.rs"]
mod qwen_vl;
#[path = "parity/reward_fl_step.rs"]
mod reward_fl_step;
#[path = "parity/scheduler.rs"]
mod scheduler;
#[path = "parity/shared_prefix.rs"]
mod shared_prefix;
#[path = "parity/slope.rs"]
mod slope;
#[path = "parity/srpo_step.rs"]
mod srpo_step;
#[path = "parity/umt5.rs"]
mod umt5;
#[path = "parity/vae21.rs"]
mod vae21;
#[path = "parity/vae22.rs"]
mod vae22;
#[path = "parity/vision_rewards.rs"]
mod vision_rewards;
#[path = "parity/zimage_dit.rs"]
mod zimage_dit;
#[path = "parity/zimage_step.rs"]
mod zimage_step;
#[path = "parity/zimage_text.rs"]
mod zimage_text;
#[path = "parity/zimage_vae.rs"]
mod zimage_vae;

use roll_backends::Backend;

use case::{Case, Outcome, Report, Setting};

type Run = fn(&Case) -> Outcome<Report>;

/// The devices of a case.
#[derive(Clone, Copy, PartialEq, Eq)]
enum On {
    /// Host code, or one small operator of it: once.
    Host,
    /// Every backend, in f32.
    Devices,
    /// Every backend, in f32 and bf16.
    DevicesAndDTypes,
}

impl On {
    fn includes(self, setting: &Setting) -> bool {
        match self {
            Self::Host => setting.backend == "flex" && !setting.is_narrow(),
            Self::Devices => !setting.is_narrow(),
            Self::DevicesAndDTypes => true,
        }
    }
}

/// Every kind, and the function that runs it.
const KINDS: &[(&str, On, Run)] = &[
    ("agentic_functions", On::Host, agentic_functions::run),
    ("agentic_loss", On::Host, agentic_loss::run),
    ("agentic_pg_variants", On::Host, agentic_loss::run),
    ("agentic_value_loss", On::Host, agentic_value_loss::run),
    ("averaged_policy", On::Host, averaged_policy::run),
    ("awm_loss", On::Host, awm_loss::run),
    ("diffusion_nft_loss", On::Host, diffusion_nft_loss::run),
    ("dit", On::DevicesAndDTypes, dit::run),
    ("dpo_loss", On::Host, dpo_loss::run),
    ("face_tools", On::Devices, face_tools::run),
    ("flow_grpo_advantages", On::Host, flow_grpo_advantages::run),
    ("flow_grpo_loss", On::Host, flow_grpo_loss::run),
    ("flow_sde", On::Host, flow_sde::run),
    ("gemma2_tiny", On::DevicesAndDTypes, causal_lm::run),
    ("gemma3_tiny", On::DevicesAndDTypes, causal_lm::run),
    ("gguf_smollm2", On::Devices, gguf::run),
    ("hpsv3", On::DevicesAndDTypes, vision_rewards::hpsv3),
    ("i2v_condition", On::Devices, i2v_condition::run),
    ("leap_step", On::Devices, leap_step::run),
    ("llama_tiny", On::DevicesAndDTypes, causal_lm::run),
    ("merge_lora", On::Host, merge_lora::run),
    ("mistral_tiny", On::DevicesAndDTypes, causal_lm::run),
    ("optimizer", On::Host, optimizer::run),
    ("phi3_tiny", On::DevicesAndDTypes, causal_lm::run),
    ("qwen25vl", On::DevicesAndDTypes, qwen_vl::run),
    ("qwen2_tiny", On::DevicesAndDTypes, causal_lm::run),
    ("qwen2vl", On::DevicesAndDTypes, qwen_vl::run),
    ("qwen3_tiny", On::DevicesAndDTypes, causal_lm::run),
    ("reward_fl_step", On::DevicesAndDTypes, reward_fl_step::run),
    ("scheduler", On::Host, scheduler::run),
    ("shared_prefix", On::Host, shared_prefix::run),
    ("srpo_step", On::Devices, srpo_step::run),
    ("umt5", On::Devices, umt5::run),
    ("vae21", On::DevicesAndDTypes, vae21::run),
    ("vae22", On::DevicesAndDTypes, vae22::run),
    ("videoalign", On::DevicesAndDTypes, vision_rewards::video_align),
    ("zimage_dit", On::DevicesAndDTypes, zimage_dit::run),
    ("zimage_step", On::DevicesAndDTypes, zimage_step::run),
    ("zimage_text", On::DevicesAndDTypes, zimage_text::run),
    ("zimage_vae", On::DevicesAndDTypes, zimage_vae::run),
];

enum Verdict {
    Passed(String),
    Failed(String),
    /// Not run, and why.
    Skipped(String),
}

fn main() -> ExitCode {
    let root = std::env::var_os("ROLL_FIXTURES")
        .map(PathBuf::from)
        .unwrap_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures"));
    let filters: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let mut dirs: Vec<PathBuf> = match std::fs::read_dir(&root) {
        Ok(entries) => entries.flatten().map(|e| e.path()).filter(|p| p.is_dir()).collect(),
        Err(e) => {
            println!("cannot read the fixtures at {}: {e}", root.display());
            return ExitCode::FAILURE;
        }
    };
    dirs.sort();
    let (settings, unusable) = match Setting::all() {
        Ok(all) => all,
        Err(e) => {
            println!("no device: {e}");
            return ExitCode::FAILURE;
        }
    };
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for (dir, setting) in dirs.iter().flat_map(|dir| settings.iter().map(move |setting| (dir, setting))) {
        let case = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let kind = find(&case);
        // An unknown kind is reported once.
        if !kind.map_or(On::Host, |(on, _)| on).includes(setting) {
            continue;
        }
        let name = format!("{case} {setting}");
        if !filters.is_empty() && !filters.iter().any(|f| name.contains(f.as_str())) {
            continue;
        }
        let verdict = catch_unwind(AssertUnwindSafe(|| judge(dir, setting)))
            .unwrap_or_else(|_| Verdict::Failed("it panicked; the message stands above".into()));
        match verdict {
            Verdict::Passed(line) => {
                passed += 1;
                println!("{name:<34} ok       {line}");
            }
            Verdict::Failed(line) => {
                failed += 1;
                println!("{name:<34} FAILED   {line}");
            }
            Verdict::Skipped(reason) => {
                skipped += 1;
                println!("{name:<34} skipped  {reason}");
            }
        }
    }
    for (backend, reason) in unusable {
        let required = needs(backend).is_some_and(roll_testing::is_required);
        failed += usize::from(required);
        println!("{}: the backend `{backend}`: {reason}", if required { "FAILED" } else { "NOT TESTED" });
    }
    println!("\n{passed} passed, {failed} failed, {skipped} skipped");
    if failed == 0 && passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Needs of a backend.
fn needs(backend: Backend) -> Option<&'static str> {
    match backend.name() {
        "wgpu" => Some("vulkan"),
        "cuda" | "libtorch-cuda" => Some("gpu"),
        _ => None,
    }
}

fn judge(dir: &std::path::Path, setting: &Setting) -> Verdict {
    let case = match Case::on(dir, setting.clone()) {
        Ok(case) => case,
        Err(e) => return Verdict::Failed(e.to_string()),
    };
    match find(case.kind()) {
        None => Verdict::Failed(format!("nobody knows the kind `{}`", case.kind())),
        Some(_) if case.kind() == gguf::KIND && gguf::file().is_none() => match roll_testing::is_required("gguf") {
            true => Verdict::Failed(format!("{}, and ROLL_REQUIRE names `gguf`", gguf::MISSING)),
            false => Verdict::Skipped(gguf::MISSING.into()),
        },
        Some((_, run)) => match run(&case) {
            Err(e) => Verdict::Failed(e.to_string()),
            Ok(report) => match report.failures() {
                failures if failures.is_empty() => Verdict::Passed(report.to_string()),
                failures => {
                    let shown = failures.iter().take(12).map(|f| format!("\n    {f}")).collect::<String>();
                    Verdict::Failed(format!("{report}; {} wrong:{shown}", failures.len()))
                }
            },
        },
    }
}

/// A kind is known by its whole name or by its family: `dit_tiny_i2v` is a `dit`.
fn find(kind: &str) -> Option<(On, Run)> {
    KINDS
        .iter()
        .filter(|(known, ..)| kind == *known || kind.starts_with(&format!("{known}_")))
        .max_by_key(|(known, ..)| known.len())
        .map(|(_, on, run)| (*on, *run))
}
