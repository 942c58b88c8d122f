#![allow(clippy::unwrap_used)]
use roll_testing::GgufWriter;

use super::*;

fn open(bytes: &[u8]) -> Result<GgufFile, WeightsError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, bytes).unwrap();
    GgufFile::open(&path)
}

fn sample() -> GgufWriter {
    let mut list = 8u32.to_le_bytes().to_vec();
    list.extend(2u64.to_le_bytes());
    GgufWriter::text(&mut list, "a");
    GgufWriter::text(&mut list, "bc");
    let mut text = Vec::new();
    GgufWriter::text(&mut text, "llama");
    let numbers: Vec<u8> = (0..6).flat_map(|i| (i as f32).to_le_bytes()).collect();
    GgufWriter::default()
        .value("general.architecture", 8, &text)
        .value("llama.block_count", 4, &3u32.to_le_bytes())
        .value("llama.eps", 6, &0.5f32.to_le_bytes())
        .value("tokens", 9, &list)
        .tensor("x", &[2, 3], 0, &numbers)
        .tensor("odd", &[1, 32], 2, &[[0x00, 0x3c].as_slice(), &[0x98; 16]].concat())
}

#[test]
fn reads_metadata_and_tensors() {
    let file = open(&sample().bytes()).unwrap();
    assert_eq!(file.text("general.architecture"), Some("llama"));
    assert_eq!((file.integer("llama.block_count"), file.number("llama.eps")), (Some(3), Some(0.5)));
    assert_eq!(file.value("tokens"), Some(&Value::Texts(vec!["a".into(), "bc".into()])));
    assert_eq!(file.shape("x"), Some([2, 3].as_slice()));
    assert_eq!(file.tensor("x").unwrap().f32s().unwrap(), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    let odd = file.tensor("odd").unwrap();
    // Scale 1; the low nibbles are 8 - 8, the high nibbles 9 - 8.
    assert_eq!(odd.f32s().unwrap()[..16], [0.0; 16]);
    assert_eq!(odd.f32s().unwrap()[16..], [1.0; 16]);
}

#[test]
fn rejects_truncated_files() {
    let whole = sample().bytes();
    for length in 0..whole.len() {
        assert!(open(&whole[..length]).is_err(), "{length} of {}", whole.len());
    }
}

#[test]
fn rejects_wrong_headers_and_never_panics() {
    let whole = sample().bytes();
    let message = |bytes: &[u8]| open(bytes).map(|_| ()).unwrap_err().to_string();
    let changed = |at: usize, value: u8| {
        let mut bytes = whole.clone();
        bytes[at] = value;
        bytes
    };
    assert!(message(&changed(0, b'X')).contains("GGUF"));
    assert!(message(&changed(4, 9)).contains("version"));
    for at in [8, 16] {
        let mut bytes = whole.clone();
        bytes[at..at + 8].fill(0xff);
        assert!(message(&bytes).contains("follow"));
    }
    // No change of a single byte causes a panic.
    for at in 0..whole.len() {
        for value in [0, 1, 0x7f, 0xff] {
            if let Ok(file) = open(&changed(at, value)) {
                let names: Vec<String> = file.names().map(String::from).collect();
                names.iter().for_each(|name| drop(file.tensor(name)));
            }
        }
    }
}

#[test]
fn error_names_unsupported_types() {
    let file = open(&GgufWriter::default().tensor("w", &[256], 16, &[0; 66]).bytes()).unwrap();
    let message = file.tensor("w").unwrap_err().to_string();
    assert!(message.contains("IQ2_XXS") && message.contains("IQ4_XS") && message.contains('w'), "{message}");
    let message =
        open(&GgufWriter::default().tensor("w", &[48], 2, &[0; 27]).bytes()).map(|_| ()).unwrap_err().to_string();
    assert!(message.contains("blocks of 32"), "{message}");
}

#[test]
fn every_type_decodes_whole_blocks() {
    for kind in (0..40).filter_map(BlockType::of) {
        assert_eq!(kind.decode(&vec![0; 3 * kind.bytes()]), vec![0.0; 3 * kind.values()]);
    }
}

/// Values of blocks as decoded by the Python package `gguf` 0.19: four of them, and the sum of all weighted by
/// position.
#[test]
fn blocks_decode_as_in_the_python_package() {
    let half = |value: f32| half::f16::from_f32(value).to_le_bytes();
    for (number, kind, halves, some, sum) in [
        (2, BlockType::Q4_0, vec![(0, 0.125)], [-0.375, 0.25, -0.375, 0.0], -64.75),
        (3, BlockType::Q4_1, vec![(0, 0.125), (2, -0.75)], [1.125, -0.25, 0.375, 0.75], 101.875),
        (6, BlockType::Q5_0, vec![(0, 0.125)], [1.125, -0.25, 1.75, 0.125], 14.0),
        (7, BlockType::Q5_1, vec![(0, 0.125), (2, -0.75)], [1.625, 2.25, 1.625, -0.125], 591.625),
        (11, BlockType::Q3K, vec![(108, 0.125)], [10.125, -13.5, 0.25, 5.25], 22_143.125),
        (13, BlockType::Q5K, vec![(0, 0.125), (2, -0.75)], [142.875, 38.25, 140.625, 42.0], 2_776_463.0),
        (8, BlockType::Q8_0, vec![(0, 0.125)], [10.625, 15.25, -11.375, -6.0], -1010.0),
        (12, BlockType::Q4K, vec![(0, 0.125), (2, -0.75)], [80.875, 38.25, 62.625, 34.5], 1_719_637.0),
        (10, BlockType::Q2K, vec![(80, 0.125), (82, -0.75)], [4.125, 0.0, 3.375, 3.0], 218_377.75),
        (20, BlockType::Iq4Nl, vec![(0, 0.125)], [-4.375, 3.125, -4.375, 0.125], -864.875),
        (23, BlockType::Iq4Xs, vec![(0, 0.125)], [8.125, -0.125, -73.125, -2.0], -261_391.75),
        (14, BlockType::Q6K, vec![(208, 0.125)], [-178.875, 212.0, -43.875, -7.5], 98_052.5),
    ] {
        // The number of the type in a file.
        assert_eq!(BlockType::of(number), Some(kind));
        let mut bytes: Vec<u8> = (0..kind.bytes()).map(|i| (i * 37 + 11) as u8).collect();
        for (at, value) in halves {
            bytes[at..at + 2].copy_from_slice(&half(value));
        }
        let values = kind.decode(&bytes);
        let n = values.len();
        assert_eq!([values[0], values[1], values[n / 2], values[n - 1]], some, "{kind:?}");
        let weighted = values.iter().enumerate().map(|(i, v)| (i + 1) as f64 * f64::from(*v)).sum::<f64>();
        assert_eq!(weighted, sum, "{kind:?}");
    }
}
