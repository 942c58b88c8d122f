//! The report of a run, in a real browser.

use std::path::Path;
use std::process::Command;

use crate::browser::{Browser, chromium};
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

    // The directory of several runs compares all of them.
    world.done(&["report", ".", "--output", "all.html"]);
    assert!(std::fs::read_to_string(world.path("all.html")).unwrap().contains("<title>fast, slow</title>"));

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
fn a_reader_points_at_curves_scales_and_smooths_them_and_enlarges_videos() {
    let Some(program) = chromium() else {
        roll_testing::skip!("no Chromium (ROLL_CHROMIUM names one) to click with", needs = "chromium");
    };
    let world = World::new(0);
    let run = world.path("run");
    for moment in ["before", "after"] {
        let folder = run.join("samples").join(moment);
        std::fs::create_dir_all(&folder).unwrap();
        let video = roll_core::Video::new(roll_core::Tensor::full([3, 3, 32, 32], 0.1), 8.0).unwrap();
        roll_media::write_mp4(folder.join("unseen-000.mp4"), &video).unwrap();
    }
    std::fs::write(run.join("config.yaml"), "steps: 40\n").unwrap();
    let row = |step: u32| {
        let (score, extreme) = (0.1 * f64::from(step), if step.is_multiple_of(2) { 1e300 } else { -1e300 });
        format!(r#"{{"step":{step},"a/score":{score},"b/flat":0.0,"c/extreme":{extreme},"d/tiny":1e-310}}"#)
    };
    std::fs::write(run.join("metrics.jsonl"), (1..=40).map(|step| row(step) + "\n").collect::<String>()).unwrap();
    world.done(&["report", "run"]);
    let page = format!("file://{}", world.path("run/report.html").canonicalize().unwrap().display());
    let mut browser = Browser::open(&program, &world.path("profile"), &page);
    browser.wait_for("typeof addPlots === 'function'");
    browser.value("document.querySelectorAll('details').forEach(details => { details.open = true; })");
    browser.wait_for("document.querySelectorAll('.plot svg').length === 4");
    assert_eq!(browser.value("/NaN|Infinity|undefined/.test(document.querySelector('details').innerHTML)"), false);

    // Step and value of the nearest point of each curve.
    browser.value(
        "var plot = document.querySelector('figure[aria-label=\"a/score\"] .plot'); plot.scrollIntoView(); \
         var box = plot.querySelector('svg').getBoundingClientRect(); \
         var at = share => plot.querySelector('.drawing').dispatchEvent(new PointerEvent('pointermove', \
             { clientX: box.left + share * box.width, clientY: box.top + 50 }))",
    );
    browser.value("at(1)");
    let tip = browser.value("plot.querySelector('.tip').innerText");
    let tip = tip.as_str().unwrap();
    assert!(tip.starts_with("step 40") && tip.contains("running mean 3.65") && tip.contains("step 4"), "{tip}");
    browser.value("at(0)");
    let tip = browser.value("plot.querySelector('.tip').innerText");
    assert!(tip.as_str().unwrap().contains("running mean 0.45 (step 8)"), "{tip}");
    // The logarithmic axis has powers of ten. Values that are not positive have no such axis.
    browser.value("var before = plot.querySelector('svg').outerHTML; plot.querySelector('button').click()");
    assert_eq!(browser.value("plot.querySelector('svg').outerHTML !== before"), true);
    let labels = browser.value("[...plot.querySelectorAll('text')].map(text => text.textContent).join()");
    assert!(["0.1", "1"].iter().all(|label| labels.as_str().unwrap().split(',').any(|l| l == *label)), "{labels}");
    let disabled = "document.querySelector('figure[aria-label=\"b/flat\"] .tools button').disabled";
    assert_eq!(browser.value(disabled), true);
    // Smoothing over one step shows every step.
    browser.value("var range = plot.querySelector('input'); range.value = 0; range.dispatchEvent(new Event('input'))");
    assert_eq!(browser.value("plot.querySelector('polyline').points.length"), 40);
    assert_eq!(browser.value("plot.querySelector('.tools span').textContent"), "mean of 1 step");

    if browser.value("document.querySelector('.failed') !== null") == true {
        roll_testing::skip!("this Chromium cannot play H.264, so it has nothing to enlarge", needs = "chromium");
    }
    let name = "document.querySelector('.large .name').textContent";
    browser.value("document.querySelector('.row video').click()");
    assert_eq!(browser.value("document.querySelector('.large').open"), true);
    assert_eq!(browser.value(name), "unseen-000, before");
    browser.value("document.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowRight' }))");
    assert_eq!(browser.value(name), "unseen-000, after");
    browser.save_pictures("enlarged");
    browser.value("document.querySelector('.large .close').click()");
    assert_eq!(browser.value("document.querySelector('.large').open"), false);
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
