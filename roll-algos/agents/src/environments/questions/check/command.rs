//! Answers that a program of the user judges: one JSON object per line, on stdin and stdout.
//!
//! ```text
//! -> {"question": "...", "answer": "...", "reference": ..., "row": {...}}     `row` has all keys of the data set's row
//! <- {"reward": 0.5}                                  also "solved" (by default, whether the reward is positive) and
//!                                                     "valid" (true unless given)
//! <- {"error": "..."}                                 instead: the episode is left out
//! ```

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use super::Verdict;
use crate::environments::process::child::{Child, ChildOptions};
use crate::environments::process::limits::StartPermit;
use crate::environments::protocol::{shortened, warn_once};

/// Greatest length of an answer in bytes.
const MAX_LINE_BYTES: usize = 1 << 20;

/// Processes of the program that judge answers, started when they are needed.
pub struct Judges {
    options: ChildOptions,
    /// Most processes.
    most: usize,
    pool: Mutex<Pool>,
    /// Notified when a process is idle again, or has ended.
    freed: Condvar,
}

#[derive(Default)]
struct Pool {
    idle: Vec<Child>,
    /// Number of processes, the idle ones included.
    running: usize,
}

/// The program's answer.
#[derive(Deserialize)]
struct Judgement {
    error: Option<String>,
    reward: Option<f64>,
    solved: Option<bool>,
    valid: Option<bool>,
    #[serde(flatten)]
    unknown: BTreeMap<String, serde::de::IgnoredAny>,
}

impl Judges {
    /// Judges by at most `most` processes of `command`, each of which has `timeout` for an answer.
    pub fn new(command: Vec<String>, directory: PathBuf, timeout: Duration, most: usize) -> Self {
        let options = ChildOptions { command, directory, timeout, line_bytes: MAX_LINE_BYTES };
        Self { options, most, pool: Mutex::default(), freed: Condvar::new() }
    }

    /// Asks a process for its judgement. Waits for one if all are busy. A process that fails is ended, and the next
    /// request starts another.
    pub fn judge(&self, request: &Value) -> Result<Verdict, String> {
        let mut judge = self.hire()?;
        let answered = judge.ask(request.to_string(), self.options.timeout);
        let judged = answered.and_then(|line| parse(&line));
        self.release(judged.is_ok().then_some(judge));
        judged?.verdict()
    }

    /// An idle process, or a new one.
    fn hire(&self) -> Result<Child, String> {
        let mut pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(child) = pool.idle.pop() {
                return Ok(child);
            }
            if pool.running < self.most {
                pool.running += 1;
                break;
            }
            pool = self.freed.wait(pool).unwrap_or_else(PoisonError::into_inner);
        }
        drop(pool);
        let started = Child::start(&self.options, &StartPermit::wait());
        if started.is_err() {
            self.release(None);
        }
        started
    }

    /// Makes a process idle, or forgets one that is `None`.
    fn release(&self, child: Option<Child>) {
        let mut pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
        match child {
            Some(child) => pool.idle.push(child),
            None => pool.running -= 1,
        }
        drop(pool);
        self.freed.notify_one();
    }
}

fn parse(line: &str) -> Result<Judgement, String> {
    serde_json::from_str(line).map_err(|e| format!("its answer {} is not valid: {e}", shortened(line.as_bytes())))
}

impl Judgement {
    fn verdict(self) -> Result<Verdict, String> {
        if !self.unknown.is_empty() {
            let unknown: Vec<String> = self.unknown.keys().map(|key| format!("`{}`", key.escape_debug())).collect();
            warn_once(&format!(
                "answers of `env.command` have keys without effect: {}; keys with one are `reward`, `solved`, `valid` \
                 and `error`",
                unknown.join(", ")
            ));
        }
        if let Some(error) = self.error {
            return Err(format!("it reports: {error}"));
        }
        let reward = self.reward.ok_or("its answer has no `reward`")?;
        let solved = self.solved.unwrap_or(reward > 0.0);
        Ok(Verdict { reward, solved, valid: self.valid.unwrap_or(true), found: String::new() })
    }
}

#[cfg(unix)]
#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    fn judges(script: &str, timeout: f64, most: usize) -> Judges {
        let command = ["sh", "-c", script].map(String::from).to_vec();
        Judges::new(command, ".".into(), Duration::from_secs_f64(timeout), most)
    }

    #[test]
    fn a_program_judges_and_may_fail_once() {
        let script = r#"while read -r line; do case "$line" in
            *right*) echo '{"reward": 0.5}' ;;
            *wrong*) echo '{"reward": -1, "valid": false}' ;;
            *none*) echo '{"solved": true}' ;;
            *error*) echo '{"error": "no tests"}' ;;
            *text*) echo 'true' ;;
            *slow*) sleep 60 ;;
            *) exit 3 ;;
        esac; done"#;
        let judges = judges(script, 2.0, 2);
        let judge = |answer: &str| judges.judge(&json!({ "answer": answer }));
        for _ in 0..2 {
            let right = judge("right").unwrap();
            assert_eq!((right.reward, right.solved, right.valid), (0.5, true, true));
            let wrong = judge("wrong").unwrap();
            assert_eq!((wrong.reward, wrong.solved, wrong.valid), (-1.0, false, false));
            for (answer, words) in [
                ("none", "no `reward`"),
                ("error", "no tests"),
                ("text", "not valid"),
                ("slow", "within 2 s"),
                ("exit", "exit status: 3"),
            ] {
                let problem = judge(answer).unwrap_err();
                assert!(problem.contains(words), "{answer}: {problem}");
            }
        }
        assert!(self::judges("exit 0", 2.0, 1).judge(&json!({})).is_err());
        let absent = Judges::new(vec!["no-such-program".into()], ".".into(), Duration::from_secs(1), 1);
        for _ in 0..2 {
            assert!(absent.judge(&json!({})).unwrap_err().contains("cannot be started"));
        }
    }

    #[test]
    fn many_answers_share_few_processes() {
        let judges = judges(r#"while read -r line; do echo "{\"reward\": $$}"; done"#, 60.0, 2);
        let rewards: std::collections::BTreeSet<u64> = std::thread::scope(|scope| {
            let asked: Vec<_> =
                (0..16).map(|_| scope.spawn(|| judges.judge(&json!({})).unwrap().reward as u64)).collect();
            asked.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(rewards.len() <= 2, "{rewards:?}");
    }
}
