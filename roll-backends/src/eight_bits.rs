//! Matrices stored in eight bits per number, with one f32 scale per row.

use std::borrow::Cow;

use burn_tensor::{Device, Int, Tensor};
use half::f16;
use rayon::prelude::*;
use roll_core::{Error, Result};

use crate::weights::SegmentMemory;

/// An eight-bit number format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EightBits {
    /// Integers from -128 to 127.
    Int8,
    /// FP8 E4M3: four bits of exponent, three of mantissa; up to 448, without infinity.
    E4m3,
    /// FP8 E5M2: five bits of exponent, two of mantissa; the upper byte of an f16.
    E5m2,
}

/// The sign of a code of either float type.
const SIGN_BIT: u8 = 0x80;
/// Biases of the exponents.
const F32_BIAS: u32 = 127;
const E4M3_BIAS: u32 = 7;
const E5M2_BIAS: u32 = 15;
/// Bits of the mantissa of an f32.
const F32_MANTISSA_BITS: u32 = 23;

impl EightBits {
    /// The number that `code` represents. Every such number is exact in bf16.
    pub fn value(self, code: u8) -> f32 {
        match self {
            Self::Int8 => f32::from(code as i8),
            Self::E4m3 => {
                let (exponent, mantissa) = (code >> 3 & 15, code & 7);
                let magnitude = match (exponent, mantissa) {
                    (15, 7) => f32::NAN,
                    // Subnormal: mantissa / 8 * 2^-6.
                    (0, mantissa) => f32::from(mantissa) / 512.0,
                    (exponent, mantissa) => {
                        let f32_exponent = u32::from(exponent) + F32_BIAS - E4M3_BIAS;
                        f32::from_bits(f32_exponent << F32_MANTISSA_BITS) * (1.0 + f32::from(mantissa) / 8.0)
                    }
                };
                if code & SIGN_BIT == 0 { magnitude } else { -magnitude }
            }
            // The upper byte of an f16.
            Self::E5m2 => f16::from_bits(u16::from(code) << 8).to_f32(),
        }
    }

    /// The numbers that the 256 codes represent.
    pub fn table(self) -> [f32; 256] {
        std::array::from_fn(|code| self.value(code as u8))
    }

    /// The largest number that [`EightBits::code`] produces. For `Int8` this is 127, whose negative also has a code.
    pub fn largest(self) -> f32 {
        match self {
            Self::Int8 => 127.0,
            Self::E4m3 => 448.0,
            Self::E5m2 => 57_344.0,
        }
    }

    /// Returns the code of the number nearest to `value`: ties go to the even code, values beyond the range are clamped
    /// to [`EightBits::largest`].
    pub fn code(self, value: f32) -> u8 {
        let value = value.clamp(-self.largest(), self.largest());
        let (mantissa_bits, bias) = match self {
            Self::Int8 => return value.round_ties_even() as i8 as u8,
            Self::E4m3 => (3, E4M3_BIAS),
            Self::E5m2 => (2, E5M2_BIAS),
        };
        let sign = if value.is_sign_negative() { SIGN_BIT } else { 0 };
        let bits = value.abs().to_bits();
        // Below the smallest normal number, 2^(1 - bias), numbers are evenly spaced.
        let smallest_normal = f32::from_bits((F32_BIAS + 1 - bias) << F32_MANTISSA_BITS);
        if value.abs() < smallest_normal {
            let steps = value.abs() / smallest_normal * f32::from(1u8 << mantissa_bits);
            return sign | steps.round_ties_even() as u8;
        }
        // Normal numbers: drops the lower bits of f32's mantissa, to nearest with ties to even, and changes the bias.
        let dropped_bits = F32_MANTISSA_BITS - mantissa_bits;
        let rounded = (bits + (1 << (dropped_bits - 1)) - 1 + (bits >> dropped_bits & 1)) >> dropped_bits;
        sign | (rounded - ((F32_BIAS - bias) << mantissa_bits)) as u8
    }
}

/// A matrix in host memory: row `i` is the decoded codes of that row times `scales[i]`.
#[derive(Clone, Debug, PartialEq)]
pub struct ScaledRows {
    kind: EightBits,
    codes: Vec<u8>,
    scales: Vec<f32>,
    shape: [usize; 2],
}

impl ScaledRows {
    /// Creates a matrix of `shape` (`[rows, columns]`) from row-major codes and one scale per row, or a single scale
    /// for all rows. Fails if the numbers of codes or scales do not match the shape.
    pub fn new(kind: EightBits, codes: Vec<u8>, scales: Vec<f32>, shape: [usize; 2]) -> Result<Self> {
        let [rows, columns] = shape;
        let scales = if scales.len() == 1 { vec![scales[0]; rows] } else { scales };
        if rows.checked_mul(columns) != Some(codes.len()) || scales.len() != rows {
            return Err(Error::Misuse(format!(
                "a matrix of {rows} x {columns} cannot have {} codes and {} scales",
                codes.len(),
                scales.len()
            )));
        }
        Ok(Self { kind, codes, scales, shape })
    }

    /// Quantises the matrix `tensor` (`[rows, columns]`): the largest magnitude of each row is mapped to the largest
    /// code. Fails if `tensor` is not a matrix or contains a number that is not finite.
    pub fn quantised(tensor: &roll_core::Tensor, kind: EightBits) -> Result<Self> {
        let [rows, columns] = *tensor.shape() else {
            return Err(Error::shape("matrix to store in eight bits", "[rows, columns]", tensor.shape()));
        };
        let values = tensor.to_f32_vec();
        let (mut codes, mut scales) = (vec![0; values.len()], vec![1.0; rows]);
        // The iterators panic on a width of 0.
        let width = columns.max(1);
        let matrix_rows = codes.par_chunks_mut(width).zip(values.par_chunks(width)).zip(&mut scales);
        matrix_rows.for_each(|((codes, values), scale)| {
            let largest = values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
            // A row of zeros keeps the scale 1.
            if largest > 0.0 {
                *scale = largest / kind.largest();
            }
            codes.iter_mut().zip(values).for_each(|(code, value)| *code = kind.code(value / *scale));
        });
        // Checked here, because `f32::max` ignores NaN above.
        if !values.iter().all(|value| value.is_finite()) {
            return Err(Error::Misuse(
                "a matrix with numbers that are not finite cannot be stored in eight bits".into(),
            ));
        }
        Ok(Self { kind, codes, scales, shape: [rows, columns] })
    }

    /// The number format of the codes.
    pub fn kind(&self) -> EightBits {
        self.kind
    }

    /// Rows and columns.
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// The codes, row-major.
    pub fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// The scale of each row.
    pub fn scales(&self) -> &[f32] {
        &self.scales
    }

    /// Decodes the matrix: `[rows, columns]`, row-major.
    pub fn decode(&self) -> Vec<f32> {
        let (table, columns) = (self.kind.table(), self.shape[1]);
        let mut values = vec![0.0; self.codes.len()];
        let rows = values.chunks_exact_mut(columns.max(1)).zip(self.codes.chunks_exact(columns.max(1)));
        for ((values, codes), scale) in rows.zip(&self.scales) {
            values.iter_mut().zip(codes).for_each(|(value, code)| *value = table[usize::from(*code)] * scale);
        }
        values
    }
}

/// A frozen matrix on a device, one byte per number.
#[derive(Clone, Debug)]
pub struct ScaledMatrix {
    /// The number format of the codes.
    pub kind: EightBits,
    /// The codes, u8, `[rows, columns]`.
    pub codes: Tensor<2, Int>,
    /// The scale of each row, f32, `[rows]`.
    pub scales: Tensor<1>,
    shape: [usize; 2],
}

impl ScaledMatrix {
    /// Uploads `rows`. The device must store integers of eight bits ([`crate::device::has_bytes`]).
    pub fn new(rows: ScaledRows, device: &Device) -> Self {
        Self::uploaded(rows, device, &mut SegmentMemory::default())
    }

    /// Like [`ScaledMatrix::new`], into `memory` if it has room.
    pub(crate) fn uploaded(rows: ScaledRows, device: &Device, memory: &mut SegmentMemory) -> Self {
        let codes = memory.upload_codes(rows.codes, rows.shape, device);
        let scales = memory.upload(Cow::Owned(rows.scales), [rows.shape[0]], device);
        Self { kind: rows.kind, codes, scales, shape: rows.shape }
    }

    /// Assembles a matrix from its fields.
    pub(crate) fn from_parts(kind: EightBits, codes: Tensor<2, Int>, scales: Tensor<1>) -> Self {
        let shape = codes.dims();
        Self { kind, codes, scales, shape }
    }

    /// Rows and columns.
    pub fn shape(&self) -> &[usize; 2] {
        &self.shape
    }

    /// Size in memory in bytes.
    pub fn size(&self) -> usize {
        self.shape[0] * self.shape[1] + 4 * self.shape[0]
    }
}

#[cfg(test)]
mod tests {
    use burn_tensor::TensorData;

    use super::*;

    const KINDS: [EightBits; 3] = [EightBits::Int8, EightBits::E4m3, EightBits::E5m2];

    #[test]
    fn decoded_codes_match_the_standards() {
        let e4m3 = |code| EightBits::E4m3.value(code);
        assert_eq!([e4m3(0x7e), e4m3(0x38), e4m3(0x08), e4m3(0x01)], [448.0, 1.0, 0.015_625, 0.001_953_125]);
        assert_eq!((e4m3(0xfe), e4m3(0xb8)), (-448.0, -1.0));
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
        let e5m2 = |code| EightBits::E5m2.value(code);
        assert_eq!([e5m2(0x7b), e5m2(0x3c), e5m2(0xbc)], [57_344.0, 1.0, -1.0]);
        assert_eq!([0x80, 0xff, 0x7f].map(|code| EightBits::Int8.value(code)), [-128.0, -1.0, 127.0]);
    }

    #[test]
    fn encoding_rounds_to_the_nearest_code() {
        for kind in KINDS {
            let used = |code: &u8| kind.value(*code).abs() <= kind.largest();
            let mut numbers: Vec<f32> = (0..=255).filter(used).map(|code| kind.value(code)).collect();
            numbers.sort_by(f32::total_cmp);
            numbers.dedup_by(|a, b| a == b);
            for pair in numbers.windows(2) {
                for number in pair {
                    assert_eq!(kind.value(kind.code(*number)), *number, "{kind:?}");
                }
                let between = |part: f32| kind.value(kind.code(pair[0] + (pair[1] - pair[0]) * part));
                assert_eq!([between(0.4375), between(0.5625)], [pair[0], pair[1]], "{kind:?}");
                let middle = kind.code(pair[0] + (pair[1] - pair[0]) * 0.5);
                assert_eq!(middle & 1, 0, "{kind:?}: {pair:?}");
            }
            assert_eq!(kind.value(kind.code(1e9)), kind.largest());
            assert_eq!(kind.value(kind.code(-1e9)), -kind.largest());
        }
    }

    #[test]
    fn every_code_is_exact_in_bf16() {
        for kind in KINDS {
            let exact = |value: &f32| value.is_nan() || half::bf16::from_f32(*value).to_f32() == *value;
            assert!(kind.table().iter().all(exact), "{kind:?}");
        }
    }

    #[test]
    fn quantised_matrices_are_close_and_equal_on_the_device() {
        let device = crate::device("flex").unwrap();
        let values: Vec<f32> = (0..6 * 40).map(|i| (i as f32 * 0.7).sin() * (1.0 + (i / 40) as f32)).collect();
        let tensor = roll_core::Tensor::new(values.clone(), [6, 40]).unwrap();
        for (kind, most) in [(EightBits::Int8, 0.5 / 127.0), (EightBits::E4m3, 1.0 / 16.0)] {
            let rows = ScaledRows::quantised(&tensor, kind).unwrap();
            let found = rows.decode();
            for (i, (found, value)) in found.iter().zip(&values).enumerate() {
                // Integers: relative to the largest number of the row. Floats: relative to the number itself, except
                // for the smallest.
                let size = if kind == EightBits::Int8 { 1.0 + (i / 40) as f32 } else { value.abs().max(0.01) };
                assert!((found - value).abs() <= 1.001 * most * size, "{kind:?}: {found} for {value}");
            }
            let matrix = ScaledMatrix::new(rows, &device);
            let downloaded = |part: Tensor<2>| part.into_data().try_into_vec::<f32>().unwrap();
            assert_eq!(downloaded(matrix.rows(0, 6)), found);
            assert_eq!(downloaded(matrix.rows(2, 3)), found[80..200]);
            let some = Tensor::from_data(TensorData::new(vec![5i64, 0], [2]), &device);
            assert_eq!(downloaded(matrix.select(some)), [&found[200..], &found[..40]].concat());
            assert_eq!(matrix.size(), 6 * 44);
        }
    }

    #[test]
    fn rejects_wrong_sizes_and_non_finite_values() {
        assert!(ScaledRows::new(EightBits::Int8, vec![0; 6], vec![1.0; 3], [2, 3]).is_err());
        assert!(ScaledRows::new(EightBits::Int8, vec![0; 5], vec![1.0], [2, 3]).is_err());
        assert_eq!(ScaledRows::new(EightBits::Int8, vec![0; 6], vec![0.5], [2, 3]).unwrap().scales(), [0.5; 2]);
        let bad = roll_core::Tensor::new(vec![1.0, f32::NAN], [1, 2]).unwrap();
        assert!(ScaledRows::quantised(&bad, EightBits::Int8).is_err());
        let zeros = ScaledRows::quantised(&roll_core::Tensor::zeros([2, 2]), EightBits::E4m3).unwrap();
        assert_eq!(zeros.decode(), [0.0; 4]);
    }
}
