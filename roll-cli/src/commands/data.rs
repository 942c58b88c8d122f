//! `roll data`: contents of a data set, and the same in files that every reader reads.

use std::collections::BTreeMap;
use std::path::Path;

use roll_core::{Error, Result, RewardScorer, Sample, Tensor, Video, VideoUnit};
use roll_data::{DataConfig, Dataset, OnBadSample, Picture, Probed, encode_png, format, probe, write_mp4};
use roll_train::progress::{Bar, counted};
use roll_train::reward;

use crate::args::{Data, DataAction, DataSet, InspectData, PrepareData};
use crate::configuration::{Configuration, build_context};
use crate::output::controls_terminal;
use crate::progress::TerminalBar;

/// Left-out clips that are named.
const NAMED: usize = 50;

/// Runs the command.
pub fn data(args: Data) -> Result<()> {
    match args.action {
        DataAction::Inspect(args) => inspect(args),
        DataAction::Prepare(args) => prepare(args),
    }
}

/// The data and the reward of a run; bad samples are skipped.
fn open(args: &DataSet) -> Result<(Dataset, Option<Box<dyn RewardScorer>>)> {
    let configuration = Configuration::read(&args.config, &[])?;
    let registry = configuration.registry()?;
    let loaded = configuration.load(&registry)?;
    let config = DataConfig {
        metadata: Some(args.path.clone()),
        on_bad_sample: OnBadSample::Skip,
        cache_bytes: 0,
        ..loaded.config.data.clone()
    };
    let side = usize::from(args.unit);
    let unit = VideoUnit { height: side, width: side, ..VideoUnit::default() };
    let reward = reward(&loaded, &registry, &build_context(&loaded))?;
    Ok((Dataset::open(&config, unit)?, reward))
}

/// Counts over the clips of a data set.
#[derive(Default, serde::Serialize)]
struct DataSummary {
    clips: usize,
    usable: usize,
    formats: BTreeMap<String, usize>,
    sizes: BTreeMap<String, usize>,
    lengths: BTreeMap<usize, usize>,
    rates: BTreeMap<String, usize>,
    /// The clips as training would see them.
    taken: BTreeMap<String, usize>,
    /// Clip and reason.
    left_out: Vec<(String, String)>,
}

impl DataSummary {
    fn count_file(&mut self, format: &str, probed: Option<Probed>) {
        *self.formats.entry(format.into()).or_default() += 1;
        if let Some(Probed { size: [height, width], frames, fps }) = probed {
            *self.sizes.entry(format!("{width}x{height}")).or_default() += 1;
            *self.lengths.entry(frames).or_default() += 1;
            *self.rates.entry(format!("{:.3}", fps).trim_end_matches('0').trim_end_matches('.').into()).or_default() +=
                1;
        }
    }

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

fn inspect(args: InspectData) -> Result<()> {
    let (dataset, mut reward) = open(&args.data)?;
    let bar = TerminalBar::new(dataset.len() as u64, "clips");
    let mut summary = DataSummary { clips: dataset.len(), ..DataSummary::default() };
    for (i, row) in dataset.metadata().rows.iter().enumerate() {
        let format = format(&row.video).unwrap_or("not there");
        summary.count_file(format, probe(&row.video, dataset.config().decoder).ok());
        let mut read = dataset.sample_or_skip(i)?;
        if let (Some(reward), Ok(sample)) = (&mut reward, &read)
            && let Err(error) = reward.prepare(&sample.video)
        {
            let Some(reason) = error.missing_reason() else { return Err(error) };
            read = Err((sample.origin.clone(), reason.to_string()));
        }
        summary.count_sample(read);
        bar.set(i as u64 + 1);
    }
    bar.finish();
    match args.json {
        true => println!("{:#}", serde_json::json!(summary)),
        false => print(&summary, &args.data.path),
    }
    match summary.usable {
        0 => Err(Error::bad_file(&args.data.path, "no clip of it can be used, for the reasons above")),
        _ => Ok(()),
    }
}

fn print(summary: &DataSummary, path: &Path) {
    println!("{}: {}, {} can be used", path.display(), counted(summary.clips as u64, "clip"), summary.usable);
    table("format", &summary.formats);
    table("width x height", &summary.sizes);
    table("frames", &summary.lengths);
    table("frames a second", &summary.rates);
    table("taken as", &summary.taken);
    for (clip, reason) in summary.left_out.iter().take(NAMED) {
        println!("left out: {clip}: {reason}");
    }
    if summary.left_out.len() > NAMED {
        println!("and {} more", summary.left_out.len() - NAMED);
    }
}

/// The most frequent first.
fn table(what: &str, counts: &BTreeMap<impl std::fmt::Display, usize>) {
    let mut counts: Vec<_> = counts.iter().collect();
    counts.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
    for (i, (value, count)) in counts.into_iter().enumerate() {
        println!("{:<16} {count:>7}  {value}", if i == 0 { what } else { "" });
    }
}

fn prepare(args: PrepareData) -> Result<()> {
    let out = &args.out;
    let (dataset, _) = open(&args.data)?;
    std::fs::create_dir_all(out).map_err(Error::file("create the directory", out))?;
    if std::fs::read_dir(out).map_err(Error::file("list", out))?.next().is_some() {
        return Err(Error::bad_file(out, "the directory is not empty; name one that is"));
    }
    let bar = TerminalBar::new(dataset.len() as u64, "clips");
    let (mut lines, mut left_out) = (String::new(), 0);
    for (i, row) in dataset.metadata().rows.iter().enumerate() {
        match dataset.sample_or_skip(i)? {
            Ok(sample) => {
                let stem = row.video.file_stem().unwrap_or_default().to_string_lossy();
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
    roll_external::files::write_atomically(&path, lines.as_bytes())?;
    println!("{}: {} clips, {left_out} left out", path.display(), dataset.len() - left_out);
    Ok(())
}

/// Writes clip and pictures, and returns the line that names them.
fn write(out: &Path, name: &str, sample: &Sample) -> Result<String> {
    let clip = format!("{name}.mp4");
    write_mp4(out.join(&clip), &sample.video)?;
    let mut line = serde_json::json!({ "video": clip, "prompt": sample.prompt });
    for (key, image) in [("image", &sample.image), ("end_image", &sample.end_image)] {
        if let Some(image) = image {
            let file = format!("{name}-{key}.png");
            roll_external::files::write_atomically(&out.join(&file), &png(image)?)?;
            line[key] = file.into();
        }
    }
    Ok(format!("{line}\n"))
}

fn png(image: &Tensor) -> Result<Vec<u8>> {
    let one = image.reshape([&[1][..], image.shape()].concat())?;
    encode_png(&Picture::from_frame(&Video::new(one, 1.0)?, 0))
}
