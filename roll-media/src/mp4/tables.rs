//! The sample tables of the video track: the position of each coded frame in the file.

use std::collections::BTreeSet;

use super::boxes::{Box, CUT_SHORT, Cursor, MAX_FRAMES, name, table, too_many};
use super::timeline::Timeline;
use crate::color::DeclaredColor;
use crate::orientation::Orientation;

/// Where a coded frame lies in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SampleRange {
    pub offset: u64,
    pub size: u32,
    /// Index in [`Track::descriptions`].
    pub description: usize,
}

/// The video track of a file.
#[derive(Debug)]
pub(super) struct Track {
    /// At least one description. Unused ones are not parsed and have default values.
    pub descriptions: Vec<SampleDescription>,
    /// The samples in decoding order, without those that have no data.
    pub samples: Vec<SampleRange>,
    /// The presentation times of the decoded frames.
    pub timeline: Timeline,
    pub orientation: Orientation,
}

/// How frames are coded.
#[derive(Clone, Debug, Default)]
pub(super) struct SampleDescription {
    /// Size in bytes of the length field before each NAL unit.
    pub length_size: usize,
    /// Sequence and picture parameter sets, in this order.
    pub parameter_sets: Vec<Vec<u8>>,
    /// Colour in the container, if it specifies one.
    pub color: Option<DeclaredColor>,
    /// Pixel aspect ratio in the container, width to height, if it specifies one.
    pub pixel_aspect: Option<[u32; 2]>,
}

/// Ticks per second of the edit list in a file without a readable `mvhd`.
const DEFAULT_MOVIE_TIMESCALE: u32 = 1000;

impl Track {
    /// Finds the video track in the body of `moov`. Fails if a sample is not inside the file, which has `file_size`
    /// bytes.
    pub fn find(moov: Cursor<'_>, file_size: u64) -> Result<Self, String> {
        let tracks: Vec<Box> = moov.boxes()?.into_iter().filter(|b| b.kind == *b"trak").collect();
        for track in &tracks {
            let media = track.body.need(b"mdia")?;
            let mut handler = media.need(b"hdlr")?;
            // Version, flags and a reserved field precede the type of the handler.
            if handler.take(8).is_some() && handler.tag() == Some(*b"vide") {
                return Self::read(moov, track.body, media, file_size);
            }
        }
        Err(format!("no video track among its {} tracks", tracks.len()))
    }

    fn read(moov: Cursor<'_>, track: Cursor<'_>, media: Cursor<'_>, file_size: u64) -> Result<Self, String> {
        let tables = media.need(b"minf")?.need(b"stbl")?;
        let mut entries = tables.need(b"stsd")?;
        entries.take(8).ok_or(CUT_SHORT)?; // version, flags, number of entries
        let entries = entries.boxes()?;
        let first_entry = entries.first().ok_or("the track does not say its codec")?;
        let mut samples = samples(tables, file_size)?;
        let has_data: Vec<bool> = samples.iter().map(|sample| sample.size > 0).collect();
        samples.retain(|sample| sample.size > 0);
        if samples.is_empty() {
            description(first_entry)?;
            let is_fragmented = moov.child(b"mvex")?.is_some();
            let problem = if is_fragmented {
                "the file is fragmented, which cannot be read"
            } else {
                "the video track has no frames"
            };
            return Err(problem.into());
        }
        let mut descriptions = vec![SampleDescription::default(); entries.len()];
        for index in samples.iter().map(|sample| sample.description).collect::<BTreeSet<_>>() {
            let entry = entries.get(index).ok_or_else(|| {
                format!("frames are coded by description {}, the track has {}", index + 1, entries.len())
            })?;
            descriptions[index] = description(entry)?;
        }
        let edits = match track.child(b"edts")? {
            Some(edts) => edts.child(b"elst")?,
            None => None,
        };
        let movie_timescale = moov.child(b"mvhd")?.and_then(timescale).unwrap_or(DEFAULT_MOVIE_TIMESCALE);
        let timeline = Timeline::read(
            tables,
            timescale(media.need(b"mdhd")?).unwrap_or(0),
            edits.map(|list| (list, movie_timescale)),
            &has_data,
        )?;
        let orientation = orientation(track.need(b"tkhd")?).unwrap_or_default();
        Ok(Self { descriptions, samples, timeline, orientation })
    }
}

/// Reads an entry of `stsd`. Fails if its codec is not H.264.
fn description(entry: &Box<'_>) -> Result<SampleDescription, String> {
    if !matches!(&entry.kind, b"avc1" | b"avc3") {
        let codec = match &entry.kind {
            b"hvc1" | b"hev1" => "HEVC",
            b"av01" => "AV1",
            b"vp08" => "VP8",
            b"vp09" => "VP9",
            b"mp4v" => "MPEG-4 Part 2",
            b"apcn" | b"apch" | b"apcs" | b"apco" | b"ap4h" => "ProRes",
            b"jpeg" | b"mjpa" | b"mjpb" => "Motion JPEG",
            b"encv" => "encrypted video",
            _ => "an unknown codec",
        };
        return Err(format!("the video is {codec} (`{}`), only H.264 can be read", name(entry.kind)));
    }
    let mut body = entry.body;
    body.take(78).ok_or(CUT_SHORT)?; // VisualSampleEntry
    let children = body.boxes()?;
    let find = |kind: &[u8; 4]| children.iter().find(|b| b.kind == *kind).map(|b| b.body);

    let mut config = find(b"avcC").ok_or("the box `avcC` is missing")?;
    config.take(4).ok_or(CUT_SHORT)?; // version, profile, compatibility, level
    // The lowest two bits are one less than the size.
    let length_size = usize::from(config.u8().ok_or(CUT_SHORT)? & 3) + 1;
    let mut parameter_sets = Vec::new();
    // The number of sequence parameter sets has 5 bits, that of picture parameter sets 8.
    for mask in [0x1f, 0xff] {
        let count = config.u8().ok_or(CUT_SHORT)? & mask;
        for _ in 0..count {
            let length = usize::from(config.u16().ok_or(CUT_SHORT)?);
            parameter_sets.push(config.take(length).ok_or("a parameter set is longer than the box `avcC`")?.to_vec());
        }
    }
    let color = find(b"colr").and_then(|mut colr| {
        let kind = colr.tag()?;
        colr.take(4)?; // primaries and transfer
        // A code is below 256: the lower byte.
        let [_, matrix_code] = colr.u16()?.to_be_bytes();
        match &kind {
            b"nclx" => Some(DeclaredColor { matrix_code, is_full_range: colr.u8()? & 0x80 != 0 }),
            b"nclc" => Some(DeclaredColor { matrix_code, is_full_range: false }),
            _ => None,
        }
    });
    let pixel_aspect = find(b"pasp").and_then(|mut pasp| Some([pasp.u32()?, pasp.u32()?]));
    Ok(SampleDescription { length_size, parameter_sets, color, pixel_aspect })
}

/// The position of each sample, from the sizes of samples, the offsets of chunks, and the samples in each chunk.
fn samples(tables: Cursor<'_>, file_size: u64) -> Result<Vec<SampleRange>, String> {
    let sizes = sizes(tables.need(b"stsz")?, file_size)?;
    let chunks: Vec<u64> = match tables.child(b"stco")? {
        Some(body) => table(body)?.into_iter().map(|[offset]| offset.into()).collect(),
        None => table(tables.need(b"co64")?)?
            .into_iter()
            .map(|[high, low]| u64::from(high) << 32 | u64::from(low))
            .collect(),
    };
    // Runs of chunks: number of the first chunk (from 1), samples per chunk, number of the description (from 1).
    let runs: Vec<[u32; 3]> = table(tables.need(b"stsc")?)?;

    let mut samples = Vec::with_capacity(sizes.len());
    let mut sizes_left = sizes.into_iter();
    let mut run = 0;
    for (i, &chunk_offset) in chunks.iter().enumerate() {
        if sizes_left.len() == 0 {
            break;
        }
        while runs.get(run + 1).is_some_and(|[first_chunk, ..]| *first_chunk as usize <= i + 1) {
            run += 1;
        }
        let [_, per_chunk, description_number] = runs.get(run).copied().unwrap_or_default();
        let description = description_number.saturating_sub(1) as usize;
        let mut offset = chunk_offset;
        for size in sizes_left.by_ref().take(per_chunk as usize) {
            let end = offset.checked_add(u64::from(size)).filter(|&end| end <= file_size);
            let Some(end) = end else {
                return Err(format!(
                    "frame {} lies at bytes {offset} to {}, the file has {file_size}: it is cut short or damaged",
                    samples.len(),
                    offset.saturating_add(u64::from(size))
                ));
            };
            samples.push(SampleRange { offset, size, description });
            offset = end;
        }
    }
    match sizes_left.len() {
        0 => Ok(samples),
        left => Err(format!("{left} frames of the track are in no chunk")),
    }
}

/// The sizes of all samples, from the box `stsz`: one size for all samples, or a table.
fn sizes(mut stsz: Cursor<'_>, file_size: u64) -> Result<Vec<u32>, String> {
    let mut whole = stsz;
    stsz.version().ok_or(CUT_SHORT)?;
    let common_size = stsz.u32().ok_or(CUT_SHORT)?;
    if common_size == 0 {
        // `table` expects four bytes before the count: here they are the common size, not version and flags.
        whole.take(4).ok_or(CUT_SHORT)?;
        let sizes: Vec<[u32; 1]> = table(whole)?;
        return Ok(sizes.concat());
    }
    let count = stsz.u32().ok_or(CUT_SHORT)?;
    if count > MAX_FRAMES {
        return Err(too_many(count as usize));
    }
    if u64::from(count) * u64::from(common_size) > file_size {
        return Err(format!("{count} frames of {common_size} bytes do not fit the file of {file_size} bytes"));
    }
    Ok(vec![common_size; count as usize])
}

/// Ticks per second, from `mvhd` or `mdhd`.
fn timescale(mut header: Cursor<'_>) -> Option<u32> {
    let creation_and_modification = if header.version()? == 1 { 16 } else { 8 };
    header.take(creation_and_modification)?;
    header.u32()
}

/// The orientation in the header of a track.
fn orientation(mut tkhd: Cursor<'_>) -> Option<Orientation> {
    let times_and_id = if tkhd.version()? == 1 { 32 } else { 20 };
    tkhd.take(times_and_id + 8 + 8)?; // then reserved bytes; layer, group, volume
    let mut number = || tkhd.u32().map(|n| n as i32);
    let (a, b, _, c, d) = (number()?, number()?, number()?, number()?, number()?);
    Some(Orientation::from_matrix([a, b, c, d]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(numbers: &[u32]) -> Vec<u8> {
        numbers.iter().flat_map(|number| number.to_be_bytes()).collect()
    }

    #[test]
    fn rejects_oversized_tables_before_allocation() {
        let many = MAX_FRAMES + 1;
        // Frames of one size have no table: twelve bytes can claim any number of frames.
        let told = sizes(Cursor(&numbers(&[0, 1, many])), u64::MAX).unwrap_err();
        assert!(told.contains("4000001 frames are too many"), "{told}");
        let told = sizes(Cursor(&numbers(&[0, 1000, MAX_FRAMES])), 1 << 20).unwrap_err();
        assert!(told.contains("do not fit the file of 1048576 bytes"), "{told}");
        // A table that really has all entries it claims.
        let mut whole = numbers(&[0, many]);
        whole.resize(8 + 4 * many as usize, 0);
        let told = table::<1>(Cursor(&whole)).unwrap_err();
        assert!(told.contains("4000001 frames are too many"), "{told}");
        assert_eq!(table::<3>(Cursor(&numbers(&[0, 1, 7, 8, 9]))).unwrap(), [[7, 8, 9]]);
    }

    #[test]
    fn rejects_tables_longer_than_their_box() {
        let told = table::<2>(Cursor(&numbers(&[0, 60_000_000, 1, 2]))).unwrap_err();
        assert!(told.contains("60000000 entries") && told.contains("room for 1"), "{told}");
        assert!(table::<1>(Cursor(&numbers(&[0]))).is_err());
    }
}
