//! Reads the files of a Hugging Face model directory: JSON, and weights with the names of `transformers` or of
//! open_clip.

use std::path::Path;
use std::sync::Arc;

use burn_tensor::{DType as BurnDType, Device};
use roll_backends::{Weight, Weights};
use roll_core::{DType, Error, Result, Tensor};
use roll_external::files;
use roll_weights::Checkpoint;
use serde::de::DeserializeOwned;

/// Reads a JSON file.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let bytes = files::read_filled(path, files::MAX_TEXT).map_err(Error::file("read", path))?;
    serde_json::from_slice(&bytes).map_err(|e| Error::bad_file(path, e.to_string()))
}

/// Parts of tensor names: the part in `transformers`, and its replacement in open_clip. They are replaced in this
/// order.
const OPEN_CLIP: [(&str, &str); 20] = [
    ("vision_model.embeddings.class_embedding", "visual.class_embedding"),
    ("vision_model.embeddings.position_embedding.weight", "visual.positional_embedding"),
    ("vision_model.embeddings.patch_embedding", "visual.conv1"),
    ("vision_model.pre_layrnorm", "visual.ln_pre"),
    ("vision_model.encoder.layers", "visual.transformer.resblocks"),
    ("vision_model.post_layernorm", "visual.ln_post"),
    ("visual_projection.weight", "visual.proj"),
    ("text_model.embeddings.token_embedding", "token_embedding"),
    ("text_model.embeddings.position_embedding.weight", "positional_embedding"),
    ("text_model.encoder.layers", "transformer.resblocks"),
    ("text_model.final_layer_norm", "ln_final"),
    ("text_projection.weight", "text_projection"),
    (".layer_norm1.", ".ln_1."),
    (".layer_norm2.", ".ln_2."),
    (".self_attn.q_proj.", ".attn.in_proj_"),
    (".self_attn.k_proj.", ".attn.in_proj_"),
    (".self_attn.v_proj.", ".attn.in_proj_"),
    (".self_attn.out_proj.", ".attn.out_proj."),
    (".mlp.fc1.", ".mlp.c_fc."),
    (".mlp.fc2.", ".mlp.c_proj."),
];

/// The tensors of one or several weight files, by their names in `transformers`.
pub struct Tensors {
    checkpoint: Checkpoint,
    is_open_clip: bool,
}

impl Tensors {
    /// Opens `model.safetensors` of a directory, or the shards that `model.safetensors.index.json` lists.
    pub fn in_directory(directory: &Path) -> Result<Self> {
        let files = ["model.safetensors", "model.safetensors.index.json"].map(|name| directory.join(name));
        let Some(file) = files.iter().find(|file| file.exists()) else {
            let problem = "it holds no model.safetensors (nor an index of shards); a pytorch_model.bin is made one by \
                           transformers: AutoModel.from_pretrained(DIR).save_pretrained(OUT)";
            return Err(Error::bad_file(directory, problem));
        };
        Self::open(file)
    }

    /// Opens a weight file, or the shards that an index lists.
    pub fn open(path: &Path) -> Result<Self> {
        // Checkpoints of a training have the weights below `state_dict`; a training on several GPUs adds `module`.
        let without_prefixes = |key: &str| {
            let key = key.strip_prefix("state_dict.").unwrap_or(key);
            Some(key.strip_prefix("module.").unwrap_or(key).to_string())
        };
        let checkpoint = Checkpoint::open(path)?.rename(without_prefixes)?;
        let is_open_clip = checkpoint.contains("visual.class_embedding");
        Ok(Self { checkpoint, is_open_clip })
    }

    /// The paths of the files.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.checkpoint.paths()
    }

    /// The names of all tensors in the files.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.checkpoint.keys()
    }

    /// The shape of a tensor that has the same name in both layouts.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        Some(&self.checkpoint.info(name)?.shape)
    }

    /// Reads a floating-point tensor of this shape. Fails, naming the file and the tensor, if it is missing or
    /// different.
    pub fn tensor(&self, name: &str, expected: &[usize]) -> Result<Tensor> {
        if !self.is_open_clip {
            return self.stored_tensor(name, expected);
        }
        let stored_name =
            OPEN_CLIP.iter().fold(name.to_string(), |name, (part, replacement)| name.replace(part, replacement));
        let third = ["q_proj", "k_proj", "v_proj"].iter().position(|part| name.contains(part));
        match (third, expected) {
            // The projections of queries, keys and values are the thirds of one matrix.
            (Some(third), &[rows, ..]) => {
                let whole_shape = [&[3 * rows], &expected[1..]].concat();
                let values = self.stored_tensor(&stored_name, &whole_shape)?.to_f32_vec();
                let count = values.len() / 3;
                Tensor::new(values[third * count..][..count].to_vec(), expected)
            }
            // The final projections are stored transposed, because open_clip multiplies by them from the right.
            (None, &[rows, columns]) if ["visual.proj", "text_projection"].contains(&stored_name.as_str()) => {
                let values = self.stored_tensor(&stored_name, &[columns, rows])?.to_f32_vec();
                let transposed = (0..rows * columns).map(|i| values[i % columns * rows + i / columns]);
                Tensor::new(transposed.collect(), expected)
            }
            _ => self.stored_tensor(&stored_name, expected),
        }
    }

    /// Reads a tensor by its name in the files. Fails as [`Tensors::tensor`] does.
    fn stored_tensor(&self, name: &str, expected: &[usize]) -> Result<Tensor> {
        let invalid = |problem: String| Err(Error::bad_file(self.checkpoint.path(), problem));
        let Some(info) = self.checkpoint.info(name) else {
            return invalid(format!("its weights hold no tensor `{name}`"));
        };
        if info.shape != expected {
            return invalid(format!("expected `{name}` of {expected:?}, as config.json says, found {:?}", info.shape));
        }
        if !matches!(info.dtype, Some(DType::F32 | DType::F16 | DType::Bf16)) {
            return invalid(format!("`{name}` is of {}; floats are read", info.stored));
        }
        Ok(self.checkpoint.tensor(name)?)
    }

    /// Uploads tensors, given by name and shape, as f32 to `device`.
    pub fn weights(&self, wanted: &[(String, Vec<usize>)], device: &Device) -> Result<Weights> {
        let upload = |(name, shape): &(String, Vec<usize>)| {
            Ok((name.clone(), Weight::new(&self.tensor(name, shape)?, BurnDType::F32, device)))
        };
        Ok(Arc::new(wanted.iter().map(upload).collect::<Result<_>>()?))
    }
}
