//! What launchers of several processes say about a job in environment variables.

use std::hash::{DefaultHasher, Hash, Hasher};

use roll_backends::tcp::{Place, SECRET_VARIABLE, Secret};
use roll_core::{Error, Result};

/// The variables of a launcher: number of processes, this process's number, its number on its machine.
type Variables = [&'static str; 3];

const TORCH: Variables = ["WORLD_SIZE", "RANK", "LOCAL_RANK"];
const SLURM: Variables = ["SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"];
const OPEN_MPI: Variables = ["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"];
/// MPICH and Intel MPI.
const MPICH: Variables = ["PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"];
/// `torchrun` and Open MPI's `mpirun` within a job of Slurm start more processes than Slurm did, so they come first.
const LAUNCHERS: [Variables; 4] = [TORCH, OPEN_MPI, SLURM, MPICH];

/// Port of a job that sets no MASTER_PORT: this one, plus a number that follows from the job's.
const PORT: u16 = 20_000;

/// The launcher that started several processes, and their number; `None` if there is one process.
fn launcher(value: &impl Fn(&str) -> Option<String>) -> Option<(Variables, usize)> {
    let count = |launcher: Variables| Some((launcher, number(value, launcher[0])?)).filter(|(_, count)| *count > 1);
    let with_rank = |(launcher, _): &(Variables, usize)| number(value, launcher[1]).is_some();
    // Batch scripts often set WORLD_SIZE themselves, without RANK.
    LAUNCHERS.into_iter().filter_map(count).find(with_rank).or_else(|| LAUNCHERS.into_iter().find_map(count))
}

fn number(value: &impl Fn(&str) -> Option<String>, name: &str) -> Option<usize> {
    value(name)?.trim().parse().ok()
}

/// The place of this process in its job; `None` if it is alone. Fails if a launcher started several processes and does
/// not say how they find each other: they would all do the same work and write the same files.
pub fn place(value: impl Fn(&str) -> Option<String>) -> Result<Option<Place>> {
    let Some((launcher, size)) = launcher(&value) else { return Ok(None) };
    let missing = |name: &str, what: &str| {
        Error::Unsupported(format!(
            "{} says that {size} processes were started, and {name}, {what}, is not set: start them with `torchrun \
             --no-python` or `srun`, which set it, or set it yourself; for one process, unset {}",
            launcher[0], launcher[0]
        ))
    };
    let rank = number(&value, launcher[1]).ok_or_else(|| missing(launcher[1], "the number of this process"))?;
    if rank >= size {
        let (ranks, count) = (launcher[1], launcher[0]);
        return Err(Error::Unsupported(format!("{ranks} is {rank}, expected a number below {size} ({count})")));
    }
    let known = match launcher {
        SLURM => slurm(&value),
        OPEN_MPI => one_machine(&value, size),
        _ => None,
    };
    let given = (value("MASTER_ADDR"), number(&value, "MASTER_PORT").and_then(|port| u16::try_from(port).ok()));
    let host = given.0.or_else(|| known.as_ref().map(|(host, _)| host.clone()));
    let host = host.ok_or_else(|| missing("MASTER_ADDR", "the host of rank 0"))?;
    let port = given.1.or(known.map(|(_, port)| port));
    let port = port.ok_or_else(|| missing("MASTER_PORT", "a free port of rank 0's host"))?;
    // `torchrun` listens at MASTER_PORT itself.
    let taken = value("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|is| is.eq_ignore_ascii_case("true"));
    let port = if taken { port.wrapping_add(1).max(1024) } else { port };
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

/// The host of rank 0 in a job of Slurm, and a port that jobs and steps do not share as a rule.
fn slurm(value: &impl Fn(&str) -> Option<String>) -> Option<(String, u16)> {
    let nodes = value("SLURM_STEP_NODELIST").or_else(|| value("SLURM_JOB_NODELIST"))?;
    let job = number(value, "SLURM_JOB_ID")? + number(value, "SLURM_STEP_ID").unwrap_or(0);
    Some((first_node(&nodes)?, PORT + (job % usize::from(PORT)) as u16))
}

/// This machine, where all processes of a job of Open MPI run on it, and a port that jobs do not share as a rule.
fn one_machine(value: &impl Fn(&str) -> Option<String>, size: usize) -> Option<(String, u16)> {
    let is_one = number(value, "OMPI_COMM_WORLD_LOCAL_SIZE")? == size;
    let mut job = DefaultHasher::new();
    value("PMIX_NAMESPACE")?.hash(&mut job);
    is_one.then(|| ("127.0.0.1".into(), PORT + (job.finish() % u64::from(PORT)) as u16))
}

/// The first of a list of nodes as Slurm abbreviates it: `gpu[03-05,7],login1` begins with `gpu03`.
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
    launcher(&value).map(|(launcher, _)| launcher[0])
}

/// The number of this process among those of its job on this machine; `None` unless a launcher sets it.
pub fn local_rank(value: impl Fn(&str) -> Option<String>) -> Option<usize> {
    let (launcher, _) = launcher(&value)?;
    number(&value, launcher[2])
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
        for [size, rank, local] in LAUNCHERS {
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
        assert!([one, other].iter().all(|job| (PORT..2 * PORT).contains(&job.port)));
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
