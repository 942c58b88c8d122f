//! The questions of runs with the reward `vote`, as the page on which people vote asks for them.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use roll_core::Result;
use roll_rewards::vote::files::Votes;
use roll_train::results::report::live;
use serde_json::{Value, json};

/// Most questions in one answer to the page. It shows the second one while the vote on the first can be taken back.
const MAX_QUESTIONS: usize = 2;

/// The oldest open questions of the runs as JSON, with the ids of their clips in the order in which they are shown. The
/// JSON also has the numbers of votes (`given`), of open questions (`open`), and of questions that will probably come
/// (`coming`), and whether all runs have ended (`ended`).
pub fn next(runs: &[PathBuf], have_ended: bool) -> Result<String> {
    let (mut given, mut coming) = (0, 0);
    // Time, index of the run, and id of each open question.
    let mut open = Vec::new();
    for (run, path) in runs.iter().enumerate() {
        let questions = Votes(path.clone()).questions()?;
        coming += expected_questions(path, &questions).saturating_sub(questions.len());
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
    let questions = open.iter().take(MAX_QUESTIONS).map(show).collect::<Result<Vec<_>>>()?;
    let coming = if have_ended { 0 } else { coming };
    let answer = json!({
        "given": given, "open": open.len(), "coming": coming, "ended": have_ended, "questions": questions,
    });
    Ok(answer.to_string())
}

/// The expected number of questions of the whole run: the mean number of questions of a logged step, times the number
/// of steps. 0 before the first step is logged. `questions` has the time, the id and whether there is an answer.
fn expected_questions(run: &Path, questions: &[(SystemTime, String, bool)]) -> usize {
    let metrics = run.join("metrics.jsonl");
    let Ok(logged) = std::fs::metadata(&metrics).and_then(|metadata| metadata.modified()) else { return 0 };
    let Some((steps_done, all_steps)) = live::steps(run) else { return 0 };
    // Questions that are newer than the last line of the metrics belong to a step that is not done.
    let asked_count = questions.iter().filter(|(time, ..)| *time <= logged).count();
    (asked_count as u64 * all_steps).checked_div(steps_done).unwrap_or_default() as usize
}
