//! A reward that misbehaves where and how its options say.

pub mod toy;

use std::sync::atomic::{AtomicBool, Ordering};

use roll_plugin::serde::{Deserialize, Serialize};
use roll_plugin::{Error, Grad, OnMissing, Pullback, Result, RewardScorer, Score, Target, Tensor, Video, tracing};

/// Where the reward misbehaves, and how. Misbehaves nowhere by default: its score is the mean of the frames.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(crate = "roll_plugin::serde", default)]
pub struct Misbehaviour {
    /// `make`, `name`, `differentiable`, `on_missing`, `prepare`, `score`, `pull`, `drop`, `drop_pullback`.
    pub at: String,
    /// `panic`, `panic_value`, `panic_thread`, `error`, `user_error`, `interrupt`, `nan`, `shape`, `dtype`,
    /// `no_pullback`, `missing`, `log`.
    pub how: String,
    /// Misbehaves only after this many calls of `score`.
    pub after: u64,
    /// Calls of `score` so far.
    #[serde(skip)]
    calls: u64,
}

/// The reward.
pub struct Hostile(Misbehaviour);

fn make(options: Misbehaviour) -> Result<Hostile> {
    options.misbehave("make")?;
    Ok(Hostile(options))
}

/// A payload whose drop panics too.
struct Bomb;
impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("the payload panics when it is dropped");
    }
}

static ARMED: AtomicBool = AtomicBool::new(false);

impl Misbehaviour {
    fn is(&self, at: &str, how: &str) -> bool {
        self.at == at && self.how == how
    }

    fn misbehave(&self, at: &str) -> Result<()> {
        if self.at != at || self.calls < self.after {
            return Ok(());
        }
        match self.how.as_str() {
            "panic" => panic!("a panic in {at}"),
            "panic_value" => std::panic::panic_any(Bomb),
            "panic_thread" => {
                let joined = std::thread::spawn(|| panic!("a panic in another thread")).join();
                Err(Error::Misuse(format!("the thread ended: {}", joined.is_err())))
            }
            "error" => Err(Error::Context {
                doing: format!("doing {at}"),
                source: Box::new(Error::Misuse("a failure of its own".into())),
            }),
            "user_error" => Err(Error::config("reward.how", "a mistake of the user")),
            "interrupt" => Err(Error::Interrupted),
            "log" => {
                tracing::info!(answer = 42, "a message from {at}");
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

impl RewardScorer for Hostile {
    fn name(&self) -> &str {
        if self.0.at == "name" {
            panic!("a panic in name");
        }
        "hostile"
    }

    fn differentiable(&self) -> bool {
        if self.0.at == "differentiable" {
            panic!("a panic in differentiable");
        }
        true
    }

    fn prepare(&mut self, _: &Video) -> Result<Target> {
        self.0.misbehave("prepare")?;
        Ok(Target { tensors: [("weights".to_string(), Tensor::full([2, 2], 0.25))].into() })
    }

    fn score(&mut self, video: &Video, prompt: &str, target: &Target, grad: Grad) -> Result<(Score, Option<Pullback>)> {
        self.0.misbehave("score")?;
        self.0.calls += 1;
        if self.0.is("score", "missing") {
            return Ok((Score::Missing { reason: format!("nothing in {prompt}") }, None));
        }
        let weights: f32 = target.tensors["weights"].f32s()?.iter().sum();
        let frames = video.frames();
        let mean = frames.f32s()?.iter().map(|v| f64::from(*v)).sum::<f64>() / frames.len() as f64 * f64::from(weights);
        let value = if self.0.is("score", "nan") { f64::NAN } else { mean };
        let details = [("pixels".to_string(), frames.len() as f64)].into();
        if !grad.is_on() || self.0.is("score", "no_pullback") {
            return Ok((Score::Value { value, details }, None));
        }
        let (own, shape) = (self.0.clone(), frames.shape().to_vec());
        if self.0.at == "drop_pullback" {
            ARMED.store(true, Ordering::SeqCst);
        }
        let trap = Trap;
        let pullback = Pullback::new(move |cotangent| {
            let _trap = trap;
            own.misbehave("pull")?;
            let count = shape.iter().product::<usize>();
            let slope = cotangent.item()? / count as f32;
            match own.how.as_str() {
                "shape" if own.at == "pull" => Ok(Tensor::full([1, 2, 3], slope)),
                "dtype" if own.at == "pull" => Tensor::new(vec![1i64; count], shape),
                "nan" if own.at == "pull" => Ok(Tensor::full(shape, f32::NAN)),
                _ => Ok(Tensor::full(shape, slope)),
            }
        });
        Ok((Score::Value { value, details }, Some(pullback)))
    }

    fn on_missing(&self) -> OnMissing {
        match self.0.at.as_str() {
            "on_missing" => panic!("a panic in on_missing"),
            _ => OnMissing::Value(-1.0),
        }
    }
}

struct Trap;
impl Drop for Trap {
    fn drop(&mut self) {
        if ARMED.swap(false, Ordering::SeqCst) {
            panic!("a panic in the drop of a pullback");
        }
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        if self.0.is("drop", "panic") {
            panic!("a panic in drop");
        }
    }
}

roll_plugin::export_plugin!(
    roll_plugin::component!(
        Reward,
        RewardScorer,
        "hostile",
        "Misbehaves where and how it is told",
        Misbehaviour,
        |options: Misbehaviour, _: &roll_plugin::BuildContext| make(options)
    ),
    roll_plugin::component!(Reward, RewardScorer, "toy", "Toy", toy::Options, toy::reward),
    roll_plugin::Registration {
        planner: Some(toy::PLANNERS[0]),
        ..roll_plugin::component!(Model, Model, "toy", "Toy", toy::Options, toy::model)
    },
    roll_plugin::Registration {
        planner: Some(toy::PLANNERS[1]),
        ..roll_plugin::component!(Strategy, Strategy, "toy", "Toy", toy::Options, toy::strategy)
    },
    roll_plugin::Registration {
        planner: Some(toy::PLANNERS[2]),
        ..roll_plugin::component!(Algorithm, Algorithm, "toy", "Toy", toy::Options, toy::algorithm)
    },
    roll_plugin::component!(Environment, Environment, "toy", "Toy", toy::Options, toy::environment),
);
