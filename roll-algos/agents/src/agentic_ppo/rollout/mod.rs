//! Rollouts: many episodes at once, one generation batch per turn.
//!
//! [`EpisodePlan`] says which episodes are played. A turn renders the prompts of all running episodes ([`template`],
//! `conversation`), generates their answers in batches, and steps their environments ([`worlds`]).

mod conversation;
pub mod prefetch;
pub mod template;
#[cfg(test)]
mod tests;
pub mod worlds;

use std::collections::BTreeMap;

use rand::RngCore;
use roll_core::{
    Environment, Error, Generation, LanguageModel, Message, Noise, Progress, Purpose, Result, ResultExt, Split,
    threads::in_parallel,
};
use roll_external::json;

use super::config::{AgenticPpoConfig, InferLogProbs};
use super::episode::{Ending, Episode, Step};
use super::tools::{self, ToolCall, Tools};
use conversation::Conversation;
use template::{Turn, TurnTemplate, without_end};
use worlds::Worlds;

/// Which episodes are played.
#[derive(Clone, Copy, Debug)]
pub struct EpisodePlan {
    /// Training step, part of every key.
    pub step: u64,
    /// First group; ranks play different ones.
    pub first_group: usize,
    /// Number of groups.
    pub groups: usize,
    /// Number of groups of all ranks.
    pub all_groups: usize,
    /// Episodes per group.
    pub group_size: usize,
    /// Temperature of the answers.
    pub temperature: f64,
    /// Validation: starts that training never sees, the same at every step.
    pub held_out: bool,
}

/// Key of the starts of validation, in the place of the step.
const HELD_OUT: u64 = u64::MAX;

struct RunningEpisode<'a> {
    environment: &'a mut dyn Environment,
    conversation: Conversation,
    observation: String,
    steps: Vec<Step>,
    /// Tool calls of the current turn.
    calls: Vec<ToolCall>,
    /// First token that the agent wrote in the current turn.
    written: Option<usize>,
    /// Answers of tools that the agent has not read.
    results: Vec<String>,
    /// Number of its group, over all ranks.
    group: usize,
    /// Seed of its start, which its group shares.
    seed: u64,
    /// Name of its world, or an empty text.
    tag: String,
    ended: Option<Ended>,
    /// Whether the environment waits to be told that the episode is over.
    is_open: bool,
}

/// How an episode ended, and whether its task is solved.
struct Ended {
    ending: Ending,
    solved: bool,
}

/// Shared by all episodes of a rollout.
#[derive(Clone, Copy)]
struct Rules<'a> {
    config: &'a AgenticPpoConfig,
    template: &'a TurnTemplate,
    tools: &'a Tools,
    /// Texts of the tokens that end an answer.
    ends: &'a [String],
    /// Whether the system message is the beginning of the first user message.
    joins_system: bool,
}

/// Plays the episodes of `plan`, in the order of their groups. There must be an environment for each. An environment
/// that fails ends its episode, not the rollout.
pub fn play(
    config: &AgenticPpoConfig,
    plan: EpisodePlan,
    model: &mut dyn LanguageModel,
    environments: &mut [Box<dyn Environment>],
    noise: &Noise,
    progress: &dyn Progress,
) -> Result<Vec<Episode>> {
    let template = TurnTemplate::parse(&config.agent_template)?;
    let tools = Tools::new(&config.tools)?;
    let ends = model.end_tokens().into_iter().map(|end| model.detokenize(&[end])).collect::<Result<Vec<String>>>()?;
    let ends: Vec<String> = ends.into_iter().filter(|end| !end.is_empty()).collect();
    let joins_system = refuses_system(model, &config.agent_system_template);
    let rules = Rules { config, template: &template, tools: &tools, ends: &ends, joins_system };
    let (starts, split) = if plan.held_out { (HELD_OUT, Split::Validation) } else { (plan.step, Split::Train) };
    let at_once = config.max_env_step_concurrent;
    let worlds = match plan.held_out {
        true => Worlds::new(environments, "algo.val_tags", config.validated(), &config.val_num_groups_partition)?,
        false => Worlds::new(environments, "algo.tags", &config.tags, &config.num_groups_partition)?,
    };
    let mut plays: Vec<RunningEpisode<'_>> = environments
        .iter_mut()
        .enumerate()
        .take(plan.groups * plan.group_size)
        .map(|(i, environment)| {
            let group = plan.first_group + i / plan.group_size;
            let drawn = noise.generator(Purpose::Environments, starts, group as u64).next_u64();
            let (tag, seed) = worlds.seed(drawn, group, plan.all_groups);
            RunningEpisode::new(environment.as_mut(), tag, group, seed)
        })
        .collect();
    in_parallel(&mut plays, at_once, |play| {
        let number = worlds.number(if plan.held_out { 0 } else { plan.step }, play.group, plan.all_groups);
        if let Err(e) = play.begin(split, number) {
            play.fail(&e);
        }
    });
    let played = play_rounds(&rules, plan, model, &mut plays, noise, progress);
    in_parallel(&mut plays, at_once, RunningEpisode::leave);
    played?;
    Ok(plays.into_iter().map(RunningEpisode::finish).collect())
}

/// Plays until every episode has ended or used up its turns.
fn play_rounds(
    rules: &Rules<'_>,
    plan: EpisodePlan,
    model: &mut dyn LanguageModel,
    plays: &mut [RunningEpisode<'_>],
    noise: &Noise,
    progress: &dyn Progress,
) -> Result<()> {
    let (rules, config) = (*rules, rules.config);
    // A turn ends with an answer to the environment, after at most the permitted number of answers with tool calls.
    let answers_of_a_turn = if rules.tools.is_empty() { 1 } else { config.max_tool_calls.saturating_add(1) };
    let budget = config.sequence_length.min(model.context_length());
    for round in 0..config.max_actions_per_traj.saturating_mul(answers_of_a_turn) {
        if plays.iter().all(|p| p.ended.is_some()) {
            break;
        }
        progress.phase(&format!("rollout, turn {}", round + 1));
        if progress.interrupted() {
            return Err(Error::Interrupted);
        }
        for play in plays.iter_mut().filter(|p| p.ended.is_none()) {
            play.ask(model, rules)?;
            if play.conversation.prompt().len() >= budget {
                play.end(Ending::TokenLimit);
            }
        }
        let answers = answers(config, plan, round, budget, model, plays, noise)?;
        let mut acting = Vec::new();
        for (i, play) in plays.iter_mut().enumerate() {
            if let Some(generation) = answers.get(&i)
                && let Some(answer) = play.answer(model, generation)?
            {
                acting.push((play, answer));
            }
        }
        in_parallel(&mut acting, config.max_env_step_concurrent, |(play, answer)| {
            play.act(answer, rules);
            if play.ended.is_some() {
                play.leave();
            }
        });
    }
    Ok(())
}

/// Begins an episode of each world up to the agent's first prompt. Fails if the environment does not begin it, if the
/// prompt cannot be written, or if it leaves no room for an answer.
pub fn check_beginning(
    config: &AgenticPpoConfig,
    model: &dyn LanguageModel,
    environment: &mut dyn Environment,
) -> Result<()> {
    let template = TurnTemplate::parse(&config.agent_template)?;
    let tools = Tools::new(&config.tools)?;
    let joins_system = refuses_system(model, &config.agent_system_template);
    let rules = Rules { config, template: &template, tools: &tools, ends: &[], joins_system };
    let budget = config.sequence_length.min(model.context_length());
    // An environment of several worlds opens them by the seed.
    for seed in 0..environment.kinds().len().max(1) as u64 {
        let mut episode = RunningEpisode::new(environment, String::new(), 0, seed);
        episode.begin(Split::Train, seed).while_doing(|| "beginning an episode".into())?;
        episode.leave();
        episode.ask(model, rules).while_doing(|| "writing the agent's first prompt".into())?;
        let length = episode.conversation.len();
        if length >= budget {
            let problem =
                format!("leaves no room for an answer: the agent's first prompt has {length} of {budget} tokens");
            return Err(Error::config("algo.sequence_length", problem));
        }
        let text = model.detokenize(&episode.conversation.tokens)?;
        let kind = environment.kinds().get(seed as usize).map(|kind| format!(" in `{kind}`")).unwrap_or_default();
        tracing::info!("the agent's first prompt{kind}, {length} tokens:\n{}", excerpt(&text));
    }
    Ok(())
}

/// The beginning and the end of a long text.
fn excerpt(text: &str) -> String {
    const BEGIN: usize = 3000;
    const END: usize = 1000;
    let left_out = text.chars().count().saturating_sub(BEGIN + END);
    if left_out == 0 {
        return text.to_string();
    }
    let chars = || text.chars();
    let (begin, end) = (chars().take(BEGIN), chars().skip(BEGIN + left_out));
    format!("{} [... {left_out} characters ...] {}", begin.collect::<String>(), end.collect::<String>())
}

/// Whether the chat template fails because of the system message `system`, as those of Gemma 2 and Mistral 7B v0.1 do.
fn refuses_system(model: &dyn LanguageModel, system: &str) -> bool {
    let renders = |messages: &[Message]| model.render_chat(messages, true).is_ok();
    let user = Message::new("user", "x");
    !system.is_empty() && !renders(&[Message::new("system", system), user.clone()]) && renders(&[user])
}

/// An answer of the agent, and its tokens in the episode.
struct Answer {
    text: String,
    tokens: std::ops::Range<usize>,
}

/// The answers of all episodes that have not ended, by their index. Each has at most the tokens that are left of its
/// budget.
fn answers(
    config: &AgenticPpoConfig,
    plan: EpisodePlan,
    round: usize,
    budget: usize,
    model: &mut dyn LanguageModel,
    plays: &[RunningEpisode<'_>],
    noise: &Noise,
) -> Result<BTreeMap<usize, Generation>> {
    let continuing: Vec<usize> = (0..plays.len()).filter(|i| plays[*i].ended.is_none()).collect();
    let purpose = if plan.held_out { Purpose::Evaluation } else { Purpose::Tokens };
    let seed = noise.generator(purpose, plan.step, round as u64).next_u64();
    let first = plan.first_group * plan.group_size;
    let mut answers = BTreeMap::new();
    for places in continuing.chunks(config.infer_batch_size) {
        let prompts: Vec<Vec<u32>> = places.iter().map(|i| plays[*i].conversation.prompt().to_vec()).collect();
        let numbers = places.iter().map(|i| (first + i) as u64).collect();
        let limits = prompts.iter().map(|prompt| budget - prompt.len()).collect();
        let sampling = config.sampling(plan.temperature, limits, seed, numbers);
        let made = model.generate(&prompts, &sampling)?;
        let has_raw = made.iter().all(|g| g.raw_log_probs.len() == g.tokens.len());
        let wanted = config.infer_log_probs == InferLogProbs::Raw || config.is_asynchronous();
        if wanted && !has_raw {
            let problem = "the model does not tell the log-probabilities of its tokens before temperature: leave \
                           `algo.infer_log_probs` at `drawn` and `algo.async_generation_ratio` at 0";
            return Err(Error::Unsupported(problem.into()));
        }
        answers.extend(places.iter().copied().zip(made));
    }
    Ok(answers)
}

impl<'a> RunningEpisode<'a> {
    fn new(environment: &'a mut dyn Environment, tag: String, group: usize, seed: u64) -> Self {
        Self {
            tag,
            environment,
            conversation: Conversation::default(),
            observation: String::new(),
            steps: Vec::new(),
            calls: Vec::new(),
            written: None,
            results: Vec::new(),
            group,
            seed,
            ended: None,
            is_open: false,
        }
    }

    fn begin(&mut self, split: Split, number: u64) -> Result<()> {
        self.environment.enter(split, number)?;
        self.is_open = true;
        self.observation = self.environment.reset(self.seed)?.text;
        Ok(())
    }

    /// Tells the environment that the episode is over.
    fn leave(&mut self) {
        if std::mem::take(&mut self.is_open)
            && let Err(error) = self.environment.leave()
        {
            tracing::debug!("an environment was told that its episode is over: {}", roll_core::one_line(&error));
        }
    }

    /// Adds the results of the agent's tools, or the message of its turn: after all messages before, or in a prompt of
    /// its own.
    fn ask(&mut self, model: &dyn LanguageModel, rules: Rules<'_>) -> Result<()> {
        let Rules { config, template, tools, ends, joins_system } = rules;
        if !self.results.is_empty() {
            let messages = self.results.drain(..).enumerate().map(|(i, result)| tools::result(i, result)).collect();
            return self.conversation.ask(model, tools, messages);
        }
        let (turn, alone) = (self.steps.len(), config.history_length.is_some());
        if alone {
            self.conversation.restart();
        }
        let shown = config.history_length.map_or(0, |turns| turns.saturating_sub(1)).min(turn);
        let instructions = self.environment.instructions();
        let mut content = template.render(Turn {
            observation: &self.observation,
            index: turn + 1,
            actions_left: config.max_actions_per_traj - turn,
            max_response_length: config.max_tokens_per_step,
            instructions: &instructions,
            history: &self.steps[turn - shown..],
            ends,
        });
        let mut messages = Vec::new();
        if turn == 0 || alone {
            if !instructions.is_empty() && !template.has_instructions() {
                content = format!("{instructions}\n{content}");
            }
            match config.agent_system_template.as_str() {
                "" => {}
                system if joins_system => content = format!("{system}\n\n{content}"),
                system => messages.push(Message::new("system", system)),
            }
        }
        messages.push(Message::new("user", content));
        self.conversation.ask(model, tools, messages)
    }

    /// Takes an answer into the conversation; `None` ends the episode, which has no tokens left.
    fn answer(&mut self, model: &dyn LanguageModel, generation: &Generation) -> Result<Option<Answer>> {
        if generation.tokens.is_empty() {
            self.end(Ending::TokenLimit);
            return Ok(None);
        }
        let start = self.conversation.len();
        let text = self.conversation.answer(model, generation)?;
        Ok(Some(Answer { text, tokens: start..self.conversation.len() }))
    }

    /// Lets the tools that it calls, or else the environment, answer.
    fn act(&mut self, answer: &mut Answer, Rules { config, tools, ends, .. }: Rules<'_>) {
        let Answer { text: response, tokens } = answer;
        let text = without_end(response, ends);
        let written = *self.written.get_or_insert(tokens.start);
        let left = config.max_tool_calls.saturating_sub(self.calls.len());
        if !tools.is_empty() && left > 0 {
            let made = tools.answer(tools::parse_calls(text), left);
            if !made.is_empty() {
                self.results = made.iter().map(|call| json::compact(&call.output)).collect();
                return self.calls.extend(made);
            }
        }
        let next = match self.environment.step(text) {
            Ok(next) => next,
            Err(e) => return self.fail(&e),
        };
        if !next.reward.is_finite() {
            return self.fail(&Error::NonFinite { what: "the reward of the environment".into(), value: next.reward });
        }
        let observation = std::mem::replace(&mut self.observation, next.observation.text);
        let response = std::mem::take(response);
        self.written = None;
        self.steps.push(Step {
            observation,
            response,
            reward: next.reward,
            action: self.environment.action(),
            valid: next.valid,
            tokens: written..tokens.end,
            begins: self.conversation.begins,
            calls: std::mem::take(&mut self.calls),
        });
        let solved = self.environment.solved().unwrap_or(next.terminated && next.reward > 0.0);
        if next.terminated || next.truncated {
            let ending = if next.truncated { Ending::Truncated } else { Ending::Terminated };
            self.ended = Some(Ended { ending, solved });
        } else if self.steps.len() >= config.max_actions_per_traj {
            self.end(Ending::TurnLimit);
        }
    }

    fn end(&mut self, ending: Ending) {
        let solved = self.environment.solved().unwrap_or(false);
        self.ended = Some(Ended { ending, solved });
    }

    fn fail(&mut self, error: &Error) {
        self.ended = Some(Ended { ending: Ending::Failed(roll_core::one_line(error)), solved: false });
    }

    fn finish(mut self) -> Episode {
        let Ended { ending, solved } = match self.ended.take() {
            Some(ended) => ended,
            None => Ended { ending: Ending::TurnLimit, solved: self.environment.solved().unwrap_or(false) },
        };
        let begins = self.conversation.begins;
        let Conversation { mut tokens, mut response, mut log_probs, mut raw_log_probs, .. } = self.conversation;
        // A turn that broke off among its tool calls has earned nothing, and its tokens count.
        if let (Some(written), Ending::TokenLimit) = (self.written, &ending)
            && let Some(last) = response.iter().rposition(|written| *written)
        {
            self.steps.push(Step {
                observation: self.observation,
                tokens: written..last + 1,
                begins,
                calls: self.calls,
                ..Step::default()
            });
        }
        // A prompt after the last answer is no part of the episode.
        let length = self.steps.last().map_or(0, |s| s.tokens.end);
        tokens.truncate(length);
        response.truncate(length);
        log_probs.truncate(length);
        raw_log_probs.truncate(length);
        Episode {
            group: self.group,
            tag: self.tag,
            seed: self.seed,
            tokens,
            response,
            log_probs,
            raw_log_probs,
            steps: self.steps,
            solved,
            ending,
        }
    }
}
