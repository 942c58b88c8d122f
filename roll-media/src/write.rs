//! Writes videos and images. Files are written atomically.

use std::path::{Path, PathBuf};

use roll_core::{Error, Result, Video};
use roll_external::files::write_atomically;

use crate::frames::STILL_FPS;
use crate::mp4;
use crate::picture::Picture;
use crate::resize::resize;

/// Speed of the choice of 256 colours, from 1 (best colours) to 30 (fastest).
const GIF_SPEED: i32 = 10;
/// Shortest delay in hundredths of a second that players show as it is.
const LEAST_GIF_DELAY: u16 = 2;

/// Writes a video as H.264 in MP4 for ordinary players: every frame, with a constant quantiser (visually lossless),
/// tagged BT.601 limited range. H.264 with 4:2:0 chroma needs even sizes, so an odd last column or row is repeated.
pub fn write_mp4(path: impl AsRef<Path>, video: &Video) -> Result<()> {
    let path = path.as_ref();
    let mut bytes = Vec::new();
    mp4::encode(video, &mut bytes).map_err(|e| Error::bad_file(path, e))?;
    write_atomically(path, &bytes)
}

/// Extensions of the files of [`write_clip`].
const PICTURE_EXTENSION: &str = "png";
const VIDEO_EXTENSION: &str = "mp4";

/// The extension of a clip's file: `png` for one frame, which is a picture, otherwise `mp4`.
pub fn clip_extension(frames: usize) -> &'static str {
    if frames == 1 { PICTURE_EXTENSION } else { VIDEO_EXTENSION }
}

/// Writes a clip to the path `stem` with the extension of [`clip_extension`]: a clip of one frame as a picture, a
/// longer one as [`write_mp4`] does. Returns the path of the file.
///
/// # Errors
/// Fails if the file cannot be written.
pub fn write_clip(stem: &Path, video: &Video) -> Result<PathBuf> {
    let frames = video.dims()[0];
    let path = with_clip_extension(stem, clip_extension(frames));
    match frames {
        1 => write_atomically(&path, &encode_png(&Picture::from_frame(video, 0))?)?,
        _ => write_mp4(&path, video)?,
    }
    Ok(path)
}

/// The file that [`write_clip`] wrote for `stem`; `None` without such a file.
pub fn clip_file(stem: &Path) -> Option<PathBuf> {
    let paths = [PICTURE_EXTENSION, VIDEO_EXTENSION].map(|extension| with_clip_extension(stem, extension));
    paths.into_iter().find(|path| path.is_file())
}

/// Whether a file has the extension of [`clip_extension`]. `Some(true)`: that of a picture.
pub fn is_clip_of_one_frame(path: &Path) -> Option<bool> {
    match path.extension()?.to_str()? {
        PICTURE_EXTENSION => Some(true),
        VIDEO_EXTENSION => Some(false),
        _ => None,
    }
}

/// `stem` with an extension added. A dot in the name stays.
fn with_clip_extension(stem: &Path, extension: &str) -> PathBuf {
    let mut path = stem.as_os_str().to_os_string();
    path.push(".");
    path.push(extension);
    path.into()
}

/// Encodes a GIF with 256 colours per frame that loops for ever. Frames larger than `max_side` are scaled down.
pub fn encode_gif(video: &Video, max_side: usize) -> Result<Vec<u8>> {
    let failed = |e: gif::EncodingError| Error::Misuse(format!("the video cannot be written as GIF: {e}"));
    let [frames, height, width] = video.dims();
    let longest = height.max(width).max(1);
    let scaled = |side: usize| if longest <= max_side { side } else { (side * max_side.max(1) / longest).max(1) };
    let size = [scaled(height), scaled(width)];
    let [Ok(gif_height), Ok(gif_width)] = size.map(u16::try_from) else {
        return Err(Error::Misuse(format!("a GIF cannot have frames of {} x {} pixels", size[1], size[0])));
    };
    let mut bytes = Vec::new();
    let mut encoder = gif::Encoder::new(&mut bytes, gif_width, gif_height, &[]).map_err(failed)?;
    encoder.set_repeat(gif::Repeat::Infinite).map_err(failed)?;
    let fps = if video.fps() > 0.0 { video.fps() } else { STILL_FPS };
    // Delays are hundredths of a second. Times are rounded instead of delays, so that rounding errors do not
    // accumulate.
    let centiseconds = |t: usize| (t as f64 * 100.0 / fps).round();
    for t in 0..frames {
        let picture = resize(Picture::from_frame(video, t), size);
        let mut frame = gif::Frame::from_rgb_speed(gif_width, gif_height, &picture.rgb, GIF_SPEED);
        frame.delay = ((centiseconds(t + 1) - centiseconds(t)) as u16).max(LEAST_GIF_DELAY);
        frame.dispose = gif::DisposalMethod::Background;
        encoder.write_frame(&frame).map_err(failed)?;
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
    let failed = |e: png::EncodingError| Error::Misuse(format!("the picture cannot be written as PNG: {e}"));
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, picture.width as u32, picture.height as u32);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_compression(png::Compression::Fast);
    encoder.set_filter(png::Filter::Adaptive);
    let mut writer = encoder.write_header().map_err(failed)?;
    writer.write_image_data(&picture.rgb).map_err(failed)?;
    writer.finish().map_err(failed)?;
    Ok(bytes)
}

/// Returns a grid, as square as possible, of at most `max_frames` evenly spaced frames, including the first and the
/// last. Fails for zero frames.
pub fn contact_sheet(video: &Video, max_frames: usize) -> Result<Picture> {
    let [frames, height, width] = video.dims();
    let count = frames.min(max_frames);
    if count == 0 {
        return Err(Error::Misuse("a contact sheet of no frames".into()));
    }
    // The fewest columns of a sheet that is at least as wide as high.
    let mut columns = 1;
    while columns * columns * width < count * height {
        columns += 1;
    }
    let columns = columns.min(count);
    let (sheet_width, sheet_height) = (columns * width, count.div_ceil(columns) * height);
    let mut rgb = vec![0; sheet_width * sheet_height * 3];
    for i in 0..count {
        // i / (count - 1) of the way to the last frame, rounded.
        let t = if count == 1 { 0 } else { (i * (frames - 1) + (count - 1) / 2) / (count - 1) };
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
