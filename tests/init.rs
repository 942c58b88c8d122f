//! `roll init`: every choice ends with a file that `roll check` accepts.

use std::io::Write;
use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};

use roll_core::{Kind, Registry, Tensor, Video};
use serde_json::Value;

use crate::judge::BrightnessJudge;
use crate::program::root;
use crate::world::{World, fails, stderr_text};

/// Model and data of a [`World`].
const TINY: [&str; 4] = [
    "model.model_paths=tiny/wan22_paths.json",
    "data.metadata=metadata.csv",
    "evaluation.metadata=metadata.csv",
    "steps=2",
];

/// `roll init` with these arguments; the answers are lines of standard input.
fn init(world: &World, arguments: &[&str], answers: &str) -> Output {
    let mut command = world.command(&[&["init"], arguments].concat());
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // The program may refuse before it reads.
    let _ = child.stdin.take().unwrap().write_all(answers.as_bytes());
    child.wait_with_output().unwrap()
}

/// `roll init FILE --yes` with these values.
fn init_with(world: &World, file: &str, values: &[&str]) -> Output {
    let mut arguments = vec![file, "--yes"];
    values.iter().for_each(|value| arguments.extend(["--set", value]));
    init(world, &arguments, "")
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), stderr_text(output))
}

fn picture(world: &World) {
    let picture = Video::new(Tensor::full([1, 3, 64, 64], 0.5), 8.0).unwrap();
    let pictures = roll_media::write_pngs(world.path("pictures"), &picture).unwrap();
    std::fs::rename(&pictures[0], world.path("picture.png")).unwrap();
}

#[test]
fn wrong_answers_are_asked_again_at_once_and_the_data_proposes_size_and_length() {
    let world = World::new(3);
    picture(&world);
    let wrong = "x 8 1 9 1 nowhere.json metadata.csv tiny/wan22_paths.json missing.csv metadata.csv 65".split(' ');
    let sizes = ["", "", "many", ""];
    // The last two rewards: one has no gradient, and one has no file.
    let rewards = ["bright", "judge", "no address", "m", "Is it good?", "http://127.0.0.1:9/v1"];
    let files = ["onnx", "nowhere.onnx", "metadata.csv"];
    let answers: Vec<&str> = wrong.chain(sizes).chain(rewards).chain(files).collect();
    // The last question has no answer.
    let output = init(&world, &["my.yaml"], &(answers.join("\n") + "\n"));
    let said = text(&output);
    fails(&output, 1, &["the answers ended", "--set KEY=VALUE", "--yes"]);
    assert!(!world.path("my.yaml").exists(), "{said}");
    for part in [
        "from 1 to 7, or a name; found `x`",
        "found `8`",
        "from 1 to 3, or a name; found `9`",
        "nowhere.json",
        "missing.csv",
        "most clips have 64x64 pixels, half of them 9 frames or more",
        "(`data.height`) [64]",
        "expected a multiple of 16, found 65",
        "(`data.num_frames`) [9]",
        "found `many`",
        "no reward is called `bright`",
        "the reward `judge` has no gradient",
        "nowhere.onnx",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }

    let answers = "1\n1\ntiny/wan22_paths.json\nmetadata.csv\n\n\n\nbrightness\n\na grey square\npicture.png\n2\n\n1\n";
    let output = init(&world, &["my.yaml"], answers);
    assert!(output.status.success(), "{}", text(&output));
    assert!(text(&output).contains("roll run my.yaml"), "{}", text(&output));
    let written = std::fs::read_to_string(world.path("my.yaml")).unwrap();
    for line in [
        "steps: 2",
        "save_steps: 1",
        "backend: flex",
        "  name: reward_fl",
        "  model_paths: tiny/wan22_paths.json",
        "  num_frames: 9",
        "  learning_rate: 0.001",
    ] {
        assert!(written.lines().any(|found| found == line), "{line}: {written}");
    }
    assert!(written.contains("# Number of optimizer steps") && written.contains("picture.png"), "{written}");
    world.done(&["run", "--config", "my.yaml", "--out", "mine", "--set", "sample_steps=0"]);

    fails(&init(&world, &["my.yaml"], ""), 2, &["my.yaml", "--force"]);
    // The demo, by empty answers alone.
    let output = init(&world, &["my.yaml", "--force"], &"\n".repeat(3));
    assert!(output.status.success(), "{}", text(&output));
    assert!(!std::fs::read_to_string(world.path("my.yaml")).unwrap().contains("model_paths"));
}

#[test]
fn every_answer_can_be_an_argument_and_a_wrong_one_is_an_error_before_anything_is_written() {
    let world = World::new(2);
    for (wrong, parts) in [
        ("algo.name=ppo", &["algo.name=ppo", "no algorithm is called `ppo`"][..]),
        ("data.height=63", &["data.height=63", "multiple of 16"]),
        ("data.metadata=missing.csv", &["data.metadata=missing.csv", "cannot read"]),
        ("steps=-1", &["steps=-1", "at least 0"]),
        ("training.lr=1", &["training.lr"]),
        ("steps", &["key=value"]),
        ("reward.name=judge", &["reward.name", "no gradient"]),
        ("reward.name=onnx", &["reward.file", "--set reward.file="]),
    ] {
        let mut values = TINY.to_vec();
        values.extend(["reward.name=brightness", "model.lora_rank=2"]);
        let key = wrong.split('=').next().unwrap();
        values.retain(|value| !value.starts_with(&format!("{key}=")));
        values.push(wrong);
        let output = init_with(&world, "wrong.yaml", &values);
        fails(&output, 2, parts);
        let is_checked = wrong.starts_with("training.lr");
        assert!(world.path("wrong.yaml").exists() == is_checked, "{wrong}: {}", text(&output));
        let _ = std::fs::remove_file(world.path("wrong.yaml"));
    }
    // A key that nothing asks for is written too.
    let own = ["reward.name=brightness", "model.lora_rank=2", "algo.kl_weight=0.25", "reward.weight=2"];
    let output = init_with(&world, "own.yaml", &[&TINY[..], &own].concat());
    assert!(output.status.success(), "{}", text(&output));
    let written = std::fs::read_to_string(world.path("own.yaml")).unwrap();
    assert!(written.contains("kl_weight: 0.25") && written.contains("weight: 2"), "{written}");
}

/// A process that is killed with its owner.
struct Service(Child);

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The example of a reward over HTTP, and its address.
fn reward_service() -> (Service, String) {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let program = root().join("examples/reward_http/brightness.py");
    let child = Command::new("python3").arg(program).arg(port.to_string()).stdout(Stdio::null()).spawn().unwrap();
    (Service(child), format!("http://127.0.0.1:{port}"))
}

#[test]
fn every_reward_with_every_algorithm_is_a_file_that_the_check_accepts() {
    if Command::new("python3").arg("--version").output().is_err() {
        roll_testing::skip!("there is no Python", needs = "python");
    }
    let world = World::new(2);
    let root = root();
    let (_service, url) = reward_service();
    let judge = BrightnessJudge::start();
    let in_root = |path: &str| root.join(path).display().to_string();
    // Clips with faces, for the rewards that look for one.
    let faces = in_root("demo/assets/clips/unseen/metadata.csv");
    // The network and the text of a reward that sees.
    let seeing = |folder: &str, weights: &str| {
        let file = |name: &str| in_root(&format!("tests/fixtures/{folder}/{name}"));
        let (weights, config, tokenizer) = (file(weights), file("hf_config.json"), file("tokenizer.json"));
        let paths = format!("model_path: {weights}, config_path: {config}, tokenizer_path: {tokenizer}");
        vec![format!("reward.model={{name: qwen_vl, {paths}}}"), format!("reward.prompt_file={}", file("template.txt"))]
    };
    let options = |reward: &str| -> Vec<String> {
        match reward {
            "videoalign" => seeing("videoalign_tiny", "checkpoint_full.safetensors"),
            "hpsv3" => seeing("hpsv3_tiny", "model.safetensors"),
            "clip" => vec![format!("reward.path={}", in_root("roll-rewards/scorers/tests/data/clip_tiny"))],
            "command" => vec![format!("reward.command=python3 {}", in_root("examples/reward_command/brightness.py"))],
            "http" => vec![format!("reward.url={url}")],
            "insightface" => {
                vec![
                    format!("reward.reward_model_path={}", in_root("demo/assets/face")),
                    "reward.det_size=64".into(),
                    format!("data.metadata={faces}"),
                    format!("evaluation.metadata={faces}"),
                ]
            }
            "judge" => vec![format!("reward.url={}", judge.url), "reward.model=m".into()],
            "onnx" => vec![
                format!("reward.file={}", in_root("demo/assets/face/arcface_demo.onnx")),
                "reward.score=cosine".into(),
            ],
            _ => Vec::new(),
        }
    };
    let registry = Registry::linked().unwrap();
    let mut tried = 0;
    for entry in registry.entries().iter().filter(|entry| entry.factory.kind() == Kind::Reward) {
        for algorithm in ["reward_fl", "diffusion_nft", "flow_grpo"] {
            let (file, algo) = (format!("{algorithm}-{}.yaml", entry.name), format!("algo.name={algorithm}"));
            let own = options(entry.name);
            let mut values = TINY.to_vec();
            let set = |value: &&str| own.iter().all(|own| own.split('=').next() != value.split('=').next());
            values.retain(set);
            let name = format!("reward.name={}", entry.name);
            values.extend([algo.as_str(), &name]);
            values.extend(own.iter().map(String::as_str));
            let output = init_with(&world, &file, &values);
            let has_gradient = !["judge", "vote"].contains(&entry.name);
            match algorithm == "reward_fl" && !has_gradient {
                true => fails(&output, 2, &["has no gradient", "diffusion_nft"]),
                false => assert!(output.status.success(), "{file}: {}", text(&output)),
            }
            tried += 1;
        }
    }
    assert!(tried >= 36, "{tried}");
}

#[test]
fn language_models_in_every_environment_and_on_conversations_are_accepted() {
    if Command::new("python3").arg("--version").output().is_err() {
        roll_testing::skip!("there is no Python", needs = "python");
    }
    let world = World::new(0);
    let root = root();
    world.done(&["init-tiny", "lm", "--kind", "lm"]);
    let process = format!("env.command=python3 {}", root.join("examples/environment/guess_number.py").display());
    let data = format!("algo.data={}", root.join("demo/assets/conversations.jsonl").display());
    let sft = ["algo.name=sft", data.as_str()];
    let pairs = format!("algo.data={}", root.join("demo/assets/preferences.jsonl").display());
    let dpo = ["algo.name=dpo", pairs.as_str()];
    let rows: [(&str, &[&str]); 6] = [
        ("frozen_lake", &["env.name=frozen_lake"]),
        ("sokoban", &["env.name=sokoban"]),
        ("process", &["env.name=process", &process]),
        ("mixed", &["env.name=mixed", "env.worlds={small: {name: frozen_lake}}"]),
        ("sft", &sft),
        ("dpo", &dpo),
    ];
    for (name, values) in rows {
        let mut all = vec!["algo.name=agentic_ppo", "model.model_path=lm", "algo.agent_system_template="];
        if ["sft", "dpo"].contains(&name) {
            all = vec!["model.model_path=lm"];
        }
        all.extend(values);
        let output = init_with(&world, &format!("{name}.yaml"), &all);
        assert!(output.status.success(), "{name}: {}", text(&output));
    }
    let output = init_with(&world, "none.yaml", &["algo.name=agentic_ppo", "model.model_path=lm", "env.name=http"]);
    fails(&output, 2, &["env.url"]);
}

#[test]
fn required_options_are_those_without_which_a_component_cannot_be_made() {
    let registry = Registry::linked().unwrap();
    // Questions come from a file or are made, and only the first needs a key, `env.path`.
    let needs_one_of_several = |name: &str| name == "questions";
    let mut required = 0;
    for entry in registry.entries() {
        let context = roll_core::BuildContext { headers_only: true, ..roll_core::BuildContext::new("flex") };
        let made = match entry.factory.kind() {
            Kind::Reward => registry.reward(entry.name, &entry.options(), &context).map(drop),
            Kind::Environment => registry.environment(entry.name, &entry.options(), &context).map(drop),
            _ => continue,
        };
        let needs: Vec<String> = entry.keys().into_iter().filter(|key| key.is_required()).map(|key| key.name).collect();
        assert_eq!(
            made.is_err(),
            !needs.is_empty() || needs_one_of_several(entry.name),
            "{}: {needs:?} {made:?}",
            entry.name
        );
        required += needs.len();
    }
    assert!(required >= 11, "{required}");
}

#[test]
fn a_machine_with_gpus_is_in_the_file() {
    let world = World::new(2);
    let read = |file: &str| -> Value {
        let loaded = world.done(&["config", "--config", file]);
        let value = |key: &str| {
            let line = loaded.lines().find(|line| line.starts_with(&format!("{key}:")));
            line.and_then(|line| line.split_whitespace().nth(1)).unwrap_or_default().trim_matches('"').to_string()
        };
        serde_json::json!([value("backend"), value("ranks"), value("strategy.name")])
    };
    let model = "tiny/wan22_paths.json\nmetadata.csv\n\n\n\nbrightness\n\n\n2\n\n1\n";
    for (file, place, found, devices) in [
        ("one.yaml", "2\n24\n", ["libtorch-cuda", "1", "single"], "1x24"),
        ("several.yaml", "3\n80\n4\n", ["libtorch-cuda", "4", "zero"], "4x80"),
    ] {
        // The check needs a build with this backend.
        let output = init(&world, &[file], &format!("1\n{place}{model}"));
        assert!(text(&output).contains(&format!("wrote {file}")), "{}", text(&output));
        assert!(text(&output).contains(&format!("--on {devices}")), "{}", text(&output));
        assert_eq!(read(file), serde_json::json!(found), "{file}");
    }
    let values = [&TINY[..], &["reward.name=brightness"]].concat();
    let mut arguments = vec!["on.yaml", "--yes", "--on", "8x80"];
    values.iter().for_each(|value| arguments.extend(["--set", value]));
    init(&world, &arguments, "");
    assert_eq!(read("on.yaml"), serde_json::json!(["libtorch-cuda", "8", "zero"]));
    fails(&init(&world, &["none.yaml", "--on", "8"], "1\n"), 2, &["8x80"]);
}
