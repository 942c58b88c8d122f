use super::super::super::ConfigLayers;
use super::*;
use crate::config::LoadedConfig;

/// Environments in ROLL's words, in a file of their own.
const ENVIRONMENTS: &str = "\
max_actions_per_traj: 7
max_tokens_per_step: 99
penalty: -0.15
manager: some.python.Class
system: Be good.
custom_env:
  Room:
    env_type: sokoban
    max_steps: ${max_actions_per_traj}
    max_tokens_per_step: ${max_tokens_per_step}
    env_manager_cls: ${manager}
    use_thread_lock: true
    agent_system_template: ${system}
    agent_template: \"{observation}\"
    env_config:
      max_steps: ${max_actions_per_traj}
      format_penalty: ${penalty}
      dim_room: [6, 6]
      num_boxes: 1
      grid_lookup: {0: \"W\"}
      grid_vocab: {\"W\": \"wall\"}
  Lake:
    env_type: frozen_lake
    max_steps: ${max_actions_per_traj}
    max_tokens_per_step: ${max_tokens_per_step}
    env_config:
      max_steps: ${max_actions_per_traj}
      is_slippery: false
  Shop:
    env_type: webshop
";

const CONFIG: &str = "\
defaults:
  - ../config/own_envs@_here_
hydra: {run: {dir: .}}
exp_name: agents
seed: 7
logging_dir: logs
checkpoint_config: {type: file_system}
max_steps: 100
save_steps: 1000
eval_steps: 20
rollout_batch_size: 64
val_batch_size: 32
sequence_length: 512
async_generation_ratio: 1
batch_adjust_mode: copy
dirty_data_mask: true
adv_estimator: grpo
advantage_clip: 0.2
whiten_advantages: true
critic_warmup: 3
pretrain: tiny
reward_pretrain: tiny
actor_train:
  pg_variant: topr
  worker_cls: some.Worker
  model_args: {dtype: bf16, attn_implementation: fa2, disable_gradient_checkpointing: false}
  training_args:
    learning_rate: 1.0e-6
    per_device_train_batch_size: 2
    gradient_accumulation_steps: 4
    warmup_steps: 10
    lr_scheduler_type: cosine
  data_args: {template: qwen2_5}
  strategy_args:
    strategy_name: megatron_train
    strategy_config: {tensor_model_parallel_size: 2, use_distributed_optimizer: true, recompute_granularity: full}
  device_mapping: list(range(0,8))
  infer_batch_size: 2
actor_infer:
  strategy_args: {strategy_name: vllm}
reference:
  infer_batch_size: 2
reward_normalization: {grouping: tags, method: mean_std}
train_env_manager:
  format_penalty: -0.1
  max_env_num_per_worker: 16
  num_env_groups: 16
  group_size: 4
  group_size_redundancy: 1
  tags: [Room]
  num_groups_partition: [16]
  generating_args: {max_new_tokens: 128, top_p: 0.99, top_k: 100, temperature: 0.9, num_return_sequences: 1}
val_env_manager:
  num_env_groups: 32
  group_size: 1
  tags: [Lake, Room]
  num_groups_partition: [8, 24]
  generating_args: {max_new_tokens: 128, top_p: 0.99, top_k: 100, temperature: 0.2}
max_tokens_per_step: 64
custom_envs:
  Room: ${custom_env.Room}
  Lake: ${custom_env.Lake}
  Shop: ${custom_env.Shop}
";

fn load(change: impl Fn(String) -> String) -> Result<LoadedConfig> {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in [("config/own_envs.yaml", ENVIRONMENTS.to_string()), ("run/agents.yaml", change(CONFIG.into()))]
    {
        let path = dir.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    ConfigLayers::new().file(dir.path().join("run/agents.yaml"))?.load(None)
}

#[test]
fn translates_an_agentic_configuration() {
    let loaded = load(|text| text).unwrap();
    let c = &loaded.config;
    assert_eq!((c.seed, c.steps, c.save_steps), (7, Some(100), 1000));
    assert_eq!(loaded.declared_value("evaluation", "every"), Some(&20.into()));
    assert_eq!(
        (c.algo.name.as_str(), c.model.name.as_str(), c.strategy.name.as_str()),
        ("agentic_ppo", "causal_lm", "zero")
    );
    let algo = |key: &str| c.algo.options[key].clone();
    for (key, value) in [
        ("num_env_groups", 16.into()),
        ("group_size", 4.into()),
        ("group_size_redundancy", 1.into()),
        ("val_batch_size", 32.into()),
        ("sequence_length", 512.into()),
        ("max_actions_per_traj", 7.into()),
        // The least of the two limits.
        ("max_tokens_per_step", 64.into()),
        ("temperature", 0.9.into()),
        ("val_temperature", 0.2.into()),
        ("top_k", 100.into()),
        ("async_generation_ratio", 1.into()),
        ("adv_estimator", serde_json::json!("grpo")),
        ("pg_variant", serde_json::json!("topr")),
        // Two of eight devices hold a copy: four copies, eight samples each.
        ("mini_batch_size", 32.into()),
        ("micro_batch_size", 2.into()),
        ("agent_system_template", serde_json::json!("Be good.")),
        ("tags", serde_json::json!(["Room"])),
        ("num_groups_partition", serde_json::json!([16])),
        ("val_tags", serde_json::json!(["Lake", "Room"])),
        ("val_num_groups_partition", serde_json::json!([8, 24])),
        ("reward_normalization", serde_json::json!({"grouping": "tags", "method": "mean_std"})),
    ] {
        assert_eq!(algo(key), value, "{key}");
    }
    // Two updates a step.
    assert_eq!(
        (c.training.warmup_steps, c.training.lr_scheduler_type),
        (5, roll_backends::optimizer::LrSchedulerType::Cosine)
    );
    assert_eq!((&c.model.options["lora_rank"], &c.model.options["weights_dtype"]), (&0.into(), &"bf16".into()));
    assert_eq!(c.strategy.options["stage"], 1);
    let env = c.env.as_ref().unwrap();
    assert_eq!(env.name, "mixed");
    let room = &env.options["worlds"]["Room"];
    assert_eq!(
        (&room["name"], &room["dim_room"], &room["grid_lookup"]["0"]),
        (&"sokoban".into(), &serde_json::json!([6, 6]), &"W".into())
    );
    assert_eq!(env.options["worlds"]["Lake"], serde_json::json!({"name": "frozen_lake", "is_slippery": false}));
    assert!(loaded.provenance.of("algo.sequence_length").contains("agents.yaml:"));

    let [note] = &loaded.notes[..] else { panic!("{:?}", loaded.notes) };
    for key in [
        "hydra",
        "batch_adjust_mode",
        "reference",
        "actor_train.data_args",
        "train_env_manager.format_penalty",
        "custom_envs.Shop",
        "val_env_manager.generating_args.top_p",
    ] {
        let places = note.split(['(', ')', ',', ';', ' ']).filter(|word| *word == key).count();
        assert_eq!(places, 1, "{key}: {note}");
    }
    assert!(!note.contains("there is nothing like it"), "every key has its reason: {note}");
    assert!(!note.contains("learning_rate,") && note.contains("keys have an effect here"), "{note}");
}

#[test]
fn a_single_environment_is_not_mixed() {
    let loaded = load(|text| text.replace("[Lake, Room]", "[Room]").replace("[8, 24]", "[32]")).unwrap();
    let env = loaded.config.env.unwrap();
    assert_eq!((env.name.as_str(), &env.options["num_boxes"]), ("sokoban", &1.into()));
    assert!(!loaded.config.algo.options.contains_key("tags"));
}

#[test]
fn step_env_manager_sets_history_length() {
    let class = "manager: roll.pipeline.agentic.env_manager.step_env_manager.StepEnvManager";
    let manager = |history: &'static str| {
        move |text: String| {
            let text = text.replace("manager: some.python.Class", class);
            text.replace("    use_thread_lock: true\n", history)
        }
    };
    let load = |change: &dyn Fn(String) -> String| {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("own_envs.yaml"), change(ENVIRONMENTS.into())).unwrap();
        let file = dir.path().join("agents.yaml");
        std::fs::write(&file, CONFIG.replace("../config/", "").replace("grpo", "gigpo")).unwrap();
        ConfigLayers::new().file(file).unwrap().load(None).unwrap()
    };
    let history = |loaded: &LoadedConfig| loaded.config.algo.options.get("history_length").cloned();
    let loaded = load(&manager("    history_length: 5\n"));
    assert_eq!(history(&loaded), Some(5.into()));
    assert!(!loaded.notes[0].contains("env_manager_cls"), "{}", loaded.notes[0]);
    assert_eq!(history(&load(&manager(""))), Some(1.into()));
    let other = load(&|text| text.replace("use_thread_lock: true", "history_length: 5"));
    assert_eq!(history(&other), None);
    assert!(other.notes[0].contains("custom_envs.*.history_length (only ROLL's"), "{}", other.notes[0]);
}

#[test]
fn thinking_is_off_as_in_roll() {
    let loaded = load(|text| text).unwrap();
    let args = loaded.config.model.options.get("chat_template_args").cloned();
    assert_eq!(args, Some(serde_json::json!({"enable_thinking": false})));
    // Without the correction nothing reads it.
    assert!(!loaded.config.algo.options.contains_key("infer_log_probs"));
    let corrected = load(|text| text + "train_infer_correction: {is_weight: {enabled: true}}\n").unwrap();
    assert_eq!(corrected.config.algo.options["infer_log_probs"], "raw");
}

#[test]
fn filters_without_enabled_are_off_as_in_roll() {
    let filters = "train_infer_correction: {filters: [{ratio_low: 0.5}, {enabled: true}]}\n";
    let loaded = load(|text| text + filters).unwrap();
    let found = &loaded.config.algo.options["train_infer_correction"]["filters"];
    assert_eq!((&found[0]["enabled"], &found[1]["enabled"]), (&false.into(), &true.into()));
    assert_eq!(found[0]["ratio_low"], 0.5);
}

#[test]
fn forms_of_the_policy_gradient_need_the_worker_that_reads_them() {
    for (class, read) in [
        ("  worker_cls: roll.pipeline.agentic.agentic_actor_pg_worker.ActorWorker\n", true),
        ("  worker_cls: roll.pipeline.agentic.agentic_actor_worker.ActorWorker\n", false),
        ("", false),
    ] {
        let loaded = load(|text| text.replace("  worker_cls: some.Worker\n", class)).unwrap();
        let variant = loaded.config.algo.options.get("pg_variant");
        assert_eq!(variant.is_some_and(|variant| variant == "topr"), read, "{class}");
        let noted = loaded.notes[0].contains("actor_train.pg_variant (ROLL's usual `worker_cls`");
        assert_eq!(noted, !read, "{}", loaded.notes[0]);
    }
}

#[test]
fn other_numbers_of_steps_ahead_are_noted() {
    for (ratio, steps) in [("2", 1), ("0.5", 1), ("0", 0), ("1", 1)] {
        let loaded = load(|text| text.replace("generation_ratio: 1", &format!("generation_ratio: {ratio}"))).unwrap();
        assert_eq!(loaded.config.algo.options["async_generation_ratio"], steps, "{ratio}");
        let noted = loaded.notes.iter().any(|note| note.contains(&format!("`async_generation_ratio: {ratio}` counts")));
        assert_eq!(noted, ["2", "0.5"].contains(&ratio), "{:?}", loaded.notes);
    }
}

#[test]
fn options_of_sampling_without_effect_have_their_reason() {
    let args = "actor_infer:\n  generating_args: {min_p: 0.1, repetition_penalty: 1.1, max_new_tokens: 64}";
    let loaded = load(|text| text.replace("actor_infer:", args)).unwrap();
    let note = &loaded.notes[0];
    let reason = "generating_args.min_p, actor_infer.generating_args.repetition_penalty (answers are drawn otherwise";
    assert!(note.contains(reason), "{note}");
}

#[test]
fn limits_of_environments_at_once_hold() {
    let limit = |entry: &str| {
        let dir = tempfile::tempdir().unwrap();
        let environments = ENVIRONMENTS.replace("use_thread_lock: true", &format!("max_env_step_concurrent: {entry}"));
        std::fs::write(dir.path().join("own_envs.yaml"), environments).unwrap();
        let file = dir.path().join("agents.yaml");
        std::fs::write(&file, CONFIG.replace("../config/", "")).unwrap();
        let loaded = ConfigLayers::new().file(file).unwrap().load(None).unwrap();
        loaded.config.algo.options.get("max_env_step_concurrent").cloned()
    };
    assert_eq!((limit("5"), limit("0")), (Some(5.into()), None));
}

#[test]
fn models_of_pictures_are_refused() {
    let message =
        load(|text| text.replace("pretrain: tiny", "pretrain: Qwen/Qwen2.5-VL-3B-Instruct")).unwrap_err().to_string();
    assert!(message.contains("Qwen2.5-VL-3B-Instruct") && message.contains("text"), "{message}");
}

#[test]
fn translates_lora_options() {
    let lora = "lora_target: all-linear, lora_rank: 16, dtype: bf16";
    let loaded = load(|text| text.replace("dtype: bf16", lora)).unwrap();
    let model = &loaded.config.model.options;
    assert_eq!((&model["lora_rank"], &model["lora_alpha"]), (&16.into(), &32.into()));
    let some = load(|text| text.replace("dtype: bf16", "lora_target: \"q_proj,v_proj\"")).unwrap();
    assert_eq!(some.config.model.options["lora_target_modules"], "q_proj,v_proj");
}

#[test]
fn rejects_environments_and_batch_sizes_that_cannot_be_translated() {
    let error = |change: &dyn Fn(String) -> String| load(change).unwrap_err().to_string();
    let message = error(&|t| t.replace("tags: [Room]", "tags: [Shop]"));
    assert!(message.contains("webshop") && message.contains("frozen_lake, sokoban"), "{message}");
    let message = error(&|t| t.replace("tags: [Room]", "tags: [Nowhere]"));
    assert!(message.contains("custom_envs.Nowhere"), "{message}");
    let message = error(&|t| t.replace("rollout_batch_size: 64", "rollout_batch_size: 66"));
    assert!(message.contains("multiple of") && message.contains("agents.yaml:"), "{message}");
    let message = error(&|t| t.replace("max_steps: 100", "max_steps: -1"));
    assert!(message.contains("max_steps"), "{message}");
}
