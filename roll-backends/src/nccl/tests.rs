//! Tests of ranks over NCCL: the errors without NCCL; with a GPU, the results of the collectives of one rank.
//! `tests/processes.rs` has several ranks, over a stand-in of NCCL.

use roll_core::{SingleRank, ThreadRanks};

use super::*;

const LONG: Duration = Duration::from_secs(60);

#[test]
fn without_library_or_device_every_rank_is_told_what_is_missing() {
    // A device ordinal that no machine has, which fails even if everything else is available.
    let results = ThreadRanks::run(3, LONG, |ranks| NcclRanks::join(ranks, Ok(4095), LONG).map(drop));
    for result in results {
        let said = result.unwrap_err().chain();
        let library = said.contains("cannot be loaded") && said.contains("LD_LIBRARY_PATH");
        let device = said.contains("device 4095") || said.contains("cudaGetDeviceCount");
        assert!(library || device, "{said}");
    }
    let error: Error = NcclRanks::join(Arc::new(SingleRank), Ok(4095), LONG).map(drop).unwrap_err();
    assert!(error.fault() == Fault::User || error.to_string().contains("cudaGetDeviceCount"));
}

#[test]
fn a_rank_without_a_gpu_keeps_every_rank_from_nccl_and_the_host_goes_on() {
    let results = ThreadRanks::run(3, LONG, |ranks| {
        let device = if ranks.rank().0 == 1 { Err("flex computes on no GPU".into()) } else { Ok(4095) };
        let error = NcclRanks::join(ranks.clone(), device, LONG).map(drop).unwrap_err();
        assert!(RanksError::within(&error).is_none());
        Ok((error.to_string(), ranks.all_gather_f64(ranks.rank().0 as f64)?))
    });
    for (rank, result) in results.into_iter().enumerate() {
        let (said, gathered) = result.unwrap();
        assert!(rank != 1 || said == "flex computes on no GPU", "{said}");
        assert_eq!(gathered, [0.0, 1.0, 2.0]);
    }
}

#[test]
fn every_rank_is_a_process_with_a_gpu_of_its_own() {
    let rank =
        |process: u64, machine: &str, gpu: &str| Ok(Identity { process, machine: machine.into(), gpu: gpu.into() });
    let (a, b) = ("0000:01:00.0", "0000:02:00.0");
    assert!(check_identities(vec![rank(1, "m", a), rank(2, "m", b), rank(3, "n", a)]).is_ok());
    // Without a machine's name, NCCL itself has to tell.
    assert!(check_identities(vec![rank(1, "", a), rank(2, "", a)]).is_ok());
    for (ranks, said) in [
        (vec![rank(1, "m", a), rank(2, "m", b), rank(3, "m", a)], "ranks 0 and 2 use the same GPU (0000:01:00.0)"),
        (vec![rank(1, "m", a), rank(1, "m", b)], "ranks 0 and 1 are threads of one process"),
        (vec![rank(1, "m", a), Err("no driver".into())], "rank 1 cannot use NCCL: no driver"),
    ] {
        let found = check_identities(ranks).unwrap_err().to_string();
        assert!(found.starts_with(said), "{found}");
    }
}

#[test]
fn one_rank_with_a_device_gets_back_what_it_sends() {
    let ranks = match NcclRanks::join(Arc::new(SingleRank), Ok(0), LONG) {
        Ok(ranks) => ranks,
        Err(e) => roll_testing::skip!(e, needs = "gpu"),
    };
    for n in [SMALL + 1, 10_000, CHUNK + 3] {
        let values: Vec<f32> = (0..n).map(|i| 1.0 / (1 + i) as f32).collect();
        let mut reduced = values.clone();
        ranks.all_reduce(&mut reduced).unwrap();
        let (mut part, mut gathered, mut told) = (vec![0.0; n], vec![0.0; n], values.clone());
        ranks.reduce_scatter(&values, &mut part).unwrap();
        ranks.all_gather(&values, &mut gathered).unwrap();
        ranks.broadcast(&mut told, Rank(0)).unwrap();
        ranks.barrier().unwrap();
        for found in [reduced, part, gathered, told] {
            assert!(found == values, "{n} values");
        }
    }
    ranks.fail("a test");
    let said = ranks.all_reduce(&mut vec![0.0; 10_000]).unwrap_err().to_string();
    assert_eq!(said, "rank 0 failed: a test");
}
