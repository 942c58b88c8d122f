//! Large buffers: memory that comes in pages of 4 KiB costs more to get than to fill, so large pages are asked for.

use std::io::Result;
use std::sync::Arc;

use memmap2::MmapMut;
use rayon::prelude::*;
use roll_core::{DType, Tensor};

/// Above this, a buffer is mapped by itself.
const LARGE: usize = 8 << 20;
/// Numbers that a thread computes at once.
const CHUNK: usize = 1 << 18;

/// Bytes that begin as zeros.
pub enum Buffer {
    /// Of the heap.
    Small(Vec<u8>),
    /// Mapped, on large pages where the system has them. Memory is taken as it is written to.
    Large(MmapMut),
}

impl Buffer {
    /// Fails where the system does not promise so much memory.
    pub fn new(bytes: usize) -> Result<Self> {
        if bytes < LARGE {
            return Ok(Self::Small(vec![0; bytes]));
        }
        let map = MmapMut::map_anon(bytes)?;
        // Without them it is slower, and that is all.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        Ok(Self::Large(map))
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::Small(bytes) => bytes,
            Self::Large(map) => map,
        }
    }
}

impl AsMut<[u8]> for Buffer {
    fn as_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Small(bytes) => bytes,
            Self::Large(map) => map,
        }
    }
}

/// `factor` times an f32 tensor.
pub fn scaled(tensor: &Tensor, factor: f32) -> roll_core::Result<Tensor> {
    let values = tensor.f32s()?;
    let Ok(mut buffer @ Buffer::Large(_)) = Buffer::new(size_of_val(values)) else {
        return Tensor::new(values.iter().map(|v| factor * v).collect::<Vec<f32>>(), tensor.shape());
    };
    let out: &mut [f32] = bytemuck::cast_slice_mut(buffer.as_mut());
    out.par_chunks_mut(CHUNK).zip(values.par_chunks(CHUNK)).for_each(|(out, values)| {
        out.iter_mut().zip(values).for_each(|(o, v)| *o = factor * v);
    });
    Tensor::from_bytes(DType::F32, tensor.shape(), Arc::new(buffer))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn small_and_large_tensors_are_scaled_alike() {
        for count in [0, 7, LARGE / 4 + 5] {
            let values: Vec<f32> = (0..count).map(|i| (i % 1001) as f32 - 500.0).collect();
            let found = scaled(&Tensor::new(values.clone(), [count]).unwrap(), -0.5).unwrap();
            assert!(found.f32s().unwrap().iter().zip(&values).all(|(f, v)| *f == -0.5 * v), "{count}");
            assert_eq!(found.shape(), [count]);
        }
    }
}
