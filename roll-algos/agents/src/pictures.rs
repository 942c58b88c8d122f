//! Pictures as text: a PNG in base64, for the protocol of environments, checkpoints, other ranks and records.

use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use roll_core::{Error, Picture, Result};
use roll_external::files;
use roll_media::{decode_still, encode_png};

/// Begins a picture that is the address of itself (RFC 2397).
const DATA_URL: &str = "data:image/png;base64,";

/// Largest file of a picture in bytes.
const MAX_BYTES: u64 = 128 << 20;

/// Reads a PNG, JPEG or WebP. The error names the file.
pub fn read(path: &Path) -> Result<Picture> {
    let bytes = files::read(path, MAX_BYTES).map_err(Error::file("read", path))?;
    Picture::try_from(decode_still(&bytes).map_err(|problem| Error::bad_file(path, problem))?)
}

/// The picture as a PNG in base64.
pub fn to_base64(picture: &Picture) -> Result<String> {
    Ok(STANDARD.encode(encode_png(&picture.into())?))
}

/// The picture as a `data:` URL with a PNG.
pub fn to_data_url(picture: &Picture) -> Result<String> {
    Ok(format!("{DATA_URL}{}", to_base64(picture)?))
}

/// Decodes a PNG, JPEG or WebP in base64.
///
/// # Errors
/// The problem, without the text.
pub fn from_base64(text: &str) -> Result<Picture, String> {
    let bytes = STANDARD.decode(text.trim()).map_err(|e| format!("not base64: {e}"))?;
    let picture = decode_still(&bytes)?;
    Picture::try_from(picture).map_err(|e| e.chain())
}

/// Decodes a `data:` URL with an image in base64.
///
/// # Errors
/// The problem, without the text.
pub fn from_data_url(url: &str) -> Result<Picture, String> {
    let content = url.strip_prefix("data:image/").and_then(|rest| rest.split_once(";base64,"));
    let (_format, base64) = content.ok_or("not a `data:image/...;base64,` URL")?;
    from_base64(base64)
}

/// Most pictures of an observation or a conversation.
const MAX_PICTURES: usize = 64;
/// Most pixels of these pictures together. A small file may claim many.
const MAX_PIXELS: usize = 100_000_000;

/// Pictures that another program sent, within bounds.
#[derive(Debug, Default)]
pub struct SentPictures {
    pictures: Vec<Picture>,
    pixels: usize,
}

impl SentPictures {
    /// Adds a picture.
    ///
    /// # Errors
    /// The problem, if it cannot be decoded, or if there are too many pictures or pixels.
    pub fn push(&mut self, decoded: Result<Picture, String>) -> Result<(), String> {
        let name = |problem| format!("picture {} (from 0): {problem}", self.pictures.len());
        let picture = decoded.map_err(name)?;
        self.pixels += picture.size().iter().product::<usize>();
        if self.pictures.len() == MAX_PICTURES || self.pixels > MAX_PIXELS {
            return Err(name(format!("at most {MAX_PICTURES} pictures of {MAX_PIXELS} pixels together are accepted")));
        }
        self.pictures.push(picture);
        Ok(())
    }

    /// The pictures in their order.
    pub fn into_vec(self) -> Vec<Picture> {
        self.pictures
    }
}

/// The pictures of a text for people: each mark becomes `[picture 56x32]`, with width and height.
pub fn described(text: &str, pictures: &[&Picture]) -> String {
    let mut pieces = text.split(roll_core::PICTURE_MARK);
    let mut described = pieces.next().unwrap_or_default().to_string();
    for (i, piece) in pieces.enumerate() {
        described += &match pictures.get(i).map(|picture| picture.size()) {
            Some([height, width]) => format!("[picture {width}x{height}]"),
            None => "[picture]".into(),
        };
        described += piece;
    }
    described
}

/// For `#[serde(with)]`: a list of pictures as texts in base64. Between ranks and in checkpoints, tensors are not
/// carried beside the text.
pub mod list {
    use roll_core::Picture;
    use serde::{Deserialize, Deserializer, Serializer, de, ser};

    /// Writes the pictures.
    pub fn serialize<S: Serializer>(pictures: &[Picture], serializer: S) -> Result<S::Ok, S::Error> {
        let encoded: roll_core::Result<Vec<String>> = pictures.iter().map(super::to_base64).collect();
        serializer.collect_seq(encoded.map_err(ser::Error::custom)?)
    }

    /// Reads the pictures.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Picture>, D::Error> {
        let encoded = Vec::<String>::deserialize(deserializer)?;
        encoded.iter().map(|text| super::from_base64(text).map_err(de::Error::custom)).collect()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use roll_core::Tensor;

    use super::*;

    fn picture() -> Picture {
        Picture::new(Tensor::new((0..18u8).collect::<Vec<_>>(), [2, 3, 3]).unwrap()).unwrap()
    }

    #[test]
    fn a_picture_is_the_same_after_its_text() {
        assert_eq!(from_base64(&to_base64(&picture()).unwrap()).unwrap(), picture());
        assert_eq!(from_data_url(&to_data_url(&picture()).unwrap()).unwrap(), picture());
    }

    #[test]
    fn invalid_texts_are_refused_with_the_problem() {
        for (text, problem) in [("a b", "not base64"), ("YWJj", "not a PNG"), ("", "not a PNG")] {
            let found = from_base64(text).unwrap_err();
            assert!(found.contains(problem), "{found}");
        }
        let cut = to_base64(&picture()).unwrap();
        assert!(from_base64(&cut[..cut.len() / 8 * 4]).is_err());
        assert!(from_data_url("https://example.org/a.png").unwrap_err().contains("`data:image/"));
    }

    #[test]
    fn pictures_of_other_programs_are_bounded() {
        let mut sent = SentPictures::default();
        (0..MAX_PICTURES).for_each(|_| sent.push(Ok(picture())).unwrap());
        assert!(sent.push(Ok(picture())).unwrap_err().starts_with("picture 64 (from 0): at most 64"));
        let large = Picture::new(Tensor::new(vec![0u8; 6000 * 6000 * 3], [6000, 6000, 3]).unwrap()).unwrap();
        let mut sent = SentPictures::default();
        (0..2).for_each(|_| sent.push(Ok(large.clone())).unwrap());
        assert!(sent.push(Ok(large)).unwrap_err().contains("picture 2"));
        assert_eq!(sent.into_vec().len(), 2);
    }

    #[test]
    fn people_read_the_size_of_a_picture() {
        assert_eq!(described("a \u{fffc}, \u{fffc}", &[&picture()]), "a [picture 3x2], [picture]");
    }
}
