//! `roll data caption`: a copy of metadata with prompts by a model that sees pictures.
//!
//! Several threads ask the service, each for one row at a time; this thread writes the answers. Each answer is appended
//! to the output at once, so that a run that was killed or failed is continued by the same command.

use std::collections::{BTreeMap, HashMap};
use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use roll_core::{Error, Registry, Result, parse_options};
use roll_external::files;
use roll_media::{ReadOptions, Sizing, probe, read_video};
use roll_rewards::judge::{CAPTION_QUESTION, Judge, JudgeConfig, Texts};
use roll_train::progress::Bar;
use roll_video::rows::{DataConfig, RowColumns};
use serde_json::{Value as Json, json};

use crate::args::{CaptionData, ConfigArgs, GivenValue, KeyValue, Layers};
use crate::configuration::{Configuration, build_context};
use crate::progress::TerminalBar;

/// Number of rows that fail one after the other before no further row is asked for: the service has failed, or the
/// clips are elsewhere.
const MAX_CONSECUTIVE_FAILURES: usize = 16;
/// Longest output of an earlier run that is read, in bytes.
const MAX_OUTPUT_BYTES: u64 = 1 << 30;

/// Runs the command. The output grows by a line per answer, and is written anew in the order of the metadata at the
/// end.
pub fn caption(args: CaptionData) -> Result<()> {
    let captioner = Captioner::open(&args)?;
    let output = std::path::absolute(&args.output).map_err(Error::file("write", &args.output))?;
    let rows = RowColumns::read(&args.path, captioner.data.base_path.as_deref())?;
    // The columns of each row, whose paths are relative to the output's directory instead of the metadata's.
    let columns: Vec<_> = rows.iter().map(|row| row.values_relative_to(output.parent().unwrap_or(&output))).collect();
    let mut prompts = known_prompts(&args, &output, &columns)?;
    let in_order = |prompts: &[Option<String>]| -> String {
        columns.iter().zip(prompts).filter_map(|(row, prompt)| Some(line(row, prompt.as_ref()?))).collect()
    };
    files::write_atomically(&output, in_order(&prompts).as_bytes())?;
    let unprompted: Vec<usize> = (0..rows.len()).filter(|row| prompts[*row].is_none()).collect();
    let mut file = OpenOptions::new().append(true).open(&output).map_err(Error::file("write", &output))?;
    let requests = Requests {
        captioner: &captioner,
        rows: &rows,
        unprompted: &unprompted,
        next: AtomicUsize::new(0),
        consecutive_failures: AtomicUsize::new(0),
    };
    let mut failed = 0;
    let bar = TerminalBar::new(unprompted.len() as u64, "rows");
    let (sender, receiver) = mpsc::channel();
    std::thread::scope(|threads| -> Result<()> {
        for started in 0..unprompted.len().min(args.requests.into()) {
            let sender = sender.clone();
            match roll_core::threads::spawn_scoped(threads, "a request", || requests.ask_for_rows(sender)) {
                Ok(_) => {}
                Err(error) if started == 0 => return Err(Error::failed("nothing can be asked for")(error)),
                Err(error) => {
                    tracing::warn!("{started} requests at the same time instead of {}: {error}", args.requests);
                    break;
                }
            }
        }
        // The receiver ends when the threads have dropped their senders.
        drop(sender);
        for (done, (row, caption)) in (1..).zip(receiver) {
            match caption {
                Ok(caption) => {
                    let line = line(&columns[row], &caption);
                    file.write_all(line.as_bytes()).map_err(Error::file("write", &output))?;
                    prompts[row] = Some(caption);
                }
                Err(error) => {
                    failed += 1;
                    tracing::warn!("{}: {}", location(&args.path, &rows[row]), error.chain());
                }
            }
            bar.set(done);
        }
        Ok(())
    })?;
    bar.finish();
    files::write_atomically(&output, in_order(&prompts).as_bytes())?;
    let missing = prompts.iter().filter(|prompt| prompt.is_none()).count();
    let (all, new) = (rows.len(), unprompted.len() - missing);
    println!("{}: {} of {all} rows have a prompt, {new} of them new", args.output.display(), all - missing);
    match missing {
        0 => Ok(()),
        _ => Err(Error::failed(format!("{missing} of {all} rows have no prompt, and are left out"))(format!(
            "{failed} failed as listed above, {} were not asked for; the same command asks again",
            missing - failed
        ))),
    }
}

/// The rows whose prompts several threads ask for.
struct Requests<'a> {
    captioner: &'a Captioner,
    rows: &'a [RowColumns],
    /// The positions in `rows` of the rows without a prompt.
    unprompted: &'a [usize],
    /// The position in `unprompted` of the row that is asked for next.
    next: AtomicUsize,
    consecutive_failures: AtomicUsize,
}

impl Requests<'_> {
    /// Asks for one row after the other and sends each row's position and result, until no row is left or too many
    /// consecutive rows have failed. Drops the sender at the end.
    fn ask_for_rows(&self, sender: mpsc::Sender<(usize, Result<String>)>) {
        while self.consecutive_failures.load(Ordering::Relaxed) < MAX_CONSECUTIVE_FAILURES {
            let Some(&row) = self.unprompted.get(self.next.fetch_add(1, Ordering::Relaxed)) else { break };
            let caption = self.captioner.caption(&self.rows[row]);
            if caption.is_ok() {
                self.consecutive_failures.store(0, Ordering::Relaxed);
            } else {
                self.consecutive_failures.fetch_add(1, Ordering::Relaxed);
            }
            // The receiver is gone if the output cannot be written.
            if sender.send((row, caption)).is_err() {
                break;
            }
        }
    }
}

/// The service, and how clips are read.
struct Captioner {
    judge: Judge,
    /// Number of frames of a clip that the model sees.
    frames: usize,
    data: DataConfig,
}

impl Captioner {
    /// Makes the client of the service that the arguments name.
    fn open(args: &CaptionData) -> Result<Self> {
        let key_value = |key, value: Json, origin| KeyValue { key, value: value.to_string(), origin };
        let mut service = vec![
            key_value("reward.name", json!("judge"), "`roll data caption`"),
            key_value("reward.url", json!(args.url), "--url"),
            key_value("reward.model", json!(args.model), "--model"),
        ];
        service.extend(args.frames.map(|frames| key_value("reward.frames", json!(frames), "--frames")));
        let values = args.set.iter().cloned().map(GivenValue::Assignment).collect();
        let layers = Layers { values, ..Layers::default() };
        let configuration = Configuration::read(&ConfigArgs { layers, ..ConfigArgs::default() }, &service)?;
        let loaded = configuration.load(&Registry::linked()?)?;
        let [reward] = loaded.config.reward.as_slice() else {
            return Err(Error::config("reward", "expected the options of `judge` alone"));
        };
        let mut config: JudgeConfig = parse_options("reward", &reward.options)?;
        // Options that are about scores must have their defaults.
        let JudgeConfig { questions, answer, label, on_missing, .. } = JudgeConfig::default();
        if config != (JudgeConfig { questions, answer, label, on_missing, ..config.clone() }) {
            let problem = "`questions`, `answer`, `label` and `on_missing` have no effect on captions: leave them out, and \
                           ask by `--question`";
            return Err(Error::config("reward", problem));
        }
        let question = args.question.as_deref().unwrap_or(CAPTION_QUESTION);
        config.questions = Texts::Several(vec![question.into()]);
        let (frames, judge) = (config.frames, Judge::new(config, &build_context(&loaded))?);
        Ok(Self { judge, frames, data: loaded.section()? })
    }

    /// Asks for the prompt of a row, with frames that are evenly spaced from the first to the last.
    fn caption(&self, row: &RowColumns) -> Result<String> {
        let Some(clip) = row.shown() else {
            return Err(Error::Unsupported("the row has neither a clip nor a picture".into()));
        };
        let last = probe(clip, self.data.decoder)?.frames.saturating_sub(1);
        let (skip, every) = match self.frames {
            // One frame is the middle one.
            1 => (last / 2, 1),
            count => (0, last / (count - 1)),
        };
        let sizing = Sizing::MaxPixels { pixels: self.data.max_pixels, unit: [1, 1] };
        let (max_frames, decoder) = (Some(self.frames), self.data.decoder);
        let options = ReadOptions { skip, max_frames, every, sizing, decoder, fps: None };
        self.judge.caption(&read_video(clip, &options)?, prompt(&row.values))
    }
}

type Columns = serde_json::Map<String, Json>;

/// The prompt of a row; empty without one.
fn prompt(columns: &Columns) -> &str {
    columns.get("prompt").and_then(Json::as_str).unwrap_or_default().trim()
}

/// A line of the output.
fn line(columns: &Columns, prompt: &str) -> String {
    let mut columns = columns.clone();
    columns.insert("prompt".into(), prompt.into());
    format!("{}\n", Json::Object(columns))
}

/// The columns of a row besides the prompt, in the order of their names. They identify the row.
fn identity(columns: &Columns) -> String {
    let others: BTreeMap<_, _> = columns.iter().filter(|(name, _)| *name != "prompt").collect();
    json!(others).to_string()
}

/// The place of a row for messages: "metadata.csv line 3 (clips/a.mp4)". Rows of a directory have no line, only a clip.
fn location(table: &Path, row: &RowColumns) -> String {
    match (row.line, row.shown()) {
        (0, Some(clip)) => clip.display().to_string(),
        (line, Some(clip)) => format!("{} line {line} ({})", table.display(), clip.display()),
        (line, None) => format!("{} line {line}", table.display()),
    }
}

/// The prompt of each row that need not be asked for: the prompt in the metadata, unless `--overwrite` is given, or the
/// prompt in the output of an earlier run. Fails if the output has other rows, because it is then an unrelated file, or
/// belongs to other metadata.
fn known_prompts(args: &CaptionData, output: &Path, rows: &[Columns]) -> Result<Vec<Option<String>>> {
    let text = match files::read_text(output, MAX_OUTPUT_BYTES) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        read => read.map_err(Error::file("read", output))?,
    };
    let [output_file, metadata_file] = [output, &args.path].map(|path| path.canonicalize().ok());
    let foreign = || {
        let problem = format!("holds other rows than {}: name another file, or remove it", args.path.display());
        Error::bad_file(output, problem)
    };
    if output_file.is_some() && output_file == metadata_file {
        return Err(Error::config("--output", "expected another file than the metadata"));
    }
    let rows: Vec<_> = rows.iter().map(|row| (identity(row), prompt(row))).collect();
    // The prompt of each row in the output; empty if the output does not have the row.
    let mut written: HashMap<&str, String> =
        rows.iter().map(|(identity, _)| (identity.as_str(), String::new())).collect();
    // A crash of the machine may have cut the last line off.
    let whole_lines = text.rfind('\n').map_or(text.as_str(), |end| &text[..=end]);
    for line in whole_lines.lines() {
        let columns: Columns = serde_json::from_str(line).map_err(|_| foreign())?;
        *written.get_mut(identity(&columns).as_str()).ok_or_else(foreign)? = prompt(&columns).into();
    }
    let known = rows.iter().map(|(identity, in_metadata)| {
        let in_output = written[identity.as_str()].as_str();
        let prompt = match args.overwrite {
            // The output has the prompt that is to be overwritten: an earlier run without `--overwrite` copied it.
            true if in_output == *in_metadata => "",
            // Without `--overwrite`, a prompt in the metadata stays.
            false if !in_metadata.is_empty() => in_metadata,
            // The prompt of an earlier run, or none.
            _ => in_output,
        };
        Some(prompt.to_string()).filter(|prompt| !prompt.is_empty())
    });
    Ok(known.collect())
}
