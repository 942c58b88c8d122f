//! Weight stores of networks that share one slot on the device: only one network is there at a time.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use burn_tensor::Device;
use roll_core::Result;

use super::{Resident, WeightStore, Weights};
use crate::sync::lock;

/// The slot on the device for one of several networks, e.g. experts that a trajectory uses one after the other. When
/// a network outside the slot is used, the weights in the slot are freed first; then the network's weights are loaded.
#[derive(Default)]
pub struct DeviceSlot {
    /// The number and weights of the network on the device.
    loaded: Mutex<Option<(usize, Resident)>>,
}

/// The weights of one network of a [`DeviceSlot`].
pub struct Swapped {
    slot: Arc<DeviceSlot>,
    number: usize,
    device: Device,
    shapes: BTreeMap<String, Vec<usize>>,
    load: Box<dyn Fn() -> Result<Resident> + Send + Sync>,
}

impl DeviceSlot {
    /// Adds a network with the unique `number` and weights of these shapes, which `load` loads to `device`.
    pub fn store(
        self: &Arc<Self>,
        number: usize,
        shapes: BTreeMap<String, Vec<usize>>,
        device: &Device,
        load: impl Fn() -> Result<Resident> + Send + Sync + 'static,
    ) -> Swapped {
        Swapped { slot: self.clone(), number, device: device.clone(), shapes, load: Box::new(load) }
    }
}

impl WeightStore for Swapped {
    fn segment(&self, prefix: &str) -> Result<Weights> {
        let mut loaded = lock(&self.slot.loaded);
        if let Some((number, resident)) = &*loaded
            && *number == self.number
        {
            return resident.segment(prefix);
        }
        // Frees the other network before this one is loaded.
        *loaded = None;
        let resident = (self.load)()?;
        let weights = resident.segment(prefix)?;
        *loaded = Some((self.number, resident));
        Ok(weights)
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn shape(&self, key: &str) -> Option<Vec<usize>> {
        self.shapes.get(key).cloned()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use burn_tensor::DType;
    use roll_core::{Error, StateDict, Tensor};

    use super::*;

    #[test]
    fn one_network_at_a_time_is_loaded_when_it_is_used() {
        let device = crate::device("flex").unwrap();
        let slot = Arc::new(DeviceSlot::default());
        let loads = Arc::new(AtomicUsize::new(0));
        let [first, second] = [0, 1].map(|number| {
            let state = StateDict::from([("b.0.w".to_string(), Tensor::full([3], number as f32))]);
            let shapes = BTreeMap::from([("b.0.w".to_string(), vec![3])]);
            let (at, loads) = (device.clone(), loads.clone());
            slot.store(number, shapes, &device, move || {
                loads.fetch_add(1, Ordering::SeqCst);
                Ok(Resident::new(&state, DType::F32, &at))
            })
        });
        let value = |store: &Swapped| {
            let values = store.segment("b.0.").unwrap()["b.0.w"].f32::<1>().unwrap().into_data();
            values.try_into_vec::<f32>().unwrap()[0]
        };
        assert_eq!([value(&first), value(&first), value(&second), value(&second)], [0.0, 0.0, 1.0, 1.0]);
        assert_eq!((value(&first), loads.load(Ordering::SeqCst)), (0.0, 3));
        assert_eq!(second.shape("b.0.w"), Some(vec![3]));
        let broken = slot.store(2, BTreeMap::new(), &device, || Err(Error::Misuse("no such file".into())));
        assert!(broken.segment("b.0.").is_err());
        assert_eq!(value(&first), 0.0);
    }
}
