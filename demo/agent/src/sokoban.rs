//! Conversations about Sokoban with one box. The player reads the room aloud and then plays badly.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};

use rand::seq::IndexedRandom;
use roll_agents::environments::Sokoban;
use roll_agents::environments::sokoban::SokobanOptions;
use roll_core::{Noise, Purpose, Result};
use serde_json::Value;

use crate::Player;
use crate::episode::{self, goes_away};

/// Maximal number of turns of an episode.
const TURNS: usize = 12;

/// A move: its name in the answer, its name in the reading, and its step in rows and columns.
type Move = (&'static str, &'static str, (isize, isize));
const MOVES: [Move; 4] =
    [("Left", "left", (0, -1)), ("Down", "down", (1, 0)), ("Right", "right", (0, 1)), ("Up", "up", (-1, 0))];

/// Row and column.
type Cell = (usize, usize);

/// Returns the conversations of episode `index` of Sokoban in a room of 6 x 6 cells. Each turn is a conversation, so
/// that the model answers from the observation of that turn alone.
pub fn conversations(noise: &Noise, index: u64, player: Player) -> Result<Vec<Value>> {
    let mut rng = noise.generator(Purpose::Synthetic, 2, index);
    let mut world = Sokoban::new(SokobanOptions { dim_room: [6, 6], num_boxes: 1, ..SokobanOptions::default() })?;
    let messages = episode::messages(&mut world, &mut rng, TURNS, |shown, rng| {
        let (room, places) = Room::read(shown);
        let away = goes_away(rng, player.away);
        let action = room.bad_moves(places, away, player.careless).choose(rng).copied().unwrap_or(MOVES[0].0);
        format!("<think>{}</think><answer>{action}</answer>", room.reading(places))
    })?;
    Ok(messages.chunks(2).map(episode::conversation).collect())
}

/// The constant part of a room with one box.
#[derive(Clone, Debug)]
struct Room {
    walls: Vec<Vec<bool>>,
    target_at: Cell,
}

/// The positions in a room that moves change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Places {
    player: Cell,
    cargo: Cell,
}

impl Room {
    /// Parses the map that the environment shows.
    fn read(map: &str) -> (Self, Places) {
        let rows: Vec<Vec<char>> = map.lines().map(|line| line.chars().collect()).collect();
        let find = |symbols: &[char]| -> Cell {
            let mut cells = rows.iter().enumerate();
            cells.find_map(|(r, row)| Some((r, row.iter().position(|c| symbols.contains(c))?))).unwrap_or_default()
        };
        let walls = rows.iter().map(|row| row.iter().map(|c| *c == '#').collect()).collect();
        let places = Places { player: find(&['P', 'S']), cargo: find(&['X', '√']) };
        (Self { walls, target_at: find(&['O', 'S', '√']) }, places)
    }

    fn is_wall(&self, (row, column): Cell) -> bool {
        self.walls.get(row).and_then(|cells| cells.get(column)).copied().unwrap_or(true)
    }

    /// Returns the positions after a move. They do not change if a wall is in the way.
    fn after(&self, places: Places, step: (isize, isize)) -> Places {
        let to = beside(places.player, step);
        let pushed = beside(to, step);
        if self.is_wall(to) || to == places.cargo && self.is_wall(pushed) {
            return places;
        }
        Places { player: to, cargo: if to == places.cargo { pushed } else { places.cargo } }
    }

    /// Returns a shortest solution: each move and the positions before it. `None` if the room cannot be solved.
    fn solution(&self, places: Places) -> Option<Vec<(Places, Move)>> {
        let mut before = HashMap::from([(places, None)]);
        let mut open = VecDeque::from([places]);
        while let Some(now) = open.pop_front() {
            if now.cargo == self.target_at {
                let mut way: Vec<_> =
                    std::iter::successors(before[&now], |(places, _): &(Places, Move)| before[places]).collect();
                way.reverse();
                return Some(way);
            }
            for step in MOVES {
                let next = self.after(now, step.2);
                if let Entry::Vacant(entry) = before.entry(next) {
                    entry.insert(Some((now, step)));
                    open.push_back(next);
                }
            }
        }
        None
    }

    /// Returns the number of moves of a shortest solution. `None` if the room cannot be solved.
    fn distance(&self, places: Places) -> Option<usize> {
        self.solution(places).map(|way| way.len())
    }

    /// Returns the moves that the player draws from. `away` selects moves that lengthen the shortest solution. A player
    /// that is not `careless` avoids moves after which the room cannot be solved.
    fn bad_moves(&self, places: Places, away: bool, careless: bool) -> Vec<&'static str> {
        let now = self.distance(places);
        let after: Vec<_> =
            MOVES.iter().map(|(name, _, step)| (*name, self.distance(self.after(places, *step)))).collect();
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

    /// Returns the facts of a room as text: the player's position, the way to the box, the way from the box to the
    /// target, the next push of a shortest solution and the cell it starts from, and the walls next to the player. Rows
    /// and columns count from 1.
    fn reading(&self, places: Places) -> String {
        let place = |(row, column): Cell| format!("{} {}", row + 1, column + 1);
        let Places { player, cargo } = places;
        let beside_player = MOVES.iter().filter(|(_, _, step)| self.is_wall(beside(player, *step)));
        let walls: String = beside_player.map(|(_, name, _)| format!(" {name}")).collect();
        let solution = self.solution(places).unwrap_or_default();
        let push = solution.into_iter().find(|(places, (_, _, step))| beside(places.player, *step) == places.cargo);
        let push = push.map_or(" none".into(), |(places, (_, name, _))| {
            format!(" {name} from {}:{}", place(places.player), way(player, places.player))
        });
        format!(
            "at {}, box {}:{}, goal {}:{}, push{push}, walls{}",
            place(player),
            place(cargo),
            way(player, cargo),
            place(self.target_at),
            way(cargo, self.target_at),
            if walls.is_empty() { " none" } else { &walls },
        )
    }
}

/// Returns the cell one step away. Walls surround a room, so no step leaves it.
fn beside((row, column): Cell, (down, right): (isize, isize)) -> Cell {
    (row.saturating_add_signed(down), column.saturating_add_signed(right))
}

/// Returns the way between two cells as text: ` down 2 left 1`.
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
        let (room, places) = Room::read(ROOM);
        let expected = "at 2 2, box 3 3: down 1 right 1, goal 3 5: right 2, push right from 3 2: down 1, walls left up";
        assert_eq!(room.reading(places), expected);
        let (room, places) = Room::read("######\n#_X__#\n#_S__#\n######");
        assert_eq!(room.reading(places), "at 3 3, box 2 3: up 1, goal 3 3: down 1, push none, walls down");
    }

    #[test]
    fn the_distance_counts_moves_and_knows_of_boxes_that_are_stuck() {
        let distance = |map: &str| {
            let (room, places) = Room::read(map);
            room.distance(places)
        };
        assert_eq!(distance(ROOM), Some(3));
        assert_eq!(distance("######\n#X__P#\n#__O_#\n######"), None);
        assert_eq!(distance("######\n#P_√_#\n######"), Some(0));
    }

    #[test]
    fn bad_moves_lengthen_the_way_and_only_the_careless_get_stuck() {
        let moves = |map: &str, away, careless| {
            let (room, places) = Room::read(map);
            room.bad_moves(places, away, careless)
        };
        assert_eq!(moves(ROOM, true, false), ["Right"]);
        assert_eq!(moves(ROOM, false, false).len(), 4);
        let edge = "######\n#____#\n#_XP_#\n#_O__#\n######";
        assert!(!moves(edge, true, false).contains(&"Left"));
        assert!(moves(edge, true, true).contains(&"Left"));
    }

    #[test]
    fn every_turn_is_a_conversation_in_form_and_repeats_with_the_seed() {
        episode::tests::are_in_form_and_repeat(20, 1, super::conversations);
    }
}
