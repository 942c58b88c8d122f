//! The network: pictures and clips through the tower, with the words through the language model, and back.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn_tensor::{DType, Device, IndexingUpdateOp, Int, Tensor as Burn};
use roll_backends::host::to_host_nd;
use roll_backends::{ChainRecord, Memory, WeightStore, to_device, to_host};
use roll_causal_lm::{Network, Tokenizer};
use roll_core::{Error, Grad, Medium, Positions, Pullback, Result, Tensor, VisionLanguageFacts, VisionLanguageModel};
use roll_media::PixelLimits;

use super::config::{QwenVlConfig, VisionConfig};
use super::output_layer::OutputLayer;
use super::patches::PatchOrder;
use super::pictures::{MAX_PIXELS, Pictures};
use super::positions::{self, Placed};
use super::{indices, tower};

/// A vision-language network with frozen weights.
pub struct QwenVl {
    pub(super) config: QwenVlConfig,
    /// The weights of the vision tower.
    pub(super) tower: Arc<dyn WeightStore>,
    pub(super) language: Network,
    /// The output layer, if the checkpoint has one of its own.
    pub(super) head: Option<OutputLayer>,
    pub(super) tokenizer: Option<Tokenizer>,
    /// See [`VisionLanguageModel::other_tensors`].
    pub(super) others: BTreeMap<String, Tensor>,
    /// Dtype of matrix products.
    pub(super) products: DType,
    /// Values that a recorded pass keeps for its pullback.
    pub(super) memory: Memory,
    /// The pixels that were read last without a record, and their features: another text about them needs no tower.
    pub(super) last: Option<(Vec<Tensor>, Burn<2>)>,
}

/// The result of the tower for the media of a text.
struct Seen {
    /// One row per square, in the order of processing.
    features: Burn<2>,
    record: Option<ChainRecord>,
    order: PatchOrder,
}

impl QwenVl {
    /// The architecture.
    pub fn config(&self) -> &QwenVlConfig {
        &self.config
    }

    fn device(&self) -> &Device {
        self.tower.device()
    }

    fn tokenizer(&self) -> Result<&Tokenizer> {
        self.tokenizer.as_ref().ok_or_else(missing_tokenizer)
    }

    /// Runs the vision tower over `media`. Returns the features, f32 `[squares, width]`, one medium after another, each
    /// in the order of its placeholders.
    pub fn features(&self, media: &[Medium]) -> Result<Tensor> {
        let grids = media.iter().map(|medium| super::patches::Grid::of(medium.pixels.shape(), &self.config.facts));
        let seen = self.look(&media.iter().collect::<Vec<_>>(), &grids.collect::<Result<Vec<_>>>()?, Grad::Skip)?;
        let rows = seen.order.rows().into_iter().map(|row| row as i64).collect();
        to_host(seen.features.select(0, indices(rows, self.device())))
    }

    /// Creates an empty table of media that this network's tower reads, with the bounds of the published processors.
    pub fn pictures(&self) -> Pictures {
        let limits = PixelLimits::of_processor(MAX_PIXELS);
        Pictures::new(self.config.clone(), self.tower.clone(), self.products, self.memory, limits)
    }

    fn look(&self, media: &[&Medium], grids: &[super::patches::Grid], grad: Grad) -> Result<Seen> {
        let vision = &self.config.vision;
        let order = PatchOrder::new(vision, grids);
        let patches = order.patches(vision, media, self.device())?;
        let (features, record) = tower::run(vision, &self.tower, self.products, self.memory, patches, &order, grad)?;
        Ok(Seen { features, record, order })
    }

    /// As [`QwenVl::look`]. Without a record, media that were read last are not computed again.
    fn look_again(&mut self, media: &[&Medium], grids: &[super::patches::Grid], grad: Grad) -> Result<Seen> {
        if grad.is_on() {
            return self.look(media, grids, grad);
        }
        if let Some((pixels, features)) = &self.last
            && pixels.len() == media.len()
            && pixels.iter().zip(media).all(|(pixels, medium)| is_same(pixels, &medium.pixels))
        {
            let order = PatchOrder::new(&self.config.vision, grids);
            return Ok(Seen { features: features.clone(), record: None, order });
        }
        let seen = self.look(media, grids, grad)?;
        self.last = Some((media.iter().map(|medium| medium.pixels.clone()).collect(), seen.features.clone()));
        Ok(seen)
    }

    /// Fails unless `wanted` are places of `tokens`. Returns the number of tokens up to the last one.
    fn count(tokens: &[u32], wanted: &[usize]) -> Result<usize> {
        match wanted.iter().max() {
            Some(last) if *last < tokens.len() => Ok(last + 1),
            Some(last) => {
                Err(Error::Misuse(format!("the place {last} is outside of a text of {} tokens", tokens.len())))
            }
            None => Err(Error::Misuse("no state is wanted of a text".into())),
        }
    }
}

impl VisionLanguageModel for QwenVl {
    fn facts(&self) -> &VisionLanguageFacts {
        &self.config.facts
    }

    fn tokenize(&self, text: &str) -> Result<Vec<u32>> {
        self.tokenizer()?.encode(text)
    }

    fn detokenize(&self, ids: &[u32]) -> Result<String> {
        self.tokenizer()?.decode(ids)
    }

    fn token_id(&self, token: &str) -> Option<u32> {
        self.tokenizer.as_ref()?.id(token)
    }

    fn add_special_token(&mut self, token: &str) -> Result<u32> {
        let rows = self.config.facts.vocabulary;
        let tokenizer = self.tokenizer.as_mut().ok_or_else(missing_tokenizer)?;
        match tokenizer.vocabulary() {
            next if next < rows => tokenizer.with_special_token(token),
            next => Err(Error::Unsupported(format!(
                "the token `{token}` would have the id {next}, and the embedding has {rows} rows: the checkpoint belongs \
                 to another tokenizer"
            ))),
        }
    }

    fn other_tensors(&self) -> &BTreeMap<String, Tensor> {
        &self.others
    }

    fn read(
        &mut self,
        tokens: &[u32],
        media: &[Medium],
        positions: Positions,
        wanted: &[usize],
        grad: Grad,
    ) -> Result<(Tensor, Option<Pullback>)> {
        let count = Self::count(tokens, wanted)?;
        let mut placed = positions::place(&self.config.facts, tokens, media)?;
        placed.retain(|medium| medium.tokens.start < count);
        let device = self.device().clone();
        let words = self.language.embedded(&tokens[..count])?;
        let seen = if placed.is_empty() {
            None
        } else {
            let used: Vec<&Medium> = media[..placed.len()].iter().collect();
            let grids: Vec<_> = placed.iter().map(|medium| medium.grid).collect();
            Some(self.look_again(&used, &grids, grad)?)
        };
        let x = match &seen {
            Some(seen) => {
                let sources = sources(count, &placed, &seen.order);
                Burn::cat(vec![words, seen.features.clone()], 0).select(0, indices(sources, &device))
            }
            None => words,
        };
        let places = positions::positions(&self.config, count, &placed, positions);
        let (states, record) = self.language.read_embedded(x, positions::rope(&self.config, &places, &device), grad)?;
        let wanted = indices(wanted.iter().map(|place| *place as i64).collect(), &device);
        let states = to_host(states.select(0, wanted.clone()))?;
        let pullback = record.map(|record| {
            let shapes: Vec<Vec<usize>> = media.iter().map(|medium| medium.pixels.shape().to_vec()).collect();
            let recorded = Recorded {
                language: record,
                seen: seen.and_then(|seen| Some((seen.record?, seen.order))),
                wanted,
                states_shape: states.shape().to_vec(),
                count,
                placed,
                shapes,
                vision: self.config.vision.clone(),
                device,
            };
            Pullback::new(move |cotangent: &Tensor| recorded.pull(cotangent))
        });
        Ok((states, pullback))
    }

    fn head_rows(&self, ids: &[u32]) -> Result<Tensor> {
        match &self.head {
            Some(head) => head.rows(ids),
            None => self.language.head_rows(ids),
        }
    }
}

fn missing_tokenizer() -> Error {
    Error::Unsupported("the model has no tokenizer: expected tokenizer.json next to it".into())
}

/// A pass of [`QwenVl::read`] that is ready for the cotangent of its states.
struct Recorded {
    language: ChainRecord,
    /// The tower's record, and the order of its patches; `None` if no medium was read.
    seen: Option<(ChainRecord, PatchOrder)>,
    wanted: Burn<1, Int>,
    states_shape: Vec<usize>,
    /// Number of tokens that were read.
    count: usize,
    /// The media that were read: the first ones.
    placed: Vec<Placed>,
    /// The shapes of all media.
    shapes: Vec<Vec<usize>>,
    vision: VisionConfig,
    device: Device,
}

impl Recorded {
    /// Returns the cotangents of all pixels, flat.
    fn pull(self, cotangent: &Tensor) -> Result<Tensor> {
        if cotangent.shape() != self.states_shape {
            return Err(Error::shape("cotangent of states", format!("{:?}", self.states_shape), cotangent.shape()));
        }
        let total = self.shapes.iter().map(|shape| shape.iter().product::<usize>()).sum();
        let Some((tower, order)) = self.seen else { return Ok(Tensor::zeros([total])) };
        let width = self.states_shape[1];
        let zeros = |rows: usize| Burn::<2>::zeros([rows, width], (&self.device, DType::F32));
        let d_wanted = to_device::<2>(cotangent, &self.device)?;
        let d_states = zeros(self.count).select_assign(0, self.wanted, d_wanted, IndexingUpdateOp::Add);
        let (d_x, _) = self.language.pull(d_states.into())?;
        // Squares behind the last token that was read have the row of zeros.
        let rows = squares_tokens(self.count, &self.placed, &order);
        let d_features = Burn::cat(vec![d_x.rank::<2>()?, zeros(1)], 0).select(0, indices(rows, &self.device));
        let (d_patches, _) = tower.pull(d_features.into())?;
        let shapes: Vec<&[usize]> = self.shapes[..self.placed.len()].iter().map(Vec::as_slice).collect();
        let mut flat = order.scatter(&self.vision, &shapes, to_host_nd(&d_patches)?.f32s()?).concat();
        flat.resize(total, 0.0);
        Tensor::new(flat, [total])
    }
}

/// Whether two tensors have the same shape and bits.
fn is_same(a: &Tensor, b: &Tensor) -> bool {
    a.shape() == b.shape() && a.dtype() == b.dtype() && a.as_bytes() == b.as_bytes()
}

/// For each token, its row among the embeddings of `count` tokens and the features after them.
fn sources(count: usize, placed: &[Placed], order: &PatchOrder) -> Vec<i64> {
    let mut sources: Vec<i64> = (0..count as i64).collect();
    let rows = order.rows();
    let tokens = placed.iter().flat_map(|medium| medium.tokens.clone());
    for (token, row) in tokens.zip(rows).filter(|(token, _)| *token < count) {
        sources[token] = (count + row) as i64;
    }
    sources
}

/// For each square, in the order of processing, its token; `count` if the token was not read.
fn squares_tokens(count: usize, placed: &[Placed], order: &PatchOrder) -> Vec<i64> {
    let tokens: Vec<usize> = placed.iter().flat_map(|medium| medium.tokens.clone()).collect();
    order.squares.iter().map(|square| tokens[*square].min(count) as i64).collect()
}
