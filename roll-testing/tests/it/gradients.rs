//! Pullbacks of the test doubles against central differences.

use roll_core::{Adapter, Conditioning, DiffusionModel, Grad, LanguageModel, Model, RewardScorer, Score, Tensor};
use roll_core::{Timestep, Video};
use roll_testing::diffusion::{SHAPE, values};
use roll_testing::{Bigram, MockDiffusion, Sines, sample};

const STEP: f32 = 1e-2;

/// The central difference of `of` along each of its `values`.
fn slopes(values: &[f32], mut of: impl FnMut(&[f32]) -> f64) -> Vec<f64> {
    let mut moved = values.to_vec();
    (0..values.len())
        .map(|i| {
            let mut at = |step: f32| {
                moved[i] = values[i] + step;
                of(&moved)
            };
            let slope = (at(STEP) - at(-STEP)) / f64::from(2.0 * STEP);
            moved[i] = values[i];
            slope
        })
        .collect()
}

fn assert_near(found: &[f32], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0f64, |most, x| most.max(x.abs()));
    assert!(largest > 0.0);
    for (found, expected) in found.iter().zip(expected) {
        assert!((f64::from(*found) - expected).abs() < 2e-3 * largest, "{found} {expected}");
    }
}

fn dot(a: &Tensor, b: &[f32]) -> f64 {
    a.f32s().unwrap().iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

fn conditioning() -> Conditioning {
    let context = Tensor::full([1, 1], 3.0);
    Conditioning { context, channels: None, image_tokens: None, first_frame: None, latent_shape: SHAPE }
}

#[test]
fn velocity_gradients_match_finite_differences() {
    let (x, cotangent) = (values(7, 8), values(8, 8));
    let mut model = MockDiffusion::new();
    let adapter = model.adapter.clone();
    let mut velocity = |x: &[f32], adapter: &[f32], grad| {
        model.write_parameters(adapter).unwrap();
        let x = Tensor::new(x.to_vec(), SHAPE).unwrap();
        model.velocity(&x, Timestep(700.0), &conditioning(), Adapter::On, grad).unwrap()
    };
    let (_, pullback) = velocity(&x, &adapter, Grad::Record);
    let d_x = pullback.unwrap().pull(&Tensor::new(cotangent.clone(), SHAPE).unwrap()).unwrap();
    assert_near(d_x.f32s().unwrap(), &slopes(&x, |x| dot(&velocity(x, &adapter, Grad::Skip).0, &cotangent)));
    let expected = slopes(&adapter, |adapter| dot(&velocity(&x, adapter, Grad::Skip).0, &cotangent));
    let mut gradient = vec![0.0; adapter.len()];
    model.take_gradients(&mut gradient).unwrap();
    assert_near(&gradient, &expected);
}

#[test]
fn score_gradients_match_finite_differences() {
    let mut reward = Sines::new();
    let video = sample(0, "").clip().unwrap().clone();
    let target = reward.prepare(&video).unwrap();
    let shape = video.frames().shape().to_vec();
    let mut score = |frames: &[f32], grad| {
        let video = Video::new(Tensor::new(frames.to_vec(), shape.clone()).unwrap(), 8.0).unwrap();
        match reward.score(&video, "", &target, grad).unwrap() {
            (Score::Value { value, .. }, pullback) => (value, pullback),
            (missing, _) => panic!("{missing:?}"),
        }
    };
    let frames = video.frames().f32s().unwrap();
    let gradient = score(frames, Grad::Record).1.unwrap().pull(&Tensor::scalar(1.0)).unwrap();
    assert_near(gradient.f32s().unwrap(), &slopes(frames, |frames| score(frames, Grad::Skip).0));
}

#[test]
fn token_gradients_match_finite_differences() {
    let mut model = Bigram::of("ab");
    let tokens: Vec<i64> = "ab$aab".bytes().map(i64::from).collect();
    let shape = [2, 3];
    let cotangent = values(9, 8);
    let mut stats = |logits: &[f32]| {
        model.write_parameters(logits).unwrap();
        let mask = Tensor::new(vec![1u8; 6], shape).unwrap();
        let tokens = Tensor::new(tokens.clone(), shape).unwrap();
        model.evaluate(&tokens, &mask, &mask, Adapter::On, Grad::Record).unwrap()
    };
    // The logits of the three characters; all others have a probability of about zero.
    let mut logits = Bigram::of("ab").logits;
    let places: Vec<usize> =
        ["a", "b", "$"].iter().flat_map(|from| ["a", "b", "$"].map(|to| place(from, to))).collect();
    places.iter().zip(values(10, 9)).for_each(|(place, value)| logits[*place] = value);

    let (_, pullback) = stats(&logits);
    pullback.unwrap().pull(&Tensor::new(cotangent.clone(), [8]).unwrap()).unwrap();
    let some: Vec<f32> = places.iter().map(|place| logits[*place]).collect();
    let expected = slopes(&some, |some| {
        let mut moved = logits.clone();
        places.iter().zip(some).for_each(|(place, value)| moved[*place] = *value);
        let (stats, _) = stats(&moved);
        dot(&stats.log_probs, &cotangent[..4]) + dot(&stats.entropy, &cotangent[4..])
    });
    let mut gradient = vec![0.0; logits.len()];
    model.take_gradients(&mut gradient).unwrap();
    assert_near(&places.iter().map(|place| gradient[*place]).collect::<Vec<_>>(), &expected);
}

/// Index of the logit of `to` after `from`.
fn place(from: &str, to: &str) -> usize {
    usize::from(from.as_bytes()[0]) * 128 + usize::from(to.as_bytes()[0])
}
