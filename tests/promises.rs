//! Every promise of README.md has a test.
//!
//! The page is read up to its comparison with other projects, sentence by sentence, row by row and command by command.
//! Each of these units is matched by an entry of [`PROMISES`], which names the tests that would fail without it, or
//! of [`UNTESTED`], which has the reason.

use std::collections::BTreeSet;

use crate::program::root;

/// A part of the page, and the tests of what it says: `FILE::NAME`, or the directory of a parity case.
type Promise = (&'static str, &'static [&'static str]);

const PROMISES: [Promise; 53] = [
    (
        "back-propagates a differentiable reward through the VAE decoder",
        &["tests/reward_fl_gradient.rs::score_gradients_match_finite_differences", "tests/fixtures/reward_fl_step"],
    ),
    (
        "Rewards without a gradient train it by DiffusionNFT and Flow-GRPO",
        &[
            "tests/prompts.rs::a_text_file_of_prompts_trains_every_algorithm_that_generates_its_videos",
            "tests/fixtures/diffusion_nft_loss",
            "tests/fixtures/flow_grpo_loss",
        ],
    ),
    (
        "Language models are trained as agents, with PPO",
        &["tests/agent.rs::an_agent_run_writes_curves_trajectories_and_figures", "tests/fixtures/agentic_loss"],
    ),
    ("| `flex` (default) |", &["tests/demo.rs::the_demo_reports_its_results_and_is_reproducible"]),
    ("| `libtorch` |", &["tests/command_line.rs::devices_lists_every_backend_and_gpu_with_what_is_missing"]),
    (
        "| `wgpu` |",
        &[
            "tests/command_line.rs::devices_lists_every_backend_and_gpu_with_what_is_missing",
            "roll-backends/src/ops/cube/mod.rs::kernels_do_not_read_beyond_their_tensors",
        ],
    ),
    ("| `libtorch-cuda` |", &["tests/command_line.rs::devices_lists_every_backend_and_gpu_with_what_is_missing"]),
    (
        "| `cuda` |",
        &[
            "tests/command_line.rs::devices_lists_every_backend_and_gpu_with_what_is_missing",
            "tests/kernels.rs::kernels_of_sm_90_compile_without_a_gpu",
        ],
    ),
    ("The demo downloads nothing", &["tests/demo.rs::the_demo_runs_without_a_network"]),
    ("$ roll run  ", &["tests/demo.rs::the_demo_reports_its_results_and_is_reproducible"]),
    ("$ xdg-open runs/demo/report.html", &["tests/report.rs::a_browser_shows_the_curves_and_videos_of_reports"]),
    ("$ roll run --model z_image", &["tests/demo.rs::the_picture_demo_draws_held_out_prompts_before_and_after"]),
    (
        "$ roll run --algo agentic_ppo --model causal_lm",
        &["tests/agent.rs::an_agent_run_writes_curves_trajectories_and_figures"],
    ),
    (
        "$ roll init  ",
        &[
            "tests/init.rs::wrong_answers_are_asked_again_at_once_and_the_data_proposes_size_and_length",
            "tests/init.rs::every_reward_with_every_algorithm_is_a_file_that_the_check_accepts",
        ],
    ),
    ("After 60 steps it prints scores", &["tests/demo.rs::the_demo_reports_its_results_and_is_reproducible"]),
    (
        "`identity` of trained people, `unseen` of others, `check`",
        &["tests/demo.rs::the_demo_reports_its_results_and_is_reproducible"],
    ),
    ("$ roll run --config examples/short.yaml", &["tests/documentation.rs::commands_of_the_readme_run"]),
    ("$ roll inspect runs/short", &["tests/documentation.rs::commands_of_the_readme_run"]),
    ("$ # real.yaml", &["tests/documentation.rs::every_configuration_of_a_page_loads"]),
    ("$ backend: libtorch-cuda", &["tests/documentation.rs::every_configuration_of_a_page_loads"]),
    ("$ algo: {name: reward_fl}", &["tests/documentation.rs::every_configuration_of_a_page_loads"]),
    ("$ model: {name: wan2_2", &["tests/documentation.rs::every_configuration_of_a_page_loads"]),
    ("$ reward: {name: insightface", &["tests/documentation.rs::every_configuration_of_a_page_loads"]),
    ("$ data: {metadata:", &["tests/documentation.rs::every_configuration_of_a_page_loads"]),
    (
        "$ evaluation: {metadata:",
        &[
            "tests/documentation.rs::every_configuration_of_a_page_loads",
            "tests/runs.rs::sample_prompts_use_the_same_noise_and_appear_in_the_report",
        ],
    ),
    ("$ training: {learning_rate:", &["tests/documentation.rs::every_configuration_of_a_page_loads"]),
    ("$ steps: 200", &["tests/documentation.rs::every_configuration_of_a_page_loads"]),
    (
        "files, data, faces in the references; memory, time",
        &[
            "tests/check.rs::check_refuses_the_runs_that_run_refuses",
            "tests/check.rs::check_lists_all_problems_in_one_round_and_writes_nothing",
            "tests/golden.rs::checks_say_as_before",
        ],
    ),
    (
        "$ roll run --config real.yaml",
        &[
            "roll-cli/src/launch.rs::every_launcher_tells_the_place_of_a_process",
            "tests/processes.rs::four_ranks_train_as_one_and_rank_0_writes",
        ],
    ),
    (
        "Wan2.2 I2V, T2V (A14B), TI2V-5B; Wan2.1",
        &[
            "tests/model_kinds.rs::every_model_trains_resumes_and_generates",
            "roll-models/wan2_2/src/plan/tests.rs::published_models_have_their_published_sizes",
            "tests/fixtures/dit_tiny_i2v",
            "tests/fixtures/dit_tiny_t2v",
            "tests/fixtures/dit_tiny_ti2v5b",
            "tests/fixtures/vae21_tiny",
            "tests/fixtures/vae22_tiny",
            "tests/fixtures/umt5_tiny",
        ],
    ),
    (
        "face identity, CLIP, PickScore, HPSv2",
        &[
            "tests/face_reward.rs::score_gradients_match_central_differences_with_every_option",
            "roll-rewards/scorers/src/clip/tests.rs::gradients_of_every_score_match_finite_differences",
            "roll-rewards/scorers/src/clip/tests.rs::towers_of_the_published_sizes_are_those_of_transformers",
            concat!(
                "roll-rewards/scorers/src/clip/tests.rs::",
                "weights_of_open_clip_score_as_hpsv2_and_a_pth_head_as_the_aesthetic_predictor"
            ),
        ],
    ),
    (
        "any ONNX network, pixels, a PyTorch function, a plugin; or a sum of them",
        &[
            "roll-rewards/scorers/src/onnx_reward/tests.rs::exported_networks_match_pytorch_values_and_gradients",
            "roll-rewards/scorers/src/pixels/sharpness.rs::gradient_matches_finite_differences_for_every_target",
            concat!(
                "roll-rewards/scorers/src/remote/python_tests.rs::",
                "autograd_gradient_matches_finite_differences_as_program_and_service"
            ),
            "tests/plugins.rs::a_third_party_reward_trains",
            "tests/plugins.rs::policy_gradient_plugins_reproduce_the_bits",
        ],
    ),
    (
        "questions to a vision language model, votes of people, a service, a program",
        &[
            "tests/judge.rs::a_killed_run_resumes_bit_for_bit_with_the_answers_that_it_had",
            "tests/vote.rs::a_run_that_waits_for_votes_stops_with_a_checkpoint_and_resumes_bit_for_bit",
            "roll-rewards/scorers/src/remote/http_tests.rs::service_receives_options_and_returns_gradients",
            "roll-rewards/scorers/src/remote/command_tests.rs::python_example_passes_check_reward",
        ],
    ),
    (
        "| [`flow_matching`]",
        &[
            "tests/flow_matching.rs::lora_and_full_training_learn_a_clip",
            "tests/flow_matching.rs::flow_matching_needs_no_reward",
        ],
    ),
    (
        "Qwen2 to 3, Llama, Mistral, Gemma 2 and 3, Phi-3",
        &[
            "tests/agent_prompts.rs::prompts_are_those_of_the_families_token_by_token",
            "tests/fixtures/qwen2_tiny",
            "tests/fixtures/qwen3_tiny",
            "tests/fixtures/llama_tiny",
            "tests/fixtures/mistral_tiny",
            "tests/fixtures/gemma2_tiny",
            "tests/fixtures/gemma3_tiny",
            "tests/fixtures/phi3_tiny",
        ],
    ),
    (
        "safetensors or GGUF",
        &["tests/fixtures/gguf_smollm2", "roll-models/causal_lm/src/gguf_tests.rs::phi_3_matches_its_directory"],
    ),
    (
        "questions with answers, FrozenLake, Sokoban, a program of yours, an agent as it is, a plugin",
        &[
            "roll-algos/agents/src/environments/questions/tests.rs::held_out_sums_are_never_trained_on_in_any_order_of_their_numbers",
            "roll-algos/agents/src/environments/agent/tests.rs::a_program_plays_its_episode_through_the_endpoint",
            "roll-algos/agents/src/environments/frozen_lake.rs::every_map_can_be_crossed",
            "roll-algos/agents/src/environments/sokoban/mod.rs::every_level_can_be_solved_and_none_is_solved_at_first",
            "tests/agent.rs::an_environment_may_be_a_separate_process",
            "tests/hostile_plugin/tests/it/contract.rs::p1_answers_match_those_of_linked_components",
        ],
    ),
    (
        "| [`sft`]",
        &[
            "tests/agent.rs::supervised_training_lowers_the_loss_and_its_weights_answer",
            "tests/resume.rs::resume_of_supervised_training_is_bit_exact",
        ],
    ),
    (
        "pairs of answers, of which one is preferred (DPO, IPO, SimPO)",
        &[
            "tests/fixtures/dpo_loss",
            "roll-algos/agents/src/dpo/tests.rs::a_preference_is_learnt_and_holds_for_prompts_that_were_not_trained_on",
            "tests/resume.rs::resume_of_preferences_is_bit_exact",
        ],
    ),
    (
        "ZeRO stages 0 to 3",
        &[
            "roll-backends/src/strategy/zero/tests.rs::all_stages_compute_the_same_bits",
            "tests/processes.rs::sharded_weights_train_save_and_resume_as_whole_ones",
        ],
    ),
    (
        "under `torchrun`, Slurm or `mpirun`",
        &[
            "roll-cli/src/launch.rs::every_launcher_tells_the_place_of_a_process",
            "roll-cli/src/launch.rs::slurm_needs_no_address",
            "roll-cli/src/launch.rs::jobs_of_open_mpi_on_one_machine_need_no_address",
        ],
    ),
    (
        "A run that is killed at any instant resumes bit for bit",
        &[
            "tests/resume.rs::resume_after_a_kill_at_any_instant_is_bit_exact",
            "tests/resume.rs::resume_is_bit_exact_for_every_algorithm_and_strategy",
            "tests/resume.rs::resume_of_an_agent_is_bit_exact",
        ],
    ),
    (
        "LoRA files for ComfyUI, diffusers, PEFT, DiffSynth, kohya, without loss",
        &[
            "roll-models/network/src/lora/tests.rs::conversions_between_all_conventions_are_bit_exact",
            "tests/lora_files.rs::lora_conversions_round_trip",
            "tests/lora_files.rs::diffusers_and_peft_load_what_is_written",
        ],
    ),
    (
        "ROLL's configuration files",
        &[
            "tests/reference_config.rs::a_reward_fl_configuration_of_roll_runs_unchanged",
            "tests/reference_config.rs::agentic_configurations_of_roll_run_unchanged",
        ],
    ),
    (
        "plugins in Rust, C.",
        &[
            "tests/plugins.rs::plugins_reproduce_the_bits_of_built_in_components",
            "tests/hostile_plugin/tests/it/files.rs::loads_a_reward_in_c",
        ],
    ),
    (
        "Evaluation on unseen clips with confidence intervals and check rewards",
        &[
            "roll-train/src/statistics.rs::the_interval_contains_the_mean_and_shrinks_with_more_pairs",
            "tests/runs.rs::suspected_reward_hacking_warns_once_and_stops_the_run",
        ],
    ),
    (
        "a report in one HTML file, or live (`roll watch`)",
        &[
            "tests/report.rs::a_browser_shows_the_curves_and_videos_of_reports",
            "tests/watch.rs::the_page_follows_a_run_from_before_its_first_step_to_its_end",
        ],
    ),
    (
        "TensorBoard (`tensorboard --logdir runs`)",
        &[
            "roll-train/src/metrics/tensorboard.rs::records_read_back",
            "tests/runs.rs::track_with_selects_the_destinations_of_metrics",
        ],
    ),
    (
        "wandb, trackio or MLflow by [five lines of Python]",
        &["tests/documentation.rs::programs_for_other_trackers_log_every_step"],
    ),
    (
        "returns its value and a *pullback*",
        &[
            "tests/hostile_plugin/tests/it/files.rs::check_reward_passes_good_plugins_and_finds_a_wrong_gradient",
            "roll-rewards/scorers/src/onnx_reward/tests.rs::exported_networks_match_pytorch_values_and_gradients",
        ],
    ),
    (
        "free to keep, recompute or offload its activations",
        &[
            "roll-backends/src/ops/tests/attention.rs::gradients_of_a_kept_result_are_those_of_a_recomputation",
            "roll-backends/src/offload/overlapped.rs::wrapped_tensors_keep_bits_dtype_and_shape",
        ],
    ),
    ("[Design](docs/src/design.md) and [decisions]", &["tests/documentation.rs::every_link_has_a_target"]),
    (
        "A Rust program describes a run with `roll_train::Run::builder`",
        &["tests/own_reward.rs::a_rust_program_trains_with_a_reward_of_its_own"],
    ),
];

/// Parts of the page that no test of this repository can show, and why.
const UNTESTED: [(&str, &str); 16] = [
    ("# roll", "the title"),
    ("Post-train generative models against rewards, in Rust.", "the sum of what follows"),
    ("![reference, before, after]", "a picture"),
    ("*The built-in demo, a toy of 3.6 million weights", "the caption of that picture, as measured"),
    ("Rows: data set, base model, trained model", "the caption of that picture, as measured"),
    ("![prompts, base, trained]", "a picture and its caption, as measured"),
    ("No one has trained a 14B model", "a fact, not a promise"),
    ("A step of its shapes with random weights took", "measured on an H200: bench/results/gpu"),
    ("| `--backend` | for |", "the head of a table"),
    ("News: ", "history; CHANGELOG.md has the tests' subjects"),
    ("You need Rust 1.95", "the first build of .ci/run needs it: rust-toolchain.toml"),
    ("The first build takes", "measured"),
    ("$ cargo install --path roll-cli", "scripts/try-release installs"),
    ("GPUs need a build with `--features libtorch`", "builds of .github/workflows, and scripts/gpu-check"),
    ("| `algo.name` | models |", "the head of a table"),
    ("$ roll check --config real.yaml", "its arguments; what it checks is a promise above"),
];

/// Sentences, rows, headings apart, and lines of code blocks (after `$`) of the page, up to the comparison.
fn units(page: &str) -> Vec<String> {
    let page = page.split("\n## Compared with others").next().unwrap();
    let (mut units, mut paragraph, mut block) = (Vec::new(), String::new(), None);
    let end = |paragraph: &mut String, units: &mut Vec<String>| {
        let text = std::mem::take(paragraph);
        let mut rest = text.trim();
        while let Some(at) = rest.find(". ") {
            units.push(rest[..=at].trim().to_string());
            rest = rest[at + 2..].trim();
        }
        if !rest.is_empty() {
            units.push(rest.to_string());
        }
    };
    for line in page.lines() {
        if let Some(info) = line.strip_prefix("```") {
            end(&mut paragraph, &mut units);
            block = match block {
                None => Some(info.to_string()),
                Some(_) => None,
            };
        } else if let Some(info) = &block {
            if (info.starts_with("sh") || info == "yaml") && !line.trim().is_empty() {
                units.push(format!("$ {line}"));
            }
        } else if line.starts_with('|') {
            end(&mut paragraph, &mut units);
            if !line.starts_with("|---") {
                units.push(line.to_string());
            }
        } else if line.is_empty() || line.starts_with("- ") || line.starts_with("## ") {
            end(&mut paragraph, &mut units);
            if line.starts_with("- ") {
                paragraph.push_str(line);
            }
        } else {
            paragraph.push(' ');
            paragraph.push_str(line.trim());
        }
    }
    end(&mut paragraph, &mut units);
    units
}

/// Whether a file has the test `FILE::NAME`, or a directory is a parity case.
fn exists(test: &str) -> bool {
    let Some((file, name)) = test.split_once("::") else {
        return root().join(test).join("config.json").exists();
    };
    let text = std::fs::read_to_string(root().join(file)).unwrap_or_default();
    let Some(before) = text.split_once(&format!("fn {name}(")).map(|(before, _)| before) else { return false };
    before.trim_end().rsplit('\n').take(4).any(|line| line.trim() == "#[test]")
}

#[test]
fn every_promise_of_the_readme_has_a_test() {
    let page = std::fs::read_to_string(root().join("README.md")).unwrap();
    let units = units(&page);
    let mut problems = Vec::new();
    for (part, tests) in PROMISES {
        if !units.iter().any(|unit| unit.contains(part)) {
            problems.push(format!("README.md does not say `{part}`: change or remove the entry"));
        }
        let missing = tests.iter().filter(|test| !exists(test));
        problems.extend(missing.map(|test| format!("{test}, of `{part}`, does not exist")));
        assert!(!tests.is_empty(), "`{part}` has no test");
    }
    for (part, reason) in UNTESTED {
        if !units.iter().any(|unit| unit.contains(part)) {
            problems.push(format!("README.md does not say `{part}` ({reason}): remove the entry"));
        }
    }
    let parts: Vec<&str> = PROMISES.iter().map(|(part, _)| *part).chain(UNTESTED.map(|(part, _)| part)).collect();
    for unit in &units {
        if !parts.iter().any(|part| unit.contains(part)) {
            problems.push(format!("no entry for `{unit}`: name its tests in `PROMISES`"));
        }
    }
    let different: BTreeSet<&&str> = parts.iter().collect();
    assert_eq!(different.len(), parts.len(), "a part is twice in the tables");
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn units_of_a_page_are_its_sentences_rows_and_commands() {
    let page = "# t\n\nOne a\nb. Two.\n\n| x | y |\n|---|---|\n| `z` | 1. 2 |\n\n```sh run\nroll a\n```\n\n```rust\n\
                let x;\n```\n\
                ## H\n- first\n  goes on. End\n- second\n\n## Compared with others\n\nno\n";
    let expected =
        ["# t", "One a b.", "Two.", "| x | y |", "| `z` | 1. 2 |", "$ roll a", "- first goes on.", "End", "- second"];
    assert_eq!(units(page), expected);
    assert!(exists("tests/promises.rs::every_promise_of_the_readme_has_a_test"));
    assert!(!exists("tests/promises.rs::units") && !exists("tests/none.rs::a") && !exists("tests/fixtures/none"));
}
