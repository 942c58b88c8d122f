//! Pictures and animations through the `image` crate, with limits.

use std::fs::File;
use std::io::{BufReader, Cursor};
use std::ops::ControlFlow;
use std::path::Path;

use image::codecs::gif::GifDecoder;
use image::{AnimationDecoder, ImageDecoder, ImageReader, Limits};

use crate::picture::{MAX_SIDE, Picture, check_size};

fn limits() -> Limits {
    let mut limits = Limits::default();
    limits.max_image_width = Some(MAX_SIDE as u32);
    limits.max_image_height = Some(MAX_SIDE as u32);
    limits.max_alloc = Some(512 << 20);
    limits
}

/// Reads PNG, JPEG, WebP or the first frame of a GIF; transparency is dropped, as by PIL's `convert("RGB")`.
pub(crate) fn read_picture(path: &Path) -> Result<Picture, String> {
    let mut reader = ImageReader::open(path).and_then(ImageReader::with_guessed_format).map_err(|e| e.to_string())?;
    reader.limits(limits());
    let image = reader.decode().map_err(|e| e.to_string())?.into_rgb8();
    let (width, height) = (image.width() as usize, image.height() as usize);
    check_size(width, height)?;
    Ok(Picture { width, height, rgb: image.into_raw() })
}

/// Decodes the frames of a GIF one by one; the delay of each is in seconds.
pub(crate) fn decode_gif(
    file: File,
    mut each: impl FnMut(Picture, f64) -> Result<ControlFlow<()>, String>,
) -> Result<(), String> {
    let mut decoder = GifDecoder::new(BufReader::new(file)).map_err(|e| e.to_string())?;
    decoder.set_limits(limits()).map_err(|e| e.to_string())?;
    let (width, height) = decoder.dimensions();
    check_size(width as usize, height as usize)?;
    for frame in decoder.into_frames() {
        let frame = frame.map_err(|e| e.to_string())?;
        let (numerator, denominator) = frame.delay().numer_denom_ms();
        let seconds = f64::from(numerator) / f64::from(denominator.max(1)) / 1000.0;
        let image = image::DynamicImage::ImageRgba8(frame.into_buffer()).into_rgb8();
        let picture = Picture { width: image.width() as usize, height: image.height() as usize, rgb: image.into_raw() };
        if each(picture, seconds)?.is_break() {
            break;
        }
    }
    Ok(())
}

/// PNG bytes.
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
