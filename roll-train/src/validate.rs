//! Validations of models without training, as `roll eval` does them.

use roll_core::{
    BuildContext, Error, Headline, Model, Noise, OwnDataAlgorithm, Progress, Registry, Result, ResultExt, Samples,
    Validation,
};

use crate::config::LoadedConfig;

/// The configured algorithm, with the held-out data that a run of the configuration would validate on.
pub struct Validator {
    name: String,
    algorithm: Box<dyn OwnDataAlgorithm>,
    noise: Noise,
}

impl Validator {
    /// Opens the algorithm and its environments. Fails if the algorithm trains on clips, because such an algorithm does
    /// not validate itself.
    pub fn open(loaded: &LoadedConfig, registry: &Registry, context: &BuildContext) -> Result<Self> {
        let config = &loaded.config;
        let name = config.algo.name.clone();
        let Samples::Own(mut algorithm) = registry.algorithm(&name, &config.algo.options, context)?.samples() else {
            let problem = format!("`{name}` trains on clips, and evaluates them in a run: see `evaluation.every`");
            return Err(Error::config("algo.name", problem));
        };
        if let Some(env) = &config.env {
            algorithm
                .open_environments(&mut || registry.environment(&env.name, &env.options, context))
                .while_doing(|| format!("opening the environment `{}`", env.name))?;
        }
        Ok(Self { name, algorithm, noise: config.noise() })
    }

    /// The algorithm's headlines, which name the metrics that a person looks at first.
    pub fn headlines(&self) -> Vec<Headline> {
        self.algorithm.headlines()
    }

    /// Validates `model`. Every model of a validator gets the same data and the same noise. Fails if the configuration
    /// turns validations off, or names no environment for an algorithm that acts in one.
    pub fn validate(&mut self, model: &mut dyn Model, progress: &dyn Progress) -> Result<Validation> {
        let first_step = 0;
        let validation = self.algorithm.validate(first_step, model, &self.noise, progress)?;
        let no_validation =
            || Error::config("algo", format!("`{}` validates nothing by this configuration", self.name));
        validation.ok_or_else(no_validation)
    }
}
