//! One validation of a model without training, as `roll eval` does it.

use roll_core::{BuildContext, Error, Headline, Model, Progress, Registry, Result, ResultExt, Samples, Validation};

use crate::config::LoadedConfig;

/// Validates `model` by the configured algorithm, on the held-out data that a run of this configuration would validate
/// on. Returns the algorithm's headlines and the result.
///
/// Fails if the algorithm trains on clips, because such an algorithm does not validate itself; if it acts in an
/// environment and the configuration names none; or if the configuration turns validations off.
pub fn validate(
    loaded: &LoadedConfig,
    registry: &Registry,
    context: &BuildContext,
    model: &mut dyn Model,
    progress: &dyn Progress,
) -> Result<(Vec<Headline>, Validation)> {
    let config = &loaded.config;
    let name = &config.algo.name;
    let Samples::Own(mut algorithm) = registry.algorithm(name, &config.algo.options, context)?.samples() else {
        let problem = format!("`{name}` trains on clips, and evaluates them in a run: see `evaluation.every`");
        return Err(Error::config("algo.name", problem));
    };
    if let Some(env) = &config.env {
        algorithm
            .open_environments(&mut || registry.environment(&env.name, &env.options, context))
            .while_doing(|| format!("opening the environment `{}`", env.name))?;
    }
    let first_step = 0;
    let validation = algorithm.validate(first_step, model, &config.noise(), progress)?;
    let no_validation = || Error::config("algo", format!("`{name}` validates nothing by this configuration"));
    Ok((algorithm.headlines(), validation.ok_or_else(no_validation)?))
}
