//! Tools that work, and such that hang, flood, end and leave children behind.
#![allow(clippy::unwrap_used)]

use std::time::Instant;

use roll_core::{Environment, Message, Model, Observation, Transition};
use roll_testing::{Bigram, Letters, Scripted, Texts};
use serde_json::json;

use super::*;

fn options(name: &str, script: &str) -> ToolOptions {
    let command = ["sh", "-c", script].map(String::from).to_vec();
    ToolOptions { name: name.into(), command, ..ToolOptions::default() }
}

fn said(tool: ToolOptions, arguments: Value) -> std::result::Result<Value, String> {
    let name = tool.name.clone();
    let call = json!({"name": name, "arguments": arguments});
    let made = Tools::new(&[tool]).unwrap().answer(vec![Ok(call)], 1).remove(0);
    assert_eq!(made.tool, name);
    match made.failed {
        true => Err(made.output["error"].as_str().unwrap().to_string()),
        false => Ok(made.output),
    }
}

#[test]
fn calls_are_read_as_hermes_and_qwen_write_them() {
    let call = |arguments: &str| parse_calls(&format!("I look.\n<tool_call>\n{arguments}\n</tool_call>$"));
    let expected = json!({"name": "add", "arguments": {"a": 1}});
    assert_eq!(call(r#"{"name": "add", "arguments": {"a": 1}}"#), [Ok(expected.clone())]);
    assert_eq!(call(r#"{"name": "add", "arguments": "{\"a\": 1}"}"#), [Ok(expected)]);
    for none in ["", r#", "arguments": null"#, r#", "arguments": """#, r#", "parameters": {}"#] {
        assert_eq!(call(&format!(r#"{{"name": "now"{none}}}"#)), [Ok(json!({"name": "now", "arguments": {}}))]);
    }
    for (text, word) in [
        ("add(1)", "expected {\"name\""),
        ("[]", "no `name`"),
        (r#"{"name": "add", "arguments": [1]}"#, "is not an object"),
        (r#"{"name": "add", "arguments": "one"}"#, "is not an object"),
    ] {
        let problem = call(text).remove(0).unwrap_err();
        assert!(problem.contains(word), "{text}: {problem}");
    }
    let two = parse_calls("<tool_call>{\"name\": \"a\"}</tool_call><tool_call>{\"name\": \"b\"}");
    assert!(two.len() == 2 && two[0].is_ok() && two[1].as_ref().unwrap_err().contains("</tool_call>"));
    assert!(parse_calls("<answer>Right</answer>").is_empty());
    assert!(parse_calls("<think><tool_call>{}</tool_call></think><answer>Right</answer>").is_empty());
}

#[test]
fn integers_beyond_64_bits_stay_whole() {
    let wide = r#"{"wei":115792089237316195423570985008687907853269984665640564039457584007913129639936}"#;
    for answer in [
        format!(r#"<tool_call>{{"name": "pay", "arguments": {wide}}}</tool_call>"#),
        format!(r#"<tool_call>{{"name": "pay", "arguments": {}}}</tool_call>"#, json!(wide)),
        format!(r#"{{"name": "pay", "parameters": {wide}}}"#),
        format!(r#"[TOOL_CALLS] [{{"name": "pay", "arguments": {wide}}}]"#),
        format!("[TOOL_CALLS]pay[ARGS]{wide}"),
        format!(
            "<tool_call><function=pay><parameter=wei>{}</parameter></function></tool_call>",
            &wide[7..wide.len() - 1]
        ),
    ] {
        let made = Tools::new(&[options("pay", "cat")]).unwrap().answer(parse_calls(&answer), 1).remove(0);
        let given = roll_external::json::compact(&made.output);
        assert!(given.contains(&format!(r#""arguments":{wide}"#)), "{answer}: {given}");
    }
}

#[test]
fn calls_are_read_as_other_families_write_them() {
    let [add, now] = [json!({"name": "add", "arguments": {"a": 1}}), json!({"name": "now", "arguments": {}})].map(Ok);
    for answer in [
        // Llama 3, with and without its mark.
        r#"{"name": "add", "parameters": {"a": 1}}"#,
        r#"<|python_tag|>{"name": "add", "parameters": {"a": 1}}"#,
        // Mistral, before and from its tokenizer's version 11 on.
        r#"[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "123456789"}]"#,
        r#"[TOOL_CALLS]add[ARGS]{"a": 1}"#,
        r#"[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 1}"#,
        // Qwen3-Coder.
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    ] {
        assert_eq!(parse_calls(answer), std::slice::from_ref(&add), "{answer}");
    }
    assert_eq!(parse_calls(r#"{"name": "now", "parameters": null}"#), std::slice::from_ref(&now));
    let both = [add, now];
    assert_eq!(parse_calls(r#"{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}"#), both);
    assert_eq!(parse_calls(r#"[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}"#), both);
    let text = "<tool_call><function=say><parameter=text>\na b\n</parameter></function></tool_call>";
    assert_eq!(parse_calls(text), [Ok(json!({"name": "say", "arguments": {"text": "a b"}}))]);
    // Actions of an environment that speaks JSON.
    for answer in [r#"{"move": "up"}"#, r#"{"name": "up"}"#, r#"{"name": "a", "parameters": {}} is my move"#, "{"] {
        assert!(parse_calls(answer).is_empty(), "{answer}");
    }
    for answer in ["<|python_tag|>print(1)", "[TOOL_CALLS]add", "[TOOL_CALLS][1", "[TOOL_CALLS]add[ARGS]{"] {
        assert!(parse_calls(answer).iter().all(Result::is_err) && !parse_calls(answer).is_empty(), "{answer}");
    }
}

#[test]
fn a_tool_gets_the_call_and_its_json_is_the_result() {
    let echo = options("echo", "read -r call; printf '{\"got\": %s}' \"$call\"");
    let expected = json!({"got": {"name": "echo", "arguments": {"text": "'\"√"}}});
    assert_eq!(said(echo, json!({"text": "'\"√"})), Ok(expected));
    // One that reads nothing is given more than its pipe holds.
    assert_eq!(said(options("deaf", "echo 1"), json!({"text": "x".repeat(1 << 20)})), Ok(json!(1)));
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("fact"), "[7]").unwrap();
    let reads = ToolOptions { directory: Some(dir.path().into()), ..options("reads", "cat fact") };
    assert_eq!(said(reads, json!({})), Ok(json!([7])));
}

#[test]
fn a_tool_sees_the_variables_that_it_is_given_and_no_others() {
    let names = |environment: &[&str]| {
        let environment = environment.iter().map(|name| name.to_string()).collect();
        // Variables that a shell sets for itself are left out.
        let script =
            "printf '\"'; env | cut -d= -f1 | grep -vE '^(PWD|SHLVL|_|OLDPWD)$' | sort | tr '\\n' ' '; printf '\"'";
        said(ToolOptions { environment, ..options("env", script) }, json!({})).unwrap()
    };
    assert!(std::env::vars().count() > 2);
    assert_eq!(names(&["PATH"]), "PATH ");
    assert_eq!(names(&["PATH", "NO_SUCH_VARIABLE"]), "PATH ");
}

#[test]
fn tool_errors_reach_the_agent() {
    for (script, word) in [
        ("echo hello", "no JSON"),
        ("printf '\\377'", "no UTF-8"),
        ("true", "no JSON"),
        ("echo 'out of ice' >&2; exit 3", "exit status: 3): out of ice"),
        ("head -c 5000 /dev/zero | tr '\\0' ' '", "more than 4096 bytes"),
    ] {
        let problem = said(options("x", script), json!({})).unwrap_err();
        assert!(problem.contains(word), "{script}: {problem}");
    }
    let none = ToolOptions { command: vec!["/no/such/program".into()], ..options("x", "") };
    assert!(said(none, json!({})).unwrap_err().contains("cannot be started"));
    let tools = Tools::new(&[options("a", "echo 1"), options("b", "echo 2")]).unwrap();
    let call = |name: &str| Ok(json!({"name": name, "arguments": {}}));
    let made = tools.answer(vec![call("b"), call("c"), Err("it is none".into()), call("a")], 3);
    let outputs: Vec<String> = made.iter().map(|call| call.output.to_string()).collect();
    assert_eq!(outputs[0], "2");
    assert!(outputs[1].contains("no tool `c`; there are: a, b") && outputs[2].contains("it is none"), "{outputs:?}");
    assert!(outputs[3].contains("no more calls"), "{outputs:?}");
    assert_eq!(made.iter().map(|call| call.failed).collect::<Vec<_>>(), [false, true, true, true]);
}

#[cfg(target_os = "linux")]
#[test]
fn a_tool_that_hangs_or_floods_is_killed_with_its_children() {
    let dir = tempfile::tempdir().unwrap();
    // Each leaves a child behind, whose number it writes down.
    for (name, script) in [
        ("hangs", "wait"),
        ("closes", "exec >&- 2>&-; wait"),
        ("floods", "cat /dev/zero"),
        ("shouts", "cat /dev/zero >&2"),
        ("ends", "echo 1"),
    ] {
        let tool = ToolOptions {
            directory: Some(dir.path().into()),
            // Ample time for those that come to an end, on a machine that is busy.
            timeout: if ["floods", "ends"].contains(&name) { 60.0 } else { 0.5 },
            ..options(name, &format!("sleep 600 & echo $! > {name}; {script}"))
        };
        let begun = Instant::now();
        let found = said(tool, json!({}));
        assert!(begun.elapsed().as_secs_f64() < 50.0, "{name}");
        match name {
            "ends" => assert_eq!(found, Ok(json!(1))),
            "floods" => assert!(found.unwrap_err().contains("more than 4096 bytes")),
            _ => assert!(found.unwrap_err().contains("longer than 0.5 s"), "{name}"),
        }
        let number = std::fs::read_to_string(dir.path().join(name)).unwrap();
        let stat = format!("/proc/{}/stat", number.trim());
        let is_gone = || std::fs::read_to_string(&stat).map_or(true, |stat| stat.contains(") Z "));
        while !is_gone() {
            assert!(begun.elapsed().as_secs_f64() < 60.0, "the child of `{name}` is left behind");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }
}

#[test]
fn rejects_tools_without_a_command() {
    let message = |tools: &[ToolOptions]| Tools::new(tools).unwrap_err().to_string();
    assert!(message(&[ToolOptions::default()]).contains("algo.tools.0.name"));
    assert!(message(&[options("a b", "true")]).contains("a b"));
    assert!(message(&[options("a", "true"), options("a", "true")]).contains("algo.tools.1.name"));
    assert!(message(&[ToolOptions { command: vec![], ..options("a", "") }]).contains("algo.tools.0.command"));
    assert!(message(&[ToolOptions { timeout: f64::NAN, ..options("a", "") }]).contains("timeout"));
    assert!(message(&[ToolOptions { max_output_bytes: 0, ..options("a", "") }]).contains("max_output_bytes"));
}

#[test]
fn tools_are_described_in_the_conversation_without_template_support() {
    let tools = Tools::new(&[ToolOptions { description: "Adds.".into(), ..options("add", "echo 1") }]).unwrap();
    let mut model = Bigram::new();
    let model = model.as_language().unwrap();
    let messages = [
        Message::new("user", "6 * 7?"),
        Message::new("assistant", "<tool_call>...</tool_call>"),
        Message::new(prompt::ROLE, "1"),
        Message::new(prompt::ROLE, "2"),
    ];
    let text = tools.render(model, &messages).unwrap();
    assert!(text.starts_with("u:You may call tools") && text.contains("Adds.") && text.contains("6 * 7?$a:"), "{text}");
    let results = "$u:<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>$a:";
    assert!(text.ends_with(results), "{text}");
    assert!(text.contains(r#""parameters":{"type":"object","properties":{}}"#), "{text}");
    assert_eq!(Tools::default().render(model, &messages[..1]).unwrap(), "u:6 * 7?$a:");
}

/// A chat template that writes tools as the function says.
struct WithTools(fn(&[Message]) -> Result<Option<String>>);

impl Texts for WithTools {
    fn render_chat_with_tools(&self, messages: &[Message], tools: &[Value], _: bool) -> Result<Option<String>> {
        assert_eq!(tools.len(), 1);
        (self.0)(messages)
    }
}

#[test]
fn templates_that_lose_answers_or_refuse_results_do_not_describe_tools() {
    let contents = |messages: &[Message]| messages.iter().map(|m| format!("[{}]", m.content)).collect::<String>();
    let messages = [Message::new("user", "6 * 7?"), Message::new("assistant", "call"), result(0, "42".into())];
    let text = |writes: fn(&[Message]) -> Result<Option<String>>| {
        let tools = Tools::new(&[options("add", "echo 1")]).unwrap();
        tools.render(&Scripted::new(WithTools(writes), &[]), &messages).unwrap()
    };
    assert_eq!(
        text(|messages| Ok(Some(messages.iter().map(|m| format!("[{}]", m.content)).collect()))),
        contents(&messages)
    );
    let described = |text: &str| text.starts_with("u:You may call tools") && text.contains("$u:<tool_response>\n42\n");
    for writes in [
        (|_| Ok(None)) as fn(&[Message]) -> Result<Option<String>>,
        // An answer that is no call, as in a template that writes `tool_calls` in place of `content`.
        |messages| Ok(Some(messages.iter().filter(|m| m.role != "assistant").map(|m| m.content.as_str()).collect())),
        // Only the last answer, as in a template that shortens the history.
        |messages| Ok(messages.iter().rfind(|m| m.role == "assistant").map(|m| m.content.clone())),
        // A result whose call the template has not written.
        |messages| match messages.iter().any(|m| m.role == prompt::ROLE) {
            true => Err(Error::Unsupported("expected a call before the result".into())),
            false => Ok(Some(String::new())),
        },
    ] {
        assert!(described(&text(writes)), "{}", text(writes));
    }
}

/// Counts its actions, and ends after two answers.
struct Counts(Vec<String>);

impl Environment for Counts {
    fn reset(&mut self, _seed: u64) -> Result<Observation> {
        self.0.clear();
        Ok(Observation::text("o"))
    }

    fn step(&mut self, action: &str) -> Result<Transition> {
        self.0.push(action.into());
        let observation = Observation::text(self.0.concat().len().to_string());
        Ok(Transition { observation, reward: 1.0, terminated: self.0.len() == 2, truncated: false, valid: true })
    }
}

#[test]
fn an_episode_without_tokens_for_an_answer_is_judged_with_its_calls() {
    use crate::agentic_ppo::AgenticPpoConfig;
    use crate::agentic_ppo::episode::Ending;
    use crate::agentic_ppo::rollout::{EpisodePlan, Writer, play};

    let config = AgenticPpoConfig {
        tools: vec![options("one", "echo '{\"n\": 1}'")],
        max_tool_calls: 100,
        agent_system_template: String::new(),
        agent_template: "{observation}".into(),
        max_tokens_per_step: 100,
        sequence_length: 900,
        ..AgenticPpoConfig::default()
    };
    let mut model = Scripted::new(Letters, &["<tool_call>{\"name\": \"one\"}</tool_call>"]);
    let mut worlds: Vec<Box<dyn Environment>> = vec![Box::new(Counts(Vec::new()))];
    let plan = EpisodePlan { groups: 1, all_groups: 1, group_size: 1, temperature: 1.0, ..EpisodePlan::default() };
    let noise = roll_core::Noise::new(3);
    let mut writer = Writer::of_model(&mut model);
    let episode = play(&config, plan, &mut writer, &mut worlds, &noise, &roll_core::Silent).unwrap().remove(0);
    assert!(episode.is_usable() && episode.ending == Ending::TokenLimit && !episode.solved, "{:?}", episode.ending);
    assert_eq!((episode.steps.len(), episode.score(), episode.steps[0].calls.len()), (1, 0.0, model.given));
    // All that the agent wrote is trained on, and it ends with that.
    let written = episode.response.iter().filter(|written| **written).count();
    assert_eq!(written, model.given * (model.answers[0].len() + 1));
    assert_eq!(episode.response.last(), Some(&true));
    let samples = crate::agentic_ppo::batch::text_samples(&[episode], true, Default::default());
    assert_eq!(samples.iter().flat_map(|s| &s.response).filter(|r| **r).count(), written);
}

#[test]
fn tools_answer_within_a_turn_and_calls_are_in_the_record() {
    use crate::agentic_ppo::AgenticPpoConfig;
    use crate::agentic_ppo::episode::Ending;
    use crate::agentic_ppo::rollout::{EpisodePlan, Writer, play};

    let call = |name: &str| format!("<tool_call>{{\"name\": \"{name}\"}}</tool_call>");
    let answers = vec![call("one"), call("none"), "left".into(), call("one"), call("one"), call("one")];
    let config = AgenticPpoConfig {
        tools: vec![options("one", "echo '{\"n\": 1}'")],
        max_tool_calls: 2,
        agent_system_template: String::new(),
        agent_template: "{observation}".into(),
        max_tokens_per_step: 100,
        ..AgenticPpoConfig::default()
    };
    config.check().unwrap();
    let mut model = Scripted { texts: Letters, answers, given: 0 };
    let mut worlds: Vec<Box<dyn Environment>> = vec![Box::new(Counts(Vec::new()))];
    let plan = EpisodePlan { groups: 1, all_groups: 1, group_size: 1, temperature: 1.0, ..EpisodePlan::default() };
    let noise = roll_core::Noise::new(3);
    let mut writer = Writer::of_model(&mut model);
    let played = play(&config, plan, &mut writer, &mut worlds, &noise, &roll_core::Silent).unwrap();
    let episode = &played[0];
    assert_eq!((episode.steps.len(), &episode.ending), (2, &Ending::Terminated));
    // Three answers of the first turn, three of the second: its last call comes too late and is for the environment.
    assert_eq!(model.given, 6);
    assert_eq!(episode.steps[0].response, "left$");
    assert_eq!(episode.steps[1].response, call("one") + "$");
    let record = episode.record(1, "training").unwrap();
    let calls = &record["turns"][0]["calls"];
    assert_eq!(
        (&calls[0]["tool"], &calls[0]["output"], &calls[0]["failed"]),
        (&"one".into(), &json!({"n": 1}), &false.into())
    );
    assert!(calls[1]["output"]["error"].as_str().unwrap().contains("no tool `none`"), "{calls}");
    assert_eq!(record["turns"][1]["calls"].as_array().unwrap().len(), 2);
    // The agent wrote its calls and answers, and not the tools' words.
    let mut written = Vec::new();
    for (token, by_agent) in episode.tokens.iter().zip(&episode.response) {
        written.extend(by_agent.then_some(*token));
    }
    let text = roll_core::LanguageModel::detokenize(&model, &written).unwrap();
    assert_eq!(
        text,
        [call("one"), call("none"), "left".into(), call("one"), call("one"), call("one"), "".into()].join("$")
    );
    let whole = roll_core::LanguageModel::detokenize(&model, &episode.tokens).unwrap();
    assert!(whole.contains("$u:<tool_response>\n{\"n\":1}\n</tool_response>$a:"), "{whole}");
    // As samples of their own, turns train on their calls too.
    let samples = crate::agentic_ppo::batch::text_samples(&played, true, Default::default());
    let trained: usize = samples.iter().flat_map(|s| &s.response).filter(|r| **r).count();
    assert_eq!(trained, written.len());
}
