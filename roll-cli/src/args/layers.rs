//! Files and values of a configuration, in the order of the command line.
//!
//! clap collects the values of each argument apart. This module sorts them by their positions on the command line,
//! since a later value overrides an earlier one.

use std::path::PathBuf;

use clap::{Arg, ArgMatches, Args as ClapArgs, Command, FromArgMatches, value_parser};

/// Name of the plain arguments that are files.
const FILES: &str = "files";

/// Configuration files and values; later ones override earlier ones.
#[derive(Clone, Debug, Default)]
pub struct Layers {
    /// Files of `--config`, and plain arguments of commands with [`ConfigFiles`].
    pub files: Vec<PathBuf>,
    /// Values of `--set`, `--unset` and the arguments for one key each, such as `--algo`.
    pub values: Vec<GivenValue>,
}

/// A value of an argument.
#[derive(Clone, Debug)]
pub enum GivenValue {
    /// `KEY=VALUE` of `--set`.
    Assignment(String),
    /// The value of an argument for one key.
    OfKey(KeyValue),
    /// The key of `--unset`.
    Unset(String),
}

/// The value of one configuration key.
#[derive(Clone, Debug)]
pub struct KeyValue {
    pub key: &'static str,
    /// The value as YAML.
    pub value: String,
    /// The argument that gave the value, for errors and for `roll config`.
    pub origin: &'static str,
}

/// The arguments that [`Layers`] reads.
#[derive(ClapArgs)]
struct Arguments {
    /// YAML file; later files override earlier ones.
    #[arg(long, short, value_name = "FILE")]
    config: Vec<PathBuf>,
    /// One value, `training.learning_rate=1e-5`; overrides files, environment, and arguments before it.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Reset a value to its default, or remove an optional section, as `--set KEY=null`.
    #[arg(long, value_name = "KEY")]
    unset: Vec<String>,
    /// Algorithm, as `algo.name`.
    #[arg(long, value_name = "NAME")]
    algo: Option<String>,
    /// Model, as `model.name`.
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Environment that an agent acts in, as `env.name`.
    #[arg(long, value_name = "NAME")]
    env: Option<String>,
    /// Tensor backend and device, as `backend`: flex, libtorch, libtorch-cuda, cuda or wgpu; `:N`
    /// chooses device N.
    #[arg(long, value_name = "NAME")]
    backend: Option<String>,
}

impl ClapArgs for Layers {
    fn augment_args(command: Command) -> Command {
        Arguments::augment_args(command)
    }
    fn augment_args_for_update(command: Command) -> Command {
        Arguments::augment_args_for_update(command)
    }
}

impl FromArgMatches for Layers {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let Arguments { config, set, unset, algo, model, env, backend } = Arguments::from_arg_matches(matches)?;
        let positions = |argument: &str| matches.indices_of(argument).into_iter().flatten();
        let mut files: Vec<(usize, PathBuf)> = positions("config").zip(config).collect();
        // A command without `ConfigFiles` has no argument of this name, which is an error here.
        if let Ok(Some(plain)) = matches.try_get_many::<PathBuf>(FILES) {
            files.extend(positions(FILES).zip(plain.cloned()));
        }
        let mut values: Vec<(usize, GivenValue)> = Vec::new();
        let arguments_for_one_key = [
            ("algo", "algo.name", "--algo", algo),
            ("model", "model.name", "--model", model),
            ("env", "env.name", "--env", env),
            ("backend", "backend", "--backend", backend),
        ];
        for (argument, key, origin, value) in arguments_for_one_key {
            let value = value.map(|value| GivenValue::OfKey(KeyValue { key, value, origin }));
            values.extend(positions(argument).zip(value));
        }
        values.extend(positions("set").zip(set.into_iter().map(GivenValue::Assignment)));
        values.extend(positions("unset").zip(unset.into_iter().map(GivenValue::Unset)));
        files.sort_by_key(|(position, _)| *position);
        values.sort_by_key(|(position, _)| *position);
        let files = files.into_iter().map(|(_, file)| file).collect();
        Ok(Self { files, values: values.into_iter().map(|(_, value)| value).collect() })
    }
    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Lets a command take configuration files as plain arguments, which [`Layers`] reads.
#[derive(Clone, Copy, Debug, Default)]
pub struct ConfigFiles;

impl ClapArgs for ConfigFiles {
    fn augment_args(command: Command) -> Command {
        let files = Arg::new(FILES).value_name("FILE").num_args(0..).value_parser(value_parser!(PathBuf));
        command.arg(files.help("YAML files, as by `--config`"))
    }
    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for ConfigFiles {
    fn from_arg_matches(_: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self)
    }
    fn update_from_arg_matches(&mut self, _: &ArgMatches) -> Result<(), clap::Error> {
        Ok(())
    }
}
