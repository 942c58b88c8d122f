//! The elements of latents that enter a loss.

use roll_core::{Error, Result};

/// The elements of latents that enter a loss: all elements except those of the first frames that the model is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LossMask {
    /// Number of elements of the latents.
    len: usize,
    /// Number of elements of one channel.
    channel: usize,
    /// Number of elements that do not enter the loss, at the beginning of each channel.
    skipped: usize,
}

impl LossMask {
    /// A mask that contains all of `len` elements.
    pub fn all(len: usize) -> Self {
        Self { len, channel: len.max(1), skipped: 0 }
    }

    /// A mask that contains all but the first `known` frames of latents `[C, T, H, W]`. Fails if nothing is left.
    pub fn after(known: usize, shape: &[usize]) -> Result<Self> {
        let [channels, frames, height, width] = *shape else {
            return Err(Error::shape("latents", "[C, T, H, W]", shape));
        };
        if frames <= known || channels * height * width == 0 {
            let problem = format!("latents of {frames} frames, of which the model is given {known}: nothing is left");
            return Err(Error::Unsupported(problem));
        }
        let frame = height * width;
        Ok(Self { len: channels * frames * frame, channel: frames * frame, skipped: known * frame })
    }

    /// Number of elements that enter the loss.
    pub fn count(&self) -> usize {
        self.len / self.channel * (self.channel - self.skipped)
    }

    /// Positions of the elements that enter the loss, ascending.
    pub fn positions(&self) -> impl Iterator<Item = usize> + use<> {
        let Self { len, channel, skipped } = *self;
        (0..len).step_by(channel).flat_map(move |start| start + skipped..start + channel)
    }

    /// The mean of `value` over the positions of the mask.
    pub fn mean(&self, value: impl FnMut(usize) -> f64) -> f64 {
        self.positions().map(value).sum::<f64>() / self.count() as f64
    }

    /// `value` at the positions of the mask, 0 elsewhere.
    pub fn map(&self, mut value: impl FnMut(usize) -> f64) -> Vec<f64> {
        let mut values = vec![0.0; self.len];
        self.positions().for_each(|i| values[i] = value(i));
        values
    }

    /// Fails unless a tensor of `len` elements has the size of the latents.
    pub(crate) fn fits(&self, what: &str, len: usize) -> Result<()> {
        match len == self.len {
            true => Ok(()),
            false => Err(Error::shape(what, format!("{} elements", self.len), &[len])),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_known_frames_of_every_channel_do_not_count() {
        let mask = LossMask::after(1, &[2, 3, 1, 2]).unwrap();
        assert_eq!(mask.positions().collect::<Vec<_>>(), [2, 3, 4, 5, 8, 9, 10, 11]);
        assert_eq!((mask.count(), mask.mean(|i| i as f64)), (8, 6.5));
        assert_eq!(LossMask::after(0, &[2, 3, 1, 2]).unwrap().count(), 12);
        assert_eq!(LossMask::all(5).positions().count(), 5);
        assert!(LossMask::after(1, &[2, 1, 4, 4]).unwrap_err().to_string().contains("nothing is left"));
        assert!(LossMask::after(1, &[2, 4]).is_err());
    }
}
