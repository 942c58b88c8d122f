//! Memory and time of the networks of rewards, for a plan.

use roll_core::plan::{Needs, PlanInput};
use roll_core::{BuildContext, Component, PlannedReads, Result, VisionLanguageFacts, VisionLanguageRegistration};

use super::PixelLimits;

/// Height and width of videos if the plan leaves them open.
const DEFAULT_SIZE: [usize; 2] = [480, 832];
/// Number of words of a prompt.
const PROMPT_WORDS: usize = 100;
/// Frames per second of generated videos.
pub(crate) const PLANNED_FPS: f64 = 16.0;

/// A prompt of the planned length.
pub(crate) fn planned_prompt() -> String {
    "word ".repeat(PROMPT_WORDS)
}

/// The shape of a medium of `frames` frames of the planned videos.
pub(crate) fn planned_medium(
    input: &PlanInput,
    frames: usize,
    limits: PixelLimits,
    facts: &VisionLanguageFacts,
) -> Result<[usize; 4]> {
    let [height, width] = limits.fit(input.size.unwrap_or(DEFAULT_SIZE), facts.side_multiple())?;
    Ok([frames.next_multiple_of(facts.patch_frames), 3, height, width])
}

/// Memory and time of the network that `component` names, at the key `section`.
pub(crate) fn network_needs(
    section: &str,
    component: &Component,
    reads: &PlannedReads,
    input: &PlanInput,
    context: &BuildContext,
) -> Result<Needs> {
    (VisionLanguageRegistration::of(component)?.needs)(section, &component.options, reads, input, context)
}
