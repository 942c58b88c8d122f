//! `roll run --algo agentic_ppo` and `--algo sft` from the command line: their files, and their errors.

use std::path::Path;
use std::process::Output;

use serde_json::Value;

use crate::program::{command, done, roll, stderr_text};

/// The built-in agent, for two short steps, with `settings` on top.
fn agent(directory: &Path, settings: &[&str]) -> Output {
    let mut arguments = vec!["run", "--algo", "agentic_ppo", "--model", "causal_lm", "--out", "run", "--steps", "2"];
    let short = ["algo.num_env_groups=2", "algo.group_size=4", "algo.val_batch_size=6", "algo.max_actions_per_traj=3"];
    for setting in short.iter().chain(settings) {
        arguments.extend(["--set", setting]);
    }
    roll(directory, &arguments)
}

fn lines(file: &Path) -> Vec<Value> {
    std::fs::read_to_string(file).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn an_agent_run_writes_curves_trajectories_and_figures() {
    let dir = tempfile::tempdir().unwrap();
    let output = agent(dir.path(), &[]);
    assert!(output.status.success(), "{}", stderr_text(&output));
    let run = dir.path().join("run");
    let summary: Value = serde_json::from_slice(&std::fs::read(run.join("summary.json")).unwrap()).unwrap();
    for key in ["success_before", "success_after", "score_before", "seconds"] {
        assert!(summary[key].as_f64().is_some_and(f64::is_finite), "{key}: {}", summary[key]);
    }
    let peaks = summary["peak_memory"].as_array().unwrap();
    assert_eq!(peaks.len(), 1, "one of each process: the ranks are threads");
    assert!(peaks[0].as_u64().is_none_or(|bytes| bytes > 1 << 20), "{peaks:?}");
    for file in ["curves.svg", "report.html", "config.yaml", "checkpoints/step-000002/adapter_model.safetensors"] {
        assert!(run.join(file).exists(), "{file}");
    }
    let metrics = lines(&run.join("metrics.jsonl"));
    for name in ["actor/pg_loss", "actor/ratio_mean", "critic/advantages/mean", "env/success", "time/step_rollout"] {
        assert!(metrics[1][name].is_number(), "{name}: {}", metrics[1]);
    }
    let episodes = lines(&run.join("trajectories.jsonl"));
    // The first of a validation or step shows what the model reads.
    let log = stderr_text(&output);
    let (_, prompt) = log.split_once("the agent's first prompt, ").unwrap_or_else(|| panic!("{log}"));
    assert!(prompt.contains("<|end|><|assistant|>"), "{log}");
    for (i, episode) in episodes.iter().enumerate() {
        assert_eq!(episode["text"].is_array(), [0, 6, 14, 22].contains(&i), "{i}");
    }
    let text = &episodes[0]["text"];
    assert!(text[0]["read"].as_str().unwrap().contains("<|end|>"), "{text}");
    assert_eq!(text[1]["wrote"], episodes[0]["turns"][0]["response"]);
    // Validations of six before and after, and eight in each of two steps.
    assert_eq!(episodes.len(), 6 + 8 + 8 + 6);
    let kinds: Vec<&str> = episodes.iter().map(|e| e["kind"].as_str().unwrap()).collect();
    assert_eq!((kinds[0], kinds[6], kinds[27]), ("validation", "training", "validation"));
    for episode in &episodes {
        let turns = episode["turns"].as_array().unwrap();
        assert!((1..=3).contains(&turns.len()));
        assert!(turns[0]["observation"].as_str().unwrap().contains('P')); // the player
    }
}

/// An environment as a shell script, so that the test needs no Python. It counts up and ends after two turns.
const COUNTER: &str = r#"n=0
while read -r request; do
  printf '%s\n' "$request" >> requests.txt
  case "$request" in
    *reset*) n=0; echo '{"observation": "start", "instructions": "Count."}' ;;
    *) n=$((n + 1)); if [ $n -ge 2 ]; then end=true; else end=false; fi
       echo "{\"observation\": \"$n\", \"reward\": $((n % 2)), \"terminated\": $end}" ;;
  esac
done
"#;

#[test]
fn an_environment_may_be_a_separate_process() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("counter.sh"), COUNTER).unwrap();
    // All episodes have one score, from which nothing can be learnt.
    let process = [
        "env.name=process",
        "env.command=[sh, counter.sh]",
        "algo.max_tokens_per_step=40",
        "training.max_skipped_steps=0",
    ];
    let output = agent(dir.path(), &process);
    assert!(output.status.success(), "{}", stderr_text(&output));
    let episodes = lines(&dir.path().join("run/trajectories.jsonl"));
    assert!(episodes.iter().all(|e| e["score"] == 1.0 && e["ending"] == "terminated"), "{}", episodes[0]);
    // Actions do not contain the end token, with which some answers end; each reset names its split, training or
    // validation.
    let mut answers = episodes.iter().flat_map(|episode| episode["turns"].as_array().unwrap());
    assert!(answers.any(|turn| turn["response"].as_str().unwrap().ends_with("<|end|>")), "{}", episodes[0]);
    let requests = lines(&dir.path().join("requests.txt"));
    let texts: Vec<&str> = requests.iter().filter_map(|request| request["step"]["action"].as_str()).collect();
    assert!(!texts.is_empty() && texts.iter().all(|text| !text.contains("<|end|>")), "{texts:?}");
    let resets: Vec<&Value> = requests.iter().map(|request| &request["reset"]).filter(|r| r.is_object()).collect();
    assert!(resets.iter().all(|reset| reset["seed"].as_u64().unwrap() < 1 << 31));
    let count = |split: &str| resets.iter().filter(|reset| reset["split"] == split).count();
    // Each of the four ranks (`ranks` of `demo_agent.yaml`) also begins an episode before the first step, to check the
    // agent's first prompt.
    assert_eq!((count("validation"), count("train")), (12, 4 + 16));
}

#[test]
fn questions_of_a_file_are_asked_and_a_wrong_row_is_refused_before_the_first_step() {
    let dir = tempfile::tempdir().unwrap();
    let rows: String =
        (0..40).map(|i| format!("{{\"question\": \"What is {i}?\", \"answer\": \"#### {i}\"}}\n")).collect();
    std::fs::write(dir.path().join("rows.jsonl"), &rows).unwrap();
    let questions = [
        "env.name=questions",
        "env.path=rows.jsonl",
        "env.validation_share=0.3",
        "algo.max_tokens_per_step=8",
        "algo.val_group_size=2",
        "algo.val_temperature=1.0",
        "training.max_skipped_steps=0",
    ];
    let output = agent(dir.path(), &questions);
    assert!(output.status.success(), "{}", stderr_text(&output));
    let asked = |kind: &str| -> Vec<(u64, String)> {
        let episodes = lines(&dir.path().join("run/trajectories.jsonl"));
        let of_kind = episodes.iter().filter(|episode| episode["kind"] == kind);
        of_kind.map(|e| (e["group"].as_u64().unwrap(), e["turns"][0]["observation"].as_str().unwrap().into())).collect()
    };
    let (trained, validated) = (asked("training"), asked("validation"));
    // Two steps of two groups of four, and validations of six starts before and after, twice each.
    assert_eq!((trained.len(), validated.len()), (16, 24));
    assert!(trained.iter().all(|(_, question)| validated.iter().all(|(_, other)| other != question)));
    let mut in_order: Vec<&String> = trained.iter().step_by(4).map(|(_, question)| question).collect();
    let file_order: Vec<usize> = in_order.iter().map(|question| rows.find(question.as_str()).unwrap()).collect();
    assert!(file_order.is_sorted(), "{in_order:?}");
    in_order.dedup();
    assert_eq!(in_order.len(), 4);
    let metrics = lines(&dir.path().join("run/metrics.jsonl"));
    assert!(metrics.iter().any(|row| row["val/env/pass@2"].is_number()), "{metrics:?}");
    let report = std::fs::read_to_string(dir.path().join("run/report.html")).unwrap();
    assert!(report.contains("Held-out starts before and after") && report.contains("<mark>"));

    std::fs::write(dir.path().join("rows.jsonl"), rows + "{\"question\": \"What?\", \"answer\": \"many\"}\n").unwrap();
    std::fs::remove_dir_all(dir.path().join("run")).unwrap();
    let refused = agent(dir.path(), &questions);
    let said = stderr_text(&refused);
    assert_eq!(refused.status.code(), Some(2), "{said}");
    assert!(said.contains("rows.jsonl: line 41: the answer: expected one number, found 0 in `many`"), "{said}");
    assert!(!dir.path().join("run").exists());
}

#[cfg(target_os = "linux")]
#[test]
fn more_processes_than_open_files_are_refused_before_the_first_step() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("counter.sh"), COUNTER).unwrap();
    let limited = |limit: &str| {
        let own = command(dir.path(), &["run", "--algo", "agentic_ppo", "--model", "causal_lm", "--out", "run"]);
        let mut limited = std::process::Command::new("prlimit");
        limited.arg(format!("--nofile={limit}")).arg("--").arg(own.get_program()).args(own.get_args());
        limited.envs(own.get_envs().filter_map(|(name, value)| Some((name, value?)))).current_dir(dir.path());
        for setting in [
            "algo.num_env_groups=10",
            "algo.group_size=4",
            "algo.val_batch_size=4",
            "env.name=process",
            "env.command=[sh, counter.sh]",
            "algo.max_tokens_per_step=4",
            "training.max_skipped_steps=0",
        ] {
            limited.args(["--set", setting]);
        }
        limited.args(["--steps", "1"]).output().unwrap()
    };
    let refused = limited("100");
    let text = stderr_text(&refused);
    assert_eq!(refused.status.code(), Some(2), "{text}");
    assert!(text.contains("open files") && text.contains("ulimit"), "{text}");
    assert!(!dir.path().join("run").exists());
    // The soft limit is raised to the hard one.
    let played = limited("100:4096");
    assert!(played.status.success(), "{}", stderr_text(&played));
}

#[test]
fn errors_name_the_remedy_and_leave_no_files() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("dies.sh"), "echo no licence >&2; exit 7").unwrap();
    std::fs::write(dir.path().join("talk.jsonl"), "{\"messages\": []}\n").unwrap();
    std::fs::create_dir(dir.path().join("empty")).unwrap();
    for (settings, words) in [
        (&["env.name=process"][..], &["env.command"][..]),
        (&["env.name=process", "env.command=[sh, dies.sh]"], &["exit status: 7", "no licence"]),
        (&["env.name=frozen_lak"], &["frozen_lake"]),
        (&["env.size=1"], &["env.size"]),
        (&["algo.adv_estimator=gae", "algo.value_clip=0"], &["algo.value_clip"]),
        (&["algo.agent_template=no place"], &["observation"]),
        (&["algo.gama=1"], &["algo.gamma"]),
        (&["algo.sequence_length=4"], &["sequence_length"]),
        (&["model.model_path=empty"], &["config.json"]),
    ] {
        let output = agent(dir.path(), settings);
        let messages = stderr_text(&output);
        assert_eq!(output.status.code(), Some(2), "{settings:?}: {messages}");
        for word in words {
            assert!(messages.contains(word), "{settings:?} should say `{word}`: {messages}");
        }
        assert!(!dir.path().join("run").exists(), "{settings:?} left a run directory");
    }
    let sft = |data: &str| {
        let data = format!("algo.data={data}");
        stderr_text(&roll(dir.path(), &["run", "--algo", "sft", "--model", "causal_lm", "--set", &data]))
    };
    assert!(sft("none.jsonl").contains("none.jsonl"));
    assert!(sft("talk.jsonl").contains("line 1"));
    let video_run = roll(dir.path(), &["run", "--algo", "reward_fl", "--env", "frozen_lake"]);
    assert!(stderr_text(&video_run).contains("no environment"), "{}", stderr_text(&video_run));
}

#[test]
fn supervised_training_lowers_the_loss_and_its_weights_answer() {
    let dir = tempfile::tempdir().unwrap();
    let line = r#"{"messages": [{"role": "user", "content": "P_"}, {"role": "assistant", "content": "at goal"}]}"#;
    std::fs::write(dir.path().join("talk.jsonl"), format!("{line}\n{line}\n")).unwrap();
    let arguments = [
        "run",
        "--algo",
        "sft",
        "--model",
        "causal_lm",
        "--out",
        "run",
        "--steps",
        "12",
        "--set",
        "algo.data=talk.jsonl",
        "--set",
        "algo.batch_size=2",
        "--set",
        "model.lora_rank=0",
        "--set",
        "training.learning_rate=1e-2",
    ];
    let output = roll(dir.path(), &arguments);
    assert!(output.status.success(), "{}", stderr_text(&output));
    let losses = lines(&dir.path().join("run/metrics.jsonl"));
    let loss = |row: &Value| row["actor/loss"].as_f64().unwrap();
    assert!(loss(&losses[11]) < 0.2 * loss(&losses[0]), "{} to {}", losses[0], losses[11]);
    let weights = "run/checkpoints/step-000012/model.safetensors";
    let asked = done(dir.path(), &["ask", "P_", "--adapter", weights, "--set", "model.lora_rank=0"]);
    assert_eq!(asked.trim(), "at goal");
    // The checkpoint is the directory of a model.
    let checkpoint = "run/checkpoints/step-000012";
    assert_eq!(done(dir.path(), &["ask", "P_", "--model-path", checkpoint]).trim(), "at goal");
    // So is its export, in shards.
    let written = done(dir.path(), &["export", "run", "exported", "--dtype", "bf16", "--max-size", "100KB"]);
    assert!(written.contains("exported/model-00001-of-0") && written.contains("tokenizer.json"), "{written}");
    assert_eq!(done(dir.path(), &["ask", "P_", "--model-path", "exported"]).trim(), "at goal");
}

#[test]
fn preferences_change_the_answer_and_are_validated() {
    let dir = tempfile::tempdir().unwrap();
    let line = |prompt: &str, chosen: &str, rejected: &str| {
        format!(r#"{{"prompt": "{prompt}", "chosen": "{chosen}", "rejected": "{rejected}"}}"#) + "\n"
    };
    let pairs: String = ["P_", "P__", "_P"].map(|map| line(map, "at goal", "at hole")).concat();
    std::fs::write(dir.path().join("pairs.jsonl"), pairs + &line("P", "at", "at")).unwrap();
    std::fs::write(dir.path().join("held.jsonl"), line("_P_", "at goal", "at hole")).unwrap();
    let mut arguments = vec!["run", "--algo", "dpo", "--model", "causal_lm", "--out", "run", "--steps", "15"];
    for setting in [
        "algo.data=pairs.jsonl",
        "algo.val_data=held.jsonl",
        "algo.batch_size=3",
        "evaluation.every=5",
        "training.learning_rate=1e-2",
    ] {
        arguments.extend(["--set", setting]);
    }
    let output = roll(dir.path(), &arguments);
    let messages = stderr_text(&output);
    assert!(output.status.success(), "{messages}");
    assert!(messages.contains("1 of 4 pairs are left out") && messages.contains("line 4"), "{messages}");
    let rows = lines(&dir.path().join("run/metrics.jsonl"));
    let value = |row: &Value, name: &str| row[name].as_f64().unwrap();
    let steps: Vec<&Value> = rows.iter().filter(|row| row["actor/loss"].is_number()).collect();
    let (first, last) = (steps[0], steps[14]);
    // The policy of the first step is the reference.
    assert!((value(first, "actor/loss") - 2f64.ln()).abs() < 1e-4, "{first}");
    assert!(value(first, "rewards/margin").abs() < 1e-3 && value(last, "rewards/margin") > 0.1, "{first} {last}");
    assert!(value(last, "rewards/accuracy") == 1.0 && value(last, "actor/loss") < 0.6, "{last}");
    let validated: Vec<&Value> = rows.iter().filter(|row| row["val/rewards/accuracy"].is_number()).collect();
    assert!(validated.len() >= 3, "{rows:?}");
    let [begin, end] = [validated[0], validated[validated.len() - 1]].map(|row| value(row, "val/rewards/accuracy"));
    assert_eq!((begin, end), (0.5, 1.0), "{validated:?}");
    let page = std::fs::read_to_string(dir.path().join("run/report.html")).unwrap();
    assert!(page.contains("Pairs whose chosen answer has the larger reward"), "{page}");
}

#[test]
fn an_adapter_has_pefts_configuration_and_answers_alike_merged_or_not() {
    let dir = tempfile::tempdir().unwrap();
    let line = r#"{"messages": [{"role": "user", "content": "P_"}, {"role": "assistant", "content": "at goal"}]}"#;
    std::fs::write(dir.path().join("talk.jsonl"), format!("{line}\n{line}\n")).unwrap();
    let base = concat!(env!("CARGO_MANIFEST_DIR"), "/../roll-models/causal_lm/assets/demo_agent");
    let model = format!("model.model_path={base}");
    let mut arguments = vec!["run", "--algo", "sft", "--model", "causal_lm", "--out", "run", "--steps", "12"];
    let settings =
        [model.as_str(), "algo.data=talk.jsonl", "algo.batch_size=2", "model.lora_rank=4", "model.lora_alpha=8"];
    for setting in settings.into_iter().chain(["training.learning_rate=1e-2"]) {
        arguments.extend(["--set", setting]);
    }
    let output = roll(dir.path(), &arguments);
    assert!(output.status.success(), "{}", stderr_text(&output));
    let checkpoint = dir.path().join("run/checkpoints/step-000012");
    let config: Value =
        serde_json::from_slice(&std::fs::read(checkpoint.join("adapter_config.json")).unwrap()).unwrap();
    assert!(config["r"] == 4 && config["lora_alpha"] == 8 && config["peft_type"] == "LORA", "{config}");
    assert!(config["task_type"] == "CAUSAL_LM" && config["base_model_name_or_path"] == base, "{config}");
    let targets = config["target_modules"].as_array().unwrap();
    assert!(targets.contains(&"model.layers.0.self_attn.q_proj".into()), "{targets:?}");

    let ask =
        |model: &str, more: &[&str]| done(dir.path(), &[&["ask", "P_", "--model-path", model][..], more].concat());
    let answer = ask(base, &["--adapter", "run"]);
    assert_ne!(answer, ask(base, &[]));
    let file = "run/checkpoints/step-000012/adapter_model.safetensors";
    assert_eq!(ask(base, &["--adapter", file]), answer);
    done(dir.path(), &["merge-lora", base, file, "merged"]);
    assert_eq!(ask("merged", &[]), answer, "tokenizer and template come along");
    assert!(ask(base, &["--adapter", "run=0"]) == ask(base, &[]), "an adapter with scale 0 changes nothing");
}
