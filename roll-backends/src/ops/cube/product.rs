//! Matrix products by cubek's kernels, selected by rule instead of autotuning. Autotuning compiles all candidates,
//! which takes minutes before the first step, and a near tie may be decided differently in the next run, with other
//! bits.
//!
//! f32 products are computed in f32. cubek itself would use TF32 (eleven significant bits per operand) on GPUs that
//! have it.

use std::collections::BTreeMap;
use std::sync::Mutex;

use burn_cubecl::kernel::matmul::{MatmulStrategy, init_matmul_output, matmul};
use burn_cubecl::tensor::CubeTensor;
use burn_tensor::{DType, FloatDType, TensorData};
use cubecl::prelude::{Scalar, TensorBinding};
use cubecl::tf32;
use cubek::matmul::definition::{MatmulElems, MatmulGlobalElems, MatmulSetupError};
use cubek::matmul::launch::launch_ref;
use cubek::matmul::multi_level::Strategy;
use cubek::matmul::multi_level::components::tile::TileMatmulKind::Mma;
use cubek::matmul::multi_level::routines::batch::double_buffering::DoubleBufferingArgs;
use cubek::matmul::multi_level::routines::batch::ordered_double_buffering::OrderedSelectionArgs;
use cubek::matmul::multi_level::routines::batch::simple::SimpleArgs;
use cubek::matmul::multi_level::routines::batch::specialized::SpecializedStrategy;
use cubek::matmul::routine::BlueprintStrategy::Inferred;
use cubek::std::InputBinding;

use super::{cached, elem, empty, to_host};
use crate::backend::ops::FloatTensorOps;
use crate::backend::{Cube, TensorMetadata};
use crate::ops::ProductKernel;
use crate::ops::expression::Expression;

impl ProductKernel for Cube {
    fn product(a: CubeTensor, b: CubeTensor) -> CubeTensor {
        let out = init_matmul_output(&a, &b, DType::F32);
        if a.meta.num_elements() == 0 || b.meta.num_elements() == 0 {
            // An empty sum is zero, and the kernels do not write it.
            return Cube::float_zeros(out.shape(), &out.device, FloatDType::F32);
        }
        // A routine multiplies operands of one dtype.
        let [a, b] = if a.dtype == b.dtype { [a, b] } else { [a, b].map(|x| Expression::<Self>(x).cast(DType::F32).0) };
        product_into(a, b, out)
    }
}

/// The product of `[batch, m, k]` and `[batch, k, n]` as f32, with contiguous rows. (On some devices, the rows of
/// [`ProductKernel::product`]'s result are padded.) Neither matrix may be empty.
pub fn product_with_contiguous_rows(a: CubeTensor, b: CubeTensor) -> CubeTensor {
    let ([batch, m, _], [.., n]) = (a.shape().dims::<3>(), b.shape().dims::<3>());
    let out = empty(&a, [batch, m, n]);
    product_into(a, b, out)
}

fn product_into(a: CubeTensor, b: CubeTensor, out: CubeTensor) -> CubeTensor {
    let has_tf32 = a.client.properties().supports_type(tf32::elem_type_native());
    match a.dtype {
        DType::F32 if has_tf32 => launch_first_supported(&IN_F32, a, b, out),
        DType::BF16 => {
            let routines = Routine::for_bf16(&a);
            launch_first_supported(&routines, a, b, out)
        }
        // `MatmulStrategy::Cube` launches cubek's default kernel for these shapes, without autotuning. Without TF32 it
        // computes in f32.
        _ => match matmul(a, b, Some(out), MatmulStrategy::Cube, DType::F32) {
            Ok(product) => product,
            Err(error) => panic!("no kernel for a product of matrices: {error:?}"),
        },
    }
}

/// A matrix product routine of cubek. CubeCL calls a thread a unit, and a warp a plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Routine {
    /// Tensor cores, double buffering along the inner axis, left matrix read in row order.
    Ordered,
    /// Tensor cores, double buffering, all units read both matrices.
    Double,
    /// Tensor cores, double buffering, separate planes for reading and computing.
    Specialized,
    /// Tensor cores, single buffering, several rows of tiles per plane.
    Simple,
    /// Tensor cores through their portable interface, single buffering.
    Portable,
    /// Tensor cores, single buffering, reads by Hopper's copy engine (TMA).
    Tma,
    /// No tensor cores, double buffering.
    DoubleUnit,
    /// No tensor cores, single buffering.
    Unit,
    /// One unit per element. Supports every shape.
    Naive,
}

use Routine::{Double, DoubleUnit, Naive, Ordered, Portable, Simple, Specialized, Tma, Unit};

/// Routines that compute in f32; the first that supports the shapes is used.
const IN_F32: [Routine; 3] = [DoubleUnit, Unit, Naive];
/// Routines for bf16 products; the first that supports the shapes is used. [`Routine::for_bf16`] removes those that do
/// not work on the device.
const IN_BF16: [Routine; 6] = [Ordered, Double, Simple, Portable, Unit, Naive];
/// Environment variable with the bf16 routine to try first, one of [`NAMES`]; for comparisons.
const CHOICE: &str = "ROLL_CUDA_PRODUCTS";

/// Environment variable that, if `1`, skips the comparison of results: for a stand-in of the driver, which computes
/// nothing (`tests/kernels.rs`).
const UNCHECKED: &str = "ROLL_CUDA_UNCHECKED";

roll_core::inventory::submit! { roll_core::Variable(CHOICE) }
roll_core::inventory::submit! { roll_core::Variable(UNCHECKED) }

const NAMES: [(&str, Routine); 7] = [
    ("ordered", Ordered),
    ("double", Double),
    ("specialized", Specialized),
    ("simple", Simple),
    ("portable", Portable),
    ("tma", Tma),
    ("unit", Unit),
];

impl Routine {
    fn strategy(self) -> Strategy {
        match self {
            Self::Ordered => Strategy::OrderedDoubleMma(Inferred(OrderedSelectionArgs {
                tile_matmul: Mma,
                partition_k: Some(2),
                row_count: Some(8),
                rows_per_plane: Some(2),
            })),
            Self::Double => {
                Strategy::DoubleCyclicMma(Inferred(DoubleBufferingArgs { tile_matmul: Mma, specialized: false }))
            }
            Self::Specialized => Strategy::SpecializedCyclicMma(Inferred(SpecializedStrategy { tile_matmul: Mma })),
            Self::Simple => Strategy::SimpleCyclicMma(Inferred(SimpleArgs { tile_matmul: Mma, multi_rows: true })),
            Self::Portable => Strategy::SimpleCyclicCmma(Default::default()),
            Self::Tma => Strategy::SimpleTmaMma(Inferred(SimpleArgs { tile_matmul: Mma, multi_rows: true })),
            Self::DoubleUnit => Strategy::DoubleUnit(Default::default()),
            Self::Unit => Strategy::SimpleUnit(Default::default()),
            Self::Naive => Strategy::Naive,
        }
    }

    /// The routines for bf16 products on the device of `like`, in the order in which they are tried. They are checked
    /// in this order until one passes. Routines that do not compile or return wrong results on this hardware are
    /// removed. Routines after the first that passes are not checked, because they are used only for shapes that it
    /// does not support.
    fn for_bf16(like: &CubeTensor) -> Vec<Self> {
        static FOUND: Mutex<BTreeMap<String, Vec<Routine>>> = Mutex::new(BTreeMap::new());
        cached(&FOUND, format!("{:?}", like.device), || Self::without_broken(like))
    }

    /// Computes [`Self::for_bf16`].
    fn without_broken(like: &CubeTensor) -> Vec<Self> {
        let mut order = IN_BF16.to_vec();
        if let Ok(name) = std::env::var(CHOICE) {
            match NAMES.iter().find(|(known, _)| *known == name) {
                Some((_, routine)) => order.insert(0, *routine),
                None => tracing::warn!(
                    "{CHOICE}={name} names no routine: expected one of {}",
                    NAMES.map(|(known, _)| known).join(", ")
                ),
            }
        }
        // The last routine, `Naive`, is not checked, because none could replace it.
        while let [first, _, ..] = order[..] {
            match first.check(like) {
                Ok(()) => {
                    tracing::info!("products in bf16: cubek's {first:?} routine");
                    break;
                }
                Err(reason) => {
                    tracing::warn!(
                        "cubek's {first:?} routine for products in bf16 does not work on this device: {reason}"
                    );
                    order.retain(|routine| *routine != first);
                }
            }
        }
        order
    }

    /// Compares bf16 products in each memory layout that linear layers and their gradients have with sums on the host.
    /// Fails if they differ or the routine cannot be launched.
    fn check(self, like: &CubeTensor) -> Result<(), String> {
        let [m, k, n] = PROBE;
        let (a, b) = (probe_values(m * k, 3), probe_values(k * n, 11));
        let is_checked = std::env::var(UNCHECKED).as_deref() != Ok("1");
        if !is_checked {
            static WARNED: std::sync::Once = std::sync::Once::new();
            WARNED.call_once(|| tracing::warn!("{UNCHECKED}=1: products are not checked, and results may be wrong"));
        }
        let expected = host_product(&a, &b, PROBE);
        for (is_a_transposed, is_b_transposed) in [(false, true), (false, false), (true, false)] {
            let (a, b) = (matrix(&a, [m, k], is_a_transposed, like), matrix(&b, [k, n], is_b_transposed, like));
            let out = empty(&a, [1, m, n]);
            if let Err(error) = launch(self, &a, &b, &out) {
                return Err(format!("{error:?}").trim().into());
            }
            let found = to_host(out).ok_or("its kernel failed")?;
            let is_near = |(found, expected): (&f32, &f32)| (found - expected).abs() <= TOLERANCE;
            if is_checked && !found.iter().zip(&expected).all(is_near) {
                return Err(format!(
                    "it is wrong (left matrix transposed: {is_a_transposed}, right one: {is_b_transposed})"
                ));
            }
        }
        Ok(())
    }
}

/// m, k and n of the products that routines are checked with: not multiples of a thread block's tile.
const PROBE: [usize; 3] = [200, 136, 328];

/// Largest difference of a correct result: operands and expected sums are exact, only the sums found may be rounded.
const TOLERANCE: f32 = 1e-3;

/// The product of a `[m, k]` and b `[k, n]`, summed on the host.
fn host_product(a: &[f32], b: &[f32], [m, k, n]: [usize; 3]) -> Vec<f32> {
    let mut product = vec![0.0f32; m * n];
    for (row, out) in a.chunks_exact(k).zip(product.chunks_exact_mut(n)) {
        for (x, weights) in row.iter().zip(b.chunks_exact(n)) {
            out.iter_mut().zip(weights).for_each(|(sum, weight)| *sum += x * weight);
        }
    }
    product
}

/// Multiples of 1/64 in [-1, 1): exact in bf16, with sums exact in f32.
fn probe_values(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i + seed) * 7919 % 127) as f32 / 64.0 - 1.0).collect()
}

/// A bf16 matrix `[1, rows, columns]`; column-major in memory if `is_transposed`.
fn matrix(values: &[f32], [rows, columns]: [usize; 2], is_transposed: bool, like: &CubeTensor) -> CubeTensor {
    let data = |values: Vec<f32>, shape: [usize; 3]| {
        let x = Cube::float_from_data(TensorData::new(values, shape), &like.device);
        Expression::<Cube>(x).cast(DType::BF16)
    };
    if !is_transposed {
        return data(values.to_vec(), [1, rows, columns]).0;
    }
    let by_column = (0..rows * columns).map(|i| values[i % rows * columns + i / rows]).collect();
    data(by_column, [1, columns, rows]).t().0
}

/// Computes the product with the first routine that supports the shapes.
fn launch_first_supported(routines: &[Routine], a: CubeTensor, b: CubeTensor, out: CubeTensor) -> CubeTensor {
    let mut last_error = None;
    for routine in routines {
        match launch(*routine, &a, &b, &out) {
            Ok(()) => return out,
            Err(error) => last_error = Some(error),
        }
    }
    // `Naive`, the last routine of every list, supports every shape.
    panic!("no kernel for a product of {:?} and {:?}: {last_error:?}", a.shape(), b.shape())
}

fn launch(routine: Routine, a: &CubeTensor, b: &CubeTensor, out: &CubeTensor) -> Result<(), MatmulSetupError> {
    let mut dtypes = MatmulElems::from_globals(&MatmulGlobalElems { lhs: elem(a), rhs: elem(b), out: elem(out) });
    let input = |x: &CubeTensor| InputBinding::new(x.clone().binding(), elem(x));
    let result: TensorBinding = out.clone().binding();
    launch_ref(&routine.strategy().into(), &out.client, input(a), input(b), result, &mut dtypes)
}

#[cfg(feature = "wgpu")]
#[allow(clippy::unwrap_used)]
#[cfg(test)]
mod tests {
    use super::super::test_device;
    use super::*;

    fn wave_matrix(shape: [usize; 3], seed: usize) -> Option<CubeTensor> {
        let device = test_device()?;
        let wave = |i: usize| (((i + seed) * 37 % 101) as f32 / 50.0) - 1.0;
        let values = (0..shape.iter().product()).map(wave).collect();
        Some(Cube::float_from_data(TensorData::new::<f32, _>(values, shape), &device))
    }

    #[test]
    fn products_without_tensor_cores_match_burn() {
        for [batch, m, k, n] in [[3, 64, 32, 48], [2, 33, 130, 17]] {
            let (Some(a), Some(b)) = (wave_matrix([batch, m, k], 0), wave_matrix([batch, k, n], 13)) else { return };
            let out = init_matmul_output(&a, &b, DType::F32);
            let found = to_host(launch_first_supported(&IN_F32, a.clone(), b.clone(), out)).unwrap();
            let rows = to_host(product_with_contiguous_rows(a.clone(), b.clone())).unwrap();
            let expected = to_host(Cube::product(a, b)).unwrap();
            let is_near = |(found, expected): (&f32, &f32)| (found - expected).abs() < 1e-6 * k as f32;
            assert!(found.iter().zip(&expected).all(is_near), "{batch} x {m} x {k} x {n}");
            assert!(rows.iter().zip(&expected).all(is_near), "{batch} x {m} x {k} x {n}");
        }
    }
}
