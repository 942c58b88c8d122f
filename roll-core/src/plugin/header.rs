//! What `include/roll_plugin.h` must say, for the test that compares the two.

use std::mem::offset_of;

use super::abi::{
    RollAbi, RollComponent, RollContext, RollError, RollHost, RollNamedNumber, RollNamedTensor, RollObject, RollOption,
    RollOwned, RollPlugin, RollPullback, RollStr, RollTensor,
};
use super::reward::{RollRewardFacts, RollRewardTable, RollScore, RollScoreInput, RollVideo};

/// A type of the header: its name, its size, and the offsets of its fields.
pub type HeaderType = (&'static str, usize, Vec<(&'static str, usize)>);

macro_rules! types {
    ($($c:literal $rust:ty { $($field:ident $(as $name:literal)?),+ $(,)? })+) => {
        vec![$((
            $c,
            size_of::<$rust>(),
            vec![$((types!(@name $field $($name)?), offset_of!($rust, $field))),+],
        )),+]
    };
    (@name $field:ident) => { stringify!($field) };
    (@name $field:ident $name:literal) => { $name };
}

/// Every type of the header as Rust lays it out.
pub fn header_layout() -> Vec<HeaderType> {
    types! {
        "roll_abi" RollAbi { magic, major, minor }
        "roll_str" RollStr { data, len }
        "roll_tensor" RollTensor { data, bytes, shape, rank, dtype, owner, retain, release }
        "roll_named_tensor" RollNamedTensor { name, tensor }
        "roll_named_number" RollNamedNumber { name, value }
        "roll_text" RollOwned<u8> { items, len, owner, release }
        "roll_tensors" RollOwned<RollNamedTensor> { items, len, owner, release }
        "roll_numbers" RollOwned<RollNamedNumber> { items, len, owner, release }
        "roll_error" RollError { fault, text }
        "roll_object" RollObject { state, table, release }
        "roll_pullback" RollPullback { state, pull, release }
        "roll_context" RollContext { backend, base_dir, seed }
        "roll_option" RollOption { name, kind, default as "default_json", about }
        "roll_component" RollComponent { kind, name, summary, options, option_count, data, make }
        "roll_plugin" RollPlugin { name, version, authors, about, components, component_count }
        "roll_host" RollHost { state, log, log_level }
        "roll_reward_facts" RollRewardFacts { name, differentiable, on_missing, missing_value }
        "roll_video" RollVideo { frames, fps }
        "roll_score_input" RollScoreInput { video, prompt, target, target_count, record }
        "roll_score" RollScore { missing, value, details, reason, pullback }
        "roll_reward_table" RollRewardTable { facts, prepare, score }
    }
}
