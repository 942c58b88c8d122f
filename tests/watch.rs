//! `roll watch`: the page of runs that go on, who may see it, and the button that stops a run.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use roll_train::checkpoint;
use roll_train::run_dir::RunDir;
use rustix::process::Signal;

use crate::browser::{Browser, chromium};
use crate::program::{stderr_text, with_default_signals};
use crate::resume::assert_alike;
use crate::world::{SHORT, World, fails};

const SETTINGS: [&str; 8] = [
    "reward.name=brightness",
    SHORT[1],
    SHORT[2],
    SHORT[3],
    "sample_steps=10",
    "save_steps=1000",
    "evaluation.train_samples=2",
    "training.learning_rate=1e-3",
];

/// A `roll watch` that serves.
pub struct Watch {
    child: Child,
    pub port: u16,
    pub token: String,
}

impl Watch {
    pub fn start(world: &World, arguments: &[&str]) -> Self {
        let mut command = world.command(&[&["watch"], arguments].concat());
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("http://127.0.0.1:").unwrap_or_else(|| panic!("no address: {line}"));
        let (port, token) = address.split_once("/?token=").unwrap();
        Self { child, port: port.parse().unwrap(), token: token.into() }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        stream
    }

    /// Status and answer to these lines.
    pub fn ask(&self, lines: &str) -> (u16, String) {
        let mut stream = self.connect();
        let mut text = String::new();
        let _ = stream.write_all(format!("{}\r\n\r\n", lines.replace('\n', "\r\n")).as_bytes());
        let _ = stream.read_to_string(&mut text);
        (text.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0), text)
    }

    pub fn get(&self, path: &str) -> (u16, String) {
        self.ask(&format!("GET {path}?token={} HTTP/1.1\nHost: 127.0.0.1:{}", self.token, self.port))
    }

    /// The page, once it contains `part`.
    pub fn page_with(&self, part: &str) -> String {
        let begun = Instant::now();
        loop {
            let (status, page) = self.get("/");
            assert_eq!(status, 200, "{page}");
            if page.contains(part) {
                return page;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "no {part} in {page}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Status of a POST that the page of `origin` sends.
    pub fn post(&self, path: &str, origin: &str) -> u16 {
        let Self { port, token, .. } = self;
        self.ask(&format!("POST {path} HTTP/1.1\nHost: localhost:{port}\nOrigin: {origin}\nX-Roll-Token: {token}")).0
    }

    fn stop(&self, run: usize, origin: &str) -> u16 {
        self.post(&format!("/stop?run={run}"), origin)
    }

    pub fn own_origin(&self) -> String {
        format!("http://localhost:{}", self.port)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn start(world: &World, out: &str, steps: u64) -> Child {
    let mut command = world.training(out, steps, &SETTINGS);
    with_default_signals(&mut command).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

#[test]
fn the_page_follows_a_run_from_before_its_first_step_to_its_end() {
    let world = World::new(3);
    let watch = Watch::start(&world, &["run"]);
    watch.page_with("The run has not begun.");
    let before = watch.get("/version").1;
    let child = start(&world, "run", 150);
    let page = watch.page_with("The run goes on: step ");
    for part in [" of 150, ", " left without evaluations, at most ", " GB of host memory.", "not finished"] {
        assert!(page.contains(part), "no {part} in {page}");
    }
    assert!(watch.get("/version").1 != before);
    let page = watch.page_with("Samples of training");
    assert!(page.contains("src=\"video?run=0&amp;at=") && !page.contains("data-run="), "{page}");
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", stderr_text(&output));
    let page = watch.page_with("The run has ended.");
    assert!(page.contains("150 of 150 steps") && page.contains("Before and after"), "{page}");

    // The file is the same page without the parts that a server needs.
    let report = std::fs::read_to_string(world.path("run/report.html")).unwrap();
    for part in ["data-version", "nonce", "fetch(", "has ended"] {
        assert!(!report.contains(part) && page.contains(part), "{part}");
    }
    let sections = |page: &str| page.matches("<h2").count();
    assert_eq!(sections(&report), sections(&page));

    // All runs of a directory are shown, also those that begin later.
    let watch = Watch::start(&world, &["several"]);
    watch.page_with("The run has not begun.");
    for (name, title) in [("first", "<title>first</title>"), ("second", "<title>first, second</title>")] {
        let run = world.path("several").join(name);
        std::fs::create_dir_all(&run).unwrap();
        std::fs::write(run.join("config.yaml"), "steps: 5\n").unwrap();
        watch.page_with(title);
    }

    // Several runs are compared, also with one that cannot be read.
    std::fs::create_dir(world.path("broken")).unwrap();
    std::fs::write(world.path("broken/metrics.jsonl"), "no json\n").unwrap();
    let page = Watch::start(&world, &["run", "broken"]).page_with("What differs");
    assert!(page.contains("The run cannot be read: ") && page.contains("line 1 is no JSON object"), "{page}");
}

#[test]
fn strangers_see_nothing_and_names_of_others_are_escaped() {
    let world = World::new(0);
    let run = world.path("<img src=x onerror=alert(1)>");
    std::fs::create_dir_all(run.join("samples/step-000001")).unwrap();
    std::fs::write(run.join("config.yaml"), "exp_name: \"</pre><script>evil()</script>\"\nsteps: 3\n").unwrap();
    std::fs::write(run.join("metrics.jsonl"), "{\"step\":1,\"<svg onload=evil()>\":0.5,\"secret-metric\":1}\n")
        .unwrap();
    std::fs::write(run.join("samples/step-000001/sample-0\"><b>.mp4"), "x").unwrap();
    let watch = Watch::start(&world, &[run.file_name().unwrap().to_str().unwrap()]);
    let page = watch.page_with("secret-metric");
    for part in ["<img src=x", "<script>evil", "<svg onload", "\"><b>"] {
        assert!(!page.contains(part), "{part} in {page}");
    }

    let (port, token) = (watch.port, &watch.token);
    let host = format!("Host: 127.0.0.1:{port}");
    for (expected, lines) in [
        (403, format!("GET / HTTP/1.1\n{host}")),
        (403, format!("GET /?token={}0 HTTP/1.1\n{host}", &token[1..])),
        (403, format!("GET /version HTTP/1.1\n{host}")),
        (403, format!("GET /?token={token} HTTP/1.1\nHost: evil.example")),
        (403, format!("GET /?token={token} HTTP/1.1\nHost: evil.example:{port}")),
        (403, format!("POST /stop?run=0 HTTP/1.1\n{host}\nOrigin: http://evil.example\nX-Roll-Token: {token}")),
        (403, format!("POST /stop?run=0 HTTP/1.1\n{host}\nOrigin: http://127.0.0.1:{port}\nX-Roll-Token: {token}")),
        (404, format!("GET /../../../../etc/passwd?token={token} HTTP/1.1\n{host}")),
        (404, format!("GET /%2e%2e/config.yaml?token={token} HTTP/1.1\n{host}")),
        (404, format!("GET /config.yaml?token={token} HTTP/1.1\n{host}")),
        (404, format!("GET http://evil.example/?token={token} HTTP/1.1\n{host}")),
        (405, format!("DELETE /?token={token} HTTP/1.1\n{host}")),
        (431, format!("GET /?token={token} HTTP/1.1\n{host}\nCookie: {}", "a".repeat(9000))),
    ] {
        let (status, answer) = watch.ask(&lines);
        assert_eq!(status, expected, "{lines}: {answer}");
        assert!(!answer.contains("secret-metric") && !answer.contains(token.as_str()), "{answer}");
    }

    // Two thousand connections, at most the limit at a time; half of them say nothing.
    let mut open: Vec<TcpStream> = Vec::new();
    for i in 0..2000 {
        let mut stream = watch.connect();
        if i % 2 == 0 {
            let _ = stream.write_all(format!("GET / HTTP/1.1\r\n{host}\r\n\r\n").as_bytes());
        }
        open.push(stream);
        if open.len() == 200 {
            open.clear();
        }
    }
    drop(open);
    watch.page_with("secret-metric");
}

#[cfg(target_os = "linux")]
#[test]
fn the_page_stops_a_run_with_a_checkpoint_that_resumes() {
    let world = World::new(3);
    std::fs::create_dir(world.path("locked")).unwrap();
    let watch = Watch::start(&world, &["run", "locked", "./run", "--control"]);
    let origin = watch.own_origin();
    assert_eq!(watch.stop(0, &origin), 409, "no process writes the run");
    // This process does not catch the signal: it would end.
    std::fs::write(world.path("locked/config.yaml"), "steps: 5\n").unwrap();
    let lock = RunDir::open(world.path("locked")).unwrap().lock().unwrap();
    watch.page_with("The run goes on: none of 5 steps is done yet");
    assert_eq!(watch.stop(1, &origin), 409);
    drop(lock);

    let child = start(&world, "run", 4000);
    let page = watch.page_with("The run goes on: step ");
    assert!(page.contains("data-run=\"0\""), "{page}");
    for (run, origin) in [(0, "http://evil.example"), (0, "null"), (0, "")] {
        assert_eq!(watch.stop(run, origin), 403, "{origin}");
    }
    assert_eq!(watch.stop(3, &origin), 404);
    assert_eq!(watch.stop(0, &origin), 202);
    // A second signal would end the process without a checkpoint.
    assert_eq!([0, 2].map(|run| watch.stop(run, &origin)), [409, 409]);
    let output = child.wait_with_output().unwrap();
    fails(&output, 130, &["interrupted", "roll run --resume run"]);
    let done = checkpoint::newest_whole(&world.path("run/checkpoints")).unwrap().unwrap().step();
    assert!((1..4000).contains(&done));
    let page = watch.page_with("Go on with <code>roll run --resume run</code>");
    assert!(!page.contains("data-run=\"0\""), "{page}");

    let steps = done + 2;
    world.done(&["run", "--resume", "run", "--steps", &steps.to_string()]);
    watch.page_with("The run has ended.");
    world.train("uninterrupted", steps, &SETTINGS);
    assert_alike(&world, "run", "uninterrupted", steps, &["adapter.safetensors", "trainer/optimizer.safetensors"]);
}

#[cfg(target_os = "linux")]
#[test]
fn stops_of_several_pages_and_ctrl_c_before_them_are_one_stop_with_a_checkpoint() {
    let world = World::new(3);
    for (out, by_ctrl_c) in [("pages", false), ("ctrl-c", true)] {
        let child = start(&world, out, 4000);
        let pages = [0; 2].map(|_| Watch::start(&world, &[out, "--control"]));
        pages.iter().for_each(|page| drop(page.page_with("The run goes on: step ")));
        // The run does nothing meanwhile, as one whose step takes long.
        let process = rustix::process::Pid::from_child(&child);
        let send = |signal| rustix::process::kill_process(process, signal).unwrap();
        send(Signal::STOP);
        if by_ctrl_c {
            send(Signal::INT);
        }
        pages.iter().for_each(|page| assert_eq!(page.stop(0, &page.own_origin()), 202, "{out}"));
        send(Signal::CONT);
        let output = child.wait_with_output().unwrap();
        fails(&output, 130, &["interrupted", &format!("roll run --resume {out}")]);
        assert!(checkpoint::newest_whole(&world.path(out).join("checkpoints")).unwrap().is_some(), "{out}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn only_the_process_that_the_lock_names_is_stopped_and_only_in_the_directory_that_was_opened() {
    let world = World::new(3);
    if std::process::Command::new("flock").arg("--version").output().is_err() {
        roll_testing::skip!("`flock`, which locks a directory, is not installed");
    }
    // A program that is not `roll` locks the directory of a run that was killed, and catches the signal.
    std::fs::create_dir(world.path("other")).unwrap();
    std::fs::write(world.path("other/config.yaml"), "steps: 5\n").unwrap();
    std::fs::write(world.path("other/.lock"), "4711\n").unwrap();
    let script =
        "exec 9<other; flock 9; trap 'echo stopped >stopped' USR1 INT; echo ready; while sleep 0.1; do :; done";
    let mut stranger = std::process::Command::new("bash");
    stranger.args(["-c", script]).current_dir(world.path(".")).stdout(Stdio::piped());
    let mut stranger = with_default_signals(&mut stranger).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(stranger.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");

    // The page was opened by a link to a run that has ended; then the link leads to one that goes on.
    std::fs::create_dir(world.path("old")).unwrap();
    std::fs::write(world.path("old/config.yaml"), "steps: 7\n").unwrap();
    let link = |to: &str| {
        let _ = std::fs::remove_file(world.path("newest"));
        std::os::unix::fs::symlink(to, world.path("newest")).unwrap();
    };
    link("old");
    let watch = Watch::start(&world, &["other", "newest", "later", "--control"]);
    let page = watch.page_with("old");
    assert!(!page.contains("data-run="), "{page}");
    let mut child = start(&world, "new", 4000);
    link("new");
    let page = watch.page_with("steps: 7");
    assert!(!page.contains("data-run="), "{page}");
    for run in [0, 1] {
        assert_eq!(watch.stop(run, &watch.own_origin()), 409, "{run}");
    }
    // One that is opened now shows the new run, and so does a name that did not exist before.
    std::os::unix::fs::symlink("new", world.path("later")).unwrap();
    for (watch, run) in [(&Watch::start(&world, &["newest"]), 0), (&watch, 2)] {
        let page = watch.page_with("The run goes on: step ");
        assert!(page.contains(&format!("src=\"video?run={run}&amp;at=")), "{page}");
    }
    assert_eq!(watch.stop(2, &watch.own_origin()), 202);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(!world.path("stopped").exists(), "a stranger was stopped");
    stranger.kill().unwrap();
    stranger.wait().unwrap();
}

#[test]
fn a_browser_shows_a_run_as_it_goes_on_and_stops_it() {
    let Some(program) = chromium() else {
        roll_testing::skip!("no Chromium (ROLL_CHROMIUM names one) to watch a run with", needs = "chromium");
    };
    let world = World::new(3);
    let mut watch = Watch::start(&world, &["run", "--control"]);
    let url = format!("http://127.0.0.1:{}/?token={}", watch.port, watch.token);
    let mut browser = Browser::open(&program, &world.path("profile"), &url);
    browser.wait_for("document.body?.innerText.includes('The run has not begun.')");
    let child = start(&world, "run", 4000);
    browser.wait_for("document.body.innerText.includes('The run goes on: step')");
    browser.wait_for("document.querySelector('.strip video, .strip .failed') !== null");
    browser.save_pictures("watch-running");

    // A newer page replaces neither what the reader looks at nor what plays.
    browser.value(
        "const first = document.querySelector('video, .failed'); const details = document.querySelector('details'); \
         details.open = true; scrollTo(0, 200); const version = document.body.dataset.version; \
         const text = document.querySelector('.live').innerText",
    );
    browser.wait_for("document.body.dataset.version !== version && document.querySelector('.live').innerText !== text");
    let kept = "first.isConnected && details.isConnected && details.open && scrollY === 200 && !first.paused";
    assert_eq!(browser.value(kept), true);
    assert_eq!(browser.value("getComputedStyle(document.querySelector('.live')).borderTopWidth"), "1px");

    // A video goes on in a row that has a new cell before it.
    let merged = "{ const row = html => { const div = document.createElement('div'); div.innerHTML = html; return div; }; \
                  const clip = name => `<figure><video src='data:,${name}'></video></figure>`; \
                  const old = row(`<p>a</p> ${clip('b')} `), video = old.querySelector('video'); \
                  const wanted = row(`<p>a</p> ${clip('r')} ${clip('b')} ${clip('c')} `); \
                  merge(old, wanted.cloneNode(true)); \
                  old.isEqualNode(wanted) && video === old.children[2].firstChild }";
    assert_eq!(browser.value(merged), true);

    browser.value("document.querySelector('button[data-run]').click()");
    let output = child.wait_with_output().unwrap();
    fails(&output, 130, &["interrupted"]);
    browser.wait_for("document.querySelector('.live').innerText.includes('Go on with roll run --resume run')");
    assert_eq!(browser.value("document.querySelector('.live').innerText.includes(', with a checkpoint.')"), true);
    assert_eq!(browser.value("document.querySelectorAll('button[data-run]').length"), 0);
    browser.save_pictures("watch-stopped");

    watch.child.kill().unwrap();
    browser.wait_for("document.querySelector('.cut').checkVisibility()");
    browser.save_pictures("watch-cut");
}
