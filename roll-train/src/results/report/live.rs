//! The page that `roll watch` serves while runs go on: the report, the state of each run, and a script that replaces
//! what has changed.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use minijinja::{Value, context};
use roll_core::Result;
use roll_external::files::shell_quoted;

use super::questions::Mark;
use super::run_files::RunFiles;
use super::timing;
use super::videos::{self, Videos};
use crate::checkpoint;
use crate::progress::{counted, duration};
use crate::run_dir::RunDir;

/// The process that writes a run.
#[derive(Clone, Copy, Debug)]
pub enum Writer {
    /// A process writes the run. Its peak of host memory in bytes, if it is known.
    Running(Option<u64>),
    /// A process writes the run, and was asked to stop.
    Stopping,
    /// No process of this user on this machine writes the run.
    Absent,
    /// The operating system does not say whether a process writes the run.
    Unknown,
}

/// The parts of the page that are not in the files of its runs.
pub struct Live<'a> {
    /// Version of the page, which changes with its contents.
    pub version: &'a str,
    /// Nonce of scripts and style sheets, hexadecimal.
    pub nonce: &'a str,
    /// The secret in the page's address, which the addresses of videos need, too.
    pub token: &'a str,
    /// Whether the page can stop runs.
    pub can_stop_runs: bool,
    /// Path of the page on which people vote, if it is served.
    pub voting: Option<&'a str>,
    /// The writer of each run.
    pub writers: &'a [Writer],
}

/// The page of the runs in these directories, which may be empty yet. A run that cannot be read is shown with the
/// reason.
pub fn page(runs: &[PathBuf], live: &Live<'_>) -> Result<String> {
    let mut files = Vec::new();
    let mut problems: Vec<Option<String>> = Vec::new();
    for run in runs {
        let read = if RunDir::has_run(run) { RunFiles::read(run) } else { Ok(RunFiles::empty(run)) };
        let (run_files, problem) = match read {
            Ok(run_files) => (run_files, None),
            Err(error) => (RunFiles::empty(run), Some(error.chain())),
        };
        files.push(run_files);
        problems.push(problem);
    }
    super::disambiguate(&mut files);
    // The page with the report of the runs `reported`, and with the state of all runs.
    let page_of = |reported: &[RunFiles], problems: &[Option<String>]| {
        let all_runs = files.iter().zip(live.writers).zip(problems);
        let states: Vec<Value> = all_runs
            .map(|((run, writer), problem)| state(run, *writer, problem.as_deref(), live.can_stop_runs))
            .collect();
        let title = title(&files, live.writers);
        let values =
            context! { title, version => live.version, nonce => live.nonce, voting => live.voting, runs => states };
        super::html(reported, values, Videos::Linked { runs: &files, token: live.token })
    };
    // If a file of the report, such as a video, cannot be read, the page shows the reason instead of the report.
    page_of(&files, &problems).or_else(|error| page_of(&[], &vec![Some(error.chain()); files.len()]))
}

/// The beginning of the page's title, such as "3/60 live, ", if it shows a single run that goes on; otherwise empty.
fn title(runs: &[RunFiles], writers: &[Writer]) -> String {
    let ([run], [Writer::Running(_) | Writer::Stopping, ..]) = (runs, writers) else { return String::new() };
    match run.steps() {
        (done, Some(wanted)) => format!("{done}/{wanted} live, "),
        (done, None) => format!("{done} live, "),
    }
}

/// The page on which people vote on clips. It asks `/question` for the clips.
pub fn voting_page(nonce: &str) -> Result<String> {
    super::render("vote.html", &context! { nonce })
}

/// The file of a video on this page, by the value `at` of its address; `None` if `at` names no video of the run.
pub fn video(run: &Path, at: &str) -> Option<PathBuf> {
    videos::linked(run, at)
}

/// The media type of a file of [`video`]: a clip of one frame is a picture.
pub fn media_type(path: &Path) -> &'static str {
    videos::media_type(path)
}

/// The last logged step of a run, and the number of steps in its configuration; `None` if the run cannot be read or has
/// no such number.
pub fn steps(run: &Path) -> Option<(u64, u64)> {
    let (done, wanted) = RunFiles::read(run).ok()?.steps();
    Some((done, wanted?))
}

/// A number that changes with the files of the runs: a hash of names, sizes and times of modification.
pub fn version(runs: &[PathBuf]) -> u64 {
    let mut hasher = DefaultHasher::new();
    runs.iter().for_each(|run| hash_files(run, &mut hasher));
    hasher.finish()
}

/// Adds the names, sizes and times of the files in a directory, and in the directories below it, to the hash.
fn hash_files(directory: &Path, hasher: &mut impl Hasher) {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    // Names with a dot are left out: files that are being written have such names until they are whole.
    let mut entries: Vec<_> = entries.filter(|entry| !entry.file_name().to_string_lossy().starts_with('.')).collect();
    entries.sort_by_key(|entry| entry.file_name());
    for entry in entries {
        // The metadata of a link is that of the link itself.
        let Ok(metadata) = entry.metadata() else { continue };
        entry.file_name().hash(hasher);
        match metadata.is_dir() {
            true => hash_files(&entry.path(), hasher),
            false => (metadata.len(), metadata.modified().ok()).hash(hasher),
        }
    }
}

/// The state of a run for the page: a sentence with a mark, whether the button to stop the run is shown, and the steps
/// for a progress bar. `problem` is the reason why the run cannot be read.
fn state(run: &RunFiles, writer: Writer, problem: Option<&str>, can_stop_runs: bool) -> Value {
    let path = shell_quoted(&run.path);
    let has_files = RunDir::has_run(&run.path);
    let (mark, text) = match (problem, writer) {
        (Some(problem), _) => (Mark::Attention, format!("The run cannot be read: {problem}")),
        (None, Writer::Running(memory)) => (Mark::Good, format!("The run goes on: {}.", progress(run, memory))),
        (None, Writer::Stopping) => {
            (Mark::Attention, "The run was asked to stop: it ends its step, then writes a checkpoint.".into())
        }
        (None, _) if run.summary.is_some() => (Mark::Open, "The run has ended.".into()),
        (None, _) if !has_files => (Mark::Open, "The run has not begun.".into()),
        (None, Writer::Unknown) => (Mark::Open, "The run has not ended.".into()),
        (None, Writer::Absent) => {
            let (done, _) = run.steps();
            let newest_checkpoint = checkpoint::list(&run.path.join("checkpoints")).unwrap_or_default().pop();
            let reason = match newest_checkpoint.is_some_and(|(step, _)| step == done) {
                true => format!("The run stopped after step {done}, with a checkpoint."),
                false => "No process of yours on this machine writes this run: it failed or it was killed.".into(),
            };
            (Mark::Attention, format!("{reason} Go on with `roll run --resume {path}`."))
        }
    };
    let button = can_stop_runs && matches!(writer, Writer::Running(_));
    let has_writer = matches!(writer, Writer::Running(_) | Writer::Stopping);
    let (done, wanted) = run.steps();
    // Without the number of steps, the page has no bar.
    let steps = if has_writer { wanted } else { None };
    context! { name => run.name, mark, text, button, done, steps }
}

/// The progress of a run in words: "step 3 of 60, 57.0 s left without evaluations, at most 1.2 GB of host memory".
fn progress(run: &RunFiles, memory: Option<u64>) -> String {
    let (done, wanted) = run.steps();
    let mut parts = match (done, wanted) {
        (0, Some(wanted)) => vec![format!("none of {} is done yet", counted(wanted, "step"))],
        (0, None) => vec!["no step is done yet".into()],
        (done, Some(wanted)) => vec![format!("step {done} of {wanted}")],
        (done, None) => vec![format!("step {done}")],
    };
    let (_, seconds_per_step) = timing::phases(run);
    let seconds_left = wanted.unwrap_or(done).saturating_sub(done) as f64 * seconds_per_step;
    if seconds_left > 0.0 {
        parts.push(format!("{} left without evaluations", duration(seconds_left)));
    }
    parts.extend(memory.map(|bytes| format!("at most {:.1} GB of host memory", bytes as f64 / 1e9)));
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(run: &Path, writer: Writer, can_stop_runs: bool) -> String {
        let live = Live {
            version: "v1",
            nonce: "a1",
            token: "t",
            can_stop_runs,
            voting: can_stop_runs.then_some("/v?t"),
            writers: &[writer],
        };
        page(&[run.to_path_buf()], &live).unwrap()
    }

    #[test]
    fn the_state_of_a_run_follows_from_its_files_and_its_process() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("a b");
        let page = shown(&run, Writer::Absent, true);
        for part in ["The run has not begun.", ": 0 steps in 0 s,", "Too early to tell."] {
            assert!(page.contains(part) && !page.contains("no headline metric"), "no {part} in {page}");
        }
        std::fs::create_dir(&run).unwrap();
        std::fs::write(run.join("config.yaml"), "steps: 5\n").unwrap();
        let page = shown(&run, Writer::Running(None), true);
        assert!(page.contains("The run goes on: none of 5 steps is done yet.") && page.contains("data-run="), "{page}");
        std::fs::write(run.join("metrics.jsonl"), "{\"step\":2,\"time/total\":2.0}\n").unwrap();
        let page = shown(&run, Writer::Running(Some(1_500_000_000)), false);
        let sentence = "The run goes on: step 2 of 5, 6.0 s left without evaluations, at most 1.5 GB of host memory.";
        assert!(page.contains(sentence) && !page.contains("data-run="), "{page}");
        let page = shown(&run, Writer::Stopping, true);
        assert!(page.contains("The run was asked to stop") && !page.contains("data-run="), "{page}");
        assert!(shown(&run, Writer::Unknown, true).contains("The run has not ended."));
        let page = shown(&run, Writer::Absent, true);
        assert!(page.contains("it failed or it was killed. Go on with <code>roll run --resume &#x27;"), "{page}");
        std::fs::create_dir_all(run.join("checkpoints/step-000002")).unwrap();
        let page = shown(&run, Writer::Absent, true);
        assert!(page.contains("The run stopped after step 2, with a checkpoint. Go on with"), "{page}");
        std::fs::write(run.join("summary.json"), "{}").unwrap();
        assert!(shown(&run, Writer::Absent, true).contains("The run has ended."));
        assert!(shown(&run, Writer::Running(None), true).contains("The run goes on: step 2"), "it was resumed");
    }

    #[test]
    fn a_page_carries_its_version_and_its_nonce_and_a_report_neither() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("run");
        std::fs::create_dir(&run).unwrap();
        std::fs::write(run.join("config.yaml"), "steps: 5\n").unwrap();
        let page = shown(&run, Writer::Absent, false);
        for part in ["<body data-version=\"v1\">", "<style nonce=a1>", "<script nonce=a1>"] {
            assert_eq!(page.matches(part).count(), 1, "{part} in {page}");
        }
        assert_eq!((page.matches("<script").count(), page.matches("<style").count()), (1, 1), "{page}");
        super::super::write(&dir.path().join("report.html"), &[run]).unwrap();
        let report = std::fs::read_to_string(dir.path().join("report.html")).unwrap();
        assert!(
            report.contains("<body>\n<h1>") && report.contains("<style>") && report.contains("<script>"),
            "{report}"
        );
        assert!(!report.contains("live"), "{report}");
    }

    #[test]
    fn a_run_that_cannot_be_read_is_shown_with_the_reason() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("samples/step-000001");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(dir.path().join("metrics.jsonl"), "no <b>json\n").unwrap();
        let page = shown(dir.path(), Writer::Absent, false);
        assert!(page.contains("The run cannot be read: ") && page.contains("line 1 is no JSON object"), "{page}");
        std::fs::write(dir.path().join("metrics.jsonl"), "").unwrap();
        std::fs::create_dir(folder.join("sample-0.mp4")).unwrap();
        assert!(shown(dir.path(), Writer::Absent, false).contains("The run cannot be read: "));
    }

    #[test]
    fn the_version_changes_with_the_files_of_a_run() {
        let dir = tempfile::tempdir().unwrap();
        let runs = [dir.path().join("run")];
        let mut versions = vec![version(&runs)];
        std::fs::create_dir_all(runs[0].join("samples/before")).unwrap();
        for (file, text) in [("metrics.jsonl", "a"), ("metrics.jsonl", "ab"), ("samples/before/0.mp4", "")] {
            std::fs::write(runs[0].join(file), text).unwrap();
            versions.push(version(&runs));
        }
        assert!(versions.windows(2).all(|pair| pair[0] != pair[1]), "{versions:?}");
        std::fs::write(runs[0].join("samples/before/.1.mp4.tmp"), "half").unwrap();
        assert_eq!(Some(&version(&runs)), versions.last());
    }
}
