//! An episode of an environment that a player plays, as a conversation.

use rand::{Rng, RngCore};
use roll_core::{Environment, Message, Result};
use serde_json::{Value, json};

/// An episode of at most `turns` turns, whose start is drawn from `rng`. `answer` is the player's answer to an
/// observation.
pub fn conversation<R: RngCore>(
    world: &mut dyn Environment,
    rng: &mut R,
    turns: usize,
    mut answer: impl FnMut(&str, &mut R) -> String,
) -> Result<Value> {
    let mut shown = world.reset(rng.next_u64())?.text;
    let mut messages = Vec::new();
    for _ in 0..turns {
        let answer = answer(&shown, rng);
        messages.push(Message::new("user", shown));
        messages.push(Message::new("assistant", answer.clone()));
        let next = world.step(&answer)?;
        if next.terminated {
            break;
        }
        shown = next.observation.text;
    }
    Ok(json!({ "messages": messages }))
}

/// Whether the player goes away from the goal in this turn: in `away` of five.
pub fn goes_away(rng: &mut impl Rng, away: u32) -> bool {
    rng.random_range(0..5) < away
}

#[cfg(test)]
pub mod tests {
    #![allow(clippy::unwrap_used)]
    use roll_core::Noise;

    use super::*;
    use crate::Player;

    /// Whether `count` conversations alternate for at most `turns` turns, begin with a place, and repeat with the seed.
    pub fn are_in_form_and_repeat(
        count: u64,
        turns: usize,
        conversation: impl Fn(&Noise, u64, Player) -> Result<Value>,
    ) {
        let noise = Noise::new(1);
        for i in 0..count {
            let player = Player { away: 2, careless: i % 2 == 0 };
            let talk = conversation(&noise, i, player).unwrap();
            assert_eq!(talk, conversation(&noise, i, player).unwrap());
            let messages = talk["messages"].as_array().unwrap();
            assert!(!messages.is_empty() && messages.len() % 2 == 0 && messages.len() <= 2 * turns);
            assert!(messages[1]["content"].as_str().unwrap().starts_with("<think>at "));
        }
    }
}
