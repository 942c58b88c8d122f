//! What the files of a model say of it without being read: its shape, and how its weights are stored.

use std::collections::BTreeMap;

use burn::tensor::DType;
use roll_core::{BuildContext, Error, Result};

use super::super::config::LmConfig;
use super::super::loading::CausalLmOptions;
use super::super::{gguf, source};
use crate::headers::has_all;
use crate::hub::Hub;
use crate::weights::stored_dtype;

/// A model by the headers of its files.
pub(super) struct Stored {
    /// Shape of the network.
    pub(super) config: LmConfig,
    /// Dtype of the weights that are plain numbers.
    pub(super) dtype: DType,
    /// Bytes of the matrices in blocks, by name.
    pub(super) blocks: BTreeMap<String, usize>,
    /// Bytes of the files that are mapped while they are read.
    pub(super) file: usize,
}

impl Stored {
    /// The model that `options` name. Nothing is downloaded.
    pub(super) fn of(options: &CausalLmOptions, context: &BuildContext) -> Result<Self> {
        let Some(path) = &options.model_path else {
            let parts = source::built_in()?;
            let dtype = parts.state.get("model.norm.weight").map_or(DType::F32, stored_dtype);
            return Ok(Self { config: parts.config, dtype, blocks: BTreeMap::new(), file: 0 });
        };
        let here = Hub { remote: None, ..Hub::from_env() };
        let place = source::locate(path, context.resolve(path), &here)?;
        if source::is_gguf(&place)? {
            let (config, blocks) = gguf::header(&place)?;
            let file = std::fs::metadata(&place).map_err(Error::file("read", &place))?.len() as usize;
            // Plain numbers of such a file are read as f32, whatever they are in it.
            return Ok(Self { config, dtype: DType::F32, blocks, file });
        }
        let config = LmConfig::read(&place.join("config.json"))?;
        let file = source::open_weights(&place)?;
        has_all(&file, &config.weights())?;
        let dtype = match file.info("model.norm.weight").and_then(|info| info.dtype) {
            Some(roll_core::DType::Bf16) => DType::BF16,
            _ => DType::F32,
        };
        let bytes = file.keys().filter_map(|key| file.stored_bytes(key)).sum();
        Ok(Self { config, dtype, blocks: BTreeMap::new(), file: bytes })
    }
}
