//! `roll ask`: a language model's answer, also about pictures.

use std::path::Path;
use std::time::Instant;

use roll_core::{Error, Message, PICTURE_MARK, Picture, Result, Sampling, Video};
use roll_media::{Sizing, read_image};
use roll_train::config::ConfigLayers;

use super::adapters::open_model;
use crate::args::{Ask, KeyValue};
use crate::configuration::{Configuration, build_context};

/// The model of text alone, and the one that sees the pictures of `--image`.
const MODELS: [&str; 2] = ["causal_lm", "qwen_vl"];

/// Lowest layer of the configuration. With `--adapter`, the adapter's file names the layers that it adapts; without, no
/// layer of the network gets a trainable adapter.
fn lowest_layer(args: &Ask) -> String {
    let [reads, sees] = MODELS;
    let name = if args.image.is_empty() { reads } else { sees };
    let adapters = if args.adapter.is_empty() { "  lora_target_modules: \"\"\n" } else { "" };
    format!("model:\n  name: {name}\n{adapters}")
}

/// Prints the answer, and on stderr how fast it came.
pub fn ask(args: Ask) -> Result<()> {
    let model_path = args.model_path.clone();
    let model_path = model_path.map(|value| KeyValue { key: "model.model_path", value, origin: "--model-path" });
    let max_pixels = args.max_pixels.map(|max| max.to_string());
    let max_pixels = max_pixels.map(|value| KeyValue { key: "model.max_pixels", value, origin: "--max-pixels" });
    let values: Vec<KeyValue> = model_path.into_iter().chain(max_pixels).collect();
    let configuration = Configuration::read(&args.config, &values)?;
    let registry = configuration.registry()?;
    let loaded = configuration.over(ConfigLayers::new().text("roll ask", &lowest_layer(&args))?)?.load(&registry)?;
    let context = build_context(&loaded);
    let name = &loaded.config.model.name;
    let pictures = args.image.iter().map(|file| picture(file)).collect::<Result<Vec<Picture>>>()?;
    if loaded.config.model.options.get("model_path").is_some_and(serde_json::Value::is_null) {
        tracing::info!("no model is named: the demo's small model answers, which knows only its game");
    }
    let mut model = open_model(&loaded, &registry, &context, &args.adapter)?;
    let model =
        model.as_language().ok_or_else(|| Error::config("model.name", format!("`{name}` is not a language model")))?;
    let mut messages: Vec<Message> = args.system.iter().map(|text| Message::new("system", text.as_str())).collect();
    let asked = String::from(PICTURE_MARK).repeat(pictures.len()) + &args.prompt;
    messages.push(Message::new("user", asked.as_str()));
    let continue_as_assistant = true;
    let text = if args.raw { asked } else { model.render_chat(&messages, continue_as_assistant)? };
    let prompt = match pictures.as_slice() {
        [] => model.tokenize(&text)?,
        pictures => model.tokenize_with_pictures(&text, pictures)?,
    };
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

/// The picture in `file`.
fn picture(file: &Path) -> Result<Picture> {
    let planes = read_image(file, Sizing::Native)?;
    let one_frame = planes.reshape([&[1], planes.shape()].concat())?;
    roll_media::Picture::from_frame(&Video::new(one_frame, 1.0)?, 0).try_into()
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
