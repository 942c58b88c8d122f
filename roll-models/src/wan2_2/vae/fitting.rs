//! Tiles by the memory there is.

use super::config::VaeConfig;
use super::tiling::Tiling;

/// Bytes that the decoder and its pull hold of a pixel of the frame they are at (96 wide at the last stage), and of a
/// pixel of every frame. Measured at 128x128 with 17 and 65 frames (`roll-models/examples/vae_memory.rs`).
const PIXEL_BYTES: usize = 50_000;
const PIXEL_FRAME_BYTES: usize = 478;
/// Width that these were measured at.
const MEASURED_WIDTH: usize = 96;

/// What is tried, after the whole: larger tiles blend at fewer borders. The last is what the reference uses.
const TILES: [Tiling; 2] = [Tiling { size: [64, 64], stride: [48, 48] }, Tiling { size: [34, 34], stride: [18, 16] }];

/// Memory that the decoder and its pull may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fitting {
    /// Bytes of the device that no weights take.
    pub bytes: usize,
    /// Bytes that a trained trajectory holds meanwhile, of each latent pixel of each latent frame.
    pub held: usize,
}

impl Fitting {
    /// The largest tiles that fit, for a video of `frames` frames whose latents are `latents`, `[T, H, W]`; `None` is the
    /// whole. The smallest, where not even they fit.
    pub fn tiling(&self, vae: &VaeConfig, frames: usize, latents: [usize; 3]) -> Option<Tiling> {
        let [t, h, w] = latents;
        let left = self.bytes.saturating_sub(self.held.saturating_mul(t * h * w));
        let fits = |tiling: &Option<Tiling>| decoder_bytes(vae, *tiling, frames, [h, w]) <= left;
        let all = std::iter::once(None).chain(TILES.into_iter().map(Some));
        all.clone().find(fits).unwrap_or_else(|| all.last().flatten())
    }
}

/// Bytes that the decoder and its pull hold beyond weights, for frames of `[height, width]` latent pixels.
pub fn decoder_bytes(vae: &VaeConfig, tiling: Option<Tiling>, frames: usize, [h, w]: [usize; 2]) -> usize {
    let tile = tiling.map_or([h, w], |tiling| [tiling.size[0].min(h), tiling.size[1].min(w)]);
    let unit = vae.spatial_stride().pow(2);
    let width = vae.decoder_dim / vae.pixel_patch();
    tile[0] * tile[1] * unit * PIXEL_BYTES * width / MEASURED_WIDTH + h * w * unit * PIXEL_FRAME_BYTES * frames
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_the_largest_that_fit() {
        let (vae, latents) = (VaeConfig::wan2_1(), [21, 60, 104]);
        let tiling = |gigabytes: usize, held| Fitting { bytes: gigabytes << 30, held }.tiling(&vae, 81, latents);
        assert_eq!(tiling(60, 0), None);
        assert_eq!(tiling(30, 0), Some(TILES[0]));
        assert_eq!(tiling(20, 0), Some(TILES[1]));
        assert_eq!(tiling(1, 0), Some(TILES[1]));
        // What the trajectory holds counts: 131,040 latent pixels.
        assert_eq!(tiling(60, 250_000), Some(TILES[0]));
    }
}
