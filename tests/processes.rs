//! `roll run` as several processes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use roll_train::checkpoint;

use crate::world::{SETTINGS, World};
use crate::{program, roll_yaml};

const PATIENCE: Duration = Duration::from_secs(300);

struct Job(World);

impl Job {
    fn new() -> Self {
        Self(World::new(6))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path(name)
    }

    fn command(&self, ranks: usize, arguments: &[&str], settings: &[&str]) -> Command {
        let reward_fl = ["reward.name=brightness", "algo.mid_timestep=1", "algo.final_timestep=1"];
        self.command_of(ranks, arguments, &[&reward_fl, settings].concat())
    }

    /// Starts a run of any algorithm.
    fn command_of(&self, ranks: usize, arguments: &[&str], settings: &[&str]) -> Command {
        let mut command = launch(ranks, "run");
        command.args(arguments).current_dir(self.path("."));
        let base = ["strategy.name=zero", "sample_steps=0", "algo.num_inference_steps=2"];
        for setting in SETTINGS.iter().chain(&base).chain(settings) {
            command.args(["--set", setting]);
        }
        command
    }

    fn run(&self, ranks: usize, arguments: &[&str], settings: &[&str]) -> Output {
        self.command(ranks, arguments, settings).output().unwrap()
    }
}

/// A command of `roll` on this many ranks.
fn launch(ranks: usize, command: &str) -> Command {
    let mut launcher = launcher(ranks);
    launcher.args([program::PATH, command]).env("RAYON_NUM_THREADS", "1");
    launcher.envs([("ROLL_CACHE", "none"), ("ROLL_STATE", program::STATE)]);
    launcher
}

/// Starts processes with the variables of `torchrun`, hands SIGUSR1 on to them, and exits with the code of the last one
/// that failed.
fn launcher(ranks: usize) -> Command {
    const SCRIPT: &str = r#"
        pids= code=0 rank=0
        while [ $rank -lt $WORLD_SIZE ]; do RANK=$rank LOCAL_RANK=$rank "$@" & pids="$pids $!"; rank=$((rank + 1)); done
        trap 'kill -USR1 $pids' USR1
        for pid in $pids; do
            wait $pid; status=$?
            # The signal interrupted it.
            [ $status != 138 ] || { wait $pid; status=$?; }
            [ $status = 0 ] || code=$status
        done
        exit $code"#;
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut shell = Command::new("sh");
    shell.args(["-c", SCRIPT, "sh"]).env("WORLD_SIZE", ranks.to_string());
    shell.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    shell
}

fn output_text(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}

fn adapter(run: &Path, step: &str) -> Vec<u8> {
    std::fs::read(run.join("checkpoints").join(step).join("adapter.safetensors")).unwrap()
}

/// The adapter's values, after its header.
fn values(bytes: &[u8]) -> Vec<f32> {
    let header = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    bytes[8 + header..].as_chunks::<4>().0.iter().map(|v| f32::from_le_bytes(*v)).collect()
}

#[test]
fn sequence_parallel_ranks_train_as_one() {
    let world = Job::new();
    let shared = ["strategy.sequence_parallel_size=2"];
    for (out, ranks, settings) in [("one", 1, &[][..]), ("two", 2, &shared)] {
        let output = world.run(ranks, &["--out", out, "--steps", "2"], settings);
        assert!(output.status.success(), "{}", output_text(&output));
    }
    let [one, two] = ["one", "two"].map(|run| values(&adapter(&world.path(run), "step-000002")));
    let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>().sqrt();
    let difference = norm(&mut one.iter().zip(&two).map(|(a, b)| a - b));
    assert!(difference <= 1e-5 * norm(&mut one.iter().copied()), "{difference}");
    let refused = world.run(4, &["--out", "four", "--steps", "1"], &shared);
    let printed_text = output_text(&refused);
    assert!(!refused.status.success() && printed_text.contains("expected 1 or 4, found 2"), "{printed_text}");
}

#[test]
fn four_ranks_train_as_one_and_rank_0_writes() {
    let world = Job::new();
    for (out, ranks, samples, stage) in [("one", 1, "4", "2"), ("four", 4, "1", "3")] {
        let settings = [&format!("training.gradient_accumulation_steps={samples}"), &format!("strategy.stage={stage}")];
        let output = world.run(ranks, &["--out", out, "--steps", "2"], &settings.map(|s| s.as_str()));
        assert!(output.status.success(), "{}", output_text(&output));
        assert_eq!(output_text(&output).matches("steps in").count(), 1, "{}", output_text(&output));
    }
    let [one, four] = ["one", "four"].map(|run| values(&adapter(&world.path(run), "step-000002")));
    let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>().sqrt();
    let difference = norm(&mut one.iter().zip(&four).map(|(a, b)| a - b));
    assert!(difference <= 1e-6 * norm(&mut one.iter().copied()), "{difference}");
    let lines = |run: &str| std::fs::read_to_string(world.path(run).join("metrics.jsonl")).unwrap().lines().count();
    assert_eq!(lines("four"), lines("one"));
}

#[test]
fn plan_uses_the_ranks_of_the_launcher() {
    for ranks in [1, 2] {
        let settings = ["strategy.name=zero", "ranks=4"].map(|setting| ["--set", setting]);
        let output = launch(ranks, "plan").args(settings.as_flattened()).arg("--json").output().unwrap();
        assert!(output.status.success(), "{}", output_text(&output));
        let planned: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(planned["ranks"], if ranks == 1 { 4 } else { ranks });
    }
}

#[test]
fn a_configuration_of_roll_trains_alike_on_one_and_two_ranks() {
    let world = World::new(0);
    let here = world.path(".");
    roll_yaml::write_for_devices(&here, 8);
    std::fs::remove_dir_all(world.path("tiny")).unwrap();
    roll_yaml::demo_world(&here);
    for ranks in [1, 2] {
        let mut command = launch(ranks, "run");
        command.current_dir(&here).args(["--config", roll_yaml::FILE]).args(roll_yaml::DEMO_SETTINGS);
        let output = command.args(["--out", &format!("on{ranks}")]).output().unwrap();
        assert!(output.status.success(), "{}", output_text(&output));
    }
    let [one, two] = ["on1", "on2"].map(|run| values(&adapter(&world.path(run), "step-000002")));
    let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>().sqrt();
    let difference = norm(&mut one.iter().zip(&two).map(|(a, b)| a - b));
    assert!(difference <= 1e-6 * norm(&mut one.iter().copied()), "{difference}");
    let samples = |run: &str| {
        let named = |(path, bytes): (PathBuf, Vec<u8>)| (path.file_name().unwrap().to_owned(), bytes);
        roll_yaml::samples(&world.path(run), 1).into_iter().map(named).collect::<BTreeMap<_, _>>()
    };
    // The first rank writes its own, half of them here.
    let (one, two) = (samples("on1"), samples("on2"));
    assert_eq!((one.len(), two.len()), (8, 4));
    assert!(two.iter().all(|(name, bytes)| one[name] == *bytes), "samples of the first step");
}

#[test]
fn sharded_weights_train_save_and_resume_as_whole_ones() {
    let world = Job::new();
    let run = |arguments: &[&str], stage: &str| {
        let settings = [stage, "model.lora_rank=0"];
        let output = world.command_of(2, arguments, &settings).output().unwrap();
        assert!(output.status.success(), "{}", output_text(&output));
    };
    let fresh = |out: &str, steps: &str, stage: &str| {
        run(&["--algo", "flow_matching", "--out", out, "--steps", steps], stage);
    };
    fresh("whole", "3", "strategy.stage=2");
    fresh("divided", "3", "strategy.stage=3");
    fresh("resumed", "2", "strategy.stage=3");
    run(&["--resume", "resumed", "--steps", "3"], "strategy.stage=3");
    for file in ["diffusion_pytorch_model.safetensors", "trainer/optimizer.safetensors"] {
        let read = |run: &str| std::fs::read(world.path(run).join("checkpoints/step-000003").join(file)).unwrap();
        assert!(read("whole") == read("divided"), "{file}");
        assert!(read("whole") == read("resumed"), "{file} of the resumed run");
    }
}

#[test]
fn a_run_with_a_killed_rank_ends_and_resumes_on_two_ranks() {
    let world = Job::new();
    let run = world.path("run");
    let mut command = world.command(4, &["--out", "run", "--steps", "1000"], &["save_steps=1", "max_ckpt_to_keep=3"]);
    let mut job = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let since = Instant::now();
    let saved = || checkpoint::list(&run.join("checkpoints")).unwrap().len();
    while saved() < 2 {
        assert!(since.elapsed() < PATIENCE && job.try_wait().unwrap().is_none(), "no checkpoint came");
        std::thread::sleep(Duration::from_millis(20));
    }
    let victim = *children(job.id()).last().unwrap();
    assert!(Command::new("kill").args(["-9", &victim.to_string()]).status().unwrap().success());
    let killed = Instant::now();
    while job.try_wait().unwrap().is_none() {
        assert!(killed.elapsed() < Duration::from_secs(60), "the job hangs");
        std::thread::sleep(Duration::from_millis(20));
    }
    let output = job.wait_with_output().unwrap();
    let printed_text = output_text(&output);
    assert!(!output.status.success() && printed_text.contains("rank 3 failed: its process ended"), "{printed_text}");

    let done = checkpoint::newest_whole(&run.join("checkpoints")).unwrap().unwrap().step();
    let steps = (done + 2).to_string();
    let settings = ["training.gradient_accumulation_steps=2", "save_steps=1000", "strategy.stage=1"];
    let output = world.run(2, &["--resume", "run", "--steps", &steps], &settings);
    assert!(output.status.success(), "{}", output_text(&output));
    let newest = checkpoint::newest_whole(&run.join("checkpoints")).unwrap().unwrap();
    assert_eq!(newest.step(), done + 2);
    assert_eq!(newest.manifest().info["world_size"], 2);
}

#[test]
fn interrupted_ranks_write_one_checkpoint_and_exit_with_130() {
    let world = Job::new();
    // The launcher hands SIGUSR1 on to all. SIGTERM goes to one rank here: that one asks the others.
    for (out, name, wrapped) in [("all", "-USR1", false), ("one", "-TERM", true)] {
        let run = world.path(out);
        let mut command = world.command(2, &["--out", out, "--steps", "1000"], &["save_steps=1", "max_ckpt_to_keep=2"]);
        if wrapped {
            // Tells each rank's exit code; the launcher knows only of one.
            let script = "\"$0\" \"$@\"; echo \"a rank exits with $?\"";
            let arguments: Vec<_> = command.get_args().map(|a| a.to_os_string()).collect();
            let at = arguments.iter().position(|a| a == program::PATH).unwrap();
            let mut through_shell = Command::new(command.get_program());
            through_shell
                .args(&arguments[..at])
                .args(["sh", "-c", script])
                .args(&arguments[at..])
                .current_dir(world.path("."));
            let variables: Vec<_> = command.get_envs().map(|(n, v)| (n.to_owned(), v.unwrap().to_owned())).collect();
            command = through_shell;
            command.envs(variables);
        }
        let mut job = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let since = Instant::now();
        while checkpoint::list(&run.join("checkpoints")).unwrap().len() < 2 {
            assert!(since.elapsed() < PATIENCE && job.try_wait().unwrap().is_none(), "no checkpoint came");
            std::thread::sleep(Duration::from_millis(20));
        }
        let target = match wrapped {
            true => children(*children(job.id()).last().unwrap())[0],
            false => job.id(),
        };
        assert!(Command::new("kill").args([name, &target.to_string()]).status().unwrap().success());
        let output = job.wait_with_output().unwrap();
        let printed_text = output_text(&output);
        for rank in 0..2 {
            assert!(printed_text.contains(&format!("[rank {rank}] interrupted")), "{printed_text}");
        }
        assert!(printed_text.contains(&format!("roll run --resume {out}")), "{printed_text}");
        match wrapped {
            true => assert_eq!(printed_text.matches("a rank exits with 130").count(), 2, "{printed_text}"),
            false => assert_eq!(output.status.code(), Some(130), "{printed_text}"),
        }
        let done = checkpoint::newest_whole(&run.join("checkpoints")).unwrap().unwrap().step();
        let output = world.run(2, &["--resume", out, "--steps", &(done + 1).to_string()], &[]);
        assert!(output.status.success(), "{}", self::output_text(&output));
    }
}

#[test]
fn every_rank_names_the_rank_that_failed() {
    let world = Job::new();
    // Half of the ranks get a clip that cannot be read.
    std::fs::write(world.path("5.mp4"), b"no video").unwrap();
    let output = world.run(4, &["--out", "run", "--steps", "6"], &["data.shuffle=false"]);
    let printed_text = output_text(&output);
    assert!(!output.status.success());
    assert!(printed_text.contains("5.mp4") && printed_text.contains("failed"), "{printed_text}");
    let named = (0..4).filter(|rank| printed_text.contains(&format!("[rank {rank}] error"))).count();
    assert!(named >= 2, "{printed_text}");
}

#[test]
fn rejects_a_single_process_strategy_on_four_processes() {
    let world = Job::new();
    let output = world.run(4, &["--out", "run", "--steps", "1"], &["strategy.name=single"]);
    assert!(!output.status.success() && output_text(&output).contains("trains on 1"), "{}", output_text(&output));
    assert!(!world.path("run").exists());
}

#[test]
fn every_rank_fails_without_nccl() {
    let world = Job::new();
    let began = Instant::now();
    let output = world.run(2, &["--collectives", "nccl", "--out", "run", "--steps", "1"], &[]);
    if output.status.success() {
        roll_testing::skip!("this machine has NCCL and a GPU for each rank");
    }
    let printed_text = output_text(&output);
    assert!(printed_text.contains("cannot be loaded"), "{printed_text}");
    // The limit is generous: it only distinguishes a deadlock from a refusal.
    assert!(began.elapsed() < PATIENCE && !world.path("run").exists());
}

#[test]
fn nccl_is_refused_without_processes_of_a_launcher() {
    for command in ["run", "check", "plan"] {
        let mut roll = Command::new(program::PATH);
        roll.args([command, "--collectives", "nccl", "--set", "ranks=2"]).env("ROLL_STATE", program::STATE);
        let output = roll.output().unwrap();
        let printed_text = output_text(&output);
        assert_eq!(output.status.code(), Some(2), "{printed_text}");
        assert!(printed_text.contains("threads (`--ranks`) exchange values in host memory"), "{printed_text}");
        assert!(printed_text.contains("torchrun --no-python"), "{printed_text}");
    }
}

#[test]
fn a_process_without_the_secret_is_refused_on_both_sides_and_one_with_it_joins() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let start = |rank: &str, secret: Option<&str>| {
        let mut roll = Command::new(program::PATH);
        roll.args(["plan", "--set", "strategy.name=zero", "--json"]).env("ROLL_STATE", program::STATE);
        roll.envs([("WORLD_SIZE", "2"), ("RANK", rank), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)]);
        roll.envs(secret.map(|secret| ("ROLL_JOB_SECRET", secret)));
        roll.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let root = start("0", Some("right"));
    for (secret, refusal) in [
        (Some("wrong"), "its ROLL_JOB_SECRET is not that of rank 0"),
        (None, "rank 0 has a ROLL_JOB_SECRET, and this process has none"),
    ] {
        let output = start("1", secret).wait_with_output().unwrap();
        let printed_text = output_text(&output);
        assert_eq!(output.status.code(), Some(2), "{printed_text}");
        assert!(printed_text.contains("refuses rank 1") && printed_text.contains(refusal), "{printed_text}");
    }
    let joined = start("1", Some("right")).wait_with_output().unwrap();
    assert!(joined.status.success(), "{}", output_text(&joined));
    let root = root.wait_with_output().unwrap();
    let printed_text = output_text(&root);
    assert!(root.status.success(), "{printed_text}");
    for refusal in ["is refused: its ROLL_JOB_SECRET is not that of rank 0", "and this process has none"] {
        assert!(printed_text.contains(refusal), "{printed_text}");
    }
    assert!(!printed_text.contains("whoever reaches"), "it listens on this machine only: {printed_text}");
}

/// The direct child processes of `parent`, by ascending id.
fn children(parent: u32) -> Vec<u32> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(id) = entry.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else { continue };
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        // "id (name) state parent ...": the name may hold anything.
        let after = stat.rsplit_once(')').map(|(_, rest)| rest).unwrap_or_default();
        if after.split_whitespace().nth(1).and_then(|p| p.parse().ok()) == Some(parent) {
            found.push(id);
        }
    }
    found.sort_unstable();
    found
}
