//! A model that consists of its parameters only, for the tests of strategies: those of this crate and those of processes.

// Some tests use only a part of the model.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use roll_core::{Error, GradientSink, Model, ParameterParts, ParameterSpec, Result, StateDict};

/// Number of samples per step on all ranks; [`FlatModel::pull`] numbers them across steps.
pub const BATCH: usize = 4;

/// Parameters, and gradients that the test sets or [`FlatModel::pull`] makes.
pub struct FlatModel {
    pub specs: Vec<ParameterSpec>,
    pub values: Vec<f32>,
    pub gradients: Vec<f32>,
    /// Whether the model returns its parameters in parts.
    parts: bool,
    /// Called during a pull with the position of each parameter whose gradient is complete.
    pub during_pull: Option<Box<dyn FnMut(usize) + Send>>,
    sink: Option<Arc<dyn GradientSink>>,
}

impl FlatModel {
    pub fn new(shapes: &[(&str, &[usize])], value: impl Fn(usize) -> f32) -> Self {
        let spec = |(name, shape): &(&str, &[usize])| ParameterSpec { name: (*name).into(), shape: shape.to_vec() };
        let specs: Vec<_> = shapes.iter().map(spec).collect();
        let n = specs.iter().map(ParameterSpec::len).sum();
        let values = (0..n).map(value).collect();
        Self { specs, values, gradients: vec![0.0; n], parts: true, during_pull: None, sink: None }
    }

    /// Creates a model of `a`, `[2]`, and `b`, `[1, 2]`, with the values 1 to 4.
    pub fn two() -> Self {
        Self::new(&[("a", &[2]), ("b", &[1, 2])], |i| 1.0 + i as f32)
    }

    /// Creates a model of six tensors with 1 to 576 values.
    pub fn springs() -> Self {
        let shapes: [(&str, &[usize]); 6] = [
            ("layer0", &[3, 7]),
            ("layer1", &[5]),
            ("layer2", &[1]),
            ("layer3", &[64, 9]),
            ("layer4", &[2]),
            ("layer5", &[31]),
        ];
        Self::new(&shapes, |i| (i as f32 * 0.37).sin())
    }

    pub fn with_parts(self, parts: bool) -> Self {
        Self { parts, ..self }
    }

    pub fn with_values(self, values: &[f32]) -> Self {
        Self { values: values.to_vec(), ..self }
    }

    /// Adds the gradient of one sample, which pulls every parameter towards its own point:
    /// `sum_i w_i (p_i - c_i)^2 / 2`. Like a network, it runs from the last tensor to the first.
    pub fn pull(&mut self, step: u64, sample: usize) {
        let key = (step * BATCH as u64) as f32 + sample as f32;
        for position in (0..self.specs.len()).rev() {
            let at = self.flat(position..position + 1);
            for i in at.clone() {
                let weight = 0.1 + (i as f32 * 1.7).cos().abs();
                self.gradients[i] += weight * (self.values[i] - (i as f32 * 0.11 + key * 0.77).cos());
            }
            if let Some(sink) = &self.sink
                && sink.deliver(position, &self.gradients[at.clone()])
            {
                self.gradients[at].fill(0.0);
            }
            if let Some(during_pull) = &mut self.during_pull {
                during_pull(position);
            }
        }
    }

    fn flat(&self, which: Range<usize>) -> Range<usize> {
        let upto = |i: usize| self.specs[..i].iter().map(ParameterSpec::len).sum::<usize>();
        upto(which.start)..upto(which.end)
    }
}

impl Model for FlatModel {
    fn parameters(&self) -> &[ParameterSpec] {
        &self.specs
    }
    fn read_parameters(&self, out: &mut [f32]) -> Result<()> {
        out.copy_from_slice(&self.values);
        Ok(())
    }
    fn write_parameters(&mut self, values: &[f32]) -> Result<()> {
        self.values.copy_from_slice(values);
        Ok(())
    }
    fn take_gradients(&mut self, add_into: &mut [f32]) -> Result<()> {
        add_into.iter_mut().zip(&mut self.gradients).for_each(|(a, g)| *a += std::mem::take(g));
        Ok(())
    }
    fn parts(&mut self) -> Option<&mut dyn ParameterParts> {
        if self.parts { Some(self) } else { None }
    }
    fn export_adapter(&self) -> Result<BTreeMap<String, StateDict>> {
        Ok(BTreeMap::new())
    }
    fn import_adapter(&mut self, _files: &BTreeMap<String, StateDict>) -> Result<()> {
        Err(Error::Unsupported("a flat model has no adapter".into()))
    }
}

impl ParameterParts for FlatModel {
    fn read_part(&self, which: Range<usize>, out: &mut [f32]) -> Result<()> {
        out.copy_from_slice(&self.values[self.flat(which)]);
        Ok(())
    }
    fn write_part(&mut self, which: Range<usize>, values: &[f32]) -> Result<()> {
        let at = self.flat(which);
        self.values[at].copy_from_slice(values);
        Ok(())
    }
    fn take_gradients_part(&mut self, which: Range<usize>, add_into: &mut [f32]) -> Result<()> {
        let at = self.flat(which);
        add_into.iter_mut().zip(&mut self.gradients[at]).for_each(|(a, g)| *a += std::mem::take(g));
        Ok(())
    }
    fn deliver_gradients(&mut self, sink: Option<Arc<dyn GradientSink>>) -> bool {
        self.sink = sink;
        true
    }
}
