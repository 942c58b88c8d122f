//! The loss of DGPO: sums and weights of groups, values, gradients.

use roll_algos::diffusion_nft::loss::Noised;
use roll_algos::diffusion_nft::loss::dgpo::{Dgpo, PreferenceReference, group_weight};
use roll_algos::policy_gradient::clip::{ClipRange, bounded};
use roll_algos::policy_gradient::{LossMask, distance};
use serde::Deserialize;

use crate::case::{Case, Outcome, Report};
use crate::exact::{Exact, entries, row, wide};

#[derive(Deserialize)]
struct Entry {
    index: usize,
    inputs: String,
    beta: f64,
    group_size: usize,
    reference: String,
    adv_clip_max: f64,
    clip_range: f64,
    clip_dsm: bool,
    clip_kl: bool,
    kl_beta: f64,
}

pub fn run(case: &Case) -> Outcome<Report> {
    let inputs = case.tensors("inputs.safetensors")?;
    let mut exact = Exact::open(case)?;
    for entry in entries::<Entry>(case)? {
        let input = |name: &str| format!("{}.{name}", entry.inputs);
        let output = |name: &str| format!("{:03}.{name}", entry.index);
        let reference = match entry.reference.as_str() {
            "ref" => PreferenceReference::KlReference,
            "old" => PreferenceReference::Old,
            other => return Err(format!("an unknown reference, `{other}`").into()),
        };
        let clip = match entry.clip_dsm {
            true => ClipRange::symmetric(entry.clip_range)?,
            false => ClipRange { low: 1.0, high: f64::INFINITY },
        };
        let dgpo = Dgpo { scale: entry.beta, group_size: entry.group_size, clip };
        let times = wide(&inputs, &input("t"))?;
        let groups: Vec<usize> =
            inputs[&input("group")].as_slice::<i64>()?.iter().map(|group| *group as usize).collect();
        let advantages = wide(&inputs, &input("advantages"))?;
        let advantages: Vec<f64> = advantages.iter().map(|a| bounded(*a, entry.adv_clip_max)).collect();
        let count = times.len();
        let read = |name: &str, i: usize| row(&inputs, &input(name), i, count);
        let noised = |i: usize| -> Outcome<Noised<'_>> {
            let (data, noise, velocity) = (read("x0", i)?, read("noise", i)?, read("velocity", i)?);
            Ok(Noised {
                data,
                noise,
                t: times[i],
                velocity,
                old: read("velocity_old", i)?,
                mask: LossMask::all(data.len()),
            })
        };
        let noised = (0..count).map(noised).collect::<Outcome<Vec<_>>>()?;

        let (mut own, mut others) = (Vec::new(), Vec::new());
        let mut sums = vec![0.0; exact.report.get(&output("group_sum"))?.len()];
        for (i, at) in noised.iter().enumerate() {
            let other = match reference {
                PreferenceReference::KlReference => read("velocity_ref", i)?,
                PreferenceReference::Old => at.old,
            };
            let distances = [at.velocity, other].map(|velocity| at.matching(velocity));
            sums[groups[i]] += dgpo.part(advantages[i], distances);
            own.push(distances[0]);
            others.push(distances[1]);
        }
        let weights: Vec<f64> = sums.iter().map(|sum| group_weight(*sum)).collect();

        let (mut loss, mut kl, mut clipped, mut gradient) = (0.0, 0.0, Vec::new(), Vec::new());
        for (i, at) in noised.iter().enumerate() {
            let term = dgpo.at(weights[groups[i]], advantages[i], at);
            let base = read("velocity_ref", i)?;
            loss += term.loss.value / count as f64;
            kl += distance::squared(at.velocity, base, at.mask) / count as f64;
            clipped.push(f64::from(u8::from(term.is_clipped)));
            let mut slopes = term.loss.gradient;
            distance::add_squared_gradient(&mut slopes, entry.kl_beta, at.velocity, base, at.mask);
            gradient.extend(slopes.into_iter().map(|d| d / count as f64));
        }
        exact.compare(&output("dsm"), &own)?;
        exact.compare(&output("dsm_reference"), &others)?;
        exact.compare(&output("group_sum"), &sums)?;
        exact.compare(&output("group_weight"), &weights)?;
        exact.compare(&output("dgpo_loss"), &[loss])?;
        exact.compare(&output("kl"), &[kl])?;
        exact.compare(&output("loss"), &[loss + entry.kl_beta * kl])?;
        match entry.clip_kl {
            true => exact.report.leave_out(&output("grad_velocity"), "roll clips no KL"),
            false => exact.compare(&output("grad_velocity"), &gradient)?,
        }
        match entry.clip_dsm || !entry.clip_kl {
            true => exact.compare(&output("clipped"), &clipped)?,
            false => exact.report.leave_out(&output("clipped"), "roll clips no KL"),
        }
    }
    for name in ["even", "uneven", "short", "same", "single", "wide"] {
        exact.report.leave_out(&format!("{name}.xt"), "that of diffusion_nft_loss");
    }
    Ok(exact.report)
}
