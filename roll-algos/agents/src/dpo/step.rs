//! The evaluation of pairs: log-probabilities of answers, losses, and the gradient.

use roll_core::{Adapter, Grad, LanguageModel, Result, StepContext};
use roll_step::update::language;

use super::NAME;
use super::config::DpoConfig;
use super::loss::{Answer, pair_loss};
use super::preferences::Pair;
use super::reference::Reference;
use super::report::Outcome;
use crate::conversations::Tokens;
use crate::conversations::batch::{self, Evaluated};

/// The policy that answers are compared with: the one that training starts from.
const REFERENCE: Adapter = Adapter::Start;

/// Pairs in the order in which they are evaluated: similar lengths share a micro-batch, so that little is padded.
pub(super) fn by_length(mut pairs: Vec<Pair>) -> Vec<Pair> {
    pairs.sort_by_key(Pair::longest);
    pairs
}

/// The samples of pairs, each with the position of its pair and its side: 0 for the chosen answer, 1 for the rejected
/// one.
fn samples(pairs: &[Pair]) -> (Vec<&Tokens>, Vec<(usize, usize)>) {
    let sides = pairs.iter().enumerate().flat_map(|(i, pair)| pair.answers.iter().enumerate().map(move |s| (i, s)));
    sides.flat_map(|(i, (side, samples))| samples.iter().map(move |sample| (sample, (i, side)))).unzip()
}

/// Evaluates both answers of each pair, and returns their log-probabilities.
fn evaluate(
    model: &mut dyn LanguageModel,
    pairs: &[Pair],
    adapter: Adapter,
    grad: Grad,
) -> Result<(Evaluated, Vec<[f64; 2]>)> {
    let (samples, places) = samples(pairs);
    let evaluated = batch::evaluate(model, &samples, adapter, grad)?;
    let mut log_probs = vec![[0.0; 2]; pairs.len()];
    for ((pair, side), log_prob) in places.into_iter().zip(evaluated.log_probs()?) {
        log_probs[pair][side] += log_prob;
    }
    Ok((evaluated, log_probs))
}

/// Evaluates the answers of pairs under the reference policy, and stores their log-probabilities.
pub(super) fn refer(model: &mut dyn LanguageModel, pairs: &[Pair], reference: &mut Reference) -> Result<()> {
    let (_, log_probs) = evaluate(model, pairs, REFERENCE, Grad::Skip)?;
    pairs.iter().zip(log_probs).for_each(|(pair, log_probs)| reference.insert(pair.row, log_probs));
    Ok(())
}

/// Evaluates pairs under the policy in training. `reference` has the log-probabilities of each; `None`: the loss has no
/// reference.
pub(super) fn losses(
    config: &DpoConfig,
    model: &mut dyn LanguageModel,
    pairs: &[Pair],
    reference: Option<&Reference>,
    grad: Grad,
) -> Result<(Evaluated, Vec<Outcome>)> {
    let (evaluated, log_probs) = evaluate(model, pairs, Adapter::On, grad)?;
    let outcome = |(pair, log_probs): (&Pair, [f64; 2])| {
        // A pair that is not known has a loss that is not finite.
        let references = reference.map_or([0.0; 2], |reference| reference.get(pair.row).unwrap_or([f64::NAN; 2]));
        let tokens = pair.tokens();
        let [chosen, rejected] =
            [0, 1].map(|side| Answer { log_prob: log_probs[side], reference: references[side], tokens: tokens[side] });
        Outcome { loss: pair_loss(config, [chosen, rejected]), log_probs, tokens: tokens[0] + tokens[1] }
    };
    let outcomes = pairs.iter().zip(log_probs).map(outcome).collect();
    Ok((evaluated, outcomes))
}

/// Adds the gradient of these pairs' part of the mean loss of `all` pairs to the strategy, unless a loss is not finite.
pub(super) fn pull(
    config: &DpoConfig,
    ctx: &mut StepContext<'_>,
    pairs: &[Pair],
    reference: Option<&Reference>,
    all: f64,
) -> Result<Vec<Outcome>> {
    let (evaluated, outcomes) = losses(config, language(ctx.model, NAME)?, pairs, reference, Grad::Record)?;
    if outcomes.iter().all(|outcome| outcome.loss.value.is_finite()) {
        let (_, places) = samples(pairs);
        let slopes: Vec<f64> = places.into_iter().map(|(i, side)| outcomes[i].loss.slopes[side] / all).collect();
        evaluated.pull(ctx, &slopes)?;
    }
    Ok(outcomes)
}
