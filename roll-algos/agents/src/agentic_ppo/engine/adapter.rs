//! The directory of an adapter that engines read: PEFT's two files.

use std::path::Path;

use roll_core::{Error, Model, Result, StateDict, header};
use roll_external::files::write_atomically;
use serde_json::{Map, Value, json};

/// Name of the exported file whose adapter engines can load.
const LORA: &str = "adapter_model";

/// Whether only LoRA matrices of the model are trained, so that an engine can load them beside its own weights.
pub fn is_lora(model: &dyn Model) -> bool {
    let parameters = model.parameters();
    !parameters.is_empty() && parameters.iter().all(|parameter| parameter.name.contains(".lora_"))
}

/// Writes the model's adapter to `directory`, which is created.
pub fn write(model: &dyn Model, directory: &Path) -> Result<()> {
    let mut files = model.export_adapter()?;
    let Some(mut tensors) = files.remove(LORA) else {
        let found = files.into_keys().collect::<Vec<_>>().join(", ");
        return Err(Error::Misuse(format!("the model exports no `{LORA}`, which engines read; it exports: {found}")));
    };
    std::fs::create_dir_all(directory).map_err(Error::file("create the directory", directory))?;
    for (name, text) in header::take(&mut tensors)? {
        if let Some(file) = name.strip_prefix(header::BESIDE) {
            write_atomically(&directory.join(file), text.as_bytes())?;
        }
    }
    write_atomically(&directory.join(format!("{LORA}.safetensors")), &safetensors(&tensors)?)
}

/// The tensors, f32, as a safetensors file. The writer of checkpoints is not used, because it comes with a tensor
/// library.
fn safetensors(tensors: &StateDict) -> Result<Vec<u8>> {
    let (mut entries, mut data) = (Map::new(), Vec::new());
    for (name, tensor) in tensors {
        let begin = data.len();
        data.extend(tensor.f32s()?.iter().flat_map(|value| value.to_le_bytes()));
        let entry = json!({"dtype": "F32", "shape": tensor.shape(), "data_offsets": [begin, data.len()]});
        entries.insert(name.clone(), entry);
    }
    // Readers map the data, which therefore begin at a multiple of eight bytes.
    let mut head = Value::Object(entries).to_string();
    head.extend(std::iter::repeat_n(' ', head.len().next_multiple_of(8) - head.len()));
    Ok([&(head.len() as u64).to_le_bytes()[..], head.as_bytes(), &data].concat())
}
