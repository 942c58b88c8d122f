//! Checks a file before the system's loader opens it. The loader maps as many bytes as the header promises; if the file
//! is shorter, the process would end with a bus error.
//!
//! Names such as `e_machine` are those of the fields in the ELF specification.

use std::path::Path;

use super::error::PluginError;

/// Bytes of the ELF header of a 64-bit file.
const HEADER_BYTES: usize = 64;
/// Bytes of one program header, which describes a segment.
const SEGMENT_BYTES: usize = 56;
/// Bytes of one section header.
const SECTION_BYTES: usize = 64;
/// `sh_type` of a section without bytes in the file, such as `.bss` (`SHT_NOBITS`).
const NO_BITS: u32 = 8;
/// `EI_CLASS` of files of 64 bits.
const CLASS_64_BITS: u8 = 2;
/// `EI_DATA` of files with little-endian numbers.
const LITTLE_ENDIAN: u8 = 1;
/// `e_type` of shared objects (`ET_DYN`).
const SHARED_OBJECT: u16 = 3;

/// `e_machine` by Rust's name of the architecture.
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
    let not_loadable = |problem: String| PluginError::NotLoadable { path: path.into(), problem };
    let metadata = std::fs::metadata(path).map_err(|e| not_loadable(e.to_string()))?;
    if !metadata.is_file() {
        return Err(not_loadable("it is not a file; name the library itself (lib….so)".into()));
    }
    if !cfg!(target_os = "linux") {
        return Ok(());
    }
    // A plugin has tens of megabytes, and the page cache keeps it for the loader.
    let bytes = std::fs::read(path).map_err(|e| not_loadable(e.to_string()))?;
    check_elf(&bytes, std::env::consts::ARCH).map_err(not_loadable)
}

/// Checks the contents of a file for the architecture `arch`. Returns the problem.
fn check_elf(bytes: &[u8], arch: &str) -> Result<(), String> {
    if !bytes.starts_with(b"\x7fELF") {
        return Err("it is not a shared library (it does not begin as an ELF file)".into());
    }
    if bytes.len() < HEADER_BYTES {
        return Err(format!("it is cut off: {} bytes, the header alone has {HEADER_BYTES}", bytes.len()));
    }
    // EI_CLASS and EI_DATA.
    let (class, byte_order) = (bytes[4], bytes[5]);
    if class != CLASS_64_BITS || byte_order != LITTLE_ENDIAN {
        return Err("it is built for another kind of machine (expected 64 bits, little-endian)".into());
    }
    let machine = u16_at(bytes, 18); // e_machine
    let expected = MACHINES.iter().find(|(name, _)| *name == arch).map(|(_, number)| *number);
    if expected.is_some_and(|expected| expected != machine) {
        let found = MACHINES.iter().find(|(_, number)| *number == machine);
        let found = found.map_or_else(|| format!("machine {machine}"), |(name, _)| name.to_string());
        return Err(format!("it is built for {found}, this program runs on {arch}"));
    }
    // e_type
    if u16_at(bytes, 16) != SHARED_OBJECT {
        return Err("it is not a shared library but an ELF file of another type".into());
    }
    let end = end_of_contents(bytes)?;
    if end > bytes.len() as u64 {
        return Err(format!("it is cut off: its header promises {end} bytes, the file has {}", bytes.len()));
    }
    Ok(())
}

/// The end of the last segment or section that the header of an ELF file lists.
fn end_of_contents(bytes: &[u8]) -> Result<u64, String> {
    let mut end = 0u64;
    // e_phoff, e_phentsize, e_phnum
    let segments = Table { offset: u64_at(bytes, 32), entry_bytes: u16_at(bytes, 54), count: u16_at(bytes, 56) };
    for entry in segments.entries(bytes, SEGMENT_BYTES)? {
        // p_offset, p_filesz
        end = end.max(checked_sum(u64_at(entry, 8), u64_at(entry, 32))?);
    }
    // e_shoff, e_shentsize, e_shnum
    let sections = Table { offset: u64_at(bytes, 40), entry_bytes: u16_at(bytes, 58), count: u16_at(bytes, 60) };
    for entry in sections.entries(bytes, SECTION_BYTES)? {
        // sh_type, sh_offset, sh_size
        if u32_at(entry, 4) != NO_BITS {
            end = end.max(checked_sum(u64_at(entry, 24), u64_at(entry, 32))?);
        }
    }
    Ok(end)
}

/// A table of segments or sections, as the header describes it.
struct Table {
    /// Position in the file.
    offset: u64,
    /// Bytes of one entry.
    entry_bytes: u16,
    /// Number of entries.
    count: u16,
}

impl Table {
    /// The entries of the table, each of `expected` bytes.
    fn entries(self, bytes: &[u8], expected: usize) -> Result<impl Iterator<Item = &[u8]>, String> {
        let Self { offset, entry_bytes, count } = self;
        if count > 0 && usize::from(entry_bytes) != expected {
            return Err(format!("its header is damaged: table entries of {entry_bytes} bytes, expected {expected}"));
        }
        let end = checked_sum(offset, u64::from(entry_bytes) * u64::from(count))?;
        let range = usize::try_from(offset).ok().zip(usize::try_from(end).ok());
        let table = range.and_then(|(offset, end)| bytes.get(offset..end)).unwrap_or_default();
        if count > 0 && table.is_empty() {
            let found = bytes.len();
            return Err(format!("it is cut off: its header promises at least {end} bytes, the file has {found}"));
        }
        Ok(table.chunks_exact(expected))
    }
}

/// The sum of an offset and a length of the header, which may be anything.
fn checked_sum(a: u64, b: u64) -> Result<u64, String> {
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
        bytes[16..18].copy_from_slice(&SHARED_OBJECT.to_le_bytes());
        bytes[18..20].copy_from_slice(&machine.to_le_bytes());
        bytes[32..40].copy_from_slice(&64u64.to_le_bytes());
        bytes[54..56].copy_from_slice(&(SEGMENT_BYTES as u16).to_le_bytes());
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
