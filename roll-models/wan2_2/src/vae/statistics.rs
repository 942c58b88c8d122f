//! Mean and standard deviation of each latent channel, as published with the checkpoints.

/// Normalisation of latents: `(latent - mean) / std` per channel.
#[derive(Clone, Debug, PartialEq)]
pub struct LatentStatistics {
    /// Mean of each channel.
    pub mean: Vec<f32>,
    /// Standard deviation of each channel.
    pub std: Vec<f32>,
}

impl LatentStatistics {
    /// The published statistics of latents with this number of channels: 16 (Wan2.1) or 48 (Wan2.2 TI2V-5B). `None` for
    /// other numbers.
    pub fn published(channels: usize) -> Option<Self> {
        let (mean, std): (&[f32], &[f32]) = match channels {
            16 => (&MEAN_16, &STD_16),
            48 => (&MEAN_48, &STD_48),
            _ => return None,
        };
        Some(Self { mean: mean.to_vec(), std: std.to_vec() })
    }

    /// Mean 0 and standard deviation 1: latents are the encoder's output, not normalised.
    pub fn identity(channels: usize) -> Self {
        Self { mean: vec![0.0; channels], std: vec![1.0; channels] }
    }
}

// From `wan/modules/vae2_1.py` (16 channels) and `vae2_2.py` (48 channels).

const MEAN_16: [f32; 16] = [
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508, 0.4134, -0.0715, 0.5517, -0.3632, -0.1922,
    -0.9497, 0.2503, -0.2921,
];
const STD_16: [f32; 16] = [
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743, 3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253,
    2.8251, 1.916,
];
const MEAN_48: [f32; 48] = [
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891, 0.157,
    -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502, -0.2055, -0.0322,
    0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.123, -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.052,
    0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
];
const STD_48: [f32; 48] = [
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.499, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165,
    0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659, 0.7069, 0.5338, 0.4889, 0.4917,
    0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.06,
    0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
];
