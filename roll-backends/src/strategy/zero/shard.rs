//! AdamW's moments of a shard, on the parameters' device or in host memory.

use std::borrow::Cow;

use roll_core::{AdamUpdate, DevicePart, Result};

use crate::optimizer::update;

/// First and second moment of a rank's elements of a bucket, without padding. The update runs where the moments are.
pub(super) enum Shard {
    /// First and second moment in host memory.
    Host([Vec<f32>; 2]),
    /// The part of the model's device updates that has these moments.
    Device(Box<dyn DevicePart>),
}

impl Shard {
    /// Zero moments of `count` elements in host memory.
    pub(super) fn in_host_memory(count: usize) -> Self {
        Self::Host([vec![0.0; count], vec![0.0; count]])
    }

    /// Updates the moments by `gradients`, and returns the updated parameters. `read_parameters` reads the parameters
    /// into host memory; it is called only if they are updated there.
    pub(super) fn updated(
        &mut self,
        read_parameters: impl FnOnce() -> Result<Vec<f32>>,
        gradients: &[f32],
        coefficients: &AdamUpdate,
    ) -> Result<Vec<f32>> {
        match self {
            Self::Host(moments) => {
                let mut parameters = read_parameters()?;
                update(coefficients, &mut parameters, gradients, moments.each_mut().map(Vec::as_mut_slice));
                Ok(parameters)
            }
            Self::Device(part) => part.updated(gradients, coefficients),
        }
    }

    /// The moments, in host memory.
    pub(super) fn read(&self) -> Result<[Cow<'_, [f32]>; 2]> {
        Ok(match self {
            Self::Host(moments) => moments.each_ref().map(|moment| moment.as_slice().into()),
            Self::Device(part) => part.read_moments()?.map(Cow::Owned),
        })
    }

    /// Replaces the moments.
    pub(super) fn write(&mut self, new: [Vec<f32>; 2]) -> Result<()> {
        match self {
            Self::Host(moments) => {
                *moments = new;
                Ok(())
            }
            Self::Device(part) => part.write_moments(new.each_ref().map(Vec::as_slice)),
        }
    }
}
