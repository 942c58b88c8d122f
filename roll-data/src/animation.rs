//! GIF: frames are rectangles that are drawn over earlier frames.

use std::fs::File;
use std::io::{BufReader, Read};
use std::ops::ControlFlow;

use gif::{ColorOutput, DecodeOptions, DecodingError, DisposalMethod};

use crate::frames::STILL_FPS;
use crate::picture::{Picture, check_size};
use crate::still::{damaged, read_failure};

/// Maximum number of pixels of all decoded frames of a GIF: five hundred frames of full HD, about ten seconds.
const MAX_GIF_PIXELS: usize = 1 << 30;

/// Decodes the frames of a GIF one by one and calls `each` with each frame and its duration in seconds, until it
/// breaks. Fails if the frames have more than [`MAX_GIF_PIXELS`] in total.
pub(crate) fn decode_gif(
    file: File,
    each: impl FnMut(Picture, f64) -> Result<ControlFlow<()>, String>,
) -> Result<(), String> {
    decode_up_to(MAX_GIF_PIXELS, file, each)
}

fn decode_up_to(
    max_pixels: usize,
    file: File,
    mut each: impl FnMut(Picture, f64) -> Result<ControlFlow<()>, String>,
) -> Result<(), String> {
    let mut reader = GifReader::new(BufReader::new(file))?;
    let mut pixels = 0;
    while let Some((picture, seconds)) = reader.next_frame(false)? {
        pixels += picture.width * picture.height;
        if pixels > max_pixels {
            return Err(format!("its frames have more than {max_pixels} pixels together; convert it to a video"));
        }
        if each(picture, seconds)?.is_break() {
            break;
        }
    }
    Ok(())
}

/// Decodes the first frame of a GIF, in the colours of its palette where it is transparent.
pub(crate) fn decode_first_frame(file: impl Read) -> Result<Picture, String> {
    let frame = GifReader::new(file)?.next_frame(true)?;
    frame.map(|(picture, _)| picture).ok_or_else(|| "a GIF without frames".into())
}

struct GifReader<R: Read> {
    decoder: gif::Decoder<R>,
    /// The picture that the next frame is drawn over.
    canvas: Picture,
}

impl<R: Read> GifReader<R> {
    fn new(file: R) -> Result<Self, String> {
        let mut options = DecodeOptions::new();
        options.set_color_output(ColorOutput::RGBA);
        let decoder = options.read_info(file).map_err(failure)?;
        let (width, height) = (usize::from(decoder.width()), usize::from(decoder.height()));
        check_size(width, height)?;
        Ok(Self { decoder, canvas: Picture { width, height, rgb: vec![0; width * height * 3] } })
    }

    /// Returns the next frame and its duration in seconds, `None` after the last. Transparent pixels show the frames
    /// before, or, if `ignore_transparency`, their colour in the palette.
    fn next_frame(&mut self, ignore_transparency: bool) -> Result<Option<(Picture, f64)>, String> {
        let Some(frame) = self.decoder.next_frame_info().map_err(failure)? else { return Ok(None) };
        let [left, top, width, height] = [frame.left, frame.top, frame.width, frame.height].map(usize::from);
        let seconds = if frame.delay == 0 { 1.0 / STILL_FPS } else { f64::from(frame.delay) / 100.0 };
        let disposal = frame.dispose;
        check_size(width, height)?;
        let mut rgba = vec![0; self.decoder.buffer_size()];
        self.decoder.read_into_buffer(&mut rgba).map_err(failure)?;

        let canvas = &mut self.canvas;
        let mut shown = canvas.clone();
        for (y, row) in (top..canvas.height).zip(rgba.chunks_exact(width * 4)) {
            for (x, pixel) in (left..canvas.width).zip(row.chunks_exact(4)) {
                let rgb = (y * canvas.width + x) * 3..(y * canvas.width + x + 1) * 3;
                if pixel[3] != 0 || ignore_transparency {
                    shown.rgb[rgb.clone()].copy_from_slice(&pixel[..3]);
                }
                match disposal {
                    DisposalMethod::Any | DisposalMethod::Keep => {
                        canvas.rgb[rgb.clone()].copy_from_slice(&shown.rgb[rgb]);
                    }
                    DisposalMethod::Background => canvas.rgb[rgb].fill(0),
                    DisposalMethod::Previous => {}
                }
            }
        }
        Ok(Some((shown, seconds)))
    }
}

fn failure(error: DecodingError) -> String {
    match error {
        DecodingError::Io(error) => read_failure(error),
        other => damaged(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A GIF with frames of 64 x 32 pixels of one colour.
    fn gif_of(frames: usize) -> (tempfile::TempDir, File) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.gif");
        let mut encoder = gif::Encoder::new(File::create(&path).unwrap(), 64, 32, &[]).unwrap();
        let frame = gif::Frame::from_rgb(64, 32, &[7; 64 * 32 * 3]);
        (0..frames).for_each(|_| encoder.write_frame(&frame).unwrap());
        drop(encoder);
        (dir, File::open(path).unwrap())
    }

    #[test]
    fn rejects_gif_beyond_the_pixel_limit() {
        let (mut read, most) = (0, 64 * 32 * 10);
        let decode = |frames, enough, read: &mut usize| {
            decode_up_to(most, gif_of(frames).1, |_, _| {
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
