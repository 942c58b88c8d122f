//! Runs whose reward is the votes of people: by files, over HTTP, and on the page in a browser.

use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use roll_core::{Tensor, Video};
use roll_rewards::vote::files::{Answer, Question, Votes};
use roll_train::checkpoint;
use rustix::process::{Pid, Signal, kill_process};

use crate::browser::{Browser, chromium};
use crate::program::{stderr_text, with_default_signals};
use crate::resume::{assert_alike, kill};
use crate::watch::Watch;
use crate::world::{World, fails};

const SETTINGS: [&str; 7] = [
    "algo.name=diffusion_nft",
    "algo.num_inference_steps=3",
    "algo.group_size=3",
    "reward.name=vote",
    "sample_steps=0",
    "save_steps=1",
    "training.learning_rate=1e-3",
];

/// A run, which ends with the test: it may wait for votes for ever.
struct Run(Option<Child>);

impl Run {
    fn child(&mut self) -> &mut Child {
        self.0.as_mut().unwrap()
    }

    fn output(mut self) -> Output {
        self.0.take().unwrap().wait_with_output().unwrap()
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            kill(child);
        }
    }
}

/// Starts a run, or resumes it.
fn start(world: &World, out: &str, steps: u64, settings: &[&str]) -> Run {
    let mut command = match world.path(out).join("config.yaml").exists() {
        true => world.command(&["run", "--resume", out]),
        false => world.training(out, steps, settings),
    };
    begin(&mut command)
}

fn begin(command: &mut Command) -> Run {
    Run(Some(with_default_signals(command).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()))
}

/// Votes until the run has `given` answers: for the clip with the last id, which depends on its pixels alone.
fn answer(world: &World, run: &mut Run, out: &str, given: usize) {
    let (votes, begun) = (Votes(world.path(out)), Instant::now());
    loop {
        let questions = votes.questions().unwrap();
        let mut left = given - questions.iter().filter(|(_, _, answered)| *answered).count();
        for (_, id, _) in questions.iter().filter(|(_, _, answered)| !answered) {
            let question = votes.question(id).unwrap();
            let last = question.order().into_iter().enumerate().max_by_key(|(_, clip)| question.clips[*clip].clone());
            if left > 0 {
                assert!(votes.vote(id, last.unwrap().0 + 1).unwrap());
                left -= 1;
            }
        }
        if left == 0 {
            return;
        }
        assert!(run.child().try_wait().unwrap().is_none(), "the run ended before its votes");
        assert!(begun.elapsed() < Duration::from_secs(120), "no question is asked");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_run_that_waits_for_votes_stops_with_a_checkpoint_and_resumes_bit_for_bit() {
    let world = World::new(2);
    let settings = [&SETTINGS[..], &["evaluation.train_samples=1"]].concat();
    let mut whole = start(&world, "whole", 3, &settings);
    // Three votes a step, and at the end one on the evaluated clip before and after training.
    answer(&world, &mut whole, "whole", 10);
    let output = whole.output();
    assert!(output.status.success(), "{}", stderr_text(&output));
    let messages = stderr_text(&output);
    for part in [": answer with `roll watch --vote whole`", "evaluations measure `evaluation.check`"] {
        assert_eq!(messages.matches(part).count(), 1, "{part} in {messages}");
    }

    // Stopped when the second step has one of its three votes, killed when the third has.
    let mut run = start(&world, "stopped", 3, &settings);
    answer(&world, &mut run, "stopped", 4);
    kill_process(Pid::from_child(run.child()), Signal::INT).unwrap();
    fails(&run.output(), 130, &["interrupted", "roll run --resume stopped"]);
    let newest = checkpoint::newest_whole(&world.path("stopped/checkpoints")).unwrap().unwrap();
    assert_eq!(newest.step(), 1);
    let mut run = start(&world, "stopped", 3, &settings);
    answer(&world, &mut run, "stopped", 7);
    assert!(kill(run.child()));
    let mut run = start(&world, "stopped", 3, &settings);
    answer(&world, &mut run, "stopped", 9);
    // Stopped at the last question.
    let votes = Votes(world.path("stopped"));
    let begun = Instant::now();
    while votes.questions().unwrap().len() < 10 {
        assert!(begun.elapsed() < Duration::from_secs(120), "before and after are not compared");
        std::thread::sleep(Duration::from_millis(20));
    }
    kill_process(Pid::from_child(run.child()), Signal::INT).unwrap();
    fails(&run.output(), 130, &["interrupted", "roll run --resume stopped"]);
    let mut run = start(&world, "stopped", 3, &settings);
    answer(&world, &mut run, "stopped", 10);
    let output = run.output();
    assert!(output.status.success(), "{}", stderr_text(&output));
    assert_alike(&world, "stopped", "whole", 3, &["adapter.safetensors", "trainer/optimizer.safetensors"]);

    let compared = |out: &str| world.summary(out)["compared"].clone();
    assert_eq!(compared("stopped"), compared("whole"));
    let counts = compared("whole");
    assert_eq!(["after", "before", "equal"].map(|side| counts[side].as_u64().unwrap()).iter().sum::<u64>(), 1);
    let report = std::fs::read_to_string(world.path("whole/report.html")).unwrap();
    assert!(report.contains("each shown before and after training"));

    // Nobody was asked twice, nor in evaluations, which measure the checks.
    let questions = |out: &str| {
        let mut ids: Vec<_> = Votes(world.path(out)).questions().unwrap().into_iter().map(|q| q.1).collect();
        ids.sort();
        ids
    };
    assert_eq!((questions("stopped"), questions("whole").len()), (questions("whole"), 10));
    let metrics = world.metrics("whole");
    let last = metrics.last().unwrap();
    assert!(last["eval/train_check_sharpness"].is_number() && last.get("eval/train").is_none(), "{last}");
    let scores = metrics.iter().filter_map(|step| step.get("actor/score")?.as_f64()).collect::<Vec<_>>();
    assert!(scores.len() == 3 && scores.iter().all(|score| (score - 0.5).abs() < 1e-6), "{scores:?}");

    // The data set has a line for each vote.
    assert_eq!(world.done(&["data", "votes", "whole", "votes.jsonl"]), "10 votes\n");
    let lines = std::fs::read_to_string(world.path("votes.jsonl")).unwrap();
    for line in lines.lines() {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        let clips = line["clips"].as_array().unwrap();
        assert_eq!((clips.len(), line["chosen"].as_str()), (2, clips.iter().filter_map(|clip| clip.as_str()).max()));
        assert!(world.path(line["chosen"].as_str().unwrap()).is_file());
        assert!(world.path(line["reference"].as_str().unwrap()).is_file());
        assert!(line["prompt"].as_str().unwrap().starts_with("a grey square") && line["question"].is_string());
    }
    fails(&world.roll(&["data", "votes", "tiny", "none.jsonl"]), 2, &["holds no votes"]);
}

#[test]
fn parts_that_cannot_use_votes_refuse_them_before_the_run() {
    let world = World::new(1);
    let two_ranks = ["ranks=2", "strategy.name=zero"];
    let plugins = format!("plugins=['{}']", crate::plugins::library("diffusion_nft"));
    let evaluated = ["evaluation.train_samples=1", "evaluation.stop_when={checks_fall: 1}"];
    let check = ["reward.name=brightness", "evaluation.train_samples=1", "evaluation.check=[{name: vote}]"];
    let cases: [(&[&str], &str); 6] = [
        (&["algo.name=reward_fl"], "the reward `vote` is not differentiable, and the algorithm `reward_fl`"),
        (&["reward.clips=10"], "clips`: expected a whole number from 2 to 9"),
        (&two_ranks, "set `ranks: 1`"),
        (&[&plugins, "plugins_replace=true"], "the algorithm `diffusion_nft` of a plugin cannot use `vote`"),
        (&evaluated, "`evaluation.stop_when`"),
        (&check, "`evaluation.check`"),
    ];
    for (settings, part) in cases {
        let settings = match settings[0] {
            "algo.name=reward_fl" => vec![settings[0], "reward.name=vote"],
            _ => [&SETTINGS[..], settings].concat(),
        };
        fails(&world.training("run", 1, &settings).output().unwrap(), 2, &[part]);
        assert!(!world.path("run").exists(), "{part}");
    }
    fails(&world.roll(&["score", "0.mp4", "--reward", "vote"]), 2, &["scores none by itself"]);
}

/// A run with a question about two clips; returns its id.
fn question(world: &World, prompt: &str) -> String {
    std::fs::create_dir(world.path("run")).unwrap();
    std::fs::write(world.path("run/config.yaml"), "steps: 5\n").unwrap();
    let votes = Votes(world.path("run"));
    let clip = |level: f32| votes.keep_clip(&Video::new(Tensor::full([3, 3, 32, 32], level), 8.0).unwrap()).unwrap();
    votes
        .ask(&Question {
            prompt: prompt.into(),
            question: "Which?".into(),
            clips: vec![clip(0.1), clip(0.2)],
            reference: None,
        })
        .unwrap()
}

#[test]
fn only_the_page_votes_and_once() {
    let world = World::new(0);
    let id = question(&world, "</script><script>evil()</script>");
    let (votes, watch) = (Votes(world.path("run")), Watch::start(&world, &["--vote", "run"]));
    let (port, token, origin) = (watch.port, &watch.token, watch.own_origin());
    let path = format!("/vote?run=0&id={id}&choice=1");
    let host = format!("Host: 127.0.0.1:{port}");
    for (expected, lines) in [
        (403, format!("GET /question HTTP/1.1\n{host}")),
        (403, format!("GET /question?token={token} HTTP/1.1\nHost: evil.example:{port}")),
        (403, format!("GET /vote?token={}0 HTTP/1.1\n{host}", &token[1..])),
        (403, format!("POST {path} HTTP/1.1\n{host}\nOrigin: http://127.0.0.1:{port}")),
        (403, format!("POST {path}&token={token} HTTP/1.1\n{host}\nOrigin: http://127.0.0.1:{port}")),
        (403, format!("POST {path} HTTP/1.1\n{host}\nX-Roll-Token: {token}")),
        (404, format!("GET /votes/questions/{id}.json?token={token} HTTP/1.1\n{host}")),
    ] {
        let (status, answer) = watch.ask(&lines);
        assert_eq!(status, expected, "{lines}: {answer}");
        assert!(!answer.contains("evil()"), "{answer}");
    }
    for other in ["http://evil.example", "null", ""] {
        assert_eq!(watch.post(&path, other), 403, "{other}");
    }
    assert_eq!(watch.post("/stop?run=0", &origin), 403, "without --control");
    let (short, unknown, upper) = (&id[1..], "0".repeat(64), id.to_uppercase());
    for id in ["", "..", "../../config", "..%2f..%2fconfig", short, &unknown, &upper] {
        assert_eq!(watch.post(&format!("/vote?run=0&id={id}&choice=1"), &origin), 404, "{id}");
    }
    for (run, choice) in [("1", "1"), ("-1", "1"), ("", "1"), ("0", "3"), ("0", "-1"), ("0", ""), ("0", "x")] {
        assert_eq!(watch.post(&format!("/vote?run={run}&id={id}&choice={choice}"), &origin), 404, "{run} {choice}");
    }
    assert_eq!(votes.answer(&id).unwrap(), Answer::Open);

    let (status, next) = watch.get("/question");
    assert!(status == 200 && next.contains("Content-Type: text/plain") && next.contains("\"open\":1"), "{next}");
    assert_eq!(watch.post(&path, &origin), 201);
    assert_eq!(watch.post(&format!("/vote?run=0&id={id}&choice=2"), &origin), 409);
    let order = votes.question(&id).unwrap().order();
    assert_eq!(votes.answer(&id).unwrap(), Answer::Clip(order[0]));
    let next = watch.get("/question").1;
    for part in ["\"given\":1", "\"open\":0", "\"questions\":[]", "\"ended\":false"] {
        assert!(next.contains(part), "no {part} in {next}");
    }
    assert!(watch.page_with("<h1>").contains(&format!("vote?token={token}\">Vote on clips</a>")));

    // Without the option there is no voting.
    let other = Watch::start(&world, &["run"]);
    assert_eq!(["/vote", "/question"].map(|path| other.get(path).0), [404, 404]);
    assert_eq!(other.post(&path, &other.own_origin()), 403);
    assert!(!other.get("/").1.contains("/vote"));
}

/// Votes for the sharpest of the clips on the page, by its buttons and keys in turn. Clips are compared at the same times:
/// they all begin with the same picture, and a clip of the demo plays for 1.1 s.
const VOTER: &str = "
const canvas = document.createElement('canvas');
const context = canvas.getContext('2d', { willReadFrequently: true });
const sharpness = async video => {
  const [w, h] = [canvas.width, canvas.height] = [video.videoWidth, video.videoHeight];
  video.pause();
  let sum = 0;
  for (const time of [0.3, 0.5, 0.7, 0.9]) {
    const sought = new Promise(done => video.addEventListener('seeked', () => done(true), { once: true }));
    video.currentTime = time;
    // A busy machine seeks slowly, and a video that is not shown any more never gets there: neither is judged by an old frame.
    const arrived = await Promise.race([sought, new Promise(done => setTimeout(done, 5000))]);
    if (!arrived || !video.paused || Math.abs(video.currentTime - time) > 0.01) return NaN;
    context.drawImage(video, 0, 0);
    const pixels = context.getImageData(0, 0, w, h).data;
    const luma = i => 0.299 * pixels[4 * i] + 0.587 * pixels[4 * i + 1] + 0.114 * pixels[4 * i + 2];
    let squares = 0;
    for (let y = 1; y < h - 1; y++) for (let x = 1; x < w - 1; x++) {
      const i = y * w + x;
      squares += (luma(i - 1) + luma(i + 1) + luma(i - w) + luma(i + w) - 4 * luma(i)) ** 2;
    }
    sum += Math.sqrt(squares);
  }
  return sum;
};
let votes = 0, before;
const judge = async () => {
  const shown = [...document.querySelectorAll('.choices video')];
  const judged = question?.id;
  if (shown.length && begun && shown.every(video => video.readyState >= 2)) {
    const found = [];
    for (const video of shown) found.push(await sharpness(video));
    // A busy browser may still draw the frame before the one that was sought: two measurements agree.
    const measured = JSON.stringify([judged, ...found]), agreed = measured === before;
    before = measured;
    const best = found.indexOf(Math.max(...found)) + 1;
    if (question?.id !== judged || !best || !agreed) return setTimeout(judge, 100);
    if (votes++ % 2) document.dispatchEvent(new KeyboardEvent('keydown', { key: String(best) }));
    else document.querySelector(`[data-choice='${best}']`).click();
  }
  setTimeout(judge, 100);
};
judge(); null";

#[test]
fn votes_for_sharp_clips_on_the_page_make_unseen_clips_sharper() {
    let Some(program) = chromium() else {
        roll_testing::skip!("no Chromium (ROLL_CHROMIUM names one) to vote with", needs = "chromium");
    };
    let world = World::new(0);
    let watch = Watch::start(&world, &["--vote", "run"]);
    let url = format!("http://127.0.0.1:{}/vote?token={}", watch.port, watch.token);
    let mut browser = Browser::open(&program, &world.path("profile"), &url);
    browser.wait_for("document.body?.innerText.includes('Nothing to vote on')");
    browser.save_pictures("vote-idle");
    // The demo: on one rank, with fewer steps.
    let mut command = world.command(&["run", "--algo", "diffusion_nft", "--out", "run", "--steps", "16"]);
    for setting in [
        "ranks=1",
        "strategy.name=single",
        "algo.group_size=4",
        "algo.num_inference_steps=4",
        "reward.name=vote",
        "reward.clips=4",
        "reward.question=Which <b>clip</b> is sharper?",
        "sample_steps=0",
        "training.learning_rate=1e-2",
        "training.lr_scheduler_type=constant",
        "training.warmup_steps=0",
        "evaluation.samples=6",
        "evaluation.train_samples=0",
        "evaluation.check=[{name: sharpness}]",
    ] {
        command.args(["--set", setting]);
    }
    let mut run = begin(&mut command);
    browser.wait_for("document.querySelectorAll('.choices video, .choices .failed').length === 4");
    let text = browser.value("document.body.innerText");
    for part in ["Which <b>clip</b> is sharper?", "a person ", "0 votes given, 1 open", "Equal"] {
        assert!(text.as_str().unwrap().contains(part), "no {part} in {text}");
    }
    browser.wait_for("document.querySelectorAll('.reference video, .reference .failed').length === 1");
    browser.save_pictures("vote");
    if browser.value("document.querySelector('.failed') !== null") == true {
        roll_testing::skip!("this Chromium cannot play H.264, so it cannot judge clips", needs = "chromium");
    }
    // A slip is taken back before it is stored, and a click on a clip is a vote, too.
    browser.wait_for("performance.now() - since > 400");
    browser.value("var slip = question.id; document.querySelector('.choices video').click()");
    browser.wait_for("held !== null && question === null");
    browser.value("document.dispatchEvent(new KeyboardEvent('keydown', { key: 'Backspace' }))");
    browser.wait_for("question?.id === slip && held === null && document.querySelector('.back button').hidden");
    let votes = Votes(world.path("run"));
    assert!(votes.questions().unwrap().iter().all(|(_, _, answered)| !answered), "nothing was stored");
    assert_eq!(browser.value("document.querySelector('.report').getAttribute('href').startsWith('/?token=')"), true);
    browser.value("hold = 50");
    browser.value(VOTER);
    let begun = Instant::now();
    while run.child().try_wait().unwrap().is_none() {
        assert!(begun.elapsed() < Duration::from_secs(300), "{}", browser.value("document.body.innerText"));
        std::thread::sleep(Duration::from_millis(200));
    }
    let output = run.output();
    assert!(output.status.success(), "{}", stderr_text(&output));
    browser.wait_for("document.querySelector('.under').textContent === '22 votes given, 0 open'");
    browser.wait_for("document.body.innerText.includes('The run has ended')");
    browser.save_pictures("vote-ended");
    let summary = world.summary("run");
    let gain = &summary["unseen_check_gain"]["ci95"];
    eprintln!("{} -> {}, {gain}", summary["unseen_check_before"], summary["unseen_check_after"]);
    assert!(gain[0].as_f64().unwrap() > 0.0, "{summary}");
    eprintln!("after against before: {}", summary["compared"]);
    assert!(summary["compared"]["after"].as_u64().unwrap() >= 5, "{summary}");
}
