//! Transformers with eight-bit matrices, compared with the same transformers in bf16.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use burn_tensor::DType;
use roll_backends::{EightBits, Memory, WeightStore};
use roll_core::{
    Adapter, BuildContext, ConditionInput, Conditioning, DiffusionModel, Grad, Model, Noise, Purpose, Result,
    StateDict, Tensor, Timestep,
};
use roll_network::precision::{DeviceTraits, Products, WeightsDType};
use roll_network::weights::{
    Checkpoint, SafetensorsWriter, TensorEntry, from_host, is_auxiliary, resident, save_safetensors,
};

use super::components::{Component, recognise};
use super::dit::{Dit, DitConfig, F32_PREFIXES, PassMemory, PassSettings, Trainable};
use super::init_tiny::{WanKind, init_tiny};
use super::loading::open;
use super::model::Wan;
use super::options::{IdleExpert, Placement, WanOptions};

const FOLDERS: [&str; 2] = ["high_noise_model", "low_noise_model"];
const NAME: &str = "diffusion_pytorch_model.safetensors";

fn tiny(directory: &Path) -> WanOptions {
    let files = init_tiny(directory, WanKind::T2v, 0).unwrap();
    WanOptions {
        model_paths: Some(files.model_paths.into()),
        tokenizer_path: Some(files.tokenizer),
        trainable_models: Some("dit,dit2".into()),
        lora_rank: Some(2),
        ..WanOptions::default()
    }
}

fn opened(options: &WanOptions) -> Result<Wan> {
    let context = BuildContext::new("flex");
    open(options, &context)
}

/// A velocity through both experts, its cotangent of the latents, and the gradient of the adapters.
fn passed(options: &WanOptions) -> [Tensor; 3] {
    let mut model = opened(options).unwrap();
    let count = model.parameters().iter().map(|spec| spec.len()).sum();
    model.write_parameters(&(0..count).map(|i| (i as f32).sin() * 0.1).collect::<Vec<_>>()).unwrap();
    let input = ConditionInput { prompt: "a face".into(), frames: 5, size: [32, 32], ..ConditionInput::default() };
    let conditioning = model.encode(&input).unwrap();
    let x = Noise::new(1).normal(Purpose::Synthetic, 0, 0, &conditioning.latent_shape).unwrap();
    let (high, low) = (Timestep(950.0), Timestep(300.0));
    let (v, pull_high) = model.velocity(&x, high, &conditioning, Adapter::On, Grad::Record).unwrap();
    let (u, pull_low) = model.velocity(&v, low, &conditioning, Adapter::On, Grad::Record).unwrap();
    let d = pull_high.unwrap().pull(&pull_low.unwrap().pull(&x).unwrap()).unwrap();
    let mut gradients = vec![0.0; count];
    model.take_gradients(&mut gradients).unwrap();
    [u, d, Tensor::new(gradients, [count]).unwrap()]
}

/// The L2 distance of two tensors, relative to the norm of the second.
fn difference(a: &Tensor, b: &Tensor) -> f64 {
    let squares = |f: &dyn Fn(f32, f32) -> f32| -> f64 {
        a.f32s().unwrap().iter().zip(b.f32s().unwrap()).map(|(a, b)| f64::from(f(*a, *b)).powi(2)).sum()
    };
    (squares(&|a, b| a - b) / squares(&|_, b| b)).sqrt()
}

/// The differences of velocity, cotangent and gradient.
fn differences(a: &[Tensor; 3], b: &[Tensor; 3]) -> [f64; 3] {
    std::array::from_fn(|i| difference(&a[i], &b[i]))
}

#[test]
fn eight_bits_change_results_by_their_rounding() {
    let dir = tempfile::tempdir().unwrap();
    let options = tiny(dir.path());
    let with = |weights_dtype: WeightsDType| passed(&WanOptions { weights_dtype, ..options.clone() });
    let bf16 = with(WeightsDType::Bf16);
    // Rounding changes the values of one matrix by 0.6 % in int8 and 2.5 % in fp8; a value passes through twenty
    // matrices.
    for (dtype, most) in [(WeightsDType::Int8, 0.06), (WeightsDType::Fp8, 0.25)] {
        let found = differences(&with(dtype), &bf16);
        println!("{dtype:?} from bf16: velocity {:.4}, latents {:.4}, adapters {:.4}", found[0], found[1], found[2]);
        assert!(found.iter().all(|d| (1e-4..most).contains(d)), "{dtype:?}: {found:?}");
    }
}

fn cosine(a: &Tensor, b: &Tensor) -> f64 {
    let dot = |a: &Tensor, b: &Tensor| -> f64 {
        a.f32s().unwrap().iter().zip(b.f32s().unwrap()).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    };
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

#[test]
fn fp8_products_keep_the_direction_of_gradients() {
    let dir = tempfile::tempdir().unwrap();
    let options = tiny(dir.path());
    let bf16 = passed(&WanOptions { weights_dtype: WeightsDType::Bf16, ..options.clone() });
    let options = WanOptions { weights_dtype: WeightsDType::Fp8, ..options };
    let dense = passed(&options);
    let fp8 = passed(&WanOptions { products: Products::Fp8, ..options });
    let found = differences(&fp8, &dense);
    println!("fp8 products from decoded weights: {found:.4?}");
    // Both operands are rounded now, each by 2.5 % of a matrix: sqrt(2) times the bound of the weights alone.
    assert!(found.iter().all(|d| (1e-3..0.35).contains(d)), "{found:?}");
    let cosines: [f64; 3] = std::array::from_fn(|i| cosine(&fp8[i], &bf16[i]));
    println!("cosines with bf16: {cosines:.4?}");
    assert!(cosines.iter().all(|cosine| *cosine > 0.97), "{cosines:?}");
}

#[test]
fn training_with_fp8_products_lowers_a_loss() {
    let dir = tempfile::tempdir().unwrap();
    let options = WanOptions {
        weights_dtype: WeightsDType::Fp8,
        products: Products::Fp8,
        trainable_models: Some("dit2".into()),
        ..tiny(dir.path())
    };
    let mut model = opened(&options).unwrap();
    let mut parameters: Vec<f32> = (0..model.parameter_count()).map(|i| (i as f32 * 0.7).sin() * 0.1).collect();
    let input = ConditionInput { prompt: "a face".into(), frames: 5, size: [32, 32], ..ConditionInput::default() };
    let conditioning = model.encode(&input).unwrap();
    let normal = |index| Noise::new(1).normal(Purpose::Synthetic, 0, index, &conditioning.latent_shape).unwrap();
    let (x, target) = (normal(0), normal(1));
    let mut losses = Vec::new();
    for _ in 0..6 {
        model.write_parameters(&parameters).unwrap();
        let (v, pull) = model.velocity(&x, Timestep(300.0), &conditioning, Adapter::On, Grad::Record).unwrap();
        let off: Vec<f32> = v.f32s().unwrap().iter().zip(target.f32s().unwrap()).map(|(v, t)| v - t).collect();
        losses.push(off.iter().map(|d| d * d).sum::<f32>());
        pull.unwrap().pull(&Tensor::new(off, v.shape()).unwrap()).unwrap();
        let mut gradients = vec![0.0; parameters.len()];
        model.take_gradients(&mut gradients).unwrap();
        let norm = gradients.iter().map(|g| g * g).sum::<f32>().sqrt();
        parameters.iter_mut().zip(&gradients).for_each(|(p, g)| *p -= 0.3 * g / norm);
    }
    println!("losses {losses:?}");
    assert!(losses.windows(2).all(|pair| pair[1] < pair[0]), "{losses:?}");
}

#[test]
fn fp8_products_without_fp8_weights_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let options = WanOptions { products: Products::Fp8, ..tiny(dir.path()) };
    for weights_dtype in [WeightsDType::Auto, WeightsDType::F32, WeightsDType::Bf16, WeightsDType::Int8] {
        let refused = opened(&WanOptions { weights_dtype, ..options.clone() }).err().unwrap().chain();
        assert!(refused.contains("`model.products`") && refused.contains("`model.weights_dtype: fp8`"), "{refused}");
    }
    // A file in scaled fp8 has them, unless its matrices are decoded to be sharded.
    FOLDERS.iter().for_each(|folder| publish(&dir.path().join(folder).join(NAME), true));
    let fp8 = passed(&options);
    let dense = passed(&WanOptions { products: Products::Auto, ..options.clone() });
    assert!(differences(&fp8, &dense).iter().all(|d| (1e-3..0.35).contains(d)));
    let sharded = opened(&WanOptions { weight_store: Placement::Sharded, ..options }).err().unwrap().chain();
    assert!(sharded.contains("`model.products`"), "{sharded}");
}

#[test]
fn location_of_eight_bit_matrices_changes_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    let options = WanOptions { weights_dtype: WeightsDType::Int8, ..tiny(dir.path()) };
    let bits = |options: WanOptions| passed(&options).map(|tensor| tensor.as_bytes().to_vec());
    let expected = bits(WanOptions { idle_expert: IdleExpert::Keep, ..options.clone() });
    for idle_expert in [IdleExpert::Host, IdleExpert::Drop] {
        assert!(bits(WanOptions { idle_expert, ..options.clone() }) == expected, "{idle_expert:?}");
    }
    for weight_store in [Placement::Streamed, Placement::Host] {
        assert!(bits(WanOptions { weight_store, ..options.clone() }) == expected, "{weight_store:?}");
    }
    let refused = opened(&WanOptions { weight_store: Placement::Sharded, ..options }).err().unwrap().chain();
    assert!(refused.contains("`model.weights_dtype`") && refused.contains("`host`"), "{refused}");
}

/// A transformer with matrices that are large enough to wait in host memory, and with smaller ones.
pub(super) fn wide() -> DitConfig {
    DitConfig {
        dim: 512,
        in_channels: 4,
        out_channels: 4,
        patch: [1, 2, 2],
        text_dim: 16,
        freq_dim: 256,
        ffn_dim: 2304,
        layers: 3,
        heads: 4,
        image_dim: None,
    }
}

/// A file of [`wide`] with random weights, f32.
pub(super) fn wide_file(directory: &Path) -> Checkpoint {
    let noise = Noise::new(1);
    let weight = |(i, (key, shape)): (usize, (String, Vec<usize>))| {
        let values = noise.normal(Purpose::Synthetic, 0, i as u64, &shape).unwrap();
        (key, Tensor::new(values.f32s().unwrap().iter().map(|v| v * 0.05).collect::<Vec<_>>(), shape).unwrap())
    };
    let state: StateDict = wide().weights().into_iter().enumerate().map(weight).collect();
    let path = directory.join(NAME);
    save_safetensors(&path, &state, &BTreeMap::new()).unwrap();
    Checkpoint::open(&path).unwrap()
}

#[test]
fn codes_in_host_memory_have_the_bits_of_codes_on_the_device() {
    let dir = tempfile::tempdir().unwrap();
    let (file, device) = (wide_file(dir.path()), roll_backends::device("flex").unwrap());
    let normal = |index, shape: &[usize]| Noise::new(2).normal(Purpose::Synthetic, 0, index, shape).unwrap();
    let (latents, context) = (normal(0, &[4, 2, 4, 6]), normal(1, &[5, 16]));
    let conditioning =
        Conditioning { context, channels: None, image_tokens: None, first_frame: None, latent_shape: [4, 2, 4, 6] };
    let targets = ["q", "o", "ffn.0", "ffn.2"].map(String::from).to_vec();
    // Two steps: the second prefetches each block on the way forward and back.
    let steps = |store: Arc<dyn WeightStore>, products: DType| -> Vec<Vec<u8>> {
        let mut dit = Dit::with_store(wide(), store).with_settings(PassSettings {
            products,
            kept: PassMemory { memory: Memory::Offload, ..PassMemory::default() },
            ..PassSettings::default()
        });
        let lora = Trainable::Lora { rank: 4, alpha: 4.0, targets: targets.clone() };
        dit.add_trainable(&lora, &Noise::new(4), &StateDict::new()).unwrap();
        let parameters = dit.parameters().unwrap().clone();
        let count: usize = parameters.specs().iter().map(|s| s.len()).sum();
        parameters.write(&(0..count).map(|i| (i as f32 * 0.7).sin() * 0.1).collect::<Vec<_>>()).unwrap();
        let step = |t: f64| {
            let (velocity, pullback) =
                dit.velocity(&latents, Timestep(t), &conditioning, Adapter::On, Grad::Record).unwrap();
            let d_latents = pullback.unwrap().pull(&velocity).unwrap();
            let mut gradients = vec![0.0; count];
            parameters.take_gradients(&mut gradients).unwrap();
            assert!(gradients.iter().any(|g| *g != 0.0));
            [velocity, d_latents, Tensor::new(gradients, [count]).unwrap()].map(|tensor| tensor.as_bytes().to_vec())
        };
        [700.0, 300.0].into_iter().flat_map(step).collect()
    };
    for (dtype, products) in [(WeightsDType::Int8, DType::F32), (WeightsDType::Fp8, DType::BF16)] {
        let storage = dtype.storage(DType::F32, &F32_PREFIXES, DeviceTraits::of(&device)).unwrap();
        let host = from_host(&file, storage, &device).unwrap();
        let codes = 2 * 512 * 2304 * 3;
        assert!(host.bytes()[1] > codes, "{:?}", host.bytes());
        let resident = resident(&file, storage, &device).unwrap();
        assert!(steps(Arc::new(host), products) == steps(Arc::new(resident), products), "{dtype:?}");
    }
}

/// Rewrites a file as others publish it: matrices of the blocks in fp8 with a scale, either of the whole matrix as
/// `scale_weight` or of each row as `weight_scale`; all keys have a prefix, and the format has its mark.
fn publish(path: &Path, by_row: bool) {
    let state = Checkpoint::open(path).unwrap().all().unwrap();
    let mut tensors: BTreeMap<String, (TensorEntry, Vec<u8>)> = BTreeMap::new();
    let mut add = |name: String, dtype: &str, shape: Vec<usize>, bytes: Vec<u8>| {
        let name = format!("model.diffusion_model.{name}");
        let alignment = if dtype == "F32" { 4 } else { 1 };
        let entry =
            TensorEntry { name: name.clone(), dtype: dtype.into(), shape, bytes: bytes.len() as u64, alignment };
        tensors.insert(name, (entry, bytes));
    };
    for (key, tensor) in state {
        let shape = tensor.shape().to_vec();
        if !key.starts_with("blocks.") || shape.len() != 2 {
            add(key, "F32", shape, tensor.to_float(roll_core::DType::F32).unwrap().as_bytes().to_vec());
            continue;
        }
        let values = tensor.to_f32_vec();
        let width = if by_row { shape[1] } else { values.len() };
        let most = |values: &[f32]| values.iter().fold(0.0f32, |most, v| most.max(v.abs()));
        let scales: Vec<f32> = values.chunks(width).map(|part| most(part) / EightBits::E4m3.largest()).collect();
        let codes = values.iter().enumerate().map(|(i, v)| EightBits::E4m3.code(v / scales[i / width])).collect();
        let layer = key.strip_suffix("weight").unwrap();
        let (name, scale_shape) = match by_row {
            true => (format!("{layer}weight_scale"), vec![scales.len(), 1]),
            false => (format!("{layer}scale_weight"), vec![]),
        };
        add(name, "F32", scale_shape, scales.iter().flat_map(|s| s.to_le_bytes()).collect());
        add(key, "F8_E4M3", shape, codes);
    }
    add("scaled_fp8".into(), "F8_E4M3", vec![2], vec![0; 2]);
    let entries = tensors.values().map(|(entry, _)| entry.clone()).collect();
    let mut writer = SafetensorsWriter::create(path, entries, &BTreeMap::new()).unwrap();
    for entry in writer.order().to_vec() {
        writer.write(&entry.name, &tensors[&entry.name].1).unwrap();
    }
    writer.finish().unwrap();
}

#[test]
fn published_scaled_fp8_files_stay_in_fp8() {
    let dir = tempfile::tempdir().unwrap();
    let options = tiny(dir.path());
    let original = passed(&options);
    let paths = FOLDERS.map(|folder| dir.path().join(folder).join(NAME));
    paths.iter().zip([false, true]).for_each(|(path, by_row)| publish(path, by_row));
    let device = roll_backends::device("flex").unwrap();
    for path in &paths {
        let (component, file) = recognise(Checkpoint::open(path).unwrap()).unwrap();
        assert_eq!(component, Component::Dit);
        assert!(!file.keys().any(is_auxiliary));
        let storage = WeightsDType::Auto.storage(DType::F32, &F32_PREFIXES, DeviceTraits::of(&device)).unwrap();
        let block =
            roll_backends::WeightStore::segment(&resident(&file, storage, &device).unwrap(), "blocks.0.").unwrap();
        let q = &block["blocks.0.self_attn.q.weight"];
        assert!(q.scaled().is_some() && q.size() == 64 * 64 + 4 * 64, "{}", q.size());
        assert!(block["blocks.0.self_attn.q.bias"].scaled().is_none());
        let about = crate::inspect::inspect(path).unwrap();
        let detail = about[0].details.iter().find(|(name, _)| name == "eight bits").unwrap();
        assert_eq!(detail.1, "20 weights of f8_e4m3, with their scales");
    }
    let in_eight_bits = passed(&options);
    let widened = passed(&WanOptions { weights_dtype: WeightsDType::F32, ..options.clone() });
    assert!(
        differences(&in_eight_bits, &widened).iter().all(|d| *d < 1e-4),
        "{:?}",
        differences(&in_eight_bits, &widened)
    );
    let rounded = differences(&in_eight_bits, &original);
    assert!(rounded.iter().all(|d| (1e-4..0.25).contains(d)), "{rounded:?}");
}

#[test]
fn errors_name_scales_of_a_wrong_shape() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("w.safetensors");
    let entry = |name: &str, dtype: &str, shape: &[usize], bytes: u64, alignment: usize| TensorEntry {
        name: name.into(),
        dtype: dtype.into(),
        shape: shape.to_vec(),
        bytes,
        alignment,
    };
    let entries = vec![entry("a.weight", "F8_E4M3", &[2, 4], 8, 1), entry("a.scale_weight", "F32", &[3], 12, 4)];
    let mut writer = SafetensorsWriter::create(&path, entries, &BTreeMap::new()).unwrap();
    writer.write("a.scale_weight", &[0; 12]).unwrap();
    writer.write("a.weight", &[0x38; 8]).unwrap();
    writer.finish().unwrap();
    let message = Checkpoint::open(&path).unwrap().tensor("a.weight").unwrap_err().to_string();
    assert!(message.contains("`a.weight`") && message.contains("2 rows") && message.contains("found 3"), "{message}");
}
