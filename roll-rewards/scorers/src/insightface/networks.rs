//! The two networks of the identity score, detector and embedder, and the operations that combine them.

use std::path::Path;

use burn_tensor::Device;
use roll_core::{Error, Grad, Result};
use roll_onnx::Network;

use super::align::{Alignment, Crop};
use super::config::IdentityConfig;
use super::detection::{Face, largest};
use super::detector::Detector;
use super::directory::{DETECTOR, EMBEDDER, open_network};
use super::embedder::Embedder;

/// A face detector and a face embedder.
#[derive(Debug)]
pub struct FaceNetworks {
    detector: Detector,
    embedder: Embedder,
    align: Alignment,
    /// Number of frames per batch of the detector.
    frames_per_batch: usize,
}

/// The scored face of a frame, and its crop.
#[derive(Clone, Debug)]
pub struct FrameFace {
    /// Index of the frame in the video.
    pub frame: usize,
    /// The largest face in the frame.
    pub face: Face,
    /// The map from the frame to the embedder's crop.
    pub crop: Crop,
}

impl FaceNetworks {
    /// Finds both networks in `directory` and loads them on `device`.
    ///
    /// Fails if a value of `config` is out of range, if no file or several files fit a role (the error lists them), if
    /// a file is damaged or needs an unsupported operator, or if `onnx: onnxruntime` is not available.
    pub fn load(directory: &Path, config: &IdentityConfig, device: &Device) -> Result<Self> {
        config.check()?;
        let detector = open_network(directory, &DETECTOR, config.detector.as_deref(), device)?;
        let embedder = open_network(directory, &EMBEDDER, config.embedder.as_deref(), device)?;
        let (detector, embedder) = (Network::new(detector, config.onnx)?, Network::new(embedder, config.onnx)?);
        let networks = Self {
            detector: Detector::new(detector, config, device)?,
            embedder: Embedder::new(embedder, config.channel_order, device)?,
            align: config.align,
            frames_per_batch: config.frames_per_batch,
        };
        tracing::debug!(
            detector = %networks.detector.path().display(),
            embedder = %networks.embedder.path().display(),
            channel_order = ?config.channel_order,
            align = ?config.align,
            "face networks loaded"
        );
        Ok(networks)
    }

    /// The detector.
    pub fn detector(&self) -> &Detector {
        &self.detector
    }

    /// The embedder.
    pub fn embedder(&self) -> &Embedder {
        &self.embedder
    }

    /// Detects the faces of one frame, `[3, height, width]` in [-1, 1], by descending confidence.
    pub fn detect(&self, frame: &[f32], size: [usize; 2]) -> Result<Vec<Face>> {
        check_frame(frame, size)?;
        Ok(self.detector.detect(&[frame], size, Grad::Skip)?.pop().unwrap_or_default())
    }

    /// Returns the embedding of `face` in a frame, not normalised; `None` if the landmarks of the face coincide.
    pub fn embed(&self, frame: &[f32], size: [usize; 2], face: &Face) -> Result<Option<Vec<f32>>> {
        check_frame(frame, size)?;
        match Crop::new(&face.landmarks, size, self.align) {
            Some(crop) => Ok(Some(self.embedder.embed(crop.forward(frame), Grad::Skip)?.values)),
            None => Ok(None),
        }
    }

    /// The largest face of each of `frames` (index and `[3, height, width]`). Frames without a face are left out.
    /// `grad` is passed to [`Detector::detect`].
    pub fn largest_faces(&self, frames: &[(usize, &[f32])], size: [usize; 2], grad: Grad) -> Result<Vec<FrameFace>> {
        let mut found = vec![];
        for batch in frames.chunks(self.frames_per_batch) {
            let pictures: Vec<&[f32]> = batch.iter().map(|(_, picture)| *picture).collect();
            pictures.iter().try_for_each(|picture| check_frame(picture, size))?;
            for (&(frame, _), faces) in batch.iter().zip(self.detector.detect(&pictures, size, grad)?) {
                let face = largest(&faces).map(|i| faces[i]);
                // A face with coinciding landmarks cannot be aligned.
                found.extend(face.and_then(|face| {
                    let crop = Crop::new(&face.landmarks, size, self.align)?;
                    Some(FrameFace { frame, face, crop })
                }));
            }
        }
        Ok(found)
    }
}

/// Fails unless `frame` has the pixels of a frame of this size.
fn check_frame(frame: &[f32], [height, width]: [usize; 2]) -> Result<()> {
    if frame.len() != 3 * height * width {
        return Err(Error::shape("frame for the face networks", format!("[3, {height}, {width}]"), &[frame.len()]));
    }
    Ok(())
}
