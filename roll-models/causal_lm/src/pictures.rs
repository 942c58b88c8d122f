//! Tokens that represent pictures instead of words.
//!
//! A picture is a run of tokens whose ids are made from its content. Equal ids therefore mean equal embeddings, and all
//! that compares tokens, such as the cache of keys and values, tells two pictures apart.

use burn_tensor::{Int, Tensor};
use roll_core::{Error, FIRST_PICTURE_ID, PICTURE_MARK, Picture, Result};

/// The tokens of pictures, and their embeddings and positions.
pub trait PictureTokens: Send + Sync {
    /// Returns the tokens of the squares of a picture, which is prepared as the network's processor does. The other
    /// methods know them until [`PictureTokens::forget`] drops the picture. Fails if the network cannot take a picture
    /// of this shape.
    fn squares(&self, picture: &Picture) -> Result<Vec<u32>>;

    /// The tokens before and after the squares of a picture.
    fn delimiters(&self) -> [u32; 2];

    /// Drops the pictures that were not among the arguments of [`PictureTokens::squares`] since the previous call.
    fn forget(&self);

    /// Returns the rotary positions (time, row, column) of the tokens `ids` of a sequence from its beginning, then that
    /// of the token after them. Fails if a picture is unknown or incomplete.
    fn positions(&self, ids: &[u32]) -> Result<Vec<[usize; 3]>>;

    /// Returns the embeddings of the picture tokens among `ids`, f32 `[picture tokens, D]`. Fails if a picture is unknown
    /// or incomplete.
    fn embeddings(&self, ids: &[u32]) -> Result<Tensor<2>>;

    /// Returns cosine and sine of the rotary angles at `places`, `[places, head_dim / 2]` each.
    fn rope(&self, places: &[[usize; 3]]) -> (Tensor<2>, Tensor<2>);

    /// Ids of the placeholders of pictures in texts of other programs, which are never drawn. In a text, they are words.
    fn placeholders(&self) -> Vec<u32>;
}

/// Returns the tokens of `text`, with those of the next of `pictures` in the place of each [`PICTURE_MARK`]. `encode`
/// returns the tokens of words. The tokens around a picture are special ones, which divide a text before it is
/// tokenized, so that the pieces between pictures have the tokens of the whole. Fails if marks and pictures are not
/// equally many.
pub fn with_pictures(
    text: &str,
    pictures: &[Picture],
    source: &dyn PictureTokens,
    encode: impl Fn(&str) -> Result<Vec<u32>>,
) -> Result<Vec<u32>> {
    let marks = text.matches(PICTURE_MARK).count();
    if marks != pictures.len() {
        let found = pictures.len();
        let problem = format!("the text has places (U+FFFC) for {marks} pictures: expected as many, found {found}");
        return Err(Error::Misuse(problem));
    }
    let mut ids = Vec::new();
    let [before, after] = source.delimiters();
    let mut pictures = pictures.iter();
    for piece in text.split(PICTURE_MARK) {
        if !piece.is_empty() {
            ids.extend(encode(piece)?);
        }
        if let Some(picture) = pictures.next() {
            ids.push(before);
            ids.extend(source.squares(picture)?);
            ids.push(after);
        }
    }
    Ok(ids)
}

/// Returns the text of `ids`, in which a run of squares, with the delimiters at its ends, is one [`PICTURE_MARK`].
/// `decode` returns the text of words.
pub fn without_squares(ids: &[u32], delimiters: [u32; 2], decode: impl Fn(&[u32]) -> Result<String>) -> Result<String> {
    let is_square = |id: &u32| is_picture(i64::from(*id));
    let [before, after] = delimiters;
    let (mut text, mut rest) = (String::new(), ids);
    while let Some(first) = rest.iter().position(is_square) {
        let words = &rest[..first];
        text += &decode(words.strip_suffix(&[before]).unwrap_or(words))?;
        text.push(PICTURE_MARK);
        let squares = rest[first..].iter().take_while(|id| is_square(id)).count();
        rest = &rest[first + squares..];
        rest = rest.strip_prefix(&[after]).unwrap_or(rest);
    }
    if !rest.is_empty() {
        text += &decode(rest)?;
    }
    Ok(text)
}

/// Returns whether `id` represents a part of a picture.
pub fn is_picture(id: i64) -> bool {
    id >= i64::from(FIRST_PICTURE_ID) && id <= i64::from(u32::MAX)
}

/// The embeddings of picture tokens in a pass.
pub struct PictureRows {
    /// f32 `[picture tokens, D]`.
    pub embeddings: Tensor<2>,
    /// For each token of the pass, its row among the embeddings of all words and, after them, those of picture tokens.
    pub sources: Tensor<1, Int>,
}
