//! `roll watch`: the report of runs while they go on, in a browser of this machine.
//!
//! [`http`] admits requests and sends answers, `writer` finds the process of a run and stops it, and
//! [`roll_train::results::report::live`] makes the page. `votes` has the questions of the page on which people vote.

mod http;
mod votes;
#[cfg(target_os = "linux")]
mod writer;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use roll_core::{Error, Result};
use roll_external::files;
use roll_rewards::vote::files::Votes;
use roll_train::results::report::live::{self, Live, Writer};
use roll_train::run_dir::RunDir;

use self::http::{Access, Body, Method, Request, Response};
use crate::args::Watch;

#[cfg(target_os = "linux")]
use self::writer::Process;

/// A process that writes a run. Such processes are found on Linux only, so elsewhere there is no value of this type.
#[cfg(not(target_os = "linux"))]
enum Process {}

/// The page is made at most once in this time.
const PAUSE: Duration = Duration::from_secs(1);
/// After a page was made, the next one is made at the earliest after this many times the time that it took. The run
/// needs the rest of the core.
const PAUSE_FACTOR: u32 = 20;

/// Serves the page until the process ends.
pub fn watch(args: Watch) -> Result<()> {
    if let Some(file) = args.runs.iter().find(|run| run.is_file()) {
        return Err(Error::bad_file(file, "is a file: `roll watch` takes the directories of runs"));
    }
    if args.control && !cfg!(target_os = "linux") {
        let problem = "`--control`: only on Linux does roll find the process of a run; stop it in its terminal";
        return Err(Error::Unsupported(problem.into()));
    }
    for run in args.runs.iter().filter(|run| !RunDir::has_run(run)) {
        tracing::warn!("{} holds no run yet: the page waits for it", run.display());
    }
    let failed = || Error::failed(format!("port {} of 127.0.0.1 cannot be served; leave out `--port`", args.port));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, args.port)).map_err(failed())?;
    let port = listener.local_addr().map_err(failed())?.port();
    let access = Access { port, token: random_hex() };
    let voting = args.vote.then(|| format!("/vote?token={}", access.token));
    println!("http://127.0.0.1:{port}/?token={}", access.token);
    if let Some(path) = &voting {
        println!("http://127.0.0.1:{port}{path}");
    }
    let state = Mutex::new(State {
        runs: args.runs.clone(),
        named: args.runs.into_iter().map(|path| NamedDirectory { path, is_found: false }).collect(),
        version: String::new(),
        html: "".into(),
        next_page_at: Instant::now(),
        asked_to_stop: Vec::new(),
    });
    state.lock().unwrap_or_else(PoisonError::into_inner).look_for_runs();
    let (token, nonce) = (access.token.clone(), random_hex());
    let watched = Watched { can_stop_runs: args.control, voting, token, nonce, state };
    http::serve(&listener, access, move |request| watched.answer(request))
}

/// 128 random bits, hexadecimal.
fn random_hex() -> String {
    format!("{:032x}", rand::random::<u128>())
}

/// The watched runs and their page.
struct Watched {
    /// Whether the page may stop runs.
    can_stop_runs: bool,
    /// Path of the page on which people vote, if it is served.
    voting: Option<String>,
    /// The secret of the page's address, and of the addresses of its videos.
    token: String,
    /// The nonce of scripts and style sheets of all pages. It stays the same, because the script of an open page
    /// inserts parts of newer pages, and the browser applies the policy of the open page to them.
    nonce: String,
    state: Mutex<State>,
}

/// The newest page, and the processes that were asked to stop.
struct State {
    named: Vec<NamedDirectory>,
    /// The runs of the page. A run keeps its position, by which requests name it.
    runs: Vec<PathBuf>,
    /// Hash of what `html` shows; empty before the first page.
    version: String,
    html: Arc<str>,
    /// The page is not made anew before this time.
    next_page_at: Instant,
    /// The processes that were asked to stop.
    asked_to_stop: Vec<Process>,
}

/// A directory that an argument names: the directory of one run, or of several runs.
struct NamedDirectory {
    /// Once the directory exists, the path has no links. If a link is moved to another run while the page is open, the
    /// page goes on to show the first run, and its button stops that one.
    path: PathBuf,
    is_found: bool,
}

/// The path without links, relative to the working directory if it lies there; `None` if it does not exist.
fn resolved(path: &Path) -> Option<PathBuf> {
    let absolute = path.canonicalize().ok()?;
    let Ok(here) = std::env::current_dir().and_then(|here| here.canonicalize()) else { return Some(absolute) };
    match absolute.strip_prefix(here) {
        Ok(below) if below.as_os_str().is_empty() => Some(".".into()),
        Ok(below) => Some(below.into()),
        Err(_) => Some(absolute),
    }
}

impl State {
    /// Adds the runs that have begun in the named directories since the last call.
    fn look_for_runs(&mut self) {
        for named in &mut self.named {
            if !named.is_found
                && let Some(path) = resolved(&named.path)
            {
                self.runs.iter_mut().filter(|run| **run == named.path).for_each(|run| run.clone_from(&path));
                *named = NamedDirectory { path, is_found: true };
            }
            for run in RunDir::runs_at(&named.path) {
                let run = if run == named.path { run } else { resolved(&run).unwrap_or(run) };
                if self.runs.contains(&run) {
                    continue;
                }
                // A named directory is itself listed in `runs` until its first run begins. The run then takes its
                // position.
                match self.runs.iter_mut().find(|other| **other == named.path) {
                    Some(directory) => *directory = run,
                    None => self.runs.push(run),
                }
            }
        }
    }
}

impl Watched {
    /// The answer to an admitted request.
    fn answer(&self, request: &Request) -> Response {
        match (request.method, request.path.as_str()) {
            (Method::Get | Method::Head, path @ ("/" | "/version")) => match self.refreshed() {
                Err(error) => Response::text(503, &error.chain()),
                Ok(state) if path == "/version" => Response::text(200, &state.version),
                Ok(state) => Response { status: 200, body: Body::Page(state.html.clone(), self.nonce.clone()) },
            },
            (Method::Get | Method::Head, "/video") => self.video(request),
            (Method::Get | Method::Head, "/vote") if self.voting.is_some() => match live::voting_page(&self.nonce) {
                Err(error) => Response::text(503, &error.chain()),
                Ok(page) => Response { status: 200, body: Body::Page(page.into(), self.nonce.clone()) },
            },
            (Method::Get | Method::Head, "/question") if self.voting.is_some() => match self.next_question() {
                Err(error) => Response::text(503, &error.chain()),
                Ok(text) => Response::text(200, &text),
            },
            (Method::Post, "/vote") if self.voting.is_some() => self.vote(request),
            (Method::Post, "/stop") if self.can_stop_runs => self.stop(request),
            (Method::Post, _) => Response::text(403, "`roll watch --control` can stop runs, and `--vote` takes votes"),
            _ => Response::text(404, "no such page"),
        }
    }

    /// The open questions as JSON, see [`votes::next`]. A run has ended if it has its summary and no process writes it.
    fn next_question(&self) -> Result<String> {
        let runs = self.runs();
        let has_ended = |run: &PathBuf| {
            let has_summary = RunDir::open(run).is_ok_and(|dir| dir.summary_path().exists());
            has_summary && matches!(state_of_writer(run, &[]), Writer::Absent | Writer::Unknown)
        };
        votes::next(&runs, runs.iter().all(has_ended))
    }

    /// The state with the newest page. The page is made anew if the runs have changed, but not more often than
    /// [`PAUSE`] and [`PAUSE_FACTOR`] allow.
    fn refreshed(&self) -> Result<MutexGuard<'_, State>> {
        let mut state = self.lock();
        let start = Instant::now();
        if start < state.next_page_at {
            return Ok(state);
        }
        state.look_for_runs();
        let writers: Vec<Writer> = state.runs.iter().map(|run| state_of_writer(run, &state.asked_to_stop)).collect();
        let mut hasher = DefaultHasher::new();
        let states_of_writers: Vec<_> = writers.iter().map(std::mem::discriminant).collect();
        (live::version(&state.runs), states_of_writers).hash(&mut hasher);
        let version = format!("{:016x}", hasher.finish());
        if version != state.version {
            let Self { nonce, can_stop_runs, voting, token, .. } = self;
            let (voting, writers) = (voting.as_deref(), &writers);
            let live = Live { version: &version, nonce, token, can_stop_runs: *can_stop_runs, voting, writers };
            state.html = live::page(&state.runs, &live)?.into();
            state.version = version;
        }
        state.next_page_at = Instant::now() + PAUSE.max(PAUSE_FACTOR * start.elapsed());
        Ok(state)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn runs(&self) -> Vec<PathBuf> {
        let mut state = self.lock();
        state.look_for_runs();
        state.runs.clone()
    }

    /// The run that a request names by its position.
    fn run(&self, request: &Request) -> Option<PathBuf> {
        self.lock().runs.get(request.value("run")?.parse::<usize>().ok()?).cloned()
    }

    /// A video of a run: a clip to vote on, by the query's `id`, or a file of `samples/`, by the query's path `at`.
    fn video(&self, request: &Request) -> Response {
        let path_in = |run: PathBuf| match request.value("id") {
            Some(id) if self.voting.is_some() => Votes(run).clip(id).ok(),
            // Without `--vote`, clips to vote on are not served.
            Some(_) => None,
            None => live::video(&run, request.value("at")?),
        };
        match self
            .run(request)
            .and_then(path_in)
            .and_then(|path| Some((files::open(&path).ok()?, live::media_type(&path))))
        {
            Some((file, kind)) => Response { status: 200, body: Body::Video(file, kind) },
            None => Response::text(404, "no such video"),
        }
    }

    /// Stores the answer to a question, once.
    fn vote(&self, request: &Request) -> Response {
        let choice = request.value("choice").and_then(|choice| choice.parse().ok());
        let (Some(run), Some(id), Some(choice)) = (self.run(request), request.value("id"), choice) else {
            return Response::text(404, "no such question");
        };
        // One vote at a time: of two on the same question, the second is refused.
        let _one_at_a_time = self.lock();
        match Votes(run).vote(id, choice) {
            Err(error) => Response::text(404, &error.chain()),
            Ok(true) => Response::text(201, "stored"),
            Ok(false) => Response::text(409, "the question has a vote already"),
        }
    }

    /// Asks the process of a run to stop with a checkpoint, once.
    #[cfg(target_os = "linux")]
    fn stop(&self, request: &Request) -> Response {
        let Some(run) = self.run(request) else {
            return Response::text(404, "no such run");
        };
        let mut state = self.lock();
        let Some(process) = writer::of(&run) else {
            return Response::text(409, "no process of yours writes this run");
        };
        if state.asked_to_stop.contains(&process) {
            return Response::text(409, "the run was asked to stop already");
        }
        match process.stop(&run) {
            Err(error) => Response::text(409, &error.chain()),
            Ok(()) => {
                tracing::info!("{} was asked to stop", run.display());
                state.asked_to_stop.push(process);
                state.next_page_at = Instant::now();
                Response::text(202, "asked to stop")
            }
        }
    }

    /// Is never called: `--control` is refused on systems other than Linux.
    #[cfg(not(target_os = "linux"))]
    fn stop(&self, _request: &Request) -> Response {
        Response::text(404, "no such page")
    }
}

/// The state of the process that writes the run. `asked_to_stop` has the processes that were asked to stop.
#[cfg(target_os = "linux")]
fn state_of_writer(run: &Path, asked_to_stop: &[Process]) -> Writer {
    match writer::of(run) {
        None => Writer::Absent,
        Some(process) if asked_to_stop.contains(&process) => Writer::Stopping,
        Some(process) => Writer::Running(process.peak_memory()),
    }
}

/// The state of the process that writes the run, which is not known on systems other than Linux.
#[cfg(not(target_os = "linux"))]
fn state_of_writer(_run: &Path, _asked_to_stop: &[Process]) -> Writer {
    Writer::Unknown
}
