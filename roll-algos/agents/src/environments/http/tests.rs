//! Services that work, are busy, fail or answer nonsense: each is a listener with the test's answers.
#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use roll_core::{Environment, Split};

use super::*;

const BEGUN: &str = r#"{"observation": "begin", "instructions": "go"}"#;

/// An answer: status, further headers, body. Status 0 closes the connection without an answer.
type Said = (u16, String, String);

fn said(status: u16, body: &str) -> Said {
    (status, String::new(), body.into())
}

/// Reads a request: head and body.
fn request(stream: &TcpStream) -> (String, Value) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let (mut head, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        if let Some(n) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = n.trim().parse().unwrap();
        }
        if line.trim().is_empty() {
            break;
        }
        head += &line;
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    (head, serde_json::from_slice(&body).unwrap())
}

/// Starts a service on its own port, which ends after the last answer. The thread returns the requests.
fn serve(answers: Vec<Said>) -> (String, JoinHandle<Vec<(String, Value)>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/play", listener.local_addr().unwrap());
    let thread = std::thread::spawn(move || {
        let answer = |(status, header, body): Said| {
            let (mut stream, _) = listener.accept().unwrap();
            let asked = request(&stream);
            if status != 0 {
                let length = body.len();
                let head =
                    format!("HTTP/1.1 {status} X\r\nContent-Length: {length}\r\n{header}Connection: close\r\n\r\n");
                stream.write_all((head + &body).as_bytes()).unwrap();
            }
            asked
        };
        answers.into_iter().map(answer).collect()
    });
    (url, thread)
}

fn world(url: &str, change: impl FnOnce(&mut HttpOptions)) -> Result<Http> {
    let mut options = HttpOptions { url: url.into(), timeout: 5.0, ..HttpOptions::default() };
    change(&mut options);
    Http::new(options)
}

fn message<T>(result: Result<T>) -> String {
    result.map(drop).unwrap_err().to_string()
}

#[test]
fn an_episode_crosses_as_json_with_the_token_and_its_session() {
    let left = r#"{"observation": "1", "reward": 0.5, "terminated": true, "solved": true}"#;
    let odd = r#"{"error": "no such thing"}"#;
    let (url, served) = serve(vec![said(200, BEGUN), said(200, left), said(200, BEGUN), said(200, odd)]);
    // PATH is used as the token because every process has it.
    let mut world = world(&url, |o| o.token_env = Some("PATH".into())).unwrap();
    assert_eq!(world.reset(7).unwrap().text, "begin");
    assert_eq!((world.instructions().as_str(), world.solved()), ("go", None));
    let step = world.step("\"quoted\"\nlines √").unwrap();
    assert_eq!((step.observation.text.as_str(), step.reward, step.terminated, step.valid), ("1", 0.5, true, true));
    assert_eq!(world.solved(), Some(true));
    world.reset(8).unwrap();
    assert!(message(world.step("x")).contains("it reports: no such thing"));
    let asked = served.join().unwrap();
    assert_eq!(asked[0].1["reset"], serde_json::json!({"seed": 7, "split": "train", "number": 0}));
    assert_eq!(asked[1].1["step"], serde_json::json!({"action": "\"quoted\"\nlines √"}));
    let turns: Vec<&Value> = asked.iter().map(|(_, body)| &body["turn"]).collect();
    assert_eq!(turns, [0, 1, 0, 1]);
    let token = format!("bearer {}", std::env::var("PATH").unwrap()).to_lowercase();
    assert!(asked.iter().all(|(head, body)| {
        body["session"] == asked[0].1["session"]
            && head.starts_with("POST /play")
            && head.to_lowercase().contains(&token)
    }));
    assert_eq!(asked[0].1["session"].as_str().unwrap().len(), 16);
}

#[test]
fn one_connection_serves_an_episode_and_its_end_is_told_once() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/play", listener.local_addr().unwrap());
    let answers =
        [BEGUN, r#"{"observation": "1", "reward": 0, "terminated": false}"#, r#"{"error": "what is close?"}"#];
    let served = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let answer = |body: &str| {
            let asked = request(&stream).1;
            stream
                .write_all(format!("HTTP/1.1 200 X\r\nContent-Length: {}\r\n\r\n{body}", body.len()).as_bytes())
                .unwrap();
            asked
        };
        answers.map(answer)
    });
    let mut world = world(&url, |_| ()).unwrap();
    world.enter(Split::Validation, 41).unwrap();
    world.reset(7).unwrap();
    world.step("left").unwrap();
    // A service that does not know it may say so.
    world.leave().unwrap();
    let asked = served.join().unwrap();
    assert_eq!(asked[0]["reset"]["number"], 41);
    assert_eq!((&asked[2]["close"], &asked[2]["turn"]), (&true.into(), &1.into()));
    assert_eq!(asked[2]["session"], asked[0]["session"]);
    // Nothing is sent without an episode: the listener is gone.
    world.leave().unwrap();
    assert!(message(world.step("left")).contains("without an episode"));
}

#[test]
fn a_reset_is_repeated_and_an_action_never_twice() {
    // A closed connection without an answer and a 500 may each have had an effect.
    for failure in [said(0, ""), said(500, "out of ice")] {
        let (url, served) = serve(vec![failure.clone(), said(200, BEGUN), failure]);
        let mut world = world(&url, |_| ()).unwrap();
        world.reset(3).unwrap();
        let problem = message(world.step("left"));
        assert!(problem.contains(&url), "{problem}");
        // The result of the action is unknown, so the episode is over.
        assert!(message(world.step("left")).contains("without an episode"));
        let asked = served.join().unwrap();
        assert_eq!(asked.iter().filter(|(_, body)| body.get("step").is_some()).count(), 1);
        assert_eq!(asked[0].1, asked[1].1);
    }
}

#[test]
fn busy_service_is_asked_again() {
    let busy = |status| (status, "Retry-After: 0\r\n".to_string(), String::new());
    let done = said(200, r#"{"observation": "1", "reward": 0, "terminated": false}"#);
    let (url, served) = serve(vec![busy(503), said(200, BEGUN), busy(429), done]);
    let mut one = world(&url, |_| ()).unwrap();
    one.reset(0).unwrap();
    one.step("left").unwrap();
    assert_eq!(served.join().unwrap().len(), 4);
    let (url, served) = serve(vec![(429, "Retry-After: 30\r\n".into(), String::new())]);
    let problem = message(world(&url, |o| o.busy_timeout = 1.0).unwrap().reset(0));
    assert!(problem.contains("within 1 s"), "{problem}");
    served.join().unwrap();
}

#[test]
fn action_is_sent_after_a_refused_connection() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let url = format!("http://{address}/");
    let answer = |listener: &TcpListener, body: &str| {
        let (mut stream, _) = listener.accept().unwrap();
        let asked = request(&stream).1;
        let head = format!("HTTP/1.1 200 X\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
        stream.write_all((head + body).as_bytes()).unwrap();
        asked
    };
    std::thread::scope(|scope| {
        // The listener ends with its first answer.
        let first = scope.spawn(move || answer(&listener, BEGUN));
        let mut one = world(&url, |o| o.retries = 4).unwrap();
        one.reset(0).unwrap();
        first.join().unwrap();
        let late = scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(700));
            answer(&TcpListener::bind(address).unwrap(), r#"{"observation": "1", "reward": 0, "terminated": true}"#)
        });
        assert!(one.step("left").unwrap().terminated);
        assert_eq!(late.join().unwrap()["step"]["action"], "left");
    });
    let problem = message(world(&url, |o| o.retries = 0).unwrap().reset(0));
    assert!(problem.contains(&url), "{problem}");
}

#[test]
fn what_a_service_does_wrong_is_said() {
    let long = "x".repeat(5000);
    for (answer, word) in [
        (said(404, "no such path"), "status 404: no such path"),
        (said(200, "<html>hello</html>"), "<html>hello</html>"),
        (said(200, "[1]"), "expected"),
        (said(200, r#"{"observation": 3}"#), "observation"),
        (said(200, r#"{"reward": 1}"#), "no `observation`"),
        (said(200, &long), "more than 4096 bytes"),
        (said(200, &"[".repeat(4000)), "is not valid"),
    ] {
        let (url, served) = serve(vec![answer]);
        let problem = message(world(&url, |o| (o.retries, o.max_answer_bytes) = (0, 4096)).unwrap().reset(0));
        assert!(problem.contains(word) && problem.contains(&url), "{word}: {problem}");
        served.join().unwrap();
    }
}

#[test]
fn service_that_floods_drips_or_hangs_times_out() {
    for (head, pause) in [
        ("HTTP/1.1 200 X\r\nConnection: close\r\n\r\n", Duration::ZERO),
        ("HTTP/1.1 200 X\r\nContent-Length: 100000000000\r\n\r\n", Duration::ZERO),
        ("HTTP/1.1 200 X\r\nContent-Length: 1000\r\n\r\n", Duration::from_millis(50)),
        ("HTTP/1.1 200 X\r\nX-Header: ", Duration::ZERO),
        ("", Duration::from_millis(50)),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        let served = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
            request(&stream);
            let piece = if pause.is_zero() { vec![b' '; 1 << 16] } else { vec![b' '] };
            let (begun, mut open) = (Instant::now(), stream.write_all(head.as_bytes()).is_ok());
            while open && begun.elapsed() < Duration::from_secs(20) {
                std::thread::sleep(pause);
                open = head.is_empty() || stream.write_all(&piece).is_ok();
                open &= !head.is_empty() || begun.elapsed() < Duration::from_secs(2);
            }
        });
        let begun = Instant::now();
        let problem = message(world(&url, |o| (o.retries, o.timeout) = (0, 0.5)).unwrap().reset(0));
        assert!(begun.elapsed() < Duration::from_secs(10) && problem.contains(&url), "{problem}");
        served.join().unwrap();
    }
}

#[test]
fn a_service_cannot_send_actions_or_token_elsewhere() {
    let elsewhere = TcpListener::bind("127.0.0.1:0").unwrap();
    elsewhere.set_nonblocking(true).unwrap();
    let place = elsewhere.local_addr().unwrap();
    for (status, to) in
        [(302, format!("http://{place}/")), (307, format!("http://{place}/")), (308, "file:///etc/passwd".into())]
    {
        let (url, served) = serve(vec![(status, format!("Location: {to}\r\n"), String::new())]);
        let problem = message(world(&url, |o| o.token_env = Some("PATH".into())).unwrap().reset(0));
        assert!(problem.contains(&format!("status {status}")) && problem.contains(&to), "{problem}");
        assert!(!problem.contains(&std::env::var("PATH").unwrap()), "{problem}");
        served.join().unwrap();
        assert_eq!(elsewhere.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    }
}

#[test]
fn rejects_options_without_an_address() {
    for wrong in ["", "example.org/play", "ftp://example.org", "https://", "http:///play", "http://a b/"] {
        let problem = message(world(wrong, |_| ()));
        assert!(problem.contains("env.url") && problem.contains("http://") && problem.contains(wrong), "{problem}");
    }
    let problem = message(world("http://user:secret@127.0.0.1:1/", |_| ()));
    assert!(problem.contains("env.token_env") && !problem.contains("secret"), "{problem}");
    let here = "http://127.0.0.1:1/";
    assert!(message(world(here, |o| o.timeout = f64::NAN)).contains("env.timeout"));
    assert!(message(world(here, |o| o.busy_timeout = 0.0)).contains("env.busy_timeout"));
    assert!(message(world(here, |o| o.max_answer_bytes = 0)).contains("env.max_answer_bytes"));
    assert!(message(world(here, |o| o.token_env = Some("NO_SUCH_TOKEN".into()))).contains("NO_SUCH_TOKEN"));
}

#[test]
fn a_service_that_does_not_answer_the_end_of_an_episode_is_waited_for_two_seconds() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let mut world = world(&url, |o| (o.retries, o.timeout) = (0, 60.0)).unwrap();
    let served = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        request(&stream);
        let head = format!("HTTP/1.1 200 X\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", BEGUN.len());
        stream.write_all((head + BEGUN).as_bytes()).unwrap();
        let (stream, _) = listener.accept().unwrap();
        assert_eq!(request(&stream).1["close"], true);
        stream
    });
    world.reset(0).unwrap();
    let begun = Instant::now();
    world.leave().unwrap();
    let waited = begun.elapsed().as_secs_f64();
    assert!((1.5..20.0).contains(&waited), "{waited} s");
    served.join().unwrap();
}
