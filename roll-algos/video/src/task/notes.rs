//! Keys and columns that have no effect on a run on clips.

use roll_train::config::RunConfig;

use super::config::EvaluationConfig;
use crate::rows::Metadata;

/// The note on keys of `evaluation` that an algorithm with a validation of its own does not read.
pub(super) fn unused_evaluation(evaluation: &EvaluationConfig, algorithm: &str) -> Option<String> {
    (evaluation.train_samples > 0 || evaluation.check.are_listed() || evaluation.stop_when.is_some()).then(|| {
        format!(
            "`evaluation.train_samples`, `evaluation.check` and `evaluation.stop_when` have no effect: `{}` measures its \
             loss on the clips of `evaluation.metadata`, and generates none",
            algorithm
        )
    })
}

/// The note on keys of `evaluation` without effect where no clip is named.
pub(super) fn nothing_evaluated(evaluation: &EvaluationConfig) -> Option<String> {
    if evaluation.names_clips() {
        return None;
    }
    let keys = [
        ("check", evaluation.check.are_listed()),
        ("samples", evaluation.samples.is_some()),
        ("every", evaluation.every > 0 && evaluation.prompts.is_empty()),
    ];
    let set_keys: Vec<_> =
        keys.iter().filter(|(_, is_set)| *is_set).map(|(key, _)| format!("`evaluation.{key}`")).collect();
    (!set_keys.is_empty()).then(|| {
        let verb = if set_keys.len() == 1 { "has" } else { "have" };
        format!(
            "{} {verb} no effect: no clip is evaluated; `evaluation.metadata` or `evaluation.train_samples` names some",
            set_keys.join(", ")
        )
    })
}

/// The note that the masks of the metadata have no effect, for an algorithm that does not train on clips; `None` if no
/// row has a mask.
pub(super) fn unused_masks(metadata: &Metadata) -> Option<String> {
    let masked = metadata.rows.iter().filter(|row| row.mask.is_some() && row.is_first_window()).count();
    let rows = if masked == 1 { "row of `data.metadata` has" } else { "rows of `data.metadata` have" };
    (masked > 0).then(|| {
        format!(
            "{masked} {rows} a `mask`, which has no effect: the algorithm does not train on the \
             clips themselves (`flow_matching` does, and `algo.data_weight` above 0)"
        )
    })
}

/// A note if the metadata have the column `end_image` and `model.extra_inputs` leaves it out, or the other way round.
pub(super) fn unused_end_images(config: &RunConfig, metadata: Option<&Metadata>) -> Option<String> {
    // The option of models that take pictures besides the prompt.
    let inputs = config.model.options.get("extra_inputs")?.as_str()?;
    let given = metadata?.rows.iter().filter(|row| row.end_image.is_some()).count();
    match (given, inputs.split(',').any(|input| input.trim() == "end_image")) {
        (1.., false) => Some(format!(
            "{given} rows of `data.metadata` have an `end_image`, which has no effect: `model.extra_inputs: \
             input_image,end_image` lets the model take it"
        )),
        (0, true) => Some(
            "`end_image` in `model.extra_inputs` has no effect on training: no row of `data.metadata` has an `end_image`"
                .into(),
        ),
        _ => None,
    }
}
