//! `roll init`: asks what to train on what, and writes a configuration to begin with.

use std::io::{BufRead, Write};

use roll_backends::Backend;
use roll_core::serde_json::Value as Json;
use roll_core::{Error, Kind, Registry, Result};
use roll_train::config::{Section, sections};

use super::config::{inline, wrapped};
use crate::args::{Check, ConfigArgs, Init, Layers, Run};
use crate::output::refuse_existing;

/// Columns of a comment.
const COLUMNS: usize = 100;

/// What a user may want, and the algorithm for it.
const PURPOSES: [(&str, &str); 5] = [
    ("a video model, towards a reward that has a gradient", "reward_fl"),
    ("a video model, towards any reward", "diffusion_nft"),
    ("a video model, on clips", "flow_matching"),
    ("a language model, as an agent in an environment", "agentic_ppo"),
    ("a language model, on conversations", "sft"),
];

/// A key that is asked for. An empty answer to a question without a default leaves the key out.
struct Question {
    key: &'static str,
    asks: &'static str,
    default: &'static str,
}

const VIDEO: [Question; 5] = [
    Question { key: "model.tokenizer_path", asks: "Directory of its tokenizer", default: "google/umt5-xxl" },
    Question {
        key: "data.metadata",
        asks: "Table or directory of clips, or text file of prompts",
        default: "data.csv",
    },
    Question { key: "data.height", asks: "Height of the videos in pixels", default: "480" },
    Question { key: "data.width", asks: "Width of the videos in pixels", default: "480" },
    Question { key: "data.num_frames", asks: "Frames of a video", default: "81" },
];

/// The answers so far, as keys and values, in the order of the file.
type Answers = Vec<(&'static str, String)>;

pub fn init(args: Init) -> Result<()> {
    let file = &args.file;
    refuse_existing(file, args.force)?;
    let registry = Registry::linked()?;
    let answers = interview(&registry)?;
    let text = written(&answers, &sections(&registry));
    std::fs::write(file, text).map_err(Error::file("write", file))?;
    println!("\nwrote {}; checking it as `roll check {}` does\n", file.display(), file.display());
    let layers = Layers { files: vec![file.clone()], ..Layers::default() };
    let config = ConfigArgs { layers, ..ConfigArgs::default() };
    super::check::check(Check::of(Run { config, ..Run::default() }))?;
    println!("\ntrain with: roll run {}", file.display());
    Ok(())
}

fn interview(registry: &Registry) -> Result<Answers> {
    println!("An empty answer takes the value in brackets.\n");
    let (_, algorithm) = PURPOSES[choose("What do you want to train?", &PURPOSES.map(|(what, _)| what))?];
    let mut answers = vec![("algo.name", algorithm.to_string())];
    let is_video = !matches!(algorithm, "agentic_ppo" | "sft");
    let model = if is_video { "wan2_2" } else { "causal_lm" };
    answers.push(("model.name", model.into()));
    let files = match is_video {
        true => Question { key: "model.model_paths", asks: "JSON list of the model's files", default: "" },
        false => Question { key: "model.model_path", asks: "Directory or GGUF file of the model", default: "" },
    };
    // Without files, `roll run` takes those of the demo, and its data and reward.
    let is_demo = !put(&mut answers, &files, " (none: the demo's small model and data)")?;
    match algorithm {
        _ if is_demo => {}
        "agentic_ppo" => component(registry, &mut answers, Kind::Environment, "env.name", "frozen_lake")?,
        "sft" => {
            let data = Question { key: "algo.data", asks: "JSON lines of conversations", default: "data.jsonl" };
            put(&mut answers, &data, "")?;
        }
        _ => {
            for question in &VIDEO {
                put(&mut answers, question, "")?;
            }
            if algorithm != "flow_matching" {
                component(registry, &mut answers, Kind::Reward, "reward.name", "insightface")?;
            }
        }
    }
    if !is_demo {
        put(&mut answers, &Question { key: "steps", asks: "Optimizer steps", default: "100" }, "")?;
    }
    let usable: Vec<_> = Backend::ALL.into_iter().filter(|backend| backend.usable(0).is_ok()).collect();
    if let [_, _, ..] = usable[..] {
        let names: Vec<_> = usable.iter().map(|backend| backend.name()).collect();
        answers.push(("backend", names[choose("Where does it run?", &names)?].into()));
    }
    Ok(answers)
}

/// Asks for a component, and for the files that it needs.
fn component(
    registry: &Registry,
    answers: &mut Answers,
    kind: Kind,
    key: &'static str,
    default: &'static str,
) -> Result<()> {
    let names: Vec<_> = registry.entries().iter().filter(|e| e.factory.kind() == kind).map(|e| e.name).collect();
    println!("{}s: {}", kind.section(), names.join(", "));
    let question = Question { key, asks: "Which one", default };
    loop {
        put(answers, &question, "")?;
        match answers.last() {
            Some((_, name)) if !names.contains(&name.as_str()) => {
                println!("`{name}` is none of them");
                answers.pop();
            }
            Some((_, name)) if name == "insightface" => {
                let files = "Directory of antelopev2 (scrfd_10g_bnkps.onnx, glintr100.onnx)";
                let key = "reward.reward_model_path";
                return put(answers, &Question { key, asks: files, default: "antelopev2" }, "").map(drop);
            }
            _ => return Ok(()),
        }
    }
}

/// Asks for a key and keeps the answer. Returns whether there is one.
fn put(answers: &mut Answers, question: &Question, note: &str) -> Result<bool> {
    let hint = if question.default.is_empty() { note.into() } else { format!(" [{}]", question.default) };
    let answer = ask(&format!("{} (`{}`){hint}: ", question.asks, question.key))?;
    let answer = if answer.is_empty() { question.default.to_string() } else { answer };
    let given = !answer.is_empty();
    if given {
        answers.push((question.key, answer));
    }
    Ok(given)
}

/// Asks for one of several things; returns its index. The first is the default.
fn choose(asks: &str, options: &[&str]) -> Result<usize> {
    println!("{asks}");
    options.iter().enumerate().for_each(|(i, option)| println!("  {}  {option}", i + 1));
    loop {
        let answer = ask("[1]: ")?;
        match answer.parse::<usize>() {
            _ if answer.is_empty() => return Ok(0),
            Ok(number) if (1..=options.len()).contains(&number) => return Ok(number - 1),
            _ => println!("expected a number from 1 to {}, found `{answer}`", options.len()),
        }
    }
}

/// Prints a question and reads a line.
fn ask(question: &str) -> Result<String> {
    print!("{question}");
    let read = Error::failed("the answers cannot be read");
    std::io::stdout().flush().map_err(Error::failed("the question cannot be printed"))?;
    let mut line = String::new();
    match std::io::stdin().lock().read_line(&mut line).map_err(read)? {
        0 => Err(Error::Misuse("the answers ended before the last question; nothing was written".into())),
        _ => Ok(line.trim().to_string()),
    }
}

/// The configuration as YAML, each key after its meaning.
fn written(answers: &Answers, sections: &[Section]) -> String {
    let mut text = String::from("# All other keys have their defaults: `roll config --reference` explains them.\n");
    for section in ["", "algo", "model", "env", "reward", "data"] {
        let keys: Vec<_> =
            answers.iter().filter(|(key, _)| key.split_once('.').map_or("", |(own, _)| own) == section).collect();
        let indent = if section.is_empty() { "" } else { "  " };
        if !keys.is_empty() && !section.is_empty() {
            text += &format!("\n{section}:\n");
        }
        for (key, value) in keys {
            let name = key.rsplit('.').next().unwrap_or(key);
            for line in meaning(key, answers, sections).iter().flat_map(|about| wrapped(about, COLUMNS)) {
                text += &format!("{indent}# {line}\n");
            }
            let value = value.parse::<u64>().map_or_else(|_| Json::from(value.as_str()), Json::from);
            text += &format!("{indent}{name}: {}\n", inline(&value));
        }
    }
    text
}

/// The documentation of a key, from the component that was chosen or from a section.
fn meaning<'a>(key: &str, answers: &Answers, sections: &'a [Section]) -> Option<&'a str> {
    let chosen =
        |section: &&Section| section.component.is_none_or(|(_, name)| answers.iter().any(|(_, value)| value == name));
    let keys = sections.iter().filter(chosen).flat_map(|section| &section.keys);
    keys.into_iter().find(|known| known.name.replacen(".N.", ".", 1) == key).map(|known| known.about.as_str())
}
