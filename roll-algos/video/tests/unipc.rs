//! UniPC against diffusers, step by step. `tests/scripts/unipc_reference.py` wrote the numbers.

#![allow(clippy::unwrap_used)]

use roll_core::Tensor;
use roll_video::{FlowSchedule, Sampler};

#[derive(serde::Deserialize)]
struct Reference {
    start: Vec<f32>,
    cases: Vec<Case>,
}

#[derive(serde::Deserialize)]
struct Case {
    steps: usize,
    shift: f64,
    sigmas: Vec<f64>,
    timesteps: Vec<f32>,
    latents: Vec<Vec<f64>>,
}

/// The formula of the script.
fn velocity(x: &Tensor, timestep: f64) -> Tensor {
    let one = |(place, x): (usize, &f32)| {
        let x = f64::from(*x);
        ((2.0 * x + 0.3 * place as f64).sin() * (0.5 + timestep / 1000.0) - 0.2 * x) as f32
    };
    let values: Vec<f32> = x.f32s().unwrap().iter().enumerate().map(one).collect();
    Tensor::new(values, x.shape()).unwrap()
}

#[test]
fn unipc_takes_the_steps_that_diffusers_takes() {
    let reference: Reference = serde_json::from_str(include_str!("unipc.json")).unwrap();
    for case in reference.cases {
        let schedule = FlowSchedule::unipc(case.steps, case.shift).unwrap();
        let n = schedule.steps();
        assert_eq!(schedule.timesteps()[..n], case.timesteps, "{} steps", case.steps);
        assert!(schedule.sigmas().iter().zip(&case.sigmas).all(|(ours, theirs)| f64::from(*ours) == *theirs));
        let mut x = Tensor::new(reference.start.clone(), [reference.start.len()]).unwrap();
        let mut steps = Sampler::Unipc.start();
        for (i, expected) in case.latents.iter().enumerate() {
            let v = velocity(&x, schedule.timestep(i).0);
            x = steps.step(schedule.sigma(i), schedule.sigma(i + 1), &x, &v).unwrap();
            let worst =
                x.f32s().unwrap().iter().zip(expected).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
            assert!(worst < 1e-6, "{} steps, shift {}, step {i}: {worst:e}", case.steps, case.shift);
        }
    }
}
