//! The report of a run, in a real browser.

use std::path::Path;
use std::process::Command;

use crate::browser::chromium;
use crate::world::World;

/// The page as the browser has it after its scripts ran. With `$ROLL_SCREENSHOTS` pictures of it, light and dark, are
/// put there.
fn opened(browser: &Path, page: &Path, profile: &Path) -> String {
    let run = |arguments: &[&str]| {
        let output = Command::new(browser)
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--autoplay-policy=no-user-gesture-required"])
            .args(["--virtual-time-budget=8000", "--run-all-compositor-stages-before-draw", "--hide-scrollbars"])
            .arg(format!("--user-data-dir={}", profile.display()))
            .args(arguments)
            .arg(format!("file://{}", page.display()))
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    if let Some(pictures) = std::env::var_os("ROLL_SCREENSHOTS") {
        let name = page.file_stem().unwrap().to_string_lossy();
        for (kind, look) in [("", "--window-size=1160,2600"), ("-dark", "--force-dark-mode")] {
            let picture = Path::new(&pictures).join(format!("{name}{kind}.png"));
            run(&["--window-size=1160,2600", look, &format!("--screenshot={}", picture.display())]);
        }
    }
    run(&["--dump-dom"])
}

#[test]
fn a_browser_shows_the_curves_and_videos_of_reports() {
    let world = World::new(3);
    let settings = |learning_rate: &'static str| {
        [
            "reward.name=brightness",
            "algo.num_inference_steps=2",
            "algo.mid_timestep=1",
            "algo.final_timestep=1",
            "evaluation.train_samples=2",
            "evaluation.check=[]",
            "evaluation.every=2",
            "sample_steps=2",
            "training.max_grad_norm=1e-6",
            learning_rate,
        ]
    };
    world.train("slow", 4, &settings("training.learning_rate=1e-4"));
    world.train("fast", 4, &settings("training.learning_rate=1e-2"));
    assert_eq!(world.done(&["report", "slow"]).trim(), "slow/report.html");
    world.done(&["report", "slow", "fast", "--output", "compare.html"]);

    let html = std::fs::read_to_string(world.path("slow/report.html")).unwrap();
    for part in ["4 of 4 steps", "clipped in 4 of 4 steps", "Score", "learning_rate: 0.0001"] {
        assert!(html.contains(part), "no {part}");
    }
    for question in ["Is it learning?", "Is it hacking the reward?", "Is it stable?", "Where does the time go?"] {
        assert!(html.contains(question), "no {question}");
    }
    assert!(html.contains("gradients clipped in 4 of 4 steps"), "that is no stable training");
    assert!(html.contains("Unknown: <code>evaluation.check</code> can name a second reward"));
    let compared = std::fs::read_to_string(world.path("compare.html")).unwrap();
    assert!(compared.contains("training.learning_rate") && compared.contains("&quot;name&quot;:&quot;fast&quot;"));

    let Some(browser) = chromium() else {
        roll_testing::skip!("no Chromium (ROLL_CHROMIUM names one) to look at the report with", needs = "chromium");
    };
    for (page, videos) in [("slow/report.html", 2), ("compare.html", 4)] {
        let dom = opened(&browser, &world.path(page).canonicalize().unwrap(), &world.path("profile"));
        let counts = dom.split("data-videos=\"").nth(1).and_then(|rest| rest.split('"').next()).unwrap_or_default();
        let numbers: Vec<u32> = counts.split(' ').filter_map(|word| word.parse().ok()).collect();
        let [loaded, failed, all] = numbers[..] else { panic!("{page}: the script did not run: `{counts}`") };
        assert!(all >= videos, "{page}: {counts}");
        match loaded {
            0 => roll_testing::skipped(&"this Chromium has no H.264 to play the videos", Some("chromium")),
            _ => assert_eq!((loaded, failed), (all, 0), "{page}: {counts}"),
        }
        assert!(dom.matches("<polyline").count() >= 4, "{page}: curves are missing");
    }
}

#[test]
fn the_page_names_the_key_that_an_algorithm_reads_and_writes_keys_as_code() {
    let world = World::new(0);
    let message = |role: &str| format!(r#"{{"role": "{role}", "content": "a"}}"#);
    let row = format!("{{\"messages\": [{}, {}]}}\n", message("user"), message("assistant"));
    std::fs::write(world.path("talk.jsonl"), row.repeat(2)).unwrap();
    let settings = ["algo.name=sft", "model.name=causal_lm", "algo.data=talk.jsonl", "algo.batch_size=2"];
    let settings = settings.iter().flat_map(|setting| ["--set", setting]);
    world.done(&["run", "--steps", "2", "--out", "run"].into_iter().chain(settings).collect::<Vec<_>>());
    let page = std::fs::read_to_string(world.path("run/report.html")).unwrap();
    assert!(page.contains("<code>algo.val_data</code>, conversations that were not trained on"), "{page}");
}
