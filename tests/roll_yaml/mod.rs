//! The Reward-FL configuration of alibaba/ROLL, with its own keys and files, for the tests that run it.

use std::path::{Path, PathBuf};

/// ROLL's Reward-FL example; its data, models and outputs are below the working directory.
pub const CONFIG: &str = "\
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

pub const DEEPSPEED: &str = "\
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

/// Where [`write_for_devices`] puts [`CONFIG`].
pub const FILE: &str = "examples/wan/reward_fl_config.yaml";

/// Writes the configuration for this number of devices, and the file that it refers to.
pub fn write_for_devices(here: &Path, devices: usize) {
    let config = CONFIG.replace("range(0,2)", &format!("range(0,{devices})"));
    for (name, text) in [(FILE, config.as_str()), ("examples/config/deepspeed_zero2_cpuoffload.yaml", DEEPSPEED)] {
        let path = here.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
}

/// Puts the demo's model, face networks and one of its clips where [`CONFIG`] looks for them.
#[cfg(unix)]
pub fn demo_world(here: &Path) {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../demo/assets").canonicalize().unwrap();
    std::os::unix::fs::symlink(&demo, here.join("tiny")).unwrap();
    std::os::unix::fs::symlink(demo.join("face"), here.join("antelopev2")).unwrap();
    std::fs::create_dir_all(here.join("data")).unwrap();
    std::fs::copy(demo.join("clips/train/person-11000.mp4"), here.join("data/clip.mp4")).unwrap();
    std::fs::write(here.join("data/metadata.csv"), "video,prompt\nclip.mp4,a person looks at the camera\n").unwrap();
}

/// Additions for the demo's networks and clips to [`CONFIG`]: the detector takes pictures of one size only, and the
/// model was trained on clips of nine frames.
pub const DEMO_SETTINGS: [&str; 8] =
    ["--steps", "2", "--set", "sample_steps=1", "--set", "reward.0.det_size=64", "--set", "data.num_frames=9"];

/// The videos of step `step` of a run, by name.
pub fn samples(run: &Path, step: u64) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = run.join(format!("samples/step-{step:06}"));
    let files = std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut files: Vec<PathBuf> = files.map(|f| f.unwrap().path()).collect();
    files.retain(|f| f.extension().is_some_and(|e| e == "mp4"));
    files.sort();
    files.into_iter().map(|f| (f.clone(), std::fs::read(f).unwrap())).collect()
}
