//! Training frames: first crops of single pictures, then crops of clips, then whole clips.

use rayon::prelude::*;
use roll_core::{Noise, Purpose};

use super::{FRAMES, SIDE};
use crate::face::{self, Identity, Picture};
use crate::training::gaussian;
use crate::training::pictures::unit_uniform;

/// Number of identities in the training data.
const IDENTITIES: f32 = 10_000.0;
/// Height and width of a crop. A crop costs a quarter of the time of a whole picture and contains most of a face.
const DETAIL: usize = 32;
/// Maximal distance between the centres of face and crop along each axis, in pixels.
const JITTER: f32 = 14.0;
const SEED: u64 = 11;

/// Kind of the frames of an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Crops of single pictures, which teach nearly everything at a fraction of the cost.
    Stills,
    /// Crops of clips, which teach the temporal layers.
    Clips,
    /// Whole clips, which teach the attention over a whole frame.
    WholeClips,
}

/// Order of the stages in a round of training.
#[derive(Clone, Copy, Debug)]
pub struct Curriculum {
    /// Fraction of the updates, from the beginning, with crops of single pictures.
    pub stills: f64,
    /// Fraction of the updates, from the beginning, with crops of single pictures or clips. The rest sees whole clips.
    pub details: f64,
    /// Fraction of the crops that lie anywhere in the picture instead of around the face.
    pub anywhere: f32,
}

/// A part of a batch.
#[derive(Debug)]
pub struct Part {
    /// Kind of the frames.
    pub stage: Stage,
    /// `[3, T, H, W]` in [-1, 1].
    pub frames: Vec<f32>,
    /// Shape of the frames.
    pub shape: [usize; 4],
    /// Seed of the noise on the latents.
    pub seed: u64,
}

impl Curriculum {
    /// Returns the stage at the fraction `done` of the updates.
    fn stage(&self, done: f64) -> Stage {
        if done < self.stills {
            Stage::Stills
        } else if done < self.details {
            Stage::Clips
        } else {
            Stage::WholeClips
        }
    }

    /// Returns the batch of update `step`, at the fraction `done` of the updates. It has `parts` parts of `size`
    /// pictures or of one clip each.
    pub fn batch(&self, done: f64, step: u64, parts: usize, size: usize) -> Vec<Part> {
        let stage = self.stage(done);
        (0..parts as u64).into_par_iter().map(|part| self.draw(stage, step, part, size)).collect()
    }

    fn draw(&self, stage: Stage, step: u64, part: u64, size: usize) -> Part {
        let mut uniform = Noise::new(SEED).uniform(Purpose::Synthetic, step, part);
        let seed = step * 64 + part;
        let mut identity = || (unit_uniform(&mut uniform) * IDENTITIES) as u64;
        let pictures: Vec<_> = match stage {
            Stage::Stills => (0..size as u64).flat_map(|i| still(identity(), seed * 64 + i, i)).take(size).collect(),
            Stage::Clips | Stage::WholeClips => {
                // Every second update uses five frames (two chunks) instead of nine (three chunks), which is cheaper.
                let frames = if step.is_multiple_of(2) { FRAMES } else { FRAMES.div_ceil(2) };
                let clip = face::clip(identity(), seed, FRAMES, [SIDE; 2]);
                clip.pictures.into_iter().take(frames).collect()
            }
        };
        // Every still is cropped separately; the frames of a clip share the crop.
        let mut place = |picture: &Picture| self.place(picture, &mut uniform);
        let (places, side) = match stage {
            Stage::Stills => (pictures.iter().map(place).collect(), DETAIL),
            Stage::Clips => (vec![place(&pictures[0]); pictures.len()], DETAIL),
            Stage::WholeClips => (vec![[0, 0]; pictures.len()], SIDE),
        };
        let shape = [3, pictures.len(), side, side];
        Part { stage, frames: by_channel(&pictures, &places, side), shape, seed }
    }

    /// Returns row and column of the picture at which a crop begins.
    fn place(&self, picture: &Picture, uniform: &mut impl FnMut() -> f32) -> [usize; 2] {
        // A fraction of 0 draws nothing from `uniform`, so that the first round of the published VAE is reproducible.
        let anywhere = self.anywhere > 0.0 && unit_uniform(uniform) < self.anywhere;
        [1, 0].map(|axis| {
            if anywhere {
                return (unit_uniform(uniform) * (SIDE - DETAIL + 1) as f32) as usize;
            }
            let middle = (picture.bounds[axis] + picture.bounds[axis + 2]) / 2.0;
            let start = middle + JITTER * uniform() - DETAIL as f32 / 2.0;
            (start.max(0.0) as usize).min(SIDE - DETAIL)
        })
    }
}

/// Returns a picture at a random angle, or the last frame of a clip, where its expression and motion are strongest.
fn still(identity: u64, seed: u64, i: u64) -> Option<Picture> {
    if i.is_multiple_of(2) {
        let mut uniform = Noise::new(SEED).uniform(Purpose::Shuffle, seed, 0);
        return Some(face::render(&Identity::new(identity), &face::random_shot(&mut uniform), [SIDE; 2]));
    }
    face::clip(identity, seed, 2, [SIDE; 2]).pictures.pop()
}

/// Cuts squares of `side` pixels out of pictures `[3, H, W]`, starting at the given rows and columns, and returns them
/// as one volume `[3, T, side, side]`.
fn by_channel(pictures: &[Picture], places: &[[usize; 2]], side: usize) -> Vec<f32> {
    let mut volume = Vec::with_capacity(3 * pictures.len() * side * side);
    for c in 0..3 {
        for (picture, [top, left]) in pictures.iter().zip(places) {
            let rows = picture.pixels[c * SIDE * SIDE..][..SIDE * SIDE].chunks_exact(SIDE);
            rows.skip(*top).take(side).for_each(|row| volume.extend(&row[*left..][..side]));
        }
    }
    volume
}

/// Returns normal values of the given standard deviation.
pub fn noise(seed: u64, count: usize, deviation: f32) -> Vec<f32> {
    let mut uniform = Noise::new(SEED).uniform(Purpose::Latents, seed, 0);
    (0..count).map(|_| deviation * gaussian(&mut uniform)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLIPS: Curriculum = Curriculum { stills: 0.0, details: 1.0, anywhere: 0.0 };

    #[test]
    fn details_are_squares_of_the_pictures_and_hold_the_middle_of_the_face() {
        let picture = face::clip(1, 1, 1, [SIDE; 2]).pictures.remove(0);
        let volume = by_channel(&[picture.clone(), picture.clone()], &[[0, 0], [5, 7]], DETAIL);
        let pixel = |c: usize, row: usize, column: usize| picture.pixels[(c * SIDE + row) * SIDE + column];
        for (c, row, column) in [(0, 0, 0), (1, 31, 0), (2, 20, 31)] {
            let at = |t: usize| volume[((c * 2 + t) * DETAIL + row) * DETAIL + column];
            assert_eq!((at(0), at(1)), (pixel(c, row, column), pixel(c, row + 5, column + 7)));
        }
        let mut uniform = Noise::new(1).uniform(Purpose::Synthetic, 0, 0);
        let mut places = |anywhere| -> Vec<[usize; 2]> {
            let curriculum = Curriculum { anywhere, ..CLIPS };
            (0..200).map(|_| curriculum.place(&picture, &mut uniform)).collect()
        };
        let (around, anywhere) = (places(0.0), places(1.0));
        for axis in [0, 1] {
            let middle = ((picture.bounds[axis] + picture.bounds[axis + 2]) / 2.0) as usize;
            assert!(around.iter().all(|place| (place[1 - axis]..place[1 - axis] + DETAIL).contains(&middle)));
            assert!(around.iter().any(|place| *place != around[0]));
            let starts: Vec<usize> = anywhere.iter().map(|place| place[axis]).collect();
            assert_eq!((starts.iter().min(), starts.iter().max()), (Some(&0), Some(&(SIDE - DETAIL))));
        }
    }

    #[test]
    fn a_batch_repeats_and_has_the_shape_of_its_stage() {
        let stages = [(Stage::Stills, [3, 2, DETAIL, DETAIL]), (Stage::Clips, [3, FRAMES, DETAIL, DETAIL])];
        for (stage, shape) in stages.into_iter().chain([(Stage::WholeClips, [3, FRAMES, SIDE, SIDE])]) {
            let [one, again] = [0, 1].map(|_| [0, 1].map(|part| CLIPS.draw(stage, 4, part, 2)));
            for (one, again) in one.iter().zip(&again) {
                assert_eq!((one.shape, one.frames.len()), (shape, shape.iter().product()));
                assert_eq!(one.frames, again.frames);
            }
            assert_ne!(one[0].frames, one[1].frames);
        }
    }

    #[test]
    fn a_curriculum_goes_from_stills_to_clips_to_whole_clips() {
        let curriculum = Curriculum { stills: 0.5, details: 0.75, anywhere: 0.0 };
        let stages = [0.0, 0.49, 0.5, 0.74, 0.75, 0.99].map(|done| curriculum.stage(done));
        use Stage::{Clips, Stills, WholeClips};
        assert_eq!(stages, [Stills, Stills, Clips, Clips, WholeClips, WholeClips]);
    }
}
