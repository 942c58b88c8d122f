//! `roll run` with rollouts by another engine: a stand-in that serves the built-in language model.

use std::path::Path;
use std::process::Output;

use roll_core::{BuildContext, Model, Registry};
use roll_testing::{EngineApi, EngineFault, StandIn};
use serde_json::Value;

use crate::program::{fails, roll, stderr_text};

/// The built-in model with a LoRA of the demo's rank.
fn built_in() -> Box<dyn Model> {
    let registry = Registry::linked().unwrap();
    let mut options = registry.find(roll_core::Kind::Model, "causal_lm").unwrap().options();
    options.insert("lora_rank".into(), 16.into());
    registry.model("causal_lm", &options, &BuildContext::new("flex")).unwrap()
}

fn stand_in(api: EngineApi) -> StandIn {
    StandIn::start(api, built_in())
}

/// The demo of an agent, shortened, with `server` if there is one.
fn run(directory: &Path, server: Option<(&str, &StandIn)>, more: &[&str]) -> Output {
    let mut settings = vec![
        "algo.num_env_groups=8".to_string(),
        "algo.val_batch_size=24".into(),
        "algo.mini_batch_size=64".into(),
        "evaluation.every=0".into(),
    ];
    if let Some((name, server)) = server {
        settings
            .push(format!("algo.rollout={{name: {name}, urls: [{}], adapters: adapters, retries: 0}}", server.url()));
    }
    let mut arguments = vec!["run", "--algo", "agentic_ppo", "--model", "causal_lm", "--out", "run"];
    settings.iter().for_each(|setting| arguments.extend(["--set", setting]));
    arguments.extend(more);
    roll(directory, &arguments)
}

fn metrics(directory: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(directory.join("run/metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn frozen_lake_is_learnt_through_an_engine_as_without_it() {
    // The mean score of the episodes of the last three of 12 steps.
    let learnt = |server: Option<(&str, &StandIn)>| {
        let dir = tempfile::tempdir().unwrap();
        let output = run(dir.path(), server, &["--steps", "12"]);
        assert!(output.status.success(), "{}", stderr_text(&output));
        // Without the rows of validations.
        let mut rows = metrics(dir.path());
        rows.retain(|row| row["actor/train_infer_abs_diff"].is_f64());
        assert_eq!(rows.len(), 12);
        let score = |rows: &[Value]| {
            rows.iter().map(|row| row["score/mean"].as_f64().unwrap()).sum::<f64>() / rows.len() as f64
        };
        let kernels = rows.iter().map(|row| row["actor/train_infer_abs_diff"].as_f64().unwrap()).fold(0.0, f64::max);
        assert!(kernels < 1e-5, "{kernels}");
        (score(&rows[..2]), score(&rows[9..]))
    };
    let (before, after) = learnt(None);
    let server = stand_in(EngineApi::Vllm);
    let (engine_before, engine_after) = learnt(Some(("vllm", &server)));
    println!("{before} {after} {engine_before} {engine_after}");
    assert!(
        after > before + 0.1 && engine_after > engine_before + 0.1,
        "{before} {after} {engine_before} {engine_after}"
    );
}

#[test]
fn a_resumed_run_loads_the_adapter_of_its_checkpoint_first() {
    let (dir, server) = (tempfile::tempdir().unwrap(), stand_in(EngineApi::Sglang));
    let output = run(dir.path(), Some(("sglang", &server)), &["--steps", "2", "--set", "algo.val_batch_size=0"]);
    assert!(output.status.success(), "{}", stderr_text(&output));
    assert!(stderr_text(&output).contains("0.0.stand-in"), "the engine's version is logged");
    // PEFT's two files, as engines read them.
    let directory = dir.path().join("adapters").join(&server.adapters()[0]);
    let config: Value = serde_json::from_slice(&std::fs::read(directory.join("adapter_config.json")).unwrap()).unwrap();
    assert!(config["r"] == 16 && config["peft_type"] == "LORA", "{config}");
    let done = server.requests().len();
    let output = roll(dir.path(), &["run", "--resume", "run", "--steps", "3"]);
    assert!(output.status.success(), "{}", stderr_text(&output));
    let requests = server.requests();
    let (path, body) = requests[done..].iter().find(|(path, _)| !path.contains("unload")).unwrap();
    let name = body["lora_name"].as_str().unwrap_or_default();
    assert!(path == "/load_lora_adapter" && name.starts_with("roll-v2-"), "{path} {body}");
    let used =
        requests[done..].iter().filter_map(|(_, body)| body["lora_path"].as_str()).filter(|used| !used.contains('/'));
    assert!(used.clone().count() > 0 && used.clone().all(|used| used == name));
}

#[test]
fn what_cannot_be_trained_through_an_engine_is_refused_before_the_first_step() {
    let (dir, server) = (tempfile::tempdir().unwrap(), stand_in(EngineApi::Vllm));
    let check = |more: &[&str]| {
        let rollout = format!("algo.rollout={{name: vllm, urls: [{}], adapters: adapters}}", server.url());
        let arguments = ["check", "--algo", "agentic_ppo", "--model", "causal_lm", "--set", &rollout];
        roll(dir.path(), &[&arguments[..], more].concat())
    };
    let output = check(&[]);
    assert!(output.status.success(), "{}", stderr_text(&output));
    fails(&check(&["--set", "model.lora_rank=0"]), 2, &["model.lora_rank", "expected a LoRA"]);
    server.fail(EngineFault::LoadsNothing);
    fails(&check(&[]), 2, &["VLLM_ALLOW_RUNTIME_LORA_UPDATING=1", &server.url()]);
}
