//! Rewards that run elsewhere, in any language: a program ([`command`]) or a service ([`http`]).
//!
//! Both receive messages and answer with messages, in the format of [`frame`]. A message is a header (JSON) and
//! tensors. The header's field `call` names the call:
//!
//! | call      | header              | tensors              | answer                                                   |
//! |-----------|---------------------|----------------------|----------------------------------------------------------|
//! | `hello`   | `version`, `options`|                      | `name`, `differentiable`, `shared`, and `reads_reference` (by default true): false if the target does not depend on the reference |
//! | `prepare` | `fps`               | `frames`             | the target's tensors; or `target` null with `reason`, if the reference has nothing to compare with |
//! | `score`   | `fps`, `prompt`, `record`, `columns` (of the row, if it has others than `roll` reads) | `frames`, and the target's as `target/NAME` | `score` (a number, or null with `reason`; NaN and infinities as Python writes them, or as texts, count as null), `details`, and with `record` the tensor `gradient` of the score with respect to the frames |
//!
//! The tensor `frames` is a video, f32 `[T, 3, H, W]` in [-1, 1]. An answer with the field `error` is an error. The
//! score is a scalar, so one gradient is the whole pullback, and no state is kept between calls.
//!
//! If a program's answer to `hello` has `shared`, it receives tensors in shared memory, described by `{"path", "bytes",
//! "id"}` in the header's field `shared`. It may overwrite them with the tensors of its answer. Another `id` is another
//! file, even at the same path. A service receives no shared memory, even on the same machine, because it would have to
//! open paths that any client could name.

pub mod child;
pub mod command;
pub mod frame;
pub mod http;
#[cfg(all(test, unix))]
mod python_tests;
pub mod shared_memory;

use std::collections::BTreeMap;
use std::sync::Arc;

use rayon::prelude::*;
use roll_core::{Error, Fault, Grad, OnMissing, Pullback, Result, RewardScorer, Score, Target, Tensor, Video};
use serde_json::{Value as Json, json};

use crate::picture::Frames;

/// Version of the protocol.
const VERSION: u32 = 1;

/// A header and its tensors.
pub type Message = (Json, Vec<(String, Tensor)>);

/// A peer that answers calls.
pub trait Transport: Send {
    /// The peer's name in errors: "the reward command `...`".
    fn peer(&self) -> String;
    /// The first call. Returns one answer, or an error with the reason.
    fn hello(&mut self) -> Result<Message>;
    /// Any later call. Restarts the peer or repeats the call as the options allow.
    fn ask(&mut self, call: &'static str, header: Json, tensors: &[(String, Tensor)]) -> Result<Message>;
}

/// Errors in an answer.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the message of a variant names its fields
pub enum AnswerError {
    /// The answer is an error.
    #[error("{peer} failed in `{call}`: {problem}")]
    Failed { peer: String, call: &'static str, problem: String },
    /// The answer is invalid.
    #[error("{peer} answered `{call}` wrongly: {problem}")]
    Invalid { peer: String, call: &'static str, problem: String },
}

/// What happens after a call that fails for one clip: the answer is an error, and the program or service works on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnError {
    /// The run stops.
    #[default]
    Stop,
    /// A warning is logged, and the clip is treated as one with nothing to score.
    Skip,
}

/// A scorer in another process or on another machine.
pub struct RemoteReward<T> {
    transport: T,
    on_missing: OnMissing,
    on_error: OnError,
    frames: Frames,
    name: String,
    is_differentiable: bool,
    reads_reference: bool,
}

impl<T: Transport> RemoteReward<T> {
    /// Creates the reward and calls `hello`. `name` is the reward's name if the answer to `hello` has none. `frames`
    /// selects the frames of each video that are sent. Fails if the number in `frames` is out of range.
    pub fn new(name: &str, transport: T, frames: Frames, on_missing: OnMissing) -> Result<Self> {
        frames.check()?;
        let (name, on_error) = (name.into(), OnError::default());
        let mut reward =
            Self { transport, on_missing, on_error, frames, name, is_differentiable: false, reads_reference: true };
        let hello = reward.transport.hello()?;
        let (hello, _) = reward.accept("hello", hello)?;
        if let Some(name) = hello.get("name").and_then(Json::as_str) {
            reward.name = name.into();
        }
        let flag = |key: &str| hello.get(key).and_then(Json::as_bool);
        reward.is_differentiable = flag("differentiable").unwrap_or(false);
        reward.reads_reference = flag("reads_reference").unwrap_or(true);
        Ok(reward)
    }

    /// Sets what happens after a call that fails for one clip. By default, the run stops.
    #[must_use]
    pub fn with_on_error(self, on_error: OnError) -> Self {
        Self { on_error, ..self }
    }

    /// Makes a call about one clip. Fails with [`Error::NothingToScore`] if [`OnError::Skip`] leaves the clip out.
    fn ask(&mut self, call: &'static str, mut header: Json, tensors: &[(String, Tensor)]) -> Result<Message> {
        header["call"] = call.into();
        let answer = self.transport.ask(call, header, tensors)?;
        let (answer_header, _) = &answer;
        match (problem(answer_header), self.on_error) {
            (Some(problem), OnError::Skip) => {
                let peer = self.transport.peer();
                tracing::warn!(
                    "{peer} failed in `{call}`: {problem}: the clip counts as one with nothing to score \
                     (`reward.on_error: skip`)"
                );
                Err(Error::nothing_to_score(format!("it failed in `{call}`: {problem}")))
            }
            _ => self.accept(call, answer),
        }
    }

    /// Returns the answer, or fails if the answer is an error.
    fn accept(&self, call: &'static str, answer: Message) -> Result<Message> {
        let (answer_header, _) = &answer;
        match problem(answer_header) {
            None => Ok(answer),
            Some(problem) => {
                let error = AnswerError::Failed { peer: self.transport.peer(), call, problem };
                Err(Error::component(Fault::Failure, error))
            }
        }
    }

    /// The error for an invalid answer to `call`.
    fn invalid(&self, call: &'static str, problem: String) -> Error {
        let error = AnswerError::Invalid { peer: self.transport.peer(), call, problem };
        Error::component(Fault::Failure, error)
    }

    /// The frames of a video that are sent, `[T, 3, H, W]`.
    fn selected_frames(&self, video: &Video) -> Result<Tensor> {
        match self.frames {
            Frames::All => Ok(video.frames().clone()),
            frames => {
                let ([count, height, width], mut values) = (video.dims(), Vec::new());
                let selected = frames.of(count);
                selected.iter().for_each(|t| values.extend_from_slice(video.frame(*t)));
                Tensor::new(values, [selected.len(), 3, height, width])
            }
        }
    }

    /// The pullback to all frames of `video`, from the tensor `gradient` of an answer. It must have the shape of
    /// `sent`, the frames that were sent.
    fn pullback(&self, tensors: Vec<(String, Tensor)>, sent: &Tensor, video: &Video) -> Result<Pullback> {
        let gradient = tensors.into_iter().find(|(name, _)| name == "gradient").map(|(_, tensor)| tensor);
        let gradient =
            gradient.ok_or_else(|| self.invalid("score", "a gradient was asked for, and none came".into()))?;
        if gradient.shape() != sent.shape() || gradient.f32s().is_err() {
            let problem = format!("expected a gradient of f32 {:?}, found {gradient:?}", sent.shape());
            return Err(self.invalid("score", problem));
        }
        let (selection, [count, height, width]) = (self.frames, video.dims());
        Ok(Pullback::new(move |cotangent| {
            let factor = cotangent.item()?;
            let scaled = gradient.f32s()?.par_iter().map(|v| factor * v).collect::<Vec<f32>>();
            if selection == Frames::All {
                return Tensor::new(scaled, gradient.shape());
            }
            let frame_size = 3 * height * width;
            let mut all = vec![0.0; count * frame_size];
            // A short video repeats frames, whose gradients are added up.
            for (t, gradient) in selection.of(count).into_iter().zip(scaled.chunks_exact(frame_size)) {
                all[t * frame_size..][..frame_size].iter_mut().zip(gradient).for_each(|(sum, g)| *sum += g);
            }
            Tensor::new(all, [count, 3, height, width])
        }))
    }
}

impl<T: Transport> RewardScorer for RemoteReward<T> {
    fn name(&self) -> &str {
        &self.name
    }

    fn computes_on_device(&self) -> bool {
        false
    }

    fn differentiable(&self) -> bool {
        self.is_differentiable
    }

    fn reads_reference(&self) -> bool {
        self.reads_reference
    }

    fn prepare(&mut self, reference: &Video) -> Result<Target> {
        let frames = [("frames".to_string(), self.selected_frames(reference)?)];
        let (answer, tensors) = self.ask("prepare", json!({ "fps": reference.fps() }), &frames)?;
        if answer.get("target") == Some(&Json::Null) {
            return Err(Error::nothing_to_score(reason(&answer)));
        }
        // A target is kept for a long time, so it is copied out of the shared memory, which the next call uses again.
        let copied = |t: Tensor| Tensor::from_bytes(t.dtype(), t.shape(), Arc::new(t.as_bytes().to_vec()));
        let tensors = tensors.into_iter().map(|(name, tensor)| copied(tensor).map(|tensor| (name, tensor)));
        Ok(Target::of(tensors.collect::<Result<_>>()?))
    }

    fn score(&mut self, video: &Video, prompt: &str, target: &Target, grad: Grad) -> Result<(Score, Option<Pullback>)> {
        let wants_gradient = grad.is_on() && self.is_differentiable;
        let mut header = json!({ "fps": video.fps(), "prompt": prompt, "record": wants_gradient });
        if !target.columns.is_empty() {
            header["columns"] = json!(*target.columns);
        }
        let frames = self.selected_frames(video)?;
        let mut tensors = vec![("frames".to_string(), frames.clone())];
        tensors.extend(target.tensors.iter().map(|(name, tensor)| (format!("target/{name}"), tensor.clone())));
        let (answer, tensors) = match self.ask("score", header, &tensors) {
            Ok(answer) => answer,
            Err(Error::NothingToScore { reason }) => return Ok((Score::Missing { reason }, None)),
            Err(error) => return Err(error),
        };
        match answer.get("score") {
            Some(Json::Null) => Ok((Score::Missing { reason: reason(&answer).into() }, None)),
            Some(score) => {
                let value = score.as_f64().or_else(|| frame::nonfinite(score)).ok_or_else(|| {
                    self.invalid("score", format!("expected a number or null as `score`, found {score}"))
                })?;
                if !value.is_finite() {
                    return Ok((Score::of(value), None));
                }
                let details = answer.get("details").and_then(Json::as_object).into_iter().flatten();
                let details: BTreeMap<String, f64> =
                    details.filter_map(|(k, v)| Some((k.clone(), v.as_f64()?))).collect();
                let pullback = if wants_gradient { Some(self.pullback(tensors, &frames, video)?) } else { None };
                Ok((Score::Value { value, details }, pullback))
            }
            None => Err(self.invalid("score", "it holds no `score`".into())),
        }
    }

    fn is_elsewhere(&self) -> bool {
        true
    }

    fn on_missing(&self) -> OnMissing {
        self.on_missing
    }
}

/// The text of an answer's field `error`; `None` if the answer is not an error.
fn problem(answer: &Json) -> Option<String> {
    let problem = answer.get("error").filter(|problem| !problem.is_null())?;
    Some(problem.as_str().map_or_else(|| problem.to_string(), String::from))
}

/// The reason why there is nothing to score.
fn reason(answer: &Json) -> &str {
    answer.get("reason").and_then(Json::as_str).unwrap_or("it gave no reason")
}
