//! Painting with antialiased edges.

use super::Shot;

/// Red, green and blue in [0, 1].
pub type Colour = [f32; 3];

/// A picture that is being painted.
pub struct Canvas {
    pixels: Vec<Colour>,
    height: usize,
    width: usize,
}

impl Canvas {
    /// Creates a black picture of `[height, width]` pixels.
    pub fn new([height, width]: [usize; 2]) -> Self {
        Self { pixels: vec![[0.0; 3]; height * width], height, width }
    }

    /// Returns height and width.
    pub fn size(&self) -> [usize; 2] {
        [self.height, self.width]
    }

    /// Sets every pixel.
    pub fn fill(&mut self, colour: impl Fn(f32, f32) -> Colour) {
        for (i, pixel) in self.pixels.iter_mut().enumerate() {
            *pixel = colour((i % self.width) as f32, (i / self.width) as f32);
        }
    }

    /// Blends over the box `[x1, y1, x2, y2]`. `paint` returns a colour and its alpha.
    pub fn paint(&mut self, [x1, y1, x2, y2]: [f32; 4], paint: impl Fn(f32, f32) -> (Colour, f32)) {
        let range = |from: f32, to: f32, n: usize| {
            let from = (from - 1.0).floor().clamp(0.0, n as f32) as usize;
            from..((to + 2.0).ceil().clamp(0.0, n as f32) as usize).max(from)
        };
        for y in range(y1, y2, self.height) {
            for x in range(x1, x2, self.width) {
                let (colour, cover) = paint(x as f32, y as f32);
                if cover > 0.0 {
                    let pixel = &mut self.pixels[y * self.width + x];
                    *pixel = mix(*pixel, colour, cover.min(1.0));
                }
            }
        }
    }

    /// Returns `[3, H, W]` in [-1, 1], after applying the colour and the strength of the light.
    pub fn finish(&self, shot: &Shot) -> Vec<f32> {
        let tint = [1.0 + 0.12 * shot.warmth, 1.0, 1.0 - 0.14 * shot.warmth].map(|t| t * shot.brightness);
        let channel = |c: usize| self.pixels.iter().map(move |p| 2.0 * (p[c] * tint[c]).clamp(0.0, 1.0) - 1.0);
        (0..3).flat_map(channel).collect()
    }
}

/// Interpolates linearly: `a` at `t = 0`, `b` at `t = 1`.
pub fn mix(a: Colour, b: Colour, t: f32) -> Colour {
    std::array::from_fn(|c| a[c] + (b[c] - a[c]) * t)
}

/// Multiplies a colour by `factor` and clamps it to [0, 1].
pub fn shade(colour: Colour, factor: f32) -> Colour {
    colour.map(|v| (v * factor).clamp(0.0, 1.0))
}

/// Returns the fraction of a pixel inside an edge at `distance` pixels (negative inside).
pub fn cover(distance: f32) -> f32 {
    (0.5 - distance).clamp(0.0, 1.0)
}

/// Returns 0 below `from`, 1 above `to`, and a smooth step between.
pub fn step(from: f32, to: f32, x: f32) -> f32 {
    let t = ((x - from) / (to - from)).clamp(0.0, 1.0);
    t * t * (3.0 - 2.0 * t)
}

/// Returns `exp(-x^2)`.
pub fn bell(x: f32) -> f32 {
    (-x * x).exp()
}
