//! Files written by ffmpeg, read by this crate's own reader and through the program ffmpeg.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use roll_core::Video;
use roll_media::{Decoder, ReadOptions, Sizing, probe, read_image, read_video};

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
fn every_skip_and_the_limit_count_frames_of_the_requested_rate() {
    let Some(dir) = directory() else { return };
    let clip = make(dir.path(), "a.mp4", "-c:v libx264 -bf 0 -pix_fmt yuv420p");
    let all = both(&clip, AUTO);
    // Twenty a second, of ten: 0 0 1 1 2 2 ...; every third of those, without the first two.
    let options = ReadOptions { fps: Some(20.0), every: 3, skip: 2, max_frames: Some(5), ..AUTO };
    let picked = both(&clip, options);
    assert_eq!(picked.dims()[0], 5);
    for (t, from) in [3, 4, 6, 7, 9].into_iter().enumerate() {
        assert!(picked.frame(t) == all.frame(from), "frame {t}");
    }
    assert_eq!(both(&clip, ReadOptions { max_frames: None, skip: 0, ..options }).dims()[0], 20);
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

#[test]
fn fragments_are_read_wherever_they_are() {
    let Some(dir) = directory() else { return };
    let whole = make(dir.path(), "a.mp4", "-c:v libx264 -g 5 -bf 2 -pix_fmt yuv420p");
    let whole = read_video(whole, &AUTO).unwrap();
    // The first writes the frames of the first second to the index, the others to fragments.
    let forms = ["frag_keyframe", "frag_keyframe+empty_moov", "dash+frag_keyframe+global_sidx", "frag_every_frame"];
    for form in forms {
        ffmpeg(dir.path(), &format!("-i a.mp4 -c copy -movflags {form} f.mp4"));
        let path = dir.path().join("f.mp4");
        let told = read_video(&path, &OWN).unwrap_err().to_string();
        assert!(told.contains("fragmented") && told.contains("ffmpeg -i"), "{form}: {told}");
        assert_eq!(difference(&whole, &read_video(&path, &AUTO).unwrap()), 0.0, "{form}");
        let told = probe(&path, Decoder::Auto).unwrap();
        assert!(told.frames == 30 && (told.fps - 10.0).abs() < 0.1, "{form}: {told:?}");
        let bytes = std::fs::read(&path).unwrap();
        // The index of fragments at the end is not needed.
        let end = bytes.windows(4).rposition(|kind| kind == b"mfra").map_or(bytes.len(), |at| at - 4);
        std::fs::write(&path, &bytes[..end]).unwrap();
        assert_eq!(read_video(&path, &AUTO).unwrap().dims(), whole.dims(), "{form}");
        let last = bytes.windows(4).rposition(|kind| kind == b"moof").unwrap() - 4;
        for cut in [end / 3, end / 2, end * 4 / 5, last + 20, end - 30] {
            std::fs::write(&path, &bytes[..cut]).unwrap();
            assert!(read_video(&path, &AUTO).is_err(), "{form} cut at {cut} of {end}");
        }
    }
    // Files that were joined as they are: players show the first.
    make(dir.path(), "b.mp4", "-frames:v 7 -c:v libx264 -pix_fmt yuv420p");
    let both = ["a.mp4", "b.mp4"].map(|name| std::fs::read(dir.path().join(name)).unwrap());
    std::fs::write(dir.path().join("joined.mp4"), both.concat()).unwrap();
    for told in [
        read_video(dir.path().join("joined.mp4"), &AUTO).map(drop),
        probe(dir.path().join("joined.mp4"), Decoder::Auto).map(drop),
    ] {
        assert!(told.unwrap_err().to_string().contains("several indexes"));
    }
    // Bytes behind a whole file that belong to no box are harmless.
    std::fs::write(dir.path().join("tail.mp4"), [&both[0][..], b"\0\0\xff\xff some bytes"].concat()).unwrap();
    assert_eq!(difference(&whole, &read_video(dir.path().join("tail.mp4"), &AUTO).unwrap()), 0.0);
}

#[test]
fn clips_cut_at_an_open_group_of_pictures_are_read_and_counted() {
    let Some(dir) = directory() else { return };
    for (codec, options, containers) in [
        ("libx264", "-x264-params open-gop=1:log-level=none", &["mp4", "mov", "mkv"][..]),
        ("libx265", "-x265-params open-gop=1:keyint=15:log-level=none", &["mp4", "mkv", "ts"]),
        ("mpeg2video", "-q:v 2", &["ts", "mpg"]),
    ] {
        let source = format!("source-{codec}.{}", containers[0]);
        let whole = make(dir.path(), &source, &format!("-t 6 -c:v {codec} -g 15 -bf 3 {options} -pix_fmt yuv420p"));
        let whole = read_video(whole, &AUTO).unwrap();
        for container in containers {
            let name = format!("cut-{codec}.{container}");
            ffmpeg(dir.path(), &format!("-ss 1.6 -i {source} -c copy {name}"));
            let cut = read_video(dir.path().join(&name), &AUTO).unwrap();
            let (frames, from) = (cut.dims()[0], whole.dims()[0] - cut.dims()[0]);
            assert!((2..=16).contains(&frames), "{name}: {frames}");
            for t in 0..frames {
                assert!(cut.frame(t) == whole.frame(from + t), "{name}: frame {t}");
            }
            let told = probe(dir.path().join(&name), Decoder::Auto).unwrap();
            assert!(told.frames == frames && (told.fps - 10.0).abs() < 0.1, "{name}: {told:?}, {frames}");
        }
    }
}

#[test]
fn complaints_that_concern_no_pixel_are_harmless() {
    let Some(dir) = directory() else { return };
    // Supplemental information that claims more bytes than it has, before each frame.
    let stream = make(dir.path(), "a.h264", "-c:v libx264 -bf 0 -x264-params slices=1 -pix_fmt yuv420p");
    let bytes = std::fs::read(stream).unwrap();
    let mut spoiled = Vec::new();
    for (at, byte) in bytes.iter().enumerate() {
        let is_slice = bytes[at..].starts_with(&[0, 0, 1, 0x41]) || bytes[at..].starts_with(&[0, 0, 1, 0x65]);
        if is_slice {
            spoiled.extend([0, 0, 1, 6, 0, 255, 255, 2, 0x11, 0x22, 0x80]);
        }
        spoiled.push(*byte);
    }
    std::fs::write(dir.path().join("b.h264"), spoiled).unwrap();
    let whole = read_video(dir.path().join("a.h264"), &AUTO).unwrap();
    for container in ["mkv", "mp4", "ts"] {
        ffmpeg(dir.path(), &format!("-r 10 -i b.h264 -c copy b.{container}"));
        let read = read_video(dir.path().join(format!("b.{container}")), &AUTO).unwrap();
        assert!(difference(&whole, &read) <= 2.0, "{container}");
    }
    // Transport streams, joined as they are, and one that was switched on in the middle.
    for (name, from) in [("s1.ts", 0), ("s2.ts", 5)] {
        ffmpeg(
            dir.path(),
            &format!(
                "-f lavfi -i testsrc2=size=96x64:rate=10:duration=2 -vf hue=h={from}0 \
            -c:v libx264 -g 10 -pix_fmt yuv420p {name}"
            ),
        );
    }
    let parts = ["s1.ts", "s2.ts"].map(|name| std::fs::read(dir.path().join(name)).unwrap());
    std::fs::write(dir.path().join("joined.ts"), parts.concat()).unwrap();
    let joined = read_video(dir.path().join("joined.ts"), &AUTO).unwrap();
    assert_eq!(joined.dims()[0], 40);
    assert_eq!(probe(dir.path().join("joined.ts"), Decoder::Auto).unwrap().frames, 40);
    for (i, name) in ["s1.ts", "s2.ts"].into_iter().enumerate() {
        let part = read_video(dir.path().join(name), &AUTO).unwrap();
        assert!((0..20).all(|t| part.frame(t) == joined.frame(20 * i + t)), "{name}");
    }
    // The first group is gone, and the head of its data with it.
    std::fs::write(dir.path().join("middle.ts"), &parts[0][188 * 12..]).unwrap();
    let middle = read_video(dir.path().join("middle.ts"), &AUTO).unwrap();
    assert_eq!(middle.dims()[0], 10);
    let first = read_video(dir.path().join("s1.ts"), &AUTO).unwrap();
    assert!((0..10).all(|t| middle.frame(t) == first.frame(10 + t)));
    assert_eq!(probe(dir.path().join("middle.ts"), Decoder::Auto).unwrap().frames, 10);
}

#[test]
fn files_that_end_early_are_refused_in_every_container() {
    let Some(dir) = directory() else { return };
    for (name, arguments) in [
        ("a.mkv", "-c:v libx264 -pix_fmt yuv420p"),
        ("a.webm", "-c:v libvpx -deadline realtime"),
        ("live.webm", "-c:v libvpx -deadline realtime -live 1 -f webm"),
        ("a.avi", "-c:v mpeg4"),
        ("a.flv", "-c:v libx264 -pix_fmt yuv420p"),
        ("a.ts", "-c:v libx264 -pix_fmt yuv420p"),
        ("a.ogv", "-c:v libtheora"),
        ("a.mpg", "-c:v mpeg2video"),
        ("a.wmv", "-c:v wmv2"),
        ("b.mp4", "-c:v libx265 -x265-params log-level=none -pix_fmt yuv420p -movflags +faststart"),
        ("a.mov", "-c:v mjpeg -pix_fmt yuvj420p"),
        ("a.ivf", "-c:v libvpx -deadline realtime"),
    ] {
        let path = make(dir.path(), name, arguments);
        assert_eq!(read_video(&path, &AUTO).unwrap().dims()[0], 30, "{name}");
        let bytes = std::fs::read(&path).unwrap();
        for cut in [bytes.len() / 2 + 1, bytes.len() * 2 / 3, bytes.len() * 9 / 10] {
            std::fs::write(&path, &bytes[..cut]).unwrap();
            let told = read_video(&path, &AUTO).map(|clip| clip.dims()).expect_err(name).to_string();
            assert!(told.contains(name), "{told}");
        }
        // Whose container says its size is refused even if only its first frames are asked for.
        if ["a.mkv", "a.webm", "a.avi", "a.ogv"].contains(&name) {
            let few = ReadOptions { max_frames: Some(3), ..AUTO };
            assert!(read_video(&path, &few).unwrap_err().to_string().contains("cut short"), "{name}");
            assert!(probe(&path, Decoder::Auto).unwrap_err().to_string().contains("cut short"), "{name}");
        }
    }
}

#[test]
fn frames_that_change_their_size_are_named() {
    let Some(dir) = directory() else { return };
    for (name, size) in [("a.webm", "160x96"), ("b.webm", "128x80")] {
        let source = format!("-f lavfi -i testsrc2=size={size}:rate=10:duration=1");
        ffmpeg(dir.path(), &format!("{source} -c:v libvpx -deadline realtime {name}"));
    }
    std::fs::write(dir.path().join("list"), "file a.webm\nfile b.webm\n").unwrap();
    ffmpeg(dir.path(), "-f concat -i list -c copy both.webm");
    for sizing in [Sizing::Native, Sizing::Exact([64, 64])] {
        let told = read_video(dir.path().join("both.webm"), &ReadOptions { sizing, ..AUTO }).unwrap_err().to_string();
        assert!(told.contains("change their size"), "{told}");
    }
    let few = ReadOptions { max_frames: Some(5), ..AUTO };
    assert_eq!(read_video(dir.path().join("both.webm"), &few).unwrap().dims(), [5, 96, 160]);
}

#[test]
fn frames_of_animated_pictures_are_read() {
    let Some(dir) = directory() else { return };
    std::fs::create_dir(dir.path().join("f")).unwrap();
    make(dir.path(), "f/%d.png", "-frames:v 10 -pix_fmt rgb24");
    let expected = read_video(dir.path().join("f"), &OWN).unwrap();
    for (name, arguments, format) in [
        ("a.webp", "-c:v libwebp_anim -lossless 1 -pix_fmt bgra", "animated WebP"),
        ("a.png", "-c:v apng -f apng -pix_fmt rgb24", "animated PNG"),
    ] {
        ffmpeg(dir.path(), &format!("-framerate 10 -i f/%d.png {arguments} {name}"));
        let path = dir.path().join(name);
        let clip = read_video(&path, &OWN).unwrap();
        // The WebP decoder rounds where frames are blended.
        assert!(difference(&expected, &clip) < 1.01, "{name}");
        assert!((clip.fps() - 10.0).abs() < 1e-6, "{name}: {}", clip.fps());
        assert_eq!(roll_media::format(&path).unwrap(), format);
        let told = probe(&path, Decoder::Own).unwrap();
        assert_eq!((told.frames, told.size), (10, [64, 96]), "{name}");
        let sampled = read_video(&path, &ReadOptions { fps: Some(5.0), ..OWN }).unwrap();
        assert!(sampled.dims()[0] == 5 && sampled.frame(2) == clip.frame(4), "{name}");
        // As a picture, its first frame.
        assert!(read_image(&path, Sizing::Native).unwrap().f32s().unwrap() == clip.frame(0), "{name}");
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() * 2 / 3]).unwrap();
        assert!(read_video(&path, &OWN).is_err() && probe(&path, Decoder::Own).is_err(), "{name}");
    }
}

/// A TIFF of 3 x 2 pixels with "abcdef" as grey values, and these further entries: tag, type, value.
fn tiff(more: &[(u16, u16, u32)]) -> Vec<u8> {
    let usual =
        [(256, 4, 3), (257, 4, 2), (258, 3, 8), (259, 3, 1), (262, 3, 1), (273, 4, 8), (277, 3, 1), (278, 4, 2)];
    let mut entries: Vec<(u16, u16, u32)> = usual.into_iter().chain([(279, 4, 6)]).collect();
    entries.retain(|(tag, ..)| more.iter().all(|(other, ..)| other != tag));
    entries.extend(more);
    entries.sort();
    let mut bytes = [b"II*\0".as_slice(), &14u32.to_le_bytes(), b"abcdef"].concat();
    bytes.extend((entries.len() as u16).to_le_bytes());
    for (tag, kind, value) in entries {
        bytes.extend([tag.to_le_bytes(), kind.to_le_bytes()].concat());
        bytes.extend([1u32.to_le_bytes(), value.to_le_bytes()].concat());
    }
    bytes.extend([0; 4]);
    bytes
}

#[test]
fn tiff_is_read_right_or_refused() {
    let Some(dir) = directory() else { return };
    let path = dir.path().join("a.tif");
    let read = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        let picture = read_image(&path, Sizing::Native).map_err(|error| error.to_string())?;
        let plane = &picture.f32s().unwrap()[..6];
        Ok::<_, String>(plane.iter().map(|v| ((v + 1.0) * 127.5).round() as u8 as char).collect::<String>())
    };
    assert_eq!(read(&tiff(&[])).unwrap(), "abcdef");
    // Expected results of PIL's `ImageOps.exif_transpose`; the tag as SHORT and as LONG.
    let shown = ["abcdef", "cbafed", "fedcba", "defabc", "adbecf", "daebfc", "fcebda", "cfbead"];
    for (orientation, expected) in (1..).zip(shown) {
        for kind in [3, 4] {
            assert_eq!(read(&tiff(&[(274, kind, orientation)])).unwrap(), expected, "{orientation}");
        }
    }
    for (what, entry) in [
        ("JPEG", (259, 3, 7)),
        ("old JPEG", (259, 3, 6)),
        ("tiles", (324, 4, 8)),
        ("Y'CbCr", (262, 3, 6)),
        ("CMYK", (262, 3, 5)),
        ("32 bits", (258, 3, 32)),
        ("floats", (339, 3, 3)),
        ("bits in another order", (266, 3, 2)),
    ] {
        let told = read(&tiff(&[entry])).expect_err(what);
        assert!(told.contains("TIFF of a kind that cannot be read") && told.contains("a.tif"), "{what}: {told}");
    }
    assert!(read(&tiff(&[(284, 3, 2), (277, 3, 3), (262, 3, 2)])).unwrap_err().contains("plane"));
    assert!(read(&tiff(&[(279, 4, 6000)])).unwrap_err().contains("cut short"));
    assert!(read(&tiff(&[])[..12]).unwrap_err().contains("cut short"));
    // Those that ffmpeg writes.
    let expected = read_image(make(dir.path(), "a.png", "-frames:v 1 -pix_fmt rgb24"), Sizing::Native).unwrap();
    for compression in ["raw", "lzw", "packbits", "deflate"] {
        let arguments = format!("-frames:v 1 -pix_fmt rgb24 -compression_algo {compression}");
        let picture = read_image(make(dir.path(), "b.tif", &arguments), Sizing::Native).unwrap();
        let db = psnr(picture.f32s().unwrap(), expected.f32s().unwrap());
        assert!(db > 24.0, "{compression}: {db:.1} dB");
    }
}
