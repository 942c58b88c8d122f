//! Strategies: they accumulate gradients, reduce them over ranks, and update the parameters. [`zero`] runs on any
//! number of ranks; `single` is [`zero`] on one rank.

mod optimizer_location;
mod saved;
mod single;
pub mod zero;

use roll_core::{Error, Model, OptimizerConfig, Result};

pub use optimizer_location::OptimizerLocation;
pub use single::{SingleOptions, single};
pub use zero::{Offload, OffloadDevice, Zero, ZeroOptions};

/// Fails if the model has no trainable parameters or `config` is invalid. Loading a configuration already rejects such
/// settings; this check is for programs that construct an [`OptimizerConfig`] themselves.
fn check(model: &dyn Model, config: &OptimizerConfig) -> Result<()> {
    if let Some(beta) = config.betas.iter().find(|beta| !(0.0..1.0).contains(*beta)) {
        return Err(Error::config("training.betas", format!("expected numbers in [0, 1), found {beta}")));
    }
    for (key, value) in
        [("eps", config.eps), ("weight_decay", config.weight_decay), ("max_grad_norm", config.max_grad_norm)]
    {
        if !(value.is_finite() && value >= 0.0) {
            let problem = format!("expected a finite number of at least 0, found {value}");
            return Err(Error::config(format!("training.{key}"), problem));
        }
    }
    if model.parameter_count() == 0 {
        return Err(Error::Unsupported(
            "the model has no trainable parameters; choose some with `trainable_models` or `lora_base_model`".into(),
        ));
    }
    Ok(())
}

/// Fails unless learning rate and scale are finite.
fn check_step(learning_rate: f64, scale: f64) -> Result<()> {
    if !learning_rate.is_finite() {
        let problem = format!("expected a finite number at every step, found {learning_rate}");
        return Err(Error::config("training.learning_rate", problem));
    }
    if !scale.is_finite() {
        return Err(Error::Misuse(format!("the gradient's scale must be finite, found {scale}")));
    }
    Ok(())
}

fn not_attached() -> Error {
    Error::Misuse("the strategy has no model yet: call `attach` first".into())
}
