//! Keys of the transformer's weights in ComfyUI's single files, and in the published checkpoints, whose names are those
//! of diffusers.

use roll_core::{Error, Result, StateDict, Tensor};

/// The projections that a single file stacks along the rows of `attention.qkv`, in this order.
pub const PROJECTIONS: [&str; 3] = ["to_q", "to_k", "to_v"];

/// Prefixes that a whole key may have.
const PREFIXES: [&str; 2] = ["model.diffusion_model.", "diffusion_model."];

/// A weight of some single files that the network does not read.
const STRAY: &str = "norm_final.weight";

/// Parts of a module's name: in a single file, in the checkpoint.
const RENAMED: [(&str, &str); 5] = [
    (".attention.out", ".attention.to_out.0"),
    (".attention.q_norm", ".attention.norm_q"),
    (".attention.k_norm", ".attention.norm_k"),
    ("x_embedder", "all_x_embedder.2-1"),
    ("final_layer", "all_final_layer.2-1"),
];

/// The end of the name of a fused module.
const FUSED: &str = ".attention.qkv";

/// The modules of a checkpoint that a module of a single file contains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Module {
    /// One module.
    One(String),
    /// Those of q, k and v, stacked along the rows.
    Fused([String; 3]),
}

/// Returns the checkpoint's modules for a module of a single file. Names that both share are returned unchanged, as are
/// names of the checkpoint.
pub fn checkpoint_module(module: &str) -> Module {
    if let Some(block) = module.strip_suffix(FUSED) {
        return Module::Fused(PROJECTIONS.map(|projection| format!("{block}.attention.{projection}")));
    }
    for (single, checkpoint) in RENAMED {
        match single.strip_prefix('.') {
            Some(_) => {
                if let Some(block) = module.strip_suffix(single) {
                    return Module::One(format!("{block}{checkpoint}"));
                }
            }
            None => {
                if let Some(rest) = module.strip_prefix(single).filter(|rest| rest.is_empty() || rest.starts_with('.'))
                {
                    return Module::One(format!("{checkpoint}{rest}"));
                }
            }
        }
    }
    Module::One(module.to_string())
}

/// Returns the module of a single file that contains a module of the checkpoint.
pub fn single_file_module(module: &str) -> String {
    for projection in PROJECTIONS {
        if let Some(block) = module.strip_suffix(&format!(".attention.{projection}")) {
            return format!("{block}{FUSED}");
        }
    }
    for (single, checkpoint) in RENAMED {
        let found = match single.strip_prefix('.') {
            Some(_) => module.strip_suffix(checkpoint).map(|block| format!("{block}{single}")),
            None => module.strip_prefix(checkpoint).map(|rest| format!("{single}{rest}")),
        };
        if let Some(found) = found {
            return found;
        }
    }
    module.to_string()
}

/// A weight of the checkpoint in a file's tensor: the whole tensor, or one third of its rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Name of the weight in the checkpoint.
    pub name: String,
    /// Number of the third; `None` is the whole tensor.
    pub third: Option<usize>,
}

/// Returns the weights of the checkpoint that the tensor `key` of a file contains. `key` is of the checkpoint or of a
/// single file, with or without a prefix. A tensor that the network does not read contains none.
pub fn parts(key: &str) -> Vec<Part> {
    let bare = PREFIXES.iter().find_map(|prefix| key.strip_prefix(prefix)).unwrap_or(key);
    if bare == STRAY {
        return Vec::new();
    }
    let Some((module, parameter)) = bare.rsplit_once('.').filter(|(_, end)| ["weight", "bias"].contains(end)) else {
        return vec![Part { name: bare.to_string(), third: None }];
    };
    let part = |module: String, third| Part { name: format!("{module}.{parameter}"), third };
    match checkpoint_module(module) {
        Module::One(module) => vec![part(module, None)],
        Module::Fused(modules) => modules.into_iter().enumerate().map(|(i, module)| part(module, Some(i))).collect(),
    }
}

/// Renames the weights of a single file, with or without a prefix, to those of the checkpoint, and divides fused
/// projections. Weights under the names of the checkpoint are returned unchanged.
///
/// # Errors
/// Fails if the rows of a fused projection are not a multiple of three, and if a weight stands in the file under two
/// names.
pub fn to_checkpoint(state: StateDict) -> Result<StateDict> {
    let mut renamed = StateDict::new();
    for (key, tensor) in state {
        for Part { name, third } in parts(&key) {
            let tensor = third.map_or_else(|| Ok(tensor.clone()), |i| rows_of_part(&tensor, i, &key))?;
            if renamed.insert(name, tensor).is_some() {
                return Err(under_two_names(&key));
            }
        }
    }
    Ok(renamed)
}

/// The error for a weight that a file has twice.
pub(crate) fn under_two_names(key: &str) -> Error {
    Error::Misuse(format!("the weight `{key}` stands in the file under two names"))
}

/// The `i`-th third of the rows of a fused weight, in its dtype.
pub(crate) fn rows_of_part(fused: &Tensor, i: usize, key: &str) -> Result<Tensor> {
    let [rows, rest @ ..] = fused.shape() else {
        return Err(Error::shape(format!("the weight `{key}`"), "[3 * dim, ...]", fused.shape()));
    };
    if rows % PROJECTIONS.len() != 0 {
        let expected = "rows of q, k and v, a multiple of 3";
        return Err(Error::shape(format!("the weight `{key}`"), expected, fused.shape()));
    }
    let part = fused.as_bytes().len() / PROJECTIONS.len();
    let bytes = fused.as_bytes()[i * part..(i + 1) * part].to_vec();
    Tensor::from_bytes(fused.dtype(), [&[rows / PROJECTIONS.len()], rest].concat(), std::sync::Arc::new(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_weight_under_two_names_is_refused() {
        for pair in [
            ["layers.0.attention.out.weight", "layers.0.attention.to_out.0.weight"],
            ["layers.0.attention.qkv.weight", "layers.0.attention.to_k.weight"],
            ["diffusion_model.x_pad_token", "x_pad_token"],
        ] {
            let state = pair.map(|key| (key.to_string(), Tensor::zeros([3, 1])));
            let error = to_checkpoint(state.into()).unwrap_err().to_string();
            assert!(error.contains("under two names"), "{error}");
        }
    }
}
