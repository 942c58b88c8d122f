//! Reads the boxes of ISO/IEC 14496-12, the building blocks of MP4, as slices with checked lengths.

/// Maximum number of frames: 37 hours at 30 frames per second.
pub(super) const MAX_FRAMES: u32 = 4_000_000;

/// The problem of a box that ends too early.
pub(super) const CUT_SHORT: &str = "cut short";

/// A box: its type and contents.
#[derive(Clone, Copy)]
pub(super) struct Box<'a> {
    pub kind: [u8; 4],
    pub body: Cursor<'a>,
}

/// The header of a box.
pub(super) struct BoxHeader {
    pub kind: [u8; 4],
    /// Bytes of the header.
    pub header_length: u64,
    /// Bytes of the whole box with its header, as the header says.
    pub size: u64,
}

/// Reads big-endian numbers from a slice; returns `None` past the end.
#[derive(Clone, Copy)]
pub(super) struct Cursor<'a>(pub &'a [u8]);

impl<'a> Cursor<'a> {
    pub fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(n)?;
        self.0 = tail;
        Some(head)
    }
    pub fn u8(&mut self) -> Option<u8> {
        self.take(1).map(|b| b[0])
    }
    pub fn u16(&mut self) -> Option<u16> {
        self.take(2)?.try_into().ok().map(u16::from_be_bytes)
    }
    pub fn u32(&mut self) -> Option<u32> {
        self.take(4)?.try_into().ok().map(u32::from_be_bytes)
    }
    pub fn u64(&mut self) -> Option<u64> {
        self.take(8)?.try_into().ok().map(u64::from_be_bytes)
    }
    pub fn tag(&mut self) -> Option<[u8; 4]> {
        self.take(4)?.try_into().ok()
    }

    /// Reads the header of a box. A box that extends to the end has the size `available`.
    pub fn box_header(&mut self, available: u64) -> Option<BoxHeader> {
        const LENGTH: u64 = 8;
        // The size follows the header as a number of 64 bits.
        const LONG_LENGTH: u64 = 16;
        let (size, kind) = (self.u32()?, self.tag()?);
        let (header_length, size) = match size {
            0 => (LENGTH, available),
            1 => (LONG_LENGTH, self.u64().unwrap_or(0)),
            size => (LENGTH, size.into()),
        };
        Some(BoxHeader { kind, header_length, size })
    }

    /// The boxes in the rest of the slice. Fails if a box is longer than the slice.
    pub fn boxes(mut self) -> Result<Vec<Box<'a>>, String> {
        let mut boxes = Vec::new();
        while self.0.len() >= 8 {
            let available = self.0.len() as u64;
            let Some(BoxHeader { kind, header_length, size }) = self.box_header(available) else { break };
            let body = size.checked_sub(header_length).and_then(|n| self.take(usize::try_from(n).ok()?));
            let Some(body) = body else {
                return Err(format!("the box `{}` says {size} bytes, {available} are there", name(kind)));
            };
            boxes.push(Box { kind, body: Cursor(body) });
        }
        Ok(boxes)
    }

    /// The first box of a kind, if any.
    pub fn child(self, kind: &[u8; 4]) -> Result<Option<Cursor<'a>>, String> {
        Ok(self.boxes()?.into_iter().find(|b| b.kind == *kind).map(|b| b.body))
    }

    /// The first box of a kind. Fails if the kind is missing.
    pub fn need(self, kind: &[u8; 4]) -> Result<Cursor<'a>, String> {
        self.child(kind)?.ok_or_else(|| format!("the box `{}` is missing", name(*kind)))
    }

    /// Skips version and flags of a full box; returns the version.
    pub fn version(&mut self) -> Option<u8> {
        self.take(4).map(|b| b[0])
    }
}

/// Formats a four-character code for messages.
pub(super) fn name(kind: [u8; 4]) -> String {
    kind.iter().flat_map(|&b| std::ascii::escape_default(b)).map(char::from).collect()
}

/// Reads a table with entries of `WIDTH` numbers, after version, flags and count. Fails if the count exceeds the box.
pub(super) fn table<const WIDTH: usize>(mut body: Cursor<'_>) -> Result<Vec<[u32; WIDTH]>, String> {
    body.version().ok_or(CUT_SHORT)?;
    let count = body.u32().ok_or(CUT_SHORT)? as usize;
    let room = body.0.len() / (size_of::<u32>() * WIDTH);
    if count > room {
        return Err(format!("a table says {count} entries, its box has room for {room}"));
    }
    // A table never needs more entries than the maximum number of frames.
    if count > MAX_FRAMES as usize {
        return Err(too_many(count));
    }
    let mut number = || body.u32().unwrap_or_default(); // never missing, because `count` was checked
    Ok((0..count).map(|_| std::array::from_fn(|_| number())).collect())
}

/// The problem of a file with more than [`MAX_FRAMES`] frames.
pub(super) fn too_many(frames: usize) -> String {
    format!("{frames} frames are too many for one file (at most {MAX_FRAMES})")
}
