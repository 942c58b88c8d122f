//! Number and duration of the frames of a video, by ffprobe.

use std::path::Path;

use roll_core::serde_json::Value;

use super::Failure;
use super::description::{StreamDescription, ffprobe};
use crate::picture::square_size;
use crate::probe::Probed;

/// Size, number of frames and frame rate, without decoding: from the packets that are shown.
pub(crate) fn probe(path: &Path) -> Result<Probed, Failure> {
    let stream = StreamDescription::of(path, None)?;
    let told = ffprobe(path, None, "packet=pts_time,duration_time,flags")?;
    let (frames, seconds) = shown(&told["packets"]);
    if frames == 0 {
        return Err(Failure::Failed("it has no frames".into()));
    }
    let [width, height] = stream.size;
    let size = square_size([height, width], stream.pixel_aspect);
    let size = if stream.orientation.is_sideways() { [size[1], size[0]] } else { size };
    let seconds = seconds.or(stream.duration).unwrap_or(frames as f64 / stream.fps);
    Ok(Probed { size, frames, fps: frames as f64 / seconds })
}

/// The number of packets that are not marked as discarded, and the seconds that they cover, if known.
fn shown(packets: &Value) -> (usize, Option<f64>) {
    let (mut frames, mut first, mut last) = (0, f64::INFINITY, f64::NEG_INFINITY);
    for packet in packets.as_array().into_iter().flatten() {
        if packet["flags"].as_str().is_some_and(|flags| flags.contains('D')) {
            continue;
        }
        frames += 1;
        let second = |key: &str| packet[key].as_str().and_then(|text| text.parse::<f64>().ok());
        if let Some(from) = second("pts_time") {
            first = first.min(from);
            last = last.max(from + second("duration_time").unwrap_or(0.0));
        }
    }
    let seconds = last - first;
    (frames, (seconds.is_finite() && seconds > 0.0).then_some(seconds))
}

#[cfg(test)]
mod tests {
    use roll_core::serde_json;

    use super::*;

    #[test]
    fn discarded_packets_are_not_counted() {
        let packet =
            |at: &str, flags: &str| serde_json::json!({"pts_time": at, "duration_time": "0.5", "flags": flags});
        let packets = [packet("-0.5", "KD"), packet("0.0", "_"), packet("1.0", "_"), packet("0.5", "_")];
        assert_eq!(shown(&packets.to_vec().into()), (3, Some(1.5)));
        let packets = serde_json::json!([{"flags": "K"}, {"flags": "_"}]);
        assert_eq!(shown(&packets), (2, None));
    }
}
