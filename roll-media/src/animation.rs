//! Animated pictures: GIF, WebP and PNG. Frames are rectangles that are drawn over earlier frames.

use std::fs::File;
use std::io::{BufReader, Read, Seek};
use std::ops::ControlFlow;

use gif::{ColorOutput, DecodeOptions, DecodingError, DisposalMethod};
use image_webp::WebPDecoder;

use crate::container::Animation;
use crate::decoding::{MAX_PNG_BYTES, damaged, png_failure, read_failure, rounded_to_8_bits, to_rgb, webp_failure};
use crate::picture::{Picture, check_size};

/// Maximum number of pixels of all decoded frames of an animation: five hundred frames of full HD, about ten seconds.
const MAX_PIXELS_OF_ALL: usize = 1 << 30;

/// The duration of a frame as players show it: Chrome and Firefox show frames of up to 10 ms for 100 ms.
fn shown_seconds(seconds: f64) -> f64 {
    /// Slightly above 10 ms, so that rounding does not matter.
    const MORE_THAN_10_MS: f64 = 0.011;
    if seconds < MORE_THAN_10_MS { 0.1 } else { seconds }
}

/// The duration of a frame of a GIF, whose delays are in hundredths of a second.
fn shown_seconds_of_gif(delay: u16) -> f64 {
    shown_seconds(f64::from(delay) / 100.0)
}

/// The length of an animation, according to the file's headers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Length {
    pub frames: usize,
    /// How long all frames are shown; `None` if the headers do not say it.
    pub seconds: Option<f64>,
}

/// Decodes the frames of an animation one by one. Calls `announce` first, with the length that the headers state, and
/// then `each` with each frame and its duration in seconds, until `each` breaks. Fails if the frames have more than
/// [`MAX_PIXELS_OF_ALL`] pixels in total.
pub(crate) fn decode_animation(
    kind: Animation,
    file: File,
    announce: impl FnOnce(Length),
    each: impl FnMut(Picture, f64) -> Result<ControlFlow<()>, String>,
) -> Result<(), String> {
    decode_up_to(MAX_PIXELS_OF_ALL, kind, file, announce, each)
}

fn decode_up_to(
    max_pixels: usize,
    kind: Animation,
    mut file: File,
    announce: impl FnOnce(Length),
    each: impl FnMut(Picture, f64) -> Result<ControlFlow<()>, String>,
) -> Result<(), String> {
    match kind {
        Animation::Gif => {
            announce(length_of_gif(&file)?);
            file.rewind().map_err(read_failure)?;
            let mut reader = GifReader::new(BufReader::new(file))?;
            let ignore_transparency = false;
            frames_up_to(max_pixels, || reader.next_frame(ignore_transparency), each)
        }
        Animation::Webp => {
            let mut reader = WebPDecoder::new(BufReader::new(file)).map_err(webp_failure)?;
            let frames = reader.num_frames() as usize;
            // The header's duration is the sum of delays as they are in the file, not as players show them.
            announce(Length { frames, seconds: None });
            let (width, height) = (reader.dimensions().0 as usize, reader.dimensions().1 as usize);
            check_size(width, height)?;
            let channels = if reader.has_alpha() { 4 } else { 3 };
            let mut samples = vec![0; width * height * channels];
            let mut frames_left = frames;
            let next_frame = || {
                if frames_left == 0 {
                    return Ok(None);
                }
                frames_left -= 1;
                let milliseconds = reader.read_frame(&mut samples).map_err(webp_failure)?;
                let rgb = to_rgb(samples.clone(), channels);
                Ok(Some((Picture { width, height, rgb }, shown_seconds(f64::from(milliseconds) / 1000.0))))
            };
            frames_up_to(max_pixels, next_frame, each)
        }
        Animation::Png => {
            let mut reader = PngReader::new(BufReader::new(file))?;
            announce(Length { frames: reader.frames_left, seconds: None });
            frames_up_to(max_pixels, || reader.next_frame(), each)
        }
    }
}

/// Calls `each` with each frame that `next_frame` returns, and its duration in seconds. Fails if all frames together
/// have more than `max_pixels` pixels.
fn frames_up_to(
    max_pixels: usize,
    mut next_frame: impl FnMut() -> Result<Option<(Picture, f64)>, String>,
    mut each: impl FnMut(Picture, f64) -> Result<ControlFlow<()>, String>,
) -> Result<(), String> {
    let mut pixels = 0;
    while let Some((picture, seconds)) = next_frame()? {
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

/// Decodes the first frame of a GIF. Transparent pixels have their colour in the palette.
pub(crate) fn decode_first_frame(file: impl Read) -> Result<Picture, String> {
    let ignore_transparency = true;
    let frame = GifReader::new(file)?.next_frame(ignore_transparency)?;
    frame.map(|(picture, _)| picture).ok_or_else(|| "a GIF without frames".into())
}

/// Counts the frames of a GIF without decoding them.
fn length_of_gif(file: &File) -> Result<Length, String> {
    let mut options = DecodeOptions::new();
    options.skip_frame_decoding(true);
    let mut decoder = options.read_info(BufReader::new(file)).map_err(failure)?;
    let (mut frames, mut seconds) = (0, 0.0);
    // A damaged frame ends the count here, and is an error when it is decoded.
    while let Ok(Some(frame)) = decoder.next_frame_info() {
        frames += 1;
        seconds += shown_seconds_of_gif(frame.delay);
    }
    Ok(Length { frames, seconds: Some(seconds) })
}

/// Reads the frames of a GIF as they are shown.
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

    /// Returns the next frame and its duration in seconds; `None` after the last frame. Transparent pixels show the
    /// canvas or, with `ignore_transparency`, their colour in the palette.
    fn next_frame(&mut self, ignore_transparency: bool) -> Result<Option<(Picture, f64)>, String> {
        let Some(frame) = self.decoder.next_frame_info().map_err(failure)? else { return Ok(None) };
        let [left, top, width, height] = [frame.left, frame.top, frame.width, frame.height].map(usize::from);
        let seconds = shown_seconds_of_gif(frame.delay);
        let disposal = frame.dispose;
        check_size(width, height)?;
        let mut rgba = vec![0; self.decoder.buffer_size()];
        self.decoder.read_into_buffer(&mut rgba).map_err(failure)?;

        let canvas = &mut self.canvas;
        let mut shown_picture = canvas.clone();
        for (y, row) in (top..canvas.height).zip(rgba.chunks_exact(width * 4)) {
            for (x, pixel) in (left..canvas.width).zip(row.chunks_exact(4)) {
                let rgb = (y * canvas.width + x) * 3..(y * canvas.width + x + 1) * 3;
                if pixel[3] != 0 || ignore_transparency {
                    shown_picture.rgb[rgb.clone()].copy_from_slice(&pixel[..3]);
                }
                // Sets the pixel over which the next frame is drawn.
                match disposal {
                    DisposalMethod::Any | DisposalMethod::Keep => {
                        canvas.rgb[rgb.clone()].copy_from_slice(&shown_picture.rgb[rgb]);
                    }
                    DisposalMethod::Background => canvas.rgb[rgb].fill(0),
                    DisposalMethod::Previous => {}
                }
            }
        }
        Ok(Some((shown_picture, seconds)))
    }
}

fn failure(error: DecodingError) -> String {
    match error {
        DecodingError::Io(error) => read_failure(error),
        other => damaged(other),
    }
}

/// Reads the frames of an animated PNG as they are shown.
struct PngReader<R: std::io::BufRead + Seek> {
    reader: png::Reader<R>,
    /// Number of frames that are not read yet.
    frames_left: usize,
    /// `[height, width]` of the canvas.
    size: [usize; 2],
    /// The pixels that the next frame is drawn over, with transparency.
    canvas: Vec<[u8; 4]>,
}

impl<R: std::io::BufRead + Seek> PngReader<R> {
    fn new(file: R) -> Result<Self, String> {
        let mut decoder = png::Decoder::new_with_limits(file, png::Limits { bytes: MAX_PNG_BYTES });
        let header = decoder.read_header_info().map_err(png_failure)?;
        let (width, height) = (header.width as usize, header.height as usize);
        check_size(width, height)?;
        decoder.set_transformations(png::Transformations::EXPAND);
        let reader = decoder.read_info().map_err(png_failure)?;
        let frames_left = reader.info().animation_control().map_or(1, |control| control.num_frames as usize);
        let canvas = vec![[0; 4]; width * height];
        let mut png_reader = Self { reader, frames_left, size: [height, width], canvas };
        // A first picture without a frame's header is only for programs that cannot show animations. It is skipped.
        let first_is_no_frame = png_reader.reader.info().frame_control().is_none();
        if first_is_no_frame {
            png_reader.next_pixels()?;
        }
        Ok(png_reader)
    }

    /// The pixels of the next picture in the file, as RGBA.
    fn next_pixels(&mut self) -> Result<Vec<[u8; 4]>, String> {
        let mut samples = vec![0; self.reader.output_buffer_size().ok_or("larger than the address space")?];
        let info = self.reader.next_frame(&mut samples).map_err(png_failure)?;
        samples.truncate(info.buffer_size());
        if info.bit_depth == png::BitDepth::Sixteen {
            samples = rounded_to_8_bits(&samples);
        }
        let rgba = |pixel: &[u8]| match *pixel {
            [grey] => [grey, grey, grey, 255],
            [grey, alpha] => [grey, grey, grey, alpha],
            [r, g, b] => [r, g, b, 255],
            [r, g, b, alpha, ..] => [r, g, b, alpha],
            [] => [0; 4],
        };
        Ok(samples.chunks_exact(info.color_type.samples()).map(rgba).collect())
    }

    /// Returns the next frame and its duration in seconds; `None` after the last frame.
    fn next_frame(&mut self) -> Result<Option<(Picture, f64)>, String> {
        if self.frames_left == 0 {
            return Ok(None);
        }
        let pixels = self.next_pixels()?;
        let control = *self.reader.info().frame_control().ok_or_else(|| damaged("a frame without a header"))?;
        self.frames_left -= 1;
        let [height, width] = self.size;
        let [left, top, frame_width] = [control.x_offset, control.y_offset, control.width].map(|n| n as usize);
        let mut shown_pixels = self.canvas.clone();
        for (y, row) in (top..height).zip(pixels.chunks_exact(frame_width.max(1))) {
            for (x, pixel) in (left..width).zip(row) {
                let shown_pixel = &mut shown_pixels[y * width + x];
                *shown_pixel = match control.blend_op {
                    png::BlendOp::Source => *pixel,
                    png::BlendOp::Over => over(*pixel, *shown_pixel),
                };
                // Sets the pixel over which the next frame is drawn.
                match control.dispose_op {
                    png::DisposeOp::None => self.canvas[y * width + x] = *shown_pixel,
                    png::DisposeOp::Background => self.canvas[y * width + x] = [0; 4],
                    png::DisposeOp::Previous => {}
                }
            }
        }
        // The specification reads a denominator of 0 as 100.
        let denominator = if control.delay_den == 0 { 100 } else { control.delay_den };
        let seconds = shown_seconds(f64::from(control.delay_num) / f64::from(denominator));
        let rgb = shown_pixels.iter().flat_map(|[r, g, b, _]| [*r, *g, *b]).collect();
        Ok(Some((Picture { width, height, rgb }, seconds)))
    }
}

/// A pixel drawn over another one with transparency (blend operation `Over` of the PNG specification).
fn over(above: [u8; 4], below: [u8; 4]) -> [u8; 4] {
    let [alpha_above, alpha_below] = [above[3], below[3]].map(u32::from);
    match (alpha_above, alpha_below) {
        (255, _) | (_, 0) => return above,
        (0, _) => return below,
        _ => {}
    }
    // The weights of both pixels, in units of 1 / (255 x 255).
    let (weight_above, weight_below) = (alpha_above * 255, (255 - alpha_above) * alpha_below);
    let total = weight_above + weight_below;
    let mixed = |i: usize| {
        let sum = u32::from(above[i]) * weight_above + u32::from(below[i]) * weight_below;
        ((sum + total / 2) / total) as u8
    };
    // The opacity is the total weight, rounded to units of 1 / 255.
    [mixed(0), mixed(1), mixed(2), ((total + 127) / 255) as u8]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A GIF with frames of 64 x 32 pixels of one colour and these delays, in hundredths of a second.
    fn gif_of(delays: &[u16]) -> (tempfile::TempDir, File) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.gif");
        let mut encoder = gif::Encoder::new(File::create(&path).unwrap(), 64, 32, &[]).unwrap();
        let mut frame = gif::Frame::from_rgb(64, 32, &[7; 64 * 32 * 3]);
        for delay in delays {
            frame.delay = *delay;
            encoder.write_frame(&frame).unwrap();
        }
        drop(encoder);
        (dir, File::open(path).unwrap())
    }

    #[test]
    fn rejects_gif_beyond_the_pixel_limit() {
        let (mut read, most) = (0, 64 * 32 * 10);
        let decode = |frames, enough, read: &mut usize| {
            let announced = |length: Length| assert_eq!(length.frames, frames);
            decode_up_to(most, Animation::Gif, gif_of(&vec![4; frames]).1, announced, |_, _| {
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

    #[test]
    fn frames_of_up_to_10_ms_are_shown_for_100_ms() {
        let (mut seconds, mut announced) = (Vec::new(), None);
        let file = gif_of(&[0, 1, 2, 10]).1;
        let push = |_: Picture, each: f64| {
            seconds.push(each);
            Ok(ControlFlow::Continue(()))
        };
        decode_animation(Animation::Gif, file, |length| announced = Some(length), push).unwrap();
        // As in Chrome, Firefox and ffmpeg (`min_delay`, `default_delay`).
        assert_eq!(seconds, [0.1, 0.1, 0.02, 0.1]);
        let told = announced.unwrap();
        assert!(told.frames == 4 && (told.seconds.unwrap() - 0.32).abs() < 1e-9, "{told:?}");
    }

    #[test]
    fn frames_of_a_png_are_composed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.png");
        let mut encoder = png::Encoder::new(File::create(&path).unwrap(), 2, 1);
        encoder.set_color(png::ColorType::Rgba);
        encoder.set_animated(4, 0).unwrap();
        encoder.set_frame_delay(1, 4).unwrap();
        let mut writer = encoder.write_header().unwrap();
        writer.write_image_data(&[10, 20, 30, 255, 40, 50, 60, 255]).unwrap();
        // One pixel, which is taken away afterwards.
        writer.set_frame_dimension(1, 1).unwrap();
        writer.set_frame_position(1, 0).unwrap();
        writer.set_frame_delay(0, 0).unwrap();
        writer.set_dispose_op(png::DisposeOp::Previous).unwrap();
        writer.write_image_data(&[1, 2, 3, 255]).unwrap();
        // Half of it over the first.
        writer.set_blend_op(png::BlendOp::Over).unwrap();
        writer.set_dispose_op(png::DisposeOp::Background).unwrap();
        writer.write_image_data(&[140, 150, 160, 128]).unwrap();
        // Nothing over what was cleared.
        writer.write_image_data(&[0, 0, 0, 0]).unwrap();
        writer.finish().unwrap();
        let mut frames = Vec::new();
        let push = |picture: Picture, seconds: f64| {
            frames.push((picture.rgb, seconds));
            Ok(ControlFlow::Continue(()))
        };
        decode_animation(Animation::Png, File::open(&path).unwrap(), |l| assert_eq!(l.frames, 4), push).unwrap();
        // Also Pillow's frames, but for those of transparent pixels, where it has the colours below.
        let expected = [[40, 50, 60], [1, 2, 3], [90, 100, 110], [0, 0, 0]];
        for (i, ((rgb, seconds), pixel)) in frames.iter().zip(expected).enumerate() {
            assert_eq!((&rgb[..3], &rgb[3..]), ([10, 20, 30].as_slice(), pixel.as_slice()), "frame {i}");
            assert_eq!(*seconds, if i == 0 { 0.25 } else { 0.1 }, "frame {i}");
        }
        assert_eq!(frames.len(), 4);
    }
}
