//! Adds the gradients that a model delivers during a backward pass to the sums of a single rank, so that the model holds
//! the gradients of one block at a time instead of all.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use roll_core::{GradientSink, Model, ParameterSpec, Result};

use super::gradients::Gradients;

/// The sums of a single rank, which takes delivered gradients while it is open.
pub(super) struct LocalSums {
    gradients: Arc<Gradients>,
    /// The elements of each parameter in the flat layout.
    places: Vec<Range<usize>>,
    open: AtomicBool,
}

impl LocalSums {
    pub(super) fn new(gradients: Arc<Gradients>, specs: &[ParameterSpec]) -> Self {
        let mut end = 0;
        let place_of = |spec: &ParameterSpec| {
            let start = end;
            end += spec.len();
            start..end
        };
        Self { gradients, places: specs.iter().map(place_of).collect(), open: AtomicBool::new(false) }
    }

    /// Accepts gradients from now on.
    pub(super) fn open(&self) {
        self.open.store(true, Ordering::Relaxed);
    }

    /// Accepts no more gradients.
    pub(super) fn close(&self) {
        self.open.store(false, Ordering::Relaxed);
    }

    /// Takes the gradients that were not delivered out of the model.
    pub(super) fn finish(&self, model: &mut dyn Model) -> Result<()> {
        self.close();
        self.gradients.take_from(model)
    }
}

impl GradientSink for LocalSums {
    fn deliver(&self, position: usize, gradient: &[f32]) -> bool {
        match self.places.get(position) {
            Some(place) if self.open.load(Ordering::Relaxed) && place.len() == gradient.len() => {
                self.gradients.add(place.clone(), gradient);
                true
            }
            _ => false,
        }
    }
}
