//! `roll inspect`: contents of a weight file.

use roll_core::{Error, Result};
use roll_network::weights::Checkpoint;
use roll_network::weights::gguf::GgufFile;
use roll_train::progress::grouped;
use roll_wan::inspect::{FileDescription, GGUF, inspect};

use crate::args::Inspect;

/// Most characters of an entry of a file's metadata that are printed.
const MAX_SHOWN: usize = 100;

/// Prints a summary of each weight file that `args.file` names.
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
            print_description(one);
        }
    }
    if args.keys {
        match about.as_slice() {
            [one] if one.format == GGUF => print_gguf_keys(&GgufFile::open(&one.path)?),
            [one] if one.files == 1 => print_keys(&Checkpoint::open(&one.path)?),
            [_] => print_keys(&Checkpoint::open_any(&args.file)?),
            several => {
                for one in several {
                    println!("{}", one.path.display());
                    // `path` of a network in shards is the first shard: its directory has the index of all shards.
                    let whole =
                        if one.files == 1 { one.path.as_path() } else { one.path.parent().unwrap_or(&one.path) };
                    print_keys(&Checkpoint::open_any(whole)?);
                }
            }
        }
    }
    Ok(())
}

fn print_keys(checkpoint: &Checkpoint) {
    for key in checkpoint.keys() {
        if let Some(info) = checkpoint.info(key) {
            println!("{key}  {}  {:?}", info.stored, info.shape);
        }
    }
}

fn print_gguf_keys(file: &GgufFile) {
    for name in file.names() {
        if let (Some(kind), Some(shape)) = (file.type_name(name), file.shape(name)) {
            println!("{name}  {kind}  {shape:?}");
        }
    }
}

fn print_description(about: &FileDescription) {
    let files = if about.files == 1 { String::new() } else { format!(" in {} files", about.files) };
    let dtypes = about.dtypes.iter().map(|(dtype, n)| format!("{dtype} ({n})")).collect::<Vec<_>>().join(", ");
    println_wrapped!("{}", about.what);
    println_wrapped!("  {:<14} {}{files}", "format", about.format);
    println_wrapped!("  {:<14} {} of {} elements, {dtypes}", "tensors", about.tensors, about.elements);
    for (name, value) in &about.details {
        println_wrapped!("  {name:<14} {value}");
    }
    for (name, value) in &about.metadata {
        println_wrapped!("  {:<14} {name}: {}", "metadata", shortened(value));
    }
}

/// The beginning of a long text, and its length; `--json` prints the whole text. A space follows each comma, so that
/// lines can be wrapped there.
fn shortened(text: &str) -> String {
    let spaced = text.replace(", ", ",").replace(',', ", ");
    let short: String = spaced.chars().take(MAX_SHOWN).collect();
    match short.len() < spaced.len() {
        true => format!("{short} ... ({} characters; --json prints all)", grouped(text.chars().count() as u64)),
        false => short,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_cut_and_followed_by_their_length() {
        assert_eq!(shortened("short"), "short");
        assert_eq!(shortened("q,k, v"), "q, k, v");
        let cut = shortened(&"a".repeat(1234));
        assert!(
            cut.starts_with(&"a".repeat(MAX_SHOWN)) && cut.ends_with("... (1,234 characters; --json prints all)"),
            "{cut}"
        );
    }
}
