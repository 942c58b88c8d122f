//! Checks a file before the system's loader opens it: the loader maps as much as the header promises, and a shorter file
//! would end the process with a bus error.

use std::path::Path;

use super::error::PluginError;

/// Bytes of the ELF header of a 64-bit file.
const HEADER: usize = 64;
/// Bytes of one program header.
const SEGMENT: usize = 56;
/// Bytes of one section header.
const SECTION: usize = 64;
/// The section type without bytes in the file (`.bss`).
const NO_BITS: u32 = 8;
/// The file type of shared objects.
const SHARED: u16 = 3;

/// ELF machine numbers, by Rust's names of the architectures.
const MACHINES: [(&str, u16); 9] = [
    ("x86", 3),
    ("mips", 8),
    ("powerpc64", 21),
    ("s390x", 22),
    ("arm", 40),
    ("x86_64", 62),
    ("aarch64", 183),
    ("riscv64", 243),
    ("loongarch64", 258),
];

/// Fails if the file is not a shared object for this machine or is truncated. Contents are checked on Linux only.
pub(super) fn check(path: &Path) -> Result<(), PluginError> {
    let bad = |problem: String| PluginError::NotLoadable { path: path.into(), problem };
    let metadata = std::fs::metadata(path).map_err(|e| bad(e.to_string()))?;
    if !metadata.is_file() {
        return Err(bad("it is not a file; name the library itself (lib….so)".into()));
    }
    if !cfg!(target_os = "linux") {
        return Ok(());
    }
    // A plugin has tens of megabytes, and the page cache keeps it for the loader.
    let bytes = std::fs::read(path).map_err(|e| bad(e.to_string()))?;
    check_elf(&bytes, std::env::consts::ARCH).map_err(bad)
}

fn check_elf(bytes: &[u8], arch: &str) -> Result<(), String> {
    if !bytes.starts_with(b"\x7fELF") {
        return Err("it is not a shared library (it does not begin as an ELF file)".into());
    }
    if bytes.len() < HEADER {
        return Err(format!("it is cut off: {} bytes, the header alone has {HEADER}", bytes.len()));
    }
    let (class, order) = (bytes[4], bytes[5]);
    if class != 2 || order != 1 {
        return Err("it is built for another kind of machine (expected 64 bits, little-endian)".into());
    }
    let machine = u16_at(bytes, 18);
    let expected = MACHINES.iter().find(|(name, _)| *name == arch).map(|(_, number)| *number);
    if expected.is_some_and(|expected| expected != machine) {
        let found = MACHINES.iter().find(|(_, number)| *number == machine);
        let found = found.map_or_else(|| format!("machine {machine}"), |(name, _)| name.to_string());
        return Err(format!("it is built for {found}, this program runs on {arch}"));
    }
    if u16_at(bytes, 16) != SHARED {
        return Err("it is not a shared library but an ELF file of another type".into());
    }
    let mut end = 0u64;
    let segments = (u64_at(bytes, 32), u16_at(bytes, 54), u16_at(bytes, 56));
    for entry in table(bytes, segments, SEGMENT)? {
        end = end.max(sum(u64_at(entry, 8), u64_at(entry, 32))?);
    }
    let sections = (u64_at(bytes, 40), u16_at(bytes, 58), u16_at(bytes, 60));
    for entry in table(bytes, sections, SECTION)? {
        if u32_at(entry, 4) != NO_BITS {
            end = end.max(sum(u64_at(entry, 24), u64_at(entry, 32))?);
        }
    }
    match end > bytes.len() as u64 {
        true => Err(format!("it is cut off: its header promises {end} bytes, the file has {}", bytes.len())),
        false => Ok(()),
    }
}

/// The entries of a table at (offset, bytes of an entry, entries).
fn table(
    bytes: &[u8],
    (offset, size, count): (u64, u16, u16),
    expected: usize,
) -> Result<impl Iterator<Item = &[u8]>, String> {
    if count > 0 && usize::from(size) != expected {
        return Err(format!("its header is damaged: table entries of {size} bytes, expected {expected}"));
    }
    let end = sum(offset, u64::from(size) * u64::from(count))?;
    let whole = usize::try_from(offset).ok().zip(usize::try_from(end).ok());
    let whole = whole.and_then(|(offset, end)| bytes.get(offset..end)).unwrap_or_default();
    match count > 0 && whole.is_empty() {
        true => Err(format!("it is cut off: its header promises at least {end} bytes, the file has {}", bytes.len())),
        false => Ok(whole.chunks_exact(expected)),
    }
}

fn sum(a: u64, b: u64) -> Result<u64, String> {
    a.checked_add(b).ok_or_else(|| "its header is damaged: an offset beyond all bounds".into())
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header of `machine` whose one segment ends at byte 4096.
    fn elf(machine: u16) -> Vec<u8> {
        let mut bytes = vec![0u8; 4096];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[16..18].copy_from_slice(&SHARED.to_le_bytes());
        bytes[18..20].copy_from_slice(&machine.to_le_bytes());
        bytes[32..40].copy_from_slice(&64u64.to_le_bytes());
        bytes[54..56].copy_from_slice(&(SEGMENT as u16).to_le_bytes());
        bytes[56..58].copy_from_slice(&1u16.to_le_bytes());
        bytes[64 + 32..64 + 40].copy_from_slice(&4096u64.to_le_bytes());
        bytes
    }

    #[test]
    fn accepts_whole_files_of_this_machine() {
        assert_eq!(check_elf(&elf(62), "x86_64"), Ok(()));
        assert_eq!(check_elf(&elf(9999), "an architecture of the future"), Ok(()));
    }

    #[test]
    fn rejects_files_cut_at_any_length() {
        let whole = elf(62);
        for length in 0..whole.len() {
            assert!(check_elf(&whole[..length], "x86_64").is_err(), "{length}");
        }
    }

    #[test]
    fn rejects_damaged_headers_without_panicking() {
        let whole = elf(62);
        // The magic number, class and order of bytes; type and machine; size and number of table entries.
        let relied_on = |at: usize| matches!(at, 0..6 | 16..20 | 54..58);
        for at in 0..120 {
            for value in [0, 1, 127, 255].into_iter().filter(|value| *value != whole[at]) {
                let mut damaged = whole.clone();
                damaged[at] = value;
                let found = check_elf(&damaged, "x86_64");
                // No segment at all promises no bytes.
                let empty = u16_at(&damaged, 56) == 0;
                assert!(found.is_err() || !relied_on(at) || empty, "{value} at byte {at}");
            }
        }
    }

    #[test]
    fn names_other_machines_and_file_types() {
        assert!(check_elf(&elf(183), "x86_64").unwrap_err().contains("aarch64"));
        assert!(check_elf(b"#!/bin/sh\n", "x86_64").unwrap_err().contains("not a shared library"));
    }
}
