//! The rules of the contract that a plugin can break, as tables: what each component does wrong, and what the host
//! makes of it. Faults are those of the components in Rust (P5, P7); answers those of a library in C (P6 to P9).

use roll_core::{Error, Fault, Grad, Kind, Options, Result, Score, Tensor};
use roll_plugin::{Plugin, load};

use super::contract::{WHOSE, World, environment, scored};
use super::{compile, context, names, registry, video};

/// A component with one method at fault, used until that fails.
type Run = fn(fault: &str) -> Result<()>;

/// As [`World::run`], of which the components of these bits are of the library.
fn world<const BITS: u32>(fault: &str) -> Result<()> {
    let mut world = World::new(BITS, fault);
    let first = world.run().map(drop);
    if fault.ends_with(":panic") && !fault.starts_with("velocity_pull") {
        names(fault, &world.run().unwrap_err(), &["not called again", "a panic in"]);
    }
    first
}

fn reward(fault: &str) -> Result<()> {
    let (at, how) = fault.split_once(':').unwrap_or((fault, ""));
    scored(at, how).map(drop)
}

fn episode(fault: &str) -> Result<()> {
    let mut environment = environment(true, fault);
    let mut play = || environment.reset(1).and_then(|_| environment.step("")).map(drop);
    let first = play();
    if fault.ends_with(":panic") {
        names(fault, &play().unwrap_err(), &["not called again", "a panic in"]);
    }
    first
}

/// Component and its methods; after `=` the method that the error names.
const METHODS: [(Run, &str); 7] = [
    (
        world::<1>,
        "encode velocity velocity_pull=pull decode take_gradients_part read_parameters write_parameters export_adapter \
         import_adapter",
    ),
    (world::<2>, "score"),
    (world::<4>, "before_last_pull attach accumulate step state load_state"),
    (
        world::<8>,
        "check algorithm_step=step algorithm_evaluate=evaluate algorithm_load_state=load_state \
         algorithm_tensors=tensors algorithm_load_tensors=load_tensors",
    ),
    // All of the library.
    (world::<15>, "encode velocity decode score before_last_pull accumulate check algorithm_step=step"),
    (reward, "make name=about differentiable=about on_missing=about prepare score pull"),
    (episode, "reset environment_step=step"),
];

#[test]
fn p5_p7_faults_of_every_method_name_plugin_file_and_method() {
    for (run, methods) in METHODS {
        for method in methods.split_whitespace() {
            let (at, call) = method.split_once('=').unwrap_or((method, method));
            let fault = |how: &str| run(&format!("{at}:{how}")).expect_err(&format!("{at}:{how} passes"));
            for how in ["panic", "error"] {
                // A scorer says what it is without a way to fail.
                if how == "error" && call == "about" {
                    continue;
                }
                let error = fault(how);
                let parts = [WHOSE[0], WHOSE[1], &format!("`{call}`"), &format!("{how} in {at}")];
                names(&format!("{at} {how}"), &error, &parts);
                assert_eq!(error.fault(), Fault::Failure, "{at} {how}");
            }
            if call != "about" {
                let user = fault("user_error");
                names(at, &user, &["`reward.how`", WHOSE[1]]);
                assert_eq!(user.fault(), Fault::User, "{at}");
                assert!(matches!(fault("interrupt"), Error::Interrupted), "{at}");
            }
        }
    }
}

/// The answers of a library in C that keeps the contract; a row of a test replaces some.
const GOOD: [(&str, u32, &str); 5] = [
    ("describe", 0, r#"{"name": "answers", "components": [{"kind": "reward", "name": "liar"}]}"#),
    ("make", 0, "0"),
    ("about", 0, r#"{"name": "liar", "differentiable": true}"#),
    ("score", 0, r#"{"result": {"value": 0.5}, "pullback": 0}"#),
    ("pull", 0, "0"),
];

/// Loads the library with these answers and definitions; `None` without a C compiler. A text of `-` has no answer.
fn library(answers: &[(&str, u32, &str)], definitions: &[&str]) -> Option<Result<Plugin>> {
    let dir = tempfile::tempdir().unwrap();
    let good = GOOD.iter().filter(|(method, ..)| !answers.iter().any(|(replaced, ..)| replaced == method));
    let row = |(method, status, text): &(&str, u32, &str)| format!("{{{method:?}, {status}, {text:?}}},");
    let rows: String = answers.iter().filter(|(.., text)| *text != "-").chain(good).map(row).collect();
    let source = format!("#define ANSWERS {rows}\n{}", include_str!("../answers.c"));
    let definitions: Vec<String> = definitions.iter().map(|d| format!("-D{d}")).collect();
    Some(load(compile(&dir, "answers", &source, &definitions)?))
}

/// Loads, makes, prepares, scores and pulls.
fn used(plugin: Result<Plugin>) -> Result<(Score, Vec<f32>)> {
    let mut reward = registry(&plugin?).reward("liar", &Options::new(), &context())?;
    let target = reward.prepare(&video())?;
    let (score, pullback) = reward.score(&video(), "a prompt", &target, Grad::Record)?;
    let pulled = pullback.map(|pullback| pullback.pull(&Tensor::scalar(1.0))).transpose()?;
    Ok((score, pulled.map(|tensor| tensor.to_f32_vec()).unwrap_or_default()))
}

type Row =
    (&'static str, &'static [(&'static str, u32, &'static str)], &'static [&'static str], &'static [&'static str]);

/// Rule, answers that break it, definitions that do, and parts of the error.
const BROKEN: &[Row] = &[
    // Methods that a trait has no default for.
    ("P6", &[("describe", 0, "-")], &[], &["it has no method `describe`"]),
    ("P6", &[("make", 0, "-")], &[], &["it has no method `make`", "`answers`"]),
    ("P6", &[("about", 0, "-")], &[], &["it has no method `about`", "`answers`"]),
    ("P6", &[("score", 0, "-")], &[], &["it has no method `score`", "`answers`"]),
    ("P6", &[("pull", 0, "-")], &[], &["it has no method `pull`", "`answers`"]),
    // Fields without a default.
    ("P6", &[("describe", 0, r#"{"name": "answers"}"#)], &[], &["missing field `components`"]),
    ("P6", &[("about", 0, "{}")], &[], &["missing field `name`", "`about`"]),
    ("P6", &[("score", 0, "{}")], &[], &["missing field `result`", "`score`"]),
    // Errors.
    ("P7", &[("score", 1, r#"{"fault": "user", "messages": ["outer", "inner"]}"#)], &[], &["`score`", "outer: inner"]),
    ("P7", &[("score", 1, "{}")], &[], &["`score`", "it returned no reason"]),
    ("P7", &[("score", 77, r#"{"messages": ["odd"]}"#)], &[], &["`score`", "odd"]),
    ("P7", &[("score", 1, r#"{"fault": "weather", "messages": ["of later"]}"#)], &[], &["`score`", "of later"]),
    ("P7", &[("score", 1, "no memory")], &[], &["`score`", "its error cannot be read", "expected"]),
    ("P7", &[("describe", 1, r#"{"messages": ["not here"]}"#)], &[], &["`describe`", "not here"]),
    // Answers of another kind.
    ("P7", &[("score", 0, "no json")], &[], &["`score`", "not JSON of the expected kind"]),
    ("P7", &[("score", 0, "")], &[], &["`score`", "not JSON of the expected kind"]),
    ("P7", &[("score", 0, "[1]")], &[], &["`score`", "not JSON of the expected kind"]),
    ("P7", &[("score", 0, r#"{"result": {}}"#)], &[], &["`score`", "either a `value`, or in `missing`"]),
    ("P7", &[("score", 0, r#"{"result": {"value": 1, "missing": "x"}}"#)], &[], &["either a `value`"]),
    ("P7", &[("score", 0, r#"{"result": {"value": "much"}}"#)], &[], &["`score`", "`NaN`, `inf`"]),
    ("P7", &[("score", 0, r#"{"result": {"value": 1}}"#)], &[], &["`score`", "returned no pullback"]),
    ("P7", &[("pull", 0, "null")], &[], &["`pull`", "not JSON of the expected kind"]),
    ("P7", &[("pull", 0, "0")], &[], &["`pull`", "[2, 3, 8, 8]", "[2]"]),
    ("P7", &[("about", 0, r#"{"name": "liar", "on_missing": "weep"}"#)], &[], &["`about`", "weep"]),
    // Descriptions.
    ("P8", &[("describe", 0, r#"{"name": "answers", "components": []}"#)], &[], &["offers nothing"]),
    ("P8", &[("describe", 0, r#"{"name": "", "components": [{"kind": "reward", "name": "a"}]}"#)], &[], &["no name"]),
    (
        "P8",
        &[("describe", 0, r#"{"name": "answers", "components": [{"kind": "picture", "name": "a"}]}"#)],
        &[],
        &["unknown variant `picture`"],
    ),
    (
        "P8",
        &[("describe", 0, r#"{"name": "answers", "components": [{"kind": "reward", "name": "a b"}]}"#)],
        &[],
        &["\"a b\" is not a name for a reward"],
    ),
    (
        "P8",
        &[(
            "describe",
            0,
            r#"{"name": "answers", "components": [{"kind": "reward", "name": "a"}, {"kind": "reward", "name": "a"}]}"#,
        )],
        &[],
        &["the reward `a` twice"],
    ),
    (
        "P8",
        &[(
            "describe",
            0,
            r#"{"name":"a","components":[{"kind":"reward","name":"a","options":[{"name":"x","kind":"colour"}]}]}"#,
        )],
        &[],
        &["unknown variant `colour`"],
    ),
    // Objects that are not there, or are not what they should be.
    ("P8", &[("make", 0, "1")], &[], &["`make`", "has no object 1"]),
    ("P8", &[("make", 0, "null")], &[], &["`make`", "not JSON of the expected kind"]),
    ("P8", &[], &["CALL=NULL"], &["an object has no function"]),
    // Values.
    ("P9", &[("pull", 0, "1")], &[], &["`pull`", "has no tensor 1"]),
    ("P9", &[], &["DTYPE=99"], &["`pull`", "dtype is 99"]),
    ("P9", &[], &["RANK=17"], &["`pull`", "17 axes"]),
    ("P9", &[], &["BYTES=12"], &["`pull`", "12 bytes"]),
    ("P9", &[], &["BYTES=(size_t)-1"], &["`pull`", "18446744073709551615 bytes"]),
    ("P9", &[], &["DATA=NULL"], &["`pull`", "no data"]),
    ("P9", &[], &["TENSORS=NULL"], &["`describe`", "a list of 1 values at 0x0"]),
    ("P9", &[], &["TENSORS=(void*)1"], &["`describe`", "a list of 1 values at 0x1"]),
    ("P9", &[], &["TENSOR_COUNT=(size_t)-1"], &["`describe`", "a list of 18446744073709551615 values"]),
    ("P9", &[], &["OBJECT_COUNT=(size_t)1<<60"], &["`describe`", "a list of 1152921504606846976 values"]),
];

#[test]
fn p6_to_p9_broken_answers_are_errors_that_name_the_file() {
    for (rule, answers, definitions, parts) in BROKEN {
        let Some(plugin) = library(answers, definitions) else { return };
        let case = format!("{rule} {answers:?} {definitions:?}");
        let error = used(plugin).map(|found| panic!("{case} passes: {found:?}")).unwrap_err();
        names(&case, &error, &[parts, &["libanswers.so"][..]].concat());
    }
}

#[test]
fn p6_missing_fields_have_defaults_and_unknown_ones_are_passed_over() {
    let plain = ("about", 0, r#"{"name": "liar"}"#);
    let score = |text: &'static str| ("score", 0, text);
    let grown = [
        (
            "describe",
            0,
            r#"{"name": "answers", "new": [], "components": [{"kind": "reward", "name": "liar", "new": {}}]}"#,
        ),
        ("about", 0, r#"{"name": "liar", "new": {"a": 1}}"#),
        score(r#"{"result": {"value": 2, "new": 1}, "new": 0}"#),
        ("prepare", 0, r#"{"tensors": {"level": 0}, "new": 1}"#),
    ];
    let rows: [(&[(&str, u32, &str)], &[&str], Score); 4] = [
        (&grown, &["MINOR=7"], Score::of(2.0)),
        (&[plain, score(r#"{"result": {"value": 0.25}}"#)], &[], Score::of(0.25)),
        (&[plain, score(r#"{"result": {"value": "inf"}}"#)], &[], Score::of(f64::INFINITY)),
        (&[plain, score(r#"{"result": {"missing": "no face"}}"#)], &[], Score::Missing { reason: "no face".into() }),
    ];
    for (answers, definitions, expected) in rows {
        let Some(plugin) = library(answers, definitions) else { return };
        assert_eq!(used(plugin).unwrap(), (expected, vec![]), "{answers:?}");
    }
    let plugin = library(&[plain], &["MINOR=7"]).unwrap().unwrap();
    assert_eq!((plugin.abi, plugin.version.as_str(), plugin.is_layout_checked), ([1, 7], "", false));
    let reward = registry(&plugin).reward("liar", &Options::new(), &context()).unwrap();
    let facts = (reward.measures(), reward.terms(), reward.on_missing(), reward.differentiable());
    assert_eq!(facts, (Default::default(), vec![], Default::default(), false));
    assert!(reward.reads_reference() && !reward.compares() && !reward.is_elsewhere());
    assert_eq!(reward.target_key().unwrap(), None);
}

#[test]
fn p7_faults_in_answers_say_whose_they_are() {
    for (fault, expected) in [("user", Fault::User), ("failure", Fault::Failure), ("interrupt", Fault::Interrupt)] {
        let answer = format!(r#"{{"fault": "{fault}", "messages": ["m"]}}"#);
        let Some(plugin) = library(&[("score", 1, &answer)], &[]) else { return };
        assert_eq!(used(plugin).unwrap_err().fault(), expected, "{fault}");
    }
    let nothing = r#"{"fault": "nothing", "messages": ["no face"]}"#;
    let Some(plugin) = library(&[("prepare", 1, nothing)], &[]) else { return };
    assert_eq!(used(plugin).unwrap_err().missing_reason(), Some("no face"));
}

#[test]
fn p7_plans_are_checked() {
    let describe = r#"{"name": "answers", "components": [{"kind": "algorithm", "name": "liar", "plans": true}]}"#;
    let passes = |plan: &str| {
        let plugin = library(&[("describe", 0, describe), ("plan", 0, plan)], &[])?.unwrap();
        Some(registry(&plugin).passes("liar", &Options::new()))
    };
    for plan in ["no json", "", "[1]", "{}", r#"{"forward": -1, "pulled": 0}"#, "-"] {
        let Some(passes) = passes(plan) else { return };
        names(plan, &passes.unwrap_err(), &["`plan`", "libanswers.so"]);
    }
    let right = passes(r#"{"forward": 4, "pulled": 2}"#).unwrap().unwrap();
    assert_eq!((right.forward, right.pulled), (4, 2));
}

#[test]
fn p8_an_object_of_another_kind_is_an_error() {
    for kind in [Kind::Model, Kind::Strategy, Kind::Algorithm, Kind::Environment] {
        let describe = format!(r#"{{"name": "answers", "components": [{{"kind": "{kind}", "name": "liar"}}]}}"#);
        let Some(plugin) = library(&[("describe", 0, &describe)], &[]) else { return };
        let (registry, options) = (registry(&plugin.unwrap()), Options::new());
        let error = match kind {
            Kind::Model => registry.model("liar", &options, &context()).map(drop),
            Kind::Strategy => registry.strategy("liar", &options, &context()).map(drop),
            Kind::Algorithm => registry
                .algorithm("liar", &options, &context())
                .and_then(|mut algorithm| algorithm.check(&mut roll_testing::MockDiffusion::new(), None)),
            _ => registry.environment("liar", &options, &context()).and_then(|mut e| e.reset(0)).map(drop),
        };
        names(&kind.to_string(), &error.unwrap_err(), &["libanswers.so"]);
    }
}
