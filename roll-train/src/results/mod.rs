//! What comes out of a run: its record, metrics and videos while it goes on, figures, curves and a report at its end.

pub mod curves;
pub mod headlines;
pub mod plot;
pub mod record;
pub mod report;
pub mod trajectories;

mod comparison;
mod journal;
mod labels;
mod outcome;

pub(crate) use journal::Journal;
pub(crate) use labels::SetLabels;
pub(crate) use outcome::{figures, lines, metrics, save_clips, save_references, write};
