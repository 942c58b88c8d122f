//! Assignment of anchors to faces, and the targets of the anchors.

use super::SIDE;

/// Pixels between anchors, per level.
pub const STRIDES: [usize; 3] = roll_rewards::insightface::scrfd::STRIDES;
/// Anchors at each position.
pub const PER_POSITION: usize = 2;
/// Sides in pixels of the faces that the anchors of each level detect.
const SIZES: [[f32; 2]; 3] = [[11.0, 16.0], [23.0, 33.0], [46.0, 64.0]];
/// An anchor is positive for a face if their sizes differ by at most this factor ...
const RATIO: f32 = 1.45;
/// ... and their centres by at most this many strides along each axis.
const NEAR: f32 = 0.55;
/// Limits (size factor, strides) up to which a negative anchor is ignored by the score's loss.
const UNDECIDED: (f32, f32) = (2.2, 1.2);

/// Returns the number of anchors of a level.
pub fn per_level(stride: usize) -> usize {
    (SIDE / stride).pow(2) * PER_POSITION
}

/// Returns the number of anchors of all levels.
pub fn count() -> usize {
    STRIDES.into_iter().map(per_level).sum()
}

/// A face in a picture, in pixels.
#[derive(Clone, Copy, Debug)]
pub struct Truth {
    /// `[x1, y1, x2, y2]`.
    pub bounds: [f32; 4],
    /// Left eye, right eye, nose, left and right corner of the mouth, as seen by the viewer.
    pub landmarks: [[f32; 2]; 5],
}

/// Targets of the anchors, ordered by picture, then level, then anchor.
#[derive(Clone, Debug, Default)]
pub struct Targets {
    /// 1 for a positive anchor, else 0.
    pub face: Vec<f32>,
    /// 1 for an anchor whose score is trained, 0 for an ignored anchor.
    pub counts: Vec<f32>,
    /// Stride divided by the side of the face for a positive anchor, else 0: turns errors in strides into fractions of
    /// the face.
    pub share: Vec<f32>,
    /// Distances to the four sides of the box, in strides; 4 per anchor.
    pub boxes: Vec<f32>,
    /// Offsets of the landmarks, in strides; 10 per anchor.
    pub landmarks: Vec<f32>,
}

impl Targets {
    /// Adds a picture with one face or none.
    pub fn push(&mut self, truth: Option<&Truth>) {
        let Some(truth) = truth else {
            let n = count();
            self.face.extend(vec![0.0; n]);
            self.counts.extend(vec![1.0; n]);
            self.share.extend(vec![0.0; n]);
            self.boxes.extend(vec![0.0; 4 * n]);
            self.landmarks.extend(vec![0.0; 10 * n]);
            return;
        };
        let [x1, y1, x2, y2] = truth.bounds;
        let side = ((x2 - x1) * (y2 - y1)).max(1.0).sqrt();
        let centre = [(x1 + x2) / 2.0, (y1 + y2) / 2.0];
        // A face that is far from every anchor still has one positive anchor.
        let nearest = all().map(|a| a.distance(side, centre)).fold(f32::INFINITY, f32::min);
        for anchor in all() {
            let (ratio, away) = anchor.fit(side, centre);
            let answers = ratio <= RATIO && away <= NEAR || anchor.distance(side, centre) <= nearest;
            let decided = answers || ratio > UNDECIDED.0 || away > UNDECIDED.1;
            let s = anchor.stride;
            let [x, y] = anchor.at;
            self.face.push(f32::from(u8::from(answers)));
            self.counts.push(f32::from(u8::from(decided)));
            self.share.push(if answers { s / side } else { 0.0 });
            self.boxes.extend([x - x1, y - y1, x2 - x, y2 - y].map(|d| d / s));
            self.landmarks.extend(truth.landmarks.iter().flat_map(|p| [(p[0] - x) / s, (p[1] - y) / s]));
        }
    }
}

struct Anchor {
    stride: f32,
    size: f32,
    at: [f32; 2],
}

impl Anchor {
    /// Returns the factor between the sizes and the distance of the centres along the worse axis, in strides.
    fn fit(&self, side: f32, centre: [f32; 2]) -> (f32, f32) {
        let away = (centre[0] - self.at[0]).abs().max((centre[1] - self.at[1]).abs());
        ((side / self.size).max(self.size / side), away / self.stride)
    }

    fn distance(&self, side: f32, centre: [f32; 2]) -> f32 {
        let (ratio, away) = self.fit(side, centre);
        2.0 * ratio.ln() + away
    }
}

/// Returns all anchors, in the order of the network's outputs.
fn all() -> impl Iterator<Item = Anchor> {
    STRIDES.into_iter().zip(SIZES).flat_map(|(stride, sizes)| {
        let columns = SIDE / stride;
        (0..columns * columns * PER_POSITION).map(move |index| {
            let position = index / PER_POSITION;
            let at = [position % columns * stride, position / columns * stride].map(|v| v as f32);
            Anchor { stride: stride as f32, size: sizes[index % PER_POSITION], at }
        })
    })
}

#[cfg(test)]
mod tests {
    use roll_rewards::insightface::scrfd::{Level, decode};

    use super::*;

    #[test]
    fn what_answering_anchors_should_say_decodes_to_the_face() {
        for (bounds, offset) in
            [([20.0, 10.0, 48.0, 44.0], 0.0), ([3.0, 30.0, 15.0, 42.0], 0.3), ([1.0, 0.0, 64.0, 63.0], 1.0)]
        {
            let landmarks = std::array::from_fn(|i| [bounds[0] + 2.0 * i as f32 + offset, bounds[1] + 3.0]);
            let mut targets = Targets::default();
            targets.push(Some(&Truth { bounds, landmarks }));
            assert_eq!(targets.face.len(), count());
            let (mut first, mut found) = (0, 0);
            for stride in STRIDES {
                let range = first..first + per_level(stride);
                let level = Level {
                    stride,
                    scores: &targets.face[range.clone()],
                    boxes: &targets.boxes[4 * range.start..4 * range.end],
                    landmarks: &targets.landmarks[10 * range.start..10 * range.end],
                };
                for face in decode(level, SIDE, 0.5).unwrap() {
                    found += 1;
                    assert!(face.bounds.iter().zip(bounds).all(|(a, b)| (a - b).abs() < 1e-4));
                    assert!(
                        face.landmarks
                            .iter()
                            .flatten()
                            .zip(landmarks.iter().flatten())
                            .all(|(a, b)| (a - b).abs() < 1e-4)
                    );
                }
                first = range.end;
            }
            assert!((1..=12).contains(&found), "{found} anchors");
        }
    }

    #[test]
    fn no_anchor_answers_where_there_is_no_face() {
        let mut targets = Targets::default();
        targets.push(None);
        assert!(targets.face.iter().all(|v| *v == 0.0) && targets.counts.iter().all(|v| *v == 1.0));
    }
}
