//! What the agent is told each turn.

use roll_core::{Error, Result};

/// The reference's system message.
pub const SYSTEM: &str = "You're a helpful assistant. You are a good game player. You are aiming to get high reward in \
                          the game.";

/// The reference's message of a turn.
pub const TURN: &str = "Turn {turn_idx}:
Observation:
{observation}
Strictly follow this format:
1. output format is '<answer> [your answer] </answer>' with no extra text. 
2. You have {actions_left} actions left. 
3. Max response length: {max_response_length} words (tokens).
Decide the next action:
";

/// A message with places for the facts of a turn.
#[derive(Clone, Debug, PartialEq)]
pub struct TurnTemplate {
    pieces: Vec<Piece>,
}

#[derive(Clone, Debug, PartialEq)]
enum Piece {
    Text(String),
    Observation,
    TurnIndex,
    ActionsLeft,
    MaxResponseLength,
}

/// The facts of a turn.
#[derive(Clone, Copy, Debug)]
pub struct Turn<'a> {
    /// What the agent sees.
    pub observation: &'a str,
    /// From 1.
    pub index: usize,
    /// Turns left, this one included.
    pub actions_left: usize,
    /// Tokens an answer may have.
    pub max_response_length: usize,
}

impl TurnTemplate {
    /// Parses a template; `key` is its place in the configuration. `{observation}`, `{turn_idx}`, `{actions_left}` and
    /// `{max_response_length}` are replaced, `{{` and `}}` are braces.
    pub fn parse(key: &str, source: &str) -> Result<Self> {
        let bad = |problem: String| Error::config(key, problem);
        let (mut pieces, mut text) = (Vec::new(), String::new());
        let mut rest = source;
        while let Some(at) = rest.find(['{', '}']) {
            text.push_str(&rest[..at]);
            rest = &rest[at..];
            if let Some(after) = rest.strip_prefix("{{").or_else(|| rest.strip_prefix("}}")) {
                text.push_str(&rest[..1]);
                rest = after;
                continue;
            }
            let name = rest.strip_prefix('{').and_then(|inner| inner.split_once('}'));
            let (name, after) = name.ok_or_else(|| bad("a brace is not closed; write `{{` for a brace".into()))?;
            let piece = match name {
                "observation" => Piece::Observation,
                "turn_idx" => Piece::TurnIndex,
                "actions_left" => Piece::ActionsLeft,
                "max_response_length" => Piece::MaxResponseLength,
                other => {
                    let known = "observation, turn_idx, actions_left, max_response_length";
                    return Err(bad(format!("`{{{other}}}` is no fact of a turn; known: {known}")));
                }
            };
            pieces.extend((!text.is_empty()).then(|| Piece::Text(std::mem::take(&mut text))));
            pieces.push(piece);
            rest = after;
        }
        text.push_str(rest);
        pieces.extend((!text.is_empty()).then_some(Piece::Text(text)));
        match pieces.contains(&Piece::Observation) {
            true => Ok(Self { pieces }),
            false => Err(bad("the agent would see nothing: `{observation}` is missing".into())),
        }
    }

    /// The message of a turn.
    pub fn render(&self, turn: Turn<'_>) -> String {
        let write = |piece: &Piece| match piece {
            Piece::Text(text) => text.clone(),
            Piece::Observation => turn.observation.to_string(),
            Piece::TurnIndex => turn.index.to_string(),
            Piece::ActionsLeft => turn.actions_left.to_string(),
            Piece::MaxResponseLength => turn.max_response_length.to_string(),
        };
        self.pieces.iter().map(write).collect()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn facts_take_their_places() {
        let turn = Turn { observation: "P_{G}", index: 2, actions_left: 3, max_response_length: 64 };
        let template = TurnTemplate::parse("k", "{{{turn_idx}}} {observation} {actions_left}/{max_response_length}");
        assert_eq!(template.unwrap().render(turn), "{2} P_{G} 3/64");
        assert!(TurnTemplate::parse("k", TURN).unwrap().render(turn).starts_with("Turn 2:\nObservation:\nP_{G}\n"));
    }

    #[test]
    fn mistakes_are_named() {
        let error = |source: &str| TurnTemplate::parse("algo.agent_template", source).unwrap_err().to_string();
        assert!(error("{observaton}").contains("observaton"));
        assert!(error("{observation").contains("not closed"));
        assert!(error("hello").contains("missing"));
    }
}
