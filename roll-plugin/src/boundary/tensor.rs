//! Tensors and videos across the boundary: copied only if they cannot be retained.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::Arc;

use crate::abi::{NO_TENSOR, RollList, RollNamedTensor, RollOwned, RollStr, RollTensor, RollVideo};

use super::memory::{list, own, slice, take as take_list, text};
use super::panics::quietly;
use super::source::Source;
use super::wire::{Answer, Lend};
use crate::{DType, Error, Result, StateDict, Target, Tensor, Video};

const DTYPES: [DType; 7] = [DType::F32, DType::Bf16, DType::F16, DType::I64, DType::I32, DType::U8, DType::Bool];

/// Most axes that a tensor of the other side may claim.
const MAX_RANK: usize = 16;

/// Keeps a tensor of the other side alive.
struct ForeignBytes {
    data: *const u8,
    bytes: usize,
    owner: *mut c_void,
    release: Option<unsafe extern "C" fn(*mut c_void)>,
}

// SAFETY: P2: it may be released on any thread, and until then the bytes do not change.
unsafe impl Send for ForeignBytes {}
// SAFETY: as above.
unsafe impl Sync for ForeignBytes {}

impl AsRef<[u8]> for ForeignBytes {
    fn as_ref(&self) -> &[u8] {
        match self.bytes {
            0 => &[],
            // SAFETY: checked when it was made; alive until `release`.
            bytes => unsafe { std::slice::from_raw_parts(self.data, bytes) },
        }
    }
}

impl Drop for ForeignBytes {
    fn drop(&mut self) {
        if let Some(release) = self.release {
            // SAFETY: P2: this is one owner.
            unsafe { release(self.owner) };
        }
    }
}

unsafe extern "C" fn retain_tensor(owner: *mut c_void) {
    // SAFETY: `owner` came from `Arc::into_raw` in `share`.
    unsafe { Arc::increment_strong_count(owner.cast::<Tensor>().cast_const()) }
}

unsafe extern "C" fn release_tensor(owner: *mut c_void) {
    // SAFETY: as above; P2.
    quietly(|| drop(unsafe { Arc::from_raw(owner.cast::<Tensor>().cast_const()) }));
}

/// An owner of `tensor`'s bytes.
pub(super) fn share(tensor: &Tensor) -> RollTensor {
    let shared = Arc::new(tensor.clone());
    let (data, bytes) = (shared.as_bytes().as_ptr(), shared.as_bytes().len());
    let (shape, rank) = (shared.shape().as_ptr(), shared.shape().len());
    let dtype = DTYPES.iter().position(|d| *d == tensor.dtype()).unwrap_or_default() as u32;
    let owner = Arc::into_raw(shared).cast_mut().cast();
    RollTensor { data, bytes, shape, rank, dtype, owner, retain: Some(retain_tensor), release: Some(release_tensor) }
}

/// As [`share`]; nothing has the dtype [`NO_TENSOR`].
pub(super) fn share_option(tensor: Option<&Tensor>) -> RollTensor {
    tensor.map_or_else(RollTensor::none, share)
}

/// Takes over a result.
///
/// # Safety
/// P2 and P9.
pub(super) unsafe fn take(tensor: RollTensor) -> Result<Tensor> {
    let keep = ForeignBytes { data: tensor.data, bytes: tensor.bytes, owner: tensor.owner, release: tensor.release };
    // SAFETY: as the caller promises; an error drops `keep`, which releases.
    let (dtype, shape) = unsafe { dtype_and_shape(&tensor) }?;
    Tensor::from_bytes(dtype, shape, Arc::new(keep))
}

/// As [`take`].
///
/// # Safety
/// As there.
pub(super) unsafe fn take_option(tensor: RollTensor) -> Result<Option<Tensor>> {
    match tensor.dtype {
        NO_TENSOR => Ok(None),
        // SAFETY: as the caller promises.
        _ => unsafe { take(tensor) }.map(Some),
    }
}

/// Keeps an argument: shares the bytes when it can be retained, else copies them.
///
/// # Safety
/// P1 and P9.
pub(super) unsafe fn receive(tensor: &RollTensor) -> Result<Tensor> {
    match tensor.retain {
        Some(retain) => {
            // SAFETY: the tensor is alive; from here on one owner is ours.
            unsafe {
                retain(tensor.owner);
                take(*tensor)
            }
        }
        None => {
            // SAFETY: as the caller promises.
            let (copy, (dtype, shape)) =
                unsafe { (slice(tensor.data, tensor.bytes)?.to_vec(), dtype_and_shape(tensor)?) };
            Tensor::from_bytes(dtype, shape, Arc::new(copy))
        }
    }
}

/// As [`receive`].
///
/// # Safety
/// As there.
pub(super) unsafe fn receive_option(tensor: &RollTensor) -> Result<Option<Tensor>> {
    match tensor.dtype {
        NO_TENSOR => Ok(None),
        // SAFETY: as the caller promises.
        _ => unsafe { receive(tensor) }.map(Some),
    }
}

/// # Safety
/// P9.
unsafe fn dtype_and_shape(tensor: &RollTensor) -> Result<(DType, Vec<usize>)> {
    let dtype = *DTYPES
        .get(tensor.dtype as usize)
        .ok_or_else(|| Error::Misuse(format!("a tensor's dtype is {}, which does not exist", tensor.dtype)))?;
    if tensor.rank > MAX_RANK {
        return Err(Error::Misuse(format!("a tensor has {} axes, more than {MAX_RANK}", tensor.rank)));
    }
    // SAFETY: as the caller promises.
    let shape = unsafe { slice(tensor.shape, tensor.rank) }?.to_vec();
    if tensor.data.is_null() && tensor.bytes > 0 {
        return Err(Error::Misuse(format!("a tensor of shape {shape:?} has no data")));
    }
    Ok((dtype, shape))
}

/// A tensor lent for one call.
pub(super) struct LentTensor(RollTensor);

impl LentTensor {
    pub(super) fn new(tensor: &Tensor) -> Self {
        Self(share(tensor))
    }

    pub(super) fn option(tensor: &Option<Tensor>) -> Option<Self> {
        tensor.as_ref().map(Self::new)
    }

    pub(super) fn get(&self) -> RollTensor {
        self.0
    }

    /// Nothing has the dtype [`NO_TENSOR`].
    pub(super) fn get_option(lent: &Option<Self>) -> RollTensor {
        lent.as_ref().map_or_else(RollTensor::none, Self::get)
    }
}

impl Drop for LentTensor {
    fn drop(&mut self) {
        // SAFETY: made by `share`, released once.
        unsafe { release_tensor(self.0.owner) };
    }
}

impl Lend for Tensor {
    type Wire = *const RollTensor;
    type Lent = LentTensor;
    type Received = Tensor;
    fn lend(&self) -> LentTensor {
        LentTensor::new(self)
    }
    fn wire(lent: &mut LentTensor) -> *const RollTensor {
        &raw const lent.0
    }
    unsafe fn receive(wire: *const RollTensor) -> Result<Tensor> {
        // SAFETY: as the caller promises.
        unsafe { receive(&*wire) }
    }
}

impl Answer for Tensor {
    type Wire = RollTensor;
    fn give(self) -> RollTensor {
        share(&self)
    }
    unsafe fn take(wire: RollTensor, _: &Source) -> Result<Self> {
        // SAFETY: as the caller promises.
        unsafe { take(wire) }
    }
}

/// # Safety
/// P1 and P9.
pub(super) unsafe fn receive_video(video: &RollVideo) -> Result<Video> {
    // SAFETY: as the caller promises.
    Video::new(unsafe { receive(&video.frames) }?, video.fps)
}

impl Lend for Video {
    type Wire = *const RollVideo;
    type Lent = (LentTensor, RollVideo);
    type Received = Video;
    fn lend(&self) -> (LentTensor, RollVideo) {
        let lent = LentTensor::new(self.frames());
        let video = RollVideo { frames: lent.get(), fps: self.fps() };
        (lent, video)
    }
    fn wire((_, video): &mut (LentTensor, RollVideo)) -> *const RollVideo {
        video
    }
    unsafe fn receive(wire: *const RollVideo) -> Result<Video> {
        // SAFETY: as the caller promises.
        unsafe { receive_video(&*wire) }
    }
}

/// Named tensors that are lent; the names stay with the caller.
pub(super) struct LentTensors {
    list: Vec<RollNamedTensor>,
    _tensors: Vec<LentTensor>,
}

impl LentTensors {
    pub(super) fn new(named: &StateDict) -> Self {
        let tensors: Vec<LentTensor> = named.values().map(LentTensor::new).collect();
        let item =
            |(name, lent): (&String, &LentTensor)| RollNamedTensor { name: RollStr::lend(name), tensor: lent.get() };
        Self { list: named.keys().zip(&tensors).map(item).collect(), _tensors: tensors }
    }

    pub(super) fn list(&self) -> RollList<RollNamedTensor> {
        RollList::lend(&self.list)
    }
}

/// # Safety
/// P1 and P9.
pub(super) unsafe fn receive_tensors(named: &[RollNamedTensor]) -> Result<StateDict> {
    // SAFETY: as the caller promises.
    named.iter().map(|n| unsafe { Ok((text(n.name)?.to_string(), receive(&n.tensor)?)) }).collect()
}

fn own_tensors(named: StateDict) -> RollOwned<RollNamedTensor> {
    let LentTensors { list, _tensors } = LentTensors::new(&named);
    // `list` points into both.
    own(list, (_tensors, named))
}

/// Types that are named tensors and nothing else.
macro_rules! named_tensors {
    ($( $ty:ty: |$value:ident| $tensors:expr, |$named:ident| $made:expr; )*) => {$(
        impl Lend for $ty {
            type Wire = RollList<RollNamedTensor>;
            type Lent = LentTensors;
            type Received = $ty;
            fn lend(&self) -> LentTensors {
                let $value = self;
                #[allow(clippy::needless_borrow)] // one of the two is a reference already
                LentTensors::new(&$tensors)
            }
            fn wire(lent: &mut LentTensors) -> RollList<RollNamedTensor> {
                lent.list()
            }
            unsafe fn receive(wire: RollList<RollNamedTensor>) -> Result<$ty> {
                // SAFETY: as the caller promises.
                let $named = unsafe { receive_tensors(list(wire)?) }?;
                Ok($made)
            }
        }
        impl Answer for $ty {
            type Wire = RollOwned<RollNamedTensor>;
            fn give(self) -> RollOwned<RollNamedTensor> {
                let $value = self;
                own_tensors($tensors)
            }
            unsafe fn take(wire: RollOwned<RollNamedTensor>, _: &Source) -> Result<$ty> {
                // SAFETY: as the caller promises; the items live until the list is released.
                let $named = unsafe { take_list(wire, |items| receive_tensors(items)) }?;
                Ok($made)
            }
        }
    )*};
}

named_tensors! {
    BTreeMap<String, Tensor>: |state| state, |tensors| tensors;
    Target: |target| target.tensors, |tensors| Target::of(tensors);
}
