//! Vision-language models: networks that read text with pictures and clips between its words.
//!
//! Rewards, agents and plugins reach such a network through [`VisionLanguageModel`], and open it by its name in the
//! configuration with [`open_vision_language`]. A house of models adds its name with
//! `inventory::submit!(VisionLanguageRegistration { ... })`.

use std::collections::BTreeMap;

use crate::plan::{Needs, PlanInput};
use crate::{BuildContext, Component, Error, Grad, Options, Pullback, Result, Tensor, nearest};

/// Facts of a network that a caller needs to prepare text, pictures and clips.
#[derive(Clone, Debug, PartialEq)]
pub struct VisionLanguageFacts {
    /// Side of a patch in pixels.
    pub patch: usize,
    /// Frames of a patch. A clip has a multiple of them; a picture is repeated as often.
    pub patch_frames: usize,
    /// Patches along each side of a square that becomes one token.
    pub merge: usize,
    /// Width of the states of [`VisionLanguageModel::read`].
    pub width: usize,
    /// Number of token ids: rows of the embedding.
    pub vocabulary: usize,
    /// Placeholder of a picture's tokens.
    pub image_token: u32,
    /// Placeholder of a clip's tokens.
    pub video_token: u32,
    /// The token before a picture or a clip.
    pub vision_start: u32,
    /// The token after a picture or a clip.
    pub vision_end: u32,
}

impl VisionLanguageFacts {
    /// Sides of pictures and clips are multiples of this number of pixels.
    pub fn side_multiple(&self) -> usize {
        self.patch * self.merge
    }

    /// Number of placeholders of a medium of the shape `[T, 3, H, W]`. Fails if the shape does not fit the network.
    pub fn tokens_of(&self, shape: &[usize]) -> Result<usize> {
        let side = self.side_multiple();
        match *shape {
            [t, 3, h, w] if t * h * w > 0 && t % self.patch_frames == 0 && h % side == 0 && w % side == 0 => {
                Ok(t / self.patch_frames * (h / side) * (w / side))
            }
            _ => {
                let expected = format!(
                    "[T, 3, H, W] with T a multiple of {}, H and W multiples of {side}, none 0",
                    self.patch_frames
                );
                Err(Error::shape("picture or clip", expected, shape))
            }
        }
    }
}

/// A picture or a clip between the words of a text.
#[derive(Clone, Debug)]
pub struct Medium {
    /// f32 `[T, 3, H, W]`: normalised pixels, as the network's processor normalises them. The shape is bounded by
    /// [`VisionLanguageFacts::tokens_of`]. A picture is one frame, repeated [`VisionLanguageFacts::patch_frames`] times.
    pub pixels: Tensor,
    /// Seconds between the starts of two time steps, each of [`VisionLanguageFacts::patch_frames`] frames. Networks
    /// whose positions follow the time read it, with [`Positions::Multimodal`], for clips.
    pub seconds_per_step: f64,
}

impl Medium {
    /// A medium whose time steps are one second apart.
    pub fn new(pixels: Tensor) -> Self {
        Self { pixels, seconds_per_step: 1.0 }
    }
}

/// The positions of tokens, which rotate queries and keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Positions {
    /// 0, 1, 2, ... whether a token is text or vision.
    Sequential,
    /// As the network was trained to chat: time, row and column of a vision token.
    #[default]
    Multimodal,
}

/// A network that reads text, pictures and clips. Its weights are frozen.
pub trait VisionLanguageModel: Send {
    /// The facts of the network.
    fn facts(&self) -> &VisionLanguageFacts;

    /// Returns the ids of `text`. Special tokens in the text are recognised; none are added.
    fn tokenize(&self, text: &str) -> Result<Vec<u32>>;

    /// Returns the text of `ids`, with special tokens.
    fn detokenize(&self, ids: &[u32]) -> Result<String>;

    /// The id of one token by its text, such as `<|im_end|>`; `None` if the tokenizer has no such token.
    fn token_id(&self, token: &str) -> Option<u32>;

    /// Tensors of the checkpoint that are not weights of the network, such as a reward's head, by their names without
    /// prefixes of wrappers: `rm_head.weight`.
    fn other_tensors(&self) -> &BTreeMap<String, Tensor>;

    /// Reads `tokens` with `media`, which take the runs of placeholders in their order. Returns the states after the
    /// final norm at the places `wanted`, f32 `[wanted.len(), width]`. Tokens behind the last wanted place, and media
    /// that begin there, are not computed: attention is causal, so no state depends on them.
    ///
    /// With [`Grad::Record`], the pullback takes the cotangent of the states and returns the cotangents of all pixels,
    /// f32 of rank 1, one medium after another ([`split_media`] divides it); 0 for media behind the last wanted place.
    /// Gradients of weights are not computed. Fails if placeholders and media do not match, on ids outside of the
    /// vocabulary, or if `wanted` is empty or holds a place outside of the text.
    fn read(
        &mut self,
        tokens: &[u32],
        media: &[Medium],
        positions: Positions,
        wanted: &[usize],
        grad: Grad,
    ) -> Result<(Tensor, Option<Pullback>)>;

    /// Adds a special token that the tokenizer lacks, as the next id, and returns the id. Fails if the embedding has no
    /// row for it.
    fn add_special_token(&mut self, token: &str) -> Result<u32> {
        Err(Error::Unsupported(format!("the tokenizer of this network takes no further token `{token}`")))
    }

    /// Rows of the output layer, f32 `[ids.len(), width]`: a state's product with a row is the logit of the row's
    /// token. Fails on ids outside of the vocabulary.
    fn head_rows(&self, ids: &[u32]) -> Result<Tensor>;
}

/// Divides the result of a pullback of [`VisionLanguageModel::read`] into one tensor per medium, in the medium's shape.
pub fn split_media(cotangent: &Tensor, media: &[Medium]) -> Result<Vec<Tensor>> {
    let total: usize = media.iter().map(|medium| medium.pixels.len()).sum();
    if cotangent.shape() != [total] {
        return Err(Error::shape("cotangent of media", format!("[{total}]"), cotangent.shape()));
    }
    let mut rest = cotangent.f32s()?;
    let parts = media.iter().map(|Medium { pixels, .. }| {
        let (part, others) = rest.split_at(pixels.len());
        rest = others;
        Tensor::new(part.to_vec(), pixels.shape())
    });
    parts.collect()
}

/// The texts that a step reads, all of the largest size, for a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedReads {
    /// Tokens of a text up to the last wanted place, with the placeholders of media.
    pub tokens: usize,
    /// Shapes of the text's media, `[T, 3, H, W]`.
    pub media: Vec<[usize; 4]>,
    /// Number of reads of a step: `[without gradient, with gradient]`. One at a time is recorded.
    pub count: [usize; 2],
}

/// A kind of vision-language networks, under a name.
pub struct VisionLanguageRegistration {
    /// The name in the configuration: `reward.model: {name: qwen_vl, ...}`.
    pub name: &'static str,
    /// One line for listings.
    pub summary: &'static str,
    /// Opens a network from its options. Keys of errors begin with `section`, such as `reward.model`.
    pub open: fn(section: &str, options: &Options, context: &BuildContext) -> Result<Box<dyn VisionLanguageModel>>,
    /// The files that a run would download first; `None` if all are on this machine.
    pub missing: fn(options: &Options, context: &BuildContext) -> Result<Option<String>>,
    /// Memory and time of reading texts on a device with the memory and speed of the input. Headers of files are read,
    /// no weights.
    pub needs: fn(
        section: &str,
        options: &Options,
        reads: &PlannedReads,
        input: &PlanInput,
        context: &BuildContext,
    ) -> Result<Needs>,
}

inventory::collect!(VisionLanguageRegistration);

impl VisionLanguageRegistration {
    /// The registration that `component` names. Fails if no house of this program has that name; the error suggests the
    /// nearest one.
    pub fn of(component: &Component) -> Result<&'static Self> {
        let known = || inventory::iter::<Self>.into_iter();
        let unknown = || Error::UnknownName {
            kind: "vision-language model",
            name: component.name.clone(),
            nearest: nearest(&component.name, known().map(|entry| entry.name)).map(Into::into),
            known: known().map(|entry| entry.name).collect::<Vec<_>>().join(", "),
        };
        known().find(|entry| entry.name == component.name).ok_or_else(unknown)
    }
}

/// Opens the network that `component` names. `section` is the key that holds the component, such as `reward.model`.
/// Fails as [`VisionLanguageRegistration::of`]. With [`BuildContext::headers_only`] no weights are read, and the network
/// reads no text.
pub fn open_vision_language(
    section: &str,
    component: &Component,
    context: &BuildContext,
) -> Result<Box<dyn VisionLanguageModel>> {
    (VisionLanguageRegistration::of(component)?.open)(section, &component.options, context)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn facts() -> VisionLanguageFacts {
        VisionLanguageFacts {
            patch: 14,
            patch_frames: 2,
            merge: 2,
            width: 8,
            vocabulary: 10,
            image_token: 6,
            video_token: 7,
            vision_start: 8,
            vision_end: 9,
        }
    }

    #[test]
    fn a_medium_has_a_token_per_square_and_time_step() {
        assert_eq!(facts().tokens_of(&[4, 3, 56, 84]).unwrap(), 2 * 2 * 3);
        for shape in [&[3, 3, 56, 84][..], &[4, 3, 50, 84], &[4, 1, 56, 84], &[0, 3, 28, 28], &[3, 28, 28]] {
            assert!(facts().tokens_of(shape).is_err(), "{shape:?}");
        }
    }

    #[test]
    fn the_cotangent_of_media_is_divided_by_their_shapes() {
        let media = [Medium::new(Tensor::zeros([1, 2])), Medium::new(Tensor::zeros([3]))];
        let flat = Tensor::new(vec![1f32, 2.0, 3.0, 4.0, 5.0], [5]).unwrap();
        let parts = split_media(&flat, &media).unwrap();
        assert_eq!((parts[0].shape(), parts[1].f32s().unwrap()), (&[1, 2][..], &[3f32, 4.0, 5.0][..]));
        assert!(split_media(&Tensor::zeros([4]), &media).is_err());
    }

    #[test]
    fn an_unknown_network_is_refused_by_name() {
        let error = open_vision_language("reward.model", &Component::named("cyclops"), &BuildContext::new("flex"));
        assert!(error.err().unwrap().to_string().contains("cyclops"));
    }
}
