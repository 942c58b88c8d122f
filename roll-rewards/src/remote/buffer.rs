//! Large buffers in huge pages: page faults of 4 KiB pages would cost more than filling the memory.

use std::io::Result;
use std::sync::Arc;

use memmap2::MmapMut;
use rayon::prelude::*;
use roll_core::{DType, Tensor};

/// Size in bytes above which a buffer has its own mapping.
const LARGE: usize = 8 << 20;
/// Number of elements per task of a thread.
const CHUNK: usize = 1 << 18;

/// Bytes that are initially zero.
pub enum Buffer {
    /// Heap memory.
    Small(Vec<u8>),
    /// Memory-mapped, in huge pages if the system has them. Memory is allocated when it is written to.
    Large(MmapMut),
}

impl Buffer {
    /// Allocates a buffer. Fails if the system refuses so much memory.
    pub fn new(bytes: usize) -> Result<Self> {
        if bytes < LARGE {
            return Ok(Self::Small(vec![0; bytes]));
        }
        let map = MmapMut::map_anon(bytes)?;
        // A refusal costs speed only.
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

/// Multiplies an f32 tensor by `factor`.
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
mod tests {
    use super::*;

    #[test]
    fn small_and_large_tensors_are_scaled_equally() {
        for count in [0, 7, LARGE / 4 + 5] {
            let values: Vec<f32> = (0..count).map(|i| (i % 1001) as f32 - 500.0).collect();
            let found = scaled(&Tensor::new(values.clone(), [count]).unwrap(), -0.5).unwrap();
            assert!(found.f32s().unwrap().iter().zip(&values).all(|(f, v)| *f == -0.5 * v), "{count}");
            assert_eq!(found.shape(), [count]);
        }
    }
}
