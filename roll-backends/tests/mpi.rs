//! Tests of ranks over MPI. The test binary starts itself under `mpirun`, so `cargo test --features mpi` suffices.

mod flat_model;

use std::io::Write;
use std::process::{Command, ExitCode, Output};
use std::sync::Arc;
use std::time::{Duration, Instant};

use roll_backends::mpi::{MpiRanks, is_launched};
use roll_backends::strategy::{Zero, ZeroOptions};
use roll_core::{Communicator, Error, OptimizerConfig, Rank, Result, Strategy, ThreadRanks};

use flat_model::FlatModel;

const RANKS: usize = 4;
/// Environment variable with the task of a child process.
const MODE: &str = "ROLL_MPI_TEST";
/// Timeout: longer than any shutdown should take, shorter than a hang.
const SECONDS: u64 = 60;

/// Name, mode, whether the job succeeds, and what its output must contain.
const TESTS: [(&str, &str, bool, &[&str]); 7] = [
    ("every_collective_gives_what_threads_give", "collectives", true, &[]),
    ("zero_gives_the_bits_that_it_gives_on_threads", "zero", true, &[]),
    (
        "an_error_of_one_rank_ends_all_with_its_reason",
        "error",
        false,
        &[
            "rank 2: the disk is full",
            "rank 0: rank 2 failed: the disk is full",
            "rank 3: rank 2 failed: the disk is full",
        ],
    ),
    (
        "a_panic_of_one_rank_ends_all_with_its_message",
        "panic",
        false,
        &["rank 2: panicked: index out of range", "rank 1: rank 2 failed: panicked: index out of range"],
    ),
    (
        "an_error_while_gradients_are_on_their_way_ends_the_job_although_the_others_do_not_come",
        "pulling",
        false,
        &["rank 2: the disk is full"],
    ),
    ("a_killed_rank_ends_the_job", "kill", false, &["signal 9"]),
    ("a_rank_that_hangs_is_named_and_ends_the_job", "hang", false, &["rank 2 did not come to"]),
];

fn main() -> ExitCode {
    if is_launched() {
        return child(&std::env::var(MODE).unwrap_or_default());
    }
    let filter: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let mut failed = 0;
    for (name, mode, succeeds, says) in TESTS {
        if !filter.is_empty() && !filter.iter().any(|f| name.contains(f.as_str())) {
            continue;
        }
        let began = Instant::now();
        let problem = match mpirun(mode) {
            Err(e) => Some(format!("mpirun cannot be started ({e}): install an MPI, `apt-get install openmpi-bin`")),
            Ok(output) => judge(&output, succeeds, says, began.elapsed()),
        };
        println!("test {name} ... {}", if problem.is_none() { "ok" } else { "FAILED" });
        if let Some(problem) = problem {
            println!("{problem}");
            failed += 1;
        }
    }
    println!("\ntest result: {} failed", failed);
    ExitCode::from(u8::from(failed > 0))
}

fn mpirun(mode: &str) -> std::io::Result<Output> {
    Command::new("mpirun")
        .args(["-n", &RANKS.to_string(), "--oversubscribe"])
        .arg(std::env::current_exe()?)
        .env(MODE, mode)
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .output()
}

fn judge(output: &Output, succeeds: bool, says: &[&str], took: Duration) -> Option<String> {
    let said = [&output.stdout[..], &output.stderr[..]].concat();
    let said = String::from_utf8_lossy(&said);
    let missing: Vec<_> = says.iter().filter(|s| !said.contains(**s)).collect();
    let right = output.status.success() == succeeds && missing.is_empty() && took < Duration::from_secs(SECONDS);
    (!right).then(|| format!("{:?} after {took:.1?}, does not say {missing:?}:\n{said}", output.status))
}

fn child(mode: &str) -> ExitCode {
    let ranks = match MpiRanks::join() {
        Ok(ranks) => ranks,
        Err(e) => {
            eprintln!("{e}");
            return ExitCode::FAILURE;
        }
    };
    let work = || match mode {
        "collectives" => collectives(ranks.as_ref()),
        "zero" => zero(ranks.clone()),
        _ => broken(ranks.clone(), mode),
    };
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let said = panic.downcast_ref::<&str>().map(|s| s.to_string());
        let said = said.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        Err(Error::Misuse(format!("panicked: {said}")))
    });
    match result.and_then(|()| ranks.finish()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            ranks.fail(&error.chain());
            // A single write, so that lines of several processes are not interleaved.
            let line = format!("rank {}: {}\n", ranks.rank().0, error.chain());
            let _ = std::io::stderr().write_all(line.as_bytes());
            ranks.abort(1)
        }
    }
}

/// Runs every collective with sizes around the segment limits, and compares with ranks as threads.
fn collectives(ranks: &dyn Communicator) -> Result<()> {
    for n in [0, 1, 5, 4096, 4097, (1 << 20) + 1] {
        let ours = all_kinds(ranks, n)?;
        let theirs = ThreadRanks::run(RANKS, Duration::from_secs(60), |threads| all_kinds(threads.as_ref(), n));
        let theirs = theirs.into_iter().nth(ranks.rank().0).unwrap_or_else(|| Ok(Vec::new()))?;
        assert!(ours == theirs, "{n} values");
    }
    let n = (1 << 22) + 3;
    let mut large = vec![ranks.rank().0 as f32; n];
    ranks.all_reduce(&mut large)?;
    assert!(large == vec![6.0; n]);
    let own = vec![ranks.rank().0 as u8; ranks.rank().0 * 3];
    assert_eq!(ranks.all_gather_bytes(&own)?, [vec![], vec![1; 3], vec![2; 6], vec![3; 9]]);
    Ok(())
}

/// The bits of every collective's result.
fn all_kinds(ranks: &dyn Communicator, n: usize) -> Result<Vec<u32>> {
    let rank = ranks.rank().0;
    let values = |n: usize| -> Vec<f32> { (0..n).map(|i| 1.0 / ((i * 4 + rank) % 1009 + 1) as f32).collect() };
    let mut reduced = values(n);
    ranks.all_reduce(&mut reduced)?;
    let mut part = vec![0.0; n];
    ranks.reduce_scatter(&values(n * RANKS), &mut part)?;
    let mut gathered = vec![0.0; n * RANKS];
    ranks.all_gather(&values(n), &mut gathered)?;
    let mut told = values(n);
    ranks.broadcast(&mut told, Rank(2))?;
    ranks.barrier()?;
    Ok([reduced, part, gathered, told].concat().into_iter().map(f32::to_bits).collect())
}

fn zero(ranks: Arc<MpiRanks>) -> Result<()> {
    for stage in 0..=3 {
        let ours = train(ranks.clone(), stage, 10, 60, |_| Ok(()))?;
        let alike = |threads| train(threads, stage, 10, 60, |_| Ok(()));
        let theirs = ThreadRanks::run(RANKS, Duration::from_secs(60), alike);
        for theirs in theirs {
            assert!(ours == theirs?, "stage {stage}");
        }
    }
    Ok(())
}

/// Rank 2 fails in step 3.
fn broken(ranks: Arc<MpiRanks>, mode: &str) -> Result<()> {
    let rank = ranks.rank().0;
    let at = |step: u64| match (rank == 2 && step == 3, mode) {
        (true, "error") => Err(Error::Misuse("the disk is full".into())),
        (true, "panic") => panic!("index out of range"),
        (true, "kill") => {
            let _ = Command::new("kill").args(["-9", &std::process::id().to_string()]).status();
            std::thread::sleep(Duration::from_secs(600));
            Ok(())
        }
        (false, "pulling") if step == 3 => {
            std::thread::sleep(Duration::from_secs(600));
            Ok(())
        }
        (true, "hang") => {
            std::thread::sleep(Duration::from_secs(600));
            Ok(())
        }
        _ => Ok(()),
    };
    train(ranks, 2, 1000, if mode == "hang" { 3 } else { 60 }, at).map(drop)
}

/// Runs some steps of ZeRO on a small model; returns the bits of its parameters.
fn train(
    ranks: Arc<dyn Communicator>,
    stage: u8,
    steps: u64,
    timeout_seconds: u64,
    at: impl Fn(u64) -> Result<()>,
) -> Result<Vec<u32>> {
    let rank = ranks.rank().0;
    let options = ZeroOptions { stage, reduce_bucket_size: 100, timeout_seconds, ..ZeroOptions::default() };
    let mut strategy = Zero::new(options, ranks)?;
    let mut model = FlatModel::springs();
    strategy.attach(&mut model, &OptimizerConfig::default())?;
    for step in 0..steps {
        at(step)?;
        strategy.discard();
        if rank == 2 && step == 3 && std::env::var(MODE).as_deref() == Ok("pulling") {
            strategy.before_last_pull(&mut model)?;
            model.pull(step, rank);
            // The thread waits for the other ranks by then.
            std::thread::sleep(Duration::from_millis(300));
            return Err(Error::Misuse("the disk is full".into()));
        }
        // Rank 1 has no samples in some steps.
        if rank != 1 || step % 3 != 0 {
            strategy.before_last_pull(&mut model)?;
            model.pull(step, rank);
            strategy.accumulate(&mut model)?;
        }
        strategy.step(&mut model, 0.01, 0.25)?;
    }
    Ok(model.values.iter().map(|v| v.to_bits()).collect())
}
