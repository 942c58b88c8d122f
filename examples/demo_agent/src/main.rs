//! Makes the small language model that is built in: it reads the map of FrozenLake and answers in the right form, but
//! keeps away from the goal.

mod play;
mod tokenizer;
mod weights;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use roll_core::{Error, Noise, Result};

use play::Player;

/// Makes the small language model that is built in.
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
        /// How many conversations.
        #[arg(long, default_value_t = 20_000)]
        conversations: u64,
        /// Of five moves, how many lead away from the goal; the others are random.
        #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(..=5))]
        away: u32,
        /// The player steps into holes that it could avoid.
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
        /// What `prepare` wrote.
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
        Command::Prepare { work, conversations, away, careless, seed } => {
            let noise = Noise::new(*seed);
            let player = Player { away: *away, careless: *careless };
            let model = work.join("model");
            std::fs::create_dir_all(&model).map_err(Error::file("create the directory", &model))?;
            write(&model.join("tokenizer.json"), &tokenizer::json().to_string())?;
            write(&model.join("chat_template.jinja"), tokenizer::TEMPLATE)?;
            write(&model.join("config.json"), &format!("{:#}\n", weights::config()))?;
            weights::untrained(&model.join("model.safetensors"), &noise)?;
            let lines = (0..*conversations).map(|i| play::conversation(&noise, i, player).map(|c| format!("{c}\n")));
            write(&work.join("conversations.jsonl"), &lines.collect::<Result<String>>()?)
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
