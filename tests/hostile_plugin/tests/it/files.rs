//! Files that are no plugins, plugins of another roll, and plugins of one name: each an error that names the file.

use std::path::Path;

use roll_core::{
    Finding, Grad, Options, Pullback, Replaces, Result, RewardScorer, Score, Target, Tensor, Verdict, Video,
    check_reward, one_line,
};
use roll_plugin::{ABI_VERSION, discover, load};

use super::{compile, context, library, names, plugin, registry};

/// The message of loading `bytes` as a file called `name`.
fn refused(name: &str, bytes: &[u8]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    let message = one_line(&load(&path).unwrap_err());
    assert!(message.contains(name), "the message does not name the file: {message}");
    message
}

/// The bytes of a good plugin with its version changed.
fn with_version(major: u32, minor: u32) -> Vec<u8> {
    let mut bytes = std::fs::read(library("sharpness_reward")).unwrap();
    let mut current = b"ROLLPLUG".to_vec();
    current.extend(ABI_VERSION.iter().flat_map(|v| v.to_le_bytes()));
    let found: Vec<usize> = (0..bytes.len() - 16).filter(|&i| bytes[i..i + 16] == current).collect();
    assert!(!found.is_empty());
    for at in found {
        bytes[at + 8..at + 12].copy_from_slice(&major.to_le_bytes());
        bytes[at + 12..at + 16].copy_from_slice(&minor.to_le_bytes());
    }
    bytes
}

#[test]
fn rejects_other_major_versions() {
    let [major, minor] = ABI_VERSION;
    for found in [major + 1, 0] {
        let message = refused("libother.so", &with_version(found, minor));
        assert!(
            message.contains(&format!("built for plugin ABI {found}.{minor}")) && message.contains("rebuild"),
            "{message}"
        );
    }
}

#[test]
fn accepts_other_minor_versions_with_the_same_types() {
    let [major, minor] = ABI_VERSION;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("libother.so");
    std::fs::write(&path, with_version(major, minor + 1)).unwrap();
    let plugin = load(&path).unwrap();
    assert!(plugin.abi == [major, minor + 1] && plugin.is_layout_checked);
}

#[test]
fn rejects_other_types_with_a_short_message() {
    let [major, minor] = ABI_VERSION;
    for (from, to, parts) in [
        // A member of a structure.
        (
            "object_count",
            "object_coumt",
            ["`RollMessage`", "expected `object_count: usize`, found `object_coumt: usize`"],
        ),
        // A function of one.
        ("retain", "retaim", ["`RollTensor`", "expected `retain`, found `retaim`"]),
        // A structure itself.
        ("RollMessage", "RollMessagx", ["it does not know `RollMessage`", "rebuild it"]),
    ] {
        for minor in [minor, minor + 1] {
            let mut bytes = with_version(major, minor);
            let found = (0..bytes.len() - from.len()).filter(|&i| bytes[i..].starts_with(from.as_bytes()));
            let found: Vec<usize> = found.collect();
            for at in found {
                bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
            }
            let message = refused("libother.so", &bytes);
            assert!(message.contains("other types at the boundary") && message.contains("rebuild it"), "{message}");
            assert!(parts.iter().all(|part| message.contains(part)), "{message}");
            assert!(message.lines().count() <= 10 && message.len() < 1000, "{} characters: {message}", message.len());
        }
    }
}

#[test]
fn rejects_truncated_plugins() {
    let whole = std::fs::read(library("sharpness_reward")).unwrap();
    for length in [0, 3, 16, 63, 64, 500, 4096, whole.len() / 2, whole.len() - 1] {
        let message = refused("libcut.so", &whole[..length]);
        assert!(message.contains("cut off") || message.contains("not a shared library"), "{length}: {message}");
    }
}

#[test]
fn rejects_other_architectures_by_name() {
    let mut bytes = std::fs::read(library("sharpness_reward")).unwrap();
    let (name, machine) = if cfg!(target_arch = "aarch64") { ("x86_64", 62u16) } else { ("aarch64", 183) };
    bytes[18..20].copy_from_slice(&machine.to_le_bytes());
    let message = refused("libarm.so", &bytes);
    assert!(message.contains(&format!("built for {name}")), "{message}");
}

#[test]
fn rejects_files_that_are_not_plugins() {
    assert!(refused("notes.txt", b"a text").contains("not a shared library"));
    let directory = tempfile::tempdir().unwrap();
    assert!(one_line(&load(directory.path()).unwrap_err()).contains("not a file"));
    assert!(one_line(&load("nowhere/libnone.so").unwrap_err()).contains("nowhere/libnone.so"));
    let executable = one_line(&load("/bin/sh").unwrap_err());
    assert!(executable.contains("/") && !executable.is_empty(), "{executable}");
    // A library without our symbols.
    let Some(plain) = compile(&directory, "plain", "int answer(void) { return 42; }", &[]) else { return };
    let message = one_line(&load(plain).unwrap_err());
    assert!(message.contains("no plugin of roll") && message.contains("roll_plugin_abi"), "{message}");
    // Our symbol, but not our data.
    let Some(liar) = compile(&directory, "liar", "const char roll_plugin_abi[16] = \"something else\";", &[]) else {
        return;
    };
    assert!(one_line(&load(liar).unwrap_err()).contains("no plugin of roll"));
    // A library that needs one that is not there.
    let unresolved = "extern int nobody(void); const char roll_plugin_abi[16] = \"\"; int f(void) { return nobody(); }";
    let Some(unresolved) = compile(&directory, "unresolved", unresolved, &[]) else { return };
    assert!(one_line(&load(unresolved).unwrap_err()).contains("nobody"));
}

#[test]
fn rejects_two_plugins_of_one_name() {
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("libcopy.so");
    std::fs::copy(library("sharpness_reward"), &copy).unwrap();
    let (first, second) = (plugin("sharpness_reward"), load(&copy).unwrap());
    let error = registry(&first).with_components(&second.registrations(), Replaces::Linked).err().unwrap();
    names("copy", &error, &["reward `edges` is registered twice", "libsharpness_reward.so", "libcopy.so"]);
}

/// A reward whose gradient is too large.
struct Steeper(Box<dyn RewardScorer>);

impl RewardScorer for Steeper {
    fn name(&self) -> &str {
        "steeper"
    }
    fn differentiable(&self) -> bool {
        true
    }
    fn score(&mut self, video: &Video, prompt: &str, target: &Target, grad: Grad) -> Result<(Score, Option<Pullback>)> {
        let (score, pullback) = self.0.score(video, prompt, target, grad)?;
        let steeper = |p: Pullback| Pullback::new(move |d: &Tensor| p.pull(&Tensor::scalar(1.1 * d.item()?)));
        Ok((score, pullback.map(steeper)))
    }
}

#[test]
fn check_reward_passes_good_plugins_and_finds_a_wrong_gradient() {
    let make = |name, reward| registry(&plugin(name)).reward(reward, &Options::new(), &context()).unwrap();
    for (name, reward) in [("sharpness_reward", "edges"), ("color_reward", "colors"), ("hostile_plugin", "hostile")] {
        let findings = check_reward(make(name, reward).as_mut(), 1);
        assert!(findings.iter().all(|f| f.verdict != Verdict::Broken), "{name}: {findings:#?}");
    }
    let findings = check_reward(&mut Steeper(make("sharpness_reward", "edges")), 1);
    let broken = |f: &Finding| f.verdict == Verdict::Broken && f.promise.contains("differences");
    assert!(findings.iter().any(broken), "{findings:#?}");
}

#[test]
fn discovers_the_plugins_of_a_search_path() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(library("color_reward"), dir.path().join("libcolors.so")).unwrap();
    std::fs::write(dir.path().join("libbroken.so"), b"\x7fELF").unwrap();
    std::fs::write(dir.path().join("README"), b"text").unwrap();
    let found = discover(&std::env::join_paths([dir.path(), Path::new("/nowhere")]).unwrap());
    assert_eq!(found.iter().map(|p| p.name.as_str()).collect::<Vec<_>>(), ["color_reward"]);
    assert!(found[0].is_layout_checked && found[0].abi == ABI_VERSION);
}

const CONTRAST: &str = include_str!("../../../../plugins/contrast_reward_c/contrast.c");

#[test]
fn loads_a_reward_in_c() {
    let dir = tempfile::tempdir().unwrap();
    let Some(path) = compile(&dir, "contrast", CONTRAST, &[]) else { return };
    let plugin = load(path).unwrap();
    assert!(!plugin.is_layout_checked && plugin.authors == "The authors of roll");
    assert_eq!(plugin.components[0].options()[0].about, "Factor of the score, above 0");
    let registry = registry(&plugin);
    let make =
        |gain: f64| registry.reward("contrast", &[("gain".to_string(), gain.into())].into_iter().collect(), &context());
    let findings = check_reward(make(3.0).unwrap().as_mut(), 0);
    assert!(findings.iter().all(|f| f.verdict == Verdict::Kept), "{findings:#?}");
    let message = one_line(&make(-1.0).map(drop).unwrap_err());
    assert!(message.contains("`gain` must be above 0") && message.contains("libcontrast.so"), "{message}");
    let mut reward = registry.reward("contrast", &Options::new(), &context()).unwrap();
    let broken = Video::new(Tensor::full([1, 3, 2, 2], f32::NAN), 8.0).unwrap();
    let (score, pullback) = reward.score(&broken, "", &Target::default(), Grad::Record).unwrap();
    assert!(pullback.is_none());
    assert_eq!(score, Score::Missing { reason: "the score is not finite".into() });
}

/// Name in C, size and offsets of each structure that the header has; a member that is left out does not compile.
macro_rules! structures {
    ($( $name:ident = $rust:ident { $($member:ident),* } )*) => {
        [$( {
            let _ = |whole: roll_plugin::abi::$rust| {
                let roll_plugin::abi::$rust { $($member: _),* } = whole;
            };
            type Rust = roll_plugin::abi::$rust;
            let members = vec![$( (stringify!($member), std::mem::offset_of!(Rust, $member)) ),*];
            (stringify!($name), size_of::<Rust>(), members)
        } ),*]
    };
}

#[test]
fn the_c_header_matches_the_rust_types() {
    let structures = structures! {
        roll_abi = RollAbi { magic, major, minor }
        roll_str = RollStr { data, len }
        roll_tensor = RollTensor { data, bytes, shape, rank, dtype, owner, retain, release }
        roll_object = RollObject { state, call, release }
        roll_message = RollMessage { body, tensors, tensor_count, objects, object_count, owner, release }
    };
    let header = include_str!("../../../../roll-plugin/include/roll_plugin.h");
    let message = header.lines().filter(|line| line.starts_with("} roll_")).count();
    assert_eq!(message, structures.len(), "the list above has another number of structures than the header");
    let [major, minor] = ABI_VERSION;
    assert!(
        header.contains(&format!("version {major}.{minor},")) && header.contains(&format!("'G'}}, {major}, {minor}}}"))
    );
    let dir = tempfile::tempdir().unwrap();
    let mut source = String::from("#include \"roll_plugin.h\"\nconst size_t layout[] = {");
    let (mut names, mut expected) = (Vec::new(), Vec::new());
    for (name, size, members) in &structures {
        source += &format!("sizeof({name}),");
        names.push(name.to_string());
        expected.push(*size);
        for (member, offset) in members {
            source += &format!("offsetof({name}, {member}),");
            names.push(format!("{name}.{member}"));
            expected.push(*offset);
        }
    }
    source += "};";
    let Some(path) = compile(&dir, "layout", &source, &[]) else { return };
    // SAFETY: the library holds this array and nothing else.
    let library = unsafe { libloading::Library::new(path) }.unwrap();
    // SAFETY: as above, of the length that was written.
    let found = unsafe {
        let array: libloading::Symbol<'_, *const usize> = library.get(b"layout\0").unwrap();
        std::slice::from_raw_parts(*array, expected.len())
    };
    for ((name, expected), found) in names.iter().zip(&expected).zip(found) {
        assert_eq!(found, expected, "{name}");
    }
}
