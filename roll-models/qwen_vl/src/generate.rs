//! Answers to texts with pictures, token by token.

use roll_causal_lm::draw;
use roll_core::{Error, Grad, Medium, Noise, Positions, Purpose, Result, Sampling, VisionLanguageModel};

/// Continues `tokens` with `media` by at most `sampling.max_new_tokens` tokens, the last of which may be one of `ends`.
///
/// The placeholders of pictures and clips are never drawn. No keys and values are cached: the text is read again for
/// each token. [`QwenVl`](crate::QwenVl) keeps the features of its media from one reading to the next. Fails as
/// [`VisionLanguageModel::read`] does, on invalid options, and on limits per prompt and stop texts, which are not
/// supported.
pub fn generate(
    network: &mut dyn VisionLanguageModel,
    tokens: &[u32],
    media: &[Medium],
    sampling: &Sampling,
    ends: &[u32],
) -> Result<Vec<u32>> {
    sampling.check()?;
    if !(sampling.stop.is_empty() && sampling.limits.is_empty()) {
        return Err(Error::Unsupported("an answer about pictures has neither stop texts nor limits per prompt".into()));
    }
    let placeholders = [network.facts().image_token, network.facts().video_token].map(|id| id as usize);
    let vocabulary: Vec<u32> = (0..network.facts().vocabulary as u32).collect();
    let head = network.head_rows(&vocabulary)?;
    let (head, width) = (head.f32s()?, network.facts().width);
    let mut rng = Noise::new(sampling.seed).generator(Purpose::Tokens, 0, 0);
    let mut text = tokens.to_vec();
    while text.len() < tokens.len() + sampling.max_new_tokens {
        let (state, _) = network.read(&text, media, Positions::Multimodal, &[text.len() - 1], Grad::Skip)?;
        let state = state.f32s()?;
        let mut logits: Vec<f32> =
            head.chunks_exact(width).map(|row| row.iter().zip(state).map(|(w, s)| w * s).sum()).collect();
        placeholders.iter().for_each(|id| logits[*id] = f32::NEG_INFINITY);
        let drawn = draw(&logits, sampling, &mut rng)?.id;
        text.push(drawn);
        if ends.contains(&drawn) {
            break;
        }
    }
    Ok(text.split_off(tokens.len()))
}
