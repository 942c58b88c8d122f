//! The error that every trait of this crate returns.
//!
//! Implementations have error enums of their own and convert them with [`Error::component`]. The [`Fault`] that they
//! name decides the exit code of the command line: 2 for a user's mistake, 1 for a failure.

use std::path::PathBuf;

/// Result with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The kind of an error, by who can put it right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The input, the configuration or a file is wrong: the user can fix it.
    User,
    /// Something failed although the user and the caller did everything right.
    Failure,
    /// The user or the system asked to stop.
    Interrupt,
}

/// An error, in terms of the action and of its file, tensor or key.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // the message of a variant names its fields
pub enum Error {
    // Files
    /// A file could not be read or written.
    #[error("cannot {action} {}", path.display())]
    File {
        /// The action, as a verb phrase: "read", "create the directory".
        action: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    /// A file was read, and its contents are wrong.
    #[error("{}: {problem}", path.display())]
    BadFile {
        path: PathBuf,
        /// Expected and found, and a remedy.
        problem: String,
    },

    // Tensors
    /// A tensor has another shape than the operation needs.
    #[error("{what}: expected shape {expected}, found {found:?}")]
    Shape {
        what: String,
        /// The shape that is needed; letters name free axes.
        expected: String,
        found: Vec<usize>,
    },
    /// A tensor has another element type than the operation needs.
    #[error("{what}: expected dtype {expected}, found {found}")]
    DType { what: String, expected: String, found: String },
    /// A value that must be finite is not.
    #[error("{what} is not finite ({value})")]
    NonFinite { what: String, value: f64 },

    // Configuration
    /// A configuration value is wrong.
    #[error("{}: {problem}", place(.key))]
    Config {
        /// Dotted path of the key, or an argument of the program with its dashes.
        key: String,
        problem: String,
    },
    /// Several errors that do not depend on one another, one on each line.
    #[error("{}", .0.iter().map(Error::chain).collect::<Vec<_>>().join("\n"))]
    Several(Vec<Error>),
    /// No such name is registered.
    #[error("no {kind} is called `{name}`{}; known: {known}", suggestion(.nearest))]
    UnknownName {
        /// Kind of the thing: "model", "reward", ...
        kind: &'static str,
        name: String,
        nearest: Option<String>,
        known: String,
    },
    /// The user asked for something this build or component cannot do.
    #[error("{0}")]
    Unsupported(String),

    // Samples
    /// The reference of a reward holds nothing to compare with (no face in it). The fault lies in one sample and not in
    /// the run. The reward's [`crate::OnMissing`] chooses the reaction.
    #[error("{reason}")]
    NothingToScore {
        /// The object that was not found, the place, and a remedy.
        reason: String,
    },

    // Runs
    /// The run was asked to stop.
    #[error("interrupted")]
    Interrupted,
    /// The caller broke a rule of an interface.
    #[error("{0}")]
    Misuse(String),
    /// Something failed although the user and the caller did everything right: a value could not be written as JSON, a
    /// thread panicked.
    #[error("{doing}")]
    Failed {
        /// The failed action: "the manifest cannot be written as JSON".
        doing: String,
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// An error of a component's own kind.
    #[error("{source}")]
    Component { fault: Fault, source: Box<dyn std::error::Error + Send + Sync> },
    /// An action, and the error that ended it.
    #[error("{doing}")]
    Context {
        /// The action: "reading row 3 of metadata.csv".
        doing: String,
        source: Box<Error>,
    },
}

impl Error {
    /// Wraps a component's own error.
    pub fn component(fault: Fault, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self::Component { fault, source: Box::new(source) }
    }

    /// A file error; use as `map_err(Error::file("read", path))`.
    pub fn file(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { action, path, source }
    }

    /// A failure of the program or its machine; use as `map_err(Error::failed("the manifest cannot be written"))`.
    pub fn failed<E: Into<Box<dyn std::error::Error + Send + Sync>>>(
        doing: impl Into<String>,
    ) -> impl FnOnce(E) -> Self {
        let doing = doing.into();
        move |source| Self::Failed { doing, source: source.into() }
    }

    /// A file with wrong contents.
    pub fn bad_file(path: impl Into<PathBuf>, problem: impl Into<String>) -> Self {
        Self::BadFile { path: path.into(), problem: problem.into() }
    }

    /// A wrong configuration value.
    pub fn config(key: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Config { key: key.into(), problem: problem.into() }
    }

    /// A single error as it is; several as one [`Error::Several`].
    pub fn several(mut errors: Vec<Error>) -> Self {
        match errors.pop() {
            Some(only) if errors.is_empty() => only,
            last => Self::Several(errors.into_iter().chain(last).collect()),
        }
    }

    /// A reference without anything to compare with.
    pub fn nothing_to_score(reason: impl Into<String>) -> Self {
        Self::NothingToScore { reason: reason.into() }
    }

    /// The reason of an [`Error::NothingToScore`], also inside [`Error::Context`]; `None` for every other error.
    pub fn missing_reason(&self) -> Option<&str> {
        match self {
            Self::NothingToScore { reason } => Some(reason),
            Self::Context { source, .. } => source.missing_reason(),
            _ => None,
        }
    }

    /// A tensor of the wrong shape.
    pub fn shape(what: impl Into<String>, expected: impl Into<String>, found: &[usize]) -> Self {
        Self::Shape { what: what.into(), expected: expected.into(), found: found.to_vec() }
    }

    /// Puts `section` before the key of a [`Error::Config`], also inside [`Error::Context`]: `shift` becomes
    /// `algo.shift`. Code that is shared by several sections names its keys alone; the caller that parsed the options
    /// adds the section. A key that has it already, and every other error, stays as it is.
    #[must_use]
    pub fn in_section(self, section: &str) -> Self {
        match self {
            Self::Config { key, problem } if key.split('.').next() != Some(section) => {
                Self::Config { key: format!("{section}.{key}"), problem }
            }
            Self::Context { doing, source } => Self::Context { doing, source: Box::new(source.in_section(section)) },
            other => other,
        }
    }

    /// The messages of this error and of its causes, each once.
    pub fn messages(&self) -> Vec<String> {
        messages(self)
    }

    /// The [`Error::messages`] in one line, separated by colons.
    pub fn chain(&self) -> String {
        one_line(self)
    }

    /// Who can put this error right.
    pub fn fault(&self) -> Fault {
        match self {
            // The user can give another path or permission; a full disk or a failing device is a failure.
            Self::File { source, .. } => match source.kind() {
                std::io::ErrorKind::NotFound
                | std::io::ErrorKind::PermissionDenied
                | std::io::ErrorKind::AlreadyExists
                | std::io::ErrorKind::NotADirectory
                | std::io::ErrorKind::IsADirectory
                | std::io::ErrorKind::InvalidData
                | std::io::ErrorKind::UnexpectedEof
                | std::io::ErrorKind::InvalidInput => Fault::User,
                _ => Fault::Failure,
            },
            Self::BadFile { .. }
            | Self::Config { .. }
            | Self::Several(_)
            | Self::UnknownName { .. }
            | Self::Unsupported(_)
            | Self::NothingToScore { .. }
            | Self::Shape { .. }
            | Self::DType { .. } => Fault::User,
            Self::NonFinite { .. } | Self::Misuse(_) | Self::Failed { .. } => Fault::Failure,
            Self::Interrupted => Fault::Interrupt,
            Self::Component { fault, .. } => *fault,
            Self::Context { source, .. } => source.fault(),
        }
    }
}

/// Adds to an error the action that failed, or the section of the configuration.
pub trait ResultExt<T> {
    /// Wraps an error with `doing()`, evaluated only on error.
    fn while_doing(self, doing: impl FnOnce() -> String) -> Result<T>;

    /// [`Error::in_section`] of an error.
    fn in_section(self, section: &str) -> Result<T>;
}

impl<T> ResultExt<T> for Result<T> {
    fn while_doing(self, doing: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|source| Error::Context { doing: doing(), source: Box::new(source) })
    }

    fn in_section(self, section: &str) -> Result<T> {
        self.map_err(|e| e.in_section(section))
    }
}

/// The messages of `error` and its causes, outermost first; a cause that only repeats the message above it is left out.
pub fn messages(error: &dyn std::error::Error) -> Vec<String> {
    let mut messages = vec![error.to_string()];
    let mut cause = error.source();
    while let Some(error) = cause {
        let message = error.to_string();
        if messages.last() != Some(&message) {
            messages.push(message);
        }
        cause = error.source();
    }
    messages
}

/// The [`messages`] of `error` in one line, separated by colons.
pub fn one_line(error: &dyn std::error::Error) -> String {
    messages(error).join(": ")
}

/// The known name nearest to `name`, by the edits that turn one into the other. `None` if it takes more than one edit,
/// plus one for each four letters of the longer name.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let with_distance = |known_name: &'a str| {
        let distance = strsim::damerau_levenshtein(&name.to_lowercase(), &known_name.to_lowercase());
        (distance, known_name)
    };
    let is_near = |(distance, known_name): &(usize, &str)| *distance <= 1 + known_name.len().max(name.len()) / 4;
    let near = known.into_iter().map(with_distance).filter(is_near);
    near.min_by_key(|(distance, _)| *distance).map(|(_, known_name)| known_name)
}

/// The text, cut after `max_chars` characters.
pub(crate) fn shortened(text: String, max_chars: usize) -> String {
    match text.char_indices().nth(max_chars) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

/// The place of a wrong value: an argument of the program (`--size`), or a key of the configuration.
fn place(key: &str) -> String {
    if key.starts_with("--") { key.into() } else { format!("configuration key `{key}`") }
}

fn suggestion(nearest: &Option<String>) -> String {
    nearest.as_ref().map(|n| format!(" (did you mean `{n}`?)")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(error: &Error) -> &str {
        match error {
            Error::Config { key, .. } => key,
            Error::Context { source, .. } => key(source),
            other => panic!("expected an error of the configuration, found {other}"),
        }
    }

    #[test]
    fn in_section_adds_the_section_once_and_inside_contexts() {
        let shift = || Error::config("shift", "must be positive");
        assert_eq!(key(&shift().in_section("algo")), "algo.shift");
        assert_eq!(key(&shift().in_section("algo").in_section("algo")), "algo.shift");
        assert_eq!(key(&Error::config("algorithm", "unknown").in_section("algo")), "algo.algorithm");
        let inside = Err::<(), _>(shift()).while_doing(|| "planning".into()).in_section("algo").err();
        assert_eq!(inside.as_ref().map(key), Some("algo.shift"));
        assert_eq!(inside.map(|e| e.to_string()), Some("planning".into()));
    }

    #[test]
    fn missing_reason_looks_inside_contexts() {
        let missing = || Error::nothing_to_score("no face in the picture");
        assert_eq!(missing().missing_reason(), Some("no face in the picture"));
        let inside = Err::<(), _>(missing()).while_doing(|| "preparing a reward".into()).err();
        assert_eq!(inside.as_ref().and_then(Error::missing_reason), Some("no face in the picture"));
        assert_eq!(inside.map(|e| e.fault()), Some(Fault::User));
        assert_eq!(Error::Interrupted.missing_reason(), None);
    }

    #[test]
    fn in_section_leaves_other_errors_unchanged() {
        let message = "cannot do that";
        assert_eq!(Error::Unsupported(message.into()).in_section("algo").to_string(), message);
    }
}
