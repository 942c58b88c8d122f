//! Messages: a value as JSON, and beside it the tensors and objects that the text refers to by number.
//!
//! Values are written and read by serde. Tensors ([`TensorCarrier`]), objects and lists that are lent find the message
//! that they belong to through their thread.
//!
//! P1 to P9 are the numbers of the contract in [`crate::abi`].

use std::cell::RefCell;
use std::ffi::c_void;
use std::rc::Rc;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::abi::{RollMessage, RollObject, RollStr, RollTensor};

use super::memory::{slice, text};
use super::panics::quietly;
use super::source::Source;
use super::tensor;
use crate::{Error, Result, Tensor, TensorCarrier, with_carrier};

/// Tensors and objects of a message that is being written.
#[derive(Default)]
struct Written {
    tensors: RefCell<Vec<RollTensor>>,
    objects: RefCell<Vec<RollObject>>,
}

/// Tensors and objects of a message of the other side; those that were taken out are `None`.
struct Received {
    tensors: RefCell<Vec<Option<RollTensor>>>,
    objects: RefCell<Vec<Option<RollObject>>>,
    /// Whether the tensors belong to the reader (P2), or are lent (P1).
    owned: bool,
    source: Source,
}

/// The message that a thread is at.
#[derive(Clone)]
enum Current {
    Written(Rc<Written>),
    Received(Rc<Received>),
}

thread_local! {
    static CURRENT: RefCell<Option<Current>> = const { RefCell::new(None) };
}

/// Puts the former message back, after a panic too.
struct Outer(Option<Current>);

impl Drop for Outer {
    fn drop(&mut self) {
        CURRENT.set(self.0.take());
    }
}

/// Runs `f`, which writes or reads values of the message.
fn within<R>(current: Current, f: impl FnOnce() -> R) -> R {
    let carrier: Rc<dyn TensorCarrier> = match current.clone() {
        Current::Written(parts) => parts,
        Current::Received(parts) => parts,
    };
    let _outer = Outer(CURRENT.replace(Some(current)));
    with_carrier(carrier, f)
}

fn misplaced(what: &str) -> Error {
    Error::Misuse(format!("{what} is written and read only in a message"))
}

fn push<T>(list: &RefCell<Vec<T>>, item: T) -> usize {
    let mut list = list.borrow_mut();
    list.push(item);
    list.len() - 1
}

fn written() -> Result<Rc<Written>> {
    CURRENT.with_borrow(|current| match current {
        Some(Current::Written(parts)) => Ok(parts.clone()),
        _ => Err(misplaced("an object of this side")),
    })
}

fn received() -> Result<Rc<Received>> {
    CURRENT.with_borrow(|current| match current {
        Some(Current::Received(parts)) => Ok(parts.clone()),
        _ => Err(misplaced("an object of the other side")),
    })
}

/// Adds an object to the message that this thread writes, and returns its number.
pub(super) fn put_object(object: RollObject) -> Result<usize> {
    Ok(push(&written()?.objects, object))
}

/// Adds a list that is lent, as a tensor.
pub(super) fn put_list(list: RollTensor) -> Result<usize> {
    Ok(push(&written()?.tensors, list))
}

/// Takes an object out of the message that this thread reads: it belongs to the caller now (P2), or is lent (P1).
pub(super) fn take_object(number: usize) -> Result<(RollObject, Source)> {
    let parts = received()?;
    let object = parts.objects.borrow_mut().get_mut(number).and_then(Option::take);
    let missing = || Error::Misuse(format!("the message has no object {number}, or names it twice"));
    Ok((object.ok_or_else(missing)?, parts.source.clone()))
}

/// Takes out the place and length of a list that is lent.
pub(super) fn lent_list(number: usize) -> Result<(*mut f32, usize)> {
    let parts = received()?;
    let list = *at(&parts.tensors.borrow(), number)?;
    // Taken out: nothing else may refer to a list that is filled in.
    parts.tensors.borrow_mut()[number] = None;
    // SAFETY: P1 and P9: the message is that of the call under way.
    let found = unsafe { tensor::list_of(&list) };
    if parts.owned {
        // SAFETY: P2: it was taken out of the list.
        unsafe { tensor::release(&list) };
        return Err(Error::Misuse("an answer cannot lend a list".into()));
    }
    found
}

fn at(tensors: &[Option<RollTensor>], number: usize) -> Result<&RollTensor> {
    let missing = || Error::Misuse(format!("the message has no tensor {number}, or names it twice"));
    tensors.get(number).and_then(Option::as_ref).ok_or_else(missing)
}

impl TensorCarrier for Written {
    fn put(&self, tensor: &Tensor) -> Result<usize> {
        Ok(push(&self.tensors, tensor::share(tensor)))
    }
    fn get(&self, _: usize) -> Result<Tensor> {
        Err(misplaced("a tensor"))
    }
}

impl TensorCarrier for Received {
    fn put(&self, _: &Tensor) -> Result<usize> {
        Err(misplaced("a tensor"))
    }
    fn get(&self, number: usize) -> Result<Tensor> {
        let tensor = *at(&self.tensors.borrow(), number)?;
        if !self.owned {
            // SAFETY: P1 and P9: the message is that of the call under way.
            return unsafe { tensor::receive(&tensor) };
        }
        self.tensors.borrow_mut()[number] = None;
        // SAFETY: P2 and P9; it was taken out of the list.
        unsafe { tensor::take(tensor) }
    }
}

/// A value that serde can write, whatever its type.
pub(super) trait Write {
    fn write(&self, body: &mut Vec<u8>) -> serde_json::Result<()>;
}

impl<T: Serialize + ?Sized> Write for T {
    fn write(&self, body: &mut Vec<u8>) -> serde_json::Result<()> {
        serde_json::to_writer(body, self)
    }
}

/// Arguments of a call, by name.
pub(super) type Named<'a> = [(&'static str, &'a dyn Write)];

/// A message of this side.
pub(super) struct Outgoing {
    body: Vec<u8>,
    parts: Rc<Written>,
}

impl Outgoing {
    /// The arguments of a call. They may point into the values, which live until it is over.
    pub(super) fn arguments(named: &Named<'_>) -> Result<Self> {
        Self::written(|body| {
            body.push(b'{');
            for (position, (name, value)) in named.iter().enumerate() {
                if position > 0 {
                    body.push(b',');
                }
                name.write(body)?;
                body.push(b':');
                value.write(body)?;
            }
            body.push(b'}');
            Ok(())
        })
    }

    /// A message of one value.
    pub(super) fn of(value: &impl Serialize) -> Result<Self> {
        Self::written(|body| value.write(body))
    }

    fn written(write: impl FnOnce(&mut Vec<u8>) -> serde_json::Result<()>) -> Result<Self> {
        let mut message = Self { body: Vec::with_capacity(128), parts: Rc::default() };
        let written = within(Current::Written(message.parts.clone()), || write(&mut message.body));
        written.map_err(|e| Error::Misuse(format!("a value cannot be written as a message: {e}")))?;
        Ok(message)
    }

    /// The message as arguments, for a call (P1).
    pub(super) fn lend(&self) -> RollMessage {
        let (tensors, objects) = (self.parts.tensors.borrow(), self.parts.objects.borrow());
        RollMessage {
            body: RollStr { data: self.body.as_ptr(), len: self.body.len() },
            tensors: tensors.as_ptr(),
            tensor_count: tensors.len(),
            objects: objects.as_ptr(),
            object_count: objects.len(),
            ..RollMessage::empty()
        }
    }

    /// The call was made: its objects belong to the callee (P2).
    pub(super) fn sent(self) {
        self.parts.objects.take();
    }

    /// The message as an answer, which belongs to the caller (P2).
    pub(super) fn give(mut self) -> RollMessage {
        type Kept = (Vec<u8>, Vec<RollTensor>, Vec<RollObject>);
        unsafe extern "C" fn release(owner: *mut c_void) {
            // SAFETY: P2, and made by `into_raw` below. It frees the text and the lists only: each tensor and object
            // belongs to the reader.
            quietly(|| drop(unsafe { Box::from_raw(owner.cast::<Kept>()) }));
        }
        let kept: Box<Kept> =
            Box::new((std::mem::take(&mut self.body), self.parts.tensors.take(), self.parts.objects.take()));
        let (body, tensors, objects) = &*kept;
        RollMessage {
            body: RollStr { data: body.as_ptr(), len: body.len() },
            tensors: tensors.as_ptr(),
            tensor_count: tensors.len(),
            objects: objects.as_ptr(),
            object_count: objects.len(),
            owner: Box::into_raw(kept).cast(),
            release: Some(release),
        }
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        for tensor in self.parts.tensors.take() {
            // SAFETY: made by `share`, or without a `release`; the receiver retained what it keeps.
            unsafe { tensor::release(&tensor) };
        }
        for object in self.parts.objects.take() {
            // SAFETY: P2: it was never sent.
            unsafe { Source::Host.release(object) };
        }
    }
}

/// A message of the other side.
pub(super) struct Incoming {
    message: RollMessage,
    parts: Rc<Received>,
}

impl Incoming {
    /// The arguments of a call.
    ///
    /// # Safety
    /// P1 and P9; the message outlives the result.
    pub(super) unsafe fn lent(message: *const RollMessage, source: Source) -> Result<Self> {
        // SAFETY: as the caller promises.
        let message = unsafe { message.as_ref() }.copied().unwrap_or(RollMessage::empty());
        // SAFETY: as the caller promises. A message that is lent has no `release` for its reader.
        unsafe { Self::new(RollMessage { release: None, ..message }, source, false) }
    }

    /// An answer.
    ///
    /// # Safety
    /// P2 and P9.
    pub(super) unsafe fn owned(message: RollMessage, source: Source) -> Result<Self> {
        // SAFETY: as the caller promises.
        unsafe { Self::new(message, source, true) }
    }

    /// # Safety
    /// P1 or P2, and P9.
    unsafe fn new(message: RollMessage, source: Source, owned: bool) -> Result<Self> {
        let (tensors, objects) = (RefCell::default(), RefCell::default());
        // Whatever follows, it is released when it is dropped.
        let own = Self { message, parts: Rc::new(Received { tensors, objects, owned, source }) };
        // SAFETY: as the caller promises.
        unsafe {
            let tensors = slice(message.tensors, message.tensor_count)?;
            *own.parts.tensors.borrow_mut() = tensors.iter().copied().map(Some).collect();
            let objects = slice(message.objects, message.object_count)?;
            *own.parts.objects.borrow_mut() = objects.iter().copied().map(Some).collect();
            text(message.body)?;
        }
        Ok(own)
    }

    fn body(&self) -> &str {
        // SAFETY: P1 or P2, and P9: as it was promised for this message, which lives as long as this value.
        unsafe { text(self.message.body) }.unwrap_or_default()
    }

    /// The value of the text; an empty text is null. Arguments are a structure with a field for each.
    pub(super) fn read<T: DeserializeOwned>(&self) -> Result<T> {
        let body = if self.body().is_empty() { "null" } else { self.body() };
        let read = within(Current::Received(self.parts.clone()), || serde_json::from_str(body));
        read.map_err(|e| Error::Misuse(format!("a message is not JSON of the expected kind: {e}")))
    }
}

/// The result of a method. It belongs to the caller (P2).
pub(super) trait Answer: Sized {
    fn give(self) -> impl Serialize;

    fn take(message: &Incoming) -> Result<Self>;
}

impl Drop for Incoming {
    fn drop(&mut self) {
        for tensor in self.parts.tensors.take().into_iter().flatten().filter(|_| self.parts.owned) {
            // SAFETY: P2: nobody took it.
            unsafe { tensor::release(&tensor) };
        }
        for object in self.parts.objects.take().into_iter().flatten() {
            // SAFETY: P1 or P2: nobody took it.
            unsafe { self.parts.source.release(object) };
        }
        if let Some(release) = self.message.release {
            // SAFETY: P2.
            unsafe { release(self.message.owner) };
        }
    }
}
