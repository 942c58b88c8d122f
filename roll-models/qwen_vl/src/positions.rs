//! Places of media in a text, and the positions of tokens.

use std::ops::Range;

use burn_tensor::{Device, Tensor as Burn};
use roll_backends::host::values_to_device;
use roll_core::{Error, Medium, Positions, Result, VisionLanguageFacts};

use super::config::QwenVlConfig;
use super::patches::Grid;

/// Maximum number of seconds of a time step: above a day.
const MAX_SECONDS: f64 = 1e5;

/// A medium's placeholders in a text.
#[derive(Clone, Debug, PartialEq)]
pub struct Placed {
    /// The placeholders among the tokens.
    pub tokens: Range<usize>,
    /// The patches.
    pub grid: Grid,
    /// Whether it is a clip, not a picture.
    pub is_clip: bool,
    /// See [`Medium::seconds_per_step`].
    pub seconds_per_step: f64,
}

/// Finds the placeholders of each medium. Fails unless the text has exactly as many for each medium as the medium has
/// squares, of one kind and without other tokens between them.
pub fn place(facts: &VisionLanguageFacts, tokens: &[u32], media: &[Medium]) -> Result<Vec<Placed>> {
    let is_placeholder = |token: &u32| *token == facts.image_token || *token == facts.video_token;
    let mut at = 0;
    let mut placed = Vec::with_capacity(media.len());
    let next = |at: usize| tokens[at..].iter().position(is_placeholder).map(|offset| at + offset);
    for (number, medium) in media.iter().enumerate() {
        if !(0.0..=MAX_SECONDS).contains(&medium.seconds_per_step) {
            let found = medium.seconds_per_step;
            return Err(Error::Misuse(format!(
                "medium {number}: expected 0 to {MAX_SECONDS} s per step, found {found}"
            )));
        }
        let shape = medium.pixels.shape();
        let (count, grid) = (facts.tokens_of(shape)?, Grid::of(shape, facts)?);
        let Some(start) = next(at) else {
            let problem = format!("the text has placeholders for {number} pictures or clips, found {}", media.len());
            return Err(Error::Misuse(problem));
        };
        let kind = tokens[start];
        let found = tokens[start..].iter().take(count).take_while(|token| **token == kind).count();
        if found < count {
            return Err(Error::Misuse(format!(
                "medium {number} of the shape {shape:?} needs {count} placeholders in a row, the text has {found} at token \
                 {start}"
            )));
        }
        at = start + count;
        let is_clip = kind == facts.video_token;
        placed.push(Placed { tokens: start..at, grid, is_clip, seconds_per_step: medium.seconds_per_step });
    }
    match next(at) {
        Some(extra) => Err(Error::Misuse(format!(
            "the placeholder at token {extra} belongs to no medium: the text has more placeholders than {} pictures or \
             clips have squares",
            media.len()
        ))),
        None => Ok(placed),
    }
}

/// Positions of `count` tokens: time, row and column of each.
pub fn positions(config: &QwenVlConfig, count: usize, placed: &[Placed], positions: Positions) -> Vec<[usize; 3]> {
    if positions == Positions::Sequential {
        return (0..count).map(|position| [position; 3]).collect();
    }
    let mut all = Vec::with_capacity(count);
    let mut next = 0;
    for medium in placed.iter().filter(|medium| medium.tokens.start < count) {
        while all.len() < medium.tokens.start {
            all.push([next; 3]);
            next += 1;
        }
        let (merge, grid) = (config.vision.merge, medium.grid);
        let (high, wide) = (grid.rows / merge, grid.columns / merge);
        let first = next;
        for step in 0..grid.steps {
            let time = time(config.vision.tokens_per_second, medium, step);
            for y in 0..high {
                for x in 0..wide {
                    all.push([first + time, first + y, first + x]);
                    next = next.max(first + time.max(y).max(x) + 1);
                }
            }
        }
    }
    while all.len() < count {
        all.push([next; 3]);
        next += 1;
    }
    all.truncate(count);
    all
}

/// The position in time of a step of a medium.
pub fn time(tokens_per_second: Option<f64>, medium: &Placed, step: usize) -> usize {
    match tokens_per_second {
        // A picture has one time.
        Some(_) if !medium.is_clip => 0,
        Some(rate) => (step as f64 * medium.seconds_per_step * rate).floor() as usize,
        None => step,
    }
}

/// Cosine and sine of the rotary angles of the language model at `places`, `[places, head_dim / 2]` each.
pub fn rope(config: &QwenVlConfig, places: &[[usize; 3]], device: &Device) -> (Burn<2>, Burn<2>) {
    let text = &config.text;
    let frequencies = text.rope.frequencies(text.head_dim);
    let angles = angles(config.sections, &frequencies, places);
    let table = |f: fn(f64) -> f64| {
        let values: Vec<f32> = angles.iter().map(|angle| f(*angle) as f32).collect();
        values_to_device(values.into(), [places.len(), frequencies.len()], device)
    };
    (table(f64::cos), table(f64::sin))
}

/// The angle of each token and frequency, `[tokens][frequencies]`: frequency `i` turns with the axis whose section
/// holds `i`.
fn angles(sections: [usize; 3], frequencies: &[f64], positions: &[[usize; 3]]) -> Vec<f64> {
    let axes = sections.iter().enumerate().flat_map(|(axis, count)| std::iter::repeat_n(axis, *count));
    let axes: Vec<usize> = axes.collect();
    let of_token = |place: &[usize; 3]| {
        let place = *place;
        axes.iter().zip(frequencies).map(move |(axis, frequency)| place[*axis] as f64 * frequency).collect::<Vec<_>>()
    };
    positions.iter().flat_map(of_token).collect()
}
