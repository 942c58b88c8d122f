//! `roll data caption`: a copy of metadata with prompts by a model that sees pictures.

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

use crate::args::{CaptionData, ConfigArgs, GivenValue, Layers};
use crate::configuration::{Configuration, build_context};
use crate::progress::TerminalBar;

/// Number of rows which fail one after the other until the others are left alone: the service has failed, or the clips
/// are elsewhere.
const MAX_FAILURES_IN_A_ROW: usize = 16;
/// Longest output of an earlier run in bytes.
const MAX_OUTPUT: u64 = 1 << 30;

/// Runs the command. The output grows by a line per answer, and at the end has the order of the metadata.
pub fn caption(args: CaptionData) -> Result<()> {
    let captioner = Captioner::open(&args)?;
    let output = std::path::absolute(&args.output).map_err(Error::file("write", &args.output))?;
    let rows = RowColumns::read(&args.path, captioner.data.base_path.as_deref())?;
    let named: Vec<_> = rows.iter().map(|row| row.named_from(output.parent().unwrap_or(&output))).collect();
    let mut prompts = known_prompts(&args, &output, &named)?;
    let lines = |prompts: &[Option<String>]| -> String {
        named.iter().zip(prompts).filter_map(|(row, prompt)| Some(line(row, prompt.as_ref()?))).collect()
    };
    files::write_atomically(&output, lines(&prompts).as_bytes())?;
    let left: Vec<usize> = (0..rows.len()).filter(|i| prompts[*i].is_none()).collect();
    let mut file = OpenOptions::new().append(true).open(&output).map_err(Error::file("write", &output))?;
    let (next, failures, mut failed) = (AtomicUsize::new(0), AtomicUsize::new(0), 0);
    let bar = TerminalBar::new(left.len() as u64, "rows");
    let (sender, receiver) = mpsc::channel();
    std::thread::scope(|threads| -> Result<()> {
        for i in 0..left.len().min(args.requests.into()) {
            let sender = sender.clone();
            let asks = || {
                let sender = sender;
                while failures.load(Ordering::Relaxed) < MAX_FAILURES_IN_A_ROW {
                    let Some(&i) = left.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
                    let caption = captioner.caption(&rows[i]);
                    match &caption {
                        Ok(_) => failures.store(0, Ordering::Relaxed),
                        Err(_) => _ = failures.fetch_add(1, Ordering::Relaxed),
                    }
                    if sender.send((i, caption)).is_err() {
                        break;
                    }
                }
            };
            match roll_core::threads::spawn_scoped(threads, "a request", asks) {
                Ok(_) => {}
                Err(error) if i == 0 => return Err(Error::failed("nothing can be asked for")(error)),
                Err(error) => {
                    tracing::warn!("{i} requests at the same time instead of {}: {error}", args.requests);
                    break;
                }
            }
        }
        drop(sender);
        for (done, (i, caption)) in (1..).zip(receiver) {
            match caption {
                Ok(caption) => {
                    let line = line(&named[i], &caption);
                    file.write_all(line.as_bytes()).map_err(Error::file("write", &output))?;
                    prompts[i] = Some(caption);
                }
                Err(error) => {
                    failed += 1;
                    tracing::warn!("{}: {}", location(&args.path, &rows[i]), error.chain());
                }
            }
            bar.set(done);
        }
        Ok(())
    })?;
    bar.finish();
    files::write_atomically(&output, lines(&prompts).as_bytes())?;
    let missing = prompts.iter().filter(|prompt| prompt.is_none()).count();
    let (all, new) = (rows.len(), left.len() - missing);
    println!("{}: {} of {all} rows have a prompt, {new} of them new", args.output.display(), all - missing);
    match missing {
        0 => Ok(()),
        _ => Err(Error::failed(format!("{missing} of {all} rows have no prompt, and are left out"))(format!(
            "{failed} failed as listed above, {} were not asked for; the same command asks again",
            missing - failed
        ))),
    }
}

/// The service, and how clips are read.
struct Captioner {
    judge: Judge,
    frames: usize,
    data: DataConfig,
}

impl Captioner {
    fn open(args: &CaptionData) -> Result<Self> {
        let frames = args.frames.map(|frames| ("reward.frames", json!(frames), "--frames"));
        let named = [
            ("reward.name", json!("judge"), "`roll data caption`"),
            ("reward.url", json!(args.url), "--url"),
            ("reward.model", json!(args.model), "--model"),
        ];
        let named = named.into_iter().chain(frames);
        let named: Vec<_> = named.map(|(key, value, origin)| (key, value.to_string(), origin)).collect();
        let values = args.set.iter().cloned().map(GivenValue::Assignment).collect();
        let layers = Layers { values, ..Layers::default() };
        let configuration = Configuration::read(&ConfigArgs { layers, ..ConfigArgs::default() }, &named)?;
        let loaded = configuration.load(&Registry::linked()?)?;
        let [reward] = loaded.config.reward.as_slice() else {
            return Err(Error::config("reward", "expected the options of `judge` alone"));
        };
        let mut config: JudgeConfig = parse_options("reward", &reward.options)?;
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

    fn caption(&self, row: &RowColumns) -> Result<String> {
        let Some(clip) = row.shown() else {
            return Err(Error::Unsupported("the row has neither a clip nor a picture".into()));
        };
        let last = probe(clip, self.data.decoder)?.frames.saturating_sub(1);
        let (skip, every) = match self.frames {
            1 => (last / 2, 1),
            n => (0, last / (n - 1)),
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

/// The columns but the prompt, in the order of their names.
fn identity(columns: &Columns) -> String {
    let others: BTreeMap<_, _> = columns.iter().filter(|(name, _)| *name != "prompt").collect();
    json!(others).to_string()
}

/// "metadata.csv line 3 (clips/a.mp4)", or the clip of a directory.
fn location(table: &Path, row: &RowColumns) -> String {
    match (row.line, row.shown()) {
        (0, Some(clip)) => clip.display().to_string(),
        (line, Some(clip)) => format!("{} line {line} ({})", table.display(), clip.display()),
        (line, None) => format!("{} line {line}", table.display()),
    }
}

/// The prompts of `rows` that are there: their own unless they are overwritten, and those in the output of a run that
/// did not reach its end. Fails if the output has other rows: it is another file, or of other metadata.
fn known_prompts(args: &CaptionData, output: &Path, rows: &[Columns]) -> Result<Vec<Option<String>>> {
    let text = match files::read_text(output, MAX_OUTPUT) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        read => read.map_err(Error::file("read", output))?,
    };
    let same = [output, &args.path].map(|path| path.canonicalize().ok());
    let foreign = || {
        let problem = format!("holds other rows than {}: name another file, or remove it", args.path.display());
        Error::bad_file(output, problem)
    };
    if same[0].is_some() && same[0] == same[1] {
        return Err(Error::config("--output", "expected another file than the metadata"));
    }
    let rows: Vec<_> = rows.iter().map(|row| (identity(row), prompt(row))).collect();
    let mut found: HashMap<&str, String> =
        rows.iter().map(|(identity, _)| (identity.as_str(), String::new())).collect();
    // A crash of the machine may have cut the last line off.
    let whole = text.rfind('\n').map_or(text.as_str(), |end| &text[..=end]);
    for line in whole.lines() {
        let columns: Columns = serde_json::from_str(line).map_err(|_| foreign())?;
        *found.get_mut(identity(&columns).as_str()).ok_or_else(foreign)? = prompt(&columns).into();
    }
    let known = rows.iter().map(|(identity, own)| {
        let asked = found[identity.as_str()].as_str();
        let prompt = match args.overwrite {
            true if asked == *own => "",
            false if !own.is_empty() => own,
            _ => asked,
        };
        Some(prompt.to_string()).filter(|prompt| !prompt.is_empty())
    });
    Ok(known.collect())
}
