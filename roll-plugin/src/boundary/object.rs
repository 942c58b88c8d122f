//! Objects across the boundary: objects of this side, which the other side calls ([`Loan`], [`Gift`]), and objects of
//! the other side ([`Remote`]). P1 to P9 are the numbers of the contract in [`crate::abi`].

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de, ser};

use crate::abi::{FAILED, NO_METHOD, OK, RollMessage, RollObject, RollStr};

use super::error::Failure;
use super::memory::text;
use super::message::{Answer, Incoming, NamedArguments, Outgoing, put_object, take_object};
use super::panics::{catch, quietly};
use super::source::Source;
use crate::{Error, Result};

/// The answer to a call. `None`: the object has no such method.
pub(super) type Answered = Result<Option<Outgoing>>;

/// As [`Answered`], with an error in the form in which it crosses the boundary.
pub(super) type AnswerOrFailure = Result<Option<Outgoing>, Failure>;

/// Writes the result of `f` to `answer` and returns the status of the call. A panic of `f` becomes an error.
///
/// # Safety
/// P7.
pub(super) unsafe fn respond(answer: *mut RollMessage, f: impl FnOnce() -> AnswerOrFailure) -> u32 {
    let result = catch(f).unwrap_or_else(|panic| Err(Error::Misuse(panic).into()));
    let (status, message) = match result {
        Ok(Some(message)) => (OK, message),
        Ok(None) => return NO_METHOD,
        // A failure consists of texts, which can always be written as JSON. The case without an answer never happens.
        Err(failure) => match Outgoing::of(&failure) {
            Ok(message) => (FAILED, message),
            Err(_) => return FAILED,
        },
    };
    // SAFETY: P7.
    unsafe { answer.write(message.give()) };
    status
}

/// The message of an object's panic, if it panicked. A panic may leave the object's state half changed, so the object
/// is not called again (P5).
#[derive(Clone, Default)]
struct Poison(Arc<Mutex<Option<String>>>);

impl Poison {
    fn set(&self, panic: &str) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic.into());
    }

    fn check(&self) -> Result<()> {
        match &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            None => Ok(()),
            Some(panic) => Err(Error::Misuse(format!("it is not called again because of an earlier panic: {panic}"))),
        }
    }
}

thread_local! {
    /// The poison of the object that this thread serves now, for [`Gift::part`].
    static SERVING: RefCell<Option<Poison>> = const { RefCell::new(None) };
}

/// An object of this side, whose methods the other side calls.
struct Served<'a> {
    methods: Methods<'a>,
    poison: Poison,
}

/// The function that answers the methods of an object.
enum Methods<'a> {
    /// Called by one thread at a time (P4); a second one gets an error.
    Exclusive(Mutex<Box<dyn FnMut(&str, &Incoming) -> Answered + 'a>>),
    /// Called by several threads at once.
    Shared(Box<dyn Fn(&str, &Incoming) -> Answered + Sync + 'a>),
}

impl Served<'_> {
    fn answer(&self, method: &str, arguments: &Incoming) -> AnswerOrFailure {
        self.poison.check()?;
        // Calls may nest, because an object that is served may call the other side, which may call another object here.
        let outer = SERVING.replace(Some(self.poison.clone()));
        // The conversion of an error is inside `catch`: its `Display` and `Drop` may be code of the object, which may
        // panic.
        let result = catch(|| self.call_method(method, arguments).map_err(Failure::from));
        SERVING.set(outer);
        result.unwrap_or_else(|panic| {
            self.poison.set(&panic);
            Err(Error::Misuse(panic).into())
        })
    }

    fn call_method(&self, method: &str, arguments: &Incoming) -> Answered {
        match &self.methods {
            Methods::Shared(answer) => answer(method, arguments),
            Methods::Exclusive(answer) => match answer.try_lock() {
                Ok(mut answer) => answer(method, arguments),
                Err(TryLockError::Poisoned(answer)) => (answer.into_inner())(method, arguments),
                Err(TryLockError::WouldBlock) => {
                    Err(Error::Misuse(format!("`{method}` was called while another call of the object goes on")))
                }
            },
        }
    }

    /// The object in the form in which it is lent: without `release`.
    fn as_lent(&self) -> RollObject {
        RollObject { state: std::ptr::from_ref(self).cast_mut().cast(), call: Some(call), release: None }
    }
}

/// [`RollObject::call`] of every object of this side.
unsafe extern "C" fn call(
    state: *mut c_void,
    method: RollStr,
    arguments: *const RollMessage,
    answer: *mut RollMessage,
) -> u32 {
    let body = || -> AnswerOrFailure {
        // SAFETY: P1, P2 and P9: `state` is of `Served::as_lent` or `Gift`, whose lifetimes the contract keeps.
        let (served, method, arguments) =
            unsafe { (&*state.cast::<Served<'_>>(), text(method)?, Incoming::lent(arguments, Source::Host)?) };
        served.answer(method, &arguments)
    };
    // SAFETY: P7.
    unsafe { respond(answer, body) }
}

/// [`RollObject::release`] of an object that the other side owns.
unsafe extern "C" fn release(state: *mut c_void) {
    // SAFETY: P2, and made by `into_raw` in `Gift`.
    quietly(|| drop(unsafe { Box::from_raw(state.cast::<Served<'static>>()) }));
}

/// An object of this side that is lent to the other side as long as this value lives (P1).
pub(super) struct Loan<'a>(Box<Served<'a>>);

impl<'a> Loan<'a> {
    /// Lends an object that one thread at a time calls.
    pub(super) fn exclusive(answer: impl FnMut(&str, &Incoming) -> Answered + 'a) -> Self {
        let methods = Methods::Exclusive(Mutex::new(Box::new(answer)));
        Self(Box::new(Served { methods, poison: Poison::default() }))
    }

    /// Lends an object that several threads may call at once.
    pub(super) fn shared(answer: impl Fn(&str, &Incoming) -> Answered + Sync + 'a) -> Self {
        Self(Box::new(Served { methods: Methods::Shared(Box::new(answer)), poison: Poison::default() }))
    }
}

impl Serialize for Loan<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let number = put_object(self.0.as_lent()).map_err(ser::Error::custom)?;
        serializer.serialize_u64(number as u64)
    }
}

/// An object of this side whose ownership passes to the other side with the message that it is written in (P2). The
/// cell is empty once the object has been written.
pub(super) struct Gift(Cell<Option<Box<Served<'static>>>>);

impl Gift {
    fn new(methods: Methods<'static>, poison: Poison) -> Self {
        Self(Cell::new(Some(Box::new(Served { methods, poison }))))
    }

    /// An object that one thread at a time calls.
    pub(super) fn exclusive(answer: impl FnMut(&str, &Incoming) -> Answered + Send + 'static) -> Self {
        Self::new(Methods::Exclusive(Mutex::new(Box::new(answer))), Poison::default())
    }

    /// An object that several threads may call at once.
    pub(super) fn shared(answer: impl Fn(&str, &Incoming) -> Answered + Send + Sync + 'static) -> Self {
        Self::new(Methods::Shared(Box::new(answer)), Poison::default())
    }

    /// As [`Gift::shared`], for a part of the object that this thread serves: a panic of the part also poisons the
    /// object.
    pub(super) fn part(answer: impl Fn(&str, &Incoming) -> Answered + Send + Sync + 'static) -> Self {
        Self::new(Methods::Shared(Box::new(answer)), SERVING.with_borrow(Clone::clone).unwrap_or_default())
    }
}

impl Serialize for Gift {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let served = self.0.take().ok_or_else(|| ser::Error::custom("an object was given away twice"))?;
        let object = RollObject { release: Some(release), ..served.as_lent() };
        // From here on the message owns the object, and then its receiver, who frees it by `release`.
        let state = Box::into_raw(served).cast();
        let number = put_object(RollObject { state, ..object }).map_err(ser::Error::custom)?;
        serializer.serialize_u64(number as u64)
    }
}

/// An object of the other side, lent or owned. Dropping an owned object releases it. Errors of calls name the plugin.
pub(super) struct Remote {
    object: RollObject,
    pub(super) source: Source,
}

// SAFETY: P4: an object may be called from any thread, one at a time.
unsafe impl Send for Remote {}

impl Remote {
    /// Wraps an object, and takes over its ownership if it is not lent.
    ///
    /// # Safety
    /// The object is ours (P2), or lent (P1) and outlives the result.
    pub(super) unsafe fn new(object: RollObject, source: Source) -> Self {
        Self { object, source }
    }

    /// Calls a method. Returns `None` if the object has no such method.
    pub(super) fn call(&self, method: &'static str, arguments: &NamedArguments<'_>) -> Result<Option<Incoming>> {
        // A plugin in C may leave the function null.
        let function = self.object.call.ok_or_else(|| Error::Misuse("an object has no function".into()));
        let function = self.blame(method, function)?;
        let message = self.blame(method, Outgoing::arguments(arguments))?;
        let mut answer = RollMessage::empty();
        // Dropped at the end of this function.
        let _entered = self.source.entered(method);
        // SAFETY: P1 and P7; the object is not released.
        let status = unsafe { function(self.object.state, RollStr::lend(method), &message.lend(), &mut answer) };
        message.disown_objects();
        if status == NO_METHOD {
            return Ok(None);
        }
        // SAFETY: P2 and P9.
        let answer = self.blame(method, unsafe { Incoming::owned(answer, self.source.clone()) })?;
        match status {
            OK => Ok(Some(answer)),
            _ => Err(self.source.failure(method, answer.read())),
        }
    }

    /// Calls a method and reads the answer. Returns `None` if the object has no such method.
    pub(super) fn ask<A: Answer>(&self, method: &'static str, arguments: &NamedArguments<'_>) -> Result<Option<A>> {
        let Some(answer) = self.call(method, arguments)? else { return Ok(None) };
        self.blame(method, A::take(&answer)).map(Some)
    }

    /// Calls a method and reads the answer. Fails if the object has no such method.
    pub(super) fn call_required<A: Answer>(&self, method: &'static str, arguments: &NamedArguments<'_>) -> Result<A> {
        self.ask(method, arguments)?.ok_or_else(|| self.lacks(method))
    }

    /// The error of an object without a method that it must have.
    pub(super) fn lacks(&self, method: &'static str) -> Error {
        self.source.blame(method, Error::Misuse(format!("it has no method `{method}`")))
    }

    /// Adds plugin, file and method to an error of `result`.
    pub(super) fn blame<R>(&self, method: &'static str, result: Result<R>) -> Result<R> {
        result.map_err(|e| self.source.blame(method, e))
    }
}

impl<'de> Deserialize<'de> for Remote {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let (object, source) = take_object(usize::deserialize(deserializer)?).map_err(de::Error::custom)?;
        // SAFETY: P1 or P2: the object is in the arguments of the present call, or in an answer.
        Ok(unsafe { Self::new(object, source) })
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        // SAFETY: P2, as the caller of `new` promised.
        unsafe { self.source.release(self.object) };
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::mpsc::channel;

    use super::super::remote::ReceivedList;
    use super::*;
    use crate::Tensor;

    /// The object as the other side has it.
    pub(in super::super) fn across(gift: Gift) -> Remote {
        // SAFETY: an own answer.
        unsafe { Incoming::owned(Outgoing::of(&gift).unwrap().give(), Source::Host) }.unwrap().read().unwrap()
    }

    /// The object without a method, as an older side has it.
    pub(in super::super) fn without(missing: &'static str, gift: Gift) -> Remote {
        let served = gift.0.take().unwrap();
        struct Sendable(Box<Served<'static>>);
        // SAFETY: all objects that are given away may move between threads.
        unsafe impl Send for Sendable {}
        let whole = Sendable(served);
        across(Gift::exclusive(move |method, message| {
            let whole = &whole;
            if method == missing { Ok(None) } else { whole.0.answer(method, message).map_err(Failure::error) }
        }))
    }

    /// Reports its drop.
    struct Dropped(Arc<Mutex<u32>>);

    impl Drop for Dropped {
        fn drop(&mut self) {
            *self.0.lock().unwrap() += 1;
        }
    }

    #[test]
    fn what_nobody_takes_is_released_once() {
        let drops = Arc::new(Mutex::new(0));
        let gift = |drops: &Arc<Mutex<u32>>| {
            let dropped = Dropped(drops.clone());
            Gift::exclusive(move |_, _| {
                let _ = &dropped;
                Ok(None)
            })
        };
        let count = || std::mem::take(&mut *drops.lock().unwrap());
        // Never written, written and never sent, sent and not taken, taken.
        drop(gift(&drops));
        assert_eq!(count(), 1);
        drop(Outgoing::of(&gift(&drops)).unwrap());
        assert_eq!(count(), 1);
        let message = Outgoing::of(&[gift(&drops), gift(&drops)]).unwrap();
        // SAFETY: an own answer.
        drop(unsafe { Incoming::owned(message.give(), Source::Host) });
        assert_eq!(count(), 2);
        let remote = across(gift(&drops));
        assert_eq!(count(), 0);
        drop(remote);
        assert_eq!(count(), 1);
    }

    #[test]
    fn tensors_of_an_answer_are_shared_and_given_up() {
        let bytes = Arc::new(vec![0u8; 8]);
        let tensor = Tensor::from_bytes(crate::DType::F32, [2], bytes.clone()).unwrap();
        let message = Outgoing::of(&(tensor.clone(), tensor)).unwrap();
        // SAFETY: an own answer.
        let answer = unsafe { Incoming::owned(message.give(), Source::Host) }.unwrap();
        let (first, second): (Tensor, Tensor) = answer.read().unwrap();
        assert!(answer.read::<(Tensor, Tensor)>().unwrap_err().to_string().contains("names it twice"));
        assert!([&first, &second].iter().all(|tensor| tensor.as_bytes().as_ptr() == bytes.as_ptr()));
        drop((first, second, answer));
        let message = Outgoing::of(&Tensor::from_bytes(crate::DType::F32, [2], bytes.clone()).unwrap()).unwrap();
        // SAFETY: as above; nothing is read.
        drop(unsafe { Incoming::owned(message.give(), Source::Host) });
        assert_eq!(Arc::strong_count(&bytes), 1);
    }

    /// An error whose words panic.
    #[derive(Debug)]
    struct Unspeakable;

    impl std::fmt::Display for Unspeakable {
        fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            panic!("no words")
        }
    }

    impl std::error::Error for Unspeakable {}

    #[test]
    fn a_panic_in_the_words_of_an_error_is_a_panic_of_the_object() {
        let theirs = across(Gift::exclusive(|_, _| Err(Error::component(crate::Fault::Failure, Unspeakable))));
        let error = theirs.call_required::<()>("speak", &[]).unwrap_err().to_string();
        assert!(error.contains("no words"), "{error}");
        let error = theirs.call_required::<()>("speak", &[]).unwrap_err().to_string();
        assert!(error.contains("not called again") && error.contains("no words"), "{error}");
    }

    #[test]
    fn a_list_is_lent_once() {
        let theirs = across(Gift::exclusive(|_, message| {
            let _: (ReceivedList, ReceivedList) = message.read()?;
            Outgoing::of(&()).map(Some)
        }));
        let mut values = [0.5f32; 2];
        let list = super::super::remote::Argument::lend(&mut values[..]);
        let message = Outgoing::of(&list).unwrap();
        let mut lent = message.lend();
        lent.body = RollStr::lend("[0,0]");
        let mut answer = RollMessage::empty();
        // SAFETY: P1 and P7: the message lives to the end of the call.
        let status =
            unsafe { theirs.object.call.unwrap()(theirs.object.state, RollStr::lend("add"), &lent, &mut answer) };
        assert_eq!(status, FAILED);
        // SAFETY: P2.
        let answer = unsafe { Incoming::owned(answer, Source::Host) }.unwrap();
        let error = Source::Host.failure("add", answer.read()).to_string();
        assert!(error.contains("names it twice"), "{error}");
    }

    #[test]
    fn a_second_call_while_one_goes_on_is_refused() {
        let ((begun, has_begun), (end, may_end)) = (channel(), channel::<()>());
        let first = across(Gift::exclusive(move |method, _| {
            if method == "wait" {
                begun.send(()).unwrap();
                may_end.recv().unwrap();
            }
            Outgoing::of(&()).map(Some)
        }));
        // SAFETY: lent: `first` lives to the end.
        let second = unsafe { Remote::new(RollObject { release: None, ..first.object }, Source::Host) };
        let waiting = std::thread::spawn(move || first.call_required::<()>("wait", &[]).map(|()| first));
        has_begun.recv().unwrap();
        let error = second.call_required::<()>("hurry", &[]).unwrap_err();
        assert!(error.to_string().contains("while another call of the object goes on"), "{error}");
        end.send(()).unwrap();
        let first = waiting.join().unwrap().unwrap();
        assert!(second.call_required::<()>("hurry", &[]).is_ok());
        drop(first);
    }
}
