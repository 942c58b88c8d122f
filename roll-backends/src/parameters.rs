//! The trainable tensors of a model, and the gradients that pullbacks add up.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::tensor::{DType, Device, Tensor, TensorData};
use roll_core::{Error, ParameterSpec, Result};

/// Trainable tensors on a device, f32. Clones share values and gradients.
#[derive(Clone)]
pub struct Parameters {
    shared: Arc<Shared>,
}

struct Shared {
    specs: Vec<ParameterSpec>,
    index: HashMap<String, usize>,
    device: Device,
    values: Mutex<Arc<Vec<Tensor<1>>>>,
    gradients: Mutex<Vec<Option<Tensor<1>>>>,
}

/// The values at one instant: what a forward pass and its pullback read, whatever is written meanwhile.
#[derive(Clone)]
pub struct Snapshot {
    parameters: Parameters,
    values: Arc<Vec<Tensor<1>>>,
}

impl Parameters {
    /// Takes `values`, one flat tensor per spec.
    pub fn new(specs: Vec<ParameterSpec>, values: Vec<Vec<f32>>, device: &Device) -> Self {
        let values: Vec<_> = values.into_iter().map(|v| upload(v, device)).collect();
        let index = specs.iter().enumerate().map(|(i, s)| (s.name.clone(), i)).collect();
        let gradients = Mutex::new(vec![None; specs.len()]);
        let shared = Shared { specs, index, device: device.clone(), values: Mutex::new(Arc::new(values)), gradients };
        Self { shared: Arc::new(shared) }
    }

    /// Name and shape of each, in the flat layout's order.
    pub fn specs(&self) -> &[ParameterSpec] {
        &self.shared.specs
    }

    /// The device they are on.
    pub fn device(&self) -> &Device {
        &self.shared.device
    }

    /// Position of a parameter.
    pub fn position(&self, name: &str) -> Option<usize> {
        self.shared.index.get(name).copied()
    }

    /// The values now.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot { parameters: self.clone(), values: lock(&self.shared.values).clone() }
    }

    /// Adds to the gradient of parameter `index`.
    pub fn add_gradient(&self, index: usize, gradient: Tensor<1>) {
        let slot = &mut lock(&self.shared.gradients)[index];
        *slot = Some(match slot.take() {
            Some(sum) => sum + gradient,
            None => gradient,
        });
    }

    /// Copies the values to the flat layout.
    pub fn read(&self, out: &mut [f32]) -> Result<()> {
        self.check_len(out.len())?;
        let values = lock(&self.shared.values).clone();
        for (value, out) in values.iter().zip(self.split_mut(out)) {
            out.copy_from_slice(&download(value.clone())?);
        }
        Ok(())
    }

    /// Replaces the values from the flat layout.
    pub fn write(&self, values: &[f32]) -> Result<()> {
        self.check_len(values.len())?;
        let mut rest = values;
        let fresh = self
            .shared
            .specs
            .iter()
            .map(|spec| {
                let (head, tail) = rest.split_at(spec.len());
                rest = tail;
                upload(head.to_vec(), &self.shared.device)
            })
            .collect();
        *lock(&self.shared.values) = Arc::new(fresh);
        Ok(())
    }

    /// Adds the gradients to `add_into` and clears them.
    pub fn take_gradients(&self, add_into: &mut [f32]) -> Result<()> {
        self.check_len(add_into.len())?;
        let gradients: Vec<_> = lock(&self.shared.gradients).iter_mut().map(Option::take).collect();
        for (gradient, out) in gradients.into_iter().zip(self.split_mut(add_into)) {
            if let Some(gradient) = gradient {
                out.iter_mut().zip(download(gradient)?).for_each(|(o, g)| *o += g);
            }
        }
        Ok(())
    }

    /// Forgets the gradients.
    pub fn clear_gradients(&self) {
        lock(&self.shared.gradients).fill(None);
    }

    fn split_mut<'a>(&'a self, mut flat: &'a mut [f32]) -> impl Iterator<Item = &'a mut [f32]> {
        self.shared.specs.iter().map(move |spec| {
            let (head, tail) = std::mem::take(&mut flat).split_at_mut(spec.len());
            flat = tail;
            head
        })
    }

    fn check_len(&self, found: usize) -> Result<()> {
        let expected: usize = self.shared.specs.iter().map(ParameterSpec::len).sum();
        match found == expected {
            true => Ok(()),
            false => Err(Error::shape("flat parameters", format!("[{expected}]"), &[found])),
        }
    }
}

impl Snapshot {
    /// The parameters this was taken of.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// Position, shape and value of a parameter.
    pub fn get(&self, name: &str) -> Option<(usize, &[usize], &Tensor<1>)> {
        let index = self.parameters.position(name)?;
        Some((index, &self.parameters.specs()[index].shape, &self.values[index]))
    }

    /// Position, name and shape, and value of each.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &ParameterSpec, &Tensor<1>)> {
        self.parameters.specs().iter().zip(self.values.iter()).enumerate().map(|(i, (spec, value))| (i, spec, value))
    }
}

fn upload(values: Vec<f32>, device: &Device) -> Tensor<1> {
    let n = values.len();
    Tensor::from_data(TensorData::new(values, [n]), (device, DType::F32))
}

fn download(tensor: Tensor<1>) -> Result<Vec<f32>> {
    let tensor = if tensor.device().is_autodiff() { tensor.inner() } else { tensor };
    tensor
        .into_data()
        .try_into_vec::<f32>()
        .map_err(|e| Error::Misuse(format!("reading a parameter back from its device: {e:?}")))
}

/// A poisoned lock only means that another pull panicked; the values behind it are whole tensors either way.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
