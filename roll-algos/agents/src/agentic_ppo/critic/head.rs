//! A linear head on hidden states, and its optimizer.

use roll_core::threads::in_parallel;
use serde::{Deserialize, Serialize};

use super::features::Features;

/// `value = w . h / sqrt(D) + b`. The root makes one learning rate fit all widths: a step of Adam, which moves every
/// weight by the same amount, moves the value independently of D.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct ValueHead {
    /// w, then b.
    parameters: Vec<f64>,
    optimizer: Adam,
}

impl ValueHead {
    /// A head whose value is 0 for all features of width `dim`.
    pub(super) fn new(dim: usize) -> Self {
        let zeros = vec![0.0; dim + 1];
        Self { optimizer: Adam { step: 0, mean: zeros.clone(), square: zeros.clone() }, parameters: zeros }
    }

    /// Number of features of a token.
    pub(super) fn dim(&self) -> usize {
        self.parameters.len() - 1
    }

    /// Whether a head that was read from a checkpoint has one moment per weight.
    pub(super) fn has_consistent_moments(&self) -> bool {
        let Adam { mean, square, .. } = &self.optimizer;
        !self.parameters.is_empty() && [mean.len(), square.len()] == [self.parameters.len(); 2]
    }

    /// The factor `1 / sqrt(D)`.
    fn scale(&self) -> f64 {
        (self.dim().max(1) as f64).sqrt().recip()
    }

    /// The value of each token of `features`.
    pub(super) fn values(&self, features: &Features) -> Vec<f64> {
        let Some((bias, weights)) = self.parameters.split_last() else { return Vec::new() };
        let dot = |row: &[f32]| row.iter().zip(weights).map(|(h, w)| f64::from(*h) * w).sum::<f64>();
        let rows: Vec<&[f32]> = features.rows().collect();
        let mut values = vec![0.0; rows.len()];
        let size = items_per_thread(rows.len(), features);
        let mut parts: Vec<_> = values.chunks_mut(size).zip(rows.chunks(size)).collect();
        in_parallel(&mut parts, usize::MAX, |(values, rows)| {
            values.iter_mut().zip(*rows).for_each(|(value, row)| *value = dot(row) * self.scale() + bias);
        });
        values
    }

    /// The gradient of the parameters, given the gradient of the values. The work is divided among threads by weights,
    /// not by tokens, so that the sums do not depend on the number of threads.
    pub(super) fn gradient(&self, features: &Features, d_values: &[f64]) -> Vec<f64> {
        let mut gradient = vec![0.0; self.parameters.len()];
        let Some((d_bias, d_weights)) = gradient.split_last_mut() else { return gradient };
        let used: Vec<(&[f32], f64)> =
            features.rows().zip(d_values.iter().copied()).filter(|(_, d_value)| *d_value != 0.0).collect();
        *d_bias = used.iter().fold(0.0, |sum, (_, d_value)| sum + d_value);
        let size = items_per_thread(d_weights.len(), features);
        let mut parts: Vec<_> = d_weights.chunks_mut(size).enumerate().collect();
        in_parallel(&mut parts, usize::MAX, |(i, d_part)| {
            for (row, d_value) in &used {
                let d = d_value * self.scale();
                d_part.iter_mut().zip(&row[*i * size..]).for_each(|(sum, h)| *sum += d * f64::from(*h));
            }
        });
        gradient
    }

    /// One step of Adam.
    pub(super) fn update(&mut self, gradient: &[f64], learning_rate: f64) {
        self.optimizer.update(&mut self.parameters, gradient, learning_rate);
    }
}

/// The number of `items` that each thread gets: all of them if threads would cost more than they save.
fn items_per_thread(items: usize, features: &Features) -> usize {
    /// Number of feature values from which threads are worth their cost.
    const MIN_FOR_THREADS: usize = 1 << 18;
    let threads = if features.values.len() < MIN_FOR_THREADS {
        1
    } else {
        std::thread::available_parallelism().map_or(1, |cores| cores.get())
    };
    items.div_ceil(threads).max(1)
}

/// Adam (<https://arxiv.org/abs/1412.6980>, algorithm 1).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Adam {
    step: i32,
    /// First moments: decaying means of gradients.
    mean: Vec<f64>,
    /// Second moments: decaying means of squared gradients.
    square: Vec<f64>,
}

impl Adam {
    const BETAS: [f64; 2] = [0.9, 0.999];
    const EPS: f64 = 1e-8;

    fn update(&mut self, parameters: &mut [f64], gradient: &[f64], learning_rate: f64) {
        self.step = self.step.saturating_add(1);
        let [mean_correction, square_correction] = Self::BETAS.map(|beta| 1.0 - beta.powi(self.step));
        let moments = self.mean.iter_mut().zip(&mut self.square);
        for ((parameter, g), (mean, square)) in parameters.iter_mut().zip(gradient).zip(moments) {
            *mean += (1.0 - Self::BETAS[0]) * (g - *mean);
            *square += (1.0 - Self::BETAS[1]) * (g * g - *square);
            *parameter -=
                learning_rate * (*mean / mean_correction) / ((*square / square_correction).sqrt() + Self::EPS);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// Three tokens with states of width two.
    fn features() -> Features {
        Features { dim: 2, cells: vec![(0, 0), (0, 1), (1, 0)], values: vec![1.0, -2.0, 0.5, 3.0, -1.0, 0.25] }
    }

    #[test]
    fn threads_change_no_bit() {
        let (tokens, dim) = (600, 515);
        let values: Vec<f32> = (0..tokens * dim).map(|i| (i as f32 * 0.37).sin()).collect();
        let features = Features { dim, cells: (0..tokens).map(|token| (0, token)).collect(), values };
        let mut head = ValueHead::new(dim);
        head.parameters = (0..=dim).map(|i| (i as f64 * 0.11).cos()).collect();
        let scale = (dim as f64).sqrt().recip();
        let rows: Vec<&[f32]> = features.values.chunks(dim).collect();
        let dot = |row: &[f32]| row.iter().zip(&head.parameters).map(|(h, w)| f64::from(*h) * w).sum::<f64>();
        let expected: Vec<f64> = rows.iter().map(|row| dot(row) * scale + head.parameters[dim]).collect();
        assert_eq!(head.values(&features), expected);
        let d_values: Vec<f64> = (0..tokens).map(|i| if i % 3 == 0 { 0.0 } else { 1.0 / (i as f64) }).collect();
        let mut gradient = vec![0.0; dim + 1];
        for (row, d) in rows.iter().zip(&d_values).filter(|(_, d)| **d != 0.0) {
            gradient.iter_mut().zip(*row).for_each(|(sum, h)| *sum += d * scale * f64::from(*h));
            gradient[dim] += d;
        }
        assert_eq!(head.gradient(&features, &d_values), gradient);
    }

    #[test]
    fn gradient_matches_finite_differences() {
        let features = features();
        let mut head = ValueHead::new(2);
        head.parameters = vec![0.3, -0.7, 0.2];
        let weights = [0.4, -1.0, 2.5];
        let sum = |head: &ValueHead| head.values(&features).iter().zip(weights).map(|(v, w)| v * w).sum::<f64>();
        let gradient = head.gradient(&features, &weights);
        for (i, found) in gradient.iter().enumerate() {
            let at = |by: f64| {
                let mut moved = head.clone();
                moved.parameters[i] += by;
                sum(&moved)
            };
            let quotient = (at(1e-5) - at(-1e-5)) / 2e-5;
            assert!((quotient - found).abs() < 1e-9, "{i}: {found}, {quotient}");
        }
    }

    #[test]
    fn it_learns_a_linear_function_of_its_states() {
        let features = features();
        let mut head = ValueHead::new(2);
        let wanted = [1.0, -0.5, 0.75];
        for _ in 0..4000 {
            let d: Vec<f64> = head.values(&features).iter().zip(wanted).map(|(v, w)| v - w).collect();
            let gradient = head.gradient(&features, &d);
            head.update(&gradient, 0.01);
        }
        assert!(head.values(&features).iter().zip(wanted).all(|(v, w)| (v - w).abs() < 1e-3));
    }

    #[test]
    fn the_first_step_of_adam_is_the_learning_rate() {
        let mut head = ValueHead::new(1);
        head.update(&[3.0, -0.002], 0.1);
        assert!((head.parameters[0] + 0.1).abs() < 1e-8 && (head.parameters[1] - 0.1).abs() < 1e-5);
    }

    #[test]
    fn checkpoint_round_trip_is_bit_exact() {
        let mut head = ValueHead::new(2);
        head.update(&[1.0 / 3.0, -0.1, 2.0], 0.07);
        let text = serde_json::to_string(&head).unwrap();
        assert_eq!(serde_json::from_str::<ValueHead>(&text).unwrap(), head);
        assert!(head.has_consistent_moments());
    }
}
