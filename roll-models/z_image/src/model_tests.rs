//! The composed model on a small checkpoint with random weights.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use roll_core::{BuildContext, Noise, Purpose};
use roll_network::lora::{self, Convention, LoraFile, Names, WriteOptions, write_lora};
use roll_network::weights::{Checkpoint, save_safetensors};

use super::*;
use crate::init_tiny::init_tiny;
use crate::keys;
use crate::options::ZImageOptions;

fn options(directory: &Path) -> ZImageOptions {
    ZImageOptions { model_path: Some(directory.into()), lora_rank: Some(2), ..ZImageOptions::default() }
}

fn opened(options: &ZImageOptions) -> Result<ZImage> {
    crate::open(options, &BuildContext::new("flex"))
}

fn input(prompt: &str) -> ConditionInput {
    ConditionInput { prompt: prompt.into(), frames: 1, size: [32, 48], ..ConditionInput::default() }
}

fn noise(shape: &[usize], sample: u64) -> Tensor {
    Noise::new(1).normal(Purpose::Synthetic, 0, sample, shape).unwrap()
}

/// The sum of decoded pixels times `cotangent` after one step, and its pullback into the LoRA.
fn score(model: &mut ZImage, cotangent: &Tensor, grad: Grad) -> f64 {
    let conditioning = model.encode(&input("a red house")).unwrap();
    let x = noise(&conditioning.latent_shape, 0);
    let (velocity, pull_velocity) = model.velocity(&x, Timestep(800.0), &conditioning, Adapter::On, grad).unwrap();
    let values = x.f32s().unwrap().iter().zip(velocity.f32s().unwrap()).map(|(x, v)| 0.2 * (x - 0.8 * v));
    let latents = Tensor::new(values.collect::<Vec<f32>>(), x.shape()).unwrap();
    let (picture, pull_picture) = model.decode(&latents, grad).unwrap();
    if grad.is_on() {
        let d_latents = pull_picture.unwrap().pull(cotangent).unwrap();
        let d_velocity = d_latents.f32s().unwrap().iter().map(|d| -0.16 * d).collect::<Vec<f32>>();
        pull_velocity.unwrap().pull(&Tensor::new(d_velocity, x.shape()).unwrap()).unwrap();
    }
    let products = picture.f32s().unwrap().iter().zip(cotangent.f32s().unwrap());
    products.map(|(p, c)| f64::from(*p) * f64::from(*c)).sum()
}

#[test]
fn gradients_of_a_decoded_picture_match_central_differences() {
    let dir = tempfile::tempdir().unwrap();
    init_tiny(dir.path(), 3).unwrap();
    let mut model = opened(&options(dir.path())).unwrap();
    let count = model.parameter_count();
    let start: Vec<f32> = noise(&[count], 1).f32s().unwrap().iter().map(|v| 0.1 * v).collect();
    model.write_parameters(&start).unwrap();
    let cotangent = noise(&[1, 3, 32, 48], 2);
    score(&mut model, &cotangent, Grad::Record);
    let mut gradient = vec![0.0; count];
    model.take_gradients(&mut gradient).unwrap();
    // Along the gradient, where rounding is smallest beside the difference.
    let norm = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
    let step = 0.02;
    let mut at = |by: f64| {
        let moved = start.iter().zip(&gradient).map(|(v, g)| v + (by * f64::from(*g) / norm) as f32);
        model.write_parameters(&moved.collect::<Vec<_>>()).unwrap();
        score(&mut model, &cotangent, Grad::Skip)
    };
    let measured = (at(step) - at(-step)) / (2.0 * step);
    assert!(norm > 0.0 && (measured / norm - 1.0).abs() < 0.02, "measured {measured}, gradient {norm}");
}

#[test]
fn an_exported_lora_is_imported_bit_for_bit_and_has_the_names_of_diffusers() {
    let dir = tempfile::tempdir().unwrap();
    init_tiny(dir.path(), 3).unwrap();
    for alpha in [None, Some(3.0)] {
        let options = ZImageOptions { lora_alpha: alpha, ..options(dir.path()) };
        let mut model = opened(&options).unwrap();
        let values = noise(&[model.parameter_count()], 1).f32s().unwrap().to_vec();
        model.write_parameters(&values).unwrap();
        let files = model.export_adapter().unwrap();
        assert!(files["adapter"].contains_key("transformer.layers.0.attention.to_out.0.lora_A.weight"));
        let mut other = opened(&options).unwrap();
        other.import_adapter(&files).unwrap();
        let mut read = vec![0.0; values.len()];
        other.read_parameters(&mut read).unwrap();
        assert_eq!(read, values);
        let mut spoilt = files;
        spoilt.get_mut("adapter").unwrap().remove("transformer.layers.0.attention.to_q.lora_A.weight");
        assert!(other.import_adapter(&spoilt).is_err());
    }
}

/// Writes the transformer of `init-tiny` in `directory` as a single file of ComfyUI. Returns its path.
fn write_single_file(directory: &Path) -> PathBuf {
    let state = Checkpoint::open_any(directory.join("transformer")).unwrap().all().unwrap();
    let mut fused: BTreeMap<String, Vec<Tensor>> = BTreeMap::new();
    // The parts of a fused projection are stacked in the order q, k, v.
    for projection in ["", "to_q.", "to_k.", "to_v."] {
        for (name, tensor) in &state {
            let is_part = keys::PROJECTIONS.iter().any(|part| name.ends_with(&format!(".attention.{part}.weight")));
            let wanted = if projection.is_empty() { !is_part } else { is_part && name.contains(projection) };
            let (module, parameter) = name.rsplit_once('.').unwrap_or(("", name));
            let key = match ["weight", "bias"].contains(&parameter) {
                true => format!("{}.{parameter}", keys::single_file_module(module)),
                false => name.clone(),
            };
            if wanted {
                fused.entry(format!("model.diffusion_model.{key}")).or_default().push(tensor.clone());
            }
        }
    }
    let single: StateDict = fused
        .into_iter()
        .map(|(key, parts)| {
            let mut shape = parts[0].shape().to_vec();
            shape[0] *= parts.len();
            let values: Vec<f32> = parts.iter().flat_map(|part| part.to_f32_vec()).collect();
            (key, Tensor::new(values, shape).unwrap())
        })
        .collect();
    assert!(single.contains_key("model.diffusion_model.layers.0.attention.qkv.weight"));
    let file = directory.join("z_image.safetensors");
    save_safetensors(&file, &single, &BTreeMap::new()).unwrap();
    file
}

#[test]
fn single_files_have_the_bits_of_the_published_directory() {
    let dir = tempfile::tempdir().unwrap();
    init_tiny(dir.path(), 3).unwrap();
    let file = write_single_file(dir.path());
    let published = options(dir.path());
    // The division of a head between the axes is not in a single file; the small network has that of the default.
    let from_single = ZImageOptions { dit_path: Some(file), ..published.clone() };
    let cotangent = noise(&[1, 3, 32, 48], 2);
    let bits = |options: &ZImageOptions| score(&mut opened(options).unwrap(), &cotangent, Grad::Skip).to_bits();
    assert_eq!(bits(&from_single), bits(&published));
    let streamed = ZImageOptions { weight_store: roll_network::options::Placement::Streamed, ..published.clone() };
    assert_eq!(bits(&streamed), bits(&published));
    let refused = ZImageOptions { weight_store: roll_network::options::Placement::Streamed, ..from_single.clone() };
    let error = opened(&refused).err().unwrap().chain();
    assert!(error.contains("model.weight_store"), "{error}");
    for options in [published, from_single] {
        let eight = ZImageOptions { weights_dtype: roll_network::precision::WeightsDType::Int8, ..options };
        let mut model = opened(&eight).unwrap();
        assert!(score(&mut model, &cotangent, Grad::Record).is_finite());
    }
}

#[test]
fn a_single_file_names_the_layers_of_a_fused_lora_as_the_published_directory_does() {
    let dir = tempfile::tempdir().unwrap();
    init_tiny(dir.path(), 3).unwrap();
    let mut model = opened(&options(dir.path())).unwrap();
    model.write_parameters(noise(&[model.parameter_count()], 1).f32s().unwrap()).unwrap();
    let adapter = dir.path().join("adapter.safetensors");
    save_safetensors(&adapter, &model.export_adapter().unwrap()["adapter"], &BTreeMap::new()).unwrap();
    let mut lora = LoraFile::open(&adapter).unwrap().one(None).unwrap();
    assert!(lora::fuse(&mut lora).unwrap());
    assert!(!lora::fuse(&mut lora.clone()).unwrap(), "nothing is left to fuse");
    let fused = dir.path().join("fused.safetensors");
    let options = WriteOptions { convention: Convention::Kohya, names: Names::Official };
    write_lora(&lora, options, &BTreeMap::new(), &fused).unwrap();
    let bases = [dir.path().join("transformer"), write_single_file(dir.path())];
    let named = bases.map(|base| {
        let mut lora = LoraFile::open(&fused).unwrap().one(None).unwrap();
        lora::to_names_of(&mut lora, &fused, &Checkpoint::open_any(base).unwrap()).unwrap();
        lora.layers.into_iter().map(|(name, layer)| (name, layer.up.as_bytes().to_vec())).collect::<Vec<_>>()
    });
    assert!(named[0].iter().any(|(name, _)| name == "layers.0.attention.to_q"));
    assert!(named[0] == named[1]);
}

#[test]
fn refuses_videos_other_sizes_and_missing_files() {
    let dir = tempfile::tempdir().unwrap();
    init_tiny(dir.path(), 3).unwrap();
    let mut model = opened(&options(dir.path())).unwrap();
    assert_eq!(model.video_unit(), VideoUnit { height: 16, width: 16, frames: 1, most_frames: Some(1) });
    assert!(!model.takes_image() && model.schedule().shift == 3.0);
    let video = ConditionInput { frames: 5, ..input("") };
    assert!(model.encode(&video).unwrap_err().to_string().contains("one frame"));
    let odd = ConditionInput { size: [40, 48], ..input("") };
    assert!(model.encode(&odd).unwrap_err().to_string().contains("multiples of 16x16"));
    let error = opened(&ZImageOptions::default()).err().unwrap().to_string();
    assert!(error.contains("`model.dit_path`") && error.contains("init-tiny"), "{error}");
    for (file, name) in [("vae", "vae_path"), ("text_encoder", "text_encoder_path"), ("tokenizer", "tokenizer")] {
        std::fs::rename(dir.path().join(file), dir.path().join("away")).unwrap();
        let error = opened(&options(dir.path())).err().unwrap().chain();
        assert!(error.contains(name), "{error}");
        std::fs::rename(dir.path().join("away"), dir.path().join(file)).unwrap();
    }
}
