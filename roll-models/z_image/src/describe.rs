//! Describes weight files for `roll inspect`: the transformer and the autoencoder, by the names of every program.

use roll_network::known::{KnownNetworks, NetworkFacts};
use roll_network::weights::Checkpoint;

use crate::dit::PATCH_EMBEDDING;
use crate::keys;
use crate::transformer_file::TransformerFile;

roll_core::inventory::submit! {
    KnownNetworks { describe: |weights| transformer(weights).or_else(|| autoencoder(weights)) }
}

/// A weight of the decoder's attention by diffusers' names, and by FLUX's.
const AUTOENCODERS: [(&str, &str); 2] =
    [("diffusers", "decoder.mid_block.attentions.0.to_q.weight"), ("FLUX", "decoder.mid.attn_1.q.weight")];

/// Whether the weights are those of a transformer, under the names of the checkpoint or of a single file.
pub fn is_transformer(weights: &Checkpoint) -> bool {
    let name = format!("{PATCH_EMBEDDING}.weight");
    let is_it = |key: &str| keys::parts(key).iter().any(|part| part.name == name);
    // Other networks have an `x_embedder`, too.
    weights.keys().any(is_it) && weights.keys().any(|key| key.ends_with("cap_pad_token"))
}

fn transformer(weights: &Checkpoint) -> Option<NetworkFacts> {
    if !is_transformer(weights) {
        return None;
    }
    let config = TransformerFile::new(weights.clone()).and_then(|file| file.config());
    let what = "Z-Image transformer";
    Some(match config {
        Ok(config) => {
            let is_published = weights.contains(&format!("{PATCH_EMBEDDING}.weight"));
            let names = if is_published { "diffusers" } else { "ComfyUI's single file" };
            let blocks = format!(
                "{} of width {}, {} heads, feed-forward {}; {} noise refiners, {} context refiners",
                config.layers, config.dim, config.heads, config.ffn_dim, config.noise_refiners, config.context_refiners
            );
            let [channels, text] = [config.channels, config.text_dim].map(|n| n.to_string());
            NetworkFacts::new(
                what,
                [("names", names.into()), ("blocks", blocks), ("channels", channels), ("text width", text)],
            )
        }
        Err(error) => NetworkFacts::new(what, [("not usable here", error.chain())]),
    })
}

fn autoencoder(weights: &Checkpoint) -> Option<NetworkFacts> {
    let has = |sample: &str| weights.keys().any(|key| key.ends_with(sample));
    let (names, _) = AUTOENCODERS.into_iter().find(|(_, sample)| has(sample))?;
    let key = weights.keys().find(|key| key.ends_with("decoder.conv_in.weight"))?;
    let &[width, channels, _, _] = weights.info(key)?.shape.as_slice() else { return None };
    let latents = format!("{channels}, at the decoder's width of {width}");
    let what = "KL autoencoder of pictures (Z-Image, FLUX)";
    Some(NetworkFacts::new(what, [("names", names.into()), ("channels", latents)]))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::init_tiny::init_tiny;

    #[test]
    fn the_networks_of_a_directory_are_described() {
        let dir = tempfile::tempdir().unwrap();
        init_tiny(dir.path(), 0).unwrap();
        let open = |folder: &str| Checkpoint::open_any(dir.path().join(folder)).unwrap();
        let describe = |weights: Checkpoint| roll_network::known::describe(&weights).unwrap();
        let published = describe(open("transformer"));
        assert_eq!(published.what, "Z-Image transformer");
        let single = open("transformer").rename(|key| Some(key.replace("all_x_embedder.2-1", "x_embedder"))).unwrap();
        let single = describe(single);
        assert_eq!(single.details[1..], published.details[1..]);
        assert_ne!(single.details[0], published.details[0]);
        assert!(describe(open("vae")).what.contains("autoencoder"));
        assert!(describe(open("text_encoder")).what.contains("language model"));
        let damaged = open("transformer").rename(|key| (!key.contains("w1")).then(|| key.into())).unwrap();
        assert!(describe(damaged).details[0].1.contains("feed_forward.w1"));
    }
}
