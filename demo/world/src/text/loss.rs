//! The loss of the text encoder: classification of a prompt's attributes from the mean hidden state.

use burn_tensor::{Device, Tensor, activation};
use roll_backends::Scope;
use roll_core::Result;
use roll_wan::umt5::Umt5;

use crate::training::upload;

const HEADS: &str = "attributes.";

/// Returns the name of an attribute's classifier, `[classes, dim]`.
pub fn head(attribute: usize) -> String {
    format!("{HEADS}{attribute}.weight")
}

/// Returns whether a parameter belongs to a classifier and not to the encoder.
pub fn is_head(name: &str) -> bool {
    name.starts_with(HEADS)
}

/// Returns the mean cross-entropy of the four attributes over `samples`: token ids and attributes.
pub fn attributes(
    encoder: &Umt5,
    samples: &[(Vec<u32>, [usize; 4])],
    classes: [usize; 4],
    scope: &Scope<'_>,
    device: &Device,
) -> Result<Tensor<1>> {
    let means = samples.iter().map(|(ids, _)| {
        let keys: Vec<usize> = (0..ids.len()).collect();
        Ok(encoder.hidden_recorded(ids, &keys)?.mean_dim(0))
    });
    let means = Tensor::cat(means.collect::<Result<Vec<_>>>()?, 0);
    let mut total = None;
    for (i, count) in classes.into_iter().enumerate() {
        let logits = means.clone().matmul(scope.weight::<2>(&head(i))?.transpose());
        let mut said = vec![0.0; samples.len() * count];
        samples.iter().enumerate().for_each(|(row, (_, attributes))| said[row * count + attributes[i]] = 1.0);
        let said = upload(said, [samples.len(), count], device).autodiff();
        let log_likelihood = (activation::log_softmax(logits, 1) * said).sum() / samples.len() as f32;
        total = Some(total.map_or(log_likelihood.clone(), |sum: Tensor<1>| sum + log_likelihood));
    }
    Ok(-total.unwrap_or_else(|| means.mean()) / classes.len() as f32)
}
