//! Layer names of programs that join several layers of a checkpoint, such as q, k and v, into one.
//!
//! A model with such names submits [`FusedNames`]; `roll convert-lora` asks each that is linked in.

use std::path::Path;

use roll_core::Result;

use super::Lora;
use crate::weights::Checkpoint;

/// The fused names of one family of models.
#[derive(Debug)]
pub struct FusedNames {
    /// Renames the layers of a LoRA to those of the checkpoint, and divides fused ones, if the weights are those of a
    /// transformer of this family, under the names of any program. Returns whether they are. The path is that of the
    /// LoRA, for error messages.
    pub to_names_of: fn(&mut Lora, &Path, &Checkpoint) -> Result<bool>,
    /// Renames the layers of a LoRA under the names of the checkpoint to the fused ones. Returns false, without a
    /// change, if it has no layer that is fused.
    pub fuse: fn(&mut Lora) -> Result<bool>,
}

roll_core::inventory::collect!(FusedNames);

/// Renames the layers of `lora` to those of the model whose weights are `base`. `path` is that of the LoRA, for error
/// messages.
///
/// # Errors
/// Fails if the layers do not have the sizes of the model's.
pub fn to_names_of(lora: &mut Lora, path: &Path, base: &Checkpoint) -> Result<()> {
    for family in roll_core::inventory::iter::<FusedNames> {
        if (family.to_names_of)(lora, path, base)? {
            return Ok(());
        }
    }
    lora.resolve(base.keys());
    Ok(())
}

/// Renames the layers of `lora` to the fused ones of its family. Returns false if no family fuses one of them.
///
/// # Errors
/// Fails if layers that become one differ in their scale or in their sizes.
pub fn fuse(lora: &mut Lora) -> Result<bool> {
    for family in roll_core::inventory::iter::<FusedNames> {
        if (family.fuse)(lora)? {
            return Ok(true);
        }
    }
    Ok(false)
}
