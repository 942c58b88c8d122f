//! Finds out the number and duration of the frames of a video through ffprobe.

use std::path::Path;

use roll_core::serde_json::Value;

use super::description::{StreamDescription, ffprobe};
use super::{DETECTED, Failure};
use crate::picture::square_size;
use crate::probed::Probed;

/// The size, number of frames and frame rate of a video. They follow from the packets that are shown, without decoding.
/// A stream that was cut without encoding may begin with pictures whose references are missing. Such a stream is
/// decoded, because only decoding shows how many of these pictures appear.
pub(crate) fn probe(path: &Path) -> Result<Probed, Failure> {
    let stream = StreamDescription::of(path, DETECTED)?;
    let answer = ffprobe(path, DETECTED, "packet=pts_time,duration_time,flags")?;
    let packets = &answer["packets"];
    let (frames, seconds) = if may_lack_references(packets) {
        let answer = ffprobe(path, DETECTED, "frame=best_effort_timestamp_time,pkt_duration_time,duration_time")?;
        count_shown(&answer["frames"])
    } else {
        count_shown(packets)
    };
    if frames == 0 {
        return Err(Failure::Failed("it has no frames".into()));
    }
    let [width, height] = stream.size;
    let size = square_size([height, width], stream.pixel_aspect);
    let size = if stream.orientation.is_sideways() { [size[1], size[0]] } else { size };
    let seconds = seconds.or(stream.duration).unwrap_or(frames as f64 / stream.fps);
    Ok(Probed { size, frames, fps: frames as f64 / seconds })
}

/// The first of the fields `keys` that is a number of seconds.
fn seconds(packet: &Value, keys: &[&str]) -> Option<f64> {
    keys.iter().find_map(|key| packet[*key].as_str()?.parse::<f64>().ok())
}

/// Whether a packet has a flag: `K` for a key frame, `D` for a packet that is decoded but not shown.
fn has_flag(packet: &Value, flag: char) -> bool {
    packet["flags"].as_str().is_some_and(|flags| flags.contains(flag))
}

/// Whether the first packet is not a key frame, or some later packet is shown before the first: at an earlier time, or
/// without a time, because Matroska has no times before its start.
fn may_lack_references(packets: &Value) -> bool {
    let mut packets = packets.as_array().into_iter().flatten();
    let Some(first) = packets.next() else { return false };
    let Some(first_time) = seconds(first, &["pts_time"]) else { return !has_flag(first, 'K') };
    let is_shown_before =
        |packet: &Value| seconds(packet, &["pts_time"]).is_none_or(|at| at < first_time) && !has_flag(packet, 'D');
    !has_flag(first, 'K') || packets.any(is_shown_before)
}

/// Returns the number of packets or frames that are not marked as discarded, and the seconds that they cover, if known.
/// If the last one has no duration, it counts with the mean duration of the others.
fn count_shown(packets: &Value) -> (usize, Option<f64>) {
    let (mut frames, mut first, mut last) = (0, f64::INFINITY, f64::NEG_INFINITY);
    let mut duration_of_last = None;
    for packet in packets.as_array().into_iter().flatten() {
        if has_flag(packet, 'D') {
            continue;
        }
        frames += 1;
        if let Some(from) = seconds(packet, &["pts_time", "best_effort_timestamp_time"]) {
            first = first.min(from);
            if from >= last {
                last = from;
                duration_of_last = seconds(packet, &["duration_time", "pkt_duration_time"]);
            }
        }
    }
    let first_to_last = last - first;
    let seconds = first_to_last + duration_of_last.unwrap_or(first_to_last / (frames as f64 - 1.0));
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
        assert_eq!(count_shown(&packets.to_vec().into()), (3, Some(1.5)));
        let packets = serde_json::json!([{"flags": "K"}, {"flags": "_"}]);
        assert_eq!(count_shown(&packets), (2, None));
        // As of FLV, MPEG program streams and WMV.
        let packets = serde_json::json!([{"pts_time": "0"}, {"pts_time": "0.2"}, {"pts_time": "0.1"}]);
        assert_eq!(count_shown(&packets).0, 3);
        assert!((count_shown(&packets).1.unwrap() - 0.3).abs() < 1e-12);
        assert_eq!(count_shown(&serde_json::json!([{"pts_time": "0"}])), (1, None));
    }

    #[test]
    fn frames_before_the_first_key_frame_are_noticed() {
        let packet =
            |at: &str, flags: &str| serde_json::json!({"pts_time": at, "duration_time": "0.5", "flags": flags});
        let may_lack = |packets: &[Value]| may_lack_references(&packets.to_vec().into());
        assert!(!may_lack(&[packet("0.0", "K_"), packet("1.0", "__"), packet("0.5", "__")]));
        assert!(may_lack(&[packet("1.0", "K_"), packet("2.0", "__"), packet("0.5", "__")]));
        // An edit list hides it.
        assert!(!may_lack(&[packet("1.0", "K_"), packet("2.0", "__"), packet("0.5", "_D")]));
        assert!(may_lack(&[packet("1.0", "K_"), packet("N/A", "__"), packet("2.0", "__")]));
        // A container without times of presentation.
        assert!(!may_lack(&[packet("N/A", "K_"), packet("N/A", "__")]));
        assert!(may_lack(&[packet("0.0", "__"), packet("1.0", "K_")]));
        assert!(!may_lack(&[]));
    }
}
