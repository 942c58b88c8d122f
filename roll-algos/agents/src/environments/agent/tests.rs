//! Programs of agents: this test binary, which plays a part when it is started with the name of one.
#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use roll_core::{LanguageModel, Noise, Silent};
use roll_testing::{Bigram, Letters, Scripted};
use serde_json::Value;

use super::*;
use crate::agentic_ppo::AgenticPpoConfig;
use crate::agentic_ppo::config::{Estimator, TruncatedAnswers};
use crate::agentic_ppo::episode::{Ending, Episode};
use crate::agentic_ppo::rollout::{EpisodePlan, Writer, play};

/// Sends a request to the endpoint, as a client of OpenAI's does. Returns status and body.
fn ask(path: &str, key: &str, body: &Value) -> (u16, Value) {
    let base = std::env::var("OPENAI_BASE_URL").unwrap();
    let address = base.trim_start_matches("http://").trim_end_matches("/v1");
    let mut stream = TcpStream::connect(address).unwrap();
    let (method, body) = if body.is_null() { ("GET", String::new()) } else { ("POST", body.to_string()) };
    let length = body.len();
    let head = format!(
        "{method} /v1/{path} HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {key}\r\nContent-Length: {length}\r\n\r\n"
    );
    stream.write_all((head + &body).as_bytes()).unwrap();
    let (mut reader, mut head, mut length) = (BufReader::new(stream), Vec::new(), 0);
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        if let Some(n) = line.strip_prefix("Content-Length: ") {
            length = n.trim().parse().unwrap();
        }
        if line.trim().is_empty() {
            break;
        }
        head.push(line);
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    let status = head[0].split(' ').nth(1).unwrap().parse().unwrap();
    (status, serde_json::from_slice(&body).unwrap())
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

/// The program: plays the part that `PART` names.
#[test]
#[ignore = "the program that the other tests start"]
fn program() {
    let part = std::env::args().next_back().unwrap();
    let part = part.as_str();
    let key = std::env::var("OPENAI_API_KEY").unwrap();
    let complete = |messages: &[Value]| {
        let (status, body) = ask("chat/completions", &key, &json!({"model": "policy", "messages": messages}));
        assert_eq!(status, 200, "{body}");
        body["choices"][0]["message"].clone()
    };
    let episode: Value = serde_json::from_str(&std::env::var("ROLL_EPISODE").unwrap()).unwrap();
    let report = |reward: f64| println!("\n{}", json!({ "reward": reward }));
    match part {
        "likes-x" => {
            let said = complete(&[user("o")]);
            report(f64::from(u8::from(said["content"].as_str().unwrap().starts_with('x'))));
        }
        "two-turns" | "changes-history" => {
            assert!(episode["seed"].is_u64() && episode["split"] == "train" && episode["number"] == 4, "{episode}");
            let first = complete(&[user("a")]);
            let mut messages = vec![user("a"), first, user("b")];
            if part == "changes-history" {
                messages = vec![user("summary"), user("b")];
            }
            complete(&messages);
            println!("not a report");
            println!("\n{}", json!({"reward": 2.5, "solved": false}));
            println!("nor this");
        }
        "asks-wrongly" => {
            let body = json!({"messages": [user("a")], "stream": true});
            let (status, answer) = ask("chat/completions", &key, &body);
            assert!(status == 400 && answer["error"]["message"].as_str().unwrap().contains("stream"), "{answer}");
            assert_eq!(ask("chat/completions", "wrong", &body).0, 401);
            assert_eq!(ask("embeddings", &key, &body).0, 404);
            assert_eq!(ask("models", &key, &Value::Null).1["data"][0]["id"], "policy");
            complete(&[user("a")]);
            report(1.0);
        }
        "asks-nothing" => report(1.0),
        "reports-nothing" => drop(complete(&[user("a")])),
        "fails" => {
            complete(&[user("a")]);
            panic!("out of luck");
        }
        "hangs" => {
            complete(&[user("a")]);
            std::thread::sleep(Duration::from_secs(60));
        }
        "goes-on" => {
            let mut messages = vec![user("a")];
            for _ in 0..20 {
                messages.push(complete(&messages));
                messages.push(user("b"));
            }
        }
        other => panic!("no such part: {other}"),
    }
}

fn agent(part: &str, change: impl FnOnce(&mut AgentOptions)) -> Box<dyn Environment> {
    let program = std::env::current_exe().unwrap().to_str().unwrap().to_string();
    let name = "environments::agent::tests::program";
    let arguments = ["--exact", name, "--ignored", "--nocapture", "--quiet", "--", part];
    let mut options = AgentOptions {
        command: std::iter::once(program).chain(arguments.map(String::from)).collect(),
        timeout: 30.0,
        ..AgentOptions::default()
    };
    change(&mut options);
    Box::new(Agent::new(options, &BuildContext::new("flex")).unwrap())
}

fn message<T>(result: Result<T>) -> String {
    result.map(drop).unwrap_err().to_string()
}

/// The episode of a program with a model that answers `answers`, one after the other.
fn played(part: &str, config: &AgenticPpoConfig, answers: &[&str]) -> Episode {
    let (noise, mut model) = (Noise::new(3), Scripted::new(Letters, answers));
    let plan = EpisodePlan {
        step: 4,
        first_group: 0,
        groups: 1,
        all_groups: 1,
        group_size: 1,
        temperature: 1.0,
        ..EpisodePlan::default()
    };
    let mut environments = [agent(part, |_| ())];
    play(config, plan, &mut Writer::of_model(&mut model), &mut environments, &noise, &Silent).unwrap().remove(0)
}

fn text(episode: &Episode, range: std::ops::Range<usize>) -> String {
    Bigram::new().detokenize(&episode.tokens[range]).unwrap()
}

#[test]
fn a_program_plays_its_episode_through_the_endpoint() {
    let config = AgenticPpoConfig::default();
    let episode = played("two-turns", &config, &["x", "y"]);
    assert_eq!(episode.ending, Ending::Terminated);
    assert_eq!((episode.steps.len(), episode.score(), episode.solved), (2, 2.5, false));
    // One text: the tokens of the first turn are those of the second, and no template of the algorithm is in it.
    assert_eq!(text(&episode, 0..episode.tokens.len()), "u:a$a:x$u:b$a:y$");
    let written: Vec<char> = episode
        .tokens
        .iter()
        .zip(&episode.response)
        .filter(|(_, own)| **own)
        .map(|(id, _)| *id as u8 as char)
        .collect();
    assert_eq!(written.into_iter().collect::<String>(), "x$y$");
    assert_eq!(episode.steps[1].observation, "b");
}

#[test]
fn a_changed_history_begins_another_text_of_the_same_episode() {
    for (estimator, samples) in [(Estimator::Grpo, 2), (Estimator::Gigpo, 2)] {
        let config = AgenticPpoConfig { adv_estimator: estimator, ..AgenticPpoConfig::default() };
        let episode = played("changes-history", &config, &["x", "y"]);
        let begins = episode.steps[1].begins;
        assert_eq!(text(&episode, 0..begins), "u:a$a:x$");
        assert_eq!(text(&episode, begins..episode.tokens.len()), "u:summary$u:b$a:y$");
        let found = crate::agentic_ppo::text_samples(&[episode], estimator.is_stepwise(), TruncatedAnswers::Keep);
        assert_eq!(found.len(), samples);
        assert!(
            found.iter().all(|sample| sample.episode == 0 && sample.response.iter().filter(|own| **own).count() == 2)
        );
    }
}

#[test]
fn programs_read_what_they_did_wrong() {
    let episode = played("asks-wrongly", &AgenticPpoConfig::default(), &["x"]);
    assert_eq!((episode.score(), episode.solved, episode.ending), (1.0, true, Ending::Terminated));
}

#[test]
fn programs_that_fail_cost_their_episode() {
    let mut asks_nothing = agent("asks-nothing", |_| ());
    assert!(message(asks_nothing.reset(1)).contains("without asking the model"));
    for (part, words) in [("reports-nothing", "without a line `{\"reward\""), ("fails", "out of luck")] {
        let mut agent = agent(part, |_| ());
        assert_eq!(agent.reset(1).unwrap().text, "a");
        let problem = message(agent.step("x"));
        assert!(problem.contains(words), "{problem}");
        assert!(message(agent.step("x")).contains("without an episode"));
        // The next episode is another program.
        assert!(agent.reset(2).is_ok());
    }
    let mut hangs = agent("hangs", |options| options.timeout = 3.0);
    hangs.reset(1).unwrap();
    let begun = Instant::now();
    assert!(message(hangs.step("x")).contains("env.timeout"));
    assert!(begun.elapsed() < Duration::from_secs(20), "it was killed");
    let mut missing = agent("x", |options| options.command = vec!["/no/such/program".into()]);
    assert!(message(missing.reset(1)).contains("/no/such/program"));
    let invalid = Agent::new(AgentOptions::default(), &BuildContext::new("flex"));
    assert!(message(invalid).contains("env.command"));
}

#[test]
fn requests_beyond_the_turns_of_an_episode_end_it() {
    let config = AgenticPpoConfig { max_actions_per_traj: 3, ..AgenticPpoConfig::default() };
    let episode = played("goes-on", &config, &["x"]);
    assert_eq!((episode.ending, episode.steps.len()), (Ending::TurnLimit, 3));
    let config = AgenticPpoConfig { sequence_length: 20, ..AgenticPpoConfig::default() };
    let episode = played("goes-on", &config, &["x"]);
    assert_eq!((&episode.ending, episode.tokens.len() <= 20), (&Ending::TokenLimit, true));
}
