//! AdamW on the parameters' device, tensor by tensor.
//!
//! A LoRA has hundreds of tensors. Each takes one reduction for the norm of the gradient and one kernel for the update.
//! They are queued back to back, and the host waits only once, for the norm.

mod moments;
mod part;

use std::ops::Range;

use burn_tensor::{Device, Tensor};
use roll_core::{AdamUpdate, DevicePart, DeviceUpdates, Error, ParameterSpec, Result};

use super::{ParameterStorage, Parameters, detached, download};
use crate::device::is_gpu;
use crate::optimizer::sum_of_squares;
use crate::sync::lock;
use moments::DeviceMoments;

/// Device updates of several sets of parameters as one flat layout.
struct ParameterUpdates<F> {
    tensors: Vec<UpdatedTensor>,
    /// See [`Parameters::device_updates_after`].
    before_update: F,
}

/// A tensor of the flat layout, with its sum of gradients and its moments.
struct UpdatedTensor {
    tensor: FlatTensor,
    gradient: Option<Tensor<1>>,
    moments: DeviceMoments,
}

/// A tensor of the flat layout.
#[derive(Clone)]
struct FlatTensor {
    parameters: Parameters,
    index: usize,
    len: usize,
}

impl Parameters {
    /// Device updates of `sets`, which are concatenated in the flat layout. `None` if any set is sharded or there are
    /// no tensors.
    pub fn device_updates<'a>(sets: impl IntoIterator<Item = &'a Self>) -> Option<Box<dyn DeviceUpdates>> {
        Self::device_updates_after(|| {}, sets)
    }

    /// [`Parameters::device_updates`] with a function that is called before each update, so that the owner can drop
    /// results that it has computed from the old values.
    pub fn device_updates_after<'a>(
        before_update: impl FnMut() + Send + 'static,
        sets: impl IntoIterator<Item = &'a Self>,
    ) -> Option<Box<dyn DeviceUpdates>> {
        let mut tensors = Vec::new();
        for set in sets {
            if matches!(set.shared.storage, ParameterStorage::Sharded(_)) {
                return None;
            }
            let updated = |(index, spec): (usize, &ParameterSpec)| UpdatedTensor {
                tensor: FlatTensor { parameters: set.clone(), index, len: spec.len() },
                gradient: None,
                moments: DeviceMoments::zeros(spec.len(), set.device()),
            };
            tensors.extend(set.specs().iter().enumerate().map(updated));
        }
        (!tensors.is_empty()).then(|| Box::new(ParameterUpdates { tensors, before_update }) as Box<dyn DeviceUpdates>)
    }

    /// The value of a parameter that is on the device.
    fn value(&self, index: usize) -> Option<Tensor<1>> {
        match &self.shared.storage {
            ParameterStorage::Replicated(values) => lock(values).get(index).cloned(),
            ParameterStorage::Sharded(_) => None,
        }
    }

    /// Replaces the value of a parameter that is on the device. A snapshot keeps the old value.
    fn replace(&self, index: usize, value: Tensor<1>) {
        if let ParameterStorage::Replicated(values) = &self.shared.storage {
            std::sync::Arc::make_mut(&mut lock(values))[index] = value;
        }
    }
}

impl FlatTensor {
    fn device(&self) -> &Device {
        self.parameters.device()
    }

    /// The value, outside any autodiff graph.
    fn value(&self) -> Result<Tensor<1>> {
        let value = self.parameters.value(self.index).map(detached);
        value.ok_or_else(|| Error::Misuse("parameters that are sharded over the ranks have no device".into()))
    }
}

impl UpdatedTensor {
    /// Adds to the sum of gradients.
    fn add(&mut self, gradient: Tensor<1>) {
        self.gradient = Some(match self.gradient.take() {
            Some(sum) => sum + gradient,
            None => gradient,
        });
    }

    /// Updates moments and value, and clears the sum of gradients.
    fn update(&mut self, update: &AdamUpdate) -> Result<()> {
        let value = self.moments.update(self.tensor.value()?, self.gradient.take(), update);
        self.tensor.parameters.replace(self.tensor.index, value);
        Ok(())
    }
}

impl<F: FnMut() + Send> DeviceUpdates for ParameterUpdates<F> {
    fn has_own_memory(&self) -> bool {
        self.tensors.iter().all(|updated| is_gpu(updated.tensor.device()))
    }

    fn accumulate(&mut self) -> Result<()> {
        for updated in &mut self.tensors {
            if let Some(gradient) = updated.tensor.parameters.take_gradient(updated.tensor.index) {
                updated.add(detached(gradient));
            }
        }
        Ok(())
    }

    fn add(&mut self, gradients: &[f32]) -> Result<()> {
        for (updated, part) in split_by_tensor(&mut self.tensors, gradients)? {
            updated.add(updated.moments.upload(part));
        }
        Ok(())
    }

    fn discard(&mut self) {
        self.tensors.iter_mut().for_each(|updated| updated.gradient = None);
    }

    /// The sum of squares of each tensor is f32 on a GPU, with rounding errors in the last digits; sums of tensors are
    /// added in f64.
    fn sum_of_squares(&mut self) -> Result<f64> {
        let gradients: Vec<&Tensor<1>> = self.tensors.iter().filter_map(|updated| updated.gradient.as_ref()).collect();
        if gradients.is_empty() {
            return Ok(0.0);
        }
        let sum_on_host = |gradient: &Tensor<1>| Ok(sum_of_squares(&download(gradient.clone())?));
        if !self.has_own_memory() {
            return gradients.into_iter().map(sum_on_host).sum();
        }
        let sums = gradients.iter().map(|gradient| ((*gradient).clone() * (*gradient).clone()).sum()).collect();
        let sums = download(Tensor::cat(sums, 0))?;
        // Squares of finite numbers may overflow f32, but never f64.
        let finite_sum = |(sum, gradient): (f32, &Tensor<1>)| {
            if sum.is_finite() { Ok(f64::from(sum)) } else { sum_on_host(gradient) }
        };
        sums.into_iter().zip(gradients).map(finite_sum).sum()
    }

    fn update(&mut self, update: &AdamUpdate) -> Result<()> {
        (self.before_update)();
        self.tensors.iter_mut().try_for_each(|updated| updated.update(update))
    }

    fn read_moments(&self) -> Result<[Vec<f32>; 2]> {
        let mut flat_moments = [Vec::new(), Vec::new()];
        for updated in &self.tensors {
            for (flat, moment) in flat_moments.iter_mut().zip(updated.moments.read()?) {
                flat.extend(moment);
            }
        }
        Ok(flat_moments)
    }

    fn write_moments(&mut self, [first, second]: [&[f32]; 2]) -> Result<()> {
        // Only to check the length, before anything changes.
        drop(split_by_tensor(&mut self.tensors, second)?);
        let mut rest = second;
        for (updated, first) in split_by_tensor(&mut self.tensors, first)? {
            let (second, tail) = rest.split_at(first.len());
            rest = tail;
            updated.moments.write([first, second]);
        }
        Ok(())
    }

    fn part(&self, which: Range<usize>) -> Result<Box<dyn DevicePart>> {
        Ok(Box::new(part::UpdatedPart::of(self.tensors.iter().map(|updated| &updated.tensor), which)?))
    }
}

/// Pairs each tensor with its part of the flat layout. Fails if the length differs.
fn split_by_tensor<'a>(
    tensors: &'a mut [UpdatedTensor],
    mut flat: &'a [f32],
) -> Result<impl Iterator<Item = (&'a mut UpdatedTensor, &'a [f32])>> {
    let expected: usize = tensors.iter().map(|updated| updated.tensor.len).sum();
    if flat.len() != expected {
        return Err(Error::shape("flat parameters", format!("[{expected}]"), &[flat.len()]));
    }
    Ok(tensors.iter_mut().map(move |updated| {
        let (head, tail) = flat.split_at(updated.tensor.len);
        flat = tail;
        (updated, head)
    }))
}

#[cfg(test)]
mod tests {
    use roll_core::OptimizerConfig;

    use super::super::upload;
    use super::*;
    use crate::Backend;
    use crate::optimizer::{AdamW, Moments};
    use crate::tests::{assert_near, devices};

    pub(super) fn specs() -> Vec<ParameterSpec> {
        let spec = |name: &str, shape: &[usize]| ParameterSpec { name: name.into(), shape: shape.to_vec() };
        vec![spec("a", &[3]), spec("b", &[17, 5]), spec("c", &[1]), spec("d", &[40, 32])]
    }

    pub(super) fn values(seed: usize) -> Vec<f32> {
        let count: usize = specs().iter().map(ParameterSpec::len).sum();
        (0..count).map(|i| ((i * 7 + seed * 131) as f32 * 0.37).sin()).collect()
    }

    pub(super) fn parts(flat: &[f32]) -> Vec<Vec<f32>> {
        let mut flat = flat;
        let mut part = |spec: &ParameterSpec| {
            let (head, tail) = flat.split_at(spec.len());
            flat = tail;
            head.to_vec()
        };
        specs().iter().map(&mut part).collect()
    }

    /// Adds gradients as pullbacks do; the third tensor has none in odd steps.
    fn add_gradients(parameters: &Parameters, step: usize) -> Vec<f32> {
        let mut all = parts(&values(step));
        for (index, gradient) in all.iter_mut().enumerate() {
            if index == 2 && step % 2 == 1 {
                gradient.fill(0.0);
            } else {
                parameters.add_gradient(index, upload(gradient.clone(), parameters.device()));
            }
        }
        all.concat()
    }

    #[test]
    fn device_updates_match_host_updates() {
        let config = OptimizerConfig { weight_decay: 0.1, ..OptimizerConfig::default() };
        for (backend, device) in devices() {
            let optimizer = AdamW::new(&config);
            let mut host = values(0);
            let mut moments = Moments::zeros(host.len());
            let parameters = Parameters::new(specs(), parts(&host), &device);
            let mut updates = Parameters::device_updates([&parameters]).unwrap();
            for step in 1..=5 {
                let before_update = parameters.snapshot();
                let gradients = add_gradients(&parameters, step);
                updates.accumulate().unwrap();
                let scaled: Vec<f32> = gradients.iter().map(|g| g * 0.5).collect();
                let (found, expected) = (updates.sum_of_squares().unwrap(), sum_of_squares(&gradients));
                assert!((found - expected).abs() <= 1e-6 * expected, "{backend}: {found} {expected}");
                optimizer.update(&mut host, &scaled, &mut moments, 1e-2);
                updates.update(&optimizer.coefficients(step as u64, 1e-2, [0.5, 1.0])).unwrap();
                let mut device_values = vec![0.0; host.len()];
                parameters.read(&mut device_values).unwrap();
                let [first, second] = updates.read_moments().unwrap();
                let (m, v) = (&moments.exp_avg, &moments.exp_avg_sq);
                for (name, found, expected) in
                    [("value", &device_values, &host), ("first", &first, m), ("second", &second, v)]
                {
                    let what = format!("{name} on {backend}, step {step}");
                    match backend {
                        Backend::Flex => assert_eq!(found, expected, "{what}"),
                        _ => assert_near(&what, found, expected),
                    }
                }
                // A pass recorded before still reads the old values.
                let segment = before_update.segment("").unwrap();
                let (_, _, old) = segment.get("a").unwrap();
                assert_ne!(download(old.clone()).unwrap(), device_values[..3]);
                assert_eq!(updates.sum_of_squares().unwrap(), 0.0);
            }
        }
    }

    #[test]
    fn host_gradients_are_added_and_discarded() {
        for (backend, device) in devices() {
            let parameters = Parameters::new(specs(), parts(&values(0)), &device);
            let mut updates = Parameters::device_updates([&parameters]).unwrap();
            let gradients = add_gradients(&parameters, 2);
            updates.accumulate().unwrap();
            updates.add(&gradients).unwrap();
            let expected = 4.0 * sum_of_squares(&gradients);
            let found = updates.sum_of_squares().unwrap();
            assert!((found - expected).abs() <= 1e-6 * expected, "{backend}: {found} {expected}");
            updates.discard();
            assert_eq!(updates.sum_of_squares().unwrap(), 0.0);
            assert!(updates.add(&gradients[1..]).is_err());
        }
    }

    #[test]
    fn norms_are_finite_exactly_for_finite_gradients() {
        for (backend, device) in devices() {
            let parameters = Parameters::new(specs(), parts(&values(0)), &device);
            let mut updates = Parameters::device_updates([&parameters]).unwrap();
            let mut gradients = vec![0.0; values(0).len()];
            gradients[4] = 1e30;
            updates.add(&gradients).unwrap();
            assert!((updates.sum_of_squares().unwrap() / 1e60 - 1.0).abs() < 1e-6, "{backend}");
            gradients[4] = f32::INFINITY;
            updates.add(&gradients).unwrap();
            assert!(!updates.sum_of_squares().unwrap().is_finite(), "{backend}");
        }
    }

    #[test]
    fn training_resumes_from_written_moments() {
        let optimizer = AdamW::new(&OptimizerConfig::default());
        for (backend, device) in devices() {
            let run = |stopped: bool| {
                let mut parameters = Parameters::new(specs(), parts(&values(0)), &device);
                let mut updates = Parameters::device_updates([&parameters]).unwrap();
                for step in 1..=4 {
                    if stopped && step == 3 {
                        let mut flat = vec![0.0; values(0).len()];
                        parameters.read(&mut flat).unwrap();
                        let [first, second] = updates.read_moments().unwrap();
                        parameters = Parameters::new(specs(), parts(&flat), &device);
                        updates = Parameters::device_updates([&parameters]).unwrap();
                        assert!(updates.write_moments([&first[1..], &second]).is_err());
                        updates.write_moments([&first, &second]).unwrap();
                    }
                    add_gradients(&parameters, step);
                    updates.accumulate().unwrap();
                    updates.update(&optimizer.coefficients(step as u64, 1e-2, [1.0; 2])).unwrap();
                }
                let mut flat = vec![0.0; values(0).len()];
                parameters.read(&mut flat).unwrap();
                (flat, updates.read_moments().unwrap())
            };
            assert_eq!(run(false), run(true), "{backend}");
        }
    }
}
