//! Operators with fused forward and backward passes.
//!
//! The file `X.rs` of an operator family contains the public functions, the type of a call (an
//! `operator::Operator`: the forward pass on any backend, and the pullback for autodiff), and `XKernel`, the part that
//! a backend implements. The methods of `XKernel` have default implementations composed of primitive operations, so an
//! empty implementation is enough to add a backend. The table shows which backend has a kernel of its own:
//!
//! | `X`            | composed (default)        | flex                | libtorch                  | wgpu, cuda             |
//! |----------------|---------------------------|---------------------|---------------------------|------------------------|
//! | `activation`   | `activation`              | `flex/elementwise`  | `libtorch/elementwise`    | `cube/activation`      |
//! | `adam`         | `adam`                    | default             | `libtorch/elementwise`    | default                |
//! | `attention`    | `attention/tiled`         | `flex/attention`    | `libtorch/attention`      | `cube/attention`       |
//! | `blocks`       | `blocks`                  | `flex/quantised`    | default                   | default                |
//! | `channel_norm` | `channel_norm`            | `flex/norm`         | `libtorch/norm`           | `cube/channel_norm`    |
//! | `conv`         | `conv` (Burn's)           | `flex/conv`         | `libtorch/conv`           | `cube/conv`            |
//! | `conv2d`       | `conv2d` (Burn's)         | `flex/conv2d`       | default                   | default                |
//! | `decode`       | `decode`                  | `flex/decode`       | `libtorch/decode`: store  | default                |
//! | `fp8`          | `fp8`                     | default             | `libtorch/fp8`            | default                |
//! | `gate`         | `gate`                    | `flex/elementwise`  | `libtorch/elementwise`    | `cube/gate`            |
//! | `group_norm`   | `group_norm`              | `flex/norm`         | default                   | default                |
//! | `linear`       | `linear`                  | `flex/linear`       | `libtorch/linear`         | `cube/linear`, forward |
//! | `max_pool`     | `max_pool` (Burn's)       | `flex/max_pool`     | default                   | default                |
//! | `norm`         | `norm`                    | `flex/norm`         | `libtorch/norm`           | `cube/norm`            |
//! | `product`      | `product` (Burn's)        | default             | default                   | `cube/product`         |
//! | `rms_rope`     | `rms_rope`: norm, rope    | default             | `libtorch/norm`           | default                |
//! | `rope`         | `rope`                    | `flex/elementwise`  | `libtorch/elementwise`    | `cube/rope`            |
//! | `scaled`       | `scaled`                  | `flex/quantised`    | `libtorch/mod`            | default                |
//!
//! `all_to_all` and `cotangent` need no kernels. The files in `flex/` call the functions in `kernels/`, which compute
//! on slices without tensors. `operator` runs a call on the backend of its operands and records it for the backward
//! pass, and `expression` is the arithmetic on primitive tensors that composed kernels use.

// Some items are used by flex's own kernels only, which are not compiled with `portable-kernels`.
#![cfg_attr(any(feature = "portable-kernels", not(feature = "flex")), allow(dead_code, unused_imports))]

mod activation;
mod adam;
mod all_to_all;
mod attention;
mod blocks;
mod by_group;
mod channel_norm;
mod conv;
mod conv2d;
mod cotangent;
#[cfg(feature = "cube")]
mod cube;
mod decode;
mod expression;
#[cfg(all(feature = "flex", not(feature = "portable-kernels")))]
mod flex;
mod fp8;
mod fp8_products;
mod gate;
mod group_norm;
#[cfg(all(feature = "flex", not(feature = "portable-kernels")))]
mod kernels;
#[cfg(feature = "libtorch")]
mod libtorch;
mod linear;
mod max_pool;
mod norm;
mod operator;
mod product;
mod rms_rope;
mod rope;
mod scaled;
#[cfg(all(test, feature = "flex"))]
mod test_noise;
#[cfg(all(test, feature = "flex"))]
mod tests;

pub use activation::{gelu, gelu_tanh, silu};
pub use adam::adam;
pub use all_to_all::{AllToAll, Sharding, TokenRanks, all_to_all};
pub use attention::{AttentionOptions, KeptAttention, attention, attention_with};
pub use blocks::linear_blocks;
pub use channel_norm::{channel_norm, channel_norm_silu, channel_norm_silu_after, channel_norm_silu_pull};
pub use conv::{conv3d, conv3d_pull};
pub use conv2d::{Conv2d, Conv2dOptions, Epilogue};
pub use cotangent::seed;
pub use decode::{CachedSequence, CachedSequences, DecodeCall, TailPlaces, attend_rows, store_rows};
pub use fp8::linear_fp8;
pub use fp8_products::Fp8Products;
pub use gate::{gated_add, gated_add_groups};
pub use group_norm::{Groups, group_norm_silu, group_norm_silu_pull};
#[cfg(all(feature = "flex", not(feature = "portable-kernels")))]
pub(crate) use kernels::attention::exponentials;
pub use linear::{linear, linear_lora, linear_rows};
pub use max_pool::{MaxPoolWindow, max_pool};
pub use norm::{layer_norm, layer_norm_as, layer_norm_groups};
pub use product::product;
pub use rms_rope::{rms_norm, rms_rope};
pub use rope::rope;
pub use scaled::linear_scaled;

use activation::{Activation, ActivationKernel};
use adam::AdamKernel;
use attention::{AttentionCall, AttentionKernel, tiled};
use blocks::BlockKernel;
use channel_norm::ChannelNormKernel;
use conv::ConvKernel;
use conv2d::Conv2dKernel;
use decode::DecodeKernel;
use fp8::Fp8Kernel;
use gate::GateKernel;
use group_norm::GroupNormKernel;
use linear::{LinearKernel, Lora, SavedLinear};
use max_pool::MaxPoolKernel;
use norm::{NormKernel, SavedNorm, SharedShift};
use operator::{Cotangents, Primitives};
use product::ProductKernel;
use rms_rope::RmsRopeKernel;
use rope::{Direction, RopeKernel};
use scaled::ScaledKernel;

macro_rules! kernels {
    ($($kernel:ident),*) => {
        /// A backend that computes every operator.
        pub trait Kernels: Primitives $(+ $kernel)* {}

        // Flex uses the composed kernels instead of its own. This tests the composed kernels, which the other backends
        // use wherever they have no kernel of their own.
        $(#[cfg(feature = "portable-kernels")] impl $kernel for crate::backend::Flex {})*
    };
}

kernels! {
    ActivationKernel, AdamKernel, AttentionKernel, BlockKernel, ChannelNormKernel, Conv2dKernel, ConvKernel, DecodeKernel,
    Fp8Kernel, GateKernel, GroupNormKernel, LinearKernel, MaxPoolKernel, NormKernel, ProductKernel, RmsRopeKernel,
    RopeKernel, ScaledKernel
}

#[cfg(feature = "flex")]
impl Kernels for crate::backend::Flex {}
#[cfg(feature = "libtorch")]
impl Kernels for crate::backend::LibTorch {}
#[cfg(feature = "cube")]
impl Kernels for crate::backend::Cube {}
