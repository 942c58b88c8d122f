//! Options of a component: reading them, and their defaults.

use std::time::Duration;

use crate::{Error, Result};

/// Options of an implementation, as parsed from the configuration.
pub type Options = serde_json::Map<String, serde_json::Value>;

/// Reads typed options. Fails on an unknown key; the error names the nearest known one. `prefix` is the section of the
/// configuration that has the options ("model").
pub fn parse_options<T>(prefix: &str, options: &Options) -> Result<T>
where
    T: serde::de::DeserializeOwned + serde::Serialize + Default,
{
    let known = default_options::<T>();
    if let Some(key) = options.keys().find(|k| !known.contains_key(*k)) {
        let near = crate::error::nearest(key, known.keys().map(String::as_str));
        let hint = near
            .map(|n| format!("did you mean `{n}`?"))
            .unwrap_or_else(|| format!("known keys: {}", known.keys().cloned().collect::<Vec<_>>().join(", ")));
        return Err(Error::config(format!("{prefix}.{key}"), format!("unknown key; {hint}")));
    }
    serde_path_to_error::deserialize(serde_json::Value::Object(options.clone())).map_err(|e| {
        let path = e.path().to_string();
        let key = if path == "." { prefix.to_string() } else { format!("{prefix}.{path}") };
        Error::config(key, e.into_inner().to_string())
    })
}

/// Converts the seconds of the option `key`, a limit of time, to a duration. Fails unless they are above 0 and less
/// than a year: a longer time is no limit, and [`Duration`] panics on much larger numbers.
pub fn check_seconds(key: &str, seconds: f64) -> Result<Duration> {
    /// A little more than 365 days.
    const YEAR: f64 = 3.2e7;
    if seconds > 0.0 && seconds < YEAR {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err(Error::config(key, format!("expected seconds above 0 and below {YEAR:e}, a year; found {seconds}")))
    }
}

/// The defaults of typed options, as [`crate::Registration::defaults`] wants them.
pub fn default_options<T: serde::Serialize + Default>() -> Options {
    match serde_json::to_value(T::default()) {
        Ok(mut value) => {
            shorten(&mut value);
            value.as_object().cloned().unwrap_or_default()
        }
        Err(_) => Options::new(),
    }
}

/// Replaces numbers that are exactly an f32 by the f64 with the f32's shortest digits: 0.4 instead of
/// 0.4000000059604645. Both are the same f32 when an option of that type is read.
fn shorten(value: &mut serde_json::Value) {
    match value {
        serde_json::Value::Number(number) if number.is_f64() => {
            let exact = number.as_f64().unwrap_or_default();
            let is_f32 = f64::from(exact as f32) == exact;
            let short: Option<f64> = (exact as f32).to_string().parse().ok();
            if is_f32 && let Some(short) = short.and_then(serde_json::Number::from_f64) {
                *number = short;
            }
        }
        serde_json::Value::Array(items) => items.iter_mut().for_each(shorten),
        serde_json::Value::Object(map) => map.values_mut().for_each(shorten),
        _ => {}
    }
}
