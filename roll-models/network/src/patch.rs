//! Converts between latents `[C, T, H, W]` and tokens. This happens on the host, because it moves only a few megabytes
//! per pass.

use roll_core::{Error, Result, Tensor};

/// Number of patches along each axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Number of patches per axis, `[t, h, w]`.
    pub patches: [usize; 3],
    /// Size of a patch in latent positions, `[t, h, w]`.
    patch: [usize; 3],
}

/// Memory order of a token's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// `[c, t, h, w]`: the order of input tokens, which are multiplied by weights `[out, c, t, h, w]`.
    ChannelFirst,
    /// `[t, h, w, c]`: the order of output tokens, as the head computes them.
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

    /// Calls `pair` with the index of each element among the tokens and its index among the latents. Elements are
    /// visited one row of tokens after the other, and within it by rows of latents, so that both are accessed in parts
    /// that fit into a cache.
    fn visit(&self, channels: usize, order: Order, mut pair: impl FnMut(usize, usize)) {
        // Numbers of patches along each axis, and the size of a patch.
        let ([gt, gh, gw], [pt, ph, pw]) = (self.patches, self.patch);
        let token_size = channels * pt * ph * pw;
        // Position of a row of patches: frame and row of the grid.
        for (grid_t, grid_y) in (0..gt).flat_map(|t| (0..gh).map(move |y| (t, y))) {
            for c in 0..channels {
                // Position within a patch: frame and row.
                for (t, y) in (0..pt).flat_map(|t| (0..ph).map(move |y| (t, y))) {
                    let latent_row = (((c * gt + grid_t) * pt + t) * gh * ph + grid_y * ph + y) * gw * pw;
                    let patch_row = (t * ph + y) * pw;
                    // The index in a token of the first element of this row, and the distance to the next element.
                    let (first_element, step) = match order {
                        Order::ChannelFirst => (c * pt * ph * pw + patch_row, 1),
                        Order::ChannelLast => (patch_row * channels + c, channels),
                    };
                    let first_token = (grid_t * gh + grid_y) * gw * token_size + first_element;
                    for grid_x in 0..gw {
                        for x in 0..pw {
                            pair(first_token + grid_x * token_size + x * step, latent_row + grid_x * pw + x);
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
