//! Times a reward in a Python program against the same function within one Python process: milliseconds for 81 frames
//! of 480x480, with gradient.
//!
//! ```text
//! cargo run --release --bin python_overhead -- [PYTHON]      # a Python with torch
//! ```
//!
//! Reports the best of several runs: wall time, and CPU seconds of both processes.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use roll_core::{Error, Grad, OnMissing, Result, RewardScorer, Target, Tensor, Video};
use roll_rewards::picture::Frames;
use roll_rewards::remote::RemoteReward;
use roll_rewards::remote::command::{CommandConfig, Program};

const RUNS: usize = 8;
const SHAPE: [usize; 4] = [81, 3, 480, 480];

const SCORE_SOURCE: &str = "
import sys, time
sys.path.insert(0, 'python/roll_reward/src')
import roll_reward
@roll_reward.differentiable
def score(frames):
    return -((frames - 0.2) ** 2).mean(), {}
";

/// Continues [`SCORE_SOURCE`].
const TIMING_SOURCE: &str = "
import torch
frames = torch.full((81, 3, 480, 480), 0.25)
best = [1e9, 1e9]
for _ in range(8):
    wall, cpu = time.perf_counter(), time.process_time()
    value, _ = score(frames.requires_grad_())
    torch.autograd.grad(value, frames)
    best = [min(best[0], time.perf_counter() - wall), min(best[1], time.process_time() - cpu)]
print(*best)";

fn main() -> Result<()> {
    let python = std::env::args().nth(1).unwrap_or("python3".into());
    let alone = Command::new(&python).args(["-c", &format!("{SCORE_SOURCE}{TIMING_SOURCE}")]).output();
    let alone = alone.map_err(Error::file("run", Path::new(&python)))?;
    let text = String::from_utf8_lossy(&alone.stdout).into_owned();
    let numbers: Vec<f64> = text.split_whitespace().filter_map(|n| n.parse().ok()).collect();
    let [wall, cpu] = numbers[..] else {
        return Err(Error::Misuse(format!(
            "{python} printed no times, but {}",
            String::from_utf8_lossy(&alone.stderr)
        )));
    };
    println!("{:<16} {:>10} {:>10}", "ms, best of 8", "wall", "CPU");
    println!("{:<16} {:>10.0} {:>10.0}", "one process", 1e3 * wall, 1e3 * cpu);
    for (name, shared_memory) in [("shared memory", true), ("pipe", false)] {
        let [w, c] = time_reward(&python, shared_memory)?;
        println!("{name:<16} {:>10.0} {:>10.0}   {:+.0} ms to one process", 1e3 * w, 1e3 * c, 1e3 * (w - wall));
    }
    Ok(())
}

/// Seconds of wall time and of both processes' CPU time for a score and its pullback.
fn time_reward(python: &str, shared_memory: bool) -> Result<[f64; 2]> {
    let command = vec![python.into(), "-c".into(), format!("{SCORE_SOURCE}\nroll_reward.serve(score)")];
    let config = CommandConfig { command, shared_memory, ..CommandConfig::default() };
    let mut reward = RemoteReward::new("command", Program::new(config, ".".into())?, Frames::All, OnMissing::Skip)?;
    let video = Video::new(Tensor::full(SHAPE, 0.25), 16.0)?;
    let mut best = [f64::INFINITY; 2];
    for _ in 0..RUNS {
        let (begun, used) = (Instant::now(), cpu_seconds());
        let (_, pullback) = reward.score(&video, "", &Target::default(), Grad::Record)?;
        let pullback = pullback.ok_or_else(|| Error::Misuse("the reward gave no gradient".into()))?;
        drop(pullback.pull(&Tensor::scalar(0.5))?);
        best = [best[0].min(begun.elapsed().as_secs_f64()), best[1].min(cpu_seconds() - used)];
    }
    Ok(best)
}

/// CPU seconds of this process and its running children on Linux; 0 on other systems.
fn cpu_seconds() -> f64 {
    let own = format!("/proc/{}", std::process::id());
    let children = std::fs::read_to_string(format!("{own}/task/{}/children", std::process::id())).unwrap_or_default();
    let all = children.split_whitespace().map(|child| format!("/proc/{child}")).chain([own]);
    all.map(|process| {
        let stat = std::fs::read_to_string(format!("{process}/stat")).unwrap_or_default();
        let after_name = stat.rsplit(')').next().unwrap_or_default().to_owned();
        let ticks = after_name.split_whitespace().skip(11).take(2).filter_map(|t| t.parse::<f64>().ok());
        // A tick is a hundredth of a second on every current Linux.
        ticks.sum::<f64>() / 100.0
    })
    .sum()
}
