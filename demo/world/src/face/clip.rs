//! Short coherent motions and their prompts.

use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::canvas::Colour;
use super::{Identity, Picture, Shot, render};

/// A clip of one person.
#[derive(Clone, Debug, PartialEq)]
pub struct Clip {
    /// Number of the [`Identity`].
    pub identity: u64,
    /// Describes the motion, not the person.
    pub prompt: String,
    /// The frames.
    pub pictures: Vec<Picture>,
}

const MOTIONS: [&str; 8] = [
    "looks at the camera",
    "turns left",
    "turns right",
    "looks up",
    "looks down",
    "nods",
    "shakes the head",
    "tilts the head",
];
const EXPRESSIONS: [&str; 6] = ["stays calm", "smiles", "talks", "blinks", "looks surprised", "looks sad"];
const LIGHTS: [(&str, f32, f32); 5] =
    [("warm", 0.85, 1.0), ("cool", -0.85, 1.0), ("soft", 0.0, 1.0), ("bright", 0.1, 1.12), ("dim", 0.0, 0.80)];
const BACKGROUNDS: [(&str, Colour); 7] = [
    ("blue", [0.34, 0.50, 0.74]),
    ("green", [0.40, 0.60, 0.44]),
    ("grey", [0.60, 0.61, 0.62]),
    ("red", [0.68, 0.34, 0.32]),
    ("sand", [0.80, 0.72, 0.56]),
    ("dark", [0.20, 0.21, 0.25]),
    ("white", [0.88, 0.89, 0.90]),
];

/// Returns every prompt that [`clip`] can return, with the indices of its motion, expression, light and background.
pub fn prompts() -> Vec<(String, [usize; 4])> {
    let mut all = Vec::new();
    for motion in 0..MOTIONS.len() {
        for expression in 0..EXPRESSIONS.len() {
            for light in 0..LIGHTS.len() {
                for background in 0..BACKGROUNDS.len() {
                    all.push((
                        prompt([motion, expression, light, background]),
                        [motion, expression, light, background],
                    ));
                }
            }
        }
    }
    all
}

fn prompt([motion, expression, light, background]: [usize; 4]) -> String {
    format!(
        "a person {} and {}, {} light, {} background",
        MOTIONS[motion], EXPRESSIONS[expression], LIGHTS[light].0, BACKGROUNDS[background].0
    )
}

/// Returns a clip of `frames` frames of `[height, width]` pixels.
pub fn clip(identity_seed: u64, clip_seed: u64, frames: usize, size: [usize; 2]) -> Clip {
    swapped(identity_seed, identity_seed, clip_seed, frames, size)
}

/// Returns a clip like [`clip`] in which the person `later` replaces the person from the second frame on.
pub fn swapped(identity_seed: u64, later: u64, clip_seed: u64, frames: usize, size: [usize; 2]) -> Clip {
    let (first, later) = (Identity::new(identity_seed), Identity::new(later));
    let mut rng = ChaCha8Rng::seed_from_u64(clip_seed ^ (identity_seed << 20) ^ 0xc11b);
    let chosen =
        [0..MOTIONS.len(), 0..EXPRESSIONS.len(), 0..LIGHTS.len(), 0..BACKGROUNDS.len()].map(|r| rng.random_range(r));
    let [motion, expression, light, background] = chosen;
    let (_, warmth, brightness) = LIGHTS[light];
    let top = BACKGROUNDS[background].1.map(|v: f32| (v * rng.random_range(0.94..1.06)).min(1.0));
    let soft = light == 2;
    let start = Shot {
        yaw: rng.random_range(-0.12..0.12),
        pitch: rng.random_range(-0.06..0.06),
        roll: rng.random_range(-0.05..0.05),
        centre: [0.5 + rng.random_range(-0.04..0.04), 0.5 + rng.random_range(-0.02..0.04)],
        scale: rng.random_range(0.285..0.335),
        smile: rng.random_range(-0.05..0.25),
        light: *[-1.0f32, -0.7, 0.7, 1.0].choose(&mut rng).unwrap_or(&1.0) * if soft { 0.3 } else { 1.0 },
        contrast: if soft { 0.15 } else { rng.random_range(0.45..0.85) },
        warmth,
        brightness,
        background: [top, top.map(|v| 0.78 * v)],
        ..Shot::default()
    };
    let strength = rng.random_range(0.75..1.15f32);
    let drift = [rng.random_range(-0.02..0.02f32), rng.random_range(-0.01..0.01f32)];
    let pictures = (0..frames).map(|frame| {
        let t = frame as f32 / (frames.max(2) - 1) as f32;
        let mut shot = start.clone();
        move_head(&mut shot, motion, t, strength);
        express(&mut shot, expression, t, strength);
        shot.centre[0] += drift[0] * t;
        shot.centre[1] += drift[1] * t;
        render(if frame == 0 { &first } else { &later }, &shot, size)
    });
    Clip { identity: identity_seed, prompt: prompt(chosen), pictures: pictures.collect() }
}

/// Returns a smooth step from 0 to 1.
fn ease(t: f32) -> f32 {
    t * t * (3.0 - 2.0 * t)
}

fn wave(t: f32, times: f32) -> f32 {
    (t * times * std::f32::consts::TAU).sin()
}

fn move_head(shot: &mut Shot, motion: usize, t: f32, strength: f32) {
    match motion {
        1 => shot.yaw -= 0.52 * strength * ease(t),
        2 => shot.yaw += 0.52 * strength * ease(t),
        3 => shot.pitch -= 0.28 * strength * ease(t),
        4 => shot.pitch += 0.26 * strength * ease(t),
        5 => shot.pitch += 0.20 * strength * wave(t, 1.0),
        6 => shot.yaw += 0.34 * strength * wave(t, 1.0),
        7 => shot.roll += 0.26 * strength * ease(t),
        _ => {}
    }
    shot.gaze = [0.8 * shot.yaw, 0.8 * shot.pitch];
}

fn express(shot: &mut Shot, expression: usize, t: f32, strength: f32) {
    match expression {
        1 => shot.smile += 0.75 * strength * ease(t),
        2 => shot.mouth_open = 0.75 * strength * wave(t, 1.5).abs(),
        3 => shot.blink = (1.0 - ((t - 0.5) / 0.22).powi(2)).clamp(0.0, 1.0),
        4 => {
            shot.mouth_open = 0.8 * strength * ease(t);
            shot.brows = ease(t);
        }
        5 => {
            shot.smile -= 0.55 * strength * ease(t);
            shot.brows = -0.4 * ease(t);
        }
        _ => {}
    }
}
