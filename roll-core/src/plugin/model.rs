//! [`Model`] across the boundary. What a diffusion or language model can do beside it stands in files of their own; all
//! share one table, and the facts say which functions may be called.

use std::collections::BTreeMap;
use std::ffi::c_void;

use super::abi::{RollError, RollNamedTensor, RollObject, RollOwned, RollStr};
use super::call::{Foreign, Served, Source, serve};
use super::data::{Lent, keep_named, lend_named, slice, slice_mut};
use super::diffusion::{self, RollDiffusionTable};
use super::language::{self, RollLanguageTable};
use super::layout::boundary;
use crate::{DiffusionModel, LanguageModel, Model, ParameterSpec, Result, StateDict};

boundary! {
    /// Name and shape of a trainable tensor.
    #[derive(Clone, Copy)]
    pub struct RollParameter {
        pub name: RollStr,
        pub shape: *const usize,
        pub rank: usize,
    }
}

boundary! {
    /// Facts of a model that do not change.
    #[derive(Default)]
    pub struct RollModelFacts {
        pub parameters: RollOwned<RollParameter>,
        /// 1: the functions of diffusion models work.
        pub diffusion: u32,
        /// 1: the functions of language models work.
        pub language: u32,
    }
}

boundary! {
    /// Tensors of one file of an adapter.
    #[derive(Clone, Copy)]
    pub struct RollFile {
        pub name: RollStr,
        pub tensors: *const RollNamedTensor,
        pub count: usize,
    }
}

boundary! {
    /// The functions of a model.
    #[derive(Clone, Copy)]
    pub struct RollModelTable {
        pub facts: unsafe extern "C" fn(state: *mut c_void, out: *mut RollModelFacts, error: *mut RollError) -> u32,
        pub read: unsafe extern "C" fn(state: *mut c_void, out: *mut f32, len: usize, error: *mut RollError) -> u32,
        pub write:
            unsafe extern "C" fn(state: *mut c_void, values: *const f32, len: usize, error: *mut RollError) -> u32,
        pub take_gradients:
            unsafe extern "C" fn(state: *mut c_void, add_into: *mut f32, len: usize, error: *mut RollError) -> u32,
        pub export_adapter:
            unsafe extern "C" fn(state: *mut c_void, out: *mut RollOwned<RollFile>, error: *mut RollError) -> u32,
        pub import_adapter: unsafe extern "C" fn(
            state: *mut c_void,
            files: *const RollFile,
            count: usize,
            error: *mut RollError,
        ) -> u32,
        pub diffusion: RollDiffusionTable,
        pub language: RollLanguageTable,
    }
}

pub(super) type Target = dyn Model;

static TABLE: RollModelTable = RollModelTable {
    facts,
    read,
    write,
    take_gradients,
    export_adapter,
    import_adapter,
    diffusion: diffusion::TABLE,
    language: language::TABLE,
};

pub(super) fn give(model: Box<dyn Model>) -> RollObject {
    Served::give(model, &TABLE)
}

/// Lends a model to the other side for a call.
pub(super) struct LentModel(Served<Target>);

impl LentModel {
    pub(super) fn new<'a>(model: &'a mut (dyn Model + 'a)) -> Self {
        let model: *mut (dyn Model + 'a) = model;
        // SAFETY: only the lifetime changes; whoever makes this drops it before the borrow ends.
        Self(Served::lend(unsafe { std::mem::transmute::<*mut (dyn Model + 'a), *mut Target>(model) }))
    }

    pub(super) fn object(&self) -> RollObject {
        self.0.object(&TABLE)
    }
}

unsafe extern "C" fn facts(state: *mut c_void, out: *mut RollModelFacts, error: *mut RollError) -> u32 {
    let body = |model: &mut Target| {
        let specs = model.parameters().to_vec();
        let parameter = |s: &ParameterSpec| RollParameter {
            name: RollStr::lend(&s.name),
            shape: s.shape.as_ptr(),
            rank: s.shape.len(),
        };
        let items = specs.iter().map(parameter).collect();
        let parameters = RollOwned::new(items, specs);
        let (diffusion, language) = (model.as_diffusion().is_some().into(), model.as_language().is_some().into());
        Ok(RollModelFacts { parameters, diffusion, language })
    };
    // SAFETY: as the interface says.
    unsafe { serve(state, out, error, body) }
}

unsafe extern "C" fn read(state: *mut c_void, out: *mut f32, len: usize, error: *mut RollError) -> u32 {
    // SAFETY: the buffer is lent for this call.
    let body = |model: &mut Target| model.read_parameters(unsafe { slice_mut(out, len) }?);
    // SAFETY: as the interface says.
    unsafe { serve(state, &mut (), error, body) }
}

unsafe extern "C" fn write(state: *mut c_void, values: *const f32, len: usize, error: *mut RollError) -> u32 {
    // SAFETY: the values are lent for this call.
    let body = |model: &mut Target| model.write_parameters(unsafe { slice(values, len) }?);
    // SAFETY: as the interface says.
    unsafe { serve(state, &mut (), error, body) }
}

unsafe extern "C" fn take_gradients(state: *mut c_void, add_into: *mut f32, len: usize, error: *mut RollError) -> u32 {
    // SAFETY: the buffer is lent for this call.
    let body = |model: &mut Target| model.take_gradients(unsafe { slice_mut(add_into, len) }?);
    // SAFETY: as the interface says.
    unsafe { serve(state, &mut (), error, body) }
}

/// Names and tensors that a list of files points into.
struct Files {
    names: Vec<String>,
    _tensors: Vec<Vec<(String, Lent)>>,
    lists: Vec<Vec<RollNamedTensor>>,
}

impl Files {
    fn new(files: &BTreeMap<String, StateDict>) -> Self {
        let lend = |state: &StateDict| state.iter().map(|(k, t)| (k.clone(), Lent::new(t))).collect::<Vec<_>>();
        let tensors: Vec<_> = files.values().map(lend).collect();
        let lists = tensors.iter().map(|t| lend_named(t)).collect();
        Self { names: files.keys().cloned().collect(), _tensors: tensors, lists }
    }

    fn list(&self) -> Vec<RollFile> {
        let pairs = self.names.iter().zip(&self.lists);
        pairs.map(|(n, l)| RollFile { name: RollStr::lend(n), tensors: l.as_ptr(), count: l.len() }).collect()
    }
}

/// # Safety
/// The files are as the other side made them and live during this call.
unsafe fn keep_files(files: &[RollFile]) -> Result<BTreeMap<String, StateDict>> {
    files
        .iter()
        .map(|file| {
            // SAFETY: as the caller promises.
            unsafe { Ok((file.name.get()?.to_string(), keep_named(slice(file.tensors, file.count)?)?)) }
        })
        .collect()
}

unsafe extern "C" fn export_adapter(state: *mut c_void, out: *mut RollOwned<RollFile>, error: *mut RollError) -> u32 {
    let body = |model: &mut Target| {
        let files = Files::new(&model.export_adapter()?);
        Ok(RollOwned::new(files.list(), files))
    };
    // SAFETY: as the interface says.
    unsafe { serve(state, out, error, body) }
}

unsafe extern "C" fn import_adapter(
    state: *mut c_void,
    files: *const RollFile,
    count: usize,
    error: *mut RollError,
) -> u32 {
    // SAFETY: lent for this call.
    let body = |model: &mut Target| model.import_adapter(&unsafe { keep_files(slice(files, count)?) }?);
    // SAFETY: as the interface says.
    unsafe { serve(state, &mut (), error, body) }
}

/// A model of the other side.
pub(super) struct ForeignModel {
    pub(super) object: Foreign<RollModelTable>,
    specs: Vec<ParameterSpec>,
    diffusion: bool,
    language: bool,
}

impl ForeignModel {
    /// # Safety
    /// As [`Foreign::new`].
    pub(super) unsafe fn new(object: RollObject, source: Source) -> Result<Self> {
        // SAFETY: as the caller promises.
        let object = unsafe { Foreign::<RollModelTable>::new(object, source) }?;
        let facts: RollModelFacts = object.call("parameters", |t, state, out, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.facts)(state, out, error) }
        })?;
        let spec = |p: &RollParameter| {
            // SAFETY: the list is valid until it is released.
            unsafe { Ok(ParameterSpec { name: p.name.get()?.into(), shape: slice(p.shape, p.rank)?.to_vec() }) }
        };
        // SAFETY: ours, taken once.
        let specs = unsafe { facts.parameters.take(|items| items.iter().map(spec).collect()) };
        let specs = object.blame("parameters", specs)?;
        Ok(Self { object, specs, diffusion: facts.diffusion == 1, language: facts.language == 1 })
    }
}

impl Model for ForeignModel {
    fn parameters(&self) -> &[ParameterSpec] {
        &self.specs
    }

    fn read_parameters(&self, out: &mut [f32]) -> Result<()> {
        self.object.run("read_parameters", |t, state, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.read)(state, out.as_mut_ptr(), out.len(), error) }
        })
    }

    fn write_parameters(&mut self, values: &[f32]) -> Result<()> {
        self.object.run("write_parameters", |t, state, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.write)(state, values.as_ptr(), values.len(), error) }
        })
    }

    fn take_gradients(&mut self, add_into: &mut [f32]) -> Result<()> {
        self.object.run("take_gradients", |t, state, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.take_gradients)(state, add_into.as_mut_ptr(), add_into.len(), error) }
        })
    }

    fn as_diffusion(&mut self) -> Option<&mut dyn DiffusionModel> {
        if self.diffusion { Some(self) } else { None }
    }

    fn as_language(&mut self) -> Option<&mut dyn LanguageModel> {
        if self.language { Some(self) } else { None }
    }

    fn export_adapter(&self) -> Result<BTreeMap<String, StateDict>> {
        let files: RollOwned<RollFile> = self.object.call("export_adapter", |t, state, out, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.export_adapter)(state, out, error) }
        })?;
        // SAFETY: ours, taken once.
        self.object.blame("export_adapter", unsafe { files.take(|files| keep_files(files)) })
    }

    fn import_adapter(&mut self, files: &BTreeMap<String, StateDict>) -> Result<()> {
        let files = Files::new(files);
        let list = files.list();
        self.object.run("import_adapter", |t, state, error| {
            // SAFETY: the arguments live during the call.
            unsafe { (t.import_adapter)(state, list.as_ptr(), list.len(), error) }
        })
    }
}
