//! `roll init`: asks what to train on what, and writes a configuration to begin with.
//!
//! Each answer is tried when it is given: files are opened, components are made. An answer that fails is asked for
//! again.

mod answers;
mod video;
mod written;

use roll_backends::Backend;
use roll_core::serde_json::Value as Json;
use roll_core::{BuildContext, Error, Fault, Key, Kind, Model, Options, Registration, Registry, Result};
use roll_train::config::{TrainingConfig, sections};

use self::answers::{Answers, Question};
use crate::args::{Check, ConfigArgs, Init, Layers, MachineArgs, Run};
use crate::output::refuse_existing;

/// What a user may want to train, and the algorithm for it.
const PURPOSES: [(&str, &str); 7] = [
    ("a video model, towards a reward that has a gradient", "reward_fl"),
    ("a video model, towards any reward, by comparing videos", "diffusion_nft"),
    ("a video model, towards any reward, by policy gradients", "flow_grpo"),
    ("a video model, on clips", "flow_matching"),
    ("a language model, as an agent in an environment", "agentic_ppo"),
    ("a language model, on conversations", "sft"),
    ("a language model, on pairs of answers, of which one is preferred", "dpo"),
];

/// Optimizer steps to propose for each algorithm. Steps on clips, conversations and pairs of
/// answers are cheap, and each sample is seen several times. A step on a reward first generates its videos or episodes.
const STEPS: [(&str, u64); 7] = [
    ("reward_fl", 200),
    ("diffusion_nft", 300),
    ("flow_grpo", 300),
    ("flow_matching", 1000),
    ("agentic_ppo", 200),
    ("sft", 500),
    ("dpo", 500),
];

/// Optimizer steps to propose for an algorithm that is not in [`STEPS`], such as one of a plugin.
const STEPS_OF_OTHERS: u64 = 100;
/// Number of checkpoints of a run to propose.
const CHECKPOINTS: u64 = 5;

/// Where a run may compute.
const PLACES: [&str; 3] = ["this CPU", "one NVIDIA GPU", "several NVIDIA GPUs"];
/// Position in [`PLACES`] of several GPUs.
const SEVERAL_GPUS: usize = 2;

/// Answers to propose for options that must be given: component, key, answer.
const PROPOSED: [(&str, &str, &str); 5] = [
    ("insightface", "reward.reward_model_path", "antelopev2"),
    ("judge", "reward.url", "http://127.0.0.1:8000/v1"),
    ("judge", "reward.model", "Qwen/Qwen2.5-VL-7B-Instruct"),
    ("judge", "reward.questions", "Does the video show the following? {prompt}"),
    ("command", "reward.command", "python3 reward.py"),
];

/// Number of trained parameters below which the network is taken for a toy like the demo's.
const TOY_PARAMETERS: usize = 1_000_000;
/// Learning rate of the adapter of a toy network, as in the demo.
const TOY_LEARNING_RATE: f64 = 1e-3;

pub fn init(args: Init) -> Result<()> {
    let file = &args.file;
    refuse_existing(file, args.force)?;
    let registry = Registry::linked()?;
    let sections = sections(&registry);
    let mut answers = Answers::new(&args.set, args.yes, &sections)?;
    println!("An empty answer takes the value in brackets.\n");
    let machine = Interview { registry: &registry, answers: &mut answers }.run(args.on)?;
    answers.take_rest()?;
    let on_machine = machine.as_ref().map(|machine| format!(" --on {machine}")).unwrap_or_default();
    let name = file.display();
    let about = format!(
        "Written by `roll init`. `roll check {name}{on_machine}` looks at all that it names; \
         `roll config --reference` explains all keys."
    );
    std::fs::write(file, written::yaml(&answers, &about)).map_err(Error::file("write", file))?;
    println!("\nwrote {name}; checking it as `roll check {name}{on_machine}` does\n");
    let layers = Layers { files: vec![file.clone()], ..Layers::default() };
    let config = ConfigArgs { layers, ..ConfigArgs::default() };
    let run = Run { config, ..Run::default() };
    super::check::check(Check { machine: MachineArgs { on: machine, ..MachineArgs::default() }, ..Check::of(run) })?;
    println!("\ntrain with: roll run {name}");
    Ok(())
}

/// The questions, in their order.
struct Interview<'a, 'b> {
    registry: &'a Registry,
    answers: &'a mut Answers<'b>,
}

impl Interview<'_, '_> {
    /// Asks all questions. Returns the machine with GPUs that the run is for, as `--on` takes it.
    fn run(mut self, on: Option<String>) -> Result<Option<String>> {
        self.ask_algorithm()?;
        let algorithm = self.answers.text("algo.name").to_string();
        let is_video = !["agentic_ppo", "sft", "dpo"].contains(&algorithm.as_str());
        self.answers.put("model.name", if is_video { "wan2_2" } else { "causal_lm" })?;
        let place = self.ask_place(on)?;
        let trained_parameters = match is_video {
            true => self.ask_video_model(&algorithm, &place)?,
            false => self.ask_language_model(&algorithm)?,
        };
        // Without a model, the configuration is that of the demo, which has its own number of steps and learning rate.
        if let Some(trained_parameters) = trained_parameters {
            self.ask_length(&algorithm, trained_parameters)?;
        }
        Ok(place.machine())
    }

    /// Asks what to train, and sets the algorithm for it.
    fn ask_algorithm(&mut self) -> Result<()> {
        list("What do you want to train?", &PURPOSES.map(|(what, _)| what));
        let registry = self.registry;
        self.answers.ask(&Question::new("algo.name", "Number or name of the algorithm", 1), |_, text| {
            let chosen = match choice(text, PURPOSES.len())? {
                Some(number) => PURPOSES[number].1,
                None => registry.find(Kind::Algorithm, text)?.name,
            };
            Ok(chosen.into())
        })?;
        Ok(())
    }

    /// Asks where the run computes, unless `on` (`--on`) names the machine.
    fn ask_place(&mut self, on: Option<String>) -> Result<Place> {
        let gpu = [Backend::LibTorchCuda, Backend::Cuda].into_iter().find(|backend| backend.check_usable(0).is_ok());
        let gpu = gpu.unwrap_or(Backend::LibTorchCuda).name();
        let mut place = Place::default();
        if let Some(on) = on {
            let (Some(cluster), _) = super::plan::cluster(&MachineArgs { on: Some(on), ..MachineArgs::default() })?
            else {
                return Ok(place);
            };
            place = Place { devices: cluster.devices, gigabytes: cluster.memory / 1e9 };
            self.answers.put("backend", gpu)?;
        } else {
            list("Where will it run?", &PLACES);
            // Position in `PLACES`. A backend that is named counts as this machine.
            let mut chosen = 0;
            self.answers.ask(&Question::new("backend", "Number, or name of the backend", 1), |answers, text| {
                let number = choice(text, PLACES.len())?;
                chosen = number.unwrap_or(0);
                match number {
                    Some(0) => Ok(Backend::Flex.name().into()),
                    Some(_) => Ok(gpu.into()),
                    None => {
                        Backend::of(text.split(':').next().unwrap_or(text))?;
                        answers.parse("backend", text)
                    }
                }
            })?;
            let (computes_on_gpus, computes_on_several) = (chosen > 0, chosen == SEVERAL_GPUS);
            if computes_on_gpus {
                let question = Question::new("--memory", "GB of memory of each GPU", 80);
                let gigabytes = self.answers.ask_without_setting(&question, |_, text| positive(text))?;
                place = Place { devices: 1, gigabytes: gigabytes.unwrap_or_default() };
            }
            if computes_on_several {
                let question = Question::new("ranks", "Number of GPUs", 8);
                self.answers.ask(&question, |answers, text| answers.parse("ranks", text))?;
                let ranks = self.answers.get("ranks").and_then(Json::as_u64).unwrap_or(1);
                place.devices = ranks as usize;
            }
        }
        if place.devices > 1 {
            self.answers.put("ranks", place.devices)?;
            self.answers.put("strategy.name", "zero")?;
        }
        Ok(place)
    }

    /// Asks for a language model and for what it learns from. Returns the number of trained parameters; `None` for the
    /// demo.
    fn ask_language_model(&mut self, algorithm: &str) -> Result<Option<usize>> {
        let question = Question::optional(
            "model.model_path",
            "Directory or GGUF file of the model",
            "the demo's small model and its data",
        );
        let registry = self.registry;
        let mut trained_parameters = 0;
        let is_named = self.answers.ask(&question, |answers, text| {
            let value = answers.parse("model.model_path", text)?;
            trained_parameters = open_model(registry, answers, Some(("model_path", &value)))?.parameter_count();
            Ok(value)
        })?;
        if !is_named {
            return Ok(None);
        }
        if algorithm == "agentic_ppo" {
            self.ask_component(Kind::Environment, "frozen_lake", |registry, name, options, context| {
                registry.environment(name, options, context).map(drop)
            })?;
        } else {
            let (lines, unseen) = match algorithm {
                "dpo" => (
                    "JSON lines with `prompt`, `chosen` and `rejected`",
                    "Pairs that are not trained on, to measure progress",
                ),
                _ => ("JSON lines of conversations", "Conversations that are not trained on, to measure progress"),
            };
            let file = |answers: &Answers, key: &str, text: &str| {
                std::fs::metadata(text).map_err(Error::file("read", text))?;
                answers.parse(key, text)
            };
            let data = Question::new("algo.data", lines, "data.jsonl");
            self.answers.ask(&data, |answers, text| file(answers, "algo.data", text))?;
            let unseen = Question::optional("algo.val_data", unseen, "no measurement");
            self.answers.ask(&unseen, |answers, text| file(answers, "algo.val_data", text))?;
        }
        Ok(Some(trained_parameters))
    }

    /// Asks for a component of `kind` until `make` makes it: for its name, for options without a default, and again for
    /// an option that an error of `make` names. If asking for options cannot help, another component is asked for.
    fn ask_component(
        &mut self,
        kind: Kind,
        default: &str,
        mut make: impl FnMut(&Registry, &str, &Options, &BuildContext) -> Result<()>,
    ) -> Result<()> {
        let (registry, section) = (self.registry, kind.section());
        println!("{section}s:");
        for entry in registry.entries().iter().filter(|entry| entry.factory.kind() == kind) {
            println!("  {:<12} {}", entry.name, entry.summary);
        }
        let name_key = format!("{section}.name");
        'component: loop {
            let question = Question::new(&name_key, "Which one", default);
            self.answers.ask(&question, |_, text| Ok(registry.find(kind, text)?.name.into()))?;
            let registration = registry.find(kind, self.answers.text(&name_key))?;
            let mut asked_options = required(registration);
            loop {
                for name in &asked_options {
                    self.ask_option(registration.name, &format!("{section}.{name}"))?;
                }
                let options = self.answers.options(section)?;
                let error = match make(registry, registration.name, &options, &context()) {
                    Ok(()) => return Ok(()),
                    Err(error) => error,
                };
                // The answers may be right: a service that they name does not answer now, for example.
                if error.fault() == Fault::Failure {
                    println!("it cannot be tried now: {}", error.chain());
                    return Ok(());
                }
                self.answers.refuse(&name_key, &error)?;
                match named_option(&error, registration) {
                    Some(name) => asked_options = vec![name],
                    // The required options name the files.
                    None if error_is_of_files(&error) => asked_options = required(registration),
                    // No option can help: another component is asked for.
                    None => asked_options.clear(),
                }
                if asked_options.is_empty() {
                    self.answers.forget(section);
                    continue 'component;
                }
            }
        }
    }

    /// Asks for an option of a component, by the first sentence of its description.
    fn ask_option(&mut self, component: &str, key: &str) -> Result<()> {
        let known = self.answers.key(key);
        let about = known.map(|known| known.about.as_str()).unwrap_or_default();
        let sentence = about.split(". ").next().unwrap_or_default().trim_end_matches('.');
        let proposed = PROPOSED.iter().find(|(its_component, name, _)| *its_component == component && *name == key);
        let question = Question::new(key, sentence, proposed.map_or("", |(_, _, answer)| answer));
        self.answers.ask(&question, |answers, text| answers.parse(key, text)).map(drop)
    }

    /// Asks for the number of steps, the learning rate, and the steps between checkpoints.
    fn ask_length(&mut self, algorithm: &str, trained_parameters: usize) -> Result<()> {
        let proposed_steps =
            STEPS.iter().find(|(name, _)| *name == algorithm).map_or(STEPS_OF_OTHERS, |(_, steps)| *steps);
        self.ask_value("steps", "Optimizer steps", proposed_steps)?;
        let rate_of_algorithm = self.registry.find(Kind::Algorithm, algorithm)?.learning_rate;
        let default_rate = rate_of_algorithm.unwrap_or_else(|| TrainingConfig::default().learning_rate);
        let proposed_rate = if trained_parameters < TOY_PARAMETERS { TOY_LEARNING_RATE } else { default_rate };
        self.ask_value("training.learning_rate", "Learning rate of the adapter", format!("{proposed_rate:e}"))?;
        let steps = self.answers.get("steps").and_then(Json::as_u64).unwrap_or(proposed_steps);
        self.ask_value("save_steps", "Steps between checkpoints", steps.div_ceil(CHECKPOINTS).max(1))?;
        // A run with an answer to one of these questions is evaluated. It is evaluated with every checkpoint.
        let evaluated_on = ["evaluation.metadata", "evaluation.prompts", "algo.val_data"];
        if evaluated_on.iter().any(|key| self.answers.get(key).is_some()) {
            let every = self.answers.get("save_steps").cloned().unwrap_or_default();
            self.answers.put("evaluation.every", every)?;
        }
        Ok(())
    }

    /// Asks for the value of a key.
    fn ask_value(&mut self, key: &str, asks: &str, default: impl ToString) -> Result<()> {
        self.answers.ask(&Question::new(key, asks, default), |answers, text| answers.parse(key, text)).map(drop)
    }
}

/// The machine with GPUs of one kind that a run is for.
#[derive(Default)]
struct Place {
    /// Number of GPUs; 0: the run computes on this machine.
    devices: usize,
    /// Memory of each GPU.
    gigabytes: f64,
}

impl Place {
    /// The machine as `--on` takes it; `None` for this machine.
    fn machine(&self) -> Option<String> {
        (self.devices > 0).then(|| format!("{}x{}", self.devices, self.gigabytes))
    }
}

/// The context in which answers are tried: headers of files are read, and nothing is computed.
fn context() -> BuildContext {
    BuildContext { headers_only: true, ..BuildContext::new(Backend::Flex.name()) }
}

/// Opens the model that the answers name, with one more option if `option` has its name and value.
fn open_model(registry: &Registry, answers: &Answers, option: Option<(&str, &Json)>) -> Result<Box<dyn Model>> {
    let mut options = answers.options("model")?;
    if let Some((name, value)) = option {
        answers::insert(&mut options, name, value.clone());
    }
    registry.model(answers.text("model.name"), &options, &context())
}

/// Names of the options that must be given.
fn required(registration: &Registration) -> Vec<String> {
    registration.keys().into_iter().filter(Key::is_required).map(|key| key.name).collect()
}

/// The option of the component that an error is about; `None` if it is about something else.
fn named_option(error: &Error, registration: &Registration) -> Option<String> {
    let Error::Config { key, .. } = root(error) else { return None };
    let name = key.split_once('.')?.1;
    registration.keys().into_iter().map(|known| known.name).find(|known| known == name)
}

/// Whether files are at fault, so that naming other files may help.
fn error_is_of_files(error: &Error) -> bool {
    matches!(root(error), Error::File { .. } | Error::BadFile { .. } | Error::Component { .. })
}

/// The innermost error, without the contexts around it.
fn root(error: &Error) -> &Error {
    match error {
        Error::Context { source, .. } => root(source),
        error => error,
    }
}

/// The index of a choice that is written as a number from 1 to `most`; `None` if the text is a name.
fn choice(text: &str, most: usize) -> Result<Option<usize>> {
    match text.parse::<usize>() {
        Ok(number) if (1..=most).contains(&number) => Ok(Some(number - 1)),
        Err(_) if text.starts_with(|c: char| c.is_ascii_alphabetic()) && text.len() > 1 => Ok(None),
        _ => Err(Error::Unsupported(format!("expected a number from 1 to {most}, or a name; found `{text}`"))),
    }
}

/// Parses a number above 0.
fn positive(text: &str) -> Result<f64> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number > 0.0);
    number.ok_or_else(|| Error::Unsupported(format!("expected a number above 0, found `{text}`")))
}

/// Prints a question and its numbered options.
fn list(asks: &str, options: &[&str]) {
    println!("{asks}");
    options.iter().enumerate().for_each(|(i, option)| println!("  {}  {option}", i + 1));
}
