//! Still images and GIF through the `image` crate, with limits.

use std::fs::File;
use std::io::{BufReader, Cursor};
use std::ops::ControlFlow;
use std::path::Path;

use image::codecs::gif::GifDecoder;
use image::{AnimationDecoder, DynamicImage, ImageDecoder, ImageError, ImageReader, Limits};
use roll_core::Error;
use roll_external::files;

use crate::config::Decoder;
use crate::container::{Container, Head};
use crate::ffmpeg::{self, Failure};
use crate::frames::STILL_FPS;
use crate::orientation::Orientation;
use crate::picture::{MAX_SIDE, Picture, check_size};

/// Maximum size of a decoded image in bytes.
const MAX_BYTES: u64 = 512 << 20;
/// Maximum number of pixels of all decoded frames of a GIF: five hundred frames of full HD, about ten seconds.
const MAX_GIF_PIXELS: u64 = 1 << 30;

fn limits() -> Limits {
    let mut limits = Limits::default();
    limits.max_image_width = Some(MAX_SIDE as u32);
    limits.max_image_height = Some(MAX_SIDE as u32);
    limits.max_alloc = Some(MAX_BYTES);
    limits
}

/// Reads an image, rotated as its EXIF data specifies; transparency is dropped, like PIL's `convert("RGB")`. PNG, JPEG,
/// WebP and the first frame of a GIF are decoded here, other formats through ffmpeg if `decoder` allows it.
pub(crate) fn read_picture(path: &Path, decoder: Decoder) -> Result<Picture, String> {
    // The caller adds the file name.
    let head = Head::read(path).map_err(|e| match e {
        Error::File { source, .. } => source.to_string(),
        other => other.chain(),
    })?;
    let picture = match head.container() {
        Container::Picture | Container::Gif => decode_picture(path)?,
        Container::Mp4 | Container::OtherVideo(_) => return Err("a video, expected a picture".into()),
        _ if decoder == Decoder::Own || head.is_empty() => return Err(head.unread()),
        other => {
            let format = if let Container::OtherPicture(_, format) = other { format } else { None };
            ffmpeg::picture(path, format).map_err(|failure| match failure {
                Failure::Absent(program) => format!("{}; `{program}` is not in the PATH", head.unread()),
                Failure::Failed(problem) => format!("{}; {problem}", head.unread()),
            })?
        }
    };
    check_size(picture.width, picture.height)?;
    Ok(picture)
}

fn decode_picture(path: &Path) -> Result<Picture, String> {
    let file = files::open(path).map_err(|e| e.to_string())?;
    let mut reader = ImageReader::new(BufReader::new(file)).with_guessed_format().map_err(|e| e.to_string())?;
    reader.limits(limits());
    let decode = || {
        let mut decoder = reader.into_decoder()?;
        let mut limits = limits();
        limits.reserve(decoder.total_bytes())?;
        decoder.set_limits(limits)?;
        // Damaged EXIF data is ignored.
        let orientation = decoder.orientation().map(Orientation::from).unwrap_or_default();
        Ok((DynamicImage::from_decoder(decoder)?.into_rgb8(), orientation))
    };
    let (image, orientation) = decode().map_err(plain)?;
    let (width, height) = (image.width() as usize, image.height() as usize);
    Ok(orientation.apply(Picture { width, height, rgb: image.into_raw() }))
}

/// Converts an error to this crate's wording.
fn plain(error: ImageError) -> String {
    match error {
        ImageError::Limits(_) => format!("larger than {MAX_SIDE} pixels a side, or than {MAX_BYTES} bytes in memory"),
        ImageError::Unsupported(what) => format!("a picture of a kind that cannot be read: {what}"),
        ImageError::IoError(error) => match error.kind() {
            std::io::ErrorKind::UnexpectedEof => "the picture is cut short".into(),
            _ => error.to_string(),
        },
        ImageError::Decoding(error) => {
            let cause = std::error::Error::source(&error).map_or_else(|| error.to_string(), |cause| cause.to_string());
            format!("the picture is damaged: {cause}")
        }
        other => other.to_string(),
    }
}

/// Decodes the frames of a GIF one by one and calls `each` with each frame and its duration in seconds, until it
/// breaks. Fails if the frames have more than [`MAX_GIF_PIXELS`] in total.
pub(crate) fn decode_gif(
    file: File,
    each: impl FnMut(Picture, f64) -> Result<ControlFlow<()>, String>,
) -> Result<(), String> {
    decode_gif_of(MAX_GIF_PIXELS, file, each)
}

fn decode_gif_of(
    most: u64,
    file: File,
    mut each: impl FnMut(Picture, f64) -> Result<ControlFlow<()>, String>,
) -> Result<(), String> {
    let mut decoder = GifDecoder::new(BufReader::new(file)).map_err(plain)?;
    decoder.set_limits(limits()).map_err(plain)?;
    let (width, height) = decoder.dimensions();
    check_size(width as usize, height as usize)?;
    for (i, frame) in (1..).zip(decoder.into_frames()) {
        if u64::from(width) * u64::from(height) * i > most {
            return Err(format!("its frames have more than {most} pixels together; convert it to a video"));
        }
        let frame = frame.map_err(plain)?;
        let (numerator, denominator) = frame.delay().numer_denom_ms();
        let seconds = match numerator {
            0 => 1.0 / STILL_FPS, // it does not say
            n => f64::from(n) / f64::from(denominator.max(1)) / 1000.0,
        };
        let image = DynamicImage::ImageRgba8(frame.into_buffer()).into_rgb8();
        let picture = Picture { width: image.width() as usize, height: image.height() as usize, rgb: image.into_raw() };
        if each(picture, seconds)?.is_break() {
            break;
        }
    }
    Ok(())
}

/// Encodes an image as PNG.
pub(crate) fn png(picture: &Picture) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    let (w, h) = (picture.width as u32, picture.height as u32);
    image::write_buffer_with_format(
        &mut Cursor::new(&mut bytes),
        &picture.rgb,
        w,
        h,
        image::ExtendedColorType::Rgb8,
        image::ImageFormat::Png,
    )
    .map_err(|e| e.to_string())?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A GIF with frames of 64 x 32 pixels of one colour.
    fn gif(frames: usize) -> (tempfile::TempDir, File) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.gif");
        let mut encoder = image::codecs::gif::GifEncoder::new(File::create(&path).unwrap());
        let frame = || image::Frame::new(image::RgbaImage::from_pixel(64, 32, image::Rgba([7, 7, 7, 255])));
        encoder.encode_frames((0..frames).map(|_| frame())).unwrap();
        drop(encoder);
        (dir, File::open(path).unwrap())
    }

    #[test]
    fn a_gif_of_too_many_pixels_is_refused_and_its_first_frames_are_read() {
        let (mut read, most) = (0, 64 * 32 * 10);
        let decode = |frames, enough, read: &mut usize| {
            decode_gif_of(most, gif(frames).1, |_, _| {
                *read += 1;
                Ok(if *read == enough { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
            })
        };
        decode(10, usize::MAX, &mut read).unwrap();
        assert_eq!(read, 10);
        read = 0;
        assert!(decode(11, usize::MAX, &mut read).unwrap_err().contains("more than 20480 pixels together"));
        read = 0;
        decode(11, 3, &mut read).unwrap();
        assert_eq!(read, 3);
    }
}
