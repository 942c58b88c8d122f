//! The plugin's side of a library: macros that export the components of a Rust crate, and the methods `describe`,
//! `make` and `plan` that a plugin answers. P1 to P9 are the numbers of the contract in [`crate::abi`].

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::abi::{RollMessage, RollStr};

use super::communicator::RemoteCommunicator;
use super::memory::text;
use super::message::{Incoming, Outgoing};
use super::object::{AnswerOrFailure, Answered, Gift, Remote, respond};
use super::options::OptionSpec;
use super::panics::remember_panics;
use super::source::Source;
use super::{algorithm, environment, log, model, reward, strategy};
use crate::plan::PlanInput;
use crate::{BuildContext, Error, Factory, Kind, Options, Planner, Registration, Registry, Result};

/// Description of a plugin, from its `Cargo.toml`.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)] // as in Cargo.toml
pub struct Metadata {
    pub name: &'static str,
    pub version: &'static str,
    pub authors: &'static str,
    pub about: &'static str,
}

/// A plugin as it describes itself.
#[derive(Serialize, Deserialize)]
pub(super) struct Description {
    pub(super) name: String,
    #[serde(default)]
    pub(super) version: String,
    #[serde(default)]
    pub(super) authors: String,
    #[serde(default)]
    pub(super) about: String,
    pub(super) components: Vec<ComponentDescription>,
}

/// A component of a [`Description`].
#[derive(Serialize, Deserialize)]
pub(super) struct ComponentDescription {
    pub(super) kind: Kind,
    pub(super) name: String,
    #[serde(default)]
    pub(super) summary: String,
    #[serde(default)]
    pub(super) options: Vec<OptionSpec>,
    /// Whether the library answers `plan` for it.
    #[serde(default)]
    pub(super) plans: bool,
}

impl ComponentDescription {
    fn of(registration: &Registration) -> Self {
        Self {
            kind: registration.factory.kind(),
            name: registration.name.into(),
            summary: registration.summary.into(),
            options: OptionSpec::from_defaults(registration.options(), &registration.keys()),
            plans: registration.planner.is_some(),
        }
    }
}

/// The body of `roll_plugin_call`, which answers the methods of the library.
///
/// # Safety
/// P1, P7 and P9.
pub unsafe fn call(
    metadata: Metadata,
    components: fn() -> Result<Vec<&'static Registration>>,
    method: RollStr,
    arguments: *const RollMessage,
    answer: *mut RollMessage,
) -> u32 {
    let body = || -> AnswerOrFailure {
        // SAFETY: as the caller promises.
        let (method, message) = unsafe { (text(method)?, Incoming::lent(arguments, Source::Host)?) };
        Ok(match method {
            "describe" => Some(describe(metadata, &components()?, &message)?),
            "make" => Some(make(&components()?, &message)?),
            "plan" => plan(&components()?, &message)?,
            _ => None,
        })
    };
    // SAFETY: as the caller promises.
    unsafe { respond(answer, body) }
}

/// Arguments of `describe`.
#[derive(Deserialize)]
struct Describe {
    host: Remote,
}

fn describe(metadata: Metadata, components: &[&Registration], message: &Incoming) -> Result<Outgoing> {
    remember_panics();
    let Describe { host } = message.read()?;
    log::forward_to(host);
    Outgoing::of(&Description {
        name: metadata.name.into(),
        version: metadata.version.into(),
        authors: metadata.authors.into(),
        about: metadata.about.into(),
        components: components.iter().map(|registration| ComponentDescription::of(registration)).collect(),
    })
}

/// The component that a call of the library names.
fn find<'a>(components: &[&'a Registration], kind: Kind, name: &str) -> Result<&'a Registration> {
    let found = components.iter().find(|c| (c.factory.kind(), c.name) == (kind, name));
    found.copied().ok_or_else(|| Error::Misuse(format!("this library has no {kind} `{name}`")))
}

/// Arguments of `make` and `plan`.
#[derive(Deserialize)]
struct MakeOrPlan {
    kind: Kind,
    name: String,
    options: Options,
    context: Option<BuildContext>,
    /// The ranks of the job; only in `make`, for strategies and algorithms.
    ranks: Option<Remote>,
    /// Facts of the run; only in `plan` of a model or a reward.
    input: Option<PlanInput>,
}

/// Makes a component and passes its ownership to the host.
fn make(components: &[&Registration], message: &Incoming) -> Result<Outgoing> {
    let MakeOrPlan { kind, name, options, context, ranks, .. } = message.read()?;
    let registration = find(components, kind, &name)?;
    let mut context = context.ok_or_else(|| missing_argument("context"))?;
    if let Some(ranks) = ranks {
        context.ranks = Arc::new(RemoteCommunicator::new(ranks)?);
    }
    Outgoing::of(&made_object(&registration.factory, &options, &context)?)
}

/// Plans a run with a component by its [`Planner`]. Answers the algorithm's passes, the strategy's division or the
/// needs of the model or reward. `None` if the component has no planner.
fn plan(components: &[&Registration], message: &Incoming) -> Answered {
    let MakeOrPlan { kind, name, options, context, input, .. } = message.read()?;
    match find(components, kind, &name)?.planner {
        Some(Planner::Algorithm(plan)) => Outgoing::of(&plan(&options)?).map(Some),
        Some(Planner::Strategy(plan)) => Outgoing::of(&plan(&options)?).map(Some),
        Some(Planner::Model(plan) | Planner::Reward(plan)) => {
            let input = input.ok_or_else(|| missing_argument("input"))?;
            let context = context.ok_or_else(|| missing_argument("context"))?;
            Outgoing::of(&plan(&options, &input, &context)?).map(Some)
        }
        None => Ok(None),
    }
}

fn missing_argument(argument: &str) -> Error {
    Error::Misuse(format!("the argument `{argument}` is missing"))
}

/// Makes a component, as an object whose ownership passes to the host.
fn made_object(factory: &Factory, options: &Options, context: &BuildContext) -> Result<Gift> {
    Ok(match factory {
        Factory::Reward(make) => reward::give(make(options, context)?),
        Factory::Model(make) => model::give(make(options, context)?),
        Factory::Strategy(make) => strategy::give(make(options, context)?),
        Factory::Algorithm(make) => algorithm::give(make(options, context)?),
        Factory::Environment(make) => environment::give(make(options, context)?),
    })
}

/// The linked-in components of these kinds and names.
pub fn linked(names: &[(Kind, &str)]) -> Result<Vec<&'static Registration>> {
    let registry = Registry::linked()?;
    names.iter().map(|(kind, name)| registry.find(*kind, name)).collect()
}

/// Makes a crate of type `cdylib` a plugin that offers the given [`Registration`](crate::Registration)s.
///
/// Use it once per crate. For a single component there are shorter macros, such as
/// [`export_reward!`](crate::export_reward).
#[macro_export]
macro_rules! export_plugin {
    ($($registration:expr),+ $(,)?) => {
        $crate::__export!(|| {
            static COMPONENTS: &[&$crate::Registration] = &[$(&$registration),+];
            $crate::Result::Ok(COMPONENTS.to_vec())
        });
    };
}

/// Makes a crate of type `cdylib` a plugin with the components that other crates registered with `inventory`:
///
/// ```ignore
/// use roll_wan as _; // links its registrations
/// roll_plugin::export_linked!(Model "wan2_2");
/// ```
#[macro_export]
macro_rules! export_linked {
    ($($kind:ident $name:literal),+ $(,)?) => {
        $crate::__export!(|| $crate::interface::linked(&[$(($crate::Kind::$kind, $name)),+]));
    };
}

/// Exports the descriptions of the boundary's types with which this library was built.
#[cfg(feature = "abi_stable")]
#[doc(hidden)]
#[macro_export]
macro_rules! __export_types {
    () => {
        #[unsafe(no_mangle)]
        static roll_plugin_types: $crate::interface::StableTypes = $crate::interface::StableTypes::CURRENT;
    };
}

/// Exports nothing: without the feature `abi_stable`, only the version is compared.
#[cfg(not(feature = "abi_stable"))]
#[doc(hidden)]
#[macro_export]
macro_rules! __export_types {
    () => {};
}

/// Exports the symbols of a plugin. `$components` is a function that returns its registrations.
#[doc(hidden)]
#[macro_export]
macro_rules! __export {
    ($components:expr) => {
        const _: () = {
            use $crate::interface as abi;

            #[unsafe(no_mangle)]
            static roll_plugin_abi: abi::RollAbi = abi::RollAbi::CURRENT;

            $crate::__export_types!();

            /// Answers the methods of the library.
            #[unsafe(no_mangle)]
            unsafe extern "C" fn roll_plugin_call(
                _: *mut std::ffi::c_void,
                method: abi::RollStr,
                arguments: *const abi::RollMessage,
                answer: *mut abi::RollMessage,
            ) -> u32 {
                let metadata = abi::Metadata {
                    name: env!("CARGO_PKG_NAME"),
                    version: env!("CARGO_PKG_VERSION"),
                    authors: env!("CARGO_PKG_AUTHORS"),
                    about: env!("CARGO_PKG_DESCRIPTION"),
                };
                // SAFETY: P1, P7 and P9: the loader's arguments, handed on.
                unsafe { abi::call(metadata, $components, method, arguments, answer) }
            }
        };
    };
}

/// Makes a crate of type `cdylib` a plugin with one reward.
///
/// The type of the reward may be the type of its options, too. It then implements `Default`, `Serialize` and
/// `Deserialize` besides [`RewardScorer`](crate::RewardScorer):
///
/// ```ignore
/// roll_plugin::export_reward!("sharpness", "Contrast of neighbouring pixels", Sharpness);
/// ```
///
/// Options of another type need a function that makes the scorer from them:
///
/// ```ignore
/// roll_plugin::export_reward!("colour", "Likeness of colours", Options, |options, context| Colour::new(options));
/// ```
#[macro_export]
macro_rules! export_reward {
    ($name:literal, $summary:literal, $reward:ty $(,)?) => {
        $crate::export_reward!($name, $summary, $reward, |reward: $reward, _: &$crate::BuildContext| {
            $crate::Result::Ok(reward)
        });
    };
    ($name:literal, $summary:literal, $options:ty, $make:expr $(,)?) => {
        $crate::__export_one!(Reward, RewardScorer, $name, $summary, $options, $make);
    };
}

/// As [`export_reward!`](crate::export_reward), for a [`Model`](crate::Model).
#[macro_export]
macro_rules! export_model {
    ($name:literal, $summary:literal, $options:ty, $make:expr $(,)?) => {
        $crate::__export_one!(Model, Model, $name, $summary, $options, $make);
    };
}

/// As [`export_reward!`](crate::export_reward), for a [`Strategy`](crate::Strategy).
#[macro_export]
macro_rules! export_strategy {
    ($name:literal, $summary:literal, $options:ty, $make:expr $(,)?) => {
        $crate::__export_one!(Strategy, Strategy, $name, $summary, $options, $make);
    };
}

/// As [`export_reward!`](crate::export_reward), for an [`Algorithm`](crate::Algorithm).
#[macro_export]
macro_rules! export_algorithm {
    ($name:literal, $summary:literal, $options:ty, $make:expr $(,)?) => {
        $crate::__export_one!(Algorithm, Algorithm, $name, $summary, $options, $make);
    };
}

/// As [`export_reward!`](crate::export_reward), for an [`Environment`](crate::Environment).
#[macro_export]
macro_rules! export_environment {
    ($name:literal, $summary:literal, $options:ty, $make:expr $(,)?) => {
        $crate::__export_one!(Environment, Environment, $name, $summary, $options, $make);
    };
}

/// A plugin with one component of any kind.
#[doc(hidden)]
#[macro_export]
macro_rules! __export_one {
    ($($component:tt)*) => {
        $crate::export_plugin!($crate::component!($($component)*));
    };
}

/// A [`Registration`](crate::Registration), for [`export_plugin!`](crate::export_plugin). The arguments are: variant of
/// [`Factory`](crate::Factory), trait, name, summary, type of the options, and a function that makes the component from
/// the options and the [`BuildContext`](crate::BuildContext).
#[macro_export]
macro_rules! component {
    ($kind:ident, $trait:ident, $name:literal, $summary:literal, $options:ty, $make:expr $(,)?) => {
        $crate::Registration {
            name: $name,
            summary: $summary,
            origin: env!("CARGO_PKG_NAME"),
            version: env!("CARGO_PKG_VERSION"),
            is_linked: true,
            defaults: &$crate::default_options::<$options>,
            keys: &$crate::keys::of_defaults::<$options>,
            factory: $crate::Factory::$kind(&|options, context| {
                let options: $options = $crate::parse_options($crate::Kind::$kind.section(), options)?;
                let made = $crate::interface::made(options, context, $make)?;
                Ok(Box::new(made) as Box<dyn $crate::$trait>)
            }),
            planner: None,
            learning_rate: None,
            is_default_check: false,
        }
    };
}

/// Calls `make`, for [`component!`](crate::component): a closure that is written in the arguments of the macro gets the
/// types of its own arguments from this signature.
pub fn made<O, T>(options: O, context: &BuildContext, make: impl FnOnce(O, &BuildContext) -> Result<T>) -> Result<T> {
    make(options, context)
}
