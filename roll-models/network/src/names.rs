//! Translates keys of Wan's networks between official names and the names of other libraries: diffusers
//! (`WanTransformer3DModel`, `AutoencoderKLWan`) and transformers (`UMT5EncoderModel`).
//!
//! Every table is a bijection on the keys of a whole model; the tests check both directions.

/// Pairs of patterns (official, other) for dotted keys. `#` matches a number, `*` as the last part matches any
/// remainder. The matches of one pattern are inserted into the other pattern, in their order.
type Table = &'static [(&'static str, &'static str)];

/// Names of the transformer: official, diffusers' `WanTransformer3DModel`.
const DIT: Table = &[
    ("patch_embedding.*", "patch_embedding.*"),
    ("text_embedding.0.*", "condition_embedder.text_embedder.linear_1.*"),
    ("text_embedding.2.*", "condition_embedder.text_embedder.linear_2.*"),
    ("time_embedding.0.*", "condition_embedder.time_embedder.linear_1.*"),
    ("time_embedding.2.*", "condition_embedder.time_embedder.linear_2.*"),
    ("time_projection.1.*", "condition_embedder.time_proj.*"),
    ("img_emb.proj.0.*", "condition_embedder.image_embedder.norm1.*"),
    ("img_emb.proj.1.*", "condition_embedder.image_embedder.ff.net.0.proj.*"),
    ("img_emb.proj.3.*", "condition_embedder.image_embedder.ff.net.2.*"),
    ("img_emb.proj.4.*", "condition_embedder.image_embedder.norm2.*"),
    ("img_emb.emb_pos", "condition_embedder.image_embedder.pos_embed"),
    ("head.modulation", "scale_shift_table"),
    ("head.head.*", "proj_out.*"),
    ("blocks.#.modulation", "blocks.#.scale_shift_table"),
    ("blocks.#.self_attn.q.*", "blocks.#.attn1.to_q.*"),
    ("blocks.#.self_attn.k.*", "blocks.#.attn1.to_k.*"),
    ("blocks.#.self_attn.v.*", "blocks.#.attn1.to_v.*"),
    ("blocks.#.self_attn.o.*", "blocks.#.attn1.to_out.0.*"),
    ("blocks.#.self_attn.norm_q.*", "blocks.#.attn1.norm_q.*"),
    ("blocks.#.self_attn.norm_k.*", "blocks.#.attn1.norm_k.*"),
    ("blocks.#.cross_attn.q.*", "blocks.#.attn2.to_q.*"),
    ("blocks.#.cross_attn.k.*", "blocks.#.attn2.to_k.*"),
    ("blocks.#.cross_attn.v.*", "blocks.#.attn2.to_v.*"),
    ("blocks.#.cross_attn.o.*", "blocks.#.attn2.to_out.0.*"),
    ("blocks.#.cross_attn.norm_q.*", "blocks.#.attn2.norm_q.*"),
    ("blocks.#.cross_attn.norm_k.*", "blocks.#.attn2.norm_k.*"),
    ("blocks.#.cross_attn.k_img.*", "blocks.#.attn2.add_k_proj.*"),
    ("blocks.#.cross_attn.v_img.*", "blocks.#.attn2.add_v_proj.*"),
    ("blocks.#.cross_attn.norm_k_img.*", "blocks.#.attn2.norm_added_k.*"),
    // diffusers numbers norms by the order of their use: the norm of cross-attention is its second, but the official
    // third.
    ("blocks.#.norm3.*", "blocks.#.norm2.*"),
    ("blocks.#.ffn.0.*", "blocks.#.ffn.net.0.proj.*"),
    ("blocks.#.ffn.2.*", "blocks.#.ffn.net.2.*"),
];

/// Names of the VAE: official, diffusers' `AutoencoderKLWan`; for the parts that both generations of the VAE share.
/// Names inside residual blocks are in [`RESIDUAL`].
const VAE: Table = &[
    ("conv1.*", "quant_conv.*"),
    ("conv2.*", "post_quant_conv.*"),
    ("encoder.conv1.*", "encoder.conv_in.*"),
    ("decoder.conv1.*", "decoder.conv_in.*"),
    ("encoder.head.0.*", "encoder.norm_out.*"),
    ("decoder.head.0.*", "decoder.norm_out.*"),
    ("encoder.head.2.*", "encoder.conv_out.*"),
    ("decoder.head.2.*", "decoder.conv_out.*"),
    ("encoder.middle.1.*", "encoder.mid_block.attentions.0.*"),
    ("decoder.middle.1.*", "decoder.mid_block.attentions.0.*"),
    ("encoder.middle.0.*", "encoder.mid_block.resnets.0.*"),
    ("decoder.middle.0.*", "decoder.mid_block.resnets.0.*"),
    ("encoder.middle.2.*", "encoder.mid_block.resnets.1.*"),
    ("decoder.middle.2.*", "decoder.mid_block.resnets.1.*"),
];

/// The down and up path of the Wan2.1 VAE. Official names are a flat list; diffusers uses the same list in the encoder
/// and groups the decoder into stages of three residual blocks and an upsampler.
const VAE_21: Table = &[
    ("encoder.downsamples.#.*", "encoder.down_blocks.#.*"),
    ("decoder.upsamples.0.*", "decoder.up_blocks.0.resnets.0.*"),
    ("decoder.upsamples.1.*", "decoder.up_blocks.0.resnets.1.*"),
    ("decoder.upsamples.2.*", "decoder.up_blocks.0.resnets.2.*"),
    ("decoder.upsamples.3.*", "decoder.up_blocks.0.upsamplers.0.*"),
    ("decoder.upsamples.4.*", "decoder.up_blocks.1.resnets.0.*"),
    ("decoder.upsamples.5.*", "decoder.up_blocks.1.resnets.1.*"),
    ("decoder.upsamples.6.*", "decoder.up_blocks.1.resnets.2.*"),
    ("decoder.upsamples.7.*", "decoder.up_blocks.1.upsamplers.0.*"),
    ("decoder.upsamples.8.*", "decoder.up_blocks.2.resnets.0.*"),
    ("decoder.upsamples.9.*", "decoder.up_blocks.2.resnets.1.*"),
    ("decoder.upsamples.10.*", "decoder.up_blocks.2.resnets.2.*"),
    ("decoder.upsamples.11.*", "decoder.up_blocks.2.upsamplers.0.*"),
    ("decoder.upsamples.12.*", "decoder.up_blocks.3.resnets.0.*"),
    ("decoder.upsamples.13.*", "decoder.up_blocks.3.resnets.1.*"),
    ("decoder.upsamples.14.*", "decoder.up_blocks.3.resnets.2.*"),
];

/// The down and up path of the Wan2.2 VAE, in nested stages. A stage has two residual blocks (three in the decoder),
/// followed by its resampler.
const VAE_22: Table = &[
    ("encoder.downsamples.#.downsamples.2.resample.*", "encoder.down_blocks.#.downsampler.resample.*"),
    ("encoder.downsamples.#.downsamples.2.time_conv.*", "encoder.down_blocks.#.downsampler.time_conv.*"),
    ("encoder.downsamples.#.downsamples.#.*", "encoder.down_blocks.#.resnets.#.*"),
    ("decoder.upsamples.#.upsamples.3.resample.*", "decoder.up_blocks.#.upsampler.resample.*"),
    ("decoder.upsamples.#.upsamples.3.time_conv.*", "decoder.up_blocks.#.upsampler.time_conv.*"),
    ("decoder.upsamples.#.upsamples.#.*", "decoder.up_blocks.#.resnets.#.*"),
];

/// Names inside a residual block of the VAE.
const RESIDUAL: Table = &[
    ("residual.0.gamma", "norm1.gamma"),
    ("residual.2.*", "conv1.*"),
    ("residual.3.gamma", "norm2.gamma"),
    ("residual.6.*", "conv2.*"),
    ("shortcut.*", "conv_shortcut.*"),
];

/// Names of the text encoder: official, transformers' `UMT5EncoderModel`.
const UMT5: Table = &[
    ("token_embedding.weight", "shared.weight"),
    ("norm.weight", "encoder.final_layer_norm.weight"),
    ("blocks.#.norm1.weight", "encoder.block.#.layer.0.layer_norm.weight"),
    ("blocks.#.attn.q.weight", "encoder.block.#.layer.0.SelfAttention.q.weight"),
    ("blocks.#.attn.k.weight", "encoder.block.#.layer.0.SelfAttention.k.weight"),
    ("blocks.#.attn.v.weight", "encoder.block.#.layer.0.SelfAttention.v.weight"),
    ("blocks.#.attn.o.weight", "encoder.block.#.layer.0.SelfAttention.o.weight"),
    ("blocks.#.pos_embedding.embedding.weight", "encoder.block.#.layer.0.SelfAttention.relative_attention_bias.weight"),
    ("blocks.#.norm2.weight", "encoder.block.#.layer.1.layer_norm.weight"),
    ("blocks.#.ffn.gate.0.weight", "encoder.block.#.layer.1.DenseReluDense.wi_0.weight"),
    ("blocks.#.ffn.fc1.weight", "encoder.block.#.layer.1.DenseReluDense.wi_1.weight"),
    ("blocks.#.ffn.fc2.weight", "encoder.block.#.layer.1.DenseReluDense.wo.weight"),
];

/// The direction of a translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the other library's names.
    ToOfficial,
    /// To the other library's names.
    FromOfficial,
}

/// Translates a transformer key to or from diffusers' `WanTransformer3DModel`; `None` for an unknown key.
pub fn dit(key: &str, direction: Direction) -> Option<String> {
    look_up(DIT, key, direction)
}

/// The layers of a transformer that have a weight, as pairs of patterns (official, diffusers). `#` matches a number.
pub fn dit_layers() -> impl Iterator<Item = (&'static str, &'static str)> {
    DIT.iter().filter_map(|(official, other)| Some((official.strip_suffix(".*")?, other.strip_suffix(".*")?)))
}

/// Translates a Wan2.1 VAE key to or from diffusers' `AutoencoderKLWan`; `None` for an unknown key.
pub fn vae_21(key: &str, direction: Direction) -> Option<String> {
    vae(VAE_21, key, direction)
}

/// Translates a Wan2.2 VAE key to or from diffusers' `AutoencoderKLWan` with `is_residual`; `None` for an unknown key.
pub fn vae_22(key: &str, direction: Direction) -> Option<String> {
    vae(VAE_22, key, direction)
}

/// Translates a text encoder key to or from transformers' `UMT5EncoderModel`; `None` for an unknown key. transformers'
/// second name of the embedding, `encoder.embed_tokens.weight`, is handled in `roll-wan`.
pub fn umt5(key: &str, direction: Direction) -> Option<String> {
    look_up(UMT5, key, direction)
}

/// Translates a VAE key. `path_table` is the table of the down and up path of one generation of the VAE.
fn vae(path_table: Table, key: &str, direction: Direction) -> Option<String> {
    /// Least number of parts in the path of a residual block, such as `encoder.middle.0`. Nearer to the root, the same
    /// names belong to other layers, such as `encoder.conv1`.
    const MIN_BLOCK_PARTS: usize = 3;
    // First the path of the block, then the name inside the block, if it is a residual block.
    let renamed = look_up(VAE, key, direction).or_else(|| look_up(path_table, key, direction))?;
    let parts: Vec<&str> = renamed.split('.').collect();
    for block_parts in MIN_BLOCK_PARTS..parts.len() {
        if let Some(inside) = look_up(RESIDUAL, &parts[block_parts..].join("."), direction) {
            return Some(format!("{}.{inside}", parts[..block_parts].join(".")));
        }
    }
    Some(renamed)
}

/// Translates by the first matching row of `table`.
fn look_up(table: Table, key: &str, direction: Direction) -> Option<String> {
    table.iter().find_map(|(official, other)| match direction {
        Direction::ToOfficial => substitute(other, official, key),
        Direction::FromOfficial => substitute(official, other, key),
    })
}

/// Rewrites `key` from the pattern `from` to the pattern `to`; `None` if `key` does not match `from`.
fn substitute(from: &str, to: &str, key: &str) -> Option<String> {
    let mut parts = key.split('.');
    // The matches of `#`, and the match of `*`.
    let mut numbers = Vec::new();
    let mut rest = None;
    for expected in from.split('.') {
        match expected {
            "*" => {
                let tail: Vec<&str> = parts.by_ref().collect();
                rest = Some(tail.join(".")).filter(|tail| !tail.is_empty());
                rest.as_ref()?;
            }
            "#" => numbers.push(parts.next().filter(|p| !p.is_empty() && p.bytes().all(|b| b.is_ascii_digit()))?),
            name => {
                parts.next().filter(|p| *p == name)?;
            }
        }
    }
    if parts.next().is_some() {
        return None;
    }
    let mut numbers = numbers.into_iter();
    let renamed: Option<Vec<&str>> = to
        .split('.')
        .map(|part| match part {
            "*" => rest.as_deref(),
            "#" => numbers.next(),
            name => Some(name),
        })
        .collect();
    Some(renamed?.join("."))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::BTreeSet;

    use super::*;

    /// Keys of the weights in a fixture.
    fn fixture_keys(case: &str, file: &str) -> Vec<String> {
        let path = format!("{}/../../tests/fixtures/{case}/tensors.json", env!("CARGO_MANIFEST_DIR"));
        let json: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        json[file]["tensors"].as_object().unwrap().keys().cloned().collect()
    }

    fn assert_bijection(keys: &[String], rename: fn(&str, Direction) -> Option<String>) -> BTreeSet<String> {
        let theirs: BTreeSet<String> = keys
            .iter()
            .map(|key| {
                let other = rename(key, Direction::FromOfficial).unwrap_or_else(|| panic!("{key} has no name"));
                let back = rename(&other, Direction::ToOfficial);
                assert_eq!(back.as_deref(), Some(key.as_str()), "by way of {other}");
                other
            })
            .collect();
        assert_eq!(theirs.len(), keys.len());
        theirs
    }

    #[test]
    fn renaming_a_transformer_is_a_bijection() {
        for case in ["dit_tiny_i2v", "dit_tiny_t2v", "dit_tiny_ti2v5b"] {
            let theirs = assert_bijection(&fixture_keys(case, "weights.safetensors"), dit);
            assert!(theirs.contains("blocks.1.attn2.to_out.0.bias") && theirs.contains("blocks.0.norm2.weight"));
        }
        let clip_branch = [
            "img_emb.proj.0.weight",
            "img_emb.proj.1.bias",
            "img_emb.proj.3.weight",
            "img_emb.proj.4.bias",
            "img_emb.emb_pos",
            "blocks.3.cross_attn.k_img.weight",
            "blocks.3.cross_attn.v_img.bias",
            "blocks.3.cross_attn.norm_k_img.weight",
        ];
        assert_bijection(&clip_branch.map(String::from), dit);
    }

    #[test]
    fn renaming_a_vae_is_a_bijection() {
        let old = assert_bijection(&fixture_keys("vae21_tiny", "weights.safetensors"), vae_21);
        for key in [
            "encoder.down_blocks.3.conv_shortcut.weight",
            "encoder.down_blocks.2.resample.1.weight",
            "encoder.mid_block.resnets.1.conv2.bias",
            "decoder.mid_block.attentions.0.to_qkv.weight",
            "decoder.up_blocks.1.resnets.0.conv_shortcut.bias",
            "decoder.up_blocks.0.upsamplers.0.time_conv.weight",
            "decoder.up_blocks.3.resnets.2.norm2.gamma",
            "decoder.norm_out.gamma",
            "post_quant_conv.weight",
        ] {
            assert!(old.contains(key), "{key}");
        }
        let new = assert_bijection(&fixture_keys("vae22_tiny", "weights.safetensors"), vae_22);
        for key in [
            "encoder.down_blocks.1.resnets.0.conv_shortcut.weight",
            "encoder.down_blocks.1.downsampler.time_conv.bias",
            "encoder.down_blocks.3.resnets.1.conv1.weight",
            "decoder.up_blocks.0.upsampler.resample.1.weight",
            "decoder.up_blocks.3.resnets.2.norm1.gamma",
        ] {
            assert!(new.contains(key), "{key}");
        }
        assert!(!old.iter().chain(&new).any(|k| k.contains("residual") || k.contains("samples")));
    }

    #[test]
    fn renaming_a_text_encoder_yields_the_names_of_transformers() {
        let theirs = assert_bijection(&fixture_keys("umt5_tiny", "weights.safetensors"), umt5);
        let mut expected: BTreeSet<String> = fixture_keys("umt5_tiny", "weights_hf.safetensors").into_iter().collect();
        expected.remove("encoder.embed_tokens.weight");
        assert_eq!(theirs, expected);
    }

    #[test]
    fn unknown_keys_have_no_name() {
        assert_eq!(dit("blocks.x.modulation", Direction::FromOfficial), None);
        assert_eq!(dit("blocks.0.modulation.more", Direction::FromOfficial), None);
        assert_eq!(dit("patch_embedding", Direction::ToOfficial), None);
        assert_eq!(umt5("blocks.0.attn.q.bias", Direction::FromOfficial), None);
    }
}
