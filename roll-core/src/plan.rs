//! The needs of a run, told by its components before anything is opened.
//!
//! The strategy says how it divides the work, the algorithm how often it passes through the model, and the model what
//! follows from both: bytes and seconds. All of it follows from options, so that a plan costs no memory; a model may
//! read the headers of its files.

use serde::{Deserialize, Serialize};

use crate::{BuildContext, Options, Result};

/// How a component takes part in a plan. See [`crate::Registration::planner`].
#[derive(Clone, Copy)]
#[allow(missing_docs)] // each variant plans for the kind that it is called after
pub enum Planner {
    Algorithm(fn(&Options) -> Result<Passes>),
    Strategy(fn(&Options) -> Result<Division>),
    Model(fn(&Options, &PlanInput, &BuildContext) -> Result<Needs>),
}

/// How often one sample of one step passes through the model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Passes {
    /// Forward passes.
    pub forward: usize,
    /// Those among them that are pulled back: the last ones.
    pub pulled: usize,
    /// Denoising steps, and those among them that are trained, where a step makes more than one pass (two of a guided
    /// velocity); absent: one each.
    #[serde(default)]
    pub steps: Option<[usize; 2]>,
    /// Videos of a sample that are compared with one another; absent: one, whose score is back-propagated.
    #[serde(default)]
    pub videos: Option<Videos>,
    /// Passes that are recorded at once, before they are pulled back; absent: all of those, or [`Videos::at_once`].
    #[serde(default)]
    pub held: Option<usize>,
    /// Videos that are decoded without gradient, and those whose decoding is pulled back, one after another; absent:
    /// one of the latter, or [`Videos::count`] of the former.
    #[serde(default)]
    pub decoded: Option<[usize; 2]>,
    /// What is done with a language model, in place of all of the above; absent: the model makes videos.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub language: Option<LanguageWork>,
}

/// What a step does with a language model. Lengths are the most that they may come to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LanguageWork {
    /// What the model writes before it learns from it; `None`: it learns from texts that are there.
    pub rollout: Option<RolloutWork>,
    /// Tokens of a sequence; `None`: the context of the model.
    pub sequence_length: Option<usize>,
    /// Sequences of a step over all ranks, several of which may be parts of one text.
    pub samples: usize,
    /// Sequences of an update over all ranks.
    pub update: usize,
    /// Sequences that are recorded at once, before they are pulled back.
    pub micro_batch: usize,
    /// It is compared with the model that it began as.
    pub reference: bool,
    /// What values are learnt with, where they are.
    pub critic: Option<CriticWork>,
}

/// Conversations that a language model writes its part of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RolloutWork {
    /// Groups over all ranks, which share them; the conversations of one are on the same rank.
    pub groups: usize,
    /// Conversations of a group.
    pub group_size: usize,
    /// The first prompt is the only one, and that of all conversations of a group.
    pub shared_prompts: bool,
    /// Prompts that are continued by one call.
    pub at_once: usize,
    /// Tokens of an answer.
    pub new_tokens: usize,
    /// Answers of a conversation.
    pub answers: usize,
    /// It is written while the step before it trains, by a copy of the model.
    pub ahead: bool,
}

/// What learns the values of states beside a language model, whole on every rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CriticWork {
    /// Rank of adapters of its own on the frozen weights; 0: none.
    pub lora_rank: usize,
    /// Layers that have them, by the end of their name; empty: all that the model gives adapters by itself.
    pub lora_targets: Vec<String>,
    /// Tokens of a sequence that it values.
    pub tokens: usize,
}

/// Videos whose scores have no gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Videos {
    /// How many; each is decoded once, and nothing is pulled back through the decoder.
    pub count: usize,
    /// Passes that are recorded at once before they are pulled back.
    pub at_once: usize,
    /// Passes beside the forward ones, of other policies that are compared with.
    pub references: usize,
}

impl Passes {
    /// Denoising steps, and those among them that are trained.
    pub fn steps(&self) -> [usize; 2] {
        self.steps.unwrap_or([self.forward, self.pulled])
    }

    /// Passes that are recorded at once, before they are pulled back.
    pub fn held(&self) -> usize {
        self.held.unwrap_or(self.videos.map_or(self.pulled, |videos| videos.at_once))
    }

    /// Videos that are decoded without gradient, and those whose decoding is pulled back.
    pub fn decoded(&self) -> [usize; 2] {
        self.decoded.unwrap_or(self.videos.map_or([0, 1], |videos| [videos.count, 0]))
    }

    /// Passes beside the forward ones, of policies that are compared with: without the adapter, one for each trained
    /// step, unless the videos say more.
    pub fn references(&self) -> usize {
        self.videos.map_or(self.steps()[1], |videos| videos.references)
    }
}

/// How a strategy divides parameters and their states among the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Division {
    /// Whether it trains on all ranks of a job, or on one.
    pub all_ranks: bool,
    /// Stage in the sense of ZeRO (Rajbhandari et al. 2020): 0 divides nothing, 1 optimizer states, 2 gradients too,
    /// 3 frozen weights too.
    pub stage: u8,
    /// Where it wants the frozen weights; as [`crate::Strategy::weight_placement`].
    pub placement: Option<WeightPlacement>,
    /// Trained parameters up to which that state is on a GPU, where the run has one; above, and at 0, it is in host
    /// memory.
    #[serde(default)]
    pub state_on_gpu: usize,
    /// Communication overlaps computation.
    pub overlap_comm: bool,
    /// It keeps a copy of the trained parameters in host memory, unless the state is on a GPU.
    #[serde(default)]
    pub copies_parameters: bool,
    /// Trained elements that are moved between ranks at a time, at most, but whole tensors; 0: nothing is.
    #[serde(default)]
    pub bucket: usize,
    /// Ranks that work on one sample; 0 and 1: each rank has samples of its own.
    #[serde(default)]
    pub token_ranks: usize,
}

impl Default for Division {
    /// One rank that holds everything, with AdamW's two moments in f32.
    fn default() -> Self {
        Self {
            all_ranks: false,
            stage: 0,
            placement: None,
            state_on_gpu: 0,
            overlap_comm: false,
            copies_parameters: false,
            bucket: 0,
            token_ranks: 1,
        }
    }
}

/// Where a model keeps its frozen weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightPlacement {
    /// Whole, on the device of each rank.
    Resident,
    /// In files or host memory, brought to the device block by block.
    Streamed,
    /// Divided among the ranks and gathered block by block.
    Sharded,
}

/// Speeds that times follow from.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Speed {
    /// Floating-point operations a second that a rank sustains.
    pub flops: f64,
    /// Bytes a second between ranks.
    pub link: f64,
    /// Bytes a second from where streamed weights are.
    pub read: f64,
}

/// The work that a model plans for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlanInput {
    /// A published network, by the model's own name for it, in place of the files of its options.
    pub network: Option<String>,
    /// Frames of a video.
    pub frames: usize,
    /// Height and width in pixels.
    pub size: Option<[usize; 2]>,
    /// Bytes of the memory of each device; `None` where that is host memory.
    #[serde(default)]
    pub memory: Option<u64>,
    /// Samples that a rank trains on in a step.
    pub samples: usize,
    /// Ranks of the job.
    pub ranks: usize,
    /// Passes of the algorithm over a sample.
    pub passes: Passes,
    /// Division of the work by the strategy.
    pub division: Division,
    /// How fast a rank is.
    pub speed: Speed,
}

/// Memory and time of one rank.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Needs {
    /// The work in words, such as "81 frames of 832x480, 32760 tokens".
    pub work: String,
    /// Numbers worth reading out, by name: `tokens`.
    pub facts: std::collections::BTreeMap<String, f64>,
    /// Memory by item.
    pub memory: Vec<MemoryItem>,
    /// A step by phase; empty where that cannot be told.
    pub time: Vec<PhaseCost>,
    /// Settings that would make the run smaller, with their effect.
    pub hints: Vec<String>,
}

/// Memory of one kind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemoryItem {
    /// Contents of the memory.
    pub name: String,
    /// Bytes on the device.
    pub device: usize,
    /// Bytes in host memory.
    pub host: usize,
    /// How it was computed, for people.
    pub formula: String,
    /// When it is held, where that is not always. What belongs to different phases is never there at the same time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
}

impl MemoryItem {
    /// Its phase and its name.
    pub fn label(&self) -> String {
        match &self.phase {
            Some(phase) => format!("{phase}: {}", self.name),
            None => self.name.clone(),
        }
    }
}

impl Needs {
    /// Phases, in the order of their first items.
    pub fn phases(&self) -> Vec<&str> {
        let mut phases: Vec<&str> = Vec::new();
        for phase in self.memory.iter().filter_map(|item| item.phase.as_deref()) {
            if !phases.contains(&phase) {
                phases.push(phase);
            }
        }
        phases
    }

    /// The sum of what `bytes` says of the items that are held in `phase`: those of the phase, and those without one.
    pub fn held_in(&self, phase: Option<&str>, bytes: impl Fn(&MemoryItem) -> usize) -> usize {
        let held = |item: &&MemoryItem| item.phase.is_none() || item.phase.as_deref() == phase;
        self.memory.iter().filter(held).map(bytes).fold(0, usize::saturating_add)
    }

    /// The largest of these sums over all phases, and its phase, if there are any.
    pub fn peak(&self, bytes: impl Fn(&MemoryItem) -> usize) -> (usize, Option<&str>) {
        let phases = self.phases().into_iter().map(Some);
        // Of equal ones the first.
        let largest =
            phases.map(|phase| (self.held_in(phase, &bytes), phase)).reduce(|a, b| if b.0 > a.0 { b } else { a });
        largest.unwrap_or_else(|| (self.held_in(None, &bytes), None))
    }
}

/// Work of one phase of a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PhaseCost {
    /// The phase.
    pub name: String,
    /// Floating-point operations.
    pub flops: f64,
    /// Bytes moved between ranks or from the weights' files.
    pub moved: f64,
    /// How long it takes.
    pub seconds: f64,
}

/// "1.25 GB", or "31.4 MB" where GB would show no digit.
pub fn in_words(bytes: usize) -> String {
    match bytes as f64 / 1e9 {
        gigabytes if gigabytes >= 0.1 => format!("{gigabytes:.2} GB"),
        gigabytes => format!("{:.1} MB", gigabytes * 1e3),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn needs() -> Needs {
        let item = |name: &str, device: usize, host: usize, phase: Option<&str>| MemoryItem {
            name: name.into(),
            device,
            host,
            formula: String::new(),
            phase: phase.map(Into::into),
        };
        let memory = vec![
            item("weights", 10, 1, None),
            item("keys and values", 7, 0, Some("rollout")),
            item("gradients", 4, 2, Some("update")),
            item("block inputs", 2, 3, Some("update")),
        ];
        Needs { memory, ..Needs::default() }
    }

    #[test]
    fn the_peak_is_that_of_the_phase_that_holds_most() {
        let needs = needs();
        assert_eq!(needs.phases(), ["rollout", "update"]);
        assert_eq!(needs.peak(|item| item.device), (17, Some("rollout")));
        assert_eq!(needs.peak(|item| item.host), (6, Some("update")));
        assert_eq!(needs.peak(|item| item.device + item.host), (22, Some("update")));
        assert_eq!(needs.held_in(None, |item| item.device), 10);
        assert_eq!(Needs::default().peak(|item| item.device), (0, None));
    }

    #[test]
    fn what_an_older_plugin_says_is_read() {
        let passes: Passes = serde_json::from_str(r#"{"forward": 4, "pulled": 2}"#).unwrap();
        assert_eq!((passes.forward, passes.language), (4, None));
        let item: MemoryItem = serde_json::from_str(r#"{"name": "a", "device": 1, "host": 2, "formula": ""}"#).unwrap();
        assert_eq!(item.phase, None);
        let division = r#"{"all_ranks": true, "stage": 2, "placement": null, "overlap_comm": true}"#;
        let division: Division = serde_json::from_str(division).unwrap();
        assert_eq!((division.bucket, division.token_ranks, division.copies_parameters), (0, 0, false));
    }
}
