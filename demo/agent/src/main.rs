//! Makes small language models for an agent to start from: they read the map of FrozenLake or Sokoban and answer in the
//! right form, but keep away from the goal. The one for FrozenLake is built in.

mod episode;
mod lake;
mod sokoban;
mod tokenizer;
mod weights;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};
use roll_core::{Error, Noise, Result};

/// How the player moves.
#[derive(Clone, Copy, Debug)]
struct Player {
    /// Of five moves, how many lead away from the goal; the others are drawn from all four.
    away: u32,
    /// Moves may lead to where nothing can be won any more: into holes, boxes into corners.
    careless: bool,
}

/// A world that a model learns to read.
#[derive(Clone, Copy, Debug, ValueEnum)]
#[value(rename_all = "snake_case")]
enum World {
    FrozenLake,
    Sokoban,
}

/// Makes small language models for an agent to start from.
#[derive(Debug, Parser)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Write an untrained model, and conversations to train it on.
    Prepare {
        /// Directory to make: `model/` and `conversations.jsonl` go there.
        #[arg(default_value = "target/demo-agent")]
        work: PathBuf,
        /// Environment that the conversations are about.
        #[arg(long, value_enum, default_value_t = World::FrozenLake)]
        world: World,
        /// How many episodes. One of FrozenLake is one conversation, one of Sokoban a conversation for each turn.
        #[arg(long, default_value_t = 20_000)]
        episodes: u64,
        /// Of five moves, how many lead away from the goal; the others are random.
        #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(..=5))]
        away: u32,
        /// The player steps into holes and pushes boxes into corners that it could avoid.
        #[arg(long)]
        careless: bool,
        /// Key of weights and worlds.
        #[arg(long, default_value_t = 0)]
        seed: u64,
    },
    /// Put trained weights in the place of those that are built in, rounded to bf16.
    Install {
        /// `model.safetensors` of a checkpoint.
        weights: PathBuf,
        /// Files of `prepare`.
        #[arg(long, default_value = "target/demo-agent")]
        work: PathBuf,
        /// Where the files lie that are built in.
        #[arg(long, default_value = "roll-models/assets/demo_agent")]
        out: PathBuf,
    },
}

fn main() -> ExitCode {
    match run(&Arguments::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            let mut cause = std::error::Error::source(&error);
            while let Some(source) = cause {
                eprintln!("  because: {source}");
                cause = source.source();
            }
            ExitCode::FAILURE
        }
    }
}

fn run(command: &Command) -> Result<()> {
    match command {
        Command::Prepare { work, world, episodes, away, careless, seed } => {
            let noise = Noise::new(*seed);
            let player = Player { away: *away, careless: *careless };
            let model = work.join("model");
            std::fs::create_dir_all(&model).map_err(Error::file("create the directory", &model))?;
            write(&model.join("tokenizer.json"), &tokenizer::json(*world).to_string())?;
            write(&model.join("chat_template.jinja"), tokenizer::TEMPLATE)?;
            write(&model.join("config.json"), &format!("{:#}\n", weights::config(*world)))?;
            weights::untrained(&model.join("model.safetensors"), *world, &noise)?;
            let played = match world {
                World::FrozenLake => lake::conversations,
                World::Sokoban => sokoban::conversations,
            };
            let mut lines = String::new();
            for episode in 0..*episodes {
                for conversation in played(&noise, episode, player)? {
                    let _ = writeln!(lines, "{conversation}");
                }
            }
            write(&work.join("conversations.jsonl"), &lines)
        }
        Command::Install { weights, work, out } => {
            std::fs::create_dir_all(out).map_err(Error::file("create the directory", out))?;
            for name in ["config.json", "tokenizer.json", "chat_template.jinja"] {
                let from = work.join("model").join(name);
                std::fs::copy(&from, out.join(name)).map_err(Error::file("copy", &from))?;
            }
            weights::rounded(weights, &out.join("model.safetensors"))
        }
    }
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).map_err(Error::file("write", path))
}
