//! Metadata of a data set: which clip belongs to which prompt, from a table, a JSON list, or a directory of clips with
//! captions; or prompts alone.

mod columns;
mod folder;
mod json;
mod prompts;
mod table;

use std::collections::HashMap;
use std::fmt::Display;
use std::io::Read;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use roll_core::{Columns, Error, Result, ResultExt, nearest};
use roll_external::files;
use roll_media::{Decoder, Probed, is_picture, probe};

use super::config::{DataConfig, OnBadSample};

pub use columns::RowColumns;

/// Maximum size of a metadata file: half a million rows of a few hundred bytes.
const MAX_BYTES: u64 = 256 << 20;
/// The column or key of the clip.
const VIDEO: &str = "video";
/// The columns or keys that `roll` itself reads. All others are for rewards.
const COLUMNS: [&str; 7] = [VIDEO, "prompt", "image", "input_image", "end_image", "weight", MASK];
/// The columns or keys of pictures. `input_image` is another name of `image`.
const IMAGES: [&str; 3] = ["image", "input_image", "end_image"];
/// The column or key of the mask of the clip.
const MASK: &str = "mask";
/// Number of bytes by which two files of the same length are compared.
const HEAD_BYTES: u64 = 64 << 10;
/// Maximum size of a prompt; typical ones have a few hundred bytes, and a text encoder reads about a thousand.
const MAX_PROMPT_BYTES: usize = 1 << 20;

/// A part of a clip.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Number among the windows of the clip, from 0.
    pub number: usize,
    /// Number of the first frame, from 0; at the rate `data.fps` if it is set.
    pub first: usize,
    /// Number of frames.
    pub frames: usize,
}

/// One row; paths are resolved.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MetadataRow {
    /// Line of the file, or number of the object in a JSON list, from 1; 0 for a clip of a directory.
    pub line: u64,
    /// The prompt; empty without one.
    pub prompt: String,
    /// The reason why a clip of a directory has no prompt. Reading such a row is an error, like a damaged file.
    pub no_prompt: Option<String>,
    /// The clip: a video file, an image, or a directory of images. `None` if the row has only a prompt, or a prompt and
    /// a picture.
    pub video: Option<PathBuf>,
    /// Column `image` or `input_image`.
    pub image: Option<PathBuf>,
    /// Column `end_image`.
    pub end_image: Option<PathBuf>,
    /// Column `weight`: the factor of the row's loss, if one is set.
    pub weight: Option<f64>,
    /// Column `mask`: which pixels of the clip count in a loss on the clip. A picture for all frames, or a video file
    /// or directory of images with one frame per frame of the clip.
    pub mask: Option<PathBuf>,
    /// All other columns that are not empty, for rewards.
    pub columns: Columns,
    /// The part of the clip that is this sample, if the clip has several.
    pub window: Option<Window>,
}

impl MetadataRow {
    /// The files that the row names.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        [&self.video, &self.image, &self.end_image, &self.mask].into_iter().flatten().map(PathBuf::as_path)
    }

    /// Whether the row is the first window of its clip, or the whole clip.
    pub fn is_first_window(&self) -> bool {
        self.window.is_none_or(|window| window.number == 0)
    }
}

/// A metadata file, or a directory of clips.
#[derive(Clone, Debug, PartialEq)]
pub struct Metadata {
    /// The file or directory.
    pub path: PathBuf,
    /// The rows, in order; at least one.
    pub rows: Vec<MetadataRow>,
}

impl Metadata {
    /// Reads the table or directory that `config` names. With `on_bad_sample: error`, a missing file or caption is an
    /// error now instead of after hours of training. With `skip`, the row is skipped when it is read.
    pub fn open(config: &DataConfig) -> Result<Self> {
        let Some(path) = &config.metadata else {
            return Err(Error::config(
                "data.metadata",
                "not set; it is the path of a table of clips (metadata.csv), of a directory of clips with captions, or \
                 of a text file of prompts (prompts.txt)",
            ));
        };
        let metadata = Self::read_rows(path, config.base_path.as_deref(), config.on_bad_sample)?;
        if config.on_bad_sample == OnBadSample::Error {
            for row in &metadata.rows {
                for file in row.files() {
                    std::fs::metadata(file)
                        .map_err(Error::file("read", file))
                        .while_doing(|| format!("reading {}", metadata.location(row)))?;
                }
            }
        }
        Ok(metadata)
    }

    /// Reads the file at `path`: CSV with commas, semicolons or tabs, JSON with one object per line, a JSON list of
    /// objects, or (`.txt`) one prompt per line. Relative paths start at `base`, by default the directory of the file.
    ///
    /// Requires the column (key) `prompt`, also uses `video`, `image` (or `input_image`), `end_image`, `weight` and
    /// `mask`; others are for rewards. A row without a `video` is a prompt, perhaps with a picture. In JSON, `video`
    /// may be a list: several clips with one prompt, one row each.
    ///
    /// If `path` is a directory, the rows are its videos, sorted by name; the prompt of `a.mp4` is the text of `a.txt`,
    /// and a video without one is an error.
    pub fn read(path: impl AsRef<Path>, base: Option<&Path>) -> Result<Self> {
        Self::read_rows(path.as_ref(), base, OnBadSample::Error)
    }

    fn read_rows(path: &Path, base: Option<&Path>, on_bad_sample: OnBadSample) -> Result<Self> {
        if path.is_dir() {
            return Ok(Self { path: path.into(), rows: folder::rows(path, on_bad_sample)? });
        }
        let text = text_of(path, MAX_BYTES, "metadata")?;
        let text = text.trim_start_matches('\u{feff}'); // spreadsheets write a byte order mark
        let base = base.map(Path::to_path_buf).unwrap_or_else(|| path.parent().unwrap_or(Path::new("")).to_path_buf());
        let rows = match text.trim_start().as_bytes().first() {
            _ if has_prompt_lines(path, text.trim_start()) => prompts::rows(path, text)?,
            Some(b'{') => json::lines(path, text, &base)?,
            Some(b'[') => json::list(path, text, &base)?,
            _ => table::rows(path, text, &base)?,
        };
        if let Some(row) = rows.iter().find(|row| row.prompt.len() > MAX_PROMPT_BYTES) {
            let length = row.prompt.len();
            let problem = format!("line {}: a prompt of {length} bytes, more than {MAX_PROMPT_BYTES}", row.line);
            return Err(Error::bad_file(path, problem));
        }
        let without_prompt: Vec<_> = rows.iter().filter(|row| row.prompt.trim().is_empty()).collect();
        if let Some(first) = without_prompt.first() {
            let (count, total) = (without_prompt.len(), rows.len());
            tracing::warn!(
                "{}: {count} of {total} prompts are empty, the first in line {}",
                path.display(),
                first.line
            );
        }
        Ok(Self { path: path.into(), rows })
    }

    /// Position of `row` for messages: "metadata.csv line 3 (clips/a.mp4, frames 40 to 120)".
    pub fn location(&self, row: &MetadataRow) -> String {
        let (table, line) = (self.path.display(), row.line);
        let last = |window: &Window| window.first + window.frames - 1;
        let frames = row.window.as_ref().map(|window| format!(", frames {} to {}", window.first, last(window)));
        let frames = frames.unwrap_or_default();
        match &row.video {
            Some(video) if line == 0 => format!("{}{frames}", video.display()),
            Some(video) => format!("{table} line {line} ({}{frames})", video.display()),
            None => format!("{table} line {line}"),
        }
    }

    /// The rows, among the first `count`, that `other` also has. Two rows are equal if their prompts are equal, and if
    /// their clips and their pictures are the same files, or files of the same length and the same first bytes.
    pub fn rows_in(&self, other: &Self, count: usize) -> Vec<&MetadataRow> {
        // Rows with different keys are not equal. Only rows with the same key are compared by their files' contents.
        let comparison_key = |row: &MetadataRow| {
            let lengths = [&row.video, &row.image].map(|file| file.as_deref().map(length));
            (row.prompt.trim().to_string(), lengths)
        };
        let mut others_by_key: HashMap<_, Vec<&MetadataRow>> = HashMap::new();
        for row in other.rows.iter().filter(|row| row.is_first_window()) {
            others_by_key.entry(comparison_key(row)).or_default().push(row);
        }
        let has_equal_files = |row: &MetadataRow, other: &MetadataRow| {
            let pairs = [(&row.video, &other.video), (&row.image, &other.image)];
            pairs.into_iter().all(|pair| match pair {
                (Some(a), Some(b)) => a == b || head(a).is_some_and(|h| head(b) == Some(h)),
                // Neither row has the file, because their keys are equal.
                _ => true,
            })
        };
        let is_in_other = |row: &&MetadataRow| {
            let mut candidates = others_by_key.get(&comparison_key(row)).into_iter().flatten();
            candidates.any(|candidate| has_equal_files(row, candidate))
        };
        self.rows.iter().take(count).filter(is_in_other).collect()
    }

    /// Probes the first `count` clips. Clips that cannot be read are left out of the result.
    pub fn probe_clips(&self, decoder: Decoder, count: usize) -> Vec<(&Path, Probed)> {
        let rows = self.rows.iter().filter(|row| row.is_first_window());
        let clips: Vec<&PathBuf> = rows.filter_map(|row| row.video.as_ref()).take(count).collect();
        clips.par_iter().filter_map(|clip| Some((clip.as_path(), probe(clip, decoder).ok()?))).collect()
    }

    /// The first row, among the first `count`, whose `video` is the file of a picture.
    pub fn picture_as_clip(&self, count: usize) -> Option<&MetadataRow> {
        self.rows.par_iter().take(count).find_first(|row| row.video.as_deref().is_some_and(is_picture))
    }
}

/// Number of bytes of a file; 0 for a file that cannot be read.
fn length(path: &Path) -> u64 {
    std::fs::metadata(path).map_or(0, |metadata| metadata.len())
}

/// The first bytes of a file; `None` for an empty file, a directory of frames, and a file that cannot be read.
fn head(path: &Path) -> Option<Vec<u8>> {
    let mut head = Vec::new();
    files::open_binary(path).ok()?.take(HEAD_BYTES).read_to_end(&mut head).ok()?;
    (!head.is_empty()).then_some(head)
}

/// Fails unless `weight` can be a factor of a loss. `found` is the text of the weight in the file.
fn checked_weight(weight: Option<f64>, found: impl Display) -> Result<f64, String> {
    let weight = weight.filter(|weight| weight.is_finite() && *weight > 0.0);
    weight.ok_or_else(|| format!("`weight`: expected a number above 0, found {found}"))
}

/// Whether a file has one prompt per line: a `.txt` whose `text` is neither JSON nor a table.
fn has_prompt_lines(path: &Path, text: &str) -> bool {
    let is_txt = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("txt"));
    let begins_with =
        |open: char, next: [char; 2]| text.strip_prefix(open).is_some_and(|rest| rest.trim_start().starts_with(next));
    let is_json = begins_with('{', ['"', '}']) || begins_with('[', ['{', ']']);
    is_txt && !is_json && !table::names_columns(text)
}

/// The text of a file. Fails if the file has more than `max_bytes` or is not UTF-8. `what` describes the file in
/// errors.
fn text_of(path: &Path, max_bytes: u64, what: &str) -> Result<String> {
    let size = std::fs::metadata(path).map_err(Error::file("read the metadata", path))?.len();
    if size > max_bytes {
        return Err(Error::bad_file(path, format!("{size} bytes are too many for {what} (at most {max_bytes})")));
    }
    let bytes = files::read(path, max_bytes).map_err(Error::file("read the metadata", path))?;
    String::from_utf8(bytes).map_err(|e| Error::bad_file(path, format!("not UTF-8: {}", e.utf8_error())))
}

/// A column or key that is probably a misspelt `video`.
fn misspelt_video<'a>(found: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    found.into_iter().find(|name| *name != VIDEO && nearest(VIDEO, [*name]).is_some())
}

/// Lists the columns or keys that were found where `name` is missing, with a hint at a similar one.
fn listed(found: &[&str], name: &str) -> String {
    let names = match found {
        [] => "no columns".into(),
        names => names.iter().map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", "),
    };
    let hint = nearest(name, found.iter().copied()).map(|h| format!("; is `{h}` meant?")).unwrap_or_default();
    names + &hint
}

#[cfg(test)]
mod tests {
    use roll_core::serde_json;

    use super::*;

    fn read(text: &str) -> Result<Metadata> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metadata.csv");
        std::fs::write(&path, text).unwrap();
        Metadata::read(&path, Some(Path::new("base")))
    }

    fn video_of(row: &MetadataRow) -> &str {
        row.video.as_deref().and_then(Path::to_str).unwrap_or("none")
    }

    #[test]
    fn a_row_without_a_video_is_a_prompt_in_every_format() {
        let rows = |name: &str, text: &str| {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            let metadata = Metadata::read(&path, Some(Path::new("base"))).unwrap();
            let location = metadata.location(&metadata.rows[0]);
            assert!(location.ends_with(&format!("{name} line {}", metadata.rows[0].line)), "{location}");
            let row = |row: MetadataRow| (row.line, video_of(&row).to_string(), row.prompt, row.image.is_some());
            metadata.rows.into_iter().map(row).collect::<Vec<_>>()
        };
        let row = |line, prompt: &str, image| (line, "none".to_string(), prompt.to_string(), image);
        let two = [row(1, "a man, talking", false), row(3, "{red|blue} \"balls\"", false)];
        assert_eq!(rows("prompts.txt", "\u{feff}a man, talking\r\n\n {red|blue} \"balls\" \n"), two);
        assert_eq!(rows("prompts.txt", "{red|blue} balls\n")[0], row(1, "{red|blue} balls", false));
        assert_eq!(rows("prompts.csv", "prompt\na man\na dog\n"), [row(2, "a man", false), row(3, "a dog", false)]);
        assert_eq!(
            rows("m.csv", "video,prompt,image\n,a man,i.png\n,a dog,\n"),
            [row(2, "a man", true), row(3, "a dog", false)]
        );
        let lines = "{\"prompt\": \"a man\", \"tag\": \"color\"}\n{\"prompt\": \"a dog\", \"image\": \"i.png\", \"video\": null}\n";
        let expected = [row(1, "a man", false), row(2, "a dog", true)];
        assert_eq!(rows("train_metadata.jsonl", lines), expected);
        assert_eq!(rows("list.txt", lines), expected, "JSON may have any name");
        assert_eq!(rows("list.json", "[{\"prompt\": \"a man\", \"video\": []}]"), [row(1, "a man", false)]);
        assert_eq!(rows("table.txt", "video,prompt\n,a man\n"), [row(2, "a man", false)], "a table may have any name");
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("empty.txt");
        std::fs::write(&path, " \n").unwrap();
        assert!(Metadata::read(&path, None).unwrap_err().to_string().contains("one per line"));
    }

    #[test]
    fn relative_paths_start_at_the_base() {
        let metadata =
            read("\u{feff}prompt, video,end_image,score\n\"a man, talking\",a/b.mp4,,1\nx,/c.gif,e.png,2\n").unwrap();
        assert_eq!(metadata.rows[0].prompt, "a man, talking");
        assert_eq!(metadata.rows[0].video.as_deref(), Some(Path::new("base/a/b.mp4")));
        assert_eq!((metadata.rows[0].end_image.as_ref(), metadata.rows[0].line), (None, 2));
        assert_eq!(metadata.rows[1].video.as_deref(), Some(Path::new("/c.gif")));
        assert_eq!(metadata.rows[1].end_image.as_deref(), Some(Path::new("base/e.png")));
        let metadata = read("video,prompt,input_image\na,b,c.png\n").unwrap();
        assert_eq!(metadata.rows[0].image.as_deref(), Some(Path::new("base/c.png")));
    }

    #[test]
    fn other_columns_are_kept_for_rewards() {
        let columns = |text: &str| -> Vec<String> {
            read(text).unwrap().rows.iter().map(|row| serde_json::to_string(&*row.columns).unwrap()).collect()
        };
        let table = "prompt,answer,video,weight,level\nbird,blue,a,2,1\ncat,,b,,\n";
        assert_eq!(columns(table), [r#"{"answer":"blue","level":"1"}"#, "{}"]);
        let lines = r#"{"prompt": "p", "video": ["a", "b"], "answer": null, "objects": [{"count": 2}], "weight": 1}"#;
        assert_eq!(columns(lines), [r#"{"objects":[{"count":2}]}"#; 2]);
    }

    #[test]
    fn weights_are_numbers_above_zero() {
        let weights = |text: &str| -> Vec<_> { read(text).unwrap().rows.iter().map(|row| row.weight).collect() };
        assert_eq!(weights("video,prompt,weight\na,b,2\na,b,\na,b,0.5\n"), [Some(2.0), None, Some(0.5)]);
        assert_eq!(weights("{\"prompt\": \"a\", \"weight\": 3, \"video\": [\"b\", \"c\"]}\n"), [Some(3.0); 2]);
        assert_eq!(weights("{\"prompt\": \"a\"}\n{\"prompt\": \"a\", \"weight\": null}\n"), [None; 2]);
        let told = |text: &str| read(text).unwrap_err().to_string();
        for bad in ["0", "-1", "x", "nan", "inf"] {
            let message = told(&format!("prompt,weight,video\nb,1,a\nb,{bad},a\n"));
            assert!(message.contains("line 3: `weight`") && message.ends_with(&format!("found {bad}")), "{message}");
        }
        assert!(
            told("{\"prompt\": \"a\", \"weight\": \"2\"}\n").contains("line 1: `weight`: expected a number above 0")
        );
    }

    #[test]
    fn rejects_oversized_prompts_in_every_format() {
        let long = "x".repeat(MAX_PROMPT_BYTES + 1);
        let tables = [
            format!("video,prompt\na,b\nc,{long}\n"),
            format!("{{\"video\": \"a\", \"prompt\": \"b\"}}\n{{\"video\": \"a\", \"prompt\": \"{long}\"}}\n"),
            format!("[{{\"video\": \"a\", \"prompt\": \"b\"}}, {{\"video\": \"a\", \"prompt\": \"{long}\"}}]"),
        ];
        for table in tables {
            let told = read(&table).unwrap_err().to_string();
            assert!(told.contains("a prompt of 1048577 bytes"), "{told}");
        }
        assert_eq!(read(&format!("video,prompt\na,{}\n", &long[1..])).unwrap().rows.len(), 1);
    }

    #[test]
    fn errors_name_missing_columns_and_files() {
        let told = |text: &str| read(text).unwrap_err().to_string();
        let message = told("video,promt\na,b\n");
        assert!(message.contains("no column `prompt`") && message.contains("`promt`"), "{message}");
        assert!(told("vidoe,prompt\na,b\n").contains("no column `video`; the first line names `vidoe`"));
        assert!(told("").contains("no columns") || told("").contains("no column"));
        assert!(told("video,prompt\n").contains("no rows"));
        assert!(told("video,prompt\na,b, c\n").contains("quotes"));
        let open = told("video,prompt\na,\"a \"\"man\"\"\"\nb,\"a dog\nc,a cat\n");
        assert!(open.contains("line 3") && open.contains("never closed"), "{open}");
        assert_eq!(read("video,prompt\na,a 5\" disk\nb,\"a\n\"\"dog\"\"\"\n").unwrap().rows[1].prompt, "a\n\"dog\"");
        assert!(Metadata::read("/nowhere/metadata.csv", None).is_err());
    }

    #[test]
    fn columns_may_be_separated_by_semicolons_or_tabs() {
        for text in ["video;prompt;score\na.mp4;a man, and a dog;1\n", "prompt\tvideo\na man, and a dog\ta.mp4\n"] {
            let metadata = read(text).unwrap();
            assert_eq!(metadata.rows[0].prompt, "a man, and a dog");
            assert_eq!(metadata.rows[0].video.as_deref(), Some(Path::new("base/a.mp4")));
        }
        // A comma in a column name does not make it the separator.
        assert_eq!(read("video\tprompt\t\"a, b\"\nc\td\te\n").unwrap().rows[0].prompt, "d");
    }

    #[test]
    fn json_list_may_span_lines() {
        let metadata =
            read("[\n {\"video\": [\"a\", \"b\"],\n \"prompt\": \"p\"}, {\"prompt\": \"q\", \"video\": \"c\"}]")
                .unwrap();
        let rows: Vec<_> = metadata.rows.iter().map(|r| (r.line, video_of(r), r.prompt.as_str())).collect();
        assert_eq!(rows, [(1, "base/a", "p"), (1, "base/b", "p"), (2, "base/c", "q")]);
        let told = |text: &str| read(text).unwrap_err().to_string();
        assert!(
            told("[{\"video\": \"a\", \"prompt\": \"b\"}, {\"video\": \"a\"}]").contains("object 2: no key `prompt`")
        );
        assert!(told("[3]").contains("JSON list of objects") && told("[]").contains("an empty list"));
        assert!(told("{\"video\": \"a\",\n\"prompt\": \"b\"}").contains("need a list"));
    }

    #[test]
    fn directory_lists_videos_with_captions() {
        let dir = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        let told = || Metadata::read(dir.path(), None).unwrap_err().to_string();
        put("notes.txt", "no caption");
        assert!(
            told().contains("without videos") && told().contains("JSON lines") && told().contains(".txt"),
            "{}",
            told()
        );
        put("b.MP4", "");
        put("a.webm", "");
        put("a.txt", "\u{feff}a man,\nand a dog\n");
        assert!(told().contains("1 of its 2 videos") && told().contains("b.txt"), "{}", told());
        put("metadata.csv", "");
        assert!(told().contains("metadata.csv is there: name that file"), "{}", told());
        let skipping =
            DataConfig { metadata: Some(dir.path().into()), on_bad_sample: OnBadSample::Skip, ..DataConfig::default() };
        let rows = Metadata::open(&skipping).unwrap().rows;
        assert_eq!((rows.len(), &rows[0].no_prompt), (2, &None));
        assert!(rows[1].no_prompt.as_ref().is_some_and(|why| why.contains("b.txt")), "{rows:?}");
        put("b.txt", " a cat ");
        let metadata = Metadata::read(dir.path(), None).unwrap();
        let rows: Vec<_> = metadata.rows.iter().map(|row| (row.video.clone(), row.prompt.as_str())).collect();
        let [first, second] = ["a.webm", "b.MP4"].map(|name| Some(dir.path().join(name)));
        assert_eq!(rows, [(first, "a man, and a dog"), (second, "a cat")]);
        assert_eq!(metadata.location(&metadata.rows[0]), dir.path().join("a.webm").display().to_string());
    }

    #[test]
    fn pictures_are_the_clips_of_a_directory_without_videos() {
        let dir = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        for name in ["b.jpg", "a.PNG"] {
            put(name, "");
            put(&name.to_lowercase().replace(".png", ".txt").replace(".jpg", ".txt"), name);
        }
        let names = || {
            let rows = Metadata::read(dir.path(), None).unwrap().rows;
            let name = |row: &MetadataRow| row.video.as_ref()?.file_name()?.to_str().map(str::to_string);
            rows.iter().filter_map(name).collect::<Vec<_>>()
        };
        assert_eq!(names(), ["a.PNG", "b.jpg"]);
        // Next to a video, a picture may be its preview.
        put("c.mp4", "");
        put("c.txt", "a clip");
        assert_eq!(names(), ["c.mp4"]);
    }

    #[test]
    fn json_lines_may_name_several_clips_per_prompt() {
        let metadata = read(
            "{\"prompt\": \"a man\\nand a dog\", \"video\": [\"a.mp4\", \"/b.mp4\"], \"image\": \"i.png\", \"score\": 1}\n\n\
             {\"video\": \"c.gif\", \"prompt\": \"\", \"image\": null, \"end_image\": \"e.png\"}\n",
        )
        .unwrap();
        let videos: Vec<_> = metadata.rows.iter().map(|r| (r.line, video_of(r))).collect();
        assert_eq!(videos, [(1, "base/a.mp4"), (1, "/b.mp4"), (3, "base/c.gif")]);
        assert_eq!((metadata.rows[1].prompt.as_str(), metadata.rows[2].prompt.as_str()), ("a man\nand a dog", ""));
        assert_eq!(metadata.rows[1].image.as_deref(), Some(Path::new("base/i.png")));
        assert_eq!((&metadata.rows[2].image, metadata.rows[2].end_image.is_some()), (&None, true));
        let told = |text: &str| read(text).unwrap_err().to_string();
        assert!(told("{\"video\": \"a\", \"promt\": \"b\"}").contains("is `promt` meant?"));
        assert!(told("{\"vidoe\": \"a\", \"prompt\": \"b\"}").contains("is `vidoe` meant?"));
        assert!(told("{\"video\": 3, \"prompt\": \"b\"}").contains("expected a string, found 3"));
        assert!(told("{\"video\": \"a\", \"prompt\": \"b\"}\n{\"video\"").contains("line 2"));
    }
}
