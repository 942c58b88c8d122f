//! Portraits of the demo's people as files, each with the prompt that describes it.

use std::fmt::Write;
use std::path::Path;

use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use roll_core::{Error, Result};
use roll_media::encode_png;

use crate::clips::SIZE;
use crate::face::{describe, descriptions, portrait};
use crate::files;
use crate::sheet::grid;

/// Number of the first person. The portraits show nobody of the clips.
const FIRST_IDENTITY: u64 = 20_000;

/// Writes `count` portraits, one per person, and `metadata.csv` with the columns image, prompt and carelessly. The last
/// is the prompt in `careless` of ten rows of another portrait, as in pictures that were captioned carelessly.
/// `prompts.txt` and `unseen.txt` list every prompt of training and every prompt held out.
pub fn write(directory: &Path, count: u64, careless: u64) -> Result<()> {
    std::fs::create_dir_all(directory).map_err(Error::file("create the directory", directory))?;
    let descriptions = [descriptions(false), descriptions(true)];
    let rows: Vec<String> = (FIRST_IDENTITY..FIRST_IDENTITY + count)
        .into_par_iter()
        .map(|identity| {
            let mut rng = ChaCha8Rng::seed_from_u64(identity);
            let [drawn, other] = [0; 2].map(|_| *descriptions[0].choose(&mut rng).unwrap_or(&[0; 4]));
            let portrait = portrait(identity, drawn, SIZE);
            let name = format!("portrait-{identity:05}.png");
            let (path, png) = (directory.join(&name), encode_png(&grid(&[portrait.picture], 1, 1))?);
            std::fs::write(&path, png).map_err(Error::file("write", &path))?;
            let careless = if rng.random_range(0..10) < careless { describe(other) } else { portrait.prompt.clone() };
            Ok(format!("{name},\"{}\",\"{careless}\"", portrait.prompt))
        })
        .collect::<Result<_>>()?;
    let mut csv = String::from("image,prompt,carelessly\n");
    for row in rows {
        // Writing to a string cannot fail.
        let _ = writeln!(csv, "{row}");
    }
    files::write(&directory.join("metadata.csv"), csv.as_bytes())?;
    for (file, descriptions) in ["prompts.txt", "unseen.txt"].into_iter().zip(descriptions) {
        let lines: String = descriptions.into_iter().map(|description| describe(description) + "\n").collect();
        files::write(&directory.join(file), lines.as_bytes())?;
    }
    Ok(())
}
