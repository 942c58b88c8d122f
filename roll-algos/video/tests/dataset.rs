//! A data set on disk, dealt out in batches.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::Arc;

use roll_core::{Error, Noise, Rank, Tensor, Video, VideoUnit};
use roll_media::{Decoder, Picture};
use roll_video::rows::{Batches, DataConfig, Dataset, OnBadSample, Windows};

fn video(frames: usize, shade: f32, [height, width]: [usize; 2]) -> Video {
    let values = (0..frames * 3 * height * width).map(|i| shade + (i % width) as f32 * 1e-3).collect();
    Video::new(Tensor::new(values, [frames, 3, height, width]).unwrap(), 8.0).unwrap()
}

/// Six clips of 7 frames, as PNGs, and their metadata.
fn write(dir: &Path) -> DataConfig {
    let mut csv = String::from("video,prompt,image\n");
    for i in 0..6 {
        roll_media::write_pngs(dir.join(format!("clip{i}")), &video(7, 0.1 * i as f32, [40, 70])).unwrap();
        csv += &format!("clip{i},\"prompt {i}, with a comma\",{}\n", if i == 2 { "start.png" } else { "" });
    }
    let start = Picture { width: 30, height: 30, rgb: vec![9; 2700] };
    std::fs::write(dir.join("start.png"), roll_media::encode_png(&start).unwrap()).unwrap();
    std::fs::write(dir.join("metadata.csv"), csv).unwrap();
    DataConfig { metadata: Some(dir.join("metadata.csv")), num_frames: 8, max_pixels: 32 * 48, ..DataConfig::default() }
}

fn open(config: &DataConfig) -> roll_core::Result<Dataset> {
    Dataset::open(config, VideoUnit::default())
}

#[test]
fn sample_is_trimmed_resized_and_cropped() {
    let dir = tempfile::tempdir().unwrap();
    let dataset = open(&write(dir.path())).unwrap();
    assert_eq!(dataset.len(), 6);
    let sample = dataset.sample(2).unwrap();
    // 40 x 70 with at most 1536 pixels: 29 x 51, rounded down to 16 x 48; 7 frames come to 5.
    assert_eq!(sample.video.dims(), [5, 16, 48]);
    assert_eq!(sample.image.as_ref().unwrap().shape(), [3, 16, 48]);
    assert_eq!((sample.index, sample.prompt.as_str()), (2, "prompt 2, with a comma"));
    assert!(sample.origin.contains("line 4") && sample.origin.contains("clip2"));
    assert!(Arc::ptr_eq(sample.clip().unwrap(), dataset.sample(2).unwrap().clip().unwrap()));
    assert!(dataset.sample(0).unwrap().image.is_none());
    let exact = DataConfig { height: Some(32), width: Some(32), num_frames: 4, ..write(dir.path()) };
    assert_eq!(open(&exact).unwrap().sample(0).unwrap().video.dims(), [1, 32, 32]);
}

#[test]
fn global_batch_is_independent_of_world_size() {
    let dir = tempfile::tempdir().unwrap();
    let dataset = Arc::new(open(&write(dir.path())).unwrap());
    let deal = |per_rank: usize, ranks: usize, step: u64| -> Vec<usize> {
        let ranks_of = |r| Batches::new(dataset.clone(), Noise::new(7), per_rank, Rank(r), ranks);
        (0..ranks).flat_map(|r| ranks_of(r).indices(step)).collect()
    };
    for step in 0..9 {
        assert_eq!(deal(4, 1, step), deal(1, 4, step));
        assert_eq!(deal(4, 1, step), deal(2, 2, step));
    }
    // Every pass holds every row once, and passes differ.
    let all: Vec<usize> = (0..6).flat_map(|s| deal(4, 1, s)).collect();
    for pass in all.chunks(6) {
        let mut rows = pass.to_vec();
        rows.sort();
        assert_eq!(rows, [0, 1, 2, 3, 4, 5]);
    }
    assert_ne!(all[..6], all[6..12]);
    let mut batches = Batches::new(dataset.clone(), Noise::new(7), 4, Rank(0), 1);
    assert_eq!((batches.steps(1), batches.steps(2), batches.epoch(3)), (2, 3, 2.0));
    assert_eq!(batches.batch(5).unwrap().samples.len(), 4);
}

#[test]
fn bad_row_is_an_error_or_skipped_and_reported() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = write(dir.path());
    std::fs::write(dir.path().join("clip3/frame_00001.png"), "no picture").unwrap();
    std::fs::remove_dir_all(dir.path().join("clip5")).unwrap();
    let chain = |e: &Error| format!("{e}: {}", std::error::Error::source(e).unwrap());

    let told = chain(&open(&config).unwrap_err());
    assert!(told.contains("line 7") && told.contains("clip5"), "{told}");
    assert_eq!(open(&config).unwrap_err().fault(), roll_core::Fault::User);

    config.on_bad_sample = OnBadSample::Skip;
    config.shuffle = false;
    let dataset = Arc::new(open(&config).unwrap());
    let told = chain(&dataset.sample(3).unwrap_err());
    assert!(told.contains("line 5") && told.contains("frame_00001.png"), "{told}");
    let mut batches = Batches::new(dataset.clone(), Noise::new(1), 6, Rank(0), 1);
    for step in 0..3 {
        let batch = batches.batch(step).unwrap();
        assert_eq!((batch.samples.len(), batch.skipped.len()), (4, 2));
        assert!(batch.skipped[0].0.contains("line 5") && batch.skipped[0].1.contains("frame_00001.png"));
    }
}

#[test]
fn missing_metadata_error_names_the_key() {
    let told = open(&DataConfig::default()).unwrap_err().to_string();
    assert!(told.contains("data.metadata"), "{told}");
}

#[test]
fn bucketed_micro_batches_have_one_shape_on_every_rank() {
    let dir = tempfile::tempdir().unwrap();
    let mut lines = String::new();
    // Seven wide clips, three tall ones, one short one.
    for i in 0..11 {
        let (frames, size) = match i {
            0..7 => (9, [36, 66]),
            7..10 => (9, [70, 40]),
            _ => (6, [36, 66]),
        };
        roll_media::write_mp4(dir.path().join(format!("{i}.mp4")), &video(frames, 0.05 * i as f32, size)).unwrap();
        lines += &format!("{{\"video\": \"{i}.mp4\", \"prompt\": \"p\"}}\n");
    }
    std::fs::write(dir.path().join("metadata.jsonl"), lines).unwrap();
    let config = DataConfig {
        metadata: Some(dir.path().join("metadata.jsonl")),
        max_pixels: 32 * 64,
        num_frames: 9,
        bucket_ratios: vec![2.0, 0.5],
        bucket_frames: vec![5, 9],
        ..DataConfig::default()
    };
    let dataset = Arc::new(open(&config).unwrap());
    assert_eq!(dataset.sample(8).unwrap().video.dims(), [9, 64, 32]);
    assert_eq!(dataset.sample(10).unwrap().video.dims(), [5, 32, 64]);
    let deal = |per_rank: usize, ranks: usize, step: u64| -> Vec<usize> {
        let of = |r| Batches::new(dataset.clone(), Noise::new(7), per_rank, Rank(r), ranks).in_micro_batches(2);
        (0..ranks).flat_map(|r| of(r).indices(step)).collect()
    };
    // 8 + 4 + 2 rows, four a step: seven steps are two passes.
    let batches = Batches::new(dataset.clone(), Noise::new(7), 4, Rank(0), 1).in_micro_batches(2);
    assert_eq!((batches.steps(1), batches.steps(2)), (4, 7));
    let mut seen = [0; 11];
    for step in 0..7 {
        let rows = deal(4, 1, step);
        assert_eq!(rows, deal(2, 2, step));
        for pair in rows.chunks(2) {
            assert_eq!(dataset.bucket(pair[0]), dataset.bucket(pair[1]));
            pair.iter().for_each(|row| seen[*row] += 1);
        }
    }
    assert!(seen.iter().all(|&n| n >= 2) && seen.iter().sum::<i32>() == 28, "{seen:?}");
    assert_ne!((deal(4, 1, 0), deal(4, 1, 1)), (deal(4, 1, 7), deal(4, 1, 8)));
}

#[test]
fn probe_agrees_with_reading() {
    let dir = tempfile::tempdir().unwrap();
    let clip = video(7, 0.2, [40, 70]);
    roll_media::write_mp4(dir.path().join("a.mp4"), &clip).unwrap();
    roll_media::write_gif(dir.path().join("a.gif"), &clip).unwrap();
    roll_media::write_pngs(dir.path().join("a"), &clip).unwrap();
    for (name, fps) in [("a.mp4", 8.0), ("a.gif", 8.0), ("a", 16.0)] {
        let probed = roll_media::probe(dir.path().join(name), Decoder::Own).unwrap();
        assert_eq!((probed.size, probed.frames), ([40, 70], 7), "{name}");
        assert!((probed.fps - fps).abs() < 0.1, "{name}: {}", probed.fps);
    }
    std::fs::write(dir.path().join("b.mp4"), "no video").unwrap();
    assert!(roll_media::probe(dir.path().join("b.mp4"), Decoder::Own).is_err());
}

#[test]
fn prefetch_changes_neither_samples_nor_errors() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = DataConfig { cache_bytes: 0, on_bad_sample: OnBadSample::Skip, ..write(dir.path()) };
    std::fs::write(dir.path().join("clip3/frame_00001.png"), "no picture").unwrap();
    let steps = |config: &DataConfig, from: u64| {
        let dataset = Arc::new(open(config).unwrap());
        let mut batches = Batches::new(dataset, Noise::new(7), 4, Rank(0), 1).up_to(8);
        let told = |step| match batches.batch(step) {
            Ok(batch) => {
                let samples = batch
                    .samples
                    .iter()
                    .map(|s| (s.index, s.clip().unwrap().frame(4)[7].to_bits()))
                    .collect::<Vec<_>>();
                format!("{samples:?} {:?}", batch.skipped)
            }
            Err(error) => error.chain(),
        };
        (from..8).map(told).collect::<Vec<_>>()
    };
    for on_bad_sample in [OnBadSample::Skip, OnBadSample::Error] {
        config.on_bad_sample = on_bad_sample;
        config.prefetch = 0;
        let expected = steps(&config, 0);
        assert!(expected.iter().any(|step| step.contains("frame_00001.png")));
        assert!(expected.iter().any(|step| !step.contains("frame_00001.png")));
        for prefetch in [1, 3] {
            config.prefetch = prefetch;
            assert_eq!(steps(&config, 0), expected);
            // As after a resume, and for who asks for a step again or leaves some out.
            assert_eq!(steps(&config, 5), expected[5..]);
        }
    }
    config.on_bad_sample = OnBadSample::Skip;
    let mut batches = Batches::new(Arc::new(open(&config).unwrap()), Noise::new(7), 4, Rank(0), 1);
    let mut rows = |step| batches.batch(step).unwrap().samples.iter().map(|s| s.index).collect::<Vec<_>>();
    let first = rows(0);
    assert_eq!((rows(0), rows(6).len() > 2, rows(0)), (first.clone(), true, first));
}

#[test]
fn clip_sizes_are_multiples_of_the_model_unit() {
    let dir = tempfile::tempdir().unwrap();
    let config = DataConfig { max_pixels: 1 << 20, num_frames: 81, ..write(dir.path()) };
    let dims = |unit| Dataset::open(&config, unit).unwrap().sample(0).unwrap().video.dims();
    assert_eq!(dims(VideoUnit { height: 32, width: 32, frames: 4, most_frames: None }), [5, 32, 64]);
    assert_eq!(dims(VideoUnit { height: 8, width: 2, frames: 1, most_frames: None }), [7, 40, 70]);
    assert_eq!(dims(VideoUnit { height: 8, width: 2, frames: 8, most_frames: None }), [1, 40, 70]);
    let fixed = DataConfig { height: Some(48), width: Some(64), ..config };
    let told = Dataset::open(&fixed, VideoUnit { height: 32, width: 32, frames: 4, most_frames: None })
        .unwrap_err()
        .to_string();
    assert!(told.contains("data.height") && told.contains("found 48"), "{told}");
}

#[test]
fn a_row_without_a_clip_has_the_size_of_data_or_of_its_picture() {
    let dir = tempfile::tempdir().unwrap();
    let picture = Picture { width: 60, height: 120, rgb: vec![9; 3 * 60 * 120] };
    std::fs::write(dir.path().join("tall.png"), roll_media::encode_png(&picture).unwrap()).unwrap();
    std::fs::write(dir.path().join("metadata.csv"), "prompt,image\na,\nb,tall.png\n").unwrap();
    let base = DataConfig { metadata: Some(dir.path().join("metadata.csv")), num_frames: 10, ..DataConfig::default() };
    let dims = |config: &DataConfig| {
        let dataset = open(config).unwrap();
        [0, 1].map(|row| {
            let sample = dataset.sample(row).unwrap();
            let dims = sample.video.dims();
            assert!(sample.video.clip().is_none() && sample.path.is_none());
            assert!(sample.image.is_none_or(|image| image.shape() == [3, dims[1], dims[2]]));
            dims
        })
    };
    let fixed = DataConfig { height: Some(32), width: Some(48), ..base.clone() };
    assert_eq!(dims(&fixed), [[9, 32, 48]; 2]);
    // 480 x 832 and 120 x 60, scaled to 3200 pixels; `fps` is that of clips.
    assert_eq!(dims(&DataConfig { max_pixels: 3200, fps: Some(8.0), ..base.clone() }), [[9, 32, 64], [9, 80, 32]]);
    let bucketed = DataConfig { bucket_ratios: vec![1.0, 0.5], bucket_frames: vec![5], max_pixels: 4096, ..base };
    assert_eq!(dims(&bucketed), [[5, 64, 64], [5, 80, 32]]);
}

#[test]
fn each_window_of_a_long_clip_is_a_sample_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let shade = |t: usize| t as f32 * 0.1 - 0.5;
    let mut csv = String::from("video,prompt\n");
    for (name, frames) in [("long", 12), ("short", 5), ("middle", 7)] {
        let values = (0..frames).flat_map(|t| vec![shade(t); 3 * 16 * 16]).collect();
        let clip = Video::new(Tensor::new(values, [frames, 3, 16, 16]).unwrap(), 16.0).unwrap();
        roll_media::write_pngs(dir.path().join(name), &clip).unwrap();
        csv += &format!("{name},{name}\n");
    }
    csv += ",a prompt alone\n";
    std::fs::write(dir.path().join("metadata.csv"), csv).unwrap();
    let head = DataConfig {
        metadata: Some(dir.path().join("metadata.csv")),
        height: Some(16),
        width: Some(16),
        num_frames: 5,
        ..DataConfig::default()
    };
    // Prompt, first frame and number of frames of every sample.
    let samples = |config: &DataConfig| {
        let dataset = open(config).unwrap();
        let sample = |i: usize| {
            let sample = dataset.sample(i).unwrap();
            assert_eq!(sample.index, i as u64);
            let first = sample.video.clip().map_or(0, |clip| ((clip.frame(0)[0] + 0.5) * 10.0).round() as usize);
            (sample.prompt, first, sample.video.dims()[0])
        };
        (0..dataset.len()).map(sample).collect::<Vec<_>>()
    };
    let row = |prompt: &str, first: usize, frames: usize| (prompt.to_string(), first, frames);
    let rest = [row("middle", 0, 5), row("a prompt alone", 0, 5)];
    assert_eq!(samples(&head), [&[row("long", 0, 5), row("short", 0, 5)][..], &rest].concat());

    let sliding = DataConfig { windows: Windows::Sliding(3), ..head.clone() };
    let long = [0, 3, 6].map(|first| row("long", first, 5));
    assert_eq!(samples(&sliding), [&long[..], &[row("short", 0, 5)], &rest].concat());
    let uniform = DataConfig { windows: Windows::Uniform(3), ..head.clone() };
    let firsts: Vec<usize> = samples(&uniform).into_iter().map(|(_, first, _)| first).collect();
    assert_eq!(firsts, [0, 4, 7, 0, 0, 0]);
    // Of the 12 frames at 16 per second, 9 are left at 12: the fifth of them is frame 5.
    let resampled = DataConfig { windows: Windows::Uniform(2), fps: Some(12.0), ..head.clone() };
    assert_eq!(samples(&resampled)[..3], [row("long", 0, 5), row("long", 5, 5), row("short", 0, 1)]);
    let bucketed = DataConfig { bucket_frames: vec![5], num_frames: 9, ..sliding.clone() };
    assert_eq!(samples(&bucketed), samples(&sliding));

    let dataset = Arc::new(open(&sliding).unwrap());
    assert!(dataset.sample(1).unwrap().origin.ends_with("long, frames 3 to 7)"), "{:?}", dataset.sample(1));
    assert_eq!((dataset.unused_windows(), open(&head).unwrap().unused_windows()), (None, None));
    let longer = DataConfig { num_frames: 13, ..sliding.clone() };
    assert!(open(&longer).unwrap().unused_windows().is_some_and(|note| note.contains("`data.windows`")));
    let mut batches = Batches::new(dataset.clone(), Noise::new(7), 1, Rank(0), 1);
    assert_eq!((batches.steps(1), batches.epoch(3)), (6, 0.5));
    let mut pass: Vec<usize> = (0..6).flat_map(|step| batches.indices(step)).collect();
    pass.sort();
    assert_eq!(pass, [0, 1, 2, 3, 4, 5], "an epoch has every window once");

    std::fs::remove_dir_all(dir.path().join("long")).unwrap();
    let skipping = DataConfig { on_bad_sample: OnBadSample::Skip, ..sliding };
    let dataset = open(&skipping).unwrap();
    assert_eq!((dataset.len(), dataset.sample_or_skip(0).unwrap().is_err()), (4, true));
}
