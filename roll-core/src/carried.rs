//! Values that contain tensors, as text for a message: the text has a number in place of each [`Tensor`], and a
//! [`TensorCarrier`] holds the tensors of these numbers. So a message is a text and a list of tensors.
//!
//! serde passes nothing but the value to `serialize`. The carrier is therefore a variable of the thread while one value
//! is written or read ([`with_carrier`]), as in Servo's `ipc-channel`.

use std::cell::RefCell;
use std::rc::Rc;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de, ser};

use crate::{Error, Result, Tensor};

/// Holds the tensors of a value while the value is written to text, or read from it.
pub trait TensorCarrier {
    /// Adds a tensor and returns its number.
    fn put(&self, tensor: &Tensor) -> Result<usize>;

    /// The tensor of this number. Fails for a number without a tensor.
    fn get(&self, number: usize) -> Result<Tensor>;
}

thread_local! {
    static CARRIER: RefCell<Option<Rc<dyn TensorCarrier>>> = const { RefCell::new(None) };
}

/// Restores the carrier of the call around this one when it is dropped, also after a panic.
struct RestoreOnDrop(Option<Rc<dyn TensorCarrier>>);

impl Drop for RestoreOnDrop {
    fn drop(&mut self) {
        CARRIER.set(self.0.take());
    }
}

/// Runs `f`. Tensors that this thread writes or reads meanwhile are put into `carrier`, or taken from it.
pub fn with_carrier<R>(carrier: Rc<dyn TensorCarrier>, f: impl FnOnce() -> R) -> R {
    let _restore = RestoreOnDrop(CARRIER.replace(Some(carrier)));
    f()
}

/// The carrier of this thread. Fails outside of [`with_carrier`], because a tensor cannot be written as text alone.
fn carrier() -> Result<Rc<dyn TensorCarrier>> {
    let no_carrier = || Error::Misuse("a tensor is written and read only beside a message".into());
    CARRIER.with_borrow(Clone::clone).ok_or_else(no_carrier)
}

/// Converts an error of roll to serde's error of writing.
fn write_error<E: ser::Error>(error: Error) -> E {
    E::custom(crate::one_line(&error))
}

/// Converts an error of roll to serde's error of reading.
fn read_error<E: de::Error>(error: Error) -> E {
    E::custom(crate::one_line(&error))
}

impl Serialize for Tensor {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let number = carrier().and_then(|carrier| carrier.put(self)).map_err(write_error)?;
        serializer.serialize_u64(number as u64)
    }
}

impl<'de> Deserialize<'de> for Tensor {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let number = usize::deserialize(deserializer)?;
        carrier().and_then(|carrier| carrier.get(number)).map_err(read_error)
    }
}

/// For `#[serde(with)]`: a list of f32 as a tensor. As text it would be long, and values that are not finite have no
/// JSON.
pub(crate) mod list {
    use super::*;

    pub fn serialize<S: Serializer>(values: &[f32], serializer: S) -> Result<S::Ok, S::Error> {
        let tensor = Tensor::new(values.to_vec(), [values.len()]);
        tensor.map_err(write_error)?.serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<f32>, D::Error> {
        let tensor = Tensor::deserialize(deserializer)?;
        tensor.f32s().map(<[f32]>::to_vec).map_err(read_error)
    }
}

/// For `#[serde(with)]`: the value of an [`Arc`](std::sync::Arc), as if it were not shared.
pub(crate) mod shared {
    use std::sync::Arc;

    use super::*;

    pub fn serialize<T: Serialize, S: Serializer>(value: &Arc<T>, serializer: S) -> Result<S::Ok, S::Error> {
        value.as_ref().serialize(serializer)
    }

    pub fn deserialize<'de, T: Deserialize<'de>, D: Deserializer<'de>>(deserializer: D) -> Result<Arc<T>, D::Error> {
        T::deserialize(deserializer).map(Arc::new)
    }
}

/// For `#[serde(with)]`: a path as text, in which bytes that are not UTF-8 are replaced.
pub(crate) mod path {
    use std::path::PathBuf;

    use super::*;

    pub fn serialize<S: Serializer>(path: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
        path.as_ref().map(|path| path.to_string_lossy()).serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<PathBuf>, D::Error> {
        Ok(Option::<String>::deserialize(deserializer)?.map(PathBuf::from))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Held(RefCell<Vec<Tensor>>);

    impl TensorCarrier for Held {
        fn put(&self, tensor: &Tensor) -> Result<usize> {
            self.0.borrow_mut().push(tensor.clone());
            Ok(self.0.borrow().len() - 1)
        }
        fn get(&self, number: usize) -> Result<Tensor> {
            self.0.borrow().get(number).cloned().ok_or_else(|| Error::Misuse(format!("there is no tensor {number}")))
        }
    }

    #[test]
    fn a_tensor_crosses_beside_the_text_and_not_alone() {
        let tensors = [Tensor::full([2], 1.5), Tensor::zeros([3])];
        assert!(serde_json::to_string(&tensors).is_err() && serde_json::from_str::<Tensor>("0").is_err());
        let held: Rc<Held> = Rc::default();
        let text = with_carrier(held.clone(), || serde_json::to_string(&tensors)).unwrap();
        assert_eq!(text, "[0,1]");
        let read = |text: &str| with_carrier(held.clone(), || serde_json::from_str::<Vec<Tensor>>(text));
        let back = read("[1,0]").unwrap();
        // The bytes themselves, not a copy.
        assert_eq!(back[1].as_bytes().as_ptr(), tensors[0].as_bytes().as_ptr());
        assert!(read("[2]").unwrap_err().to_string().contains("there is no tensor 2"));
        assert!(serde_json::to_string(&tensors).is_err(), "the carrier belongs to one value");
    }
}
