//! Tokens that represent pictures instead of words.
//!
//! A picture is a run of tokens whose ids are made from its content. Equal ids therefore mean equal embeddings, and all
//! that compares tokens, such as the cache of keys and values, tells two pictures apart.

use burn_tensor::{Int, Tensor};
use roll_core::{FIRST_PICTURE_ID, Result};

/// The embeddings and positions of tokens that represent pictures.
pub trait PictureTokens: Send + Sync {
    /// Returns the rotary positions (time, row, column) of the tokens `ids` of a sequence from its beginning, then that
    /// of the token after them. Fails if a picture is unknown or incomplete.
    fn positions(&self, ids: &[u32]) -> Result<Vec<[usize; 3]>>;

    /// Returns the embeddings of the picture tokens among `ids`, f32 `[picture tokens, D]`. Fails if a picture is unknown
    /// or incomplete.
    fn embeddings(&self, ids: &[u32]) -> Result<Tensor<2>>;

    /// Returns cosine and sine of the rotary angles at `places`, `[places, head_dim / 2]` each.
    fn rope(&self, places: &[[usize; 3]]) -> (Tensor<2>, Tensor<2>);

    /// Ids of the placeholders of pictures in texts, which are never drawn.
    fn placeholders(&self) -> Vec<u32>;
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
