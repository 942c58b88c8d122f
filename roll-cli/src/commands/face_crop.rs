//! Crops clips around the face, for `roll data prepare --crop face`.

use roll_core::{BuildContext, Error, Grad, Kind, Result, Tensor, Video, parse_options};
use roll_media::{Picture, crop_and_resize};
use roll_rewards::insightface::{Face, FaceNetworks, IdentityConfig};
use roll_train::config::LoadedConfig;

/// The reward whose detector finds the faces.
const REWARD: &str = "insightface";
/// Side of the crop as a multiple of the side of the box around all faces of the clip.
const MARGIN: f64 = 2.0;
/// Faces are searched in about this many frames of a clip.
const SEARCHED_FRAMES: usize = 16;

/// Red, green and blue.
const CHANNELS: usize = 3;

/// Opens the face networks that the configuration's reward names.
pub fn networks(loaded: &LoadedConfig, context: &BuildContext) -> Result<FaceNetworks> {
    let missing = || {
        let problem = format!(
            "`--crop face` finds faces by the detector of the reward `{REWARD}`: set `reward.name={REWARD}` and \
             `reward.reward_model_path`"
        );
        Error::config("reward", problem)
    };
    let reward = loaded.config.reward.iter().find(|reward| reward.name == REWARD).ok_or_else(missing)?;
    let config: IdentityConfig = parse_options(Kind::Reward.section(), &reward.options)?;
    let device = roll_backends::device(&context.backend)?;
    FaceNetworks::load(&context.resolve(&config.reward_model_path), &config, &device)
}

/// Crops all frames of `clip` to one box, which holds the largest face of every searched frame, and scales them to
/// `size`, height and width. `None` if no face is found.
pub fn around_face(networks: &FaceNetworks, clip: &Video, size: [usize; 2]) -> Result<Option<Video>> {
    let [count, height, width] = clip.dims();
    let searched: Vec<_> = (0..count).step_by(count.div_ceil(SEARCHED_FRAMES)).map(|t| (t, clip.frame(t))).collect();
    let faces = networks.largest_faces(&searched, [height, width], Grad::Skip)?;
    if faces.is_empty() {
        return Ok(None);
    }
    let faces: Vec<Face> = faces.into_iter().map(|found| found.face).collect();
    let [top, left, rows, columns] = crop_box(&faces, [height, width], size);
    let mut values = Vec::new();
    for t in 0..count {
        let frame = Picture::from_frame(clip, t);
        let row_in_box = |y: usize| &frame.rgb[(y * width + left) * CHANNELS..][..columns * CHANNELS];
        let rgb = (top..top + rows).flat_map(row_in_box).copied().collect();
        let cropped = crop_and_resize(Picture { width: columns, height: rows, rgb }, size);
        values.extend_from_slice(cropped.to_tensor()?.f32s()?);
    }
    Video::new(Tensor::new(values, [count, CHANNELS, size[0], size[1]])?, clip.fps()).map(Some)
}

/// The box around all faces with their margin: `[top, left, height, width]`. It has the ratio of `size` and lies within
/// `frame`. Where the frame allows, it is at least as large as `size`, so that nothing is enlarged. `frame` and `size`
/// are height and width.
fn crop_box(faces: &[Face], frame: [usize; 2], size: [usize; 2]) -> [usize; 4] {
    // `bounds` are left, top, right and bottom of a face.
    let extreme = |bound: usize, pick: fn(f32, f32) -> f32| {
        f64::from(faces.iter().map(|face| face.bounds[bound]).reduce(pick).unwrap_or_default())
    };
    let (left, right) = (extreme(0, f32::min), extreme(2, f32::max));
    let (top, bottom) = (extreme(1, f32::min), extreme(3, f32::max));
    let [[frame_height, frame_width], [height, width]] = [frame, size].map(|sides| sides.map(|side| side as f64));
    let ratio = width / height;
    let wanted_rows = (MARGIN * (bottom - top)).max(MARGIN * (right - left) / ratio).max(height);
    let rows = wanted_rows.min(frame_height).min(frame_width / ratio);
    let columns = rows * ratio;
    // The start of a side of the crop. The side has the same middle as the faces, unless it would then leave the frame.
    let begin = |from: f64, to: f64, side: f64, frame_side: f64| {
        ((from + to - side) / 2.0).clamp(0.0, (frame_side - side).max(0.0)).floor()
    };
    [begin(top, bottom, rows, frame_height), begin(left, right, columns, frame_width), rows.round(), columns.round()]
        .map(|pixels| pixels as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_box_holds_all_faces_within_the_frame_in_the_ratio_of_the_run() {
        let face = |bounds| Face { bounds, score: 1.0, landmarks: [[0.0; 2]; 5] };
        let [left, right] = [face([400.0, 300.0, 500.0, 400.0]), face([500.0, 310.0, 600.0, 410.0])];
        // 200 x 110 pixels, twice as wide.
        assert_eq!(crop_box(&[left, right], [1080, 1920], [64, 64]), [155, 300, 400, 400]);
        assert_eq!(crop_box(&[left], [1080, 1920], [480, 832]), [110, 34, 480, 832], "no pixel is enlarged");
        assert_eq!(crop_box(&[left], [480, 640], [480, 832]), [110, 0, 369, 640], "as large as the frame");
        let corner = face([1850.0, -10.0, 1930.0, 70.0]);
        assert_eq!(crop_box(&[corner], [1080, 1920], [64, 64]), [0, 1760, 160, 160]);
    }
}
