//! [`ParameterParts`] across the boundary.

use std::ops::Range;
use std::sync::Arc;

use crate::abi::RollPartsTable;

use super::crossing::crossing;
use super::foreign::{Calls, Foreign};
use super::foreign_model::{ForeignModel, Target};
use crate::{Error, GradientSink, ParameterParts, Result};

crossing! {
    ParameterParts for ForeignModel, table RollPartsTable of Target, through of {
        ref fn read_part(which: Range<usize>, out: &mut [f32]);
        mut fn write_part(which: Range<usize>, values: &[f32]);
        mut fn take_gradients_part(which: Range<usize>, add_into: &mut [f32]);
        mut fn deliver_gradients(sink: Option<Arc<dyn GradientSink>>) -> bool, or false, absent false;
    }
    by hand [] {}
}

fn of(model: &mut Target) -> Result<&mut dyn ParameterParts> {
    model.parts().ok_or_else(|| Error::Misuse("this model has no parts".into()))
}

impl Calls<RollPartsTable> for ForeignModel {
    fn callee(&self) -> (&Foreign, Option<&RollPartsTable>) {
        (&self.object, self.parts.as_ref())
    }
}
