//! The command line describes itself.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Stdio};

use roll_backends::Backend;
use roll_core::{Registry, Tensor, Video};
use roll_train::config::ConfigLayers;

use crate::program;
use crate::world::{SETTINGS, World, fails, stderr_text};

#[test]
fn every_command_has_help_with_an_example_and_completions() {
    let world = World::new(0);
    let help = world.done(&["--help"]);
    assert!(help.contains("Exit codes") && help.contains("roll run --resume"), "{help}");
    let commands = help.split("Commands:").nth(1).unwrap().split("Options:").next().unwrap();
    let commands: Vec<&str> = commands.lines().filter_map(|l| l.strip_prefix("  ")?.split(' ').next()).collect();
    let commands: Vec<&str> = commands.into_iter().filter(|c| !c.is_empty() && *c != "help").collect();
    assert!(commands.contains(&"run") && commands.contains(&"report"), "{commands:?}");
    let bash = world.done(&["completions", "bash"]);
    for command in commands {
        let help = world.done(&[command, "--help"]);
        assert!(help.contains("Example") && help.contains(&format!("roll {command}")), "{help}");
        let examples = help.split_once("Example").unwrap().1;
        let long = examples.lines().find(|line| line.chars().count() > 79);
        assert!(long.is_none(), "{command}: a terminal of 80 columns breaks this line: {long:?}");
        assert!(bash.contains(command), "{command}");
    }
    for shell in ["zsh", "fish", "powershell", "elvish"] {
        assert!(world.done(&["completions", shell]).contains("--resume") || shell == "fish", "{shell}");
    }
    fails(&world.roll(&["completions", "tcsh"]), 2, &["tcsh", "bash"]);
}

#[test]
fn a_closed_pipe_is_not_an_error() {
    let world = World::new(0);
    for arguments in [&["plugins"][..], &["config"], &["completions", "bash"]] {
        let mut child = world.command(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert!(
            output.status.success() && !stderr_text(&output).contains("panicked"),
            "{arguments:?}: {}",
            stderr_text(&output)
        );
    }
}

#[test]
fn examples_and_demos_have_no_idle_keys() {
    let registry = Registry::linked().unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let text = |file: &str| std::fs::read_to_string(root.join(file)).unwrap();
    for files in [
        &["examples/short.yaml"][..],
        &["examples/reward_fl_clip.yaml"],
        &["examples/recipes/identity-i2v.yaml"],
        &["examples/recipes/judge-t2v.yaml"],
        &["examples/recipes/clips-i2v.yaml"],
        &["examples/recipes/sums-smollm2.yaml"],
        &["examples/recipes/videoalign-reward-fl.yaml"],
        &["examples/recipes/videoalign-nft.yaml"],
        &["roll-cli/src/demo.yaml", "roll-cli/src/demo_reward.yaml"],
        &["roll-cli/src/demo_agent.yaml", "roll-cli/src/demo_agent_env.yaml"],
        &["roll-cli/src/demo_flow_matching.yaml"],
        &["roll-cli/src/demo_sft.yaml"],
        &["roll-cli/src/demo_dpo.yaml"],
        &["demo/agent/sft.yaml"],
        &["roll-cli/src/demo_picture.yaml"],
    ] {
        let layers = files.iter().fold(ConfigLayers::new(), |layers, file| layers.text(file, &text(file)).unwrap());
        let notes = layers.load(Some(&registry)).unwrap().without_effect(&registry).unwrap();
        assert!(notes.is_empty() || notes[0].contains("every weight"), "{files:?}: {notes:?}");
    }
}

#[test]
fn rewards_try_prints_scores_of_frames_and_draws_the_gradient() {
    let world = World::new(1);
    let printed_text = world.done(&["rewards", "try", "brightness", "0.mp4", "--output", "gradient.png"]);
    for part in ["brightness: -", "luma", "along the gradient", "wrote gradient.png", "#####"] {
        assert!(printed_text.contains(part), "no {part} in: {printed_text}");
    }
    assert!(std::fs::read(world.path("gradient.png")).unwrap().starts_with(b"\x89PNG"));
    fails(&world.roll(&["rewards", "try", "no_such_reward", "0.mp4"]), 2, &["no_such_reward"]);
    let still = world.done(&["rewards", "try", "motion", "0.mp4", "--every", "100"]);
    assert!(still.contains("nothing to score"), "{still}");
}

#[test]
fn a_bench_of_streamed_weights_leaves_no_file() {
    let world = World::new(2);
    std::fs::create_dir(world.path("temporary")).unwrap();
    let small = ["bench", "--layers", "1", "--frames", "5", "--size", "32x32", "--without-vae", "--rounds", "1"];
    let mut command = world.command(&[&small[..], &["--weight-store", "streamed", "--json", "step.json"]].concat());
    let output = command.env("TMPDIR", world.path("temporary")).output().unwrap();
    assert!(output.status.success(), "{}", stderr_text(&output));
    let written: serde_json::Value = serde_json::from_slice(&std::fs::read(world.path("step.json")).unwrap()).unwrap();
    assert_eq!(written["weight_store"], "streamed");
    assert_eq!(std::fs::read_dir(world.path("temporary")).unwrap().count(), 0);
    let eight = world.roll(&[&small[..], &["--weight-store", "streamed", "--weights-dtype", "int8"]].concat());
    fails(&eight, 2, &["--weight-store", "not streamed"]);
}

#[test]
fn existing_files_are_not_overwritten() {
    let world = World::new(2);
    std::fs::write(world.path("notes.md"), "mine").unwrap();
    world.train("run", 1, &["reward.name=brightness", "training.learning_rate=1e-3"]);
    fails(&world.roll(&["report", "run", "--output", "notes.md"]), 2, &["--output", ".html"]);
    assert_eq!(std::fs::read_to_string(world.path("notes.md")).unwrap(), "mine");
    let photo =
        roll_media::write_pngs(world.path("photo"), &Video::new(Tensor::zeros([1, 3, 64, 64]), 8.0).unwrap()).unwrap();
    let photo = photo[0].strip_prefix(world.path("")).unwrap_or(&photo[0]).to_str().unwrap().to_string();
    for (name, command) in [
        (photo.as_str(), &["rewards", "try", "brightness", &photo, "--output", &photo][..]),
        ("curve.svg", &["plot", "run", "--y", "actor/score", "--output", "curve.svg"]),
        ("page.html", &["report", "run", "--output", "page.html"]),
        ("votes.jsonl", &["data", "votes", "run", "votes.jsonl"]),
        ("step.json", &["bench", "--json", "step.json"]),
        ("answers.yaml", &["init", "answers.yaml"]),
    ] {
        if name != photo {
            std::fs::write(world.path(name), "mine").unwrap();
        }
        let before = std::fs::read(world.path(name)).unwrap();
        fails(&world.roll(command), 2, &[name, "--force replaces it"]);
        assert_eq!(std::fs::read(world.path(name)).unwrap(), before, "{command:?}");
    }
    world.done(&["report", "run", "--output", "page.html", "--force"]);
    assert!(std::fs::read_to_string(world.path("page.html")).unwrap().contains("<html"));
    world.done(&["report", "run"]);
    world.done(&["report", "run"]);
    let convert = ["convert-lora", "run/checkpoints/step-000001/adapter.safetensors", "k.safetensors", "--to", "kohya"];
    world.done(&convert);
    fails(&world.roll(&convert), 2, &["k.safetensors", "--force"]);
    world.done(&[&convert[..], &["--force"]].concat());
    let header = || {
        let bytes = std::fs::read(world.path("k.safetensors")).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        serde_json::from_slice::<serde_json::Value>(&bytes[8..8 + length]).unwrap()
    };
    let dtypes = |header: &serde_json::Value| -> BTreeSet<String> {
        let matrices = header.as_object().unwrap().iter().filter(|(name, _)| name.ends_with(".weight"));
        matrices.map(|(_, tensor)| tensor["dtype"].as_str().unwrap().into()).collect()
    };
    assert_eq!(dtypes(&header()), BTreeSet::from(["F32".into()]));
    world.done(&[&convert[..], &["--force", "--dtype", "bf16"]].concat());
    assert_eq!(dtypes(&header()), BTreeSet::from(["BF16".into()]));
    let metadata = &header()["__metadata__"];
    assert!(metadata["ss_network_dim"].is_string() && metadata["ss_steps"] == "1", "{metadata}");
    fails(
        &world.roll(&["convert-lora", convert[1], "none/k.safetensors", "--to", "kohya"]),
        2,
        &["none/k.safetensors"],
    );
}

#[test]
fn built_in_rewards_are_checked_by_name() {
    let world = World::new(0);
    let printed_text = world.done(&["plugins", "check", "sharpness"]);
    assert!(printed_text.contains("reward sharpness") && printed_text.contains("  ok "), "{printed_text}");
    fails(&world.roll(&["plugins", "check", "no_such_reward"]), 2, &["no_such_reward"]);
}

#[test]
fn a_score_that_is_not_finite_is_an_error() {
    let world = World::new(1);
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../roll-rewards/scorers/tests/data/clip_tiny");
    std::fs::create_dir(world.path("clip")).unwrap();
    for file in std::fs::read_dir(from).unwrap().map(Result::unwrap).filter(|file| file.path().is_file()) {
        std::fs::copy(file.path(), world.path("clip").join(file.file_name())).unwrap();
    }
    let weights = world.path("clip/model.safetensors");
    let mut state = roll_network::weights::Checkpoint::open(&weights).unwrap().all().unwrap();
    state.iter_mut().for_each(|(_, tensor)| *tensor = Tensor::full(tensor.shape().to_vec(), f32::NAN));
    std::fs::remove_file(&weights).unwrap(); // it is mapped
    roll_network::weights::save_safetensors(&weights, &state, &Default::default()).unwrap();
    let score = ["score", "0.mp4", "--reward", "clip", "--prompt", "x", "--set", "reward.path=clip"];
    fails(&world.roll(&score), 1, &["the score of `clip` is not finite"]);
}

#[test]
fn language_models_are_planned_by_phase() {
    let world = World::new(0);
    for (algorithm, phases) in
        [("agentic_ppo", &["rollout", "update", "checkpoint"][..]), ("sft", &["update", "checkpoint"])]
    {
        let plan = ["plan", "--algo", algorithm, "--model", "causal_lm"];
        let printed_text = world.done(&plan);
        for phase in phases {
            assert!(printed_text.contains(&format!("together, {phase}")), "{printed_text}");
        }
        assert!(
            printed_text.contains("frozen weights")
                && printed_text.contains("fits: ")
                && !printed_text.contains("TFLOP  "),
            "{printed_text}"
        );
        let json: serde_json::Value = serde_json::from_str(&world.done(&[&plan[..], &["--json"]].concat())).unwrap();
        let largest = phases.iter().map(|phase| {
            let held = &json["phases"][phase];
            held["device"].as_u64().unwrap() + held["host"].as_u64().unwrap()
        });
        assert_eq!(json["needed_bytes"].as_u64(), largest.max(), "{json}");
    }
    let two = ["plan", "--algo", "agentic_ppo", "--model", "causal_lm", "--devices", "2"];
    let printed_text = world.done(&[&two[..], &["--set", "strategy.name=zero", "--set", "strategy.stage=3"]].concat());
    assert!(
        printed_text.contains("2 ranks, ZeRO stage 3") && printed_text.contains("if all 2 ranks are on this machine"),
        "{printed_text}"
    );
}

#[test]
fn flow_matching_is_planned_by_its_noise_levels() {
    let world = World::new(0);
    let planned = |draws: usize, at_once: usize, more: &[&str]| {
        let [draws, at_once] =
            [("draws_per_sample", draws), ("draws_at_once", at_once)].map(|(key, n)| format!("algo.{key}={n}"));
        let plan =
            ["plan", "--network", "wan2_2-ti2v-5b", "--algo", "flow_matching", "--set", &draws, "--set", &at_once];
        world.done(&[&plan[..], more].concat())
    };
    let text = planned(3, 1, &[]);
    assert!(text.contains("3 noise levels of each clip"), "{text}");
    let json =
        |draws, at_once| -> serde_json::Value { serde_json::from_str(&planned(draws, at_once, &["--json"])).unwrap() };
    let find = |json: &serde_json::Value, list: &str, name: &str, key: &str| {
        let items = json[list].as_array().unwrap();
        items.iter().find(|item| item["name"] == name).unwrap_or_else(|| panic!("{json}"))[key].as_f64().unwrap()
    };
    let [one, two, both] = [json(1, 1), json(2, 1), json(2, 2)];
    assert_eq!(find(&one, "time", "time/reference", "flops"), 0.0);
    assert_eq!(find(&two, "time", "time/pull", "flops"), 2.0 * find(&one, "time", "time/pull", "flops"));
    assert_eq!(find(&two, "memory", "block inputs", "device"), find(&one, "memory", "block inputs", "device"));
    assert_eq!(find(&both, "memory", "block inputs", "device"), 2.0 * find(&one, "memory", "block inputs", "device"));
}

#[test]
#[cfg(unix)]
fn devices_lists_every_backend_and_gpu_with_what_is_missing() {
    use std::os::unix::fs::PermissionsExt;

    let world = World::new(0);
    let table = world.done(&["devices"]);
    let found: serde_json::Value = serde_json::from_str(&world.done(&["devices", "--json"])).unwrap();
    for (backend, row) in Backend::ALL.iter().zip(found["backends"].as_array().unwrap()) {
        let line = table.lines().find(|line| line.split(' ').next() == Some(backend.name())).unwrap();
        assert_eq!((row["name"].as_str(), row["built"].as_bool()), (Some(backend.name()), Some(backend.is_compiled())));
        assert_eq!(row["devices"] == 0, backend.check_usable(0).is_err(), "{row}");
        match row["missing"].as_str() {
            None => assert!(row["devices"] != 0 && line.contains(&format!("--backend {backend}")), "{line}"),
            Some(missing) if backend.is_compiled() => {
                assert_eq!(Some(missing), backend.check_usable(0).err().as_deref())
            }
            Some(missing) => {
                assert!(line.contains(missing) && missing.contains(&backend.build_command()), "{line}");
            }
        }
    }
    // A GPU counts without a backend for it. The driver of this machine, if it has one, is asked before this program.
    let program = world.path("nvidia-smi");
    std::fs::write(&program, "#!/bin/sh\n[ \"$4\" != 0 ] || echo 81920\n").unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let output = world.command(&["devices"]).env("PATH", world.path("")).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stdout).contains("NVIDIA GPU 0: "), "{}", stderr_text(&output));
}

#[test]
fn rejects_invalid_arguments_by_name() {
    let world = World::new(0);
    fails(&world.roll(&["plan", "--network", "wan2_2-ti2v-5b", "--devices", "0"]), 2, &["--devices"]);
    let clip = ["plan", "--algo", "reward_fl", "--model", "causal_lm", "--set", "model.model_path=here"];
    fails(&world.roll(&clip), 2, &["algo.name", "agentic_ppo"]);
    fails(&world.roll(&["plan", "--algo", "agentic_ppo", "--model", "wan2_2"]), 2, &["model.name", "causal_lm"]);
    fails(&world.roll(&["ask", "--temperature", "-1", "hi"]), 2, &["temperature", "-1"]);
    fails(&world.roll(&["plot", "nowhere", "--output", "curves.png"]), 2, &["--output", "SVG"]);
    let settings = SETTINGS.iter().flat_map(|setting| ["--set", setting]);
    let generate = ["generate", "--prompt", "x", "--output", "x.mp4", "--frames", "10"];
    let generate: Vec<&str> = generate.into_iter().chain(settings).collect();
    fails(&world.roll(&generate), 2, &["--frames", "multiple of 4 frames, such as 9"]);
    let vae = "tiny/Wan2.1_VAE.safetensors";
    fails(&world.roll(&["split-shards", vae, "shards", "--max-size", "1.5XB"]), 2, &["1.5MiB", "`XB`"]);
    world.done(&["split-shards", vae, "shards", "--max-size", "1.5MiB"]);
}

#[test]
#[cfg(target_os = "linux")]
fn the_demo_trains_from_the_files_of_a_release_which_are_the_same_each_time() {
    let pip = |arguments: &[&str]| Command::new("python3").args(["-m", "pip"]).args(arguments).output();
    if !pip(&["--version"]).is_ok_and(|output| output.status.success()) {
        roll_testing::skip!("no python3 with pip to make and install a wheel", needs = "python");
    }
    let world = World::new(0);
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let release = |arguments: &[&str], into: &str| {
        let output = Command::new(root.join("scripts/release"))
            .args(arguments)
            .arg(world.path(into))
            .env("ROLL_BINARY", program::PATH)
            .env("SOURCE_DATE_EPOCH", "1700000000")
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", stderr_text(&output));
        let mut names: Vec<String> = std::fs::read_dir(world.path(into))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    let names = release(&[], "dist");
    assert_eq!(names.iter().filter(|name| name.ends_with(".sha256")).count(), 3, "{names:?}");
    // The dry run trains from the archive and the wheel, without the libraries of these features, and tries install.sh.
    let dry_run: &[&str] = if cfg!(feature = "libtorch") { &[] } else { &["--dry-run"] };
    assert_eq!(release(dry_run, "again"), names);
    for name in &names {
        let [one, other] = ["dist", "again"].map(|into| std::fs::read(world.path(into).join(name)).unwrap());
        assert!(one == other, "{name} differs");
    }
}

/// A program that is linked against a library of PyTorch, as `roll` with libtorch's CUDA is.
const LINKED_TO_TORCH: &str = "int answer(void); int main(void) { return answer(); }";

#[test]
#[cfg(target_os = "linux")]
fn the_wheel_with_libtorch_loads_the_pytorch_of_its_environment_or_refuses_it() {
    let world = World::new(0);
    let write = |name: &str, text: &str| {
        std::fs::create_dir_all(world.path(name).parent().unwrap()).unwrap();
        std::fs::write(world.path(name), text).unwrap();
    };
    let runs = |program: &str, arguments: &[&str]| {
        let directory = world.path("");
        let output = Command::new(program).args(arguments).env("LIBTORCH", ".").current_dir(directory).output();
        output.is_ok_and(|output| output.status.success())
    };
    write("library.c", "int answer(void) { return 42; }");
    write("program.c", LINKED_TO_TORCH);
    write("site/torch/lib/empty", "");
    write("folder/bin/empty", "");
    write("folder/LICENSE", "");
    write("folder/share/roll/roll.cdx.json", "{}");
    write("build-version", "2.11.0\n");
    let library = ["-shared", "-fPIC", "library.c", "-o", "site/torch/lib/libtorch_cuda.so"];
    let rpath = "-Wl,--disable-new-dtags,-rpath,$ORIGIN/../../torch/lib";
    let program = ["program.c", "-o", "folder/bin/roll", "-Lsite/torch/lib", "-ltorch_cuda", rpath];
    if !runs("cc", &library) || !runs("cc", &program) || !runs("readelf", &["--version"]) {
        roll_testing::skip!("there is no C compiler with readelf", needs = "cc");
    }
    if !runs("python3", &["-m", "pip", "--version"]) {
        roll_testing::skip!("no python3 with pip to make and install a wheel", needs = "python");
    }
    let wheel = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/wheel");
    std::fs::create_dir(world.path("dist")).unwrap();
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    assert!(runs(wheel.to_str().unwrap(), &["folder", "1.2.3.libtorch", &target, "dist"]));
    let made = std::fs::read_dir(world.path("dist")).unwrap().next().unwrap().unwrap().path();
    assert!(made.to_str().unwrap().contains("roll_cli_cuda-1.2.3-py3-none-manylinux_2_"), "{}", made.display());
    let pip = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", "site"];
    assert!(runs("python3", &[&pip[..], &[made.to_str().unwrap()]].concat()));
    // Without the packages of the Python at hand, which may have a PyTorch.
    let started = || {
        let start = "import roll_cli_cuda, sys; sys.exit(roll_cli_cuda.main())";
        Command::new("python3")
            .args(["-S", "-c", start])
            .env("PYTHONPATH", world.path("site"))
            .env_remove("LD_LIBRARY_PATH")
            .output()
            .unwrap()
    };
    fails(&started(), 2, &["needs PyTorch 2.11", "finds none", "-m pip install 'torch==2.11.*'"]);
    let version = |version: &str| {
        write("site/torch-2.dist-info/METADATA", &format!("Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"));
    };
    version("2.9.0");
    fails(&started(), 2, &["needs PyTorch 2.11", "finds 2.9.0 in", "torch/lib", "'torch==2.11.*'"]);
    version("2.11.1+cu130");
    assert_eq!(started().status.code(), Some(42), "{}", stderr_text(&started()));
    std::fs::rename(world.path("site/torch/lib"), world.path("site/torch/moved")).unwrap();
    fails(&started(), 2, &["finds 2.11.1+cu130", "without libtorch_cuda.so", "--force-reinstall"]);
}

/// Every place of `scripts/setup-cuda --installed`, as a tree of folders: PyTorch's packages of CUDA 13 lack the header
/// `crt/mma.h`, which Triton's package and a toolkit have.
#[test]
fn setup_cuda_takes_compiler_and_headers_from_the_places_that_have_them() {
    let world = World::new(0);
    let runs = |program: &str, arguments: &[&str]| {
        let ended = Command::new(program).args(arguments).current_dir(world.path(".")).output();
        ended.is_ok_and(|ended| ended.status.success())
    };
    let write = |path: &str| {
        std::fs::create_dir_all(world.path(path).parent().unwrap()).unwrap();
        std::fs::write(world.path(path), "").unwrap();
    };
    std::fs::write(world.path("nvrtc.c"), "int nvrtcVersion(int *a, int *b) { return *a = *b = 0; }").unwrap();
    if !runs("cc", &["-shared", "-fPIC", "nvrtc.c", "-o", "nvrtc.so"]) {
        roll_testing::skip!("there is no C compiler", needs = "cc");
    }
    if !runs("python3", &["--version"]) {
        roll_testing::skip!("no python3, with which the library is loaded", needs = "python");
    }
    let library = |path: &str| {
        write(path);
        std::fs::copy(world.path("nvrtc.so"), world.path(path)).unwrap();
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/setup-cuda");
    let installed = |cuda_path: &str, root: &[&str]| {
        Command::new(&script)
            .arg("--installed")
            .args(root)
            .arg("linked")
            .current_dir(world.path("."))
            .env("CUDA_PATH", cuda_path)
            .env("PYTHONPATH", world.path("site"))
            .env("XDG_DATA_HOME", world.path("data"))
            .output()
            .unwrap()
    };
    let links = |ended: std::process::Output, library: &str, headers: &str| {
        assert!(ended.status.success(), "{}", stderr_text(&ended));
        let target = |link: &str| std::fs::canonicalize(world.path("linked").join(link)).unwrap();
        assert_eq!(target("lib/libnvrtc.so"), std::fs::canonicalize(world.path(library)).unwrap());
        assert_eq!(target("include"), std::fs::canonicalize(world.path(headers)).unwrap());
        let printed = String::from_utf8(ended.stdout).unwrap();
        let directory = std::fs::canonicalize(world.path("linked")).unwrap();
        assert!(printed.contains(&format!("export CUDA_PATH={}\n", directory.display())), "{printed}");
    };

    std::fs::create_dir_all(world.path("empty/include")).unwrap();
    fails(&installed("", &["empty"]), 1, &["compiler (lib/libnvrtc.so) is in none of empty"]);

    // PyTorch's packages of CUDA 13, without crt/.
    library("site/nvidia/cu13/lib/libnvrtc.so.13");
    write("site/nvidia/cu13/lib/libnvrtc-builtins.so.13.0");
    for header in ["cuda_fp16.h", "cuda_bf16.h"] {
        write(&format!("site/nvidia/cu13/include/{header}"));
        write(&format!("site/triton/backends/nvidia/include/{header}"));
        write(&format!("toolkit/include/{header}"));
    }
    if !["/usr/local/cuda", "/opt/cuda"].iter().any(|place| Path::new(place).exists()) {
        fails(&installed("", &[]), 1, &["crt/mma.h in one place) are in none of", "site/nvidia/cu13"]);
        write("site/triton/backends/nvidia/include/crt/mma.h");
        let triton = "site/triton/backends/nvidia/include";
        links(installed("", &[]), "site/nvidia/cu13/lib/libnvrtc.so.13", triton);
        links(installed("", &["site/nvidia/cu13"]), "site/nvidia/cu13/lib/libnvrtc.so.13", triton);
        assert!(world.path("linked/lib/libnvrtc-builtins.so.13.0").is_file());
    }
    // A toolkit's headers before Triton's, and its library where it has one.
    write("toolkit/include/crt/mma.h");
    links(installed("toolkit", &[]), "site/nvidia/cu13/lib/libnvrtc.so.13", "toolkit/include");
    library("toolkit/lib64/libnvrtc.so.12.4");
    links(installed("toolkit", &[]), "toolkit/lib64/libnvrtc.so.12.4", "toolkit/include");
    links(installed("", &["toolkit"]), "toolkit/lib64/libnvrtc.so.12.4", "toolkit/include");
    // Headers beside the compiler are preferred: they are of its version.
    write("site/nvidia/cu13/include/crt/mma.h");
    std::fs::remove_dir_all(world.path("toolkit/lib64")).unwrap();
    links(installed("toolkit", &[]), "site/nvidia/cu13/lib/libnvrtc.so.13", "site/nvidia/cu13/include");
}
