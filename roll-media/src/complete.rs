//! Checks that a file ends where its container says, because decoders do not report a missing end.

use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::Path;

use roll_core::{Error, Result};
use roll_external::files;

use crate::container::Container;
use crate::mp4::check_layout;

/// Maximum number of elements of a live Matroska stream that are looked at.
const MAX_ELEMENTS: usize = 1 << 22;
/// The id of the second element of a Matroska file, which contains all further elements.
const SEGMENT: u64 = 0x1853_8067;
/// Length of a packet of an MPEG transport stream.
const TRANSPORT_PACKET: u64 = 188;
/// Length of the time that M2TS puts before each packet of an MPEG transport stream.
const M2TS_TIME: u64 = 4;
/// Length of the header of an Ogg page, which ends with the number of segments.
const OGG_HEADER: usize = 27;
/// Maximum length of an Ogg page: its header, the sizes of 255 segments in a byte each, and the segments of 255 bytes.
const MAX_OGG_PAGE: u64 = OGG_HEADER as u64 + 255 + 255 * 255;
/// Length of the header of an FLV file.
const FLV_HEADER: u64 = 9;
/// Length of the header of an FLV tag.
const FLV_TAG_HEADER: u64 = 11;
/// Length of the size that follows each FLV tag.
const FLV_SIZE: u64 = 4;
/// Length of the name and the size of a RIFF chunk. The whole file is a chunk, too.
const RIFF_HEADER: u64 = 8;

/// Fails if the file is cut off according to the sizes in its container. A stream without sizes passes, because only
/// decoding can show whether it is cut off.
pub(crate) fn check(path: &Path, container: Container) -> Result<()> {
    if matches!(container, Container::OtherPicture(..) | Container::Unknown) {
        return Ok(());
    }
    let file = files::open(path).map_err(Error::file("read", path))?;
    let length = file.metadata().map_err(Error::file("read", path))?.len();
    let checked = match container {
        Container::Mp4 => check_layout(file),
        _ => check_stream(file, length, container),
    };
    checked.map_err(|problem| Error::bad_file(path, problem))
}

/// Fails if a file in a container other than MP4 is cut off. `length` is its length in bytes.
fn check_stream(file: File, length: u64, container: Container) -> std::result::Result<(), String> {
    let mut file = BufReader::new(file);
    let mut head = [0; 12];
    if file.read_exact(&mut head).and_then(|()| file.rewind()).is_err() {
        return Ok(()); // too short for any container
    }
    // The length that the container says, if it says one.
    let needed = match &head {
        // Matroska, by the magic number of EBML.
        [0x1a, 0x45, 0xdf, 0xa3, ..] => matroska_end(&mut file, length),
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P'] => webp_end(&mut file, length)?,
        // AVI.
        [b'R', b'I', b'F', b'F', a, b, c, d, ..] => match u32::from_le_bytes([*a, *b, *c, *d]) {
            0 | u32::MAX => None, // written as a stream
            size => Some(RIFF_HEADER + u64::from(size)),
        },
        [b'O', b'g', b'g', b'S', ..] => ogg_end(&mut file, length),
        // An MPEG transport stream, and one with a time before each packet (M2TS).
        [b'G', ..] => transport_end(&mut file, length, 0)?,
        [_, _, _, _, b'G', ..] if container == Container::OtherVideo("MPEG") => {
            transport_end(&mut file, length, M2TS_TIME)?
        }
        [b'F', b'L', b'V', ..] => flv_end(&mut file, length)?,
        _ => None,
    };
    match needed.filter(|needed| *needed > length) {
        Some(needed) => Err(format!("it is cut short: its container says {needed} bytes, the file has {length}")),
        None => Ok(()),
    }
}

/// The next variable-length number of EBML (RFC 8794): its value, and whether all of its bits are set, which means
/// "unknown size". The first byte begins with zeros and a one: the number of zeros is the number of further bytes. With
/// `is_id`, this prefix is part of the value.
fn ebml_number(file: &mut impl Read, is_id: bool) -> Option<(u64, bool)> {
    let mut byte = [0];
    file.read_exact(&mut byte).ok()?;
    let further_bytes = byte[0].leading_zeros();
    if further_bytes > 7 {
        return None;
    }
    let mask = 0x7f >> further_bytes;
    let mut value = u64::from(if is_id { byte[0] } else { byte[0] & mask });
    let mut all_bits_set = byte[0] & mask == mask;
    for _ in 0..further_bytes {
        file.read_exact(&mut byte).ok()?;
        value = value << 8 | u64::from(byte[0]);
        all_bits_set &= byte[0] == 0xff;
    }
    Some((value, all_bits_set))
}

/// The argument of [`ebml_number`] for the id of an element.
const IS_ID: bool = true;

/// Where the last outermost element of a Matroska or WebM file ends (RFC 8794). An element of unknown size, as in live
/// streams, is entered: the elements within it are looked at, too.
fn matroska_end(file: &mut (impl Read + Seek), length: u64) -> Option<u64> {
    let mut end = 0;
    for number in 0..MAX_ELEMENTS {
        let position = file.stream_position().ok()?;
        if position >= length {
            break;
        }
        let (id, size) = (ebml_number(file, IS_ID), ebml_number(file, !IS_ID));
        // Bytes behind the last element that are no element do not matter.
        let (Some((id, _)), Some((size, is_unknown))) = (id, size) else { break };
        if number == 1 && id != SEGMENT {
            return None; // not Matroska, or damaged, which the decoder reports
        }
        if is_unknown {
            continue;
        }
        end = file.stream_position().ok()?.checked_add(size)?;
        if end > length {
            return (number > 0).then_some(end);
        }
        file.seek(SeekFrom::Start(end)).ok()?;
    }
    Some(end)
}

/// Where the last page of an Ogg file ends (RFC 3533).
fn ogg_end(file: &mut (impl Read + Seek), length: u64) -> Option<u64> {
    let from = length.saturating_sub(MAX_OGG_PAGE);
    file.seek(SeekFrom::Start(from)).ok()?;
    let mut tail = Vec::new();
    file.read_to_end(&mut tail).ok()?;
    let at = tail.windows(5).rposition(|bytes| bytes == b"OggS\0")?;
    // A page has a header, the sizes of its segments, and the segments.
    let page = &tail[at..];
    let segments = usize::from(*page.get(OGG_HEADER - 1)?);
    let body_start = OGG_HEADER + segments;
    let body: u64 = page.get(OGG_HEADER..body_start.min(page.len()))?.iter().map(|size| u64::from(*size)).sum();
    Some(from + at as u64 + body_start as u64 + body)
}

/// Where the last tag of an FLV file ends. Fails if another FLV file follows, because ffmpeg and players show the first
/// file only.
fn flv_end(file: &mut (impl Read + Seek), length: u64) -> std::result::Result<Option<u64>, String> {
    // The size of a previous tag, which is 0, precedes the first tag.
    let mut position = FLV_HEADER + FLV_SIZE;
    for _ in 0..MAX_ELEMENTS {
        let mut tag = [0; 4];
        if file.seek(SeekFrom::Start(position)).and_then(|_| file.read_exact(&mut tag)).is_err() {
            break;
        }
        match tag {
            [b'F', b'L', b'V', _] => {
                return Err("it has several files joined as they are, of which players show the first only".into());
            }
            // A tag with audio (8), video (9) or metadata (18): its header, its data, and its size once more.
            [8 | 9 | 18, a, b, c] => {
                position += FLV_TAG_HEADER + u64::from(u32::from_be_bytes([0, a, b, c])) + FLV_SIZE;
            }
            _ => return Ok(None),
        }
        // The last size may be missing.
        if position > length + FLV_SIZE {
            return Ok(Some(position));
        }
    }
    Ok(None)
}

/// Where the last, incomplete packet of an MPEG transport stream would end (ISO/IEC 13818-1, 2.4.3). `prefix` is the
/// number of bytes before each packet. `None` if all packets are complete, or if the file does not end with packets at
/// multiples of their length. Fails at the first multiple where no packet begins, because decoders skip such damage
/// without a message.
fn transport_end(file: &mut (impl Read + Seek), length: u64, prefix: u64) -> std::result::Result<Option<u64>, String> {
    let packet_length = prefix + TRANSPORT_PACKET;
    let complete = length / packet_length * packet_length;
    let mut begins_packet = |at: u64| {
        let mut sync = [0];
        let is_read = file.seek(SeekFrom::Start(at + prefix)).and_then(|_| file.read_exact(&mut sync)).is_ok();
        is_read && sync == *b"G"
    };
    if complete < packet_length || !begins_packet(complete - packet_length) {
        return Ok(None);
    }
    let has_rest = length > complete;
    if has_rest && !begins_packet(complete) {
        return Ok(None);
    }
    file.rewind().map_err(|error| error.to_string())?;
    let mut packet = vec![0; packet_length as usize];
    for at in (0..complete).step_by(packet.len()) {
        file.read_exact(&mut packet).map_err(|error| error.to_string())?;
        if packet[prefix as usize] != b'G' {
            return Err(format!("it is damaged: no packet begins at byte {at}"));
        }
    }
    Ok(has_rest.then_some(complete + packet_length))
}

/// Where the chunks of a WebP file end (RFC 9649, 2.3 and 2.4). Fails if a chunk has no valid name, because readers
/// take the chunks before it as the whole picture.
fn webp_end(file: &mut (impl Read + Seek), length: u64) -> std::result::Result<Option<u64>, String> {
    let mut head = [0; 8];
    let failed = |error: std::io::Error| error.to_string();
    // The size of the file follows the name `RIFF`, and the chunks follow the name `WEBP`.
    file.seek(SeekFrom::Start(4)).and_then(|_| file.read_exact(&mut head)).map_err(failed)?;
    let end = RIFF_HEADER + u64::from(u32::from_le_bytes([head[0], head[1], head[2], head[3]]));
    let mut at = RIFF_HEADER + 4;
    while at + RIFF_HEADER <= end.min(length) {
        file.seek(SeekFrom::Start(at)).and_then(|_| file.read_exact(&mut head)).map_err(failed)?;
        let [name @ .., a, b, c, d] = head;
        if !name.iter().all(|byte| (b' '..=b'~').contains(byte)) {
            return Err(format!("it is damaged: no chunk begins at byte {at}"));
        }
        let size = u64::from(u32::from_le_bytes([a, b, c, d]));
        // A chunk of odd size is followed by a byte of padding.
        at += RIFF_HEADER + size + size % 2;
    }
    Ok(Some(end))
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    #[test]
    fn matroska_ends_where_its_last_element_does() {
        // The header, then a segment of 11 bytes with a cluster that has one block.
        let header = [0x1a, 0x45, 0xdf, 0xa3, 0x81, 0];
        let cluster = [0x1f, 0x43, 0xb6, 0x75];
        let block = [0xa3, 0x83, 7, 7, 7];
        let known = [&header[..], &[0x18, 0x53, 0x80, 0x67, 0x8b], &cluster, &[0x40, 0x05], &block].concat();
        let end = |bytes: &[u8]| matroska_end(&mut Cursor::new(bytes), bytes.len() as u64);
        assert_eq!((end(&known), end(&known[..18])), (Some(22), Some(22)));
        // The same as a live stream: segment and cluster have no size, the block has.
        let unknown = [0x01, 255, 255, 255, 255, 255, 255, 255];
        let live = [&header[..], &[0x18, 0x53, 0x80, 0x67, 0xff], &cluster, &unknown, &block].concat();
        assert_eq!((end(&live), end(&live[..27])), (Some(28), Some(28)));
        assert_eq!(end(&live[..23]), Some(6), "cut between elements, which does not show");
    }

    #[test]
    fn flv_ends_with_its_last_tag() {
        let file = [b"FLV\x01\x01\0\0\0\x09\0\0\0\0".as_slice(), &[9, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 7, 7, 0, 0, 0, 13]];
        let file = file.concat();
        let end = |bytes: &[u8]| flv_end(&mut Cursor::new(bytes), bytes.len() as u64);
        assert_eq!(end(&file), Ok(None));
        assert_eq!(end(&file[..file.len() - 4]), Ok(None), "the last size is not needed");
        assert_eq!(end(&file[..file.len() - 5]), Ok(Some(30)));
        assert!(end(&[&file[..], &file[..]].concat()).is_err());
    }

    #[test]
    fn transport_stream_ends_after_a_whole_packet() {
        for before in [0, 4] {
            let each = 188 + before;
            let mut stream = vec![0; 3 * each];
            (0..3).for_each(|packet| stream[each * packet + before] = b'G');
            let end = |bytes: &[u8]| transport_end(&mut Cursor::new(bytes), bytes.len() as u64, before as u64);
            assert_eq!((end(&stream), end(&stream[..400])), (Ok(None), Ok(Some(3 * each as u64))));
            stream[each + before] = 0;
            assert!(end(&stream).unwrap_err().contains(&format!("byte {each}")));
            stream.extend(b"text behind it");
            assert_eq!(end(&stream), Ok(None));
        }
    }

    #[test]
    fn webp_ends_with_its_last_chunk() {
        let file = [b"RIFF\x1a\0\0\0WEBPVP8X\x03\0\0\0abc\0ANIM\x02\0\0\0xy".as_slice()].concat();
        let end = |bytes: &[u8]| webp_end(&mut Cursor::new(bytes), bytes.len() as u64);
        assert_eq!((end(&file), end(&file[..20])), (Ok(Some(34)), Ok(Some(34))));
        let mut damaged = file;
        damaged[24..28].fill(0);
        assert!(end(&damaged).unwrap_err().contains("byte 24"));
    }

    #[test]
    fn ogg_ends_where_its_last_page_does() {
        let page = |sizes: &[u8]| {
            let mut page = b"OggS".to_vec();
            page.resize(26, 0);
            page.push(sizes.len() as u8);
            page.extend(sizes);
            page.resize(page.len() + sizes.iter().map(|size| usize::from(*size)).sum::<usize>(), 9);
            page
        };
        let file = [page(&[3]), page(&[255, 4])].concat();
        let end = |bytes: &[u8]| ogg_end(&mut Cursor::new(bytes), bytes.len() as u64);
        assert_eq!((end(&file), end(&file[..100])), (Some(file.len() as u64), Some(file.len() as u64)));
        assert_eq!(end(&file[..31]), Some(31));
    }
}
