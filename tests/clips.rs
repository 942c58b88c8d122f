//! Clips as people have them: of every size and format, some of them broken.

use std::path::Path;
use std::process::{Command, Stdio};

use roll_core::VideoUnit;
use roll_video::rows::{DataConfig, Dataset, Windows};
use roll_wan::init_tiny::{WanKind, init_tiny};
use serde_json::Value;

use crate::world::{SETTINGS, SHORT, World, fails, stderr_text};

/// Arguments that set `settings`.
fn set(settings: &[&str]) -> Vec<String> {
    settings.iter().flat_map(|setting| ["--set".to_string(), setting.to_string()]).collect()
}

#[test]
fn every_model_trains_on_landscape_and_portrait_clips() {
    let world = World::new(1);
    let mut rows = String::from("video,prompt\n");
    for (i, [height, width]) in [[480, 832], [480, 640], [144, 176], [832, 480]].into_iter().enumerate() {
        let frames = roll_core::Tensor::full([6, 3, height, width], 0.1 * i as f32);
        roll_media::write_mp4(world.path(&format!("size{i}.mp4")), &roll_core::Video::new(frames, 8.0).unwrap())
            .unwrap();
        rows += &format!("size{i}.mp4,p\n");
    }
    std::fs::write(world.path("sizes.csv"), rows).unwrap();
    for (name, kind) in
        [("t2v", WanKind::T2v), ("i2v", WanKind::I2v), ("i2v21", WanKind::I2v21), ("ti2v", WanKind::Ti2v)]
    {
        init_tiny(world.path(name), kind, 3).unwrap();
        let files = [
            format!("model.model_paths={name}/wan22_paths.json"),
            format!("model.tokenizer_path={name}/google/umt5-xxl"),
        ];
        let run = |out: &str, settings: &[&str]| {
            let own = [
                files[0].as_str(),
                files[1].as_str(),
                "model.lora_rank=2",
                "data.metadata=sizes.csv",
                "data.num_frames=7",
                "data.max_pixels=10000",
                "reward.name=brightness",
                "training.per_device_train_batch_size=4",
            ];
            let arguments: Vec<String> = ["run", "--out", out, "--steps", "3"].map(String::from).into();
            // One step more than the shift of T2V-A14B needs to come to the trained expert.
            let steps =
                ["sample_steps=0", "algo.num_inference_steps=4", "algo.mid_timestep=3", "algo.final_timestep=3"];
            let arguments = [arguments, set(&own), set(&steps), set(settings)].concat();
            world.roll(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
        };
        let settings = [&[][..], &["data.bucket_ratios=[1.33, 0.5]", "data.bucket_frames=[5]"]];
        for (how, settings) in ["ratio", "buckets"].into_iter().zip(settings) {
            let out = format!("{name}-{how}");
            let output = run(&out, settings);
            assert!(output.status.success(), "{out}: {}", stderr_text(&output));
            for row in world.metrics(&out) {
                assert_eq!(
                    (row["actor/samples"].as_f64(), row["actor/skipped"].as_f64()),
                    (Some(4.0), Some(0.0)),
                    "{row}"
                );
                assert!(row["actor/grad_norm"].as_f64().unwrap() > 0.0, "{row}");
            }
        }
        if kind == WanKind::Ti2v {
            // A multiple of 16, but not of what this model takes.
            let fixed = run("fixed", &["data.height=64", "data.width=112"]);
            fails(&fixed, 2, &["data.width", "multiples of 32, such as 96; found 112"]);
        }
    }
}

#[test]
fn a_directory_of_pictures_trains_every_algorithm_and_its_clips_of_one_frame_are_written_as_pictures() {
    let world = World::new(0);
    std::fs::create_dir(world.path("stills")).unwrap();
    for i in 0..2 {
        let still = roll_core::Video::new(roll_core::Tensor::full([1, 3, 64, 64], 0.4 * i as f32), 8.0).unwrap();
        roll_media::write_clip(&world.path(&format!("stills/{i}")), &still).unwrap();
        std::fs::write(world.path(&format!("stills/{i}.txt")), "a grey square").unwrap();
    }
    let data = ["data.metadata=stills", "data.num_frames=1", "evaluation.metadata=stills", "evaluation.samples=1"];
    let prompts = "evaluation.prompts=[{prompt: grey, image: stills/0.png}]";
    for (name, own) in [
        ("reward_fl", &["sample_steps=1", SHORT[1], SHORT[2], SHORT[3], "reward.name=brightness", prompts][..]),
        ("flow_matching", &[]),
    ] {
        let algorithm = format!("algo.name={name}");
        let settings = [&data[..], own, &[&algorithm]].concat();
        let output = world.training(name, 1, &settings).output().unwrap();
        assert!(output.status.success(), "{name}: {}", stderr_text(&output));
        let files = |folder: &str| -> Vec<String> {
            let entries = std::fs::read_dir(world.path(name).join("samples").join(folder)).into_iter().flatten();
            let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
            names.sort();
            names
        };
        let all = ["before", "after", "reference", "step-000001"].map(files).concat();
        assert!(!all.is_empty() && all.iter().all(|file| file.ends_with(".png")), "{name}: {all:?}");
        if name == "reward_fl" {
            assert!(files("before").contains(&"prompt-000.png".to_string()), "{all:?}");
            assert!(all.iter().any(|file| file.starts_with("sample-")), "{all:?}");
            let run = world.path(name);
            assert!(run.join("comparison.png").is_file() && !run.join("comparison.mp4").exists());
            let page = std::fs::read_to_string(run.join("report.html")).unwrap();
            assert!(page.contains("data:image/png;base64,") && !page.contains("data:video/mp4"));
        }
    }
    // The number of frames is that of the configuration.
    std::fs::write(world.path("prompts.txt"), "a grey square\n").unwrap();
    std::fs::create_dir(world.path("out")).unwrap();
    let made = world.done(&[
        "generate",
        "--config",
        "reward_fl/config.yaml",
        "--prompts",
        "prompts.txt",
        "--image",
        "stills/0.png",
        "--steps",
        "1",
        "--output",
        "out/",
    ]);
    assert_eq!(made.trim(), "out/001.png");
}

#[test]
fn a_clip_that_needs_ffmpeg_is_rejected_without_it() {
    let world = World::new(1);
    std::fs::write(world.path("a.webm"), b"\x1a\x45\xdf\xa3 and so on").unwrap();
    let score = |path: &str| {
        let mut command = world.command(&["score", path, "--reward", "brightness"]);
        command.env("PATH", world.path("nothing")).output().unwrap()
    };
    fails(&score("a.webm"), 2, &["Matroska or WebM", "install ffmpeg", "not in the PATH", "ffmpeg -i a.webm"]);
    assert!(score("0.mp4").status.success());
}

#[test]
fn prepared_clips_equal_those_of_a_run() {
    let world = World::new(3);
    std::fs::write(world.path("2.mp4"), "no video").unwrap();
    let settings = ["data", "prepare", "metadata.csv", "prepared", "--unit", "32", "--set", "data.max_pixels=3000"];
    let printed_text = world.done(&[&settings[..], &["--set", "data.fps=4"]].concat());
    assert!(printed_text.contains("2 clips, 1 left out"), "{printed_text}");
    // Nothing that is there is written over.
    fails(&world.roll(&settings), 2, &["prepared", "not empty"]);
    let summary: Value =
        serde_json::from_str(&world.done(&["data", "inspect", "prepared/metadata.jsonl", "--json"])).unwrap();
    let expected = serde_json::json!({
        "clips": 2, "prompts": 0, "usable": 2, "left_out": [], "formats": {"MP4 or MOV": 2}, "sizes": {"32x32": 2},
        "lengths": {"5": 2}, "rates": {"4": 2}, "taken": {"5 frames of 32x32": 2},
    });
    assert_eq!(summary, expected);
    let printed_text = world.done(&["data", "inspect", "metadata.csv"]);
    assert!(
        printed_text.contains("3 clips, 2 can be used") && printed_text.contains("left out: metadata.csv line 4"),
        "{printed_text}"
    );
}

#[test]
fn names_of_prepared_clips_have_no_control_characters() {
    let world = World::new(1);
    std::fs::rename(world.path("0.mp4"), world.path("a\u{1b}]0;\n\u{202e}b.mp4")).unwrap();
    let row = serde_json::json!({"video": "a\u{1b}]0;\n\u{202e}b.mp4", "prompt": "x"});
    std::fs::write(world.path("metadata.jsonl"), row.to_string()).unwrap();
    world.done(&["data", "prepare", "metadata.jsonl", "prepared"]);
    assert!(world.path("prepared/00001-a_]0;__b.mp4").exists());
}

/// Clips of 9 frames at 8 a second: file, options before the input, options of the output, and the matrix of its track.
type Format = (&'static str, &'static str, &'static str, Option<[i32; 4]>);

const CLOCKWISE: Option<[i32; 4]> = Some([0, 1, -1, 0]);
const COUNTERCLOCKWISE: Option<[i32; 4]> = Some([0, -1, 1, 0]);
const UPSIDE_DOWN: Option<[i32; 4]> = Some([-1, 0, 0, -1]);
const MIRRORED: Option<[i32; 4]> = Some([-1, 0, 0, 1]);

const FORMATS: [Format; 37] = [
    ("h264.mp4", "", "-c:v libx264 -pix_fmt yuv420p", None),
    ("h264.mkv", "", "-c:v libx264 -pix_fmt yuv420p", None),
    ("h264.mov", "", "-c:v libx264 -pix_fmt yuv420p", None),
    ("h264.avi", "", "-c:v libx264 -pix_fmt yuv420p -bf 0", None),
    ("h264.ts", "", "-c:v libx264 -pix_fmt yuv420p", None),
    ("h264.m2ts", "", "-c:v libx264 -pix_fmt yuv420p -f mpegts -mpegts_m2ts_mode 1", None),
    ("h264.flv", "", "-c:v libx264 -pix_fmt yuv420p", None),
    ("h264-fragments.mp4", "", "-c:v libx264 -pix_fmt yuv420p -movflags frag_keyframe+empty_moov", None),
    ("h264-422.mp4", "", "-c:v libx264 -pix_fmt yuv422p", None),
    ("h264-444.mp4", "", "-c:v libx264 -pix_fmt yuv444p", None),
    ("h264-10-bit.mp4", "", "-c:v libx264 -pix_fmt yuv420p10le", None),
    ("h264-full-range.mp4", "", "-c:v libx264 -pix_fmt yuvj420p -color_range pc", None),
    ("h264-interlaced.mp4", "", "-c:v libx264 -pix_fmt yuv420p -x264-params interlaced=1", None),
    ("h264-odd.mp4", "", "-vf scale=94:62 -c:v libx264 -pix_fmt yuv420p", None),
    ("h264-left.mp4", "", "-vf transpose=2 -c:v libx264 -pix_fmt yuv420p", CLOCKWISE),
    ("h264-right.mp4", "", "-vf transpose=1 -c:v libx264 -pix_fmt yuv420p", COUNTERCLOCKWISE),
    ("h264-down.mp4", "", "-vf hflip,vflip -c:v libx264 -pix_fmt yuv420p", UPSIDE_DOWN),
    ("h264-mirrored.mp4", "", "-vf hflip -c:v libx264 -pix_fmt yuv420p", MIRRORED),
    ("hevc-left.mp4", "", "-vf transpose=2 -c:v libx265 -pix_fmt yuv420p", CLOCKWISE),
    ("h264-narrow.mp4", "", "-vf scale=48:64,setsar=4/3 -c:v libx264 -pix_fmt yuv420p", None),
    ("hevc-wide.mkv", "", "-vf scale=96:64,setsar=2/3 -c:v libx265 -pix_fmt yuv420p", None),
    ("h264-variable.mp4", "", "-vf setpts='if(lt(N,4),N,N*2-3)' -vsync vfr -c:v libx264 -pix_fmt yuv420p", None),
    ("vp9-variable.webm", "", "-vf setpts='if(lt(N,4),N,N*2-3)' -vsync vfr -c:v libvpx-vp9 -pix_fmt yuv420p", None),
    ("hevc.mp4", "", "-c:v libx265 -pix_fmt yuv420p -tag:v hvc1", None),
    ("hevc-10-bit.mov", "", "-c:v libx265 -pix_fmt yuv420p10le", None),
    ("vp8.webm", "", "-c:v libvpx -b:v 1M -pix_fmt yuv420p", None),
    ("vp9.webm", "", "-c:v libvpx-vp9 -b:v 1M -pix_fmt yuv420p", None),
    ("av1.mp4", "", "-c:v libaom-av1 -cpu-used 8 -pix_fmt yuv420p", None),
    ("av1.avif", "", "-c:v libaom-av1 -cpu-used 8 -pix_fmt yuv420p", None),
    ("mpeg4.avi", "", "-c:v mpeg4 -q:v 2 -pix_fmt yuv420p", None),
    ("mpeg2.mpg", "", "-c:v mpeg2video -r 25 -q:v 2 -pix_fmt yuv420p", None),
    ("motion-jpeg.avi", "", "-c:v mjpeg -q:v 2 -pix_fmt yuvj420p", None),
    ("prores.mov", "", "-c:v prores -pix_fmt yuv422p10le", None),
    ("ffv1.mkv", "", "-c:v ffv1 -pix_fmt yuv444p", None),
    ("raw.avi", "", "-c:v rawvideo -pix_fmt bgr24", None),
    ("animation.gif", "", "", None),
    ("h264-cut.mp4", "-ss 0.5", "-c copy", None),
];

fn ffmpeg(directory: &Path, arguments: &[&str]) {
    let mut command = Command::new("ffmpeg");
    command.current_dir(directory).args(["-v", "error", "-nostdin", "-y"]);
    let output = command.args(arguments.iter().flat_map(|part| part.split_whitespace())).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", stderr_text(&output));
}

/// Writes the matrix of a track into a file that ffmpeg wrote without one.
fn turn(path: &Path, matrix: [i32; 4]) {
    let mut bytes = std::fs::read(path).unwrap();
    let at = bytes.windows(4).position(|window| window == b"tkhd").unwrap() + 4 + 4 + 20 + 16;
    let [a, b, c, d] = matrix;
    for (i, number) in [a, b, 0, c, d].into_iter().enumerate() {
        bytes[at + 4 * i..][..4].copy_from_slice(&(number * 0x1_0000).to_be_bytes());
    }
    std::fs::write(path, bytes).unwrap();
}

/// Clips as in [`FORMATS`], then five that are broken or without a face, whose names are returned too.
fn clips_of_every_format(world: &World) -> [&'static str; 5] {
    let people = Path::new(env!("CARGO_MANIFEST_DIR")).join("../demo/assets/clips/train");
    let directory = world.path("clips");
    std::fs::create_dir(&directory).unwrap();
    for (i, (name, before, after, matrix)) in FORMATS.into_iter().enumerate() {
        let person = people.join(format!("person-{}.mp4", 11000 + i));
        std::fs::copy(person, directory.join("person.mp4")).unwrap();
        if !before.is_empty() {
            // Key frames beside the place of the cut.
            ffmpeg(&directory, &["-i person.mp4 -c:v libx264 -g 6 -bf 2 -pix_fmt yuv420p long.mp4"]);
            std::fs::rename(directory.join("long.mp4"), directory.join("person.mp4")).unwrap();
        }
        ffmpeg(&directory, &[before, "-i person.mp4", after, name]);
        if let Some(matrix) = matrix {
            turn(&directory.join(name), matrix);
        }
    }
    std::fs::remove_file(directory.join("person.mp4")).unwrap();
    ffmpeg(&directory, &["-f lavfi -i testsrc2=size=64x64:rate=8:duration=1 -c:v libx264 -pix_fmt yuv420p nobody.mp4"]);
    ffmpeg(&directory, &["-f lavfi -i color=gray:size=64x64:rate=8:duration=1 -c:v libvpx-vp9 nobody.webm"]);
    for (name, from) in [("cut-short.mp4", "h264.mp4"), ("damaged.mkv", "hevc-wide.mkv")] {
        let bytes = std::fs::read(directory.join(from)).unwrap();
        std::fs::write(directory.join(name), &bytes[..bytes.len() / 8]).unwrap();
    }
    std::fs::write(directory.join("text.mov"), "not a video at all").unwrap();
    for file in std::fs::read_dir(&directory).unwrap() {
        std::fs::write(file.unwrap().path().with_extension("txt"), "a person looks at the camera").unwrap();
    }
    ["nobody.mp4", "nobody.webm", "cut-short.mp4", "damaged.mkv", "text.mov"]
}

#[test]
fn clips_without_a_face_are_skipped_and_counted() {
    let found = ["ffmpeg", "ffprobe"].map(|program| {
        Command::new(program).arg("-version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
    });
    if found != [true, true] {
        roll_testing::skip!("ffmpeg and ffprobe are not in the PATH", needs = "ffmpeg");
    }
    let world = World::new(0);
    let bad = clips_of_every_format(&world);
    // Files of the same stem share a caption.
    let clips = std::fs::read_dir(world.path("clips")).unwrap().flatten();
    assert_eq!(clips.filter(|clip| clip.path().extension().is_none_or(|e| e != "txt")).count(), FORMATS.len() + 5);
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../demo/assets");
    let at = |key: &str, path: &str| format!("{key}={}", demo.join(path).display());
    let mut settings: Vec<String> = vec![
        at("model.model_paths", "wan22_paths.json"),
        at("model.tokenizer_path", "google/umt5-xxl"),
        at("reward.reward_model_path", "face"),
    ];
    let own = [
        "model.trainable_models=dit2",
        "model.lora_rank=4",
        "reward.name=insightface",
        "reward.det_size=64",
        "reward.undetected=reference_landmarks",
        "training.per_device_train_batch_size=6",
        "training.learning_rate=1e-5",
        "data.metadata=clips",
        "data.on_bad_sample=skip",
        "data.height=64",
        "data.width=64",
        "data.num_frames=9",
        "sample_steps=0",
    ];
    settings.extend(own.map(String::from));
    let arguments: Vec<String> = ["run", "--out", "run", "--steps", "7"].map(String::from).into();
    let arguments = [arguments, set(&settings.iter().map(String::as_str).collect::<Vec<_>>())].concat();
    let output = world.roll(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    let log = stderr_text(&output);
    assert!(output.status.success(), "{log}");
    let summary = world.summary("run");
    let left_out: Vec<&str> =
        summary["skipped"].as_array().unwrap().iter().filter_map(|s| s["sample"].as_str()).collect();
    assert_eq!(summary["skipped_samples"], 5, "{log}");
    for name in bad {
        assert_eq!(left_out.iter().filter(|sample| sample.contains(name)).count(), 1, "{name}: {left_out:?}");
        let warnings = log.lines().filter(|line| line.contains("left out") && line.contains(name)).count();
        assert_eq!(warnings, 1, "{name}: {log}");
    }
    let inspect = ["data", "inspect", "clips", "--json"].map(String::from).to_vec();
    let faces = [settings[2].as_str(), own[2], own[3], "data.height=64", "data.width=64", "data.num_frames=9"];
    let arguments = [inspect, set(&faces)].concat();
    let summary: Value =
        serde_json::from_str(&world.done(&arguments.iter().map(String::as_str).collect::<Vec<_>>())).unwrap();
    assert_eq!((&summary["clips"], &summary["usable"]), (&42.into(), &37.into()), "{summary}");
    assert_eq!(summary["left_out"].as_array().unwrap().len(), 5);
    assert!(
        summary["formats"]["Matroska or WebM"].as_u64().unwrap() >= 6
            && summary["taken"]["9 frames of 64x64"] != Value::Null
    );
    let sum = |name: &str| world.metrics("run").iter().filter_map(|row| row[name].as_f64()).sum::<f64>();
    assert_eq!((sum("actor/samples"), sum("actor/skipped"), sum("data/skipped")), (37.0, 2.0, 3.0));
}

#[test]
fn windows_of_long_clips_are_counted_named_and_cached_apart() {
    let world = World::new(1);
    let values = (0..9).flat_map(|t| vec![0.1 * t as f32 - 0.4; 3 * 64 * 64]).collect();
    let clip = roll_core::Video::new(roll_core::Tensor::new(values, [9, 3, 64, 64]).unwrap(), 8.0).unwrap();
    roll_media::write_mp4(world.path("0.mp4"), &clip).unwrap();
    std::fs::write(world.path("short.csv"), "video,prompt\n0.mp4,p\nshort,p\n").unwrap();
    roll_media::write_pngs(
        world.path("short"),
        &roll_core::Video::new(roll_core::Tensor::zeros([5, 3, 64, 64]), 8.0).unwrap(),
    )
    .unwrap();
    let settings = ["data.num_frames=5", "data.windows={sliding: 4}", "data.height=64", "data.width=64"];
    let inspect = |json: &[&str]| {
        let arguments: Vec<String> = ["data", "inspect", "short.csv"].map(String::from).into();
        let arguments = [arguments, set(&settings), json.iter().map(|s| s.to_string()).collect()].concat();
        world.done(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let text = inspect(&[]);
    assert!(text.contains("3 windows of 2 clips, 3 can be used"), "{text}");
    let json: Value = serde_json::from_str(&inspect(&["--json"])).unwrap();
    assert_eq!([&json["clips"], &json["usable"]], [2, 3]);

    let train = [&settings[1..2], &["algo.name=flow_matching", "sample_steps=0", "data.cache_dir=cache"]].concat();
    let summary = world.train("windows", 2, &train);
    assert_eq!(summary.encodings, Some([0, 4]), "conditioning and latents of two windows");
    let checked = [&["check", "--steps", "2"].map(String::from)[..], &set(&SETTINGS), &set(&train[..3])].concat();
    let checked = world.done(&checked.iter().map(String::as_str).collect::<Vec<_>>());
    for line in ["2 windows of 1 clip, 1 of the clips can be read", "2 steps of 1 window each: 1.0 epochs"] {
        assert!(checked.contains(line), "{checked}");
    }
    assert_eq!(world.train("again", 2, &train).encodings, Some([4, 0]));
}

#[test]
fn a_mask_has_the_crop_and_the_window_of_its_clip() {
    let world = World::new(1);
    // Column x of frame t of the clip and of its mask is t + 4 x; a picture has the columns alone.
    let frames = |frames: usize, [height, width]: [usize; 2], moves: usize| {
        let value = |i: usize| (i / (3 * height * width) * moves + 4 * (i % width)) as f32 / 127.5 - 1.0;
        let values = (0..frames * 3 * height * width).map(value).collect();
        roll_core::Video::new(roll_core::Tensor::new(values, [frames, 3, height, width]).unwrap(), 8.0).unwrap()
    };
    roll_media::write_pngs(world.path("clip"), &frames(9, [32, 48], 1)).unwrap();
    roll_media::write_pngs(world.path("still"), &frames(1, [32, 48], 0)).unwrap();
    roll_media::write_pngs(world.path("short"), &frames(3, [32, 48], 0)).unwrap();
    let still = "still/frame_00000.png";
    let table = format!("video,prompt,mask\nclip,p,clip\nclip,p,{still}\nclip,p,short\n,p,{still}\nclip,p,\n");
    std::fs::write(world.path("masked.csv"), table).unwrap();
    let open = |metadata: &str| {
        let config = DataConfig {
            metadata: Some(world.path(metadata)),
            num_frames: 5,
            height: Some(32),
            width: Some(32),
            windows: Windows::Sliding(4),
            ..DataConfig::default()
        };
        Dataset::open(&config, VideoUnit { height: 16, width: 16, frames: 4, most_frames: None }).unwrap()
    };
    let data = open("masked.csv");
    let grey = |row: &roll_core::Sample| {
        let frames = row.clip().unwrap().frames().clone();
        let grey = frames.f32s().unwrap().chunks(3 * 32 * 32).flat_map(|frame| &frame[..32 * 32]);
        grey.map(|value| (value + 1.0) / 2.0).collect::<Vec<f32>>()
    };
    let close = |a: &[f32], b: &[f32]| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-6);
    for row in [0, 1] {
        let sample = data.sample(row).unwrap();
        let mask = sample.mask.clone().unwrap();
        assert_eq!(mask.shape(), [5, 32, 32]);
        assert!(close(mask.f32s().unwrap(), &grey(&sample)), "window {row}");
    }
    let first = grey(&data.sample(0).unwrap())[..32 * 32].to_vec();
    for row in [2, 3] {
        let mask = data.sample(row).unwrap().mask.unwrap();
        assert!(mask.shape() == [1, 32, 32] && close(mask.f32s().unwrap(), &first), "window {row}");
    }
    let told = |row: usize| data.sample(row).unwrap_err().chain();
    assert!(told(4).contains("short: expected a picture or the 5 frames of the clip, found 3"), "{}", told(4));
    assert!(told(6).contains("the mask of a row without a clip"), "{}", told(6));
    assert!(data.sample(7).unwrap().mask.is_none());

    // A prepared copy has the same masks.
    std::fs::write(world.path("two.csv"), format!("video,prompt,mask,answer\nclip,p,clip,red\nclip,p,{still},\n"))
        .unwrap();
    let sizes = ["data.num_frames=5", "data.height=32", "data.width=32", "data.windows={sliding: 4}"];
    let arguments = [&["data", "prepare", "two.csv", "copy"].map(String::from)[..], &set(&sizes)].concat();
    world.done(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    let copy = open("copy/metadata.jsonl");
    assert_eq!(copy.len(), 4);
    for row in 0..4 {
        let [mask, copied] = [&data, &copy].map(|data| data.sample(row).unwrap().mask.unwrap());
        assert!(copied.shape() == mask.shape() && close(copied.f32s().unwrap(), mask.f32s().unwrap()), "window {row}");
    }
    assert_eq!((&copy.sample(0).unwrap().columns["answer"], copy.sample(2).unwrap().columns.len()), (&"red".into(), 0));
}

#[test]
fn one_warning_names_clips_of_another_frame_rate_than_the_model_s() {
    let world = World::new(3);
    let run = |command: &[&str], settings: &[&str]| {
        let own = ["algo.name=flow_matching", "sample_steps=0"];
        let arguments: Vec<String> = command.iter().map(|s| s.to_string()).collect();
        let arguments = [arguments, set(&SETTINGS), set(&own), set(settings)].concat();
        let output = world.roll(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(output.status.success(), "{}", stderr_text(&output));
        String::from_utf8_lossy(&output.stdout).into_owned() + &stderr_text(&output)
    };
    let note = "3 of 3 clips have another frame rate than the videos that the model was trained on, which have 16 frames per \
                second: 8 (3); `data.fps: 16` resamples them";
    let train = |out| ["run", "--steps", "1", "--out", out];
    for command in [&train("a")[..], &["check"], &["data", "inspect", "metadata.csv"]] {
        let said = run(command, &[]).split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(said.matches(note).count(), 1, "{said}");
        assert!(
            !run(&if command[0] == "run" { train("b").to_vec() } else { command.to_vec() }, &["data.fps=8"])
                .contains("resamples")
        );
    }
    // The clips are no more than references here.
    assert!(
        !run(&["check"], &["algo.name=reward_fl", "reward.name=brightness", SHORT[1], SHORT[2], SHORT[3]])
            .contains("resamples")
    );
}

#[test]
fn clips_that_are_enlarged_are_noted() {
    let world = World::new(3);
    let run = |command: &[&str], side: &str| {
        let own = ["algo.name=flow_matching", "sample_steps=0"];
        let size = [format!("data.height={side}"), format!("data.width={side}")];
        let arguments: Vec<String> = command.iter().map(|s| s.to_string()).collect();
        let arguments = [arguments, set(&SETTINGS), set(&own), set(&size.each_ref().map(String::as_str))].concat();
        let output = world.roll(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(output.status.success(), "{}", stderr_text(&output));
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &stderr_text(&output);
        said.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let note = "3 of 3 clips are enlarged to `data.height` x `data.width` (96 x 96), up to 1.5 times";
    for command in [&["run", "--steps", "1", "--out", "a"][..], &["check"], &["data", "inspect", "metadata.csv"]] {
        let said = run(command, "96");
        assert_eq!(said.matches(note).count(), 1, "{said}");
    }
    assert!(!run(&["check"], "32").contains("enlarged"));
}

#[test]
fn clips_are_cropped_around_their_face() {
    let world = World::new(1);
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../demo/assets");
    let person = roll_media::read_video(demo.join("clips/unseen/person-12003.mp4"), &Default::default()).unwrap();
    let [frames, side, _] = person.dims();
    // The person stands at the left or the right of a grey frame.
    for (name, at) in [("left", 0), ("right", 16)] {
        let wide = side + 16;
        let mut values = vec![0.0; frames * 3 * side * wide];
        for (i, row) in person.frames().f32s().unwrap().chunks_exact(side).enumerate() {
            values[i * wide + at..][..side].copy_from_slice(row);
        }
        let wide = roll_core::Tensor::new(values, [frames, 3, side, wide]).unwrap();
        let wide = roll_core::Video::new(wide, 8.0).unwrap();
        roll_media::write_mp4(world.path(&format!("{name}.mp4")), &wide).unwrap();
    }
    let rows = "video,prompt,weight\nleft.mp4,a person,2\nright.mp4,a person,\n0.mp4,a grey square,\n";
    std::fs::write(world.path("faces.csv"), rows).unwrap();
    let path = format!("reward.reward_model_path={}", demo.join("face").display());
    let sizes = ["data.height=64", "data.width=64", "data.num_frames=5"];
    let prepare = |out: &str, crop: &[&str], settings: &[&str]| {
        let arguments: Vec<String> =
            ["data", "prepare", "faces.csv", out].iter().chain(crop).map(|s| s.to_string()).collect();
        let arguments = [arguments, set(&sizes), set(settings)].concat();
        world.roll(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let insightface = ["reward.name=insightface", path.as_str(), "reward.det_size=64"];
    let cropped = prepare("cropped", &["--crop", "face"], &insightface);
    assert!(cropped.status.success(), "{}", stderr_text(&cropped));
    assert!(stderr_text(&cropped).contains("no face was found"), "{}", stderr_text(&cropped));
    assert!(prepare("middle", &[], &[]).status.success());
    for clip in ["00001-left.mp4", "00002-right.mp4"] {
        let [cropped, middle] = ["cropped", "middle"].map(|out| {
            let clip = roll_media::read_video(world.path(out).join(clip), &Default::default()).unwrap();
            assert_eq!(clip.dims(), [5, 64, 64]);
            let pairs = clip.frames().f32s().unwrap().iter().zip(person.frames().f32s().unwrap());
            pairs.map(|(a, b)| (a - b).abs()).sum::<f32>() / (5 * 3 * 64 * 64) as f32
        });
        assert!(cropped < 0.75 * middle, "{clip}: {cropped} and {middle} from the person");
    }
    let lines = std::fs::read_to_string(world.path("cropped/metadata.jsonl")).unwrap();
    assert!(lines.lines().count() == 2 && lines.matches("\"weight\":2.0").count() == 1, "{lines}");
    fails(&prepare("unset", &["--crop", "face"], &[]), 2, &["`reward.name=insightface`", "`--crop face`"]);
}
