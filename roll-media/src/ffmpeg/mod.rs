//! Reads videos and images through the programs `ffmpeg` and `ffprobe` in the PATH.
//!
//! Frames arrive as raw planes through a pipe: only the requested number, and without the parts that edit lists cut
//! out. They are converted to RGB and rotated upright here, so that a video looks the same with ffmpeg and with this
//! crate's own decoder.
//!
//! Protection against harmful files: the name is passed as `file:NAME`, which is neither an option nor another
//! protocol. Only the protocols `file` and `pipe` are allowed, and only formats that contain the video themselves (no
//! playlists, which name other files). A frame has at most [`MAX_PIXELS`]. The list of packets or frames that ffprobe
//! prints has at most [`process::MAX_INDEX_BYTES`]. A program that runs longer than [`process::TIME_LIMIT`] is killed.

mod description;
mod index;
mod process;
mod y4m;

use std::ffi::OsString;
use std::io::BufReader;
use std::ops::ControlFlow;
use std::path::Path;

use description::StreamDescription;
pub(crate) use index::probe;
use process::Program;

use crate::frames::{Frames, times_before};
use crate::orientation::Orientation;
use crate::picture::{MAX_PIXELS, Picture};
use crate::read_options::ReadOptions;
use crate::resize::square_pixels;

/// Formats that contain the images themselves.
const FORMATS: &str = "mov,mp4,matroska,webm,avi,mpeg,mpegts,mpegvideo,m4v,h264,hevc,obu,ivf,flv,asf,ogg,mxf,nut,rm,\
                       dv,mjpeg,swf,wtv,apng,webp_pipe,av1,vvc,bmp_pipe,tiff_pipe";

/// Bytes of frames that are read from ffmpeg at a time.
const PIPE_BUFFER_BYTES: usize = 1 << 20;

/// The format of a file that ffmpeg detects itself.
const DETECTED: Option<&str> = None;

/// The reason why decoding failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The program is not in the PATH.
    NotInstalled(&'static str),
    /// Another reason, in words.
    Failed(String),
}

impl From<String> for Failure {
    fn from(problem: String) -> Self {
        Self::Failed(problem)
    }
}

/// How ffmpeg treats faults of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FaultHandling {
    /// Any fault ends the program, even a harmless one.
    Strict,
    /// The program goes on. Its messages say whether pixels are damaged.
    Tolerant,
    /// As `Strict`, but faults that are frequent in pictures, such as unknown tags, do not end the program.
    Picture,
}

/// Decodes the frames that `options` select. A file with faults is accepted if no frame is damaged and no frame is
/// missing.
pub(crate) fn decode(path: &Path, options: &ReadOptions) -> Result<Frames, Failure> {
    let stream = StreamDescription::of(path, DETECTED)?;
    let max_decoded =
        options.max_frames.map(|max| max.saturating_add(options.skip).saturating_mul(options.every.max(1)));
    let resampling = options.fps.map(|fps| {
        // Selects the frame shown at each time of the new rate, counted from the first frame.
        format!("setpts=PTS-STARTPTS,fps=fps={fps}:round=up,")
    });
    let filters = resampling.unwrap_or_default() + &stream.filters();
    let decode_with = |handling| {
        let mut frames = Frames::new(options);
        frames.source_fps = stream.fps;
        let add = |picture| frames.push(picture, 1);
        let read = pictures(path, DETECTED, &stream, &filters, max_decoded, handling, add);
        (frames, read)
    };
    let (frames, read) = decode_with(FaultHandling::Strict);
    match read {
        Ok(()) => return Ok(frames),
        Err(failure @ Failure::NotInstalled(_)) => return Err(failure),
        Err(failure) if frames.is_rejected => return Err(failure),
        Err(_) => {} // tolerant decoding shows whether the fault matters
    }
    let (frames, read) = decode_with(FaultHandling::Tolerant);
    read?;
    let index = probe(path)?;
    // At another rate the number of frames is rounded, so that one frame may be missing.
    let (expected, tolerated) = match options.fps {
        None => (index.frames, 0),
        Some(fps) => (times_before(index.frames as f64 / index.fps, fps), 1),
    };
    if !frames.is_full() && frames.seen() + tolerated < expected {
        let problem = format!("{} frames can be decoded, its index has {expected}: it is damaged", frames.seen());
        return Err(Failure::Failed(problem));
    }
    Ok(frames)
}

/// Decodes a still image. `format` is ffmpeg's name of the format if ffmpeg cannot detect it. `orientation` is the
/// orientation of the file if ffmpeg does not report it.
pub(crate) fn picture(path: &Path, format: Option<&str>, orientation: Option<Orientation>) -> Result<Picture, Failure> {
    let mut stream = StreamDescription::of(path, format)?;
    stream.orientation = orientation.unwrap_or(stream.orientation);
    let mut found = None;
    let (one_frame, handling) = (Some(1), FaultHandling::Picture);
    pictures(path, format, &stream, &stream.filters(), one_frame, handling, |picture| {
        found = Some(picture);
        Ok(ControlFlow::Break(()))
    })?;
    found.ok_or_else(|| Failure::Failed("no picture in it".into()))
}

/// Runs ffmpeg on a file and calls `each` with each decoded frame, upright, until it breaks.
fn pictures(
    path: &Path,
    format: Option<&str>,
    stream: &StreamDescription,
    filters: &str,
    max_frames: Option<usize>,
    handling: FaultHandling,
    mut each: impl FnMut(Picture) -> Result<ControlFlow<()>, String>,
) -> Result<(), Failure> {
    let arguments = decoding_arguments(path, format, filters, max_frames, handling);
    let (mut process, stdout) = Program::Ffmpeg.start(&arguments, stream.is_transport_stream)?;
    let mut reader = BufReader::with_capacity(PIPE_BUFFER_BYTES, stdout);
    let mut is_stopped_by_caller = false;
    let read = y4m::read(&mut reader, |planes, pixel_aspect| {
        let picture = stream.to_rgb(planes).and_then(|picture| square_pixels(picture, pixel_aspect));
        let shown = picture.and_then(|picture| each(stream.orientation.apply(picture)));
        is_stopped_by_caller = !matches!(shown, Ok(ControlFlow::Continue(())));
        shown
    });
    drop(reader); // the program must not wait until its output is read
    if is_stopped_by_caller {
        process.end();
    } else {
        // If the program stopped early, its message is a better error than that of `read`.
        process.finish()?;
    }
    read?;
    // Damage is an error even if the caller stopped, because the frames before may be damaged.
    match process.damage() {
        Some(damage) => Err(Failure::Failed(damage)),
        None => Ok(()),
    }
}

/// Arguments of ffmpeg that write the frames of a file to standard output, as YUV4MPEG2.
fn decoding_arguments(
    path: &Path,
    format: Option<&str>,
    filters: &str,
    max_frames: Option<usize>,
    handling: FaultHandling,
) -> Vec<OsString> {
    // Frames are rotated by this crate, after chroma was upsampled: chroma is then rotated exactly as luma.
    let mut arguments: Vec<OsString> = ["-nostdin", "-noautorotate"].map(Into::into).into();
    match handling {
        FaultHandling::Strict => arguments.extend(["-xerror", "-err_detect", "explode"].map(Into::into)),
        FaultHandling::Tolerant => arguments.extend(["-v", "warning"].map(Into::into)),
        FaultHandling::Picture => arguments.push("-xerror".into()),
    }
    arguments.extend(["-max_pixels".into(), MAX_PIXELS.to_string().into()]);
    arguments.extend(input(path, format));
    // Replaces the timestamps, which no longer matter here, by 100 seconds a frame. ffmpeg would reject those of
    // damaged or joined streams.
    let filters = format!("{filters},setpts=N*100/TB");
    arguments.extend(["-map", "0:V:0", "-filter:v", filters.as_str()].map(Into::into));
    if let Some(max_frames) = max_frames {
        arguments.extend(["-frames:v".into(), max_frames.to_string().into()]);
    }
    // Every frame once, whatever its timestamp.
    let passthrough_flag = if process::has_fps_mode() { "-fps_mode" } else { "-vsync" };
    arguments.extend([passthrough_flag, "passthrough", "-f", "yuv4mpegpipe", "pipe:1"].map(Into::into));
    arguments
}

/// Input arguments for both programs.
fn input(path: &Path, format: Option<&str>) -> Vec<OsString> {
    let mut arguments: Vec<OsString> =
        ["-protocol_whitelist", "file,pipe", "-format_whitelist", FORMATS].map(Into::into).into();
    if let Some(format) = format {
        arguments.extend(["-f", format].map(Into::into));
    }
    let mut name = OsString::from("file:");
    name.push(path);
    arguments.extend(["-i".into(), name]);
    arguments
}
