//! Procedural faces. A person ([`Identity`]) is rendered in a pose ([`Shot`]) to a [`Picture`] with its exact
//! landmarks; [`clip()`] animates a person, [`portrait()`] draws one by a description.

mod canvas;
mod clip;
mod features;
mod geometry;
mod hair;
mod head;
mod identity;
mod portrait;
mod shot;
#[cfg(test)]
mod tests;

pub use clip::{Clip, clip, prompts, swapped};
pub use identity::Identity;
pub use portrait::{describe, descriptions, portrait};
pub use shot::{Shot, random_shot};

use canvas::Canvas;
use geometry::Head;

/// A drawn face.
#[derive(Clone, Debug, PartialEq)]
pub struct Picture {
    /// `[3, H, W]` in [-1, 1].
    pub pixels: Vec<f32>,
    /// Height and width in pixels.
    pub size: [usize; 2],
    /// The face without hair and ears: x1, y1, x2, y2 in pixels.
    pub bounds: [f32; 4],
    /// Eye on the left of the picture, other eye, tip of the nose, left and right corner of the mouth: x, y in pixels.
    /// The centre of the first pixel is at 0.
    pub landmarks: [[f32; 2]; 5],
}

/// Renders a face of `[height, width]` pixels.
pub fn render(identity: &Identity, shot: &Shot, size: [usize; 2]) -> Picture {
    let head = Head::new(identity, shot, size);
    let mut canvas = Canvas::new(size);
    head::background(&mut canvas, shot);
    hair::behind(&mut canvas, &head, identity, shot);
    head::body(&mut canvas, &head, identity, shot);
    head::skin(&mut canvas, &head, identity, shot);
    features::draw(&mut canvas, &head, identity, shot);
    hair::front(&mut canvas, &head, identity, shot);
    features::glasses(&mut canvas, &head, identity);
    Picture { pixels: canvas.finish(shot), size, bounds: head.bounds(), landmarks: head.landmarks() }
}
