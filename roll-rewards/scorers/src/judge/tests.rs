//! Services that answer well, are busy, fail or answer nonsense: each is a listener with the test's answers.
#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use roll_core::Tensor;

use super::*;

/// An answer: status, further headers, body.
pub(super) type Reply = (u16, &'static str, Vec<u8>);

/// A service that runs until the test ends.
pub(super) struct FakeService {
    address: SocketAddr,
    requests: Arc<Mutex<Vec<(String, Json)>>>,
}

impl FakeService {
    /// `answer` receives the number of earlier requests and the request.
    pub(super) fn start(answer: impl FnMut(usize, &Json) -> Reply + Send + 'static) -> Self {
        Self::listen(TcpListener::bind("127.0.0.1:0").unwrap(), answer)
    }

    fn listen(listener: TcpListener, mut answer: impl FnMut(usize, &Json) -> Reply + Send + 'static) -> Self {
        let address = listener.local_addr().unwrap();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let log = requests.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut reader = BufReader::new(stream.try_clone().unwrap());
                let (mut head, mut line) = (String::new(), String::new());
                while reader.read_line(&mut line).unwrap() > 2 {
                    head += &std::mem::take(&mut line);
                }
                let length = head.to_lowercase().lines().find_map(|l| l.strip_prefix("content-length: ")?.parse().ok());
                let mut body = vec![0; length.unwrap()];
                reader.read_exact(&mut body).unwrap();
                let request: Json = serde_json::from_slice(&body).unwrap();
                let earlier = log.lock().unwrap().len();
                log.lock().unwrap().push((head, request.clone()));
                let (status, headers, body) = answer(earlier, &request);
                let head = format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\nConnection: close\r\n", body.len());
                // The client closes the connection of an answer that is too long.
                let _ = write!(stream, "{head}{headers}\r\n").and_then(|()| stream.write_all(&body));
            }
        });
        Self { address, requests }
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}/v1", self.address)
    }

    pub(super) fn count(&self) -> usize {
        self.requests.lock().unwrap().len()
    }
}

/// An answer with this text, and these log-probabilities of its only token.
pub(super) fn reply(text: &str, top: &[(&str, f64)]) -> Reply {
    let top: Vec<Json> = top.iter().map(|(token, p)| json!({ "token": token, "logprob": p.ln() })).collect();
    let content = json!([{ "token": text, "logprob": -0.1, "top_logprobs": top }]);
    let logprobs = if top.is_empty() { Json::Null } else { json!({ "content": content }) };
    let choice = json!({ "index": 0, "message": { "role": "assistant", "content": text }, "logprobs": logprobs });
    (200, "", json!({ "choices": [choice] }).to_string().into_bytes())
}

fn judge(urls: &[String], change: impl FnOnce(&mut JudgeConfig)) -> Result<Judge> {
    let mut config = JudgeConfig {
        url: Texts::Several(urls.to_vec()),
        model: "eyes".into(),
        questions: Texts::Several(vec!["Is it {prompt}?".into()]),
        timeout: 5.0,
        start_timeout: 1e-9,
        cache_dir: None,
        ..JudgeConfig::default()
    };
    change(&mut config);
    Judge::new(config, &BuildContext::new("flex"))
}

/// Nine frames, each of one colour: more and more red, no green, all blue.
fn video() -> Video {
    let frames = (0..9).flat_map(|t| [t as f32 / 4.0 - 1.0, -1.0, 1.0].into_iter().flat_map(|v| [v; 4 * 6])).collect();
    Video::new(Tensor::new(frames, [9, 3, 4, 6]).unwrap(), 8.0).unwrap()
}

fn outcome(judge: &mut Judge, prompt: &str) -> Result<Score> {
    let (score, pullback) = judge.score(&video(), prompt, &Target::default(), Grad::Record)?;
    assert!(pullback.is_none());
    Ok(score)
}

fn value(judge: &mut Judge) -> f64 {
    outcome(judge, "sharp").unwrap().value().unwrap()
}

fn failure(judge: &mut Judge) -> String {
    outcome(judge, "sharp").unwrap_err().chain()
}

fn missing(judge: &mut Judge) -> String {
    match outcome(judge, "sharp").unwrap() {
        Score::Missing { reason } => reason,
        score => panic!("{score:?}"),
    }
}

fn assert_near(found: f64, expected: f64) {
    assert!((found - expected).abs() < 1e-12, "{found}, expected {expected}");
}

#[test]
fn score_is_the_mean_probability_of_yes() {
    let service = FakeService::start(|_, request| {
        let text = request["messages"][0]["content"][3]["text"].as_str().unwrap();
        match text.contains("a red car") {
            true => reply("yes", &[(" Yes", 0.5), ("yes", 0.1), ("NO", 0.2), ("maybe", 0.1)]),
            // The first token has no letter.
            false => (200, "", {
                let top = |token: &str| json!({ "token": token, "logprob": 0.25f64.ln() });
                let words = json!([top("No"), top(" no"), top("Yes"), top("yes"), top("\"")]);
                let tokens = json!([
                    { "token": "**", "top_logprobs": [top("Yes")] }, { "token": "No", "top_logprobs": words }
                ]);
                let message = json!({ "content": "**No**" });
                let choice = json!({ "message": message, "logprobs": { "content": tokens } });
                json!({ "choices": [choice], "usage": { "total_tokens": 40 } }).to_string().into()
            }),
        }
    });
    let questions = Texts::Several(vec!["Is this {prompt}?".into(), "Is it sharp?".into()]);
    let mut judge = judge(&[service.url() + "/"], |c| {
        (c.frames, c.questions, c.token_env, c.label) = (3, questions, Some("PATH".into()), "taste".into());
    })
    .unwrap();
    assert!(!judge.differentiable() && judge.is_elsewhere() && judge.measures().label == "taste");
    let Score::Value { value, details } = outcome(&mut judge, "a red car").unwrap() else { panic!("missing") };
    assert_near(details["question_1"], 0.75);
    assert_near(details["question_2"], 0.5);
    assert_near(value, 0.625);
    assert_eq!((details["answered_from_cache"], details["requests"], details["tokens"]), (0.0, 2.0, 40.0));
    assert_eq!(details.len(), 5);
    for (head, request) in service.requests.lock().unwrap().iter() {
        assert!(head.starts_with("POST /v1/chat/completions ") && head.contains(&std::env::var("PATH").unwrap()));
        assert_eq!((&request["model"], &request["temperature"]), (&json!("eyes"), &json!(0)));
        assert_eq!((&request["logprobs"], &request["top_logprobs"]), (&json!(true), &json!(20)));
        let content = request["messages"][0]["content"].as_array().unwrap();
        let reds: Vec<u8> = content[..3].iter().map(red).collect();
        assert_eq!((reds, content.len()), (vec![0, 128, 255], 4));
        let text = content[3]["text"].as_str().unwrap();
        assert!(
            text.starts_with("These are 3 frames") && text.ends_with("? Answer with one word, yes or no."),
            "{text}"
        );
    }
}

/// The red of a picture of 6 x 4 pixels.
fn red(part: &Json) -> u8 {
    let url = part["image_url"]["url"].as_str().unwrap();
    let png = STANDARD.decode(url.strip_prefix("data:image/png;base64,").unwrap()).unwrap();
    let mut reader = png::Decoder::new(std::io::Cursor::new(png)).read_info().unwrap();
    let mut rgb = vec![0; reader.output_buffer_size().unwrap()];
    let info = reader.next_frame(&mut rgb).unwrap();
    assert_eq!((info.width, info.height, rgb.len()), (6, 4, 72));
    assert!(rgb.chunks(3).all(|pixel| pixel == [rgb[0], 0, 255]), "{rgb:?}");
    rgb[0]
}

#[test]
fn a_service_without_log_probabilities_is_asked_for_words() {
    for status in [400, 422] {
        let service = FakeService::start(move |_, request| match request.get("logprobs") {
            Some(_) => (status, "", b"logprobs is not supported".to_vec()),
            None => reply("**Yes**, it is.", &[]),
        });
        let mut judge = judge(&[service.url()], |_| ()).unwrap();
        assert_eq!([value(&mut judge), value(&mut judge)], [1.0; 2]);
        assert_eq!(service.count(), 3, "the second question has no log-probabilities from the start");
    }
    // They are requested, and not sent.
    let service = FakeService::start(|_, _| reply("no", &[]));
    assert_eq!(value(&mut judge(&[service.url()], |_| ()).unwrap()), 0.0);
    // The service rejects more than the log-probabilities.
    let service = FakeService::start(|_, _| (400, "", b"no such model".to_vec()));
    let problem = failure(&mut judge(&[service.url()], |_| ()).unwrap());
    assert!(problem.contains("status 400: no such model") && problem.contains(&service.url()), "{problem}");
    assert_eq!(service.count(), 2);
}

#[test]
fn numbers_are_mapped_from_their_range() {
    let kind = AnswerKind::Number([-1.0, 9.0]);
    let score = |text: &str| kind.score(&reply(text, &[]).2);
    for (text, expected) in
        [("4", 0.5), (" **-1**", 0.0), ("Score: 9.", 1.0), ("1.5 of 9", 0.25), (".5 or 3", 0.15), ("-.5", 0.05)]
    {
        assert_near(score(text).unwrap(), expected);
    }
    for invalid in ["9.01", "-2", "ten", "", "1.2.3", "99999999999999999999", "NaN", "inf"] {
        let problem = score(invalid).unwrap_err();
        assert!(problem.contains("one number from -1 to 9") && problem.contains(&format!("`{invalid}`")), "{problem}");
    }
    let service = FakeService::start(|_, request| {
        assert!(request.get("logprobs").is_none());
        reply("7", &[])
    });
    let change = |range| move |c: &mut JudgeConfig| c.answer = AnswerKind::Number(range);
    assert_near(value(&mut judge(&[service.url()], change([0.0, 10.0])).unwrap()), 0.7);
    for range in [[1.0, 1.0], [f64::NAN, 1.0], [0.0, f64::INFINITY], [f64::MIN, f64::MAX]] {
        let problem = judge(&[service.url()], change(range)).map(drop).unwrap_err().to_string();
        assert!(problem.contains("reward.answer"), "{problem}");
    }
}

#[test]
fn an_invalid_answer_is_asked_again_and_then_missing() {
    let service = FakeService::start(|earlier, _| match earlier {
        0 => reply("As a language model, I see colours.", &[("As", 0.9), ("I", 0.1)]),
        _ => reply("Yes", &[("Yes", 0.9), ("No", 0.1)]),
    });
    let Score::Value { value, details } = outcome(&mut judge(&[service.url()], |_| ()).unwrap(), "").unwrap() else {
        panic!("missing")
    };
    assert_near(value, 0.9);
    assert_eq!((details["requests"], details.get("tokens")), (2.0, None));
    let huge = [br#"{"choices":[{"message":{"content":""#.to_vec(), vec![b'x'; 2 << 20]].concat();
    let cases: [(Vec<u8>, &str); 9] = [
        (reply("As a language model", &[]).2, "found `As a language model`"),
        (reply("Maybe", &[("maybe", 0.9)]).2, "found `Maybe`"),
        (reply("a\u{1b}[2J\u{7}b\r\nc", &[]).2, "found `a [2J b c`"),
        (b"<html>\x1b[31mhello".to_vec(), "found `<html> [31mhello`"),
        (huge, "found `{\"choices\":[{\"message\":{\"content\":\"xxx"),
        ([b"[".repeat(1 << 19), b"]".repeat(1 << 19)].concat(), "found `[[[["),
        (br#"{"choices": {"0": 1}}"#.to_vec(), "choices"),
        (br#"{"choices":[{"message":{"content":null},"logprobs":{"content":[{"token":3},7]}}]}"#.to_vec(), "null"),
        (Vec::new(), "found ``"),
    ];
    for (body, part) in cases {
        let service = FakeService::start(move |_, _| (200, "", body.clone()));
        let reason = missing(&mut judge(&[service.url()], |c| c.retries = 1).unwrap());
        assert!(reason.contains("question 1: expected one word, yes or no") && reason.contains(part), "{reason}");
        assert!(reason.len() < 500 && !reason.contains(char::is_control), "{reason}");
        assert_eq!(service.count(), 2, "{part}");
    }
}

#[test]
fn hostile_log_probabilities_have_a_score_or_none() {
    let score = |top: Json| {
        let tokens = json!([{ "token": "Yes", "top_logprobs": top }]);
        let choice = json!({ "message": { "content": "Yes" }, "logprobs": { "content": tokens } });
        AnswerKind::Yes.score(json!({ "choices": [choice] }).to_string().as_bytes())
    };
    let token = |token: &str, logprob: Json| json!({ "token": token, "logprob": logprob });
    assert_eq!(score(json!([token("yes", 1e308.into()), token("no", 0.into())])), Ok(0.5));
    assert_eq!(score(json!([token("yes", (-1e308).into()), token("no", (-9999).into())])).map_err(drop), Err(()));
    assert_eq!(score(json!([token("yes", "0".into()), token("no", Json::Null), 3])).map_err(drop), Err(()));
    // Without any, the word counts.
    assert_eq!(score(json!([])), Ok(1.0));
}

#[test]
fn a_service_without_an_answer_is_an_error() {
    let slow = TcpListener::bind("127.0.0.1:0").unwrap();
    let slow_url = format!("http://{}/v1", slow.local_addr().unwrap());
    let begun = Instant::now();
    let problem = failure(&mut judge(std::slice::from_ref(&slow_url), |c| (c.retries, c.timeout) = (1, 0.2)).unwrap());
    for part in [&slow_url, "`reward.url`", "(attempts: 2)", "timeout"] {
        assert!(problem.contains(part), "no {part} in {problem}");
    }
    assert!(begun.elapsed() < Duration::from_secs(5));
    for (status, part) in [(500, "(attempts: 2): status 500: hm m"), (404, "(attempts: 1): status 404: hm m")] {
        let service = FakeService::start(move |_, _| (status, "", b"hm\x1bm".to_vec()));
        let problem = failure(&mut judge(&[service.url()], |c| c.retries = 1).unwrap());
        assert!(problem.contains(part) && problem.contains(&service.url()), "{problem}");
    }
}

#[test]
fn a_busy_service_is_asked_again_after_its_delay() {
    let service = FakeService::start(|earlier, _| match earlier {
        0 | 1 => (429, "Retry-After: 0.3\r\n", Vec::new()),
        _ => reply("Yes", &[("Yes", 1.0)]),
    });
    let begun = Instant::now();
    assert_eq!(value(&mut judge(&[service.url()], |c| c.retries = 0).unwrap()), 1.0);
    assert!(begun.elapsed() >= Duration::from_millis(600));
    let service = FakeService::start(|_, _| (503, "Retry-After: 30\r\n", Vec::new()));
    let begun = Instant::now();
    let problem = failure(&mut judge(&[service.url()], |c| c.busy_timeout = 1.0).unwrap());
    assert!(begun.elapsed() < Duration::from_secs(5));
    assert!(
        problem.contains("again within 1 s (`reward.busy_timeout`)") && problem.contains(&service.url()),
        "{problem}"
    );
}

#[test]
fn a_busy_address_is_waited_for_without_asking_one_that_failed() {
    let slow = TcpListener::bind("127.0.0.1:0").unwrap();
    let slow_url = format!("http://{}/v1", slow.local_addr().unwrap());
    let service = FakeService::start(|earlier, _| match earlier {
        0..5 => (429, "Retry-After: 0.1\r\n", Vec::new()),
        _ => reply("Yes", &[("Yes", 1.0)]),
    });
    let mut judge = judge(&[service.url(), slow_url], |c| (c.timeout, c.retries) = (0.3, 0)).unwrap();
    assert_eq!((value(&mut judge), service.count()), (1.0, 6));
    slow.set_nonblocking(true).unwrap();
    assert_eq!(slow.incoming().map_while(|stream| stream.ok()).count(), 1);
}

#[test]
fn an_endless_answer_is_read_up_to_a_limit() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    let sent = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n");
        (0..256).take_while(|_| stream.write_all(&[b' '; 1 << 18]).is_ok()).count()
    });
    assert!(missing(&mut judge(&[url], |c| c.retries = 0).unwrap()).contains("found ``"));
    let sent = sent.join().unwrap();
    assert!(sent < 64, "{sent} times 256 KiB");
}

#[test]
fn addresses_take_turns_and_those_that_fail_are_passed_over() {
    let dead = TcpListener::bind("127.0.0.1:0").unwrap();
    let dead_url = format!("http://{}/v1", dead.local_addr().unwrap());
    drop(dead);
    let slow = TcpListener::bind("127.0.0.1:0").unwrap();
    let slow_url = format!("http://{}/v1", slow.local_addr().unwrap());
    let yes = || FakeService::start(|_, _| reply("Yes", &[("Yes", 1.0)]));
    let (first, second) = (yes(), yes());
    let busy = FakeService::start(|_, _| (429, "Retry-After: 30\r\n", Vec::new()));
    let urls = [dead_url, slow_url, busy.url(), first.url(), second.url()];
    let mut judge = judge(&urls, |c| (c.timeout, c.retries, c.busy_timeout) = (0.5, 0, 1.0)).unwrap();
    let begun = Instant::now();
    for _ in 0..20 {
        assert_eq!(value(&mut judge), 1.0);
    }
    assert!(begun.elapsed() < Duration::from_secs(3), "the slow address is asked once");
    assert_eq!((busy.count(), first.count() + second.count()), (1, 20));
    assert!(first.count() >= 8 && second.count() >= 8, "{} and {}", first.count(), second.count());
}

#[test]
fn waits_for_a_service_that_starts_late() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(700));
        let listener = TcpListener::bind(address).unwrap();
        FakeService::listen(listener, |_, _| reply("Yes", &[]));
    });
    let change = |c: &mut JudgeConfig| (c.retries, c.start_timeout) = (0, 20.0);
    assert_eq!(value(&mut judge(&[format!("http://{address}/v1")], change).unwrap()), 1.0);
}

#[test]
fn cached_answers_need_no_request() {
    let cache = tempfile::tempdir().unwrap();
    // The same request has another answer each time.
    let service = FakeService::start(|earlier, _| reply("Yes", &[("Yes", 1.0), ("No", 0.1 * (earlier + 1) as f64)]));
    let open = |url: &str, change: &dyn Fn(&mut JudgeConfig)| {
        judge(&[url.into()], |c| {
            c.cache_dir = Some(cache.path().join("answers").display().to_string());
            c.questions = Texts::Several(vec!["Is it {prompt}?".into(), "Is it sharp?".into()]);
            change(c);
        })
        .unwrap()
    };
    let details = |judge: &mut Judge, prompt: &str| match outcome(judge, prompt).unwrap() {
        Score::Value { value, mut details } => {
            let found = details.remove("answered_from_cache").unwrap();
            assert_eq!(details.remove("requests").unwrap(), 2.0 - 2.0 * found);
            (found, value, details)
        }
        score => panic!("{score:?}"),
    };
    let (found, value, first) = details(&mut open(&service.url(), &|_| ()), "new");
    assert_eq!((found, service.count()), (0.0, 2));
    // The address does not count.
    assert_eq!(details(&mut open("http://127.0.0.1:1/v1", &|_| ()), "new"), (1.0, value, first.clone()));
    let (found, _, old) = details(&mut open(&service.url(), &|_| ()), "old");
    assert_eq!((found, service.count()), (0.5, 3));
    assert!(old["question_2"] == first["question_2"] && old["question_1"] != first["question_1"]);
    let changes: [&dyn Fn(&mut JudgeConfig); 3] =
        [&|c| c.model = "other".into(), &|c| c.frames = 1, &|c| c.cache_dir = None];
    for (i, change) in changes.into_iter().enumerate() {
        assert_eq!(details(&mut open(&service.url(), change), "new").0, 0.0);
        assert_eq!(service.count(), 5 + 2 * i);
    }
    // Damaged files are asked for again, and no unfinished file stays.
    let files: Vec<_> = walk(cache.path());
    assert!(files.len() == 7 && files.iter().all(|file| file.file_name().unwrap().len() == 64), "{files:?}");
    for damage in ["", "1.01", "NaN", "-0.1", "0.5x", "\0", "0.5\n0.5"] {
        files.iter().for_each(|file| std::fs::write(file, damage).unwrap());
        assert_eq!(details(&mut open(&service.url(), &|_| ()), "new").0, 0.0, "{damage}");
        assert_eq!(details(&mut open(&service.url(), &|_| ()), "new").0, 1.0);
    }
}

fn walk(directory: &std::path::Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { walk(&path) } else { vec![path] }).collect()
}

#[test]
fn an_invalid_answer_is_not_kept() {
    let cache = tempfile::tempdir().unwrap();
    let service = FakeService::start(|earlier, _| reply(if earlier == 0 { "Perhaps" } else { "Yes" }, &[]));
    let change = |c: &mut JudgeConfig| {
        (c.retries, c.cache_dir) = (0, Some(cache.path().display().to_string()));
    };
    let mut judge = judge(&[service.url()], change).unwrap();
    assert!(missing(&mut judge).contains("Perhaps"));
    assert_eq!(value(&mut judge), 1.0);
}

#[test]
fn questions_may_be_the_lines_of_a_file() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("questions.txt"), "Is it {prompt}?\r\n\n  Is it sharp?\n").unwrap();
    let context = BuildContext { base_dir: directory.path().into(), ..BuildContext::new("flex") };
    let questions = |option: Texts| read_questions(&option, &context);
    assert_eq!(questions(Texts::One("questions.txt".into())).unwrap(), ["Is it {prompt}?", "Is it sharp?"]);
    let problem = questions(Texts::One("Is it sharp?".into())).unwrap_err().chain();
    assert!(problem.contains("reward.questions") && problem.contains("Is it sharp?"), "{problem}");
    let none = [Texts::One(String::new()), Texts::Several(vec![]), Texts::Several(vec![" ".into()])];
    for option in none.into_iter().chain([Texts::Several(vec!["a".into(); 65])]) {
        let problem = questions(option).unwrap_err().to_string();
        assert!(problem.contains("reward.questions") && problem.contains("1 to 64"), "{problem}");
    }
}

#[test]
fn names_in_braces_are_columns_of_the_row() {
    let columns: Columns = Arc::new([("answer".to_string(), json!("{prompt}")), ("n".to_string(), json!([1]))].into());
    let filled = |question: &str| fill_in(question, "a {n}", &columns);
    let question = "{prompt}: {answer}? {n}, {}, {not a name}, { and {prompt";
    assert_eq!(filled(question).unwrap(), "a {n}: {prompt}? [1], {}, {not a name}, { and {prompt");
    let told = filled("Is it {response}?").unwrap_err().to_string();
    assert!(told.contains("`{response}` names no column") && told.contains("`answer`, `n`"), "{told}");

    let service = FakeService::start(|_, request| {
        let is_asked = request["messages"][0]["content"].to_string().contains("Is it {prompt}?");
        reply(if is_asked { "Yes" } else { "No" }, &[])
    });
    let mut judge = judge(&[service.url()], |c| c.questions = Texts::Several(vec!["Is it {answer}?".into()])).unwrap();
    let target = Target { columns, ..Target::default() };
    assert_eq!(judge.score(&video(), "p", &target, Grad::Skip).unwrap().0.value(), Some(1.0));
    let told = failure(&mut judge);
    assert!(told.contains("reward.questions") && told.contains("which has none"), "{told}");
}

#[test]
fn options_out_of_range_are_named_and_nothing_is_sent() {
    let service = FakeService::start(|_, _| (500, "", Vec::new()));
    let cases: [(&str, &dyn Fn(&mut JudgeConfig)); 11] = [
        ("url", &|c| c.url = Texts::Several(vec![])),
        ("url", &|c| c.url = Texts::One(String::new())),
        ("url", &|c| c.url = Texts::Several(vec![service.url(), "127.0.0.1:8000".into()])),
        ("model", &|c| c.model = String::new()),
        ("token_env", &|c| c.token_env = Some("NO_SUCH_TOKEN".into())),
        ("frames", &|c| c.frames = 0),
        ("frames", &|c| c.frames = 65),
        ("timeout", &|c| c.timeout = 0.0),
        ("busy_timeout", &|c| c.busy_timeout = f64::NAN),
        ("cache_dir", &|c| c.cache_dir = Some(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml/below").into())),
        ("on_missing", &|c| c.on_missing = OnMissing::Value(f64::NAN)),
    ];
    for (key, change) in cases {
        let problem = judge(&[service.url()], change).map(drop).unwrap_err().chain();
        assert!(problem.contains(&format!("reward.{key}")), "{key}: {problem}");
    }
    let mut judge = judge(&[service.url()], |_| ()).unwrap();
    judge.prepare(&video()).unwrap();
    let none = Video::new(Tensor::zeros([0, 3, 4, 6]), 8.0).unwrap();
    let (score, _) = judge.score(&none, "", &Target::default(), Grad::Skip).unwrap();
    assert!(matches!(score, Score::Missing { .. }) && service.count() == 0);
}

/// The caption of [`video`], whose prompt is `prompt`.
fn caption(judge: &Judge, prompt: &str) -> Result<String> {
    judge.caption(&video(), prompt)
}

#[test]
fn captions_are_one_line_of_text_and_kept_by_their_request() {
    let cache = tempfile::tempdir().unwrap();
    let service = FakeService::start(|earlier, request| {
        assert!(request.get("logprobs").is_none() && request["max_tokens"].as_u64().unwrap() >= 256);
        let parts = request["messages"][0]["content"].as_array().unwrap();
        reply(&format!(" \u{7}A red\n\nball rolls. {} {earlier}", parts.len()), &[])
    });
    let open = |question: &str| {
        judge(&[service.url()], |c| {
            (c.questions, c.frames) = (Texts::Several(vec![question.into()]), 3);
            c.cache_dir = Some(cache.path().display().to_string());
        })
        .unwrap()
    };
    let judge = open("Describe {prompt}.");
    assert_eq!(caption(&judge, "it").unwrap(), "A red ball rolls. 4 0");
    assert_eq!(caption(&judge, "it").unwrap(), "A red ball rolls. 4 0");
    assert_eq!(caption(&judge, "that").unwrap(), "A red ball rolls. 4 1");
    assert_eq!(caption(&open(CAPTION_QUESTION), "it").unwrap(), "A red ball rolls. 4 2");
    let texts: Vec<_> = service.requests.lock().unwrap().iter().map(|(_, request)| request.to_string()).collect();
    assert!(texts[0].contains("These are 3 frames of one video, in their order. Describe it."), "{}", texts[0]);
    assert!(texts.iter().all(|text| !text.contains("Answer with")));
    for damage in ["", "\n", "x"] {
        walk(cache.path()).iter().for_each(|file| std::fs::write(file, damage.repeat(9000)).unwrap());
        assert!(caption(&judge, "it").unwrap().starts_with("A red ball"), "{damage}");
    }
}

#[test]
fn a_hostile_answer_is_no_caption() {
    let huge = [br#"{"choices":[{"message":{"content":""#.to_vec(), vec![b'x'; 2 << 20]].concat();
    let cut = json!({ "choices": [{ "message": { "content": "A red ball" }, "finish_reason": "length" }] });
    let cases: [(Vec<u8>, &str); 8] = [
        (Vec::new(), "found ``"),
        (b"<html>\x1b[31mhello".to_vec(), "found `<html> [31mhello`"),
        (br#"{"choices":[{"message":{"content":null}}]}"#.to_vec(), "expected a description, found"),
        (br#"{"choices":{"0":1}}"#.to_vec(), "expected a description, found"),
        (reply(" \u{1b}\n ", &[]).2, "expected a description, found ``"),
        (reply(&"word ".repeat(4000), &[]).2, "at most 8192 bytes, found `word word"),
        (huge, "expected a description, found"),
        (cut.to_string().into_bytes(), "at most 512 tokens, found `A red ball`"),
    ];
    for (body, part) in cases {
        let service = FakeService::start(move |_, _| (200, "", body.clone()));
        let problem = caption(&judge(&[service.url()], |c| c.retries = 1).unwrap(), "").unwrap_err().chain();
        assert!(problem.contains("an invalid answer") && problem.contains(part), "{problem}");
        assert!(problem.len() < 500 && !problem.contains(char::is_control), "{problem}");
        assert_eq!(service.count(), 2, "{part}");
    }
    let service = FakeService::start(|earlier, _| match earlier {
        0 => (500, "", Vec::new()),
        1 => reply("", &[]),
        _ => reply("A red ball", &[]),
    });
    assert_eq!(caption(&judge(&[service.url()], |c| c.retries = 1).unwrap(), "").unwrap(), "A red ball");
    let service = FakeService::start(|_, _| (500, "", Vec::new()));
    let problem = caption(&judge(&[service.url()], |c| c.retries = 1).unwrap(), "").unwrap_err().chain();
    assert!(problem.contains("(attempts: 2): status 500") && problem.contains(&service.url()), "{problem}");
    let slow = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/v1", slow.local_addr().unwrap());
    let problem = caption(&judge(&[url], |c| (c.retries, c.timeout) = (0, 0.2)).unwrap(), "").unwrap_err().chain();
    assert!(problem.contains("timeout"), "{problem}");
}
