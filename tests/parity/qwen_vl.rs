//! Vision-language networks: features, states, logits, answers, and gradients at the pixels, of Qwen2-VL and Qwen2.5-VL.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use burn_tensor::DType;
use roll_causal_lm::{CausalLm, Network};
use roll_core::{
    BuildContext, Grad, LanguageModel, Medium, Positions, Sampling, StateDict, Tensor, VisionLanguageModel, split_media,
};
use roll_network::precision::{ComputeDType, WeightsDType};
use roll_qwen_vl::{QwenVl, QwenVlOptions};
use serde::Deserialize;

use crate::case::{Case, Outcome, Report};

#[derive(Deserialize)]
struct Config {
    yes: usize,
    no: usize,
    /// The names of the batches.
    grids: BTreeMap<String, serde_json::Value>,
}

/// Tensors of the reference that no interface returns.
const INSIDE: [&str; 5] = ["patch_embed", "block0", "last_block", "rotary_angles", "layer0"];

pub fn run(case: &Case) -> Outcome<Report> {
    let config: Config = case.config()?;
    let mut report = case.expected("outputs.safetensors")?;
    report.widen_few(case);
    let inputs = case.tensors("inputs.safetensors")?;
    let mut model = roll_qwen_vl::open("model", &options(case), &BuildContext::new(case.setting.backend))?;
    for name in config.grids.keys() {
        let mut results = Results::default();
        for (row, text) in texts(name, &inputs, &model)?.into_iter().enumerate() {
            results.add(name, &config, &text, &mut model)?;
            if !case.setting.is_narrow() {
                check_slope(&mut report, &config, &text, &mut model)?;
                check_answers(&mut report, case, name, row, &text, &model)?;
            }
        }
        results.compare(case, &mut report)?;
    }
    for name in report.names() {
        match name.rsplit('.').next() {
            Some(part) if INSIDE.contains(&part) => report.leave_out(&name, "inside the network"),
            Some("position_ids" | "rope_deltas") => report.leave_out(&name, "the model computes positions itself"),
            _ => (),
        }
    }
    Ok(report)
}

/// Options of the network in the case's dtype.
fn options(case: &Case) -> QwenVlOptions {
    let (weights_dtype, compute_dtype) = match case.setting.is_narrow() {
        true => (WeightsDType::Bf16, ComputeDType::Bf16),
        false => (WeightsDType::F32, ComputeDType::F32),
    };
    let (model_path, config_path) = (case.dir.join("model.safetensors"), case.dir.join("hf_config.json"));
    QwenVlOptions {
        model_path: Some(model_path),
        config_path: Some(config_path),
        weights_dtype,
        compute_dtype,
        ..QwenVlOptions::default()
    }
}

/// A row of a batch, without its padding.
struct Text {
    tokens: Vec<u32>,
    media: Vec<Medium>,
    /// For each medium: the tensor of the inputs that holds its patches, and the pixel of each of their values.
    sources: Vec<(String, Vec<usize>)>,
    /// Number of padding tokens on the left.
    padding: usize,
    /// The tokens of the answer.
    answer: Range<usize>,
}

/// The texts of a batch.
fn texts(batch: &str, inputs: &StateDict, model: &QwenVl) -> Outcome<Vec<Text>> {
    let integers =
        |name: &str| Ok::<_, roll_core::Error>(inputs[&format!("{batch}.{name}")].as_slice::<i64>()?.to_vec());
    let (ids, mask, answers) = (integers("input_ids")?, integers("attention_mask")?, integers("answer")?);
    let columns = ids.len() / answers.len();
    let facts = model.facts();
    // Number and first row of the next picture, and of the next clip.
    let mut next = [(0, 0), (0, 0)];
    let mut texts = Vec::new();
    for ((ids, mask), answer) in ids.chunks(columns).zip(mask.chunks(columns)).zip(&answers) {
        let padding = mask.iter().filter(|kept| **kept == 0).count();
        let tokens: Vec<u32> = ids[padding..].iter().map(|id| *id as u32).collect();
        let (mut media, mut sources, mut at) = (Vec::new(), Vec::new(), 0);
        while at < tokens.len() {
            let Some(kind) = [facts.image_token, facts.video_token].iter().position(|id| *id == tokens[at]) else {
                at += 1;
                continue;
            };
            let grids = integers(["image_grid_thw", "video_grid_thw"][kind])?;
            let (number, first_row) = next[kind];
            let grid = [0, 1, 2].map(|axis| grids[3 * number + axis] as usize);
            let name = ["pixel_values", "pixel_values_videos"][kind];
            let (shape, pixels) = (shape(grid, model), pixels_of_values(grid, model));
            let start = first_row * model.config().vision.patch_values();
            let values = &inputs[&format!("{batch}.{name}")].f32s()?[start..start + pixels.len()];
            let mut image = vec![0.0; pixels.len()];
            pixels.iter().zip(values).for_each(|(pixel, value)| image[*pixel] = *value);
            let seconds = inputs.get(&format!("{batch}.second_per_grid_ts")).filter(|_| kind == 1);
            let seconds_per_step = match seconds {
                Some(all) => f64::from(all.f32s()?[number]),
                None => 1.0,
            };
            at += facts.tokens_of(&shape)?;
            next[kind] = (number + 1, first_row + grid.iter().product::<usize>());
            media.push(Medium { pixels: Tensor::new(image, shape)?, seconds_per_step });
            sources.push((name.to_string(), pixels));
        }
        let answer = tokens.len() - *answer as usize..tokens.len();
        texts.push(Text { tokens, media, sources, padding, answer });
    }
    Ok(texts)
}

/// The shape of a medium, `[T, 3, H, W]`, from its numbers of time steps and of patches down and across.
fn shape([steps, rows, columns]: [usize; 3], model: &QwenVl) -> [usize; 4] {
    let vision = &model.config().vision;
    [steps * vision.patch_frames, 3, rows * vision.patch, columns * vision.patch]
}

/// The pixel of each value of the patches, in the published order: time step, square, patch within the square, channel,
/// frame, row, column.
fn pixels_of_values(grid: [usize; 3], model: &QwenVl) -> Vec<usize> {
    let vision = &model.config().vision;
    let ([_, channels, height, width], [steps, rows, columns]) = (shape(grid, model), grid);
    let (merge, patch) = (vision.merge, vision.patch);
    let mut pixels = Vec::new();
    for [step, top, left] in places([steps, rows / merge, columns / merge]) {
        for [_, row, column] in places([1, merge, merge]) {
            for [channel, frame, y] in places([channels, vision.patch_frames, patch]) {
                let plane = (step * vision.patch_frames + frame) * channels + channel;
                let start = (plane * height + (top * merge + row) * patch + y) * width;
                let start = start + (left * merge + column) * patch;
                pixels.extend(start..start + patch);
            }
        }
    }
    pixels
}

/// All places of a box, the last axis first.
fn places([a, b, c]: [usize; 3]) -> impl Iterator<Item = [usize; 3]> {
    (0..a).flat_map(move |i| (0..b).flat_map(move |j| (0..c).map(move |k| [i, j, k])))
}

/// The results of a batch, as the reference lays them out: the values of all rows, one after another.
#[derive(Default)]
struct Results(BTreeMap<String, Vec<f32>>);

impl Results {
    fn extend(&mut self, name: String, values: impl IntoIterator<Item = f64>) {
        self.0.entry(name).or_default().extend(values.into_iter().map(|value| value as f32));
    }

    fn add(&mut self, batch: &str, config: &Config, text: &Text, model: &mut QwenVl) -> Outcome {
        for (medium, (source, _)) in text.media.iter().zip(&text.sources) {
            let kind = if source.ends_with("videos") { "video" } else { "image" };
            let features = model.features(std::slice::from_ref(medium))?;
            self.extend(format!("{batch}.{kind}.features"), features.f32s()?.iter().map(|x| f64::from(*x)));
        }
        let read = Read::new(text, config, model)?;
        let width = model.facts().width;
        self.extend(format!("{batch}.hidden_states"), vec![0.0; text.padding * width]);
        self.extend(format!("{batch}.hidden_states"), read.states.clone());
        self.extend(format!("{batch}.logits"), vec![0.0; text.padding * model.facts().vocabulary]);
        self.extend(format!("{batch}.logits"), read.logits.concat());
        let gap = read.gap(config);
        self.extend(format!("{batch}.yes_minus_no"), [gap]);
        self.extend(format!("{batch}.p_yes_of_two"), [sigmoid(gap)]);
        self.extend(format!("{batch}.p_yes_of_all"), [softmax(&read.logits[read.asked])[config.yes]]);
        let predicted = text.answer.clone().map(|at| softmax(&read.logits[at - 1])[text.tokens[at] as usize].ln());
        let log_probs: Vec<f64> = predicted.collect();
        self.extend(format!("{batch}.answer_log_prob"), [log_probs.iter().sum()]);
        self.extend(format!("{batch}.answer_token_log_probs"), log_probs);
        for (objective, cotangent) in [("answer", read.d_answer(text, width)), ("judge", read.d_judge(config, width))] {
            let wanted: Vec<usize> = (0..text.tokens.len()).collect();
            let (_, pullback) = model.read(&text.tokens, &text.media, Positions::Multimodal, &wanted, Grad::Record)?;
            let cotangent = Tensor::new(cotangent, [wanted.len(), width])?;
            let flat = pullback.ok_or("no pullback")?.pull(&cotangent)?;
            for (d_medium, (source, pixels)) in split_media(&flat, &text.media)?.iter().zip(&text.sources) {
                let d_pixels = d_medium.f32s()?;
                let rows = pixels.iter().map(|pixel| f64::from(d_pixels[*pixel]));
                self.extend(format!("{batch}.grad.{objective}.{source}"), rows);
            }
        }
        Ok(())
    }

    fn compare(self, case: &Case, report: &mut Report) -> Outcome {
        for (name, values) in self.0 {
            let Ok(expected) = report.get(&name).cloned() else {
                // Not every batch has every gradient in the reference.
                report.check(name.contains(".grad."), || format!("{name}: not among the expected tensors"));
                continue;
            };
            report.check(values.len() == expected.len(), || format!("{name}: {} values", values.len()));
            if case.setting.is_narrow() && expected.len() < crate::case::FEW {
                report.leave_out(&name, "follows from the logits with cancellation");
            } else {
                report.compare(&name, &Tensor::new(values, expected.shape())?);
            }
        }
        Ok(())
    }
}

/// The states and logits of every token of a text.
struct Read {
    /// `[tokens, width]`.
    states: Vec<f64>,
    logits: Vec<Vec<f64>>,
    /// The rows of the output layer, `[vocabulary, width]`.
    head: Vec<f64>,
    /// The place before the answer.
    asked: usize,
}

impl Read {
    fn new(text: &Text, config: &Config, model: &mut QwenVl) -> Outcome<Self> {
        let (width, vocabulary) = (model.facts().width, model.facts().vocabulary as u32);
        if config.yes.max(config.no) >= vocabulary as usize {
            return Err("the words of the answer are outside of the vocabulary".into());
        }
        let wide =
            |tensor: &Tensor| -> Outcome<Vec<f64>> { Ok(tensor.f32s()?.iter().map(|x| f64::from(*x)).collect()) };
        let head = wide(&model.head_rows(&(0..vocabulary).collect::<Vec<u32>>())?)?;
        let wanted: Vec<usize> = (0..text.tokens.len()).collect();
        let states = model.read(&text.tokens, &text.media, Positions::Multimodal, &wanted, Grad::Skip)?.0;
        let states = wide(&states)?;
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let row = |state: &[f64]| head.chunks(width).map(|row| dot(state, row)).collect();
        let logits = states.chunks(width).map(row).collect();
        Ok(Self { states, logits, head, asked: text.answer.start - 1 })
    }

    /// The logit of yes minus that of no.
    fn gap(&self, config: &Config) -> f64 {
        self.logits[self.asked][config.yes] - self.logits[self.asked][config.no]
    }

    /// The gradient of the answer's log-probability: d log p(token) / d state = W_token - sum_v p_v W_v.
    fn d_answer(&self, text: &Text, width: usize) -> Vec<f32> {
        let mut d_states = vec![0.0; text.tokens.len() * width];
        for at in text.answer.clone() {
            let (probabilities, token) = (softmax(&self.logits[at - 1]), text.tokens[at] as usize);
            for channel in 0..width {
                let rows = self.head.chunks(width).zip(&probabilities);
                let mean: f64 = rows.map(|(row, p)| p * row[channel]).sum();
                d_states[(at - 1) * width + channel] = (self.head[token * width + channel] - mean) as f32;
            }
        }
        d_states
    }

    /// The gradient of log sigmoid(gap): (1 - sigmoid(gap)) (W_yes - W_no).
    fn d_judge(&self, config: &Config, width: usize) -> Vec<f32> {
        let mut d_states = vec![0.0; self.states.len()];
        let slope = 1.0 - sigmoid(self.gap(config));
        for channel in 0..width {
            let [yes, no] = [config.yes, config.no].map(|word| self.head[word * width + channel]);
            d_states[self.asked * width + channel] = (slope * (yes - no)) as f32;
        }
        d_states
    }
}

/// Compares the gradient of the gap at the pixels with differences along it.
fn check_slope(report: &mut Report, config: &Config, text: &Text, model: &mut QwenVl) -> Outcome {
    let (width, asked) = (model.facts().width, text.answer.start - 1);
    let rows = model.head_rows(&[config.yes as u32, config.no as u32])?;
    let (yes, no) = rows.f32s()?.split_at(width);
    let row: Vec<f32> = yes.iter().zip(no).map(|(yes, no)| yes - no).collect();
    let (_, pullback) = model.read(&text.tokens, &text.media, Positions::Multimodal, &[asked], Grad::Record)?;
    let gradient = pullback.ok_or("no pullback")?.pull(&Tensor::new(row.clone(), [1, width])?)?;
    let gap = |media: &[Medium]| -> Outcome<f64> {
        let state = model.read(&text.tokens, media, Positions::Multimodal, &[asked], Grad::Skip)?.0;
        Ok(state.f32s()?.iter().zip(&row).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum())
    };
    let pixels: Vec<f32> = text.media.iter().map(|m| m.pixels.to_f32_vec()).collect::<Vec<_>>().concat();
    crate::slope::check(report, "the gap of yes and no", &pixels, gradient.f32s()?, 4e-3, {
        let mut gap = gap;
        move |moved| {
            let flat = Tensor::new(moved.to_vec(), [moved.len()])?;
            let moved = split_media(&flat, &text.media)?.into_iter().zip(&text.media);
            gap(&moved.map(|(pixels, medium)| Medium { pixels, ..medium.clone() }).collect::<Vec<_>>())
        }
    })
}

/// Checks that the policy continues every beginning of a text that holds its media with the likeliest token of the
/// reference's logits that is not a placeholder.
fn check_answers(report: &mut Report, case: &Case, batch: &str, row: usize, text: &Text, model: &QwenVl) -> Outcome {
    let facts = model.facts();
    let mut weights = case.tensors("model.safetensors")?;
    weights.retain(|name, _| !name.starts_with("visual."));
    let pictures = Arc::new(model.pictures());
    let network = Network::new(model.config().text.clone(), &weights, DType::F32, case.device())?;
    let mut policy = CausalLm::new(network.with_pictures(pictures.clone()), None, None)?;
    let is_placeholder = |id: u32| id == facts.image_token || id == facts.video_token;
    let first = text.tokens.iter().rposition(|id| is_placeholder(*id)).map_or(1, |last| last + 1);
    let logits = report.get(&format!("{batch}.logits"))?.to_f32_vec();
    let row_start = row * (text.padding + text.tokens.len());
    for end in first..=text.tokens.len() {
        let start = (row_start + text.padding + end - 1) * facts.vocabulary;
        let words = (0..facts.vocabulary as u32).filter(|id| !is_placeholder(*id));
        let expected = words.max_by(|a, b| logits[start + *a as usize].total_cmp(&logits[start + *b as usize]));
        let prompt = pictures.with_media(&text.tokens[..end], &text.media)?;
        let found = policy.generate(&[prompt], &Sampling::greedy(1))?.remove(0).tokens;
        let name = || format!("{batch}: {found:?} after {end} tokens of row {row}, expected {expected:?}");
        report.check(found.first().copied() == expected, name);
    }
    Ok(())
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn softmax(logits: &[f64]) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let exponentials: Vec<f64> = logits.iter().map(|x| (x - largest).exp()).collect();
    let sum: f64 = exponentials.iter().sum();
    exponentials.into_iter().map(|x| x / sum).collect()
}
