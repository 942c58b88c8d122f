//! This project's ONNX executor beside ONNX Runtime: how far apart their outputs are, and how long each takes.
//!
//! ```text
//! eval "$(scripts/setup-onnxruntime)"
//! RAYON_NUM_THREADS=2 cargo run --release -p roll-rewards --features onnxruntime --example onnx_speed -- FILE.onnx...
//! ```
//!
//! Both compute on the CPU with the same number of threads, without gradient; the best of several runs counts. Inputs
//! are noise; free axes are 1 along axis 0 and 64 elsewhere. Texts are the token 1.

use std::path::{Path, PathBuf};
use std::time::Instant;

use roll_core::{DType, Result, Tensor};
use roll_rewards::onnx::runtime::Session;
use roll_rewards::onnx::{Model, Port};

const RUNS: usize = 20;

fn main() -> Result<()> {
    let files: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    println!("{:<28} {:<18} {:>12} {:>10} {:>10}", "file", "input", "difference", "ours, s", "theirs, s");
    for path in files {
        compare(&path)?;
    }
    Ok(())
}

fn compare(path: &Path) -> Result<()> {
    let ours = Model::open(path, &roll_backends::device("flex")?)?;
    let theirs = Session::open(path)?;
    let inputs: Vec<Tensor> = ours.inputs().iter().map(sample).collect::<Result<_>>()?;
    let (our_outputs, our_seconds) = best(|| ours.run_all(&inputs))?;
    let (their_outputs, their_seconds) = best(|| theirs.run(&inputs))?;
    let worst = our_outputs.iter().zip(&their_outputs).map(|(a, b)| difference(a, b)).fold(0.0, f32::max);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let shape = format!("{:?}", inputs[0].shape()).replace(' ', "");
    println!("{name:<28} {shape:<18} {worst:>12.1e} {our_seconds:>10.4} {their_seconds:>10.4}");
    Ok(())
}

fn sample(port: &Port) -> Result<Tensor> {
    let free = |axis| if axis == 0 { 1 } else { 64 };
    let shape: Vec<usize> = port.shape.iter().enumerate().map(|(axis, d)| d.unwrap_or(free(axis))).collect();
    let count: usize = shape.iter().product();
    let mut state = 1u32;
    let mut noise = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    match port.dtype {
        DType::F32 => Tensor::new((0..count).map(|_| noise()).collect(), shape),
        DType::I64 => Tensor::new(vec![1i64; count], shape),
        DType::I32 => Tensor::new(vec![1i32; count], shape),
        other => Tensor::from_bytes(other, shape, std::sync::Arc::new(vec![1; count])),
    }
}

/// The outputs, and the seconds of the quickest run.
fn best(mut run: impl FnMut() -> Result<Vec<Tensor>>) -> Result<(Vec<Tensor>, f64)> {
    let mut outputs = run()?;
    let mut seconds = f64::INFINITY;
    for _ in 0..RUNS {
        let start = Instant::now();
        outputs = run()?;
        seconds = seconds.min(start.elapsed().as_secs_f64());
    }
    Ok((outputs, seconds))
}

/// The largest difference, as a part of the largest value, which counts as at least two hundredths.
fn difference(ours: &Tensor, theirs: &Tensor) -> f32 {
    let (ours, theirs) = (ours.to_f32_vec(), theirs.to_f32_vec());
    let largest = theirs.iter().fold(2e-2f32, |m, v| m.max(v.abs()));
    ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs() / largest).fold(0.0, f32::max)
}
