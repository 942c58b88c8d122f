//! Chooses tiles and checkpoints of the VAE by the available memory: [`MemoryBudget`] says how much memory there is,
//! and [`decoder_bytes`] how much the decoder and its pullback need.
//!
//! A *state* is the decoder's feature cache between two chunks ([`feature_cache_bytes`]). A *checkpoint* is a state
//! that is kept for the pullback.

use super::DEFAULT_CHECKPOINTS;
use super::config::VaeConfig;
use super::layer::{LayerKind, PAST_FRAMES};
use super::tiling::Tiling;

/// Memory of one chunk and its pullback, without checkpoints, in tenths of a state: one chunk with its pullback takes
/// 2.2 states. Both this memory and a state's are proportional to the widths and positions of the layers. Measured at
/// 128x128 in f32 with 17 frames, all of whose four states are checkpoints: 931 MiB, weights not included (example
/// `vae_memory` of commit ac7d28a). 65 frames take 358 MiB more: two states, and the frames in host memory.
const CHUNK_TENTHS: usize = 22;
/// States on the device that the recomputation from a checkpoint needs in addition to checkpoints.
const RECOMPUTED_STATES: usize = 2;
/// States on the device if checkpoints lie in host memory: the one in use, and the next one on its way.
pub const RESTORED_STATES: usize = 2;

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
    /// Bytes per element between two layers of the decoder.
    pub element_size: usize,
    /// Whether checkpoints lie in host memory.
    pub offload: bool,
}

impl MemoryBudget {
    /// The largest tiles that fit, for a video whose latents are `[T, H, W]`. `None` means whole frames. Returns the
    /// smallest tiles if even they do not fit.
    pub fn tiling(&self, vae: &VaeConfig, latents: [usize; 3]) -> Option<Tiling> {
        let fits = |tiling: &Option<Tiling>| self.occupied(vae, *tiling, latents) <= self.bytes;
        let mut largest_first = std::iter::once(None).chain(TILES.map(Some));
        let [.., smallest] = TILES;
        largest_first.find(fits).unwrap_or(Some(smallest))
    }

    /// The number of checkpoints for this tiling: `DEFAULT_CHECKPOINTS`, whose memory `occupied` includes, and as many
    /// more as fit into half of the memory that is left. The other half is a reserve for uncounted memory. The result
    /// is limited by the number of chunks (latent frames), see `clamped_checkpoints`.
    pub fn checkpoints(&self, vae: &VaeConfig, tiling: Option<Tiling>, latents: [usize; 3]) -> usize {
        let [chunks, h, w] = latents;
        let bytes_left = self.bytes.saturating_sub(self.occupied(vae, tiling, latents));
        let more_checkpoints = bytes_left / 2 / feature_cache_bytes(vae, tiling, [h, w], self.element_size).max(1);
        clamped_checkpoints(DEFAULT_CHECKPOINTS + more_checkpoints, chunks)
    }

    /// Bytes of the recorded steps, the decoder and its pullback.
    fn occupied(&self, vae: &VaeConfig, tiling: Option<Tiling>, latents: [usize; 3]) -> usize {
        let recorded = self.recorded_per_latent.saturating_mul(latents.iter().product());
        let checkpoints = if self.offload { RESTORED_STATES } else { DEFAULT_CHECKPOINTS };
        recorded.saturating_add(decoder_bytes(vae, tiling, latents, self.element_size, checkpoints))
    }
}

/// The number of checkpoints if they lie in host memory: as many as fit into half of the memory that is free now,
/// limited by the number of chunks (see `clamped_checkpoints`). The result is `DEFAULT_CHECKPOINTS` if the system does
/// not report its memory. `checkpoint_bytes` is the size of one checkpoint.
pub fn checkpoints_in_host_memory(chunks: usize, checkpoint_bytes: usize) -> usize {
    let fitting_checkpoints = free_host_memory().unwrap_or(0) / 2 / checkpoint_bytes.max(1);
    clamped_checkpoints(fitting_checkpoints, chunks)
}

/// Limits a number of checkpoints to the number of states, which is `chunks` minus one. The result is never below
/// `DEFAULT_CHECKPOINTS`, even if there are fewer states.
fn clamped_checkpoints(checkpoints: usize, chunks: usize) -> usize {
    let states = chunks.saturating_sub(1);
    checkpoints.clamp(DEFAULT_CHECKPOINTS, states.max(DEFAULT_CHECKPOINTS))
}

/// Bytes of free host memory, if the system reports them.
fn free_host_memory() -> Option<usize> {
    let system = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = system.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: usize = line.split_whitespace().next()?.parse().ok()?;
    Some(kibibytes << 10)
}

/// Bytes of the decoder's feature cache at a chunk border, with `element_size` bytes per element, for frames or tiles
/// of `[height, width]` latent pixels.
pub fn feature_cache_bytes(vae: &VaeConfig, tiling: Option<Tiling>, [h, w]: [usize; 2], element_size: usize) -> usize {
    let [tile_height, tile_width] = match tiling {
        Some(Tiling { size: [height, width], .. }) => [height.min(h), width.min(w)],
        None => [h, w],
    };
    // Side of the square of positions that represents one latent pixel in the input of the current layer.
    let mut scale = 1;
    let mut elements_per_latent = 0;
    for layer in vae.decoder_layers() {
        let cached_channels = match layer.kind {
            LayerKind::Conv { input, .. } | LayerKind::NormSiluConv { input, .. } => input,
            LayerKind::Upsample { input, doubles_time: true, .. } => input,
            // Without a cache.
            _ => 0,
        };
        // Upsampling doubles time first, so the cached frames still have the size of the layer's input.
        elements_per_latent += PAST_FRAMES * cached_channels * scale * scale;
        if matches!(layer.kind, LayerKind::Upsample { .. }) {
            scale *= 2;
        }
    }
    elements_per_latent * tile_height * tile_width * element_size
}

/// Bytes of the device that the decoder and its pullback need, weights not included, for latents `[T, H, W]` and
/// `element_size` bytes per element. `checkpoints` is the number of states that are kept on the device; if there are
/// fewer states, all are kept.
pub fn decoder_bytes(
    vae: &VaeConfig,
    tiling: Option<Tiling>,
    [chunks, h, w]: [usize; 3],
    element_size: usize,
    checkpoints: usize,
) -> usize {
    let states = chunks.saturating_sub(1);
    let kept_states = states.min(checkpoints);
    // States that are not kept are recomputed.
    let recomputed_states = if states > DEFAULT_CHECKPOINTS { RECOMPUTED_STATES } else { 0 };
    let tenths = CHUNK_TENTHS + 10 * (kept_states + recomputed_states);
    feature_cache_bytes(vae, tiling, [h, w], element_size) * tenths / 10
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(gigabytes: usize, recorded_per_latent: usize, element_size: usize, offload: bool) -> MemoryBudget {
        MemoryBudget { bytes: gigabytes << 30, recorded_per_latent, element_size, offload }
    }

    #[test]
    fn tiling_is_the_largest_that_fits() {
        let (vae, latents) = (VaeConfig::wan2_1(), [21, 60, 104]);
        let tiling =
            |gigabytes, recorded_per_latent| budget(gigabytes, recorded_per_latent, 4, false).tiling(&vae, latents);
        assert_eq!(tiling(30, 0), None);
        assert_eq!(tiling(25, 0), Some(TILES[0]));
        assert_eq!(tiling(15, 0), Some(TILES[1]));
        assert_eq!(tiling(1, 0), Some(TILES[1]));
        // The trajectory's memory is included: 131,040 latent pixels.
        assert_eq!(tiling(60, 300_000), Some(TILES[0]));
        // Whole frames fit in half of that in bf16, and in less with checkpoints in host memory.
        assert_eq!(budget(15, 0, 2, false).tiling(&vae, latents), None);
        assert_eq!(budget(25, 0, 4, true).tiling(&vae, latents), None);
    }

    #[test]
    fn the_decoder_takes_memory_of_a_tile_of_its_states_and_of_its_dtype() {
        let (vae, latents) = (VaeConfig::wan2_1(), [21, 68, 68]);
        let bytes = |tiling, latents, element, kept| decoder_bytes(&vae, tiling, latents, element, kept);
        let whole = bytes(None, latents, 4, 4);
        let equal = |a: usize, b: usize| assert!(a.abs_diff(b) < 10, "{a} {b}");
        equal(bytes(Some(TILES[1]), latents, 4, 4) * 4, whole);
        equal(bytes(None, latents, 2, 4) * 2, whole);
        // Each checkpoint is a state.
        equal(whole - bytes(None, latents, 4, RESTORED_STATES), 2 * feature_cache_bytes(&vae, None, [68, 68], 4));
        assert_eq!(bytes(None, [42, 68, 68], 4, 4), whole, "memory does not grow with the number of frames");
        assert!(bytes(None, [1, 68, 68], 4, 4) < whole / 3);
    }

    #[test]
    fn a_state_has_two_input_frames_of_each_causal_convolution() {
        let vae = VaeConfig::wan2_1();
        // 16 -> 384 at the latents' size; ten times 384; twice 384 before time is doubled at 1x and 2x; and so on.
        let at = |width: usize, scale: usize, count: usize| 2 * width * scale * scale * count;
        let numbers =
            at(16, 1, 1) + at(384, 1, 4 + 6 + 1) + at(192, 2, 1) + at(384, 2, 5 + 1) + at(192, 4, 6) + at(96, 8, 7);
        assert_eq!(feature_cache_bytes(&vae, None, [60, 60], 4), 4 * 3600 * numbers);
        assert_eq!(feature_cache_bytes(&vae, Some(TILES[1]), [60, 60], 2), 2 * 34 * 34 * numbers);
    }

    #[test]
    fn checkpoints_fill_half_of_the_remaining_memory() {
        let (vae, latents) = (VaeConfig::wan2_1(), [21, 60, 60]);
        let checkpoints = |gigabytes, each| budget(gigabytes, 0, each, false).checkpoints(&vae, None, latents);
        assert_eq!(checkpoints(1, 4), DEFAULT_CHECKPOINTS);
        assert_eq!(checkpoints(100, 4), 20);
        let (some, of_bf16) = (checkpoints(30, 4), checkpoints(30, 2));
        assert!(DEFAULT_CHECKPOINTS < some && some < of_bf16 && of_bf16 <= 20, "{some} {of_bf16}");
        assert_eq!(checkpoints_in_host_memory(3, 1 << 20), DEFAULT_CHECKPOINTS);
        assert_eq!(checkpoints_in_host_memory(21, 1 << 60), DEFAULT_CHECKPOINTS);
    }
}
