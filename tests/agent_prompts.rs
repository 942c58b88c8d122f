//! What an agent reads and writes, token by token, for each family of models.
//!
//! The templates are small ones of our own with the rules of the published ones: where turns begin and end, where tools
//! are described, how results come back, what is trimmed or refused. The tokenizers have the characters as tokens, with
//! the special tokens and the blanks of each family. `ROLL_BLESS=1` rewrites `agent_prompts.txt`.

use std::fmt::Write;
use std::path::Path;

use roll_agents::agentic_ppo::AgenticPpoConfig;
use roll_agents::agentic_ppo::rollout::{EpisodePlan, Writer, play};
use roll_agents::agentic_ppo::tools::ToolOptions;
use roll_agents::conversations::{Conversations, TrainOn};
use roll_causal_lm::{ChatTemplate, Tokenizer};
use roll_core::{Environment, LanguageModel, Message, Noise, Observation, Result, Silent, Transition};
use roll_testing::{Scripted, Texts};
use serde_json::{Value, json};

/// A family of models.
struct Family {
    name: &'static str,
    /// Special tokens, the ends of an answer first.
    special: &'static [&'static str],
    ends: usize,
    /// Whether the tokenizer is of SentencePiece, and begins texts and what follows special tokens with a blank.
    adds_blank: bool,
    template: &'static str,
    arguments: Value,
    /// The agent's call of the tool.
    call: &'static str,
}

const CALL: &str = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 2}}\n</tool_call>";

/// ChatML with tools in the system message, results in turns of the user. Qwen3's writes thoughts, empty ones too, in
/// the last answer alone.
const QWEN: &str = "
{%- if tools %}{{- '<|im_start|>system\\n' }}{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}
{%- endif %}{{- '<tools>' }}{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}{%- if m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}{%- set words = m.content %}
{%- if THINKS and '</think>' in words and not loop.last %}{%- set words = words.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}{%- if THINKS and loop.last and '</think>' not in words %}
{%- set words = '<think>\\n\\n</think>\\n\\n' + words %}
{%- endif %}{{- '<|im_start|>assistant\\n' + words + '<|im_end|>\\n' }}
{%- elif m.role == 'user' %}{{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if THINKS and enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}";

/// ChatML with each tool as XML in the system message, results in one turn of the user.
const QWEN_CODER: &str = "
{{- '<|im_start|>system\\n' }}{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}
{%- if tools %}{{- '\\n<tools>' }}{%- for tool in tools %}{%- set f = tool.function %}
{{- '\\n<function>\\n<name>' + f.name + '</name>\\n<description>' + f.description + '</description>' }}
{{- '\\n<parameters>' + (f.parameters | tojson) + '</parameters>\\n</function>' }}{%- endfor %}{{- '\\n</tools>' }}
{%- endif %}{{- '<|im_end|>\\n' }}{%- for m in messages %}{%- if m.role == 'tool' %}
{%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|im_start|>user\\n' }}{%- endif %}
{{- '<tool_response>\\n' + m.content + '\\n</tool_response>\\n' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- elif m.role != 'system' %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}";

/// Headers, tools in the first message of the user, results of the role `ipython`. Texts are trimmed.
const LLAMA_3: &str = "
{{- bos_token }}{%- for m in messages %}{%- set role = 'ipython' if m.role == 'tool' else m.role %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
{%- if tools and role == 'user' and loop.index0 == (1 if messages[0].role == 'system' else 0) %}
{%- for tool in tools %}{{- (tool | tojson(indent=4)) + '\\n\\n' }}{%- endfor %}{%- endif %}
{{- (m.content | tojson) if role == 'ipython' and m.content is mapping else m.content | trim }}{{- '<|eot_id|>' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}";

/// The system message begins the first of the user, turns alternate, a blank precedes the end. No tools.
const LLAMA_2: &str = "
{%- set start = 1 if messages[0].role == 'system' else 0 %}{%- for m in messages[start:] %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
{%- if m.role == 'user' %}{{- bos_token + '[INST] ' }}{%- if loop.first and start %}
{{- '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' }}{%- endif %}{{- m.content | trim + ' [/INST]' }}
{%- else %}{{- ' ' + m.content | trim + ' ' + eos_token }}{%- endif %}{%- endfor %}";

/// Tools before the last message of the user, ids of nine characters for results, which need a call before them.
const MISTRAL: &str = "
{{- bos_token }}{%- for m in messages %}{%- if m.role == 'user' %}
{%- if tools and loop.last %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST]' }}{%- if loop.last and messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- m.content + '[/INST]' }}{%- elif m.role == 'tool' %}
{%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}{{- raise_exception('ids have 9 characters') }}
{%- endif %}{{- '[TOOL_RESULTS]' + ({'content': m.content, 'call_id': m.tool_call_id} | tojson) + '[/TOOL_RESULTS]' }}
{%- elif m.role == 'assistant' %}{{- ' ' + m.content + eos_token }}{%- endif %}{%- endfor %}";

/// No system messages, the role `model`, texts trimmed. No tools.
const GEMMA: &str = "
{{- bos_token }}{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for m in messages %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{%- endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\\n' + m.content | trim }}
{{- '<end_of_turn>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}";

/// A line break after each special token. No tools.
const PHI_3: &str = "
{%- for m in messages %}{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}";

fn families() -> [Family; 8] {
    let qwen = Family {
        name: "Qwen2.5",
        special: &["<|im_end|>", "<|endoftext|>", "<|im_start|>"],
        ends: 2,
        adds_blank: false,
        template: QWEN,
        arguments: json!({}),
        call: CALL,
    };
    let thinks = json!({ "enable_thinking": false });
    let llama_3 = &["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"];
    let mistral = &["</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"];
    [
        Family { name: "Qwen3", arguments: thinks, ..families_of(&qwen) },
        Family {
            name: "Qwen3-Coder",
            template: QWEN_CODER,
            call: "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>",
            ..families_of(&qwen)
        },
        Family {
            name: "Llama 3.1",
            special: llama_3,
            ends: 1,
            template: LLAMA_3,
            call: r#"{"name": "add", "parameters": {"a": 2}}"#,
            ..families_of(&qwen)
        },
        Family {
            name: "Llama 2",
            special: &["</s>", "<s>"],
            ends: 1,
            adds_blank: true,
            template: LLAMA_2,
            ..families_of(&qwen)
        },
        Family {
            name: "Mistral 7B v0.3",
            special: mistral,
            ends: 1,
            adds_blank: true,
            template: MISTRAL,
            call: r#"[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2}}]"#,
            ..families_of(&qwen)
        },
        Family {
            name: "Gemma 2 and 3",
            special: &["<end_of_turn>", "<eos>", "<bos>", "<start_of_turn>"],
            ends: 2,
            template: GEMMA,
            ..families_of(&qwen)
        },
        Family {
            name: "Phi-3",
            special: &["<|end|>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>"],
            ends: 2,
            adds_blank: true,
            template: PHI_3,
            ..families_of(&qwen)
        },
        qwen,
    ]
}

fn families_of(family: &Family) -> Family {
    Family { arguments: family.arguments.clone(), ..*family }
}

impl Family {
    /// Characters as tokens. SentencePiece merges a blank with a digit, so that a blank too many shows.
    fn tokenizer(&self) -> Tokenizer {
        let mut vocabulary = vec!["<unk>".to_string()];
        vocabulary.extend(self.special.iter().map(|token| token.to_string()));
        vocabulary.extend((' '..='~').chain(['\n', '\u{2581}']).map(String::from));
        vocabulary.extend(('0'..='9').map(|digit| format!("\u{2581}{digit}")));
        let ids: serde_json::Map<String, Value> =
            vocabulary.iter().enumerate().map(|(id, token)| (token.clone(), id.into())).collect();
        let added: Vec<Value> = self
            .special
            .iter()
            .map(|token| {
                json!({
                    "id": ids[*token], "content": token, "special": true, "single_word": false, "lstrip": false,
                    "rstrip": self.name == "Phi-3", "normalized": false,
                })
            })
            .collect();
        let normalizers = json!([
            { "type": "Prepend", "prepend": "\u{2581}" },
            { "type": "Replace", "pattern": { "String": " " }, "content": "\u{2581}" },
        ]);
        let decoders = json!([
            { "type": "Replace", "pattern": { "String": "\u{2581}" }, "content": " " },
            { "type": "Fuse" },
        ]);
        let normalizer = self.adds_blank.then(|| json!({ "type": "Sequence", "normalizers": normalizers }));
        let merges: Vec<[String; 2]> =
            ('0'..='9').map(|digit| ["\u{2581}".to_string(), digit.to_string()]).filter(|_| self.adds_blank).collect();
        let json = json!({
            "version": "1.0", "added_tokens": added, "normalizer": normalizer, "pre_tokenizer": null,
            "post_processor": null, "decoder": { "type": "Sequence", "decoders": decoders },
            "model": { "type": "BPE", "unk_token": "<unk>", "vocab": ids, "merges": merges },
        });
        Tokenizer::parse(json.to_string().as_bytes()).unwrap()
    }

    fn model(&self, answers: &[&str]) -> Scripted<FamilyTexts> {
        let bos = self.special.iter().find(|token| ["<s>", "<bos>", "<|begin_of_text|>"].contains(token));
        let template = self.template.replace("THINKS", if self.name == "Qwen3" { "true" } else { "false" });
        let template =
            ChatTemplate::new(template, bos.copied().unwrap_or_default().into(), self.special[0].into()).unwrap();
        let template = template.with_arguments(self.arguments.as_object().unwrap().clone()).unwrap();
        let tokenizer = self.tokenizer();
        let ends = (1..=self.ends as u32).collect();
        Scripted::new(FamilyTexts { tokenizer, template, ends, adds_blank: self.adds_blank }, answers)
    }
}

/// Tokenizer and chat template of a family.
struct FamilyTexts {
    tokenizer: Tokenizer,
    template: ChatTemplate,
    ends: Vec<u32>,
    adds_blank: bool,
}

impl Texts for FamilyTexts {
    fn tokenize(&self, text: &str) -> Result<Vec<u32>> {
        self.tokenizer.encode(text)
    }

    fn detokenize(&self, tokens: &[u32]) -> Result<String> {
        self.tokenizer.decode(tokens)
    }

    fn render_chat(&self, messages: &[Message], continue_as_assistant: bool) -> Result<String> {
        self.template.render(messages, continue_as_assistant)
    }

    fn render_chat_with_tools(&self, messages: &[Message], tools: &[Value], ask: bool) -> Result<Option<String>> {
        let template = Some(&self.template).filter(|template| template.supports_tools());
        template.map(|template| template.render_with_tools(messages, tools, ask)).transpose()
    }

    fn end_tokens(&self) -> Vec<u32> {
        self.ends.clone()
    }

    fn answer(&self, text: &str) -> Result<Vec<u32>> {
        // The model itself begins an answer with no blank.
        let mut tokens = self.tokenizer.encode(&format!("\n{text}{}", self.tokenizer.token(self.ends[0]).unwrap()))?;
        tokens.drain(..1 + usize::from(self.adds_blank));
        Ok(tokens)
    }
}

/// Asks for two numbers.
struct Asks(usize);

impl Environment for Asks {
    fn reset(&mut self, _seed: u64) -> Result<Observation> {
        self.0 = 0;
        Ok(Observation::text("2 + 2?"))
    }

    fn step(&mut self, _action: &str) -> Result<Transition> {
        self.0 += 1;
        let observation = Observation::text("3 + 3?");
        Ok(Transition { observation, reward: 1.0, terminated: self.0 == 2, truncated: false, valid: true })
    }
}

/// One line for each special token and for the characters between two of them; the agent's lines begin with `>`. The
/// blanks of SentencePiece are `_`, line breaks `\n`.
fn listing(tokens: &[u32], response: &[bool], texts: &FamilyTexts, special: usize) -> String {
    let mut lines = String::new();
    let mut before = None;
    for (id, by_agent) in tokens.iter().zip(response) {
        let is_special = (1..=special as u32).contains(id);
        if before != Some((false, *by_agent)) || is_special {
            let _ = write!(lines, "\n{} ", if *by_agent { '>' } else { ' ' });
        }
        before = Some((is_special, *by_agent));
        lines += &texts.tokenizer.token(*id).unwrap().replace('\n', "\\n").replace('\u{2581}', "_");
    }
    lines
}

#[cfg(unix)]
#[test]
fn prompts_are_those_of_the_families_token_by_token() {
    let mut text = String::new();
    for family in families() {
        let config = AgenticPpoConfig {
            tools: vec![ToolOptions {
                name: "add".into(),
                command: ["sh", "-c", "echo 4"].map(String::from).to_vec(),
                timeout: 60.0,
                ..ToolOptions::default()
            }],
            max_tool_calls: 1,
            agent_system_template: "Be brief.".into(),
            agent_template: "{observation}".into(),
            max_tokens_per_step: 100,
            ..AgenticPpoConfig::default()
        };
        let mut model = family.model(&[family.call, "4", "6"]);
        let plan = EpisodePlan {
            step: 0,
            first_group: 0,
            groups: 1,
            all_groups: 1,
            group_size: 1,
            temperature: 1.0,
            ..EpisodePlan::default()
        };
        let mut worlds: Vec<Box<dyn Environment>> = vec![Box::new(Asks(0))];
        let played =
            play(&config, plan, &mut Writer::of_model(&mut model), &mut worlds, &Noise::new(3), &Silent).unwrap();
        let episode = &played[0];
        assert_eq!((episode.steps.len(), episode.steps[0].calls.len()), (2, 1), "{}", family.name);
        let lines = listing(&episode.tokens, &episode.response, &model.texts, family.special.len());
        let _ = write!(text, "# {}{lines}\n\n", family.name);
    }
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/agent_prompts.txt");
    if std::env::var_os("ROLL_BLESS").is_some_and(|value| !value.is_empty()) {
        std::fs::write(&file, &text).unwrap();
    }
    let expected = std::fs::read_to_string(&file).unwrap();
    let difference = text.lines().zip(expected.lines()).find(|(found, expected)| found != expected);
    assert!(
        text == expected,
        "{}: {difference:?}: if the new prompts are right, write them with ROLL_BLESS=1",
        file.display()
    );
}

#[test]
fn answers_of_examples_are_tokenized_as_the_whole_text() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("data.jsonl");
    let row = json!({"messages": [
        {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"},
        {"role": "user", "content": "3 + 3?"}, {"role": "assistant", "content": "6"},
    ]});
    std::fs::write(&file, row.to_string()).unwrap();
    let data = Conversations::read(&file).unwrap();
    for family in families() {
        let model = family.model(&[]);
        let samples = data.samples(0, TrainOn::Responses, &model).unwrap();
        let messages: Vec<Message> = serde_json::from_value(row["messages"].clone()).unwrap();
        let whole = model.tokenize(&model.render_chat(&messages, false).unwrap()).unwrap();
        let last = samples.last().unwrap();
        assert_eq!(last.ids, whole, "{}", family.name);
        let trained = last.ids.iter().zip(&last.train).filter(|(_, train)| **train).map(|(id, _)| *id);
        let tokens: Vec<String> = trained.map(|id| model.texts.tokenizer.token(id).unwrap()).collect();
        let end = family.special[0];
        let expected: Vec<&str> = match family.name {
            // The blanks before the answer and before the end are the template's.
            "Llama 2" => ["\u{2581}4", "\u{2581}", end, "\u{2581}6", "\u{2581}", end].to_vec(),
            "Mistral 7B v0.3" => ["\u{2581}", "\u{2581}4", end, "\u{2581}", "\u{2581}6", end].to_vec(),
            // The last of two samples: the template rewrites the first answer.
            "Qwen3" => ["6", end].to_vec(),
            // `<|assistant|>` takes the line break, and a blank follows special tokens.
            "Phi-3" => ["\u{2581}4", end, "\u{2581}6", end].to_vec(),
            _ => ["4", end, "6", end].to_vec(),
        };
        assert_eq!(tokens, expected, "{}", family.name);
    }
}
