//! Windows (`data.windows`): several samples from a clip that is longer than `data.num_frames`.

use roll_core::{Error, Result, VideoUnit};

use super::buckets::RowShape;
use super::config::Windows;
use super::metadata::{Metadata, MetadataRow, Window};

/// Maximum number of windows of a clip, so that the number of frames that a file's index claims cannot fill the memory.
const MAX_WINDOWS: usize = 1 << 16;

impl Windows {
    /// The first frame of each window of `window_frames` in a clip of `clip_frames`. There is one window if the clip is
    /// not longer than a window.
    fn starts(self, clip_frames: usize, window_frames: usize) -> Vec<usize> {
        let last = clip_frames.saturating_sub(window_frames);
        let mut starts: Vec<usize> = match self {
            Self::Head => vec![0],
            Self::Uniform(count) => {
                let gaps = count.saturating_sub(1).clamp(1, MAX_WINDOWS);
                // Multiples of `last / gaps`, rounded to the nearest frame.
                (0..=gaps).map(|i| (i * last + gaps / 2) / gaps).collect()
            }
            // One more than the maximum, which `divide` then refuses.
            Self::Sliding(stride) => (0..=last).step_by(stride.max(1)).take(MAX_WINDOWS + 1).collect(),
        };
        starts.dedup(); // a clip may have fewer positions than windows are configured
        starts
    }
}

impl Metadata {
    /// Divides clips into windows. The row of each clip that is longer than its sample, by at least the model's unit,
    /// is replaced by one row per window. `shapes` has an entry for each row before the division, the result has one
    /// for each row after it.
    pub(crate) fn divide(
        &mut self,
        windows: Windows,
        shapes: Vec<Option<RowShape>>,
        unit: VideoUnit,
    ) -> Result<Vec<Option<RowShape>>> {
        let (mut rows, mut shapes_of_rows) = (Vec::new(), Vec::new());
        for (row, shape) in std::mem::take(&mut self.rows).into_iter().zip(shapes) {
            let frames = shape.map_or(0, |shape| shape.bucket.frames);
            // The windows of a clip that is longer by less than the unit would be nearly the same.
            let frames_if_longer =
                shape.map(|shape| shape.clip_frames).filter(|clip_frames| unit.frames_within(*clip_frames) > frames);
            let starts = frames_if_longer.map_or(vec![0], |clip_frames| windows.starts(clip_frames, frames));
            if starts.len() > MAX_WINDOWS {
                let problem = format!("more than {MAX_WINDOWS} windows in {}; choose fewer", self.location(&row));
                return Err(Error::config("data.windows", problem));
            }
            if starts.len() == 1 {
                rows.push(row);
            } else {
                for (number, first) in starts.into_iter().enumerate() {
                    rows.push(MetadataRow { window: Some(Window { number, first, frames }), ..row.clone() });
                }
            }
            // Each row of a clip has the clip's entry.
            shapes_of_rows.resize(rows.len(), shape);
        }
        self.rows = rows;
        Ok(shapes_of_rows)
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
