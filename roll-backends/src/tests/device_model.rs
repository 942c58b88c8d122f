//! A toy model that consists of parameters on a device, for the tests of strategies.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use burn_tensor::{Device, Tensor, TensorData};
use roll_core::{DeviceUpdates, GradientSink, Model, ParameterParts, ParameterSpec, Result, StateDict};

use crate::Parameters;

pub(crate) struct DeviceModel {
    pub(crate) parameters: Parameters,
    /// Whether the model offers device updates.
    pub(crate) updates: bool,
}

impl DeviceModel {
    /// A model with the tensors `a` `[4, 8]` and `b` `[3]`.
    pub(crate) fn new(device: &Device) -> Self {
        Self::of(&[("a", &[4, 8]), ("b", &[3])], device)
    }

    pub(crate) fn of(shapes: &[(&str, &[usize])], device: &Device) -> Self {
        let spec = |(name, shape): &(&str, &[usize])| ParameterSpec { name: (*name).into(), shape: shape.to_vec() };
        let specs: Vec<_> = shapes.iter().map(spec).collect();
        let values = specs.iter().map(|s| (0..s.len()).map(|i| (i as f32 * 0.37).sin()).collect()).collect();
        Self { parameters: Parameters::new(specs, values, device), updates: true }
    }

    /// Adds the gradients of one backward pass; as in a network, the last tensor comes first.
    pub(crate) fn pull(&self, number: usize) {
        for (index, spec) in self.parameters.specs().iter().enumerate().rev() {
            let values: Vec<f32> = (0..spec.len()).map(|i| ((i + 7 * number) as f32 * 0.61).cos()).collect();
            let data = TensorData::new(values, [spec.len()]);
            self.parameters.add_gradient(index, Tensor::from_data(data, self.parameters.device()));
        }
    }

    pub(crate) fn values(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.parameter_count()];
        self.read_parameters(&mut values).unwrap();
        values
    }
}

impl Model for DeviceModel {
    fn parameters(&self) -> &[ParameterSpec] {
        self.parameters.specs()
    }
    fn read_parameters(&self, out: &mut [f32]) -> Result<()> {
        self.parameters.read(out)
    }
    fn write_parameters(&mut self, values: &[f32]) -> Result<()> {
        self.parameters.write(values)
    }
    fn take_gradients(&mut self, add_into: &mut [f32]) -> Result<()> {
        self.parameters.take_gradients(add_into)
    }
    fn parts(&mut self) -> Option<&mut dyn ParameterParts> {
        Some(self)
    }
    fn export_adapter(&self) -> Result<BTreeMap<String, StateDict>> {
        Ok(BTreeMap::new())
    }
    fn import_adapter(&mut self, _files: &BTreeMap<String, StateDict>) -> Result<()> {
        Ok(())
    }
}

impl ParameterParts for DeviceModel {
    fn read_part(&self, which: Range<usize>, out: &mut [f32]) -> Result<()> {
        self.parameters.read_part(which, out)
    }
    fn write_part(&mut self, which: Range<usize>, values: &[f32]) -> Result<()> {
        self.parameters.write_part(which, values)
    }
    fn take_gradients_part(&mut self, which: Range<usize>, add_into: &mut [f32]) -> Result<()> {
        self.parameters.take_gradients_part(which, add_into)
    }
    fn deliver_gradients(&mut self, sink: Option<Arc<dyn GradientSink>>) -> bool {
        self.parameters.deliver_gradients(sink, 0, None);
        true
    }
    fn device_updates(&self) -> Option<Box<dyn DeviceUpdates>> {
        Parameters::device_updates([&self.parameters]).filter(|_| self.updates)
    }
}
