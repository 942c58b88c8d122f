//! The text around a prompt, from a file of the user. The published texts are not part of this repository.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use roll_core::{BuildContext, Error, Result, ResultExt};
use roll_external::{files, sha256};

/// Key of the option that names the file.
const KEY: &str = "reward.prompt_file";
/// Longest file in bytes.
const MAX_BYTES: u64 = 1 << 20;
/// Places of the prompt: in the published files, and shorter.
const PLACEHOLDERS: [&str; 2] = ["{text_prompt}", "{prompt}"];

/// Where the published text is.
pub struct Published {
    /// Its file in the original's repository.
    pub file: &'static str,
    /// Names of the constants in the Python file whose texts, joined, are the published text.
    pub constants: &'static [&'static str],
    /// The first digits of the text's SHA-256.
    pub sha256: &'static str,
}

/// A text with a place for the prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptText(String);

impl PromptText {
    /// Reads the text of `file`: all of a text file, or the constants of the original's Python file. Logs a warning, once
    /// for a file, unless it is the published text, on which the head was trained. Fails if the file is missing or cannot
    /// be read.
    pub fn read(file: &str, published: &Published, context: &BuildContext) -> Result<Self> {
        if file.is_empty() {
            let problem = format!("missing: the text of the question, published as {}", published.file);
            return Err(Error::config(KEY, problem));
        }
        let path = context.resolve(file);
        let text = files::read_text(&path, MAX_BYTES).map_err(Error::file("read the text of the question in", &path));
        let mut text = text.while_doing(|| KEY.into())?;
        if path.extension().is_some_and(|extension| extension == "py") {
            let constants = published.constants.iter().map(|name| python_constant(&text, name));
            text = constants.collect::<std::result::Result<String, String>>().map_err(|e| Error::config(KEY, e))?;
        }
        let (digest, _) = sha256(text.as_bytes()).map_err(Error::file("hash", &path))?;
        if !digest.starts_with(published.sha256) && is_new(&path) {
            tracing::warn!(
                "{} is not the published text ({}, SHA-256 {}...; found {digest}): scores differ from the original's \
                 unless the weights were trained with it (`{KEY}`)",
                path.display(),
                published.file,
                published.sha256
            );
        }
        Ok(Self(text))
    }

    /// Fails unless the text has each of `tokens` once, in their order, and a place for the prompt: before the last
    /// token if `prompt_is_read`, and otherwise behind all of them if there is one. The text is read up to the last
    /// token, so that a prompt behind it would have no effect.
    pub fn check(&self, tokens: &[&str], prompt_is_read: bool) -> Result<()> {
        if prompt_is_read && self.placeholder().is_none() {
            let problem = format!("expected the place of the prompt, `{}`; found none", PLACEHOLDERS.join("` or `"));
            return Err(Error::config(KEY, problem));
        }
        let mut last = 0;
        for token in tokens {
            let places: Vec<usize> = self.0.match_indices(token).map(|(at, _)| at).collect();
            match places[..] {
                [at] if at >= last => last = at,
                [_] => return Err(Error::config(KEY, format!("expected {} in this order", tokens.join(", ")))),
                _ => {
                    let problem = format!("expected `{token}` once, found it {} times", places.len());
                    return Err(Error::config(KEY, problem));
                }
            }
        }
        let place = self.placeholder().and_then(|placeholder| self.0.find(placeholder));
        match place {
            Some(place) if prompt_is_read && place > last => {
                let problem = format!("expected the place of the prompt before the last of {}", tokens.join(", "));
                Err(Error::config(KEY, problem))
            }
            Some(place) if !prompt_is_read && place < last => {
                let problem =
                    format!("expected the place of the prompt behind {}: they depend on it", tokens.join(", "));
                Err(Error::config(KEY, problem))
            }
            _ => Ok(()),
        }
    }

    /// The placeholder of the prompt, if the text has one.
    fn placeholder(&self) -> Option<&'static str> {
        PLACEHOLDERS.into_iter().find(|placeholder| self.0.contains(placeholder))
    }

    /// The text with the prompt in its place.
    pub fn with(&self, prompt: &str) -> String {
        self.placeholder().map_or_else(|| self.0.clone(), |place| self.0.replace(place, prompt))
    }
}

/// Whether this is the first call with `path`. A check opens a reward and plans it, and both read the text.
fn is_new(path: &Path) -> bool {
    static WARNED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
    WARNED.lock().unwrap_or_else(PoisonError::into_inner).insert(path.into())
}

/// The text of the constant `name` in a Python file: `name = """text"""`.
fn python_constant(file: &str, name: &str) -> std::result::Result<String, String> {
    let missing = || format!("expected the constant `{name} = \"\"\"...\"\"\"` in the Python file, found none");
    let opening = format!("\n{name} = \"\"\"");
    let (_, rest) = file.split_once(&opening).or_else(|| file.split_once(&opening[1..])).ok_or_else(missing)?;
    match rest.split_once("\"\"\"").ok_or_else(missing)?.0 {
        text if text.contains('\\') => Err(format!("`{name}` has an escape: write the text to a file without code")),
        text => Ok(text.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: Published = Published { file: "own.py", constants: &["A", "B"], sha256: "00" };

    fn read(name: &str, text: &str) -> Result<PromptText> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        PromptText::read(path.to_str().unwrap(), &OWN, &BuildContext::new("flex"))
    }

    #[test]
    fn a_text_is_taken_with_its_first_and_last_newline() {
        let text = read("text.txt", "\nIs it {text_prompt}? {prompt} <|A|>\n").unwrap();
        assert_eq!(text.with("a {prompt}"), "\nIs it a {prompt}? {prompt} <|A|>\n");
    }

    #[test]
    fn constants_of_a_python_file_are_joined() {
        let text = read("own.py", "A = \"\"\"\nOne.\n\"\"\"\nAB = 3\nB = \"\"\"Two.\n\"\"\"\n").unwrap();
        assert_eq!(text.with(""), "\nOne.\nTwo.\n");
        for (file, expected) in [("A = \"\"\"x\"\"\"\n", "`B"), ("A = \"\"\"a\\n\"\"\"", "escape")] {
            let message = read("own.py", file).unwrap_err().to_string();
            assert!(message.contains("reward.prompt_file") && message.contains(expected), "{message}");
        }
    }

    #[test]
    fn tokens_and_the_place_of_the_prompt_are_checked() {
        let text = PromptText("<|A|> <|B|> <|B|>".into());
        for (tokens, prompt_is_read, expected) in [
            (&["<|A|>"][..], true, "{text_prompt}"),
            (&["<|A|>", "<|B|>"], false, "`<|B|>` once, found it 2 times"),
            (&["<|C|>"], false, "found it 0 times"),
        ] {
            let message = text.check(tokens, prompt_is_read).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
        for (text, prompt_is_read, expected) in
            [("<|A|> {prompt}", true, "before the last"), ("{prompt} <|A|>", false, "behind <|A|>")]
        {
            let message = PromptText(text.into()).check(&["<|A|>"], prompt_is_read).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
        assert!(PromptText("<|B|> <|A|>".into()).check(&["<|A|>", "<|B|>"], false).is_err());
    }
}
