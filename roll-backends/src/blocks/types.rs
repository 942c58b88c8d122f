//! Number formats of GGUF: plain floats, and blocks of small integers with their scales.

use half::{bf16, f16};

/// A number format of GGUF.
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

/// GGUF's name of the type with number `kind`, for messages. It also knows types that are not supported here.
pub fn name_of(kind: u32) -> String {
    let known = [
        "F32", "F16", "Q4_0", "Q4_1", "4", "5", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
        "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8", "I16", "I32",
        "I64", "F64", "IQ1_M", "BF16",
    ];
    known.get(kind as usize).map_or_else(|| format!("type {kind}"), |name| name.to_string())
}

impl BlockType {
    /// The type with number `kind` in the file; `None` if it is not supported.
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

    /// Values in a block.
    pub fn values(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q8_0 => 32,
            Self::Q4K | Self::Q6K => 256,
        }
    }

    /// Bytes of an encoded block.
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

    /// Whether several values share a scale.
    pub fn is_quantised(self) -> bool {
        self.values() > 1
    }

    /// Decodes all whole blocks of `bytes`; trailing bytes of an incomplete block are ignored.
    pub fn decode(self, bytes: &[u8]) -> Vec<f32> {
        let mut values = vec![0.0; bytes.len() / self.bytes() * self.values()];
        self.decode_into(bytes, &mut values);
        values
    }

    /// Decodes whole blocks into `values`, until either slice ends.
    pub fn decode_into(self, bytes: &[u8], values: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx2")]
            fn wide(kind: BlockType, bytes: &[u8], values: &mut [f32]) {
                decode_body(kind, bytes, values);
            }
            if is_x86_feature_detected!("avx2") {
                // SAFETY: the feature that `wide` is compiled for was detected just now.
                return unsafe { wide(self, bytes, values) };
            }
        }
        decode_body(self, bytes, values);
    }
}

#[inline(always)]
fn decode_body(kind: BlockType, bytes: &[u8], values: &mut [f32]) {
    match kind {
        BlockType::F32 => {
            each(bytes, values, |block: &[u8; 4], [value]: &mut [f32; 1]| *value = f32::from_le_bytes(*block))
        }
        BlockType::F16 => each(bytes, values, |block: &[u8; 2], [value]: &mut [f32; 1]| *value = half_at(block, 0)),
        BlockType::Bf16 => {
            each(bytes, values, |block: &[u8; 2], [value]: &mut [f32; 1]| *value = bf16::from_le_bytes(*block).to_f32())
        }
        BlockType::Q4_0 => each(bytes, values, |block: &[u8; 18], values: &mut [f32; 32]| {
            let scale = half_at(block, 0);
            nibbles(&block[2..], [scale; 2], [-8.0 * scale; 2], values);
        }),
        BlockType::Q4_1 => each(bytes, values, |block: &[u8; 20], values: &mut [f32; 32]| {
            nibbles(&block[4..], [half_at(block, 0); 2], [half_at(block, 2); 2], values);
        }),
        BlockType::Q8_0 => each(bytes, values, |block: &[u8; 34], values: &mut [f32; 32]| {
            let scale = half_at(block, 0);
            values.iter_mut().zip(&block[2..]).for_each(|(value, q)| *value = scale * f32::from(*q as i8));
        }),
        BlockType::Q4K => each(bytes, values, q4_k),
        BlockType::Q6K => each(bytes, values, q6_k),
    }
}

/// Applies `decode` block by block; a block has `B` bytes and `V` values.
#[inline(always)]
fn each<const B: usize, const V: usize>(bytes: &[u8], values: &mut [f32], decode: impl Fn(&[u8; B], &mut [f32; V])) {
    let (blocks, values) = (bytes.as_chunks::<B>().0, values.as_chunks_mut::<V>().0);
    blocks.iter().zip(values).for_each(|(block, values)| decode(block, values));
}

#[inline(always)]
fn half_at(block: &[u8], at: usize) -> f32 {
    // Read as f32, the shifted bits are the f16 value times 2^-112, subnormal numbers included.
    const POWER: f32 = f32::from_bits((127 + 112) << 23);
    let bits = u16::from_le_bytes([block[at], block[at + 1]]);
    if bits & 0x7c00 == 0x7c00 {
        return f16::from_bits(bits).to_f32();
    }
    f32::from_bits((u32::from(bits & 0x8000) << 16) | (u32::from(bits & 0x7fff) << 13)) * POWER
}

/// Decodes 4-bit integers as `scale * q + offset`. The first half of `values` comes from the low nibbles, the second
/// half from the high nibbles; each half has its own scale and offset.
#[inline(always)]
fn nibbles(bytes: &[u8], scale: [f32; 2], offset: [f32; 2], values: &mut [f32]) {
    let (low, high) = values.split_at_mut(bytes.len());
    low.iter_mut().zip(bytes).for_each(|(value, q)| *value = scale[0] * f32::from(q & 15) + offset[0]);
    high.iter_mut().zip(bytes).for_each(|(value, q)| *value = scale[1] * f32::from(q >> 4) + offset[1]);
}

/// Decodes a Q4_K block: eight groups of 32 values. The block holds two f16 (scales of scales and of minima), 12 bytes
/// of packed six-bit scales and minima, and 128 bytes of nibbles.
#[inline(always)]
fn q4_k(block: &[u8; 144], values: &mut [f32; 256]) {
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
    let pairs = block[16..].chunks_exact(32).zip(values.chunks_exact_mut(64));
    for (pair, (bytes, values)) in pairs.enumerate() {
        let ((low, low_offset), (high, high_offset)) = (group(2 * pair), group(2 * pair + 1));
        nibbles(bytes, [low, high], [low_offset, high_offset], values);
    }
}

/// Decodes a Q6_K block: sixteen groups of 16 values. The block holds 128 bytes of low nibbles, 64 bytes of upper bit
/// pairs, 16 eight-bit scales and an f16 scale.
#[inline(always)]
fn q6_k(block: &[u8; 210], values: &mut [f32; 256]) {
    let scale = half_at(block, 208);
    for (group, values) in values.chunks_exact_mut(16).enumerate() {
        // Eight groups (half a block) share 64 bytes of low nibbles and 32 bytes of upper bits; two groups share a
        // quarter of them.
        let (half, quarter, first) = (group / 8, group / 2 % 4, group % 2 * 16);
        let low = &block[64 * half + 32 * (quarter % 2) + first..][..16];
        let high = &block[128 + 32 * half + first..][..16];
        let factor = scale * f32::from(block[192 + group] as i8);
        for ((value, low), high) in values.iter_mut().zip(low).zip(high) {
            let nibble = (low >> (quarter / 2 * 4)) & 15;
            *value = factor * (i32::from(nibble | (((high >> (2 * quarter)) & 3) << 4)) - 32) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_precision_is_widened_exactly() {
        for bits in 0..=u16::MAX {
            let (found, expected) = (half_at(&bits.to_le_bytes(), 0), f16::from_bits(bits).to_f32());
            assert!(found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan()), "{bits:04x}");
        }
    }
}
