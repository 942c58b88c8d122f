//! Files that are no plugins, plugins of another roll, and plugins of one name: each an error that names the file.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::Command;

use roll_core::plugin::interface::Structure;
use roll_core::plugin::{ABI_VERSION, Chain, discover, load};
use roll_core::{BuildContext, Options, Registry, Replaces};

fn library(name: &str) -> PathBuf {
    let directory = std::env::current_exe().unwrap().parent().unwrap().to_path_buf();
    let (prefix, suffix) = (std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    directory.join(format!("{prefix}{name}{suffix}"))
}

/// What loading `bytes` as a file called `name` says.
fn refused(name: &str, bytes: &[u8]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    let told = Chain::line(&load(&path).unwrap_err());
    assert!(told.contains(name), "the message does not name the file: {told}");
    told
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
fn another_version_of_the_interface_is_refused_whichever_is_newer() {
    let [major, minor] = ABI_VERSION;
    for (found, bytes) in [
        (format!("{}.{minor}", major + 1), with_version(major + 1, minor)),
        (format!("0.{minor}"), with_version(0, minor)),
        (format!("{major}.{}", minor + 1), with_version(major, minor + 1)),
    ] {
        let told = refused("libother.so", &bytes);
        assert!(told.contains(&format!("built for plugin ABI {found}")) && told.contains("rebuild"), "{told}");
    }
}

#[test]
fn other_types_at_the_boundary_are_refused_although_the_version_is_right() {
    let mut bytes = std::fs::read(library("sharpness_reward")).unwrap();
    let name = b"RollScoreInput";
    let found: Vec<usize> = (0..bytes.len() - name.len()).filter(|&i| bytes[i..].starts_with(name)).collect();
    for at in found {
        bytes[at..at + name.len()].copy_from_slice(b"RollScoreOther");
    }
    let told = refused("libother.so", &bytes);
    assert!(told.contains("other types at the boundary: it does not know `RollScoreInput`"), "{told}");
}

#[test]
fn a_truncated_plugin_is_refused_at_every_length() {
    let whole = std::fs::read(library("sharpness_reward")).unwrap();
    for length in [0, 3, 16, 63, 64, 500, 4096, whole.len() / 2, whole.len() - 1] {
        let told = refused("libcut.so", &whole[..length]);
        assert!(told.contains("cut off") || told.contains("no shared library"), "{length}: {told}");
    }
}

#[test]
fn another_architecture_is_named() {
    let mut bytes = std::fs::read(library("sharpness_reward")).unwrap();
    let (name, machine) = if cfg!(target_arch = "aarch64") { ("x86_64", 62u16) } else { ("aarch64", 183) };
    bytes[18..20].copy_from_slice(&machine.to_le_bytes());
    let told = refused("libarm.so", &bytes);
    assert!(told.contains(&format!("built for {name}")), "{told}");
}

#[test]
fn what_is_no_plugin_is_told_apart() {
    assert!(refused("notes.txt", b"a text").contains("no shared library"));
    let directory = tempfile::tempdir().unwrap();
    assert!(Chain::line(&load(directory.path()).unwrap_err()).contains("no file"));
    assert!(Chain::line(&load("nowhere/libnone.so").unwrap_err()).contains("nowhere/libnone.so"));
    let executable = Chain::line(&load("/bin/sh").unwrap_err());
    assert!(executable.contains("/") && !executable.is_empty(), "{executable}");
    // A library without our symbols.
    let Some(plain) = compile(&directory, "plain", "int answer(void) { return 42; }", &[]) else { return };
    let told = Chain::line(&load(plain).unwrap_err());
    assert!(told.contains("no plugin of roll") && told.contains("roll_plugin_abi"), "{told}");
    // Our symbol, but not our data.
    let Some(liar) = compile(&directory, "liar", "const char roll_plugin_abi[16] = \"something else\";", &[]) else {
        return;
    };
    assert!(Chain::line(&load(liar).unwrap_err()).contains("no plugin of roll"));
    // A library that needs one that is not there.
    let unresolved = "extern int nobody(void); const char roll_plugin_abi[16] = \"\"; int f(void) { return nobody(); }";
    let Some(unresolved) = compile(&directory, "unresolved", unresolved, &[]) else { return };
    assert!(Chain::line(&load(unresolved).unwrap_err()).contains("nobody"));
}

#[test]
fn two_plugins_of_one_name_are_an_error_that_names_both_files() {
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("libcopy.so");
    std::fs::copy(library("sharpness_reward"), &copy).unwrap();
    let (first, second) = (load(library("sharpness_reward")).unwrap(), load(&copy).unwrap());
    let registry = Registry::linked().unwrap().with_plugin(&first, Replaces::Nothing).unwrap();
    // The same file twice is the same plugin.
    let registry = registry.with_plugin(&first, Replaces::Nothing).unwrap();
    let told = match registry.with_plugin(&second, Replaces::LinkedIn) {
        Err(error) => error.to_string(),
        Ok(_) => panic!("two rewards are called sharpness"),
    };
    for part in ["reward `sharpness` is registered twice", "libsharpness_reward.so", "libcopy.so"] {
        assert!(told.contains(part), "{told}");
    }
}

#[test]
fn a_search_path_gives_its_plugins_and_leaves_out_the_rest() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(library("color_reward"), dir.path().join("libcolors.so")).unwrap();
    std::fs::write(dir.path().join("libbroken.so"), b"\x7fELF").unwrap();
    std::fs::write(dir.path().join("README"), b"text").unwrap();
    let found = discover(&std::env::join_paths([dir.path(), Path::new("/nowhere")]).unwrap());
    assert_eq!(found.iter().map(|p| p.name.as_str()).collect::<Vec<_>>(), ["color_reward"]);
    assert!(found[0].layout_checked && found[0].abi == ABI_VERSION);
}

/// The library that `cc` makes of `source`; `None` skips the test, where there is no `cc`.
fn compile(dir: &tempfile::TempDir, name: &str, source: &str, arguments: &[&str]) -> Option<PathBuf> {
    let (code, library) = (dir.path().join(format!("{name}.c")), dir.path().join(format!("lib{name}.so")));
    std::fs::write(&code, source).unwrap();
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../roll-core/include");
    let built = Command::new("cc")
        .args(["-std=c99", "-Wall", "-Wextra", "-Werror", "-O2", "-shared", "-fPIC", "-I"])
        .arg(include)
        .args(arguments)
        .arg(&code)
        .arg("-o")
        .arg(&library)
        .output();
    match built {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            Some(library)
        }
        Err(error) => {
            roll_testing::skip!(format!("plugins in C are not tested without a C compiler (cc: {error})"), needs = "cc")
        }
    }
}

const CONTRAST: &str = include_str!("../../../plugins/contrast_reward_c/contrast.c");

#[test]
fn a_reward_in_c_is_a_reward() {
    let dir = tempfile::tempdir().unwrap();
    let Some(path) = compile(&dir, "contrast", CONTRAST, &[]) else { return };
    let plugin = load(path).unwrap();
    assert!(!plugin.layout_checked && plugin.authors == "The authors of roll");
    assert_eq!(plugin.components[0].options()[0].about, "Factor of the score, above 0");
    let registry = Registry::linked().unwrap().with_plugin(&plugin, Replaces::Nothing).unwrap();
    let context = BuildContext { backend: "flex".into(), seed: 0, base_dir: ".".into(), placement: None };
    let make =
        |gain: f64| registry.reward("contrast", &[("gain".to_string(), gain.into())].into_iter().collect(), &context);
    let findings = roll_core::plugin::check::check_reward(make(3.0).unwrap().as_mut(), 0);
    use roll_core::plugin::check::Verdict;
    assert!(findings.iter().all(|f| f.verdict == Verdict::Kept), "{findings:#?}");
    let told = Chain::line(&make(-1.0).map(drop).unwrap_err());
    assert!(told.contains("`gain` must be above 0") && told.contains("libcontrast.so"), "{told}");
    assert!(registry.reward("contrast", &Options::new(), &context).is_ok());
}

#[test]
fn the_header_says_the_same_as_the_rust_types() {
    let dir = tempfile::tempdir().unwrap();
    let mut source = String::from("#include \"roll_plugin.h\"\nconst size_t layout[] = {");
    let structures = roll_core::plugin::interface::structures();
    let described = structures.iter().filter_map(|s| Some((in_c(&s.name)?, s)));
    let described: Vec<(String, &Structure)> = described.collect();
    for (name, structure) in &described {
        source += &format!("sizeof({name}),");
        structure.fields.iter().for_each(|(field, _, _)| source += &format!("offsetof({name}, {field}),"));
    }
    source += "};";
    let Some(path) = compile(&dir, "layout", &source, &[]) else { return };
    // SAFETY: the library holds this array and nothing else.
    let library = unsafe { libloading::Library::new(path) }.unwrap();
    assert!(described.len() > 15, "the header has lost types");
    let mut expected = Vec::new();
    let mut names = Vec::new();
    for (name, structure) in described {
        expected.push(structure.size);
        names.push(name.clone());
        for (field, _, offset) in &structure.fields {
            expected.push(*offset);
            names.push(format!("{name}.{field}"));
        }
    }
    // SAFETY: as above, of the length that was written.
    let found = unsafe {
        let array: libloading::Symbol<'_, *const usize> = library.get(b"layout\0").unwrap();
        std::slice::from_raw_parts(*array, expected.len())
    };
    for ((name, expected), found) in names.iter().zip(&expected).zip(found) {
        assert_eq!(found, expected, "{name}");
    }
}

/// The header's name of a Rust structure: `RollNamedTensor` is `roll_named_tensor`. `None` for what C does not have.
fn in_c(name: &str) -> Option<String> {
    if name == "RollOwned" {
        return Some("roll_text".into());
    }
    let mut out = String::new();
    for c in name.chars() {
        if c.is_uppercase() && !out.is_empty() {
            out.push('_');
        }
        out.extend(c.to_lowercase());
    }
    let header = include_str!("../../../roll-core/include/roll_plugin.h");
    header.contains(&format!("}} {out};")).then_some(out)
}
