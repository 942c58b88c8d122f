//! The host's side of a library: loads a file, checks it, and makes its components entries of the registry. P1 to P9
//! are the numbers of the contract in [`crate::abi`].

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use crate::abi::{ABI_VERSION, CallFn, MAGIC, RollAbi, RollObject};

use super::algorithm::RemoteAlgorithm;
use super::environment::RemoteEnvironment;
use super::error::PluginError;
use super::export::{ComponentDescription, Description};
use super::message::Write;
use super::object::{Loan, Remote};
use super::options::{OptionSpec, complete};
use super::remote_model::RemoteModel;
use super::reward::RemoteReward;
use super::source::{Origin, Source};
use super::strategy::RemoteStrategy;
use super::{communicator, log, object_file};
use crate::plan::PlanInput;
use crate::{BuildContext, Error, Factory, Kind, Make, Options, Planner, Registration, Result};

/// A plugin in this process.
#[derive(Clone, Debug)]
pub struct Plugin {
    /// Name of the plugin.
    pub name: String,
    /// Version of the plugin.
    pub version: String,
    /// Who wrote it; may be empty.
    pub authors: String,
    /// Its description; may be empty.
    pub about: String,
    /// The file.
    pub path: PathBuf,
    /// Major and minor version of the boundary that the plugin was built for.
    pub abi: [u32; 2],
    /// Whether the layout of its types was compared with the host's. Only Rust plugins with the feature `abi_stable`
    /// describe their types.
    pub is_layout_checked: bool,
    /// Its components.
    pub components: Vec<&'static PluginComponent>,
}

impl Plugin {
    /// The entries of its components in the registry.
    pub fn registrations(&self) -> Vec<&'static Registration> {
        self.components.iter().map(|component| component.registration()).collect()
    }
}

/// A component of a loaded plugin.
pub struct PluginComponent {
    kind: Kind,
    registration_name: &'static str,
    options: Vec<OptionSpec>,
    library: Library,
    registration: std::sync::OnceLock<Registration>,
}

/// The functions of a library, as an object without a state.
struct Library(Remote);

// SAFETY: P4: several threads may call it.
unsafe impl Sync for Library {}

impl Library {
    fn new(call: CallFn, origin: &Arc<Origin>) -> Self {
        let object = RollObject { state: std::ptr::null_mut(), call: Some(call), release: None };
        // SAFETY: P3: the library is never unloaded.
        Self(unsafe { Remote::new(object, Source::Plugin(Arc::clone(origin))) })
    }
}

impl std::fmt::Debug for PluginComponent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PluginComponent({} {})", self.kind, self.registration_name)
    }
}

/// Loads a plugin. Loading a file again returns the same plugin: libraries are never unloaded.
pub fn load(path: impl AsRef<Path>) -> Result<Plugin> {
    static LOADED: Mutex<BTreeMap<PathBuf, Plugin>> = Mutex::new(BTreeMap::new());
    let path = path.as_ref();
    let path = path.canonicalize().map_err(Error::file("open the plugin", path))?;
    // Held while loading, so that two threads do not load the same file.
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(plugin) = loaded.get(&path) {
        return Ok(plugin.clone());
    }
    let plugin = open(&path)?;
    loaded.insert(path, plugin.clone());
    Ok(plugin)
}

/// Opens a file that is not loaded yet. Each check makes the next step safe: see the order in [`crate::abi`].
fn open(path: &Path) -> Result<Plugin> {
    object_file::check(path)?;
    let library = open_library(path)?;
    let abi = checked_version(path, library)?;
    let is_layout_checked = check_types(path, library)?;
    let call = symbol::<CallFn>(library, "roll_plugin_call\0");
    let call = *call.ok_or(PluginError::NotAPlugin { path: path.into(), symbol: "roll_plugin_call" })?;

    // Until the description has the plugin's name, messages call it by the name of the file.
    let stem = path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
    let label = stem.strip_prefix("lib").map(String::from).unwrap_or(stem);
    let unnamed = Library::new(call, &Arc::new(Origin::new(label.clone(), path.into())));
    let described = unnamed.0.call("describe", &[("host", host(label))])?.ok_or_else(|| unnamed.0.lacks("describe"))?;
    let invalid_description = |e: Error| PluginError::Description { path: path.into(), problem: crate::one_line(&e) };
    let description: Description = described.read().map_err(invalid_description)?;
    Ok(plugin_of(description, call, path, abi, is_layout_checked).map_err(invalid_description)?)
}

/// The host as an object that a plugin calls for as long as it is loaded. `label` precedes the plugin's messages.
fn host(label: String) -> &'static Loan<'static> {
    Box::leak(Box::new(log::host(label)))
}

/// Lets the system load a library, which is never unloaded (P3).
#[cfg(unix)]
fn open_library(path: &Path) -> Result<&'static libloading::Library> {
    use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
    // RTLD_NOW: a missing symbol is then an error here, and does not end the process later.
    // SAFETY: the library's initialisers run; the user chose to run this code.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
    let library = library.map_err(|source| PluginError::Open { path: path.into(), source })?;
    Ok(Box::leak(Box::new(library.into())))
}

/// Lets the system load a library, which is never unloaded (P3).
#[cfg(not(unix))]
fn open_library(path: &Path) -> Result<&'static libloading::Library> {
    // SAFETY: the library's initialisers run; the user chose to run this code.
    let library = unsafe { libloading::Library::new(path) };
    let library = library.map_err(|source| PluginError::Open { path: path.into(), source })?;
    Ok(Box::leak(Box::new(library)))
}

/// Looks up a symbol, which must have the type `T` that the boundary declares for it.
fn symbol<T>(library: &'static libloading::Library, name: &'static str) -> Option<libloading::Symbol<'static, T>> {
    // SAFETY: names and types are those of the boundary; a library with these names and other types breaks the
    // contract.
    unsafe { library.get(name.as_bytes()) }.ok()
}

/// The version of the boundary that the library was built for. Fails if it is not compatible, or if the library is no
/// plugin.
fn checked_version(path: &Path, library: &'static libloading::Library) -> Result<[u32; 2]> {
    let not_a_plugin = || PluginError::NotAPlugin { path: path.into(), symbol: "roll_plugin_abi" };
    let abi = symbol::<*const RollAbi>(library, "roll_plugin_abi\0").ok_or_else(not_a_plugin)?;
    // SAFETY: 16 bytes of the library's data. They may be unaligned if the library is no plugin.
    let abi = unsafe { abi.read_unaligned() };
    if abi.magic != MAGIC {
        return Err(not_a_plugin().into());
    }
    let found = [abi.major, abi.minor];
    // Only the major version must be equal. A minor version adds methods and fields, which the older side does without
    // (P6).
    if found[0] != ABI_VERSION[0] {
        return Err(PluginError::Version { path: path.into(), expected: ABI_VERSION, found }.into());
    }
    Ok(found)
}

/// Compares the types at the boundary. Returns false if they cannot be compared, because the plugin does not describe
/// them.
#[cfg(feature = "abi_stable")]
fn check_types(path: &Path, library: &'static libloading::Library) -> Result<bool> {
    let types = symbol::<*const crate::abi::StableTypes>(library, "roll_plugin_types\0");
    let Some(types) = types else { return Ok(false) };
    // SAFETY: P3: a static of the library.
    let types: &'static crate::abi::StableTypes = unsafe { &**types };
    if !types.is_readable() {
        return Ok(false);
    }
    // SAFETY: P3.
    let checked = unsafe { types.check() };
    checked.map_err(|difference| PluginError::Layout { path: path.into(), difference })?;
    Ok(true)
}

/// Returns false: without the feature `abi_stable`, types cannot be compared.
#[cfg(not(feature = "abi_stable"))]
fn check_types(_: &Path, _: &'static libloading::Library) -> Result<bool> {
    Ok(false)
}

/// The plugin that a library describes.
fn plugin_of(
    description: Description,
    call: CallFn,
    path: &Path,
    abi: [u32; 2],
    is_layout_checked: bool,
) -> Result<Plugin> {
    let Description { name, version, authors, about, components } = description;
    if name.is_empty() || components.is_empty() {
        return Err(Error::Misuse("it has no name, or offers nothing".into()));
    }
    let origin = Arc::new(Origin::new(name.clone(), path.into()));
    let mut loaded: Vec<&'static PluginComponent> = Vec::new();
    for component in components {
        let component = component_of(component, &version, Library::new(call, &origin), &origin)?;
        if let Some(twin) = loaded.iter().find(|c| (c.kind, c.registration_name) == (component.kind, component.name()))
        {
            return Err(Error::Misuse(format!("it offers the {} `{}` twice", twin.kind, twin.name())));
        }
        loaded.push(component);
    }
    Ok(Plugin { name, version, authors, about, path: path.into(), abi, is_layout_checked, components: loaded })
}

/// A component that a library describes, with its entry for the registry. Both are leaked, because the library is never
/// unloaded.
fn component_of(
    description: ComponentDescription,
    version: &str,
    library: Library,
    origin: &Origin,
) -> Result<&'static PluginComponent> {
    let ComponentDescription { kind, name, summary, options, plans } = description;
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if name.is_empty() || !name.chars().all(is_plain) {
        return Err(Error::Misuse(format!("{name:?} is not a name for a {kind}: use letters, digits and `_`")));
    }
    let component: &'static PluginComponent = Box::leak(Box::new(PluginComponent {
        kind,
        registration_name: String::leak(name),
        options,
        library,
        registration: std::sync::OnceLock::new(),
    }));
    component.registration.get_or_init(|| Registration {
        name: component.registration_name,
        summary: String::leak(summary),
        origin: String::leak(format!("{} ({})", origin.plugin, origin.path.display())),
        version: String::leak(version.into()),
        is_linked: false,
        defaults: Box::leak(Box::new(|| OptionSpec::defaults(&component.options))),
        keys: Box::leak(Box::new(|| component.options.iter().map(OptionSpec::key).collect())),
        factory: factory(component),
        planner: if plans { planner(component) } else { None },
        learning_rate: None,
        is_default_check: false,
    });
    Ok(component)
}

impl PluginComponent {
    /// Kind of the component.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Its name in the configuration.
    pub fn name(&self) -> &'static str {
        self.registration_name
    }

    /// Its options.
    pub fn options(&self) -> &[OptionSpec] {
        &self.options
    }

    /// The entry of the registry.
    pub fn registration(&'static self) -> &'static Registration {
        // Set when the component was loaded.
        self.registration.get_or_init(|| unreachable!("a component is registered when it is loaded"))
    }

    /// `options` with the defaults of missing ones, checked. An error names the plugin and `method`.
    fn checked_options(&self, method: &'static str, options: &Options) -> Result<Options> {
        self.library.0.blame(method, complete(self.kind.section(), &self.options, options))
    }

    /// Lets the library make the component.
    fn make(&self, options: &Options, context: &BuildContext) -> Result<Remote> {
        let options = self.checked_options("make", options)?;
        // Only strategies and algorithms may enter collectives, which must have one order on all ranks.
        let ranks = match self.kind {
            Kind::Strategy | Kind::Algorithm => Some(communicator::give(context.ranks.clone())),
            Kind::Model | Kind::Reward | Kind::Environment => None,
        };
        let named: [(_, &dyn Write); 5] = [
            ("kind", &self.kind),
            ("name", &self.registration_name),
            ("options", &options),
            ("context", context),
            ("ranks", &ranks),
        ];
        let library = &self.library.0;
        let made = library.call("make", &named)?.ok_or_else(|| library.lacks("make"))?;
        library.blame("make", made.read())
    }

    /// Asks the library for the needs of a run. The type of the answer depends on the kind; see [`crate::Planner`].
    /// Only the plans of models and rewards read `in_run`.
    fn plan<T: serde::de::DeserializeOwned>(
        &self,
        options: &Options,
        in_run: Option<(&PlanInput, &BuildContext)>,
    ) -> Result<T> {
        let options = self.checked_options("plan", options)?;
        let (input, context) = in_run.unzip();
        let named: [(_, &dyn Write); 5] = [
            ("kind", &self.kind),
            ("name", &self.registration_name),
            ("options", &options),
            ("input", &input),
            ("context", &context),
        ];
        let library = &self.library.0;
        let planned = library.call("plan", &named)?.ok_or_else(|| library.lacks("plan"))?;
        library.blame("plan", planned.read())
    }
}

/// A maker for the registry: the library makes the object, and `wrap` the trait object for it.
fn maker<T: ?Sized>(component: &'static PluginComponent, wrap: fn(Remote) -> Result<Box<T>>) -> &'static Make<T> {
    Box::leak(Box::new(move |options: &Options, context: &BuildContext| wrap(component.make(options, context)?)))
}

fn factory(component: &'static PluginComponent) -> Factory {
    match component.kind {
        Kind::Reward => Factory::Reward(maker(component, |made| Ok(Box::new(RemoteReward::new(made)?)))),
        Kind::Model => Factory::Model(maker(component, |made| Ok(Box::new(RemoteModel::new(made)?)))),
        Kind::Strategy => Factory::Strategy(maker(component, |made| Ok(Box::new(RemoteStrategy::new(made)?)))),
        Kind::Algorithm => Factory::Algorithm(maker(component, |remote| Ok(Box::new(RemoteAlgorithm { remote })))),
        Kind::Environment => {
            Factory::Environment(maker(component, |remote| Ok(Box::new(RemoteEnvironment { remote }))))
        }
    }
}

/// The planner of a component, for kinds that have planners.
fn planner(component: &'static PluginComponent) -> Option<Planner> {
    Some(match component.kind {
        Kind::Algorithm => Planner::Algorithm(Box::leak(Box::new(|options: &Options| component.plan(options, None)))),
        Kind::Strategy => Planner::Strategy(Box::leak(Box::new(|options: &Options| component.plan(options, None)))),
        Kind::Model => {
            Planner::Model(Box::leak(Box::new(|options: &Options, input: &PlanInput, context: &BuildContext| {
                component.plan(options, Some((input, context)))
            })))
        }
        Kind::Reward => {
            Planner::Reward(Box::leak(Box::new(|options: &Options, input: &PlanInput, context: &BuildContext| {
                component.plan(options, Some((input, context)))
            })))
        }
        Kind::Environment => return None,
    })
}
