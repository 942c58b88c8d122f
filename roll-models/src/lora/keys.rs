//! Parses one key of a LoRA file.

use std::path::Path;

use super::error::LoraError;
use super::layer_names;
use super::{Convention, Expert};

/// Key of the header under which conventions without a tensor for alpha store the alphas.
pub(super) const ALPHAS_KEY: &str = "lora_alphas";

/// The tensor of a layer that a key names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Down,
    Up,
    UpBias,
    Alpha,
    Difference,
    DifferenceOfBias,
    DifferenceOfModulation,
    /// `B` without its scale; see the documentation of the module [`super`].
    UnscaledUp,
}

impl Part {
    pub fn name(self) -> &'static str {
        match self {
            Self::Down => "matrix A (lora_A, lora_down)",
            Self::Up => "matrix B (lora_B, lora_up)",
            Self::UpBias => "bias",
            Self::Alpha => "alpha",
            Self::Difference => "difference",
            Self::DifferenceOfBias => "difference of the bias",
            Self::DifferenceOfModulation => "difference of the modulation",
            Self::UnscaledUp => "unscaled matrix B",
        }
    }
}

/// The parts of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Key<'a> {
    /// The convention. `None` if the key fits several: without prefix and without the name of an adapter.
    pub convention: Option<Convention>,
    pub expert: Option<Expert>,
    /// The layer's name in the file.
    pub layer: &'a str,
    pub part: Part,
    /// Name of the adapter (`default`), if the key has one.
    pub adapter: Option<&'a str>,
}

/// The suffix of an unscaled `B`. Readers of DiffSynth files search for `.lora_B.` and `.lora_A.` only, so they ignore
/// it.
pub(super) const UNSCALED: &str = ".unscaled_B.default.weight";

const PREFIXES: &[(&str, Convention, Option<Expert>)] = &[
    ("base_model.model.", Convention::Peft, None),
    ("model.diffusion_model.", Convention::ComfyUi, None),
    // ai-toolkit's files of both experts.
    ("diffusion_model.transformer_1.", Convention::ComfyUi, Some(Expert::High)),
    ("diffusion_model.transformer_2.", Convention::ComfyUi, Some(Expert::Low)),
    ("diffusion_model.", Convention::ComfyUi, None),
    ("transformer_2.", Convention::Diffusers, Some(Expert::Low)),
    ("transformer.", Convention::Diffusers, None),
    ("pipe.dit2.", Convention::DiffSynth, Some(Expert::Low)),
    ("pipe.dit.", Convention::DiffSynth, None),
    // VideoX-Fun's.
    ("lora_unet__", Convention::Kohya, None),
    ("lora_unet_", Convention::Kohya, None),
];

/// What wrappers put before a name: `torch.compile`, `DistributedDataParallel`, PEFT within another prefix.
const WRAPPERS: &[&str] = &["_orig_mod.", "module.", "base_model.model."];

/// The name without wrappers before it.
fn unwrapped(name: &str) -> &str {
    match WRAPPERS.iter().find_map(|wrapper| name.strip_prefix(wrapper)) {
        Some(rest) => unwrapped(rest),
        None => name,
    }
}

/// Infixes of the two matrices in every spelling.
const MATRICES: &[(&str, Part)] = &[
    (".lora_A.", Part::Down),
    (".lora_B.", Part::Up),
    (".lora_down.", Part::Down),
    (".lora_up.", Part::Up),
    (".lora.down.", Part::Down),
    (".lora.up.", Part::Up),
    (".lora_linear_layer.down.", Part::Down),
    (".lora_linear_layer.up.", Part::Up),
];

const OTHER_KINDS: &[(&str, &str)] = &[
    ("dora_scale", "a DoRA"),
    ("lora_magnitude_vector", "a DoRA"),
    (".lora_mid.", "a LoCon with a third matrix"),
    (".hada_", "a LoHa"),
    (".lokr_", "a LoKr"),
    (".oft_", "an OFT"),
    (".lora_embedding_", "a LoRA of an embedding"),
];

/// Whether the key looks like a key of a LoRA or a related adapter, of any program.
pub fn is_lora_key(key: &str) -> bool {
    key.starts_with("lora_unet_")
        || MATRICES.iter().any(|(infix, _)| key.contains(infix))
        || OTHER_KINDS.iter().any(|(mark, _)| key.contains(mark))
}

/// Parses a key. `path` is for error messages.
pub(super) fn parse<'a>(path: &Path, key: &'a str) -> Result<Key<'a>, LoraError> {
    if let Some((_, kind)) = OTHER_KINDS.iter().find(|(mark, _)| key.contains(mark)) {
        let problem = format!("`{key}` belongs to {kind}; expected a plain LoRA of two matrices a layer");
        return Err(LoraError::invalid(path, problem));
    }
    let unknown = || {
        LoraError::invalid(
            path,
            format!(
                "`{key}` is not a tensor of a LoRA: expected a name that ends in .lora_A.weight, .lora_B.weight, \
                 .lora_down.weight, .lora_up.weight, .alpha, .diff, .diff_b or .diff_m"
            ),
        )
    };
    let prefixed = |name: &'a str| {
        PREFIXES.iter().find_map(|(prefix, convention, expert)| {
            Some((Some(*convention), *expert, unwrapped(name.strip_prefix(prefix)?)))
        })
    };
    let (convention, expert, rest) =
        prefixed(key).or_else(|| prefixed(unwrapped(key))).unwrap_or_else(|| (None, None, unwrapped(key)));
    let (layer, part, adapter) = split(rest).ok_or_else(unknown)?;
    if layer.is_empty() || (convention == Some(Convention::Kohya) && layer.contains('.')) {
        return Err(unknown());
    }
    let convention = match (convention, adapter) {
        (Some(convention), _) => Some(convention),
        _ if layer_names::is_diffusers(layer) => Some(Convention::Diffusers),
        (None, Some(_)) => Some(Convention::DiffSynth),
        (None, None) => None,
    };
    Ok(Key { convention, expert, layer, part, adapter })
}

fn split(rest: &str) -> Option<(&str, Part, Option<&str>)> {
    for (infix, part) in MATRICES {
        let Some((layer, tail)) = rest.rsplit_once(infix) else { continue };
        let (adapter, last) = match tail.rsplit_once('.') {
            Some((adapter, last)) => (Some(adapter), last),
            None => (None, tail),
        };
        return match (part, last) {
            (part, "weight") => Some((layer, *part, adapter)),
            (Part::Up, "bias") => Some((layer, Part::UpBias, adapter)),
            _ => None,
        };
    }
    let suffixes = [
        (UNSCALED, Part::UnscaledUp),
        (".alpha", Part::Alpha),
        (".diff", Part::Difference),
        (".diff_b", Part::DifferenceOfBias),
        (".diff_m", Part::DifferenceOfModulation),
    ];
    suffixes.iter().find_map(|(suffix, part)| Some((rest.strip_suffix(suffix)?, *part, None)))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn read(key: &str) -> Key<'_> {
        parse(Path::new("x"), key).unwrap()
    }

    #[test]
    fn keys_split_into_prefix_layer_and_part() {
        let key = read("base_model.model.blocks.0.self_attn.q.lora_A.default.weight");
        assert_eq!(key.convention, Some(Convention::Peft));
        assert_eq!((key.layer, key.part, key.adapter), ("blocks.0.self_attn.q", Part::Down, Some("default")));
        let key = read("transformer_2.blocks.0.attn1.to_q.lora_B.bias");
        assert_eq!(
            (key.convention, key.expert, key.part),
            (Some(Convention::Diffusers), Some(Expert::Low), Part::UpBias)
        );
        let key = read("lora_unet_blocks_0_ffn_2.alpha");
        assert_eq!((key.convention, key.layer, key.part), (Some(Convention::Kohya), "blocks_0_ffn_2", Part::Alpha));
        assert_eq!(read("diffusion_model.blocks.0.norm3.diff_b").part, Part::DifferenceOfBias);
        assert_eq!(read("blocks.0.ffn.0.lora_B.default.weight").convention, Some(Convention::DiffSynth));
        assert_eq!(read("blocks.0.ffn.0.lora_B.weight").convention, None);
        assert_eq!(read("blocks.0.attn2.to_k.lora_B.weight").convention, Some(Convention::Diffusers));
    }

    #[test]
    fn prefixes_of_other_trainers_and_wrappers_are_no_part_of_the_layer() {
        let layer = "blocks.0.self_attn.q";
        for (prefix, convention, expert) in [
            ("diffusion_model.transformer_1.", Some(Convention::ComfyUi), Some(Expert::High)),
            ("diffusion_model.transformer_2.", Some(Convention::ComfyUi), Some(Expert::Low)),
            ("diffusion_model._orig_mod.", Some(Convention::ComfyUi), None),
            ("_orig_mod.diffusion_model.", Some(Convention::ComfyUi), None),
            ("module.", None, None),
            ("module._orig_mod.", None, None),
            ("base_model.model._orig_mod.", Some(Convention::Peft), None),
            ("transformer.base_model.model.", Some(Convention::Diffusers), None),
        ] {
            let key = format!("{prefix}{layer}.lora_A.weight");
            let read = read(&key);
            assert_eq!((read.convention, read.expert, read.layer), (convention, expert, layer), "{key}");
        }
        let fun = read("lora_unet__blocks_0_self_attn_q.lora_down.weight");
        assert_eq!((fun.convention, fun.layer), (Some(Convention::Kohya), "blocks_0_self_attn_q"));
    }

    #[test]
    fn errors_name_keys_that_are_not_of_a_lora() {
        let error = |key: &str| parse(Path::new("x.safetensors"), key).unwrap_err().to_string();
        assert!(error("blocks.0.ffn.0.weight").contains("blocks.0.ffn.0.weight"));
        assert!(error("diffusion_model.blocks.0.ffn.0.dora_scale").contains("DoRA"));
        assert!(error("lora_unet_a.hada_w1_a").contains("LoHa"));
        assert!(error(".lora_A.weight").contains("expected"));
        assert!(error("blocks.0.lora_A.default.scale").contains("expected"));
        assert!(error("blocks.0.lora_A.bias").contains("expected"));
        assert!(error("lora_unet_a.b.lora_up.weight").contains("expected"));
        assert!(!is_lora_key("blocks.0.ffn.0.weight") && is_lora_key("lora_unet_a.alpha"));
    }
}
