//! What the header of an adapter's file says about the adapter (`roll.*`): transformer, rank, layers, base network,
//! number of steps and experiment. Other programs ignore these entries; this project reads and writes them.
//!
//! If the header lacks the transformer, [`named_expert`] looks for it in names.

use std::collections::BTreeMap;
use std::path::Path;

use roll_core::header;

use super::Expert;
use super::error::LoraError;
use super::keys::ALPHAS_KEY;

/// Version of the `roll.*` entries: key and value.
pub const FORMAT: (&str, &str) = ("roll.format", "1");
/// Key of the adapter's expert, `high_noise` or `low_noise`; absent if the model has one transformer.
pub const EXPERT: &str = "roll.expert";
/// Key of the rank, or of all ranks that occur, separated by commas.
pub const RANK: &str = "roll.rank";
/// Key of the alpha, or of all alphas that occur, separated by commas.
pub const ALPHA: &str = "roll.alpha";
/// Key of the adapted layers: endings of their names, separated by commas.
pub const TARGETS: &str = "roll.targets";
/// Key of the kind and file of the network that the adapter was trained on.
pub const BASE: &str = "roll.base";
/// Key of the fingerprint of the base's last layer, which distinguishes two bases of the same name.
pub const BASE_FINGERPRINT: &str = "roll.base_fingerprint";

/// Key of the LoRAs that are merged into the base (`model.base_lora`).
pub const BASE_LORA: &str = "roll.base_lora";

/// The transformer that a header names. Fails if the name is not a known expert.
pub fn expert(path: &Path, header: &BTreeMap<String, String>) -> Result<Option<Expert>, LoraError> {
    match header.get(EXPERT).map(String::as_str) {
        None => Ok(None),
        Some("high_noise") => Ok(Some(Expert::High)),
        Some("low_noise") => Ok(Some(Expert::Low)),
        Some(other) => Err(LoraError::invalid(
            path,
            format!("`{EXPERT}` of the header: expected high_noise or low_noise, found `{other}`"),
        )),
    }
}

/// The transformer that a file's name contains: `high_noise`, `HighNoise`, `HIGH`, `transformer_2` and the like, as in
/// the files of Lightning, Kijai and this project.
pub fn expert_of_name(path: &Path) -> Option<Expert> {
    expert_in(&path.file_stem()?.to_string_lossy())
}

/// Keys of a header under which other programs store the name of an adapter, or of the weights that it was trained on.
const NAME_KEYS: [&str; 4] = ["ss_output_name", "modelspec.title", "name", "ss_sd_model_name"];

/// The transformer that a name in the header contains, and the key.
pub fn expert_of_header(header: &BTreeMap<String, String>) -> Option<(Expert, &'static str)> {
    NAME_KEYS.into_iter().find_map(|key| Some((expert_in(header.get(key)?)?, key)))
}

/// The transformer that a name contains, and which name: of the file, else in the file's header, else of the file's
/// directory. Names may be wrong, so this is for warnings.
pub fn named_expert(path: &Path, header: &BTreeMap<String, String>) -> Option<(Expert, String)> {
    let of_directory = || expert_in(&path.parent()?.file_name()?.to_string_lossy());
    expert_of_name(path)
        .map(|expert| (expert, "the name of the file".to_string()))
        .or_else(|| expert_of_header(header).map(|(expert, key)| (expert, format!("`{key}` of its header"))))
        .or_else(|| of_directory().map(|expert| (expert, "the name of its directory".into())))
}

/// Warns if a file is used for one expert and its name contains the other expert.
pub fn warn_of_exchange(path: &Path, header: &BTreeMap<String, String>, used: Expert) {
    if let Some((named, place)) = named_expert(path, header).filter(|(named, _)| *named != used) {
        let config_key = |expert| if expert == Expert::High { "dit" } else { "dit2" };
        tracing::warn!(
            "{} is used for `{}`, {used}, and {place} says {named} (`{}`): are the two experts exchanged?",
            path.display(),
            config_key(used),
            config_key(named)
        );
    }
}

/// Words before which `high` and `low` say nothing about noise: `low_vram`, `high_quality`.
const NOT_NOISE: [&str; 24] = [
    "rank",
    "vram",
    "memory",
    "mem",
    "res",
    "resolution",
    "quality",
    "fps",
    "light",
    "motion",
    "poly",
    "key",
    "cost",
    "lr",
    "step",
    "steps",
    "angle",
    "contrast",
    "detail",
    "speed",
    "cfg",
    "shift",
    "precision",
    "dim",
];

/// The transformer that the words of a name say; `None` if they say no transformer or both.
///
/// There are three rules, from the clearest to the vaguest. A rule returns the transformer that one word says together
/// with the next word. The first rule that applies to a word of the name decides.
fn expert_in(name: &str) -> Option<Expert> {
    let words = words_of(name);
    let next = |at: usize| words.get(at + 1).map(String::as_str);
    // `high_noise`, `lownoise`.
    let by_noise = |at: usize, word: &str| match (word, next(at)) {
        ("highnoise", _) | ("high", Some("noise")) => Some(Expert::High),
        ("lownoise", _) | ("low", Some("noise")) => Some(Expert::Low),
        _ => None,
    };
    // `transformer_2` anywhere; `transformer`, `dit` and `dit2` only as the whole name.
    let by_number = |at: usize, word: &str| match (word, next(at)) {
        ("transformer", Some("2")) | ("transformer2", _) => Some(Expert::Low),
        ("dit2", None) if at == 0 => Some(Expert::Low),
        ("transformer", Some("1") | None) | ("dit", None) if at == 0 => Some(Expert::High),
        _ => None,
    };
    // `high`, `low`.
    let by_height = |at: usize, word: &str| match word {
        _ if next(at).is_some_and(|next| NOT_NOISE.contains(&next)) => None,
        "high" => Some(Expert::High),
        "low" => Some(Expert::Low),
        _ => None,
    };
    let rules: [&dyn Fn(usize, &str) -> Option<Expert>; 3] = [&by_noise, &by_number, &by_height];
    for rule in rules {
        let experts: Vec<Expert> = words.iter().enumerate().filter_map(|(at, word)| rule(at, word)).collect();
        if let Some(first) = experts.first() {
            let says_both = experts.iter().any(|other| other != first);
            return if says_both { None } else { Some(*first) };
        }
    }
    None
}

/// The words of a name in lower case: runs of letters and digits. A capital after a small letter begins a new word.
fn words_of(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut was_small = false;
    for letter in name.chars() {
        if !letter.is_alphanumeric() || (was_small && letter.is_uppercase()) {
            words.push(String::new());
        }
        if letter.is_alphanumeric() {
            words.last_mut().into_iter().for_each(|word| word.extend(letter.to_lowercase()));
        }
        was_small = letter.is_lowercase();
    }
    words.retain(|word| !word.is_empty());
    words
}

/// Returns the entries that describe an adapter: format, ranks, alphas and target layers. `layers` are pairs of name
/// and rank; `scale` is `alpha / rank`, which all layers share.
pub fn adapter_entries<'a>(layers: impl IntoIterator<Item = (&'a str, usize)>, scale: f64) -> BTreeMap<String, String> {
    let (mut ranks, mut targets) = (Vec::new(), Vec::new());
    for (layer, rank) in layers {
        ranks.push(rank);
        targets.push(target(layer));
    }
    ranks.sort_unstable();
    ranks.dedup();
    targets.sort();
    targets.dedup();
    let ranks_as_text: Vec<String> = ranks.iter().map(|rank| rank.to_string()).collect();
    let alphas_as_text: Vec<String> = ranks.iter().map(|rank| (scale * *rank as f64).to_string()).collect();
    let (format_key, format_version) = FORMAT;
    [
        (format_key, format_version.to_string()),
        (RANK, ranks_as_text.join(",")),
        (ALPHA, alphas_as_text.join(",")),
        (TARGETS, targets.join(",")),
    ]
    .map(|(name, value)| (name.to_string(), value))
    .into()
}

/// Returns entries by kohya's names, which Civitai and programs around ComfyUI show. `layers` are pairs of rank and
/// alpha. Base network, steps and run are copied from `header`, if it has them.
pub fn kohya_entries(
    layers: impl IntoIterator<Item = (usize, f64)>,
    header: &BTreeMap<String, String>,
) -> BTreeMap<String, String> {
    let (ranks, alphas): (Vec<usize>, Vec<f64>) = layers.into_iter().unzip();
    let mut entries = BTreeMap::from([
        ("ss_network_module".to_string(), "networks.lora".to_string()),
        ("ss_network_dim".to_string(), one_or_dynamic(&ranks)),
        ("ss_network_alpha".to_string(), one_or_dynamic(&alphas)),
    ]);
    // Pairs of kohya's key and this project's key.
    let copied = [
        ("ss_base_model_version", BASE),
        ("ss_steps", header::STEPS),
        ("ss_output_name", header::RUN),
        ("modelspec.title", header::RUN),
    ];
    for (kohya_key, our_key) in copied {
        if let Some(value) = header.get(our_key) {
            entries.insert(kohya_key.to_string(), value.clone());
        }
    }
    entries
}

/// The value that all layers share, or kohya's word for several values.
fn one_or_dynamic<T: PartialEq + ToString>(values: &[T]) -> String {
    match values {
        [first, rest @ ..] if rest.iter().all(|value| value == first) => first.to_string(),
        _ => "Dynamic".into(),
    }
}

/// Returns the header entry with the alpha of each layer, for conventions whose files have no other place for it.
pub fn layer_alphas<'a>(layers: impl IntoIterator<Item = (&'a str, usize)>, scale: f64) -> Option<(String, String)> {
    let alphas: BTreeMap<&str, f64> = layers.into_iter().map(|(layer, rank)| (layer, scale * rank as f64)).collect();
    Some((ALPHAS_KEY.into(), serde_json::to_string(&alphas).ok()?))
}

/// The name of a layer after the number of its block: `self_attn.q` of `blocks.0.self_attn.q`. Without a number, the
/// whole name.
fn target(layer: &str) -> String {
    let mut parts = layer.split('.');
    // `any` consumes the parts up to the number.
    let has_number = parts.by_ref().any(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()));
    if has_number { parts.collect::<Vec<_>>().join(".") } else { layer.to_string() }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn kohya_entries_have_one_rank_or_say_that_it_varies() {
        let header = [(BASE, "i2v high.safetensors"), (header::STEPS, "40"), (header::RUN, "identity")];
        let header = header.map(|(name, value)| (name.to_string(), value.to_string())).into();
        let entries = kohya_entries([(8, 4.0), (8, 4.0)], &header);
        let expected = [
            ("modelspec.title", "identity"),
            ("ss_base_model_version", "i2v high.safetensors"),
            ("ss_network_alpha", "4"),
            ("ss_network_dim", "8"),
            ("ss_network_module", "networks.lora"),
            ("ss_output_name", "identity"),
            ("ss_steps", "40"),
        ];
        assert!(entries.iter().map(|(name, value)| (name.as_str(), value.as_str())).eq(expected), "{entries:?}");
        let varying = kohya_entries([(8, 4.0), (16, 4.0)], &BTreeMap::new());
        assert_eq!((varying["ss_network_dim"].as_str(), varying.len()), ("Dynamic", 3));
    }

    #[test]
    fn entries_list_ranks_alphas_and_layers_once() {
        let entries =
            adapter_entries([("blocks.0.self_attn.q", 4), ("blocks.1.self_attn.q", 4), ("blocks.0.ffn.0", 8)], 0.5);
        let of = |name: &str| entries[name].as_str();
        assert_eq!((of(RANK), of(ALPHA), of(TARGETS)), ("4,8", "2,4", "ffn.0,self_attn.q"));
        assert_eq!(target("head.head"), "head.head");
    }

    #[test]
    fn expert_is_read_from_the_header_or_the_file_name() {
        let header = |value: &str| BTreeMap::from([(EXPERT.to_string(), value.to_string())]);
        let path = Path::new("a.safetensors");
        assert_eq!(expert(path, &header("low_noise")).unwrap(), Some(Expert::Low));
        assert_eq!(expert(path, &BTreeMap::new()).unwrap(), None);
        assert!(expert(path, &header("dit3")).unwrap_err().to_string().contains("`dit3`"));
        let named = |name: &str| expert_of_name(Path::new(name));
        assert_eq!(named("x/adapter_high_noise.safetensors"), Some(Expert::High));
        assert_eq!(named("Wan22-Lightning-Low-Noise.safetensors"), Some(Expert::Low));
        assert_eq!((named("adapter.safetensors"), named("high_noise/adapter.safetensors")), (None, None));
    }

    #[test]
    fn names_of_published_files_say_their_expert() {
        let (high, low) = (Some(Expert::High), Some(Expert::Low));
        for (name, expected) in [
            ("high_noise_model", high),
            ("Wan22_A14B_T2V_HIGH_Lightning_4steps_lora_250928_rank128_fp16", high),
            ("Wan2_2-I2V-A14B-LOW_fp8_e4m3fn_scaled_KJ", low),
            ("Wan2.2-I2V-A14B-HighNoise-Q4_K_M", high),
            ("wan2.2_t2v_lownoise", low),
            ("LOWNOISE", low),
            ("my-style-low", low),
            ("high_noise_low_rank", high),
            ("transformer_2", low),
            ("wan_lora_transformer_2", low),
            ("transformer", high),
            ("dit", high),
            ("dit2", low),
            ("wan_transformer_lora", None),
            ("low_vram_high_quality", None),
            ("high_and_low", None),
            ("high_noise_to_low_noise", None),
            ("highway", None),
            ("slow_motion", None),
            ("adapter_model", None),
        ] {
            assert_eq!(expert_in(name), expected, "{name}");
        }
        let header = BTreeMap::from([("ss_output_name".to_string(), "face-low-noise".to_string())]);
        let none = BTreeMap::new();
        let named = |path: &str, header| named_expert(Path::new(path), header);
        assert_eq!(named("HighNoise/a.safetensors", &none), Some((Expert::High, "the name of its directory".into())));
        assert_eq!(
            named("HighNoise/a.safetensors", &header),
            Some((Expert::Low, "`ss_output_name` of its header".into()))
        );
        assert_eq!(named("HIGH.safetensors", &header), Some((Expert::High, "the name of the file".into())));
        assert_eq!(named("b/a.safetensors", &none), None);
    }
}
