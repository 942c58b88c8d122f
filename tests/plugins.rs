//! Plugins on the command line: listed, configured, checked, trained with, and failing.

use std::path::Path;
use std::process::Output;

use serde_json::Value;

use crate::program;
use crate::world::{World, checkpoint_file, fails, stderr_text};

/// The library of a plugin that this test's crate depends on: cargo puts it beside the test itself.
pub fn library(name: &str) -> String {
    let directory = std::env::current_exe().unwrap().parent().unwrap().to_path_buf();
    let (prefix, suffix) = (std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    directory.join(format!("{prefix}{name}{suffix}")).display().to_string()
}

/// Trains for three steps, with everything that `more` says.
fn train(world: &World, out: &str, more: &[&str]) -> Output {
    world.training(out, 3, &["training.learning_rate=1e-3"]).args(more).output().unwrap()
}

/// Metrics without times, and the bytes of the adapter.
fn results(world: &World, out: &str) -> (Vec<Value>, Vec<u8>) {
    (world.metrics(out), checkpoint_file(&world.path(out), 3, "adapter.safetensors"))
}

#[test]
fn plugins_reproduce_the_bits_of_built_in_components() {
    let world = World::new(2);
    let reward = ["--set", "reward.name=brightness"];
    let linked = train(&world, "linked", &reward);
    assert!(linked.status.success(), "{}", stderr_text(&linked));
    let libraries = ["zero", "wan2_2", "reward_fl"].map(library);
    let mut arguments = reward.to_vec();
    libraries.iter().for_each(|l| arguments.extend(["--plugin", l]));

    let refused = train(&world, "refused", &arguments);
    fails(&refused, 2, &["registered twice", "by zero (", "libzero.so", "roll-backends", "leave one out"]);

    arguments.push("--plugins-replace");
    let loaded = train(&world, "loaded", &arguments);
    assert!(loaded.status.success(), "{}", stderr_text(&loaded));
    assert_eq!(results(&world, "loaded"), results(&world, "linked"));
    let config = std::fs::read_to_string(world.path("loaded/config.yaml")).unwrap();
    assert!(config.contains("libwan2_2.so") && config.contains("plugins_replace: true"), "{config}");
}

#[test]
fn policy_gradient_plugins_reproduce_the_bits() {
    let world = World::new(2);
    for name in ["diffusion_nft", "flow_grpo"] {
        let algorithm = format!("algo.name={name}");
        // Two rewards of different scale, which are normalised separately: the plugin must receive the terms of the
        // sum.
        let rewards = "reward=[{name: brightness}, {name: sharpness, weight: 3}]";
        let short = ["algo.num_inference_steps=4", "algo.group_size=3", "algo.data_weight=0.5", "sample_steps=0"];
        let run = |out: &str, more: &[&str]| {
            let settings = [algorithm.as_str(), rewards].into_iter().chain(short).flat_map(|s| ["--set", s]);
            let output = train(&world, out, &settings.chain(more.iter().copied()).collect::<Vec<_>>());
            assert!(output.status.success(), "{}", stderr_text(&output));
            results(&world, out)
        };
        let (linked, library) = (run(&format!("linked-{name}"), &[]), library(name));
        let loaded = run(&format!("loaded-{name}"), &["--plugin", &library, "--plugins-replace"]);
        assert_eq!(loaded, linked, "{name}");
        let summed = run(&format!("summed-{name}"), &["--set", "algo.several_rewards=sum"]);
        assert_ne!(summed.1, linked.1, "{name}: as if there were one reward");
        let spread = run(&format!("spread-{name}"), &["--set", "algo.advantage_spread=none"]);
        assert_ne!(spread.1, linked.1, "{name}: the spread of several rewards is an option");
    }
}

#[test]
fn encodings_of_plugin_models_are_cached() {
    let world = World::new(3);
    let library = library("wan2_2");
    let counts = |out: &str| {
        let cached = ["--set", "reward.name=brightness", "--set", "data.cache_dir=cache"];
        let output = train(&world, out, &[&["--plugin", &library, "--plugins-replace"], &cached[..]].concat());
        assert!(output.status.success(), "{}", stderr_text(&output));
        stderr_text(&output).lines().find(|line| line.contains("encodings:")).unwrap().to_string()
    };
    let (first, second) = (counts("first"), counts("second"));
    assert!(first.contains("encodings: 0 read from the cache") && !first.contains(" 0 computed"), "{first}");
    assert!(second.contains(" 0 computed"), "{second}");
    assert_eq!(results(&world, "first"), results(&world, "second"));
}

#[test]
fn agent_plugins_reproduce_the_bits() {
    let world = World::new(0);
    let train = |out: &str, more: &[&str]| {
        let mut arguments = vec!["run", "--algo", "agentic_ppo", "--model", "causal_lm", "--out", out, "--steps", "3"];
        for setting in ["algo.num_env_groups=2", "algo.group_size=4", "algo.val_batch_size=4", "evaluation.every=0"] {
            arguments.extend(["--set", setting]);
        }
        arguments.extend(more);
        world.done(&arguments);
        let run = world.path(out);
        let episodes = std::fs::read_to_string(run.join("trajectories.jsonl")).unwrap();
        let trained = ["model.safetensors", "adapter_model.safetensors"];
        let trained = trained.into_iter().find(|f| run.join("checkpoints/step-000003").join(f).exists()).unwrap();
        (world.metrics(out), episodes, checkpoint_file(&run, 3, trained))
    };
    let library = library("agentic_ppo");
    assert_eq!(train("loaded", &["--plugin", &library, "--plugins-replace"]), train("linked", &[]));
}

#[test]
fn tensors_of_plugin_algorithms_are_checkpointed() {
    let world = World::new(2);
    let library = library("hostile_plugin");
    let toys = ["--plugin", &library, "--algo", "toy", "--model", "toy"];
    let settings = ["reward.name=hostile", "strategy.name=toy", "training.learning_rate=0.1", "sample_steps=0"];
    let size =
        ["data.metadata=metadata.csv", "data.height=64", "data.width=72", "data.num_frames=5", "evaluation.every=0"];
    let train = |out: &str, more: &[&str]| {
        let mut arguments = [&["run", "--out", out, "--steps", "4"], &toys[..]].concat();
        settings.iter().chain(&size).chain(more).for_each(|setting| arguments.extend(["--set", setting]));
        world.done(&arguments);
    };
    train("whole", &[]);
    train("halved", &["save_steps=2"]);
    // The algorithm has one tensor, `sum`.
    let algorithm_state = |run: &str| checkpoint_file(&world.path(run), 4, "trainer/algorithm.safetensors");
    let whole = algorithm_state("whole");
    assert_eq!(algorithm_state("halved"), whole);
    // As if it had been killed after its second step.
    std::fs::remove_dir_all(world.path("halved/checkpoints/step-000004")).unwrap();
    std::fs::remove_file(world.path("halved/summary.json")).unwrap();
    world.done(&["run", "--resume", "halved"]);
    assert_eq!(algorithm_state("halved"), whole);

    let checkpoint = world.path("halved/checkpoints/step-000004");
    std::fs::remove_dir_all(&checkpoint).unwrap();
    let kept = world.path("halved/checkpoints/step-000002");
    let manifest = std::fs::read_to_string(kept.join("manifest.json")).unwrap();
    let mut without: Value = serde_json::from_str(&manifest).unwrap();
    without["files"].as_object_mut().unwrap().remove("trainer/algorithm.safetensors").unwrap();
    std::fs::write(kept.join("manifest.json"), without.to_string()).unwrap();
    std::fs::remove_file(world.path("halved/summary.json")).unwrap();
    fails(&world.roll(&["run", "--resume", "halved"]), 2, &["step-000002", "`sum`", "not in the checkpoint"]);
}

#[test]
fn a_third_party_reward_trains() {
    let world = World::new(2);
    let library = library("sharpness_reward");
    let output = train(&world, "run", &["--plugin", &library, "--set", "reward.name=edges"]);
    assert!(output.status.success(), "{}", stderr_text(&output));
    assert_eq!(results(&world, "run").0.len(), 3);
}

#[test]
fn a_failing_reward_is_named_and_the_training_is_saved() {
    let world = World::new(2);
    let library = library("hostile_plugin");
    for (i, (how, parts)) in
        [("panic", ["a panic in score", "failed in `score`"]), ("error", ["an error in score", "failed in `score`"])]
            .into_iter()
            .enumerate()
    {
        let out = format!("run-{i}");
        let setting = format!("reward={{name: hostile, at: score, how: {how}, after: 1}}");
        let output = train(&world, &out, &["--plugin", &library, "--set", &setting, "--set", "data.shuffle=false"]);
        fails(&output, 1, &parts);
        fails(&output, 1, &["`hostile_plugin`", "libhostile_plugin.so", "step 2", "the training of 1 step is saved"]);
        let saved = world.path(&out).join("checkpoints/step-000001/adapter.safetensors");
        assert!(saved.is_file(), "{}", stderr_text(&output));
    }
    let output = train(&world, "nan", &["--plugin", &library, "--set", "reward={name: hostile, at: score, how: nan}"]);
    fails(
        &output,
        1,
        &["the score is NaN: it counts as nothing to score", "no parameter changed in the first 3 steps"],
    );
    let output =
        train(&world, "shape", &["--plugin", &library, "--set", "reward={name: hostile, at: pull, how: shape}"]);
    fails(&output, 2, &["libhostile_plugin.so", "expected shape [5, 3, 64, 64], found [1, 2, 3]"]);
}

#[test]
fn plugin_options_are_configuration_keys() {
    let world = World::new(2);
    let library = library("sharpness_reward");
    let listed = world.done(&["config", "--plugin", &library, "--set", "reward.name=edges"]);
    let line = listed.lines().find(|l| l.starts_with("reward.0.scale")).unwrap_or_else(|| panic!("{listed}"));
    assert!(line.contains("0.05") && line.contains("default"), "{line}");
    let wrong = ["config", "--plugin", &library, "--set", "reward.name=edges", "--set", "reward.scael=1"];
    fails(&world.roll(&wrong), 2, &["`reward.0.scael`", "did you mean `reward.0.scale`?"]);

    let yaml = format!("plugins: [{library}]\nreward:\n  name: edges\n  scael: 1\n");
    std::fs::write(world.path("train.yaml"), yaml).unwrap();
    fails(&world.roll(&["config", "--config", "train.yaml"]), 2, &["did you mean", "train.yaml:4"]);
    fails(&world.roll(&["config", "--set", "plugins=3"]), 2, &["`plugins`: expected a list of paths, found 3"]);
    fails(&world.roll(&["config", "--plugin", "none.so"]), 2, &["none.so"]);
}

#[test]
fn plugins_are_listed_described_and_checked() {
    let world = World::new(2);
    let (sharpness, colors, hostile) =
        (library("sharpness_reward"), library("color_reward"), library("hostile_plugin"));
    assert!(world.done(&["plugins"]).contains("reward_fl"));
    let listed = world.done(&["plugins", "list", "--plugin", &sharpness]);
    assert!(listed.contains("sharpness_reward (") && listed.contains(&sharpness), "{listed}");

    let directory = tempfile::tempdir().unwrap();
    std::fs::copy(&colors, directory.path().join(Path::new(&colors).file_name().unwrap())).unwrap();
    let found = world.command(&["plugins"]).env("ROLL_PLUGIN_PATH", directory.path()).output().unwrap();
    assert!(String::from_utf8_lossy(&found.stdout).contains("color_reward ("), "{}", stderr_text(&found));

    let described = world.done(&["plugins", "info", &colors]);
    assert!(described.contains("plugin ABI") && described.contains("bins"), "{described}");
    let described = world.done(&["plugins", "info", &library("insightface")]);
    assert!(described.contains("reward_model_path"), "{described}");

    let checked = world.done(&["plugins", "check", &sharpness, "--set", "scale=0.1"]);
    assert!(checked.contains("ok      its pullback agrees with differences"), "{checked}");
    assert!(world.done(&["plugins", "check", &colors]).contains("not differentiable"));
    let nan = ["plugins", "check", &hostile, "--component", "hostile", "--set", "at=pull", "--set", "how=nan"];
    let output = world.roll(&nan);
    fails(&output, 2, &["breaks", "libhostile_plugin.so"]);
    assert!(String::from_utf8_lossy(&output.stdout).contains("BROKEN  its gradient is finite"));
}

#[cfg(target_os = "linux")]
#[test]
fn a_plugin_that_crashes_the_process_is_named() {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    if Command::new("cc").arg("--version").output().is_err() {
        roll_testing::skip!("there is no C compiler", needs = "cc");
    }
    let dir = tempfile::tempdir().unwrap();
    let begins = "    if (count == 0) return";
    let contrast = include_str!("../plugins/contrast_reward_c/contrast.c");
    assert!(contrast.contains(begins));
    let header = Path::new(env!("CARGO_MANIFEST_DIR")).join("../roll-plugin/include");
    for (crash, signal) in [("abort();", 6), ("*(volatile int *)8 = 1;", 11)] {
        let (source, library) =
            (dir.path().join(format!("{signal}.c")), dir.path().join(format!("libcrash{signal}.so")));
        std::fs::write(&source, contrast.replacen(begins, &format!("    if (count > 0) {crash}\n{begins}"), 1))
            .unwrap();
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-I"]).args([&header, &source]).arg("-o").arg(&library);
        assert!(compiler.status().unwrap().success());

        let mut check = Command::new("prlimit");
        check.args(["--core=0", program::PATH, "plugins", "check"]).arg(&library);
        let output = check.output().unwrap();
        assert_eq!(output.status.signal(), Some(signal), "{}", stderr_text(&output));
        let messages = stderr_text(&output);
        let named = format!("calling `score` of the plugin `contrast_reward_c` ({})", library.display());
        assert_eq!(messages.matches(&named).count(), 1, "{messages}");
        assert!(messages.contains("--resume"), "{messages}");
    }
}
