//! Bicubic resizing of pictures, equal to torch's `interpolate(mode="bicubic", align_corners=False)`.

use roll_core::{Error, Result, Tensor};

/// The parameter `a` of Keys' cubic kernel, as torch has it.
const A: f64 = -0.75;

/// Resizes f32 `[3, H, W]` to `[3, h, w]`, returned as a flat vector. There is no antialiasing, as in the reference
/// implementation. Values may overshoot the input's range.
pub fn bicubic(picture: &Tensor, [h, w]: [usize; 2]) -> Result<Vec<f32>> {
    let &[3, height, width] = picture.shape() else {
        return Err(Error::shape("picture", "[3, H, W]", picture.shape()));
    };
    if height == 0 || width == 0 {
        return Err(Error::shape("picture", "[3, H, W], not empty", picture.shape()));
    }
    let pixels = picture.f32s()?;
    let (rows, columns) = (taps(height, h), taps(width, w));
    let mut out = Vec::with_capacity(3 * h * w);
    for plane in pixels.chunks_exact(height * width) {
        for row in &rows {
            for column in &columns {
                let mut sum = 0.0;
                for (y, wy) in row {
                    let line = &plane[y * width..(y + 1) * width];
                    sum += wy * column.iter().map(|(x, wx)| wx * f64::from(line[*x])).sum::<f64>();
                }
                out.push(sum as f32);
            }
        }
    }
    Ok(out)
}

/// For each output position of an axis, the four input positions (clamped to the edge) and their weights. `input` and
/// `output` are the lengths of the axis.
fn taps(input: usize, output: usize) -> Vec<[(usize, f64); 4]> {
    let scale = input as f64 / output as f64;
    // Keys' cubic kernel at a distance of at most 1, and at a distance from 1 to 2.
    let near = |d: f64| ((A + 2.0) * d - (A + 3.0)) * d * d + 1.0;
    let far = |d: f64| ((A * d - 5.0 * A) * d + 8.0 * A) * d - 4.0 * A;
    (0..output)
        .map(|i| {
            let source = scale * (i as f64 + 0.5) - 0.5;
            let (floor, t) = (source.floor(), source - source.floor());
            let weights = [far(t + 1.0), near(t), near(1.0 - t), far(2.0 - t)];
            std::array::from_fn(|n| {
                let position = (floor + n as f64 - 1.0).clamp(0.0, (input - 1) as f64);
                (position as usize, weights[n])
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn resizing_to_the_same_size_is_the_identity() {
        let values: Vec<f32> = (0..3 * 4 * 5).map(|i| (i as f32).sin()).collect();
        let picture = Tensor::new(values.clone(), [3, 4, 5]).unwrap();
        assert_eq!(bicubic(&picture, [4, 5]).unwrap(), values);
    }

    #[test]
    fn bicubic_agrees_with_torch() {
        // torch.nn.functional.interpolate(p, size=(3, 7), mode="bicubic", align_corners=False) in float64 with
        // p[c, y, x] = sin(1.7 * (c * 20 + y * 5 + x)), shape [3, 4, 5]; some flat positions, printed by torch 2.9.
        let values: Vec<f32> = (0..60).map(|i| (1.7 * f64::from(i)).sin() as f32).collect();
        let out = bicubic(&Tensor::new(values, [3, 4, 5]).unwrap(), [3, 7]).unwrap();
        for (at, expected) in TORCH {
            assert!((f64::from(out[*at]) - expected).abs() < 1e-6, "{at}: {} {expected}", out[*at]);
        }
    }

    const TORCH: &[(usize, f64)] = &[
        (0, 0.098378856),
        (5, -0.200498344),
        (20, 0.590055051),
        (21, 0.362885962),
        (24, -0.08654276),
        (27, -0.184130197),
        (35, 0.369054358),
        (41, -0.177451363),
        (42, -0.714247299),
        (62, -0.288895157),
    ];
}
