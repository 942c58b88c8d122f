//! Face detection with SCRFD or YuNet.

use burn_tensor::Device;
use rayon::prelude::*;
use roll_backends::host::{to_device_nd, to_host_nd};
use roll_core::{Error, Grad, Result, Tensor};
use roll_onnx::{Model, Network};

use super::config::IdentityConfig;
use super::detection::{Face, Letterbox, suppress};
use super::{scrfd, yunet};
use crate::RewardError;

/// Half of the range of pixels from 0 to 255. A pixel p in [-1, 1] is (p + 1) * 127.5 in this range.
const HALF_RANGE: f32 = 127.5;

/// A detection network and its settings.
#[derive(Debug)]
pub struct Detector {
    network: Network,
    kind: Kind,
    device: Device,
    /// Side of the square input in pixels.
    side: usize,
    /// Lowest confidence of a face.
    threshold: f32,
    /// Largest overlap of two faces.
    nms_iou: f32,
    /// SCRFD's input is (pixel - 127.5) / `divisor`.
    divisor: f32,
    /// Value of the input outside the frame, in [-1, 1].
    padding: f32,
}

/// The kind of a detection network, which decides how its outputs are read.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Scrfd,
    /// Indices of the outputs for class, object, box and landmarks, per stride.
    Yunet([[usize; 4]; 3]),
}

impl Detector {
    /// Recognises `network` by its outputs. Fails if it is not a detector with landmarks, or if its input has another
    /// size than configured.
    pub fn new(network: Network, config: &IdentityConfig, device: &Device) -> Result<Self> {
        let side = config.det_size;
        let model = network.model();
        let kind = recognise(model)?;
        let shape = &model.inputs()[0].shape;
        match shape[..] {
            [_, Some(3) | None, h, w] if [h, w].into_iter().all(|d| d.is_none_or(|d| d == side)) => {}
            [_, Some(3) | None, Some(h), Some(w)] if h == w => {
                let problem = format!("{} takes pictures of {h}x{h} only, found {side}", model.path().display());
                return Err(Error::config("reward.det_size", problem));
            }
            _ => return Err(misfit(model, format!("expected an input [N, 3, {side}, {side}], found {shape:?}"))),
        }
        Ok(Self {
            network,
            kind,
            device: device.clone(),
            side,
            threshold: config.det_threshold,
            nms_iou: config.nms_iou,
            divisor: config.det_divisor,
            padding: config.det_padding.value(),
        })
    }

    /// Path of the network's file.
    pub fn path(&self) -> &std::path::Path {
        self.network.model().path()
    }

    /// Detects the faces of each frame, in pixels of the frame and by descending confidence. Frames are `[3, height,
    /// width]` in [-1, 1], all of `size` (`[height, width]`), and run as one batch. With [`Grad::Record`], a later
    /// gradient will use the positions of these faces as constants (see [`Network::run`]).
    pub fn detect(&self, frames: &[&[f32]], size: [usize; 2], grad: Grad) -> Result<Vec<Vec<Face>>> {
        if frames.is_empty() {
            return Ok(vec![]);
        }
        let letterbox = Letterbox::new(size, self.side)?;
        let canvases: Vec<Vec<f32>> = frames.par_iter().map(|frame| self.canvas(&letterbox, frame)).collect();
        let input = Tensor::new(canvases.concat(), [frames.len(), 3, self.side, self.side])?;
        let outputs = self.network.run(&to_device_nd(&input, &self.device)?, grad.is_on())?;
        let outputs = outputs.iter().map(to_host_nd).collect::<Result<Vec<Tensor>>>()?;
        (0..frames.len())
            .map(|item| {
                let rows: Vec<&[f32]> = outputs.iter().map(|o| row(o, item, frames.len())).collect::<Result<_>>()?;
                let candidates = self.decode(&rows)?.into_iter().map(|face| face.divided_by(letterbox.scale)).collect();
                Ok(suppress(candidates, self.nms_iou))
            })
            .collect()
    }

    /// The network's input for a frame, `[3, side, side]`.
    fn canvas(&self, letterbox: &Letterbox, frame: &[f32]) -> Vec<f32> {
        let mut canvas = letterbox.canvas(frame, self.padding);
        match self.kind {
            Kind::Scrfd if self.divisor == HALF_RANGE => {}
            Kind::Scrfd => canvas.iter_mut().for_each(|v| *v *= HALF_RANGE / self.divisor),
            Kind::Yunet(_) => {
                // YuNet expects BGR in 0 to 255.
                canvas.iter_mut().for_each(|v| *v = (*v + 1.0) * HALF_RANGE);
                let plane = self.side * self.side;
                let (red, rest) = canvas.split_at_mut(plane);
                red.swap_with_slice(&mut rest[plane..]);
            }
        }
        canvas
    }

    /// The faces of one frame, in canvas pixels, from its rows of all outputs.
    fn decode(&self, rows: &[&[f32]]) -> Result<Vec<Face>> {
        let mut faces = vec![];
        for (level, stride) in scrfd::STRIDES.into_iter().enumerate() {
            faces.extend(match self.kind {
                Kind::Scrfd => {
                    // Outputs 0 to 2 are the scores of the three levels, 3 to 5 the boxes, 6 to 8 the landmarks.
                    let [scores, boxes, landmarks] = [0, 3, 6].map(|first| rows[first + level]);
                    scrfd::decode(scrfd::Level { stride, scores, boxes, landmarks }, self.side, self.threshold)?
                }
                Kind::Yunet(outputs) => {
                    let [classes, objects, boxes, landmarks] = outputs[level].map(|output| rows[output]);
                    let outputs_of_level = yunet::Level { stride, classes, objects, boxes, landmarks };
                    yunet::decode(outputs_of_level, self.side, self.threshold)?
                }
            });
        }
        Ok(faces)
    }
}

/// The values of one item in an output. The output may have no batch axis.
fn row(output: &Tensor, item: usize, items: usize) -> Result<&[f32]> {
    let values = output.f32s()?;
    let length = values.len() / items;
    match values.len() % items {
        0 => Ok(&values[item * length..][..length]),
        _ => Err(Error::shape("output of the face detector", format!("a multiple of {items} values"), output.shape())),
    }
}

/// Recognises a detection network by its outputs: YuNet's by their names, SCRFD's by their number.
fn recognise(model: &Model) -> Result<Kind> {
    let outputs = model.outputs();
    let find_output = |part: &str, stride: usize| outputs.iter().position(|o| o.name == format!("{part}_{stride}"));
    let yunet = scrfd::STRIDES.map(|stride| ["cls", "obj", "bbox", "kps"].map(|part| find_output(part, stride)));
    if yunet.iter().flatten().all(Option::is_some) {
        // Every output was found, so no default is used.
        return Ok(Kind::Yunet(yunet.map(|level| level.map(Option::unwrap_or_default))));
    }
    match outputs.len() {
        9 => Ok(Kind::Scrfd),
        6 => Err(misfit(model, "it gives boxes but no landmarks; take a file whose name has `kps`".into())),
        n => {
            let expected = "the 9 outputs of SCRFD with landmarks, or YuNet's `cls_8`, `obj_8`, `bbox_8`, `kps_8`, ...";
            Err(misfit(model, format!("expected {expected}; found {n} outputs")))
        }
    }
}

/// The error of a file that is not a face detector.
fn misfit(model: &Model, problem: String) -> Error {
    RewardError::NotTheNetwork { role: "face detector", path: model.path().into(), problem }.into()
}
