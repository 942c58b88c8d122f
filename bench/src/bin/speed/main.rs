//! Speed compared with PyTorch on the CPU: same shapes, same machine, same run, every backend of the build and PyTorch
//! taking turns.
//!
//!     cargo run --release --bin speed                          # roll alone
//!     PYTHON=path/to/python cargo run --release --bin speed    # and PyTorch, which that Python must have
//!
//! Prints the median seconds of each and their ratio. `ROLL_BENCH_ROUNDS` sets the rounds (default 5); arguments choose
//! benchmarks: `-- block reward_fl_step`.

use std::cell::RefCell;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

use burn_tensor::DType;
use case::{Case, Setting};
use roll_video::reward_fl::Loss;
use roll_core::{Noise, Purpose, Tensor};

mod block;
#[path = "../../../../tests/parity/case.rs"]
#[allow(dead_code)]
mod case;
mod decode;
#[path = "../../../../tests/parity/dit.rs"]
#[allow(dead_code)]
mod dit;
#[path = "../../../../tests/parity/reward_fl_step.rs"]
#[allow(dead_code)]
mod reward_fl_step;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// A measured operation.
struct Benchmark<'a> {
    /// Its name in `torch_reference.py`.
    name: String,
    title: &'static str,
    /// The work on each backend. The result is a number on which roll and PyTorch must agree, or
    /// `None` if there is nothing to compare.
    work: Vec<Box<dyn FnMut() -> Result<Option<f64>, Failure> + 'a>>,
}

/// The operators to time on one backend.
struct Fixtures {
    block: block::Fixture,
    block_narrow: block::Fixture,
    decode: decode::Fixture,
    step: RefCell<reward_fl_step::Bench>,
}

fn main() -> Result<(), Failure> {
    let rounds = std::env::var("ROLL_BENCH_ROUNDS").ok().and_then(|r| r.parse().ok()).unwrap_or(5);
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut torch = Torch::start(&root)?;
    let scratch = tempfile::tempdir()?;
    let (settings, unusable) = Setting::all()?;
    unusable.iter().for_each(|(backend, reason)| println!("not measured: the backend `{backend}`: {reason}"));
    // Settings in bf16 are left out, because PyTorch runs in f32. `block_narrow` measures bf16 weights on the others.
    let settings: Vec<_> = settings.into_iter().filter(|setting| !setting.is_narrow()).collect();
    let fixtures = |setting: &Setting| -> Result<Fixtures, Failure> {
        let step = Case::on(&root.join("tests/fixtures/reward_fl_step"), setting.clone())?;
        Ok(Fixtures {
            block: block::Fixture::new(DType::F32, &setting.device)?,
            block_narrow: block::Fixture::new(DType::BF16, &setting.device)?,
            decode: decode::Fixture::new(&scratch.path().join("decode.safetensors"), &setting.device)?,
            step: RefCell::new(reward_fl_step::Bench::open(&step)?),
        })
    };
    let fixtures: Vec<Fixtures> = settings.iter().map(fixtures).collect::<Result<_, _>>()?;
    let everywhere = |f: fn(&Fixtures) -> Result<Option<f64>, Failure>| {
        fixtures.iter().map(|on| Box::new(move || f(on)) as Box<dyn FnMut() -> _>).collect()
    };
    let benchmarks = vec![
        Benchmark {
            name: "block_forward".into(),
            title: "DiT block, forward (1536 wide, 1024 tokens, 512 text)",
            work: everywhere(|on| on.block.forward().map(|()| None)),
        },
        Benchmark {
            name: "block_pull".into(),
            title: "DiT block, forward and pull",
            work: everywhere(|on| on.block.pull().map(|()| None)),
        },
        // PyTorch's weights are f32 in these two.
        Benchmark {
            name: "block_forward".into(),
            title: "DiT block, frozen weights in bf16, forward",
            work: everywhere(|on| on.block_narrow.forward().map(|()| None)),
        },
        Benchmark {
            name: "block_pull".into(),
            title: "DiT block, frozen weights in bf16, forward and pull",
            work: everywhere(|on| on.block_narrow.pull().map(|()| None)),
        },
        Benchmark {
            name: format!("decode {}", fixtures[0].decode.path().display()),
            title: "VAE decode and pull (17 frames of 128x128)",
            work: everywhere(|on| on.decode.run().map(Some)),
        },
        Benchmark {
            name: "reward_fl_step".into(),
            title: "whole Reward-FL step, tiny model",
            work: everywhere(|on| reward_fl_loss(&mut on.step.borrow_mut()).map(Some)),
        },
    ];
    let filters: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    println!("{:<54} {:<13} {:>8} {:>8} {:>6}", "median of rounds, seconds", "backend", "roll", "PyTorch", "ratio");
    for benchmark in benchmarks {
        if filters.is_empty() || filters.iter().any(|f| benchmark.name.contains(f.as_str())) {
            time(benchmark, &settings, rounds, torch.as_mut())?;
        }
    }
    Ok(())
}

/// Times a benchmark, the backends and PyTorch taking turns, and prints a line per backend.
fn time(
    mut benchmark: Benchmark,
    on: &[Setting],
    rounds: usize,
    mut torch: Option<&mut Torch>,
) -> Result<(), Failure> {
    for work in &mut benchmark.work {
        work()?;
    }
    let (mut ours, mut theirs) = (vec![Vec::new(); on.len()], Vec::new());
    for _ in 0..rounds {
        let reply = torch.as_mut().map(|torch| torch.time(&benchmark.name)).transpose()?;
        theirs.extend(reply.map(|(seconds, _)| seconds));
        for ((work, ours), setting) in benchmark.work.iter_mut().zip(&mut ours).zip(on) {
            let start = Instant::now();
            let check = work()?;
            ours.push(start.elapsed().as_secs_f64());
            if let (Some(check), Some((_, expected))) = (check, reply) {
                let relative_difference = (check - expected).abs() / expected.abs().max(1e-12);
                if relative_difference > 1e-3 {
                    return Err(format!("{} on {setting}: {check} here, {expected} in PyTorch", benchmark.title).into());
                }
            }
        }
    }
    for (ours, setting) in ours.into_iter().zip(on) {
        let (ours, backend) = (median(ours), setting.backend);
        match theirs.is_empty() {
            true => println!("{:<54} {backend:<13} {ours:>8.3} {:>8} {:>6}", benchmark.title, "-", "-"),
            false => {
                let theirs = median(theirs.clone());
                println!("{:<54} {backend:<13} {ours:>8.3} {theirs:>8.3} {:>6.2}", benchmark.title, ours / theirs);
            }
        }
    }
    Ok(())
}

fn reward_fl_loss(step: &mut reward_fl_step::Bench) -> Result<f64, Failure> {
    let options = step.options.clone();
    let mut loss = 0.0;
    step.step(|score, kl| {
        let at = Loss::at(score, kl, 1.0, &options);
        loss = at.value;
        (at.d_score, at.d_kl)
    })?;
    Ok(loss)
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

/// PyTorch in a process of its own. It reads the name of a case per line, and answers with one line of JSON.
struct Torch {
    child: Child,
    commands: ChildStdin,
    replies: BufReader<ChildStdout>,
}

impl Torch {
    fn start(root: &Path) -> Result<Option<Self>, Failure> {
        let Some(python) = std::env::var_os("PYTHON") else {
            println!("set PYTHON to a python that has torch and safetensors to measure beside PyTorch");
            return Ok(None);
        };
        let threads = std::thread::available_parallelism()?.to_string();
        let mut child = Command::new(python)
            .arg(root.join("bench/torch_reference.py"))
            .arg(threads)
            .arg(root.join("tests/fixtures"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let commands = child.stdin.take().ok_or("no stdin")?;
        let replies = BufReader::new(child.stdout.take().ok_or("no stdout")?);
        Ok(Some(Self { child, commands, replies }))
    }

    fn time(&mut self, case: &str) -> Result<(f64, f64), Failure> {
        writeln!(self.commands, "{case}")?;
        self.commands.flush()?;
        let mut line = String::new();
        self.replies.read_line(&mut line)?;
        let reply: serde_json::Value = serde_json::from_str(&line)?;
        Ok((reply["seconds"].as_f64().ok_or("no seconds")?, reply["check"].as_f64().ok_or("no check")?))
    }
}

impl Drop for Torch {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Seeded normal values.
fn normal(index: u64, shape: &[usize], scale: f32) -> Result<Tensor, Failure> {
    let values = Noise::new(0).normal(Purpose::Synthetic, 0, index, shape)?.to_f32_vec();
    Ok(Tensor::new(values.into_iter().map(|v| v * scale).collect(), shape)?)
}
