//! How a Rust crate becomes a plugin.

use std::ffi::c_void;

use super::abi::{RollComponent, RollContext, RollError, RollHost, RollObject, RollOption, RollPlugin, RollStr};
use super::call::{answer, remember_panics};
use super::options::OptionSpec;
use super::{algorithm, environment, log, model, reward, strategy};
use crate::{BuildContext, Error, Factory, Kind, Options, Registration, Registry, Result};

/// What a plugin says of itself, from its `Cargo.toml`.
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
/// As the interface says: `host` lives as long as the process, `out` and `error` may be written.
pub unsafe fn init(
    metadata: Metadata,
    components: fn() -> Result<Vec<&'static Registration>>,
    host: *const RollHost,
    out: *mut RollPlugin,
    error: *mut RollError,
) -> u32 {
    remember_panics();
    let body = || {
        // SAFETY: as the caller promises.
        log::forward_to(unsafe { *host });
        let components: Vec<RollComponent> = components()?.into_iter().map(describe).collect();
        let components = Vec::leak(components);
        Ok(RollPlugin {
            name: RollStr::lend(metadata.name),
            version: RollStr::lend(metadata.version),
            authors: RollStr::lend(metadata.authors),
            about: RollStr::lend(metadata.about),
            components: components.as_ptr(),
            component_count: components.len(),
        })
    };
    // SAFETY: as the caller promises.
    unsafe { answer(out, error, body) }
}

/// Leaks the description: it lives as long as the library.
fn describe(registration: &'static Registration) -> RollComponent {
    let options = OptionSpec::from_defaults(registration.options()).into_iter().map(|spec| RollOption {
        name: leak(spec.name),
        kind: spec.kind.number(),
        default_json: leak(spec.default.to_string()),
        about: leak(spec.about),
    });
    let options = Vec::leak(options.collect());
    RollComponent {
        kind: registration.factory.kind().id(),
        name: RollStr::lend(registration.name),
        summary: RollStr::lend(registration.summary),
        options: options.as_ptr(),
        option_count: options.len(),
        data: std::ptr::from_ref(registration).cast(),
        make,
    }
}

fn leak(text: String) -> RollStr {
    RollStr::lend(String::leak(text))
}

unsafe extern "C" fn make(
    data: *const c_void,
    options: RollStr,
    context: *const RollContext,
    out: *mut RollObject,
    error: *mut RollError,
) -> u32 {
    let body = || {
        // SAFETY: `data` is the registration of `describe`; the rest is lent for this call.
        let (registration, options, context) = unsafe {
            let context = &*context;
            let backend = context.backend.get()?.to_string();
            let base_dir = context.base_dir.get()?.into();
            let context = BuildContext { backend, seed: context.seed, base_dir, placement: None };
            (&*data.cast::<Registration>(), options.get()?, context)
        };
        let options: Options = serde_json::from_str(options)
            .map_err(|e| Error::Misuse(format!("the options that the host gave are no JSON object: {e}")))?;
        make_object(&registration.factory, &options, &context)
    };
    // SAFETY: as the interface says.
    unsafe { answer(out, error, body) }
}

fn make_object(factory: &Factory, options: &Options, context: &BuildContext) -> Result<RollObject> {
    Ok(match factory {
        Factory::Reward(make) => reward::give(make(options, context)?),
        Factory::Model(make) => model::give(make(options, context)?),
        Factory::Strategy(make) => strategy::give(make(options, context)?),
        Factory::Algorithm(make) => algorithm::give(make(options, context)?),
        Factory::Environment(make) => environment::give(make(options, context)?),
        Factory::Loaded(component) => {
            let name = component.name();
            return Err(Error::Unsupported(format!("`{name}` comes from another plugin and cannot be exported again")));
        }
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

/// Makes a crate of type `cdylib` a plugin that offers what other crates registered with `inventory`:
///
/// ```ignore
/// use roll_models as _; // or its registrations are not linked
/// roll_core::export_linked!(Model "wan2_2");
/// ```
#[macro_export]
macro_rules! export_linked {
    ($($kind:ident $name:literal),+ $(,)?) => {
        $crate::__export!(|| $crate::plugin::interface::linked(&[$(($crate::Kind::$kind, $name)),+]));
    };
}

/// The three symbols.
#[doc(hidden)]
#[macro_export]
macro_rules! __export {
    ($components:expr) => {
        const _: () = {
            use $crate::plugin::interface as abi;

            #[unsafe(no_mangle)]
            static roll_plugin_abi: abi::RollAbi = abi::RollAbi::CURRENT;

            #[unsafe(no_mangle)]
            static roll_plugin_layout: abi::LayoutTag = abi::LayoutTag::CURRENT;

            /// Called once by the loader.
            #[unsafe(no_mangle)]
            unsafe extern "C" fn roll_plugin_init(
                host: *const abi::RollHost,
                out: *mut abi::RollPlugin,
                error: *mut abi::RollError,
            ) -> u32 {
                let metadata = abi::Metadata {
                    name: env!("CARGO_PKG_NAME"),
                    version: env!("CARGO_PKG_VERSION"),
                    authors: env!("CARGO_PKG_AUTHORS"),
                    about: env!("CARGO_PKG_DESCRIPTION"),
                };
                // SAFETY: the loader's arguments, handed on.
                unsafe { abi::init(metadata, $components, host, out, error) }
            }
        };
    };
}

/// Makes a crate of type `cdylib` a plugin with one reward.
///
/// With a type that is its own options (`Default`, `Serialize` and `Deserialize` beside
/// [`RewardScorer`](crate::RewardScorer)):
///
/// ```ignore
/// roll_core::export_reward!("sharpness", "Contrast of neighbouring pixels", Sharpness);
/// ```
///
/// With options of another type, and a function that makes the scorer of them:
///
/// ```ignore
/// roll_core::export_reward!("colour", "Likeness of colours", Options, |options, context| Colour::new(options));
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
            defaults: $crate::registry::default_options::<$options>,
            factory: $crate::Factory::$kind(|options, context| {
                let options: $options = $crate::registry::parse_options($crate::Kind::$kind.section(), options)?;
                let made = $crate::plugin::interface::made(options, context, $make)?;
                Ok(Box::new(made) as Box<dyn $crate::$trait>)
            }),
            planner: None,
        }
    };
}

/// Calls `make`; tells the compiler the types of a closure's arguments.
pub fn made<O, T>(options: O, context: &BuildContext, make: impl FnOnce(O, &BuildContext) -> Result<T>) -> Result<T> {
    make(options, context)
}
