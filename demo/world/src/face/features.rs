//! Eyes, brows, nose, mouth, glasses.

use super::canvas::{Canvas, Colour, bell, cover, mix, shade, step};
use super::geometry::Head;
use super::{Identity, Shot};

const WHITE: Colour = [0.96, 0.95, 0.93];
const LINE: Colour = [0.10, 0.06, 0.06];

/// Draws everything between forehead and chin.
pub fn draw(canvas: &mut Canvas, head: &Head, identity: &Identity, shot: &Shot) {
    nose(canvas, head, identity, shot);
    mouth(canvas, head, identity, shot);
    for side in [-1.0, 1.0] {
        eye(canvas, head, identity, shot, side);
        brow(canvas, head, identity, shot, side);
    }
    if let Some(place) = identity.mole {
        let patch = head.patch(place, 0.0);
        canvas.paint(patch.bounds(0.08), |x, y| {
            let [u, v] = patch.local(x, y);
            ([0.28, 0.15, 0.10], 0.85 * patch.facing * cover(((u * u + v * v).sqrt() - 0.028) * patch.unit))
        });
    }
}

/// Returns how visible a feature is that turns away, from 0 to 1.
fn seen(facing: f32) -> f32 {
    step(0.10, 0.30, facing)
}

fn eye(canvas: &mut Canvas, head: &Head, identity: &Identity, shot: &Shot, side: f32) {
    let patch = head.patch([side * identity.eye_distance, identity.eye_height], 0.0);
    let visible = seen(patch.facing);
    let unit = patch.unit;
    let (w, h) = (identity.eye_width, identity.eye_open * (1.0 - shot.blink).max(0.0));
    let iris = 0.62 * identity.eye_width.min(0.155);
    let tilt = -side * identity.eye_tilt;
    let shadow = shade(identity.skin, 0.62);
    canvas.paint(patch.bounds(0.3), |x, y| {
        let [u, v] = patch.local(x, y);
        let v = v - tilt * u;
        let arc = (1.0 - (u / w).powi(2)).max(0.0);
        let (upper, lower) = (-h * arc, 0.75 * h * arc);
        let inside = (upper - v).max(v - lower).max(u.abs() - w);
        let opened = cover(inside * unit);
        let (du, dv) = (u - 0.35 * w * shot.gaze[0], v + 0.1 * h - 0.30 * h * shot.gaze[1]);
        let d = (du * du + dv * dv).sqrt();
        let mut colour = shade(WHITE, 0.90 + 0.10 * step(0.0, h.max(0.01), v + h));
        colour = mix(
            colour,
            mix(shade(identity.iris, 0.55), identity.iris, step(iris, 0.6 * iris, d)),
            cover((d - iris) * unit),
        );
        colour = mix(colour, [0.02; 3], cover((d - 0.42 * iris) * unit));
        let (hu, hv) = (du + 0.35 * iris, dv + 0.40 * iris);
        colour = mix(colour, [1.0; 3], 0.9 * cover(((hu * hu + hv * hv).sqrt() - 0.26 * iris) * unit));
        // The lid's line. Only this line is drawn for a closed eye.
        let edge = (v - upper).abs() - 0.022 - 0.012 * step(-0.3 * w, w, side * u);
        let lid = cover(edge.max(u.abs() - 1.06 * w) * unit);
        let crease = 0.45 * bell((v - upper + 0.075) / 0.028) * step(1.1 * w, 0.7 * w, u.abs());
        let under = 0.25 * bell((v - lower - 0.02) / 0.02) * step(w, 0.6 * w, u.abs());
        let around = (shadow, crease.max(under) * (1.0 - opened));
        let colour = mix(if opened > 0.0 { colour } else { around.0 }, LINE, lid);
        (colour, visible * opened.max(lid).max(around.1))
    });
}

fn brow(canvas: &mut Canvas, head: &Head, identity: &Identity, shot: &Shot, side: f32) {
    let height = identity.eye_height - identity.brow_height - 0.07 * shot.brows;
    let patch = head.patch([side * (identity.eye_distance + 0.02), height], 0.01);
    let visible = seen(patch.facing);
    let reach = 0.20;
    let colour = mix(shade(identity.hair, 0.72), shade(identity.skin, 0.45), 0.25);
    canvas.paint(patch.bounds(0.34), |x, y| {
        let [u, v] = patch.local(x, y);
        let outward = side * u;
        let line = -identity.brow_tilt * outward + 0.9 * identity.brow_arch * (outward - 0.03).powi(2) * 2.0
            - 0.03 * identity.brow_arch;
        let thickness = 0.5 * identity.brow * (1.0 - 0.75 * step(-0.02, reach, outward));
        let d = ((v - line).abs() - thickness - 0.006).max(outward.abs() - reach);
        (colour, 0.93 * visible * cover(d * patch.unit))
    });
}

fn nose(canvas: &mut Canvas, head: &Head, identity: &Identity, shot: &Shot) {
    let patch = head.patch([0.0, identity.nose_height], 0.14);
    let (w, dark, bright) = (identity.nose_width, shade(identity.skin, 0.60), shade(identity.skin, 1.16));
    let root = head.project([0.0, identity.eye_height], 0.04);
    let shadow_side = -shot.light.signum();
    let strength = 0.35 + 0.35 * shot.contrast;
    canvas.paint(patch.bounds(0.55), |x, y| {
        let [u, v] = patch.local(x, y);
        // The bridge runs from the tip to between the eyes, however the head is turned.
        let [ru, rv] = patch.local(root[0], root[1]);
        let along = (v / rv.min(-0.05)).clamp(0.0, 1.0);
        let off = u - ru * along;
        let bridge = step(0.0, 0.15, along) * step(1.0, 0.7, along);
        let side = bell((off - shadow_side * 0.55 * w * (1.0 - 0.4 * along)) / (0.30 * w)) * bridge;
        let under = bell((v - 0.075) / 0.035) * step(1.0 * w, 0.55 * w, u.abs());
        let hole = |s: f32| bell((u - s * 0.50 * w) / (0.24 * w)) * bell((v - 0.055) / 0.028);
        let wing = |s: f32| bell((u - s * 1.0 * w) / 0.028) * bell((v - 0.01) / 0.055);
        let shadow = (strength * side)
            .max(0.50 * under)
            .max(0.85 * (hole(-1.0) + hole(1.0)))
            .max(0.45 * (wing(-1.0) + wing(1.0)));
        let gleam = 0.30
            * bell((off + shadow_side * 0.12 * w) / (0.25 * w))
            * step(1.05, 0.6, along)
            * step(-0.1, 0.05, -v + 0.02);
        match shadow > gleam {
            true => (dark, shadow.min(0.9)),
            false => (bright, gleam),
        }
    });
}

fn mouth(canvas: &mut Canvas, head: &Head, identity: &Identity, shot: &Shot) {
    let (reach, middle) = (identity.mouth_reach(shot), identity.mouth_height);
    let patch = head.patch([0.0, middle], 0.03);
    let corners = [-1.0, 1.0].map(|side| head.project([side * reach, identity.mouth_corner(shot)], 0.0));
    let local = corners.map(|[x, y]| patch.local(x, y));
    let (left, right) = (local[0], local[1]);
    let (centre, half) = (0.5 * (left[0] + right[0]), (0.5 * (right[0] - left[0])).max(0.05));
    let rise = 0.5 * (left[1] + right[1]);
    let slope = (right[1] - left[1]) / (2.0 * half);
    let gap = 0.15 * shot.mouth_open + 0.045 * (shot.smile - 0.55).max(0.0);
    let (upper, lower) = (0.85 * identity.lips, 1.15 * identity.lips);
    let colour = identity.lip_colour;
    canvas.paint(patch.bounds(0.55), |x, y| {
        let [u, v] = patch.local(x, y);
        let t = (u - centre) / half;
        let arc = (1.0 - t * t).max(0.0);
        let v = v - rise * (1.0 - arc) - slope * (u - centre);
        let (top, bottom) = (-0.45 * gap * arc, gap * arc);
        let bow = 1.0 - 0.28 * bell(t / 0.16);
        let above = top - upper * arc.sqrt() * bow;
        let below = bottom + lower * arc.sqrt();
        let ends = (t.abs() - 1.0) * half;
        let whole = (above - v).max(v - below).max(ends);
        let opened = (top - v).max(v - bottom).max(ends);
        let lip = match v < 0.5 * (top + bottom) {
            true => shade(colour, 0.86),
            false => mix(
                shade(colour, 1.02),
                [1.0, 0.9, 0.9],
                0.22 * bell((v - bottom - 0.5 * lower) / (0.3 * lower)) * bell(t / 0.5),
            ),
        };
        let teeth = mix([0.30, 0.06, 0.07], [0.95, 0.94, 0.90], step(top + 0.55 * gap, top + 0.35 * gap, v));
        let line = cover(((v - 0.5 * (top + bottom)).abs() - 0.010).max(t.abs() * half - 1.03 * half) * patch.unit);
        let mut shown = mix(lip, teeth, cover(opened * patch.unit));
        if gap < 0.02 {
            shown = mix(shown, [0.25, 0.08, 0.08], 0.85 * line);
        }
        let covered = cover(whole * patch.unit);
        match covered > 0.0 || line <= 0.0 {
            true => (shown, covered),
            false => ([0.30, 0.12, 0.10], 0.7 * line),
        }
    });
}

/// Draws rims, bridge and temples of glasses.
pub fn glasses(canvas: &mut Canvas, head: &Head, identity: &Identity) {
    let Some(rim) = identity.glasses else { return };
    let power = if identity.round_glasses { 2.0f32 } else { 4.0 };
    for side in [-1.0f32, 1.0] {
        let patch = head.patch([side * identity.eye_distance, identity.eye_height + 0.02], 0.08);
        let visible = seen(patch.facing);
        let (w, h) = (0.24, 0.19);
        canvas.paint(patch.bounds(0.45), |x, y| {
            let [u, v] = patch.local(x, y);
            let radius = ((u / w).abs().powf(power) + (v / h).abs().powf(power)).powf(1.0 / power);
            let ring = ((radius - 1.0) * 0.21).abs() - 0.020;
            let outer = ((v + 0.06).abs() - 0.018).max(w - side * u).max(side * u - w - 0.16);
            let inner = ((v + 0.06).abs() - 0.018).max(side * u + w).max(-side * u - identity.eye_distance - 0.02);
            (rim, visible * cover(ring.min(outer).min(inner) * patch.unit))
        });
    }
}
