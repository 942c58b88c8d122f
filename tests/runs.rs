//! How a run is looked at before, its messages, and how it ends.

use std::path::Path;
use std::process::{Command, Output};

use roll_core::{Tensor, Video};
use serde_json::Value;

use crate::program;
use crate::world::{SETTINGS, SHORT, World, fails, stderr_text};

const REWARD_FL: [&str; 6] =
    ["reward.name=brightness", SHORT[0], SHORT[1], SHORT[2], SHORT[3], "training.learning_rate=1e-3"];

fn run(world: &World, out: &str, steps: u64, settings: &[&str]) -> Output {
    world.training(out, steps, settings).output().unwrap()
}

/// `roll check` of the run that [`run`] would make.
fn check(world: &World, settings: &[&str]) -> Output {
    let mut command = world.command(&["check", "--tflops", "1"]);
    for setting in SETTINGS.iter().chain(&REWARD_FL).chain(settings) {
        command.args(["--set", setting]);
    }
    command.output().unwrap()
}

fn printed(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn files(directory: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).unwrap().flatten() {
        match entry.path().is_dir() {
            true => found.extend(files(&entry.path())),
            false => found.push(entry.path().display().to_string()),
        }
    }
    found.sort();
    found
}

#[test]
fn a_run_that_trains_nothing_fails_with_the_reason() {
    let world = World::new(3);
    let frozen = run(&world, "frozen", 6, &[&REWARD_FL[..], &["training.learning_rate=0"]].concat());
    fails(&frozen, 1, &["no parameter changed in the first 5 steps", "learning rate"]);
    assert_eq!(world.metrics("frozen").len(), 5, "it stopped after five of six steps");
    let short = run(&world, "short", 2, &[&REWARD_FL[..], &["training.learning_rate=0"]].concat());
    fails(&short, 1, &["no parameter changed in the first 2 steps"]);
    let warmup = ["training.lr_scheduler_type=linear", "training.warmup_steps=1"];
    // One step is how people see whether everything works.
    let warmed_up = run(&world, "warmup", 1, &[&REWARD_FL[..], &warmup].concat());
    fails(&warmed_up, 0, &["nothing was trained yet", "`training.warmup_steps`"]);
    let asked = ["training.learning_rate=0", "training.max_skipped_steps=0"];
    assert!(run(&world, "asked", 2, &[&REWARD_FL[..], &asked].concat()).status.success());
    // Resuming it at its end does not help.
    fails(&world.roll(&["run", "--resume", "short"]), 1, &["no parameter changed"]);
}

#[test]
fn metrics_contain_the_parameter_norm() {
    let world = World::new(3);
    world.train("run", 2, &REWARD_FL);
    let norms: Vec<f64> = world.metrics("run").iter().map(|row| row["actor/param_norm"].as_f64().unwrap()).collect();
    assert!(norms[0] > 0.0 && norms[0] != norms[1], "{norms:?}");
}

#[test]
fn flow_matching_validates_on_held_out_clips() {
    let world = World::new(3);
    let settings = [
        "algo.name=flow_matching",
        "sample_steps=0",
        "training.learning_rate=1e-2",
        "evaluation.metadata=metadata.csv",
    ];
    world.train("run", 4, &[&settings[..], &["evaluation.every=2"]].concat());
    let rows = world.metrics("run");
    let losses: Vec<f64> = rows.iter().filter_map(|row| row.get("val/loss")?.as_f64()).collect();
    assert_eq!(losses.len(), 3, "before, after two steps, after four: {rows:?}");
    assert!(losses[2] < losses[0], "{losses:?}");
    let summary = world.summary("run");
    assert_eq!((summary["loss_before"].as_f64(), summary["loss_after"].as_f64()), (Some(losses[0]), Some(losses[2])));
    // Kept in the checkpoint: a run that goes on has the same.
    world.done(&["run", "--resume", "run", "--steps", "5"]);
    assert_eq!(world.summary("run")["loss_before"].as_f64(), Some(losses[0]));
    // A model that is not trained has the same loss each time: the noise is the same.
    let still = ["training.learning_rate=0", "training.max_skipped_steps=0"];
    world.train("still", 1, &[&settings[..], &still].concat());
    let rows = world.metrics("still");
    assert_eq!(rows[0]["val/loss"], rows[1]["val/loss"]);
}

#[test]
fn suspected_reward_hacking_warns_once_and_stops_the_run() {
    let world = World::new(4);
    // What makes a video brighter takes it away from black: on every clip.
    let settings = [
        &REWARD_FL[..],
        &[
            "reward.target=1",
            "algo.kl_weight=0",
            "training.learning_rate=1e-2",
            "evaluation.metadata=metadata.csv",
            "evaluation.every=1",
            "evaluation.check=[{name: brightness, target: 0}, {name: sharpness, wanted: reference}]",
        ],
    ]
    .concat();
    let stop = ["evaluation.stop_when={checks_fall: 2}"];
    let warnings = |output: &Output| stderr_text(output).matches("suspect reward hacking").count();

    let output = world.training("run", 9, &[&settings[..], &stop].concat()).output().unwrap();
    fails(
        &output,
        3,
        &["by `evaluation.stop_when`", "`brightness`", "roll run --resume run --set evaluation.stop_when"],
    );
    // The warning, and the reason of the end.
    assert_eq!(warnings(&output), 2, "{}", stderr_text(&output));
    let ended = world.summary("run");
    let steps = ended["steps"].as_u64().unwrap();
    assert!((2..9).contains(&steps) && ended["stopped"].as_str().unwrap().contains("`brightness`"), "{ended}");
    assert!(ended["unseen_gain"]["ci95"][0].as_f64().unwrap() > 0.0, "{ended}");
    assert!(ended["unseen_check_brightness_gain"]["ci95"][1].as_f64().unwrap() < 0.0, "{ended}");
    assert!(ended["unseen_check_sharpness_before"].is_number() && ended["unseen_check_before"].is_number(), "{ended}");
    let rows = world.metrics("run");
    assert!(rows.last().unwrap()["eval/checks_falling"].as_f64().unwrap() >= 1.0, "{rows:?}");
    assert!(world.path("run/samples/after/unseen-003.mp4").is_file() && world.path("run/comparison.mp4").is_file());
    let report = std::fs::read_to_string(world.path("run/report.html")).unwrap();
    assert!(report.contains("suspect reward hacking") && report.contains("stopped by `evaluation.stop_when`"));

    // It has ended; only without the rule does it go on, and as if there had been none.
    fails(&world.roll(&["run", "--resume", "run"]), 3, &["by `evaluation.stop_when`"]);
    assert_eq!(world.summary("run"), ended);
    let output = world.roll(&["run", "--resume", "run", "--set", "evaluation.stop_when=null"]);
    assert!(output.status.success() && warnings(&output) == 0, "{}", stderr_text(&output));
    let output = world.training("whole", 9, &settings).output().unwrap();
    assert!(output.status.success() && warnings(&output) == 1, "{}", stderr_text(&output));
    assert_eq!(world.metrics("run"), world.metrics("whole"));
    assert!(world.summary("run").get("stopped").is_none());
}

#[test]
fn a_reward_that_does_not_read_the_prompt_is_warned_of_once_where_two_prompts_are_scored() {
    let world = World::new(2);
    let direct = [&REWARD_FL[..], &["algo.trained_steps.direct.step=0.05", "training.learning_rate=1e-2"]].concat();
    let output = world.training("run", 3, &direct).output().unwrap();
    let messages = stderr_text(&output);
    assert!(output.status.success(), "{messages}");
    assert_eq!(messages.matches("`brightness` scores a video alike under `Real ...` and `Oil ...`").count(), 1);
    let row = world.metrics("run").pop().unwrap();
    assert!(row["reward/wanted"] == row["reward/unwanted"] && row["actor/grad_norm"].as_f64().unwrap() > 0.0, "{row}");
}

#[test]
fn supervised_training_validates_on_held_out_conversations() {
    let world = World::new(0);
    let line = r#"{"messages": [{"role": "user", "content": "P_"}, {"role": "assistant", "content": "at goal"}]}"#;
    std::fs::write(world.path("talk.jsonl"), format!("{line}\n{line}\n")).unwrap();
    std::fs::write(world.path("held.jsonl"), format!("{}\n", line.replace("P_", "_P"))).unwrap();
    let mut command = world.command(&["run", "--algo", "sft", "--model", "causal_lm", "--out", "run", "--steps", "6"]);
    for setting in
        ["algo.data=talk.jsonl", "algo.val_data=held.jsonl", "algo.batch_size=2", "training.learning_rate=1e-2"]
    {
        command.args(["--set", setting]);
    }
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", stderr_text(&output));
    let summary = world.summary("run");
    let [before, after] = ["loss_before", "loss_after"].map(|key| summary[key].as_f64().unwrap());
    assert!(after < before && world.metrics("run")[0]["val/tokens"].as_f64().unwrap() > 0.0, "{before} {after}");
    assert!(printed(&output).contains("conversations that were not trained on"), "{}", printed(&output));
}

#[test]
fn check_passes_for_a_valid_run_and_writes_nothing() {
    let world = World::new(3);
    let before = files(&world.path("."));
    let output = check(&world, &["evaluation.metadata=metadata.csv", "algo.reference=image", "steps=7"]);
    let text = printed(&output);
    assert_eq!(output.status.code(), Some(0), "{text}{}", stderr_text(&output));
    for part in [
        "transformer `dit2`",
        "a LoRA of rank 2 is trained",
        "tokenizer:",
        "3 clips, 3 can be read",
        "3 of 64x64",
        "7 steps of 1 clip each",
        "clips to evaluate",
        "can compare with 3 of the first 3 references",
        "GB on each device",
        "for 7 steps",
        "no problem found",
    ] {
        assert!(text.contains(part), "no {part} in:\n{text}");
    }
    assert_eq!(files(&world.path(".")), before);
    let dry = run(&world, "run", 1, &REWARD_FL);
    assert!(dry.status.success());
    let again = world.training("run", 1, &REWARD_FL).arg("--dry-run").output().unwrap();
    fails(&again, 1, &["the run would fail"]);
    assert!(printed(&again).contains("PROBLEM: ") && printed(&again).contains("already holds a run"));
}

#[test]
fn check_fails_if_the_run_would() {
    let world = World::new(3);
    let problem = |settings: &[&str], parts: &[&str]| {
        let output = check(&world, settings);
        let text = printed(&output);
        assert_eq!(output.status.code(), Some(1), "{text}{}", stderr_text(&output));
        parts.iter().for_each(|part| assert!(text.contains(part), "no {part} in:\n{text}"));
        text
    };
    std::fs::write(world.path("1.mp4"), "no video").unwrap();
    let strict = problem(&["data.on_bad_sample=error"], &["PROBLEM", "1.mp4", "3 clips, 2 can be read"]);
    assert!(strict.contains("GB on each device"), "it looks at the rest too:\n{strict}");
    let lenient = check(&world, &["data.on_bad_sample=skip"]);
    assert!(lenient.status.success() && printed(&lenient).contains("left out"), "{}", printed(&lenient));
    std::fs::copy(world.path("0.mp4"), world.path("1.mp4")).unwrap();
    assert!(check(&world, &[]).status.success());
    problem(&["data.metadata=none.csv"], &["none.csv"]);
    problem(&["reward.name=insightface", "reward.reward_model_path=nowhere"], &["nowhere"]);
    problem(&["model.trainable_models=dit3"], &["dit3"]);
    let too_small = world.command(&["check", "--tflops", "1", "--memory", "0.001"]).args(set(&[])).output().unwrap();
    assert!(printed(&too_small).contains("GB, available are 0.0"), "{}", printed(&too_small));
    fails(&too_small, 1, &["the run would fail"]);
    let weights = world.path("tiny/low_noise_model/diffusion_pytorch_model.safetensors");
    let bytes = std::fs::read(&weights).unwrap();
    std::fs::write(&weights, &bytes[..bytes.len() / 2]).unwrap();
    problem(&[], &["diffusion_pytorch_model.safetensors"]);
    // A mistake in the configuration itself is reported as by the other commands.
    fails(&check(&world, &["model.lora_rnak=2"]), 2, &["lora_rank"]);
}

/// The arguments of a run that works, and more.
fn set(settings: &[&str]) -> Vec<String> {
    let all = SETTINGS.iter().chain(&REWARD_FL).chain(settings);
    all.flat_map(|setting| ["--set".to_string(), setting.to_string()]).collect()
}

#[test]
fn on_finish_receives_the_outcome() {
    let world = World::new(3);
    let hook = "on_finish=[sh, -c, 'echo $ROLL_RUN_STATUS $ROLL_RUN_STEPS >> told; cat >> json; echo >> json']";
    let settings = [&REWARD_FL[..], &[hook]].concat();
    assert!(run(&world, "done", 2, &settings).status.success());
    fails(&run(&world, "failed", 2, &[&settings[..], &["training.learning_rate=0"]].concat()), 1, &["no parameter"]);
    assert_eq!(std::fs::read_to_string(world.path("told")).unwrap(), "done 2\nfailed 2\n");
    let json = std::fs::read_to_string(world.path("json")).unwrap();
    let outcomes: Vec<Value> = json.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(outcomes[0]["summary"]["steps"] == 2 && outcomes[0]["run"].as_str().unwrap().ends_with("/done"));
    assert!(outcomes[1]["error"].as_str().unwrap().contains("no parameter changed"));
    let missing = run(&world, "missing", 1, &[&REWARD_FL[..], &["on_finish=[./nowhere]"]].concat());
    assert!(missing.status.success() && stderr_text(&missing).contains("`on_finish`"), "{}", stderr_text(&missing));
}

#[test]
fn on_metrics_receives_each_line_of_the_metrics() {
    let world = World::new(3);
    let hook = "on_metrics=[sh, -c, 'cat >> \"$ROLL_RUN_DIR/lines\"; echo ended >> \"$ROLL_RUN_DIR/lines\"']";
    let settings = [&REWARD_FL[..], &[hook, "evaluation.train_samples=1"]].concat();
    assert!(run(&world, "run", 2, &settings).status.success());
    let lines = std::fs::read_to_string(world.path("run/lines")).unwrap();
    let expected = std::fs::read_to_string(world.path("run/metrics.jsonl")).unwrap();
    assert_eq!(expected.lines().count(), 3, "before training, and two steps");
    assert_eq!(lines, format!("{expected}ended\n"));
    let missing = run(&world, "missing", 1, &[&REWARD_FL[..], &["on_metrics=[./nowhere]"]].concat());
    assert!(missing.status.success() && stderr_text(&missing).contains("`on_metrics`"), "{}", stderr_text(&missing));
}

#[test]
fn track_with_selects_the_destinations_of_metrics() {
    let world = World::new(3);
    let events = |out: &str| files(&world.path(out)).iter().any(|file| file.contains("events.out.tfevents"));
    assert!(run(&world, "board", 1, &[&REWARD_FL[..], &["track_with=tensorboard"]].concat()).status.success());
    assert!(events("board") && !world.path("board/metrics.jsonl").exists() && world.path("board/report.html").exists());
    let output = run(&world, "lines", 1, &[&REWARD_FL[..], &["track_with=[jsonl, wandb]"]].concat());
    assert!(!events("lines") && world.metrics("lines").len() == 1 && stderr_text(&output).contains("wandb"));
}

#[test]
fn the_reward_of_a_run_can_be_replaced() {
    let world = World::new(3);
    assert!(run(&world, "run", 1, &REWARD_FL).status.success());
    let config = world.path("run/config.yaml");
    let text = std::fs::read_to_string(&config).unwrap();
    let line = text.lines().find(|line| line.contains("name: brightness")).unwrap();
    let indented = " ".repeat(line.find("name").unwrap());
    std::fs::write(&config, text.replace(line, &format!("{line}\n{indented}align: 3"))).unwrap();
    // Changed by hand: that it is this user's cannot be seen.
    fails(&world.roll(&["run", "--resume", "run", "--steps", "2"]), 2, &["`--trust`", "data.metadata opens"]);
    let again = ["run", "--resume", "run", "--steps", "2", "--trust"];
    fails(&world.roll(&again), 2, &["`reward.0.align`"]);
    let output = world.roll(&[&again[..], &["--set", "reward.name=brightness"]].concat());
    assert!(output.status.success() && stderr_text(&output).contains("left out: align"), "{}", stderr_text(&output));
}

#[test]
fn verbosity_selects_log_messages() {
    let world = World::new(3);
    let with = |arguments: &[&str], variables: &[(&str, &str)]| {
        let _ = std::fs::remove_dir_all(world.path("run"));
        let mut command: Command = world.training("run", 1, &REWARD_FL);
        command.args(arguments).envs(variables.iter().copied());
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", stderr_text(&output));
        stderr_text(&output)
    };
    let plain = with(&[], &[]);
    assert!(plain.contains("step 1/1") && plain.starts_with("20") && plain.contains("Z  INFO"), "{plain}");
    for part in [
        "parameters of `wan2_2` by `reward_fl`",
        "`brightness`",
        "3 clips of 64x64, up to 5 frames",
        "1 of 1 clip each",
    ] {
        assert!(plain.contains(part), "no {part} in:\n{plain}");
    }
    assert!(!plain.contains('\x1b') && !plain.contains("1 steps"), "{plain}");
    assert_eq!(with(&["-q"], &[]), "");
    assert_eq!(with(&[], &[("RUST_LOG", "error")]), "");
    assert_eq!(with(&[], &[("ROLL_LOG", "error"), ("RUST_LOG", "info")]), "");
    assert!(with(&["-v"], &[("RUST_LOG", "error")]).contains("step 1/1"));
    assert!(with(&[], &[("ROLL_STEPS", ""), ("ROLL_LOG", "")]).contains("step 1/1"));
}

#[test]
fn a_dumb_terminal_gets_no_colours_and_bars() {
    let world = World::new(3);
    if Command::new("script").arg("--version").output().is_err() {
        roll_testing::skip!("`script`, which makes terminals, is not installed");
    }
    let arguments: Vec<String> = set(&[]).iter().map(|argument| format!("'{argument}'")).collect();
    let program = world.command(&[]).get_program().to_string_lossy().into_owned();
    let in_terminal = |out: &str, variables: &[(&str, &str)]| {
        let line = format!("stty cols 80; '{program}' run --out {out} --steps 2 {}", arguments.join(" "));
        let mut command = Command::new("script");
        command.args(["-qec", &line, "/dev/null"]).current_dir(world.path(".")).env_remove("NO_COLOR");
        command.env("ROLL_STATE", program::STATE);
        command.env("TERM", "xterm-256color").envs(variables.iter().copied()).stdin(std::process::Stdio::null());
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", printed(&output));
        printed(&output)
    };
    let coloured = in_terminal("coloured", &[]);
    assert!(coloured.contains("\x1b[32m INFO") && coloured.contains("2 steps"), "{coloured:?}");
    assert!(!coloured.contains("0s left") && !coloured.contains("0 s left"), "{coloured:?}");
    let plain = in_terminal("plain", &[("NO_COLOR", "1")]);
    assert!(!plain.contains("\x1b[32m") && plain.contains("INFO step 2/2"), "{plain:?}");
    let dumb = in_terminal("dumb", &[("TERM", "dumb")]);
    assert!(!dumb.contains('\x1b') && dumb.contains("INFO step 2/2"), "{dumb:?}");
}

/// The lines that a terminal of 80 columns has after this text, those above its screen too.
fn lines_of_terminal(text: &str) -> Vec<String> {
    const COLUMNS: usize = 80;
    let mut lines: Vec<Vec<char>> = Vec::new();
    let (mut row, mut column): (usize, usize) = (0, 0);
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        lines.resize(lines.len().max(row + 2), Vec::new());
        match c {
            '\r' => column = 0,
            '\n' => row += 1,
            '\x1b' if chars.next() == Some('[') => {
                let mut number = String::new();
                let command = loop {
                    match chars.next() {
                        Some(c) if c.is_ascii_digit() || matches!(c, ';' | '?') => number.push(c),
                        other => break other,
                    }
                };
                let count = number.parse().unwrap_or(1);
                match command {
                    Some('A') => row = row.saturating_sub(count),
                    Some('B') => row += count,
                    Some('K') => lines[row].clear(),
                    _ => {}
                }
            }
            c if c.is_control() => {}
            c => {
                if column == COLUMNS {
                    (row, column) = (row + 1, 0);
                }
                let line = &mut lines[row];
                line.resize(line.len().max(column + 1), ' ');
                line[column] = c;
                column += 1;
            }
        }
    }
    lines.into_iter().map(String::from_iter).collect()
}

#[test]
fn ctrl_c_clears_the_bars() {
    use std::io::{Read, Write};
    use std::process::Stdio;

    let world = World::new(3);
    if Command::new("script").arg("--version").output().is_err() {
        roll_testing::skip!("`script`, which makes terminals, is not installed");
    }
    let arguments: Vec<String> = set(&[]).iter().map(|argument| format!("'{argument}'")).collect();
    let program = world.command(&[]).get_program().to_string_lossy().into_owned();
    let line = format!("stty cols 80; exec '{program}' run --out run --steps 400 {}", arguments.join(" "));
    let mut command = Command::new("script");
    command.args(["-qec", &line, "/dev/null"]).current_dir(world.path(".")).env("TERM", "xterm-256color");
    command.env("ROLL_STATE", program::STATE);
    let mut terminal = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut keys, mut screen) = (terminal.stdin.take().unwrap(), terminal.stdout.take().unwrap());
    let (mut bytes, mut buffer, mut pressed) = (Vec::new(), [0; 4096], false);
    loop {
        let count = screen.read(&mut buffer).unwrap();
        if count == 0 {
            break;
        }
        bytes.extend_from_slice(&buffer[..count]);
        let text = String::from_utf8_lossy(&bytes);
        if !pressed && text.contains("step 2/") && text.contains('░') {
            keys.write_all(b"\x03").unwrap();
            pressed = true;
        }
    }
    let text = String::from_utf8_lossy(&bytes).into_owned();
    assert_eq!(terminal.wait().unwrap().code(), Some(130), "{text}");
    assert!(text.contains("^C") && text.contains("--resume run"), "{text:?}");
    let lines = lines_of_terminal(&text);
    let bars: Vec<&String> = lines.iter().filter(|line| line.contains(['░', '█'])).collect();
    assert!(bars.is_empty(), "{bars:#?}");
}

/// A run whose reward is a shell script that never answers, and has started a process with the id in the file `child`.
fn with_hung_reward(world: &World) -> std::process::Child {
    let script = "echo ${HF_TOKEN-none} > token; sleep 600 & echo $! > new; mv new child; wait";
    let reward = format!("reward={{name: command, command: [sh, -c, \"{script}\"]}}");
    let mut command = world.training("run", 1, &[&reward]);
    crate::program::with_default_signals(&mut command);
    let silent = std::process::Stdio::null;
    let run = command.env("HF_TOKEN", "secret").stdout(silent()).stderr(silent()).spawn().unwrap();
    let begun = std::time::Instant::now();
    while !world.path("child").exists() {
        assert!(begun.elapsed().as_secs() < 60, "the reward is not started");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    run
}

#[test]
fn a_hung_reward_ends_with_the_run_that_is_killed() {
    // Two Ctrl-C end a run at once; any other signal asks it to stop after its step.
    for signals in [&["-INT", "-INT"][..], &["-KILL"]] {
        let world = World::new(1);
        let mut run = with_hung_reward(&world);
        assert_eq!(std::fs::read_to_string(world.path("token")).unwrap(), "none\n");
        for signal in signals {
            assert!(Command::new("kill").args([*signal, &run.id().to_string()]).status().unwrap().success());
            std::thread::sleep(std::time::Duration::from_millis(200));
        }
        run.wait().unwrap();
        let child = std::fs::read_to_string(world.path("child")).unwrap();
        let begun = std::time::Instant::now();
        // A zombie, which its new parent has not reaped, is gone too.
        let lives =
            || std::fs::read_to_string(format!("/proc/{}/stat", child.trim())).is_ok_and(|s| !s.contains(") Z "));
        while lives() {
            assert!(begun.elapsed().as_secs() < 10, "{signals:?}: the reward lives on");
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

#[test]
fn sample_prompts_use_the_same_noise_and_appear_in_the_report() {
    let world = World::new(2);
    let picture = Video::new(Tensor::full([1, 3, 64, 64], 0.3), 8.0).unwrap();
    let picture = roll_media::write_pngs(world.path("pictures"), &picture).unwrap().remove(0);
    let prompts = format!(
        "evaluation.prompts=[{{prompt: a <tall> cat, image: {0}, seed: 3}}, {{prompt: a dog, image: {0}}}]",
        picture.display()
    );
    let settings = [&REWARD_FL[..], &[prompts.as_str(), "evaluation.every=1"]].concat();
    let trained = run(&world, "run", 2, &[&settings[..], &["training.learning_rate=1e-2"]].concat());
    assert!(trained.status.success(), "{}", stderr_text(&trained));
    let video = |run: &str, moment: &str, i: usize| {
        std::fs::read(world.path(run).join(format!("samples/{moment}/prompt-{i:03}.mp4"))).unwrap()
    };
    assert_ne!(video("run", "before", 0), video("run", "before", 1));
    assert_ne!(video("run", "before", 0), video("run", "step-000001", 0));
    assert_eq!(video("run", "step-000002", 0), video("run", "after", 0));
    let still = ["training.learning_rate=0", "training.max_skipped_steps=0"];
    assert!(run(&world, "still", 2, &[&settings[..], &still].concat()).status.success());
    for moment in ["before", "step-000001", "after"] {
        assert_eq!(video("still", moment, 0), video("run", "before", 0), "{moment}");
    }
    let report = std::fs::read_to_string(world.path("run/report.html")).unwrap();
    assert!(report.contains("a &lt;tall&gt; cat") && report.contains("a dog"));
    let generate = ["generate", "--config", "run/config.yaml", "--adapter", "run", "--prompt", "a <tall> cat"];
    let more = ["--image", picture.to_str().unwrap(), "--seed", "3", "--output", "again.mp4"];
    world.done(&[&generate[..], &more].concat());
    assert_eq!(std::fs::read(world.path("again.mp4")).unwrap(), video("run", "after", 0));
}

#[test]
fn rejects_sample_prompts_for_a_language_model() {
    let world = World::new(0);
    let arguments = ["run", "--algo", "agentic_ppo", "--model", "causal_lm", "--steps", "1", "--out", "run"];
    let refused = world.roll(&[&arguments[..], &["--set", "evaluation.prompts=[a cat]"]].concat());
    fails(&refused, 2, &["`evaluation.prompts`", "`causal_lm` makes no videos"]);
}

#[test]
fn secrets_are_not_written_and_are_read_again_on_resume() {
    const SECRET: &str = "tok-4711-0815-4242";
    let world = World::new(3);
    let record = world.path("told");
    let script = format!(r#"echo "$0" >> '{}'"#, record.display());
    let finish = format!("on_finish={}", serde_json::json!(["sh", "-c", script, SECRET]));
    let with_secret = |command: &mut Command| command.env("MY_SERVICE_TOKEN", SECRET).output().unwrap();
    let first = with_secret(&mut world.training("run", 1, &[&REWARD_FL[..], &[finish.as_str()]].concat()));
    assert!(first.status.success(), "{}", stderr_text(&first));
    let on = with_secret(&mut world.command(&["run", "--resume", "run", "--steps", "2"]));
    assert!(on.status.success(), "{}", stderr_text(&on));
    assert_eq!(std::fs::read_to_string(&record).unwrap(), format!("{SECRET}\n{SECRET}\n"));
    let files = files(&world.path("run"));
    assert!(files.iter().any(|file| file.ends_with("report.html")), "{files:?}");
    for file in files {
        let bytes = std::fs::read(&file).unwrap();
        assert!(!bytes.windows(SECRET.len()).any(|window| window == SECRET.as_bytes()), "{file}");
    }
    let config = std::fs::read_to_string(world.path("run").join("config.yaml")).unwrap();
    assert!(config.contains("${oc.env:MY_SERVICE_TOKEN}"), "{config}");
}
