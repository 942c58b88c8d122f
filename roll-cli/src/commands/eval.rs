//! `roll eval`: success of a language model on held-out starts or questions, the base and an adapter side by side.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::Path;
use std::time::Instant;

use roll_agents::environments::questions::{self, QuestionsOptions};
use roll_core::{BuildContext, Error, Headline, HeadlineFormat, Model, Result, Validation};
use roll_external::files;
use roll_train::Validator;
use roll_train::config::{ConfigLayers, LoadedConfig};
use roll_train::run_dir::RunDir;
use roll_train::statistics::{Gain, paired_gain, sign_test, wilson_95};
use serde::Serialize;
use serde_json::Value as Json;

use super::adapters::open_model;
use crate::args::{Eval, KeyValue};
use crate::configuration::{Configuration, build_context};
use crate::output::refuse_existing;
use crate::progress::Spinner;

/// Lowest layer of the configuration.
const LOWEST: &str = "algo:\n  name: agentic_ppo\nmodel:\n  name: causal_lm\n";
/// `algo.saved_trajectories` above any number of episodes, because every episode counts in the comparison.
const EVERY_EPISODE: u64 = u32::MAX as u64;
/// What the names of pass@k begin with.
const PASS_AT: &str = "val/env/pass@";
/// Name of the model without an adapter in the table and in JSON.
const BASE: &str = "base";

/// The result of one model.
#[derive(Serialize)]
struct ModelResult {
    model: String,
    /// Fraction of episodes that were solved, with Wilson's interval over starts; `None` if nothing was played.
    success: Option<Success>,
    metrics: BTreeMap<String, f64>,
    seconds: f64,
    /// Fraction of the episodes that were solved, by the seed of their start.
    #[serde(skip)]
    solved: BTreeMap<String, f64>,
    /// Every episode, with the model's name.
    #[serde(skip)]
    records: Vec<Json>,
}

#[derive(Serialize)]
struct Success {
    fraction: f64,
    ci95: [f64; 2],
    starts: usize,
}

/// The adapter against the base, start by start.
#[derive(Serialize)]
struct Comparison {
    #[serde(flatten)]
    gain: Gain,
    /// Number of starts on which the adapter was better.
    better: u64,
    /// Number of starts on which it was worse.
    worse: u64,
    /// Probability that chance alone divides the starts at least as unequally: the two-sided sign test.
    sign_test: f64,
}

/// Evaluates the base and, if there is one, the adapter; prints a table or JSON.
pub fn eval(args: Eval) -> Result<()> {
    if let Some(output) = &args.output {
        refuse_existing(output, args.force)?;
    }
    let mut args = args;
    let run = args.run.take().map(RunDir::open).transpose()?;
    let mut adapters = std::mem::take(&mut args.adapter);
    if let (Some(run), true) = (&run, adapters.is_empty()) {
        adapters.push(run.path().to_string_lossy().into_owned());
    }
    args.config.run = run;
    let configuration = Configuration::read(&args.config, &keys(&args))?;
    let registry = configuration.registry()?;
    let mut loaded = configuration.over(ConfigLayers::new().text("roll eval", LOWEST)?)?.load(&registry)?;
    // Without a reference, a fully trained model holds its weights once.
    let passes = registry.passes(&loaded.config.algo.name, &loaded.config.algo.options);
    let needs_reference = passes.is_ok_and(|passes| passes.needs_reference());
    let context = BuildContext { needs_reference, ..build_context(&loaded) };
    prepare_validation(&mut loaded, &args, &context)?;
    let mut validator = Validator::open(&loaded, &registry, &context)?;
    let mut evaluate = |adapters: &[String]| {
        let model_config = if adapters.is_empty() { without_adapter(&loaded) } else { loaded.clone() };
        let mut model = open_model(&model_config, &registry, &context, adapters)?;
        validated(&mut validator, model.as_mut(), adapters)
    };
    let mut results = vec![evaluate(&[])?];
    if !adapters.is_empty() {
        results.push(evaluate(&adapters)?);
    }
    let headlines = validator.headlines();
    let comparison = match &results[..] {
        [base, adapted] => compared(base, adapted),
        _ => None,
    };
    if let Some(output) = &args.output {
        write_lines(output, results.iter().flat_map(|result| &result.records))?;
    }
    match args.json {
        true => println!("{}", serde_json::json!({ "models": results, "comparison": comparison })),
        false => {
            let data = match &args.questions {
                Some(file) => format!("questions of {}", file.display()),
                None => "starts that training never sees".into(),
            };
            print(&headlines, &results, comparison.as_ref(), &data);
        }
    }
    Ok(())
}

/// The configuration keys that the command's own arguments set.
fn keys(args: &Eval) -> Vec<KeyValue> {
    let text = |path: &Path| path.to_string_lossy().into_owned();
    let for_questions = |value: &str| args.questions.as_ref().map(|_| value.to_string());
    let arguments = [
        ("algo.name", for_questions("agentic_ppo"), "--questions"),
        ("model.model_path", args.model_path.clone(), "--model-path"),
        ("algo.val_batch_size", args.episodes.map(|n| n.to_string()), "--episodes"),
        ("algo.val_group_size", args.samples.map(|n| n.to_string()), "--samples"),
        ("algo.val_temperature", args.temperature.map(|t| t.to_string()), "--temperature"),
        ("env.name", for_questions("questions"), "--questions"),
        ("env.source", for_questions("file"), "--questions"),
        ("env.path", for_questions("null"), "--questions"),
        ("env.validation_path", args.questions.as_deref().map(text), "--questions"),
    ];
    arguments.into_iter().filter_map(|(key, value, origin)| Some(KeyValue { key, value: value?, origin })).collect()
}

/// Changes the options of a training to those of an evaluation.
fn prepare_validation(loaded: &mut LoadedConfig, args: &Eval, context: &BuildContext) -> Result<()> {
    let chosen_here = loaded.provenance.is_of_this_call("algo.val_temperature");
    let LoadedConfig { config, .. } = loaded;
    let options = &mut config.algo.options;
    if options.contains_key("saved_trajectories") {
        options.insert("saved_trajectories".into(), EVERY_EPISODE.into());
    }
    // The adapter of a training that is going on must stay in the engine.
    if options.remove("rollout").is_some_and(|rollout| rollout["name"] != "model") {
        tracing::warn!("the model itself writes the answers, not the engine of `algo.rollout`");
    }
    // Several samples of the likeliest tokens would be the same. A run directory states every value, also the default.
    let takes_likeliest = options.get("val_temperature").and_then(Json::as_f64).unwrap_or(0.0) == 0.0;
    if args.samples.is_some_and(|samples| samples > 1) && takes_likeliest && !chosen_here {
        options.insert("val_temperature".into(), 1.0.into());
    }
    let Some(env) = config.env.as_mut().filter(|env| env.name == "questions") else { return Ok(()) };
    if args.questions.is_some() {
        for of_run in ["digits", "operands", "validation_share"] {
            env.options.remove(of_run);
        }
        for of_several_worlds in ["tags", "val_tags", "num_groups_partition", "val_num_groups_partition"] {
            options.remove(of_several_worlds);
        }
    }
    // A question that is asked again says nothing new: its starts would not be independent.
    let of_env: QuestionsOptions = serde_json::from_value(Json::Object(env.options.clone()))
        .map_err(|error| Error::config("env", error.to_string()))?;
    let questions = questions::count_validated(of_env, context)?;
    let asked = options.get("val_batch_size").and_then(Json::as_u64).unwrap_or(u64::MAX);
    let all_are_asked = args.questions.is_some() && args.episodes.is_none();
    if all_are_asked || asked > questions as u64 {
        options.insert("val_batch_size".into(), questions.into());
    }
    Ok(())
}

/// The configuration of the model without the adapter that it names.
fn without_adapter(loaded: &LoadedConfig) -> LoadedConfig {
    let mut loaded = loaded.clone();
    loaded.config.model.options.remove("lora_checkpoint");
    loaded
}

/// Validates `model`, the base with the sum of `adapters`.
fn validated(validator: &mut Validator, model: &mut dyn Model, adapters: &[String]) -> Result<ModelResult> {
    let name = if adapters.is_empty() { BASE.to_string() } else { adapters.join(" + ") };
    let progress = Spinner::new(&name);
    let begun = Instant::now();
    let Validation { metrics, mut records, .. } = validator.validate(model, &progress)?;
    let seconds = begun.elapsed().as_secs_f64();
    if !records.is_empty() && records.iter().all(|record| record["whole_seed"].is_string() && !is_played(record)) {
        let problem = format!("`{name}` played no episode to its end; the first: {}", records[0]["ending"]);
        return Err(Error::Unsupported(problem));
    }
    let solved = solved_by_start(&records);
    let success = (!solved.is_empty()).then(|| {
        let fraction = solved.values().sum::<f64>() / solved.len() as f64;
        Success { fraction, ci95: wilson_95(fraction, solved.len()), starts: solved.len() }
    });
    records.iter_mut().for_each(|record| record["model"] = name.as_str().into());
    Ok(ModelResult { model: name, success, metrics, seconds, solved, records })
}

/// Whether an episode counts: the agent has answered, and neither the environment nor the engine failed.
/// `val/env/success` is over the same episodes.
fn is_played(record: &Json) -> bool {
    let has_answered = record["turns"].as_array().is_some_and(|turns| !turns.is_empty());
    has_answered && ["failed", "no_answer"].iter().all(|failure| record["ending"].get(failure).is_none())
}

/// The fraction of solved episodes of each start, by its seed. Episodes that do not count are left out.
fn solved_by_start(records: &[Json]) -> BTreeMap<String, f64> {
    let mut outcomes: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for record in records {
        let (seed, is_solved) = (record["whole_seed"].as_str(), record["solved"].as_bool());
        if let (Some(seed), Some(is_solved), true) = (seed, is_solved, is_played(record)) {
            outcomes.entry(seed.into()).or_default().push(if is_solved { 1.0 } else { 0.0 });
        }
    }
    let mean = |values: Vec<f64>| values.iter().sum::<f64>() / values.len() as f64;
    outcomes.into_iter().map(|(seed, values)| (seed, mean(values))).collect()
}

/// Compares two models on the starts that both have played; `None` if they share no start.
fn compared(base: &ModelResult, adapted: &ModelResult) -> Option<Comparison> {
    let played = base.solved.iter().filter_map(|(seed, before)| Some([*before, *adapted.solved.get(seed)?]));
    let pairs: Vec<[f64; 2]> = played.collect();
    if pairs.is_empty() {
        return None;
    }
    let count = |is_so: fn(&[f64; 2]) -> bool| pairs.iter().filter(|pair| is_so(pair)).count() as u64;
    let (better, worse) = (count(|[before, after]| after > before), count(|[before, after]| after < before));
    Some(Comparison { gain: paired_gain(&pairs), better, worse, sign_test: sign_test(better, worse) })
}

fn write_lines<'a>(path: &Path, records: impl IntoIterator<Item = &'a Json>) -> Result<()> {
    files::write_atomically_with(path, |file| records.into_iter().try_for_each(|record| writeln!(file, "{record}")))
}

/// Prints a table with a column for each model. `data` says in words what was played.
fn print(headlines: &[Headline], results: &[ModelResult], comparison: Option<&Comparison>, data: &str) {
    let mut rows = vec![(String::new(), results.iter().map(|result| result.model.clone()).collect::<Vec<_>>())];
    for headline in headlines {
        let Some(held_out) = &headline.held_out else { continue };
        let cell = |result: &ModelResult| {
            let value = result.metrics.get(&held_out.metric)?;
            let interval = result.success.as_ref().filter(|_| held_out.metric == "val/env/success");
            Some(match interval {
                Some(Success { ci95: [low, high], .. }) => {
                    let [value, low, high] = [*value, *low, *high].map(|value| headline.format.write(value));
                    format!("{value} ({low} to {high})")
                }
                None => headline.format.write(*value),
            })
        };
        let cells: Option<Vec<String>> = results.iter().map(cell).collect();
        rows.extend(cells.map(|cells| (held_out.label.clone(), cells)));
    }
    let names = results.iter().flat_map(|result| result.metrics.keys());
    let pass_names: BTreeSet<&String> = names.filter(|name| name.starts_with(PASS_AT)).collect();
    rows.extend(pass_names.into_iter().map(|name| {
        let cell = |result: &ModelResult| {
            result.metrics.get(name).map_or("-".into(), |value| HeadlineFormat::Percent.write(*value))
        };
        (name.trim_start_matches("val/env/").to_string(), results.iter().map(cell).collect())
    }));
    let seconds = results.iter().map(|result| format!("{:.0}", result.seconds));
    rows.push(("seconds".into(), seconds.collect()));
    let width = |column: usize| rows.iter().map(|(_, cells)| cells[column].chars().count()).max().unwrap_or_default();
    let widths: Vec<usize> = (0..results.len()).map(width).collect();
    for (label, cells) in &rows {
        let cells: Vec<String> = cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        println!("{}", format!("{label:<10} {}", cells.join("  ")).trim_end());
    }
    if let Some(first) = results.first().and_then(|result| result.success.as_ref()) {
        println!("on {} {data}; 95 % intervals", first.starts);
    }
    if let Some(Comparison { gain, better, worse, sign_test }) = comparison {
        println!(
            "success {}: better on {better}, worse on {worse} of the same starts (p = {sign_test:.2e}, sign test)",
            gain.in_words()
        );
    }
}
