#![allow(clippy::unwrap_used)]
use roll_core::{LanguageModel, Message};
use roll_testing::Bigram;

use super::conversations::Conversations;
use super::*;

fn file(text: &str) -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("data.jsonl");
    std::fs::write(&path, text).unwrap();
    (dir, path)
}

#[test]
fn only_what_the_assistant_says_is_trained_on() {
    let (_dir, path) = file(
        "{\"messages\": [{\"role\": \"user\", \"content\": \"ab\"}, {\"role\": \"assistant\", \"content\": \"c\"}, \
         {\"role\": \"user\", \"content\": \"d\"}, {\"role\": \"assistant\", \"content\": \"ef\"}]}\n\n",
    );
    let data = Conversations::read(&path).unwrap();
    let model = Bigram::new();
    let tokens = data.tokens(0, TrainOn::Responses, &model).unwrap();
    let whole = model.detokenize(&tokens.ids).unwrap();
    assert_eq!(whole, "u:ab$a:c$u:d$a:ef$");
    let trained: String = whole.chars().zip(&tokens.train).filter(|(_, t)| **t).map(|(c, _)| c).collect();
    assert_eq!(trained, "c$ef$");
    assert!(data.tokens(0, TrainOn::All, &model).unwrap().train.iter().all(|t| *t));
}

#[test]
fn invalid_conversations_are_named_by_their_line() {
    for (text, word) in [
        ("{\"messages\": []}\n", "line 1"),
        ("{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}\nno\n", "line 2"),
        ("\n", "found none"),
        ("{\"messages\": [{\"role\": \"robot\", \"content\": \"a\"}]}\n", "line 1: the role `robot`"),
        ("{\"message\": 3}\n", "messages"),
    ] {
        let (_dir, path) = file(text);
        let reason = Conversations::read(&path).map(drop).unwrap_err().to_string();
        assert!(reason.contains(word), "{reason}");
    }
}

#[test]
fn a_template_that_rewrites_history_is_refused() {
    let (_dir, path) = file(
        "{\"messages\": [{\"role\": \"assistant\", \"content\": \"ab\"}, {\"role\": \"assistant\", \"content\": \"c\"}]}",
    );
    let mut model = Bigram::new();
    model.forgets = true;
    let reason = Conversations::read(&path).unwrap().tokens(0, TrainOn::Responses, &model).unwrap_err().to_string();
    assert!(reason.contains("line 1") && reason.contains("differently"), "{reason}");
    let one = [Message::new("user", "a")];
    assert_eq!(model.render_chat(&one, true).unwrap(), "u:a$a:");
}

#[test]
fn rejects_invalid_training_options() {
    let zero = SftConfig { batch_size: 0, ..SftConfig::default() };
    assert!(Sft::new(zero, Conversations::default()).err().unwrap().to_string().contains("batch_size"));
    let context = BuildContext::new("flex");
    let reason = Sft::open(SftConfig::default(), &context).err().unwrap().to_string();
    assert!(reason.contains("algo.data"), "{reason}");
}
