//! The trainable tensors of a model, and the gradients that pullbacks add up.

use std::collections::HashMap;
use std::ops::Range;
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
        self.read_part(0..self.specs().len(), out)
    }

    /// Copies the values of some parameters, by position, to their part of the flat layout.
    pub fn read_part(&self, which: Range<usize>, out: &mut [f32]) -> Result<()> {
        self.check_len(&which, out.len())?;
        let values = lock(&self.shared.values).clone();
        for (value, out) in values[which.clone()].iter().zip(self.split_mut(which, out)) {
            out.copy_from_slice(&download(value.clone())?);
        }
        Ok(())
    }

    /// Replaces the values from the flat layout.
    pub fn write(&self, values: &[f32]) -> Result<()> {
        self.write_part(0..self.specs().len(), values)
    }

    /// Replaces the values of some parameters, by position, from their part of the flat layout.
    pub fn write_part(&self, which: Range<usize>, values: &[f32]) -> Result<()> {
        self.check_len(&which, values.len())?;
        let mut rest = values;
        let mut shared = lock(&self.shared.values);
        // A snapshot keeps the old list; it holds handles, not values.
        let list = Arc::make_mut(&mut shared);
        for (value, spec) in list[which.clone()].iter_mut().zip(&self.specs()[which]) {
            let (head, tail) = rest.split_at(spec.len());
            rest = tail;
            *value = upload(head.to_vec(), &self.shared.device);
        }
        Ok(())
    }

    /// Adds the gradients to `add_into` and clears them.
    pub fn take_gradients(&self, add_into: &mut [f32]) -> Result<()> {
        self.take_gradients_part(0..self.specs().len(), add_into)
    }

    /// Adds the gradients of some parameters, by position, to their part of the flat layout, and clears them.
    pub fn take_gradients_part(&self, which: Range<usize>, add_into: &mut [f32]) -> Result<()> {
        self.check_len(&which, add_into.len())?;
        for (index, out) in which.clone().zip(self.split_mut(which, add_into)) {
            let gradient = lock(&self.shared.gradients)[index].take();
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

    fn split_mut<'a>(&'a self, which: Range<usize>, mut flat: &'a mut [f32]) -> impl Iterator<Item = &'a mut [f32]> {
        self.shared.specs[which].iter().map(move |spec| {
            let (head, tail) = std::mem::take(&mut flat).split_at_mut(spec.len());
            flat = tail;
            head
        })
    }

    fn check_len(&self, which: &Range<usize>, found: usize) -> Result<()> {
        let specs = self.specs().get(which.clone()).ok_or_else(|| {
            Error::shape("parameters", format!("[{}]", self.specs().len()), &[which.start, which.end])
        })?;
        let expected: usize = specs.iter().map(ParameterSpec::len).sum();
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
