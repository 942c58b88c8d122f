//! Matrices that keep the block-quantised storage of their GGUF file. [`BlockType`] decodes one block, [`BlockMatrix`]
//! is a whole matrix of them.

mod types;

use std::ops::Range;

use roll_core::{Error, Result};

pub use types::{BlockType, name_of};

/// A matrix whose rows are sequences of quantised blocks. Rows are decoded a few at a time, where a product needs them.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockMatrix {
    kind: BlockType,
    bytes: Vec<u8>,
    rows: usize,
    columns: usize,
}

impl BlockMatrix {
    /// Creates a matrix of `shape` (`[rows, columns]`) from the blocks of all rows, in order. Fails if the block size
    /// does not divide the columns or the number of bytes does not match the shape.
    pub fn new(kind: BlockType, bytes: Vec<u8>, shape: [usize; 2]) -> Result<Self> {
        let [rows, columns] = shape;
        let expected = (columns / kind.values()).checked_mul(kind.bytes()).and_then(|row| row.checked_mul(rows));
        if columns % kind.values() != 0 || expected != Some(bytes.len()) {
            return Err(Error::Misuse(format!(
                "a matrix of {rows} x {columns} in blocks of {kind:?} cannot have {} bytes",
                bytes.len()
            )));
        }
        Ok(Self { kind, bytes, rows, columns })
    }

    /// Rows and columns.
    pub fn shape(&self) -> [usize; 2] {
        [self.rows, self.columns]
    }

    /// The storage type of the numbers.
    pub fn kind(&self) -> BlockType {
        self.kind
    }

    /// Size in memory, in bytes.
    pub fn size(&self) -> usize {
        self.bytes.len()
    }

    /// Returns a matrix whose row `i` is row `order[i]` of this matrix.
    pub fn reordered(&self, order: &[usize]) -> Self {
        let row_bytes = self.row_bytes();
        let bytes = order.iter().flat_map(|row| &self.bytes[row * row_bytes..][..row_bytes]).copied().collect();
        Self { bytes, rows: order.len(), ..*self }
    }

    /// Decodes some rows: `[rows.len(), columns]`, row-major.
    pub fn decode(&self, rows: Range<usize>) -> Vec<f32> {
        let mut values = vec![0.0; rows.len() * self.columns];
        self.decode_into(rows, &mut values);
        values
    }

    /// Decodes some rows into `values`, which holds `rows.len() * columns` numbers.
    pub fn decode_into(&self, rows: Range<usize>, values: &mut [f32]) {
        let row_bytes = self.row_bytes();
        self.kind.decode_into(&self.bytes[rows.start * row_bytes..rows.end * row_bytes], values);
    }

    /// Decodes some columns of some rows into `values`, row-major. Panics if `columns` does not begin and end at a
    /// block boundary.
    pub fn decode_part(&self, rows: Range<usize>, columns: Range<usize>, values: &mut [f32]) {
        let (row_bytes, block_values) = (self.row_bytes(), self.kind.values());
        assert!(
            columns.start % block_values == 0 && columns.end % block_values == 0,
            "columns {columns:?} in blocks of {block_values}"
        );
        let first_byte = columns.start / block_values * self.kind.bytes();
        let end_byte = columns.end / block_values * self.kind.bytes();
        for (row, values) in rows.zip(values.chunks_exact_mut(columns.len().max(1))) {
            self.kind.decode_into(&self.bytes[row * row_bytes..][first_byte..end_byte], values);
        }
    }

    fn row_bytes(&self) -> usize {
        self.columns / self.kind.values() * self.kind.bytes()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn sample() -> BlockMatrix {
        // Scales are 2^-8 (f16 `0x1c00`); the integers differ.
        let mut bytes: Vec<u8> = (0..3 * 2 * 34).map(|i| (i * 37 + 11) as u8).collect();
        bytes.chunks_exact_mut(34).for_each(|block| block[..2].copy_from_slice(&0x1c00u16.to_le_bytes()));
        BlockMatrix::new(BlockType::Q8_0, bytes, [3, 64]).unwrap()
    }

    #[test]
    fn decoded_parts_match_the_whole() {
        let matrix = sample();
        let whole = matrix.decode(0..3);
        assert_eq!(whole[64..], matrix.decode(1..3));
        let mut part = vec![0.0; 64];
        matrix.decode_part(1..3, 32..64, &mut part);
        assert_eq!((&part[..32], &part[32..]), (&whole[96..128], &whole[160..]));
        let reordered = matrix.reordered(&[2, 0]);
        assert_eq!((reordered.shape(), reordered.decode(0..1)), ([2, 64], whole[128..].to_vec()));
        assert_eq!(matrix.size(), 3 * 2 * 34);
    }

    #[test]
    fn rejects_blocks_that_do_not_fill_the_matrix() {
        for (length, shape) in [(68, [2, 64]), (68, [1, 48]), (34, [1, 64])] {
            assert!(BlockMatrix::new(BlockType::Q8_0, vec![0; length], shape).is_err());
        }
    }
}
