//! Distractors: colour gradients, ellipses and bars, alone or in front of a face. `uniform` returns values in [-1, 1);
//! [`unit_uniform`] turns them into [0, 1).

use crate::training::pictures::unit_uniform;

/// Greatest fraction of a face's width or height that an occluding object covers.
const MAX_COVERED: f32 = 0.4;

/// Returns a picture `[3, side, side]` without a face: a gradient with up to six objects.
pub fn picture(side: usize, uniform: &mut impl FnMut() -> f32) -> Vec<f32> {
    let (base, across, down) = (colour(uniform), colour(uniform), colour(uniform));
    let offset = |i: usize| (i as f32 / side as f32 - 0.5) * 0.8;
    let mut pixels = vec![0.0; 3 * side * side];
    for (i, pixel) in pixels.iter_mut().enumerate() {
        let (channel, y, x) = (i / (side * side), i / side % side, i % side);
        *pixel = (base[channel] + offset(x) * across[channel] + offset(y) * down[channel]).clamp(-1.0, 1.0);
    }
    objects(&mut pixels, side, uniform);
    pixels
}

/// Draws up to six ellipses and bars anywhere. Some have skin colours, some are as large as a head.
pub fn objects(pixels: &mut [f32], side: usize, uniform: &mut impl FnMut() -> f32) {
    for _ in 0..(7.0 * unit_uniform(uniform)) as usize {
        let centre = [unit_uniform(uniform), unit_uniform(uniform)].map(|v| v * side as f32);
        let radii = [unit_uniform(uniform), unit_uniform(uniform)].map(|v| (0.03 + 0.4 * v * v) * side as f32);
        paint(pixels, side, centre, radii, uniform);
    }
}

/// Draws an object that covers a part of the face in the box `bounds`.
pub fn occlude(pixels: &mut [f32], side: usize, bounds: [f32; 4], uniform: &mut impl FnMut() -> f32) {
    let [x1, y1, x2, y2] = bounds;
    let centre = [x1 + (x2 - x1) * unit_uniform(uniform), y1 + (y2 - y1) * unit_uniform(uniform)];
    // Half of the covered fraction.
    let mut radius = || (0.1 + (MAX_COVERED - 0.1) * unit_uniform(uniform)) / 2.0;
    let radii = [(x2 - x1) * radius(), (y2 - y1) * radius()];
    paint(pixels, side, centre, radii, uniform);
}

/// Draws an ellipse or an axis-aligned rectangle of one colour.
fn paint(pixels: &mut [f32], side: usize, centre: [f32; 2], radii: [f32; 2], uniform: &mut impl FnMut() -> f32) {
    let (colour, round) = (colour(uniform), uniform() < 0.0);
    for y in 0..side {
        for x in 0..side {
            let (u, v) = ((x as f32 - centre[0]) / radii[0].max(0.5), (y as f32 - centre[1]) / radii[1].max(0.5));
            let inside = if round { u * u + v * v <= 1.0 } else { u.abs().max(v.abs()) <= 1.0 };
            if inside {
                (0..3).for_each(|channel| pixels[(channel * side + y) * side + x] = colour[channel]);
            }
        }
    }
}

/// Returns a random colour; one time in three, a colour between pale and dark skin.
fn colour(uniform: &mut impl FnMut() -> f32) -> [f32; 3] {
    if unit_uniform(uniform) < 0.33 {
        let (light, hue) = (unit_uniform(uniform), 0.08 * uniform());
        return [-0.4 + 1.3 * light, -0.6 + 1.2 * light + hue, -0.75 + 1.2 * light + hue];
    }
    [uniform(), uniform(), uniform()]
}
