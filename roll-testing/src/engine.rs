//! A stand-in for servers of vLLM and SGLang: an HTTP service that follows their interfaces as far as rollouts need them,
//! and continues prompts with a model of this program.

// Wrong use of a test double fails the test by a panic.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use roll_core::{Model, Sampling, StateDict, Tensor, threads};
use serde_json::{Value, json};

/// The interface that a stand-in follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineApi {
    /// `/v1/completions`, `/v1/load_lora_adapter`, `/v1/unload_lora_adapter`, `/version`.
    Vllm,
    /// `/generate`, `/load_lora_adapter`, `/unload_lora_adapter`, `/get_server_info`.
    Sglang,
}

/// What goes wrong with a stand-in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineFault {
    /// Nothing.
    #[default]
    None,
    /// Each answer takes this long.
    Slow(Duration),
    /// Connections close without an answer.
    Dies,
    /// It loads no adapters at run time.
    LoadsNothing,
    /// It was started again: adapters that were loaded are gone, once.
    StartedAgain,
    /// It answers with ids that it did not draw: each is one larger.
    WrongIds,
    /// It continues other tokens than it was sent, and says so if the interface can.
    OtherPrompt,
    /// Its answers have no log-probabilities.
    NoLogProbs,
    /// It refuses every adapter, as one of too large a rank.
    RefusesAdapters,
    /// It goes on with the adapter that it loaded first, whatever it loads later.
    OldAdapter,
}

/// A server that continues prompts with a model. It ends when it is dropped.
pub struct StandIn {
    address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    api: EngineApi,
    stopped: AtomicBool,
    state: Mutex<State>,
}

struct State {
    model: Box<dyn Model>,
    /// Adapters by name; the names in the order in which they were loaded.
    adapters: BTreeMap<String, StateDict>,
    first: Option<String>,
    /// Name of the adapter that the model has.
    imported: String,
    fault: EngineFault,
    requests: Vec<(String, Value)>,
}

impl StandIn {
    /// Starts a server on a port of its own.
    pub fn start(api: EngineApi, model: Box<dyn Model>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let state = State {
            model,
            adapters: BTreeMap::new(),
            first: None,
            imported: String::new(),
            fault: EngineFault::None,
            requests: Vec::new(),
        };
        let shared = Arc::new(Shared { api, stopped: AtomicBool::new(false), state: Mutex::new(state) });
        let accepting = Arc::clone(&shared);
        let accept = move || {
            for stream in listener.incoming().map_while(std::result::Result::ok) {
                if accepting.stopped.load(Ordering::Relaxed) {
                    break;
                }
                let shared = Arc::clone(&accepting);
                threads::spawn("a connection", move || shared.serve(stream)).unwrap();
            }
        };
        threads::spawn("a stand-in", accept).unwrap();
        Self { address, shared }
    }

    /// The address, `http://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Makes this go wrong from now on.
    pub fn fail(&self, fault: EngineFault) {
        self.shared.lock().fault = fault;
    }

    /// The requests so far: path and body.
    pub fn requests(&self) -> Vec<(String, Value)> {
        self.shared.lock().requests.clone()
    }

    /// Names of the adapters that are loaded.
    pub fn adapters(&self) -> Vec<String> {
        self.shared.lock().adapters.keys().cloned().collect()
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::Relaxed);
        // Wakes the thread that accepts connections, which then closes the port.
        let _ = TcpStream::connect(self.address);
    }
}

/// Status and body.
type Answer = (u16, Value);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers the requests of a connection, until the client closes it.
    fn serve(&self, mut stream: TcpStream) {
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        while let Some((path, body)) = read_request(&mut reader) {
            let fault = self.lock().fault;
            match fault {
                EngineFault::Dies => return,
                EngineFault::Slow(time) => std::thread::sleep(time),
                _ => {}
            }
            if self.stopped.load(Ordering::Relaxed) {
                return;
            }
            let (status, body) = self.answer(&path, body);
            let body = body.to_string();
            let head = format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\n\r\n", body.len());
            if stream.write_all((head + &body).as_bytes()).is_err() {
                return;
            }
        }
    }

    fn answer(&self, path: &str, body: Value) -> Answer {
        let mut state = self.lock();
        if !body.is_null() {
            state.requests.push((path.into(), body.clone()));
        }
        if state.fault == EngineFault::StartedAgain {
            state.adapters.clear();
            state.fault = EngineFault::None;
        }
        let loads = state.fault != EngineFault::LoadsNothing;
        match (self.api, path) {
            (EngineApi::Vllm, "/version") => (200, json!({"version": "0.0.stand-in"})),
            (EngineApi::Sglang, "/get_server_info") => (200, json!({"version": "0.0.stand-in"})),
            (EngineApi::Vllm, "/v1/load_lora_adapter") if loads => self.load(&mut state, &body),
            (EngineApi::Sglang, "/load_lora_adapter") => self.load(&mut state, &body),
            (EngineApi::Vllm, "/v1/unload_lora_adapter") if loads => self.unload(&mut state, &body),
            (EngineApi::Sglang, "/unload_lora_adapter") => self.unload(&mut state, &body),
            (EngineApi::Vllm, "/v1/completions") => completion(&mut state, &body),
            (EngineApi::Sglang, "/generate") => generate(&mut state, &body),
            _ => (404, json!({"detail": "Not Found"})),
        }
    }

    fn refuse(&self, status: u16, problem: &str) -> Answer {
        match self.api {
            EngineApi::Vllm => (status, json!({"error": {"message": problem, "code": status}})),
            EngineApi::Sglang => (400, json!({"success": false, "error_message": problem})),
        }
    }

    fn load(&self, state: &mut State, body: &Value) -> Answer {
        let (name, path) = (body["lora_name"].as_str().unwrap(), body["lora_path"].as_str().unwrap());
        if state.fault == EngineFault::LoadsNothing {
            return self.refuse(400, "LoRA is not enabled. Please set `--enable-lora` to enable LoRA.");
        }
        if state.adapters.contains_key(name) {
            return self.refuse(400, &format!("The lora adapter '{name}' has already been loaded."));
        }
        if state.fault == EngineFault::RefusesAdapters {
            return self.refuse(400, "LoRA rank 16 is greater than max_lora_rank 8.");
        }
        match std::fs::read(Path::new(path).join("adapter_model.safetensors")) {
            Ok(file) => {
                state.adapters.insert(name.into(), tensors(&file));
                state.first.get_or_insert_with(|| name.into());
                (200, json!({"success": true}))
            }
            Err(error) => self.refuse(404, &format!("No adapter found for {path}: {error}")),
        }
    }

    fn unload(&self, state: &mut State, body: &Value) -> Answer {
        let name = body["lora_name"].as_str().unwrap();
        // The first adapter stays for `EngineFault::OldAdapter`.
        if state.fault == EngineFault::LoadsNothing {
            return self.refuse(400, "LoRA is not enabled. Please set `--enable-lora` to enable LoRA.");
        }
        if state.fault != EngineFault::OldAdapter && state.adapters.remove(name).is_none() {
            return self.refuse(404, &format!("The lora adapter '{name}' cannot be found."));
        }
        (200, json!({"success": true}))
    }
}

/// The tensors of a safetensors file, f32.
fn tensors(file: &[u8]) -> StateDict {
    let (length, rest) = file.split_at(8);
    let (head, data) = rest.split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
    let head: BTreeMap<String, Value> = serde_json::from_slice(head).unwrap();
    let tensor = |entry: &Value| {
        let offset = |i: usize| entry["data_offsets"][i].as_u64().unwrap() as usize;
        let shape: Vec<usize> = serde_json::from_value(entry["shape"].clone()).unwrap();
        let values = data[offset(0)..offset(1)].chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
        Tensor::new(values.collect::<Vec<f32>>(), shape).unwrap()
    };
    head.iter().map(|(name, entry)| (name.clone(), tensor(entry))).collect()
}

/// What a stand-in draws: the tokens with their log-probabilities, and the prompt that it read.
struct Drawn {
    prompt: Vec<u32>,
    tokens: Vec<u32>,
    log_probs: Vec<f32>,
}

/// Continues a prompt with an adapter; `None` if it is not loaded.
fn draw(
    state: &mut State,
    adapter: &str,
    prompt: &Value,
    options: &Value,
    limit: &Value,
    seed: &Value,
) -> Option<Drawn> {
    let used = match (&state.first, state.fault) {
        (Some(first), EngineFault::OldAdapter) => first.clone(),
        _ => adapter.to_string(),
    };
    let tensors = state.adapters.get(&used)?;
    if state.imported != used {
        let file = BTreeMap::from([("adapter_model".to_string(), tensors.clone())]);
        state.model.import_adapter(&file).unwrap();
        state.imported = used;
    }
    let mut prompt: Vec<u32> = serde_json::from_value(prompt.clone()).unwrap();
    if state.fault == EngineFault::OtherPrompt {
        prompt.remove(0);
    }
    let model = state.model.as_language().unwrap();
    let ends: Vec<u32> = serde_json::from_value(options["stop_token_ids"].clone()).unwrap();
    assert_eq!(ends, model.end_tokens(), "the ends of the trained model");
    let limit = limit.as_u64().unwrap() as usize;
    let sampling = Sampling {
        temperature: options["temperature"].as_f64().unwrap(),
        top_p: options["top_p"].as_f64().unwrap(),
        top_k: usize::try_from(options["top_k"].as_i64().unwrap()).unwrap_or(0),
        stop: serde_json::from_value(options["stop"].clone()).unwrap(),
        seed: seed.as_u64().unwrap(),
        ..Sampling::greedy(limit)
    };
    let generation = model.generate(std::slice::from_ref(&prompt), &sampling).unwrap().remove(0);
    let mut tokens = generation.tokens;
    if state.fault == EngineFault::WrongIds {
        tokens.iter_mut().for_each(|id| *id += 1);
    }
    Some(Drawn { prompt, tokens, log_probs: generation.raw_log_probs })
}

fn completion(state: &mut State, body: &Value) -> Answer {
    let model = body["model"].as_str().unwrap();
    assert!(body["return_token_ids"] == true && body["logprobs"] == 0 && body["ignore_eos"] == true, "{body}");
    let Some(drawn) = draw(state, model, &body["prompt"], body, &body["max_tokens"], &body["seed"]) else {
        return (404, json!({"error": {"message": format!("The model `{model}` does not exist."), "code": 404}}));
    };
    let log_probs = match state.fault {
        EngineFault::NoLogProbs => Value::Null,
        _ => json!({"token_logprobs": drawn.log_probs, "tokens": [], "top_logprobs": [], "text_offset": []}),
    };
    let choice = json!({
        "index": 0, "text": "", "finish_reason": "stop", "logprobs": log_probs, "token_ids": drawn.tokens,
        "prompt_token_ids": drawn.prompt,
    });
    (200, json!({"id": "cmpl-0", "object": "text_completion", "model": model, "choices": [choice]}))
}

fn generate(state: &mut State, body: &Value) -> Answer {
    let (adapter, options) = (body["lora_path"].as_str().unwrap(), &body["sampling_params"]);
    assert!(body["return_logprob"] == true && options["ignore_eos"].is_null(), "{body}");
    let (limit, seed) = (&options["max_new_tokens"], &options["sampling_seed"]);
    let Some(drawn) = draw(state, adapter, &body["input_ids"], options, limit, seed) else {
        let problem = format!("The following requested LoRA adapters are not loaded: {adapter}");
        return (400, json!({"error": {"message": problem}}));
    };
    let mut about = json!({"finish_reason": {"type": "stop"}, "prompt_tokens": drawn.prompt.len()});
    if state.fault != EngineFault::NoLogProbs {
        let pairs: Vec<Value> =
            drawn.tokens.iter().zip(&drawn.log_probs).map(|(id, value)| json!([value, id, null])).collect();
        about["output_token_logprobs"] = pairs.into();
    }
    (200, json!({"text": "", "output_ids": drawn.tokens, "meta_info": about}))
}

/// Reads a request: its path and its body, null without one. `None` at the end of the connection.
fn read_request(reader: &mut impl BufRead) -> Option<(String, Value)> {
    let (mut path, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        if path.is_empty() {
            path = line.split_whitespace().nth(1)?.into();
        }
        if let Some(n) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = n.trim().parse().unwrap();
        }
        if line.trim().is_empty() {
            break;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some((path, serde_json::from_slice(&body).unwrap_or_default()))
}
