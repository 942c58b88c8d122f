//! The original names of FLUX (`ae.safetensors`) and diffusers' names of the same weights.

use std::collections::BTreeMap;

use roll_core::{Result, StateDict};

use super::block::BlockKind;
use super::config::VaeConfig;

/// Returns the weights by diffusers' names, given diffusers' or FLUX's. FLUX's matrices of attention are 1 x 1 kernels
/// and become matrices. Unknown names stay.
pub(super) fn to_diffusers(config: &VaeConfig, state: &StateDict) -> Result<StateDict> {
    let names = flux_names(config);
    let matrices: Vec<_> = config.weights().into_iter().filter(|(_, shape)| shape.len() == 2).collect();
    let renamed = state.iter().map(|(name, tensor)| {
        let own = name.strip_prefix("first_stage_model.").or(name.strip_prefix("vae.")).unwrap_or(name);
        let name = names.get(own).map_or(own, String::as_str);
        let is_kernel =
            |(matrix, shape): &&(String, Vec<usize>)| matrix == name && tensor.shape() == [shape[0], shape[1], 1, 1];
        let tensor = match matrices.iter().find(is_kernel) {
            Some((_, shape)) => tensor.reshape(shape.clone())?,
            None => tensor.clone(),
        };
        Ok((name.to_string(), tensor))
    });
    renamed.collect()
}

/// FLUX's name of each weight, mapped to diffusers'.
pub(super) fn flux_names(config: &VaeConfig) -> BTreeMap<String, String> {
    let stages = config.block_out_channels.len();
    let mut names = BTreeMap::new();
    for block in config.encoder_blocks().iter().chain(&config.decoder_blocks()) {
        let of_block = flux_block(&block.name, stages);
        for (name, _) in block.weights() {
            let part = &name[block.name.len()..];
            let part = match block.kind {
                BlockKind::Attention { .. } => part
                    .replace(".group_norm.", ".norm.")
                    .replace(".to_q.", ".q.")
                    .replace(".to_k.", ".k.")
                    .replace(".to_v.", ".v.")
                    .replace(".to_out.0.", ".proj_out."),
                BlockKind::Residual { .. } => part.replace(".conv_shortcut.", ".nin_shortcut."),
                BlockKind::Head { .. } => part.replace(".conv_norm_out.", ".norm_out."),
                _ => part.to_string(),
            };
            names.insert(format!("{of_block}{part}"), name);
        }
    }
    names
}

/// FLUX's name of a block. Its decoder numbers stages from the pixels inwards.
fn flux_block(name: &str, stages: usize) -> String {
    let parts: Vec<&str> = name.split('.').collect();
    match parts[..] {
        [network, "mid_block", "resnets", i] => {
            format!("{network}.mid.block_{}", if i == "0" { 1 } else { 2 })
        }
        [network, "mid_block", "attentions", _] => format!("{network}.mid.attn_1"),
        [network, "down_blocks", stage, "resnets", i] => format!("{network}.down.{stage}.block.{i}"),
        [network, "down_blocks", stage, "downsamplers", _] => format!("{network}.down.{stage}.downsample"),
        [network, "up_blocks", stage, kind, i] => {
            let stage = stages - 1 - stage.parse::<usize>().unwrap_or(0);
            match kind {
                "resnets" => format!("{network}.up.{stage}.block.{i}"),
                _ => format!("{network}.up.{stage}.upsample"),
            }
        }
        _ => name.to_string(),
    }
}
