use roll_core::{Silent, Tensor};

use super::*;

fn videos(count: usize) -> Vec<Video> {
    (0..count).map(|i| Video::new(Tensor::full([2, 3, 16, 16], 0.1 * i as f32), 8.0).unwrap()).collect()
}

fn vote(config: VoteConfig, run: &std::path::Path) -> Vote {
    let context = BuildContext::new("flex");
    context.run_dir.set(run.into()).unwrap();
    Vote::new(config, &context).unwrap()
}

/// Answers every question with the clip, of those shown, for which `wanted` is highest.
fn answer_all(votes: &Votes, clips: &[String], wanted: impl Fn(usize) -> usize) {
    for (_, id, answered) in votes.questions().unwrap() {
        let question = votes.question(&id).unwrap();
        let of = |position: &usize| wanted(clips.iter().position(|clip| *clip == question.clips[*position]).unwrap());
        let order = question.order();
        let best = (0..order.len()).max_by_key(|shown| of(&order[*shown])).unwrap();
        assert!(!answered && votes.vote(&id, best + 1).unwrap());
    }
}

fn values(scores: &[Score]) -> Vec<f64> {
    scores.iter().map(|score| score.value().unwrap()).collect()
}

/// Interrupts after this many looks.
struct Impatient(std::sync::atomic::AtomicUsize);

impl Progress for Impatient {
    fn phase(&self, phase: &str) {
        assert!(phase.starts_with("waiting for "), "{phase}");
    }
    fn interrupted(&self) -> bool {
        self.0.fetch_update(SEQ, SEQ, |left| left.checked_sub(1)).is_err()
    }
}

const SEQ: std::sync::atomic::Ordering = std::sync::atomic::Ordering::SeqCst;

#[test]
fn few_videos_are_shown_at_once_and_more_in_a_ring() {
    assert_eq!(comparisons(4, 2), [[0, 1], [1, 2], [2, 3], [3, 0]]);
    assert_eq!(comparisons(4, 3), [[0, 1, 2], [1, 2, 3], [2, 3, 0], [3, 0, 1]]);
    assert_eq!((comparisons(2, 2), comparisons(3, 9)), (vec![vec![0, 1]], vec![vec![0, 1, 2]]));
    assert!(comparisons(1, 2).is_empty());
}

#[test]
fn a_score_is_the_fraction_of_questions_won_and_equal_is_shared() {
    let ring = comparisons(4, 2);
    // Video 1 wins both of its questions, 2 and 3 are equal, and 3 wins against 0.
    let all = scores(4, &ring, &[Some(1), Some(0), None, Some(0)]);
    assert_eq!(values(&all), [0.0, 1.0, 0.25, 0.75]);
    let Score::Value { details, .. } = &all[0] else { panic!() };
    assert_eq!(details["votes"], 2.0);
    assert_eq!(values(&scores(4, &comparisons(4, 4), &[Some(2)])), [0.0, 0.0, 1.0, 0.0]);
    assert_eq!(values(&scores(4, &comparisons(4, 4), &[None])), [0.25; 4]);
    assert_eq!(scores(1, &[], &[])[0].value(), None);
}

#[test]
fn votes_become_scores_and_are_found_again() {
    let dir = tempfile::tempdir().unwrap();
    let (videos, votes) = (videos(4), Votes(dir.path().into()));
    let clips: Vec<String> = videos.iter().map(|video| votes.keep_clip(video).unwrap()).collect();
    let mut reward = vote(VoteConfig::default(), dir.path());
    let target = Target::default();
    let stopped = reward.score_group(&videos, "a <b>", &target, &Impatient(2.into()));
    assert!(matches!(stopped, Err(Error::Interrupted)));
    answer_all(&votes, &clips, |i| i);
    // Another process finds the votes and waits for nothing; another prompt has its own.
    let mut reward = vote(VoteConfig::default(), dir.path());
    let scores = reward.score_group(&videos, "a <b>", &target, &Silent).unwrap();
    assert_eq!(values(&scores), [0.0, 0.5, 0.5, 1.0]);
    assert!(reward.score_group(&videos, "b", &target, &Impatient(0.into())).is_err());
    assert_eq!(votes.questions().unwrap().iter().filter(|(_, _, answered)| !answered).count(), 4);
}

#[test]
fn the_reference_picture_is_part_of_a_question() {
    let asked = |reference: bool, row: Option<&Video>| {
        let dir = tempfile::tempdir().unwrap();
        let mut reward = vote(VoteConfig { reference, ..VoteConfig::default() }, dir.path());
        let target = row.map(|row| reward.prepare(row).unwrap()).unwrap_or_default();
        assert!(reward.score_group(&videos(2), "p", &target, &Impatient(0.into())).is_err());
        let votes = Votes(dir.path().into());
        let question = votes.question(&votes.questions().unwrap()[0].1).unwrap();
        question
            .reference
            .map(|id| roll_media::read_video(votes.clip(&id).unwrap(), &Default::default()).unwrap().dims())
    };
    let row = &videos(1)[0];
    assert_eq!(row.dims()[0], 2);
    assert_eq!(asked(true, Some(row)), Some([1, 16, 16]), "the first frame");
    assert_eq!((asked(false, Some(row)), asked(true, None)), (None, None));
}

#[test]
fn the_order_of_clips_differs_between_questions() {
    let question = |prompt: usize| Question {
        prompt: prompt.to_string(),
        question: String::new(),
        clips: vec!["a".into(), "b".into()],
        reference: None,
    };
    let first: usize = (0..100).map(|prompt| question(prompt).order()[0]).sum();
    assert!((35..65).contains(&first), "{first} of 100 questions are turned round");
}

#[test]
fn hostile_answers_and_questions_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let votes = Votes(dir.path().into());
    let clips = videos(2).iter().map(|video| votes.keep_clip(video).unwrap()).collect();
    let id = votes.ask(&Question { prompt: "p".into(), question: "q".into(), clips, reference: None }).unwrap();
    assert!(votes.vote(&id, 3).is_err() && votes.answer(&id).unwrap() == Answer::Open);
    assert!(votes.vote(&id, 2).unwrap() && !votes.vote(&id, 1).unwrap(), "a second vote is refused");
    let answers = dir.path().join("votes/answers").join(format!("{id}.json"));
    let is_open = || votes.questions().unwrap().iter().all(|(_, _, answered)| !answered);
    for text in ["3", "-1", "1.5", "[1]", "no json", ""] {
        std::fs::write(&answers, text).unwrap();
        let Answer::Invalid(problem) = votes.answer(&id).unwrap() else { panic!("{text} is an answer") };
        assert!(problem.contains(&id) && is_open(), "{problem}");
        // It is asked again.
        assert!(votes.vote(&id, 2).unwrap() && !votes.vote(&id, 1).unwrap() && !is_open(), "{text}");
    }
    #[cfg(unix)]
    {
        std::fs::remove_file(&answers).unwrap();
        std::os::unix::fs::symlink("/etc/hostname", &answers).unwrap();
        assert!(matches!(votes.answer(&id).unwrap(), Answer::Invalid(problem) if problem.contains("symbolic link")));
        assert!(votes.vote(&id, 2).unwrap() && !answers.is_symlink());
    }
    for id in ["", "..", "../../secret", &id[1..], &id.to_uppercase(), &"/".repeat(64)] {
        assert!(votes.question(id).is_err() && votes.clip(id).is_err() && votes.vote(id, 1).is_err(), "{id}");
    }
    // Contents that are not those of the id, and clips outside the directory.
    let path = dir.path().join("votes/questions").join(format!("{id}.json"));
    let clips = vec!["../x".into(), "../y".into()];
    let outside = Question { prompt: "p".into(), question: "q".into(), clips, reference: None };
    std::fs::write(&path, serde_json::to_vec(&outside).unwrap()).unwrap();
    assert!(votes.question(&id).is_err());
    assert!(votes.question(&votes.ask(&outside).unwrap()).is_err());
    let outside = Question { clips: vec!["0".repeat(64), "1".repeat(64)], reference: Some("../x".into()), ..outside };
    assert!(votes.question(&votes.ask(&outside).unwrap()).is_err());
    #[cfg(unix)]
    {
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/etc/hostname", &path).unwrap();
        assert!(votes.question(&id).unwrap_err().to_string().contains("symbolic link"));
    }
}

#[test]
fn cut_clips_and_questions_are_written_again() {
    let dir = tempfile::tempdir().unwrap();
    let (videos, votes) = (videos(2), Votes(dir.path().into()));
    let ask = || {
        let clips = videos.iter().map(|video| votes.keep_clip(video).unwrap()).collect();
        votes.ask(&Question { prompt: "p".into(), question: "q".into(), clips, reference: None }).unwrap()
    };
    let id = ask();
    let clip = votes.clip(&votes.question(&id).unwrap().clips[0]).unwrap();
    let whole = std::fs::read(&clip).unwrap();
    std::fs::write(&clip, &whole[..100]).unwrap();
    std::fs::write(dir.path().join("votes/questions").join(format!("{id}.json")), "{").unwrap();
    assert_eq!(ask(), id);
    assert!(std::fs::read(&clip).unwrap() == whole && votes.question(&id).is_ok());
}

#[test]
fn an_invalid_answer_file_is_passed_over_until_somebody_votes() {
    let dir = tempfile::tempdir().unwrap();
    let (videos, votes) = (videos(2), Votes(dir.path().into()));
    let mut reward = vote(VoteConfig::default(), dir.path());
    let target = Target::default();
    assert!(reward.score_group(&videos, "p", &target, &Impatient(0.into())).is_err());
    let id = votes.questions().unwrap()[0].1.clone();
    std::fs::create_dir_all(dir.path().join("votes/answers")).unwrap();
    std::fs::write(dir.path().join("votes/answers").join(format!("{id}.json")), "maybe").unwrap();
    assert!(matches!(reward.score_group(&videos, "p", &target, &Impatient(3.into())), Err(Error::Interrupted)));
    let first = votes.question(&id).unwrap().order()[0];
    assert!(votes.vote(&id, 1).unwrap());
    let scores = reward.score_group(&videos, "p", &target, &Silent).unwrap();
    assert_eq!(values(&scores)[first], 1.0);
}

#[test]
fn options_and_several_ranks_are_checked() {
    let made = |config: VoteConfig| Vote::new(config, &BuildContext::new("flex")).map(drop);
    for clips in [0, 1, 10] {
        assert!(made(VoteConfig { clips, ..VoteConfig::default() }).unwrap_err().to_string().contains("reward.clips"));
    }
    assert!(made(VoteConfig::default()).is_ok());
}
