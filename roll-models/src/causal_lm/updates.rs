//! Updates of the parameters on their device.

use std::ops::Range;
use std::sync::Arc;

use roll_core::{AdamUpdate, DevicePart, DeviceUpdates, Result};

use super::prefixes::Prefixes;

/// What was computed with the old parameters is forgotten when they change.
pub(super) struct Forgetting {
    pub(super) updates: Box<dyn DeviceUpdates>,
    pub(super) prefixes: Arc<Prefixes>,
}

impl DeviceUpdates for Forgetting {
    fn has_own_memory(&self) -> bool {
        self.updates.has_own_memory()
    }

    fn accumulate(&mut self) -> Result<()> {
        self.updates.accumulate()
    }

    fn add(&mut self, gradients: &[f32]) -> Result<()> {
        self.updates.add(gradients)
    }

    fn discard(&mut self) {
        self.updates.discard();
    }

    fn sum_of_squares(&mut self) -> Result<f64> {
        self.updates.sum_of_squares()
    }

    fn update(&mut self, update: &AdamUpdate) -> Result<()> {
        self.prefixes.forget();
        self.updates.update(update)
    }

    fn read_moments(&self) -> Result<[Vec<f32>; 2]> {
        self.updates.read_moments()
    }

    fn write_moments(&mut self, moments: [&[f32]; 2]) -> Result<()> {
        self.updates.write_moments(moments)
    }

    /// The parameters stay until they are written, which forgets by itself.
    fn part(&self, which: Range<usize>) -> Result<Box<dyn DevicePart>> {
        self.updates.part(which)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use roll_core::Error;

    use super::*;

    /// Updates of nothing.
    struct Nothing;

    impl DeviceUpdates for Nothing {
        fn has_own_memory(&self) -> bool {
            false
        }
        fn accumulate(&mut self) -> Result<()> {
            Ok(())
        }
        fn add(&mut self, _gradients: &[f32]) -> Result<()> {
            Ok(())
        }
        fn discard(&mut self) {}
        fn sum_of_squares(&mut self) -> Result<f64> {
            Ok(0.0)
        }
        fn update(&mut self, _update: &AdamUpdate) -> Result<()> {
            Ok(())
        }
        fn read_moments(&self) -> Result<[Vec<f32>; 2]> {
            Ok([Vec::new(), Vec::new()])
        }
        fn write_moments(&mut self, _moments: [&[f32]; 2]) -> Result<()> {
            Ok(())
        }
        fn part(&self, which: Range<usize>) -> Result<Box<dyn DevicePart>> {
            Err(Error::shape("flat parameters", "[0]", &[which.end]))
        }
    }

    #[test]
    fn an_update_forgets_what_was_read_with_the_old_parameters() {
        let prefixes = Arc::new(Prefixes::default());
        let mut updates = Forgetting { updates: Box::new(Nothing), prefixes: prefixes.clone() };
        let update = AdamUpdate {
            products: false,
            scale: [1.0; 2],
            betas: [0.9, 0.999],
            rest: [0.1, 0.001],
            eps: 1e-8,
            step_size: 0.0,
            root_correction: 1.0,
            decay: 0.0,
            keep: 1.0,
        };
        for (updated, found) in [(false, Some(2)), (true, None)] {
            prefixes.turn(1);
            prefixes.keep(vec![1, 2], Vec::new());
            prefixes.turn(2);
            if updated {
                updates.update(&update).unwrap();
            }
            assert_eq!(prefixes.take(&[1, 2, 3]).map(|(length, _)| length), found);
        }
    }
}
