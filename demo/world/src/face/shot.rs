//! How a face looks in one frame.

use super::canvas::Colour;

/// Pose, expression, light and background of a face in one frame. The default is a neutral frontal view.
#[derive(Clone, Debug, PartialEq)]
pub struct Shot {
    /// Turn in radians. Positive values turn to the right of the picture.
    pub yaw: f32,
    /// Nod in radians. Positive values look down.
    pub pitch: f32,
    /// Tilt in radians. Positive values are clockwise.
    pub roll: f32,
    /// Centre of the head as a fraction of width and height.
    pub centre: [f32; 2],
    /// Half the height of the head as a fraction of the picture's height.
    pub scale: f32,
    /// Smile, from -0.5 (sad) to 1.
    pub smile: f32,
    /// Opening of the mouth, 0 to 1.
    pub mouth_open: f32,
    /// Closing of the eyes, from 0 (open) to 1 (closed).
    pub blink: f32,
    /// Raising of the brows, -0.5 to 1.
    pub brows: f32,
    /// Direction of the eyes, right and down, each in [-1, 1].
    pub gaze: [f32; 2],
    /// Direction of the light, from -1 (left) to 1 (right).
    pub light: f32,
    /// Contrast of the shading, 0 to 1.
    pub contrast: f32,
    /// Tint of the light, from -1 (cool) to 1 (warm).
    pub warmth: f32,
    /// Factor that all colours are multiplied by.
    pub brightness: f32,
    /// Colours at the top and at the bottom.
    pub background: [Colour; 2],
}

impl Default for Shot {
    fn default() -> Self {
        Self {
            yaw: 0.0,
            pitch: 0.0,
            roll: 0.0,
            centre: [0.5, 0.5],
            scale: 0.31,
            smile: 0.1,
            mouth_open: 0.0,
            blink: 0.0,
            brows: 0.0,
            gaze: [0.0; 2],
            light: -0.4,
            contrast: 0.5,
            warmth: 0.0,
            brightness: 1.0,
            background: [[0.62, 0.70, 0.78], [0.46, 0.53, 0.60]],
        }
    }
}

/// Returns a random shot. `uniform` returns values in [-1, 1).
pub fn random_shot(uniform: &mut impl FnMut() -> f32) -> Shot {
    let mut zero_to_one = || 0.5 + 0.5 * uniform();
    let top: Colour = std::array::from_fn(|_| 0.15 + 0.75 * zero_to_one());
    let darker = 0.6 + 0.4 * zero_to_one();
    let blink = zero_to_one();
    let u = uniform;
    Shot {
        yaw: 0.55 * u(),
        pitch: 0.28 * u(),
        roll: 0.22 * u(),
        centre: [0.5 + 0.09 * u(), 0.5 + 0.07 * u()],
        scale: 0.31 + 0.045 * u(),
        smile: 0.25 + 0.75 * u(),
        mouth_open: (0.9 * u()).max(0.0),
        // Closed in 12% of the shots.
        blink: if blink > 0.88 { 1.0 } else { 0.3 * blink },
        brows: (0.9 * u()).max(-0.4),
        gaze: [0.8 * u(), 0.6 * u()],
        light: u(),
        contrast: 0.5 + 0.5 * u(),
        warmth: 0.9 * u(),
        brightness: 0.95 + 0.17 * u(),
        background: [top, top.map(|v| v * darker)],
    }
}
