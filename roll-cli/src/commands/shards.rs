//! `roll merge-shards` and `roll split-shards`.

use std::collections::BTreeMap;

use roll_core::Result;
use roll_network::weights::{Checkpoint, Outputs, WeightsError, rewrite};
use roll_train::progress::Bar;

use crate::args::{MergeShards, SplitShards};
use crate::output::refuse_existing;
use crate::progress::TerminalBar;

/// Bytes of the unit of the progress bar.
const MIB: u64 = 1 << 20;

/// Joins the shards and prints the path of the file.
pub fn merge_shards(args: MergeShards) -> Result<()> {
    refuse_existing(&args.out, args.force)?;
    let source = Checkpoint::open_any(&args.dir)?;
    let outputs = Outputs::one_file(&source, &args.out);
    copy(&source, &outputs, args.dtype.map(|dtype| dtype.dtype()))
}

/// Splits the file and prints the paths of the shards.
pub fn split_shards(args: SplitShards) -> Result<()> {
    refuse_existing(&args.out, args.force)?;
    let source = Checkpoint::open_any(&args.file)?;
    let dtype = args.dtype.map(|dtype| dtype.dtype());
    let outputs = Outputs::split(&source, &args.out, args.max_size, dtype)?;
    copy(&source, &outputs, dtype)
}

/// Writes all tensors of `source` to `outputs`, converted to `dtype` if one is named, and prints the paths.
fn copy(source: &Checkpoint, outputs: &Outputs, dtype: Option<roll_core::DType>) -> Result<()> {
    let metadata: BTreeMap<String, String> = source.metadata();
    let files = with_progress(source, |progress| {
        rewrite::<WeightsError>(source, outputs, dtype, &mut (), &metadata, progress)
    })?;
    files.iter().for_each(|file| println!("{}", file.display()));
    Ok(())
}

/// Runs `work` under a progress bar over the bytes of `source`. `work` calls its argument with the number of source
/// bytes of each piece that it has copied.
pub fn with_progress<T>(source: &Checkpoint, work: impl FnOnce(&mut dyn FnMut(u64)) -> T) -> T {
    let total: u64 = source.paths().filter_map(|path| std::fs::metadata(path).ok()).map(|about| about.len()).sum();
    let bar = TerminalBar::new(total / MIB, "MB");
    let mut done = 0;
    let result = work(&mut |bytes| {
        done += bytes;
        bar.set(done / MIB);
    });
    bar.finish();
    result
}
