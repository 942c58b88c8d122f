//! Models from other people that try to do harm: each ends in a message, within limits of memory and time, and leaves
//! nothing behind.

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::program;

/// Bytes of address space that `roll` and each process it starts may have. Normally `roll` takes a few hundred MB.
const MEMORY: u64 = 4 << 30;
/// How long it may take, on a machine that is busy. The limit of a template is 20 s.
const TIME: Duration = Duration::from_secs(180);

/// The small language model that is built in, as files.
struct Model {
    dir: tempfile::TempDir,
}

impl Model {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        roll_causal_lm::write_built_in(&dir.path().join("lm")).unwrap();
        Self { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join("lm").join(name)
    }

    /// Asks it something, under limits. Fails when it crashed or hung.
    fn ask(&self, prompt: &str) -> Output {
        self.ask_model("lm", prompt)
    }

    /// As [`Self::ask`], but asks the model at `path` below the directory.
    fn ask_model(&self, path: &str, prompt: &str) -> Output {
        let mut command = Command::new("prlimit");
        command.arg(format!("--as={MEMORY}")).arg("--core=0").arg(program::PATH);
        command.args(["ask", "--model-path", path, prompt]).current_dir(self.dir.path());
        command.env("ROLL_CACHE", "none").env("RAYON_NUM_THREADS", "1");
        let begun = Instant::now();
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let output = child.wait_with_output().unwrap();
        let printed_text = text(&output);
        assert!(matches!(output.status.code(), Some(0..=2)), "{}: {printed_text}", output.status);
        assert!(
            !printed_text.contains("overflowed its stack") && !printed_text.contains("memory allocation"),
            "{printed_text}"
        );
        assert!(begun.elapsed() < TIME, "{:?}: {printed_text}", begun.elapsed());
        output
    }

    /// Asks it with another chat template.
    fn with_template(&self, template: &str) -> Output {
        std::fs::write(self.path("chat_template.jinja"), template).unwrap();
        self.ask("hello")
    }

    /// Asks it with parts of its `tokenizer.json` changed.
    fn with_tokenizer(&self, change: impl FnOnce(&mut Value), prompt: &str) -> Output {
        let built_in = tempfile::tempdir().unwrap();
        roll_causal_lm::write_built_in(built_in.path()).unwrap();
        let file = std::fs::read(built_in.path().join("tokenizer.json")).unwrap();
        let mut json: Value = serde_json::from_slice(&file).unwrap();
        change(&mut json);
        std::fs::write(self.path("tokenizer.json"), json.to_string()).unwrap();
        self.ask(prompt)
    }
}

fn text(output: &Output) -> String {
    let all = [output.stdout.as_slice(), &output.stderr].concat();
    String::from_utf8_lossy(&all[..all.len().min(4000)]).into_owned()
}

fn refused(output: &Output, part: &str) {
    assert_eq!(output.status.code(), Some(2), "{}", text(output));
    assert!(text(output).contains(part), "`{part}` in: {}", text(output));
}

#[test]
fn templates_are_rendered_or_refused_with_their_own_message() {
    let model = Model::new();
    let output = model.ask("hello");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    let template = "{% for m in messages %}{{ m.role }}: {{ m.content|trim }}{% endfor %}{{ bos_token }}";
    assert_eq!(model.with_template(template).status.code(), Some(0));
    refused(&model.with_template("{{ raise_exception('roles must alternate') }}"), "roles must alternate");
    refused(&model.with_template("{% for %}"), "cannot be parsed");
    model.with_template("{{ messages }}");
    let ask = ["ask", "--model-path", "lm", "--set", "model.chat_template_args.thinking=true", "hello"];
    refused(&program::roll(model.dir.path(), &ask), "does not read `thinking`");
}

/// Fails unless the template was rendered or refused. Some nest less deeply than they look: they are rendered, perhaps
/// to a prompt longer than the model's context.
fn rendered_or_refused(output: &Output) {
    let text = text(output);
    let ends = output.status.success() || text.contains("chat template") || text.contains("the model's context");
    assert!(ends, "{text}");
}

#[test]
fn deeply_nested_templates_end_only_the_worker() {
    let model = Model::new();
    let n = 100_000;
    let expressions = [
        format!("{}1", "not ".repeat(n)),
        format!("{}1", "-".repeat(n)),
        format!("a{}", ".b".repeat(n)),
        format!("'a'{}", "~'b'".repeat(n)),
        format!("2{}", "**2".repeat(n)),
        format!("1{}", "|abs".repeat(n)),
        format!("1{}", " if 1 else 2".repeat(n / 2)),
        format!("1{}", "+1".repeat(n)),
    ];
    for expression in expressions {
        rendered_or_refused(&model.with_template(&format!("{{{{ {expression} }}}}")));
    }
    let elif = format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(n / 2));
    rendered_or_refused(&model.with_template(&elif));
    for shown in ["{{ ns }}", "{{ ns|tojson }}", "{{ ns == m }}", "{{ [ns, m]|sort }}"] {
        let itself = "{% set ns = namespace() %}{% set m = namespace() %}{% set ns.a = ns %}{% set m.a = m %}";
        refused(&model.with_template(&format!("{itself}{shown}")), "chat template failed");
    }
}

#[test]
fn templates_have_a_memory_limit() {
    let model = Model::new();
    let grown =
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}";
    let text = format!("{{% for i in range(99999) %}}{}{{% endfor %}}", "x".repeat(10_000));
    let templates = [
        "{{ 'a\nb'|indent(10**12) }}",
        "{{ range(99999)|join('a' * 100000) }}",
        "{{ ('a' * 100000)|replace('a', 'b' * 100000) }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ [1]|batch(10**10, 'x') }}",
        "{{ [1]|slice(10**10, 'x') }}",
        grown,
        &text,
    ];
    for template in templates {
        refused(&model.with_template(template), "chat template");
    }
    refused(&model.with_template(&"x".repeat(50_000_000)), "chat_template.jinja");
}

/// A small model in a GGUF file with another chat template. Texts have their length before them, and tensors begin at a
/// multiple of 32 bytes.
fn gguf_with(template: &str) -> Vec<u8> {
    let bytes = include_bytes!("../fuzz/corpus/gguf/llama.gguf");
    let key = b"tokenizer.chat_template";
    let at = bytes.windows(key.len()).position(|window| window == key).unwrap() + key.len() + 4;
    let length = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    let mut template = template.to_string();
    while template.len() % 32 != length % 32 {
        template.push(' ');
    }
    let parts = [&bytes[..at], &(template.len() as u64).to_le_bytes(), template.as_bytes(), &bytes[at + 8 + length..]];
    parts.concat()
}

#[test]
fn templates_of_gguf_files_have_the_same_limits() {
    let model = Model::new();
    let ask = |template: &str| {
        let path = model.path("model.gguf");
        std::fs::write(&path, gguf_with(template)).unwrap();
        model.ask_model("lm/model.gguf", "ab")
    };
    let answered = ask("{% for m in messages %}{{ m.content }}{% endfor %}");
    assert_eq!(answered.status.code(), Some(0), "{}", text(&answered));
    rendered_or_refused(&ask(&format!("{{{{ {}1 }}}}", "not ".repeat(100_000))));
    let itself = "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}";
    refused(&ask(itself), "chat template failed");
    refused(&ask("{{ 'a\nb'|indent(10**12) }}"), "chat template");
}

#[test]
fn templates_have_a_time_limit() {
    let model = Model::new();
    let pairs = "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}\
                 {% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}";
    refused(&model.with_template(pairs), "longer than 20 s");
}

#[test]
fn tokenizers_that_panic_or_grow_are_errors() {
    let model = Model::new();
    let replace = |pattern: Value, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
    let normalizers = [
        (replace(json!({"String": ""}), "x"), "empty pattern"),
        (replace(json!({"String": "e"}), &"e".repeat(30 << 20)), "too long for this tokenizer"),
        (json!({"type": "Prepend", "prepend": "x".repeat(40 << 20)}), "too long for this tokenizer"),
        (
            json!({"type": "Sequence", "normalizers": vec![replace(json!({"String": "e"}), &"e".repeat(99)); 9]}),
            "too long",
        ),
        (json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "precompiled_charsmap"),
    ];
    for (normalizer, part) in normalizers {
        refused(&model.with_tokenizer(|json| json["normalizer"] = normalizer, "hello"), part);
    }
    // Damaged tables, some of which are read and panic at the first text.
    for table in ["BAAAAA==", "BAAAAP////8=", "BAAAAAAAAAAA", "CAAAAP//////////QUIA", "BAAAAAABAABB"] {
        model.with_tokenizer(
            |json| json["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": table}),
            "hello",
        );
    }
    let slow = json!({"type": "Split", "pattern": {"Regex": "(a+)+(?=b)$"}, "behavior": "Isolated", "invert": false});
    model.with_tokenizer(|json| json["pre_tokenizer"] = slow, &"a".repeat(60));
}

#[test]
fn rejects_pipes_devices_and_endless_files() {
    for name in ["config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"] {
        let model = Model::new();
        let path = model.path(name);
        std::fs::remove_file(&path).unwrap();
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        refused(&model.ask("hello"), "named pipe");
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
        refused(&model.ask("hello"), "device");
        std::fs::remove_file(&path).unwrap();
        // A terabyte that takes no room on the disk.
        std::fs::File::create(&path).unwrap().set_len(1 << 40).unwrap();
        let output = model.ask("hello");
        assert!(!output.status.success() && text(&output).contains(name), "{}", text(&output));
    }
}

#[test]
fn template_workers_end_with_the_program() {
    let model = Model::new();
    let slow = "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}\
                {% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}";
    std::fs::write(model.path("chat_template.jinja"), slow).unwrap();
    let mut command = program::command(model.dir.path(), &["ask", "--model-path", "lm", "hello"]);
    let mut roll = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let begun = Instant::now();
    let id = roll.id();
    // The first child renders. The second is the guard, a shell that kills the first when `roll` ends.
    let worker = || {
        let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default();
        children.split_whitespace().next().map(|child| PathBuf::from("/proc").join(child))
    };
    let worker = loop {
        assert!(begun.elapsed() < TIME, "no process renders the template");
        match worker() {
            Some(worker) => break worker,
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    std::thread::sleep(Duration::from_millis(300));
    roll.kill().unwrap();
    roll.wait().unwrap();
    let begun = Instant::now();
    while std::fs::read_to_string(worker.join("stat")).is_ok_and(|stat| !stat.contains(") Z ")) {
        assert!(begun.elapsed() < TIME, "the process that renders is left behind");
        std::thread::sleep(Duration::from_millis(10));
    }
}
