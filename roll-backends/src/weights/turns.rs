//! Networks of which only one is on the device at a time.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::Device;
use roll_core::Result;

use super::{Resident, WeightStore, Weights};

/// The slot on the device for one of several networks, e.g. experts that a trajectory uses one after the other. A
/// network's weights are loaded when it is used, after the other network's weights are freed.
#[derive(Default)]
pub struct Turns {
    here: Mutex<Option<(usize, Resident)>>,
}

/// One network of [`Turns`].
pub struct Turn {
    turns: Arc<Turns>,
    number: usize,
    device: Device,
    shapes: BTreeMap<String, Vec<usize>>,
    bring: Box<dyn Fn() -> Result<Resident> + Send + Sync>,
}

impl Turns {
    /// Adds a network with the unique `number` and weights of these shapes, which `bring` loads to `device`.
    pub fn turn(
        self: &Arc<Self>,
        number: usize,
        shapes: BTreeMap<String, Vec<usize>>,
        device: &Device,
        bring: impl Fn() -> Result<Resident> + Send + Sync + 'static,
    ) -> Turn {
        Turn { turns: self.clone(), number, device: device.clone(), shapes, bring: Box::new(bring) }
    }
}

impl WeightStore for Turn {
    fn segment(&self, prefix: &str) -> Result<Weights> {
        // After a panic the slot holds complete weights or nothing.
        let mut here = self.turns.here.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((number, resident)) = &*here
            && *number == self.number
        {
            return resident.segment(prefix);
        }
        // The other network is freed before this one is loaded.
        *here = None;
        let resident = (self.bring)()?;
        let weights = resident.segment(prefix)?;
        *here = Some((self.number, resident));
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

    use burn::tensor::DType;
    use roll_core::{Error, StateDict, Tensor};

    use super::*;

    #[test]
    fn one_network_is_there_at_a_time_and_is_brought_when_its_turn_comes() {
        let device = crate::device("flex").unwrap();
        let turns = Arc::new(Turns::default());
        let brought = Arc::new(AtomicUsize::new(0));
        let [first, second] = [0, 1].map(|number| {
            let state = StateDict::from([("b.0.w".to_string(), Tensor::full([3], number as f32))]);
            let shapes = BTreeMap::from([("b.0.w".to_string(), vec![3])]);
            let (at, brought) = (device.clone(), brought.clone());
            turns.turn(number, shapes, &device, move || {
                brought.fetch_add(1, Ordering::SeqCst);
                Ok(Resident::new(&state, DType::F32, &at))
            })
        });
        let value = |turn: &Turn| {
            let values = turn.segment("b.0.").unwrap()["b.0.w"].f32::<1>().unwrap().into_data();
            values.try_into_vec::<f32>().unwrap()[0]
        };
        assert_eq!([value(&first), value(&first), value(&second), value(&second)], [0.0, 0.0, 1.0, 1.0]);
        assert_eq!((value(&first), brought.load(Ordering::SeqCst)), (0.0, 3));
        assert_eq!(second.shape("b.0.w"), Some(vec![3]));
        let broken = turns.turn(2, BTreeMap::new(), &device, || Err(Error::Misuse("no such file".into())));
        assert!(broken.segment("b.0.").is_err());
        assert_eq!(value(&first), 0.0);
    }
}
