//! Rollouts: many episodes are played at once, in rounds.
//!
//! [`EpisodePlan`] says which episodes are played. A round renders the prompts of all running episodes ([`template`],
//! `conversation`), generates one answer for each in batches, and hands the answers to tools or environments
//! ([`worlds`]). A turn of an episode is one round, or several if the agent calls tools.

mod conversation;
pub mod prefetch;
pub mod template;
#[cfg(test)]
mod tests;
pub mod worlds;

use std::collections::BTreeMap;

use rand::RngCore;
use roll_core::{
    ChatRequest, Environment, Error, FIRST_PICTURE_ID, Generation, LanguageModel, Message, Noise, Observation,
    PICTURE_MARK, Picture, Progress, Purpose, Result, ResultExt, RolloutEngine, Sampling, Split, threads::in_parallel,
    without_picture_marks,
};
use roll_external::json;

use super::config::{AgenticPpoConfig, InferLogProbs};
use super::episode::{Ending, Episode, Step};
use super::tools::{self, ToolCall, Tools};
use crate::{AgentError, pictures};
use conversation::Conversation;
use template::{Turn, TurnTemplate, without_end};
use worlds::Worlds;

/// The episodes that a rollout plays.
#[derive(Clone, Debug, Default)]
pub struct EpisodePlan {
    /// Training step, part of the keys of random draws.
    pub step: u64,
    /// Number of the first group, over all ranks.
    pub first_group: usize,
    /// Number of groups that this rank plays.
    pub groups: usize,
    /// Number of groups that all ranks play in a step.
    pub all_groups: usize,
    /// Number of groups that were refilled before, by the index of their world ([`Environment::kinds`]).
    pub refilled: Vec<u64>,
    /// The groups of all ranks that are refilled. Their positions take the place of the numbers of groups above. Empty:
    /// no refill.
    pub replaced: Vec<usize>,
    /// Episodes per group.
    pub group_size: usize,
    /// Temperature of the answers.
    pub temperature: f64,
    /// Whether this is a validation: its starts are never seen in training, and are the same at every step.
    pub held_out: bool,
}

impl EpisodePlan {
    /// The number of group `i` of this rank, over all ranks and rounds of the step.
    fn group(&self, i: usize) -> usize {
        let position = self.first_group + i;
        // The number of a replaced group of an earlier round is beyond those of the first, too.
        self.replaced.get(position).map_or(position, |replaced| replaced + self.all_groups)
    }

    /// The number by which `worlds` know group `i` of this rank.
    fn place(&self, i: usize) -> usize {
        self.group(i) % self.all_groups.max(1)
    }

    /// The number of group `i` of this rank among all groups of its world.
    fn number(&self, worlds: &Worlds, i: usize) -> u64 {
        let (place, all) = (self.place(i), self.all_groups);
        let world = worlds.world_of(place, all);
        let refilled_before = self.refilled.get(world).copied().unwrap_or(0);
        let number = if self.replaced.is_empty() {
            // All validations have the same starts, and so the same numbers of groups.
            worlds.number(if self.held_out { 0 } else { self.step }, place, all)
        } else {
            let before = &self.replaced[..self.first_group + i];
            let of_world = |replaced: &&usize| worlds.world_of(**replaced % all.max(1), all) == world;
            worlds.played_before(self.step + 1, world, all) + before.iter().filter(of_world).count() as u64
        };
        number + refilled_before
    }

    /// Adds the groups that this plan refills, by their worlds.
    pub fn count_refilled(&self, worlds: &Worlds, refilled: &mut Vec<u64>) {
        for replaced in &self.replaced {
            let world = worlds.world_of(replaced % self.all_groups.max(1), self.all_groups);
            refilled.resize(refilled.len().max(world + 1), 0);
            refilled[world] += 1;
        }
    }
}

/// The key of random draws that takes the place of the step for the starts of validations.
const HELD_OUT: u64 = u64::MAX;

/// An episode that is being played.
struct RunningEpisode<'a> {
    environment: &'a mut dyn Environment,
    conversation: Conversation,
    /// The observation that the agent answers next, with one mark per picture.
    observation: Observation,
    steps: Vec<Step>,
    /// Tool calls of the current turn.
    calls: Vec<ToolCall>,
    /// Position of the first token that the agent wrote in the current turn; `None` before its first answer of the
    /// turn.
    turn_start: Option<usize>,
    /// Results of tools that the agent has not read yet.
    results: Vec<String>,
    /// Whether a program writes the prompts, which then also runs the agent's tools.
    is_chat: bool,
    /// Most tokens of the next answer, if the program limits it.
    answer_limit: usize,
    /// Number of the group, over all ranks and rounds of the step.
    group: usize,
    /// Number of the group among all groups of its world, over all steps.
    number: u64,
    /// Seed of the start, the same for all episodes of the group.
    seed: u64,
    /// Name of the world, or an empty text.
    tag: String,
    /// `None` while the episode is played.
    ended: Option<Ended>,
    /// Whether the environment has begun the episode and does not know yet that it is over.
    is_open: bool,
}

/// How an episode ended, and whether its task is solved.
struct Ended {
    ending: Ending,
    solved: bool,
}

/// The configuration that all episodes of a rollout share.
#[derive(Clone, Copy)]
struct Rules<'a> {
    config: &'a AgenticPpoConfig,
    template: &'a TurnTemplate,
    tools: &'a Tools,
    /// Texts of the tokens that end an answer.
    ends: &'a [String],
    /// Whether the system message is the beginning of the first user message.
    joins_system: bool,
    /// Maximum number of tokens of a prompt and its answer.
    token_budget: usize,
    /// Whether long answers are punished.
    punishes: bool,
}

/// Who writes the agent's answers.
pub struct Writer<'a> {
    /// The model: its tokenizer and chat template, and the answers if there is no engine.
    pub model: &'a mut dyn LanguageModel,
    /// The engine that writes the answers instead of the model.
    pub engine: Option<&'a mut dyn RolloutEngine>,
}

impl<'a> Writer<'a> {
    /// The model itself.
    pub fn of_model(model: &'a mut dyn LanguageModel) -> Self {
        Self { model, engine: None }
    }
}

/// Plays the episodes of `plan` and returns them in the order of their groups. There must be an environment for each
/// episode. An environment that fails ends its episode, not the rollout, and so does a prompt that an engine does not
/// continue.
pub fn play(
    config: &AgenticPpoConfig,
    plan: EpisodePlan,
    writer: &mut Writer<'_>,
    environments: &mut [Box<dyn Environment>],
    noise: &Noise,
    progress: &dyn Progress,
) -> Result<Vec<Episode>> {
    let template = TurnTemplate::parse(&config.agent_template)?;
    let tools = Tools::new(&config.tools)?;
    let model = &*writer.model;
    let ends = end_texts(model)?;
    let joins_system = refuses_system(model, &config.agent_system_template);
    let token_budget = config.sequence_length.min(model.context_length());
    let punishes = !plan.held_out;
    let rules = Rules { config, template: &template, tools: &tools, ends: &ends, joins_system, token_budget, punishes };
    let (start_key, split) = if plan.held_out { (HELD_OUT, Split::Validation) } else { (plan.step, Split::Train) };
    let at_once = config.max_env_step_concurrent;
    let worlds = if plan.held_out {
        Worlds::new(environments, "algo.val_tags", config.validated(), &config.val_num_groups_partition)?
    } else {
        Worlds::new(environments, "algo.tags", &config.tags, &config.num_groups_partition)?
    };
    let mut episodes: Vec<RunningEpisode<'_>> = environments
        .iter_mut()
        .enumerate()
        .take(plan.groups * plan.group_size)
        .map(|(i, environment)| {
            let i = i / plan.group_size;
            let drawn = noise.generator(Purpose::Environments, start_key, plan.group(i) as u64).next_u64();
            let (tag, seed) = worlds.seed(drawn, plan.place(i), plan.all_groups);
            let number = plan.number(&worlds, i);
            RunningEpisode::new(environment.as_mut(), tag, plan.group(i), number, seed)
        })
        .collect();
    in_parallel(&mut episodes, at_once, |episode| {
        if let Err(e) = episode.begin(split) {
            episode.fail(&e);
        }
    });
    let played = play_rounds(&rules, &plan, writer, &mut episodes, noise, progress);
    // Environments must learn that their episodes are over, also after an error.
    in_parallel(&mut episodes, at_once, RunningEpisode::leave);
    played?;
    Ok(episodes.into_iter().map(RunningEpisode::finish).collect())
}

/// As [`play`], with as many groups at a time as there are environments for.
pub fn play_in_parts(
    config: &AgenticPpoConfig,
    plan: &EpisodePlan,
    writer: &mut Writer<'_>,
    environments: &mut [Box<dyn Environment>],
    noise: &Noise,
    progress: &dyn Progress,
) -> Result<Vec<Episode>> {
    let at_once = (environments.len() / plan.group_size.max(1)).max(1);
    let mut episodes = Vec::new();
    for played in (0..plan.groups).step_by(at_once) {
        let part = EpisodePlan {
            first_group: plan.first_group + played,
            groups: at_once.min(plan.groups - played),
            ..plan.clone()
        };
        episodes.extend(play(config, part, writer, environments, noise, progress)?);
        if plan.held_out {
            // No later part needs the pictures of this one, and nothing is trained on them.
            writer.model.forget_pictures();
        }
    }
    Ok(episodes)
}

/// Plays rounds until every episode has ended or used up its turns.
fn play_rounds(
    rules: &Rules<'_>,
    plan: &EpisodePlan,
    writer: &mut Writer<'_>,
    episodes: &mut [RunningEpisode<'_>],
    noise: &Noise,
    progress: &dyn Progress,
) -> Result<()> {
    let (rules, config) = (*rules, rules.config);
    // A turn is an answer to the environment, after at most the permitted number of answers with calls of tools.
    let answers_of_a_turn = if rules.tools.is_empty() { 1 } else { config.max_tool_calls.saturating_add(1) };
    let token_budget = rules.token_budget;
    let rounds = config.max_actions_per_traj.saturating_mul(answers_of_a_turn);
    for round in 0..rounds {
        if episodes.iter().all(|episode| episode.ended.is_some()) {
            break;
        }
        progress.phase(&format!("rollout, turn {}", round + 1));
        if progress.interrupted() {
            return Err(Error::Interrupted);
        }
        for episode in episodes.iter_mut().filter(|episode| episode.ended.is_none()) {
            episode.ask(writer.model, rules)?;
            if episode.conversation.prompt().len() >= token_budget {
                episode.end(Ending::TokenLimit);
            }
        }
        let this_round = Round { number: round, is_last: round + 1 == rounds, token_budget };
        let answers = generate_answers(config, plan, this_round, writer, episodes, noise)?;
        let mut acting = Vec::new();
        for (i, episode) in episodes.iter_mut().enumerate() {
            match answers.get(&i) {
                Some(Ok(generation)) => {
                    if let Some(answer) = episode.answer(writer.model, generation, rules)? {
                        acting.push((episode, answer));
                    }
                }
                Some(Err(error)) => {
                    let problem = roll_core::one_line(error);
                    episode.ended = Some(Ended { ending: Ending::NoAnswer(problem), solved: false });
                }
                None => {}
            }
        }
        in_parallel(&mut acting, config.max_env_step_concurrent, |(episode, answer)| {
            episode.act(answer, rules);
            if episode.ended.is_some() {
                episode.leave();
            }
        });
    }
    Ok(())
}

/// The texts of the tokens that end an answer.
fn end_texts(model: &dyn LanguageModel) -> Result<Vec<String>> {
    let texts = model.end_tokens().into_iter().map(|end| model.detokenize(&[end])).collect::<Result<Vec<String>>>()?;
    Ok(texts.into_iter().filter(|end| !end.is_empty()).collect())
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
    let token_budget = config.sequence_length.min(model.context_length());
    let rules =
        Rules { config, template: &template, tools: &tools, ends: &[], joins_system, token_budget, punishes: false };
    let ends = end_texts(model)?;
    // The seed selects the world of an environment with several.
    for seed in 0..environment.kinds().len().max(1) as u64 {
        let mut episode = RunningEpisode::new(environment, String::new(), 0, seed, seed);
        episode.begin(Split::Train).while_doing(|| "beginning an episode".into())?;
        episode.leave();
        episode.ask(model, rules).while_doing(|| "writing the agent's first prompt".into())?;
        if !episode.conversation.pictures.is_empty() && !config.rollout.name.is_model() {
            return Err(AgentError::EngineReadsNoPictures.into());
        }
        let length = episode.conversation.len();
        if length >= token_budget {
            let problem =
                format!("leaves no room for an answer: the agent's first prompt has {length} of {token_budget} tokens");
            return Err(Error::config("algo.sequence_length", problem));
        }
        let shown: Vec<&Picture> = episode.conversation.pictures.iter().collect();
        let text = pictures::described(&model.detokenize(&episode.conversation.tokens)?, &shown);
        let kind = environment.kinds().get(seed as usize).map(|kind| format!(" in `{kind}`")).unwrap_or_default();
        let most = config.max_tokens_per_step.min(token_budget - length);
        tracing::info!(
            "the agent's first prompt{kind}, {length} tokens:\n{}\n[here the agent writes at most {most} tokens{}; these \
             are trained on, and no others]",
            excerpt(&text),
            if ends.is_empty() { String::new() } else { format!(", up to `{}`", ends.join("` or `")) }
        );
    }
    Ok(())
}

/// The text, or only its beginning and end if it is long.
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

/// Whether the chat template fails because of the system message `system`, as the templates of Gemma 2 and Mistral 7B
/// v0.1 do.
fn refuses_system(model: &dyn LanguageModel, system: &str) -> bool {
    let continue_as_assistant = true;
    let renders = |messages: &[Message]| model.render_chat(messages, continue_as_assistant).is_ok();
    let user = Message::new("user", "x");
    !system.is_empty() && !renders(&[Message::new("system", system), user.clone()]) && renders(&[user])
}

/// An answer of the agent, and the range of its tokens in the episode.
struct Answer {
    text: String,
    tokens: std::ops::Range<usize>,
    /// Whether a limit on tokens cut it off.
    is_truncated: bool,
}

/// One answer of every episode that has not ended.
#[derive(Clone, Copy)]
struct Round {
    number: usize,
    /// Whether no episode has a further answer.
    is_last: bool,
    /// Most tokens of a prompt and its answer together.
    token_budget: usize,
}

/// Generates an answer for every episode that has not ended, and returns the answers by the position of the episode. An
/// error is that of an episode alone.
fn generate_answers(
    config: &AgenticPpoConfig,
    plan: &EpisodePlan,
    round: Round,
    writer: &mut Writer<'_>,
    episodes: &[RunningEpisode<'_>],
    noise: &Noise,
) -> Result<BTreeMap<usize, Result<Generation>>> {
    let continuing: Vec<usize> = (0..episodes.len()).filter(|i| episodes[*i].ended.is_none()).collect();
    let purpose = if plan.held_out { Purpose::Evaluation } else { Purpose::Tokens };
    let seed = noise.generator(purpose, plan.step, round.number as u64).next_u64();
    let number = |i: usize| (plan.group(i / plan.group_size) * plan.group_size + i % plan.group_size) as u64;
    let mut answers = BTreeMap::new();
    // An engine makes batches itself.
    let at_once = if writer.engine.is_some() { usize::MAX } else { config.infer_batch_size };
    for positions in continuing.chunks(at_once) {
        let prompts: Vec<Vec<u32>> = positions.iter().map(|i| episodes[*i].conversation.prompt().to_vec()).collect();
        let numbers = positions.iter().map(|i| number(*i)).collect();
        let limit = |(i, prompt): (&usize, &Vec<u32>)| episodes[*i].answer_limit.min(round.token_budget - prompt.len());
        let limits = positions.iter().zip(&prompts).map(limit).collect();
        let sampling =
            Sampling { is_last_turn: round.is_last, ..config.sampling(plan.temperature, limits, seed, numbers) };
        let generations = match &mut writer.engine {
            Some(_) if prompts.iter().flatten().any(|id| *id >= FIRST_PICTURE_ID) => {
                return Err(AgentError::EngineReadsNoPictures.into());
            }
            Some(engine) => engine.answers(&prompts, &sampling)?,
            None => writer.model.answers(&prompts, &sampling)?,
        };
        let has_raw = generations.iter().flatten().all(|g| g.raw_log_probs.len() == g.tokens.len());
        let needs_raw = config.infer_log_probs == InferLogProbs::Raw || config.is_asynchronous();
        if needs_raw && !has_raw {
            let problem = "the model does not tell the log-probabilities of its tokens before temperature: leave \
                           `algo.infer_log_probs` at `drawn` and `algo.async_generation_ratio` at 0";
            return Err(Error::Unsupported(problem.into()));
        }
        answers.extend(positions.iter().copied().zip(generations));
    }
    Ok(answers)
}

impl<'a> RunningEpisode<'a> {
    fn new(environment: &'a mut dyn Environment, tag: String, group: usize, number: u64, seed: u64) -> Self {
        Self {
            tag,
            environment,
            conversation: Conversation::default(),
            observation: Observation::default(),
            steps: Vec::new(),
            calls: Vec::new(),
            turn_start: None,
            results: Vec::new(),
            is_chat: false,
            answer_limit: usize::MAX,
            group,
            number,
            seed,
            ended: None,
            is_open: false,
        }
    }

    /// Lets the environment begin the episode.
    fn begin(&mut self, split: Split) -> Result<()> {
        self.environment.enter(split, self.number)?;
        self.is_open = true;
        self.observation = self.environment.reset(self.seed)?.marked()?;
        Ok(())
    }

    /// Makes it known to the environment that the episode is over, if it does not know yet.
    fn leave(&mut self) {
        if std::mem::take(&mut self.is_open)
            && let Err(error) = self.environment.leave()
        {
            tracing::debug!("an environment was told that its episode is over: {}", roll_core::one_line(&error));
        }
    }

    /// Extends the conversation by what the agent reads next: results of its tools if there are any, otherwise the
    /// message of a new turn. With `history_length`, a new turn begins a prompt of its own. A program that writes the
    /// prompts itself extends the text, or begins another one.
    fn ask(&mut self, model: &dyn LanguageModel, rules: Rules<'_>) -> Result<()> {
        let Rules { config, template, tools, ends, joins_system, .. } = rules;
        if !self.results.is_empty() {
            let messages = self.results.drain(..).enumerate().map(|(i, result)| tools::result(i, result)).collect();
            return self.conversation.ask(model, tools, messages, &[]);
        }
        if let Some(ChatRequest { mut messages, pictures, known, tools, max_tokens }) = self.environment.chat() {
            self.is_chat = true;
            self.answer_limit = max_tokens.unwrap_or(usize::MAX).max(1);
            if known == 0 {
                self.conversation.restart();
            }
            let asked = messages.split_off(known);
            let known_pictures = messages.iter().map(|message| message.content.matches(PICTURE_MARK).count()).sum();
            let pictures = pictures.get(known_pictures..).unwrap_or_default();
            return self.conversation.ask(model, &Tools::described(tools), asked, pictures);
        }
        let (turn, has_own_prompt) = (self.steps.len(), config.history_length.is_some());
        if has_own_prompt {
            self.conversation.restart();
        }
        let shown_turns = config.history_length.map_or(0, |turns| turns.saturating_sub(1)).min(turn);
        let instructions = self.environment.instructions();
        let Observation { text: mut content, pictures } = template.render(Turn {
            observation: &self.observation,
            index: turn + 1,
            actions_left: config.max_actions_per_traj - turn,
            max_response_length: config.max_tokens_per_step,
            instructions: &instructions,
            history: &self.steps[turn - shown_turns..],
            pictures: &self.conversation.pictures,
            ends,
        });
        let mut messages = Vec::new();
        if turn == 0 || has_own_prompt {
            if !instructions.is_empty() && !template.has_instructions() {
                content = format!("{}\n{content}", without_picture_marks(instructions));
            }
            match without_picture_marks(config.agent_system_template.as_str()).as_str() {
                // There is no system message.
                "" => {}
                // The chat template refuses system messages.
                system if joins_system => content = format!("{system}\n\n{content}"),
                system => messages.push(Message::new("system", system)),
            }
        }
        messages.push(Message::new("user", content));
        self.conversation.ask(model, tools, messages, &pictures)
    }

    /// Adds the agent's answer to the conversation. An empty generation ends the episode, which has no tokens left: the
    /// result is then `None`.
    fn answer(
        &mut self,
        model: &dyn LanguageModel,
        generation: &Generation,
        rules: Rules<'_>,
    ) -> Result<Option<Answer>> {
        if generation.tokens.is_empty() {
            self.end(Ending::TokenLimit);
            return Ok(None);
        }
        let start = self.conversation.len();
        let room = rules.token_budget.saturating_sub(self.conversation.prompt().len());
        let limit = room.min(rules.config.max_tokens_per_step).min(self.answer_limit);
        let text = self.conversation.answer(model, generation)?;
        let ended_itself = generation.tokens.last().is_some_and(|last| model.end_tokens().contains(last))
            || rules.config.stop.iter().any(|stop| text.contains(stop.as_str()));
        let is_truncated = generation.tokens.len() >= limit && !ended_itself;
        Ok(Some(Answer { text, tokens: start..self.conversation.len(), is_truncated }))
    }

    /// Runs the tools that the answer calls. If it calls none, or no more calls are allowed, hands the answer to the
    /// environment, which ends the turn.
    fn act(&mut self, answer: &mut Answer, Rules { config, tools, ends, punishes, .. }: Rules<'_>) {
        let Answer { text: response, tokens, is_truncated } = answer;
        let text = without_end(response, ends);
        let turn_start = *self.turn_start.get_or_insert(tokens.start);
        let calls_left = config.max_tool_calls.saturating_sub(self.calls.len());
        if !tools.is_empty() && !self.is_chat && calls_left > 0 {
            let calls = tools.answer(tools::parse_calls(text), calls_left);
            if !calls.is_empty() {
                self.results = calls.iter().map(|call| json::compact(&call.output)).collect();
                return self.calls.extend(calls);
            }
        }
        let next = self.environment.step(text);
        let (next, observation) = match next.and_then(|mut next| {
            let observation = std::mem::take(&mut next.observation).marked()?;
            Ok((next, observation))
        }) {
            Ok(next) => next,
            Err(e) => return self.fail(&e),
        };
        if !next.reward.is_finite() {
            return self.fail(&Error::NonFinite { what: "the reward of the environment".into(), value: next.reward });
        }
        let penalty = if punishes { config.penalty(tokens.len(), *is_truncated) } else { 0.0 };
        let observation = std::mem::replace(&mut self.observation, observation);
        let response = std::mem::take(response);
        self.turn_start = None;
        self.steps.push(Step {
            pictures: self.conversation.positions(&observation.pictures),
            observation: observation.text,
            response,
            reward: next.reward - penalty,
            penalty,
            truncated: *is_truncated,
            action: self.environment.action(),
            valid: next.valid,
            tokens: turn_start..tokens.end,
            begins: self.conversation.begins,
            calls: std::mem::take(&mut self.calls),
        });
        // If the environment does not say whether the task is solved, a positive reward at the end means that it is.
        let solved = self.environment.solved().unwrap_or(next.terminated && next.reward > 0.0);
        if next.terminated || next.truncated {
            let ending = if next.truncated { Ending::Truncated } else { Ending::Terminated };
            self.ended = Some(Ended { ending, solved });
        } else if self.steps.len() >= config.max_actions_per_traj {
            self.end(Ending::TurnLimit);
        }
    }

    /// Ends the episode, which the environment has not ended.
    fn end(&mut self, ending: Ending) {
        let solved = self.environment.solved().unwrap_or(false);
        self.ended = Some(Ended { ending, solved });
    }

    /// Ends the episode because of an error of its environment.
    fn fail(&mut self, error: &Error) {
        self.ended = Some(Ended { ending: Ending::Failed(roll_core::one_line(error)), solved: false });
    }

    /// The episode as it was played.
    fn finish(mut self) -> Episode {
        let Ended { ending, solved } = match self.ended.take() {
            Some(ended) => ended,
            None => Ended { ending: Ending::TurnLimit, solved: self.environment.solved().unwrap_or(false) },
        };
        let begins = self.conversation.begins;
        let shown = self.conversation.positions(&self.observation.pictures);
        let Conversation {
            mut tokens,
            mut response,
            mut log_probs,
            mut raw_log_probs,
            mut pictures,
            answered_pictures,
            ..
        } = self.conversation;
        // A turn that ended at the token limit after calls of tools becomes a step without a reward, so that its tokens
        // are trained on.
        if let (Some(turn_start), Ending::TokenLimit) = (self.turn_start, &ending)
            && let Some(last) = response.iter().rposition(|is_written| *is_written)
        {
            self.steps.push(Step {
                observation: self.observation.text,
                pictures: shown,
                tokens: turn_start..last + 1,
                begins,
                calls: self.calls,
                truncated: true,
                ..Step::default()
            });
        }
        // A prompt that the agent did not answer is not part of the episode.
        let length = self.steps.last().map_or(0, |s| s.tokens.end);
        tokens.truncate(length);
        response.truncate(length);
        log_probs.truncate(length);
        raw_log_probs.truncate(length);
        pictures.truncate(answered_pictures);
        Episode {
            group: self.group,
            tag: self.tag,
            seed: self.seed,
            tokens,
            pictures,
            response,
            log_probs,
            raw_log_probs,
            steps: self.steps,
            solved,
            ending,
        }
    }
}
