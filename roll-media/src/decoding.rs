//! The common parts of the decoders of stills and of animations: conversion to RGB, limits, and messages.

use std::fmt::Display;
use std::io::{Error as IoError, ErrorKind};

/// Maximum number of bytes that the chunks of a PNG file need in memory.
pub(crate) const MAX_PNG_BYTES: usize = 512 << 20;

/// Rounds big-endian 16-bit samples to the nearest 8-bit values.
pub(crate) fn rounded_to_8_bits(samples: &[u8]) -> Vec<u8> {
    // 65535 / 257 is 255, and 128 rounds to the nearest value.
    let rounded = |b: &[u8]| ((u32::from(u16::from_be_bytes([b[0], b[1]])) + 128) / 257) as u8;
    samples.chunks_exact(2).map(rounded).collect()
}

/// Converts gray, gray with alpha, RGB or RGBA pixels to RGB; transparency is dropped.
pub(crate) fn to_rgb(samples: Vec<u8>, channels: usize) -> Vec<u8> {
    match channels {
        1 | 2 => samples.chunks_exact(channels).flat_map(|pixel| [pixel[0]; 3]).collect(),
        3 => samples,
        _ => samples.chunks_exact(channels).flat_map(|pixel| [pixel[0], pixel[1], pixel[2]]).collect(),
    }
}

pub(crate) fn png_failure(error: png::DecodingError) -> String {
    match error {
        png::DecodingError::IoError(error) => read_failure(error),
        png::DecodingError::LimitsExceeded => format!("larger than {MAX_PNG_BYTES} bytes in memory"),
        other => damaged(other),
    }
}

pub(crate) fn webp_failure(error: image_webp::DecodingError) -> String {
    match error {
        image_webp::DecodingError::IoError(error) => read_failure(error),
        other => damaged(other),
    }
}

pub(crate) fn read_failure(error: IoError) -> String {
    match error.kind() {
        ErrorKind::UnexpectedEof => "the picture is cut short".into(),
        _ => error.to_string(),
    }
}

pub(crate) fn damaged(cause: impl Display) -> String {
    format!("the picture is damaged: {cause}")
}
