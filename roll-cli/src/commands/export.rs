//! `roll export`: writes a fully trained language model as a directory for other programs.

use roll_causal_lm::Export as TrainedModel;
use roll_core::Result;

use super::shards::with_progress;
use crate::args::Export;

/// Writes the shards, their index and the files beside them, and prints the paths.
pub fn export(args: Export) -> Result<()> {
    let trained = TrainedModel::open(&args.trained)?;
    let dtype = args.dtype.map(|dtype| dtype.dtype());
    let files = with_progress(trained.weights(), |progress| trained.write(&args.out, dtype, args.max_size, progress))?;
    files.iter().for_each(|file| println!("{}", file.display()));
    Ok(())
}
