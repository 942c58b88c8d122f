//! One directory of golden numbers, and the comparison with it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};

use burn_tensor::{DType as Burn, Device};
use roll_backends::Backend;
use roll_core::{DType, StateDict, Tensor};
use serde::de::DeserializeOwned;

/// Anything that ends a case.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;
/// Result of a case.
pub type Outcome<T = ()> = Result<T, Failure>;

/// Times its own measured f32 error that a tensor may differ by, and the floor of that, relative to its largest value.
const ERROR_FACTOR: f64 = 8.0;
const ERROR_FLOOR: f64 = 1e-6;

/// Number of values of a tensor below which its own measured error may be small by chance.
pub const FEW: usize = 16;

/// Difference of a tensor, relative to its largest value, where products are taken in bf16: twelve times the distance
/// of neighbouring bf16 numbers. The references are f32, so the rounding of weights and operands of every layer shows
/// in full.
const BF16_ERROR: f64 = 12.0 / 256.0;
/// Times that, where eight passes follow one another and the gradient goes back through four: there the rounding of the
/// weights alone makes 0.09 of a gradient's largest value (measured on flex, whose products are exact). And in a VAE,
/// where every activation is rounded too, and a frame near the clamp's border may get a gradient or none.
const BF16_STEP: f64 = 3.0;
/// Times PyTorch's own error in bf16, where the case has it (`bench/torch_reference.py --bf16-errors`), that a tensor
/// may differ by. The angle to the expected tensor, which single elements hardly move, may be as many times PyTorch's.
const BF16_FACTOR: f64 = 1.5;

/// Where a case is computed, and in which dtypes.
#[derive(Clone, Debug)]
pub struct Setting {
    /// As `--backend` names it.
    pub backend: &'static str,
    /// The device.
    pub device: Device,
    /// Dtype of stored frozen weights, and of products.
    pub dtype: Burn,
}

impl Setting {
    /// f32 and, where the device has it, bf16 on every backend of this build that works here, and why others of the
    /// build do not. Only backends that the tests were asked to run on count.
    pub fn all() -> Outcome<(Vec<Self>, Vec<(Backend, String)>)> {
        let (mut settings, mut unusable) = (Vec::new(), Vec::new());
        for backend in Backend::ALL.into_iter().filter(|b| b.is_compiled() && roll_testing::is_tested(b.name())) {
            if let Err(reason) = backend.check_usable(0) {
                unusable.push((backend, reason));
                continue;
            }
            let device = roll_backends::device(backend.name())?;
            let rounds = backend == Backend::LibTorchCuda && !convolves_in_f32();
            if rounds {
                let reason = "of f32 its convolutions keep 11 bits (TF32), so that only bf16 was tested: run it with \
                              NVIDIA_TF32_OVERRIDE=0 in the environment";
                unusable.push((backend, reason.to_string()));
            }
            let dtypes = [Burn::F32, Burn::BF16].into_iter().filter(|&dtype| device.supports_dtype(dtype));
            for dtype in dtypes.filter(|&dtype| dtype != Burn::F32 || !rounds) {
                settings.push(Self { backend: backend.name(), device: device.clone(), dtype });
            }
        }
        Ok((settings, unusable))
    }

    /// Whether products are taken in bf16.
    pub fn is_narrow(&self) -> bool {
        self.dtype == Burn::BF16
    }
}

/// Whether TF32 is switched off in NVIDIA's libraries.
fn convolves_in_f32() -> bool {
    std::env::var("NVIDIA_TF32_OVERRIDE").is_ok_and(|value| value == "0")
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.backend, if self.is_narrow() { "bf16" } else { "f32" })
    }
}

/// A case: `config.json`, `tensors.json` and safetensors files.
pub struct Case {
    /// Directory.
    pub dir: PathBuf,
    /// Directory name.
    pub name: String,
    /// Where it is computed.
    pub setting: Setting,
    json: serde_json::Value,
}

impl Case {
    /// Reads the configuration of the case in `dir`.
    pub fn on(dir: &Path, setting: Setting) -> Outcome<Self> {
        let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let json = serde_json::from_slice(&std::fs::read(dir.join("config.json"))?)?;
        Ok(Self { dir: dir.to_path_buf(), name, setting, json })
    }

    fn bf16_error(&self) -> f64 {
        let rounds_more = self.kind() == "reward_fl_step" || self.kind().contains("vae");
        BF16_ERROR * if rounds_more { BF16_STEP } else { 1.0 }
    }

    /// [`Case::bf16_error`] of one tensor. In the tiny Z-Image, the rounding of the weights alone makes 0.10 of the
    /// largest gradient of an adapter's matrix, and 0.065 behind eight steps (measured on flex, with products in f32).
    /// Vision-language networks are two networks in a row: 0.087 was measured at the pixels, on flex.
    fn bf16_error_of(&self, name: &str) -> f64 {
        let is_adapter_gradient = match self.kind() {
            "zimage_step" => name.contains(".grad.base_model."),
            kind => kind.starts_with("zimage_dit") && name.contains(".lora.grad."),
        };
        let sees = ["qwen2vl", "qwen25vl", "videoalign", "hpsv3"].iter().any(|kind| self.kind().starts_with(kind));
        self.bf16_error() * if is_adapter_gradient || sees { BF16_STEP } else { 1.0 }
    }

    /// Tolerance of a number that is checked by itself: `exact`, or the rounding of bf16.
    pub fn tolerance(&self, exact: f64) -> f64 {
        if self.setting.is_narrow() { exact.max(self.bf16_error()) } else { exact }
    }

    /// Where it is computed.
    pub fn device(&self) -> &Device {
        &self.setting.device
    }

    /// The directory name up to a `__suffix`.
    pub fn kind(&self) -> &str {
        self.name.split("__").next().unwrap_or(&self.name)
    }

    /// The `config` object, typed.
    pub fn config<T: DeserializeOwned>(&self) -> Outcome<T> {
        Ok(serde_json::from_value(self.json["config"].clone())?)
    }

    /// The whole configuration file.
    pub fn json(&self) -> &serde_json::Value {
        &self.json
    }

    /// All tensors of a safetensors file of the case (the path may lead to a neighbour, `../vae21_tiny/...`).
    pub fn tensors(&self, file: &str) -> Outcome<StateDict> {
        let path = self.dir.join(file);
        let bytes = std::fs::read(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        let file = safetensors::SafeTensors::deserialize(&bytes)?;
        file.tensors()
            .into_iter()
            .map(|(name, view)| {
                use safetensors::Dtype as D;
                let dtype = match view.dtype() {
                    D::F32 => DType::F32,
                    D::BF16 => DType::Bf16,
                    D::F16 => DType::F16,
                    D::I64 => DType::I64,
                    D::I32 => DType::I32,
                    D::U8 => DType::U8,
                    D::BOOL => DType::Bool,
                    other => return Err(format!("{name}: dtype {other:?}").into()),
                };
                let bytes = std::sync::Arc::new(view.data().to_vec());
                Ok((name, Tensor::from_bytes(dtype, view.shape(), bytes)?))
            })
            .collect()
    }

    /// The expected tensors of `file`, each with its tolerance.
    pub fn expected(&self, file: &str) -> Outcome<Report> {
        let expected = self.tensors(file)?;
        let wide = self.json["suggested_tolerance_rel_to_max"].as_f64().unwrap_or(ERROR_FLOOR);
        let measured = |name: &str, of: &str| self.json["tolerance"][name][of].as_f64();
        let tolerances = expected
            .iter()
            .map(|(name, tensor)| {
                let own = measured(name, "f32_vs_f64_rel_to_max");
                let relative = match tensor.dtype() {
                    DType::F32 | DType::Bf16 | DType::F16 if self.setting.is_narrow() => {
                        measured(name, "bf16_rel_to_max").map_or(self.bf16_error_of(name), |e| BF16_FACTOR * e)
                    }
                    DType::F32 | DType::Bf16 | DType::F16 => own.map_or(wide, |e| ERROR_FACTOR * e).max(ERROR_FLOOR),
                    _ => 0.0,
                };
                (name.clone(), relative)
            })
            .collect();
        // For small angles, 1 - cosine is half the square of the angle.
        let least = |cosine: f64| 1.0 - BF16_FACTOR.powi(2) * (1.0 - cosine);
        let cosines = expected
            .keys()
            .filter(|_| self.setting.is_narrow())
            .filter_map(|name| Some((name.clone(), least(measured(name, "bf16_cosine")?))))
            .collect();
        Ok(Report { expected, tolerances, cosines, ..Report::default() })
    }
}

/// The compared tensors, and how far off they were.
#[derive(Default)]
pub struct Report {
    expected: StateDict,
    tolerances: BTreeMap<String, f64>,
    /// The least cosine between a tensor and the expected one.
    cosines: BTreeMap<String, f64>,
    seen: BTreeSet<String>,
    left_out: Vec<(String, String)>,
    failures: Vec<String>,
    worst: Option<Worst>,
}

struct Worst {
    name: String,
    error: f64,
    allowed: f64,
}

impl Report {
    /// Names of the expected tensors that were neither compared nor left out.
    pub fn unseen(&self) -> Vec<String> {
        self.expected.keys().filter(|name| !self.seen.contains(*name)).cloned().collect()
    }

    /// The expected tensor `name`.
    pub fn get(&self, name: &str) -> Outcome<&Tensor> {
        Ok(self.expected.get(name).ok_or_else(|| format!("the case holds no `{name}`"))?)
    }

    /// Names of all expected tensors.
    pub fn names(&self) -> Vec<String> {
        self.expected.keys().cloned().collect()
    }

    /// Compares `actual` with the expected tensor `name`: `max |a - b| <= tolerance * max |b|`. Leading axes of length
    /// one are ignored, since the reference has a batch axis where we have none. Not finite is different.
    pub fn compare(&mut self, name: &str, actual: &Tensor) {
        self.seen.insert(name.to_string());
        let Some(expected) = self.expected.get(name) else {
            self.failures.push(format!("{name}: not among the expected tensors"));
            return;
        };
        let trim = |shape: &[usize]| shape.iter().copied().skip_while(|&d| d == 1).collect::<Vec<_>>();
        if trim(expected.shape()) != trim(actual.shape()) {
            self.failures.push(format!("{name}: expected shape {:?}, found {:?}", expected.shape(), actual.shape()));
            return;
        }
        let (a, b) = (actual.to_f32_vec(), expected.to_f32_vec());
        let scale = b.iter().fold(0f64, |m, v| m.max(f64::from(v.abs())));
        let error = a.iter().zip(&b).fold(0f64, |m, (a, b)| {
            let e = (f64::from(*a) - f64::from(*b)).abs();
            if e.is_nan() { f64::INFINITY } else { m.max(e) }
        });
        // An expected tensor of zeros has no scale of its own; rounding is then measured against one.
        let relative = error / if scale > 0.0 { scale } else { 1.0 };
        let allowed = self.tolerances[name];
        if relative > allowed {
            self.failures.push(format!("{name}: error {relative:.2e} of its largest value, allowed {allowed:.2e}"));
        }
        if let Some(&least) = self.cosines.get(name) {
            let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
            let cosine = dot(&a, &b) / (dot(&a, &a) * dot(&b, &b)).sqrt();
            self.check(cosine >= least, || format!("{name}: cosine {cosine:.4} to it, expected at least {least:.4}"));
        }
        let share = |error: f64, allowed: f64| error / allowed.max(f64::MIN_POSITIVE);
        if self.worst.as_ref().is_none_or(|w| share(relative, allowed) > share(w.error, w.allowed)) {
            self.worst = Some(Worst { name: name.to_string(), error: relative, allowed });
        }
    }

    /// Allows tensors of few values the tolerance that the case suggests for all.
    pub fn widen_few(&mut self, case: &Case) {
        let wide = case.json["suggested_tolerance_rel_to_max"].as_f64().unwrap_or(ERROR_FLOOR);
        let floats = self.expected.iter().filter(|(_, tensor)| tensor.len() < FEW && tensor.dtype() != DType::I64);
        for (name, _) in floats {
            self.tolerances.entry(name.clone()).and_modify(|tolerance| *tolerance = tolerance.max(wide));
        }
    }

    /// Compares a scalar.
    pub fn compare_value(&mut self, name: &str, actual: f64) {
        self.compare(name, &Tensor::scalar(actual as f32));
    }

    /// Compares a scalar with the largest tolerance of all expected tensors whose names have this `ending`.
    pub fn compare_value_within_all(&mut self, name: &str, ending: &str, actual: f64) {
        let alike = self.tolerances.iter().filter(|(name, _)| name.ends_with(ending));
        let most = alike.map(|(_, tolerance)| *tolerance).fold(0.0, f64::max);
        self.tolerances.insert(name.to_string(), most);
        self.compare_value(name, actual);
    }

    /// Says why an expected tensor is not compared; printed with the case.
    pub fn leave_out(&mut self, name: &str, reason: &str) {
        self.seen.insert(name.to_string());
        self.left_out.push((name.to_string(), reason.to_string()));
    }

    /// A check that is no tensor comparison.
    pub fn check(&mut self, holds: bool, what: impl FnOnce() -> String) {
        if !holds {
            self.failures.push(what());
        }
    }

    /// Joins the report of another file of the same case.
    pub fn join(&mut self, other: Report) {
        let share = |w: &Worst| w.error / w.allowed.max(f64::MIN_POSITIVE);
        self.expected.extend(other.expected);
        self.tolerances.extend(other.tolerances);
        self.cosines.extend(other.cosines);
        self.seen.extend(other.seen);
        self.left_out.extend(other.left_out);
        self.failures.extend(other.failures);
        self.worst = match (self.worst.take(), other.worst) {
            (Some(a), Some(b)) => Some(if share(&a) >= share(&b) { a } else { b }),
            (a, b) => a.or(b),
        };
    }

    /// The failures, including expected tensors that were not compared.
    pub fn failures(&self) -> Vec<String> {
        let forgotten = self.unseen().into_iter().map(|name| format!("{name}: never compared"));
        self.failures.iter().cloned().chain(forgotten).collect()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} tensors", self.seen.len() - self.left_out.len())?;
        if let Some(Worst { name, error, allowed }) = &self.worst {
            write!(f, ", largest error {error:.2e} of {allowed:.2e} allowed ({name})")?;
        }
        for (name, reason) in &self.left_out {
            write!(f, "; not compared: {name} ({reason})")?;
        }
        Ok(())
    }
}
