//! `roll data`: lists the contents of a data set, writes them as training would see them, and exports votes.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Component, Path};
use std::sync::Arc;

use roll_core::{BuildContext, Error, Registry, Result, RewardScorer, Sample, SampleVideo, Tensor, Video, VideoUnit};
use roll_external::files::write_atomically;
use roll_media::{Picture, Probed, encode_png, format, probe, write_mp4, write_pngs};
use roll_rewards::insightface::FaceNetworks;
use roll_rewards::vote::files::{Answer, Question, Votes};
use roll_train::config::LoadedConfig;
use roll_train::progress::{Bar, counted};
use roll_train::reward;
use roll_video::rows::{DataConfig, Dataset, OnBadSample};
use roll_video::task::{clip_notes, counted_rows, row_noun};
use serde_json::json;

use super::check::model_files;
use super::{caption, face_crop};
use crate::args::{self, Crop, Data, DataAction, DataSet, InspectData, PrepareData};
use crate::configuration::{Configuration, build_context};
use crate::output::{controls_terminal, refuse_existing};
use crate::progress::TerminalBar;

/// At most this many left-out rows are listed.
const MAX_LISTED: usize = 50;
/// The frame rate of a video that is written as pictures, which have none.
const PICTURE_RATE: f64 = 1.0;

pub fn data(args: Data) -> Result<()> {
    match args.action {
        DataAction::Inspect(args) => inspect(args),
        DataAction::Prepare(args) => prepare(args),
        DataAction::Caption(args) => caption::caption(args),
        DataAction::Votes(args) => votes(args),
    }
}

/// Writes the votes of a run as JSON lines: a line for each question that has an answer, in the order of the questions.
fn votes(args: args::Votes) -> Result<()> {
    refuse_existing(&args.output, args.force)?;
    let votes = Votes(args.run.clone());
    let mut lines = String::new();
    // A question has a time, an id, and whether it has an answer.
    for (_, id, _) in votes.questions()? {
        let chosen = match votes.answer(&id)? {
            Answer::Open => continue,
            Answer::Invalid(problem) => {
                tracing::warn!("{problem}: left out, this is no vote");
                continue;
            }
            Answer::Equal => None,
            Answer::Clip(position) => Some(position),
        };
        let Question { prompt, question, clips, reference } = votes.question(&id)?;
        let clips = clips.iter().map(|clip| votes.clip(clip)).collect::<Result<Vec<_>>>()?;
        let chosen = chosen.map(|position| &clips[position]);
        let mut line = json!({ "prompt": prompt, "question": question, "clips": clips, "chosen": chosen });
        if let Some(picture) = reference {
            line["reference"] = json!(votes.clip(&picture)?);
        }
        lines += &format!("{line}\n");
    }
    if lines.is_empty() {
        return Err(Error::bad_file(
            &args.run,
            "holds no votes: expected the directory of a run with the reward `vote`",
        ));
    }
    write_atomically(&args.output, lines.as_bytes())?;
    println!("{}", counted(lines.lines().count() as u64, "vote"));
    Ok(())
}

/// The data and the reward of a run.
struct OpenedData {
    /// Skips bad samples, whatever the configuration says.
    dataset: Dataset,
    reward: Option<Box<dyn RewardScorer>>,
    loaded: LoadedConfig,
    registry: Registry,
}

/// Opens the data that `args` name, with the configured reward if there is one.
fn open(args: &DataSet) -> Result<OpenedData> {
    let configuration = Configuration::read(&args.config, &[])?;
    let registry = configuration.registry()?;
    let loaded = configuration.load(&registry)?;
    let config = DataConfig {
        metadata: Some(args.path.clone()),
        on_bad_sample: OnBadSample::Skip,
        // Each clip is read once.
        cache_bytes: 0,
        ..loaded.section()?
    };
    let side = usize::from(args.unit);
    let unit = VideoUnit { height: side, width: side, ..VideoUnit::default() };
    let reward = reward(&loaded, &registry, &build_context(&loaded))?;
    Ok(OpenedData { dataset: Dataset::open(&config, unit)?, reward, loaded, registry })
}

/// The frame rate of the videos that the model was trained on, if its files are there.
fn frame_rate(loaded: &LoadedConfig, registry: &Registry) -> Option<f64> {
    let context = BuildContext { headers_only: true, ..build_context(loaded) };
    let files = model_files(loaded, registry, &context).ok().flatten()?;
    if files.missing.is_some() {
        return None;
    }
    let config = &loaded.config.model;
    let mut model = registry.model(&config.name, &config.options, &context).ok()?;
    model.as_diffusion()?.frame_rate()
}

/// Counts over the rows of a data set.
#[derive(Default, serde::Serialize)]
struct DataSummary {
    clips: usize,
    /// Rows without a clip.
    prompts: usize,
    /// Rows that training can use.
    usable: usize,
    /// Clips of each file format.
    formats: BTreeMap<String, usize>,
    /// Clips of each size in their files.
    sizes: BTreeMap<String, usize>,
    /// Clips of each number of frames in their files.
    lengths: BTreeMap<usize, usize>,
    /// Clips of each frame rate in their files.
    rates: BTreeMap<String, usize>,
    /// Videos of each length and size, as training would see them.
    taken: BTreeMap<String, usize>,
    /// The rows that cannot be used, each with the reason.
    left_out: Vec<(String, String)>,
}

impl DataSummary {
    /// Counts a clip by the facts of its file. `probed` is `None` if the file cannot be read.
    fn count_file(&mut self, format: &str, probed: Option<Probed>) {
        *self.formats.entry(format.into()).or_default() += 1;
        if let Some(Probed { size: [height, width], frames, fps }) = probed {
            *self.sizes.entry(format!("{width}x{height}")).or_default() += 1;
            *self.lengths.entry(frames).or_default() += 1;
            let rate = format!("{fps:.3}");
            let rate = rate.trim_end_matches('0').trim_end_matches('.');
            *self.rates.entry(rate.into()).or_default() += 1;
        }
    }

    /// Counts a row by the video that training would see, or as left out, with the name of the row and the reason.
    fn count_sample(&mut self, read: std::result::Result<Sample, (String, String)>) {
        match read {
            Ok(sample) => {
                let [frames, height, width] = sample.video.dims();
                *self.taken.entry(format!("{frames} frames of {width}x{height}")).or_default() += 1;
                self.usable += 1;
            }
            Err(left_out) => self.left_out.push(left_out),
        }
    }
}

/// Reads every row as a run would, and prints the counts. With a reward, a clip in which the reward finds nothing to
/// compare with is left out, too.
fn inspect(args: InspectData) -> Result<()> {
    let OpenedData { dataset, mut reward, loaded, registry } = open(&args.data)?;
    let bar = TerminalBar::new(dataset.len() as u64, "rows");
    let mut summary = DataSummary::default();
    for (i, row) in dataset.metadata().rows.iter().enumerate() {
        match &row.video {
            // A clip with several windows has a row for each, and is counted once.
            Some(_) if !row.is_first_window() => {}
            Some(video) => {
                summary.clips += 1;
                summary.count_file(format(video).unwrap_or("not there"), probe(video, dataset.config().decoder).ok());
            }
            None => summary.prompts += 1,
        }
        let mut read = dataset.sample_or_skip(i)?;
        if let (Some(reward), Ok(sample)) = (&mut reward, &read)
            && let Some(clip) = sample.video.clip()
            && let Err(error) = reward.prepare(clip)
        {
            let Some(reason) = error.missing_reason() else { return Err(error) };
            read = Err((sample.origin.clone(), reason.to_string()));
        }
        summary.count_sample(read);
        bar.set(i as u64 + 1);
    }
    bar.finish();
    let rate = frame_rate(&loaded, &registry);
    for note in clip_notes(dataset.metadata(), dataset.config(), rate).into_iter().flatten() {
        tracing::warn!("{note}");
    }
    match args.json {
        true => println!("{:#}", serde_json::json!(summary)),
        false => print(&summary, &counted_rows(dataset.metadata()), &args.data.path),
    }
    match summary.usable {
        0 => Err(Error::bad_file(&args.data.path, "no row of it can be used, for the reasons above")),
        _ => Ok(()),
    }
}

fn print(summary: &DataSummary, rows: &str, path: &Path) {
    println!("{}: {rows}, {} can be used", path.display(), summary.usable);
    print_table("format", &summary.formats);
    print_table("width x height", &summary.sizes);
    print_table("frames", &summary.lengths);
    print_table("frames a second", &summary.rates);
    print_table("taken as", &summary.taken);
    for (clip, reason) in summary.left_out.iter().take(MAX_LISTED) {
        println!("left out: {clip}: {reason}");
    }
    if summary.left_out.len() > MAX_LISTED {
        println!("and {} more", summary.left_out.len() - MAX_LISTED);
    }
}

/// Prints how often each value occurs, the most frequent first.
fn print_table(what: &str, counts: &BTreeMap<impl std::fmt::Display, usize>) {
    let mut counts: Vec<_> = counts.iter().collect();
    counts.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
    for (i, (value, count)) in counts.into_iter().enumerate() {
        println!("{:<16} {count:>7}  {value}", if i == 0 { what } else { "" });
    }
}

/// Writes the videos of all rows as training would see them, with a `metadata.jsonl`.
fn prepare(args: PrepareData) -> Result<()> {
    let out = &args.out;
    let OpenedData { dataset, loaded, .. } = open(&args.data)?;
    let faces = args.crop.map(|Crop::Face| face_crop::networks(&loaded, &build_context(&loaded))).transpose()?;
    if !args.data.config.trust {
        refuse_links_out(&dataset)?;
    }
    std::fs::create_dir_all(out).map_err(Error::file("create the directory", out))?;
    if std::fs::read_dir(out).map_err(Error::file("list", out))?.next().is_some() {
        return Err(Error::bad_file(out, "the directory is not empty; name one that is"));
    }
    let bar = TerminalBar::new(dataset.len() as u64, "rows");
    let (mut lines, mut left_out) = (String::new(), 0);
    for (i, row) in dataset.metadata().rows.iter().enumerate() {
        let read = match (&faces, dataset.sample_or_skip(i)?) {
            (Some(faces), Ok(sample)) => crop_to_face(faces, &dataset, i, sample)?,
            (_, read) => read,
        };
        match read {
            Ok(sample) => {
                // Files are named by the row's clip or picture.
                let stem = row.video.as_deref().or(row.image.as_deref()).and_then(Path::file_stem);
                let stem = stem.unwrap_or(OsStr::new("prompt")).to_string_lossy();
                let stem: String = stem.chars().map(|c| if controls_terminal(c) { '_' } else { c }).collect();
                lines += &write(out, &format!("{:05}-{stem}", i + 1), &sample)?;
            }
            Err((clip, reason)) => {
                left_out += 1;
                tracing::warn!("left out {clip}: {reason}");
            }
        }
        bar.set(i as u64 + 1);
    }
    bar.finish();
    let path = out.join("metadata.jsonl");
    write_atomically(&path, lines.as_bytes())?;
    let rows = counted((dataset.len() - left_out) as u64, row_noun(dataset.metadata()));
    println!("{}: {rows}, {left_out} left out", path.display());
    Ok(())
}

/// The sample of row `index` with its clip cropped around the face. The inner error is a row that is left out: its
/// origin and the reason.
fn crop_to_face(
    faces: &FaceNetworks,
    dataset: &Dataset,
    index: usize,
    sample: Sample,
) -> Result<std::result::Result<Sample, (String, String)>> {
    let [_, height, width] = sample.video.dims();
    if sample.video.clip().is_none() {
        return Ok(Ok(sample));
    }
    if sample.mask.is_some() {
        return Ok(Err((sample.origin, "its `mask` does not fit a crop: prepare such rows without `--crop`".into())));
    }
    Ok(match face_crop::around_face(faces, &dataset.clip_of_own_size(index)?, [height, width])? {
        Some(clip) => Ok(Sample { video: SampleVideo::Clip(Arc::new(clip)), ..sample }),
        None => Err((sample.origin, "no face was found in it".into())),
    })
}

/// Fails if a clip, a caption or a picture is a link that leads out of the directory of the data. The data may be
/// another person's, and the target of such a link would be copied and perhaps passed on.
fn refuse_links_out(dataset: &Dataset) -> Result<()> {
    let (metadata, base) = (dataset.metadata(), dataset.config().base_path.as_deref());
    let directory_of_metadata =
        if metadata.path.is_dir() { Some(metadata.path.as_path()) } else { metadata.path.parent() };
    let base = base.or(directory_of_metadata).unwrap_or(Path::new(""));
    let root = if base.as_os_str().is_empty() { Path::new(".") } else { base };
    let root = root.canonicalize().map_err(Error::file("read", root))?;
    for row in &metadata.rows {
        // A row of a directory has its prompt in a file beside the clip.
        let is_row_of_directory = row.line == 0;
        let caption = row.video.iter().filter(|_| is_row_of_directory).map(|video| video.with_extension("txt"));
        // A clip or a mask may be a directory of frames.
        let directories = [&row.video, &row.mask].into_iter().flatten();
        let frames = directories.flat_map(std::fs::read_dir).flatten().flatten().map(|entry| entry.path());
        for path in row.files().map(Path::to_path_buf).chain(caption).chain(frames) {
            // A path that leads out of the directory is seen in the metadata; where a link leads is not.
            let Ok(inside) = path.strip_prefix(base) else { continue };
            if inside.components().any(|part| part == Component::ParentDir) {
                continue;
            }
            if path.canonicalize().is_ok_and(|target| !target.starts_with(&root)) {
                let problem = "is a link that leads out of the directory, and what it names would be copied: put the file \
                               in its place, or trust the data with `--trust`";
                return Err(Error::bad_file(path, problem));
            }
        }
    }
    Ok(())
}

/// Writes clip, pictures and mask of a sample as files that begin with `name`. Returns the line of metadata that names
/// them.
fn write(out: &Path, name: &str, sample: &Sample) -> Result<String> {
    let mut line = serde_json::json!({});
    if let Some(clip) = sample.video.clip() {
        let file = format!("{name}.mp4");
        write_mp4(out.join(&file), clip)?;
        line["video"] = file.into();
    }
    line["prompt"] = sample.prompt.clone().into();
    for (column, value) in &*sample.columns {
        line[column] = value.clone();
    }
    if sample.weight != 1.0 {
        line["weight"] = sample.weight.into();
    }
    for (key, image) in [("image", &sample.image), ("end_image", &sample.end_image)] {
        if let Some(image) = image {
            let file = format!("{name}-{key}.png");
            write_atomically(&out.join(&file), &png(image)?)?;
            line[key] = file.into();
        }
    }
    if let Some(mask) = &sample.mask {
        line["mask"] = write_mask(out, name, mask)?.into();
    }
    Ok(format!("{line}\n"))
}

/// Writes a mask as a picture, or as a directory with one for each frame, without loss; returns its name.
fn write_mask(out: &Path, name: &str, mask: &Tensor) -> Result<String> {
    let &[frames, height, width] = mask.shape() else {
        return Err(Error::shape("a mask", "[T, H, W]", mask.shape()));
    };
    let (values, pixels) = (mask.f32s()?, height * width);
    let grey = values.chunks_exact(pixels).flat_map(|frame| std::iter::repeat_n(frame, 3));
    // Masks are in [0, 1], videos in [-1, 1].
    let grey = grey.flatten().map(|value| 2.0 * value - 1.0).collect();
    let video = Video::new(Tensor::new(grey, [frames, 3, height, width])?, PICTURE_RATE)?;
    if frames > 1 {
        let directory = format!("{name}-mask");
        write_pngs(out.join(&directory), &video)?;
        return Ok(directory);
    }
    let file = format!("{name}-mask.png");
    write_atomically(&out.join(&file), &encode_png(&Picture::from_frame(&video, 0))?)?;
    Ok(file)
}

/// The PNG of a picture `[3, H, W]` in [-1, 1].
fn png(image: &Tensor) -> Result<Vec<u8>> {
    let frame = image.reshape([&[1][..], image.shape()].concat())?;
    encode_png(&Picture::from_frame(&Video::new(frame, PICTURE_RATE)?, 0))
}
