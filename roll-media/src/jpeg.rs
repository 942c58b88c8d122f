//! Checks that a JPEG file is whole.
//!
//! The decoder fills missing or damaged parts with grey, and reports only some of them. This module walks through the
//! entropy-coded data of every scan (ITU-T T.81, annexes F and G) without computing pixels. Errors are: a code that
//! does not exist, a scan that has fewer or more data than blocks, and restart markers out of order.
//!
//! Words of the standard: an *MCU* is a group of blocks of all components in a scan. A *band* is a range of
//! coefficients in a progressive scan. A *run* is a number of coefficients that are zero before one that is not. The
//! *size* of a coefficient is the number of its bits.

use crate::picture::check_size;

// Codes of markers (T.81, table B.1).

/// For private use in arithmetic coding; has no segment.
const TEM: u8 = 0x01;
/// Start of a baseline frame.
const SOF0: u8 = 0xc0;
/// Start of a progressive frame.
const SOF2: u8 = 0xc2;
// Starts of frames of other kinds (lossless, hierarchical, arithmetic coding).
const SOF3: u8 = 0xc3;
const SOF5: u8 = 0xc5;
const SOF11: u8 = 0xcb;
const SOF13: u8 = 0xcd;
const SOF15: u8 = 0xcf;
/// Huffman tables.
const DHT: u8 = 0xc4;
// Restart markers, numbered modulo 8.
const RST0: u8 = 0xd0;
const RST7: u8 = 0xd7;
/// Start of the picture.
const SOI: u8 = 0xd8;
/// End of the picture.
const EOI: u8 = 0xd9;
/// Start of a scan.
const SOS: u8 = 0xda;
/// Restart interval.
const DRI: u8 = 0xdd;

const CUT_SHORT: &str = "the picture is cut short";

/// Maximum number of scans; programs write about ten. Each may cost a walk over all blocks.
const MAX_SCANS: usize = 100;

fn damaged(what: &str) -> String {
    format!("the picture is damaged: {what}")
}

/// Fails if the JPEG file is cut short or damaged. Kinds of JPEG that no decoder here reads (arithmetic coding,
/// lossless) pass.
pub(crate) fn check(bytes: &[u8]) -> Result<(), String> {
    // The two bytes of the marker SOI begin the file.
    let mut jpeg = Jpeg { bytes, position: 2, ..Jpeg::default() };
    while let Some(marker) = jpeg.next_marker()? {
        match marker {
            EOI => return jpeg.check_scans(),
            // A restart marker after a scan is harmless, but data after the marker is not.
            RST0..=RST7 if bytes.get(jpeg.position).is_some_and(|next| *next != 0xff) => {
                return Err(damaged("a scan has more data than blocks"));
            }
            TEM | RST0..=RST7 | SOI => continue, // markers without a segment
            _ => {}
        }
        let segment = jpeg.take_segment()?;
        match marker {
            // Baseline, extended (SOF1) or progressive.
            SOF0..=SOF2 => jpeg.start_frame(marker == SOF2, segment)?,
            DHT => jpeg.read_huffman_tables(segment)?,
            // Kinds that no decoder here reads.
            SOF3 | SOF5..=SOF11 | SOF13..=SOF15 => return Ok(()),
            DRI => jpeg.restart_interval = be16(segment).ok_or(CUT_SHORT)?,
            SOS => jpeg.walk_scan(segment)?,
            _ => {}
        }
    }
    // Some programs leave out the end marker. A progressive picture without it may lack further scans.
    if jpeg.is_progressive {
        return Err(CUT_SHORT.into());
    }
    jpeg.check_scans()
}

/// The first two bytes as a big-endian number.
fn be16(bytes: &[u8]) -> Option<usize> {
    Some(usize::from(*bytes.first()?) << 8 | usize::from(*bytes.get(1)?))
}

/// The upper and the lower four bits.
fn nibbles(byte: u8) -> [usize; 2] {
    [byte >> 4, byte & 15].map(usize::from)
}

/// A JPEG file, and the state of the walk through it.
#[derive(Default)]
struct Jpeg<'a> {
    bytes: &'a [u8],
    /// Offset of the next byte.
    position: usize,
    is_progressive: bool,
    /// Width and height in pixels.
    size: [usize; 2],
    components: Vec<Component>,
    /// Tables of DC coefficients, then those of AC coefficients.
    tables: [[Option<Huffman>; 4]; 2],
    /// Number of MCUs between restart markers; 0 for none.
    restart_interval: usize,
    /// Number of scans so far.
    scans: usize,
}

/// A colour component.
struct Component {
    id: u8,
    /// Horizontal and vertical sampling.
    sampling: [usize; 2],
    /// Blocks per row, including those that fill the last MCU.
    stride: usize,
    /// For each block of a progressive picture: bit `k` is set if coefficient `k` is not zero.
    nonzero: Vec<u64>,
    has_scan: bool,
}

/// A Huffman table: for each value of the next 16 bits, the length of the code that they begin with and its symbol. The
/// length is 0 if they begin with no code.
#[derive(Clone)]
struct Huffman(Vec<(u8, u8)>);

impl<'a> Jpeg<'a> {
    /// The code of the next marker; `None` at the end of the file. Fill bytes, and bytes between segments that belong
    /// to no segment, are skipped, as every decoder does.
    fn next_marker(&mut self) -> Result<Option<u8>, String> {
        loop {
            let Some(rest) = self.bytes.get(self.position..) else { return Ok(None) };
            let Some(start) = rest.iter().position(|byte| *byte == 0xff) else { return Ok(None) };
            let Some(fill) = rest[start..].iter().position(|byte| *byte != 0xff) else { return Ok(None) };
            let code = rest[start + fill];
            self.position += start + fill + 1;
            if code != 0 {
                return Ok(Some(code));
            }
        }
    }

    /// Takes the contents of the segment after a marker.
    fn take_segment(&mut self) -> Result<&'a [u8], String> {
        let rest = self.bytes.get(self.position..).unwrap_or_default();
        let length = be16(rest).filter(|length| *length >= 2).ok_or(CUT_SHORT)?;
        self.position += length;
        rest.get(2..length).ok_or_else(|| CUT_SHORT.into())
    }

    /// Reads the header of the picture: size and components.
    fn start_frame(&mut self, is_progressive: bool, segment: &[u8]) -> Result<(), String> {
        let short = || damaged("its header is cut short");
        let [_precision, rest @ ..] = segment else { return Err(short()) };
        let (size, rest) = rest.split_at_checked(4).ok_or_else(short)?;
        // The size has two bytes per side.
        let [height, width] = [0, 2].map(|at| usize::from(size[at]) << 8 | usize::from(size[at + 1]));
        check_size(width, height)?;
        let (count, rest) = rest.split_first().ok_or_else(short)?;
        // The specification of a component: its id, its sampling, and its quantisation table.
        let specifications = rest.get(..3 * usize::from(*count)).ok_or_else(short)?.chunks_exact(3);
        let specified = |specification: &[u8]| Component {
            id: specification[0],
            sampling: nibbles(specification[1]),
            // Set below, once the sampling of all components is known.
            stride: 0,
            nonzero: Vec::new(),
            has_scan: false,
        };
        self.components = specifications.map(specified).collect();
        let is_valid = |component: &Component| component.sampling.iter().all(|sampling| (1..=4).contains(sampling));
        if self.components.is_empty() || self.components.len() > 4 || !self.components.iter().all(is_valid) {
            return Err(damaged("its header has impossible components"));
        }
        (self.is_progressive, self.size, self.scans) = (is_progressive, [width, height], 0);
        let [across, down] = self.mcus();
        for component in &mut self.components {
            component.stride = across * component.sampling[0];
            if is_progressive {
                component.nonzero = vec![0; component.stride * down * component.sampling[1]];
            }
        }
        Ok(())
    }

    /// The largest sampling of all components along an axis.
    fn max_sampling(&self, axis: usize) -> usize {
        self.components.iter().map(|component| component.sampling[axis]).max().unwrap_or(1)
    }

    /// Numbers of MCUs of a scan with several components, across and down.
    fn mcus(&self) -> [usize; 2] {
        [0, 1].map(|axis| self.size[axis].div_ceil(BLOCK_SIDE * self.max_sampling(axis)))
    }

    /// Reads the Huffman tables of a segment.
    fn read_huffman_tables(&mut self, mut segment: &[u8]) -> Result<(), String> {
        let impossible = || damaged("a Huffman table is impossible");
        while let Some((class_and_slot, rest)) = segment.split_first() {
            // The number of codes of each length from 1 to 16.
            let counts = rest.get(..16).ok_or_else(impossible)?;
            let total = counts.iter().map(|count| usize::from(*count)).sum::<usize>();
            let mut symbols = rest.get(16..16 + total).ok_or_else(impossible)?.iter();
            let mut table = vec![(0, 0); 1 << 16];
            let mut code = 0;
            // `code` is the next code, followed by zeros up to 16 bits.
            for (length, count) in (1u8..).zip(counts) {
                for symbol in symbols.by_ref().take(usize::from(*count)) {
                    // Any bits may follow the code.
                    let continuations = 1usize << (16 - length);
                    table.get_mut(code..code + continuations).ok_or_else(impossible)?.fill((length, *symbol));
                    code += continuations;
                }
            }
            let [kind, slot] = nibbles(*class_and_slot);
            *self.tables.get_mut(kind).and_then(|tables| tables.get_mut(slot)).ok_or_else(impossible)? =
                Some(Huffman(table));
            segment = &rest[16 + total..];
        }
        Ok(())
    }

    /// Fails unless every component had a scan.
    fn check_scans(&self) -> Result<(), String> {
        if self.components.is_empty() || !self.components.iter().all(|component| component.has_scan) {
            return Err(CUT_SHORT.into());
        }
        Ok(())
    }

    /// Walks through a scan whose header is `segment`.
    fn walk_scan(&mut self, segment: &[u8]) -> Result<(), String> {
        self.scans += 1;
        if self.scans > MAX_SCANS {
            return Err(damaged(&format!("it has more than {MAX_SCANS} scans")));
        }
        let scan = self.scan_header(segment)?;
        let [across, down] = self.mcus_of(&scan);
        let mut components = std::mem::take(&mut self.components);
        let mut bits = EntropyBits::new(self.bytes, self.position);
        // Number of further blocks without new coefficients, and the number (0 to 7) of the next restart marker.
        let (mut end_of_band_run, mut restart_number) = (0u32, 0u8);
        for mcu in 0..across * down {
            if self.restart_interval > 0 && mcu > 0 && mcu.is_multiple_of(self.restart_interval) {
                bits.restart(restart_number)?;
                (restart_number, end_of_band_run) = ((restart_number + 1) % 8, 0);
            }
            for selected in &scan.components {
                let component = &mut components[selected.index];
                let tables = [self.tables[0].get(selected.dc_table), self.tables[1].get(selected.ac_table)];
                let tables = tables.map(|table| table?.as_ref());
                let [h, v] = if scan.has_one_component() { [1, 1] } else { component.sampling };
                for block in 0..h * v {
                    if !self.is_progressive {
                        bits.walk_baseline_block(tables)?;
                        continue;
                    }
                    // Row and column of the block in the component.
                    let row = mcu / across * v + block / h;
                    let column = mcu % across * h + block % h;
                    let nonzero = component.nonzero.get_mut(row * component.stride + column);
                    let nonzero = nonzero.ok_or_else(impossible_scan)?;
                    bits.walk_progressive_block(tables, scan.band, &mut end_of_band_run, nonzero)?;
                }
            }
        }
        self.position = bits.finish()?;
        scan.components.iter().for_each(|selected| components[selected.index].has_scan = true);
        self.components = components;
        Ok(())
    }

    /// Reads the header of a scan.
    fn scan_header(&self, segment: &[u8]) -> Result<ScanHeader, String> {
        let (count, rest) = segment.split_first().ok_or_else(impossible_scan)?;
        let count = usize::from(*count);
        let (selectors, band) = rest.split_at_checked(2 * count).ok_or_else(impossible_scan)?;
        let &[first, last, approximation, ..] = band else { return Err(impossible_scan()) };
        let band = match self.is_progressive {
            true => Band { first, last, is_refinement: approximation >> 4 != 0 },
            false => Band { first: 0, last: LAST_COEFFICIENT, is_refinement: false },
        };
        let mixes_dc_and_ac = self.is_progressive && band.first == 0 && band.last != 0;
        if band.last > LAST_COEFFICIENT || band.first > band.last || mixes_dc_and_ac {
            return Err(impossible_scan());
        }
        let mut components = Vec::new();
        for selector in selectors.chunks_exact(2) {
            let index = self.components.iter().position(|component| component.id == selector[0]);
            let [dc_table, ac_table] = nibbles(selector[1]);
            components.push(ScanComponent { index: index.ok_or_else(impossible_scan)?, dc_table, ac_table });
        }
        // A scan of AC coefficients has one component.
        if components.is_empty() || (band.first > 0 && components.len() > 1) {
            return Err(impossible_scan());
        }
        Ok(ScanHeader { band, components })
    }

    /// Numbers of MCUs of a scan, across and down. In a scan of one component, an MCU is one block, and blocks that
    /// only fill up an MCU are left out.
    fn mcus_of(&self, scan: &ScanHeader) -> [usize; 2] {
        match scan.components[..] {
            [ScanComponent { index, .. }] => {
                let sampling = self.components[index].sampling;
                [0, 1].map(|axis| (self.size[axis] * sampling[axis]).div_ceil(BLOCK_SIDE * self.max_sampling(axis)))
            }
            _ => self.mcus(),
        }
    }
}

/// Side of a block in pixels.
const BLOCK_SIDE: usize = 8;
/// The last of the 64 coefficients of a block.
const LAST_COEFFICIENT: u8 = 63;

/// The problem of a scan whose header contradicts the standard or the picture.
fn impossible_scan() -> String {
    damaged("the header of a scan is impossible")
}

/// The header of a scan.
struct ScanHeader {
    band: Band,
    components: Vec<ScanComponent>,
}

impl ScanHeader {
    fn has_one_component(&self) -> bool {
        self.components.len() == 1
    }
}

/// A component of a scan.
struct ScanComponent {
    /// Position in [`Jpeg::components`].
    index: usize,
    /// Slot of the Huffman table of DC coefficients.
    dc_table: usize,
    /// Slot of the Huffman table of AC coefficients.
    ac_table: usize,
}

/// The range of coefficients in a scan.
#[derive(Clone, Copy)]
struct Band {
    first: u8,
    last: u8,
    /// Whether the scan adds one bit to the coefficients of earlier scans.
    is_refinement: bool,
}

/// The bits of a scan, up to a marker.
struct EntropyBits<'a> {
    bytes: &'a [u8],
    /// Offset of the next byte.
    position: usize,
    /// Bits that were read from the bytes; the lowest `count` of them are not taken yet.
    bits: u64,
    /// Number of bits that are read and not taken yet.
    count: u32,
    /// Number of zeros that were appended to `bits` after the end of the data. They are its lowest bits.
    padding: u32,
}

impl<'a> EntropyBits<'a> {
    fn new(bytes: &'a [u8], position: usize) -> Self {
        Self { bytes, position, bits: 0, count: 0, padding: 0 }
    }

    /// Takes the next byte of data. Returns `None` at a marker or at the end of the file.
    fn next_byte(&mut self) -> Option<u8> {
        let byte = *self.bytes.get(self.position)?;
        match (byte, self.bytes.get(self.position + 1)) {
            (0xff, Some(0)) => self.position += 2,
            (0xff, _) => return None,
            _ => self.position += 1,
        }
        Some(byte)
    }

    /// The next 16 bits, without taking them.
    fn peek(&mut self) -> usize {
        while self.count < 16 {
            let byte = self.next_byte();
            self.padding += if byte.is_none() { 8 } else { 0 };
            self.bits = self.bits << 8 | u64::from(byte.unwrap_or(0));
            self.count += 8;
        }
        (self.bits >> (self.count - 16)) as usize & 0xffff
    }

    /// Takes the next `n` bits, at most 16. Fails if the data has fewer.
    fn take(&mut self, n: u8) -> Result<usize, String> {
        let bits = self.peek() >> (16 - u32::from(n.min(16)));
        self.count -= u32::from(n.min(16));
        // More padding than bits that are left: some of the padding was taken.
        if self.padding > self.count {
            return Err(match self.bytes.get(self.position + 1) {
                None => CUT_SHORT.into(),
                Some(_) => damaged("a scan breaks off"),
            });
        }
        Ok(bits)
    }

    /// Takes the next Huffman code and returns its symbol.
    fn take_symbol(&mut self, table: Option<&Huffman>) -> Result<u8, String> {
        let table = table.ok_or_else(|| damaged("a Huffman table is missing"))?;
        let (length, symbol) = table.0[self.peek()];
        match length {
            0 if self.padding == 0 => Err(damaged("a code that does not exist")),
            // With padding among the 16 bits, the cause may be that the data ends: then `take` fails and says so.
            0 => self.take(16).and(Err(damaged("a code that does not exist"))),
            _ => self.take(length).map(|_| symbol),
        }
    }

    /// Walks over the difference of a DC coefficient from that of the previous block.
    fn walk_difference(&mut self, table: Option<&Huffman>) -> Result<(), String> {
        let size = self.take_symbol(table)?;
        if size > 16 {
            return Err(damaged("a coefficient is too large"));
        }
        self.take(size).map(drop)
    }

    /// Walks over all coefficients of a block in a picture that is not progressive.
    fn walk_baseline_block(&mut self, [dc, ac]: [Option<&Huffman>; 2]) -> Result<(), String> {
        self.walk_difference(dc)?;
        // Position of the next coefficient; 0 is the DC coefficient.
        let mut k = 1;
        while k < 64 {
            let symbol = self.take_symbol(ac)?;
            let (run, size) = (symbol >> 4, symbol & 15);
            match (size, run) {
                // Sixteen zeros.
                (0, 15) => k += 16,
                // Zeros to the end of the block.
                (0, _) => return Ok(()),
                // `run` zeros and a coefficient.
                _ => {
                    k += u32::from(run) + 1;
                    self.take(size)?;
                }
            }
        }
        match k {
            64 => Ok(()),
            _ => Err(damaged("a block has too many coefficients")),
        }
    }

    /// Walks over a block of a progressive picture. `end_of_band_run` is the number of blocks from this one on that
    /// have no new coefficients, and bit `k` of `nonzero` says whether coefficient `k` of the block is not zero.
    fn walk_progressive_block(
        &mut self,
        [dc, ac]: [Option<&Huffman>; 2],
        band: Band,
        end_of_band_run: &mut u32,
        nonzero: &mut u64,
    ) -> Result<(), String> {
        let is_dc = band.first == 0;
        match (is_dc, band.is_refinement) {
            // One more bit of the DC coefficient.
            (true, true) => self.take(1).map(drop),
            (true, false) => self.walk_difference(dc),
            (false, true) => self.walk_refined_block(ac, band, end_of_band_run, nonzero),
            (false, false) => self.walk_first_block(ac, band, end_of_band_run, nonzero),
        }
    }

    /// Walks over a block in the first scan of a band of AC coefficients. `end_of_band_run` is the number of blocks
    /// from this one on that have no coefficients.
    fn walk_first_block(
        &mut self,
        table: Option<&Huffman>,
        band: Band,
        end_of_band_run: &mut u32,
        nonzero: &mut u64,
    ) -> Result<(), String> {
        if *end_of_band_run > 0 {
            *end_of_band_run -= 1;
            return Ok(());
        }
        let mut k = band.first;
        while k <= band.last {
            let symbol = self.take_symbol(table)?;
            let (run, size) = (symbol >> 4, symbol & 15);
            match (size, run) {
                // Sixteen zeros.
                (0, 15) => k += 16,
                // Zeros to the end of this block, and in whole blocks after it.
                (0, _) => {
                    *end_of_band_run = (1 << run) + self.take(run)? as u32 - 1;
                    return Ok(());
                }
                // `run` zeros and a coefficient.
                _ => {
                    k += run;
                    self.take(size)?;
                    if k > band.last {
                        return Err(damaged("a block has too many coefficients"));
                    }
                    *nonzero |= 1 << k;
                    k += 1;
                }
            }
        }
        Ok(())
    }

    /// Walks over a block in a later scan of a band. The scan has one more bit for each coefficient that was not zero
    /// in the earlier scans, and new coefficients in between. `end_of_band_run` is the number of blocks from this one
    /// on that have no new coefficients.
    fn walk_refined_block(
        &mut self,
        table: Option<&Huffman>,
        band: Band,
        end_of_band_run: &mut u32,
        nonzero: &mut u64,
    ) -> Result<(), String> {
        let mut k = band.first;
        while *end_of_band_run == 0 && k <= band.last {
            let symbol = self.take_symbol(table)?;
            let (mut run, size) = (symbol >> 4, symbol & 15);
            match (size, run) {
                // Sixteen zeros.
                (0, 15) => {}
                // Zeros to the end of this block, and in whole blocks after it.
                (0, _) => {
                    *end_of_band_run = (1 << run) + self.take(run)? as u32;
                    break;
                }
                // `run` zeros and a new coefficient, whose sign is the next bit.
                (1, _) => drop(self.take(1)?),
                _ => return Err(damaged("a coefficient is too large")),
            }
            // Skips `run` coefficients that are zero, and takes one bit for each other coefficient on the way.
            while k <= band.last {
                if *nonzero >> k & 1 == 1 {
                    self.take(1)?;
                } else if run == 0 {
                    if size == 1 {
                        *nonzero |= 1 << k;
                    }
                    break;
                } else {
                    run -= 1;
                }
                k += 1;
            }
            k += 1;
        }
        if *end_of_band_run > 0 {
            for k in k..=band.last {
                if *nonzero >> k & 1 == 1 {
                    self.take(1)?;
                }
            }
            *end_of_band_run -= 1;
        }
        Ok(())
    }

    /// Takes the restart marker of this number (0 to 7).
    fn restart(&mut self, number: u8) -> Result<(), String> {
        let end = self.finish()?;
        let rest = &self.bytes[end..];
        // Fill bytes may precede the code.
        let code = rest.iter().position(|byte| *byte != 0xff).ok_or(CUT_SHORT)?;
        if code == 0 || rest[code] != RST0 + number {
            return Err(damaged("a restart marker is missing"));
        }
        *self = Self::new(self.bytes, end + code + 1);
        Ok(())
    }

    /// Ends the scan and returns the position of the marker after its data. Fails if whole bytes of data are left that
    /// are not zero. Bytes of zeros are harmless.
    fn finish(&mut self) -> Result<usize, String> {
        let mut bytes_left = self.count.saturating_sub(self.padding) / 8;
        let mut has_data_left = false;
        while bytes_left > 0 {
            bytes_left -= 1;
            has_data_left |= self.bits >> (self.padding + 8 * bytes_left) & 0xff != 0;
        }
        while let Some(byte) = self.next_byte() {
            has_data_left |= byte != 0;
        }
        if has_data_left {
            return Err(damaged("a scan has more data than blocks"));
        }
        Ok(self.position.min(self.bytes.len()))
    }
}
