//! Questions with known answers: the rows of a data set, or sums that are made here. An episode is one question; the
//! agent's answer ends it.
//!
//! The episodes of group `number` get row `number % n` of the n rows of their split, in the order of the file. Held-out
//! rows are those of `validation_path`, or those whose text has a hash below `validation_share`: a question that occurs
//! twice is on one side, and stays there if rows are added.

mod bank;
mod check;
mod notes;
mod options;
mod rows;
mod sums;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use roll_core::{BuildContext, Environment, Error, Observation, Result, Split, Transition};

use bank::Bank;
pub use check::CheckKind;
use check::Verdict;
pub use options::{QuestionsOptions, Source};

use crate::pictures;

const NAME: &str = "questions";

/// The environment.
pub struct Questions {
    bank: Arc<Bank>,
    split: Split,
    /// Number of the group of the current episode.
    number: u64,
    /// Whether the current episode waits for an answer.
    is_asked: bool,
    /// The judgement of the latest answer.
    verdict: Verdict,
}

impl Questions {
    /// Creates the environment. Fails on wrong options, and on files with wrong rows. Environments with the same options
    /// share their rows and the processes of `command`.
    pub fn new(mut options: QuestionsOptions, context: &BuildContext) -> Result<Self> {
        options.check()?;
        for path in [&mut options.path, &mut options.validation_path].into_iter().flatten() {
            *path = context.resolve(path.clone());
        }
        let bank = Bank::shared(options, context)?;
        Ok(Self { bank, split: Split::Train, number: 0, is_asked: false, verdict: Verdict::default() })
    }
}

/// Number of questions that a run with these options validates on.
pub fn count_validated(options: QuestionsOptions, context: &BuildContext) -> Result<usize> {
    Ok(Questions::new(options, context)?.bank.validated())
}

impl Environment for Questions {
    fn enter(&mut self, split: Split, number: u64) -> Result<()> {
        (self.split, self.number) = (split, number);
        Ok(())
    }

    fn reset(&mut self, _seed: u64) -> Result<Observation> {
        (self.is_asked, self.verdict) = (true, Verdict::default());
        let question = self.bank.begin(self.split, self.number)?;
        let pictures = question.row.images.iter().map(|image| pictures::read(image)).collect::<Result<Vec<_>>>()?;
        Ok(Observation::with_pictures(question.row.question.clone(), pictures))
    }

    fn step(&mut self, action: &str) -> Result<Transition> {
        if !std::mem::take(&mut self.is_asked) {
            return Err(Error::Misuse("an answer without a question".into()));
        }
        self.verdict = self.bank.judge(self.split, self.number, action)?;
        let Verdict { reward, valid, .. } = self.verdict;
        Ok(Transition { observation: Observation::default(), reward, terminated: true, truncated: false, valid })
    }

    fn instructions(&self) -> String {
        self.bank.question(self.split, self.number).map(|question| question.row.system.clone()).unwrap_or_default()
    }

    fn solved(&self) -> Option<bool> {
        Some(self.verdict.solved)
    }

    fn action(&self) -> String {
        self.verdict.found.clone()
    }
}

roll_core::register! {
    Environment, NAME, QuestionsOptions,
    "Questions with known answers: rows of a data set, or sums that are made here",
    Questions::new,
}
