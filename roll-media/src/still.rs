//! Reads still images: PNG, JPEG, WebP and the first frame of an animation here, other formats through ffmpeg.

use std::io::{BufRead, BufReader, Cursor, Read, Seek};
use std::path::Path;

use roll_core::Error;
use roll_external::files;
use zune_jpeg::JpegDecoder;
use zune_jpeg::errors::DecodeErrors as JpegError;
use zune_jpeg::zune_core::{bytestream::ZCursor, options::DecoderOptions};

use crate::animation::decode_first_frame;
use crate::container::{Container, FileHead};
use crate::decoding::{MAX_PNG_BYTES, damaged, png_failure, read_failure, rounded_to_8_bits, to_rgb, webp_failure};
use crate::ffmpeg::{self, Failure};
use crate::jpeg;
use crate::mp4::heif;
use crate::orientation::Orientation;
use crate::picture::{Picture, check_size};
use crate::read_options::Decoder;
use crate::tiff::Tiff;

/// Maximum size of a TIFF file: that of the largest picture with 16 bits per sample and without compression, with some
/// margin.
const MAX_TIFF_BYTES: u64 = 512 << 20;

/// Reads an image, rotated as its EXIF data specifies; transparency is dropped, like PIL's `convert("RGB")`. PNG, JPEG,
/// WebP and the first frame of an animation are decoded here, other formats through ffmpeg if `decoder` allows it.
pub(crate) fn read_picture(path: &Path, decoder: Decoder) -> Result<Picture, String> {
    // The message has no file name, because the caller adds it.
    let head = FileHead::read(path).map_err(|e| match e {
        Error::File { source, .. } => source.to_string(),
        other => other.chain(),
    })?;
    match head.container() {
        Container::Picture | Container::Animation(_) => decode_picture(path),
        Container::Mp4 | Container::OtherVideo(_) => Err("a video, expected a picture".into()),
        _ if decoder == Decoder::Own || head.is_empty() => Err(head.unreadable_reason()),
        other => {
            let format = if let Container::OtherPicture(_, format) = other { format } else { None };
            let orientation = match other {
                Container::OtherPicture("TIFF", _) => Some(tiff_orientation(path)?),
                Container::OtherPicture("AVIF or HEIF", _) => files::open(path).ok().and_then(heif::orientation),
                _ => None,
            };
            ffmpeg::picture(path, format, orientation).map_err(|failure| match failure {
                Failure::NotInstalled(program) => {
                    format!("{}; `{program}` is not in the PATH", head.unreadable_reason())
                }
                Failure::Failed(problem) => format!("{}; {problem}", head.unreadable_reason()),
            })
        }
    }
}

/// The orientation of a TIFF file. Fails if ffmpeg would decode the picture wrongly.
fn tiff_orientation(path: &Path) -> Result<Orientation, String> {
    let mut bytes = Vec::new();
    let file = files::open(path).map_err(|e| e.to_string())?;
    file.take(MAX_TIFF_BYTES + 1).read_to_end(&mut bytes).map_err(read_failure)?;
    if bytes.len() as u64 > MAX_TIFF_BYTES {
        return Err(format!("a TIFF file larger than {MAX_TIFF_BYTES} bytes"));
    }
    let tiff = Tiff::new(&bytes).ok_or("the picture is cut short")?;
    tiff.check_kind()?;
    Ok(Orientation::from_tiff(&tiff).unwrap_or_default())
}

/// Decodes a PNG, JPEG or WebP in memory, rotated as its EXIF data specifies; transparency is dropped. Of an animation,
/// the first frame is decoded.
///
/// # Errors
/// The problem, if the bytes are another format, damaged, or of a size that [`check_size`] does not accept.
pub fn decode_still(bytes: &[u8]) -> Result<Picture, String> {
    let is_webp = bytes.starts_with(b"RIFF") && bytes.get(8..12) == Some(b"WEBP");
    if !(bytes.starts_with(b"\x89PNG\r\n\x1a\n") || bytes.starts_with(&[0xff, 0xd8, 0xff]) || is_webp) {
        return Err("not a PNG, JPEG or WebP".into());
    }
    decode(Cursor::new(bytes))
}

/// Decodes a PNG, JPEG or WebP, or the first frame of a GIF, upright.
fn decode_picture(path: &Path) -> Result<Picture, String> {
    decode(BufReader::new(files::open(path).map_err(|e| e.to_string())?))
}

fn decode(mut file: impl BufRead + Seek) -> Result<Picture, String> {
    // The first byte tells the signatures apart, which the caller has checked.
    let (picture, orientation) = match file.fill_buf().map_err(read_failure)?.first() {
        Some(0x89) => decode_png(file)?,
        Some(0xff) => decode_jpeg(file)?,
        Some(b'R') => decode_webp(file)?,
        _ => (decode_first_frame(file)?, None),
    };
    Ok(orientation.unwrap_or_default().apply(picture))
}

fn decode_png(file: impl BufRead + Seek) -> Result<(Picture, Option<Orientation>), String> {
    let mut decoder = png::Decoder::new_with_limits(file, png::Limits { bytes: MAX_PNG_BYTES });
    let header = decoder.read_header_info().map_err(png_failure)?;
    let (width, height) = (header.width as usize, header.height as usize);
    check_size(width, height)?;
    // Palettes become RGB, fewer than 8 bits become 8, 16 bits remain.
    decoder.set_transformations(png::Transformations::EXPAND);
    let mut reader = decoder.read_info().map_err(png_failure)?;
    let orientation = reader.info().exif_metadata.as_deref().and_then(Orientation::from_exif);
    let (color, depth) = reader.output_color_type();
    let mut samples = vec![0; reader.output_buffer_size().ok_or("larger than the address space")?];
    reader.next_frame(&mut samples).map_err(png_failure)?;
    if depth == png::BitDepth::Sixteen {
        samples = rounded_to_8_bits(&samples);
    }
    Ok((Picture { width, height, rgb: to_rgb(samples, color.samples()) }, orientation))
}

fn decode_jpeg(mut file: impl BufRead) -> Result<(Picture, Option<Orientation>), String> {
    let failure = |error| match error {
        JpegError::Unsupported(kind) => format!("a picture of a kind that cannot be read: {kind:?}"),
        other => damaged(other),
    };
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(read_failure)?;
    // The decoder's own limits are off, because the size is checked here.
    let options = DecoderOptions::default().set_max_width(usize::MAX).set_max_height(usize::MAX);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(&bytes), options);
    decoder.decode_headers().map_err(failure)?;
    let (width, height) = decoder.dimensions().ok_or("a JPEG file without a size")?;
    check_size(width, height)?;
    let orientation = decoder.exif().and_then(|exif| Orientation::from_exif(exif));
    jpeg::check(&bytes)?;
    Ok((Picture { width, height, rgb: decoder.decode().map_err(failure)? }, orientation))
}

fn decode_webp(file: impl BufRead + Seek) -> Result<(Picture, Option<Orientation>), String> {
    let mut decoder = image_webp::WebPDecoder::new(file).map_err(webp_failure)?;
    let (width, height) = decoder.dimensions();
    let (width, height) = (width as usize, height as usize);
    check_size(width, height)?;
    // Damaged EXIF data is ignored.
    let orientation = decoder.exif_metadata().ok().flatten().and_then(|exif| Orientation::from_exif(&exif));
    let channels = if decoder.has_alpha() { 4 } else { 3 };
    let mut samples = vec![0; width * height * channels];
    if decoder.is_animated() {
        decoder.read_frame(&mut samples).map_err(webp_failure)?;
    } else {
        decoder.read_image(&mut samples).map_err(webp_failure)?;
    }
    Ok((Picture { width, height, rgb: to_rgb(samples, channels) }, orientation))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::encode_png;

    #[test]
    fn bytes_in_memory_are_a_picture_or_an_error() {
        let picture = Picture { width: 3, height: 2, rgb: (0..18).collect() };
        let png = encode_png(&picture).unwrap();
        assert_eq!(decode_still(&png).unwrap(), picture);
        for (bytes, problem) in [
            (&png[..png.len() / 2], "cut short"),
            (&png[..8], "cut short"),
            (b"GIF89a", "not a PNG"),
            (b"RIFF", "not a PNG"),
            (b"", "not a PNG"),
        ] {
            let found = decode_still(bytes).unwrap_err();
            assert!(found.contains(problem), "{found}");
        }
        let mut huge = png.clone();
        huge[16..20].copy_from_slice(&60_000u32.to_be_bytes());
        assert!(decode_still(&huge).is_err());
    }
}
