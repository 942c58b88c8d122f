//! Episodes of an environment with a scripted player, as conversations.

use rand::{Rng, RngCore};
use roll_core::{Environment, Message, Result};
use serde_json::{Value, json};

/// Returns the messages of an episode of at most `turns` turns: observation (user) and answer (assistant) alternate.
/// The start of the episode is drawn from `rng`. `answer` returns the player's answer to an observation.
pub fn messages<R: RngCore>(
    world: &mut dyn Environment,
    rng: &mut R,
    turns: usize,
    mut answer: impl FnMut(&str, &mut R) -> String,
) -> Result<Vec<Message>> {
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
    Ok(messages)
}

/// Returns one line of the data set.
pub fn conversation(messages: &[Message]) -> Value {
    json!({ "messages": messages })
}

/// Draws whether the player moves away from the goal in this turn. The probability is `away / 5`.
pub fn goes_away(rng: &mut impl Rng, away: u32) -> bool {
    rng.random_range(0..5) < away
}

#[cfg(test)]
pub mod tests {
    #![allow(clippy::unwrap_used)]
    use roll_core::Noise;

    use super::*;
    use crate::Player;

    /// Asserts that the conversations of `count` episodes alternate for at most `turns` turns, begin with a position
    /// and are the same for the same seed.
    pub fn are_in_form_and_repeat(
        count: u64,
        turns: usize,
        conversations: impl Fn(&Noise, u64, Player) -> Result<Vec<Value>>,
    ) {
        let noise = Noise::new(1);
        for i in 0..count {
            let player = Player { away: 2, careless: i % 2 == 0 };
            let talks = conversations(&noise, i, player).unwrap();
            assert_eq!(talks, conversations(&noise, i, player).unwrap());
            assert!(!talks.is_empty());
            for talk in talks {
                let messages = talk["messages"].as_array().unwrap();
                assert!(!messages.is_empty() && messages.len() % 2 == 0 && messages.len() <= 2 * turns);
                assert!(messages[1]["content"].as_str().unwrap().starts_with("<think>at "));
            }
        }
    }
}
