//! Options of the environment `questions`.

use std::path::PathBuf;

use roll_core::keys::check_ranges;
use roll_core::{Error, Result, check_seconds};

use super::check::CheckKind;

/// Where questions come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// A file, or a directory of files.
    #[default]
    File,
    /// Sums that are made here, such as "What is 30 + 10?".
    Sums,
}

/// Options of the environment `questions`.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct QuestionsOptions {
    /// Where questions come from.
    pub source: Source,
    /// File of questions: JSON lines or a JSON list. Or a directory of such files, in which those whose names begin with
    /// `validation`, `valid`, `dev` or `test` are validated on. May be `null` if `validation_path` is set; then no
    /// question is trained on (`roll eval`).
    pub path: Option<PathBuf>,
    /// Key of a row's question, a text or a list of messages; dots lead into objects. `null`: `question`, `prompt` or
    /// `problem`.
    pub question_key: Option<String>,
    /// Key of a row's reference answer; dots lead into objects. `null`: `answer`, `answerKey` or `solution`.
    pub answer_key: Option<String>,
    /// Key of a row's picture, or list of pictures: paths of PNG, JPEG or WebP files, relative to the file of the row.
    /// They are shown at the U+FFFC of the question, or before it. `null`: questions have no pictures.
    pub image_key: Option<String>,
    /// File or directory of the questions to validate on. `null`: `validation_share` of the rows of `path`.
    pub validation_path: Option<PathBuf>,
    /// Share of the questions that are validated on and never trained on. A question's text alone decides, and that of its
    /// pictures' paths if it has any. 0: none.
    #[schemars(range(min = 0, max = 0.9))]
    pub validation_share: f64,
    /// Number of digits of the numbers of a sum.
    #[schemars(range(min = 1, max = 9))]
    pub digits: u32,
    /// Number of numbers of a sum.
    #[schemars(range(min = 2, max = 8))]
    pub operands: usize,
    /// How an answer is compared with the reference answer. The reward is 1 or 0.
    pub check: CheckKind,
    /// Regular expression whose last group is the answer, for `check: regex`. `null`: each row's reference is a pattern.
    pub pattern: Option<String>,
    /// Program and arguments that judge answers, for `check: command`. It gets an object per line, `{"question": ...,
    /// "answer": ..., "reference": ..., "row": {...}}`, and answers each by `{"reward": 0.5}`.
    pub command: Vec<String>,
    /// Time limit of a judgement in seconds, after which the process is killed.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub timeout: f64,
    /// Maximum number of processes of `command` at the same time.
    #[schemars(range(min = 1))]
    pub workers: usize,
}

impl Default for QuestionsOptions {
    fn default() -> Self {
        Self {
            source: Source::File,
            path: None,
            question_key: None,
            answer_key: None,
            image_key: None,
            validation_path: None,
            validation_share: 0.05,
            digits: 2,
            operands: 2,
            check: CheckKind::Number,
            pattern: None,
            command: Vec::new(),
            timeout: 30.0,
            workers: 8,
        }
    }
}

impl QuestionsOptions {
    /// Fails on options out of range, and on options that would not be read.
    pub fn check(&self) -> Result<()> {
        check_ranges("env", self)?;
        check_seconds("env.timeout", self.timeout)?;
        let reads_files = self.source == Source::File;
        let judges = self.check == CheckKind::Command;
        // Keys, whether they are read, and the reason if not.
        let conditions: [(&[&str], bool, &str); 5] = [
            (
                &["path", "question_key", "answer_key", "image_key", "validation_path"],
                reads_files,
                "`env.source: sums` makes its questions",
            ),
            (&["digits", "operands"], !reads_files, "only `env.source: sums` reads it"),
            (
                &["validation_share"],
                self.validation_path.is_none(),
                "`env.validation_path` has the questions to validate on",
            ),
            (&["pattern"], self.check == CheckKind::Regex, "only `env.check: regex` reads it"),
            (&["command", "timeout", "workers"], judges, "only `env.check: command` reads it"),
        ];
        let json = |options: &Self| serde_json::to_value(options).unwrap_or_default();
        let (own, defaults) = (json(self), json(&Self::default()));
        for (keys, _, reason) in conditions.iter().filter(|(_, is_read, _)| !is_read) {
            if let Some(key) = keys.iter().find(|key| own[**key] != defaults[**key]) {
                let found = own[*key].as_str().map_or_else(|| own[*key].to_string(), String::from);
                let problem = format!("`{found}` would not be read: {reason}; leave this key out");
                return Err(Error::config(format!("env.{key}"), problem));
            }
        }
        if judges && self.command.first().is_none_or(String::is_empty) {
            return Err(Error::config("env.command", "which program judges? For example `[python3, judge.py]`"));
        }
        match (self.source, self.check) {
            (Source::Sums, CheckKind::Choice) => {
                let problem = "sums have no choices: expected `number`, `boxed`, `regex`, `json` or `command`";
                Err(Error::config("env.check", problem))
            }
            (Source::Sums, CheckKind::Regex) if self.pattern.is_none() => {
                Err(Error::config("env.pattern", "which pattern finds the sum in an answer? For example `= *([0-9]+)`"))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn options_that_would_not_be_read_are_refused() {
        let refused = |options: Value| {
            let options: QuestionsOptions = serde_json::from_value(options).unwrap();
            options.check().err().map(|e| e.to_string()).unwrap_or_default()
        };
        for options in [
            json!({"path": "a.jsonl"}),
            json!({"source": "sums", "digits": 3, "check": "boxed", "validation_share": 0}),
            json!({"path": "a.jsonl", "check": "regex", "pattern": "x"}),
            json!({"path": "a.jsonl", "check": "command", "command": ["judge"], "timeout": 3}),
            json!({"path": "a.jsonl", "validation_path": "b.jsonl"}),
        ] {
            assert_eq!(refused(options.clone()), "", "{options}");
        }
        for (options, key, words) in [
            (json!({"source": "sums", "path": "a"}), "env.path", "makes its questions"),
            (json!({"digits": 3}), "env.digits", "`3` would not be read"),
            (json!({"pattern": "x"}), "env.pattern", "check: regex"),
            (json!({"command": ["judge"]}), "env.command", "check: command"),
            (json!({"workers": 2}), "env.workers", "check: command"),
            (json!({"validation_path": "b", "validation_share": 0.5}), "env.validation_share", "validation_path"),
            (json!({"check": "command"}), "env.command", "which program"),
            (json!({"check": "command", "command": ["a"], "timeout": 0}), "env.timeout", "0"),
            (json!({"validation_share": 1}), "env.validation_share", "0.9"),
            (json!({"source": "sums", "digits": 0}), "env.digits", "from 1 to 9"),
            (json!({"source": "sums", "check": "choice"}), "env.check", "no choices"),
            (json!({"source": "sums", "check": "regex"}), "env.pattern", "which pattern"),
        ] {
            let problem = refused(options.clone());
            assert!(problem.contains(key) && problem.contains(words), "{options}: {problem}");
        }
    }
}
