//! Media as tokens of the language model: the cache of keys and values, statistics of tokens, gradients of LoRAs.

use std::sync::Arc;

use roll_causal_lm::{CausalLm, PictureTokens};
use roll_core::{
    Adapter, Grad, LanguageModel, Medium, Model, Noise, Positions, Sampling, StateDict, Tensor, VisionLanguageModel,
};
use roll_network::trainable::Trainable;
use roll_network::weights::Checkpoint;

use super::fixture::{Fixture, Text};
use crate::QwenVl;
use crate::pictures::Pictures;

/// The language model of `fixture` with a LoRA, the network that reads the same pictures, and their table.
fn policy(fixture: &Fixture) -> (CausalLm, QwenVl, Arc<Pictures>) {
    let network = fixture.open("flex", "f32");
    let pictures = Arc::new(network.pictures());
    let all = Checkpoint::open(fixture.directory.join("model.safetensors")).unwrap().all().unwrap();
    let state: StateDict = all.into_iter().filter(|(name, _)| !name.starts_with("visual.")).collect();
    let config = network.config().text.clone();
    let device = roll_backends::device("flex").unwrap();
    let language = roll_causal_lm::Network::new(config, &state, burn_tensor::DType::F32, &device).unwrap();
    let mut language = language.with_pictures(pictures.clone());
    let lora = Trainable::Lora { rank: 2, alpha: 2.0, targets: vec!["q_proj".into(), "down_proj".into()] };
    language.add_trainable(&lora, &Noise::new(1), &state).unwrap();
    (CausalLm::new(language, None, None).unwrap(), network, pictures)
}

/// The same medium with other pixels.
fn negative(medium: &Medium) -> Medium {
    let pixels = medium.pixels.f32s().unwrap().iter().map(|value| -value).collect::<Vec<f32>>();
    Medium { pixels: Tensor::new(pixels, medium.pixels.shape()).unwrap(), ..medium.clone() }
}

fn texts(fixture: &Fixture, network: &QwenVl) -> Vec<Text> {
    fixture.cases().iter().flat_map(|case| fixture.texts(case, network)).collect()
}

#[test]
fn two_pictures_never_share_keys_and_values() {
    for fixture in Fixture::all() {
        let (mut policy, network, pictures) = policy(&fixture);
        let text = fixture.texts("image", &network).remove(0);
        let other: Vec<Medium> = text.media.iter().map(negative).collect();
        let mut prompts = [&text.media, &other].map(|media| pictures.with_media(&text.tokens, media).unwrap());
        let sampling = |seed| Sampling { temperature: 1.0, seed, ..Sampling::greedy(4) };
        let first = policy.generate(&prompts[..1], &sampling(1)).unwrap();
        // The second turn of the first picture, whose prefix is known, and of the other, whose prefix is not.
        prompts.iter_mut().for_each(|prompt| prompt.extend(first[0].tokens.iter().chain(&[1, 2])));
        let continued = policy.generate(&prompts, &sampling(2)).unwrap();
        let anew = self::policy(&fixture).0;
        let mut anew =
            CausalLm::new(anew.network().snapshot().unwrap().with_pictures(pictures.clone()), None, None).unwrap();
        for (continued, anew) in continued.iter().zip(anew.generate(&prompts, &sampling(2)).unwrap()) {
            assert_eq!(continued.tokens, anew.tokens);
            for (a, b) in continued.log_probs.iter().zip(&anew.log_probs) {
                assert!((a - b).abs() < 1e-5, "{a}, {b}");
            }
        }
        assert_ne!(continued[0].log_probs, continued[1].log_probs, "the picture matters");
    }
}

#[test]
fn answers_with_a_cache_are_those_of_reading_the_text_again_for_each_token() {
    for fixture in Fixture::all() {
        let (mut policy, mut model, pictures) = policy(&fixture);
        let vocabulary: Vec<u32> = (0..model.facts().vocabulary as u32).collect();
        let head = model.head_rows(&vocabulary).unwrap();
        let placeholders = [model.facts().image_token, model.facts().video_token];
        for text in texts(&fixture, &model) {
            let prompt = pictures.with_media(&text.tokens, &text.media).unwrap();
            let answer = policy.generate(&[prompt], &Sampling::greedy(6)).unwrap().remove(0).tokens;
            assert_eq!(answer.len(), 6);
            let mut read = text.tokens.clone();
            for drawn in answer {
                let (state, _) =
                    model.read(&read, &text.media, Positions::Multimodal, &[read.len() - 1], Grad::Skip).unwrap();
                let state = state.f32s().unwrap();
                let logit = |id: &u32| {
                    let row = &head.f32s().unwrap()[*id as usize * state.len()..][..state.len()];
                    row.iter().zip(state).map(|(w, s)| w * s).sum::<f32>()
                };
                let words = vocabulary.iter().filter(|id| !placeholders.contains(id));
                let likeliest = words.max_by(|a, b| logit(a).total_cmp(&logit(b))).unwrap();
                assert_eq!(drawn, *likeliest, "after {} tokens", read.len());
                read.push(drawn);
            }
        }
    }
}

#[test]
fn log_probabilities_of_a_batch_are_those_of_the_reference() {
    for fixture in Fixture::all() {
        let (mut policy, network, pictures) = policy(&fixture);
        for case in fixture.cases() {
            let texts = fixture.texts(&case, &network);
            let width = texts.iter().map(|text| text.tokens.len()).max().unwrap();
            let (mut ids, mut mask, mut wanted) = (Vec::new(), Vec::new(), Vec::new());
            for text in &texts {
                let padding = width - text.tokens.len();
                let row = pictures.with_media(&text.tokens, &text.media).unwrap();
                ids.extend(std::iter::repeat_n(0, padding).chain(row.into_iter().map(i64::from)));
                mask.extend((0..width).map(|column| u8::from(column >= padding)));
                let answer = fixture.inputs[&format!("{case}.answer")].as_slice::<i64>().unwrap()[text.row] as usize;
                wanted.extend((0..width).map(|column| u8::from(column >= width - answer)));
            }
            let shape = [texts.len(), width];
            let tensor = |values: &Vec<u8>| Tensor::new(values.clone(), shape).unwrap();
            let ids = Tensor::new(ids, shape).unwrap();
            let (stats, _) = policy.evaluate(&ids, &tensor(&mask), &tensor(&wanted), Adapter::Off, Grad::Skip).unwrap();
            let found = stats.log_probs.f32s().unwrap();
            let places = (0..wanted.len()).filter(|place| wanted[*place] != 0);
            let found: Vec<f32> = places.map(|place| found[place - place / width - 1]).collect();
            let expected = fixture.outputs[&format!("{case}.answer_token_log_probs")].f32s().unwrap();
            assert_eq!(found.len(), expected.len(), "{case}");
            for (found, expected) in found.iter().zip(expected) {
                assert!((found - expected).abs() < 1e-4, "{case}: {found}, expected {expected}");
            }
        }
    }
}

#[test]
fn gradients_of_a_lora_with_pictures_match_differences() {
    for fixture in Fixture::all() {
        let (mut policy, network, pictures) = policy(&fixture);
        let text = fixture.texts("image", &network).remove(0);
        let row = pictures.with_media(&text.tokens, &text.media).unwrap();
        let shape = [1, row.len()];
        let ids = Tensor::new(row.iter().map(|id| i64::from(*id)).collect::<Vec<_>>(), shape).unwrap();
        let mask = Tensor::new(vec![1u8; row.len()], shape).unwrap();
        let after_media = text.tokens.len() - 3;
        let wanted =
            Tensor::new((0..row.len()).map(|at| u8::from(at >= after_media)).collect::<Vec<_>>(), shape).unwrap();
        let count = policy.parameter_count();
        let start: Vec<f32> = (0..count).map(|i| 0.1 * (i as f32 * 0.7).sin()).collect();
        policy.write_parameters(&start).unwrap();
        let (_, pullback) = policy.evaluate(&ids, &mask, &wanted, Adapter::On, Grad::Record).unwrap();
        pullback.unwrap().pull(&Tensor::full([2, 1, row.len() - 1], 1.0)).unwrap();
        let mut gradient = vec![0.0; count];
        policy.take_gradients(&mut gradient).unwrap();
        let norm = gradient.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
        let mut value = |step: f64| {
            let moved = start.iter().zip(&gradient).map(|(x, g)| x + (step * f64::from(*g) / norm) as f32);
            policy.write_parameters(&moved.collect::<Vec<_>>()).unwrap();
            let (stats, _) = policy.evaluate(&ids, &mask, &wanted, Adapter::On, Grad::Skip).unwrap();
            let values = [stats.log_probs, stats.entropy];
            values.iter().flat_map(|all| all.f32s().unwrap().to_vec()).map(f64::from).sum::<f64>()
        };
        let mut difference = |step: f64| (value(step) - value(-step)) / (2.0 * step);
        let slope = (4.0 * difference(1e-2) - difference(2e-2)) / 3.0;
        assert!((slope - norm).abs() < 1e-2 * norm, "{slope} by differences, {norm} by the pullback");
    }
}

#[test]
fn unknown_and_incomplete_pictures_are_refused() {
    let fixture = Fixture::named("qwen2vl_tiny");
    let (mut policy, network, pictures) = policy(&fixture);
    let text = fixture.texts("image", &network).remove(0);
    let row = pictures.with_media(&text.tokens, &text.media).unwrap();
    let first = row.iter().position(|id| *id >= roll_core::FIRST_PICTURE_ID).unwrap();
    let mut refused =
        |prompt: &[u32]| policy.generate(&[prompt.to_vec()], &Sampling::greedy(1)).unwrap_err().to_string();
    assert!(refused(&row[..first + 1]).contains("does not know"));
    pictures.forget();
    pictures.forget();
    assert!(refused(&row).contains("does not know"));
}
