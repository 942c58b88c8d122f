//! Questions of `roll init`, and their answers: from `--set`, from the terminal, or the defaults.

use std::io::{BufRead, Write};

use roll_core::serde_json::Value as Json;
use roll_core::{Error, Key, Options, Result, ResultExt};
use roll_train::config::{ConfigLayers, Section};

/// A question for the value of a key.
pub struct Question<'a> {
    pub key: &'a str,
    /// The question as it is printed.
    pub asks: &'a str,
    /// The answer that an empty line takes. An empty text: the question has no default.
    pub default: String,
    /// The meaning of an empty answer, in words. The key is then left out of the file. `None`: an answer is needed.
    pub without: Option<&'a str>,
}

impl<'a> Question<'a> {
    /// A question that needs an answer.
    pub fn new(key: &'a str, asks: &'a str, default: impl ToString) -> Self {
        Self { key, asks, default: default.to_string(), without: None }
    }

    /// A question that may be left without an answer. `without` says what this means.
    pub fn optional(key: &'a str, asks: &'a str, without: &'a str) -> Self {
        Self { key, asks, default: String::new(), without: Some(without) }
    }
}

/// The answers so far.
pub struct Answers<'a> {
    pub sections: &'a [Section],
    /// Keys and texts of `--set` whose question has not come yet.
    given: Vec<(String, String)>,
    /// Whether nothing is asked (`--yes`): the default answers every question that `--set` does not.
    takes_defaults: bool,
    /// Keys and values, in the order of the questions.
    values: Vec<(String, Json)>,
    /// Why the last answer was refused.
    problem: Option<String>,
}

impl<'a> Answers<'a> {
    /// Begins with the answers in `assignments`, each `key=value`. With `takes_defaults` no other question is asked.
    pub fn new(assignments: &[String], takes_defaults: bool, sections: &'a [Section]) -> Result<Self> {
        let mut given = Vec::new();
        for assignment in assignments {
            let Some((key, text)) = assignment.split_once('=') else {
                return Err(Error::config(assignment, "expected key=value after --set"));
            };
            let key = key.trim();
            // The one reward may be named as the first of a list.
            let key = key.strip_prefix("reward.0.").map_or_else(|| key.to_string(), |rest| format!("reward.{rest}"));
            given.push((key, text.to_string()));
        }
        Ok(Self { sections, given, takes_defaults, values: Vec::new(), problem: None })
    }

    /// The value of a key; `None` if it has none yet.
    pub fn get(&self, key: &str) -> Option<&Json> {
        self.values.iter().find(|(known, _)| known == key).map(|(_, value)| value)
    }

    /// The text of a key; empty if it has none.
    pub fn text(&self, key: &str) -> &str {
        self.get(key).and_then(Json::as_str).unwrap_or_default()
    }

    pub fn values(&self) -> &[(String, Json)] {
        &self.values
    }

    /// Sets a key without a question. A value of `--set` for the key takes precedence.
    pub fn put(&mut self, key: &str, value: impl Into<Json>) -> Result<()> {
        let value = match self.take(key) {
            Some(text) => self.parse(key, &text).while_doing(|| in_arguments(key, &text))?,
            None => value.into(),
        };
        self.replace(key, value);
        Ok(())
    }

    fn replace(&mut self, key: &str, value: Json) {
        match self.values.iter_mut().find(|(known, _)| known == key) {
            Some((_, old)) => *old = value,
            None => self.values.push((key.into(), value)),
        }
    }

    /// Removes the answers below a key.
    pub fn forget(&mut self, section: &str) {
        self.values.retain(|(key, _)| !key.starts_with(&format!("{section}.")));
    }

    /// The options of the component of a section: the answers so far, and the values of `--set` whose question has not
    /// come yet.
    pub fn options(&self, section: &str) -> Result<Options> {
        let mut options = Options::new();
        let mut given_values = Vec::new();
        for (key, text) in &self.given {
            given_values.push((key.clone(), self.parse(key, text).while_doing(|| in_arguments(key, text))?));
        }
        for (key, value) in self.values.iter().chain(&given_values) {
            let Some(name) = key.strip_prefix(section).and_then(|rest| rest.strip_prefix('.')) else { continue };
            // The weight belongs to the sum of several rewards, and is not an option of the reward.
            if !["name", "weight", "device"].contains(&name) {
                insert(&mut options, name, value.clone());
            }
        }
        Ok(options)
    }

    /// Whether `--set` has an answer to a question that has not come yet.
    pub fn is_given(&self, key: &str) -> bool {
        self.given.iter().any(|(known, _)| known == key)
    }

    /// Removes the text of `--set` for a key, and returns it. The last of several texts counts.
    fn take(&mut self, key: &str) -> Option<String> {
        let last = self.given.iter().rposition(|(known, _)| known == key)?;
        let (_, text) = self.given.remove(last);
        self.given.retain(|(known, _)| known != key);
        Some(text)
    }

    /// Takes over the rest of `--set`: keys for which there was no question.
    pub fn take_rest(&mut self) -> Result<()> {
        while let Some((key, _)) = self.given.first().cloned() {
            // The text of `--set` takes precedence over this null.
            self.put(&key, Json::Null)?;
        }
        Ok(())
    }

    /// The description of a key: of an option of the chosen components, or in a section that every configuration has.
    pub fn key(&self, key: &str) -> Option<&'a Key> {
        let chosen = |section: &&Section| {
            section.component.is_none_or(|(kind, name)| self.text(&format!("{}.name", kind.section())) == name)
        };
        let keys = self.sections.iter().filter(chosen).flat_map(|section| &section.keys);
        // `reward.N.name` is asked for as `reward.name`.
        keys.into_iter().find(|known| known.name.replacen(".N.", ".", 1) == key)
    }

    /// Parses `text` as a value of a key. Fails if the key takes no such value.
    pub fn parse(&self, key: &str, text: &str) -> Result<Json> {
        let known = self.key(key);
        let mut value = match known {
            Some(known) if known.is_text() => Json::from(text),
            // A command line, split at spaces. Arguments that have spaces need a YAML list, in brackets.
            _ if key.ends_with(".command") && !text.starts_with('[') => text.split_whitespace().collect(),
            // A question, or the name of a file of questions.
            _ if key == "reward.questions" && !text.starts_with('[') && !std::path::Path::new(text).exists() => {
                Json::from(vec![text])
            }
            // Any other value is YAML. The key `algo.answer` does not exist and is never loaded; it serves to parse.
            _ => {
                let merged = ConfigLayers::new().set_text("algo.answer", text, "--set")?.merge()?;
                merged.peek("algo.answer").cloned().unwrap_or_default()
            }
        };
        if let Some(known) = known {
            known.check(key, &mut value)?;
        }
        Ok(value)
    }

    /// Asks until `accept` takes the answer, unless `--set` has one, and sets the key to the accepted value. Returns
    /// whether there is an answer.
    pub fn ask(&mut self, question: &Question, accept: impl FnMut(&Self, &str) -> Result<Json>) -> Result<bool> {
        let answer = self.ask_without_setting(question, accept)?;
        let is_there = answer.is_some();
        if let Some(value) = answer {
            self.replace(question.key, value);
        }
        Ok(is_there)
    }

    /// As [`Answers::ask`], but returns the accepted answer and sets no key.
    pub fn ask_without_setting<T>(
        &mut self,
        question: &Question,
        mut accept: impl FnMut(&Self, &str) -> Result<T>,
    ) -> Result<Option<T>> {
        let Question { key, asks, default, without } = question;
        if let Some(text) = self.take(key) {
            return match text.is_empty() && without.is_some() {
                true => Ok(None),
                false => accept(self, &text).while_doing(|| in_arguments(key, &text)).map(Some),
            };
        }
        let hint = match (without, default.as_str()) {
            (Some(without), _) => format!(" [none: {without}]"),
            (None, "") => String::new(),
            (None, default) => format!(" [{default}]"),
        };
        let name = if key.starts_with("--") { String::new() } else { format!(" (`{key}`)") };
        loop {
            let line = if self.takes_defaults { String::new() } else { self.read(&format!("{asks}{name}{hint}: "))? };
            let text = if line.is_empty() { default } else { &line };
            let accepted = match text.is_empty() {
                true if without.is_some() => return Ok(None),
                true => Err(Error::Misuse("it has no default".into())),
                false => accept(self, text),
            };
            match accepted {
                Ok(value) => return Ok(Some(value)),
                Err(error) => self.refuse(key, &error)?,
            }
        }
    }

    /// Prints why an answer is refused. Fails if no other answer can come, because defaults are taken.
    pub fn refuse(&mut self, key: &str, error: &Error) -> Result<()> {
        let problem = error.chain();
        if self.takes_defaults {
            return Err(Error::config(
                key,
                format!("answer it with `--set {key}=...`; the default is refused: {problem}"),
            ));
        }
        println!("{problem}");
        self.problem = Some(problem);
        Ok(())
    }

    /// Prints a question and reads a line.
    fn read(&self, question: &str) -> Result<String> {
        print!("{question}");
        std::io::stdout().flush().map_err(Error::failed("the question cannot be printed"))?;
        let mut line = String::new();
        match std::io::stdin().lock().read_line(&mut line).map_err(Error::failed("the answers cannot be read"))? {
            0 => {
                let problem = self.problem.as_ref().map(|problem| format!(". The last was refused: {problem}"));
                let problem = problem.unwrap_or_default();
                let text = "the answers ended before the last question; nothing was written. `--set KEY=VALUE` gives \
                            one, and `--yes` takes the defaults of the others";
                Err(Error::Misuse(format!("{text}{problem}")))
            }
            _ => Ok(line.trim().to_string()),
        }
    }
}

/// The context of errors about a value of `--set`.
fn in_arguments(key: &str, text: &str) -> String {
    format!("reading `--set {key}={text}`")
}

/// Sets the value of a dotted name in nested maps: `leap.discount` sets `discount` in the map `leap`.
pub fn insert(map: &mut Options, name: &str, value: Json) {
    match name.split_once('.') {
        None => {
            map.insert(name.into(), value);
        }
        Some((first, rest)) => {
            let inner = map.entry(first).or_insert_with(|| Json::Object(Options::new()));
            if !inner.is_object() {
                *inner = Json::Object(Options::new());
            }
            if let Some(inner) = inner.as_object_mut() {
                insert(inner, rest, value);
            }
        }
    }
}
