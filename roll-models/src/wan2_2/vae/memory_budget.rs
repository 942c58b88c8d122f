//! Chooses tiles and checkpoints of the VAE by the available memory.

use super::DEFAULT_CHECKPOINTS;
use super::config::VaeConfig;
use super::layer::{CONTEXT, LayerKind};
use super::tiling::Tiling;

/// Memory of the decoder and its pullback: bytes per pixel of the current frame (with 96 channels in the last stage),
/// and bytes per pixel of every frame. Measured at 128x128 with 17 and 65 frames
/// (example `vae_memory` of commit ac7d28a).
const PIXEL_BYTES: usize = 50_000;
const PIXEL_FRAME_BYTES: usize = 478;
/// Width of the last stage in that measurement.
const MEASURED_WIDTH: usize = 96;

/// Tilings to try if whole frames do not fit. Larger tiles have fewer borders to blend. The last tiling is the
/// reference implementation's.
const TILES: [Tiling; 2] = [Tiling { size: [64, 64], stride: [48, 48] }, Tiling { size: [34, 34], stride: [18, 16] }];

/// Memory that is available to the decoder and its pullback.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryBudget {
    /// Bytes of the device that weights do not occupy.
    pub bytes: usize,
    /// Bytes that the recorded steps of a trajectory occupy at the same time, per latent pixel of each latent frame.
    pub recorded_per_latent: usize,
}

impl MemoryBudget {
    /// The largest tiles that fit, for a video of `frames` frames whose latents are `[T, H, W]`. `None` means whole
    /// frames. Returns the smallest tiles if even they do not fit.
    pub fn tiling(&self, vae: &VaeConfig, frames: usize, latents: [usize; 3]) -> Option<Tiling> {
        let [t, h, w] = latents;
        let available = self.bytes.saturating_sub(self.recorded_per_latent.saturating_mul(t * h * w));
        let fits = |tiling: &Option<Tiling>| decoder_bytes(vae, *tiling, frames, [h, w]) <= available;
        let all = std::iter::once(None).chain(TILES.into_iter().map(Some));
        all.clone().find(fits).unwrap_or_else(|| all.last().flatten())
    }

    /// The number of checkpoints that fit into half of the memory that remains besides the decoder and its pullback,
    /// with this tiling and `element_size` bytes per element. The other half is a reserve for uncounted memory. The
    /// result is at least `DEFAULT_CHECKPOINTS`, which [`decoder_bytes`] includes, and at most the number of chunks
    /// minus one.
    pub fn checkpoints(
        &self,
        vae: &VaeConfig,
        tiling: Option<Tiling>,
        frames: usize,
        latents: [usize; 3],
        element_size: usize,
    ) -> usize {
        let [t, h, w] = latents;
        let occupied = self.recorded_per_latent.saturating_mul(t * h * w).saturating_add(decoder_bytes(
            vae,
            tiling,
            frames,
            [h, w],
        ));
        let more = self.bytes.saturating_sub(occupied) / 2 / state_bytes(vae, tiling, [h, w], element_size).max(1);
        (DEFAULT_CHECKPOINTS + more).min(t.saturating_sub(1).max(DEFAULT_CHECKPOINTS))
    }
}

/// Like [`MemoryBudget::checkpoints`], in host memory: the number that fits into half of the memory that is free now.
/// The result is [`DEFAULT_CHECKPOINTS`] if the system does not report its memory. `state` is the size of a checkpoint
/// in bytes.
pub fn checkpoints_in_host_memory(chunks: usize, state: usize) -> usize {
    let more = free_host_memory().unwrap_or(0) / 2 / state.max(1);
    more.clamp(DEFAULT_CHECKPOINTS, chunks.saturating_sub(1).max(DEFAULT_CHECKPOINTS))
}

fn free_host_memory() -> Option<usize> {
    let system = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = system.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.split_whitespace().next()?.parse::<usize>().ok()? << 10)
}

/// Bytes of the decoder's feature cache at a chunk border, with `element_size` bytes per element, for frames or tiles
/// of `[height, width]` latent pixels.
pub fn state_bytes(vae: &VaeConfig, tiling: Option<Tiling>, [h, w]: [usize; 2], element_size: usize) -> usize {
    let tile = tiling.map_or([h, w], |tiling| [tiling.size[0].min(h), tiling.size[1].min(w)]);
    let (mut scale, mut elements) = (1, 0);
    for layer in vae.decoder_layers() {
        let input = match layer.kind() {
            LayerKind::Conv { input, .. } | LayerKind::Activated { input, .. } => input,
            LayerKind::Upsample { input, temporal, .. } => {
                elements += if temporal { CONTEXT * input * scale * scale } else { 0 };
                scale *= 2;
                continue;
            }
            _ => continue,
        };
        elements += CONTEXT * input * scale * scale;
    }
    elements * tile[0] * tile[1] * element_size
}

/// Bytes that the decoder and its pullback need besides weights, for frames of `[height, width]` latent pixels.
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
    fn tiling_is_the_largest_that_fits() {
        let (vae, latents) = (VaeConfig::wan2_1(), [21, 60, 104]);
        let tiling = |gigabytes: usize, recorded_per_latent| {
            MemoryBudget { bytes: gigabytes << 30, recorded_per_latent }.tiling(&vae, 81, latents)
        };
        assert_eq!(tiling(60, 0), None);
        assert_eq!(tiling(30, 0), Some(TILES[0]));
        assert_eq!(tiling(20, 0), Some(TILES[1]));
        assert_eq!(tiling(1, 0), Some(TILES[1]));
        // The trajectory's memory is included: 131,040 latent pixels.
        assert_eq!(tiling(60, 250_000), Some(TILES[0]));
    }

    #[test]
    fn a_state_has_two_input_frames_of_each_causal_convolution() {
        let vae = VaeConfig::wan2_1();
        // 16 -> 384 at the latents' size; ten times 384; twice 384 before time is doubled at 1x and 2x; and so on.
        let at = |width: usize, scale: usize, count: usize| 2 * width * scale * scale * count;
        let numbers =
            at(16, 1, 1) + at(384, 1, 4 + 6 + 1) + at(192, 2, 1) + at(384, 2, 5 + 1) + at(192, 4, 6) + at(96, 8, 7);
        assert_eq!(state_bytes(&vae, None, [60, 60], 4), 4 * 3600 * numbers);
        assert_eq!(state_bytes(&vae, Some(TILES[1]), [60, 60], 2), 2 * 34 * 34 * numbers);
    }

    #[test]
    fn checkpoints_fill_half_of_the_remaining_memory() {
        let (vae, latents) = (VaeConfig::wan2_1(), [21, 60, 60]);
        let checkpoints = |gigabytes: usize, each| {
            MemoryBudget { bytes: gigabytes << 30, recorded_per_latent: 0 }.checkpoints(&vae, None, 81, latents, each)
        };
        assert_eq!(checkpoints(1, 4), DEFAULT_CHECKPOINTS);
        assert_eq!(checkpoints(100, 4), 20);
        let (some, of_bf16) = (checkpoints(30, 4), checkpoints(30, 2));
        assert!(DEFAULT_CHECKPOINTS < some && some < of_bf16 && of_bf16 <= 20, "{some} {of_bf16}");
        assert_eq!(checkpoints_in_host_memory(3, 1 << 20), DEFAULT_CHECKPOINTS);
        assert_eq!(checkpoints_in_host_memory(21, 1 << 60), DEFAULT_CHECKPOINTS);
    }
}
