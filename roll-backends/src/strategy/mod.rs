//! Strategies: how gradients become updates.

mod saved;
mod single;
pub mod zero;

use roll_core::{Error, Model, OptimizerConfig, Result};

pub use single::{Single, SingleOptions};
pub use zero::{Offload, OffloadDevice, Zero, ZeroOptions};

/// Fails on a model or on settings that can only be mistakes.
fn check(model: &dyn Model, config: &OptimizerConfig) -> Result<()> {
    for (i, beta) in config.betas.iter().enumerate() {
        if !(0.0..1.0).contains(beta) {
            return Err(Error::config(format!("optimizer.betas[{i}]"), format!("must lie in [0, 1), found {beta}")));
        }
    }
    for (key, value) in
        [("eps", config.eps), ("weight_decay", config.weight_decay), ("max_grad_norm", config.max_grad_norm)]
    {
        if !(value.is_finite() && value >= 0.0) {
            let problem = format!("must be finite and at least 0, found {value}");
            return Err(Error::config(format!("optimizer.{key}"), problem));
        }
    }
    if model.parameter_count() == 0 {
        return Err(Error::Unsupported(
            "the model has no trainable parameters; choose some with `trainable_models` or `lora_base_model`".into(),
        ));
    }
    Ok(())
}

/// Fails on what no update can be made with.
fn check_step(learning_rate: f64, scale: f64) -> Result<()> {
    match learning_rate.is_finite() && scale.is_finite() {
        true => Ok(()),
        false => Err(Error::Misuse(format!("learning rate {learning_rate} and scale {scale} must be finite"))),
    }
}

fn not_attached(strategy: &str) -> Error {
    Error::Misuse(format!("the strategy `{strategy}` has no model yet: call `attach` first"))
}
