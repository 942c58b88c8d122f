//! Makes small language models as starting points for an agent. They read the map of FrozenLake or Sokoban and answer
//! in the right format, but avoid the goal. The model for FrozenLake is built into `roll`.

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
    /// Number of moves out of five that lead away from the goal. The other moves are drawn from all four directions.
    away: u32,
    /// Whether the player makes moves after which the game cannot be won: steps into holes, pushes boxes into corners.
    careless: bool,
}

/// Environment whose maps a model learns to read.
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
    /// Write an untrained model and the conversations that it is trained on.
    Prepare {
        /// Directory to create. It will contain `model/` and `conversations.jsonl`.
        #[arg(default_value = "target/demo-agent")]
        work: PathBuf,
        /// Environment that the conversations are about.
        #[arg(long, value_enum, default_value_t = World::FrozenLake)]
        world: World,
        /// Number of episodes. An episode of FrozenLake is one conversation; an episode of Sokoban is one conversation
        /// per turn.
        #[arg(long, default_value_t = 20_000)]
        episodes: u64,
        /// Number of moves out of five that lead away from the goal; the others are random.
        #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(..=5))]
        away: u32,
        /// Let the player step into holes and push boxes into corners, although it could avoid that.
        #[arg(long)]
        careless: bool,
        /// Seed of weights and environments.
        #[arg(long, default_value_t = 0)]
        seed: u64,
    },
    /// Write pairs of answers to maps of FrozenLake, of which one is preferred.
    Prefer {
        /// File to write.
        #[arg(default_value = "target/demo-agent/preferences.jsonl")]
        file: PathBuf,
        /// Number of pairs.
        #[arg(long, default_value_t = 512)]
        pairs: usize,
        /// Seed of the maps.
        #[arg(long, default_value_t = 0)]
        seed: u64,
    },
    /// Replace the built-in weights by trained weights, rounded to bf16.
    Install {
        /// `model.safetensors` of a checkpoint.
        weights: PathBuf,
        /// Directory that `prepare` wrote.
        #[arg(long, default_value = "target/demo-agent")]
        work: PathBuf,
        /// Directory of the built-in files.
        #[arg(long, default_value = "roll-models/causal_lm/assets/demo_agent")]
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
        Command::Prefer { file, pairs, seed } => {
            let noise = Noise::new(*seed);
            let rows = (0..).map(|episode| lake::preference(&noise, episode)).filter_map(Result::transpose).take(*pairs);
            write(file, &rows.map(|row| Ok(format!("{}\n", row?))).collect::<Result<String>>()?)
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
