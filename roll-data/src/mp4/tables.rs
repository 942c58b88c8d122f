//! The sample tables of the video track: where each coded frame lies in the file.

use super::boxes::{Box, Cursor, name};

/// One coded frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SampleRange {
    pub offset: u64,
    pub size: u32,
}

/// The video track.
#[derive(Debug)]
pub(super) struct Track {
    /// Bytes of the length before each NAL unit.
    pub length_size: usize,
    /// Sequence and picture parameter sets, in this order.
    pub parameter_sets: Vec<Vec<u8>>,
    /// In decoding order.
    pub samples: Vec<SampleRange>,
    pub fps: f64,
    /// Clockwise quarter turns to show it upright.
    pub quarters: u8,
    /// Colour of the container, where given: matrix and full range.
    pub color: Option<(u8, bool)>,
}

const CUT_SHORT: &str = "cut short";

impl Track {
    /// Finds the video track in the body of `moov`. `file_size` bounds what samples may lie in.
    pub fn find(moov: Cursor<'_>, file_size: u64) -> Result<Self, String> {
        let tracks: Vec<Box> = moov.boxes()?.into_iter().filter(|b| b.kind == *b"trak").collect();
        for track in &tracks {
            let media = track.body.need(b"mdia")?;
            let mut handler = media.need(b"hdlr")?;
            if handler.take(8).is_some() && handler.tag() == Some(*b"vide") {
                let fragmented = moov.child(b"mvex")?.is_some();
                return Self::read(track.body, media, file_size, fragmented);
            }
        }
        Err(format!("no video track among its {} tracks", tracks.len()))
    }

    fn read(track: Cursor<'_>, media: Cursor<'_>, file_size: u64, fragmented: bool) -> Result<Self, String> {
        let tables = media.need(b"minf")?.need(b"stbl")?;
        let (length_size, parameter_sets, color) = description(tables.need(b"stsd")?)?;
        let samples = samples(tables, file_size)?;
        if samples.is_empty() {
            return Err(match fragmented {
                true => "the file is fragmented; rewrite it: ffmpeg -i IN -c copy -movflags +faststart OUT.mp4".into(),
                false => "the video track has no frames".into(),
            });
        }
        let fps = frame_rate(media.need(b"mdhd")?, tables.need(b"stts")?, samples.len());
        let quarters = rotation(track.need(b"tkhd")?).unwrap_or(0);
        Ok(Self { length_size, parameter_sets, samples, fps, quarters, color })
    }
}

type Description = (usize, Vec<Vec<u8>>, Option<(u8, bool)>);

fn description(mut stsd: Cursor<'_>) -> Result<Description, String> {
    stsd.take(8).ok_or(CUT_SHORT)?;
    let entries = stsd.boxes()?;
    let entry = entries.first().ok_or("the track does not say its codec")?;
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
    config.take(4).ok_or(CUT_SHORT)?;
    let length_size = usize::from(config.u8().ok_or(CUT_SHORT)? & 3) + 1;
    let mut sets = Vec::new();
    for mask in [0x1f, 0xff] {
        let count = config.u8().ok_or(CUT_SHORT)? & mask;
        for _ in 0..count {
            let length = usize::from(config.u16().ok_or(CUT_SHORT)?);
            sets.push(config.take(length).ok_or("a parameter set is longer than the box `avcC`")?.to_vec());
        }
    }
    let color = find(b"colr").and_then(|mut colr| {
        let kind = colr.tag()?;
        let codes = colr.take(6)?;
        match &kind {
            b"nclx" => Some((codes[5], colr.u8()? & 0x80 != 0)),
            b"nclc" => Some((codes[5], false)),
            _ => None,
        }
    });
    Ok((length_size, sets, color))
}

/// Entries of a table of `width` numbers each, after version, flags and count; the count is checked against the box.
fn table(mut body: Cursor<'_>, width: usize) -> Result<Vec<Vec<u32>>, String> {
    body.version().ok_or(CUT_SHORT)?;
    let count = body.u32().ok_or(CUT_SHORT)? as usize;
    if count.checked_mul(4 * width).is_none_or(|n| n > body.0.len()) {
        return Err(format!("a table says {count} entries, its box has room for {}", body.0.len() / (4 * width)));
    }
    Ok((0..count).map(|_| (0..width).filter_map(|_| body.u32()).collect()).collect())
}

fn samples(tables: Cursor<'_>, file_size: u64) -> Result<Vec<SampleRange>, String> {
    let sizes = sizes(tables.need(b"stsz")?, file_size)?;
    let chunks: Vec<u64> = match tables.child(b"stco")? {
        Some(body) => table(body, 1)?.into_iter().map(|e| u64::from(e[0])).collect(),
        None => table(tables.need(b"co64")?, 2)?.into_iter().map(|e| u64::from(e[0]) << 32 | u64::from(e[1])).collect(),
    };
    let runs = table(tables.need(b"stsc")?, 3)?;

    let mut samples = Vec::with_capacity(sizes.len());
    let mut sizes = sizes.into_iter();
    let mut run = 0;
    for (i, &chunk) in chunks.iter().enumerate() {
        if sizes.len() == 0 {
            break;
        }
        while runs.get(run + 1).is_some_and(|r| r[0] as usize <= i + 1) {
            run += 1;
        }
        let per_chunk = runs.get(run).map_or(0, |r| r[1]) as usize;
        let mut offset = chunk;
        for size in sizes.by_ref().take(per_chunk) {
            let end = offset.checked_add(u64::from(size)).filter(|&end| end <= file_size);
            let Some(end) = end else {
                return Err(format!(
                    "frame {} lies at bytes {offset} to {}, the file has {file_size}: it is cut short or damaged",
                    samples.len(),
                    offset.saturating_add(u64::from(size))
                ));
            };
            samples.push(SampleRange { offset, size });
            offset = end;
        }
    }
    match sizes.len() {
        0 => Ok(samples),
        left => Err(format!("{left} frames of the track are in no chunk")),
    }
}

fn sizes(mut stsz: Cursor<'_>, file_size: u64) -> Result<Vec<u32>, String> {
    let mut whole = stsz;
    stsz.version().ok_or(CUT_SHORT)?;
    let common = stsz.u32().ok_or(CUT_SHORT)?;
    if common == 0 {
        // The table has the layout of the others after one number more.
        whole.take(4).ok_or(CUT_SHORT)?;
        return Ok(table(whole, 1)?.into_iter().map(|e| e[0]).collect());
    }
    let count = stsz.u32().ok_or(CUT_SHORT)?;
    if u64::from(count) * u64::from(common) > file_size {
        return Err(format!("{count} frames of {common} bytes do not fit the file of {file_size} bytes"));
    }
    Ok(vec![common; count as usize])
}

fn frame_rate(mut mdhd: Cursor<'_>, stts: Cursor<'_>, frames: usize) -> f64 {
    let timescale = match mdhd.version() {
        Some(1) => mdhd.take(16).and_then(|_| mdhd.u32()),
        _ => mdhd.take(8).and_then(|_| mdhd.u32()),
    };
    let runs = table(stts, 2).unwrap_or_default();
    let duration: f64 = runs.iter().map(|r| f64::from(r[0]) * f64::from(r[1])).sum();
    let counted: f64 = runs.iter().map(|r| f64::from(r[0])).sum();
    let fps = f64::from(timescale.unwrap_or(0)) * counted.min(frames as f64) / duration;
    // Nothing depends on the rate but playback and `fps`; a file that does not say has ffmpeg's.
    if fps.is_finite() && (0.01..=1000.0).contains(&fps) { fps } else { 25.0 }
}

fn rotation(mut tkhd: Cursor<'_>) -> Option<u8> {
    let times = if tkhd.version()? == 1 { 32 } else { 20 };
    tkhd.take(times + 8 + 8)?; // times and ids; reserved; layer, group, volume
    let [a, b] = [tkhd.u32()? as i32, tkhd.u32()? as i32];
    Some(match (a.signum(), b.signum()) {
        (0, 1) => 1,
        (-1, 0) => 2,
        (0, -1) => 3,
        _ => 0,
    })
}
