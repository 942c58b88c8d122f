//! Names of layers: official names, diffusers names, and both with underscores instead of dots (*flat* names).

use crate::names::{self, Direction};

/// The naming scheme of a file's layers. The convention PEFT allows both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Names {
    /// Names of the official repository: `blocks.0.self_attn.q`.
    #[default]
    Official,
    /// Names of diffusers: `blocks.0.attn1.to_q`.
    Diffusers,
}

/// Returns the official name of a layer, from its official or diffusers name. An unknown name is returned unchanged.
pub(super) fn official(layer: &str) -> String {
    renamed(layer, Direction::ToOfficial)
}

/// Like [`official`], but also accepts a name with dots in place of underscores, as musubi-tuner's converter writes
/// them (`text.embedding.0`, `cross_attn.k.img`).
pub(super) fn official_of_dotted(layer: &str) -> String {
    let official = official(layer);
    if official != layer {
        return official;
    }
    unflatten(&flat(layer)).unwrap_or(official)
}

/// Returns the official name of a parameter that is neither a weight nor a bias (`blocks.0.modulation`). An unknown
/// name is returned unchanged.
pub(super) fn official_parameter(key: &str) -> String {
    names::dit(key, Direction::ToOfficial).unwrap_or_else(|| key.to_string())
}

/// Returns the diffusers name of a layer. An unknown name is returned unchanged.
pub(super) fn diffusers(layer: &str) -> String {
    renamed(layer, Direction::FromOfficial)
}

/// Whether the name is a diffusers name and not an official one.
pub(super) fn is_diffusers(layer: &str) -> bool {
    official(layer) != layer
}

/// Whether Wan has a layer of this name: official, of diffusers, or either with dots and underscores exchanged.
pub(super) fn is_known(layer: &str) -> bool {
    unflatten(&flat(layer)).is_some()
}

/// The end of an unknown name that is a layer in one of Wan's blocks: `blocks.0.self_attn.q` of
/// `foo.blocks.0.self_attn.q`.
pub(super) fn known_end(layer: &str) -> Option<&str> {
    if is_known(layer) {
        return None;
    }
    layer.match_indices(".blocks.").map(|(at, _)| &layer[at + 1..]).find(|end| is_known(end))
}

/// Whether the layer with this official name belongs to the branch for the image encoder, which only the transformer of
/// Wan2.1 I2V has.
pub(super) fn is_of_image_branch(layer: &str) -> bool {
    let in_block = |end: &str| match_flat(&format!("blocks.#.cross_attn.{end}"), &flat(layer)).is_some();
    layer == "img_emb" || layer.starts_with("img_emb.") || ["k_img", "v_img", "norm_k_img"].into_iter().any(in_block)
}

/// Modules that hold the blocks of the language model in a vision-language model, in present and in older versions of
/// transformers.
pub const NESTED_LANGUAGE_MODELS: [&str; 2] = ["model.language_model.", "language_model.model."];
/// The module that holds the blocks of a language model by itself. The files of some vision-language models keep it.
pub const LANGUAGE_MODEL: &str = "model.";

/// The names that other versions of a model give to `layer`, if it is a layer of a language model.
pub(super) fn language_names(layer: &str) -> impl Iterator<Item = String> {
    // The last module is the beginning of the first.
    let modules = || NESTED_LANGUAGE_MODELS.into_iter().chain([LANGUAGE_MODEL]);
    let rest = modules().find_map(|module| layer.strip_prefix(module));
    rest.into_iter().flat_map(move |rest| modules().map(move |module| format!("{module}{rest}")))
}

/// Replaces the dots of a name by underscores.
pub(super) fn flat(layer: &str) -> String {
    layer.replace('.', "_")
}

/// Returns the official name of a layer of Wan from its name with underscores; `None` if Wan has no such layer.
pub(super) fn unflatten(flat_name: &str) -> Option<String> {
    // A block and the head have a parameter of their own, `modulation`. Files may contain what is added to it
    // (`.diff_m`) under the name of the block or of the head, which are therefore layers here.
    let with_modulation = [("blocks.#", "blocks.#"), ("head", "head")];
    names::dit_layers().chain(with_modulation).find_map(|(official, other)| {
        [official, other].into_iter().find_map(|pattern| {
            let number = match_flat(pattern, flat_name)?;
            Some(official.replacen('#', number, 1))
        })
    })
}

/// Matches a name with underscores against a dotted pattern. Returns the digits that match `#`, an empty text if the
/// pattern has no `#`, and `None` if the name does not match.
fn match_flat<'a>(pattern: &str, name: &'a str) -> Option<&'a str> {
    let pattern = flat(pattern);
    let Some((head, tail)) = pattern.split_once('#') else { return (pattern == name).then_some("") };
    let number = name.strip_prefix(head)?.strip_suffix(tail)?;
    (!number.is_empty() && number.bytes().all(|b| b.is_ascii_digit())).then_some(number)
}

/// Translates the name of a layer by the name of its weight. An unknown name is returned unchanged.
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
    fn underscored_names_of_all_wan_layers_are_recovered() {
        for (official_name, other) in names::dit_layers() {
            for layer in [official_name, other].map(|n| n.replacen('#', "17", 1)) {
                assert_eq!(unflatten(&flat(&layer)).unwrap(), official(&layer), "{layer}");
            }
        }
        assert_eq!(unflatten("blocks_3_cross_attn_k_img").unwrap(), "blocks.3.cross_attn.k_img");
        assert_eq!(unflatten("blocks_x_cross_attn_k_img"), None);
        for (name, expected) in [
            ("text.embedding.0", "text_embedding.0"),
            ("time.projection.1", "time_projection.1"),
            ("blocks.3.cross.attn.k.img", "blocks.3.cross_attn.k_img"),
            ("blocks.3.attn1.to_q", "blocks.3.self_attn.q"),
            ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj"),
        ] {
            assert_eq!(official_of_dotted(name), expected);
        }
        assert_eq!(unflatten("single_blocks_3_linear1"), None);
    }

    #[test]
    fn unknown_layers_keep_their_names() {
        assert_eq!(official("model.layers.3.self_attn.q_proj"), "model.layers.3.self_attn.q_proj");
        assert_eq!(official("blocks.3.attn2.to_out.0"), "blocks.3.cross_attn.o");
        assert!(is_diffusers("blocks.3.ffn.net.2") && !is_diffusers("blocks.3.ffn.2"));
    }
}
