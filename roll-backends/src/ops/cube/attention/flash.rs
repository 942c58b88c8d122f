//! cubek's flash attention on tensor cores, with bf16 tiles.
//!
//! cubek's own routine multiplies f16 tiles, and so accepts f16 operands only. bf16 tiles have the range of f32, so
//! that neither a large key nor a large value overflows. Products, softmax, sums and the result are f32, because cubek
//! has no bf16 accumulator fragment.

use burn_cubecl::tensor::CubeTensor;
use cubecl::CubeDim;
use cubecl::prelude::Scalar;
use cubek::attention::components::tile::TileAttentionKind;
use cubek::attention::forward::definition::{
    AccumulatorPrecision, AttentionBlueprint, AttentionElems, AttentionGlobalTypes, AttentionOptions,
    AttentionPartitionSize, AttentionProblem, AttentionSetupError, AttentionStageSize, AttentionTileSize,
    AttentionTilingScheme, HypercubeBlueprint,
};
use cubek::attention::forward::launch::{BlueprintStrategy, launch_attention};
use cubek::attention::forward::routines::blackbox_accelerated::BlackboxAcceleratedRoutine;
use cubek::attention::forward::routines::{DeviceSettings, LaunchInfo, Routine};
use cubek::std::cube_count::CubeCountStrategy;
use half::bf16;

use super::super::{elem, empty};
use super::padded;
use crate::backend::{Cube, TensorMetadata};
use crate::ops::AttentionCall;
use crate::ops::expression::Expression;

/// Rows and columns of a tile, as tensor cores compute them in bf16.
const TILE: u32 = 16;
/// Planes (warps) per cube. They share the keys that are loaded; each has one tile of queries.
const PLANES: u32 = 8;
/// Queries per cube. The number of queries must be a multiple of it; the number of keys is arbitrary.
const QUERIES_PER_CUBE: usize = (TILE * PLANES) as usize;

/// cubek's kernel with bf16 tiles instead of f16.
#[derive(Clone, Debug)]
pub struct TensorCores;

impl Routine for TensorCores {
    const TILE_KIND: TileAttentionKind = TileAttentionKind::BlackboxAccelerated;

    type StageAttention = <BlackboxAcceleratedRoutine as Routine>::StageAttention;
    type GlobalAttention = <BlackboxAcceleratedRoutine as Routine>::GlobalAttention;
    type BatchAttention = <BlackboxAcceleratedRoutine as Routine>::BatchAttention;
    type Strategy = ();
    type Blueprint = AttentionBlueprint;

    fn prepare(
        problem: &AttentionProblem,
        device: &DeviceSettings,
        _: BlueprintStrategy<Self>,
    ) -> Result<LaunchInfo<AttentionBlueprint>, AttentionSetupError> {
        let dims = &problem.dims;
        let tiles = |size: usize| size as u32 / TILE;
        let refused = |why: String| Err(AttentionSetupError::InvalidConfig(Box::new(why)));
        if !dims.head_dim.is_multiple_of(TILE as usize) || !dims.val_dim.is_multiple_of(TILE as usize) {
            return refused(format!(
                "heads of {} and {} channels are no multiples of {TILE}",
                dims.head_dim, dims.val_dim
            ));
        }
        if !dims.seq_q.is_multiple_of(QUERIES_PER_CUBE) {
            return refused(format!("{} queries are no multiple of {QUERIES_PER_CUBE}", dims.seq_q));
        }
        let tiling_scheme = AttentionTilingScheme {
            tile_size: AttentionTileSize { seq_q: TILE, head_dim: TILE, seq_kv: TILE, val_dim: TILE },
            partition_size: AttentionPartitionSize {
                seq_q: 1,
                head_dim: tiles(dims.head_dim),
                seq_kv: 1,
                val_dim: tiles(dims.val_dim),
            },
            stage_size: AttentionStageSize { seq_q: PLANES },
        };
        let blueprint = AttentionBlueprint {
            hypercube_blueprint: HypercubeBlueprint::builder().cube_count_strategy(CubeCountStrategy::Spread).build(),
            tiling_scheme,
            plane_dim: device.plane_dim,
            two_rows_in_array_tile: false,
            vector_sizes: device.vector_sizes.clone(),
            masked: problem.masked,
            causal: problem.options.causal,
            check_bounds: tiling_scheme.check_bounds(dims),
        };
        let tile = bf16::elem_type_native();
        Ok(LaunchInfo {
            dtypes: AttentionElems::from_global_types(
                &problem.global_dtypes,
                tile,
                &problem.options.accumulator_precision,
            ),
            cube_dim: CubeDim::new_2d(device.plane_dim, PLANES),
            cube_count_plan: blueprint.cube_count_plan(dims, &device.max_cube_count),
            address_type: problem.address_type,
            blueprint,
        })
    }
}

/// Whether cubek's kernel computes this call. Its scale is fixed to `1 / sqrt(d)`. Its causal mask differs from this
/// project's if the lengths of queries and keys differ.
pub fn supports([q, k, _]: &[CubeTensor; 3], call: AttentionCall) -> bool {
    /// Relative difference of two scales that are the same up to rounding.
    const SCALE_ROUNDING: f32 = 1e-6;
    let ([queries, channels], [keys, _]) = (q.shape().dims::<2>(), k.shape().dims::<2>());
    let fixed_scale = 1.0 / ((channels / call.heads) as f32).sqrt();
    let is_plain = queries * keys * channels > 0 && call.is_plain();
    let has_fixed_scale = (call.scale - fixed_scale).abs() <= SCALE_ROUNDING * fixed_scale;
    let has_same_mask = !call.causal || queries == keys;
    is_plain && has_fixed_scale && has_same_mask
}

/// Returns the attended values, `[rows, heads * d]` in the dtype of q. Fails, with cubek's reason, if the kernel does
/// not support these sizes or this device. Queries are padded with zeros, and the padded rows are dropped.
pub fn forward<R: Routine<Strategy = ()>>(
    [q, k, v]: [CubeTensor; 3],
    call: AttentionCall,
) -> Result<CubeTensor, String> {
    let ([queries, channels], dtype) = (q.shape().dims::<2>(), q.dtype);
    let rows = queries.next_multiple_of(QUERIES_PER_CUBE);
    // The causal mask is aligned at the last query and key, so both are padded; no real query attends to a padded key.
    let [k, v] = if call.causal { [k, v].map(|x| padded(x, 0, rows)) } else { [k, v] };
    let q = padded(q, 0, rows);
    let types = AttentionGlobalTypes {
        query: elem(&q),
        key: elem(&k),
        value: elem(&v),
        mask: u8::elem_type_native(),
        out: f32::elem_type_native(),
    };
    let out = empty(&q, [rows, channels]); // its dtype is f32
    let split_heads = |x: CubeTensor| {
        let x = Expression::<Cube>(x);
        let [rows, _] = x.dims::<2>();
        x.reshape([1, rows, call.heads, channels / call.heads]).swap(1, 2).0
    };
    let client = q.client.clone();
    let [q, k, v] = [q, k, v].map(split_heads);
    let no_mask = None;
    launch_attention::<R>(
        &client,
        q.binding(),
        k.binding(),
        v.binding(),
        no_mask,
        // The same memory with axes swapped: the kernel writes `[rows, heads * d]`.
        split_heads(out.clone()).binding(),
        &types,
        BlueprintStrategy::Inferred(()),
        AttentionOptions {
            causal: call.causal,
            accumulator_precision: AccumulatorPrecision::Strict(f32::elem_type_native()),
        },
    )
    .map_err(|error| format!("{error:?}").trim().to_string())?;
    Ok(Expression::<Cube>(out).narrow(0, 0..queries).cast(dtype).0)
}
