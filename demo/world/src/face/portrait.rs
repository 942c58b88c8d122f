//! Portraits and prompts that describe them.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::canvas::Colour;
use super::identity::{Beard, HairStyle, RIMS};
use super::{Identity, Picture, Shot, render};

/// A portrait of one person.
#[derive(Clone, Debug, PartialEq)]
pub struct Portrait {
    /// Describes hair, glasses and background.
    pub prompt: String,
    /// The picture.
    pub picture: Picture,
}

const STYLES: [(&str, HairStyle); 4] =
    [("short", HairStyle::Short), ("curly", HairStyle::Curly), ("long", HairStyle::Long), ("tied", HairStyle::Bun)];
const HAIRS: [(&str, Colour); 7] = [
    ("black", [0.07, 0.06, 0.06]),
    ("brown", [0.40, 0.24, 0.12]),
    ("blond", [0.88, 0.73, 0.44]),
    ("red", [0.68, 0.24, 0.09]),
    ("white", [0.93, 0.93, 0.92]),
    ("blue", [0.20, 0.31, 0.76]),
    ("pink", [0.82, 0.24, 0.54]),
];
const GLASSES: [&str; 2] = ["no glasses", "glasses"];
const BACKGROUNDS: [(&str, Colour); 7] = [
    ("blue", [0.34, 0.50, 0.74]),
    ("green", [0.40, 0.60, 0.44]),
    ("grey", [0.60, 0.61, 0.62]),
    ("red", [0.68, 0.34, 0.32]),
    ("yellow", [0.86, 0.76, 0.38]),
    ("dark", [0.20, 0.21, 0.25]),
    ("white", [0.88, 0.89, 0.90]),
];
/// One in this many descriptions is held out: no network sees it in training.
const HELD_OUT_OF: usize = 8;

/// Indices of style, hair, glasses and background.
pub type Description = [usize; 4];

/// Every description, in order: those of training, or those held out. Either kind has every attribute.
pub fn descriptions(held_out: bool) -> Vec<Description> {
    let every = (0..STYLES.len() * HAIRS.len() * GLASSES.len() * BACKGROUNDS.len()).map(|i| {
        let (i, background) = (i / BACKGROUNDS.len(), i % BACKGROUNDS.len());
        let (i, glasses) = (i / GLASSES.len(), i % GLASSES.len());
        [i / HAIRS.len(), i % HAIRS.len(), glasses, background]
    });
    let is_held_out = |[style, hair, glasses, background]: &Description| {
        (style + 3 * hair + 4 * glasses + 5 * background) % HELD_OUT_OF == 0
    };
    every.filter(|description| is_held_out(description) == held_out).collect()
}

/// Returns the words of a description.
pub fn describe([style, hair, glasses, background]: Description) -> String {
    format!(
        "a person with {} {} hair and {}, {} background",
        STYLES[style].0, HAIRS[hair].0, GLASSES[glasses], BACKGROUNDS[background].0
    )
}

/// Returns the portrait of a person in `[height, width]` pixels. The description replaces the person's own hair and
/// glasses.
pub fn portrait(identity_seed: u64, description: Description, size: [usize; 2]) -> Portrait {
    let [style, hair, glasses, background] = description;
    let mut rng = ChaCha8Rng::seed_from_u64(identity_seed ^ 0x90_72a1);
    let mut identity = Identity::new(identity_seed);
    identity.style = STYLES[style].1;
    identity.hair = HAIRS[hair].1.map(|v: f32| (v * rng.random_range(0.92..1.08)).clamp(0.03, 1.0));
    identity.glasses = (glasses == 1).then(|| RIMS[rng.random_range(0..RIMS.len())]);
    if matches!(identity.style, HairStyle::Long | HairStyle::Bun) {
        identity.beard = Beard::None;
    }
    let top = BACKGROUNDS[background].1.map(|v: f32| (v * rng.random_range(0.95..1.05)).min(1.0));
    let shot = Shot {
        yaw: rng.random_range(-0.25..0.25),
        pitch: rng.random_range(-0.10..0.10),
        roll: rng.random_range(-0.08..0.08),
        centre: [0.5 + rng.random_range(-0.03..0.03), 0.5 + rng.random_range(-0.01..0.04)],
        scale: rng.random_range(0.29..0.33),
        smile: rng.random_range(-0.2..0.9),
        light: rng.random_range(-1.0..1.0),
        contrast: rng.random_range(0.2..0.7),
        background: [top, top.map(|v| 0.85 * v)],
        ..Shot::default()
    };
    Portrait { prompt: describe(description), picture: render(&identity, &shot, size) }
}
