//! The model `qwen_vl`: texts with pictures as tokens and back, what is forgotten, agreement of generation and evaluation,
//! files of checkpoints.

use std::path::Path;

use roll_causal_lm::{CausalLm, Export};
use roll_core::{
    Adapter, BuildContext, FIRST_PICTURE_ID, Grad, LanguageModel, Message, Model, Picture, Sampling, Tensor, header,
    parse_options,
};
use roll_network::weights::{Checkpoint, save_safetensors};
use serde_json::{Value, json};

use crate::init_tiny::init_tiny;
use crate::{PolicyOptions, open_policy};

/// A directory with a tiny checkpoint.
fn checkpoint() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    init_tiny(directory.path(), 1).unwrap();
    directory
}

fn open(directory: &Path, more: Value) -> roll_core::Result<CausalLm> {
    let mut options = json!({"model_path": directory, "lora_rank": 2});
    options.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    open_policy(&parse_options::<PolicyOptions>("model", options.as_object().unwrap())?, &BuildContext::new("flex"))
}

/// A picture of a colour with a white column.
fn picture(column: usize) -> Picture {
    let pixels = (0..56 * 56).flat_map(|i| if i % 56 == column { [255u8; 3] } else { [200, 30, 60] });
    Picture::new(Tensor::new(pixels.collect::<Vec<u8>>(), [56, 56, 3]).unwrap()).unwrap()
}

fn is_square(id: &u32) -> bool {
    *id >= FIRST_PICTURE_ID
}

#[test]
fn pictures_become_tokens_in_their_places_and_one_mark_again() {
    let directory = checkpoint();
    let model = open(directory.path(), json!({})).unwrap();
    let messages = [Message::new("user", "\u{fffc}\u{fffc}Which one is \u{fffc}?")];
    let text = model.render_chat(&messages, true).unwrap();
    let ids = model.tokenize_with_pictures(&text, &[picture(3), picture(9), picture(3)]).unwrap();
    let delimiters = ["<|vision_start|>", "<|vision_end|>"].map(|token| model.tokenize(token).unwrap()[0]);
    let runs: Vec<&[u32]> =
        ids.split(|id| delimiters.contains(id)).filter(|part| part.first().is_some_and(is_square)).collect();
    assert_eq!(runs.iter().map(|run| run.len()).collect::<Vec<_>>(), [4; 3], "2 x 2 squares of 28 x 28 pixels");
    assert!(runs[0] == runs[2] && runs[0] != runs[1]);
    assert_eq!(model.detokenize(&ids).unwrap(), text);
    // A cut picture is a picture, and words around it come back.
    let words = model.tokenize("a").unwrap();
    let cut = [&words, &runs[0][..2], &words].concat();
    assert_eq!(model.detokenize(&cut).unwrap(), "a\u{fffc}a");
    for (text, pictures) in [("none", 1), ("\u{fffc}", 0), ("\u{fffc} \u{fffc}", 1)] {
        let problem = model.tokenize_with_pictures(text, &vec![picture(1); pictures]).unwrap_err().to_string();
        assert!(problem.contains("expected as many"), "{problem}");
    }
    // The tokens of other programs' pictures are words.
    let typed = "<|vision_start|><|image_pad|><|vision_end|>";
    let ids = model.tokenize_with_pictures(typed, &[]).unwrap();
    assert!(!ids.iter().any(is_square) && model.detokenize(&ids).unwrap() == typed);
    // A picture of another size is fitted to whole squares.
    let wide = Picture::new(Tensor::new(vec![9u8; 30 * 130 * 3], [30, 130, 3]).unwrap()).unwrap();
    assert_eq!(model.tokenize_with_pictures("\u{fffc}", &[wide]).unwrap().len(), 2 + 5);
    let narrow = Picture::new(Tensor::new(vec![9u8; 201 * 3], [201, 1, 3]).unwrap()).unwrap();
    assert!(model.tokenize_with_pictures("\u{fffc}", &[narrow]).unwrap_err().to_string().contains("ratio"));
}

#[test]
fn a_check_knows_the_tokens_of_a_picture_without_weights() {
    let directory = checkpoint();
    let options = json!({"model_path": directory.path()});
    let options = parse_options::<PolicyOptions>("model", options.as_object().unwrap()).unwrap();
    let context = BuildContext { headers_only: true, ..BuildContext::new("flex") };
    let checked = open_policy(&options, &context).unwrap();
    let tokens = |model: &CausalLm| model.tokenize_with_pictures("\u{fffc}Where?", &[picture(3)]).unwrap();
    assert_eq!(tokens(&checked), tokens(&open(directory.path(), json!({})).unwrap()));
}

#[test]
fn pictures_are_forgotten_unless_they_were_shown_since_the_previous_call() {
    let directory = checkpoint();
    let mut model = open(directory.path(), json!({})).unwrap();
    let snapshot = model.snapshot().unwrap();
    let shown =
        |model: &dyn LanguageModel, column| model.tokenize_with_pictures("\u{fffc}", &[picture(column)]).unwrap();
    let (first, second) = (shown(&model, 1), shown(snapshot.as_ref(), 2));
    let mut is_known = |ids: &Vec<u32>| model.generate(std::slice::from_ref(ids), &Sampling::greedy(1)).is_ok();
    assert!(is_known(&first) && is_known(&second), "a snapshot shares the pictures");
    snapshot.forget_pictures();
    assert!(is_known(&first) && is_known(&second), "both were shown before");
    shown(snapshot.as_ref(), 2);
    snapshot.forget_pictures();
    assert!(!is_known(&first) && is_known(&second));
    assert_eq!(shown(snapshot.as_ref(), 1), first, "the tokens follow from the content");
    assert!(is_known(&first));
    snapshot.forget_pictures();
    snapshot.forget_pictures();
    assert!(!is_known(&first) && !is_known(&second));
}

/// The log-probabilities of the last `count` tokens of `ids`, as training computes them.
fn evaluated(model: &mut CausalLm, ids: &[u32], count: usize) -> Vec<f32> {
    let length = ids.len();
    let tokens = Tensor::new(ids.iter().map(|id| i64::from(*id)).collect::<Vec<_>>(), [1, length]).unwrap();
    let all = Tensor::new(vec![1u8; length], [1, length]).unwrap();
    let (stats, _) = model.evaluate(&tokens, &all, &all, Adapter::On, Grad::Skip).unwrap();
    let log_probs = stats.log_probs.f32s().unwrap().to_vec();
    // The squares of pictures are not predicted.
    let squares = ids[1..].iter().zip(&log_probs).filter(|(id, _)| is_square(id));
    assert!(squares.clone().count() > 0 && squares.clone().all(|(_, value)| *value == 0.0));
    log_probs[length - 1 - count..].to_vec()
}

#[test]
fn answers_have_the_log_probabilities_that_training_computes() {
    let directory = checkpoint();
    let mut model = open(directory.path(), json!({})).unwrap();
    let values: Vec<f32> = (0..model.parameter_count()).map(|i| 0.1 * (i as f32 * 0.7).sin()).collect();
    model.write_parameters(&values).unwrap();
    let prompt = model.tokenize_with_pictures("\u{fffc}Where?", &[picture(40)]).unwrap();
    let placeholders = ["<|image_pad|>", "<|video_pad|>"].map(|token| model.tokenize(token).unwrap()[0]);
    for sampling in [
        Sampling { temperature: 1.0, seed: 3, ..Sampling::greedy(200) },
        Sampling { temperature: 0.7, top_k: 20, ..Sampling::greedy(50) },
        Sampling::greedy(20),
    ] {
        let made = model.generate(std::slice::from_ref(&prompt), &sampling).unwrap().remove(0);
        assert!(!made.tokens.iter().any(|id| placeholders.contains(id)));
        let expected = evaluated(&mut model, &[&prompt[..], &made.tokens].concat(), made.tokens.len());
        for ((raw, drawn), expected) in made.raw_log_probs.iter().zip(&made.log_probs).zip(&expected) {
            assert!((raw - expected).abs() < 1e-4, "{raw}, {expected}");
            // The distribution that is drawn from lacks the placeholders, as it lacks what top-k removes.
            assert!(sampling.temperature != 1.0 || drawn > raw, "{drawn}, {raw}");
        }
    }
}

#[test]
fn an_adapter_has_the_names_of_transformers_and_is_read_again() {
    let directory = checkpoint();
    let mut model = open(directory.path(), json!({})).unwrap();
    let values: Vec<f32> = (0..model.parameter_count()).map(|i| 0.1 * (i as f32 * 0.3).sin()).collect();
    model.write_parameters(&values).unwrap();
    let mut files = model.export_adapter().unwrap();
    let mut state = files["adapter_model"].clone();
    header::take(&mut state).unwrap();
    let prefix = "base_model.model.model.language_model.layers.";
    assert!(state.keys().all(|name| name.starts_with(prefix)), "{:?}", state.keys().next());
    let mut read = vec![0.0; values.len()];
    let mut other = open(directory.path(), json!({})).unwrap();
    other.import_adapter(&files).unwrap();
    other.read_parameters(&mut read).unwrap();
    assert_eq!(read, values);
    // As `lora_checkpoint`, under the names of present and of older versions.
    for older in [false, true] {
        if older {
            let state = std::mem::take(files.get_mut("adapter_model").unwrap());
            let renamed =
                state.into_iter().map(|(name, tensor)| (name.replace("model.language_model.", "model."), tensor));
            files.insert("adapter_model".into(), renamed.filter(|(name, _)| name != header::KEY).collect());
        }
        let file = directory.path().join("adapter_model.safetensors");
        let mut state = files["adapter_model"].clone();
        let texts = header::take(&mut state).unwrap_or_default();
        save_safetensors(&file, &state, &texts).unwrap();
        let alpha = json!({"peft_type": "LORA", "lora_alpha": 2, "r": 2}).to_string();
        std::fs::write(directory.path().join("adapter_config.json"), alpha).unwrap();
        let from_file = open(directory.path(), json!({"lora_checkpoint": file, "lora_rank": null})).unwrap();
        let mut read = vec![0.0; values.len()];
        from_file.read_parameters(&mut read).unwrap();
        assert_eq!(read, values, "older: {older}");
    }
}

#[test]
fn a_full_checkpoint_is_a_model_of_its_own() {
    let (directory, out) = (checkpoint(), tempfile::tempdir().unwrap());
    let mut model = open(directory.path(), json!({"lora_rank": 0})).unwrap();
    let mut values = vec![0.0; model.parameter_count()];
    model.read_parameters(&mut values).unwrap();
    values.iter_mut().for_each(|value| *value *= 1.01);
    model.write_parameters(&values).unwrap();
    let files = model.export_adapter().unwrap();
    let mut state = files["model"].clone();
    for (name, text) in header::take(&mut state).unwrap() {
        if let Some(file) = name.strip_prefix(header::BESIDE) {
            std::fs::write(out.path().join(file), text).unwrap();
        }
    }
    save_safetensors(out.path().join("model.safetensors"), &state, &Default::default()).unwrap();
    let before = Checkpoint::open(directory.path().join("model.safetensors")).unwrap();
    assert!(before.keys().eq(state.keys().map(String::as_str)), "with the vision tower");
    let patches = &state["visual.patch_embed.proj.weight"];
    assert_eq!(patches.shape(), [64, 3, 2, 14, 14], "the convolution that transformers reads");
    let log_probs = |model: &mut CausalLm| {
        let prompt = model.tokenize_with_pictures("\u{fffc}Where?", &[picture(40)]).unwrap();
        evaluated(model, &prompt, 6)
    };
    let mut exported = open(out.path(), json!({"lora_rank": 0})).unwrap();
    let expected = log_probs(&mut model);
    assert_eq!(log_probs(&mut exported), expected);
    let shards = out.path().join("shards");
    Export::open(out.path()).unwrap().write(&shards, None, 100_000, &mut |_| {}).unwrap();
    assert!(shards.join("preprocessor_config.json").exists() && shards.join("chat_template.jinja").exists());
    let mut of_shards = open(&shards, json!({"lora_rank": 0})).unwrap();
    assert_eq!(log_probs(&mut of_shards), expected, "in shards of the base's f32");
    let mut resumed = open(directory.path(), json!({"lora_rank": 0})).unwrap();
    resumed.import_adapter(&files).unwrap();
    assert_eq!(log_probs(&mut resumed), expected);
    let file = out.path().join("model.safetensors");
    let mut started = open(directory.path(), json!({"lora_rank": null, "lora_checkpoint": file})).unwrap();
    assert_eq!(log_probs(&mut started), expected);
}

#[test]
fn wrong_files_and_bounds_are_named() {
    let directory = checkpoint();
    let refused = |more: Value| open(directory.path(), more).err().unwrap().chain();
    for (more, parts) in [
        (json!({"model_path": "model.gguf"}), ["model.model_path", "causal_lm"]),
        (json!({"model_path": null}), ["model.model_path", "Qwen2-VL"]),
        (json!({"min_pixels": 4000, "max_pixels": 3999}), ["model.min_pixels", "3999"]),
        (json!({"weights_dtype": "int8"}), ["model.weights_dtype", "GGUF"]),
        (json!({"pixels": 1}), ["model.pixels", "_pixels"]),
    ] {
        let problem = refused(more);
        assert!(parts.iter().all(|part| problem.contains(part)), "{problem}");
    }
    // An upper bound alone lowers the file's lower one.
    let model = open(directory.path(), json!({"max_pixels": 1000})).unwrap();
    assert_eq!(model.tokenize_with_pictures("\u{fffc}", &[picture(1)]).unwrap().len(), 3);
    for (file, part) in [
        (json!({"patch_size": 16}), "`patch_size` 14"),
        (json!({"image_mean": [0.5, 0.5, 0.5]}), "`image_mean` [0.48"),
        (json!({"image_std": [0.268_629_54]}), "`image_std` [0.268"),
    ] {
        std::fs::write(directory.path().join("preprocessor_config.json"), file.to_string()).unwrap();
        let problem = refused(json!({}));
        assert!(problem.contains("preprocessor_config.json") && problem.contains(part), "{problem}");
    }
    let rounded = json!({"image_mean": [0.4815, 0.4578, 0.4082], "image_std": [0.2686, 0.2613, 0.2758]});
    std::fs::write(directory.path().join("preprocessor_config.json"), rounded.to_string()).unwrap();
    assert!(open(directory.path(), json!({})).is_ok());
}
