//! Configurations of alibaba/ROLL, for Reward-FL and for its agentic pipeline, with its own keys and files, run
//! unchanged.

use std::collections::BTreeSet;
use std::path::Path;

use roll_core::{Tensor, Video};

use crate::program::{done, printed, roll, stderr_text};
use crate::roll_yaml::{self, FILE};

#[test]
fn a_reward_fl_configuration_of_roll_runs_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    let here = dir.path();
    roll_yaml::write_for_devices(here, 2);
    std::fs::create_dir_all(here.join("data")).unwrap();
    std::fs::write(here.join("data/metadata.csv"), "video,prompt\nclip.mp4,a grey square\n").unwrap();
    let video = Video::new(Tensor::full([9, 3, 64, 64], 0.1), 8.0).unwrap();
    roll_media::write_mp4(here.join("data/clip.mp4"), &video).unwrap();
    done(here, &["init-tiny", "tiny"]);

    let config = ["--config", FILE];
    let listed = roll(here, &[&["config"], &config[..]].concat());
    let text = printed(&listed);
    let messages = stderr_text(&listed);
    assert!(listed.status.success(), "{messages}");
    for (key, value, origin) in [
        ("strategy.stage", "2", "deepspeed_zero2_cpuoffload.yaml"),
        ("reward.0.reward_model_path", "\"./antelopev2/\"", "reward_fl_config.yaml"),
        ("reward.0.channel_order", "\"bgr\"", "as in ROLL"),
        ("training.gradient_accumulation_steps", "2", "2 devices"),
        ("model.lora_rank", "4", "reward_fl_config.yaml"),
    ] {
        let line = text
            .lines()
            .find(|l| l.strip_prefix(key).is_some_and(|l| l.starts_with(':')))
            .unwrap_or_else(|| panic!("{text}"));
        assert!(line.contains(value) && line.contains(origin), "{line}");
    }
    // The listing is itself a configuration.
    std::fs::write(here.join("listed.yaml"), &text).unwrap();
    done(here, &["config", "--config", "listed.yaml"]);
    // One note lists the file's keys without effect, these two among them.
    assert_eq!(messages.matches("without effect here").count(), 1, "{messages}");
    assert!(messages.contains("system_envs") && messages.contains("min_timestep_boundary"), "{messages}");

    // ROLL's face networks (`antelopev2`) are not in the repository: `brightness` replaces the face reward. The next test
    // uses the demo's small face networks.
    let smaller = ["--steps", "1", "--set", "reward={name: brightness}", "--set", "data.num_frames=5"];
    let output = roll(here, &[&["run"], &config[..], &smaller[..]].concat());
    let messages = stderr_text(&output);
    assert!(output.status.success(), "{messages}");
    assert_eq!(messages.matches("without effect here").count(), 1, "listed once: {messages}");
    let run = here.join("output/as_in_roll");
    assert!(run.join("checkpoints/step-000001/adapter.safetensors").exists());
    let row = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    assert_eq!(row.lines().count(), 1, "{row}");
}

#[cfg(unix)]
#[test]
fn samples_of_one_clip_differ_in_a_configuration_of_roll() {
    let dir = tempfile::tempdir().unwrap();
    let here = dir.path();
    // 8 devices take 8 samples per step, and `demo_world` has one clip: all 8 are of it.
    roll_yaml::write_for_devices(here, 8);
    roll_yaml::demo_world(here);
    let output = roll(here, &[&["run", "--config", FILE][..], &roll_yaml::DEMO_SETTINGS].concat());
    let messages = stderr_text(&output);
    assert!(output.status.success(), "{messages}");

    let run = here.join("output/as_in_roll");
    let metrics = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let rows: Vec<serde_json::Value> = metrics.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(rows.len(), 2);
    for row in &rows {
        let number = |name: &str| row[name].as_f64().unwrap_or_else(|| panic!("no {name} in {row}"));
        assert_eq!((number("actor/samples"), number("actor/skipped")), (8.0, 0.0), "{row}");
        assert!(number("actor/face_score").abs() <= 1.0 && number("actor/grad_norm") > 0.0, "{row}");
    }
    let videos = roll_yaml::samples(&run, 1);
    let different: BTreeSet<&Vec<u8>> = videos.iter().map(|(_, bytes)| bytes).collect();
    assert_eq!((videos.len(), different.len()), (8, 8), "{:?}", videos.iter().map(|(f, _)| f).collect::<Vec<_>>());
}

/// Environments, with the keys of ROLL's file for them.
const ENVIRONMENTS: &str = "\
max_tokens_per_step: 128
max_actions_per_traj: 3
action_pattern: <answer>(.*?)</answer>
manager: roll.pipeline.agentic.env_manager.traj_env_manager.TrajEnvManager
agent_system_template: You play a game.
agent_template: \"{observation}\"
custom_env:
  Room:
    env_type: sokoban
    max_steps: ${max_actions_per_traj}
    max_tokens_per_step: ${max_tokens_per_step}
    env_manager_cls: ${manager}
    agent_system_template: ${agent_system_template}
    agent_template: ${agent_template}
    env_config: {action_pattern: \"${action_pattern}\", max_steps: 3, dim_room: [6, 6], num_boxes: 1, format_penalty: -0.1}
  Lake:
    env_type: frozen_lake
    max_steps: ${max_actions_per_traj}
    max_tokens_per_step: ${max_tokens_per_step}
    env_manager_cls: ${manager}
    agent_system_template: ${agent_system_template}
    agent_template: ${agent_template}
    env_config: {action_pattern: \"${action_pattern}\", is_slippery: false}
";

/// The configuration of an agent, with ROLL's keys: PPO with a critic. `ADVANTAGE` is where the lines of GiGPO
/// go; PPO has none.
const AGENT: &str = "\
defaults:
  - ../config/own_envs@_here_
hydra: {run: {dir: .}, output_subdir: null}
exp_name: agent
seed: 42
logging_dir: ./output/logs
output_dir: ./output
track_with: tensorboard
checkpoint_config: {type: file_system, output_dir: /data/models/agent}
num_gpus_per_node: 8
max_steps: 2
save_steps: 100
logging_steps: 1
eval_steps: 1
rollout_batch_size: 16
val_batch_size: 8
sequence_length: 600
value_clip: 0.5
ADVANTAGE
whiten_advantages: true
init_kl_coef: 0.0
pretrain: tiny
reward_pretrain: tiny
actor_train:
  model_args: {attn_implementation: fa2, disable_gradient_checkpointing: false, dtype: fp32, model_type: null}
  training_args: {learning_rate: 1.0e-4, weight_decay: 0, per_device_train_batch_size: 2, gradient_accumulation_steps: 2, warmup_steps: 2, lr_scheduler_type: cosine}
  data_args: {template: qwen2_5}
  strategy_args:
    strategy_name: megatron_train
    strategy_config: {tensor_model_parallel_size: 1, pipeline_model_parallel_size: 1, use_distributed_optimizer: true}
  device_mapping: list(range(0,2))
  infer_batch_size: 2
actor_infer:
  model_args: {disable_gradient_checkpointing: true, dtype: bf16}
  strategy_args: {strategy_name: vllm, strategy_config: {gpu_memory_utilization: 0.8}}
  device_mapping: list(range(0,2))
reference:
  model_args: {dtype: bf16}
  strategy_args: {strategy_name: hf_infer, strategy_config: null}
  infer_batch_size: 2
reward_normalization: {grouping: traj_group_id, method: mean_std}
train_env_manager:
  max_env_num_per_worker: 16
  num_env_groups: 4
  group_size: 4
  tags: [Room, Lake]
  num_groups_partition: [1, 3]
  generating_args: {max_new_tokens: 24, top_p: 0.99, top_k: 100, temperature: 0.99, num_return_sequences: 1}
val_env_manager:
  max_env_num_per_worker: 32
  num_env_groups: 8
  group_size: 1
  tags: [Lake]
  num_groups_partition: [8]
  generating_args: {max_new_tokens: 24, top_p: 0.99, top_k: 100, temperature: 0.2, num_return_sequences: 1}
custom_envs:
  Room: ${custom_env.Room}
  Lake: ${custom_env.Lake}
";

/// Numbers of keys with and without effect, of the two configurations of
/// `agentic_configurations_of_roll_run_unchanged`. They change when a key gains an effect.
const PPO_COUNTS: (usize, usize) = (57, 32);
const GIGPO_COUNTS: (usize, usize) = (64, 31);

/// The environments for GiGPO: with a prompt for each turn, which repeats the last turns.
fn environments_of_gigpo(environments: &str) -> String {
    let template = "agent_template: \"{env_instruction} {step_count} {history_length}: [{history}] Now {current_step}: \
                    {current_observation} Write {max_response_length}.\"";
    environments
        .replace("traj_env_manager.TrajEnvManager", "step_env_manager.StepEnvManager")
        .replace("agent_template: \"{observation}\"", template)
        .replace("    env_manager_cls:", "    history_length: 3\n    env_manager_cls:")
}

/// Keys with and without effect, from the line that reports them; `None` unless there is one such line.
fn counts(text: &str) -> Option<(usize, usize)> {
    let mut found = text.lines().filter_map(|line| {
        let (with, rest) = line.split_once(" keys have an effect here, ")?;
        let (without, _) = rest.split_once(" have none")?;
        Some((with.rsplit(' ').next()?.parse().ok()?, without.parse().ok()?))
    });
    found.next().filter(|_| found.next().is_none())
}

/// ROLL's own agentic examples, of the checkout that `ROLL_REFERENCE` names. The page of the book has a row for each,
/// with the numbers of its keys with and without effect.
#[test]
fn agentic_examples_of_roll_run_and_match_the_documentation() {
    let Some(reference) = std::env::var_os("ROLL_REFERENCE") else {
        roll_testing::skip!("set ROLL_REFERENCE to a checkout of alibaba/ROLL");
    };
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/src/from-roll.md");
    let page = std::fs::read_to_string(page).unwrap();
    let rows: Vec<(String, usize, usize)> = page.lines().filter_map(parse_row).collect();
    assert!(rows.len() > 10, "{rows:?}");
    let dir = tempfile::tempdir().unwrap();
    let here = dir.path();
    done(here, &["init-tiny", "tiny", "--kind", "lm"]);
    for (file, with, without) in rows {
        let config = Path::new(&reference).join("examples").join(&file);
        let config = config.to_str().unwrap();
        let smaller = [
            "model.model_path=tiny",
            "algo.num_env_groups=1",
            "algo.group_size=2",
            "algo.val_batch_size=2",
            "algo.max_actions_per_traj=2",
            "algo.max_tokens_per_step=12",
            // The tokenizer knows few words, so that texts have many tokens.
            "algo.sequence_length=2000",
            // A run this short may train nothing: all episodes of each group fail alike. 0: it goes on.
            "training.max_skipped_steps=0",
        ];
        let settings = smaller.iter().flat_map(|setting| ["--set", setting]);
        let run = ["run", "--config", config, "--steps", "2", "--out", "run"];
        let output = roll(here, &run.into_iter().chain(settings).collect::<Vec<_>>());
        let messages = stderr_text(&output);
        assert!(output.status.success(), "{file}: {messages}");
        assert_eq!(counts(&messages), Some((with, without)), "{file}: {messages}");
        // Every key without effect is listed with a reason of its own: "there is nothing like it" is printed for keys
        // that the importer does not know.
        assert!(!messages.contains("there is nothing like it"), "{file}: {messages}");
        let metrics = std::fs::read_to_string(here.join("run/metrics.jsonl")).unwrap();
        // A row of step 0 has the validation before training.
        let steps: Vec<u64> = metrics.lines().map(step_of).collect();
        assert_eq!(steps, [0, 1, 2], "{file}");
        std::fs::remove_dir_all(here.join("run")).unwrap();
    }
}

/// The step of a row of metrics.
fn step_of(line: &str) -> u64 {
    let row: serde_json::Value = serde_json::from_str(line).unwrap();
    row["step"].as_u64().unwrap()
}

/// A row of the page: file, numbers of keys with and without effect.
fn parse_row(line: &str) -> Option<(String, usize, usize)> {
    let cells: Vec<&str> = line.split('|').map(str::trim).collect();
    let [_, file, with, without, _] = cells[..] else { return None };
    Some((file.strip_prefix('`')?.strip_suffix('`')?.to_string(), with.parse().ok()?, without.parse().ok()?))
}

#[test]
fn agentic_configurations_of_roll_run_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    let here = dir.path();
    let gigpo =
        "adv_estimator: gigpo\nbatch_adjust_mode: copy\nstep_reward_gamma: 0.95\nuse_kl_loss: true\nkl_loss_coef: 0.01";
    let gigpo_agent = AGENT.replace("ADVANTAGE", gigpo).replace("value_clip: 0.5\n", "");
    for (name, text) in [
        ("examples/agent/ppo.yaml", AGENT.replace("ADVANTAGE\n", "")),
        // Prompts that repeat turns are longer.
        (
            "examples/agent/gigpo.yaml",
            gigpo_agent.replace("own_envs", "gigpo_envs").replace("length: 600", "length: 1500"),
        ),
        ("examples/config/own_envs.yaml", ENVIRONMENTS.to_string()),
        ("examples/config/gigpo_envs.yaml", environments_of_gigpo(ENVIRONMENTS)),
    ] {
        let path = here.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    done(here, &["init-tiny", "tiny", "--kind", "lm"]);
    for (file, metric, counted) in [("ppo", "critic/loss", PPO_COUNTS), ("gigpo", "actor/kl_loss", GIGPO_COUNTS)] {
        let config = format!("examples/agent/{file}.yaml");
        // A run this short may train nothing: all episodes of each group fail alike. 0: it goes on.
        let short = ["--set", "training.max_skipped_steps=0"];
        let output = roll(here, &[&["run", "--config", &config, "--out", file][..], &short].concat());
        let messages = stderr_text(&output);
        assert!(output.status.success(), "{messages}");
        assert_eq!(counts(&messages), Some(counted), "{messages}");
        // Every key without effect is listed with a reason of its own: "there is nothing like it" is printed for keys
        // that the importer does not know.
        assert!(!messages.contains("there is nothing like it"), "{messages}");
        let rows = std::fs::read_to_string(here.join(file).join("metrics.jsonl")).unwrap();
        let last: serde_json::Value = serde_json::from_str(rows.lines().last().unwrap()).unwrap();
        for name in [metric, "actor/loss", "Room/score/mean", "Lake/score/mean", "val/Lake/env/success"] {
            assert!(last[name].is_number(), "{file}: {name} in {last}");
        }
        let episodes = std::fs::read_to_string(here.join(file).join("trajectories.jsonl")).unwrap();
        let count = |kind: &str, tag: &str| {
            let is_of =
                |line: &&str| line.contains(&format!("\"{kind}\"")) && line.contains(&format!("\"tag\":\"{tag}\""));
            episodes.lines().filter(is_of).count()
        };
        // Two steps, each with a group of Room and three of Lake (`num_groups_partition`), of four episodes each;
        // validations of eight episodes before training and after each step.
        assert_eq!((count("training", "Room"), count("training", "Lake")), (8, 24), "{file}");
        assert_eq!((count("validation", "Room"), count("validation", "Lake")), (0, 24), "{file}");
    }
}
