//! One file per command.
//!
//! Each reads its arguments ([`crate::args`]) and the configuration, calls a library crate and prints the result.
//! `bench`, `check`, `config`, `init` and `watch` are folders; `adapters` holds a part that several commands share.

mod adapters;
mod ask;
mod bench;
mod caption;
mod check;
mod completions;
mod config;
mod convert_lora;
mod data;
mod devices;
mod eval;
mod export;
mod export_expert;
mod face_crop;
mod generate;
mod init;
mod init_experts;
mod init_tiny;
mod inspect;
mod merge_lora;
mod plan;
mod plan_rewards;
mod plot;
mod plugins;
mod report;
mod rewards;
mod run;
mod score;
mod shards;
mod watch;

use roll_core::Result;

use crate::args::{Check, Command};

/// How a command that did not fail ended.
pub enum Ended {
    /// It did its work.
    Done,
    /// A run ended before its last step by `evaluation.stop_when`.
    Stopped,
}

/// Runs the command.
pub fn dispatch(command: Command) -> Result<Ended> {
    match command {
        Command::Run(args) if !args.dry_run => return run::run(args),
        Command::Run(args) => check::check(Check::of(args)),
        Command::Check(args) => check::check(args),
        Command::Generate(args) => generate::generate(args),
        Command::Ask(args) => ask::ask(args),
        Command::Eval(args) => eval::eval(args),
        Command::Score(args) => score::score(args),
        Command::Data(args) => data::data(args),
        Command::Init(args) => init::init(args),
        Command::InitTiny(args) => init_tiny::init_tiny(args),
        Command::Devices(args) => devices::devices(args),
        Command::Plan(args) => plan::plan(args),
        Command::Bench(args) => bench::bench(args),
        Command::Report(args) => report::write(args),
        Command::Watch(args) => watch::watch(args),
        Command::Plot(args) => plot::plot(args),
        Command::InitExperts(args) => init_experts::init_experts(args),
        Command::Export(args) => export::export(args),
        Command::ExportExpert(args) => export_expert::export_expert(args),
        Command::MergeLora(args) => merge_lora::merge_lora(args),
        Command::ConvertLora(args) => convert_lora::convert_lora(args),
        Command::MergeShards(args) => shards::merge_shards(args),
        Command::SplitShards(args) => shards::split_shards(args),
        Command::Inspect(args) => inspect::print(args),
        Command::Rewards(args) => rewards::rewards(args),
        Command::Plugins(args) => plugins::plugins(args),
        Command::Config(args) => config::config(args),
        Command::Completions { shell } => completions::completions(shell),
    }?;
    Ok(Ended::Done)
}
