//! The rewards of `evaluation.check`: measured, never optimised.

use roll_core::{BuildContext, Registry, Result, ResultExt, RewardComponent, RewardScorer};

/// The rewards as they are configured, and their scorers.
#[derive(Default)]
pub(super) struct Checks {
    components: Vec<RewardComponent>,
    scorers: Vec<Box<dyn RewardScorer>>,
}

impl Checks {
    /// Makes the scorers.
    pub(super) fn open(components: Vec<RewardComponent>, registry: &Registry, context: &BuildContext) -> Result<Self> {
        let mut scorers = Vec::new();
        for (i, component) in components.iter().enumerate() {
            let scorer = registry
                .reward(&component.name, &component.options, context)
                .while_doing(|| format!("setting up evaluation.check.{i} (`{}`)", component.name))?;
            scorers.push(scorer);
        }
        Ok(Self { components, scorers })
    }

    /// The rewards as they are configured.
    pub(super) fn components(&self) -> &[RewardComponent] {
        &self.components
    }

    /// Names of the checks in metrics and figures; a name that occurs twice is numbered.
    pub(super) fn labels(&self) -> Vec<String> {
        let mut labels: Vec<String> = Vec::new();
        for (i, check) in self.components.iter().enumerate() {
            let times = self.components[..i].iter().filter(|other| other.name == check.name).count();
            labels.push(if times == 0 { check.name.clone() } else { format!("{}_{}", check.name, times + 1) });
        }
        labels
    }

    /// The names of those that read the reference.
    pub(super) fn reference_readers(&self) -> impl Iterator<Item = &str> {
        self.scorers.iter().filter(|scorer| scorer.reads_reference()).map(|scorer| scorer.name())
    }

    /// Leaves out those that read the reference.
    pub(super) fn leave_out_reference_readers(&mut self) {
        let mut keeps = self.scorers.iter().map(|scorer| !scorer.reads_reference());
        self.components.retain(|_| keeps.next().unwrap_or_default());
        self.scorers.retain(|scorer| !scorer.reads_reference());
    }

    pub(super) fn scorers(&mut self) -> impl Iterator<Item = &mut dyn RewardScorer> {
        self.scorers.iter_mut().map(|scorer| &mut **scorer as &mut dyn RewardScorer)
    }

    /// Puts the weighted sum of the checks before their scores, which come last in `scores`; a single check is its own
    /// sum. A check of weight 0 is no part of a sum; where another has no score, there is no sum. A check of negative
    /// weight is better if it is lower, so its own score is negated.
    pub(super) fn add_sum(&self, scores: &mut Vec<Option<f64>>) {
        let Some(first) = scores.len().checked_sub(self.components.len()) else { return };
        let weights: Vec<f64> = self.components.iter().map(|check| check.weight).collect();
        let counting = weights.iter().zip(&scores[first..]).filter(|(weight, _)| **weight != 0.0);
        let sum: Option<f64> = counting.map(|(weight, score)| Some(weight * (*score)?)).sum();
        match weights[..] {
            [] | [0.0] => {}
            [_] => scores[first] = sum,
            _ => {
                for (score, weight) in scores[first..].iter_mut().zip(&weights) {
                    *score = score.map(|score| if *weight < 0.0 { -score } else { score });
                }
                scores.insert(first, sum.filter(|_| weights.iter().any(|weight| *weight != 0.0)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn component(name: &str, weight: f64) -> RewardComponent {
        RewardComponent { name: name.into(), weight, options: Default::default() }
    }

    fn sums(weights: &[f64], scores: &[Option<f64>]) -> Vec<Option<f64>> {
        let components = weights.iter().map(|weight| component("brightness", *weight)).collect();
        let mut scores = scores.to_vec();
        Checks { components, scorers: Vec::new() }.add_sum(&mut scores);
        scores
    }

    #[test]
    fn labels_number_repeated_names() {
        let components = ["motion", "flicker", "motion"].map(|name| component(name, 1.0)).to_vec();
        assert_eq!(Checks { components, scorers: Vec::new() }.labels(), ["motion", "flicker", "motion_2"]);
    }

    #[test]
    fn only_readers_of_the_reference_are_left_out() {
        let components = ["first_frame", "motion"].map(|name| component(name, 1.0)).to_vec();
        let mut checks = Checks::open(components, &Registry::linked().unwrap(), &BuildContext::new("flex")).unwrap();
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
