//! Affine maps of the plane.

/// The map `(x, y) -> (a x + b y + c, d x + e y + f)` in pixels, as rows `[a, b, c]` and `[d, e, f]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Affine(pub [[f64; 3]; 2]);

impl Affine {
    /// A scaling of the axes.
    pub fn scale(x: f64, y: f64) -> Self {
        Self([[x, 0.0, 0.0], [0.0, y, 0.0]])
    }

    /// A translation.
    pub fn translate(x: f64, y: f64) -> Self {
        Self([[1.0, 0.0, x], [0.0, 1.0, y]])
    }

    /// A rotation by `radians`, from the x axis towards the y axis.
    pub fn rotate(radians: f64) -> Self {
        let (sin, cos) = radians.sin_cos();
        Self([[cos, -sin, 0.0], [sin, cos, 0.0]])
    }

    /// Applies the map to a point.
    pub fn apply(&self, [x, y]: [f64; 2]) -> [f64; 2] {
        self.0.map(|[a, b, c]| a * x + b * y + c)
    }

    /// The composition: first this map, then `next`.
    pub fn then(&self, next: &Affine) -> Self {
        let [[a, b, c], [d, e, f]] = self.0;
        Self(next.0.map(|[p, q, r]| [p * a + q * d, p * b + q * e, p * c + q * f + r]))
    }

    /// The inverse map; `None` if this map is singular or not finite.
    pub fn inverse(&self) -> Option<Self> {
        let [[a, b, c], [d, e, f]] = self.0;
        let determinant = a * e - b * d;
        if !determinant.is_normal() {
            return None;
        }
        let linear = [[e / determinant, -b / determinant], [-d / determinant, a / determinant]];
        Some(Self(linear.map(|[p, q]| [p, q, -(p * c + q * f)])))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inverse_cancels_the_map() {
        let map = Affine::scale(1.5, 0.7).then(&Affine::rotate(0.4)).then(&Affine::translate(3.0, -8.0));
        let [x, y] = map.inverse().unwrap().apply(map.apply([12.0, -5.0]));
        assert!((x - 12.0).abs() < 1e-12 && (y + 5.0).abs() < 1e-12);
        assert_eq!(Affine::scale(0.0, 1.0).inverse(), None);
        assert_eq!(Affine::scale(f64::NAN, 1.0).inverse(), None);
    }
}
