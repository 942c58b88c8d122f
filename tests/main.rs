//! Tests that cross crates, most of them through the program: one module per subject, one binary.
//!
//! `cargo test --release --workspace --test it resume::` runs the tests of one module. All of them share a process, so
//! no test may change its environment, its working directory or its signal handlers: set them for a child.

#![allow(clippy::unwrap_used)]

mod browser;
mod program;
mod roll_yaml;
mod world;

// Cases of the parity harness, which uses more of them; `reward_fl_gradient` differentiates one.
#[allow(dead_code)]
#[path = "parity/case.rs"]
mod case;
#[allow(dead_code)]
#[path = "parity/dit.rs"]
mod dit;
#[allow(dead_code)]
#[path = "parity/reward_fl_step.rs"]
mod reward_fl_step;

mod adapter_file;
mod adapters;
mod agent;
mod agent_prompts;
mod bad_input;
mod cache;
#[cfg(unix)]
mod captions;
#[cfg(unix)]
mod check;
mod clips;
mod command_line;
mod configuration;
mod demo;
mod documentation;
mod engine;
mod eval;
mod face_reward;
mod flow_matching;
#[cfg(unix)]
mod foreign_runs;
mod fuzz;
#[cfg(unix)]
mod golden;
#[cfg(target_os = "linux")]
mod hostile_models;
#[cfg(unix)]
mod init;
#[cfg(unix)]
mod judge;
mod lora_files;
mod model_kinds;
mod own_reward;
mod plugins;
#[cfg(unix)]
mod processes;
mod promises;
#[cfg(unix)]
mod prompts;
mod ranks;
#[cfg(unix)]
mod recipes;
mod reference_config;
mod report;
#[cfg(unix)]
mod resume;
mod reward_fl_gradient;
#[cfg(unix)]
mod runs;
mod same_bits;
mod sequence;
#[cfg(unix)]
mod sight;
#[cfg(unix)]
mod thread_ranks;
mod tiny_vision_language;
#[cfg(unix)]
mod vision_language;
mod vision_policy;
#[cfg(unix)]
mod vote;
#[cfg(unix)]
mod watch;
mod z_image;

// For their registrations.
use roll_backends as _;
use roll_rewards as _;
use {roll_agents as _, roll_video as _};
use {roll_causal_lm as _, roll_wan as _, roll_z_image as _};
