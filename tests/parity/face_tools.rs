//! Face alignment, detector post-processing, antialiased resize and pooled score.

use std::collections::BTreeMap;

use burn_tensor::activation::silu;
use burn_tensor::module::conv2d;
use burn_tensor::ops::ConvOptions;
use burn_tensor::{Device, Tensor as Burn};
use roll_backends::host::to_host_nd;
use roll_backends::{NdTensor, Tape, to_device, vjp};
use roll_core::{StateDict, Tensor};
use roll_rewards::insightface::affine::Affine;
use roll_rewards::insightface::align::{Alignment, CROP, Crop, exact_warp, reference_warp, to_template};
use roll_rewards::insightface::detection::{Face, Letterbox, largest, suppress};
use roll_rewards::insightface::pooling::pooled_cosine;
use roll_rewards::insightface::scrfd;
use roll_rewards::picture::{Filter, Resize};
use serde::Deserialize;

use crate::case::{Case, Outcome, Report};

#[derive(Deserialize)]
struct Config {
    resize: BTreeMap<String, [usize; 2]>,
    pool_cases: Vec<String>,
    det_hw: [usize; 2],
    small: usize,
}

/// The reference's constants.
const THRESHOLD: f32 = 0.5;
const NMS_IOU: f32 = 0.4;
/// Outputs of the reference's helpers that our reward does not use.
const UNUSED_HELPERS: [&str; 10] = [
    "embedding_loss",
    "embedding_loss.grad",
    "embedding_loss.gt",
    "face_transform.crop",
    "face_transform.inverse",
    "face_transform.matrix",
    "face_transform.points_back",
    "landmark_loss",
    "landmark_loss.grad",
    "video_tensor",
];

pub fn run(case: &Case) -> Outcome<Report> {
    let config: Config = case.config()?;
    let inputs = Inputs(case.tensors("inputs.safetensors")?);
    let mut report = case.expected("outputs.safetensors")?;
    crops(&mut report, &inputs)?;
    embedding(&mut report, &inputs, case.device())?;
    resizes(&mut report, &inputs, &config)?;
    pooling(&mut report, &inputs, &config)?;
    for name in UNUSED_HELPERS {
        report.leave_out(name, "a helper of the reference that our reward does not use");
    }

    report.join(detection(case, &inputs, &config)?);
    Ok(report)
}

struct Inputs(StateDict);

impl Inputs {
    fn get(&self, name: &str) -> Outcome<&Tensor> {
        Ok(self.0.get(name).ok_or_else(|| format!("the case holds no input `{name}`"))?)
    }

    fn values(&self, name: &str) -> Outcome<&[f32]> {
        Ok(self.get(name)?.f32s()?)
    }

    fn mask(&self, name: &str) -> Outcome<Vec<bool>> {
        Ok(self.values(name)?.iter().map(|v| *v != 0.0).collect())
    }

    fn picture(&self) -> Outcome<(&[f32], [usize; 2])> {
        let image = self.get("image")?;
        let [3, h, w] = *image.shape() else { return Err("image should be [3, H, W]".into()) };
        Ok((image.f32s()?, [h, w]))
    }

    fn landmarks(&self) -> Outcome<[[f32; 2]; 5]> {
        let values = self.values("landmarks")?;
        Ok(std::array::from_fn(|i| [values[2 * i], values[2 * i + 1]]))
    }
}

/// The homogeneous matrix of `map`.
fn matrix(map: &Affine) -> Outcome<Tensor> {
    let values = map.0.iter().flatten().map(|v| *v as f32).chain([0.0, 0.0, 1.0]).collect::<Vec<_>>();
    Ok(Tensor::new(values, [3, 3])?)
}

fn crops(report: &mut Report, inputs: &Inputs) -> Outcome {
    let (image, [h, w]) = inputs.picture()?;
    let to_crop = to_template(&inputs.landmarks()?).ok_or("the landmarks coincide")?;
    report.compare("norm_crop.matrix", &matrix(&to_crop)?);

    let exact = exact_warp(&to_crop, [h, w], CROP).ok_or("no inverse")?;
    let points = (0..CROP * CROP).flat_map(|i| exact.to_source.apply([(i % CROP) as f64, (i / CROP) as f64]));
    let points = points.map(|v| v as f32).collect::<Vec<_>>();
    report.compare("exact_warp.source_points", &Tensor::new(points, [CROP, CROP, 2])?);
    let reference = reference_warp(&to_crop, [h, w], CROP).ok_or("no inverse")?;
    for (warp, value, gradient, cotangent) in [
        (exact, "exact_warp.crop", "exact_warp.grad_image", "g_exact"),
        (reference, "norm_crop.warped", "norm_crop.grad_image", "g_crop"),
    ] {
        let [oh, ow] = warp.output;
        report.compare(value, &Tensor::new(warp.forward(image), [3, oh, ow])?);
        let mut pulled = vec![0.0; image.len()];
        warp.pull(inputs.values(cotangent)?, &mut pulled);
        report.compare(gradient, &Tensor::new(pulled, [3, h, w])?);
    }
    Ok(())
}

/// The embedder's path with the case's stand-in network.
fn embedding(report: &mut Report, inputs: &Inputs, device: &Device) -> Outcome {
    let (image, [h, w]) = inputs.picture()?;
    let crop = Crop::new(&inputs.landmarks()?, [h, w], Alignment::Reference).ok_or("the landmarks coincide")?;
    let weight = to_device::<4>(inputs.get("arc.conv.weight")?, device)?;
    let bias = to_device::<1>(inputs.get("arc.conv.bias")?, device)?;
    let fc_weight = to_device::<2>(inputs.get("arc.fc.weight")?, device)?;
    let fc_bias = to_device::<1>(inputs.get("arc.fc.bias")?, device)?;
    let rgb = to_device::<4>(&Tensor::new(crop.forward(image), [1, 3, CROP, CROP])?, device)?;
    let (value, recorded) = vjp(&[NdTensor::from(rgb)], Tape::off(), |inputs, _| {
        let bgr = inputs[0].rank::<4>()?.flip([1]);
        let options = ConvOptions::new([4, 4], [2, 2], [1, 1], 1);
        let x = silu(conv2d(bgr, weight, Some(bias), options));
        let x: Burn<2> = x.flatten(1, 3);
        Ok(vec![(x.matmul(fc_weight.transpose()) + fc_bias.unsqueeze()).into()])
    })?;
    report.compare("arcface.embedding", &to_host_nd(&value[0])?);
    let cotangent = inputs.get("g_emb")?;
    let cotangent = NdTensor::from(to_device::<2>(&cotangent.reshape([1, cotangent.len()])?, device)?);
    let pulled = recorded.pull(vec![Some(cotangent)], None).remove(0).ok_or("no gradient")?;
    let mut gradient = vec![0.0; image.len()];
    crop.pull(to_host_nd(&pulled)?.f32s()?, &mut gradient);
    report.compare("arcface.grad_image", &Tensor::new(gradient, [3, h, w])?);
    Ok(())
}

fn resizes(report: &mut Report, inputs: &Inputs, config: &Config) -> Outcome {
    let (image, [h, w]) = inputs.picture()?;
    for (name, &[oh, ow]) in &config.resize {
        let resize = Resize::new([h, w], [oh, ow], Filter::Bilinear);
        report.compare(&format!("resize.{name}"), &Tensor::new(resize.forward(image), [3, oh, ow])?);
        let gradient = resize.pull(inputs.values(&format!("g_resize.{name}"))?);
        report.compare(&format!("resize.{name}.grad"), &Tensor::new(gradient, [3, h, w])?);
    }
    Ok(())
}

fn pooling(report: &mut Report, inputs: &Inputs, config: &Config) -> Outcome {
    for name in &config.pool_cases {
        let key = |part: &str| format!("pool.{name}.{part}");
        let (id, gt) = (inputs.get(&key("id"))?, inputs.get(&key("gt"))?);
        let width = *id.shape().last().ok_or("a scalar embedding")?;
        // The first reference is the model's condition; rows of zeros are references without a face.
        let references = gt.f32s()?.chunks_exact(width).skip(1).filter(|row| row.iter().any(|v| *v != 0.0));
        let references: Vec<f32> = references.flatten().copied().collect();
        let mask = inputs.mask(&key("mask"))?;
        let scored = id.f32s()?.chunks_exact(width).zip(&mask).filter(|(_, scored)| **scored);
        let scored: Vec<f32> = scored.flat_map(|(row, _)| row).copied().collect();
        let pooled = pooled_cosine(&scored, &references, width);
        let mut rows = pooled.gradient.chunks_exact(width);
        let zeros = vec![0.0; width];
        let gradient = mask
            .iter()
            .flat_map(|scored| if *scored { rows.next().unwrap_or(&zeros) } else { &zeros })
            .copied()
            .collect();
        report.compare_value(&key("score"), pooled.value);
        report.compare(&key("grad"), &Tensor::new(gradient, id.shape().to_vec())?);
    }
    Ok(())
}

fn detection(case: &Case, inputs: &Inputs, config: &Config) -> Outcome<Report> {
    let raw = Inputs(case.tensors("scrfd_inputs.safetensors")?);
    let mut report = case.expected("scrfd_outputs.safetensors")?;
    let integers = |values: Vec<i64>, shape: &[usize]| Tensor::new(values, shape);

    let [h, w] = config.det_hw;
    let side = input_side(&raw, "scrfd640")?;
    let letterbox = Letterbox::new([h, w], side)?;
    let levels = candidates(&raw, "scrfd640", side)?;
    report.compare("scrfd640.image_hw", &integers(vec![h as i64, w as i64], &[2])?);
    let counts = levels.iter().map(|l| l.len() as i64).collect();
    report.compare("scrfd640.candidates_per_stride", &integers(counts, &[levels.len()])?);
    let before: Vec<Face> = levels.concat();
    let boxes: Vec<f32> = before.iter().flat_map(|f| f.bounds).collect();
    report.compare("scrfd640.boxes_before_nms", &Tensor::new(boxes, [before.len(), 4])?);
    let scores: Vec<f32> = before.iter().map(|f| f.score).collect();
    report.compare("scrfd640.scores_before_nms", &Tensor::new(scores, [before.len(), 1])?);
    let before = before.into_iter().map(|f| f.divided_by(letterbox.scale)).collect();
    let faces = compare_faces(&mut report, "scrfd640", before)?;
    let largest = largest(&faces).ok_or("no face")?;
    report.compare("scrfd640.largest", &integers(vec![largest as i64], &[])?);

    let (image, hw) = inputs.picture()?;
    let letterbox = Letterbox::new(hw, config.small)?;
    let canvas = Tensor::new(letterbox.canvas(image, 0.0), [1, 3, config.small, config.small])?;
    report.compare("scrfd_small.network_input", &canvas);
    let levels = candidates(&raw, "scrfd_small", config.small)?;
    let faces = levels.concat().into_iter().map(|f| f.divided_by(letterbox.scale)).collect();
    compare_faces(&mut report, "scrfd_small", faces)?;
    let nothing = scrfd::STRIDES
        .iter()
        .map(|&stride| {
            let anchors = (config.small / stride).pow(2) * 2;
            let zeros = vec![0.0; 10 * anchors];
            decode(stride, &zeros[..anchors], &zeros[..4 * anchors], &zeros, config.small)
        })
        .collect::<Outcome<Vec<_>>>()?;
    let nothing = suppress(nothing.concat(), NMS_IOU).len();
    report.compare("scrfd_small.empty_detection_count", &integers(vec![nothing as i64], &[])?);
    Ok(report)
}

fn compare_faces(report: &mut Report, name: &str, candidates: Vec<Face>) -> Outcome<Vec<Face>> {
    let faces = suppress(candidates, NMS_IOU);
    let boxes: Vec<f32> = faces.iter().flat_map(|f| f.bounds.into_iter().chain([f.score])).collect();
    report.compare(&format!("{name}.detections"), &Tensor::new(boxes, [faces.len(), 5])?);
    let landmarks: Vec<f32> = faces.iter().flat_map(|f| f.landmarks).flatten().collect();
    report.compare(&format!("{name}.kps"), &Tensor::new(landmarks, [faces.len(), 5, 2])?);
    Ok(faces)
}

/// The side of the network's square input, by the number of anchors, two for each cell, of the finest level.
fn input_side(raw: &Inputs, name: &str) -> Outcome<usize> {
    let stride = scrfd::STRIDES[0];
    let anchors = raw.get(&format!("{name}.stride{stride}.count"))?.as_slice::<i64>()?[0] as usize;
    Ok((anchors / 2).isqrt() * stride)
}

/// The case's network outputs are sparse: anchors that are not listed are zero.
fn candidates(raw: &Inputs, name: &str, side: usize) -> Outcome<Vec<Vec<Face>>> {
    let level = |stride: usize| {
        let part = |part: &str| raw.get(&format!("{name}.stride{stride}.{part}"));
        let index = part("index")?.as_slice::<i64>()?;
        let count = part("count")?.as_slice::<i64>()?[0] as usize;
        let dense = |name: &str, width: usize| -> Outcome<Vec<f32>> {
            let mut values = vec![0.0; count * width];
            for (row, &at) in part(name)?.f32s()?.chunks_exact(width).zip(index) {
                values[at as usize * width..][..width].copy_from_slice(row);
            }
            Ok(values)
        };
        decode(stride, &dense("score", 1)?, &dense("bbox", 4)?, &dense("kps", 10)?, side)
    };
    scrfd::STRIDES.into_iter().map(level).collect()
}

fn decode(stride: usize, scores: &[f32], boxes: &[f32], landmarks: &[f32], side: usize) -> Outcome<Vec<Face>> {
    Ok(scrfd::decode(scrfd::Level { stride, scores, boxes, landmarks }, side, THRESHOLD)?)
}
