//! Reads the environment variables of a launcher such as `torchrun` or `srun`: the rank of this process, the number of
//! processes, and the host and port where they meet.

use std::hash::{DefaultHasher, Hash, Hasher};

use roll_backends::tcp::{Place, SECRET_VARIABLE, Secret};
use roll_core::{Error, Result};

/// The environment variables of a launcher.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Launcher {
    /// Number of processes of the job.
    size: &'static str,
    /// Number of this process in the job.
    rank: &'static str,
    /// Number of this process among those on its machine.
    local_rank: &'static str,
}

const TORCH: Launcher = Launcher { size: "WORLD_SIZE", rank: "RANK", local_rank: "LOCAL_RANK" };
const SLURM: Launcher = Launcher { size: "SLURM_STEP_NUM_TASKS", rank: "SLURM_PROCID", local_rank: "SLURM_LOCALID" };
const OPEN_MPI: Launcher =
    Launcher { size: "OMPI_COMM_WORLD_SIZE", rank: "OMPI_COMM_WORLD_RANK", local_rank: "OMPI_COMM_WORLD_LOCAL_RANK" };
/// MPICH and Intel MPI.
const MPICH: Launcher = Launcher { size: "PMI_SIZE", rank: "PMI_RANK", local_rank: "MPI_LOCALRANKID" };
/// `torchrun` and Open MPI's `mpirun` within a job of Slurm start more processes than Slurm did, so they come first.
const LAUNCHERS: [Launcher; 4] = [TORCH, OPEN_MPI, SLURM, MPICH];

/// Lowest port of a job without MASTER_PORT. A number that is derived from the job is added, see [`slurm`] and
/// [`one_machine`].
const LOWEST_PORT: u16 = 20_000;
/// Number of ports, from the lowest one on, that jobs without MASTER_PORT use.
const PORTS: u16 = 20_000;

/// Ports below this one need privileges.
const LOWEST_UNPRIVILEGED_PORT: u16 = 1024;

/// The launcher that started several processes, and their number; `None` if there is one process. Here and below,
/// `value` returns the value of an environment variable.
fn launcher(value: &impl Fn(&str) -> Option<String>) -> Option<(Launcher, usize)> {
    let with_size = |launcher: Launcher| Some((launcher, number(value, launcher.size)?)).filter(|(_, size)| *size > 1);
    let sets_rank = |(launcher, _): &(Launcher, usize)| number(value, launcher.rank).is_some();
    // A launcher that also sets the rank comes before one that does not: batch scripts often set WORLD_SIZE themselves,
    // without RANK.
    LAUNCHERS.into_iter().filter_map(with_size).find(sets_rank).or_else(|| LAUNCHERS.into_iter().find_map(with_size))
}

/// The value of the variable `name` as a number.
fn number(value: &impl Fn(&str) -> Option<String>, name: &str) -> Option<usize> {
    value(name)?.trim().parse().ok()
}

/// The place of this process in its job; `None` if it is alone. Fails if a launcher started several processes and does
/// not say how they find each other, because they would all do the same work and write the same files.
pub fn place(value: impl Fn(&str) -> Option<String>) -> Result<Option<Place>> {
    let Some((launcher, size)) = launcher(&value) else { return Ok(None) };
    let missing = |name: &str, what: &str| {
        Error::Unsupported(format!(
            "{} says that {size} processes were started, and {name}, {what}, is not set: start them with `torchrun \
             --no-python` or `srun`, which set it, or set it yourself; for one process, unset {}",
            launcher.size, launcher.size
        ))
    };
    let rank = number(&value, launcher.rank).ok_or_else(|| missing(launcher.rank, "the number of this process"))?;
    if rank >= size {
        let (rank_variable, size_variable) = (launcher.rank, launcher.size);
        return Err(Error::Unsupported(format!(
            "{rank_variable} is {rank}, expected a number below {size} ({size_variable})"
        )));
    }
    // Host and port without MASTER_ADDR and MASTER_PORT, which `torchrun` always sets.
    let (derived_host, derived_port) = match launcher {
        SLURM => slurm(&value).unzip(),
        OPEN_MPI => one_machine(&value, size).unzip(),
        _ => (None, None),
    };
    let host = value("MASTER_ADDR").or(derived_host).ok_or_else(|| missing("MASTER_ADDR", "the host of rank 0"))?;
    let given_port = number(&value, "MASTER_PORT").and_then(|port| u16::try_from(port).ok());
    let port = given_port.or(derived_port).ok_or_else(|| missing("MASTER_PORT", "a free port of rank 0's host"))?;
    // `torchrun` listens at MASTER_PORT itself if its agent has the store, so the ranks take the next port.
    let torchrun_listens =
        value("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value.eq_ignore_ascii_case("true"));
    let port = if torchrun_listens { port.wrapping_add(1).max(LOWEST_UNPRIVILEGED_PORT) } else { port };
    // The name of the job and of its attempt: processes of another job that meet at the same port are refused.
    let names =
        ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE"];
    let job = names.into_iter().filter_map(&value).collect::<Vec<_>>().join(".");
    Ok(Some(Place { rank, size, host, port, job, secret: secret(&value)? }))
}

/// The secret of the job, if it has one.
fn secret(value: &impl Fn(&str) -> Option<String>) -> Result<Option<Secret>> {
    let Some(text) = value(SECRET_VARIABLE) else { return Ok(None) };
    let empty = || {
        Error::Unsupported(format!(
            "{SECRET_VARIABLE} is empty: set it to one random text for all processes, such as that of `openssl rand -hex \
             32`, or unset it"
        ))
    };
    Secret::new(text.trim()).ok_or_else(empty).map(Some)
}

/// The host of rank 0 in a job of Slurm, and a port that usually differs between jobs and their steps.
fn slurm(value: &impl Fn(&str) -> Option<String>) -> Option<(String, u16)> {
    let nodes = value("SLURM_STEP_NODELIST").or_else(|| value("SLURM_JOB_NODELIST"))?;
    let job = number(value, "SLURM_JOB_ID")? + number(value, "SLURM_STEP_ID").unwrap_or(0);
    Some((first_node(&nodes)?, LOWEST_PORT + (job % usize::from(PORTS)) as u16))
}

/// This machine, if all processes of a job of Open MPI run on it, and a port that usually differs between jobs.
fn one_machine(value: &impl Fn(&str) -> Option<String>, size: usize) -> Option<(String, u16)> {
    let is_one_machine = number(value, "OMPI_COMM_WORLD_LOCAL_SIZE")? == size;
    let mut job = DefaultHasher::new();
    value("PMIX_NAMESPACE")?.hash(&mut job);
    is_one_machine.then(|| ("127.0.0.1".into(), LOWEST_PORT + (job.finish() % u64::from(PORTS)) as u16))
}

/// The first node of a list that Slurm has abbreviated: `gpu[03-05,7],login1` begins with `gpu03`.
fn first_node(list: &str) -> Option<String> {
    let end = list.find([',', '[']).unwrap_or(list.len());
    let (prefix, rest) = list.split_at(end);
    let Some(numbers) = rest.strip_prefix('[') else {
        return Some(prefix.into()).filter(|name: &String| !name.is_empty());
    };
    let (numbers, after) = numbers.split_once(']')?;
    let suffix = after.split(',').next().unwrap_or_default();
    Some(format!("{prefix}{}{suffix}", numbers.split([',', '-']).next()?))
}

/// The variable that says that several processes were started.
pub fn size_variable(value: impl Fn(&str) -> Option<String>) -> Option<&'static str> {
    launcher(&value).map(|(launcher, _)| launcher.size)
}

/// The number of this process among those of its job on this machine; `None` unless a launcher sets it.
pub fn local_rank(value: impl Fn(&str) -> Option<String>) -> Option<usize> {
    let (launcher, _) = launcher(&value)?;
    number(&value, launcher.local_rank)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn of<'a>(set: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<String> + 'a {
        |name| set.iter().find(|(variable, _)| *variable == name).map(|(_, value)| (*value).into())
    }

    fn found(set: &[(&str, &str)]) -> Option<(usize, usize, String, u16)> {
        place(of(set)).unwrap().map(|place| (place.rank, place.size, place.host, place.port))
    }

    #[test]
    fn every_launcher_tells_the_place_of_a_process() {
        assert_eq!(found(&[]), None);
        assert_eq!(found(&[("WORLD_SIZE", "1"), ("RANK", "0"), ("PMI_SIZE", "no number")]), None);
        let at = [("MASTER_ADDR", "node1"), ("MASTER_PORT", "29500")];
        for Launcher { size, rank, local_rank: local } in LAUNCHERS {
            let set = [&at[..], &[(size, "4"), (rank, "3"), (local, "1")]].concat();
            assert_eq!(found(&set), Some((3, 4, "node1".into(), 29500)));
            assert_eq!(local_rank(of(&set)), Some(1));
        }
        // `torchrun` holds its own port, and starts more processes than Slurm did.
        let nested = [("WORLD_SIZE", "16"), ("RANK", "9"), ("TORCHELASTIC_USE_AGENT_STORE", "True")];
        let nested = [&at[..], &nested, &[("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_PROCID", "1")]].concat();
        assert_eq!(found(&nested), Some((9, 16, "node1".into(), 29501)));
    }

    #[test]
    fn a_job_may_have_a_secret_that_is_not_empty() {
        let job = [("WORLD_SIZE", "2"), ("RANK", "1"), ("MASTER_ADDR", "node1"), ("MASTER_PORT", "29500")];
        assert_eq!(place(of(&job)).unwrap().unwrap().secret, None);
        let with = |text| [&job[..], &[(SECRET_VARIABLE, text)]].concat();
        assert_eq!(place(of(&with(" abc\n"))).unwrap().unwrap().secret, Secret::new("abc"));
        let said = place(of(&with(" "))).unwrap_err().to_string();
        assert!(said.contains("ROLL_JOB_SECRET is empty"), "{said}");
    }

    #[test]
    fn slurm_needs_no_address() {
        let step = [("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_PROCID", "1"), ("SLURM_JOB_ID", "7")];
        let nodes = [&step[..], &[("SLURM_STEP_NODELIST", "gpu[03-05,7],x"), ("SLURM_STEP_ID", "2")]].concat();
        assert_eq!(found(&nodes), Some((1, 2, "gpu03".into(), 20_009)));
        // WORLD_SIZE of a batch script, without RANK.
        let script = [&nodes[..], &[("WORLD_SIZE", "2"), ("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "5")]].concat();
        assert_eq!(found(&script), Some((1, 2, "10.0.0.1".into(), 5)));
        for (list, first) in [("a", "a"), ("a1,b2", "a1"), ("n[1,3]-ib,m", "n1-ib"), ("p[08-10]", "p08")] {
            assert_eq!(first_node(list).unwrap(), first);
        }
        assert_eq!([first_node(""), first_node("n[1")], [None, None]);
    }

    #[test]
    fn jobs_of_open_mpi_on_one_machine_need_no_address() {
        let job = |namespace, local| {
            let (rank, size) = (("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "4"));
            place(of(&[rank, size, ("OMPI_COMM_WORLD_LOCAL_SIZE", local), ("PMIX_NAMESPACE", namespace)]))
        };
        let [one, same, other] = ["7340033", "7340033", "prterun-7@1"].map(|name| job(name, "4").unwrap().unwrap());
        assert_eq!((one.host.as_str(), one.rank, one.size), ("127.0.0.1", 1, 4));
        assert_eq!(one, same);
        assert!(one.port != other.port && one.job != other.job, "{one:?} {other:?}");
        assert!([one, other].iter().all(|job| (LOWEST_PORT..LOWEST_PORT + PORTS).contains(&job.port)));
        // Half of the processes are on another machine.
        assert!(job("7340033", "2").unwrap_err().to_string().contains("MASTER_ADDR"));
    }

    #[test]
    fn a_launch_that_does_not_say_how_ranks_meet_is_refused() {
        let of_two = [("WORLD_SIZE", "2")];
        for (more, named) in [
            (&[][..], "RANK"),
            (&[("RANK", "2")], "below 2"),
            (&[("RANK", "1")], "MASTER_ADDR"),
            (&[("RANK", "1"), ("MASTER_ADDR", "x")], "MASTER_PORT"),
            (&[("RANK", "1"), ("MASTER_ADDR", "x"), ("MASTER_PORT", "70000")], "MASTER_PORT"),
        ] {
            let message = place(of(&[&of_two[..], more].concat())).unwrap_err().to_string();
            assert!(message.contains(named) && message.contains("WORLD_SIZE"), "{message}");
        }
    }
}
