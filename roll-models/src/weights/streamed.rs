//! Weights that are read from their files segment by segment.

use std::collections::HashMap;
use std::sync::Arc;

use burn::tensor::{DType, Device};
use roll_backends::{Weight, WeightStore, Weights};
use roll_core::Result;

use super::checkpoint::Checkpoint;

/// A store that uploads a segment when it is asked for it and keeps nothing: at any time the device holds the
/// segments that are in use. bf16 weights stay bf16 and are widened at use; everything else becomes f32.
///
/// For networks that run once per sample and would not fit: the UMT5-XXL encoder has 11 GB in bf16.
pub struct Streamed {
    checkpoint: Checkpoint,
    device: Device,
}

impl Streamed {
    /// Reads from `checkpoint`, whose keys are those the network asks for.
    pub fn new(checkpoint: Checkpoint, device: &Device) -> Self {
        Self { checkpoint, device: device.clone() }
    }
}

impl WeightStore for Streamed {
    fn segment(&self, prefix: &str) -> Result<Weights> {
        let state = self.checkpoint.state(|key| key.starts_with(prefix))?;
        let upload = |tensor: &roll_core::Tensor| Weight::new(tensor, stored_dtype(tensor), &self.device);
        let weights: HashMap<_, _> = state.iter().map(|(key, tensor)| (key.clone(), upload(tensor))).collect();
        Ok(Arc::new(weights))
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn shape(&self, key: &str) -> Option<Vec<usize>> {
        self.checkpoint.info(key).map(|info| info.shape.clone())
    }
}

/// The dtype a frozen weight is kept in on the device: its own when it is bf16, f32 otherwise.
pub fn stored_dtype(tensor: &roll_core::Tensor) -> DType {
    match tensor.dtype() {
        roll_core::DType::Bf16 => DType::BF16,
        _ => DType::F32,
    }
}
