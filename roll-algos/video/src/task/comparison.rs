//! Clips before and after training and their references, in one video and one picture.

use std::path::PathBuf;

use roll_core::{Result, Sample, Tensor, Video};
use roll_external::files::write_atomically;
use roll_media::{Picture, encode_png, write_clip};
use roll_train::results::record::Record;
use roll_train::results::scores::{SetName, judged_set};
use roll_train::results::{self, SetLabels};
use roll_train::run_dir::RunDir;

use super::evaluation::Evaluator;
use super::samples;

/// Maximum number of clips in the grid.
const MAX_CLIPS: usize = 8;
/// Small clips are enlarged until the grid is about this wide, in pixels.
const GRID_WIDTH: usize = 1024;
/// Maximum factor by which clips are enlarged.
const MAX_SCALE: usize = 4;
/// Width of the white lines between clips, in pixels.
const GAP: usize = 4;

/// Writes the comparison of a run with evaluations. Returns name and path of each result, the folders of samples
/// included.
pub(super) fn write_results(
    dir: &RunDir,
    record: &Record,
    evaluator: Option<&Evaluator>,
    labels: &SetLabels,
) -> Result<Vec<(&'static str, PathBuf)>> {
    let (Some((before, _)), Some(evaluator)) = (record.first_and_last_evaluation(), evaluator) else {
        return Ok(Vec::new());
    };
    let mut written = Vec::new();
    for moment in ["before", "after"] {
        written.push((moment, results::folder(dir, moment)?));
    }
    if let Some(shown_set) = judged_set(before) {
        written.extend(write(dir, shown_set, evaluator, labels)?.map(|path| ("comparison", path)));
    }
    Ok(written)
}

/// Writes the comparison of one set: its last frame as `comparison.png` and, if there are several, all as
/// `comparison.mp4`. Returns the path of the video or else of the picture; `None` if there are no clips to compare.
fn write(dir: &RunDir, shown: SetName, evaluator: &Evaluator, labels: &SetLabels) -> Result<Option<PathBuf>> {
    let samples = evaluator.samples(shown);
    let saved = |moment: &str| samples::read_saved(dir, moment, shown, samples.len(), labels);
    let Some(grid) = grid(samples, &saved("before")?, &saved("after")?)? else { return Ok(None) };
    let frames = grid.dims()[0];
    let stem = dir.path().join("comparison");
    if frames > 1 {
        let last = Picture::from_frame(&grid, frames - 1);
        write_atomically(&stem.with_extension("png"), &encode_png(&last)?)?;
    }
    write_clip(&stem, &grid).map(Some)
}

/// A video with one column per clip and three rows: reference, before and after. The row of references is left out if
/// the first sample has no clip. Columns that differ from the first in size or number of rows are left out. `None`
/// without videos.
fn grid(samples: &[Sample], before: &[Option<Video>], after: &[Option<Video>]) -> Result<Option<Video>> {
    let mut columns: Vec<Vec<&Video>> = Vec::new();
    for ((sample, before), after) in samples.iter().zip(before).zip(after) {
        let (Some(before), Some(after)) = (before, after) else { continue };
        let column: Vec<&Video> = sample.video.clip().map(|clip| &**clip).into_iter().chain([before, after]).collect();
        // The first column sets the number of rows and their size.
        let (rows, dims) =
            columns.first().map_or((column.len(), column[0].dims()), |first| (first.len(), first[0].dims()));
        if column.len() == rows && column.iter().all(|v| v.dims() == dims) && columns.len() < MAX_CLIPS {
            columns.push(column);
        }
    }
    let Some(first) = columns.first() else { return Ok(None) };
    let fps = first[0].fps();
    let [frames, height, width] = first[0].dims();
    let scale = (GRID_WIDTH / ((width + GAP) * columns.len())).clamp(1, MAX_SCALE);
    // Height and width of a clip in the grid.
    let [h, w] = [height * scale, width * scale];
    // H.264 needs even sizes.
    let grid_height = (first.len() * (h + GAP) + GAP).next_multiple_of(2);
    let grid_width = (columns.len() * (w + GAP) + GAP).next_multiple_of(2);
    // White.
    let mut values = vec![1.0f32; frames * 3 * grid_height * grid_width];
    for (t, frame) in values.chunks_exact_mut(3 * grid_height * grid_width).enumerate() {
        for (column, videos) in columns.iter().enumerate() {
            for (row, video) in videos.iter().enumerate() {
                let corner = [GAP + row * (h + GAP), GAP + column * (w + GAP)];
                draw(frame, [grid_height, grid_width], video.frame(t), [height, width], scale, corner);
            }
        }
    }
    Video::new(Tensor::new(values, [frames, 3, grid_height, grid_width])?, fps).map(Some)
}

/// Draws the picture `pixels`, `[3, height, width]`, into the picture `grid`, `[3, grid_height, grid_width]`. The drawn
/// picture is enlarged `scale` times, and its upper left corner lies at `[top, left]`.
fn draw(
    grid: &mut [f32],
    [grid_height, grid_width]: [usize; 2],
    pixels: &[f32],
    [height, width]: [usize; 2],
    scale: usize,
    [top, left]: [usize; 2],
) {
    for c in 0..3 {
        for y in 0..height * scale {
            let line = &pixels[(c * height + y / scale) * width..][..width];
            let out = &mut grid[(c * grid_height + top + y) * grid_width + left..][..width * scale];
            out.iter_mut().enumerate().for_each(|(x, out)| *out = line[x / scale]);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use roll_core::SampleVideo;

    use super::*;

    #[test]
    fn clips_are_laid_out_in_rows_and_columns() {
        let video = |value: f32, size: usize| Video::new(Tensor::full([2, 3, size, size], value), 8.0).unwrap();
        let sample = |size| Sample::new(0, "", "", SampleVideo::Clip(Arc::new(video(-1.0, size))));
        let some = |value, size| Some(video(value, size));
        let grid = grid(
            &[sample(32), sample(32), sample(16)],
            &[some(-0.5, 32), some(-0.4, 32), some(0.0, 16)],
            &[some(0.5, 32), some(0.4, 32), some(0.0, 16)],
        )
        .unwrap()
        .unwrap();
        let [frames, height, width] = grid.dims();
        assert_eq!([frames, height, width], [2, 3 * 132 + 4, 2 * 132 + 4]);
        let at = |row: usize, column: usize| grid.frame(1)[(GAP + row * 132 + 64) * width + GAP + column * 132 + 64];
        assert_eq!([at(0, 0), at(1, 0), at(2, 0)], [-1.0, -0.5, 0.5]);
        assert_eq!([at(0, 1), at(1, 1), at(2, 1)], [-1.0, -0.4, 0.4]);
        // Without clips there is no row of references.
        let prompt = Sample { video: SampleVideo::Shape([2, 32, 32]), ..sample(32) };
        let grid = super::grid(&[prompt], &[some(-0.5, 32)], &[some(0.5, 32)]).unwrap().unwrap();
        assert_eq!(grid.dims()[1], 2 * 132 + 4);
    }
}
