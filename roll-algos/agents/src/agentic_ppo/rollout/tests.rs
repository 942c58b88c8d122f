#![allow(clippy::unwrap_used)]
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use roll_core::{Observation, Silent, Transition};
use roll_testing::Bigram;

use super::*;

/// Time in which all threads of a test reach the same place, on any machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// Shows its seed; ends after `last` turns, rewards `x`, and goes wrong on demand.
struct World {
    seed: u64,
    turn: usize,
    last: usize,
    breaks_at: Option<usize>,
    reward: f64,
}

impl World {
    fn boxed(last: usize) -> Box<dyn Environment> {
        Box::new(Self::new(last))
    }

    fn new(last: usize) -> Self {
        Self { seed: 0, turn: 0, last, breaks_at: None, reward: 1.0 }
    }
}

impl Environment for World {
    fn reset(&mut self, seed: u64) -> Result<Observation> {
        (self.seed, self.turn) = (seed, 0);
        if self.breaks_at == Some(0) {
            return Err(Error::Unsupported("no world".into()));
        }
        Ok(Observation::text(format!("s{}", seed % 1000)))
    }

    fn step(&mut self, action: &str) -> Result<Transition> {
        self.turn += 1;
        if self.breaks_at == Some(self.turn) {
            return Err(Error::Unsupported("the world broke".into()));
        }
        let x = action.contains('x');
        Ok(Transition {
            observation: Observation::text(format!("t{}", self.turn)),
            reward: if x { self.reward } else { 0.0 },
            terminated: self.turn == self.last,
            truncated: false,
            valid: x,
        })
    }
}

fn config() -> AgenticPpoConfig {
    AgenticPpoConfig {
        num_env_groups: 2,
        group_size: 3,
        max_actions_per_traj: 3,
        max_tokens_per_step: 4,
        agent_system_template: String::new(),
        agent_template: "{observation}".into(),
        ..AgenticPpoConfig::default()
    }
}

fn plan(step: u64, held_out: bool) -> EpisodePlan {
    let rest = EpisodePlan::default();
    EpisodePlan { step, groups: 2, all_groups: 2, group_size: 3, temperature: 1.0, held_out, ..rest }
}

fn rollout(
    config: &AgenticPpoConfig,
    plan: EpisodePlan,
    worlds: &mut [Box<dyn Environment>],
    model: &mut Bigram,
) -> Result<Vec<Episode>> {
    play(config, plan, &mut Writer::of_model(model), worlds, &Noise::new(3), &Silent)
}

fn worlds(last: usize) -> Vec<Box<dyn Environment>> {
    (0..6).map(|_| World::boxed(last)).collect()
}

#[test]
fn the_mask_covers_what_the_agent_wrote_and_nothing_else() {
    let mut model = Bigram::of("xy");
    for episode in rollout(&config(), plan(0, false), &mut worlds(9), &mut model).unwrap() {
        assert_eq!((episode.steps.len(), &episode.ending), (3, &Ending::TurnLimit));
        let mut covered = vec![false; episode.tokens.len()];
        let mut text = String::new();
        for (i, step) in episode.steps.iter().enumerate() {
            let shown = if i == 0 { format!("s{}", episode.seed % 1000) } else { format!("t{i}") };
            let words = model.detokenize(&episode.tokens[step.tokens.clone()]).unwrap();
            assert_eq!((&step.observation, &step.response), (&shown, &words));
            // An answer that was cut off is closed by the template all the same.
            let closed = if i == 0 || text.ends_with('$') { "" } else { "$" };
            text += &format!("{closed}u:{shown}$a:{words}");
            step.tokens.clone().for_each(|t| covered[t] = true);
        }
        assert_eq!(model.detokenize(&episode.tokens).unwrap(), text);
        assert_eq!(covered, episode.response);
        assert!(covered.last() == Some(&true));
        for (covered, log_prob) in covered.iter().zip(&episode.log_probs) {
            assert_eq!(*covered, *log_prob != 0.0);
        }
        assert_eq!(episode.score(), episode.steps.iter().filter(|s| s.response.contains('x')).count() as f64);
    }
}

#[test]
fn turns_with_prompts_of_their_own_are_conversations_of_their_own() {
    let config = AgenticPpoConfig {
        history_length: Some(2),
        adv_estimator: crate::agentic_ppo::config::Estimator::Gigpo,
        agent_template: "{history_length}[{history}]{observation}".into(),
        // The limit is per turn, not per episode.
        sequence_length: 130,
        ..config()
    };
    config.check().unwrap();
    let mut model = Bigram::of("xy");
    let played = rollout(&config, plan(0, false), &mut worlds(9), &mut model).unwrap();
    let samples = crate::agentic_ppo::batch::text_samples(&played, true, Default::default());
    assert!(played.iter().all(|e| e.steps.len() == 3) && played.iter().any(|e| e.tokens.len() > 130));
    for sample in samples {
        let episode = &played[sample.episode];
        let step = &episode.steps[sample.turn];
        let text = model.detokenize(&sample.tokens).unwrap();
        let before = match sample.turn {
            0 => format!("0[]s{}", episode.seed % 1000),
            turn => {
                let Step { observation, response, reward, valid, .. } = &episode.steps[turn - 1];
                let response = response.trim_end_matches('$');
                let remark = if *valid { "" } else { " (not valid: keep to the format)" };
                let message =
                    format!("(step: {turn}, observation: {observation}, action: {response}{remark}, reward: {reward})");
                format!("1[{message}]t{turn}")
            }
        };
        assert_eq!(text, format!("u:{before}$a:{}", step.response));
        let written = sample.response.iter().filter(|r| **r).count();
        assert_eq!(written, step.tokens.len());
        assert!(sample.response.last() == Some(&true));
    }
    let wrong = AgenticPpoConfig { history_length: Some(2), ..AgenticPpoConfig::default() };
    assert!(wrong.check().unwrap_err().to_string().contains("algo.history_length"));
}

#[test]
fn a_group_shares_its_start_and_starts_are_their_own_everywhere_else() {
    let seeds = |step, held_out| -> Vec<u64> {
        let played = rollout(&config(), plan(step, held_out), &mut worlds(1), &mut Bigram::of("xy")).unwrap();
        assert_eq!(played.iter().map(|e| e.group).collect::<Vec<_>>(), [0, 0, 0, 1, 1, 1]);
        played.iter().map(|e| e.seed).collect()
    };
    let (first, second, held_out) = (seeds(0, false), seeds(1, false), seeds(0, true));
    for s in [&first, &second, &held_out] {
        assert!(s[0] == s[1] && s[1] == s[2] && s[2] != s[3] && s[3] == s[5]);
    }
    assert!(first[0] != second[0] && first[0] != held_out[0]);
    assert_eq!(first, seeds(0, false));
}

#[test]
fn failing_environment_ends_only_its_episode() {
    let mut worlds = worlds(2);
    worlds[0] = Box::new(World { breaks_at: Some(0), ..World::new(2) });
    worlds[1] = Box::new(World { breaks_at: Some(2), ..World::new(2) });
    worlds[2] = Box::new(World { reward: f64::NAN, ..World::new(2) });
    let played = rollout(&config(), plan(0, false), &mut worlds, &mut Bigram::of("x")).unwrap();
    let endings: Vec<bool> = played.iter().map(Episode::is_usable).collect();
    assert_eq!(endings[..2], [false, false]);
    assert_eq!(endings[3..], [true, true, true]);
    let failed = |e: &Episode| match &e.ending {
        Ending::Failed(reason) => reason.clone(),
        other => panic!("{other:?}"),
    };
    assert!(failed(&played[0]).contains("no world"));
    assert!(failed(&played[1]).contains("the world broke"));
    // The agent may have written nothing but the end of its turn, which is rewarded with 0.
    if played[2].steps.iter().all(|s| s.response.contains('x')) && played[2].steps.len() < 2 {
        assert!(failed(&played[2]).contains("reward"));
    }
}

#[test]
fn an_episode_ends_where_the_next_answer_does_not_fit() {
    let mut model = Bigram::of("xy");
    model.context = 14;
    for episode in rollout(&config(), plan(0, false), &mut worlds(9), &mut model).unwrap() {
        assert_eq!(episode.ending, Ending::TokenLimit);
        assert!(episode.tokens.len() <= 14 && !episode.steps.is_empty());
    }
    model.context = 3;
    for episode in rollout(&config(), plan(0, false), &mut worlds(9), &mut model).unwrap() {
        assert!(!episode.is_usable() && episode.tokens.is_empty());
    }
}

#[test]
fn episodes_near_their_token_limit_share_a_batch() {
    // Starts of one to twelve characters: near the end every play has another number of tokens left.
    let mut worlds: Vec<Box<dyn Environment>> = (0..64).map(|i| Box::new(Talks(i % 12 + 1)) as _).collect();
    let config = AgenticPpoConfig { sequence_length: 24, max_tokens_per_step: 12, ..config() };
    let plan = EpisodePlan { groups: 8, all_groups: 8, group_size: 8, ..plan(0, false) };
    let mut model = Bigram::of("xy");
    let played = rollout(&config, plan.clone(), &mut worlds, &mut model).unwrap();
    assert_eq!(model.calls[0], 64);
    assert!(model.calls.len() <= config.max_actions_per_traj, "{:?}", model.calls);
    assert!(played.iter().all(|e| e.tokens.len() <= 24) && played.iter().any(|e| e.tokens.len() == 24));
    // Each gets its answers as if it were alone.
    let alone = AgenticPpoConfig { infer_batch_size: 1, ..config };
    let singly = rollout(&alone, plan, &mut worlds, &mut model).unwrap();
    let tokens = |episodes: &[Episode]| episodes.iter().map(|e| e.tokens.clone()).collect::<Vec<_>>();
    assert_eq!(tokens(&played), tokens(&singly));
}

/// Shows this many characters.
struct Talks(usize);

impl Environment for Talks {
    fn reset(&mut self, _seed: u64) -> Result<Observation> {
        Ok(Observation::text("s".repeat(self.0)))
    }

    fn step(&mut self, _action: &str) -> Result<Transition> {
        let observation = Observation::text("t");
        Ok(Transition { observation, reward: 0.0, terminated: false, truncated: false, valid: true })
    }
}

#[test]
fn a_template_that_fails_or_forgets_is_an_error() {
    let mut model = Bigram::of("xy");
    model.forgets = true;
    let message = rollout(&config(), plan(0, false), &mut worlds(9), &mut model).unwrap_err().to_string();
    assert!(message.contains("leaves out the assistant's messages"), "{message}");
    model.fails = true;
    let message = rollout(&config(), plan(0, false), &mut worlds(9), &mut model).unwrap_err().to_string();
    assert!(message.contains("roles must alternate"), "{message}");
    let config = AgenticPpoConfig { agent_template: "{observatoin}".into(), ..config() };
    let message = rollout(&config, plan(0, false), &mut worlds(9), &mut Bigram::of("x")).unwrap_err().to_string();
    assert!(message.contains("observatoin"), "{message}");
}

#[test]
fn environments_work_at_the_same_time() {
    let (here, arrived) = (Mutex::new(0), Condvar::new());
    in_parallel(&mut [(); 40], 64, |()| {
        let mut here = here.lock().unwrap();
        *here += 1;
        arrived.notify_all();
        // Goes on only when all are here.
        let (_here, waited) = arrived.wait_timeout_while(here, PATIENCE, |here| *here < 40).unwrap();
        assert!(!waited.timed_out(), "40 items are not worked on at the same time");
    });
    in_parallel(&mut Vec::<()>::new(), 64, |()| ());
}

/// Counts the environments that work now, and the most that did; waits until `together` of them do.
struct Meets {
    counts: Arc<(Mutex<[usize; 2]>, Condvar)>,
    together: usize,
}

impl Environment for Meets {
    fn reset(&mut self, _seed: u64) -> Result<Observation> {
        let (counts, arrived) = &*self.counts;
        let mut now = counts.lock().unwrap();
        now[0] += 1;
        now[1] = now[1].max(now[0]);
        arrived.notify_all();
        let patience = if self.together == 1 { Duration::from_millis(20) } else { PATIENCE };
        let least = self.together.max(2);
        let (mut now, _) = arrived.wait_timeout_while(now, patience, |now| now[1] < least).unwrap();
        now[0] -= 1;
        Ok(Observation::text("o"))
    }

    fn step(&mut self, _action: &str) -> Result<Transition> {
        let observation = Observation::text("o");
        Ok(Transition { observation, reward: 0.0, terminated: true, truncated: false, valid: true })
    }
}

#[test]
fn as_many_environments_work_at_once_as_the_option_permits() {
    for at_once in [1, 5] {
        let counts = Arc::default();
        let meets = |_| Box::new(Meets { counts: Arc::clone(&counts), together: at_once }) as Box<dyn Environment>;
        let mut environments: Vec<_> = (0..6).map(meets).collect();
        let config = AgenticPpoConfig { max_env_step_concurrent: at_once, ..config() };
        rollout(&config, plan(0, false), &mut environments, &mut Bigram::of("xy")).unwrap();
        assert_eq!(counts.0.lock().unwrap()[1], at_once);
    }
}

#[test]
fn no_more_environments_work_at_once_than_permitted_and_none_waits_for_a_slow_one() {
    let (working, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let (done, last) = (Mutex::new(0), Condvar::new());
    let mut items: Vec<usize> = (0..30).collect();
    in_parallel(&mut items, 3, |item| {
        most.fetch_max(working.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        let mut done = done.lock().unwrap();
        if *item == 0 {
            // As slow as all others together.
            let (others, waited) = last.wait_timeout_while(done, PATIENCE, |done| *done < 29).unwrap();
            assert!(!waited.timed_out(), "the others wait for the slow one");
            done = others;
        }
        *done += 1;
        last.notify_all();
        working.fetch_sub(1, Ordering::SeqCst);
    });
    assert!(*done.lock().unwrap() == 30 && most.into_inner() <= 3);
}

/// Splits and actions of [`Logs`]; "over" for the end of an episode, with the number of its group.
type Logged = Arc<Mutex<Vec<(Split, String)>>>;

/// Logs its splits and actions, and reads the last letter of an answer.
struct Logs(Logged, Split, String, u64);

impl Environment for Logs {
    fn enter(&mut self, split: Split, number: u64) -> Result<()> {
        (self.1, self.3) = (split, number);
        Ok(())
    }

    fn leave(&mut self) -> Result<()> {
        self.0.lock().unwrap().push((self.1, format!("over {}", self.3)));
        Ok(())
    }

    fn reset(&mut self, _seed: u64) -> Result<Observation> {
        Ok(Observation::text("o"))
    }

    fn step(&mut self, action: &str) -> Result<Transition> {
        self.0.lock().unwrap().push((self.1, action.into()));
        self.2 = action.chars().last().map(|c| format!("({c})")).unwrap_or_default();
        let observation = Observation::text("o");
        Ok(Transition { observation, reward: 0.0, terminated: false, truncated: false, valid: true })
    }

    fn action(&self) -> String {
        self.2.clone()
    }
}

fn play_logged(held_out: bool) -> (Vec<Episode>, Vec<(Split, String)>) {
    let logged = Logged::default();
    let mut worlds: Vec<Box<dyn Environment>> =
        (0..6).map(|_| Box::new(Logs(logged.clone(), Split::Train, String::new(), 0)) as _).collect();
    let played = rollout(&config(), plan(0, held_out), &mut worlds, &mut Bigram::of("xy")).unwrap();
    let logged = logged.lock().unwrap().clone();
    (played, logged)
}

#[test]
fn actions_have_no_end_of_turn() {
    let (played, mut logged) = play_logged(false);
    logged.retain(|(_, action)| !action.starts_with("over"));
    let steps: Vec<&Step> = played.iter().flat_map(|episode| &episode.steps).collect();
    assert!(steps.iter().any(|step| step.response.ends_with('$')) && logged.len() == steps.len());
    assert!(logged.iter().all(|(_, action)| !action.contains('$')), "{logged:?}");
    for step in steps {
        let answer = step.response.trim_end_matches('$');
        assert_eq!(step.action, answer.chars().last().map(|c| format!("({c})")).unwrap_or_default());
    }
}

#[test]
fn environments_know_the_number_of_their_group_and_the_end_of_their_episode() {
    let over = |step, held_out| {
        let logged = Logged::default();
        let mut worlds: Vec<Box<dyn Environment>> =
            (0..6).map(|_| Box::new(Logs(logged.clone(), Split::Train, String::new(), 0)) as _).collect();
        let plan = EpisodePlan { all_groups: 5, ..plan(step, held_out) };
        rollout(&config(), plan.clone(), &mut worlds, &mut Bigram::of("xy")).unwrap();
        let logged = logged.lock().unwrap();
        let mut over: Vec<u64> =
            logged.iter().filter_map(|(_, said)| said.strip_prefix("over ")?.parse().ok()).collect();
        over.sort_unstable();
        (over, plan)
    };
    for (step, held_out, from) in [(0, false, 0), (3, false, 15), (3, true, 0)] {
        let (over, plan) = over(step, held_out);
        let expected: Vec<u64> = (0..plan.groups * plan.group_size)
            .map(|i| from + (plan.first_group + i / plan.group_size) as u64)
            .collect();
        assert_eq!(over, expected, "{step} {held_out}");
    }
}

#[test]
fn environments_know_their_split() {
    for (held_out, split) in [(false, Split::Train), (true, Split::Validation)] {
        assert!(play_logged(held_out).1.iter().all(|(logged, _)| *logged == split));
    }
}

#[test]
fn a_refused_system_message_begins_the_first_message() {
    let config = AgenticPpoConfig { agent_system_template: "Win.".into(), ..config() };
    for (refuses_system, begins) in [(false, "s:Win.$u:s"), (true, "u:Win.\n\ns")] {
        let mut model = Bigram::of("xy");
        model.refuses_system = refuses_system;
        for episode in rollout(&config, plan(0, false), &mut worlds(9), &mut model).unwrap() {
            let text = model.detokenize(&episode.tokens).unwrap();
            assert!(text.starts_with(begins) && text.matches("Win.").count() == 1, "{text}");
            assert_eq!(episode.steps.len(), 3);
        }
    }
}

#[test]
fn a_long_prompt_is_shown_by_its_beginning_and_its_end() {
    let shown = excerpt(&format!("a{}z", "\u{e4}".repeat(5000)));
    assert!(shown.starts_with("a\u{e4}") && shown.ends_with("\u{e4}z"), "{shown}");
    assert!(shown.contains("\u{e4} [... 1002 characters ...] \u{e4}"), "{shown}");
    assert_eq!(excerpt("short"), "short");
}
