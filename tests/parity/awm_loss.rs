//! The loss of Advantage Weighted Matching.

use roll_video::diffusion_nft::loss::Noised;
use roll_video::diffusion_nft::loss::awm::{self, Matching};
use roll_video::policy_gradient::clip::ClipRange;
use roll_video::policy_gradient::{LossMask, distance};
use serde::Deserialize;

use crate::case::{Case, Outcome, Report};
use crate::exact::{Exact, entries, row, wide};

#[derive(Deserialize)]
struct Entry {
    index: usize,
    inputs: String,
    weighting: String,
    ghuber_power: f64,
    loss_type: String,
    clip_range: f64,
    adv_clip_max: f64,
    advantage_max: Option<f64>,
    beta: f64,
    ema_beta: f64,
}

pub fn run(case: &Case) -> Outcome<Report> {
    let inputs = case.tensors("inputs.safetensors")?;
    let mut exact = Exact::open(case)?;
    for entry in entries::<Entry>(case)? {
        let input = |name: &str| format!("{}.{name}", entry.inputs);
        let matching = match entry.weighting.as_str() {
            "Uniform" => Matching::Uniform,
            "t" => Matching::T,
            "t**2" => Matching::TSquared,
            "huber" => Matching::Huber,
            "ghuber" => Matching::Ghuber,
            other => return Err(format!("an unknown weighting, `{other}`").into()),
        };
        let output = |name: &str| format!("{:03}.{name}", entry.index);
        if entry.loss_type == "sum_first" {
            for name in ["log_prob", "old_log_prob", "policy_loss", "kl_loss", "ema_kl_loss", "loss", "grad_velocity"] {
                exact.report.leave_out(&output(name), "roll has one ratio per noise level");
            }
            continue;
        }
        let range = ClipRange::symmetric(entry.clip_range)?;
        let times = wide(&inputs, &input("t"))?;
        let advantages = wide(&inputs, &input("advantages"))?;
        let samples = advantages.len();
        let levels = times.len() / samples;
        let size = inputs[&input("x0")].len() / samples;
        let (mut new, mut old) = (vec![0.0; times.len()], vec![0.0; times.len()]);
        let (mut gradient, mut policy, mut kl, mut ema) = (vec![0.0; times.len() * size], 0.0, 0.0, 0.0);
        for (sample, advantage) in advantages.iter().enumerate() {
            let bound = entry.adv_clip_max;
            let advantage = advantage.clamp(-bound, bound) * entry.advantage_max.map_or(1.0, |most| most / bound);
            let mask = LossMask::all(size);
            let noised = |level: usize| -> Outcome<Noised<'_>> {
                let at = level * samples + sample;
                let read = |name: &str| row(&inputs, &input(name), at, times.len());
                let (noise, velocity, old) = (read("noise")?, read("velocity")?, read("velocity_old")?);
                let data = row(&inputs, &input("x0"), sample, samples)?;
                Ok(Noised { data, noise, t: times[at], velocity, old, mask })
            };
            let noised = (0..levels).map(noised).collect::<Outcome<Vec<_>>>()?;
            let count = times.len() as f64;
            for (level, noised) in noised.iter().enumerate() {
                let found = awm::at_level(matching, entry.ghuber_power, advantage, range, noised);
                let at = level * samples + sample;
                [new[at], old[at]] = found.log_probs;
                policy += found.term.loss / count;
                let (velocity, mut slopes) = (noised.velocity, found.gradient);
                slopes.iter_mut().for_each(|d| *d /= count);
                for (name, weight, sum) in
                    [("velocity_ref", entry.beta, &mut kl), ("velocity_ema", entry.ema_beta, &mut ema)]
                {
                    let other = row(&inputs, &input(name), at, times.len())?;
                    *sum += distance::squared(velocity, other, mask) / count;
                    distance::add_squared_gradient(&mut slopes, weight / count, velocity, other, mask);
                }
                gradient[at * size..(at + 1) * size].copy_from_slice(&slopes);
            }
        }
        exact.compare(&output("log_prob"), &new)?;
        exact.compare(&output("old_log_prob"), &old)?;
        exact.compare(&output("policy_loss"), &[policy])?;
        exact.compare(&output("kl_loss"), &[kl])?;
        exact.compare(&output("ema_kl_loss"), &[ema])?;
        exact.compare(&output("loss"), &[policy + entry.beta * kl + entry.ema_beta * ema])?;
        exact.compare(&output("grad_velocity"), &gradient)?;
    }
    Ok(exact.report)
}
