//! Writes the frames of a clip as raw RGB bytes, for a comparison with another decoder:
//!
//! ```sh
//! cargo run --release --bin decode_clip -- clip.mp4 ours.rgb
//! ffmpeg -i clip.mp4 -f rawvideo -pix_fmt rgb24 theirs.rgb
//! ```

use std::io::Write;

use roll_media::{Picture, ReadOptions, read_video};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let [clip, out] = arguments.as_slice() else {
        return Err("expected two arguments: the clip and a file to write".into());
    };
    let video = read_video(clip, &ReadOptions::default())?;
    let mut file = std::io::BufWriter::new(std::fs::File::create(out)?);
    let [frames, height, width] = video.dims();
    for t in 0..frames {
        file.write_all(&Picture::from_frame(&video, t).rgb)?;
    }
    file.flush()?;
    println!("{frames} frames of {width}x{height}, {} frames per second", video.fps());
    Ok(())
}
