//! Language models for tests: one that is small enough to differentiate by hand, in which the next character depends on
//! the last one only, and one that writes the answers of a script.

// Wrong use of a test double fails the test by a panic.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock, Mutex};

use rand::RngCore;
use roll_core::*;

/// Number of tokens: the characters of ASCII.
const VOCABULARY: usize = 128;

/// Token of a character that is not in the vocabulary.
const UNKNOWN: u32 = 1;
/// A logit next to which the logit 0 takes all the probability.
const NEVER: f32 = -20.0;

/// A bigram model: log p(next | last) = log softmax of a row of logits. The parameters are the logits. Tokens are ASCII
/// characters; `$` ends a turn.
pub struct Bigram {
    specs: Vec<ParameterSpec>,
    /// The parameters, 128 x 128: one row per last character.
    pub logits: Vec<f32>,
    gradients: Arc<Mutex<Vec<f32>>>,
    /// Whether the chat template leaves out an answer of the assistant if further messages follow it.
    pub forgets: bool,
    /// Text that the chat template writes after the end of each turn.
    pub after_end: &'static str,
    /// Whether the tokenizer writes a blank before a text and after each `$`, as SentencePiece tokenizers do.
    pub adds_blank: bool,
    /// Context length in tokens.
    pub context: usize,
    /// Whether the chat template fails.
    pub fails: bool,
    /// Whether the chat template fails on system messages.
    pub refuses_system: bool,
    /// Number of prompts of each call of `generate`.
    pub calls: Vec<usize>,
    /// Logits of the reference policy, without the adapter; `None`: they are those of the policy in training.
    pub reference: Option<Vec<f32>>,
    /// Number of rows that the reference policy has evaluated.
    pub referred: usize,
}

impl Default for Bigram {
    fn default() -> Self {
        Self {
            specs: vec![ParameterSpec { name: "logits".into(), shape: vec![VOCABULARY, VOCABULARY] }],
            logits: vec![0.0; VOCABULARY * VOCABULARY],
            gradients: Arc::new(Mutex::new(vec![0.0; VOCABULARY * VOCABULARY])),
            forgets: false,
            after_end: "",
            adds_blank: false,
            context: usize::MAX,
            fails: false,
            refuses_system: false,
            calls: Vec::new(),
            reference: None,
            referred: 0,
        }
    }
}

impl Bigram {
    /// Creates a model with equal probabilities for all characters.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a model that generates only characters of `alphabet` and the end of a turn.
    pub fn of(alphabet: &str) -> Self {
        let mut model = Self::new();
        for (i, logit) in model.logits.iter_mut().enumerate() {
            let next = char::from((i % VOCABULARY) as u8);
            *logit = if next == '$' || alphabet.contains(next) { 0.0 } else { NEVER };
        }
        model
    }

    /// The log-probability of each character after the character `last`.
    fn log_softmax(&self, last: usize) -> Vec<f64> {
        let row = &self.logits[last * VOCABULARY..(last + 1) * VOCABULARY];
        let sum = row.iter().map(|l| f64::from(*l).exp()).sum::<f64>().ln();
        row.iter().map(|l| f64::from(*l) - sum).collect()
    }
}

impl Model for Bigram {
    fn parameters(&self) -> &[ParameterSpec] {
        &self.specs
    }

    fn read_parameters(&self, out: &mut [f32]) -> Result<()> {
        out.copy_from_slice(&self.logits);
        Ok(())
    }

    fn write_parameters(&mut self, values: &[f32]) -> Result<()> {
        self.logits.copy_from_slice(values);
        Ok(())
    }

    fn take_gradients(&mut self, add_into: &mut [f32]) -> Result<()> {
        for (to, g) in add_into.iter_mut().zip(self.gradients.lock().unwrap().iter_mut()) {
            *to += std::mem::take(g); // clears the accumulator
        }
        Ok(())
    }

    fn as_language(&mut self) -> Option<&mut dyn LanguageModel> {
        Some(self)
    }

    fn export_adapter(&self) -> Result<BTreeMap<String, StateDict>> {
        Ok(BTreeMap::new())
    }

    fn import_adapter(&mut self, _files: &BTreeMap<String, StateDict>) -> Result<()> {
        Ok(())
    }
}

impl LanguageModel for Bigram {
    fn tokenize(&self, text: &str) -> Result<Vec<u32>> {
        let blank = |part: &str| if self.adds_blank && part != "$" { " " } else { "" };
        let texts = text.split_inclusive('$').flat_map(|part| blank(part).chars().chain(part.chars()));
        Ok(texts.map(|c| if c.is_ascii() { c as u32 } else { UNKNOWN }).collect())
    }

    fn detokenize(&self, tokens: &[u32]) -> Result<String> {
        Ok(tokens.iter().map(|t| char::from(*t as u8)).collect())
    }

    fn render_chat(&self, messages: &[Message], continue_as_assistant: bool) -> Result<String> {
        if self.fails {
            return Err(Error::Unsupported("the chat template failed: roles must alternate".into()));
        }
        if self.refuses_system && messages.iter().any(|m| m.role == "system") {
            return Err(Error::Unsupported("the chat template failed: System role not supported".into()));
        }
        let last = messages.len().saturating_sub(1);
        let mut text = String::new();
        for (i, m) in messages.iter().enumerate() {
            let is_dropped = self.forgets && m.role == "assistant" && i < last;
            let thoughts = m.fields.get("reasoning_content").and_then(|t| t.as_str()).unwrap_or_default();
            let (thoughts, content) = if is_dropped { ("", "") } else { (thoughts, m.content.as_str()) };
            text += &format!("{}:{thoughts}{content}${}", &m.role[..1], self.after_end);
        }
        Ok(if continue_as_assistant { text + "a:" } else { text })
    }

    fn end_tokens(&self) -> Vec<u32> {
        vec!['$' as u32]
    }

    fn context_length(&self) -> usize {
        self.context
    }

    fn generate(&mut self, prompts: &[Vec<u32>], sampling: &Sampling) -> Result<Vec<Generation>> {
        self.calls.push(prompts.len());
        let noise = Noise::new(sampling.seed);
        let mut generations = Vec::new();
        for (i, prompt) in prompts.iter().enumerate() {
            let mut rng = noise.generator(Purpose::Tokens, 0, sampling.number(i));
            let mut generation = Generation::default();
            let mut last = *prompt.last().unwrap() as usize;
            while generation.tokens.len() < sampling.limit(i) {
                let log_p = self.log_softmax(last);
                // The first character at which the cumulative probability exceeds a uniform number.
                let mut remaining = f64::from(rng.next_u32()) / f64::from(u32::MAX);
                let drawn = (0..VOCABULARY).find(|v| {
                    remaining -= log_p[*v].exp();
                    remaining < 0.0
                });
                let best = (0..VOCABULARY).max_by(|a, b| log_p[*a].total_cmp(&log_p[*b])).unwrap();
                last = if sampling.temperature == 0.0 { best } else { drawn.unwrap_or(best) };
                generation.tokens.push(last as u32);
                generation.log_probs.push(log_p[last] as f32);
                generation.raw_log_probs.push(log_p[last] as f32);
                if last == '$' as usize {
                    break;
                }
            }
            generations.push(generation);
        }
        Ok(generations)
    }

    fn snapshot(&self) -> Result<Box<dyn LanguageModel + Send>> {
        let copy = Self { specs: self.specs.clone(), logits: self.logits.clone(), ..Self::default() };
        let Self { forgets, context, fails, refuses_system, .. } = *self;
        Ok(Box::new(Self { forgets, context, fails, refuses_system, ..copy }))
    }

    /// The last character as a one-hot vector of the length sqrt(VOCABULARY), as after the final norm of a real model.
    fn hidden_states(&mut self, tokens: &Tensor, mask: &Tensor, _adapter: Adapter) -> Result<Tensor> {
        let (ids, mask) = (tokens.as_slice::<i64>()?, mask.to_f32_vec());
        let mut states = vec![0.0f32; ids.len() * VOCABULARY];
        for (i, id) in ids.iter().enumerate().filter(|(i, _)| mask[*i] != 0.0) {
            states[i * VOCABULARY + *id as usize] = (VOCABULARY as f32).sqrt();
        }
        Tensor::new(states, [tokens.shape()[0], tokens.shape()[1], VOCABULARY])
    }

    #[expect(clippy::only_used_in_recursion, reason = "a bigram looks at no token that a mask could hide")]
    fn evaluate(
        &mut self,
        tokens: &Tensor,
        mask: &Tensor,
        wanted: &Tensor,
        adapter: Adapter,
        _grad: Grad,
    ) -> Result<(TokenStats, Option<Pullback>)> {
        let (rows, columns) = (tokens.shape()[0], tokens.shape()[1]);
        if adapter != Adapter::On {
            self.referred += rows;
            if let Some(reference) = self.reference.take() {
                let trained = std::mem::replace(&mut self.logits, reference);
                let evaluated = self.evaluate(tokens, mask, wanted, Adapter::On, Grad::Skip);
                self.reference = Some(std::mem::replace(&mut self.logits, trained));
                return evaluated;
            }
        }
        let ids: Vec<usize> = tokens.as_slice::<i64>()?.iter().map(|t| *t as usize).collect();
        let wanted = wanted.to_f32_vec();
        let wanted: Vec<bool> =
            (0..rows).flat_map(|b| (1..columns).map(move |t| b * columns + t)).map(|i| wanted[i] != 0.0).collect();
        // Last and next token of each prediction.
        let mut pairs: Vec<[usize; 2]> = Vec::new();
        for row in ids.chunks_exact(columns) {
            pairs.extend(row.windows(2).map(|pair| [pair[0], pair[1]]));
        }
        let log_p_rows: Vec<Vec<f64>> = pairs.iter().map(|[last, _]| self.log_softmax(*last)).collect();
        let if_wanted = |i: usize, value: f64| if wanted[i] { value as f32 } else { 0.0 };
        let log_probs =
            pairs.iter().enumerate().map(|(i, [_, next])| if_wanted(i, log_p_rows[i][*next])).collect::<Vec<_>>();
        let entropy_of = |row: &[f64]| -row.iter().map(|l| l.exp() * l).sum::<f64>();
        let entropy = log_p_rows.iter().enumerate().map(|(i, row)| if_wanted(i, entropy_of(row))).collect::<Vec<_>>();
        let shape = [rows, columns - 1];
        let stats =
            TokenStats { log_probs: Tensor::new(log_probs, shape)?, entropy: Tensor::new(entropy.clone(), shape)? };
        let gradients = self.gradients.clone();
        let pullback = Pullback::new(move |cotangent: &Tensor| {
            let (d_log, d_entropy) = cotangent.f32s()?.split_at(pairs.len());
            let mut gradients = gradients.lock().unwrap();
            for (i, [last, next]) in pairs.iter().enumerate().filter(|(i, _)| wanted[*i]) {
                for v in 0..VOCABULARY {
                    // Derivatives in the logit of v: of log p(next), [v = next] - p(v); of the entropy,
                    // -p(v) (log p(v) + entropy).
                    let (log_p, p) = (log_p_rows[i][v], log_p_rows[i][v].exp());
                    let is_next = if v == *next { 1.0 } else { 0.0 };
                    let d = f64::from(d_log[i]) * (is_next - p)
                        - f64::from(d_entropy[i]) * p * (log_p + f64::from(entropy[i]));
                    gradients[last * VOCABULARY + v] += d as f32;
                }
            }
            Tensor::new(Vec::<f32>::new(), [0])
        });
        Ok((stats, Some(pullback)))
    }
}

/// The tokenizer and the chat template of a [`Scripted`] model. The default methods are those of [`Bigram`].
pub trait Texts {
    /// The model whose tokenizer and template are used by default.
    fn letters(&self) -> &Bigram {
        static LETTERS: LazyLock<Bigram> = LazyLock::new(Bigram::new);
        &LETTERS
    }

    /// Converts text to tokens.
    fn tokenize(&self, text: &str) -> Result<Vec<u32>> {
        self.letters().tokenize(text)
    }

    /// Converts tokens to text.
    fn detokenize(&self, tokens: &[u32]) -> Result<String> {
        self.letters().detokenize(tokens)
    }

    /// The conversation as the chat template writes it.
    fn render_chat(&self, messages: &[Message], continue_as_assistant: bool) -> Result<String> {
        self.letters().render_chat(messages, continue_as_assistant)
    }

    /// The conversation with descriptions of tools. `None`: the chat template knows no tools.
    fn render_chat_with_tools(
        &self,
        _messages: &[Message],
        _tools: &[serde_json::Value],
        _continue_as_assistant: bool,
    ) -> Result<Option<String>> {
        Ok(None)
    }

    /// Tokens that end an answer.
    fn end_tokens(&self) -> Vec<u32> {
        self.letters().end_tokens()
    }

    /// The tokens of an answer, with the end of the turn.
    fn answer(&self, text: &str) -> Result<Vec<u32>> {
        let mut tokens = self.tokenize(text)?;
        tokens.extend(self.end_tokens().first());
        Ok(tokens)
    }
}

/// The characters of ASCII as tokens.
pub struct Letters;

impl Texts for Letters {}

/// A language model that writes the answers of a script, and cannot be trained.
pub struct Scripted<T> {
    /// Tokenizer and chat template.
    pub texts: T,
    /// The answers, one per call of `generate`; after the last one, the last one is repeated.
    pub answers: Vec<String>,
    /// Number of calls of `generate` so far.
    pub given: usize,
}

impl<T: Texts> Scripted<T> {
    /// Creates a model that writes `answers`.
    pub fn new(texts: T, answers: &[&str]) -> Self {
        Self { texts, answers: answers.iter().map(|answer| answer.to_string()).collect(), given: 0 }
    }
}

impl<T: Texts> LanguageModel for Scripted<T> {
    fn tokenize(&self, text: &str) -> Result<Vec<u32>> {
        self.texts.tokenize(text)
    }

    fn detokenize(&self, tokens: &[u32]) -> Result<String> {
        self.texts.detokenize(tokens)
    }

    fn render_chat(&self, messages: &[Message], continue_as_assistant: bool) -> Result<String> {
        self.texts.render_chat(messages, continue_as_assistant)
    }

    fn render_chat_with_tools(
        &self,
        messages: &[Message],
        tools: &[serde_json::Value],
        continue_as_assistant: bool,
    ) -> Result<Option<String>> {
        self.texts.render_chat_with_tools(messages, tools, continue_as_assistant)
    }

    fn end_tokens(&self) -> Vec<u32> {
        self.texts.end_tokens()
    }

    /// Returns the next answer for every prompt.
    fn generate(&mut self, prompts: &[Vec<u32>], _: &Sampling) -> Result<Vec<Generation>> {
        let no_answers = || Error::Unsupported("its script has no answers".into());
        let text = self.answers.get(self.given).or(self.answers.last()).ok_or_else(no_answers)?;
        let tokens = self.texts.answer(text)?;
        self.given += 1;
        let log_probs = vec![-0.5; tokens.len()];
        let generation = Generation { tokens, raw_log_probs: log_probs.clone(), log_probs };
        Ok(vec![generation; prompts.len()])
    }

    fn evaluate(
        &mut self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: Adapter,
        _: Grad,
    ) -> Result<(TokenStats, Option<Pullback>)> {
        Err(Error::Unsupported("a script cannot be evaluated".into()))
    }
}
