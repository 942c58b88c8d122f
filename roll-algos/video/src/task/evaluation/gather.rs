//! The evaluations of all ranks, put together.

use roll_core::{Communicator, Evaluated, Rank, Result, Tensor, Video, communicator};
use serde::{Deserialize, Serialize};

/// Gathers the evaluated clip of each rank with its position in the set, in the order of the ranks. `my_clip` is `None`
/// on a rank without further clips. Its [`Evaluated`] is `None` if the algorithm has no evaluation; the result is then
/// `None`. Videos are sent to rank 0 alone, one at a time.
pub(super) fn gather_clips(
    ranks: &dyn Communicator,
    my_clip: Option<(usize, Option<Evaluated>)>,
) -> Result<Option<Vec<(usize, Evaluated)>>> {
    let has_evaluation = my_clip.as_ref().is_none_or(|(_, evaluated)| evaluated.is_some());
    let my_evaluated = my_clip.and_then(|(position, evaluated)| Some((position, evaluated?)));
    if ranks.world_size() == 1 {
        return Ok(has_evaluation.then(|| my_evaluated.into_iter().collect()));
    }
    let my_bits = my_evaluated.as_ref().map(|(position, evaluated)| (*position, ClipBits::of(evaluated)));
    let clips = communicator::join(ranks, &(has_evaluation, my_bits))?;
    if clips.iter().any(|(has_evaluation, _)| !has_evaluation) {
        return Ok(None);
    }
    let mut my_video = my_evaluated.and_then(|(_, evaluated)| evaluated.video);
    let mut all = Vec::new();
    for (rank, (_, clip)) in clips.into_iter().enumerate() {
        let Some((position, bits)) = clip else { continue };
        let video_here = if rank == ranks.rank().0 { my_video.take() } else { None };
        let video = match &bits.video {
            Some(shape_and_fps) if rank > 0 => send_to_rank_0(ranks, Rank(rank), video_here, shape_and_fps)?,
            // The video of rank 0, which needs no sending, or a clip without a video.
            _ => video_here,
        };
        all.push((position, bits.with_video(video)));
    }
    Ok(Some(all))
}

/// The numbers of a clip as their bits, because they are sent as JSON, which has no NaN.
#[derive(Serialize, Deserialize)]
struct ClipBits {
    origin: String,
    scores: Vec<Option<u64>>,
    kl: u64,
    /// Shape of the frames, `[T, 3, H, W]`, and the bits of the frame rate.
    video: Option<([usize; 4], u64)>,
}

impl ClipBits {
    fn of(evaluated: &Evaluated) -> Self {
        let shape_and_fps = |video: &Video| {
            let [frames, height, width] = video.dims();
            ([frames, 3, height, width], video.fps().to_bits())
        };
        Self {
            origin: evaluated.origin.clone(),
            scores: evaluated.scores.iter().map(|score| score.map(f64::to_bits)).collect(),
            kl: evaluated.kl.to_bits(),
            video: evaluated.video.as_ref().map(shape_and_fps),
        }
    }

    fn with_video(self, video: Option<Video>) -> Evaluated {
        let scores = self.scores.into_iter().map(|score| score.map(f64::from_bits)).collect();
        Evaluated { origin: self.origin, scores, kl: f64::from_bits(self.kl), video }
    }
}

/// Sends the video of rank `from` to rank 0, by a broadcast, which the communicator has in place of a send to one rank.
/// `video_here` is the video on rank `from`, `None` on other ranks. The result is `None` on all ranks but 0.
fn send_to_rank_0(
    ranks: &dyn Communicator,
    from: Rank,
    video_here: Option<Video>,
    (shape, fps): &([usize; 4], u64),
) -> Result<Option<Video>> {
    let mut frames = match video_here {
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
            let bits = ClipBits::of(e);
            (bits.origin, bits.scores, bits.kl, e.video.as_ref().filter(|_| videos).map(frames))
        };
        all.iter().map(one).collect()
    }

    #[test]
    fn gathers_exact_bits_and_sends_videos_to_rank_0() {
        for world in [1, 2, 3, 8] {
            // Every rank but the last has a clip.
            let clips = if world == 1 { 1 } else { world - 1 };
            let whole: Vec<Evaluated> = (0..clips).map(clip).collect();
            let found = ThreadRanks::run(world, Duration::from_secs(60), |ranks| {
                let rank = ranks.rank().0;
                let own = (rank < clips).then(|| (10 + rank, Some(clip(rank))));
                gather_clips(ranks.as_ref(), own)
            });
            for (rank, found) in found.into_iter().enumerate() {
                let (positions, found): (Vec<usize>, Vec<Evaluated>) = found.unwrap().unwrap().into_iter().unzip();
                assert!(positions.into_iter().eq(10..10 + clips));
                assert_eq!(bits(&found, false), bits(&whole, false), "rank {rank} of {world}");
                if rank == 0 {
                    assert_eq!(bits(&found, true), bits(&whole, true), "{world} ranks");
                    assert!(found.iter().zip(&whole).all(|(a, b)| a.video.is_some() == b.video.is_some()));
                }
            }
        }
    }

    #[test]
    fn an_algorithm_without_evaluation_returns_none_on_every_rank() {
        let found = ThreadRanks::run(2, Duration::from_secs(60), |ranks| {
            let own = (ranks.rank().0 == 0).then_some((0, None));
            gather_clips(ranks.as_ref(), own)
        });
        assert!(found.into_iter().all(|found| found.unwrap().is_none()));
    }
}
