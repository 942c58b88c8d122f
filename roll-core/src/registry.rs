//! The registry: implementations of every kind by name, with their options, constructor and planner.
//!
//! A component registers itself with [`register!`](crate::register), a plugin's components are added with
//! [`Registry::with_components`], and a program's own rewards with [`Registry::with_reward`].

use crate::plan::{Division, Needs, Passes, PlanInput};
use crate::{
    Algorithm, BuildContext, Environment, Error, Key, Kind, Model, Options, Planner, Result, RewardScorer, Strategy,
    default_options, parse_options,
};

/// The name of an environment variable that begins with `ROLL_` but sets no key of the configuration, unlike other
/// variables with this prefix. Submit it with `inventory::submit!` where the variable is read.
pub struct Variable(pub &'static str);

inventory::collect!(Variable);

/// Makes a component from its options.
pub type Make<T> = dyn Fn(&Options, &BuildContext) -> Result<Box<T>> + Send + Sync;

/// A constructor of components.
#[derive(Clone, Copy)]
#[allow(missing_docs)] // each variant makes what its name says
pub enum Factory {
    Model(&'static Make<dyn Model>),
    Reward(&'static Make<dyn RewardScorer>),
    Algorithm(&'static Make<dyn Algorithm>),
    Strategy(&'static Make<dyn Strategy>),
    Environment(&'static Make<dyn Environment>),
}

impl Factory {
    /// The kind of the components that it makes.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Model(_) => Kind::Model,
            Self::Reward(_) => Kind::Reward,
            Self::Algorithm(_) => Kind::Algorithm,
            Self::Strategy(_) => Kind::Strategy,
            Self::Environment(_) => Kind::Environment,
        }
    }

    fn wrong_kind(&self, wanted: Kind) -> Error {
        Error::Misuse(format!("a component of the kind {} was asked to make one of the kind {wanted}", self.kind()))
    }
}

/// The options of one registered component: a struct whose fields are its keys. [`register!`](crate::register)
/// implements it.
pub trait ComponentOptions: serde::Serialize + serde::de::DeserializeOwned + Default {
    /// The kind of the component.
    const KIND: Kind;
    /// Its name in the configuration.
    const NAME: &'static str;
}

/// Registers a component of this crate: kind, name, type of its options, summary, and how to make it from these options
/// and the [`BuildContext`]; optionally `plan:` with its [`Planner`], `learning_rate:` with the default learning rate
/// ([`Registration::learning_rate`]), and `is_default_check: true` ([`Registration::is_default_check`]).
#[cfg(feature = "schema")]
#[macro_export]
macro_rules! register {
    // The values of the optional arguments, or of their absence.
    (@plan $kind:ident) => {
        None
    };
    (@plan $kind:ident $planner:expr) => {
        Some($crate::Planner::$kind(&$planner))
    };
    (@rate) => {
        None
    };
    (@rate $rate:expr) => {
        Some($rate)
    };
    (@check) => {
        false
    };
    (@check $check:expr) => {
        $check
    };
    // The registration.
    (
        $kind:ident, $name:expr, $options:ty, $summary:expr, $make:expr
        $(, plan: $planner:expr)? $(, learning_rate: $rate:expr)? $(, is_default_check: $check:expr)? $(,)?
    ) => {
        impl $crate::ComponentOptions for $options {
            const KIND: $crate::Kind = $crate::Kind::$kind;
            const NAME: &'static str = $name;
        }
        $crate::inventory::submit! {
            $crate::Registration {
                name: $name,
                summary: $summary,
                origin: env!("CARGO_PKG_NAME"),
                version: env!("CARGO_PKG_VERSION"),
                is_linked: true,
                defaults: &$crate::default_options::<$options>,
                keys: &$crate::keys::of::<$options>,
                factory: $crate::Factory::$kind(&|options, context| {
                    let make: fn($options, &$crate::BuildContext) -> $crate::Result<_> = $make;
                    let options = $crate::parse_options($crate::Kind::$kind.section(), options)?;
                    Ok(Box::new(make(options, context)?))
                }),
                planner: $crate::register!(@plan $kind $($planner)?),
                learning_rate: $crate::register!(@rate $($rate)?),
                is_default_check: $crate::register!(@check $($check)?),
            }
        }
    };
}

/// One implementation, under a name. [`register!`](crate::register) submits it with `inventory::submit!`.
pub struct Registration {
    /// The name in the configuration.
    pub name: &'static str,
    /// One line for listings.
    pub summary: &'static str,
    /// The crate or file that the implementation comes from.
    pub origin: &'static str,
    /// Version of that crate or file.
    pub version: &'static str,
    /// Whether the implementation is linked into this program; false for plugins.
    pub is_linked: bool,
    /// Every option with its default; read it through [`Registration::options`].
    pub defaults: &'static (dyn Fn() -> Options + Send + Sync),
    /// Every option with its meaning: [`crate::keys::of`] the type of the options. Call it through
    /// [`Registration::keys`].
    pub keys: &'static (dyn Fn() -> Vec<Key> + Send + Sync),
    /// The constructor.
    pub factory: Factory,
    /// Estimates for `roll plan`; `None` if the component has none.
    pub planner: Option<Planner>,
    /// Default of `training.learning_rate` if this algorithm trains an adapter. If it trains all weights, the default
    /// is a tenth of this value. `None`: the default of the section `training`.
    pub learning_rate: Option<f64>,
    /// Whether `evaluation.check: auto` selects this reward. Such a reward, with its default options, scores any video
    /// of the model at little cost, and if its score falls while the trained reward rises, the videos have become
    /// worse.
    pub is_default_check: bool,
}

inventory::collect!(Registration);

impl Registration {
    /// Every option with its default: `roll config` shows them, and unknown keys are compared with them.
    pub fn options(&self) -> Options {
        (self.defaults)()
    }

    /// Every option, and the keys of options that are maps, with meaning, values and default.
    pub fn keys(&self) -> Vec<Key> {
        (self.keys)()
    }

    fn cannot_plan(&self) -> Error {
        let kind = self.factory.kind();
        Error::Unsupported(format!(
            "the {kind} `{}` ({} {}) has no estimate of memory and time",
            self.name, self.origin, self.version
        ))
    }
}

/// Whether a plugin's component replaces another component of its kind and name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Replaces {
    /// Two components of one kind and name are an error.
    #[default]
    Nothing,
    /// The plugin's component takes the place of a linked one. Two plugins' components of one kind and name are still
    /// an error.
    Linked,
}

/// All known implementations, sorted by kind and name.
pub struct Registry {
    entries: Vec<&'static Registration>,
}

impl Registry {
    /// The components that are linked into this program. Fails if two of one kind have one name.
    pub fn linked() -> Result<Self> {
        Self::new(inventory::iter::<Registration>.into_iter().collect())
    }

    fn new(mut entries: Vec<&'static Registration>) -> Result<Self> {
        entries.sort_by_key(|r| (r.factory.kind(), r.name));
        // Two entries of one kind and name are neighbours, because the entries are sorted.
        for pair in entries.windows(2) {
            let [a, b] = pair else { continue };
            if (a.factory.kind(), a.name) == (b.factory.kind(), b.name) {
                return Err(Error::Unsupported(format!(
                    "the {} `{}` is registered twice: by {} {} and by {} {}; leave one out",
                    a.factory.kind(),
                    a.name,
                    a.origin,
                    a.version,
                    b.origin,
                    b.version
                )));
            }
        }
        Ok(Self { entries })
    }

    /// Adds a reward of this program: `make` creates it from its options, a struct whose fields are its keys. Fails if
    /// another reward has this name. The registration is never freed.
    ///
    /// ```
    /// # use roll_core::{Grad, Pullback, Registry, Result, RewardScorer, Score, Target, Video};
    /// #[derive(Default, serde::Serialize, serde::Deserialize)]
    /// struct Length {
    ///     frames: usize,
    /// }
    /// impl RewardScorer for Length {
    /// #   fn name(&self) -> &str { "length" }
    /// #   fn differentiable(&self) -> bool { false }
    /// #   fn prepare(&mut self, _: &Video) -> Result<Target> { Ok(Target::default()) }
    /// #   fn score(&mut self, video: &Video, _: &str, _: &Target, _: Grad) -> Result<(Score, Option<Pullback>)> {
    /// #       Ok((Score::of(video.dims()[0] as f64 - self.frames as f64), None))
    /// #   }
    ///     // ...
    /// }
    /// let registry = Registry::linked()?.with_reward("length", |options: Length, _| Ok(options))?;
    /// # Ok::<(), roll_core::Error>(())
    /// ```
    pub fn with_reward<T, R>(
        self,
        name: &str,
        make: impl Fn(T, &BuildContext) -> Result<R> + Send + Sync + 'static,
    ) -> Result<Self>
    where
        T: serde::Serialize + serde::de::DeserializeOwned + Default + 'static,
        R: RewardScorer + 'static,
    {
        let make_boxed = move |options: &Options, context: &BuildContext| -> Result<Box<dyn RewardScorer>> {
            Ok(Box::new(make(parse_options(Kind::Reward.section(), options)?, context)?))
        };
        let registration = Registration {
            name: String::from(name).leak(),
            summary: "A reward of this program",
            origin: "this program",
            version: "",
            is_linked: true,
            defaults: &default_options::<T>,
            keys: &crate::keys::of_defaults::<T>,
            factory: Factory::Reward(Box::leak(Box::new(make_boxed))),
            planner: None,
            learning_rate: None,
            is_default_check: false,
        };
        let mut entries = self.entries;
        entries.push(Box::leak(Box::new(registration)));
        Self::new(entries)
    }

    /// Adds the components of a plugin. Fails if two components would have one kind and name, unless `replaces`
    /// lets the plugin's components take the place of linked ones.
    pub fn with_components(self, components: &[&'static Registration], replaces: Replaces) -> Result<Self> {
        let mut entries = self.entries;
        for new in components {
            // This very registration was added before. (Another one of the same name is a conflict.)
            if entries.iter().any(|old| std::ptr::eq(*old, *new)) {
                continue;
            }
            if replaces == Replaces::Linked {
                let is_replaced = |old: &&Registration| {
                    old.is_linked && (old.factory.kind(), old.name) == (new.factory.kind(), new.name)
                };
                entries.retain(|old| !is_replaced(old));
            }
            entries.push(new);
        }
        Self::new(entries)
    }

    /// All implementations, sorted by kind and name.
    pub fn entries(&self) -> &[&'static Registration] {
        &self.entries
    }

    /// The implementation of `kind` called `name`. Fails if no implementation has this name; the error suggests the
    /// nearest one.
    pub fn find(&self, kind: Kind, name: &str) -> Result<&'static Registration> {
        let of_kind = || self.entries.iter().filter(|entry| entry.factory.kind() == kind);
        let known_names = || of_kind().map(|entry| entry.name);
        let unknown_name = || Error::UnknownName {
            kind: kind.word(),
            name: name.into(),
            nearest: crate::error::nearest(name, known_names()).map(Into::into),
            known: known_names().collect::<Vec<_>>().join(", "),
        };
        of_kind().find(|entry| entry.name == name).copied().ok_or_else(unknown_name)
    }

    /// Makes a model.
    pub fn model(&self, name: &str, options: &Options, context: &BuildContext) -> Result<Box<dyn Model>> {
        match &self.find(Kind::Model, name)?.factory {
            Factory::Model(make) => make(options, context),
            other => Err(other.wrong_kind(Kind::Model)),
        }
    }

    /// Makes a reward.
    pub fn reward(&self, name: &str, options: &Options, context: &BuildContext) -> Result<Box<dyn RewardScorer>> {
        match &self.find(Kind::Reward, name)?.factory {
            Factory::Reward(make) => make(options, context),
            other => Err(other.wrong_kind(Kind::Reward)),
        }
    }

    /// Makes an algorithm.
    pub fn algorithm(&self, name: &str, options: &Options, context: &BuildContext) -> Result<Box<dyn Algorithm>> {
        match &self.find(Kind::Algorithm, name)?.factory {
            Factory::Algorithm(make) => make(options, context),
            other => Err(other.wrong_kind(Kind::Algorithm)),
        }
    }

    /// Makes a strategy.
    pub fn strategy(&self, name: &str, options: &Options, context: &BuildContext) -> Result<Box<dyn Strategy>> {
        match &self.find(Kind::Strategy, name)?.factory {
            Factory::Strategy(make) => make(options, context),
            other => Err(other.wrong_kind(Kind::Strategy)),
        }
    }

    /// Makes an environment.
    pub fn environment(&self, name: &str, options: &Options, context: &BuildContext) -> Result<Box<dyn Environment>> {
        match &self.find(Kind::Environment, name)?.factory {
            Factory::Environment(make) => make(options, context),
            other => Err(other.wrong_kind(Kind::Environment)),
        }
    }

    /// Passes of the algorithm `name` over a sample. Fails if it has no planner.
    pub fn passes(&self, name: &str, options: &Options) -> Result<Passes> {
        let registration = self.find(Kind::Algorithm, name)?;
        match registration.planner {
            Some(Planner::Algorithm(plan)) => plan(options),
            _ => Err(registration.cannot_plan()),
        }
    }

    /// How the strategy `name` shards the work. Fails if it has no planner.
    pub fn division(&self, name: &str, options: &Options) -> Result<Division> {
        let registration = self.find(Kind::Strategy, name)?;
        match registration.planner {
            Some(Planner::Strategy(plan)) => plan(options),
            _ => Err(registration.cannot_plan()),
        }
    }

    /// Memory and time that the model `name` needs. Fails if it has no planner.
    pub fn needs(&self, name: &str, options: &Options, input: &PlanInput, context: &BuildContext) -> Result<Needs> {
        let registration = self.find(Kind::Model, name)?;
        match registration.planner {
            Some(Planner::Model(plan)) => plan(options, input, context),
            _ => Err(registration.cannot_plan()),
        }
    }

    /// Memory and time that the networks of the reward `name` need; `None` if the reward has no planner, because it has
    /// no network or a small one.
    pub fn reward_needs(
        &self,
        name: &str,
        options: &Options,
        input: &PlanInput,
        context: &BuildContext,
    ) -> Result<Option<Needs>> {
        match self.find(Kind::Reward, name)?.planner {
            Some(Planner::Reward(plan)) => plan(options, input, context).map(Some),
            _ => Ok(None),
        }
    }
}
