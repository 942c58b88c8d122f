//! Computes the presentation times of frames from decoding times, their offsets, and the edit list (ISO/IEC 14496-12,
//! 8.6).

use super::boxes::{CUT_SHORT, Cursor, table};

/// When a frame is presented, in ticks of the track.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PresentationInterval {
    from: i64,
    /// Ticks until the next decoding time; used for the last frame only.
    duration: i64,
}

/// The frames in presentation order.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Timeline {
    /// Begin and end, in seconds, of each decoded frame, relative to the first shown frame. `None` for a frame that is
    /// not shown and only serves as a reference for others.
    pub frames: Vec<Option<[f64; 2]>>,
    /// Whether frames are shown before the frame that is decoded first. Their references may be missing.
    pub has_leading_frames: bool,
}

/// Maximum number of edits, against malformed files.
const MAX_EDITS: u32 = 1000;

/// The shown parts of the track, in their order. Without any, the whole track is shown.
struct EditList(Vec<Edit>);

/// A shown part of the track, in ticks.
#[derive(Clone, Copy)]
struct Edit {
    from: i64,
    /// One past the last tick.
    to: i64,
}

impl Timeline {
    /// Reads the timeline. `edits` is the edit list and the ticks per second of its durations. `has_data` says which
    /// frames of the tables have data, because samples of 0 bytes are no frames. Fails if the edit list repeats or
    /// reorders parts.
    pub fn read(
        tables: Cursor<'_>,
        timescale: u32,
        edits: Option<(Cursor<'_>, u32)>,
        has_data: &[bool],
    ) -> Result<Self, String> {
        let mut frames = times(tables, has_data)?;
        let first_decoded_at = frames.first().map(|frame| frame.from);
        // Stable sort: frames with equal times stay in decoding order.
        frames.sort_by_key(|frame| frame.from);
        let edits = match edits {
            Some((list, movie_timescale)) => EditList::read(list, timescale, movie_timescale)?,
            None => EditList(Vec::new()),
        };
        let Some(first_shown) = frames.iter().find(|frame| edits.shows(frame)) else {
            return Err("its edit list shows no frame".into());
        };
        let start = edits.shown_at(first_shown.from);
        let seconds = |tick: i64| tick.saturating_sub(start) as f64 / f64::from(timescale.max(1));
        // Begin and end of a frame that is shown.
        let interval = |(i, frame): (usize, &PresentationInterval)| -> Option<[f64; 2]> {
            let begin = edits.shows(frame).then(|| edits.shown_at(frame.from))?;
            // A frame is shown until the next one. The last frame is shown for its own duration.
            let next = frames[i + 1..].iter().find(|next| edits.shows(next));
            let end = next.map_or(begin.saturating_add(frame.duration), |next| edits.shown_at(next.from));
            Some([begin, end].map(seconds))
        };
        let intervals = frames.iter().enumerate().map(interval).collect();
        let is_leading = |frame: &PresentationInterval| first_decoded_at.is_some_and(|first| frame.from < first);
        let has_leading_frames = frames.iter().any(|frame| edits.shows(frame) && is_leading(frame));
        Ok(Self { frames: intervals, has_leading_frames })
    }

    /// Number of frames that are shown.
    pub fn len(&self) -> usize {
        self.frames.iter().flatten().count()
    }

    /// Mean number of frames per second; `None` outside 0.01 to 1000.
    pub fn fps(&self) -> Option<f64> {
        let [_, end] = *self.frames.iter().flatten().next_back()?;
        let fps = self.len() as f64 / end;
        (fps.is_finite() && (0.01..=1000.0).contains(&fps)).then_some(fps)
    }
}

/// The times of the frames with data, in decoding order.
fn times(tables: Cursor<'_>, has_data: &[bool]) -> Result<Vec<PresentationInterval>, String> {
    let durations = table(tables.need(b"stts")?)?;
    let offsets = tables.child(b"ctts")?.map(table).transpose()?.unwrap_or_default();
    let repeated =
        |runs: Vec<[u32; 2]>| runs.into_iter().flat_map(|[count, value]| std::iter::repeat_n(value, count as usize));
    // Both tables should cover all frames. After the end of a table that is too short, the last duration continues and
    // the offset is 0, as in ffmpeg.
    let mut durations = repeated(durations);
    let mut offsets = repeated(offsets);
    let (mut now, mut duration) = (0i64, 0i64);
    let mut frames = Vec::new();
    for frame_has_data in has_data {
        duration = durations.next().map_or(duration, i64::from);
        // Offsets are signed in version 1, and in practice also in version 0.
        let offset = offsets.next().map_or(0, |offset| i64::from(offset as i32));
        if *frame_has_data {
            frames.push(PresentationInterval { from: now + offset, duration });
        }
        now += duration;
    }
    Ok(frames)
}

impl EditList {
    /// Reads the edit list of a track of `timescale` ticks per second. Its durations are in ticks of the movie.
    fn read(mut list: Cursor<'_>, timescale: u32, movie_timescale: u32) -> Result<Self, String> {
        let version = list.version().ok_or(CUT_SHORT)?;
        let count = list.u32().ok_or(CUT_SHORT)?;
        if count > MAX_EDITS {
            return Err(format!("an edit list of {count} parts; at most {MAX_EDITS} are accepted"));
        }
        let mut edits: Vec<Edit> = Vec::new();
        for _ in 0..count {
            let (duration, from) = match version {
                1 => (list.u64(), list.u64().map(|t| t as i64)),
                _ => (list.u32().map(u64::from), list.u32().map(|t| i64::from(t as i32))),
            };
            let (duration, from) = (duration.ok_or(CUT_SHORT)?, from.ok_or(CUT_SHORT)?);
            list.take(4).ok_or(CUT_SHORT)?; // the rate is ignored, even 0, which asks for a still picture
            if from < 0 {
                continue; // an empty edit: nothing is shown for a while
            }
            let ticks = u128::from(duration) * u128::from(timescale);
            let ticks = (ticks + u128::from(movie_timescale) / 2) / u128::from(movie_timescale.max(1));
            let to = match ticks {
                0 => i64::MAX, // to the end
                ticks => from.saturating_add(i64::try_from(ticks).unwrap_or(i64::MAX)),
            };
            if edits.last().is_some_and(|last| from < last.to) {
                return Err("its edit list plays parts again or in another order, which cannot be read".into());
            }
            edits.push(Edit { from, to });
        }
        Ok(Self(edits))
    }

    /// Whether a frame is shown.
    fn shows(&self, frame: &PresentationInterval) -> bool {
        self.0.is_empty() || self.0.iter().any(|edit| (edit.from..edit.to).contains(&frame.from))
    }

    /// The tick of the presentation at which a tick of the track is shown. The gaps between edits are cut out.
    fn shown_at(&self, tick: i64) -> i64 {
        let gaps_before = self.0.windows(2).filter(|pair| pair[1].from <= tick);
        tick - gaps_before.map(|pair| pair[1].from - pair[0].to).sum::<i64>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full_box(kind: &[u8; 4], version: u8, numbers: &[u32]) -> Vec<u8> {
        let mut bytes = (12 + 4 * numbers.len() as u32).to_be_bytes().to_vec();
        bytes.extend(kind);
        bytes.extend([version, 0, 0, 0]);
        numbers.iter().for_each(|n| bytes.extend(n.to_be_bytes()));
        bytes
    }

    /// Six frames at 10 ticks a second, stored as I P B B P B, with two ticks of delay.
    fn tables() -> Vec<u8> {
        let mut bytes = full_box(b"stts", 0, &[1, 6, 1]);
        bytes.extend(full_box(b"ctts", 0, &[5, 1, 2, 1, 4, 2, 1, 1, 3, 1, 1]));
        bytes
    }

    /// Reads the timeline with an edit list: the number of edits, then duration in milliseconds (ticks of the movie),
    /// start in ticks of the track, and rate (1.0 is `0x1_0000`) of each. Returns the tenth of a second where each
    /// frame begins.
    fn read(edits: &[u32]) -> Result<Vec<Option<i32>>, String> {
        let (tables, list) = (tables(), full_box(b"elst", 0, edits));
        let edits = (!edits.is_empty()).then_some((Cursor(&list[8..]), 1000));
        let timeline = Timeline::read(Cursor(&tables), 10, edits, &[true; 6])?;
        Ok(timeline.frames.iter().map(|f| f.map(|[from, _]| (from * 10.0).round() as i32)).collect())
    }

    #[test]
    fn frames_are_ordered_by_presentation_time() {
        // Decoded at 0 to 5, shown at 2 5 3 4 7 6.
        assert_eq!(read(&[]).unwrap(), [0, 1, 2, 3, 4, 5].map(Some));
        // The edit list that describes the delay.
        assert_eq!(read(&[1, 600, 2, 0x1_0000]).unwrap(), [0, 1, 2, 3, 4, 5].map(Some));
    }

    #[test]
    fn edit_list_removes_frames() {
        assert_eq!(read(&[1, 400, 4, 0x1_0000]).unwrap(), [None, None, Some(0), Some(1), Some(2), Some(3)]);
        // An empty edit, then 251 ms, which round to 3 ticks of the track.
        assert_eq!(
            read(&[2, 90, u32::MAX, 0x1_0000, 251, 4, 0x1_0000]).unwrap(),
            [None, None, Some(0), Some(1), Some(2), None]
        );
        // Two consecutive parts; the frames between them are not shown.
        let parts = [2, 200, 2, 0x1_0000, 0, 6, 0x1_0000];
        assert_eq!(read(&parts).unwrap(), [Some(0), Some(1), None, None, Some(2), Some(3)]);
        // The first part holds no frame.
        let parts = [2, 200, 0, 0x1_0000, 0, 4, 0x1_0000];
        assert_eq!(read(&parts).unwrap(), [None, None, Some(0), Some(1), Some(2), Some(3)]);
        assert!(read(&[2, 300, 4, 0x1_0000, 300, 2, 0x1_0000]).unwrap_err().contains("again"));
        assert!(read(&[1, 300, 90, 0x1_0000]).unwrap_err().contains("shows no frame"));
        assert!(read(&[9, 300]).is_err());
    }

    #[test]
    fn fps_is_the_mean_over_shown_frames() {
        let tables = full_box(b"stts", 0, &[2, 3, 10, 1, 70]);
        let timeline = Timeline::read(Cursor(&tables), 100, None, &[true; 4]).unwrap();
        assert_eq!((timeline.len(), timeline.fps()), (4, Some(4.0)));
        assert_eq!(timeline.frames[3], Some([0.3, 1.0]));
        let still = full_box(b"stts", 0, &[1, 1, 0]);
        assert_eq!(Timeline::read(Cursor(&still), 0, None, &[true]).unwrap().fps(), None);
        // Samples without data do not count.
        assert_eq!(Timeline::read(Cursor(&tables), 100, None, &[true, false, true, true]).unwrap().len(), 3);
    }
}
