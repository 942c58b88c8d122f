//! A coloured square in a picture: the agent says in which field it lies. The text does not tell, so that an agent
//! without sight is right as often as by chance.

use rand_chacha::ChaCha8Rng;
use roll_core::{Environment, Error, Noise, Observation, Picture, Purpose, Result, Split, Tensor, Transition};

use super::action::{ActionPattern, DEFAULT_PATTERN, default_special_tokens};
use super::{below, is_held_out};

const NAME: &str = "find_square";
/// Most fields in a row. Each has a letter.
const MAX_FIELDS: usize = 5;
/// Fewest pixels of a field along a side.
const MIN_FIELD: usize = 8;
/// Most pixels of a picture along a side.
const MAX_SIDE: usize = 1024;
/// Letters of the fields, row by row.
const LETTERS: [&str; MAX_FIELDS * MAX_FIELDS] = [
    "A", "B", "C", "D", "E", "F", "G", "H", "I", "J", "K", "L", "M", "N", "O", "P", "Q", "R", "S", "T", "U", "V", "W",
    "X", "Y",
];
/// Names and sRGB values of the squares' colours.
const COLORS: [(&str, [u8; 3]); 5] = [
    ("red", [230, 30, 40]),
    ("green", [30, 190, 60]),
    ("blue", [50, 90, 240]),
    ("yellow", [240, 220, 40]),
    ("white", [250, 250, 250]),
];
/// Shades of grey of the background: the first, and the number of them.
const SHADES: (u8, usize) = (40, 48);
/// What the grid lines are brighter than the background.
const LINE: u8 = 40;
/// Share of the pictures that validations alone show.
const HELD_OUT: f64 = 0.125;

/// Options of the environment `find_square`.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct FindSquareOptions {
    /// Number of rows and of columns of the grid. A guess is right once in the square of this number.
    #[schemars(range(min = 2, max = MAX_FIELDS))]
    pub fields: usize,
    /// Number of squares of different colours in a picture, of which one is asked for.
    #[schemars(range(min = 1, max = COLORS.len()))]
    pub squares: usize,
    /// Height and width of a picture in pixels.
    #[schemars(range(max = MAX_SIDE))]
    pub side: usize,
    /// Number of pictures of an episode, which are shown one after another.
    #[schemars(range(min = 1))]
    pub pictures: usize,
    /// Whether all pictures are black: what the agent reaches without sight.
    pub black: bool,
    /// Reward of an answer without the letter of a field.
    pub format_penalty: f64,
    /// Regular expression whose last group is the letter.
    pub action_pattern: String,
    /// Texts that are deleted from an answer before the search.
    pub special_token_list: Vec<String>,
    /// The instructions; an empty text removes them. Default: the names of the fields and the form of an answer.
    pub env_instruction: Option<String>,
}

impl Default for FindSquareOptions {
    fn default() -> Self {
        Self {
            fields: 2,
            squares: 1,
            side: 56,
            pictures: 1,
            black: false,
            format_penalty: 0.0,
            action_pattern: DEFAULT_PATTERN.into(),
            special_token_list: default_special_tokens(),
            env_instruction: None,
        }
    }
}

/// The environment.
pub struct FindSquare {
    options: FindSquareOptions,
    pattern: ActionPattern,
    rng: ChaCha8Rng,
    split: Split,
    /// The picture that is shown; `None` before the first episode and after the last picture of one.
    scene: Option<Scene>,
    /// Number of answers of the episode.
    answers: usize,
    /// Number of right answers of the episode.
    right: usize,
}

/// The content of a picture.
#[derive(Clone, Debug, PartialEq)]
struct Scene {
    /// Grey value of the background.
    shade: u8,
    /// The squares. The first is asked for.
    squares: Vec<Square>,
}

#[derive(Clone, Debug, PartialEq)]
struct Square {
    /// Number of the field, row by row.
    field: usize,
    /// Index in [`COLORS`].
    color: usize,
    /// First row of pixels, first column, and length of a side.
    top: usize,
    left: usize,
    side: usize,
}

impl FindSquare {
    /// Creates the environment. Fails on options out of range.
    pub fn new(options: FindSquareOptions) -> Result<Self> {
        let FindSquareOptions { fields, squares, side, pictures, .. } = options;
        let least = fields.saturating_mul(MIN_FIELD);
        for (key, found, range) in [
            ("fields", fields, 2..=MAX_FIELDS),
            ("squares", squares, 1..=COLORS.len().min(fields * fields)),
            ("side", side, least..=MAX_SIDE),
            ("pictures", pictures, 1..=usize::MAX),
        ] {
            if !range.contains(&found) {
                let expected = match *range.end() {
                    usize::MAX => format!("at least {}", range.start()),
                    end => format!("{} to {end}", range.start()),
                };
                return Err(Error::config(format!("env.{key}"), format!("expected {expected}, found {found}")));
            }
        }
        let pattern = ActionPattern::new(&options.action_pattern, options.special_token_list.clone())?;
        let rng = Noise::new(0).generator(Purpose::Environments, 0, 0);
        Ok(Self { options, pattern, rng, split: Split::default(), scene: None, answers: 0, right: 0 })
    }

    /// Draws a picture of the present split.
    fn draw(&mut self) -> Scene {
        loop {
            let scene = self.draw_any();
            if scene.is_held_out() == (self.split == Split::Validation) {
                return scene;
            }
        }
    }

    fn draw_any(&mut self) -> Scene {
        let FindSquareOptions { fields, squares, side, .. } = self.options;
        let (field_side, rng) = (side / fields, &mut self.rng);
        let shade = SHADES.0 + below(rng, SHADES.1) as u8;
        let (mut free_fields, mut free_colors): (Vec<usize>, Vec<usize>) =
            ((0..fields * fields).collect(), (0..COLORS.len()).collect());
        let drawn = (0..squares).map(|_| {
            let field = free_fields.swap_remove(below(rng, free_fields.len()));
            let color = free_colors.swap_remove(below(rng, free_colors.len()));
            // A square takes a third to two thirds of its field, beside the line at its edge.
            let side = field_side / 3 + below(rng, field_side / 3 + 1);
            let offset = |rng: &mut ChaCha8Rng| 1 + below(rng, field_side - side);
            let (row, column) = (field / fields, field % fields);
            let (top, left) = (row * field_side + offset(rng), column * field_side + offset(rng));
            Square { field, color, top, left, side }
        });
        Scene { shade, squares: drawn.collect() }
    }

    /// What the agent sees of `scene`.
    fn observation(&self, scene: &Scene) -> Result<Observation> {
        let (color, _) = COLORS[scene.squares[0].color];
        let picture = scene.paint(&self.options)?;
        Ok(Observation::with_pictures(format!("Where is the {color} square?"), vec![picture]))
    }
}

impl Scene {
    /// Whether only validations show this picture.
    fn is_held_out(&self) -> bool {
        is_held_out(&format!("{self:?}"), HELD_OUT)
    }

    fn paint(&self, options: &FindSquareOptions) -> Result<Picture> {
        let (side, field_side) = (options.side, options.side / options.fields);
        let mut pixels = vec![0; side * side * 3];
        if !options.black {
            for (i, pixel) in pixels.chunks_exact_mut(3).enumerate() {
                let is_line = |at: usize| at.is_multiple_of(field_side);
                let line = if is_line(i / side) || is_line(i % side) { LINE } else { 0 };
                pixel.fill(self.shade + line);
            }
            for Square { color, top, left, side: length, .. } in &self.squares {
                for row in *top..(top + length).min(side) {
                    for column in *left..(left + length).min(side) {
                        pixels[(row * side + column) * 3..][..3].copy_from_slice(&COLORS[*color].1);
                    }
                }
            }
        }
        Picture::new(Tensor::new(pixels, [side, side, 3])?)
    }
}

impl Environment for FindSquare {
    fn enter(&mut self, split: Split, _number: u64) -> Result<()> {
        self.split = split;
        Ok(())
    }

    fn reset(&mut self, seed: u64) -> Result<Observation> {
        self.rng = Noise::new(seed).generator(Purpose::Environments, 0, 0);
        (self.answers, self.right) = (0, 0);
        let scene = self.draw();
        let observation = self.observation(&scene)?;
        self.scene = Some(scene);
        Ok(observation)
    }

    fn step(&mut self, action: &str) -> Result<Transition> {
        let misuse = || Error::Misuse("a step of an environment that was not reset".into());
        let scene = self.scene.take().ok_or_else(misuse)?;
        let names: Vec<(&str, usize)> =
            LETTERS.iter().take(self.options.fields.pow(2)).enumerate().map(|(i, letter)| (*letter, i)).collect();
        let found = self.pattern.find(action, &names);
        let is_right = found == Some(scene.squares[0].field);
        self.answers += 1;
        self.right += usize::from(is_right);
        let terminated = self.answers == self.options.pictures;
        let observation = if terminated {
            Observation::default()
        } else {
            let next = self.draw();
            let observation = self.observation(&next)?;
            self.scene = Some(next);
            observation
        };
        let reward = if found.is_none() { self.options.format_penalty } else { f64::from(u8::from(is_right)) };
        Ok(Transition { observation, reward, terminated, truncated: false, valid: found.is_some() })
    }

    fn instructions(&self) -> String {
        if let Some(instructions) = &self.options.env_instruction {
            return instructions.clone();
        }
        let fields = self.options.fields;
        let rows: Vec<String> = LETTERS[..fields * fields].chunks(fields).map(|row| row.join(" ")).collect();
        format!(
            "A grid divides the picture into fields with these names, row by row:\n{}\nAnswer with the name of a field, \
             such as <answer>A</answer>",
            rows.join("\n")
        )
    }

    fn solved(&self) -> Option<bool> {
        Some(self.answers > 0 && self.right == self.options.pictures)
    }

    fn action(&self) -> String {
        self.pattern.latest().to_string()
    }
}

roll_core::register! {
    Environment, NAME, FindSquareOptions,
    "See in which field of a picture a square of a color lies",
    |options, _| FindSquare::new(options),
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn world(change: impl FnOnce(&mut FindSquareOptions)) -> FindSquare {
        let mut options = FindSquareOptions::default();
        change(&mut options);
        FindSquare::new(options).unwrap()
    }

    /// The field with pixels of the color that the text asks for.
    fn seen(observation: &Observation, fields: usize) -> usize {
        let (_, color) = COLORS.iter().find(|(name, _)| observation.text.contains(name)).unwrap();
        let picture = &observation.pictures[0];
        let [_, side] = picture.size();
        let at = picture.pixels().as_bytes().chunks_exact(3).position(|pixel| pixel == color).unwrap();
        (at / side) / (side / fields) * fields + (at % side) / (side / fields)
    }

    #[test]
    fn the_picture_tells_the_answer_and_the_text_does_not() {
        for (fields, squares, side) in [(2, 1, 56), (3, 4, 84), (5, 5, 40), (3, 2, 100)] {
            let mut world = world(|options| {
                (options.fields, options.squares, options.side, options.pictures) = (fields, squares, side, 2);
            });
            let mut fields_of_text: Vec<(String, usize)> = Vec::new();
            for seed in 0..300 {
                let mut observation = world.reset(seed).unwrap();
                for turn in 1..=2 {
                    let field = seen(&observation, fields);
                    fields_of_text.push((observation.text, field));
                    let next = world.step(&format!("<answer>{}</answer>", LETTERS[field].to_lowercase())).unwrap();
                    assert_eq!((next.reward, next.valid, next.terminated), (1.0, true, turn == 2));
                    observation = next.observation;
                }
                assert_eq!(world.solved(), Some(true));
            }
            // The commonest answer to any text is little more frequent than by chance.
            for (name, _) in COLORS {
                let asked: Vec<usize> =
                    fields_of_text.iter().filter(|(t, _)| t.contains(name)).map(|(_, f)| *f).collect();
                let most =
                    (0..fields * fields).map(|field| asked.iter().filter(|f| **f == field).count()).max().unwrap();
                let chance = 1.0 / (fields * fields) as f64;
                assert!((most as f64) < asked.len() as f64 * chance * 1.25 + 12.0, "{most} of {}", asked.len());
            }
        }
    }

    #[test]
    fn other_answers_are_wrong_or_not_valid() {
        let mut world = world(|options| options.format_penalty = -0.5);
        let field = seen(&world.reset(3).unwrap(), 2);
        let wrong = world.step(&format!("<answer>{}</answer>", LETTERS[(field + 1) % 4])).unwrap();
        assert_eq!((wrong.reward, wrong.valid, world.solved()), (0.0, true, Some(false)));
        assert!(world.step("<answer>A</answer>").is_err(), "the episode is over");
        world.reset(3).unwrap();
        let invalid = world.step("<answer>E</answer>").unwrap();
        assert_eq!((invalid.reward, invalid.valid, invalid.terminated), (-0.5, false, true));
    }

    #[test]
    fn pictures_of_validations_are_never_trained_on() {
        let shown = |split| -> Vec<Picture> {
            let mut world = world(|_| {});
            world.enter(split, 0).unwrap();
            (0..400).map(|seed| world.reset(seed).unwrap().pictures.remove(0)).collect()
        };
        let (train, validation) = (shown(Split::Train), shown(Split::Validation));
        assert!(!validation.iter().any(|picture| train.contains(picture)));
        assert_eq!(shown(Split::Train), train, "a picture depends on its seed alone");
    }

    #[test]
    fn black_pictures_tell_nothing() {
        let mut world = world(|options| options.black = true);
        let pictures: Vec<Picture> = (0..9).map(|seed| world.reset(seed).unwrap().pictures.remove(0)).collect();
        assert!(pictures.iter().all(|picture| picture.pixels().as_bytes().iter().all(|byte| *byte == 0)));
    }

    #[test]
    fn options_out_of_range_are_named() {
        for (key, change) in [
            ("env.fields", (|o| o.fields = 6) as fn(&mut FindSquareOptions)),
            ("env.squares", |o| o.squares = 5),
            ("env.side", |o| o.side = 15),
            ("env.pictures", |o| o.pictures = 0),
            ("env.action_pattern", |o| o.action_pattern = "A".into()),
        ] {
            let mut options = FindSquareOptions::default();
            change(&mut options);
            let problem = FindSquare::new(options).err().unwrap().to_string();
            assert!(problem.contains(key), "{problem}");
        }
    }
}
