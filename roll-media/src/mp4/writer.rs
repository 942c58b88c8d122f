//! Encodes videos as H.264 in MP4.

use std::io::Write;

use muxide::api::{MuxerBuilder, VideoCodec};
use openh264::OpenH264API;
use openh264::encoder::{
    Encoder, EncoderConfig, FrameRate, FrameType, IntraFramePeriod, QpRange, RateControlMode, VuiConfig,
};
use openh264::formats::YUVSlices;
use roll_core::Video;

use crate::color::{Matrix, from_rgb};
use crate::picture::Picture;

/// Constant quantiser; 18 is visually lossless.
const QUANTISER: u8 = 18;
/// Interval of frames that players can seek to.
const FRAMES_PER_KEY_FRAME: u32 = 48;

/// Writes every frame of `video` to `out` with a constant quantiser, tagged BT.601 limited range. Odd sides are padded
/// by repeating the last column or row. Error messages do not contain the file name.
pub(crate) fn encode(video: &Video, out: impl Write) -> Result<(), String> {
    let [frames, height, width] = video.dims();
    let (w, h) = (width.next_multiple_of(2), height.next_multiple_of(2));
    if frames == 0 || width < 16 || height < 16 {
        return Err(format!("{frames} frames of {width} x {height} pixels cannot be H.264 (at least 16 x 16)"));
    }
    let fps = video.fps();
    if !(fps.is_finite() && fps > 0.0) {
        return Err(format!("{fps} frames per second"));
    }
    // `RateControlMode::Off` would ignore the range and use 26. Buffer-based control with a range of one value is a
    // constant quantiser.
    let config = EncoderConfig::new()
        .max_frame_rate(FrameRate::from_hz(fps as f32))
        .rate_control_mode(RateControlMode::Bufferbased)
        .qp(QpRange::new(QUANTISER, QUANTISER))
        .skip_frames(false)
        .scene_change_detect(false)
        .adaptive_quantization(false)
        .background_detection(false)
        .intra_frame_period(IntraFramePeriod::from_num_frames(FRAMES_PER_KEY_FRAME))
        .vui(VuiConfig::bt601());
    let failed = |e: &dyn std::fmt::Display| format!("the H.264 encoder: {e}");
    let mut encoder = Encoder::with_api_config(OpenH264API::from_source(), config).map_err(|e| failed(&e))?;
    let mut muxer = MuxerBuilder::new(out)
        .video(VideoCodec::H264, w as u32, h as u32, fps)
        .with_fast_start(true)
        .build()
        .map_err(|e| e.to_string())?;
    for t in 0..frames {
        let picture = pad_to_even(Picture::from_frame(video, t));
        let planes = from_rgb(&picture, Matrix::BT601_LIMITED);
        let source = YUVSlices::new((&planes.y, &planes.u, &planes.v), (w, h), (w, w / 2, w / 2));
        let coded = encoder.encode(&source).map_err(|e| failed(&e))?;
        let is_key_frame = coded.frame_type() == FrameType::IDR;
        let bytes = coded.to_vec();
        if bytes.is_empty() {
            return Err(format!("the H.264 encoder left out frame {t}"));
        }
        muxer.write_video(t as f64 / fps, &bytes, is_key_frame).map_err(|e| e.to_string())?;
    }
    muxer.finish().map_err(|e| e.to_string())
}

/// Repeats the last column or row of a picture with an odd side.
fn pad_to_even(picture: Picture) -> Picture {
    let Picture { width, height, rgb } = picture;
    let (w, h) = (width.next_multiple_of(2), height.next_multiple_of(2));
    if (w, h) == (width, height) {
        return Picture { width, height, rgb };
    }
    let mut padded = Vec::with_capacity(w * h * 3);
    for y in 0..h {
        let row = &rgb[y.min(height - 1) * width * 3..][..width * 3];
        padded.extend(row);
        if w > width {
            padded.extend(&row[(width - 1) * 3..]);
        }
    }
    Picture { width: w, height: h, rgb: padded }
}
