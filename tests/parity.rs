//! Parity with the reference: every case directory under `$ROLL_FIXTURES` (default `tests/fixtures`).
//!
//! A case's kind is its directory name up to a `__suffix`; sizes, seeds and settings come from its `config.json`.
//! Prints one line per case. A kind nobody knows fails. Arguments filter cases by name.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::ExitCode;

#[path = "parity/agentic_functions.rs"]
mod agentic_functions;
#[path = "parity/agentic_loss.rs"]
mod agentic_loss;
#[path = "parity/case.rs"]
mod case;
#[path = "parity/causal_lm.rs"]
mod causal_lm;
#[path = "parity/dit.rs"]
mod dit;
#[path = "parity/face_tools.rs"]
mod face_tools;
#[path = "parity/gguf.rs"]
mod gguf;
#[path = "parity/i2v_condition.rs"]
mod i2v_condition;
#[path = "parity/logits.rs"]
mod logits;
#[path = "parity/merge_lora.rs"]
mod merge_lora;
#[path = "parity/optimizer.rs"]
mod optimizer;
#[path = "parity/reward_fl_step.rs"]
mod reward_fl_step;
#[path = "parity/scheduler.rs"]
mod scheduler;
#[path = "parity/umt5.rs"]
mod umt5;
#[path = "parity/vae21.rs"]
mod vae21;
#[path = "parity/vae22.rs"]
mod vae22;

use case::{Case, Outcome, Report};

type Run = fn(&Case) -> Outcome<Report>;

/// Every kind, and what runs it; `None` belongs to a part that is not built yet.
const KINDS: &[(&str, Option<Run>)] = &[
    ("agentic_functions", Some(agentic_functions::run)),
    ("agentic_loss", Some(agentic_loss::run)),
    ("agentic_pg_variants", Some(agentic_loss::run)),
    ("dit", Some(dit::run)),
    ("face_tools", Some(face_tools::run)),
    ("gguf_smollm2", Some(gguf::run)),
    ("i2v_condition", Some(i2v_condition::run)),
    ("llama_tiny", Some(causal_lm::run)),
    ("merge_lora", Some(merge_lora::run)),
    ("optimizer", Some(optimizer::run)),
    ("qwen2_tiny", Some(causal_lm::run)),
    ("qwen3_tiny", Some(causal_lm::run)),
    ("reward_fl_step", Some(reward_fl_step::run)),
    ("scheduler", Some(scheduler::run)),
    ("umt5", Some(umt5::run)),
    ("vae21", Some(vae21::run)),
    ("vae22", Some(vae22::run)),
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
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for dir in dirs {
        let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !filters.is_empty() && !filters.iter().any(|f| name.contains(f.as_str())) {
            continue;
        }
        let verdict = catch_unwind(AssertUnwindSafe(|| judge(&dir)))
            .unwrap_or_else(|_| Verdict::Failed("it panicked; the message stands above".into()));
        match verdict {
            Verdict::Passed(line) => {
                passed += 1;
                println!("{name:<24} ok       {line}");
            }
            Verdict::Failed(line) => {
                failed += 1;
                println!("{name:<24} FAILED   {line}");
            }
            Verdict::Skipped(reason) => {
                skipped += 1;
                println!("{name:<24} skipped  {reason}");
            }
        }
    }
    println!("\n{passed} passed, {failed} failed, {skipped} skipped");
    if failed == 0 && passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn judge(dir: &std::path::Path) -> Verdict {
    let case = match Case::open(dir) {
        Ok(case) => case,
        Err(e) => return Verdict::Failed(e.to_string()),
    };
    match find(case.kind()) {
        None => Verdict::Failed(format!("nobody knows the kind `{}`", case.kind())),
        Some(None) => Verdict::Skipped("its part of roll is not built yet".into()),
        Some(Some(_)) if case.kind() == gguf::KIND && gguf::file().is_none() => Verdict::Skipped(gguf::MISSING.into()),
        Some(Some(run)) => match run(&case) {
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
fn find(kind: &str) -> Option<Option<Run>> {
    KINDS
        .iter()
        .filter(|(known, _)| kind == *known || kind.starts_with(&format!("{known}_")))
        .max_by_key(|(known, _)| known.len())
        .map(|(_, run)| *run)
}
