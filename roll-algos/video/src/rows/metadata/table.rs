//! Metadata in tables: CSV with commas, semicolons or tabs.

use std::path::Path;
use std::sync::Arc;

use roll_core::{
    Error, Result, nearest,
    serde_json::{Map, Value},
};

use super::{COLUMNS, MASK, MetadataRow, VIDEO, checked_weight, listed, misspelt_video};

/// The separators that a table may have.
const DELIMITERS: [u8; 3] = [b',', b';', b'\t'];

/// Opens a table; returns its reader and the names of its columns.
fn open<'a>(path: &Path, text: &'a str) -> Result<(csv::Reader<&'a [u8]>, csv::StringRecord)> {
    let delimiter = best_delimiter(text);
    if let Some(line) = unclosed_quote(text, delimiter) {
        let problem = format!("line {line}: a quote is opened and never closed: all that follows would be one field");
        return Err(Error::bad_file(path, problem));
    }
    let mut reader = csv_reader(text, delimiter);
    let headers = reader.headers().map_err(|e| Error::bad_file(path, problem(&e)))?.clone();
    Ok((reader, headers))
}

/// The rows as objects without empty fields, each with the number of its line. A `weight` becomes a number, as metadata
/// in JSON require.
pub(super) fn objects(path: &Path, text: &str) -> Result<Vec<(u64, Map<String, Value>)>> {
    let (mut reader, headers) = open(path, text)?;
    let value = |name: &str, field: &str| match (name, field.parse::<f64>()) {
        ("weight", Ok(weight)) if weight.is_finite() => weight.into(),
        _ => field.into(),
    };
    let object = |record: csv::Result<csv::StringRecord>| {
        let record = record.map_err(|e| Error::bad_file(path, problem(&e)))?;
        let fields = headers.iter().zip(&record).filter(|(_, field)| !field.is_empty());
        let line = record.position().map_or(0, csv::Position::line);
        Ok((line, fields.map(|(name, field)| (name.to_string(), value(name, field))).collect()))
    };
    reader.records().map(object).collect()
}

/// Reads the rows of a table. Relative paths start at `base`.
pub(super) fn rows(path: &Path, text: &str, base: &Path) -> Result<Vec<MetadataRow>> {
    let bad = |problem: String| Error::bad_file(path, problem);
    let (mut reader, headers) = open(path, text)?;
    let find = |name: &str| headers.iter().position(|h| h == name);
    let missing = |name: &str| {
        let found: Vec<_> = headers.iter().collect();
        bad(format!("no column `{name}`; the first line names {}", listed(&found, name)))
    };
    let (video_column, prompt_column) = (find(VIDEO), find("prompt").ok_or_else(|| missing("prompt"))?);
    if video_column.is_none() && misspelt_video(&headers).is_some() {
        return Err(missing(VIDEO));
    }
    for header in headers.iter().filter(|header| !COLUMNS.contains(header)) {
        if let Some(near) = nearest(header, COLUMNS) {
            tracing::warn!("{}: the column `{header}` is for rewards alone; did you mean `{near}`?", path.display());
        }
    }
    let reward_columns = headers.iter().enumerate().filter(|(_, name)| !COLUMNS.contains(name));
    let image_column = find("image").or(find("input_image"));
    let (end_image_column, weight_column) = (find("end_image"), find("weight"));

    let mut rows = Vec::new();
    for record in reader.records() {
        let record = record.map_err(|e| bad(problem(&e)))?;
        let line = record.position().map_or(0, |p| p.line());
        let filled = |column: usize| record.get(column).filter(|text| !text.is_empty());
        let path_in = |column: Option<usize>| column.and_then(filled).map(|name| base.join(name));
        let weight = weight_column.and_then(filled).map(|text| checked_weight(text.parse().ok(), text)).transpose();
        rows.push(MetadataRow {
            line,
            prompt: record.get(prompt_column).unwrap_or("").into(),
            no_prompt: None,
            video: path_in(video_column),
            image: path_in(image_column),
            end_image: path_in(end_image_column),
            mask: path_in(find(MASK)),
            columns: Arc::new(
                reward_columns.clone().filter_map(|(at, name)| Some((name.into(), filled(at)?.into()))).collect(),
            ),
            weight: weight.map_err(|problem| bad(format!("line {line}: {problem}")))?,
            window: None,
        });
    }
    if rows.is_empty() {
        return Err(bad("no rows after the first line, which names the columns".into()));
    }
    Ok(rows)
}

/// The line of a quote that is never closed; the CSV reader would end the field at the end of the file.
fn unclosed_quote(text: &str, delimiter: u8) -> Option<u64> {
    #[derive(PartialEq)]
    enum QuoteState {
        /// At the beginning of a field.
        Begin,
        /// In a field without quotes, or after its closing quote.
        Plain,
        /// Inside quotes.
        Quoted,
        /// After a quote inside quotes: either the closing quote, or the first of an escaped pair.
        Closed,
    }
    let (mut state, mut line, mut line_of_quote) = (QuoteState::Begin, 1, 1);
    for byte in text.bytes() {
        state = match (state, byte) {
            (QuoteState::Begin, b'"') => {
                line_of_quote = line;
                QuoteState::Quoted
            }
            (QuoteState::Quoted, b'"') => QuoteState::Closed,
            (QuoteState::Closed, b'"') => QuoteState::Quoted,
            (QuoteState::Quoted, _) => QuoteState::Quoted,
            (_, b'\n' | b'\r') => QuoteState::Begin,
            (_, byte) if byte == delimiter => QuoteState::Begin,
            _ => QuoteState::Plain,
        };
        line += u64::from(byte == b'\n');
    }
    (state == QuoteState::Quoted).then_some(line_of_quote)
}

/// Whether the first line names the columns of a table.
pub(super) fn names_columns(text: &str) -> bool {
    let line = text.lines().next().unwrap_or_default();
    csv_reader(line, best_delimiter(line)).headers().is_ok_and(|headers| {
        let has = |name: &str| headers.iter().any(|header| header == name);
        has("prompt") && (has(VIDEO) || headers.len() == 1)
    })
}

fn csv_reader(text: &str, delimiter: u8) -> csv::Reader<&[u8]> {
    csv::ReaderBuilder::new().trim(csv::Trim::All).delimiter(delimiter).from_reader(text.as_bytes())
}

/// The separator that divides the first line into the most columns; a comma if none does.
fn best_delimiter(text: &str) -> u8 {
    let line = text.split_inclusive('\n').next().unwrap_or_default();
    let columns = |delimiter: u8| csv_reader(line, delimiter).headers().map_or(0, csv::StringRecord::len);
    // `max_by_key` returns the last maximum, so commas are tried last.
    DELIMITERS.into_iter().rev().max_by_key(|delimiter| columns(*delimiter)).unwrap_or(b',')
}

/// The text of an error for messages.
fn problem(error: &csv::Error) -> String {
    match error.kind() {
        csv::ErrorKind::UnequalLengths { pos, expected_len, len } => {
            let line = pos.as_ref().map_or(0, csv::Position::line);
            format!("line {line}: expected {expected_len} fields, found {len}; put prompts with commas in quotes")
        }
        _ => error.to_string(),
    }
}
