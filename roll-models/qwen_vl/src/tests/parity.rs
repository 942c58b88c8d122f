//! Every number of the fixtures, on every backend, in f32 and bf16.

use std::collections::BTreeMap;

use roll_core::{Grad, Positions, Tensor, VisionLanguageModel, split_media};

use super::fixture::{Fixture, Text, settings, token_order};
use crate::QwenVl;
use crate::patches::Grid;
use crate::positions;

#[test]
fn features_states_logits_and_gradients_match_transformers() {
    for fixture in Fixture::all() {
        for (backend, dtype) in settings() {
            let mut model = fixture.open(backend, dtype);
            for case in fixture.cases() {
                compare_case(&fixture, &case, &mut model, &format!("{backend}-{dtype}"));
            }
        }
    }
}

/// The results of a case, as the fixture lays them out.
#[derive(Default)]
struct Results {
    /// The values of all rows, one after another. Keys are names without the case.
    values: BTreeMap<String, Vec<f32>>,
    /// The gradients. Keys are names of tensors of patches.
    gradients: BTreeMap<String, Vec<f32>>,
}

fn compare_case(fixture: &Fixture, case: &str, model: &mut QwenVl, setting: &str) {
    let mut results = Results::default();
    for text in fixture.texts(case, model) {
        features(case, &text, model, &mut results);
        states_and_gradients(fixture, case, &text, model, &mut results);
        exact_positions(fixture, case, &text, model);
    }
    for (name, found) in results.values {
        let name = format!("{case}.{name}");
        fixture.compare(&name, &found, fixture.outputs[&name].f32s().unwrap(), setting);
    }
    let mut compared = 0;
    for (name, found) in results.gradients {
        // Not every case has every gradient.
        let Some(expected) = fixture.outputs.get(&name) else { continue };
        fixture.compare(&name, &found, expected.f32s().unwrap(), setting);
        compared += 1;
    }
    assert!(compared > 0, "{case} has no gradient");
}

fn features(case: &str, text: &Text, model: &QwenVl, results: &mut Results) {
    for (medium, (source, _)) in text.media.iter().zip(&text.sources) {
        let kind = if source.ends_with("videos") { "video" } else { "image" };
        let found = model.features(std::slice::from_ref(medium)).unwrap().f32s().unwrap().to_vec();
        results.values.entry(format!("{kind}.features")).or_default().extend(found);
    }
    // All at once are the same.
    let one_by_one = |medium| model.features(std::slice::from_ref(medium)).unwrap().f32s().unwrap().to_vec();
    let alone: Vec<f32> = text.media.iter().flat_map(one_by_one).collect();
    let together = model.features(&text.media).unwrap();
    let error = together.f32s().unwrap().iter().zip(&alone).fold(0f32, |error, (a, b)| error.max((a - b).abs()));
    assert!(error < 0.05, "{case}: {error}");
}

fn exact_positions(fixture: &Fixture, case: &str, text: &Text, model: &QwenVl) {
    let placed = positions::place(model.facts(), &text.tokens, &text.media).unwrap();
    let found = positions::positions(model.config(), text.tokens.len(), &placed, Positions::Multimodal);
    let expected = &fixture.outputs[&format!("{case}.position_ids")];
    let (ids, shape) = (expected.as_slice::<i64>().unwrap(), expected.shape());
    let (rows, columns) = (shape[1], shape[2]);
    for (token, place) in found.iter().enumerate() {
        for axis in 0..3 {
            let at = (axis * rows + text.row) * columns + text.padding + token;
            assert_eq!(place[axis] as i64, ids[at], "{case}: axis {axis} of token {token} of row {}", text.row);
        }
    }
}

/// Softmax of a row of logits in f64.
fn softmax(logits: &[f64]) -> Vec<f64> {
    let largest = logits.iter().fold(f64::NEG_INFINITY, |a, b| a.max(*b));
    let exponentials: Vec<f64> = logits.iter().map(|x| (x - largest).exp()).collect();
    let sum: f64 = exponentials.iter().sum();
    exponentials.into_iter().map(|x| x / sum).collect()
}

fn states_and_gradients(fixture: &Fixture, case: &str, text: &Text, model: &mut QwenVl, results: &mut Results) {
    let (count, width, vocabulary) = (text.tokens.len(), model.facts().width, model.facts().vocabulary);
    let all: Vec<u32> = (0..vocabulary as u32).collect();
    let head: Vec<f64> = model.head_rows(&all).unwrap().f32s().unwrap().iter().map(|x| f64::from(*x)).collect();
    let row = |id: usize| &head[id * width..(id + 1) * width];
    let wanted: Vec<usize> = (0..count).collect();
    let mut read = || model.read(&text.tokens, &text.media, Positions::Multimodal, &wanted, Grad::Record).unwrap();
    let (states, pull_answer) = read();
    let (_, pull_judge) = read();
    let states: Vec<f64> = states.f32s().unwrap().iter().map(|x| f64::from(*x)).collect();
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let logits: Vec<Vec<f64>> =
        states.chunks(width).map(|state| (0..vocabulary).map(|id| dot(state, row(id))).collect()).collect();

    let mut add = |name: &str, values: Vec<f64>, padded: usize| {
        let all = results.values.entry(name.into()).or_default();
        all.extend(std::iter::repeat_n(0f32, padded));
        all.extend(values.into_iter().map(|x| x as f32));
    };
    add("hidden_states", states.clone(), text.padding * width);
    add("logits", logits.concat(), text.padding * vocabulary);
    let [yes, no] = ["yes", "no"].map(|key| fixture.json["config"][key].as_u64().unwrap() as usize);
    let asked = count - text.answer - 1;
    let gap = logits[asked][yes] - logits[asked][no];
    add("yes_minus_no", vec![gap], 0);
    add("p_yes_of_two", vec![1.0 / (1.0 + (-gap).exp())], 0);
    add("p_yes_of_all", vec![softmax(&logits[asked])[yes]], 0);
    let predictions: Vec<usize> = (asked..count - 1).collect();
    let log_probs: Vec<f64> =
        predictions.iter().map(|at| softmax(&logits[*at])[text.tokens[at + 1] as usize].ln()).collect();
    add("answer_log_prob", vec![log_probs.iter().sum()], 0);
    add("answer_token_log_probs", log_probs, 0);

    // d log p(token) / d state = W_token - sum_v p_v W_v.
    let mut d_answer = vec![0f32; count * width];
    for at in predictions {
        let p = softmax(&logits[at]);
        for channel in 0..width {
            let mean: f64 = (0..vocabulary).map(|id| p[id] * row(id)[channel]).sum();
            d_answer[at * width + channel] = (row(text.tokens[at + 1] as usize)[channel] - mean) as f32;
        }
    }
    let mut d_judge = vec![0f32; count * width];
    for channel in 0..width {
        let slope = 1.0 - 1.0 / (1.0 + (-gap).exp());
        d_judge[asked * width + channel] = (slope * (row(yes)[channel] - row(no)[channel])) as f32;
    }
    for (objective, cotangent, pullback) in [("answer", d_answer, pull_answer), ("judge", d_judge, pull_judge)] {
        let flat = pullback.unwrap().pull(&Tensor::new(cotangent, [count, width]).unwrap()).unwrap();
        let parts = split_media(&flat, &text.media).unwrap();
        for ((d_pixels, medium), (source, _)) in parts.into_iter().zip(&text.media).zip(&text.sources) {
            let grid = Grid::of(medium.pixels.shape(), model.facts()).unwrap();
            let vision = &model.config().vision;
            let d_medium = roll_core::Medium::new(d_pixels);
            let rows = token_order(vision, grid).gather(vision, &[&d_medium]).unwrap();
            let tensor = source.strip_prefix(&format!("{case}.")).unwrap();
            results.gradients.entry(format!("{case}.grad.{objective}.{tensor}")).or_default().extend(rows);
        }
    }
}
