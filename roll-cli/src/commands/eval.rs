//! `roll eval`: success of a language model on held-out starts or questions, the base and an adapter side by side.

use std::collections::BTreeMap;
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
    let context = build_context(&loaded);
    if args.questions.is_some() && args.episodes.is_none() {
        ask_all_questions(&mut loaded, &context)?;
    }
    if let Some(saved_trajectories) = loaded.config.algo.options.get_mut("saved_trajectories") {
        *saved_trajectories = EVERY_EPISODE.into();
    }
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
        false => print(&headlines, &results, comparison.as_ref()),
    }
    Ok(())
}

/// The configuration keys that the command's own arguments set.
fn keys(args: &Eval) -> Vec<KeyValue> {
    let text = |path: &Path| path.to_string_lossy().into_owned();
    // Several samples of the likeliest tokens would be the same.
    let temperature = args.temperature.or(args.samples.filter(|samples| *samples > 1).map(|_| 1.0));
    let arguments = [
        ("model.model_path", args.model_path.clone(), "--model-path"),
        ("algo.val_batch_size", args.episodes.map(|n| n.to_string()), "--episodes"),
        ("algo.val_group_size", args.samples.map(|n| n.to_string()), "--samples"),
        ("algo.val_temperature", temperature.map(|t| t.to_string()), "--temperature"),
        ("env.name", args.questions.as_ref().map(|_| "questions".to_string()), "--questions"),
        ("env.source", args.questions.as_ref().map(|_| "file".to_string()), "--questions"),
        ("env.path", args.questions.as_ref().map(|_| "null".to_string()), "--questions"),
        ("env.validation_path", args.questions.as_deref().map(text), "--questions"),
    ];
    arguments.into_iter().filter_map(|(key, value, origin)| Some(KeyValue { key, value: value?, origin })).collect()
}

/// Sets the number of episodes to the number of questions.
fn ask_all_questions(loaded: &mut LoadedConfig, context: &BuildContext) -> Result<()> {
    let Some(env) = &loaded.config.env else { return Ok(()) };
    let options: QuestionsOptions = serde_json::from_value(Json::Object(env.options.clone()))
        .map_err(|error| Error::config("env", error.to_string()))?;
    let questions = questions::count_validated(options, context)?;
    loaded.config.algo.options.insert("val_batch_size".into(), questions.into());
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
    let solved = solved_by_start(&records);
    let success = (!solved.is_empty()).then(|| {
        let fraction = solved.values().sum::<f64>() / solved.len() as f64;
        Success { fraction, ci95: wilson_95(fraction, solved.len()), starts: solved.len() }
    });
    records.iter_mut().for_each(|record| record["model"] = name.as_str().into());
    Ok(ModelResult { model: name, success, metrics, seconds, solved, records })
}

/// The fraction of solved episodes of each start, by its seed. Episodes that failed are left out.
fn solved_by_start(records: &[Json]) -> BTreeMap<String, f64> {
    let mut outcomes: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for record in records {
        let (seed, is_solved) = (record["whole_seed"].as_str(), record["solved"].as_bool());
        let has_failed = record["ending"].get("failed").is_some();
        if let (Some(seed), Some(is_solved), false) = (seed, is_solved, has_failed) {
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

/// Prints a table with a column for each model.
fn print(headlines: &[Headline], results: &[ModelResult], comparison: Option<&Comparison>) {
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
    let pass_names = results[0].metrics.keys().filter(|name| name.starts_with(PASS_AT));
    rows.extend(pass_names.map(|name| {
        let cell = |result: &ModelResult| HeadlineFormat::Percent.write(result.metrics[name]);
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
        println!("on {} starts that training never sees; 95 % intervals", first.starts);
    }
    if let Some(Comparison { gain, better, worse, sign_test }) = comparison {
        println!(
            "success {}: better on {better}, worse on {worse} of the same starts (p = {sign_test:.2e}, sign test)",
            gain.in_words()
        );
    }
}
