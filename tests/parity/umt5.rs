//! The text encoder under both namings, with padding kept and masked as the reference does.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use roll_core::{DType, Tensor};
use roll_network::weights::Checkpoint;
use roll_wan::components::{Component, recognise};
use roll_wan::umt5::{Umt5, head_bias, relative_bucket};

use crate::case::{Case, Outcome, Report};

pub fn run(case: &Case) -> Outcome<Report> {
    let mut report = case.expected("outputs.safetensors")?;
    let inputs = case.tensors("inputs.safetensors")?;
    let (ids, mask) = (rows(&inputs["ids"])?, rows(&inputs["mask"])?);
    let length = ids[0].len();
    let device = case.device();

    let (component, official) = recognise(Checkpoint::open(case.dir.join("weights.safetensors"))?)?;
    report.check(component == Component::TextEncoder, || format!("recognised as {component}"));
    let seen: Arc<Mutex<BTreeMap<String, Vec<Tensor>>>> = Arc::default();
    let sink = seen.clone();
    let resident = Umt5::new(&official.all()?, device)?.with_probe(Arc::new(move |name, value| {
        if let Ok(value) = roll_backends::to_host(value.clone()) {
            sink.lock().unwrap_or_else(PoisonError::into_inner).entry(name.into()).or_default().push(value);
        }
    }));
    let keys: Vec<Vec<usize>> = mask.iter().map(|row| (0..length).filter(|&i| row[i] != 0).collect()).collect();
    let encoded: Vec<Tensor> =
        ids.iter().zip(&keys).map(|(ids, keys)| resident.hidden(ids, keys)).collect::<Result<_, _>>()?;
    report.compare("encoded", &stack(&encoded)?);
    let seen = seen.lock().unwrap_or_else(PoisonError::into_inner).clone();
    report.compare("block0_attn_out", &stack(&seen["blocks.0.attn"])?);
    report.compare("block0_out", &stack(&seen["blocks.0"])?);

    // As the pipeline does: each row on its own, without its padding, then zeros.
    let prompts: Vec<Tensor> = ids
        .iter()
        .zip(&keys)
        .map(|(ids, keys)| {
            let valid: Vec<u32> = keys.iter().map(|&i| ids[i]).collect();
            resident.encode(&valid, length)
        })
        .collect::<Result<_, _>>()?;
    report.compare("prompt_embedding_padded_rows_zeroed", &stack(&prompts)?);

    let (_, translated) = recognise(Checkpoint::open(case.dir.join("weights_hf.safetensors"))?)?;
    let streamed = Umt5::streamed(&translated, device)?;
    let encoded: Vec<Tensor> =
        ids.iter().zip(&keys).map(|(ids, keys)| streamed.hidden(ids, keys)).collect::<Result<_, _>>()?;
    report.compare("encoded_hf", &stack(&encoded)?);

    let config = resident.config();
    let table = official.tensor("blocks.0.pos_embedding.embedding.weight")?.to_f32_vec();
    let all: Vec<usize> = (0..length).collect();
    let bias = (0..config.heads).flat_map(|head| head_bias(&table, config, head, length, &all)).collect::<Vec<f32>>();
    report.compare("block0_pos_bias", &Tensor::new(bias, [1, config.heads, length, length])?);

    let distances: Vec<i64> = report.get("relative_position")?.as_slice::<i64>()?.to_vec();
    let probe = distances.len() as i64 / 2;
    report.compare("relative_position", &Tensor::new((-probe..=probe).collect::<Vec<i64>>(), [distances.len()])?);
    let buckets: Vec<i64> = distances.iter().map(|&d| relative_bucket(d, config.buckets) as i64).collect();
    report.compare("relative_position_bucket", &Tensor::new(buckets, [distances.len()])?);
    Ok(report)
}

/// The rows of an integer matrix.
fn rows(tensor: &Tensor) -> Outcome<Vec<Vec<u32>>> {
    let width = *tensor.shape().last().ok_or("no axes")?;
    let values = tensor.as_slice::<i64>()?;
    Ok(values.chunks(width).map(|row| row.iter().map(|&v| v as u32).collect()).collect())
}

/// Joins tensors of one shape along a new first axis.
fn stack(tensors: &[Tensor]) -> Outcome<Tensor> {
    let first = tensors.first().ok_or("nothing was seen")?;
    assert!(tensors.iter().all(|t| t.dtype() == DType::F32));
    let values: Vec<f32> = tensors.iter().flat_map(Tensor::to_f32_vec).collect();
    Ok(Tensor::new(values, [&[tensors.len()], first.shape()].concat())?)
}
