//! The rewards of `evaluation.check`: measured, never optimised.

use roll_core::{BuildContext, Error, Registry, Result, RewardComponent, RewardScorer};
use roll_train::rewards::{WeightedScorer, numbered, scorers};

/// The checks of a run, in the order of the configuration.
#[derive(Default)]
pub(super) struct Checks(Vec<Check>);

/// A reward that is measured only.
struct Check {
    /// The reward as it is configured.
    component: RewardComponent,
    scorer: Box<dyn RewardScorer>,
}

impl Checks {
    pub(super) fn open(components: &[RewardComponent], registry: &Registry, context: &BuildContext) -> Result<Self> {
        let scorers = scorers("evaluation.check", components, registry, context)?;
        if let Some((_, scorer)) = scorers.iter().find(|(_, scorer)| scorer.compares()) {
            let problem =
                format!("`{}` compares videos of one prompt, and an evaluation has one of each", scorer.name());
            return Err(Error::config("evaluation.check", problem));
        }
        let check = |(component, (_, scorer)): (&RewardComponent, WeightedScorer)| {
            let component = component.clone();
            Check { component, scorer }
        };
        Ok(Self(components.iter().zip(scorers).map(check).collect()))
    }

    pub(super) fn components(&self) -> Vec<&RewardComponent> {
        self.0.iter().map(|check| &check.component).collect()
    }

    /// Names of the checks in metrics and figures; a name that occurs twice is numbered.
    pub(super) fn labels(&self) -> Vec<String> {
        numbered(self.0.iter().map(|check| check.component.name.as_str()))
    }

    /// The names of the checks that read the reference.
    pub(super) fn reference_readers(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|check| &check.scorer).filter(|scorer| scorer.reads_reference()).map(|scorer| scorer.name())
    }

    pub(super) fn leave_out_reference_readers(&mut self) {
        self.0.retain(|check| !check.scorer.reads_reference());
    }

    pub(super) fn scorers(&mut self) -> impl Iterator<Item = &mut dyn RewardScorer> {
        self.0.iter_mut().map(|check| &mut *check.scorer as &mut dyn RewardScorer)
    }

    /// Inserts the weighted sum of the checks before their own scores, which come last in `scores`.
    /// - A check of weight 0 is not part of the sum.
    /// - The sum is missing if the score of a check that is part of it is missing, or if no check is part of it.
    /// - The score of a check of negative weight is negated, so that a higher score is better for every check.
    /// - A single check has one figure: the sum, in place of its score.
    pub(super) fn add_sum(&self, scores: &mut Vec<Option<f64>>) {
        let Some(first) = scores.len().checked_sub(self.0.len()) else { return };
        let weights: Vec<f64> = self.0.iter().map(|check| check.component.weight).collect();
        let parts = weights.iter().zip(&scores[first..]).filter(|(weight, _)| **weight != 0.0);
        let sum: Option<f64> = parts.map(|(weight, score)| Some(weight * (*score)?)).sum();
        match weights[..] {
            // No check, or a single one that is not part of a sum: its score stays as it is.
            [] | [0.0] => {}
            // A single check.
            [_] => scores[first] = sum,
            // Several checks. Their own scores keep their scale, which people know; only the sum is weighted.
            _ => {
                for (score, weight) in scores[first..].iter_mut().zip(&weights) {
                    *score = score.map(|score| if *weight < 0.0 { -score } else { score });
                }
                let has_parts = weights.iter().any(|weight| *weight != 0.0);
                scores.insert(first, if has_parts { sum } else { None });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use roll_rewards::Brightness;

    use super::*;

    fn sums(weights: &[f64], scores: &[Option<f64>]) -> Vec<Option<f64>> {
        let check = |weight: &f64| Check {
            component: RewardComponent { weight: *weight, ..RewardComponent::named("brightness") },
            scorer: Box::new(Brightness::new(Default::default()).unwrap()),
        };
        let mut scores = scores.to_vec();
        Checks(weights.iter().map(check).collect()).add_sum(&mut scores);
        scores
    }

    #[test]
    fn only_readers_of_the_reference_are_left_out() {
        let component = |name: &str| RewardComponent::named(name);
        let components = ["first_frame", "motion"].map(component);
        let mut checks = Checks::open(&components, &Registry::linked().unwrap(), &BuildContext::new("flex")).unwrap();
        assert_eq!(checks.reference_readers().collect::<Vec<_>>(), ["first_frame"]);
        checks.leave_out_reference_readers();
        assert_eq!((checks.labels(), checks.scorers().count()), (vec!["motion".to_string()], 1));
    }

    #[test]
    fn the_sum_of_several_checks_precedes_their_scores() {
        assert_eq!(sums(&[], &[Some(0.5)]), [Some(0.5)]);
        assert_eq!(sums(&[2.0], &[Some(0.5), Some(0.25)]), [Some(0.5), Some(0.5)]);
        let several = sums(&[1.0, -2.0], &[Some(0.5), Some(0.25), Some(1.0)]);
        assert_eq!(several, [Some(0.5), Some(-1.75), Some(0.25), Some(-1.0)]);
        // Without a trained reward the checks come first.
        assert_eq!(sums(&[1.0, 1.0], &[Some(0.25), Some(1.0)]), [Some(1.25), Some(0.25), Some(1.0)]);
    }

    #[test]
    fn a_missing_score_makes_the_sum_missing_unless_its_weight_is_0() {
        assert_eq!(sums(&[1.0, 1.0], &[Some(0.5), None, Some(1.0)]), [Some(0.5), None, None, Some(1.0)]);
        assert_eq!(sums(&[0.0, 1.0], &[Some(0.5), None, Some(1.0)]), [Some(0.5), Some(1.0), None, Some(1.0)]);
        assert_eq!(sums(&[0.0, 0.0], &[Some(0.5), Some(2.0), Some(1.0)])[1..], [None, Some(2.0), Some(1.0)]);
        assert_eq!(sums(&[0.0], &[Some(0.5), Some(2.0)]), [Some(0.5), Some(2.0)]);
    }
}
