//! Conversations about Sokoban with one box: a player that reads the room aloud and then plays badly.

use std::collections::{HashSet, VecDeque};

use rand::seq::IndexedRandom;
use roll_algos::environments::Sokoban;
use roll_algos::environments::sokoban::SokobanOptions;
use roll_core::{Noise, Purpose, Result};
use serde_json::Value;

use crate::Player;
use crate::episode::{self, goes_away};

/// Turns of a conversation.
const TURNS: usize = 12;

/// A move as the answer names it, as the reading names it, and its step in rows and columns.
type Move = (&'static str, &'static str, (isize, isize));
const MOVES: [Move; 4] =
    [("Left", "left", (0, -1)), ("Down", "down", (1, 0)), ("Right", "right", (0, 1)), ("Up", "up", (-1, 0))];

/// Row and column.
type Cell = (usize, usize);

/// Conversation number `index`: an episode of Sokoban in a room of 6 x 6 cells.
pub fn conversation(noise: &Noise, index: u64, player: Player) -> Result<Value> {
    let mut rng = noise.generator(Purpose::Synthetic, 2, index);
    let mut world = Sokoban::new(SokobanOptions { dim_room: [6, 6], num_boxes: 1, ..SokobanOptions::default() })?;
    episode::conversation(&mut world, &mut rng, TURNS, |shown, rng| {
        let room = Room::read(shown);
        let away = goes_away(rng, player.away);
        let action = room.bad_moves(away, player.careless).choose(rng).copied().unwrap_or(MOVES[0].0);
        format!("<think>{}</think><answer>{action}</answer>", room.reading())
    })
}

/// A room with one box.
#[derive(Clone, Debug)]
struct Room {
    walls: Vec<Vec<bool>>,
    player_at: Cell,
    box_at: Cell,
    target_at: Cell,
}

impl Room {
    /// From the map that the environment shows.
    fn read(map: &str) -> Self {
        let rows: Vec<Vec<char>> = map.lines().map(|line| line.chars().collect()).collect();
        let find = |symbols: &[char]| -> Option<Cell> {
            rows.iter().enumerate().find_map(|(r, row)| Some((r, row.iter().position(|c| symbols.contains(c))?)))
        };
        Self {
            walls: rows.iter().map(|row| row.iter().map(|c| *c == '#').collect()).collect(),
            player_at: find(&['P', 'S']).unwrap_or_default(),
            box_at: find(&['X', '√']).unwrap_or_default(),
            target_at: find(&['O', 'S', '√']).unwrap_or_default(),
        }
    }

    fn is_wall(&self, (row, column): Cell) -> bool {
        self.walls.get(row).and_then(|cells| cells.get(column)).copied().unwrap_or(true)
    }

    /// The room after a move: as before where a wall is in the way.
    fn after(&self, step: (isize, isize)) -> Self {
        let to = beside(self.player_at, step);
        let mut next = self.clone();
        if self.is_wall(to) {
            return next;
        }
        if to == self.box_at {
            let pushed = beside(to, step);
            if self.is_wall(pushed) {
                return next;
            }
            next.box_at = pushed;
        }
        next.player_at = to;
        next
    }

    /// Number of moves to the solution; nothing when there is none.
    fn distance(&self) -> Option<usize> {
        let mut seen = HashSet::from([(self.player_at, self.box_at)]);
        let mut open = VecDeque::from([(self.clone(), 0)]);
        while let Some((room, moves)) = open.pop_front() {
            if room.box_at == room.target_at {
                return Some(moves);
            }
            for (_, _, step) in MOVES {
                let next = room.after(step);
                if seen.insert((next.player_at, next.box_at)) {
                    open.push_back((next, moves + 1));
                }
            }
        }
        None
    }

    /// The moves among which the player draws: `away` asks for longer ways to the solution. Moves after which there is
    /// none are for the careless.
    fn bad_moves(&self, away: bool, careless: bool) -> Vec<&'static str> {
        let now = self.distance();
        let after: Vec<_> = MOVES.iter().map(|(name, _, step)| (*name, self.after(*step).distance())).collect();
        let chosen = |keep: &dyn Fn(Option<usize>) -> bool| -> Vec<&'static str> {
            after.iter().filter(|(_, distance)| keep(*distance)).map(|(name, _)| *name).collect()
        };
        let longer = match away {
            true => chosen(&|distance| (careless || distance.is_some()) && distance.is_none_or(|d| Some(d) > now)),
            false => Vec::new(),
        };
        let solvable = chosen(&|distance| careless || distance.is_some());
        [longer, solvable].into_iter().find(|moves| !moves.is_empty()).unwrap_or_else(|| chosen(&|_| true))
    }

    /// The player's place, the box from there, the target from the box, and the walls beside the player. Rows and
    /// columns count from 1.
    fn reading(&self) -> String {
        let place = |(row, column): Cell| format!("{} {}", row + 1, column + 1);
        let beside_player = MOVES.iter().filter(|(_, _, step)| self.is_wall(beside(self.player_at, *step)));
        let walls: String = beside_player.map(|(_, name, _)| format!(" {name}")).collect();
        format!(
            "at {}, box {}:{}, goal {}:{}, walls{}",
            place(self.player_at),
            place(self.box_at),
            way(self.player_at, self.box_at),
            place(self.target_at),
            way(self.box_at, self.target_at),
            if walls.is_empty() { " none" } else { &walls },
        )
    }
}

/// The cell one step away; walls surround a room, so that no step leaves it.
fn beside((row, column): Cell, (down, right): (isize, isize)) -> Cell {
    (row.saturating_add_signed(down), column.saturating_add_signed(right))
}

/// How far it is from one cell to another: ` down 2 left 1`.
fn way(from: Cell, to: Cell) -> String {
    let along = |from: usize, to: usize, back: &str, on: &str| match from.abs_diff(to) {
        0 => String::new(),
        distance => format!(" {} {distance}", if to < from { back } else { on }),
    };
    along(from.0, to.0, "up", "down") + &along(from.1, to.1, "left", "right")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const ROOM: &str = "######\n#P___#\n#_X_O#\n#____#\n#____#\n######";

    #[test]
    fn a_room_is_read_as_it_is() {
        let room = Room::read(ROOM);
        assert_eq!(room.reading(), "at 2 2, box 3 3: down 1 right 1, goal 3 5: right 2, walls left up");
        let room = Room::read("######\n#_X__#\n#_S__#\n######");
        assert_eq!(room.reading(), "at 3 3, box 2 3: up 1, goal 3 3: down 1, walls down");
    }

    #[test]
    fn the_distance_counts_moves_and_knows_of_boxes_that_are_stuck() {
        assert_eq!(Room::read(ROOM).distance(), Some(3));
        assert_eq!(Room::read("######\n#X__P#\n#__O_#\n######").distance(), None);
    }

    #[test]
    fn bad_moves_lengthen_the_way_and_only_the_careless_get_stuck() {
        let room = Room::read(ROOM);
        assert_eq!(room.bad_moves(true, false), ["Right"]);
        assert_eq!(room.bad_moves(false, false).len(), 4);
        let edge = Room::read("######\n#____#\n#_XP_#\n#_O__#\n######");
        assert!(!edge.bad_moves(true, false).contains(&"Left"));
        assert!(edge.bad_moves(true, true).contains(&"Left"));
    }

    #[test]
    fn conversations_are_in_form_and_repeat_with_the_seed() {
        episode::tests::are_in_form_and_repeat(20, TURNS, super::conversation);
    }
}
