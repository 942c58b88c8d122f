//! [`LanguageModel`] across the boundary.

use crate::abi::{
    RollGeneration, RollLanguageTable, RollList, RollMessage, RollOwned, RollSampling, RollStr, RollTokenStats,
};

use super::crossing::crossing;
use super::foreign::{Calls, Foreign};
use super::foreign_model::{ForeignModel, Target};
use super::memory::{list, own, take as take_list, text};
use super::pullback;
use super::source::Source;
use super::tensor::{share, take};
use super::wire::{Answer, Lend};
use crate::{Adapter, Error, Generation, Grad, LanguageModel, Message, Pullback, Result, Sampling, Tensor, TokenStats};

crossing! {
    LanguageModel for ForeignModel, table RollLanguageTable of Target, through of {
        ref fn tokenize(text: &str) -> Vec<u32>;
        ref fn detokenize(tokens: &[u32]) -> String;
        ref fn render_chat(messages: &[Message], continue_as_assistant: bool) -> String;
        ref fn end_tokens() -> Vec<u32>, or Vec::new();
        ref fn context_length() -> usize, or usize::MAX;
        mut fn generate(prompts: &[Vec<u32>], sampling: &Sampling) -> Vec<Generation>, then one_each;
        mut fn evaluate(tokens: &Tensor, mask: &Tensor, adapter: Adapter, grad: Grad) -> (TokenStats, Option<Pullback>);
        mut fn hidden_states(tokens: &Tensor, mask: &Tensor, adapter: Adapter) -> Tensor;
    }
    by hand [] {}
}

fn of(model: &mut Target) -> Result<&mut dyn LanguageModel> {
    model.as_language().ok_or_else(|| Error::Misuse("this is not a language model".into()))
}

impl Calls<RollLanguageTable> for ForeignModel {
    fn callee(&self) -> (&Foreign, Option<&RollLanguageTable>) {
        (&self.object, self.language.as_ref())
    }
}

impl ForeignModel {
    /// Limits of single prompts do not cross: tokens beyond a prompt's own limit are those that would have come next,
    /// and are cut off here.
    fn one_each(
        &self,
        mut made: Vec<Generation>,
        prompts: &[Vec<u32>],
        sampling: &Sampling,
    ) -> Result<Vec<Generation>> {
        if made.len() != prompts.len() {
            return Err(Error::Misuse(format!("{} continuations of {} prompts", made.len(), prompts.len())));
        }
        for (index, generation) in made.iter_mut().enumerate() {
            generation.tokens.truncate(sampling.limit(index));
            generation.log_probs.truncate(sampling.limit(index));
        }
        Ok(made)
    }
}

impl Lend for [Vec<u32>] {
    type Wire = RollList<RollList<u32>>;
    type Lent = Vec<RollList<u32>>;
    type Received = Vec<Vec<u32>>;
    fn lend(&self) -> Self::Lent {
        self.iter().map(|tokens| RollList::lend(tokens)).collect()
    }
    fn wire(lent: &mut Self::Lent) -> Self::Wire {
        RollList::lend(lent)
    }
    unsafe fn receive(wire: Self::Wire) -> Result<Self::Received> {
        // SAFETY: as the caller promises.
        unsafe { list(wire)?.iter().map(|tokens| Ok(list(*tokens)?.to_vec())).collect() }
    }
}

impl Lend for [Message] {
    type Wire = RollList<RollMessage>;
    type Lent = Vec<RollMessage>;
    type Received = Vec<Message>;
    fn lend(&self) -> Self::Lent {
        let message = |m: &Message| RollMessage { role: RollStr::lend(&m.role), content: RollStr::lend(&m.content) };
        self.iter().map(message).collect()
    }
    fn wire(lent: &mut Self::Lent) -> Self::Wire {
        RollList::lend(lent)
    }
    unsafe fn receive(wire: Self::Wire) -> Result<Self::Received> {
        // SAFETY: as the caller promises.
        unsafe { list(wire)?.iter().map(|m| Ok(Message::new(text(m.role)?, text(m.content)?))).collect() }
    }
}

impl Lend for Sampling {
    type Wire = *const RollSampling;
    type Lent = (RollSampling, Vec<RollStr>);
    type Received = Sampling;
    fn lend(&self) -> Self::Lent {
        let stop: Vec<_> = self.stop.iter().map(|s| RollStr::lend(s)).collect();
        let sampling = RollSampling {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            // A smaller number where every prompt has a limit below it.
            max_new_tokens: self.limits.iter().max().map_or(self.max_new_tokens, |most| self.max_new_tokens.min(*most)),
            stop: RollList::lend(&stop),
            seed: self.seed,
            numbers: RollList::lend(&self.numbers),
        };
        (sampling, stop)
    }
    fn wire((sampling, _): &mut Self::Lent) -> Self::Wire {
        sampling
    }
    unsafe fn receive(wire: Self::Wire) -> Result<Sampling> {
        // SAFETY: as the caller promises.
        unsafe {
            let sampling = &*wire;
            let stop = list(sampling.stop)?.iter().map(|s| Ok(text(*s)?.to_string()));
            Ok(Sampling {
                temperature: sampling.temperature,
                top_p: sampling.top_p,
                top_k: sampling.top_k,
                max_new_tokens: sampling.max_new_tokens,
                limits: Vec::new(),
                stop: stop.collect::<Result<_>>()?,
                seed: sampling.seed,
                numbers: list(sampling.numbers)?.to_vec(),
            })
        }
    }
}

impl Answer for Vec<Generation> {
    type Wire = RollOwned<RollGeneration>;
    fn give(self) -> Self::Wire {
        let item = |g: &Generation| RollGeneration {
            tokens: RollList::lend(&g.tokens),
            log_probs: RollList::lend(&g.log_probs),
        };
        own(self.iter().map(item).collect(), self)
    }
    unsafe fn take(wire: Self::Wire, _: &Source) -> Result<Self> {
        // SAFETY: as the caller promises; the items live until the list is released.
        unsafe {
            let copy = |g: &RollGeneration| {
                let (tokens, log_probs) = (list(g.tokens)?.to_vec(), list(g.log_probs)?.to_vec());
                Ok(Generation { tokens, log_probs, ..Generation::default() })
            };
            take_list(wire, |items| items.iter().map(copy).collect())
        }
    }
}

impl Answer for (TokenStats, Option<Pullback>) {
    type Wire = RollTokenStats;
    fn give(self) -> RollTokenStats {
        let (stats, pullback) = self;
        let (log_probs, entropy) = (share(&stats.log_probs), share(&stats.entropy));
        RollTokenStats { log_probs, entropy, pullback: pullback::give(pullback) }
    }
    unsafe fn take(wire: RollTokenStats, source: &Source) -> Result<Self> {
        // SAFETY: as the caller promises; each is taken once, whatever happens to the others.
        let (pullback, log_probs, entropy) =
            unsafe { (pullback::take(wire.pullback, source), take(wire.log_probs), take(wire.entropy)) };
        Ok((TokenStats { log_probs: log_probs?, entropy: entropy? }, pullback))
    }
}
