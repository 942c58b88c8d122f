//! A model of the other side: its tables, and its facts that do not change.

use crate::abi::{
    RollDiffusionTable, RollLanguageTable, RollList, RollModelFacts, RollModelTable, RollObject, RollOwned,
    RollParameter, RollParts, RollPartsTable, RollStr,
};

use super::foreign::{Calls, Foreign};
use super::memory::{list, own, take, text};
use super::source::Source;
use crate::{Model, ParameterSpec, Result};

/// The trait that a model's table serves.
pub(super) type Target = dyn Model;

pub(super) struct ForeignModel {
    pub(super) object: Foreign,
    table: RollModelTable,
    pub(super) parameters: Vec<ParameterSpec>,
    pub(super) diffusion: Option<RollDiffusionTable>,
    pub(super) language: Option<RollLanguageTable>,
    /// Set when the parts are first requested.
    pub(super) parts: Option<RollPartsTable>,
}

impl ForeignModel {
    /// # Safety
    /// As [`Foreign::new`].
    pub(super) unsafe fn new(object: RollObject, source: Source) -> Result<Self> {
        // SAFETY: as the caller promises.
        let (object, table) = unsafe { Foreign::new::<RollModelTable>(object, source) }?;
        let facts: RollModelFacts = object.must("facts", object.ask("parameters", table.facts)?)?;
        // SAFETY: P2, P3 and P8; the list first, so that it is released whatever happens to the others.
        let (parameters, diffusion, language) = unsafe {
            let spec =
                |p: &RollParameter| Ok(ParameterSpec { name: text(p.name)?.into(), shape: list(p.shape)?.to_vec() });
            let parameters = take(facts.parameters, |items| items.iter().map(spec).collect());
            let (diffusion, language) = (object.source.part(facts.diffusion), object.source.part(facts.language));
            (object.blame("parameters", parameters)?, diffusion?, language?)
        };
        Ok(Self { object, table, parameters, diffusion, language, parts: None })
    }

    /// Whether the model offers its parameters in parts.
    pub(super) fn request_parts(&mut self) -> Result<bool> {
        let answer: Option<RollParts> = self.object.ask("parts", self.table.parts)?;
        self.parts = match answer {
            // SAFETY: P3 and P8.
            Some(answer) => unsafe { self.object.source.part(answer.table) }?,
            None => None,
        };
        Ok(self.parts.is_some())
    }
}

impl Calls<RollModelTable> for ForeignModel {
    fn callee(&self) -> (&Foreign, Option<&RollModelTable>) {
        (&self.object, Some(&self.table))
    }
}

/// The parameters of a model as an owned list.
pub(super) fn own_parameters(parameters: Vec<ParameterSpec>) -> RollOwned<RollParameter> {
    let parameter = |s: &ParameterSpec| RollParameter { name: RollStr::lend(&s.name), shape: RollList::lend(&s.shape) };
    own(parameters.iter().map(parameter).collect(), parameters)
}
