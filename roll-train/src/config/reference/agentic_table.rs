//! Tables for the translation of ROLL's agentic configurations: its keys and our names for them, its defaults that
//! differ from ours, and why other keys have no effect.

/// Our algorithm for ROLL's agentic pipeline.
pub const ALGORITHM: &str = "agentic_ppo";
/// Our model for it.
pub const MODEL: &str = "causal_lm";

/// Our environment that consists of several environments.
pub const MIXED: &str = "mixed";

/// Sections that only an agentic configuration has.
pub const SECTIONS: [&str; 2] = ["custom_envs", "train_env_manager"];

/// Keys whose values are taken over unchanged: (ROLL's, ours).
pub const UNCHANGED: &[(&str, &str)] = &[
    ("exp_name", "exp_name"),
    ("seed", "seed"),
    ("output_dir", "output_dir"),
    ("save_steps", "save_steps"),
    ("logging_steps", "logging_steps"),
    ("eval_steps", "evaluation.every"),
    ("max_grad_norm", "training.max_grad_norm"),
    ("pretrain", "model.model_path"),
    ("train_env_manager.group_size", "algo.group_size"),
    ("train_env_manager.group_size_redundancy", "algo.group_size_redundancy"),
    ("actor_train.model_args.lora_alpha", "model.lora_alpha"),
    ("actor_train.training_args.learning_rate", "training.learning_rate"),
    ("actor_train.training_args.lr_scheduler_type", "training.lr_scheduler_type"),
    ("actor_train.training_args.lr_scheduler_kwargs", "training.lr_scheduler_kwargs"),
    ("actor_train.training_args.weight_decay", "training.weight_decay"),
    ("actor_train.training_args.adam_epsilon", "training.eps"),
    ("actor_train.training_args.per_device_train_batch_size", "algo.micro_batch_size"),
];

/// Keys that only ROLL's workers of policy gradients read: (ROLL's, ours).
pub const POLICY_GRADIENT: &[(&str, &str)] = &[
    ("actor_train.pg_variant", "algo.pg_variant"),
    ("actor_train.topr_positive_weight", "algo.topr_positive_weight"),
    ("actor_train.topr_negative_weight", "algo.topr_negative_weight"),
];

/// End of the class name of ROLL's usual worker, whose loss is PPO's clipped surrogate.
pub const PPO_WORKER: &str = "agentic_actor_worker.ActorWorker";

/// Keys of ROLL's top level that are options of the algorithm here, under the same name; separated by spaces.
pub const ALGORITHM_OPTIONS: &str = "\
    sequence_length val_batch_size adv_estimator gamma lambd value_clip critic_warmup reward_clip advantage_clip \
    whiten_advantages whiten_rewards add_token_level_kl kl_penalty init_kl_coef target_kl kl_horizon ppo_epochs \
    enable_old_logprobs_recompute pg_clip use_pg_clip_range pg_clip_low pg_clip_high dual_clip_loss use_kl_loss \
    kl_loss_coef entropy_loss_coef loss_agg_mode ratio_type train_infer_correction step_reward_gamma \
    step_reward_weight episode_reward_weight reward_normalization.grouping reward_normalization.method \
    reward_normalization.norm_mean_type reward_normalization.norm_std_type";

/// Options of sampling: (ROLL's, ours for training, ours for validation if validation can differ).
pub const SAMPLING: &[(&str, &str, Option<&str>)] = &[
    ("temperature", "algo.temperature", Some("algo.val_temperature")),
    ("top_p", "algo.top_p", None),
    ("top_k", "algo.top_k", None),
    ("stop_strings", "algo.stop", None),
];

/// Keys for the agent in an entry of `custom_envs`: (ROLL's, ours).
pub const AGENT_KEYS: &[(&str, &str)] = &[
    ("max_steps", "algo.max_actions_per_traj"),
    ("max_tokens_per_step", "algo.max_tokens_per_step"),
    ("agent_system_template", "algo.agent_system_template"),
    ("agent_template", "algo.agent_template"),
    ("history_length", HISTORY_LENGTH),
    (MAX_CONCURRENT, "algo.max_env_step_concurrent"),
];

/// ROLL's key for the number of environments that compute at the same time.
pub const MAX_CONCURRENT: &str = "max_env_step_concurrent";

/// Our key for the number of turns that a prompt shows.
pub const HISTORY_LENGTH: &str = "algo.history_length";
/// End of the name of ROLL's class in which each turn has a prompt of its own. Unless `history_length` is given, such a
/// prompt shows one turn.
pub const STEP_MANAGER: &str = "step_env_manager.StepEnvManager";

/// The environment of ROLL that writes its messages itself. ROLL does not read the templates in its entry.
pub const OWN_MESSAGES_ENV: &str = "sokoban_native_env";

/// Environments: (`env_type`, our name, the options that mean the same in both, separated by spaces).
pub const ENVIRONMENTS: &[(&str, &str, &str)] = &[
    (
        "frozen_lake",
        "frozen_lake",
        "size p is_slippery map_seed format_penalty action_pattern special_token_list env_instruction",
    ),
    (
        "sokoban",
        "sokoban",
        "dim_room num_boxes max_steps search_depth num_gen_steps format_penalty action_pattern special_token_list \
         env_instruction grid_lookup",
    ),
    // The options that ROLL's environment with messages of its own passes on to Sokoban.
    (OWN_MESSAGES_ENV, "sokoban", "dim_room num_boxes max_steps search_depth format_penalty action_pattern"),
];

/// Defaults of ROLL that differ from ours: (our key, ROLL's default as YAML).
pub const DEFAULTS: &[(&str, &str)] = &[
    ("algo.temperature", "0.95"),
    ("algo.top_p", "0.7"),
    ("algo.top_k", "50"),
    ("algo.val_temperature", "0.95"),
    ("algo.adv_estimator", "gae"),
    ("algo.val_batch_size", "128"),
    ("algo.reward_normalization.grouping", "batch"),
    ("algo.reward_normalization.method", "identity"),
    ("algo.group_size", "1"),
    ("algo.micro_batch_size", "8"),
    ("training.learning_rate", "5.0e-5"),
    ("training.lr_scheduler_type", "linear"),
    ("save_steps", "50"),
    ("evaluation.every", "10"),
    ("steps", "500"),
];

/// ROLL's default of `lora_rank`.
pub const LORA_RANK: u64 = 8;
/// ROLL's default of `rollout_batch_size`.
pub const ROLLOUT_BATCH_SIZE: u64 = 128;
/// The entry of `custom_envs` that ROLL plays if a section has no `tags`.
pub const DEFAULT_TAG: &str = "SimpleSokoban";

// Reasons in [`WITHOUT_EFFECT`] that several keys share.
const NO_WORKERS: &str = "one program generates, scores and trains: there are no workers to place and no servers";
const ONE_MODEL: &str = "there is one set of frozen weights, for generation, the KL and training";
const RUN_DIRECTORY: &str = "metrics, TensorBoard files, trajectories and checkpoints are in the run directory";
const PACKED: &str = "batches are packed without padding and of any size";
const KERNELS: &str = "the backend chooses its own kernels";
const UNREAD_BY_ROLL: &str = "ROLL itself does not read it";
const PPO_ONLY: &str = "ROLL's usual `worker_cls` does not read it; `agentic_actor_pg_worker.ActorWorker` does";
const OTHER_SAMPLING: &str =
    "answers are drawn otherwise than in ROLL: `temperature`, `top_p` and `top_k` are all there is";

/// Keys without effect, each with the reason. A `*` matches any one name. The first pattern that matches counts.
pub const WITHOUT_EFFECT: &[(&str, &str)] = &[
    ("hydra", "it is Hydra's"),
    ("logging_dir", RUN_DIRECTORY),
    ("render_save_dir", RUN_DIRECTORY),
    ("rollout_dump_dir", RUN_DIRECTORY),
    ("track_with", RUN_DIRECTORY),
    ("tracker_kwargs", RUN_DIRECTORY),
    ("checkpoint_config", RUN_DIRECTORY),
    ("resume_from_checkpoint", "`roll run --resume RUN` goes on with a run"),
    ("system_envs", NO_WORKERS),
    ("num_gpus_per_node", NO_WORKERS),
    ("rpc_timeout", NO_WORKERS),
    ("model_download_type", "HF_ENDPOINT and the caches decide"),
    ("batch_adjust_mode", PACKED),
    ("dirty_data_mask", "episodes whose environment failed are always left out"),
    ("default_history_length", "the entries of `custom_envs` that are played have it"),
    ("profiler_memory", RUN_DIRECTORY),
    ("reward_pretrain", "environments give the rewards"),
    ("reward", "environments give the rewards"),
    ("env_monitor", "an environment that hangs is ended by its own time limit"),
    ("reward_normalization.global_scale_factor", UNREAD_BY_ROLL),
    ("reward_normalization.global_shift_value", UNREAD_BY_ROLL),
    ("max_tokens_per_step", "the entries of `custom_envs` that are played have it"),
    ("max_actions_per_traj", "the entries of `custom_envs` that are played have it"),
    ("*.data_args", "the chat template is the model's own"),
    ("critic", "the critic is a linear head on the policy's hidden states: `algo.critic_learning_rate`"),
    ("reference", ONE_MODEL),
    ("actor_infer.model_args", ONE_MODEL),
    ("*.generating_args.min_p", OTHER_SAMPLING),
    ("*.generating_args.repetition_penalty", OTHER_SAMPLING),
    ("actor_infer.generating_args.num_beams", "answers are drawn, one each"),
    ("*.generating_args.num_return_sequences", "answers are drawn, one each"),
    ("*.generating_args.do_sample", "a temperature of 0 takes the likeliest tokens"),
    ("actor_train.model_args.attn_implementation", KERNELS),
    ("actor_train.model_args.flash_attn", KERNELS),
    ("actor_train.model_args.ulysses_size", NO_WORKERS),
    ("actor_train.model_args.dtype", "`model.weights_dtype` is `bf16` or `f32`"),
    ("actor_train.pg_variant", PPO_ONLY),
    ("actor_train.topr_positive_weight", PPO_ONLY),
    ("actor_train.topr_negative_weight", PPO_ONLY),
    ("actor_train.use_remove_padding", PACKED),
    ("actor_train.model_args.model_type", "the weights say what they are"),
    ("*.worker_cls", NO_WORKERS),
    ("*.strategy_args", NO_WORKERS),
    ("*.device_mapping", NO_WORKERS),
    ("*.system_envs", NO_WORKERS),
    ("*.infer_batch_size", PACKED),
    ("*.use_dynamic_batching_in_train", PACKED),
    ("*.use_dynamic_batching_in_infer", PACKED),
    ("*.max_tokens_per_microbatch_in_train", PACKED),
    ("*.max_tokens_per_microbatch_in_infer", PACKED),
    ("*.sequence_length_round_in_train", PACKED),
    ("*.sequence_length_round_in_infer", PACKED),
    ("*.use_sequence_packing", PACKED),
    ("*.max_env_num_per_worker", "all environments of a rank are open at the same time"),
    ("*.max_traj_per_env", "all environments of a rank are open at the same time"),
    ("val_env_manager.num_env_groups", "`val_batch_size` counts the episodes of a validation"),
    ("val_env_manager.group_size", "every episode of a validation has a start of its own"),
    ("*.format_penalty", UNREAD_BY_ROLL),
    ("*.group_filter_cls", "it is a class in Python; `algo.group_filter: varied` leaves out groups of equal scores"),
    ("*.llm_proxy", NO_WORKERS),
    ("val_env_manager.generating_args", "validations draw as training does, but for the temperature"),
    ("custom_envs.*.env_manager_cls", "`adv_estimator` decides whether episodes or their turns are samples"),
    ("custom_envs.*.agent_runner_cls", NO_WORKERS),
    ("custom_envs.*.use_thread_lock", NO_WORKERS),
    ("custom_envs.*.env_config.max_steps", UNREAD_BY_ROLL),
    ("custom_envs.*.env_config.grid_vocab", "the instructions explain the symbols of `grid_lookup`"),
    ("custom_envs.*.env_config.render_mode", "observations are text"),
    ("custom_envs.*.agent_template", "the environment writes its own messages"),
    ("custom_envs.*.agent_system_template", "the environment writes its own messages"),
    ("custom_envs.*.history_length", "only ROLL's StepEnvManager reads it"),
    ("custom_envs.*.pre_step_template", "observations are text"),
    ("custom_envs.*.next_step_template", "observations are text"),
    ("custom_envs.*.env_config", "the environment here has no such option"),
    ("actor_infer", NO_WORKERS),
    ("agent_runner_cls", NO_WORKERS),
    ("env_manager_cls", "`adv_estimator` decides whether episodes or their turns are samples"),
    ("rollout_mock", "episodes are always played"),
];

/// Whether `pattern`, as in [`WITHOUT_EFFECT`], matches `key` or a key above it: `a.*` matches `a.b` and `a.b.c`.
pub fn matches_pattern(pattern: &str, key: &str) -> bool {
    let mut names = key.split('.');
    pattern.split('.').all(|part| names.next().is_some_and(|name| part == "*" || part == name))
}
