//! A linear head on hidden states, and its optimizer.

use serde::{Deserialize, Serialize};

/// Features of some tokens, and their places in a grid `[B, T]` of all samples.
pub struct Features {
    /// Number of values of a token.
    pub dim: usize,
    /// Row and column of each token.
    pub cells: Vec<(usize, usize)>,
    /// Hidden states and their running means, `[cells, dim]` row-major.
    pub states: Vec<f32>,
}

impl Features {
    /// Of no tokens yet.
    pub fn none() -> Self {
        Self { dim: 0, cells: Vec::new(), states: Vec::new() }
    }

    fn rows(&self) -> impl Iterator<Item = &[f32]> {
        self.states.chunks_exact(self.dim.max(1))
    }
}

/// `value = w . h / sqrt(D) + b`. The root makes one learning rate do for all widths: a step of Adam, which moves every
/// weight alike, moves the value by as much whatever D is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ValueHead {
    /// w, and b after it.
    parameters: Vec<f64>,
    optimizer: Adam,
}

impl ValueHead {
    /// Says 0 of every state of width `dim`.
    pub fn new(dim: usize) -> Self {
        let zeros = vec![0.0; dim + 1];
        Self { optimizer: Adam { step: 0, mean: zeros.clone(), square: zeros.clone() }, parameters: zeros }
    }

    /// Width of the hidden states that it reads.
    pub fn dim(&self) -> usize {
        self.parameters.len() - 1
    }

    /// Whether one that was read from a checkpoint is whole.
    pub fn is_whole(&self) -> bool {
        let Adam { mean, square, .. } = &self.optimizer;
        !self.parameters.is_empty() && [mean.len(), square.len()] == [self.parameters.len(); 2]
    }

    fn scale(&self) -> f64 {
        (self.dim().max(1) as f64).sqrt().recip()
    }

    /// The value of each token of `features`.
    pub fn values(&self, features: &Features) -> Vec<f64> {
        let Some((bias, weights)) = self.parameters.split_last() else { return Vec::new() };
        let dot = |row: &[f32]| row.iter().zip(weights).map(|(h, w)| f64::from(*h) * w).sum::<f64>();
        features.rows().map(|row| dot(row) * self.scale() + bias).collect()
    }

    /// The gradient of the parameters, given that of the values.
    pub fn gradient(&self, features: &Features, d_values: &[f64]) -> Vec<f64> {
        let mut gradient = vec![0.0; self.parameters.len()];
        for (row, d) in features.rows().zip(d_values).filter(|(_, d)| **d != 0.0) {
            let d_weights = d * self.scale();
            gradient.iter_mut().zip(row).for_each(|(sum, h)| *sum += d_weights * f64::from(*h));
            gradient[row.len()] += d;
        }
        gradient
    }

    /// The gradient of the features, `[cells, dim]`, given that of the values.
    pub fn pull(&self, d_values: &[f64]) -> Vec<f32> {
        let weights = &self.parameters[..self.dim()];
        let of_value = |d: &f64| {
            let d = d * self.scale();
            weights.iter().map(move |w| (d * w) as f32)
        };
        d_values.iter().flat_map(of_value).collect()
    }

    /// One step of Adam.
    pub fn update(&mut self, gradient: &[f64], learning_rate: f64) {
        self.optimizer.update(&mut self.parameters, gradient, learning_rate);
    }
}

/// Adam (<https://arxiv.org/abs/1412.6980>, algorithm 1).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Adam {
    step: i32,
    mean: Vec<f64>,
    square: Vec<f64>,
}

impl Adam {
    fn update(&mut self, parameters: &mut [f64], gradient: &[f64], learning_rate: f64) {
        self.step = self.step.saturating_add(1);
        let step = AdamStep::new(self.step, learning_rate);
        let moments = self.mean.iter_mut().zip(&mut self.square);
        for ((parameter, g), (mean, square)) in parameters.iter_mut().zip(gradient).zip(moments) {
            step.moves(parameter, *g, mean, square);
        }
    }
}

/// Numbers of one step of Adam, the same for every parameter.
pub struct AdamStep {
    corrections: [f64; 2],
    learning_rate: f64,
}

impl AdamStep {
    const BETAS: [f64; 2] = [0.9, 0.999];
    const EPS: f64 = 1e-8;

    /// Step number `step`, from 1.
    pub fn new(step: i32, learning_rate: f64) -> Self {
        Self { corrections: Self::BETAS.map(|beta| 1.0 - beta.powi(step)), learning_rate }
    }

    /// Moves a parameter and its moments by the gradient `g`.
    pub fn moves(&self, parameter: &mut f64, g: f64, mean: &mut f64, square: &mut f64) {
        let [first, second] = self.corrections;
        *mean += (1.0 - Self::BETAS[0]) * (g - *mean);
        *square += (1.0 - Self::BETAS[1]) * (g * g - *square);
        *parameter -= self.learning_rate * (*mean / first) / ((*square / second).sqrt() + Self::EPS);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// Three tokens with states of width two.
    pub(super) fn features() -> Features {
        Features { dim: 2, cells: vec![(0, 0), (0, 1), (1, 0)], states: vec![1.0, -2.0, 0.5, 3.0, -1.0, 0.25] }
    }

    #[test]
    fn the_gradient_is_that_of_differences() {
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
    fn the_gradient_of_what_it_reads_is_that_of_differences() {
        let features = features();
        let mut head = ValueHead::new(2);
        head.parameters = vec![0.3, -0.7, 0.2];
        let weights = [0.4, -1.0, 2.5];
        let pulled = head.pull(&weights);
        for (i, found) in pulled.iter().enumerate() {
            let at = |by: f32| {
                let mut moved = Features { dim: 2, cells: features.cells.clone(), states: features.states.clone() };
                moved.states[i] += by;
                head.values(&moved).iter().zip(weights).map(|(v, w)| v * w).sum::<f64>()
            };
            let quotient = (at(0.5) - at(-0.5)) as f32;
            assert!((quotient - found).abs() < 1e-5, "{i}: {found}, {quotient}");
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
    fn a_checkpoint_gives_the_same_bits_back() {
        let mut head = ValueHead::new(2);
        head.update(&[1.0 / 3.0, -0.1, 2.0], 0.07);
        let text = serde_json::to_string(&head).unwrap();
        assert_eq!(serde_json::from_str::<ValueHead>(&text).unwrap(), head);
        assert!(head.is_whole());
    }
}
