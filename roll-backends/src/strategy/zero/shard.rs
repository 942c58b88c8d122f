//! AdamW's moments of a shard, on the parameters' device or in host memory.

use std::borrow::Cow;

use roll_core::{AdamUpdate, DevicePart, Result};

use crate::optimizer::update;

/// First and second moment of a rank's elements of a bucket, without padding. They are updated where they are.
pub(super) enum Shard {
    Host([Vec<f32>; 2]),
    Device(Box<dyn DevicePart>),
}

impl Shard {
    /// Zero moments of `count` elements in host memory.
    pub(super) fn in_host_memory(count: usize) -> Self {
        Self::Host([vec![0.0; count], vec![0.0; count]])
    }

    /// Updates the moments by `gradients`, and returns the updated parameters. `parameters` reads them into host
    /// memory, if they are updated there.
    pub(super) fn updated(
        &mut self,
        parameters: impl FnOnce() -> Result<Vec<f32>>,
        gradients: &[f32],
        by: &AdamUpdate,
    ) -> Result<Vec<f32>> {
        match self {
            Self::Host(moments) => {
                let mut parameters = parameters()?;
                update(by, &mut parameters, gradients, moments.each_mut().map(Vec::as_mut_slice));
                Ok(parameters)
            }
            Self::Device(part) => part.updated(gradients, by),
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
