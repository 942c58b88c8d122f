//! [`ParameterParts`] across the boundary. Its methods are further methods of the object of a model.

use std::ops::Range;
use std::sync::Arc;

use super::remote::remote;
use super::remote_model::RemoteModel;
use crate::{GradientSink, ParameterParts};

remote! {
    trait ParameterParts for RemoteModel {
        fn read_part(&self, which: Range<usize>, out: &mut [f32]) -> Result<()>;
        fn write_part(&mut self, which: Range<usize>, values: &[f32]) -> Result<()>;
        fn take_gradients_part(&mut self, which: Range<usize>, add_into: &mut [f32]) -> Result<()>;
        fn deliver_gradients(&mut self, sink: Option<Arc<dyn GradientSink>>) -> bool { false }
    }
}
