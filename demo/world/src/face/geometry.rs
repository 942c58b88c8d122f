//! Projection of positions on the head to pixels.

use super::{Identity, Shot};

/// Depth of the head. The unit is half the head's height.
const DEPTH: f32 = 0.85;
/// Height of the tip of the nose above the surface.
const NOSE: f32 = 0.16;

/// A posed head. The unit is half its height; x points right, y down; the chin lies at y = 1.
pub struct Head {
    /// Half the width.
    pub width: f32,
    /// Pixels per unit.
    pub unit: f32,
    centre: [f32; 2],
    yaw: [f32; 2],
    pitch: [f32; 2],
    roll: [f32; 2],
    jaw: f32,
    square: f32,
    hairline: f32,
    landmarks: [[f32; 2]; 5],
}

/// Local coordinates around a position on the head's surface, in units of the head.
pub struct Patch {
    /// The position in pixels.
    pub at: [f32; 2],
    inverse: [f32; 4],
    /// Approximate number of pixels per unit.
    pub unit: f32,
    /// How much the surface faces the viewer, 0 to 1.
    pub facing: f32,
}

impl Patch {
    /// Returns the local coordinates of a pixel.
    pub fn local(&self, x: f32, y: f32) -> [f32; 2] {
        let (dx, dy) = (x - self.at[0], y - self.at[1]);
        [self.inverse[0] * dx + self.inverse[1] * dy, self.inverse[2] * dx + self.inverse[3] * dy]
    }

    /// Returns a box that contains `reach` units around the position, in pixels.
    pub fn bounds(&self, reach: f32) -> [f32; 4] {
        let r = reach * self.unit * 1.2;
        [self.at[0] - r, self.at[1] - r, self.at[0] + r, self.at[1] + r]
    }
}

impl Head {
    /// Poses the head of `identity`.
    pub fn new(identity: &Identity, shot: &Shot, [height, width]: [usize; 2]) -> Self {
        let turn = |angle: f32| [angle.cos(), angle.sin()];
        let mut head = Self {
            width: identity.width,
            unit: shot.scale * height as f32,
            centre: [shot.centre[0] * width as f32 - 0.5, shot.centre[1] * height as f32 - 0.5],
            yaw: turn(shot.yaw),
            pitch: turn(shot.pitch),
            roll: turn(shot.roll),
            jaw: identity.jaw,
            square: identity.square,
            hairline: identity.hairline,
            landmarks: [[0.0; 2]; 5],
        };
        let eye = |side: f32| head.project([side * identity.eye_distance, identity.eye_height], 0.0);
        let corner = |side: f32| head.project([side * identity.mouth_reach(shot), identity.mouth_corner(shot)], 0.0);
        let nose = head.project([0.0, identity.nose_height], NOSE);
        head.landmarks = [eye(-1.0), eye(1.0), nose, corner(-1.0), corner(1.0)];
        head
    }

    /// Projects a position of the surface, raised by `out` units, to a pixel.
    pub fn project(&self, [x, y]: [f32; 2], out: f32) -> [f32; 2] {
        let flat = 1.0 - (x / self.width).powi(2) - (y / 1.05).powi(2);
        let z = DEPTH * flat.max(0.02).sqrt() + out;
        let [cos, sin] = self.yaw;
        let (x, z) = (x * cos + z * sin, z * cos - x * sin);
        let [cos, sin] = self.pitch;
        let y = y * cos + z * sin;
        self.place([x, y])
    }

    /// Projects a point of the plane that faces the viewer to a pixel. Only roll, size and position of the head are
    /// applied.
    pub fn place(&self, [x, y]: [f32; 2]) -> [f32; 2] {
        let [cos, sin] = self.roll;
        [self.centre[0] + self.unit * (x * cos - y * sin), self.centre[1] + self.unit * (x * sin + y * cos)]
    }

    /// Inverts [`Head::place`].
    pub fn plane(&self, x: f32, y: f32) -> [f32; 2] {
        let (dx, dy) = ((x - self.centre[0]) / self.unit, (y - self.centre[1]) / self.unit);
        let [cos, sin] = self.roll;
        [dx * cos + dy * sin, dy * cos - dx * sin]
    }

    /// Returns how far hair and hairline move right and down when the head turns.
    pub fn drift(&self) -> [f32; 2] {
        [0.45 * self.yaw[1], 0.45 * self.pitch[1]]
    }

    /// Returns local coordinates that follow the surface around a position, raised by `out` units.
    pub fn patch(&self, [x, y]: [f32; 2], out: f32) -> Patch {
        const D: f32 = 0.03;
        let at = self.project([x, y], out);
        let across = [self.project([x - D, y], out), self.project([x + D, y], out)];
        let along = [self.project([x, y - D], out), self.project([x, y + D], out)];
        let derivative = |[from, to]: [[f32; 2]; 2], i: usize| (to[i] - from[i]) / (2.0 * D);
        let [a, b, c, d] = [derivative(across, 0), derivative(along, 0), derivative(across, 1), derivative(along, 1)];
        let area = a * d - b * c;
        let facing = (area / (self.unit * self.unit)).clamp(0.0, 1.0);
        // A patch seen from the side keeps a minimal width, so that the transform remains invertible.
        let area = area.max(0.15 * self.unit * self.unit);
        Patch { at, inverse: [d / area, -b / area, -c / area, a / area], unit: self.unit, facing }
    }

    /// Returns how far a point of the plane lies outside the outline of the face, in units (negative inside). `grow`
    /// widens the outline.
    pub fn outline(&self, [x, y]: [f32; 2], grow: f32) -> f32 {
        let lower = y.max(0.0);
        let width = (self.width + grow) * (1.0 - self.jaw * 0.55 * lower * lower);
        let (u, v) = ((x / width).abs(), (y / (1.0 + grow)).abs());
        let radius = (u.powf(self.square) + v.powf(self.square)).powf(1.0 / self.square);
        (radius - 1.0) * self.width
    }

    /// Returns the box of the face without hair and ears, `[x1, y1, x2, y2]` in pixels.
    pub fn bounds(&self) -> [f32; 4] {
        let mut bounds = [f32::MAX, f32::MAX, f32::MIN, f32::MIN];
        let top = self.hairline + self.drift()[1];
        for i in 0..64 {
            let angle = i as f32 / 64.0 * std::f32::consts::TAU;
            let (dx, dy) = (angle.cos(), angle.sin());
            // The outline along a ray, by bisection.
            let (mut near, mut far) = (0.0f32, 1.6f32);
            for _ in 0..12 {
                let middle = 0.5 * (near + far);
                if self.outline([dx * middle, dy * middle], 0.0) < 0.0 { near = middle } else { far = middle }
            }
            let [x, y] = self.place([dx * near, (dy * near).max(top)]);
            bounds = [bounds[0].min(x), bounds[1].min(y), bounds[2].max(x), bounds[3].max(y)];
        }
        bounds
    }

    /// Returns the landmarks, see [`super::Picture::landmarks`].
    pub fn landmarks(&self) -> [[f32; 2]; 5] {
        self.landmarks
    }
}

impl Identity {
    /// Returns half the width of the mouth with the shot's expression.
    pub fn mouth_reach(&self, shot: &Shot) -> f32 {
        self.mouth_width * (1.0 + 0.16 * shot.smile - 0.14 * shot.mouth_open)
    }

    /// Returns the height of the mouth's corners.
    pub fn mouth_corner(&self, shot: &Shot) -> f32 {
        self.mouth_height - 0.085 * shot.smile
    }
}
