//! The appearance of a person.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::canvas::{Colour, mix};

/// Shape of the hair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HairStyle {
    /// Shaved; only a shadow.
    Bald,
    /// A close cap.
    Short,
    /// Short, with volume on top.
    Quiff,
    /// Round and wide.
    Curly,
    /// Down to the chin.
    Bob,
    /// Down to the shoulders and beyond.
    Long,
    /// Gathered on top.
    Bun,
}

/// Style of the beard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beard {
    /// No beard.
    None,
    /// A shadow on jaw and lip.
    Stubble,
    /// Jaw, chin and lip.
    Full,
    /// Above the lip.
    Moustache,
    /// Chin only.
    Goatee,
}

/// The properties of a person that do not change with motion. Lengths are in units of half the height of the head.
#[derive(Clone, Debug, PartialEq)]
pub struct Identity {
    /// Half the width of the head.
    pub width: f32,
    /// How much the face narrows towards the chin, 0 to 1.
    pub jaw: f32,
    /// How square the outline is, 2 to 3.
    pub square: f32,
    /// Colour of the skin.
    pub skin: Colour,
    /// Redness of the cheeks, 0 to 1.
    pub blush: f32,
    /// Colour of the hair.
    pub hair: Colour,
    /// Shape of the hair.
    pub style: HairStyle,
    /// Height of the hairline; up is negative.
    pub hairline: f32,
    /// Slope of the hairline at the parting.
    pub parting: f32,
    /// How far the hair falls over the forehead, 0 to 1.
    pub fringe: f32,
    /// Colour of the iris.
    pub iris: Colour,
    /// Half the distance between the eyes.
    pub eye_distance: f32,
    /// Height of the eyes; down is positive.
    pub eye_height: f32,
    /// Half the width of an eye.
    pub eye_width: f32,
    /// Half the opening of an eye.
    pub eye_open: f32,
    /// Slant of the eyes; positive raises the outer corners.
    pub eye_tilt: f32,
    /// Thickness of the brows.
    pub brow: f32,
    /// Height of the brows above the eyes.
    pub brow_height: f32,
    /// Slant of the brows; positive raises the outer ends.
    pub brow_tilt: f32,
    /// Curvature of the brows, 0 to 1.
    pub brow_arch: f32,
    /// Half the width of the nose.
    pub nose_width: f32,
    /// Height of the tip of the nose.
    pub nose_height: f32,
    /// Height of the mouth.
    pub mouth_height: f32,
    /// Half the width of the mouth.
    pub mouth_width: f32,
    /// Thickness of the lips.
    pub lips: f32,
    /// Colour of the lips.
    pub lip_colour: Colour,
    /// Size of the ears.
    pub ears: f32,
    /// Style of the beard.
    pub beard: Beard,
    /// Colour of the glasses' rims; `None` without glasses.
    pub glasses: Option<Colour>,
    /// Whether the rims are round. Otherwise they are square.
    pub round_glasses: bool,
    /// Strength of freckles, 0 to 1.
    pub freckles: f32,
    /// Position of a mole on the face.
    pub mole: Option<[f32; 2]>,
    /// Colour of the clothes.
    pub clothes: Colour,
}

const SKINS: [Colour; 6] = [
    [0.98, 0.86, 0.77],
    [0.95, 0.77, 0.64],
    [0.87, 0.66, 0.50],
    [0.73, 0.51, 0.36],
    [0.54, 0.35, 0.24],
    [0.36, 0.23, 0.16],
];
const HAIRS: [Colour; 11] = [
    [0.07, 0.06, 0.06],
    [0.20, 0.13, 0.09],
    [0.36, 0.22, 0.12],
    [0.53, 0.33, 0.16],
    [0.86, 0.70, 0.42],
    [0.95, 0.86, 0.62],
    [0.66, 0.24, 0.09],
    [0.62, 0.62, 0.63],
    [0.93, 0.93, 0.92],
    [0.22, 0.32, 0.72],
    [0.78, 0.22, 0.50],
];
const IRISES: [Colour; 6] = [
    [0.24, 0.14, 0.07],
    [0.42, 0.26, 0.10],
    [0.22, 0.45, 0.28],
    [0.24, 0.46, 0.76],
    [0.50, 0.56, 0.60],
    [0.09, 0.07, 0.06],
];
/// Colours of the rims of glasses.
pub const RIMS: [Colour; 4] = [[0.07, 0.07, 0.08], [0.48, 0.25, 0.10], [0.70, 0.12, 0.14], [0.78, 0.72, 0.50]];

impl Identity {
    /// Returns the person with this number. The same number always returns the same person.
    pub fn new(seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed ^ 0x1dea_11fe);
        let tone = rng.random_range(0.0..(SKINS.len() - 1) as f32);
        let skin = mix(SKINS[tone as usize], SKINS[tone as usize + 1], tone.fract());
        let hair = HAIRS[rng.random_range(0..HAIRS.len())];
        let hair = hair.map(|v: f32| (v * rng.random_range(0.85..1.15)).clamp(0.03, 1.0));
        use HairStyle::*;
        let style = [Bald, Short, Short, Quiff, Curly, Curly, Bob, Bob, Long, Long, Long, Bun][rng.random_range(0..12)];
        let beards = match style {
            Bald | Short | Quiff | Curly => {
                [Beard::None, Beard::None, Beard::Stubble, Beard::Full, Beard::Moustache, Beard::Goatee]
            }
            _ => [Beard::None; 6],
        };
        let lip_base = mix(skin, [0.78, 0.25, 0.27], rng.random_range(0.25..0.75));
        Self {
            width: rng.random_range(0.66..0.84),
            jaw: rng.random_range(0.05..0.55),
            square: rng.random_range(2.0..2.9),
            skin,
            blush: rng.random_range(0.0..1.0),
            hair,
            style,
            hairline: rng.random_range(-0.72..-0.52),
            parting: rng.random_range(-0.35..0.35),
            fringe: if rng.random_bool(0.35) { rng.random_range(0.4..1.0) } else { 0.0 },
            iris: IRISES[rng.random_range(0..IRISES.len())],
            eye_distance: rng.random_range(0.27..0.38),
            eye_height: rng.random_range(-0.16..-0.03),
            eye_width: rng.random_range(0.135..0.185),
            eye_open: rng.random_range(0.062..0.115),
            eye_tilt: rng.random_range(-0.16..0.22),
            brow: rng.random_range(0.025..0.085),
            brow_height: rng.random_range(0.17..0.27),
            brow_tilt: rng.random_range(-0.18..0.26),
            brow_arch: rng.random_range(0.0..1.0),
            nose_width: rng.random_range(0.10..0.20),
            nose_height: rng.random_range(0.22..0.34),
            mouth_height: rng.random_range(0.54..0.63),
            mouth_width: rng.random_range(0.20..0.33),
            lips: rng.random_range(0.035..0.095),
            lip_colour: lip_base,
            ears: rng.random_range(0.12..0.22),
            beard: beards[rng.random_range(0..beards.len())],
            glasses: rng.random_bool(0.22).then(|| RIMS[rng.random_range(0..RIMS.len())]),
            round_glasses: rng.random_bool(0.5),
            freckles: if rng.random_bool(0.2) { rng.random_range(0.5..1.0) } else { 0.0 },
            mole: rng.random_bool(0.2).then(|| [rng.random_range(-0.45..0.45), rng.random_range(0.3..0.75)]),
            clothes: std::array::from_fn(|_| rng.random_range(0.1..0.9)),
        }
    }
}
