//! [`LanguageModel`] across the boundary. A model crosses it as one object, which answers these methods in addition to
//! those of [`crate::Model`].

use serde_json::Value as Json;

use super::remote::remote;
use super::remote_model::RemoteModel;
use crate::{
    Adapter, Error, Generation, Grad, LanguageModel, Message, Picture, Pullback, Result, Sampling, Tensor, TokenStats,
};

remote! {
    trait LanguageModel for RemoteModel {
        fn tokenize(&self, text: &str) -> Result<Vec<u32>>;
        fn tokenize_with_pictures(&self, text: &str, pictures: &[Picture]) -> Result<Vec<u32>>;
        fn forget_pictures(&self) { () }
        fn detokenize(&self, tokens: &[u32]) -> Result<String>;
        fn render_chat(&self, messages: &[Message], continue_as_assistant: bool) -> Result<String> {
            Err(Error::Unsupported("this model has no chat template".into()))
        }
        fn render_chat_with_tools(&self, messages: &[Message], tools: &[Json], continue_as_assistant: bool)
            -> Result<Option<String>> { Ok(None) }
        fn end_tokens(&self) -> Vec<u32> { Vec::new() }
        fn context_length(&self) -> usize { usize::MAX }
        fn generate(&mut self, prompts: &[Vec<u32>], sampling: &Sampling) -> Result<Vec<Generation>>,
            then one_each(prompts, sampling);
        fn hidden_states(&mut self, tokens: &Tensor, mask: &Tensor, adapter: Adapter) -> Result<Tensor> {
            Err(Error::Unsupported("this language model does not give its hidden states, which a critic reads".into()))
        }
        fn evaluate(&mut self, tokens: &Tensor, mask: &Tensor, wanted: &Tensor, adapter: Adapter, grad: Grad)
            -> Result<(TokenStats, Option<Pullback>)>;
    }
}

impl RemoteModel {
    /// Checks that there is one continuation per prompt, no longer than allowed, with one log-probability per token.
    fn one_each(
        &self,
        continuations: Vec<Generation>,
        prompts: &[Vec<u32>],
        sampling: &Sampling,
    ) -> Result<Vec<Generation>> {
        if continuations.len() != prompts.len() {
            return Err(Error::Misuse(format!("{} continuations of {} prompts", continuations.len(), prompts.len())));
        }
        for (index, continuation) in continuations.iter().enumerate() {
            let (tokens, limit) = (continuation.tokens.len(), sampling.limit(index));
            if tokens > limit {
                return Err(Error::Misuse(format!(
                    "continuation {index} has {tokens} tokens, expected at most {limit}"
                )));
            }
            let [drawn, raw] = [&continuation.log_probs, &continuation.raw_log_probs].map(Vec::len);
            if drawn != tokens || (raw != 0 && raw != tokens) {
                return Err(Error::Misuse(format!(
                    "continuation {index} has {drawn} `log_probs` and {raw} `raw_log_probs` of {tokens} tokens"
                )));
            }
        }
        Ok(continuations)
    }
}

#[cfg(test)]
mod tests {
    use super::super::message::Outgoing;
    use super::super::object::Gift;
    use super::super::object::tests::across;
    use super::*;

    #[test]
    fn continuations_are_checked() {
        let one = |tokens: usize, log_probs: usize, raw: usize| Generation {
            tokens: vec![1; tokens],
            log_probs: vec![-0.5; log_probs],
            raw_log_probs: vec![-0.5; raw],
        };
        let generate = |made: Vec<Generation>| {
            let object = across(Gift::exclusive(move |method, _| match method {
                "about" => Outgoing::of(&serde_json::json!({ "parameters": [], "language": true })).map(Some),
                _ => Outgoing::of(&made).map(Some),
            }));
            let sampling = Sampling { limits: vec![2, 3], ..Sampling::greedy(3) };
            RemoteModel::new(object).unwrap().generate(&[vec![1], vec![2]], &sampling).map_err(|e| e.to_string())
        };
        assert_eq!(generate(vec![one(2, 2, 0), one(3, 3, 3)]).unwrap().len(), 2);
        for (made, part) in [
            (vec![one(1, 1, 1)], "1 continuations of 2 prompts"),
            (vec![one(3, 3, 0), one(1, 1, 0)], "continuation 0 has 3 tokens, expected at most 2"),
            (vec![one(1, 1, 0), one(3, 2, 0)], "2 `log_probs` and 0 `raw_log_probs` of 3 tokens"),
            (vec![one(1, 1, 0), one(3, 3, 1)], "3 `log_probs` and 1 `raw_log_probs` of 3 tokens"),
        ] {
            assert!(generate(made).unwrap_err().contains(part), "{part}");
        }
    }
}
