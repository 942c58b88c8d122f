//! The files of votes: clips, questions and answers in the directory `votes` of a run.
//!
//! ```text
//! <run>/votes/clips/<id>.mp4          a video; the id is a hash of its pixels
//!             questions/<id>.json     prompt, question and clips; the id is a hash of these
//!             answers/<id>.json       the number of the chosen clip as shown, from 1; 0 for "equal"
//! ```
//!
//! A run directory may come from other people: ids are checked before they are parts of paths, and links are not
//! followed.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use roll_core::{Error, Result, Video};
use roll_external::Fingerprint;
use roll_external::files::{read, refuse_links, write_atomically};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Greatest number of clips of a question: one for each digit on a keyboard.
pub const MAX_CLIPS: usize = 9;
/// Greatest size of a file of a question or an answer in bytes.
const MAX_JSON: u64 = 1 << 20;

/// Number of hexadecimal digits of an id.
const ID_DIGITS: usize = 64;

/// A question about clips.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Question {
    /// The prompt of the clips.
    pub prompt: String,
    /// The text of the question.
    pub question: String,
    /// The ids of the clips. [`Question::order`] is the order in which they are shown.
    pub clips: Vec<String>,
    /// The id of the reference picture, a clip of one frame.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<String>,
}

impl Question {
    /// A hash of the contents.
    pub fn id(&self) -> String {
        let mut hash = Fingerprint::new("question").text("prompt", &self.prompt).text("question", &self.question);
        for clip in &self.clips {
            hash = hash.text("clip", clip);
        }
        if let Some(reference) = &self.reference {
            hash = hash.text("reference", reference);
        }
        hash.finish()
    }

    /// The positions of the clips in the order in which they are shown. The order follows from the id and is as good as
    /// random, so that a clip is shown on the left as often as on the right.
    pub fn order(&self) -> Vec<usize> {
        let id = self.id();
        let mut order: Vec<usize> = (0..self.clips.len()).collect();
        order.sort_by_key(|i| Fingerprint::new("order").text("question", &id).text("clip", i).finish());
        order
    }
}

/// The answer to a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Nobody has voted yet.
    Open,
    /// The file is not an answer, for this reason. The question counts as open.
    Invalid(String),
    /// No clip is better than the others.
    Equal,
    /// The position of the chosen clip.
    Clip(usize),
}

impl Answer {
    /// Whether somebody has voted.
    pub fn is_given(&self) -> bool {
        matches!(self, Self::Equal | Self::Clip(_))
    }
}

/// The votes of the run in this directory. There may be no votes yet.
pub struct Votes(pub PathBuf);

impl Votes {
    /// Writes a clip and returns its id. Writes it even if the file exists, because the file of a run that was killed
    /// may be cut.
    pub fn keep_clip(&self, video: &Video) -> Result<String> {
        let id = Fingerprint::new("clip").text("fps", video.fps()).tensor("frames", video.frames()).finish();
        let path = self.clip(&id)?;
        create_parent(&path)?;
        roll_media::write_mp4(&path, video)?;
        Ok(id)
    }

    /// Writes a question and returns its id. Leaves the file alone if it exists and can be read.
    pub fn ask(&self, question: &Question) -> Result<String> {
        let id = question.id();
        let path = self.path("questions", &id, "json")?;
        if self.question(&id).is_err() {
            write(&path, question)?;
        }
        Ok(id)
    }

    /// The question with this id. Fails if the file is not a question as a run writes it.
    pub fn question(&self, id: &str) -> Result<Question> {
        let path = self.path("questions", id, "json")?;
        let question: Question = parse(&path)?;
        let is_valid = (2..=MAX_CLIPS).contains(&question.clips.len())
            && question.clips.iter().chain(&question.reference).all(|clip| is_id(clip));
        if !is_valid || question.id() != id {
            return Err(Error::bad_file(path, "is not a question that a run asked; delete it"));
        }
        Ok(question)
    }

    /// The path of a clip.
    pub fn clip(&self, id: &str) -> Result<PathBuf> {
        self.path("clips", id, "mp4")
    }

    /// The answer to a question. Fails if the question cannot be read.
    pub fn answer(&self, id: &str) -> Result<Answer> {
        let order = self.question(id)?.order();
        Ok(match self.choice(id, order.len()) {
            Ok(None) => Answer::Open,
            Ok(Some(0)) => Answer::Equal,
            Ok(Some(number)) => Answer::Clip(order[number - 1]),
            Err(problem) => Answer::Invalid(problem.chain()),
        })
    }

    /// The number in the file of an answer: that of a clip as shown, from 1 to `clips`, or 0 for "equal". `None`
    /// without a file.
    fn choice(&self, id: &str, clips: usize) -> Result<Option<usize>> {
        let path = self.path("answers", id, "json")?;
        if !path.exists() {
            return Ok(None);
        }
        let choice: usize = parse(&path)?;
        if choice > clips {
            return Err(Error::bad_file(path, format!("expected a number from 0 to {clips}, found {choice}")));
        }
        Ok(Some(choice))
    }

    /// Stores the answer to a question: the number of a clip as shown, from 1, or 0 for "equal". Replaces an invalid
    /// answer. Fails if there is no clip with this number. Returns false if the question has a valid answer already.
    pub fn vote(&self, id: &str, choice: usize) -> Result<bool> {
        let clips = self.question(id)?.clips.len();
        if choice > clips {
            return Err(Error::Unsupported(format!("expected a choice from 0 to {clips}, found {choice}")));
        }
        if self.answer(id)?.is_given() {
            return Ok(false);
        }
        // The file itself may be a link. It is not followed, because the new file replaces it.
        let path = self.0.join("votes/answers").join(format!("{id}.json"));
        refuse_links(&self.0, path.parent().unwrap_or(&self.0))?;
        write(&path, &choice).map(|()| true)
    }

    /// All questions, the oldest first: the time of the question, its id, and whether somebody has voted.
    pub fn questions(&self) -> Result<Vec<(SystemTime, String, bool)>> {
        let mut questions = Vec::new();
        for entry in std::fs::read_dir(self.0.join("votes/questions")).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let Some(id) = name.strip_suffix(".json").filter(|id| is_id(id)) else { continue };
            let time = entry.metadata().and_then(|metadata| metadata.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
            // A question that cannot be read counts as open. The run that asks it writes it anew.
            questions.push((time, id.into(), self.answer(id).is_ok_and(|answer| answer.is_given())));
        }
        questions.sort();
        Ok(questions)
    }

    /// The path of a file. Fails if `id` is not a hash, or if a part of the path is a link.
    fn path(&self, folder: &str, id: &str, extension: &str) -> Result<PathBuf> {
        if !is_id(id) {
            return Err(Error::Unsupported(format!("expected an id of {ID_DIGITS} hexadecimal digits")));
        }
        let path = self.0.join("votes").join(folder).join(format!("{id}.{extension}"));
        refuse_links(&self.0, &path)?;
        Ok(path)
    }
}

/// Whether a text is a hash in lower-case hexadecimal.
fn is_id(text: &str) -> bool {
    text.len() == ID_DIGITS && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Reads a JSON file of a question or an answer.
fn parse<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let bytes = read(path, MAX_JSON).map_err(Error::file("read", path))?;
    serde_json::from_slice(&bytes).map_err(|error| Error::bad_file(path, error.to_string()))
}

/// Writes a JSON file of a question or an answer.
fn write(path: &Path, value: &impl Serialize) -> Result<()> {
    create_parent(path)?;
    write_atomically(path, &serde_json::to_vec(value).map_err(Error::failed("writing a vote"))?)
}

fn create_parent(path: &Path) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).map_err(Error::file("create the directory", folder))
}
