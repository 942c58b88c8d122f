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

const CUT_SHORT: &str = "the picture is cut short";

/// Maximum number of scans; programs write about ten. Each may cost a walk over all blocks.
const MAX_SCANS: usize = 100;

fn damaged(what: &str) -> String {
    format!("the picture is damaged: {what}")
}

/// Fails if the JPEG file is cut short or damaged. Kinds of JPEG that no decoder here reads (arithmetic coding,
/// lossless) pass.
pub(crate) fn check(bytes: &[u8]) -> Result<(), String> {
    let mut jpeg = Jpeg { bytes, position: 2, ..Jpeg::default() };
    while let Some(marker) = jpeg.next_marker()? {
        match marker {
            // EOI, the end of the picture.
            0xd9 => return jpeg.check_scans(),
            // RST0 to RST7: a restart marker after a scan is harmless, but data after the marker is not.
            0xd0..=0xd7 if bytes.get(jpeg.position).is_some_and(|next| *next != 0xff) => {
                return Err(damaged("a scan has more data than blocks"));
            }
            0x01 | 0xd0..=0xd8 => continue, // TEM, RST and SOI: markers without a segment
            _ => {}
        }
        let segment = jpeg.segment()?;
        match marker {
            // SOF0 to SOF2: baseline, extended, progressive.
            0xc0..=0xc2 => jpeg.start_frame(marker == 0xc2, segment)?,
            // DHT.
            0xc4 => jpeg.huffman_tables(segment)?,
            // Other SOF: kinds that no decoder here reads.
            0xc3 | 0xc5..=0xcb | 0xcd..=0xcf => return Ok(()),
            // DRI.
            0xdd => jpeg.restart_interval = be16(segment).ok_or(CUT_SHORT)?,
            // SOS.
            0xda => jpeg.scan(segment)?,
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

    /// The contents of the segment after a marker.
    fn segment(&mut self) -> Result<&'a [u8], String> {
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
        let [height, width] = [0, 2].map(|at| usize::from(size[at]) << 8 | usize::from(size[at + 1]));
        check_size(width, height)?;
        let (count, rest) = rest.split_first().ok_or_else(short)?;
        let specifications = rest.get(..3 * usize::from(*count)).ok_or_else(short)?.chunks_exact(3);
        let specified = |specification: &[u8]| Component {
            id: specification[0],
            sampling: [usize::from(specification[1] >> 4), usize::from(specification[1] & 15)],
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
        [0, 1].map(|axis| self.size[axis].div_ceil(8 * self.max_sampling(axis)))
    }

    /// Reads the Huffman tables of a segment.
    fn huffman_tables(&mut self, mut segment: &[u8]) -> Result<(), String> {
        let bad = || damaged("a Huffman table is impossible");
        while let Some((class, rest)) = segment.split_first() {
            let counts = rest.get(..16).ok_or_else(bad)?;
            let total = counts.iter().map(|count| usize::from(*count)).sum::<usize>();
            let mut symbols = rest.get(16..16 + total).ok_or_else(bad)?.iter();
            let mut table = vec![(0, 0); 1 << 16];
            let mut code = 0;
            // `code` is the next code, followed by zeros up to 16 bits.
            for (length, count) in (1u8..).zip(counts) {
                for symbol in symbols.by_ref().take(usize::from(*count)) {
                    // Any bits may follow the code.
                    let continuations = 1usize << (16 - length);
                    table.get_mut(code..code + continuations).ok_or_else(bad)?.fill((length, *symbol));
                    code += continuations;
                }
            }
            let [kind, slot] = [class >> 4, class & 15].map(usize::from);
            *self.tables.get_mut(kind).and_then(|tables| tables.get_mut(slot)).ok_or_else(bad)? = Some(Huffman(table));
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
    fn scan(&mut self, segment: &[u8]) -> Result<(), String> {
        let bad = || damaged("the header of a scan is impossible");
        self.scans += 1;
        if self.scans > MAX_SCANS {
            return Err(damaged(&format!("it has more than {MAX_SCANS} scans")));
        }
        let (count, rest) = segment.split_first().ok_or_else(bad)?;
        let count = usize::from(*count);
        let (selectors, band) = rest.split_at_checked(2 * count).ok_or_else(bad)?;
        let &[first, last, approximation, ..] = band else { return Err(bad()) };
        let band = match self.is_progressive {
            true => Band { first, last, is_refinement: approximation >> 4 != 0 },
            false => Band { first: 0, last: 63, is_refinement: false },
        };
        let mixes_dc_and_ac = self.is_progressive && band.first == 0 && band.last != 0;
        if band.last > 63 || band.first > band.last || mixes_dc_and_ac {
            return Err(bad());
        }
        // For each component of the scan: its index, and the slots of its DC and AC tables.
        let mut chosen = Vec::new();
        for selector in selectors.chunks_exact(2) {
            let index = self.components.iter().position(|component| component.id == selector[0]).ok_or_else(bad)?;
            chosen.push((index, usize::from(selector[1] >> 4), usize::from(selector[1] & 15)));
        }
        // A scan of AC coefficients has one component.
        if chosen.is_empty() || (band.first > 0 && chosen.len() > 1) {
            return Err(bad());
        }
        // In a scan of one component, an MCU is one block, and blocks that only fill up an MCU are left out.
        let has_one_component = chosen.len() == 1;
        let [across, down] = if has_one_component {
            let sampling = self.components[chosen[0].0].sampling;
            [0, 1].map(|axis| (self.size[axis] * sampling[axis]).div_ceil(8 * self.max_sampling(axis)))
        } else {
            self.mcus()
        };
        let mut components = std::mem::take(&mut self.components);
        let mut bits = EntropyBits::new(self.bytes, self.position);
        // Number of further blocks without new coefficients, and the number (0 to 7) of the next restart marker.
        let (mut end_of_band, mut restarts) = (0u32, 0u8);
        for mcu in 0..across * down {
            if self.restart_interval > 0 && mcu > 0 && mcu.is_multiple_of(self.restart_interval) {
                bits.restart(restarts)?;
                (restarts, end_of_band) = ((restarts + 1) % 8, 0);
            }
            for (index, dc, ac) in &chosen {
                let component = &mut components[*index];
                let [h, v] = if has_one_component { [1, 1] } else { component.sampling };
                let tables = [self.tables[0].get(*dc), self.tables[1].get(*ac)].map(|table| table?.as_ref());
                for block in 0..h * v {
                    let x = mcu % across * h + block % h;
                    let y = mcu / across * v + block / h;
                    let mut unused = 0;
                    let nonzero = match self.is_progressive {
                        true => component.nonzero.get_mut(y * component.stride + x).ok_or_else(bad)?,
                        false => &mut unused,
                    };
                    match (self.is_progressive, band.first) {
                        // All coefficients.
                        (false, _) => bits.baseline_block(tables)?,
                        // The DC coefficient: one more bit, or its first bits.
                        (true, 0) if band.is_refinement => drop(bits.take(1)?),
                        (true, 0) => bits.difference(tables[0])?,
                        // AC coefficients: one more bit, or their first bits.
                        (true, _) if band.is_refinement => {
                            bits.refined_block(tables[1], band, &mut end_of_band, nonzero)?;
                        }
                        (true, _) => bits.band_block(tables[1], band, &mut end_of_band, nonzero)?,
                    }
                }
            }
        }
        self.position = bits.finish()?;
        chosen.iter().for_each(|(index, ..)| components[*index].has_scan = true);
        self.components = components;
        Ok(())
    }
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
    count: u32,
    /// Number of zeros that were appended to `bits` after the end of the data. At the end, they are the lowest ones.
    padding: u32,
}

impl<'a> EntropyBits<'a> {
    fn new(bytes: &'a [u8], position: usize) -> Self {
        Self { bytes, position, bits: 0, count: 0, padding: 0 }
    }

    /// The next byte of data; `None` at a marker or at the end of the file.
    fn byte(&mut self) -> Option<u8> {
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
            let byte = self.byte();
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
    fn symbol(&mut self, table: Option<&Huffman>) -> Result<u8, String> {
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
    fn difference(&mut self, table: Option<&Huffman>) -> Result<(), String> {
        let size = self.symbol(table)?;
        if size > 16 {
            return Err(damaged("a coefficient is too large"));
        }
        self.take(size).map(drop)
    }

    /// Walks over all coefficients of a block in a picture that is not progressive.
    fn baseline_block(&mut self, [dc, ac]: [Option<&Huffman>; 2]) -> Result<(), String> {
        self.difference(dc)?;
        let mut k = 1;
        while k < 64 {
            let symbol = self.symbol(ac)?;
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

    /// Walks over a block in the first scan of a band of AC coefficients. `end_of_band` is the number of blocks from
    /// this one on that have no coefficients.
    fn band_block(
        &mut self,
        table: Option<&Huffman>,
        band: Band,
        end_of_band: &mut u32,
        nonzero: &mut u64,
    ) -> Result<(), String> {
        if *end_of_band > 0 {
            *end_of_band -= 1;
            return Ok(());
        }
        let mut k = band.first;
        while k <= band.last {
            let symbol = self.symbol(table)?;
            let (run, size) = (symbol >> 4, symbol & 15);
            match (size, run) {
                // Sixteen zeros.
                (0, 15) => k += 16,
                // Zeros to the end of this block, and in whole blocks after it.
                (0, _) => {
                    *end_of_band = (1 << run) + self.take(run)? as u32 - 1;
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
    /// in the earlier scans, and new coefficients in between. `end_of_band` is the number of blocks from this one on
    /// that have no new coefficients.
    fn refined_block(
        &mut self,
        table: Option<&Huffman>,
        band: Band,
        end_of_band: &mut u32,
        nonzero: &mut u64,
    ) -> Result<(), String> {
        let mut k = band.first;
        while *end_of_band == 0 && k <= band.last {
            let symbol = self.symbol(table)?;
            let (mut run, size) = (symbol >> 4, symbol & 15);
            match (size, run) {
                // Sixteen zeros.
                (0, 15) => {}
                // Zeros to the end of this block, and in whole blocks after it.
                (0, _) => {
                    *end_of_band = (1 << run) + self.take(run)? as u32;
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
        if *end_of_band > 0 {
            for k in k..=band.last {
                if *nonzero >> k & 1 == 1 {
                    self.take(1)?;
                }
            }
            *end_of_band -= 1;
        }
        Ok(())
    }

    /// Takes the restart marker of this number (0 to 7).
    fn restart(&mut self, number: u8) -> Result<(), String> {
        let end = self.finish()?;
        let rest = &self.bytes[end..];
        // Fill bytes may precede the code.
        let code = rest.iter().position(|byte| *byte != 0xff).ok_or(CUT_SHORT)?;
        if code == 0 || rest[code] != 0xd0 + number {
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
        while let Some(byte) = self.byte() {
            has_data_left |= byte != 0;
        }
        if has_data_left {
            return Err(damaged("a scan has more data than blocks"));
        }
        Ok(self.position.min(self.bytes.len()))
    }
}
