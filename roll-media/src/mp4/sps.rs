//! Parses size, sampling and colour of a sequence parameter set (ITU-T H.264, 7.3.2.1.1 and Annex E).

use super::bits::Bits;
use crate::color::DeclaredColor;
use crate::picture::check_size;

/// Side of a macroblock in pixels.
const MACROBLOCK: usize = 16;
/// Maximum number of macroblocks in a row or column. It only bounds the arithmetic: [`check_size`] has a lower limit.
const MAX_MACROBLOCKS: usize = 4096;

/// The fields of a sequence parameter set that this crate uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sps {
    pub width: usize,
    pub height: usize,
    /// The colour, whose matrix may be unspecified.
    pub color: DeclaredColor,
    /// Pixel aspect ratio, width to height, if specified.
    pub pixel_aspect: Option<[u32; 2]>,
}

/// `chroma_format_idc` of chroma with half the width and height.
const CHROMA_4_2_0: u32 = 1;
/// `chroma_format_idc` of chroma with the full width and height.
const CHROMA_4_4_4: u32 = 3;

impl Sps {
    /// Parses a NAL unit of type 7. Fails on streams that the decoder cannot read or should not try to read.
    pub fn parse(nal: &[u8]) -> Result<Self, String> {
        let [_header, profile, _constraints, _level, rest @ ..] = nal else {
            return Err("a sequence parameter set is cut short".into());
        };
        let mut bits = Bits::new(rest);
        let sps = Self::fields(*profile, &mut bits).ok_or("a sequence parameter set is cut short or damaged")??;
        check_size(sps.width, sps.height)?;
        Ok(sps)
    }

    /// Reads the fields in the order of the standard. Returns `None` if they are cut short, and an inner error if the
    /// decoder cannot read the stream.
    fn fields(profile: u8, bits: &mut Bits) -> Option<Result<Self, String>> {
        bits.ue()?; // seq_parameter_set_id
        // Profiles without the field have 4:2:0.
        let mut chroma_format = CHROMA_4_2_0;
        if matches!(profile, 100 | 110 | 122 | 244 | 44 | 83 | 86 | 118 | 128 | 138 | 139 | 134 | 135) {
            chroma_format = bits.ue()?;
            if chroma_format == CHROMA_4_4_4 {
                bits.bit()?; // separate_colour_plane_flag
            }
            let (luma_depth, chroma_depth) = (bits.ue()?, bits.ue()?);
            if (luma_depth, chroma_depth) != (0, 0) {
                return Some(Err(format!("{} bits per sample; only 8 can be read", luma_depth.saturating_add(8))));
            }
            bits.bit()?; // qpprime_y_zero_transform_bypass_flag
            let has_scaling_lists = bits.bit()?;
            if has_scaling_lists {
                let lists = if chroma_format == CHROMA_4_4_4 { 12 } else { 8 };
                for list in 0..lists {
                    let is_present = bits.bit()?;
                    if is_present {
                        // Six lists of 4x4 blocks, and then lists of 8x8 blocks.
                        skip_scaling_list(bits, if list < 6 { 16 } else { 64 })?;
                    }
                }
            }
        }
        if chroma_format != CHROMA_4_2_0 {
            let name = ["4:0:0", "4:2:0", "4:2:2", "4:4:4"].get(chroma_format as usize).unwrap_or(&"unknown");
            return Some(Err(format!("chroma sampling {name}; only 4:2:0 can be read")));
        }
        bits.ue()?; // log2_max_frame_num_minus4
        skip_picture_order(bits)?;
        bits.ue()?; // max_num_ref_frames
        bits.bit()?; // gaps_in_frame_num_value_allowed_flag
        let width_minus_1 = bits.ue()? as usize; // pic_width_in_mbs_minus1
        let height_minus_1 = bits.ue()? as usize; // pic_height_in_map_units_minus1
        let (mut width, mut height) = ((width_minus_1 + 1) * MACROBLOCK, (height_minus_1 + 1) * MACROBLOCK);
        if width_minus_1 > MAX_MACROBLOCKS || height_minus_1 > MAX_MACROBLOCKS {
            return Some(Err(format!("frames of {width} x {height} pixels are not accepted")));
        }
        let is_progressive = bits.bit()?; // frame_mbs_only_flag
        if !is_progressive {
            return Some(Err("interlaced H.264; only progressive H.264 can be read".into()));
        }
        bits.bit()?; // direct_8x8_inference_flag
        let is_cropped = bits.bit()?;
        if is_cropped {
            // Offsets are in samples of chroma, two pixels each.
            let [left, right, top, bottom] = [bits.ue()?, bits.ue()?, bits.ue()?, bits.ue()?].map(|v| v as usize);
            width = width.checked_sub(2 * (left + right))?;
            height = height.checked_sub(2 * (top + bottom))?;
        }
        let color = DeclaredColor { matrix_code: DeclaredColor::UNSPECIFIED_MATRIX, is_full_range: false };
        let mut sps = Self { width, height, color, pixel_aspect: None };
        let has_vui = bits.bit()?;
        if has_vui {
            // A truncated VUI only loses the missing fields.
            let _ = sps.read_vui(bits);
        }
        Some(Ok(sps))
    }

    /// Reads pixel aspect ratio and colour from the video usability information.
    fn read_vui(&mut self, bits: &mut Bits) -> Option<()> {
        let has_pixel_aspect = bits.bit()?;
        if has_pixel_aspect {
            self.pixel_aspect = match bits.bits(8)? as usize {
                // `Extended_SAR`: the ratio itself follows.
                255 => Some([bits.bits(16)?, bits.bits(16)?]),
                code => PIXEL_ASPECTS.get(code).copied(),
            };
        }
        let has_overscan = bits.bit()?;
        if has_overscan {
            bits.bit()?; // overscan_appropriate_flag
        }
        let has_signal_type = bits.bit()?;
        if has_signal_type {
            bits.bits(3)?; // video_format
            self.color.is_full_range = bits.bit()?;
            let has_colour = bits.bit()?;
            if has_colour {
                bits.bits(16)?; // primaries and transfer
                self.color.matrix_code = bits.bits(8)? as u8;
            }
        }
        Some(())
    }
}

/// Pixel aspect ratios by `aspect_ratio_idc` (Table E-1).
const PIXEL_ASPECTS: [[u32; 2]; 17] = [
    [0, 0],
    [1, 1],
    [12, 11],
    [10, 11],
    [16, 11],
    [40, 33],
    [24, 11],
    [20, 11],
    [32, 11],
    [80, 33],
    [18, 11],
    [15, 11],
    [64, 33],
    [160, 99],
    [4, 3],
    [3, 2],
    [2, 1],
];

/// Skips the fields of the order in which pictures are shown (`pic_order_cnt_type`).
fn skip_picture_order(bits: &mut Bits) -> Option<()> {
    match bits.ue()? {
        0 => {
            bits.ue()?; // log2_max_pic_order_cnt_lsb_minus4
        }
        1 => {
            bits.bit()?; // delta_pic_order_always_zero_flag
            bits.se()?; // offset_for_non_ref_pic
            bits.se()?; // offset_for_top_to_bottom_field
            let cycle = bits.ue()?;
            if cycle > 255 {
                return None;
            }
            for _ in 0..cycle {
                bits.se()?; // offset_for_ref_frame
            }
        }
        _ => {}
    }
    Some(())
}

/// Skips a scaling list of `size` numbers (7.3.2.1.1.1). Each is coded as the difference from the last one, modulo 256;
/// the number 0 ends the coded numbers.
fn skip_scaling_list(bits: &mut Bits, size: u32) -> Option<()> {
    // The standard's initial value of both.
    let (mut last, mut next) = (8i32, 8i32);
    for _ in 0..size {
        if next != 0 {
            next = last.wrapping_add(bits.se()?).wrapping_add(256).rem_euclid(256);
        }
        if next != 0 {
            last = next;
        }
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn truncated_parameter_sets_do_not_panic() {
        // High profile, 176 x 144, as x264 writes it.
        let sps = [
            0x67, 0x64, 0x00, 0x0b, 0xac, 0xd9, 0x42, 0xc4, 0xe8, 0x40, 0x00, 0x00, 0x03, 0x00, 0x40, 0x00, 0x00, 0x0f,
            0x03, 0xc5, 0x0a, 0x65, 0x80,
        ];
        let parsed = Sps::parse(&sps).unwrap();
        assert_eq!((parsed.width, parsed.height), (176, 144));
        for end in 0..sps.len() {
            let _ = Sps::parse(&sps[..end]);
        }
        assert!(Sps::parse(&sps[..6]).is_err());
        let mut noise = 12345u32;
        for _ in 0..20_000 {
            let mut bytes = sps;
            for byte in &mut bytes[1..] {
                noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                if noise >> 30 == 0 {
                    *byte = (noise >> 8) as u8;
                }
            }
            let _ = Sps::parse(&bytes);
        }
    }
}
