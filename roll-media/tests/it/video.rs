//! Videos written and read back, a real clip, and files that mean harm.

use std::path::{Path, PathBuf};

use roll_core::{Tensor, Video};
use roll_media::{Decoder, Picture, ReadOptions, Sizing, read_video};

/// A ball moving over a gradient.
fn smooth(frames: usize, height: usize, width: usize) -> Video {
    let mut values = Vec::new();
    for t in 0..frames {
        let at = |c: usize, y: usize, x: usize| {
            let (fy, fx) = (y as f32 / height as f32, x as f32 / width as f32);
            let d = ((fx - 0.3 - 0.03 * t as f32).powi(2) + (fy - 0.5).powi(2)) * 12.0;
            [0.8 * fx - 0.4, 0.5 - fy, 0.6 * fx * fy][c] + 0.4 * (-d).exp() * [1.0, -0.5, 0.3][c]
        };
        for c in 0..3 {
            values.extend((0..height * width).map(|i| at(c, i / width, i % width).clamp(-1.0, 1.0)));
        }
    }
    Video::new(Tensor::new(values, [frames, 3, height, width]).unwrap(), 12.5).unwrap()
}

/// Peak signal-to-noise ratio in dB, on the scale of 8-bit values.
fn psnr(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let mse = a.iter().zip(b).map(|(a, b)| f64::from((a - b) * 127.5).powi(2)).sum::<f64>() / a.len() as f64;
    10.0 * (255.0f64.powi(2) / mse.max(1e-9)).log10()
}

/// A clip that a camera took; `None` skips the test, where it is not there.
fn real_clip() -> Option<PathBuf> {
    let data = std::env::var_os("ROLL_TEST_DATA").map_or_else(|| root().join("../shared"), PathBuf::from);
    let path = data.join("media/carphone_pristine.mp4");
    if !path.exists() {
        roll_testing::skip!(format!("{} is not there (set ROLL_TEST_DATA)", path.display()), needs = "media");
    }
    Some(path)
}

/// Four pixels with transparency, as PIL writes them.
const RGBA: &[u8] = &[
    137, 80, 78, 71, 13, 10, 26, 10, 0, 0, 0, 13, 73, 72, 68, 82, 0, 0, 0, 4, 0, 0, 0, 1, 8, 6, 0, 0, 0, 249, 60, 15,
    205, 0, 0, 0, 26, 73, 68, 65, 84, 120, 156, 99, 248, 207, 192, 240, 159, 225, 63, 67, 3, 151, 200, 127, 134, 255,
    255, 255, 51, 2, 0, 60, 55, 7, 153, 96, 63, 64, 48, 0, 0, 0, 0, 73, 69, 78, 68, 174, 66, 96, 130,
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// Options that use this crate's own reader only.
const OWN: ReadOptions =
    ReadOptions { skip: 0, max_frames: None, fps: None, every: 1, sizing: Sizing::Native, decoder: Decoder::Own };

fn error_message(path: &Path) -> String {
    read_video(path, &OWN).unwrap_err().to_string()
}

#[test]
fn mp4_round_trip_is_above_35_db() {
    let dir = tempfile::tempdir().unwrap();
    for (frames, height, width) in [(13, 96, 128), (5, 16, 16), (1, 64, 48), (60, 32, 50)] {
        let video = smooth(frames, height, width);
        let path = dir.path().join("a.mp4");
        roll_media::write_mp4(&path, &video).unwrap();
        let back = read_video(&path, &OWN).unwrap();
        assert_eq!(back.dims(), [frames, height, width]);
        assert!((back.fps() - 12.5).abs() < 0.2 || frames == 1, "{}", back.fps());
        for t in 0..frames {
            let db = psnr(back.frame(t), video.frame(t));
            assert!(db > 35.0, "{frames} x {height} x {width}, frame {t}: {db:.1} dB");
        }
    }
}

#[test]
fn odd_sizes_are_padded_with_the_last_row_and_column() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("odd.mp4");
    let video = smooth(3, 33, 47);
    roll_media::write_mp4(&path, &video).unwrap();
    let back = read_video(&path, &OWN).unwrap();
    assert_eq!(back.dims(), [3, 34, 48]);
    let frame = back.frame(1);
    let (inner, edge) = (frame[32 * 48 + 10], frame[33 * 48 + 10]);
    assert!((inner - edge).abs() < 0.05);
    assert!(roll_media::write_mp4(dir.path().join("tiny.mp4"), &smooth(1, 8, 8)).is_err());
    assert!(!dir.path().join("tiny.mp4").exists());
}

#[test]
fn gif_and_png_sequences_round_trip() {
    let dir = tempfile::tempdir().unwrap();
    let video = smooth(6, 40, 56);
    let gif = dir.path().join("a.gif");
    roll_media::write_gif(&gif, &video).unwrap();
    let back = read_video(&gif, &OWN).unwrap();
    assert_eq!((back.dims(), (back.fps() - 12.5).abs() < 1e-9), ([6, 40, 56], true));
    assert!(psnr(back.frames().f32s().unwrap(), video.frames().f32s().unwrap()) > 28.0);
    let half = read_video(&gif, &ReadOptions { fps: Some(6.25), ..OWN }).unwrap();
    assert!(half.dims()[0] == 3 && half.frame(1) == back.frame(2));

    let pngs = dir.path().join("frames");
    assert_eq!(roll_media::write_pngs(&pngs, &video).unwrap().len(), 6);
    let back = read_video(&pngs, &ReadOptions { max_frames: Some(4), ..OWN }).unwrap();
    assert_eq!(back.dims(), [4, 40, 56]);
    for t in 0..4 {
        assert!(Picture::from_frame(&back, t) == Picture::from_frame(&video, t));
    }
    let one = read_video(pngs.join("frame_00002.png"), &OWN).unwrap();
    assert!(one.dims() == [1, 40, 56] && one.frame(0) == back.frame(2));

    // A clip of one frame is written as a picture.
    let stem = dir.path().join("clip-1.0");
    for (clip, name) in [(&video, "clip-1.0.mp4"), (&one, "clip-1.0.png")] {
        let path = roll_media::write_clip(&stem, clip).unwrap();
        assert_eq!((path.as_path(), roll_media::clip_file(&stem)), (&*dir.path().join(name), Some(path.clone())));
    }
    assert!(read_video(dir.path().join("clip-1.0.png"), &OWN).unwrap().frame(0) == one.frame(0));

    let sheet = roll_media::contact_sheet(&video, 5).unwrap();
    assert_eq!((sheet.width, sheet.height), (2 * 56, 3 * 40));
    roll_media::write_contact_sheet(dir.path().join("sheet.png"), &video, 6).unwrap();
    assert!(roll_media::encode_gif(&video, 28).unwrap().starts_with(b"GIF89a\x1c\x00\x14\x00"));
}

#[test]
fn demo_clips_decode_to_nine_frames() {
    for clip in ["train/person-11000.mp4", "unseen/person-12000.mp4"] {
        let video = read_video(root().join("demo/assets/clips").join(clip), &OWN).unwrap();
        assert!(video.dims() == [9, 64, 64] && (video.fps() - 8.0).abs() < 0.01, "{clip}");
        for t in 1..9 {
            let db = psnr(video.frame(t - 1), video.frame(t));
            assert!((15.0..60.0).contains(&db), "{clip}, frames {} and {t}: {db:.1} dB", t - 1);
        }
    }
}

#[test]
fn real_clip_decodes_to_120_frames() {
    let Some(path) = real_clip() else { return };
    let video = read_video(&path, &OWN).unwrap();
    // Pixels of 128:117: 176 columns of them are 193 square ones.
    assert_eq!(video.dims(), [120, 144, 193]);
    assert!((video.fps() - 29.97).abs() < 0.01, "{}", video.fps());
    // Frames in the order of presentation resemble their neighbours, and none stands twice.
    for t in 1..120 {
        let db = psnr(video.frame(t - 1), video.frame(t));
        assert!((20.0..60.0).contains(&db), "frames {} and {t}: {db:.1} dB", t - 1);
    }
    let options =
        ReadOptions { max_frames: Some(9), sizing: Sizing::MaxPixels { pixels: 64 * 80, unit: [16, 16] }, ..OWN };
    let small = read_video(&path, &options).unwrap();
    assert_eq!(small.dims(), [9, 48, 80]); // 61 x 82 before rounding down
    let exact = ReadOptions { sizing: Sizing::Exact([144, 193]), max_frames: Some(3), fps: Some(10.0), ..OWN };
    let sparse = read_video(&path, &exact).unwrap();
    assert!(sparse.fps() == 10.0 && sparse.frame(1) == video.frame(2) && sparse.frame(2) == video.frame(5));
}

#[test]
fn rejects_files_that_are_not_videos() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("talk.mp4");
    let cases: [(&[u8], &str); 7] = [
        (b"", "empty"),
        (b"hello, I am a text file", "neither a video nor a picture"),
        (b"\x00\x00\x00\x18ftypisom\x00\x00\x02\x00isomiso2", "no index"),
        (b"\x00\x00\x00\x10ftypisom\x00\x00\x02\x00\x7f\xff\xff\xffmoov", "says 2147483647 bytes"),
        (b"\x1a\x45\xdf\xa3 and so on", "ffmpeg -i"),
        (b"GIF89a\xff\xff\xff\xff\x00\x00\x00", "talk.mp4"),
        (b"\x89PNG\r\n\x1a\n\x00\x00\x00\x0dIHDR", "talk.mp4"),
    ];
    for (bytes, expected) in cases {
        std::fs::write(&path, bytes).unwrap();
        let message = error_message(&path);
        assert!(message.contains(expected) && message.contains("talk.mp4"), "{message}");
    }
    assert!(error_message(&dir.path().join("none.mp4")).contains("none.mp4"));
    assert!(error_message(dir.path()).contains("directory without"));
}

#[test]
fn unsupported_codec_error_has_a_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.mp4");
    roll_media::write_mp4(&path, &smooth(2, 32, 32)).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    for (from, to, expected) in
        [(b"avc1", b"hvc1", "HEVC"), (b"avc1", b"av01", "AV1"), (b"vide", b"soun", "no video track")]
    {
        let changed = replace_last(&bytes, from, to);
        std::fs::write(&path, changed).unwrap();
        let message = error_message(&path);
        assert!(message.contains(expected), "{message}");
        assert_eq!(message.contains("ffmpeg -i"), expected != "no video track", "{message}");
    }
}

fn find_last(bytes: &[u8], pattern: &[u8]) -> usize {
    bytes.windows(pattern.len()).rposition(|w| w == pattern).unwrap()
}
fn replace_last(bytes: &[u8], from: &[u8; 4], to: &[u8; 4]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let at = find_last(&bytes, from);
    bytes[at..at + 4].copy_from_slice(to);
    bytes
}
/// `value` at `offset` from where the box's type stands.
fn patch(bytes: &[u8], kind: &[u8; 4], offset: usize, value: u32) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let at = find_last(&bytes, kind) + 4 + offset;
    bytes[at..at + 4].copy_from_slice(&value.to_be_bytes());
    bytes
}

#[test]
fn rejects_inconsistent_sample_tables() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lie.mp4");
    roll_media::write_mp4(&path, &smooth(9, 64, 64)).unwrap();
    let good = std::fs::read(&path).unwrap();
    let check = |bytes: Vec<u8>, what: &str| {
        std::fs::write(&path, bytes).unwrap();
        let message = error_message(&path);
        assert!(message.contains("lie.mp4"), "{what}: {message}");
        eprintln!("{what}: {message}");
    };
    check(patch(&good, b"stco", 8, 0x7fff_ffff), "a chunk outside the file");
    check(patch(&good, b"stco", 4, 0xffff_ffff), "a chunk table without end");
    check(patch(&good, b"stsz", 8, 0xffff_ffff), "a size table without end");
    check(patch(&patch(&good, b"stsz", 4, 1), b"stsz", 8, 0xffff_ffff), "four billion frames of one byte");
    check(patch(&good, b"stsz", 12, 0xffff_fff0), "a giant frame");
    check(patch(&good, b"stsc", 4, 0), "frames in no chunk");
    check(patch(&good, b"stsz", 8, 0), "no frames");
    let mdat = find_last(&good, b"mdat");
    let mut bytes = good.clone();
    bytes[mdat + 4..mdat + 8].copy_from_slice(&[0x7f, 0xff, 0xff, 0xff]);
    check(bytes, "a NAL unit longer than its frame");
    // 64 x 64 as 65536 x 65536: the dimensions in the parameter set decide, not the track's.
    let sps = find_last(&good, b"avcC") + 4 + 6 + 2;
    let mut bytes = good.clone();
    bytes[sps + 4..sps + 10].fill(0);
    check(bytes, "a damaged parameter set");
}

#[test]
fn truncated_and_damaged_files_do_not_panic() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("d.mp4");
    roll_media::write_mp4(&path, &smooth(5, 48, 48)).unwrap();
    let good = std::fs::read(&path).unwrap();
    for end in (0..good.len()).step_by(1 + good.len() / 200) {
        std::fs::write(&path, &good[..end]).unwrap();
        let _ = error_message(&path);
    }
    let mut state = 1u64;
    let mut random = move |n: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % n
    };
    for round in 0..400 {
        let mut bytes = good.clone();
        // Half of the rounds in the index, where the numbers are.
        let from = if round % 2 == 0 { 0 } else { find_last(&good, b"mdat") };
        for _ in 0..1 + random(8) {
            let at = from + random(good.len() - from);
            bytes[at] = random(256) as u8;
        }
        std::fs::write(&path, &bytes).unwrap();
        if let Ok(video) = read_video(&path, &OWN) {
            assert!(video.dims()[0] <= 5);
        }
    }
}

/// A picture of 3 x 2 pixels, "abc" above "def", as PNG with EXIF data that says `orientation`.
fn png_with_orientation(orientation: u8) -> Vec<u8> {
    let rgb = b"abcdef".iter().flat_map(|b| [*b; 3]).collect();
    let png = roll_media::encode_png(&Picture { width: 3, height: 2, rgb }).unwrap();
    let exif =
        [b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0".as_slice(), &[orientation, 0, 0, 0, 0, 0, 0, 0]].concat();
    let mut chunk = [b"eXIf".as_slice(), &exif].concat();
    let crc = !chunk.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 })
    });
    chunk.extend(crc.to_be_bytes());
    // After the signature and IHDR.
    let (head, rest) = png.split_at(8 + 25);
    [head, &(exif.len() as u32).to_be_bytes(), &chunk, rest].concat()
}

#[test]
fn exif_orientation_is_applied_by_every_reader() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.png");
    // Expected results of PIL's `ImageOps.exif_transpose`.
    let shown = ["abcdef", "cbafed", "fedcba", "defabc", "adbecf", "daebfc", "fcebda", "cfbead"];
    for (orientation, expected) in (1..).zip(shown) {
        std::fs::write(&path, png_with_orientation(orientation)).unwrap();
        let size = if orientation < 5 { [2, 3] } else { [3, 2] };
        let bytes = |planes: &[f32]| planes[..6].iter().map(|v| ((v + 1.0) * 127.5).round() as u8).collect::<Vec<_>>();
        let picture = roll_media::read_image(&path, Sizing::Native).unwrap();
        assert_eq!((picture.shape(), bytes(picture.f32s().unwrap())), (&[3, size[0], size[1]][..], expected.into()));
        for video in [read_video(&path, &OWN).unwrap(), read_video(dir.path(), &OWN).unwrap()] {
            assert_eq!((video.dims(), bytes(video.frame(0))), ([1, size[0], size[1]], expected.into()));
        }
        assert_eq!(roll_media::probe(&path, Decoder::Own).unwrap().size, size);
    }
}

#[test]
fn transparency_is_dropped_as_in_pil() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.png");
    // Red, green, blue and white, of which all but the first are transparent to some degree; written by PIL 13.
    std::fs::write(&path, RGBA).unwrap();
    let picture = roll_media::read_image(&path, Sizing::Native).unwrap();
    let values: Vec<u8> = picture.f32s().unwrap().iter().map(|v| ((v + 1.0) * 127.5).round() as u8).collect();
    // PIL's `convert("RGB")`, plane by plane.
    assert_eq!(values, [255, 0, 10, 255, 0, 255, 20, 255, 0, 0, 255, 255]);
}

/// Every box on the way to the sample table grows by `by`, and chunks lie so much further back.
fn grow(bytes: &mut [u8], by: u32) {
    for kind in [b"moov", b"trak", b"mdia", b"minf", b"stbl", b"stsd"] {
        let at = find_last(bytes, kind) - 4;
        let size = u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap());
        bytes[at..at + 4].copy_from_slice(&(size + by).to_be_bytes());
    }
    let at = find_last(bytes, b"stco") + 8;
    let chunks = u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
    for offset in bytes[at + 4..][..4 * chunks].chunks_exact_mut(4) {
        let moved = u32::from_be_bytes((&*offset).try_into().unwrap()) + by;
        offset.copy_from_slice(&moved.to_be_bytes());
    }
}

#[test]
fn frames_use_their_sample_description() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("two.mp4");
    roll_media::write_mp4(&path, &smooth(5, 48, 64)).unwrap();
    let good = std::fs::read(&path).unwrap();
    let expected = read_video(&path, &OWN).unwrap();
    // A description of another codec before the one that the frames are coded by.
    let entry = find_last(&good, b"avc1") - 4;
    let length = u32::from_be_bytes(good[entry..entry + 4].try_into().unwrap());
    let mut other = good[entry..entry + length as usize].to_vec();
    other[4..8].copy_from_slice(b"hvc1");
    let mut bytes = good.clone();
    grow(&mut bytes, length);
    bytes.splice(entry..entry, other);
    let bytes = patch(&bytes, b"stsd", 4, 2);
    std::fs::write(&path, &bytes).unwrap();
    assert!(error_message(&path).contains("HEVC"), "{}", error_message(&path));
    // Flags and count, then first chunk, frames in a chunk, and description of each run.
    let mut bytes = bytes;
    let runs = find_last(&bytes, b"stsc") + 8;
    let count = u32::from_be_bytes(bytes[runs..runs + 4].try_into().unwrap()) as usize;
    (0..count).for_each(|run| bytes[runs + 4 + 12 * run + 8..][..4].copy_from_slice(&2u32.to_be_bytes()));
    std::fs::write(&path, &bytes).unwrap();
    let read = read_video(&path, &OWN).unwrap();
    assert!((0..5).all(|t| read.frame(t) == expected.frame(t)));
    (0..count).for_each(|run| bytes[runs + 4 + 12 * run + 8..][..4].copy_from_slice(&3u32.to_be_bytes()));
    std::fs::write(&path, &bytes).unwrap();
    assert!(error_message(&path).contains("description 3, the track has 2"), "{}", error_message(&path));
}

#[test]
fn errors_hide_decoder_messages() {
    let dir = tempfile::tempdir().unwrap();
    let damaged = dir.path().join("a.mp4");
    roll_media::write_mp4(&damaged, &smooth(9, 64, 64)).unwrap();
    let mut bytes = std::fs::read(&damaged).unwrap();
    let data = find_last(&bytes, b"mdat") + 40;
    bytes[data..data + 200].fill(0x55);
    std::fs::write(&damaged, bytes).unwrap();
    let picture = dir.path().join("a.md");
    std::fs::write(&picture, "# words").unwrap();
    let cut = dir.path().join("cut.png");
    std::fs::write(&cut, &png_with_orientation(1)[..50]).unwrap();
    let image = |path: &Path| {
        let options = ReadOptions { sizing: Sizing::Exact([16, 16]), ..OWN };
        read_video(path, &options).unwrap_err().to_string()
    };
    for (error_message, expected) in [
        (error_message(&damaged), "a.mp4"),
        (image(&picture), "neither a video nor a picture"),
        (image(&cut), "cut.png"),
    ] {
        assert!(error_message.contains(expected), "{error_message}");
        for word in ["Native", "Backtrace", "OpenH264", "was not recognized", "Format error"] {
            assert!(!error_message.contains(word), "{error_message}");
        }
    }
}

/// The JPEG files of tests/data, which make_jpeg.py makes.
const JPEGS: [&str; 4] = ["baseline.jpg", "full_chroma.jpg", "progressive.jpg", "restart.jpg"];

#[test]
fn jpeg_that_is_cut_short_or_damaged_is_refused_wherever_it_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let frames = dir.path().join("frames");
    std::fs::create_dir(&frames).unwrap();
    let (path, second) = (frames.join("1.jpg"), frames.join("2.jpg"));
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let pixels = |path: &Path| roll_media::read_image(path, Sizing::Native).unwrap().f32s().unwrap().to_vec();
    for name in JPEGS {
        let good = std::fs::read(data.join(name)).unwrap();
        std::fs::write(&path, &good).unwrap();
        let picture = roll_media::read_image(&path, Sizing::Native).unwrap();
        assert_eq!(picture.shape(), [3, 24, 40], "{name}");
        let refused = |bytes: &[u8], what: &str| {
            std::fs::write(&second, bytes).unwrap();
            let image = roll_media::read_image(&second, Sizing::Native).map(drop);
            let clip = read_video(&second, &OWN).map(drop);
            for (read, from) in [(image, "picture"), (clip, "clip"), (read_video(&frames, &OWN).map(drop), "directory")]
            {
                let told = read.map_err(|error| error.to_string()).expect_err(&format!("{name}, {what}, {from}"));
                assert!(told.contains("2.jpg") && told.contains("picture is"), "{told}");
            }
        };
        // Some of the last bytes of data are only padding.
        for end in (40..good.len() - 4).step_by(7) {
            refused(&good[..end], &format!("cut at {end}"));
        }
        let first = good.windows(2).position(|pair| pair == b"\xff\xda").unwrap() + 14;
        for end in [first + 20, (first + good.len()) / 2, good.len() - 12] {
            refused(&[&good[..end], b"\xff\xd9"].concat(), &format!("cut at {end}, with an end marker"));
        }
        let middle = (first + good.len()) / 2;
        refused(&[&good[..middle], &good[middle + 60..]].concat(), "a hole");
        let mut bytes = good.clone();
        bytes[middle..middle + 2].copy_from_slice(b"\xff\xc4");
        refused(&bytes, "a marker in the data");
        // What follows the picture does not matter, nor does a missing end marker if nothing can be missing.
        std::fs::write(&second, [&good[..], &[0; 50]].concat()).unwrap();
        assert!(pixels(&second) == pixels(&path), "{name}");
        if name != "progressive.jpg" {
            std::fs::write(&second, &good[..good.len() - 2]).unwrap();
            assert!(pixels(&second) == pixels(&path), "{name}");
        }
        if name == "restart.jpg" {
            let mut bytes = good.clone();
            let marker = find_last(&bytes, b"\xff\xd1");
            bytes[marker + 1] = 0xd5;
            refused(&bytes, "a restart marker of another number");
        }
        std::fs::remove_file(&second).unwrap();
    }
}

#[test]
fn pictures_of_a_directory_are_in_the_order_of_their_numbers() {
    let dir = tempfile::tempdir().unwrap();
    for number in 1..=12u8 {
        let picture = Picture { width: 16, height: 16, rgb: vec![20 * number; 768] };
        let name = dir.path().join(format!("frame{number}.png"));
        std::fs::write(name, roll_media::encode_png(&picture).unwrap()).unwrap();
    }
    // What macOS writes beside a file.
    std::fs::write(dir.path().join("._frame1.png"), b"\0\x05\x16\x07").unwrap();
    let video = read_video(dir.path(), &OWN).unwrap();
    let shades: Vec<u8> = (0..video.dims()[0]).map(|t| ((video.frame(t)[0] + 1.0) * 127.5).round() as u8).collect();
    assert_eq!(shades, (1..=12).map(|number| 20 * number).collect::<Vec<u8>>());
    assert_eq!(roll_media::probe(dir.path(), Decoder::Own).unwrap().frames, 12);
}
