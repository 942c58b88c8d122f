//! Rows: the clips and prompts that a run trains on or evaluates.
//!
//! [`DataConfig`] is the section `data`. [`Metadata`] reads the table that the section names. [`Dataset`] joins the
//! table with the files of the rows, which are decoded when they are needed. [`Batches`] decides which samples an
//! optimizer step uses on which rank. Start reading at [`Dataset`] (`dataset.rs`).
//!
//! A new column gets its meaning in `metadata/mod.rs`. Its files are read in `dataset.rs`, and the notes on its use are
//! in `task/rows.rs` and `task/notes.rs`.

mod batches;
mod buckets;
mod config;
mod dataset;
mod metadata;
mod prefetch;
mod windows;

pub use batches::{Batch, Batches};
pub use buckets::Bucket;
pub use config::{CacheDir, DataConfig, OnBadSample, Windows};
pub use dataset::Dataset;
pub use metadata::{Metadata, MetadataRow, RowColumns, Window};
