//! The same question to a service and to a network in this process: the service answers from the same network's logits.

use roll_core::{Component, Positions, Tensor, open_vision_language};

use super::tests::{FakeService, Reply, reply};
use super::*;
use crate::vision_language::end_to_end::judging;
use crate::vision_language::parity::Fixture;
use crate::vision_language::{DEFAULT_SYSTEM, PixelLimits, Pixels, Placeholder, chat_tokens};

/// A clip whose values are those of 8-bit pictures, so a PNG has them without loss.
fn clip() -> Video {
    let [frames, height, width] = [5, 21, 18];
    let values = (0..frames * 3 * height * width).map(|i| (i * 7919 % 256) as f32 / 127.5 - 1.0).collect();
    Video::new(Tensor::new(values, [frames, 3, height, width]).unwrap(), 8.0).unwrap()
}

/// What a service does with a request: decodes the pictures, builds the chat of the model, and lists the tokens that may
/// follow with their probabilities. A list of twenty may lack the words, because the network is random; this one is whole.
fn serve(network: &Component, limits: PixelLimits, request: &Json) -> Reply {
    let mut network = open_vision_language("model", network, &BuildContext::new("flex")).unwrap();
    let (mut media, mut text) = (Vec::new(), String::new());
    for part in request["messages"][0]["content"].as_array().unwrap() {
        match part["image_url"]["url"].as_str() {
            Some(url) => {
                let pixels = Pixels::new(&picture(url), vec![0], limits, network.facts()).unwrap();
                media.push(pixels.medium(1.0).unwrap());
            }
            None => text += part["text"].as_str().unwrap(),
        }
    }
    let counts: Vec<usize> =
        media.iter().map(|medium| network.facts().tokens_of(medium.pixels.shape()).unwrap()).collect();
    let tokens = chat_tokens(network.as_ref(), DEFAULT_SYSTEM, Placeholder::Image, &counts, &text).unwrap();
    let last = tokens.len() - 1;
    let state = network.read(&tokens, &media, Positions::Multimodal, &[last], Grad::Skip).unwrap().0;
    let vocabulary: Vec<u32> = (0..network.facts().vocabulary as u32).collect();
    let (rows, state) = (network.head_rows(&vocabulary).unwrap(), state.f32s().unwrap().to_vec());
    let dot = |row: &[f32]| row.iter().zip(&state).map(|(w, s)| f64::from(*w) * f64::from(*s)).sum::<f64>().exp();
    let weights: Vec<f64> = rows.f32s().unwrap().chunks(state.len()).map(dot).collect();
    let total: f64 = weights.iter().sum();
    let names: Vec<String> = vocabulary.iter().map(|id| network.detokenize(&[*id]).unwrap_or_default()).collect();
    let top: Vec<(&str, f64)> = names.iter().zip(&weights).map(|(name, w)| (name.as_str(), w / total)).collect();
    reply("yes", &top)
}

/// The picture of a data URL, as a video of one frame.
fn picture(url: &str) -> Video {
    let png = STANDARD.decode(url.split(',').nth(1).unwrap()).unwrap();
    let mut reader = png::Decoder::new(std::io::Cursor::new(png)).read_info().unwrap();
    let mut rgb = vec![0; reader.output_buffer_size().unwrap()];
    let size = reader.next_frame(&mut rgb).unwrap();
    let (height, width) = (size.height as usize, size.width as usize);
    let planes = (0..3 * height * width).map(|i| f32::from(rgb[i % (height * width) * 3 + i / (height * width)]));
    let values = planes.map(|byte| byte / 127.5 - 1.0).collect();
    Video::new(Tensor::new(values, [1, 3, height, width]).unwrap(), 1.0).unwrap()
}

#[test]
fn a_service_and_a_network_inside_give_one_network_the_same_question_and_score() {
    let fixture = Fixture::open("hpsv3_tiny");
    let (network, _directory) = judging(&fixture);
    let limits = fixture.limits();
    let served = network.clone();
    let service = FakeService::start(move |_, request| serve(&served, limits, request));
    let questions = Texts::Several(vec!["Is it {prompt}?".into(), "Is it sharp?".into()]);
    let shared = JudgeConfig { questions, frames: 2, ..Default::default() };
    let over_http =
        JudgeConfig { url: Texts::One(service.url()), model: "eyes".into(), cache_dir: None, ..shared.clone() };
    let inside = JudgeConfig { local: Some(network), max_pixels: limits.max, ..shared };
    let context = BuildContext::new("flex");
    let mut over_http = Judge::new(over_http, &context).unwrap();
    let mut inside = LocalJudge::load(inside, &context).unwrap();
    let mut scores = Vec::new();
    for judge in [&mut over_http as &mut dyn RewardScorer, &mut inside] {
        let (score, _) = judge.score(&clip(), "a boat", &Target::default(), Grad::Skip).unwrap();
        let Score::Value { value, details } = score else { panic!("{score:?}") };
        scores.push([value, details["question_1"], details["question_2"]]);
    }
    assert_eq!(service.count(), 2);
    assert_ne!(scores[0][1], scores[0][2], "the two questions have scores of their own");
    for (service, inside) in scores[0].iter().zip(scores[1]) {
        assert!((service - inside).abs() < 1e-6, "{scores:?}");
    }
}
