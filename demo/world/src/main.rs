//! Makes the world of the embedded demo: procedural faces, and the networks trained on them.

mod all;
mod clips;
mod detector;
mod embedder;
mod experts;
mod face;
mod files;
mod network;
mod onnx_writer;
mod portraits;
mod quality;
mod sheet;
mod text;
mod training;
mod vae;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use roll_core::Result;

/// Makes the world of the embedded demo.
#[derive(Debug, Parser)]
struct Arguments {
    /// Output directory.
    #[arg(long, global = true, default_value = "demo/assets")]
    out: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Train the face detector.
    Detector {
        /// Number of updates; overrides the default.
        #[arg(long)]
        steps: Option<u64>,
    },
    /// Train a face embedder.
    Embedder {
        /// Seed. Seed 1 makes the reward's embedder; any other seed makes a judge that is never used as a reward.
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Number of updates; overrides the default.
        #[arg(long)]
        steps: Option<u64>,
    },
    /// Draw a sheet of people, poses and motions as PNG.
    Sheet,
    /// Write clips of people as MP4, with a metadata.csv.
    Clips {
        /// Number of clips.
        #[arg(long, default_value_t = 32)]
        count: u64,
        /// Number of the first person. Each clip shows another person.
        #[arg(long, default_value_t = 11_000)]
        first_identity: u64,
        /// Seed of the motions.
        #[arg(long, default_value_t = 0)]
        seed: u64,
    },
    /// Write portraits of people as PNG, with a metadata.csv, prompts.txt and unseen.txt.
    Portraits {
        /// Number of portraits. Each shows another person.
        #[arg(long, default_value_t = 8000)]
        count: u64,
        /// In this many of ten rows, the column `carelessly` describes another portrait.
        #[arg(long, default_value_t = 4)]
        careless: u64,
    },
    /// Train both transformers. VAE and text encoder must exist.
    Experts {
        /// Number of updates; overrides the configuration.
        #[arg(long)]
        steps: Option<u64>,
        /// Directory of clips and run.
        #[arg(long, default_value = "target/demo-world")]
        work: PathBuf,
        /// Configuration of the training.
        #[arg(long, default_value = "demo/world/experts.yaml")]
        config: PathBuf,
    },
    /// Train the VAE.
    Vae {
        /// Number of updates of each round; overrides the default.
        #[arg(long)]
        steps: Option<u64>,
        /// VAE file to continue from. Only the last round is trained.
        #[arg(long)]
        from: Option<PathBuf>,
    },
    /// Make the tokenizer and train the text encoder.
    Text {
        /// Number of updates; overrides the default.
        #[arg(long)]
        steps: Option<u64>,
    },
    /// Write the clips of the default run and the overview sheet of people.
    Data,
    /// Make and measure everything, in order.
    All {
        /// Directory of the clips and the run of the transformers.
        #[arg(long, default_value = "target/demo-world")]
        work: PathBuf,
        /// Configuration of the transformers' training.
        #[arg(long, default_value = "demo/world/experts.yaml")]
        config: PathBuf,
    },
    /// Measure the existing networks.
    Quality,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments) {
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

fn run(Arguments { out, command }: &Arguments) -> Result<()> {
    match *command {
        Command::Detector { steps } => {
            detector::train(steps, out)?;
            quality::detector(out)
        }
        Command::Embedder { seed, steps } => {
            let role = embedder::Role::of(seed);
            embedder::train(seed, steps, out)?;
            quality::embedder(role, out)
        }
        Command::Sheet => sheet::write(&out.join("faces.png")),
        Command::Clips { count, first_identity, seed } => clips::write(out, first_identity, count, seed),
        Command::Portraits { count, careless } => portraits::write(out, count, careless),
        Command::Experts { steps, ref work, ref config } => experts::train(out, work, config, steps),
        Command::Vae { steps, ref from } => {
            vae::train(steps, from.as_deref(), out)?;
            quality::vae::measure(out)
        }
        Command::Text { steps } => {
            text::train(steps, out)?;
            quality::text::measure(out)
        }
        Command::Data => all::data(out),
        Command::All { ref work, ref config } => all::make(out, work, config),
        Command::Quality => all::measure(out),
    }
}
