//! The trainable parameters of all experts as one flat vector, which callers read and write in parts. A part is a range
//! of parameters and may include parameters of both experts.

use std::ops::Range;
use std::sync::Arc;

use roll_backends::Parameters;
use roll_core::{DeviceUpdates, Error, GradientSink, ParameterParts, ParameterSpec, Result};

use super::model::Wan;

/// The parameters of one expert within a part.
struct Span<'a> {
    parameters: &'a Parameters,
    /// Range of parameters within the expert.
    positions: Range<usize>,
    /// Range of their values within the part.
    values: Range<usize>,
}

impl Wan {
    /// The trainable parameters of each expert that has any.
    fn trained(&self) -> impl Iterator<Item = &Parameters> {
        self.experts.iter().filter_map(|expert| expert.dit.parameters())
    }

    /// Splits the parameters `which` by expert. Fails unless they have `found` values in total.
    fn spans(&self, which: Range<usize>, found: usize) -> Result<Vec<Span<'_>>> {
        let expected = value_count(self.specs.get(which.clone()).unwrap_or_default());
        if found != expected {
            return Err(Error::shape("part of the parameters", format!("[{expected}]"), &[found]));
        }
        // The number of parameters of the experts before, and the number of values in the spans before.
        let (mut first_of_expert, mut values_before) = (0, 0);
        let mut spans = Vec::new();
        for parameters in self.trained() {
            let specs = parameters.specs();
            let end_of_expert = first_of_expert + specs.len();
            let start = which.start.max(first_of_expert) - first_of_expert;
            let end = which.end.min(end_of_expert).max(first_of_expert) - first_of_expert;
            first_of_expert = end_of_expert;
            if start < end {
                let values = values_before..values_before + value_count(&specs[start..end]);
                values_before = values.end;
                spans.push(Span { parameters, positions: start..end, values });
            }
        }
        Ok(spans)
    }

    /// Bytes of the trainable parameters in this process. If they are sharded between ranks, bytes of this rank's
    /// shard.
    pub fn parameter_bytes(&self) -> usize {
        self.trained().map(Parameters::bytes).sum()
    }
}

fn value_count(specs: &[ParameterSpec]) -> usize {
    specs.iter().map(ParameterSpec::len).sum()
}

impl ParameterParts for Wan {
    fn read_part(&self, which: Range<usize>, out: &mut [f32]) -> Result<()> {
        for Span { parameters, positions, values } in self.spans(which, out.len())? {
            parameters.read_part(positions, &mut out[values])?;
        }
        Ok(())
    }

    fn write_part(&mut self, which: Range<usize>, values: &[f32]) -> Result<()> {
        for Span { parameters, positions, values: range } in self.spans(which, values.len())? {
            parameters.write_part(positions, &values[range])?;
        }
        Ok(())
    }

    fn take_gradients_part(&mut self, which: Range<usize>, add_into: &mut [f32]) -> Result<()> {
        for Span { parameters, positions, values } in self.spans(which, add_into.len())? {
            parameters.take_gradients_part(positions, &mut add_into[values])?;
        }
        Ok(())
    }

    fn deliver_gradients(&mut self, sink: Option<Arc<dyn GradientSink>>) -> bool {
        let mut first = 0;
        for parameters in self.trained() {
            parameters.deliver_gradients(sink.clone(), first, None);
            first += parameters.specs().len();
        }
        true
    }

    fn device_updates(&self) -> Option<Box<dyn DeviceUpdates>> {
        Parameters::device_updates(self.trained())
    }
}
