//! Parses one key (name of a tensor) of a LoRA file: convention, transformer, layer, and which tensor of the layer it
//! is.

use std::borrow::Cow;
use std::path::Path;

use super::error::LoraError;
use super::layer_names;
use super::{Convention, Expert};

/// Key of the header under which conventions without a tensor for alpha store the alphas.
pub(super) const ALPHAS_KEY: &str = "lora_alphas";

/// The tensor of a layer that a key names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// Matrix A.
    Down,
    /// Matrix B.
    Up,
    UpBias,
    Alpha,
    /// Difference of the whole weight.
    Difference,
    DifferenceOfBias,
    DifferenceOfModulation,
    /// `B` without its scale; see the documentation of the module [`super`].
    UnscaledUp,
}

impl Part {
    /// The name in error messages.
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
    /// The convention. `None` if the key fits several conventions, because it has neither a prefix nor the name of an
    /// adapter.
    pub convention: Option<Convention>,
    pub expert: Option<Expert>,
    /// The layer's name in the file.
    pub layer: Cow<'a, str>,
    pub part: Part,
    /// Name of the adapter (`default`), if the key has one.
    pub adapter: Option<&'a str>,
}

/// The suffix of an unscaled `B`. Readers of DiffSynth files search for `.lora_B.` and `.lora_A.` only, so they ignore
/// such a tensor.
pub(super) const UNSCALED: &str = ".unscaled_B.default.weight";

/// Prefixes of a layer's name, each with its convention and the transformer that it names.
const PREFIXES: &[(&str, Convention, Option<Expert>)] = &[
    (PEFT, Convention::Peft, None),
    ("model.diffusion_model.", Convention::ComfyUi, None),
    ("diffusion_model.", Convention::ComfyUi, None),
    // In ai-toolkit's files with both experts, `transformer_1.` and `transformer_2.` follow `diffusion_model.`.
    ("transformer_1.", Convention::Diffusers, Some(Expert::High)),
    ("transformer_2.", Convention::Diffusers, Some(Expert::Low)),
    ("transformer.", Convention::Diffusers, None),
    ("pipe.dit2.", Convention::DiffSynth, Some(Expert::Low)),
    ("pipe.dit.", Convention::DiffSynth, None),
    (KOHYA, Convention::Kohya, None),
];

/// PEFT's prefix. Behind another prefix it is a wrapper.
pub(super) const PEFT: &str = "base_model.model.";
/// kohya's prefix. VideoX-Fun has one underscore more.
const KOHYA: &str = "lora_unet_";

/// Modules that `torch.compile`, FSDP and gradient checkpointing put around the model or around its blocks.
const WRAPPERS: &[&str] = &["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"];

/// The module that `DistributedDataParallel` puts around a model.
const PARALLEL: &str = "module.";

/// A layer's name without prefixes and wrappers.
struct BareLayer<'a> {
    convention: Option<Convention>,
    expert: Option<Expert>,
    layer: Cow<'a, str>,
}

impl<'a> BareLayer<'a> {
    /// Removes prefixes and wrappers from `name`, in any order. A second prefix is removed only if the rest is a layer
    /// of Wan: `base_model.model.transformer.h.0` of a language model is its layer `transformer.h.0`. Returns `None` if
    /// two prefixes name different experts.
    fn of(name: &'a str) -> Option<Self> {
        let mut bare = Self { convention: None, expert: None, layer: without_wrappers(name) };
        // `bare.layer` before the removal of the first prefix that may be part of the layer's name.
        let mut before_uncertain_prefix: Option<Cow<'a, str>> = None;
        loop {
            if let Some(rest) = without_prefix(&bare.layer, PARALLEL) {
                bare.layer = rest;
                continue;
            }
            let found = PREFIXES.iter().find_map(|(prefix, convention, expert)| {
                Some((*prefix, *convention, *expert, without_prefix(&bare.layer, prefix)?))
            });
            let Some((prefix, convention, expert, rest)) = found else { break };
            // A second prefix that names an expert, or PEFT's, is never the beginning of a layer's name.
            let may_be_part_of_layer = bare.convention.is_some() && expert.is_none() && prefix != PEFT;
            if may_be_part_of_layer {
                before_uncertain_prefix.get_or_insert(bare.layer);
            }
            if matches!((bare.expert, expert), (Some(first), Some(second)) if first != second) {
                return None;
            }
            bare =
                Self { convention: bare.convention.or(Some(convention)), expert: bare.expert.or(expert), layer: rest };
            if prefix == KOHYA {
                bare.layer = flat_layer(bare.layer);
                break;
            }
        }
        if let Some(layer) = before_uncertain_prefix
            && !layer_names::is_known(&bare.layer)
        {
            bare.layer = layer;
        }
        Some(bare)
    }
}

/// The name without `prefix`; `None` if it does not begin with `prefix`.
fn without_prefix<'a>(name: &Cow<'a, str>, prefix: &str) -> Option<Cow<'a, str>> {
    match name {
        Cow::Borrowed(name) => name.strip_prefix(prefix).map(Cow::Borrowed),
        Cow::Owned(name) => name.strip_prefix(prefix).map(|rest| Cow::Owned(rest.into())),
    }
}

/// The name without [`WRAPPERS`], wherever they are.
fn without_wrappers(name: &str) -> Cow<'_, str> {
    if !name.split('.').any(|part| WRAPPERS.contains(&part)) {
        return name.into();
    }
    name.split('.').filter(|part| !WRAPPERS.contains(part)).collect::<Vec<_>>().join(".").into()
}

/// Removes prefixes and wrappers from the name of a layer in kohya's convention, where their dots are underscores, too.
/// Returns the name unchanged if the rest is not a layer of Wan.
fn flat_layer(name: Cow<'_, str>) -> Cow<'_, str> {
    if layer_names::unflatten(&name).is_some() {
        return name;
    }
    // The underscore lets a wrapper at the beginning of the name match, too.
    let mut unwrapped = format!("_{name}");
    for wrapper in WRAPPERS {
        unwrapped = unwrapped.replace(&format!("_{wrapper}_"), "_");
    }
    let mut rest = unwrapped.trim_start_matches('_');
    let without_expert = PREFIXES.iter().filter(|(.., expert)| expert.is_none()).map(|(prefix, ..)| *prefix);
    let flat_prefixes: Vec<String> = without_expert.chain([PARALLEL]).map(|prefix| prefix.replace('.', "_")).collect();
    let leading_prefix_length =
        |rest: &str| flat_prefixes.iter().find(|prefix| rest.starts_with(prefix.as_str())).map(|prefix| prefix.len());
    while let Some(prefix_length) = leading_prefix_length(rest) {
        rest = rest[prefix_length..].trim_start_matches('_');
    }
    match layer_names::unflatten(rest) {
        Some(_) => rest.to_string().into(),
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

/// Parts of keys that belong to other kinds of adapters, with the kind.
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
    key.starts_with(KOHYA)
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
    let (name, part, adapter) = split(key).ok_or_else(unknown)?;
    let Some(BareLayer { convention, expert, layer }) = BareLayer::of(name) else {
        return Err(LoraError::invalid(path, format!("`{key}` names both experts: expected one prefix of them")));
    };
    if layer.is_empty() || (convention == Some(Convention::Kohya) && layer.contains('.')) {
        return Err(unknown());
    }
    if let Some(known) = layer_names::known_end(&layer) {
        let before = layer.strip_suffix(known).unwrap_or_default();
        let problem = format!(
            "`{key}` is not a layer of Wan: expected `{known}`, found the unknown prefix `{before}` before it; rename the \
             tensors without it"
        );
        return Err(LoraError::invalid(path, problem));
    }
    let convention = match (convention, adapter) {
        // The prefix decides.
        (Some(convention), _) => Some(convention),
        // The name of the layer decides.
        (None, _) if layer_names::is_diffusers(&layer) => Some(Convention::Diffusers),
        // The presence of an adapter's name decides.
        (None, Some(_)) => Some(Convention::DiffSynth),
        (None, None) => None,
    };
    Ok(Key { convention, expert, layer, part, adapter })
}

/// Splits a key into the layer's name (with prefixes), the part, and the name of the adapter, if there is one. `None`
/// if the key is not one of a LoRA.
fn split(key: &str) -> Option<(&str, Part, Option<&str>)> {
    for (infix, part) in MATRICES {
        let Some((layer, tail)) = key.rsplit_once(infix) else { continue };
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
    suffixes.iter().find_map(|(suffix, part)| Some((key.strip_suffix(suffix)?, *part, None)))
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
        assert_eq!((&*key.layer, key.part, key.adapter), ("blocks.0.self_attn.q", Part::Down, Some("default")));
        let key = read("transformer_2.blocks.0.attn1.to_q.lora_B.bias");
        assert_eq!(
            (key.convention, key.expert, key.part),
            (Some(Convention::Diffusers), Some(Expert::Low), Part::UpBias)
        );
        let key = read("lora_unet_blocks_0_ffn_2.alpha");
        assert_eq!((key.convention, &*key.layer, key.part), (Some(Convention::Kohya), "blocks_0_ffn_2", Part::Alpha));
        assert_eq!(read("diffusion_model.blocks.0.norm3.diff_b").part, Part::DifferenceOfBias);
        assert_eq!(read("blocks.0.ffn.0.lora_B.default.weight").convention, Some(Convention::DiffSynth));
        assert_eq!(read("blocks.0.ffn.0.lora_B.weight").convention, None);
        assert_eq!(read("blocks.0.attn2.to_k.lora_B.weight").convention, Some(Convention::Diffusers));
    }

    #[test]
    fn prefixes_and_wrappers_in_any_order_are_no_part_of_the_layer() {
        let (high, low) = (Some(Expert::High), Some(Expert::Low));
        for (name, convention, expert) in [
            ("diffusion_model.transformer_1.#", Some(Convention::ComfyUi), high),
            ("diffusion_model.transformer_2.#", Some(Convention::ComfyUi), low),
            ("diffusion_model._orig_mod.transformer_1.#", Some(Convention::ComfyUi), high),
            ("module._orig_mod.diffusion_model.module.transformer_2._orig_mod.#", Some(Convention::ComfyUi), low),
            ("transformer_2.base_model.model._fsdp_wrapped_module.#", Some(Convention::Diffusers), low),
            ("transformer_1.#", Some(Convention::Diffusers), high),
            ("pipe.dit2._orig_mod.#", Some(Convention::DiffSynth), low),
            ("diffusion_model._orig_mod.#", Some(Convention::ComfyUi), None),
            ("_orig_mod.diffusion_model.#", Some(Convention::ComfyUi), None),
            ("module.#", None, None),
            ("module._orig_mod.#", None, None),
            ("_checkpoint_wrapped_module.#", None, None),
            ("base_model.model._orig_mod.#", Some(Convention::Peft), None),
            ("module.base_model.model.#", Some(Convention::Peft), None),
            ("base_model.model.diffusion_model.#", Some(Convention::Peft), None),
            ("base_model.model.base_model.model.#", Some(Convention::Peft), None),
            ("transformer.base_model.model.#", Some(Convention::Diffusers), None),
            ("model.diffusion_model._orig_mod.module.#", Some(Convention::ComfyUi), None),
        ] {
            let key = format!("{}.lora_A.weight", name.replace('#', "blocks.0.self_attn.q"));
            let read = read(&key);
            assert_eq!(
                (read.convention, read.expert, &*read.layer),
                (convention, expert, "blocks.0.self_attn.q"),
                "{key}"
            );
        }
        for name in
            ["blocks.0._orig_mod.self_attn.q", "blocks.0._checkpoint_wrapped_module._fsdp_wrapped_module.self_attn.q"]
        {
            assert_eq!(read(&format!("diffusion_model.{name}.lora_A.weight")).layer, "blocks.0.self_attn.q");
        }
        for name in [
            "_blocks_0_self_attn_q",
            "_orig_mod_blocks_0_self_attn_q",
            "__orig_mod_blocks_0_self_attn_q",
            "blocks_0__orig_mod_self_attn_q",
            "blocks_0__checkpoint_wrapped_module_self_attn_q",
            "diffusion_model_blocks_0_self_attn_q",
            "module__orig_mod_base_model_model_blocks_0_self_attn_q",
        ] {
            let key = format!("lora_unet_{name}.lora_down.weight");
            let read = read(&key);
            assert_eq!((read.convention, &*read.layer), (Some(Convention::Kohya), "blocks_0_self_attn_q"), "{key}");
        }
    }

    #[test]
    fn layers_of_other_networks_keep_what_may_be_a_part_of_their_names() {
        for (name, layer) in [
            ("base_model.model.transformer.h.0.attn.c_attn", "transformer.h.0.attn.c_attn"),
            ("base_model.model.model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj"),
            ("transformer.transformer_blocks.0.attn1.to_q", "transformer_blocks.0.attn1.to_q"),
            ("lora_unet_double_blocks_0_img_attn", "double_blocks_0_img_attn"),
            (
                "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q",
                "input_blocks_4_1_transformer_blocks_0_attn1_to_q",
            ),
        ] {
            assert_eq!(read(&format!("{name}.lora_down.weight")).layer, layer);
        }
    }

    #[test]
    fn errors_name_keys_that_are_not_of_a_lora() {
        let error = |key: &str| parse(Path::new("x.safetensors"), key).unwrap_err().to_string();
        assert!(error("blocks.0.ffn.0.weight").contains("blocks.0.ffn.0.weight"));
        assert!(error("diffusion_model.blocks.0.ffn.0.dora_scale").contains("DoRA"));
        assert!(error("lora_unet_a.hada_w1_a").contains("LoHa"));
        assert!(error(".lora_A.weight").contains("expected"));
        assert!(error("blocks.0.lora_A.default.scale").contains("expected"));
        let foo = error("diffusion_model.foo.blocks.0.self_attn.q.lora_A.weight");
        assert!(foo.contains("expected `blocks.0.self_attn.q`") && foo.contains("unknown prefix `foo.`"), "{foo}");
        assert!(error("transformer_1.transformer_2.blocks.0.ffn.0.lora_A.weight").contains("both experts"));
        assert!(error("blocks.0.lora_A.bias").contains("expected"));
        assert!(error("lora_unet_a.b.lora_up.weight").contains("expected"));
        assert!(!is_lora_key("blocks.0.ffn.0.weight") && is_lora_key("lora_unet_a.alpha"));
    }
}
