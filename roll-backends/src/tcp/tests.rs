//! Tests of joining, and of connections that end. `tests/processes.rs` has the collectives, between processes.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use roll_core::{Error, Fault};

use super::{Place, SILENCE, TcpError, TcpRanks};

const LONG: Duration = Duration::from_secs(60);

fn places(size: usize) -> Vec<Place> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    (0..size).map(|rank| Place { rank, size, host: "127.0.0.1".into(), port, job: "7".into() }).collect()
}

/// Joins in a thread of its own and calls `then`.
fn join<T: Send + 'static>(
    place: &Place,
    then: impl FnOnce(TcpRanks) -> T + Send + 'static,
) -> JoinHandle<Result<T, TcpError>> {
    let place = place.clone();
    std::thread::spawn(move || TcpRanks::join(&place, LONG).map(then))
}

fn message<T>(result: Result<T, TcpError>) -> String {
    let Err(error) = result else { panic!("it joined") };
    error.to_string()
}

#[test]
fn strangers_and_processes_of_other_jobs_do_not_disturb() {
    let places = places(3);
    let [root, second, third] = [0, 1, 2].map(|rank| places[rank].clone());
    let job = join(&root, |ranks| {
        let gathered = ranks.communicator().all_gather_f64(0.5).unwrap();
        ranks.leave();
        gathered
    });
    let first = join(&second, |ranks| {
        let gathered = ranks.communicator().all_gather_f64(1.5).unwrap();
        ranks.leave();
        gathered
    });
    let mut stranger = loop {
        match TcpStream::connect((root.host.as_str(), root.port)) {
            Ok(stream) => break stream,
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    stranger.write_all(&[0xff; 5000]).unwrap();
    drop(stranger);
    for (wrong, named) in [
        (Place { job: "8".into(), ..third.clone() }, "expected the job 7, found 8"),
        (Place { size: 4, ..third.clone() }, "expected a job of so many processes: 3, found 4"),
        (Place { rank: 5, ..third.clone() }, "expected a rank below 3, found 5"),
    ] {
        let said = message(TcpRanks::join(&wrong, LONG));
        assert!(said.contains(named) && said.contains("refuses rank"), "{said}");
    }
    let last = TcpRanks::join(&third, LONG).unwrap();
    assert_eq!(last.communicator().all_gather_f64(2.5).unwrap(), [0.5, 1.5, 2.5]);
    assert!(last.communicator().split(0).is_err());
    last.leave();
    for rank in [job, first] {
        assert_eq!(rank.join().unwrap().unwrap(), [0.5, 1.5, 2.5]);
    }
}

#[test]
fn a_rank_that_does_not_start_is_named() {
    let places = places(4);
    let short = Duration::from_secs(2);
    let others = [1, 3].map(|rank| join(&places[rank], drop));
    let said = message(TcpRanks::join(&places[0], short));
    assert!(said.starts_with("1 of 4 ranks did not connect") && said.ends_with(": 2"), "{said}");
    for other in others {
        let said = message(other.join().unwrap());
        assert!(said.contains("before the job had assembled"), "{said}");
    }
    let said = message(TcpRanks::join(&places[1], short));
    assert!(said.contains("rank 1 found no rank 0 at 127.0.0.1:"), "{said}");
    let taken = TcpListener::bind((places[0].host.as_str(), places[0].port)).unwrap();
    let said = message(TcpRanks::join(&places[0], short));
    assert!(said.contains("cannot listen") && said.contains("MASTER_PORT"), "{said}");
    drop(taken);
    let refused = TcpError::Refused { rank: 1, address: String::new(), reason: String::new() };
    assert_eq!(Error::from(refused).fault(), Fault::User);
}

#[test]
fn a_second_process_of_a_rank_is_refused() {
    let places = places(3);
    let root = join(&places[0], |ranks| ranks.leave());
    let first = join(&places[1], |ranks| ranks.leave());
    let twin = join(&places[1], |ranks| ranks.leave());
    while !first.is_finished() && !twin.is_finished() {
        std::thread::sleep(Duration::from_millis(5));
    }
    TcpRanks::join(&places[2], LONG).unwrap().leave();
    let ended = [first, twin].map(|rank| rank.join().unwrap());
    assert_eq!(ended.iter().filter(|ended| ended.is_ok()).count(), 1);
    let said = message(ended.into_iter().find(Result::is_err).unwrap());
    assert!(said.contains("another process is rank 1 already"), "{said}");
    root.join().unwrap().unwrap();
}

/// Rank 0 and rank 2 check until they learn that rank 1 failed; rank 1 does what `fails` does.
fn checked(fails: fn(TcpRanks)) -> Vec<String> {
    let places = places(3);
    let (tell, told) = mpsc::channel();
    let until_failure = move |ranks: TcpRanks| {
        tell.send(()).unwrap();
        let since = Instant::now();
        let error = loop {
            assert!(since.elapsed() < LONG);
            if let Err(error) = ranks.communicator().check() {
                break error.to_string();
            }
        };
        assert_eq!(ranks.communicator().barrier().unwrap_err().to_string(), error);
        ranks.leave();
        error
    };
    let others = [0, 2].map(|rank| join(&places[rank], until_failure.clone()));
    join(&places[1], move |ranks| {
        (0..2).for_each(|_| told.recv().unwrap());
        fails(ranks);
    })
    .join()
    .unwrap()
    .unwrap();
    others.map(|rank| rank.join().unwrap().unwrap()).into()
}

#[test]
fn a_rank_that_waits_in_a_collective_can_still_fail() {
    let places = places(2);
    // Rank 0 does not come to the barrier.
    let root = join(&places[0], |ranks| {
        while ranks.communicator().check().is_ok() {
            std::thread::sleep(Duration::from_millis(5));
        }
        ranks.leave();
    });
    let ranks = TcpRanks::join(&places[1], LONG).unwrap();
    let waiting = ranks.communicator();
    let waiting = std::thread::spawn(move || waiting.barrier().unwrap_err().to_string());
    std::thread::sleep(Duration::from_millis(100));
    let since = Instant::now();
    ranks.communicator().fail("the disk is full");
    assert_eq!(waiting.join().unwrap(), "rank 1 failed: the disk is full");
    root.join().unwrap().unwrap();
    // Signs of life do not wait either: a rank in a long collective would be taken for lost.
    assert!(since.elapsed() < SILENCE / 2, "{:?}", since.elapsed());
    ranks.leave();
}

#[test]
fn ranks_learn_of_a_failure_or_a_lost_connection_without_a_collective() {
    let said = checked(|ranks| {
        ranks.communicator().fail("the disk is full");
        ranks.leave();
    });
    assert_eq!(said, ["rank 1 failed: the disk is full"; 2]);
    // The process ends without leaving.
    for said in checked(drop) {
        assert!(said.starts_with("rank 1 failed: its process ended, or its machine"), "{said}");
    }
}
