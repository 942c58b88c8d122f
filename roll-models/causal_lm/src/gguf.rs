//! Opens a language model in one GGUF file: architecture, weights, tokenizer and chat template. The file's names are
//! translated to those of Hugging Face.

use std::collections::BTreeMap;
use std::path::Path;

use roll_backends::BlockMatrix;
use roll_core::{Error, Result, StateDict, Tensor};
use roll_network::tokenizer::Tokenizer;
use roll_network::weights::gguf::{GgufFile, Value};
use serde_json::{Value as Json, json};

use super::chat::ChatTemplate;
use super::config::{Gate, LmConfig, MAX_LAYERS, Rope, RopeScaling};
use super::loaded::LoadedModel;
use super::sentencepiece::{self, ADDED, AddedToken, CONTROL, NORMAL, Piece};

/// Supported architectures.
const KNOWN: [&str; 6] = ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"];

/// Tokens with these texts end a turn in any model, as in llama.cpp, because many files name only the token that ends a
/// whole text.
const ENDS: [&str; 8] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<\u{ff5c}end\u{2581}of\u{2581}sentence\u{ff5c}>",
];

/// Maximal number of token ids. A file with more is wrong or hostile.
const MAX_TOKENS: usize = 1 << 22;

/// Opens the model in `path`; with `headers_only`, its weights are checked and not read.
pub fn open(path: &Path, headers_only: bool) -> Result<LoadedModel> {
    let file = GgufFile::open(path)?;
    let bad = |problem: String| Error::bad_file(path, problem);
    let config = read_config(&file).map_err(bad)?;
    let (state, quantised) = if headers_only {
        // Checks the shapes.
        header(path)?;
        Default::default()
    } else {
        weights(&file, &config)?
    };
    let vocabulary = Vocabulary::read(&file).map_err(bad)?;
    let tokenizer = vocabulary.as_ref().map(|v| v.tokenizer(&file)).transpose().map_err(bad)?;
    let special = |key: &str| vocabulary.as_ref().and_then(|v| v.special(&file, key)).unwrap_or_default();
    let template = match file.text("tokenizer.chat_template") {
        Some(source) => Some(ChatTemplate::new(source.into(), special("bos"), special("eos")).map_err(bad)?),
        None => None,
    };
    Ok(LoadedModel { config, state, quantised, tokenizer, template, location: path.display().to_string() })
}

/// Makes the text files that a Hugging Face directory has next to its weights, by name, from the metadata of the file
/// in `path`. Other programs need them to open the weights of a checkpoint.
pub fn files_for_others(path: &Path) -> Result<BTreeMap<String, String>> {
    let file = GgufFile::open(path)?;
    let bad = |problem: String| Error::bad_file(path, problem);
    let family = Metadata::new(&file).map_err(bad)?.family;
    let config = read_config(&file).map_err(bad)?;
    let mut files =
        BTreeMap::from([("config.json".to_string(), format!("{:#}\n", config.to_json(family).map_err(bad)?))]);
    let Some(vocabulary) = Vocabulary::read(&file).map_err(bad)? else { return Ok(files) };
    files.insert("tokenizer.json".into(), vocabulary.tokenizer_json(&file).map_err(bad)?.to_string());
    let mut special = json!({ "tokenizer_class": "PreTrainedTokenizerFast" });
    for key in ["bos", "eos"] {
        if let Some(text) = vocabulary.special(&file, key) {
            special[format!("{key}_token")] = text.into();
        }
    }
    files.insert("tokenizer_config.json".into(), format!("{special:#}\n"));
    if let Some(template) = file.text("tokenizer.chat_template") {
        files.insert("chat_template.jinja".into(), template.into());
    }
    Ok(files)
}

/// Returns the architecture of the network in `path`, and the size in bytes of each quantised matrix by its Hugging
/// Face name. Only the header is read.
pub fn header(path: &Path) -> Result<(LmConfig, BTreeMap<String, usize>)> {
    let file = GgufFile::open(path)?;
    let config = read_config(&file).map_err(|problem| Error::bad_file(path, problem))?;
    let mut blocks = BTreeMap::new();
    for (name, shape) in config.weights() {
        let stored = stored_name(&name, &config);
        check_shape(&file, &stored, &shape)?;
        if let Some(bytes) = file.block_bytes(&stored)? {
            blocks.insert(name, bytes);
        }
    }
    Ok((config, blocks))
}

/// Fails if the file has the tensor `name` in another shape. A missing tensor passes: reading it fails.
fn check_shape(file: &GgufFile, name: &str, shape: &[usize]) -> Result<()> {
    match file.shape(name) {
        Some(found) if found != shape => {
            Err(Error::shape(format!("{name} of {}", file.path().display()), format!("{shape:?}"), found))
        }
        _ => Ok(()),
    }
}

/// The metadata of the file's architecture. Methods take keys without the prefix `ARCHITECTURE.`.
struct Metadata<'a> {
    file: &'a GgufFile,
    family: &'a str,
}

impl<'a> Metadata<'a> {
    fn new(file: &'a GgufFile) -> Result<Self, String> {
        let family = file.text("general.architecture").ok_or("the key `general.architecture` is missing")?;
        if !KNOWN.contains(&family) {
            return Err(format!("the architecture `{family}` is not supported; known: {}", KNOWN.join(", ")));
        }
        Ok(Self { file, family })
    }

    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.family)
    }

    fn number(&self, key: &str) -> Option<f64> {
        self.file.number(&self.key(key))
    }

    fn size(&self, key: &str) -> Result<Option<usize>, String> {
        let name = self.key(key);
        match self.file.value(&name) {
            None => Ok(None),
            Some(Value::Integer(n)) => usize::try_from(*n).map(Some).map_err(|_| format!("`{name}` is {n}")),
            Some(other) => Err(format!("`{name}`: expected a whole number, found {other:?}")),
        }
    }

    fn required_size(&self, key: &str) -> Result<usize, String> {
        self.size(key)?.ok_or_else(|| format!("the key `{}` is missing", self.key(key)))
    }

    /// Reads the bound of a softcap; 0 disables it.
    fn softcap(&self, key: &str, default: Option<f32>) -> Result<Option<f32>, String> {
        let bound = self.number(key).map(|bound| bound as f32).or(default).filter(|bound| *bound != 0.0);
        match bound {
            Some(bound) if !(bound > 0.0 && bound.is_finite()) => Err(format!("`{}` is {bound}", self.key(key))),
            bound if self.family.starts_with("gemma") => Ok(bound),
            // Other families do not have softcaps.
            _ => Ok(None),
        }
    }

    /// Reads the attention window of each layer.
    fn windows(&self, layers: usize) -> Result<Vec<Option<usize>>, String> {
        // Every layer whose number (from 1) is a multiple of the pattern has full attention. The file can have another
        // pattern, or a list with 0 for each layer with full attention.
        let default_pattern = match self.family {
            "gemma2" => 2,
            "gemma3" => 6,
            "phi3" => usize::MAX,
            _ => return Ok(vec![None; layers]),
        };
        let Some(window) = self.size("attention.sliding_window")?.filter(|window| *window > 0) else {
            return Ok(vec![None; layers]);
        };
        let by_pattern = |pattern: usize| {
            (0..layers).map(|layer| if (layer + 1).is_multiple_of(pattern) { None } else { Some(window) }).collect()
        };
        let key = self.key("attention.sliding_window_pattern");
        match self.file.value(&key) {
            None => Ok(by_pattern(default_pattern)),
            Some(Value::Integer(pattern)) if *pattern > 0 => Ok(by_pattern(*pattern as usize)),
            Some(Value::Integers(list)) if list.len() == layers => {
                Ok(list.iter().map(|has_window| if *has_window == 0 { None } else { Some(window) }).collect())
            }
            Some(other) => Err(format!("`{key}`: {other:?} for {layers} layers")),
        }
    }

    /// Reads the rotary frequencies: factors of single frequencies in a tensor, or a rule in the metadata.
    fn rope(&self) -> Result<Rope, String> {
        let default_theta = if self.family == "gemma3" { 1e6 } else { 1e4 };
        let theta = self.number("rope.freq_base").unwrap_or(default_theta);
        if self.file.shape("rope_freqs.weight").is_some() {
            let factors = self.file.tensor("rope_freqs.weight").map_err(|e| e.to_string())?;
            let factors = factors.to_f32_vec().into_iter().map(f64::from).collect();
            return Ok(Rope { theta, scaling: RopeScaling::Factors(factors) });
        }
        let scaling = match self.file.text(&self.key("rope.scaling.type")) {
            None | Some("none") => RopeScaling::None,
            Some("linear") => {
                let factor = self.number("rope.scaling.factor").filter(|f| *f > 0.0);
                RopeScaling::Linear { factor: factor.ok_or("linear rope scaling needs a positive factor")? }
            }
            Some(other) => {
                return Err(format!("the rope scaling `{other}` is not supported; known: none, linear"));
            }
        };
        Ok(Rope { theta, scaling })
    }

    /// Reads the ids that end a turn: ids that the metadata name, and ids of tokens whose text is in [`ENDS`].
    fn end_ids(&self) -> Vec<u32> {
        let id = |name| u32::try_from(self.file.integer(&format!("tokenizer.ggml.{name}_token_id"))?).ok();
        let mut ids: Vec<u32> = ["eos", "eot", "eom"].into_iter().filter_map(id).collect();
        if let Some(Value::Texts(texts)) = self.file.value("tokenizer.ggml.tokens") {
            let ends = texts.iter().enumerate().filter(|(_, text)| ENDS.contains(&text.as_str()));
            ids.extend(ends.map(|(id, _)| id as u32));
        }
        ids.sort_unstable();
        ids.dedup();
        ids
    }
}

/// Returns the architecture, from the metadata and the names of the tensors.
fn read_config(file: &GgufFile) -> Result<LmConfig, String> {
    let metadata = Metadata::new(file)?;
    let [gemma2, gemma3, phi3] = ["gemma2", "gemma3", "phi3"].map(|family| metadata.family == family);
    let gemma = gemma2 || gemma3;
    let has = |name: &str| file.shape(name).is_some();
    let embedding = file.shape("token_embd.weight").ok_or("the tensor `token_embd.weight` is missing")?;
    let heads = metadata.required_size("attention.head_count")?;
    let dim = metadata.required_size("embedding_length")?;
    let head_dim = metadata.size("attention.key_length")?.unwrap_or(dim / heads.max(1));
    if metadata.number("expert_count").is_some_and(|n| n > 0.0) {
        return Err("mixtures of experts are not supported".into());
    }
    if metadata.size("rope.dimension_count")?.is_some_and(|n| n != head_dim) {
        return Err("rotary positions on part of a head are not supported".into());
    }
    if has("rope_factors_long.weight") {
        return Err("rotary factors for long contexts (LongRoPE) are not supported".into());
    }
    let layers = metadata.required_size("block_count")?.min(MAX_LAYERS + 1);
    // Files do not contain `query_pre_attn_scalar`. It is the width of a head except in the largest model of each
    // family.
    let is_largest = (gemma2 && layers == 46) || (gemma3 && layers == 62);
    let scalar = if is_largest { dim / heads.max(1) } else { head_dim };
    let config = LmConfig {
        vocab: embedding.first().copied().unwrap_or_default(),
        dim,
        ffn_dim: metadata.required_size("feed_forward_length")?,
        layers,
        heads,
        kv_heads: metadata.size("attention.head_count_kv")?.unwrap_or(heads),
        head_dim,
        norm_eps: metadata.number("attention.layer_norm_rms_epsilon").unwrap_or(1e-6),
        rope: metadata.rope()?,
        tied: !has("output.weight"),
        qkv_bias: has("blk.0.attn_q.bias") || has("blk.0.attn_qkv.bias"),
        out_bias: has("blk.0.attn_output.bias"),
        mlp_bias: has("blk.0.ffn_up.bias"),
        qk_norm: has("blk.0.attn_q_norm.weight"),
        context: metadata.required_size("context_length")?,
        end_ids: metadata.end_ids(),
        windows: metadata.windows(layers)?,
        window_rope: gemma3.then(|| Rope {
            theta: metadata.number("rope.freq_base_swa").unwrap_or(10_000.0),
            scaling: RopeScaling::None,
        }),
        attention_scale: gemma.then(|| (scalar as f64).sqrt().recip() as f32),
        // The defaults are those of llama.cpp.
        attention_softcap: metadata.softcap("attn_logit_softcapping", gemma2.then_some(50.0))?,
        logit_softcap: metadata.softcap("final_logit_softcapping", gemma2.then_some(30.0))?,
        embedding_scale: if gemma { (dim as f64).sqrt() } else { 1.0 },
        gain_offset: if gemma { 1.0 } else { 0.0 },
        output_norms: gemma,
        fused: phi3,
        gate: if gemma { Gate::Gelu } else { Gate::Silu },
    };
    config.check()?;
    Ok(config)
}

/// Reads the weights under their Hugging Face names: dense weights as f32, then quantised matrices in the file's
/// blocks.
fn weights(file: &GgufFile, config: &LmConfig) -> Result<(StateDict, BTreeMap<String, BlockMatrix>)> {
    // Llama's converter interleaves the two halves of each head in queries and keys; see `separate_halves`.
    let is_interleaved = file.text("general.architecture") == Some("llama");
    let (mut state, mut matrices) = (StateDict::new(), BTreeMap::new());
    for (name, shape) in config.weights() {
        let stored = stored_name(&name, config);
        check_shape(file, &stored, &shape)?;
        let row_order = if is_interleaved && name.contains(".q_proj.") {
            Some(separate_halves(shape[0], config.heads))
        } else if is_interleaved && name.contains(".k_proj.") {
            Some(separate_halves(shape[0], config.kv_heads))
        } else {
            None
        };
        if let Some(matrix) = file.blocks(&stored)? {
            let matrix = match row_order {
                Some(order) => matrix.reordered(&order),
                None => matrix,
            };
            matrices.insert(name, matrix);
            continue;
        }
        let tensor = file.tensor(&stored)?;
        let tensor = match row_order {
            Some(order) => reordered(&tensor, &order)?,
            // The file has the gains with the offset added, Hugging Face without it.
            None if config.gain_offset != 0.0 && name.ends_with("norm.weight") => {
                let gains = tensor.to_f32_vec().into_iter().map(|gain| gain - config.gain_offset as f32);
                Tensor::new(gains.collect(), tensor.shape().to_vec())?
            }
            None => tensor,
        };
        state.insert(name, tensor);
    }
    Ok((state, matrices))
}

/// Returns the GGUF name of a weight that Hugging Face calls `name`.
fn stored_name(name: &str, config: &LmConfig) -> String {
    /// Names of layers within a block: Hugging Face, GGUF.
    const LAYERS: [(&str, &str); 13] = [
        ("self_attn.qkv_proj", "attn_qkv"),
        // The concatenation of gate and up.
        ("mlp.gate_up_proj", "ffn_up"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
    ];
    /// The names of norms in architectures with [`LmConfig::output_norms`], which precede those in [`LAYERS`].
    const WITH_OUTPUT_NORMS: [(&str, &str); 3] = [
        ("post_attention_layernorm", "post_attention_norm"),
        ("pre_feedforward_layernorm", "ffn_norm"),
        ("post_feedforward_layernorm", "post_ffw_norm"),
    ];
    match name {
        "model.embed_tokens.weight" => return "token_embd.weight".into(),
        "model.norm.weight" => return "output_norm.weight".into(),
        "lm_head.weight" => return "output.weight".into(),
        _ => {}
    }
    // `model.layers.BLOCK.LAYER.PART`, where the part is `weight` or `bias`.
    let name_in_block = || {
        let (block, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
        let (layer, part) = rest.rsplit_once('.')?;
        let output_norms: &[(&str, &str)] = if config.output_norms { &WITH_OUTPUT_NORMS } else { &[] };
        let (_, gguf) = output_norms.iter().chain(&LAYERS).find(|(hugging_face, _)| *hugging_face == layer)?;
        Some(format!("blk.{block}.{gguf}.{part}"))
    };
    name_in_block().unwrap_or_else(|| name.into())
}

/// Returns the order of rows that separates the two halves of each head. Llama's converter interleaves the halves,
/// because the rotary positions of GGUF rotate neighbours, those of Hugging Face the two halves.
fn separate_halves(rows: usize, heads: usize) -> Vec<usize> {
    let rows_per_head = rows / heads;
    let mut order = Vec::with_capacity(rows);
    for head in 0..heads {
        for half in [0, 1] {
            order.extend((0..rows_per_head / 2).map(|pair| head * rows_per_head + 2 * pair + half));
        }
    }
    order
}

/// Returns the rows of `tensor` in the given order.
fn reordered(tensor: &Tensor, order: &[usize]) -> Result<Tensor> {
    let values = tensor.to_f32_vec();
    let width = values.len() / order.len().max(1);
    let values = order.iter().flat_map(|row| &values[row * width..][..width]).copied().collect::<Vec<_>>();
    Tensor::new(values, tensor.shape().to_vec())
}

/// The tokens of the file, by id.
struct Vocabulary {
    texts: Vec<String>,
    /// The type of each token; [`Piece::kind`] lists them.
    kinds: Vec<i64>,
}

impl Vocabulary {
    /// Reads the tokens. Returns `None` if the file has no tokenizer.
    fn read(file: &GgufFile) -> Result<Option<Self>, String> {
        let texts = match file.value("tokenizer.ggml.tokens") {
            None => return Ok(None),
            Some(Value::Texts(texts)) if texts.len() <= MAX_TOKENS => texts.clone(),
            Some(_) => return Err(format!("`tokenizer.ggml.tokens`: expected a list of at most {MAX_TOKENS} texts")),
        };
        let kinds = match file.value("tokenizer.ggml.token_type") {
            Some(Value::Integers(kinds)) if kinds.len() == texts.len() => kinds.clone(),
            None => vec![NORMAL; texts.len()],
            Some(_) => return Err("`tokenizer.ggml.token_type`: expected a number for each token".into()),
        };
        Ok(Some(Self { texts, kinds }))
    }

    /// Returns the text of a special token, such as `eos`.
    fn special(&self, file: &GgufFile, key: &str) -> Option<String> {
        let id = file.integer(&format!("tokenizer.ggml.{key}_token_id"))?;
        self.texts.get(usize::try_from(id).ok()?).cloned()
    }

    fn tokenizer(&self, file: &GgufFile) -> Result<Tokenizer, String> {
        Tokenizer::parse(self.tokenizer_json(file)?.to_string().as_bytes())
    }

    /// Builds the contents of a `tokenizer.json`.
    fn tokenizer_json(&self, file: &GgufFile) -> Result<Json, String> {
        match file.text("tokenizer.ggml.model").unwrap_or("missing") {
            "gpt2" => self.byte_level(file),
            "llama" => self.sentencepiece(file),
            model => Err(format!(
                "the tokenizer `{model}` is not supported, only `gpt2` (byte-level BPE) and `llama` (SentencePiece); \
                 convert the model to a directory with a tokenizer.json"
            )),
        }
    }

    /// Builds a SentencePiece tokenizer, whose merges follow from the scores of its pieces.
    fn sentencepiece(&self, file: &GgufFile) -> Result<Json, String> {
        let scores = match file.value("tokenizer.ggml.scores") {
            Some(Value::Floats(scores)) if scores.len() == self.texts.len() => scores,
            _ => return Err("`tokenizer.ggml.scores`: expected a number for each token".into()),
        };
        let pieces = self.texts.iter().zip(scores).zip(&self.kinds);
        let pieces: Vec<Piece<'_>> =
            pieces.map(|((text, score), kind)| Piece { text, score: *score, kind: *kind }).collect();
        let unknown = file.integer("tokenizer.ggml.unknown_token_id").and_then(|id| usize::try_from(id).ok());
        let begins_with_space = file.integer("tokenizer.ggml.add_space_prefix") != Some(0);
        // Phi-3's control tokens absorb the blanks after them.
        let is_phi3 = file.text("general.architecture") == Some("phi3");
        sentencepiece::tokenizer(&pieces, unknown, begins_with_space, is_phi3)
    }

    /// Builds a byte-level BPE tokenizer with the pre-tokenizer that the file names.
    fn byte_level(&self, file: &GgufFile) -> Result<Json, String> {
        let Some(Value::Texts(merges)) = file.value("tokenizer.ggml.merges") else {
            return Err("`tokenizer.ggml.merges`: expected a list of texts".into());
        };
        let declared = file.text("tokenizer.ggml.pre");
        let kind = declared.unwrap_or("default");
        if kind == "default" {
            tracing::warn!(
                "{}: {} (tokenizer.ggml.pre), so texts are split by llama.cpp's default rules, which may not be those of \
                 the model's training: convert the model again with a present llama.cpp",
                file.path().display(),
                if declared.is_some() { "the pre-tokenizer is `default`" } else { "no pre-tokenizer is named" },
            );
        }
        let (pre_tokenizer, ignore_merges) = pre_tokenizer(kind)?;
        let vocab: serde_json::Map<String, Json> =
            self.texts.iter().enumerate().map(|(id, text)| (text.clone(), json!(id))).collect();
        let mut added: Vec<Json> = Vec::new();
        for (id, (text, kind)) in self.texts.iter().zip(&self.kinds).enumerate() {
            if matches!(*kind, CONTROL | ADDED) {
                let token = AddedToken { id, text, is_special: *kind == CONTROL, absorbs_blanks: false };
                added.push(token.to_json());
            }
        }
        Ok(json!({
            "version": "1.0",
            "added_tokens": added,
            "normalizer": if kind == "qwen2" { json!({ "type": "NFC" }) } else { Json::Null },
            "pre_tokenizer": pre_tokenizer,
            "decoder": byte_level(Splitting::Gpt2),
            "model": { "type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": ignore_merges },
        }))
    }
}

/// Whether the byte-level step also splits the text, by GPT-2's pattern.
#[derive(PartialEq)]
enum Splitting {
    None,
    Gpt2,
}

/// The step that maps bytes to characters and back.
fn byte_level(splitting: Splitting) -> Json {
    let use_regex = splitting == Splitting::Gpt2;
    json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex })
}

/// Makes every match of `pattern`, and every text between two matches, a piece of its own.
fn isolated(pattern: &str) -> Json {
    json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false })
}

/// Returns the pre-tokenizer called `kind`, and `ignore_merges`: whether a piece that is a token as a whole becomes
/// that token without merges.
fn pre_tokenizer(kind: &str) -> Result<(Json, bool), String> {
    /// Splits into contractions, words, numbers that match `digits`, punctuation, line breaks and blanks.
    fn pieces(digits: &str) -> Json {
        let pattern = format!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        );
        json!({ "type": "Sequence", "pretokenizers": [isolated(&pattern), byte_level(Splitting::None)] })
    }
    Ok(match kind {
        "default" => {
            // As in llama.cpp: punctuation first, then GPT-2's words, then digits in threes from the left.
            let patterns = [
                r"[\p{P}$+<=>^~|]+",
                r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
                r"\p{N}+",
                "[0-9][0-9][0-9]",
            ];
            let mut steps = patterns.map(isolated).to_vec();
            steps.push(byte_level(Splitting::None));
            (json!({ "type": "Sequence", "pretokenizers": steps }), false)
        }
        "gpt-2" | "gpt2" => (byte_level(Splitting::Gpt2), false),
        "smollm" => {
            let digits = json!({ "type": "Digits", "individual_digits": true });
            (json!({ "type": "Sequence", "pretokenizers": [digits, byte_level(Splitting::Gpt2)] }), false)
        }
        "qwen2" => (pieces(r"\p{N}"), false),
        "llama-bpe" | "llama3" | "llama-v3" => (pieces(r"\p{N}{1,3}"), true),
        other => {
            return Err(format!(
                "the pre-tokenizer `{other}` (tokenizer.ggml.pre) is not supported; known: default, gpt-2, smollm, \
                 qwen2, llama-bpe"
            ));
        }
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn gguf_names_of_hugging_face_weights() {
        for (hugging_face, gguf) in [
            ("model.embed_tokens.weight", "token_embd.weight"),
            ("model.layers.12.self_attn.q_proj.bias", "blk.12.attn_q.bias"),
            ("model.layers.0.post_attention_layernorm.weight", "blk.0.ffn_norm.weight"),
            ("model.layers.3.self_attn.k_norm.weight", "blk.3.attn_k_norm.weight"),
            ("lm_head.weight", "output.weight"),
        ] {
            assert_eq!(stored_name(hugging_face, &LmConfig::default()), gguf);
        }
        let gemma = LmConfig { output_norms: true, ..LmConfig::default() };
        for (hugging_face, gguf) in [
            ("model.layers.0.post_attention_layernorm.weight", "blk.0.post_attention_norm.weight"),
            ("model.layers.0.pre_feedforward_layernorm.weight", "blk.0.ffn_norm.weight"),
            ("model.layers.0.mlp.up_proj.weight", "blk.0.ffn_up.weight"),
        ] {
            assert_eq!(stored_name(hugging_face, &gemma), gguf);
        }
    }

    #[test]
    fn ends_of_turns_are_found_by_their_text() {
        let text = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
        let tokens = ["<bos>", "<eos>", "a", "<start_of_turn>", "<end_of_turn>", "<|end|>"].map(text).concat();
        let list = [&8u32.to_le_bytes()[..], &6u64.to_le_bytes(), &tokens].concat();
        let writer = roll_testing::GgufWriter::default()
            .value("general.architecture", 8, &text("gemma2"))
            .value("tokenizer.ggml.tokens", 9, &list)
            .value("tokenizer.ggml.eos_token_id", 4, &1u32.to_le_bytes());
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.gguf");
        std::fs::write(&path, writer.bytes()).unwrap();
        assert_eq!(Metadata::new(&GgufFile::open(&path).unwrap()).unwrap().end_ids(), [1, 4, 5]);
    }

    #[test]
    fn separates_the_halves_of_heads() {
        // Two heads of four channels: each is stored as 0 2 1 3 (pairs), wanted as 0 1 2 3 (halves).
        let stored = Tensor::new(vec![0.0f32, 2.0, 1.0, 3.0, 10.0, 12.0, 11.0, 13.0], [8, 1]).unwrap();
        let apart = reordered(&stored, &separate_halves(8, 2)).unwrap();
        assert_eq!(apart.f32s().unwrap(), [0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0]);
    }

    #[test]
    fn default_splits_as_llama_cpp_does() {
        // Ids of single bytes, and of the merged tokens that GPT-2's rules would find.
        let texts = ["a", "(", "\u{120}", "1", "2", "3", "4", "\u{120}(", "\u{120}a", "\u{120}1", "34", "23"];
        let vocab: serde_json::Map<String, Json> =
            texts.iter().enumerate().map(|(id, text)| (text.to_string(), json!(id))).collect();
        let encode = |kind: &str, text: &str| {
            let file = json!({
                "version": "1.0", "added_tokens": [], "normalizer": null,
                "pre_tokenizer": pre_tokenizer(kind).unwrap().0, "decoder": byte_level(Splitting::Gpt2),
                "model": { "type": "BPE", "vocab": vocab,
                    "merges": ["\u{120} (", "\u{120} a", "\u{120} 1", "3 4", "2 3"] },
            });
            Tokenizer::parse(file.to_string().as_bytes()).unwrap().encode(text).unwrap()
        };
        assert_eq!(encode("gpt-2", "a ( a"), [0, 7, 8]);
        assert_eq!(encode("default", "a ( a"), [0, 2, 1, 8]);
        assert_eq!(encode("gpt-2", " 1234"), [9, 4, 10]);
        assert_eq!(encode("default", " 1234"), [2, 3, 11, 6]);
        assert_eq!(encode("default", "1134"), [3, 3, 5, 6]);
        assert_eq!(encode("gpt-2", "1134"), [3, 3, 10]);
    }

    #[test]
    #[ignore = "needs llama.cpp's directory `models`, named by ROLL_TEST_VOCABULARIES"]
    fn tokens_are_those_of_llama_cpp() {
        let directory = std::env::var_os("ROLL_TEST_VOCABULARIES").unwrap();
        let (mut compared, mut refused) = (BTreeMap::<String, usize>::new(), Vec::new());
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            let beside = |end: &str| std::fs::read_to_string(path.with_file_name(format!("{name}.{end}")));
            let (Ok(texts), Ok(tokens)) = (beside("inp"), beside("out")) else { continue };
            let file = GgufFile::open(&path).unwrap();
            let tokenizer = match Vocabulary::read(&file).and_then(|vocabulary| vocabulary.unwrap().tokenizer(&file)) {
                Ok(tokenizer) => tokenizer,
                Err(reason) => {
                    refused.push(format!("{name}: {reason}"));
                    continue;
                }
            };
            for (text, ids) in texts.split("\n__ggml_vocab_test__\n").zip(tokens.lines()) {
                let expected: Vec<u32> = ids.split_whitespace().map(|id| id.parse().unwrap()).collect();
                assert_eq!(tokenizer.encode(text).unwrap(), expected, "{name}: {text:?}");
                *compared.entry(name.clone()).or_default() += 1;
            }
        }
        eprintln!("{compared:#?}\nrefused: {refused:#?}");
        assert!(compared.len() >= 5, "{refused:#?}");
    }

    #[test]
    fn rejects_unknown_pre_tokenizers_by_name() {
        assert!(pre_tokenizer("tekken").unwrap_err().contains("tekken"));
        for known in ["default", "smollm", "qwen2", "llama-bpe"] {
            assert!(pre_tokenizer(known).is_ok());
        }
    }
}
