//! A user's mistakes: each ends with exit code 2 and a message that names the file, key or tensor, and leaves no run
//! directory behind.

use std::path::{Path, PathBuf};

use roll_wan::init_tiny::{WanKind, init_tiny};
use std::process::Output;

use crate::world::{SHORT, World, fails, stderr_text};

/// Writes a file of `world`.
fn write(world: &World, name: &str, bytes: &[u8]) {
    std::fs::write(world.path(name), bytes).unwrap();
}

/// Runs one step with everything right but what `settings` change.
fn run(world: &World, settings: &[&str]) -> Output {
    world.training("run", 1, &[&["reward.name=brightness"][..], settings].concat()).output().unwrap()
}

/// Asserts that the run fails as a user's mistake with a message that contains all of `parts`, and writes nothing.
fn refuses(world: &World, settings: &[&str], parts: &[&str]) {
    fails(&run(world, settings), 2, parts);
    assert!(!world.path("run").exists(), "a run directory was left behind");
}

fn low_noise(world: &World) -> PathBuf {
    world.path("tiny/low_noise_model/diffusion_pytorch_model.safetensors")
}

/// Rewrites one tensor entry of a safetensors header through `change`.
fn edit_header(path: &Path, change: impl Fn(&mut serde_json::Value)) {
    let bytes = std::fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    change(&mut header);
    let header = header.to_string().into_bytes();
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header);
    out.extend(&bytes[8 + length..]);
    std::fs::write(path, out).unwrap();
}

#[test]
fn the_valid_configuration_runs() {
    let world = World::new(1);
    let output = run(&world, &[]);
    assert!(output.status.success(), "{}", stderr_text(&output));
    assert!(world.path("run/summary.json").exists());
}

#[test]
fn names_a_missing_weight_list() {
    refuses(&World::new(1), &["model.model_paths=nowhere.json"], &["nowhere.json"]);
}

#[test]
fn names_a_truncated_weight_file() {
    let world = World::new(1);
    let bytes = std::fs::read(low_noise(&world)).unwrap();
    std::fs::write(low_noise(&world), &bytes[..bytes.len() / 2]).unwrap();
    refuses(&world, &[], &["diffusion_pytorch_model.safetensors"]);
}

#[test]
fn names_a_header_longer_than_its_file() {
    let world = World::new(1);
    let mut bytes = std::fs::read(low_noise(&world)).unwrap();
    bytes[..8].copy_from_slice(&(1u64 << 40).to_le_bytes());
    std::fs::write(low_noise(&world), bytes).unwrap();
    refuses(&world, &[], &["diffusion_pytorch_model.safetensors", "header"]);
}

#[test]
fn names_a_tensor_of_the_wrong_shape() {
    let world = World::new(1);
    edit_header(&low_noise(&world), |header| {
        let shape = &mut header["blocks.0.ffn.0.weight"]["shape"];
        let turned = serde_json::json!([shape[1], shape[0]]);
        *shape = turned;
    });
    refuses(&world, &[], &["blocks.0.ffn.0.weight"]);
}

#[test]
fn names_a_missing_tensor() {
    let world = World::new(1);
    edit_header(&low_noise(&world), |header| {
        let entry = header.as_object_mut().unwrap().remove("blocks.1.self_attn.k.weight").unwrap();
        header["blocks.1.self_attn.kk.weight"] = entry;
    });
    refuses(&world, &[], &["blocks.1.self_attn.k.weight"]);
}

#[test]
fn rejects_a_pickle_that_would_run_code() {
    let world = World::new(1);
    // A legacy pickle whose REDUCE would call os.system: protocol 2, GLOBAL, string, tuple, REDUCE, STOP.
    write(&world, "tiny/evil.pth", b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.");
    let list = std::fs::read_to_string(world.path("tiny/wan22_paths.json")).unwrap();
    let mut list: Vec<serde_json::Value> = serde_json::from_str(&list).unwrap();
    list[1] = "evil.pth".into();
    write(&world, "tiny/wan22_paths.json", serde_json::json!(list).to_string().as_bytes());
    refuses(&world, &[], &["evil.pth"]);
}

#[test]
fn control_characters_of_names_are_escaped() {
    let world = World::new(1);
    let hostile = "\u{1b}]0;PWN\u{7}\u{202e}";
    let escaped = "\\u001b]0;PWN\\u0007\\u202e";
    let header = serde_json::json!({
        "__metadata__": {hostile: "x"}, hostile: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    });
    let header = header.to_string().into_bytes();
    write(&world, "w.safetensors", &[&(header.len() as u64).to_le_bytes()[..], &header, &[0; 4]].concat());
    write(&world, "metadata.csv", format!("video,prompt\n{hostile}.mp4,x\n").as_bytes());
    let outputs = [
        world.roll(&["inspect", "w.safetensors", "--keys"]),
        run(&world, &[]),
        run(&world, &[&format!("{hostile}=1")]),
        world.roll(&["convert-lora", "w.safetensors", hostile, "--to", "kohya"]),
    ];
    for output in outputs {
        let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap()).concat();
        assert!(text.contains(escaped), "{text:?}");
        assert!(!text.contains(['\u{1b}', '\u{7}', '\u{202e}']), "{text:?}");
    }
}

#[test]
fn names_the_component_that_is_no_adapter() {
    let vae = "model.lora_checkpoint=tiny/Wan2.1_VAE.safetensors";
    refuses(&World::new(1), &[vae], &["Wan2.1_VAE.safetensors", "expected a LoRA", "found the Wan2.1 VAE"]);
}

#[test]
fn likely_mistakes_are_warned_of() {
    let world = World::new(2);
    let long = "a grey square ".repeat(100);
    write(&world, "metadata.csv", format!("video,prompt,iamge\n0.mp4,{long},\n1.mp4,,\n").as_bytes());
    let full = "model.lora_checkpoint=tiny/low_noise_model/diffusion_pytorch_model.safetensors";
    let output = run(&world, &[full, "model.lora_rank=null"]);
    let text = stderr_text(&output);
    assert!(output.status.success(), "{text}");
    let warned = [
        "the column `iamge` is for rewards alone; did you mean `image`?",
        "1 of 2 prompts are empty, the first in line 3",
        "is cut to 512",
        "holds all weights of a network and no LoRA",
    ];
    warned.iter().for_each(|warning| assert!(text.contains(warning), "no {warning} in: {text}"));
}

#[test]
fn a_lora_of_another_base_is_warned_of() {
    let world = World::new(1);
    world.train("adapter", 1, &[&SHORT[..], &["reward.name=brightness"]].concat());
    init_tiny(world.path("other"), WanKind::I2v, 4).unwrap();
    for (base, is_warned) in [("tiny", false), ("other", true)] {
        let paths = format!("model.model_paths={base}/wan22_paths.json");
        let own = [paths.as_str(), "model.lora_checkpoint=adapter", "model.lora_rank=null"];
        let settings = [&SHORT[..], &["reward.name=brightness"], &own].concat();
        let output = world.training(&format!("on-{base}"), 1, &settings).output().unwrap();
        let text = stderr_text(&output);
        assert_eq!(text.contains("was trained on another base"), is_warned, "{base}: {text}");
    }
}

#[test]
fn values_that_only_take_memory_are_refused_by_key() {
    let world = World::new(1);
    refuses(&world, &["data.height=65536", "data.width=65536"], &["`data.height`", "65536 x 65536"]);
    refuses(&world, &["data.fps=1000"], &["`data.fps`", "240"]);
    refuses(&world, &["ranks=5000", "strategy.name=zero"], &["`ranks`", "256"]);
    refuses(
        &world,
        &["reward.name=clip", "reward.path=none", "reward.frames={uniform: 1000000000}"],
        &["reward.frames"],
    );
}

#[test]
fn suggests_the_nearest_key() {
    let world = World::new(1);
    refuses(&world, &["training.learning_rat=1"], &["learning_rat", "learning_rate"]);
    refuses(&world, &["model.lora_ranks=2"], &["lora_ranks", "lora_rank"]);
    refuses(&world, &["algo.num_inference_step=8"], &["num_inference_step", "num_inference_steps"]);
}

#[test]
fn suggests_the_nearest_component() {
    let output = World::new(1).roll(&["run", "--algo", "reward_f"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr_text(&output).contains("reward_fl"), "{}", stderr_text(&output));
}

#[test]
fn names_an_onnx_file_with_an_unknown_operator() {
    let world = World::new(1);
    std::fs::create_dir(world.path("faces")).unwrap();
    for name in ["scrfd_bad.onnx", "arcface_bad.onnx"] {
        write(&world, &format!("faces/{name}"), &onnx_with_operator("FlyToTheMoon"));
    }
    let settings = ["reward.name=insightface", "reward.reward_model_path=faces"];
    refuses(&world, &settings, &["FlyToTheMoon", "_bad.onnx", "the_node"]);
}

#[test]
fn names_an_invalid_video_with_its_row() {
    let world = World::new(1);
    write(&world, "0.mp4", b"this is a text file, whatever its name says");
    refuses(&world, &[], &["0.mp4", "metadata.csv"]);
}

#[test]
fn names_a_missing_prompt_column() {
    let world = World::new(1);
    write(&world, "metadata.csv", b"video,caption\n0.mp4,a grey square\n");
    refuses(&world, &[], &["metadata.csv", "prompt", "caption"]);
}

#[test]
fn rejects_a_final_step_beyond_the_last() {
    refuses(&World::new(1), &["algo.final_timestep=8"], &["final_timestep", "7"]);
}

#[test]
fn names_a_reference_without_a_face() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    refuses_a_clip_without_a_face(&root.join("demo/assets/face"), "scrfd_demo.onnx", 64);
    let data = std::env::var_os("ROLL_TEST_DATA").map_or_else(|| root.join("../shared"), PathBuf::from);
    let real = data.join("models");
    if !real.exists() {
        let why = format!("{} is not there (set ROLL_TEST_DATA); the demo's networks were tried", real.display());
        roll_testing::skip!(why, needs = "media");
    }
    refuses_a_clip_without_a_face(&real, "scrfd_2.5g_bnkps.onnx", 640);
}

fn refuses_a_clip_without_a_face(networks: &Path, detector: &str, side: usize) {
    let networks = networks.canonicalize().unwrap();
    let settings = [
        "reward.name=insightface".to_string(),
        format!("reward.reward_model_path={}", networks.display()),
        format!("reward.detector={detector}"),
        format!("reward.det_size={side}"),
        // By default, such a clip is left out.
        "reward.on_missing=error".to_string(),
    ];
    refuses(&World::new(1), &settings.each_ref().map(String::as_str), &["face", "0.mp4"]);
}

/// The least ONNX file with one node of type `operator`, written out as protobuf.
fn onnx_with_operator(operator: &str) -> Vec<u8> {
    fn field(out: &mut Vec<u8>, number: u8, bytes: &[u8]) {
        out.extend([number << 3 | 2, u8::try_from(bytes.len()).unwrap()]);
        out.extend(bytes);
    }
    fn value_info(name: &str) -> Vec<u8> {
        let mut shape = Vec::new();
        for dimension in [1u8, 3, 16, 16] {
            field(&mut shape, 1, &[1 << 3, dimension]);
        }
        let mut tensor = vec![1 << 3, 1];
        field(&mut tensor, 2, &shape);
        let mut kind = Vec::new();
        field(&mut kind, 1, &tensor);
        let mut info = Vec::new();
        field(&mut info, 1, name.as_bytes());
        field(&mut info, 2, &kind);
        info
    }
    let mut node = Vec::new();
    field(&mut node, 1, b"x");
    field(&mut node, 2, b"y");
    field(&mut node, 3, b"the_node");
    field(&mut node, 4, operator.as_bytes());
    let mut graph = Vec::new();
    field(&mut graph, 1, &node);
    field(&mut graph, 2, b"g");
    field(&mut graph, 11, &value_info("x"));
    field(&mut graph, 12, &value_info("y"));
    let mut model = vec![1 << 3, 7];
    field(&mut model, 7, &graph);
    field(&mut model, 8, &[2 << 3, 11]);
    model
}
