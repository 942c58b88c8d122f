//! `roll data caption` with a service that describes pictures by their brightness, is slow, fails, or is killed with.

use std::collections::BTreeMap;
use std::io::{BufReader, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use roll_core::{Tensor, Video};
use roll_video::rows::Metadata;
use serde_json::{Value, json};

use crate::judge::{brightness, request_body};
use crate::program::{self, fails, stderr_text};
use crate::resume::kill;

/// A service that calls clip N "grey N", but fails for `broken` clips.
struct Describer {
    url: String,
    /// The clip and the question of each request.
    requests: Arc<Mutex<Vec<(usize, String)>>>,
    most_at_once: Arc<AtomicUsize>,
    is_well: Arc<AtomicBool>,
}

impl Describer {
    fn start(broken: &'static [usize], seconds: f64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/v1", listener.local_addr().unwrap());
        let (requests, most_at_once, is_well) = <(Arc<Mutex<Vec<_>>>, Arc<AtomicUsize>, Arc<AtomicBool>)>::default();
        let (log, most, well, now) = (requests.clone(), most_at_once.clone(), is_well.clone(), AtomicUsize::new(0));
        let now = Arc::new(now);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (mut stream, log, most, well, now) =
                    (stream.unwrap(), log.clone(), most.clone(), well.clone(), now.clone());
                std::thread::spawn(move || {
                    let Some(body) = request_body(&mut BufReader::new(stream.try_clone().unwrap())) else { return };
                    let request: Value = serde_json::from_slice(&body).unwrap();
                    let question =
                        request["messages"][0]["content"].as_array().unwrap().last().unwrap()["text"].clone();
                    let clip = ((brightness(&request) - 0.2) * 10.0).round() as usize;
                    most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    log.lock().unwrap().push((clip, question.as_str().unwrap().into()));
                    std::thread::sleep(Duration::from_secs_f64(seconds));
                    now.fetch_sub(1, Ordering::SeqCst);
                    let answer = match broken.contains(&clip) && !well.load(Ordering::SeqCst) {
                        true => "<html>".into(),
                        false => {
                            let message = json!({ "content": format!(" grey\n{clip} ") });
                            json!({ "choices": [{ "message": message, "finish_reason": "stop" }] }).to_string()
                        }
                    };
                    let head =
                        format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", answer.len());
                    // The command may have been killed.
                    let _ = stream.write_all((head + &answer).as_bytes());
                });
            }
        });
        Self { url, requests, most_at_once, is_well }
    }

    fn count(&self) -> usize {
        self.requests.lock().unwrap().len()
    }
}

/// A directory with this number of clips, `clips/0.mp4` and so on, each of one grey.
fn clips(count: usize) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("clips")).unwrap();
    for i in 0..count {
        let grey = Tensor::full([9, 3, 32, 32], 2.0 * (0.2 + 0.1 * i as f32) - 1.0);
        let path = dir.path().join(format!("clips/{i}.mp4"));
        roll_media::write_mp4(path, &Video::new(grey, 8.0).unwrap()).unwrap();
    }
    dir
}

fn arguments<'a>(path: &'a str, url: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let fixed = ["data", "caption", path, "--url", url, "--model", "eyes", "--output", "out.jsonl"];
    [&fixed, &["--set", "reward.retries=0"][..], more].concat()
}

fn caption(dir: &Path, service: &Describer, path: &str, more: &[&str]) -> Output {
    program::roll(dir, &arguments(path, &service.url, more))
}

/// The rows of the output, which every reader of metadata reads.
fn rows(dir: &Path) -> Vec<(PathBuf, String)> {
    let rows = Metadata::read(dir.join("out.jsonl"), None).unwrap().rows;
    rows.into_iter().map(|row| (row.video.or(row.image).unwrap(), row.prompt)).collect()
}

fn done(output: &Output) -> String {
    assert!(output.status.success(), "{}", stderr_text(output));
    program::printed(output)
}

#[test]
fn rows_without_a_prompt_are_captioned_several_at_once_and_all_columns_stay() {
    let dir = clips(6);
    let table = "video,prompt,tag,weight\nclips/0.mp4,,a,2\nclips/1.mp4,mine,b,\nclips/2.mp4,,,\nclips/3.mp4,,,\n";
    std::fs::write(dir.path().join("table.csv"), table).unwrap();
    let service = Describer::start(&[], 0.3);
    let told = done(&caption(dir.path(), &service, "table.csv", &["--frames", "2"]));
    assert!(told.contains("out.jsonl: 4 of 4 rows have a prompt, 3 of them new"), "{told}");
    let lines = std::fs::read_to_string(dir.path().join("out.jsonl")).unwrap();
    let first: BTreeMap<String, Value> = serde_json::from_str(lines.lines().next().unwrap()).unwrap();
    let expected = [("prompt", json!("grey 0")), ("tag", json!("a")), ("video", json!("clips/0.mp4"))];
    let expected = expected.into_iter().chain([("weight", json!(2.0))]).map(|(k, v)| (k.to_string(), v)).collect();
    assert_eq!(first, expected);
    let captions: Vec<_> = rows(dir.path()).into_iter().map(|(_, caption)| caption).collect();
    assert_eq!(captions, ["grey 0", "mine", "grey 2", "grey 3"]);
    assert!(service.most_at_once.load(Ordering::SeqCst) >= 2);
    let asked = service.requests.lock().unwrap().clone();
    assert!(asked.len() == 3 && asked.iter().all(|(_, question)| question.contains("These are 2 frames")), "{asked:?}");

    // What is there is not asked for again, and `--overwrite` asks for the rest.
    let told = done(&caption(dir.path(), &service, "table.csv", &[]));
    assert!(told.contains("0 of them new") && service.count() == 3, "{told}");
    done(&caption(dir.path(), &service, "table.csv", &["--overwrite", "--question", "Is `{prompt}` right?"]));
    let (clip, question) = service.requests.lock().unwrap()[3].clone();
    assert!(clip == 1 && question.contains("Is `mine` right?") && service.count() == 4, "{question}");
    assert_eq!(rows(dir.path())[1].1, "grey 1");
}

#[test]
fn lists_directories_and_pictures_are_captioned() {
    let dir = clips(3);
    let service = Describer::start(&[], 0.0);
    std::fs::write(dir.path().join("clips/1.txt"), "mine").unwrap();
    done(&caption(dir.path(), &service, "clips", &[]));
    let clip = |i: usize| dir.path().join(format!("clips/{i}.mp4"));
    let expected = [(clip(0), "grey 0".to_string()), (clip(1), "mine".into()), (clip(2), "grey 2".into())];
    assert_eq!(rows(dir.path()), expected);

    let pixels = roll_media::Picture::from_frame(&roll_media::read_video(clip(2), &Default::default()).unwrap(), 0);
    std::fs::write(dir.path().join("still.png"), roll_media::encode_png(&pixels).unwrap()).unwrap();
    let list = json!([{ "video": ["clips/0.mp4", "clips/1.mp4"] }, { "image": "still.png", "prompt": null }]);
    std::fs::write(dir.path().join("list.json"), list.to_string()).unwrap();
    std::fs::remove_file(dir.path().join("out.jsonl")).unwrap();
    done(&caption(dir.path(), &service, "list.json", &["--frames", "1"]));
    let still = (dir.path().join("still.png"), "grey 2".to_string());
    assert_eq!(rows(dir.path()), [(clip(0), "grey 0".into()), (clip(1), "grey 1".into()), still]);
}

#[test]
fn a_killed_command_goes_on_without_asking_again() {
    let dir = clips(6);
    let service = Describer::start(&[], 0.1);
    let one = ["--requests", "1"];
    let mut child = program::command(dir.path(), &arguments("clips", &service.url, &one)).spawn().unwrap();
    while service.count() < 4 {
        assert!(child.try_wait().unwrap().is_none(), "it ended too early");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(kill(&mut child));
    assert_eq!(rows(dir.path()).len(), 3);
    // A machine that crashed may have cut a line off.
    let output = dir.path().join("out.jsonl");
    std::fs::write(&output, std::fs::read_to_string(&output).unwrap() + "{\"video\":\"cli").unwrap();
    done(&caption(dir.path(), &service, "clips", &one));
    let expected: Vec<_> = (0..6).map(|i| (dir.path().join(format!("clips/{i}.mp4")), format!("grey {i}"))).collect();
    assert_eq!((rows(dir.path()), service.count()), (expected, 7));
}

#[test]
fn failed_rows_are_named_and_asked_for_again() {
    let dir = clips(4);
    std::fs::write(dir.path().join("list.jsonl"), {
        let clip = |i: usize| format!("{}\n", json!({ "video": format!("clips/{i}.mp4") }));
        (0..4).chain([9]).map(clip).collect::<String>() + "{\"prompt\": \"\"}\n"
    })
    .unwrap();
    let service = Describer::start(&[1, 2], 0.0);
    let output = caption(dir.path(), &service, "list.jsonl", &[]);
    let parts = ["list.jsonl line 2 (", "list.jsonl line 3 (", "found `<html>`", "line 5 (", "9.mp4", "line 6:"];
    fails(&output, 1, &[&parts[..], &["4 of 6 rows have no prompt", "4 failed"]].concat());
    assert!(program::printed(&output).contains("2 of 6 rows have a prompt, 2 of them new"));
    service.is_well.store(true, Ordering::SeqCst);
    let before = service.count();
    fails(&caption(dir.path(), &service, "list.jsonl", &[]), 1, &["2 of 6 rows have no prompt"]);
    let captions: Vec<_> = rows(dir.path()).into_iter().map(|(_, caption)| caption).collect();
    assert_eq!((captions, service.count() - before), ((0..4).map(|i| format!("grey {i}")).collect(), 2));
}

#[test]
fn a_service_that_is_gone_ends_the_command_before_every_row_has_failed() {
    let dir = clips(1);
    std::fs::write(dir.path().join("many.jsonl"), "{\"video\": \"clips/0.mp4\"}\n".repeat(100)).unwrap();
    let gone = TcpListener::bind("127.0.0.1:0").map(|listener| listener.local_addr().unwrap()).unwrap();
    let url = format!("http://{gone}/v1");
    let output = program::roll(dir.path(), &arguments("many.jsonl", &url, &["--set", "reward.start_timeout=0.1"]));
    fails(&output, 1, &["100 of 100 rows have no prompt", "were not asked for", "many.jsonl line 1 ("]);
    assert!(stderr_text(&output).matches("no answer from the service").count() < 40);
}

#[test]
fn wrong_files_and_options_are_refused_and_nothing_is_sent() {
    let dir = clips(2);
    let service = Describer::start(&[], 0.0);
    let refused = |path: &str, more: &[&str], parts: &[&str]| {
        fails(&caption(dir.path(), &service, path, more), 2, parts);
    };
    std::fs::write(dir.path().join("prompts.txt"), "a red ball\n").unwrap();
    refused("prompts.txt", &[], &["prompts.txt", "one prompt per line"]);
    refused("nowhere.csv", &[], &["nowhere.csv"]);
    refused("clips", &["--set", "reward.answer={number: [1, 10]}"], &["`answer`", "no effect on captions"]);
    refused("clips", &["--set", "reward.questions=[a]"], &["--question"]);
    refused("clips", &["--question", " "], &["reward.questions"]);
    refused("clips", &["--frames", "65"], &["frames`: expected a whole number from 1 to 64", "(--frames)"]);
    std::fs::write(dir.path().join("out.jsonl"), "{\"video\": \"others.mp4\", \"prompt\": \"theirs\"}\n").unwrap();
    refused("clips", &[], &["out.jsonl: holds other rows than clips"]);
    refused("out.jsonl", &[], &["--output", "another file than the metadata"]);
    std::fs::write(dir.path().join("out.jsonl"), "model: my settings").unwrap();
    refused("clips", &[], &["out.jsonl: holds other rows than clips"]);
    assert_eq!(std::fs::read_to_string(dir.path().join("out.jsonl")).unwrap(), "model: my settings");
    assert_eq!(service.count(), 0);
}
