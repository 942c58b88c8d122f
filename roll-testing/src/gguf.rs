//! A writer of GGUF files.

/// Version of the format.
const VERSION: u32 = 3;
/// Alignment of tensors in bytes, the default of the format.
const ALIGNMENT: usize = 32;

/// Writes GGUF files.
#[derive(Default)]
pub struct GgufWriter {
    /// The entries of metadata as bytes.
    metadata: Vec<u8>,
    metadata_count: u64,
    /// The entries of tensors as bytes: name, shape, type and offset in `data`.
    tensors: Vec<u8>,
    tensor_count: u64,
    /// The bytes of the tensors.
    data: Vec<u8>,
}

impl GgufWriter {
    /// Appends a text as the format writes it: its length, then its bytes.
    pub fn text(into: &mut Vec<u8>, text: &str) {
        into.extend((text.len() as u64).to_le_bytes());
        into.extend(text.as_bytes());
    }

    /// Adds an entry of metadata. `kind` is the number of its type in GGUF (`gguf_type`), `bytes` the value.
    pub fn value(mut self, key: &str, kind: u32, bytes: &[u8]) -> Self {
        Self::text(&mut self.metadata, key);
        self.metadata.extend(kind.to_le_bytes());
        self.metadata.extend(bytes);
        self.metadata_count += 1;
        self
    }

    /// Adds a tensor. `kind` is the number of its type in ggml (`ggml_type`). `shape` has the rows first; the file
    /// stores it reversed.
    pub fn tensor(mut self, name: &str, shape: &[u64], kind: u32, bytes: &[u8]) -> Self {
        Self::text(&mut self.tensors, name);
        self.tensors.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|d| self.tensors.extend(d.to_le_bytes()));
        self.tensors.extend(kind.to_le_bytes());
        self.data.resize(self.data.len().next_multiple_of(ALIGNMENT), 0);
        self.tensors.extend((self.data.len() as u64).to_le_bytes());
        self.data.extend(bytes);
        self.tensor_count += 1;
        self
    }

    /// The whole file.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(VERSION.to_le_bytes());
        out.extend(self.tensor_count.to_le_bytes());
        out.extend(self.metadata_count.to_le_bytes());
        out.extend(&self.metadata);
        out.extend(&self.tensors);
        out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
        out.extend(&self.data);
        out
    }
}
