//! One file per command.

mod ask;
pub mod bench;
mod config;
mod convert_lora;
mod documents;
mod export_expert;
mod generate;
mod init_experts;
mod init_tiny;
mod inspect;
mod merge_lora;
mod plan;
mod plot;
mod plugins;
mod report;
mod run;
mod score;
mod shards;

use roll_core::{BuildContext, Registry, Replaces, Result, plugin};
use roll_train::config::{ConfigLayers, Loaded};

use crate::args::{Command, ConfigArgs};

/// Does what was asked.
pub fn dispatch(command: Command) -> Result<()> {
    match command {
        Command::Run(args) => run::run(args),
        Command::Generate(args) => generate::generate(args),
        Command::Ask(args) => ask::ask(args),
        Command::Score(args) => score::score(args),
        Command::InitTiny(args) => init_tiny::init_tiny(args),
        Command::Plan(args) => plan::plan(args),
        Command::Bench(args) => bench::bench(args),
        Command::Report(args) => report::write(args),
        Command::Plot(args) => plot::plot(args),
        Command::InitExperts(args) => init_experts::init_experts(args),
        Command::ExportExpert(args) => export_expert::export_expert(args),
        Command::MergeLora(args) => merge_lora::merge_lora(args),
        Command::ConvertLora(args) => convert_lora::convert_lora(args),
        Command::MergeShards(args) => shards::merge_shards(args),
        Command::SplitShards(args) => shards::split_shards(args),
        Command::Inspect(args) => inspect::print(args),
        Command::Plugins(args) => plugins::plugins(args),
        Command::Config(args) => config::print(args),
        Command::Completions { shell } => documents::completions(shell),
        Command::Man { out } => documents::man(out.as_deref()),
    }
}

/// Reads the configuration: files, environment, arguments.
fn load(args: &ConfigArgs, registry: &Registry, extra: &[(&str, String, &str)]) -> Result<Loaded> {
    layered(ConfigLayers::new(), args, registry, extra)
}

/// As [`load`]; what names neither a model nor data becomes the demo.
fn load_or_demo(args: &ConfigArgs, registry: &Registry, extra: &[(&str, String, &str)]) -> Result<Loaded> {
    let own = stacked(ConfigLayers::new(), args, extra)?;
    layered(crate::demo::layers(&own)?.unwrap_or_default(), args, registry, extra)
}

/// What is linked in, what lies in the directories of `ROLL_PLUGIN_PATH`, and the plugins that are named.
fn registry(args: &ConfigArgs) -> Result<Registry> {
    let (paths, replace) = layers(ConfigLayers::new(), args)?.plugins()?;
    let replaces = if replace { Replaces::LinkedIn } else { Replaces::Nothing };
    let mut registry = Registry::linked()?;
    for path in paths {
        registry = registry.with_plugin(&plugin::load(path)?, replaces)?;
    }
    for found in std::env::var_os(plugin::PATH_VARIABLE).iter().flat_map(|dirs| plugin::discover(dirs)) {
        registry = registry.with_plugin(&found, replaces)?;
    }
    Ok(registry)
}

fn layered(
    lowest: ConfigLayers,
    args: &ConfigArgs,
    registry: &Registry,
    extra: &[(&str, String, &str)],
) -> Result<Loaded> {
    let loaded = stacked(lowest, args, extra)?.load(Some(registry))?;
    for note in &loaded.notes {
        tracing::warn!("{note}");
    }
    Ok(loaded)
}

/// As [`layers`], and on top the arguments of one command.
fn stacked(lowest: ConfigLayers, args: &ConfigArgs, extra: &[(&str, String, &str)]) -> Result<ConfigLayers> {
    let mut layers = layers(lowest, args)?;
    for (key, value, origin) in extra {
        layers = layers.set_text(key, value, origin)?;
    }
    Ok(layers)
}

/// Files, environment and the arguments that every command has.
fn layers(lowest: ConfigLayers, args: &ConfigArgs) -> Result<ConfigLayers> {
    let mut layers = lowest;
    for file in &args.config {
        layers = layers.file(file)?;
    }
    layers = layers.environment(std::env::vars())?;
    let named = [
        ("algo.name", &args.algo, "--algo"),
        ("model.name", &args.model, "--model"),
        ("env.name", &args.env, "--env"),
        ("backend", &args.backend, "--backend"),
    ];
    for (key, value, origin) in named {
        if let Some(value) = value {
            layers = layers.set_text(key, value, origin)?;
        }
    }
    for assignment in &args.set {
        layers = layers.set(assignment)?;
    }
    if args.plugins_replace {
        layers = layers.set_text("plugins_replace", "true", "--plugins-replace")?;
    }
    if !args.plugins.is_empty() {
        let mut paths = layers.plugins()?.0;
        paths.extend(args.plugins.iter().cloned());
        let list: Vec<_> = paths.iter().map(|p| p.to_string_lossy()).collect();
        layers = layers.set_text("plugins", &serde_json::json!(list).to_string(), "--plugin")?;
    }
    Ok(layers)
}

/// What implementations are made with. Relative paths start from the working directory.
fn build_context(loaded: &Loaded) -> BuildContext {
    BuildContext {
        backend: crate::ranks::device(&loaded.config.backend),
        seed: loaded.config.seed,
        base_dir: ".".into(),
        placement: None,
    }
}
