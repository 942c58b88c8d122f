//! Services that work, are busy, fail, and talk nonsense: each a listener of the test that answers what it is told.
#![allow(clippy::unwrap_used)]

use std::io::{BufRead, Write};
use std::net::TcpListener;
use std::thread::JoinHandle;

use roll_core::{Grad, RewardScorer, Score, Target, Video};

use super::*;

/// Answers of a service, one for each request; a test's service ends after the last.
type Answers = Vec<(u16, &'static str, Vec<u8>)>;

fn frame_of(header: Json, tensors: &[(String, Tensor)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame::write(&mut bytes, &header, tensors).unwrap();
    bytes
}

fn hello() -> (u16, &'static str, Vec<u8>) {
    (200, "", frame_of(json!({ "name": "served", "differentiable": true }), &[]))
}

/// A service on a port of its own; gives back the headers of the frames that it got.
fn serve(answers: Answers) -> (String, JoinHandle<Vec<Json>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/score", listener.local_addr().unwrap());
    let thread = std::thread::spawn(move || {
        let answer = |(status, header, body): (u16, &str, Vec<u8>)| {
            let (stream, _) = listener.accept().unwrap();
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let mut line = String::new();
            while reader.read_line(&mut line).unwrap() > 2 {
                line.clear();
            }
            let (asked, _) = frame::read::<Json>(&mut reader).unwrap();
            let mut stream = stream;
            let length = body.len();
            write!(stream, "HTTP/1.1 {status} X\r\nContent-Length: {length}\r\nConnection: close\r\n{header}\r\n")
                .unwrap();
            stream.write_all(&body).unwrap();
            asked
        };
        answers.into_iter().map(answer).collect()
    });
    (url, thread)
}

fn reward(url: &str, change: impl FnOnce(&mut Config)) -> Result<RemoteReward<Service>> {
    let mut config = Config { url: url.into(), timeout: 5.0, ..Config::default() };
    change(&mut config);
    RemoteReward::new("http", Service::new(config)?, OnMissing::Skip)
}

fn video() -> Video {
    Video::new(Tensor::new(vec![0.5; 2 * 3 * 4 * 4], [2, 3, 4, 4]).unwrap(), 8.0).unwrap()
}

#[test]
fn a_service_scores_with_a_gradient_and_knows_the_options() {
    let gradient = Tensor::new(vec![2.0; 96], [2, 3, 4, 4]).unwrap();
    let scored = frame_of(json!({ "score": 0.25 }), &[("gradient".into(), gradient)]);
    let (url, served) = serve(vec![hello(), (503, "Retry-After: 0\r\n", vec![]), (200, "", scored)]);
    let mut reward = reward(&url, |c| drop(c.options.insert("level".into(), 0.3.into()))).unwrap();
    assert_eq!((reward.name(), reward.differentiable()), ("served", true));
    let (score, pullback) = reward.score(&video(), "a face", &Target::default(), Grad::Record).unwrap();
    assert_eq!(score, Score::of(0.25));
    let pulled = pullback.unwrap().pull(&Tensor::new(vec![-1.5], []).unwrap()).unwrap();
    assert!(pulled.f32s().unwrap().iter().all(|v| *v == -3.0));
    let asked = served.join().unwrap();
    assert_eq!(asked[2]["prompt"], "a face");
    assert!(asked.iter().all(|header| header["options"]["level"] == 0.3), "{asked:?}");
}

#[test]
fn what_a_service_does_wrong_is_said() {
    let cases: [(Answers, &str); 5] = [
        (vec![(404, "", b"no such path".to_vec())], "status 404: no such path"),
        (vec![(200, "", b"<html>hello</html>".to_vec())], "<html>hello</html>"),
        (vec![(500, "", vec![]), (500, "", b"out of memory".to_vec())], "asked 2 times): status 500: out of memory"),
        (vec![(429, "Retry-After: 30\r\n", vec![])], "it was busy for 1 s"),
        (vec![(200, "", frame_of(json!({ "error": "no weights" }), &[]))], "no weights"),
    ];
    for (answers, part) in cases {
        let (url, served) = serve(answers);
        let told = reward(&url, |c| (c.retries, c.busy_timeout) = (1, 1.0)).map(drop).unwrap_err();
        let told = roll_core::plugin::Chain::line(&told);
        assert!(told.contains(part) && told.contains(&url), "{part}: {told}");
        served.join().unwrap();
    }
}

#[test]
fn nobody_there_and_no_address_are_errors() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let told = reward(&url, |c| c.retries = 0).map(drop).unwrap_err();
    assert!(roll_core::plugin::Chain::line(&told).contains("asked 1 times"));
    for wrong in ["", "example.org/score", "ftp://example.org", "https://", "http:///score", "http://a b/"] {
        let told = reward(wrong, |_| ()).map(drop).unwrap_err().to_string();
        assert!(told.contains("reward.url") && told.contains("http://") && told.contains(wrong), "{wrong}: {told}");
    }
}

#[test]
fn an_address_with_https_is_spoken_to_in_tls() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("HTTPS://{}/score", listener.local_addr().unwrap());
    let served = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut first = [0; 3];
        std::io::Read::read_exact(&mut stream, &mut first).unwrap();
        // What follows is no TLS.
        stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").unwrap();
        first
    });
    let told = reward(&url, |c| c.retries = 0).map(drop).unwrap_err();
    let told = roll_core::plugin::Chain::line(&told);
    assert!(told.contains("asked 1 times") && told.contains(&url), "{told}");
    // A handshake, of TLS 1.
    assert_eq!(served.join().unwrap()[..2], [22, 3]);
}

#[test]
fn a_service_that_hangs_is_given_up_in_time() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let told = reward(&url, |c| (c.retries, c.timeout) = (0, 0.3)).map(drop).unwrap_err();
    let told = roll_core::plugin::Chain::line(&told);
    assert!(told.contains("timeout"), "{told}");
}
