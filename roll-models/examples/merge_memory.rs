//! Peak memory and time of merging a LoRA into a base of many gigabytes.
//!
//!     cargo run --release -p roll-models --example merge_memory -- DIR [GB]
//!
//! Writes a base of random bf16 weights (10 GB unless given) in shards, a LoRA of rank 64 for every matrix of its
//! blocks, and the merged shards, all into DIR, and deletes them.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use roll_core::{Error, Result, Tensor};
use roll_models::lora::{Convention, Layer, Lora, LoraFile, MergeOptions, Names, WriteOptions, merge_lora, write_lora};
use roll_models::weights::{Checkpoint, SafetensorsWriter, TensorEntry};

/// Width of the A14B experts.
const DIM: usize = 5120;
const FFN: usize = 13824;
const RANK: usize = 64;
/// Blocks in a shard.
const PER_SHARD: usize = 4;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (directory, size) = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [directory] => (directory, 10.0),
        [directory, size] => (directory, size.parse().unwrap_or(10.0)),
        _ => return Err(Error::Unsupported("expected DIR [GB]".into())),
    };
    let directory = Path::new(directory);
    let (base, out) = (directory.join("base"), directory.join("merged"));
    std::fs::create_dir_all(&base).map_err(Error::file("create", &base))?;
    let per_block: usize = matrices().map(|(_, [rows, columns])| 2 * rows * columns).sum();
    let blocks = (size * 1e9 / per_block as f64).ceil() as usize;
    create_base(&base, blocks)?;
    let file = create_lora(directory, blocks)?;
    println!("base of {blocks} blocks, {:.2} GB; peak so far {:.0} MB", (blocks * per_block) as f64 / 1e9, peak()?);

    let start = Instant::now();
    let checkpoint = Checkpoint::open_any(&base)?;
    let lora = LoraFile::open(&file)?.one(None)?;
    let merged = merge_lora(&checkpoint, &lora, &out, &MergeOptions::default(), &mut |_| {})?;
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "merged {} tensors into {} files in {seconds:.0} s; peak of the process {:.0} MB",
        merged.changed,
        merged.files.len(),
        peak()?
    );
    for path in [&base, &out] {
        std::fs::remove_dir_all(path).map_err(Error::file("delete", path))?;
    }
    std::fs::remove_file(&file).map_err(Error::file("delete", &file))
}

fn matrices() -> impl Iterator<Item = (String, [usize; 2])> {
    let square = ["self_attn", "cross_attn"]
        .into_iter()
        .flat_map(|a| ["q", "k", "v", "o"].into_iter().map(move |m| (format!("{a}.{m}"), [DIM, DIM])));
    square.chain([("ffn.0".to_string(), [FFN, DIM]), ("ffn.2".to_string(), [DIM, FFN])])
}

fn create_base(directory: &Path, blocks: usize) -> Result<()> {
    let shards = blocks.div_ceil(PER_SHARD);
    let mut state = 1u64;
    for shard in 0..shards {
        let mut entries = Vec::new();
        for block in shard * PER_SHARD..((shard + 1) * PER_SHARD).min(blocks) {
            for (name, [rows, columns]) in matrices() {
                entries.push(TensorEntry {
                    name: format!("blocks.{block}.{name}.weight"),
                    dtype: "BF16".into(),
                    shape: vec![rows, columns],
                    bytes: (2 * rows * columns) as u64,
                    alignment: 2,
                });
            }
        }
        let name = format!("diffusion_pytorch_model-{:05}-of-{shards:05}.safetensors", shard + 1);
        let mut writer = SafetensorsWriter::create(directory.join(name), entries, &BTreeMap::new())?;
        for entry in writer.order().to_vec() {
            let mut left = entry.bytes as usize;
            while left > 0 {
                let piece: Vec<u8> = (0..left.min(1 << 20) / 2)
                    .flat_map(|_| {
                        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                        let unit = (state >> 40) as f32 / (1 << 23) as f32 - 1.0;
                        (((unit * 0.02).to_bits() >> 16) as u16).to_le_bytes()
                    })
                    .collect();
                writer.write(&entry.name, &piece)?;
                left -= piece.len();
            }
        }
        writer.finish()?;
    }
    Ok(())
}

fn create_lora(directory: &Path, blocks: usize) -> Result<std::path::PathBuf> {
    let mut lora = Lora::default();
    for block in 0..blocks {
        for (name, [rows, columns]) in matrices() {
            let down = Tensor::full([RANK, columns], 1e-3).to_float(roll_core::DType::Bf16)?;
            let up = Tensor::full([rows, RANK], 1e-3).to_float(roll_core::DType::Bf16)?;
            lora.layers.insert(format!("blocks.{block}.{name}"), Layer { down, up, alpha: Some(32.0), bias: None });
        }
    }
    let options = WriteOptions { convention: Convention::ComfyUi, names: Names::Official };
    Ok(write_lora(&lora, options, &BTreeMap::new(), &directory.join("lora.safetensors"))?)
}

/// Largest resident set so far, mapped pages included, in MB.
fn peak() -> Result<f64> {
    let path = "/proc/self/status";
    let text = std::fs::read_to_string(path).map_err(Error::file("read", path))?;
    let line = text.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    let kib = line.and_then(|l| l.split_whitespace().next()).and_then(|v| v.parse::<f64>().ok());
    kib.map(|k| k * 1024.0 / 1e6).ok_or_else(|| Error::bad_file(path, "no line VmHWM"))
}
