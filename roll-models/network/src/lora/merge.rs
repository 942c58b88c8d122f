//! Merges a LoRA into the weights that it was trained on.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use roll_core::{DType, Tensor};

use crate::weights::{Change, ChangeOnRead, Checkpoint, Outputs, WeightsError, rewrite};

use super::error::{LoraError, first_names, not_in_base};
use super::layer_names::{flat, is_of_image_branch, language_names, official, official_parameter};
use super::read::layer_error;
use super::{Difference, Layer, Lora};

/// Options of a merge.
#[derive(Clone, Debug)]
pub struct MergeOptions {
    /// Factor of all additions, in addition to the LoRA's own scale `alpha / rank`.
    pub strength: f64,
    /// Dtype of the output's float tensors. `None` keeps the dtype of each tensor.
    pub dtype: Option<DType>,
    /// Whether layers of the LoRA that are not in the base are left out instead of failing.
    pub allow_missing: bool,
}

impl Default for MergeOptions {
    fn default() -> Self {
        Self { strength: 1.0, dtype: None, allow_missing: false }
    }
}

/// Result of a merge.
#[derive(Clone, Debug)]
pub struct MergeResult {
    /// The written files.
    pub files: Vec<PathBuf>,
    /// Number of changed tensors.
    pub changed: usize,
    /// Names in the LoRA that the base does not have.
    pub missing: Vec<String>,
}

/// Writes `base + strength * alpha / rank * B A` to `out`: a file if the name ends in `.safetensors`, otherwise a new
/// directory with the shards of the base.
///
/// Sums and products are f32 and are rounded once, to the dtype of the output. Tensors that the LoRA does not touch are
/// copied bit for bit. Memory holds a few megabytes of the base at a time. `progress` receives the number of source
/// bytes of each piece.
///
/// Layers match under official, diffusers and underscored names. Fails without writing anything if a layer is not in
/// the base (unless `allow_missing`), if no layer is, or if shapes differ.
pub fn merge_lora(
    base: &Checkpoint,
    lora: &Lora,
    out: &Path,
    options: &MergeOptions,
    progress: &mut dyn FnMut(u64),
) -> Result<MergeResult, LoraError> {
    let mut deltas = Deltas::find(base, lora, options)?;
    let is_file = out.extension().is_some_and(|e| e.eq_ignore_ascii_case("safetensors"));
    let outputs = if is_file { Outputs::one_file(base, out) } else { Outputs::like(base, out) };
    let mut metadata = base.metadata();
    if is_file {
        metadata.extend(config_entries(base));
    }
    let files = rewrite(base, &outputs, options.dtype, &mut deltas, &metadata, progress)?;
    Ok(MergeResult { files, changed: deltas.by_key.len(), missing: deltas.missing })
}

/// A LoRA, its strength, and the file that it was read from.
pub type LoraOfFile = (Lora, f64, PathBuf);

/// The file names with their strengths, for messages and headers: `a.safetensors, b.safetensors=0.5`.
pub fn names_of(loras: &[LoraOfFile]) -> String {
    let name = |(_, strength, path): &LoraOfFile| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if *strength == 1.0 { name } else { format!("{name}={strength}") }
    };
    loras.iter().map(name).collect::<Vec<_>>().join(", ")
}

/// Returns `base` with `loras` (with their strengths and paths) added to its weights whenever they are read. The values
/// are those of [`merge_lora`], except that several LoRAs are added before the sum is rounded.
///
/// Fails if a layer of a LoRA is not in the base. Two kinds of layers are left out with a warning instead: layers of
/// the image encoder's branch, which LightX2V's LoRAs for Wan2.2 have although Wan2.2 does not, and a patch embedding
/// of another number of channels, as in a distillation of T2V that is used on I2V.
pub fn merged_on_read(base: Checkpoint, loras: &[LoraOfFile]) -> Result<Checkpoint, LoraError> {
    let mut all_deltas = Vec::new();
    for (lora, strength, path) in loras {
        // Missing names are allowed at first. A name that is missing without a known reason fails below.
        let options = MergeOptions { strength: *strength, allow_missing: true, ..MergeOptions::default() };
        let deltas = Deltas::find(&base, lora, &options)?;
        let LeftOut { image, patches, other } = deltas.left_out(&base);
        if !other.is_empty() {
            let problem =
                format!("{}; `roll merge-lora --allow-missing` merges the rest", not_in_base(&other, deltas.total));
            return Err(LoraError::invalid(path, problem));
        }
        if !image.is_empty() {
            warn_of_image_branch(path, &image);
        }
        if !patches.is_empty() {
            tracing::warn!(
                "{}: its patch embedding has another number of channels than the base's and is left out; the LoRA was made \
                 for another task (T2V, I2V)",
                path.display()
            );
        }
        all_deltas.push(deltas);
    }
    Ok(base.with_change(Arc::new(OnRead(all_deltas))))
}

/// Warns that a base without a branch for an image encoder leaves out these layers of a LoRA.
pub(super) fn warn_of_image_branch(path: &Path, layers: &[&str]) {
    tracing::warn!(
        "{}: the base has no branch for an image encoder, so {} layers are left out: {}",
        path.display(),
        layers.len(),
        first_names(layers.iter().copied(), 4)
    );
}

/// Whether a base lacks `layer` of a LoRA because the base has no branch for an image encoder. `has` returns whether
/// the base has a layer. If the base has such a branch, or lacks even the block of the layer, the reason is another
/// one.
pub(super) fn lacks_image_branch(layer: &str, has: impl Fn(&str) -> bool) -> bool {
    let base_has_no_branch = || !has("blocks.0.cross_attn.k_img") && !has("img_emb.proj.1");
    let layer_of_same_block = layer.split_once(".cross_attn.").map(|(block, _)| format!("{block}.cross_attn.k"));
    is_of_image_branch(layer) && base_has_no_branch() && layer_of_same_block.is_none_or(|layer| has(&layer))
}

/// Names of a LoRA that a base does not have, by the reason.
struct LeftOut<'a> {
    /// Layers of the branch for an image encoder, which the base does not have.
    image: Vec<&'a str>,
    /// The patch embedding, if it has another number of channels, because the LoRA is for another task.
    patches: Vec<&'a str>,
    /// All other names: the LoRA is not for this base.
    other: Vec<&'a str>,
}

/// Whether the shape `base` of a convolution's weight and the shape `lora`, for which a LoRA is made, differ in the
/// number of input channels only, as for the patch embeddings of T2V and I2V.
fn differs_in_channels(base: &[usize], lora: &[usize]) -> bool {
    match (base, lora) {
        // Both are convolutions: [out, in, kernel].
        ([out, input, kernel @ ..], [lora_out, lora_input, lora_kernel @ ..]) if kernel == lora_kernel => {
            out == lora_out && input != lora_input
        }
        // The matrix A of the LoRA is flattened: [out, in * kernel].
        ([out, input, kernel @ ..], [lora_out, columns]) => {
            let kernel: usize = kernel.iter().product();
            out == lora_out && kernel > 0 && columns.is_multiple_of(kernel) && columns / kernel != *input
        }
        _ => false,
    }
}

/// The LoRAs of [`merged_on_read`].
struct OnRead(Vec<Deltas>);

impl ChangeOnRead for OnRead {
    fn touches(&self, key: &str) -> bool {
        self.0.iter().any(|deltas| deltas.by_key.contains_key(key))
    }

    fn apply(&self, key: &str, values: &mut [f32]) -> Result<(), WeightsError> {
        for deltas in &self.0 {
            for delta in deltas.by_key.get(key).into_iter().flatten().map(Delta::to_f32) {
                delta.add_to(0..delta.rows(values.len()), values);
            }
            if !values.iter().all(|value| value.is_finite()) {
                return Err(WeightsError::tensor(&deltas.base_path, key, "with the LoRA on it, it is not finite"));
            }
        }
        Ok(())
    }
}

/// Facts in the `config.json` next to the base that cannot be derived from its weights. They go into the header of a
/// single file, which has no `config.json`.
fn config_entries(base: &Checkpoint) -> Vec<(String, String)> {
    let config = base.config_json().unwrap_or_default();
    // Pairs of key in the header and key in `config.json`.
    let copied = [("num_heads", "num_heads"), ("num_heads", "num_attention_heads"), ("text_len", "text_len")];
    copied
        .iter()
        .filter_map(|(ours, theirs)| Some((ours.to_string(), config.get(*theirs)?.as_u64()?.to_string())))
        .collect()
}

/// What one LoRA adds to the tensors of a base.
struct Deltas {
    /// The additions to each tensor, by its key in the base.
    by_key: HashMap<String, Vec<Delta<Tensor>>>,
    /// Names of layers and differences of the LoRA that the base does not have.
    missing: Vec<String>,
    /// The names in `missing` that are a patch embedding of another number of channels.
    other_channels: Vec<String>,
    /// Number of layers and differences of the LoRA.
    total: usize,
    /// The path of the base.
    base_path: PathBuf,
    /// The key of the tensor whose rows are being changed. Only one tensor is converted to f32 at a time.
    current_key: String,
    /// The additions to the tensor `current_key`, in f32.
    current: Vec<Delta<Vec<f32>>>,
}

/// The keys of a base's tensors by the flat name of the parameter. Names are compared with underscores, because kohya's
/// names have lost the dots. No two parameters differ in dots and underscores only.
struct BaseKeys<'a>(HashMap<String, &'a str>);

impl<'a> BaseKeys<'a> {
    fn new(base: &'a Checkpoint) -> Self {
        let with_names = base.keys().map(|key| {
            let name = match bare(key).rsplit_once('.') {
                Some((layer, end @ ("weight" | "bias"))) => format!("{}_{end}", flat(&official(layer))),
                _ => flat(&official_parameter(bare(key))),
            };
            (name, key)
        });
        Self(with_names.collect())
    }

    /// The key of the parameter `end` (`weight`, `bias`, `modulation`) of a layer.
    fn of(&self, layer: &str, end: &str) -> Option<&'a str> {
        let key = |layer: &str| self.0.get(&format!("{}_{end}", flat(layer))).copied();
        key(layer).or_else(|| language_names(layer).find_map(|other| key(&other)))
    }

    /// The key of the parameter with this whole name.
    fn of_parameter(&self, name: &str) -> Option<&'a str> {
        self.0.get(&flat(name)).copied()
    }
}

/// An addition to a tensor; `T` is a [`Tensor`], or its values in f32.
enum Delta<T> {
    /// `scale * up down`: `[rows, rank]` times `[rank, columns]`.
    LowRank { up: T, down: T, rank: usize, scale: f32 },
    /// `scale * values`.
    Whole { values: T, scale: f32 },
}

impl Delta<Tensor> {
    fn to_f32(&self) -> Delta<Vec<f32>> {
        match self {
            Self::LowRank { up, down, rank, scale } => {
                Delta::LowRank { up: up.to_f32_vec(), down: down.to_f32_vec(), rank: *rank, scale: *scale }
            }
            Self::Whole { values, scale } => Delta::Whole { values: values.to_f32_vec(), scale: *scale },
        }
    }
}

impl Delta<Vec<f32>> {
    /// Number of rows of the tensor, which has `count` values.
    fn rows(&self, count: usize) -> usize {
        match self {
            Self::LowRank { up, rank, .. } => up.len() / rank,
            Self::Whole { .. } => count,
        }
    }

    /// Adds to the rows `rows` of the tensor; `values` are these rows.
    fn add_to(&self, rows: Range<usize>, values: &mut [f32]) {
        match self {
            Self::LowRank { up, down, rank, scale } => {
                add_product(values, &up[rows.start * rank..rows.end * rank], down, *rank, *scale);
            }
            Self::Whole { values: added, scale } => {
                let row_length = values.len() / rows.len().max(1);
                values.iter_mut().zip(&added[rows.start * row_length..]).for_each(|(v, d)| *v += scale * d);
            }
        }
    }
}

/// Prefixes that programs put before the names of a base.
const BASE_PREFIXES: &[&str] = &["model.diffusion_model.", "diffusion_model."];

/// The key without its prefix in [`BASE_PREFIXES`], if it has one.
fn bare(key: &str) -> &str {
    BASE_PREFIXES.iter().find_map(|prefix| key.strip_prefix(prefix)).unwrap_or(key)
}

impl Deltas {
    /// Finds the tensor of `base` for each layer and difference of `lora`.
    fn find(base: &Checkpoint, lora: &Lora, options: &MergeOptions) -> Result<Self, LoraError> {
        let keys = BaseKeys::new(base);
        let mut deltas = Self {
            by_key: HashMap::new(),
            missing: Vec::new(),
            other_channels: Vec::new(),
            total: 0,
            base_path: base.path().to_path_buf(),
            current_key: String::new(),
            current: Vec::new(),
        };
        for (name, layer) in &lora.layers {
            deltas.add_layer(base, &keys, name, layer, options.strength)?;
        }
        for (name, difference) in &lora.differences {
            deltas.add_difference(base, &keys, name, difference, options.strength)?;
        }
        deltas.check(base, lora, options)?;
        Ok(deltas)
    }

    /// Adds the product of a layer, and its bias. A layer is merged as a whole or not at all.
    fn add_layer(
        &mut self,
        base: &Checkpoint,
        keys: &BaseKeys<'_>,
        name: &str,
        layer: &Layer,
        strength: f64,
    ) -> Result<(), LoraError> {
        self.total += 1;
        let bias_key = keys.of(name, "bias");
        let lacks_bias = layer.bias.is_some() && bias_key.is_none();
        let (Some(weight_key), false) = (keys.of(name, "weight"), lacks_bias) else {
            self.missing.push(name.to_string());
            return Ok(());
        };
        let product_shape = [&layer.up.shape()[..1], &layer.down.shape()[1..]].concat();
        if self.is_for_other_channels(base, weight_key, name, &product_shape) {
            self.leave_out_patches(name.to_string());
            return Ok(());
        }
        check_shape(base, weight_key, name, &product_shape)?;
        let scale = (strength * layer.scale()) as f32;
        let (up, down) = (layer.up.clone(), layer.down.clone());
        self.add(weight_key, Delta::LowRank { up, down, rank: layer.rank(), scale });
        match (&layer.bias, bias_key) {
            (Some(bias), Some(key)) => self.add_whole(base, key, name, bias, scale),
            _ => Ok(()),
        }
    }

    /// Adds the whole differences of the parameters of the layer `name`.
    fn add_difference(
        &mut self,
        base: &Checkpoint,
        keys: &BaseKeys<'_>,
        name: &str,
        difference: &Difference,
        strength: f64,
    ) -> Result<(), LoraError> {
        // If `name` is a parameter that is neither a weight nor a bias, its difference is read as one of a `weight`.
        let weight_key = keys.of(name, "weight").or_else(|| keys.of_parameter(name));
        let parts = [
            ("weight", weight_key, &difference.weight),
            ("bias", keys.of(name, "bias"), &difference.bias),
            ("modulation", keys.of(name, "modulation"), &difference.modulation),
        ];
        for (end, key, tensor) in parts {
            let Some(tensor) = tensor else { continue };
            self.total += 1;
            match key {
                Some(key) if self.is_for_other_channels(base, key, name, tensor.shape()) => {
                    self.leave_out_patches(format!("{name}.{end}"));
                }
                Some(key) => self.add_whole(base, key, name, tensor, strength as f32)?,
                None => self.missing.push(format!("{name}.{end}")),
            }
        }
        Ok(())
    }

    /// Whether `layer` is the patch embedding and has another number of channels than in the base. Its shape depends on
    /// the task, unlike the shapes of all other layers. `lora_shape` is the shape of the LoRA's addition.
    fn is_for_other_channels(&self, base: &Checkpoint, key: &str, layer: &str, lora_shape: &[usize]) -> bool {
        let base_shape = base.info(key).map(|info| info.shape.as_slice()).unwrap_or_default();
        layer == "patch_embedding" && base_shape.len() > 2 && differs_in_channels(base_shape, lora_shape)
    }

    /// Notes that `name` is a patch embedding of another number of channels.
    fn leave_out_patches(&mut self, name: String) {
        self.other_channels.push(name.clone());
        self.missing.push(name);
    }

    /// The missing names by the reason why the base does not have them.
    fn left_out(&self, base: &Checkpoint) -> LeftOut<'_> {
        let base_layers: HashSet<String> =
            base.keys().filter_map(|key| Some(official(bare(key).strip_suffix(".weight")?))).collect();
        let (patches, missing): (Vec<&str>, Vec<&str>) = self
            .missing
            .iter()
            .map(String::as_str)
            .partition(|name| self.other_channels.iter().any(|other| other == name));
        // Names of differences end in the parameter.
        let layer_of = |name: &str| {
            let layer = [".weight", ".bias", ".modulation"].into_iter().find_map(|end| name.strip_suffix(end));
            layer.unwrap_or(name).to_string()
        };
        let (image, other) = missing
            .into_iter()
            .partition(|name| lacks_image_branch(&layer_of(name), |layer| base_layers.contains(layer)));
        LeftOut { image, patches, other }
    }

    fn add(&mut self, key: &str, delta: Delta<Tensor>) {
        self.by_key.entry(key.to_string()).or_default().push(delta);
    }

    /// Adds the difference of a whole parameter. Fails if the base's tensor has another shape.
    fn add_whole(
        &mut self,
        base: &Checkpoint,
        key: &str,
        layer: &str,
        tensor: &Tensor,
        scale: f32,
    ) -> Result<(), LoraError> {
        let found = base.info(key).map(|info| info.shape.clone()).unwrap_or_default();
        if found != tensor.shape() {
            let expected = format!("the shape {:?} of its difference for `{key}`", tensor.shape());
            return Err(layer_error(base.path(), layer, &expected, &format!("{found:?}")));
        }
        self.add(key, Delta::Whole { values: tensor.clone(), scale });
        Ok(())
    }

    /// Fails if nothing of the LoRA is in the base, if a tensor is stored in a type that cannot be changed (eight
    /// bits), or if names are missing and `options` do not allow that.
    fn check(&self, base: &Checkpoint, lora: &Lora, options: &MergeOptions) -> Result<(), LoraError> {
        if self.by_key.is_empty() {
            return Err(LoraError::NothingMatched {
                base: base.path().into(),
                found: first_names(base.keys(), 3),
                wanted: first_names(lora.layers.keys().chain(lora.differences.keys()).map(String::as_str), 3),
            });
        }
        let has_unsupported_type = |key: &&String| base.info(key).is_some_and(|info| info.dtype.is_none());
        if let Some(key) = self.by_key.keys().filter(has_unsupported_type).min() {
            let found = base.info(key).map(|info| info.stored.clone()).unwrap_or_default();
            let problem = format!(
                "`{key}` is stored in {found}, into which no LoRA can be merged: merge into the base in bf16 or f32, and \
                 let `model.weights_dtype: fp8` or `int8` round the result at loading"
            );
            return Err(LoraError::invalid(base.path(), problem));
        }
        if self.missing.is_empty() || options.allow_missing {
            return Ok(());
        }
        let missing: Vec<&str> = self.missing.iter().map(String::as_str).collect();
        let problem = format!("{}; --allow-missing merges the rest", not_in_base(&missing, self.total));
        Err(LoraError::invalid(base.path(), problem))
    }
}

impl Change<LoraError> for Deltas {
    fn touches(&self, key: &str) -> bool {
        self.by_key.contains_key(key)
    }

    fn apply(&mut self, key: &str, rows: Range<usize>, values: &mut [f32]) -> Result<(), LoraError> {
        if self.current_key != key {
            self.current = self.by_key.get(key).into_iter().flatten().map(Delta::to_f32).collect();
            self.current_key = key.to_string();
        }
        self.current.iter().for_each(|delta| delta.add_to(rows.clone(), values));
        if !values.iter().all(|v| v.is_finite()) {
            return Err(LoraError::NotFinite {
                path: self.base_path.clone(),
                what: "merged weight",
                name: key.to_string(),
            });
        }
        Ok(())
    }
}

/// Fails unless the base's weight `[out, in, ...]` fits `product_shape`, the shape of the product of `B [out, rank]`
/// and `A [rank, in, ...]`.
fn check_shape(base: &Checkpoint, key: &str, name: &str, product_shape: &[usize]) -> Result<(), LoraError> {
    let found = base.info(key).map(|info| info.shape.clone()).unwrap_or_default();
    // A convolution with a kernel of one may be stored as a matrix, and a matrix as such a convolution.
    let as_matrix = |shape: &[usize]| [shape.first().copied().unwrap_or(1), shape.iter().skip(1).product()];
    if as_matrix(&found) != as_matrix(product_shape) {
        let expected = format!("{product_shape:?}, by the LoRA, for `{key}`");
        return Err(layer_error(base.path(), name, &expected, &format!("{found:?}")));
    }
    Ok(())
}

/// Computes `values += scale * up * down`, a product of matrices. All matrices are row-major.
fn add_product(values: &mut [f32], up: &[f32], down: &[f32], rank: usize, scale: f32) {
    /// Values between two neighbours of a row.
    const COLUMN_STRIDE: isize = 1;
    /// The number with which gemm uses all of rayon's threads.
    const ALL_THREADS: usize = 0;
    if rank == 0 || values.is_empty() {
        return;
    }
    let (rows, columns) = (up.len() / rank, down.len() / rank);
    assert_eq!(values.len(), rows * columns, "checked by `check_shape`");
    let (reads_values, values_factor, conjugates) = (true, 1.0, false);
    // SAFETY: the lengths of the three slices match the given rows and columns, row-major, and `values` is a mutable
    // borrow, so it does not overlap the other slices.
    unsafe {
        gemm::gemm(
            rows,
            columns,
            rank,
            values.as_mut_ptr(),
            COLUMN_STRIDE,
            columns as isize,
            reads_values,
            up.as_ptr(),
            COLUMN_STRIDE,
            rank as isize,
            down.as_ptr(),
            COLUMN_STRIDE,
            columns as isize,
            values_factor,
            scale,
            conjugates,
            conjugates,
            conjugates,
            gemm::Parallelism::Rayon(ALL_THREADS),
        );
    }
}
