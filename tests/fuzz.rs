//! Runs every reader of untrusted files on deterministic mutations of its seed corpus. `FUZZ_TIMES` tries as many
//! times more of them, `FUZZ_SECONDS` as many as take so long; `fuzz/README.md` says how cargo-fuzz tries them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use roll_causal_lm::CausalLmOptions;
use roll_core::BuildContext;
use roll_network::weights::gguf::GgufFile;

#[path = "../fuzz/entries.rs"]
mod entries;

/// How many inputs each reader is tried with: about as many as it reads in a second.
const INPUTS: [(&str, usize); 12] = [
    ("safetensors", 10_000),
    ("pth", 1_000),
    ("gguf", 300),
    ("onnx", 4_000),
    ("mp4", 1_000),
    ("config", 2_000),
    ("lora_keys", 5_000),
    ("lora_metadata", 5_000),
    ("metadata", 5_000),
    ("picture", 5_000),
    ("tokenizer_json", 1_000),
    ("frame", 50_000),
];

/// An input that takes so long has found work without bound, which is a finding as a panic is: a few kilobytes are read
/// in milliseconds, on any machine.
const ENDLESS: Duration = Duration::from_secs(60);

/// A counter-based generator: numbers that do not depend on anything else.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

/// Bytes that lengths and counts like to be confused by.
const NUMBERS: [&[u8]; 8] = [
    &[0],
    &[0xff],
    &[0xff; 4],
    &[0xff; 8],
    &[0x7f, 0xff, 0xff, 0xff],
    &[0, 0, 0, 0x80],
    &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f],
    b"99999999999999999999",
];

fn mutate(seeds: &[Vec<u8>], dice: &mut Dice) -> Vec<u8> {
    let mut bytes = seeds[dice.below(seeds.len())].clone();
    for _ in 0..=dice.below(4) {
        let at = dice.below(bytes.len() + 1);
        match dice.below(8) {
            0 if !bytes.is_empty() => {
                let at = dice.below(bytes.len());
                bytes[at] ^= 1 << dice.below(8);
            }
            1 if !bytes.is_empty() => {
                let at = dice.below(bytes.len());
                bytes[at] = dice.next() as u8;
            }
            2 => bytes.truncate(at),
            3 => {
                let end = at + dice.below((bytes.len() - at).min(64) + 1);
                bytes.drain(at..end);
            }
            4 => {
                let end = at + dice.below((bytes.len() - at).min(64) + 1);
                let piece = bytes[at..end].to_vec();
                let to = dice.below(bytes.len() + 1);
                bytes.splice(to..to, piece);
            }
            5 | 6 => {
                let number = NUMBERS[dice.below(NUMBERS.len())];
                let end = (at + number.len()).min(bytes.len());
                bytes.splice(at..end, number.iter().copied());
            }
            _ => {
                let other = &seeds[dice.below(seeds.len())];
                let from = dice.below(other.len() + 1);
                bytes.truncate(at);
                bytes.extend(&other[from..]);
            }
        }
    }
    bytes
}

fn corpus(name: &str) -> Vec<Vec<u8>> {
    let directory: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(name);
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path()).filter(|p| p.is_file()).collect();
    paths.sort();
    assert!(!paths.is_empty(), "{} is empty", directory.display());
    paths.iter().map(|path| std::fs::read(path).unwrap()).collect()
}

fn try_out(name: &str) {
    let (_, inputs) = INPUTS.into_iter().find(|(known, _)| *known == name).unwrap();
    let times: usize = std::env::var("FUZZ_TIMES").map_or(1, |n| n.parse().unwrap());
    let seconds: Option<u64> = std::env::var("FUZZ_SECONDS").ok().map(|n| n.parse().unwrap());
    let (_, entry) = entries::ENTRIES.into_iter().find(|(known, _)| *known == name).unwrap();
    let seeds = corpus(name);
    let mut dice = Dice(7);
    let start = Instant::now();
    let mut done = 0;
    for tried in 0.. {
        let enough = match seconds {
            Some(seconds) => tried >= seeds.len() && start.elapsed() > Duration::from_secs(seconds),
            None => tried >= seeds.len() + inputs * times,
        };
        if enough {
            break;
        }
        done = tried + 1;
        let input = seeds.get(tried).cloned().unwrap_or_else(|| mutate(&seeds, &mut dice));
        let began = Instant::now();
        let survived = catch_unwind(AssertUnwindSafe(|| entry(&input))).is_ok();
        let took = began.elapsed();
        if !survived || took > ENDLESS {
            let kept = std::env::temp_dir().join(format!("fuzz-{name}-{tried}"));
            std::fs::write(&kept, &input).unwrap();
            panic!(
                "{name}: input {tried} {} ({took:.1?}); it is kept at {}",
                if survived { "is slow" } else { "panics" },
                kept.display()
            );
        }
    }
    println!("{name}: {done} inputs in {:.1} s", start.elapsed().as_secs_f64());
}

#[test]
fn safetensors_files_are_read_or_refused() {
    try_out("safetensors");
}

#[test]
fn torch_checkpoints_are_read_or_refused() {
    try_out("pth");
}

#[test]
fn gguf_files_are_read_or_refused() {
    try_out("gguf");
}

#[test]
fn onnx_files_are_read_or_refused() {
    try_out("onnx");
}

#[test]
fn mp4_files_are_read_or_refused() {
    try_out("mp4");
}

#[test]
fn configurations_are_read_or_refused() {
    try_out("config");
}

#[test]
fn keys_of_loras_are_read_or_refused() {
    try_out("lora_keys");
}

#[test]
fn headers_of_loras_are_read_or_refused() {
    try_out("lora_metadata");
}

#[test]
fn metadata_is_read_or_refused() {
    try_out("metadata");
}

#[test]
fn pictures_are_read_or_refused() {
    try_out("picture");
}

#[test]
fn tokenizers_are_read_or_refused() {
    try_out("tokenizer_json");
}

#[test]
fn answers_of_rewards_are_read_or_refused() {
    try_out("frame");
}

/// If the seeds themselves were refused, their mutations would test little.
#[test]
fn the_gguf_seeds_are_read_to_their_end() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/gguf");
    for (name, tensors) in [("llama", 12), ("qwen2", 15), ("everything", 8)] {
        let path = directory.join(format!("{name}.gguf"));
        let file = GgufFile::open(&path).unwrap();
        assert_eq!(file.names().filter(|name| file.tensor(name).is_ok()).count(), tensors, "{name}");
        let options = CausalLmOptions { model_path: Some(path), lora_rank: Some(1), ..CausalLmOptions::default() };
        let context = BuildContext::new("flex");
        assert_eq!(roll_causal_lm::open(&options, &context).is_ok(), name != "everything", "{name}");
    }
}

#[test]
fn the_onnx_seed_is_a_model() {
    let bytes = corpus("onnx").remove(0);
    let device = roll_backends::device("flex").unwrap();
    let model = roll_onnx::Model::parse(Path::new("small.onnx"), &bytes, &device).unwrap();
    assert_eq!(model.outputs().len(), 1);
}

#[test]
fn the_seeds_of_readers_are_read() {
    use roll_causal_lm::Tokenizer;
    let each = |name: &str| {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(name);
        let paths = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
        paths.map(|path| (path.display().to_string(), std::fs::read(&path).unwrap(), path)).collect::<Vec<_>>()
    };
    for (name, _, path) in each("picture") {
        let size = roll_media::probe(&path, roll_media::Decoder::Own).unwrap().size;
        // Four pixels wide, and turned on its side by its EXIF data.
        assert_eq!(size, if name.ends_with(".png") { [4, 3] } else { [size[0]; 2] }, "{name}");
    }
    for (name, _, path) in each("metadata") {
        assert!(!roll_video::rows::Metadata::read(&path, None).unwrap().rows.is_empty(), "{name}");
    }
    for (name, bytes, _) in each("tokenizer_json") {
        assert!(!Tokenizer::parse(&bytes).unwrap().encode("a man").unwrap().is_empty(), "{name}");
    }
    for (name, bytes, _) in each("frame") {
        let read = roll_rewards::remote::frame::read::<serde_json::Value>(&mut bytes.as_slice(), 1 << 20);
        assert_eq!(read.is_ok(), !name.ends_with("shared"), "{name}");
    }
    for (name, bytes, _) in each("lora_metadata") {
        assert!(serde_json::from_slice::<std::collections::BTreeMap<String, String>>(&bytes).is_ok(), "{name}");
    }
}
