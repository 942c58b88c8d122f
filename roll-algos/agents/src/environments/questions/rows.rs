//! Questions from files: JSON lines or JSON lists, alone or in a directory of a data set.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use roll_core::{Error, Result};
use roll_external::files;
use serde_json::{Map, Value};

use super::check::letter_of;
use super::options::QuestionsOptions;
use crate::json_rows;

/// Keys of a question, in the order in which they are looked for.
const QUESTION_KEYS: [&str; 3] = ["question", "prompt", "problem"];
/// Keys of a reference answer.
const ANSWER_KEYS: [&str; 3] = ["answer", "answerKey", "solution"];
/// Key of the choices of a question.
const CHOICES_KEY: &str = "choices";
/// Names of splits that are validated on, at the beginning of a file's name.
const VALIDATION_NAMES: [&str; 4] = ["validation", "valid", "dev", "test"];
/// Greatest depth of directories below a data set's directory.
const MAX_DEPTH: usize = 3;

/// A question with its reference answer, as a file has it.
#[derive(Clone, Debug)]
pub struct Row {
    /// File and line.
    pub origin: String,
    /// The message of the system, or an empty text.
    pub system: String,
    pub question: String,
    /// Files of the question's pictures.
    pub images: Vec<PathBuf>,
    pub answer: Value,
    /// All keys of the row.
    pub fields: Map<String, Value>,
    /// Rows with equal keys are in the same split.
    pub split_key: String,
}

/// The rows of the files that `options` name, and of validation files if there are any. Without `path` there are no rows
/// to train on.
pub fn read(options: &QuestionsOptions) -> Result<(Vec<Row>, Option<Vec<Row>>)> {
    if options.path.is_none() && options.validation_path.is_none() {
        let problem = "which file of questions? JSON lines, a row each: {\"question\": \"...\", \"answer\": \"...\"}; \
                       `env.source: sums` makes questions without a file";
        return Err(Error::config("env.path", problem));
    }
    let (train_files, mut validation_files) = options.path.as_deref().map(files_of).transpose()?.unwrap_or_default();
    if let Some(path) = &options.validation_path {
        let (train, validation) = files_of(path)?;
        validation_files = if validation.is_empty() { train } else { validation };
    }
    let read_all = |files: &[PathBuf]| -> Result<Vec<Row>> {
        let rows = files.iter().map(|file| read_file(file, options)).collect::<Result<Vec<_>>>()?;
        Ok(rows.concat())
    };
    let train = read_all(&train_files)?;
    let validation = (!validation_files.is_empty()).then(|| read_all(&validation_files)).transpose()?;
    Ok((train, validation))
}

/// The files of `path` that are trained on, and those that are validated on. A file is trained on. In a directory, names
/// that begin with `validation`, `valid`, `dev` or `test` are those of validation files, unless there are no others.
fn files_of(path: &Path) -> Result<(Vec<PathBuf>, Vec<PathBuf>)> {
    if !path.is_dir() {
        return Ok((vec![path.to_path_buf()], Vec::new()));
    }
    let (mut found, mut others) = (Vec::new(), Vec::new());
    list(path, MAX_DEPTH, &mut found, &mut others)?;
    if found.is_empty() {
        let problem = match others.iter().find(|file| extension(file) == "parquet") {
            Some(file) => format!(
                "expected files `*.jsonl` or `*.json`, found Parquet ({}): convert it, for example with `python3 -c \
                 \"import pandas; pandas.read_parquet('IN.parquet').to_json('OUT.jsonl', orient='records', lines=True)\"`",
                file.display()
            ),
            None => "expected files `*.jsonl` or `*.json`, found none".into(),
        };
        return Err(Error::bad_file(path, problem));
    }
    found.sort();
    let is_validation = |file: &PathBuf| {
        let name = file.file_name().map(|name| name.to_string_lossy().to_lowercase()).unwrap_or_default();
        VALIDATION_NAMES.iter().any(|split| name.starts_with(split))
    };
    let (validation, train): (Vec<PathBuf>, Vec<PathBuf>) = found.into_iter().partition(is_validation);
    Ok(if train.is_empty() { (validation, train) } else { (train, validation) })
}

/// Adds the files of rows below `directory` to `found`, and other files to `others`. Hidden entries are left out.
fn list(directory: &Path, depth: usize, found: &mut Vec<PathBuf>, others: &mut Vec<PathBuf>) -> Result<()> {
    let entries = std::fs::read_dir(directory).map_err(Error::file("read", directory))?;
    for entry in entries {
        let entry = entry.map_err(Error::file("read", directory))?;
        let path = entry.path();
        if entry.file_name().to_string_lossy().starts_with('.') {
            continue;
        }
        match extension(&path).as_str() {
            _ if path.is_dir() && depth > 0 => list(&path, depth - 1, found, others)?,
            _ if path.is_dir() => {}
            "jsonl" | "json" | "ndjson" if !is_description(&path) => found.push(path),
            _ => others.push(path),
        }
    }
    Ok(())
}

/// Whether the file describes the data set and has no rows.
fn is_description(path: &Path) -> bool {
    let name = path.file_name().map(|name| name.to_string_lossy().to_string()).unwrap_or_default();
    ["dataset_infos.json", "dataset_info.json", "state.json", "dataset_dict.json", "config.json"]
        .contains(&name.as_str())
}

fn extension(path: &Path) -> String {
    path.extension().map(|extension| extension.to_string_lossy().to_lowercase()).unwrap_or_default()
}

fn read_file(file: &Path, options: &QuestionsOptions) -> Result<Vec<Row>> {
    if extension(file) == "parquet" {
        let problem = "a Parquet file: write its rows as JSON lines, for example with `pandas.read_parquet(...).to_json(\
                       'rows.jsonl', orient='records', lines=True)`";
        return Err(Error::bad_file(file, problem));
    }
    let text = files::read_text(file, json_rows::MAX_BYTES).map_err(Error::file("read", file))?;
    let mut rows = Vec::new();
    for json_rows::Row { place, value } in json_rows::rows(file, &text, "questions")? {
        let row =
            value.map_err(|e| format!("expected an object with a question and an answer: {e}")).and_then(|value| {
                let Value::Object(fields) = value else { return Err("expected an object, found another value".into()) };
                let mut row = row(format!("{}: {place}", file.display()), fields, options)?;
                row.find_images(file, options)?;
                Ok(row)
            });
        rows.push(row.map_err(|problem| Error::bad_file(file, format!("{place}: {problem}")))?);
    }
    match rows.is_empty() {
        true => Err(Error::bad_file(file, "expected questions, one a line or a JSON list; found none")),
        false => Ok(rows),
    }
}

/// The row of these fields. The error describes what is wrong with them.
fn row(origin: String, fields: Map<String, Value>, options: &QuestionsOptions) -> Result<Row, String> {
    let question = find(&fields, "question_key", options.question_key.as_deref(), &QUESTION_KEYS)?;
    let answer = find(&fields, "answer_key", options.answer_key.as_deref(), &ANSWER_KEYS)?.clone();
    let (system, mut question) = match question {
        Value::String(text) => (String::new(), text.clone()),
        Value::Array(messages) => of_messages(messages)?,
        other => return Err(format!("the question: expected a text or a list of messages, found {other}")),
    };
    if options.check == super::check::CheckKind::Choice {
        for choice in choices(fields.get(CHOICES_KEY))? {
            question += &format!("\n{choice}");
        }
    }
    if question.trim().is_empty() {
        return Err("the question is empty".into());
    }
    let split_key = question.split_whitespace().collect::<Vec<_>>().join(" ").to_lowercase();
    Ok(Row { origin, system, question, images: Vec::new(), answer, fields, split_key })
}

impl Row {
    /// Finds the files of the row's pictures, which then decide on its split: no picture is on both sides.
    fn find_images(&mut self, file: &Path, options: &QuestionsOptions) -> Result<(), String> {
        let Some(key) = &options.image_key else { return Ok(()) };
        let value = find(&self.fields, "image_key", Some(key), &[])?;
        let paths = match value {
            Value::Array(paths) => paths.as_slice(),
            path => std::slice::from_ref(path),
        };
        let paths: Option<Vec<&str>> = paths.iter().map(Value::as_str).collect();
        let paths = paths.filter(|paths| !paths.is_empty()).ok_or_else(|| {
            format!("`{key}` (`env.image_key`): expected the path of a picture or a list of paths, found {value}")
        })?;
        self.split_key = paths.join("\n");
        let directory = file.parent().unwrap_or(Path::new(""));
        self.images = paths.into_iter().map(|path| directory.join(path)).collect();
        match self.images.iter().find(|image| !image.is_file()) {
            Some(missing) => Err(format!("`{key}` (`env.image_key`): there is no file {}", missing.display())),
            None => Ok(()),
        }
    }
}

/// The value of the configured key, whose parts are separated by dots, or of the first of `defaults` that there is.
fn find<'a>(
    fields: &'a Map<String, Value>,
    option: &str,
    configured: Option<&str>,
    defaults: &[&str],
) -> Result<&'a Value, String> {
    let value = match configured {
        Some(key) => fields.get(key).or_else(|| {
            let (first, rest) = key.split_once('.')?;
            rest.split('.').try_fold(fields.get(first)?, |value, part| value.get(part))
        }),
        None => defaults.iter().find_map(|key| fields.get(*key)),
    };
    value.filter(|value| !value.is_null()).ok_or_else(|| {
        let wanted = match configured {
            Some(key) => format!("`{key}`"),
            None => defaults.iter().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", "),
        };
        let known = fields.keys().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", ");
        format!("no key {wanted} (`env.{option}`); the row has {known}")
    })
}

/// Message of the system and question of a list of messages, which is an optional message of the system and one of the
/// user.
fn of_messages(messages: &[Value]) -> Result<(String, String), String> {
    let part = |message: &Value, key: &str| message[key].as_str().map(String::from);
    let known: Vec<(String, String)> =
        messages.iter().filter_map(|message| part(message, "role").zip(part(message, "content"))).collect();
    let roles: Vec<&str> = known.iter().map(|(role, _)| role.as_str()).collect();
    match (&roles[..], messages.len()) {
        (["user"], 1) => Ok((String::new(), known[0].1.clone())),
        (["system", "user"], 2) => Ok((known[0].1.clone(), known[1].1.clone())),
        _ => Err(format!(
            "the question: expected one message of the user, after at most one of the system, each {{\"role\": ..., \
             \"content\": \"...\"}}; found {} messages{}",
            messages.len(),
            if roles.is_empty() { String::new() } else { format!(" ({})", roles.join(", ")) }
        )),
    }
}

/// The lines of the choices: a list of texts, or `{"text": [...], "label": [...]}`. None if the question has them.
fn choices(value: Option<&Value>) -> Result<Vec<String>, String> {
    let Some(value) = value.filter(|value| !value.is_null()) else { return Ok(Vec::new()) };
    let invalid = || format!("`{CHOICES_KEY}`: expected at most 26 texts, found {value}");
    let texts = |value: &Value| -> Option<Vec<String>> {
        value.as_array()?.iter().map(|text| text.as_str().map(String::from)).collect()
    };
    let listed = texts(if value.is_object() { &value["text"] } else { value });
    let listed = listed.filter(|texts| texts.len() <= 26).ok_or_else(invalid)?;
    let letters = || (0..listed.len() as u8).map(|number| letter_of(number).to_string()).collect();
    let labels = texts(&value["label"]).filter(|labels| labels.len() == listed.len()).unwrap_or_else(letters);
    Ok(labels.iter().zip(&listed).map(|(label, text)| format!("{label}. {text}")).collect())
}

/// Removes the training rows whose question is in `validation`; returns how many there were.
pub fn remove_validated(train: &mut Vec<Row>, validation: &[Row]) -> usize {
    let validated: HashSet<&str> = validation.iter().map(|row| row.split_key.as_str()).collect();
    let before = train.len();
    train.retain(|row| !validated.contains(row.split_key.as_str()));
    before - train.len()
}
