//! The questions of runs to people who vote.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use roll_core::Result;
use roll_rewards::vote::files::Votes;
use roll_train::results::report::live;
use serde_json::{Value, json};

/// Most questions of an answer: the page shows the second one while the vote on the first can be taken back.
const QUESTIONS: usize = 2;

/// The oldest open questions of the runs, with the ids of their clips in the order in which they are shown; the numbers of
/// votes and of open questions; about how many will come; and whether all runs have `ended`: JSON.
pub fn next(runs: &[PathBuf], ended: bool) -> Result<String> {
    let (mut given, mut coming, mut open) = (0, 0, Vec::new());
    for (run, path) in runs.iter().enumerate() {
        let questions = Votes(path.clone()).questions()?;
        coming += expected(path, &questions).saturating_sub(questions.len());
        for (time, id, answered) in questions {
            match answered {
                true => given += 1,
                false => open.push((time, run, id)),
            }
        }
    }
    open.sort();
    let show = |(_, run, id): &(SystemTime, usize, String)| -> Result<Value> {
        let question = Votes(runs[*run].clone()).question(id)?;
        let clips: Vec<&String> = question.order().into_iter().map(|position| &question.clips[position]).collect();
        Ok(json!({
            "run": run, "id": id, "prompt": question.prompt, "question": question.question, "clips": clips,
            "reference": question.reference,
        }))
    };
    let questions = open.iter().take(QUESTIONS).map(show).collect::<Result<Vec<_>>>()?;
    let coming = if ended { 0 } else { coming };
    let answer = json!({
        "given": given, "open": open.len(), "coming": coming, "ended": ended, "questions": questions,
    });
    Ok(answer.to_string())
}

/// Questions of the whole run, if each step asks as many as those that are logged; 0 before the first one.
fn expected(run: &Path, questions: &[(SystemTime, String, bool)]) -> usize {
    let metrics = run.join("metrics.jsonl");
    let Ok(logged) = std::fs::metadata(&metrics).and_then(|metadata| metadata.modified()) else { return 0 };
    let Some((done, steps)) = live::steps(run) else { return 0 };
    // The questions of the step that goes on come after the last line of the metrics.
    let asked = questions.iter().filter(|(time, ..)| *time <= logged).count();
    (asked as u64 * steps).checked_div(done).unwrap_or_default() as usize
}
