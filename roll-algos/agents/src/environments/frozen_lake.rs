//! FrozenLake: cross the ice to the goal without falling into a hole. Rules follow Gymnasium, the text follows the
//! reference implementation.

use rand_chacha::ChaCha8Rng;
use roll_core::{Environment, Error, Noise, Observation, Purpose, Result, Transition};

use super::action::{ActionPattern, DEFAULT_PATTERN, default_special_tokens};
use super::{below, uniform};

const NAME: &str = "frozen_lake";
/// Greatest size of a map. Larger maps do not fit into a prompt.
const MAX_SIZE: usize = 64;
/// Number of maps that are drawn before the configuration is reported as having no passable map.
const MAX_DRAWS: usize = 10_000;

/// Options of the environment `frozen_lake`.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct FrozenLakeOptions {
    /// Number of rows and of columns of the map.
    #[schemars(range(min = 2, max = MAX_SIZE))]
    pub size: usize,
    /// Probability that a tile is ice instead of a hole.
    #[schemars(range(min = 0, max = 1))]
    pub p: f64,
    /// Whether the ice is slippery. On slippery ice the player moves in the intended direction, or at a right angle to
    /// either side, each with probability 1/3.
    pub is_slippery: bool,
    /// Seed of the map. Default: the episode's seed, so that every episode has another map.
    pub map_seed: Option<u64>,
    /// Reward of a turn without a valid action.
    pub format_penalty: f64,
    /// Regular expression whose last group is the action.
    pub action_pattern: String,
    /// Texts that are deleted from an answer before the search.
    pub special_token_list: Vec<String>,
    /// First sentences of the instructions. An empty text removes all instructions.
    pub env_instruction: Option<String>,
}

impl Default for FrozenLakeOptions {
    fn default() -> Self {
        Self {
            size: 4,
            p: 0.8,
            is_slippery: true,
            map_seed: None,
            format_penalty: 0.0,
            action_pattern: DEFAULT_PATTERN.into(),
            special_token_list: default_special_tokens(),
            env_instruction: None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tile {
    Ice,
    Hole,
    Goal,
}

/// Name and step (down, right) of each move. Neighbours in this circular order are at right angles, so that a slip
/// makes the previous or the next move.
const MOVES: [(&str, (isize, isize)); 4] = [("Left", (0, -1)), ("Down", (1, 0)), ("Right", (0, 1)), ("Up", (-1, 0))];

/// The environment.
pub struct FrozenLake {
    options: FrozenLakeOptions,
    pattern: ActionPattern,
    /// The map, row by row; empty before the first episode.
    tiles: Vec<Tile>,
    /// Index of the player's tile.
    player: usize,
    /// The generator of slips.
    rng: ChaCha8Rng,
}

impl FrozenLake {
    /// Creates the environment. Fails on options out of range.
    pub fn new(options: FrozenLakeOptions) -> Result<Self> {
        if !(2..=MAX_SIZE).contains(&options.size) {
            let problem = format!("expected 2 to {MAX_SIZE}, found {}", options.size);
            return Err(Error::config("env.size", problem));
        }
        if !(options.p > 0.0 && options.p <= 1.0) {
            return Err(Error::config("env.p", format!("expected a number in (0, 1], found {}", options.p)));
        }
        let pattern = ActionPattern::new(&options.action_pattern, options.special_token_list.clone())?;
        let rng = Noise::new(0).generator(Purpose::Environments, 0, 0);
        Ok(Self { options, pattern, tiles: Vec::new(), player: 0, rng })
    }

    /// Draws a map with a path from start to goal; returns it and the index of the start.
    fn draw(&self, seed: u64) -> Result<(Vec<Tile>, usize)> {
        let mut rng = Noise::new(seed).generator(Purpose::Environments, 0, 0);
        let cells = self.options.size * self.options.size;
        for _ in 0..MAX_DRAWS {
            let ice = |rng: &mut ChaCha8Rng| uniform(rng) < self.options.p;
            let mut tiles: Vec<_> = (0..cells).map(|_| if ice(&mut rng) { Tile::Ice } else { Tile::Hole }).collect();
            let (start, goal) = (below(&mut rng, cells), below(&mut rng, cells));
            if start == goal {
                continue;
            }
            (tiles[start], tiles[goal]) = (Tile::Ice, Tile::Goal);
            if self.passable(&tiles, start) {
                return Ok((tiles, start));
            }
        }
        let problem = format!("with {} there is hardly ever a way to the goal of a map of this size", self.options.p);
        Err(Error::config("env.p", problem))
    }

    /// Whether a path leads from `start` to the goal.
    fn passable(&self, tiles: &[Tile], start: usize) -> bool {
        let mut seen = vec![false; tiles.len()];
        let mut unexplored = vec![start];
        seen[start] = true;
        while let Some(at) = unexplored.pop() {
            if tiles[at] == Tile::Goal {
                return true;
            }
            for (_, step) in MOVES {
                let next = self.moved(at, step);
                if tiles[next] != Tile::Hole && !std::mem::replace(&mut seen[next], true) {
                    unexplored.push(next);
                }
            }
        }
        false
    }

    /// The tile that a step from the tile `at` leads to; at the edge of the map, `at` itself.
    fn moved(&self, at: usize, (down, right): (isize, isize)) -> usize {
        let size = self.options.size;
        let step = |v: usize, by: isize| v.saturating_add_signed(by).min(size - 1);
        step(at / size, down) * size + step(at % size, right)
    }

    fn render(&self) -> String {
        let symbol = |(i, tile): (usize, &Tile)| match (i == self.player, tile) {
            (true, Tile::Ice) => 'P',
            (true, Tile::Hole) => 'X',
            (true, Tile::Goal) => '√',
            (false, Tile::Ice) => '_',
            (false, Tile::Hole) => 'O',
            (false, Tile::Goal) => 'G',
        };
        let symbols: Vec<char> = self.tiles.iter().enumerate().map(symbol).collect();
        symbols.chunks(self.options.size).map(|row| row.iter().collect::<String>()).collect::<Vec<_>>().join("\n")
    }

    /// The player's tile.
    fn tile(&self) -> Tile {
        self.tiles.get(self.player).copied().unwrap_or(Tile::Ice)
    }
}

impl Environment for FrozenLake {
    fn reset(&mut self, seed: u64) -> Result<Observation> {
        (self.tiles, self.player) = self.draw(self.options.map_seed.unwrap_or(seed))?;
        self.rng = Noise::new(seed).generator(Purpose::Environments, 1, 0);
        Ok(Observation::text(self.render()))
    }

    fn step(&mut self, action: &str) -> Result<Transition> {
        if self.tiles.is_empty() {
            return Err(Error::Misuse("a step of an environment that was not reset".into()));
        }
        let names: Vec<(&str, usize)> = MOVES.iter().enumerate().map(|(i, (name, _))| (*name, i)).collect();
        let Some(intended) = self.pattern.find(action, &names) else {
            return Ok(Transition {
                observation: Observation::text(self.render()),
                reward: self.options.format_penalty,
                terminated: false,
                truncated: false,
                valid: false,
            });
        };
        // 0 is the move before the intended one, 1 the intended one, 2 the move after it.
        let slip = if self.options.is_slippery { below(&mut self.rng, 3) } else { 1 };
        let (_, step) = MOVES[(intended + MOVES.len() + slip - 1) % MOVES.len()];
        self.player = self.moved(self.player, step);
        Ok(Transition {
            observation: Observation::text(self.render()),
            reward: f64::from(u8::from(self.tile() == Tile::Goal)),
            terminated: self.tile() != Tile::Ice,
            truncated: false,
            valid: true,
        })
    }

    fn instructions(&self) -> String {
        if self.options.env_instruction.as_deref() == Some("") {
            return String::new();
        }
        let task = self.options.env_instruction.as_deref().unwrap_or(
            "You are solving the FrozenLake puzzle. Forbid the whole and go to the target. You may move to the \
             unintended direction due to the slippery ice. The answer must be one of action in a turn, format is \
             <answer>Right</answer>",
        );
        format!(
            "{task}\nThe meaning of each symbol in the state is:\nP: player, _: empty, O: hole, G: goal, X: player in \
             hole, √: player on goal\nYour available actions are:\nLeft, Down, Right, Up"
        )
    }

    fn solved(&self) -> Option<bool> {
        Some(self.tile() == Tile::Goal)
    }

    fn action(&self) -> String {
        self.pattern.latest().to_string()
    }
}

roll_core::register! {
    Environment, NAME, FrozenLakeOptions,
    "Cross the ice to the goal without falling into a hole",
    |options, _| FrozenLake::new(options),
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn lake(is_slippery: bool) -> FrozenLake {
        FrozenLake::new(FrozenLakeOptions { is_slippery, format_penalty: -0.1, ..Default::default() }).unwrap()
    }

    fn answer(name: &str) -> String {
        format!("<answer>{name}</answer>")
    }

    /// A shortest path to the goal, as names of moves.
    fn way(lake: &FrozenLake) -> Vec<&'static str> {
        let mut open = std::collections::VecDeque::from([(lake.player, Vec::new())]);
        let mut seen = vec![false; lake.tiles.len()];
        while let Some((at, path)) = open.pop_front() {
            if lake.tiles[at] == Tile::Goal {
                return path;
            }
            for (name, step) in MOVES {
                let next = lake.moved(at, step);
                if lake.tiles[next] != Tile::Hole && !std::mem::replace(&mut seen[next], true) {
                    open.push_back((next, [path.clone(), vec![name]].concat()));
                }
            }
        }
        panic!("every map has a way");
    }

    #[test]
    fn every_map_can_be_crossed() {
        for seed in 0..200 {
            let mut lake = lake(false);
            let map = lake.reset(seed).unwrap().text;
            assert_eq!((map.matches('P').count(), map.matches('G').count(), map.lines().count()), (1, 1, 4), "{map}");
            let path = way(&lake);
            for (i, name) in path.iter().enumerate() {
                let step = lake.step(&answer(name)).unwrap();
                let last = i + 1 == path.len();
                assert_eq!((step.reward, step.terminated, step.valid), (f64::from(u8::from(last)), last, true));
            }
            assert_eq!(lake.solved(), Some(true));
        }
    }

    #[test]
    fn a_world_depends_on_its_seed_alone() {
        let text = |seed, slippery| {
            let mut lake = lake(slippery);
            let mut text = lake.reset(seed).unwrap().text;
            for _ in 0..6 {
                text += &lake.step(&answer("Down")).unwrap().observation.text;
            }
            text
        };
        assert_eq!(text(3, true), text(3, true));
        assert_ne!(text(3, true), text(4, true));
    }

    #[test]
    fn ice_slips_to_either_side_one_time_in_three_each() {
        let options = FrozenLakeOptions { size: 9, p: 1.0, ..Default::default() };
        let mut lake = FrozenLake::new(options).unwrap();
        lake.reset(0).unwrap();
        let (mut forward, mut back) = (0, 0);
        for _ in 0..3000 {
            lake.player = 40;
            lake.tiles.fill(Tile::Ice);
            lake.step(&answer("Right")).unwrap();
            forward += usize::from(lake.player == 41);
            back += usize::from(lake.player == 39);
        }
        assert_eq!(back, 0);
        assert!((900..1100).contains(&forward), "{forward}");
    }

    #[test]
    fn an_answer_without_action_is_punished_and_changes_nothing() {
        let mut lake = lake(false);
        let before = lake.reset(1).unwrap();
        let step = lake.step("Let me think").unwrap();
        assert_eq!((step.valid, step.reward, step.terminated, step.observation), (false, -0.1, false, before));
    }

    #[test]
    fn options_without_a_world_are_refused() {
        let refused = |options: FrozenLakeOptions| FrozenLake::new(options).err().unwrap().to_string();
        assert!(refused(FrozenLakeOptions { size: 1, ..Default::default() }).contains("env.size"));
        assert!(refused(FrozenLakeOptions { p: 0.0, ..Default::default() }).contains("env.p"));
        let mut thin = FrozenLake::new(FrozenLakeOptions { size: 40, p: 0.01, ..Default::default() }).unwrap();
        // Start and goal may be neighbours even here; the test only requires that this call returns.
        let _ = thin.reset(0);
        assert!(lake(false).step(&answer("Up")).is_err());
    }
}
