//! A component of every kind that fails where and how its options say, to be used linked in and from the library.

pub mod toy;

use roll_plugin::serde::{Deserialize, Serialize};
use roll_plugin::{Error, Registration, Result, tracing};

/// Options of each component: the fault that it has. None by default.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(crate = "roll_plugin::serde", default)]
pub struct Fault {
    /// The method that fails.
    pub at: String,
    /// `panic`, `panic_value`, `panic_thread`, `error`, `user_error`, `interrupt`, `log`; what else a method knows.
    pub how: String,
    /// Number of calls of `score` before the reward fails.
    pub after: u64,
}

/// A payload of a panic whose drop panics too.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("the payload panics when it is dropped");
    }
}

impl Fault {
    /// Whether the fault is this one.
    pub(crate) fn is(&self, at: &str, how: &str) -> bool {
        self.at == at && self.how == how
    }

    /// Fails if `method` is the one that is to fail.
    pub(crate) fn at(&self, method: &str) -> Result<()> {
        if self.at != method {
            return Ok(());
        }
        match self.how.as_str() {
            "panic" => panic!("a panic in {method}"),
            "panic_value" => std::panic::panic_any(Bomb),
            "panic_thread" => {
                let joined = std::thread::spawn(|| panic!("a panic in another thread")).join();
                Err(Error::Misuse(format!("the thread ended: {}", joined.is_err())))
            }
            "error" => Err(Error::Context {
                doing: format!("doing {method}"),
                source: Box::new(Error::Misuse(format!("an error in {method}"))),
            }),
            "user_error" => Err(Error::config("reward.how", "a mistake of the user")),
            "interrupt" => Err(Error::Interrupted),
            "log" => {
                tracing::info!(answer = 42, "a message from {method}");
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

roll_plugin::export_plugin!(
    roll_plugin::component!(Reward, RewardScorer, "hostile", "Fails as it is told", Fault, toy::reward),
    Registration {
        planner: Some(toy::PLANNERS[0]),
        ..roll_plugin::component!(Model, Model, "toy", "Toy", Fault, toy::model)
    },
    Registration {
        planner: Some(toy::PLANNERS[1]),
        ..roll_plugin::component!(Strategy, Strategy, "toy", "Toy", Fault, toy::strategy)
    },
    Registration {
        planner: Some(toy::PLANNERS[2]),
        ..roll_plugin::component!(Algorithm, Algorithm, "toy", "Toy", Fault, toy::algorithm)
    },
    roll_plugin::component!(Model, Model, "bigram", "Characters", Fault, toy::bigram),
    roll_plugin::component!(Environment, Environment, "toy", "Toy", Fault, toy::environment),
);
