//! Names of layers: the official ones, those of diffusers, and both with underscores.

use crate::wan2_2::names::{self, Direction};

/// Whose layer names a file uses, where the convention leaves it open (PEFT).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Names {
    /// Those of the official repository, as `blocks.0.self_attn.q`.
    #[default]
    Official,
    /// Those of diffusers, as `blocks.0.attn1.to_q`.
    Diffusers,
}

/// The official name of a layer, whichever it is called by; an unknown layer keeps its name.
pub(super) fn official(layer: &str) -> String {
    renamed(layer, Direction::ToOfficial)
}

/// The official name of a parameter that is neither a weight nor a bias (`blocks.0.modulation`), likewise.
pub(super) fn parameter(key: &str) -> String {
    names::dit(key, Direction::ToOfficial).unwrap_or_else(|| key.to_string())
}

/// The name of a layer in diffusers; an unknown layer keeps its name.
pub(super) fn diffusers(layer: &str) -> String {
    renamed(layer, Direction::FromOfficial)
}

/// Whether the name is one of diffusers, and not also an official one.
pub(super) fn is_diffusers(layer: &str) -> bool {
    official(layer) != layer
}

/// The name with underscores in the place of dots.
pub(super) fn flat(layer: &str) -> String {
    layer.replace('.', "_")
}

/// The official name of a layer of Wan from its name with underscores. `None` when Wan has no such layer.
pub(super) fn unflatten(flat_name: &str) -> Option<String> {
    // Blocks with a modulation, which files change as a whole.
    let modulated = [("blocks.#", "blocks.#"), ("head", "head")];
    names::dit_layers().chain(modulated).find_map(|(official, other)| {
        [official, other].into_iter().find_map(|pattern| {
            let number = match_flat(pattern, flat_name)?;
            Some(official.replacen('#', number, 1))
        })
    })
}

/// The part of a name with underscores that the `#` of a dotted pattern stands for; empty when it has none.
fn match_flat<'a>(pattern: &str, name: &'a str) -> Option<&'a str> {
    let pattern = flat(pattern);
    let Some((head, tail)) = pattern.split_once('#') else { return (pattern == name).then_some("") };
    let number = name.strip_prefix(head)?.strip_suffix(tail)?;
    (!number.is_empty() && number.bytes().all(|b| b.is_ascii_digit())).then_some(number)
}

fn renamed(layer: &str, direction: Direction) -> String {
    names::dit(&format!("{layer}.weight"), direction)
        .and_then(|name| name.strip_suffix(".weight").map(str::to_string))
        .unwrap_or_else(|| layer.to_string())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn underscores_are_undone_for_every_layer_of_wan() {
        for (official_name, other) in names::dit_layers() {
            for layer in [official_name, other].map(|n| n.replacen('#', "17", 1)) {
                assert_eq!(unflatten(&flat(&layer)).unwrap(), official(&layer), "{layer}");
            }
        }
        assert_eq!(unflatten("blocks_3_cross_attn_k_img").unwrap(), "blocks.3.cross_attn.k_img");
        assert_eq!(unflatten("blocks_x_cross_attn_k_img"), None);
        assert_eq!(unflatten("single_blocks_3_linear1"), None);
    }

    #[test]
    fn a_layer_that_wan_does_not_have_keeps_its_name() {
        assert_eq!(official("model.layers.3.self_attn.q_proj"), "model.layers.3.self_attn.q_proj");
        assert_eq!(official("blocks.3.attn2.to_out.0"), "blocks.3.cross_attn.o");
        assert!(is_diffusers("blocks.3.ffn.net.2") && !is_diffusers("blocks.3.ffn.2"));
    }
}
