//! Messages: a value as JSON, and next to it the tensors and objects that the JSON refers to by number.
//!
//! Values are written and read by serde. When serde reaches a tensor ([`TensorCarrier`]), an object or a list that is
//! lent, its implementation finds the message that it belongs to in a variable of the thread ([`CURRENT`]).
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
struct PartsToSend {
    tensors: RefCell<Vec<RollTensor>>,
    objects: RefCell<Vec<RollObject>>,
}

/// Tensors and objects of a message of the other side. `None`: it was taken out.
struct ReceivedParts {
    tensors: RefCell<Vec<Option<RollTensor>>>,
    objects: RefCell<Vec<Option<RollObject>>>,
    /// Ownership of the tensors. An object says itself whether it is lent ([`take_object`]).
    ownership: Ownership,
    /// The other side.
    source: Source,
}

/// The owner of the tensors of a message of the other side.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ownership {
    /// The other side: the message has arguments, which are lent for the call (P1).
    Lent,
    /// The reader: the message is an answer (P2).
    Owned,
}

/// The message whose value a thread is writing or reading.
#[derive(Clone)]
enum Current {
    Written(Rc<PartsToSend>),
    Read(Rc<ReceivedParts>),
}

thread_local! {
    static CURRENT: RefCell<Option<Current>> = const { RefCell::new(None) };
}

/// Makes the previous message current again when this value is dropped, also by a panic.
struct RestorePrevious(Option<Current>);

impl Drop for RestorePrevious {
    fn drop(&mut self) {
        CURRENT.set(self.0.take());
    }
}

/// Runs `f`, which writes or reads the value of the message `current`.
fn within<R>(current: Current, f: impl FnOnce() -> R) -> R {
    let carrier: Rc<dyn TensorCarrier> = match current.clone() {
        Current::Written(parts) => parts,
        Current::Read(parts) => parts,
    };
    let _restore = RestorePrevious(CURRENT.replace(Some(current)));
    with_carrier(carrier, f)
}

fn misplaced(what: &str) -> Error {
    Error::Misuse(format!("{what} is written and read only in a message"))
}

/// Adds an item and returns its number.
fn push<T>(list: &RefCell<Vec<T>>, item: T) -> usize {
    let mut list = list.borrow_mut();
    list.push(item);
    list.len() - 1
}

/// The parts of the message that this thread writes.
fn parts_to_send() -> Result<Rc<PartsToSend>> {
    CURRENT.with_borrow(|current| match current {
        Some(Current::Written(parts)) => Ok(parts.clone()),
        _ => Err(misplaced("an object of this side")),
    })
}

/// The parts of the message that this thread reads.
fn received_parts() -> Result<Rc<ReceivedParts>> {
    CURRENT.with_borrow(|current| match current {
        Some(Current::Read(parts)) => Ok(parts.clone()),
        _ => Err(misplaced("an object of the other side")),
    })
}

/// Adds an object to the message that this thread writes, and returns its number.
pub(super) fn put_object(object: RollObject) -> Result<usize> {
    Ok(push(&parts_to_send()?.objects, object))
}

/// Adds a list that is lent for the call to the message that this thread writes, as a tensor, and returns its number.
pub(super) fn put_list(list: RollTensor) -> Result<usize> {
    Ok(push(&parts_to_send()?.tensors, list))
}

/// Takes an object out of the message that this thread reads. If it has a `release`, it belongs to the caller now (P2);
/// otherwise it is lent (P1).
pub(super) fn take_object(number: usize) -> Result<(RollObject, Source)> {
    let parts = received_parts()?;
    let object = parts.objects.borrow_mut().get_mut(number).and_then(Option::take);
    let missing = || Error::Misuse(format!("the message has no object {number}, or names it twice"));
    Ok((object.ok_or_else(missing)?, parts.source.clone()))
}

/// Takes a lent list out of the message that this thread reads. Returns the list's address and length.
pub(super) fn take_lent_list(number: usize) -> Result<(*mut f32, usize)> {
    let parts = received_parts()?;
    let list = *tensor_at(&parts.tensors.borrow(), number)?;
    // Taken out, because the callee may write to the list. While it does, nothing else may refer to the bytes.
    parts.tensors.borrow_mut()[number] = None;
    // SAFETY: P1 and P9: the message has the arguments of the present call.
    let address_and_length = unsafe { tensor::borrowed_list(&list) };
    if parts.ownership == Ownership::Owned {
        // SAFETY: P2. The list was taken out of the message: nobody else releases it.
        unsafe { tensor::release(&list) };
        return Err(Error::Misuse("an answer cannot lend a list".into()));
    }
    address_and_length
}

fn tensor_at(tensors: &[Option<RollTensor>], number: usize) -> Result<&RollTensor> {
    let missing = || Error::Misuse(format!("the message has no tensor {number}, or names it twice"));
    tensors.get(number).and_then(Option::as_ref).ok_or_else(missing)
}

impl TensorCarrier for PartsToSend {
    fn put(&self, tensor: &Tensor) -> Result<usize> {
        Ok(push(&self.tensors, tensor::share(tensor)))
    }
    fn get(&self, _: usize) -> Result<Tensor> {
        Err(misplaced("a tensor"))
    }
}

impl TensorCarrier for ReceivedParts {
    fn put(&self, _: &Tensor) -> Result<usize> {
        Err(misplaced("a tensor"))
    }
    fn get(&self, number: usize) -> Result<Tensor> {
        let tensor = *tensor_at(&self.tensors.borrow(), number)?;
        if self.ownership == Ownership::Lent {
            // SAFETY: P1 and P9: the message has the arguments of the present call.
            return unsafe { tensor::receive(&tensor) };
        }
        self.tensors.borrow_mut()[number] = None;
        // SAFETY: P2 and P9. The tensor was taken out of the message: nobody else releases it.
        unsafe { tensor::take(tensor) }
    }
}

/// A value of any type that serde can write; the object-safe form of [`Serialize`].
pub(super) trait Write {
    fn write(&self, body: &mut Vec<u8>) -> serde_json::Result<()>;
}

impl<T: Serialize + ?Sized> Write for T {
    fn write(&self, body: &mut Vec<u8>) -> serde_json::Result<()> {
        serde_json::to_writer(body, self)
    }
}

/// Arguments of a call, by name.
pub(super) type NamedArguments<'a> = [(&'static str, &'a dyn Write)];

/// A message that this side writes: the arguments of a call, or an answer.
pub(super) struct Outgoing {
    body: Vec<u8>,
    parts: Rc<PartsToSend>,
}

impl Outgoing {
    /// Writes the arguments of a call. The message may point into their values, so they must live until the call is
    /// over.
    pub(super) fn arguments(named: &NamedArguments<'_>) -> Result<Self> {
        Self::with_body(|body| {
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

    /// Writes a message of one value.
    pub(super) fn of(value: &impl Serialize) -> Result<Self> {
        Self::with_body(|body| value.write(body))
    }

    /// The message whose body `write` appends to an empty list of bytes. The tensors and objects that it writes are the
    /// parts of the message.
    fn with_body(write: impl FnOnce(&mut Vec<u8>) -> serde_json::Result<()>) -> Result<Self> {
        /// First allocation of a body, in bytes.
        const INITIAL_CAPACITY: usize = 128;
        let mut message = Self { body: Vec::with_capacity(INITIAL_CAPACITY), parts: Rc::default() };
        let result = within(Current::Written(message.parts.clone()), || write(&mut message.body));
        result.map_err(|e| Error::Misuse(format!("a value cannot be written as a message: {e}")))?;
        Ok(message)
    }

    /// The message as the arguments of a call (P1).
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

    /// Ends the ownership of the objects in the arguments. Once the call was made, the callee owns them (P2), and this
    /// message must not release them.
    pub(super) fn disown_objects(self) {
        self.parts.objects.take();
    }

    /// The message as an answer, which belongs to the caller (P2).
    pub(super) fn give(mut self) -> RollMessage {
        type Owner = (Vec<u8>, Vec<RollTensor>, Vec<RollObject>);
        unsafe extern "C" fn release(owner: *mut c_void) {
            // SAFETY: P2, and made by `into_raw` below. This frees the text and the two lists only: each tensor and
            // object in them belongs to the reader.
            quietly(|| drop(unsafe { Box::from_raw(owner.cast::<Owner>()) }));
        }
        let owner: Box<Owner> =
            Box::new((std::mem::take(&mut self.body), self.parts.tensors.take(), self.parts.objects.take()));
        let (body, tensors, objects) = &*owner;
        RollMessage {
            body: RollStr { data: body.as_ptr(), len: body.len() },
            tensors: tensors.as_ptr(),
            tensor_count: tensors.len(),
            objects: objects.as_ptr(),
            object_count: objects.len(),
            owner: Box::into_raw(owner).cast(),
            release: Some(release),
        }
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        for tensor in self.parts.tensors.take() {
            // SAFETY: P2: the tensor was made by `tensor::share`, or has no `release`. A receiver that keeps it has
            // retained it.
            unsafe { tensor::release(&tensor) };
        }
        for object in self.parts.objects.take() {
            // SAFETY: P2: the object was never sent.
            unsafe { Source::Host.release(object) };
        }
    }
}

/// A message of the other side: the arguments of a call, or an answer.
pub(super) struct Incoming {
    message: RollMessage,
    parts: Rc<ReceivedParts>,
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
        unsafe { Self::new(RollMessage { release: None, ..message }, source, Ownership::Lent) }
    }

    /// An answer.
    ///
    /// # Safety
    /// P2 and P9.
    pub(super) unsafe fn owned(message: RollMessage, source: Source) -> Result<Self> {
        // SAFETY: as the caller promises.
        unsafe { Self::new(message, source, Ownership::Owned) }
    }

    /// # Safety
    /// P1 or P2, and P9.
    unsafe fn new(message: RollMessage, source: Source, ownership: Ownership) -> Result<Self> {
        let (tensors, objects) = (RefCell::default(), RefCell::default());
        // Made before anything can fail, because its drop releases the message.
        let incoming = Self { message, parts: Rc::new(ReceivedParts { tensors, objects, ownership, source }) };
        // SAFETY: as the caller promises.
        unsafe {
            let tensors = slice(message.tensors, message.tensor_count)?;
            *incoming.parts.tensors.borrow_mut() = tensors.iter().copied().map(Some).collect();
            let objects = slice(message.objects, message.object_count)?;
            *incoming.parts.objects.borrow_mut() = objects.iter().copied().map(Some).collect();
            // Checks the text, which `body` then relies on.
            text(message.body)?;
        }
        Ok(incoming)
    }

    fn body(&self) -> &str {
        // SAFETY: P1 or P2, and P9: as the caller of `lent` or `owned` promised for this message.
        unsafe { text(self.message.body) }.unwrap_or_default()
    }

    /// Reads the value of the message. An empty text counts as null. Arguments are a structure with a field for each
    /// argument.
    pub(super) fn read<T: DeserializeOwned>(&self) -> Result<T> {
        let body = if self.body().is_empty() { "null" } else { self.body() };
        let result = within(Current::Read(self.parts.clone()), || serde_json::from_str(body));
        result.map_err(|e| Error::Misuse(format!("a message is not JSON of the expected kind: {e}")))
    }
}

/// The result of a method, as an answer that belongs to the caller (P2).
pub(super) trait Answer: Sized {
    /// Called side: the value that is written.
    fn give(self) -> impl Serialize;

    /// Calling side: reads the result.
    fn take(message: &Incoming) -> Result<Self>;
}

impl Drop for Incoming {
    fn drop(&mut self) {
        let tensors = self.parts.tensors.take();
        if self.parts.ownership == Ownership::Owned {
            for tensor in tensors.into_iter().flatten() {
                // SAFETY: P2: nobody took it.
                unsafe { tensor::release(&tensor) };
            }
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
