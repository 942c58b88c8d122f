//! The choice whether a pass uses the trainable adapter.

/// Whether the trainable adapter takes part in a forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Adapter {
    /// Base weights plus adapter.
    On,
    /// Base weights alone.
    Off,
    /// Base weights plus the adapter that training started from, which is the same as [`Adapter::Off`] unless the model
    /// was opened with an adapter.
    Start,
}
