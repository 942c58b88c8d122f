//! Reads the orientation of HEIF and AVIF pictures, because not every version of ffmpeg reports it.

use std::fs::File;
use std::io::Read;

use super::boxes::Cursor;
use crate::orientation::Orientation;

/// Number of bytes that are read from the start of the file. The box `meta` lies there, before the picture.
const MAX_HEAD: u64 = 1 << 20;

/// The orientation of the primary picture: its properties `irot` (rotation) and `imir` (mirror), applied in their order
/// (ISO/IEC 23008-12, 6.5.10 and 6.5.12). EXIF data has no effect in these files. `None` if the file is not understood.
pub(crate) fn orientation(file: File) -> Option<Orientation> {
    let mut head = Vec::new();
    file.take(MAX_HEAD).read_to_end(&mut head).ok()?;
    from_head(&head)
}

fn from_head(head: &[u8]) -> Option<Orientation> {
    let mut meta = outermost(head, b"meta")?;
    meta.version()?;
    let mut pitm = meta.child(b"pitm").ok()??;
    let primary = match pitm.version()? {
        0 => pitm.u16()?.into(),
        _ => pitm.u32()?,
    };
    let properties = meta.child(b"iprp").ok()??;
    let all_properties = properties.child(b"ipco").ok()??.boxes().ok()?;
    let mut orientation = Orientation::default();
    for number in property_numbers(properties.child(b"ipma").ok()??, primary)? {
        let Some(property) = number.checked_sub(1).and_then(|i| all_properties.get(i)) else { continue };
        let mut body = property.body;
        orientation = match &property.kind {
            // The lowest two bits are the number of quarter turns.
            b"irot" => orientation.turned_left(body.u8()? & 3),
            // The lowest bit is the axis; 1 exchanges left and right.
            b"imir" => orientation.then_mirrored(body.u8()? & 1 == 1),
            _ => orientation,
        };
    }
    Some(orientation)
}

/// The body of the first outermost box of a kind. `None` if a box before it, or the box itself, is cut short.
fn outermost<'a>(head: &'a [u8], kind: &[u8; 4]) -> Option<Cursor<'a>> {
    let mut rest = head;
    loop {
        let header = Cursor(rest).box_header(rest.len() as u64)?;
        let size = usize::try_from(header.size).ok()?;
        let body = rest.get(usize::try_from(header.header_length).ok()?..size)?;
        if header.kind == *kind {
            return Some(Cursor(body));
        }
        rest = &rest[size..];
    }
}

/// The properties of an item in their order, as numbers from 1, from the box `ipma`.
fn property_numbers(mut table: Cursor, item: u32) -> Option<Vec<usize>> {
    let mut head = Cursor(table.take(4)?);
    let (version, flags) = (head.u8()?, head.take(3)?);
    for _ in 0..table.u32()? {
        let entry_item = if version == 0 { table.u16()?.into() } else { table.u32()? };
        let count = table.u8()?;
        let mut numbers = Vec::new();
        let has_long_numbers = flags[2] & 1 == 1;
        for _ in 0..count {
            // The first bit says whether the property is essential. The other 7 or 15 bits are its number.
            let number = if has_long_numbers { table.u16()? & 0x7fff } else { (table.u8()? & 0x7f).into() };
            numbers.push(usize::from(number));
        }
        if entry_item == item {
            return Some(numbers);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn boxed(kind: &[u8; 4], body: &[u8]) -> Vec<u8> {
        [&(body.len() as u32 + 8).to_be_bytes()[..], kind, body].concat()
    }

    /// The start of a picture, item 1, with a size and these properties; item 2 has one more.
    fn picture(properties: &[(&[u8; 4], u8)], wide: bool) -> Vec<u8> {
        let mut container = boxed(b"ispe", &[0; 12]);
        container.extend(properties.iter().flat_map(|(kind, value)| boxed(kind, &[*value])));
        let count = properties.len() as u8;
        let item = |id: u8, numbers: &[u8]| match wide {
            true => {
                let wide = numbers.iter().flat_map(|n| [0x80, *n]);
                [0, 0, 0, id, numbers.len() as u8].into_iter().chain(wide).collect::<Vec<u8>>()
            }
            false => [0, id, numbers.len() as u8].into_iter().chain(numbers.iter().map(|n| 0x80 | n)).collect(),
        };
        let all: Vec<u8> = (1..=count + 1).collect();
        let version = u8::from(wide);
        let table = [&[version, 0, 0, version, 0, 0, 0, 2][..], &item(2, &[1]), &item(1, &all)].concat();
        let properties = boxed(b"iprp", &[boxed(b"ipco", &container), boxed(b"ipma", &table)].concat());
        let meta = [&[0; 4][..], &boxed(b"pitm", &[0, 0, 0, 0, 0, 1]), &properties].concat();
        [boxed(b"ftyp", b"avifmif1"), boxed(b"meta", &meta), boxed(b"mdat", &[])].concat()
    }

    #[test]
    fn turns_and_mirrors_are_read_in_their_order() {
        let exif = |code| Orientation::from_exif_code(code);
        // As libavif writes the eight orientations of EXIF.
        let spellings: [(&[(&[u8; 4], u8)], u64); 8] = [
            (&[], 1),
            (&[(b"imir", 1)], 2),
            (&[(b"irot", 2)], 3),
            (&[(b"imir", 0)], 4),
            (&[(b"irot", 1), (b"imir", 0)], 5),
            (&[(b"irot", 3)], 6),
            (&[(b"irot", 3), (b"imir", 0)], 7),
            (&[(b"irot", 1)], 8),
        ];
        for (properties, code) in spellings {
            for wide in [false, true] {
                assert_eq!(from_head(&picture(properties, wide)), exif(code), "{code}");
            }
        }
        // The other order is another orientation.
        assert_eq!(from_head(&picture(&[(b"imir", 0), (b"irot", 1)], false)), exif(7));
        let whole = picture(&[(b"irot", 1)], false);
        for end in 0..whole.len() {
            let found = from_head(&whole[..end]);
            assert!(found.is_none() || found == exif(8), "{end}");
        }
        assert_eq!(from_head(&boxed(b"ftyp", b"avif")), None);
    }
}
