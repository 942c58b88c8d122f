//! Makes flex use the composed kernels instead of its own, to test them: other backends use them wherever they have no
//! kernel of their own.

use burn::backend::Flex;

use super::{
    ActivationKernel, AdamKernel, AttentionKernel, BlockKernel, ChannelNormKernel, Conv2dKernel, ConvKernel,
    DecodeKernel, GateKernel, LinearKernel, MaxPoolKernel, NormKernel, ProductKernel, RmsRopeKernel, RopeKernel,
    ScaledKernel,
};

impl ActivationKernel for Flex {}
impl AdamKernel for Flex {}
impl AttentionKernel for Flex {}
impl BlockKernel for Flex {}
impl ChannelNormKernel for Flex {}
impl Conv2dKernel for Flex {}
impl ConvKernel for Flex {}
impl DecodeKernel for Flex {}
impl GateKernel for Flex {}
impl LinearKernel for Flex {}
impl MaxPoolKernel for Flex {}
impl NormKernel for Flex {}
impl ProductKernel for Flex {}
impl RmsRopeKernel for Flex {}
impl RopeKernel for Flex {}
impl ScaledKernel for Flex {}
