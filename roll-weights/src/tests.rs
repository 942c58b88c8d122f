//! Valid and hostile weight files.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use half::bf16;
use roll_core::{DType, Fault, StateDict, Tensor};

use super::*;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn state() -> StateDict {
    let bytes = std::sync::Arc::new(vec![1u8, 0, 1]);
    [
        ("b", Tensor::new(vec![1.5f32, -2.0, 3.25, f32::MIN_POSITIVE], [2, 2]).unwrap()),
        ("a", Tensor::new(vec![bf16::from_f32(0.5); 3], [3]).unwrap()),
        ("i", Tensor::new(vec![i64::MIN, 7], [2]).unwrap()),
        ("j", Tensor::new(vec![-3i32], []).unwrap()),
        ("u", Tensor::new(vec![255u8, 1, 2], [3, 1]).unwrap()),
        ("flags", Tensor::from_bytes(DType::Bool, [3], bytes).unwrap()),
        ("none", Tensor::new(Vec::<f32>::new(), [0, 4]).unwrap()),
    ]
    .map(|(k, t)| (k.to_string(), t))
    .into()
}

fn assert_same(a: &StateDict, b: &StateDict) {
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
    for (key, x) in a {
        let y = &b[key];
        assert_eq!((x.dtype(), x.shape(), x.as_bytes()), (y.dtype(), y.shape(), y.as_bytes()), "{key}");
    }
}

/// Writes a safetensors file with this header and data.
fn raw(dir: &Path, header: &str, data: &[u8]) -> PathBuf {
    let path = dir.join("x.safetensors");
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    fs::write(&path, bytes).unwrap();
    path
}

fn open_error(path: &Path) -> WeightsError {
    WeightFile::open(path).err().unwrap_or_else(|| panic!("{} was accepted", path.display()))
}

/// Asserts that the contents are invalid and that the message contains `parts`.
fn assert_invalid(error: &WeightsError, parts: &[&str]) {
    let message = error.to_string();
    assert!(matches!(error, WeightsError::Invalid { .. }), "{message}");
    assert!(parts.iter().all(|part| message.contains(part)), "{message}");
}

#[test]
fn save_and_load_is_bit_exact() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("w.safetensors");
    let metadata = BTreeMap::from([("format".to_string(), "pt".to_string()), ("é".into(), "\"".into())]);
    save_safetensors(&path, &state(), &metadata).unwrap();
    let file = Checkpoint::open(&path).unwrap();
    assert_same(&file.all().unwrap(), &state());
    assert_eq!(file.metadata(), metadata);
    let info = file.info("b").unwrap();
    assert_eq!((info.dtype, info.stored.as_str(), &*info.shape), (Some(DType::F32), "f32", &[2, 2][..]));
    assert_same(&file.state(|k| k == "a").unwrap(), &[("a".to_string(), state()["a"].clone())].into());
    let first = fs::read(&path).unwrap();
    save_safetensors(&path, &state(), &metadata).unwrap();
    assert_eq!(fs::read(&path).unwrap(), first);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "temporary files are gone");
}

#[test]
fn safetensors_crate_reads_our_files() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("w.safetensors");
    save_safetensors(&path, &state(), &BTreeMap::new()).unwrap();
    let bytes = fs::read(&path).unwrap();
    let theirs = ::safetensors::SafeTensors::deserialize(&bytes).unwrap();
    for (key, tensor) in state() {
        let view = theirs.tensor(&key).unwrap();
        assert_eq!((view.shape(), view.data()), (tensor.shape(), tensor.as_bytes()));
    }
}

#[test]
fn aligned_tensors_share_the_map() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("w.safetensors");
    save_safetensors(&path, &state(), &BTreeMap::new()).unwrap();
    let file = WeightFile::open(&path).unwrap();
    let at = || file.tensor("b").unwrap().as_bytes().as_ptr();
    assert_eq!(at(), at(), "two reads return the same memory");
    // A header of odd length puts every tensor on an odd address.
    let header = r#"{"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
    let header = format!("{header}{}", " ".repeat(1 - header.len() % 2));
    let path = raw(dir.path(), &header, bytemuck::cast_slice(&[1.5f32, -2.0]));
    assert_eq!(WeightFile::open(&path).unwrap().tensor("b").unwrap().f32s().unwrap(), [1.5, -2.0]);
}

#[test]
fn failed_save_leaves_the_old_file() {
    let dir = tempfile::tempdir().unwrap();
    assert!(save_safetensors(dir.path().join("no/such/dir/w.safetensors"), &state(), &BTreeMap::new()).is_err());
    assert!(matches!(save_safetensors(dir.path(), &state(), &BTreeMap::new()), Err(WeightsError::Directory { .. })));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn wrong_header_is_an_error_that_names_the_tensor() {
    let dir = tempfile::tempdir().unwrap();
    let entry = |name: &str, dtype: &str, shape: &str, offsets: &str| {
        format!(r#""{name}":{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[{offsets}]}}"#)
    };
    let file =
        |entries: &[String], bytes: usize| raw(dir.path(), &format!("{{{}}}", entries.join(",")), &vec![0; bytes]);

    // Too short, too long, backwards, beyond the end of the file.
    let e = open_error(&file(&[entry("w", "F32", "2", "0,4")], 4));
    assert_invalid(&e, &["`w`", "8 bytes for 2 elements of F32", "0..4"]);
    assert_invalid(&open_error(&file(&[entry("w", "F32", "1", "8,4")], 8)), &["`w`", "ascending", "8..4"]);
    let e = open_error(&file(&[entry("w", "F32", "4", "0,16")], 8));
    assert_invalid(&e, &["`w`", "truncated"]);
    assert_invalid(&open_error(&file(&[entry("w", "NEW", "4", &format!("0,{}", u64::MAX))], 8)), &["`w`", "truncated"]);

    // Overlap, hole, trailing bytes.
    let e = open_error(&file(&[entry("v", "F32", "2", "0,8"), entry("w", "F32", "2", "4,12")], 12));
    assert_invalid(&e, &["`w`", "overlap"]);
    let e = open_error(&file(&[entry("v", "F32", "1", "0,4"), entry("w", "F32", "1", "8,12")], 12));
    assert_invalid(&e, &["`w`", "hole"]);
    assert_invalid(&open_error(&file(&[entry("w", "F32", "1", "0,4")], 9)), &["after the header"]);

    // Shapes whose products overflow.
    for shape in ["4294967296,4294967296", "9223372036854775807,2", "9223372036854775807"] {
        let e = open_error(&file(&[entry("w", "F64", shape, "0,8")], 8));
        assert_invalid(&e, &["`w`", "overflows"]);
    }

    // A duplicate name.
    let e = open_error(&file(&[entry("w", "F32", "1", "0,4"), entry("w", "F32", "1", "4,8")], 8));
    assert_invalid(&e, &["`w`", "twice"]);
}

#[test]
fn rejects_invalid_headers() {
    let dir = tempfile::tempdir().unwrap();
    for header in ["", "{", "[]", r#"{"w":1}"#, r#"{"w":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}"#] {
        let e = open_error(&raw(dir.path(), header, &[]));
        assert_invalid(&e, &[]);
    }
    let deep = "[".repeat(100_000);
    assert_invalid(&open_error(&raw(dir.path(), &deep, &[])), &[]);
    let path = dir.path().join("y.safetensors");
    fs::write(&path, [8, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xfe, 0, 0, 0, 0, 0, 0]).unwrap();
    assert_invalid(&open_error(&path), &["UTF-8"]);
}

#[test]
fn rejects_headers_longer_than_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    for length in [100u64, 1 << 40, u64::MAX] {
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend(b"{}");
        fs::write(&path, bytes).unwrap();
        assert_invalid(&open_error(&path), &["at most 2", &length.to_string()]);
    }
}

#[test]
fn rejects_truncated_files() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, cut) = (dir.path().join("w.safetensors"), dir.path().join("c.safetensors"));
    save_safetensors(&whole, &state(), &BTreeMap::new()).unwrap();
    let bytes = fs::read(&whole).unwrap();
    for length in 0..bytes.len() {
        fs::write(&cut, &bytes[..length]).unwrap();
        open_error(&cut);
    }
    let bytes = fs::read(data("nested.pth")).unwrap();
    let cut = dir.path().join("c.pth");
    for length in (0..bytes.len()).step_by(37) {
        fs::write(&cut, &bytes[..length]).unwrap();
        open_error(&cut);
    }
}

#[test]
fn flipped_bytes_never_panic_and_some_are_found() {
    let dir = tempfile::tempdir().unwrap();
    for source in ["nested.pth", "legacy.pth"] {
        let bytes = fs::read(data(source)).unwrap();
        let path = dir.path().join(source);
        let mut refused = 0;
        for at in (0..bytes.len()).step_by(11) {
            let mut bad = bytes.clone();
            bad[at] ^= 0x5a;
            fs::write(&path, bad).unwrap();
            refused += usize::from(Checkpoint::open(&path).and_then(|file| file.all()).is_err());
        }
        assert!(refused > 0, "{source}");
    }
}

#[test]
fn rejects_directories_missing_files_and_other_formats() {
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(open_error(dir.path()), WeightsError::Directory { .. }));
    let missing = open_error(&dir.path().join("none.safetensors"));
    assert!(missing.to_string().contains("none.safetensors"));
    assert_eq!(roll_core::Error::from(missing).fault(), Fault::User);
    for name in ["weights.gguf", "weights"] {
        let path = dir.path().join(name);
        fs::write(&path, b"GGUF").unwrap();
        let e = open_error(&path);
        assert!(matches!(e, WeightsError::Format { .. }) && e.to_string().contains("safetensors"), "{e}");
        assert_eq!(roll_core::Error::from(e).fault(), Fault::User);
    }
    // Valid contents under a name of the other format.
    let torch = dir.path().join("t.safetensors");
    fs::copy(data("nested.pth"), &torch).unwrap();
    assert!(matches!(open_error(&torch), WeightsError::Format { .. }));
    let safe = dir.path().join("s.safetensors");
    save_safetensors(&safe, &state(), &BTreeMap::new()).unwrap();
    fs::rename(&safe, dir.path().join("s.pth")).unwrap();
    assert!(matches!(open_error(&dir.path().join("s.pth")), WeightsError::Format { .. }));
    fs::write(dir.path().join("g.pth"), b"garbage that is no pickle").unwrap();
    assert_invalid(&open_error(&dir.path().join("g.pth")), &["not a torch checkpoint"]);
}

#[test]
fn flattens_nested_dictionaries_of_torch_checkpoints() {
    let file = Checkpoint::open(data("nested.pth")).unwrap();
    let expected: Vec<String> =
        ["a", "brain", "half", "long", "scalar", "transposed"].map(|k| format!("state_dict.net.{k}")).into();
    assert_eq!(file.keys().collect::<Vec<_>>(), expected);
    let get = |key: &str| file.tensor(&format!("state_dict.net.{key}")).unwrap();
    let counting: Vec<f32> = (0..12u8).map(f32::from).collect();
    for (key, dtype) in [("a", DType::F32), ("half", DType::F16), ("brain", DType::Bf16)] {
        assert_eq!((get(key).dtype(), get(key).shape()), (dtype, &[3, 4][..]));
        assert_eq!(get(key).to_f32_vec(), counting);
    }
    assert_eq!(get("transposed").shape(), [4, 3]);
    assert_eq!(&get("transposed").to_f32_vec()[..4], [0.0, 4.0, 8.0, 1.0]);
    assert_eq!(get("long").as_slice::<i64>().unwrap(), [1, -2, 3]);
    assert_eq!(get("scalar").item().unwrap(), 2.5);
    let legacy = Checkpoint::open(data("legacy.pth")).unwrap();
    assert_eq!(legacy.tensor("brain").unwrap().to_f32_vec(), counting);
}

#[test]
fn rejects_pickles_with_code_without_running_it() {
    let e = open_error(&data("evil.pth"));
    assert_invalid(&e, &["`hook`", "`posix.system`"]);
    assert_eq!(roll_core::Error::from(e).fault(), Fault::User);
    assert!(!Path::new("/tmp/roll_pickle_was_executed").exists());
}

#[test]
fn rejects_small_torch_checkpoints_of_huge_tensors() {
    // 40 tensors of 800 MB that repeat one number, and 72 MB of zeros that take 70 KB in the file.
    for (name, found) in [("strides.pth", "32000000000 bytes"), ("deflated.pth", "72000000 bytes")] {
        assert_invalid(&open_error(&data(name)), &[name, found, "contiguous"]);
    }
}

#[test]
fn unsupported_dtypes_are_listed_but_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let header = r#"{"w":{"dtype":"F8_E8M0","shape":[4],"data_offsets":[0,4]}}"#;
    let safe = Checkpoint::open(raw(dir.path(), header, &[0; 4])).unwrap();
    assert_eq!(safe.info("w").unwrap().stored, "f8_e8m0");
    assert_invalid(&safe.tensor("w").unwrap_err(), &["`w`", "found f8_e8m0"]);
}

#[test]
fn doubles_are_rounded_to_f32() {
    let torch = Checkpoint::open(data("double.pth")).unwrap();
    assert_eq!(torch.info("double").unwrap().stored, "f64");
    let expected: Vec<f32> = (0..12u8).map(f32::from).collect();
    assert_eq!(torch.tensor("double").unwrap().f32s().unwrap(), expected);
}

fn shard(dir: &Path, name: &str, keys: &[&str]) -> PathBuf {
    let path = dir.join(name);
    let state = keys.iter().map(|k| (k.to_string(), Tensor::scalar(k.len() as f32))).collect();
    save_safetensors(&path, &state, &BTreeMap::new()).unwrap();
    path
}

#[test]
fn opens_shards_by_index_list_or_glob() {
    let dir = tempfile::tempdir().unwrap();
    let a = shard(dir.path(), "m-00001-of-00002.safetensors", &["one", "two"]);
    let b = shard(dir.path(), "m-00002-of-00002.safetensors", &["three"]);
    let index = dir.path().join("m.safetensors.index.json");
    let map = r#"{"metadata":{"total_size":12},"weight_map":{
        "one":"m-00001-of-00002.safetensors","two":"m-00001-of-00002.safetensors","three":"m-00002-of-00002.safetensors"}}"#;
    fs::write(&index, map).unwrap();
    let pattern = dir.path().join("m*").to_string_lossy().into_owned();
    for checkpoint in [
        Checkpoint::open(&index).unwrap(),
        Checkpoint::open_shards(&[&b, &a]).unwrap(),
        Checkpoint::open_glob(&pattern).unwrap(),
    ] {
        assert_eq!(checkpoint.keys().collect::<Vec<_>>(), ["one", "three", "two"]);
        assert_eq!(checkpoint.tensor("three").unwrap().item().unwrap(), 5.0);
        assert_eq!(checkpoint.paths().count(), 2);
    }

    // One shard of a series is missing.
    let e = Checkpoint::open_shards(&[&b]).unwrap_err();
    assert_invalid(&e, &["00001-of-00002", "is missing"]);
    fs::remove_file(&b).unwrap();
    for e in [Checkpoint::open(&index).unwrap_err(), Checkpoint::open_glob(&pattern).unwrap_err()] {
        assert_invalid(&e, &["00002-of-00002", "is missing"]);
    }
    // A shard lacks a tensor that the index lists.
    shard(dir.path(), "m-00002-of-00002.safetensors", &["other"]);
    assert_invalid(&Checkpoint::open(&index).unwrap_err(), &["`three` is missing"]);
    // Two shards have the same tensor.
    let c = shard(dir.path(), "c.safetensors", &["one"]);
    assert_invalid(&Checkpoint::open_shards(&[&a, &c]).unwrap_err(), &["is missing"]);
    let d = shard(dir.path(), "d.safetensors", &["one"]);
    assert_invalid(&Checkpoint::open_shards(&[&c, &d]).unwrap_err(), &["`one`", "has it too"]);
    // An index that points to another directory, or to nothing.
    for map in [r#"{"weight_map":{"one":"../c.safetensors"}}"#, r#"{"weight_map":{"one":"/etc/passwd"}}"#, "[]", "{}"] {
        fs::write(&index, map).unwrap();
        assert_invalid(&Checkpoint::open(&index).unwrap_err(), &[]);
    }
    assert!(matches!(Checkpoint::open_glob("/no/such/*.safetensors"), Err(WeightsError::NoMatch { .. })));
}

#[test]
fn rejects_renaming_two_tensors_to_one() {
    let dir = tempfile::tempdir().unwrap();
    let file = Checkpoint::open(shard(dir.path(), "w.safetensors", &["one", "two"])).unwrap();
    assert_invalid(&file.clone().rename(|_| Some("x".into())).unwrap_err(), &["`x`", "has it too"]);
    let renamed = file.rename(|k| (k == "two").then(|| "zwei".into())).unwrap();
    assert_eq!(renamed.keys().collect::<Vec<_>>(), ["zwei"]);
    assert_eq!(renamed.tensor("zwei").unwrap().item().unwrap(), 3.0);
}

#[test]
fn splitting_and_joining_shards_is_bit_exact() {
    let dir = tempfile::tempdir().unwrap();
    let state: StateDict = (0..9)
        .map(|i| (format!("t{i}"), Tensor::new(vec![i as f32 + 0.1; 100 * (i + 1)], [i + 1, 100]).unwrap()))
        .collect();
    let whole = dir.path().join("model.safetensors");
    save_safetensors(&whole, &state, &BTreeMap::new()).unwrap();
    fs::write(dir.path().join("config.json"), "{}").unwrap();
    let source = Checkpoint::open(&whole).unwrap();
    let parts = dir.path().join("parts");
    let outputs = Outputs::split(&source, &parts, 4000, None).unwrap();
    let copy = |source: &Checkpoint, outputs: &Outputs, dtype| {
        rewrite::<WeightsError>(source, outputs, dtype, &mut (), &BTreeMap::new(), &mut |_| {})
    };
    let files = copy(&source, &outputs, None).unwrap();
    assert!(files.len() > 4 && files[0].ends_with(format!("model-00001-of-{:05}.safetensors", files.len())));
    assert!(files.iter().all(|f| fs::metadata(f).unwrap().len() < 4000 + 1000), "header included");
    assert!(parts.join("config.json").exists());
    let index: serde_json::Value =
        serde_json::from_slice(&fs::read(parts.join("model.safetensors.index.json")).unwrap()).unwrap();
    assert_eq!(index["metadata"]["total_size"], 4 * 100 * 45);
    let split = Checkpoint::open_any(&parts).unwrap();
    assert_same(&split.all().unwrap(), &state);

    let joined = dir.path().join("joined.safetensors");
    copy(&split, &Outputs::one_file(&split, &joined), None).unwrap();
    assert_eq!(fs::read(&joined).unwrap(), fs::read(&whole).unwrap());
    let again = dir.path().join("again");
    copy(&split, &Outputs::like(&split, &again), Some(DType::Bf16)).unwrap();
    let narrow = Checkpoint::open_any(&again).unwrap();
    assert_eq!(narrow.shards().len(), files.len());
    for (key, tensor) in narrow.all().unwrap() {
        assert_eq!(tensor.as_bytes(), state[&key].to_float(DType::Bf16).unwrap().as_bytes(), "{key}");
    }

    // Existing files are not overwritten.
    assert!(copy(&source, &Outputs::like(&source, &parts), None).is_err());
    assert!(copy(&source, &Outputs::one_file(&source, &whole), None).is_err());
    assert_same(&Checkpoint::open(&whole).unwrap().all().unwrap(), &state);
}

#[test]
fn unsupported_dtypes_are_copied_bytewise() {
    let dir = tempfile::tempdir().unwrap();
    let header = r#"{"a":{"dtype":"F8_E4M3","shape":[3],"data_offsets":[0,3]}}"#;
    let source = Checkpoint::open(raw(dir.path(), header, &[1, 2, 3])).unwrap();
    let out = dir.path().join("y.safetensors");
    let outputs = Outputs::one_file(&source, &out);
    rewrite::<WeightsError>(&source, &outputs, Some(DType::F32), &mut (), &BTreeMap::new(), &mut |_| {}).unwrap();
    let copy = WeightFile::open(&out).unwrap();
    let mut bytes = [0; 3];
    copy.read_part("a", 0, &mut bytes).unwrap();
    assert_eq!((bytes, copy.info("a").unwrap().stored.as_str()), ([1, 2, 3], "f8_e4m3"));
    assert!(copy.read_part("a", 1, &mut bytes).is_err() && copy.read_part("b", 0, &mut []).is_err());
}

#[test]
fn writer_rejects_bytes_out_of_order() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    let entry =
        |name: &str| TensorEntry { name: name.into(), dtype: "U8".into(), shape: vec![2], bytes: 2, alignment: 1 };
    let begin = || SafetensorsWriter::create(&path, vec![entry("b"), entry("a")], &BTreeMap::new()).unwrap();
    assert!(begin().write("b", &[1, 2]).is_err());
    assert!(begin().write("a", &[1, 2, 3]).is_err());
    let mut writer = begin();
    writer.write("a", &[1]).unwrap();
    writer.write("a", &[2]).unwrap();
    assert!(writer.finish().is_err());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    let mut writer = begin();
    writer.write("a", &[1, 2]).unwrap();
    writer.write("b", &[3, 4]).unwrap();
    writer.finish().unwrap();
    assert_eq!(Checkpoint::open(&path).unwrap().tensor("b").unwrap().as_bytes(), [3, 4]);
}
