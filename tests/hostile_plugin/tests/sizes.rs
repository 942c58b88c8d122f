//! Sizes (P6 of the contract): of an older version, of a newer one, and those that no version has.

#![allow(clippy::unwrap_used)]

mod common;

use common::compile;
use roll_core::{
    BuildContext, Grad, Measure, Options, Registry, Replaces, RewardScorer, Score, Tensor, Video, one_line,
};
use roll_plugin::{ABI_VERSION, Plugin, load};

fn context() -> BuildContext {
    BuildContext { backend: "flex".into(), seed: 0, base_dir: ".".into(), placement: None }
}

fn registry(plugin: &Plugin) -> Registry {
    Registry::linked().unwrap().with_components(&plugin.registrations(), Replaces::Nothing).unwrap()
}

fn video() -> Video {
    Video::new(Tensor::full([2, 3, 2, 2], 0.5), 8.0).unwrap()
}

/// `sizes.c` with these definitions; `None` without a C compiler.
fn sizes(definitions: &[&str]) -> Option<roll_core::Result<Plugin>> {
    let dir = tempfile::tempdir().unwrap();
    let arguments: Vec<String> = definitions.iter().map(|d| format!("-D{d}")).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    Some(load(compile(&dir, "sizes", include_str!("sizes.c"), &arguments)?))
}

fn reward(plugin: &Plugin) -> roll_core::Result<Box<dyn RewardScorer>> {
    registry(plugin).reward("sizes", &Options::new(), &context())
}

fn score(reward: &mut dyn RewardScorer) -> roll_core::Result<Score> {
    Ok(reward.score(&video(), "", &Default::default(), Grad::Skip)?.0)
}

#[test]
fn a_table_of_a_newer_minor_version_may_be_longer_than_ours() {
    let newer =
        ["MINOR=7", "TABLE_SIZE=sizeof(longer)", "COMPONENT_SIZE=sizeof(component)", "PLUGIN_SIZE=sizeof(plugin)"];
    let Some(newer) = sizes(&newer) else { return };
    let newer = newer.unwrap();
    assert_eq!(newer.abi, [ABI_VERSION[0], 7]);
    let mut newer = reward(&newer).unwrap();
    assert_eq!((score(newer.as_mut()).unwrap(), newer.measures()), (Score::of(8.0), Measure::new("size")));
}

#[test]
fn sizes_that_no_version_has_are_errors_that_name_the_file() {
    let cases = [
        ("0", "at least"),
        ("8", "at least"),
        ("(size_t)-8", "more than"),
        ("(size_t)1<<40", "more than"),
        ("sizeof(roll_reward_table)-4", "in the middle of a member"),
        ("sizeof(roll_reward_table)+1", "in the middle of a member"),
        ("offsetof(roll_reward_table,measures)-8", "at least"),
    ];
    for (size, part) in cases {
        let Some(plugin) = sizes(&[&format!("TABLE_SIZE={size}")]) else { return };
        let told = one_line(&reward(&plugin.unwrap()).map(drop).unwrap_err());
        for part in [part, "`RollRewardTable`", "libsizes.so", "`make`", "rebuild it"] {
            assert!(told.contains(part), "{size}: no {part} in: {told}");
        }
    }
    for (name, what) in [("COMPONENT_SIZE", "`RollComponent`"), ("PLUGIN_SIZE", "`RollPlugin`")] {
        for (size, part) in [("0", "at least"), ("(size_t)-8", "more than"), ("8", "at least"), ("77777", "more than")]
        {
            let told = one_line(&sizes(&[&format!("{name}={size}")]).unwrap().unwrap_err());
            for part in [part, what, "libsizes.so"] {
                assert!(told.contains(part), "{name}={size}: no {part} in: {told}");
            }
        }
    }
}

#[test]
fn lists_and_kinds_that_cannot_be_are_errors_that_name_the_file() {
    for (definition, part) in [
        ("COMPONENTS=0", "offers nothing"),
        ("COMPONENTS=100000", "100000 components"),
        // The second entry is null.
        ("COMPONENTS=2", "`RollComponent` is at 0x0"),
        ("KIND=99", "kind 99"),
        ("KIND=0x100000001", "kind 4294967297"),
    ] {
        let Some(plugin) = sizes(&[definition]) else { return };
        let told = one_line(&plugin.unwrap_err());
        assert!(told.contains(part) && told.contains("libsizes.so"), "{definition}: no {part} in: {told}");
    }
}

#[test]
fn a_function_that_is_not_there_is_an_error_that_names_it() {
    let Some(plugin) = sizes(&["SCORE=NULL"]) else { return };
    let told = one_line(&score(reward(&plugin.unwrap()).unwrap().as_mut()).unwrap_err());
    assert!(told.contains("it has no function `score`") && told.contains("libsizes.so"), "{told}");
}

#[test]
fn a_plan_that_is_no_json_or_another_one_is_an_error_that_names_the_plugin() {
    for plan in ["\"no json\"", "\"\"", "\"[1]\"", "\"{}\"", "\"{\\\"forward\\\": -1, \\\"pulled\\\": 0}\""] {
        let Some(plugin) = sizes(&[&format!("PLAN={plan}"), "KIND=4"]) else { return };
        let plugin = plugin.unwrap();
        let told = one_line(&registry(&plugin).passes("sizes", &Options::new()).unwrap_err());
        for part in ["the plan is not JSON of the expected kind", "`plan`", "libsizes.so"] {
            assert!(told.contains(part), "{plan}: no {part} in: {told}");
        }
    }
    let right = sizes(&["PLAN=\"{\\\"forward\\\": 4, \\\"pulled\\\": 2}\"", "KIND=4"]).unwrap().unwrap();
    let passes = registry(&right).passes("sizes", &Options::new()).unwrap();
    assert_eq!((passes.forward, passes.pulled), (4, 2));
}
