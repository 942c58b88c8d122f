//! Progress inside a long step, and the wish to stop it.

/// Receives progress inside a long step.
pub trait Progress: Sync {
    /// Reports that a phase has begun: "denoising step 3 of 8".
    fn phase(&self, phase: &str);
    /// Whether the user asked to stop; a step may then return [`crate::Error::Interrupted`] before it changes anything.
    fn interrupted(&self) -> bool {
        false
    }
}

/// Progress that is shown nowhere.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;
impl Progress for Silent {
    fn phase(&self, _phase: &str) {}
}
