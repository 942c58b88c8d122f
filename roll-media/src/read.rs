//! Reads videos and images of any supported kind.

use std::cell::Cell;
use std::cmp::Ordering;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use roll_core::{Error, Result, Tensor, Video};
use roll_external::files;

use crate::animation::{Length, decode_animation};
use crate::complete;
use crate::container::{Animation, Container, FileHead};
use crate::ffmpeg::{self, Failure};
use crate::frames::{Frames, MAX_VIDEO_BYTES, STILL_FPS, fit};
use crate::mp4::Mp4Reader;
use crate::read_options::Decoder;
use crate::read_options::{ReadOptions, Sizing};
use crate::still::read_picture;

/// Reads H.264 in MP4 and MOV, GIF, animated WebP and PNG, a directory of PNG, JPEG or WebP files in the natural order
/// of their names (2 before 10), or one such file as a video of one frame. Other formats are read through the program
/// ffmpeg. Anything else, and anything damaged, is an error that names the file and the reason.
///
/// Frames look as in a player: rotated and mirrored as the file specifies, without the parts that its edit list
/// removes, in square pixels. Decoding stops after the last requested frame.
pub fn read_video(path: impl AsRef<Path>, options: &ReadOptions) -> Result<Video> {
    let path = path.as_ref();
    if path.is_dir() {
        return read_directory(path, options);
    }
    let head = FileHead::read(path)?;
    complete::check(path, head.container())?;
    let bad_file = |problem: String| Error::bad_file(path, problem);
    let by_ffmpeg = || ffmpeg::decode(path, options);
    let frames = match (head.container(), options.decoder) {
        (Container::Picture | Container::OtherPicture(..), decoder) => {
            let mut frames = Frames::new(options);
            let taken = read_picture(path, decoder).and_then(|picture| frames.push(picture, 1));
            taken.map(|_| frames).map_err(bad_file)
        }
        (Container::Animation(kind), _) => {
            let mut frames = Frames::new(options);
            read_animation(kind, path, &mut frames).map(|()| frames).map_err(bad_file)
        }
        (Container::Mp4, Decoder::Auto | Decoder::Own) => {
            let mut frames = Frames::new(options);
            match read_mp4(path, &mut frames) {
                Ok(()) => Ok(frames),
                // Another decoder would not help.
                Err(problem) if frames.is_rejected => Err(bad_file(problem)),
                Err(problem) => or_ffmpeg(path, options.decoder, problem, by_ffmpeg),
            }
        }
        // Other containers, and MP4 if the options ask for ffmpeg.
        (_, decoder) => or_ffmpeg(path, decoder, head.unreadable_reason(), by_ffmpeg),
    };
    frames?.finish(path)
}

/// Returns ffmpeg's result after this crate's reader failed with `problem`, if `decoder` allows ffmpeg.
pub(crate) fn or_ffmpeg<T>(
    path: &Path,
    decoder: Decoder,
    problem: String,
    by_ffmpeg: impl FnOnce() -> std::result::Result<T, Failure>,
) -> Result<T> {
    let is_empty = std::fs::metadata(path).is_ok_and(|file| file.len() == 0);
    if decoder == Decoder::Own || is_empty {
        return Err(Error::bad_file(path, with_remedy(problem, path, "convert it")));
    }
    by_ffmpeg().map_err(|failure| {
        let problem = match failure {
            Failure::NotInstalled(program) => {
                with_remedy(problem, path, &format!("install ffmpeg (`{program}` is not in the PATH), or convert it"))
            }
            // The user asked for ffmpeg: the problem of this crate's reader does not matter.
            Failure::Failed(message) if decoder == Decoder::Ffmpeg => message,
            // Both readers failed.
            Failure::Failed(message) => format!("{problem}; {message}"),
        };
        Error::bad_file(path, problem)
    })
}

/// Reads one image as `[3, H, W]` in [-1, 1], rotated as its EXIF data specifies.
pub fn read_image(path: impl AsRef<Path>, sizing: Sizing) -> Result<Tensor> {
    read_image_by(path.as_ref(), sizing, Decoder::Auto)
}

/// Reads an image as [`read_image`] does, with the given decoder.
pub fn read_image_by(path: &Path, sizing: Sizing, decoder: Decoder) -> Result<Tensor> {
    let picture = read_picture(path, decoder).and_then(|picture| fit(picture, sizing));
    picture.map_err(|problem| Error::bad_file(path, problem))?.to_tensor()
}

/// The text of a problem. If the problem is a kind of file that cannot be read, a remedy and a command that converts
/// the file are added.
fn with_remedy(problem: String, path: &Path, remedy: &str) -> String {
    if !problem.contains("can be read") && !problem.contains("cannot be read") {
        return problem;
    }
    let [from, to] = [path, &path.with_extension("h264.mp4")].map(files::shell_quoted);
    format!("{problem}; {remedy}: ffmpeg -i {from} -c:v libx264 -pix_fmt yuv420p {to}")
}

fn read_mp4(path: &Path, frames: &mut Frames) -> std::result::Result<(), String> {
    let mut reader = Mp4Reader::open(files::open(path).map_err(|e| e.to_string())?)?;
    frames.source_fps = reader.fps();
    reader.decode(|picture, time| frames.push_at(picture, time))
}

fn read_animation(kind: Animation, path: &Path, frames: &mut Frames) -> std::result::Result<(), String> {
    let (mut shown_until, mut count) = (0.0, 0);
    let file = files::open(path).map_err(|e| e.to_string())?;
    let bytes = file.metadata().map_err(|e| e.to_string())?.len();
    frames.max_bytes = memory_of_animation(usize::try_from(bytes).unwrap_or(usize::MAX));
    let announced = Cell::new(None);
    let announce = |length: Length| announced.set(Some(length));
    // `frames` is borrowed by the second closure, so the announced length passes through a cell.
    decode_animation(kind, file, announce, |picture, seconds| {
        if let Some(length) = announced.take() {
            frames.announce(length.frames, length.seconds);
        }
        let shown_from = shown_until;
        shown_until += seconds;
        count += 1;
        frames.push_at(picture, [shown_from, shown_until])
    })?;
    if count > 0 {
        frames.source_fps = f64::from(count) / shown_until;
    }
    Ok(())
}

/// Maximum memory for the kept frames of an animation in a file of `bytes`: 1 GiB plus 64 pixels per byte of the file.
/// A byte of LZW may become thousands of pixels: without a bound, a kilobyte could take gigabytes. In frames of real
/// pictures a byte becomes fewer than ten pixels.
fn memory_of_animation(bytes: usize) -> usize {
    const BYTES_PER_PIXEL: usize = 3 * size_of::<f32>();
    const PIXELS_PER_BYTE: usize = 64;
    const ALWAYS_ALLOWED: usize = 1 << 30;
    bytes.saturating_mul(PIXELS_PER_BYTE * BYTES_PER_PIXEL).saturating_add(ALWAYS_ALLOWED).min(MAX_VIDEO_BYTES)
}

/// Reads the images of a directory as the frames of a video at [`STILL_FPS`].
fn read_directory(path: &Path, options: &ReadOptions) -> Result<Video> {
    let files = pictures_in(path)?;
    let mut frames = Frames::new(options);
    for (i, file) in files.iter().enumerate() {
        let bad = |problem| Error::bad_file(file, problem);
        let picture = read_picture(file, options.decoder).map_err(bad)?;
        let time = [i, i + 1].map(|i| i as f64 / STILL_FPS);
        if let ControlFlow::Break(()) = frames.push_at(picture, time).map_err(bad)? {
            break;
        }
    }
    frames.finish(path)
}

/// Returns the images of a directory in natural order. Fails if the directory has no images.
pub(crate) fn pictures_in(path: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(path).map_err(Error::file("list", path))?;
    let mut files: Vec<PathBuf> = Vec::new();
    for entry in entries {
        let file = entry.map_err(Error::file("list", path))?.path();
        if is_resource_fork(&file) {
            continue;
        }
        let extension = file.extension().map(|e| e.to_string_lossy().to_lowercase());
        if matches!(extension.as_deref(), Some("png" | "jpg" | "jpeg" | "webp")) {
            files.push(file);
        }
    }
    files.sort_by(|a, b| natural_order(a, b));
    if files.is_empty() {
        return Err(Error::bad_file(path, "a directory without PNG, JPEG or WebP files"));
    }
    Ok(files)
}

/// Whether macOS wrote the file beside another one: `._a.png` has attributes of `a.png`, and no picture.
pub fn is_resource_fork(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("._"))
}

/// The order of names in which numbers count as numbers: 2.png comes before 10.png.
fn natural_order(a: &Path, b: &Path) -> Ordering {
    let names = [a, b].map(|path| path.file_name().unwrap_or_default().to_string_lossy().into_owned());
    let [mut rest_a, mut rest_b] = names.each_ref().map(|name| name.as_bytes());
    loop {
        let (number_a, after_a) = split_number(rest_a);
        let (number_b, after_b) = split_number(rest_b);
        let both_go_on_with_a_number = !number_a.is_empty() && !number_b.is_empty();
        let order = if both_go_on_with_a_number {
            (rest_a, rest_b) = (after_a, after_b);
            compare_numbers(number_a, number_b)
        } else {
            match (rest_a, rest_b) {
                // The names are equal up to leading zeros.
                ([], []) => return a.cmp(b),
                ([byte_a, tail_a @ ..], [byte_b, tail_b @ ..]) => {
                    (rest_a, rest_b) = (tail_a, tail_b);
                    byte_a.cmp(byte_b)
                }
                // One name has ended: it comes first.
                _ => rest_a.len().cmp(&rest_b.len()),
            }
        };
        if order.is_ne() {
            return order;
        }
    }
}

/// Splits the digits at the beginning of `text` from the rest.
fn split_number(text: &[u8]) -> (&[u8], &[u8]) {
    text.split_at(text.iter().take_while(|byte| byte.is_ascii_digit()).count())
}

/// Compares numbers of any length, as digits. Without leading zeros, the longer number is the larger one.
fn compare_numbers(a: &[u8], b: &[u8]) -> Ordering {
    let [a, b] = [a, b].map(|digits| &digits[digits.iter().take_while(|digit| **digit == b'0').count()..]);
    a.len().cmp(&b.len()).then(a.cmp(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_a_gif_follows_the_size_of_its_file() {
        // 1,026 bytes with 40 frames of 6000 x 6000 pixels.
        assert!((1 << 30..11 << 27).contains(&memory_of_animation(1026)));
        // Ten seconds of full HD, at ten pixels per byte.
        assert!(memory_of_animation(150 * 1920 * 1080 / 10) >= 150 * 1920 * 1080 * 12);
        assert_eq!(memory_of_animation(usize::MAX), MAX_VIDEO_BYTES);

        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("dot.gif");
        let mut encoder = gif::Encoder::new(std::fs::File::create(&path).unwrap(), 2, 2, &[]).unwrap();
        encoder.write_frame(&gif::Frame::from_rgb(2, 2, &[7; 12])).unwrap();
        drop(encoder);
        let mut frames = Frames::new(&ReadOptions::default());
        read_animation(Animation::Gif, &path, &mut frames).unwrap();
        assert_eq!(frames.max_bytes, memory_of_animation(std::fs::metadata(&path).unwrap().len() as usize));
    }

    #[test]
    fn names_are_ordered_by_their_numbers() {
        let names = ["1.png", "2.png", "10.png", "f1 b.png", "f1a.png", "f02.png", "f2.png", "f11.png", "f11-2.png"];
        let expected = ["1.png", "2.png", "10.png", "f1 b.png", "f1a.png", "f02.png", "f2.png", "f11-2.png", "f11.png"];
        let mut sorted = names.map(Path::new);
        sorted.reverse();
        sorted.sort_by(|a, b| natural_order(a, b));
        assert_eq!(sorted, expected.map(Path::new));
        // Numbers longer than any integer.
        let long = ["x99999999999999999999999999999999.png", "x100000000000000000000000000000000.png"].map(Path::new);
        assert!(natural_order(long[0], long[1]).is_lt() && natural_order(long[1], long[0]).is_gt());
        assert!(natural_order(long[0], long[0]).is_eq());
    }

    #[test]
    fn suggested_command_is_quoted_for_a_shell() {
        let told = with_remedy("AVI cannot be read".into(), Path::new("d/$(touch x) it's.avi"), "convert it");
        assert!(told.contains("ffmpeg -i 'd/$(touch x) it'\\''s.avi' -c:v"), "{told}");
        assert!(told.ends_with("yuv420p 'd/$(touch x) it'\\''s.h264.mp4'"), "{told}");
    }
}
