//! The average of LoRA factors over updates, and the weight with the averaged LoRA merged into it.

use roll_core::{Tensor, flat};
use roll_network::lora::{Layer, Lora, merged_on_read};
use roll_network::weights::{Checkpoint, save_safetensors};
use roll_train::trainer::average_decay;
use serde::Deserialize;

use crate::case::{Case, Outcome, Report};

#[derive(Deserialize)]
struct Config {
    alpha: f64,
    updates: u64,
    most: f64,
}

pub fn run(case: &Case) -> Outcome<Report> {
    let config: Config = case.config()?;
    let mut report = case.expected("outputs.safetensors")?;
    let inputs = Checkpoint::open(case.dir.join("inputs.safetensors"))?;
    let decays: Vec<f64> = (1..=config.updates).map(|n| average_decay(n, config.most)).collect();
    let mut averaged = Vec::new();
    for name in ["A", "B"] {
        let factors = inputs.tensor(name)?.unstack()?;
        let mut average = factors[0].to_f32_vec();
        for (current, d) in factors[1..].iter().zip(&decays) {
            flat::blend(&mut average, current.f32s()?, *d);
        }
        let average = Tensor::new(average, factors[0].shape())?;
        report.compare(name, &average);
        averaged.push(average);
    }
    report.compare("decay", &Tensor::new(decays.iter().map(|d| *d as f32).collect::<Vec<_>>(), [decays.len()])?);
    let merged = |down: &Tensor, up: &Tensor| -> Outcome<Tensor> {
        let layer = Layer { down: down.clone(), up: up.clone(), alpha: Some(config.alpha), bias: None };
        let lora = Lora { layers: [("w".to_string(), layer)].into(), ..Lora::default() };
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("base.safetensors");
        save_safetensors(&path, &[("w.weight".to_string(), inputs.tensor("W")?)].into(), &Default::default())?;
        let base = merged_on_read(Checkpoint::open(path)?, &[(lora, 1.0, "average".into())])?;
        Ok(base.tensor("w.weight")?)
    };
    let last =
        |name: &str| -> Outcome<Tensor> { inputs.tensor(name)?.unstack()?.pop().ok_or_else(|| "no updates".into()) };
    let (of_average, of_last) = (merged(&averaged[0], &averaged[1])?, merged(&last("A")?, &last("B")?)?);
    report.compare("merged", &of_average);
    report.compare("merged_of_last", &of_last);
    report.leave_out("product_average", "a LoRA file holds factors: what is evaluated is their average");
    Ok(report)
}
