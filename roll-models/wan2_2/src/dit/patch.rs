//! Conversion between latents `[C, T, H, W]` and tokens, on the host: a few megabytes are moved once per call.

use roll_core::{Error, Result, Tensor};

/// Number of patches along each axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Number of patches per axis, `[t, h, w]`.
    pub patches: [usize; 3],
    patch: [usize; 3],
}

/// Memory order of a token's elements. Conv3d weights are `[out, c, t, h, w]`, the head's output is `[t, h, w, c]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Channels first, as input tokens have them.
    ChannelFirst,
    /// Channels last, as output tokens have them.
    ChannelLast,
}

impl Grid {
    /// The grid of latents of shape `[C, T, H, W]`. Fails if the patch does not divide every axis.
    pub fn new(latents: &[usize], patch: [usize; 3]) -> Result<Self> {
        match *latents {
            [_, t, h, w] if [t, h, w].iter().zip(patch).all(|(n, p)| *n > 0 && n.is_multiple_of(p)) => {
                Ok(Self { patches: [t / patch[0], h / patch[1], w / patch[2]], patch })
            }
            _ => Err(Error::shape("latents", format!("[C, T, H, W] divisible by the patch {patch:?}"), latents)),
        }
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.patches.iter().product()
    }

    /// Number of tokens of one latent frame.
    pub fn tokens_per_frame(&self) -> usize {
        self.patches[1] * self.patches[2]
    }

    /// Cuts latents `[C, T, H, W]` into tokens `[tokens, C * patch]`.
    pub fn to_tokens(&self, latents: &Tensor, order: Order) -> Result<Tensor> {
        let channels = latents.shape()[0];
        let source = latents.f32s()?;
        let mut tokens = vec![0.0; source.len()];
        self.visit(channels, order, |token, latent| tokens[token] = source[latent]);
        Tensor::new(tokens, [self.tokens(), source.len() / self.tokens()])
    }

    /// Reassembles tokens `[tokens, C * patch]` to latents `[C, T, H, W]`.
    pub fn to_latents(&self, tokens: &Tensor, order: Order) -> Result<Tensor> {
        let volume: usize = self.patch.iter().product();
        let channels = tokens.shape()[1] / volume;
        let source = tokens.f32s()?;
        let mut latents = vec![0.0; source.len()];
        self.visit(channels, order, |token, latent| latents[latent] = source[token]);
        let [t, h, w] = [0, 1, 2].map(|i| self.patches[i] * self.patch[i]);
        Tensor::new(latents, [channels, t, h, w])
    }

    /// Calls `pair` with the indices of each element in token order and in latent order. Rows of latents follow each
    /// other as their tokens do: both are read and written in parts that fit into a cache.
    fn visit(&self, channels: usize, order: Order, mut pair: impl FnMut(usize, usize)) {
        let ([gt, gh, gw], [pt, ph, pw]) = (self.patches, self.patch);
        let size = channels * pt * ph * pw;
        for (f, y) in (0..gt).flat_map(|f| (0..gh).map(move |y| (f, y))) {
            for c in 0..channels {
                for (i, j) in (0..pt).flat_map(|i| (0..ph).map(move |j| (i, j))) {
                    let latent = (((c * gt + f) * pt + i) * gh * ph + y * ph + j) * gw * pw;
                    let inner = (i * ph + j) * pw;
                    let (element, step) = match order {
                        Order::ChannelFirst => (c * pt * ph * pw + inner, 1),
                        Order::ChannelLast => (inner * channels + c, channels),
                    };
                    let token = (f * gh + y) * gw * size + element;
                    for x in 0..gw {
                        for k in 0..pw {
                            pair(token + x * size + k * step, latent + x * pw + k);
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_round_trip_to_latents() {
        let latents = Tensor::new((0..3 * 2 * 4 * 6).map(|i| i as f32).collect::<Vec<_>>(), [3, 2, 4, 6]).unwrap();
        let grid = Grid::new(latents.shape(), [1, 2, 2]).unwrap();
        assert_eq!(grid.tokens(), 2 * 2 * 3);
        for order in [Order::ChannelFirst, Order::ChannelLast] {
            let tokens = grid.to_tokens(&latents, order).unwrap();
            assert_eq!(tokens.shape(), [12, 12]);
            let back = grid.to_latents(&tokens, order).unwrap();
            assert_eq!(back.f32s().unwrap(), latents.f32s().unwrap());
        }
        let first = grid.to_tokens(&latents, Order::ChannelFirst).unwrap();
        assert_eq!(first.f32s().unwrap()[..5], [0.0, 1.0, 6.0, 7.0, 48.0]);
    }

    #[test]
    fn every_element_is_at_its_token_and_at_its_place_in_it() {
        let (shape, [pt, ph, pw]) = ([5, 4, 6, 12], [2, 3, 4]);
        let latents = Tensor::new((0..5 * 4 * 6 * 12).map(|i| i as f32).collect::<Vec<_>>(), shape).unwrap();
        let grid = Grid::new(&shape, [pt, ph, pw]).unwrap();
        let [first, last] =
            [Order::ChannelFirst, Order::ChannelLast].map(|order| grid.to_tokens(&latents, order).unwrap());
        let size = 5 * pt * ph * pw;
        for (at, value) in latents.f32s().unwrap().iter().enumerate() {
            let (c, t, h, w) = (at / (4 * 6 * 12), at / (6 * 12) % 4, at / 12 % 6, at % 12);
            let token = ((t / pt) * 2 + h / ph) * 3 + w / pw;
            let inner = ((t % pt) * ph + h % ph) * pw + w % pw;
            assert_eq!(first.f32s().unwrap()[token * size + c * pt * ph * pw + inner], *value);
            assert_eq!(last.f32s().unwrap()[token * size + inner * 5 + c], *value);
        }
    }

    #[test]
    fn rejects_patches_that_do_not_divide_the_latents() {
        assert!(Grid::new(&[16, 2, 5, 4], [1, 2, 2]).is_err());
        assert!(Grid::new(&[16, 0, 4, 4], [1, 2, 2]).is_err());
        assert!(Grid::new(&[16, 4, 4], [1, 2, 2]).is_err());
    }
}
