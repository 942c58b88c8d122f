//! Exports the components of a Rust crate as a plugin.

use std::ffi::c_void;
use std::sync::Arc;

use crate::abi::{
    RollComponent, RollContext, RollError, RollHost, RollList, RollObject, RollOption, RollOwned, RollPlugin, RollStr,
};

use super::communicator::ForeignCommunicator;
use super::data::{json, own_json, placement};
use super::memory::text;
use super::options::OptionSpec;
use super::panics::remember_panics;
use super::served::answer;
use super::source::Source;
use super::{algorithm, environment, log, model, reward, strategy};
use crate::plan::PlanInput;
use crate::{BuildContext, Error, Factory, Kind, OptionKind, Options, Planner, Registration, Registry, Result};

/// Description of a plugin, from its `Cargo.toml`.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)] // as in Cargo.toml
pub struct Metadata {
    pub name: &'static str,
    pub version: &'static str,
    pub authors: &'static str,
    pub about: &'static str,
}

/// The body of `roll_plugin_init`.
///
/// # Safety
/// P3 and P7.
pub unsafe fn init(
    metadata: Metadata,
    components: fn() -> Result<Vec<&'static Registration>>,
    host: *const RollHost,
    out: *mut *const RollPlugin,
    error: *mut RollError,
) -> u32 {
    remember_panics();
    let body = || {
        // SAFETY: P6.
        let host = unsafe { read_host(host) }?;
        log::forward_to(host);
        let components: Vec<*const RollComponent> = components()?.into_iter().map(describe).collect();
        let plugin = RollPlugin {
            size: size_of::<RollPlugin>(),
            name: RollStr::lend(metadata.name),
            version: RollStr::lend(metadata.version),
            authors: RollStr::lend(metadata.authors),
            about: RollStr::lend(metadata.about),
            components: RollList::lend(Vec::leak(components)),
        };
        Ok(std::ptr::from_ref(Box::leak(Box::new(plugin))))
    };
    // SAFETY: P7.
    unsafe { answer(out, error, body) }
}

/// The part of a host's structure that both sides know.
///
/// # Safety
/// P6.
unsafe fn read_host<T: crate::abi::Grows>(theirs: *const T) -> Result<T> {
    // SAFETY: as the caller promises.
    unsafe { crate::abi::read(theirs) }.map_err(Error::Misuse)
}

/// Leaks the description: it lives as long as the library (P3).
fn describe(registration: &'static Registration) -> *const RollComponent {
    let options =
        OptionSpec::from_defaults(registration.options(), &registration.keys()).into_iter().map(|spec| RollOption {
            name: leak(spec.name),
            kind: number(spec.kind),
            default_json: leak(spec.default.to_string()),
            about: leak(spec.about),
        });
    Box::leak(Box::new(RollComponent {
        size: size_of::<RollComponent>(),
        kind: registration.factory.kind().id() as usize,
        name: RollStr::lend(registration.name),
        summary: RollStr::lend(registration.summary),
        options: RollList::lend(Vec::leak(options.collect())),
        data: std::ptr::from_ref(registration).cast(),
        make: Some(make),
        plan: registration.planner.map(|_| plan as _),
    }))
}

/// The number of a kind of options at the boundary.
fn number(kind: OptionKind) -> u32 {
    OptionKind::ALL.iter().position(|other| *other == kind).unwrap_or_default() as u32
}

fn leak(text: String) -> RollStr {
    RollStr::lend(String::leak(text))
}

/// # Safety
/// P1, P6 and P9.
unsafe fn own_context(context: *const RollContext) -> Result<BuildContext> {
    // SAFETY: as the caller promises; the ranks first, so that they are released whatever the others are.
    let (context, ranks, backend, base_dir) = unsafe {
        let context = read_host(context)?;
        let ranks = match context.ranks.table.is_null() {
            true => None,
            false => Some(ForeignCommunicator::new(context.ranks, Source::Host)?),
        };
        (context, ranks, text(context.backend)?, text(context.base_dir)?)
    };
    let mut own = BuildContext::new(backend);
    (own.seed, own.base_dir, own.placement) = (context.seed, base_dir.into(), placement(context.placement));
    if let Some(ranks) = ranks {
        own.ranks = Arc::new(ranks);
    }
    Ok(own)
}

fn own_options(options: &str) -> Result<Options> {
    json(options, "the options that the host gave are")
}

unsafe extern "C" fn make(
    data: *const c_void,
    options: RollStr,
    context: *const RollContext,
    out: *mut RollObject,
    error: *mut RollError,
) -> u32 {
    let body = || {
        // SAFETY: P1 and P6; `data` is the registration of `describe`.
        let (registration, options, context) =
            unsafe { (&*data.cast::<Registration>(), own_options(text(options)?)?, own_context(context)?) };
        make_object(&registration.factory, &options, &context)
    };
    // SAFETY: P7.
    unsafe { answer(out, error, body) }
}

unsafe extern "C" fn plan(
    data: *const c_void,
    options: RollStr,
    input: RollStr,
    out: *mut RollOwned<u8>,
    error: *mut RollError,
) -> u32 {
    let body = || {
        // SAFETY: P1; `data` is the registration of `describe`.
        let (registration, options, input) =
            unsafe { (&*data.cast::<Registration>(), own_options(text(options)?)?, text(input)?) };
        Ok(match registration.planner {
            Some(Planner::Algorithm(plan)) => own_json(&plan(&options)?),
            Some(Planner::Strategy(plan)) => own_json(&plan(&options)?),
            Some(Planner::Model(plan)) => {
                let (input, context): (PlanInput, BuildContext) = json(input, "the host's plan is")?;
                own_json(&plan(&options, &input, &context)?)
            }
            None => {
                return Err(Error::Unsupported(format!("`{}` has no estimate of memory and time", registration.name)));
            }
        })
    };
    // SAFETY: P7.
    unsafe { answer(out, error, body) }
}

fn make_object(factory: &Factory, options: &Options, context: &BuildContext) -> Result<RollObject> {
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
/// Once per crate. For a single component the shorter macros, such as [`export_reward!`](crate::export_reward), do.
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

/// The types of the boundary as this library was built with them.
#[cfg(feature = "abi_stable")]
#[doc(hidden)]
#[macro_export]
macro_rules! __export_types {
    () => {
        #[unsafe(no_mangle)]
        static roll_plugin_types: $crate::interface::StableTypes = $crate::interface::StableTypes::CURRENT;
    };
}

/// Without the feature `abi_stable` only the version is compared.
#[cfg(not(feature = "abi_stable"))]
#[doc(hidden)]
#[macro_export]
macro_rules! __export_types {
    () => {};
}

/// The symbols.
#[doc(hidden)]
#[macro_export]
macro_rules! __export {
    ($components:expr) => {
        const _: () = {
            use $crate::interface as abi;

            #[unsafe(no_mangle)]
            static roll_plugin_abi: abi::RollAbi = abi::RollAbi::CURRENT;

            $crate::__export_types!();

            /// Called once by the loader.
            #[unsafe(no_mangle)]
            unsafe extern "C" fn roll_plugin_init(
                host: *const abi::RollHost,
                out: *mut *const abi::RollPlugin,
                error: *mut abi::RollError,
            ) -> u32 {
                let metadata = abi::Metadata {
                    name: env!("CARGO_PKG_NAME"),
                    version: env!("CARGO_PKG_VERSION"),
                    authors: env!("CARGO_PKG_AUTHORS"),
                    about: env!("CARGO_PKG_DESCRIPTION"),
                };
                // SAFETY: P3 and P7: the loader's arguments, handed on.
                unsafe { abi::init(metadata, $components, host, out, error) }
            }
        };
    };
}

/// Makes a crate of type `cdylib` a plugin with one reward.
///
/// The type may be its own options (`Default`, `Serialize` and `Deserialize` beside
/// [`RewardScorer`](crate::RewardScorer)):
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

/// A [`Registration`](crate::Registration), for [`export_plugin!`](crate::export_plugin): variant of
/// [`Factory`](crate::Factory), trait, section of the configuration, name, summary, type of the options, and a function
/// of the options and the [`BuildContext`](crate::BuildContext).
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

/// Calls `make`; fixes the types of a closure's arguments for the compiler.
pub fn made<O, T>(options: O, context: &BuildContext, make: impl FnOnce(O, &BuildContext) -> Result<T>) -> Result<T> {
    make(options, context)
}
