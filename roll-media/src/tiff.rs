//! Reads the first directory of a TIFF file. EXIF data is a TIFF file too.

/// Maximum number of values of an entry that are read. A picture of the largest size has fewer rows, and so fewer
/// strips.
const MAX_VALUES: u32 = 1 << 15;

// Tags of entries.
const BITS_PER_SAMPLE: u16 = 258;
const COMPRESSION: u16 = 259;
const PHOTOMETRIC: u16 = 262;
const FILL_ORDER: u16 = 266;
const STRIP_OFFSETS: u16 = 273;
const ORIENTATION: u16 = 274;
const SAMPLES_PER_PIXEL: u16 = 277;
const STRIP_BYTES: u16 = 279;
const PLANAR: u16 = 284;
const PREDICTOR: u16 = 317;
const TILE_OFFSETS: u16 = 324;
const SAMPLE_FORMAT: u16 = 339;

// Values of `COMPRESSION`.
const UNCOMPRESSED: u64 = 1;
const FIRST_FAX: u64 = 2;
const LAST_FAX: u64 = 4;
const LZW: u64 = 5;
const DEFLATE: u64 = 8;
const PACK_BITS: u64 = 32773;
const OLD_DEFLATE: u64 = 32946;

// Values of `PHOTOMETRIC`.
const WHITE_IS_ZERO: u64 = 0;
const BLACK_IS_ZERO: u64 = 1;
const RGB: u64 = 2;
const PALETTE: u64 = 3;

/// The default and usual value of `PLANAR`, `SAMPLE_FORMAT`, `FILL_ORDER` and `PREDICTOR`: one plane, unsigned numbers,
/// the highest bit first, and no prediction.
const USUAL: u64 = 1;
/// The value of `PREDICTOR` for differences from the pixel to the left.
const HORIZONTAL_PREDICTOR: u64 = 2;

/// Bytes of an entry of a directory.
const ENTRY_BYTES: usize = 12;

/// The error of a kind of TIFF that ffmpeg's decoder reads wrongly.
fn unreadable(kind: &str) -> Result<(), String> {
    Err(format!("TIFF of a kind that cannot be read ({kind}); convert it to PNG"))
}

/// A TIFF file in memory and its first directory.
pub(crate) struct Tiff<'a> {
    bytes: &'a [u8],
    is_big_endian: bool,
    /// The entries of the first directory, 12 bytes each: tag, type, number of values, and the values or their offset.
    entries: &'a [u8],
}

impl<'a> Tiff<'a> {
    /// Reads the header. `None` if `bytes` is not a TIFF file, or if its directory lies outside of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Option<Self> {
        let is_big_endian = match bytes.get(..4)? {
            b"II*\0" => false,
            b"MM\0*" => true,
            _ => return None,
        };
        let mut tiff = Self { bytes, is_big_endian, entries: &[] };
        let directory = bytes.get(usize::try_from(tiff.number(bytes.get(4..8)?)).ok()?..)?;
        let count = tiff.number(directory.get(..2)?) as usize;
        // If the list is cut short, its remaining entries are used.
        tiff.entries = directory[2..].get(..ENTRY_BYTES * count).unwrap_or(&directory[2..]);
        Some(tiff)
    }

    /// A number in the file's order of bytes.
    fn number(&self, bytes: &[u8]) -> u64 {
        let append = |number: u64, byte: &u8| number << 8 | u64::from(*byte);
        if self.is_big_endian { bytes.iter().fold(0, append) } else { bytes.iter().rev().fold(0, append) }
    }

    /// The values of an entry that are whole numbers, of any width. `None` if there is no such entry, or if it cannot
    /// be read.
    fn numbers(&self, tag: u16) -> Option<Vec<u64>> {
        let entry = self.entries.chunks_exact(ENTRY_BYTES).find(|entry| self.number(&entry[..2]) == u64::from(tag))?;
        let width = match self.number(&entry[2..4]) {
            // BYTE and SBYTE.
            1 | 6 => 1,
            // SHORT and SSHORT.
            3 | 8 => 2,
            // LONG, SLONG, and IFD, the offset of a directory.
            4 | 9 | 13 => 4,
            _ => return None,
        };
        let count = u32::try_from(self.number(&entry[4..8])).ok().filter(|count| *count <= MAX_VALUES)? as usize;
        let values = match count * width {
            // Up to four bytes of values are in the entry itself.
            0..=4 => &entry[8..8 + count * width],
            length => {
                let offset = usize::try_from(self.number(&entry[8..12])).ok()?;
                self.bytes.get(offset..offset.checked_add(length)?)?
            }
        };
        Some(values.chunks_exact(width).map(|value| self.number(value)).collect())
    }

    /// The value of the orientation tag, if it has exactly one.
    pub fn orientation_code(&self) -> Option<u64> {
        match self.numbers(ORIENTATION)?[..] {
            [code] => Some(code),
            _ => None,
        }
    }

    /// Fails for a picture whose pixels lie outside of the file. Fails for kinds of TIFF of which ffmpeg's decoder
    /// returns wrong pixels without an error: tiles, planes, JPEG, and samples other than grey, RGB and palettes of
    /// whole numbers.
    pub fn check_kind(&self) -> Result<(), String> {
        let first = |tag, default| self.numbers(tag).and_then(|n| n.first().copied()).unwrap_or(default);
        if self.numbers(TILE_OFFSETS).is_some() || self.numbers(STRIP_OFFSETS).is_none() {
            return unreadable("tiled, or without strips");
        }
        let samples = first(SAMPLES_PER_PIXEL, 1);
        if samples > 1 && first(PLANAR, USUAL) != USUAL {
            return unreadable("a plane for each colour");
        }
        let (compression, photometric) = (first(COMPRESSION, UNCOMPRESSED), first(PHOTOMETRIC, BLACK_IS_ZERO));
        // A second sample of grey, or a fourth one of RGB, is alpha.
        let is_known_kind = match compression {
            UNCOMPRESSED | LZW | DEFLATE | PACK_BITS | OLD_DEFLATE => match photometric {
                WHITE_IS_ZERO | BLACK_IS_ZERO => (1..=2).contains(&samples),
                RGB => (3..=4).contains(&samples),
                PALETTE => samples == 1,
                _ => false,
            },
            FIRST_FAX..=LAST_FAX => matches!(photometric, WHITE_IS_ZERO | BLACK_IS_ZERO) && samples == 1,
            _ => false,
        };
        if !is_known_kind {
            return unreadable(&format!(
                "compression {compression}, photometric interpretation {photometric}, {samples} samples per pixel"
            ));
        }
        self.check_samples(samples, photometric)?;
        self.check_strips()
    }

    /// Fails for samples whose depth, type, order or prediction ffmpeg's decoder reads wrongly.
    fn check_samples(&self, samples: u64, photometric: u64) -> Result<(), String> {
        let first = |tag, default| self.numbers(tag).and_then(|n| n.first().copied()).unwrap_or(default);
        let bits = self.numbers(BITS_PER_SAMPLE).unwrap_or(vec![1]);
        let depth = bits.first().copied().unwrap_or(1);
        let is_usual = match depth {
            1 | 8 => true,
            2 | 4 => photometric == PALETTE,
            16 => photometric != PALETTE,
            _ => false,
        };
        if !is_usual || bits.iter().any(|other| *other != depth) || (samples > 1 && depth < 8) {
            return unreadable(&format!("{depth} bits per sample"));
        }
        let is_unsigned = first(SAMPLE_FORMAT, USUAL) == USUAL;
        let has_usual_order = first(FILL_ORDER, USUAL) == USUAL;
        let has_known_predictor = matches!(first(PREDICTOR, USUAL), USUAL | HORIZONTAL_PREDICTOR);
        if !is_unsigned || !has_usual_order || !has_known_predictor {
            return unreadable("samples that are no unsigned numbers, in another order, or predicted otherwise");
        }
        Ok(())
    }

    /// Fails for a picture whose pixels lie outside of the file.
    fn check_strips(&self) -> Result<(), String> {
        let offsets = self.numbers(STRIP_OFFSETS).unwrap_or_default();
        let sizes = self.numbers(STRIP_BYTES).unwrap_or_default();
        let is_inside = |(from, size): (&u64, &u64)| from.saturating_add(*size) <= self.bytes.len() as u64;
        if sizes.len() != offsets.len() || !offsets.iter().zip(&sizes).all(is_inside) {
            return Err("the picture is cut short".into());
        }
        Ok(())
    }
}
