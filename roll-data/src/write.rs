//! Writes videos and images. Files are written atomically.

use std::path::{Path, PathBuf};

use image::codecs::gif::{GifEncoder, Repeat};
use image::{Delay, DynamicImage, RgbImage};
use roll_core::{Error, Result, Video};
use roll_external::files::write_atomically;

use crate::mp4;
use crate::picture::Picture;
use crate::resize::resize;
use crate::still::png;

/// Writes H.264 in MP4 for ordinary players: every frame, constant quantiser (visually lossless), tagged BT.601 limited
/// range. H.264 with 4:2:0 chroma needs even sizes: an odd last column or row is repeated.
pub fn write_mp4(path: impl AsRef<Path>, video: &Video) -> Result<()> {
    let path = path.as_ref();
    let mut bytes = Vec::new();
    mp4::encode(video, &mut bytes).map_err(|e| Error::bad_file(path, e))?;
    write_atomically(path, &bytes)
}

/// Encodes a GIF with 256 colours per frame that loops for ever. Frames larger than `max_side` are scaled down.
pub fn encode_gif(video: &Video, max_side: usize) -> Result<Vec<u8>> {
    let failed = |e: image::ImageError| Error::Misuse(format!("the video cannot be written as GIF: {e}"));
    let mut bytes = Vec::new();
    let mut encoder = GifEncoder::new_with_speed(&mut bytes, 10);
    encoder.set_repeat(Repeat::Infinite).map_err(failed)?;
    let fps = if video.fps() > 0.0 { video.fps() } else { 16.0 };
    // Delays are hundredths of a second; rounding errors must not accumulate.
    let centiseconds = |t: usize| (t as f64 * 100.0 / fps).round();
    for t in 0..video.dims()[0] {
        let picture = shrink(Picture::from_frame(video, t), max_side);
        let delay = ((centiseconds(t + 1) - centiseconds(t)) as u32).max(2) * 10;
        let (w, h) = (picture.width as u32, picture.height as u32);
        let image = RgbImage::from_raw(w, h, picture.rgb)
            .ok_or_else(|| Error::Misuse("a frame has another size than it says".into()))?;
        let rgba = DynamicImage::ImageRgb8(image).into_rgba8();
        let frame = image::Frame::from_parts(rgba, 0, 0, Delay::from_numer_denom_ms(delay, 1));
        encoder.encode_frame(frame).map_err(failed)?;
    }
    drop(encoder);
    Ok(bytes)
}

/// Writes a GIF in full size; see [`encode_gif`].
pub fn write_gif(path: impl AsRef<Path>, video: &Video) -> Result<()> {
    write_atomically(path.as_ref(), &encode_gif(video, usize::MAX)?)
}

/// Writes every frame as `frame_00000.png` ... into `directory`, which is created if missing. Returns the paths.
pub fn write_pngs(directory: impl AsRef<Path>, video: &Video) -> Result<Vec<PathBuf>> {
    let directory = directory.as_ref();
    std::fs::create_dir_all(directory).map_err(Error::file("create the directory", directory))?;
    let mut paths = Vec::new();
    for t in 0..video.dims()[0] {
        let path = directory.join(format!("frame_{t:05}.png"));
        write_atomically(&path, &encode_png(&Picture::from_frame(video, t))?)?;
        paths.push(path);
    }
    Ok(paths)
}

/// Encodes an image as PNG.
pub fn encode_png(picture: &Picture) -> Result<Vec<u8>> {
    png(picture).map_err(|e| Error::Misuse(format!("the picture cannot be written as PNG: {e}")))
}

/// Returns a grid, as square as possible, of at most `max_frames` evenly spaced frames, including the first and the
/// last. Fails for zero frames.
pub fn contact_sheet(video: &Video, max_frames: usize) -> Result<Picture> {
    let [frames, height, width] = video.dims();
    let n = frames.min(max_frames);
    if n == 0 {
        return Err(Error::Misuse("a contact sheet of no frames".into()));
    }
    let mut columns = 1;
    while columns * columns * width < n * height {
        columns += 1;
    }
    let columns = columns.min(n);
    let (sheet_width, sheet_height) = (columns * width, n.div_ceil(columns) * height);
    let mut rgb = vec![0; sheet_width * sheet_height * 3];
    for i in 0..n {
        let t = if n == 1 { 0 } else { (i * (frames - 1) + (n - 1) / 2) / (n - 1) };
        let picture = Picture::from_frame(video, t);
        let (left, top) = (i % columns * width, i / columns * height);
        for (y, row) in picture.rgb.chunks_exact(width * 3).enumerate() {
            rgb[((top + y) * sheet_width + left) * 3..][..width * 3].copy_from_slice(row);
        }
    }
    Ok(Picture { width: sheet_width, height: sheet_height, rgb })
}

/// Writes a PNG of the [`contact_sheet`].
pub fn write_contact_sheet(path: impl AsRef<Path>, video: &Video, max_frames: usize) -> Result<()> {
    write_atomically(path.as_ref(), &encode_png(&contact_sheet(video, max_frames)?)?)
}

fn shrink(picture: Picture, max_side: usize) -> Picture {
    let longest = picture.width.max(picture.height);
    if longest <= max_side.max(1) {
        return picture;
    }
    let scaled = |side: usize| (side * max_side.max(1) / longest).max(1);
    let size = [scaled(picture.height), scaled(picture.width)];
    resize(picture, size)
}
