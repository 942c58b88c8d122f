//! AdamW on 100 million parameters, beside the bandwidth of this machine's memory and PyTorch's fused AdamW.
//!
//!     cargo run --release --bin adamw
//!     PYTHON=python-with-torch cargo run --release --bin adamw
//!
//! An update reads parameters, gradients and both moments and writes all but the gradients: 28 bytes a parameter. The
//! limit is the time in which this machine copies half of that (a copy moves each byte twice). All take turns in one
//! run, on the same number of threads; medians are shown.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Instant;

use rayon::prelude::*;
use roll_backends::optimizer::{AdamW, Moments};
use roll_core::OptimizerConfig;

type Failure = Box<dyn std::error::Error>;

const PARAMETERS: usize = 100_000_000;
const BYTES: usize = 28 * PARAMETERS;

const TORCH: &str = r#"
import sys, time, torch
n, threads = int(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(threads)
p = torch.nn.Parameter(torch.linspace(-1, 1, n))
p.grad = torch.linspace(1, -1, n)
optimizer = torch.optim.AdamW([p], lr=1e-3, weight_decay=0.01, fused=True)
optimizer.step()
print(torch.__version__, flush=True)
for _ in sys.stdin:
    start = time.perf_counter()
    optimizer.step()
    print(time.perf_counter() - start, flush=True)
"#;

fn main() -> Result<(), Failure> {
    let rounds: usize = std::env::var("ROLL_BENCH_ROUNDS").ok().and_then(|r| r.parse().ok()).unwrap_or(7);
    let ramp = |from: f32, to: f32| -> Vec<f32> {
        (0..PARAMETERS).into_par_iter().map(|i| from + (to - from) * i as f32 / PARAMETERS as f32).collect()
    };
    let (mut parameters, gradients) = (ramp(-1.0, 1.0), ramp(1.0, -1.0));
    let mut moments = Moments::zeros(PARAMETERS);
    let config = OptimizerConfig { weight_decay: 0.01, ..OptimizerConfig::default() };
    let optimizer = AdamW::new(&config);
    // Touches every page.
    optimizer.update(&mut parameters, &gradients, &mut moments, 1e-3);

    let source = vec![1u8; BYTES / 2];
    let mut target = vec![2u8; BYTES / 2];
    let block = (BYTES / 2).div_ceil(rayon::current_num_threads());
    let mut copy =
        || target.par_chunks_mut(block).zip(source.par_chunks(block)).for_each(|(t, s)| t.copy_from_slice(s));

    let mut torch = match std::env::var_os("PYTHON") {
        Some(python) => Some(Torch::start(Command::new(python))?),
        None => None,
    };
    let (mut limit, mut ours, mut theirs) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        limit.push(seconds(&mut copy));
        ours.push(seconds(&mut || optimizer.update(&mut parameters, &gradients, &mut moments, 1e-3)));
        if let Some(torch) = &mut torch {
            theirs.push(torch.step()?);
        }
    }
    let [limit, ours] = [median(&mut limit), median(&mut ours)];
    println!("{PARAMETERS} parameters, {} threads, median of {rounds}", rayon::current_num_threads());
    println!("copy of as many bytes  {limit:.4} s  ({:.1} GB/s)", BYTES as f64 / limit / 1e9);
    println!("AdamW                  {ours:.4} s  {:.2} of the limit", ours / limit);
    if let Some(torch) = torch {
        let theirs = median(&mut theirs);
        println!("PyTorch {:<14} {theirs:.4} s  ours takes {:.2} of it", torch.version, ours / theirs);
    }
    Ok(())
}

fn seconds(work: &mut impl FnMut()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

struct Torch {
    child: std::process::Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
    version: String,
}

impl Torch {
    fn start(mut python: Command) -> Result<Self, Failure> {
        let threads = rayon::current_num_threads().to_string();
        python.args(["-c", TORCH, &PARAMETERS.to_string(), &threads]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = python.spawn()?;
        let mut lines = BufReader::new(child.stdout.take().ok_or("no output")?).lines();
        let version = lines.next().ok_or("PyTorch did not start")??;
        Ok(Self { child, lines, version })
    }

    fn step(&mut self) -> Result<f64, Failure> {
        writeln!(self.child.stdin.as_mut().ok_or("no input")?, "step")?;
        Ok(self.lines.next().ok_or("PyTorch ended")??.parse()?)
    }
}

impl Drop for Torch {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}
