//! Reads the sizes of a network from the shapes of its weights, and checks these shapes.

use std::collections::BTreeMap;

use roll_core::{Error, Result};

/// Shapes by the official key of the weight.
pub struct WeightShapes<'a> {
    /// Name of the network in error messages.
    pub network: &'static str,
    /// Shape by key.
    pub shapes: &'a BTreeMap<String, Vec<usize>>,
}

impl WeightShapes<'_> {
    /// The shape of a weight. Fails unless it has `N` axes.
    pub fn get<const N: usize>(&self, key: &str) -> Result<[usize; N]> {
        let shape = self.shapes.get(key).ok_or_else(|| self.missing(key))?;
        let shape = shape.as_slice();
        shape.try_into().map_err(|_| Error::shape(format!("the weight `{key}`"), format!("rank {N}"), shape))
    }

    /// Number of blocks. `key` returns the key of a weight that every block has, from the block's number.
    pub fn blocks(&self, key: impl Fn(usize) -> String) -> usize {
        (0..).take_while(|i| self.shapes.contains_key(&key(*i))).count()
    }

    /// Fails unless every weight of `weights` (pairs of key and shape) is present in its shape.
    pub fn check(&self, weights: &[(String, Vec<usize>)]) -> Result<()> {
        for (key, expected) in weights {
            match self.shapes.get(key) {
                None => return Err(self.missing(key)),
                Some(found) if found != expected => {
                    return Err(Error::shape(format!("the weight `{key}`"), format!("{expected:?}"), found));
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// The error for a weight that is missing.
    pub fn missing(&self, key: &str) -> Error {
        Error::Unsupported(format!(
            "the weight `{key}` of the {} is missing: the file is incomplete, or of another model",
            self.network
        ))
    }
}
