//! The questions of a run: both splits, and the check of answers. All environments of a run share them.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use roll_core::{BuildContext, Error, Result, Split, check_seconds};
use serde_json::json;

use super::check::{Check, CheckKind, Judges, Reference, Verdict};
use super::options::{QuestionsOptions, Source};
use super::rows::{self, Row};
use super::sums;
use crate::environments::is_held_out;
use crate::environments::protocol::warn_once;

/// A question of one split.
pub struct Question {
    pub row: Row,
    reference: Reference,
}

/// The questions of both splits.
pub struct Bank {
    train: Vec<Question>,
    validation: Vec<Question>,
    check: Check,
    /// The latest epoch of training.
    epoch: AtomicU64,
}

/// What a bank is made of: options with whole paths, and the directory in which `command` runs.
type Key = (QuestionsOptions, PathBuf);

/// The banks that environments use.
static BANKS: Mutex<Vec<(Key, Weak<Bank>)>> = Mutex::new(Vec::new());

impl Bank {
    /// The bank of these options: that of other environments if there are any, because every episode has an environment
    /// of its own.
    pub fn shared(options: QuestionsOptions, context: &BuildContext) -> Result<Arc<Self>> {
        let key = (options, context.base_dir.clone());
        let mut banks = BANKS.lock().unwrap_or_else(PoisonError::into_inner);
        banks.retain(|(_, bank)| bank.strong_count() > 0);
        if let Some(bank) = banks.iter().find(|(other, _)| *other == key).and_then(|(_, bank)| bank.upgrade()) {
            return Ok(bank);
        }
        let bank = Arc::new(Self::new(&key.0, context)?);
        banks.push((key, Arc::downgrade(&bank)));
        Ok(bank)
    }

    fn new(options: &QuestionsOptions, context: &BuildContext) -> Result<Self> {
        let check = match options.check {
            CheckKind::Number => Check::Number,
            CheckKind::Boxed => Check::Boxed,
            CheckKind::Choice => Check::Choice,
            CheckKind::Regex => Check::regex(options.pattern.as_deref())?,
            CheckKind::Json => Check::Json,
            CheckKind::Command => {
                let timeout = check_seconds("env.timeout", options.timeout)?;
                Check::Command(Judges::new(options.command.clone(), context.base_dir.clone(), timeout, options.workers))
            }
        };
        let (mut train, validation) = match options.source {
            Source::File => rows::read(options)?,
            Source::Sums => (sums::rows(options.digits, options.operands), None),
        };
        let validation = match validation {
            Some(validation) => {
                let removed = rows::remove_validated(&mut train, &validation);
                if removed > 0 {
                    tracing::warn!("{removed} questions are not trained on, because they are validated on");
                }
                validation
            }
            None => {
                let (validation, trained): (Vec<Row>, Vec<Row>) =
                    train.into_iter().partition(|row| is_held_out(&row.split_key, options.validation_share));
                train = trained;
                if validation.is_empty() && options.validation_share > 0.0 {
                    let problem = format!(
                        "none of {} questions is held out by a share of {}: raise it, name `env.validation_path`, or set 0 \
                         to train on all",
                        train.len(),
                        options.validation_share
                    );
                    return Err(Error::config("env.validation_share", problem));
                }
                validation
            }
        };
        let can_train = options.source == Source::Sums || options.path.is_some();
        if train.is_empty() && can_train {
            return Err(Error::config("env.path", "no question is left to train on: all are validated on"));
        }
        tracing::info!("{} questions to train on, {} to validate on", train.len(), validation.len());
        let questions = |rows: Vec<Row>| -> Result<Vec<Question>> {
            let question = |row: Row| match check.reference(&row.answer) {
                Ok(reference) => Ok(Question { row, reference }),
                Err(problem) => Err(Error::Unsupported(format!("{}: the answer: {problem}", row.origin))),
            };
            rows.into_iter().map(question).collect()
        };
        let (train, validation) = (questions(train)?, questions(validation)?);
        Ok(Self { train, validation, check, epoch: AtomicU64::new(0) })
    }

    /// The question of group `number`; `None` if the split has no questions.
    pub fn question(&self, split: Split, number: u64) -> Option<&Question> {
        let questions = self.of(split);
        questions.get((number % questions.len().max(1) as u64) as usize)
    }

    /// As [`Bank::question`], for an episode that begins. Logs the beginning of an epoch.
    pub fn begin(&self, split: Split, number: u64) -> Result<&Question> {
        let questions = self.of(split).len() as u64;
        let question = self.question(split, number).ok_or_else(|| {
            if split == Split::Train {
                let problem = "which file of questions is trained on? `env.validation_path` is for validations alone";
                return Error::config("env.path", problem);
            }
            let problem = "0 holds out no question to validate on: raise it, name `env.validation_path`, or set \
                           `algo.val_batch_size: 0`";
            Error::config("env.validation_share", problem)
        })?;
        let epoch = number / questions;
        match split {
            Split::Train if self.epoch.fetch_max(epoch, Ordering::Relaxed) < epoch => {
                tracing::info!("epoch {} of {questions} questions begins", epoch + 1);
            }
            Split::Validation if epoch > 0 => warn_once(&format!(
                "a validation asks some of its {questions} questions more than once: lower `algo.val_batch_size`, or hold \
                 out more (`env.validation_share`)"
            )),
            _ => {}
        }
        Ok(question)
    }

    /// Number of questions to validate on.
    pub fn validated(&self) -> usize {
        self.validation.len()
    }

    /// Judges an answer to the question of group `number`.
    pub fn judge(&self, split: Split, number: u64, answer: &str) -> Result<Verdict> {
        let question =
            self.question(split, number).ok_or_else(|| Error::Misuse("an answer without a question".into()))?;
        let Question { row, reference } = question;
        let request =
            || json!({ "question": row.question, "answer": answer, "reference": row.answer, "row": row.fields });
        self.check
            .judge(answer, reference, request)
            .map_err(|problem| Error::Unsupported(format!("`env.command`, {}: {problem}", row.origin)))
    }

    fn of(&self, split: Split) -> &[Question] {
        match split {
            Split::Train => &self.train,
            Split::Validation => &self.validation,
        }
    }
}
