//! Gradient checkpointing over chains of segments.
//!
//! A deep network is a chain of segments. The forward pass runs the segments outside autodiff and keeps the input of
//! each. The backward pass recomputes one segment at a time under autodiff, from the last to the first, and drops its
//! graph before the next, so that the activations of at most one segment exist at a time.

use std::sync::Arc;

use burn_tensor::DType;
use roll_core::{Grad, Result};

use crate::offload::Offloaded;
use crate::{NdTensor, Parameters, Tape, vjp};

/// One step of a chain, e.g. a transformer block.
pub trait Segment: Send + Sync {
    /// Returns the next state. `shared` holds tensors that every segment of the chain reads, e.g. text embeddings.
    fn forward(&self, state: &NdTensor, shared: &[NdTensor], tape: &Tape) -> Result<NdTensor>;
}

/// The values that a recorded chain keeps between its forward and its backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Memory {
    /// Every activation, as plain autodiff does: nothing is recomputed.
    Hold,
    /// Segment inputs, on the device.
    #[default]
    Recompute,
    /// Segment inputs, in host memory: at most two of them are on the device at a time.
    Offload,
}

/// A network as a list of segments.
pub struct Chain {
    segments: Vec<Arc<dyn Segment>>,
    input_dtype: DType,
}

/// The record of a [`Chain::forward`] for the backward pass.
pub struct ChainRecord {
    /// The segments in order, with their checkpoints.
    steps: Vec<(Arc<dyn Segment>, Checkpointed)>,
    shared: Vec<NdTensor>,
    tracks_shared: bool,
    parameters: Option<Parameters>,
}

/// The checkpoint of one segment.
enum Checkpointed {
    /// The whole graph: nothing is recomputed.
    Graph(vjp::Recorded),
    /// The segment's input, on the device.
    Input(NdTensor),
    /// The segment's input, in host memory.
    HostInput(Offloaded),
}

impl Chain {
    /// Creates a chain that runs `segments` in order.
    pub fn new(segments: Vec<Arc<dyn Segment>>) -> Self {
        Self { segments, input_dtype: DType::F32 }
    }

    /// Stores segment inputs as `dtype` (default f32). bf16 halves their memory; the backward pass then recomputes from
    /// inputs that were rounded once, which matters little if products round their operands to bf16 anyway.
    pub fn with_input_dtype(self, dtype: DType) -> Self {
        Self { input_dtype: dtype, ..self }
    }

    /// Runs the chain and returns its last state. If `grad` is [`Grad::Record`], also returns the record for the
    /// backward pass. `tracks_shared` makes the backward pass return the cotangents of `shared` too, which costs one
    /// accumulation per segment. The backward pass adds the gradients of trainable parameters to `parameters`.
    pub fn forward(
        &self,
        state: NdTensor,
        shared: Vec<NdTensor>,
        grad: Grad,
        memory: Memory,
        tracks_shared: bool,
        parameters: Option<Parameters>,
    ) -> Result<(NdTensor, Option<ChainRecord>)> {
        let mut state = state;
        let mut steps = Vec::new();
        for segment in &self.segments {
            if grad.is_on() && memory == Memory::Hold {
                let trains_parameters = parameters.is_some();
                let (next, recorded) =
                    run_recorded(segment.as_ref(), &state, &shared, tracks_shared, trains_parameters)?;
                steps.push((segment.clone(), Checkpointed::Graph(recorded)));
                state = next;
                continue;
            }
            if grad.is_on() {
                // The previous input was copied to the host while its segment ran.
                if let Some((_, Checkpointed::HostInput(previous))) = steps.last_mut() {
                    previous.release()?;
                }
                let checkpoint = match memory {
                    Memory::Offload => Checkpointed::HostInput(Offloaded::new(state.cast(self.input_dtype))?),
                    // `Hold` was handled above.
                    Memory::Recompute | Memory::Hold => Checkpointed::Input(state.cast(self.input_dtype)),
                };
                steps.push((segment.clone(), checkpoint));
            }
            state = segment.forward(&state, &shared, &Tape::off())?.untracked();
        }
        let record = grad.is_on().then_some(ChainRecord { steps, shared, tracks_shared, parameters });
        Ok((state, record))
    }
}

impl ChainRecord {
    /// Runs the backward pass. Returns the cotangents of the chain's input and of `shared` (all `None` unless they were
    /// tracked).
    pub fn pull(mut self, cotangent: NdTensor) -> Result<(NdTensor, Vec<Option<NdTensor>>)> {
        let mut cotangent = cotangent;
        let mut shared_cotangents: Vec<Option<NdTensor>> = self.shared.iter().map(|_| None).collect();
        while let Some((segment, checkpoint)) = self.steps.pop() {
            let recorded = match checkpoint {
                Checkpointed::Graph(recorded) => recorded,
                Checkpointed::Input(input) => self.recompute(segment.as_ref(), &input.cast(DType::F32))?,
                Checkpointed::HostInput(input) => {
                    let input = input.into_device()?.cast(DType::F32);
                    // The input of the segment that is pulled back next is copied while this segment is recomputed.
                    if let Some((_, Checkpointed::HostInput(next))) = self.steps.last_mut() {
                        next.prefetch()?;
                    }
                    self.recompute(segment.as_ref(), &input)?
                }
            };
            // The cotangents of the segment's input, and of `shared` if it is tracked.
            let mut pulled = recorded.pull(vec![Some(cotangent.clone())], self.parameters.as_ref()).into_iter();
            cotangent = match pulled.next().flatten() {
                Some(cotangent) => cotangent,
                // The segment does not depend on its input.
                None => NdTensor::from_flat(cotangent.flat().zeros_like(), cotangent.shape()),
            };
            for (sum, term) in shared_cotangents.iter_mut().zip(pulled) {
                *sum = match (sum.take(), term) {
                    (Some(sum), Some(term)) => Some(sum.plus(term)),
                    (sum, term) => sum.or(term),
                };
            }
        }
        Ok((cotangent, shared_cotangents))
    }

    /// Runs a segment again from its input, this time recorded.
    fn recompute(&self, segment: &dyn Segment, input: &NdTensor) -> Result<vjp::Recorded> {
        let trains_parameters = self.parameters.is_some();
        let (_, recorded) = run_recorded(segment, input, &self.shared, self.tracks_shared, trains_parameters)?;
        Ok(recorded)
    }
}

/// Runs a segment under autodiff. The recorded inputs are `state`; `shared` if `tracks_shared`; and the segment's
/// trainable parameters if `trains_parameters`.
fn run_recorded(
    segment: &dyn Segment,
    state: &NdTensor,
    shared: &[NdTensor],
    tracks_shared: bool,
    trains_parameters: bool,
) -> Result<(NdTensor, vjp::Recorded)> {
    let mut inputs = vec![state.clone()];
    if tracks_shared {
        inputs.extend_from_slice(shared);
    }
    let tape = if trains_parameters { Tape::on() } else { Tape::off() };
    let (mut values, recorded) = vjp(&inputs, tape, |inputs, tape| {
        let shared = if tracks_shared { &inputs[1..] } else { shared };
        Ok(vec![segment.forward(&inputs[0], shared, tape)?])
    })?;
    Ok((values.remove(0), recorded))
}
