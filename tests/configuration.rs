//! The configuration explains itself: every key has a text, and a file to begin with runs.

use roll_core::serde_json::{Map, Value};
use roll_core::{Kind, Registry};
use roll_train::config::sections;

use crate::world::{SHORT, World, fails};

/// Names of the values of a map, those of the maps within it in full.
fn leaves(prefix: &str, map: &Map<String, Value>, found: &mut Vec<String>) {
    for (name, value) in map {
        match value {
            Value::Object(map) if !map.is_empty() => leaves(&format!("{prefix}{name}."), map, found),
            _ => found.push(format!("{prefix}{name}")),
        }
    }
}

#[test]
fn every_key_is_documented() {
    let registry = Registry::linked().unwrap();
    let sections = sections(&registry);
    for section in &sections {
        assert!(!section.about.is_empty(), "{} says nothing of itself", section.title());
        for key in &section.keys {
            let name = &key.name;
            assert!(!key.about.is_empty(), "`{name}` of {} has no text", section.title());
            assert!(!key.values.is_empty(), "`{name}` of {} has no type", section.title());
            // A key of a section that may be left out need not have one.
            let above = section.keys.iter().find(|above| name.rsplit_once('.').is_some_and(|(of, _)| above.name == of));
            let has_default = key.default.is_some() || above.is_some_and(|above| above.default.is_some());
            // Entries of lists have keys that must be given.
            assert!(
                has_default || name.ends_with(".name") || name.contains(".N."),
                "`{name}` of {} has no default",
                section.title()
            );
            for text in key.choices.iter().map(|(_, about)| about).chain([&key.about]) {
                assert!(!text.contains("::") && !text.contains("]("), "`{name}` speaks to programmers: {text}");
            }
        }
    }
    for registration in registry.entries() {
        let of = Some((registration.factory.kind(), registration.name));
        let section = sections.iter().find(|section| section.component == of).unwrap();
        let mut options = Vec::new();
        leaves("", &registration.options(), &mut options);
        for option in options {
            // The values of the key above list words and maps with one of several keys.
            let above = option.rsplit_once('.').map_or(option.as_str(), |(above, _)| above);
            let is_documented = section.keys.iter().any(|key| {
                let ends = |name: &str| key.name.ends_with(&format!(".{name}"));
                ends(&option) || (ends(above) && !key.choices.is_empty())
            });
            assert!(is_documented, "`{option}` of {} is not documented", section.title());
        }
    }
}

#[test]
fn the_reference_selects_sections_components_and_keys() {
    let world = World::new(0);
    let all = world.done(&["config", "--reference"]);
    for part in ["training.learning_rate", "reward `insightface`", "algo.mid_timestep", "strategy.stage", "env.size"] {
        assert!(all.contains(part), "no {part}");
    }
    assert!(all.lines().all(|line| line.chars().count() <= 80 || !line.trim().contains(' ')), "lines are too wide");
    let betas = world.done(&["config", "--reference", "training.betas"]);
    assert!(betas.contains("2 entries, each a number of at least 0 and below 1; default `[0.9,0.999]`"), "{betas}");
    assert!(!betas.contains("learning_rate"));
    assert!(world.done(&["config", "--reference", "lora_rank"]).contains("model `causal_lm`"));
    assert_eq!(
        world.done(&["config", "--reference", "--format", "markdown"]),
        world.done(&["config", "--reference", "--format", "markdown"])
    );
    fails(
        &world.roll(&["config", "--reference", "training.learnin_rate"]),
        2,
        &["did you mean `training.learning_rate`"],
    );
    let face = world.done(&["plugins", "info", "insightface"]);
    assert!(face.contains("reward.N.det_threshold") && face.contains("a number from 0 to 1"), "{face}");
    fails(&world.roll(&["plugins", "info", "insightfac"]), 2, &["did you mean `insightface`"]);
}

#[test]
fn templates_of_all_algorithms_equal_the_demo() {
    let registry = Registry::linked().unwrap();
    let algorithms = registry.entries().iter().filter(|entry| entry.factory.kind() == Kind::Algorithm);
    for algorithm in algorithms.map(|entry| entry.name) {
        let world = World::new(0);
        let model = if ["agentic_ppo", "sft", "dpo"].contains(&algorithm) { "causal_lm" } else { "wan2_2" };
        let named = ["--algo", algorithm, "--model", model];
        let template = world.done(&[&["config", "--template"], &named[..]].concat());
        std::fs::write(world.path("template.yaml"), &template).unwrap();
        world.done(&["run", "--config", "template.yaml", "--dry-run"]);
        let values = |arguments: &[&str]| -> Vec<String> {
            let listing = world.done(&[&["config"], arguments].concat());
            listing.lines().map(|line| line.rsplit_once(" # ").unwrap().0.trim_end().to_string()).collect()
        };
        let (of_template, of_demo) = (values(&["--config", "template.yaml"]), values(&named));
        assert_eq!(of_template.len(), of_demo.len(), "{algorithm}");
        assert!(of_demo.iter().all(|line| of_template.contains(line)), "{algorithm}: {of_template:#?}");
        // Whatever is commented out may be taken in as it stands.
        let whole: String = template.lines().map(|line| uncommented(line) + "\n").collect();
        std::fs::write(world.path("whole.yaml"), whole).unwrap();
        assert_eq!(values(&["--config", "whole.yaml"]).len(), of_demo.len(), "{algorithm}");
    }
}

/// A line of a value that is commented out, without the mark: `#steps: 3`, but no `# text`.
fn uncommented(line: &str) -> String {
    let text = line.trim_start();
    match text.strip_prefix('#') {
        Some(value) if !value.starts_with(' ') => format!("{}{value}", &line[..line.len() - text.len()]),
        _ => line.to_string(),
    }
}

#[test]
fn rejects_invalid_values_by_key_and_place() {
    let world = World::new(0);
    std::fs::write(world.path("a.yaml"), "algo:\n  name: agentic_ppo\n  ratio_type: foo\nmodel: {name: causal_lm}\n")
        .unwrap();
    let output = world.roll(&["config", "--config", "a.yaml"]);
    fails(&output, 2, &["`algo.ratio_type`", "`token` or `segment`, found `foo`", "a.yaml:3"]);
    let set = |assignment: &str| {
        world.roll(&["config", "--algo", "agentic_ppo", "--model", "causal_lm", "--set", assignment])
    };
    fails(&set("algo.group_size=0"), 2, &["`algo.group_size`", "at least 1, found 0"]);
    fails(&set("training.betas=[0.9, 1]"), 2, &["`training.betas.1`", "below 1"]);
    fails(&set("training.lr_scheduler_type=cosin"), 2, &["`training.lr_scheduler_type`", "cosine_with_restarts"]);
    fails(
        &set("training.learning_rate=fast"),
        2,
        &["`training.learning_rate`", "a number of at least 0, found `fast`"],
    );
    fails(&set("steps=1.5"), 2, &["`steps`", "a whole number", "found 1.5"]);
    fails(&set("steps=1e400"), 2, &["`steps`", "a finite number"]);
}

#[test]
fn rejects_invalid_tagged_choices() {
    let world = World::new(0);
    let set = |assignment: &str| world.roll(&["config", "--set", assignment]);
    fails(&set("algo.trained_steps={last:1}"), 2, &["write a space after the colon", "`last: 1`"]);
    for wrong in ["{latest: 1}", "{last: 1, random: 2}", "{last: many}", "[last]", "3"] {
        fails(&set(&format!("algo.trained_steps={wrong}")), 2, &["`algo.trained_steps", "expected"]);
    }
    assert!(set("algo.trained_steps={last: 1}").status.success());
}

#[test]
fn a_choice_is_replaced_by_a_later_one() {
    let world = World::new(0);
    let recipe = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/recipes/identity-i2v.yaml");
    let write = |name: &str, text: &str| std::fs::write(world.path(name), text).unwrap();
    write("last.yaml", "algo: {trained_steps: {last: 1}}\n");
    write("dotted.yaml", "algo.trained_steps: {last: 1}\n");
    write("composed.yaml", "defaults: [base, last]\n");
    write("base.yaml", "algo: {trained_steps: {leap: {discount: 0.5}}}\n");
    let config = |arguments: &[&str]| world.done(&[&["config", recipe], arguments].concat());
    for arguments in [
        &["--set", "algo.trained_steps={last: 1}"][..],
        &["--set", "algo.trained_steps.last=1"],
        &["--unset", "algo.trained_steps", "--set", "algo.trained_steps={last: 1}"],
        &[
            "--set",
            "algo.trained_steps={last: 2}",
            "--set",
            "algo.trained_steps.leap=null",
            "--set",
            "algo.trained_steps.last=1",
        ],
        &["last.yaml"],
        &["dotted.yaml"],
        &["composed.yaml"],
    ] {
        let listing = config(arguments);
        assert!(listing.contains("trained_steps.last:") && !listing.contains("leap"), "{arguments:?}: {listing}");
    }
    for arguments in [
        &["--set", "algo.trained_steps={leap: {discount: 0.7}}"][..],
        &["--set", "algo.trained_steps.leap.discount=0.7"],
    ] {
        let listing = config(&[&["--set", "algo.trained_steps.leap.similarity_floor=0.2"], arguments].concat());
        assert!(listing.contains(" 0.7") && listing.contains(" 0.2"), "a choice merges with itself: {listing}");
    }
    fails(
        &world.roll(&["config", recipe, "--set", "algo.trained_steps={last: 1, leap: {}}"]),
        2,
        &["`algo.trained_steps"],
    );
}

#[test]
fn a_component_of_another_name_replaces_the_earlier_one() {
    let world = World::new(0);
    let write = |name: &str, text: &str| std::fs::write(world.path(name), text).unwrap();
    write(
        "a.yaml",
        "algo: {name: reward_fl, mid_timestep: 3, num_inference_steps: 6}\nreward: {name: brightness, target: 0.5}\n",
    );
    write("b.yaml", "algo: {name: diffusion_nft, beta: 0.3}\nreward: {name: sharpness}\n");
    write("dotted.yaml", "algo.name: diffusion_nft\nalgo.beta: 0.3\nreward.name: sharpness\n");
    let value = |listing: &str, key: &str| {
        let line = listing.lines().find(|line| line.starts_with(&format!("{key}:"))).map(str::to_string);
        line.unwrap_or_default().split_whitespace().nth(1).unwrap_or("none").to_string()
    };
    for arguments in [
        &["b.yaml"][..],
        &["dotted.yaml"],
        &["--set", "algo={name: diffusion_nft, beta: 0.3}", "--set", "reward={name: sharpness}"],
    ] {
        let listing = world.done(&[&["config", "a.yaml"], arguments].concat());
        let values =
            ["algo.name", "algo.mid_timestep", "reward.0.name", "reward.0.target"].map(|key| value(&listing, key));
        assert_eq!(values, ["\"diffusion_nft\"", "none", "\"sharpness\"", "none"], "{arguments:?}: {listing}");
        assert_ne!(value(&listing, "algo.num_inference_steps"), "6", "{arguments:?}");
    }
    let same = world.done(&["config", "a.yaml", "--set", "algo={name: reward_fl, final_timestep: 4}"]);
    assert_eq!(value(&same, "algo.mid_timestep"), "3", "one name is one component: {same}");
}

#[test]
fn values_of_the_command_line_apply_in_its_order() {
    let world = World::new(0);
    let seed = |arguments: &[&str]| {
        let listing = world.done(&[&["config"], arguments].concat());
        listing
            .lines()
            .find(|line| line.starts_with("seed:"))
            .unwrap_or_default()
            .split_whitespace()
            .nth(1)
            .unwrap()
            .to_string()
    };
    assert_eq!(seed(&["--set", "seed=3", "--unset", "seed"]), "42");
    assert_eq!(seed(&["--unset", "seed", "--set", "seed=3"]), "3");
    let name = |arguments: &[&str]| world.done(&[&["config"], arguments].concat()).contains("\"flow_grpo\"");
    assert!(name(&["--set", "algo.name=diffusion_nft", "--algo", "flow_grpo"]));
    assert!(!name(&["--algo", "flow_grpo", "--set", "algo.name=diffusion_nft"]));
    for (name, number) in [("1.yaml", 1), ("2.yaml", 2)] {
        std::fs::write(world.path(name), format!("seed: {number}\n")).unwrap();
    }
    assert_eq!(seed(&["1.yaml", "2.yaml"]), "2");
    assert_eq!(seed(&["--config", "2.yaml", "1.yaml"]), "1");
    assert_eq!(seed(&["2.yaml", "-c", "1.yaml"]), "1");
    for command in ["run", "train", "check", "plan", "generate", "config"] {
        let more: &[&str] = if command == "generate" { &["--prompt", "a", "--output", "a.mp4"] } else { &[] };
        fails(&world.roll(&[&[command, "nowhere.yaml"], more].concat()), 2, &["nowhere.yaml"]);
    }
    std::fs::create_dir(world.path("folder")).unwrap();
    fails(&world.roll(&["run", "folder"]), 2, &["is a directory", "configuration file"]);
    fails(&world.roll(&["run", "--steps", "-3"]), 2, &["whole number of at least 0"]);
    fails(
        &world.roll(&["generate", "--prompt", "a", "--output", "a.mp4", "--steps", "1.5"]),
        2,
        &["expected a whole number"],
    );
}

#[test]
fn a_run_uses_the_options_of_its_schedule() {
    let world = World::new(2);
    let schedule = [
        "training.lr_scheduler_type=polynomial",
        "training.learning_rate=1e-3",
        "training.lr_scheduler_kwargs={power: 2, lr_end: 2e-4}",
    ];
    let settings = [&["reward.name=brightness"][..], &SHORT, &schedule].concat();
    world.train("run", 4, &settings);
    let rates: Vec<f64> = world.metrics("run").iter().map(|row| row["lr"].as_f64().unwrap()).collect();
    // 8e-4 (1 - i / 4)^2 + 2e-4.
    for (rate, expected) in rates.iter().zip([1e-3, 6.5e-4, 4e-4, 2.5e-4]) {
        assert!((rate - expected).abs() < 1e-12, "{rates:?}");
    }
    // A run that goes on is at the same place of the same schedule.
    world.train("cut", 4, &[&settings[..], &["save_steps=2"]].concat());
    let newest = world.path("cut/checkpoints/step-000004");
    std::fs::remove_dir_all(newest).unwrap();
    world.done(&["run", "--resume", "cut"]);
    let again: Vec<f64> = world.metrics("cut").iter().map(|row| row["lr"].as_f64().unwrap()).collect();
    assert_eq!(again, rates);
}

#[test]
fn the_configuration_reference_is_up_to_date() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/src/configuration-reference.md"));
    let printed = World::new(0).done(&["config", "--reference", "--format", "markdown"]);
    let remedy = "roll config --reference --format markdown > docs/src/configuration-reference.md";
    assert!(page.unwrap() == printed, "another page is printed now: {remedy}");
}

#[test]
fn algorithms_on_language_models_have_learning_rates_of_their_own() {
    let world = World::new(0);
    for (algorithm, rate) in [("sft", "0.0001"), ("dpo", "0.00001"), ("agentic_ppo", "0.00001")] {
        let listing = world.done(&["config", "--set", &format!("algo.name={algorithm}")]);
        let line = listing.lines().find(|line| line.starts_with("training.learning_rate:")).unwrap();
        assert_eq!(line.split_whitespace().nth(1), Some(rate), "{algorithm}");
    }
}

#[test]
fn an_empty_file_is_refused() {
    let world = World::new(0);
    for text in ["", "# nothing\n"] {
        std::fs::write(world.path("empty.yaml"), text).unwrap();
        fails(&world.roll(&["check", "--config", "empty.yaml"]), 2, &["empty.yaml", "the file is empty"]);
    }
}
