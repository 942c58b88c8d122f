//! Pullbacks across the boundary: objects with the method `pull`.

use serde::{Deserialize, Serialize};

use super::message::{Answer, Incoming, Outgoing};
use super::object::{Gift, Remote};
use super::remote::Fact;
use super::source::Source;
use crate::{Error, Pullback, Result, Tensor};

/// An answer with a value, and its pullback if there is one.
#[derive(Serialize, Deserialize)]
struct Recorded<T, P> {
    result: T,
    #[serde(default)]
    pullback: P,
}

/// Arguments of `pull`.
#[derive(Deserialize)]
struct Pull {
    cotangent: Tensor,
}

/// Hands over a pullback, which can be called once.
fn give_pullback(pullback: Pullback) -> Gift {
    let mut pullback = Some(pullback);
    Gift::exclusive(move |method, message| match method {
        "pull" => {
            let arguments: Pull = message.read()?;
            let pullback = pullback.take().ok_or_else(|| Error::Misuse("a pullback was called twice".into()))?;
            Outgoing::of(&pullback.pull(&arguments.cotangent)?).map(Some)
        }
        _ => Ok(None),
    })
}

/// The pullback that calls an object of the other side.
fn take_pullback(pullback: Remote) -> Pullback {
    Pullback::new(move |cotangent| pullback.call_required("pull", &[("cotangent", cotangent)]))
}

impl<T: Fact> Answer for (T, Option<Pullback>) {
    fn give(self) -> impl Serialize {
        Recorded { result: self.0, pullback: self.1.map(give_pullback) }
    }
    fn take(message: &Incoming) -> Result<Self> {
        let Recorded::<T, Option<Remote>> { result, pullback } = message.read()?;
        Ok((result, pullback.map(take_pullback)))
    }
}

/// Makes `pullback` fail unless its gradient is f32 and has the shape of `expected`.
pub(super) fn shaped(pullback: Option<Pullback>, expected: &Tensor, source: &Source) -> Option<Pullback> {
    let (expected, source) = (expected.shape().to_vec(), source.clone());
    pullback.map(|pullback| {
        Pullback::new(move |cotangent| {
            let gradient = pullback.pull(cotangent)?;
            let problem = match gradient.f32s().err() {
                Some(not_f32) => not_f32,
                None if gradient.shape() == expected => return Ok(gradient),
                None => Error::shape("the gradient", format!("{expected:?}"), gradient.shape()),
            };
            Err(source.blame("pull", problem))
        })
    })
}
