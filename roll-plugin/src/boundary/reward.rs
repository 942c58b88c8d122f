//! [`RewardScorer`] across the boundary.

use std::ffi::c_void;

use crate::abi::{RollError, RollMeasure, RollObject, RollRewardFacts, RollRewardTable, RollScore};

use super::crossing::crossing;
use super::data::{own_numbers, take_numbers};
use super::foreign::{Foreign, ForeignObject};
use super::memory::{own_text, take_text};
use super::pullback;
use super::served::{Served, lent, serve_shared};
use super::source::Source;
use super::wire::{Answer, Argument};
use crate::{Error, Grad, Measure, OnMissing, Pullback, Result, RewardScorer, Score, Target, Video};

type Scorer = dyn RewardScorer;

crossing! {
    RewardScorer for ForeignReward, table RollRewardTable of Scorer {
        mut fn prepare(reference: &Video) -> Target;
        mut fn score(video: &Video, prompt: &str, target: &Target, grad: Grad) -> (Score, Option<Pullback>), then check;
        ref fn target_key() -> Option<String>, absent None, then key;
        ref fn measures() -> Measure, or Measure::default(), absent Measure::default();
        ref fn terms() -> Vec<(String, f64)>, or Vec::new(), absent Vec::new();
        ref fn reads_reference() -> bool, or true, absent true;
    }
    by hand [facts] {
        fn name(&self) -> &str {
            &self.facts.name
        }

        fn differentiable(&self) -> bool {
            self.facts.differentiable
        }

        fn on_missing(&self) -> OnMissing {
            self.facts.on_missing
        }
    }
}

unsafe extern "C" fn facts(state: *mut c_void, out: *mut RollRewardFacts, error: *mut RollError) -> u32 {
    let body = |scorer: &Scorer| {
        let (name, differentiable) = (scorer.name().into(), scorer.differentiable());
        Ok(RewardFacts { name, differentiable, on_missing: scorer.on_missing() }.give())
    };
    // SAFETY: P4, P7 and P8.
    unsafe { serve_shared(state, out, error, body) }
}

pub(super) fn give(scorer: Box<dyn RewardScorer>) -> RollObject {
    Served::give(scorer, &TABLE)
}

lent!(LentReward: RewardScorer);

pub(super) type ForeignReward = ForeignObject<RollRewardTable, RewardFacts>;

impl ForeignReward {
    /// # Safety
    /// As [`Foreign::new`].
    pub(super) unsafe fn new(object: RollObject, source: Source) -> Result<Self> {
        // SAFETY: as the caller promises.
        let (object, table) = unsafe { Foreign::new::<RollRewardTable>(object, source) }?;
        let facts = object.ask("name", table.facts)?;
        Ok(Self { facts: object.must("facts", facts)?, object, table })
    }

    /// Checks the score: it must have a pullback if the scorer is differentiable. One that is not finite counts as
    /// nothing to score.
    fn check(
        &self,
        (score, pullback): (Score, Option<Pullback>),
        video: &Video,
        _: &str,
        _: &Target,
        grad: Grad,
    ) -> Result<(Score, Option<Pullback>)> {
        let Some(_) = score.value().filter(|value| value.is_finite()) else { return Ok((score, None)) };
        if grad.is_on() && self.facts.differentiable && pullback.is_none() {
            return Err(Error::Misuse("it calls itself differentiable but returned no pullback".into()));
        }
        let pullback = pullback.filter(|_| grad.is_on());
        Ok((score, pullback::shaped(pullback, video.frames(), &self.object.source)))
    }

    fn key(&self, own: Option<String>) -> Result<Option<String>> {
        self.object.source.key(own)
    }
}

/// The facts of a scorer that do not change.
pub(super) struct RewardFacts {
    name: String,
    differentiable: bool,
    on_missing: OnMissing,
}

impl Answer for RewardFacts {
    type Wire = RollRewardFacts;
    fn give(self) -> RollRewardFacts {
        let (on_missing, missing_value) = match self.on_missing {
            OnMissing::Skip => (0, 0.0),
            OnMissing::Error => (1, 0.0),
            OnMissing::Value(value) => (2, value),
        };
        let differentiable = self.differentiable.into();
        RollRewardFacts { name: own_text(self.name), differentiable, on_missing, missing_value }
    }
    unsafe fn take(wire: RollRewardFacts, _: &Source) -> Result<Self> {
        // SAFETY: as the caller promises.
        let name = unsafe { take_text(wire.name) }?;
        let on_missing = match wire.on_missing {
            0 => OnMissing::Skip,
            1 => OnMissing::Error,
            2 => OnMissing::Value(wire.missing_value),
            other => return Err(Error::Misuse(format!("`on_missing` is {other}, expected 0, 1 or 2"))),
        };
        Ok(Self { name, differentiable: wire.differentiable == 1, on_missing })
    }
}

impl Answer for (Score, Option<Pullback>) {
    type Wire = RollScore;
    fn give(self) -> RollScore {
        match self.0 {
            Score::Value { value, details } => RollScore {
                value,
                details: own_numbers(details),
                pullback: pullback::give(self.1),
                ..Default::default()
            },
            Score::Missing { reason } => RollScore { missing: 1, reason: own_text(reason), ..Default::default() },
        }
    }
    unsafe fn take(wire: RollScore, source: &Source) -> Result<Self> {
        // SAFETY: as the caller promises; each part is taken once, whatever happens to the others.
        let (details, reason, pullback) =
            unsafe { (take_numbers(wire.details), take_text(wire.reason), pullback::take(wire.pullback, source)) };
        let (details, reason) = (details?, reason?);
        match wire.missing {
            0 => Ok((Score::Value { value: wire.value, details }, pullback)),
            _ => Ok((Score::Missing { reason }, None)),
        }
    }
}

impl Answer for Measure {
    type Wire = RollMeasure;
    fn give(self) -> RollMeasure {
        RollMeasure { label: own_text(self.label), alias: self.alias.give() }
    }
    unsafe fn take(wire: RollMeasure, source: &Source) -> Result<Self> {
        // SAFETY: as the caller promises; each is taken once, whatever happens to the other.
        let (label, alias) = unsafe { (take_text(wire.label), Answer::take(wire.alias, source)) };
        Ok(Self { label: label?, alias: alias? })
    }
}

/// Shared access: only functions by `&self` are called.
impl<'a> Argument for Option<&'a (dyn RewardScorer + 'a)> {
    type Wire = RollObject;
    type Lent = Option<LentReward>;
    type Received = Option<ForeignReward>;
    type Borrowed<'k> = Option<&'k dyn RewardScorer>;
    fn lend(self) -> Option<LentReward> {
        // SAFETY: P1: dropped at the end of the call; functions by `&self` are served as shared.
        self.map(|scorer| unsafe { LentReward::at(std::ptr::from_ref(scorer).cast_mut()) })
    }
    fn wire(lent: &mut Option<LentReward>) -> RollObject {
        lent.as_ref().map(LentReward::object).unwrap_or_default()
    }
    unsafe fn receive(wire: RollObject) -> Result<Option<ForeignReward>> {
        // SAFETY: as the caller promises.
        unsafe { lent_reward(wire) }
    }
    fn borrow(received: &mut Option<ForeignReward>) -> Option<&dyn RewardScorer> {
        received.as_ref().map(|reward| reward as &dyn RewardScorer)
    }
}

/// A reward that the other side lends, if there is one.
///
/// # Safety
/// P1 and P8.
pub(super) unsafe fn lent_reward(reward: RollObject) -> Result<Option<ForeignReward>> {
    match reward.table.is_null() {
        true => Ok(None),
        // SAFETY: as the caller promises.
        false => unsafe { ForeignReward::new(reward, Source::Host) }.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sum of two terms, the second one's name before the first one's in the alphabet.
    struct Sum;

    impl RewardScorer for Sum {
        fn name(&self) -> &str {
            "sum"
        }
        fn differentiable(&self) -> bool {
            false
        }
        fn score(&mut self, _: &Video, _: &str, _: &Target, _: Grad) -> Result<(Score, Option<Pullback>)> {
            Ok((Score::of(0.0), None))
        }
        fn terms(&self) -> Vec<(String, f64)> {
            vec![("sharpness".into(), 0.5), ("motion".into(), -2.0)]
        }
        fn reads_reference(&self) -> bool {
            false
        }
    }

    #[test]
    fn terms_keep_their_order() {
        // SAFETY: an own object of this kind.
        let theirs = unsafe { ForeignReward::new(give(Box::new(Sum)), Source::Host) }.unwrap();
        assert_eq!(theirs.terms(), Sum.terms());
        assert!(!theirs.reads_reference());
    }

    #[test]
    fn a_reward_without_the_functions_is_not_a_sum_and_reads_the_reference() {
        let shorter = RollRewardTable { terms: None, reads_reference: None, ..TABLE };
        let object = RollObject { table: (&raw const shorter).cast(), ..give(Box::new(Sum)) };
        // SAFETY: as above; the table outlives the object.
        let theirs = unsafe { ForeignReward::new(object, Source::Host) }.unwrap();
        assert!(theirs.terms().is_empty() && theirs.reads_reference() && theirs.name() == "sum");
    }
}
