//! The adapter of a fused layer: q, k and v of one attention as one layer of three times the rows.

use std::collections::BTreeMap;

use roll_core::{Error, Result, Tensor};
use roll_network::lora::{Layer, Lora};

use crate::keys::{self, Module, PROJECTIONS};

/// Greatest relative difference at which two scales count as equal: files store alpha as f32.
const SCALE_TOLERANCE: f64 = 1e-6;

/// Renames the layers of the checkpoint to those of ComfyUI's single files, the inverse of
/// [`split_fused`](super::split_fused). The adapters of q, k and v become one: their matrices A are stacked, their
/// matrices B are blocks on a diagonal, rank and alpha are tripled. A projection without an adapter, or with a lower
/// rank, is filled with zeros.
///
/// # Errors
/// Fails if q, k and v of an attention differ in `alpha / rank` or in their sizes, or have more than two matrices.
pub fn fuse(lora: &mut Lora) -> Result<()> {
    if let Some(name) = lora.differences.keys().find(|name| is_projection(name)) {
        return Err(Error::Unsupported(format!(
            "the LoRA changes the whole layer `{name}`, which is a part of a fused layer in ComfyUI's single files: \
             expected low-rank layers; merge it into the base with `roll merge-lora`"
        )));
    }
    let mut groups: BTreeMap<String, [Option<Layer>; 3]> = BTreeMap::new();
    for (name, layer) in std::mem::take(&mut lora.layers) {
        let fused = keys::single_file_module(&name);
        match PROJECTIONS.iter().position(|projection| name.ends_with(&format!(".attention.{projection}"))) {
            Some(i) => groups.entry(fused).or_default()[i] = Some(layer),
            None => drop(lora.layers.insert(fused, layer)),
        }
    }
    for (name, parts) in groups {
        let layer = joined(&name, &parts)?;
        lora.layers.insert(name, layer);
    }
    let differences = std::mem::take(&mut lora.differences);
    lora.differences = differences.into_iter().map(|(name, d)| (keys::single_file_module(&name), d)).collect();
    Ok(())
}

fn is_projection(name: &str) -> bool {
    matches!(keys::checkpoint_module(&keys::single_file_module(name)), Module::Fused(_))
}

/// Joins the adapters of q, k and v. `name` is the fused layer's, for error messages.
fn joined(name: &str, parts: &[Option<Layer>; 3]) -> Result<Layer> {
    let refused = |problem: String| Error::Unsupported(format!("the layer `{name}` of the LoRA: {problem}"));
    let present = || parts.iter().flatten();
    let Some(first) = present().next() else { return Err(refused("expected q, k or v, found none".into())) };
    let (&[_, width], &[rows, _]) = (first.down.shape(), first.up.shape()) else {
        let problem = format!("expected two matrices, found {:?} and {:?}", first.down.shape(), first.up.shape());
        return Err(refused(problem));
    };
    let rank = present().map(Layer::rank).max().unwrap_or_default();
    for layer in present() {
        let expected = ([layer.rank(), width], [rows, layer.rank()]);
        if (layer.down.shape(), layer.up.shape()) != (&expected.0, &expected.1) || layer.bias.is_some() {
            return Err(refused(format!(
                "expected q, k and v with A {:?} and B {:?} and without a bias, found {:?} and {:?}{}",
                expected.0,
                expected.1,
                layer.down.shape(),
                layer.up.shape(),
                if layer.bias.is_some() { " with a bias" } else { "" }
            )));
        }
        if (layer.scale() - first.scale()).abs() > SCALE_TOLERANCE * first.scale().abs() {
            return Err(refused(format!(
                "expected one alpha / rank for q, k and v, found {} and {}; write names that are not fused",
                first.scale(),
                layer.scale()
            )));
        }
    }
    let total = PROJECTIONS.len() * rank;
    let (mut down, mut up) = (vec![0.0; total * width], vec![0.0; PROJECTIONS.len() * rows * total]);
    for (i, layer) in parts.iter().enumerate() {
        let Some(layer) = layer else { continue };
        let own_rank = layer.rank();
        down[i * rank * width..][..own_rank * width].copy_from_slice(&layer.down.to_f32_vec());
        for (row, own) in layer.up.to_f32_vec().chunks_exact(own_rank.max(1)).enumerate() {
            up[(i * rows + row) * total + i * rank..][..own_rank].copy_from_slice(own);
        }
    }
    let dtype = first.down.dtype();
    Ok(Layer {
        down: Tensor::new(down, [total, width])?.to_float(dtype)?,
        up: Tensor::new(up, [PROJECTIONS.len() * rows, total])?.to_float(dtype)?,
        // Without alpha, the scale is 1 for every rank.
        alpha: present().any(|layer| layer.alpha.is_some()).then(|| first.scale() * total as f64),
        bias: None,
    })
}

/// Divides the adapter of a fused layer. `None` if its shapes do not allow that.
pub(super) fn divided(layer: &Layer) -> Option<Result<[Layer; 3]>> {
    const PARTS: usize = PROJECTIONS.len();
    let (&[rank, width], &[rows, up_rank]) = (layer.down.shape(), layer.up.shape()) else { return None };
    if rank != up_rank || rows % PARTS != 0 || layer.bias.is_some() {
        return None;
    }
    let (up, down) = (layer.up.to_f32_vec(), layer.down.to_f32_vec());
    let rows = rows / PARTS;
    let part_rank = rank / PARTS;
    let is_outside = |row: usize, column: usize| row / rows != column / part_rank;
    let is_block_diagonal = rank % PARTS == 0
        && part_rank > 0
        && up.iter().enumerate().all(|(i, value)| *value == 0.0 || !is_outside(i / rank, i % rank));
    let part = |i: usize| -> Result<Layer> {
        let own_rows = &up[i * rows * rank..(i + 1) * rows * rank];
        if !is_block_diagonal {
            let up = Tensor::new(own_rows.to_vec(), [rows, rank])?;
            let up = up.to_float(layer.up.dtype())?;
            return Ok(Layer { down: layer.down.clone(), up, alpha: layer.alpha, bias: None });
        }
        let columns = i * part_rank..(i + 1) * part_rank;
        let block: Vec<f32> = own_rows.chunks_exact(rank).flat_map(|row| &row[columns.clone()]).copied().collect();
        let own_down = down[columns.start * width..columns.end * width].to_vec();
        Ok(Layer {
            down: Tensor::new(own_down, [part_rank, width])?.to_float(layer.down.dtype())?,
            up: Tensor::new(block, [rows, part_rank])?.to_float(layer.up.dtype())?,
            // Without alpha, both scales are 1.
            alpha: layer.alpha.map(|alpha| alpha / PARTS as f64),
            bias: None,
        })
    };
    let parts = || Ok([part(0)?, part(1)?, part(2)?]);
    Some(parts())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::path::Path;

    use roll_core::{DType, Noise, Purpose};

    use super::super::split_fused;
    use super::*;
    use crate::init_tiny::dit_config;

    /// A LoRA with layers of these names and ranks, for the transformer of `init-tiny`.
    fn lora(layers: &[(&str, usize, Option<f64>)]) -> Lora {
        let shapes: BTreeMap<_, _> = dit_config().weights().into_iter().collect();
        let layer = |(i, (name, rank, alpha)): (usize, &(&str, usize, Option<f64>))| {
            let [rows, width] = shapes[&format!("{name}.weight")][..] else { panic!("{name} is not a matrix") };
            let noise = |number, shape: [usize; 2]| {
                let drawn = Noise::new(1).normal(Purpose::Synthetic, i as u64, number, &shape).unwrap();
                drawn.to_float(DType::Bf16).unwrap()
            };
            let (down, up) = (noise(0, [*rank, width]), noise(1, [rows, *rank]));
            (name.to_string(), Layer { down, up, alpha: *alpha, bias: None })
        };
        Lora { layers: layers.iter().enumerate().map(layer).collect(), ..Lora::default() }
    }

    fn assert_same(found: &Layer, expected: &Layer, name: &str) {
        assert_eq!(found.alpha, expected.alpha, "{name}");
        for (found, expected) in [(&found.down, &expected.down), (&found.up, &expected.up)] {
            assert_eq!((found.shape(), found.as_bytes()), (expected.shape(), expected.as_bytes()), "{name}");
        }
    }

    #[test]
    fn a_lora_comes_back_bit_for_bit_from_fused_layers() {
        for alpha in [None, Some(3.0)] {
            let names = ["attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0", "feed_forward.w1"];
            let names: Vec<String> = names.iter().map(|name| format!("layers.1.{name}")).collect();
            let mut layers: Vec<_> = names.iter().map(|name| (name.as_str(), 2, alpha)).collect();
            layers.push(("all_final_layer.2-1.linear", 2, alpha));
            let original = lora(&layers);
            let mut changed = original.clone();
            fuse(&mut changed).unwrap();
            let expected =
                ["final_layer.linear", "layers.1.attention.out", "layers.1.attention.qkv", "layers.1.feed_forward.w1"];
            assert_eq!(changed.layers.keys().collect::<Vec<_>>(), expected);
            let fused = &changed.layers["layers.1.attention.qkv"];
            assert_eq!((fused.rank(), fused.alpha), (6, alpha.map(|alpha| 3.0 * alpha)));
            split_fused(&mut changed, Path::new("x"), &dit_config()).unwrap();
            assert_eq!(changed.layers.len(), original.layers.len());
            original.layers.iter().for_each(|(name, layer)| assert_same(&changed.layers[name], layer, name));
        }
    }

    #[test]
    fn a_projection_without_an_adapter_or_of_a_lower_rank_is_filled_with_zeros() {
        let original = lora(&[("layers.0.attention.to_q", 1, Some(1.0)), ("layers.0.attention.to_v", 2, Some(2.0))]);
        let mut changed = original.clone();
        fuse(&mut changed).unwrap();
        assert_eq!(changed.layers["layers.0.attention.qkv"].scale(), 1.0);
        split_fused(&mut changed, Path::new("x"), &dit_config()).unwrap();
        assert_same(&changed.layers["layers.0.attention.to_v"], &original.layers["layers.0.attention.to_v"], "v");
        let is_zero = |tensor: &Tensor| tensor.to_f32_vec().iter().all(|value| *value == 0.0);
        assert!(is_zero(&changed.layers["layers.0.attention.to_k"].up));
        let q = &changed.layers["layers.0.attention.to_q"];
        let up: Vec<f32> = q.up.to_f32_vec().chunks(2).map(|row| row[0]).collect();
        assert_eq!(up, original.layers["layers.0.attention.to_q"].up.to_f32_vec());
    }

    #[test]
    fn projections_of_different_scales_are_refused() {
        let mut lora = lora(&[("layers.0.attention.to_q", 2, Some(1.0)), ("layers.0.attention.to_v", 2, Some(2.0))]);
        let error = fuse(&mut lora).unwrap_err().to_string();
        assert!(error.contains("layers.0.attention.qkv") && error.contains("0.5 and 1"), "{error}");
    }
}
