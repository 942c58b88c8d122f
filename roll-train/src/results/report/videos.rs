//! The videos on the page: the same clips side by side at several moments of one run, or at the end of several runs,
//! and samples of training.
//!
//! A *moment* is a folder of `samples/` in the run directory: `reference`, `before`, `step-000025`, `after`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};
use std::time::SystemTime;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use minijinja::{Value, context};
use roll_core::{Error, Result};
use roll_external::files;
use roll_media::is_clip_of_one_frame;

use super::run_files::RunFiles;
use crate::checkpoint::parse_step_name;
use crate::results::PROMPT;
use crate::results::scores::{self, Results, SetName};

/// Maximum number of clips in the table, and of sample prompts in the table.
const MAX_CLIPS: usize = 8;
/// Maximum number of moments in the table besides `reference` and `before`.
const MAX_MOMENTS: usize = 4;
/// Maximum number of bytes of videos in a page that is a file. The page has only the paths of further videos.
pub const MAX_PAGE_BYTES: u64 = 64 << 20;
/// Maximum number of videos in a line of a wide screen.
const MAX_COLUMNS: usize = 6;
/// Steps of which the page has samples of training: as many as the table has moments.
const MAX_SAMPLED_STEPS: usize = MAX_MOMENTS + 2;
/// Maximum number of samples of training from one step.
const MAX_SAMPLES_PER_STEP: usize = 2;
/// Beginning of the names of clips that are not trained on.
const UNSEEN_PREFIX: &str = "unseen";
/// The note below a table in which a row has the same inputs throughout.
const SAME_INPUTS: &str = "The videos of a row have the same prompt, first frame and noise.";
/// Beginning of the names of samples of training. Other videos are evaluated clips.
const TRAINING_PREFIX: &str = "sample-";

/// How videos get onto a page.
pub enum Videos<'a> {
    /// Within the page, as long as they fit into `budget`, the number of bytes that are left.
    Embedded { budget: u64 },
    /// Linked by addresses of the server that sends the page. An address names a run by its position in `runs`, and has
    /// the secret `token`.
    Linked { runs: &'a [RunFiles], token: &'a str },
}

/// A column of the table: the videos of one moment.
#[derive(Default)]
struct Column {
    heading: String,
    /// Paths of the videos by the names of the clips.
    videos: BTreeMap<String, PathBuf>,
    /// The evaluation of these videos.
    results: Results,
}

/// The table of evaluated clips, for the page's template. Its columns are moments of one run, or the ends of several
/// runs. The template gets rows (a name, and videos with heading and score), the number of columns, a note about the
/// inputs of the videos, and the number of clips that are not shown.
pub fn clips(runs: &[RunFiles], source: &mut Videos<'_>) -> Result<Value> {
    let (columns, note) = match runs {
        [run] => (run_columns(run)?, SAME_INPUTS.to_string()),
        runs => columns_of_runs(runs)?,
    };
    let names: BTreeSet<&String> = columns.iter().flat_map(|column| column.videos.keys()).collect();
    let (prompts, mut clips): (Vec<&String>, Vec<&String>) =
        names.iter().copied().partition(|name| name.starts_with(PROMPT));
    // The set `unseen` is the most important one, and comes first.
    clips.sort_by_key(|name| (!name.starts_with(UNSEEN_PREFIX), name.as_str()));
    let mut rows = Vec::new();
    for name in clips.iter().take(MAX_CLIPS).chain(prompts.iter().take(MAX_CLIPS)) {
        let mut videos = Vec::new();
        for column in &columns {
            if let Some(path) = column.videos.get(*name) {
                let score = clip_score(&column.results, name).map(|score| format!("{score:.3}"));
                videos.push(context! { heading => column.heading, score, ..video(path, source)? });
            }
        }
        rows.push(context! { id => name, name => prompt(runs, name).unwrap_or_else(|| name.to_string()), videos });
    }
    let more = names.len() - rows.len();
    Ok(context! { rows, more, note, columns => columns.len().clamp(1, MAX_COLUMNS) })
}

/// The score of a clip, such as `unseen-003`, by the reward that is trained on.
fn clip_score(results: &Results, name: &str) -> Option<f64> {
    let (set, index) = name.rsplit_once('-')?;
    let set = if set == UNSEEN_PREFIX { SetName::Unseen } else { SetName::Train };
    *scores::of(results, set).get(index.parse::<usize>().ok()?)?.scores.first()?
}

/// The text of a sample prompt, by the name of its videos.
fn prompt(runs: &[RunFiles], name: &str) -> Option<String> {
    let i: usize = name.strip_prefix(PROMPT)?.parse().ok()?;
    let key = format!("evaluation.prompts.{i}.prompt");
    runs.iter().find_map(|run| serde_json::from_str(run.settings.get(&key)?).ok())
}

/// Samples that a run saved during training, for the page's template: at most [`MAX_SAMPLES_PER_STEP`] of each of at
/// most [`MAX_SAMPLED_STEPS`] steps.
pub fn training_samples(run: &RunFiles, source: &mut Videos<'_>) -> Result<Vec<Value>> {
    let mut steps = Vec::new();
    for (step, path) in step_folders(&run.path)? {
        steps.push((step, clip_files(&path, VideoKind::TrainingSample)?));
    }
    steps.retain(|(_, videos)| !videos.is_empty());
    let mut samples = Vec::new();
    for (step, videos) in spread(steps, MAX_SAMPLED_STEPS) {
        for (name, path) in videos.iter().take(MAX_SAMPLES_PER_STEP) {
            let name = name.trim_start_matches(TRAINING_PREFIX);
            // Without leading zeros.
            let name = name.parse().map_or(name.to_string(), |number: u64| number.to_string());
            samples.push(context! { step, name, video => video(path, source)? });
        }
    }
    Ok(samples)
}

/// The columns of one run: reference, before training, and evaluations.
fn run_columns(run: &RunFiles) -> Result<Vec<Column>> {
    let mut evaluations: Vec<Column> = Vec::new();
    for (step, path) in step_folders(&run.path)? {
        let results = run.record.evaluations.iter().find(|evaluation| evaluation.step == step);
        let results = results.map(|evaluation| evaluation.results.clone()).unwrap_or_default();
        let videos = clip_files(&path, VideoKind::Evaluated)?;
        evaluations.push(Column { heading: format!("step {step}"), videos, results });
    }
    evaluations.retain(|column| !column.videos.is_empty());
    if evaluations.is_empty() {
        evaluations.push(moment_column(run, "after")?);
    }
    let mut columns = vec![moment_column(run, "reference")?, moment_column(run, "before")?];
    columns.extend(spread(evaluations, MAX_MOMENTS));
    columns.retain(|column| !column.videos.is_empty());
    Ok(columns)
}

/// The columns of several runs, and a note about the inputs of their videos. The references come first. Then come the
/// videos before training, in one column for all runs in which they are equal, followed by the ends of these runs.
fn columns_of_runs(runs: &[RunFiles]) -> Result<(Vec<Column>, String)> {
    let references = equal_columns(runs, "reference")?;
    let before = equal_columns(runs, "before")?;
    let note = note_on_inputs(runs, references.len(), before.len());
    let mut columns: Vec<Column> = references.into_iter().map(|(_, column)| column).collect();
    let mut shown = BTreeSet::new();
    for (indices, column) in before {
        columns.push(column);
        for i in indices {
            shown.insert(i);
            columns.push(Column { heading: runs[i].name.clone(), ..moment_column(&runs[i], "after")? });
        }
    }
    // Runs without videos before training come last.
    for (_, run) in runs.iter().enumerate().filter(|(i, _)| !shown.contains(i)) {
        columns.push(Column { heading: run.name.clone(), ..moment_column(run, "after")? });
    }
    columns.retain(|column| !column.videos.is_empty());
    Ok((columns, note.into()))
}

/// A note that says whether the videos of several runs have the same inputs. `references` and `before` are the numbers
/// of different columns of references, and of videos before training.
fn note_on_inputs(runs: &[RunFiles], references: usize, before: usize) -> &'static str {
    let noise_seed = |run: &RunFiles| {
        let noise_seed = run.settings.get("noise_seed").filter(|seed| *seed != "null");
        noise_seed.or(run.settings.get("seed")).cloned()
    };
    if runs.iter().any(|run| noise_seed(run) != noise_seed(&runs[0])) {
        "`seed` differs between these runs, and with it the noise of their videos: compare a run with its own `before`."
    } else if references > 1 {
        "These runs were evaluated on different clips: compare a run with its own `before`."
    } else if before > 1 {
        "These runs differ before training already: compare a run with its own `before`."
    } else {
        SAME_INPUTS
    }
}

/// The videos of a moment in several runs: one column for all runs in which they are equal, with the indices of these
/// runs. Runs without videos of the moment are left out.
fn equal_columns(runs: &[RunFiles], moment: &str) -> Result<Vec<(Vec<usize>, Column)>> {
    let mut groups: Vec<(Vec<usize>, Column)> = Vec::new();
    for (i, run) in runs.iter().enumerate() {
        let column = moment_column(run, moment)?;
        if column.videos.is_empty() {
            continue;
        }
        let mut equal_group = None;
        for (position, (_, group)) in groups.iter().enumerate() {
            if are_equal(&column, group)? {
                equal_group = Some(position);
                break;
            }
        }
        match equal_group {
            Some(position) => {
                let (indices, group) = &mut groups[position];
                indices.push(i);
                // A run may have evaluated more clips than other runs.
                for (clip, path) in column.videos {
                    group.videos.entry(clip).or_insert(path);
                }
            }
            None => groups.push((vec![i], column)),
        }
    }
    if groups.len() > 1 {
        for (indices, column) in &mut groups {
            let names: Vec<&str> = indices.iter().map(|i| runs[*i].name.as_str()).collect();
            column.heading = format!("{moment}, {}", names.join(", "));
        }
    }
    Ok(groups)
}

/// Whether the videos of two columns are equal for the clips that both have. The first clip of `column` must be among
/// these clips.
fn are_equal(column: &Column, other: &Column) -> Result<bool> {
    let has_first_clip = column.videos.keys().next().is_some_and(|clip| other.videos.contains_key(clip));
    if !has_first_clip {
        return Ok(false);
    }
    for (clip, path) in &column.videos {
        if let Some(other_path) = other.videos.get(clip)
            && !have_equal_bytes(path, other_path)?
        {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether two files have the same contents. Fails if one is larger than [`MAX_PAGE_BYTES`].
fn have_equal_bytes(a: &Path, b: &Path) -> Result<bool> {
    let read = |path: &Path| files::read(path, MAX_PAGE_BYTES).map_err(Error::file("read", path));
    Ok(read(a)? == read(b)?)
}

/// `count` of the items (all, if they are fewer): the first, the last, and some at equal distances between them. A
/// `count` below 2 returns all items.
fn spread<T>(items: Vec<T>, count: usize) -> Vec<T> {
    if items.len() <= count || count < 2 {
        return items;
    }
    let last = items.len() - 1;
    let chosen: BTreeSet<usize> = (0..count).map(|i| i * last / (count - 1)).collect();
    items.into_iter().enumerate().filter(|(i, _)| chosen.contains(i)).map(|(_, item)| item).collect()
}

/// The folders `samples/step-000025`, with their steps, in order.
fn step_folders(run: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let mut folders = Vec::new();
    for path in entries(&run.join("samples"))? {
        if let Some(step) = path.file_name().and_then(|n| n.to_str()).and_then(parse_step_name) {
            folders.push((step, path));
        }
    }
    folders.sort();
    Ok(folders)
}

/// The column of a moment of a run: `reference`, `before` or `after`.
fn moment_column(run: &RunFiles, moment: &str) -> Result<Column> {
    let evaluations = &run.record.evaluations;
    let evaluation = match moment {
        "before" => evaluations.first().filter(|evaluation| evaluation.step == 0),
        "after" => evaluations.last(),
        _ => None,
    };
    let results = evaluation.map(|evaluation| evaluation.results.clone()).unwrap_or_default();
    let videos = clip_files(&run.path.join("samples").join(moment), VideoKind::Evaluated)?;
    Ok(Column { heading: moment.into(), videos, results })
}

/// The kind of the videos in a folder. A step's folder may have both kinds.
#[derive(Clone, Copy, PartialEq, Eq)]
enum VideoKind {
    TrainingSample,
    Evaluated,
}

/// The files of clips of one kind in a folder, by their names without extension.
fn clip_files(folder: &Path, kind: VideoKind) -> Result<BTreeMap<String, PathBuf>> {
    let mut found = BTreeMap::new();
    for path in entries(folder)? {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        files::refuse_links(folder, &path)?;
        let is_video = is_clip_of_one_frame(&path).is_some() && !name.starts_with('.');
        let is_sample = name.starts_with(TRAINING_PREFIX);
        if is_video && is_sample == (kind == VideoKind::TrainingSample) {
            found.insert(name, path);
        }
    }
    Ok(found)
}

/// The paths of the files and folders in a folder; none if it does not exist.
fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    match std::fs::read_dir(folder) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(Error::file("list", folder)(e)),
        Ok(entries) => Ok(entries.flatten().map(|entry| entry.path()).collect()),
    }
}

/// A video for the page's template: its path, its `src` in HTML, and whether it is a picture. A video that does not fit into the page has no
/// `src`.
fn video(path: &Path, source: &mut Videos<'_>) -> Result<Value> {
    let metadata = files::open(path).and_then(|file| file.metadata()).map_err(Error::file("read", path))?;
    let src = match source {
        Videos::Embedded { budget } if metadata.len() > *budget => None,
        Videos::Embedded { budget } => {
            *budget -= metadata.len();
            let bytes = files::read(path, MAX_PAGE_BYTES).map_err(Error::file("read", path))?;
            // Marked as safe, because escaping would replace each `/` of Base64 by five characters. No other character
            // of Base64 needs escaping.
            Some(Value::from_safe_string(format!("data:{};base64,{}", media_type(path), STANDARD.encode(bytes))))
        }
        Videos::Linked { runs, token } => {
            // The position of the run that has the video, and the path within that run.
            let path_in = |(i, run): (usize, &RunFiles)| Some((i, path.strip_prefix(&run.path).ok()?.to_str()?));
            let found = runs.iter().enumerate().find_map(path_in);
            // The time is part of the address, so that the browser loads a file again after it was written anew.
            let written = metadata.modified().ok().and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
            let written = written.unwrap_or_default().as_nanos();
            found.map(|(run, path_in_run)| {
                let at = URL_SAFE_NO_PAD.encode(path_in_run);
                Value::from(format!("video?run={run}&at={at}&written={written}&token={token}"))
            })
        }
    };
    let is_picture = is_clip_of_one_frame(path) == Some(true);
    Ok(context! { path => path.display().to_string(), src, is_picture })
}

/// The media type of a clip's file.
pub fn media_type(path: &Path) -> &'static str {
    if is_clip_of_one_frame(path) == Some(true) { "image/png" } else { "video/mp4" }
}

/// The file of a video by the value `at` of its address, which is the encoded path within the run directory. `None` if
/// the path is not a video below `samples/`.
pub fn linked(run: &Path, at: &str) -> Option<PathBuf> {
    let path_in_run = PathBuf::from(String::from_utf8(URL_SAFE_NO_PAD.decode(at).ok()?).ok()?);
    // Without `..` and without a root.
    let stays_inside = path_in_run.components().all(|part| matches!(part, Component::Normal(_)));
    let is_video = path_in_run.starts_with("samples") && is_clip_of_one_frame(&path_in_run).is_some();
    let path = run.join(&path_in_run);
    (stays_inside && is_video && files::refuse_links(run, &path).is_ok()).then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spread_keeps_first_and_last() {
        assert_eq!(spread((0..10).collect(), 4), [0, 3, 6, 9]);
        assert_eq!(spread((0..3).collect(), 4), [0, 1, 2]);
        assert!(spread(Vec::<u8>::new(), 4).is_empty());
    }

    fn evaluated(dir: &Path, name: &str, seed: u64, before: &str, score: f64) -> RunFiles {
        let path = dir.join(name);
        for (moment, bytes) in [("reference", "r"), ("before", before), ("after", "a")] {
            let folder = path.join("samples").join(moment);
            std::fs::create_dir_all(&folder).unwrap();
            for clip in ["identity-000", "unseen-000", "unseen-001"] {
                std::fs::write(folder.join(format!("{clip}.mp4")), format!("{bytes}{clip}")).unwrap();
            }
        }
        let mut run = RunFiles::empty(&path);
        run.settings.insert("seed".into(), seed.to_string());
        let clip = |score| scores::Clip { origin: String::new(), scores: vec![Some(score)], kl: None };
        let results = vec![(SetName::Unseen, vec![clip(0.25), clip(score)])];
        run.record.evaluations.push(crate::results::record::Evaluation { step: 0, results });
        run
    }

    /// Rows of the table: headings, each with its score.
    fn rows(clips: &Value) -> Vec<Vec<String>> {
        let list =
            |value: &Value, key: &str| -> Vec<Value> { value.get_attr(key).unwrap().try_iter().unwrap().collect() };
        let text = |video: &Value| {
            let of = |key: &str| video.get_attr(key).unwrap().as_str().unwrap_or_default().to_string();
            format!("{} {}", of("heading"), of("score")).trim().to_string()
        };
        list(clips, "rows").iter().map(|row| list(row, "videos").iter().map(text).collect()).collect()
    }

    #[test]
    fn runs_of_other_noise_have_their_own_videos_before_training() {
        let dir = tempfile::tempdir().unwrap();
        let made = |name, seed, before, score| evaluated(dir.path(), name, seed, before, score);
        let runs = [made("a", 1, "b", 0.5), made("b", 1, "b", 0.5), made("c", 7, "other", 0.75)];
        let shown = clips(&runs[..2], &mut Videos::Embedded { budget: 1000 }).unwrap();
        assert_eq!(shown.get_attr("note").unwrap().as_str(), Some(SAME_INPUTS));
        let first = ["reference", "before 0.250", "a 0.250", "b 0.250"];
        assert_eq!(
            rows(&shown),
            [
                first.to_vec(),
                vec!["reference", "before 0.500", "a 0.500", "b 0.500"],
                vec!["reference", "before", "a", "b"]
            ]
        );
        let shown = clips(&runs, &mut Videos::Embedded { budget: 1000 }).unwrap();
        let note = shown.get_attr("note").unwrap().to_string();
        assert!(note.contains("`seed` differs") && note.contains("its own `before`"), "{note}");
        let expected = ["reference", "before, a, b 0.500", "a 0.500", "b 0.500", "before, c 0.750", "c 0.750"];
        assert_eq!(rows(&shown)[1], expected);
        // The rows of one run are in the order of their numbers, the unseen ones first.
        let shown = clips(&runs[2..], &mut Videos::Embedded { budget: 1000 }).unwrap();
        assert_eq!(rows(&shown)[0], ["reference", "before 0.250", "after 0.250"]);
    }

    #[test]
    fn the_address_of_a_video_names_a_file_below_samples_alone() {
        let dir = tempfile::tempdir().unwrap();
        let runs = [evaluated(dir.path(), "a", 1, "b", 0.5), evaluated(dir.path(), "a b", 1, "b", 0.5)];
        let path = runs[1].path.join("samples/before/unseen-001.mp4");
        let shown = video(&path, &mut Videos::Linked { runs: &runs, token: "5ec3e7" }).unwrap();
        let address = shown.get_attr("src").unwrap().to_string();
        let (run, rest) = address.strip_prefix("video?run=").unwrap().split_once("&at=").unwrap();
        let (at, rest) = rest.split_once("&written=").unwrap();
        assert!(run == "1" && rest.ends_with("&token=5ec3e7") && !rest.starts_with("0&"), "{address}");
        assert_eq!(linked(&runs[1].path, at), Some(path));
        let outside =
            ["../a/samples/before/unseen-001.mp4", "/etc/x.mp4", "samples/../x.mp4", "x.png", "samples/x.json"];
        for at in outside {
            assert_eq!(linked(&runs[1].path, &URL_SAFE_NO_PAD.encode(at)), None, "{at}");
        }
        assert!(linked(&runs[1].path, "%2e").is_none() && linked(&runs[1].path, "_w").is_none());
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink("/etc", runs[1].path.join("samples/link")).unwrap();
            assert_eq!(linked(&runs[1].path, &URL_SAFE_NO_PAD.encode("samples/link/x.mp4")), None);
        }
        // A page in one file has the videos that fit.
        let mut source = Videos::Embedded { budget: 12 };
        let mut src = || video(&path_of(&runs[0]), &mut source).unwrap().get_attr("src").unwrap();
        assert!(src().to_string().starts_with("data:video/mp4;base64,") && src().is_none());
    }

    fn path_of(run: &RunFiles) -> PathBuf {
        run.path.join("samples/before/unseen-000.mp4")
    }
}
