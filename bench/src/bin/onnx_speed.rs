//! Times this project's ONNX executor, forward and with gradient, and compares it with ONNX Runtime: forward time, and
//! the difference of the outputs.
//!
//! ```text
//! eval "$(scripts/setup-onnxruntime)"
//! RAYON_NUM_THREADS=2 cargo run --release --features onnxruntime --bin onnx_speed -- FILE.onnx...
//! ```
//!
//! Both compute on the CPU with the same number of threads; without ONNX Runtime in the build its columns are empty.
//! Each round runs everything once, and the median over the rounds is reported (`ROUNDS`, default 21). Inputs are
//! random. Free axes are 1 (axis 0) and 64 (other axes), or `ITEMS` and `SIDE`. Texts are the token 1.

use std::path::{Path, PathBuf};
use std::time::Instant;

use roll_backends::host::to_device_nd;
use roll_core::{DType, Result, Tensor};
use roll_onnx::runtime::Session;
use roll_onnx::{Model, OnnxError, Port};

fn main() -> Result<()> {
    let files: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let titles = ["ours, s", "theirs, s", "ours/theirs", "gradient, s"];
    print!("{:<28} {:<18} {:>12}", "file", "input", "difference");
    println!("{}", titles.map(|title| format!(" {title:>12}")).concat());
    for path in files {
        compare(&path)?;
    }
    Ok(())
}

fn compare(path: &Path) -> Result<()> {
    let ours = Model::open(path, &roll_backends::device("flex")?)?;
    let theirs = match Session::open(path) {
        Ok(session) => Some(session),
        Err(OnnxError::NoRuntime) => None,
        Err(error) => return Err(error.into()),
    };
    let inputs: Vec<Tensor> = ours.inputs().iter().map(sample).collect::<Result<_>>()?;
    let differentiable = matches!(ours.inputs(), [Port { dtype: DType::F32, .. }]);
    // Weights are packed and memory is allocated during the first run.
    let our_outputs = ours.run_all(&inputs)?;
    let their_outputs = theirs.as_ref().map(|theirs| theirs.run(&inputs)).transpose()?;
    if differentiable {
        with_gradient(&ours, &inputs[0])?;
    }
    let mut seconds: [Vec<f64>; 3] = Default::default();
    for _ in 0..setting("ROUNDS", 21) {
        seconds[0].push(timed(|| ours.run_all(&inputs).map(drop))?);
        if let Some(theirs) = &theirs {
            seconds[1].push(timed(|| theirs.run(&inputs).map(drop))?);
        }
        if differentiable {
            seconds[2].push(timed(|| with_gradient(&ours, &inputs[0]))?);
        }
    }
    let [ours, theirs, gradient] = seconds.map(median);
    let worst = their_outputs
        .map(|their_outputs| our_outputs.iter().zip(&their_outputs).map(|(a, b)| difference(a, b)).fold(0.0, f32::max));
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let shape = format!("{:?}", inputs[0].shape()).replace(' ', "");
    let worst = worst.map_or("-".to_owned(), |worst| format!("{worst:.1e}"));
    let column = |seconds: Option<f64>, digits: usize| seconds.map_or("-".to_owned(), |s| format!("{s:.digits$}"));
    let ratio = ours.zip(theirs).map(|(ours, theirs)| ours / theirs);
    let columns = [column(ours, 5), column(theirs, 5), column(ratio, 2), column(gradient, 5)];
    println!("{name:<28} {shape:<18} {worst:>12}{}", columns.map(|c| format!(" {c:>12}")).concat());
    Ok(())
}

/// Computes the first output, and the gradient of its sum.
fn with_gradient(model: &Model, input: &Tensor) -> Result<()> {
    let (value, recorded) = model.vjp(&to_device_nd(input, model.device())?)?;
    recorded.pull(to_device_nd(&Tensor::full(value.shape(), 1.0), model.device())?).map(drop)
}

fn timed(run: impl FnOnce() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    run()?;
    Ok(start.elapsed().as_secs_f64())
}

fn median(mut seconds: Vec<f64>) -> Option<f64> {
    seconds.sort_by(f64::total_cmp);
    seconds.get(seconds.len() / 2).copied()
}

/// Reads a number from an environment variable.
fn setting(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

fn sample(port: &Port) -> Result<Tensor> {
    let free = |axis| if axis == 0 { setting("ITEMS", 1) } else { setting("SIDE", 64) };
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

/// The largest difference, relative to the largest value (but at least 0.02).
fn difference(ours: &Tensor, theirs: &Tensor) -> f32 {
    let (ours, theirs) = (ours.to_f32_vec(), theirs.to_f32_vec());
    let largest = theirs.iter().fold(2e-2f32, |m, v| m.max(v.abs()));
    ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs() / largest).fold(0.0, f32::max)
}
