//! Tests of ranks that are processes: over TCP, and over NCCL (a stand-in, `nccl_stand_in.c`). The test binary starts
//! itself once for each rank.

#![allow(clippy::unwrap_used)]

mod flat_model;

use std::fs::File;
use std::io::Write;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::{Duration, Instant};

use roll_backends::nccl::NcclRanks;
use roll_backends::strategy::{Zero, ZeroOptions};
use roll_backends::tcp::{Place, TcpRanks};
use roll_core::{Communicator, Error, OptimizerConfig, Rank, Result, Strategy, ThreadRanks};

use flat_model::FlatModel;

const RANKS: usize = 4;
/// Environment variables of a child process: its task, its rank, and the port of rank 0.
const MODE: &str = "ROLL_TEST_MODE";
const RANK: &str = "ROLL_TEST_RANK";
const PORT: &str = "ROLL_TEST_PORT";
/// Timeout: longer than any shutdown should take, shorter than a hang.
const SECONDS: u64 = 60;
/// How long processes go on after one failed, as launchers allow.
const GRACE: Duration = Duration::from_secs(8);

/// How the processes of a job reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transport {
    Tcp,
    Nccl,
}

const TRANSPORTS: [Transport; 2] = [Transport::Tcp, Transport::Nccl];

/// A job of processes that must end in a certain way.
struct Case {
    name: &'static str,
    mode: &'static str,
    succeeds: bool,
    /// What the output must contain.
    says: &'static [&'static str],
    /// Whether it is about the stand-in of NCCL, in which the mode happens.
    nccl: bool,
}

const REASONS: &[&str] =
    &["rank 2: the disk is full", "rank 0: rank 2 failed: the disk is full", "rank 3: rank 2 failed: the disk is full"];
const PANIC: &[&str] = &["rank 2: panicked: index out of range", "rank 1: rank 2 failed: panicked: index out of range"];
const KILLED: &[&str] = &["rank 0: rank 2 failed: its process ended", "rank 3: rank 2 failed: its process ended"];
const FIRST_KILLED: &[&str] = &["rank 1: rank 0 ended while the others wait for it", "rank 3: rank 0 ended"];
const HANGS: &[&str] = &["rank 2 did not come to"];
const FULL: &[&str] = &["rank 2: the disk is full"];

const CASES: [Case; 14] = [
    case("every_collective_gives_what_threads_give", "collectives", true, &[]),
    case("zero_gives_the_bits_that_it_gives_on_threads", "zero", true, &[]),
    case("an_error_of_one_rank_ends_all_with_its_reason", "error", false, REASONS),
    case("a_panic_of_one_rank_ends_all_with_its_message", "panic", false, PANIC),
    case(
        "an_error_while_gradients_are_on_their_way_ends_the_job_although_the_others_do_not_come",
        "pulling",
        false,
        FULL,
    ),
    case("a_killed_rank_ends_the_job_and_is_named", "kill", false, KILLED),
    case("a_killed_rank_0_ends_the_job_and_is_named", "kill-first", false, FIRST_KILLED),
    case("a_rank_that_hangs_is_named_and_ends_the_job", "hang", false, HANGS),
    nccl("a_start_that_hangs_ends_in_time_and_the_job_goes_on_over_tcp", "start-hangs", true, SLOW),
    nccl("ranks_with_one_gpu_are_told_so_and_the_job_goes_on_over_tcp", "one-gpu", true, ONE_GPU),
    nccl("a_rank_that_dies_while_nccl_starts_is_named", "start-dies", false, DEAD_START),
    nccl("a_rank_that_dies_in_a_collective_is_named_and_the_others_abort", "dies", false, DEAD),
    nccl("an_asynchronous_error_ends_all_ranks_with_its_text", "async-error", false, ASYNCHRONOUS),
    nccl("a_collective_that_hangs_is_aborted_after_the_timeout", "hangs", false, STUCK),
];

/// The rank whose time ends first names the cause, and the others may name that rank.
const SLOW: &[&str] = &[
    "over TCP: NCCL did not connect all ranks within 2 s",
    "rank 0: over TCP: ",
    "rank 1: over TCP: ",
    "rank 2: over TCP: ",
    "rank 3: over TCP: ",
    "stand-in: rank 0 aborts",
    "stand-in: rank 3 aborts",
];
const ONE_GPU: &[&str] = &[
    "rank 0: over TCP: ranks 0 and 1 use the same GPU (0000:01:00.0)",
    "rank 3: over TCP: ranks 0 and 1 use the same GPU",
];
/// The others may not have begun to start: then they have nothing to abort.
const DEAD_START: &[&str] = &["rank 2 failed: its process ended"];
const DEAD: &[&str] = &[
    "rank 0: rank 2 failed: its process ended",
    "rank 3: rank 2 failed: its process ended",
    "stand-in: rank 0 aborts",
    "stand-in: rank 1 aborts",
    "stand-in: rank 3 aborts",
];
const ASYNCHRONOUS: &[&str] = &[
    "rank 2: NCCL: `ncclCommGetAsyncError` returned 6",
    "rank 0: rank 2 failed: NCCL: `ncclCommGetAsyncError` returned 6",
    "stand-in: rank 0 aborts",
    "stand-in: rank 2 aborts",
];
const STUCK: &[&str] =
    &["another rank did not come to ncclAllReduce within 3 s", "stand-in: rank 0 aborts", "stand-in: rank 2 aborts"];

const fn case(name: &'static str, mode: &'static str, succeeds: bool, says: &'static [&'static str]) -> Case {
    Case { name, mode, succeeds, says, nccl: false }
}

const fn nccl(name: &'static str, mode: &'static str, succeeds: bool, says: &'static [&'static str]) -> Case {
    Case { name, mode, succeeds, says, nccl: true }
}

fn main() -> ExitCode {
    if let Ok(mode) = std::env::var(MODE) {
        return child(&mode);
    }
    let filter: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let work = tempfile::tempdir().unwrap();
    let has_stand_in = cfg!(target_os = "linux");
    match has_stand_in {
        true => build_stand_in(work.path()),
        false => println!("SKIPPED nccl: its stand-in is built for Linux"),
    }
    let transports = TRANSPORTS.into_iter().filter(|transport| has_stand_in || *transport != Transport::Nccl);
    let mut failed = 0;
    for (transport, case) in transports.flat_map(|transport| CASES.iter().map(move |case| (transport, case))) {
        if case.nccl && transport != Transport::Nccl {
            continue;
        }
        let name = format!("{transport:?}::{}", case.name).to_lowercase();
        if !filter.is_empty() && !filter.iter().any(|f| name.contains(f.as_str())) {
            continue;
        }
        let began = Instant::now();
        let problem = judge(&start(transport, case.mode, work.path()), case, began.elapsed());
        println!("test {name} ... {} ({:.1?})", if problem.is_none() { "ok" } else { "FAILED" }, began.elapsed());
        if let Some(problem) = problem {
            println!("{problem}");
            failed += 1;
        }
    }
    println!("\ntest result: {} failed", failed);
    ExitCode::from(u8::from(failed > 0))
}

/// Builds the stand-in of NCCL and the CUDA runtime under the names that are looked for first.
fn build_stand_in(directory: &Path) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/nccl_stand_in.c");
    let library = directory.join("libnccl.so.2");
    let built = Command::new("cc")
        .args(["-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-pthread", "-o"])
        .args([&library, &source])
        .status()
        .expect("these tests need the C compiler `cc`");
    assert!(built.success(), "{} does not compile", source.display());
    std::fs::hard_link(library, directory.join("libcudart.so.13")).unwrap();
}

/// Runs a job; the output of all its processes and whether all succeeded.
fn start(transport: Transport, mode: &str, work: &Path) -> (bool, String) {
    let program = std::env::current_exe().unwrap();
    let port = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).unwrap().port();
    let log = work.join("log");
    let file = File::create(&log).unwrap();
    let of_rank = |rank: usize| {
        let mut command = Command::new(&program);
        command.env(MODE, mode).env(RANK, rank.to_string()).env(PORT, port.to_string());
        if transport == Transport::Nccl {
            command.env("LD_LIBRARY_PATH", work).env("ROLL_STAND_IN", mode);
        }
        command.stdout(file.try_clone().unwrap()).stderr(file.try_clone().unwrap()).spawn().unwrap()
    };
    let mut processes: Vec<_> = (0..RANKS).map(of_rank).collect();
    let (began, mut failed) = (Instant::now(), None);
    loop {
        let ended: Vec<_> = processes.iter_mut().map(|process| process.try_wait().unwrap()).collect();
        if ended.iter().flatten().any(|status| !status.success()) {
            failed.get_or_insert_with(Instant::now);
        }
        let over = ended.iter().all(Option::is_some);
        if over || failed.is_some_and(|since| since.elapsed() > GRACE) || began.elapsed().as_secs() > SECONDS {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    for process in &mut processes {
        let _ = process.kill();
        process.wait().unwrap();
    }
    (failed.is_none(), std::fs::read_to_string(log).unwrap())
}

fn judge((succeeded, said): &(bool, String), case: &Case, took: Duration) -> Option<String> {
    let missing: Vec<_> = case.says.iter().filter(|s| !said.contains(**s)).collect();
    let right = *succeeded == case.succeeds && missing.is_empty() && took < Duration::from_secs(SECONDS);
    (!right).then(|| format!("succeeded: {succeeded}, after {took:.1?}, does not say {missing:?}:\n{said}"))
}

fn join(mode: &str) -> Result<(TcpRanks, Arc<dyn Communicator>)> {
    let number = |name: &str| std::env::var(name).unwrap().parse::<u16>().unwrap();
    let (rank, host) = (number(RANK).into(), "127.0.0.1".into());
    let place = Place { rank, size: RANKS, host, port: number(PORT), job: "test".into(), secret: None };
    let job = TcpRanks::join(&place, Duration::from_secs(SECONDS / 2))?;
    let mut ranks = job.communicator();
    if std::env::var_os("LD_LIBRARY_PATH").is_some_and(|path| Path::new(&path).join("libnccl.so.2").exists()) {
        let limit = Duration::from_secs(if mode == "start-hangs" { 2 } else { SECONDS / 2 });
        ranks = match NcclRanks::join(ranks.clone(), Ok(rank), limit) {
            Ok(nccl) => nccl,
            Err(error) if ["start-hangs", "one-gpu"].contains(&mode) => {
                say(&format!("rank {rank}: over TCP: {error}"));
                ranks
            }
            Err(error) => return Err(error),
        };
    }
    Ok((job, ranks))
}

/// Writes a line at once, so that lines of several processes are not interleaved.
fn say(line: &str) {
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

fn child(mode: &str) -> ExitCode {
    let (job, ranks) = match join(mode) {
        Ok(joined) => joined,
        Err(e) => {
            say(&e.to_string());
            return ExitCode::FAILURE;
        }
    };
    let work = || match mode {
        "collectives" | "start-hangs" | "one-gpu" => collectives(ranks.as_ref()),
        "dies" | "async-error" | "hangs" => large(ranks.as_ref()),
        "zero" => zero(ranks.clone()),
        _ => broken(ranks.clone(), mode),
    };
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let said = panic.downcast_ref::<&str>().map(|s| s.to_string());
        let said = said.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        Err(Error::Misuse(format!("panicked: {said}")))
    });
    let result = result.and_then(|()| ranks.barrier());
    if let Err(error) = &result {
        ranks.fail(&error.chain());
        say(&format!("rank {}: {}", ranks.rank().0, error.chain()));
    }
    job.leave();
    ExitCode::from(u8::from(result.is_err()))
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

/// Sums that NCCL carries, until one of them fails.
fn large(ranks: &dyn Communicator) -> Result<()> {
    ranks.set_timeout(Duration::from_secs(3));
    for n in [100_000, 200_000, 300_000, 400_000] {
        let mut values = vec![1.0; n];
        ranks.all_reduce(&mut values)?;
        assert!(values == vec![RANKS as f32; n]);
    }
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

fn zero(ranks: Arc<dyn Communicator>) -> Result<()> {
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

/// Rank 2 fails in step 3, or rank 0 where the mode says so.
fn broken(ranks: Arc<dyn Communicator>, mode: &str) -> Result<()> {
    let rank = ranks.rank().0;
    let failing = if mode == "kill-first" { 0 } else { 2 };
    let at = |step: u64| match (rank == failing && step == 3, mode) {
        (true, "error") => Err(Error::Misuse("the disk is full".into())),
        (true, "panic") => panic!("index out of range"),
        (true, "kill" | "kill-first") => {
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
