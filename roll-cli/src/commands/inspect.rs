//! `roll inspect`: what is in a weight file.

use roll_core::{Error, Result};
use roll_models::inspect::{About, inspect};
use roll_models::weights::Checkpoint;

use crate::args::Inspect;

/// Longest piece of a file's metadata that is printed.
const SHOWN: usize = 100;

/// Prints it.
pub fn print(args: Inspect) -> Result<()> {
    let about = inspect(&args.file)?;
    if args.json {
        let text = match about.as_slice() {
            [one] => serde_json::to_string_pretty(one),
            several => serde_json::to_string_pretty(several),
        };
        println!("{}", text.map_err(Error::failed("the summary cannot be written as JSON"))?);
    } else {
        for one in &about {
            if about.len() > 1 {
                println!("{}", one.path.display());
            }
            show(one);
        }
    }
    if args.keys {
        let checkpoint = Checkpoint::open_any(&args.file)?;
        for key in checkpoint.keys() {
            if let Some(info) = checkpoint.info(key) {
                println!("{key}  {}  {:?}", info.stored, info.shape);
            }
        }
    }
    Ok(())
}

fn show(about: &About) {
    let files = if about.files == 1 { String::new() } else { format!(" in {} files", about.files) };
    let dtypes = about.dtypes.iter().map(|(dtype, n)| format!("{dtype} ({n})")).collect::<Vec<_>>().join(", ");
    tellln!("{}", about.what);
    tellln!("  {:<14} {}{files}", "format", about.format);
    tellln!("  {:<14} {} of {} elements, {dtypes}", "tensors", about.tensors, about.elements);
    for (name, value) in &about.details {
        tellln!("  {name:<14} {value}");
    }
    for (name, value) in &about.metadata {
        let short: String = value.chars().take(SHOWN).collect();
        tellln!("  {:<14} {name}: {short}{}", "metadata", if short.len() < value.len() { " ..." } else { "" });
    }
}
