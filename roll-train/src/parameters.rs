//! A look at the parameters after each step: how large they are, and whether they changed at all.

use roll_core::{Model, Result};

/// Name of the norm in the metrics.
pub(super) const NORM: &str = "actor/param_norm";

/// Parameters beyond this number (those of a full training) are not looked at: they would be copied at every step.
const MOST: usize = 1 << 28;
/// They are read in parts of about this many.
const PART: usize = 1 << 22;

/// The sums over all parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Glance {
    /// L2 norm.
    pub(super) norm: f64,
    /// Two states of the parameters with one hash are the same.
    pub(super) hash: u64,
}

/// Looks at the parameters, where they are few enough. All ranks must call it.
pub(super) fn glance(model: &mut dyn Model) -> Result<Option<Glance>> {
    let lengths: Vec<usize> = model.parameters().iter().map(|spec| spec.len()).collect();
    let count: usize = lengths.iter().sum();
    if count > MOST {
        return Ok(None);
    }
    let mut sums = Sums { squares: 0.0, hash: 0 };
    let mut values = Vec::new();
    match model.parts() {
        None => {
            values.resize(count, 0.0);
            model.read_parameters(&mut values)?;
            sums.add(&values);
        }
        Some(parts) => {
            let mut first = 0;
            while first < lengths.len() {
                let (mut end, mut length) = (first + 1, lengths[first]);
                while end < lengths.len() && length < PART {
                    length += lengths[end];
                    end += 1;
                }
                values.resize(length, 0.0);
                parts.read_part(first..end, &mut values)?;
                sums.add(&values);
                first = end;
            }
        }
    }
    Ok(Some(Glance { norm: sums.squares.sqrt(), hash: sums.hash }))
}

struct Sums {
    squares: f64,
    hash: u64,
}

impl Sums {
    fn add(&mut self, values: &[f32]) {
        for value in values {
            self.squares += f64::from(*value).powi(2);
            // FNV-1a over words: every step of it can be undone, so a change of one value always shows.
            self.hash = (self.hash ^ u64::from(value.to_bits())).wrapping_mul(0x100_0000_01b3);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_change_shows_in_the_hash_and_the_norm_is_the_root_of_the_squares() {
        let of = |values: &[f32]| {
            let mut sums = Sums { squares: 0.0, hash: 0 };
            values.chunks(2).for_each(|part| sums.add(part));
            (sums.squares.sqrt(), sums.hash)
        };
        let (norm, hash) = of(&[3.0, 0.0, -4.0]);
        assert_eq!(norm, 5.0);
        assert_ne!(hash, of(&[3.0, 0.0, (-4.0f32).next_up()]).1);
        assert_ne!(hash, of(&[3.0f32.next_up(), 0.0, -4.0]).1);
        assert_ne!(hash, of(&[3.0, f32::from_bits(1), -4.0]).1);
        assert_eq!(hash, of(&[3.0, 0.0, -4.0]).1);
    }
}
