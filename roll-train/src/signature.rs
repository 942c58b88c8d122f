//! The last two lines of a run's `config.yaml`: a fingerprint of the configuration that the run began with, and a
//! signature.
//!
//! A run directory may come from another person, and its configuration may name programs, libraries and addresses. The
//! signature shows that a run of this user wrote the file: it is an HMAC with a key that only this user can read. Both
//! lines are comments in the same file, so that a killed process cannot leave a configuration without its signature.

use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rand::TryRngCore;
use rand::rngs::OsRng;
use ring::{digest, hmac};
use roll_core::{Error, Result};
use roll_external::{files, hex};

/// The environment variable that names the directory of the key.
pub const STATE_VARIABLE: &str = "ROLL_STATE";

roll_core::inventory::submit! { roll_core::Variable(STATE_VARIABLE) }

/// Beginning of the line with the fingerprint.
const FINGERPRINT_LINE: &str = "# The run began with configuration ";
/// Beginning of the line with the signature.
const SIGNATURE_LINE: &str = "# Signature: ";
/// Name of the file with the key.
const KEY_FILE: &str = "signing-key";
/// Length of the key.
const KEY_BYTES: usize = 32;

/// The directory of the key, see [`keep_key_in`].
static KEY_DIRECTORY: OnceLock<Option<PathBuf>> = OnceLock::new();

/// Sets the directory of the key with which runs of this process sign configurations. The key is made when it is first
/// needed. Without a call, or with `None`, configurations are not signed, and all of them count as other people's. Only
/// the first call has an effect.
pub fn keep_key_in(directory: Option<PathBuf>) {
    let _ = KEY_DIRECTORY.set(directory);
}

/// The user's directory for the key: the one that [`STATE_VARIABLE`] names, or `roll` in `XDG_STATE_HOME`, or `roll` in
/// `~/.local/state`. `None` without a home directory. `variable` returns the values of environment variables.
pub fn directory_of_user(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let path = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(directory) = path(STATE_VARIABLE) {
        return Some(directory);
    }
    // The XDG specification says that relative paths are ignored.
    let xdg_state = path("XDG_STATE_HOME").filter(|path| path.is_absolute());
    let state = match xdg_state {
        Some(state) => state,
        None => path("HOME")?.join(".local/state"),
    };
    Some(state.join("roll"))
}

/// The text of `config.yaml` for the configuration `yaml` of a run that began with the fingerprint `first_fingerprint`.
pub(crate) fn signed(yaml: &str, first_fingerprint: &str) -> String {
    sign(key_directory(), yaml, first_fingerprint)
}

/// Whether a run of this user wrote this text, and nothing in it was changed since.
pub(crate) fn is_own(text: &str) -> bool {
    is_signed(key_directory(), text)
}

/// The directory of the key, if [`keep_key_in`] has set one.
fn key_directory() -> Option<&'static Path> {
    KEY_DIRECTORY.get()?.as_deref()
}

/// As [`signed`], with the key in `directory`. If there is no key, the text is not signed.
fn sign(directory: Option<&Path>, yaml: &str, first_fingerprint: &str) -> String {
    let line_end = if yaml.ends_with('\n') { "" } else { "\n" };
    let text = format!("{yaml}{line_end}{FINGERPRINT_LINE}{first_fingerprint}\n");
    match directory.map(key_in).transpose() {
        Ok(Some(key)) => format!("{text}{SIGNATURE_LINE}{}\n", signature(&key, &text)),
        Ok(None) => text,
        Err(error) => {
            let why = error.chain();
            tracing::warn!(
                "config.yaml is not signed, so `--resume` takes `--trust` \
                 ({STATE_VARIABLE} names the key's directory): {why}"
            );
            text
        }
    }
}

/// As [`is_own`], by the key in `directory`.
fn is_signed(directory: Option<&Path>, text: &str) -> bool {
    let key = directory.and_then(|directory| read_key(&directory.join(KEY_FILE)).ok());
    let (Some(key), Some((signed, signature))) = (key, text.rsplit_once(SIGNATURE_LINE)) else { return false };
    self::signature(&key, signed) == signature.trim_end()
}

/// The fingerprint in the text of a `config.yaml`; `None` if the text has none.
pub(crate) fn first_fingerprint(text: &str) -> Option<&str> {
    // The line before the signature, or the last line of a text without one.
    text.lines().rev().take(2).find_map(|line| line.strip_prefix(FINGERPRINT_LINE))
}

/// The text without the signature, for people.
pub(crate) fn unsigned(text: &str) -> &str {
    text.rsplit_once(SIGNATURE_LINE).map_or(text, |(signed, _)| signed)
}

/// SHA-256 of a configuration, in hexadecimal.
pub(crate) fn fingerprint(yaml: &str) -> String {
    hex(digest::digest(&digest::SHA256, yaml.as_bytes()).as_ref())
}

/// Reads the key from a file. Fails if the file has another length than [`KEY_BYTES`].
fn read_key(path: &Path) -> Result<Vec<u8>> {
    let bytes = files::read(path, KEY_BYTES as u64).map_err(Error::file("read the key", path))?;
    match bytes.len() {
        KEY_BYTES => Ok(bytes),
        found => Err(Error::bad_file(path, format!("expected a key of {KEY_BYTES} bytes, found {found}; delete it"))),
    }
}

/// The key in `directory`. A key that does not exist yet is made.
fn key_in(directory: &Path) -> Result<Vec<u8>> {
    let path = directory.join(KEY_FILE);
    if !path.exists() {
        fs::create_dir_all(directory).map_err(Error::file("create the directory", directory))?;
        make_key(&path)?;
    }
    read_key(&path)
}

/// Writes a random key, which only this user can read, to the file at `path`, unless another process writes one first.
fn make_key(path: &Path) -> Result<()> {
    let mut bytes = [0; KEY_BYTES];
    OsRng.try_fill_bytes(&mut bytes).map_err(Error::failed("the system has no random numbers"))?;
    let temporary = files::temporary_beside(path);
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let written = options.open(&temporary).and_then(|mut file| {
        file.write_all(&bytes)?;
        file.sync_all()
    });
    let placed = written.and_then(|()| put_in_place(&temporary, path));
    let _ = fs::remove_file(&temporary);
    placed.map_err(Error::file("write the key", path))
}

/// Gives the complete file `temporary` the name `path`, without replacing a key that another process has made meanwhile.
fn put_in_place(temporary: &Path, path: &Path) -> std::io::Result<()> {
    match fs::hard_link(temporary, path) {
        Err(_) if path.exists() => Ok(()),
        // A file system without hard links.
        Err(error) => fs::rename(temporary, path).map_err(|_| error),
        Ok(()) => Ok(()),
    }
}

/// HMAC-SHA256 in hexadecimal.
fn signature(key: &[u8], text: &str) -> String {
    hex(hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), text.as_bytes()).as_ref())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_is_the_hmac_of_rfc_4231() {
        let found = signature(b"Jefe", "what do ya want for nothing?");
        assert_eq!(found, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    }

    #[test]
    fn only_texts_signed_with_the_key_are_own() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let plain = sign(None, "seed: 1\n", "abc");
        assert_eq!(
            (first_fingerprint(&plain), is_signed(None, &plain), is_signed(Some(&state), &plain)),
            (Some("abc"), false, false)
        );
        let text = sign(Some(&state), "seed: 1\n", "abc");
        assert!(
            is_signed(Some(&state), &text) && first_fingerprint(&text) == Some("abc") && unsigned(&text) == plain,
            "{text}"
        );
        for changed in [text.replace("seed: 1", "seed: 2"), text.replace("abc", "xyz"), format!("{text}steps: 3\n")] {
            assert!(!is_signed(Some(&state), &changed), "{changed}");
        }
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let mode = fs::metadata(state.join(KEY_FILE)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
        }
        fs::remove_file(state.join(KEY_FILE)).unwrap();
        sign(Some(&state), "seed: 1\n", "abc");
        assert!(!is_signed(Some(&state), &text), "another key");
    }

    #[test]
    fn the_key_is_in_the_state_directory_of_the_user() {
        let at = |variables: &[(&str, &str)]| {
            directory_of_user(|name| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| value.into()))
        };
        assert_eq!(at(&[("HOME", "/home/a")]), Some("/home/a/.local/state/roll".into()));
        assert_eq!(at(&[("HOME", "/home/a"), ("XDG_STATE_HOME", "/s")]), Some("/s/roll".into()));
        assert_eq!(at(&[("HOME", "/home/a"), (STATE_VARIABLE, "/mine")]), Some("/mine".into()));
        assert_eq!(at(&[]), None);
    }
}
