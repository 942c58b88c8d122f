//! Estimates of the memory and time of a run, made by its components before anything is opened.
//!
//! The strategy states how it shards the work ([`Division`]), and the algorithm how often it passes through the model
//! ([`Passes`]). From both ([`PlanInput`]), the model computes bytes and seconds ([`Needs`]). Everything follows from
//! options, so that a plan costs no memory; a model may read the headers of its files.

use serde::{Deserialize, Serialize};

use crate::{BuildContext, Options, Result, WeightPlacement};

/// How a component takes part in a plan. See [`crate::Registration::planner`].
#[derive(Clone, Copy)]
#[allow(missing_docs)] // each variant plans for the kind that it is called after
pub enum Planner {
    Algorithm(&'static (dyn Fn(&Options) -> Result<Passes> + Send + Sync)),
    Strategy(&'static (dyn Fn(&Options) -> Result<Division> + Send + Sync)),
    Model(&'static (dyn Fn(&Options, &PlanInput, &BuildContext) -> Result<Needs> + Send + Sync)),
    /// Memory and time of a reward's networks. The context is one of a check ([`BuildContext::headers_only`]).
    Reward(&'static (dyn Fn(&Options, &PlanInput, &BuildContext) -> Result<Needs> + Send + Sync)),
}

/// How often one sample of one step passes through the model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Passes {
    /// Forward passes.
    pub forward: usize,
    /// Number of forward passes that are differentiated. They are the last ones.
    pub pulled: usize,
    /// `[denoising steps, trained steps]`, if a denoising step makes more than one pass: with guidance it makes two.
    /// Absent: every pass is a denoising step.
    #[serde(default)]
    pub steps: Option<[usize; 2]>,
    /// Videos of a sample that are compared with one another. Absent: a sample has one video, whose score is
    /// back-propagated.
    #[serde(default)]
    pub videos: Option<Videos>,
    /// Passes that are recorded at once, before they are pulled back. Absent: [`Videos::at_once`], or all `pulled`
    /// passes if `videos` is absent, too.
    #[serde(default)]
    pub held: Option<usize>,
    /// `[videos decoded without gradient, videos whose decoding is pulled back]`. The decodings that are pulled back
    /// follow one another. Absent: all [`Videos::count`] videos without gradient, or one video with gradient if
    /// `videos` is absent, too.
    #[serde(default)]
    pub decoded: Option<[usize; 2]>,
    /// Further passes without a gradient: passes of reference policies, and passes that only weight a loss. Absent: one
    /// for each trained step.
    #[serde(default)]
    pub references: Option<usize>,
    /// Whether passes of reference policies run with the adapter that training starts from. The model keeps a copy of
    /// it.
    #[serde(default)]
    pub reference_is_start: bool,
    /// Passes of a language model over texts, in place of all of the above. Empty: the model makes videos.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub texts: Vec<TextPass>,
}

/// A pass of a step over texts. Numbers are upper bounds, over all ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TextPass {
    /// The phase of the step: `rollout`, `update`.
    pub phase: String,
    /// Sequences. If a step makes several updates, the sequences of one update.
    pub rows: usize,
    /// Consecutive sequences that one rank computes; 0 means 1.
    pub group: usize,
    /// Sequences that a rank computes at once.
    pub at_once: usize,
    /// Tokens of a sequence. `None`: the context length of the model.
    pub tokens: Option<usize>,
    /// Tokens at the end of a sequence that the model generates; 0: the model reads given texts.
    pub generated: usize,
    /// Whether the sequences of a group have the same prompt.
    pub shared_prompt: bool,
    /// Whether sequences continue in a later call, for which the KV cache is kept.
    pub continues: bool,
    /// Whether the pass is recorded and pulled back.
    pub grad: bool,
    /// Whether the reference policy, the model without its adapter, also evaluates the sequences.
    pub reference: bool,
    /// Hidden states per token that are kept in host memory.
    pub hidden_states: usize,
    /// Whether the pass overlaps the other passes, and has a copy of the trained parameters.
    pub ahead: bool,
}

/// Videos whose scores have no gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Videos {
    /// Number of videos. Each is decoded once, and nothing is pulled back through the decoder.
    pub count: usize,
    /// Passes that are recorded at once before they are pulled back.
    pub at_once: usize,
}

impl Passes {
    /// `[denoising steps, trained steps]`: the field, or its meaning if it is absent.
    pub fn steps(&self) -> [usize; 2] {
        self.steps.unwrap_or([self.forward, self.pulled])
    }

    /// Passes that are recorded at once: the field, or its meaning if it is absent.
    pub fn held(&self) -> usize {
        self.held.unwrap_or(self.videos.map_or(self.pulled, |videos| videos.at_once))
    }

    /// `[videos decoded without gradient, with gradient]`: the field, or its meaning if it is absent.
    pub fn decoded(&self) -> [usize; 2] {
        self.decoded.unwrap_or(self.videos.map_or([0, 1], |videos| [videos.count, 0]))
    }

    /// Whether any pass is of a reference policy.
    pub fn needs_reference(&self) -> bool {
        self.texts.is_empty() || self.texts.iter().any(|pass| pass.reference)
    }

    /// Further passes without a gradient: the field, or its meaning if it is absent.
    pub fn references(&self) -> usize {
        let [_, trained_steps] = self.steps();
        self.references.unwrap_or(trained_steps)
    }
}

/// How a strategy shards parameters, gradients and optimizer states over the ranks. The default is one rank that holds
/// everything, with AdamW's two moments in f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Division {
    /// Whether the strategy trains on all ranks of a job, or on one.
    pub all_ranks: bool,
    /// Stage in the sense of ZeRO (Rajbhandari et al. 2020): 0 shards nothing, 1 optimizer states, 2 gradients too,
    /// 3 frozen weights too.
    pub stage: u8,
    /// Where the strategy wants the frozen weights; as [`crate::Strategy::weight_placement`].
    pub placement: Option<WeightPlacement>,
    /// Maximum number of trained parameters of a rank for which the optimizer state is on a GPU, if the run has a GPU.
    /// The state of more parameters is in host memory. With 0 every state is in host memory.
    #[serde(default)]
    pub state_on_gpu: usize,
    /// Whether communication overlaps computation.
    pub overlap_comm: bool,
    /// Whether the strategy reads all trained parameters into host memory at once to update them. It does not if the
    /// optimizer state is on a GPU.
    #[serde(default)]
    pub copies_parameters: bool,
    /// Maximum number of trained elements that are moved between ranks at a time. A larger tensor is moved as a whole.
    /// 0: nothing is moved.
    #[serde(default)]
    pub bucket: usize,
    /// Ranks that work on one sample. 0 and 1: each rank has samples of its own.
    #[serde(default)]
    pub token_ranks: usize,
}

impl Division {
    /// Whether the sums of the gradients of `n` trained parameters are on a GPU. Several ranks sum them in host memory.
    pub fn sums_are_on_gpu(&self, n: usize, ranks: usize, has_gpu: bool) -> bool {
        has_gpu && ranks == 1 && n <= self.state_on_gpu
    }

    /// Memory of the strategy on each of `ranks` for `n` trained parameters. If `has_gpu`, the parameters are on a GPU.
    /// The GPU also holds the optimizer's state if [`Division::state_on_gpu`] allows it.
    pub fn memory(&self, n: usize, ranks: usize, has_gpu: bool) -> Vec<MemoryItem> {
        // The first stages of ZeRO that shard optimizer states and gradients.
        const OPTIMIZER_STATES: u8 = 1;
        const GRADIENTS: u8 = 2;
        const F32_BYTES: usize = size_of::<f32>();
        // AdamW has two moments per parameter.
        const STATE_BYTES: usize = 2 * F32_BYTES;
        let is_sharded = |first_stage: u8| self.stage >= first_stage && ranks > 1;
        let elements = |first_stage| if is_sharded(first_stage) { n.div_ceil(ranks) } else { n };
        let elements_in_words =
            |first_stage| if is_sharded(first_stage) { format!("{n} / {ranks}") } else { n.to_string() };
        let item = |name, bytes, is_on_gpu, formula| {
            let [device, host] = if is_on_gpu { [bytes, 0] } else { [0, bytes] };
            MemoryItem::new(name, [device, host], formula)
        };
        let state_is_on_gpu = has_gpu && elements(OPTIMIZER_STATES) <= self.state_on_gpu;
        let sums_are_on_gpu = self.sums_are_on_gpu(n, ranks, has_gpu);
        let mut items = vec![
            item(
                "sums of gradients",
                F32_BYTES * elements(GRADIENTS),
                sums_are_on_gpu,
                format!("{} x {F32_BYTES} B", elements_in_words(GRADIENTS)),
            ),
            item(
                "optimizer state",
                STATE_BYTES * elements(OPTIMIZER_STATES),
                state_is_on_gpu,
                format!("{} x {STATE_BYTES} B", elements_in_words(OPTIMIZER_STATES)),
            ),
        ];
        if self.copies_parameters && !state_is_on_gpu {
            let copy_is_on_gpu = false;
            let formula = format!("{n} x {F32_BYTES} B, where they are updated");
            items.push(item("copy of the parameters", F32_BYTES * n, copy_is_on_gpu, formula));
        }
        items
    }
}

/// Speeds from which a model estimates times.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Speed {
    /// Floating-point operations a second that a rank sustains.
    pub flops: f64,
    /// Bytes a second between ranks.
    pub link: f64,
    /// Bytes a second at which streamed weights are read.
    pub read: f64,
}

/// The work that a model plans for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlanInput {
    /// The model's name of a published network, which is planned for instead of the network in the configured files.
    pub network: Option<String>,
    /// Frames of a video.
    pub frames: usize,
    /// Height and width in pixels. `None`: the model chooses its usual size.
    pub size: Option<[usize; 2]>,
    /// Bytes of memory of each device. `None`: the device computes in host memory.
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
    /// Speeds of a rank.
    pub speed: Speed,
}

impl PlanInput {
    /// Videos that a rank scores in a step: `[without gradient, with gradient]`.
    pub fn scored(&self) -> [usize; 2] {
        self.passes.decoded().map(|videos| videos * self.samples)
    }

    /// Ranks that the strategy trains on.
    pub fn ranks(&self) -> usize {
        if self.division.all_ranks { self.ranks.max(1) } else { 1 }
    }
}

/// Memory and time of one rank.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Needs {
    /// The work in words, such as "81 frames of 832x480, 32760 tokens".
    pub work: String,
    /// Numbers for programs that read the plan, by name: `tokens`.
    pub facts: std::collections::BTreeMap<String, f64>,
    /// Memory by item.
    pub memory: Vec<MemoryItem>,
    /// Memory on devices of rewards (`reward.device`), by the name of the device.
    #[serde(default)]
    pub other_devices: std::collections::BTreeMap<String, Vec<MemoryItem>>,
    /// A step by phase; empty if the phases are unknown.
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
    /// The computation of the bytes, for people: "1000 / 4 x 8 B".
    pub formula: String,
    /// The phase in which the memory is held; `None`: in all phases. Memory of two different phases is never held at
    /// the same time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
}

impl MemoryItem {
    /// Memory that is held in all phases: bytes on the device and in host memory.
    pub fn new(name: &str, [device, host]: [usize; 2], formula: String) -> Self {
        Self { name: name.into(), device, host, formula, phase: None }
    }

    /// Bytes on the device and on the host.
    pub fn bytes(&self) -> usize {
        self.device + self.host
    }

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

    /// The sum of `bytes` over the items that are held in `phase`: the items of this phase, and the items without a
    /// phase.
    pub fn held_in(&self, phase: Option<&str>, bytes: impl Fn(&MemoryItem) -> usize) -> usize {
        let held = |item: &&MemoryItem| item.phase.is_none() || item.phase.as_deref() == phase;
        self.memory.iter().filter(held).map(bytes).fold(0, usize::saturating_add)
    }

    /// Returns the largest [`Needs::held_in`] of all phases, and its phase. If several phases have the largest sum,
    /// returns the first of them. If there are no phases, returns the sum over all items, and `None`.
    pub fn peak(&self, bytes: impl Fn(&MemoryItem) -> usize) -> (usize, Option<&str>) {
        let mut peak: Option<(usize, &str)> = None;
        for phase in self.phases() {
            let held = self.held_in(Some(phase), &bytes);
            if peak.is_none_or(|(largest, _)| held > largest) {
                peak = Some((held, phase));
            }
        }
        match peak {
            Some((held, phase)) => (held, Some(phase)),
            None => (self.held_in(None, &bytes), None),
        }
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
    /// Duration of the phase.
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
    fn peak_is_the_largest_sum_over_phases() {
        let needs = needs();
        assert_eq!(needs.phases(), ["rollout", "update"]);
        assert_eq!(needs.peak(|item| item.device), (17, Some("rollout")));
        assert_eq!(needs.peak(|item| item.host), (6, Some("update")));
        assert_eq!(needs.peak(|item| item.device + item.host), (22, Some("update")));
        assert_eq!(needs.held_in(None, |item| item.device), 10);
        assert_eq!(Needs::default().peak(|item| item.device), (0, None));
    }

    #[test]
    fn reads_plans_of_older_plugins() {
        let passes: Passes = serde_json::from_str(r#"{"forward": 4, "pulled": 2}"#).unwrap();
        assert_eq!((passes.forward, passes.texts), (4, Vec::new()));
        let item: MemoryItem = serde_json::from_str(r#"{"name": "a", "device": 1, "host": 2, "formula": ""}"#).unwrap();
        assert_eq!(item.phase, None);
        let division = r#"{"all_ranks": true, "stage": 2, "placement": null, "overlap_comm": true}"#;
        let division: Division = serde_json::from_str(division).unwrap();
        assert_eq!((division.bucket, division.token_ranks, division.copies_parameters), (0, 0, false));
    }
}
