//! `data.cache_dir`: later runs read the encodings of earlier ones, and this changes nothing.

use std::path::{Path, PathBuf};

use crate::world::{SHORT, World, checkpoint_file, stderr_text};

const REWARD_FL: [&str; 5] = ["reward.name=brightness", SHORT[0], SHORT[1], SHORT[2], SHORT[3]];
const FLOW_MATCHING: [&str; 2] = ["algo.name=flow_matching", "sample_steps=0"];

fn files(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten().map(|e| e.path());
    entries.flat_map(|p| if p.is_dir() { files(&p) } else { vec![p] }).collect()
}

/// Trains with the cache; returns how many encodings were found and computed.
fn train(world: &World, out: &str, settings: &[&str]) -> [u64; 2] {
    world.train(out, 3, &[settings, &["data.cache_dir=cache"]].concat()).encodings.unwrap()
}

fn assert_alike(world: &World, run: &str, other: &str) {
    assert_eq!(world.metrics(run), world.metrics(other));
    let adapter = |run: &str| checkpoint_file(&world.path(run), 3, "adapter.safetensors");
    assert!(adapter(run) == adapter(other), "{run}");
}

#[test]
fn a_later_run_reuses_encodings_bit_for_bit() {
    let world = World::new(3);
    for (name, settings) in [("reward_fl", &REWARD_FL[..]), ("flow_matching", &FLOW_MATCHING)] {
        let [without, first, second, third] = ["without", "first", "second", "third"].map(|n| format!("{name}-{n}"));
        world.train(&without, 3, settings);
        let [found, computed] = train(&world, &first, settings);
        assert!(found == 0 && computed >= 3, "{name}: {found} found, {computed} computed");
        let [found, computed_again] = train(&world, &second, settings);
        assert_eq!((found, computed_again), (computed, 0), "{name}");
        // Half a file, as a full disk would leave it if it were not written aside.
        let kept = files(&world.path("cache"));
        let bytes = std::fs::read(&kept[0]).unwrap();
        std::fs::write(&kept[0], &bytes[..bytes.len() / 2]).unwrap();
        assert_eq!(train(&world, &third, settings)[1], 1, "{name}");
        for run in [&first, &second, &third] {
            assert_alike(&world, run, &without);
        }
        std::fs::remove_dir_all(world.path("cache")).unwrap();
    }
}

#[test]
fn encodings_depend_on_prompts_clips_and_settings() {
    let world = World::new(3);
    let settings = ["algo.name=flow_matching", "sample_steps=0", "data.shuffle=false"];
    let [_, all] = train(&world, "first", &settings);
    assert_eq!(all, 6, "conditioning and latents of three clips");
    assert_eq!(train(&world, "again", &settings), [6, 0]);
    let text = std::fs::read_to_string(world.path("metadata.csv")).unwrap();
    std::fs::write(world.path("metadata.csv"), text.replace("square 1", "circle 1")).unwrap();
    assert_eq!(train(&world, "prompt", &settings), [5, 1]);
    std::fs::copy(world.path("0.mp4"), world.path("2.mp4")).unwrap();
    // Its latents are those of clip 0; its prompt is not.
    assert_eq!(train(&world, "clip", &settings), [5, 1]);
    // All are new but those latents, which clip 2 finds where clip 0 just put them.
    assert_eq!(train(&world, "size", &[&settings[..], &["data.num_frames=9"]].concat())[0], 1);
    let tokenizer = world.path("tiny/google/umt5-xxl/tokenizer.json");
    let text = std::fs::read_to_string(&tokenizer).unwrap();
    std::fs::write(&tokenizer, text + "\n").unwrap();
    assert_eq!(train(&world, "tokenizer", &settings)[0], 1);
}

#[test]
fn concurrent_runs_share_the_cache() {
    let world = World::new(3);
    let settings = [&FLOW_MATCHING[..], &["data.cache_dir=cache"]].concat();
    world.train("without", 3, &FLOW_MATCHING);
    let start = |out: &str| {
        let mut command = world.training(out, 3, &settings);
        command.stderr(std::process::Stdio::piped()).stdout(std::process::Stdio::null()).spawn().unwrap()
    };
    let children = ["a", "b"].map(|out| (out, start(out)));
    for (out, child) in children {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", stderr_text(&output));
        assert_alike(&world, out, "without");
    }
    assert!(files(&world.path("cache")).iter().all(|f| f.extension().is_some_and(|e| e == "safetensors")));
}
