//! Decodes the frames of an MP4 file one by one.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::{ControlFlow, Range};

use openh264::OpenH264API;
use openh264::decoder::{DecodedYUV, Decoder, DecoderConfig, Flush};
use openh264::formats::YUVSource;

use super::boxes::{BoxHeader, Cursor, name};
use super::sps::Sps;
use super::tables::{SampleDescription, SampleRange, Track};
use crate::color::{DeclaredColor, Matrix, Yuv420, to_rgb};
use crate::picture::{Picture, check_size, square_size};
use crate::resize::square_pixels;

/// Maximum size of the index; hours of video need a few MB.
const MAX_MOOV_BYTES: u64 = 128 << 20;
/// Maximum number of outermost boxes: enough for a day of fragments, with one fragment per second and two boxes each.
const MAX_BOXES: usize = 200_000;
/// Maximum number of bytes of the header of a box.
const MAX_BOX_HEADER: usize = 16;
/// Maximum size of a `sidx` box, whose number of entries has 16 bits.
const MAX_SIDX_BYTES: u64 = 64 + 12 * 65_536;
/// Maximum size of a coded frame; H.264's largest is smaller.
const MAX_SAMPLE_BYTES: u32 = 64 << 20;

/// Frame rate of a file without one, as in ffmpeg. Only playback depends on it.
const DEFAULT_FPS: f64 = 25.0;

/// An MP4 file with an H.264 track.
pub(crate) struct Mp4Reader {
    file: File,
    track: Track,
    sps: Sps,
}

impl Mp4Reader {
    /// Reads the index. Error messages do not contain the file name.
    pub fn open(mut file: File) -> Result<Self, String> {
        let file_size = file.metadata().map_err(|e| e.to_string())?.len();
        let layout = Layout::read(&mut file, file_size)?;
        if layout.is_fragmented {
            return Err("the file is fragmented, which cannot be read".into());
        }
        let moov = layout.moov;
        let track = Track::find(Cursor(&moov), file_size)?;
        let first = track.samples.first().ok_or("the video track has no frames")?;
        let description = &track.descriptions[first.description];
        let mut sps_of_index = None;
        for set in description.parameter_sets.iter().filter(|set| nal_type(set) == SPS) {
            sps_of_index = Some(Sps::parse(set)?);
        }
        let sps = match sps_of_index {
            Some(sps) => sps,
            // The index has no parameter sets (`avc3`): the first frame has them.
            None => first_sps(&mut file, first, description)?,
        };
        Ok(Self { file, track, sps })
    }

    /// Mean number of frames per second.
    pub fn fps(&self) -> f64 {
        self.track.timeline.fps().unwrap_or(DEFAULT_FPS)
    }

    /// Height and width as shown.
    pub fn size(&self) -> [usize; 2] {
        let size = square_size([self.sps.height, self.sps.width], self.pixel_aspect());
        if self.track.orientation.is_sideways() { [size[1], size[0]] } else { size }
    }

    /// Number of frames that are shown.
    pub fn frames(&self) -> usize {
        self.track.timeline.len()
    }

    /// Whether frames are shown before the frame that is decoded first.
    pub fn begins_with_leading_frames(&self) -> bool {
        self.track.timeline.has_leading_frames
    }

    /// The pixel aspect ratio of the container or, if it has none, that of the stream.
    fn pixel_aspect(&self) -> Option<[u32; 2]> {
        let first = self.track.samples.first()?;
        self.track.descriptions[first.description].pixel_aspect.or(self.sps.pixel_aspect)
    }

    /// Decodes the frames in presentation order. Calls `each` with each shown frame and the seconds from and to which
    /// it is shown, until `each` breaks. Fails on damaged data, even after successful frames.
    pub fn decode(
        &mut self,
        mut each: impl FnMut(Picture, [f64; 2]) -> Result<ControlFlow<()>, String>,
    ) -> Result<(), String> {
        let api = OpenH264API::from_source();
        // Flushing after every frame would return B-frames too early.
        let config = DecoderConfig::new().flush_after_decode(Flush::NoFlush);
        let mut decoder = Decoder::with_api_config(api, config).map_err(|_| "the H.264 decoder does not start")?;
        // The colours that the stream and the container declare.
        let (mut color, mut container_color) = (self.sps.color, None);
        let (orientation, pixel_aspect) = (self.track.orientation, self.pixel_aspect());
        let mut times = self.track.timeline.frames.iter();
        let mut show = |frame: &DecodedYUV, color, container_color| -> Result<ControlFlow<()>, String> {
            match times.next() {
                Some(Some(time)) => {
                    let picture = square_pixels(picture(frame, color, container_color)?, pixel_aspect)?;
                    each(orientation.apply(picture), *time)
                }
                // The frame is only a reference for other frames.
                Some(None) => Ok(ControlFlow::Continue(())),
                None => Err("more frames than its index tells of".into()),
            }
        };
        let mut annex_b = Vec::new();
        let mut current_description = None;
        for (i, sample) in self.track.samples.iter().enumerate() {
            let in_frame = |problem: String| format!("frame {i}: {problem}");
            let description = &self.track.descriptions[sample.description];
            if current_description != Some(sample.description) {
                current_description = Some(sample.description);
                container_color = description.color;
                for set in &description.parameter_sets {
                    color = push_nal(&mut annex_b, set, color).map_err(in_frame)?;
                }
            }
            let bytes = read_sample(&mut self.file, sample).map_err(in_frame)?;
            for nal in nal_units(&bytes, description.length_size) {
                color = nal.and_then(|nal| push_nal(&mut annex_b, nal, color)).map_err(in_frame)?;
            }
            // The decoder's messages are only numbers.
            let decoded = decoder.decode(&annex_b).map_err(|_| format!("frame {i} cannot be decoded: {UNDECODED}"))?;
            annex_b.clear();
            if let Some(frame) = decoded
                && show(&frame, color, container_color)?.is_break()
            {
                return Ok(());
            }
        }
        let rest = decoder.flush_remaining().map_err(|_| format!("the last frames cannot be decoded: {UNDECODED}"))?;
        for frame in &rest {
            if show(frame, color, container_color)?.is_break() {
                break;
            }
        }
        Ok(())
    }
}

/// The likely reason why the decoder fails. The messages of the decoder are only numbers.
const UNDECODED: &str = "it is damaged, or H.264 of a kind that cannot be read";

/// Fails if the file ends early or has several indexes, because no decoder reports that.
pub(crate) fn check_layout(mut file: File) -> Result<(), String> {
    let file_size = file.metadata().map_err(|e| e.to_string())?.len();
    match Layout::read(&mut file, file_size) {
        Err(problem) if problem.is_damage => Err(problem.text),
        _ => Ok(()),
    }
}

/// The outermost boxes of a file.
struct Layout {
    /// The body of `moov`.
    moov: Vec<u8>,
    /// Whether frames are described by `moof` boxes besides `moov`.
    is_fragmented: bool,
}

/// The reason why a layout cannot be read.
struct BadLayout {
    text: String,
    /// Whether the file is damaged, so that another decoder would only hide the damage.
    is_damage: bool,
}

impl BadLayout {
    fn damage(text: impl Into<String>) -> Self {
        Self { text: text.into(), is_damage: true }
    }
}

impl From<String> for BadLayout {
    fn from(text: String) -> Self {
        Self { text, is_damage: false }
    }
}

impl From<BadLayout> for String {
    fn from(bad: BadLayout) -> Self {
        bad.text
    }
}

impl Layout {
    /// Walks over all outermost boxes, without reading frames.
    fn read(file: &mut File, file_size: u64) -> Result<Self, BadLayout> {
        let (mut position, mut boxes) = (0, 0);
        let (mut moov, mut is_fragmented) = (None::<Vec<u8>>, false);
        while position + 8 <= file_size {
            boxes += 1;
            if boxes > MAX_BOXES {
                return Err(format!("more than {MAX_BOXES} boxes").into());
            }
            let mut start = [0; MAX_BOX_HEADER];
            let bytes_left = file_size - position;
            let length = bytes_left.min(MAX_BOX_HEADER as u64) as usize;
            read_at(file, position, &mut start[..length])?;
            let Some(header) = Cursor(&start).box_header(bytes_left) else { break };
            let BoxHeader { kind, header_length, size } = header;
            is_fragmented |= &kind == b"moof";
            let end = position.checked_add(size).filter(|&end| size >= header_length && end <= file_size);
            let Some(end) = end else {
                let text = format!(
                    "the box `{}` at byte {position} says {size} bytes, the file has {bytes_left} left: it is cut \
                     short, damaged, or no MP4",
                    name(kind)
                );
                match &moov {
                    None => return Err(text.into()),
                    Some(_) if is_fragmented => return Err(BadLayout::damage(text)),
                    // The index is whole, and the positions of all of its frames are checked. Later boxes are not
                    // needed.
                    Some(_) => break,
                }
            };
            match &kind {
                b"moov" => {
                    let body = read_moov(file, position + header_length..end)?;
                    if moov.as_ref().is_some_and(|first| *first != body) {
                        return Err(BadLayout::damage(
                            "it has several indexes (`moov`): files that were joined as they are, of which players \
                             show the first only; join them by ffmpeg's `concat`",
                        ));
                    }
                    moov = Some(body);
                }
                b"sidx" => check_segments(file, position + header_length..end, file_size)?,
                _ => {}
            }
            position = end;
        }
        let moov = moov.ok_or_else(|| "no index (box `moov`): it is cut short, or no MP4".to_string())?;
        Ok(Self { moov, is_fragmented })
    }
}

/// Reads the body of `moov`, which lies at the bytes `body` of the file.
fn read_moov(file: &mut File, body: Range<u64>) -> Result<Vec<u8>, String> {
    let length = body.end - body.start;
    if length > MAX_MOOV_BYTES {
        return Err(format!("the index (`moov`) of {length} bytes is larger than {MAX_MOOV_BYTES}"));
    }
    let mut moov = vec![0; length as usize];
    read_at(file, body.start, &mut moov)?;
    Ok(moov)
}

/// Fails if the file ends before the segments that a `sidx` box lists. The body of the box lies at the bytes `body`.
fn check_segments(file: &mut File, body: Range<u64>, file_size: u64) -> Result<(), BadLayout> {
    let mut sidx = vec![0; (body.end - body.start).min(MAX_SIDX_BYTES) as usize];
    read_at(file, body.start, &mut sidx)?;
    match segments_end(Cursor(&sidx), body.end) {
        Some(needed) if needed > file_size => Err(BadLayout::damage(format!(
            "its segments (`sidx`) end at byte {needed}, the file has {file_size}: it is cut short"
        ))),
        _ => Ok(()),
    }
}

/// The byte of the file at which the last segment of a `sidx` box ends. The box itself ends at byte `anchor`.
fn segments_end(mut sidx: Cursor<'_>, anchor: u64) -> Option<u64> {
    let version = sidx.version()?;
    sidx.take(8)?; // id of the stream, ticks per second
    // The earliest time is skipped. After it comes the distance of the first segment from `anchor`.
    let distance = match version {
        0 => sidx.take(4).and(sidx.u32()).map(u64::from)?,
        _ => sidx.take(8).and(sidx.u64())?,
    };
    sidx.take(2)?; // reserved
    let mut end = anchor.checked_add(distance)?;
    for _ in 0..sidx.u16()? {
        // The highest bit is the type of the entry.
        let size = sidx.u32()? & 0x7fff_ffff;
        sidx.take(8)?; // duration, access points
        end = end.checked_add(size.into())?;
    }
    Some(end)
}

fn read_sample(file: &mut File, sample: &SampleRange) -> Result<Vec<u8>, String> {
    if sample.size > MAX_SAMPLE_BYTES {
        return Err(format!("{} bytes are too many for one", sample.size));
    }
    let mut bytes = vec![0; sample.size as usize];
    read_at(file, sample.offset, &mut bytes)?;
    Ok(bytes)
}

fn read_at(file: &mut File, position: u64, out: &mut [u8]) -> Result<(), String> {
    file.seek(SeekFrom::Start(position)).and_then(|_| file.read_exact(out)).map_err(|e| e.to_string())
}

/// The first sequence parameter set among the NAL units of the sample `first`.
fn first_sps(file: &mut File, first: &SampleRange, description: &SampleDescription) -> Result<Sps, String> {
    let bytes = read_sample(file, first)?;
    for nal in nal_units(&bytes, description.length_size) {
        let nal = nal?;
        if nal_type(nal) == SPS {
            return Sps::parse(nal);
        }
    }
    Err("no sequence parameter set".into())
}

/// The NAL units of a sample. The length of each unit precedes it in `length_size` bytes. A length beyond the sample is
/// an error.
fn nal_units(mut bytes: &[u8], length_size: usize) -> impl Iterator<Item = Result<&[u8], String>> {
    std::iter::from_fn(move || {
        if bytes.is_empty() {
            return None;
        }
        let Some((length, rest)) = bytes.split_at_checked(length_size) else {
            bytes = &[];
            return Some(Err("the length of a NAL unit is cut short".into()));
        };
        let length = length.iter().fold(0, |value, &b| value << 8 | usize::from(b));
        match rest.split_at_checked(length) {
            Some((nal, tail)) => {
                bytes = tail;
                Some(Ok(nal))
            }
            None => {
                bytes = &[];
                Some(Err(format!("a NAL unit says {length} bytes, {} are there", rest.len())))
            }
        }
    })
}

/// Appends a NAL unit for the decoder and returns the current colour. A parameter set is parsed first, which updates
/// the colour and checks a changed frame size before the decoder allocates memory for it.
fn push_nal(annex_b: &mut Vec<u8>, nal: &[u8], color: DeclaredColor) -> Result<DeclaredColor, String> {
    /// Separates NAL units in the byte stream of Annex B.
    const START_CODE: [u8; 4] = [0, 0, 0, 1];
    if nal.is_empty() {
        return Ok(color);
    }
    annex_b.extend(START_CODE);
    annex_b.extend(nal);
    match nal_type(nal) {
        SPS => Sps::parse(nal).map(|sps| sps.color),
        _ => Ok(color),
    }
}

/// The type of NAL units that are sequence parameter sets.
const SPS: u8 = 7;

/// The lowest five bits of the header byte; 0, which is no type, for an empty unit.
fn nal_type(nal: &[u8]) -> u8 {
    nal.first().map_or(0, |b| b & 0x1f)
}

/// Converts a frame to RGB by the colour matrix of the stream or, if the stream does not specify one, of the container.
fn picture(frame: &DecodedYUV, stream: DeclaredColor, container: Option<DeclaredColor>) -> Result<Picture, String> {
    let is_specified = stream.matrix_code != DeclaredColor::UNSPECIFIED_MATRIX;
    let DeclaredColor { matrix_code, is_full_range } = if is_specified { stream } else { container.unwrap_or(stream) };
    let matrix = Matrix::from_code(matrix_code, is_full_range).ok_or_else(|| {
        format!("matrix_coefficients {matrix_code} is not supported (H.273; BT.601, BT.709 and BT.2020 are)")
    })?;
    let (width, height) = frame.dimensions();
    check_size(width, height)?;
    let (y_stride, uv_stride, _) = frame.strides();
    let yuv = Yuv420 { width, height, y: frame.y(), u: frame.u(), v: frame.v(), y_stride, uv_stride };
    if !yuv.is_consistent() {
        return Err(format!("the decoder returned an odd frame of {width} x {height} pixels"));
    }
    Ok(to_rgb(yuv, matrix))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn rejects_oversized_index_without_reading_it() {
        let mut file = tempfile::tempfile().unwrap();
        let length = MAX_MOOV_BYTES + 9;
        file.write_all(&(length as u32).to_be_bytes()).unwrap();
        file.write_all(b"moov").unwrap();
        // The rest is a sparse hole that takes no disk space.
        file.set_len(length).unwrap();
        let told = Layout::read(&mut file, length).map(|_| ()).map_err(String::from).unwrap_err();
        assert!(check_layout(file.try_clone().unwrap()).is_ok(), "another reader may read it");
        assert!(told.contains(&format!("of {} bytes is larger than {MAX_MOOV_BYTES}", MAX_MOOV_BYTES + 1)), "{told}");
    }
}
