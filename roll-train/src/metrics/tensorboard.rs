//! TensorBoard event files.
//!
//! A file is a sequence of records: length (u64), masked CRC-32C of the length, an `Event` message, masked CRC-32C of
//! the message; little-endian. The messages (tensorflow/core/util/event.proto, tensorflow/core/framework/summary.proto)
//! have so few fields that they are encoded by hand.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use roll_core::{Error, Result};

/// Numbers of the fields of `Event`.
mod event_field {
    pub const WALL_TIME: u32 = 1;
    pub const STEP: u32 = 2;
    pub const FILE_VERSION: u32 = 3;
    pub const SUMMARY: u32 = 5;
}

/// Number of the field of `Summary` that holds a `Summary.Value`.
const SUMMARY_VALUE: u32 = 1;

/// Numbers of the fields of `Summary.Value`.
mod value_field {
    pub const TAG: u32 = 1;
    pub const SIMPLE_VALUE: u32 = 2;
    pub const IMAGE: u32 = 4;
}

/// Numbers of the fields of `Summary.Image`.
mod image_field {
    pub const HEIGHT: u32 = 1;
    pub const WIDTH: u32 = 2;
    pub const COLORSPACE: u32 = 3;
    pub const ENCODED_IMAGE_STRING: u32 = 4;
}

/// The value of [`image_field::COLORSPACE`] for pictures with three channels.
const COLORSPACE_RGB: u64 = 3;

/// Writes one event file.
#[derive(Debug)]
pub struct EventWriter {
    path: PathBuf,
    file: BufWriter<File>,
}

impl EventWriter {
    /// Creates an event file in `directory`. A resumed run adds one, because TensorBoard merges all event files of a
    /// directory.
    pub fn create(directory: &Path) -> Result<Self> {
        // Tells apart the files that one process creates within a second.
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let (seconds, n) = (wall_time() as u64, COUNTER.fetch_add(1, Ordering::Relaxed));
        // The name begins with the time, because TensorBoard reads files in the order of their names, and shows the
        // last value of a step.
        let path = directory.join(format!("events.out.tfevents.{seconds:010}.roll.{}.{n}", std::process::id()));
        let file = File::create_new(&path).map_err(Error::file("create", &path))?;
        let mut writer = Self { path, file: BufWriter::new(file) };
        // The first event names the version of the format.
        let mut event = Message::default();
        event.f64(event_field::WALL_TIME, wall_time());
        event.bytes(event_field::FILE_VERSION, b"brain.Event:2");
        writer.record(&event)?;
        writer.flush()?;
        Ok(writer)
    }

    /// Writes a number of a step.
    pub fn scalar(&mut self, name: &str, number: f64, step: u64) -> Result<()> {
        let mut summary_value = Message::default();
        summary_value.bytes(value_field::TAG, name.as_bytes());
        summary_value.f32(value_field::SIMPLE_VALUE, number as f32);
        self.event(summary_value, step)
    }

    /// Writes a picture of a step: PNG, or animated GIF.
    pub fn image(&mut self, name: &str, encoded: &[u8], [height, width]: [usize; 2], step: u64) -> Result<()> {
        let mut picture = Message::default();
        picture.int(image_field::HEIGHT, height as u64);
        picture.int(image_field::WIDTH, width as u64);
        picture.int(image_field::COLORSPACE, COLORSPACE_RGB);
        picture.bytes(image_field::ENCODED_IMAGE_STRING, encoded);
        let mut summary_value = Message::default();
        summary_value.bytes(value_field::TAG, name.as_bytes());
        summary_value.message(value_field::IMAGE, picture);
        self.event(summary_value, step)
    }

    /// Passes the bytes written so far to the operating system.
    pub fn flush(&mut self) -> Result<()> {
        self.file.flush().map_err(Error::file("write", &self.path))
    }

    /// Writes an `Event` with one `Summary.Value`.
    fn event(&mut self, summary_value: Message, step: u64) -> Result<()> {
        let mut summary = Message::default();
        summary.message(SUMMARY_VALUE, summary_value);
        let mut event = Message::default();
        event.f64(event_field::WALL_TIME, wall_time());
        event.int(event_field::STEP, step);
        event.message(event_field::SUMMARY, summary);
        self.record(&event)
    }

    /// Writes a record.
    fn record(&mut self, Message(bytes): &Message) -> Result<()> {
        let length = (bytes.len() as u64).to_le_bytes();
        let parts: [&[u8]; 4] = [&length, &masked_crc(&length).to_le_bytes(), bytes, &masked_crc(bytes).to_le_bytes()];
        parts.iter().try_for_each(|part| self.file.write_all(part)).map_err(Error::file("write", &self.path))
    }
}

/// The CRC-32C, masked as TFRecord requires. Without the mask, the CRC of data that contain CRCs would be weak.
fn masked_crc(bytes: &[u8]) -> u32 {
    const ROTATION: u32 = 15;
    const SUMMAND: u32 = 0xa282_ead8;
    crc32c(bytes).rotate_right(ROTATION).wrapping_add(SUMMAND)
}

/// CRC-32C, by Castagnoli's polynomial.
fn crc32c(bytes: &[u8]) -> u32 {
    /// The polynomial, with its bits reversed.
    const POLYNOMIAL: u32 = 0x82f6_3b78;
    let mut crc = !0u32;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _bit in 0..8 {
            let lowest_bit = crc & 1;
            crc >>= 1;
            if lowest_bit == 1 {
                crc ^= POLYNOMIAL;
            }
        }
    }
    !crc
}

/// Seconds since 1970.
fn wall_time() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map(|t| t.as_secs_f64()).unwrap_or(0.0)
}

/// How the value of a field is encoded.
mod wire_type {
    pub const VARINT: u32 = 0;
    pub const EIGHT_BYTES: u32 = 1;
    pub const LENGTH_AND_BYTES: u32 = 2;
    pub const FOUR_BYTES: u32 = 5;
}

/// A protocol buffer message under construction. Before each value comes a key with the field's number and the wire
/// type.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    /// Appends an integer in groups of 7 bits, lowest first. The highest bit of a byte says that another one follows.
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
    fn key(&mut self, field: u32, wire_type: u32) {
        self.varint(u64::from(field << 3 | wire_type));
    }
    fn int(&mut self, field: u32, value: u64) {
        self.key(field, wire_type::VARINT);
        self.varint(value);
    }
    fn f64(&mut self, field: u32, value: f64) {
        self.key(field, wire_type::EIGHT_BYTES);
        self.0.extend(value.to_le_bytes());
    }
    fn f32(&mut self, field: u32, value: f32) {
        self.key(field, wire_type::FOUR_BYTES);
        self.0.extend(value.to_le_bytes());
    }
    fn bytes(&mut self, field: u32, value: &[u8]) {
        self.key(field, wire_type::LENGTH_AND_BYTES);
        self.varint(value.len() as u64);
        self.0.extend(value);
    }
    fn message(&mut self, field: u32, value: Self) {
        self.bytes(field, &value.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Splits a file into records, checking lengths and CRCs.
    fn records(mut bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut records = Vec::new();
        while !bytes.is_empty() {
            let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            assert_eq!(masked_crc(&bytes[..8]).to_le_bytes(), bytes[8..12]);
            let data = &bytes[12..12 + length];
            assert_eq!(masked_crc(data).to_le_bytes(), bytes[12 + length..16 + length]);
            records.push(data.to_vec());
            bytes = &bytes[16 + length..];
        }
        records
    }

    #[test]
    fn the_checksum_is_crc32c() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(masked_crc(b"123456789"), 0xe306_9283u32.rotate_right(15).wrapping_add(0xa282_ead8));
    }

    #[test]
    fn records_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = EventWriter::create(dir.path()).unwrap();
        writer.scalar("actor/loss", 0.5, 300).unwrap();
        writer.image("sample", b"GIF89a", [4, 6], 1).unwrap();
        writer.flush().unwrap();
        let records = records(&std::fs::read(&writer.path).unwrap());
        assert_eq!(records.len(), 3);
        assert!(records[0].ends_with(b"brain.Event:2"));
        // wall_time, step 300 as a varint, summary { value { tag, simple_value } }
        let expected = b"\x10\xac\x02\x2a\x13\x0a\x11\x0a\x0aactor/loss\x15\x00\x00\x00\x3f";
        assert_eq!(records[1][9..], expected[..]);
        assert!(records[2].ends_with(b"\x08\x04\x10\x06\x18\x03\x22\x06GIF89a"));
        let other = EventWriter::create(dir.path()).unwrap();
        assert_ne!(other.path, writer.path);
    }
}
