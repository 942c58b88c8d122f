//! `roll plugins`: lists the components that a configuration can name, describes those of a library, and tries its
//! rewards.

use std::path::Path;

use roll_core::{
    BuildContext, Error, Finding, Kind, Options, Registration, Registry, Replaces, Result, Verdict, check_reward,
    nearest, one_line,
};
use roll_plugin::{Plugin, PluginComponent, load};

use roll_train::config::{Section, sections};
use roll_train::progress::counted;

use super::config::print_section;
use crate::args::{CheckPlugin, ConfigArgs, Plugins, PluginsAction};
use crate::configuration::Configuration;

/// Maximum width of the column of origins.
const MAX_ORIGIN_WIDTH: usize = 24;

/// Runs the action that the arguments name; without one, lists the components.
pub fn plugins(args: Plugins) -> Result<()> {
    match args.action {
        None => list(&ConfigArgs::default()),
        Some(PluginsAction::List(args)) => list(&args),
        Some(PluginsAction::Info { path }) => info(&path),
        Some(PluginsAction::Check(args)) => check(&args),
    }
}

/// Prints a line for every component, linked in or from a plugin.
fn list(args: &ConfigArgs) -> Result<()> {
    let registry = Configuration::read(args, &[])?.registry()?;
    let origin = |entry: &Registration| format!("{} {}", entry.origin, entry.version);
    // As narrow as the origins allow, because the summaries need the room in a terminal of 80 columns.
    let width =
        registry.entries().iter().map(|entry| origin(entry).len()).max().unwrap_or_default().min(MAX_ORIGIN_WIDTH);
    println_wrapped!("{:<12} {:<14} {:<width$}  summary", "kind", "name", "origin");
    for entry in registry.entries() {
        println_wrapped!(
            "{:<12} {:<14} {:<width$}  {}",
            entry.factory.kind(),
            entry.name,
            origin(entry),
            entry.summary
        );
    }
    Ok(())
}

/// Shows a library by its path or a component by its name.
fn info(path: &Path) -> Result<()> {
    let registry = Configuration::read(&ConfigArgs::default(), &[])?.registry()?;
    let is_named = |section: &&Section| section.component.is_some_and(|(_, name)| Path::new(name) == path);
    let named: Vec<_> = sections(&registry).into_iter().filter(|section| is_named(&section)).collect();
    if !named.is_empty() && !path.is_file() {
        for section in &named {
            print_section(section);
            if let Some((kind, name)) = section.component {
                let registration = registry.find(kind, name)?;
                println!("\n  {} {}", registration.origin, registration.version);
            }
        }
        return Ok(());
    }
    // A bare word that is no file was meant as the name of a component.
    if !path.exists() && path.components().count() == 1 && path.extension().is_none() {
        let names: Vec<_> = registry.entries().iter().map(|entry| entry.name).collect();
        let near = path.to_str().and_then(|name| nearest(name, names.iter().copied()));
        let hint = near.map(|near| format!("did you mean `{near}`?")).unwrap_or_else(|| "see `roll plugins`".into());
        return Err(Error::Unsupported(format!("{} is neither a file nor a component; {hint}", path.display())));
    }
    let plugin = load(path)?;
    print_head(&plugin);
    for component in &plugin.components {
        println!("{} {}: {}", component.kind(), component.name(), component.registration().summary);
        for option in component.options() {
            println!("  {:<24} {:<16} {:<16} {}", option.name, option.kind.words(), option.default, option.about);
        }
    }
    Ok(())
}

/// Prints what a library says about itself.
fn print_head(plugin: &Plugin) {
    let layout = if plugin.is_layout_checked { "types compared" } else { "types not described" };
    println!("{} {} ({})", plugin.name, plugin.version, plugin.path.display());
    for line in [&plugin.about, &plugin.authors].into_iter().filter(|l| !l.is_empty()) {
        println!("{line}");
    }
    println!("plugin ABI {}.{}, {layout}\n", plugin.abi[0], plugin.abi[1]);
}

/// Tries the built-in reward that `args` name, or the components of a library.
fn check(args: &CheckPlugin) -> Result<()> {
    let linked = Registry::linked()?;
    let is_built_in = |name: &&str| linked.find(Kind::Reward, name).is_ok() && !args.path.exists();
    if let Some(name) = args.path.to_str().filter(is_built_in) {
        println!("reward {name}");
        return fail_if_broken(print_findings(&try_reward(&linked, name, args)?), &format!("the reward `{name}`"));
    }
    let plugin = load(&args.path)?;
    print_head(&plugin);
    let is_chosen = |c: &&&'static PluginComponent| args.component.as_deref().is_none_or(|name| name == c.name());
    let components: Vec<_> = plugin.components.iter().filter(is_chosen).collect();
    if components.is_empty() {
        let offered: Vec<_> = plugin.components.iter().map(|c| c.name()).collect();
        return Err(Error::config("--component", format!("the plugin offers {}", offered.join(", "))));
    }
    let registry = linked.with_components(&plugin.registrations(), Replaces::Linked)?;
    let mut broken = 0;
    for component in components {
        println!("{} {}", component.kind(), component.name());
        let findings = match component.kind() {
            Kind::Reward => try_reward(&registry, component.name(), args)?,
            _ => Vec::new(),
        };
        if findings.is_empty() {
            println!("  --      only rewards are tried; it loads, and describes itself well");
        }
        broken += print_findings(&findings);
    }
    fail_if_broken(broken, &format!("the plugin `{}` ({})", plugin.name, plugin.path.display()))
}

/// Tries the reward `name` on random videos.
fn try_reward(registry: &Registry, name: &str, args: &CheckPlugin) -> Result<Vec<Finding>> {
    let backend = "flex";
    let context = BuildContext { seed: args.seed, ..BuildContext::new(backend) };
    Ok(match registry.reward(name, &options(&args.set)?, &context) {
        Ok(mut scorer) => check_reward(scorer.as_mut(), args.seed),
        Err(error) => vec![Finding {
            promise: "it is made with these options".into(),
            verdict: Verdict::Broken,
            detail: one_line(&error),
        }],
    })
}

/// Prints the findings, and returns the number of broken promises.
fn print_findings(findings: &[Finding]) -> usize {
    for Finding { promise, verdict, detail } in findings {
        let word = match verdict {
            Verdict::Kept => "ok",
            Verdict::Broken => "BROKEN",
            Verdict::NotTried => "--",
        };
        println!("  {word:<7} {promise}{}{detail}", if detail.is_empty() { "" } else { ": " });
    }
    findings.iter().filter(|finding| finding.verdict == Verdict::Broken).count()
}

/// Fails if `who` breaks promises.
fn fail_if_broken(broken: usize, who: &str) -> Result<()> {
    match broken {
        0 => Ok(()),
        n => Err(Error::Unsupported(format!("{who} breaks {}", counted(n as u64, "promise")))),
    }
}

/// The options in `KEY=VALUE` assignments. A value that is not JSON is a text.
fn options(assignments: &[String]) -> Result<Options> {
    let mut options = Options::new();
    for assignment in assignments {
        let (key, text) = assignment
            .split_once('=')
            .ok_or_else(|| Error::config(assignment.as_str(), "expected key=value after --set"))?;
        let value = serde_json::from_str(text).unwrap_or_else(|_| text.into());
        options.insert(key.trim().into(), value);
    }
    Ok(options)
}
