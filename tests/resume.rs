//! Runs that are stopped (by a kill at any instant, by a signal, by a full disk) and resumed. Their files must read as
//! if they had never stopped.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use roll_train::checkpoint;
use rustix::process::{Pid, Signal, kill_process};

use crate::program::{self, with_default_signals};
use crate::world::{PICTURES, SETTINGS, SHORT, World, checkpoint_file, fails, stderr_text};

/// Settings of `reward_fl` with the fewest denoising steps ([`SHORT`]).
const REWARD_FL: [&str; 6] =
    ["reward.name=brightness", SHORT[0], SHORT[1], SHORT[2], SHORT[3], "training.learning_rate=1e-3"];
/// Trains both experts at two random steps; the gradient leaps from one to the other.
const LEAP: [&str; 5] = [
    "model.trainable_models=dit,dit2",
    "algo.num_inference_steps=5",
    "algo.mid_timestep=0",
    "algo.final_timestep=4",
    "algo.trained_steps.leap.discount=0.5",
];
/// Trains two random steps, with no gradient from a step to the latents before it (`stop_gradient`).
const DETACHED: [&str; 5] = [
    "algo.num_inference_steps=5",
    "algo.mid_timestep=0",
    "algo.final_timestep=4",
    "algo.trained_steps.random=2",
    "algo.stop_gradient=true",
];
/// Trains two short steps with known noise.
const DIRECT: [&str; 4] = [
    "algo.num_inference_steps=5",
    "algo.mid_timestep=0",
    "algo.final_timestep=4",
    "algo.trained_steps.direct.step=0.05",
];
const FLOW_MATCHING: [&str; 3] = ["algo.name=flow_matching", "sample_steps=0", "training.learning_rate=1e-3"];
const DIFFUSION_NFT: [&str; 8] = [
    "algo.name=diffusion_nft",
    "algo.num_inference_steps=3",
    "algo.group_size=3",
    "algo.data_weight=0.5",
    "algo.reward_gradient.weight=0.1",
    "reward.name=brightness",
    "sample_steps=0",
    "training.learning_rate=1e-3",
];
const FLOW_GRPO: [&str; 7] = [
    "algo.name=flow_grpo",
    "algo.num_inference_steps=4",
    "algo.group_size=3",
    "algo.updates_per_step=2",
    "reward.name=brightness",
    "sample_steps=0",
    "training.learning_rate=1e-3",
];
/// A window after a prefix that the videos of a prompt share.
const PREFIX: [&str; 4] =
    ["algo.same_latent=true", "algo.share_prefix=true", "algo.window=1", "algo.step_weight=noise"];
const ADAPTER: &str = "adapter.safetensors";
const OPTIMIZER: &str = "trainer/optimizer.safetensors";
/// The files of a checkpoint that are compared.
const COMPARED: [&str; 2] = [ADAPTER, OPTIMIZER];
const AVERAGED_COMPARED: [&str; 3] = ["averaged/adapter.safetensors", ADAPTER, OPTIMIZER];
const LEAP_COMPARED: [&str; 3] = ["adapter_high_noise.safetensors", "adapter_low_noise.safetensors", OPTIMIZER];

/// Asserts that two runs ended alike: metrics, weights and optimizer bit by bit, and the summary.
pub(crate) fn assert_alike(world: &World, run: &str, uninterrupted: &str, step: u64, files: &[&str]) {
    let (found, expected) = (world.metrics(run), world.metrics(uninterrupted));
    assert_eq!(found.len(), expected.len(), "lines of metrics of {run}");
    for (found, expected) in found.iter().zip(&expected) {
        let differing = |key: &&String| found.get(key.as_str()) != expected.get(key.as_str());
        let keys: Vec<_> = found.as_object().unwrap().keys().filter(differing).collect();
        assert!(keys.is_empty(), "{run}: {keys:?} differ in\n{found}\n{expected}");
        assert_eq!(found, expected, "keys of the metrics of {run}");
    }
    for file in files {
        let read = |out: &str| checkpoint_file(&world.path(out), step, file);
        assert!(read(run) == read(uninterrupted), "{file} of {run}");
    }
    let summary = |out: &str| {
        let mut summary = world.summary(out);
        summary.as_object_mut().unwrap().remove("adapter"); // a path in the run directory
        summary
    };
    assert_eq!(summary(run), summary(uninterrupted), "summary of {run}");
}

#[test]
fn resume_is_bit_exact_for_every_algorithm_and_strategy() {
    let world = World::new(3);
    let cases: [(&str, &[&str], &[&str], &[&str]); 16] = [
        ("reward_fl-single", &REWARD_FL, &["training.lr_scheduler_type=cosine"], &COMPARED),
        ("reward_fl-zero", &REWARD_FL, &["strategy.name=zero", "strategy.stage=2"], &COMPARED),
        ("reward_fl-leap", &REWARD_FL, &LEAP, &LEAP_COMPARED),
        ("reward_fl-detached", &REWARD_FL, &DETACHED, &COMPARED),
        ("reward_fl-direct", &REWARD_FL, &DIRECT, &COMPARED),
        ("reward_fl-average", &REWARD_FL, &["training.average=0.9", "strategy.name=zero"], &AVERAGED_COMPARED),
        ("reward_fl-start", &REWARD_FL, &["model.lora_checkpoint=first"], &COMPARED),
        ("reward_fl-start-zero", &REWARD_FL, &["model.lora_checkpoint=first", "strategy.name=zero"], &COMPARED),
        (
            "diffusion_nft-single",
            &DIFFUSION_NFT,
            &["evaluation.train_samples=1", "training.average=0.9"],
            &AVERAGED_COMPARED,
        ),
        ("diffusion_nft-zero", &DIFFUSION_NFT, &["strategy.name=zero", "strategy.stage=2"], &COMPARED),
        ("diffusion_nft-awm", &DIFFUSION_NFT, &["algo.loss=awm", "algo.updates_per_step=2"], &COMPARED),
        ("flow_grpo-single", &FLOW_GRPO, &["evaluation.train_samples=1"], &COMPARED),
        ("flow_grpo-prefix", &FLOW_GRPO, &PREFIX, &COMPARED),
        ("flow_matching-single", &FLOW_MATCHING, &["algo.prompt_dropout=0.5"], &COMPARED),
        ("flow_matching-windows", &FLOW_MATCHING, &["data.num_frames=1", "data.windows={uniform: 2}"], &COMPARED),
        (
            "flow_matching-full",
            &FLOW_MATCHING,
            &["strategy.name=zero", "model.lora_rank=0", "model.trainable_models=dit2", "training.average=0.5"],
            &["diffusion_pytorch_model.safetensors", "averaged/diffusion_pytorch_model.safetensors", OPTIMIZER],
        ),
    ];
    world.train("first", 1, &REWARD_FL);
    for (name, algorithm, settings, files) in cases {
        let settings = [algorithm, settings].concat();
        let (uninterrupted, cut_off) = (format!("{name}-uninterrupted"), format!("{name}-cut_off"));
        world.train(&uninterrupted, 3, &settings);
        world.train(&cut_off, 3, &[&settings[..], &["save_steps=2"]].concat());
        // As if it had been killed after its second step.
        remove_the_end(&world.path(&cut_off), "step-000003");
        world.done(&["run", "--resume", &cut_off]);
        assert_alike(&world, &cut_off, &uninterrupted, 3, files);
    }
}

/// `roll run` of the language model that is built in.
fn language(world: &World, algorithm: &str, out: &str, settings: &[&str]) -> Command {
    let mut command = world.command(&["run", "--algo", algorithm, "--model", "causal_lm", "--out", out]);
    for setting in settings {
        command.args(["--set", setting]);
    }
    command
}

/// Makes it seem that a run was killed before its last checkpoint.
pub(crate) fn remove_the_end(run: &Path, last: &str) {
    std::fs::remove_dir_all(run.join("checkpoints").join(last)).unwrap();
    std::fs::remove_file(run.join("summary.json")).unwrap();
}

#[test]
fn resume_of_an_agent_is_bit_exact() {
    let world = World::new(0);
    let short = [
        "steps=4",
        "algo.num_env_groups=2",
        "algo.group_size=4",
        "algo.max_actions_per_traj=3",
        "algo.val_batch_size=4",
        "evaluation.every=3",
    ];
    let (adapter, full) = (["adapter_model.safetensors", OPTIMIZER], ["model.safetensors", OPTIMIZER]);
    let averaged = ["averaged/adapter_model.safetensors", adapter[0], OPTIMIZER];
    let cases: [(&str, &[&str], &[&str]); 4] = [
        ("ahead", &["algo.async_generation_ratio=1", "env.is_slippery=true", "training.average=0.9"], &averaged),
        ("adapter", &["env.is_slippery=true", "algo.ppo_epochs=2"], &adapter),
        ("critic", &["algo.adv_estimator=gae", "algo.critic_epochs=2"], &adapter),
        ("full", &["model.lora_rank=0", "training.lr_scheduler_type=cosine"], &full),
    ];
    let episodes = |out: &str| std::fs::read_to_string(world.path(out).join("trajectories.jsonl")).unwrap();
    for (name, settings, files) in cases {
        let settings = [&short[..], settings].concat();
        let [uninterrupted, cut_off, signalled] =
            ["uninterrupted", "cut_off", "signalled"].map(|how| format!("{name}-{how}"));
        for (out, more) in [(&uninterrupted, &[][..]), (&cut_off, &["save_steps=2"][..])] {
            let output = language(&world, "agentic_ppo", out, &[&settings[..], more].concat()).output().unwrap();
            assert!(output.status.success(), "{}", stderr_text(&output));
        }
        // As if it had been killed after its second step.
        remove_the_end(&world.path(&cut_off), "step-000004");
        let output = signal_at(language(&world, "agentic_ppo", &signalled, &settings), "step 1/", &[Signal::TERM]);
        fails(&output, 130, &["interrupted", &format!("roll run --resume {signalled}")]);
        // Killed after its first validation, before its first step: the validation is not done again.
        let killed = format!("{name}-killed");
        let mut child = language(&world, "agentic_ppo", &killed, &settings).stderr(Stdio::null()).spawn().unwrap();
        let validation = world.path(&killed).join("evaluations/step-000000/validation.json");
        while !validation.exists() {
            assert!(child.try_wait().unwrap().is_none());
            std::thread::sleep(Duration::from_micros(100));
        }
        kill(&mut child);
        world.done(&["run", "--resume", &killed]);
        assert_alike(&world, &killed, &uninterrupted, 4, files);
        assert_eq!(episodes(&killed), episodes(&uninterrupted), "episodes of {killed}");
        for out in [&cut_off, &signalled] {
            let done = checkpoint::newest_whole(&world.path(out).join("checkpoints")).unwrap().unwrap().step();
            assert!((1..4).contains(&done), "{done} steps of {out}");
            world.done(&["run", "--resume", out]);
            assert_alike(&world, out, &uninterrupted, 4, files);
            assert_eq!(episodes(out), episodes(&uninterrupted), "episodes of {out}");
        }
        let summary = world.summary(&uninterrupted);
        assert!(summary["success_before"].is_number() && world.metrics(&uninterrupted).len() > 4, "{summary}");
    }
}

/// Writes seven conversations to `talk.jsonl`.
fn write_conversations(world: &World) {
    let line = |i: usize| {
        let messages = [("user", format!("P_ {i}")), ("assistant", format!("at {}", i * i))];
        let messages = messages.map(|(role, content)| serde_json::json!({ "role": role, "content": content }));
        serde_json::json!({ "messages": messages }).to_string() + "\n"
    };
    std::fs::write(world.path("talk.jsonl"), (0..7).map(line).collect::<String>()).unwrap();
}

#[test]
fn resume_of_supervised_training_is_bit_exact() {
    let world = World::new(0);
    write_conversations(&world);
    // Two passes and a half, of batches that do not divide the lines.
    let settings =
        ["steps=6", "save_steps=3", "algo.data=talk.jsonl", "algo.batch_size=3", "training.learning_rate=1e-3"];
    for out in ["uninterrupted", "cut_off"] {
        let output = language(&world, "sft", out, &settings).output().unwrap();
        assert!(output.status.success(), "{}", stderr_text(&output));
    }
    remove_the_end(&world.path("cut_off"), "step-000006");
    world.done(&["run", "--resume", "cut_off"]);
    assert_alike(&world, "cut_off", "uninterrupted", 6, &["adapter_model.safetensors", OPTIMIZER]);
    let metrics = world.metrics("uninterrupted");
    assert_ne!(metrics[0]["actor/loss"], metrics[5]["actor/loss"]);
}

/// Writes seven pairs to `pairs.jsonl`.
fn write_preferences(world: &World) {
    let line = |i: usize| {
        let [prompt, chosen, rejected] = [format!("P_ {i}"), "at goal".into(), format!("at {}", i * i)];
        serde_json::json!({ "prompt": prompt, "chosen": chosen, "rejected": rejected }).to_string() + "\n"
    };
    std::fs::write(world.path("pairs.jsonl"), (0..7).map(line).collect::<String>()).unwrap();
}

#[test]
fn resume_of_preferences_is_bit_exact() {
    let world = World::new(0);
    write_preferences(&world);
    // Two passes and a half: after the resume, the reference of earlier pairs is that of the checkpoint.
    let settings = [
        "steps=6",
        "save_steps=3",
        "algo.data=pairs.jsonl",
        "algo.val_data=pairs.jsonl",
        "algo.batch_size=3",
        "algo.micro_batch_size=2",
        "training.learning_rate=1e-2",
    ];
    for out in ["uninterrupted", "cut_off"] {
        let output = language(&world, "dpo", out, &settings).output().unwrap();
        assert!(output.status.success(), "{}", stderr_text(&output));
    }
    remove_the_end(&world.path("cut_off"), "step-000006");
    world.done(&["run", "--resume", "cut_off"]);
    assert_alike(&world, "cut_off", "uninterrupted", 6, &["adapter_model.safetensors", OPTIMIZER]);
    let metrics = world.metrics("uninterrupted");
    assert_ne!(metrics[0]["actor/loss"], metrics[5]["actor/loss"]);
}

#[test]
fn a_longer_run_keeps_the_first_evaluation() {
    let world = World::new(3);
    let settings = [&REWARD_FL[..], &["evaluation.train_samples=2"]].concat();
    world.train("run", 2, &settings);
    let before = world.summary("run");
    assert!(before["train_before"].is_number() && before["train_after"].is_number(), "{before}");
    world.done(&["run", "--resume", "run", "--steps", "4"]);
    let after = world.summary("run");
    for key in ["train_before", "first", "train_clips"] {
        assert_eq!(after[key], before[key], "{key}");
    }
    assert_ne!(after["train_after"], before["train_after"]);
    assert_eq!(after["steps"], 4);
    // A run that is over stays so, and says the same again.
    world.done(&["run", "--resume", "run"]);
    assert_eq!(world.summary("run"), after);
    fails(&world.roll(&["run", "--resume", "run", "--steps", "3"]), 2, &["4 steps already"]);
    let rank = world.roll(&["run", "--resume", "run", "--steps", "5", "--set", "model.lora_rank=8"]);
    fails(&rank, 2, &["with `model.lora_rank` changed from 2 to 8"]);
    let other = world.roll(&["run", "--resume", "run", "--algo", "flow_matching"]);
    fails(&other, 2, &["`algo.name`", "begun with `reward_fl`", "model.lora_checkpoint=run"]);
}

/// One kind of run that is killed: its name, its command, and the files of a checkpoint that are compared.
struct KilledRun {
    name: &'static str,
    command: fn(&World, &str) -> Command,
    files: [&'static str; 2],
}

/// Steps of the runs that are killed.
const STEPS: u64 = 6;
const VIDEO: [&str; 4] = ["save_steps=1", "max_ckpt_to_keep=2", "evaluation.train_samples=1", "evaluation.every=4"];
const LANGUAGE: [&str; 3] = ["steps=6", "save_steps=1", "max_ckpt_to_keep=2"];
const AGENT: [&str; 5] = [
    "algo.num_env_groups=2",
    "algo.group_size=4",
    "algo.max_actions_per_traj=3",
    "algo.val_batch_size=4",
    "evaluation.every=4",
];
const PEFT: [&str; 2] = ["adapter_model.safetensors", OPTIMIZER];

/// A run of a diffusion model: `model` is [`SETTINGS`] or [`PICTURES`].
fn video(world: &World, model: &[&str], out: &str, algorithm: &[&str]) -> Command {
    world.training_of(model, out, STEPS, &[algorithm, &VIDEO].concat())
}

/// Every algorithm, one of them on three ranks, and the models.
const KILLED: [KilledRun; 10] = [
    KilledRun { name: "reward_fl", command: |world, out| video(world, &SETTINGS, out, &REWARD_FL), files: COMPARED },
    KilledRun {
        name: "flow_matching",
        command: |world, out| video(world, &SETTINGS, out, &FLOW_MATCHING),
        files: COMPARED,
    },
    KilledRun {
        name: "diffusion_nft",
        command: |world, out| video(world, &SETTINGS, out, &DIFFUSION_NFT),
        files: COMPARED,
    },
    KilledRun { name: "flow_grpo", command: |world, out| video(world, &SETTINGS, out, &FLOW_GRPO), files: COMPARED },
    KilledRun {
        name: "agentic_ppo",
        command: |world, out| language(world, "agentic_ppo", out, &[&LANGUAGE[..], &AGENT].concat()),
        files: PEFT,
    },
    KilledRun {
        name: "sft",
        command: |world, out| {
            let data = ["algo.data=talk.jsonl", "algo.batch_size=3", "training.learning_rate=1e-3"];
            language(world, "sft", out, &[&LANGUAGE[..], &data].concat())
        },
        files: PEFT,
    },
    KilledRun {
        name: "dpo",
        command: |world, out| {
            let data = ["algo.data=pairs.jsonl", "algo.batch_size=3", "training.learning_rate=1e-3"];
            language(world, "dpo", out, &[&LANGUAGE[..], &data].concat())
        },
        files: PEFT,
    },
    KilledRun {
        name: "reward_fl on three ranks",
        command: |world, out| {
            let ranks = ["strategy.name=zero", "strategy.stage=2", "ranks=3"];
            video(world, &SETTINGS, out, &[&REWARD_FL[..], &ranks].concat())
        },
        files: COMPARED,
    },
    KilledRun {
        name: "reward_fl of z_image",
        command: |world, out| video(world, &PICTURES, out, &REWARD_FL),
        files: COMPARED,
    },
    KilledRun {
        name: "flow_grpo of z_image",
        command: |world, out| video(world, &PICTURES, out, &FLOW_GRPO),
        files: COMPARED,
    },
];

impl KilledRun {
    /// Starts the run, or resumes it.
    fn start(&self, world: &World, out: &str) -> Child {
        spawn(world, out, || (self.command)(world, out))
    }

    /// Starts a run one to three times, each time to kill it, then lets it end and compares it with the run
    /// `uninterrupted`, which took `length`. Returns how many were killed, and how many of those while they wrote a
    /// checkpoint.
    fn check(&self, world: &World, uninterrupted: &str, length: Duration, random: &mut ChaCha8Rng) -> [usize; 2] {
        let (out, [mut killed, mut writing]) = ("run", [0, 0]);
        let run = world.path(out);
        for _ in 0..random.random_range(1..=3) {
            let mut child = self.start(world, out);
            let at = random.random_range(0.0..1.0);
            let hit = match random.random_bool(0.5) {
                true => kill_after(&mut child, length.mul_f64(at)),
                false => kill_while_writing(&mut child, &run, Duration::from_secs_f64(4e-3 * at)),
            };
            killed += usize::from(hit);
            // The checkpoint was being written, or an earlier kill left it.
            writing += usize::from(hit && has_unfinished_checkpoint(&run));
        }
        let output = self.start(world, out).wait_with_output().unwrap();
        assert!(output.status.success(), "{}: {}", self.name, stderr_text(&output));
        assert_alike(world, out, uninterrupted, STEPS, &self.files);
        let kept = checkpoint::list(&run.join("checkpoints")).unwrap();
        assert_eq!(kept.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [STEPS - 1, STEPS], "{}", self.name);
        assert!(!has_unfinished_checkpoint(&run), "{} leaves an unfinished checkpoint", self.name);
        assert!(run.join("report.html").is_file());
        std::fs::remove_dir_all(run).unwrap();
        [killed, writing]
    }
}

/// Kills the runs of [`KILLED`] in turn, until `ROLL_KILLS` kills (6 unless set) have hit.
#[test]
fn resume_after_a_kill_at_any_instant_is_bit_exact() {
    let kills: usize = std::env::var("ROLL_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(6);
    let world = World::new(3);
    write_conversations(&world);
    write_preferences(&world);
    world.done(&["init-tiny", "pictures", "--kind", "z_image"]);
    let seed = std::process::id();
    eprintln!("seed {seed}");
    let mut random = ChaCha8Rng::seed_from_u64(seed.into());
    let (mut killed, mut writing, mut lengths) = (0, 0, [None; KILLED.len()]);
    let mut trials = 0;
    while killed < kills {
        let index = (seed as usize + trials) % KILLED.len();
        let (run, uninterrupted) = (&KILLED[index], format!("uninterrupted-{index}"));
        let length = *lengths[index].get_or_insert_with(|| {
            let started = Instant::now();
            let output = run.start(&world, &uninterrupted).wait_with_output().unwrap();
            assert!(output.status.success(), "{}: {}", run.name, stderr_text(&output));
            started.elapsed()
        });
        let [hit, in_writing] = run.check(&world, &uninterrupted, length, &mut random);
        eprintln!("{}: {hit} kills, {in_writing} of them while a checkpoint was written", run.name);
        (killed, writing, trials) = (killed + hit, writing + in_writing, trials + 1);
    }
    eprintln!("{killed} kills, {writing} of them while a checkpoint was written; all {trials} runs ended alike");
}

/// The files of a run.
struct RunFiles<'a>(&'a Path);

impl RunFiles<'_> {
    fn has(&self, file: &str) -> bool {
        self.0.join(file).exists()
    }

    /// Whether a folder holds at least that number of finished files.
    fn holds(&self, folder: &str, files: usize) -> bool {
        let entries = std::fs::read_dir(self.0.join(folder)).into_iter().flatten().flatten();
        entries.filter(|entry| !entry.file_name().to_string_lossy().starts_with('.')).count() >= files
    }
}

/// The name of a moment, and whether the files of a run show that it has come.
type Moment = (&'static str, fn(RunFiles<'_>) -> bool);
/// Moments of a run of six steps that evaluates three clips before the first step, after four steps and at the end.
const MOMENTS: [Moment; 13] = [
    ("the configuration is there", |run| run.has("config.yaml")),
    ("one clip is evaluated", |run| run.holds("evaluations/step-000000", 1)),
    ("two clips are evaluated", |run| run.holds("evaluations/step-000000", 2)),
    // The data set's clips are copied to `samples/reference` right after the evaluation, for people to look at. A process
    // that resumes a finished evaluation does not copy them. So if the previous kill prevented the copy, this moment never
    // comes, and the wait ends with the first step (`metrics.jsonl`).
    ("all are evaluated, and no step is done", |run| run.holds("samples/reference", 3) || run.has("metrics.jsonl")),
    ("the first step is done", |run| run.has("metrics.jsonl")),
    ("a checkpoint is being written", |run| has_unfinished_checkpoint(run.0)),
    ("a checkpoint waits for its evaluation", |run| run.has("checkpoints/step-000004/manifest.json")),
    ("a clip is evaluated in the middle", |run| run.holds("evaluations/step-000004", 1)),
    ("the evaluation is added", |run| run.has("checkpoints/step-000004/trainer/record-evaluated.json")),
    ("a clip is evaluated at the end", |run| run.holds("evaluations/step-000006", 1)),
    ("the summary is there", |run| run.has("summary.json")),
    ("the curves are there", |run| run.has("curves.svg")),
    ("the report is there", |run| run.has("report.html")),
];

#[test]
fn resume_after_a_kill_in_each_phase_is_bit_exact_and_repeats_no_clip() {
    let world = World::new(3);
    let settings =
        [&REWARD_FL[..], &["save_steps=1", "max_ckpt_to_keep=3", "evaluation.train_samples=3", "evaluation.every=4"]]
            .concat();
    world.train("uninterrupted", 6, &settings);
    let run = world.path("run");
    let mut random = ChaCha8Rng::seed_from_u64(17);
    let (mut killed, mut first_clip_written) = (0, None);
    for (name, has_come) in MOMENTS {
        let mut child = start(&world, "run", 6, &settings);
        while !has_come(RunFiles(&run)) && child.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_micros(100));
        }
        std::thread::sleep(Duration::from_micros(random.random_range(0..2000)));
        let hit = kill(&mut child);
        eprintln!("{}: {name}", if hit { "killed" } else { "over before" });
        killed += usize::from(hit);
        if run.join("evaluations/step-000000/train-000.json").exists() {
            let written = || std::fs::metadata(run.join("samples/before/train-000.mp4")).unwrap().modified().unwrap();
            first_clip_written.get_or_insert_with(written);
        }
    }
    // On a busy machine, some moments pass before they are seen.
    assert!(killed >= MOMENTS.len() / 2, "only {killed} kills");
    // As a job script does: resumes until a run succeeds, here at most three times.
    let succeeds = |_| start(&world, "run", 6, &settings).wait_with_output().unwrap().status.success();
    assert!((0..3).any(succeeds));
    assert_alike(&world, "run", "uninterrupted", 6, &COMPARED);
    let clip = |out: &str, name: &str| std::fs::read(world.path(out).join("samples").join(name)).unwrap();
    for name in ["before/train-001.mp4", "step-000004/train-000.mp4", "after/train-002.mp4"] {
        assert!(clip("run", name) == clip("uninterrupted", name), "{name}");
    }
    let last = std::fs::metadata(run.join("samples/before/train-000.mp4")).unwrap().modified().unwrap();
    assert_eq!(first_clip_written, Some(last), "the first clip was evaluated again");
    assert!(!run.join("evaluations").exists(), "leftovers");
}

#[test]
fn evaluations_of_another_seed_are_not_reused() {
    let world = World::new(3);
    let settings = [&REWARD_FL[..], &["evaluation.train_samples=3"]].concat();
    // On a busy machine, a run may be over before it is killed.
    loop {
        let mut child = start(&world, "run", 2, &settings);
        while !RunFiles(&world.path("run")).holds("evaluations/step-000000", 2) && child.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_micros(100));
        }
        if kill(&mut child) {
            break;
        }
        std::fs::remove_dir_all(world.path("run")).unwrap();
    }
    world.done(&["run", "--resume", "run", "--set", "seed=7"]);
    world.train("uninterrupted", 2, &[&settings[..], &["seed=7"]].concat());
    assert_alike(&world, "run", "uninterrupted", 2, &COMPARED);
}

/// Starts the run, or resumes it.
pub(crate) fn start(world: &World, out: &str, steps: u64, settings: &[&str]) -> Child {
    spawn(world, out, || world.training(out, steps, settings))
}

fn spawn(world: &World, out: &str, begin: impl Fn() -> Command) -> Child {
    let mut command = match world.path(out).join("config.yaml").exists() {
        true => world.command(&["run", "--resume", out]),
        false => begin(),
    };
    command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Kills the process after `delay`. Returns whether it was still running.
fn kill_after(child: &mut Child, delay: Duration) -> bool {
    std::thread::sleep(delay);
    kill(child)
}

/// Kills the process `delay` after it began to write a checkpoint. Returns whether it was still running.
fn kill_while_writing(child: &mut Child, run: &Path, delay: Duration) -> bool {
    while !has_unfinished_checkpoint(run) {
        if child.try_wait().unwrap().is_some() {
            return false;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    std::thread::sleep(delay);
    kill(child)
}

/// Kills the process. Returns whether the kill ended it: it had not ended before, and has no exit code.
pub(crate) fn kill(child: &mut Child) -> bool {
    let alive = child.try_wait().unwrap().is_none();
    child.kill().unwrap();
    child.wait().unwrap().code().is_none() && alive
}

/// Whether the run has an unfinished checkpoint: one that is being written, or that a kill left behind.
fn has_unfinished_checkpoint(run: &Path) -> bool {
    let entries = std::fs::read_dir(run.join("checkpoints")).into_iter().flatten().flatten();
    entries.into_iter().any(|entry| entry.file_name().to_string_lossy().starts_with(".step-"))
}

/// Waits until standard error says `what`, then sends the signals, and waits for the end.
fn signal_at(mut command: Command, what: &str, signals: &[Signal]) -> Output {
    let command = with_default_signals(&mut command);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut printed_text = String::new();
    while !printed_text.contains(what) {
        assert!(stderr.read_line(&mut printed_text).unwrap() > 0, "no {what} in: {printed_text}");
    }
    // The process may be gone already. Signals of one kind that come before it has had the first count once.
    for signal in signals {
        let _ = kill_process(Pid::from_child(&child), *signal);
        std::thread::sleep(Duration::from_millis(1));
    }
    std::io::Read::read_to_string(&mut stderr, &mut printed_text).unwrap();
    Output { status: child.wait().unwrap(), stdout: Vec::new(), stderr: printed_text.into_bytes() }
}

#[test]
fn a_signal_writes_a_checkpoint() {
    let world = World::new(3);
    let settings = [&REWARD_FL[..], &["evaluation.train_samples=2", "evaluation.every=5"]].concat();
    for (i, (moment, signal)) in [
        ("evaluating 2 clips before", Signal::TERM),
        ("step 1/", Signal::INT),
        ("evaluating 2 clips after step 5", Signal::TERM),
        ("step 6/", Signal::HUP),
    ]
    .into_iter()
    .enumerate()
    {
        let out = format!("run-{i}");
        let output = signal_at(world.training(&out, 400, &settings), moment, &[signal]);
        fails(&output, 130, &["interrupted", &format!("roll run --resume {out}")]);
        let run = world.path(&out);
        let done = checkpoint::newest_whole(&run.join("checkpoints")).unwrap().unwrap().step();
        assert!(!run.join("summary.json").exists() && done < 400);

        // At least two more steps, and past the evaluation after step 5.
        let steps = (done + 2).max(7);
        world.done(&["run", "--resume", &out, "--steps", &steps.to_string()]);
        let uninterrupted = format!("uninterrupted-{i}");
        world.train(&uninterrupted, steps, &settings);
        assert_alike(&world, &out, &uninterrupted, steps, &COMPARED);
    }
}

#[test]
fn a_second_ctrl_c_stops_at_once_and_other_signals_never_do() {
    let world = World::new(3);
    // Each may come before the process has had the one before; then they count once.
    let signals = [Signal::INT; 20];
    let output = signal_at(world.training("run", 4000, &REWARD_FL), "step 2/", &signals);
    assert_eq!(output.status.code(), Some(130), "{}", stderr_text(&output));
    assert!(!stderr_text(&output).contains("--resume"), "{}", stderr_text(&output));
    assert!(checkpoint::list(&world.path("run/checkpoints")).unwrap().is_empty());

    // Two buttons, a scheduler that sends one signal and then another, Ctrl-C and then the button: one stop each.
    let (int, term, hup, usr1) = (Signal::INT, Signal::TERM, Signal::HUP, Signal::USR1);
    for (i, signals) in [vec![usr1; 9], vec![int, usr1, usr1], vec![usr1, term, hup, int]].into_iter().enumerate() {
        let out = format!("run-{i}");
        let output = signal_at(world.training(&out, 4000, &REWARD_FL), "step 2/", &signals);
        fails(&output, 130, &["interrupted", &format!("roll run --resume {out}")]);
        let newest = checkpoint::newest_whole(&world.path(&out).join("checkpoints")).unwrap().unwrap();
        assert!((1..4000).contains(&newest.step()), "{signals:?}");
    }
}

#[test]
fn a_full_disk_keeps_older_checkpoints() {
    let world = World::new(3);
    let settings = [&REWARD_FL[..], &["max_ckpt_to_keep=1", "save_steps=1"]].concat();
    world.train("uninterrupted", 4, &settings);
    world.train("run", 2, &settings);
    let kept = checkpoint_file(&world.path("run"), 2, OPTIMIZER);
    // A limit on the size of files simulates a full disk: the metrics fit, the optimizer's state does not.
    let blocks = (kept.len() / 1024).min(100);
    let script = format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$0\" run --resume run --steps 4");
    let output = Command::new("bash")
        .args(["-c", &script, program::PATH])
        .envs([("ROLL_CACHE", "none"), ("ROLL_STATE", program::STATE)])
        .current_dir(world.path("."))
        .output()
        .unwrap();
    fails(&output, 1, &["writing the checkpoint of step 3", "step-000002 is untouched", ".safetensors"]);
    assert!(!has_unfinished_checkpoint(&world.path("run")), "what was half written is still there");
    assert!(checkpoint_file(&world.path("run"), 2, OPTIMIZER) == kept);
    world.done(&["run", "--resume", "run", "--steps", "4"]);
    assert_eq!(world.metrics("run"), world.metrics("uninterrupted"));
    let weights = |out: &str| checkpoint_file(&world.path(out), 4, ADAPTER);
    assert!(weights("run") == weights("uninterrupted"));
}

#[test]
fn rejects_concurrent_writers_and_runs_without_a_whole_checkpoint() {
    let world = World::new(3);
    world.train("run", 2, &REWARD_FL);
    let lock = std::fs::File::open(world.path("run")).unwrap();
    lock.lock().unwrap();
    fails(&world.roll(&["run", "--resume", "run", "--steps", "3"]), 2, &["another process"]);
    drop(lock);
    std::fs::write(world.path("run/checkpoints/step-000002").join(ADAPTER), "damaged").unwrap();
    fails(&world.roll(&["run", "--resume", "run", "--steps", "3"]), 2, &["no whole checkpoint"]);
    fails(&world.roll(&["run", "--resume", "nothing"]), 2, &["holds no run"]);
}
