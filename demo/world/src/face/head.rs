//! Background, neck and shoulders, ears, and the skin of the face.

use super::canvas::{Canvas, Colour, bell, cover, mix, shade, step};
use super::geometry::Head;
use super::identity::{Beard, HairStyle};
use super::{Identity, Shot};

/// Draws a gradient that is lighter on the side of the light.
pub fn background(canvas: &mut Canvas, shot: &Shot) {
    let [height, width] = canvas.size();
    canvas.fill(|x, y| {
        let (u, v) = (x / width as f32, y / height as f32);
        let glow = 1.0 + 0.10 * shot.contrast * (2.0 * u - 1.0) * shot.light;
        shade(mix(shot.background[0], shot.background[1], v), glow)
    });
}

/// Draws neck, shoulders and ears.
pub fn body(canvas: &mut Canvas, head: &Head, identity: &Identity, shot: &Shot) {
    let [height, width] = canvas.size();
    let everything = [0.0, 0.0, width as f32, height as f32];
    let unit = head.unit;
    let dark = shade(identity.skin, 0.70);
    let drift = head.drift();
    canvas.paint(everything, |x, y| {
        let [u, v] = head.plane(x, y);
        let lean = 0.25 * drift[0];
        let neck = ((u - lean * (1.4 - v)).abs() - 0.36 * identity.width / 0.75).max(0.3 - v).max(v - 1.75);
        let shadow = 0.82 + 0.18 * step(1.05, 1.35, v);
        (shade(dark, shadow), cover(neck * unit))
    });
    canvas.paint(everything, |x, y| {
        let [u, v] = head.plane(x, y);
        let shoulders = ((u / 1.45).powi(2) + ((v - 2.35) / 1.02).powi(2)).sqrt() - 1.0;
        let collar = 0.30 - ((u / 0.42).powi(2) + ((v - 1.25) / 0.34).powi(2)).sqrt() * 0.30;
        let light = 1.0 + 0.22 * shot.contrast * shot.light * u;
        (shade(identity.clothes, light), cover(shoulders.max(collar) * unit))
    });
    for side in [-1.0f32, 1.0] {
        // An ear moves behind the head when the face turns to the ear's side.
        let reach = identity.width + 0.03 - 0.9 * side * drift[0];
        let place = [side * reach.clamp(0.3, identity.width + 0.1), identity.eye_height + 0.14 - 0.4 * drift[1]];
        let at = head.place(place);
        let r = identity.ears * unit;
        canvas.paint([at[0] - 2.0 * r, at[1] - 2.5 * r, at[0] + 2.0 * r, at[1] + 2.5 * r], |x, y| {
            let [u, v] = head.plane(x, y);
            let (du, dv) = ((u - place[0]) / (0.62 * identity.ears), (v - place[1]) / (1.15 * identity.ears));
            let d = (du * du + dv * dv).sqrt();
            let inner = 0.78 + 0.16 * step(0.2, 0.75, d);
            (shade(identity.skin, inner), cover((d - 1.0) * 0.62 * identity.ears * unit))
        });
    }
}

/// Returns the unit vector towards the light.
fn light(shot: &Shot) -> [f32; 3] {
    let across = 0.75 * shot.light;
    let (down, out) = (-0.42f32, 0.75f32);
    let length = (across * across + down * down + out * out).sqrt();
    [across / length, down / length, out / length]
}

/// Draws the skin with light, cheeks, freckles and beard.
pub fn skin(canvas: &mut Canvas, head: &Head, identity: &Identity, shot: &Shot) {
    let l = light(shot);
    let drift = head.drift();
    let [centre_x, centre_y] = head.place([0.0, 0.0]);
    let r = 1.2 * head.unit;
    let (brow_shade, beard) = (shade(identity.skin, 0.86), mix(identity.hair, identity.skin, 0.12));
    canvas.paint([centre_x - r, centre_y - r, centre_x + r, centre_y + r], |x, y| {
        let plane = head.plane(x, y);
        let outside = head.outline(plane, 0.0);
        let covered = cover(outside * head.unit);
        if covered == 0.0 {
            return ([0.0; 3], 0.0);
        }
        let [u, v] = plane;
        let (nx, ny) = (u / identity.width, 0.85 * v);
        let nz = (1.0 - nx * nx - ny * ny).max(0.0).sqrt();
        let lit = (nx * l[0] + ny * l[1] + nz * l[2]).max(0.0);
        let strength = 0.15 + 0.40 * shot.contrast;
        let mut colour = shade(identity.skin, 1.03 - strength + 1.15 * strength * lit);
        // Positions on the face move with the face.
        let (fu, fv) = (u - 0.9 * drift[0] * 1.7, v - 0.9 * drift[1] * 1.7);
        let cheek = |side: f32| bell((fu - side * 0.42) / 0.20) * bell((fv - 0.26) / 0.17);
        let rosy = 0.30 * identity.blush * (cheek(-1.0) + cheek(1.0));
        colour = mix(colour, [0.86, 0.40, 0.38], rosy.min(0.5));
        let socket = |side: f32| {
            bell((fu - side * identity.eye_distance) / 0.20) * bell((fv - identity.eye_height + 0.02) / 0.13)
        };
        colour = mix(colour, brow_shade, 0.45 * (socket(-1.0) + socket(1.0)).min(1.0));
        if identity.freckles > 0.0 {
            let spots = (fu * 61.0).sin() * (fv * 57.0 + 3.0 * (fu * 23.0).sin()).sin();
            let where_ = bell(fu / 0.5) * bell((fv - 0.15) / 0.16);
            colour = mix(colour, [0.55, 0.30, 0.18], 0.55 * identity.freckles * where_ * step(0.35, 0.8, spots));
        }
        let jaw = step(0.30, 0.55, fv + 0.35 * (fu / identity.width).powi(2));
        let chin = bell(fu / 0.22) * step(0.70, 0.80, fv);
        let lip = bell(fu / (1.15 * identity.mouth_width)) * bell((fv - identity.mouth_height + 0.14) / 0.07);
        let bearded = match identity.beard {
            Beard::None => 0.0,
            Beard::Stubble => 0.28 * jaw.max(lip),
            Beard::Full => 0.94 * jaw.max(step(0.4, 0.7, lip)),
            Beard::Moustache => 0.95 * step(0.35, 0.65, lip),
            Beard::Goatee => 0.92 * step(0.3, 0.6, chin).max(step(0.45, 0.7, lip)),
        };
        let bare = 1.0 - mouth_area(identity, fu, fv);
        colour = mix(colour, shade(beard, 0.75 + 0.35 * lit), bearded * bare);
        if identity.style == HairStyle::Bald {
            let crown = step(identity.hairline + 0.15, identity.hairline - 0.15, fv);
            colour = mix(colour, shade(identity.hair, 0.9), 0.12 * crown);
        }
        (edge(colour, outside), covered)
    });
}

/// Returns 1 on the lips, where there is no beard, and 0 outside.
fn mouth_area(identity: &Identity, u: f32, v: f32) -> f32 {
    let reach = (u / (0.95 * identity.mouth_width)).powi(2) + ((v - identity.mouth_height) / 0.11).powi(2);
    step(1.2, 0.8, reach)
}

/// Darkens the outline a little.
fn edge(colour: Colour, outside: f32) -> Colour {
    shade(colour, 1.0 - 0.16 * step(-0.10, 0.0, outside))
}
