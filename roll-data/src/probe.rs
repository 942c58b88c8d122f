//! Size and length of whatever holds frames, without decoding a video.

use std::fs::File;
use std::io::Read;
use std::ops::ControlFlow;
use std::path::Path;

use roll_core::{Error, Result};

use crate::mp4::Mp4Reader;
use crate::read::{Container, STILL_FPS, container, gif_rate, pictures_in, read_video};
use crate::still::{decode_gif, read_picture};

/// What a file says of its frames.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Probed {
    /// Height and width as shown.
    pub size: [usize; 2],
    /// Frames.
    pub frames: usize,
    /// Frames per second.
    pub fps: f64,
}

/// Reads size and length of what [`read_video`] reads. Of an MP4 only the index is read; what is damaged behind it
/// shows when the video is.
pub fn probe(path: impl AsRef<Path>) -> Result<Probed> {
    let path = path.as_ref();
    let bad = |problem: String| Error::bad_file(path, problem);
    let still = |file: &Path, frames: usize| {
        let picture = read_picture(file).map_err(|e| Error::bad_file(file, e))?;
        Ok(Probed { size: [picture.height, picture.width], frames, fps: STILL_FPS })
    };
    if path.is_dir() {
        let files = pictures_in(path)?;
        return still(&files[0], files.len()); // there is at least one
    }
    let open = || File::open(path).map_err(Error::file("read", path));
    let mut head = Vec::new();
    open()?.take(16).read_to_end(&mut head).map_err(Error::file("read", path))?;
    match container(&head) {
        Container::Mp4 => {
            let reader = Mp4Reader::open(open()?).map_err(bad)?;
            Ok(Probed { size: reader.size(), frames: reader.frames(), fps: reader.fps() })
        }
        Container::Gif => {
            let (mut size, mut delay, mut frames) = ([0, 0], 0.0, 0);
            decode_gif(open()?, |picture, seconds| {
                size = [picture.height, picture.width];
                delay += seconds;
                frames += 1;
                Ok(ControlFlow::Continue(()))
            })
            .map_err(bad)?;
            Ok(Probed { size, frames, fps: gif_rate(delay, frames) })
        }
        Container::Picture => still(path, 1),
        // It knows what to say.
        Container::Other(_) | Container::Unknown => {
            let video = read_video(path, &Default::default())?;
            let [frames, height, width] = video.dims();
            Ok(Probed { size: [height, width], frames, fps: video.fps() })
        }
    }
}
