//! `roll run` with rollouts by another engine, a stand-in that serves the built-in language model; and with agents as
//! they are.

use std::path::Path;
use std::process::Output;

use roll_core::{BuildContext, Model, Registry};
use roll_testing::{EngineApi, EngineFault, StandIn};
use serde_json::Value;

use crate::program::{printed, roll, stderr_text};

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
    let mut settings =
        vec!["algo.num_env_groups=8".to_string(), "algo.val_batch_size=24".into(), "evaluation.every=0".into()];
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
    // Success on starts that were not trained on, before and after eight steps.
    let learnt = |server: Option<(&str, &StandIn)>| {
        let dir = tempfile::tempdir().unwrap();
        let faster = ["algo.mini_batch_size=16", "algo.val_batch_size=64", "training.warmup_steps=0"];
        let settings = faster.iter().flat_map(|setting| ["--set", *setting]);
        let output = run(dir.path(), server, &["--steps", "8"].into_iter().chain(settings).collect::<Vec<_>>());
        assert!(output.status.success(), "{}", stderr_text(&output));
        let rows = metrics(dir.path());
        let values = |name: &str| rows.iter().filter_map(|row| row[name].as_f64()).collect::<Vec<f64>>();
        values("val/env/success")
    };
    let alone = learnt(None);
    let server = stand_in(EngineApi::Vllm);
    let engine = learnt(Some(("vllm", &server)));
    println!("success without an engine: {alone:?}, with one: {engine:?}");
    for success in [alone, engine] {
        assert!(success.len() == 2 && success[0] < 0.05 && success[1] > success[0] + 0.1, "{success:?}");
    }
}

#[test]
fn a_resumed_run_loads_the_adapter_of_its_checkpoint_first() {
    let (dir, server) = (tempfile::tempdir().unwrap(), stand_in(EngineApi::Sglang));
    let output = run(dir.path(), Some(("sglang", &server)), &["--steps", "2", "--set", "algo.val_batch_size=0"]);
    assert!(output.status.success(), "{}", stderr_text(&output));
    assert!(stderr_text(&output).contains("0.0.stand-in"), "the engine's version is logged");
    // One update in a step: generation and training differ by their kernels alone.
    let kernels: Vec<f64> =
        metrics(dir.path()).iter().filter_map(|row| row["actor/train_infer_abs_diff"].as_f64()).collect();
    assert!(kernels.len() == 2 && kernels.iter().all(|difference| *difference < 1e-5), "{kernels:?}");
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
    let fails = |more: &[&str], words: &[&str]| {
        let output = check(more);
        let text = printed(&output);
        assert_eq!(output.status.code(), Some(1), "{text}{}", stderr_text(&output));
        words.iter().for_each(|word| assert!(text.contains(word), "no {word} in: {text}"));
    };
    let output = check(&[]);
    assert!(output.status.success(), "{}{}", printed(&output), stderr_text(&output));
    fails(&["--set", "model.lora_rank=0"], &["model.lora_rank", "expected a LoRA"]);
    server.fail(EngineFault::LoadsNothing);
    fails(&[], &["VLLM_ALLOW_RUNTIME_LORA_UPDATING=1", &server.url()]);
}

#[test]
fn frozen_lake_is_learnt_by_a_program_of_its_own() {
    // The program itself instead of a launcher, because it is started 640 times.
    let python = std::process::Command::new("python3")
        .args(["-c", "import sys; assert sys.version_info >= (3, 9); print(sys.executable)"])
        .output();
    let Some(python) = python.ok().filter(|output| output.status.success()) else {
        roll_testing::skip!("no python3", needs = "python");
    };
    let python = String::from_utf8(python.stdout).unwrap();
    let (dir, program) = (tempfile::tempdir().unwrap(), crate::program::root().join("tests/lake_agent.py"));
    let command = format!("env.command=[{}, -I, {}]", python.trim(), program.display());
    let settings = [&command, "algo.mini_batch_size=16", "algo.val_batch_size=64", "training.warmup_steps=0"];
    let more: Vec<&str> = settings.iter().flat_map(|setting| ["--set", *setting]).collect();
    let output = run(dir.path(), None, &[&["--env", "agent", "--steps", "8"], &more[..]].concat());
    assert!(output.status.success(), "{}", stderr_text(&output));
    let success: Vec<f64> = metrics(dir.path()).iter().filter_map(|row| row["val/env/success"].as_f64()).collect();
    println!("success before and after eight steps: {success:?}");
    assert!(success.len() == 2 && success[0] < 0.05 && success[1] >= 0.15, "{success:?}");
}

#[test]
fn an_agent_with_an_openai_client_is_trained_through_the_endpoint() {
    let has_client = std::process::Command::new("python3").args(["-c", "import openai"]).output();
    if !has_client.is_ok_and(|output| output.status.success()) {
        roll_testing::skip!("no python3 with the package `openai`", needs = "openai");
    }
    let (dir, server) = (tempfile::tempdir().unwrap(), stand_in(EngineApi::Vllm));
    let program = crate::program::root().join("examples/environment/agent.py");
    let command = format!("env.command=[python3, {}]", program.display());
    let more = ["--env", "agent", "--set", &command, "--steps", "2", "--set", "algo.num_env_groups=2"];
    let output = run(dir.path(), Some(("vllm", &server)), &[&more[..], &["--set", "algo.val_batch_size=4"]].concat());
    assert!(output.status.success(), "{}", stderr_text(&output));
    // Without the rows of validations.
    let mut rows = metrics(dir.path());
    rows.retain(|row| row["env/episodes"].is_f64());
    assert_eq!(rows.len(), 2);
    assert!(rows.iter().all(|row| row["env/episodes"] == 16.0 && row["env/failed"] == 0.0), "{}", rows[0]);
    assert!(rows.iter().all(|row| row["actor/train_infer_abs_diff"].as_f64().unwrap() < 1e-5), "{}", rows[0]);
    let text = std::fs::read_to_string(dir.path().join("run/trajectories.jsonl")).unwrap();
    let turns: Vec<Value> =
        text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["turns"].clone()).collect();
    // Several turns of an episode are one text, whose first turn has the program's map.
    assert!(turns.iter().any(|turns| turns.as_array().unwrap().len() > 1));
    assert!(turns.iter().all(|turns| turns[0]["observation"].as_str().unwrap().contains('P')));
}
