//! Products of matrices: cubek's. With the feature `cuda` the kernel for a shape is found by trial at its first use. Of f32
//! they are f32, which cubek itself would take in TF32 where a GPU has it: eleven bits of each operand.

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Cube, TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, FloatDType};
use burn_cubecl::kernel::matmul::{MatmulStrategy, init_matmul_output, matmul};
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::{Scalar, TensorBinding};
use cubecl::tf32;
use cubek::matmul::definition::{MatmulElems, MatmulGlobalElems, MatmulSetupError};
use cubek::matmul::launch::launch_ref;
use cubek::matmul::multi_level::Strategy;
use cubek::std::InputBinding;

use crate::ops::ProductKernel;

impl ProductKernel for Cube {
    fn product(a: FloatTensor<Self>, b: FloatTensor<Self>) -> FloatTensor<Self> {
        if a.meta.num_elements() == 0 || b.meta.num_elements() == 0 {
            // A sum of nothing, which the kernels do not write.
            let out = init_matmul_output(&a, &b, DType::F32);
            return Cube::float_zeros(out.shape(), &out.device, FloatDType::F32);
        }
        let has_tf32 = a.client.properties().supports_type(tf32::elem_type_native());
        if a.dtype == DType::F32 && has_tf32 {
            return exact(a, b);
        }
        chosen(a, b)
    }
}

fn chosen(a: CubeTensor, b: CubeTensor) -> CubeTensor {
    match matmul(a, b, None, MatmulStrategy::default(), DType::F32) {
        Ok(product) => product,
        Err(error) => panic!("no kernel for a product of matrices: {error:?}"),
    }
}

/// Without tensor cores. The first routine that takes the shapes: with two buffers, with one, one unit an element.
fn exact(a: CubeTensor, b: CubeTensor) -> CubeTensor {
    let out = init_matmul_output(&a, &b, DType::F32);
    let routines =
        [Strategy::DoubleUnit(Default::default()), Strategy::SimpleUnit(Default::default()), Strategy::Naive];
    let mut refused = None;
    for routine in routines {
        match launch(routine, &a, &b, &out) {
            Ok(()) => return out,
            Err(error) => refused = Some(error),
        }
    }
    panic!("no kernel for a product of f32 matrices: {refused:?}")
}

fn launch(routine: Strategy, a: &CubeTensor, b: &CubeTensor, out: &CubeTensor) -> Result<(), MatmulSetupError> {
    let f32: ElemType = f32::elem_type_native();
    let mut dtypes = MatmulElems::from_globals(&MatmulGlobalElems { lhs: f32, rhs: f32, out: f32 });
    let input = |x: &CubeTensor| InputBinding::new(x.clone().binding(), f32);
    let result: TensorBinding = out.clone().binding();
    launch_ref(&routine.into(), &out.client, input(a), input(b), result, &mut dtypes)
}

#[cfg(all(test, feature = "wgpu"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use burn::tensor::TensorData;

    use super::super::{host, test_device};
    use super::*;

    #[test]
    fn products_without_tensor_cores_are_those_of_the_kernels_that_are_chosen() {
        let Some(device) = test_device() else { return };
        let made = |shape: [usize; 3], seed: usize| {
            let wave = |i: usize| (((i + seed) * 37 % 101) as f32 / 50.0) - 1.0;
            let values = (0..shape.iter().product()).map(wave).collect();
            Cube::float_from_data(TensorData::new::<f32, _>(values, shape), &device)
        };
        for [batch, m, k, n] in [[3, 64, 32, 48], [2, 33, 130, 17]] {
            let (a, b) = (made([batch, m, k], 0), made([batch, k, n], 13));
            let (found, expected) = (host(exact(a.clone(), b.clone())).unwrap(), host(chosen(a, b)).unwrap());
            let near = |(found, expected): (&f32, &f32)| (found - expected).abs() < 1e-6 * k as f32;
            assert!(found.iter().zip(&expected).all(near), "{batch} x {m} x {k} x {n}");
        }
    }
}
