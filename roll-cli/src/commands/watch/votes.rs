//! The questions of runs to people who vote.

use std::path::PathBuf;
use std::time::SystemTime;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use roll_core::{Error, Result};
use roll_external::files::read;
use roll_rewards::vote::files::Votes;
use serde_json::{Value, json};

/// Greatest size of a clip in bytes.
const MAX_CLIP: u64 = 64 << 20;

/// The oldest open question of the runs, with its clips as base64 in the order in which they are shown, and the numbers
/// of votes and of open questions: JSON.
pub fn next(runs: &[PathBuf]) -> Result<String> {
    let (mut given, mut open) = (0, Vec::new());
    for (run, path) in runs.iter().enumerate() {
        for (time, id, answered) in Votes(path.clone()).questions()? {
            match answered {
                true => given += 1,
                false => open.push((time, run, id)),
            }
        }
    }
    let show = |(_, run, id): &(SystemTime, usize, String)| -> Result<Value> {
        let votes = Votes(runs[*run].clone());
        let question = votes.question(id)?;
        let clip = |position: usize| {
            let path = votes.clip(&question.clips[position])?;
            Ok(STANDARD.encode(read(&path, MAX_CLIP).map_err(Error::file("read", path))?))
        };
        let clips = question.order().into_iter().map(clip).collect::<Result<Vec<_>>>()?;
        Ok(json!({ "run": run, "id": id, "prompt": question.prompt, "question": question.question, "clips": clips }))
    };
    let question = open.iter().min().map(show).transpose()?;
    Ok(json!({ "given": given, "open": open.len(), "question": question }).to_string())
}
