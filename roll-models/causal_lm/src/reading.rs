//! The network that reads pictures: the rows and positions of their tokens in a pass.

use std::sync::Arc;

use burn_tensor::Tensor as Burn;
use roll_core::Result;

use super::integers;
use super::network::Network;
use super::packed::Packed;
use super::pictures::{PictureRows, PictureTokens, is_picture};

impl Network {
    /// Sets the tokens that represent pictures, which a network without them refuses.
    pub fn with_pictures(mut self, pictures: Arc<dyn PictureTokens>) -> Self {
        self.pictures = Some(pictures);
        self
    }

    /// The rotary positions of the tokens `ids` of a sequence, then that of the token after them; `None` if the model
    /// reads no pictures.
    pub(super) fn places(&self, ids: &[u32]) -> Result<Option<Vec<[usize; 3]>>> {
        self.pictures.as_ref().map(|pictures| pictures.positions(ids)).transpose()
    }

    /// Ids that are never drawn.
    pub(super) fn never_drawn(&self) -> Vec<u32> {
        self.pictures.as_ref().map(|pictures| pictures.placeholders()).unwrap_or_default()
    }

    /// The embeddings of the picture tokens of `packed`; `None` for words alone.
    pub(super) fn picture_rows(&self, packed: &Packed) -> Result<Option<PictureRows>> {
        let Some(pictures) = self.pictures.as_ref().filter(|_| packed.ids.iter().any(|id| is_picture(*id))) else {
            return Ok(None);
        };
        let mut embeddings = Vec::new();
        for span in &packed.spans {
            let ids: Vec<u32> = packed.ids[span.clone()].iter().map(|id| *id as u32).collect();
            if packed.ids[span.clone()].iter().any(|id| is_picture(*id)) {
                embeddings.push(pictures.embeddings(&ids)?);
            }
        }
        let mut next = packed.len() as i64;
        let sources = packed.ids.iter().enumerate().map(|(word, id)| match is_picture(*id) {
            true => {
                next += 1;
                next - 1
            }
            false => word as i64,
        });
        let sources = integers(sources.collect(), self.device());
        Ok(Some(PictureRows { embeddings: Burn::cat(embeddings, 0), sources }))
    }
}
