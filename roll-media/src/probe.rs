//! Probes a clip: finds out its size and length, without decoding videos.

use std::ops::ControlFlow;
use std::path::Path;

use roll_core::{Error, Result};
use roll_external::files;

use crate::animation::{Length, decode_animation};
use crate::complete;
use crate::container::{Container, FileHead};
use crate::ffmpeg;
use crate::frames::STILL_FPS;
use crate::mp4::Mp4Reader;
use crate::picture::Picture;
use crate::probed::Probed;
use crate::read::{or_ffmpeg, pictures_in};
use crate::read_options::Decoder;
use crate::still::read_picture;

/// Reads size and length of a file or directory that [`read_video`](crate::read_video) accepts. Only the index of a
/// video is read; damage elsewhere appears when the video is read.
pub fn probe(path: impl AsRef<Path>, decoder: Decoder) -> Result<Probed> {
    let path = path.as_ref();
    let bad = |problem: String| Error::bad_file(path, problem);
    // `frames` pictures of the size of `file`.
    let still = |file: &Path, frames: usize| {
        let picture = read_picture(file, decoder).map_err(|e| Error::bad_file(file, e))?;
        Ok(Probed { size: [picture.height, picture.width], frames, fps: STILL_FPS })
    };
    if path.is_dir() {
        let files = pictures_in(path)?;
        return still(&files[0], files.len()); // there is at least one
    }
    let head = FileHead::read(path)?;
    complete::check(path, head.container())?;
    let open = || files::open(path).map_err(Error::file("read", path));
    match (head.container(), decoder) {
        (Container::Mp4, Decoder::Auto | Decoder::Own) => match Mp4Reader::open(open()?) {
            Ok(reader) => {
                let probed = Probed { size: reader.size(), frames: reader.frames(), fps: reader.fps() };
                // Only decoding shows how many of the leading frames are shown, and ffmpeg's probe decodes them.
                let asks_ffmpeg = reader.begins_with_leading_frames() && decoder == Decoder::Auto;
                Ok(if asks_ffmpeg { ffmpeg::probe(path).unwrap_or(probed) } else { probed })
            }
            Err(problem) => or_ffmpeg(path, decoder, problem, || ffmpeg::probe(path)),
        },
        (Container::Animation(kind), _) => {
            let (mut size, mut seconds, mut frames) = ([0, 0], 0.0, 0);
            // The announced length does not count, because the frames themselves are counted.
            let announced = |_: Length| ();
            let count = |picture: Picture, delay: f64| {
                size = [picture.height, picture.width];
                seconds += delay;
                frames += 1;
                Ok(ControlFlow::Continue(()))
            };
            decode_animation(kind, open()?, announced, count).map_err(bad)?;
            Ok(Probed { size, frames, fps: frames as f64 / seconds })
        }
        (Container::Picture | Container::OtherPicture(..), _) => still(path, 1),
        _ => or_ffmpeg(path, decoder, head.unreadable_reason(), || ffmpeg::probe(path)),
    }
}
