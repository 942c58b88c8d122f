//! Tests of ranks over NCCL: the errors without NCCL; with a GPU, the results of the collectives.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::Duration;

use roll_backends::nccl::NcclRanks;
use roll_core::{Communicator, Error, Fault, Rank, SingleRank, ThreadRanks};

const LONG: Duration = Duration::from_secs(60);

#[test]
fn without_library_or_device_every_rank_is_told_what_is_missing() {
    // A device ordinal that no machine has, which fails even if everything else is available.
    let results = ThreadRanks::run(3, LONG, |ranks| NcclRanks::join(ranks, 4095).map(drop));
    for result in results {
        let said = result.unwrap_err().chain();
        let library = said.contains("cannot be loaded") && said.contains("LD_LIBRARY_PATH");
        let device = said.contains("device 4095") || said.contains("cudaGetDeviceCount");
        assert!(library || device, "{said}");
    }
    let error: Error = NcclRanks::join(Arc::new(SingleRank), 4095).map(drop).unwrap_err();
    assert!(error.fault() == Fault::User || error.to_string().contains("cudaGetDeviceCount"));
}

#[test]
fn one_rank_with_a_device_gets_back_what_it_sends() {
    let ranks = match NcclRanks::join(Arc::new(SingleRank), 0) {
        Ok(ranks) => ranks,
        Err(e) => roll_testing::skip!(e, needs = "gpu"),
    };
    let values: Vec<f32> = (0..10_000).map(|i| 1.0 / (1 + i) as f32).collect();
    let mut reduced = values.clone();
    ranks.all_reduce(&mut reduced).unwrap();
    let (mut part, mut gathered, mut told) = (vec![0.0; 10_000], vec![0.0; 10_000], values.clone());
    ranks.reduce_scatter(&values, &mut part).unwrap();
    ranks.all_gather(&values, &mut gathered).unwrap();
    ranks.broadcast(&mut told, Rank(0)).unwrap();
    ranks.barrier().unwrap();
    for found in [reduced, part, gathered, told] {
        assert!(found == values);
    }
}
