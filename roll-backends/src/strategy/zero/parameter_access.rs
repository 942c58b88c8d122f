//! Reads and writes a model's parameters bucket by bucket, whether or not the model gives access to single parameters.

use roll_core::{Model, ParameterParts, Result};

use super::partition::Bucket;

/// Access to parameters, in parts if the model supports it, else through a copy of all of them.
pub(super) enum ParameterAccess<'a> {
    Parts(&'a mut dyn ParameterParts),
    /// A copy of all parameters.
    ///
    /// `values` has the flat layout. `is_changed` is true if it may differ from the model.
    Copy {
        model: &'a mut dyn Model,
        values: Vec<f32>,
        is_changed: bool,
    },
}

impl<'a> ParameterAccess<'a> {
    /// Opens the parameters. Reads all of them if the model has no parts.
    pub(super) fn open(model: &'a mut dyn Model) -> Result<Self> {
        // `parts` is called twice. The borrow checker would extend the borrow of a single call to both branches,
        // because one of them returns the borrowed value.
        if model.parts().is_none() {
            let mut values = vec![0.0; model.parameter_count()];
            model.read_parameters(&mut values)?;
            return Ok(Self::Copy { model, values, is_changed: false });
        }
        let parts = model.parts();
        parts.map(Self::Parts).ok_or_else(|| roll_core::Error::Misuse("the model offered parts only once".into()))
    }

    /// The parameters of a bucket, without padding.
    pub(super) fn read(&mut self, bucket: &Bucket) -> Result<Vec<f32>> {
        match self {
            Self::Parts(parts) => {
                let mut out = vec![0.0; bucket.len];
                parts.read_part(bucket.specs.clone(), &mut out)?;
                Ok(out)
            }
            Self::Copy { values, .. } => Ok(values[bucket.flat_at..bucket.flat_at + bucket.len].to_vec()),
        }
    }

    /// Replaces the parameters of a bucket; a copy is written to the model by [`ParameterAccess::close`].
    pub(super) fn write(&mut self, bucket: &Bucket, new: &[f32]) -> Result<()> {
        match self {
            Self::Parts(parts) => parts.write_part(bucket.specs.clone(), new),
            Self::Copy { values, is_changed, .. } => {
                values[bucket.flat_at..bucket.flat_at + bucket.len].copy_from_slice(new);
                *is_changed = true;
                Ok(())
            }
        }
    }

    /// Writes a changed copy to the model.
    pub(super) fn close(self) -> Result<()> {
        match self {
            Self::Copy { model, values, is_changed: true } => model.write_parameters(&values),
            _ => Ok(()),
        }
    }
}
