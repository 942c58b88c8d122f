//! A Chromium that is driven over its pipe by the DevTools protocol.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use base64::Engine;
use serde_json::{Value, json};

/// `$ROLL_CHROMIUM`, or the installed browser.
pub fn chromium() -> Option<PathBuf> {
    let named = std::env::var_os("ROLL_CHROMIUM").map(PathBuf::from);
    let directories =
        std::env::var_os("PATH").map(|p| std::env::split_paths(&p).collect::<Vec<_>>()).unwrap_or_default();
    let names = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];
    named.or_else(|| directories.iter().flat_map(|d| names.map(|n| d.join(n))).find(|p| p.is_file()))
}

/// A browser with one page.
pub struct Browser {
    child: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
    session: Option<String>,
    calls: u64,
}

impl Browser {
    /// Opens the page at `url`.
    pub fn open(program: &Path, profile: &Path, url: &str) -> Self {
        // The browser reads commands from descriptor 3 and writes answers to descriptor 4.
        let mut child = Command::new("sh")
            .args(["-c", "exec \"$0\" \"$@\" 3<&0 4>&1 </dev/null >/dev/null"])
            .arg(program)
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars"])
            .args(["--autoplay-policy=no-user-gesture-required", &format!("--user-data-dir={}", profile.display())])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let (commands, answers) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut browser = Self { child, commands, answers, session: None, calls: 0 };
        let target = browser.call("Target.createTarget", json!({"url": url}))["targetId"].clone();
        let session = browser.call("Target.attachToTarget", json!({"targetId": target, "flatten": true}));
        browser.session = session["sessionId"].as_str().map(String::from);
        browser
    }

    fn call(&mut self, method: &str, parameters: Value) -> Value {
        self.calls += 1;
        let mut command = json!({"id": self.calls, "method": method, "params": parameters});
        if let Some(session) = &self.session {
            command["sessionId"] = session.as_str().into();
        }
        write!(self.commands, "{command}\0").unwrap();
        loop {
            let mut answer = Vec::new();
            self.answers.read_until(0, &mut answer).unwrap();
            let mut answer: Value = serde_json::from_slice(answer.strip_suffix(b"\0").unwrap()).unwrap();
            if answer["id"] == self.calls {
                assert!(answer.get("error").is_none(), "{method}: {answer}");
                return answer["result"].take();
            }
        }
    }

    /// The value of an expression in the page.
    pub fn value(&mut self, expression: &str) -> Value {
        let mut answer = self.call("Runtime.evaluate", json!({"expression": expression, "returnByValue": true}));
        assert!(answer.get("exceptionDetails").is_none(), "{expression}: {answer}");
        answer["result"]["value"].take()
    }

    /// Waits until an expression is true.
    pub fn wait_for(&mut self, expression: &str) {
        let begun = Instant::now();
        while self.value(expression) != true {
            let text = || "document.body.innerText.slice(0, 2000)";
            assert!(begun.elapsed() < Duration::from_secs(60), "never {expression} in: {}", self.value(text()));
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Puts pictures of the page into `$ROLL_SCREENSHOTS`: of a phone, a tablet and a desk, light and dark.
    pub fn save_pictures(&mut self, name: &str) {
        let Some(directory) = std::env::var_os("ROLL_SCREENSHOTS") else { return };
        for (width, scheme) in [360, 800, 1400].into_iter().flat_map(|width| [(width, "light"), (width, "dark")]) {
            let metrics = json!({"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 400});
            self.call("Emulation.setDeviceMetricsOverride", metrics);
            let features = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
            self.call("Emulation.setEmulatedMedia", features);
            std::thread::sleep(Duration::from_millis(300));
            let picture = self.call("Page.captureScreenshot", json!({"captureBeyondViewport": true}));
            let bytes = base64::engine::general_purpose::STANDARD.decode(picture["data"].as_str().unwrap()).unwrap();
            std::fs::write(Path::new(&directory).join(format!("{name}-{width}-{scheme}.png")), bytes).unwrap();
        }
        self.call("Emulation.clearDeviceMetricsOverride", json!({}));
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
