//! Loads a plugin: from a file to named components.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use crate::abi::{
    ABI_VERSION, InitFn, MAGIC, RollAbi, RollComponent, RollContext, RollError, RollHost, RollObject, RollOwned,
    RollPlugin, RollStr,
};

use super::algorithm::ForeignAlgorithm;
use super::data::{placement_number, take_json};
use super::environment::ForeignEnvironment;
use super::error::PluginError;
use super::foreign_model::ForeignModel;
use super::memory::{list, text};
use super::options::{OptionSpec, complete};
use super::reward::ForeignReward;
use super::source::{Origin, Source};
use super::strategy::ForeignStrategy;
use super::{communicator, log, object_file};
use crate::plan::PlanInput;
use crate::{BuildContext, Error, Factory, Kind, Make, OptionKind, Options, Planner, Registration, Result};

/// Most components of one plugin, and most options of one component: larger numbers are garbage.
const MAX_ENTRIES: usize = 1024;

/// A plugin in this process.
#[derive(Clone, Debug)]
pub struct Plugin {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Who wrote it; may be empty.
    pub authors: String,
    /// Its description; may be empty.
    pub about: String,
    /// The file.
    pub path: PathBuf,
    /// Major and minor version of the interface.
    pub abi: [u32; 2],
    /// Whether it describes its types, and they were compared: Rust plugins with the feature `abi_stable` do.
    pub layout_checked: bool,
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
    raw: RawComponent,
    source: Source,
    registration: std::sync::OnceLock<Registration>,
}

#[derive(Clone, Copy)]
struct RawComponent(RollComponent);

// SAFETY: P3 and P4: components may be made on any thread.
unsafe impl Send for RawComponent {}
// SAFETY: as above.
unsafe impl Sync for RawComponent {}

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
    // Held while loading: a library is initialised once.
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(plugin) = loaded.get(&path) {
        return Ok(plugin.clone());
    }
    let plugin = open(&path)?;
    loaded.insert(path, plugin.clone());
    Ok(plugin)
}

fn open(path: &Path) -> Result<Plugin> {
    object_file::check(path)?;
    let library = library(path)?;
    let abi = version(path, library)?;
    let layout_checked = types(path, library, abi)?;
    let init = symbol::<InitFn>(library, "roll_plugin_init\0");
    let init = *init.ok_or(PluginError::NotAPlugin { path: path.into(), symbol: "roll_plugin_init" })?;

    let label = path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
    let label = label.strip_prefix("lib").map(String::from).unwrap_or(label);
    let unnamed = Source::Plugin(Arc::new(Origin::new(label.clone(), path.into())));
    let (mut plugin, mut error) = (std::ptr::null(), RollError::default());
    let entered = unnamed.entered("init");
    // SAFETY: P3 and P7; the version was compared.
    let status = unsafe { init(host(label), &mut plugin, &mut error) };
    drop(entered);
    let plugin = unnamed.outcome("init", status, plugin, error)?;
    let description = |e: Error| PluginError::Description { path: path.into(), problem: e.to_string() };
    // SAFETY: P3.
    let described = unsafe { describe(plugin, path, abi, layout_checked) };
    Ok(described.map_err(description)?)
}

/// The table that this host lends to a plugin; `label` precedes its messages.
fn host(label: String) -> &'static RollHost {
    let label: &'static String = Box::leak(Box::new(label));
    let state = std::ptr::from_ref(label).cast();
    Box::leak(Box::new(RollHost {
        size: size_of::<RollHost>(),
        state,
        log: Some(log::log),
        log_level: Some(log::log_level),
    }))
}

#[cfg(unix)]
fn library(path: &Path) -> Result<&'static libloading::Library> {
    use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
    // Now, so that a missing symbol is an error here and not the end of the process later.
    // SAFETY: the library's initialisers run; the user chose to run this code.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
    let library = library.map_err(|source| PluginError::Open { path: path.into(), source })?;
    Ok(Box::leak(Box::new(library.into())))
}

#[cfg(not(unix))]
fn library(path: &Path) -> Result<&'static libloading::Library> {
    // SAFETY: the library's initialisers run; the user chose to run this code.
    let library = unsafe { libloading::Library::new(path) };
    let library = library.map_err(|source| PluginError::Open { path: path.into(), source })?;
    Ok(Box::leak(Box::new(library)))
}

/// Looks up a symbol, of the type that the interface declares.
fn symbol<T>(library: &'static libloading::Library, name: &'static str) -> Option<libloading::Symbol<'static, T>> {
    // SAFETY: the names are the interface's, and so are the types; a library that uses them otherwise lies.
    unsafe { library.get(name.as_bytes()) }.ok()
}

fn version(path: &Path, library: &'static libloading::Library) -> Result<[u32; 2]> {
    let not_a_plugin = || PluginError::NotAPlugin { path: path.into(), symbol: "roll_plugin_abi" };
    let abi = symbol::<*const RollAbi>(library, "roll_plugin_abi\0").ok_or_else(not_a_plugin)?;
    // SAFETY: 16 bytes of the library's data; unaligned when it is something else.
    let abi = unsafe { abi.read_unaligned() };
    if abi.magic != MAGIC {
        return Err(not_a_plugin().into());
    }
    let found = [abi.major, abi.minor];
    // A minor version only lets tables grow (P6): the older side does without.
    match found[0] == ABI_VERSION[0] {
        true => Ok(found),
        false => Err(PluginError::Version { path: path.into(), expected: ABI_VERSION, found }.into()),
    }
}

/// Compares the types at the boundary, where both sides describe them.
#[cfg(feature = "abi_stable")]
fn types(path: &Path, library: &'static libloading::Library, [_, minor]: [u32; 2]) -> Result<bool> {
    let types = symbol::<*const crate::abi::StableTypes>(library, "roll_plugin_types\0");
    let Some(types) = types else { return Ok(false) };
    // SAFETY: P3: a static of the library.
    let types: &'static crate::abi::StableTypes = unsafe { &**types };
    if !types.is_readable() {
        return Ok(false);
    }
    // SAFETY: P3.
    let checked = unsafe { types.check(minor) };
    checked.map_err(|difference| PluginError::Layout { path: path.into(), difference })?;
    Ok(true)
}

/// As with the feature `abi_stable`.
#[cfg(not(feature = "abi_stable"))]
fn types(_: &Path, _: &'static libloading::Library, _: [u32; 2]) -> Result<bool> {
    Ok(false)
}

/// # Safety
/// P3 and P9.
unsafe fn describe(raw: *const RollPlugin, path: &Path, abi: [u32; 2], layout_checked: bool) -> Result<Plugin> {
    // SAFETY: as the caller promises.
    let (name, version, authors, about, components) = unsafe {
        let raw = crate::abi::read(raw).map_err(Error::Misuse)?;
        if raw.components.len > MAX_ENTRIES {
            return Err(Error::Misuse(format!("{} components, more than {MAX_ENTRIES}", raw.components.len)));
        }
        (text(raw.name)?, text(raw.version)?, text(raw.authors)?, text(raw.about)?, list(raw.components)?)
    };
    if name.is_empty() || components.is_empty() {
        return Err(Error::Misuse("it has no name, or offers nothing".into()));
    }
    let origin = Arc::new(Origin::new(name.into(), path.into()));
    let mut loaded: Vec<&'static PluginComponent> = Vec::new();
    for component in components {
        // SAFETY: as the caller promises.
        let component = unsafe { component_of(*component, version, &origin) }?;
        if let Some(twin) = loaded.iter().find(|c| (c.kind, c.registration_name) == (component.kind, component.name()))
        {
            return Err(Error::Misuse(format!("it offers the {} `{}` twice", twin.kind, twin.name())));
        }
        loaded.push(component);
    }
    let [name, version, authors, about] = [name, version, authors, about].map(String::from);
    Ok(Plugin { name, version, authors, about, path: path.into(), abi, layout_checked, components: loaded })
}

/// # Safety
/// As [`describe`].
unsafe fn component_of(
    raw: *const RollComponent,
    version: &str,
    origin: &Arc<Origin>,
) -> Result<&'static PluginComponent> {
    // SAFETY: as the caller promises.
    let (raw, name, summary, options) = unsafe {
        let raw = crate::abi::read(raw).map_err(Error::Misuse)?;
        if raw.options.len > MAX_ENTRIES {
            return Err(Error::Misuse(format!("{} options, more than {MAX_ENTRIES}", raw.options.len)));
        }
        (raw, text(raw.name)?, text(raw.summary)?, list(raw.options)?)
    };
    let kind = u32::try_from(raw.kind).ok().and_then(Kind::from_id);
    let kind = kind.ok_or_else(|| Error::Misuse(format!("`{name}` is of kind {}, which does not exist", raw.kind)))?;
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if name.is_empty() || !name.chars().all(plain) {
        return Err(Error::Misuse(format!("{name:?} is not a name for a {kind}: use letters, digits and `_`")));
    }
    let mut specs = Vec::new();
    for option in options {
        // SAFETY: as the caller promises.
        let (key, default, about) = unsafe { (text(option.name)?, text(option.default_json)?, text(option.about)?) };
        let default = serde_json::from_str(default)
            .map_err(|e| Error::Misuse(format!("the default of `{name}.{key}` is no JSON: {e}")))?;
        let kind = OptionKind::ALL
            .get(option.kind as usize)
            .copied()
            .ok_or_else(|| Error::Misuse(format!("the option `{name}.{key}` is of kind {}", option.kind)))?;
        specs.push(OptionSpec { name: key.into(), kind, default, about: about.into() });
    }
    let component: &'static PluginComponent = Box::leak(Box::new(PluginComponent {
        kind,
        registration_name: String::leak(name.into()),
        options: specs,
        raw: RawComponent(raw),
        source: Source::Plugin(Arc::clone(origin)),
        registration: std::sync::OnceLock::new(),
    }));
    component.registration.get_or_init(|| Registration {
        name: component.registration_name,
        summary: String::leak(summary.into()),
        origin: String::leak(format!("{} ({})", origin.plugin, origin.path.display())),
        version: String::leak(version.into()),
        is_linked: false,
        defaults: Box::leak(Box::new(|| OptionSpec::defaults(&component.options))),
        keys: Box::leak(Box::new(|| component.options.iter().map(OptionSpec::key).collect())),
        factory: factory(component),
        planner: planner(component),
        learning_rate: None,
        is_default_check: false,
    });
    Ok(component)
}

impl PluginComponent {
    /// Its kind.
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

    /// The options as JSON, complete.
    fn complete(&self, call: &'static str, options: &Options) -> Result<String> {
        let options = complete(self.kind.section(), &self.options, options);
        let options = options.map_err(|e| self.source.blame(call, e))?;
        Ok(serde_json::Value::Object(options).to_string())
    }

    fn make(&self, options: &Options, context: &BuildContext) -> Result<RollObject> {
        let options = self.complete("make", options)?;
        let RawComponent(RollComponent { data, make, .. }) = self.raw;
        let missing = || self.source.blame("make", Error::Misuse("it has no function `make`".into()));
        let make = make.ok_or_else(missing)?;
        let base_dir = context.base_dir.to_string_lossy();
        // Other kinds call no collectives, so that those of a job keep one order.
        let ranks = match self.kind {
            Kind::Strategy | Kind::Algorithm => communicator::give(context.ranks.clone()),
            Kind::Model | Kind::Reward | Kind::Environment => RollObject::default(),
        };
        let context = RollContext {
            size: size_of::<RollContext>(),
            backend: RollStr::lend(&context.backend),
            base_dir: RollStr::lend(&base_dir),
            seed: context.seed,
            placement: placement_number(context.placement),
            ranks,
        };
        let (mut out, mut error) = (RollObject::default(), RollError::default());
        let _entered = self.source.entered("make");
        // SAFETY: P1, P3 and P7.
        let status = unsafe { make(data, RollStr::lend(&options), &context, &mut out, &mut error) };
        self.source.outcome("make", status, out, error)
    }

    /// Asks the plugin for the needs of a run; the answer's type is that of its kind's [`crate::Planner`].
    fn plan<T: serde::de::DeserializeOwned>(
        &self,
        options: &Options,
        model: Option<(&PlanInput, &BuildContext)>,
    ) -> Result<T> {
        let RawComponent(RollComponent { data, plan, .. }) = self.raw;
        let missing = || self.source.blame("plan", Error::Misuse("it has no function `plan`".into()));
        let plan = plan.ok_or_else(missing)?;
        let options = self.complete("plan", options)?;
        let input =
            serde_json::to_string(&model).map_err(|e| Error::Misuse(format!("writing the input of the plan: {e}")))?;
        let (mut out, mut error) = (RollOwned::default(), RollError::default());
        let _entered = self.source.entered("plan");
        // SAFETY: P1, P3 and P7.
        let status = unsafe { plan(data, RollStr::lend(&options), RollStr::lend(&input), &mut out, &mut error) };
        let out = self.source.outcome("plan", status, out, error)?;
        // SAFETY: P2.
        unsafe { take_json(out, "the plan is") }.map_err(|e| self.source.blame("plan", e))
    }
}

/// A maker that converts the objects of `component` with `wrap`.
fn maker<T: ?Sized>(
    component: &'static PluginComponent,
    wrap: fn(RollObject, Source) -> Result<Box<T>>,
) -> &'static Make<T> {
    Box::leak(Box::new(move |options: &Options, context: &BuildContext| {
        wrap(component.make(options, context)?, component.source.clone())
    }))
}

fn factory(component: &'static PluginComponent) -> Factory {
    match component.kind {
        // SAFETY: P2 and P8.
        Kind::Reward => Factory::Reward(maker(component, |o, s| Ok(Box::new(unsafe { ForeignReward::new(o, s) }?)))),
        // SAFETY: as above.
        Kind::Model => Factory::Model(maker(component, |o, s| Ok(Box::new(unsafe { ForeignModel::new(o, s) }?)))),
        Kind::Strategy => {
            // SAFETY: as above.
            Factory::Strategy(maker(component, |o, s| Ok(Box::new(unsafe { ForeignStrategy::new(o, s) }?))))
        }
        Kind::Algorithm => {
            // SAFETY: as above.
            Factory::Algorithm(maker(component, |o, s| Ok(Box::new(unsafe { ForeignAlgorithm::new(o, s) }?))))
        }
        Kind::Environment => {
            // SAFETY: as above.
            Factory::Environment(maker(component, |o, s| Ok(Box::new(unsafe { ForeignEnvironment::new(o, s) }?))))
        }
    }
}

/// The planner of a component that has the function `plan`.
fn planner(component: &'static PluginComponent) -> Option<Planner> {
    component.raw.0.plan?;
    Some(match component.kind {
        Kind::Algorithm => Planner::Algorithm(Box::leak(Box::new(|options: &Options| component.plan(options, None)))),
        Kind::Strategy => Planner::Strategy(Box::leak(Box::new(|options: &Options| component.plan(options, None)))),
        Kind::Model => {
            Planner::Model(Box::leak(Box::new(|options: &Options, input: &PlanInput, context: &BuildContext| {
                component.plan(options, Some((input, context)))
            })))
        }
        Kind::Reward | Kind::Environment => return None,
    })
}
