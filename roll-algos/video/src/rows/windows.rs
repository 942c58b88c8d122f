//! Windows: several samples from a clip that is longer than `data.num_frames`.

use roll_core::{Error, Result, VideoUnit};

use super::buckets::Available;
use super::config::Windows;
use super::metadata::{Metadata, MetadataRow, Window};

/// Maximum number of windows of a clip: the frames that a file's index claims must not fill the memory.
const MAX_WINDOWS: usize = 1 << 16;

impl Windows {
    /// The first frames of the windows of `length` frames in a clip of `available`; one if the clip is not longer.
    fn starts(self, available: usize, length: usize) -> Vec<usize> {
        let last = available.saturating_sub(length);
        let mut starts: Vec<usize> = match self {
            Self::Head => vec![0],
            Self::Uniform(count) => {
                let gaps = count.saturating_sub(1).clamp(1, MAX_WINDOWS);
                (0..=gaps).map(|i| (i * last + gaps / 2) / gaps).collect()
            }
            Self::Sliding(stride) => (0..=last).step_by(stride.max(1)).take(MAX_WINDOWS + 1).collect(),
        };
        starts.dedup(); // fewer places than windows
        starts
    }
}

impl Metadata {
    /// Replaces the row of each clip that is longer than its sample, by at least the unit, by one row for each window.
    /// `available` has the frames of the rows, and the result those of the new ones.
    pub(crate) fn divide(
        &mut self,
        windows: Windows,
        available: Vec<Option<Available>>,
        unit: VideoUnit,
    ) -> Result<Vec<Option<Available>>> {
        let (mut rows, mut divided) = (Vec::new(), Vec::new());
        for (row, found) in std::mem::take(&mut self.rows).into_iter().zip(available) {
            let frames = found.map_or(0, |found| found.bucket.frames);
            // A shorter rest is lost to rounding, and windows that differ by it would be nearly alike.
            let longer = found.map(|found| found.frames).filter(|have| unit.frames_within(*have) > frames);
            let starts = longer.map_or(vec![0], |have| windows.starts(have, frames));
            if starts.len() > MAX_WINDOWS {
                let problem = format!("more than {MAX_WINDOWS} windows in {}; choose fewer", self.location(&row));
                return Err(Error::config("data.windows", problem));
            }
            let one = |(number, first): (usize, &usize)| Window { number, first: *first, frames };
            match starts.len() {
                1 => rows.push(row),
                _ => rows
                    .extend(starts.iter().enumerate().map(one).map(|w| MetadataRow { window: Some(w), ..row.clone() })),
            }
            divided.resize(rows.len(), found);
        }
        self.rows = rows;
        Ok(divided)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_lie_within_the_clip_and_differ() {
        assert_eq!(Windows::Head.starts(200, 81), [0]);
        assert_eq!(Windows::Uniform(3).starts(200, 81), [0, 60, 119]);
        assert_eq!(Windows::Uniform(4).starts(83, 81), [0, 1, 2], "there are three places only");
        assert_eq!(Windows::Sliding(40).starts(200, 81), [0, 40, 80]);
        assert_eq!(Windows::Sliding(119).starts(200, 81), [0, 119]);
        for windows in [Windows::Head, Windows::Uniform(3), Windows::Sliding(1)] {
            assert_eq!(windows.starts(81, 81), [0]);
            assert_eq!(windows.starts(5, 81), [0]);
        }
    }
}
