//! Detects the format of a file by its first bytes: file names are not trusted.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use roll_core::{Error, Result};
use roll_external::files;

/// Number of bytes that are read from the start of a file. They reach the second sync byte (`G`) of an MPEG transport
/// stream, which is at 188 or, if a time of 4 bytes precedes each packet, at 196.
const HEAD_BYTES: u64 = 197;

/// The kind of a file, by the reader that it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Container {
    Mp4,
    /// A GIF, WebP or PNG with several frames.
    Animation(Animation),
    /// A still PNG, JPEG or WebP.
    Picture,
    /// An image that only ffmpeg reads: its name, and ffmpeg's name of the format if ffmpeg cannot detect it.
    OtherPicture(&'static str, Option<&'static str>),
    /// A video in another container.
    OtherVideo(&'static str),
    Unknown,
}

/// The kind of an animated picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Animation {
    Gif,
    Webp,
    Png,
}

/// The format of a clip in words, for messages: by its first bytes, or "directory of pictures". Fails if the file
/// cannot be read.
pub fn format(path: impl AsRef<Path>) -> Result<&'static str> {
    let path = path.as_ref();
    if path.is_dir() {
        return Ok("directory of pictures");
    }
    Ok(match FileHead::read(path)?.container() {
        Container::Mp4 => "MP4 or MOV",
        Container::Animation(Animation::Gif) => "GIF",
        Container::Animation(Animation::Webp) => "animated WebP",
        Container::Animation(Animation::Png) => "animated PNG",
        Container::Picture => "PNG, JPEG or WebP",
        Container::OtherPicture(name, _) | Container::OtherVideo(name) => name,
        Container::Unknown => "unknown",
    })
}

/// Whether the file is a picture: one frame, and no animation.
pub fn is_picture(path: &Path) -> bool {
    let is_picture = |head: FileHead| matches!(head.container(), Container::Picture | Container::OtherPicture(..));
    FileHead::read(path).is_ok_and(is_picture)
}

/// Whether the file has several frames: an animated picture, or a video in a container other than
/// MP4, which has a reader of its own.
pub fn is_animated(path: &Path) -> bool {
    let is_animated = |head: FileHead| matches!(head.container(), Container::Animation(_) | Container::OtherVideo(_));
    FileHead::read(path).is_ok_and(is_animated)
}

/// The first bytes of a file.
pub(crate) struct FileHead {
    bytes: Vec<u8>,
    /// Whether the file is a PNG with several frames, as a later chunk says.
    is_animated_png: bool,
}

impl FileHead {
    pub fn read(path: &Path) -> Result<Self> {
        let failed = Error::file("read", path);
        let mut head = Vec::new();
        let read = files::open(path).and_then(|mut file| {
            file.by_ref().take(HEAD_BYTES).read_to_end(&mut head)?;
            Ok(head.starts_with(b"\x89PNG") && is_animated_png(&mut file))
        });
        match read {
            Ok(is_animated_png) => Ok(Self { bytes: head, is_animated_png }),
            Err(error) => Err(failed(error)),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Whether the file has the bytes `tag` at this offset.
    fn has_at(&self, offset: usize, tag: &[u8]) -> bool {
        self.bytes.get(offset..offset + tag.len()) == Some(tag)
    }

    /// The kind of the file.
    pub fn container(&self) -> Container {
        let at = |offset, tag: &[u8]| self.has_at(offset, tag);
        // AVIF or HEIF with several frames, which are a track as in a video.
        if at(4, b"ftyp") && [b"avis", b"msf1", b"hevc", b"hevx"].iter().any(|tag| at(8, *tag)) {
            return Container::OtherVideo("animated AVIF or HEIF");
        }
        if at(4, b"ftypavif") || [b"heic", b"heix", b"mif1"].iter().any(|tag| at(4, b"ftyp") && at(8, *tag)) {
            return Container::OtherPicture("AVIF or HEIF", None);
        }
        if [b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"styp"].iter().any(|tag| at(4, *tag)) {
            return Container::Mp4;
        }
        if at(0, b"GIF8") {
            return Container::Animation(Animation::Gif);
        }
        if self.is_animated_png {
            return Container::Animation(Animation::Png);
        }
        // Byte 20 has the flags of the extended format; 2 is animation.
        if at(0, b"RIFF") && at(8, b"WEBPVP8X") && self.bytes.get(20).is_some_and(|flags| flags & 2 != 0) {
            return Container::Animation(Animation::Webp);
        }
        if at(0, b"\x89PNG") || at(0, b"\xff\xd8\xff") || (at(0, b"RIFF") && at(8, b"WEBP")) {
            return Container::Picture;
        }
        if at(0, b"BM") && at(6, &[0; 4]) {
            return Container::OtherPicture("BMP", Some("bmp_pipe"));
        }
        if at(0, b"II*\0") || at(0, b"MM\0*") {
            return Container::OtherPicture("TIFF", Some("tiff_pipe"));
        }
        if at(0, b"\x1a\x45\xdf\xa3") {
            return Container::OtherVideo("Matroska or WebM");
        }
        if at(0, b"RIFF") && at(8, b"AVI ") {
            return Container::OtherVideo("AVI");
        }
        let is_transport_stream = (at(0, b"G") && at(188, b"G")) || (at(4, b"G") && at(196, b"G"));
        if at(0, b"\x00\x00\x01\xba") || at(0, b"\x00\x00\x01\xb3") || is_transport_stream {
            return Container::OtherVideo("MPEG");
        }
        // FLV, Ogg, ASF, raw H.264, IVF.
        let others: [&[u8]; 5] = [b"FLV", b"OggS", b"\x30\x26\xb2\x75", b"\x00\x00\x00\x01", b"DKIF"];
        if others.iter().any(|tag| at(0, tag)) {
            return Container::OtherVideo("video of another kind");
        }
        Container::Unknown
    }

    /// The reason why this crate cannot read the file, if none of its readers accepts it.
    pub fn unreadable_reason(&self) -> String {
        match self.container() {
            _ if self.is_empty() => "the file is empty".into(),
            Container::OtherPicture(name, _) | Container::OtherVideo(name) => {
                format!("{name}, which cannot be read without ffmpeg")
            }
            // Its first bytes may be those of a known format, but the reader did not accept it.
            Container::Mp4 | Container::Animation(_) | Container::Picture | Container::Unknown => {
                let start: String =
                    self.bytes.iter().take(8).flat_map(|&b| std::ascii::escape_default(b)).map(char::from).collect();
                format!("neither a video nor a picture: it begins with \"{start}\"")
            }
        }
    }
}

/// Maximum number of chunks that are searched before the pixels of a PNG.
const MAX_PNG_CHUNKS: usize = 1000;

/// Whether a chunk before the first pixels announces more than one frame.
fn is_animated_png(file: &mut File) -> bool {
    /// Bytes of the signature, which precedes the chunks.
    const SIGNATURE: u64 = 8;
    /// Bytes of a chunk without its data: length, kind and checksum.
    const CHUNK_FRAME: u64 = 12;
    let mut position = SIGNATURE;
    for _ in 0..MAX_PNG_CHUNKS {
        // Length, kind, and the first four bytes of the data.
        let mut chunk = [0; 12];
        if file.seek(SeekFrom::Start(position)).and_then(|_| file.read_exact(&mut chunk)).is_err() {
            return false;
        }
        let [a, b, c, d, kind @ .., e, f, g, h] = chunk;
        match &kind {
            // The animation's control chunk begins with the number of frames.
            b"acTL" => return u32::from_be_bytes([e, f, g, h]) > 1,
            b"IDAT" | b"IEND" => return false,
            _ => position += CHUNK_FRAME + u64::from(u32::from_be_bytes([a, b, c, d])),
        }
    }
    false
}
