//! Captions: descriptions of videos in words, as prompts for a video model.

use roll_core::{Error, Fault, Result, Video};
use roll_external::service::excerpt;
use serde_json::Value as Json;

use super::{Answered, Judge};

/// The question that asks for a caption.
pub const CAPTION_QUESTION: &str = "\
    Describe the video in one paragraph of plain text, at most 120 words: who or what is seen and how it looks, what it \
    does and how it moves, the place, the light, and the movement of the camera. Begin with the subject itself, not with \
    \"the video\" or \"the frames\", and mention only what can be seen.";
/// Longest caption in tokens.
const MAX_TOKENS: u32 = 512;
/// Longest caption in bytes; 512 tokens of English are about 2 kB.
pub(super) const MAX_CAPTION: usize = 8 << 10;

impl Judge {
    /// Returns the answer to the first of the configured questions (such as [`CAPTION_QUESTION`]) as one line of text.
    /// Fails if the service does not answer, or if its answers are empty, too long or cut off.
    pub fn caption(&self, video: &Video, prompt: &str) -> Result<String> {
        let request = self.request(self.questions[0].replace("{prompt}", prompt), &self.pictures(video)?, MAX_TOKENS);
        let ask = || match self.client.ask(request.to_string().as_bytes()) {
            Ok(answer) => Ok(caption(&answer)),
            Err(error) => Err(Error::component(Fault::Failure, error)),
        };
        let is_valid = |caption: &String| !caption.is_empty() && caption.len() <= MAX_CAPTION;
        let (caption, _) = self.cached_or("caption", &request, is_valid, || self.until_valid(ask))?;
        caption.map_err(Error::failed("an invalid answer of the service"))
    }
}

/// The caption in an answer's body, or the reason why the answer is invalid.
fn caption(body: &[u8]) -> Answered<String> {
    let answer: Json = serde_json::from_slice(body).unwrap_or_default();
    let choice = &answer["choices"][0];
    let text = choice["message"]["content"].as_str();
    let printable = text.unwrap_or_default().replace(char::is_control, " ");
    let caption = printable.split_whitespace().collect::<Vec<_>>().join(" ");
    let expected = match choice["finish_reason"].as_str() {
        _ if caption.is_empty() => "a description".into(),
        Some("length") => format!("a description of at most {MAX_TOKENS} tokens"),
        _ if caption.len() > MAX_CAPTION => format!("a description of at most {MAX_CAPTION} bytes"),
        _ => return Ok(caption),
    };
    Err(format!("expected {expected}, found `{}`", excerpt(text.map_or(body, str::as_bytes))))
}
