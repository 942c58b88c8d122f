//! Detects the format of a file by its first bytes: file names are not trusted.

use std::io::Read;
use std::path::Path;

use roll_core::{Error, Result};
use roll_external::files;

/// Bytes of a file's start that are read: up to the second sync byte (`G`) of an MPEG transport stream, at 188.
const HEAD_BYTES: u64 = 189;

/// The kind of a file, by the reader that it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Container {
    Mp4,
    Gif,
    /// PNG, JPEG or WebP.
    Picture,
    /// An image that only ffmpeg reads: its name, and ffmpeg's name of the format if ffmpeg cannot detect it.
    OtherPicture(&'static str, Option<&'static str>),
    /// A video in another container.
    OtherVideo(&'static str),
    Unknown,
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
        Container::Gif => "GIF",
        Container::Picture => "PNG, JPEG or WebP",
        Container::OtherPicture(name, _) | Container::OtherVideo(name) => name,
        Container::Unknown => "unknown",
    })
}

pub(crate) fn is_picture(path: &Path) -> bool {
    let is_picture = |head: FileHead| matches!(head.container(), Container::Picture | Container::OtherPicture(..));
    FileHead::read(path).is_ok_and(is_picture)
}

/// The first bytes of a file.
pub(crate) struct FileHead(Vec<u8>);

impl FileHead {
    pub fn read(path: &Path) -> Result<Self> {
        let failed = Error::file("read", path);
        let mut head = Vec::new();
        match files::open(path).and_then(|file| file.take(HEAD_BYTES).read_to_end(&mut head)) {
            Ok(_) => Ok(Self(head)),
            Err(error) => Err(failed(error)),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn at(&self, offset: usize, tag: &[u8]) -> bool {
        self.0.get(offset..offset + tag.len()) == Some(tag)
    }

    pub fn container(&self) -> Container {
        let at = |offset, tag: &[u8]| self.at(offset, tag);
        if at(4, b"ftypavi") || [b"heic", b"heix", b"mif1", b"msf1"].iter().any(|tag| at(4, b"ftyp") && at(8, *tag)) {
            return Container::OtherPicture("AVIF or HEIF", None);
        }
        if [b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"styp"].iter().any(|tag| at(4, *tag)) {
            return Container::Mp4;
        }
        if at(0, b"GIF8") {
            return Container::Gif;
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
        if at(0, b"\x00\x00\x01\xba") || at(0, b"\x00\x00\x01\xb3") || (at(0, b"G") && at(188, b"G")) {
            return Container::OtherVideo("MPEG");
        }
        // FLV, Ogg, ASF, raw H.264, IVF.
        let others: [&[u8]; 5] = [b"FLV", b"OggS", b"\x30\x26\xb2\x75", b"\x00\x00\x00\x01", b"DKIF"];
        if others.iter().any(|tag| at(0, tag)) {
            return Container::OtherVideo("video of another kind");
        }
        Container::Unknown
    }

    /// The reason why this crate cannot read the file; for files that none of its readers accepts.
    pub fn unreadable_reason(&self) -> String {
        match self.container() {
            _ if self.is_empty() => "the file is empty".into(),
            Container::OtherPicture(name, _) | Container::OtherVideo(name) => {
                format!("{name}, which cannot be read without ffmpeg")
            }
            // Its first bytes may be those of a known format, but the reader did not accept it.
            Container::Mp4 | Container::Gif | Container::Picture | Container::Unknown => {
                let start: String =
                    self.0.iter().take(8).flat_map(|&b| std::ascii::escape_default(b)).map(char::from).collect();
                format!("neither a video nor a picture: it begins with \"{start}\"")
            }
        }
    }
}
