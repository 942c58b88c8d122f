//! Published models by name.

use burn_tensor::DType;

use super::super::dit::DitConfig;
use super::super::networks::Networks;
use super::super::vae::VaeConfig;

/// A published model and its networks.
#[derive(Clone, Copy, Debug)]
pub struct PublishedModel {
    /// Name on the command line.
    pub name: &'static str,
    make: fn() -> Networks,
}

impl PublishedModel {
    /// All published models.
    pub const ALL: [Self; 5] = [
        Self { name: "wan2_2-i2v-a14b", make: || networks_14b(36, 2) },
        Self { name: "wan2_2-t2v-a14b", make: || networks_14b(16, 2) },
        Self { name: "wan2_1-t2v-14b", make: || networks_14b(16, 1) },
        Self { name: "wan2_1-t2v-1_3b", make: || networks([1536, 8960, 30, 12], [16, 16], 1, VaeConfig::wan2_1()) },
        Self { name: "wan2_2-ti2v-5b", make: || networks([3072, 14336, 30, 24], [48, 48], 1, VaeConfig::wan2_2()) },
    ];

    /// The networks of the model.
    pub fn networks(&self) -> Networks {
        (self.make)()
    }
}

/// The networks of a 14B model with 16 latent channels.
fn networks_14b(in_channels: usize, experts: usize) -> Networks {
    networks([5120, 13824, 40, 40], [in_channels, 16], experts, VaeConfig::wan2_1())
}

/// The networks of a model with the sizes of a transformer, `[dim, ffn_dim, layers, heads]`, and its channels,
/// `[in_channels, out_channels]`.
fn networks(
    [dim, ffn_dim, layers, heads]: [usize; 4],
    [in_channels, out_channels]: [usize; 2],
    experts: usize,
    vae: VaeConfig,
) -> Networks {
    let (patch, text_dim, freq_dim) = ([1, 2, 2], 4096, 256);
    let dit = DitConfig {
        dim,
        in_channels,
        out_channels,
        patch,
        text_dim,
        freq_dim,
        ffn_dim,
        layers,
        heads,
        image_dim: None,
    };
    // The published files are f32.
    Networks { dit, experts, stored_dtype: DType::F32, eight_bits: None, vae }
}
