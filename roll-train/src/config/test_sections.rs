//! The sections `data` and `evaluation` for the tests of this crate, with some of the keys that `roll-video` declares: its
//! own sections belong to the library, and tests are another program.

use std::path::PathBuf;

use roll_core::keys::check_ranges;
use roll_core::{Error, Result, inventory};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{DeclaredSection, SectionType};

inventory::submit!(SectionType::of::<Data>());
inventory::submit!(SectionType::of::<Evaluation>());

/// Training data.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct Data {
    metadata: Option<PathBuf>,
    base_path: Option<PathBuf>,
    #[schemars(range(min = 1))]
    height: Option<usize>,
    width: Option<usize>,
    fps: Option<f64>,
    repeat: u64,
    on_bad_sample: OnBadSample,
    cache_limit: u64,
}

impl Default for Data {
    fn default() -> Self {
        Self {
            metadata: None,
            base_path: None,
            height: None,
            width: None,
            fps: None,
            repeat: 1,
            on_bad_sample: OnBadSample::Error,
            cache_limit: 20 << 30,
        }
    }
}

#[derive(Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum OnBadSample {
    #[default]
    Error,
    Skip,
}

impl DeclaredSection for Data {
    const NAME: &'static str = "data";

    fn check_values(&self) -> Result<()> {
        check_ranges("data", self)?;
        match (self.height, self.width) {
            (Some(_), None) => Err(Error::config("data.height", "needs data.width beside it")),
            _ => Ok(()),
        }
    }
}

/// Evaluations.
#[derive(Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct Evaluation {
    every: u64,
}

impl DeclaredSection for Evaluation {
    const NAME: &'static str = "evaluation";
}
