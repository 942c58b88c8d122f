//! What the ranks evaluated, put together.

use roll_core::{Communicator, Error, Evaluated, Rank, Result, Tensor, Video, communicator};
use serde::{Deserialize, Serialize};

/// What all ranks evaluated, one rank after another: `clips` in all. Videos come to rank 0 alone, one at a time.
pub(super) fn evaluated(ranks: &dyn Communicator, own: Vec<Evaluated>, clips: usize) -> Result<Vec<Evaluated>> {
    if ranks.world_size() == 1 {
        return Ok(own);
    }
    let told: Vec<Told> = own.iter().map(Told::of).collect();
    let mut videos = own.into_iter().map(|evaluated| evaluated.video);
    let mut all = Vec::new();
    for (rank, told) in communicator::join(ranks, &told)?.into_iter().enumerate() {
        for told in told {
            let own = if rank == ranks.rank().0 { videos.next().flatten() } else { None };
            let video = match &told.video {
                Some(shape) if rank > 0 => sent(ranks, Rank(rank), own, shape)?,
                _ => own,
            };
            all.push(told.with(video));
        }
    }
    match all.len() == clips {
        true => Ok(all),
        false => Err(Error::Misuse(format!("the algorithm evaluated {} clips of {clips}", all.len()))),
    }
}

/// A clip's numbers as their bits: JSON, which carries them, has no NaN.
#[derive(Serialize, Deserialize)]
struct Told {
    origin: String,
    scores: Vec<Option<u64>>,
    kl: u64,
    /// Shape of the frames, and the bits of the frame rate.
    video: Option<([usize; 4], u64)>,
}

impl Told {
    fn of(evaluated: &Evaluated) -> Self {
        let shape = |video: &Video| {
            let [frames, height, width] = video.dims();
            ([frames, 3, height, width], video.fps().to_bits())
        };
        Self {
            origin: evaluated.origin.clone(),
            scores: evaluated.scores.iter().map(|score| score.map(f64::to_bits)).collect(),
            kl: evaluated.kl.to_bits(),
            video: evaluated.video.as_ref().map(shape),
        }
    }

    fn with(self, video: Option<Video>) -> Evaluated {
        let scores = self.scores.into_iter().map(|score| score.map(f64::from_bits)).collect();
        Evaluated { origin: self.origin, scores, kl: f64::from_bits(self.kl), video }
    }
}

/// Brings the video of `from` to rank 0; the others have none of it afterwards.
fn sent(
    ranks: &dyn Communicator,
    from: Rank,
    own: Option<Video>,
    (shape, fps): &([usize; 4], u64),
) -> Result<Option<Video>> {
    let mut frames = match own {
        Some(video) => video.frames().f32s()?.to_vec(),
        None => vec![0.0; shape.iter().product()],
    };
    ranks.broadcast(&mut frames, from)?;
    match ranks.rank() {
        Rank(0) => Ok(Some(Video::new(Tensor::new(frames, *shape)?, f64::from_bits(*fps))?)),
        _ => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use roll_core::ThreadRanks;

    use super::*;

    fn clip(i: usize) -> Evaluated {
        let frames = (0..2 * 3 * (1 + i)).map(|v| (v + i) as f32 / 7.0).collect::<Vec<_>>();
        let video = Video::new(Tensor::new(frames, [2, 3, 1, 1 + i]).unwrap(), 8.0 + i as f64).unwrap();
        let score = [0.1 + 0.2, f64::NAN, -1e-300][i % 3];
        Evaluated {
            origin: format!("row {i}"),
            scores: vec![Some(score), None],
            kl: 1.0 / (3.0 + i as f64),
            video: (i != 1).then_some(video),
        }
    }

    type Bits = (String, Vec<Option<u64>>, u64, Option<Vec<u32>>);

    fn bits(all: &[Evaluated], videos: bool) -> Vec<Bits> {
        let frames = |video: &Video| video.frames().f32s().unwrap().iter().map(|v| v.to_bits()).collect();
        let one = |e: &Evaluated| {
            let told = Told::of(e);
            (told.origin, told.scores, told.kl, e.video.as_ref().filter(|_| videos).map(frames))
        };
        all.iter().map(one).collect()
    }

    #[test]
    fn the_parts_of_ranks_join_to_the_bits_of_the_whole_and_rank_0_has_the_videos() {
        let whole: Vec<Evaluated> = (0..5).map(clip).collect();
        for world in [1, 2, 3, 8] {
            let found = ThreadRanks::run(world, Duration::from_secs(60), |ranks| {
                let rank = ranks.rank().0;
                let own = (rank * 5 / world..(rank + 1) * 5 / world).map(clip).collect();
                evaluated(ranks.as_ref(), own, 5)
            });
            for (rank, found) in found.into_iter().enumerate() {
                let found = found.unwrap();
                assert_eq!(bits(&found, false), bits(&whole, false), "rank {rank} of {world}");
                if rank == 0 {
                    assert_eq!(bits(&found, true), bits(&whole, true), "{world} ranks");
                    assert!(found.iter().zip(&whole).all(|(a, b)| a.video.is_some() == b.video.is_some()));
                }
            }
        }
    }

    #[test]
    fn a_clip_too_few_is_an_error_on_every_rank() {
        let found = ThreadRanks::run(2, Duration::from_secs(60), |ranks| evaluated(ranks.as_ref(), vec![clip(0)], 3));
        assert!(found.iter().all(|found| found.as_ref().is_err_and(|e| e.to_string().contains("2 clips of 3"))));
    }
}
