#![allow(clippy::unwrap_used)]
use roll_core::Environment;

use super::*;

fn context() -> BuildContext {
    BuildContext { base_dir: std::env::temp_dir(), ..BuildContext::new("flex") }
}

/// An environment that is a shell script.
fn script(text: &str, timeout: f64) -> Process {
    let command = ["sh", "-c", text].map(String::from).to_vec();
    let options = ProcessOptions { command, timeout, max_line_bytes: 4096, ..ProcessOptions::default() };
    Process::new(options, &context()).unwrap()
}

fn message<T>(result: Result<T>) -> String {
    result.map(drop).unwrap_err().to_string()
}

const START: &str = r#"read -r request; echo '{"observation": "begin", "instructions": "go"}';"#;

#[test]
fn an_episode_crosses_as_json_lines() {
    let counts = r#"
        n=0
        while read -r request; do
            case "$request" in
                *reset*) n=0; echo "{\"observation\": \"begin\", \"instructions\": \"go\"}" ;;
                *left*) n=$((n + 1)); echo "{\"observation\": \"$n\", \"reward\": 0.5, \"terminated\": true, \"solved\": true}" ;;
                *odd*) echo '{"error": "no such thing"}' ;;
                *) echo '{"observation": "same", "reward": -1, "terminated": false, "truncated": true, "valid": false}' ;;
            esac
        done"#;
    let mut world = script(counts, 10.0);
    for _ in 0..2 {
        assert_eq!(world.reset(7).unwrap().text, "begin");
        assert_eq!((world.instructions().as_str(), world.solved()), ("go", None));
        let step = world.step("\"quoted\"\nlines √").unwrap();
        assert_eq!((step.reward, step.truncated, step.valid, step.terminated), (-1.0, true, false, false));
        // An error that the process reports does not end it.
        assert!(message(world.step("odd")).contains("no such thing"));
        let step = world.step("left").unwrap();
        assert_eq!((step.observation.text.as_str(), step.reward, step.terminated, step.valid), ("1", 0.5, true, true));
        assert_eq!(world.solved(), Some(true));
    }
}

#[test]
fn an_error_that_a_process_reports_at_the_beginning_leaves_out_the_episode_and_keeps_the_process() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    let text = format!(
        r#"echo start >> '{}'; n=0
        while read -r request; do
            n=$((n + 1))
            if [ $n = 1 ]; then echo '{{"error": "no such seed"}}'; else echo "{{\"observation\": \"$n\"}}"; fi
        done"#,
        log.display()
    );
    let mut world = script(&text, 10.0);
    assert!(message(world.reset(0)).contains("it reports: no such seed"));
    assert_eq!(world.reset(1).unwrap().text, "2", "the same process");
    assert_eq!(std::fs::read_to_string(&log).unwrap(), "start\n");
}

#[test]
fn a_broken_beginning_is_repeated_in_another_process() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    // The first process answers one episode and dies at the next.
    let text = format!("echo start >> '{}'; {START} read -r request; exit 1", log.display());
    let mut world = script(&text, 10.0);
    for starts in 1..4 {
        assert_eq!(world.reset(0).unwrap().text, "begin");
        assert_eq!(std::fs::read_to_string(&log).unwrap(), "start\n".repeat(starts));
    }
}

#[test]
fn dead_process_is_reported_with_its_stderr_and_restarted() {
    let mut world = script(&format!("{START} read -r request; echo 'out of ice' >&2; exit 3"), 10.0);
    for _ in 0..2 {
        world.reset(0).unwrap();
        let message = message(world.step("x"));
        assert!(message.contains("exit status: 3") && message.contains("out of ice"), "{message}");
    }
    assert!(message(world.step("x")).contains("without an episode"));
}

#[test]
fn a_process_that_hangs_is_killed() {
    let mut world = script(&format!("{START} exec sleep 600"), 0.2);
    world.reset(0).unwrap();
    assert!(message(world.step("x")).contains("within 0.2 s"));
    // A request that is never read does not block either.
    world.reset(0).unwrap();
    assert!(message(world.step(&"x".repeat(1 << 20))).contains("within 0.2 s"));
}

#[test]
fn a_process_that_floods_is_stopped() {
    for (flood, word) in [
        ("while true; do echo '{}'; done", "without a request"),
        ("head -c 100000 /dev/zero | tr '\\0' 'x'; exec sleep 600", "more than 4096 bytes"),
        ("head -c 10000000 /dev/zero | tr '\\0' 'x' >&2; exec sleep 600", "within"),
    ] {
        let mut world = script(&format!("{START} {flood}"), 0.5);
        world.reset(0).unwrap();
        // The first line may be mistaken for an answer; the next lines cannot.
        let problems: Vec<String> = (0..2).map(|_| message(world.step("x").and_then(|_| world.step("x")))).collect();
        assert!(problems.iter().any(|p| p.contains(word) || p.contains("has no `observation`")), "{problems:?}");
    }
}

#[test]
fn an_answer_that_is_none_is_shown() {
    for (answer, word) in [
        ("echo hello", "hello"),
        ("echo '[1]'", "expected"),
        (r#"echo '{"observation": 3}'"#, "observation"),
        (r#"echo '{"reward": 1}'"#, "no `observation`"),
        (r"printf '\377\n'", "UTF-8"),
        ("true", "it ended"),
    ] {
        let message = message(script(&format!("read -r request; {answer}"), 10.0).reset(0));
        assert!(message.contains(word) && message.contains("sh -c"), "{answer}: {message}");
    }
}

#[test]
fn rejects_options_without_a_command() {
    let refused = |options: ProcessOptions| message(Process::new(options, &context()));
    let command = vec!["sh".to_string()];
    assert!(refused(ProcessOptions::default()).contains("env.command"));
    let nan = ProcessOptions { timeout: f64::NAN, command: command.clone(), ..ProcessOptions::default() };
    assert!(refused(nan).contains("env.timeout"));
    assert!(refused(ProcessOptions { max_line_bytes: 0, command, ..ProcessOptions::default() }).contains("max_line"));
    let none = ProcessOptions { command: vec!["/no/such/program".into()], ..ProcessOptions::default() };
    assert!(message(Process::new(none, &context()).unwrap().reset(0)).contains("/no/such/program"));
}

/// A process that writes what it reads to `log`, and answers a `close` by `closing`.
fn closing(log: &std::path::Path, closes: bool, closing: &str) -> Process {
    let text = format!(
        r#"while read -r request; do
            echo "$request" >> '{}'
            case "$request" in
                *reset*) echo '{{"observation": "begin", "closes": {closes}}}' ;;
                *close*) {closing} ;;
                *) echo '{{"observation": "on", "reward": 0, "terminated": false}}' ;;
            esac
        done"#,
        log.display()
    );
    script(&text, 30.0)
}

#[test]
fn a_process_that_asks_for_it_learns_once_that_its_episode_is_over() {
    let dir = tempfile::tempdir().unwrap();
    for (closes, answer, expected) in [(true, "echo '{}'", 2), (false, "echo '{}'", 0), (true, "true", 2)] {
        let log = dir.path().join(format!("{closes}-{}", answer.len()));
        let mut world = closing(&log, closes, answer);
        let begun = std::time::Instant::now();
        for _ in 0..2 {
            assert_eq!(world.reset(7).unwrap().text, "begin");
            assert_eq!(world.step("x").unwrap().observation.text, "on");
            world.leave().unwrap();
            world.leave().unwrap();
        }
        // A process that gives no answer is not waited for as long as for other answers.
        assert!(begun.elapsed().as_secs_f64() < 15.0, "{:?}", begun.elapsed());
        let requests = std::fs::read_to_string(&log).unwrap();
        assert_eq!(requests.matches(r#"{"close":true}"#).count(), expected, "{requests}");
    }
}
