//! Tables for the translation of ROLL's Reward-FL configuration: components, keys, and defaults that differ from ours.

/// Our algorithm for ROLL's Reward-FL pipeline.
pub const ALGORITHM: &str = "reward_fl";

/// Our reward for that of ROLL's pipeline.
pub const REWARD: &str = "insightface";
/// Option of the reward, and its value: the order of colour channels in which ROLL passes pictures to the face
/// embedder.
pub const REWARD_CHANNELS: (&str, &str) = ("channel_order", "bgr");

/// The key of the reward's networks, in ROLL's block and among our reward's options.
pub const REWARD_PATH: &str = "reward_model_path";

/// Our strategy for DeepSpeed.
pub const STRATEGY: &str = "zero";

/// Sections that only a configuration of ROLL has.
pub const SECTIONS: [&str; 3] = ["actor_train", "actor_infer", "pretrain"];

/// Keys whose values are taken over unchanged: (ROLL's, ours).
pub const UNCHANGED: &[(&str, &str)] = &[
    ("exp_name", "exp_name"),
    ("seed", "seed"),
    ("output_dir", "output_dir"),
    ("save_steps", "save_steps"),
    ("logging_steps", "logging_steps"),
    ("track_with", "track_with"),
    ("max_grad_norm", "training.max_grad_norm"),
    ("actor_train.data_args.file_name", "data.metadata"),
    ("actor_train.training_args.learning_rate", "training.learning_rate"),
    ("actor_train.training_args.lr_scheduler_type", "training.lr_scheduler_type"),
    ("actor_train.training_args.lr_scheduler_kwargs", "training.lr_scheduler_kwargs"),
    ("actor_train.training_args.warmup_steps", "training.warmup_steps"),
    ("actor_train.training_args.weight_decay", "training.weight_decay"),
    ("actor_train.training_args.adam_epsilon", "training.eps"),
    ("actor_train.training_args.per_device_train_batch_size", "training.per_device_train_batch_size"),
];

/// Options below `actor_train.model_args.model_config_kwargs`: (ROLL's, ours).
pub const NETWORK: &[(&str, &str)] = &[
    ("model_name", "model.name"),
    ("model_paths", "model.model_paths"),
    ("tokenizer_path", "model.tokenizer_path"),
    ("model_id_with_origin_paths", "model.model_id_with_origin_paths"),
    ("trainable_models", "model.trainable_models"),
    ("lora_base_model", "model.lora_base_model"),
    ("lora_target_modules", "model.lora_target_modules"),
    ("lora_rank", "model.lora_rank"),
    ("lora_checkpoint", "model.lora_checkpoint"),
    ("use_gradient_checkpointing", "model.use_gradient_checkpointing"),
    ("use_gradient_checkpointing_offload", "model.use_gradient_checkpointing_offload"),
    ("extra_inputs", "model.extra_inputs"),
    ("num_inference_steps", "algo.num_inference_steps"),
    ("mid_timestep", "algo.mid_timestep"),
    ("final_timestep", "algo.final_timestep"),
];

/// The keys that ROLL reads only when `lora_base_model` names the carrier of the LoRA.
pub const LORA_KEYS: &[&str] = &["lora_base_model", "lora_target_modules", "lora_rank", "lora_checkpoint"];

/// Options that DeepSpeed's `zero_optimization` and the strategy `zero` share.
pub const ZERO_KEYS: &[&str] = &[
    "stage",
    "reduce_bucket_size",
    "allgather_bucket_size",
    "sub_group_size",
    "overlap_comm",
    "contiguous_gradients",
    "offload_optimizer.device",
    "offload_optimizer.pin_memory",
    "offload_param.device",
    "offload_param.pin_memory",
];

/// Defaults of ROLL that differ from ours: (our key, ROLL's default as YAML).
pub const DEFAULTS: &[(&str, &str)] = &[
    ("training.learning_rate", "5.0e-5"),
    ("training.lr_scheduler_type", "linear"),
    ("training.warmup_steps", "0"),
    ("training.weight_decay", "0.0"),
    ("training.per_device_train_batch_size", "8"),
    ("save_steps", "50"),
    // `FlowMatchScheduler("Wan")` of its trainer, whichever model it is.
    ("algo.shift", "5.0"),
    // `set_max_steps` of ROLL's pipelines: a run ends there, however long the data are.
    ("max_steps", "500"),
    // `UnifiedDataset(repeat=100)`
    ("data.repeat", "100"),
];

/// ROLL's block of the network's and the trajectory's options.
pub const CONFIG_KWARGS: &str = "actor_train.model_args.model_config_kwargs";
/// ROLL's block of DeepSpeed's options.
pub const ZERO_BLOCK: &str = "actor_train.strategy_args.strategy_config.zero_optimization";
