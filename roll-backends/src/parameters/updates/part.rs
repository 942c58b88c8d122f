//! AdamW on a part of the flat layout, which may begin and end inside tensors.

use std::ops::Range;

use burn_tensor::Tensor;
use roll_core::{AdamUpdate, DevicePart, Error, Result};

use super::super::download;
use super::FlatTensor;
use super::moments::DeviceMoments;

/// The elements of several tensors, concatenated. One kernel updates them all; their gradients are copied to the device
/// at once, and the updated values to the host.
pub(super) struct UpdatedPart {
    ranges: Vec<TensorRange>,
    moments: DeviceMoments,
}

/// A non-empty range of elements of a tensor.
struct TensorRange {
    tensor: FlatTensor,
    elements: Range<usize>,
}

impl UpdatedPart {
    /// The elements `which` of the concatenated `tensors`. Fails if the range is out of bounds.
    pub(super) fn of<'a>(tensors: impl Iterator<Item = &'a FlatTensor> + Clone, which: Range<usize>) -> Result<Self> {
        let all: usize = tensors.clone().map(|tensor| tensor.len).sum();
        let is_within = which.start <= which.end && which.end <= all;
        let Some(first) = tensors.clone().next().filter(|_| is_within) else {
            return Err(Error::Misuse(format!("the range {which:?} is not within the {all} flat parameters")));
        };
        let moments = DeviceMoments::zeros(which.len(), first.device());
        let (mut ranges, mut tensor_at) = (Vec::new(), 0);
        for tensor in tensors {
            // The intersection of `which` with the tensor, counted from the tensor's first element.
            let in_tensor = |position: usize| position.clamp(tensor_at, tensor_at + tensor.len) - tensor_at;
            let (start, end) = (in_tensor(which.start), in_tensor(which.end));
            if start < end {
                ranges.push(TensorRange { tensor: tensor.clone(), elements: start..end });
            }
            tensor_at += tensor.len;
        }
        Ok(Self { ranges, moments })
    }

    fn check_len(&self, found: usize) -> Result<()> {
        if found != self.moments.len() {
            let expected = format!("[{}]", self.moments.len());
            return Err(Error::shape("a part of the flat parameters", expected, &[found]));
        }
        Ok(())
    }

    /// The parameters of the part, concatenated.
    fn value(&self) -> Result<Tensor<1>> {
        let mut values = self.ranges.iter().map(TensorRange::value).collect::<Result<Vec<_>>>()?;
        Ok(match values.len() {
            1 => values.remove(0),
            _ => Tensor::cat(values, 0),
        })
    }
}

impl TensorRange {
    fn value(&self) -> Result<Tensor<1>> {
        let value = self.tensor.value()?;
        if self.elements.len() == self.tensor.len {
            return Ok(value);
        }
        Ok(value.narrow(0, self.elements.start, self.elements.len()))
    }
}

impl DevicePart for UpdatedPart {
    fn updated(&mut self, gradients: &[f32], update: &AdamUpdate) -> Result<Vec<f32>> {
        self.check_len(gradients.len())?;
        if gradients.is_empty() {
            return Ok(Vec::new());
        }
        let (value, gradient) = (self.value()?, self.moments.upload(gradients));
        download(self.moments.update(value, Some(gradient), update))
    }

    fn read_moments(&self) -> Result<[Vec<f32>; 2]> {
        self.moments.read()
    }

    fn write_moments(&mut self, moments: [&[f32]; 2]) -> Result<()> {
        moments.iter().try_for_each(|values| self.check_len(values.len()))?;
        if self.moments.len() > 0 {
            self.moments.write(moments);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use roll_core::OptimizerConfig;

    use super::super::tests::{parts, specs, values};
    use super::*;
    use crate::optimizer::AdamW;
    use crate::tests::{assert_near, devices};
    use crate::{Backend, Parameters};

    #[test]
    fn parts_are_updated_like_the_whole() {
        let config = OptimizerConfig { weight_decay: 0.1, ..OptimizerConfig::default() };
        let optimizer = AdamW::new(&config);
        let all = values(0).len();
        for (backend, device) in devices() {
            for cuts in [vec![0, all], vec![0, 2, 3, 50, 50, 89, 100, all], vec![0, 88, 89, all]] {
                let whole = Parameters::new(specs(), parts(&values(0)), &device);
                let sharded = Parameters::new(specs(), parts(&values(0)), &device);
                let mut updates = Parameters::device_updates([&whole]).unwrap();
                let split_updates = Parameters::device_updates([&sharded]).unwrap();
                let cut = |bounds: &[usize]| split_updates.part(bounds[0]..bounds[1]).unwrap();
                let mut part_updates: Vec<Box<dyn DevicePart>> = cuts.windows(2).map(cut).collect();
                for step in 1..=3 {
                    let gradients = values(step);
                    let update = optimizer.coefficients(step as u64, 1e-2, [1.0; 2]);
                    updates.add(&gradients).unwrap();
                    updates.update(&update).unwrap();
                    let mut found = Vec::new();
                    for (part, bounds) in part_updates.iter_mut().zip(cuts.windows(2)) {
                        found.extend(part.updated(&gradients[bounds[0]..bounds[1]], &update).unwrap());
                    }
                    sharded.write(&found).unwrap();
                    let mut expected = vec![0.0; all];
                    whole.read(&mut expected).unwrap();
                    let moments = updates.read_moments().unwrap();
                    for (which, expected) in moments.iter().chain([&expected]).enumerate() {
                        let read = |part: &mut Box<dyn DevicePart>| part.read_moments().unwrap()[which].clone();
                        let found = match which {
                            2 => found.clone(),
                            _ => part_updates.iter_mut().flat_map(read).collect(),
                        };
                        match backend {
                            Backend::Flex => assert_eq!(&found, expected, "{cuts:?}, step {step}"),
                            _ => assert_near(&format!("{backend}, {cuts:?}, step {step}"), &found, expected),
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn rejects_wrong_lengths_and_accepts_empty_parts() {
        let optimizer = AdamW::new(&OptimizerConfig::default());
        let update = optimizer.coefficients(1, 1e-2, [1.0; 2]);
        for (_, device) in devices() {
            let parameters = Parameters::new(specs(), parts(&values(0)), &device);
            let updates = Parameters::device_updates([&parameters]).unwrap();
            let all = values(0).len();
            assert!(updates.part(0..all + 1).is_err());
            let mut part = updates.part(1..5).unwrap();
            assert!(part.updated(&[0.0; 3], &update).is_err());
            assert!(part.write_moments([&[0.0; 4], &[0.0; 5]]).is_err());
            part.write_moments([&[0.5; 4], &[0.25; 4]]).unwrap();
            assert_eq!(part.read_moments().unwrap(), [vec![0.5; 4], vec![0.25; 4]]);
            let mut empty = updates.part(all..all).unwrap();
            assert_eq!(empty.updated(&[], &update).unwrap(), Vec::<f32>::new());
            empty.write_moments([&[], &[]]).unwrap();
            assert!(empty.read_moments().unwrap().iter().all(Vec::is_empty));
        }
    }
}
