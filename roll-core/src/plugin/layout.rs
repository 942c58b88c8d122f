//! The layout of the boundary's types, compared before a Rust plugin is called.
//!
//! `abi_stable` does the same for more than we need: it ties the layout to the version of the crate that holds the
//! types (a plugin of another roll-core would be refused although nothing at the boundary changed), tells a difference
//! in 60 KB, and brings a dozen crates, without a release since 2023, to every plugin author. Plugins in C need plain
//! structures anyway, so the structures describe themselves: [`boundary!`] defines them and lists their fields.

use super::abi::{
    RollAbi, RollComponent, RollContext, RollError, RollHost, RollNamedNumber, RollNamedTensor, RollObject, RollOption,
    RollOwned, RollPlugin, RollPullback, RollStr, RollTensor,
};
use super::algorithm::{RollAlgorithmFacts, RollAlgorithmTable, RollEnvironmentMaker};
use super::data::slice;
use super::diffusion::{
    RollConditionInput, RollConditioning, RollDiffusionTable, RollSchedule, RollValue, RollVelocityInput,
};
use super::environment::{RollEnvironmentFacts, RollEnvironmentTable, RollTransition};
use super::language::{
    RollChatInput, RollEvaluateInput, RollGenerateInput, RollGeneration, RollLanguageFacts, RollLanguageTable,
    RollMessage, RollTokenStats, RollTokens,
};
use super::model::{RollFile, RollModelFacts, RollModelTable, RollParameter};
use super::reward::{RollRewardFacts, RollRewardTable, RollScore, RollScoreInput, RollVideo};
use super::step::{
    RollEvaluated, RollEvaluation, RollEvaluationContext, RollMaybe, RollNamedVideo, RollNoise, RollProgress,
    RollSample, RollSkipped, RollStepContext, RollStepReport, RollValidation, RollValidationContext,
};
use super::strategy::{RollOptimizer, RollRanks, RollStrategyReport, RollStrategyTable};
use crate::{Error, Result};

/// More fields or types than this are garbage.
const MAX_ENTRIES: usize = 4096;

/// A field.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct FieldLayout {
    pub(super) name: RollStr,
    /// Its type as Rust writes it; spaces mean nothing.
    pub(super) of: RollStr,
    pub(super) offset: usize,
}

/// A structure.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct TypeLayout {
    pub(super) name: RollStr,
    pub(super) size: usize,
    pub(super) align: usize,
    pub(super) fields: *const FieldLayout,
    pub(super) field_count: usize,
}

// SAFETY: statics of plain data.
unsafe impl Sync for FieldLayout {}
// SAFETY: as above.
unsafe impl Sync for TypeLayout {}

/// A type that says how it is laid out.
pub(super) trait Described {
    const LAYOUT: TypeLayout;
}

/// Defines `#[repr(C)]` structures that are [`Described`].
macro_rules! boundary {
    ($(
        $(#[$meta:meta])*
        pub struct $name:ident $(<$of:ident>)? { $( $(#[$about:meta])* pub $field:ident: $ty:ty ),* $(,)? }
    )+) => {$(
        $(#[$meta])*
        #[repr(C)]
        pub struct $name $(<$of>)? { $( $(#[$about])* pub $field: $ty ),* }

        impl $(<$of>)? $crate::plugin::layout::Described for $name $(<$of>)? {
            const LAYOUT: $crate::plugin::layout::TypeLayout = {
                let fields: &'static [$crate::plugin::layout::FieldLayout] = &[$(
                    $crate::plugin::layout::FieldLayout {
                        name: $crate::plugin::abi::RollStr::lend(stringify!($field)),
                        of: $crate::plugin::abi::RollStr::lend(stringify!($ty)),
                        offset: std::mem::offset_of!(Self, $field),
                    }
                ),*];
                $crate::plugin::layout::TypeLayout {
                    name: $crate::plugin::abi::RollStr::lend(stringify!($name)),
                    size: size_of::<Self>(),
                    align: align_of::<Self>(),
                    fields: fields.as_ptr(),
                    field_count: fields.len(),
                }
            };
        }
    )+};
}
pub(super) use boundary;

/// Everything that crosses.
static TYPES: &[TypeLayout] = &[
    RollAbi::LAYOUT,
    RollStr::LAYOUT,
    RollOwned::<u8>::LAYOUT,
    RollTensor::LAYOUT,
    RollNamedTensor::LAYOUT,
    RollNamedNumber::LAYOUT,
    RollError::LAYOUT,
    RollObject::LAYOUT,
    RollPullback::LAYOUT,
    RollContext::LAYOUT,
    RollOption::LAYOUT,
    RollComponent::LAYOUT,
    RollPlugin::LAYOUT,
    RollHost::LAYOUT,
    RollRewardFacts::LAYOUT,
    RollVideo::LAYOUT,
    RollScoreInput::LAYOUT,
    RollScore::LAYOUT,
    RollRewardTable::LAYOUT,
    RollTransition::LAYOUT,
    RollEnvironmentFacts::LAYOUT,
    RollEnvironmentTable::LAYOUT,
    RollParameter::LAYOUT,
    RollModelFacts::LAYOUT,
    RollFile::LAYOUT,
    RollModelTable::LAYOUT,
    RollSchedule::LAYOUT,
    RollConditionInput::LAYOUT,
    RollConditioning::LAYOUT,
    RollVelocityInput::LAYOUT,
    RollValue::LAYOUT,
    RollDiffusionTable::LAYOUT,
    RollTokens::LAYOUT,
    RollGenerateInput::LAYOUT,
    RollGeneration::LAYOUT,
    RollEvaluateInput::LAYOUT,
    RollTokenStats::LAYOUT,
    RollMessage::LAYOUT,
    RollChatInput::LAYOUT,
    RollLanguageFacts::LAYOUT,
    RollLanguageTable::LAYOUT,
    RollOptimizer::LAYOUT,
    RollStrategyReport::LAYOUT,
    RollRanks::LAYOUT,
    RollStrategyTable::LAYOUT,
    RollSample::LAYOUT,
    RollNoise::LAYOUT,
    RollProgress::LAYOUT,
    RollStepContext::LAYOUT,
    RollEvaluationContext::LAYOUT,
    RollSkipped::LAYOUT,
    RollNamedVideo::LAYOUT,
    RollStepReport::LAYOUT,
    RollValidationContext::LAYOUT,
    RollValidation::LAYOUT,
    RollMaybe::LAYOUT,
    RollEvaluated::LAYOUT,
    RollEvaluation::LAYOUT,
    RollAlgorithmFacts::LAYOUT,
    RollEnvironmentMaker::LAYOUT,
    RollAlgorithmTable::LAYOUT,
];

/// The symbol `roll_plugin_layout` of Rust plugins: data, so that no code runs before it is compared.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LayoutTag {
    types: *const TypeLayout,
    count: usize,
}

// SAFETY: points to statics.
unsafe impl Sync for LayoutTag {}

impl LayoutTag {
    /// The layout as this crate was compiled.
    pub const CURRENT: Self = Self { types: TYPES.as_ptr(), count: TYPES.len() };

    /// Fails with the first difference between `self`, a plugin's, and the host's.
    pub(super) fn check(&self) -> Result<(), String> {
        // SAFETY: the statics of a plugin that is never unloaded; the version says that these types are as they are.
        let theirs = unsafe { read(self) }.map_err(|e| e.to_string())?;
        // SAFETY: our own.
        let ours = unsafe { read(&Self::CURRENT) }.map_err(|e| e.to_string())?;
        compare(&ours, &theirs)
    }
}

/// A structure as text and numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct Structure {
    /// Its name.
    pub name: String,
    /// Bytes.
    pub size: usize,
    align: usize,
    /// Name, type and offset of each field.
    pub fields: Vec<(String, String, usize)>,
}

/// What the C header must say too, for the test that compares the two.
pub fn structures() -> Vec<Structure> {
    // SAFETY: our own.
    unsafe { read(&LayoutTag::CURRENT) }.unwrap_or_default()
}

/// # Safety
/// The tag points to what its types say.
unsafe fn read(tag: &LayoutTag) -> Result<Vec<Structure>> {
    let bounded = |n: usize| match n > MAX_ENTRIES {
        true => Err(Error::Misuse(format!("the layout has {n} entries"))),
        false => Ok(n),
    };
    // SAFETY: as the caller promises.
    let types = unsafe { slice(tag.types, bounded(tag.count)?) }?;
    types
        .iter()
        .map(|t| {
            // SAFETY: as the caller promises.
            let (name, fields) = unsafe { (t.name.get()?.to_string(), slice(t.fields, bounded(t.field_count)?)?) };
            let field = |f: &FieldLayout| {
                // SAFETY: as the caller promises.
                let (name, of) = unsafe { (f.name.get()?, f.of.get()?) };
                Ok((name.to_string(), plain(of), f.offset))
            };
            let fields = fields.iter().map(field).collect::<Result<_>>()?;
            Ok(Structure { name, size: t.size, align: t.align, fields })
        })
        .collect()
}

/// Without what a compiler may print in another way: spaces, and a comma before a parenthesis.
fn plain(of: &str) -> String {
    let dense: String = of.chars().filter(|c| !c.is_whitespace()).collect();
    dense.replace(",)", ")")
}

fn compare(ours: &[Structure], theirs: &[Structure]) -> Result<(), String> {
    for own in ours {
        let name = &own.name;
        let Some(other) = theirs.iter().find(|t| t.name == *name) else {
            return Err(format!("it does not know `{name}`"));
        };
        for (i, (field, of, offset)) in own.fields.iter().enumerate() {
            let expected = format!("`{field}: {of}` at byte {offset}");
            match other.fields.get(i) {
                Some(found) if *found == (field.clone(), of.clone(), *offset) => {}
                Some((field, of, offset)) => {
                    return Err(format!("`{name}`: expected {expected}, found `{field}: {of}` at byte {offset}"));
                }
                None => return Err(format!("`{name}`: expected {expected}, found no such field")),
            }
        }
        if own.fields.len() != other.fields.len() || (own.size, own.align) != (other.size, other.align) {
            return Err(format!(
                "`{name}`: expected {} fields in {} bytes, found {} in {}",
                own.fields.len(),
                own.size,
                other.fields.len(),
                other.size
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_of_this_crate_agrees_with_itself() {
        LayoutTag::CURRENT.check().unwrap();
        assert!(structures().iter().all(|s| s.size > 0 && !s.fields.is_empty()));
    }

    #[test]
    fn the_first_difference_is_told() {
        let ours = structures();
        let at = ours.iter().position(|s| s.name == "RollVideo").unwrap();
        let told = |change: &dyn Fn(&mut Structure)| {
            let mut theirs = ours.clone();
            change(&mut theirs[at]);
            compare(&ours, &theirs).unwrap_err()
        };
        let swapped = told(&|s| s.fields.swap(0, 1));
        assert!(swapped.contains("`RollVideo`: expected `frames:"), "{swapped}");
        let retyped = told(&|s| s.fields[1].1 = "f32".into());
        assert!(retyped.contains("`fps: f64` at byte 8, found `fps: f32` at byte 8"), "{retyped}");
        assert!(told(&|s| s.fields.truncate(1)).contains("no such field"));
        assert!(told(&|s| s.fields.push(("more".into(), "u8".into(), 16))).contains("found 3 in 16"));
        assert!(told(&|s| s.name = "Other".into()).contains("does not know `RollVideo`"));
    }

    #[test]
    fn spaces_and_trailing_commas_are_no_difference() {
        assert_eq!(
            plain("unsafe extern \"C\" fn(a: *mut c_void,\n b: u32,) -> u32"),
            "unsafeextern\"C\"fn(a:*mutc_void,b:u32)->u32"
        );
    }
}
