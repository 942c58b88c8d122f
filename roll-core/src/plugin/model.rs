//! [`Model`] across the boundary. What a diffusion or language model can do beside it stands in files of their own, with
//! tables of their own whose functions take the model's state.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::Arc;

use roll_abi::{
    RollDiffusionTable, RollError, RollFile, RollLanguageTable, RollList, RollModelFacts, RollModelTable, RollObject,
    RollOwned, RollParameter, RollParts, RollPartsTable, RollStr,
};

use super::crossing::{Answer, Argument, Calls, crossing, log};
use super::data::{list, own, take, text};
use super::foreign::{Foreign, Source};
use super::served::{Served, serve};
use super::tensor::{LentTensors, keep_tensors};
use super::{diffusion, language, parts};
use crate::{
    DiffusionModel, GradientSink, LanguageModel, Model, ParameterParts, ParameterSpec, Result, StateDict,
    WeightPlacement,
};

pub(super) type Target = dyn Model;

crossing! {
    Model for ForeignModel, table RollModelTable of Target {
        ref fn read_parameters(out: &mut [f32]);
        mut fn write_parameters(values: &[f32]);
        mut fn take_gradients(add_into: &mut [f32]);
        ref fn export_adapter() -> BTreeMap<String, StateDict>;
        mut fn import_adapter(files: &BTreeMap<String, StateDict>);
        mut fn deliver_gradients(sink: Option<Arc<dyn GradientSink>>) -> bool, or false, absent false;
        ref fn weight_placement() -> Option<WeightPlacement>, or None, absent None;
    }
    by hand [facts, parts] {
        fn parts(&mut self) -> Option<&mut dyn ParameterParts> {
            let told = self.object.call("parts", self.table.parts, |parts, state, out, error| {
                // SAFETY: P7.
                unsafe { parts(state, out, error) }
            });
            match told {
                Ok(told) => self.parts = told.flatten(),
                Err(error) => log(&error),
            }
            if self.parts.is_some() { Some(self) } else { None }
        }

        fn parameters(&self) -> &[ParameterSpec] {
            &self.facts.parameters
        }

        fn as_diffusion(&mut self) -> Option<&mut dyn DiffusionModel> {
            if self.facts.diffusion.is_some() { Some(self) } else { None }
        }

        fn as_language(&mut self) -> Option<&mut dyn LanguageModel> {
            if self.facts.language.is_some() { Some(self) } else { None }
        }
    }
}

unsafe extern "C" fn facts(state: *mut c_void, out: *mut RollModelFacts, error: *mut RollError) -> u32 {
    let body = |model: &mut Target| {
        let diffusion = model.as_diffusion().map(|_| diffusion::TABLE);
        let language = model.as_language().map(|_| language::TABLE);
        Ok(Facts { parameters: model.parameters().to_vec(), diffusion, language }.give())
    };
    // SAFETY: P4, P7 and P8.
    unsafe { serve(state, out, error, body) }
}

unsafe extern "C" fn parts(state: *mut c_void, out: *mut RollParts, error: *mut RollError) -> u32 {
    let body = |model: &mut Target| Ok(model.parts().map(|_| parts::TABLE).give());
    // SAFETY: P4, P7 and P8.
    unsafe { serve(state, out, error, body) }
}

pub(super) fn give(model: Box<dyn Model>) -> RollObject {
    Served::give(model, &TABLE)
}

/// Lends a model to the other side for a call.
pub(super) struct LentModel(Served<Target>);

impl LentModel {
    pub(super) fn new<'a>(model: &'a mut (dyn Model + 'a)) -> Self {
        let model: *mut (dyn Model + 'a) = model;
        // SAFETY: P1; only the lifetime changes, and who makes this drops it before the borrow ends.
        Self(Served::lend(unsafe { std::mem::transmute::<*mut (dyn Model + 'a), *mut Target>(model) }))
    }

    pub(super) fn object(&self) -> RollObject {
        self.0.object(&TABLE)
    }
}

impl<'a> Argument for &'a mut (dyn Model + 'a) {
    type Wire = RollObject;
    type Lent = LentModel;
    type Kept = ForeignModel;
    type Given<'k> = &'k mut dyn Model;
    fn lend(self) -> LentModel {
        LentModel::new(self)
    }
    fn wire(lent: &mut LentModel) -> RollObject {
        lent.object()
    }
    unsafe fn keep(wire: RollObject) -> Result<ForeignModel> {
        // SAFETY: as the caller promises; what is lent has no release.
        unsafe { ForeignModel::new(wire, Source::Host) }
    }
    fn given(kept: &mut ForeignModel) -> &mut dyn Model {
        kept
    }
}

/// A model of the other side.
pub(super) struct ForeignModel {
    pub(super) object: Foreign,
    table: RollModelTable,
    pub(super) facts: Facts,
    pub(super) parts: Option<RollPartsTable>,
}

impl ForeignModel {
    /// # Safety
    /// As [`Foreign::new`].
    pub(super) unsafe fn new(object: RollObject, source: Source) -> Result<Self> {
        // SAFETY: as the caller promises.
        let (object, table) = unsafe { Foreign::new::<RollModelTable>(object, source) }?;
        let facts = object.call("parameters", table.facts, |facts, state, out, error| {
            // SAFETY: P7.
            unsafe { facts(state, out, error) }
        })?;
        let facts = object.must("facts", facts)?;
        Ok(Self { object, table, facts, parts: None })
    }
}

impl Calls<RollModelTable> for ForeignModel {
    fn callee(&self) -> (&Foreign, Option<&RollModelTable>) {
        (&self.object, Some(&self.table))
    }
}

/// What of a model does not change.
#[derive(Default)]
pub(super) struct Facts {
    parameters: Vec<ParameterSpec>,
    pub(super) diffusion: Option<RollDiffusionTable>,
    pub(super) language: Option<RollLanguageTable>,
}

impl Answer for Facts {
    type Wire = RollModelFacts;
    fn give(self) -> RollModelFacts {
        let parameter =
            |s: &ParameterSpec| RollParameter { name: RollStr::lend(&s.name), shape: RollList::lend(&s.shape) };
        let items = self.parameters.iter().map(parameter).collect();
        RollModelFacts {
            diffusion: self.diffusion.map_or(std::ptr::null(), |_| (&raw const diffusion::TABLE).cast()),
            language: self.language.map_or(std::ptr::null(), |_| (&raw const language::TABLE).cast()),
            parameters: own(items, self.parameters),
        }
    }
    unsafe fn take(wire: RollModelFacts, source: &Source) -> Result<Self> {
        let spec = |p: &RollParameter| {
            // SAFETY: the list is valid until it is released.
            unsafe { Ok(ParameterSpec { name: text(p.name)?.into(), shape: list(p.shape)?.to_vec() }) }
        };
        // SAFETY: as the caller promises.
        let parameters = unsafe { take(wire.parameters, |items| items.iter().map(spec).collect()) }?;
        // SAFETY: P3 and P8.
        let (diffusion, language) = unsafe { (source.part(wire.diffusion)?, source.part(wire.language)?) };
        Ok(Self { parameters, diffusion, language })
    }
}

impl Answer for Option<RollPartsTable> {
    type Wire = RollParts;
    fn give(self) -> RollParts {
        RollParts { table: self.map_or(std::ptr::null(), |_| (&raw const parts::TABLE).cast()) }
    }
    unsafe fn take(wire: RollParts, source: &Source) -> Result<Self> {
        // SAFETY: P3 and P8.
        unsafe { source.part(wire.table) }
    }
}

/// Files of an adapter, lent.
pub(super) struct LentFiles {
    files: Vec<RollFile>,
    _tensors: Vec<LentTensors>,
}

impl LentFiles {
    fn new(files: &BTreeMap<String, StateDict>) -> Self {
        let tensors: Vec<LentTensors> = files.values().map(LentTensors::new).collect();
        let file = |(name, lent): (&String, &LentTensors)| RollFile { name: RollStr::lend(name), tensors: lent.list() };
        Self { files: files.keys().zip(&tensors).map(file).collect(), _tensors: tensors }
    }
}

/// # Safety
/// P1 and P9.
unsafe fn keep_files(files: &[RollFile]) -> Result<BTreeMap<String, StateDict>> {
    // SAFETY: as the caller promises.
    files.iter().map(|file| unsafe { Ok((text(file.name)?.to_string(), keep_tensors(list(file.tensors)?)?)) }).collect()
}

impl<'a> Argument for &'a BTreeMap<String, StateDict> {
    type Wire = RollList<RollFile>;
    type Lent = LentFiles;
    type Kept = BTreeMap<String, StateDict>;
    type Given<'k> = &'k BTreeMap<String, StateDict>;
    fn lend(self) -> LentFiles {
        LentFiles::new(self)
    }
    fn wire(lent: &mut LentFiles) -> RollList<RollFile> {
        RollList::lend(&lent.files)
    }
    unsafe fn keep(wire: RollList<RollFile>) -> Result<BTreeMap<String, StateDict>> {
        // SAFETY: as the caller promises.
        unsafe { keep_files(list(wire)?) }
    }
    fn given(kept: &mut BTreeMap<String, StateDict>) -> &BTreeMap<String, StateDict> {
        kept
    }
}

impl Answer for BTreeMap<String, StateDict> {
    type Wire = RollOwned<RollFile>;
    fn give(self) -> RollOwned<RollFile> {
        let LentFiles { files, _tensors } = LentFiles::new(&self);
        own(files, (_tensors, self))
    }
    unsafe fn take(wire: RollOwned<RollFile>, _: &Source) -> Result<Self> {
        // SAFETY: as the caller promises.
        unsafe { take(wire, |files| keep_files(files)) }
    }
}
