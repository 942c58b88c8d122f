//! Speed beside PyTorch on the CPU: same shapes, same machine, same run, every backend of the build and PyTorch taking
//! turns.
//!
//!     cargo run --release --bin speed                          # roll alone
//!     PYTHON=path/to/python cargo run --release --bin speed    # beside PyTorch, which that Python must have
//!
//! Prints the median seconds of each and their ratio. `ROLL_BENCH_ROUNDS` sets the rounds (default 5); arguments choose
//! cases: `-- block reward_fl_step`.

use std::cell::RefCell;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

use burn::tensor::DType;
use roll_algos::reward_fl::Loss;
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

/// One thing to time: its name for the other side, and the work on each backend; the result is a number both sides must
/// agree on.
struct Case<'a> {
    name: String,
    shown: &'static str,
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
    let (settings, unusable) = case::Setting::all()?;
    unusable.iter().for_each(|(backend, reason)| println!("not measured: the backend `{backend}`: {reason}"));
    let settings: Vec<_> = settings.into_iter().filter(|setting| !setting.is_narrow()).collect();
    let fixtures = |setting: &case::Setting| -> Result<Fixtures, Failure> {
        let step = case::Case::on(&root.join("tests/fixtures/reward_fl_step"), setting.clone())?;
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
    let cases = vec![
        Case {
            name: "block_forward".into(),
            shown: "DiT block, forward (1536 wide, 1024 tokens, 512 text)",
            work: everywhere(|on| on.block.forward().map(|()| None)),
        },
        Case {
            name: "block_pull".into(),
            shown: "DiT block, forward and pull",
            work: everywhere(|on| on.block.pull().map(|()| None)),
        },
        // PyTorch has them in f32.
        Case {
            name: "block_forward".into(),
            shown: "DiT block, frozen weights in bf16, forward",
            work: everywhere(|on| on.block_narrow.forward().map(|()| None)),
        },
        Case {
            name: "block_pull".into(),
            shown: "DiT block, frozen weights in bf16, forward and pull",
            work: everywhere(|on| on.block_narrow.pull().map(|()| None)),
        },
        Case {
            name: format!("decode {}", fixtures[0].decode.path().display()),
            shown: "VAE decode and pull (17 frames of 128x128)",
            work: everywhere(|on| on.decode.run().map(Some)),
        },
        Case {
            name: "reward_fl_step".into(),
            shown: "whole Reward-FL step, tiny model",
            work: everywhere(|on| reward_fl_loss(&mut on.step.borrow_mut()).map(Some)),
        },
    ];
    let filters: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    println!("{:<54} {:<13} {:>8} {:>8} {:>6}", "median of rounds, seconds", "backend", "roll", "PyTorch", "ratio");
    for case in cases {
        if filters.is_empty() || filters.iter().any(|f| case.name.contains(f.as_str())) {
            time(case, &settings, rounds, torch.as_mut())?;
        }
    }
    Ok(())
}

/// The backends and PyTorch take turns.
fn time(mut case: Case, on: &[case::Setting], rounds: usize, mut torch: Option<&mut Torch>) -> Result<(), Failure> {
    for work in &mut case.work {
        work()?;
    }
    let (mut ours, mut theirs) = (vec![Vec::new(); on.len()], Vec::new());
    for _ in 0..rounds {
        let reply = torch.as_mut().map(|torch| torch.time(&case.name)).transpose()?;
        theirs.extend(reply.map(|(seconds, _)| seconds));
        for ((work, ours), setting) in case.work.iter_mut().zip(&mut ours).zip(on) {
            let start = Instant::now();
            let check = work()?;
            ours.push(start.elapsed().as_secs_f64());
            if let (Some(check), Some((_, expected))) = (check, reply) {
                let off = (check - expected).abs() / expected.abs().max(1e-12);
                if off > 1e-3 {
                    return Err(format!("{} on {setting}: {check} here, {expected} in PyTorch", case.shown).into());
                }
            }
        }
    }
    for (ours, setting) in ours.into_iter().zip(on) {
        let (ours, backend) = (median(ours), setting.backend);
        match theirs.is_empty() {
            true => println!("{:<54} {backend:<13} {ours:>8.3} {:>8} {:>6}", case.shown, "-", "-"),
            false => {
                let theirs = median(theirs.clone());
                println!("{:<54} {backend:<13} {ours:>8.3} {theirs:>8.3} {:>6.2}", case.shown, ours / theirs);
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

/// PyTorch in a process of its own, with an order on each line.
struct Torch {
    child: Child,
    tell: ChildStdin,
    hear: BufReader<ChildStdout>,
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
        let tell = child.stdin.take().ok_or("no stdin")?;
        let hear = BufReader::new(child.stdout.take().ok_or("no stdout")?);
        Ok(Some(Self { child, tell, hear }))
    }

    fn time(&mut self, case: &str) -> Result<(f64, f64), Failure> {
        writeln!(self.tell, "{case}")?;
        self.tell.flush()?;
        let mut line = String::new();
        self.hear.read_line(&mut line)?;
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
