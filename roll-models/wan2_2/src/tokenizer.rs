//! Converts prompts into token ids with the `tokenizer.json` of the text encoder.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use roll_core::{Error, Result};
use roll_network::hub::Hub;
use roll_network::tokenizer::Tokenizer as Inner;
use serde_json::{Value, json};

use super::text::clean;

/// The tokenizer's file in the format of the `tokenizers` library.
const FILE: &str = "tokenizer.json";
/// The tokenizer's file in SentencePiece's format, which is not supported.
const SPIECE: &str = "spiece.model";
/// Number of characters of a cut prompt that the warning quotes.
const QUOTED_CHARACTERS: usize = 60;
/// Score of a whole word in a synthetic vocabulary. It is above the score of any other pieces of the word.
const WORD_SCORE: f64 = -4.0;
/// The token that ends every sequence.
const END: &str = "</s>";

/// Number of rows of Wan's text embedding, to which a prompt is padded or cut, unless a `config.json` has another
/// number.
pub const PROMPT_TOKENS: usize = 512;

/// Converts prompts into token ids.
pub struct Tokenizer {
    inner: Inner,
    /// Id of [`END`].
    end: u32,
    path: PathBuf,
    /// Whether a cut prompt was logged. Further cut prompts are not logged.
    cut_logged: AtomicBool,
}

impl Tokenizer {
    /// Loads `tokenizer.json`. `path` is that file, a directory with it (directly or in `google/umt5-xxl` or
    /// `tokenizer`), or a model's name (`google/umt5-xxl`). A model is searched for on this machine and downloaded if
    /// it is missing.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        Self::load_with(path.as_ref(), &Hub::from_env())
    }

    /// Loads the tokenizer like [`Tokenizer::load`], with the caches and the remote of `hub`.
    pub fn load_with(path: &Path, hub: &Hub) -> Result<Self> {
        let file = find(path, hub)?;
        let inner = Inner::load(&file)?;
        let end = inner.id(END).ok_or_else(|| {
            let problem = format!("expected a vocabulary with the token {END}, found none: not a T5 tokenizer");
            Error::bad_file(&file, problem)
        })?;
        Ok(Self { inner, end, path: file, cut_logged: AtomicBool::new(false) })
    }

    /// The tokenizer's file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the ids of the cleaned `prompt`, cut to at most `length` ids. The last id is the end of the sequence.
    /// There is no padding.
    ///
    /// Fails if `length` is zero, if the prompt is too long for the tokenizer, or if the tokenizer fails, panics or
    /// takes longer than [`roll_external::tokenizer_json::LIMIT`].
    pub fn encode(&self, prompt: &str, length: usize) -> Result<Vec<u32>> {
        if length == 0 {
            return Err(Error::Misuse("expected a prompt length of at least 1 token, found 0".into()));
        }
        let ids = self.inner.growth().check(prompt).and_then(|()| self.inner.ids(clean(prompt)));
        let mut ids = ids.map_err(|problem| Error::Unsupported(format!("cannot tokenize a prompt: {problem}")))?;
        if ids.len() >= length && !self.cut_logged.swap(true, Ordering::Relaxed) {
            // The ids do not yet contain the end of the sequence.
            let found = ids.len() + 1;
            let beginning: String = prompt.chars().take(QUOTED_CHARACTERS).collect();
            tracing::warn!(
                "a prompt of {found} tokens is cut to {length}, the most that the transformer takes: \
                 \"{beginning}...\"; further prompts are cut without a warning"
            );
        }
        ids.truncate(length - 1);
        ids.push(self.end);
        Ok(ids)
    }

    /// Upper bound of the ids that [`Tokenizer::encode`] returns (exclusive).
    pub fn vocabulary(&self) -> usize {
        self.inner.vocabulary()
    }
}

/// Finds the `tokenizer.json` for `path`. Fails if there is only a `spiece.model`.
fn find(path: &Path, hub: &Hub) -> Result<PathBuf> {
    if path.is_file() {
        let is_spiece = path.file_name().is_some_and(|name| name == SPIECE);
        return if is_spiece { Err(only_spiece(path)) } else { Ok(path.to_path_buf()) };
    }
    if path.is_dir() {
        let inside = |file: &str| {
            let candidates = ["", "google/umt5-xxl", "tokenizer"].map(|folder| path.join(folder).join(file));
            candidates.into_iter().find(|f| f.is_file())
        };
        return inside(FILE).ok_or_else(|| match inside(SPIECE) {
            Some(spiece) => only_spiece(&spiece),
            None => {
                let problem = format!("expected `{FILE}` in the directory {}, found none", path.display());
                Error::config("tokenizer_path", problem)
            }
        });
    }
    let name = path.to_string_lossy();
    let looks_like_a_model = name.split('/').count() == 2 && !name.starts_with(['.', '/']);
    if !looks_like_a_model {
        return Err(Error::config(
            "tokenizer_path",
            format!(
                "expected a directory with `{FILE}`, that file, or a model such as google/umt5-xxl; {name} does not exist"
            ),
        ));
    }
    let directory = hub.directory(&name, &["**/tokenizer.json"], &[])?;
    find(&directory, &Hub::default())
}

/// The error for a tokenizer in SentencePiece's format only.
fn only_spiece(spiece: &Path) -> Error {
    let problem = format!(
        "expected `{FILE}`, found only {}, which is not read: add `{FILE}` beside it; google/umt5-xxl and the official \
         models have both files",
        spiece.display()
    );
    Error::config("tokenizer_path", problem)
}

/// A small, valid `tokenizer.json` of T5's kind (Unigram, `</s>` at the end) for synthetic checkpoints: printable
/// ASCII as characters, some pairs of letters, and every other character as its bytes. Any text encodes to ids below
/// [`tiny_vocabulary`].
pub fn tiny_tokenizer_json() -> String {
    tokenizer_json(&[])
}

/// The file of [`tiny_tokenizer_json`] with a larger vocabulary: each of `words` is a single token if it follows white
/// space.
pub fn tokenizer_json(words: &[&str]) -> String {
    let mut vocabulary = tiny_pieces();
    for word in words {
        let piece = format!("▁{word}");
        if vocabulary.iter().all(|(known, _)| *known != piece) {
            vocabulary.push((piece, WORD_SCORE));
        }
    }
    let special = |id: usize, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    let vocabulary: Vec<Value> = vocabulary.into_iter().map(|(piece, score)| json!([piece, score])).collect();
    let end = json!({"SpecialToken": {"id": END, "type_id": 0}});
    let first = json!({"Sequence": {"id": "A", "type_id": 0}});
    let second = json!({"Sequence": {"id": "B", "type_id": 0}});
    let metaspace = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
    let file = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [special(0, "<pad>"), special(1, END), special(2, "<unk>")],
        "normalizer": null,
        "pre_tokenizer": metaspace,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first, end],
            "pair": [first, end, second, end],
            "special_tokens": {END: {"id": END, "ids": [1], "tokens": [END]}},
        },
        "decoder": metaspace,
        "model": {"type": "Unigram", "unk_id": 2, "byte_fallback": true, "vocab": vocabulary},
    });
    format!("{file:#}\n")
}

/// Number of ids in [`tiny_tokenizer_json`].
pub fn tiny_vocabulary() -> usize {
    tiny_pieces().len()
}

/// The pieces of [`tiny_tokenizer_json`] with their scores, which are log-probabilities. A piece's index is its id. The
/// tokenizer prefers a pair to its two letters, whose scores add up to less, and uses bytes only for other characters.
fn tiny_pieces() -> Vec<(String, f64)> {
    let mut pieces: Vec<(String, f64)> = ["<pad>", END, "<unk>"].map(|s| (s.to_string(), 0.0)).into();
    pieces.extend((0..=255u8).map(|byte| (format!("<0x{byte:02X}>"), -12.0)));
    pieces.push(("▁".into(), -3.0));
    pieces.extend(('!'..='~').map(|c| (c.to_string(), -5.0)));
    let pairs = ["th", "he", "in", "er", "an", "re", "on", "at", "en", "nd", "ing", "▁a", "▁the", "▁of"];
    pieces.extend(pairs.map(|s| (s.to_string(), -6.0)));
    pieces
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn tiny(dir: &Path) -> Tokenizer {
        std::fs::write(dir.join(FILE), tiny_tokenizer_json()).unwrap();
        Tokenizer::load_with(dir, &Hub::default()).unwrap()
    }

    #[test]
    fn any_prompt_encodes_to_ids_below_the_vocabulary() {
        let dir = tempfile::tempdir().unwrap();
        let tokenizer = tiny(dir.path());
        assert_eq!(tokenizer.vocabulary(), tiny_vocabulary());
        for prompt in ["a man talks", "", "你好 🎬 \u{7f} naïve", "<pad> </s>", &"x".repeat(5000)] {
            let ids = tokenizer.encode(prompt, 512).unwrap();
            assert_eq!(ids.last(), Some(&1), "{prompt}");
            assert!(ids.len() <= 512 && ids.iter().all(|&id| (id as usize) < tiny_vocabulary()), "{prompt}");
            assert!(!ids.contains(&2), "{prompt}: {ids:?}");
        }
    }

    #[test]
    fn a_word_of_the_vocabulary_is_one_token() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(FILE), tokenizer_json(&["a", "person", "smiles", "warm"])).unwrap();
        let tokenizer = Tokenizer::load_with(dir.path(), &Hub::default()).unwrap();
        assert_eq!(tokenizer.vocabulary(), tiny_vocabulary() + 3);
        let ids = |p: &str| tokenizer.encode(p, 512).unwrap();
        assert_eq!(ids("a person smiles").len(), 4);
        assert_eq!(ids("a person smiles, warm").len(), 6);
        assert!(ids("a personal smile").len() > 6);
    }

    #[test]
    fn prompts_are_cleaned_and_cut_before_their_end() {
        let dir = tempfile::tempdir().unwrap();
        let tokenizer = tiny(dir.path());
        let ids = |p: &str| tokenizer.encode(p, 512).unwrap();
        assert_eq!(ids("  the   man &amp; dog\n"), ids("the man & dog"));
        assert_ne!(ids("the man"), ids("the dog"));
        let whole = ids("a man talks");
        let cut = tokenizer.encode("a man talks", 4).unwrap();
        assert_eq!((cut.len(), &cut[..3], cut[3]), (4, &whole[..3], 1));
    }

    #[test]
    fn end_token_is_that_of_the_template() {
        let dir = tempfile::tempdir().unwrap();
        let tokenizer = tiny(dir.path());
        let with_template = tokenizers::Tokenizer::from_file(dir.path().join(FILE)).unwrap();
        let with_template = with_template.encode("a man talks", true).unwrap();
        assert_eq!(tokenizer.encode("a man talks", 512).unwrap(), with_template.get_ids());
    }

    #[test]
    fn finds_the_tokenizer_by_file_directory_or_model() {
        let dir = tempfile::tempdir().unwrap();
        let nested = dir.path().join("models/google/umt5-xxl");
        std::fs::create_dir_all(&nested).unwrap();
        tiny(&nested);
        let hub = Hub { caches: vec![], folders: vec![dir.path().join("models")], remote: None };
        for place in [nested.join(FILE), nested, dir.path().join("models"), "google/umt5-xxl".into()] {
            Tokenizer::load_with(&place, &hub).unwrap();
        }
    }

    #[test]
    fn errors_name_the_missing_file() {
        let dir = tempfile::tempdir().unwrap();
        let message = |place: &Path| Tokenizer::load_with(place, &Hub::default()).err().unwrap().to_string();
        assert!(message(dir.path()).contains(FILE));
        assert!(message(Path::new("/nowhere/at/all")).contains("does not exist"));
        assert!(message(Path::new("google/umt5-xxl")).contains("hf download google/umt5-xxl"));
        std::fs::write(dir.path().join(SPIECE), b"x").unwrap();
        for place in [dir.path().to_path_buf(), dir.path().join(SPIECE)] {
            assert!(message(&place).contains("add `tokenizer.json` beside it"), "{}", message(&place));
        }
        std::fs::write(dir.path().join(FILE), b"{\"version\"").unwrap();
        assert!(message(dir.path()).contains(FILE));
    }
}
