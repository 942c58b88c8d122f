//! Stochastic denoising steps: means, samples, log-probabilities and their gradients; and windows that slide.

use roll_video::flow_grpo::window::{WindowKind, Windows};
use roll_video::policy_gradient::LossMask;
use roll_video::policy_gradient::sde::{SdeKind, SdeStep};
use serde::Deserialize;
use serde_json::Value;

use crate::case::{Case, Outcome, Report};
use crate::exact::{Exact, entries, row, wide};

#[derive(Deserialize)]
struct Entry {
    index: usize,
    schedule: String,
    kind: SdeKind,
    eta: Option<f64>,
    steps: Vec<usize>,
}

pub fn run(case: &Case) -> Outcome<Report> {
    let inputs = case.tensors("inputs.safetensors")?;
    let mut exact = Exact::open(case)?;
    for Entry { index, schedule, kind, eta, steps } in entries(case)? {
        let input = |name: &str| format!("{schedule}.{name}");
        let output = |name: &str| format!("{index:03}.{name}");
        let (sigmas, rows) = (inputs[&input("sigmas")].f32s()?, steps.len());
        let cotangent = wide(&inputs, &input("cotangent"))?;
        // The sample, in f64, and as the replay found it.
        let sampled = exact.report.get(&output("next"))?.to_f32_vec();
        let sampled = sampled.iter().map(|v| f64::from(*v)).collect::<Vec<f64>>();
        let mut found: Vec<(&str, Vec<f64>)> = Vec::new();
        let mut put = |name: &'static str, values: &[f64]| match found.iter_mut().find(|(known, _)| *known == name) {
            Some((_, all)) => all.extend(values),
            None => found.push((name, values.to_vec())),
        };
        for (i, at) in steps.iter().enumerate() {
            let step = SdeStep::new(kind, eta.unwrap_or(0.0), sigmas, *at)?;
            let read = |name: &str| row(&inputs, &input(name), i, rows);
            let (x, mean) = (read("x")?, step.mean(read("x")?, read("velocity")?));
            let (next, mask) = (step.next(&mean, read("noise")?), LossMask::all(x.len()));
            for (name, values) in [("mean", &mean), ("next", &next)] {
                put(name, values);
            }
            put("std_dev_t", &[step.noise_scale()]);
            put("std", &[step.std()]);
            if kind == SdeKind::Wan {
                put("rescale", &[step.rescale()]);
            }
            // Without eta there is no log-probability; `cps` ends without noise and keeps its distance.
            if eta == Some(0.0) {
                continue;
            }
            put("log_prob", &[step.log_prob(&next, &mean, mask)]);
            let sampled = &sampled[i * x.len()..(i + 1) * x.len()];
            let replayed = step.mean(x, read("velocity_new")?);
            let slope = cotangent[i] * step.velocity_factor();
            let gradient: Vec<f64> = step.d_mean(sampled, &replayed, mask).iter().map(|d| d * slope).collect();
            put("replay.mean", &replayed);
            put("replay.log_prob", &[step.log_prob(sampled, &replayed, mask)]);
            put("replay.grad_velocity", &gradient);
        }
        for (name, values) in found {
            exact.compare(&output(name), &values)?;
        }
    }
    windows(case, &mut exact.report)?;
    Ok(exact.report)
}

/// Those that slide by an even pace, up to the first that the reference lets run off the end; ours begin again.
fn windows(case: &Case, report: &mut Report) -> Outcome {
    let all: Vec<Value> = serde_json::from_slice(&std::fs::read(case.dir.join("windows.json"))?)?;
    for entry in all.iter().filter(|entry| entry["config"]["sample_strategy"] == "progressive") {
        let number = |name: &str| entry["config"][name].as_u64().unwrap_or(1);
        let size = number("group_size") as usize;
        let overlaps = entry["config"]["prog_overlap"] == true;
        let windows = Windows {
            kind: WindowKind::Sliding,
            size,
            range: 0..number("max_timesteps") as usize,
            stride: if overlaps { number("prog_overlap_step") as usize } else { size },
            rounds: number("iters_per_group"),
        };
        let expected: Vec<Vec<usize>> = serde_json::from_value(entry["windows"].clone())?;
        for (round, expected) in expected.iter().enumerate().take_while(|(_, window)| !window.is_empty()) {
            let found: Vec<usize> = windows.at(round as u64, 0.0).collect();
            report.check(found == *expected, || format!("window {round}: {found:?}, expected {expected:?}"));
        }
    }
    Ok(())
}
