//! A reward, a model and a strategy whose tables are those of version 2.0: today's host has to load and run them.
//!
//! Written against the C types alone, so that nothing here changes with roll-core. Memory of answers is leaked: tests
//! are short.

#![allow(missing_docs)]
// SAFETY of every block below: the contract of `roll-abi`, which the host keeps.
#![allow(clippy::missing_safety_doc, clippy::undocumented_unsafe_blocks)]

use std::ffi::c_void;
use std::sync::Mutex;

use roll_abi::{
    OK, RollAbi, RollCommunicatorTable, RollComponent, RollContext, RollError, RollFile, RollHost, RollList,
    RollListMut, RollModelFacts, RollModelTable, RollNamedTensor, RollObject, RollOptimizer, RollOwned, RollParameter,
    RollPlugin, RollPullback, RollRanks, RollRewardFacts, RollRewardTable, RollScore, RollStr, RollStrategyReport,
    RollStrategyTable, RollTensor, RollVideo, StableTypes,
};

fn owned<T>(items: Vec<T>) -> RollOwned<T> {
    let items = Vec::leak(items);
    RollOwned { items: items.as_ptr(), len: items.len(), ..Default::default() }
}

fn tensor(values: Vec<f32>, shape: Vec<usize>) -> RollTensor {
    let (values, shape) = (Vec::leak(values), Vec::leak(shape));
    let (data, bytes) = (values.as_ptr().cast(), size_of_val(values));
    RollTensor { data, bytes, shape: shape.as_ptr(), rank: shape.len(), dtype: 0, ..Default::default() }
}

unsafe fn floats<'a>(tensor: &RollTensor) -> &'a [f32] {
    unsafe { std::slice::from_raw_parts(tensor.data.cast(), tensor.bytes / 4) }
}

/// Parameters and gradients of the model, and the strategy's accumulator.
struct State {
    values: [f32; 2],
    gradients: [f32; 2],
}

fn object<Table>(table: &'static Table) -> RollObject {
    let state = Box::new(Mutex::new(State { values: [1.0, 2.0], gradients: [0.25, 0.5] }));
    let table = std::ptr::from_ref(table).cast();
    RollObject { state: Box::into_raw(state).cast(), table, release: Some(release) }
}

unsafe extern "C" fn release(state: *mut c_void) {
    drop(unsafe { Box::from_raw(state.cast::<Mutex<State>>()) });
}

unsafe fn state<R>(state: *mut c_void, use_it: impl FnOnce(&mut State) -> R) -> R {
    use_it(&mut unsafe { &*state.cast::<Mutex<State>>() }.lock().unwrap_or_else(|e| e.into_inner()))
}

// The reward: the mean of the frames.

static REWARD: RollRewardTable = RollRewardTable {
    size: size_of::<RollRewardTable>(),
    facts: Some(facts),
    prepare: Some(prepare),
    score: Some(score),
    target_key: None,
};

unsafe extern "C" fn facts(_: *mut c_void, out: *mut RollRewardFacts, _: *mut RollError) -> u32 {
    let name = owned(b"old".to_vec());
    unsafe { out.write(RollRewardFacts { name, differentiable: 1, on_missing: 0, missing_value: 0.0 }) };
    OK
}

unsafe extern "C" fn prepare(
    _: *mut c_void,
    _: *const RollVideo,
    out: *mut RollOwned<RollNamedTensor>,
    _: *mut RollError,
) -> u32 {
    unsafe { out.write(RollOwned::default()) };
    OK
}

unsafe extern "C" fn score(
    _: *mut c_void,
    video: *const RollVideo,
    _: RollStr,
    _: RollList<RollNamedTensor>,
    record: u32,
    out: *mut RollScore,
    _: *mut RollError,
) -> u32 {
    let frames = unsafe { &(*video).frames };
    let values = unsafe { floats(frames) };
    let value = values.iter().map(|v| f64::from(*v)).sum::<f64>() / values.len() as f64;
    let shape = unsafe { std::slice::from_raw_parts(frames.shape, frames.rank) }.to_vec();
    let pullback = RollPullback { state: Box::into_raw(Box::new(shape)).cast(), pull: Some(pull), release: None };
    let pullback = if record == 1 { pullback } else { RollPullback::default() };
    unsafe { out.write(RollScore { value, pullback, ..Default::default() }) };
    OK
}

unsafe extern "C" fn pull(
    shape: *mut c_void,
    cotangent: *const RollTensor,
    out: *mut RollTensor,
    _: *mut RollError,
) -> u32 {
    let shape = unsafe { &*shape.cast::<Vec<usize>>() }.clone();
    let count = shape.iter().product::<usize>();
    let slope = unsafe { floats(&*cotangent) }[0] / count as f32;
    unsafe { out.write(tensor(vec![slope; count], shape)) };
    OK
}

// The model: two parameters.

static MODEL: RollModelTable = RollModelTable {
    size: size_of::<RollModelTable>(),
    facts: Some(model_facts),
    read_parameters: Some(read_parameters),
    write_parameters: Some(write_parameters),
    take_gradients: Some(take_gradients),
    export_adapter: Some(export_adapter),
    import_adapter: Some(import_adapter),
};

unsafe extern "C" fn model_facts(_: *mut c_void, out: *mut RollModelFacts, _: *mut RollError) -> u32 {
    let parameter = RollParameter { name: RollStr::lend("w"), shape: RollList::lend(&[2]) };
    unsafe { out.write(RollModelFacts { parameters: owned(vec![parameter]), ..Default::default() }) };
    OK
}

unsafe extern "C" fn read_parameters(own: *mut c_void, out: RollListMut<f32>, _: *mut RollError) -> u32 {
    unsafe { state(own, |s| std::slice::from_raw_parts_mut(out.items, out.len).copy_from_slice(&s.values)) };
    OK
}

unsafe extern "C" fn write_parameters(own: *mut c_void, values: RollList<f32>, _: *mut RollError) -> u32 {
    unsafe { state(own, |s| s.values.copy_from_slice(std::slice::from_raw_parts(values.items, values.len))) };
    OK
}

unsafe extern "C" fn take_gradients(own: *mut c_void, add_into: RollListMut<f32>, _: *mut RollError) -> u32 {
    let add_into = unsafe { std::slice::from_raw_parts_mut(add_into.items, add_into.len) };
    unsafe { state(own, |s| add_into.iter_mut().zip(&mut s.gradients).for_each(|(a, g)| *a += std::mem::take(g))) };
    OK
}

unsafe extern "C" fn export_adapter(own: *mut c_void, out: *mut RollOwned<RollFile>, _: *mut RollError) -> u32 {
    let values = unsafe { state(own, |s| s.values) };
    let named = RollNamedTensor { name: RollStr::lend("w"), tensor: tensor(values.to_vec(), vec![2]) };
    let tensors = RollList::lend(Vec::leak(vec![named]));
    unsafe { out.write(owned(vec![RollFile { name: RollStr::lend("adapter"), tensors }])) };
    OK
}

unsafe extern "C" fn import_adapter(_: *mut c_void, _: RollList<RollFile>, _: *mut RollError) -> u32 {
    OK
}

// The strategy: plain gradient descent on whatever model the host lends.

static STRATEGY: RollStrategyTable = RollStrategyTable {
    size: size_of::<RollStrategyTable>(),
    communicator: Some(communicator),
    attach: Some(attach),
    accumulate: Some(accumulate),
    discard: Some(discard),
    step: Some(step),
    state: Some(save),
    load_state: Some(load),
};

static RANKS: RollCommunicatorTable = RollCommunicatorTable {
    size: size_of::<RollCommunicatorTable>(),
    ranks: Some(ranks),
    all_reduce: Some(alone_mut),
    reduce_scatter: None,
    all_gather: None,
    broadcast: None,
    barrier: Some(alone),
};

unsafe extern "C" fn communicator(_: *mut c_void, out: *mut RollObject, _: *mut RollError) -> u32 {
    let table = std::ptr::from_ref(&RANKS).cast();
    unsafe { out.write(RollObject { state: std::ptr::null_mut(), table, release: None }) };
    OK
}

unsafe extern "C" fn ranks(_: *mut c_void, out: *mut RollRanks, _: *mut RollError) -> u32 {
    unsafe { out.write(RollRanks { rank: 0, size: 1 }) };
    OK
}

unsafe extern "C" fn alone_mut(_: *mut c_void, _: RollListMut<f32>, _: *mut RollError) -> u32 {
    OK
}

unsafe extern "C" fn alone(_: *mut c_void, _: *mut RollError) -> u32 {
    OK
}

unsafe extern "C" fn attach(own: *mut c_void, _: RollObject, _: *const RollOptimizer, _: *mut RollError) -> u32 {
    unsafe { state(own, |s| s.gradients = [0.0; 2]) };
    OK
}

/// The table of a model that the host lends; it may be longer than ours.
unsafe fn model_table(model: RollObject) -> RollModelTable {
    unsafe { roll_abi::read(model.table.cast()) }.unwrap_or_else(|_| std::process::abort())
}

unsafe extern "C" fn accumulate(own: *mut c_void, model: RollObject, error: *mut RollError) -> u32 {
    let take = unsafe { model_table(model) }.take_gradients.unwrap_or_else(|| std::process::abort());
    unsafe { state(own, |s| take(model.state, RollListMut::lend(&mut s.gradients), error)) }
}

unsafe extern "C" fn discard(own: *mut c_void, _: *mut RollError) -> u32 {
    unsafe { state(own, |s| s.gradients = [0.0; 2]) };
    OK
}

unsafe extern "C" fn step(
    own: *mut c_void,
    model: RollObject,
    learning_rate: f64,
    scale: f64,
    out: *mut RollStrategyReport,
    error: *mut RollError,
) -> u32 {
    let table = unsafe { model_table(model) };
    let (Some(read), Some(write)) = (table.read_parameters, table.write_parameters) else { std::process::abort() };
    let mut values = [0.0; 2];
    if unsafe { read(model.state, RollListMut::lend(&mut values), error) } != OK {
        return 1;
    }
    let gradients = unsafe { state(own, |s| std::mem::take(&mut s.gradients)) };
    for (value, gradient) in values.iter_mut().zip(gradients) {
        *value -= (learning_rate * scale) as f32 * gradient;
    }
    let norm = gradients.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
    unsafe { out.write(RollStrategyReport { grad_norm: norm, clipped: 0, applied: 1 }) };
    unsafe { write(model.state, RollList::lend(&values), error) }
}

unsafe extern "C" fn save(_: *mut c_void, out: *mut RollOwned<RollNamedTensor>, _: *mut RollError) -> u32 {
    unsafe { out.write(RollOwned::default()) };
    OK
}

unsafe extern "C" fn load(_: *mut c_void, _: RollList<RollNamedTensor>, _: *mut RollError) -> u32 {
    OK
}

// The plugin.

unsafe extern "C" fn make(
    kind: *const c_void,
    _: RollStr,
    context: *const RollContext,
    out: *mut RollObject,
    _: *mut RollError,
) -> u32 {
    // The host's context is longer than ours.
    assert!(unsafe { (*context).size } >= size_of::<RollContext>());
    let made = match kind as usize {
        1 => object(&REWARD),
        2 => object(&MODEL),
        _ => object(&STRATEGY),
    };
    unsafe { out.write(made) };
    OK
}

fn component(kind: usize) -> *const RollComponent {
    Box::leak(Box::new(RollComponent {
        size: size_of::<RollComponent>(),
        kind,
        name: RollStr::lend("old"),
        summary: RollStr::lend("Of version 2.0"),
        options: RollList::lend(&[]),
        data: kind as *const c_void,
        make: Some(make),
    }))
}

const _: () = {
    #[unsafe(no_mangle)]
    static roll_plugin_abi: RollAbi = RollAbi::CURRENT;

    #[unsafe(no_mangle)]
    static roll_plugin_types: StableTypes = StableTypes::CURRENT;

    #[unsafe(no_mangle)]
    unsafe extern "C" fn roll_plugin_init(_: *const RollHost, out: *mut *const RollPlugin, _: *mut RollError) -> u32 {
        let components = Vec::leak([1, 2, 3].map(component).to_vec());
        let plugin = RollPlugin {
            size: size_of::<RollPlugin>(),
            name: RollStr::lend("old_plugin"),
            version: RollStr::lend("0.1.0"),
            authors: RollStr::EMPTY,
            about: RollStr::EMPTY,
            components: RollList::lend(components),
        };
        unsafe { out.write(Box::leak(Box::new(plugin))) };
        OK
    }
};
