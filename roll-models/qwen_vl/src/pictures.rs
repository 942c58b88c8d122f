//! Pictures and clips as tokens of the language model, so that it generates with a cache and is trained with them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn_tensor::{DType, Tensor as Burn};
use roll_backends::{Memory, WeightStore};
use roll_causal_lm::PictureTokens;
use roll_core::{Error, FIRST_PICTURE_ID, Grad, Medium, Picture, Positions, Result};
use roll_media::{PixelLimits, Pixels};

use super::config::{PATCH_EMBEDDING, QwenVlConfig};
use super::patches::{Grid, PatchOrder};
use super::positions::{self, Placed};
use super::{indices, tower};

/// Pictures with more pixels are reduced, unless a file or an option says otherwise: 1280 squares of 28 x 28 pixels.
pub const MAX_PIXELS: usize = 1280 * 28 * 28;

/// The media that the language model can read as tokens.
///
/// Each square of a medium is a token, whose id is made from the content of the medium and the number of the square.
/// Equal media have equal ids on all ranks and in all runs, and different media different ids.
pub struct Pictures {
    config: QwenVlConfig,
    tower: Arc<dyn WeightStore>,
    products: DType,
    memory: Memory,
    limits: PixelLimits,
    seen: Mutex<Table>,
}

/// The media that the tower has read.
#[derive(Default)]
struct Table {
    /// Number of calls of [`PictureTokens::forget`].
    generation: u64,
    /// Media by their first two ids, with the generation in which they were added last. The second id is 0 for a medium
    /// of one square.
    media: HashMap<[u32; 2], (u64, Arc<Seen>)>,
}

/// A medium that the tower has read.
struct Seen {
    ids: Vec<u32>,
    /// The content, from which the ids are made.
    hash: u64,
    /// With the range of tokens of a sequence of the medium alone.
    placed: Placed,
    /// f32 `[squares, D]`, in the order of the tokens.
    features: Burn<2>,
}

impl Pictures {
    /// Creates an empty table. `tower` holds the weights of the vision tower; `limits` bound the pictures of a text.
    pub fn new(
        config: QwenVlConfig,
        tower: Arc<dyn WeightStore>,
        products: DType,
        memory: Memory,
        limits: PixelLimits,
    ) -> Self {
        Self { config, tower, products, memory, limits, seen: Mutex::default() }
    }

    fn seen(&self) -> MutexGuard<'_, Table> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the tokens of a medium, one per square. The tower reads it unless it is known. Fails if the shape does
    /// not fit the network, or if another medium has the same ids.
    pub fn add(&self, medium: &Medium, is_clip: bool) -> Result<Vec<u32>> {
        let grid = Grid::of(medium.pixels.shape(), &self.config.facts)?;
        let squares = self.config.facts.tokens_of(medium.pixels.shape())?;
        let hash = hash(medium, is_clip);
        let id = |square: u64| FIRST_PICTURE_ID | (mixed(hash, square) >> 33) as u32;
        let ids: Vec<u32> = (0..squares as u64).map(id).collect();
        let key = [ids[0], ids.get(1).copied().unwrap_or(0)];
        let mut table = self.seen();
        let generation = table.generation;
        if let Some((added, known)) = table.media.get_mut(&key) {
            return match known.hash == hash && known.ids == ids {
                true => {
                    *added = generation;
                    Ok(ids)
                }
                false => Err(Error::Unsupported(
                    "two pictures have the same token ids by chance: leave out one of them".into(),
                )),
            };
        }
        // A check knows the tokens of a picture, and has no weights to read it.
        if self.tower.shape(PATCH_EMBEDDING).is_none() {
            return Ok(ids);
        }
        // Other threads may read the table while the tower reads the medium.
        drop(table);
        let vision = &self.config.vision;
        let order = PatchOrder::new(vision, &[grid]);
        let patches = order.patches(vision, &[medium], self.tower.device())?;
        let (features, _) = tower::run(vision, &self.tower, self.products, self.memory, patches, &order, Grad::Skip)?;
        let rows = order.rows().into_iter().map(|row| row as i64).collect();
        let features = features.select(0, indices(rows, self.tower.device()));
        let placed = Placed { tokens: 0..squares, grid, is_clip, seconds_per_step: medium.seconds_per_step };
        let seen = Arc::new(Seen { ids: ids.clone(), hash, placed, features });
        let mut table = self.seen();
        let generation = table.generation;
        table.media.insert(key, (generation, seen));
        Ok(ids)
    }

    /// Returns `tokens` with those of `media` in the places of their placeholders. Fails as
    /// [`VisionLanguageModel::read`](roll_core::VisionLanguageModel::read) if they do not match.
    pub fn with_media(&self, tokens: &[u32], media: &[Medium]) -> Result<Vec<u32>> {
        let mut ids = tokens.to_vec();
        for (placed, medium) in positions::place(&self.config.facts, tokens, media)?.into_iter().zip(media) {
            ids[placed.tokens].copy_from_slice(&self.add(medium, placed.is_clip)?);
        }
        Ok(ids)
    }

    /// The media in `ids`, and the place of the first token of each.
    fn media(&self, ids: &[u32]) -> Result<Vec<(usize, Arc<Seen>)>> {
        let table = self.seen();
        let (mut media, mut at) = (Vec::new(), 0);
        while at < ids.len() {
            if ids[at] < FIRST_PICTURE_ID {
                at += 1;
                continue;
            }
            let second = ids.get(at + 1).copied().unwrap_or(0);
            let found = table.media.get(&[ids[at], 0]).or_else(|| table.media.get(&[ids[at], second]));
            let found =
                found.map(|(_, seen)| seen).filter(|seen| ids[at..].starts_with(&seen.ids)).ok_or_else(|| {
                    Error::Misuse(format!("the tokens from {at} on are of a picture that the model does not know"))
                })?;
            media.push((at, found.clone()));
            at += found.ids.len();
        }
        Ok(media)
    }
}

impl PictureTokens for Pictures {
    fn squares(&self, picture: &Picture) -> Result<Vec<u32>> {
        let pixels = Pixels::of_picture(picture, self.limits, &self.config.facts)?;
        let (seconds_per_step, is_clip) = (1.0, false);
        self.add(&pixels.medium(seconds_per_step)?, is_clip)
    }

    fn delimiters(&self) -> [u32; 2] {
        [self.config.facts.vision_start, self.config.facts.vision_end]
    }

    fn forget(&self) {
        let mut table = self.seen();
        let generation = table.generation;
        table.media.retain(|_, (added, _)| *added == generation);
        table.generation += 1;
    }

    fn positions(&self, ids: &[u32]) -> Result<Vec<[usize; 3]>> {
        let placed =
            |(at, seen): &(usize, Arc<Seen>)| Placed { tokens: *at..at + seen.ids.len(), ..seen.placed.clone() };
        let placed: Vec<Placed> = self.media(ids)?.iter().map(placed).collect();
        let with_next = ids.len() + 1;
        Ok(positions::positions(&self.config, with_next, &placed, Positions::Multimodal))
    }

    fn embeddings(&self, ids: &[u32]) -> Result<Burn<2>> {
        Ok(Burn::cat(self.media(ids)?.iter().map(|(_, seen)| seen.features.clone()).collect(), 0))
    }

    fn rope(&self, places: &[[usize; 3]]) -> (Burn<2>, Burn<2>) {
        positions::rope(&self.config, places, self.tower.device())
    }

    fn placeholders(&self) -> Vec<u32> {
        vec![self.config.facts.image_token, self.config.facts.video_token]
    }
}

/// A hash of the content of a medium: FNV-1a of its shape, time and pixels.
fn hash(medium: &Medium, is_clip: bool) -> u64 {
    const START: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0100_0000_01b3;
    let shape = medium.pixels.shape().iter().flat_map(|side| (*side as u64).to_le_bytes());
    let time = medium.seconds_per_step.to_bits().to_le_bytes();
    let facts = shape.chain(time).chain([u8::from(is_clip)]);
    facts
        .chain(medium.pixels.as_bytes().iter().copied())
        .fold(START, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(PRIME))
}

/// The `number`-th value of the generator SplitMix64 with the state `seed`.
fn mixed(seed: u64, number: u64) -> u64 {
    let z = seed.wrapping_add((number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
