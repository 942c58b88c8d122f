//! The trainable parameters of all experts as one flat vector, accessed in parts.

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
        let expected = count(self.specs.get(which.clone()).unwrap_or_default());
        if found != expected {
            return Err(Error::shape("part of the parameters", format!("[{expected}]"), &[found]));
        }
        let (mut spans, mut first, mut at) = (Vec::new(), 0, 0);
        for parameters in self.trained() {
            let specs = parameters.specs();
            let positions = which.start.max(first) - first..which.end.min(first + specs.len()).max(first) - first;
            first += specs.len();
            if positions.start < positions.end {
                let values = at..at + count(&specs[positions.clone()]);
                at = values.end;
                spans.push(Span { parameters, positions, values });
            }
        }
        Ok(spans)
    }

    /// Bytes of the trainable parameters in this process: its own shard if they are sharded between ranks.
    pub fn parameter_bytes(&self) -> usize {
        self.trained().map(Parameters::bytes).sum()
    }
}

fn count(specs: &[ParameterSpec]) -> usize {
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
        for Span { parameters, positions, values: own } in self.spans(which, values.len())? {
            parameters.write_part(positions, &values[own])?;
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
            parameters.deliver_gradients(sink.clone(), first);
            first += parameters.specs().len();
        }
        true
    }

    fn device_updates(&self) -> Option<Box<dyn DeviceUpdates>> {
        Parameters::device_updates(self.trained())
    }
}
