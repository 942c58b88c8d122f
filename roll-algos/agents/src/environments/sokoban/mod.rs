//! Sokoban: push all boxes onto targets. Rules and rewards follow gym-sokoban, the text follows the reference
//! implementation.

mod room;

use std::collections::BTreeMap;

use roll_core::{Environment, Error, Observation, Result, Transition};

use super::action::{ActionPattern, DEFAULT_PATTERN, default_special_tokens};
pub use room::{Position, Room};

const NAME: &str = "sokoban";
/// Greatest side of a room. Larger rooms do not fit into a prompt.
const MAX_SIDE: usize = 64;

/// Reward of each turn.
const STEP: f64 = -0.1;
/// Reward when a box is pushed onto a target; subtracted again when it leaves the target.
const BOX_ON_TARGET: f64 = 1.0;
/// Additional reward when all boxes are on targets.
const FINISHED: f64 = 10.0;

/// Options of the environment `sokoban`.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SokobanOptions {
    /// Number of rows and columns, including walls.
    pub dim_room: [usize; 2],
    /// Number of boxes.
    pub num_boxes: usize,
    /// Number of turns after which an episode is truncated.
    pub max_steps: usize,
    /// Number of states that the search for a starting position visits. More states produce harder levels.
    pub search_depth: usize,
    /// Steps of the random walk that carves the room. Default: 1.7 times the sum of the sides.
    pub num_gen_steps: Option<usize>,
    /// Added to the reward of a turn without a valid action.
    pub format_penalty: f64,
    /// Regular expression whose last group is the action.
    pub action_pattern: String,
    /// Texts that are deleted from an answer before the search.
    pub special_token_list: Vec<String>,
    /// First sentences of the instructions.
    pub env_instruction: Option<String>,
    /// Symbols of wall (0), floor (1), target (2), box on target (3), box (4), player (5) and player on target (6).
    pub grid_lookup: Option<BTreeMap<u8, String>>,
}

impl Default for SokobanOptions {
    fn default() -> Self {
        Self {
            dim_room: [10, 10],
            num_boxes: 4,
            max_steps: 20,
            search_depth: 300,
            num_gen_steps: None,
            format_penalty: 0.0,
            action_pattern: DEFAULT_PATTERN.into(),
            special_token_list: default_special_tokens(),
            env_instruction: None,
            grid_lookup: None,
        }
    }
}

/// Number in `grid_lookup`, default symbol and meaning of each kind of cell, in the order of the instructions.
const SYMBOLS: [(u8, &str, &str); 7] = [
    (0, "#", "wall"),
    (1, "_", "empty"),
    (2, "O", "target"),
    (3, "√", "box on target"),
    (4, "X", "box"),
    (5, "P", "player"),
    (6, "S", "player on target"),
];

/// Name and step (down, right) of each move.
const MOVES: [(&str, (isize, isize)); 4] = [("Up", (-1, 0)), ("Down", (1, 0)), ("Left", (0, -1)), ("Right", (0, 1))];

/// The environment.
pub struct Sokoban {
    options: SokobanOptions,
    pattern: ActionPattern,
    room: Option<Room>,
    /// Number of turns of the current episode.
    steps: usize,
}

impl Sokoban {
    /// Creates the environment. Fails on options out of range.
    pub fn new(options: SokobanOptions) -> Result<Self> {
        if options.dim_room.iter().any(|side| !(4..=MAX_SIDE).contains(side)) {
            let problem = format!("expected sides of 4 to {MAX_SIDE}, found {:?}", options.dim_room);
            return Err(Error::config("env.dim_room", problem));
        }
        let inner = (options.dim_room[0] - 2) * (options.dim_room[1] - 2);
        if options.num_boxes == 0 || options.num_boxes + 1 >= inner {
            let problem = format!("{} boxes and a player do not fit into {:?}", options.num_boxes, options.dim_room);
            return Err(Error::config("env.num_boxes", problem));
        }
        if let Some(unknown) = options.grid_lookup.iter().flat_map(|l| l.keys()).find(|k| **k > 6) {
            return Err(Error::config("env.grid_lookup", format!("{unknown} is not a kind of cell; there are 0 to 6")));
        }
        let pattern = ActionPattern::new(&options.action_pattern, options.special_token_list.clone())?;
        Ok(Self { options, pattern, room: None, steps: 0 })
    }

    /// The symbol of a kind of cell ([`Room::kind`]).
    fn symbol(&self, kind: u8) -> &str {
        let configured = self.options.grid_lookup.as_ref().and_then(|lookup| lookup.get(&kind));
        configured.map_or_else(|| SYMBOLS[usize::from(kind)].1, String::as_str)
    }

    fn render(&self, room: &Room) -> String {
        let [rows, columns] = self.options.dim_room;
        let row = |r: usize| (0..columns).map(|c| self.symbol(room.kind(Position(r, c)))).collect::<String>();
        (0..rows).map(row).collect::<Vec<_>>().join("\n")
    }
}

impl Environment for Sokoban {
    fn reset(&mut self, seed: u64) -> Result<Observation> {
        let [rows, columns] = self.options.dim_room;
        let carving = self.options.num_gen_steps.unwrap_or((rows + columns) * 17 / 10);
        let room = Room::generate([rows, columns], self.options.num_boxes, carving, self.options.search_depth, seed)
            .ok_or_else(|| {
                let problem = "no level of this size could be made: make the room larger, or use fewer boxes";
                Error::config("env.num_boxes", problem)
            })?;
        self.steps = 0;
        let text = self.render(&room);
        self.room = Some(room);
        Ok(Observation::text(text))
    }

    fn step(&mut self, action: &str) -> Result<Transition> {
        let action = self.pattern.find(action, &MOVES);
        let room = self.room.as_mut();
        let room = room.ok_or_else(|| Error::Misuse("a step of an environment that was not reset".into()))?;
        self.steps += 1;
        let mut reward = STEP;
        match action {
            Some(step) => {
                let before = room.boxes_on_targets();
                room.push(step);
                let after = room.boxes_on_targets();
                reward += BOX_ON_TARGET * (after as f64 - before as f64);
                if room.solved() {
                    reward += FINISHED;
                }
            }
            None => reward += self.options.format_penalty,
        }
        let (solved, cut_off) = (room.solved(), self.steps >= self.options.max_steps);
        let text = self.room.as_ref().map(|room| self.render(room)).unwrap_or_default();
        Ok(Transition {
            observation: Observation::text(text),
            reward,
            terminated: solved || cut_off,
            truncated: cut_off && !solved,
            valid: action.is_some(),
        })
    }

    fn instructions(&self) -> String {
        if self.options.env_instruction.as_deref() == Some("") {
            return String::new();
        }
        let task = self.options.env_instruction.as_deref().unwrap_or(
            "You are solving the Sokoban puzzle. You are the player and you need to push all boxes to targets. When you \
             are right next to a box, you can push it by moving in the same direction. You cannot push a box through a \
             wall, and you cannot pull a box. The answer must be one of action in a turn, format is \
             <answer>Right</answer>.",
        );
        let symbols = SYMBOLS.map(|(kind, _, meaning)| format!("{}: {meaning}", self.symbol(kind))).join(", ");
        let actions = MOVES.map(|(name, _)| name).join(", ");
        format!(
            "{task}\nThe meaning of each symbol in the state is:\n{symbols}\nYour available actions are:\n{actions}"
        )
    }

    fn solved(&self) -> Option<bool> {
        Some(self.room.as_ref().is_some_and(Room::solved))
    }

    fn action(&self) -> String {
        self.pattern.latest().to_string()
    }
}

roll_core::register! {
    Environment, NAME, SokobanOptions,
    "Push all boxes onto targets",
    |options, _| Sokoban::new(options),
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn small() -> SokobanOptions {
        SokobanOptions { dim_room: [6, 6], num_boxes: 1, max_steps: 60, search_depth: 100, ..Default::default() }
    }

    #[test]
    fn every_level_can_be_solved_and_none_is_solved_at_first() {
        for (options, seeds) in [(small(), 60), (SokobanOptions { num_boxes: 2, dim_room: [7, 7], ..small() }, 20)] {
            for seed in 0..seeds {
                let mut sokoban = Sokoban::new(options.clone()).unwrap();
                let text = sokoban.reset(seed).unwrap().text;
                assert_eq!(sokoban.solved(), Some(false), "{text}");
                let path = sokoban.room.as_ref().unwrap().solution().unwrap_or_else(|| panic!("no way out of\n{text}"));
                let mut last = None;
                for step in path {
                    let (name, _) = MOVES.into_iter().find(|(_, s)| *s == step).unwrap();
                    last = Some(sokoban.step(&format!("<answer>{name}</answer>")).unwrap());
                }
                let last = last.unwrap();
                assert!(last.terminated && last.reward > 10.0, "{last:?}");
            }
        }
    }

    #[test]
    fn rewards_are_those_of_the_reference() {
        let mut sokoban = Sokoban::new(SokobanOptions { format_penalty: -0.15, ..small() }).unwrap();
        sokoban.reset(0).unwrap();
        let room = ["######", "#P___#", "#_X_O#", "#____#", "#____#", "######"];
        sokoban.room = Some(Room::parse(&room));
        let mut rewards = Vec::new();
        for answer in ["hm", "Down", "Right", "Right"] {
            rewards.push(sokoban.step(&format!("<answer>{answer}</answer>")).unwrap().reward);
        }
        assert_eq!(rewards, [-0.25, -0.1, -0.1, 10.9]);
        assert_eq!(sokoban.render(sokoban.room.as_ref().unwrap()).lines().nth(2), Some("#__P√#"));
    }

    #[test]
    fn boxes_do_not_go_through_walls_or_boxes() {
        let mut room = Room::parse(&["######", "#PXX_#", "#O__O#", "######"]);
        room.push((0, 1));
        assert_eq!(room.kind(Position(1, 1)), 5);
        let mut room = Room::parse(&["######", "#_PX##", "#O___#", "######"]);
        room.push((0, 1));
        assert_eq!((room.kind(Position(1, 2)), room.kind(Position(1, 3))), (5, 4));
    }

    #[test]
    fn a_level_depends_on_its_seed_alone_and_is_cut_off_in_time() {
        let mut sokoban = Sokoban::new(SokobanOptions { max_steps: 2, ..small() }).unwrap();
        let first = sokoban.reset(5).unwrap();
        assert!(!sokoban.step("").unwrap().terminated);
        let last = sokoban.step("").unwrap();
        assert!(last.terminated && last.truncated && !last.valid);
        assert_ne!(sokoban.reset(6).unwrap(), first);
        assert_eq!(sokoban.reset(5).unwrap(), first);
    }

    #[test]
    fn options_without_a_level_are_refused() {
        let refused = |options: SokobanOptions| Sokoban::new(options).err().unwrap().to_string();
        assert!(refused(SokobanOptions { dim_room: [3, 9], ..small() }).contains("dim_room"));
        assert!(refused(SokobanOptions { num_boxes: 0, ..small() }).contains("num_boxes"));
        assert!(refused(SokobanOptions { num_boxes: 99, ..small() }).contains("num_boxes"));
        let symbols = BTreeMap::from([(9, "?".to_string())]);
        assert!(refused(SokobanOptions { grid_lookup: Some(symbols), ..small() }).contains("grid_lookup"));
    }
}
