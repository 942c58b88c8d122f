//! [`LanguageModel`] across the boundary.

use std::ffi::c_void;

use super::abi::{RollError, RollOwned, RollPullback, RollStr, RollTensor};
use super::call::serve;
use super::data::{Lent, slice};
use super::layout::boundary;
use super::model::{ForeignModel, Target};
use super::pullback;
use crate::{Adapter, Error, Generation, Grad, LanguageModel, Message, Pullback, Result, Sampling, Tensor, TokenStats};

boundary! {
    /// A list of tokens.
    #[derive(Clone, Copy)]
    pub struct RollTokens {
        pub tokens: *const u32,
        pub len: usize,
    }
}

boundary! {
    /// Arguments of `generate`; the numbers are those of [`Sampling`].
    #[derive(Clone, Copy)]
    pub struct RollGenerateInput {
        pub prompts: *const RollTokens,
        pub prompt_count: usize,
        pub temperature: f64,
        pub top_p: f64,
        pub top_k: usize,
        pub max_new_tokens: usize,
        pub stop: *const RollStr,
        pub stop_count: usize,
        pub seed: u64,
        pub numbers: *const u64,
        pub number_count: usize,
    }
}

boundary! {
    /// One generated continuation.
    #[derive(Clone, Copy)]
    pub struct RollGeneration {
        pub tokens: *const u32,
        pub token_count: usize,
        pub log_probs: *const f32,
        pub log_prob_count: usize,
    }
}

boundary! {
    /// Arguments of `evaluate`.
    #[derive(Clone, Copy)]
    pub struct RollEvaluateInput {
        pub tokens: *const RollTensor,
        pub mask: *const RollTensor,
        pub adapter: u32,
        pub record: u32,
    }
}

boundary! {
    /// Result of `evaluate`.
    #[derive(Default)]
    pub struct RollTokenStats {
        pub log_probs: RollTensor,
        pub entropy: RollTensor,
        pub pullback: RollPullback,
    }
}

boundary! {
    /// As [`Message`].
    #[derive(Clone, Copy)]
    pub struct RollMessage {
        pub role: RollStr,
        pub content: RollStr,
    }
}

boundary! {
    /// Arguments of `render_chat`.
    #[derive(Clone, Copy)]
    pub struct RollChatInput {
        pub messages: *const RollMessage,
        pub message_count: usize,
        pub continue_as_assistant: u32,
    }
}

boundary! {
    /// What a language model says of itself.
    #[derive(Default)]
    pub struct RollLanguageFacts {
        pub end_tokens: RollOwned<u32>,
        pub context_length: usize,
    }
}

boundary! {
    /// The functions of a language model.
    #[derive(Clone, Copy)]
    pub struct RollLanguageTable {
        pub tokenize: unsafe extern "C" fn(
            state: *mut c_void,
            text: RollStr,
            out: *mut RollOwned<u32>,
            error: *mut RollError,
        ) -> u32,
        pub detokenize: unsafe extern "C" fn(
            state: *mut c_void,
            tokens: RollTokens,
            out: *mut RollOwned<u8>,
            error: *mut RollError,
        ) -> u32,
        pub generate: unsafe extern "C" fn(
            state: *mut c_void,
            input: *const RollGenerateInput,
            out: *mut RollOwned<RollGeneration>,
            error: *mut RollError,
        ) -> u32,
        pub evaluate: unsafe extern "C" fn(
            state: *mut c_void,
            input: *const RollEvaluateInput,
            out: *mut RollTokenStats,
            error: *mut RollError,
        ) -> u32,
        pub render_chat: unsafe extern "C" fn(
            state: *mut c_void,
            input: *const RollChatInput,
            out: *mut RollOwned<u8>,
            error: *mut RollError,
        ) -> u32,
        pub facts:
            unsafe extern "C" fn(state: *mut c_void, out: *mut RollLanguageFacts, error: *mut RollError) -> u32,
    }
}

pub(super) const TABLE: RollLanguageTable =
    RollLanguageTable { tokenize, detokenize, generate, evaluate, render_chat, facts };

fn of(model: &mut Target) -> Result<&mut dyn LanguageModel> {
    model.as_language().ok_or_else(|| Error::Misuse("this is no language model".into()))
}

unsafe extern "C" fn tokenize(
    state: *mut c_void,
    text: RollStr,
    out: *mut RollOwned<u32>,
    error: *mut RollError,
) -> u32 {
    // SAFETY: lent for this call.
    let body = |model: &mut Target| Ok(RollOwned::new(of(model)?.tokenize(unsafe { text.get() }?)?, ()));
    // SAFETY: as the interface says.
    unsafe { serve(state, out, error, body) }
}

unsafe extern "C" fn detokenize(
    state: *mut c_void,
    tokens: RollTokens,
    out: *mut RollOwned<u8>,
    error: *mut RollError,
) -> u32 {
    let body = |model: &mut Target| {
        // SAFETY: lent for this call.
        let tokens = unsafe { slice(tokens.tokens, tokens.len) }?;
        Ok(RollOwned::text(of(model)?.detokenize(tokens)?))
    };
    // SAFETY: as the interface says.
    unsafe { serve(state, out, error, body) }
}

unsafe extern "C" fn generate(
    state: *mut c_void,
    input: *const RollGenerateInput,
    out: *mut RollOwned<RollGeneration>,
    error: *mut RollError,
) -> u32 {
    let body = |model: &mut Target| {
        // SAFETY: lent for this call.
        let (prompts, sampling) = unsafe {
            let i = &*input;
            let prompts = slice(i.prompts, i.prompt_count)?.iter().map(|p| Ok(slice(p.tokens, p.len)?.to_vec()));
            let stop = slice(i.stop, i.stop_count)?.iter().map(|s| Ok(s.get()?.to_string()));
            let sampling = Sampling {
                temperature: i.temperature,
                top_p: i.top_p,
                top_k: i.top_k,
                max_new_tokens: i.max_new_tokens,
                stop: stop.collect::<Result<_>>()?,
                seed: i.seed,
                numbers: slice(i.numbers, i.number_count)?.to_vec(),
            };
            (prompts.collect::<Result<Vec<_>>>()?, sampling)
        };
        let made = of(model)?.generate(&prompts, &sampling)?;
        let item = |g: &Generation| RollGeneration {
            tokens: g.tokens.as_ptr(),
            token_count: g.tokens.len(),
            log_probs: g.log_probs.as_ptr(),
            log_prob_count: g.log_probs.len(),
        };
        Ok(RollOwned::new(made.iter().map(item).collect(), made))
    };
    // SAFETY: as the interface says.
    unsafe { serve(state, out, error, body) }
}

unsafe extern "C" fn evaluate(
    state: *mut c_void,
    input: *const RollEvaluateInput,
    out: *mut RollTokenStats,
    error: *mut RollError,
) -> u32 {
    let body = |model: &mut Target| {
        // SAFETY: lent for this call.
        let (input, tokens, mask) = unsafe { (&*input, (*(*input).tokens).keep()?, (*(*input).mask).keep()?) };
        let adapter = if input.adapter == 1 { Adapter::On } else { Adapter::Off };
        let grad = if input.record == 1 { Grad::Record } else { Grad::Skip };
        let (stats, pullback) = of(model)?.evaluate(&tokens, &mask, adapter, grad)?;
        Ok(RollTokenStats {
            log_probs: RollTensor::share(&stats.log_probs),
            entropy: RollTensor::share(&stats.entropy),
            pullback: pullback::give(pullback),
        })
    };
    // SAFETY: as the interface says.
    unsafe { serve(state, out, error, body) }
}

unsafe extern "C" fn render_chat(
    state: *mut c_void,
    input: *const RollChatInput,
    out: *mut RollOwned<u8>,
    error: *mut RollError,
) -> u32 {
    let body = |model: &mut Target| {
        // SAFETY: lent for this call.
        let (messages, continues) = unsafe {
            let i = &*input;
            let messages = slice(i.messages, i.message_count)?.iter();
            let messages = messages.map(|m| Ok(Message::new(m.role.get()?, m.content.get()?)));
            (messages.collect::<Result<Vec<_>>>()?, i.continue_as_assistant == 1)
        };
        Ok(RollOwned::text(of(model)?.render_chat(&messages, continues)?))
    };
    // SAFETY: as the interface says.
    unsafe { serve(state, out, error, body) }
}

unsafe extern "C" fn facts(state: *mut c_void, out: *mut RollLanguageFacts, error: *mut RollError) -> u32 {
    let body = |model: &mut Target| {
        let model = of(model)?;
        let end_tokens = RollOwned::new(model.end_tokens(), ());
        Ok(RollLanguageFacts { end_tokens, context_length: model.context_length() })
    };
    // SAFETY: as the interface says.
    unsafe { serve(state, out, error, body) }
}

impl ForeignModel {
    /// Ids that end a turn, and the longest sequence; the calls that ask for them cannot fail.
    fn language_facts(&self) -> (Vec<u32>, usize) {
        let facts: Result<RollLanguageFacts> = self.object.call("facts", |t, state, out, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.language.facts)(state, out, error) }
        });
        let facts = facts.and_then(|facts| {
            // SAFETY: ours, taken once.
            let ends = unsafe { facts.end_tokens.take(|tokens| Ok(tokens.to_vec())) };
            Ok((self.object.blame("facts", ends)?, facts.context_length))
        });
        facts.unwrap_or_else(|error| {
            tracing::error!("a language model does not tell what it is: {}", super::Chain::line(&error));
            (Vec::new(), usize::MAX)
        })
    }
}

impl LanguageModel for ForeignModel {
    fn tokenize(&self, text: &str) -> Result<Vec<u32>> {
        let text = RollStr::lend(text);
        let tokens: RollOwned<u32> = self.object.call("tokenize", |t, state, out, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.language.tokenize)(state, text, out, error) }
        })?;
        // SAFETY: ours, taken once.
        self.object.blame("tokenize", unsafe { tokens.take(|tokens| Ok(tokens.to_vec())) })
    }

    fn detokenize(&self, tokens: &[u32]) -> Result<String> {
        let tokens = RollTokens { tokens: tokens.as_ptr(), len: tokens.len() };
        let text: RollOwned<u8> = self.object.call("detokenize", |t, state, out, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.language.detokenize)(state, tokens, out, error) }
        })?;
        // SAFETY: ours, taken once.
        self.object.blame("detokenize", unsafe { text.take_text() })
    }

    fn render_chat(&self, messages: &[Message], continue_as_assistant: bool) -> Result<String> {
        let lent = |m: &Message| RollMessage { role: RollStr::lend(&m.role), content: RollStr::lend(&m.content) };
        let messages: Vec<RollMessage> = messages.iter().map(lent).collect();
        let input = RollChatInput {
            messages: messages.as_ptr(),
            message_count: messages.len(),
            continue_as_assistant: continue_as_assistant.into(),
        };
        let text: RollOwned<u8> = self.object.call("render_chat", |t, state, out, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.language.render_chat)(state, &input, out, error) }
        })?;
        // SAFETY: ours, taken once.
        self.object.blame("render_chat", unsafe { text.take_text() })
    }

    fn end_tokens(&self) -> Vec<u32> {
        self.language_facts().0
    }

    fn context_length(&self) -> usize {
        self.language_facts().1
    }

    fn generate(&mut self, prompts: &[Vec<u32>], sampling: &Sampling) -> Result<Vec<Generation>> {
        let prompts: Vec<_> = prompts.iter().map(|p| RollTokens { tokens: p.as_ptr(), len: p.len() }).collect();
        let stop: Vec<_> = sampling.stop.iter().map(|s| RollStr::lend(s)).collect();
        let input = RollGenerateInput {
            prompts: prompts.as_ptr(),
            prompt_count: prompts.len(),
            temperature: sampling.temperature,
            top_p: sampling.top_p,
            top_k: sampling.top_k,
            max_new_tokens: sampling.max_new_tokens,
            stop: stop.as_ptr(),
            stop_count: stop.len(),
            seed: sampling.seed,
            numbers: sampling.numbers.as_ptr(),
            number_count: sampling.numbers.len(),
        };
        let made: RollOwned<RollGeneration> = self.object.call("generate", |t, state, out, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.language.generate)(state, &input, out, error) }
        })?;
        let copy = |g: &RollGeneration| {
            // SAFETY: the list is valid until it is released.
            let (tokens, log_probs) =
                unsafe { (slice(g.tokens, g.token_count)?.to_vec(), slice(g.log_probs, g.log_prob_count)?.to_vec()) };
            Ok(Generation { tokens, log_probs })
        };
        // SAFETY: ours, taken once.
        let made = unsafe { made.take(|items| items.iter().map(copy).collect::<Result<Vec<_>>>()) };
        let made = self.object.blame("generate", made)?;
        match made.len() == prompts.len() {
            true => Ok(made),
            false => {
                let problem = format!("{} continuations of {} prompts", made.len(), prompts.len());
                self.object.blame("generate", Err(Error::Misuse(problem)))
            }
        }
    }

    fn evaluate(
        &mut self,
        tokens: &Tensor,
        mask: &Tensor,
        adapter: Adapter,
        grad: Grad,
    ) -> Result<(TokenStats, Option<Pullback>)> {
        let (tokens, mask) = (Lent::new(tokens), Lent::new(mask));
        let input = RollEvaluateInput {
            tokens: tokens.get(),
            mask: mask.get(),
            adapter: (adapter == Adapter::On).into(),
            record: grad.is_on().into(),
        };
        let given: RollTokenStats = self.object.call("evaluate", |t, state, out, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.language.evaluate)(state, &input, out, error) }
        })?;
        // SAFETY: all three are ours, and each is taken once.
        let (pullback, log_probs, entropy) = unsafe {
            let pullback = pullback::take(given.pullback, self.object.source.clone(), None);
            (pullback, given.log_probs.take(), given.entropy.take())
        };
        let log_probs = self.object.blame("evaluate", log_probs)?;
        Ok((TokenStats { log_probs, entropy: self.object.blame("evaluate", entropy)? }, pullback))
    }
}
