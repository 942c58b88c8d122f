//! [`Model`] across the boundary: its table of C functions, models lent for a call, and adapter files as arguments and
//! results.
//!
//! [`Argument`] is implemented for types of arguments as the methods write them (`&mut dyn Model`), [`Lend`] for types that
//! are passed by shared reference (`&BTreeMap`); both are lent for the call. [`Answer`] types are results, whose memory the
//! caller takes over. Diffusion and language models have files and tables of their own; their functions take the same state
//! pointer.
//! P1 to P9 are the rules of [`crate::abi`].

use std::collections::BTreeMap;
use std::ffi::c_void;

use crate::abi::{RollError, RollFile, RollList, RollModelFacts, RollObject, RollOwned, RollParts, RollStr};

use super::crossing::{crossing, log};
use super::foreign_model::{ForeignModel, Target, own_parameters};
use super::memory::{list, own, take, text};
use super::served::{Served, lent, serve};
use super::source::Source;
use super::tensor::{LentTensors, receive_tensors};
use super::wire::{Answer, Argument, Lend};
use super::{diffusion, language, parts};
use crate::{DiffusionModel, Distribution, LanguageModel, Model, ParameterParts, ParameterSpec, Result, StateDict};

// For each method, `crossing!` generates the C function that serves it on a `Target`, the model behind the state
// pointer, and the method of `ForeignModel` that calls this function. `ref` and `mut`: the kind of `self`. `or`: the
// result if the call fails. `absent`: the result if the other side has no such function. After `by hand`, the brackets
// list functions of the C table that this file defines below the macro; the braces hold methods of `ForeignModel`.
crossing! {
    Model for ForeignModel, table RollModelTable of Target {
        ref fn read_parameters(out: &mut [f32]);
        mut fn write_parameters(values: &[f32]);
        mut fn take_gradients(add_into: &mut [f32]);
        ref fn export_adapter() -> BTreeMap<String, StateDict>;
        mut fn import_adapter(files: &BTreeMap<String, StateDict>);
        ref fn distribution() -> Distribution, or Distribution::default(), absent Distribution::default();
    }
    by hand [facts, parts] {
        fn parts(&mut self) -> Option<&mut dyn ParameterParts> {
            // Receives the table of the parts. The trait's method cannot return an error, so it is logged.
            match self.request_parts() {
                Ok(true) => Some(self),
                Ok(false) => None,
                Err(error) => {
                    log(&error);
                    None
                }
            }
        }

        fn parameters(&self) -> &[ParameterSpec] {
            &self.parameters
        }

        fn as_diffusion(&mut self) -> Option<&mut dyn DiffusionModel> {
            if self.diffusion.is_some() { Some(self) } else { None }
        }

        fn as_language(&mut self) -> Option<&mut dyn LanguageModel> {
            if self.language.is_some() { Some(self) } else { None }
        }
    }
}

/// A null table says that the model is no diffusion model, or no language model.
unsafe extern "C" fn facts(state: *mut c_void, out: *mut RollModelFacts, error: *mut RollError) -> u32 {
    let body = |model: &mut Target| {
        Ok(RollModelFacts {
            diffusion: model.as_diffusion().map_or(std::ptr::null(), |_| (&raw const diffusion::TABLE).cast()),
            language: model.as_language().map_or(std::ptr::null(), |_| (&raw const language::TABLE).cast()),
            parameters: own_parameters(model.parameters().to_vec()),
        })
    };
    // SAFETY: `state` is a model (P8) that no other thread calls (P4); `out` and `error` may be written (P7).
    unsafe { serve(state, out, error, body) }
}

/// A null table says that the model has no parts.
unsafe extern "C" fn parts(state: *mut c_void, out: *mut RollParts, error: *mut RollError) -> u32 {
    let body = |model: &mut Target| {
        Ok(RollParts { table: model.parts().map_or(std::ptr::null(), |_| (&raw const parts::TABLE).cast()) })
    };
    // SAFETY: `state` is a model (P8) that no other thread calls (P4); `out` and `error` may be written (P7).
    unsafe { serve(state, out, error, body) }
}

pub(super) fn give(model: Box<dyn Model>) -> RollObject {
    Served::give(model, &TABLE)
}

lent!(LentModel: Model);

/// Lent by one side as [`LentModel`], received by the other as [`ForeignModel`].
impl<'a> Argument for &'a mut (dyn Model + 'a) {
    type Wire = RollObject;
    type Lent = LentModel;
    type Received = ForeignModel;
    type Borrowed<'k> = &'k mut dyn Model;
    fn lend(self) -> LentModel {
        LentModel::new(self)
    }
    fn wire(lent: &mut LentModel) -> RollObject {
        lent.object()
    }
    unsafe fn receive(wire: RollObject) -> Result<ForeignModel> {
        // The host alone lends models, to components of plugins.
        // SAFETY: as the caller promises. An object that is lent has no `release`, so that dropping the model here
        // releases nothing.
        unsafe { ForeignModel::new(wire, Source::Host) }
    }
    fn borrow(received: &mut ForeignModel) -> &mut dyn Model {
        received
    }
}

/// Adapter files as C structs. They point into `_tensors`, and into the names of the map that they are made from, which
/// must outlive them.
pub(super) struct FilesForC {
    files: Vec<RollFile>,
    _tensors: Vec<LentTensors>,
}

impl FilesForC {
    fn new(files: &BTreeMap<String, StateDict>) -> Self {
        let tensors: Vec<LentTensors> = files.values().map(LentTensors::new).collect();
        let file = |(name, lent): (&String, &LentTensors)| RollFile { name: RollStr::lend(name), tensors: lent.list() };
        Self { files: files.keys().zip(&tensors).map(file).collect(), _tensors: tensors }
    }
}

/// # Safety
/// `files` are lent for the call (P1), and their names and tensors are valid values (P9).
unsafe fn receive_files(files: &[RollFile]) -> Result<BTreeMap<String, StateDict>> {
    // SAFETY: as the caller promises.
    files
        .iter()
        .map(|file| unsafe { Ok((text(file.name)?.to_string(), receive_tensors(list(file.tensors)?)?)) })
        .collect()
}

impl Lend for BTreeMap<String, StateDict> {
    type Wire = RollList<RollFile>;
    type Lent = FilesForC;
    type Received = BTreeMap<String, StateDict>;
    fn lend(&self) -> FilesForC {
        FilesForC::new(self)
    }
    fn wire(lent: &mut FilesForC) -> RollList<RollFile> {
        RollList::lend(&lent.files)
    }
    unsafe fn receive(wire: RollList<RollFile>) -> Result<BTreeMap<String, StateDict>> {
        // SAFETY: as the caller promises.
        unsafe { receive_files(list(wire)?) }
    }
}

impl Answer for BTreeMap<String, StateDict> {
    type Wire = RollOwned<RollFile>;
    fn give(self) -> RollOwned<RollFile> {
        let FilesForC { files, _tensors } = FilesForC::new(&self);
        // `files` points into both.
        own(files, (_tensors, self))
    }
    unsafe fn take(wire: RollOwned<RollFile>, _: &Source) -> Result<Self> {
        // SAFETY: as the caller promises.
        unsafe { take(wire, |files| receive_files(files)) }
    }
}
