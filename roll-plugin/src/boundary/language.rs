//! [`LanguageModel`] across the boundary: methods of a model.

use serde_json::Value as Json;

use super::remote::remote;
use super::remote_model::RemoteModel;
use crate::{Adapter, Error, Generation, Grad, LanguageModel, Message, Pullback, Result, Sampling, Tensor, TokenStats};

remote! {
    trait LanguageModel for RemoteModel {
        fn tokenize(&self, text: &str) -> Result<Vec<u32>>;
        fn detokenize(&self, tokens: &[u32]) -> Result<String>;
        fn render_chat(&self, messages: &[Message], continue_as_assistant: bool) -> Result<String> {
            Err(Error::Unsupported("this model has no chat template".into()))
        }
        fn render_chat_with_tools(&self, messages: &[Message], tools: &[Json], continue_as_assistant: bool)
            -> Result<Option<String>> { Ok(None) }
        fn end_tokens(&self) -> Vec<u32> { Vec::new() }
        fn context_length(&self) -> usize { usize::MAX }
        fn generate(&mut self, prompts: &[Vec<u32>], sampling: &Sampling) -> Result<Vec<Generation>>,
            then one_each(prompts);
        fn hidden_states(&mut self, tokens: &Tensor, mask: &Tensor, adapter: Adapter) -> Result<Tensor> {
            Err(Error::Unsupported("this language model does not give its hidden states, which a critic reads".into()))
        }
        fn evaluate(&mut self, tokens: &Tensor, mask: &Tensor, adapter: Adapter, grad: Grad)
            -> Result<(TokenStats, Option<Pullback>)>;
    }
}

impl RemoteModel {
    fn one_each(&self, made: Vec<Generation>, prompts: &[Vec<u32>]) -> Result<Vec<Generation>> {
        match made.len() == prompts.len() {
            true => Ok(made),
            false => Err(Error::Misuse(format!("{} continuations of {} prompts", made.len(), prompts.len()))),
        }
    }
}
