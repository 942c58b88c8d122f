//! `roll ask --image`: a vision-language network's answer about pictures.

use std::time::Instant;

use roll_core::{BuildContext, Error, Result, Sampling, VisionLanguageModel, parse_options};
use roll_media::{Sizing, read_image};
use roll_rewards::vision_language::question;
use roll_train::config::ConfigLayers;

use crate::args::{Ask, KeyValue};
use crate::configuration::Configuration;

/// Lowest layer of the configuration.
const MODEL: &str = "model:\n  name: qwen_vl\n";
/// The networks that answer.
const NAME: &str = "qwen_vl";
/// Tokens that end an answer.
const ENDS: [&str; 2] = ["<|im_end|>", "<|endoftext|>"];

/// Prints the answer, and on stderr how fast it came.
pub fn ask(args: &Ask, sampling: &Sampling) -> Result<()> {
    let model_path = args.model_path.clone();
    let model_path = model_path.map(|value| KeyValue { key: "model.model_path", value, origin: "--model-path" });
    let configuration = Configuration::read(&args.config, model_path.as_slice())?;
    let configuration = configuration.over(ConfigLayers::new().text("roll ask", MODEL)?)?;
    let missing = |key: &str| Error::config(key, "missing");
    let model = configuration.component("model").ok_or_else(|| missing("model"))?;
    let backend = configuration.backend().ok_or_else(|| missing("backend"))?;
    let pictures = args.image.iter().map(|file| read_image(file, Sizing::Native)).collect::<Result<Vec<_>>>()?;
    if model.name != NAME {
        let problem = format!("expected `{NAME}`, which answers questions about pictures; found `{}`", model.name);
        return Err(Error::config("model.name", problem));
    }
    let options = parse_options("model", &model.options)?;
    let mut network = roll_qwen_vl::open("model", &options, &BuildContext::new(backend))?;
    let (prompt, media) = question(&network, args.system.as_deref(), &pictures, &args.prompt, args.max_pixels)?;
    let ends: Vec<u32> = ENDS.iter().filter_map(|token| network.token_id(token)).collect();
    let start = Instant::now();
    let mut answer = network.answer(&prompt, &media, sampling, &ends)?;
    let tokens_per_second = answer.len() as f64 / start.elapsed().as_secs_f64();
    tracing::info!("{} tokens in, {} out, {tokens_per_second:.1} tokens a second", prompt.len(), answer.len());
    if answer.last().is_some_and(|last| ends.contains(last)) {
        answer.pop();
    }
    println!("{}", network.detokenize(&answer)?);
    Ok(())
}
