//! Hair behind and over the face.

use super::canvas::{Canvas, Colour, cover, shade, step};
use super::geometry::Head;
use super::identity::HairStyle;
use super::{Identity, Shot};

/// Draws the hair behind the head.
pub fn behind(canvas: &mut Canvas, head: &Head, identity: &Identity, shot: &Shot) {
    let w = identity.width;
    let drift = head.drift();
    let everything = whole(canvas);
    let unit = head.unit;
    canvas.paint(everything, |x, y| {
        let [u, v] = head.plane(x, y);
        let u = u + 0.5 * drift[0];
        let ellipse =
            |cy: f32, rx: f32, ry: f32| (((u / rx).powi(2) + ((v - cy) / ry).powi(2)).sqrt() - 1.0) * rx.min(ry);
        let curtain = |half: f32, bottom: f32| (u.abs() - half - 0.06 * (3.0 * v).sin()).max(-0.4 - v).max(v - bottom);
        let wave = 0.05 * (9.0 * v.atan2(u)).sin();
        let d = match identity.style {
            HairStyle::Bald | HairStyle::Short => return ([0.0; 3], 0.0),
            HairStyle::Quiff => ellipse(-0.42, w + 0.06, 0.74),
            HairStyle::Curly => ellipse(-0.22, w + 0.30, 0.98) + wave,
            HairStyle::Bob => ellipse(-0.28, w + 0.20, 0.90).min(curtain(w + 0.17, 0.86)),
            HairStyle::Long => ellipse(-0.28, w + 0.17, 0.89).min(curtain(w + 0.14 + 0.10 * step(0.0, 1.4, v), 1.75)),
            HairStyle::Bun => {
                let bun = ((u / 0.36).powi(2) + ((v + 1.22) / 0.32).powi(2)).sqrt() - 1.0;
                ellipse(-0.30, w + 0.07, 0.84).min(0.32 * bun)
            }
        };
        (strands(identity, shot, u, v, 0.80), cover(d * unit))
    });
}

/// Draws the hair on the head and over the forehead.
pub fn front(canvas: &mut Canvas, head: &Head, identity: &Identity, shot: &Shot) {
    if identity.style == HairStyle::Bald {
        return;
    }
    let drift = head.drift();
    let grow = match identity.style {
        HairStyle::Short => 0.05,
        HairStyle::Quiff => 0.10,
        HairStyle::Curly => 0.22,
        HairStyle::Bob | HairStyle::Long => 0.13,
        _ => 0.06,
    };
    let unit = head.unit;
    let everything = whole(canvas);
    canvas.paint(everything, |x, y| {
        let plane = head.plane(x, y);
        let [u, v] = plane;
        if v > 0.9 {
            return ([0.0; 3], 0.0);
        }
        let (fu, fv) = (u - 1.5 * drift[0], v - 1.2 * drift[1]);
        let side = (fu / identity.width).abs();
        let curls = if identity.style == HairStyle::Curly { 0.05 * (16.0 * fu).sin() } else { 0.0 };
        // The hairline drops at the temples, slants with the parting, and drops further with the fringe.
        let temples = match identity.style {
            HairStyle::Bob => 1.35 * step(0.72, 1.0, side),
            HairStyle::Long => 1.30 * step(0.74, 1.02, side),
            HairStyle::Curly => 0.62 * step(0.62, 1.05, side),
            _ => 0.50 * step(0.66, 1.05, side),
        };
        let fringe = identity.fringe * (0.34 + 0.03 * (22.0 * fu).sin()) * step(0.95, 0.7, side);
        let line = identity.hairline
            + 0.10 * side * side
            + temples
            + fringe
            + identity.parting * fu * (1.0 - identity.fringe)
            + curls;
        let above = fv - line;
        let lift = if identity.style == HairStyle::Quiff { 0.12 * step(-0.5, -1.0, v) } else { 0.0 };
        let d = head.outline(plane, grow + lift).max(above);
        let near = 0.86 + 0.14 * step(-0.02, -0.18, above);
        (strands(identity, shot, fu, fv, near), cover(d * unit))
    });
}

fn whole(canvas: &Canvas) -> [f32; 4] {
    let [height, width] = canvas.size();
    [0.0, 0.0, width as f32, height as f32]
}

/// Returns the colour of hair at a position: strands and a highlight.
fn strands(identity: &Identity, shot: &Shot, u: f32, v: f32, factor: f32) -> Colour {
    let strand = 0.06 * (26.0 * u + 5.0 * (2.0 * v).sin()).sin();
    let gleam = 0.22 * (-((v + 0.78) / 0.16).powi(2) - ((u - 0.3 * shot.light) / 0.5).powi(2)).exp();
    shade(identity.hair, factor * (1.0 + strand + gleam + 0.15 * shot.contrast * shot.light * u))
}
