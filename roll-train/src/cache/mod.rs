//! `data.cache_dir`: encodings of prompts and clips, and the rewards' targets, kept beyond a run.
//!
//! Model and reward are wrapped; algorithms see no difference. What is kept is found by what it was computed from: the
//! networks, their settings, and the input, pixel by pixel.

mod model;
mod reward;
mod store;

pub use model::CachedModel;
pub use reward::CachedReward;
pub use store::CacheStore;
