//! How GGUF stores numbers: plain, or in blocks of small integers with their scales.

use half::{bf16, f16};

/// A way of storing numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the format's own names
pub enum BlockType {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q8_0,
    Q4K,
    Q6K,
}

/// The format's name of a type, for messages.
pub fn name_of(kind: u32) -> String {
    let known = [
        "F32", "F16", "Q4_0", "Q4_1", "4", "5", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
        "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8", "I16", "I32",
        "I64", "F64", "IQ1_M", "BF16",
    ];
    known.get(kind as usize).map_or_else(|| format!("type {kind}"), |name| name.to_string())
}

impl BlockType {
    /// The type of a number in the file.
    pub fn of(kind: u32) -> Option<Self> {
        Some(match kind {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            8 => Self::Q8_0,
            12 => Self::Q4K,
            14 => Self::Q6K,
            30 => Self::Bf16,
            _ => return None,
        })
    }

    /// Values of a block.
    pub fn values(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q8_0 => 32,
            Self::Q4K | Self::Q6K => 256,
        }
    }

    /// Bytes of a block.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q8_0 => 34,
            Self::Q4K => 144,
            Self::Q6K => 210,
        }
    }

    /// The values of whole blocks; a rest is left out.
    pub fn decode(self, bytes: &[u8]) -> Vec<f32> {
        let blocks = bytes.chunks_exact(self.bytes());
        let mut values = Vec::with_capacity(blocks.len() * self.values());
        for block in blocks {
            match self {
                Self::F32 => values.push(f32::from_le_bytes([block[0], block[1], block[2], block[3]])),
                Self::F16 => values.push(half_at(block, 0)),
                Self::Bf16 => values.push(bf16::from_le_bytes([block[0], block[1]]).to_f32()),
                Self::Q4_0 => nibbles(&block[2..], half_at(block, 0), -8.0 * half_at(block, 0), &mut values),
                Self::Q4_1 => nibbles(&block[4..], half_at(block, 0), half_at(block, 2), &mut values),
                Self::Q8_0 => values.extend(block[2..].iter().map(|q| half_at(block, 0) * f32::from(*q as i8))),
                Self::Q4K => q4_k(block, &mut values),
                Self::Q6K => q6_k(block, &mut values),
            }
        }
        values
    }
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// `scale * q + offset`: first the low halves of all bytes, then the high ones.
fn nibbles(bytes: &[u8], scale: f32, offset: f32, values: &mut Vec<f32>) {
    values.extend(bytes.iter().map(|q| scale * f32::from(q & 15) + offset));
    values.extend(bytes.iter().map(|q| scale * f32::from(q >> 4) + offset));
}

/// Eight groups of 32 with six-bit scales and minima: two f16, 12 bytes of scales, 128 of values.
fn q4_k(block: &[u8], values: &mut Vec<f32>) {
    let (scale, least) = (half_at(block, 0), half_at(block, 2));
    let packed = &block[4..16];
    let group = |j: usize| -> (f32, f32) {
        let (s, m) = match j < 4 {
            true => (packed[j] & 63, packed[j + 4] & 63),
            false => {
                let (low, s, m) = (packed[j + 4], packed[j - 4], packed[j]);
                ((low & 15) | (s >> 6 << 4), (low >> 4) | (m >> 6 << 4))
            }
        };
        (scale * f32::from(s), -least * f32::from(m))
    };
    for (pair, bytes) in block[16..].chunks_exact(32).enumerate() {
        let ((low, low_offset), (high, high_offset)) = (group(2 * pair), group(2 * pair + 1));
        values.extend(bytes.iter().map(|q| low * f32::from(q & 15) + low_offset));
        values.extend(bytes.iter().map(|q| high * f32::from(q >> 4) + high_offset));
    }
}

/// Sixteen groups of 16 with eight-bit scales: 128 bytes of low halves, 64 of two high bits, 16 scales, one f16.
fn q6_k(block: &[u8], values: &mut Vec<f32>) {
    let scale = half_at(block, 208);
    for half in 0..2 {
        let low = &block[64 * half..][..64];
        let high = &block[128 + 32 * half..][..32];
        let scales = &block[192 + 8 * half..][..8];
        for quarter in 0..4 {
            for i in 0..32 {
                let byte = low[32 * (quarter % 2) + i];
                let nibble = if quarter < 2 { byte & 15 } else { byte >> 4 };
                let q = i32::from(nibble | (high[i] >> (2 * quarter) & 3) << 4) - 32;
                let group = f32::from(scales[2 * quarter + i / 16] as i8);
                values.push(scale * group * q as f32);
            }
        }
    }
}
