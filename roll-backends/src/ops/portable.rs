//! Flex with the default kernels instead of its own, to test them: other backends use a default kernel where they have no
//! better one.

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
