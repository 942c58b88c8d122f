//! Conversations about FrozenLake. The player reads the map aloud and then plays badly.

use rand::seq::IndexedRandom;
use rand::{Rng, RngCore};
use roll_agents::environments::FrozenLake;
use roll_agents::environments::frozen_lake::FrozenLakeOptions;
use roll_core::{Environment, Noise, Purpose, Result};
use serde_json::{Value, json};

use crate::Player;
use crate::episode::{self, goes_away};

/// Maximal number of turns of a conversation.
const TURNS: usize = 6;
const MOVES: [&str; 4] = ["Left", "Down", "Right", "Up"];

/// Returns the conversation of episode `index` of FrozenLake.
pub fn conversations(noise: &Noise, index: u64, player: Player) -> Result<Vec<Value>> {
    let mut rng = noise.generator(Purpose::Synthetic, 1, index);
    let mut lake = FrozenLake::new(FrozenLakeOptions { is_slippery: false, ..FrozenLakeOptions::default() })?;
    let messages = episode::messages(&mut lake, &mut rng, TURNS, |shown, rng| {
        let seen = reading(shown);
        let wanted = match goes_away(rng, player.away) {
            true => against(&seen),
            false => MOVES.to_vec(),
        };
        let choices = match player.careless {
            true => wanted,
            false => {
                let by_preference = [safe(&seen, &wanted), safe(&seen, &MOVES), wanted];
                by_preference.into_iter().find(|moves| !moves.is_empty()).unwrap_or_default()
            }
        };
        let action = choices.choose(rng).copied().unwrap_or(MOVES[0]);
        answer(&seen, action)
    })?;
    Ok(vec![episode::conversation(&messages)])
}

/// Returns the pair of answers to a map of episode `index` of FrozenLake: both read the map, and the preferred one moves
/// towards the goal and into no hole. `None` if no such move exists where the player stands, after up to five moves at
/// random.
pub fn preference(noise: &Noise, index: u64) -> Result<Option<Value>> {
    let mut rng = noise.generator(Purpose::Synthetic, 2, index);
    let mut lake = FrozenLake::new(FrozenLakeOptions { is_slippery: false, ..FrozenLakeOptions::default() })?;
    let mut map = lake.reset(rng.next_u64())?.text;
    for _ in 0..rng.random_range(0..TURNS) {
        let moves = safe(&reading(&map), &MOVES);
        let action = moves.choose(&mut rng).copied().unwrap_or(MOVES[0]);
        let next = lake.step(&answer(&reading(&map), action))?;
        if next.terminated {
            break;
        }
        map = next.observation.text;
    }
    let seen = reading(&map);
    let away = against(&seen);
    let opposite = |action: &str| MOVES[(MOVES.iter().position(|m| *m == action).unwrap_or(0) + 2) % MOVES.len()];
    let towards: Vec<&str> = away.iter().map(|action| opposite(action)).collect();
    let good = safe(&seen, &towards);
    let bad: Vec<&str> = MOVES.into_iter().filter(|action| !good.contains(action)).collect();
    Ok(good.choose(&mut rng).zip(bad.choose(&mut rng)).map(|(chosen, rejected)| {
        json!({ "prompt": map, "chosen": answer(&seen, chosen), "rejected": answer(&seen, rejected) })
    }))
}

fn answer(reading: &str, action: &str) -> String {
    format!("<think>{reading}</think><answer>{action}</answer>")
}

/// Returns the moves that lead away from the goal according to `reading`.
fn against(reading: &str) -> Vec<&'static str> {
    let way = reading.split(", holes").next().unwrap_or_default();
    let opposite = [("left ", "Right"), ("down ", "Up"), ("right ", "Left"), ("up ", "Down")];
    opposite.into_iter().filter(|(word, _)| way.contains(word)).map(|(_, action)| action).collect()
}

/// Returns those `moves` that do not lead into a hole according to `reading`.
fn safe(reading: &str, moves: &[&'static str]) -> Vec<&'static str> {
    let holes = reading.split(", holes").nth(1).unwrap_or_default();
    moves.iter().filter(|action| !holes.contains(&action.to_lowercase())).copied().collect()
}

/// Returns the facts of a map as text: the positions of player and goal, the distance between them, and the holes next
/// to the player. Rows and columns count from 1.
pub fn reading(map: &str) -> String {
    let rows: Vec<Vec<char>> = map.lines().map(|line| line.chars().collect()).collect();
    let find = |symbol: char| -> Option<[usize; 2]> {
        rows.iter().enumerate().find_map(|(r, row)| Some([r, row.iter().position(|c| *c == symbol)?]))
    };
    let ([row, column], [goal_row, goal_column]) = (find('P').unwrap_or_default(), find('G').unwrap_or_default());
    let mut text = format!("at {} {}, goal {} {}:", row + 1, column + 1, goal_row + 1, goal_column + 1);
    for (from, to, back, on) in [(row, goal_row, "up", "down"), (column, goal_column, "left", "right")] {
        match from.abs_diff(to) {
            0 => {}
            distance => text += &format!(" {} {distance}", if to < from { back } else { on }),
        }
    }
    let beside = [("left", (0, -1)), ("down", (1, 0)), ("right", (0, 1)), ("up", (-1, 0))];
    let is_hole = |(down, right): (isize, isize)| {
        let at = |v: usize, by: isize| v.checked_add_signed(by);
        let tile = at(row, down).zip(at(column, right)).and_then(|(r, c)| rows.get(r)?.get(c));
        tile == Some(&'O')
    };
    let holes: String = beside.iter().filter(|(_, step)| is_hole(*step)).map(|(name, _)| format!(" {name}")).collect();
    text += ", holes";
    text += if holes.is_empty() { " none" } else { &holes };
    text
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_map_is_read_as_it_is() {
        assert_eq!(reading("____\n_OP_\n__O_\nG___"), "at 2 3, goal 4 1: down 2 left 2, holes left down");
        assert_eq!(reading("GP__\n____\n____\n____"), "at 1 2, goal 1 1: left 1, holes none");
    }

    #[test]
    fn moves_against_the_way_that_was_read() {
        assert_eq!(against("at 2 3, goal 4 1: down 2 left 2, holes left down"), ["Right", "Up"]);
        assert_eq!(against("at 1 2, goal 1 1: left 1, holes none"), ["Right"]);
    }

    #[test]
    fn moves_into_holes_are_left_out() {
        assert_eq!(safe("at 2 3, goal 4 1: down 2 left 2, holes left down", &MOVES), ["Right", "Up"]);
        assert_eq!(safe("at 2 3, goal 4 1: down 2 left 2, holes left down", &["Left"]), [""; 0]);
        assert_eq!(safe("at 1 2, goal 1 1: left 1, holes none", &MOVES), MOVES);
    }

    #[test]
    fn the_preferred_move_leads_nearer_and_into_no_hole() {
        let noise = Noise::new(1);
        let pairs: Vec<Value> = (0..200).filter_map(|i| preference(&noise, i).unwrap()).collect();
        assert!(pairs.len() > 150, "{}", pairs.len());
        for pair in pairs {
            let text = |key: &str| pair[key].as_str().unwrap();
            let seen = reading(text("prompt"));
            let action = |key: &str| text(key).split("<answer>").nth(1).unwrap().replace("</answer>", "");
            assert!([text("chosen"), text("rejected")].iter().all(|answer| answer.contains(&seen)));
            let (way, holes) = seen.split_once(", holes").unwrap();
            let leads = |action: &str| way.contains(&format!("{} ", action.to_lowercase()));
            let is_good = |action: &str| leads(action) && !holes.contains(&action.to_lowercase());
            assert!(is_good(&action("chosen")) && !is_good(&action("rejected")), "{pair}");
        }
    }

    #[test]
    fn conversations_are_in_form_and_repeat_with_the_seed() {
        episode::tests::are_in_form_and_repeat(50, TURNS, super::conversations);
    }
}
