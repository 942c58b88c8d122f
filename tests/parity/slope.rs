//! Gradients against differences.

use crate::case::{Outcome, Report};

/// Greatest error of the slope, relative to it.
const TOLERANCE: f64 = 1e-2;

/// Compares `gradient`, that of `value` at `x`, with differences along it. `x` moves by `step` and by
/// twice that in the Euclidean norm; the two differences are extrapolated (Richardson), so their curvature cancels.
pub fn check(
    report: &mut Report,
    name: &str,
    x: &[f32],
    gradient: &[f32],
    step: f64,
    mut value: impl FnMut(&[f32]) -> Outcome<f64>,
) -> Outcome {
    let norm = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
    let mut difference = |step: f64| -> Outcome<f64> {
        let mut at = |step: f64| {
            let moved = x.iter().zip(gradient).map(|(x, g)| x + (step * f64::from(*g) / norm) as f32);
            value(&moved.collect::<Vec<f32>>())
        };
        Ok((at(step)? - at(-step)?) / (2.0 * step))
    };
    let slope = (4.0 * difference(step)? - difference(2.0 * step)?) / 3.0;
    let is_near = norm > 0.0 && (slope - norm).abs() < TOLERANCE * norm;
    report.check(is_near, || format!("{name}: a slope of {slope} by differences, {norm} by the pullback"));
    Ok(())
}
