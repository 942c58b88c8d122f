//! A run whose reward is a service that looks at pictures.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use roll_core::{BuildContext, Registry};
use roll_train::config::ConfigLayers;
use serde_json::{Value, json};

use crate::resume::{assert_alike, kill, start};
use crate::world::World;

/// A service that says yes with the probability that is the brightness of the pictures.
pub struct BrightnessJudge {
    pub url: String,
    requests: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl BrightnessJudge {
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/v1", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let log = requests.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let Some(body) = request_body(&mut BufReader::new(stream.try_clone().unwrap())) else { continue };
                let yes = brightness(&serde_json::from_slice(&body).unwrap()).clamp(0.01, 0.99);
                log.lock().unwrap().push(body);
                let top =
                    json!([{ "token": "Yes", "logprob": yes.ln() }, { "token": "No", "logprob": (1.0 - yes).ln() }]);
                let logprobs = json!({ "content": [{ "token": "Yes", "top_logprobs": top }] });
                let answer =
                    json!({ "choices": [{ "message": { "content": "Yes" }, "logprobs": logprobs }] }).to_string();
                let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", answer.len());
                // The run may have been killed.
                let _ = stream.write_all((head + &answer).as_bytes());
            }
        });
        Self { url, requests }
    }

    fn count(&self) -> usize {
        self.requests.lock().unwrap().len()
    }
}

/// The body of a request; `None` if the connection was closed before its end.
pub fn request_body(reader: &mut impl BufRead) -> Option<Vec<u8>> {
    let (mut length, mut line) = (0, String::new());
    while reader.read_line(&mut line).ok()? > 2 {
        if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
        line.clear();
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    (length > 0).then_some(body)
}

/// The mean of all bytes of the pictures, 0 to 1.
pub fn brightness(request: &Value) -> f64 {
    let mut bytes = Vec::new();
    for part in request["messages"][0]["content"].as_array().unwrap() {
        let Some(url) = part["image_url"]["url"].as_str() else { continue };
        let png = STANDARD.decode(url.split(',').nth(1).unwrap()).unwrap();
        let mut reader = png::Decoder::new(std::io::Cursor::new(png)).read_info().unwrap();
        let mut rgb = vec![0; reader.output_buffer_size().unwrap()];
        reader.next_frame(&mut rgb).unwrap();
        bytes.extend(rgb);
    }
    bytes.iter().map(|&byte| f64::from(byte)).sum::<f64>() / bytes.len() as f64 / 255.0
}

#[test]
fn a_killed_run_resumes_bit_for_bit_with_the_answers_that_it_had() {
    let world = World::new(3);
    let judge = BrightnessJudge::start();
    let url = format!("reward.url={}", judge.url);
    let settings = [
        "algo.name=diffusion_nft",
        "algo.num_inference_steps=3",
        "algo.group_size=6",
        "sample_steps=0",
        "save_steps=2",
        "training.learning_rate=1e-3",
        "reward.name=judge",
        "reward.model=eyes",
        "reward.questions=['Is {prompt} bright?', 'Is it sharp?']",
        "reward.frames=2",
        &url,
    ];
    let with = |cache: &'static str| [&settings[..], &[cache]].concat();
    let (own, others) = (with("reward.cache_dir=own"), with("reward.cache_dir=others"));
    world.train("whole", 4, &others);
    let requests = judge.count();
    assert_eq!(requests, 4 * 6 * 2);

    let mut child = start(&world, "killed", 4, &own);
    while judge.count() < requests * 13 / 8 {
        assert!(child.try_wait().unwrap().is_none(), "it ended before its third step");
        std::thread::sleep(Duration::from_micros(100));
    }
    assert!(kill(&mut child));
    world.done(&["run", "--resume", "killed"]);
    assert_alike(&world, "killed", "whole", 4, &["adapter.safetensors", "trainer/optimizer.safetensors"]);

    // Only answers under way when the run was killed were asked for twice.
    let repeated = judge.count() - 2 * requests;
    assert!(repeated <= 2, "{repeated} of {requests} questions were repeated");
    let metrics = std::fs::read_to_string(world.path("killed/metrics.jsonl")).unwrap();
    let metrics: Vec<Value> = metrics.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let found = |step: usize| metrics[step]["reward/answered_from_cache"].as_f64().unwrap();
    assert!(found(0) == 0.0 && found(2) > 0.0 && found(3) == 0.0, "{metrics:?}");
    assert!((0.01..0.99).contains(&metrics[3]["reward/question_2"].as_f64().unwrap()), "{metrics:?}");
}

#[test]
fn questions_and_the_parts_of_a_sum_have_the_columns_of_their_row() {
    let world = World::new(2);
    let judge = BrightnessJudge::start();
    let rows = "video,prompt,answer\n0.mp4,a square,three apples\n1.mp4,a square,two pears\n";
    std::fs::write(world.path("answers.csv"), rows).unwrap();
    let question = "questions: ['Are there {answer}?']";
    let reward = format!(
        "reward=[{{name: judge, url: '{}', model: m, cache_dir: none, {question}}}, {{name: brightness}}]",
        judge.url
    );
    let settings = [
        "algo.name=diffusion_nft",
        "algo.num_inference_steps=2",
        "algo.group_size=2",
        "sample_steps=0",
        "data.metadata=answers.csv",
        "training.per_device_train_batch_size=2",
        &reward,
    ];
    world.train("run", 1, &settings);
    let requests: Vec<Value> =
        judge.requests.lock().unwrap().iter().map(|body| serde_json::from_slice(body).unwrap()).collect();
    for answer in ["Are there three apples?", "Are there two pears?"] {
        assert_eq!(requests.iter().filter(|request| request.to_string().contains(answer)).count(), 2, "{answer}");
    }
}

#[test]
fn a_sum_of_rewards_is_elsewhere_if_all_of_them_are() {
    let registry = Registry::linked().unwrap();
    let is_elsewhere = |rewards: &str| {
        let loaded = ConfigLayers::new().set(&format!("reward={rewards}")).unwrap().load(Some(&registry)).unwrap();
        let reward = roll_train::reward(&loaded, &registry, &BuildContext::new("flex")).unwrap();
        reward.unwrap().is_elsewhere()
    };
    let judge = "{name: judge, url: 'http://127.0.0.1:1/v1', model: m, questions: [a], cache_dir: none}";
    assert!(is_elsewhere(&format!("[{judge}, {judge}]")));
    assert!(!is_elsewhere(&format!("[{judge}, {{name: brightness}}]")));
}
