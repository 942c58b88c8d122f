//! Files written by ffmpeg, read by this crate's own reader and through the program ffmpeg.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use roll_core::Video;
use roll_data::{Decoder, ReadOptions, Sizing, probe, read_image, read_video};

const OWN: ReadOptions =
    ReadOptions { skip: 0, max_frames: None, fps: None, every: 1, sizing: Sizing::Native, decoder: Decoder::Own };
const AUTO: ReadOptions = ReadOptions { decoder: Decoder::Auto, ..OWN };
const FFMPEG: ReadOptions = ReadOptions { decoder: Decoder::Ffmpeg, ..OWN };

/// A directory for clips that ffmpeg makes; `None` skips the test, where there is no ffmpeg.
fn directory() -> Option<tempfile::TempDir> {
    let found = ["ffmpeg", "ffprobe"].map(|program| {
        Command::new(program).arg("-version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
    });
    if found != [true, true] {
        roll_testing::skip!("ffmpeg and ffprobe are not in the PATH", needs = "ffmpeg");
    }
    Some(tempfile::tempdir().unwrap())
}

/// Runs ffmpeg in `dir` with the words of `arguments`.
fn ffmpeg(dir: &Path, arguments: &str) {
    let made = Command::new("ffmpeg")
        .current_dir(dir)
        .args(["-v", "error", "-nostdin", "-y"])
        .args(arguments.split_whitespace())
        .output()
        .unwrap();
    assert!(made.status.success(), "{arguments}: {}", String::from_utf8_lossy(&made.stderr));
}

/// Three seconds of a moving picture at 10 frames a second, as `name`.
fn make(dir: &Path, name: &str, arguments: &str) -> PathBuf {
    ffmpeg(dir, &format!("-f lavfi -i testsrc2=size=96x64:rate=10:duration=3 {arguments} {name}"));
    dir.join(name)
}

/// Largest difference of two videos on the scale of 8 bits; they must have one shape.
fn difference(a: &Video, b: &Video) -> f32 {
    assert_eq!(a.dims(), b.dims());
    let (a, b) = (a.frames().f32s().unwrap(), b.frames().f32s().unwrap());
    a.iter().zip(b).map(|(a, b)| (a - b).abs() * 127.5).fold(0.0, f32::max)
}

fn psnr(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let mse = a.iter().zip(b).map(|(a, b)| f64::from((a - b) * 127.5).powi(2)).sum::<f64>() / a.len() as f64;
    10.0 * (255.0f64.powi(2) / mse.max(1e-9)).log10()
}

/// Both readers, who must agree on everything.
fn both(path: &Path, options: ReadOptions) -> Video {
    let own = read_video(path, &ReadOptions { decoder: Decoder::Own, ..options }).unwrap();
    let theirs = read_video(path, &ReadOptions { decoder: Decoder::Ffmpeg, ..options }).unwrap();
    let worst = difference(&own, &theirs);
    assert!(worst <= 2.0, "{}: {worst}", path.display());
    // ffmpeg's mean of a variable rate leaves out how long the last frames stay.
    assert!((own.fps() / theirs.fps() - 1.0).abs() < 0.15, "{}: {} and {}", path.display(), own.fps(), theirs.fps());
    if options == AUTO {
        for decoder in [Decoder::Own, Decoder::Ffmpeg] {
            let told = probe(path, decoder).unwrap();
            assert_eq!([told.frames, told.size[0], told.size[1]], own.dims(), "{decoder:?}");
            assert!((told.fps - own.fps()).abs() < 0.01, "{decoder:?}: {}", told.fps);
        }
    }
    own
}

#[test]
fn stream_copied_clip_begins_at_its_cut() {
    let Some(dir) = directory() else { return };
    let whole = make(dir.path(), "whole.mp4", "-c:v libx264 -g 12 -bf 2 -pix_fmt yuv420p");
    let whole = both(&whole, AUTO);
    assert_eq!(whole.dims()[0], 30);
    for (name, cut, first, least) in
        [("start", "-ss 1.5", 15, 15), ("part", "-ss 1.7 -t 0.6", 17, 6), ("key", "-ss 1.2", 12, 18)]
    {
        ffmpeg(dir.path(), &format!("{cut} -i whole.mp4 -c copy {name}.mp4"));
        let part = both(&dir.path().join(format!("{name}.mp4")), AUTO);
        let frames = part.dims()[0];
        assert!((least..least + 3).contains(&frames), "{name}: {frames}");
        for t in 0..frames {
            assert!(part.frame(t) == whole.frame(first + t), "{name}: frame {t}");
        }
    }
}

#[test]
fn variable_rate_clip_is_sampled_by_time() {
    let Some(dir) = directory() else { return };
    // Ten frames in a second, then twenty in six. Without B-frames, of which OpenH264 decodes some a little otherwise.
    let times = "setpts='if(lt(N,10),N,10+(N-10)*3)'";
    let clip = make(dir.path(), "a.mp4", &format!("-vf {times} -vsync vfr -c:v libx264 -bf 0 -pix_fmt yuv420p"));
    let all = both(&clip, AUTO);
    assert!(all.dims()[0] == 30 && all.fps() < 5.0);
    let sampled = both(&clip, ReadOptions { fps: Some(5.0), ..AUTO });
    // At 0, 0.2, ... of the first second every other frame; then each frame stays for 0.3 s.
    let expected = [0, 2, 4, 6, 8, 10, 10, 11, 12, 12, 13, 14, 14];
    for (t, from) in expected.into_iter().enumerate() {
        assert!(sampled.frame(t) == all.frame(from), "frame {t}");
    }
    let first = both(&clip, ReadOptions { fps: Some(5.0), max_frames: Some(9), ..AUTO });
    assert!(first.dims()[0] == 9 && first.frame(8) == all.frame(12));
}

#[test]
fn both_readers_return_square_pixels() {
    let Some(dir) = directory() else { return };
    for (sar, size) in [("4/3", [64, 128]), ("1/2", [128, 96]), ("1/1", [64, 96])] {
        let arguments = format!("-vf setsar={sar} -frames:v 5 -c:v libx264 -pix_fmt yuv420p");
        let clip = both(&make(dir.path(), "a.mp4", &arguments), AUTO);
        assert_eq!(clip.dims(), [5, size[0], size[1]], "{sar}");
        // In a container that this crate does not read.
        ffmpeg(dir.path(), "-i a.mp4 -c copy a.mkv");
        assert_eq!(difference(&clip, &read_video(dir.path().join("a.mkv"), &AUTO).unwrap()), 0.0);
    }
}

#[test]
fn display_matrices_match_ffmpeg() {
    let Some(dir) = directory() else { return };
    let bytes = std::fs::read(make(dir.path(), "a.mp4", "-frames:v 3 -c:v libx264 -pix_fmt yuv420p")).unwrap();
    let at = bytes.windows(4).position(|w| w == b"tkhd").unwrap() + 4 + 4 + 20 + 16;
    let matrices = [
        [1, 0, 0, 1],
        [0, 1, -1, 0],
        [-1, 0, 0, -1],
        [0, -1, 1, 0],
        [-1, 0, 0, 1],
        [1, 0, 0, -1],
        [0, 1, 1, 0],
        [0, -1, -1, 0],
    ];
    let mut seen: Vec<Vec<f32>> = Vec::new();
    for [a, b, c, d] in matrices {
        let mut turned = bytes.clone();
        for (i, n) in [a, b, 0, c, d].into_iter().enumerate() {
            turned[at + 4 * i..][..4].copy_from_slice(&(n * 0x1_0000i32).to_be_bytes());
        }
        let path = dir.path().join("turned.mp4");
        std::fs::write(&path, turned).unwrap();
        let clip = both(&path, AUTO);
        assert_eq!(clip.dims(), if a == 0 { [3, 96, 64] } else { [3, 64, 96] });
        assert!(!seen.iter().any(|other| other == clip.frame(0)));
        seen.push(clip.frame(0).to_vec());
    }
}

#[test]
fn colour_ranges_and_matrices_match_our_reader() {
    let Some(dir) = directory() else { return };
    for (range, matrix) in [("tv", "smpte170m"), ("tv", "bt709"), ("pc", "smpte170m"), ("tv", "bt2020nc")] {
        let arguments = format!(
            "-frames:v 4 -vf scale=out_color_matrix={}:out_range={range},format=yuv420p -c:v libx264 -crf 12 \
             -color_range {range} -colorspace {matrix}",
            matrix.trim_end_matches("nc")
        );
        let clip = both(&make(dir.path(), "a.mp4", &arguments), AUTO);
        // The blue of the test picture's bars, whatever it was coded by.
        let blue = (0..96 * 64).filter(|i| {
            let at = |c: usize| clip.frame(0)[c * 96 * 64 + i];
            at(0) < -0.8 && at(1) < -0.8 && at(2) > 0.8
        });
        assert!(blue.count() > 50, "{range} {matrix}");
    }
}

/// Codec, container, pixel format, and how near to the source it comes in dB.
const FORMATS: [(&str, &str, &str, f64); 18] = [
    ("libx264", "mp4", "yuv420p", 30.0),
    ("libx264", "mkv", "yuv420p", 30.0),
    ("libx264", "mov", "yuv422p", 30.0),
    ("libx264", "mp4", "yuv444p10le", 30.0),
    ("libx264", "ts", "yuv420p", 30.0),
    ("libx265", "mp4", "yuv420p10le", 28.0),
    ("libx265", "mkv", "yuv420p", 28.0),
    ("libvpx", "webm", "yuv420p", 22.0),
    ("libvpx-vp9", "webm", "yuv420p", 25.0),
    ("libaom-av1", "mp4", "yuv420p", 25.0),
    ("mpeg4", "avi", "yuv420p", 22.0),
    ("mpeg2video", "mpg", "yuv420p", 22.0),
    ("mpeg1video", "mpg", "yuv420p", 22.0),
    ("mjpeg", "avi", "yuvj420p", 22.0),
    ("prores", "mov", "yuv422p10le", 30.0),
    ("ffv1", "mkv", "yuv420p", 35.0),
    ("rawvideo", "avi", "bgr24", 36.0),
    ("qtrle", "mov", "rgb24", 36.0),
];

#[test]
fn reads_files_written_by_ffmpeg() {
    let Some(dir) = directory() else { return };
    let encoders = Command::new("ffmpeg").args(["-v", "error", "-encoders"]).output().unwrap().stdout;
    let encoders = String::from_utf8_lossy(&encoders).into_owned();
    let picture = "-f lavfi -i testsrc2=size=96x64:rate=25:duration=1 -vf gblur=sigma=2";
    ffmpeg(dir.path(), &format!("{picture} -c:v rawvideo -pix_fmt yuv444p -frames:v 9 source.avi"));
    let source = read_video(dir.path().join("source.avi"), &AUTO).unwrap();
    assert_eq!(source.dims(), [9, 64, 96]);
    for (codec, container, format, expected) in FORMATS {
        if !encoders.split_whitespace().any(|word| word == codec) {
            roll_testing::skipped(&format!("this ffmpeg has no encoder {codec}"), None);
            continue;
        }
        let speed = match codec {
            "libaom-av1" => "-cpu-used 8 -crf 20",
            "libvpx" | "libvpx-vp9" => "-b:v 2M -deadline realtime",
            "libx265" => "-x265-params log-level=none",
            "mpeg1video" | "mpeg2video" | "mpeg4" | "mjpeg" => "-q:v 2",
            _ => "",
        };
        let name = format!("{codec}-{format}.{container}");
        ffmpeg(dir.path(), &format!("-i source.avi -c:v {codec} -pix_fmt {format} {speed} {name}"));
        let path = dir.path().join(&name);
        let video = read_video(&path, &AUTO).unwrap();
        assert_eq!(video.dims(), source.dims(), "{name}");
        assert!((video.fps() - 25.0).abs() < 0.1, "{name}: {}", video.fps());
        for t in 0..9 {
            let db = psnr(video.frame(t), source.frame(t));
            assert!(db > expected, "{name}, frame {t}: {db:.1} dB");
        }
        let told = probe(&path, Decoder::Auto).unwrap();
        assert_eq!((told.frames, told.size), (9, [64, 96]), "{name}");
        let few = read_video(&path, &ReadOptions { max_frames: Some(5), fps: Some(12.5), ..AUTO }).unwrap();
        assert!(few.dims()[0] == 5 && few.frame(2) == video.frame(4), "{name}");
        let sparse = read_video(&path, &ReadOptions { max_frames: Some(2), every: 3, ..AUTO }).unwrap();
        assert!(sparse.dims()[0] == 2 && sparse.frame(1) == video.frame(3), "{name}");
    }
}

#[test]
fn ffmpeg_reads_fragmented_odd_and_changing_streams() {
    let Some(dir) = directory() else { return };
    let whole = both(&make(dir.path(), "a.mp4", "-c:v libx264 -pix_fmt yuv420p"), AUTO);
    ffmpeg(dir.path(), "-i a.mp4 -c copy -movflags frag_keyframe+empty_moov fragments.mp4");
    let told = read_video(dir.path().join("fragments.mp4"), &OWN).unwrap_err().to_string();
    assert!(told.contains("fragmented") && told.contains("ffmpeg -i"), "{told}");
    assert_eq!(difference(&whole, &read_video(dir.path().join("fragments.mp4"), &AUTO).unwrap()), 0.0);

    make(dir.path(), "odd.webm", "-vf scale=95:63 -frames:v 3 -c:v libvpx-vp9 -pix_fmt yuv420p -deadline realtime");
    assert_eq!(read_video(dir.path().join("odd.webm"), &AUTO).unwrap().dims(), [3, 63, 95]);

    for (name, more) in [("progressive", ""), ("interlaced", ":interlaced=1")] {
        let arguments = format!("-frames:v 10 -c:v libx264 -pix_fmt yuv420p -x264-params repeat-headers=1{more}");
        make(dir.path(), &format!("{name}.h264"), &arguments);
    }
    let joined = ["progressive.h264", "interlaced.h264"].map(|name| std::fs::read(dir.path().join(name)).unwrap());
    std::fs::write(dir.path().join("both.h264"), joined.concat()).unwrap();
    ffmpeg(dir.path(), "-r 10 -i both.h264 -c copy middle.mp4");
    let middle = dir.path().join("middle.mp4");
    let told = read_video(&middle, &OWN).unwrap_err().to_string();
    assert!(told.contains("frame 10: interlaced"), "{told}");
    assert_eq!(read_video(&middle, &ReadOptions { max_frames: Some(5), ..OWN }).unwrap().dims()[0], 5);
    // Some of the frames around the change are there for others alone.
    assert!((15..=20).contains(&read_video(&middle, &AUTO).unwrap().dims()[0]));
}

#[test]
fn damaged_files_and_non_videos_are_errors() {
    let Some(dir) = directory() else { return };
    make(dir.path(), "a.mkv", "-c:v libx264 -g 5 -pix_fmt yuv420p");
    make(dir.path(), "a.mp4", "-c:v libx264 -g 5 -pix_fmt yuv420p -movflags +faststart");
    make(dir.path(), "b.mp4", "-c:v libx265 -x265-params log-level=none -pix_fmt yuv420p -movflags +faststart");
    let told = |name: &str| read_video(dir.path().join(name), &AUTO).unwrap_err().to_string();
    for name in ["a.mkv", "a.mp4", "b.mp4"] {
        let mut bytes = std::fs::read(dir.path().join(name)).unwrap();
        let cut = format!("cut-{name}");
        std::fs::write(dir.path().join(&cut), &bytes[..bytes.len() / 2]).unwrap();
        let middle = bytes.len() / 2;
        (middle..middle + 400).for_each(|i| bytes[i] ^= (i as u8).wrapping_mul(71));
        let damaged = format!("damaged-{name}");
        std::fs::write(dir.path().join(&damaged), &bytes).unwrap();
        // In Matroska ffmpeg goes on behind a cut, and in some runs behind damage.
        if name != "a.mkv" {
            assert!(told(&cut).contains("cut-"), "{}", told(&cut));
            assert!(told(&damaged).contains("damaged-"), "{}", told(&damaged));
        }
    }
    std::fs::write(dir.path().join("text.mp4"), "hello, I am a text file").unwrap();
    assert!(told("text.mp4").contains("neither a video nor a picture"), "{}", told("text.mp4"));
    ffmpeg(dir.path(), "-f lavfi -i sine=duration=1 sound.m4a");
    assert!(told("sound.m4a").contains("no video"), "{}", told("sound.m4a"));
    // A playlist names other files.
    let list = "#EXTM3U\n#EXT-X-TARGETDURATION:3\n#EXTINF:3,\na.mkv\n#EXT-X-ENDLIST\n";
    std::fs::write(dir.path().join("list.mp4"), list).unwrap();
    assert!(told("list.mp4").contains("another format"), "{}", told("list.mp4"));
}

#[test]
fn file_names_are_not_interpreted_as_options_or_urls() {
    let Some(dir) = directory() else { return };
    let source = make(dir.path(), "source.mkv", "-frames:v 2 -c:v ffv1 -pix_fmt yuv420p");
    let bytes = std::fs::read(source).unwrap();
    for name in ["-i.mkv", "http:a.mkv", "concat:a|b.mkv", "a %03d.mkv", "'quoted' \"name\";.mkv", "ö\n.mkv"] {
        let path = dir.path().join(name);
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(read_video(&path, &FFMPEG).unwrap().dims(), [2, 64, 96], "{name}");
    }
}

#[test]
fn ffmpeg_reads_other_picture_formats() {
    let Some(dir) = directory() else { return };
    let png = make(dir.path(), "a.png", "-frames:v 1 -pix_fmt rgb24");
    let expected = read_image(png, Sizing::Native).unwrap();
    for (name, arguments) in [
        ("a.bmp", ""),
        ("a.tiff", "-pix_fmt rgb24"),
        ("a.avif", "-c:v libaom-av1 -still-picture 1 -crf 5 -pix_fmt yuv444p"),
    ] {
        let picture = read_image(make(dir.path(), name, &format!("-frames:v 1 {arguments}")), Sizing::Native).unwrap();
        let db = psnr(picture.f32s().unwrap(), expected.f32s().unwrap());
        assert!(db > 24.0, "{name}: {db:.1} dB");
    }
    let clip = make(dir.path(), "a.webm", "-frames:v 2 -c:v libvpx-vp9 -deadline realtime");
    let told = read_image(clip, Sizing::Native).unwrap_err().to_string();
    assert!(told.contains("a video, expected a picture"), "{told}");
}
