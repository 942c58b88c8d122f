//! AdamW's moments on a device.

use burn_tensor::{DType, Device, Tensor};
use roll_core::{AdamUpdate, Result};

use super::super::{download, upload};
use crate::ops::adam;

/// First and second moment of `len` elements, on their device.
pub(super) struct DeviceMoments {
    len: usize,
    device: Device,
    /// `None` means zeros.
    values: Option<[Tensor<1>; 2]>,
}

impl DeviceMoments {
    pub(super) fn zeros(len: usize, device: &Device) -> Self {
        Self { len, device: device.clone().without_autodiff(), values: None }
    }

    /// Number of elements.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Copies values in host memory to the device.
    pub(super) fn upload(&self, values: &[f32]) -> Tensor<1> {
        upload(values.to_vec(), &self.device)
    }

    /// Updates the moments and returns the updated parameters. No gradient means zeros; the moments then decay.
    pub(super) fn update(
        &mut self,
        parameters: Tensor<1>,
        gradient: Option<Tensor<1>>,
        update: &AdamUpdate,
    ) -> Tensor<1> {
        let zeros = || Tensor::zeros([self.len], (&self.device, DType::F32));
        let moments = self.values.take().unwrap_or_else(|| [zeros(), zeros()]);
        let (parameters, moments) = adam(parameters, gradient.unwrap_or_else(zeros), moments, *update);
        self.values = Some(moments);
        parameters
    }

    /// Copies the moments to host memory.
    pub(super) fn read(&self) -> Result<[Vec<f32>; 2]> {
        match &self.values {
            Some([first, second]) => Ok([download(first.clone())?, download(second.clone())?]),
            None => Ok([vec![0.0; self.len], vec![0.0; self.len]]),
        }
    }

    /// Replaces the moments; the caller has checked the length.
    pub(super) fn write(&mut self, moments: [&[f32]; 2]) {
        self.values = Some(moments.map(|values| self.upload(values)));
    }
}
