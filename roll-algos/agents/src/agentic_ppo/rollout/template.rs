//! The message that the agent reads in a turn: `algo.agent_template` with the facts of the turn.

use roll_core::{Error, Observation, Picture, Result, without_picture_marks};

use crate::agentic_ppo::episode::Step;

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
    StepCount,
    ActionsLeft,
    MaxResponseLength,
    Instructions,
    History,
    HistoryLength,
}

/// Names of facts. Some facts have two names, because the reference's templates for whole conversations and for single
/// turns differ.
const FACTS: &[(&str, Piece)] = &[
    ("observation", Piece::Observation),
    ("current_observation", Piece::Observation),
    ("turn_idx", Piece::TurnIndex),
    ("current_step", Piece::TurnIndex),
    ("step_count", Piece::StepCount),
    ("actions_left", Piece::ActionsLeft),
    ("max_response_length", Piece::MaxResponseLength),
    ("env_instruction", Piece::Instructions),
    ("history", Piece::History),
    ("history_length", Piece::HistoryLength),
];

/// Remark in the history on an action that the environment could not read.
const INVALID: &str = " (not valid: keep to the format)";

/// The facts of a turn.
#[derive(Clone, Copy, Debug)]
pub struct Turn<'a> {
    /// The observation, with one mark per picture.
    pub observation: &'a Observation,
    /// Number of the turn, from 1.
    pub index: usize,
    /// Turns left, this one included.
    pub actions_left: usize,
    /// Maximum number of tokens of an answer.
    pub max_response_length: usize,
    /// The environment's instructions.
    pub instructions: &'a str,
    /// The turns before this one that the agent sees, in their order.
    pub history: &'a [Step],
    /// Pictures of the episode so far, to which the history refers.
    pub pictures: &'a [Picture],
    /// Texts of the tokens that end an answer. In the history they are left out, because they would end the message.
    pub ends: &'a [String],
}

impl TurnTemplate {
    /// Parses `algo.agent_template`. The names of facts in braces are replaced, `{{` and `}}` are braces.
    pub fn parse(source: &str) -> Result<Self> {
        let invalid = |problem: String| Error::config("algo.agent_template", problem);
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
            let (name, after) = name.ok_or_else(|| invalid("a brace is not closed; write `{{` for a brace".into()))?;
            let Some((_, piece)) = FACTS.iter().find(|(known, _)| *known == name) else {
                let known = FACTS.iter().map(|(known, _)| *known).collect::<Vec<_>>().join(", ");
                return Err(invalid(format!("`{{{name}}}` is not a fact of a turn; known: {known}")));
            };
            if !text.is_empty() {
                pieces.push(Piece::Text(std::mem::take(&mut text)));
            }
            pieces.push(piece.clone());
            rest = after;
        }
        text.push_str(rest);
        if !text.is_empty() {
            pieces.push(Piece::Text(text));
        }
        if !pieces.contains(&Piece::Observation) {
            return Err(invalid("the agent would see nothing: `{observation}` is missing".into()));
        }
        Ok(Self { pieces })
    }

    /// Whether the template includes the environment's instructions.
    pub fn has_instructions(&self) -> bool {
        self.pieces.contains(&Piece::Instructions)
    }

    /// The message of a turn, with the pictures of its observations. Everything else is text alone.
    pub fn render(&self, turn: Turn<'_>) -> Observation {
        let mut message = Observation::default();
        let write = |piece: &Piece, message: &mut Observation| match piece {
            Piece::Text(text) => write_text(message, text),
            Piece::Observation => write_observation(message, &turn.observation.text, turn.observation.pictures.iter()),
            Piece::TurnIndex => write_text(message, &turn.index.to_string()),
            Piece::StepCount => write_text(message, &turn.index.saturating_sub(1).to_string()),
            Piece::ActionsLeft => write_text(message, &turn.actions_left.to_string()),
            Piece::MaxResponseLength => write_text(message, &turn.max_response_length.to_string()),
            Piece::Instructions => write_text(message, turn.instructions),
            Piece::History => write_history(message, turn),
            Piece::HistoryLength => write_text(message, &turn.history.len().to_string()),
        };
        self.pieces.iter().for_each(|piece| write(piece, &mut message));
        message
    }
}

fn write_text(message: &mut Observation, text: &str) {
    message.text += &without_picture_marks(text);
}

fn write_observation<'a>(message: &mut Observation, text: &str, pictures: impl Iterator<Item = &'a Picture>) {
    message.text += text;
    message.pictures.extend(pictures.cloned());
}

/// Writes `{history}`: the facts of each turn in parentheses.
fn write_history(message: &mut Observation, turn: Turn<'_>) {
    let first_index = turn.index.saturating_sub(turn.history.len());
    for (i, step) in turn.history.iter().enumerate() {
        let Step { observation, pictures, response, action, reward, valid, .. } = step;
        let remark = if *valid { "" } else { INVALID };
        let action = match action.as_str() {
            // The environment reports no action: the answer takes its place.
            "" => without_thoughts(without_end(response, turn.ends)),
            action => action,
        };
        let separator = if i == 0 { "" } else { ", " };
        write_text(message, &format!("{separator}(step: {}, observation: ", first_index + i));
        write_observation(message, observation, pictures.iter().map(|position| &turn.pictures[*position]));
        write_text(message, &format!(", action: {action}{remark}, reward: {reward})"));
    }
}

/// `answer` without the end token at its end, whose text is one of `ends`.
pub fn without_end<'a>(answer: &'a str, ends: &[String]) -> &'a str {
    ends.iter().find_map(|end| answer.strip_suffix(end.as_str())).unwrap_or(answer)
}

/// `answer` without the thoughts at its beginning.
fn without_thoughts(answer: &str) -> &str {
    answer.rsplit_once("</think>").map_or(answer, |(_, rest)| rest.trim_start())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::LazyLock;

    use roll_core::Tensor;

    use super::*;

    fn turn(history: &[Step]) -> Turn<'_> {
        static OBSERVATION: LazyLock<Observation> = LazyLock::new(|| Observation::text("P_{G}"));
        Turn {
            observation: &OBSERVATION,
            index: 3,
            actions_left: 2,
            max_response_length: 64,
            instructions: "Walk.",
            history,
            pictures: &[],
            ends: &[],
        }
    }

    #[test]
    fn facts_take_their_places() {
        let template = TurnTemplate::parse("{{{turn_idx}}} {observation} {actions_left}/{max_response_length}");
        assert_eq!(template.unwrap().render(turn(&[])).text, "{3} P_{G} 2/64");
        assert!(
            TurnTemplate::parse(TURN).unwrap().render(turn(&[])).text.starts_with("Turn 3:\nObservation:\nP_{G}\n")
        );
    }

    #[test]
    fn prompt_of_a_single_turn_has_the_history() {
        let step = |observation: &str, valid| Step {
            observation: observation.into(),
            response: "up$".into(),
            reward: -0.5,
            valid,
            ..Step::default()
        };
        let steps = [step("a", true), step("b", false)];
        let source = "{env_instruction} {step_count} {current_step} {history_length} [{history}] {current_observation}";
        let template = TurnTemplate::parse(source).unwrap();
        assert!(template.has_instructions());
        let ends = ["$".to_string()];
        assert_eq!(
            template.render(Turn { ends: &ends, ..turn(&steps) }).text,
            "Walk. 2 3 2 [(step: 1, observation: a, action: up, reward: -0.5), (step: 2, observation: b, action: up \
             (not valid: keep to the format), reward: -0.5)] P_{G}"
        );
        assert!(template.render(turn(&steps[1..])).text.contains("1 [(step: 2, observation: b, action: up$ (not"));
        assert!(template.render(turn(&[])).text.contains("0 []"));
    }

    #[test]
    fn history_has_actions_without_thoughts() {
        let template = TurnTemplate::parse("{history}{observation}").unwrap();
        let shown = |response: &str, action: &str| {
            let step = Step { response: response.into(), action: action.into(), valid: true, ..Step::default() };
            template.render(turn(&[step])).text
        };
        let thoughts = "<think>left is ice</think>\n<answer>Left</answer>";
        assert!(shown(thoughts, "Left").contains("action: Left, reward"));
        assert!(shown(thoughts, "").contains("action: <answer>Left</answer>, reward"));
        assert!(shown("Left", "").contains("action: Left, reward"));
    }

    #[test]
    fn pictures_come_with_their_observations_in_the_order_of_the_marks() {
        let picture = |value: u8| Picture::new(Tensor::new(vec![value; 3], [1, 1, 3]).unwrap()).unwrap();
        let pictures = [picture(1), picture(2)];
        let step = |observation: &str, pictures: &[usize], action: &str| Step {
            observation: observation.into(),
            pictures: pictures.to_vec(),
            action: action.into(),
            valid: true,
            ..Step::default()
        };
        let steps = [step("\u{fffc}a\u{fffc}", &[1, 0], "x\u{fffc}"), step("b", &[], "y")];
        let now = Observation::with_pictures("c\u{fffc}", vec![picture(3)]);
        let template = TurnTemplate::parse("{observation}\u{fffc}{history}{env_instruction}").unwrap();
        let shown =
            template.render(Turn { observation: &now, pictures: &pictures, instructions: "\u{fffc}!", ..turn(&steps) });
        assert_eq!(
            shown.text,
            "c\u{fffc}\u{fffd}(step: 1, observation: \u{fffc}a\u{fffc}, action: x\u{fffd}, reward: 0), (step: 2, \
             observation: b, action: y, reward: 0)\u{fffd}!"
        );
        assert_eq!(shown.pictures, [picture(3), picture(2), picture(1)]);
        let last_turn = template.render(Turn { observation: &now, pictures: &pictures, ..turn(&steps[1..]) });
        assert_eq!(last_turn.pictures, [picture(3)], "pictures are dropped with their turn");
    }

    #[test]
    fn mistakes_are_named() {
        let error = |source: &str| TurnTemplate::parse(source).unwrap_err().to_string();
        assert!(error("{observaton}").contains("observaton"));
        assert!(error("{observation").contains("not closed"));
        assert!(error("hello").contains("missing"));
    }
}
