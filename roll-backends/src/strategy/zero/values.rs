//! Reads and writes a model's parameters bucket by bucket.

use roll_core::{Model, ParameterParts, Result};

use super::partition::Bucket;

/// Access to parameters, in parts if the model supports it, else through a copy of all of them.
pub(super) enum Values<'a> {
    Parts(&'a mut dyn ParameterParts),
    Copy { model: &'a mut dyn Model, values: Vec<f32>, starts: Vec<usize>, changed: bool },
}

impl<'a> Values<'a> {
    /// Opens the parameters. Reads all of them if the model has no parts.
    pub(super) fn open(model: &'a mut dyn Model) -> Result<Self> {
        // `parts` is called twice because a returned borrow would also extend into the other branch.
        if model.parts().is_none() {
            let mut values = vec![0.0; model.parameter_count()];
            model.read_parameters(&mut values)?;
            let start = |at: &mut usize, n: usize| Some(std::mem::replace(at, *at + n));
            let starts = model.parameters().iter().map(|s| s.len()).scan(0, start).collect();
            return Ok(Self::Copy { model, values, starts, changed: false });
        }
        match model.parts() {
            Some(parts) => Ok(Self::Parts(parts)),
            None => Err(roll_core::Error::Misuse("the model gave its parts once, and then not".into())),
        }
    }

    /// The parameters of a bucket, without padding.
    pub(super) fn read(&mut self, bucket: &Bucket) -> Result<Vec<f32>> {
        match self {
            Self::Parts(parts) => {
                let mut out = vec![0.0; bucket.len];
                parts.read_part(bucket.specs.clone(), &mut out)?;
                Ok(out)
            }
            Self::Copy { values, starts, .. } => {
                let start = starts[bucket.specs.start];
                Ok(values[start..start + bucket.len].to_vec())
            }
        }
    }

    /// Replaces the parameters of a bucket; a copy is written to the model by [`Values::close`].
    pub(super) fn write(&mut self, bucket: &Bucket, new: &[f32]) -> Result<()> {
        match self {
            Self::Parts(parts) => parts.write_part(bucket.specs.clone(), new),
            Self::Copy { values, starts, changed, .. } => {
                let start = starts[bucket.specs.start];
                values[start..start + bucket.len].copy_from_slice(new);
                *changed = true;
                Ok(())
            }
        }
    }

    /// Writes a changed copy to the model.
    pub(super) fn close(self) -> Result<()> {
        match self {
            Self::Copy { model, values, changed: true, .. } => model.write_parameters(&values),
            _ => Ok(()),
        }
    }
}
