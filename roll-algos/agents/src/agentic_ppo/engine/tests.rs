//! Engines that work, are slow, die or serve something else: stand-ins that continue prompts with a bigram model.
#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use roll_core::{Adapter, Algorithm, Grad, LanguageModel, OwnDataAlgorithm, Silent, SingleRank, StepReport, Tensor};
use roll_testing::{Bigram, EngineApi, EngineFault, StandIn};

use super::*;
use crate::agentic_ppo::test_support::{Likes, algorithm_that_likes_x, short_config, step};
use crate::agentic_ppo::{AgenticPpo, AgenticPpoConfig};

const APIS: [(EngineApi, EngineName); 2] =
    [(EngineApi::Vllm, EngineName::Vllm), (EngineApi::Sglang, EngineName::Sglang)];

fn stand_in(api: EngineApi) -> StandIn {
    StandIn::start(api, Box::new(Bigram::new().adapter()))
}

fn options(name: EngineName, servers: &[&StandIn], adapters: &Path) -> RolloutConfig {
    RolloutConfig {
        name,
        urls: servers.iter().map(|server| server.url()).collect(),
        adapters: Some(adapters.into()),
        timeout: 5.0,
        retries: 0,
        ..RolloutConfig::default()
    }
}

fn engine(name: EngineName, servers: &[&StandIn], adapters: &Path) -> Engine {
    Engine::new(&options(name, servers, adapters), 4).unwrap().unwrap()
}

/// A model that prefers some letters to others.
fn policy(letters: &str) -> Bigram {
    let mut model = Bigram::of(letters).adapter();
    model.logits.iter_mut().enumerate().for_each(|(i, logit)| *logit += 0.1 * (i % 7) as f32);
    model
}

fn prompts() -> Vec<Vec<u32>> {
    ["ab", "c", "xyz", "b"].map(|text| text.bytes().map(u32::from).collect()).to_vec()
}

/// What went wrong with each prompt; empty if it was continued.
fn problems(engine: &mut Engine) -> Result<Vec<String>> {
    let answers = engine.answers(&prompts(), &Sampling::greedy(6))?;
    Ok(answers.into_iter().map(|answer| answer.err().map(|e| e.to_string()).unwrap_or_default()).collect())
}

#[test]
fn an_engine_writes_what_the_model_would_write() {
    for (api, name) in APIS {
        let (directory, server) = (tempfile::tempdir().unwrap(), stand_in(api));
        let (mut engine, mut model) = (engine(name, &[&server], directory.path()), policy("abc"));
        engine.check(&mut model).unwrap();
        engine.load(&mut model, 3, &SingleRank).unwrap();
        let sampling = Sampling { limits: vec![6, 6, 2, 6], ..Sampling::greedy(6) };
        let found = engine.answers(&prompts(), &sampling).unwrap();
        for (found, expected) in found.into_iter().zip(model.generate(&prompts(), &sampling).unwrap()) {
            let found = found.unwrap();
            assert_eq!(found.tokens, expected.tokens);
            for (a, b) in found.raw_log_probs.iter().zip(&expected.raw_log_probs) {
                assert!((a - b).abs() < 1e-5, "{a} {b}");
            }
        }
        // Drawn tokens have the log-probabilities that training computes.
        let sampling = Sampling { temperature: 1.0, seed: 7, numbers: vec![4, 9, 2, 0], ..Sampling::greedy(6) };
        let drawn = engine.answers(&prompts(), &sampling).unwrap();
        for (prompt, drawn) in prompts().iter().zip(drawn) {
            let drawn = drawn.unwrap();
            let whole: Vec<i64> = prompt.iter().chain(&drawn.tokens).map(|id| i64::from(*id)).collect();
            let (tokens, mask) = (Tensor::new(whole.clone(), [1, whole.len()]), Tensor::full([1, whole.len()], 1.0));
            let (stats, _) = model.evaluate(&tokens.unwrap(), &mask, &mask, Adapter::On, Grad::Skip).unwrap();
            let trained = &stats.log_probs.f32s().unwrap()[prompt.len() - 1..];
            assert_eq!(trained.len(), drawn.raw_log_probs.len());
            assert!(trained.iter().zip(&drawn.raw_log_probs).all(|(a, b)| (a - b).abs() < 1e-5));
        }
        // Draws depend on the number of the prompt, not on its place.
        let seeds = |requests: Vec<(String, Value)>| -> Vec<Value> {
            let seed = |body: &Value| body.get("seed").or(body["sampling_params"].get("sampling_seed")).cloned();
            requests.iter().rev().take(4).filter_map(|(_, body)| seed(body)).collect()
        };
        let mut first = seeds(server.requests());
        let (order, sampling) = ([3, 1, 0, 2], Sampling { numbers: vec![0, 9, 4, 2], ..sampling });
        let reordered: Vec<Vec<u32>> = order.iter().map(|i| prompts()[*i].clone()).collect();
        engine.answers(&reordered, &sampling).unwrap();
        let mut second = seeds(server.requests());
        first.sort_by_key(|seed| seed.as_u64());
        second.sort_by_key(|seed| seed.as_u64());
        assert_eq!(first, second);
        assert!(first.windows(2).all(|pair| pair[0] != pair[1]), "{first:?}");
    }
}

#[test]
fn each_version_of_the_adapter_is_used_and_the_previous_one_removed() {
    for (api, name) in APIS {
        let (directory, server) = (tempfile::tempdir().unwrap(), stand_in(api));
        let mut engine = engine(name, &[&server], directory.path());
        let mut names = Vec::new();
        for (version, letters) in ["ab", "cd", "ef"].into_iter().enumerate() {
            let mut model = policy(letters);
            engine.load(&mut model, version as u64, &SingleRank).unwrap();
            let greedy = Sampling::greedy(6);
            let found = engine.answers(&prompts(), &greedy).unwrap().remove(0).unwrap();
            assert_eq!(found.tokens, model.generate(&prompts(), &greedy).unwrap()[0].tokens);
            let present = server.adapters();
            assert!(present.len() == 1 && present[0].starts_with(&format!("roll-v{version}-")), "{present:?}");
            let files: Vec<_> = std::fs::read_dir(directory.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
            assert_eq!(files, [present[0].as_str()]);
            names.extend(present);
            // The same parameters keep their name, whatever the version: a validation after a step loads nothing.
            engine.load(&mut model, 9, &SingleRank).unwrap();
            assert_eq!(server.adapters(), names[version..]);
        }
        // What a killed run left behind goes, too.
        let mut resumed = super::tests::engine(name, &[&server], directory.path());
        resumed.load(&mut policy("xy"), 1, &SingleRank).unwrap();
        assert!(server.adapters().len() == 1 && !names.contains(&server.adapters()[0]));
    }
}

#[test]
fn servers_that_fail_cost_their_prompts_and_the_others_go_on() {
    for (api, name) in APIS {
        let directory = tempfile::tempdir().unwrap();
        let (one, two) = (stand_in(api), stand_in(api));
        let mut both = engine(name, &[&one, &two], directory.path());
        both.load(&mut policy("abc"), 0, &SingleRank).unwrap();
        assert_eq!(problems(&mut both).unwrap(), [""; 4]);
        let counts = |server: &StandIn| server.requests().iter().filter(|(path, _)| !path.contains("load")).count();
        assert_eq!((counts(&one), counts(&two)), (2, 2), "an episode keeps its server");
        one.fail(EngineFault::Dies);
        assert_eq!(problems(&mut both).unwrap(), [""; 4]);
        two.fail(EngineFault::Dies);
        let found = problems(&mut both).unwrap();
        assert!(found.iter().all(|problem| problem.contains("gave no answer")), "{found:?}");
        // Servers that answer again are asked again from the next rollout on. One lost its adapters, and gets them.
        one.fail(EngineFault::StartedAgain);
        two.fail(EngineFault::None);
        both.load(&mut policy("abc"), 0, &SingleRank).unwrap();
        assert_eq!(problems(&mut both).unwrap(), [""; 4]);
        one.fail(EngineFault::StartedAgain);
        drop(two);
        let found = problems(&mut both).unwrap();
        assert!(found.iter().all(|problem| problem.contains("gave no answer")), "{found:?}");
        // An engine without any server is no error before a step needs it.
        one.fail(EngineFault::Dies);
        both.load(&mut policy("abc"), 0, &SingleRank).unwrap();
    }
}

#[test]
fn an_answer_that_takes_too_long_is_none() {
    let (directory, server) = (tempfile::tempdir().unwrap(), stand_in(EngineApi::Vllm));
    let patient = options(EngineName::Vllm, &[&server], directory.path());
    let mut engine = Engine::new(&RolloutConfig { timeout: 0.4, ..patient }, 4).unwrap().unwrap();
    engine.load(&mut policy("abc"), 0, &SingleRank).unwrap();
    server.fail(EngineFault::Slow(Duration::from_millis(50)));
    assert_eq!(problems(&mut engine).unwrap(), [""; 4]);
    server.fail(EngineFault::Slow(Duration::from_secs(2)));
    let begun = Instant::now();
    assert!(problems(&mut engine).unwrap().iter().all(|problem| problem.contains("no answer")));
    assert!(begun.elapsed() < Duration::from_millis(1800), "{:?}", begun.elapsed());
}

#[test]
fn answers_that_cannot_be_trained_on_stop_the_run() {
    for (fault, api, expected) in [
        (EngineFault::NoLogProbs, EngineApi::Vllm, "no log-probabilities"),
        (EngineFault::NoLogProbs, EngineApi::Sglang, "no log-probabilities"),
        (EngineFault::OtherPrompt, EngineApi::Vllm, "read other tokens"),
    ] {
        let (directory, server) = (tempfile::tempdir().unwrap(), stand_in(api));
        let name = APIS.iter().find(|(of, _)| *of == api).unwrap().1;
        let mut engine = engine(name, &[&server], directory.path());
        engine.load(&mut policy("abc"), 0, &SingleRank).unwrap();
        server.fail(fault);
        let problem = problems(&mut engine).unwrap_err().to_string();
        assert!(problem.contains(expected) && problem.contains(&server.url()), "{problem}");
    }
}

#[test]
fn a_check_asks_every_server_and_names_what_is_missing() {
    for (api, name) in APIS {
        let (directory, server) = (tempfile::tempdir().unwrap(), stand_in(api));
        let check = |model: &mut Bigram| {
            let checked = engine(name, &[&server], directory.path()).check(model);
            checked.map_err(|error| error.to_string())
        };
        check(&mut policy("a")).unwrap();
        let problem = check(&mut Bigram::new()).unwrap_err();
        assert!(problem.contains("model.lora_rank"), "{problem}");
        server.fail(EngineFault::LoadsNothing);
        let problem = check(&mut policy("a")).unwrap_err();
        assert!(problem.contains("--enable-lora"), "{problem}");
        assert_eq!(problem.contains("VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"), api == EngineApi::Vllm, "{problem}");
        server.fail(EngineFault::Dies);
        assert!(check(&mut policy("a")).unwrap_err().contains(&server.url()));
    }
}

#[test]
fn an_adapter_that_a_server_refuses_stops_the_run_with_its_words() {
    let directory = tempfile::tempdir().unwrap();
    let server = stand_in(EngineApi::Vllm);
    server.fail(EngineFault::RefusesAdapters);
    let mut engine = engine(EngineName::Vllm, &[&server], directory.path());
    let problem = engine.load(&mut policy("a"), 0, &SingleRank).unwrap_err().to_string();
    assert!(problem.contains("max_lora_rank 8") && problem.contains("is not loaded"), "{problem}");
}

#[test]
fn invalid_options_name_their_key() {
    let valid = RolloutConfig {
        name: EngineName::Vllm,
        urls: vec!["http://127.0.0.1:1".into()],
        adapters: Some("adapters".into()),
        ..RolloutConfig::default()
    };
    assert!(Engine::new(&RolloutConfig::default(), 1).unwrap().is_none());
    type Spoil = fn(&mut RolloutConfig);
    let spoilt: [(&str, Spoil); 5] = [
        ("algo.rollout.urls", |c| c.urls.clear()),
        ("algo.rollout.urls", |c| c.urls = vec!["example.org".into()]),
        ("algo.rollout.adapters", |c| c.adapters = None),
        ("algo.rollout.timeout", |c| c.timeout = 0.0),
        ("algo.rollout.token_env", |c| c.token_env = Some("NO_SUCH_TOKEN".into())),
    ];
    for (key, spoil) in spoilt {
        let mut config = valid.clone();
        spoil(&mut config);
        let problem = Engine::new(&config, 1).err().unwrap().to_string();
        assert!(problem.contains(key), "{problem}");
    }
    let mut config = AgenticPpoConfig { rollout: valid, temperature: 0.7, ..AgenticPpoConfig::default() };
    config.check().unwrap();
    config.loss.train_infer_correction.is_weight.enabled = true;
    let problem = config.check().unwrap_err().to_string();
    assert!(problem.contains("algo.infer_log_probs"), "{problem}");
}

fn algorithm(rollout: RolloutConfig) -> AgenticPpo {
    let works = true;
    algorithm_that_likes_x(AgenticPpoConfig { rollout, ..short_config() }, works)
}

#[test]
fn an_agent_learns_through_an_engine_as_without_it() {
    let success = |rollout: RolloutConfig| {
        let (mut algorithm, mut model) = (algorithm(rollout), Bigram::of("xyz").adapter());
        algorithm.check(&mut model, None).unwrap();
        let reports: Vec<StepReport> = (0..20).map(|i| step(&mut algorithm, &mut model, i, 5.0).unwrap()).collect();
        let kernels = reports[19].metrics["actor/train_infer_abs_diff"];
        let validated = algorithm.validate(20, &mut model, &Noise::new(1), &Silent).unwrap().unwrap();
        (reports[0].metrics["env/success"], reports[19].metrics["env/success"], validated.metrics, kernels)
    };
    let (before, after, validated, _) = success(RolloutConfig::default());
    assert!(before < 0.6 && after > 0.8 && validated["val/env/success"] == 1.0, "{before} {after}");
    for (api, name) in APIS {
        let (directory, server) = (tempfile::tempdir().unwrap(), stand_in(api));
        let (before, after, validated, kernels) = success(options(name, &[&server], directory.path()));
        assert!(before < 0.6 && after > 0.8 && validated["val/env/success"] == 1.0, "{before} {after}");
        assert!(kernels < 1e-5, "{kernels}");
        let loads = server.requests().iter().filter(|(path, _)| path.ends_with("/load_lora_adapter")).count();
        assert_eq!(loads, 21, "one for each rollout and the validation");
    }
}

#[test]
fn episodes_played_ahead_are_written_by_the_engine_too() {
    let (directory, server) = (tempfile::tempdir().unwrap(), stand_in(EngineApi::Vllm));
    let mut algorithm = AgenticPpo::new(AgenticPpoConfig {
        num_env_groups: 2,
        group_size: 4,
        max_actions_per_traj: 1,
        agent_system_template: String::new(),
        agent_template: "{observation}".into(),
        async_generation_ratio: 1,
        rollout: options(EngineName::Vllm, &[&server], directory.path()),
        ..AgenticPpoConfig::default()
    })
    .unwrap();
    algorithm.open_environments(&mut || Ok(Box::new(Likes { works: true }))).unwrap();
    let mut model = Bigram::of("xyz").adapter();
    for (i, age) in [(0, 0.0), (1, 1.0), (2, 1.0)] {
        let report = step(&mut algorithm, &mut model, i, 5.0).unwrap();
        assert_eq!(report.metrics["env/policy_age"], age);
        assert_eq!(report.metrics["env/episodes"], 8.0);
    }
    assert!(model.calls.is_empty(), "the model itself wrote nothing");
}

#[test]
fn a_server_that_dies_ends_the_step_and_nothing_else() {
    let (directory, server) = (tempfile::tempdir().unwrap(), stand_in(EngineApi::Vllm));
    let mut algorithm = algorithm(options(EngineName::Vllm, &[&server], directory.path()));
    let mut model = Bigram::of("xyz").adapter();
    assert!(step(&mut algorithm, &mut model, 0, 5.0).unwrap().applied);
    let before = model.logits.clone();
    server.fail(EngineFault::Dies);
    let report = step(&mut algorithm, &mut model, 1, 5.0).unwrap();
    assert!(!report.applied && model.logits == before);
    assert_eq!((report.metrics["env/failed"], report.skipped.len()), (32.0, 32));
    assert!(report.skipped[0].1.contains("gave no answer"), "{:?}", report.skipped[0]);
    server.fail(EngineFault::None);
    assert!(step(&mut algorithm, &mut model, 2, 5.0).unwrap().applied);
}

#[test]
fn an_engine_that_serves_something_else_stops_the_first_step_before_its_update() {
    // A resumed run whose engine goes on with an old adapter, ids that were not drawn, another prompt.
    for (fault, api) in [
        (EngineFault::OldAdapter, EngineApi::Vllm),
        (EngineFault::OldAdapter, EngineApi::Sglang),
        (EngineFault::WrongIds, EngineApi::Sglang),
    ] {
        let (directory, server) = (tempfile::tempdir().unwrap(), stand_in(api));
        let name = APIS.iter().find(|(of, _)| *of == api).unwrap().1;
        let options = options(name, &[&server], directory.path());
        Engine::new(&options, 4).unwrap().unwrap().load(&mut Bigram::of("uvw").adapter(), 0, &SingleRank).unwrap();
        server.fail(fault);
        let (mut algorithm, mut model) = (algorithm(options), Bigram::of("xyz").adapter());
        let before = model.logits.clone();
        let problem = step(&mut algorithm, &mut model, 5, 5.0).unwrap_err().to_string();
        assert!(problem.contains("log-probabilities differ") && model.logits == before, "{problem}");
    }
}
