//! Cache keys: hashes of the inputs of a computation.

use std::fmt::{self, Display};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

use ring::digest::{Context, SHA256};

use roll_core::{Error, Result, Tensor};

/// Files up to this size are read whole.
const MAX_WHOLE_FILE: u64 = 16 << 20;
/// Larger files are sampled: one block of [`BLOCK`] bytes every `STRIDE` bytes.
const STRIDE: u64 = 1 << 20;
/// Bytes of a block of a sampled file.
const BLOCK: usize = 4096;
/// Bytes that [`sha256`] reads at a time.
const READ_BYTES: usize = 1 << 16;

/// A SHA-256 over named parts and files. Two fingerprints are equal if all parts are, in the same order. Only samples
/// of a large file count, except with [`Fingerprint::whole_file`].
#[derive(Clone)]
pub struct Fingerprint(Context);

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Fingerprint")
    }
}

/// Returns the SHA-256 of all bytes of `reader`, in lower-case hexadecimal, and their number.
pub fn sha256(mut reader: impl Read) -> io::Result<(String, u64)> {
    let (mut digest, mut bytes) = (Context::new(&SHA256), 0);
    let mut buffer = vec![0; READ_BYTES];
    loop {
        match reader.read(&mut buffer) {
            Ok(0) => return Ok((hex(digest.finish().as_ref()), bytes)),
            Ok(count) => {
                digest.update(&buffer[..count]);
                bytes += count as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Bytes in lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Fingerprint {
    /// Starts a fingerprint for one kind of object.
    pub fn new(kind: &str) -> Self {
        Self(Context::new(&SHA256)).text("kind", kind)
    }

    /// Adds a setting.
    pub fn text(self, name: &str, value: impl Display) -> Self {
        self.part(name, value.to_string().as_bytes())
    }

    /// Adds shape, type and values of a tensor.
    pub fn tensor(self, name: &str, tensor: &Tensor) -> Self {
        self.text(name, format_args!("{:?} {:?}", tensor.dtype(), tensor.shape())).part(name, tensor.as_bytes())
    }

    /// Adds values.
    pub fn f32s(self, name: &str, values: &[f32]) -> Self {
        self.part(name, bytemuck::cast_slice(values))
    }

    /// Adds the contents of a file; its name and modification time do not count, so that a copy has the same
    /// fingerprint. Files above 16 MiB contribute a block of 4 KiB in every MiB: training changes weights everywhere,
    /// and reading tens of gigabytes for a key would take longer than the cache saves.
    pub fn file(mut self, path: &Path) -> Result<Self> {
        let failed = || Error::file("read", path);
        let mut file = crate::files::open(path).map_err(failed())?;
        let size = file.metadata().map_err(failed())?.len();
        self = self.text("bytes", size);
        if size <= MAX_WHOLE_FILE {
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes).map_err(failed())?;
            return Ok(self.part("contents", &bytes));
        }
        let mut block = [0; BLOCK];
        let last_block = size - BLOCK as u64;
        for start in (0..last_block).step_by(STRIDE as usize).chain([last_block]) {
            file.seek(SeekFrom::Start(start)).and_then(|_| file.read_exact(&mut block)).map_err(failed())?;
            self.0.update(&block);
        }
        Ok(self)
    }

    /// As [`Fingerprint::file`], but every byte counts whatever the size: for programs, whose versions may differ in a
    /// few bytes only.
    pub fn whole_file(self, path: &Path) -> Result<Self> {
        let bytes = crate::files::read(path, u64::MAX).map_err(Error::file("read", path))?;
        Ok(self.part("contents", &bytes))
    }

    /// Returns the hash in lower-case hexadecimal.
    pub fn finish(self) -> String {
        hex(self.0.finish().as_ref())
    }

    /// Adds a part with its lengths, so that the end of one part cannot be taken for the beginning of the next.
    fn part(mut self, name: &str, bytes: &[u8]) -> Self {
        for piece in [name.as_bytes(), bytes] {
            self.0.update(&(piece.len() as u64).to_le_bytes());
            self.0.update(piece);
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of FIPS 180-4, and one of a fingerprint: keys of caches that were written before stay valid.
    #[test]
    fn hashes_are_those_of_the_standard() {
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(sha256(&b""[..]).unwrap(), (empty.into(), 0));
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(sha256(&b"abc"[..]).unwrap(), (abc.into(), 3));
        let million = "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0";
        assert_eq!(sha256(io::repeat(b'a').take(1_000_000)).unwrap(), (million.into(), 1_000_000));
        let key = Fingerprint::new("k").text("a", 1).f32s("v", &[0.5]).finish();
        assert_eq!(key, "4d6d22111b0bb74b0af08a10d6085ee7545cc0f0910631492307e5961fe7ff93");
    }

    #[test]
    fn every_part_changes_the_fingerprint() {
        let fingerprint =
            |a: &str, b: &str, t: &Tensor| Fingerprint::new("k").text("a", a).text("b", b).tensor("t", t).finish();
        let one = Tensor::zeros([2, 3]);
        let base = fingerprint("x", "yz", &one);
        assert_eq!(base, fingerprint("x", "yz", &one));
        assert_eq!(base.len(), 64);
        assert_ne!(base, fingerprint("xy", "z", &one));
        assert_ne!(base, fingerprint("x", "yz", &Tensor::zeros([3, 2])));
        assert_ne!(base, fingerprint("x", "yz", &Tensor::full([2, 3], 1e-30)));
        assert_ne!(Fingerprint::new("a").finish(), Fingerprint::new("b").finish());
        let mut values = vec![0.5f32; 3000];
        let fingerprint = |values: &[f32]| Fingerprint::new("k").f32s("v", values).finish();
        let before = fingerprint(&values);
        values[2999] = 0.5f32.next_up();
        assert!(before != fingerprint(&values) && before != fingerprint(&values[..2999]));
    }

    #[test]
    fn fingerprints_of_files_depend_on_contents_only() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        let fingerprint = |path: &Path| Fingerprint::new("f").file(path).unwrap().finish();
        for size in [10usize, (MAX_WHOLE_FILE + 12345) as usize] {
            let mut bytes = vec![7u8; size];
            std::fs::write(&a, &bytes).unwrap();
            std::fs::write(&b, &bytes).unwrap();
            assert_eq!(fingerprint(&a), fingerprint(&b));
            *bytes.last_mut().unwrap() = 8;
            std::fs::write(&b, &bytes).unwrap();
            assert_ne!(fingerprint(&a), fingerprint(&b));
        }
        assert!(Fingerprint::new("f").file(&dir.path().join("none")).is_err());
    }

    #[test]
    fn whole_file_depends_on_every_byte() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let fingerprint = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            let key = || Fingerprint::new("f");
            (key().file(&path).unwrap().finish(), key().whole_file(&path).unwrap().finish())
        };
        let mut bytes = vec![7u8; (MAX_WHOLE_FILE + 12345) as usize];
        let (sampled, whole) = fingerprint(&bytes);
        bytes[BLOCK + 1] = 8; // between two blocks
        let changed = fingerprint(&bytes);
        assert!(changed.0 == sampled && changed.1 != whole);
    }
}
