//! The Python package `roll_reward`, as programs and as services that work, die, hang or write nonsense.
#![allow(clippy::unwrap_used)]

use std::io::BufRead;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use roll_core::one_line;
use roll_core::{Error, Grad, OnMissing, RewardScorer, Score, Target, Tensor, Video};
use roll_core::{Verdict, check_reward};

use super::RemoteReward;
use super::command::{CommandConfig, Program};
use super::http::{HttpConfig, ScoringService};
use crate::picture::Frames;

/// `python3`. `None` skips the test if it is missing.
fn python() -> Option<PathBuf> {
    if Command::new("python3").arg("--version").output().is_err() {
        roll_testing::skip!("the Python package is not tested without python3", needs = "python");
    }
    Some("python3".into())
}

/// A Python with PyTorch and NumPy: `$PYTHON`, or `python3`.
fn torch() -> Option<PathBuf> {
    let python = std::env::var_os("PYTHON").map_or("python3".into(), PathBuf::from);
    let found = Command::new(&python).args(["-c", "import torch, numpy"]).output();
    if !found.is_ok_and(|output| output.status.success()) {
        roll_testing::skip!("there is no Python with PyTorch; name one in $PYTHON", needs = "torch");
    }
    Some(python)
}

fn package() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../python/roll_reward")
}

fn script(body: &str) -> String {
    let source = package().join("src");
    format!(
        "import sys\nsys.path.insert(0, {:?})\nimport os, time\nimport roll_reward\n{body}\n",
        source.display().to_string()
    )
}

fn program(
    python: PathBuf,
    body: &str,
    change: impl FnOnce(&mut CommandConfig),
) -> roll_core::Result<RemoteReward<Program>> {
    let command = vec![python.display().to_string(), "-c".into(), script(body)];
    let mut config = CommandConfig { command, ..CommandConfig::default() };
    change(&mut config);
    RemoteReward::new("command", Program::new(config, ".".into())?, Frames::All, OnMissing::Skip)
}

/// A running service, which ends when this is dropped: the process, its address, and the rest of its standard output.
struct Server(
    Child,
    HttpConfig,
    #[expect(dead_code, reason = "a process whose output is closed cannot print")]
    std::io::BufReader<std::process::ChildStdout>,
);

impl Server {
    fn start(python: PathBuf, body: &str, arguments: &[&str]) -> Self {
        let mut child = Command::new(python)
            .args(["-c", &script(body), "--http", "0"])
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut printed = std::io::BufReader::new(child.stdout.take().unwrap());
        printed.read_line(&mut line).unwrap();
        let port = serde_json::from_str::<serde_json::Value>(&line).unwrap()["port"].clone();
        let config = HttpConfig { url: format!("http://127.0.0.1:{port}"), retries: 0, ..HttpConfig::default() };
        Self(child, config, printed)
    }

    fn reward(&self) -> roll_core::Result<RemoteReward<ScoringService>> {
        RemoteReward::new("http", ScoringService::new(self.1.clone())?, Frames::All, OnMissing::Skip)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn video() -> Video {
    let values = (0..2 * 3 * 64 * 64).map(|i| ((i * 37 % 101) as f32) / 101.0 - 0.4).collect();
    Video::new(Tensor::new(values, [2, 3, 64, 64]).unwrap(), 8.0).unwrap()
}

fn told<T>(result: roll_core::Result<T>) -> String {
    one_line(&result.map(drop).unwrap_err())
}

fn keeps_its_promises(reward: &mut dyn RewardScorer) {
    let findings = check_reward(reward, 6);
    assert!(findings.iter().all(|f| f.verdict == Verdict::Kept), "{findings:#?}");
}

/// Uses the standard library only: minus the squared distance of the mean from a level.
const BY_HAND: &str = "
def score(frames, options, reference):
    values = memoryview(frames).cast('B').cast('f') if hasattr(frames, '__array__') else frames.values
    mean, level = sum(values) / len(values), options.get('level', 0.1)
    print('to the log')
    gradient = [2 * (level - mean) / len(values)] * len(values)
    return roll_reward.Score(-(mean - level) ** 2, {'mean': mean}, gradient)
roll_reward.serve(roll_reward.reward(score, differentiable=True, prepare=lambda frames: {'level': [1.0]}))";

const AUTOGRAD: &str = "
@roll_reward.differentiable
def score(frames, prompt, reference):
    return -((frames - 0.2) ** 2).mean() - (frames.mean((0, 2, 3)) - reference.mean((0, 2, 3))).abs().sum()
roll_reward.serve(score)";

#[test]
fn python_package_tests_pass() {
    let Some(python) = python() else { return };
    let run = |python: PathBuf| {
        let tests = package().join("tests");
        let done = Command::new(python).args(["-m", "unittest", "discover", "-s"]).arg(tests).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    };
    run(python);
    if let Some(python) = torch() {
        run(python);
    }
}

#[test]
fn manual_gradient_matches_finite_differences_by_pipe_and_shared_memory() {
    for shared in [true, false] {
        let Some(python) = python() else { return };
        let mut reward = program(python, BY_HAND, |c| c.shared_memory = shared).unwrap();
        assert_eq!((reward.name(), reward.differentiable()), ("score", true));
        keeps_its_promises(&mut reward);
        let target = reward.prepare(&video()).unwrap();
        assert_eq!(target.tensors["level"].shape(), [1]);
        let (Score::Value { details, .. }, _) = reward.score(&video(), "", &target, Grad::Skip).unwrap() else {
            panic!()
        };
        assert!(details.contains_key("mean"));
    }
}

#[test]
fn autograd_gradient_matches_finite_differences_as_program_and_service() {
    let Some(python) = torch() else { return };
    for shared in [true, false] {
        keeps_its_promises(&mut program(python.clone(), AUTOGRAD, |c| c.shared_memory = shared).unwrap());
    }
    keeps_its_promises(&mut Server::start(python, AUTOGRAD, &[]).reward().unwrap());
}

#[test]
fn program_and_service_return_the_same_numbers() {
    let Some(python) = python() else { return };
    let scored = |reward: &mut dyn RewardScorer| {
        let (score, pullback) = reward.score(&video(), "", &Target::default(), Grad::Record).unwrap();
        (score, pullback.unwrap().pull(&Tensor::scalar(0.5)).unwrap().to_f32_vec())
    };
    let piped = scored(&mut program(python.clone(), BY_HAND, |c| c.shared_memory = false).unwrap());
    assert_eq!(scored(&mut program(python.clone(), BY_HAND, |_| ()).unwrap()), piped);
    assert_eq!(scored(&mut Server::start(python, BY_HAND, &[]).reward().unwrap()), piped);
}

#[test]
fn exception_is_an_error_and_the_next_call_succeeds() {
    let Some(python) = python() else { return };
    let body = "
def score(frames, prompt):
    if prompt == 'bad':
        raise ValueError('no such thing')
    return 1.0 if prompt else None
roll_reward.serve(score)";
    let service = Server::start(python.clone(), body, &[]);
    let rewards: [Box<dyn RewardScorer>; 2] =
        [Box::new(program(python, body, |_| ()).unwrap()), Box::new(service.reward().unwrap())];
    for mut reward in rewards {
        let mut score = |prompt| reward.score(&video(), prompt, &Target::default(), Grad::Skip);
        let told = told(score("bad"));
        assert!(told.contains("ValueError: no such thing") && told.contains("in score"), "{told}");
        assert_eq!(score("good").unwrap().0, Score::of(1.0));
        assert!(matches!(score("").unwrap().0, Score::Missing { .. }));
    }
}

#[test]
fn dying_hanging_and_closing_programs_are_errors_in_time() {
    let Some(python) = python() else { return };
    let cases = [
        ("sys.exit(3)", "exit status: 3"),
        ("os._exit(4)", "exit status: 4"),
        ("os.kill(os.getpid(), 9)", "signal: 9"),
        ("time.sleep(600)", "did not answer within 0.5 s"),
    ];
    for (body, part) in cases {
        // Ample time for those that die, on a machine that is busy.
        let timeout = if part.contains("within") { 0.5 } else { 60.0 };
        let body = format!("def score(frames):\n    {body}\nroll_reward.serve(score)");
        let limits = |c: &mut CommandConfig| (c.timeout, c.restarts) = (timeout, 0);
        let mut reward = program(python.clone(), &body, limits).unwrap();
        let told = told(reward.score(&video(), "", &Target::default(), Grad::Skip));
        assert!(told.contains(part), "{body}: {told}");
    }
    let told = told(program(python, "raise SystemExit('no weights here')", |c| c.restarts = 0));
    assert!(told.contains("no weights here"), "{told}");
}

#[test]
fn prints_do_not_corrupt_frames() {
    let Some(python) = python() else { return };
    let body = "
print('a line before')
def score(frames):
    print('a line'); os.write(1, b'bytes'); os.system('echo from a child')
    return 2.0
roll_reward.serve(score)";
    let mut reward = program(python, body, |_| ()).unwrap();
    assert_eq!(reward.score(&video(), "", &Target::default(), Grad::Skip).unwrap().0, Score::of(2.0));
}

#[test]
fn rejects_truncated_or_misdescribed_shared_memory() {
    let Some(python) = python() else { return };
    // Frames written by hand, which the package never writes.
    let body = "
from roll_reward import frame
from roll_reward.serve import claim_stdout
out = claim_stdout()
take = sys.stdin.buffer.read
def answer(header):
    for piece in frame.pieces(header): out.write(piece)
    out.flush()
frame.read(take)
answer({'name': 'odd', 'differentiable': True, 'shared': True})
start = take(8)
import json, struct
header = json.loads(take(struct.unpack('<I', start[4:])[0]))
HOW
listed = [{'name': 'gradient', 'dtype': 'f32', 'shape': [2, 3, 64, 64], 'at': AT}]
text = json.dumps({'score': 1.0, 'tensors': listed}).encode()
out.write(b'ROLL' + struct.pack('<I', len(text)) + text); out.flush()
take(1)";
    let path = "header['shared']['path']";
    let cases = [
        ("pass", "1 << 40", "not in the shared file"),
        ("pass", "98304", "not in the shared file"),
        // The size is sealed, so the program fails.
        (&format!("os.truncate({path}, 10)"), "0", "PermissionError"),
        (&format!("open({path}, 'r+b').truncate(1 << 30)"), "0", "PermissionError"),
    ];
    for (how, at, part) in cases {
        let body = body.replace("HOW", how).replace("AT", at);
        let mut reward = program(python.clone(), &body, |c| c.restarts = 0).unwrap();
        let told = told(reward.score(&video(), "", &Target::default(), Grad::Record));
        assert!(told.contains(part), "{how}: {told}");
    }
}

#[test]
fn gradient_outlives_later_calls() {
    let Some(python) = python() else { return };
    let mut reward = program(python, BY_HAND, |_| ()).unwrap();
    let videos = [0.0, 0.25, 0.5].map(|v| Video::new(Tensor::full([2, 3, 64, 64], v), 8.0).unwrap());
    let scored = videos.map(|v| reward.score(&v, "", &Target::default(), Grad::Record).unwrap().1.unwrap());
    let slopes = scored.map(|pullback| pullback.pull(&Tensor::scalar(1.0)).unwrap().f32s().unwrap()[0] * 24576.0);
    for (slope, mean) in slopes.into_iter().zip([0.0, 0.25, 0.5]) {
        assert!((slope - 2.0 * (0.1 - mean)).abs() < 1e-5, "{slope} where the mean is {mean}");
    }
}

#[test]
fn timeout_and_missing_token_errors_name_the_cause() {
    let Some(python) = python() else { return };
    let mut slow = Server::start(python.clone(), "roll_reward.serve(lambda frames: time.sleep(600))", &[]);
    slow.1.timeout = 2.0;
    let told_slow = told(slow.reward().unwrap().score(&video(), "", &Target::default(), Grad::Skip));
    assert!(told_slow.contains("to `score` (attempts: "), "{told_slow}");

    // HOME represents a secret: it is always set, and unlike PATH no Python launcher changes it.
    let mut guarded = Server::start(python, "roll_reward.serve(lambda frames: 1.0)", &["--token-env", "HOME"]);
    let refused = told(guarded.reward());
    assert!(refused.contains("401") && refused.contains("token"), "{refused}");
    guarded.1.token_env = Some("PATH".into());
    assert!(told(guarded.reward()).contains("401"));
    guarded.1.token_env = Some("HOME".into());
    let mut reward = guarded.reward().unwrap();
    assert_eq!(reward.score(&video(), "", &Target::default(), Grad::Skip).unwrap().0, Score::of(1.0));
    guarded.1.token_env = Some("ROLL_NO_SUCH_VARIABLE".into());
    let error: Error = guarded.reward().map(drop).unwrap_err();
    assert!(error.to_string().contains("reward.token_env"), "{error}");
}
