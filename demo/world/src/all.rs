//! `demo-world all`: makes everything in `demo/assets`, in order.

use std::path::Path;

use roll_core::Result;

use crate::embedder::{self, Role};
use crate::{clips, detector, experts, quality, sheet, text, vae};

/// Seeds of the embedders of the reward and of the judge.
const EMBEDDERS: [u64; 2] = [1, 2];
/// Clips of the default run, below `clips/`: folder, first person, number of clips. No network was trained on these
/// people.
const CLIPS: [(&str, u64, u64); 2] = [("train", 11_000, 240), ("unseen", 12_000, 24)];

/// Makes and measures everything.
pub fn make(out: &Path, work: &Path, config: &Path) -> Result<()> {
    detector::train(None, out)?;
    for seed in EMBEDDERS {
        embedder::train(seed, None, out)?;
    }
    vae::train(None, None, out)?;
    text::train(None, out)?;
    experts::train(out, work, config, None)?;
    data(out)?;
    measure(out)
}

/// Writes the clips of the default run and the overview sheet of people.
pub fn data(out: &Path) -> Result<()> {
    for (folder, first, count) in CLIPS {
        clips::write(&out.join("clips").join(folder), first, count, 0)?;
    }
    sheet::write(&out.join("faces.png"))
}

/// Measures the networks in `out`.
pub fn measure(out: &Path) -> Result<()> {
    quality::detector(out)?;
    [Role::Reward, Role::Check].into_iter().try_for_each(|role| quality::embedder(role, out))?;
    quality::vae::measure(out)?;
    quality::text::measure(out)
}
