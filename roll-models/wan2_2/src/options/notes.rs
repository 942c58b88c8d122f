//! Notes on the options of the section `model`.

use roll_core::{ConfiguredOptions, IdleKeys, Kind, OptionNotes, Result, When, parse_options};
use roll_network::comma_list::split;
use serde_json::Value as Json;

use super::{DEFAULT_RANK, WanOptions};

/// Number of weights of one expert of Wan2.2-A14B.
const A14B_EXPERT_WEIGHTS: u64 = 14_288_491_584;
/// Bytes per weight in full fine-tuning: parameter, gradient and two moments, all f32.
const TRAINED_BYTES: u64 = 16;

roll_core::inventory::submit! {
    OptionNotes { kind: Kind::Model, name: "wan2_2", idle: roll_network::trainable::IDLE_KEYS, more: Some(notes) }
}

/// Notes on keys of the section `model` that have no effect, and on the memory of full fine-tuning.
fn notes(config: &ConfiguredOptions<'_>) -> Result<Vec<String>> {
    let options: WanOptions = match config.value("model") {
        Some(Json::Object(options)) => {
            let options =
                options.iter().filter(|(key, _)| *key != "name").map(|(k, v)| (k.clone(), v.clone())).collect();
            parse_options("model", &options)?
        }
        _ => return Ok(Vec::new()),
    };
    options.check()?;
    let mut notes = Vec::new();
    if let (Some(base), Some(models)) = (&options.lora_base_model, &options.trainable_models)
        && options.lora_rank != Some(0)
        && split(base) != split(models)
    {
        notes.extend(config.idle(&[IdleKeys {
            keys: &["model.trainable_models"],
            when: When::Always,
            because: "`model.lora_base_model` names the network that carries the LoRA",
        }]));
    }
    if !options.use_gradient_checkpointing && !options.use_gradient_checkpointing_offload {
        notes.extend(config.idle(&[IdleKeys {
            keys: &["model.keep_attention"],
            when: When::Always,
            because: "without `model.use_gradient_checkpointing` nothing is recomputed",
        }]));
    }
    if options.lora_rank == Some(0) {
        let experts = options.lora_base_model.as_ref().or(options.trainable_models.as_ref());
        notes.push(format!(
            "`model.lora_rank: 0`: every weight of `{}` is trained, with {TRAINED_BYTES} bytes of parameters, gradient \
             and optimizer each (an expert of 14B: {} GB); `model.lora_rank: {DEFAULT_RANK}` trains a LoRA instead",
            experts.map_or("dit2", String::as_str),
            A14B_EXPERT_WEIGHTS * TRAINED_BYTES / 1_000_000_000,
        ));
    }
    Ok(notes)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use roll_core::Options;
    use serde_json::json;

    use super::*;

    #[test]
    fn notes_name_options_without_effect_and_check_rejects_unknown_inputs() {
        let notes_for = |changes: serde_json::Value| {
            let defaults: Options = json!({"model": WanOptions::default()}).as_object().unwrap().clone();
            let mut config = defaults.clone();
            for (key, value) in changes.as_object().unwrap() {
                config["model"][key] = value.clone();
            }
            OptionNotes::of(Kind::Model, "wan2_2", &ConfiguredOptions::new(&config, &defaults))
                .map_err(|e| e.to_string())
        };
        assert_eq!(notes_for(json!({})).unwrap(), Vec::<String>::new());
        assert_eq!(notes_for(json!({"lora_base_model": "dit2", "trainable_models": "dit2"})).unwrap().len(), 0);
        for (changes, word) in [
            (json!({"lora_base_model": "dit", "trainable_models": "dit2"}), "`model.lora_base_model` names"),
            (json!({"lora_rank": 0, "lora_alpha": 3.0}), "`model.lora_alpha: 3.0` has no effect"),
            (
                json!({"use_gradient_checkpointing": false, "use_gradient_checkpointing_offload": true}),
                "`model.use_gradient_checkpointing: false` has no effect",
            ),
            (
                json!({"use_gradient_checkpointing": false, "keep_attention": true}),
                "`model.keep_attention: true` has no effect",
            ),
        ] {
            let notes = notes_for(changes).unwrap();
            assert!(notes.iter().any(|note| note.contains(word)), "{notes:?}");
        }
        let whole = notes_for(json!({"lora_rank": 0, "trainable_models": "dit"})).unwrap();
        assert!(
            whole.len() == 1 && whole[0].contains("every weight of `dit`") && whole[0].contains("228 GB"),
            "{whole:?}"
        );
        let refused = notes_for(json!({"extra_inputs": "input_image,foo"})).unwrap_err();
        assert!(refused.contains("`foo`") && refused.contains("`end_image`"), "{refused}");
        for alpha in [0.0, -1.0] {
            let refused = notes_for(json!({"lora_alpha": alpha})).unwrap_err();
            assert!(refused.contains("model.lora_alpha") && refused.contains("above 0"), "{refused}");
        }
    }
}
