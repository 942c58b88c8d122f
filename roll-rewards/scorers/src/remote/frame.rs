//! The format of messages between this program and a reward in a separate program. In this file a *frame* is an encoded
//! message, not a picture.
//!
//! A frame consists of `ROLL`, the length of the header (u32, little-endian), the header (JSON), and the bytes of the
//! tensors that the header lists, in this order: row-major, little-endian, without padding. A tensor with the field
//! `at` is not in the frame; it lies at that offset in shared memory ([`super::shared_memory`]).

use std::io::{BufRead, Write};
use std::sync::Arc;

use roll_core::{DType, Tensor};
use serde::{Deserialize, Serialize};

use super::shared_memory::SharedMemory;

/// The first bytes of every frame, so that a program that prints to its standard output is detected immediately.
const MAGIC: [u8; 4] = *b"ROLL";
/// Greatest length of a header in bytes.
const MAX_HEADER: usize = 1 << 20;
/// Greatest number of bytes that an error quotes from a stream that is not a frame.
const MAX_QUOTE: usize = 60;
/// Greatest number of tensor bytes of an answer beyond those of its request: room for a target.
const MAX_EXTRA_BYTES: usize = 64 << 20;

/// A tensor's entry in the header.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct TensorEntry {
    name: String,
    dtype: DType,
    shape: Vec<usize>,
    /// Offset in shared memory; absent if the tensor is in the frame.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    at: Option<u64>,
}

/// A header: the tensors, and the fields of `body`, which depend on the call.
#[derive(Serialize, Deserialize)]
struct Header<T> {
    #[serde(default)]
    tensors: Vec<TensorEntry>,
    #[serde(flatten)]
    body: T,
}

/// Why a frame could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The other side closed the connection, or the system failed.
    #[error("the connection ended")]
    Io(#[from] std::io::Error),
    /// The bytes are not a frame.
    #[error("{0}")]
    NotAFrame(String),
}

/// Writes a frame.
pub fn write<T: Serialize>(out: &mut impl Write, body: &T, tensors: &[(String, Tensor)]) -> Result<(), FrameError> {
    write_with(out, body, tensors, &[])
}

/// Writes a frame whose tensors lie at `offsets` in shared memory. Without offsets the tensors are part of the
/// frame.
pub fn write_with<T: Serialize>(
    out: &mut impl Write,
    body: &T,
    tensors: &[(String, Tensor)],
    offsets: &[u64],
) -> Result<(), FrameError> {
    let listed = tensors.iter().enumerate().map(|(i, (name, t))| TensorEntry {
        name: name.clone(),
        dtype: t.dtype(),
        shape: t.shape().to_vec(),
        at: offsets.get(i).copied(),
    });
    let header = Header { tensors: listed.collect(), body };
    let header_bytes =
        serde_json::to_vec(&header).map_err(|e| FrameError::NotAFrame(format!("writing a header: {e}")))?;
    out.write_all(&MAGIC)?;
    out.write_all(&(header_bytes.len() as u32).to_le_bytes())?;
    out.write_all(&header_bytes)?;
    for (_, tensor) in tensors.iter().skip(offsets.len()) {
        out.write_all(tensor.as_bytes())?;
    }
    out.flush()?;
    Ok(())
}

/// Numbers that Python writes into JSON although JSON does not have them. [`read`] turns them into strings.
const NONFINITE: [&str; 3] = ["-Infinity", "Infinity", "NaN"];

/// A header in which every number of [`NONFINITE`] is put into quotation marks.
fn quoted_nonfinite(header: &[u8]) -> Vec<u8> {
    let (mut quoted, mut at, mut in_string) = (Vec::with_capacity(header.len()), 0, false);
    while let Some(&byte) = header.get(at) {
        let word = NONFINITE.iter().find(|word| !in_string && header[at..].starts_with(word.as_bytes()));
        let length = match (word, byte) {
            (Some(word), _) => {
                quoted.extend(format!("\"{word}\"").bytes());
                at += word.len();
                continue;
            }
            // An escaped character, which may be a quotation mark.
            (None, b'\\') if in_string => 2,
            _ => 1,
        };
        in_string ^= byte == b'"';
        quoted.extend(&header[at..header.len().min(at + length)]);
        at += length;
    }
    quoted
}

/// The number in a string that [`read`] made of a number of [`NONFINITE`]; `None` for every other value.
pub(super) fn nonfinite(value: &serde_json::Value) -> Option<f64> {
    value.as_str().filter(|text| NONFINITE.contains(text)).and_then(|text| text.parse().ok())
}

/// Greatest number of tensor bytes of the answer to a request with these `tensors`. A gradient has the size of the
/// video in the request.
pub fn answer_bytes(tensors: &[(String, Tensor)]) -> usize {
    tensors.iter().map(|(_, tensor)| tensor.as_bytes().len()).sum::<usize>().saturating_add(MAX_EXTRA_BYTES)
}

/// Reads a frame with at most `max_bytes` tensor bytes. Fails on anything that is not a frame, without allocating more
/// memory than necessary.
pub fn read<T: for<'a> Deserialize<'a>>(
    input: &mut impl BufRead,
    max_bytes: usize,
) -> Result<(T, Vec<(String, Tensor)>), FrameError> {
    read_with(input, max_bytes, None)
}

/// Reads a frame like [`read`], but tensors may also lie in `shared_memory`. Such tensors keep the shared memory alive.
pub fn read_with<T: for<'a> Deserialize<'a>>(
    input: &mut impl BufRead,
    max_bytes: usize,
    shared_memory: Option<&Arc<SharedMemory>>,
) -> Result<(T, Vec<(String, Tensor)>), FrameError> {
    let header: Header<T> = read_header(input)?;
    let mut tensors = Vec::new();
    let mut remaining = max_bytes;
    for TensorEntry { name, dtype, shape, at } in header.tensors {
        let bytes = shape.iter().try_fold(dtype.size(), |n, &d| n.checked_mul(d)).filter(|n| *n <= remaining);
        let Some(bytes) = bytes else {
            let problem =
                format!("the tensor `{name}` of shape {shape:?} is too large: the answer may have {max_bytes} bytes");
            return Err(FrameError::NotAFrame(problem));
        };
        remaining -= bytes;
        let data: Arc<dyn AsRef<[u8]> + Send + Sync> =
            match (at, shared_memory) {
                (None, _) => Arc::new(read_bytes(input, &name, bytes)?),
                (Some(at), Some(shared_memory)) => Arc::new(shared_memory.slice(at, bytes).map_err(|e| {
                    FrameError::NotAFrame(format!("the tensor `{name}` is not in the shared file: {e}"))
                })?),
                (Some(_), None) => {
                    let problem = format!("the tensor `{name}` is said to lie in a shared file, and there is none");
                    return Err(FrameError::NotAFrame(problem));
                }
            };
        let tensor = Tensor::from_bytes(dtype, shape, data)
            .map_err(|e| FrameError::NotAFrame(format!("the tensor `{name}` makes no sense: {e}")))?;
        tensors.push((name, tensor));
    }
    Ok((header.body, tensors))
}

/// Reads the beginning of a frame up to the end of its header.
fn read_header<T: for<'a> Deserialize<'a>>(input: &mut impl BufRead) -> Result<Header<T>, FrameError> {
    // Checks the bytes that are already available before it waits for more, because a program that only printed a word
    // may never write the eight bytes of a frame's beginning.
    let available = input.fill_buf()?;
    let compared = available.len().min(MAGIC.len());
    if available[..compared] != MAGIC[..compared] {
        return Err(not_a_frame(&available[..available.len().min(MAX_QUOTE)]));
    }
    let (mut magic, mut length) = ([0; 4], [0; 4]);
    input.read_exact(&mut magic)?;
    if magic != MAGIC {
        return Err(not_a_frame(&magic));
    }
    input.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > MAX_HEADER {
        return Err(FrameError::NotAFrame(format!("a header of {length} bytes, more than {MAX_HEADER}")));
    }
    let mut header_bytes = vec![0; length];
    input.read_exact(&mut header_bytes)?;
    serde_json::from_slice(&header_bytes)
        .or_else(|_| serde_json::from_slice(&quoted_nonfinite(&header_bytes)))
        .map_err(|e| FrameError::NotAFrame(format!("a header that makes no sense: {e}")))
}

/// Reads the next `bytes` bytes of `input`. A header may promise bytes that are never sent; these take no memory,
/// because the system provides zeroed memory only when it is written to.
fn read_bytes(input: &mut impl BufRead, name: &str, bytes: usize) -> Result<Vec<u8>, FrameError> {
    let mut data = vec![0; bytes];
    match input.read_exact(&mut data) {
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
            Err(FrameError::NotAFrame(format!("the tensor `{name}` was cut off: fewer than {bytes} bytes came")))
        }
        read => Ok(read.map(|()| data)?),
    }
}

/// The error for a stream that begins with `start`.
fn not_a_frame(start: &[u8]) -> FrameError {
    let text = String::from_utf8_lossy(start);
    let line = text.lines().next().unwrap_or_default();
    FrameError::NotAFrame(format!(
        "it wrote {line:?} where a frame should begin: its standard output is for frames, print to standard error"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Body {
        call: String,
    }

    fn frame() -> Vec<u8> {
        let mut bytes = Vec::new();
        let tensors = [
            ("a".to_string(), Tensor::new(vec![1.5f32, -2.0], [2, 1]).unwrap()),
            ("b".to_string(), Tensor::new(vec![7u8, 8, 9], [3]).unwrap()),
        ];
        write(&mut bytes, &Body { call: "score".into() }, &tensors).unwrap();
        bytes
    }

    #[test]
    fn frame_round_trips() {
        let bytes = frame();
        let (body, tensors) = read::<Body>(&mut bytes.as_slice(), MAX_EXTRA_BYTES).unwrap();
        assert_eq!(body.call, "score");
        assert_eq!(tensors[0].1.f32s().unwrap(), [1.5, -2.0]);
        assert_eq!((tensors[1].0.as_str(), tensors[1].1.shape()), ("b", &[3usize][..]));
    }

    #[test]
    fn nan_and_infinity_in_a_header_are_numbers_of_their_own() {
        let read = |header: &str| {
            let mut bytes = MAGIC.to_vec();
            bytes.extend((header.len() as u32).to_le_bytes());
            bytes.extend(header.as_bytes());
            Ok::<_, FrameError>(read::<serde_json::Value>(&mut bytes.as_slice(), MAX_EXTRA_BYTES)?.0)
        };
        let score = |header: &str| nonfinite(&read(header).unwrap()["score"]);
        assert!(score(r#"{"tensors": [], "score": NaN}"#).unwrap().is_nan());
        assert_eq!(score(r#"{"score":-Infinity,"tensors":[]}"#), Some(f64::NEG_INFINITY));
        let all =
            read(r#"{"details": {"a": Infinity, "b\"NaN": "\\", "c": "NaN \" -Infinity"}, "score": 0.5}"#).unwrap();
        assert_eq!(nonfinite(&all["details"]["a"]), Some(f64::INFINITY));
        assert_eq!((&all["details"]["b\"NaN"], &all["details"]["c"]), (&"\\".into(), &"NaN \" -Infinity".into()));
        assert_eq!((all["score"].as_f64(), nonfinite(&all["score"])), (Some(0.5), None));
        for header in [r#"{"reason": "NaN", }"#, r#"{"score": nan}"#, r#"{"score": NaNa}"#, r#"{"a\"#, r#""\"#] {
            let problem = read(header).unwrap_err().to_string();
            assert!(problem.contains("makes no sense"), "{header}: {problem}");
        }
    }

    #[test]
    fn truncated_and_damaged_frames_do_not_panic() {
        let whole = frame();
        for length in 0..whole.len() {
            assert!(read::<Body>(&mut &whole[..length], MAX_EXTRA_BYTES).is_err(), "{length}");
        }
        for at in 0..whole.len() {
            for value in [0, 34, 127, 255] {
                let mut odd = whole.clone();
                odd[at] = value;
                let _ = read::<Body>(&mut odd.as_slice(), MAX_EXTRA_BYTES);
            }
        }
    }

    #[test]
    fn rejects_prints_and_oversized_tensors() {
        let told = read::<Body>(&mut &b"Loading the model...\n"[..], MAX_EXTRA_BYTES).unwrap_err().to_string();
        assert!(told.contains("print to standard error") && told.contains("Loading"), "{told}");
        let mut bytes = b"ROLL".to_vec();
        let header = br#"{"call":"x","tensors":[{"name":"t","dtype":"f32","shape":[4294967296,4294967296]}]}"#;
        bytes.extend((header.len() as u32).to_le_bytes());
        bytes.extend(header);
        assert!(read::<Body>(&mut bytes.as_slice(), MAX_EXTRA_BYTES).unwrap_err().to_string().contains("too large"));
        // Two tensors of 8 and 3 bytes.
        assert!(read::<Body>(&mut frame().as_slice(), 11).is_ok());
        let told = read::<Body>(&mut frame().as_slice(), 10).unwrap_err().to_string();
        assert!(told.contains("`b`") && told.contains("may have 10 bytes"), "{told}");
    }
}
