//! Programs that work, die, hang or write nonsense.
#![allow(clippy::unwrap_used)]

use std::time::Instant;

use roll_core::{Grad, RewardScorer, Score, Target, Video};

use super::*;

/// A Python program that consists of the example's frame functions and `body`. `None` skips the test if there is no
/// Python.
fn reward(body: &str, change: impl FnOnce(&mut CommandConfig)) -> Option<Result<RemoteReward<Program>>> {
    if std::process::Command::new("python3").arg("--version").output().is_err() {
        roll_testing::skip!("reward commands are not tested without python3", needs = "python");
    }
    let example = include_str!("../../../../examples/reward_command/brightness.py");
    let functions = example.split("def main").next().unwrap();
    let program = match body {
        "" => example.to_string(),
        body => format!("{functions}\nimport os, time\n{body}\n"),
    };
    let mut config =
        CommandConfig { command: vec!["python3".into(), "-c".into(), program], ..CommandConfig::default() };
    change(&mut config);
    Some(make(config))
}

fn make(config: CommandConfig) -> Result<RemoteReward<Program>> {
    let on_error = config.on_error;
    let transport = Program::new(config, ".".into())?;
    Ok(RemoteReward::new("command", transport, Frames::All, OnMissing::Skip)?.with_on_error(on_error))
}

/// The error chain of creating the reward or, if that succeeds, of its first score.
fn told(body: &str, change: impl FnOnce(&mut CommandConfig)) -> Option<String> {
    let mut reward = match reward(body, change)? {
        Ok(reward) => reward,
        Err(error) => return Some(roll_core::one_line(&error)),
    };
    let scored = reward.score(&video(), "", &Target::default(), Grad::Record);
    Some(roll_core::one_line(&scored.map(drop).unwrap_err()))
}

fn video() -> Video {
    let values = (0..2 * 3 * 64 * 64).map(|i| ((i * 37 % 101) as f32) / 101.0 - 0.4).collect();
    Video::new(Tensor::new(values, [2, 3, 64, 64]).unwrap(), 8.0).unwrap()
}

const HELLO: &str = "read(); answer({'name': 'odd', 'differentiable': True})";

#[test]
fn python_example_passes_check_reward() {
    let Some(reward) = reward("", |c| drop(c.options.insert("level".into(), 0.3.into()))) else { return };
    let mut reward = reward.unwrap();
    assert_eq!((reward.name(), reward.differentiable()), ("python_brightness", true));
    use roll_core::{Verdict, check_reward};
    let findings = check_reward(&mut reward, 2);
    assert!(findings.iter().all(|f| f.verdict == Verdict::Kept), "{findings:#?}");
    let target = reward.prepare(&video()).unwrap();
    assert_eq!(target.tensors["mean"].shape(), [1]);
    let (score, _) = reward.score(&video(), "", &target, Grad::Skip).unwrap();
    let Score::Value { details, .. } = score else { panic!("{score:?}") };
    assert!(details.contains_key("mean"));
}

#[test]
fn program_says_whether_it_reads_the_reference() {
    let reads = |hello: &str| Some(reward(hello, |_| ())?.unwrap().reads_reference());
    let Some(default) = reads(HELLO) else { return };
    assert!(default);
    assert_eq!(reads("read(); answer({'reads_reference': False})"), Some(false));
}

#[test]
fn program_may_reject_a_reference() {
    let body = format!("{HELLO}\nread()\nanswer({{'target': None, 'reason': 'nobody'}})");
    let Some(reward) = reward(&body, |_| ()) else { return };
    let error = reward.unwrap().prepare(&video()).unwrap_err();
    assert_eq!(error.missing_reason(), Some("nobody"));
}

#[test]
fn dead_program_is_restarted_and_the_call_repeated() {
    let dir = tempfile::tempdir().unwrap();
    let mark = dir.path().join("died").display().to_string();
    let body = format!(
        "{HELLO}
read()
if not os.path.exists('{mark}'):
    open('{mark}', 'w').close()
    sys.exit(3)
answer({{'score': 0.5}})"
    );
    let Some(reward) = reward(&body, |_| ()) else { return };
    let (score, _) = reward.unwrap().score(&video(), "", &Target::default(), Grad::Skip).unwrap();
    assert_eq!(score, Score::of(0.5));
}

#[test]
fn repeatedly_dying_program_is_an_error_with_its_last_lines() {
    let body = format!("{HELLO}\nprint('out of luck', file=sys.stderr)\nsys.exit(3)");
    let Some(told) = told(&body, |_| ()) else { return };
    for part in ["`python3 ", "`score` (starts for this call: 1)", "exit status: 3", "out of luck"] {
        assert!(told.contains(part), "no {part} in: {told}");
    }
}

#[test]
fn hanging_program_is_killed_at_the_time_limit() {
    for hang in ["read(); time.sleep(600)", "time.sleep(600)"] {
        let begun = Instant::now();
        let hangs = |c: &mut CommandConfig| (c.timeout, c.restarts) = (0.3, 0);
        let Some(told) = told(&format!("{HELLO}\n{hang}"), hangs) else { return };
        assert!(told.contains("did not answer within 0.3 s"), "{told}");
        // Earlier than the program would have ended by itself.
        assert!(begun.elapsed().as_secs() < 600);
    }
}

#[test]
fn endless_stderr_line_is_split() {
    let body = format!("{HELLO}\nread()\nfor i in range(40): sys.stderr.write('x' * (1 << 20))\nsys.exit(3)");
    let Some(told) = told(&body, |c| c.restarts = 0) else { return };
    assert!(told.contains("exit status: 3") && told.contains("xxx") && told.len() < 100_000, "{}", told.len());
}

#[test]
#[cfg(target_os = "linux")]
fn grandchildren_end_with_the_program() {
    let dir = tempfile::tempdir().unwrap();
    let mark = dir.path().join("child").display().to_string();
    for end in ["sys.exit(3)", "time.sleep(600)", "answer({'score': 0.5})\nread()"] {
        let start = format!("{HELLO}\nread()\nimport subprocess\nchild = subprocess.Popen(['sleep', '600'])");
        let body = format!("{start}\nopen('{mark}', 'w').write(str(child.pid))\n{end}");
        let limits = |c: &mut CommandConfig| (c.timeout, c.restarts) = (5.0, 0);
        let Some(reward) = reward(&body, limits) else { return };
        let mut reward = reward.unwrap();
        let scored = reward.score(&video(), "", &Target::default(), Grad::Skip);
        assert_eq!(scored.is_ok(), end.starts_with("answer"), "{end}");
        drop(scored);
        drop(reward);
        let stat = format!("/proc/{}/stat", std::fs::read_to_string(&mark).unwrap());
        let begun = Instant::now();
        // A zombie counts as ended.
        while std::fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z ")) {
            assert!(begun.elapsed().as_secs() < 10, "{end}: its child is left behind");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn invalid_answers_are_errors_with_the_reason() {
    let cases = [
        ("read(); print('hello', flush=True)", "print to standard error"),
        ("read(); answer({'score': 'high'})", "expected a number"),
        ("read(); answer({})", "no `score`"),
        ("read(); answer({'score': 1.0})", "none came"),
        ("read(); answer({'score': 1.0}, [('gradient', array.array('f', [1.0]), [1])])", "expected a gradient of f32"),
        ("read(); answer({'error': 'the model is missing'})", "the model is missing"),
    ];
    for (body, part) in cases {
        let Some(told) = told(&format!("{HELLO}\n{body}\ntime.sleep(60)"), |c| c.restarts = 0) else { return };
        assert!(told.contains(part), "{body}: {told}");
    }
}

#[test]
fn a_score_may_be_missing() {
    let body = format!("{HELLO}\nread(); answer({{'score': None, 'reason': 'nobody there'}})\nread()");
    let Some(reward) = reward(&body, |_| ()) else { return };
    let (score, pullback) = reward.unwrap().score(&video(), "", &Target::default(), Grad::Record).unwrap();
    assert_eq!(score, Score::Missing { reason: "nobody there".into() });
    assert!(pullback.is_none());
}

#[test]
fn missing_program_is_a_user_error() {
    let make = |command: &[&str]| {
        let command = command.iter().map(|c| c.to_string()).collect();
        make(CommandConfig { command, ..CommandConfig::default() }).map(drop).unwrap_err()
    };
    assert!(make(&[]).to_string().contains("reward.command"));
    let error = make(&["no-such-program-here"]);
    assert_eq!(error.fault(), Fault::User);
    assert!(roll_core::one_line(&error).contains("no-such-program-here"));
}

/// Answers each call with the next of `answers`, which are Python expressions.
fn answering(answers: &[&str]) -> String {
    let answers: String = answers.iter().map(|answer| format!("read()\nanswer({answer})\n")).collect();
    format!("{HELLO}\n{answers}")
}

#[test]
fn a_score_that_is_not_finite_is_no_error_of_the_program() {
    let answers = ["{'score': float('nan')}", "{'score': float('-inf'), 'details': {'a': float('inf'), 'b': 2}}"];
    let Some(reward) =
        reward(&answering(&[&answers[..], &["{'score': 'Infinity'}", "{'score': 'high'}"]].concat()), |_| ())
    else {
        return;
    };
    let mut reward = reward.unwrap();
    let mut score = || reward.score(&video(), "", &Target::default(), Grad::Record);
    let (nan, pullback) = score().unwrap();
    assert!(nan.value().unwrap().is_nan() && pullback.is_none());
    assert_eq!(score().unwrap().0.value(), Some(f64::NEG_INFINITY));
    assert_eq!(score().unwrap().0.value(), Some(f64::INFINITY));
    let problem = roll_core::one_line(&score().map(drop).unwrap_err());
    assert!(problem.contains("expected a number or null as `score`, found \"high\""), "{problem}");
}

#[test]
fn an_exception_on_one_clip_follows_on_error() {
    let answers = ["{'error': 'KeyError: weights'}", "{'error': 'out of memory'}", "{'score': 0.5}"];
    let body = answering(&answers);
    let Some(stops) = reward(&body, |_| ()) else { return };
    let problem = roll_core::one_line(&stops.unwrap().prepare(&video()).unwrap_err());
    assert!(problem.contains("failed in `prepare`: KeyError: weights"), "{problem}");
    let mut skips = reward(&body, |c| c.on_error = OnError::Skip).unwrap().unwrap();
    let error = skips.prepare(&video()).unwrap_err();
    assert_eq!(error.missing_reason(), Some("it failed in `prepare`: KeyError: weights"));
    let mut score = || skips.score(&video(), "", &Target::default(), Grad::Skip).unwrap().0;
    assert_eq!(score(), Score::Missing { reason: "it failed in `score`: out of memory".into() });
    assert_eq!(score(), Score::of(0.5), "the same program works on");
}

#[test]
fn on_error_forgives_no_failure_at_the_start_and_no_death() {
    let skip = |c: &mut CommandConfig| (c.on_error, c.restarts) = (OnError::Skip, 0);
    let Some(problem) = told("read(); answer({'error': 'no weights'})", skip) else { return };
    assert!(problem.contains("failed in `hello`: no weights"), "{problem}");
    let problem = told(&format!("{HELLO}\nread()\nsys.exit(3)"), skip).unwrap();
    assert!(problem.contains("exit status: 3"), "{problem}");
}
