//! Services that work, are busy, fail or answer nonsense: each is a listener with the test's answers.
#![allow(clippy::unwrap_used)]

use std::io::{BufRead, Write};
use std::net::TcpListener;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use roll_core::{Grad, RewardScorer, Score, Target, Video};

use super::*;

/// Answers of a service, one per request. The service ends after the last one.
type Answers = Vec<(u16, &'static str, Vec<u8>)>;

fn frame_of(header: Json, tensors: &[(String, Tensor)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame::write(&mut bytes, &header, tensors).unwrap();
    bytes
}

fn hello() -> (u16, &'static str, Vec<u8>) {
    (200, "", frame_of(json!({ "name": "served", "differentiable": true }), &[]))
}

/// Starts a service on its own port. The thread returns the headers of the received frames, each with the `shapes` of
/// its tensors.
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
            let (mut asked, tensors) = frame::read::<Json>(&mut reader, usize::MAX).unwrap();
            asked["shapes"] = tensors.iter().map(|(_, tensor)| tensor.shape().to_vec()).collect();
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

fn reward(url: &str, change: impl FnOnce(&mut HttpConfig)) -> Result<RemoteReward<ScoringService>> {
    let mut config = HttpConfig { url: url.into(), timeout: 5.0, ..HttpConfig::default() };
    change(&mut config);
    RemoteReward::new("http", ScoringService::new(config)?, Frames::All, OnMissing::Skip)
}

fn video() -> Video {
    Video::new(Tensor::new(vec![0.5; 2 * 3 * 4 * 4], [2, 3, 4, 4]).unwrap(), 8.0).unwrap()
}

#[test]
fn service_receives_options_and_returns_gradients() {
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
fn service_receives_the_chosen_frames_and_the_columns_of_the_row() {
    let gradient = Tensor::new((0..3 * 48).map(|i| (1 + i / 48) as f32).collect::<Vec<f32>>(), [3, 3, 4, 4]).unwrap();
    let scored = || (200, "", frame_of(json!({ "score": 0.25 }), &[("gradient".into(), gradient.clone())]));
    let (url, served) = serve(vec![hello(), (200, "", frame_of(json!({}), &[])), scored(), scored()]);
    let service = HttpConfig { url, timeout: 5.0, ..HttpConfig::default() };
    let service = ScoringService::new(service).unwrap();
    let mut reward = RemoteReward::new("http", service, Frames::Uniform(3), OnMissing::Skip).unwrap();
    let video = |frames: usize| Video::new(Tensor::zeros([frames, 3, 4, 4]), 8.0).unwrap();
    let mut target = reward.prepare(&video(5)).unwrap();
    target.columns = std::sync::Arc::new([("answer".to_string(), json!({ "count": 2 }))].into());
    let mut pulled = |frames: usize, target: &Target| {
        let pullback = reward.score(&video(frames), "", target, Grad::Record).unwrap().1.unwrap();
        let gradient = pullback.pull(&Tensor::scalar(2.0)).unwrap();
        assert_eq!(gradient.shape(), [frames, 3, 4, 4]);
        gradient.f32s().unwrap().chunks(48).map(|frame| frame[0]).collect::<Vec<f32>>()
    };
    // The frames 0, 2 and 4; of two frames 0, 1 and 1.
    assert_eq!(pulled(5, &target), [2.0, 0.0, 4.0, 0.0, 6.0]);
    assert_eq!(pulled(2, &Target::default()), [2.0, 10.0]);
    let asked = served.join().unwrap();
    let shapes: Vec<&Json> = asked[1..].iter().map(|header| &header["shapes"][0]).collect();
    assert_eq!(asked[2]["columns"], json!({ "answer": { "count": 2 } }));
    assert!(asked[3].get("columns").is_none());
    assert!(shapes.iter().all(|shape| **shape == json!([3, 3, 4, 4])), "{shapes:?}");
    let none = HttpConfig { url: "http://127.0.0.1:1".into(), ..HttpConfig::default() };
    let none = RemoteReward::new("http", ScoringService::new(none).unwrap(), Frames::Every(0), OnMissing::Skip);
    assert!(none.err().unwrap().to_string().contains("reward.frames"));
}

#[test]
fn service_errors_name_the_cause() {
    let cases: [(Answers, &str); 5] = [
        (vec![(404, "", b"no such path".to_vec())], "status 404: no such path"),
        (vec![(200, "", b"<html>hello</html>".to_vec())], "<html>hello</html>"),
        (vec![(500, "", vec![]), (500, "", b"out of memory".to_vec())], "(attempts: 2): status 500: out of memory"),
        (vec![(429, "Retry-After: 30\r\n", vec![])], "again within 1 s"),
        (vec![(200, "", frame_of(json!({ "error": "no weights" }), &[]))], "no weights"),
    ];
    for (answers, part) in cases {
        let (url, served) = serve(answers);
        let told = reward(&url, |c| (c.retries, c.busy_timeout) = (1, 1.0)).map(drop).unwrap_err();
        let told = roll_core::one_line(&told);
        assert!(told.contains(part) && told.contains(&url), "{part}: {told}");
        served.join().unwrap();
    }
}

/// Starts to answer a request and repeats `more` until the client closes the connection. The thread returns the number
/// of bytes that were sent.
fn serve_on_and_on(head: &'static str, more: Vec<u8>, pause: Duration) -> (String, JoinHandle<usize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/score", listener.local_addr().unwrap());
    let thread = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let mut line = String::new();
        while reader.read_line(&mut line).unwrap() > 2 {
            line.clear();
        }
        frame::read::<Json>(&mut reader, usize::MAX).unwrap();
        let mut sent = 0;
        let _ = stream.write_all(head.as_bytes());
        while stream.write_all(&more).is_ok() {
            sent += more.len();
            std::thread::sleep(pause);
        }
        sent
    });
    (url, thread)
}

#[test]
fn endless_answer_is_rejected_at_the_limit() {
    // A chunked answer whose frame promises more than a call can need, and one that is not a frame.
    let promise = br#"{"name":"x","tensors":[{"name":"t","dtype":"u8","shape":[2000000000]}]}"#;
    let mut frame = b"ROLL".to_vec();
    frame.extend((promise.len() as u32).to_le_bytes());
    frame.extend(promise);
    frame.extend(vec![0; (1 << 20) - frame.len()]);
    let mut chunk = b"100000\r\n".to_vec();
    chunk.extend(frame);
    chunk.extend(b"\r\n");
    let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    for (more, part) in [(chunk, "too large"), (b"11\r\nLa la la la la la\r\n".repeat(1000), "should begin")] {
        let (url, served) = serve_on_and_on(head, more, Duration::ZERO);
        let told = roll_core::one_line(&reward(&url, |c| c.retries = 0).map(drop).unwrap_err());
        assert!(told.contains(part) && told.contains("(attempts: 1)"), "{told}");
        let taken = served.join().unwrap();
        assert!(taken < 64 << 20, "{taken} bytes");
    }
}

#[test]
fn slow_answer_times_out() {
    let begun = Instant::now();
    for head in ["HTTP/1.1 200 OK\r\nX-Slow: ", "HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\nROLL\x7f\x00\x00\x00"]
    {
        let (url, served) = serve_on_and_on(head, b"X".to_vec(), Duration::from_millis(50));
        let told = reward(&url, |c| (c.retries, c.timeout) = (0, 0.4)).map(drop).unwrap_err();
        assert!(roll_core::one_line(&told).contains("timeout"), "{told}");
        served.join().unwrap();
    }
    assert!(begun.elapsed() < Duration::from_secs(10));
}

#[test]
fn redirects_are_not_followed() {
    let elsewhere = TcpListener::bind("127.0.0.1:0").unwrap();
    elsewhere.set_nonblocking(true).unwrap();
    let place = elsewhere.local_addr().unwrap();
    for (status, to) in
        [(302, format!("http://{place}/")), (307, format!("http://{place}/")), (308, "file:///etc/passwd".into())]
    {
        let header: &'static str = Box::leak(format!("Location: {to}\r\n").into_boxed_str());
        let (url, served) = serve(vec![(status, header, vec![])]);
        let told = reward(&url, |c| c.token_env = Some("PATH".into())).map(drop).unwrap_err();
        let told = roll_core::one_line(&told);
        assert!(told.contains(&format!("status {status}")) && told.contains(&to), "{told}");
        assert!(!told.contains(&std::env::var("PATH").unwrap()), "{told}");
        served.join().unwrap();
        assert_eq!(elsewhere.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    }
    let told = reward("http://user:secret@127.0.0.1:1/", |_| ()).map(drop).unwrap_err().to_string();
    assert!(told.contains("reward.token_env") && !told.contains("secret"), "{told}");
}

#[test]
fn unreachable_and_missing_address_are_errors() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let told = reward(&url, |c| (c.retries, c.start_timeout) = (0, 1e-9)).map(drop).unwrap_err();
    assert!(roll_core::one_line(&told).contains("(attempts: 1)"));
    for wrong in ["", "example.org/score", "ftp://example.org", "https://", "http:///score", "http://a b/"] {
        let told = reward(wrong, |_| ()).map(drop).unwrap_err().to_string();
        assert!(told.contains("reward.url") && told.contains("http://") && told.contains(wrong), "{wrong}: {told}");
    }
}

#[test]
fn waits_for_a_service_that_starts_late() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let late = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(700));
        let listener = TcpListener::bind(address).unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let mut line = String::new();
        while reader.read_line(&mut line).unwrap() > 2 {
            line.clear();
        }
        frame::read::<Json>(&mut reader, usize::MAX).unwrap();
        let (_, _, body) = hello();
        write!(stream, "HTTP/1.1 200 X\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len()).unwrap();
        stream.write_all(&body).unwrap();
    });
    assert_eq!(reward(&format!("http://{address}"), |c| c.retries = 0).unwrap().name(), "served");
    late.join().unwrap();
}

#[test]
fn https_address_uses_tls() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("HTTPS://{}/score", listener.local_addr().unwrap());
    let served = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut first = [0; 3];
        std::io::Read::read_exact(&mut stream, &mut first).unwrap();
        // This answer is not TLS.
        stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").unwrap();
        first
    });
    let told = reward(&url, |c| c.retries = 0).map(drop).unwrap_err();
    let told = roll_core::one_line(&told);
    assert!(told.contains("(attempts: 1)") && told.contains(&url), "{told}");
    // The first bytes of a TLS 1 handshake.
    assert_eq!(served.join().unwrap()[..2], [22, 3]);
}

#[test]
fn hanging_service_times_out() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let told = reward(&url, |c| (c.retries, c.timeout) = (0, 0.3)).map(drop).unwrap_err();
    let told = roll_core::one_line(&told);
    assert!(told.contains("timeout"), "{told}");
}
