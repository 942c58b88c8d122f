//! Accuracy of deciding whether two pictures show the same person, and the similarity of faces in frames and their
//! copies.

use roll_core::{Grad, Result};
use roll_rewards::insightface::FaceNetworks;
use serde::Serialize;

use super::{FIRST_HELD_OUT, Look, picture, rounded};
use crate::detector::SIDE;

/// Number of people that the threshold is chosen on. The figures are measured on the same number of other people.
const PEOPLE: u64 = 300;
/// Number of pictures per person.
const SHOTS: u64 = 4;

/// The figures of an embedder.
#[derive(Debug, Serialize)]
pub struct Figures {
    /// Number of pairs of pictures of the same person, and of different people.
    pairs: [usize; 2],
    /// Fraction of pairs classified correctly at `threshold`. Pairs with a picture without a detected face count as
    /// wrong.
    accuracy: f64,
    /// Cosine threshold that is best on a separate set of people.
    threshold: f64,
    /// Mean cosine of two pictures of the same person.
    same: f64,
    /// 5th percentile of the cosines of the same person.
    same_low: f64,
    /// Mean cosine of pictures of different people.
    different: f64,
    /// 95th percentile of the cosines of different people.
    different_high: f64,
}

/// Measures `networks` on pictures of the given look.
pub fn measure(networks: &FaceNetworks, look: Look) -> Result<Figures> {
    let threshold = best_threshold(&pairs(networks, FIRST_HELD_OUT..FIRST_HELD_OUT + PEOPLE, look)?);
    let measured = pairs(networks, FIRST_HELD_OUT + PEOPLE..FIRST_HELD_OUT + 2 * PEOPLE, look)?;
    let cosines = |same: bool| -> Vec<f64> {
        let mut cosines: Vec<f64> = measured.iter().filter(|p| p.same == same).filter_map(|p| p.cosine).collect();
        cosines.sort_by(f64::total_cmp);
        cosines
    };
    let (same, different) = (cosines(true), cosines(false));
    let mean = |values: &[f64]| rounded(values.iter().sum::<f64>() / values.len().max(1) as f64);
    let percentile = |values: &[f64], fraction: f64| {
        rounded(values.get((fraction * values.len() as f64) as usize).copied().unwrap_or(f64::NAN))
    };
    Ok(Figures {
        pairs: [true, false].map(|same| measured.iter().filter(|p| p.same == same).count()),
        accuracy: rounded(accuracy(&measured, threshold)),
        threshold: rounded(threshold),
        same: mean(&same),
        same_low: percentile(&same, 0.05),
        different: mean(&different),
        different_high: percentile(&different, 0.95),
    })
}

/// Two pictures: whether they show the same person, and the cosine of their embeddings. The cosine is `None` if a face
/// is missing.
struct Pair {
    same: bool,
    cosine: Option<f64>,
}

/// Returns all pairs of pictures of each person, and the same number of pairs of that person and the next.
fn pairs(networks: &FaceNetworks, people: std::ops::Range<u64>, look: Look) -> Result<Vec<Pair>> {
    let embeddings = people
        .clone()
        .map(|person| embed(networks, &(0..SHOTS).map(|s| picture(person, s, look).pixels).collect::<Vec<_>>()))
        .collect::<Result<Vec<_>>>()?;
    let mut pairs = vec![];
    for (index, own) in embeddings.iter().enumerate() {
        let next = &embeddings[(index + 1) % embeddings.len()];
        for a in 0..own.len() {
            for b in a + 1..own.len() {
                pairs.push(Pair { same: true, cosine: cosine(&own[a], &own[b]) });
                pairs.push(Pair { same: false, cosine: cosine(&own[a], &next[b]) });
            }
        }
    }
    Ok(pairs)
}

/// Returns the similarity of the largest faces of frames and their copies: the mean cosine of their embeddings. A copy
/// without a detected face counts as 0; a frame without a detected face is skipped.
pub fn likeness(networks: &FaceNetworks, frames: &[Vec<f32>], copies: &[Vec<f32>]) -> Result<f64> {
    let (frames, copies) = (embed(networks, frames)?, embed(networks, copies)?);
    let seen = frames.iter().zip(&copies).filter(|(frame, _)| frame.is_some());
    let cosines: Vec<f64> = seen.map(|(frame, copy)| cosine(frame, copy).unwrap_or(0.0)).collect();
    Ok(cosines.iter().sum::<f64>() / cosines.len().max(1) as f64)
}

/// Returns the embedding of the largest face of each frame, with the reward's detection and alignment.
fn embed(networks: &FaceNetworks, frames: &[Vec<f32>]) -> Result<Vec<Option<Vec<f32>>>> {
    let numbered: Vec<(usize, &[f32])> = frames.iter().map(Vec::as_slice).enumerate().collect();
    let mut embeddings = vec![None; frames.len()];
    for face in networks.largest_faces(&numbered, [SIDE; 2], Grad::Skip)? {
        let crop = face.crop.forward(&frames[face.frame]);
        embeddings[face.frame] = Some(networks.embedder().embed(crop, Grad::Skip)?.values);
    }
    Ok(embeddings)
}

fn cosine(a: &Option<Vec<f32>>, b: &Option<Vec<f32>>) -> Option<f64> {
    let (a, b) = (a.as_ref()?, b.as_ref()?);
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
    Some(dot(a, b) / (dot(a, a) * dot(b, b)).sqrt().max(1e-12))
}

fn accuracy(pairs: &[Pair], threshold: f64) -> f64 {
    let right = pairs.iter().filter(|p| p.cosine.is_some_and(|c| (c >= threshold) == p.same)).count();
    right as f64 / pairs.len().max(1) as f64
}

/// Returns the threshold, a multiple of 0.005, that classifies the most pairs correctly: the largest if there
/// are several.
fn best_threshold(pairs: &[Pair]) -> f64 {
    let steps = (-200..=200).map(|i| f64::from(i) / 200.0);
    steps.map(|t| (accuracy(pairs, t), t)).max_by(|a, b| a.0.total_cmp(&b.0)).map_or(0.0, |best| best.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_threshold_separates_the_pairs_and_a_missing_face_counts_as_wrong() {
        let pair = |same, cosine| Pair { same, cosine };
        let mut pairs = vec![pair(true, Some(0.8)), pair(true, Some(0.5)), pair(false, Some(0.3))];
        let threshold = best_threshold(&pairs);
        assert!((0.3..=0.5).contains(&threshold), "{threshold}");
        assert_eq!(accuracy(&pairs, threshold), 1.0);
        pairs.push(pair(true, None));
        assert_eq!(accuracy(&pairs, threshold), 0.75);
    }
}
