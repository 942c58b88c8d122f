//! Tables of noise levels, and Euler trajectories through them. A tensor's name describes its contents.

use roll_core::Tensor;
use roll_video::FlowSchedule;
use serde::Deserialize;

use crate::case::{Case, Outcome, Report};

#[derive(Deserialize)]
struct Config {
    trajectory: Trajectory,
}

#[derive(Deserialize)]
struct Trajectory {
    steps: usize,
    shift: f64,
}

pub fn run(case: &Case) -> Outcome<Report> {
    let config: Config = case.config()?;
    let inputs = case.tensors("inputs.safetensors")?;
    let mut report = case.expected("outputs.safetensors")?;
    for name in report.names() {
        let (head, quantity) = name.rsplit_once('.').ok_or("a name without a dot")?;
        if head == "trajectory" {
            let Trajectory { steps, shift } = config.trajectory;
            let schedule = match quantity {
                "euler" | "flowmatch" => FlowSchedule::new(steps, shift)?,
                other => return Err(format!("a trajectory of an unknown sampler, `{other}`").into()),
            };
            report.compare(&name, &trajectory(&schedule, &inputs["x0"], &inputs["A"], &inputs["b"])?);
            continue;
        }
        if head.contains(".strength") {
            report.leave_out(&name, "no schedule begins at partly noised data");
            continue;
        }
        let table = Table::parse(head).ok_or_else(|| format!("{name}: not the name of a table"))?;
        let schedule = table.schedule()?;
        // Euler's tables hold the final 0, the others only where their steps' tensor does.
        let rows = report.get(&name)?.len();
        let vector = |values: &[f32]| Tensor::new(values[..rows.min(values.len())].to_vec(), [rows]);
        let actual = match quantity {
            "sigmas" => vector(schedule.sigmas())?,
            "timesteps" => vector(schedule.timesteps())?,
            "weights" => vector(&schedule.training_weights())?,
            "denoising_steps" => Tensor::new(table.listed(), [rows])?,
            "uses_low_noise" => {
                let boundary = table.boundary.ok_or("no boundary in the name")?;
                let low = (0..rows).map(|i| u8::from(schedule.timestep(i).uses_low_noise(boundary)));
                Tensor::new(low.collect::<Vec<u8>>(), [rows])?
            }
            other => return Err(format!("{name}: unknown quantity `{other}`").into()),
        };
        report.compare(&name, &actual);
    }
    Ok(report)
}

/// A name, read: `[boundaryB.]KIND.shiftS[.stepsN]`; steps may be part of the kind (`distill4`).
struct Table<'a> {
    kind: &'a str,
    shift: f64,
    steps: usize,
    boundary: Option<f64>,
}

impl<'a> Table<'a> {
    fn parse(name: &'a str) -> Option<Self> {
        let (boundary, rest) = match name.strip_prefix("boundary") {
            // The number may have a dot of its own.
            Some(rest) => {
                let at = rest.find(|c: char| c.is_alphabetic())?;
                (Some(rest[..at - 1].parse().ok()?), &rest[at..])
            }
            None => (None, name),
        };
        let (kind, settings) = rest.split_once(".shift")?;
        let (shift, steps) = match settings.split_once(".steps") {
            Some((shift, steps)) => (shift, steps.parse().ok()?),
            None => (settings, kind[kind.find(|c: char| c.is_ascii_digit())?..].parse().ok()?),
        };
        let kind = kind.trim_end_matches(|c: char| c.is_ascii_digit());
        Some(Self { kind, shift: shift.parse().ok()?, steps, boundary })
    }

    fn schedule(&self) -> Outcome<FlowSchedule> {
        Ok(match self.kind {
            "euler" | "flowmatch" | "flowmatch.training" => FlowSchedule::new(self.steps, self.shift)?,
            "distill" => {
                let listed: Vec<u32> = self.listed().iter().map(|&t| t as u32).collect();
                FlowSchedule::from_timesteps(&listed, self.shift)?
            }
            other => return Err(format!("a table of an unknown sampler, `{other}`").into()),
        })
    }

    /// Evenly spaced timesteps from 1000, as distilled models list them.
    fn listed(&self) -> Vec<i64> {
        (0..self.steps).map(|i| 1000 * (self.steps - i) as i64 / self.steps as i64).collect()
    }
}

/// All states of Euler steps under `v = tanh(x A) + b t / 1000`.
fn trajectory(schedule: &FlowSchedule, x0: &Tensor, a: &Tensor, b: &Tensor) -> Outcome<Tensor> {
    let (rows, dim) = (x0.shape()[0], x0.shape()[1]);
    let (a, b) = (a.f32s()?, b.f32s()?);
    let mut x = x0.to_f32_vec();
    let mut states = x.clone();
    for i in 0..schedule.steps() {
        let t = schedule.timesteps()[i];
        let velocity = |k: usize| {
            let (row, column) = (k / dim, k % dim);
            let product: f32 = (0..dim).map(|j| x[row * dim + j] * a[j * dim + column]).sum();
            product.tanh() + b[column] * t / 1000.0
        };
        x = (0..x.len()).map(|k| x[k] + schedule.delta(i) * velocity(k)).collect();
        states.extend(&x);
    }
    Ok(Tensor::new(states, [schedule.steps() + 1, rows, dim])?)
}
