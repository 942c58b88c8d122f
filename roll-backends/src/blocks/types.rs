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
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    Iq4Nl,
    Iq4Xs,
}

/// GGUF's name of the type with number `code`, for messages. Includes types that are not supported here.
pub fn name_of(code: u32) -> String {
    // The numbers 4 and 5 belonged to types that were removed from GGUF.
    let known = [
        "F32", "F16", "Q4_0", "Q4_1", "4", "5", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
        "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8", "I16", "I32",
        "I64", "F64", "IQ1_M", "BF16",
    ];
    known.get(code as usize).map_or_else(|| format!("type {code}"), |name| name.to_string())
}

impl BlockType {
    /// The type with number `code` in the file; `None` if it is not supported.
    pub fn of(code: u32) -> Option<Self> {
        Some(match code {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            6 => Self::Q5_0,
            7 => Self::Q5_1,
            8 => Self::Q8_0,
            10 => Self::Q2K,
            11 => Self::Q3K,
            12 => Self::Q4K,
            13 => Self::Q5K,
            14 => Self::Q6K,
            20 => Self::Iq4Nl,
            23 => Self::Iq4Xs,
            30 => Self::Bf16,
            _ => return None,
        })
    }

    /// Values in a block.
    pub fn values(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 | Self::Iq4Nl => 32,
            Self::Q2K | Self::Q3K | Self::Q4K | Self::Q5K | Self::Q6K | Self::Iq4Xs => 256,
        }
    }

    /// Bytes of an encoded block.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q4_0 | Self::Iq4Nl => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q2K => 84,
            Self::Q3K => 110,
            Self::Iq4Xs => 136,
            Self::Q4K => 144,
            Self::Q5K => 176,
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
            fn decode_body_avx2(kind: BlockType, bytes: &[u8], values: &mut [f32]) {
                decode_body(kind, bytes, values);
            }
            if is_x86_feature_detected!("avx2") {
                // SAFETY: the feature that `decode_body_avx2` is compiled for was detected just now.
                return unsafe { decode_body_avx2(self, bytes, values) };
            }
        }
        decode_body(self, bytes, values);
    }
}

// Signed integers are stored with these numbers added.
const THREE_BIT_BIAS: i32 = 4;
const FOUR_BIT_BIAS: f32 = 8.0;
const FIVE_BIT_BIAS: f32 = 16.0;
const SIX_BIT_BIAS: i32 = 32;

/// [`BlockType::decode_into`], compiled for the instructions of its caller.
#[inline(always)]
fn decode_body(kind: BlockType, bytes: &[u8], values: &mut [f32]) {
    match kind {
        BlockType::F32 => {
            for_each_block(bytes, values, |block: &[u8; 4], [value]: &mut [f32; 1]| *value = f32::from_le_bytes(*block))
        }
        BlockType::F16 => {
            for_each_block(bytes, values, |block: &[u8; 2], [value]: &mut [f32; 1]| *value = half_at(block, 0))
        }
        BlockType::Bf16 => for_each_block(bytes, values, |block: &[u8; 2], [value]: &mut [f32; 1]| {
            *value = bf16::from_le_bytes(*block).to_f32()
        }),
        BlockType::Q4_0 => for_each_block(bytes, values, |block: &[u8; 18], values: &mut [f32; 32]| {
            let scale = half_at(block, 0);
            decode_nibbles(&block[2..], [scale; 2], [-FOUR_BIT_BIAS * scale; 2], values);
        }),
        BlockType::Q4_1 => for_each_block(bytes, values, |block: &[u8; 20], values: &mut [f32; 32]| {
            decode_nibbles(&block[4..], [half_at(block, 0); 2], [half_at(block, 2); 2], values);
        }),
        BlockType::Q5_0 => for_each_block(bytes, values, |block: &[u8; 22], values: &mut [f32; 32]| {
            let scale = half_at(block, 0);
            decode_five_bits(&block[2..], scale, -FIVE_BIT_BIAS * scale, values);
        }),
        BlockType::Q5_1 => for_each_block(bytes, values, |block: &[u8; 24], values: &mut [f32; 32]| {
            decode_five_bits(&block[4..], half_at(block, 0), half_at(block, 2), values);
        }),
        BlockType::Q8_0 => for_each_block(bytes, values, |block: &[u8; 34], values: &mut [f32; 32]| {
            let scale = half_at(block, 0);
            values.iter_mut().zip(&block[2..]).for_each(|(value, q)| *value = scale * f32::from(*q as i8));
        }),
        BlockType::Q2K => for_each_block(bytes, values, q2_k),
        BlockType::Q3K => for_each_block(bytes, values, q3_k),
        BlockType::Q4K => for_each_block(bytes, values, q4_k),
        BlockType::Q5K => for_each_block(bytes, values, q5_k),
        BlockType::Q6K => for_each_block(bytes, values, q6_k),
        BlockType::Iq4Nl => for_each_block(bytes, values, |block: &[u8; 18], values: &mut [f32; 32]| {
            decode_levels(&block[2..], half_at(block, 0), values);
        }),
        BlockType::Iq4Xs => for_each_block(bytes, values, iq4_xs),
    }
}

/// Applies `decode` block by block; a block has `B` bytes and `V` values.
#[inline(always)]
fn for_each_block<const B: usize, const V: usize>(
    bytes: &[u8],
    values: &mut [f32],
    decode: impl Fn(&[u8; B], &mut [f32; V]),
) {
    let (blocks, values) = (bytes.as_chunks::<B>().0, values.as_chunks_mut::<V>().0);
    blocks.iter().zip(values).for_each(|(block, values)| decode(block, values));
}

/// The f16 at byte `at` of a block, as f32.
#[inline(always)]
fn half_at(block: &[u8], at: usize) -> f32 {
    // With its bits moved to their places in an f32, the f16 reads as its value times 2^-112, because the bias of the
    // exponent is 15 instead of 127. That holds for subnormal numbers too. This constant is 2^112.
    const BIAS_FACTOR: f32 = f32::from_bits((127 + 112) << 23);
    let bits = u16::from_le_bytes([block[at], block[at + 1]]);
    // Infinity and NaN.
    if bits & 0x7c00 == 0x7c00 {
        return f16::from_bits(bits).to_f32();
    }
    f32::from_bits((u32::from(bits & 0x8000) << 16) | (u32::from(bits & 0x7fff) << 13)) * BIAS_FACTOR
}

/// Decodes 4-bit integers as `scale * q + offset`. The first half of `values` comes from the low nibbles, the second
/// half from the high nibbles; each half has its own scale and offset.
#[inline(always)]
fn decode_nibbles(bytes: &[u8], scale: [f32; 2], offset: [f32; 2], values: &mut [f32]) {
    let (first_half, second_half) = values.split_at_mut(bytes.len());
    first_half.iter_mut().zip(bytes).for_each(|(value, q)| *value = scale[0] * f32::from(q & 15) + offset[0]);
    second_half.iter_mut().zip(bytes).for_each(|(value, q)| *value = scale[1] * f32::from(q >> 4) + offset[1]);
}

/// Decodes 5-bit integers as `scale * q + offset`: four bytes with the fifth bits, and sixteen bytes of nibbles, the
/// low ones first.
#[inline(always)]
fn decode_five_bits(bytes: &[u8], scale: f32, offset: f32, values: &mut [f32; 32]) {
    let fifth_bits = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    for (i, value) in values.iter_mut().enumerate() {
        let nibble = (bytes[4 + i % 16] >> (i / 16 * 4)) & 15;
        let fifth_bit = ((fifth_bits >> i) & 1) as u8;
        *value = scale * f32::from(nibble | fifth_bit << 4) + offset;
    }
}

/// Returns scale and offset of a group of a Q4_K or Q5_K block, which begins with two f16 (scales of scales and of
/// minima) and 12 bytes of packed six-bit scales and minima.
#[inline(always)]
fn scale_and_offset(block: &[u8], group: usize) -> (f32, f32) {
    let packed = &block[4..16];
    let (scale, minimum) = if group < 4 {
        // The lower six bits of a byte each.
        (packed[group] & 63, packed[group + 4] & 63)
    } else {
        // The lower four bits of both are in one byte, the upper two in the upper bits of the bytes of `group - 4`.
        let lower_bits = packed[group + 4];
        let (upper_of_scale, upper_of_minimum) = (packed[group - 4] >> 6, packed[group] >> 6);
        ((lower_bits & 15) | (upper_of_scale << 4), (lower_bits >> 4) | (upper_of_minimum << 4))
    };
    (half_at(block, 0) * f32::from(scale), -half_at(block, 2) * f32::from(minimum))
}

/// Decodes a Q4_K block: eight groups of 32 values. The block holds its scales and 128 bytes of nibbles.
#[inline(always)]
fn q4_k(block: &[u8; 144], values: &mut [f32; 256]) {
    let pairs = block[16..].chunks_exact(32).zip(values.chunks_exact_mut(64));
    for (pair, (bytes, values)) in pairs.enumerate() {
        let (low_scale, low_offset) = scale_and_offset(block, 2 * pair);
        let (high_scale, high_offset) = scale_and_offset(block, 2 * pair + 1);
        decode_nibbles(bytes, [low_scale, high_scale], [low_offset, high_offset], values);
    }
}

/// Decodes a Q5_K block: as Q4_K, with 32 bytes of fifth bits before the nibbles. Bit `i` of these bytes is for group
/// `i`.
#[inline(always)]
fn q5_k(block: &[u8; 176], values: &mut [f32; 256]) {
    let (fifth_bits, nibbles) = block[16..].split_at(32);
    for (group, values) in values.chunks_exact_mut(32).enumerate() {
        let (scale, offset) = scale_and_offset(block, group);
        // Two groups share 32 bytes of nibbles.
        let nibbles = &nibbles[32 * (group / 2)..];
        for ((value, nibbles), fifth_bits) in values.iter_mut().zip(nibbles).zip(fifth_bits) {
            let nibble = (nibbles >> (group % 2 * 4)) & 15;
            let fifth_bit = (fifth_bits >> group) & 1;
            *value = scale * f32::from(nibble | fifth_bit << 4) + offset;
        }
    }
}

/// The place of the bit pairs of a group of 16 values. Eight groups (half a block) share 32 bytes of bit pairs. Two
/// groups, of 16 bytes each, share one of the four pairs of these bytes.
struct PairPlace {
    /// Which half of the block.
    half: usize,
    /// Which of the four pairs of a byte.
    pair: usize,
    /// The first byte of the group among the 32 bytes.
    first_byte: usize,
}

impl PairPlace {
    #[inline(always)]
    fn of(group: usize) -> Self {
        Self { half: group / 8, pair: group / 2 % 4, first_byte: group % 2 * 16 }
    }
}

/// Decodes a Q3_K block: sixteen groups of 16 values. The block holds 32 bytes of third bits, 64 bytes of lower bit
/// pairs, 12 bytes of packed six-bit scales and an f16 scale.
#[inline(always)]
fn q3_k(block: &[u8; 110], values: &mut [f32; 256]) {
    let (third_bits, rest) = block.split_at(32);
    let (bit_pairs, rest) = rest.split_at(64);
    let (packed_scales, block_scale) = rest.split_at(12);
    let block_scale = half_at(block_scale, 0);
    for (group, values) in values.chunks_exact_mut(16).enumerate() {
        let lower_bits = (packed_scales[group % 8] >> (group / 8 * 4)) & 15;
        let upper_bits = (packed_scales[8 + group % 4] >> (group / 4 * 2)) & 3;
        let scale = block_scale * (i32::from(lower_bits | (upper_bits << 4)) - SIX_BIT_BIAS) as f32;
        let PairPlace { half, pair, first_byte } = PairPlace::of(group);
        let third_bits = &third_bits[first_byte..][..16];
        let bit_pairs = &bit_pairs[32 * half + first_byte..][..16];
        for ((value, third_bits), bit_pairs) in values.iter_mut().zip(third_bits).zip(bit_pairs) {
            let third_bit = (third_bits >> (4 * half + pair)) & 1;
            let q = ((bit_pairs >> (2 * pair)) & 3) | third_bit << 2;
            *value = scale * (i32::from(q) - THREE_BIT_BIAS) as f32;
        }
    }
}

/// Decodes a Q2_K block: sixteen groups of 16 values. The block holds 16 bytes with the scale (low nibble) and the
/// minimum of each group, 64 bytes of bit pairs, and two f16: the scales of scales and of minima.
#[inline(always)]
fn q2_k(block: &[u8; 84], values: &mut [f32; 256]) {
    let (scales_and_minima, rest) = block.split_at(16);
    let (bit_pairs, rest) = rest.split_at(64);
    let (scale_of_scales, scale_of_minima) = (half_at(rest, 0), half_at(rest, 2));
    for (group, values) in values.chunks_exact_mut(16).enumerate() {
        let scale = scale_of_scales * f32::from(scales_and_minima[group] & 15);
        let minimum = scale_of_minima * f32::from(scales_and_minima[group] >> 4);
        let PairPlace { half, pair, first_byte } = PairPlace::of(group);
        for (value, bit_pairs) in values.iter_mut().zip(&bit_pairs[32 * half + first_byte..][..16]) {
            *value = scale * f32::from((bit_pairs >> (2 * pair)) & 3) - minimum;
        }
    }
}

/// The sixteen levels of IQ4_NL and IQ4_XS, which are closer together near 0.
const LEVELS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Decodes nibbles as `scale * level`. The first half of `values` comes from the low nibbles.
#[inline(always)]
fn decode_levels(bytes: &[u8], scale: f32, values: &mut [f32]) {
    let (first_half, second_half) = values.split_at_mut(bytes.len());
    first_half.iter_mut().zip(bytes).for_each(|(value, q)| *value = scale * f32::from(LEVELS[usize::from(q & 15)]));
    second_half.iter_mut().zip(bytes).for_each(|(value, q)| *value = scale * f32::from(LEVELS[usize::from(q >> 4)]));
}

/// Decodes an IQ4_XS block: eight groups of 32 values. The block holds an f16 scale, the upper bit pairs of the groups'
/// six-bit scales, their low nibbles, and 128 bytes of nibbles.
#[inline(always)]
fn iq4_xs(block: &[u8; 136], values: &mut [f32; 256]) {
    let (block_scale, upper_bits_of_scales) = (half_at(block, 0), u16::from_le_bytes([block[2], block[3]]));
    let (lower_bits_of_scales, nibbles) = block[4..].split_at(4);
    for (group, values) in values.chunks_exact_mut(32).enumerate() {
        let lower_bits = (lower_bits_of_scales[group / 2] >> (group % 2 * 4)) & 15;
        let upper_bits = (upper_bits_of_scales >> (2 * group)) & 3;
        let group_scale = (i32::from(lower_bits) | i32::from(upper_bits) << 4) - SIX_BIT_BIAS;
        decode_levels(&nibbles[16 * group..][..16], block_scale * group_scale as f32, values);
    }
}

/// Decodes a Q6_K block: sixteen groups of 16 values. The block holds 128 bytes of lower nibbles, 64 bytes of upper
/// bit pairs, 16 eight-bit scales and an f16 scale.
#[inline(always)]
fn q6_k(block: &[u8; 210], values: &mut [f32; 256]) {
    let (nibbles, rest) = block.split_at(128);
    let (bit_pairs, rest) = rest.split_at(64);
    let (scales, block_scale) = rest.split_at(16);
    let block_scale = half_at(block_scale, 0);
    for (group, values) in values.chunks_exact_mut(16).enumerate() {
        let PairPlace { half, pair, first_byte } = PairPlace::of(group);
        // Eight groups share 64 bytes of nibbles. The groups of the first and third pair have the low and the high
        // nibbles of the first 32 bytes, the groups of the second and fourth pair those of the last 32 bytes.
        let nibbles = &nibbles[64 * half + 32 * (pair % 2) + first_byte..][..16];
        let bit_pairs = &bit_pairs[32 * half + first_byte..][..16];
        let scale = block_scale * f32::from(scales[group] as i8);
        for ((value, nibbles), bit_pairs) in values.iter_mut().zip(nibbles).zip(bit_pairs) {
            let nibble = (nibbles >> (pair / 2 * 4)) & 15;
            let bit_pair = (bit_pairs >> (2 * pair)) & 3;
            *value = scale * (i32::from(nibble | (bit_pair << 4)) - SIX_BIT_BIAS) as f32;
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
