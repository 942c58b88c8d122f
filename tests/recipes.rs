//! The recipes of the book: checked with files of the official sizes, and run with small ones.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use roll_network::weights::save_safetensors;
use serde_json::{Value, json};

use crate::adapters::{distillation, picture};
use crate::judge::BrightnessJudge;
use crate::program::root;
use crate::world::{World, stderr_text};

/// The path of a recipe.
pub fn recipe(name: &str) -> String {
    root().join(format!("examples/recipes/{name}.yaml")).to_str().unwrap().to_string()
}

/// The settings that the recipe's part of the page proposes: `--set a=b --set c=d` each.
fn proposals(heading: &str) -> Vec<Vec<String>> {
    let page = std::fs::read_to_string(root().join("docs/src/recipes.md")).unwrap();
    let part = page.split("\n## ").find(|part| part.starts_with(heading)).unwrap();
    let text = part.split("```").step_by(2).collect::<String>().split_whitespace().collect::<Vec<_>>().join(" ");
    let quoted = text.split('`').skip(1).step_by(2).filter(|text| text.contains('='));
    quoted
        .map(|text| {
            let settings = text.split("--set ").map(|setting| setting.trim().trim_matches('\'').to_string());
            settings.filter(|setting| !setting.is_empty()).collect()
        })
        .collect()
}

#[test]
fn every_line_of_the_page_runs_with_small_files() {
    let world = World::new(2);
    let judge = BrightnessJudge::start();
    picture(&world, "0.png", 0.1);
    world.done(&["init-tiny", "t2v", "--kind", "t2v"]);
    for expert in ["high", "low"] {
        save_safetensors(world.path(&format!("{expert}_noise.safetensors")), &distillation(), &BTreeMap::new())
            .unwrap();
    }
    std::fs::write(world.path("images.csv"), "image,prompt\n0.png,a face\n").unwrap();
    std::fs::write(world.path("prompts.txt"), "a dog runs\n").unwrap();
    let url = format!("reward.url={}", judge.url);
    for (name, heading, tiny, data, own, lines) in [
        ("identity-i2v", "Identity", "tiny", "images.csv", "reward={name: first_frame}", 2),
        ("judge-t2v", "What a judge", "t2v", "prompts.txt", url.as_str(), 1),
        ("clips-i2v", "Your own clips", "tiny", "metadata.csv", "model.lora_rank=2", 1),
    ] {
        let proposals = proposals(heading);
        assert_eq!(proposals.len(), lines, "{name}: {proposals:?}");
        for proposed in [Vec::new()].into_iter().chain(proposals) {
            let out = format!("{name}-{}", proposed.join("-").len());
            let settings = [
                "backend=flex".to_string(),
                format!("model.model_paths={tiny}/wan22_paths.json"),
                format!("model.tokenizer_path={tiny}/google/umt5-xxl"),
                "model.base_lora={dit: high_noise.safetensors, dit2: low_noise.safetensors}".into(),
                format!("data.metadata={data}"),
                format!("evaluation.metadata={data}"),
                "data.height=32".into(),
                "data.width=32".into(),
                "data.num_frames=5".into(),
                "evaluation.samples=1".into(),
                "ranks=1".into(),
                "training.gradient_accumulation_steps=1".into(),
                own.into(),
            ];
            let settings: Vec<_> = settings.iter().chain(&proposed).collect();
            let with = |command: &[&str]| {
                let mut arguments = command.to_vec();
                settings.iter().for_each(|setting| arguments.extend(["--set", setting]));
                let output = world.roll(&arguments);
                let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), stderr_text(&output));
                assert!(output.status.success(), "{name} {proposed:?}: {said}");
                assert!(!said.contains("no effect"), "{name} {proposed:?}: {said}");
            };
            let config = recipe(name);
            with(&["check", "--config", &config]);
            with(&["run", "--config", &config, "--steps", "1", "--out", &out]);
        }
    }
}

/// Tensors of a safetensors file, each with its shape.
fn shapes(path: &Path) -> BTreeMap<String, Vec<usize>> {
    let mut file = File::open(path).unwrap();
    let mut length = [0; 8];
    file.read_exact(&mut length).unwrap();
    let mut header = vec![0; u64::from_le_bytes(length) as usize];
    file.read_exact(&mut header).unwrap();
    let header: BTreeMap<String, Value> = serde_json::from_slice(&header).unwrap();
    let tensors = header.into_iter().filter(|(name, _)| name != "__metadata__");
    tensors.map(|(name, tensor)| (name, serde_json::from_value(tensor["shape"].clone()).unwrap())).collect()
}

/// Writes a file of these tensors that takes no room on the disk: its values are a hole.
pub fn write_hole(path: PathBuf, shapes: &BTreeMap<String, Vec<usize>>, (dtype, width): (&str, usize)) {
    let mut end = 0;
    let tensors: BTreeMap<_, _> = shapes
        .iter()
        .map(|(name, shape)| {
            let begin = end;
            end += shape.iter().product::<usize>() * width;
            (name, json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}))
        })
        .collect();
    let header = serde_json::to_vec(&tensors).unwrap();
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let mut file = File::create(path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(&header).unwrap();
    file.set_len((8 + header.len() + end) as u64).unwrap();
}

/// The tensors of a large network: those of a small one with its sizes replaced, and its first block `blocks` times.
fn enlarged(
    path: &Path,
    blocks: usize,
    sizes: &[(usize, usize)],
    own: &[(&str, &[usize])],
) -> BTreeMap<String, Vec<usize>> {
    let enlarge = |size: usize| sizes.iter().find(|(small, _)| *small == size).map_or(size, |(_, large)| *large);
    let mut large = BTreeMap::new();
    for (name, shape) in shapes(path) {
        let own = own.iter().find(|(of, _)| *of == name).map(|(_, shape)| shape.to_vec());
        let shape = own.unwrap_or_else(|| shape.into_iter().map(enlarge).collect());
        match name.strip_prefix("blocks.0.").filter(|_| blocks > 0) {
            Some(rest) => large.extend((0..blocks).map(|i| (format!("blocks.{i}.{rest}"), shape.clone()))),
            None if blocks > 0 && name.starts_with("blocks.") => (),
            None => {
                large.insert(name, shape);
            }
        }
    }
    large
}

/// A LoRA of rank 64 of all matrices of the blocks, as distillations come.
fn lora_of(transformer: &BTreeMap<String, Vec<usize>>) -> BTreeMap<String, Vec<usize>> {
    let mut lora = BTreeMap::new();
    for (name, shape) in transformer {
        let Some(layer) = name.strip_suffix(".weight").filter(|layer| layer.starts_with("blocks.")) else { continue };
        if let [out, inner] = shape[..] {
            lora.insert(format!("diffusion_model.{layer}.lora_down.weight"), vec![64, inner]);
            lora.insert(format!("diffusion_model.{layer}.lora_up.weight"), vec![out, 64]);
        }
    }
    lora
}

/// Stand-ins of A14B's files under the names that the recipes have, for `kind`, whose small files are in `tiny`.
fn write_official_sizes(world: &World, kind: &str, tiny: &str) {
    const BF16: (&str, usize) = ("BF16", 2);
    let small = |file: &str| world.path(tiny).join(file);
    let file = "high_noise_model/diffusion_pytorch_model.safetensors";
    let channels = if kind == "i2v" { 36 } else { 16 };
    let own: [(&str, &[usize]); 5] = [
        ("patch_embedding.weight", &[5120, channels, 1, 2, 2]),
        ("text_embedding.0.weight", &[5120, 4096]),
        ("head.head.weight", &[64, 5120]),
        ("head.head.bias", &[64]),
        ("time_projection.1.bias", &[30720]),
    ];
    let sizes = [(64, 5120), (128, 13824), (384, 30720)];
    let transformer = enlarged(&small(file), 40, &sizes, &own);
    for expert in ["high", "low"] {
        let path = format!("{kind}/{expert}_noise_model/diffusion_pytorch_model.safetensors");
        write_hole(world.path(&path), &transformer, BF16);
        write_hole(world.path(&format!("lightning/{expert}_noise_model.safetensors")), &lora_of(&transformer), BF16);
    }
    let file = "models_t5_umt5-xxl-enc-bf16.safetensors";
    let sizes = [(32, 4096), (64, 10240), (4, 64), (368, 256_384)];
    write_hole(world.path(&format!("{kind}/{file}")), &enlarged(&small(file), 24, &sizes, &[]), BF16);
    let file = "Wan2.1_VAE.safetensors";
    let sizes = [(6, 96), (12, 192), (24, 384), (48, 768), (72, 1152)];
    write_hole(world.path(&format!("{kind}/{file}")), &enlarged(&small(file), 0, &sizes, &[]), ("F32", 4));
    let paths = std::fs::read_to_string(small("wan22_paths.json")).unwrap();
    let paths: Vec<String> = serde_json::from_str(&paths).unwrap();
    let paths: Vec<_> = paths.iter().map(|path| format!("{kind}/{path}")).collect();
    std::fs::write(world.path(&format!("wan22_{kind}_paths.json")), serde_json::to_string(&paths).unwrap()).unwrap();
}

/// The files that the recipes name, those of networks in the official sizes.
pub fn official_world() -> World {
    let world = World::new(0);
    world.done(&["init-tiny", "t2v-small", "--kind", "t2v"]);
    write_official_sizes(&world, "i2v", "tiny");
    write_official_sizes(&world, "t2v", "t2v-small");
    std::fs::create_dir_all(world.path("data/clips")).unwrap();
    std::fs::create_dir_all(world.path("data/unseen")).unwrap();
    picture(&world, "data/face.png", 0.1);
    std::fs::write(world.path("data/people.csv"), "image,prompt\nface.png,a person smiles\n").unwrap();
    std::fs::write(world.path("data/unseen.csv"), "image,prompt\nface.png,a person waves\n").unwrap();
    std::fs::write(world.path("data/prompts.txt"), "a dog runs\n").unwrap();
    std::fs::write(world.path("data/unseen.txt"), "a cat sleeps\n").unwrap();
    for (i, folder) in ["clips", "unseen"].into_iter().enumerate() {
        let video = roll_core::Video::new(roll_core::Tensor::full([9, 3, 64, 64], 0.3 * i as f32), 8.0).unwrap();
        roll_media::write_mp4(world.path(&format!("data/{folder}/0.mp4")), &video).unwrap();
        std::fs::write(world.path(&format!("data/{folder}/0.txt")), "a grey square").unwrap();
    }
    world
}

#[test]
fn the_check_is_clean_for_the_machine_that_the_page_names() {
    let world = official_world();
    let page = std::fs::read_to_string(root().join("docs/src/recipes.md")).unwrap();
    let judge = BrightnessJudge::start();
    let url = format!("reward.url={}", judge.url);
    let tokenizer = "model.tokenizer_path=tiny/google/umt5-xxl";
    for (name, machine, own) in [
        ("identity-i2v", "1x80", "reward={name: first_frame}"),
        ("judge-t2v", "8x80", url.as_str()),
        ("clips-i2v", "1x24", tokenizer),
    ] {
        let check = ["check", "--config", &recipe(name), "--on", machine, "--set", tokenizer, "--set", own];
        let output = world.roll(&check);
        let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), stderr_text(&output));
        assert!(output.status.success() && !said.contains("PROBLEM"), "{name}: {said}");
        assert!(!said.contains("no effect"), "{name}: {said}");
        // The memory that the page says.
        let size = machine.split('x').nth(1).unwrap();
        let used = said.lines().find_map(|line| line.split_once(&format!(" of {size}.0 GB"))).unwrap().0;
        let used: f64 = used.trim().parse().unwrap();
        assert!(page.contains(&format!("| {used:.0} GB, ")), "{name}: {used}");
    }
}
