//! The requests and answers of vLLM and SGLang.
//!
//! Every option of the draw is sent, because both engines take those that a request leaves out from the model's
//! `generation_config.json`.

use roll_core::{Generation, Sampling};
use serde_json::{Value, json};

use super::config::EngineName;

/// A prompt and how it is continued.
#[derive(Clone, Copy, Debug)]
pub struct Continuation<'a> {
    /// Name of the adapter.
    pub adapter: &'a str,
    /// Tokens to continue.
    pub prompt: &'a [u32],
    /// Options of the call that the prompt belongs to.
    pub sampling: &'a Sampling,
    /// Key of the prompt's random draws.
    pub seed: u64,
    /// Most new tokens.
    pub limit: usize,
    /// Ids after which the answer ends.
    pub ends: &'a [u32],
}

/// Paths of an engine's endpoints, behind a server's address.
#[derive(Clone, Copy, Debug)]
pub struct Endpoints {
    /// Continues a prompt.
    pub generate: &'static str,
    /// Loads an adapter.
    pub load: &'static str,
    /// Unloads an adapter.
    pub unload: &'static str,
    /// A JSON object with the engine's `version`.
    pub version: &'static str,
}

/// The endpoints of an engine.
pub fn endpoints(engine: EngineName) -> Endpoints {
    match engine {
        EngineName::Sglang => Endpoints {
            generate: "/generate",
            load: "/load_lora_adapter",
            unload: "/unload_lora_adapter",
            version: "/get_server_info",
        },
        EngineName::Model | EngineName::Vllm => Endpoints {
            generate: "/v1/completions",
            load: "/v1/load_lora_adapter",
            unload: "/v1/unload_lora_adapter",
            version: "/version",
        },
    }
}

/// The request that continues a prompt.
pub fn request(engine: EngineName, asked: Continuation<'_>) -> Value {
    let Continuation { adapter, prompt, sampling, seed, limit, ends } = asked;
    // Both engines take -1 for all tokens.
    let top_k = if sampling.top_k == 0 { json!(-1) } else { json!(sampling.top_k) };
    let mut options = json!({
        "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": top_k, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "stop": sampling.stop, "stop_token_ids": ends, "skip_special_tokens": false,
    });
    if engine == EngineName::Sglang {
        // No `ignore_eos`: with it, SGLang ignores `stop_token_ids` as well.
        (options["max_new_tokens"], options["sampling_seed"]) = (limit.into(), seed.into());
        return json!({
            "input_ids": prompt, "sampling_params": options, "return_logprob": true, "lora_path": adapter,
        });
    }
    // `ignore_eos` makes `stop_token_ids` the only ends; `logprobs: 0` reports the drawn token alone.
    let further = json!({
        "model": adapter, "prompt": prompt, "add_special_tokens": false, "max_tokens": limit, "seed": seed,
        "ignore_eos": true, "logprobs": 0, "return_token_ids": true,
    });
    if let (Value::Object(options), Value::Object(further)) = (&mut options, further) {
        options.extend(further);
    }
    options
}

/// Why an answer holds no generation.
#[derive(Clone, Debug, PartialEq)]
pub enum Unusable {
    /// The engine gave this answer up.
    Aborted(String),
    /// The engine is not set up for training, or serves something else.
    Wrong(String),
}

/// Reads the answer to a request. The engine's log-probabilities are those before temperature, `top_k` and `top_p`.
pub fn generation(engine: EngineName, asked: Continuation<'_>, answer: &Value) -> Result<Generation, Unusable> {
    let read = if engine == EngineName::Sglang { read_sglang(answer) } else { read_vllm(asked, answer) };
    let (tokens, log_probs) = read?;
    let wrong = |problem: String| Err(Unusable::Wrong(problem));
    if tokens.len() != log_probs.len() {
        return wrong(format!("it reports {} log-probabilities for {} tokens", log_probs.len(), tokens.len()));
    }
    if tokens.len() > asked.limit {
        return wrong(format!("it wrote {} tokens where {} were allowed", tokens.len(), asked.limit));
    }
    if let Some(found) = log_probs.iter().find(|value| !(**value <= 0.0 && value.is_finite())) {
        return wrong(format!("it reports the log-probability {found}"));
    }
    Ok(Generation { tokens, raw_log_probs: log_probs.clone(), log_probs })
}

type TokensAndLogProbs = (Vec<u32>, Vec<f32>);

fn read_vllm(asked: Continuation<'_>, answer: &Value) -> Result<TokensAndLogProbs, Unusable> {
    let wrong = |problem: String| Unusable::Wrong(problem);
    let choice = &answer["choices"][0];
    if let Some(reason @ ("abort" | "error")) = choice["finish_reason"].as_str() {
        return Err(Unusable::Aborted(format!("it ended the answer with `{reason}`")));
    }
    if let Some(served) = answer["model"].as_str().filter(|served| *served != asked.adapter) {
        return Err(wrong(format!("it answered with `{served}` instead of the adapter `{}`", asked.adapter)));
    }
    let tokens = ids(&choice["token_ids"]).ok_or_else(|| {
        wrong("its answer has no `token_ids`: it needs a version of vLLM that knows `return_token_ids` (0.10.2)".into())
    })?;
    if let Some(read) = ids(&choice["prompt_token_ids"])
        && read != asked.prompt
    {
        let problem = "it read other tokens than it was sent: it must not change prompts (`--truncate-prompt-tokens`)";
        return Err(wrong(problem.into()));
    }
    let log_probs = choice["logprobs"]["token_logprobs"].as_array();
    let log_probs = log_probs.and_then(|values| values.iter().map(number).collect::<Option<Vec<f32>>>());
    Ok((tokens, log_probs.ok_or_else(no_log_probs)?))
}

fn read_sglang(answer: &Value) -> Result<TokensAndLogProbs, Unusable> {
    let about = &answer["meta_info"];
    if about["finish_reason"]["type"] == "abort" {
        let message = about["finish_reason"]["message"].as_str().unwrap_or("no reason");
        return Err(Unusable::Aborted(format!("it gave the answer up: {message}")));
    }
    // Each entry is the log-probability, the id, and a text or null.
    let pairs = about["output_token_logprobs"].as_array().ok_or_else(no_log_probs)?;
    let pair = |entry: &Value| Some((id(&entry[1])?, number(&entry[0])?));
    let pairs: Option<Vec<(u32, f32)>> = pairs.iter().map(pair).collect();
    Ok(pairs.ok_or_else(no_log_probs)?.into_iter().unzip())
}

fn no_log_probs() -> Unusable {
    Unusable::Wrong("its answer has no log-probabilities of the tokens".into())
}

fn ids(value: &Value) -> Option<Vec<u32>> {
    value.as_array()?.iter().map(id).collect()
}

fn id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

fn number(value: &Value) -> Option<f32> {
    value.as_f64().map(|value| value as f32)
}
