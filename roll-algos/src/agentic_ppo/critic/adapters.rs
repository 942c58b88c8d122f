//! The critic's own adapters on the policy's frozen weights, and their optimizer.

use roll_core::model::flat;
use roll_core::{
    Adapter, BranchAdapters, Communicator, Error, LanguageModel, Model, Noise, Pullback, Result, ResultExt, StateDict,
    Tensor,
};

use super::head::AdamStep;
use crate::agentic_ppo::NAME;
use crate::update::language;

/// Names of the flat vectors in a checkpoint.
const VECTORS: [&str; 3] = ["critic", "critic_mean", "critic_square"];

/// Adapters of a critic.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CriticLora {
    /// Rank of the critic's own LoRA on the policy's frozen weights. 0: it has none, and its head reads the hidden
    /// states of the policy as they are.
    pub rank: usize,
    /// Scale numerator; `null`: the rank.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub alpha: Option<f64>,
    /// Layers that have it, by the end of their name; empty: all linear layers of the blocks.
    pub targets: Vec<String>,
    /// Learning rate; that of the head is `critic_learning_rate`.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub learning_rate: f64,
}

impl Default for CriticLora {
    fn default() -> Self {
        Self { rank: 0, alpha: None, targets: Vec::new(), learning_rate: 1e-4 }
    }
}

impl CriticLora {
    /// Whether there are adapters.
    pub fn is_on(&self) -> bool {
        self.rank > 0
    }
}

/// The adapters. Every rank holds all of them and their moments.
pub(super) struct Adapters {
    network: Box<dyn Model>,
    /// First and second moments of Adam.
    moments: [Vec<f32>; 2],
}

impl Adapters {
    /// On the frozen weights of `model`; they begin as if there were none.
    pub(super) fn open(options: &CriticLora, model: &mut dyn Model, seed: u64) -> Result<Self> {
        let CriticLora { rank, alpha, targets, .. } = options.clone();
        let adapters = BranchAdapters { rank, alpha: alpha.unwrap_or(rank as f64), targets };
        // Other values than those of the policy's adapters, which have the run's seed.
        let noise = Noise::new(seed ^ 0x6372_6974_6963);
        let mut network = language(model, NAME)?
            .branch(&adapters, &noise)
            .while_doing(|| "making the critic's adapters (`algo.critic_lora`)".into())?;
        // An error now rather than after the first rollout.
        let (token, mask) = (Tensor::new(vec![0i64], [1, 1])?, Tensor::new(vec![1u8], [1, 1])?);
        language(&mut *network, NAME)?.record_hidden_states(&token, &mask)?;
        let zeros = vec![0.0; network.parameter_count()];
        Ok(Self { network, moments: [zeros.clone(), zeros] })
    }

    fn language(&mut self) -> Result<&mut dyn LanguageModel> {
        language(&mut *self.network, NAME)
    }

    /// Hidden states of `tokens`.
    pub(super) fn states(&mut self, tokens: &Tensor, mask: &Tensor) -> Result<Tensor> {
        self.language()?.hidden_states(tokens, mask, Adapter::On)
    }

    /// The same, to be pulled back.
    pub(super) fn record(&mut self, tokens: &Tensor, mask: &Tensor) -> Result<(Tensor, Pullback)> {
        self.language()?.record_hidden_states(tokens, mask)
    }

    /// Gradients of pulls since, of all ranks.
    pub(super) fn gradient(&mut self, ranks: &dyn Communicator) -> Result<Vec<f32>> {
        let mut gradient = vec![0.0; self.network.parameter_count()];
        self.network.take_gradients(&mut gradient)?;
        ranks.all_reduce(&mut gradient)?;
        Ok(gradient)
    }

    /// Forgets the gradients of pulls.
    pub(super) fn forget(&mut self) -> Result<()> {
        let mut gradient = vec![0.0; self.network.parameter_count()];
        self.network.take_gradients(&mut gradient)
    }

    /// Step number `step` of Adam, from 1.
    pub(super) fn update(&mut self, gradient: &[f32], step: i32, learning_rate: f64) -> Result<()> {
        let step = AdamStep::new(step, learning_rate);
        let mut parameters = self.parameters()?;
        let [means, squares] = &mut self.moments;
        let moments = means.iter_mut().zip(squares);
        for ((parameter, g), (mean, square)) in parameters.iter_mut().zip(gradient).zip(moments) {
            let mut moved = [*parameter, *mean, *square].map(f64::from);
            let [p, m, s] = &mut moved;
            step.moves(p, f64::from(*g), m, s);
            [*parameter, *mean, *square] = moved.map(|value| value as f32);
        }
        self.network.write_parameters(&parameters)
    }

    fn parameters(&self) -> Result<Vec<f32>> {
        let mut values = vec![0.0; self.network.parameter_count()];
        self.network.read_parameters(&mut values)?;
        Ok(values)
    }

    /// Adapters and moments, for a checkpoint.
    pub(super) fn tensors(&self) -> Result<StateDict> {
        let parameters = self.parameters()?;
        let [mean, square] = &self.moments;
        let vectors: [&[f32]; 3] = [&parameters, mean, square];
        let named: Vec<(&str, &[f32])> = VECTORS.into_iter().zip(vectors).collect();
        flat::to_named(self.network.parameters(), &named)
    }

    /// Restores [`Adapters::tensors`].
    pub(super) fn load(&mut self, tensors: &StateDict) -> Result<()> {
        let found = flat::from_named(self.network.parameters(), &VECTORS, tensors)?;
        let [parameters, mean, square] = <[Vec<f32>; 3]>::try_from(found)
            .map_err(|found| Error::Misuse(format!("{} vectors of the critic in place of 3", found.len())))?;
        self.network.write_parameters(&parameters)?;
        self.moments = [mean, square];
        Ok(())
    }
}
