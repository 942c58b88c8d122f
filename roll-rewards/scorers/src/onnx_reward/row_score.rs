//! Functions from a network's output row to a number. Each returns the number and its gradient with respect to the row.

/// Computes `row[index]`.
pub fn value(row: &[f32], index: usize) -> (f64, Vec<f32>) {
    let mut gradient = vec![0.0; row.len()];
    gradient[index] = 1.0;
    (f64::from(row[index]), gradient)
}

/// Computes `1 / (1 + exp(-row[index]))`.
pub fn sigmoid(row: &[f32], index: usize) -> (f64, Vec<f32>) {
    let value = 1.0 / (1.0 + (-f64::from(row[index])).exp());
    let mut gradient = vec![0.0; row.len()];
    gradient[index] = (value * (1.0 - value)) as f32;
    (value, gradient)
}

/// Computes `exp(row[index]) / sum of exp(row)`.
pub fn softmax(row: &[f32], index: usize) -> (f64, Vec<f32>) {
    let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let exponentials: Vec<f64> = row.iter().map(|v| f64::from(v - largest).exp()).collect();
    let total: f64 = exponentials.iter().sum();
    let value = exponentials[index] / total;
    let slope = |(i, e): (usize, &f64)| (value * (f64::from(u8::from(i == index)) - e / total)) as f32;
    (value, exponentials.iter().enumerate().map(slope).collect())
}

/// Computes the dot product of `row / |row|` and `direction`. If `direction` is the mean of unit vectors, this is the
/// mean cosine similarity to these vectors. A row of zeros has value 0 and gradient 0.
pub fn cosine(row: &[f32], direction: &[f32]) -> (f64, Vec<f32>) {
    let length = norm(row);
    if length == 0.0 {
        return (0.0, vec![0.0; row.len()]);
    }
    let value = dot(row, direction) / length;
    let slope = |(r, d): (&f32, &f32)| ((f64::from(*d) - value * f64::from(*r) / length) / length) as f32;
    (value, row.iter().zip(direction).map(slope).collect())
}

/// Computes minus the mean over `others` of the root mean square difference between `row` and the other row.
pub fn distance(row: &[f32], others: &[Vec<f32>]) -> (f64, Vec<f32>) {
    let (mut sum, mut gradient) = (0.0, vec![0.0f64; row.len()]);
    for other in others {
        let difference: Vec<f64> = row.iter().zip(other).map(|(a, b)| f64::from(*a) - f64::from(*b)).collect();
        let rms = (difference.iter().map(|d| d * d).sum::<f64>() / row.len() as f64).sqrt();
        sum += rms;
        // Equal rows have the best value, which is not differentiable there: the gradient is 0.
        if rms > 0.0 {
            gradient.iter_mut().zip(&difference).for_each(|(g, d)| *g += d / (rms * row.len() as f64));
        }
    }
    let count = others.len().max(1) as f64;
    (-sum / count, gradient.iter().map(|g| (-g / count) as f32).collect())
}

/// Computes the mean of the normalised rows, for [`cosine`]. A row of zeros counts as zeros.
pub fn mean_direction(rows: &[Vec<f32>]) -> Vec<f32> {
    let mut sum = vec![0.0f64; rows.first().map_or(0, Vec::len)];
    for row in rows {
        let length = norm(row);
        if length > 0.0 {
            sum.iter_mut().zip(row).for_each(|(s, v)| *s += f64::from(*v) / length);
        }
    }
    sum.iter().map(|s| (s / rows.len() as f64) as f32).collect()
}

fn norm(row: &[f32]) -> f64 {
    dot(row, row).sqrt()
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gradient_check::noise;

    #[test]
    fn every_gradient_matches_finite_differences() {
        let (row, other, along) = (noise(1, 7), noise(2, 7), noise(3, 7));
        type Read<'a> = Box<dyn Fn(&[f32]) -> (f64, Vec<f32>) + 'a>;
        let others = [other.clone(), noise(4, 7)];
        let readings: [(&str, Read<'_>); 5] = [
            ("value", Box::new(|r| value(r, 3))),
            ("sigmoid", Box::new(|r| sigmoid(r, 3))),
            ("softmax", Box::new(|r| softmax(r, 2))),
            ("cosine", Box::new(|r| cosine(r, &other))),
            ("distance", Box::new(|r| distance(r, &others))),
        ];
        for (name, read) in readings {
            let moved = |step: f32| read(&row.iter().zip(&along).map(|(r, a)| r + step * a).collect::<Vec<_>>()).0;
            let numeric = (moved(1e-2) - moved(-1e-2)) / 2e-2;
            let exact = dot(&read(&row).1, &along);
            assert!((numeric - exact).abs() < 1e-3 * exact.abs().max(0.1), "{name}: {numeric} {exact}");
        }
    }

    #[test]
    fn equal_outputs_score_highest_and_zero_rows_have_no_direction() {
        let row = noise(1, 5);
        assert!((cosine(&row, &mean_direction(std::slice::from_ref(&row))).0 - 1.0).abs() < 1e-6);
        assert_eq!(distance(&row, std::slice::from_ref(&row)), (0.0, vec![-0.0; 5]));
        assert_eq!(cosine(&[0.0; 5], &row), (0.0, vec![0.0; 5]));
        assert_eq!(mean_direction(&[vec![0.0; 2]]), [0.0, 0.0]);
    }
}
