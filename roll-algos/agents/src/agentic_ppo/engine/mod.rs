//! Rollouts by another engine: servers of vLLM or SGLang write the answers of episodes.
//!
//! The servers have the base model; this program trains a LoRA, writes it to a directory and has the servers load it
//! under a name that is new for each version, so that no cache of theirs mistakes one version for another. Requests and
//! answers hold token ids ([`api`]).
//!
//! A server that fails costs the episodes that wait for it, and at most the step. Anything that would train on wrong
//! tokens or wrong log-probabilities stops the run.

pub mod adapter;
pub mod api;
pub mod config;
#[cfg(test)]
mod tests;

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rand::RngCore;
use roll_core::{
    Communicator, Error, Generation, Model, Noise, Purpose, Rank, Result, RolloutEngine, Sampling, communicator, flat,
    threads::in_parallel,
};
use roll_external::Fingerprint;
use roll_external::service::{IDLE_LIMIT, NoAnswer, Repeats, Service, ServiceOptions};
use serde_json::{Value, json};

use crate::AgentError;
use api::{Continuation, Unusable, endpoints};
use config::{EngineName, RolloutConfig, SECTION};

/// Largest answer that is read, in bytes.
const MAX_ANSWER: u64 = 64 << 20;
/// Requests may be repeated: a second generation does no harm, and the name of an adapter includes a hash of its contents.
const MAY_RECEIVE_TWICE: bool = true;
/// Beginning of the names of adapters.
const PREFIX: &str = "roll-v";

/// The servers of an engine, with the adapter that they serve. A clone shares the servers and keeps the adapter.
#[derive(Clone)]
pub struct Engine {
    servers: Arc<Servers>,
    /// Ids after which an answer ends.
    ends: Vec<u32>,
    /// Name of the adapter; empty before the first one is loaded.
    adapter: String,
}

struct Servers {
    engine: EngineName,
    all: Vec<Server>,
    repeats: Repeats,
    directory: PathBuf,
    /// Most requests at the same time.
    at_once: usize,
}

struct Server {
    url: String,
    generate: Service,
    load: Service,
    unload: Service,
    version: Service,
    /// Whether the server failed since the latest adapter was loaded. It is not asked until the next one.
    failed: AtomicBool,
}

/// Why a server did not do what it was asked.
enum Refusal {
    /// It may do so later, or after it has loaded the adapter again.
    Failed(String),
    /// It never will.
    Permanent(String),
}

impl Engine {
    /// Makes the engine of these options; `None` if the model itself writes the answers. Nothing is sent yet.
    ///
    /// # Errors
    /// Fails on options that are missing or invalid; the error names the key.
    pub fn new(config: &RolloutConfig, at_once: usize) -> Result<Option<Self>> {
        config.check()?;
        let (true, Some(directory)) = (config.is_external(), config.adapters.clone()) else { return Ok(None) };
        let servers = Servers {
            engine: config.name,
            all: config.urls.iter().map(|url| Server::new(config, url)).collect::<Result<_>>()?,
            repeats: Repeats::new(SECTION, config.retries, config.timeout, None)?,
            directory,
            at_once,
        };
        Ok(Some(Self { servers: Arc::new(servers), ends: Vec::new(), adapter: String::new() }))
    }

    /// Checks that the model can be served by an engine, and that every server answers and loads adapters.
    pub fn check(&mut self, model: &mut dyn Model) -> Result<()> {
        if !adapter::is_lora(model) {
            return Err(config::needs_lora());
        }
        for server in &self.servers.all {
            let version = server.check(self.servers.engine).map_err(|problem| self.wrong(server, problem))?;
            tracing::info!("{:?} {version} at {} writes the answers", self.servers.engine, server.url);
        }
        Ok(())
    }

    /// Has the servers load the model's adapter, unless they have it. `version` is the number of updates that the
    /// adapter has, for its name. All `ranks` take part; the first one writes the adapter and sends the requests.
    ///
    /// # Errors
    /// Fails if the adapter cannot be written, or if a server refuses it for good. A server that gives no answer is only
    /// logged.
    pub fn load(&mut self, model: &mut dyn Model, version: u64, ranks: &dyn Communicator) -> Result<()> {
        let ends = model.as_language().map(|model| model.end_tokens());
        self.ends = ends.unwrap_or_default();
        let contents = Fingerprint::new("adapter").f32s("parameters", &flat::read(model)?).finish();
        let mark = &contents[..8];
        if !self.adapter.ends_with(mark) {
            self.adapter = format!("{PREFIX}{version}-{mark}");
        }
        // The previous adapter is unloaded: no rank may still be playing with it.
        communicator::join(ranks, &())?;
        let published = if ranks.rank() == Rank(0) { self.publish(model) } else { Ok(()) };
        // The other ranks wait until the adapter is loaded, and fail if it is not.
        let problems = communicator::join(ranks, &published.as_ref().err().map(Error::chain))?;
        published?;
        if ranks.rank() != Rank(0) {
            // Rank 0 has learned by loading which servers answer; this rank asks all of them again.
            self.servers.all.iter().for_each(|server| server.failed.store(false, Ordering::Relaxed));
        }
        match problems.into_iter().flatten().next() {
            Some(problem) => Err(AgentError::Engine { problem }.into()),
            None => Ok(()),
        }
    }

    /// Writes the adapter, has each server load it, and removes older ones.
    fn publish(&self, model: &dyn Model) -> Result<()> {
        let directory = std::path::absolute(&self.servers.directory)
            .map_err(Error::file("find the directory", &self.servers.directory))?;
        let path = directory.join(&self.adapter);
        if !path.is_dir() {
            adapter::write(model, &path)?;
        }
        let mut loads: Vec<(&Server, Option<Refusal>)> = self.servers.all.iter().map(|server| (server, None)).collect();
        in_parallel(&mut loads, self.servers.at_once, |(server, refusal)| {
            *refusal = server.load(&self.servers.repeats, &self.adapter, &path).err();
            server.failed.store(refusal.is_some(), Ordering::Relaxed);
        });
        for (server, refusal) in loads {
            match refusal {
                None => {}
                Some(Refusal::Failed(problem)) => {
                    tracing::warn!("{}: no adapter could be loaded: {problem}", server.url)
                }
                Some(Refusal::Permanent(problem)) => return Err(self.wrong(server, problem)),
            }
        }
        self.remove_others(&directory)
    }

    /// Unloads and removes the adapters in `directory` other than the present one: the previous version, and those of
    /// a run that was killed.
    fn remove_others(&self, directory: &Path) -> Result<()> {
        let read = || Error::file("read the directory", directory);
        for entry in std::fs::read_dir(directory).map_err(read())? {
            let path = entry.map_err(read())?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if !name.starts_with(PREFIX) || name == self.adapter {
                continue;
            }
            for server in &self.servers.all {
                if let Err(no_answer) = server.post(&server.unload, &json!({ "lora_name": name })) {
                    tracing::debug!("{}: the adapter {name} was not unloaded: {no_answer:?}", server.url);
                }
            }
            std::fs::remove_dir_all(&path).map_err(Error::file("remove the directory", &path))?;
        }
        Ok(())
    }

    /// Continues one prompt: asks the servers in turn, beginning with the one of the episode `number`, without those
    /// that failed in this rollout. The inner error is that of a prompt without an answer.
    fn answer(&self, asked: Continuation<'_>, number: u64) -> Result<Result<Generation>> {
        let servers = &self.servers;
        let body = api::request(servers.engine, asked);
        let first = (number % servers.all.len() as u64) as usize;
        let in_turn = || servers.all.iter().cycle().skip(first).take(servers.all.len());
        let mut problem = String::new();
        for server in in_turn().filter(|server| !server.failed.load(Ordering::Relaxed)) {
            match server.generate(&servers.repeats, &body) {
                Ok(answer) => match api::generation(servers.engine, asked, &answer) {
                    Ok(generation) => return Ok(Ok(generation)),
                    Err(Unusable::Wrong(problem)) => return Err(self.wrong(server, problem)),
                    Err(Unusable::Aborted(reason)) => problem = format!("{}: {reason}", server.url),
                },
                Err(Refusal::Permanent(problem)) => return Err(self.wrong(server, problem)),
                Err(Refusal::Failed(reason)) => {
                    if !server.failed.swap(true, Ordering::Relaxed) {
                        tracing::warn!("{}: {reason}; it is asked again in the next rollout", server.url);
                    }
                    problem = format!("{}: {reason}", server.url);
                }
            }
        }
        if problem.is_empty() {
            problem = "all servers have failed in this rollout".into();
        }
        Ok(Err(AgentError::NoAnswer { problem }.into()))
    }

    fn wrong(&self, server: &Server, problem: String) -> Error {
        AgentError::Engine { problem: format!("{}: {problem}", server.url) }.into()
    }
}

impl RolloutEngine for Engine {
    fn answers(&mut self, prompts: &[Vec<u32>], sampling: &Sampling) -> Result<Vec<Result<Generation>>> {
        let mut rows: Vec<(usize, Option<Result<Result<Generation>>>)> =
            (0..prompts.len()).map(|i| (i, None)).collect();
        in_parallel(&mut rows, self.servers.at_once, |(i, answer)| {
            let number = sampling.number(*i);
            let mut draws = Noise::new(sampling.seed).generator(Purpose::Tokens, 0, number);
            let asked = Continuation {
                adapter: &self.adapter,
                prompt: &prompts[*i],
                sampling,
                // 31 bits, which every engine takes.
                seed: u64::from(draws.next_u32() >> 1),
                limit: sampling.limit(*i),
                ends: &self.ends,
            };
            *answer = Some(self.answer(asked, number));
        });
        rows.into_iter().filter_map(|(_, answer)| answer).collect()
    }
}

impl Server {
    fn new(config: &RolloutConfig, url: &str) -> Result<Self> {
        let base = url.trim_end_matches('/');
        let endpoints = endpoints(config.name);
        let service = |path: &str| {
            let made = Service::new(ServiceOptions {
                section: SECTION,
                url: &format!("{base}{path}"),
                token_env: config.token_env.as_deref(),
                timeout: config.timeout,
                keeps_connections: Some(IDLE_LIMIT),
            });
            made.map_err(|error| match error {
                Error::Config { key, problem } if key.ends_with(".url") => Error::config(format!("{key}s"), problem),
                error => error,
            })
        };
        Ok(Self {
            url: base.into(),
            generate: service(endpoints.generate)?,
            load: service(endpoints.load)?,
            unload: service(endpoints.unload)?,
            version: service(endpoints.version)?,
            failed: AtomicBool::new(false),
        })
    }

    /// Returns the version of the engine. Fails if the server does not answer, or does not load adapters.
    fn check(&self, engine: EngineName) -> std::result::Result<String, String> {
        let words = match self.version.get() {
            Ok(answer) => text(answer).map_err(words)?,
            // An older or newer version, which has no such endpoint, answers all the same.
            Err(NoAnswer::Permanent(_) | NoAnswer::Rejected(_)) => String::new(),
            Err(no_answer) => return Err(words(no_answer)),
        };
        // Both engines refuse to unload an adapter that they do not have, and say so.
        let refused = match self.post(&self.unload, &json!({ "lora_name": format!("{PREFIX}none") })) {
            Ok(_) => String::new(),
            Err(no_answer) => words_of_adapters(engine, no_answer)?,
        };
        tracing::debug!("{}: {refused}", self.url);
        let version = serde_json::from_str::<Value>(&words).unwrap_or_default();
        Ok(version["version"].as_str().unwrap_or("of an unknown version").into())
    }

    /// Sends one request and reads the answer.
    fn post(&self, service: &Service, body: &Value) -> std::result::Result<String, NoAnswer> {
        text(service.post("application/json", body.to_string().as_bytes())?)
    }

    /// Has the server load the adapter `name`. A server that has it already needs nothing: its name includes a hash of its contents.
    fn load(&self, repeats: &Repeats, name: &str, path: &Path) -> std::result::Result<(), Refusal> {
        let body = json!({ "lora_name": name, "lora_path": path });
        let asked = repeats.ask(&self.url, MAY_RECEIVE_TWICE, || match self.post(&self.load, &body) {
            Err(NoAnswer::Rejected(problem)) if problem.contains("already") => Ok(Ok(())),
            // Repetitions would not help.
            Err(NoAnswer::Rejected(problem) | NoAnswer::Permanent(problem)) => Ok(Err(problem)),
            answer => answer.map(|_| Ok(())),
        });
        let answered = asked.map_err(|unanswered| Refusal::Failed(unanswered.problem))?;
        answered
            .map_err(|problem| Refusal::Permanent(format!("the adapter {} is not loaded: {problem}", path.display())))
    }

    /// Has the server continue a prompt.
    fn generate(&self, repeats: &Repeats, body: &Value) -> std::result::Result<Value, Refusal> {
        let asked = repeats.ask(&self.url, MAY_RECEIVE_TWICE, || match self.post(&self.generate, body) {
            Err(NoAnswer::Rejected(problem) | NoAnswer::Permanent(problem)) => Ok(Err(problem)),
            answer => answer.map(Ok),
        });
        match asked.map_err(|unanswered| Refusal::Failed(unanswered.problem))? {
            Ok(answer) => serde_json::from_str(&answer)
                .map_err(|error| Refusal::Permanent(format!("its answer is not JSON: {error}"))),
            // A server that was started again has no adapter until the next rollout.
            Err(problem) if problem.starts_with("status 404") || problem.contains("not loaded") => {
                Err(Refusal::Failed(problem))
            }
            Err(problem) => Err(Refusal::Permanent(problem)),
        }
    }
}

/// What an engine answers if it is to unload an adapter that it does not have. Fails if it does not load adapters.
fn words_of_adapters(engine: EngineName, no_answer: NoAnswer) -> std::result::Result<String, String> {
    let answered = words(no_answer.clone());
    let is_unknown_path = answered.contains("\"Not Found\"");
    let is_off = answered.contains("not enabled");
    match no_answer {
        NoAnswer::Permanent(_) | NoAnswer::Rejected(_) if is_unknown_path || is_off => Err(match engine {
            EngineName::Sglang => format!("it loads no adapters ({answered}): start it with `--enable-lora`"),
            EngineName::Model | EngineName::Vllm => format!(
                "it loads no adapters ({answered}): start it with `--enable-lora` and \
                 `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`"
            ),
        }),
        NoAnswer::Permanent(_) | NoAnswer::Rejected(_) => Ok(answered),
        _ => Err(answered),
    }
}

fn words(no_answer: NoAnswer) -> String {
    match no_answer {
        NoAnswer::Busy(_) => "it is busy".into(),
        NoAnswer::ConnectionRefused(problem)
        | NoAnswer::Failed(problem)
        | NoAnswer::Rejected(problem)
        | NoAnswer::Permanent(problem) => problem,
    }
}

/// The whole answer, as UTF-8.
fn text(answer: impl Read) -> std::result::Result<String, NoAnswer> {
    let mut text = String::new();
    let read = answer.take(MAX_ANSWER).read_to_string(&mut text);
    read.map_err(|error| NoAnswer::Failed(format!("its answer was cut off: {error}")))?;
    Ok(text)
}
