//! The findings while a run is opened. A run ends at the first problem; `roll check` lists all of them at once.

use roll_core::{Error, Result};

/// A finding while the parts of a run are opened, or when a check looks closer at them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// A fact that is as it should be.
    Good(String),
    /// A fact that the user should know, and that does not stop the run.
    Note(String),
    /// A problem that stops the run: the messages of an error and its causes.
    Problem(String),
}

/// Receives the findings while a run is opened, each with the section of the configuration that it is about.
pub enum Findings {
    /// A check: all findings are listed, and everything is opened that can be.
    Listed(Vec<(&'static str, Finding)>),
    /// A run: notes are logged by the first rank. After the first problem nothing more is opened.
    Logged {
        /// Whether notes are logged here.
        is_first_rank: bool,
        /// The first problem.
        problem: Option<Error>,
    },
}

impl Findings {
    /// Findings of a check.
    pub(crate) fn listed() -> Self {
        Self::Listed(Vec::new())
    }

    /// Findings of a run.
    pub(crate) fn logged(is_first_rank: bool) -> Self {
        Self::Logged { is_first_rank, problem: None }
    }

    /// Opens a part by calling `open`. Returns `None` if the part has a problem, which becomes a finding, or if nothing
    /// more is opened after an earlier problem.
    pub fn open<T>(&mut self, section: &'static str, open: impl FnOnce() -> Result<T>) -> Option<T> {
        if self.is_over() {
            return None;
        }
        match (open(), self) {
            (Ok(part), _) => Some(part),
            (Err(error), Self::Listed(found)) => {
                found.push((section, Finding::Problem(error.chain())));
                None
            }
            (Err(error), Self::Logged { problem, .. }) => {
                *problem = Some(error);
                None
            }
        }
    }

    /// Reports a problem that was found without opening a part.
    pub fn problem(&mut self, section: &'static str, error: Error) {
        self.open::<()>(section, || Err(error));
    }

    /// Adds notes.
    pub fn note<N: IntoIterator<Item = String>>(&mut self, section: &'static str, notes: impl FnOnce() -> N) {
        if self.is_over() {
            return;
        }
        let notes = notes().into_iter();
        match self {
            Self::Listed(found) => found.extend(notes.map(|note| (section, Finding::Note(note)))),
            Self::Logged { is_first_rank: true, .. } => notes.for_each(|note| tracing::warn!("{note}")),
            Self::Logged { is_first_rank: false, .. } => {}
        }
    }

    /// The findings of a check; none for a run. Fails with the problem of a run.
    pub(crate) fn end(self) -> Result<Vec<(&'static str, Finding)>> {
        match self {
            Self::Listed(found) => Ok(found),
            Self::Logged { problem: None, .. } => Ok(Vec::new()),
            Self::Logged { problem: Some(problem), .. } => Err(problem),
        }
    }

    /// Whether nothing more is opened.
    fn is_over(&self) -> bool {
        matches!(self, Self::Logged { problem: Some(_), .. })
    }
}

/// The findings of a check in parts that are open, section by section.
#[derive(Debug, Default)]
pub struct Listing {
    /// The section of the findings that are added next.
    section: &'static str,
    /// The findings so far, each with its section.
    pub(crate) found: Vec<(&'static str, Finding)>,
}

impl Listing {
    /// Sets the section of the configuration that the findings added next are about.
    pub fn section(&mut self, name: &'static str) {
        self.section = name;
    }

    /// Adds a fact that is as it should be.
    pub fn good(&mut self, text: impl Into<String>) {
        self.found.push((self.section, Finding::Good(text.into())));
    }

    /// Adds a fact that does not stop the run.
    pub fn note(&mut self, text: impl Into<String>) {
        self.found.push((self.section, Finding::Note(text.into())));
    }

    /// Adds a fact that would stop the run.
    pub fn problem(&mut self, text: impl Into<String>) {
        self.found.push((self.section, Finding::Problem(text.into())));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn open(found: &mut Findings) -> Vec<&'static str> {
        let mut opened = Vec::new();
        let data = found.open("data", || {
            opened.push("data");
            Err::<u64, _>(Error::Misuse("no data".into()))
        });
        let reward = found.open("reward", || {
            opened.push("reward");
            Ok(1)
        });
        let both = data.zip(reward).and_then(|(data, reward)| {
            found.open("algo", || {
                opened.push("algo");
                Ok(data + reward)
            })
        });
        assert_eq!(both, None);
        found.note("model", || ["slow".to_string()]);
        let _ = found.open("model", || {
            opened.push("model");
            Err::<(), _>(Error::Misuse("no model".into()))
        });
        opened
    }

    #[test]
    fn a_check_opens_all_that_can_be_opened_and_lists_everything() {
        let mut found = Findings::listed();
        assert_eq!(open(&mut found), ["data", "reward", "model"]);
        let listed = found.end().unwrap().into_iter().map(|(section, finding)| match finding {
            Finding::Good(text) | Finding::Note(text) => format!("{section}: {text}"),
            Finding::Problem(text) => format!("{section}! {text}"),
        });
        let listed: Vec<String> = listed.collect();
        assert_eq!(listed.len(), 3);
        assert!(listed[0].starts_with("data! ") && listed[0].contains("no data"), "{listed:?}");
        assert!(listed[1] == "model: slow" && listed[2].contains("no model"), "{listed:?}");
    }

    #[test]
    fn a_run_opens_nothing_after_its_first_problem() {
        let mut found = Findings::logged(true);
        assert_eq!(open(&mut found), ["data"]);
        assert!(found.end().unwrap_err().to_string().contains("no data"));
    }
}
