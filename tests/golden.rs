//! What `roll config`, `roll plan --json` and `roll check` print for every example, recipe and demo, compared with the
//! files of `tests/golden`: one file per output.
//!
//! `config` is the difference from the defaults, which are in docs/src/configuration-reference.md and compared there.
//! Devices, their speed and host memory are arguments; paths, scores and measured times are replaced.
//! `ROLL_BLESS=1` rewrites the files: their difference shows a reviewer what a change does to every configuration.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Output;

use serde_json::Value;

use crate::program::{printed, root, stderr_text};
use crate::recipes;
use crate::world::World;

/// Machine of all estimates, so that none depends on the one that runs the test.
const MACHINE: [&str; 6] = ["--on", "1x24", "--tflops", "1", "--host-memory", "64"];

/// A configuration: its name here, and the arguments that choose it. `ROOT` is the repository.
type Case = (&'static str, &'static [&'static str]);

/// Configurations that are complete without other files than those of the repository and of a [`World`].
const COMPLETE: [Case; 14] = [
    ("short", &["ROOT/examples/short.yaml"]),
    (
        "reward_fl_clip",
        &["ROOT/examples/reward_fl_clip.yaml", "--set", "reward.name=sharpness", "--set", "data.metadata=metadata.csv"],
    ),
    ("demo-reward_fl", &[]),
    ("demo-diffusion_nft", &["--algo", "diffusion_nft"]),
    ("demo-flow_grpo", &["--algo", "flow_grpo"]),
    ("demo-flow_matching", &["--algo", "flow_matching"]),
    ("demo-picture", &["--model", "z_image"]),
    ("demo-agentic_ppo", &["--algo", "agentic_ppo", "--model", "causal_lm"]),
    ("demo-sft", &["--algo", "sft", "--model", "causal_lm"]),
    ("demo-dpo", &["--algo", "dpo", "--model", "causal_lm"]),
    ("demo-agent-critic", &["--algo", "agentic_ppo", "--model", "causal_lm", "--set", "algo.adv_estimator=gae"]),
    ("slippery", &["ROOT/demo/agent/slippery.yaml"]),
    ("sft-from-scratch", &["ROOT/demo/agent/sft.yaml"]),
    ("experts", &["ROOT/demo/world/experts.yaml"]),
];

/// Recipes, whose files [`recipes::official_world`] has for plans.
const RECIPES: [Case; 3] = [
    ("recipe-identity-i2v", &["ROOT/examples/recipes/identity-i2v.yaml", "--set", "reward={name: first_frame}"]),
    ("recipe-judge-t2v", &["ROOT/examples/recipes/judge-t2v.yaml", "--set", "reward.url=http://127.0.0.1:9/v1"]),
    ("recipe-clips-i2v", &["ROOT/examples/recipes/clips-i2v.yaml"]),
];

/// On a CPU, which every build has, with the tokenizer of a [`World`].
const OF_RECIPES: [&str; 4] = ["--set", "backend=flex", "--set", "model.tokenizer_path=tiny/google/umt5-xxl"];

/// Configurations that need files of others: `config` alone.
const INCOMPLETE: [Case; 8] = [
    ("judge-warm", &["ROOT/demo/judge/warm.yaml"]),
    ("recipe-videoalign-reward-fl", &["ROOT/examples/recipes/videoalign-reward-fl.yaml"]),
    ("recipe-videoalign-nft", &["ROOT/examples/recipes/videoalign-nft.yaml"]),
    ("recipe-sums-smollm2", &["ROOT/examples/recipes/sums-smollm2.yaml"]),
    ("recipe-find-square", &["ROOT/examples/recipes/find-square.yaml"]),
    ("sokoban", &["ROOT/demo/agent/sokoban.yaml"]),
    ("import-reward_fl", &["ROOT/fuzz/corpus/config/roll.yaml"]),
    ("anchors-and-references", &["ROOT/fuzz/corpus/config/ours.yaml"]),
];

/// Published networks, planned without their files.
const NETWORKS: [&str; 8] = [
    "wan2_2-i2v-a14b --on 1x80 --host-memory 250",
    "wan2_2-i2v-a14b --on 1x24 --host-memory 64 --set model.weights_dtype=int8",
    "wan2_2-i2v-a14b --on 8x80 --host-memory 1000 --set strategy.name=zero --set strategy.stage=3",
    "wan2_2-t2v-a14b --on 8x80 --host-memory 1000 --set algo.name=diffusion_nft",
    "wan2_2-t2v-a14b --on 8x80 --host-memory 1000 --set algo.name=flow_grpo",
    "wan2_1-t2v-14b --on 1x48 --host-memory 128 --set algo.name=flow_matching",
    "wan2_1-t2v-1_3b --on 1x24 --host-memory 64 --set algo.name=flow_matching --set model.lora_rank=0",
    "wan2_2-ti2v-5b --on 1x24 --host-memory 64",
];

fn roll(world: &World, command: &[&str], arguments: &[&str]) -> Output {
    let root = root().display().to_string();
    let arguments: Vec<String> = arguments.iter().map(|argument| argument.replace("ROOT", &root)).collect();
    let arguments: Vec<&str> = command.iter().copied().chain(arguments.iter().map(String::as_str)).collect();
    let mut command = world.command(&arguments);
    // The user's backend and number of cores would be in the output.
    command.env_remove("ROLL_BACKEND").env("RAYON_NUM_THREADS", "2").output().unwrap()
}

/// Standard output of a command that must succeed.
fn done(world: &World, command: &[&str], arguments: &[&str]) -> String {
    let output = roll(world, command, arguments);
    assert!(output.status.success(), "roll {command:?} {arguments:?}: {}{}", printed(&output), stderr_text(&output));
    printed(&output)
}

/// Keys whose value is not the default, each with its origin.
fn chosen(config: &str) -> String {
    let mut lines = String::new();
    for line in config.lines().filter(|line| !line.ends_with("# default")) {
        let (key, rest) = line.split_once(':').unwrap();
        let (value, origin) = rest.rsplit_once(" # ").unwrap();
        let _ = writeln!(lines, "{key}: {}  # {origin}", value.trim());
    }
    lines
}

/// JSON with a line per entry of the outermost object, and per element of its lists.
fn by_line(json: &str) -> String {
    let object: serde_json::Map<String, Value> = serde_json::from_str(json).unwrap();
    let mut lines = String::new();
    for (key, value) in object {
        match value.as_array() {
            Some(elements) => elements.iter().for_each(|element| _ = writeln!(lines, "{key}[] {element}")),
            None => _ = writeln!(lines, "{key} {value}"),
        }
    }
    lines
}

/// Replaces the scores that a reward gave, and the seconds that it took.
fn without_measurements(check: &str) -> String {
    let mut lines = String::new();
    for line in check.lines() {
        let scored = [" scores the first ", " scores a grey "].into_iter().find_map(|scores| {
            let (reward, rest) = line.split_once(scores)?;
            let (what, rest) = rest.split_once(' ')?;
            let (_, end) = rest.split_once(" s").unwrap_or((rest, ""));
            Some(format!("{reward}{scores}{what} #, in # s{end}"))
        });
        let _ = writeln!(lines, "{}", scored.as_deref().unwrap_or(line));
    }
    lines
}

/// Outputs that differ from their files.
#[derive(Default)]
struct Differences(Vec<String>);

impl Differences {
    fn compare(&mut self, file: &str, found: &str) {
        assert!(FILES.contains(&file.rsplit('.').nth(1).unwrap()), "{file} ends with none of {FILES:?}");
        let found = found.replace(&root().display().to_string(), "ROOT");
        let path = root().join("tests/golden").join(file);
        let expected = std::fs::read_to_string(&path).unwrap_or_default();
        if expected == found {
            return;
        }
        if std::env::var_os("ROLL_BLESS").is_some_and(|value| !value.is_empty()) {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, found).unwrap();
            return;
        }
        self.0.push(format!("tests/golden/{file}\n{}", difference(&expected, &found)));
    }
}

impl Drop for Differences {
    fn drop(&mut self) {
        if !self.0.is_empty() && !std::thread::panicking() {
            panic!("{}\nIf the new output is right, write it there with ROLL_BLESS=1.", self.0.join("\n"));
        }
    }
}

/// Lines of one text alone: those of the first after `-`, those of the second after `+`.
fn difference(expected: &str, found: &str) -> String {
    const SHOWN: usize = 20;
    let (mut expected, mut found): (Vec<&str>, Vec<&str>) = (expected.lines().collect(), found.lines().collect());
    let equal = expected.iter().zip(&found).take_while(|(a, b)| a == b).count();
    expected.drain(..equal);
    found.drain(..equal);
    while expected.last().is_some_and(|last| found.last() == Some(last)) {
        expected.pop();
        found.pop();
    }
    let mut text = format!("@ line {}\n", equal + 1);
    for (sign, lines) in [("-", expected), ("+", found)] {
        lines.iter().take(SHOWN).for_each(|line| _ = writeln!(text, "{sign} {line}"));
        if lines.len() > SHOWN {
            let _ = writeln!(text, "{sign} ... and {} more", lines.len() - SHOWN);
        }
    }
    text
}

/// The kinds of output.
const FILES: [&str; 3] = ["config", "plan", "check"];

#[test]
fn configurations_resolve_as_before() {
    let world = World::new(0);
    let mut differences = Differences::default();
    for (name, arguments) in COMPLETE.iter().chain(&RECIPES).chain(&INCOMPLETE) {
        let printed = done(&world, &["config", "-q"], arguments);
        differences.compare(&format!("{name}.config.txt"), &chosen(&printed));
    }
}

#[test]
fn plans_are_as_before() {
    let world = World::new(0);
    let recipes = recipes::official_world();
    let mut differences = Differences::default();
    for (name, arguments) in COMPLETE {
        let printed = done(&world, &["plan", "-q", "--json"], &[arguments, &MACHINE].concat());
        differences.compare(&format!("{name}.plan.txt"), &by_line(&printed));
    }
    for (name, arguments) in RECIPES {
        let printed = done(&recipes, &["plan", "-q", "--json"], &[arguments, &OF_RECIPES, &MACHINE].concat());
        differences.compare(&format!("{name}.plan.txt"), &by_line(&printed));
    }
    let mut networks = String::new();
    for network in NETWORKS {
        let arguments: Vec<&str> = network.split(' ').chain(["--tflops", "300"]).collect();
        let printed = done(&world, &["plan", "-q", "--json", "--network"], &arguments);
        let _ = write!(networks, "--network {network}\n{}\n", by_line(&printed));
    }
    differences.compare("networks.plan.txt", &networks);
}

/// Recipes lack their files here: the words for missing ones are compared. The module `recipes` checks them with
/// files of the official sizes, which takes a minute.
#[test]
fn checks_say_as_before() {
    let world = World::new(2);
    let mut differences = Differences::default();
    for (name, arguments) in COMPLETE.iter().chain(&RECIPES) {
        let more = if RECIPES.iter().any(|(recipe, _)| recipe == name) { &OF_RECIPES[..] } else { &[] };
        let output = roll(&world, &["check", "-q"], &[arguments, more, &MACHINE].concat());
        let said = without_measurements(&printed(&output));
        let code =
            output.status.code().unwrap_or_else(|| panic!("{name}: {}: {}", output.status, stderr_text(&output)));
        differences.compare(&format!("{name}.check.txt"), &format!("{said}exit code {code}\n"));
    }
}

/// A file that no test compares would be read as if it were true.
#[test]
fn every_golden_file_is_compared() {
    let cases = |list: &[Case], kinds: &[&str]| -> Vec<String> {
        list.iter().flat_map(|(name, _)| kinds.iter().map(move |kind| format!("{name}.{kind}.txt"))).collect()
    };
    let mut expected: BTreeSet<String> = cases(&COMPLETE, &FILES).into_iter().collect();
    expected.extend(cases(&RECIPES, &FILES).into_iter().chain(cases(&INCOMPLETE, &FILES[..1])));
    expected.insert("networks.plan.txt".into());
    let names = |directory: &Path| -> BTreeSet<String> {
        let entries = std::fs::read_dir(directory).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    };
    assert_eq!(names(&root().join("tests/golden")), expected);
}

/// A new example, recipe or demo is compared too.
#[test]
fn every_configuration_file_of_the_repository_is_a_case() {
    let cases: BTreeSet<&str> =
        COMPLETE.iter().chain(&RECIPES).chain(&INCOMPLETE).flat_map(|(_, c)| *c).copied().collect();
    for folder in ["examples", "examples/recipes", "demo/agent", "demo/judge", "demo/world"] {
        for entry in std::fs::read_dir(root().join(folder)).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            if name.ends_with(".yaml") {
                let path = format!("ROOT/{folder}/{name}");
                assert!(cases.contains(path.as_str()), "no case has {path}");
            }
        }
    }
    let demos = std::fs::read_dir(root().join("roll-cli/src")).unwrap();
    for entry in demos {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let Some(algorithm) = name.strip_prefix("demo_").and_then(|name| name.strip_suffix(".yaml")) else { continue };
        // Parts of other demos.
        if ["reward", "agent", "agent_env"].contains(&algorithm) {
            continue;
        }
        assert!(COMPLETE.iter().any(|(name, _)| *name == format!("demo-{algorithm}")), "no case has the demo {name}");
    }
}

#[test]
fn a_difference_is_shown_by_its_lines() {
    assert_eq!(difference("a\nb\nc\n", "a\nx\ny\nc\n"), "@ line 2\n- b\n+ x\n+ y\n");
    assert_eq!(difference("", "a\n"), "@ line 1\n+ a\n");
    let scored = "reward     `a` scores the first clip 0.97, in 0.12 s with its gradient\nno problem found\n";
    let expected = "reward     `a` scores the first clip #, in # s with its gradient\nno problem found\n";
    assert_eq!(without_measurements(scored), expected);
    assert_eq!(chosen("a:   1   # default\nb.c:  \"x # y\"   # f.yaml:3\n"), "b.c: \"x # y\"  # f.yaml:3\n");
    assert_eq!(by_line(r#"{"a": 1, "b": [{"c": 2}, 3]}"#), "a 1\nb[] {\"c\":2}\nb[] 3\n");
}
