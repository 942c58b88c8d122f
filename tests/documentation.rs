//! The documentation tells the truth: its commands run, its configurations load, its links lead somewhere, its list of
//! metrics is complete.
//!
//! Fenced blocks that begin with `sh run` are run, those of a page in their order and in one directory, which has links
//! to the folders of the repository that they use. Other `sh` blocks need a network, published models or minutes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use roll_core::Registry;
use roll_train::config::ConfigLayers;

use crate::program::{self, root};

/// Maximum number of lines of README.md.
const MAX_README_LINES: usize = 150;

/// The files under `directory` that end with `.md`.
fn pages_under(directory: &Path) -> Vec<PathBuf> {
    let mut pages = Vec::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => pages.extend(pages_under(&path)),
            false if path.extension().is_some_and(|extension| extension == "md") => pages.push(path),
            false => {}
        }
    }
    pages.sort();
    pages
}

/// The book, and the pages next to the code.
fn pages() -> Vec<PathBuf> {
    let root = root();
    let single = [
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "SECURITY.md",
        "demo/README.md",
        "examples/README.md",
        "plugins/README.md",
    ];
    pages_under(&root.join("docs/src")).into_iter().chain(single.map(|page| root.join(page))).collect()
}

/// A fenced block.
struct Block {
    /// The words after the fence.
    info: String,
    line: usize,
    text: String,
}

fn blocks(page: &str) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    let mut open = false;
    for (i, line) in page.lines().enumerate() {
        match (line.strip_prefix("```"), open) {
            (Some(info), false) => {
                blocks.push(Block { info: info.trim().into(), line: i + 1, text: String::new() });
                open = true;
            }
            (Some(_), true) => open = false,
            (None, true) => {
                let text = &mut blocks.last_mut().unwrap().text;
                text.push_str(line);
                text.push('\n');
            }
            (None, false) => {}
        }
    }
    assert!(!open, "a block has no end");
    blocks
}

/// Results of the commands of a page.
#[derive(Default)]
struct PageResults {
    /// Number of blocks to run, also if a missing program prevents it.
    blocks: usize,
    /// Names of the metrics that its runs wrote.
    metrics: BTreeSet<String>,
}

/// Runs the blocks of `page`.
fn run(page: &Path) -> PageResults {
    let text = std::fs::read_to_string(page).unwrap();
    let runnable: Vec<Block> = blocks(&text).into_iter().filter(|block| block.info == "sh run").collect();
    if runnable.is_empty() {
        return PageResults::default();
    }
    let skipped = PageResults { blocks: runnable.len(), ..PageResults::default() };
    if text.contains("cc -O2") && Command::new("cc").arg("--version").output().is_err() {
        roll_testing::skipped(&"there is no C compiler", Some("cc"));
        return skipped;
    }
    if text.contains("python3") && Command::new("python3").arg("--version").output().is_err() {
        roll_testing::skipped(&"there is no Python", Some("python"));
        return skipped;
    }
    let directory = tempfile::tempdir().unwrap();
    for folder in ["demo", "examples", "plugins", "roll-core", "roll-plugin", "roll-rewards"] {
        std::os::unix::fs::symlink(root().join(folder), directory.path().join(folder)).unwrap();
    }
    let bin = Path::new(program::PATH).parent().unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default());
    let program = program::command(directory.path(), &[]);
    for block in &runnable {
        let mut shell = Command::new("sh");
        for (name, value) in program.get_envs() {
            match value {
                Some(value) => shell.env(name, value),
                None => shell.env_remove(name),
            };
        }
        let shell = shell.env("PATH", &path).current_dir(directory.path()).args(["-eu", "-c", &block.text]);
        let output = shell.output().unwrap();
        assert!(
            output.status.success(),
            "{}:{}: {}\n{}\n{}",
            page.display(),
            block.line,
            output.status,
            program::printed(&output),
            program::stderr_text(&output)
        );
    }
    PageResults { blocks: runnable.len(), metrics: metrics_under(&directory.path().join("runs")) }
}

/// Names of the metrics of all runs in `runs`.
fn metrics_under(runs: &Path) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for run in std::fs::read_dir(runs).into_iter().flatten() {
        let Ok(text) = std::fs::read_to_string(run.unwrap().path().join("metrics.jsonl")) else { continue };
        for line in text.lines() {
            let row: serde_json::Map<String, serde_json::Value> = serde_json::from_str(line).unwrap();
            names.extend(row.into_iter().map(|(name, _)| name));
        }
    }
    names
}

/// The metrics that the page lists, as patterns. The page writes variable parts in capitals or as an example
/// (`loss/0.450-0.675`): each capital letter, digit, `.` and `-` becomes `*`, which matches anything. A name without a
/// group (`group/`) is in the group of the name before it.
fn documented_metrics() -> Vec<String> {
    let page = std::fs::read_to_string(root().join("docs/src/metrics.md")).unwrap();
    let mut patterns = Vec::new();
    for row in page.lines().filter(|line| line.starts_with("| `")) {
        let cell = row.trim_start_matches("| ").split(" | ").next().unwrap();
        let mut group = String::new();
        for name in cell.split('`').skip(1).step_by(2) {
            let name = match name.rfind('/') {
                Some(end) => {
                    group = name[..=end].into();
                    name.to_string()
                }
                None => format!("{group}{name}"),
            };
            let anything = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || matches!(c, '.' | '-');
            patterns.push(name.replace(anything, "*"));
        }
    }
    patterns
}

/// Whether `name` matches `pattern`, in which `*` matches any text.
fn matches_pattern(name: &str, pattern: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = name.strip_prefix(parts.next().unwrap_or_default()) else { return false };
    let parts: Vec<&str> = parts.collect();
    let Some((last, middle)) = parts.split_last() else { return rest.is_empty() };
    for part in middle {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

#[test]
fn commands_of_the_book_run_and_metrics_are_documented() {
    let pages = pages_under(&root().join("docs/src"));
    let results: Vec<PageResults> = pages.iter().map(|page| run(page)).collect();
    let blocks: usize = results.iter().map(|page| page.blocks).sum();
    assert!(blocks >= 15, "only {blocks} blocks are marked `sh run`");

    let listed = documented_metrics();
    let metrics: BTreeSet<&String> = results.iter().flat_map(|page| &page.metrics).collect();
    assert!(metrics.len() > 60, "{metrics:?}");
    for metric in metrics {
        // Metrics of a validation have the names of training after `val/`.
        let plain = metric.strip_prefix("val/").unwrap_or(metric);
        let known = listed.iter().any(|pattern| matches_pattern(metric, pattern) || matches_pattern(plain, pattern));
        assert!(known, "docs/src/metrics.md has no `{metric}`");
    }
}

#[test]
fn metric_patterns_match_whole_names() {
    for (name, pattern) in
        [("a/b", "a/b"), ("a/b_c", "a/*"), ("a/tis_x", "a/*_x"), ("loss/0.4-0.5", "loss/***"), ("a/x_b_y", "a/*_b_*")]
    {
        assert!(matches_pattern(name, pattern), "{name} {pattern}");
    }
    for (name, pattern) in [("a/b", "a/c"), ("a/bc", "a/b"), ("b/a/b", "a/*"), ("a/x_c_y", "a/*_b_*")] {
        assert!(!matches_pattern(name, pattern), "{name} {pattern}");
    }
}

#[test]
fn commands_of_the_readme_run() {
    let page = root().join("README.md");
    assert!(run(&page).blocks > 0);
    let lines = std::fs::read_to_string(&page).unwrap().lines().count();
    assert!(lines <= MAX_README_LINES, "{lines} lines, more than {MAX_README_LINES}: move some to docs/");
}

#[test]
fn every_configuration_of_a_page_loads() {
    let registry = Registry::linked().unwrap();
    for page in pages() {
        let text = std::fs::read_to_string(&page).unwrap();
        for block in blocks(&text).into_iter().filter(|block| block.info == "yaml") {
            let name = format!("{}:{}", page.display(), block.line);
            let loaded = ConfigLayers::new().text(&name, &block.text).and_then(|layers| layers.load(Some(&registry)));
            loaded.unwrap_or_else(|e| panic!("{name}: {}", e.chain()));
        }
    }
}

/// A module of Python that writes the calls of a tracker, as lines of JSON, to the file that `CALLS` names.
const TRACKER: &str = r#"
import json, os, sys
def write(call):
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps(call) + "\n")
def init(project, name):
    write({"run": name})
    return sys.modules[__name__]
def start_run(run_name):
    write({"run": run_name})
def log(metrics, step):
    write({"step": step, "metrics": metrics})
log_metrics = log
"#;

/// The programs of docs/src/metrics.md, with stand-ins for the modules that they import.
#[test]
fn programs_for_other_trackers_log_every_step() {
    if Command::new("python3").arg("--version").output().is_err() {
        roll_testing::skip!("there is no Python", needs = "python");
    }
    let page = std::fs::read_to_string(root().join("docs/src/metrics.md")).unwrap();
    let python: Vec<Block> = blocks(&page).into_iter().filter(|block| block.info == "python").collect();
    let [whole, changes @ ..] = &python[..] else { panic!("no program for a tracker") };
    let lines: Vec<&str> = whole.text.lines().collect();
    assert_eq!(lines.len(), 5, "the README promises five lines");
    let mut programs = vec![("wandb", whole.text.clone())];
    for (tracker, change) in ["trackio", "mlflow"].into_iter().zip(changes) {
        let [second, last] = change.text.lines().collect::<Vec<_>>()[..] else { panic!("{tracker}: two lines") };
        assert!(second.starts_with(tracker) && last.trim().starts_with(tracker), "{second} {last}");
        let first = lines[0].replace("wandb", tracker);
        programs.push((tracker, [&first, second, lines[2], lines[3], last].join("\n")));
    }
    assert_eq!(programs.len(), 3);
    for (tracker, text) in programs {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join(format!("{tracker}.py")), TRACKER).unwrap();
        std::fs::write(directory.path().join("track.py"), text).unwrap();
        let hook = "on_metrics=[python3, track.py]";
        let arguments = ["run", "--algo", "sft", "--model", "causal_lm", "--steps", "2", "--out", "run", "--set", hook];
        let calls = directory.path().join("calls");
        let mut command = program::command(directory.path(), &arguments);
        let output = command.env("CALLS", &calls).env("PYTHONPATH", directory.path()).output().unwrap();
        assert!(output.status.success(), "{tracker}: {}", program::stderr_text(&output));
        let calls = std::fs::read_to_string(calls).unwrap_or_default();
        let calls: Vec<serde_json::Value> = calls.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(calls[0]["run"], "run", "{tracker}: {calls:?}");
        let steps: Vec<_> = calls[1..].iter().filter_map(|call| call["step"].as_u64()).collect();
        assert!(steps.ends_with(&[1, 2]), "{tracker}: {steps:?}");
        assert!(calls.last().unwrap()["metrics"]["actor/loss"].is_number(), "{tracker}: {calls:?}");
    }
}

/// GB of a device, GB of host memory and seconds of a step, by `roll plan`, as pages write them.
fn planned(directory: &Path, args: &[&str]) -> [f64; 3] {
    let printed = program::done(directory, &[&["plan", "--json"], args].concat());
    let plan: serde_json::Value = serde_json::from_str(&printed).unwrap();
    let sum =
        |list: &str, key: &str| plan[list].as_array().unwrap().iter().map(|x| x[key].as_f64().unwrap()).sum::<f64>();
    [sum("memory", "device") / 1e9, sum("memory", "host") / 1e9, sum("time", "seconds")]
}

#[test]
fn numbers_of_the_pages_are_those_of_roll_plan() {
    let page = |name: &str| std::fs::read_to_string(root().join("docs/src").join(name)).unwrap();
    let recipes = page("recipes.md");
    for (file, network, devices, steps) in [
        ("identity-i2v.yaml", "wan2_2-i2v-a14b", "1x80", 200.0),
        ("judge-t2v.yaml", "wan2_2-t2v-a14b", "8x80", 300.0),
        ("clips-i2v.yaml", "wan2_2-i2v-a14b", "1x24", 1000.0),
    ] {
        let file = format!("examples/recipes/{file}");
        let [device, host, seconds] = planned(&root(), &["--config", &file, "--network", network, "--on", devices]);
        let hours = steps * seconds / 3600.0;
        for row in
            [format!("| {device:.0} GB, {host:.0} GB |"), format!("| {seconds:.0} s |"), format!("| {hours:.0} h |")]
        {
            assert!(recipes.contains(&row), "recipes.md, {file}: no cell `{row}`");
        }
    }
    let pictures = page("pictures.md");
    let of_pictures = ["--network", "z-image", "--set", "reward.name=brightness"];
    for (machine, side, setting) in [
        ("1x24", 512, "weights_dtype=auto"),
        ("1x24", 512, "weights_dtype=int8"),
        ("1x24", 512, "weight_store=host"),
        ("1x80", 1024, "weights_dtype=auto"),
    ] {
        let setting = format!("model.{setting}");
        let sides = ["height", "width"].map(|key| format!("data.{key}={side}"));
        let own = ["--on", machine, "--set", &setting, "--set", &sides[0], "--set", &sides[1]];
        let [device, host, seconds] = planned(&root(), &[&of_pictures[..], &own].concat());
        let row = format!("| {device:.0} GB | {host:.0} GB | {seconds:.1} s |");
        assert!(pictures.contains(&row), "pictures.md, {own:?}: no cells `{row}`");
    }
    let real = page("real-model.md");
    let directory = tempfile::tempdir().unwrap();
    let mut files = BTreeMap::new();
    for (name, mark) in [("real.yaml", "exp_name: identity"), ("small.yaml", "weight_store: host")] {
        let block = blocks(&real).into_iter().find(|block| block.info == "yaml" && block.text.contains(mark)).unwrap();
        let path = directory.path().join(name);
        std::fs::write(&path, block.text).unwrap();
        files.insert(name, path.to_str().unwrap().to_string());
    }
    let text = real.split_whitespace().collect::<Vec<_>>().join(" ");
    let offload = "model.use_gradient_checkpointing_offload=true";
    for (file, devices, more, [before, between, after]) in [
        ("real.yaml", "1x80", &[][..], ["the run above takes ", " of 80 GB on one GPU and ", " GB of host memory"]),
        (
            "real.yaml",
            "1x80",
            &["--set", offload][..],
            ["kept on the device as well: ", " GB, and ", " GB of host memory"],
        ),
        ("small.yaml", "1x24", &[][..], ["By the plan it takes ", " GB of the card and ", " GB of host memory"]),
    ] {
        let args = ["--config", &files[file], "--network", "wan2_2-i2v-a14b", "--on", devices];
        let [device, host, _] = planned(directory.path(), &[&args, more].concat());
        let expected = format!("{before}{device:.0}{between}{host:.0}{after}");
        assert!(text.contains(&expected), "real-model.md, {file} {more:?}: expected `{expected}`");
    }
}

/// The anchors of a page, as mdBook and GitHub make them of headings.
fn anchors(page: &str) -> BTreeSet<String> {
    let headings = page.lines().filter(|line| line.starts_with('#'));
    headings
        .map(|line| {
            let title = line.trim_start_matches('#').trim().to_lowercase().replace(' ', "-");
            title.chars().filter(|c| c.is_alphanumeric() || matches!(c, '-' | '_')).collect()
        })
        .collect()
}

/// Targets of the links and pictures of a page, blocks left out.
fn links(page: &str) -> Vec<String> {
    let mut inside = false;
    let mut links = Vec::new();
    for line in page.lines() {
        if line.starts_with("```") {
            inside = !inside;
        }
        if inside {
            continue;
        }
        for rest in line.split("](").skip(1) {
            links.push(rest.split(')').next().unwrap_or_default().to_string());
        }
    }
    links
}

#[test]
fn every_link_has_a_target() {
    for page in pages() {
        let text = std::fs::read_to_string(&page).unwrap();
        for link in links(&text).into_iter().filter(|link| !link.contains("://") && !link.starts_with("mailto:")) {
            let (file, anchor) =
                link.split_once('#').map_or((link.as_str(), None), |(file, anchor)| (file, Some(anchor)));
            let target = match file {
                "" => page.clone(),
                file => page.parent().unwrap().join(file),
            };
            assert!(target.exists(), "{}: no file for {link}", page.display());
            if let Some(anchor) = anchor {
                let target = std::fs::read_to_string(&target).unwrap();
                assert!(anchors(&target).contains(anchor), "{}: no heading for {link}", page.display());
            }
        }
    }
}

#[test]
fn the_summary_lists_every_page_of_the_book() {
    let book = root().join("docs/src");
    let summary = std::fs::read_to_string(book.join("SUMMARY.md")).unwrap();
    let listed: BTreeSet<PathBuf> = links(&summary).into_iter().map(|link| book.join(link)).collect();
    let pages: BTreeSet<PathBuf> = pages_under(&book).into_iter().filter(|p| !p.ends_with("SUMMARY.md")).collect();
    assert_eq!(listed, pages);
}

#[test]
fn every_command_is_documented() {
    let page = std::fs::read_to_string(root().join("docs/src/commands.md")).unwrap();
    let help = program::done(&root(), &["--help"]);
    let commands = help.split("Commands:").nth(1).unwrap().split("Options:").next().unwrap();
    for command in commands.lines().filter_map(|line| line.strip_prefix("  ")?.split(' ').next()) {
        if !command.is_empty() && command != "help" {
            assert!(page.contains(&format!("roll {command}")), "no `roll {command}`");
        }
    }
}

/// What cargo prints.
fn cargo(arguments: &[&str]) -> String {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    let output = cargo.args(arguments).arg("--offline").current_dir(root()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The crates of the workspace that each crate depends on, by cargo.
fn dependencies() -> BTreeMap<String, BTreeSet<String>> {
    let metadata: serde_json::Value =
        serde_json::from_str(&cargo(&["metadata", "--no-deps", "--format-version", "1"])).unwrap();
    let package = |package: &serde_json::Value| {
        let all = package["dependencies"].as_array().unwrap().iter();
        let own = all.filter(|d| d["kind"].is_null() && d["path"].is_string());
        let names = own.map(|d| d["name"].as_str().unwrap().to_string());
        (package["name"].as_str().unwrap().to_string(), names.collect())
    };
    metadata["packages"].as_array().unwrap().iter().map(package).collect()
}

/// How many packages, ours included, `cargo build` of a fresh checkout compiles at most.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
const MOST_PACKAGES: usize = 302;

#[test]
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
fn the_default_build_has_few_packages() {
    let tree = ["tree", "-p", "roll-cli", "-e", "normal,build", "--prefix", "none", "--no-dedupe"];
    let packages: BTreeSet<String> = cargo(&tree)
        .lines()
        .filter_map(|line| line.split_once(" v").map(|(name, rest)| (name, rest.split(' ').next().unwrap_or(rest))))
        .map(|(name, version)| format!("{name} {version}"))
        .collect();
    assert!(packages.contains("roll-core 0.1.0"), "{packages:?}");
    assert!(
        packages.len() <= MOST_PACKAGES,
        "{} packages, at most {MOST_PACKAGES}: let a dependency that is new replace another, leave its features out, or \
         make it optional; `cargo {}` lists them",
        packages.len(),
        tree.join(" ")
    );
}

/// A circle in a small crate, through a name that the root exports again, and the files that a folder shares.
#[test]
fn files_that_need_each_other_are_found() {
    if Command::new("python3").arg("--version").output().is_err() {
        roll_testing::skip!("there is no Python", needs = "python");
    }
    let script = "scripts/check-circles";
    let check = |directory: &Path| Command::new("python3").arg(directory.join(script)).output().unwrap();
    let output = check(&root());
    assert!(output.status.success(), "{}{}", program::printed(&output), program::stderr_text(&output));

    let directory = tempfile::tempdir().unwrap();
    let write = |file: &str, text: &str| {
        let path = directory.path().join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    write(script, &std::fs::read_to_string(root().join(script)).unwrap());
    write("roll-x/src/lib.rs", "mod a;\nmod b;\nmod c;\npub use a::One;\n");
    write("roll-x/src/a.rs", "use crate::b::two;\npub struct One;\npub fn one() { two(); }\n");
    // A comment, a text and a test do not need what they name; a folder and its files may need each other.
    let b = "// crate::a::One\npub fn two() { print(\"crate::a::One\"); }\n";
    let tests = "#[cfg(test)]\nmod tests { use crate::a::one; }\n";
    write("roll-x/src/b.rs", &[b, tests].concat());
    write("roll-x/src/c/mod.rs", "mod d;\npub struct Shared;\npub fn all() { d::part(); }\n");
    write("roll-x/src/c/d.rs", "use super::Shared;\npub fn part() -> Shared { Shared }\n");
    let output = check(directory.path());
    assert_eq!(program::printed(&output), "0 circles in 5 files\n", "{}", program::stderr_text(&output));
    assert!(output.status.success());

    write("roll-x/src/b.rs", "use crate::One;\npub fn two() -> One { One }\n");
    let output = check(directory.path());
    let expected = [
        "a circle of 2 files:",
        "    roll-x/src/a.rs needs roll-x/src/b.rs: crate::b::two",
        "    roll-x/src/b.rs needs roll-x/src/a.rs: crate::One",
        "1 circles in 5 files",
    ];
    assert_eq!(program::printed(&output).lines().collect::<Vec<_>>(), expected);
    assert!(!output.status.success());
}

#[test]
fn source_files_that_pages_name_exist() {
    let mut found = 0;
    for page in pages() {
        let text = std::fs::read_to_string(&page).unwrap();
        for name in
            text.split('`').filter(|text| text.starts_with("roll-") && text.ends_with(".rs") && !text.contains("NAME"))
        {
            assert!(root().join(name).is_file(), "{}: there is no file {name}", page.display());
            found += 1;
        }
    }
    assert!(found > 30, "the walks of design.md alone name 28 files: found {found}");
}

#[test]
fn the_table_of_crates_matches_cargo_metadata() {
    let page = std::fs::read_to_string(root().join("docs/src/design.md")).unwrap();
    let table = page.lines().skip_while(|line| !line.starts_with("| crate |")).skip(2);
    let found = dependencies();
    let mut named = BTreeSet::new();
    for row in table.take_while(|line| line.starts_with('|')) {
        let [name, _, uses] = row.trim_matches('|').split('|').map(str::trim).collect::<Vec<_>>()[..] else {
            panic!("{row}")
        };
        let name = name.trim_matches('`');
        named.insert(name.to_string());
        let uses: BTreeSet<String> = match uses {
            "all" => continue,
            "nothing" => BTreeSet::new(),
            uses => uses.split(", ").map(|short| format!("roll-{short}")).collect(),
        };
        assert_eq!(found[name], uses, "{name}");
    }
    let crates: BTreeSet<String> = found.into_keys().filter(|name| name.starts_with("roll-")).collect();
    assert_eq!(named, crates);
}
