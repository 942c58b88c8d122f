//! Tests of joining, and of connections that end. `tests/processes.rs` has the collectives, between processes.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use roll_core::{Error, Fault};

use super::frame::{self, Kind};
use super::{Place, SILENCE, Secret, TcpError, TcpRanks};

const LONG: Duration = Duration::from_secs(60);

fn places(size: usize) -> Vec<Place> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    (0..size).map(|rank| Place { rank, size, host: "127.0.0.1".into(), port, job: "7".into(), secret: None }).collect()
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
        (Place { rank: 5, ..third.clone() }, "expected a rank above 0 and below 3, found 5"),
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

/// Connects to rank 0, which may not listen yet.
fn stranger(root: &Place) -> TcpStream {
    loop {
        match TcpStream::connect((root.host.as_str(), root.port)) {
            Ok(stream) => return stream,
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// How long rank 0 keeps a connection open.
fn kept_open(mut stream: TcpStream, since: Instant) -> Duration {
    stream.set_read_timeout(Some(LONG)).unwrap();
    // Bytes, an end and a reset are all the same here: the connection has ended.
    while stream.read(&mut [0; 64]).is_ok_and(|read| read > 0) {}
    since.elapsed()
}

#[test]
fn strangers_hold_up_neither_the_job_nor_the_wait_for_it() {
    let places = places(2);
    let root = places[0].clone();
    let root = std::thread::spawn(move || TcpRanks::join(&root, LONG).map(|ranks| ranks.leave()));
    let began = Instant::now();
    let silent: Vec<_> = (0..300).map(|_| stranger(&places[0])).collect();
    // A byte a second of a message that would be valid.
    let slow = stranger(&places[0]);
    let mut writer = slow.try_clone().unwrap();
    let slowly = std::thread::spawn(move || {
        for byte in [b'r'].into_iter().chain([0; 60]) {
            if writer.write_all(&[byte]).is_err() {
                return;
            }
            std::thread::sleep(Duration::from_secs(1));
        }
    });
    let mut garbage = stranger(&places[0]);
    garbage.write_all(&[0xff; 5000]).unwrap();
    // A header that claims more than there is to say.
    let mut large = stranger(&places[0]);
    large.write_all(&[&[b'r'; 1][..], &[0; 8], &u64::MAX.to_le_bytes()].concat()).unwrap();
    let connected = began.elapsed();
    let ended = [garbage, large, slow].map(|stream| kept_open(stream, began));
    let silent = silent.into_iter().map(|stream| kept_open(stream, began)).max().unwrap();
    println!(
        "302 connections in {connected:.2?}; closed after: garbage {:.2?}, too long {:.2?}, slow {:.2?}, silent {:.2?}",
        ended[0], ended[1], ended[2], silent
    );
    assert!(ended[0].max(ended[1]) < Duration::from_secs(3) && ended[2].max(silent) < Duration::from_secs(8));
    slowly.join().unwrap();

    let strangers: Vec<_> = (0..300).map(|_| stranger(&places[0])).collect();
    let joins = Instant::now();
    TcpRanks::join(&places[1], LONG).unwrap().leave();
    println!("joined beside {} silent connections after {:.2?}", strangers.len(), joins.elapsed());
    assert!(joins.elapsed() < Duration::from_secs(2), "{:?}", joins.elapsed());
    root.join().unwrap().unwrap();
}

#[test]
fn rank_0_waits_no_longer_than_its_patience_whoever_connects() {
    let places = places(2);
    let root = places[0].clone();
    let root = std::thread::spawn(move || {
        let since = Instant::now();
        (message(TcpRanks::join(&root, Duration::from_secs(1))), since.elapsed())
    });
    // New connections all the time, as many as come through.
    let mut strangers = Vec::new();
    while !root.is_finished() && strangers.len() < 2000 {
        strangers.push(TcpStream::connect((places[0].host.as_str(), places[0].port)));
        std::thread::sleep(Duration::from_millis(1));
    }
    let (said, waited) = root.join().unwrap();
    println!("{} connections; gave up after {waited:.2?}", strangers.len());
    assert!(said.starts_with("1 of 2 ranks did not connect") && waited < Duration::from_secs(3), "{said} {waited:?}");
}

#[test]
fn processes_that_know_the_secret_join_and_others_are_refused() {
    let secret = |text: &str| Secret::new(text);
    let places: Vec<Place> = places(2).into_iter().map(|place| Place { secret: secret("right"), ..place }).collect();
    let root = join(&places[0], |ranks| {
        let gathered = ranks.communicator().all_gather_f64(0.5).unwrap();
        ranks.leave();
        gathered
    });
    for (wrong, named) in [
        (secret("wrong"), "its ROLL_JOB_SECRET is not that of rank 0"),
        (None, "rank 0 has a ROLL_JOB_SECRET, and this process has none"),
    ] {
        let said = message(TcpRanks::join(&Place { secret: wrong, ..places[1].clone() }, LONG));
        assert!(said.contains("refuses rank 1") && said.contains(named), "{said}");
    }
    let ranks = TcpRanks::join(&places[1], LONG).unwrap();
    assert_eq!(ranks.communicator().all_gather_f64(1.5).unwrap(), [0.5, 1.5]);
    ranks.leave();
    assert_eq!(root.join().unwrap().unwrap(), [0.5, 1.5]);
}

#[test]
fn a_process_with_a_secret_does_not_join_a_rank_0_without() {
    let places = places(2);
    let root = join(&places[0], |ranks| ranks.leave());
    let careful = Place { secret: Secret::new("right"), ..places[1].clone() };
    let said = message(TcpRanks::join(&careful, LONG));
    assert!(said.contains("this process has a ROLL_JOB_SECRET, and rank 0 has none"), "{said}");
    TcpRanks::join(&places[1], LONG).unwrap().leave();
    root.join().unwrap().unwrap();

    // Something else that accepts whoever comes, with and without a challenge.
    for challenges in [false, true] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let place = Place { port: listener.local_addr().unwrap().port(), ..careful.clone() };
        let impostor = std::thread::spawn(move || {
            let stream = listener.accept().unwrap().0;
            let hello = frame::read(&stream, |_| 4096).unwrap();
            assert_eq!(hello.kind, Kind::Hello);
            if challenges {
                frame::write(&stream, Kind::Challenge, 0, &[7; 32]).unwrap();
                let proof = frame::read(&stream, |_| 4096).unwrap();
                // The proof of the process, sent back.
                return frame::write(&stream, Kind::Done, 0, &proof.bytes[32..]).unwrap();
            }
            frame::write(&stream, Kind::Done, 0, &[]).unwrap();
        });
        let said = message(TcpRanks::join(&place, LONG));
        assert!(said.contains("has not proved that it knows this process's ROLL_JOB_SECRET"), "{said}");
        impostor.join().unwrap();
    }
}

#[test]
fn a_rank_that_claims_too_much_is_lost_and_named() {
    let places = places(2);
    let root = join(&places[0], |ranks| {
        let since = Instant::now();
        let error = ranks.communicator().barrier().unwrap_err().to_string();
        ranks.leave();
        (error, since.elapsed())
    });
    let mut rank = stranger(&places[0]);
    let hello = serde_json::to_vec(&super::hello::Hello::of(&places[1])).unwrap();
    frame::write(&rank, Kind::Hello, 0, &hello).unwrap();
    assert_eq!(frame::read(&rank, |_| 0).unwrap().kind, Kind::Done);
    // 2^62 bytes of a collective, and the first few.
    let header = [&[Kind::AllReduce as u8][..], &[0; 8], &(1u64 << 62).to_le_bytes(), &[0; 100]].concat();
    rank.write_all(&header).unwrap();
    let (said, waited) = root.join().unwrap().unwrap();
    assert!(said.starts_with("rank 1 failed") && waited < SILENCE / 2, "{said} after {waited:?}");
}
