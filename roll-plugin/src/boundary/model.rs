//! [`Model`] across the boundary. The object of a model also answers the methods of [`DiffusionModel`],
//! [`LanguageModel`] and [`ParameterParts`], if the model has these traits; their declarations have files of their own.

use std::collections::BTreeMap;

use super::message::{Incoming, Outgoing};
use super::object::{Answered, Gift, Loan, Remote};
use super::remote::{Argument, log, remote};
use super::remote_model::{ModelFacts, RemoteModel};
use super::{diffusion, language, parts};
use crate::{DiffusionModel, Distribution, LanguageModel, Model, ParameterParts, ParameterSpec, Result, StateDict};

remote! {
    trait Model for RemoteModel {
        fn read_parameters(&self, out: &mut [f32]) -> Result<()>;
        fn write_parameters(&mut self, values: &[f32]) -> Result<()>;
        fn take_gradients(&mut self, add_into: &mut [f32]) -> Result<()>;
        fn distribution(&self) -> Distribution { Distribution::default() }
        fn export_adapter(&self) -> Result<BTreeMap<String, StateDict>>;
        fn import_adapter(&mut self, files: &BTreeMap<String, StateDict>) -> Result<()>;
    }
    by hand answer_others {
        fn parameters(&self) -> &[ParameterSpec] {
            &self.about.parameters
        }

        fn parts(&mut self) -> Option<&mut dyn ParameterParts> {
            // Asked for each time, because the answer may change: a wrapper may withhold its gradients for a while.
            match self.remote.ask("has_parts", &[]) {
                Ok(Some(true)) => Some(self),
                Ok(_) => None,
                Err(error) => {
                    log(&error);
                    None
                }
            }
        }

        fn as_diffusion(&mut self) -> Option<&mut dyn DiffusionModel> {
            if self.about.diffusion { Some(self) } else { None }
        }

        fn as_language(&mut self) -> Option<&mut dyn LanguageModel> {
            if self.about.language { Some(self) } else { None }
        }
    }
}

/// Answers the methods that the declaration above does not have: `about`, `has_parts`, and the methods of the model's
/// further traits.
fn answer_others(model: &mut (dyn Model + '_), method: &str, message: &Incoming) -> Answered {
    match method {
        "about" => {
            let (diffusion, language) = (model.as_diffusion().is_some(), model.as_language().is_some());
            let about = ModelFacts { parameters: model.parameters().to_vec(), diffusion, language };
            return Outgoing::of(&about).map(Some);
        }
        "has_parts" => return Outgoing::of(&model.parts().is_some()).map(Some),
        _ => {}
    }
    if let Some(diffusion) = model.as_diffusion()
        && let Some(answer) = diffusion::answer(diffusion, method, message)?
    {
        return Ok(Some(answer));
    }
    if let Some(language) = model.as_language()
        && let Some(answer) = language::answer(language, method, message)?
    {
        return Ok(Some(answer));
    }
    match model.parts() {
        Some(parts) => parts::answer(parts, method, message),
        None => Ok(None),
    }
}

/// Hands over a model; calls reach it by the generated `answer`.
pub(super) fn give(mut model: Box<dyn Model>) -> Gift {
    Gift::exclusive(move |method, message| answer(model.as_mut(), method, message))
}

/// Lends a model for a call; calls reach it by the generated `answer`.
pub(super) fn lend<'a>(model: &'a mut (dyn Model + 'a)) -> Loan<'a> {
    Loan::exclusive(move |method, message| answer(model, method, message))
}

impl<'a> Argument for &'a mut (dyn Model + 'a) {
    type Lent = Loan<'a>;
    type Received = Remote;
    type Opened = RemoteModel;
    type Borrowed<'k> = &'k mut dyn Model;
    fn lend(self) -> Loan<'a> {
        lend(self)
    }
    fn open(received: Remote) -> Result<RemoteModel> {
        RemoteModel::new(received)
    }
    fn borrow(opened: &mut RemoteModel) -> &mut dyn Model {
        opened
    }
}
