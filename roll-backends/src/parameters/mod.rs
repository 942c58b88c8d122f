//! The trainable tensors of a model, and the gradients that pullbacks accumulate.
//!
//! The types that hold values, for replicated and sharded parameters (`sharded.rs`):
//!
//! | type               | values of                          | replicated             | sharded                     |
//! |--------------------|------------------------------------|------------------------|-----------------------------|
//! | `ParameterStorage` | [`Parameters`], current            | tensors on the device  | `ShardedParameters`         |
//! | `Shards`           | one rank, current                  | -                      | shards in host memory       |
//! | `SnapshotValues`   | [`Snapshot`], when it was taken    | tensors of that moment | number of writes until then |
//! | `SegmentValues`    | [`ParameterSegment`] of a snapshot | tensors of that moment | tensors all-gathered        |
//!
//! Once sharded parameters have been written again, the values of older snapshots are gone, and requesting a segment of
//! such a snapshot is an error.

#[cfg(feature = "libtorch")]
mod gpu;
mod sharded;
mod updates;

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::{Arc, Mutex};

use burn_tensor::{DType, Device, Tensor, TensorData};
use roll_core::{Communicator, Error, GradientSink, ParameterSpec, Result};

use crate::sync::lock;
use sharded::ShardedParameters;

/// Trainable tensors on a device, f32. Clones share values and gradients.
#[derive(Clone)]
pub struct Parameters {
    shared: Arc<Shared>,
}

struct Shared {
    specs: Vec<ParameterSpec>,
    index: HashMap<String, usize>,
    device: Device,
    storage: ParameterStorage,
    /// The sum of gradients of each parameter; `None` is zero.
    gradients: Mutex<Vec<Option<Tensor<1>>>>,
    sink: Mutex<Option<Delivery>>,
}

/// The delivery of gradients to a sink.
#[derive(Clone)]
struct Delivery {
    sink: Arc<dyn GradientSink>,
    /// The position of the first of these parameters in the sink's numbering.
    first_position: usize,
    /// A parameter whose gradient is not delivered, by index.
    undelivered: Option<usize>,
}

enum ParameterStorage {
    Replicated(Mutex<Arc<Vec<Tensor<1>>>>),
    Sharded(Arc<ShardedParameters>),
}

/// The values at one instant, so that a forward pass and its pullback read the same values even if the parameters are
/// written meanwhile. They are read segment by segment ([`Snapshot::segment`]).
#[derive(Clone)]
pub struct Snapshot {
    parameters: Parameters,
    values: SnapshotValues,
}

#[derive(Clone)]
enum SnapshotValues {
    All(Arc<Vec<Tensor<1>>>),
    /// Sharded parameters, and the number of writes when the snapshot was taken.
    Sharded(Arc<ShardedParameters>, u32),
}

/// Some parameters of a [`Snapshot`], on the device. Gathered values are freed when the segment is dropped.
pub struct ParameterSegment {
    parameters: Parameters,
    prefix: String,
    values: SegmentValues,
}

enum SegmentValues {
    /// All parameters, by position; the segment is the subset with its prefix.
    All(Arc<Vec<Tensor<1>>>),
    /// The gathered parameters, by position.
    Gathered(BTreeMap<usize, Tensor<1>>),
}

impl Parameters {
    /// Uploads `values`, one flat tensor per spec, in order.
    pub fn new(specs: Vec<ParameterSpec>, values: Vec<Vec<f32>>, device: &Device) -> Self {
        let values: Vec<_> = values.into_iter().map(|v| upload(v, device)).collect();
        Self::with_storage(specs, ParameterStorage::Replicated(Mutex::new(Arc::new(values))), device)
    }

    /// Shards the values over the ranks: each rank stores an equal part of every tensor in host memory, and a segment
    /// is all-gathered when a pass needs it. `values` returns one tensor at a time, the same on every rank.
    ///
    /// Reading also all-gathers; ranks may read at different times. All ranks must write the same parameters.
    pub fn sharded(
        specs: Vec<ParameterSpec>,
        values: impl FnMut(&ParameterSpec) -> Result<Vec<f32>>,
        device: &Device,
        ranks: Arc<dyn Communicator>,
    ) -> Result<Self> {
        let sharded = ShardedParameters::new(&specs, values, ranks)?;
        Ok(Self::with_storage(specs, ParameterStorage::Sharded(Arc::new(sharded)), device))
    }

    fn with_storage(specs: Vec<ParameterSpec>, storage: ParameterStorage, device: &Device) -> Self {
        let index = specs.iter().enumerate().map(|(i, s)| (s.name.clone(), i)).collect();
        let gradients = Mutex::new(vec![None; specs.len()]);
        let shared = Shared { specs, index, device: device.clone(), storage, gradients, sink: Mutex::default() };
        Self { shared: Arc::new(shared) }
    }

    /// Name and shape of each parameter, in the order of the flat layout.
    pub fn specs(&self) -> &[ParameterSpec] {
        &self.shared.specs
    }

    /// The device of the parameters.
    pub fn device(&self) -> &Device {
        &self.shared.device
    }

    /// The index of a parameter; `None` if there is no such name.
    pub fn position(&self, name: &str) -> Option<usize> {
        self.shared.index.get(name).copied()
    }

    /// Takes a snapshot of the values.
    pub fn snapshot(&self) -> Snapshot {
        let values = match &self.shared.storage {
            ParameterStorage::Replicated(values) => SnapshotValues::All(lock(values).clone()),
            ParameterStorage::Sharded(sharded) => SnapshotValues::Sharded(sharded.clone(), sharded.version()),
        };
        Snapshot { parameters: self.clone(), values }
    }

    /// Size in bytes of the values that this process stores.
    pub fn bytes(&self) -> usize {
        match &self.shared.storage {
            ParameterStorage::Replicated(_) => {
                size_of::<f32>() * self.specs().iter().map(ParameterSpec::len).sum::<usize>()
            }
            ParameterStorage::Sharded(sharded) => sharded.bytes(),
        }
    }

    /// Delivers gradients to `sink` from now on, at positions from `first_position` on. `None` ends the delivery. The
    /// gradient of the parameter `undelivered` accumulates in the model all the same: of a parameter that a pass uses
    /// twice, whose parts would round differently if the sink added them.
    pub fn deliver_gradients(
        &self,
        sink: Option<Arc<dyn GradientSink>>,
        first_position: usize,
        undelivered: Option<usize>,
    ) {
        *lock(&self.shared.sink) = sink.map(|sink| Delivery { sink, first_position, undelivered });
    }

    /// Adds to the gradient of parameter `index`, and delivers the sum if a sink accepts it.
    pub fn add_gradient(&self, index: usize, gradient: Tensor<1>) {
        let sum = match self.take_gradient(index) {
            Some(sum) => sum + gradient,
            None => gradient,
        };
        let delivery = lock(&self.shared.sink).clone();
        if let Some(Delivery { sink, first_position, undelivered }) = delivery
            && undelivered != Some(index)
            && let Ok(values) = download(sum.clone())
            && sink.deliver(first_position + index, &values)
        {
            return;
        }
        lock(&self.shared.gradients)[index] = Some(sum);
    }

    /// Copies the values to the flat layout `out`. Fails if the length differs.
    pub fn read(&self, out: &mut [f32]) -> Result<()> {
        self.read_part(0..self.specs().len(), out)
    }

    /// Copies the values of some parameters, by index, to their part of the flat layout. Fails if the range or length
    /// is wrong.
    pub fn read_part(&self, which: Range<usize>, out: &mut [f32]) -> Result<()> {
        self.check_len(&which, out.len())?;
        let values = match &self.shared.storage {
            ParameterStorage::Replicated(values) => lock(values).clone(),
            ParameterStorage::Sharded(sharded) => return sharded.read(which, out),
        };
        #[cfg(feature = "libtorch")]
        if let Some(gpu) = gpu::Gpu::of(&self.shared.device) {
            let lengths = self.lengths(which.clone());
            let values: Vec<_> = values[which].iter().map(|value| Some(value.clone())).collect();
            return gpu.download(values, &lengths, out, |out, values| out.copy_from_slice(values));
        }
        for (value, out) in values[which.clone()].iter().zip(self.split_mut(which, out)) {
            out.copy_from_slice(&download(value.clone())?);
        }
        Ok(())
    }

    /// Replaces the values by those of the flat layout. Fails if the length differs.
    pub fn write(&self, values: &[f32]) -> Result<()> {
        self.write_part(0..self.specs().len(), values)
    }

    /// Replaces the values of some parameters, by index, by their part of the flat layout. Fails if the range or length
    /// is wrong.
    pub fn write_part(&self, which: Range<usize>, values: &[f32]) -> Result<()> {
        self.check_len(&which, values.len())?;
        let mut current = match &self.shared.storage {
            ParameterStorage::Replicated(values) => lock(values),
            ParameterStorage::Sharded(sharded) => {
                sharded.write(which, values);
                return Ok(());
            }
        };
        // A snapshot keeps the old list, which holds handles, not copies of values.
        let list = Arc::make_mut(&mut current);
        #[cfg(feature = "libtorch")]
        if let Some(gpu) = gpu::Gpu::of(&self.shared.device) {
            let lengths = self.lengths(which.clone());
            // Empty tensors are not passed on; they have nothing to replace.
            return gpu.upload(&lengths, values, |index, value| list[which.start + index] = value);
        }
        let mut rest = values;
        for (value, spec) in list[which.clone()].iter_mut().zip(&self.specs()[which]) {
            let (head, tail) = rest.split_at(spec.len());
            rest = tail;
            *value = upload(head.to_vec(), &self.shared.device);
        }
        Ok(())
    }

    /// Adds the gradients to `add_into` (the flat layout) and clears them.
    pub fn take_gradients(&self, add_into: &mut [f32]) -> Result<()> {
        self.take_gradients_part(0..self.specs().len(), add_into)
    }

    /// Adds the gradients of some parameters, by index, to their part of the flat layout, and clears them.
    pub fn take_gradients_part(&self, which: Range<usize>, add_into: &mut [f32]) -> Result<()> {
        self.check_len(&which, add_into.len())?;
        #[cfg(feature = "libtorch")]
        if let Some(gpu) = gpu::Gpu::of(&self.shared.device) {
            let lengths = self.lengths(which.clone());
            let gradients: Vec<_> = lock(&self.shared.gradients)[which].iter_mut().map(Option::take).collect();
            let add = |out: &mut [f32], values: &[f32]| out.iter_mut().zip(values).for_each(|(o, g)| *o += g);
            return gpu.download(gradients, &lengths, add_into, add);
        }
        for (index, out) in which.clone().zip(self.split_mut(which, add_into)) {
            if let Some(gradient) = self.take_gradient(index) {
                out.iter_mut().zip(download(gradient)?).for_each(|(o, g)| *o += g);
            }
        }
        Ok(())
    }

    /// Clears the gradients.
    pub fn clear_gradients(&self) {
        lock(&self.shared.gradients).fill(None);
    }

    fn take_gradient(&self, index: usize) -> Option<Tensor<1>> {
        lock(&self.shared.gradients)[index].take()
    }

    #[cfg(feature = "libtorch")]
    fn lengths(&self, which: Range<usize>) -> Vec<usize> {
        self.specs()[which].iter().map(ParameterSpec::len).collect()
    }

    /// The slice of each of the parameters `which` in their part of the flat layout.
    fn split_mut<'a>(&'a self, which: Range<usize>, mut flat: &'a mut [f32]) -> impl Iterator<Item = &'a mut [f32]> {
        self.shared.specs[which].iter().map(move |spec| {
            let (head, tail) = std::mem::take(&mut flat).split_at_mut(spec.len());
            flat = tail;
            head
        })
    }

    /// Fails unless `which` is a range of parameters that have `found` elements.
    fn check_len(&self, which: &Range<usize>, found: usize) -> Result<()> {
        let specs = self.specs().get(which.clone()).ok_or_else(|| {
            Error::shape("parameters", format!("[{}]", self.specs().len()), &[which.start, which.end])
        })?;
        let expected: usize = specs.iter().map(ParameterSpec::len).sum();
        if found != expected {
            return Err(Error::shape("flat parameters", format!("[{expected}]"), &[found]));
        }
        Ok(())
    }
}

impl Snapshot {
    /// The parameters of which this is a snapshot.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// Converts the matrices whose names start with `prefix` to `dtype`, once for many passes that are not recorded. The
    /// result takes memory of its own unless the dtype is f32. Sharded parameters stay as they are.
    pub fn with_matrices_in(self, dtype: DType, prefix: &str) -> Self {
        let SnapshotValues::All(values) = &self.values else { return self };
        if dtype == DType::F32 {
            return self;
        }
        let is_converted = |spec: &ParameterSpec| spec.shape.len() == 2 && spec.name.starts_with(prefix);
        let converted = self.parameters.specs().iter().zip(values.iter());
        let converted = converted.map(|(spec, value)| match is_converted(spec) {
            true => value.clone().cast(dtype),
            false => value.clone(),
        });
        Self { values: SnapshotValues::All(Arc::new(converted.collect())), ..self }
    }

    /// Returns the parameters whose names start with `prefix`, on the device. Sharded parameters are all-gathered, and
    /// freed when the returned value is dropped; replicated ones are shared at no cost. Fails if sharded parameters
    /// were written since the snapshot.
    pub fn segment(&self, prefix: &str) -> Result<ParameterSegment> {
        let device = self.parameters.device();
        let values = match &self.values {
            SnapshotValues::All(values) => SegmentValues::All(values.clone()),
            SnapshotValues::Sharded(sharded, version) => {
                let gathered = sharded.segment(prefix, *version)?;
                SegmentValues::Gathered(gathered.into_iter().map(|(i, values)| (i, upload(values, device))).collect())
            }
        };
        Ok(ParameterSegment { parameters: self.parameters.clone(), prefix: prefix.into(), values })
    }
}

impl ParameterSegment {
    /// The parameters of which this is a segment.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// Index, shape and value of a parameter of this segment.
    pub fn get(&self, name: &str) -> Option<(usize, &[usize], &Tensor<1>)> {
        let index = self.parameters.position(name)?;
        Some((index, &self.parameters.specs()[index].shape, self.value(index)?))
    }

    /// Iterates over index, spec and value of each parameter of this segment.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &ParameterSpec, &Tensor<1>)> {
        let specs = self.parameters.specs().iter().enumerate();
        specs.filter_map(|(i, spec)| Some((i, spec, self.value(i)?)))
    }

    fn value(&self, index: usize) -> Option<&Tensor<1>> {
        match &self.values {
            SegmentValues::All(values) if self.parameters.specs()[index].name.starts_with(&self.prefix) => {
                values.get(index)
            }
            SegmentValues::All(_) => None,
            SegmentValues::Gathered(values) => values.get(&index),
        }
    }
}

fn upload(values: Vec<f32>, device: &Device) -> Tensor<1> {
    let n = values.len();
    Tensor::from_data(TensorData::new(values, [n]), (device, DType::F32))
}

/// Removes the tensor from any autodiff graph.
fn detached(tensor: Tensor<1>) -> Tensor<1> {
    if tensor.device().is_autodiff() { tensor.inner() } else { tensor }
}

fn download(tensor: Tensor<1>) -> Result<Vec<f32>> {
    detached(tensor)
        .into_data()
        .try_into_vec::<f32>()
        .map_err(|e| Error::Misuse(format!("reading a parameter back from its device: {e:?}")))
}
