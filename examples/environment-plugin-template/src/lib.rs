use roll_plugin::serde::{Deserialize, Serialize};
use roll_plugin::{Environment, Observation, Result, Transition};

/// The options of the environment in the configuration.
#[derive(Serialize, Deserialize)]
#[serde(crate = "roll_plugin::serde", default)]
struct Options {
    turns: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self { turns: 3 }
    }
}

roll_plugin::export_environment!("my_environment", "Say the letter that is shown", Options, |options: Options, _: &_| {
    Ok(MyEnvironment { turns: options.turns, seed: 0, done: 0 })
});

/// Shows a letter each turn and rewards the answer that repeats it.
struct MyEnvironment {
    turns: u32,
    seed: u64,
    done: u32,
}

impl MyEnvironment {
    /// Returns the letter of this turn. It depends on the seed alone, because the episodes of a group share their
    /// start.
    fn letter(&self) -> char {
        char::from(b'A' + (self.seed.wrapping_add(u64::from(self.done)) % 26) as u8)
    }
}

impl Environment for MyEnvironment {
    fn reset(&mut self, seed: u64) -> Result<Observation> {
        (self.seed, self.done) = (seed, 0);
        Ok(Observation::text(self.letter().to_string()))
    }
    fn step(&mut self, action: &str) -> Result<Transition> {
        let right = action.trim() == format!("<answer>{}</answer>", self.letter());
        self.done += 1;
        Ok(Transition {
            observation: Observation::text(self.letter().to_string()),
            reward: if right { 1.0 } else { 0.0 },
            terminated: self.done >= self.turns,
            truncated: false,
            valid: action.contains("<answer>"),
        })
    }
    fn instructions(&self) -> String {
        "Answer with the letter that is shown, in the form <answer>A</answer>.".into()
    }
}
