//! Facts of reading: what is dropped, gradients against differences, input that is refused.

use roll_core::{Grad, Medium, Positions, Tensor, VisionLanguageModel};

use super::fixture::Fixture;
use crate::QwenVl;
use crate::patches::Grid;
use crate::positions::{Placed, time};

/// Places whose states the tests read.
fn scored(model: &mut QwenVl, tokens: &[u32], media: &[Medium], wanted: &[usize]) -> Tensor {
    model.read(tokens, media, Positions::Sequential, wanted, Grad::Skip).unwrap().0
}

#[test]
fn tokens_and_media_behind_the_last_wanted_place_change_nothing() {
    for fixture in Fixture::all() {
        let mut model = fixture.open("flex", "f32");
        let text = fixture.texts("image", &model).remove(0);
        let last = text.tokens.len() - 1;
        let alone = scored(&mut model, &text.tokens, &text.media, &[last, 2]);
        // The same text, with another copy of itself behind it.
        let twice = [text.tokens.clone(), text.tokens.clone()].concat();
        let media = [text.media.clone(), text.media.clone()].concat();
        let (states, pullback) = model.read(&twice, &media, Positions::Sequential, &[last, 2], Grad::Record).unwrap();
        assert_eq!(states.f32s().unwrap(), alone.f32s().unwrap());
        let ones = Tensor::full([2, model.facts().width], 1.0);
        let gradient = pullback.unwrap().pull(&ones).unwrap();
        let (first, second) = gradient.f32s().unwrap().split_at(text.media[0].pixels.len());
        assert!(first.iter().any(|x| *x != 0.0) && second.iter().all(|x| *x == 0.0));
    }
}

#[test]
fn a_medium_that_is_read_in_part_has_the_gradient_of_its_read_part() {
    for fixture in Fixture::all() {
        let mut model = fixture.open("flex", "f32");
        let text = fixture.texts("video", &model).remove(0);
        let video_token = model.facts().video_token;
        // A place inside the clip.
        let place = text.tokens.iter().position(|id| *id == video_token).unwrap() + 3;
        assert_eq!(text.tokens[place], video_token);
        check_slope(&mut model, &text.tokens, &text.media, place, Positions::Multimodal);
    }
}

#[test]
fn gradients_of_sequential_positions_match_differences() {
    for fixture in Fixture::all() {
        let mut model = fixture.open("flex", "f32");
        for case in fixture.cases() {
            for text in fixture.texts(&case, &model) {
                check_slope(&mut model, &text.tokens, &text.media, text.tokens.len() - 1, Positions::Sequential);
            }
        }
    }
}

/// Compares the gradient of the sum of the state at `place` with a difference along the gradient.
fn check_slope(model: &mut QwenVl, tokens: &[u32], media: &[Medium], place: usize, positions: Positions) {
    let width = model.facts().width;
    // Weights of the channels: the sum of a normalised state alone has little slope.
    let weights: Vec<f32> = (0..width).map(|i| (i as f32 * 1.3).sin()).collect();
    let (_, pullback) = model.read(tokens, media, positions, &[place], Grad::Record).unwrap();
    let gradient = pullback.unwrap().pull(&Tensor::new(weights.clone(), [1, width]).unwrap()).unwrap();
    let gradient = gradient.f32s().unwrap();
    let norm = gradient.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    let mut value = |step: f64| {
        let mut at = 0;
        let moved = media.iter().map(|medium| {
            let pixels = medium.pixels.f32s().unwrap().iter().map(|x| {
                at += 1;
                x + (step * f64::from(gradient[at - 1]) / norm) as f32
            });
            let pixels = Tensor::new(pixels.collect(), medium.pixels.shape()).unwrap();
            Medium { pixels, seconds_per_step: medium.seconds_per_step }
        });
        let moved: Vec<Medium> = moved.collect();
        let (states, _) = model.read(tokens, &moved, positions, &[place], Grad::Skip).unwrap();
        states.f32s().unwrap().iter().zip(&weights).map(|(x, w)| f64::from(x * w)).sum::<f64>()
    };
    // Richardson's extrapolation of two differences: their curvature cancels.
    let mut difference = |step: f64| (value(step) - value(-step)) / (2.0 * step);
    let slope = (4.0 * difference(4e-3) - difference(8e-3)) / 3.0;
    assert!((slope - norm).abs() < 1e-2 * norm, "{slope} by differences, {norm} by the pullback");
}

#[test]
fn texts_that_do_not_match_their_media_are_refused() {
    let fixture = Fixture::named("qwen2vl_tiny");
    let mut model = fixture.open("flex", "f32");
    let text = fixture.texts("image", &model).remove(0);
    let (tokens, media) = (&text.tokens, &text.media);
    let image = model.facts().image_token;
    let mut refused = |tokens: &[u32], media: &[Medium], wanted: &[usize], part: &str| {
        let error = model.read(tokens, media, Positions::Multimodal, wanted, Grad::Skip).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    };
    refused(tokens, &[], &[3], "belongs to no medium");
    refused(tokens, &[media[0].clone(), media[0].clone()], &[3], "placeholders for 1");
    let without_one: Vec<u32> = {
        let at = tokens.iter().position(|id| *id == image).unwrap();
        tokens[..at].iter().chain(&tokens[at + 1..]).copied().collect()
    };
    refused(&without_one, media, &[3], "placeholders in a row");
    refused(tokens, media, &[], "no state is wanted");
    refused(tokens, media, &[tokens.len()], "outside of a text");
    let odd = Medium::new(Tensor::zeros([3, 3, 16, 16]));
    refused(tokens, &[odd], &[3], "multiple of 2");
    refused(&[9999], &[], &[0], "outside the vocabulary");
    let timeless = Medium { seconds_per_step: f64::NAN, ..media[0].clone() };
    refused(tokens, &[timeless], &[3], "s per step");
}

#[test]
fn times_of_a_clip_follow_the_seconds_of_its_steps() {
    let fixture = Fixture::named("qwen25vl_tiny");
    let rate = fixture.open("flex", "f32").config().vision.tokens_per_second;
    let file = std::fs::read(fixture.directory.join("positions.json")).unwrap();
    for case in serde_json::from_slice::<Vec<serde_json::Value>>(&file).unwrap() {
        let expected: Vec<usize> = serde_json::from_value(case["temporal_formula"].clone()).unwrap();
        let grid = Grid { steps: expected.len(), rows: 2, columns: 2 };
        let seconds_per_step = case["second_per_grid"].as_f64().unwrap();
        let clip = Placed { tokens: 0..expected.len(), grid, is_clip: true, seconds_per_step };
        let found: Vec<usize> = (0..expected.len()).map(|step| time(rate, &clip, step)).collect();
        assert_eq!(found, expected, "{seconds_per_step} s");
        let picture = Placed { is_clip: false, ..clip };
        assert_eq!(time(rate, &picture, 1), 0);
    }
}
