//! The text features of Z-Image: template, cut, states before the last block.

use roll_core::{DType, Tensor};
use roll_network::weights::Checkpoint;
use roll_z_image::text::{TextEncoder, read_config, templated};
use serde::Deserialize;

use crate::case::{Case, Outcome, Report};

#[derive(Deserialize)]
struct Template {
    prompt: String,
    text: String,
}

pub fn run(case: &Case) -> Outcome<Report> {
    let mut report = case.expected("outputs.safetensors")?;
    let templates: Vec<Template> = serde_json::from_slice(&std::fs::read(case.dir.join("template.json"))?)?;
    for Template { prompt, text } in templates {
        report.check(templated(&prompt) == text, || format!("the template of {prompt:?} is {:?}", templated(&prompt)));
    }
    let inputs = case.tensors("inputs.safetensors")?;
    let (ids, mask) = (&inputs["ids"], inputs["mask"].to_f32_vec());
    let &[rows, columns] = ids.shape() else { return Err("ids are not of rank two".into()) };
    let ids = integers(ids)?;
    let attended = |row: usize| (row * columns..(row + 1) * columns).filter(|i| mask[*i] != 0.0);
    let sequences: Vec<Vec<u32>> = (0..rows).map(|row| attended(row).map(|i| ids[i] as u32).collect()).collect();

    let weights = Checkpoint::open(case.dir.join("weights.safetensors"))?;
    let config = read_config(&case.dir.join("hf_config.json"))?;
    let encoder = TextEncoder::streamed(config, &weights, case.setting.dtype, case.device())?;
    for (row, features) in encoder.encode(&sequences)?.iter().enumerate() {
        report.compare(&format!("prompt_embeds.{row}"), features);
    }
    for name in ["second_to_last", "last_normed"] {
        report.leave_out(name, "rows of padding and states after the final norm are no features");
    }
    Ok(report)
}

fn integers(tensor: &Tensor) -> Outcome<Vec<i64>> {
    Ok(match tensor.dtype() {
        DType::I32 => tensor.to_f32_vec().into_iter().map(|v| v as i64).collect(),
        _ => tensor.as_slice::<i64>()?.to_vec(),
    })
}
