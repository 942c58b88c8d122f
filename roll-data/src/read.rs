//! Reading whatever holds frames.

use std::fs::File;
use std::io::Read;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use roll_core::{Error, Result, Tensor, Video};

use crate::mp4::Mp4Reader;
use crate::picture::Picture;
use crate::resize::{crop_and_resize, target_size};
use crate::still::{decode_gif, read_picture};

/// Frame rate of pictures without one: that of Wan's training data.
pub(crate) const STILL_FPS: f64 = 16.0;
/// Frames of one video in memory, as f32.
const MAX_VIDEO_BYTES: usize = 8 << 30;

/// The size that frames are brought to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sizing {
    /// As they are.
    #[default]
    Native,
    /// By [`target_size`]: at most about so many pixels, sides multiples of 16.
    MaxPixels(usize),
    /// Exactly this height and width, by [`crop_and_resize`].
    Exact([usize; 2]),
}

/// Which frames to read.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ReadOptions {
    /// Stop after so many frames.
    pub max_frames: Option<usize>,
    /// Take frames at this rate (of the frames shown at those times) instead of all.
    pub fps: Option<f64>,
    /// Size of the frames.
    pub sizing: Sizing,
}

/// Reads H.264 MP4 (and MOV), GIF, a directory of PNG, JPEG or WebP files sorted by name, or one such file (a video of
/// one frame). Anything else, and anything damaged, is an error that names the file and the reason.
///
/// Decoding stops with the last frame that is wanted.
pub fn read_video(path: impl AsRef<Path>, options: &ReadOptions) -> Result<Video> {
    let path = path.as_ref();
    if path.is_dir() {
        return read_directory(path, options);
    }
    let mut file = File::open(path).map_err(Error::file("read", path))?;
    let mut head = Vec::new();
    file.by_ref().take(16).read_to_end(&mut head).map_err(Error::file("read", path))?;
    let mut file = File::open(path).map_err(Error::file("read", path))?;
    let bad = |problem: String| Error::bad_file(path, problem);
    let mut frames = Frames::new(options);
    match container(&head) {
        Container::Mp4 => {
            let mut reader = Mp4Reader::open(file).map_err(|e| bad(with_remedy(e, path)))?;
            frames.source_fps = reader.fps();
            reader.decode(|picture| frames.push(picture)).map_err(bad)?;
        }
        Container::Gif => {
            let (mut delay, mut count) = (0.0, 0);
            // The rate is needed to pick frames and stands in the frames.
            if options.fps.is_some() {
                decode_gif(file, |_, seconds| {
                    delay += seconds;
                    count += 1;
                    Ok(if count < 1000 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
                })
                .map_err(bad)?;
                frames.source_fps = gif_rate(delay, count);
                file = File::open(path).map_err(Error::file("read", path))?;
                decode_gif(file, |picture, _| frames.push(picture)).map_err(bad)?;
            } else {
                decode_gif(file, |picture, seconds| {
                    delay += seconds;
                    count += 1;
                    frames.push(picture)
                })
                .map_err(bad)?;
                frames.source_fps = gif_rate(delay, count);
            }
        }
        Container::Picture => {
            let _full = frames.push(read_picture(path).map_err(bad)?).map_err(bad)?;
        }
        Container::Other(what) => {
            let to = path.with_extension("mp4");
            return Err(bad(format!(
                "{what}; convert it: ffmpeg -i {} -c:v libx264 -pix_fmt yuv420p {}",
                path.display(),
                to.display()
            )));
        }
        Container::Unknown => {
            let start: String =
                head.iter().take(8).flat_map(|&b| std::ascii::escape_default(b)).map(char::from).collect();
            let problem = match head.is_empty() {
                true => "the file is empty".into(),
                false => format!("neither a video nor a picture: it begins with \"{start}\""),
            };
            return Err(bad(problem));
        }
    }
    frames.finish(path)
}

/// Reads one picture, `[3, H, W]` in [-1, 1].
pub fn read_image(path: impl AsRef<Path>, sizing: Sizing) -> Result<Tensor> {
    let path = path.as_ref();
    std::fs::metadata(path).map_err(Error::file("read", path))?;
    let picture = read_picture(path).map_err(|e| Error::bad_file(path, e))?;
    fit(picture, sizing).map_err(|e| Error::bad_file(path, e))?.to_tensor()
}

/// How many of `available` frames a clip of at most `wanted` takes: one more than a multiple of 4, for the causal
/// video encoder turns 4 n + 1 frames into n + 1.
pub fn usable_frames(available: usize, wanted: usize) -> usize {
    match available.min(wanted) {
        0 => 0,
        n => (n - 1) / 4 * 4 + 1,
    }
}

fn with_remedy(problem: String, path: &Path) -> String {
    if !problem.contains("can be read") {
        return problem;
    }
    let to = path.with_extension("h264.mp4");
    format!("{problem}: convert it: ffmpeg -i {} -c:v libx264 -pix_fmt yuv420p {}", path.display(), to.display())
}

pub(crate) fn gif_rate(delay: f64, count: usize) -> f64 {
    if delay > 0.0 { count as f64 / delay } else { STILL_FPS }
}

fn read_directory(path: &Path, options: &ReadOptions) -> Result<Video> {
    let files = pictures_in(path)?;
    let mut frames = Frames::new(options);
    for file in files {
        let bad = |problem| Error::bad_file(&file, problem);
        let picture = read_picture(&file).map_err(bad)?;
        if frames.push(picture).map_err(bad)?.is_break() {
            break;
        }
    }
    frames.finish(path)
}

/// The pictures of a directory, by name; at least one.
pub(crate) fn pictures_in(path: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(path).map_err(Error::file("list", path))?;
    let mut files: Vec<PathBuf> = Vec::new();
    for entry in entries {
        let file = entry.map_err(Error::file("list", path))?.path();
        let extension = file.extension().map(|e| e.to_string_lossy().to_lowercase());
        if matches!(extension.as_deref(), Some("png" | "jpg" | "jpeg" | "webp")) {
            files.push(file);
        }
    }
    files.sort();
    if files.is_empty() {
        return Err(Error::bad_file(path, "a directory without PNG, JPEG or WebP files"));
    }
    Ok(files)
}

pub(crate) enum Container {
    Mp4,
    Gif,
    Picture,
    Other(&'static str),
    Unknown,
}

/// By content: names lie.
pub(crate) fn container(head: &[u8]) -> Container {
    let at = |offset: usize, tag: &[u8]| head.get(offset..offset + tag.len()) == Some(tag);
    if [b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide"].iter().any(|tag| at(4, *tag)) {
        return Container::Mp4;
    }
    if at(0, b"GIF8") {
        return Container::Gif;
    }
    if at(0, b"\x89PNG") || at(0, b"\xff\xd8\xff") || (at(0, b"RIFF") && at(8, b"WEBP")) {
        return Container::Picture;
    }
    if at(0, b"\x1a\x45\xdf\xa3") {
        return Container::Other("Matroska or WebM, which cannot be read");
    }
    if at(0, b"RIFF") && at(8, b"AVI ") {
        return Container::Other("AVI, which cannot be read");
    }
    if at(0, b"FLV") || at(0, b"\x00\x00\x01\xba") || at(0, b"\x30\x26\xb2\x75") || at(0, b"\x00\x00\x00\x01") {
        return Container::Other("a video in a container that cannot be read");
    }
    Container::Unknown
}

fn fit(picture: Picture, sizing: Sizing) -> Result<Picture, String> {
    Ok(match sizing {
        Sizing::Native => picture,
        Sizing::MaxPixels(max) => {
            let target = target_size([picture.height, picture.width], max)?;
            crop_and_resize(picture, target)
        }
        Sizing::Exact(size) => crop_and_resize(picture, size),
    })
}

/// Collects the frames that are wanted.
struct Frames {
    options: ReadOptions,
    source_fps: f64,
    seen: usize,
    taken: usize,
    size: Option<[usize; 2]>,
    values: Vec<f32>,
}

impl Frames {
    fn new(options: &ReadOptions) -> Self {
        Self { options: *options, source_fps: STILL_FPS, seen: 0, taken: 0, size: None, values: Vec::new() }
    }

    fn is_full(&self) -> bool {
        self.options.max_frames.is_some_and(|max| self.taken >= max)
    }

    fn push(&mut self, picture: Picture) -> Result<ControlFlow<()>, String> {
        if self.is_full() {
            return Ok(ControlFlow::Break(()));
        }
        let (first, end) = (self.seen, self.seen + 1);
        self.seen = end;
        // The frame shown from first / source_fps on is taken once for each time of the new rate that falls in it.
        let times = match self.options.fps {
            Some(fps) => {
                let index = |frame: usize| (frame as f64 * fps / self.source_fps - 1e-9).ceil().max(0.0) as usize;
                index(end) - index(first)
            }
            None => 1,
        };
        if times > 0 {
            let picture = fit(picture, self.options.sizing)?;
            let size = [picture.height, picture.width];
            if *self.size.get_or_insert(size) != size {
                return Err(format!("frame {first} has another size ({} x {}) than the first", size[1], size[0]));
            }
            for _ in 0..times {
                if self.is_full() {
                    break;
                }
                if (self.values.len() + picture.rgb.len()) * 4 > MAX_VIDEO_BYTES {
                    return Err(format!(
                        "more than {} frames of {} x {} pixels do not fit the memory for one video \
                         ({MAX_VIDEO_BYTES} bytes); ask for fewer or smaller ones",
                        self.taken, size[1], size[0]
                    ));
                }
                picture.append_planes(&mut self.values);
                self.taken += 1;
            }
        }
        Ok(if self.is_full() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    }

    fn finish(self, path: &Path) -> Result<Video> {
        let Some([height, width]) = self.size.filter(|_| self.taken > 0) else {
            return Err(Error::bad_file(path, "no frame could be read"));
        };
        let frames = Tensor::new(self.values, [self.taken, 3, height, width])?;
        Video::new(frames, self.options.fps.unwrap_or(self.source_fps))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_clip_takes_one_more_than_a_multiple_of_four() {
        let cases =
            [(120, 81, 81), (80, 81, 77), (120, 9, 9), (120, 12, 9), (3, 81, 1), (5, 5, 5), (1, 1, 1), (0, 9, 0)];
        for (available, wanted, taken) in cases {
            assert_eq!(usable_frames(available, wanted), taken);
        }
    }

    #[test]
    fn frames_are_picked_at_the_rate_that_is_asked_for() {
        let picked = |source: f64, fps: f64, n: u8| {
            let mut frames = Frames::new(&ReadOptions { fps: Some(fps), ..Default::default() });
            frames.source_fps = source;
            for i in 0..n {
                let _ = frames.push(Picture { width: 1, height: 1, rgb: vec![i; 3] }).unwrap();
            }
            frames.values.iter().step_by(3).map(|v| ((v + 1.0) * 127.5).round() as u8).collect::<Vec<_>>()
        };
        assert_eq!(picked(30.0, 10.0, 9), [0, 3, 6]);
        assert_eq!(picked(24.0, 16.0, 6), [0, 1, 3, 4]);
        assert_eq!(picked(8.0, 16.0, 3), [0, 0, 1, 1, 2, 2]);
        assert_eq!(picked(16.0, 16.0, 3), [0, 1, 2]);
    }
}
