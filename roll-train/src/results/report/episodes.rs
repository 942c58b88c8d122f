//! Texts of language models on the page, from `trajectories.jsonl`: the first episode of an agent as the model reads it,
//! some other episodes, and answers to held-out conversations and starts before and after training.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use minijinja::{Value, context};
use roll_core::{Error, Result};
use roll_external::files;
use serde_json::Value as Json;

/// Bytes that are read from the beginning of the file, and from its end. The file as a whole may be large.
const MAX_READ_BYTES: u64 = 4 << 20;
/// Most answers to held-out conversations that are shown.
const MAX_ANSWERS: usize = 3;
/// Most held-out starts that are shown if every episode has a single turn.
const MAX_SHORT_STARTS: usize = 10;
/// Most held-out starts that are shown if an episode has several turns.
const MAX_LONG_STARTS: usize = 3;
/// Most characters of a piece of the first episode's text that are shown.
const TEXT_CHARACTERS: usize = 6000;
/// Number of episodes from the beginning of the file that are shown.
const FIRST_EPISODES: usize = 2;
/// Most turns of an episode that are shown: the first ones, and the last one.
const MAX_TURNS: usize = 6;
/// Most pictures of a turn that are shown.
const MAX_PICTURES: usize = 4;
/// Most characters of an observation or an answer that are shown.
const MAX_CHARACTERS: usize = 1500;

/// The records within [`MAX_READ_BYTES`] of the beginning and of the end of `trajectories.jsonl`. Both are empty if the
/// run has no such file. In a small file they are the same.
pub struct Texts {
    beginning: Vec<Json>,
    end: Vec<Json>,
}

impl Texts {
    /// Reads the records of a run.
    pub fn read(run: &Path) -> Result<Self> {
        let path = run.join("trajectories.jsonl");
        files::refuse_links(run, &path)?;
        if !path.is_file() {
            return Ok(Self { beginning: Vec::new(), end: Vec::new() });
        }
        let mut file = files::open(&path).map_err(Error::file("read", &path))?;
        let size = file.metadata().map_err(Error::file("read", &path))?.len();
        let beginning = records(&mut file, 0).map_err(Error::file("read", &path))?;
        let end = if size <= MAX_READ_BYTES {
            beginning.clone()
        } else {
            records(&mut file, size - MAX_READ_BYTES).map_err(Error::file("read", &path))?
        };
        Ok(Self { beginning, end })
    }
}

/// Answers to some held-out conversations, before training and in the last validation. Empty until there are two
/// validations.
pub fn answers(texts: &Texts) -> Vec<Value> {
    fn validation_answers(records: &[Json]) -> impl Iterator<Item = &Json> {
        records.iter().filter(|record| !is_trained(record) && record["answer"].is_string())
    }
    let first_step = validation_answers(&texts.beginning).next().map(|record| &record["step"]);
    let last_step = validation_answers(&texts.end).last().map(|record| &record["step"]);
    let (Some(first_step), Some(last_step)) = (first_step, last_step) else { return Vec::new() };
    if first_step == last_step {
        return Vec::new();
    }
    let answers_before = validation_answers(&texts.beginning).filter(|record| record["step"] == *first_step);
    let shown = answers_before.filter_map(|before| {
        let is_answer_after = |after: &&Json| after["step"] == *last_step && after["row"] == before["row"];
        let after = validation_answers(&texts.end).find(is_answer_after)?;
        Some(context! {
            row => before["row"].as_str(),
            prompt => cut(&before["prompt"]),
            wanted => cut(&before["wanted"]),
            before => cut(&before["answer"]),
            after => cut(&after["answer"]),
            step => last_step.as_u64(),
        })
    });
    shown.take(MAX_ANSWERS).collect()
}

/// Some held-out starts, as the agent plays them before training and in the last validation. Empty until there are two
/// validations.
pub fn starts(texts: &Texts) -> Vec<Value> {
    fn validation_episodes(records: &[Json]) -> impl Iterator<Item = &Json> {
        records.iter().filter(|record| !is_trained(record) && record["turns"].is_array())
    }
    let first_step = validation_episodes(&texts.beginning).next().map(|record| &record["step"]);
    let last_step = validation_episodes(&texts.end).last().map(|record| &record["step"]);
    let (Some(first_step), Some(last_step)) = (first_step, last_step) else { return Vec::new() };
    if first_step == last_step {
        return Vec::new();
    }
    let turns = |episode: &Json| episode["turns"].as_array().map_or(0, Vec::len);
    let played_before = || validation_episodes(&texts.beginning).filter(|record| record["step"] == *first_step);
    let is_short = played_before().all(|episode| turns(episode) == 1);
    let most = if is_short { MAX_SHORT_STARTS } else { MAX_LONG_STARTS };
    let mut shown: Vec<(&Json, Value)> = Vec::new();
    for before in played_before() {
        // With several episodes of a start, the first is shown.
        let is_shown = shown.iter().any(|(seed, _)| **seed == before["whole_seed"]);
        let is_same = |after: &&Json| after["step"] == *last_step && after["whole_seed"] == before["whole_seed"];
        let after = validation_episodes(&texts.end).find(is_same);
        if let Some(after) = after.filter(|_| !is_shown && shown.len() < most) {
            let value = context! {
                row => format!("score {:.3} before, {:.3} after", score(before), score(after)),
                prompt => cut(&before["turns"][0]["observation"]),
                pictures => pictures(&before["turns"][0]),
                before => played(before),
                after => played(after),
                step => last_step.as_u64(),
            };
            shown.push((&before["whole_seed"], value));
        }
    }
    shown.into_iter().map(|(_, value)| value).collect()
}

/// The agent's answers in an episode, numbered if there are several.
fn played(episode: &Json) -> String {
    let turns = episode["turns"].as_array().map(Vec::as_slice).unwrap_or_default();
    let shown = turns.iter().enumerate().filter(|(i, _)| *i + 1 < MAX_TURNS || *i + 1 == turns.len());
    let line = |(i, turn): (usize, &Json)| match turns.len() {
        1 => cut(&turn["response"]),
        _ => format!("{}: {}", i + 1, cut(&turn["response"])),
    };
    shown.map(line).collect::<Vec<_>>().join("\n")
}

/// The text of the first trained episode that has one, in pieces that the model read or wrote. Empty without such an episode.
pub fn first_text(texts: &Texts) -> Vec<Value> {
    let trained = texts.beginning.iter().filter(|record| is_trained(record));
    let pieces = trained.into_iter().find_map(|record| record["text"].as_array());
    let piece = |piece: &Json| {
        let (text, is_written) = match piece["wrote"].as_str() {
            Some(text) => (text, true),
            None => (piece["read"].as_str().unwrap_or_default(), false),
        };
        context! { text => shortened(text, TEXT_CHARACTERS), is_written }
    };
    pieces.into_iter().flatten().map(piece).collect()
}

/// The episodes to show: the first ones of the run, and the best and the worst one of the last step.
pub fn episodes(texts: &Texts) -> Vec<Value> {
    let first_episodes = texts.beginning.iter().filter(|episode| is_trained(episode)).take(FIRST_EPISODES);
    let mut shown: Vec<Value> = first_episodes.map(|episode| to_context("one of the first", episode)).collect();
    let step = |episode: &Json| episode["step"].as_u64();
    let mut of_last_step: Vec<&Json> = texts.end.iter().filter(|episode| is_trained(episode)).collect();
    let last_step = of_last_step.iter().filter_map(|episode| step(episode)).max();
    of_last_step.retain(|episode| step(episode) == last_step);
    // The best one comes first.
    of_last_step.sort_by(|a, b| score(b).total_cmp(&score(a)));
    if let [best, .., worst] = of_last_step[..] {
        shown.push(to_context("the best of the last step", best));
        shown.push(to_context("the worst of the last step", worst));
    }
    shown
}

/// The records in the lines of at most [`MAX_READ_BYTES`] from the position `from` on.
fn records(file: &mut File, from: u64) -> std::io::Result<Vec<Json>> {
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(from))?;
    file.take(MAX_READ_BYTES).read_to_end(&mut bytes)?;
    // The first and the last line may be cut off. They are not valid JSON then, and are left out.
    Ok(bytes.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect())
}

/// Whether the run was trained on the episode, and it is not one of a validation.
fn is_trained(episode: &Json) -> bool {
    episode["kind"] != "validation"
}

/// The score of an episode; the lowest if it has none.
fn score(episode: &Json) -> f64 {
    episode["score"].as_f64().unwrap_or(f64::NEG_INFINITY)
}

/// The values of the page's template for an episode. `description` is part of the title, such as "one of the first".
fn to_context(description: &str, episode: &Json) -> Value {
    let all_turns = episode["turns"].as_array().map(Vec::as_slice).unwrap_or_default();
    let mut turns = Vec::new();
    for (number, turn) in (1..).zip(all_turns) {
        let is_shown = number < MAX_TURNS || number == all_turns.len();
        if is_shown {
            turns.push(context! {
                number,
                observation => cut(&turn["observation"]),
                pictures => pictures(turn),
                response => cut(&turn["response"]),
                reward => turn["reward"].as_f64().map(|reward| reward.to_string()),
            });
        }
    }
    let solved = if episode["solved"] == true { ", solved" } else { "" };
    let (step, score) = (episode["step"].as_u64().unwrap_or_default(), score(episode));
    context! { title => format!("Step {step}, {description}: score {score:.3}{solved}"), turns }
}

/// The pictures of a turn, as addresses that hold a PNG. Anything else is left out.
fn pictures(turn: &Json) -> Vec<Value> {
    let is_of_base64 = |byte: u8| byte.is_ascii_alphanumeric() || b"+/=".contains(&byte);
    let is_picture =
        |url: &&str| url.strip_prefix("data:image/png;base64,").is_some_and(|base64| base64.bytes().all(is_of_base64));
    let urls = turn["pictures"].as_array().into_iter().flatten().filter_map(Json::as_str).filter(is_picture);
    urls.take(MAX_PICTURES).map(|url| Value::from_safe_string(url.into())).collect()
}

/// The text of a JSON string, cut after [`MAX_CHARACTERS`]; empty for any other JSON value.
fn cut(json: &Json) -> String {
    shortened(json.as_str().unwrap_or_default(), MAX_CHARACTERS)
}

/// The text, cut after `most` characters.
fn shortened(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{} ...", &text[..end]),
        None => text.into(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn answers_before_training_and_after_it_are_shown_by_conversation() {
        let dir = tempfile::tempdir().unwrap();
        let shown = |steps: &[u64]| {
            let record = |step: &u64, row: usize| {
                let answer = format!("answer {step}.{row}");
                json!({"step": step, "kind": "validation", "row": format!("line {row}"), "prompt": "p", "wanted": "w",
                    "answer": answer})
                .to_string()
                    + "\n"
            };
            let text: String = steps.iter().flat_map(|step| (1..=2).map(move |row| record(step, row))).collect();
            std::fs::write(dir.path().join("trajectories.jsonl"), text).unwrap();
            let texts = Texts::read(dir.path()).unwrap();
            assert!(episodes(&texts).is_empty());
            let part = |answer: &Value, part: &str| answer.get_attr(part).unwrap().to_string();
            let answers = answers(&texts);
            answers.iter().map(|a| ["row", "before", "after", "step"].map(|key| part(a, key))).collect::<Vec<_>>()
        };
        assert_eq!(
            shown(&[0, 5, 9]),
            [["line 1", "answer 0.1", "answer 9.1", "9"], ["line 2", "answer 0.2", "answer 9.2", "9"]]
        );
        assert!(shown(&[0]).is_empty());
    }

    #[test]
    fn held_out_starts_before_training_and_after_it_are_shown() {
        let dir = tempfile::tempdir().unwrap();
        let shown = |steps: &[u64], turns: usize| {
            let record = |step: u64, start: usize, sample: usize| {
                let turn = json!({"observation": format!("q{start}"), "response": format!("{step}.{start}.{sample}")});
                json!({"step": step, "kind": "validation", "whole_seed": start.to_string(), "score": step.min(1),
                    "turns": vec![turn; turns]})
                .to_string()
                    + "\n"
            };
            let starts =
                |step: u64| (0..12).flat_map(move |start| (0..2).map(move |sample| record(step, start, sample)));
            let text: String = steps.iter().flat_map(|step| starts(*step)).collect();
            std::fs::write(dir.path().join("trajectories.jsonl"), text).unwrap();
            let part = |start: &Value, part: &str| start.get_attr(part).unwrap().to_string();
            let starts = starts_of(dir.path());
            starts.iter().map(|s| ["prompt", "before", "after", "step"].map(|key| part(s, key))).collect::<Vec<_>>()
        };
        let played = shown(&[0, 5, 9], 1);
        assert_eq!((played.len(), &played[9]), (10, &["q9", "0.9.0", "9.9.0", "9"].map(String::from)));
        let played = shown(&[0, 9], 2);
        assert_eq!((played.len(), played[2][1].as_str()), (3, "1: 0.2.0\n2: 0.2.0"));
        assert!(shown(&[0], 1).is_empty());
    }

    fn starts_of(run: &Path) -> Vec<Value> {
        starts(&Texts::read(run).unwrap())
    }

    #[test]
    fn the_text_of_the_first_episode_is_cut_into_what_was_read_and_written() {
        let dir = tempfile::tempdir().unwrap();
        let first = json!({"step": 0, "text": [{"read": "<|user|>hi"}, {"wrote": "yo<|end|>"}]});
        let text = format!("{}\n{first}\n{}\n", json!({"step": 0}), json!({"step": 1, "text": [{"read": "other"}]}));
        std::fs::write(dir.path().join("trajectories.jsonl"), text).unwrap();
        let pieces = first_text(&Texts::read(dir.path()).unwrap());
        let part = |piece: &Value, part: &str| piece.get_attr(part).unwrap().to_string();
        let pieces: Vec<_> = pieces.iter().map(|piece| ["text", "is_written"].map(|key| part(piece, key))).collect();
        assert_eq!(pieces, [["<|user|>hi", "False"], ["yo<|end|>", "True"]]);
    }

    #[test]
    fn the_first_episodes_and_the_best_and_worst_of_the_last_step_are_shown() {
        let dir = tempfile::tempdir().unwrap();
        assert!(episodes(&Texts::read(dir.path()).unwrap()).is_empty());
        let episode = |step: u64, kind: &str, score: f64, filler: usize| {
            let turns: Vec<Json> = (0..20)
                .map(|i| {
                    json!({"observation": format!("o{i}{}", "x".repeat(filler)),
                "response": "<go>", "reward": 0.5})
                })
                .collect();
            json!({"step": step, "kind": kind, "score": score, "solved": score > 0.5, "turns": turns}).to_string()
                + "\n"
        };
        // More than is read from either end.
        let mut text =
            episode(0, "validation", 9.0, 0) + &episode(1, "train", 0.25, 3000) + &episode(1, "train", 0.5, 0);
        (0..200).for_each(|_| text += &episode(2, "train", 0.9, 3000));
        for (kind, score) in [("train", 0.4), ("train", 0.8), ("train", 0.1), ("validation", 7.0)] {
            text += &episode(3, kind, score, 0);
        }
        std::fs::write(dir.path().join("trajectories.jsonl"), text + "{\"step\":3,\"ki").unwrap();
        let shown = episodes(&Texts::read(dir.path()).unwrap());
        let titles: Vec<String> = shown.iter().map(|e| e.get_attr("title").unwrap().to_string()).collect();
        assert_eq!(
            titles,
            [
                "Step 1, one of the first: score 0.250",
                "Step 1, one of the first: score 0.500",
                "Step 3, the best of the last step: score 0.800, solved",
                "Step 3, the worst of the last step: score 0.100",
            ]
        );
        let turns: Vec<Value> = shown[0].get_attr("turns").unwrap().try_iter().unwrap().collect();
        let numbers: Vec<String> = turns.iter().map(|turn| turn.get_attr("number").unwrap().to_string()).collect();
        assert_eq!(numbers, ["1", "2", "3", "4", "5", "20"]);
        let text = turns[0].get_attr("observation").unwrap().to_string();
        assert!(text.len() < 1600 && text.ends_with("x ..."), "{text}");
    }

    #[test]
    fn pictures_of_a_turn_are_shown_and_other_addresses_are_not() {
        let url = "data:image/png;base64,AA+/==";
        let urls = [url, "https://example.org/a.png", "data:image/png;base64,\"onerror=", "data:text/html;base64,AA"];
        let episode = json!({"turns": [{"observation": "[picture 1x1]", "response": "a", "pictures": urls}]});
        let turns = to_context("any", &episode).get_attr("turns").unwrap();
        let shown = turns.get_item_by_index(0).unwrap().get_attr("pictures").unwrap();
        assert_eq!((shown.len(), shown.get_item_by_index(0).unwrap().to_string()), (Some(1), url.to_string()));
    }
}
