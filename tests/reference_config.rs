//! ROLL's Reward-FL configuration, in its own words and files, runs as it is.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::{Command, Output};

use roll_core::{Tensor, Video};

fn roll(directory: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_roll")).args(arguments).current_dir(directory).output().unwrap()
}

/// The configuration of the reference's example, with paths below the working directory.
const CONFIG: &str = "\
defaults:
  - ../config/deepspeed_zero2_cpuoffload@_here_
hydra:
  run: {dir: .}
  output_subdir: null
exp_name: as_in_roll
seed: 42
logging_dir: ./output/logs
output_dir: ./output
checkpoint_config: {type: file_system, output_dir: /data/models/reward_fl/}
save_steps: 25
logging_steps: 1
resume_from_checkpoint: false
sequence_length: 1024
train_batch_size: 2
max_grad_norm: 1.0
actor_train:
  model_args:
    model_type: diffusion_module
    dtype: bf16
    model_config_kwargs:
      model_name: wan2_2
      model_paths: ./tiny/wan22_paths.json
      reward_model_path: ./antelopev2/
      tokenizer_path: ./tiny/google/umt5-xxl/
      model_id_with_origin_paths: null
      trainable_models: dit2
      use_gradient_checkpointing_offload: true
      extra_inputs: input_image
      max_timestep_boundary: 1.0
      min_timestep_boundary: 0.9
      num_inference_steps: 8
      mid_timestep: 4
      final_timestep: 7
      lora_base_model: dit2
      lora_target_modules: q,k,v,o,ffn.0,ffn.2
      lora_rank: 4
  training_args:
    learning_rate: 2.5e-6
    lr_scheduler_type: constant
    per_device_train_batch_size: 1
    gradient_accumulation_steps: 1
    warmup_steps: 10
    num_train_epochs: 1
  data_args:
    file_name: ./data/metadata.csv
    preprocessing_num_workers: 2
  strategy_args:
    strategy_name: diffusion_deepspeed_train
    strategy_config: ${deepspeed_zero2_cpuoffload}
  device_mapping: list(range(0,2))
system_envs:
  RAY_PROFILING: \"0\"
";

const DEEPSPEED: &str = "\
deepspeed_zero2_cpuoffload:
  train_micro_batch_size_per_gpu: auto
  bf16: {enabled: true}
  fp16: {enabled: false, loss_scale: 0}
  zero_optimization:
    stage: 2
    offload_optimizer: {device: cpu, pin_memory: true}
    offload_param: {device: cpu, pin_memory: true}
    allgather_partitions: true
    allgather_bucket_size: 1.0e+9
    overlap_comm: true
    reduce_scatter: true
    reduce_bucket_size: 5.0e+8
    contiguous_gradients: true";

#[test]
fn rolls_configuration_runs_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    let here = dir.path();
    for (name, text) in [
        ("examples/wan/reward_fl_config.yaml", CONFIG),
        ("examples/config/deepspeed_zero2_cpuoffload.yaml", DEEPSPEED),
        ("data/metadata.csv", "video,prompt\nclip.mp4,a grey square\n"),
    ] {
        let path = here.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    let video = Video::new(Tensor::full([9, 3, 64, 64], 0.1), 8.0).unwrap();
    roll_data::write_mp4(here.join("data/clip.mp4"), &video).unwrap();
    assert!(roll(here, &["init-tiny", "tiny"]).status.success());

    let config = ["--config", "examples/wan/reward_fl_config.yaml"];
    let listed = roll(here, &[&["config"], &config[..]].concat());
    let text = String::from_utf8_lossy(&listed.stdout).into_owned();
    let said = String::from_utf8_lossy(&listed.stderr).into_owned();
    assert!(listed.status.success(), "{said}");
    for (key, value, origin) in [
        ("strategy.stage", "2", "deepspeed_zero2_cpuoffload.yaml"),
        ("reward.0.reward_model_path", "\"./antelopev2/\"", "reward_fl_config.yaml"),
        ("reward.0.channel_order", "\"bgr\"", "as in ROLL"),
        ("training.gradient_accumulation_steps", "2", "2 devices"),
        ("model.lora_rank", "4", "reward_fl_config.yaml"),
    ] {
        let line = text.lines().find(|l| l.split_whitespace().next() == Some(key)).unwrap_or_else(|| panic!("{text}"));
        assert!(line.contains(value) && line.contains(origin), "{line}");
    }
    assert_eq!(said.matches("without effect here").count(), 1, "{said}");
    assert!(said.contains("system_envs") && said.contains("min_timestep_boundary"), "{said}");

    // The face networks are not in the repository: another reward stands in their place.
    let smaller = ["--steps", "1", "--set", "reward={name: brightness}", "--set", "data.num_frames=5"];
    let output = roll(here, &[&["run"], &config[..], &smaller[..]].concat());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    assert_eq!(said.matches("without effect here").count(), 1, "listed once: {said}");
    let run = here.join("output/as_in_roll");
    assert!(run.join("checkpoints/step-000001/adapter.safetensors").exists());
    let row = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    assert_eq!(row.lines().count(), 1, "{row}");
}
