//! Arguments of `roll config`.

use clap::{Args as ClapArgs, ValueEnum};

use super::{ConfigArgs, ConfigFiles};

/// Arguments of `roll config`.
#[derive(Debug, ClapArgs)]
pub struct Config {
    #[command(flatten)]
    pub config: ConfigArgs,
    // An empty struct. It declares the plain arguments, which `Layers` in the field `config` reads as files.
    #[command(flatten)]
    pub _files: ConfigFiles,
    /// Number of optimizer steps.
    #[arg(long, value_name = "N", value_parser = super::whole, allow_negative_numbers = true)]
    pub steps: Option<u64>,
    /// Print the meaning, the values and the default of every key; or of one key, section or component: `training`,
    /// `lora_rank`, `insightface`.
    #[arg(long, value_name = "KEY", num_args = 0..=1, default_missing_value = "", conflicts_with_all = ["template", "steps"])]
    pub reference: Option<String>,
    /// Format of the reference.
    #[arg(long, value_enum, default_value = "text", requires = "reference")]
    pub format: ReferenceFormat,
    /// Print a configuration to begin with: every key with its meaning, those at their default commented out.
    #[arg(long)]
    pub template: bool,
}

/// Format of the reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ReferenceFormat {
    /// Text for a terminal of 80 columns.
    Text,
    /// Markdown for a page.
    Markdown,
}
