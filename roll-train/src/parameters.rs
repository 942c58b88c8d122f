//! Reads all parameters of a model, part by part, for their norm and a hash that shows whether they changed.

use roll_core::{Model, Result};

/// The metric with the norm of the parameters.
pub(crate) const NORM: &str = "actor/param_norm";

/// Maximum number of parameters of a model whose norm and hash are computed after each step. More would take too long,
/// since all of them are copied for it. LoRA of rank 32 on both experts of A14B is below the limit, with 306,708,480;
/// training all weights of a model is mostly above it.
const MAX_SUMMED: usize = 1 << 29;
/// Number of values in a part in which parameters are read. A larger tensor is one part.
const VALUES_OF_PART: usize = 1 << 22;

/// The prime of the 64-bit hash FNV-1a.
const FNV_PRIME: u64 = 0x100_0000_01b3;

/// Whether norm and hash are computed for a model with `count` parameters.
const fn are_summed(count: usize) -> bool {
    count <= MAX_SUMMED
}

/// The norm and the hash of all parameters of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct ParameterSums {
    /// Sum of the squares.
    squares: f64,
    /// A hash of all values, by which a change is noticed.
    pub(crate) hash: u64,
}

impl ParameterSums {
    /// The sums of the parameters of `model`; `None` if there are too many. All ranks must call it.
    pub(crate) fn of(model: &mut dyn Model) -> Result<Option<Self>> {
        if !are_summed(model.parameter_count()) {
            return Ok(None);
        }
        let mut sums = Self::default();
        for_each_part(model, VALUES_OF_PART, |values| sums.add(values))?;
        Ok(Some(sums))
    }

    /// The L2 norm of all parameters.
    pub(crate) fn norm(&self) -> f64 {
        self.squares.sqrt()
    }

    /// Adds the values of further parameters.
    fn add(&mut self, values: &[f32]) {
        for value in values {
            self.squares += f64::from(*value).powi(2);
            // FNV-1a over words. Each step is a bijection, so a change of one value always changes the hash.
            self.hash = (self.hash ^ u64::from(value.to_bits())).wrapping_mul(FNV_PRIME);
        }
    }
}

/// Calls `f` with all parameters, in their order in the flat layout. If the model can read single tensors, each call
/// has several whole tensors of at most `max_values` values together, or one larger tensor. Otherwise there is one call
/// with all values. All ranks must call this.
pub(crate) fn for_each_part(model: &mut dyn Model, max_values: usize, mut f: impl FnMut(&[f32])) -> Result<()> {
    let lengths: Vec<usize> = model.parameters().iter().map(|spec| spec.len()).collect();
    let Some(parts) = model.parts() else {
        let mut values = vec![0.0; lengths.iter().sum()];
        model.read_parameters(&mut values)?;
        f(&values);
        return Ok(());
    };
    let mut values = Vec::new();
    let mut first_tensor = 0;
    while first_tensor < lengths.len() {
        let (mut end, mut length) = (first_tensor + 1, lengths[first_tensor]);
        while end < lengths.len() && length + lengths[end] <= max_values {
            length += lengths[end];
            end += 1;
        }
        values.resize(length, 0.0);
        parts.read_part(first_tensor..end, &mut values)?;
        f(&values);
        first_tensor = end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn norm_and_guard_cover_lora_of_rank_32_on_both_experts_of_a14b() {
        // Counts of `roll plan --network wan2_2-i2v-a14b`: one expert, both, and every weight of one.
        assert_eq!([153_354_240, 306_708_480, 14_288_901_184].map(are_summed), [true, true, false]);
    }

    #[test]
    fn hash_depends_on_every_bit_and_norm_is_the_root_of_the_squares() {
        let of = |values: &[f32]| {
            let mut sums = ParameterSums::default();
            values.chunks(2).for_each(|part| sums.add(part));
            (sums.norm(), sums.hash)
        };
        let (norm, hash) = of(&[3.0, 0.0, -4.0]);
        assert_eq!(norm, 5.0);
        assert_ne!(hash, of(&[3.0, 0.0, (-4.0f32).next_up()]).1);
        assert_ne!(hash, of(&[3.0f32.next_up(), 0.0, -4.0]).1);
        assert_ne!(hash, of(&[3.0, f32::from_bits(1), -4.0]).1);
        assert_eq!(hash, of(&[3.0, 0.0, -4.0]).1);
    }
}
