//! Questions from files and sums, in both splits.

#![allow(clippy::unwrap_used)]

use std::collections::HashSet;
use std::path::Path;

use roll_core::{BuildContext, Environment, Result, Split};
use serde_json::{Value, json};

use super::Questions;

fn questions(directory: &Path, options: Value) -> Result<Questions> {
    let mut context = BuildContext::new("flex");
    context.base_dir = directory.into();
    Questions::new(roll_core::parse_options("env", options.as_object().unwrap())?, &context)
}

fn asked(questions: &mut Questions, split: Split, number: u64) -> String {
    questions.enter(split, number).unwrap();
    questions.reset(number * 7).unwrap().text
}

fn all(questions: &mut Questions, split: Split, count: u64) -> Vec<String> {
    (0..count).map(|number| asked(questions, split, number)).collect()
}

fn refusal(directory: &Path, options: Value) -> String {
    questions(directory, options).err().unwrap().chain()
}

#[test]
fn held_out_sums_are_never_trained_on_in_any_order_of_their_numbers() {
    let here = Path::new(".");
    let mut sums = questions(here, json!({"source": "sums"})).unwrap();
    let sorted = |question: &String| {
        let numbers = question.trim_start_matches("What is ").trim_end_matches('?');
        let mut numbers: Vec<u64> = numbers.split(" + ").map(|number| number.parse().unwrap()).collect();
        numbers.sort_unstable();
        numbers
    };
    let trained = all(&mut sums, Split::Train, 8100);
    let validated = all(&mut sums, Split::Validation, 200);
    let trained_numbers: HashSet<Vec<u64>> = trained.iter().map(sorted).collect();
    assert!(validated.iter().all(|question| !trained_numbers.contains(&sorted(question))));
    assert_eq!(validated.iter().collect::<HashSet<_>>().len(), 200);
    // All sums are in one split or the other, and their order does not depend on the seed of the episode.
    let count = trained.iter().collect::<HashSet<_>>().len();
    assert!((7500..7800).contains(&count), "{count}");
    assert_eq!(trained[0], trained[count]);
    let question = asked(&mut sums, Split::Validation, 3);
    let right: u64 = sorted(&question).iter().sum();
    let step = sums.step(&format!("It is {right}.")).unwrap();
    assert_eq!((step.reward, step.terminated, step.valid, sums.solved()), (1.0, true, true, Some(true)));
    assert_eq!(sums.action(), right.to_string());
    assert!(sums.step("again").is_err());
    asked(&mut sums, Split::Validation, 3);
    let step = sums.step(&format!("{} or so", right + 1)).unwrap();
    assert_eq!((step.reward, step.terminated, step.valid, sums.solved()), (0.0, true, true, Some(false)));
}

#[test]
fn rows_are_asked_in_the_order_of_the_file_and_again_in_the_next_epoch() {
    let dir = tempfile::tempdir().unwrap();
    let lines: String =
        (0..40).map(|i| json!({"question": format!("q{i}?"), "answer": i}).to_string() + "\n\n").collect();
    std::fs::write(dir.path().join("a.jsonl"), lines).unwrap();
    let mut file = questions(dir.path(), json!({"path": "a.jsonl", "validation_share": 0.25})).unwrap();
    let numbers = |questions: Vec<String>| -> Vec<u64> {
        questions.iter().map(|q| q.trim_matches(['q', '?']).parse().unwrap()).collect()
    };
    let trained = numbers(all(&mut file, Split::Train, 80));
    let count = trained.windows(2).position(|pair| pair[0] >= pair[1]).unwrap() + 1;
    assert_eq!(trained[..40], trained[count..count + 40]);
    let validated = numbers(all(&mut file, Split::Validation, (40 - count) as u64));
    let mut both = [&trained[..count], &validated].concat();
    both.sort_unstable();
    assert_eq!(both, (0..40).collect::<Vec<_>>());
    // A row stays on its side if rows are added.
    let more: String =
        (0..80).rev().map(|i| json!({"problem": format!(" Q{i}? "), "answer": i}).to_string() + "\n").collect();
    std::fs::write(dir.path().join("b.jsonl"), more).unwrap();
    let mut file = questions(dir.path(), json!({"path": "b.jsonl", "validation_share": 0.25})).unwrap();
    let later: HashSet<String> =
        all(&mut file, Split::Validation, 80).iter().map(|q| q.trim().to_lowercase()).collect();
    assert!(validated.iter().all(|number| later.contains(&format!("q{number}?"))));
}

#[test]
fn a_question_is_never_on_both_sides() {
    let dir = tempfile::tempdir().unwrap();
    let row = |question: &str| json!({"question": question, "answer": 1}).to_string() + "\n";
    // Each question three times, written in different ways.
    let lines: String = (0..60).map(|i| row(&format!("Q {}", i % 20)) + &row(&format!(" q  {}\n", i % 20))).collect();
    std::fs::write(dir.path().join("a.jsonl"), &lines).unwrap();
    std::fs::write(dir.path().join("b.jsonl"), row("q 3") + &row("q 77")).unwrap();
    let normal = |question: &String| question.split_whitespace().collect::<Vec<_>>().join(" ").to_lowercase();
    for options in
        [json!({"path": "a.jsonl", "validation_share": 0.3}), json!({"path": "a.jsonl", "validation_path": "b.jsonl"})]
    {
        let mut file = questions(dir.path(), options).unwrap();
        let [trained, validated] = [Split::Train, Split::Validation]
            .map(|split| all(&mut file, split, 120).iter().map(normal).collect::<HashSet<_>>());
        assert!(!validated.is_empty() && trained.is_disjoint(&validated), "{trained:?} {validated:?}");
        assert!(trained.len() + validated.len() >= 20);
    }
}

#[test]
fn a_directory_has_its_splits_in_the_names_of_its_files() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("set/data");
    std::fs::create_dir_all(&data).unwrap();
    let row = |question: &str| json!({"prompt": [{"role": "user", "content": question}], "answer": "#### 1"});
    std::fs::write(data.join("train-0.jsonl"), row("a").to_string()).unwrap();
    std::fs::write(data.join("train-1.json"), json!([row("b"), row("c")]).to_string()).unwrap();
    std::fs::write(data.join("test-0.jsonl"), row("d").to_string()).unwrap();
    std::fs::write(dir.path().join("set/dataset_infos.json"), "{}").unwrap();
    std::fs::write(dir.path().join("set/README.md"), "# Set").unwrap();
    let mut set = questions(dir.path(), json!({"path": "set"})).unwrap();
    assert_eq!(all(&mut set, Split::Train, 4), ["a", "b", "c", "a"]);
    assert_eq!(all(&mut set, Split::Validation, 2), ["d", "d"]);
    let parquet = dir.path().join("parquet");
    std::fs::create_dir_all(&parquet).unwrap();
    std::fs::write(parquet.join("train.parquet"), "PAR1").unwrap();
    for path in ["parquet", "parquet/train.parquet"] {
        let problem = refusal(dir.path(), json!({"path": path}));
        assert!(problem.contains("Parquet") && problem.contains("to_json"), "{problem}");
    }
}

#[test]
fn messages_choices_and_nested_keys_become_questions() {
    let dir = tempfile::tempdir().unwrap();
    let rows = [
        json!({"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}],
            "reward_model": {"ground_truth": "4"}}),
        json!({"prompt": "3 + 3?", "reward_model": {"ground_truth": 6}}),
    ];
    let lines: String = rows.iter().map(|row| row.to_string() + "\n").collect();
    std::fs::write(dir.path().join("a.jsonl"), lines).unwrap();
    let options = json!({"path": "a.jsonl", "answer_key": "reward_model.ground_truth", "validation_share": 0});
    let mut file = questions(dir.path(), options).unwrap();
    assert_eq!(all(&mut file, Split::Train, 2), ["2 + 2?", "3 + 3?"]);
    assert_eq!(file.instructions(), "");
    assert_eq!(asked(&mut file, Split::Train, 0), "2 + 2?");
    assert_eq!(file.instructions(), "Be brief.");
    assert_eq!(file.step("4").unwrap().reward, 1.0);
    file.enter(Split::Validation, 0).unwrap();
    assert!(file.reset(0).unwrap_err().to_string().contains("algo.val_batch_size: 0"));
    let rows = [
        json!({"question": "Capital?", "choices": ["Rome", "Paris"], "answer": 1}),
        json!({"question": "River?", "choices": {"text": ["Po", "Loire"], "label": ["A", "B"]}, "answerKey": "B"}),
    ];
    std::fs::write(dir.path().join("b.json"), json!(rows).to_string()).unwrap();
    let options = json!({"path": "b.json", "check": "choice", "validation_share": 0});
    let mut file = questions(dir.path(), options).unwrap();
    assert_eq!(all(&mut file, Split::Train, 2), ["Capital?\nA. Rome\nB. Paris", "River?\nA. Po\nB. Loire"]);
    assert_eq!(file.step("(B)").unwrap().reward, 1.0);
}

#[test]
fn a_wrong_row_is_named_with_its_line() {
    let dir = tempfile::tempdir().unwrap();
    let good = json!({"question": "a", "answer": 1}).to_string();
    for (row, words) in [
        ("{", "line 3: expected an object"),
        ("[1]", "line 3: expected an object, found another"),
        (
            r#"{"text": "a", "answer": 1}"#,
            "line 3: no key `question`, `prompt`, `problem` (`env.question_key`); the row has `text`, `answer`",
        ),
        (r#"{"question": "a"}"#, "`env.answer_key`"),
        (r#"{"question": "a", "answer": null}"#, "`env.answer_key`"),
        (r#"{"question": "a", "answer": "none"}"#, "line 3: the answer: expected one number, found 0"),
        (r#"{"question": 3, "answer": 1}"#, "expected a text or a list of messages"),
        (r#"{"question": " ", "answer": 1}"#, "the question is empty"),
        (
            r#"{"question": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "answer": 1}"#,
            "2 messages (user, assistant)",
        ),
    ] {
        std::fs::write(dir.path().join("a.jsonl"), format!("{good}\n\n{row}\n")).unwrap();
        let problem = refusal(dir.path(), json!({"path": "a.jsonl", "validation_share": 0}));
        assert!(problem.contains("a.jsonl") && problem.contains(words), "{problem}");
    }
    std::fs::write(dir.path().join("a.jsonl"), &good).unwrap();
    for (options, words) in [
        (json!({"path": "a.jsonl"}), "env.validation_share"),
        (json!({"path": "a.jsonl", "validation_path": "a.jsonl"}), "no question is left to train on"),
        (json!({"path": "absent.jsonl"}), "absent.jsonl"),
        (json!({}), "env.path"),
        (json!({"path": "a.jsonl", "validation_share": 0, "question_key": "q"}), "no key `q`"),
    ] {
        let problem = refusal(dir.path(), options.clone());
        assert!(problem.contains(words), "{options}: {problem}");
    }
    std::fs::write(dir.path().join("empty.jsonl"), "\n").unwrap();
    assert!(refusal(dir.path(), json!({"path": "empty.jsonl"})).contains("found none"));
}

#[cfg(unix)]
#[test]
fn a_program_gets_the_whole_row_and_judges() {
    let dir = tempfile::tempdir().unwrap();
    let row = json!({"question": "a", "answer": {"any": [1]}, "tests": ["t1"]});
    std::fs::write(dir.path().join("a.jsonl"), row.to_string()).unwrap();
    let script =
        r#"while read -r line; do echo "$line" >> requests.txt; echo '{"reward": 0.25, "solved": false}'; done"#;
    std::fs::write(dir.path().join("judge.sh"), script).unwrap();
    let options = json!({"path": "a.jsonl", "check": "command", "command": ["sh", "judge.sh"], "validation_share": 0, "workers": 1});
    let mut environments: Vec<Questions> = (0..3).map(|_| questions(dir.path(), options.clone()).unwrap()).collect();
    for environment in &mut environments {
        asked(environment, Split::Train, 5);
        let step = environment.step("b").unwrap();
        assert_eq!((step.reward, environment.solved()), (0.25, Some(false)));
    }
    let requests = std::fs::read_to_string(dir.path().join("requests.txt")).unwrap();
    assert_eq!(requests.lines().count(), 3);
    let request: Value = serde_json::from_str(requests.lines().next().unwrap()).unwrap();
    assert_eq!(request, json!({"question": "a", "answer": "b", "reference": {"any": [1]}, "row": row}));
}

#[test]
fn a_row_has_pictures_beside_its_file() {
    let dir = tempfile::tempdir().unwrap();
    let picture = roll_media::Picture { width: 2, height: 1, rgb: vec![9; 6] };
    std::fs::write(dir.path().join("a.png"), roll_media::encode_png(&picture).unwrap()).unwrap();
    let asked = |row: Value| {
        std::fs::write(dir.path().join("rows.jsonl"), row.to_string()).unwrap();
        let options = json!({"path": "rows.jsonl", "image_key": "image", "validation_share": 0.0});
        questions(dir.path(), options).and_then(|mut questions| questions.reset(0))
    };
    let seen = asked(json!({"question": "How many?", "answer": 3, "image": "a.png"})).unwrap();
    assert_eq!((seen.text.as_str(), seen.pictures[0].size()), ("How many?", [1, 2]));
    assert_eq!(
        asked(json!({"question": "Same?", "answer": 1, "image": ["a.png", "a.png"]})).unwrap().pictures.len(),
        2
    );
    for (image, problem) in [
        (json!("b.png"), "there is no file"),
        (json!({"bytes": []}), "expected the path of a picture"),
        (json!([]), "expected the path of a picture"),
        (json!(null), "no key `image` (`env.image_key`)"),
        (json!("rows.jsonl"), "not a PNG"),
    ] {
        let found = asked(json!({"question": "q", "answer": 1, "image": image})).unwrap_err().chain();
        assert!(found.contains(problem) && found.contains("rows.jsonl"), "{found}");
    }
}
