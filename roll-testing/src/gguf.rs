//! A writer of GGUF files.

/// Writes GGUF files of version 3.
#[derive(Default)]
pub struct GgufWriter {
    values: Vec<u8>,
    value_count: u64,
    tensors: Vec<u8>,
    tensor_count: u64,
    data: Vec<u8>,
}

impl GgufWriter {
    /// Appends a text: its length, and its bytes.
    pub fn text(into: &mut Vec<u8>, text: &str) {
        into.extend((text.len() as u64).to_le_bytes());
        into.extend(text.as_bytes());
    }

    /// Adds metadata of this type of GGUF.
    pub fn value(mut self, key: &str, kind: u32, bytes: &[u8]) -> Self {
        Self::text(&mut self.values, key);
        self.values.extend(kind.to_le_bytes());
        self.values.extend(bytes);
        self.value_count += 1;
        self
    }

    /// Adds a tensor of this type of ggml; `shape` has the rows first.
    pub fn tensor(mut self, name: &str, shape: &[u64], kind: u32, bytes: &[u8]) -> Self {
        Self::text(&mut self.tensors, name);
        self.tensors.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|d| self.tensors.extend(d.to_le_bytes()));
        self.tensors.extend(kind.to_le_bytes());
        self.data.resize(self.data.len().next_multiple_of(32), 0);
        self.tensors.extend((self.data.len() as u64).to_le_bytes());
        self.data.extend(bytes);
        self.tensor_count += 1;
        self
    }

    /// The whole file.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend(self.tensor_count.to_le_bytes());
        out.extend(self.value_count.to_le_bytes());
        out.extend(&self.values);
        out.extend(&self.tensors);
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend(&self.data);
        out
    }
}
