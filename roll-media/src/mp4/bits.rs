//! Bit reader for H.264 parameter sets.

/// Reads bits, most significant first. Emulation prevention bytes (the 3 in 0 0 3) are removed before. All methods
/// return `None` past the end.
pub(super) struct Bits {
    bytes: Vec<u8>,
    position: usize,
}

impl Bits {
    /// Creates a reader of `nal`, a NAL unit without its header byte.
    pub fn new(nal: &[u8]) -> Self {
        let mut bytes = Vec::with_capacity(nal.len());
        let mut zeros = 0;
        for &byte in nal {
            if zeros >= 2 && byte == 3 {
                zeros = 0;
                continue;
            }
            zeros = if byte == 0 { zeros + 1 } else { 0 };
            bytes.push(byte);
        }
        Self { bytes, position: 0 }
    }

    /// Reads one bit.
    pub fn bit(&mut self) -> Option<bool> {
        let byte = *self.bytes.get(self.position / 8)?;
        let bit = byte >> (7 - self.position % 8) & 1;
        self.position += 1;
        Some(bit == 1)
    }

    /// Reads `n` bits, at most 32.
    pub fn bits(&mut self, n: u32) -> Option<u32> {
        (0..n).try_fold(0u32, |value, _| Some(value << 1 | u32::from(self.bit()?)))
    }

    /// Reads an unsigned Exp-Golomb code (`ue(v)` in the standard). Returns `None` for a number of more than 32 bits.
    pub fn ue(&mut self) -> Option<u32> {
        let mut zeros = 0;
        while !self.bit()? {
            zeros += 1;
            if zeros > 31 {
                return None;
            }
        }
        Some((1u32 << zeros) - 1 + self.bits(zeros)?)
    }

    /// Reads a signed Exp-Golomb code (`se(v)` in the standard).
    pub fn se(&mut self) -> Option<i32> {
        let code = i64::from(self.ue()?);
        Some(if code % 2 == 1 { (code + 1) / 2 } else { -code / 2 } as i32)
    }
}
