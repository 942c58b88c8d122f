//! The parameter gradients of a whole Reward-FL step, through reward, decoder and denoising steps of real networks,
//! against central differences. The networks and inputs are those of the parity case `reward_fl_step`.

use std::path::Path;

use roll_core::{Model, Noise, Purpose, Sigma, Tensor};
use roll_video::policy_gradient::LossMask;
use roll_video::reward_fl::{Direct, Observer, loss::step_kl};

use crate::case::{Case, Setting};
use crate::reward_fl_step::Bench;

/// Velocities with the adapter, and without it, of the trained steps.
#[derive(Default)]
struct Velocities {
    on: Vec<(usize, Tensor)>,
    off: Vec<(usize, Tensor)>,
}

impl Observer for Velocities {
    fn velocity(&mut self, step: usize, velocity: &Tensor) {
        self.on.push((step, velocity.clone()));
    }
    fn reference(&mut self, step: usize, velocity: &Tensor) {
        self.off.push((step, velocity.clone()));
    }
}

/// Every step that runs on the expert with the adapter is trained, so that the truncated gradient is the whole one.
fn bench() -> Bench {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/reward_fl_step");
    let setting =
        Setting { backend: "flex", device: roll_backends::device("flex").unwrap(), dtype: burn_tensor::DType::F32 };
    let mut bench = Bench::open(&Case::on(&dir, setting).unwrap()).unwrap();
    let schedule = bench.plan().unwrap().schedule;
    let low = |i: &usize| schedule.timestep(*i).uses_low_noise(0.9);
    bench.options.mid_timestep = (0..schedule.steps()).find(low).unwrap();
    bench
}

/// Compares `gradient` with the central differences of `value` along directions in which it is steep: the gradient
/// itself, and the gradient with every component scaled by a random factor.
fn check(bench: &mut Bench, gradient: &[f32], reach: f32, tolerance: f64, value: impl Fn(&mut Bench) -> f64) {
    let mut at = vec![0.0; gradient.len()];
    bench.model.read_parameters(&mut at).unwrap();
    let norm = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt() as f32;
    for seed in 0..3 {
        let noise = Noise::new(seed);
        let mut draw = noise.uniform(Purpose::Synthetic, 0, 0);
        let factor = |draw: f32| if seed == 0 { 1.0 } else { draw + 0.5 };
        let direction: Vec<f32> = gradient.iter().map(|g| g / norm * factor(draw())).collect();
        let mut moved = |h: f32| {
            let values: Vec<f32> = at.iter().zip(&direction).map(|(a, d)| a + h * d).collect();
            bench.model.write_parameters(&values).unwrap();
            value(bench)
        };
        let quotient = (moved(reach) - moved(-reach)) / f64::from(2.0 * reach);
        let slope: f64 = gradient.iter().zip(&direction).map(|(g, d)| f64::from(*g) * f64::from(*d)).sum();
        println!("direction {seed}: slope {slope:.6e}, quotient {quotient:.6e}");
        assert!((quotient / slope - 1.0).abs() < tolerance, "direction {seed}: {quotient:e} instead of {slope:e}");
    }
    bench.model.write_parameters(&at).unwrap();
}

#[test]
fn score_gradients_match_finite_differences() {
    let mut bench = bench();
    let gradient = bench.gradient(1.0, 0.0).unwrap();
    check(&mut bench, &gradient, 0.005, 5e-3, |bench| {
        let latents = bench.rollout(&mut Velocities::default()).unwrap().latents;
        bench.score(&latents).unwrap()
    });
}

#[test]
fn kl_gradients_match_finite_differences_at_fixed_reference_velocities() {
    let mut bench = bench();
    let mut first = Velocities::default();
    bench.rollout(&mut first).unwrap();
    let gradient = bench.gradient(0.0, 1.0).unwrap();
    let schedule = bench.plan().unwrap().schedule;
    check(&mut bench, &gradient, 0.01, 1e-3, |bench| {
        let mut moved = Velocities::default();
        bench.rollout(&mut moved).unwrap();
        let kl = first.off.iter().map(|(step, u)| {
            let (_, v) = moved.on.iter().find(|(i, _)| i == step).unwrap();
            step_kl(v, u, schedule.sigma(*step), LossMask::all(v.len())).unwrap().0
        });
        kl.sum::<f64>() / first.off.len() as f64
    });
}

#[test]
fn gradients_of_steps_with_known_noise_match_finite_differences() {
    let mut bench = bench();
    let data = bench.rollout(&mut Velocities::default()).unwrap().latents;
    let noise = bench.noise.clone();
    for step in (Direct { step: 0.2, ..Direct::default() }).steps(Sigma(0.6), 0.5, &noise) {
        bench.noise = step.latents(&data).unwrap();
        let plan = step.plan(&bench.plan().unwrap());
        let finished = |bench: &mut Bench| {
            let trajectory = bench.rollout_of(&plan, &mut Velocities::default()).unwrap();
            step.finished(trajectory, &bench.model.conditioning).unwrap()
        };
        let trajectory = finished(&mut bench);
        let gradient = bench.pull(trajectory, |_, _| (1.0, 0.0)).unwrap().gradient;
        // The division by `1 - to` magnifies rounding, and kinks where the decoder clamps.
        check(&mut bench, &gradient, 0.005, 2e-2, |bench| {
            let latents = finished(bench).latents;
            bench.score(&latents).unwrap()
        });
    }
}
