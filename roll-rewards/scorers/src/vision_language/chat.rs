//! The chat of Qwen2-VL and Qwen2.5-VL: one question about pictures or a clip.

use roll_core::{Error, Result, VisionLanguageModel};

use crate::RewardError;

/// The kind of the placeholders of a medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placeholder {
    /// A picture.
    Image,
    /// A clip.
    Video,
}

/// Tokens that divide the turns of a chat.
const TURN_TOKENS: [&str; 2] = ["<|im_start|>", "<|im_end|>"];

/// The tokens of a chat: the system turn, a user turn with one run of placeholders per entry of `media` (their number of
/// tokens) and `text`, and the opening of the answer. Media have their start and end tokens, and no separators. Fails
/// if the tokenizer lacks the tokens of turns.
pub fn chat_tokens(
    network: &dyn VisionLanguageModel,
    system: &str,
    kind: Placeholder,
    media: &[usize],
    text: &str,
) -> Result<Vec<u32>> {
    if let Some(token) = TURN_TOKENS.into_iter().find(|token| network.token_id(token).is_none()) {
        let problem = format!("expected the tokenizer of a Qwen chat model, with `{token}`; found none of that name");
        return Err(Error::Unsupported(problem));
    }
    let facts = network.facts();
    let placeholder = match kind {
        Placeholder::Image => facts.image_token,
        Placeholder::Video => facts.video_token,
    };
    // Special tokens divide a text before it is tokenized, so pieces have the tokens of the whole.
    let mut tokens = network.tokenize(&format!("<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n"))?;
    for count in media {
        tokens.push(facts.vision_start);
        tokens.extend(std::iter::repeat_n(placeholder, *count));
        tokens.push(facts.vision_end);
    }
    tokens.extend(network.tokenize(&format!("{text}<|im_end|>\n<|im_start|>assistant\n"))?);
    Ok(tokens)
}

/// Fails if `text`, a prompt or a question of the user, holds a token of the chat, of media or of `reserved`: it would
/// be read as one, and the score would be taken at the wrong place.
pub fn refuse_reserved(network: &dyn VisionLanguageModel, text: &str, reserved: &[u32]) -> Result<()> {
    let facts = network.facts();
    let of_media = [facts.image_token, facts.video_token, facts.vision_start, facts.vision_end];
    let of_turns = TURN_TOKENS.into_iter().filter_map(|token| network.token_id(token));
    let forbidden: Vec<u32> = of_media.into_iter().chain(of_turns).chain(reserved.iter().copied()).collect();
    match network.tokenize(text)?.into_iter().find(|id| forbidden.contains(id)) {
        None => Ok(()),
        Some(id) => Err(RewardError::ReservedToken { token: network.detokenize(&[id])?, text: text.into() }.into()),
    }
}
