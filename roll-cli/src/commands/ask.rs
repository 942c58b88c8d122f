//! `roll ask`: a language model's answer.

use std::time::Instant;

use roll_core::{Error, Message, Result, Sampling};
use roll_train::config::ConfigLayers;

use super::adapters::open_model;
use super::ask_about;
use crate::args::{Ask, KeyValue};
use crate::configuration::{Configuration, build_context};

/// Lowest layer of the configuration with `--adapter`, whose file names the layers that it adapts.
const MODEL: &str = "model:\n  name: causal_lm\n";
/// Lowest layer of the configuration without `--adapter`: no layer of the network gets a trainable adapter.
const MODEL_WITHOUT_ADAPTERS: &str = "model:\n  name: causal_lm\n  lora_target_modules: \"\"\n";

/// Prints the answer, and on stderr how fast it came.
pub fn ask(args: Ask) -> Result<()> {
    if !args.image.is_empty() {
        return ask_about::ask(&args, &sampling(&args)?);
    }
    let model_path = args.model_path.clone();
    let model_path = model_path.map(|value| KeyValue { key: "model.model_path", value, origin: "--model-path" });
    let configuration = Configuration::read(&args.config, model_path.as_slice())?;
    let registry = configuration.registry()?;
    let lowest_layer = if args.adapter.is_empty() { MODEL_WITHOUT_ADAPTERS } else { MODEL };
    let loaded = configuration.over(ConfigLayers::new().text("roll ask", lowest_layer)?)?.load(&registry)?;
    let context = build_context(&loaded);
    let name = &loaded.config.model.name;
    if loaded.config.model.options.get("model_path").is_some_and(serde_json::Value::is_null) {
        tracing::info!("no model is named: the demo's small model answers, which knows only its game");
    }
    let mut model = open_model(&loaded, &registry, &context, &args.adapter)?;
    let model =
        model.as_language().ok_or_else(|| Error::config("model.name", format!("`{name}` is not a language model")))?;
    let mut messages: Vec<Message> = args.system.iter().map(|text| Message::new("system", text.as_str())).collect();
    messages.push(Message::new("user", args.prompt.as_str()));
    let continue_as_assistant = true;
    let text = if args.raw { args.prompt.clone() } else { model.render_chat(&messages, continue_as_assistant)? };
    let prompt = model.tokenize(&text)?;
    if prompt.len() >= model.context_length() {
        let (tokens, context) = (prompt.len(), model.context_length());
        return Err(Error::Unsupported(format!(
            "the prompt has {tokens} tokens, and the model's context is {context}"
        )));
    }
    let sampling = sampling(&args)?;
    let start = Instant::now();
    let generations = model.generate(std::slice::from_ref(&prompt), &sampling)?;
    let seconds = start.elapsed().as_secs_f64();
    let mut tokens = generations.into_iter().next().map(|generation| generation.tokens).unwrap_or_default();
    let generated_tokens = tokens.len();
    if tokens.last().is_some_and(|last| model.end_tokens().contains(last)) {
        tokens.pop();
    }
    println!("{}", model.detokenize(&tokens)?);
    let tokens_per_second = generated_tokens as f64 / seconds;
    tracing::info!("{} tokens in, {generated_tokens} out, {tokens_per_second:.1} tokens a second", prompt.len());
    Ok(())
}

/// The sampling of an answer.
fn sampling(args: &Ask) -> Result<Sampling> {
    let sampling = Sampling {
        temperature: args.temperature,
        top_p: args.top_p,
        top_k: args.top_k,
        seed: args.seed,
        is_last_turn: true,
        ..Sampling::greedy(args.max_new_tokens)
    };
    sampling.check().map_err(named_by_flag)?;
    Ok(sampling)
}

/// An error about a field of [`Sampling`] as one about the flag that sets it: `top_p` becomes `--top-p`.
fn named_by_flag(error: Error) -> Error {
    match error {
        Error::Config { key, problem } => Error::Unsupported(format!("--{}: {problem}", key.replace('_', "-"))),
        other => other,
    }
}
